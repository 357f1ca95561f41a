"""Gathering: what a verb caches goes into the index in one write, since the seal on the file digests the whole of it.

In: items by database and key. Out: the items that are to be written now, none while a block of `gather` runs. Any
thread may call anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

#: database -> key -> data; None: remove the key.
Items = dict[bytes, dict[str, bytes | None]]
#: What is gathered is written at the latest when it has this size [bytes], or after this time [s].
GATHERED_BYTES, GATHERED_S = 16 * 1024 * 1024, 10.0


class Gathering:
    """The items that are not written yet."""

    def __init__(self) -> None:
        self._blocks, self._items, self._bytes = 0, Items(), 0
        self._lock, self._written_s = threading.Lock(), time.monotonic()

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Gather what the block adds. Blocks of several threads, and nested ones, end together."""
        with self._lock:
            if not self._blocks:
                self._written_s = time.monotonic()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1

    def add(self, items: Mapping[bytes, Mapping[str, bytes | None]]) -> Items:
        """Add items; return all that are to be written now."""
        with self._lock:
            for database, of_it in items.items():
                self._items.setdefault(database, {}).update(of_it)
                self._bytes += sum(len(data or b"") for data in of_it.values())
            is_due = self._bytes >= GATHERED_BYTES or time.monotonic() > self._written_s + GATHERED_S
            return {} if self._blocks and not is_due else self._take()

    def take(self) -> Items:
        """Return all items, which the caller writes or drops."""
        with self._lock:
            return self._take()

    def _take(self) -> Items:
        items, self._items, self._bytes = self._items, Items(), 0
        self._written_s = time.monotonic()
        return items

    def get_all(self, database: bytes, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the items of some keys that are not written yet."""
        with self._lock:
            there = self._items.get(database, {})
            return {key: data for key in keys if (data := there.get(key)) is not None}
