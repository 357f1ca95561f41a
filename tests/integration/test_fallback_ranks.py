"""restore_into(fallback=True) by several ranks: all restore one snapshot, which each has found whole, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kit.fallbacks import (
    STEPS,
    blank,
    damaged_newest,
    needs,
    require_blank,
    require_version,
    restored_by,
    saved,
    state_of,
)
from kit.faults import Crash, Unreadable
from kit.objects import clone, flip
from kit.ranks import Managers, RankStore, fail_message
from kit.repositories import created_like, opened
from kit.samples import SEED, THOROUGH
from snapstore import (
    InvalidInputError,
    RanksError,
    SnapshotManager,
    StorageError,
)
from snapstore.format.records import Snapshot

COUNT = 3


def job(stores: Sequence[Any], **options: Any) -> Managers:
    return Managers(stores[0], len(stores), stores=stores, **options)


@pytest.mark.parametrize("how", ["flipped", "missing", "unread"])
@pytest.mark.parametrize("bad", range(COUNT))
def test_a_corrupt_replica_of_one_rank(bad: int, how: str) -> None:
    """Elsewhere a corrupt replica made a job restart 44 times into NaN: here no rank restores what one cannot read."""
    key = next(key for key in needs(COUNT)[0].packs if key not in needs(COUNT)[1].packs)
    stores: list[Any] = [clone(saved(COUNT)) for _ in range(COUNT)]
    stores[bad] = Unreadable(stores[bad], key, how=how)
    managers = job(stores)
    results = restored_by(managers)
    managers.end()
    reads_it = any(len(skipped) for *_, skipped in results)  # a rank may need no byte of it
    for rank, (snapshot, state, skipped) in enumerate(results):
        assert snapshot.step == (STEPS - 2 if reads_it else STEPS - 1)
        require_version(state, snapshot.step, rank, COUNT)
        assert skipped == results[0][2]
        assert all(f"rank {bad}: " in why for *_, why in skipped.snapshots)


def test_corrupt_replicas_make_all_skip() -> None:
    """A damaged manifest on any one rank is read by all, so all skip."""
    key = needs(COUNT)[0].snapshot.manifests[0].key
    for bad in range(COUNT):
        stores: list[Any] = [clone(saved(COUNT)) for _ in range(COUNT)]
        flip(stores[bad], key, 30)
        managers = job(stores)
        for rank, (snapshot, state, skipped) in enumerate(restored_by(managers)):
            assert snapshot.step == STEPS - 2
            require_version(state, STEPS - 2, rank, COUNT)
            assert [step for step, *_ in skipped.snapshots] == [STEPS - 1]
            assert f"rank {bad}: " in skipped.snapshots[0][2]
        for rank, (snapshot, state, skipped) in enumerate(restored_by(managers)):  # again: rank 0 knows it by its mark
            assert snapshot.step == STEPS - 2
            require_version(state, STEPS - 2, rank, COUNT)
            assert "marked in the index: " in skipped.snapshots[0][2]
        managers.end()


def test_an_error_of_one_rank_ends_it_on_all() -> None:
    """A store that is away on one rank, or a target that does not fit there: no rank restores anything."""
    key = needs(COUNT)[0].snapshot.manifests[0].key
    for bad in range(COUNT):
        stores: list[Any] = [clone(saved(COUNT)) for _ in range(COUNT)]
        stores[bad] = Unreadable(stores[bad], key, how="withheld")
        managers = job(stores)
        for rank, (error, state, _) in enumerate(restored_by(managers)):
            assert isinstance(error, StorageError), (bad, rank, error)
            require_blank(state, rank, COUNT)
        stores[bad].times = 0
        states = [blank(state_of(0, rank, COUNT)) for rank in range(COUNT)]
        states[bad] = {"other": 1}
        for rank, error in enumerate(managers.all(lambda m, r, s=states: m.restore_into(s[r], fallback=True))):
            assert isinstance(error, InvalidInputError), (bad, rank, error)
            if rank != bad:
                require_blank(states[rank], rank, COUNT)
        for rank, (snapshot, state, skipped) in enumerate(restored_by(managers)):  # and the job goes on
            assert (snapshot.step, len(skipped)) == (STEPS - 1, 0)
            require_version(state, STEPS - 1, rank, COUNT)
        managers.end()


def test_ranks_that_disagree_on_the_call() -> None:
    """One rank calls without fallback, or for another step: errors, and no hang."""
    for bad in range(COUNT):
        for other in ({"fallback": False}, {"fallback": True, "step": 1}):
            managers = job([saved(COUNT)] * COUNT, total_s=10)
            states = [blank(state_of(0, rank, COUNT)) for rank in range(COUNT)]

            def call(m: SnapshotManager, r: int, bad: int = bad, other: Any = other, states: Any = states) -> Any:
                return m.restore_into(states[r], **(other if r == bad else {"fallback": True}))

            results = managers.all(call)
            for rank, error in enumerate(results):
                if isinstance(error, Snapshot):  # rank 0's plain restore asks nobody
                    assert (rank, bad) == (0, 0)
                    continue
                assert isinstance(error, InvalidInputError | RanksError), (bad, other, rank, error)
                require_blank(states[rank], rank, COUNT)
            managers.end()


def require_agreed(results: Sequence[Any], states: Sequence[Any], wanted: int, about: str) -> None:
    """Each rank has restored the same step, or has raised an error and changed nothing."""
    for rank, (found, state) in enumerate(zip(results, states, strict=True)):
        if isinstance(found, Snapshot):
            assert found.step == wanted, about
            require_version(state, wanted, rank, COUNT)
        else:
            assert isinstance(found, RanksError | Crash), f"{about}, rank {rank}: {found!r}"
            require_blank(state, rank, COUNT)


@pytest.mark.parametrize("bad", range(COUNT))
def test_a_rank_that_dies_while_it_verifies(bad: int) -> None:
    """The process of a rank ends at any of its reads: the others raise errors within the known time."""
    store = clone(saved(COUNT))
    damaged_newest(store, COUNT)
    dry = 1
    for at in [None, *range(0 if THOROUGH else SEED % 9, 40, 1 if THOROUGH else 9)]:
        if at is not None and at >= dry:
            break
        stores = [RankStore(store) for _ in range(COUNT)]
        managers = job(stores, silent_s=0.5, total_s=10.0)
        for one, ranks in zip(stores, managers.ranks, strict=True):
            one.ranks = ranks
        first = len(stores[bad].log)
        if at is not None:
            stores[bad].at, stores[bad].mode = first + at, "crash-before"
        states = [blank(state_of(0, rank, COUNT)) for rank in range(COUNT)]
        results = managers.all(lambda m, r, s=states: m.restore_into(s[r], fallback=True))
        dry = len(stores[bad].log) - first if at is None else dry
        assert at is None or isinstance(results[bad], Crash)
        states[bad] = states[bad] if at is None else blank(state_of(0, bad, COUNT))  # it is gone
        require_agreed(results, states, STEPS - 2, f"rank {bad} dies at {at} of {dry}")
        managers.end()
        for manager in managers:
            manager.repository.close()


@pytest.mark.parametrize("mode", ["drop", "delay", "double", "crash-before", "crash-after"])
def test_messages_that_are_lost_late_or_twice(mode: str) -> None:
    """Each message of each rank is lost, late or doubled, or its process dies there: no two ranks differ."""
    store = clone(saved(COUNT))
    damaged_newest(store, COUNT)
    for bad in range(COUNT):
        for at in range(4) if THOROUGH else [SEED % 3]:
            managers = job([store] * COUNT, silent_s=0.5, total_s=2.0)
            for ranks in managers.ranks:
                ranks.die = lambda ranks=ranks: setattr(ranks, "dead", True)
            fail_message(managers.ranks[bad], at, mode, 0.3)
            states = [blank(state_of(0, rank, COUNT)) for rank in range(COUNT)]
            results = managers.all(lambda m, r, s=states: m.restore_into(s[r], fallback=True))
            if mode.startswith("crash") and isinstance(results[bad], Crash):
                states[bad] = blank(state_of(0, bad, COUNT))
            require_agreed(results, states, STEPS - 2, f"rank {bad}, message {at}, {mode}")
            managers.end()
            for manager in managers:
                manager.repository.close()


def test_the_mirror_of_rank_0_comes_before_older_snapshots() -> None:
    """Rank 0 copies the damaged snapshot back, and all ranks restore its new revision."""
    fast, slow = clone(saved(COUNT)), created_like(saved(COUNT))
    with opened(fast) as repository:
        repository.copy(to=slow)
    damaged_newest(fast, COUNT)
    managers = Managers(fast, COUNT, mirror=slow)
    for rank, (snapshot, state, skipped) in enumerate(restored_by(managers)):
        assert (snapshot.step, len(skipped)) == (STEPS - 1, 0)
        require_version(state, STEPS - 1, rank, COUNT)
    managers.each(lambda m, r: m.save(STEPS, state_of(STEPS, r, COUNT)).result())
    managers.end()
    with opened(fast) as repository:
        assert repository.check("restore").damaged == []
