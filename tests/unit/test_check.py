"""check finds each class of damage at the level that can see it, and names exactly the affected snapshots."""

from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kit.objects import flip, keys_of, replace
from kit.packs import scan
from snapstore.check import damaged_packs
from snapstore.errors import FormatError, IntegrityError, InvalidInputError, StorageError
from snapstore.format import records
from snapstore.format.blobs import blob, pack
from snapstore.format.keys import parse_record_key
from snapstore.format.records import Snapshot
from snapstore.options import SaveOptions
from snapstore.repository import Repository
from snapstore.save import manifest_writer
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("remembering")

LEVELS = ("metadata", "data", "restore")


def floats(seed, count=5000):
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)


@pytest.fixture
def store():
    """Steps 0 and 1 of run a share the frozen part's pack. Step 1's model is a delta to step 0's. Run b is alone."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=8192, options=SaveOptions(threads=2)) as repo:
        a = floats(1)
        frozen = {"w": floats(2)}
        repo.save({"model": {"w": a}, "frozen": frozen}, run="a", step=0)
        repo.save({"model": {"w": a * np.float32(1.00001)}, "frozen": frozen}, run="a", step=1)
        repo.save({"other": {"w": floats(3)}, "small": [1, 2.5]}, run="b", step=0)
    return store


def check(store, level, **options):
    with Repository.open(store, options=SaveOptions(threads=2)) as repo:
        return repo.check(level, **options)


def names(snapshots):
    return [s.ref for s in snapshots]


def packs_of(store, ref):
    """Return {part: key of its pack} of the packs that a save wrote, found by the save id in their headers."""
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        save_id = bytes.fromhex(repo.snapshot(ref).id)
    found = {}
    for info in store.list("packs/"):
        listing = pack.read_listing(store, info.key, info.size_bytes)
        if listing.header.save_id == save_id:
            found[listing.part] = info.key
    return found


def manifest_of(store, ref, part):
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        return next(m.key for m in repo.snapshot(ref).manifests if m.part == part)


@pytest.mark.parametrize("level", LEVELS)
def test_a_whole_repository_is_ok(store, level):
    result = check(store, level)
    assert result.ok
    assert result.problems == []
    assert names(result.restorable) == ["a@0", "a@1", "b@0"]
    assert (result.damaged, result.unneeded_bytes, result.level) == ([], 0, level)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (["list"], "list"),
        (["tensor", 0, False], "tensor"),
        ({}, "a map"),
        ("x" * (1024 * 1024 + 1), "expected at most 1048576"),
    ],
    ids=["short", "tensor", "map", "large"],
)
def test_metadata_that_cannot_be_read(store, node, why):
    """A restore does not read them."""
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        snapshot = repo.snapshot("a@1")
    forged = msgspec.structs.replace(snapshot, metadata_node=msgspec.Raw(msgspec.msgpack.encode(node)))
    replace(store, snapshot.key, records.encode(forged))
    result = check(store, "metadata")
    (problem,) = result.problems
    assert (problem.kind, problem.key, problem.snapshots) == ("record", snapshot.key, ())
    assert f"a@1: {snapshot.key}: its metadata cannot be read: " in problem.message
    assert why in problem.message
    assert names(result.restorable) == ["a@0", "a@1", "b@0"]


def test_an_empty_repository_is_ok():
    store = MemoryStore()
    Repository.create(store).close()
    assert check(store, "restore").ok


def found(result, kind, key, lost):
    """Check that each finding is of this kind and object or of kind "chunk", and that exactly `lost` is damaged."""
    assert not result.ok
    assert {p.kind for p in result.problems} <= {kind, "chunk"}
    assert key is None or {p.key for p in result.problems if p.kind == kind} == {key}
    assert names(result.damaged) == lost
    assert names(result.restorable) == [ref for ref in ("a@0", "a@1", "b@0") if ref not in lost]
    suffering = {ref for p in result.problems for ref in p.snapshots}
    assert suffering == {s.id for s in result.damaged}


# (Offset of the byte, whether snapshots are damaged by it). The first blob of a pack begins behind the pack header.
PLACES = {
    "blob magic": (pack.HEADER.size + 1, True),
    "blob reserved": (pack.HEADER.size + 6, True),
    "blob checksum": (pack.HEADER.size + 9, True),
    "blob digest": (pack.HEADER.size + 50, True),
    "payload": (pack.HEADER.size + blob.HEADER.size + 300, True),
    "pack header": (20, False),
    "footer": (-60, False),
    "trailer": (-3, False),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("ref", "part", "users"),
    [
        ("a@0", "model", ["a@0", "a@1"]),
        ("a@0", "frozen", ["a@0", "a@1"]),
        ("a@1", "model", ["a@1"]),
        ("b@0", "other", ["b@0"]),
    ],
)
def test_a_flipped_byte_in_a_pack(store, place, ref, part, users):
    key = packs_of(store, ref)[part]
    at, loses = PLACES[place]
    flip(store, key, at)
    assert check(store, "metadata").ok, "this level reads only names and sizes of packs"
    for level in ("data", "restore"):
        found(check(store, level), "pack", key, users if loses else [])


def test_a_blob_that_only_one_snapshot_needs(store):
    """Damage of a blob that only step 0 needs does not affect step 1, which shares the other chunk."""
    old = np.concatenate([floats(1)[:2048], floats(9)[:2048]])
    new = np.concatenate([floats(1)[:2048], floats(10)[:2048]])  # the second chunk is completely different
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        first, second = (repo.save({"m": {"w": w}}, run="c", step=i) for i, w in enumerate((old, new)))
    key = packs_of(store, "c@0")["m"]
    offsets = [at for at, _ in scan(memoryview(store.get(key)), key)]
    flip(store, key, offsets[-1] + 90)
    for level in ("data", "restore"):
        result = check(store, level)
        assert {p.snapshots for p in result.problems} == {(first.id,)}
        assert names(result.restorable) == ["a@0", "a@1", "b@0", "c@1"]
    assert second.chunks == 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("ref", "part", "users"), [("a@1", "model", ["a@1"]), ("a@0", "frozen", ["a@0", "a@1"])])
def test_a_missing_pack(store, level, ref, part, users):
    key = packs_of(store, ref)[part]
    store.delete([key])
    found(check(store, level), "pack", key, users)


@pytest.mark.parametrize("level", LEVELS)
def test_a_pack_cut_short(store, level):
    """Only snapshots that need a blob behind the cut are damaged."""
    key = packs_of(store, "b@0")["other"]
    data = store.get(key)
    replace(store, key, data[:-10])
    found(check(store, level), "pack", key, [])
    replace(store, key, data[:200])
    found(check(store, level), "pack", key, ["b@0"])


@pytest.mark.parametrize("level", LEVELS)
def test_an_extended_pack(store, level):
    key = packs_of(store, "b@0")["other"]
    replace(store, key, store.get(key) + b"more")
    found(check(store, level), "pack", key, [])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["flip", "truncate", "extend", "remove"])
def test_a_damaged_manifest(store, level, how):
    key = manifest_of(store, "a@0", "frozen")
    data = store.get(key)
    if how == "flip":
        flip(store, key, len(data) // 2)
    elif how == "remove":
        store.delete([key])
    else:
        replace(store, key, {"truncate": data[:-1], "extend": data + b"x"}[how])
    found(check(store, level), "manifest", key, ["a@0", "a@1"])  # both snapshots share the manifest


def record_key(store, ref):
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        return repo.snapshot(ref).key


@pytest.mark.parametrize("how", ["flip", "truncate", "extend", "empty"])
def test_a_damaged_record(store, how):
    key = record_key(store, "a@0")
    data = store.get(key)
    if how == "flip":
        flip(store, key, 40)
    else:
        replace(store, key, {"truncate": data[:-3], "extend": data + b"x", "empty": b""}[how])
    result = check(store, "restore")
    assert [(p.kind, p.key) for p in result.problems] == [("record", key)]
    assert result.problems[0].snapshots == (parse_record_key(key)[2],)
    assert names(result.restorable) == ["a@1", "b@0"]


def test_an_old_revision_that_is_damaged_loses_nothing(store):
    key = record_key(store, "b@0")
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        repo.tag("b@0", "keep")
    flip(store, key, 40)
    result = check(store, "restore")
    assert result.problems == []
    assert [(p.kind, p.key, p.snapshots) for p in result.notes] == [("record", key, ())]
    assert names(result.restorable) == ["a@0", "a@1", "b@0"]
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        assert repo.restore("b@keep")["small"] == [1, 2.5]


def test_a_record_that_changes_under_an_open_index(store, monkeypatch):
    with Repository.open(store, options=SaveOptions(threads=2)) as repo:
        key = repo.snapshot("b@0").key
        modified_s = store.stat(key).modified_s
        flip(store, key, 40)
        renewed = repo.check("metadata")
        with monkeypatch.context() as patch:  # a bit that flips on the disk does not change the file's time
            patch.setattr(store, "clock", lambda: modified_s)
            store.touch(key)
        result = repo.check("metadata")
    assert [p.key for p in renewed.problems] == [p.key for p in result.problems] == [key]
    assert names(renewed.damaged) == names(result.damaged) == ["b@0"]


def test_a_record_that_vanishes_under_an_open_index(store):
    with Repository.open(store, options=SaveOptions(threads=2)) as repo:
        key = repo.snapshot("b@0").key
        store.delete([key])
        result = repo.check("metadata")
        assert [(p.kind, p.key) for p in result.problems] == [("index", key)]
        repo.rebuild_index()
        assert [p.kind for p in repo.check("metadata").problems] == ["unexplained"], "its packs are still there"


def test_a_lost_record_that_no_index_knows_leaves_objects_that_check_reports(store):
    """gc stops at these objects; check must not say that gc frees them."""
    store.delete([record_key(store, "b@0")])
    for level in LEVELS:
        result = check(store, level)
        (problem,) = result.problems
        assert (problem.kind, problem.snapshots, problem.command) == ("unexplained", (), "")
        assert "4 objects (" in problem.message
        assert "that no record explains" in problem.message
        assert result.unneeded_bytes == 0
        assert names(result.restorable) == ["a@0", "a@1"]
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        with pytest.raises(IntegrityError, match="gc: 4 objects that no record explains"):
            repo.gc()
        repo.gc(unexplained=True)
        assert repo.check().ok


@pytest.mark.parametrize("fails", [False, True])
def test_a_running_save_explains_its_objects(fails):
    """check runs beside a save whose packs and manifests are there and whose record is not; and after its failure."""
    found = []

    class Looking(MemoryStore):
        def put(self, key, data):
            if key.startswith("snapshots/"):
                found.append(check(self, "metadata"))
                if fails:
                    raise StorageError("refused on purpose")
            super().put(key, data)

    store = Looking()
    refused = pytest.raises(StorageError) if fails else nullcontext()
    with Repository.create(store, chunk_bytes=8192, options=SaveOptions(threads=2)) as repo, refused:
        repo.save({"w": floats(1)}, run="a", step=0)
    assert found
    assert all(result.ok for result in found), found[0].problems
    assert found[0].unneeded_bytes > 0
    assert check(store, "data").ok


def test_a_record_moved_to_another_key(store):
    old = record_key(store, "b@0")
    new = old.replace("snapshots/b/", "snapshots/c/")
    store.put(new, store.get(old))
    store.delete([old])
    result = check(store, "metadata")
    assert [p.key for p in result.problems] == [new]
    assert names(result.restorable) == ["a@0", "a@1"]


def test_a_stray_object_is_named(store):
    store.put("snapshots/readme.txt", b"hello")
    result = check(store, "metadata")
    assert [(p.kind, p.key, p.snapshots) for p in result.problems] == [("record", "snapshots/readme.txt", ())]
    assert len(result.restorable) == 3


def test_a_tree_that_does_not_fit_its_parts(store):
    """A record that lacks one of its manifests is well-formed, but no state can be built from it."""
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        s = repo.snapshot("a@0")
    left = [m for m in s.manifests if m.part != "frozen"]
    forged = msgspec.structs.replace(s, manifests=left, logical_bytes=sum(m.logical_bytes for m in left))
    replace(store, s.key, records.encode(forged))
    assert isinstance(forged, Snapshot)
    for level in LEVELS:
        found(check(store, level), "manifest", s.key, ["a@0"])


def test_a_tie_to_another_form(store, monkeypatch):
    """A save refuses to write it. If a snapshot has it all the same, no level calls the snapshot restorable."""
    entry_of = manifest_writer.entry_of

    def tied(spec, *places):
        tie = ("model", 0) if spec.path == ("master", "w") else None
        return entry_of(msgspec.structs.replace(spec, tie=tie), *places)

    monkeypatch.setattr(manifest_writer, "entry_of", tied)
    state = {"model": {"w": floats(1)}, "master": {"w": floats(1)[:10]}}
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        with pytest.raises(FormatError, match=r"part 'master': master\.w: tied to entry 0 of part 'model', which has"):
            repo.save(state, run="a", step=2)
        with monkeypatch.context() as unchecked:
            unchecked.setattr(manifest_writer, "check_ties", lambda parts: None)
            s = repo.save(state, run="a", step=2)
        with pytest.raises(FormatError, match=r"has another kind, dtype or shape; the newest whole .* is a@1 "):
            repo.restore(s.ref)
    for level in LEVELS:
        result = check(store, level)
        found(result, "manifest", s.key, ["a@2"])
        assert names(result.restorable) == ["a@0", "a@1", "b@0"]


def test_two_damages_are_both_found(store):
    flip(store, packs_of(store, "b@0")["other"], 400)
    store.delete([manifest_of(store, "a@1", "model")])
    result = check(store, "data")
    assert sorted(p.kind for p in result.problems) == ["manifest", "pack"]
    assert names(result.restorable) == ["a@0"]


def test_forgotten_snapshots_are_checked_and_counted_as_unneeded(store):
    with Repository.open(store, options=SaveOptions(threads=1)) as repo:
        repo.forget_snapshots(["b@0"], force=True)
        result = repo.check("restore")
        assert result.ok
        assert names(result.restorable) == ["a@0", "a@1", "b@0"]
        assert result.unneeded_bytes == repo.gc(dry_run=True).deleted_bytes > 0


def test_share_samples_packs(store):
    total = len(keys_of(store, "packs/"))

    class Counted(MemoryStore):
        read = 0

        def get(self, key, **limits):
            self.read += key.startswith("packs/")
            return super().get(key, **limits)

    counted = Counted()
    for key in keys_of(store, "packs/") + keys_of(store, "manifests/") + keys_of(store, "snapshots/") + ["config"]:
        counted.put(key, store.get(key))
    for share, expected in ((1.0, total), (0.5, round(total / 2)), (1e-9, 1)):
        counted.read = 0
        assert check(counted, "data", share=share).ok
        assert counted.read == expected


def test_a_bad_level(store):
    with pytest.raises(InvalidInputError, match="check level 'all': expected one of metadata, data, restore"):
        check(store, "all")


def test_intact_pages_that_hold_no_tree_of_own_values_are_damage(monkeypatch):
    """The chunks of such pages have correct digests, so only the content shows the damage."""
    monkeypatch.setattr(damaged_packs, "pages_of", lambda m: m.pages)
    monkeypatch.setattr(damaged_packs, "read_pages", lambda *_: b"\xc1")
    monkeypatch.setattr(damaged_packs, "part_of", lambda *_: SimpleNamespace(name=""))
    header = SimpleNamespace(part="", world_size=2)
    root, child = (SimpleNamespace(header=header, tensors=[], tree=None, pages=p) for p in (None, [object()]))
    with pytest.raises(FormatError):
        damaged_packs.check_tree(None, [root, child], with_pages=True)
