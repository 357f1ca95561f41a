"""Thread pools that survive a fork and the interpreter's exit, and results that arrive from them.

A thread of ours must never be the first to import a module. If a process forks at that moment (a DataLoader starts a
worker), the module stays locked in the child, which hangs when it imports the same module. So this module imports
whatever the libraries in our threads import at first use, and code that starts a thread imports what the thread runs.
"""

from __future__ import annotations

import multiprocessing.dummy
import multiprocessing.queues
import multiprocessing.synchronize  # noqa: F401
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any, Generic, TypeVar

import numpy.ma  # noqa: F401  # np.unique and np.isin import it

T = TypeVar("T")
R = TypeVar("R")


class Pending(Generic[R]):
    """Results that threads are still computing."""

    def __init__(self, result: AsyncResult[list[R]]) -> None:
        self._result = result

    def __call__(self) -> list[R]:
        """Wait, and return the results in order; raises the first failure's exception."""
        return self._result.get()

    def ready(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` and return whether all results are there."""
        self._result.wait(timeout_s)
        return self._result.ready()


class Threads:
    """A pool of threads, started at first use and again after a fork.

    The threads of a `multiprocessing.pool.ThreadPool` are daemons, so a save that runs while the interpreter exits can
    still use them. concurrent.futures refuses work from that moment on.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPool | None = None
        self._members: set[int] = set()  # identifiers of its threads
        self._pid = 0
        self._lock = threading.Lock()

    def start(self, function: Callable[[T], R], items: Sequence[T]) -> Pending[R]:
        """Start `function` for every item; calling the returned object waits for the results, in order."""
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                self._members = members = set()
                self._pool = ThreadPool(self.count, lambda: members.add(threading.get_ident()))
                self._pid = os.getpid()
            result: AsyncResult[Any] = self._pool.map_async(function, items, chunksize=max(1, len(items) // 64))
        return Pending(result)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until the threads are idle, and end them.

        The garbage collector may call this in any thread; a thread of the pool itself does not wait.
        """
        if self._pid != os.getpid():  # before taking the lock: a fork may have left it locked
            return
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                if threading.get_ident() not in self._members:
                    self._pool.join()
            self._pool = None
