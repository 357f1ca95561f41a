"""Hooks: functions of the user that a manager calls after each commit and each failure, in a thread of their own.

In: the ends of saves and of failed attempts. Out: one event for each, in this order. Invariant: nothing waits for a
hook but `Hooks.drain`, which has a bound. The thread is a daemon; it ends when no event is left.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar
from weakref import WeakSet

from ..errors import InvalidInputError, SnapstoreError
from ..format.records import Snapshot
from ..text import log, quoted
from .retrying import ReplacedError

E = TypeVar("E")
#: So many events wait for a hook; more are dropped.
MAX_EVENTS = 100
#: `close`, or the exit of the interpreter, waits so long for the hooks [s].
DRAIN_S = 5.0


class Ages:
    """Ages as of now: each read returns a new value.

    Args:
        mirrored: returns when the newest snapshot of the mirror was made [s since the epoch], 0: it has none. None:
            there is no mirror.
    """

    def __init__(self, mirrored: Callable[[], float] | None) -> None:
        self._mirrored, self._began = mirrored, time.time()
        self._committed = time.monotonic()

    @property
    def commit_s(self) -> float:
        """Return the seconds since the last commit of this manager; before the first one, since it was made."""
        return time.monotonic() - self._committed

    @property
    def mirror_s(self) -> float | None:
        """Return the age of the newest snapshot of the run that the mirror has [s]; None: there is no mirror.

        If the mirror has none, or was not reached yet: the seconds since the manager was made. On other ranks than
        rank 0 it is None.
        """
        if self._mirrored is None:
            return None
        return max(0.0, time.time() - (self._mirrored() or self._began))


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """A save that was committed: it is durable.

    Attributes:
        snapshot: has its step, `stall_s`, `total_s`, `stored_bytes`, `logical_bytes`, `ratio`, `depth` and metrics.
        ages: of the newest commit and of the mirror, as of now.
    """

    snapshot: Snapshot
    ages: Ages

    @property
    def run(self) -> str:
        """Return the name of the run."""
        return self.snapshot.run

    @property
    def step(self) -> int:
        """Return the step of the save."""
        return self.snapshot.step


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A save that has ended without a commit, or an attempt of it that has failed.

    Attributes:
        error: why. It says so if the store did not tell whether the save was committed.
        attempt: the number of the attempt that failed, from 1; all ranks count the same attempts.
        will_retry: True: the save goes on (`on_error="warn"`). False: it has ended.
        ages: see `CommitEvent`.
    """

    run: str
    step: int
    error: BaseException
    attempt: int
    will_retry: bool
    ages: Ages


#: One hook, several, or none.
Given = Callable[[E], object] | Sequence[Callable[[E], object]] | None


class HookOptions(TypedDict, total=False):
    """The hooks of a manager that an adapter makes; see `SnapshotManager`."""

    on_commit: Given[CommitEvent]
    on_failure: Given[FailureEvent]


@dataclass(frozen=True, slots=True)
class _Call(Generic[E]):
    """An event on its way to its hooks."""

    hooks: Sequence[Callable[[E], object]]
    event: E

    def make(self, run: str) -> None:
        for hook in self.hooks:
            try:
                hook(self.event)
            except BaseException as error:  # noqa: BLE001  a hook ends neither the save nor the other hooks
                name = type(error).__name__
                log.warning("run=%s hook %s has failed: %s: %s", run, quoted(hook), name, error, exc_info=error)


class Hooks:
    """The hooks of one manager. Any thread may call it.

    Args:
        run: the name of the run.

    Attributes:
        dropped: how many events were not given to the hooks.

    Raises:
        InvalidInputError: a hook cannot be called.
    """

    def __init__(self, run: str, on_commit: Given[CommitEvent], on_failure: Given[FailureEvent]) -> None:
        self._on_commit, self._on_failure = _checked("on_commit", on_commit), _checked("on_failure", on_failure)
        self._run, self._ages, self.dropped, self._pid = run, Ages(None), 0, os.getpid()
        self._calls: deque[_Call[Any]] = deque()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        _all.add(self)

    def begin(self, leads: bool, mirrored: Callable[[], float] | None) -> None:
        """Begin, before the first save.

        Args:
            leads: whether this is rank 0, or the only process: the others hear of failures alone.
            mirrored: see `Ages`.
        """
        self._ages = Ages(mirrored)
        if not leads:
            self._on_commit = ()

    def tell(
        self, step: int, snapshot: Snapshot | None, error: BaseException | None, attempt: int, will_retry: bool
    ) -> None:
        """Tell the hooks how a save or an attempt has ended; do not wait for them.

        Args:
            snapshot: that was committed.
            error: why nothing was committed; a skipped save has neither.
            attempt, will_retry: see `FailureEvent`.
        """
        if snapshot is not None:
            self._ages._committed = time.monotonic()
            self._put(_Call(self._on_commit, CommitEvent(snapshot, self._ages)))
        elif error is not None:
            if isinstance(error, ReplacedError):
                error = SnapstoreError(f"save {self._run}@{step}: the newer save {error} has replaced it")
            failed = FailureEvent(self._run, step, error, attempt, will_retry, self._ages)
            self._put(_Call(self._on_failure, failed))

    def _put(self, call: _Call[Any]) -> None:
        if not call.hooks:
            return
        with self._changed:
            is_full = len(self._calls) >= MAX_EVENTS
            if not is_full:
                self._calls.append(call)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=f"snapstore-hooks-{self._run}", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError:  # no more threads, or the interpreter exits
                    is_full = True
                    self._calls.pop()
            self.dropped += is_full
            is_first = is_full and self.dropped == 1
        if is_first:  # without the lock: a handler of the log may block
            log.warning("run=%s hooks are too slow, or get no thread: events are dropped from now on", self._run)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._calls:
                    self._thread = None
                    self._changed.notify_all()
                    return
                call = self._calls.popleft()
            call.make(self._run)
            del call  # or this thread would hold an event while it waits for the lock

    def drain(self, timeout: float | None) -> None:
        """Wait until the hooks have got all events, at most `DRAIN_S` or `timeout` seconds; then drop the others.

        The exit of the interpreter does not wait for them again.
        """
        if os.getpid() != self._pid or threading.current_thread() is self._thread:  # a hook may close its manager
            return
        limit_s = DRAIN_S if timeout is None else min(DRAIN_S, timeout)
        _all.discard(self)
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, limit_s)
            is_stuck = self._thread is not None
            self.dropped += len(self._calls)
            self._calls.clear()
        if is_stuck:
            log.warning("run=%s a hook has not returned %.3g s after the last save", self._run, limit_s)
        if self.dropped:
            log.warning("run=%s %d events were dropped: no hook got them", self._run, self.dropped)


#: The hooks of all managers.
_all: WeakSet[Hooks] = WeakSet()


@atexit.register
def _drain_all() -> None:
    """Wait at the interpreter's exit, which waits for saves, but not for daemons; `DRAIN_S` for all managers."""
    end = time.monotonic() + DRAIN_S
    for hooks in list(_all):
        hooks.drain(max(0.0, end - time.monotonic()))


def _checked(what: str, given: Given[E]) -> Sequence[Callable[[E], object]]:
    hooks = [] if given is None else [given] if callable(given) else given
    if not isinstance(hooks, list | tuple) or not all(map(callable, hooks)):
        raise InvalidInputError(f"{what} {quoted(given)}: expected a function of one event, or a list of them")
    return tuple(hooks)
