"""Compacts that run beside saves, forgets, gcs, recodes and each other lose nothing; no snapshot dangles.

First random schedules; then the points at which only a rule of docs/design/protocol.md, "Rewriting", prevents a loss.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest

from kit.actors import Actor
from kit.objects import clone, flip, keys_of
from kit.reference import replace_encode
from kit.repositories import OPTIONS, check_clean, check_restores, created, opened, same, save, values
from kit.samples import SEED, THOROUGH
from kit.schedules import (
    PER_TEST,
    SCHEDULES,
    Stage,
    collecting,
    forgetting,
    played,
    repairing,
    saving,
    several,
    tagging,
    unforgetting,
)
from kit.tally import tally
from snapstore import ConflictError, KeepLast, Repository
from snapstore.format.blobs import blob, pack
from snapstore.storage.base import ObjectStore
from snapstore.storage.memory import MemoryStore


@cache
def history() -> MemoryStore:
    """a@7 to a@9 and the fork b@0, whose chains need blobs of snapshots that were collected; a@6 is forgotten."""
    store = created()
    with opened(store) as repository:
        for step in range(10):
            save(repository, "a", step, step)
        save(repository, "b", 0, 50, parent="a@5", bases=["a@5"])
        repository.forget([KeepLast(4)], run="a")
        repository.gc()
        repository.forget_snapshots(["a@6"])
    return store


def compacting(*refs: str, **options: Any) -> Any:
    def body(store: ObjectStore) -> Any:
        with opened(store) as repository:
            report = repository.compact(list(refs) or None, **options)
            assert report.failed == []
            return report

    return body


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, SCHEDULES // 4, PER_TEST))
def test_random_schedules(first, actors):
    def cast(gc, _):
        return {
            "C": several(compacting(), compacting()),
            "D": several(compacting(max_repack_bytes=8000), compacting()),
            "S": several(saving("a", 10, 10), saving("b", 1, 51)),
            "F": several(
                forgetting("a@7"), unforgetting("a@7"), tagging("a@8", "t"), unforgetting("a@6"), forgetting()
            ),
            "G": several(gc, gc),
            "H": several(gc),
        }

    for store, about in played(history(), cast, actors, range(first, min(first + PER_TEST, SCHEDULES // 4))):
        with opened(store) as repository:
            check_restores(repository, about)
            assert repository.compact().failed == [], about
            repository.gc()
        check_clean(store, about)


@pytest.fixture
def stage(actors) -> Stage:
    return Stage(history(), actors, check_restores)


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
    stage.fence()
    if stand != "packs/":
        assert not packs <= set(keys_of(stage.store, "packs/"))
    assert compact.finish().failed == []
    stage.check()


def test_a_compact_that_is_fenced_while_it_reads_begins_again(stage):
    """a@8 gets deltas to a@7, which is forgotten; the gc that fences the compact deletes packs that it is to read."""
    compact = stage.enter("C", compacting(), seen_dead=True).until("release", "sessions/").until("lock")
    compact.until("get_range", "packs/")
    forgetting("a@7")(stage.store)
    assert stage.fence().deleted_objects
    assert compact.finish().failed == []
    assert "a@7" not in stage.check()


@pytest.mark.parametrize("stand", ["lock", "list gc/", "list snapshots/", "get_range", "put packs/", "put snapshots/"])
def test_a_tag_is_never_lost(stage, stand):
    operation, _, part = stand.partition(" ")
    compact = stage.enter("C", compacting()).until("lock").until(operation, part)
    tagging("a@7", "t")(stage.store)
    assert compact.finish().failed == []
    assert stage.check()["a@7"].tags == ["t"]


@pytest.mark.parametrize("victim", ["a@7", "a@8", "b@0"])
@pytest.mark.parametrize("stand", ["lock", "list snapshots/", "get_range", "put packs/", "put snapshots/"])
def test_forgotten_and_collected_meanwhile(stage, stand, victim):
    operation, _, part = stand.partition(" ")
    compact = stage.enter("C", compacting()).until("lock").until(operation, part)
    forgetting(victim)(stage.store)
    collecting()(stage.store)
    compact.finish()
    collecting()(stage.store)
    assert victim not in stage.check()


@pytest.mark.parametrize("stand", ["lock", "list gc/", "list snapshots/"])
def test_chunks_of_a_snapshot_that_is_gone_are_not_used(stage, stand):
    """a@8 would be rebuilt on blobs that were made for a@7, which is forgotten and collected in between."""
    operation, _, part = stand.partition(" ")
    compact = stage.enter("C", compacting("a@7", "a@8", "a@9")).until("release", "sessions/").until("lock")
    compact.until(operation, part)
    forgetting("a@7")(stage.store)
    collecting()(stage.store)
    collecting()(stage.store)
    assert compact.finish().failed == []
    stage.check()


def test_a_chunk_that_a_mark_names_is_not_used(stage):
    """a@7 is compacted, forgotten when a gc marks, brought back before a@8's turn, and forgotten again at the sweep."""
    compact = stage.enter("C", compacting("a@7", "a@8", "a@9")).until("release", "sessions/").until("lock")
    forgetting("a@7")(stage.store)
    gc = stage.enter("G", collecting()).until("put", ".mark").until("put", ".wait")
    unforgetting("a@7")(stage.store)
    compact.until("put", "snapshots/")
    forgetting("a@7")(stage.store)
    gc.finish()
    assert compact.finish().failed == []
    stage.check()


def test_a_base_that_became_a_delta_and_is_gone_is_not_used(actors):
    """a@1, stored full, becomes a delta to a@0. It is collected before a@2 is compacted, whose chains end in it."""
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
    compact.until("release", "sessions/").until("lock")
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


def test_a_repair_looks_at_what_a_compact_has_published(stage):
    """Its new manifests refer to the damaged pack as the old ones did."""
    with opened(stage.store) as repository:
        newest = repository.snapshot("a@9").id
    keys = keys_of(stage.store, "packs/")
    key = next(key for key in keys if pack.read_header(stage.store, key).save_id.hex() == newest)
    flip(stage.store, key, pack.HEADER.size + 100)
    repair = stage.enter("R", repairing()).until("lock")
    assert "a@9" in {s.ref for s in compacting()(stage.store).rewritten}
    report = repair.finish()
    assert {s.ref for s, _ in report.lost} == {"a@9"}
    assert not report.ok


@pytest.mark.parametrize("stand", ["list sessions/", "lock"])
def test_a_repair_finds_what_a_compact_has_copied(stand, actors, monkeypatch):
    """A compact that looked for quarantine notes before there was one publishes a copy of a blob that is damaged."""
    store, rng, encode = MemoryStore(), np.random.default_rng(0), blob.encode
    Repository.create(store, chunk_bytes=4096).close()
    x, y = rng.standard_normal(1024, np.float32), rng.standard_normal(30 * 1024, np.float32)
    with Repository.open(store, options=replace(OPTIONS, pack_bytes=2**20, verify_writes="off")) as repository:
        with monkeypatch.context() as patch:
            replace_encode(patch, lambda source, *rest, **options: encode(source ^ np.uint8(1), *rest, **options))
            repository.save({"x": x, "y": y}, run="a", step=0)
        repository.save({"x": x}, run="a", step=1)
        repository.forget_snapshots(["a@0"])
        repository.gc()
    compact = Actor("C", store, compacting())
    repair = Actor("R", store, repairing(level="restore"))
    actors += [compact, repair]
    compact.until("put", "snapshots/")
    repair.until("put", ".quarantine").until(*stand.split())
    assert compact.finish().rewritten
    assert not repair.finish().ok
    assert {s.ref for s, _ in repairing(level="restore")(store).lost} == {"a@1"}


# --- equal chunks of several runs


@cache
def copies() -> MemoryStore:
    """a@3, b@3 and c@3, which store equal chunks of their own; a@4 has none of them."""
    store = created()
    with Repository.open(store, options=replace(OPTIONS, share_runs=False)) as repository:
        for run in "abc":
            save(repository, run, 3, 3)
        save(repository, "a", 4, 4)
    return store


@pytest.mark.no_cover
@pytest.mark.parametrize("ref", ["a@3", "b@3"])
@pytest.mark.parametrize("fence", [False, True])
def test_the_snapshot_whose_blobs_are_shared_goes_meanwhile(ref, fence, actors):
    """A compact stops; a snapshot that it shares with is forgotten, and a gc runs before it goes on."""
    every = 1 if THOROUGH else 30
    for steps in count(Random(f"{SEED} {ref} {fence}").randint(1, every), every):
        tally("schedules")
        stage = Stage(copies(), actors, look=check_restores)
        compact = stage.enter("C", compacting_unless_fenced)
        for _ in range(steps):
            if not compact.ended:
                compact.step()
        if compact.ended:
            break
        forgetting(ref)(stage.store)
        stage.enter("G", collecting(0.0 if fence else 3600.0), seen_dead=fence).finish()
        compact.finish()
        stage.check()
        actors.clear()


def compacting_unless_fenced(store: ObjectStore) -> Any:
    with opened(store) as repository, suppress(ConflictError):
        return repository.compact()
