"""restore_into(fallback=True) with a mirror: nothing older is restored while the mirror may have a newer one whole."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kit import mirrored
from kit.fallbacks import (
    STEPS,
    blank,
    damaged_newest,
    needs,
    opened_by,
    require_blank,
    require_version,
    restored_by,
    saved,
    state_of,
)
from kit.faults import FaultStore
from kit.objects import clone, flip, replace
from kit.ranks import Managers
from kit.repositories import created, created_like, opened
from snapstore import IntegrityError, KeepBest, NotFoundError, Skipped, SnapshotManager, StorageError
from snapstore.storage.memory import MemoryStore

NEWEST = STEPS - 1


def pair(count: int = 1) -> tuple[MemoryStore, MemoryStore]:
    """Return a store, and a mirror that has all of it."""
    fast, slow = clone(saved(count)), created_like(saved(count))
    with opened(fast) as repository:
        repository.copy(to=slow)
    return fast, slow


def lose_record(store: MemoryStore, how: str, number: int = 0) -> None:
    """Damage or delete the record of the snapshot of this number, from the newest."""
    key = needs(1)[number].snapshot.key
    if how == "flip":
        flip(store, key, 30)
    else:
        store.delete([key])


def lose_manifest(store: MemoryStore, step: int) -> None:
    with opened(store) as repository:
        replace(store, repository.snapshot(f"a@{step}").manifests[0].key, b"")


# -- a record of the first store is lost


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("step", [None, "latest", NEWEST])
@pytest.mark.parametrize("how", ["flip", "gone"])
def test_a_lost_record_that_the_mirror_has(how: str, step: Any, read_only: bool) -> None:
    """The newest is not passed over in silence; and what the error advises brings it back."""
    fast, slow = pair()
    with mirrored.manager(fast, slow, read_only=read_only) as manager:
        assert manager.latest_step() == NEWEST  # so the index knows it
        lose_record(fast, how)
        with pytest.raises(IntegrityError, match=r"has it whole.*snapstore repair --apply.*snapstore copy id:"):
            manager.restore_into(state := blank(state_of(0)), step, fallback=True)
        require_blank(state)
    with opened(fast) as here, opened(slow) as there:
        here.repair(apply=True)
        there.copy([f"id:{needs(1)[0].snapshot.id}"], to=fast)
    with mirrored.manager(fast, slow, read_only=read_only) as manager:
        assert manager.restore_into(state, step, fallback=(skipped := Skipped())).step == NEWEST
        assert not skipped
    require_version(state, NEWEST)


@pytest.mark.parametrize("where", ["record", "manifest", "pack", "never there"])
@pytest.mark.parametrize("how", ["flip", "gone"])
def test_a_lost_record_that_the_mirror_has_not_whole(how: str, where: str) -> None:
    fast, slow = pair()
    if where == "never there":
        with opened(clone(saved(1))) as repository:
            repository.copy([f"a@{step}" for step in range(NEWEST)], to=(slow := created_like(saved(1))))
    elif where == "manifest":
        lose_manifest(slow, NEWEST)
    elif where == "record":
        with opened(slow) as repository:
            flip(slow, repository.snapshot(f"a@{NEWEST}").key, 30)
    else:
        damage_blob_of_mirror(slow)
    if where == "never there":
        lose_record(fast, how)  # before a manager copies it
    with mirrored.manager(fast, slow) as manager:
        if where != "never there":
            assert manager.repository.snapshot(f"a@{NEWEST}")  # so the index knows it
            lose_record(fast, how)
        state, skipped = blank(state_of(0)), Skipped()
        assert manager.restore_into(state, fallback=skipped).step == NEWEST - 1
    require_version(state, NEWEST - 1)
    nobody_knows_it = (how, where) == ("gone", "never there")
    assert [step for step, *_ in skipped.snapshots] == ([] if nobody_knows_it else [NEWEST])


def damage_blob_of_mirror(slow: MemoryStore) -> None:
    """Flip bytes of a blob that only the newest snapshot of a mirror needs."""
    with opened(slow) as repository:
        headers = {s.step: repository.context.index.headers(s.manifests) for s in repository.snapshots("a")}
    packs = {step: {name for header in of for name in header.pack_names} for step, of in headers.items()}
    (name, *_) = packs[NEWEST] - packs[NEWEST - 1]
    key = next(key for key in (info.key for info in slow.list("packs/")) if key.endswith(name))
    flip(slow, key, len(slow.get(key)) // 2, 8)


@pytest.mark.parametrize("how", ["flip", "gone"])
def test_an_old_lost_record_is_not_in_the_way(how: str) -> None:
    """Nothing here tells its place in the run; the mirror does, so a whole newer one is restored."""
    fast, slow = pair()
    lose_record(fast, how, number=3)
    with mirrored.manager(fast, slow) as manager:
        state, skipped = blank(state_of(0)), Skipped()
        assert manager.restore_into(state, fallback=skipped).step == NEWEST
        assert not skipped
    require_version(state, NEWEST)


# -- words


def test_latest_means_the_newest() -> None:
    store = clone(saved(1))
    lose_record(store, "flip")
    with opened_by(store) as manager:
        for step in (None, "latest"):
            state, skipped = blank(state_of(0)), Skipped()
            assert manager.restore_into(state, step, fallback=skipped).step == NEWEST - 1
            assert [step for step, *_ in skipped.snapshots] == [NEWEST]


def test_words_mean_what_they_mean_without_fallback() -> None:
    store = created()
    with opened_by(store, async_save=False) as manager:
        for step in range(3):
            manager.save(step, state_of(step), metrics={"acc": float(-step)})
    slow = created_like(store)
    options = {"keep": [KeepBest("acc", mode="max")], "read_only": True}  # so no policy is stored
    with opened_by(store, **options) as manager:
        state = blank(state_of(0))
        assert manager.restore_into(state, "best", fallback=True).step == 0
        require_version(state, 0)
    with opened(store) as repository:
        repository.copy(to=slow)
        repository.tag("a@1", "best")
    with opened_by(store, **options) as manager:
        assert manager.restore_into(blank(state_of(0)), "best", fallback=True).step == 1
    with opened_by(store, keep=[KeepBest("loss")], read_only=True) as manager:
        assert manager.restore_into(blank(state_of(0)), "best", fallback=True).step == 1
        with pytest.raises(NotFoundError):
            manager.restore_into(blank(state_of(0)), "best:loss", fallback=True)
    with opened(store) as repository:
        highest = repository.snapshot("a@2").key
    store.delete([highest])
    with mirrored.manager(store, slow) as manager:  # only the mirror has it
        assert manager.restore_into(state, "highest", fallback=True).step == 2
        require_version(state, 2)


# -- only the mirror has the newest


def test_the_newest_is_only_in_the_mirror_and_damaged(caplog: pytest.LogCaptureFixture) -> None:
    fast, slow = pair()
    lose_manifest(slow, NEWEST)
    fast.delete([one.snapshot.key for one in needs(1)[:2]])
    for step in (None, "latest"):
        with mirrored.manager(fast, slow) as manager:  # the second newest is copied back
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                found = manager.restore_into(state := blank(state_of(0)), step, fallback=(skipped := Skipped()))
        assert found.step == NEWEST - 1
        require_version(state, NEWEST - 1)
        assert [(step, name) for step, name, _ in skipped.snapshots] == [(NEWEST, needs(1)[0].snapshot.id)]
        assert "only " in skipped.snapshots[0][2]
        assert f"a@{NEWEST} (id:{needs(1)[0].snapshot.id[:12]}) is skipped: only " in caplog.text
    with opened(slow) as repository:
        flip(slow, repository.snapshot(f"a@{NEWEST}").key, 30)
    with mirrored.manager(fast, slow) as manager:  # its record is damaged too
        assert manager.restore_into(state, fallback=(skipped := Skipped())).step == NEWEST - 1
    assert [step for step, *_ in skipped.snapshots] == [NEWEST]


def test_nothing_is_whole_but_what_the_mirror_has() -> None:
    fast, slow = created_like(saved(1)), pair()[1]
    for step in range(1, STEPS):
        lose_manifest(slow, step)
    with mirrored.manager(fast, slow) as manager:
        state, skipped = blank(state_of(0)), Skipped()
        assert manager.restore_into(state, fallback=skipped).step == 0
    require_version(state, 0)
    assert [step for step, *_ in skipped.snapshots] == [*range(NEWEST, 0, -1)]
    fast = created_like(saved(1))
    lose_manifest(slow, 0)
    with mirrored.manager(fast, slow) as manager, pytest.raises(IntegrityError, match="manifest is damaged"):
        manager.restore_into(state, fallback=True)


def test_a_read_only_job_reads_no_mirror() -> None:
    """Only rank 0 has it, and nothing can be copied back: an error on all ranks, as without fallback, and no mark."""
    fast, slow = pair(2)
    fast.delete([needs(2)[0].snapshot.key])
    managers = Managers(fast, 2, mirror=slow, read_only=True)
    for rank, (error, state, _) in enumerate(restored_by(managers)):
        assert isinstance(error, NotFoundError), (rank, error)
        assert "only the mirror has it" in str(error)
        require_blank(state, rank, 2)
    mirror: Any = managers[0]._mirror
    assert mirror.target().index.marks.packed() == {}
    for rank, (snapshot, state, skipped) in enumerate(restored_by(managers, step=NEWEST - 1)):
        assert (snapshot.step, len(skipped)) == (NEWEST - 1, 0)
        require_version(state, NEWEST - 1, rank, 2)
    managers.end()


# -- the mirror is away


class Away(FaultStore):
    """A store that can go away."""

    gone = False

    def _act(self, name: str, key: str, effect: Any) -> Any:
        if self.gone:
            raise StorageError("away")
        return super()._act(name, key, effect)


@pytest.mark.parametrize("begins_away", [False, True])
@pytest.mark.parametrize("lost", ["pack", "record"])
def test_a_mirror_that_is_away_may_have_the_newest(lost: str, begins_away: bool) -> None:
    fast, slow = pair()
    away = Away(slow)
    if lost == "pack":
        damaged_newest(fast)
    else:
        lose_record(fast, "flip")
    away.gone = begins_away
    with mirrored.manager(fast, away) as manager:
        away.gone = True
        with pytest.raises(StorageError, match="the mirror may have"):
            manager.restore_into(state := blank(state_of(0)), fallback=True)
        require_blank(state)
        away.gone = False
        if lost == "pack":
            assert manager.restore_into(state, fallback=(skipped := Skipped())).step == NEWEST
            assert not skipped
            require_version(state, NEWEST)
    with opened_by(fast) as alone:  # the advice
        assert alone.restore_into(state, fallback=True).step == (NEWEST if lost == "pack" else NEWEST - 1)


def test_a_whole_first_store_needs_no_mirror() -> None:
    fast, slow = pair()
    away = Away(slow)
    away.gone = True
    with mirrored.manager(fast, away) as manager:
        state = blank(state_of(0))
        assert manager.restore_into(state, fallback=True).step == NEWEST
    require_version(state, NEWEST)


def test_a_mirror_that_withholds_what_may_be_whole() -> None:
    """Or a first store that takes no copy: nothing older is restored."""
    fast, slow = pair()
    damaged_newest(fast)
    full = FaultStore(fast, 0, "full")
    with SnapshotManager(full, run="a", mirror=slow, ranks=False) as manager:
        with pytest.raises(StorageError):
            manager.restore_into(state := blank(state_of(0)), fallback=True)
        require_blank(state)
        full.heal()
        assert manager.restore_into(state, fallback=True).step == NEWEST
    require_version(state, NEWEST)
