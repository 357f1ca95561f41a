"""Names that leave the repository, swapped objects and unknown features of newer releases are refused."""

import hashlib
import os
import struct
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kit.forge import World, digest, full, header_of, noise, reheader, rewrite
from snapstore import Repository
from snapstore.errors import FormatError, IntegrityError, InvalidInputError, SnapstoreError
from snapstore.format import records
from snapstore.format.blobs import pack
from snapstore.format.manifests import manifest, sections
from snapstore.format.manifests.manifest import Box, TensorEntry
from snapstore.format.records import Config, ManifestRef, Session, Snapshot
from snapstore.protocol.liveness import boot_id
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

A = noise(1)
ID = "a" * 32
TRAVERSALS = [
    "../outside",
    "packs/../../outside",
    "/etc/passwd",
    "a//b",
    "a/./b",
    "..",
    "a/..",
    "a\0b",
    "~/x",
    "a\\..\\b",
]


@pytest.mark.parametrize("key", TRAVERSALS)
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_keys_stay_inside(tmp_path, key, kind):
    """Mitigation: every store checks every key, component by component, before it does anything."""
    (tmp_path / "outside").write_text("secret")
    store = LocalStore(tmp_path / "repo", create=True) if kind == "local" else MemoryStore()
    for act in (
        lambda: store.get(key), lambda: store.put(key, b"x"), lambda: store.delete([key]), lambda: store.stat(key),
        lambda: store.get_range(key, 0, 1), lambda: store.touch(key), lambda: store.lock(key, b"x"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match="not a key"):
            act()
    assert (tmp_path / "outside").read_text() == "secret"


def commit_raw(world, fields, key=f"snapshots/r/{0:012d}-{ID}.0"):
    """Put a record of any fields with a valid checksum."""
    payload = msgspec.msgpack.encode(fields)
    head = records.ENVELOPE.pack(b"SNAP", 2, 1, 0, len(payload), 0)[:16]
    world.store.put(key, head + struct.pack("<Q", xxh3_64_intdigest(head + payload)) + payload)


BASE = {"id": ID, "run": "r", "step": 0, "seq": 0, "state": "committed", "write_id": "w"}
REF = {"part": "", "rank": 0, "sha256": "0" * 64, "header_sha256": "0" * 64, "size_bytes": 10, "logical_bytes": 0}


@pytest.mark.parametrize(
    "changes",
    [
        {"manifests": [REF | {"sha256": "../" * 21 + "x"}]},
        {"manifests": [REF | {"sha256": ".." + "0" * 62}]},
        {"manifests": [REF | {"header_sha256": "x"}]},
        {"manifests": [REF | {"size_bytes": -5}]},
        {"run": "../r"},
        {"id": "b" * 32},
        {"step": 1},
        {"revision": 3},
        {"run": "other"},
        {"manifests": "x"},
        {"tags": [b"\xff"]},
    ],
    ids=repr,
)
def test_forged_records_are_damage(changes):
    """Mitigation: SHA-256 names are matched when a record is decoded, and a record must be the one its key names."""
    world = World()
    commit_raw(world, BASE | changes)
    with world.open() as repo:
        assert repo.snapshots() == []
        assert [p.kind for p in repo.check().problems] == ["record"]
        with pytest.raises(IntegrityError, match="whose record cannot be read"):
            repo.restore("r@0")
        with pytest.raises(IntegrityError, match="nothing was deleted"):
            repo.gc()


def test_a_record_moved_to_another_key():
    """Replay of an old record under a new run or step. Mitigation: the record holds its whole key."""
    world = World()
    s = world.commit(world.manifest([(digest(A), world.pack(full(A)))]))
    for key in (f"snapshots/r/{9:012d}-{ID}.0", f"snapshots/q/{0:012d}-{ID}.0", f"snapshots/r/{0:012d}-{ID}.7"):
        world.store.put(key, world.store.get(s.key))
        with world.open() as repo:
            assert key in [p.key for p in repo.check().problems]
        world.store.delete([key])
    np.testing.assert_array_equal(world.restore()["w"].numpy(), A)


def test_names_that_are_no_records_are_passed_over():
    """Mitigation: only keys of exactly one form are taken for records."""
    world = World()
    s = world.commit(world.manifest())
    for name in ("x", f"{0:012d}-{ID}", f"{0:012d}-{ID}.00", f"{0:012d}-{ID}.99999999999", f"{0:012d}-{ID}.0.tmp"):
        world.store.put(f"snapshots/r/{name}", world.store.get(s.key))
    with world.open() as repo:
        assert len(repo.snapshots()) == 1


def test_a_config_cannot_choose_where_the_index_lies(tmp_path, monkeypatch):
    """An index lies under <cache>/<uuid>-<hash of the place>. Mitigation: a uuid is 32 hex digits."""
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    for uuid in ("../../owned", str(tmp_path / "owned"), "x" * 32, ""):
        root = tmp_path / hashlib.sha256(uuid.encode()).hexdigest()[:8]
        store = LocalStore(root, create=True)
        config = Config(uuid=uuid, version=1, chunk_bytes=1024, digest_seed=7, features=[], created=0.0, writer="x")
        store.put("config", records.encode(config))
        with pytest.raises(FormatError, match="uuid"):
            Repository.open(root)
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path.parent / "owned").exists()


def test_a_forged_session_deletes_and_creates_nothing(tmp_path):
    """gc fences dead sessions by the key they name. Mitigation: it must be a record's, and puts never replace."""
    with Repository.create(tmp_path / "repo") as repo:
        kept = repo.save({"w": 1}, run="r", step=0)
        before = repo.store.get(kept.key)
        for i, key in enumerate(["config", "../../x", f"packs/00/{'0' * 64}", kept.key, ""]):
            session = Session(id=f"{i:032x}", key=key, host=os.uname().nodename, boot_id=boot_id(), pid=1, started=0.0)
            repo.store.put(f"sessions/{i:032x}", records.encode(session))
        repo.gc()
        assert repo.store.get(kept.key) == before
        assert sorted(info.key for info in repo.store.list("packs/")) == []
        assert [s.ref for s in repo.snapshots()] == ["r@0"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["repo"]


def test_a_session_that_names_another_id_does_not_bypass_the_check(tmp_path):
    """Mitigation: whatever a session says, only keys of this store can be removed."""
    (tmp_path / "victim").write_text("x")
    with Repository.create(tmp_path / "repo") as repo:
        session = Session(id="../../victim", key="", host=os.uname().nodename, boot_id=boot_id(), pid=1, started=0.0)
        repo.store.put(f"sessions/{ID}", records.encode(session))
        with suppress(SnapstoreError):
            repo.gc()
    assert (tmp_path / "victim").read_text() == "x"


def test_manifests_swapped_between_snapshots():
    """Mitigation: a manifest is read under the SHA-256 that the record names."""
    world = World()
    s = world.commit(world.manifest([(digest(A), world.pack(full(A)))]))
    other = world.manifest([(digest(A), world.pack(full(A)))], sequence=9)
    world.store.delete([s.manifests[0].key])
    world.store.put(s.manifests[0].key, other)
    with pytest.raises((IntegrityError, FormatError)):
        world.restore()


def with_id_of(s, run="zzz", step=0, **changes):
    """Return a valid record of another run or step with the id of a snapshot."""
    empty = {"manifests": [], "logical_bytes": 0, "state": "aborted", "write_id": records.new_id()}
    return msgspec.structs.replace(s, **({"run": run, "step": step} | empty | changes))


@pytest.mark.parametrize("changes", [{}, {"run": "0"}, {"run": "r", "step": 7}, {"revision": 10**9 - 1}], ids=repr)
def test_a_second_snapshot_of_one_id_hides_none(tmp_path, changes):
    """A record may name any id. Mitigation: the id belongs to the snapshot that was stored first, and gc stops."""
    with Repository.create(tmp_path / "repo", chunk_bytes=1024) as repo:
        s = repo.save({"w": A}, run="r", step=0)
        newer = repo.save({"w": A + 1}, run="r", step=1)
        second = with_id_of(s, **changes)
        repo.store.put(second.key, records.encode(second))
        os.utime(tmp_path / "repo" / second.key, (9e9, 9e9))
        for reader in (repo, Repository.open(tmp_path / "repo")):
            np.testing.assert_array_equal(reader.restore("r@0")["w"], A)
            np.testing.assert_array_equal(reader.restore(f"id:{s.id}")["w"], A)
            assert [found.key for found in reader.snapshots()] == [s.key, newer.key]
            with pytest.raises(
                IntegrityError, match=rf"{second.key}: repeats the id of .*r/0+-{s.id}, .*nothing was del"
            ):
                reader.gc()
            assert [p.key for p in reader.check("restore").problems] == [second.key]
        repo.repair(apply=True, drop=True)
        repo.forget_snapshots(["r@0"])
        repo.unforget("r@0")
        repo.store.delete([second.key])
        repo.rebuild_index()
        assert repo.gc().deleted_objects == 0
        assert repo.check("restore").ok
        assert [found.id for found in repo.snapshots()] == [s.id, newer.id]


def test_a_second_snapshot_that_was_there_first(tmp_path):
    """An attacker who reads sessions can put it before the save commits: gc deletes nothing until a person looks."""
    with Repository.create(tmp_path / "repo", chunk_bytes=1024) as repo:
        s = repo.save({"w": A}, run="r", step=0)
        second = with_id_of(s)
        repo.store.put(second.key, records.encode(second))
        os.utime(tmp_path / "repo" / second.key, (1, 1))
        with pytest.raises(IntegrityError, match="one of the two is forged"):
            repo.gc()
        assert [p.key for p in repo.check().problems] == [s.key]
        repo.store.delete([second.key])
        repo.rebuild_index()
        repo.gc()
        np.testing.assert_array_equal(repo.restore("r@0")["w"], A)


@pytest.mark.parametrize("of", ["the snapshot", "another session"])
def test_a_session_makes_no_gc_hide_a_snapshot(tmp_path, of):
    """gc creates the record that a dead session names. Mitigation: not under the id of another snapshot."""
    with Repository.create(tmp_path / "repo", chunk_bytes=1024) as repo:
        s = repo.save({"w": A}, run="r", step=0)
        name = s.id if of == "the snapshot" else ID
        session = Session(id=name, key=f"snapshots/z/{0:012d}-{s.id}.0", host="x", boot_id="", pid=1, started=0.0)
        repo.store.put(f"sessions/{name}", records.encode(session))
        assert repo.gc(fence_after_s=0).fenced == [name]
        repo.gc()
        np.testing.assert_array_equal(repo.restore("r@0")["w"], A)
        assert sorted(info.key for info in repo.store.list("snapshots/")) == [s.key]


# --- what only a newer release knows ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"at 64\+\d+: blob version 2, this snapstore reads 1"),
        ({"transform": 3}, "transform 3, layout 0, which this snapstore does not read; use the release that wrote it"),
        ({"layout": 2}, "transform 0, layout 2, which this snapstore does not read; use the release that wrote it"),
        ({"codecs": b"\4" + bytes(7)}, r"does not read codec 4 \(unknown\)"),
        ({"codecs": b"\x45" + bytes(7)}, r"does not read codec 69 \(nvCOMP 5's own format, .*\)"),
        ({"magic": b"SNBX"}, "not a blob: magic b'SNBX'"),
    ],
)
def test_blobs_of_a_newer_release(changes, message):
    """Mitigation: they are refused, and the error names what is unknown."""
    world = World()
    data = full(A)
    if "codecs" in changes:  # a coded plane has entries in the table of lengths
        data = data[:80] + struct.pack("<I", A.size) + data[80:]
        changes = changes | {"count": 1}
    world.commit(world.manifest([(digest(A), world.pack(rewrite(data, **changes)))]))
    with pytest.raises(FormatError, match=message):
        world.restore()


def test_packs_and_manifests_of_a_newer_release():
    """Mitigation: every object has its version at the front."""
    store = MemoryStore()
    data = pack.HEADER.pack(pack.MAGIC, 2, 0, 0, bytes(16), 0, bytes(16), 0) + bytes(32)
    store.put("packs/00/x", data)
    with pytest.raises(FormatError, match="pack version 2, this snapstore reads 1"):
        pack.read_listing(store, "packs/00/x", len(data))
    with pytest.raises(FormatError, match="m: manifest version 7, this snapstore reads 1"):
        manifest.decode(sections.PREFIX.pack(sections.MAGIC, 7, 0, 0, 0), "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"features": ["shards", "crypt"]},
            r"features \['crypt', 'shards'\] are unknown to .*; use snapstore 9 or newer",
        ),
        ({"version": 2}, "format version 2 is unknown to .*; use snapstore 9 or newer"),
        ({"chunk_bytes": 65}, "chunk size 65"),
        ({"chunk_bytes": 2**40}, "chunk size"),
    ],
)
def test_repositories_of_a_newer_release(changes, message):
    """Mitigation: a repository with an unknown feature, version or chunk size is not opened."""
    store = MemoryStore()
    fields = {
        "uuid": ID,
        "version": 1,
        "chunk_bytes": 1024,
        "digest_seed": 7,
        "features": [],
        "created": 0.0,
        "writer": "snapstore 9",
    }
    store.put("config", records.encode(Config(**(fields | changes))))
    with pytest.raises(FormatError, match=message):
        Repository.open(store)


def test_sharded_tensors_are_refused():
    """Mitigation: version 1 reads one box a tensor, and says so."""
    world = World()
    boxes = [Box((0,), (A.size,), 0, 1), Box((A.size,), (A.size,), 1, 1)]
    entry = TensorEntry(("w",), "tensor", "uint8", (2 * A.size,), False, None, boxes, None)
    world.commit(world.manifest([(digest(A), world.pack(full(A)))] * 2, tensors=[entry]))
    with pytest.raises(FormatError, match="in 2 shards, expected one"):
        world.restore()


def test_unknown_keys_in_a_header_are_ignored_and_kept():
    """Minor additions come as unknown keys; an addition that a reader must understand is a feature."""
    data = World().manifest()
    found = header_of(reheader(data, novel=[1, 2]))
    assert found.unknown == (("novel", b"\x92\x01\x02"),)
    assert msgspec.structs.replace(found, unknown=msgspec.UNSET) == header_of(data)
    record = Snapshot(**(BASE | {"manifests": [ManifestRef(**REF)]}))
    assert records.unpack(records.encode(record), Snapshot, "k") == record
