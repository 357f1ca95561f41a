"""check reports an intact object of a newer release as newer, not as damaged, and no verb deletes it."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from kit.forge import SIZE, World, digest, full, noise, rewrite
from snapstore import (
    AlreadyExistsError,
    FormatError,
    IntegrityError,
    KeepLast,
    Repository,
    SaveOptions,
    SnapstoreError,
    UnknownFormatError,
)
from snapstore.format import records
from snapstore.format.hashing import checksum
from snapstore.format.keys import record_key
from snapstore.format.manifests.manifest import Box, TensorEntry
from snapstore.protocol.liveness import this_session
from snapstore.storage.memory import MemoryStore

A = noise(1)


def of_blob(**changes: object) -> World:
    world = World()
    data = full(A)
    if "codecs" in changes:  # a coded plane has an entry in the table of lengths
        data = data[:80] + struct.pack("<I", A.size) + data[80:]
    world.commit(world.manifest([(digest(A), world.pack(rewrite(data, **changes)))]))
    return world


def of_manifest(*, version: int = 1, kind: int = 0, chunks: int = 1, **changes: object) -> World:
    world = World()
    listed = [(digest(A), world.pack(full(A)))] * chunks
    table = world.table(listed)
    table.ref_kinds[:] = kind
    data = bytearray(world.manifest(listed, table=table, **changes))
    struct.pack_into("<H", data, 8, version)
    world.commit(bytes(data))
    return world


def of_record() -> World:
    world = of_manifest()
    (key,) = (key for key in world.store._objects if key.startswith("snapshots/"))
    data = bytearray(world.store.get(key))
    data[5] = 2
    struct.pack_into("<Q", data, 16, checksum(bytes(data[:16]) + bytes(data[24:])))
    world.store.delete([key])
    world.store.put(key, bytes(data))
    return world


SHARDS = TensorEntry(
    ("w",), "tensor", "uint8", (2 * SIZE,), False, None, (Box((0,), (SIZE,), 0, 1), Box((SIZE,), (SIZE,), 1, 1)), None
)
NEWER: dict[str, Callable[[], World]] = {
    "a blob's version": lambda: of_blob(version=2),
    "a blob's transform": lambda: of_blob(transform=3),
    "a blob's layout": lambda: of_blob(layout=2),
    "a codec": lambda: of_blob(codecs=b"\4" + bytes(7), count=1),
    "a manifest's version": lambda: of_manifest(version=2),
    "a kind of reference": lambda: of_manifest(kind=3),
    "shards": lambda: of_manifest(chunks=2, tensors=[SHARDS]),
    "a node of the tree": lambda: of_manifest(tree=["dict", ["w"], [["novel", 0, False]]]),
    "a record's version": of_record,
}


def objects(store: MemoryStore) -> dict[str, bytes]:
    return {key: data for key, (data, _) in store._objects.items()}


@pytest.mark.parametrize("what", NEWER)
def test_it_is_reported_and_left_alone(what):
    world = NEWER[what]()
    before = objects(world.store)
    with world.open() as repository:
        with pytest.raises(IntegrityError if "record" in what else UnknownFormatError):
            repository.restore("r@0")
        result = repository.check("restore")
        assert [problem.command for problem in result.problems] == [""], result.problems
        assert not result.ok
        assert (result.restorable, result.damaged) == ([], [])
        assert [s.ref for s in result.unknown] == ["r@0"]
        for options in ({}, {"drop": True}, {"drop": True, "purge": True}):
            for level in ("data", "restore"):
                report = repository.repair(apply=True, level=level, **options)
                assert (report.lost, report.dropped, report.healed) == ([], [], [])
                if level == "restore" or ("blob" not in what and what != "a codec"):
                    assert len(report.open) >= 1, "nothing was said of it"
                assert {action.kind for action in report.actions} <= {"index"}
        if what in ("a record's version", "a manifest's version"):  # gc cannot know what they need
            with pytest.raises(SnapstoreError, match="version 2, this snapstore"):
                repository.gc()
        else:
            repository.gc()
    now = objects(world.store)
    assert {key: now.get(key) for key in before} == before


def test_a_record_of_another_version_stands_among_others():
    """Saves of other runs still work, and the record stays unchanged for the release that can read it."""
    world = of_record()
    (key,) = (key for key in world.store._objects if key.startswith("snapshots/"))
    was = world.store.get(key)
    with world.open() as repository:
        for step in range(3):
            repository.save({"w": np.arange(5000) + step}, run="other", step=step)
        repository.repair(apply=True, drop=True)
        repository.forget([KeepLast(1)], run="other")
        assert [s.step for s in repository.snapshots("other")] == [2]
        assert list(repository.view().damaged) == [key]
        assert "format version 2" in repository.view().damaged[key]
    assert world.store.get(key) == was


@pytest.mark.parametrize("kind", ["policies", "gc", "sessions"])
def test_small_objects_of_another_version_are_kept(kind):
    store = MemoryStore()
    Repository.create(store).close()
    name = records.new_id()
    value, key = {
        "policies": (records.RunPolicies(run="a", revision=0, policies=[]), "policies/a.0"),
        "gc": (records.Mark(id=name, started=0.0, packs=b"", manifests=b""), f"gc/{name}.mark"),
        "sessions": (this_session(name, record_key("a", 0, name, 0)), f"sessions/{name}"),
    }[kind]
    data = bytearray(records.encode(value))
    data[5] = 2
    struct.pack_into("<Q", data, 16, checksum(bytes(data[:16]) + bytes(data[24:])))
    store.put(key, bytes(data))
    store.clock = lambda: 1e11  # the session has not been renewed for long
    with Repository.open(store, options=SaveOptions(threads=1)) as repository:
        (problem,) = repository.check().problems
        assert (problem.key, problem.command) == (key, "")
        assert "format version 2" in problem.message
        report = repository.repair(apply=True, drop=True, purge=True)
        assert [action.kind for action in report.actions] == ["index"]
        assert report.open
    assert store.get(key) == bytes(data)


def test_an_encrypted_repository_is_refused_and_left_alone():
    """No release writes one yet: the feature and the key of the config are reserved (docs/format.md)."""
    world = of_manifest()
    config = records.decode(world.store.get("config"), records.Config, "config")
    fields = msgspec.to_builtins(config)
    fields |= {"features": ["encrypted"], "writer": "snapstore 9.9"}
    fields["encryption"] = {"scheme": "aes-256-gcm", "key_id": bytes(16), "salt": bytes(32)}
    payload = msgspec.msgpack.encode(fields)
    head = records.encode(config)[:8] + struct.pack("<Q", len(payload))
    world.store.delete(["config"])
    world.store.put("config", head + struct.pack("<Q", checksum(head + payload)) + payload)
    before = dict(world.store._objects)
    text = r"is encrypted, which this snapstore \(.*\) cannot read; use snapstore 9.9 or newer, and the key"
    for damaged in (False, True):  # opened for a repair, too: its config is not taken for a damaged one
        with pytest.raises(UnknownFormatError, match=text):
            Repository.open(world.store, damaged=damaged)
    with pytest.raises(AlreadyExistsError):
        Repository.create(world.store)
    assert world.store._objects == before


@pytest.mark.parametrize("where", ["manifest", "record"])
def test_an_encrypted_object_is_refused(where):
    world = of_manifest(features=["encrypted"]) if where == "manifest" else of_manifest()
    with Repository.open(world.store) as repository:
        (snapshot,) = repository.snapshots()
        if where == "record":
            revision = snapshot.revised(features=["encrypted"])
            world.store.put(revision.key, records.encode(revision))
        with pytest.raises(SnapstoreError, match="'encrypted', which this snapstore"):
            repository.restore(f"id:{snapshot.id}")
        assert [problem.command for problem in repository.check().problems] == [""]


def test_a_flipped_version_is_damage():
    """Its checksum is right for the version of this release, so no other release has written it."""
    value = records.encode(records.Wait(id="a" * 32, sessions=[]))
    flipped = value[:5] + bytes([value[5] ^ 2]) + value[6:]
    with pytest.raises(IntegrityError, match="checksum mismatch"):
        records.unpack(flipped, records.Wait, "key")
    with pytest.raises(FormatError, match="magic"):
        records.unpack(b"SNAQ" + value[4:], records.Wait, "key")
