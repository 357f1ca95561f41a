"""A run whose snapshots need known bytes, and damage to them: what a restore with fallback must choose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.faults import FaultStore
from kit.objects import clone, copy_objects, flip, keys_of, replace
from kit.ranks import Managers, part_of, small_boxes
from kit.repositories import OPTIONS, created, opened, same, values
from snapstore import (
    Skipped,
    SnapshotManager,
)
from snapstore.format import records
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.format.records import Snapshot
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

STEPS = 6


def state_of(version: int, rank: int = 0, count: int = 1) -> dict[str, Any]:
    """Return a rank's share of a version: of one process, the whole of it."""
    whole = values("a", version)
    if count == 1:
        return whole
    return whole | {"model": whole["model"] | {"drift": part_of(whole["model"]["drift"], rank, count)}}


def blank(value: Any) -> Any:
    """Return a state of the same form with other values."""
    if isinstance(value, dict):
        return {key: blank(child) for key, child in value.items()}
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 7)
    if isinstance(value, np.ndarray):
        return np.full_like(value, 7)
    if hasattr(value, "global_shape"):
        copy = type(value)(**vars(value))
        copy.data = torch.full_like(value.data, 7)
        return copy
    return value if isinstance(value, str) else type(value)()


def plain(value: Any) -> Any:
    """Return a state with the local tensors of sharded ones."""
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return value.data if hasattr(value, "global_shape") else value


@cache
def saved(count: int) -> MemoryStore:
    """Return a store with the steps 0 to STEPS - 1 of run a, saved by `count` ranks."""
    store = created()
    with small_boxes():
        if count == 1:
            with SnapshotManager(store, run="a", options=OPTIONS, async_save=False) as manager:
                for step in range(STEPS):
                    manager.save(step, state_of(step))
        else:
            managers = Managers(store, count, async_save=False)
            for step in range(STEPS):
                managers.each(lambda m, r, step=step: m.save(step, state_of(step, r, count)).result())
            managers.end()
    return store


@dataclass
class Needs:
    """The bytes that a snapshot needs: objects as a whole, and ranges of packs."""

    snapshot: Snapshot
    whole: set[str] = field(default_factory=set)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def packs(self) -> list[str]:
        return sorted({key for key, _, _ in self.ranges})

    @property
    def nbytes(self) -> int:
        return sum(length for _, _, length in self.ranges)


@cache
def needs(count: int) -> list[Needs]:
    """Return what each snapshot of `saved` needs, newest first."""
    store, found = saved(count), []
    with opened(store) as repository:
        snapshots = repository.view().snapshots("a")
    for snapshot in reversed(snapshots):
        one = Needs(snapshot, {snapshot.key})
        refs, ranges = list(snapshot.manifests), set()
        while refs:
            m = manifest.read(store, ref := refs.pop(), None)
            one.whole.add(ref.key)
            refs += m.header.children
            table = m.table
            for pack, offset, length in zip(table.ref_packs, table.ref_offsets, table.ref_lengths, strict=True):
                ranges.add((pack_key(m.header.pack_names[pack]), int(offset), int(length)))
        one.ranges = sorted(ranges)
        found.append(one)
    return found


@dataclass
class Damages:
    """Damage to objects, and which snapshots it leaves whole."""

    store: MemoryStore
    touched: dict[str, tuple[int, int]] = field(default_factory=dict)  # key -> the bytes [first, end) that are wrong

    def do(self, key: str, how: str, at: int) -> None:
        if key in self.touched:
            return
        data = self.store.get(key)
        if how == "flip":
            flip(self.store, key, at, 4)
            self.touched[key] = at, at + 1
        elif how == "cut":
            replace(self.store, key, data[:at])
            self.touched[key] = at, len(data)
        else:
            self.store.delete([key])
            self.touched[key] = 0, len(data)

    def spares(self, one: Needs) -> bool:
        if one.whole & self.touched.keys():
            return False
        hit = (self.touched[key] + (first, first + length) for key, first, length in one.ranges if key in self.touched)
        return not any(max(a, first) < min(b, end) for a, b, first, end in hit)


def damaged(count: int, dice: random.Random) -> Damages:
    """Damage the newest snapshots, each in a random way."""
    done = Damages(clone(saved(count)))
    for one in needs(count)[: dice.randint(1, STEPS - 2)]:
        kind = dice.choice(["record", "manifest", "pack", "pack"])
        if kind == "record":
            key = one.snapshot.key
        elif kind == "manifest":
            key = dice.choice(sorted(one.whole - {one.snapshot.key}))
        else:
            key, first, length = dice.choice(one.ranges)
        how = dice.choice(["flip", "flip", "cut", "missing"])
        size = len(saved(count).get(key))
        at = dice.randrange(first, first + length) if kind == "pack" and dice.random() < 0.8 else dice.randrange(size)
        done.do(key, how, at)
    return done


class Counted(FaultStore):
    """Counts the bytes that are read from packs."""

    read_bytes = 0

    def _act(self, name: str, key: str, effect: Any) -> Any:
        found = super()._act(name, key, effect)
        if key.startswith("packs/") and name in ("get", "get_range"):
            self.read_bytes += len(found)
        return found


def restored(store: Any, **options: Any) -> tuple[Any, Any, Skipped]:
    """Return (the snapshot, the state, what was skipped) of a restore by one process; or (its error, ...)."""
    skipped, state = Skipped(), blank(state_of(0))
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:
        try:
            return manager.restore_into(state, fallback=skipped, **options), state, skipped
        except Exception as error:  # noqa: BLE001
            return error, state, skipped


def restored_by(managers: Managers, **options: Any) -> list[tuple[Any, Any, Skipped]]:
    """Return the same of every rank."""
    count = len(managers)
    states = [blank(state_of(0, rank, count)) for rank in range(count)]
    skips = [Skipped() for _ in states]
    done = managers.all(lambda m, r: m.restore_into(states[r], fallback=skips[r], **options))
    return list(zip(done, states, skips, strict=True))


def require_version(state: Any, version: int, rank: int = 0, count: int = 1) -> None:
    assert same(plain(state), plain(state_of(version, rank, count))), f"rank {rank}: not the state of {version}"


def require_blank(state: Any, rank: int = 0, count: int = 1) -> None:
    assert same(plain(state), plain(blank(state_of(0, rank, count)))), f"rank {rank}: its state has changed"


def damaged_newest(store: MemoryStore, count: int = 1, how: str = "flip") -> str:
    """Damage a blob that only the newest snapshot needs; return its pack."""
    key, first, length = own_blob(count)
    data = bytearray(store.get(key))
    if how == "flip":
        flip(store, key, first + length // 2, 4)
    else:
        replace(store, key, data[: first + length // 2])
    return key


def opened_by(store: Any, **options: Any) -> SnapshotManager:
    return SnapshotManager(store, run="a", options=OPTIONS, **options)


@cache
def plain_reads(count: int) -> dict[str, int]:
    """Return the bytes of packs that a plain restore of each whole snapshot reads, by id; of `count` ranks, in all."""
    found = {}
    for one in needs(count):
        stores = [Counted(saved(count)) for _ in range(count)]
        managers = Managers(saved(count), count, stores=stores)
        managers.each(lambda m, r, one=one: m.restore_into(blank(state_of(0, r, count)), one.snapshot.step))
        managers.end()
        found[one.snapshot.id] = sum(store.read_bytes for store in stores)
    return found


def require_few_reads(count: int, stores: Sequence[Counted], wanted: Needs, skipped: Skipped) -> None:
    """Beyond the restore: one read of what was skipped, one of what is restored, and the lost chunk once more or so."""
    reads, ids = plain_reads(count), {name for _, name, _ in skipped.snapshots}
    found = sum(store.read_bytes for store in stores)
    chain = sum(sorted((length for *_, length in needs(count)[0].ranges), reverse=True)[:STEPS])
    again = 6 * chain * count * len(ids)
    assert found <= 2 * reads[wanted.snapshot.id] + sum(reads[name] for name in ids) + again
    if not ids:
        assert found <= 2 * reads[wanted.snapshot.id]


def local(store: MemoryStore, folder: Path) -> Path:
    """Copy objects into a local repository, whose index outlives a process."""
    copy_objects(store, LocalStore(folder, create=True))
    return folder


def notes(folder: Path) -> dict[str, list[int]]:
    """Return the notes of quarantine: pack -> offsets."""
    store = LocalStore(folder)
    keys = [key for key in keys_of(store, "gc/") if key.endswith(".quarantine")]
    found = (records.decode(store.get(key), records.Quarantine, key) for key in keys)
    return {pack_key(note.pack): list(note.blobs) for note in found}


@cache
def own_blob(count: int) -> tuple[str, int, int]:
    """Return a blob that only the newest snapshot needs."""
    newest, *older = needs(count)
    others = {one for other in older for one in other.ranges}
    return next(one for one in newest.ranges if one not in others)
