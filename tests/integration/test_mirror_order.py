"""A run with a mirror keeps the order of its saves when the first store is lost, or is replaced by an older backup."""

import time

import pytest

from kit.faults import FaultStore, Unreadable
from kit.objects import clone
from kit.repositories import OPTIONS, check_clean, created, objects_of, opened, same, values
from snapstore import KeepBest, KeepLast, SnapshotManager, StorageError
from snapstore.copy import mirror as mirrors
from snapstore.format import records
from snapstore.protocol.liveness import aborted
from snapstore.protocol.revisions import create
from snapstore.save import pipeline
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("remembering")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(mirrors, "RETRY_S", 0.02)
    monkeypatch.setattr(mirrors, "RETRY_MAX_S", 0.02)


def manager(fast, slow, **options):
    return SnapshotManager(fast, run="a", mirror=slow, options=OPTIONS, ranks=False, async_save=False, **options)


def save(snapshots, *steps, **options):
    for step in steps:
        snapshots.save(step, values("a", step), force=True, **options)


def of_run(store):
    with opened(store) as repository:
        return repository.snapshots("a")


def steps_in(store):
    return [snapshot.step for snapshot in of_run(store)]


class WrongClock:
    """Stands in for the module `time`."""

    def __init__(self, off_s):
        self._off_s = off_s

    def __getattr__(self, name):
        return getattr(time, name)

    def time(self):
        return time.time() + self._off_s


def outage(store):
    return FaultStore(store, 0, "outage")


def heal(mirror, snapshots):
    """Let a mirror be reached again, and wait for it; an attempt from before may fail meanwhile."""
    mirror.heal()
    assert not all(snapshots.wait_until_mirrored(30) for _ in range(3))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1), (3,), (1,)])
@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize("clock_s", [0, -3600, 3600])
def test_steps_that_are_restored_after_a_save_stay_older(order, is_down, clock_s, monkeypatch):
    """The job has lost its first store, and saves before it restores; if the mirror is down, it lacks this save.

    The clock of its new host may be wrong by an hour.
    """
    slow = MemoryStore()
    with manager(created(), slow) as snapshots:
        save(snapshots, 1, 2, 3)
    monkeypatch.setattr(pipeline, "time", WrongClock(clock_s))
    fast, mirror = MemoryStore(), FaultStore(slow)
    with manager(fast, mirror) as snapshots:
        mirror.at, mirror.mode = (0, "outage") if is_down else (None, "fail")
        save(snapshots, 5)
        assert snapshots.wait_until_mirrored() == [5] * is_down
        mirror.heal()
        for step in order:
            assert same(snapshots.restore(step), values("a", step))
            assert snapshots.latest_step() == 5
        assert same(snapshots.restore(), values("a", 5))
        assert snapshots.wait_until_mirrored() == []
        save(snapshots, 6)
    assert steps_in(fast) == [*sorted(order), 5, 6]
    assert steps_in(slow) == [1, 2, 3, 5, 6]
    with manager(fast, slow, keep=KeepLast(1)) as snapshots:
        save(snapshots, 7)
        assert steps_in(fast) == [7]


@pytest.mark.parametrize("is_down", [False, True])
def test_steps_that_an_older_backup_lacks_stay_older_than_its_next_save(is_down):
    fast, slow = created(), MemoryStore()
    with manager(fast, slow) as snapshots:
        save(snapshots, 1, 2)
    backup = clone(fast)
    with manager(fast, slow) as snapshots:
        save(snapshots, 3, 4, 5)
    mirror = outage(slow) if is_down else FaultStore(slow)
    with manager(backup, mirror) as snapshots:
        save(snapshots, 6)
        mirror.heal()
        for step in (4, 3, 5):
            assert same(snapshots.restore(step), values("a", step))
        assert same(snapshots.restore(), values("a", 6))
        assert snapshots.wait_until_mirrored() == []
    assert steps_in(backup) == steps_in(slow) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_step_that_is_copied_back_stays_older_than_a_save_that_cannot_be_read(by_hand):
    """An older backup has saved; the record of this save cannot be read for a moment, but an earlier revision can."""
    fast, slow = created(), MemoryStore()
    with manager(fast, slow) as snapshots:
        save(snapshots, 1)
        backup = clone(fast)
        save(snapshots, 2, 3)
    with manager(backup, outage(slow)) as snapshots:
        save(snapshots, 5)
    with opened(backup) as repository:
        key = repository.tag("a@5", "good").key
    unreadable = Unreadable(backup, key)
    if by_hand:
        with opened(slow) as repository:
            assert repository.copy(["a@2"], to=unreadable).failed == []
    else:
        with manager(unreadable, slow) as snapshots:
            assert same(snapshots.restore(2), values("a", 2))
    assert steps_in(backup) == [1, 2, 5]


@pytest.mark.parametrize("has_mirror", [False, True])
def test_a_save_is_newer_than_one_that_cannot_be_read_and_began_at_the_next_multiple(has_mirror):
    fast, slow = created(), MemoryStore()
    with manager(fast, slow) as snapshots:
        save(snapshots, 1)
    with manager(fast, outage(slow)) as snapshots:
        save(snapshots, 2)
    unreadable = Unreadable(fast, of_run(fast)[-1].key)
    with manager(unreadable, outage(slow) if has_mirror else None) as snapshots:
        save(snapshots, 3)
    assert steps_in(fast) == [1, 2, 3]


def test_a_mirror_that_is_reached_after_the_start_still_tells_the_numbers(monkeypatch):
    """The saves that an older backup lacks began at a multiple too, and the clock of the new host is slow."""
    fast, slow = created(), MemoryStore()
    with manager(fast, slow) as snapshots:
        save(snapshots, 1)
    backup = clone(fast)
    for store, steps, off_s in ((fast, (2, 3), 0), (backup, (5,), -3600)):
        monkeypatch.setattr(pipeline, "time", WrongClock(off_s))
        mirror = outage(slow)
        with manager(store, mirror) as snapshots:
            heal(mirror, snapshots)
            save(snapshots, *steps)
            assert snapshots.latest_step() == steps[-1]
    assert steps_in(slow) == [1, 2, 3, 5]


@pytest.mark.parametrize("is_mirrored", [True, False])
def test_a_tag_does_not_go_back_when_its_snapshot_is_restored(is_mirrored):
    """In an older backup it is still on an earlier snapshot, which the mirror may have left out."""
    fast, slow = created(), MemoryStore()
    with manager(fast, slow) as snapshots:
        save(snapshots, 1)
    mirror = outage(slow)
    with manager(fast, mirror, mirror_keep=() if is_mirrored else KeepLast(1)) as snapshots:
        save(snapshots, 2, tags=["best"])
        backup = clone(fast)
        save(snapshots, 3, tags=["best"])
        heal(mirror, snapshots)
    assert steps_in(slow) == ([1, 2, 3] if is_mirrored else [3])
    with manager(backup, slow, keep=KeepLast(1)) as snapshots:
        assert same(snapshots.restore(), values("a", 3))
        assert snapshots.wait_until_mirrored() == []
        save(snapshots, 4)
        assert snapshots.wait_until_mirrored() == []  # else the first store would hold it
        save(snapshots, 5)
        assert same(snapshots.restore("best"), values("a", 3))
    assert steps_in(backup) == [2, 3, 5]  # the tag stays on 2 too: it may have been given on purpose


def test_a_tag_that_moved_in_a_new_first_store_does_not_go_back():
    fast, slow = MemoryStore(), MemoryStore()
    with manager(created(), slow) as snapshots:
        save(snapshots, 1, tags=["best"])
    with manager(fast, slow) as snapshots:
        save(snapshots, 2, tags=["best"])
        assert same(snapshots.restore(1), values("a", 1))
        assert snapshots.wait_until_mirrored() == []
        assert same(snapshots.restore("best"), values("a", 2))
    assert [(s.step, s.tags) for s in of_run(fast)] == [(1, []), (2, ["best"])]


def test_an_old_step_that_the_mirror_gets_late_is_no_newer_than_its_own():
    """The mirror's policies left it out; it gets a tag in an older backup, which lacks the last step."""
    fast = created()
    slow = MemoryStore()
    with opened(fast) as repository:
        repository.save(values("a", 1), run="a", step=1)
        repository.save(values("a", 2), run="a", step=2)
    with manager(fast, slow, mirror_keep=KeepLast(1)) as snapshots:
        assert snapshots.wait_until_mirrored() == []
        assert steps_in(slow) == [2]
        backup = clone(fast)
        save(snapshots, 3)
    assert steps_in(slow) == [3]
    with opened(backup) as repository:
        repository.tag("a@1", "good")
    with manager(backup, slow, mirror_keep=KeepLast(1)) as snapshots:
        assert snapshots.wait_until_mirrored() == []
        assert snapshots.latest_step() == 3
    assert steps_in(slow) == [1, 3]


def test_the_record_of_a_save_that_died_in_the_destination_has_no_place_in_the_order():
    """A gc has given it up: its record has the date of the gc, and no number."""
    source, target = created(), MemoryStore()
    with opened(source) as repository:
        for step in (1, 2):
            repository.save(values("a", step), run="a", step=step)
        repository.copy(["a@1"], to=target)
        repository.copy(["a@2"], to=target)
        repository.save(values("a", 3), run="a", step=3)
        with opened(target) as there:
            create(there.context, aborted("a", 9, records.new_id(), "gc gave this save up as dead"))
        repository.copy(to=target, run="a")
    assert steps_in(target) == [1, 2, 3]


@pytest.fixture
def twice_tagged(monkeypatch):
    """Return a run whose two snapshots have the tag `good`: it means the later one."""
    fast = created()
    with opened(fast) as repository:
        repository.save(values("a", 1), run="a", step=1, tags=["good"])
        with monkeypatch.context() as patch:
            patch.setattr("snapstore.protocol.tags.take", lambda context, names, record, before: record)
            repository.save(values("a", 2), run="a", step=2, tags=["good"])
        assert [snapshot.tags for snapshot in repository.snapshots("a")] == [["good"], ["good"]]
    return fast


def test_a_tag_on_two_snapshots_means_the_later_one_to_a_mirror(twice_tagged):
    slow = MemoryStore()
    for _ in range(2):
        with manager(twice_tagged, slow, mirror_keep=()) as snapshots:
            assert snapshots.wait_until_mirrored() == []
        assert [(s.step, s.tags) for s in of_run(slow)] == [(1, []), (2, ["good"])]


def test_a_tag_on_two_snapshots_means_the_later_one_to_a_copy(twice_tagged):
    target = MemoryStore()
    with opened(twice_tagged) as repository:
        repository.copy(to=target, run="a")
        repository.copy(["a@1"], to=target)
    assert [(s.step, s.tags) for s in of_run(target)] == [(1, []), (2, ["good"])]


def test_the_best_step_is_uncertain_if_only_the_mirror_can_read_a_record():
    """The first store has forgotten it, or not: then it is the last save of its step."""
    fast, slow = created(), MemoryStore()
    with manager(fast, slow) as snapshots:
        for step, loss in ((1, 2.0), (2, 9.0), (2, 1.0)):
            save(snapshots, step, metrics={"loss": loss})
    bad = Unreadable(fast, of_run(fast)[-1].key)
    with manager(bad, slow, keep=KeepBest("loss")) as snapshots:
        with pytest.raises(StorageError, match="best step of a"):
            snapshots.best_step()
        bad.bad.clear()
        assert snapshots.best_step() == 2


def test_best_is_a_tag_first_even_if_only_the_mirror_has_it():
    slow, fast = MemoryStore(), MemoryStore()
    keep = {"keep": KeepBest("loss"), "mirror_keep": ()}
    with manager(created(), slow, **keep) as snapshots:
        save(snapshots, 1, tags=["best"], metrics={"loss": 9.0})
    with manager(fast, slow, **keep) as snapshots:
        save(snapshots, 2, metrics={"loss": 1.0})
        assert snapshots.best_step() == 2
        assert same(snapshots.restore("best"), values("a", 1))
    check_clean(fast, level="restore")


@pytest.mark.parametrize("ref", ["best", 1])
def test_no_forgotten_save_of_a_step_is_restored_while_the_mirror_has_a_committed_one(ref):
    """The first store was lost; a later save of the same step never reached the mirror, and was forgotten."""
    slow, best = MemoryStore(), [KeepBest("loss")]
    with manager(created(), slow, keep=best) as snapshots:
        save(snapshots, 1, metrics={"loss": 1.0})
    mirror = FaultStore(slow)
    with manager(MemoryStore(), mirror, keep=best) as snapshots:
        mirror.at, mirror.mode = 0, "outage"
        snapshots.save(1, {"w": 2}, metrics={"loss": 2.0}, force=True)
        snapshots.save(2, {"w": 3}, metrics={"loss": 3.0}, force=True)
        snapshots.repository.forget_snapshots(["a@1"], force=True)
        heal(mirror, snapshots)
        assert snapshots.best_step() == 1
        assert same(snapshots.restore(ref), values("a", 1))
        assert same(snapshots.restore(1), values("a", 1))


@pytest.mark.parametrize("collected", [False, True])
def test_a_mirror_does_not_answer_with_the_newest_steps_if_they_were_forgotten_by_name(collected):
    """Until they come back, nobody is to resume there; the mirror keeps them, and each is restored by its number."""
    fast = created()
    with manager(fast, MemoryStore(), mirror_keep=()) as snapshots:
        save(snapshots, 1, 2, 3, 4)
        assert snapshots.wait_until_mirrored() == []
        snapshots.repository.forget_snapshots(["a@3", "a@4"], force=True)
        if collected:
            snapshots.repository.gc()
        assert snapshots.latest_step() == 2
        assert same(snapshots.restore(), values("a", 2))
        assert same(snapshots.restore(4), values("a", 4))
        if not collected:
            snapshots.repository.unforget("a@4")
        assert snapshots.latest_step() == 4
        snapshots.repository.forget_snapshots(["a@4"], force=True)
        assert snapshots.latest_step() == 2
        save(snapshots, 5)
        assert snapshots.latest_step() == 5


def test_a_mirror_answers_with_a_step_that_was_forgotten_by_name_before_the_newest_was_lost():
    fast, slow = created(), MemoryStore()
    with manager(fast, slow) as snapshots:
        save(snapshots, 1, 2)
    with manager(fast, outage(slow)) as snapshots:
        save(snapshots, 3)
        others = {key for s in of_run(fast)[:2] for key in objects_of(fast, s)}
        snapshots.repository.forget_snapshots(["a@2"])
        fast.delete({*objects_of(fast, snapshots.repository.snapshot("a@3"))} - others)
    with opened(fast) as repository:
        assert [s.step for s in repository.repair(apply=True, drop=True).dropped] == [3]
    with manager(fast, slow) as snapshots:
        assert snapshots.latest_step() == 2
        assert same(snapshots.restore(), values("a", 2))


def test_a_record_of_the_mirror_that_cannot_be_read_does_not_matter_if_its_step_was_forgotten_by_name_last():
    fast, slow = created(), MemoryStore()
    with manager(fast, slow) as snapshots:
        save(snapshots, 1, 2)
    last = of_run(slow)[-1].key
    with opened(fast) as repository:
        repository.forget_snapshots(["a@2"], force=True)
    with manager(fast, Unreadable(slow, last)) as snapshots:
        assert snapshots.latest_step() == 1
