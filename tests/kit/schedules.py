"""Schedules: what several processes do at once to one store, each stepped one store operation at a time.

In: what each process does, as functions of a store. Out: the store, after a random schedule of all, or after a schedule
that a test dictates (`Stage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from kit.actors import Actor, run_randomly
from kit.faults import FaultStore
from kit.objects import clone
from kit.repositories import check_clean, opened, restored, save
from kit.samples import SEED
from kit.tally import EXAMPLES, tally
from snapstore import ConflictError, InvalidInputError, KeepLast, NotFoundError
from snapstore.protocol.gc import GcResult
from snapstore.save import upkeep
from snapstore.storage.base import ObjectStore
from snapstore.storage.memory import MemoryStore

#: How many schedules a run of the tests makes, different ones in each run; and how many each test makes.
SCHEDULES = 100 * EXAMPLES
PER_TEST = 5

Body = Callable[[ObjectStore], Any]


# --- what the actors do ----------------------------------------------------------------------------------------------


def saving(run: str, step: int, version: int, **options: Any) -> Body:
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return save(repository, run, step, version, **options)

    return body


def collecting(fence_after_s: float = 3600.0) -> Body:
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.gc(fence_after_s=fence_after_s)

    return body


def keeping_one(bounded: bool = False) -> Body:
    """Do what follows a save of run a under KeepLast(1); `bounded`: forget and sweep one snapshot, then another."""

    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            context, at_once = repository.context, upkeep.AT_ONCE
            context.index.refresh("a")  # as the save before it does
            kept = upkeep.Upkeep(context, "a", lambda: False, set)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(upkeep, "AT_ONCE", 1 if bounded else at_once)
                for _ in range(2 if bounded else 1):
                    kept.retain([KeepLast(1)])
            if kept.error is not None:
                raise kept.error

    return body


def forgetting(*refs: str) -> Body:
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.forget_snapshots(refs, force=True) if refs else repository.forget([KeepLast(1)], run="a")

    return body


def unforgetting(ref: str) -> Body:
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.unforget(ref)

    return body


def several(*bodies: Body) -> Body:
    """Do one after the other; an error because of a lost race or a collected reference does not stop the next."""

    def body(store: ObjectStore) -> None:
        for each in bodies:
            with suppress(ConflictError, NotFoundError, InvalidInputError):
                each(store)

    return body


def tagging(ref: str, name: str) -> Body:
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.tag(ref, name)

    return body


def repairing(**options: Any) -> Body:
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.repair(apply=True, **options)

    return body


# --- all at once -----------------------------------------------------------------------------------------------------


def honest(store: ObjectStore, random: Random) -> ObjectStore:
    """Return the store itself: what an actor sees of it."""
    return store


def played(
    made: MemoryStore,
    cast: Callable[[Body, Random], dict[str, Body]],
    actors: list[Actor],
    seeds: range,
    *,
    seen_as: Callable[[ObjectStore, Random], ObjectStore] = honest,
) -> Iterator[tuple[Any, str]]:
    """Yield (a copy of a store after a random schedule, the schedule as text) for each seed; no actor may raise.

    Args:
        cast: returns the bodies of the actors by name, from that of a gc and a Random.
        actors: a list that gets the actors, so that the caller can stop them at the end.
        seen_as: returns the store as an actor sees it; if that is a `FaultStore`, the actor may raise.
    """
    for seed in seeds:
        tally("schedules")
        random = Random(f"{SEED} {seed}")
        store = clone(made)
        impatient = random.random() < 0.5  # sessions look as if they were on another host, and are given up at once
        roles = cast(collecting(0.0 if impatient else 3600.0), random)
        stores = {name: seen_as(store, random) for name in roles}
        playing = [Actor(name, stores[name], body, seen_dead=impatient) for name, body in roles.items()]
        actors.extend(playing)
        trace = run_randomly(playing, random)
        steps = " | ".join(" ".join(step) for step in trace[-60:])
        about = f"seed {SEED} {seed}, {'impatient' if impatient else 'patient'}: {steps}"
        for actor in playing:
            seen = stores[actor.name]
            if isinstance(seen, FaultStore):
                seen.heal()
            else:
                assert actor.error is None, f"{actor.name}: {actor.error!r}; {about}"
        store.drop_locks()
        yield store, about


class Stage:
    """A store, and actors that go on when the test tells them to.

    Args:
        look: restores all snapshots of a repository, and returns the committed ones.
    """

    def __init__(self, made: MemoryStore, cast: list[Actor], look: Callable[..., Any] = restored) -> None:
        self.store, self._cast, self._look = clone(made), cast, look

    def enter(self, name: str, body: Any, **options: Any) -> Actor:
        self._cast.append(Actor(name, self.store, body, **options))
        return self._cast[-1]

    def fence(self) -> GcResult:
        """Let a gc take the one session, whose process only sleeps, for dead; return its result."""
        result = self.enter("G", collecting(0.0), seen_dead=True).finish()
        assert len(result.fenced) == 1
        return result

    def check(self) -> dict[str, Any]:
        """Check that all snapshots restore, and that a gc leaves only what is needed; return those committed."""
        with opened(self.store) as repository:
            found = {s.ref: s for s in self._look(repository)}
            repository.gc()
            assert {s.ref for s in repository.snapshots()} == set(found)
        check_clean(self.store)
        return found
