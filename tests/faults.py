"""Stores that fail on purpose, actors that take turns, and a small state whose every version is known.

`FaultStore` acts at the k-th operation of whatever uses it. `SteppingStore` and `Schedule` let several actors run real
code, one store operation of one actor at a time. `values(run, version)` is a pure function, so a snapshot that carries
(run, version) in its metadata can be compared bit by bit by anybody who finds it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import lmdb
import numpy as np
import torch

from snapstore import Repository, SaveOptions, Snapshot
from snapstore.catalog import index
from snapstore.check.report import CheckResult
from snapstore.errors import SnapstoreError, StorageError, StorageFullError
from snapstore.format import manifest, records
from snapstore.format.keys import pack_key
from snapstore.storage.base import GET_LIMIT_BYTES, Buffer, ObjectInfo, ObjectStore
from snapstore.storage.local import LocalStore
from snapstore.storage.locks import _HELD_FDS, let_go
from snapstore.storage.memory import MemoryStore

#: All cases of every test; else a sample, which `SEED`, a new one in every run of pytest (conftest.py), rotates.
THOROUGH = bool(os.environ.get("SNAPSTORE_TEST_THOROUGH"))
SEED = int(os.environ.get("SNAPSTORE_TEST_SEED", "0"))

OPTIONS = SaveOptions(pack_bytes=4096, threads=1, max_depth=3)

Values = Callable[[str, int], Any]

CRASHES = ("crash-before", "crash-after")
#: fail: once, before the effect. lost: the effect, then the error, once. outage: every operation from k on, before the
#: effect. lost-outage: as outage, but the k-th has its effect. full: every put from k on.
FAILURES = ("fail", "lost", "outage", "lost-outage", "full")
#: torn: the process dies in a put that has left the first half of its bytes. late: the operation fails, and has its
#: effect some operations later, or once the fault is over: a request that was on its way.
MODES = (*CRASHES, *FAILURES, "torn", "late")
#: How many operations of the same store later.
LATE_BY = 4


class Crash(BaseException):
    """The process is gone: no handler can do anything in the store any more."""


# --- stores ----------------------------------------------------------------------------------------------------------


class FaultStore:
    """An `ObjectStore` that misbehaves at its k-th operation (a delete of n keys is n operations).

    Attributes:
        log: (operation, key) of everything that was tried.
        fired: whether the k-th operation was reached.
    """

    puts_at_once = 2

    def __init__(self, inner: ObjectStore, at: int | None = None, mode: str = "fail") -> None:
        assert mode in MODES
        self.inner, self.url, self.place, self.at, self.mode = inner, inner.url, inner.place, at, mode
        self.log: list[tuple[str, str]] = []
        self.fired = self.dead = False
        self._held: set[str] = set()
        self._lock = threading.RLock()
        self._late: Callable[[], Any] | None = None

    def heal(self) -> None:
        """The fault is over."""
        self.at = None
        self._land()

    def _land(self) -> None:
        effect, self._late = self._late, None
        if effect is not None:
            with suppress(SnapstoreError):
                effect()

    def die(self) -> None:
        """The process of this store ends: its locks with it."""
        self.dead = True
        for key in self._held:
            drop_hold(self.inner, key)
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
            if name not in ("put", "hold"):
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
        data = bytes(data)  # a late one is read when its owner has gone on
        if self.mode == "torn" and self.at == len(self.log):
            self.inner.put(key, data[: len(data) // 2])
        self._act("put", key, lambda: self.inner.put(key, data))

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        return self._act("get", key, lambda: self.inner.get(key, limit_bytes=limit_bytes))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], into=None) -> list[memoryview]:
        return self._act("get_ranges", key, lambda: self.inner.get_ranges(key, ranges, into))

    def stat(self, key: str) -> ObjectInfo:
        return self._act("stat", key, lambda: self.inner.stat(key))

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        return self._act("sizes", "", lambda: self.inner.sizes(keys))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._act("list", prefix, lambda: list(self.inner.list(prefix))))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._act("delete", key, lambda key=key: self.inner.delete([key]))
            self._held.discard(key)

    def now_s(self) -> float:
        if self.dead:
            raise Crash("now_s: after the crash")
        return self.inner.now_s()

    def settle(self, prefix: str) -> None:
        self._act("settle", prefix, lambda: self.inner.settle(prefix))

    def hold(self, key: str, data: Buffer) -> None:
        self._held.add(key)
        data, late = bytes(data), self.mode == "late" and self.at == len(self.log)
        # one that lands late is held by nobody: its caller was told that it had failed
        self._act("hold", key, lambda: (self.inner.put if late else self.inner.hold)(key, data))

    def touch(self, key: str) -> None:
        self._act("touch", key, lambda: self.inner.touch(key))

    def release(self, key: str) -> None:
        self._act("release", key, lambda: self.inner.release(key))
        self._held.discard(key)

    def is_held(self, key: str) -> bool | None:
        return self._act("is_held", key, lambda: self.inner.is_held(key))

    def pinned(self) -> AbstractContextManager[None]:
        return self.inner.pinned()

    def clean(self) -> int:
        return self._act("clean", "", self.inner.clean)


class Unreadable(FaultStore):
    """Objects that cannot be read (EIO), for good or for the first `times` reads."""

    def __init__(self, inner, *keys, times=10**9):
        super().__init__(inner)
        self.bad, self.times = set(keys), times

    def _act(self, name, key, effect):
        if key in self.bad and name in ("get", "get_ranges") and self.times > 0:
            self.times -= 1
            raise StorageError(f"{key}: Input/output error (injected)")
        if name == "delete":
            self.bad.discard(key)
        return super()._act(name, key, effect)


def drop_hold(inner: ObjectStore, key: str) -> None:
    """What the kernel does to one held object of a process that dies."""
    if isinstance(inner, MemoryStore):
        with inner._lock:
            inner._held.discard(key)
    elif isinstance(inner, LocalStore) and str(inner.root / key) in _HELD_FDS:
        let_go(str(inner.root / key))


def clone(store: MemoryStore) -> MemoryStore:
    """A copy of everything, held objects included."""
    copy = MemoryStore()
    copy._objects, copy._held = dict(store._objects), set(store._held)
    return copy


def keys_of(store: ObjectStore, prefix: str = "") -> list[str]:
    """Sorted."""
    return sorted(info.key for info in store.list(prefix))


def sampled(total: int, every: int) -> range:
    """Every so many-th of `total` cases, beginning elsewhere in every run; all of them if `THOROUGH`."""
    return range(total) if THOROUGH or not total else range(SEED % min(every, total), total, every)


# --- one thread, no sleep --------------------------------------------------------------------------------------------


class _Done:
    """An `engine.Pending` of something that has been done already."""

    def __init__(self, results: list[Any], failure: Exception | None = None) -> None:
        self._results, self._failure = results, failure

    def __call__(self) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        return self._results

    def ready(self, timeout_s: float) -> bool:
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
        monkeypatch.setattr("snapstore.catalog.index.folder_for", lambda *_: (Path("nowhere"), None))


def index_of(root: Path) -> Path:
    """The folder of a local repository's index: in the cache."""
    store = LocalStore(root)
    return index.folder_for(store, records.decode(store.get("config"), records.Config, "config").uuid)[0]


def index_in_place(monkeypatch: Any) -> None:
    """The index of a repository that a `FaultStore` shows is its own one on the disk, as if it were opened itself."""
    real = index.folder_for
    monkeypatch.setattr(
        "snapstore.catalog.index.folder_for", lambda store, uuid: real(getattr(store, "inner", store), uuid)
    )


def _no_index(*_: object) -> Any:
    raise lmdb.Error("no index in this test")


# --- a state whose versions are known --------------------------------------------------------------------------------


@lru_cache(maxsize=1000)
def values(run: str, version: int) -> dict[str, Any]:
    """The state of a version: a tensor that drifts, one mostly constant, one all new, small ones. Shared: read only."""
    of_run = np.random.default_rng(sum(run.encode()))
    drift = of_run.standard_normal(1024).astype(np.float32)
    constant = of_run.standard_normal(1024).astype(np.float32)
    drift[:: 64 + version % 3] += np.float32(version) / 1000
    constant[(version * 97) % constant.size] = version
    return {
        "model": {"drift": torch.from_numpy(drift), "bias": torch.arange(5) + version},
        "optimizer": {"noise": np.random.default_rng(version).integers(0, 255, 4096, np.uint8), "constant": constant},
        "version": version,
        "nan": float("nan"),
    }


def save(repository: Repository, run: str, step: int, version: int, **options: Any) -> Snapshot:
    """Save a version so that `version_of` knows it again."""
    options.setdefault("metrics", {"loss": float("nan") if version % 3 == 0 else 1 / (1 + version)})
    return repository.save(values(run, version), run=run, step=step, metadata=[run, version], **options)


def version_of(snapshot: Snapshot) -> tuple[str, int]:
    """(run, version) whose `values` a snapshot must hold."""
    metadata: Any = snapshot.metadata
    if isinstance(metadata, dict):  # of a file that the shell has saved (chaos_worker.py)
        metadata = metadata["safetensors"]["origin"].split(":")
    run, version = metadata
    return run, int(version)


def same(a: Any, b: Any) -> bool:
    """Bit by bit, types included."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return same(
            a.detach().contiguous().view(torch.uint8).numpy(), b.detach().contiguous().view(torch.uint8).numpy()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


# --- what must hold --------------------------------------------------------------------------------------------------


@contextmanager
def opened(store: ObjectStore) -> Iterator[Repository]:
    """A fresh Repository, as of a new process with an empty index."""
    with Repository.open(store, options=OPTIONS) as repository:
        yield repository


#: What the revisions of a record may differ in; nothing else is any verb's to change.
REVISED = {"revision", "state", "write_id", "tags", "policy", "reason"}
REWRITTEN = {"manifests", "bases", "generation", "depth", "chunks", "new_chunks", "stored_bytes"}


def committed(store: ObjectStore) -> dict[str, tuple[int, tuple[str, int], tuple[str, ...], str]]:
    """id -> (step, version, tags, all that lasts) of every committed snapshot."""
    with opened(store) as repository:
        return {s.id: (s.step, version_of(s), tuple(s.tags), lasting(s)) for s in repository.snapshots()}


def lasting(snapshot: Snapshot) -> str:
    """What no verb may change of a record; as text, in which NaN equals itself."""
    fields = {f: getattr(snapshot, f) for f in snapshot.__struct_fields__ if f not in REVISED | REWRITTEN}
    return repr(fields | {"metadata_node": bytes(snapshot.metadata_node)})


#: What has been restored by repositories that had just been opened, see `_content_of`.
_RESTORED: set[bytes] = set()
_CLEAN = count(SEED)
#: At every so many-th of its calls `check_clean` lets `check` decode all chains, as the restores beside it do.
DECODED_EVERY = 1 if THOROUGH else 8


def check_restores(repository: Repository, about: str = "", *, expected: Values = values) -> list[Snapshot]:
    """Every committed and forgotten snapshot restores bit by bit, and `check` says the same; the committed ones."""
    return _committed(_check(repository, about, "restore", expected, set()))


def check_whole(store: ObjectStore, about: str = "", *, run: str = "a") -> None:
    """After a fault: all restores, a save works, a gc works and leaves nothing that is not needed."""
    with opened(store) as repository:
        before = {s.id for s in restored(repository, about)}
        after = save(repository, run, 900, 900)
        assert {s.id for s in repository.snapshots()} == before | {after.id}, about
        result = repository.gc()
        assert result.waiting_for == [], about
    check_clean(store, about)


def restored(repository: Repository, about: str = "") -> list[Snapshot]:
    """As `check_restores`, of a repository that has just been opened: what others like it have restored is believed."""
    return _committed(_check(repository, about, "metadata", values, _RESTORED))


def check_clean(store: ObjectStore, about: str = "", *, expected: Values = values, level: str | None = None) -> None:
    """All restores, and nothing is there that nobody needs."""
    with opened(store) as repository:
        level = level or ("data" if next(_CLEAN) % DECODED_EVERY else "restore")
        assert _check(repository, about, level, expected, _RESTORED).unneeded_bytes == 0, about
        assert keys_of(store, "sessions/") == [], about
        assert [key for key in keys_of(store, "gc/") if not key.endswith(".done")] == [], about
        assert len(keys_of(store, "gc/")) <= 10, about
        if isinstance(store, LocalStore):
            assert list((store.root / "tmp").iterdir()) == [], about


def _committed(found: CheckResult) -> list[Snapshot]:
    return [snapshot for snapshot in found.restorable if snapshot.state == "committed"]


def _check(repository: Repository, about: str, level: str, expected: Values, seen: set[bytes]) -> CheckResult:
    snapshots = repository.view().snapshots(states=("committed", "forgotten"))
    for snapshot in snapshots:
        content = _content_of(repository.store, snapshot, expected)
        if content not in seen:
            state = repository.restore(f"id:{snapshot.id}")
            assert same(state, expected(*version_of(snapshot))), f"{about}: {snapshot.ref} differs"
            if content is not None:
                seen.add(content)
    found = repository.check(level)
    assert found.problems == [], about
    assert {s.id for s in found.restorable} == {s.id for s in snapshots}, about
    return found


def _content_of(store: ObjectStore, snapshot: Snapshot, expected: Values) -> bytes | None:
    """A digest of all bytes that a restore reads and of what it must give; None of a store that is far away.

    Of thousands of copies of a few prepared stores, each differs from the others by what a fault has altered.
    """
    if not isinstance(store, MemoryStore | LocalStore):
        return None
    refs = snapshot.manifests
    about = type(store), expected, version_of(snapshot), [(ref.key, ref.part) for ref in refs]
    digest = hashlib.sha256(repr(about).encode())
    for ref in refs:
        data = store.get(ref.key)
        digest.update(data)
        for name in manifest.decode_header(data, ref.key).pack_names:
            digest.update(store.get(pack_key(name)))
    return digest.digest()


# --- actors that take turns ------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """The schedule is over; the actor ends where it stands."""


class Actor:
    """Real code in a thread of its own, which stops before every operation of its `store` until told to go on.

    Attributes:
        at: (operation, key) that it stands before; None once it has ended.
        result, error: how it ended.
    """

    def __init__(self, name: str, inner: ObjectStore, body: Callable[[ObjectStore], Any], *, seen_dead: bool = False):
        self.name = name
        self.store = SteppingStore(self, inner, seen_dead=seen_dead)
        self.at: tuple[str, str] | None = ("start", "")
        self.result: Any = None
        self.error: BaseException | None = None
        self.steps = 0
        self._go, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        self._stop = False
        self._thread = threading.Thread(target=self._main, args=(body,), name=name, daemon=True)
        self._thread.start()

    def _main(self, body: Callable[[ObjectStore], Any]) -> None:
        self._go.acquire()
        try:
            if not self._stop:
                self.result = body(self.store)
        except BaseException as error:  # noqa: BLE001  looked at by the test
            self.error = error
        self.at = None
        self._arrived.release()

    def pause(self, name: str, key: str) -> None:
        """Called by the actor's own thread before an operation."""
        if self._stop:
            raise Stopped
        self.at = (name, key)
        self._arrived.release()
        self._go.acquire()
        if self._stop:
            raise Stopped

    @property
    def ended(self) -> bool:
        return self.at is None

    def step(self) -> None:
        """One operation; returns when the actor stands before its next one, or has ended."""
        assert not self.ended
        self.steps += 1
        self._go.release()
        assert self._arrived.acquire(timeout=600), f"{self.name} hangs at {self.at}"

    def until(self, name: str, part: str = "") -> Actor:
        """Run until it stands before operation `name` on a key that contains `part`."""
        if self.at == ("start", ""):
            self.step()
        while self.at is not None and not (self.at[0] == name and part in self.at[1]):
            self.step()
        assert self.at is not None, f"{self.name} ended before {name} {part}: {self.error or self.result}"
        return self

    def finish(self) -> Any:
        """Run to the end; its result, or its error raised."""
        while not self.ended:
            self.step()
        if self.error is not None:
            raise self.error
        return self.result

    def stop(self) -> None:
        """End it where it stands."""
        self._stop = True
        if not self.ended:
            self._go.release()
        self._thread.join(60)


class SteppingStore:
    """An `ObjectStore` that asks its actor before every operation.

    Args:
        seen_dead: `is_held` says None, as of a session of another host.
    """

    puts_at_once = 2

    def __init__(self, actor: Actor, inner: ObjectStore, *, seen_dead: bool) -> None:
        self._actor, self._inner, self._seen_dead = actor, inner, seen_dead
        self.url, self.place = inner.url, inner.place

    def put(self, key: str, data: Buffer) -> None:
        self._actor.pause("put", key)
        self._inner.put(key, data)

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        self._actor.pause("get", key)
        return self._inner.get(key, limit_bytes=limit_bytes)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], into=None) -> list[memoryview]:
        self._actor.pause("get_ranges", key)
        return self._inner.get_ranges(key, ranges, into)

    def stat(self, key: str) -> ObjectInfo:
        self._actor.pause("stat", key)
        return self._inner.stat(key)

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        self._actor.pause("sizes", "")
        return self._inner.sizes(keys)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._actor.pause("list", prefix)
        return iter(list(self._inner.list(prefix)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._actor.pause("delete", key)
            self._inner.delete([key])

    def now_s(self) -> float:
        return self._inner.now_s()

    def settle(self, prefix: str) -> None:
        self._actor.pause("settle", prefix)
        self._inner.settle(prefix)

    def hold(self, key: str, data: Buffer) -> None:
        self._actor.pause("hold", key)
        self._inner.hold(key, data)

    def touch(self, key: str) -> None:
        self._actor.pause("touch", key)
        self._inner.touch(key)

    def release(self, key: str) -> None:
        self._actor.pause("release", key)
        self._inner.release(key)

    def is_held(self, key: str) -> bool | None:
        self._actor.pause("is_held", key)
        return None if self._seen_dead else self._inner.is_held(key)

    def pinned(self) -> AbstractContextManager[None]:
        return self._inner.pinned()

    def clean(self) -> int:
        self._actor.pause("clean", "")
        return self._inner.clean()


def run_randomly(actors: Sequence[Actor], random: Random) -> list[tuple[str, str, str]]:
    """One operation of one actor at a time, until all have ended; now and then one of them stalls for long."""
    trace: list[tuple[str, str, str]] = []
    stalled: dict[Actor, int] = {}
    while any(not actor.ended for actor in actors):
        for actor in list(stalled):
            stalled[actor] -= 1
            if stalled[actor] <= 0:
                del stalled[actor]
        ready = [actor for actor in actors if not actor.ended and actor not in stalled]
        if not ready:
            stalled.clear()
            continue
        actor = random.choice(ready)
        for _ in range(random.choice((1, 1, 2, 8))):
            if actor.ended:
                break
            trace.append((actor.name, *actor.at))
            actor.step()
        if random.random() < 0.05:
            stalled[actor] = random.choice((5, 20, 100))
    return trace
