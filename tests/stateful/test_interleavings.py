"""No committed snapshot dangles when saves, forgets, un-forgets and gcs take turns at every store operation.

First random schedules; then all schedules that stop few actors few times; then the counter-examples that the models of
the protocol print when one of its rules is dropped, each driven by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import count, permutations
from random import Random
from typing import Any

import pytest

from kit.actors import Actor
from kit.objects import clone, keys_of
from kit.repositories import check_clean, created, opened, restored, save, values
from kit.samples import SEED, THOROUGH
from kit.schedules import (
    PER_TEST,
    SCHEDULES,
    Body,
    Stage,
    collecting,
    forgetting,
    keeping_one,
    played,
    saving,
    several,
    tagging,
    unforgetting,
)
from kit.tally import tally
from snapstore import ConflictError, IntegrityError, InvalidInputError, KeepLast, NotFoundError, StorageError
from snapstore.format.blobs import pack
from snapstore.storage.base import ObjectStore
from snapstore.storage.memory import MemoryStore


@cache
def history() -> MemoryStore:
    """a@0 to a@2, of which a@1 is forgotten, and b@0, which was forked from a@1."""
    store = created()
    with opened(store) as repository:
        for step in range(3):
            save(repository, "a", step, step)
        save(repository, "b", 0, 50, parent="a@1")
        repository.forget_snapshots(["a@1"], force=True)
    return store


# --- random schedules ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.no_cover  # see test_crash_points.py
@pytest.mark.parametrize("first", range(0, SCHEDULES, PER_TEST))
def test_random_schedules(first, actors):
    def cast(gc, random):
        return {
            "S": several(saving("a", 10, 10), saving("a", 11, 11)),
            "T": several(saving("a", 20, 20, parent=random.choice((None, "a@0"))), saving("b", 1, 51)),
            "F": several(forgetting("a@0"), unforgetting("a@0"), unforgetting("a@1"), forgetting("a@2"), forgetting()),
            "N": several(saving("n", 0, random.choice((2, 50)))),  # shares chunks with a@2 or b@0
            "G": several(gc, gc),
            "H": several(gc),
            "K": several(keeping_one(random.random() < 0.5)),
        }

    for store, about in played(history(), cast, actors, range(first, min(first + PER_TEST, SCHEDULES))):
        with opened(store) as repository:
            restored(repository, about)
            repository.gc()
        check_clean(store, about)


# --- all schedules with few stops ------------------------------------------------------------------------------------

#: The actors on `doomed`. S builds on a@2, which is being swept, if U has brought it back. T builds on b@0, which F
#: forgets. R stores the same bytes that are being swept. N, the
#: first save of its run, shares chunks with b@0. H fences each session that is in the middle of a save.
CAST: dict[str, Body] = {
    "S": saving("a", 3, 3),
    "T": saving("b", 1, 51),
    "R": saving("c", 1, 7),
    "N": saving("n", 0, 50),
    "F": forgetting("b@0"),
    "U": unforgetting("a@2"),
    "G": collecting(),
    "H": collecting(0.0),
    "E": several(forgetting("a@2")),  # again
}
ALL = [name for name in CAST if name not in "EN"]
#: If one of these stops while others of them run whole, every run tries all steps in all orders, not a sample.
WHOLE = {"T", "F", "G"}
#: No actor is stopped before these: their effect and their result do not depend on what others do meanwhile.
APART, FIXED = ("sync", "clean"), ("config", "snapshots/")
#: The snapshot that each actor commits or brings back, if it ends without an error.
MADE = {"S": "a@3", "T": "b@1", "R": "c@1", "N": "n@0", "U": "a@2"}


@cache
def doomed() -> MemoryStore:
    """Only b@0 is committed; a gc would collect the rest: a@2, and c@0, a first save of the same bytes as R's."""
    store = clone(history())
    with opened(store) as repository:
        repository.forget_snapshots(["a@0"], force=True)
        repository.gc()
        save(repository, "c", 0, 7)
        repository.forget_snapshots(["a@2", "c@0"], force=True)
    return store


def step(actor: Actor) -> None:
    """Go on to the actor's next operation that others can influence."""
    actor.step()
    while actor.at and (actor.at[0] in APART or (actor.at[0] == "get" and actor.at[1].startswith(FIXED))):
        actor.step()


def play(actors: list[Actor], *parts: tuple[str, int | None]) -> set[str]:
    """Let actors of the cast take so many steps each (None: all), in that order; return which were stopped."""
    tally("schedules")
    stage, playing, stopped = Stage(doomed(), actors), dict[str, Actor](), set[str]()
    for name, steps in parts:
        if name not in playing:
            playing[name] = stage.enter(name, CAST[name], seen_dead=name == "H")
        actor = playing[name]
        taken = 0
        while not actor.ended and taken != steps:
            step(actor)
            taken += 1
        if not actor.ended:
            stopped.add(name)
    about = " ".join(f"{name}{'' if steps is None else steps}" for name, steps in parts)
    for name, actor in playing.items():
        may: tuple[type[Exception], ...] = ()
        if name == "U" and playing.keys() & {"G", "H"}:
            may = (ConflictError, NotFoundError)  # it was swept before, or just then
        elif name in "STRN" and "H" in playing:
            may = (ConflictError,)  # it was fenced
        assert actor.error is None or isinstance(actor.error, may), f"{about}: {name}: {actor.error!r}"
    wanted = {MADE[name] for name, actor in playing.items() if name in MADE and actor.error is None}
    gone = {of for name, of in (("F", "b@0"), ("E", "a@2")) if name in playing}
    try:
        assert stage.check().keys() == (wanted | {"b@0"}) - gone
    except Exception as error:
        error.add_note(f"the schedule was {about}")
        raise
    actors.clear()
    return stopped


@cache
def steps_of(name: str) -> int:
    """Return how many steps an actor takes alone."""
    actor = Actor(name, clone(doomed()), CAST[name])
    taken = 0
    while not actor.ended:
        step(actor)
        taken += 1
    return taken


def stops(name: str, case: object, every: int = 60, *, whole: bool = THOROUGH) -> Iterable[int]:
    """Return after which steps to stop an actor; if `whole`, all: the caller sees its end, which others may delay."""
    steps = steps_of(name)
    return count(1) if whole else Random(f"{SEED} {case}").sample(range(1, steps), 1 + steps // every)


def test_the_cast_does_what_is_said_of_it(actors):
    """Without this, the schedules below would prove little."""
    stage = Stage(doomed(), actors)
    old = {key: stage.store.get(key)[pack.HEADER.size :] for key in keys_of(stage.store, "packs/")}
    CAST["R"](stage.store)
    new = [key for key in keys_of(stage.store, "packs/") if key not in old]
    assert new
    assert {stage.store.get(key)[pack.HEADER.size :] for key in new} <= {*old.values()}
    first = CAST["N"](clone(stage.store))
    assert first.bases == CAST["T"](stage.store).bases != []
    assert CAST["U"](stage.store).ref == "a@2"
    saver = stage.enter("S", CAST["S"]).until("put", "snapshots/")
    CAST["E"](stage.store)
    assert CAST["G"](stage.store).waiting_for
    assert stage.enter("H", CAST["H"], seen_dead=True).finish().deleted_objects
    with pytest.raises(ConflictError):
        saver.finish()
    assert stage.check().keys() == {"b@0", "b@1", "c@1"}


@pytest.mark.sampled(1)
@pytest.mark.no_cover
@pytest.mark.parametrize("first", ALL)
def test_one_stops_once_and_up_to_two_others_run_whole(first, actors):
    others = {*ALL} - {first}
    for names in sorted([*permutations(others, 1), *permutations(others, 2)]):
        for steps in stops(first, names, whole=THOROUGH or {first, *names} <= WHOLE):
            if not play(actors, (first, steps), *((name, None) for name in names), (first, None)):
                break


@pytest.mark.sampled(10)
@pytest.mark.no_cover
@pytest.mark.parametrize(("first", "second"), [*permutations(ALL, 2)])
def test_two_stop_once_each(first, second, actors):
    for steps in stops(first, second):
        for more in stops(second, (first, steps)):
            stopped = play(actors, (first, steps), (second, more), (first, None), (second, None))
            if len(stopped) < 2:
                break
        if first not in stopped:
            break


@pytest.mark.sampled(1)
@pytest.mark.no_cover
@pytest.mark.parametrize("between", [["U"], ["U", "H"]])
def test_a_base_comes_back_and_goes_again_beside_a_gc(between, actors):
    """G stops, a@2 comes back (and another gc completes G's mark), S builds on it and stops, and a@2 goes again."""
    for steps in stops("G", between, 8):
        for more in stops("T", (between, steps), 8):  # S with a base takes as many steps as T
            parts = [("G", steps), *((name, None) for name in between), ("S", more), ("E", None)]
            stopped = play(actors, *parts, ("G", None), ("S", None))
            if len(stopped) < 2:
                break
        if "G" not in stopped:
            break


@pytest.mark.no_cover
@pytest.mark.parametrize("others", ["FG", "GF", "FGG", "FH", "FGU"])
def test_the_base_of_a_first_save_goes(others, actors):
    """N stops; b@0, with which it shares chunks, is forgotten, and a gc runs before N goes on."""
    for steps in stops("N", others, 8):
        if not play(actors, ("N", steps), *((name, None) for name in others), ("N", None)):
            break


@pytest.mark.no_cover
def test_a_first_save_begins_in_a_gc(actors):
    """b@0 is forgotten, and G stops; N begins and stops, or ends, before G goes on."""
    for steps in stops("G", "N", 8):
        stopped = play(actors, ("F", None), ("G", steps), ("N", None), ("G", None))
        for more in stops("N", ("G", steps)):
            if len(play(actors, ("F", 3), ("G", steps), ("N", more), *((name, None) for name in "FGN"))) < 2:
                break
        if "G" not in stopped:
            break


@pytest.mark.no_cover
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("others", ["save", "same", "unforget", "gc", "unforget, gc", "same, gc", "tag, gc"])
def test_the_upkeep_of_a_save_beside_others(others, bounded, actors):
    """K stops after any step between its look, its forgets, its mark and its sweep; the others run whole."""
    bodies = {
        "save": saving("a", 3, 3),
        "same": saving("a", 3, 0, parent="a@0"),  # needs the bytes of a@0, which K forgets
        "unforget": unforgetting("a@1"),
        "gc": collecting(),
        "tag": tagging("a@0", "kept"),
    }
    alone = Actor("K", clone(history()), keeping_one(bounded))
    total = 0
    while not alone.ended:
        step(alone)
        total += 1
    for taken in range(total) if THOROUGH else sorted(Random(f"{SEED} {others}").sample(range(total), 8)):
        stage = Stage(history(), actors)
        keeper = stage.enter("K", keeping_one(bounded))
        for _ in range(taken):
            step(keeper)
        made = set()
        for name in others.split(", "):
            with suppress(ConflictError, NotFoundError, InvalidInputError):
                stage.enter(name, bodies[name]).finish()
                made.add(name)
        keeper.finish()
        assert keeper.error is None, (others, taken)
        refs = stage.check().keys()
        assert {"b@0", "a@3" if made & {"save", "same"} else "a@2"} <= refs, (others, taken)
        assert "a@0" not in refs or "tag" in others, (others, taken)
        actors.clear()


# --- schedules of the models' counter-examples -----------------------------------------------------------------------


@pytest.fixture
def stage(actors) -> Stage:
    return Stage(history(), actors)


def test_gc_between_session_and_record_waits(stage):
    """ "no wait for sessions": S has chosen bases before the mark, and commits a reference to a candidate after it."""
    saver = stage.enter("S", saving("a", 3, 3)).until("put", "packs/")
    forgetting("a@0", "a@2")(stage.store)
    result = collecting()(stage.store)
    assert len(result.waiting_for) == 1
    assert result.deleted_objects == 0
    assert saver.finish().bases
    assert "a@3" in stage.check()


@pytest.mark.parametrize("operation", ["put", "list", "stat"])
def test_a_save_that_begins_behind_the_mark_does_not_build_on_candidates(stage, operation):
    """ "no list of marks": gc has listed sessions before S announced itself, S takes a base that is about to go."""
    forgetting("a@0", "a@2")(stage.store)
    where = {"put": ".wait", "list": "sessions/", "stat": ".mark"}[operation]
    gc = stage.enter("G", collecting()).until("put", ".mark")
    gc.until(operation, where)
    if operation != "stat":
        unforgetting("a@2")(stage.store)  # committed again, yet its packs are candidates
    saver = stage.enter("S", saving("a", 3, 3)).until("put", "snapshots/")
    gc.until("delete") if operation == "stat" else gc.finish()
    assert saver.finish().bases == []
    gc.finish()
    assert "a@3" in stage.check()


def test_a_base_that_no_mark_names_is_used_beside_a_mark(stage):
    forgetting("a@0", "a@2")(stage.store)
    gc = stage.enter("G", collecting()).until("stat", ".mark")
    assert saving("b", 1, 51)(stage.store).bases
    gc.finish()
    assert "b@1" in stage.check()


@pytest.mark.parametrize("stand", ["packs/", "manifests/", "snapshots/"])
def test_a_saver_paused_past_its_fence_cannot_commit(stage, stand):
    """ "fence not atomic": S sleeps for hours, gc fences it and deletes its packs, S wakes up and tries to commit."""
    saver = stage.enter("S", saving("a", 3, 3)).until("put", stand)
    forgetting("a@0", "a@2")(stage.store)
    stage.fence()
    with pytest.raises(ConflictError, match=r"gc (gave|fenced) this save"):
        saver.finish()
    refs = stage.check().keys()
    assert "a@3" not in refs


def test_a_fenced_saver_whose_base_is_gone_names_the_fence(stage):
    """An iterator cannot be read again, so the save ends where it reads the base; nothing is damaged."""

    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.save(iter([("model.drift", values("a", 3)["model"]["drift"])]), run="a", step=3)

    saver = stage.enter("S", body).until("get_range", "packs/")
    forgetting("a@0", "a@2", "b@0")(stage.store)
    stage.fence()
    assert saver.at[1] not in keys_of(stage.store)
    with pytest.raises(ConflictError, match="gc fenced this save"):
        saver.finish()
    stage.check()


def test_a_fence_that_comes_after_the_commit_changes_nothing(stage):
    saver = stage.enter("S", saving("a", 3, 3)).until("release", "sessions/")
    stage.fence()
    saver.finish()
    assert "a@3" in stage.check()


def test_a_fence_between_commit_and_reading_it_back(stage):
    """The saver and the gc put the same key: the first one wins."""
    saver = stage.enter("S", saving("a", 3, 3)).until("put", "snapshots/")
    gc = stage.enter("G", collecting(0.0), seen_dead=True).until("put", "snapshots/")
    saver.until("release", "sessions/")
    gc.finish()
    saver.finish()
    assert "a@3" in stage.check()


def test_a_session_announced_while_sessions_are_listed(stage):
    """ "sessions listed before records": here S announces itself between gc's records and its mark."""
    forgetting("a@0", "a@2")(stage.store)
    gc = stage.enter("G", collecting()).until("put", ".mark")
    saver = stage.enter("S", saving("a", 3, 3, bases=["b@0"])).until("lock").until("list", "snapshots/")
    assert gc.finish().waiting_for
    saver.finish()
    assert "a@3" in stage.check()


@pytest.mark.parametrize("stand", [".wait", "list snapshots", "put snapshots", "stat mark", "delete"])
def test_unforget_races_the_sweep(stage, stand):
    """ "un-forget in place": a@1 comes back while its packs are deleted. Either it is whole, or it stays gone."""
    forgetting("a@0")(stage.store)
    name, part = {
        ".wait": ("put", ".wait"), "list snapshots": ("list", "snapshots/"), "put snapshots": ("put", "snapshots/"),
        "stat mark": ("stat", ".mark"), "delete": ("delete", "packs/"),
    }[stand]  # fmt: skip
    gc = stage.enter("G", collecting()).until("put", ".wait").until(name, part)
    back: set[str] = set()
    for ref in ("a@0", "a@1"):
        try:
            unforgetting(ref)(stage.store)
            back.add(ref)
        except NotFoundError:
            assert stand in ("stat mark", "delete")
    gc.finish()
    assert stage.check().keys() >= back


def test_unforget_paused_past_the_sweep(stage):
    """It has read the forgotten record; the sweep writes `swept` first; the next revision is taken."""
    back = stage.enter("U", unforgetting("a@1")).until("put", "snapshots/")
    collecting()(stage.store)
    with pytest.raises(ConflictError):
        back.finish()
    with pytest.raises(NotFoundError, match="deleted its bytes"):
        unforgetting("a@1")(stage.store)
    assert "a@1" not in stage.check()


@pytest.mark.parametrize("stand", ["put .wait", "list snapshots", "stat .mark", "delete packs"])
def test_another_gc_completes_the_mark_of_one_that_stalls(stage, stand):
    """ "B completes A's mark": then S builds on what comes alive, and A wakes up."""
    forgetting("a@0", "a@2")(stage.store)
    operation, part = stand.split()
    a = stage.enter("A", collecting()).until("put", ".mark").until("list", "sessions/").until(operation, part)
    if stand == "list snapshots":
        a.step()  # it has recomputed
    assert collecting()(stage.store).deleted_objects > 0
    saver = saving("a", 3, 3)(stage.store)
    assert saver.bases == []
    forgetting("a@3")(stage.store)
    unforgetting("a@3")(stage.store)
    again = stage.enter("S", saving("a", 4, 4)).until("put", "snapshots/")
    a.finish()
    again.finish()
    assert {"a@3", "a@4"} <= stage.check().keys()


def test_a_completed_mark_is_not_used(stage):
    """A has recomputed and stalls before it looks for its mark; what it would delete is alive again by then."""
    with opened(stage.store) as repository:
        repository.forget([KeepLast(1)], run="a")
    a = stage.enter("A", collecting()).until("stat", ".mark")
    deleted = collecting()(stage.store).deleted_objects
    assert deleted > 0
    assert a.finish().deleted_objects == 0
    stage.check()


@pytest.mark.parametrize("stand", ["lock", "list", "get_range", "put"])
def test_the_parent_is_forgotten_and_collected_while_a_save_deltas_against_it(stage, stand):
    saver = stage.enter("S", saving("a", 3, 3, parent="a@2"))
    saver.until(stand, {"lock": "sessions/", "list": "gc/", "get_range": "", "put": "packs/"}[stand])
    forgetting("a@2", "a@0")(stage.store)
    result = collecting()(stage.store)
    assert bool(result.waiting_for) == (stand != "lock")
    snapshot = saver.finish()
    assert snapshot.parent is not None
    assert bool(snapshot.bases) == (stand not in ("lock", "list"))
    collecting()(stage.store)
    assert "a@3" in stage.check()


def test_restore_beside_a_sweep_fails_loudly_or_is_right(stage):
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.restore("a@2")

    dry = stage.enter("R", body)
    dry.finish()
    right = 0
    for steps in range(1, dry.steps + 1):
        stage.store = clone(history())
        reader = stage.enter("R", body)
        for _ in range(steps):
            reader.step()
        forgetting("a@0", "a@2")(stage.store)
        collecting()(stage.store)
        try:
            state = reader.finish()
        except (IntegrityError, NotFoundError):
            continue
        assert state["version"] == 2
        assert state["optimizer"]["noise"].tobytes() == values("a", 2)["optimizer"]["noise"].tobytes()
        right += 1
    assert 0 < right < dry.steps


def test_two_writers_of_one_step(stage):
    """Both see the same highest seq: one of them is `run@step`, the same everywhere, and the other is superseded."""
    one = stage.enter("S", saving("a", 7, 70)).until("put", "snapshots/")
    two = stage.enter("T", saving("a", 7, 71)).until("put", "snapshots/")
    first, second = one.finish(), two.finish()
    assert first.seq == second.seq
    with opened(stage.store) as repository:
        view = repository.view()
        assert view.superseded() == {min(first.id, second.id)}
        assert view.resolve("a@7").id == view.resolve("a@latest").id == view.newest("a").id == max(first.id, second.id)
        repository.forget([KeepLast(2)], run="a")
        assert repository.snapshot("a@7").id == max(first.id, second.id)
    stage.check()


def test_two_revisions_at_once(stage):
    """tag and forget meet on one revision: the loser reads again, and a tagged snapshot stays."""

    def tagging(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.tag("a@0", "good")

    tagger = stage.enter("T", tagging).until("put", "snapshots/")
    forgetter = stage.enter("F", forgetting()).until("put", "snapshots/")
    tagger.finish()
    assert [s.ref for s in forgetter.finish().forgotten] == []
    assert "a@0" in stage.check()


def test_a_listing_that_lacks_records_stops_gc(stage):
    """A stale listing must not make live packs into garbage."""
    with opened(stage.store) as repository:
        repository.view()
        (gone,) = (key for key in keys_of(stage.store, "snapshots/a/") if "/000000000002-" in key)
        data = stage.store.get(gone)
        stage.store.delete([gone])
        packs = keys_of(stage.store, "packs/")
        with pytest.raises(IntegrityError, match="lacks 1 known"):
            repository.gc()
        assert keys_of(stage.store, "packs/") == packs
        stage.store.put(gone, data)
        repository.gc()
    assert "a@2" in stage.check()


def test_a_failed_listing_stops_gc(stage, monkeypatch):
    packs = keys_of(stage.store, "packs/")

    def refuse(prefix: str, *more: Any) -> Any:
        if prefix == "snapshots/":
            raise StorageError("403 (injected)")
        return type(stage.store).list(stage.store, prefix, *more)

    with opened(stage.store) as repository:
        monkeypatch.setattr(stage.store, "list", refuse)
        with pytest.raises(StorageError, match="403"):
            repository.gc()
        monkeypatch.undo()
    assert keys_of(stage.store, "packs/") == packs
