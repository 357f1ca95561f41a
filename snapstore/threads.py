"""Thread pools that survive a fork and the interpreter's exit, and results that arrive from them.

A thread of ours must never be the first to import a module. If a process forks at that moment (a DataLoader starts a
worker), the module stays locked in the child, which hangs when it imports the same module. So this module imports
whatever the libraries in our threads import at first use, and code that starts a thread imports what the thread runs.

The pools use neither `multiprocessing.pool`, whose locks are semaphores in /dev/shm, which may be full or missing in a
container, nor `concurrent.futures`, which refuses work from the moment when the interpreter exits.
"""

from __future__ import annotations

import _thread
import gc
import os
import sys
import threading
import time
import weakref
from _thread import LockType
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec
import numpy
import numpy.ma  # np.unique and np.isin import it

from .errors import CapabilityError, InvalidInputError

T = TypeVar("T")
R = TypeVar("R")
#: Small objects that are read at once, if the store takes longer than SLOW_S for one [s]: on S3 each is a round trip,
#: and a thousand in sequence take 20 s.
READ_THREADS, SLOW_S = 16, 0.003
P = ParamSpec("P")

#: How often `Gate.close` looks whether jobs without Python's lock are inside [s].
GATE_POLL_S = 0.0005
#: Items are handed to the threads in runs of consecutive items: about so many runs, never twice as many.
MAX_RUNS = 64


def after_fork_in_child(hook: Callable[[], object]) -> None:
    """Call `hook` in every forked child, before its own code.

    A signal may come at any moment. If its handler raises, Python ends the hook, prints the exception and goes on. So
    the hook is called twice, and must bear that.
    """
    for _ in range(2):
        os.register_at_fork(after_in_child=hook)


def lock_in_forks(lock: Any) -> None:
    """Let every fork wait for an RLock, so that a child never begins while another thread is under it.

    The lock's own functions are the hooks: they are written in C, so no signal handler ends them before they are done.
    It can end the wait for the lock: then the fork goes on without it, and the child renews it. A fork in a signal
    handler may interrupt the thread that has the lock, so it must be an RLock.
    """
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    after_fork_in_child(lambda: lock._is_owned() or lock._at_fork_reinit())


_preventing: set[int] = set()  # the threads that prevent garbage collection, which the program allows


@contextmanager
def without_gc() -> Iterator[None]:
    """Prevent Python's garbage collection while the caller waits: it takes as long as the copies of many tensors."""
    if not gc.isenabled():  # the program, or another thread, has disabled it, and will enable it
        yield
        return
    thread = threading.get_ident()
    try:
        _preventing.add(thread)
        gc.disable()
        yield
    finally:
        gc.enable()
        _preventing.discard(thread)


def _allow_gc() -> None:
    """Allow it again in a forked child, such as a worker that the `state_dict` of a loader has started."""
    if _preventing:
        gc.enable()
        _preventing.clear()


after_fork_in_child(_allow_gc)


class LockSlot:
    """Holds a lock for one use, whatever thread unlocks it.

    Ctrl-C may raise between any two steps of Python code. So `acquire` and `release` are each one call of C code: the
    first locks and notes that this use holds the lock, the second takes the note out and unlocks. Only the thread that
    takes the note out may unlock. Waiting for a lock is used instead of `Thread.join`: CPython 3.11 counts a thread as
    ended when a join is interrupted.

    Args:
        timeout: the longest wait of `acquire` [s]; -1: it has no end.
    """

    def __init__(self, lock: LockType, timeout: float = -1) -> None:
        held: dict[str, LockType] = {}
        locked = filter(partial(LockType.acquire, timeout=timeout), [lock])
        self.acquire = partial(held.update, zip(["lock"], locked, strict=False))
        self.release = partial(any, map(LockType.release, filter(None, map(held.pop, ["lock"], [None]))))
        self._held = held
        self.handed_over = False  # whether a thread in the background was started, which unlocks it

    @property
    def is_held(self) -> bool:
        """Return whether `acquire` has locked it, and nobody has unlocked it since."""
        return bool(self._held)

    def hand_over(self) -> LockType | None:
        """Return the lock to the thread in the background, which unlocks it; None if the caller was interrupted."""
        return self._held.pop("lock", None)


_decoders: dict[Any, Any] = {}
_preparing = threading.RLock()
lock_in_forks(_preparing)


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the msgpack decoder of a type; one thread at a time makes one. All code decodes msgspec's types by this.

    msgspec prepares a struct at its first use, and lets other threads run meanwhile. If one of them decodes the same
    struct, msgspec reads memory that is not filled yet, and the process ends (SIGSEGV, msgspec 0.22).

    Raises:
        InvalidInputError: a signal handler calls this while its thread makes a decoder.
    """
    found: msgspec.msgpack.Decoder[T] | None = _decoders.get(kind)
    if found is None:
        if _preparing._is_owned():  # type: ignore[attr-defined]
            raise InvalidInputError(
                "snapstore was called by a signal handler in the middle of another call; set a flag in the handler, "
                "and save from the training loop"
            )
        with _preparing:
            found = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return found


def imported(name: str) -> Any:
    """Return a module that has been imported; None if nothing has imported it, or another thread does so right now.

    Python shows other threads a module before its import has ended: with some of its names, or none.
    """
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


_of_thread = threading.local()
Watch = Callable[[], object]


@contextmanager
def watched(watch: Watch | None) -> Iterator[None]:
    """Let long pauses in the block call `watch`, which raises to end them; also those of jobs that it starts in pools.

    A store that sends a request again pauses so.
    """
    before, _of_thread.watch = current_watch(), watch
    try:
        yield
    finally:
        _of_thread.watch = before


def current_watch() -> Watch | None:
    """Return what long pauses of this thread call, or None."""
    found: Watch | None = getattr(_of_thread, "watch", None)
    return found


class Pending(Generic[R]):
    """Results that threads are still computing."""

    def __init__(self, function: Callable[[Any], R], items: Sequence[Any]) -> None:
        self._function, self._items, self._watch = function, items, current_watch()
        self._results: list[Any] = [None] * len(items)
        self._error: BaseException | None = None
        self._failed_run = len(items)  # the number of the first item of the run that `_error` ended
        self._step = max(1, len(items) // MAX_RUNS)
        self._left = len(self.runs())
        self._lock, self._done = threading.Lock(), threading.Event()
        if not items:
            self._done.set()

    def runs(self) -> range:
        """Return the number of the first item of each run."""
        return range(0, len(self._items), self._step)

    def compute(self, first: int, ended: Callable[[], object] | None = None) -> None:
        """Compute a run of items; keep an exception, which ends the run.

        Args:
            ended: called before anyone hears that the run has ended.
        """
        error: BaseException | None = None
        try:
            with watched(self._watch):
                for i in range(first, min(first + self._step, len(self._items))):
                    self._results[i] = self._function(self._items[i])
        except BaseException as caught:  # noqa: BLE001  raised by `__call__`
            if caught.__traceback__ is not None:  # this frame refers to the results, which refer to the error
                caught.__traceback__ = caught.__traceback__.tb_next
            error = caught
        if ended is not None:
            ended()
        with self._lock:
            if error is not None and first < self._failed_run:
                self._error, self._failed_run = error, first
            self._left -= 1
            if not self._left:
                del self._function, self._items, self._watch  # they hold memory that nothing needs any more
                self._done.set()

    def __call__(self) -> list[R]:
        """Wait, and return the results in order; raise the exception of the first item, in their order, that failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._results

    def is_done(self) -> bool:
        """Return whether all results are there; this takes no lock, which a fork may have left locked."""
        return self._done.is_set()

    def ready(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` and return whether all results are there."""
        return self._done.wait(timeout_s)

    def succeeded(self) -> bool:
        """Return whether all results are there, and no item failed."""
        return self._done.is_set() and self._error is None


class Gate:
    """Lets jobs work on some memory, until the owner of the memory closes it.

    An interrupt (Ctrl-C) may strike between the start of jobs and the moment when anybody could wait for them. So the
    owner makes the gate before, and closes it if it cannot wait: then jobs that have not begun do nothing.

    Attributes:
        flags: (2,) int64, for jobs without Python's lock: not 0 if the gate is closed; how many of them are inside.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self.flags = numpy.zeros(2, numpy.int64)

    @property
    def is_closed(self) -> bool:
        """Return whether no job may begin any more."""
        return bool(self.flags[0])

    def guarded(self, job: Callable[P, object]) -> Callable[P, None]:
        """Return a job that does nothing once the gate is closed."""

        def act(*args: P.args, **named: P.kwargs) -> None:
            if self.is_closed:
                return
            with self._changed:
                if self.is_closed:
                    return
                self._inside += 1
            try:
                job(*args, **named)
            finally:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()

        return act

    def close(self) -> None:
        """Let no job begin any more, and wait for the jobs that have begun."""
        self.flags[0] = 1
        with self._changed:
            self._changed.wait_for(lambda: not self._inside)
        while self.flags[1]:
            time.sleep(GATE_POLL_S)


_of_pool = threading.local()


def in_pool() -> bool:
    """Return whether this is a thread of a pool: if it waited for a save, the save might wait for it."""
    return getattr(_of_pool, "is_member", False)


class _Team:
    """The threads of a pool, and their work.

    Attributes:
        work: the first items of runs; None ends a thread.
        runs: how many runs wait or are computed.
        lock: of the pool.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.members: list[threading.Thread] = []
        self.work: SimpleQueue[tuple[Pending[Any], int] | None] = SimpleQueue()
        self.runs, self.lock = 0, lock

    def run(self) -> None:
        """Compute runs, in a thread of the pool."""
        _of_pool.is_member = True
        while (item := self.work.get()) is not None:
            pending, first = item
            del item
            pending.compute(first, self._run_ended)
            del pending  # or a thread that waits for work would hold the last results, megabytes

    def _run_ended(self) -> None:
        with self.lock:
            self.runs -= 1


class Threads:
    """A pool of threads, started when there is more work than threads, and again after a fork.

    They are daemons, so a save that runs while the interpreter exits can still use them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._team, self._pid = _Team(self._lock), os.getpid()

    def start(self, function: Callable[[T], R], items: Sequence[T]) -> Pending[R]:
        """Start `function` for every item; calling the returned object waits for the results, in order.

        Raises:
            CapabilityError: not one thread can be started.
        """
        if self._pid != os.getpid():
            self._begin()
        pending = Pending(function, items)
        with self._lock:
            team = self._team
            team.runs += len(pending.runs())
            while len(team.members) < min(self.count, team.runs):
                member = threading.Thread(target=team.run, name="snapstore-pool", daemon=True)
                try:
                    member.start()
                except RuntimeError as error:
                    if not team.members:
                        team.runs = 0
                        raise no_threads() from error
                    break
                team.members.append(member)
            for first in pending.runs():
                team.work.put((pending, first))
        return pending

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads once they are idle, and wait for that; a thread of the pool itself does not wait."""
        if self._pid != os.getpid():  # before taking the lock: a fork may have left it locked
            return
        with self._lock:
            team, self._team = self._team, _Team(self._lock)
        for _ in team.members:
            team.work.put(None)
        if threading.current_thread() not in team.members:
            for member in team.members:
                member.join()


def when_dropped(owner: object, close: Callable[[], object]) -> weakref.finalize[..., object]:
    """Call `close` when nothing refers to `owner` any more, or the interpreter exits.

    The garbage collector runs finalizers in any thread, between any two of its instructions. A finalizer that takes a
    lock, or waits for a thread, deadlocks if the interrupted code holds that lock. So `close` runs in a thread of its
    own; at the exit, which interrupts nothing, in the thread that exits.
    """
    return weakref.finalize(owner, _close_apart, close)


def _close_apart(close: Callable[[], object]) -> None:
    if threading.main_thread().is_alive():
        _thread.start_new_thread(_start, (close,))  # `Thread.start` takes a lock that the interrupted code may hold
    else:
        close()


def _start(close: Callable[[], object]) -> None:
    threading.Thread(target=close, name="snapstore-close", daemon=True).start()


def no_threads() -> CapabilityError:
    """Return the error of a process that may start no more threads."""
    return CapabilityError(
        "cannot start a thread; raise the limit on processes (ulimit -u, or the container's pids limit), "
        "or save with fewer threads (SNAPSTORE_THREADS), then try again"
    )


def in_threads_if_slow(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `function` of every item; use threads if the first items show that each takes long."""
    began = time.monotonic()
    done = [function(item) for item in items[:2]]
    rest = items[2:]
    if not rest or time.monotonic() - began < 2 * SLOW_S:  # threads would cost a tenth of a second
        return done + [function(item) for item in rest]
    with Threads(min(READ_THREADS, len(rest))) as threads:
        return done + threads.start(function, rest)()
