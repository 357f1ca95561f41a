"""Small repositories whose every version is known, and the checks that hold after any fault.

`values(run, version)` is a pure function, and every snapshot has (run, version) in its metadata. So any reader can
compare a snapshot bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.objects import keys_of
from kit.samples import SEED, THOROUGH
from snapstore import Repository, SaveOptions, Snapshot
from snapstore.catalog import index
from snapstore.check.report import CheckResult
from snapstore.chunks.reader import ChunkReader
from snapstore.format import records
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.format.manifests.delta_choice import ChainCosts
from snapstore.storage.base import ObjectStore
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

if TYPE_CHECKING:
    import pytest

OPTIONS = SaveOptions(pack_bytes=4096, threads=1)
Values = Callable[[str, int], Any]


def index_of(root: Path) -> Path:
    """Return the folder of a local repository's index, which is in the cache."""
    store = LocalStore(root)
    return index.folder_for(store, records.decode(store.get("config"), records.Config, "config").uuid)[0]


@lru_cache(maxsize=1000)
def values(run: str, version: int) -> dict[str, Any]:
    """Return the state of a version: arrays that drift, stay or are new, and small values. Do not change the result."""
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
    """Save a version, with the metadata that `version_of` reads."""
    options.setdefault("metrics", {"loss": float("nan") if version % 3 == 0 else 1 / (1 + version)})
    return repository.save(values(run, version), run=run, step=step, metadata=[run, version], **options)


def version_of(snapshot: Snapshot) -> tuple[str, int]:
    """(run, version) whose `values` a snapshot must hold; version -1 if its reconstructed record does not say."""
    metadata: Any = snapshot.metadata
    if metadata is None:
        return snapshot.run, -1
    if isinstance(metadata, dict):  # of a file that the shell has saved (chaos_worker.py)
        metadata = metadata["safetensors"]["origin"].split(":")
    run, version = metadata
    return run, int(version)


def version_in(state: dict[str, Any], expected: Values = values) -> tuple[str, int] | None:
    """(run, version) whose `values` a state holds; None: it holds those of none."""
    found = [(run, state["version"]) for run in ("a", "b")]
    return next((one for one in found if same(state, expected(*one))), None)


def is_whole(snapshot: Snapshot, state: dict[str, Any], expected: Values = values) -> bool:
    """Return whether a restored state is the one that was saved; of a reconstructed record, one that was saved."""
    version = version_of(snapshot)
    return version_in(state, expected) is not None if version[1] < 0 else same(state, expected(*version))


def dearest(store: ObjectStore, snapshot: Snapshot) -> float:
    """Return the largest ratio, among a snapshot's chunks, of the cost to restore its chain to that of a full blob."""
    found, refs = 1.0, list(snapshot.manifests)
    while refs:
        m = manifest.read(store, refs.pop(), None)
        refs += m.header.children
        costs = ChainCosts(m.table)
        found = max(found, (costs.whole / costs.full).max(initial=1.0))
    return found


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal to the bit, types included."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return same(*(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for t in (a, b)))
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def created(chunk_bytes: int = 1024) -> MemoryStore:
    """Return a store in memory that holds a new, empty repository."""
    store = MemoryStore()
    Repository.create(store, chunk_bytes=chunk_bytes, options=OPTIONS).close()
    return store


def created_like(store: ObjectStore) -> MemoryStore:
    """Make an empty repository in memory that copies from another one can be put into."""
    new = MemoryStore()
    with opened(store) as repository:
        Repository.create(new, like=repository, options=OPTIONS).close()
    return new


@contextmanager
def opened(store: ObjectStore | Path | str, *, damaged: bool = False) -> Iterator[Repository]:
    """Open a fresh Repository with `OPTIONS`, as a new process with an empty index does; close it at the end."""
    with Repository.open(store, options=OPTIONS, damaged=damaged) as repository:
        yield repository


def snapshot_of(store: ObjectStore | Path, reference: str) -> Snapshot:
    """Return the snapshot that a reference names."""
    with opened(store) as repository:
        return repository.snapshot(reference)


def snapshots_of(store: ObjectStore) -> dict[str, Snapshot]:
    """Return reference -> snapshot of every committed and forgotten one."""
    with opened(store) as repository:
        return {s.ref: s for s in repository.view().snapshots(states=("committed", "forgotten"))}


#: Fields that a new revision of a record may change, and fields that a rewrite may; no verb may change any other.
REVISED = {"revision", "state", "write_id", "tags", "policy", "reason", "unproven"}
REWRITTEN = {"manifests", "manifest_list", "bases", "generation", "depth", "chunks", "new_chunks", "stored_bytes"}


def committed(store: ObjectStore) -> dict[str, tuple[int, tuple[str, int], tuple[str, ...], str]]:
    """Return id -> (step, version, tags, `lasting` fields) of every committed snapshot."""
    with opened(store) as repository:
        return {s.id: (s.step, version_of(s), tuple(s.tags), lasting(s)) for s in repository.snapshots()}


def lasting(snapshot: Snapshot) -> str:
    """Return the fields of a record that no verb may change; as text, in which NaN equals itself."""
    fields = {f: getattr(snapshot, f) for f in snapshot.__struct_fields__ if f not in REVISED | REWRITTEN}
    return repr(fields | {"metadata_node": bytes(snapshot.metadata_node)})


#: Contents that were restored without an error, see `_content_of`.
_RESTORED: set[bytes] = set()
_CLEAN = count(SEED)
#: In one of so many calls `check_clean` lets `check` decode all chains; restores do so in every call.
DECODED_EVERY = 1 if THOROUGH else 8


def check_restores(
    repository: Repository, about: str = "", *, expected: Values = values, level: str = "restore"
) -> list[Snapshot]:
    """Check that all committed and forgotten snapshots restore, and that `check` agrees; return the committed ones."""
    return _committed(_check(repository, about, level, expected, set()))


def check_whole(store: ObjectStore, about: str = "", *, run: str = "a") -> None:
    """Check after a fault: all snapshots restore, a save works, and a gc works and leaves only what is needed."""
    with opened(store) as repository:
        before = {s.id for s in restored(repository, about)}
        after = save(repository, run, 900, 900)
        assert {s.id for s in repository.snapshots()} == before | {after.id}, about
        result = repository.gc()
        assert result.waiting_for == [], about
    check_clean(store, about)


def restored(repository: Repository, about: str = "") -> list[Snapshot]:
    """As `check_restores`, but `check` reads only metadata, and nothing that was restored before is restored again."""
    return _committed(_check(repository, about, "metadata", values, _RESTORED))


def check_clean(store: ObjectStore, about: str = "", *, expected: Values = values, level: str | None = None) -> None:
    """Check that all snapshots restore, and that the store holds nothing that is not needed."""
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
            assert is_whole(snapshot, state, expected), f"{about}: {snapshot.ref} differs"
            if content is not None:
                seen.add(content)
    found = repository.check(level)
    assert found.problems == [], about
    assert {s.id for s in found.restorable} == {s.id for s in snapshots}, about
    return found


def _content_of(store: ObjectStore, snapshot: Snapshot, expected: Values) -> bytes | None:
    """Return a digest of all bytes that a restore reads and of its result; None for a remote store.

    A harness makes thousands of copies of a few stores; they differ only in the objects that a fault has changed.
    """
    if not isinstance(store, MemoryStore | LocalStore) or version_of(snapshot)[1] < 0:
        return None
    refs = snapshot.manifests
    about = type(store), expected, version_of(snapshot), [(ref.key, ref.part) for ref in refs]
    digest = hashlib.sha256(repr(about).encode())
    for key in objects_of(store, snapshot):
        digest.update(store.get(key))
    return digest.digest()


def objects_of(store: ObjectStore, snapshot: Snapshot) -> list[str]:
    """Return the keys of a snapshot's manifests, those of several ranks included, and of its packs."""
    headers = [manifest.decode_header(store.get(ref.key), ref.key) for ref in snapshot.manifests]
    children = [child.key for header in headers for child in header.children]
    packs = [pack_key(name) for header in headers for name in header.pack_names]  # a root names its children's too
    return [*(ref.key for ref in snapshot.manifests), *children, *packs]


def decoded_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of chunks of each batch that is read from now on."""
    counts: list[int] = []
    read = ChunkReader._read

    def counted(self: ChunkReader, engine: Any, batch: Any) -> Any:
        counts.append(len(batch.counts))
        return read(self, engine, batch)

    monkeypatch.setattr(ChunkReader, "_read", counted)
    return counts
