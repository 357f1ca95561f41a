"""Copies lose nothing beside each other, and beside saves, forgets, gcs and rewrites of either repository.

The stepped store is the destination in the first test, and the source in the second one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kit.objects import clone
from kit.repositories import check_clean, created, opened, restored, save
from kit.schedules import (
    PER_TEST,
    SCHEDULES,
    Body,
    Stage,
    collecting,
    forgetting,
    played,
    saving,
    several,
    unforgetting,
)
from snapstore import KeepLast
from snapstore.storage.base import ObjectStore
from snapstore.storage.memory import MemoryStore


@cache
def source() -> MemoryStore:
    """a@0 to a@3, of which a@0 is forgotten, and b@0, which was forked from a@1."""
    store = created()
    with opened(store) as repository:
        for step in range(4):
            save(repository, "a", step, step, tags=("good",) if step == 1 else ())
        save(repository, "b", 0, 50, parent="a@1")
        repository.forget_snapshots(["a@0"], force=True)
    return store


@cache
def destination() -> MemoryStore:
    """Copies of a@0, forgotten, and of a@1, in a repository whose run a has gone on with a@20."""
    store = MemoryStore()
    with opened(source()) as repository:
        repository.copy(["a@0", "a@1"], to=store)
    with opened(store) as repository:
        save(repository, "a", 20, 20)
        repository.forget_snapshots(["a@0"])
    return store


def copying(*refs: str) -> Body:
    """Copy from a source of its own into the stepped store."""

    def body(store: ObjectStore) -> Any:
        with opened(clone(source())) as repository, opened(store) as target:
            result = repository.copy(refs or None, to=target)
            for snapshot, why in result.failed:
                assert "keep revising" in why or "gc fenced" in why, (snapshot, why)
            return result

    return body


@pytest.mark.no_cover  # see test_crash_points.py
@pytest.mark.parametrize("first", range(0, max(1, SCHEDULES // 4), PER_TEST))
def test_copies_into_a_repository_that_lives(first, actors):
    def cast(gc, _):
        return {
            "C": several(copying(), copying("a@0")),
            "D": several(copying("a@3", "b@0")),
            "S": several(saving("a", 21, 21)),
            "F": several(forgetting("a@1"), unforgetting("a@0"), forgetting()),
            "G": several(gc, gc),
            "H": several(gc),
        }

    for store, about in played(destination(), cast, actors, range(first, min(first + PER_TEST, SCHEDULES // 4))):
        with opened(store) as repository, opened(clone(source())) as other:
            restored(repository, about)
            result = other.copy(["a@0", "a@1", "a@2", "a@3", "b@0"], to=repository)
            assert not result.failed, about
            found = {s.id: s for s in repository.snapshots()}
            for snapshot in other.view().snapshots(states=None):
                assert found[snapshot.id].metrics.keys() == snapshot.metrics.keys(), about
                assert found[snapshot.id].parent == snapshot.parent, about
            assert [s.ref for s in repository.snapshots("a") if "good" in s.tags] == ["a@1"], about
            repository.gc()
        check_clean(store, about)


@pytest.mark.no_cover  # see test_crash_points.py
def test_copies_of_snapshots_that_are_forgotten_and_rewritten(actors):
    def out(store: ObjectStore) -> Any:
        target = MemoryStore()
        with opened(store) as repository:
            result = repository.copy(["a@1", "a@2", "a@3", "a@0"], to=target)
        for snapshot, why in result.failed:
            assert "meanwhile" in why or "keep revising" in why, (snapshot, why)
        if result.failed:  # its blobs that were sent stay until a gc
            _collected(target)
        check_clean(target)
        return {s.step for s in result.copied} | {s.step for s, _ in result.failed}

    def cast(gc, _):
        def rewriting(store: ObjectStore) -> None:
            with opened(store) as repository:
                repository.forget([KeepLast(1)], run="a")
                repository.compact()

        return {"C": several(out), "D": several(out), "F": several(rewriting), "G": several(gc, gc)}

    for store, about in played(source(), cast, actors, range(max(1, SCHEDULES // 8))):
        check_clean(_collected(store), about)


def _collected(store: MemoryStore) -> MemoryStore:
    with opened(store) as repository:
        repository.gc()
    return store


def test_a_gc_that_is_slow_deletes_nothing_that_a_copy_uses(actors):
    """The gc has stopped after its second look at what is live; the copy sees the mark, and sends the blobs again."""
    stage = Stage(destination(), actors)
    gc = stage.enter("G", collecting()).until("put", ".mark")
    gc.step()
    gc.until("delete", "packs/")
    copy = stage.enter("C", copying("a@0"))
    copy.finish()
    gc.finish()
    assert not copy.result.failed
    assert {"a@0", "a@1", "a@20"} <= stage.check().keys()


def test_a_copy_that_was_given_up_begins_again(actors):
    """It sleeps before its record; a gc fences it, and the fence's record is a copy of the one that it began with."""
    stage = Stage(destination(), actors)
    copy = stage.enter("C", copying("a@3"), seen_dead=True).until("put", ".1")
    stage.fence()
    copy.finish()
    assert [(s.ref, s.revision) for s in copy.result.copied] == [("a@3", 2)]
    assert "a@3" in stage.check()
