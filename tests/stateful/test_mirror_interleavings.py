"""Jobs with a mirror run beside all verbs on both stores: neither store loses a snapshot or dangles.

Each operation of a process on either store is a step of a random schedule. Two jobs save the same run and copy into the
same mirror, as two attempts of one job may for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from random import Random
from typing import Any

import pytest
from test_all_interleavings import checking, repaired, seen
from test_compact_interleavings import compacting
from test_compact_interleavings import history as first_store

from kit.actors import Actor, SteppingStore, run_randomly
from kit.faults import FaultStore
from kit.objects import clone
from kit.repositories import check_clean, check_restores, is_whole, opened, save
from kit.samples import SEED
from kit.schedules import (
    PER_TEST,
    SCHEDULES,
    Body,
    collecting,
    forgetting,
    honest,
    saving,
    several,
    tagging,
    unforgetting,
)
from kit.tally import tally
from snapstore import ConflictError, KeepEvery, KeepLast, NotFoundError, Repository
from snapstore.copy.mirror import Mirror
from snapstore.protocol.forget import Bounds, forget
from snapstore.protocol.same_repository import confirmed
from snapstore.retention import Policy
from snapstore.storage.base import ObjectStore
from snapstore.storage.memory import MemoryStore

Seen = Callable[[], ObjectStore]  # returns a store as one process sees it


@cache
def mirror_store() -> MemoryStore:
    """Copies of a@7 and a@8, of which a@7 is forgotten, and b@0, which the mirror of another run has put."""
    store = MemoryStore()
    with opened(first_store()) as repository:
        repository.copy(["a@7", "a@8", "b@0"], to=store)
    with opened(store) as repository:
        repository.forget_snapshots(["a@7"], force=True)
    return store


class SteppedMirror(Mirror):
    """A mirror whose thread does nothing: its owner makes the attempts."""

    def _work(self) -> None:
        pass

    def attempt(self) -> bool:
        """Catch up once, as the thread does; return whether it was not cut short."""
        return self._catch_up()


def mirrored(repository: Repository, mirror: Any, keep: Sequence[Policy] = ()) -> SteppedMirror:
    made = SteppedMirror("a", mirror.url, repository.context, lambda: Repository.open(mirror), keep)
    made.start()
    return made


def job(steps: Sequence[int], second: ObjectStore, keep: Sequence[Policy], here: Sequence[Policy]) -> Body:
    """Restore, then save steps, apply policies here, and copy what is due into the mirror, again and again."""

    def body(store: Any) -> None:
        other = SteppingStore(store._actor, second, seen_dead=store._seen_dead)
        with opened(store) as repository:
            mirror = mirrored(repository, other, keep)
            with suppress(ConflictError, NotFoundError):
                context = mirror.nearest("latest")
                with opened(context.store) as found:
                    snapshot = found.snapshot("a@latest")
                    assert is_whole(snapshot, found.restore(f"id:{snapshot.id}"))
            for step in steps:
                with suppress(ConflictError):
                    mirror.note(save(repository, "a", step, step))
                with suppress(ConflictError):
                    if here:
                        with confirmed(repository.context):
                            forget(repository.context, here, run="a", bounds=Bounds(mirror.held()))
                with suppress(ConflictError, NotFoundError):
                    mirror.attempt()
            for _ in range(2):
                with suppress(ConflictError, NotFoundError):
                    mirror.attempt()
            mirror.close(timeout=0)

    return body


FIRST: list[Body] = [
    forgetting("a@7"),
    forgetting("a@8"),
    unforgetting("a@6"),
    tagging("a@8", "t"),
    tagging("a@9", "t"),
    saving("b", 1, 51, parent="a@8"),
    compacting(),
    compacting(max_repack_bytes=8000),
    repaired("metadata"),
    repaired("restore"),
    checking,
]
SECOND: list[Body] = [
    forgetting("a@8"),
    forgetting(),
    unforgetting("a@7"),
    tagging("a@8", "u"),
    compacting(),
    compacting(max_repack_bytes=8000),
    repaired("metadata"),
    repaired("restore"),
    checking,
]
KEEPS: list[list[Policy]] = [[], [], [KeepLast(2)], [KeepLast(3), KeepEvery(steps=5)]]


def cast(first: Seen, second: Seen, gc: Body, random: Random) -> list[tuple[str, list[ObjectStore], Body]]:
    """Return the name of each process, the stores as it sees them, and what it does to the first of these."""
    keep, here = random.choice(KEEPS), random.choice(KEEPS)
    roles: list[tuple[str, list[ObjectStore], Body]] = []
    for name, steps, applied in (("J", [20, 21, 22], here), ("K", [21, 30], [])):
        stores = [first(), second()]
        roles.append((name, stores, job(steps, stores[1], keep, applied)))
    roles += [(name, [first()], several(*random.choices([*FIRST, gc], k=3))) for name in "AB"]
    roles += [(name, [second()], several(*random.choices([*SECOND, gc], k=3))) for name in "XY"]
    return [*roles, ("G", [first()], several(gc, gc)), ("H", [second()], several(gc, gc))]


def played(begin: int, actors: list[Actor], seen_as: Callable[..., ObjectStore]) -> Iterator[Any]:
    """Yield both stores after a random schedule, and the schedule as text, for some seeds; no process may raise.

    Args:
        seen_as: see `kit.schedules.played`.
    """
    for seed in range(begin, min(begin + PER_TEST, SCHEDULES // 10)):
        tally("mirror schedules")
        random = Random(f"{SEED} {seed} mirror")
        first, second = clone(first_store()), clone(mirror_store())
        impatient = random.random() < 0.5
        see = [partial(seen_as, store, random) for store in (first, second)]
        roles = cast(*see, collecting(0.0 if impatient else 3600.0), random)
        playing = [Actor(name, stores[0], body, seen_dead=impatient) for name, stores, body in roles]
        actors.extend(playing)
        trace = run_randomly(playing, random)
        steps = " | ".join(" ".join(step) for step in trace[-60:])
        about = f"seed {SEED} {seed}, {'impatient' if impatient else 'patient'}: {steps}"
        for actor, (_, stores, _) in zip(playing, roles, strict=True):
            faulty = [store for store in stores if isinstance(store, FaultStore)]
            for store in faulty:
                store.heal()
            assert faulty or actor.error is None, f"{actor.name}: {actor.error!r}; {about}"
        for store in (first, second):
            store.drop_locks()
        yield first, second, about


def check_mirrored(first: MemoryStore, second: MemoryStore, about: str) -> None:
    """Check that an undisturbed mirror copies all that is left."""
    with opened(first) as repository:
        mirror = mirrored(repository, second)
        assert mirror.attempt(), about
        assert mirror.behind() == [], about
        mirror.close()
        left = {s.id for s in repository.snapshots(run="a")}
    with opened(second) as repository:
        assert left <= {s.id for s in repository.view().snapshots("a", ("committed", "forgotten", "swept"))}, about
        check_restores(repository, about)
        repository.gc(fence_after_s=0.0)
        repository.gc()
    check_clean(second, about)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("begin", range(0, SCHEDULES // 10, PER_TEST))
def test_random_schedules(begin, actors):
    for first, second, about in played(begin, actors, honest):
        for store in (first, second):
            with opened(store) as repository:
                check_restores(repository, about)
                assert repository.compact().failed == [], about
                repository.gc()
            check_clean(store, about)
        check_mirrored(first, second, about)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("begin", range(0, SCHEDULES // 10, PER_TEST))
def test_random_schedules_with_faults_and_lies(begin, actors):
    for first, second, about in played(begin, actors, seen):
        for store in (first, second):
            with opened(store) as repository:
                assert "b@0" in {snapshot.ref for snapshot in check_restores(repository, about)}, about
                repository.repair(apply=True)  # a lie about a pack may have put it in quarantine
                repository.gc(fence_after_s=0.0)
                repository.gc()
            check_clean(store, about)
        check_mirrored(first, second, about)
