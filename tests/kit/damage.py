"""A small repository that holds an object of every class, and every way to damage one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from kit.faults import Crash, FaultStore, Unreadable
from kit.objects import clone, flip, keys_of
from kit.reference import replace_encode
from kit.repositories import created, opened, same, save, snapshots_of, values, version_of
from kit.tally import tally
from snapstore import KeepLast, Repository
from snapstore.errors import SnapstoreError
from snapstore.format import records
from snapstore.format.blobs import blob, pack
from snapstore.format.keys import record_key
from snapstore.format.records import Snapshot
from snapstore.protocol.liveness import this_session
from snapstore.storage.memory import MemoryStore


def twin(repository: Repository, run: str, version: int, **options: Any) -> Snapshot:
    """Save the state of a version of run a into a run without bases: every chunk of it is stored once more."""
    return repository.save(values("a", version), run=run, step=version, metadata=["a", version], **options)


def die_in_a_save(store: MemoryStore, step: int) -> None:
    """Let a process die in a save of run a that has stored packs."""
    dead = FaultStore(store)
    with opened(dead) as found:
        dead.at, dead.mode = len(dead.log) + 25, "crash-after"
        with pytest.raises(Crash):
            save(found, "a", step, step)


@contextmanager
def encoded_wrongly() -> Iterator[None]:
    """Encode each chunk with one wrong bit, under its right digest: only a rebuild of the chunk finds that."""
    encode = blob.encode

    def wrong(source: Any, *args: Any, **options: Any) -> Any:
        changed = source.copy()
        changed[7] ^= 1
        return encode(changed, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        replace_encode(patch, wrong)
        yield


@cache
def repository() -> MemoryStore:
    """a@0 to a@3, each based on the one before, a@2 forgotten, a@1 tagged; twin@1 is a@1 in packs of its own.

    There are two revisions of policies, the session of a dead save, and the mark and wait list of a dead gc.
    """
    store = created()
    with opened(store) as found:
        for step in range(4):
            save(found, "a", step, step)
        twin(found, "twin", 1)
        found.tag("a@1", "good")
        found.set_policies("a", [KeepLast(5)])
        found.set_policies("a", [KeepLast(7)])
        found.forget_snapshots(["a@2"])
    die_in_a_save(store, 7)
    dry = FaultStore(clone(store))
    with opened(dry) as found:
        found.gc()
    number = next(i for i, (operation, key) in enumerate(dry.log) if operation == "put" and ".wait" in key)
    dead = FaultStore(store)
    with opened(dead) as found:
        dead.at, dead.mode = number, "crash-after"
        with pytest.raises(Crash):
            found.gc()
    return store


#: ref -> snapshot, of all that an undamaged repository restores.
everyone = cache(snapshots_of)


def restoring(store: Any, wanted: dict[str, Snapshot]) -> set[str]:
    """Return the references of the snapshots that restore bit for bit; fail if one restores to other bits."""
    whole = set()
    with opened(store, damaged=True) as found:
        for ref, snapshot in wanted.items():
            try:
                state = found.restore(f"id:{snapshot.id}")
            except SnapstoreError:
                continue
            assert same(state, values(*version_of(snapshot))), f"{ref}: other bits were handed out"
            whole.add(ref)
    return whole


def packs_of(store: MemoryStore, snapshot: Snapshot) -> list[str]:
    """Keys of the packs that a save has written, in order."""
    found = {}
    for key in keys_of(store, "packs/"):
        header = pack.read_header(store, key)
        if header.save_id.hex() == snapshot.id:
            found[header.sequence] = key
    return [found[number] for number in sorted(found)]


def _record(ref: str, revision: int) -> Callable[[MemoryStore], str]:
    def key(store: MemoryStore) -> str:
        s = everyone(repository())[ref]
        return record_key(s.run, s.step, s.id, revision)

    return key


def _part(ref: str, number: int) -> Callable[[MemoryStore], str]:
    return lambda store: everyone(repository())[ref].manifests[number].key


def _pack(ref: str, number: int) -> Callable[[MemoryStore], str]:
    return lambda store: packs_of(repository(), everyone(repository())[ref])[number]


def _only(prefix: str, suffix: str = "") -> Callable[[MemoryStore], str]:
    return lambda store: next(key for key in keys_of(repository(), prefix) if key.endswith(suffix))


#: class of object -> (the kind that check reports, its key)
CLASSES: dict[str, tuple[str, Callable[[MemoryStore], str]]] = {
    "config": ("config", lambda store: "config"),
    "record": ("record", _record("a@0", 0)),
    "record of the newest": ("record", _record("a@3", 0)),
    "record, tagged": ("record", _record("a@1", 1)),
    "record, forgotten": ("record", _record("a@2", 1)),
    "record, an old revision": ("record", _record("a@1", 0)),
    "manifest of a root": ("manifest", _part("a@1", 0)),
    "manifest of a part": ("manifest", _part("a@0", -1)),
    "pack that all build on": ("pack", _pack("a@0", 0)),
    "pack of a delta": ("pack", _pack("a@1", 0)),
    "pack of the newest": ("pack", _pack("a@3", -1)),
    "pack of the twin": ("pack", _pack("twin@1", -1)),
    "policy": ("policy", lambda store: "policies/a.1"),
    "policy, an old revision": ("policy", lambda store: "policies/a.0"),
    "session": ("session", _only("sessions/")),
    "mark": ("gc", _only("gc/", ".mark")),
    "wait list": ("gc", _only("gc/", ".wait")),
}
#: Where a pack's bit flips, and whether a blob is hit.
PLACES: dict[str, tuple[int, bool]] = {
    "flip in the header": (20, False),
    "flip in a blob's header": (pack.HEADER.size + 50, True),
    "flip in a payload": (pack.HEADER.size + blob.HEADER.size + 90, True),
    "flip in the footer": (-60, False),
    "flip in the trailer": (-3, False),
}
DAMAGES = ("flip", "truncated", "empty", "missing", "replaced", "unreadable")


def cases() -> list[tuple[str, str]]:
    """Return every (class, damage)."""
    found = [(name, how) for name in CLASSES for how in DAMAGES if not (how == "flip" and name.startswith("pack"))]
    return found + [(name, how) for name in CLASSES if name.startswith("pack") for how in PLACES]


def damaged(name: str, how: str) -> tuple[MemoryStore, Any, str]:
    """Copy `repository` and damage one object; return (the store of the objects, the store to use, the key)."""
    tally("damaged objects")
    store = clone(repository())
    key = CLASSES[name][1](store)
    data = store.get(key)
    if how == "unreadable":
        return store, Unreadable(store, key), key
    store.delete([key])
    if how in PLACES or how == "flip":
        at = PLACES[how][0] if how in PLACES else len(data) // 2
        changed = bytearray(data)
        changed[at] ^= 4
        store.put(key, bytes(changed))
    elif how == "replaced":
        store.put(key, _another(name, key))
    elif how != "missing":
        store.put(key, data[: len(data) // 2] if how == "truncated" else b"")
    return store, store, key


def _another(name: str, key: str) -> bytes:
    """A valid object of the same class."""
    if name == "config":
        other = created(2048)
        return other.get("config")
    if name.startswith("policy"):
        return records.encode(records.RunPolicies(run="another", revision=0, policies=[]))
    if name == "session":
        return records.encode(this_session(records.new_id(), record_key("b", 1, records.new_id(), 0)))
    if name == "mark":
        return records.encode(records.Mark(id=records.new_id(), started=0.0, packs=b"", manifests=b""))
    if name == "wait list":
        return records.encode(records.Wait(id=records.new_id(), sessions=[]))
    prefix = key.partition("/")[0] + "/"
    data = {other: repository().get(other) for other in keys_of(repository(), prefix) if other != key}
    size = len(repository().get(key))
    return next(found for found in data.values() if len(found) != size)  # every level of check notices another size


def three() -> MemoryStore:
    """Return a store with a@0 to a@2, each based on the one before."""
    made = created()
    with opened(made) as found:
        for step in range(3):
            save(found, "a", step, step)
    return made


def refs(snapshots: Any) -> set[str]:
    """Return the references of snapshots."""
    return {s.ref for s in snapshots}


def wound(store: Any, ref: str = "a@0", number: int = 0) -> str:
    """Flip a bit in the first blob of a pack that a save has written; return the pack's key."""
    with opened(store) as found:
        key = packs_of(store, found.snapshot(ref))[number]
    flip(store, key, pack.HEADER.size + 50)
    return key
