"""All verbs beside each other: nothing is lost, and no verb reports damage where there is none.

First on a store that does what it says. Then some processes see one fault or one lie of it: they may fail, and the
others may not notice.
"""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
from test_compact_interleavings import compacting
from test_compact_interleavings import history as of_compact

from kit import foreign
from kit.faults import MODES, FaultStore
from kit.lies import RandomLiar
from kit.objects import clone
from kit.repositories import check_clean, check_restores, is_whole, opened, save
from kit.schedules import (
    PER_TEST,
    SCHEDULES,
    Body,
    forgetting,
    played,
    repairing,
    saving,
    several,
    tagging,
    unforgetting,
)
from snapstore.storage.base import ObjectStore
from snapstore.storage.memory import MemoryStore


@cache
def history() -> MemoryStore:
    """The one of test_compact_interleavings.py, and c@0, which was forked from a@8, in codec 70."""
    store = clone(of_compact())
    with opened(store) as repository, foreign.written():
        save(repository, "c", 0, 60, parent="a@8")
    return store


@cache
def source() -> MemoryStore:
    """Copies of a@7 and b@0, and a@30, which builds on a@7."""
    store = MemoryStore()
    with opened(history()) as repository:
        repository.copy(["a@7", "b@0"], to=store)
    with opened(store) as repository:
        save(repository, "a", 30, 30, parent="a@7")
    return store


def recoding(store: ObjectStore) -> None:
    with opened(store) as repository:
        assert repository.recode().failed == []


def repaired(level: str) -> Body:
    def body(store: ObjectStore) -> None:
        assert repairing(level=level)(store).lost == []  # so it has dropped nothing

    return body


def checking(store: ObjectStore) -> None:
    with opened(store) as repository:
        assert repository.check("restore").problems == []


def restoring(*refs: str) -> Body:
    """Restore snapshots, each as it was saved; one may be gone."""

    def body(store: ObjectStore) -> None:
        with opened(store) as repository:
            for ref in refs:
                snapshot = repository.snapshot(ref)
                assert is_whole(snapshot, repository.restore(f"id:{snapshot.id}")), ref

    return body


def copying_in(store: ObjectStore) -> None:
    with opened(clone(source())) as other, opened(store) as repository:
        for snapshot, why in other.copy(to=repository).failed:
            assert "keep revising" in why or "gc fenced" in why, (snapshot, why)


def copying_out(store: ObjectStore) -> None:
    target = MemoryStore()
    with opened(store) as repository:
        result = repository.copy(to=target)
    for snapshot, why in result.failed:
        assert "meanwhile" in why or "keep revising" in why, (snapshot, why)
    with opened(target) as repository:
        repository.gc()
    check_clean(target)


VERBS: list[Body] = [
    saving("a", 10, 10),
    saving("a", 11, 11, full=True),
    saving("b", 1, 51, parent="a@8"),
    saving("d", 0, 7),  # the values of a@7
    forgetting("a@7"),
    forgetting("a@8"),
    forgetting("b@0"),
    forgetting(),
    unforgetting("a@6"),
    unforgetting("a@7"),
    tagging("a@8", "t"),
    tagging("a@9", "t"),
    compacting(),
    compacting(),
    compacting(max_repack_bytes=8000),
    recoding,
    repaired("metadata"),
    repaired("restore"),
    checking,
    restoring("a@8", "c@0", "a@9"),
    restoring("b@0", "a@7"),
    copying_in,
    copying_out,
]


def cast(gc: Body, random: Random) -> dict[str, Body]:
    roles = {name: several(*random.choices([*VERBS, gc], k=3)) for name in "ABCDE"}
    return roles | {"G": several(gc, gc), "H": several(gc)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(0, SCHEDULES // 10, PER_TEST))
def test_random_schedules(first, actors):
    for store, about in played(history(), cast, actors, range(first, min(first + PER_TEST, SCHEDULES // 10))):
        with opened(store) as repository:
            check_restores(repository, about)
            assert repository.compact().failed == [], about
            repository.gc()
        check_clean(store, about)


#: A torn put leaves half an object, which is damage that every process may report.
WHOLE_MODES = [mode for mode in MODES if mode != "torn"]


def seen(store: ObjectStore, random: Random) -> ObjectStore:
    """Return a store with at most one fault or one lie."""
    at = random.choice((random.randrange(40), random.randrange(150), random.randrange(400)))
    kind = random.choice(("honest", "honest", "fault", "lie"))
    if kind == "honest":
        return store
    return FaultStore(store, at, random.choice(WHOLE_MODES)) if kind == "fault" else RandomLiar(store, at, random)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(0, SCHEDULES // 10, PER_TEST))
def test_random_schedules_with_faults_and_lies(first, actors):
    seeds = range(first, min(first + PER_TEST, SCHEDULES // 10))
    for store, about in played(history(), cast, actors, seeds, seen_as=seen):
        with opened(store) as repository:
            kept = {snapshot.ref for snapshot in check_restores(repository, about)}
            assert "c@0" in kept, about
            repository.repair(apply=True)  # a lie about a pack may have put it in quarantine
            repository.gc(fence_after_s=0.0)
            repository.gc()
        check_clean(store, about)
