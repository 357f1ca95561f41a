"""Threads: a pool of them, and results on their way from it.

A thread of ours must not be the first to import a module: a process that is forked meanwhile (a DataLoader's worker)
has the module locked for ever, and hangs when it imports the same. So what the libraries that run in threads import at
first use is imported here, and whoever starts a thread has imported what that runs.
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
    """Results on their way from threads."""

    def __init__(self, result: AsyncResult[list[R]]) -> None:
        self._result = result

    def __call__(self) -> list[R]:
        """Wait for them, in order; raises what the first failure raised."""
        return self._result.get()

    def ready(self, timeout_s: float) -> bool:
        """Whether they are there, within some time."""
        self._result.wait(timeout_s)
        return self._result.ready()


class Threads:
    """A pool of threads, made at first use and again after a fork.

    Threads of a `multiprocessing.pool.ThreadPool` are daemons: a save that runs while the interpreter exits still
    finds them, where concurrent.futures refuses work from that moment on.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPool | None = None
        self._members: set[int] = set()  # identities of its threads
        self._pid = 0
        self._lock = threading.Lock()

    def start(self, function: Callable[[T], R], items: Sequence[T]) -> Pending[R]:
        """Begin `function` of every item; the call it returns waits for the results, in order."""
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
        """End the threads once they are idle, and wait for that.

        The garbage collector may call this in any thread. One of the pool's own cannot wait for itself.
        """
        if self._pid != os.getpid():  # before the lock: a fork may have left it held
            return
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                if threading.get_ident() not in self._members:
                    self._pool.join()
            self._pool = None
