"""The handle of one save of a SnapshotManager, which its caller gets.

In: the end of a save in the background. Out: its snapshot or its error, at the caller's call.
"""

from __future__ import annotations

import os
import threading
from typing import NoReturn

from ..errors import InvalidInputError
from ..format.records import Snapshot


class SaveHandle:
    """A save that runs or has ended.

    Attributes:
        skipped: whether no save was begun, because the step is off the interval, or another save was running.
    """

    def __init__(self, *, skipped: bool = False) -> None:
        self.skipped = skipped
        self._finished = threading.Event()
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None
        self._has_raised = False  # whether `result` has raised the error
        self._is_noted = False  # whether the manager's next call raises the error
        self._thread: int | None = None  # the thread that saves
        self._pid = os.getpid()
        if skipped:
            self._finished.set()

    def __repr__(self) -> str:
        state = "skipped" if self.skipped else "running" if not self.done() else self._error or self._snapshot
        return f"SaveHandle({state!r})"

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and copy: a copy of a running save would not learn how it ends."""
        raise TypeError("a SaveHandle cannot be pickled or copied; use the snapshot that its result() returns")

    def done(self) -> bool:
        """Return whether the save has committed, failed, or was skipped."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> Snapshot | None:
        """Wait up to `timeout` seconds; return the committed snapshot, or None for a skipped save.

        Raises:
            InvalidInputError: the thread that saves calls, from a handler of the log for example; or a forked child.
            TimeoutError: not finished by then.
            SnapstoreError: the save failed. The next `save` does not raise this error again.
        """
        if not self.done():
            if self._thread == threading.get_ident():
                raise InvalidInputError("result was called by the thread that saves: it would wait for itself")
            if self._pid != os.getpid():
                raise InvalidInputError("this save runs in the process before the fork: call result there")
        if not self._finished.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"the save has not finished within {timeout} s")
        if self._error is not None:
            self._has_raised = True
            raise self._error
        return self._snapshot

    def _skip(self) -> None:
        self.skipped = True
        self._finished.set()

    def _finish(self, snapshot: Snapshot | None, error: BaseException | None) -> None:
        self._snapshot, self._error = snapshot, error
        self._finished.set()
