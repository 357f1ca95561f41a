"""A mirror gets every snapshot in the order of the saves, delays no save, and restores what the first store lost."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch

from kit.damage import three
from kit.faults import FaultStore, Unreadable
from kit.mirrored import manager, mirrored, saved, steps_in
from kit.objects import clone, flip
from kit.ranks import Managers
from kit.reference import replace_digest
from kit.repositories import OPTIONS, check_clean, created, created_like, opened, same, save, snapshot_of, values
from kit.waits import until
from snapstore import (
    IntegrityError,
    InvalidInputError,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSteps,
    NotFoundError,
    Repository,
    SnapshotManager,
    StorageError,
)
from snapstore.cli import commands
from snapstore.copy import mirror as mirrors
from snapstore.copy.copy import Copier
from snapstore.engine import reference
from snapstore.format import records
from snapstore.protocol.forget import HELD_AT_MOST
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(mirrors, "RETRY_S", 0.02)
    monkeypatch.setattr(mirrors, "RETRY_MAX_S", 0.02)


@pytest.fixture
def fast():
    return created()


@pytest.fixture
def slow(fast):
    return created_like(fast)


def test_it_follows_with_policies_of_its_own(tmp_path):
    with manager(
        tmp_path / "fast", tmp_path / "slow", keep=KeepLast(2), mirror_keep=[KeepLast(3), KeepEvery(4)]
    ) as snapshots:
        saved(snapshots, range(9))
        assert snapshots.wait_until_mirrored() == []  # else the first store would keep what the mirror still lacks
        saved(snapshots, [9])
        assert snapshots.wait_until_mirrored() == []
        assert snapshots.not_mirrored() == []
        assert snapshots.all_steps() == [0, 4, 7, 8, 9]
        assert snapshots.latest_step() == 9
        saved(snapshots, [10])
    assert steps_in(tmp_path / "fast") == [9, 10]
    assert steps_in(tmp_path / "slow") == [0, 4, 8, 9, 10]
    with Repository.open(tmp_path / "slow") as repository:
        assert repository.policies("a") == [KeepLast(3), KeepEvery(4)]
        check_clean(repository.store, level="restore")


def test_a_mirror_that_falls_behind_copies_only_what_its_policies_keep():
    """A snapshot that it has left out stays left out, and does not count as newer than a copy."""
    fast, slow = created(), MemoryStore()
    with opened(fast) as repository:
        for step in range(6):
            save(repository, "a", step, step)
    for _ in range(3):
        with manager(fast, slow, mirror_keep=[KeepLast(1), KeepEvery(4)]) as snapshots:
            assert snapshots.wait_until_mirrored() == []
            assert snapshots.wait_until_mirrored() == []
        with opened(slow) as repository:
            known = repository.view().snapshots("a", states=None)
        assert [(s.step, s.state) for s in known] == [(0, "committed"), (4, "committed"), (5, "committed")]


@pytest.mark.parametrize(
    ("keep", "mirror_keep"),
    [(KeepBest("acc"), None), (KeepBest("acc"), ()), (KeepBest("acc"), KeepLast(9)), (KeepLast(9), KeepBest("acc"))],
)
def test_policies_that_would_keep_nothing_forget_nothing(keep, mirror_keep, caplog):
    """A misspelt metric deletes nothing, in either store, although the first store holds what is not mirrored yet."""
    fast, slow = created(), MemoryStore()
    with manager(fast, slow, keep=keep, mirror_keep=mirror_keep, async_save=False) as snapshots:
        for step in range(4):
            saved(snapshots, [step])
            assert snapshots.wait_until_mirrored() == []
    assert steps_in(fast) == steps_in(slow) == [0, 1, 2, 3]
    assert "KeepBest('acc', n=1, mode='min') would keep none" in caplog.text


def test_a_mirror_behind_whose_policies_would_keep_nothing_leaves_nothing_out():
    fast, slow = created(), MemoryStore()
    with opened(fast) as repository:
        for step in range(1, 4):
            save(repository, "a", step, step)
    with manager(fast, slow, mirror_keep=KeepEvery(4)) as snapshots:
        assert snapshots.wait_until_mirrored() == []
        assert steps_in(slow) == [1, 2, 3]
        saved(snapshots, [4, 5])
        assert snapshots.wait_until_mirrored() == []
    assert steps_in(slow) == [4, 5]


def test_the_first_store_is_lost(tmp_path, caplog):
    with manager(tmp_path / "fast", tmp_path / "slow", keep=KeepLast(2), mirror_keep=()) as snapshots:
        saved(snapshots, range(4))
    shutil.rmtree(tmp_path / "fast")
    with manager(tmp_path / "fast", tmp_path / "slow", keep=KeepLast(2), mirror_keep=()) as snapshots:
        assert snapshots.latest_step() == 3
        assert same(snapshots.restore(), values("a", 3))
        assert same(snapshots.restore(2), values("a", 2))
        restored = snapshots.restore_into(values("a", 1), 1)
        saved(snapshots, [4])
        assert snapshots.latest_step() == 4
        assert snapshots.repository.snapshot("a@4").parent == restored.id
    assert "copied back" in caplog.text
    assert "saved and not mirrored" not in caplog.text
    assert steps_in(tmp_path / "slow") == [0, 1, 2, 3, 4]
    check_clean(Repository.open(tmp_path / "fast").store)


def test_a_mirror_that_is_not_verified_is_no_base_when_the_first_store_is_lost():
    """A step that comes back is restored; the next save stores all of it again, and the one after that only changes."""
    fast, slow = created(), MemoryStore()
    with manager(fast, slow, mirror_verify=False) as snapshots:
        saved(snapshots, [0, 1])
        assert snapshots.wait_until_mirrored() == []
        uuid = snapshots.repository.config.uuid
    with opened(slow) as repository:
        assert [s.unproven for s in repository.snapshots()] == [uuid, uuid]
        there = repository.config.uuid
    fast = MemoryStore()
    with manager(fast, slow, mirror_verify=False) as snapshots:
        assert same(snapshots.restore(), values("a", 1))
        assert snapshots.repository.snapshot("a@1").unproven == there
        saved(snapshots, [2, 3])
        new = {s.step: s.new_chunks / s.chunks for s in snapshots.repository.snapshots("a")}
        assert snapshots.wait_until_mirrored() == []
    assert (new[2], new[3] < 1) == (1, True)
    for store in (fast, slow):
        check_clean(store, level="restore")


def test_a_forged_snapshot_of_the_first_store_is_not_mirrored_and_the_others_are(caplog):
    fast, slow = three(), MemoryStore()
    real, options = reference.digest, replace(OPTIONS, verify_writes="off")
    with pytest.MonkeyPatch.context() as patch, Repository.open(fast, options=options) as repository:
        replace_digest(patch, lambda chunk, seed: real(chunk[::-1].copy(), seed))
        save(repository, "a", 20, 20)
    with manager(fast, slow) as snapshots:
        saved(snapshots, [21])
        assert snapshots.wait_until_mirrored() == [20]
    assert "step=20 cannot be mirrored, and is left out: " in caplog.text
    assert "its stored bytes are not the content of its digest" in caplog.text
    assert steps_in(slow) == [0, 1, 2, 21]
    check_clean(slow, level="restore")


def test_the_first_store_of_a_branch_is_lost(tmp_path):
    """The run began from a snapshot of another run, which the mirror does not have."""
    with Repository.open_or_create(tmp_path / "fast", options=OPTIONS) as repository:
        repository.save(values("exp1", 0), run="exp1", step=0)
    options = {"parent": "exp1@0", "mirror": tmp_path / "slow", "options": OPTIONS, "ranks": False}
    with SnapshotManager(tmp_path / "fast", run="a", **options) as snapshots:
        saved(snapshots, [1])
    shutil.rmtree(tmp_path / "fast")
    with SnapshotManager(tmp_path / "fast", run="a", **options) as snapshots:
        assert same(snapshots.restore(), values("a", 1))
    shutil.rmtree(tmp_path / "fast")
    with pytest.raises(NotFoundError, match="exp1"):
        SnapshotManager(tmp_path / "fast", run="b", **options)
    assert not [thread for thread in threading.enumerate() if thread.name == "snapstore-mirror-b"]


def test_a_mirror_that_fails_stalls_nothing_and_says_what_is_lost(caplog):
    fast, slow = created(), MemoryStore()
    with opened(fast) as repository:
        Repository.create(slow, like=repository).close()
    faulty = FaultStore(slow)
    snapshots = manager(fast, faulty)
    saved(snapshots, [0])
    assert snapshots.wait_until_mirrored() == []
    faulty.at, faulty.mode = len(faulty.log), "outage"
    saved(snapshots, [1, 2])
    assert snapshots.wait_until_mirrored(5) == [1, 2]
    assert "is behind, and tries again" in caplog.text
    faulty.heal()
    until(lambda: not snapshots.not_mirrored())
    # once more; now the outage comes after the first announcement, and the first store is lost
    faulty.at = next(number for number in range(len(faulty.log), 10**6) if number > len(faulty.log) + 40)
    faulty.mode = "outage"
    saved(snapshots, [3, 4, 5])
    started = time.monotonic()
    snapshots.close(timeout=5)
    assert time.monotonic() - started < 5
    left = [step for step in (3, 4, 5) if step not in steps_in(slow)]
    assert left
    assert f"steps {', '.join(map(str, left))}" in caplog.text
    caplog.clear()
    with manager(created_like(slow), slow) as snapshots:
        assert snapshots.latest_step() == steps_in(slow)[-1]
    lost = [record.getMessage() for record in caplog.records if "were saved and not mirrored" in record.getMessage()]
    assert len(lost) == 1
    assert f"steps {left[0]}" in lost[0]


def test_policies_leave_what_is_not_mirrored(fast, slow):
    """While the mirror fails, the first store keeps the oldest snapshots that it lacks; policies forget later ones."""
    faulty = FaultStore(slow, 0, "outage")
    with manager(fast, faulty, keep=KeepLast(1), mirror_keep=()) as snapshots:
        saved(snapshots, range(12))
        assert steps_in(fast) == [*range(HELD_AT_MOST), 11]
        faulty.heal()
        assert snapshots.wait_until_mirrored() == []
        saved(snapshots, [12])
    assert steps_in(slow) == [*range(HELD_AT_MOST), 11, 12]
    check_clean(slow)


def test_a_new_manager_leaves_what_the_last_one_could_not_mirror(fast, slow):
    """Until it has listed the mirror, it does not know which steps are there, and counts none as mirrored."""
    faulty = FaultStore(slow, 0, "outage")
    with manager(fast, faulty, keep=KeepLast(1), mirror_keep=()) as snapshots:
        saved(snapshots, range(4))
    with manager(fast, faulty, keep=KeepLast(1), mirror_keep=()) as snapshots:
        assert snapshots.wait_until_mirrored() == snapshots.not_mirrored() == [0, 1, 2, 3]
        saved(snapshots, [4, 5])
        assert steps_in(fast) == [0, 1, 2, 3, 4, 5]
        faulty.heal()
        assert snapshots.wait_until_mirrored() == []
        saved(snapshots, [6])
    assert steps_in(slow) == [*range(7)]
    assert steps_in(fast)[-1] == 6
    assert 4 not in steps_in(fast)


@pytest.mark.parametrize("is_reached", [False, True])
def test_policies_leave_a_snapshot_whose_record_could_not_be_read_at_the_start(is_reached, monkeypatch):
    """Until the mirror has it, its step counts as not mirrored."""
    fast = created()
    with opened(fast) as repository:
        keys = [save(repository, "a", step, step).key for step in range(3)]
    faulty, mirror = Unreadable(fast, keys[0]), FaultStore(created_like(fast), None if is_reached else 0, "outage")
    with manager(faulty, mirror, keep=KeepLast(1)) as snapshots:
        assert snapshots.wait_until_mirrored() == ([0] if is_reached else [0, 1, 2])
        assert snapshots.not_mirrored() == ([0] if is_reached else [0, 1, 2])
        faulty.bad.clear()
        monkeypatch.setattr(mirrors.Mirror, "_due", lambda *_: [])  # it falls behind
        saved(snapshots, [3])
        assert steps_in(fast) == ([0, 3] if is_reached else [0, 1, 2, 3])


def test_a_record_in_the_mirror_that_cannot_be_read_stops_no_other_copy():
    fast, slow = created(), MemoryStore()
    with manager(fast, slow) as snapshots:
        saved(snapshots, [0])
    bad = Unreadable(slow, snapshot_of(slow, "a@0").key)
    with manager(fast, bad) as snapshots:
        saved(snapshots, [1, 2])
        until(lambda: steps_in(slow) == [0, 1, 2])
        until(lambda: snapshots.wait_until_mirrored() == [0])
        bad.bad.clear()
        assert snapshots.wait_until_mirrored() == []


def test_a_begun_copy_whose_only_record_cannot_be_read_stops_no_other_copy(fast, slow):
    with opened(fast) as repository, opened(slow) as backup:
        snapshot = save(repository, "a", 0, 0)
        key = Copier(repository.context, backup.context).begin(snapshot, repository.view(), backup.view()).key
    bad = Unreadable(slow, key)
    with manager(fast, bad) as snapshots:
        saved(snapshots, [1, 2])
        until(lambda: steps_in(slow) == [1, 2])
        until(lambda: snapshots.wait_until_mirrored() == [0])
        bad.bad.clear()
        assert snapshots.wait_until_mirrored() == []
    assert steps_in(slow) == [0, 1, 2]


def test_a_mirror_that_could_not_be_reached_at_the_start_gets_the_policies_later(fast, slow):
    """Until then it has those of an earlier manager, which `snapstore forget --run` would apply."""
    with opened(slow) as repository:
        repository.set_policies("a", KeepLast(1))
    faulty = FaultStore(slow, 0, "outage")
    with manager(fast, faulty, mirror_keep=KeepEvery(2)) as snapshots:
        saved(snapshots, [2])
        faulty.heal()
        assert snapshots.wait_until_mirrored() == []
    with opened(slow) as repository:
        assert repository.policies("a") == [KeepEvery(2)]


def test_what_is_copied_back_takes_no_tag_from_a_snapshot_of_the_first_store(fast, slow, monkeypatch):
    """The mirror did not hear that the tag has moved: policies would delete the snapshot that has it now."""
    faulty = FaultStore(slow)
    with manager(fast, faulty, keep=KeepLast(1), mirror_keep=()) as snapshots:
        saved(snapshots, [0])
        snapshots.repository.tag("a@0", "paper")
        snapshots.repository.tag("a@0", "old")
        assert snapshots.wait_until_mirrored() == []
        monkeypatch.setattr(mirrors.Mirror, "_due", lambda *_: [])  # it falls behind
        saved(snapshots, [1])
        snapshots.repository.tag("a@1", "paper")
        snapshots.repository.untag("a@0", "old")
        saved(snapshots, [2])
        assert 0 not in steps_in(fast)
        assert same(snapshots.restore(0), values("a", 0))
        assert snapshots.repository.snapshot("a@paper").step == 1
        assert snapshots.repository.snapshot("a@old").step == 0
        saved(snapshots, [3])
        assert {0, 1, 3} <= {*steps_in(fast)}


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_tag_of_an_older_backup_takes_none_from_a_later_snapshot_of_the_mirror(is_kept):
    """The tag has moved since the backup. It moves again with the next save that has it."""
    fast, slow = created(), MemoryStore()
    policies = {"keep": KeepLast(9), "mirror_keep": [KeepLast(2), *([KeepSteps([0])] if is_kept else [])]}

    def tagged(snapshots, step):
        snapshots.save(step, values("a", step), metadata=["a", step], tags=["best"])
        snapshots.wait_until_finished()
        assert snapshots.wait_until_mirrored() == []

    with manager(fast, slow, **policies) as snapshots:
        tagged(snapshots, 0)
        backup = clone(fast)
        tagged(snapshots, 1)
        saved(snapshots, [2, 3, 4])
    assert steps_in(slow) == [*([0] if is_kept else []), 1, 3, 4]
    with manager(backup, slow, **policies) as snapshots:
        assert same(snapshots.restore(), values("a", 4))
        saved(snapshots, [5, 6])
        assert snapshots.wait_until_mirrored() == []
        assert steps_in(slow) == [*([0] if is_kept else []), 1, 5, 6]
        assert snapshot_of(slow, "a@best").step == 1
        tagged(snapshots, 7)
    with opened(slow) as repository:
        assert repository.snapshot("a@best").step == 7
        assert sum("best" in snapshot.tags for snapshot in repository.snapshots()) == 1


def test_the_newest_over_both(tmp_path, monkeypatch):
    with manager(tmp_path / "fast", tmp_path / "slow") as snapshots:
        saved(snapshots, [0, 1])
    shutil.copytree(tmp_path / "fast", tmp_path / "older")
    with manager(tmp_path / "fast", tmp_path / "slow") as snapshots:
        saved(snapshots, [2, 3])
        snapshots.restore(1)
        saved(snapshots, [2])  # it went back
        assert snapshots.latest_step() == 2
    shutil.rmtree(tmp_path / "fast")
    shutil.copytree(tmp_path / "older", tmp_path / "fast")  # a backup of an earlier day, on another machine
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    with manager(tmp_path / "fast", tmp_path / "slow") as snapshots:
        assert snapshots.latest_step() == 2
        assert snapshots.restore_into(values("a", 2)).step == 2
        assert snapshots.highest_step() == 3
        saved(snapshots, [5])
        assert snapshots.latest_step() == 5
        assert snapshots.wait_until_mirrored() == []
    assert steps_in(tmp_path / "slow")[-1] == 5


def test_read_only(tmp_path):
    with manager(tmp_path / "fast", tmp_path / "slow", keep=KeepLast(1), mirror_keep=()) as snapshots:
        saved(snapshots, [0, 1])
        snapshots.wait_until_mirrored()
        saved(snapshots, [2])
    before = steps_in(tmp_path / "fast")
    assert 0 not in before
    with manager(tmp_path / "fast", tmp_path / "slow", read_only=True) as snapshots:
        assert snapshots.all_steps() == [0, 1, 2]
        assert same(snapshots.restore(0), values("a", 0))
        assert steps_in(tmp_path / "fast") == before
    shutil.rmtree(tmp_path / "fast")
    with manager(tmp_path / "fast", tmp_path / "slow", read_only=True) as snapshots:
        assert same(snapshots.restore(), values("a", 2))
    assert not (tmp_path / "fast").exists()


def test_one_wrong_answer_does_not_put_the_mirror_in_the_place_of_the_first_store(tmp_path, monkeypatch, caplog):
    with manager(tmp_path / "fast", tmp_path / "slow") as snapshots:
        saved(snapshots, [0])
        snapshots.wait_until_mirrored()
    with SnapshotManager(tmp_path / "fast", run="a", options=OPTIONS) as snapshots:
        saved(snapshots, [1])
    real, lies = LocalStore.get, ["config"]

    def get(self, key, **options):
        if key in lies and self.url.endswith("fast"):
            lies.remove(key)
            raise NotFoundError("config: no such object")
        return real(self, key, **options)

    monkeypatch.setattr(LocalStore, "get", get)
    with manager(tmp_path / "fast", tmp_path / "slow", read_only=True) as snapshots:
        assert not lies
        assert snapshots.latest_step() == 1
    lies += ["config", "config"]
    with manager(tmp_path / "fast", tmp_path / "slow", read_only=True) as snapshots:
        assert snapshots.latest_step() == 0
    assert "reading its mirror" in caplog.text


def test_stores_that_do_not_belong_together():
    with pytest.raises(InvalidInputError, match="another seed"):
        manager(created(), created())
    slow = created()
    with pytest.raises(StorageError, match="made like cannot be read"):
        manager(MemoryStore(), FaultStore(slow, 0, "outage"))


def test_a_copy_in_flight_is_given_up_at_close(fast, slow):
    held, go = threading.Event(), threading.Event()

    class Slow(FaultStore):
        def put(self, key, data):
            if key.startswith("packs/"):
                held.set()
                go.wait(20)
            super().put(key, data)

    snapshots = manager(fast, Slow(slow))
    saved(snapshots, [0, 1])
    assert held.wait(20)
    threading.Timer(0.5, go.set).start()
    snapshots.close(timeout=0.1)
    assert steps_in(slow) == []
    with manager(fast, slow):
        pass
    assert steps_in(slow) == [0, 1]


def test_a_run_that_was_there_before_is_mirrored_too(caplog):
    fast = created()
    with opened(fast) as repository:
        for step in range(3):
            save(repository, "a", step, step, tags=("best",) if step == 1 else ())
    slow = MemoryStore()
    with manager(fast, slow):
        pass
    assert steps_in(slow) == [0, 1, 2]
    assert snapshot_of(slow, "a@best").step == 1
    assert [r for r in caplog.records if r.levelno >= logging.WARNING and "mirror" in r.getMessage()] == []


def test_rank_0_mirrors_and_brings_back_for_all(fast, slow):
    for store, steps in ((fast, (0, 1)), (created_like(slow), (2,))):
        ranks = Managers(store, 2, mirror=slow)
        if store is not fast:
            found = ranks.all(lambda m, _: (m.latest_step(), m.restore()["model"]["w"].tolist()))
            assert found == [(1, [1.0] * 2000)] * 2
        for step in steps:
            state = {"model": {"w": torch.full((2000,), float(step))}}
            ranks.all(lambda m, _, step=step, state=state: m.save(step, state).result())
        ranks.all(lambda m, _: m.wait_until_mirrored())
        assert ranks[0].not_mirrored() == []
        assert ranks[1]._mirror is None
        assert ranks.end() == [None, None]
    assert steps_in(slow) == [0, 1, 2]
    with opened(slow) as repository:
        assert repository.check("restore").ok


def test_ranks_see_the_same_steps_when_the_first_store_is_lost(fast, slow):
    """Only rank 0 has the mirror, and a program restores on each rank that sees the step."""
    with manager(fast, slow) as one:
        saved(one, (1, 2))
        one.wait_until_mirrored()
    ranks = Managers(created_like(slow), 2, mirror=slow)
    found = ranks.all(lambda m, _: (m.latest_step(), m.all_steps(), m.has_step(2), m.has_step(3), m.highest_step()))
    assert found == [(2, [1, 2], True, False, 2)] * 2
    restored = ranks.all(lambda m, _: m.restore(2) if m.has_step(2) else None)
    assert all(same(state, values("a", 2)) for state in restored)
    assert ranks.end() == [None, None]


def test_ranks_find_the_highest_and_the_best_step_in_the_mirror(fast, slow):
    with manager(fast, slow) as one:
        for step in range(3):
            one.save(step, {"w": torch.full((2000,), float(step))}, metrics={"loss": abs(step - 1)})
        one.wait_until_mirrored()
    again = created_like(slow)
    ranks = Managers(again, 2, mirror=slow, keep=[KeepLast(9), KeepBest("loss")])
    for step, expected in ((0, 0.0), ("best", 1.0), ("highest", 2.0)):
        found = ranks.all(lambda m, _, step=step: float(m.restore(step)["w"][0]))
        assert found == [expected] * 2, step
    assert ranks.end() == [None, None]


def test_log_marks_what_is_not_mirrored(tmp_path, capsys):
    with Repository.create(tmp_path / "fast", options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
        repository.copy(to=tmp_path / "slow")
        save(repository, "a", 1, 1)
    commands(["log", "--repo", str(tmp_path / "fast"), "--mirror", str(tmp_path / "slow")], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert ["not mirrored" in line for line in lines[1:]] == [False, True]


def test_a_first_store_that_is_empty_is_no_mirrored_one(tmp_path, caplog):
    """An unmounted volume leaves an empty folder; its snapshots are not mirrored until the volume is mounted again."""
    fast, away = tmp_path / "fast", tmp_path / "away"
    with created_at(fast) as repository:
        slow = MemoryStore()
        Repository.create(slow, like=repository).close()
    faulty = FaultStore(slow, 0, "outage")
    snapshots = manager(fast, faulty)
    saved(snapshots, [0, 1])
    fast.rename(away)
    fast.mkdir()
    faulty.heal()
    assert snapshots.wait_until_mirrored(5) == [0, 1]
    assert "is not the repository that was opened" in caplog.text
    fast.rmdir()
    away.rename(fast)
    assert snapshots.wait_until_mirrored(5) == []
    assert steps_in(slow) == [0, 1]
    faulty.at, faulty.mode = len(faulty.log), "outage"
    saved(snapshots, [2])
    shutil.rmtree(fast / "snapshots")  # only the records are lost
    faulty.heal()
    until(lambda: "step=2 cannot be mirrored, and is left out: its record" in caplog.text)
    assert 2 in snapshots.wait_until_mirrored(5)
    snapshots.close()
    assert steps_in(slow) == [0, 1]


def created_at(place):
    return Repository.create(place, options=OPTIONS)


@pytest.mark.parametrize("mirror_keep", [(), KeepLast(2)])
def test_a_damaged_record_of_the_mirror_holds_no_later_step_up(tmp_path, caplog, mirror_keep):
    """Its step counts as not mirrored, and stays in the first store, as long as the mirror is to keep it."""
    with manager(tmp_path / "fast", tmp_path / "slow", keep=KeepLast(2)) as snapshots:
        saved(snapshots, [0])
    for record in (tmp_path / "slow" / "snapshots").rglob("*.[01]"):
        data = bytearray(record.read_bytes())
        data[len(data) // 2] ^= 255
        record.chmod(0o600)
        record.write_bytes(data)
    left = [] if mirror_keep else [0]
    with manager(tmp_path / "fast", tmp_path / "slow", keep=KeepLast(2), mirror_keep=mirror_keep) as snapshots:
        assert snapshots.wait_until_mirrored(20) == [0]
        for step in (1, 2, 3):
            saved(snapshots, [step])
            assert snapshots.wait_until_mirrored(20) == (left if step > 1 else [0])
        assert snapshots.not_mirrored() == left
        saved(snapshots, [4])
        assert steps_in(tmp_path / "fast")[0] == (0 if left else 3)
    assert steps_in(tmp_path / "slow") == [1, 2, 3, 4][-2 if mirror_keep else 0 :]
    assert caplog.text.count("step=0 cannot be mirrored, and is left out") == 1
    assert ("nothing is deleted in" in caplog.text) == bool(mirror_keep)
    with opened(LocalStore(tmp_path / "slow")) as repository:
        repository.repair(apply=True)
    with manager(tmp_path / "fast", tmp_path / "slow", keep=KeepLast(2), mirror_keep=mirror_keep) as snapshots:
        assert snapshots.wait_until_mirrored(20) == []


def test_a_later_tag_is_mirrored_before_a_policy_deletes_its_snapshot(tmp_path):
    with manager(tmp_path / "fast", tmp_path / "slow", keep=KeepLast(2)) as snapshots:
        saved(snapshots, [0, 1])
        snapshots.wait_until_mirrored()
        snapshots.repository.tag("a@0", "best")
        saved(snapshots, [2, 3])
        snapshots.wait_until_mirrored()  # a policy deletes only mirrored snapshots
        saved(snapshots, [4])
    assert steps_in(tmp_path / "fast") == steps_in(tmp_path / "slow") == [0, 3, 4]
    with opened(tmp_path / "slow") as repository:
        assert repository.snapshot("a@best").step == 0


@pytest.mark.parametrize("collected", [False, True])
def test_a_later_tag_brings_back_what_the_mirror_has_forgotten(collected, capsys, tmp_path):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    with manager(fast, slow, mirror_keep=KeepLast(1) if collected else ()) as snapshots:
        saved(snapshots, [0])
        assert snapshots.wait_until_mirrored() == []
        saved(snapshots, [1])
        assert snapshots.wait_until_mirrored() == []
        with opened(slow) as repository:
            if not collected:
                repository.forget_snapshots(["a@0"])
            assert repository.view().snapshots("a", states=None)[0].state == ("swept" if collected else "forgotten")
        snapshots.repository.tag("a@0", "paper")
        commands(["log", "--repo", str(fast), "--mirror", str(slow)], standalone_mode=False)
        assert capsys.readouterr().out.count("not mirrored") == 1
        assert snapshots.wait_until_mirrored() == []
        assert steps_in(slow) == [0, 1]
        saved(snapshots, [2])
    with opened(slow) as repository:
        assert repository.snapshot("a@paper").step == 0
        assert same(repository.restore("a@paper"), values("a", 0))
        check_clean(repository.store)


def test_the_newest_by_the_order_of_saves_not_by_a_clock_that_lags(tmp_path, monkeypatch):
    with manager(tmp_path / "fast", tmp_path / "slow") as snapshots:
        saved(snapshots, [0, 1])
    shutil.rmtree(tmp_path / "fast")
    with manager(tmp_path / "fast", tmp_path / "slow") as snapshots:
        snapshots.restore()
        snapshots.wait_until_mirrored()
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 3600)  # the host that continues the run
        monkeypatch.setattr(snapshots._mirror, "_catch_up", lambda: True)  # the mirror is behind
        saved(snapshots, [2])
        assert snapshots.latest_step() == 2
        assert same(snapshots.restore(), values("a", 2))


def test_to_wait_for_the_mirror_ends_its_pause(monkeypatch):
    monkeypatch.setattr(mirrors, "RETRY_S", 60.0)
    fast = created()
    faulty = FaultStore(created_like(fast), 0, "outage")
    snapshots = manager(fast, faulty)
    saved(snapshots, [0])
    until(lambda: snapshots._mirror.problem)
    faulty.heal()
    assert snapshots.wait_until_mirrored(20) == []
    snapshots.close()


def test_an_older_step_stays_older_where_copies_of_later_ones_have_begun(fast, slow):
    with opened(fast) as repository, opened(slow) as backup:
        for step in range(3):
            save(repository, "a", step, step)
        copier = Copier(repository.context, backup.context)
        copier.announce(repository.snapshots("a")[1:], repository.view(), backup.view())
        assert [s.seq for s in backup.view().snapshots("a", states=None)] == [1_000_001, 1_000_002]
    with manager(fast, slow):
        pass
    assert steps_in(slow) == [0, 1, 2]


@pytest.mark.parametrize("id_first", ["0", "f"])
def test_the_best_is_no_older_save_of_its_step_that_only_the_mirror_has(tmp_path, monkeypatch, id_first):
    """The numbers of a new first store begin lower: those of the mirror do not say which save of a step is newer."""
    fast, slow, keep = tmp_path / "fast", tmp_path / "slow", [KeepLast(9), KeepBest("loss")]
    with manager(fast, slow, keep=keep, mirror_keep=()) as snapshots:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            snapshots.save(step, {"loss": loss}, metrics={"loss": loss})
    shutil.rmtree(fast)
    real = records.new_id
    with manager(fast, slow, keep=keep, mirror_keep=()) as snapshots:
        snapshots.restore(1)
        monkeypatch.setattr(records, "new_id", lambda: id_first + real()[1:])
        snapshots.save(2, {"loss": 9.0}, metrics={"loss": 9.0})
        assert snapshots.restore("best") == {"loss": 2.0}
        assert snapshots.best_step() == 3


def test_best_and_highest_mean_both_stores():
    fast, slow = created(), MemoryStore()
    with manager(fast, slow, keep=[KeepBest("loss", n=9)]) as snapshots:
        for step, loss in ((0, 3.0), (1, 0.5), (5, 1.0)):
            snapshots.save(step, values("a", step), metrics={"loss": loss}).result(60)
        assert snapshots.wait_until_mirrored(60) == []
    with manager(created_like(slow), slow, keep=[KeepBest("loss", n=9)]) as snapshots:
        snapshots.save(2, values("a", 2), metrics={"loss": 2.0}).result(60)
        assert (snapshots.best_step(), snapshots.highest_step()) == (1, 5)
        assert same(snapshots.restore("best"), values("a", 1))
        assert same(snapshots.restore("highest"), values("a", 5))


# --- a record that cannot be read ------------------------------------------------------------------------------------


def harmed(store, ref, how):
    """Return a copy of a store in which the record of a snapshot is damaged or cannot be read, and its key."""
    key = snapshot_of(store, ref).key
    inner = clone(store)
    if how == "damaged":
        flip(inner, key, 60)
    return (inner if how == "damaged" else Unreadable(inner, key)), key


UNKNOWN = pytest.mark.parametrize(
    ("how", "error"), [("damaged", IntegrityError), ("unread", StorageError)], ids=["damaged", "unread"]
)


@UNKNOWN
def test_a_record_of_the_first_store_that_cannot_be_read_is_not_called_mirrored(caplog, how, error):
    fast, key = harmed(three(), "a@1", how)
    slow = MemoryStore()
    with manager(fast, slow) as snapshots:
        assert snapshots.wait_until_mirrored(20) == [1]
        assert snapshots.not_mirrored() == [1]
        saved(snapshots, [3])
        assert snapshots.wait_until_mirrored(20) == [1]
        told = [r.getMessage() for r in caplog.records if key in r.getMessage() and "not mirrored;" in r.getMessage()]
        assert len(told) == 1, told
        assert steps_in(slow) == [0, 2, 3]
        if how == "unread":
            fast.bad.clear()
            assert snapshots.wait_until_mirrored(20) == []
            assert steps_in(slow) == [0, 1, 2, 3]
            return
    assert "steps 1: their records cannot be read, or are gone" in caplog.text


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_snapshot_whose_record_is_put_back_is_mirrored_then(fast, slow, caplog, how):
    faulty = FaultStore(slow, 0, "outage")
    with manager(fast, faulty) as snapshots:
        saved(snapshots, [0, 1])
        key = snapshots.repository.snapshot("a@0").key
        data = fast.get(key)
        fast.delete([key])
        if how == "damaged":
            fast.put(key, b"SNAP")
        faulty.heal()
        assert snapshots.wait_until_mirrored(20) == [0]
        assert "step=0 cannot be mirrored" in caplog.text
        fast.delete([key])
        fast.put(key, data)
        assert snapshots.wait_until_mirrored(20) == []
    assert steps_in(slow) == [0, 1]


@UNKNOWN
def test_a_record_that_cannot_be_read_is_no_fault_of_a_mirror_that_has_its_snapshot(caplog, how, error):
    store, slow = mirrored()
    fast, _ = harmed(store, "a@1", how)
    with manager(fast, slow) as snapshots:
        assert snapshots.wait_until_mirrored(20) == []
    assert "not mirrored" not in caplog.text


def with_losses():
    """Return a store of a@0, a@1 and a@2, the best of which is a@1, and a mirror that has only a@0."""
    store, slow = created(), MemoryStore()
    with opened(store) as repository:
        for step, loss in ((0, 0.5), (1, 0.1), (2, 0.3)):
            save(repository, "a", step, step, metrics={"loss": loss})
        repository.copy(["a@0"], to=slow)
    return store, slow


@UNKNOWN
def test_a_snapshot_whose_record_cannot_be_read_is_not_called_lost(caplog, how, error):
    """The first store has it, and its copy has only begun."""
    store, slow = three(), MemoryStore()
    with opened(store) as repository:
        repository.copy(["a@0", "a@1"], to=slow)
    slow.delete([snapshot_of(slow, "a@1").key])
    for fast, is_lost in ((harmed(store, "a@1", how)[0], False), (created_like(slow), True)):
        manager(fast, clone(slow), read_only=True).close()
        assert ("steps 1 were saved and not mirrored" in caplog.text) == is_lost


@UNKNOWN
@pytest.mark.parametrize("has_mirror", [True, False])
def test_best_and_highest_may_be_a_record_that_cannot_be_read(how, error, has_mirror):
    store, slow = with_losses()
    options = {"keep": [KeepBest("loss"), KeepLast(9)], "read_only": True}
    for ref, word in (("a@1", "best"), ("a@2", "highest")):
        fast, key = harmed(store, ref, how)
        with manager(fast, slow if has_mirror else None, **options) as snapshots:
            with pytest.raises(error, match=key):
                snapshots.restore(word)
            with pytest.raises(error, match=key):
                snapshots.best_step() if word == "best" else snapshots.highest_step()
            assert same(snapshots.restore(0), values("a", 0))


@UNKNOWN
def test_best_and_highest_may_be_a_record_that_the_mirror_cannot_read(how, error):
    store, _ = with_losses()
    options = {"keep": [KeepBest("loss"), KeepLast(9)], "read_only": True}
    for ref, word in (("a@1", "best"), ("a@2", "highest")):
        slow, key = harmed(store, ref, how)
        with manager(created_like(store), slow, **options) as snapshots, pytest.raises(error, match=key):
            snapshots.restore(word)
        with manager(store, slow, **options) as snapshots:  # the first store has the record
            assert same(snapshots.restore(word), values("a", int(ref[-1])))


@UNKNOWN
def test_no_older_step_when_the_first_store_is_lost_and_the_last_record_of_the_mirror_cannot_be_read(how, error):
    store, slow = mirrored()
    slow, key = harmed(slow, "a@2", how)
    with manager(created_like(store), slow) as snapshots:
        for ask in (snapshots.latest_step, snapshots.restore):
            with pytest.raises(error, match=f"may be a@2 .*{key}.* name the one that can be read, .*a@1"):
                ask()
        with pytest.raises(error, match=f"steps of a in .*: may be a@2 .*{key}"):
            snapshots.all_steps()
        assert same(snapshots.restore(1), values("a", 1))  # by name
    with manager(store, slow) as snapshots:  # a first store that is there decides
        assert snapshots.latest_step() == 2
        assert same(snapshots.restore(), values("a", 2))
        saved(snapshots, [3])
        assert snapshots.latest_step() == 3


@UNKNOWN
def test_an_older_record_of_the_mirror_that_cannot_be_read_stops_no_job(how, error):
    """Policies of the first store have forgotten its snapshot."""
    store, slow = mirrored()
    with opened(store) as repository:
        repository.forget_snapshots(["a@0", "a@1"], force=True)
        repository.gc()
    bad, _ = harmed(slow, "a@1", how)
    with manager(store, bad) as snapshots:
        assert snapshots.latest_step() == 2
        assert same(snapshots.restore(), values("a", 2))


@pytest.mark.parametrize("keep", [(), (KeepLast(100),)])
def test_a_mirror_lists_the_records_three_times_a_snapshot_and_once_more_for_its_policies(keep):
    """Each listing takes as long as there are records: a few more for each snapshot let a mirror fall behind."""
    first = created()
    with opened(first) as repository:
        for step in range(10):
            save(repository, "a", step, step)
    fast, slow = FaultStore(first), FaultStore(created_like(first))
    with manager(fast, slow, mirror_keep=keep) as snapshots:
        assert snapshots.wait_until_mirrored() == []
    counts = [sum(name == "list" and key.startswith("snapshots/") for name, key in s.log) for s in (fast, slow)]
    assert counts[0] <= 10 + 8  # those of the manager itself
    assert counts[1] <= 20 + 10 * len(keep) + 8
    assert steps_in(slow) == [*range(10)]
