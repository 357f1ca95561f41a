"""Mirror failures: which snapshots could not be copied, why, and when each is tried again.

In: the error of each attempt. Out: whether a snapshot is to be tried now. No such snapshot is given up: a damaged one
may be repaired, and one that a store withholds may be whole. But each attempt may read and put all of its bytes, so
each further attempt comes later, unless the mirror is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Container
from dataclasses import dataclass

#: Between two attempts to copy one snapshot there is at most this time [s].
PAUSE_MAX_S = 24 * 3600.0


@dataclass(slots=True)
class _Failure:
    """The last failure of a snapshot; `next_s` is when to try again, by the monotonic clock."""

    why: str
    pause_s: float
    next_s: float


class Failures:
    """The failures of one mirror, by the id of the snapshot. Its caller holds a lock."""

    def __init__(self) -> None:
        self._found: dict[str, _Failure] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def note(self, name: str, why: str, pause_s: float) -> bool:
        """Note a failure; return whether it is news.

        Args:
            pause_s: how long to wait after the first failure; after each further one it is twice as long [s].
        """
        before = self._found.get(name)
        pause_s = pause_s if before is None else min(2 * before.pause_s, PAUSE_MAX_S)
        self._found[name] = _Failure(why, pause_s, time.monotonic() + pause_s)
        return before is None or before.why != why

    def keep_only(self, names: Container[str]) -> None:
        """Forget the failures of all other snapshots."""
        self._found = {name: failure for name, failure in self._found.items() if name in names}

    def end(self, name: str) -> None:
        """Forget the failure of a snapshot, if there is one."""
        self._found.pop(name, None)

    def try_all(self) -> None:
        """Make every snapshot due now."""
        for failure in self._found.values():
            failure.next_s = 0.0

    def is_due(self, name: str) -> bool:
        """Return whether a snapshot is to be tried now."""
        failure = self._found.get(name)
        return failure is None or failure.next_s <= time.monotonic()

    def pause_s(self) -> float | None:
        """Return how long to wait until some snapshot is to be tried again; None: there is none."""
        if not self._found:
            return None
        return max(0.0, min(failure.next_s for failure in self._found.values()) - time.monotonic())

    def whys(self) -> list[str]:
        """Return why the snapshots could not be copied, each reason once."""
        return list(dict.fromkeys(failure.why for failure in self._found.values()))
