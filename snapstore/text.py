"""text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LOOK_CLOSER = re.compile(r"; run 'snapstore (?:check|repair)[^']*'(?: again)?")


def strip_hint(error: object) -> str:
    """What an error says, but not that one should look closer: for the reports of those who just do."""
    return _LOOK_CLOSER.sub("", str(error))


def counted(count: int, thing: str) -> str:
    """So many of a thing, whose plural ends in s."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def some(names: Sequence[str], most: int = 10) -> str:
    """The first few names of a list, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def human_bytes(count: float) -> str:
    """`count` bytes in the largest unit that keeps it above one: 999B, 3.2GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f}B" if unit == "B" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}TB"
