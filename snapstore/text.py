"""Text: words that errors and reports share, tables of HTML, and the log.

In: counts, names, sizes, errors and results. Out: the same wording for them everywhere. Pure functions, except the log.

Names are not trusted, whether they come from a repository, a file or a caller: a name with a line end or an escape
sequence would add lines to a message, or change the lines before it on a terminal. `printable` prevents that in the two
places through which all text passes: the base class of our errors, and the shell's output.
"""

from __future__ import annotations

import dataclasses
import html
import logging
import re
import reprlib
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

#: Characters of an argument in an error.
MOST_QUOTED = 200
#: Rows of a table in a notebook.
MOST_ROWS = 60
#: Looks at few members of a container: the repr of a whole state would take seconds.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxset = 4, 20, 20, 20, 20
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = MOST_QUOTED

_SIZE = re.compile(r"([0-9]{1,16})(?:\.([0-9]{1,6}))?([KMGTP]?)", re.ASCII)
_HINT = re.compile(r"; run 'snapstore (?:check|repair)[^']*'(?: again)?")


def strip_hint(error: object) -> str:
    """Return an error's message without its hint to run 'snapstore check' or 'repair', for reports of these two."""
    return _HINT.sub("", str(error))


def said(error: Exception) -> str:
    """Return what an error of the caller's code says, as one line.

    The text of a KeyError is only the key, and some errors have none: then this is `KeyError('step')`.
    """
    text = " ".join(str(error).split())
    return repr(error) if isinstance(error, KeyError) or not text else text


def printable(text: str) -> str:
    """Return a text as one line: every character that a terminal does not show as itself is escaped as in Python.

    These are control characters, line and paragraph separators, characters that change the direction of text, lone
    surrogates, and all spaces but U+0020. A byte of a path that cannot be decoded is shown as that byte.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    if "\udc80" <= character <= "\udcff":  # how Python keeps such a byte of a path
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def quoted(value: object) -> str:
    """Return the repr of an argument for an error, at most MOST_QUOTED characters of it: a state may be passed."""
    text = _SHORT.repr(value)
    return text if len(text) <= MOST_QUOTED else f"{text[: MOST_QUOTED - 3]}..."


def counted(count: int, thing: str) -> str:
    """Return a count with its noun: 1 pack, 3 packs. The plural must end in s."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def some(names: Sequence[str], most: int = 10) -> str:
    """Return the first names of a list, and how many more there are: a, b and 3 more."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def human_bytes(count: float) -> str:
    """Return `count` bytes in the largest unit in which it is at least one: 999B, 3.2GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f}B" if unit == "B" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}TB"


def size_in_bytes(text: str) -> int | None:
    """Return the bytes of a size such as `500M`, `10G` or `1.5TiB`; K, M, G, T and P are powers of 1024.

    None: the text is no size.
    """
    match = _SIZE.fullmatch(text.upper().removesuffix("B").removesuffix("I"))
    if match is None or (match[2] and not match[3]):
        return None
    fraction = match[2] or ""
    scaled = int(match[1] + fraction) << 10 * " KMGTP".index(match[3] or " ")
    return scaled // int(10 ** len(fraction))


def size_text(count: int) -> str:
    """Return the shortest text that `size_in_bytes` reads as `count`: 2T, 1536G, 1000."""
    power = next(power for power in (5, 4, 3, 2, 1, 0) if count % (1 << 10 * power) == 0)
    return f"{count >> 10 * power}{' KMGTP'[power].strip()}"


def brief(result: Any) -> str:
    """Return the repr of a dataclass in one line, with the length of a list, tuple or dict in its place."""
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    counts = {name: f"<{counted(len(v), 'item')}>" for name, v in values.items() if isinstance(v, list | tuple | dict)}
    return f"{type(result).__name__}({', '.join(f'{name}={counts.get(name, repr(v))}' for name, v in values.items())})"


def html_table(caption: str, columns: Sequence[str], rows: Sequence[Iterable[object]]) -> str:
    """Return a table of HTML, for a notebook; all texts are escaped.

    A column whose name starts with `>` is aligned right. A table of more than MOST_ROWS rows is cut in the middle.
    """

    def line(tag: str, cells: Iterable[object]) -> str:
        texts = (html.escape(printable(str(cell))) for cell in cells)
        tagged = (f'<{tag} style="text-align:{side}">{text}</{tag}>' for side, text in zip(sides, texts, strict=True))
        return f"<tr>{''.join(tagged)}</tr>"

    sides = ["right" if column.startswith(">") else "left" for column in columns]
    lines = [line("th", (column.removeprefix(">") for column in columns))] if any(columns) else []
    half = MOST_ROWS // 2
    shown = rows if len(rows) <= MOST_ROWS else [*rows[:half], ["..." for _ in columns], *rows[-half:]]
    lines += [line("td", row) for row in shown]
    title = html.escape(printable(caption))
    return f'<table><caption style="text-align:left">{title}</caption>{"".join(lines)}</table>'


class Log(logging.LoggerAdapter[logging.Logger]):
    """The logger "snapstore" for our own modules: no error of a filter, handler or record factory ends what logs.

    Such an error goes to stderr, as logging does with the error of a stream.
    """

    def __init__(self) -> None:
        super().__init__(logging.getLogger("snapstore"))

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a line; the methods `info`, `warning` and `error` end here."""
        try:
            self.logger.log(level, msg, *args, **kwargs, stacklevel=2)  # the line of the caller
        except (Exception, SystemExit) as error:  # a save that is committed must not fail over a line about it
            if isinstance(error, SystemExit) and threading.current_thread() is threading.main_thread():
                raise  # elsewhere it would end only a thread of ours
            self._note_lost()

    def _note_lost(self) -> None:
        with suppress(Exception):
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc()


log = Log()
