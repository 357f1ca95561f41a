"""Recodes that run beside saves, forgets, gcs and each other undo nothing; no snapshot dangles.

First random schedules; then the points at which only a rule of docs/design/protocol.md, "Recode", prevents a loss.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kit import foreign
from kit.objects import clone, keys_of
from kit.repositories import check_clean, created, opened, restored, same, save, values
from kit.schedules import (
    PER_TEST,
    SCHEDULES,
    Stage,
    collecting,
    forgetting,
    played,
    saving,
    several,
    tagging,
    unforgetting,
)
from snapstore.storage.base import ObjectStore
from snapstore.storage.memory import MemoryStore


@cache
def history() -> MemoryStore:
    """a@0 to a@2 and the fork b@0 of a@1 in codec 70, and a@3, portable; a@1 is forgotten."""
    store = created()
    with opened(store) as repository:
        with foreign.written():
            for step in range(3):
                save(repository, "a", step, step)
            save(repository, "b", 0, 50, parent="a@1")
        save(repository, "a", 3, 3)
        repository.forget_snapshots(["a@1"], force=True)
    return store


def recoding(*refs: str) -> Any:
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            result = repository.recode(list(refs) or None)
            assert result.failed == []
            return result

    return body


@pytest.mark.sampled(2)
@pytest.mark.no_cover  # see test_crash_points.py
@pytest.mark.parametrize("first", range(0, SCHEDULES // 2, PER_TEST))
def test_random_schedules(first, actors):
    def cast(gc, _):
        return {
            "R": several(recoding(), recoding("a@0")),
            "Q": several(recoding("a@1"), recoding()),
            "S": several(saving("a", 10, 10), saving("b", 1, 51)),
            "F": several(
                forgetting("a@0"), unforgetting("a@0"), tagging("a@2", "t"), unforgetting("a@1"), forgetting()
            ),
            "G": several(gc, gc),
            "H": several(gc),
        }

    for store, about in played(history(), cast, actors, range(first, min(first + PER_TEST, SCHEDULES // 2))):
        with opened(store) as repository:
            restored(repository, about)
            assert repository.recode().failed == [], about
            repository.gc()
        check_clean(store, about)


@pytest.fixture
def stage(actors) -> Stage:
    return Stage(history(), actors)


@pytest.mark.parametrize("stand", ["packs/", "manifests/", "snapshots/"])
def test_a_gc_waits_for_a_recode(stage, stand):
    recode = stage.enter("R", recoding()).until("put", stand)
    forgetting("a@2")(stage.store)
    result = collecting()(stage.store)
    assert len(result.waiting_for) == 1
    assert result.deleted_objects == 0
    assert recode.finish().recoded
    assert stage.check()["a@0"].revision == 1


@pytest.mark.parametrize("stand", ["packs/", "manifests/", "snapshots/"])
def test_a_recode_paused_past_its_fence_does_not_publish(stage, stand):
    """It sleeps for hours, and gc fences it and deletes its packs. It wakes up, finds the key taken, begins again."""
    recode = stage.enter("R", recoding()).until("put", stand)
    packs = set(keys_of(stage.store, "packs/"))
    stage.fence()
    if stand != "packs/":
        assert not packs <= set(keys_of(stage.store, "packs/"))
    assert recode.finish().failed == []
    found = stage.check()
    assert found["a@0"].revision == 2  # the fence is revision 1
    assert found["a@0"].manifests


def test_a_fence_that_comes_after_the_revision_changes_nothing(stage):
    recode = stage.enter("R", recoding("a@0")).until("release", "sessions/")
    stage.fence()
    recode.finish()
    assert stage.check()["a@0"].revision == 1


def test_a_fence_between_the_revision_and_reading_it_back(stage):
    recode = stage.enter("R", recoding("a@0")).until("put", "snapshots/")
    gc = stage.enter("G", collecting(0.0), seen_dead=True).until("put", "snapshots/")
    recode.until("release", "sessions/")
    gc.finish()
    recode.finish()
    assert stage.check()["a@0"].revision == 1


def test_a_fence_after_another_process_has_taken_the_revision(stage):
    """The key is taken: the fence creates nothing, and the fenced recode begins again with the next revision."""
    recode = stage.enter("R", recoding("a@0")).until("put", "snapshots/")
    tagging("a@0", "t")(stage.store)
    stage.fence()
    recode.finish()
    found = stage.check()["a@0"]
    assert (found.revision, found.tags) == (2, ["t"])


@pytest.mark.parametrize("stand", ["lock", "list gc/", "list snapshots/", "get_range", "put packs/", "put snapshots/"])
def test_a_tag_is_never_lost(stage, stand):
    operation, _, part = stand.partition(" ")
    recode = stage.enter("R", recoding("a@0")).until("lock")
    recode.until(operation, part)
    tagging("a@0", "t")(stage.store)
    (done,) = recode.finish().recoded
    assert done.tags == ["t"]
    assert done.revision == 2
    assert stage.check()["a@0"].write_id == done.write_id


@pytest.mark.parametrize("stand", ["lock", "list snapshots/", "get_range", "put packs/", "put snapshots/"])
@pytest.mark.parametrize("named", [True, False])
def test_forgotten_and_collected_meanwhile(stage, stand, named):
    operation, _, part = stand.partition(" ")
    recode = stage.enter("R", recoding(*["a@0"] * named)).until("lock").until(operation, part)
    forgetting("a@0")(stage.store)
    collecting()(stage.store)
    result = recode.finish()
    assert ("a@0" in [s.ref for s in result.recoded]) <= named
    assert "a@0" not in stage.check()


def test_swept_meanwhile(stage):
    """A forgotten snapshot is collected while it is being recoded: gc had marked it before the session."""
    gc = stage.enter("G", collecting()).until("put", ".mark").until("list", "snapshots/")
    recode = stage.enter("R", recoding("a@1")).until("put", "snapshots/")
    gc.finish()
    result = recode.finish()
    assert result.recoded == []
    assert [s.state for s in result.skipped] == ["swept"]
    stage.check()


@pytest.mark.parametrize("stand", [".mark", ".wait", "list", "stat", "delete"])
def test_a_recode_beside_a_sweep(stage, stand):
    """Whatever the gc has seen, blobs of a@1 that others need stay, and recoded ones are not among its candidates."""
    gc = stage.enter("G", collecting())
    if stand.startswith("."):
        gc.until("put", stand)
    else:
        gc.until("put", ".wait").until(stand, {"list": "snapshots/", "stat": ".mark", "delete": ""}[stand])
    assert recoding()(stage.store).recoded
    gc.finish()
    assert {s.revision for s in stage.check().values()} >= {1}


def test_two_recodes_at_once(stage):
    one = stage.enter("R", recoding()).until("put", "snapshots/")
    two = stage.enter("Q", recoding()).until("put", "snapshots/")
    one.finish()
    assert two.finish().failed == []
    assert {s.revision for ref, s in stage.check().items() if ref != "a@3"} == {1}


def test_a_duplicate_that_a_mark_names_is_not_used(stage):
    """a@0 is recoded, forgotten when a gc marks, brought back before the recode of a@2, and forgotten at the sweep."""
    recoding("a@0")(stage.store)
    forgetting("a@0")(stage.store)
    gc = stage.enter("G", collecting()).until("put", ".wait")
    unforgetting("a@0")(stage.store)
    recode = stage.enter("R", recoding("a@2")).until("put", "snapshots/")
    forgetting("a@0")(stage.store)
    gc.finish()
    assert recode.finish().failed == []
    assert stage.check()["a@2"].revision == 1


@pytest.mark.parametrize("stand", ["lock", "list gc/", "list snapshots/"])
def test_chunks_of_a_snapshot_that_is_gone_are_not_used(stage, stand):
    """The recode of a@2 would share blobs that it made for a@0, which is forgotten and collected in between."""
    operation, _, part = stand.partition(" ")
    recode = stage.enter("R", recoding("a@0", "a@2")).until("release", "sessions/").until("lock")
    recode.until(operation, part)
    forgetting("a@0")(stage.store)
    collecting()(stage.store)
    assert recode.finish().failed == []
    assert stage.check()["a@2"].revision == 1


def test_saves_build_on_a_parent_that_is_recoded_and_collected(stage):
    saver = stage.enter("S", saving("a", 4, 4)).until("put", "packs/")
    recoding()(stage.store)
    assert collecting()(stage.store).waiting_for
    assert saver.finish().bases
    assert "a@4" in stage.check()


def test_a_restore_reads_on_while_its_snapshot_is_recoded_and_collected(stage):
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            return repository.restore("a@2")

    dry = stage.enter("R", body)
    dry.finish()
    for steps in range(1, dry.steps):
        stage.store = clone(history())
        reader = stage.enter("R", body)
        for _ in range(steps):
            reader.step()
        recoding()(stage.store)
        collecting()(stage.store)
        assert same(reader.finish(), values("a", 2)), steps
