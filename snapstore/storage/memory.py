"""A dictionary as an object store, for tests and for trying things out.

It keeps the contract of every store, except that nothing is durable. Any thread may call anything: one mutex makes each
call atomic. `clock` and `drop_locks` let a test set the store's time and kill the processes that have locks.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from .base import (
    GET_LIMIT_BYTES,
    Buffer,
    KeyOnly,
    ObjectInfo,
    ObjectStore,
    already_exists,
    byte_view,
    check_key,
    check_limit,
    check_prefix,
    key_alone,
    not_empty,
    not_found,
    range_memory,
)

_NAMED: dict[str, MemoryStore] = {}
_NAMED_LOCK = threading.Lock()


class MemoryStore(ObjectStore):
    """An `ObjectStore` that lives and dies with this process.

    Args:
        name: Its name in messages and in `url`; `memory_store` returns the same store for the same name.
    """

    puts_at_once = 2

    def __init__(self, name: str = "memory") -> None:
        self.url = f"memory://{name}"
        self.place = f"{self.url} {os.urandom(8).hex()}"
        self.clock: Callable[[], float] = time.time  # read by `now_s` and for `modified_s`; tests set it
        self._mutex = threading.Lock()
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._locked: set[str] = set()

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    def put(self, key: str, data: Buffer) -> None:
        """Create `key` with a copy of `data`; see `ObjectStore.put`."""
        self._create(key, data, lock=False)

    def lock(self, key: str, data: Buffer) -> None:
        """Create `key`, locked until `release` or `drop_locks`."""
        self._create(key, data, lock=True)

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        """Return all bytes of `key`; see `ObjectStore.get`."""
        data, _ = self._object(key)
        check_limit(key, self.url, len(data), limit_bytes)
        return data

    def get_range(self, key: str, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        """Return a copy of a range of `key`; see `ObjectStore.get_range`."""
        data, _ = self._object(key)
        view = range_memory(key, self.url, offset, length, len(data), into)
        view[:] = data[offset : offset + length]
        return view

    def stat(self, key: str) -> ObjectInfo:
        """Return size, time and tag of `key`; see `ObjectStore.stat`."""
        _, info = self._object(key)
        return info

    def list(self, prefix: str, key_only: KeyOnly | None = None) -> Iterator[ObjectInfo]:
        """Return every object under `prefix` at the time of this call; see `ObjectStore.list`."""
        check_prefix(prefix)
        with self._mutex:
            found = {key: info for key, (_, info) in self._objects.items() if key.startswith(prefix)}
        bare = key_only(list(found)) if key_only else ()
        return iter([key_alone(key) if key in bare else info for key, info in found.items()])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete every key; a missing one is not an error."""
        for key in keys:
            check_key(key)
            with self._mutex:
                self._objects.pop(key, None)
                self._locked.discard(key)

    def now_s(self) -> float:
        """Return the time of `clock` [s since the epoch]."""
        return self.clock()

    def touch(self, key: str) -> None:
        """Set `modified_s` to now; see `ObjectStore.touch`."""
        data, info = self._object(key)
        with self._mutex:
            if key in self._objects:
                self._objects[key] = data, replace(info, modified_s=self.clock())

    def release(self, key: str) -> None:
        """Delete `key` and its lock."""
        self.delete([key])

    def is_locked(self, key: str) -> bool | None:
        """Return whether `lock` was called, and none of `delete`, `release` and `drop_locks` since then."""
        check_key(key)
        with self._mutex:
            return key in self._locked

    def prepare(self) -> None:
        """Require an empty store."""
        if self._objects:
            raise not_empty(self.url, self._objects, "choose another name")

    @contextmanager
    def sandbox(self) -> Iterator[MemoryStore]:
        """Yield another store."""
        yield MemoryStore("sandbox")

    def drop_locks(self) -> None:
        """Drop all locks and keep the objects, as if every process that has a lock died (for tests)."""
        with self._mutex:
            self._locked.clear()

    def _create(self, key: str, data: Buffer, *, lock: bool) -> None:
        check_key(key)
        copy = bytes(byte_view(data))
        with self._mutex:
            if key in self._objects:
                raise already_exists(key, self.url)
            self._objects[key] = copy, ObjectInfo(key, len(copy), self.clock(), hashlib.sha256(copy).hexdigest())
            if lock:
                self._locked.add(key)

    def _object(self, key: str) -> tuple[bytes, ObjectInfo]:
        check_key(key)
        with self._mutex:
            found = self._objects.get(key)
        if found is None:
            raise not_found(key, self.url)
        return found


def memory_store(name: str) -> MemoryStore:
    """Return the store of that name in this process, made at first use."""
    with _NAMED_LOCK:
        return _NAMED.setdefault(name, MemoryStore(name))
