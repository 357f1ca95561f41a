"""An object that cannot be read, once or always, stops only the verbs that need it, and reports stay true."""

from __future__ import annotations

import errno
import gc
import json
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from kit.damage import encoded_wrongly, packs_of, refs, repository, three, twin, wound
from kit.faults import FaultStore, Unreadable, one_thread
from kit.objects import clone, copy_objects, flip, keys_of, replace
from kit.reference import replace_encode
from kit.repositories import OPTIONS, check_restores, created, opened, same, save, snapshot_of, values
from kit.samples import sampled, some
from kit.shell import invoke
from snapstore import IntegrityError, KeepLast, Repository, SaveOptions, SnapshotManager
from snapstore.convert.importing import import_checkpoints
from snapstore.errors import InvalidInputError, NotFoundError, SnapstoreError, StorageError
from snapstore.format import records
from snapstore.format.blobs import blob
from snapstore.format.keys import record_key
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore
from snapstore.storage.s3.failures import Failure

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    one_thread(monkeypatch, index=False)


@pytest.fixture
def store():
    return three()


def settled(path, monkeypatch):
    """Return the repository of kit/damage.py on disk, without its dead save and its dead gc."""
    repository()
    monkeypatch.undo()
    disk = copy_objects(repository(), LocalStore(path / "r", create=True))
    disk.delete([*keys_of(disk, "gc/"), *keys_of(disk, "sessions/")])
    return disk


# --- 1: seq of a save made while the newest record is damaged --------------------------------------------------------


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("more", [1, 2])
def test_latest_after_a_save_beside_a_damaged_record(tmp_path, monkeypatch, store, index, more):
    monkeypatch.undo()
    wrong = 0
    for n in range(6):
        disk = copy_objects(store, LocalStore(tmp_path / str(n), create=True))
        key = snapshot_of(disk, "a@2").key
        with opened(disk) as found:
            flip(disk, key, 60)
            if not index:
                found.rebuild_index()
            for step in range(3, 3 + more):
                save(found, "a", step, step)  # training goes on
            found.repair(apply=True)
            wrong += found.snapshot("a@latest").step != 2 + more
    assert not wrong


# --- 2: command and doc of damaged policies --------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 6, 30])
def test_the_command_for_damaged_policies_helps(tmp_path, monkeypatch, at):
    disk = settled(tmp_path, monkeypatch)
    flip(disk, "policies/a.1", at)

    def shell(*arguments):
        result = invoke(["--repo", str(disk.root), *arguments])
        return result.exit_code, result.stdout

    code, out = shell("check")
    assert code == 20
    assert "snapstore forget --run a --keep-..." in out
    assert shell("show", "a@0")[0] == 0, "show needs no policy to show a snapshot"
    assert shell("forget", "--run", "a", "--keep-last", "5")[0] == 0
    code, out = shell("check")
    assert not any(line.startswith("policy:") for line in out.splitlines())
    assert code == 20
    assert "unexplained: " in out, "what the sessions left out above had written"
    assert out.splitlines().count("1 problem") == 1, "and nothing else"


def test_repair_that_leaves_a_problem_says_so(tmp_path, monkeypatch):
    disk = settled(tmp_path, monkeypatch)
    flip(disk, "policies/a.1", 30)
    with opened(disk) as found:
        report = found.repair(apply=True)
        assert not report.ok
        assert not found.check().ok


# --- 3: a copy that hides a record is not healed ---------------------------------------------------------------------


def test_a_copy_that_hides_a_record_is_not_called_repaired(store):
    record = snapshot_of(store, "a@2")
    copy = record_key(record.run, record.step, record.id, 1)
    store.put(copy, store.get(record.key))
    with opened(store) as found:
        assert refs(found.check().damaged) == {"a@2"}
        report = found.repair(apply=True)
        assert (refs(report.healed), report.ok, found.check().ok) == (set(), False, False)


# --- 4: a read that fails once is not damage -------------------------------------------------------------------------


def test_one_failed_read_condemns_no_blob(store):
    """--level restore: a ranged read fails while chunks are rebuilt."""
    faulty = FaultStore(store)
    with opened(faulty) as found:
        begin = len(faulty.log)
        found.repair(level="restore")
        reads = [i for i, (op, key) in enumerate(faulty.log[begin:]) if op == "get_range" and key.startswith("packs/")]
    for k in (reads[0], reads[-1]):
        inner = clone(store)
        faulty = FaultStore(inner)
        with opened(faulty) as found:
            # the outage lasts for 12 calls: the read of a batch, and the repeated reads of its chunks
            faulty.at, faulty.mode = len(faulty.log) + k, "outage"
            act = faulty._act

            def short(name, key, effect, act=act, faulty=faulty, left=[12]):  # noqa: B006
                if faulty.at is not None and len(faulty.log) > faulty.at:
                    left[0] -= 1
                    if left[0] == 0:
                        faulty.heal()
                return act(name, key, effect)

            faulty._act = short
            with suppress(StorageError):  # the repair may stop
                found.repair(apply=True, level="restore")
        with opened(inner) as found:
            report = found.repair(apply=True)
            result = found.check("restore")
            assert (refs(result.damaged), refs(s for s, _ in report.lost)) == (set(), set()), (
                k,
                [p.message for p in result.problems][:3],
            )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", ["metadata", "data", "restore"])
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("lies", [False, True])
def test_one_wrong_answer_lets_a_repair_drop_no_snapshot(store, level, damaged, lies):
    """A request of it fails, or gives an object as missing or with a flipped bit, once. All snapshots can be healed."""
    with opened(store) as found:
        twin(found, "twin", 0)
        before = refs(found.snapshots())
    if damaged:
        wound(store)
    dry = FaultStore(clone(store))
    with opened(dry) as found:
        begin = len(dry.log)
        found.repair(apply=True, drop=True, level=level)
        total = len(dry.log) - begin
    bad = []
    for k in sampled(total, 12):
        inner = clone(store)
        faulty = (Lying if lies else FaultStore)(inner)
        with opened(faulty) as found:
            faulty.at, faulty.mode = len(faulty.log) + k, "fail"
            with suppress(SnapstoreError):  # the repair may stop
                found.repair(apply=True, drop=True, level=level)
        with opened(inner) as found:
            if refs(found.snapshots()) != before:
                bad.append((k, faulty.log[faulty.at], before - refs(found.snapshots())))
                continue
            found.repair(apply=True)
            if not refs(found.check("restore").restorable) >= before:
                bad.append((k, faulty.log[faulty.at], "not restorable"))
    assert not bad, bad


class Lying(FaultStore):
    """Its k-th operation, if it is a read, gives its object as missing, or with a flipped bit."""

    def _act(self, name, key, effect):
        number, at, self.at = len(self.log), self.at, None
        try:
            answer = super()._act(name, key, effect)
        finally:
            self.at = at
        if number != at or not name.startswith("get"):
            return answer
        if at % 2:
            raise NotFoundError(f"{key}: expected an object, found none (injected)")
        changed = bytearray(answer)
        changed[len(changed) // 2] ^= 1
        return bytes(changed)


def no_failed_read_drops_anybody(store, healed):
    """Check that a repair heals these snapshots. If any one of its reads of packs fails, it drops none."""
    dry = FaultStore(clone(store))
    with opened(dry) as found:
        begin = len(dry.log)
        before = refs(found.snapshots())
        assert refs(found.repair(apply=True).healed) == healed
        reads = [i for i, (op, key) in enumerate(dry.log[begin:]) if op == "get_range" and key.startswith("packs/")]
    assert reads
    for k in reads:
        inner = clone(store)
        faulty = FaultStore(inner)
        with opened(faulty) as found:
            faulty.at, faulty.mode = len(faulty.log) + k, "fail"
            with suppress(StorageError):  # the repair may stop
                found.repair(apply=True, drop=True)
            assert faulty.fired
        with opened(inner) as found:
            assert refs(found.snapshots()) == before, (k, faulty.log[faulty.at])


def test_an_outage_during_a_repair_drops_no_snapshot(store):
    """Run `twin` holds the lost chunks; one read of it fails."""
    with opened(store) as found:
        twin(found, "twin", 0)
    wound(store)
    no_failed_read_drops_anybody(store, {"a@0", "a@1", "a@2"})


def test_one_failed_read_of_an_intact_blob_drops_no_snapshot(store):
    """`twin` holds only the damaged chunk; the other chunks of the damaged pack are intact, and stored nowhere else."""
    with Repository.open(store, options=SaveOptions(pack_bytes=4096, threads=1, share_runs=False)) as found:
        data = np.random.default_rng(3).integers(0, 255, 8 * 1024, np.uint8)
        found.save({"w": data}, run="b", step=0)
        other = data.copy()
        other[1024:] ^= 1  # only the first chunk, whose blob is lost, stays equal
        found.save({"w": other}, run="twin", step=0, full=True)
    wound(store, "b@0")
    no_failed_read_drops_anybody(store, {"b@0"})


def test_a_check_of_restores_beside_a_compact_and_a_gc_reports_no_ghosts(store):
    """check has read the manifest when compact rewrites the snapshot and gc deletes its packs; then it reads them."""
    with opened(store) as found:
        found.forget_snapshots(["a@0", "a@1"])

    class Meanwhile(FaultStore):
        done = False

        def _act(self, name, key, effect):
            if name == "get_range" and key.startswith("packs/") and not self.done:
                self.done = True
                with opened(self.inner) as other:
                    other.gc()
                    assert other.compact().rewritten
                    other.gc()
            return super()._act(name, key, effect)

    faulty = Meanwhile(clone(store))
    with opened(faulty) as found:
        result = found.check("restore")
        assert faulty.done
        assert (refs(result.damaged), [p.message for p in result.problems][:2]) == (set(), [])


def test_a_note_that_could_not_be_read_once_keeps_what_it_says(store):
    data = np.random.default_rng(1).integers(0, 9, 8192, np.uint8)
    options = SaveOptions(threads=1, pack_bytes=4096, restore_cost=1.0, verify_writes="off")
    with Repository.open(store, options=options) as found:
        with encoded_wrongly():
            found.save({"w": data}, run="c", step=0)
        found.repair(apply=True, level="restore")
        notes = [key for key in keys_of(store, "gc/") if key.endswith(".quarantine")]
        assert notes
    faulty = Unreadable(store, notes[0], times=1)
    with Repository.open(faulty, options=options) as found:
        found.repair(apply=True)
    assert [key for key in keys_of(store, "gc/") if key.endswith(".quarantine")] == notes, "its pack was let out"


# --- 5: EIO ----------------------------------------------------------------------------------------------------------


def eio_record(store, ref):
    return Unreadable(store, snapshot_of(store, ref).key)


def test_eio_of_a_record_leaves_the_others_alone(store):
    with opened(eio_record(store, "a@0")) as found:
        assert same(found.restore("a@1"), values("a", 1))


def test_eio_of_a_record_lets_saves_go_on(store):
    with opened(eio_record(store, "a@0")) as found:
        save(found, "a", 3, 3)


@pytest.mark.parametrize("what", ["manifest", "pack"])
def test_eio_of_an_object_of_a_base_lets_saves_go_on(store, what):
    base = snapshot_of(store, "a@2" if what == "manifest" else "a@0")
    keys = [ref.key for ref in base.manifests] if what == "manifest" else packs_of(store, base)
    with opened(Unreadable(store, *keys)) as found:
        save(found, "a", 3, 3)


@pytest.mark.parametrize("what", ["record", "manifest", "pack", "session"])
def test_a_bad_inode_on_a_local_disk_stops_nobody_who_does_not_need_it(tmp_path, monkeypatch, store, what):
    """stat and open of one file fail (EUCLEAN); a listing of its folder must still work."""
    disk = copy_objects(store, LocalStore(tmp_path / "r", create=True))
    with opened(disk) as found:
        save(found, "b", 0, 50)
        snapshot = found.snapshot("a@0")
    session = records.Session(id="5" * 32, key="s", host="elsewhere", boot_id="", pid=1, started=0.0)
    if what == "session":
        disk.put(f"sessions/{session.id}", records.encode(session))
    key = {
        "record": snapshot.key, "manifest": snapshot.manifests[0].key, "pack": min(packs_of(disk, snapshot)),
        "session": f"sessions/{session.id}",
    }[what]  # fmt: skip

    def refusing(real):
        def call(path, *args, dir_fd=None, **kwargs):
            above = Path() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
            if above / path == disk.root / key:
                raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN), path)
            return real(path, *args, dir_fd=dir_fd, **kwargs)

        return call

    for name in ("stat", "open"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with opened(disk) as found:
        assert same(found.restore("b@0"), values("b", 50))
        for run, step in (("a", 3), ("b", 1)):
            save(found, run, step, step)
            assert same(found.restore(f"{run}@{step}"), values(run, step))
        assert [problem.key for problem in found.check().problems] == [key]
        found.forget_snapshots(["b@0"])
        before = keys_of(disk)
        if what in ("manifest", "record", "session"):  # gc cannot know what it needs, or whose it is
            with pytest.raises(StorageError, match="EUCLEAN"):
                found.gc(fence_after_s=60.0)
            assert {key for key in before if not key.startswith("gc/")} <= set(keys_of(disk))
        else:
            assert found.gc().deleted_objects
        for run, step in (("a", 3), ("b", 1)):
            assert same(found.restore(f"{run}@{step}"), values(run, step))


def test_a_store_that_does_not_tell_the_sizes_of_a_bases_packs_lets_saves_go_on(store):
    class Silent(FaultStore):
        def sizes(self, keys):
            raise StorageError("500 (injected)")

    with opened(Silent(store)) as found:
        made = save(found, "a", 3, 3)
        assert made.new_chunks == made.chunks
        assert made.depth == 0
        assert same(found.restore("a@3"), values("a", 3))


def test_eio_of_a_mark_lets_saves_go_on():
    made = clone(repository())
    key = next(key for key in keys_of(made, "gc/") if key.endswith(".mark"))
    with opened(Unreadable(made, key)) as found:
        save(found, "a", 30, 3)


def test_eio_of_a_policy_lets_a_manager_begin(store):
    with opened(store) as found:
        found.set_policies("a", [KeepLast(5)])
    with opened(Unreadable(store, "policies/a.0")) as found:
        SnapshotManager(found, run="a", keep=[KeepLast(10)]).close()


class NoPolicyIsRead(FaultStore):
    """A store that takes policies, and shows none: its rules of access allow no read below that prefix."""

    def get(self, key, *args, **kwargs):
        if key.startswith("policies/"):
            raise StorageError(f"{key}: access denied")
        return super().get(key, *args, **kwargs)


def test_policies_that_cannot_be_read_are_written_once(store):
    with opened(NoPolicyIsRead(store)) as found:
        for count in (1, 2):
            found.set_policies("a", [KeepLast(5)])
            assert len([key for key in keys_of(store) if key.startswith("policies/a.")]) == count
    with opened(store) as found:
        assert found.policies("a") == [KeepLast(5)]


def test_eio_of_a_manifest_beside_a_damaged_pack(store):
    """Both kinds of damage are reported, and repair heals the snapshots that it can."""
    with opened(store) as found:
        twin(found, "twin", 0)
        save(found, "b", 0, 50)
        key = found.snapshot("b@0").manifests[0].key
    wound(store)
    with opened(Unreadable(store, key)) as found:
        assert refs(found.check("data").damaged) == {"a@0", "a@1", "a@2", "b@0"}
        assert refs(found.repair().healed) == {"a@0", "a@1", "a@2"}
        assert refs(found.repair(apply=True).healed) == {"a@0", "a@1", "a@2"}


def test_eio_of_a_record_that_nothing_tells_of_beside_a_damaged_pack(store):
    with opened(store) as found:
        twin(found, "twin", 0)
    key = record_key("a", 9, records.new_id(), 0)
    store.put(key, b"of an aborted save, say")
    wound(store)
    with opened(Unreadable(store, key)) as found:
        assert refs(found.repair().healed) == {"a@0", "a@1", "a@2"}
        assert refs(found.repair(apply=True).healed) == {"a@0", "a@1", "a@2"}


@pytest.mark.parametrize("beside", ["the revision before", "a manifest", "all manifests"])
@pytest.mark.parametrize("times", [1, 10**9])
def test_eio_of_a_record_and_of_what_would_tell_of_it(store, beside, times):
    """The rest of the repository can be used; if reads fail only once, the contents of the objects are not lost."""
    with opened(store) as found:
        twin(found, "twin", 0)
        found.tag("a@1", "good") if beside == "the revision before" else None
        lost = found.snapshot("a@1")
    wound(store)
    flip(store, lost.key, 60)
    before = record_key(lost.run, lost.step, lost.id, 0)
    keys = [ref.key for ref in lost.manifests][: 1 if beside == "a manifest" else None]
    failing = Unreadable(store, *([before] if beside == "the revision before" else keys), times=times)
    with opened(failing) as found:
        assert "a@1" in refs(found.check().damaged)
        failing.times = times
        report = found.repair(apply=True, drop=times == 1)
        lasting = {"a@1"} if times > 1 else set()
        assert (refs(report.healed), refs(report.left)) == ({"a@0", "a@1", "a@2"} - lasting, lasting)
        assert same(found.restore("a@2"), values("a", 2))


def test_a_config_is_reconstructed_beside_an_unreadable_manifest(store):
    flip(store, "config", 30)
    first = next(iter(store.list("manifests/"))).key
    with opened(Unreadable(store, first), damaged=True) as found:
        found.repair(apply=True)
        assert found.config.chunk_bytes == 1024


def test_a_store_that_fails_amid_a_repair_is_no_damage(store):
    """If the store can read and list nothing, repair stops, and calls no record lost."""
    with opened(store) as found:
        key = found.snapshot("a@1").key
        manifests = [ref.key for ref in found.snapshot("a@1").manifests]
    flip(store, key, 60)
    failing = Unreadable(store, *manifests)
    failing.list = lambda prefix, *_: _unless_failed(failing, prefix)
    with opened(failing) as found, pytest.raises(StorageError):
        found.repair(apply=True, drop=True)
    with opened(store) as found:
        assert refs(found.repair(apply=True).healed) == {"a@1"}


def _unless_failed(store, prefix):
    if store.times < 10**9:
        raise StorageError("nothing can be listed (injected)")
    return store.inner.list(prefix)


def test_a_commit_whose_folder_could_not_be_fsynced_is_not_reported_as_committed(tmp_path, monkeypatch):
    """Linux reports a write-back error once, so a second fsync proves nothing. The next save commits, gc waits."""
    with Repository.create(tmp_path / "r", chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
        real, failed = os.fsync, []

        def fsync(fd):
            if not failed and str(Path(f"/proc/self/fd/{fd}").readlink()).endswith("snapshots/a"):
                failed.append(fd)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(StorageError, match=r"could not be rolled back.*not known whether it survives a power loss"):
            save(repository, "a", 1, 1)
        assert failed
        save(repository, "a", 2, 2)
        for verb in (lambda: repository.forget([KeepLast(1)], run="a"), repository.gc):
            with pytest.raises(StorageError, match="an fsync of its folder has failed"):
                verb()
    with opened(tmp_path / "r") as repository:
        assert len(check_restores(repository)) == 3
        repository.forget([KeepLast(1)], run="a")
        repository.gc()
        assert len(check_restores(repository)) == 1


# --- 6: the record of a snapshot that was recoded --------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["its manifests are there", "a manifest is gone"])
def test_a_damaged_record_of_a_repaired_snapshot(store, whole):
    """The valid revision is a rewrite; the one before names packs that gc has deleted, and no index knows more."""
    with opened(store) as found:
        twin(found, "twin", 0)
    wound(store)
    with opened(store) as found:
        found.repair(apply=True)
        found.repair(apply=True, purge=True)
        found.gc(), found.gc()
        assert found.check("restore").ok
        record = found.snapshot("a@0")
        good = {key: store.get(key) for key in (record.key, *(ref.key for ref in record.manifests))}
    assert record.revision == 1
    flip(store, record.key, 60)
    if not whole:
        store.delete([record.manifests[-1].key])
    with opened(store) as found:
        report = found.repair(apply=True)
        assert refs(s for s, _ in report.lost) == (set() if whole else {"a@0"})
        assert whole == ("a@0" in refs(found.check("restore").restorable))
    store.delete(list(good))
    for key, data in good.items():
        store.put(key, data)  # put a copy back under its key, as docs/concepts.md says
    with opened(store) as found:
        assert "a@0" in refs(found.check("restore").restorable)


@pytest.mark.parametrize("whole", [True, False], ids=["its manifests are there", "a manifest is gone"])
def test_two_damaged_records_of_a_snapshot_that_was_unforgotten_and_rewritten(store, whole):
    """The revision that can be read is forgotten, and its packs are gone; gc must not delete those of the lost one."""
    with opened(store) as found:
        found.forget_snapshots(["a@1"])
        found.unforget("a@1")
        found.forget_snapshots(["a@0"])
        found.gc()
        assert "a@1" in refs(found.compact().rewritten)
        found.gc()
        ruling = found.snapshot("a@1")
    assert ruling.revision == 3
    keys = [record_key(ruling.run, ruling.step, ruling.id, revision) for revision in (2, 3)]
    lost = ruling.manifests[0].key
    good = {key: store.get(key) for key in (*keys, lost)}
    for key in keys:
        flip(store, key, 60)
    if not whole:
        store.delete([lost])
    with opened(store) as found:
        report = found.repair(apply=True)
        assert refs(report.left) == (set() if whole else {"a@1"})
        if whole:
            assert found.gc().deleted_objects == 0
        else:
            with pytest.raises(IntegrityError, match="nothing was deleted"):
                found.gc()
    store.delete(list(good))
    for key, data in good.items():
        store.put(key, data)
    with opened(store) as found:
        assert same(found.restore("a@1"), values("a", 1))


# --- 7: retention ----------------------------------------------------------------------------------------------------


def test_policies_do_not_count_what_is_known_to_be_damaged(store):
    """A repair has noted that the newest two cannot be restored, so KeepLast(2) does not count them."""
    with opened(store) as found:
        for step in (3, 4):
            found.save({"w": np.random.default_rng(step).integers(0, 9, 8192, np.uint8)}, run="a", step=step)
    for ref in ("a@3", "a@4"):
        wound(store, ref)
    with opened(store) as found:
        found.repair(apply=True)
        found.forget([KeepLast(2)], run="a")
        found.gc()
        assert [s.ref for s in found.check("restore").restorable if s.state == "committed"]


# --- 8: latest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "look"),
    [
        (("a", 3), lambda found: found.snapshot("a@latest")),
        (("b", 7), lambda found: SnapshotManager(found, run="b").latest_step()),
        (("a", 2), lambda found: found.restore("a@2")),
    ],
    ids=["the newest", "the only one of a run", "the newer one of a step"],
)
def test_nothing_takes_the_place_of_a_snapshot_whose_record_is_damaged(store, saved, look):
    with opened(store) as found:
        key = save(found, *saved, 5).key
    flip(store, key, 60)
    with opened(store) as found, pytest.raises(IntegrityError):
        look(found)


def test_highest_step_with_a_damaged_record(store):
    """A damaged record of a higher step is an error; that of a lower step is not."""
    with opened(store) as found:
        low = found.snapshot("a@1").key
        high = found.snapshot("a@2").key
    flip(store, low, 60)
    with opened(store) as found:
        assert SnapshotManager(found, run="a").highest_step() == 2
    flip(store, high, 60)
    with opened(store) as found, pytest.raises(IntegrityError, match="highest step of a"):
        SnapshotManager(found, run="a").highest_step()


# --- 9: cost ---------------------------------------------------------------------------------------------------------


def test_one_wrong_chunk_costs_no_request_for_every_other(monkeypatch):
    made = created()
    data = np.random.default_rng(1).integers(0, 255, 1024 * 1000, np.uint8)
    encode = blob.encode
    calls = []

    def wrong(source, *args, **options):
        calls.append(1)
        return encode(source ^ np.uint8(1) if len(calls) == 500 else source, *args, **options)

    options = SaveOptions(threads=1, restore_cost=1.0, verify_writes="off")
    with Repository.open(made, options=options) as found, monkeypatch.context() as patch:
        replace_encode(patch, wrong)
        found.save({"w": data}, run="c", step=0)
    faulty = FaultStore(made)
    with Repository.open(faulty, options=options) as found:
        begin = len(faulty.log)
        result = found.check("restore")
        assert refs(result.damaged) == {"c@0"}
        reads = sum(op == "get_range" for op, _ in faulty.log[begin:])
    assert reads < 60, reads


# --- 10: more of latest and of a running job -------------------------------------------------------------------------


def test_damage_of_another_run_stops_no_saves(store):
    with opened(store) as found:
        key = save(found, "b", 0, 50).key
    flip(store, key, 60)
    with opened(store) as found:
        manager = SnapshotManager(found, run="a", keep=[KeepLast(1)], async_save=False)
        for step in range(3, 9):
            manager.save(step, values("a", step))
        with pytest.raises(IntegrityError, match="nothing was deleted"):
            manager.close()


@pytest.mark.parametrize("is_read", [True, False])
def test_a_run_whose_only_record_is_damaged_or_unread_counts_as_a_run(store, is_read):
    with opened(store) as found:
        key = save(found, "b", 7, 7).key
    if is_read:
        flip(store, key, 60)
    error = IntegrityError if is_read else StorageError
    for act in (
        lambda found: found.forget([KeepLast(1)], run="b"),
        lambda found: found.copy(to=MemoryStore(), run="b"),
        lambda found: found.first_difference("a", "b"),
        lambda found: found.first_difference("b", "a"),
    ):
        faulty = store if is_read else Unreadable(store, key)
        with opened(faulty) as found, pytest.raises(error, match=r"may be b@7 .*, whose record cannot be read"):
            act(found)


def unknown(store, how, *keys):
    """Return a store in which these records are damaged, or cannot be read for the moment."""
    if how == "unread":
        return Unreadable(store, *keys)
    damaged = clone(store)
    for key in keys:
        flip(damaged, key, 60)
    return damaged


ERRORS = {"damaged": IntegrityError, "unread": StorageError}


def two_runs():
    """Return a store with the runs a and b, which differ only at step 1; and the key of the record of b@1."""
    made = created()
    with opened(made) as found:
        for step in range(3):
            save(found, "a", step, step)
        saved = [found.save(values("a", 7 if step == 1 else step), run="b", step=step) for step in range(3)]
    return made, saved[1].key


@pytest.mark.parametrize("how", ["damaged", "unread"])
def test_a_difference_at_a_step_whose_record_is_unknown_is_not_called_equal(how):
    store, key = two_runs()
    with opened(store) as found:
        result = found.first_difference("a", "b")
        assert (result.steps, bool(result), result.unknown) == ([0, 1], True, {})
    with opened(unknown(store, how, key)) as found:
        result = found.first_difference("a", "b")
        assert (result.steps, bool(result), list(result.unknown)) == ([0, 2], False, [key])
        assert list(found.first_difference("b", "a").unknown) == [key]
        assert found.first_difference("a@0", "b@0").unknown == {}, "no run was compared"


def leaves_out(command, key):
    """Check that a verb names the record that it left out, as text and as JSON; return the text."""
    said = invoke(command)
    assert said.exit_code == 3
    assert f"left out 1 record, unreadable or gone: {key}" in said.stderr
    as_json = invoke(["--json", *command])
    assert (as_json.exit_code, json.loads(as_json.stdout)["unknown"].keys()) == (3, {key})
    return said.stdout


def test_the_shell_says_which_steps_diff_first_left_out(tmp_path):
    store, key = two_runs()
    disk = copy_objects(store, LocalStore(tmp_path / "r", create=True))
    command = ["--repo", str(disk.root), "diff", "--first", "a", "b"]
    assert invoke(command).exit_code == 0
    flip(disk, key, 60)
    leaves_out(command, key)
    assert invoke(["--repo", str(disk.root), "diff", "--first", "a@0", "b@0"]).exit_code == 0


@pytest.mark.parametrize("how", ["damaged", "unread"])
def test_a_first_difference_of_two_runs_without_a_readable_record_raises_the_error_of_a_record(how):
    store = created()
    with opened(store) as found:
        keys = [save(found, run, 1, 1).key for run in "ab"]
    with opened(unknown(store, how, *keys)) as found:
        for names in (("a", "b"), ("a", "b@1"), ("b@1", "a")):
            with pytest.raises(ERRORS[how], match=r"may be [ab]@1 .*, whose record cannot be read"):
                found.first_difference(*names)
        with pytest.raises(InvalidInputError, match="reference 'c': expected run@step"):
            found.first_difference("c", "a")


@pytest.mark.parametrize("how", ["damaged", "unread"])
def test_the_only_common_step_of_two_runs_may_have_an_unknown_record(store, how):
    with opened(store) as found:
        key = save(found, "b", 1, 1).key
        save(found, "b", 9, 9)
    with opened(unknown(store, how, key)) as found, pytest.raises(ERRORS[how], match="may be b@1 "):
        found.first_difference("a", "b")


@pytest.mark.parametrize("how", ["damaged", "unread"])
def test_the_bytes_of_an_unknown_snapshot_do_not_count_as_unneeded(store, how):
    with opened(store) as found:
        key = save(found, "b", 0, 50).key
        assert (found.stats().snapshots, found.stats().unknown) == (4, {})
    with opened(unknown(store, how, key)) as found:
        result = found.stats()
        assert (result.snapshots, result.unneeded_bytes, list(result.unknown)) == (3, 0, [key])
        with pytest.raises(ERRORS[how], match="nothing was deleted"):
            found.gc()


def test_the_shell_does_not_promise_that_gc_frees_the_bytes_of_an_unknown_snapshot(tmp_path, store):
    disk = copy_objects(store, LocalStore(tmp_path / "r", create=True))
    command = ["--repo", str(disk.root), "stats"]
    said = invoke(command)
    assert said.exit_code == 0
    assert "'snapstore gc' frees them" in said.stdout
    key = snapshot_of(disk, "a@2").key
    flip(disk, key, 60)
    text = leaves_out(command, key)
    assert "gc" not in text
    assert "unneeded  not known: some records are unreadable or gone" in text


@pytest.mark.parametrize("how", ["damaged", "unread"])
def test_an_import_saves_no_step_again_whose_record_is_unknown(tmp_path, how):
    sources = [tmp_path / f"step_{step}.safetensors" for step in (4, 5, 6)]
    for source in sources:
        safetensors.numpy.save_file({"w": np.arange(4.0)}, source)
    store = created()
    with opened(store) as found:
        key = [imported.snapshot.key for imported in import_checkpoints(found, sources[:2], run="a")][1]
    faulty = unknown(store, how, key)
    before = keys_of(faulty, "snapshots/")
    with opened(faulty) as found:
        done = import_checkpoints(found, sources, run="a")
        assert next(done).skipped
        with pytest.raises(ERRORS[how], match=r"step_5.safetensors: step 5 of run 'a': may be a@5 "):
            next(done)
        assert keys_of(faulty, "snapshots/") == before
        assert [imported.skipped for imported in import_checkpoints(found, sources[2:], run="a")] == [False]
        assert [imported.skipped for imported in import_checkpoints(found, sources[1:2], run="b")] == [False]


@pytest.mark.parametrize("how", ["damaged", "unread"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_an_unknown_record_in_the_destination_stops_the_copy_of_its_snapshot_only(store, how, dry_run):
    target = MemoryStore()
    with opened(store) as found:
        found.copy(["a@0", "a@1"], to=target)
    key = snapshot_of(target, "a@1").key
    with opened(store) as found, opened(unknown(target, how, key)) as there:
        result = found.copy(to=there, dry_run=dry_run)
        assert (refs(result.present), refs(result.copied)) == ({"a@0"}, {"a@2"})
        ((failed, why),) = result.failed
        assert failed.ref == "a@1"
        assert why.startswith(f"a@1: its record {key} ")
        assert why.count(key) == 1
        if how == "unread":
            assert "cannot be read: Input/output error (injected); try again" in why
        assert dry_run or same(there.restore("a@2"), values("a", 2))


def test_a_store_that_fails_still_stops_a_copy(store):
    pack = min(packs_of(store, snapshot_of(store, "a@1")))
    with opened(Unreadable(store, pack)) as found:
        assert found.copy(to=MemoryStore()).failed  # one bad sector is damage of its snapshots
        found.store.bad.add("config")  # now it can read nothing
        with pytest.raises(StorageError, match="Input/output error"):
            found.copy(to=MemoryStore())


@pytest.mark.parametrize("args", [["--run", "a"], ["--all"]])
@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_copy_says_which_records_it_left_out(tmp_path, store, args, dry_run):
    disk = copy_objects(store, LocalStore(tmp_path / "r", create=True))
    key = snapshot_of(disk, "a@1").key
    flip(disk, key, 60)
    with opened(disk) as found:
        result = found.copy(to=MemoryStore(), run="a")
        assert refs(result.copied) == {"a@0", "a@2"}
        assert list(result.unknown) == [key]
        assert found.copy(["a@0"], to=MemoryStore()).unknown == {}
        with opened(LocalStore(tmp_path / "r")) as again:
            save(again, "b", 0, 9)
        assert found.copy(to=MemoryStore(), run="b").unknown == {}
    command = ["--repo", str(tmp_path / "r"), "copy", "--to", str(tmp_path / "to"), *args, *dry_run]
    leaves_out(command, key)


@pytest.fixture
def tagged(tmp_path, store):
    """A repository in which the record that tags a@0 is gone, which its index knows; and the key of that record."""
    disk = copy_objects(store, LocalStore(tmp_path / "tagged", create=True))
    with opened(disk) as found:
        found.tag("a@0", "keep")
        key = found.snapshot("a@0").key
        (disk.root / key).unlink()
        yield found, key


def test_no_policy_forgets_a_snapshot_whose_tag_is_gone(tagged):
    """The older record has no tag. A new one in place of that which is gone would hide the loss."""
    found, key = tagged
    result = found.forget([KeepLast(1)], run="a")
    assert refs(result.forgotten) == {"a@1"}
    assert [reasons for s, reasons in result.kept if s.ref == "a@0"] == [
        ("its last record is gone: 'snapstore repair' puts it back",)
    ]
    manager = SnapshotManager(found, run="a", keep=[KeepLast(1)], async_save=False)
    manager.save(3, values("a", 3))
    with pytest.raises(IntegrityError, match="nothing was deleted"):
        manager.close()
    assert key in found.view().vanished
    assert found.repair(apply=True).ok
    assert found.snapshot("a@keep").step == 0


@pytest.mark.parametrize("verb", ["tag", "untag", "forget_snapshots", "recode"])
def test_no_verb_writes_over_a_record_that_is_gone(tagged, verb):
    found, key = tagged
    act = {
        "tag": lambda: found.tag("a@0", "other"),
        "untag": lambda: found.untag("a@0", "other"),
        "forget_snapshots": lambda: found.forget_snapshots(["a@0"], force=True),
        "recode": lambda: [message for _, message in found.recode(["a@0"], codec="portable").failed],
    }[verb]
    said = f"its last record {key} is gone; nothing was changed"
    if verb == "recode":
        assert [message for message in act() if said in message]
    else:
        with pytest.raises(IntegrityError, match=said):
            act()
    assert key in found.view().vanished
    assert found.repair(apply=True).ok
    assert found.snapshot("a@keep").step == 0


def test_a_tag_that_moves_writes_over_no_record_that_is_gone(tagged):
    found, _ = tagged
    assert found.repair(apply=True).ok
    found.tag("a@0", "best")
    key = found.snapshot("a@0").key
    (found.store.root / key).unlink()  # the record with both tags; one with "keep" is listed
    found.tag("a@2", "keep")
    assert found.snapshot("a@keep").step == 2
    assert key in found.view().vanished
    assert found.repair(apply=True).ok
    assert found.snapshot("a@best").step == 0
    assert found.snapshot("a@keep").step == 2


def test_a_tag_that_may_be_on_an_unread_snapshot_too_is_logged(store, caplog):
    with opened(store) as found:
        found.tag("a@2", "best")
        key = found.snapshot("a@2").key
    with opened(Unreadable(store, key)) as found:
        found.tag("a@0", "best")
    assert f"tags best may also be on snapshots whose records cannot be read or are gone: {key}" in caplog.text


def test_a_copy_beside_an_unread_record_keeps_the_order(store):
    """a@2 is in the destination, and its record in the source cannot be read: a@1 is older all the same."""
    target = MemoryStore()
    with opened(store) as found:
        found.copy(["a@0", "a@2"], to=target)
        key = found.snapshot("a@2").key
    with opened(Unreadable(store, key)) as found:
        assert refs(found.copy(to=target, run="a").copied) == {"a@1"}
    with opened(target) as found:
        assert [s.ref for s in found.snapshots()] == ["a@0", "a@1", "a@2"]
        assert found.snapshot("a@latest").step == 2


@pytest.mark.parametrize("revisions", [1, 2])
def test_a_copy_beside_a_damaged_record_of_the_destination(store, revisions):
    """An older revision tells the place of the snapshot; without it, the copy waits."""
    with opened(store) as found:
        found.copy(["a@0", "a@2"], to=(first := MemoryStore()))
        target = clone(first)  # no index knows its records
        key = snapshot_of(first, "a@2").key
        damaged = [key, key.removesuffix("1") + "0"][:revisions]
        for one in damaged:
            flip(target, one, 60)
        result = found.copy(["a@1"], to=target)
        said = f"it belongs before {key} in the destination, which cannot be read or is gone"
        assert [said in message for _, message in result.failed] == [True] * (revisions - 1)
        for one in damaged:
            flip(target, one, 60)
        found.copy(["a@1"], to=target)
    with opened(target) as there:
        assert [s.ref for s in there.snapshots()] == ["a@0", "a@1", "a@2"]


def test_a_record_that_could_not_be_read_twice_keeps_its_metadata(store):
    before = snapshot_of(store, "a@2")
    faulty = Unreadable(store, before.key, times=2)
    with opened(faulty) as found:
        found.repair(apply=True)
    assert snapshot_of(store, "a@2").metadata == before.metadata


def test_a_config_that_could_not_be_read_once_stays(store):
    before = store.get("config")
    faulty = Unreadable(store, "config", times=1)
    with opened(faulty, damaged=True) as found:
        found.repair(apply=True)
    assert store.get("config") == before


def test_a_forgotten_revision_that_vanished_harms_no_snapshot(tmp_path, monkeypatch):
    """The revision before it can be read, so the snapshot restores; only the fact that it was forgotten is lost."""
    disk = settled(tmp_path, monkeypatch)
    with opened(disk) as found:
        record = next(s for s in found.view().snapshots("a", ("forgotten",)))
    disk.delete([record.key])
    with opened(disk) as found:
        assert same(found.restore("a@2"), values("a", 2))
        result = found.check()
        assert not result.ok
        assert refs(result.damaged) == set()


@pytest.mark.parametrize("ref", ["a@latest", "a@2", "id"])
def test_no_older_step_takes_the_place_of_a_record_that_vanished(store, ref):
    """A job must not resume from an older step unnoticed, and its next save must get a higher seq than the lost one."""
    with opened(store) as found:
        record = save(found, "a", 2, 5) if ref == "a@2" else found.snapshot("a@2")  # the record before would be used
        store.delete([record.key])
        asked = f"id:{record.id[:8]}" if ref == "id" else ref
        named = rf"may be a@2 \(id:{record.id[:12]}\), .* is gone: .*repair --apply"
        for look in (found.snapshot, found.restore):
            with pytest.raises(IntegrityError, match=named):
                look(asked)
        with pytest.raises(IntegrityError):
            SnapshotManager(found, run="a").restore()
        assert found.snapshot("a@1").step == 1
        assert save(found, "a", 3, 3).seq > record.seq
        assert found.snapshot("a@latest").step == 3
        store.put(record.key, records.encode(record))
        assert found.snapshot(asked).step == (3 if ref == "a@latest" else 2)


def test_a_vanished_object_that_cannot_answer_stops_no_verb(store):
    """Such objects are old revisions, a revision of a committed snapshot, and the record of a collected one."""
    with opened(store) as found:
        latest = found.snapshot("a@2")
        tagged = found.tag("a@1", "x")
        found.forget_snapshots(["a@0"])
        found.gc()
        swept = next(s for s in found.view().snapshots(states=("swept",)))
        store.delete([latest.key, tagged.key, *(k for k in keys_of(store, "snapshots/") if swept.id in k)])
        save(found, "b", 0, 9)
        found.tag("b@0", "y")
        store.delete([key for key in keys_of(store, "snapshots/b/") if key.endswith(".0")])
        with pytest.raises(IntegrityError, match="is gone"):
            found.snapshot("a@latest")
        store.put(latest.key, records.encode(latest))
        assert found.snapshot("a@latest") == latest
        assert (found.snapshot("a@1").tags, found.snapshot("b@y").step) == ([], 0)
        assert {s.key for s in found.view().missing} == {tagged.key, swept.key}
        assert found.repair(apply=True).ok
        assert not found.view().vanished
        assert found.snapshot("a@x").step == 1


def test_an_empty_repository():
    made = created()
    with opened(made) as found:
        for level in ("metadata", "data", "restore"):
            assert found.check(level).ok
            assert found.repair(apply=True, level=level, drop=True, purge=True).ok
        assert found.check("data", share=0.1).ok
    made.delete(["config"])
    with pytest.raises(KeyError):
        Repository.open(made, damaged=True)


def test_a_sweep_gives_up_no_forgotten_snapshot_because_its_manifest_cannot_be_read(store):
    with opened(store) as found:
        save(found, "b", 0, 50)
        save(found, "b", 1, 51)
        keys = [ref.key for ref in found.snapshot("b@0").manifests]
        found.forget_snapshots(["b@0", "a@0"])
    with opened(Unreadable(store, *keys)) as found, pytest.raises(StorageError):
        found.gc()
    with opened(store) as found:
        assert found.unforget("b@0").state == "committed"
        assert same(found.restore("b@0"), values("b", 50))


def test_a_damaged_record_is_named_by_its_own_id(store):
    wanted = [snapshot_of(store, ref) for ref in ("a@0", "a@1")]
    for snapshot in wanted:
        flip(store, snapshot.key, 60)
    with opened(store) as found:
        for snapshot in wanted:
            with pytest.raises(IntegrityError, match=f"may be {snapshot.ref} "):
                found.restore(f"id:{snapshot.id}")


@pytest.mark.parametrize("index", [True, False])
def test_latest_after_records_that_were_saved_beside_damage_are_damaged_too(tmp_path, monkeypatch, store, index):
    monkeypatch.undo()
    disk = copy_objects(store, LocalStore(tmp_path / "r", create=True))

    def harm(key):
        replace(disk, key, b"SNAP")

    key = snapshot_of(disk, "a@2").key
    harm(key)
    made = []
    for step in range(3, 6):
        with opened(disk) as found:
            made.append(save(found, "a", step, step))
    for snapshot in made:
        harm(snapshot.key)
    with opened(disk) as found:
        if not index:
            found.rebuild_index()
        assert save(found, "a", 6, 6).seq > max(snapshot.seq for snapshot in made)


# --- a record whose reads fail slowly --------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """Make the index take every failure for a slow one."""
    monkeypatch.setattr("snapstore.catalog.index.SLOW_FAILURE_S", 0.0)
    monkeypatch.setattr("snapstore.catalog.index.PAUSE_FACTOR", 10**9)


def test_a_record_that_fails_slowly_is_not_asked_for_at_every_look(monkeypatch, store, slow):
    """On S3 a read that gets 5xx fails only after half a minute, and a save under a policy looks six times."""
    key = snapshot_of(store, "a@2").key
    failing = Unreadable(store, key)
    with opened(failing) as found:
        reads = 10**9 - failing.times
        for _ in range(3):
            assert list(found.view().unread) == [key]
        save(found, "b", 5, 5)
        assert 10**9 - failing.times == reads + 1
        failing.bad.clear()
        assert list(found.view().unread) == [key]  # it was not read again
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
        assert not found.view().unread
        assert found.snapshot("a@2").key == key


@pytest.mark.parametrize("how", ["rebuilt", "replaced"])
def test_a_record_that_was_put_back_is_asked_for_at_once(store, slow, how):
    key = snapshot_of(store, "a@2").key
    failing = Unreadable(store, key)
    with opened(failing) as found:
        assert list(found.view().unread) == [key]
        failing.bad.clear()
        if how == "rebuilt":
            found.rebuild_index()
        else:
            data = store.get(key)
            replace(store, key, data)
        assert not found.view().unread


def test_a_store_that_cannot_be_read_at_all_fails_beside_a_resting_record(store, slow):
    key = snapshot_of(store, "a@2").key
    failing = Unreadable(store, key)
    with opened(failing) as found:
        assert list(found.view().unread) == [key]
        failing.bad.add("config")
        with pytest.raises(StorageError, match="config"):
            found.view()


def test_a_record_that_rests_holds_no_state(store, slow):
    """The frames of a stored exception would keep the local variables of all callers alive: the copies of a save."""
    key = snapshot_of(store, "a@2").key
    held = []

    def look(found):
        state = np.zeros(10)
        held.append(weakref.ref(state))
        assert list(found.view().unread) == [key]

    with opened(Unreadable(store, key)) as found:
        for _ in range(3):
            look(found)
        gc.collect()
        assert [ref() is None for ref in held] == [True] * 3


def test_a_record_that_fails_at_once_is_asked_for_at_every_look(store):
    key = snapshot_of(store, "a@2").key
    with opened(Unreadable(store, key, times=3)) as found:
        for _ in range(3):
            found.view()
        assert not found.view().unread


@pytest.fixture
def bad_sector(monkeypatch):
    """bad_sector(place): reads of packs that contain the place fail; returns the list of their (offset, length)."""
    real, bad, failed = os.preadv, [], []

    def preadv(fd, buffers, offset):
        for place in bad if "/packs/" in str(Path(f"/proc/self/fd/{fd}").readlink()) else ():
            if offset <= place < offset + len(buffers[0]):
                failed.append((offset, len(buffers[0])))
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    def at(place):
        bad.append(place)
        return failed

    monkeypatch.setattr(os, "preadv", preadv)
    return at


def three_tensors(disk):
    """Save three tensors whose chunks are one after another in one pack; return state, snapshot, {name: place}."""
    rng = np.random.default_rng(3)
    state = {name: rng.integers(0, 256, 60_000 if name == "b" else 10_000, np.uint8) for name in "abc"}
    with Repository.create(disk, chunk_bytes=1024) as repo:
        snapshot = repo.save(state, run="r", step=0)
    (key,) = packs_of(disk, snapshot)
    return state, snapshot, {name: disk.get(key).index(state[name].tobytes()[:64]) + 500 for name in "abc"}


@pytest.mark.parametrize("name", "abc")
def test_bytes_that_no_restore_needs_may_be_unreadable(tmp_path, bad_sector, caplog, name):
    """Chunks that are near each other are read together, with the bytes between them."""
    disk = LocalStore(tmp_path / "r", create=True)
    state, snapshot, places = three_tensors(disk)
    failed = bad_sector(places[name])
    others = [other for other in "abc" if other != name]
    with opened(disk) as repo:
        got = repo.restore(snapshot.ref, keys=others)
        assert all((got[other] == state[other]).all() for other in others)
        assert len(failed) == (name == "b"), "a and c are read together"
        assert ("skipping bytes that nothing needs" in caplog.text) == (name == "b")
        with pytest.raises(StorageError, match="Input/output error"):
            repo.restore(snapshot.ref)


def test_bytes_that_no_rewrite_needs_may_be_unreadable(tmp_path, bad_sector):
    disk = LocalStore(tmp_path / "r", create=True)
    state, first, places = three_tensors(disk)
    with opened(disk) as repo:
        kept = repo.save({name: state[name] for name in "ac"}, run="s", step=0, bases=[first.ref])
        repo.forget_snapshots([first.ref], force=True)
        failed = bad_sector(places["b"])
        assert repo.compact().bytes_written > 0
        assert failed, "the blobs that stay are read together"
        got = repo.restore(kept.ref)
        assert all((got[name] == state[name]).all() for name in "ac")


# --- 11: an object that this user may not read is not damaged ---------------------------------------------------------


class Refused(FaultStore):
    """An object that this user may not read, or that its server does not give out, from the `begin`-th request on."""

    def __init__(self, inner, key, cause, begin=0):
        super().__init__(inner)
        self.key, self.cause, self.begin = key, cause, begin

    def _act(self, name, key, effect):
        if key == self.key and name in ("get", "get_range") and len(self.log) >= self.begin:
            raise StorageError(f"{key}: no permission (injected)") from self.cause
        return super()._act(name, key, effect)


@pytest.mark.sampled(30)
@pytest.mark.parametrize(
    "cause",
    [
        PermissionError(errno.EACCES, "denied"),
        Failure("ClientError", "", status=403, code="AccessDenied"),
        Failure("ClientError", "", status=400, code="InvalidObjectState"),
        Failure("ReadTimeoutError", ""),
        Failure("ClientError", "", status=503, code="ServiceUnavailable"),
        Failure("ClientError", "", status=500, code="InternalError"),
        Failure("ConnectionClosedError", ""),
        Failure("ShortBody", ""),
        Failure("CredentialRetrievalError", ""),
        OSError(errno.ETIMEDOUT, "of NFS"),
        OSError(errno.ESTALE, "of NFS"),
        OSError(errno.ENOTCONN, "of FUSE"),
        OSError(errno.EMFILE, "too many files"),
        OSError(errno.ENOMEM, "no memory"),
    ],
    ids=["EACCES", "403", "archived", "late", "503", "500", "reset", "short", "credentials", "ETIMEDOUT", "ESTALE",
         "ENOTCONN", "EMFILE", "ENOMEM"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["config", "packs/", "manifests/", "snapshots/", "policies/"])
def test_an_object_that_may_be_whole_is_not_damaged(store, kind, cause):
    with opened(store) as found:
        found.set_policies("a", [KeepLast(5)])
    before = {key: store.get(key) for key in keys_of(store)}
    key = next(key for key in sorted(before) if key.startswith(kind))
    for level in ("data", "restore"):
        with (
            pytest.raises(StorageError, match="no permission"),
            opened(Refused(store, key, cause), damaged=True) as found,
        ):
            found.check(level)
        with (
            pytest.raises(StorageError, match="no permission"),
            opened(Refused(store, key, cause), damaged=True) as found,
        ):
            found.repair(apply=True, level=level, drop=True)
    assert {key: store.get(key) for key in keys_of(store)} == before


def test_gc_deletes_no_object_that_it_may_not_read(store):
    """Its record is not listed, and only reading it would prove that it is damaged."""
    record = snapshot_of(store, "a@2").key
    before = set(keys_of(store))
    with opened(store) as found:
        save(found, "b", 7, 7)
        record = found.snapshot("b@7").key
    added = set(keys_of(store)) - before
    pack = next(key for key in sorted(added) if key.startswith("packs/"))
    for key in added:
        if key != pack:
            store.delete([key])
    assert record in added
    with opened(Refused(store, pack, PermissionError(errno.EACCES, "denied"))) as found, suppress(SnapstoreError):
        found.gc()
    assert pack in keys_of(store)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
def test_an_object_that_is_withheld_from_some_moment_of_a_repair_on_drops_no_snapshot(monkeypatch, kind):
    """A pack is damaged, and a repair can heal its snapshots; the store gives out the other objects only at first."""
    one_thread(monkeypatch, index=False)
    base = created()
    with opened(base) as found:
        save(found, "b", 0, 10)
        save(found, "b", 1, 11)
    keys = [key for key in keys_of(base) if key.startswith(kind)]
    busy = Failure("ClientError", "", status=503, code="ServiceUnavailable")
    stopped = set()
    for bad in [key for key in keys_of(base) if key.startswith("packs/")]:
        damaged = clone(base)
        flip(damaged, bad, -5)
        with opened(clone(damaged), damaged=True) as found:
            dropped = {s.ref for s in found.repair(apply=True, level="data", drop=True).dropped}
        for key in set(keys) - {bad}:
            for begin in some(range(20, 100, 8), 5):
                store = Refused(clone(damaged), key, busy, begin)
                try:
                    with opened(store, damaged=True) as found:
                        result = found.repair(apply=True, level="data", drop=True)
                except StorageError:
                    stopped.add(begin)
                else:
                    assert {s.ref for s in result.dropped} <= dropped, (bad, key, begin)
    assert len(stopped) > 3
