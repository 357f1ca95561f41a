"""What is no damage is not skipped for long: a volume that is away, a lie, an output disk, what was put right."""

import errno
import os
from pathlib import Path

import pytest

from kit.fallbacks import (
    STEPS,
    blank,
    damaged_newest,
    local,
    needs,
    notes,
    opened_by,
    own_blob,
    require_blank,
    require_version,
    restored,
    restored_by,
    saved,
    state_of,
)
from kit.faults import FaultStore
from kit.objects import clone, flip, keys_of, replace
from kit.ranks import Managers, small_boxes
from kit.repositories import OPTIONS, created, opened
from kit.shell import invoke
from snapstore import Repository, SnapshotManager, StorageError
from snapstore.check import fallback
from snapstore.protocol.notes import has_bytes
from snapstore.state import folder as unpacking
from snapstore.storage.local import LocalStore


def test_a_volume_that_one_rank_misses_for_a_moment_is_an_error_on_all(tmp_path, monkeypatch):
    """Its folder is an empty mount point; before it votes, the volume is back."""
    roots = [local(clone(saved(2)), tmp_path / f"r{rank}") for rank in range(2)]
    with small_boxes():
        managers = Managers(LocalStore(roots[0]), 2, stores=[LocalStore(root) for root in roots])
        managers.each(lambda m, r: m.latest_step())
        roots[1].rename(tmp_path / "away")
        roots[1].mkdir()
        settle = fallback.Together.settle

        def settled(self, vote):
            if (vote.why or vote.failed) and (tmp_path / "away").exists():
                roots[1].rmdir()
                (tmp_path / "away").rename(roots[1])
            return settle(self, vote)

        monkeypatch.setattr(fallback.Together, "settle", settled)
        for rank, (error, state, skipped) in enumerate(restored_by(managers)):
            assert isinstance(error, StorageError), error
            assert not skipped
            require_blank(state, rank, 2)
        for rank, (snapshot, state, _) in enumerate(restored_by(managers)):
            assert snapshot.step == STEPS - 1, "a whole snapshot is marked"
            require_version(state, STEPS - 1, rank, 2)
        managers.end()


class Lies(FaultStore):
    """Gives wrong bytes of a pack a number of times, then the right ones."""

    key, times, good = "", 0, b""

    def _act(self, name, key, effect):
        if key == self.key and name in ("get", "get_range"):
            self.times -= 1
            if self.times == 0:
                replace(self.inner, key, self.good)
        return super()._act(name, key, effect)


@pytest.mark.parametrize("times", range(1, 9))
def test_a_lie_that_ends_leaves_nothing_that_a_repair_does_not_lift(times):
    store = Lies(clone(saved(1)))
    key, good = own_blob(1)[0], bytes(saved(1).get(own_blob(1)[0]))
    damaged_newest(store.inner)
    with opened_by(store) as manager:
        store.key, store.times, store.good = key, times, good
        snapshot = manager.restore_into(blank(state_of(0)), fallback=True)
        assert snapshot.step in (STEPS - 1, STEPS - 2)
        replace(store.inner, key, good)
        store.key = ""
        manager.repository.repair(apply=True)
        assert not [one for one in keys_of(store, "gc/") if one.endswith(".quarantine")]
        assert [s.step for s in manager.repository.snapshots()] == list(range(STEPS))
        manager.repository.repair(apply=True, level="restore")
        assert manager.restore_into(blank(state_of(0)), fallback=True).step == STEPS - 1


def put_back(folder, key, data):
    path = folder / key
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


def test_a_mark_ends_when_a_repair_releases_the_pack(tmp_path):
    root = local(clone(saved(1)), tmp_path / "r")
    key, good = own_blob(1)[0], (root / own_blob(1)[0]).read_bytes()
    store = LocalStore(root)
    damaged_newest(store)
    assert restored(root)[0].step == STEPS - 2
    assert key in notes(root)
    put_back(root, key, good)
    with Repository.open(root) as repository:
        repository.repair(apply=True)
    assert not notes(root)
    snapshot, state, skipped = restored(root)
    assert (snapshot.step, len(skipped)) == (STEPS - 1, 0)
    require_version(state, STEPS - 1)
    with Repository.open(root) as repository:
        assert has_bytes(repository.context, repository.snapshot("a@latest"))
        assert not repository.context.index.marks


@pytest.mark.parametrize("how", ["missing", "flipped"])
def test_a_mark_ends_when_a_manifest_is_put_back(tmp_path, how):
    root = local(clone(saved(1)), tmp_path / "r")
    key = needs(1)[0].snapshot.manifests[0].key
    good = (root / key).read_bytes()
    put_back(root, key, b"x" * len(good)) if how == "flipped" else (root / key).unlink()
    assert restored(root)[0].step == STEPS - 2
    assert restored(root)[0].step == STEPS - 2
    put_back(root, key, good)
    assert restored(root)[0].step == STEPS - 1


def test_a_listing_that_lacks_the_newest_record_is_no_damage():
    class Hides(FaultStore):
        hidden = ""

        def list(self, prefix="", *args, **more):
            return (info for info in super().list(prefix, *args, **more) if info.key != self.hidden)

    store = Hides(clone(saved(1)))
    with opened_by(store) as manager:
        manager.latest_step()
        store.hidden = needs(1)[0].snapshot.key
        state = blank(state_of(0))
        with pytest.raises(StorageError, match="restore again"):
            manager.restore_into(state, fallback=True)
        require_blank(state)


def test_a_branch_that_the_run_has_left_comes_last():
    store = created()
    with SnapshotManager(store, run="a", options=OPTIONS, async_save=False) as manager:
        for version in range(1, 6):
            manager.save(version * 100, state_of(version))
        manager.restore_into(blank(state_of(0)), 300)
        manager.save(400, state_of(6))
        manager.save(450, state_of(7))
    with opened(store) as repository:
        newest = repository.view().snapshots("a")[-2:]
    for snapshot in newest:
        flip(store, snapshot.manifests[0].key, 30)
    snapshot, state, skipped = restored(store)
    assert (snapshot.step, [one[0] for one in skipped.snapshots]) == (300, [450, 400])
    require_version(state, 3)
    snapshot, state, _ = restored(store, step=400)
    assert snapshot.step == 300, "a step above the one that was named"
    for step in (300, 200, 100):
        for one in [one for one in repository_snapshots(store) if one.step == step]:
            flip(store, one.manifests[0].key, 30)
    snapshot, state, _ = restored(store)
    assert snapshot.step == 500, "better than none"
    require_version(state, 5)


def repository_snapshots(store):
    with opened(store) as repository:
        return repository.view().snapshots("a")


def test_an_output_disk_that_fails_marks_no_snapshot(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    env = {"SNAPSTORE_REPO": str(tmp_path / "r")}
    invoke(["init"], env=env)
    for step in range(3):
        (tmp_path / "src" / "x").write_bytes(os.urandom(5000))
        assert invoke(["save", str(tmp_path / "src"), "--run", "a", "--step", str(step)], env=env).exit_code == 0
    with monkeypatch.context() as patch:
        error = OSError(errno.EIO, "Input/output error")
        patch.setattr(unpacking._Unpacker, "write", lambda *_: (_ for _ in ()).throw(error))
        failed = invoke(["restore", "a@latest", "--fallback", "-o", str(tmp_path / "out")], env=env)
        assert failed.exit_code == 1
        assert "cannot be written" in failed.stderr
    with Repository.open(tmp_path / "r") as repository:
        assert not repository.context.index.marks
    done = invoke(["restore", "a@latest", "--fallback", "-o", str(tmp_path / "out")], env=env)
    assert done.exit_code == 0
    assert Path(tmp_path / "out" / "x").read_bytes() == (tmp_path / "src" / "x").read_bytes()
