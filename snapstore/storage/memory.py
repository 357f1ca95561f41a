"""A dictionary as an object store: for tests, and for trying things out.

The same contract as every store, without the durability. Any thread may call anything; one lock makes each call atomic.
`clock` and `drop_locks` let a test move the store's time and kill the holders.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from ..errors import InvalidInputError
from .base import (
    GET_LIMIT_BYTES,
    Buffer,
    ObjectInfo,
    byte_view,
    check_key,
    check_limit,
    check_prefix,
    check_range,
    memory_for,
    missing,
    short,
    sizes_one_by_one,
    taken,
)

_NAMED: dict[str, MemoryStore] = {}
_NAMED_LOCK = threading.Lock()


class MemoryStore:
    """An `ObjectStore` that lives and dies with this process.

    Args:
        name: What messages and `url` call it; `memory_store` shares stores by it.
    """

    puts_at_once = 2

    def __init__(self, name: str = "memory") -> None:
        self.url = f"memory://{name}"
        self.place = f"{self.url} {os.urandom(8).hex()}"
        self.clock: Callable[[], float] = time.time  # what `now_s` and `modified_s` read; tests set it
        self._mutex = threading.Lock()
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._locked: set[str] = set()

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    def put(self, key: str, data: Buffer) -> None:
        """Create `key` with a copy of `data`; see `ObjectStore.put`."""
        self._publish(key, data, held=False)

    def lock(self, key: str, data: Buffer) -> None:
        """`put`, held until `release` or `drop_locks`."""
        self._publish(key, data, held=True)

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        """All bytes of `key`; see `ObjectStore.get`."""
        data, _ = self._object(key)
        check_limit(key, self.url, len(data), limit_bytes)
        return data

    def get_range(self, key: str, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        """Return a copy of a range of `key`; see `ObjectStore.get_range`."""
        data, _ = self._object(key)
        check_range(key, offset, length)
        if offset + length > len(data):
            raise short(key, self.url, offset, length, len(data))
        view = memory_for(key, length, into)
        view[:] = data[offset : offset + length]
        return view

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of `key`; NotFoundError when missing."""
        _, info = self._object(key)
        return info

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        """The size of each of these that is there."""
        return sizes_one_by_one(self, keys)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object under `prefix`, as of this call."""
        check_prefix(prefix)
        with self._mutex:
            return iter([info for key, (_, info) in self._objects.items() if key.startswith(prefix)])

    def delete(self, keys: Iterable[str]) -> None:
        """Remove every key; missing ones are fine."""
        for key in keys:
            check_key(key)
            with self._mutex:
                self._objects.pop(key, None)
                self._locked.discard(key)

    def now_s(self) -> float:
        """What `clock` says [s since the epoch]."""
        return self.clock()

    def sync(self, prefix: str) -> None:
        """Nothing to do: nothing here survives anything."""
        check_prefix(prefix)

    def touch(self, key: str) -> None:
        """Set `modified_s` to now; NotFoundError when the object is gone."""
        data, info = self._object(key)
        with self._mutex:
            if key in self._objects:
                self._objects[key] = data, replace(info, modified_s=self.clock())

    def release(self, key: str) -> None:
        """Delete `key` and its hold."""
        self.delete([key])

    def is_locked(self, key: str) -> bool | None:
        """Whether `lock` was called and neither `release` nor `drop_locks` since."""
        check_key(key)
        with self._mutex:
            return key in self._locked

    def pinned(self) -> AbstractContextManager[None]:
        """Nothing to do: a dictionary is always the same."""
        return nullcontext()

    def clean(self) -> int:
        """Nothing to do: a put leaves nothing behind."""
        return 0

    def prepare(self) -> None:
        """Nothing may be here."""
        if self._objects:
            raise InvalidInputError(f"{self.url}: is not empty and no repository; choose another name")

    @contextmanager
    def sandbox(self) -> Iterator[MemoryStore]:
        """Another store."""
        yield MemoryStore("trial")

    def drop_locks(self) -> None:
        """For tests: every holder dies; their objects stay."""
        with self._mutex:
            self._locked.clear()

    def _publish(self, key: str, data: Buffer, *, held: bool) -> None:
        check_key(key)
        copy = bytes(byte_view(data))
        with self._mutex:
            if key in self._objects:
                raise taken(key, self.url)
            self._objects[key] = copy, ObjectInfo(key, len(copy), self.clock(), hashlib.sha256(copy).hexdigest())
            if held:
                self._locked.add(key)

    def _object(self, key: str) -> tuple[bytes, ObjectInfo]:
        check_key(key)
        with self._mutex:
            found = self._objects.get(key)
        if found is None:
            raise missing(key, self.url)
        return found


def memory_store(name: str) -> MemoryStore:
    """The store of that name in this process, made on first use."""
    with _NAMED_LOCK:
        return _NAMED.setdefault(name, MemoryStore(name))
