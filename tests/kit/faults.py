"""Stores that fail on purpose, and the single thread in which they fail at the same operation in every run.

`FaultStore` acts at the k-th operation of the code that uses it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from errno import EACCES
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb

from snapstore.catalog import index
from snapstore.errors import NotFoundError, SnapstoreError, StorageError, StorageFullError
from snapstore.storage.base import GET_LIMIT_BYTES, Buffer, ObjectInfo, ObjectStore
from snapstore.storage.local import LocalStore
from snapstore.storage.locks import _KEPT_FDS, unlock
from snapstore.storage.memory import MemoryStore

CRASHES = ("crash-before", "crash-after")
#: fail: once, before the effect. lost: the effect, then the error, once. outage: every operation from k on, before the
#: effect. lost-outage: as outage, but the k-th has its effect. full: every put and lock from k on.
FAILURES = ("fail", "lost", "outage", "lost-outage", "full")
#: torn: the process dies in a put that has left the first half of its bytes. late: the operation fails, and has its
#: effect some operations later, or once the fault is over: a request that was on its way.
MODES = (*CRASHES, *FAILURES, "torn", "late")
#: A late operation has its effect this many operations of the same store later.
LATE_BY = 4


class Crash(BaseException):
    """The process is gone: no handler can do anything in the store any more."""


class FaultStore:
    """An `ObjectStore` that misbehaves at its k-th operation (a delete of n keys is n operations).

    Attributes:
        log: (operation, key) of everything that was tried.
        fired: whether the k-th operation was reached.
    """

    puts_at_once, gets_at_once = 2, 1

    def __init__(self, inner: ObjectStore, at: int | None = None, mode: str = "fail") -> None:
        assert mode in MODES
        self.inner, self.url, self.place, self.at, self.mode = inner, inner.url, inner.place, at, mode
        self.log: list[tuple[str, str]] = []
        self.fired = self.dead = False
        self._held: set[str] = set()
        self._lock = threading.RLock()
        self._late: Callable[[], Any] | None = None

    def heal(self) -> None:
        """End the fault; a late operation has its effect now."""
        self.at = None
        self._land()

    def _land(self) -> None:
        effect, self._late = self._late, None
        if effect is not None:
            with suppress(SnapstoreError):
                effect()

    def die(self) -> None:
        """End the process of this store; the kernel releases its locks."""
        self.dead = True
        for key in self._held:
            drop_lock(self.inner, key)
        self._held.clear()

    def _act(self, name: str, key: str, effect: Callable[[], Any]) -> Any:
        with self._lock:
            if self.dead:
                raise Crash(f"{name} {key}: after the crash")
            number = len(self.log)
            self.log.append((name, key))
        if self.at is not None and number >= self.at + LATE_BY:
            self._land()
        if self.at is None or number < self.at:
            return effect()
        persistent = self.mode in ("outage", "lost-outage", "full")
        if number > self.at and not persistent:
            return effect()
        if self.mode == "full":
            if name not in ("put", "lock"):
                return effect()
            self.fired = True
            raise StorageFullError(f"{key}: no space left (injected)")
        self.fired = True
        if self.mode in ("crash-after", "lost") or (self.mode == "lost-outage" and number == self.at):
            with suppress(SnapstoreError):
                effect()
        if self.mode == "late":
            self._late = effect
        if self.mode in CRASHES or self.mode == "torn":
            self.die()
            raise Crash(f"{self.mode} {name} {key}")
        raise StorageError(f"{key}: {name} failed (injected: {self.mode})")

    def put(self, key: str, data: Buffer) -> None:
        data = bytes(data)  # a late put has its effect when the caller may have changed them
        if self.mode == "torn" and self.at == len(self.log):
            self.inner.put(key, data[: len(data) // 2])
        self._act("put", key, lambda: self.inner.put(key, data))

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        return self._act("get", key, lambda: self.inner.get(key, limit_bytes=limit_bytes))

    def get_range(self, key: str, offset: int, length: int, into=None) -> memoryview:
        return self._act("get_range", key, lambda: self.inner.get_range(key, offset, length, into))

    kept_open = ObjectStore.kept_open  # one range after the other

    def stat(self, key: str) -> ObjectInfo:
        return self._act("stat", key, lambda: self.inner.stat(key))

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        return self._act("sizes", "", lambda: self.inner.sizes(keys))

    def list(self, prefix: str, key_only=None) -> Iterator[ObjectInfo]:
        return iter(self._act("list", prefix, lambda: list(self.inner.list(prefix, key_only))))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._act("delete", key, lambda key=key: self.inner.delete([key]))
            self._held.discard(key)

    def now_s(self) -> float:
        if self.dead:
            raise Crash("now_s: after the crash")
        return self.inner.now_s()

    def sync(self, prefix: str) -> None:
        self._act("sync", prefix, lambda: self.inner.sync(prefix))

    def lock(self, key: str, data: Buffer) -> None:
        self._held.add(key)
        data, late = bytes(data), self.mode == "late" and self.at == len(self.log)
        # one that lands late is held by nobody: its caller was told that it had failed
        self._act("lock", key, lambda: (self.inner.put if late else self.inner.lock)(key, data))

    def touch(self, key: str) -> None:
        self._act("touch", key, lambda: self.inner.touch(key))

    def release(self, key: str) -> None:
        self._act("release", key, lambda: self.inner.release(key))
        self._held.discard(key)

    def is_locked(self, key: str) -> bool | None:
        return self._act("is_locked", key, lambda: self.inner.is_locked(key))

    def pinned(self) -> AbstractContextManager[None]:
        return self.inner.pinned()

    def clean(self) -> int:
        return self._act("clean", "", self.inner.clean)


#: How a read of an object fails (`misread`).
READ_FAULTS = ("unread", "withheld", "missing", "flipped")


def misread(how: str, key: str, read: Callable[[], bytes]) -> bytes:
    """Fail as a read of an object does, or return its bytes with one bit that is wrong."""
    if how == "missing":
        raise NotFoundError(f"{key}: no such object (injected)")
    if how == "withheld":
        raise StorageError(f"{key}: no permission (injected)") from PermissionError(EACCES, "no permission")
    if how == "unread":
        raise StorageError(f"{key}: Input/output error (injected)")
    data = bytearray(read())
    data[len(data) // 2] ^= 1
    return bytes(data)


class Unreadable(FaultStore):
    """Objects that cannot be read, for good or for the first `times` reads.

    Args:
        how: unread: the disk will not read them (EIO). withheld: the server refuses, so they may be whole. missing:
            there are none. flipped: one bit of the bytes that were read is wrong.
    """

    def __init__(self, inner, *keys, times=10**9, how="unread"):
        assert how in READ_FAULTS
        super().__init__(inner)
        self.bad, self.times, self.how = set(keys), times, how

    def _act(self, name, key, effect):
        if key in self.bad and name in ("get", "get_range") and self.times > 0:
            self.times -= 1
            return misread(self.how, key, partial(super()._act, name, key, effect))
        if name == "delete":
            self.bad.discard(key)
        return super()._act(name, key, effect)


def drop_lock(inner: ObjectStore, key: str) -> None:
    """Release one held object, as the kernel does when its process dies."""
    if isinstance(inner, MemoryStore):
        with inner._mutex:
            inner._locked.discard(key)
    elif isinstance(inner, LocalStore) and str(inner.root / key) in _KEPT_FDS:
        unlock(str(inner.root / key))


class _Done:
    """An `engine.Pending` of work that is done already."""

    def __init__(self, results: list[Any], failure: Exception | None = None) -> None:
        self._results, self._failure = results, failure

    def __call__(self) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        return self._results

    def ready(self, timeout_s: float) -> bool:
        return True

    def is_done(self) -> bool:
        return True


def _start_now(self: Any, function: Callable[[Any], Any], items: Sequence[Any]) -> _Done:
    """`Threads.start` in the caller's thread: operations keep their order from run to run, and a Crash gets out."""
    try:
        return _Done([function(item) for item in items])
    except Exception as error:  # noqa: BLE001
        return _Done([], error)


def one_thread(monkeypatch: Any, *, index: bool = True) -> None:
    """Run pools in the caller's thread and commit's retries without sleeping; without LMDB if not `index` (faster)."""
    import time

    monkeypatch.setattr("snapstore.engine.cpu.Threads.start", _start_now)
    monkeypatch.setattr("snapstore.protocol.claim.time", SimpleNamespace(**vars(time) | {"sleep": lambda _: None}))
    if not index:
        monkeypatch.setattr("snapstore.catalog.index.Environment.open", _no_index)
        monkeypatch.setattr("snapstore.catalog.index.folder_for", lambda *_: (Path("nowhere"), False))


def index_in_place(monkeypatch: Any) -> None:
    """Give a repository behind a `FaultStore` the index on the disk that it has when it is opened directly."""
    real = index.folder_for
    monkeypatch.setattr(
        "snapstore.catalog.index.folder_for", lambda store, uuid: real(getattr(store, "inner", store), uuid)
    )


def _no_index(*_: object) -> Any:
    raise lmdb.Error("no index in this test")
