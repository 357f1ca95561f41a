"""repair recovers every snapshot whose bytes exist, deletes nothing that may be needed, and follows its options."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from contextlib import suppress
from functools import partial

import msgspec
import numpy as np
import pytest
import xxhash
from msgspec import structs

from kit.damage import (
    damaged,
    die_in_a_save,
    encoded_wrongly,
    packs_of,
    refs,
    repository,
    restoring,
    three,
    twin,
    wound,
)
from kit.faults import Crash, FaultStore, Unreadable, one_thread
from kit.lies import LyingStore, every_lie
from kit.objects import change, clone, copy_objects, flip, keys_of, replace
from kit.reference import replace_encode
from kit.repositories import OPTIONS, check_restores, index_of, opened, same, save, snapshot_of, snapshots_of, values
from kit.shell import invoke
from snapstore import (
    ConflictError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    KeepLast,
    Repository,
    SaveOptions,
    SnapshotManager,
    SnapstoreError,
    StorageError,
)
from snapstore.catalog.history import FIRST_SEQ
from snapstore.check.report import LEVELS
from snapstore.format import records
from snapstore.format.blobs import blob, pack
from snapstore.format.keys import pack_key, quarantined_names, record_key
from snapstore.format.manifests import manifest
from snapstore.protocol.liveness import this_session
from snapstore.repair import repair as repair_module
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    one_thread(monkeypatch, index=False)


@pytest.fixture
def store():
    return three()


# --- healing ---------------------------------------------------------------------------------------------------------


def test_a_later_save_repairs(store):
    """No object holds the lost chunk. A save of the same state stores it again, and repair then heals the snapshots."""
    key = wound(store)
    wanted = snapshots_of(store)
    assert restoring(store, wanted) == set()
    with opened(store) as found:
        report = found.repair(apply=True)
        assert refs(s for s, _ in report.lost) == {"a@0", "a@1", "a@2"}
        assert report.healed == []
        assert not report.ok
        assert found.repair(apply=True).actions[0].kind == "index", "nothing more can be done"
        again = found.save(values("a", 0), run="a", step=3, metadata=["a", 0])
        assert again.bases, "what is whole is shared"
        assert 0 < again.new_chunks < again.chunks
        assert key not in _needed(found, again)
        report = found.repair(apply=True)
        assert refs(report.healed) == {"a@0", "a@1", "a@2"}
        assert (report.lost, report.open) == ([], [])
        assert found.check("restore").ok
    wanted = snapshots_of(store)
    assert restoring(store, wanted) == {"a@0", "a@1", "a@2", "a@3"}


def _needed(found, snapshot):
    return {
        pack_key(name) for ref in snapshot.manifests for name in found.context.index.header(ref).pack_names
    }  # fmt: skip


@pytest.mark.parametrize("known", [True, False])
def test_saves_inherit_damage_only_until_it_is_known(store, known):
    key = wound(store, number=-1)
    with opened(store) as found:
        if known:
            found.repair(apply=True)
        after = found.save(values("a", 2), run="a", step=3, metadata=["a", 2])
        assert (key in _needed(found, after)) == (not known)


def test_a_manager_goes_on_training_through_it(store):
    """Saves, forget and gc of a running job work before and after a repair that cannot heal everything."""
    wound(store, "a@1", -1)
    with opened(store) as found:
        manager = SnapshotManager(found, run="a", keep=[KeepLast(10)], async_save=False)
        manager.save(3, values("a", 3))
        with opened(store) as other:
            other.repair(apply=True)
        for step in range(4, 8):
            manager.save(step, values("a", step))
        found.forget_snapshots(["a@3"])
        found.gc()
        assert same(manager.restore(7), values("a", 7))
        manager.close()


def test_a_lost_pack_stops_no_gc_once_it_is_known(store):
    key = wound(store)
    store.delete([key])
    with opened(store) as found:
        save(found, "b", 0, 5)
        save(found, "b", 1, 6)
        found.forget_snapshots(["b@0"])
        with pytest.raises(IntegrityError, match="missing"):
            found.gc()
        found.repair(apply=True)
        assert found.gc().deleted_objects > 0
        assert "b@1" in refs(found.check("restore").restorable)


def test_a_pack_that_comes_back_leaves_the_quarantine(store):
    key = wound(store)
    good = bytearray(store.get(key))
    good[pack.HEADER.size + 50] ^= 1
    with opened(store) as found:
        found.repair(apply=True)
        found.gc()
        assert any(note.endswith(".quarantine") for note in keys_of(store, "gc/"))
        replace(store, key, bytes(good))
        report = found.repair(apply=True)
        assert {a.kind for a in report.actions} == {"release", "index"}
        assert f"{key}: leaves the quarantine: it is intact" in [a.message for a in report.actions]
        assert found.check("restore").ok
    assert not [note for note in keys_of(store, "gc/") if note.endswith(".quarantine")]


def test_quarantine_stays_until_it_is_lifted(store):
    key = wound(store, "a@2", -1)
    with Repository.open(store, options=dataclasses.replace(OPTIONS, share_runs=False)) as found:
        found.save(values("a", 2), run="twin", step=2, metadata=["a", 2])
        assert refs(found.repair(apply=True).healed) == {"a@2"}
        for _ in range(2):
            found.gc()
        assert key in keys_of(store, "packs/")
        assert found.gc(dry_run=True).deleted_objects == 0
        assert [note.key for note in found.check("data").notes] == [key]
        assert found.stats().unneeded_bytes == 0
        planned = found.repair(purge=True)
        assert [a.kind for a in planned.actions] == ["purge", "index"]
        found.repair(apply=True, purge=True)
        found.gc()
        assert key not in keys_of(store, "packs/")
        assert found.check("restore").notes == []


@pytest.mark.parametrize("how", ["damaged", "unreadable", "vanished"])
def test_nothing_is_purged_beside_a_record_that_is_not_known(store, how):
    """The record may need the pack. Once the record is put back, no save uses its snapshot as a base."""
    with opened(store) as found:
        found.tag("a@2", "good")
    key = wound(store)
    with opened(store) as found:
        found.repair(apply=True)
        found.forget_snapshots(["a@0", "a@1"], force=True)
        found.gc()
        found.repair(apply=True)
        kept = found.snapshot("a@2")
        assert found.in_need_of_quarantined([kept]) == {kept.id}
    keys = [record_key("a", 2, kept.id, revision) for revision in range(kept.revision + 1)]
    good = {key: store.get(key) for key in keys}
    seen = Unreadable(store, keys[-1]) if how == "unreadable" else store
    with opened(seen) as found:
        if how == "vanished":  # a backup from before it was forgotten is put back
            backup = clone(store)
            found.untag("a@2", "good")
            found.forget_snapshots(["a@2"], force=True)
            put_back(store, backup)
        for other in keys if how != "vanished" else ():
            flip(store, other, 60)
        for apply in (False, True, True):
            report = found.repair(apply=apply, purge=True)
            assert "purge" not in {action.kind for action in report.actions}
            assert any(line.startswith("nothing is purged") for line in report.open)
    for other, data in good.items():
        replace(store, other, data)
    with opened(store) as found:
        assert found.in_need_of_quarantined([found.snapshot("a@2")])
        after = found.save(values("a", 2), run="a", step=3, metadata=["a", 2])
        assert key not in _needed(found, after)
        assert same(found.restore("a@3"), values("a", 2))


def test_drop_forgets_what_is_lost_and_nothing_else(store):
    wound(store, "a@1", -1)
    with opened(store) as found:
        found.tag("a@1", "precious")
        lost = refs(found.check("data").damaged)
        assert "a@0" not in lost
        planned = found.repair(drop=True)
        report = found.repair(apply=True, drop=True)
        assert refs(planned.dropped) == refs(report.dropped) == lost - {"a@1"}
        assert any("precious" in line for line in report.open)
        assert refs(found.snapshots()) == {"a@0", "a@1", "a@2"} - refs(report.dropped)
        found.untag("a@1", "precious")
        assert found.repair(apply=True, drop=True).ok
        found.gc()
        found.repair(apply=True, purge=True)
        found.gc()
        assert found.check("restore").ok


def test_a_step_means_no_dropped_save_while_an_earlier_one_is_whole(store):
    with opened(store) as found:
        earlier = found.snapshot("a@1")
        again = found.save(values("b", 7), run="a", step=1, full=True)
        found.forget(KeepLast(9), run="a")  # the earlier save of the step, too
        store.delete([ref.key for ref in again.manifests])
        assert found.repair(apply=True, drop=True).dropped == [again]
        assert found.snapshot("a@1").id == earlier.id
        assert same(found.restore("a@1"), values("a", 1))
        assert found.unforget("a@1").id == earlier.id


@pytest.mark.parametrize("name", ["apply", "drop", "purge"])
def test_a_text_does_not_count_as_true(store, name):
    wound(store, "a@1", -1)
    before = clone(store)
    with (
        opened(store) as found,
        pytest.raises(InvalidInputError, match=f"{name} 'no': expected True or False"),
    ):
        found.repair(**{"apply": True, name: "no"})
    assert store._objects == before._objects


def test_lost_snapshots_are_listed_in_the_order_of_their_saves(store):
    """They are sorted by run, then by sequence number; ids are random."""
    with opened(store) as found:
        made = [found.save(values("z", step), run="z", step=step, full=True) for step in (9, 3, 8, 1, 5)]
        first = found.save(values("b", 1), run="b", step=1, full=True)
        for snapshot in (*made, first):
            store.delete([ref.key for ref in snapshot.manifests])
        for report in (found.repair(), found.repair(apply=True)):
            assert [s.ref for s, _ in report.lost] == ["b@1", "z@9", "z@3", "z@8", "z@1", "z@5"]
        assert [s.ref for s in found.repair(apply=True, drop=True).dropped] == [
            "b@1", "z@9", "z@3", "z@8", "z@1", "z@5",
        ]  # fmt: skip


def test_a_lost_manifest_stops_gc_until_it_is_dropped(store):
    with opened(store) as found:
        ref = found.snapshot("a@0").manifests[0]
        store.delete([ref.key])
        report = found.repair(apply=True)
        assert [(s.ref, "manifest is missing" in why) for s, why in report.lost] == [("a@0", True)]
        with pytest.raises(IntegrityError, match="nothing was deleted"):
            found.gc()
        assert refs(found.repair(apply=True, drop=True).dropped) == {"a@0"}
        found.gc()
        assert found.check("restore").ok
        assert refs(found.snapshots()) == {"a@1", "a@2"}


@pytest.mark.parametrize("harm", ["lost", "altered", "its note is altered too"])
def test_policies_do_not_count_what_lacks_a_manifest(store, harm):
    """If KeepLast(1) counted the damaged newest as whole, it would forget a@1, the newest that can be restored."""
    with opened(store) as found:
        key = found.snapshot("a@2").manifests[0].key
        whole = store.get(key)
        if harm == "lost":
            store.delete([key])
        else:
            flip(store, key, 100)
        assert refs(s for s, _ in found.repair(apply=True).lost) == {"a@2"}
        (note,) = keys_of(store, "gc/")
        if harm == "its note is altered too":
            flip(store, note, 30)
            assert [s.ref for s, _ in found.forget([KeepLast(1)], run="a", dry_run=True).kept] == ["a@1", "a@2"]
            found.repair(apply=True)
            assert records.decode(store.get(note), records.Lost, note).id == found.snapshot("a@2").id
        assert {a.kind for a in found.repair(apply=True).actions} == {"index"}
        chosen = found.forget([KeepLast(1)], run="a", dry_run=True)
        assert refs(chosen.forgotten) == {"a@0"}
        replace(store, key, whole)
        assert [problem.key for problem in found.check().notes] == [note]
        assert {a.kind for a in found.repair(apply=True).actions} == {"release", "index"}
        chosen = found.forget([KeepLast(1)], run="a", dry_run=True)
        assert refs(chosen.forgotten) == {"a@0", "a@1"}
        store.delete([key])
        assert refs(found.repair(apply=True, drop=True).dropped) == {"a@2"}
        assert keys_of(store, "gc/") == [note]
        found.gc()
        assert [key for key in keys_of(store, "gc/") if not key.endswith(".done")] == []
        assert same(found.restore("a@1"), values("a", 1))


def test_a_dropped_snapshot_of_which_no_manifest_is_left_is_collected():
    """It has no object of its own but its record: gc has nothing to delete, but must note that it is collected."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as found:
        state = np.random.default_rng(1).integers(0, 9, 4096, np.uint8)
        for step in range(2):
            found.save([state, step], run="a", step=step)
        (ref,) = found.snapshot("a@0").manifests
        store.delete([ref.key])
        assert refs(found.repair(apply=True, drop=True).dropped) == {"a@0"}
        assert [p.command for p in found.check().problems] == ["snapstore gc"]
        assert found.gc().deleted_objects == 0
        assert found.check("restore").ok
        assert np.array_equal(found.restore("a@1")[0], state)


def test_a_dropped_snapshot_whose_manifest_cannot_be_read_stops_no_gc():
    """This holds even if a gc has died and left a mark from before the snapshot was dropped."""
    _, store, _ = damaged("manifest of a part", "unreadable")
    assert [key for key in keys_of(store, "gc/") if key.endswith(".mark")]
    with opened(store) as found:
        assert refs(found.repair(apply=True, drop=True).dropped) == {"a@0"}
        found.gc()
        assert found.check("restore").ok


def test_a_chunk_that_was_encoded_wrongly_is_quarantined_for_good(store):
    """Its bytes are as written and their SHA-256 is right: only a rebuild of the chunk finds it. A copy heals it."""
    data = np.random.default_rng(1).integers(0, 9, 8192, np.uint8)
    options = SaveOptions(threads=1, pack_bytes=4096, restore_cost=1.0, verify_writes="off")
    with Repository.open(store, options=options) as found:
        with encoded_wrongly():
            found.save({"w": data}, run="c", step=0)
        assert found.check("data").ok
        result = found.check("restore")
        assert refs(result.damaged) == {"c@0"}
        assert {p.command for p in result.problems} == {"snapstore repair --level restore"}
        report = found.repair(apply=True, level="restore")
        assert refs(s for s, _ in report.lost) == {"c@0"}
        assert {a.kind for a in found.repair(apply=True).actions} == {"index"}, "its SHA-256 is no reason to let it out"
        found.save({"w": data}, run="c", step=1)
        assert refs(found.repair(apply=True).healed) == {"c@0"}
        assert np.array_equal(found.restore("c@0")["w"], data)
        assert found.check("restore").ok


CHUNK = 4096
ONE_PACK = SaveOptions(threads=1, pack_bytes=1 << 20, restore_cost=1.0, verify_writes="off")


@pytest.fixture
def misbuilt(monkeypatch):
    """(store, bytes of c@0, key of its pack, offset of the wrong blob): of its four chunks the second is wrong."""
    data = np.random.default_rng(1).integers(0, 255, 4 * CHUNK, np.uint8)
    store, encode = MemoryStore(), blob.encode

    def wrong(source, *args, **options):
        changed = source.copy()
        changed[7] ^= source.tobytes() == data[CHUNK : 2 * CHUNK].tobytes()
        return encode(changed, *args, **options)

    Repository.create(store, chunk_bytes=CHUNK).close()
    with Repository.open(store, options=ONE_PACK) as found, monkeypatch.context() as patch:
        replace_encode(patch, wrong)
        found.save({"w": data}, run="c", step=0)
    (key,) = keys_of(store, "packs/")
    offsets = pack.read_listing(store, key, store.stat(key).size_bytes).entries["offset"]
    return store, data, key, int(offsets[1])


def notes(store):
    """Return the keys of the quarantine notes."""
    return [key for key in keys_of(store, "gc/") if key.endswith(".quarantine")]


def noted(store):
    """Return the offsets of the blobs that each note lists as wrong for good."""
    return [records.decode(store.get(key), records.Quarantine, key).blobs for key in notes(store)]


def test_a_note_does_not_condemn_what_a_copy_of_the_pack_repairs(misbuilt):
    """A note must list the wrong blob, not the altered one beside it: `--drop` would forget a whole snapshot."""
    store, data, key, offset = misbuilt
    whole = store.get(key)
    with Repository.open(store, options=ONE_PACK) as found:
        found.save({"v": data[:CHUNK].copy()}, run="d", step=0, bases=["c@0"])
        found.save({"v": np.zeros(9)}, run="d", step=1)
        flip(store, key, pack.HEADER.size + 50)  # in the first blob
        assert refs(s for s, _ in found.repair(apply=True, level="restore").lost) == {"c@0", "d@0"}
        assert noted(store) == [[offset]]
        replace(store, key, whole)
        report = found.repair(apply=True, level="restore", drop=True)
        assert refs(report.dropped) == {"c@0"}
        found.gc()
        assert np.array_equal(found.restore("d@0")["v"], data[:CHUNK])


@pytest.mark.parametrize("which", ["says less", "is damaged"])
def test_a_note_is_written_again_behind_the_next_one(which, misbuilt):
    """A pack in quarantine proves to hold a wrong blob, too. There must always be a note of it: a save may begin."""
    store, data, key, offset = misbuilt
    whole = store.get(key)
    if which == "says less":
        flip(store, key, pack.HEADER.size + 50)  # in the first blob
    with Repository.open(store, options=ONE_PACK) as found:
        found.repair(apply=True, level="data" if which == "says less" else "restore")
        (first,) = notes(store)
        if which == "is damaged":
            flip(store, first, 30)
    watched = FaultStore(store)
    with Repository.open(watched, options=ONE_PACK) as found:
        planned = [(a.kind, a.key) for a in found.repair(level="restore").actions]
        report = found.repair(apply=True, level="restore")
        assert [(a.kind, a.key) for a in report.actions] == planned
        assert planned[0] == ("quarantine", first)
    (then,) = notes(store)
    assert noted(store) == [[offset]]
    assert watched.log.index(("put", then)) < watched.log.index(("delete", first))
    assert quarantined_names([then]) == {key}
    replace(store, key, whole)
    with Repository.open(store, options=ONE_PACK) as found:
        assert {a.kind for a in found.repair(apply=True).actions} <= {"heal", "index"}
        found.save({"w": data}, run="c", step=1)
        assert np.array_equal(found.restore("c@1")["w"], data)
        assert refs(found.repair(apply=True, level="restore", purge=True).healed) == {"c@0"}
        assert notes(store) == []
        found.gc()
        assert found.check("restore").ok
        assert found.check("restore").notes == []


@pytest.mark.parametrize("level", ["metadata", "data"])
@pytest.mark.parametrize("damage", ["a blob that was wrong from the start", "an altered pack"])
def test_one_wrong_answer_releases_no_damaged_pack(damage, level, misbuilt):
    """A later save would build on the pack. The lie is about the packs, or about the notes of quarantine."""
    store, _, key, _ = misbuilt
    if damage == "an altered pack":
        flip(store, key, pack.HEADER.size + 50)
    with Repository.open(store, options=ONE_PACK) as found:
        found.repair(apply=True, level="restore")
    honest = LyingStore(clone(store))
    with Repository.open(honest, options=ONE_PACK) as found:
        found.repair(apply=True, level=level)
    told = 0
    for lying, what in liars(store, honest, "gc/", "packs/"):
        with suppress(SnapstoreError), Repository.open(lying, options=ONE_PACK) as found:
            found.repair(apply=True, level=level)
        told += lying.told
        assert quarantined_names(notes(lying.inner)) == {key}, what
    assert told > 5


def liars(store, honest, *prefixes):
    """Yield (a copy of `store` that tells one lie, what it tells) for each request to `honest` about such keys."""
    for k, lie in every_lie(honest.asked):
        if honest.asked[k].key.startswith(prefixes):
            lying = LyingStore(clone(store))
            lying.lie_once(k, lie)
            yield lying, (lie, honest.asked[k])


def test_one_wrong_answer_for_a_manifest_drops_no_snapshot():
    """Only the manifests tell what a snapshot held whose record is damaged, and no index knows it."""
    store = MemoryStore()
    Repository.create(store, chunk_bytes=CHUNK).close()
    with Repository.open(store, options=ONE_PACK) as found:
        for step in range(3):
            found.save({"w": np.full(2 * CHUNK, step, np.uint8)}, run="c", step=step)
        wanted = refs(found.snapshots())
        flip(store, found.snapshot("c@1").key, 60)
    honest = LyingStore(clone(store))
    with Repository.open(honest, options=ONE_PACK) as found:
        found.repair(apply=True, drop=True)
        assert refs(found.snapshots()) == wanted
    told = 0
    for lying, what in liars(store, honest, "manifests/"):
        with suppress(SnapstoreError), Repository.open(lying, options=ONE_PACK) as found:
            found.repair(apply=True, drop=True)
        told += lying.told
        with Repository.open(lying.inner, options=ONE_PACK) as found:
            found.repair(apply=True, drop=True)
            assert refs(found.snapshots()) == wanted, what
    assert told > 5


def test_a_note_of_another_repair_stays(misbuilt, monkeypatch):
    """Another repair writes a note after ours has listed them: ours neither replaces nor deletes it."""
    store, _, key, offset = misbuilt
    wanted = records.Quarantine(pack=key[-64:], found=0, reason="", blobs=[offset], id="f" * 32)
    with Repository.open(store, options=ONE_PACK) as found:
        store.put(f"gc/{key[-64:]}.quarantine", records.encode(msgspec.structs.replace(wanted, id="", blobs=[])))
        scan_objects = repair_module.scan_objects

        def meanwhile(*args):
            result = scan_objects(*args)
            store.put(wanted.key, records.encode(wanted))
            return result

        with monkeypatch.context() as patch:
            patch.setattr(repair_module, "scan_objects", meanwhile)
            assert [a.kind for a in found.repair(apply=True).actions] == ["release", "index"]
        assert notes(store) == [wanted.key]
        assert {a.kind for a in found.repair(apply=True).actions} <= {"heal", "index"}


def test_a_blob_that_only_claims_to_be_the_chunk_repairs_nothing(store):
    """The other copy of the chunk was encoded wrongly under the right digest: only a rebuild finds it."""
    data = np.random.default_rng(1).integers(0, 9, 8192, np.uint8)
    options = SaveOptions(threads=1, pack_bytes=4096, restore_cost=1.0, verify_writes="off", share_runs=False)
    with Repository.open(store, options=options) as found:
        found.save({"w": data}, run="c", step=0)
        with encoded_wrongly():
            found.save({"w": data}, run="d", step=0)
        wound(store, "c@0")
        before = found.snapshot("c@0")
        report = found.repair(apply=True)
        assert refs(s for s, _ in report.lost) == {"c@0"}
        after = found.snapshot("c@0")
        assert [ref.sha256 for ref in after.manifests] != [ref.sha256 for ref in before.manifests], "the rest moved"
        assert refs(found.check("restore").damaged) == {"c@0", "d@0"}
        found.save({"w": data}, run="e", step=0)
        assert refs(found.repair(apply=True).healed) == {"c@0"}
        assert np.array_equal(found.restore("c@0")["w"], data)


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """The repository of kit/damage.py in a folder, with an index."""
    inner = copy_objects(repository(), LocalStore(tmp_path / "r", create=True))
    Repository.open(inner, options=OPTIONS).close()
    return inner


def break_record(inner, ref):
    with opened(inner) as found:
        key = found.snapshot(ref).key
        assert found.snapshots()
    flip(inner, key, 60)
    return key


@pytest.mark.parametrize("index", [True, False])
def test_a_record_comes_back_from_the_index_as_it_was(disk, index, monkeypatch):
    monkeypatch.undo()
    before = snapshot_of(disk, "a@1")
    break_record(disk, "a@1")
    if not index:
        shutil.rmtree(index_of(disk.root))
    with opened(disk) as found:
        found.repair(apply=True)
        after = found.snapshot(f"id:{before.id}")
        assert (after.seq, after.manifests, after.state) == (before.seq, before.manifests, "committed")
        assert set(after.tags) == (set(before.tags) if index else {f"repaired-{before.id[:8]}"})
        assert same(found.restore("a@1"), values("a", 1))


def test_a_tag_that_has_moved_on_stays_where_it_is(store):
    """The revision that removed the tag is lost, so repair rebuilds a@1 from the revision before, which has it."""
    with opened(store) as found:
        found.tag("a@1", "good")
        found.tag("a@1", "old")
        found.tag("a@2", "good")
        assert found.snapshot("a@1").tags == ["old"]
    break_record(store, "a@1")
    with opened(store) as found:
        found.repair(apply=True)
        guessed = found.snapshot("a@1")
        assert guessed.tags == ["old", f"repaired-{guessed.id[:8]}"]
        assert found.snapshot("a@good").step == 2


def test_records_that_were_never_revised_come_back_in_their_order(store):
    """Without an index, everything that is known is in their keys and manifests."""
    wanted = snapshots_of(store)
    for ref in ("a@1", "a@2"):
        flip(store, wanted[ref].key, 60)
    with opened(store) as found:
        report = found.repair(apply=True)
        assert refs(report.healed) == {"a@1", "a@2"}
        for ref, snapshot in wanted.items():
            again = found.snapshot(ref)
            assert (again.id, again.seq, again.manifests) == (snapshot.id, snapshot.seq, snapshot.manifests)
            assert (again.logical_bytes, again.depth, again.chunks) == (
                snapshot.logical_bytes, snapshot.depth, snapshot.chunks,
            )  # fmt: skip
        assert found.snapshot("a@latest").step == 2
        found.forget([KeepLast(1)], run="a", force=True)
        assert refs(found.snapshots()) == {"a@1", "a@2"}, "they are tagged until the user has looked"


def test_a_record_that_was_removed_is_put_back(store):
    with opened(store) as found:
        record = found.snapshot("a@2")
        store.delete([record.key])
        report = found.repair(apply=True)
        assert [a.kind for a in report.actions] == ["record", "index"]
        assert found.snapshot("a@2") == record or found.snapshot("a@2").write_id == record.write_id
        for ref in record.manifests:
            store.delete([ref.key])
        store.delete([record.key])
        assert found.view().vanished
        report = found.repair(apply=True)
        assert [s.id for s, _ in report.lost] == [record.id]
        assert found.view().vanished == []


@pytest.mark.parametrize("is_copy", [False, True], ids=["saved", "copied"])
@pytest.mark.parametrize("beside", ["pack", "manifest", "all manifests"])
def test_a_record_that_is_gone_with_something_it_needs_keeps_gc_from_the_rest(store, beside, is_copy):
    """Once copies of both are put back the snapshot is whole: no gc has deleted its other objects in between."""
    if is_copy:
        store = copied(store)
    with opened(store) as found:
        record = found.snapshot("a@2")
        manifests = [ref.key for ref in record.manifests]
        headers = {key: pack.read_header(store, key) for key in keys_of(store, "packs/")}
        packs = [key for key, header in headers.items() if header.made_for.snapshot.hex() == record.id]
        some = {"pack": packs[:1], "manifest": manifests[:1], "all manifests": manifests}[beside]
        good = {key: store.get(key) for key in (record.key, *some)}
        store.delete(list(good))
        assert refs(found.check().damaged) == {"a@2"}
        planned = found.repair()
        report = found.repair(apply=True)
        assert [a.kind for a in report.actions] == [a.kind for a in planned.actions]
        assert refs(report.left) == refs(planned.left) == {"a@2"}
        if beside == "pack":  # the record is put back, and its manifests say what it needs
            assert found.gc().deleted_objects == 0
        else:
            with pytest.raises(IntegrityError, match="nothing was deleted"):
                found.gc()
        for key in good.keys() - {record.key}:
            store.put(key, good[key])
        found.repair(apply=True)
        found.gc()
        assert found.check("restore").ok
        assert same(found.restore("a@2"), values("a", 2))


# --- a backup is put back under an index that knows what came later --------------------------------------------------


def put_back(store, backup):
    """Put the store back to a backup; the index of an open repository stays as it is now."""
    store._objects = dict(backup._objects)


def accepted(found, wanted):
    """Nothing changes until the user accepts the backup; then every snapshot restores."""
    result = found.check("restore")
    assert (refs(result.restorable), result.ok) == (wanted, False)
    assert {p.command for p in result.problems} == {"snapstore index rebuild --forget-missing"}
    for apply in (False, True, True):
        report = found.repair(apply=apply, drop=True)
        assert (report.actions, report.lost, report.ok) == ([], [], False)
        assert all("'snapstore index rebuild --forget-missing'" in line for line in report.open)
        with pytest.raises(IntegrityError, match="index rebuild"):
            found.gc()
    found.rebuild_index()
    assert found.repair(apply=True, drop=True).ok
    found.gc()
    assert found.check("restore").ok
    for ref in wanted:
        snapshot = next(s for s in found.view().snapshots(states=("committed", "forgotten")) if s.ref == ref)
        assert same(found.restore(f"id:{snapshot.id}"), values("a", snapshot.step))


@pytest.mark.parametrize("tagged", [True, False])
def test_snapshots_of_a_restored_backup_are_not_swept_again(store, tagged):
    with opened(store) as found:
        backup = clone(store)
        found.forget_snapshots(["a@0", "a@1"])
        found.gc()
        put_back(store, backup)
        if tagged:
            with opened(store) as other:
                other.tag("a@0", "good")
        accepted(found, {"a@0", "a@1", "a@2"})
        assert found.snapshot("a@0").tags == ["good"] * tagged


def test_snapshots_only_forgotten_in_a_backup_are_not_swept(store):
    """The index knows that it was swept, but all its objects are back: the user may un-forget it."""
    with opened(store) as found:
        found.forget_snapshots(["a@1"])
        backup = clone(store)
        found.gc()
        put_back(store, backup)
        found.repair(apply=True, drop=True)
        found.rebuild_index()
        assert found.unforget("a@1").state == "committed"
        assert found.check("restore").ok


@pytest.mark.parametrize("swept", [True, False])
def test_a_backup_from_before_a_compact_is_not_lost(store, swept):
    """The rewritten revision is gone with its packs; the revision before it is valid again, and whole."""
    with opened(store) as found:
        found.forget_snapshots(["a@0"])
        found.gc()
        backup = clone(store)
        assert refs(found.compact().rewritten) == {"a@1", "a@2"}
        if swept:
            found.forget_snapshots(["a@1"])
        found.gc()
        put_back(store, backup)
        accepted(found, {"a@1", "a@2"})


def test_a_damaged_backup_costs_no_snapshot_for_what_is_gone(store):
    """Neither revision is whole; the one in the backup is healed once it is accepted."""
    with opened(store) as found:
        twin(found, "twin", 1)
        found.forget_snapshots(["a@0"])
        found.gc()
        backup = clone(store)
        found.compact(["a@1", "a@2"])
        assert found.snapshot("a@1").revision == 1
        found.gc()
        put_back(store, backup)
        store.delete(packs_of(store, found.snapshot("a@1"))[-1:])
        for _ in range(2):
            report = found.repair(apply=True, drop=True)
            assert not report.dropped
            assert [a.kind for a in report.actions if a.kind != "quarantine"] == []
        found.rebuild_index()
        assert "a@1" in refs(found.repair(apply=True).healed)
        assert same(found.restore("a@1"), values("a", 1))


@pytest.mark.parametrize("before", ["whole", "damaged"])
def test_a_tag_whose_record_is_gone_is_put_back(store, before):
    """Without the tag a policy could forget it. The lost revision was committed, and is whole."""
    with opened(store) as found:
        first = found.snapshot("a@0").key
        store.delete([found.tag("a@0", "good").key])
        if before == "damaged":
            flip(store, first, 60)
        assert {p.command for p in found.check().problems} == {"snapstore repair"}
        assert found.repair(apply=True).ok
        assert found.snapshot("a@0").tags == ["good"]
        assert found.check("restore").ok


def test_a_record_of_what_is_collected_is_put_back(store):
    """None of its objects is left, and the record says just that: it is swept."""
    with opened(store) as found:
        found.forget_snapshots(["a@0"])
        found.gc()
        (swept,) = found.view().snapshots(states=("swept",))
        store.delete([swept.key])
        assert found.repair(apply=True).ok
        assert found.view().get(swept.id).state == "swept"
        assert found.check("restore").ok


def test_a_forgotten_revision_does_not_come_back_on_a_record_that_cannot_be_read(store):
    """The store has only the first of two revisions, damaged; the index has its contents: it was not forgotten."""
    with opened(store) as found:
        first = found.snapshot("a@0").key
        found.forget_snapshots(["a@0"])
        store.delete([found.view().snapshots(states=("forgotten",))[0].key])
        flip(store, first, 60)
        for _ in range(2):
            found.repair(apply=True)
        found.gc()
        assert found.check("restore").ok
        assert same(found.restore("a@0"), values("a", 0))


def test_an_aborted_save_does_not_come_back(store):
    """Its record is damaged and its manifests are gone: repair drops it for good if the user asks for that."""
    key = record_key("a", 9, records.new_id(), 0)
    store.put(key, b"SNAP and no more")
    with opened(store) as found:
        with pytest.raises(IntegrityError, match="nothing was deleted"):
            found.gc()
        assert [p.command for p in found.check().problems] == ["snapstore repair --drop"]
        report = found.repair(apply=True)
        assert [s.ref for s, _ in report.lost] == ["a@9"]
        report = found.repair(apply=True, drop=True)
        assert report.ok
        assert refs(report.dropped) == {"a@9"}
        found.gc()
        assert found.check("restore").ok
        assert refs(found.snapshots()) == {"a@0", "a@1", "a@2"}


# --- records of copies, and of rewritten snapshots -------------------------------------------------------------------


def copied(store, target=None):
    """Copy every snapshot into another store; return that store."""
    target = target or MemoryStore()
    with opened(store) as found:
        assert not found.copy(["a@0", "a@1", "a@2"], to=target).failed
    return target


def lose_record(store, ref="a@2"):
    """Damage the ruling record of a snapshot, which no index knows; return the record."""
    record = snapshot_of(store, ref)
    flip(store, record.key, 60)
    return record


def comes_back(store, record, **fields):
    """Repair a store with a damaged record; its snapshot must be whole afterwards."""
    with opened(store) as found:
        assert {p.command for p in found.check("restore").problems} == {"snapstore repair"}
        planned = found.repair()
        report = found.repair(apply=True)
        assert (report.lost, report.open) == ([], [])
        assert [a.message for a in planned.actions] == [a.message for a in report.actions]
        found.gc()
        assert found.gc().deleted_objects == 0
    with opened(store) as found:
        assert found.check("restore").ok
        again = found.snapshot(record.ref)
        assert (again.id, again.seq, again.manifests) == (record.id, record.seq, record.manifests)
        assert again.manifest_list == record.manifest_list
        assert (again.depth, again.chunks, again.logical_bytes) == (record.depth, record.chunks, record.logical_bytes)
        assert f"repaired-{record.id[:8]}" in again.tags
        assert {name: getattr(again, name) for name in fields} == fields
        assert same(found.restore(record.ref), values("a", record.step))


@pytest.mark.parametrize("before", ["begun", "swept"])
def test_a_copy_comes_back_from_its_manifests(store, before):
    """The record before the lost one says "a copy of it has begun", or that the snapshot was swept there once."""
    target = copied(store)
    if before == "swept":
        with opened(target) as found:
            found.forget_snapshots(["a@2"], force=True)
            found.gc()
        copied(store, target)
    record = lose_record(target)
    assert record.revision == (1 if before == "begun" else 4)
    comes_back(target, record, **({"metadata": ["a", 2]} if before == "swept" else {}))


def test_a_copy_that_shares_manifests_comes_back_from_its_list(store):
    """Its state is that of a@2, so the copy has stored nothing but a list of manifests."""
    with opened(store) as found:
        found.save(values("a", 2), run="a", step=3, metadata=["a", 2])
    target = copied(store)
    with opened(store) as found:
        assert not found.copy(["a@3"], to=target).failed
    record = lose_record(target, "a@3")
    assert record.manifest_list
    with opened(target) as found:
        assert found.repair(apply=True).ok
        assert found.gc().deleted_objects == 0
        again = found.snapshot("a@3")
        assert (again.manifests, again.manifest_list) == (record.manifests, record.manifest_list)
        assert found.check("restore").ok
        assert same(found.restore("a@3"), values("a", 2))


@pytest.mark.parametrize("beside", ["manifest", "pack"])
def test_a_damaged_copy_is_not_given_up_unasked(store, beside):
    """Nothing tells whether the lost record was a commit. A new revision would explain its objects to the next gc."""
    target = copied(store)
    record = lose_record(target)
    headers = {key: pack.read_header(target, key) for key in keys_of(target, "packs/")}
    packs = [key for key, header in headers.items() if header.made_for.snapshot.hex() == record.id]
    key = packs[0] if beside == "pack" else record.manifests[0].key
    data = target.get(key)
    target.delete([key])
    held = keys_of(target)
    with opened(target) as found:
        assert "snapstore repair --drop" in {p.command for p in found.check().problems}
        assert "record" not in {action.kind for action in found.repair(apply=True).actions}
        with pytest.raises(IntegrityError, match="nothing was deleted"):
            found.gc()
    assert keys_of(target) == held
    target.put(key, data)
    comes_back(target, record)


def test_the_fence_of_a_copy_is_given_up_only_on_request(store):
    """The copy died before its last manifest, and a gc has fenced it; the fence is lost. No half of it comes back."""
    target = copied(store)
    with opened(store) as found:
        save(found, "a", 3, 3)
        dry = FaultStore(clone(target))
        assert found.copy(["a@3"], to=dry).copied
    number = max(i for i, (verb, key) in enumerate(dry.log) if verb == "put" and key.startswith("manifests/"))
    with opened(store) as found, pytest.raises(Crash):
        found.copy(["a@3"], to=FaultStore(target, number, "crash-before"))
    with opened(target) as found:
        assert found.gc().fenced
        (fence,) = [s for s in found.view().snapshots(states=("aborted",)) if s.step == 3]
    assert fence.revision == 1
    flip(target, fence.key, 60)
    with opened(target) as found:
        assert refs(s for s, _ in found.repair(apply=True).lost) == {"a@3"}
        assert refs(found.repair(apply=True, drop=True).dropped) == {"a@3"}
        found.gc()
        assert found.check("restore").ok
        assert refs(found.snapshots()) == {"a@0", "a@1", "a@2"}


@pytest.mark.parametrize("verb", ["compact", "heal"])
@pytest.mark.parametrize("later", [False, True], ids=["alone", "and a later one"])
def test_a_rewritten_snapshot_comes_back_from_its_manifests(store, verb, later):
    """Healing writes again only some of the manifests; the others are those of the revision before."""
    with opened(store) as found:
        if verb == "compact":
            found.forget_snapshots(["a@0"])
            found.gc()
            assert "a@2" in refs(found.compact().rewritten)
        else:
            old = found.snapshot("a@2").manifests
            found.save(values("a", 2), run="twin", step=2, metadata=["a", 2], full=True)
            wound(store, "a@2", -1)
            assert "a@2" in refs(found.repair(apply=True).healed)
            assert set(old) & set(found.snapshot("a@2").manifests)
            found.repair(apply=True, purge=True)
        assert found.gc().deleted_objects > 0
        record = found.snapshot("a@2")
        if later:
            found.tag("a@2", "good")
    flip(store, record.key, 60)
    if later:
        flip(store, record_key("a", 2, record.id, record.revision + 1), 60)
    comes_back(store, record, metadata=["a", 2], bases=record.bases, created=record.created)


# --- the place of a snapshot whose record was lost -------------------------------------------------------------------


def fenced(store, step):
    """Let a save die, and a gc fence it: its record has neither a number nor a date."""
    die_in_a_save(store, step)
    with opened(store) as found:
        found.forget_snapshots(["a@0"])
        assert found.gc().fenced


def order(store):
    with opened(store) as found:
        return [s.ref for s in found.snapshots("a")]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("lost", [["a@4"], ["a@3"], ["a@1"], ["a@3", "a@4"], ["a@1", "a@2", "a@4"]])
@pytest.mark.parametrize("gap", ["none", "a fence", "a mirror that was out of reach", "an abandoned record"])
def test_a_lost_record_comes_back_in_its_place(store, gap, lost):
    """Numbers are missing before the last snapshots. The lost ones come back between those before and after them."""
    if gap == "a fence":
        fenced(store, 9)
    if gap == "an abandoned record":
        store.put(record_key("a", 9, records.new_id(), 0), b"damaged")
        with opened(store) as found:
            found.repair(apply=True, drop=True)
    with opened(store) as found:
        if gap == "a mirror that was out of reach":
            found.lineage.number_from("a", lambda: 2 * FIRST_SEQ)
        for step in (3, 4):
            save(found, "a", step, step)
        keys = [found.snapshot(ref).key for ref in lost]
    wanted = order(store)
    for key in keys:
        change(store, key, lambda data: data.__setitem__(60, data[60] ^ 1))
    with opened(store) as found:
        planned = found.repair()
        report = found.repair(apply=True)
        assert report.ok
        assert [a.message for a in planned.actions] == [a.message for a in report.actions]
        assert len({s.seq for s in found.snapshots("a")}) == len(wanted)
        assert found.snapshot("a@latest").step == 4
        assert save(found, "a", 5, 5).seq > found.snapshot("a@4").seq
    assert order(store) == [*wanted, "a@5"]


@pytest.mark.parametrize("lost", [["a@1"], ["a@0"], ["a@0", "a@1"], ["a@1", "a@3"]])
def test_records_that_were_written_over_come_back_in_their_place(store, lost):
    """That renews their dates, but their numbers are missing where their steps belong."""
    with opened(store) as found:
        save(found, "a", 3, 3)
        keys = [found.snapshot(ref).key for ref in lost]
    for key in keys:
        flip(store, key, 60)
    with opened(store) as found:
        assert found.repair(apply=True).ok
    assert order(store) == ["a@0", "a@1", "a@2", "a@3"]


def test_the_last_save_of_a_run_that_went_back_to_an_older_step_stays_the_last(store):
    with opened(store) as found:
        key = save(found, "a", 1, 7).key
    change(store, key, lambda data: data.__setitem__(60, data[60] ^ 1))
    with opened(store) as found:
        assert found.repair(apply=True).ok
        assert found.snapshot("a@latest").id in key
    assert order(store) == ["a@0", "a@1", "a@2", "a@1"]


def test_a_snapshot_that_was_given_up_is_copied_back_into_its_place(store):
    """The record by which a repair gives a snapshot up has no number; a copy of the snapshot gets one."""
    backup = copied(store)
    with opened(store) as found:
        lost = [found.snapshot(ref) for ref in ("a@1", "a@2")]
        save(found, "a", 3, 3)
    for record in lost:
        flip(store, record.key, 60)
        store.delete([record.manifests[0].key])
    with opened(store) as found:
        assert refs(found.repair(apply=True, drop=True).dropped) == {"a@1", "a@2"}
    with opened(backup) as found:
        assert not found.copy(["a@1", "a@2"], to=store).failed
    assert order(store) == ["a@0", "a@1", "a@2", "a@3"]
    with opened(store) as found:
        assert found.check("restore").ok


@pytest.mark.parametrize("dates", ["of whole seconds", "of copied files"])
def test_a_record_comes_back_in_its_place_whatever_the_dates_of_objects(store, dates):
    """S3 dates objects by whole seconds. Files may be copied here a day later, a@1 last. The free number tells."""
    key = snapshot_of(store, "a@1").key
    change(store, key, lambda data: data.__setitem__(60, data[60] ^ 1))
    if dates == "of whole seconds":
        dated(store, lambda name, info: int(info.modified_s))
    else:
        dated(store, lambda name, info: info.modified_s + 86400 + (name == key))
    with opened(store) as found:
        assert found.repair(apply=True).ok
    assert order(store) == ["a@0", "a@1", "a@2"]


def dated(store, date):
    """Give every object another date."""
    store._objects = {
        key: (data, structs.replace(info, modified_s=date(key, info))) for key, (data, info) in store._objects.items()
    }


# --- sessions, config ------------------------------------------------------------------------------------------------


def test_a_damaged_session_is_removed_once_it_was_silent(store):
    store.put("sessions/" + records.new_id(), b"")
    with opened(store) as found:
        assert found.gc().waiting_for == []  # gc has nothing to sweep, so it waits for nothing
        found.forget_snapshots(["a@0"])
        assert len(found.gc().waiting_for) == 1
        report = found.repair(apply=True)
        assert "may be running" in report.open[0]
        later = store.clock() + 3601
        store.clock = lambda: later
        assert found.repair(apply=True).ok
        found.gc()
    assert keys_of(store, "sessions/") == []


def test_an_unreadable_session_is_removed_once_it_was_silent(store):
    key = "sessions/" + records.new_id()
    store.put(key, b"")
    later = store.clock() + 3601
    store.clock = lambda: later
    with opened(Unreadable(store, key)) as found:
        assert found.repair(apply=True).ok
    assert keys_of(store, "sessions/") == []


def test_a_held_session_stays_however_silent(store):
    store.lock("sessions/" + records.new_id(), b"")
    later = store.clock() + 7200
    store.clock = lambda: later
    with opened(store) as found:
        (left,) = found.repair(apply=True).open
        assert "may be running; repair again once the process that has it open on this host has ended" in left
        assert keys_of(store, "sessions/")
        store.drop_locks()
        assert found.repair(apply=True).ok
    assert keys_of(store, "sessions/") == []


def with_config(store, config, **changes):
    """Replace the config by another one that can be read."""
    replace(store, "config", records.encode(msgspec.structs.replace(config, **changes)))


def test_a_save_beside_a_config_of_another_chunk_size():
    store = MemoryStore()
    Repository.create(store, chunk_bytes=1024).close()
    with opened(store) as before:
        with_config(store, before.config, chunk_bytes=2048)
        with opened(store) as after:
            save(after, "b", 1, 1)
            second = save(before, "b", 2, 2)
            save(after, "b", 3, 3)
            assert second.depth == 0
            check_restores(after)


def test_a_save_beside_a_repaired_config_by_a_process_that_has_listed_nothing():
    """Repair makes a new uuid, but takes the seed from the manifests: by it the process knows its repository."""
    store = MemoryStore()
    Repository.create(store).close()
    with opened(store) as first:
        save(first, "a", 0, 0)
    with opened(store) as before:
        flip(store, "config", 40)
        with opened(store, damaged=True) as found:
            found.repair(apply=True)
            assert found.config.uuid != before.config.uuid
        save(before, "b", 1, 1)
        check_restores(before)


def test_a_save_beside_an_unexpected_config():
    """No manifest is left with chunk size and seed, so repair makes new ones: saves with the old ones must fail."""
    store = MemoryStore()
    Repository.create(store, chunk_bytes=1024).close()
    with opened(store) as before:
        save(before, "a", 0, 0)
        before.forget_snapshots(["a@0"], force=True)
        before.gc()
        flip(store, "config", 40)
        with opened(store, damaged=True) as found:
            found.repair(apply=True)
            assert found.config.chunk_bytes != 1024
            assert found.config.digest_seed != before.config.digest_seed
        with opened(store) as after:
            save(after, "b", 1, 1)
            with pytest.raises(SnapstoreError):
                save(before, "b", 2, 2)
            save(after, "b", 3, 3)
            check_restores(after)
            assert after.check("restore").ok


@pytest.mark.parametrize("how", ["flip", "missing"])
def test_a_config_is_reconstructed(store, how):
    old = store.get("config")
    flip(store, "config", 5) if how == "flip" else store.delete(["config"])
    with pytest.raises(Exception, match="snapstore repair"):
        Repository.open(store)
    seed = records.decode(old, records.Config, "config").digest_seed
    with opened(store, damaged=True) as found:
        for level in LEVELS:  # check still verifies every digest
            result = found.check(level)
            assert [p.kind for p in result.problems] == ["config"]
            assert refs(result.restorable) == {"a@0", "a@1", "a@2"}
        found.repair(apply=True)
    with opened(store) as found:
        assert (found.config.chunk_bytes, found.config.digest_seed) == (1024, seed)
        assert found.check("restore").ok
        assert save(found, "a", 3, 2).new_chunks == 0, "what is known is found by its digest"
    assert store.get("config") != old


def test_a_config_of_another_repository(store):
    """No digest can be verified under its seed: verbs that need digests say so, and repair restores the config."""
    with opened(store) as found:
        ours = found.config
    with_config(store, ours, digest_seed=ours.digest_seed ^ 1, uuid=records.new_id())
    with opened(store) as found:
        for verb in (
            partial(found.restore, "a@0"), partial(found.diff, "a@0", "a@1"), partial(save, found, "a", 3, 3),
        ):  # fmt: skip
            with pytest.raises(FormatError, match=r"another seed than config says: .* run 'snapstore check'") as raised:
                verb()
            assert str(ours.digest_seed) not in str(raised.value)
        assert "another seed" in found.recode().failed[0][1]
        assert refs(found.snapshots()) == {"a@0", "a@1", "a@2"}
        found.gc()  # gc compares names and needs no digest
    with opened(store, damaged=True) as found:
        (problem,) = found.check("restore").problems
        assert (problem.kind, problem.command) == ("config", "snapstore repair")
        assert "it belongs to another repository" in problem.message
        assert found.repair(apply=True).ok
    with opened(store) as found:
        assert found.config.digest_seed == ours.digest_seed
        assert found.check("restore").ok
        assert save(found, "a", 3, 2).new_chunks == 0


def test_a_manifest_of_another_repository(store):
    """The config is right, one snapshot's manifests are not: only they are refused, and repair does not drop them."""
    with opened(store) as found:
        other = found.save(values("a", 1), run="other", step=0)
        manifests = [manifest.read(store, ref, None) for ref in other.manifests]
        forged = []
        for m in manifests:
            data = encoded_as(m, digest_seed=m.header.digest_seed ^ 1)
            forged.append(manifest.ref_of(data))
            store.put(forged[-1].key, data)
        revision = other.revised(manifests=forged)
        store.put(revision.key, records.encode(revision))
    with opened(store) as found:
        with pytest.raises(FormatError, match="another seed than config says"):
            found.restore("other@0")
        with pytest.raises(FormatError, match=r"base other@0: manifests/.* another seed than config says"):
            save(found, "a", 3, 3, bases=["other@0"])
        save(found, "a", 3, 3)
    with opened(store, damaged=True) as found:
        assert found.config.digest_seed == manifests[0].header.digest_seed, "most manifests say so"
        result = found.check("restore")
        assert {p.kind for p in result.problems} == {"manifest"}
        assert all("another seed than config says" in p.message for p in result.problems)
        assert refs(result.restorable) == {"a@0", "a@1", "a@2", "a@3"}
        assert found.repair(apply=True, drop=True).dropped == []
        for step in range(4):
            assert same(found.restore(f"a@{step}"), values("a", step))


def encoded_as(m, **changes):
    """Return the bytes of a manifest with changed contents."""
    return manifest.encode(dataclasses.replace(manifest.ManifestContents.of(m), **{"made_for": None} | changes))


def test_nothing_is_reconstructed_where_there_is_no_repository():
    with pytest.raises(KeyError, match="no snapstore repository"):
        Repository.open(MemoryStore(), damaged=True)


def test_a_newer_format_is_not_taken_for_damage(store):
    data = bytearray(store.get("config"))
    data[4 + 1] = 2
    data[16:24] = xxhash.xxh3_64_intdigest(bytes(data[:16] + data[24:])).to_bytes(8, "little")
    replace(store, "config", bytes(data))
    with pytest.raises(Exception, match="version 2"):
        Repository.open(store, damaged=True)


# --- the shell -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(disk, monkeypatch):
    monkeypatch.undo()

    def run(*arguments):
        result = invoke(["--repo", str(disk.root), *arguments])
        return result.exit_code, result.stdout

    return run


def test_the_shell(shell, disk):
    key = packs_of(disk, snapshot_of(disk, "a@1"))[0]
    flip(disk, key, pack.HEADER.size + 50)
    assert shell("gc")[0] == 0  # the dead save of the repository cannot use the damaged pack
    code, out = shell("check", "--read-data")
    assert code == 20
    assert "To fix, run: snapstore repair" in out
    code, out = shell("repair")
    assert code == 20
    assert "would do, quarantine" in out
    assert not [k for k in keys_of(disk, "gc/") if k.endswith(".quarantine")]
    code, planned = shell("repair", "--json")
    code, out = shell("repair", "--apply", "--json")
    assert code == 0
    done, plan = json.loads(out), json.loads(planned)
    assert [a["kind"] for a in done["actions"]] == [a["kind"] for a in plan["actions"]]
    assert done["healed"] == plan["healed"] != []
    assert (done["applied"], plan["applied"], done["lost"]) == (True, False, [])
    code, out = shell("check", "--restore")
    assert code == 0
    assert "in quarantine" in out
    assert shell("repair")[0] == 0
    assert shell("repair", "--apply", "--purge", "--level", "metadata")[0] == 0
    assert shell("gc")[0] == 0
    assert key not in keys_of(disk, "packs/")


def test_the_shell_with_a_broken_config(shell, disk):
    flip(disk, "config", 30)
    code, out = shell("check", "--json")
    assert code == 20
    assert [p["kind"] for p in json.loads(out)["problems"]] == ["config"]
    assert shell("log")[0] == 20
    assert shell("repair", "--apply")[0] == 0
    assert shell("log")[0] == 0


def test_the_shell_marks_what_needs_a_damaged_pack(shell, disk, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("snapstore.catalog.index.Index.headers", None)  # without a note, no manifest is read
        assert json.loads(shell("log", "--json")[1])["damaged"] == []
    assert "damaged" not in shell("log")[1]
    lost = snapshot_of(disk, "a@3")
    disk.delete([packs_of(disk, lost)[-1]])
    shell("repair", "--apply")
    document = json.loads(shell("log", "--json")[1])
    assert document["damaged"] == [lost.id]
    assert [s["step"] for s in document["snapshots"] if s["id"] == lost.id] == [3]
    marked = [line.split()[0] for line in shell("log", "--all")[1].splitlines() if "damaged" in line]
    assert marked == ["a@3"]
    assert "damaged   needs an object" in shell("show", "a@3")[1]
    assert json.loads(shell("show", "a@3", "--json")[1])["damaged"] is True
    assert json.loads(shell("show", "a@1", "--json")[1])["damaged"] is False
    with opened(disk) as found, pytest.raises(IntegrityError, match=rf"^a@3 \(id:{lost.id[:12]}\): .*is missing"):
        found.restore("a@3")


def test_the_shell_says_what_stays_lost(shell, disk):
    key = packs_of(disk, snapshot_of(disk, "a@3"))[-1]
    disk.delete([key])
    code, out = shell("repair", "--apply")
    assert code == 20
    assert "lost: a@3" in out
    code, out = shell("repair", "--apply", "--drop")
    assert code == 0
    assert "a@3: is forgotten" in out
    assert "lost, and forgotten: a@3" in out


def test_snapshots_that_could_not_be_repaired_now_are_not_dropped(monkeypatch):
    """Another process keeps revising the snapshot, so this repair cannot heal it; the next repair does."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=4096) as repository:
        repository.save({"w": np.random.default_rng(1).normal(size=9000)}, run="r", step=0)
        (pack,) = [info.key for info in store.list("packs/")]
        data, info = store._objects[pack]
        store._objects[pack] = data[:-1] + b"?", info  # damages the footer; all blobs are whole
        with monkeypatch.context() as patch:

            def busy(self, ruling, parts):
                raise ConflictError("another process has revised it")

            patch.setattr("snapstore.repair.heal.Healer._rewrite", busy)
            report = repository.repair(apply=True, drop=True)
        assert not report.ok
        assert [s.ref for s in repository.snapshots()] == ["r@0"]
        report = repository.repair(apply=True)
        assert report.ok
        assert "heal" in {action.kind for action in report.actions}


@pytest.mark.parametrize("wrong", [1, 2])
def test_wrong_gets_of_a_session_take_no_session_away(wrong, store, monkeypatch):
    """The scan reads a session twice, and repair reads it once more before it removes it as damaged."""
    sessions = [this_session(name * 32, f"snapshots/a/{9:012d}-{name * 32}.0") for name in "bc"]
    for session in sessions:
        store.put(records.key_of(session), records.encode(session))
    store.clock = lambda: time.time() + 7200  # the sessions are silent for long, and of another host
    real, lies = store.get, iter([records.encode(sessions[1])] * wrong)

    def get(key, **options):
        return next(lies, None) or real(key, **options) if key == records.key_of(sessions[0]) else real(key, **options)

    monkeypatch.setattr(store, "get", get)
    with opened(store) as found:
        report = found.repair(apply=True)
    assert next(lies, None) is None
    assert any("can be read" in line for line in report.open) == (wrong == 2)
    assert records.key_of(sessions[0]) in keys_of(store, "sessions/")


def test_a_config_of_another_seed_ends_the_saves_of_who_has_it_open(store):
    """Also if a record that it knows proves the repository: no other process could verify its snapshots."""
    with opened(store) as found:
        found.view()
        with_config(store, found.config, digest_seed=found.config.digest_seed ^ 1)
        with pytest.raises(StorageError, match=r"another digest seed.*open the repository again"):
            save(found, "a", 9, 9)
        with_config(store, found.config)
        save(found, "a", 9, 9)


def test_a_first_save_beside_a_foreign_config_is_refused(store):
    """A save of a run without bases compares the seed of the oldest snapshot in the repository."""
    with opened(store) as found:
        config = found.config
    with_config(store, config, digest_seed=config.digest_seed ^ 1)
    with opened(store) as found, pytest.raises(FormatError, match="different digest seeds"):
        save(found, "new", 0, 0)
    with_config(store, config)
    with opened(store) as found:
        save(found, "new", 0, 0)


def forge_seq(store, seq, **changes):
    """Put a record of a new snapshot that is right except for its seq; return it."""
    good = snapshot_of(store, "a@latest")
    forged = msgspec.structs.replace(good, id="b" * 32, step=5, seq=seq, **changes)
    store.put(forged.key, records.encode(forged))
    return forged


@pytest.mark.parametrize("seq", [2**64 - 1, 2**53, 2**53 - 1, 2**50])
def test_a_record_whose_seq_is_out_of_reach_is_damaged(store, seq):
    """Later saves of its run still work; errors name the record, and repair gives it another seq."""
    forged = forge_seq(store, seq)
    with opened(store) as found:
        save(found, "a", 6, 6)
        save(found, "a", 7, 7)
        wrong = rf"{forged.key}: seq {seq} is out of reach"
        with pytest.raises(IntegrityError, match=rf"{wrong}.*snapstore repair.*or name the one that can be read"):
            found.snapshot("a@latest")
        with pytest.raises(IntegrityError, match=wrong):
            found.gc()
        (problem,) = found.check().problems
        assert (problem.key, problem.command) == (forged.key, "snapstore repair")
        assert [s.ref for s, _ in found.forget([KeepLast(1)], run="a", dry_run=True).kept] == ["a@7"]
        report = found.repair(apply=True)
        assert report.ok
        assert report.actions[0].kind == "record"
        healed = found.snapshot("a@5")
        assert found.snapshot("a@2").seq < healed.seq < found.snapshot("a@6").seq
        assert (healed.tags, healed.revision) == (["repaired-bbbbbbbb"], 1)
        assert found.snapshot("a@latest").step == 7
        save(found, "a", 8, 8)
        found.gc()
        assert found.check("restore").ok


def test_a_damaged_revision_of_a_record_whose_seq_is_out_of_reach(store):
    """The revision before it, which is used instead, has a seq that is out of reach too."""
    forged = forge_seq(store, 2**53)
    store.put(record_key("a", 5, forged.id, 1), b"damaged")
    with opened(store) as found:
        assert [save(found, "a", step, step).seq < 10 * FIRST_SEQ for step in (6, 7)] == [True, True]
        assert found.repair(apply=True).ok
        assert found.repair().actions[0].kind == "index"
        assert found.snapshot("a@5").seq < found.snapshot("a@6").seq
        assert found.check("restore").ok


def test_a_run_without_a_number_left_names_the_record(store):
    """So many records are forged that each seq seems to be in reach; saves into another run still work."""
    for number in range(2**13):
        forged = records.Snapshot(
            id=f"{number:032x}", run="a", step=5, seq=2**40 * (number + 1), state="aborted", write_id=""
        )
        store.put(forged.key, records.encode(forged))
    with opened(store) as found:
        with pytest.raises(InvalidInputError, match=rf"{forged.key}: has the highest .* save into another run"):
            save(found, "a", 6, 6)
        save(found, "b", 6, 6)
