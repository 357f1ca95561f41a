"""A repair that dies, fails or runs beside saves, forgets and gcs makes nothing worse, and the next one finishes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from test_crash_points import on_a_disk

from kit.actors import Actor
from kit.faults import CRASHES, MODES, Crash, FaultStore, index_in_place, one_thread
from kit.objects import clone, flip, keys_of
from kit.ranks import save_shared
from kit.repositories import OPTIONS, check_clean, check_restores, created, opened, same, save, values, version_of
from kit.samples import sampled
from kit.schedules import PER_TEST, SCHEDULES, collecting, forgetting, played, repairing, saving, several, unforgetting
from kit.stalls import Stalling, others_meanwhile
from kit.tally import tally
from snapstore import IntegrityError, Repository, Snapshot, SnapstoreError, StorageError
from snapstore.format.blobs import pack
from snapstore.storage.base import ObjectStore
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore


@cache
def wounded() -> MemoryStore:
    """A bit is flipped in a blob that a@0 to a@3 build on; twin@0 holds what a@0 holds, a@1 is forgotten.

    Two ranks have saved a@3. The newest record of a@2, which has a tag, is damaged too.
    """
    store = created()
    with opened(store) as repository:
        for step in range(3):
            save(repository, "a", step, step)
        assert all(isinstance(word, Snapshot) for word in save_shared([store] * 2, "a", 3, 3))
        repository.save(values("a", 0), run="twin", step=0, metadata=["a", 0])
        repository.forget_snapshots(["a@1"])
        tagged = repository.tag("a@2", "good")
        first = repository.snapshot("a@0").id
    (key,) = (
        key
        for key in keys_of(store, "packs/")
        if (head := pack.read_header(store, key)).save_id.hex() == first and head.sequence == 0
    )
    for damaged, at in ((key, pack.HEADER.size + 200), (tagged.key, 60)):
        flip(store, damaged, at)
    return store


def whole(store: ObjectStore) -> set[str]:
    """Return the ids of the snapshots that restore, bit for bit."""
    found = set()
    with opened(store) as repository:
        for snapshot in repository.view().snapshots(states=("committed", "forgotten")):
            try:
                state = repository.restore(f"id:{snapshot.id}")
            except SnapstoreError:
                continue
            assert same(state, values(*version_of(snapshot))), snapshot.ref
            found.add(snapshot.id)
    return found


def finish(store: MemoryStore | LocalStore, about: str, *, committed: int | None = 5, level: str = "data") -> None:
    """Check that another repair finishes, and that no trace of the damage stays."""
    with opened(store) as repository:
        report = repository.repair(apply=True, level=level)
        assert (report.lost, report.open) == ([], []), about
        there = check_restores(repository, about)
        assert committed is None or len(there) == committed - 1, about
        repository.repair(apply=True, purge=True)
        repository.gc(), repository.gc()
    check_clean(store, about)


def test_the_wound():
    assert len(whole(wounded())) == 1  # the twin


@cache
def operations() -> list[tuple[str, str]]:
    """Return the (operation, key) of all that a repair does, once the repository is open."""
    store = FaultStore(clone(wounded()))
    with opened(store) as repository:
        begin = len(store.log)
        report = repository.repair(apply=True)
        assert len(report.healed) == 4
    return store.log[begin:]


def points(writes_every: int, reads_every: int) -> list[int]:
    """Return the operations to try: a larger sample of those which change the store."""
    changing = ("put", "lock", "release", "delete")
    writes = [i for i, (operation, _) in enumerate(operations()) if operation in changing]
    reads = [i for i, (operation, _) in enumerate(operations()) if operation not in changing]
    return sorted(
        [writes[i] for i in sampled(len(writes), writes_every)] + [reads[i] for i in sampled(len(reads), reads_every)]
    )


def repair_until_fault(inner: ObjectStore, k: int, mode: str) -> tuple[FaultStore, Any]:
    """Repair with a fault at the k-th operation, and end the process; return the store, and the result or the error."""
    store = FaultStore(inner)
    repository = Repository.open(store, options=OPTIONS)
    store.at, store.mode = len(store.log) + k, mode
    tally("crash points")
    try:
        outcome: Any = repository.repair(apply=True)
    except (Crash, SnapstoreError) as error:
        outcome = error
    repository.close()
    store.die()
    return store, outcome


@pytest.mark.sampled(2)
@pytest.mark.no_cover
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "torn"])
def test_every_fault(mode, monkeypatch):
    one_thread(monkeypatch, index=False)
    for k in points(8, 71 if mode in CRASHES else 47):
        inner = clone(wounded())
        store, outcome = repair_until_fault(inner, k, mode)
        about = f"{mode} at {k}: {store.log[-1]}, {outcome}"
        assert isinstance(outcome, Crash) == (mode in CRASHES), about
        if isinstance(outcome, SnapstoreError):
            assert isinstance(outcome, StorageError), about
        assert set(keys_of(wounded(), "packs/")) <= set(keys_of(inner, "packs/")), about
        assert whole(wounded()) <= whole(inner), about
        _unless_damaged(collecting(), inner)  # takes nothing that the next repair needs
        finish(inner, about)


@pytest.mark.no_cover
def test_every_torn_put(monkeypatch):
    """A repair leaves half of an object: the next repair, a gc and a purge leave no trace of it."""
    one_thread(monkeypatch, index=False)
    puts = [k for k, (operation, _) in enumerate(operations()) if operation == "put"]
    for k in (puts[i] for i in sampled(len(puts), 3)):
        inner = clone(wounded())
        store, outcome = repair_until_fault(inner, k, "torn")
        about = f"torn at {k}: {store.log[-1]}, {outcome}"
        assert isinstance(outcome, Crash), about
        assert whole(wounded()) <= whole(inner), about
        _unless_damaged(collecting(), inner)
        # a torn record of a@1 may have been that of an unforget, so a@1 is not forgotten any more
        finish(inner, about, level="restore", committed=6 if "snapshots/a/000000000001-" in store.log[-1][1] else 5)


@pytest.mark.sampled(1)
@pytest.mark.no_cover
@pytest.mark.parametrize("mode", ["crash-before", "crash-after", "lost"])
def test_every_fault_on_a_disk(mode, monkeypatch, tmp_path):
    one_thread(monkeypatch)
    index_in_place(monkeypatch)
    for k in points(6, 99):
        inner = on_a_disk(wounded(), tmp_path / str(k))
        with opened(inner) as repository:  # this makes an index from before the fault
            assert len(repository.view().damaged) == 1
        store, outcome = repair_until_fault(inner, k, mode)
        finish(inner, f"{mode} at {k}: {store.log[-1]}, {outcome}")


@pytest.mark.sampled(3)
@pytest.mark.no_cover
@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("meanwhile", ["gc", "forget and gc", "forget and fence"])
def test_stalled(meanwhile, where, monkeypatch):
    """As in test_late_and_torn.py: others forget and collect the snapshot from which a repair heals."""
    one_thread(monkeypatch, index=False)
    for k in sampled(len(operations()), 70):
        inner = clone(wounded())
        store = Stalling(inner, others_meanwhile(inner, "twin@0")[meanwhile], where)
        repository = Repository.open(store, options=OPTIONS)
        store.stalls_at = len(store.log) + k
        try:
            outcome: Any = repository.repair(apply=True)
        except SnapstoreError as error:
            outcome = error
        repository.close()
        store.die()
        about = f"{meanwhile} {where} {k}: {store.log[-1]}, {outcome!r:.300}"
        assert not isinstance(outcome, SnapstoreError), about
        there = whole(inner)
        assert {s.id for s in outcome.healed} <= there | _swept(inner), about  # healed, and collected after that
        if meanwhile == "gc":
            finish(inner, about)
            continue
        collecting()(inner), collecting()(inner)
        assert there <= whole(inner) | _swept(inner), about


def _swept(store: ObjectStore) -> set[str]:
    """Return the ids of the snapshots that gcs have swept; check that only forgotten ones are."""
    with opened(store) as repository:
        swept = repository.view().snapshots(states=("swept",))
    assert {(s.run, s.step) for s in swept} <= {("a", 1), ("twin", 0)}
    return {s.id for s in swept}


# --- beside others ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(0, SCHEDULES // 4, PER_TEST))
def test_random_schedules(first, actors):
    def cast(gc, _):
        return {
            "R": several(repairing(), repairing()),
            "Q": several(repairing()),
            "S": several(saving("a", 10, 10), saving("a", 11, 0)),
            "F": several(forgetting("a@0"), unforgetting("a@0"), forgetting("a@3")),
            "G": lambda store: _unless_damaged(several(gc), store),
        }

    for store, about in played(wounded(), cast, actors, range(first, min(first + PER_TEST, SCHEDULES // 4))):
        with opened(store) as repository:
            repository.gc()
        finish(store, about, committed=None)


def _unless_damaged(gc: Any, store: ObjectStore) -> None:
    """Run a gc twice; it may refuse to work because of a damaged record."""
    for _ in range(2):
        try:
            gc(store)
        except IntegrityError as error:
            assert "nothing was deleted" in str(error)  # noqa: PT017


STANDS = ["lock", "list gc/", "list snapshots/", "get_range packs/", "put packs/", "put manifests/", "put snapshots/a"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("stand", STANDS)
@pytest.mark.parametrize("marked", [False, True])
def test_the_source_of_a_repair_is_forgotten_and_collected_meanwhile(stand, marked, actors):
    """The chains from which a repair heals are deleted meanwhile: each snapshot that it reports as healed restores."""
    store = clone(wounded())
    with opened(store) as repository:
        key = repository.repair().actions[0].key
        repository.repair(apply=True, level="metadata")  # repairs the record, so that gcs can run
        assert any(part in key for part in ("snapshots/",))
        save(repository, "twin", 1, 60)
    operation, _, part = stand.partition(" ")
    twin = "twin@0"
    gc = Actor("G", store, collecting())
    actors.append(gc)
    if marked:
        forgetting(twin)(store)
        gc.until("put", ".wait")
        unforgetting(twin)(store)
    repair = Actor("R", store, repairing())
    actors.append(repair)
    repair.until("put", ".quarantine").until("lock").until(operation, part)
    forgetting(twin)(store)
    gc.finish()
    collecting()(store)
    report = repair.finish()
    assert {s.id for s in report.healed} <= whole(store)
    collecting()(store)
    assert {s.id for s in report.healed} <= whole(store)


def test_a_sweep_leaves_what_was_quarantined_behind_its_mark(actors):
    """A gc marked the damaged pack before a repair quarantined it: the sweep must not delete it."""
    store = clone(wounded())
    repairing(level="metadata")(store)
    with opened(store) as repository:
        damaged = {problem.key for problem in repository.check("data").problems}
        repository.untag("a@2", repository.snapshot("a@2").tags[0])
    forgetting("a@0", "a@2", "a@3")(store)
    gc = Actor("G", store, collecting())
    actors.append(gc)
    gc.until("put", ".wait")
    repairing()(store)
    gc.finish()
    assert damaged <= set(keys_of(store, "packs/"))


def test_a_check_beside_a_repair_and_a_gc_reports_no_ghosts(actors):
    """After it lists records and before it reads manifests, all snapshots get new manifests, and the old ones go."""
    store = clone(wounded())
    repairing(level="metadata")(store)

    def checking(inner: ObjectStore) -> Any:
        with opened(inner) as repository:
            return repository.check("metadata")

    check = Actor("C", store, checking)
    actors.append(check)
    check.until("get", "manifests/")
    repairing()(store)
    collecting()(store)
    result = check.finish()
    assert result.problems == []
    assert len(result.restorable) == 4  # the forgotten one was collected


@pytest.mark.parametrize("stand", ["lock", "put packs/", "put manifests/", "put snapshots/a"])
def test_a_repair_paused_past_its_fence_does_not_publish(stand, actors):
    store = clone(wounded())
    repairing(level="metadata")(store)
    operation, _, part = stand.partition(" ")
    repair = Actor("R", store, repairing())
    actors.append(repair)
    repair.until("put", ".quarantine").until("lock").until(operation, part)
    gc = Actor("G", store, collecting(0.0), seen_dead=True)
    actors.append(gc)
    fenced = gc.finish().fenced
    assert len(fenced) == (stand != "lock")
    repair.finish()
    finish(store, stand)
