"""Progress: how many bytes the running verb is through, and since when a store has not answered.

In: bytes that the loops of a verb expect and are through, and requests that are sent again. Out: a `Progress` that the
shell shows. Code below the shell only tells: it does not know whether anybody looks. In a process without a shell, such
as a training, nothing is counted. A process of the shell runs one verb, so one `Progress` is enough for all threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Watch = Callable[[], object]


class Progress:
    """The bytes of one verb. Any thread may read it.

    Attributes:
        done_bytes, total_bytes: how many bytes the verb is through, of how many; the total may grow, and is 0 if it is
            not known.
    """

    def __init__(self) -> None:
        self.done_bytes = self.total_bytes = 0
        self._share_end: int | None = None  # of `done_bytes`; None: not in a share
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """Note that some bytes are done."""
        with self._lock:
            self.done_bytes += nbytes
            if self._share_end is not None:
                self.done_bytes = min(self.done_bytes, self._share_end)

    @contextmanager
    def share(self, nbytes: int) -> Iterator[None]:
        """Let the block count for as many bytes, whatever it expects and is through itself."""
        if self._share_end is not None:  # within another share
            yield
            return
        self._share_end = end = self.done_bytes + nbytes
        try:
            yield
        finally:
            self._share_end, self.done_bytes = None, end

    def expect(self, nbytes: int) -> None:
        """Add bytes to the total; within a share they are in it already."""
        if self._share_end is None:
            self.total_bytes += nbytes


_shown: Progress | None = None
#: The threads whose requests are sent again: thread -> (name of the store, when the first attempt failed [monotonic],
#: what ends their pauses).
_retrying: dict[int, tuple[str, float, Watch | None]] = {}


@contextmanager
def shown() -> Iterator[Progress]:
    """Count the bytes of the block."""
    global _shown
    before, _shown = _shown, Progress()
    try:
        yield _shown
    finally:
        _shown = before


def expect(nbytes: int) -> None:
    """Add bytes to the total of the running verb."""
    if _shown is not None:
        _shown.expect(nbytes)


def advance(nbytes: int) -> None:
    """Note that the running verb is through some bytes."""
    if _shown is not None:
        _shown.advance(nbytes)


def through(items: Sequence[T], nbytes: Callable[[T], int]) -> Iterator[T]:
    """Expect the bytes of all items now, and return an iterator over them that is through those of each in turn.

    Args:
        nbytes: returns how many bytes an item counts for. An estimate will do.
    """
    expect(sum(map(nbytes, items)) if _shown is not None else 0)

    def each() -> Iterator[T]:
        for item in items:
            if _shown is None:
                yield item
                continue
            with _shown.share(nbytes(item)):
                yield item

    return each()


@contextmanager
def whole(nbytes: int) -> Iterator[None]:
    """Let the block count for as many bytes, whatever it expects and is through itself."""
    for _ in through([nbytes], int):
        yield


def begin_retry(store: str, watch: Watch | None = None) -> None:
    """Note that this thread will send a request again, unless that is noted already.

    Args:
        watch: what ends its pauses (`threads.watched`).
    """
    _retrying.setdefault(threading.get_ident(), (store, time.monotonic(), watch))


def end_retry() -> None:
    """Note that the store has answered this thread, or that it gives up."""
    _retrying.pop(threading.get_ident(), None)


def retrying(watch: Watch | None = None) -> tuple[str, float] | None:
    """Return (a store whose requests are sent again, for how long already [s]); None: there is none.

    Args:
        watch: only requests that it ends (`threads.watched`); None: all.
    """
    found = [entry for entry in list(_retrying.values()) if watch is None or entry[2] is watch]
    since = min(found, key=lambda entry: entry[1], default=None)
    return since and (since[0], time.monotonic() - since[1])
