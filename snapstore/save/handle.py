"""One save of a SnapshotManager: the handle that its caller gets, and the slot that lets one save run at a time.

In: the end of a save in the background. Out: its snapshot or its error, at the caller's call. `Slot` survives Ctrl-C
between any two steps of Python code.
"""

from __future__ import annotations

import threading
from _thread import LockType
from functools import partial

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
        if skipped:
            self._finished.set()

    def __repr__(self) -> str:
        state = "skipped" if self.skipped else "running" if not self.done() else self._error or self._snapshot
        return f"SaveHandle({state!r})"

    def done(self) -> bool:
        """Return whether the save has committed, failed, or was skipped."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> Snapshot | None:
        """Wait up to `timeout` seconds; return the committed snapshot, or None for a skipped save.

        Raises:
            TimeoutError: not finished by then.
            SnapstoreError: the save failed. The next `save` does not raise this error again.
        """
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


class Slot:
    """Lets one save run at a time: its caller's thread holds the slot first, then the thread in the background.

    Ctrl-C may raise between any two steps of Python code. So `acquire` and `release` are each one call of C code: the
    first locks and notes that this save holds the lock, the second takes the note out and unlocks. Only the thread that
    takes the note out may unlock. Waiting for a lock is used instead of `Thread.join`: CPython 3.11 counts a thread as
    ended when a join is interrupted.
    """

    def __init__(self, lock: LockType) -> None:
        held: dict[str, LockType] = {}
        self.acquire = partial(held.update, zip(["lock"], filter(LockType.acquire, [lock]), strict=False))
        self.release = partial(any, map(LockType.release, filter(None, map(held.pop, ["lock"], [None]))))
        self._held = held
        self.handed_over = False  # whether a thread in the background was started, which unlocks it

    def hand_over(self) -> LockType | None:
        """Return the lock to the thread in the background, which unlocks it; None if the caller was interrupted."""
        return self._held.pop("lock", None)
