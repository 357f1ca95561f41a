"""Compacts that take turns with saves, forgets, gcs, recodes and each other: no snapshot dangles, and nothing is lost.

Random schedules first, then the stands at which a rule of docs/design/protocol.md, "Rewriting", is what saves the day.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from faults import (
    OPTIONS,
    SEED,
    Actor,
    check_clean,
    check_restores,
    clone,
    keys_of,
    one_thread,
    opened,
    run_randomly,
    same,
    save,
    values,
)
from tally import tally
from test_interleavings import PER_TEST, SCHEDULES, collecting, forgetting, saving, several, unforgetting

from snapstore import KeepLast, Repository
from snapstore.storage import ObjectStore
from snapstore.storage.memory import MemoryStore


@cache
def history() -> MemoryStore:
    """a@7 to a@9, which hang on what was collected, and b@0, forked from what is gone; a@6 is forgotten."""
    store = MemoryStore()
    Repository.create(store, chunk_bytes=1024, options=OPTIONS).close()
    with opened(store) as repository:
        for step in range(10):
            save(repository, "a", step, step)
        save(repository, "b", 0, 50, parent="a@5", bases=["a@5"])
        repository.forget([KeepLast(4)], run="a")
        repository.gc()
        repository.forget_snapshots(["a@6"])
    return store


@pytest.fixture
def actors(monkeypatch) -> Iterator[list[Actor]]:
    """Whom to stop at the end."""
    one_thread(monkeypatch, index=False)
    found: list[Actor] = []
    yield found
    for actor in found:
        actor.stop()


def compacting(*refs: str, **options: Any) -> Any:
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            report = repository.compact(list(refs) or None, **options)
            assert report.failed == []
            return report

    return body


def tagging(ref: str, name: str) -> Any:
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.tag(ref, name)

    return body


@pytest.mark.parametrize("first", range(0, SCHEDULES // 4, PER_TEST))
def test_random_schedules(first, actors):
    for seed in range(first, min(first + PER_TEST, SCHEDULES // 4)):
        tally("schedules")
        random = Random(f"{SEED} {seed}")
        store = clone(history())
        impatient = random.random() < 0.5  # sessions look as if they were on another host, and are given up at once
        gc = collecting(0.0 if impatient else 3600.0)
        cast = {
            "C": several(compacting(), compacting()),
            "D": several(compacting(max_repack_bytes=8000), compacting()),
            "S": several(saving("a", 10, 10), saving("b", 1, 51)),
            "F": several(
                forgetting("a@7"), unforgetting("a@7"), tagging("a@8", "t"), unforgetting("a@6"), forgetting()
            ),
            "G": several(gc, gc),
            "H": several(gc),
        }
        playing = [Actor(name, store, body, seen_dead=impatient) for name, body in cast.items()]
        actors.extend(playing)
        trace = run_randomly(playing, random)
        about = f"seed {SEED} {seed}, {'impatient' if impatient else 'patient'}: " + " | ".join(
            " ".join(t) for t in trace[-60:]
        )
        for actor in playing:
            assert actor.error is None, f"{actor.name}: {actor.error!r}; {about}"
        store.drop_holds()
        with opened(store) as repository:
            check_restores(repository, about)
            assert repository.compact().failed == [], about
            repository.gc()
        check_clean(store, about)


class Stage:
    """A store, and actors that go on when told to."""

    def __init__(self, cast: list[Actor]) -> None:
        self.store, self._cast = clone(history()), cast

    def enter(self, name: str, body: Any, **options: Any) -> Actor:
        self._cast.append(Actor(name, self.store, body, **options))
        return self._cast[-1]

    def check(self) -> dict[str, Any]:
        """All restores; and after everybody is gone nothing is left over. The committed snapshots."""
        with opened(self.store) as repository:
            found = {s.ref: s for s in check_restores(repository)}
            repository.gc()
            assert {s.ref for s in repository.snapshots()} == set(found)
        check_clean(self.store)
        return found


@pytest.fixture
def stage(actors) -> Stage:
    return Stage(actors)


@pytest.mark.parametrize("stand", ["packs/", "manifests/", "snapshots/"])
def test_a_gc_waits_for_a_compact(stage, stand):
    compact = stage.enter("C", compacting()).until("put", stand)
    forgetting("a@8")(stage.store)
    result = collecting()(stage.store)
    assert len(result.waiting_for) == 1
    assert result.deleted_objects == 0
    assert compact.finish().rewritten
    stage.check()


@pytest.mark.parametrize("stand", ["packs/", "manifests/", "snapshots/"])
def test_a_compact_paused_past_its_fence_does_not_publish(stage, stand):
    compact = stage.enter("C", compacting()).until("put", stand)
    packs = set(keys_of(stage.store, "packs/"))
    gc = stage.enter("G", collecting(0.0), seen_dead=True)
    assert len(gc.finish().fenced) == 1
    if stand != "packs/":
        assert not packs <= set(keys_of(stage.store, "packs/"))
    assert compact.finish().failed == []
    stage.check()


@pytest.mark.parametrize("stand", ["hold", "list gc/", "list snapshots/", "get_ranges", "put packs/", "put snapshots/"])
def test_a_tag_is_never_lost(stage, stand):
    operation, _, part = stand.partition(" ")
    compact = stage.enter("C", compacting()).until("hold").until(operation, part)
    tagging("a@7", "t")(stage.store)
    assert compact.finish().failed == []
    assert stage.check()["a@7"].tags == ["t"]


@pytest.mark.parametrize("victim", ["a@7", "a@8", "b@0"])
@pytest.mark.parametrize("stand", ["hold", "list snapshots/", "get_ranges", "put packs/", "put snapshots/"])
def test_forgotten_and_collected_meanwhile(stage, stand, victim):
    operation, _, part = stand.partition(" ")
    compact = stage.enter("C", compacting()).until("hold").until(operation, part)
    forgetting(victim)(stage.store)
    collecting()(stage.store)
    compact.finish()
    collecting()(stage.store)
    assert victim not in stage.check()


@pytest.mark.parametrize("stand", ["hold", "list gc/", "list snapshots/"])
def test_what_was_made_for_a_snapshot_that_is_gone_is_not_built_upon(stage, stand):
    """a@8 would be rebuilt over what was made for a@7, which is forgotten and collected in between."""
    operation, _, part = stand.partition(" ")
    compact = stage.enter("C", compacting("a@7", "a@8", "a@9")).until("release", "sessions/").until("hold")
    compact.until(operation, part)
    forgetting("a@7")(stage.store)
    collecting()(stage.store)
    collecting()(stage.store)
    assert compact.finish().failed == []
    stage.check()


def test_what_a_mark_names_is_not_built_upon(stage):
    """a@7 was compacted; forgotten when a gc marked, back when a@8's turn comes, forgotten again at the sweep."""
    compact = stage.enter("C", compacting("a@7", "a@8", "a@9")).until("release", "sessions/").until("hold")
    forgetting("a@7")(stage.store)
    gc = stage.enter("G", collecting()).until("put", ".mark").until("put", ".wait")
    unforgetting("a@7")(stage.store)
    compact.until("put", "snapshots/")
    forgetting("a@7")(stage.store)
    gc.finish()
    assert compact.finish().failed == []
    stage.check()


def test_a_base_that_became_a_delta_and_is_gone_is_not_built_upon(actors):
    """a@1, full, becomes a delta to a@0; it is collected before the turn of a@2, whose chains end in its old blobs."""
    store, states = MemoryStore(), []
    drift = np.random.default_rng(0).standard_normal(8192).astype(np.float32)
    Repository.create(store, chunk_bytes=1024, options=OPTIONS).close()
    with opened(store) as repository:
        for step in range(3):
            drift[step::50] += 1
            states.append({"w": drift.copy()})
            repository.save(states[-1], run="a", step=step, full=step < 2)
    compact = Actor("C", store, compacting())
    actors.append(compact)
    compact.until("release", "sessions/").until("hold")
    with opened(store) as repository:
        assert [s.revision for s in repository.snapshots()] == [0, 1, 0]
        repository.forget_snapshots(["a@1"])
        repository.gc()
    compact.finish()
    with opened(store) as repository:
        assert repository.check("restore").ok
        for step in (0, 2):
            assert same(repository.restore(f"a@{step}"), states[step])


@pytest.mark.parametrize("stand", [".mark", ".wait", "list", "stat", "delete"])
def test_a_compact_beside_a_sweep(stage, stand):
    gc = stage.enter("G", collecting())
    if stand.startswith("."):
        gc.until("put", stand)
    else:
        gc.until("put", ".wait").until(stand, {"list": "snapshots/", "stat": ".mark", "delete": ""}[stand])
    assert compacting()(stage.store).rewritten
    gc.finish()
    assert {s.revision for s in stage.check().values()} >= {1}


def test_two_compacts_at_once(stage):
    one = stage.enter("C", compacting()).until("put", "snapshots/")
    two = stage.enter("D", compacting()).until("put", "snapshots/")
    one.finish()
    assert two.finish().failed == []
    stage.check()


def test_saves_build_on_a_parent_that_is_compacted_and_collected(stage):
    saver = stage.enter("S", saving("a", 10, 10)).until("put", "packs/")
    compacting()(stage.store)
    assert collecting()(stage.store).waiting_for
    assert saver.finish().bases
    assert "a@10" in stage.check()


def test_a_restore_reads_on_while_its_snapshot_is_compacted_and_collected(stage):
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.restore("a@8")

    dry = stage.enter("R", body)
    dry.finish()
    for steps in range(1, dry.steps, 3):
        stage.store = clone(history())
        reader = stage.enter("R", body)
        for _ in range(steps):
            reader.step()
        compacting()(stage.store)
        collecting()(stage.store)
        assert same(reader.finish(), values("a", 8)), steps
