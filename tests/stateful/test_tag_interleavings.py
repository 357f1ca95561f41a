"""A tag that two processes give to two snapshots at once ends on exactly one of them.

Thorough runs try all schedules of two processes, one operation on the records at a time; other runs try a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, cycle, repeat
from random import Random

import pytest

from kit.actors import Actor
from kit.repositories import created, opened, save
from kit.samples import SEED, THOROUGH
from kit.schedules import Body, Stage, forgetting, saving, tagging
from kit.tally import tally
from snapstore.format import records
from snapstore.format.records import Snapshot
from snapstore.storage.memory import MemoryStore

#: The snapshot that has the tag before, and two actors.
CASTS: dict[str, tuple[str, Body, Body]] = {
    "none has it": ("", tagging("a@0", "t"), tagging("a@1", "t")),
    "another one has it": ("a@2", tagging("a@0", "t"), tagging("a@1", "t")),
    "it goes back and stays": ("a@1", tagging("a@0", "t"), tagging("a@1", "t")),
    "beside a save": ("a@2", tagging("a@0", "t"), saving("a", 3, 3, tags=["t"])),
    "two saves": ("", saving("a", 3, 3, tags=["t"]), saving("a", 4, 4, tags=["t"])),
}
#: All combinations of a schedule's first choices are tried; two that take the tag from each other make more choices.
BRANCHES = 14


@cache
def history(first: str) -> MemoryStore:
    """a@0 to a@2, of which one has the tag."""
    store = created()
    with opened(store) as repository:
        for step in range(3):
            save(repository, "a", step, step, full=True)
        if first:
            repository.tag(first, "t")
    return store


def step(actor: Actor) -> None:
    """Go on to the actor's next listing of records, or its next put of a record."""
    actor.step()
    while actor.at and not (actor.at[0] in ("list", "put") and actor.at[1].startswith("snapshots/")):
        actor.step()


def holders(store: MemoryStore) -> set[str]:
    """Return which snapshots have the tag, by the records themselves."""
    ruling: dict[str, Snapshot] = {}
    for info in store.list("snapshots/"):
        found = records.decode(store.get(info.key), Snapshot, info.key)
        if found.id not in ruling or found.revision > ruling[found.id].revision:
            ruling[found.id] = found
    return {s.ref for s in ruling.values() if "t" in s.tags and s.state == "committed"}


def play(name: str, cast: list[Actor], choices: Iterator[int]) -> list[int]:
    """Run a schedule by choices of the next actor; return the choices that were made while both were running."""
    tally("schedules")
    first, *bodies = CASTS[name]
    stage = Stage(history(first), cast)
    one, two = (stage.enter(str(number), body) for number, body in enumerate(bodies))
    made: list[int] = []
    had = bool(first)
    while not (one.ended and two.ended):
        if not one.ended and not two.ended:
            made.append(next(choices))
        step(one if two.ended or (not one.ended and not made[-1]) else two)
        now = holders(stage.store)
        assert now or not had, f"{name}: {made}: nobody has it"
        had = bool(now)
    told = {s.ref for s in (one.finish(), two.finish()) if "t" in s.tags}
    (holder,) = now
    assert holder in told, made
    forgetting()(stage.store)
    assert holders(stage.store) == {holder}
    cast.clear()
    return made


def all_schedules(name: str, cast: list[Actor]) -> None:
    prefix: list[int] | None = []
    while prefix is not None:
        made = play(name, cast, chain(prefix, repeat(0)))[:BRANCHES]
        while made and made[-1]:
            made.pop()
        prefix = [*made[:-1], 1] if made else None


@pytest.mark.sampled(2)
@pytest.mark.no_cover  # see test_crash_points.py
@pytest.mark.parametrize("name", CASTS)
def test_it_is_on_one_in_the_end_and_never_on_none(name, actors):
    if THOROUGH:
        all_schedules(name, actors)
        return
    random = Random(f"{SEED} {name}")
    for _ in range(20 if "save" in name else 100):
        play(name, actors, iter(lambda: random.randrange(2), None))


def test_two_that_take_turns_to_take_it_back_come_to_an_end(actors):
    """Each sees that the other one had the tag before; actors in step must not livelock."""
    made = play("it goes back and stays", actors, cycle((0, 1)))
    assert len(made) < 40


def test_a_deliberate_tag_is_not_undone_by_a_revision_of_the_old_holder(actors):
    """a@2 had the tag, and is revised while the tag moves to a@1: that does not give the tag back to a@2."""
    stage = Stage(history("a@2"), actors)
    mover = stage.enter("M", tagging("a@1", "t")).until("put", "snapshots/a/000000000001-")
    mover.step()
    tagging("a@2", "other")(stage.store)
    assert mover.finish().tags == ["t"]
    assert holders(stage.store) == {"a@1"}
