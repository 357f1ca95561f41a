"""Background: the thread of a manager's save, the slot that lets one save run at a time, and the handle of a save.

In: a function to run in the background. Out: its error, at the caller's next call that saves or waits for saves, or at
the handle. The slot survives Ctrl-C between any two steps of Python code (threads.py, `LockSlot`).
"""

from __future__ import annotations

import copy
import os
import threading
import time
import traceback
from _thread import LockType
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from ..engine.registry import Engines
from ..errors import InvalidInputError, SnapstoreError
from ..format.records import Snapshot
from ..text import log
from ..threads import LockSlot, in_pool, no_threads

#: Hears how a save or an attempt has ended: `Hooks.tell` with the step of the save.
Tell = Callable[[Snapshot | None, BaseException | None, int, bool], object]
#: The thread of a save first sleeps so long, so that its caller goes on at once; else Python lets it wait for 5 ms [s].
YIELD_S = 0.001


class Background:
    """The saves of one manager that run, or have failed, in the background.

    Attributes:
        saving: locked while a save or a preparation runs; each of them has a `LockSlot`.
        is_given_up: whether `close(timeout=)` waits no longer for what runs.
        prepares: whether the thread that holds the slot only prepares for a later save.
    """

    def __init__(self, run: str, engines: Engines) -> None:
        self.run, self._engines = run, engines
        self.saving = threading.Lock()
        self.is_given_up = False
        self._failed: list[tuple[SaveHandle, str, BaseException]] = []  # saves whose errors the caller has not seen yet
        self.prepares = False
        self._inside: set[int] = set()  # threads that are inside save, and the one that runs in the background
        self._at_end: Callable[[], object] = lambda: None
        self._pid = os.getpid()

    def note(self, handle: SaveHandle, ref: str, error: BaseException) -> None:
        """Note the error of a save; the caller's next call raises it.

        Args:
            ref: run@step of the save; "" if it has none.
        """
        handle._is_noted = True
        self._failed.append((handle, ref, error))

    def fail(self, handle: SaveHandle, ref: str, error: BaseException, *, is_noted: bool) -> None:
        """End a save with an error, which the caller's next call raises if it `is_noted`, else the save itself."""
        try:
            if is_noted:
                self.note(handle, ref, error)
                log.error("run=%s step=%s save failed: %s", self.run, ref.rpartition("@")[2], str(error))
        finally:  # a handler of the log may end the thread
            handle._finish(None, error)

    def raise_errors(self, begins: str | None = None) -> None:
        """Raise the first error of the saves that failed since the last call; drop the others.

        A save does not raise an error that its handle has raised, or that is `not_begun`: another rank has raised it
        instead of beginning the save (`RankJob.numbered`), or this save does better (`holders.require_kept`).

        Args:
            begins: run@step of the save that calls this and now does not begin; "": of a preparation; None: no save.
        """
        failed, self._failed = self._failed, []
        for handle, ref, error in failed:
            if begins and (handle._has_raised or getattr(error, "not_begun", False)):
                continue
            raise _as_raised_by(begins, ref, error) if begins else error

    def holding_slot(self, begins: str | None) -> _Holding:
        """Return a context: it waits for the running save, and holds the slot until a thread takes it over.

        Args:
            begins: see `raise_errors`. The context raises the error of an earlier save in the same way. None: it raises
                none, and holds the slot only if it is free.
        """
        return _Holding(self, begins)

    def take_early(self, prepare: Callable[[], Callable[[], object]]) -> None:
        """Allocate memory for the copies of a later save, in the background; do nothing if a save or another one runs.

        Args:
            prepare: called now, returns the function that allocates.
        """
        with self.holding_slot(None) as slot:
            if slot.is_held:
                try:
                    self.start(partial(self.take_memory, prepare()), slot)
                except SnapstoreError as error:  # the save meets the same error, and raises it
                    log.info("run=%s the memory for copies is not allocated ahead: %s", self.run, error)

    def start(self, function: Callable[[], object], slot: LockSlot) -> None:
        """Run a function in a thread of its own, which holds the slot.

        Raises:
            CapabilityError: no thread can be started.
        """

        def run() -> None:
            time.sleep(YIELD_S)
            lock = slot.hand_over()
            if lock is not None:
                self._inside.add(threading.get_ident())
                try:
                    with self._engines.in_background():
                        function()
                finally:
                    self._inside.discard(threading.get_ident())
                    lock.release()
                    self._at_end()

        # Not a daemon, also if the caller is one: the interpreter's exit waits for it, and the snapshot is whole.
        try:
            threading.Thread(target=run, name=f"snapstore-{self.run}", daemon=False).start()
            slot.handed_over = True
        except RuntimeError as error:
            raise no_threads() from error

    def take_memory(self, take: Callable[[], object]) -> None:
        """Allocate memory for the copies of a later save, in the background."""
        self.prepares = True
        try:
            take()
        except Exception as error:  # noqa: BLE001  the next save meets the same error, and raises it
            log.warning("run=%s the memory for copies could not be allocated ahead: %s", self.run, error)

    def work_of(self, save: object | None) -> str:
        """Return what runs, in words; `save` is the save that has not ended, or None."""
        if self.prepares:
            return "allocation of memory for a later save"
        return "running save" if save is not None else "gc behind the last save, which is committed,"

    def is_busy(self) -> bool:
        """Return whether a save runs, or forgets and runs gc; not whether one prepares for a later save."""
        return self.saving.locked() and not self.prepares

    def join(self, timeout: float | None = None) -> bool:
        """Wait until no save runs, for at most `timeout` seconds; return whether none does."""
        if os.getpid() != self._pid:  # a forked child has no such thread
            return True
        self.check_inside()
        if timeout is None:
            with self.saving:
                return True
        taken = filter(partial(LockType.acquire, timeout=max(0.0, timeout)), [self.saving])
        return bool(list(map(LockType.release, taken)))  # one call of C code: Ctrl-C cannot leave it locked

    def at_end(self, function: Callable[[], object]) -> bool:
        """Let a function run after the running save; return whether none runs any more: then call it now."""
        self._at_end = function
        return self.join(0.0)

    def check_inside(self) -> None:
        """Raise InvalidInputError if this thread is inside a save: the call would wait for itself.

        A handler of the log, or an object that Python's garbage collector frees, may call from any thread of a save.
        """
        if threading.get_ident() in self._inside or in_pool():
            raise InvalidInputError(
                "SnapshotManager was called while this thread is inside save (from a signal handler, a handler of the "
                "log, or __del__?); set a flag there, and save or close from the training loop"
            )


class _Holding:
    """Holds the slot in a `with` block; a class, since Ctrl-C may come between contextlib's `__enter__` and the block.

    Args:
        background, begins: see `Background.holding_slot`.
    """

    def __init__(self, background: Background, begins: str | None) -> None:
        self._background, self._begins = background, begins
        self._slot = LockSlot(background.saving, -1 if begins is not None else 0)
        self._thread = threading.get_ident()

    def __enter__(self) -> LockSlot:
        background = self._background
        try:
            background._inside.add(self._thread)
            self._slot.acquire()
            if self._slot.is_held:
                background.prepares = not self._begins
            if self._begins is not None:
                background.raise_errors(self._begins)
        except BaseException:
            self.__exit__()
            raise
        return self._slot

    def __exit__(self, *_: object) -> None:
        try:
            if not self._slot.handed_over:
                self._slot.release()
        finally:
            self._background._inside.discard(self._thread)


def clear_frames(error: BaseException, outer: BaseException | None = None) -> None:
    """Clear the frames of an error and of the errors that led to it: they hold copies of the state, gigabytes.

    Args:
        outer: the error that was handled when the save began: it is not cleared, nor what led to it.
    """
    left, seen = [error], {id(outer)}
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [other for other in (one.__cause__, one.__context__) if other is not None]


def _as_raised_by(begins: str, ref: str, error: BaseException) -> BaseException:
    """Return the error of an earlier save as the next save raises it: it names both saves."""
    why = f"save {begins} was not begun: {f'the save of {ref}' if ref else 'the save before it'} has failed"
    if not isinstance(error, SnapstoreError):
        error.add_note(f"{why}; the next save tries again")
        return error
    told = copy.copy(error)
    told.args = (f"{why}: {error.args[0] if error.args else ''}", *error.args[1:])
    told.__cause__ = error
    return told


class SaveHandle:
    """A save that runs or has ended.

    Attributes:
        skipped: whether there is no snapshot of this save, and no error: the step is off the interval, another save was
            running, or a newer save has replaced this one while its store was away (`on_error="warn"`).
    """

    def __init__(self, *, skipped: bool = False, tell: Tell = lambda *_: None) -> None:
        self.skipped, self._tell, self._attempt = skipped, tell, 1
        self._finished = threading.Event()
        self._returned = threading.Event()  # whether a synchronous `save` returns: finished, or tried again
        self._is_retried = False  # whether an attempt has failed, and others follow in the background
        self._on_wait: Callable[[], object] = lambda: None  # called when `result` waits
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None
        self._has_raised = False  # whether `result` has raised the error
        self._is_noted = False  # whether the manager's next call raises the error
        self._thread: int | None = None  # the thread that saves
        self._pid = os.getpid()
        if skipped:
            self._finish(None, None)

    def __repr__(self) -> str:
        state = "skipped" if self.skipped else "running" if not self.done() else self._error or self._snapshot
        return f"SaveHandle({state!r})"

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and copy: a copy of a running save would not learn how it ends."""
        raise TypeError("a SaveHandle cannot be pickled or copied; use the snapshot that its result() returns")

    def done(self) -> bool:
        """Return whether the save has committed, failed, or was skipped. While it is tried again it is not done."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> Snapshot | None:
        """Wait up to `timeout` seconds; return the committed snapshot, or None for a skipped save.

        A save that is tried again (`on_error="warn"`) has one more attempt at once, and the error of that is raised.
        With a timeout it is only looked at: it goes on as before.

        Raises:
            InvalidInputError: the thread that saves calls, from a handler of the log for example; or a forked child.
            TimeoutError: not finished by then.
            SnapstoreError: the save failed. The next `save` does not raise this error again.
        """
        if not self.done():
            if self._thread == threading.get_ident():
                raise InvalidInputError(
                    "result was called by the thread that saves, which would deadlock; call it in another thread"
                )
            if self._pid != os.getpid():
                raise InvalidInputError("this save runs in the process before the fork: call result there")
            if timeout is None:
                self._on_wait()
        if not self._finished.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"the save has not finished within {timeout} s")
        if self._error is not None:
            self._has_raised = True
            raise self._error
        return self._snapshot

    def _finish(self, snapshot: Snapshot | None, error: BaseException | None, *, skipped: bool = False) -> None:
        """End the save. Every save calls this once; of one that is replaced, the error is its ReplacedError."""
        self._snapshot, self._error = snapshot, None if skipped else error
        self.skipped = self.skipped or skipped
        self._finished.set()
        self._returned.set()
        self._tell(snapshot, error, self._attempt, False)

    @contextmanager
    def _beginning(self, slot: LockSlot) -> Iterator[None]:
        """End the save if the block raises before the save runs."""
        try:
            yield
        except BaseException as error:
            if not slot.handed_over and not self.done():
                self._finish(None, error)
            raise

    def _await_return(self) -> None:
        """Wait until the save has finished, or is tried again; raise its error unless the manager's next call does."""
        self._returned.wait()
        if self.done() and not self._is_noted:
            self.result()

    def _go_on(self, error: Exception) -> None:
        """Note that an attempt has failed, and the save is tried again in the background."""
        self._is_retried = True
        self._returned.set()
        self._tell(None, error, self._attempt, True)
        self._attempt += 1
