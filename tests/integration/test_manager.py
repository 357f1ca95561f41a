"""SnapshotManager keeps its promises to the training loop, while the process runs and when it ends."""

from __future__ import annotations

import dis
import enum
import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit.faults import FaultStore
from kit.objects import flip_file, flip_in_place, keys_of
from kit.processes import environment, run_python
from kit.ranks import together
from kit.repositories import OPTIONS, dearest, index_of, opened, same
from snapstore import (
    AlreadyExistsError,
    CapabilityError,
    IntegrityError,
    InvalidInputError,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSteps,
    NotFoundError,
    PerRank,
    Repository,
    SaveOptions,
    SnapshotManager,
    SnapstoreError,
    StorageError,
    StorageFullError,
)
from snapstore.catalog.lmdb_file import Environment
from snapstore.engine.cpu import CpuEngine
from snapstore.protocol import session
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore


class GateStore(MemoryStore):
    """A store whose record puts wait for `gate`; it logs puts and deletes, and raises `refuse` for packs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.log: list[tuple[str, str]] = []
        self.refuse: Exception | None = None

    def put(self, key, data):
        if key.startswith("snapshots/"):
            assert self.gate.wait(600)
        if self.refuse is not None and key.startswith("packs/"):
            raise self.refuse
        self.log.append(("put", key))
        super().put(key, data)

    def delete(self, keys):
        keys = list(keys)
        self.log.extend(("delete", key) for key in keys)
        super().delete(keys)


def big(version: int, elements: int = 4096) -> dict[str, Any]:
    weights = np.random.default_rng(0).standard_normal(elements).astype(np.float32)
    weights[:: 50 + version % 7] += np.float32(version) / 100
    return {"model": {"w": torch.from_numpy(weights)}, "step": version}


def manager(store: Any, run: str = "a", **options: Any) -> SnapshotManager:
    return SnapshotManager(store, run=run, options=options.pop("options", OPTIONS), **options)


@pytest.fixture
def store() -> GateStore:
    store = GateStore()
    Repository.create(store, chunk_bytes=1024, options=OPTIONS).close()
    return store


# --- asynchronous ----------------------------------------------------------------------------------------------------


def test_a_snapshot_holds_the_values_of_its_save(store):
    tensor, array = torch.arange(4096.0), np.arange(4096.0)
    tiny, inline = torch.zeros(3), np.zeros(5)
    state = {"t": tensor, "view": tensor[::2], "a": array, "tiny": tiny, "inline": inline, "list": [1], "n": 1}
    before = {"t": tensor.clone(), "view": tensor[::2].clone(), "a": array.copy(), "tiny": tiny.clone(),
              "inline": inline.copy(), "list": [1], "n": 1}  # fmt: skip
    with manager(store) as snapshots:
        store.gate.clear()
        handle = snapshots.save(0, state)
        assert not handle.done()
        tensor.zero_()
        array[:] = -1
        tiny.fill_(7)
        inline[:] = 9
        state["list"].append(2)
        state["n"] = 2
        store.gate.set()
        assert handle.result(30).step == 0
        assert handle.done()
        assert same(snapshots.restore(0), before)


def test_many_saves_of_a_changing_state_never_mix(store):
    weights = torch.zeros(64 * 1024)
    with manager(store, keep_base=True) as snapshots:
        for step in range(12):
            weights += 1
            snapshots.save(step, {"w": weights})
        for step in range(12):
            assert torch.equal(snapshots.restore(step)["w"], torch.full_like(weights, step + 1))


def test_on_busy_wait_and_skip(store):
    for on_busy in ("skip", "wait"):
        with manager(store, run=on_busy, on_busy=on_busy) as snapshots:
            store.gate.clear()
            first = snapshots.save(0, big(0))
            timer = threading.Timer(0.2, store.gate.set)
            timer.start()
            second = snapshots.save(1, big(1))
            if on_busy == "skip":
                assert second.skipped
                assert second.done()
                assert second.result() is None
                assert not first.done()
            else:
                assert first.done()
            timer.join()
            snapshots.wait_until_finished()
            assert snapshots.all_steps() == ([0] if on_busy == "skip" else [0, 1])


@pytest.mark.parametrize("what", ["prepare", "prepare_next", "gc"])
def test_a_save_is_skipped_for_a_save_or_its_gc_but_not_for_a_preparation(store, monkeypatch, what):
    begun, go = threading.Event(), threading.Event()

    def held(*_):
        begun.set()
        assert go.wait(30)

    with manager(store, on_busy="skip", keep=[KeepLast(9)]) as snapshots:
        if what == "prepare":
            monkeypatch.setattr(snapshots._staging, what, lambda *_: held)
        else:
            monkeypatch.setattr(*(snapshots._upkeep, "retain") if what == "gc" else (snapshots._staging, what), held)
        if what == "prepare":
            snapshots.prepare(big(0))  # the next save comes before the thread has begun
        else:
            snapshots.save(0, big(0)).result()
            assert begun.wait(30)
        timer = threading.Timer(0.2, go.set)
        timer.start()
        assert snapshots.save(1, big(1)).skipped == (what == "gc")
        timer.join()
        snapshots.wait_until_finished()
        store.gate.clear()
        snapshots.save(2, big(2))
        assert snapshots.save(3, big(3)).skipped
        store.gate.set()


def test_result_times_out_and_can_be_asked_again(store):
    with manager(store) as snapshots:
        store.gate.clear()
        handle = snapshots.save(0, big(0))
        with pytest.raises(TimeoutError):
            handle.result(0.05)
        store.gate.set()
        assert handle.result(30).ref == "a@0"


@pytest.mark.parametrize("call", ["save", "wait", "check", "close"])
def test_a_failure_in_the_background_is_raised_once_at_the_next_call(store, call):
    snapshots = manager(store)
    store.refuse = StorageError("the disk is on fire")
    handle = snapshots.save(0, big(0))
    if call == "save":
        snapshots._background.join()
    else:
        with pytest.raises(StorageError, match="on fire"):
            handle.result(30)
    store.refuse = None
    calls = {"save": lambda: snapshots.save(1, big(1)), "wait": snapshots.wait_until_finished,
             "check": snapshots.check_for_errors, "close": snapshots.close}  # fmt: skip
    with pytest.raises(StorageError, match="on fire"):
        calls[call]()
    snapshots.check_for_errors()
    if call != "close":
        snapshots.save(2, big(2))
    snapshots.close()
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == ([] if call == "close" else [2])
        assert repository.check("restore").ok


def test_calls_that_read_give_what_is_committed_after_a_failure(store):
    """A program can go back to the newest snapshot; the next save still raises the error."""
    with manager(store) as snapshots:
        snapshots.save(0, big(0)).result()
        store.refuse = StorageError("the disk is on fire")
        snapshots.save(1, big(1))
        snapshots._background.join()
        store.refuse = None
        assert (snapshots.latest_step(), snapshots.all_steps()) == (0, [0])
        target = big(5)
        assert snapshots.restore_into(target).step == 0
        same(target, big(0))
        same(snapshots.restore(), big(0))
        with pytest.raises(StorageError, match=r"save a@2 was not begun: the save of a@1 has failed"):
            snapshots.save(2, big(2))


def test_a_synchronous_failure_is_raised_at_once(store):
    with manager(store, async_save=False) as snapshots:
        store.refuse = StorageError("the disk is on fire")
        with pytest.raises(StorageError, match="on fire"):
            snapshots.save(0, big(0))
        store.refuse = None
        assert snapshots.save(1, big(1)).result().depth == 0


@pytest.mark.parametrize("verify", ["off", "sample"])
def test_a_state_that_changes_during_a_synchronous_save(store, monkeypatch, verify):
    """As if another thread changed the array, or another process the mapped file: no snapshot has a wrong digest."""
    options = SaveOptions(pack_bytes=4096, threads=1, verify_writes=verify)
    state = {"w": np.random.default_rng(0).bytes(40_000)}
    state["w"] = np.frombuffer(bytearray(state["w"]), np.uint8)
    with manager(store, async_save=False, options=options) as snapshots:
        encode = CpuEngine.start_encode

        def begun(self, batch):
            state["w"][5 * 1024 + 7] ^= 1  # it is digested, but not yet encoded
            return encode(self, batch)

        with monkeypatch.context() as patch:
            patch.setattr(CpuEngine, "start_encode", begun)
            with pytest.raises(InvalidInputError, match="w: was changed while it was saved"):
                snapshots.save(1, state)
        assert snapshots.all_steps() == []
        snapshots.save(2, state)
        assert same(snapshots.restore(2), state)
        assert snapshots.repository.check("restore").ok


def test_after_a_failed_save_the_next_one_is_right(store):
    """The copy of the state of a failed save is not used as a delta base."""
    for async_save in (True, False):
        run = f"r{async_save}"
        with manager(store, run=run, async_save=async_save) as snapshots:
            snapshots.save(0, big(0)).result(30)
            store.refuse = StorageError("full of holes")
            with pytest.raises(StorageError):
                snapshots.save(1, big(1)).result(30)
            store.refuse = None
            if async_save:
                with pytest.raises(StorageError):
                    snapshots.wait_until_finished()
            snapshot = snapshots.save(2, big(2)).result(30)
            assert snapshot.depth == 1
            assert same(snapshots.restore(2), big(2))
            assert same(snapshots.restore(0), big(0))


def test_an_exception_inside_with_is_not_masked(store):
    with pytest.raises(ZeroDivisionError), manager(store) as snapshots:  # noqa: PT012
        store.refuse = StorageError("later")
        snapshots.save(0, big(0))
        raise ZeroDivisionError
    with pytest.raises(StorageError, match="later"), manager(store) as snapshots:
        snapshots.save(0, big(0))


def test_an_exception_inside_with_waits_for_the_save(store):
    store.gate.clear()
    with pytest.raises(ZeroDivisionError), manager(store) as snapshots:  # noqa: PT012
        handle = snapshots.save(0, big(0))
        threading.Timer(0.1, store.gate.set).start()
        raise ZeroDivisionError
    assert handle.result().ref == "a@0"


def test_close_twice_and_use_after_close(store):
    snapshots = manager(store)
    snapshots.save(0, big(0))
    snapshots.close()
    snapshots.close()
    for use in (lambda: snapshots.save(1, big(1)), snapshots.restore):
        with pytest.raises(InvalidInputError, match="closed"):
            use()


@pytest.mark.parametrize("timeout", [0, 1e-9])
def test_a_save_that_has_just_begun_is_given_up_by_close(store, timeout):
    snapshots = manager(store)
    store.gate.clear()  # else the caller may be the slower one on a busy machine
    handle = snapshots.save(0, big(0))
    with suppress(SnapstoreError, TimeoutError):  # TimeoutError: the save was already at the gate
        snapshots.close(timeout)
    store.gate.set()
    with pytest.raises(SnapstoreError, match="given it up; nothing was committed"):
        handle.result(600)


def test_no_timeout_is_too_long(store):
    with manager(store) as snapshots:
        assert snapshots.save(0, big(0)).result(math.inf).step == 0
        snapshots.close(math.inf)


# --- steps and metrics -----------------------------------------------------------------------------------------------


def test_interval_and_force(store):
    with manager(store, save_interval_steps=np.int64(10)) as snapshots:
        assert [step for step in range(25) if snapshots.should_save(step)] == [0, 10, 20]
        assert snapshots.save(3, big(3)).skipped
        assert not snapshots.save(4, big(4), force=True).skipped
        assert not snapshots.save(np.int64(10), big(10)).skipped
        snapshots.wait_until_finished()
        assert snapshots.all_steps() == [4, 10]
        assert snapshots.latest_step() == 10


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "10", None])
def test_intervals_that_are_none(store, interval):
    with pytest.raises(InvalidInputError, match="save_interval_steps"):
        manager(store, save_interval_steps=interval)


@pytest.mark.parametrize("name", ["async_save", "keep_base", "read_only"])
def test_a_flag_is_true_or_false(store, name):
    with pytest.raises(InvalidInputError, match=f"{name} 'no': expected True or False, got str"):
        manager(store, **{name: "no"})


def test_read_only(store, tmp_path):
    with manager(store) as snapshots:
        snapshots.save(0, big(0))
    objects = keys_of(store)
    with manager(store, read_only=True, keep=[KeepLast(1)]) as snapshots:
        assert not snapshots.should_save(0)
        with pytest.raises(InvalidInputError, match="read-only"):
            snapshots.save(0, big(0), force=True)
        assert same(snapshots.restore(), big(0))
    assert keys_of(store) == objects
    with pytest.raises(NotFoundError):
        SnapshotManager(tmp_path, run="a", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_best_step(store):
    with manager(store, keep=[KeepBest("loss", n=2), KeepLast(1)]) as snapshots:
        assert snapshots.best_step() is None
        for step, loss in enumerate([0.5, 0.3, float("nan"), 0.4]):
            snapshots.save(step, big(step), metrics={"loss": loss})
        snapshots.wait_until_finished()
        assert snapshots.best_step() == 1
        assert snapshots.all_steps() == [1, 3]
    with manager(store, run="b") as snapshots, pytest.raises(InvalidInputError, match="KeepBest"):
        snapshots.best_step()


def test_empty_run(store):
    with manager(store) as snapshots:
        assert snapshots.latest_step() is None
        assert snapshots.all_steps() == []
        with pytest.raises(NotFoundError, match="no committed snapshot"):
            snapshots.restore()
        with pytest.raises(NotFoundError):
            snapshots.restore(3)


# --- lineage ---------------------------------------------------------------------------------------------------------


def test_the_save_after_a_restore_goes_on_from_it(store):
    with manager(store) as snapshots:
        for step in range(4):
            snapshots.save(step, big(step))
    with manager(store) as snapshots:
        into = big(99)
        restored = snapshots.restore_into(into, 1)
        assert same(into["model"], big(1)["model"])
        first = snapshots.save(2, big(12)).result(30)
        assert first.parent == restored.id
        assert restored.id == first.bases[0]
        assert first.depth == restored.depth + 1
        second = snapshots.save(3, big(13)).result(30)
        assert second.parent == first.id
        assert snapshots.latest_step() == 3
        assert snapshots.all_steps() == [0, 1, 2, 3]
        assert same(snapshots.restore(2), big(12))
        assert [s.id for s in snapshots.repository.children(f"id:{restored.id}")] != []


def test_latest_is_the_newest_save_and_not_the_highest_step(store):
    """A run that went back to step 1 and saved step 2 again continues from that save, for every verb."""
    with manager(store) as snapshots:
        assert snapshots.highest_step() is None
        for step in (1, 2, 3):
            snapshots.save(step, big(step))
        snapshots.restore(1)
        again = snapshots.save(2, big(12)).result(30)
        assert (snapshots.latest_step(), snapshots.highest_step()) == (2, 3)
        assert same(snapshots.restore(), big(12))
        repository = snapshots.repository
        assert repository.snapshot("a@latest").id == repository.snapshots("a")[-1].id == again.id
        kept = repository.forget(KeepLast(1), run="a", dry_run=True).kept
        assert [s.id for s, _ in kept] == [again.id]
        with pytest.raises(InvalidInputError, match="newest"):
            repository.forget_snapshots(["a@2"])
        assert snapshots.save(4, big(4)).result(30).parent == again.id
        assert (snapshots.latest_step(), snapshots.highest_step()) == (4, 4)


def test_the_error_of_a_damaged_newest_snapshot_names_the_one_to_go_on_from(store, monkeypatch):
    with manager(store) as snapshots:
        whole = snapshots.save(0, big(0)).result(30)
        before = set(keys_of(store, "packs/"))
        snapshots.save(1, big(1)).result(30)
        pack = min(set(keys_of(store, "packs/")) - before)
        flip_in_place(store, pack, 200)
        named = rf"a@1 \(id:.*; the newest whole snapshot of run 'a' is a@0 \(id:{whole.id[:12]}\); to go on from it, "
        for restore in (snapshots.restore, lambda: snapshots.restore(1), lambda: snapshots.restore_into(big(9))):
            with pytest.raises(IntegrityError, match=named):
                restore()
        flip_in_place(store, pack, 200)
        get_range, failed = store.get_range, []

        def fail_once(key, *args):
            if key == pack and not failed:
                failed.append(key)
                raise StorageError("not now")
            return get_range(key, *args)

        monkeypatch.setattr(store, "get_range", fail_once)
        with pytest.raises(StorageError, match=r"^not now$"):  # one failed read is not taken for damage
            snapshots.restore()

        def wrong_once(key, *args):
            if key != pack or len(failed) > 1:
                return get_range(key, *args)
            failed.append(key)
            flip_in_place(store, pack, 200)
            try:
                return get_range(key, *args)
            finally:
                flip_in_place(store, pack, 200)

        monkeypatch.setattr(store, "get_range", wrong_once)
        with pytest.raises(IntegrityError, match=r"; a@1 was read again and is whole: restore it again$"):
            snapshots.restore()
        assert same(snapshots.restore(), big(1))


def test_the_search_for_a_whole_snapshot_reads_each_blob_a_few_times(store, monkeypatch):
    """All snapshots share the damaged chunk, and most of the others too."""
    read, get_range = [], store.get_range
    shared = big(0, elements=65536)
    with manager(store) as snapshots:
        snapshots.save(0, shared).result(30)
        flip_in_place(store, keys_of(store, "packs/")[0], 200)
        for step in range(1, 20):
            snapshots.save(step, shared | {"new": big(step)}).result(30)
        stored = sum(len(store._objects[key][0]) for key in keys_of(store, "packs/"))
        monkeypatch.setattr(store, "get_range", lambda *args: read.append(args[2]) or get_range(*args))
        with pytest.raises(IntegrityError, match="no older snapshot of run 'a' is whole"):
            snapshots.restore()
    assert sum(read) < 4 * stored


def test_fork_from_another_run(store):
    with manager(store) as snapshots:
        snapshots.save(0, big(0))
        snapshots.save(1, big(1))
    with manager(store, run="fork", parent="a@0") as snapshots:
        state = snapshots.repository.restore("a@0")
        assert same(state, big(0))
        first = snapshots.save(0, big(5)).result(30)
        parent = snapshots.repository.snapshot("a@0")
        assert first.parent == parent.id
        assert first.bases == [parent.id]
        assert first.stored_bytes < 0.6 * parent.stored_bytes
        assert same(snapshots.restore(0), big(5))
    with manager(store, run="fork", parent="a@7") as snapshots:  # it resumes: the run is there, the parent may be gone
        assert snapshots.save(1, big(6)).result(30).parent == first.id
    with pytest.raises(NotFoundError, match="a@7"):
        manager(store, run="other", parent="a@7")


def test_a_look_at_another_snapshot_does_not_change_the_parent(store):
    """`Repository.restore` only looks; the manager's restore sets the parent of its own run's next save."""
    with opened(store) as repository:
        other = repository.save(big(50), run="b", step=0)
        with manager(repository) as snapshots:
            first = snapshots.save(0, big(0)).result(30)
            second = snapshots.save(1, big(1)).result(30)
            repository.restore("b@0")
            repository.restore_into("a@0", big(99))
            assert snapshots.save(2, big(2)).result(30).parent == second.id
            assert repository.save(big(3), run="a", step=3).parent == snapshots.repository.snapshot("a@2").id
            snapshots.restore(0)
            assert snapshots.save(4, big(4)).result(30).parent == first.id
        repository.restore("a@1")
        assert repository.save(big(51), run="b", step=1).parent == other.id
        assert repository.save(big(60), run="c", step=0).parent is None
        assert repository.save(big(61), run="c", step=1, parent="a@1").parent == second.id


def test_two_managers_of_two_runs_on_one_repository(store):
    """Each run continues from its own snapshot, whatever the other has restored."""
    with opened(store) as repository:
        with manager(repository, "a") as a, manager(repository, "b") as b:
            a.save(0, big(0))
            b.save(0, big(50))
        with manager(repository, "a") as a, manager(repository, "b") as b:
            a.restore()
            b.restore()
            handles = [(a.save(1, big(1)), "a"), (b.save(1, big(51)), "b")]
            for handle, run in handles:
                assert handle.result(30).parent == repository.snapshot(f"{run}@0").id
            assert a.all_steps() == b.all_steps() == [0, 1]
            assert same(a.restore(1), big(1))
            assert same(b.restore(1), big(51))


def test_two_managers_at_once_on_a_new_place(tmp_path):
    """Both find no repository and create one: the first succeeds, the second opens it."""
    made: list[SnapshotManager] = []
    barrier = threading.Barrier(2)

    def make(run: str) -> None:
        barrier.wait()
        made.append(SnapshotManager(tmp_path, run=run, options=OPTIONS))

    assert together([partial(make, run) for run in ("a", "b")]) == [None, None]
    for snapshots in made:
        snapshots.save(0, big(0))
        snapshots.close()


def test_a_repository_made_by_another_between_open_and_create(store, monkeypatch):
    real = Repository.open
    answers = [NotFoundError("not yet")]

    def open_(url, **options):
        if answers:
            raise answers.pop()
        return real(url, **options)

    monkeypatch.setattr(Repository, "open", open_)
    with pytest.raises(AlreadyExistsError):
        Repository.create(store)
    manager(store).close()


# --- retention -------------------------------------------------------------------------------------------------------


def test_policies_forget_and_collect_behind_the_commit(store):
    with manager(store, keep=[KeepLast(2), KeepEvery(4)]) as snapshots:
        for step in range(10):
            snapshots.save(step, big(step))
        snapshots.wait_until_finished()
        assert snapshots.all_steps() == [0, 4, 8, 9]
        assert snapshots.repository.stats().unneeded_bytes == 0
        for step in snapshots.all_steps():
            assert same(snapshots.restore(step), big(step))
    committed_at: dict[str, int] = {}
    for place, (operation, key) in enumerate(store.log):
        if operation == "put" and key.startswith("snapshots/") and key.endswith(".0"):
            committed_at[key] = place
    order = sorted(committed_at.values())
    log = list(enumerate(store.log))
    revisions = [i for i, (op, key) in log if op == "put" and key.startswith("snapshots/") and not key.endswith(".0")]
    deletes = [i for i, (op, key) in log if op == "delete" and key.startswith(("packs/", "manifests/"))]
    assert revisions
    assert deletes
    assert min(revisions) > order[2]  # the third commit is the first to make one superfluous
    assert min(deletes) > order[2]
    with opened(store) as repository:
        assert repository.policies("a") == [KeepLast(2), KeepEvery(4)]


def test_nothing_is_forgotten_for_a_save_that_failed(store):
    with manager(store, keep=[KeepLast(1)]) as snapshots:
        snapshots.save(0, big(0)).result(30)
        store.refuse = StorageError("no")
        with pytest.raises(StorageError):
            snapshots.save(1, big(1)).result(30)
        with pytest.raises(StorageError):
            snapshots.wait_until_finished()
        store.refuse = None
        assert snapshots.all_steps() == [0]


def test_snapshots_that_stay_without_neighbours_are_written_full(store):
    with manager(store, keep=[KeepLast(2), KeepEvery(3), KeepSteps([4])]) as snapshots:
        depths = {step: snapshots.save(step, big(step)).result(30).depth for step in range(8)}
    assert {step: depth == 0 for step, depth in depths.items()} == {
        0: True, 1: False, 2: False, 3: True, 4: True, 5: False, 6: True, 7: False
    }  # fmt: skip


@pytest.mark.parametrize("policy", [KeepBest("acc", mode="max"), KeepEvery(100), KeepSteps([7])])
def test_policies_that_would_keep_nothing_forget_nothing(store, policy, caplog):
    """A misspelt metric does not delete a run; a warning names the policy."""
    with SnapshotManager(store, run="a", keep=policy, options=OPTIONS, async_save=False) as snapshots:
        for step in range(1, 4):
            snapshots.save(step, {"w": torch.ones(3)}, metrics={"val_acc": 1.0})
        assert snapshots.all_steps() == [1, 2, 3]
        assert type(policy).__name__ in caplog.text


def test_tags_and_dense_policies_leave_deltas_on(store):
    """A tag may move, and every snapshot may have one. If every second save stays, deltas take less than full ones."""
    with manager(store, keep=KeepEvery(1)) as snapshots:
        saved = [snapshots.save(step, big(step), tags=["best"]).result(30) for step in range(4)]
    assert all(snapshot.depth > 0 for snapshot in saved[1:])
    assert all(snapshot.stored_bytes < 0.6 * saved[0].stored_bytes for snapshot in saved[1:])
    with opened(store) as repository:
        assert repository.save(big(9), run="a", step=9, tags=["good"]).depth > 0
        assert repository.save(big(10), run="a", step=10, tags=["good"], full=True).depth == 0


def test_chains_are_bounded_and_full_chunks_staggered(store):
    options = SaveOptions(pack_bytes=64 * 1024, threads=2)
    drift = np.random.default_rng(1).standard_normal(64 * 1024).astype(np.float32)
    stored = []
    with manager(store, options=options) as snapshots:
        for step in range(25):
            drift[::200] += np.float32(0.001)
            snapshot = snapshots.save(step, {"w": drift}).result(30)
            assert dearest(store, snapshot) <= 1.01 * options.restore_cost
            stored.append(snapshot.stored_bytes)
        assert max(snapshots.repository.stats().depths) >= 3
    assert max(stored[1:]) < 0.55 * stored[0]
    assert max(stored[6:]) < 2 * min(stored[6:])  # every save writes its share of full chunks


def test_a_corrupted_base_in_memory_costs_nothing_but_time(store):
    with manager(store, async_save=True) as snapshots:
        snapshots.save(0, big(0)).result(30)
        buffers = list(snapshots._staging._base.values())
        assert buffers
        for buffer in buffers:
            buffer[7] ^= 1
        snapshots.save(1, big(1)).result(30)
        assert same(snapshots.restore(1), big(1))


def test_a_corrupted_base_in_the_store_is_not_used(store):
    with manager(store, keep_base=False) as snapshots:
        first = snapshots.save(0, big(0)).result(30)
        for key in keys_of(store, "packs/"):
            flip_in_place(store, key, 200)
        second = snapshots.save(1, {"model": {"w": big(1)["model"]["w"] + 1e-3}, "step": 1}).result(30)
        assert first.bases == second.bases == []
        assert second.depth == second.generation == 0
        assert snapshots.restore(1)["step"] == 1
        with pytest.raises(IntegrityError):
            snapshots.restore(0)


@pytest.mark.parametrize("how", ["deleted", "cut"])
def test_a_base_that_lacks_a_pack_is_not_used(store, how):
    """A save references known chunks without reading them: later snapshots would need the pack that is gone."""
    with manager(store) as snapshots:
        snapshots.save(0, big(0)).result(30)
        key = keys_of(store, "packs/")[0]
        data, _ = store._objects.pop(key)
        if how == "cut":
            MemoryStore.put(store, key, data[:-100])
        snapshots.save(1, big(0)).result(30)
        assert same(snapshots.restore(1), big(0))


def test_damage_found_by_retention_is_raised(store):
    with manager(store, keep=[KeepLast(1)]) as snapshots:
        snapshots.save(0, big(0)).result(30)
        snapshots.wait_until_finished()
        with opened(store) as repository:
            repository.save(big(9), run="other", step=0)
            (ref,) = repository.snapshot("other@0").manifests[:1]
        store.delete([ref.key])
        snapshots.save(1, big(1))
        with pytest.raises(IntegrityError, match="nothing was deleted"):
            snapshots.wait_until_finished()


def test_damaged_policies_do_not_stop_training(store):
    manager(store, keep=[KeepLast(1)]).close()
    flip_in_place(store, "policies/a.0", -1)
    manager(store, keep=[KeepLast(1)]).close()
    with opened(store) as repository:
        assert repository.policies("a") == [KeepLast(1)]


def test_a_manager_without_policies_says_that_an_earlier_one_stored_some(store, caplog):
    with manager(store, keep=KeepLast(2)):
        pass
    assert "an earlier one" not in caplog.text
    with manager(store) as snapshots:
        snapshots.keep = [KeepLast(2)]  # as an integration does that knows the policies later
        snapshots.save(0, big(0))
    assert "an earlier one" not in caplog.text
    with manager(store) as snapshots:
        for step in (1, 2):
            snapshots.save(step, big(step))
    assert caplog.text.count("KeepLast(2)") == 1
    with opened(store) as repository:
        repository.set_policies("a", [])
    caplog.clear()
    with manager(store) as snapshots:
        snapshots.save(3, big(3))
    assert not caplog.text


def test_a_disk_that_takes_no_policies_does_not_prevent_a_restore(store, monkeypatch, caplog):
    with manager(store, keep=[KeepLast(1)]) as snapshots:
        snapshots.save(0, big(0)).result(30)
    put = store.put

    def refuse(key, *args):
        if key.startswith("policies/"):
            raise StorageFullError(f"{key}: no space or quota left")
        return put(key, *args)

    monkeypatch.setattr(store, "put", refuse)
    with manager(store, keep=[KeepLast(2)]) as snapshots:
        assert same(snapshots.restore(), big(0))
        snapshots.save(1, big(1)).result(30)
        snapshots.wait_until_finished()
        assert snapshots.all_steps() == [0, 1]
    assert "policies cannot be stored" in caplog.text


def test_policies_stored_by_two_at_once(store):
    """The writer that loses the race reads again; equal policies need no second revision."""

    class Racing(FaultStore):
        def put(self, key, data):
            if key == "policies/a.0":
                self.inner.put(key, data)
            super().put(key, data)

    with opened(Racing(store)) as repository:
        repository.set_policies("a", [KeepLast(3)])
    assert keys_of(store, "policies/") == ["policies/a.0"]


def test_policies_that_are_too_large_are_refused_before_they_are_stored(store):
    with opened(store) as repository, pytest.raises(InvalidInputError, match=r"policies of run 'a': take \d+ bytes"):
        repository.set_policies("a", [KeepSteps(range(10**9, 10**9 + 300_000))])
    assert not keys_of(store, "policies/")


def test_an_unclear_commit_does_not_stop_gc_for_good(store, monkeypatch):
    """The store fails during a commit; when it works again, the same process collects the garbage of that save."""
    monkeypatch.setattr("snapstore.protocol.claim.COMMIT_ATTEMPTS", 1)
    faulty = FaultStore(store)
    with opened(faulty) as repository:
        repository.save(big(0), run="a", step=0)
        faulty.mode = "outage"
        real = faulty.put

        def put(key, data):
            if key.startswith("snapshots/"):
                faulty.at = len(faulty.log)
            real(key, data)

        faulty.put = put
        with pytest.raises(StorageError, match="could not be rolled back"):
            repository.save(big(1), run="a", step=1)
        faulty.put = real
        faulty.heal()
        assert len(keys_of(store, "sessions/")) == 1
        result = repository.gc()
        assert len(result.fenced) == 1
        assert repository.stats().unneeded_bytes == 0
        assert keys_of(store, "sessions/") == []


# --- the end of a process --------------------------------------------------------------------------------------------

PRELUDE = """
import itertools, os, signal, sys, threading, time
import numpy as np
from snapstore import Repository, SaveOptions, SnapshotManager
from snapstore.storage.local import LocalStore
BEGUN, STRUCK, PUTS, SLOW = threading.Event(), threading.Event(), itertools.count(1), True
class Slow(LocalStore):
    "Every pack takes a while, and says so when it begins. The one that calls for a signal waits until it has struck."
    def put(self, key, data):
        if key.startswith("packs/") and SLOW:
            number = next(PUTS)
            say("busy")
            BEGUN.set()
            STRUCK.wait(600 if {held!r} and number >= {held!r} else 0.15)
        super().put(key, data)
def say(*words):
    "One line in one write: what threads print at once is mixed up."
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def interrupted(*_):
    STRUCK.set()
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupted)
def state(n):
    return {{"w": np.random.default_rng(1).standard_normal(20000, np.float32) + np.float32(n), "n": n}}
snapshots = SnapshotManager(Slow({root!r}), run="a", options=SaveOptions(pack_bytes=16384, threads=2))
"""


TORCH = """
import torch
arrays = state
def state(n):
    return {"w": torch.from_numpy(arrays(n)["w"]), "n": n}
"""


def weights(n: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(20000, np.float32) + np.float32(n)


def run(root: Path, body: str, *, code: int = 0, kill: int | None = None, held: bool = False) -> str:
    """Run a training script; return its output. The script does not import torch: that takes seconds.

    Args:
        code: the expected exit code.
        kill: the signal to send when the third pack begins; the pack then waits for the signal.
        held: the third pack waits although no signal is sent.
    """
    script = PRELUDE.format(root=str(root), held=3 if kill or held else 0) + textwrap.dedent(body)
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment(),
    ) as process:
        out = ""
        if kill is not None:
            for _ in range(3):
                out += process.stdout.readline()
            process.send_signal(kill)
        try:
            out += process.communicate(timeout=600)[0]
        except subprocess.TimeoutExpired as hung:
            os.killpg(process.pid, signal.SIGKILL)  # forked children too
            pytest.fail(f"hangs after {(hung.output or b'').decode()}")
    assert process.returncode == code, out
    return out


@pytest.fixture
def root(tmp_path) -> Path:
    Repository.create(tmp_path / "r", chunk_bytes=4096).close()
    with SnapshotManager(tmp_path / "r", run="a", options=SaveOptions(threads=1)) as snapshots:
        snapshots.save(0, {"w": weights(0), "n": 0})
    return tmp_path / "r"


def check_after(root: Path, steps: list[int]) -> None:
    with Repository.open(root) as repository:
        assert [s.step for s in repository.snapshots("a")] == steps
        for step in steps:
            state = repository.restore(f"a@{step}")
            assert state["n"] == step
            assert np.asarray(state["w"]).tobytes() == weights(step).tobytes()
        assert repository.gc().waiting_for == []
        assert repository.stats().unneeded_bytes == 0
        assert repository.check("restore").ok
    store = LocalStore(root)
    assert keys_of(store, "sessions/") == []
    assert list((root / "tmp").iterdir()) == []


SAVE = "snapshots.save(1, state(1))\n"
#: The interpreter waits for the save of a daemon thread, though not for that thread.
DAEMON = f"one = threading.Thread(target=lambda: {SAVE.strip()}, daemon=True)\none.start()\none.join()"
ENDS = {
    "end": (SAVE, 0),
    "sys.exit": (f"{SAVE}sys.exit(3)", 3),
    "exception": (f"{SAVE}raise ZeroDivisionError", 1),
    "dropped": (f"{SAVE}del snapshots", 0),
    "torch": (TORCH + SAVE, 0),
    "daemon thread": (DAEMON, 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_ends_with_a_save_running(root, end):
    body, code = ENDS[end]
    out = run(root, body, code=code)
    assert "busy" in out
    assert "Warning" not in out
    check_after(root, [0, 1])


def test_a_save_in_an_exit_handler(root):
    """The interpreter does not wait for a thread that is started there."""
    out = run(root, "import atexit\natexit.register(lambda: (snapshots.save(1, state(1)), say('saved')))")
    assert out.endswith("busy\nsaved\n")
    check_after(root, [0, 1])


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_killed_in_mid_save(root, end):
    run(root, "snapshots.save(1, state(1))\ntime.sleep(30)", kill=end, code=-end)
    assert keys_of(LocalStore(root), "sessions/")
    check_after(root, [0])


def test_sigterm_with_time_to_live(root):
    """A scheduler sends SIGTERM seconds before SIGKILL: if a handler ends the program, the snapshot is committed."""
    run(
        root,
        """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: (STRUCK.set(), sys.exit(0)))
        snapshots.save(1, state(1))
        time.sleep(30)
        """,
        kill=signal.SIGTERM,
    )
    check_after(root, [0, 1])


def test_sigint_in_mid_save_leaves_a_snapshot(root):
    body = "snapshots.save(1, state(1))\nsnapshots.wait_until_finished()"
    out = run(root, body, kill=signal.SIGINT, code=-signal.SIGINT)
    assert "KeyboardInterrupt" in out
    check_after(root, [0, 1])


def test_keyboard_interrupt_while_waiting(root):
    """Ctrl-C in the training loop's wait for the last save: nothing is lost, and the loop can go on."""
    out = run(
        root,
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the save goes on waiting
        snapshots.save(1, state(1))
        try:
            snapshots.save(2, state(2))
        except KeyboardInterrupt:
            say("interrupted")
        say("idle", not snapshots._background.saving.locked())
        SLOW = False
        STRUCK.set()
        snapshots.save(3, state(3))  # must not begin before the first has ended: they share buffers
        snapshots.close()
        """,
        kill=signal.SIGINT,
    )
    assert "interrupted" in out
    assert "idle False" in out
    check_after(root, [0, 1, 3])


def calls_of(code: types.CodeType) -> list[int]:
    """Return the offsets in a function at which Ctrl-C may arrive: after its calls."""
    instructions = list(dis.get_instructions(code))
    return [b.offset for a, b in itertools.pairwise(instructions) if a.opname.startswith("CALL")]


@pytest.mark.parametrize("async_save", [True, False])
def test_ctrl_c_behind_any_call_of_save(async_save):
    """Whatever call is interrupted, the next save neither deadlocks nor is refused."""
    code, reached = SnapshotManager.save.__code__, 0
    for offset in calls_of(code):
        struck: list[int] = []

        def strike(frame, event, _, *, offset=offset, struck=struck):
            if frame.f_code is not code:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_lasti == offset and not struck:
                struck.append(frame.f_lineno)
                raise KeyboardInterrupt
            return strike

        with manager(MemoryStore(), async_save=async_save) as snapshots:
            tracing = sys.gettrace()
            sys.settrace(strike)
            try:
                with suppress(KeyboardInterrupt):
                    snapshots.save(1, big(1))
            finally:
                sys.settrace(tracing)
            held = snapshots._background.saving.acquire(timeout=600)
            assert held, struck
            snapshots._background.saving.release()
            snapshots.save(2, big(2))
            snapshots.wait_until_finished()
            assert 2 in snapshots.all_steps(), struck
        reached += len(struck)
    assert reached > 10


def test_exceptions_that_end_the_program_end_it_in_retention_too(tmp_path, monkeypatch):
    """A SIGTERM handler calls sys.exit, or Ctrl-C arrives, while a synchronous save forgets."""
    with manager(tmp_path / "repo", async_save=False, keep=[KeepLast(1)]) as snapshots:
        monkeypatch.setattr("snapstore.save.upkeep.may_forget", lambda *a, **k: sys.exit(3))
        with pytest.raises(SystemExit):
            snapshots.save(1, big(1))
        assert snapshots.all_steps() == [1]


def test_the_newest_is_another_one_once_it_is_collected(store, monkeypatch):
    """An evaluation restores the newest snapshot while the training run, which keeps only the last, replaces it."""
    with manager(store, keep=[KeepLast(1)]) as training, manager(store, read_only=True) as evaluation:
        training.save(1, big(1))
        training.wait_until_finished()
        from snapstore.restore import pipeline as module

        began, restore = iter([1]), module.restore

        def collected(*args, **options):
            if next(began, None):
                training.save(2, big(2))
                training.wait_until_finished()
            return restore(*args, **options)

        monkeypatch.setattr(module, "restore", collected)
        assert same(evaluation.restore(), big(2))


def test_os_exit_in_mid_save(root):
    run(root, "snapshots.save(1, state(1))\nBEGUN.wait()\nos._exit(0)", held=True)
    check_after(root, [0])


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_session(root):
    """A DataLoader worker may outlive its parent in this way."""
    out = run(
        root,
        """
        snapshots.save(1, state(1))
        BEGUN.wait()
        child = os.fork()
        if child == 0:
            os.close(1); os.close(2)
            time.sleep(600)
            os._exit(0)
        say("child", child)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        held=True,
        code=-signal.SIGKILL,
    )
    child = int(out.split("child ")[1].split()[0])
    try:
        os.kill(child, 0)
        check_after(root, [0])
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_with_a_save_running(root):
    """The child gets an error that tells it to open its own repository; that works; the parent's save commits."""
    out = run(
        root,
        """
        handle = snapshots.save(1, state(1))
        BEGUN.wait()
        child = os.fork()
        if child == 0:
            SLOW = False
            for use in (snapshots.repository.snapshots, snapshots.latest_step, snapshots.restore,
                        lambda: snapshots.save(9, state(9)),
                        lambda: snapshots.repository.save(state(5), run="c", step=5),
                        lambda: snapshots.repository.restore("a@0"), snapshots.repository.gc,
                        snapshots.repository.rebuild_index):
                try:
                    use()
                except Exception as error:
                    os.write(1, f"{type(error).__name__} {'fork' in str(error)}\\n".encode())
                else:
                    os.write(1, b"no error\\n")
            with Repository.open(sys.argv[0] if False else snapshots.repository.store.url) as mine:
                mine.save(state(7), run="child", step=7)
                assert np.array_equal(mine.restore("a@0")["w"], state(0)["w"])
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        STRUCK.set()
        say("status", status)
        say("parent", handle.result().ref)
        """,
        held=True,
    )
    assert out.count("InvalidInputError True") == 8, out
    assert "status 0" in out
    assert "parent a@1" in out
    with Repository.open(root) as repository:
        assert repository.restore("child@7")["n"] == 7
        assert repository.view().runs() == ["a", "child"]
        assert repository.check("restore").ok
    check_after(root, [0, 1])


def test_a_fork_while_the_index_is_written(root):
    """Only the parent holds the lock on the index's file: its child opens the index and blocks no process."""
    out = run(
        root,
        """
        environment = snapshots.repository.context.index._environment
        held, forked = threading.Event(), threading.Event()
        def write():
            with environment._locked():
                held.set()
                forked.wait()
        thread = threading.Thread(target=write)
        thread.start()
        held.wait()
        told, tells = os.pipe()
        child = os.fork()
        if child == 0:
            with Repository.open(snapshots.repository.store.url) as mine:
                os.write(1, f"child {len(mine.snapshots())}\\n".encode())
            os.write(tells, b"!")
            time.sleep(600)  # a DataLoader's worker, which lives on
            os._exit(0)
        time.sleep(1)
        forked.set()
        thread.join()
        snapshots.save(1, state(1))
        snapshots.wait_until_finished()
        say("parent", len(snapshots.all_steps()))
        os.read(told, 1)
        os.kill(child, signal.SIGKILL)
        """,
    )
    assert ("child 1" in out, "parent 2" in out) == (True, True), out


@pytest.mark.parametrize("state", ["", TORCH], ids=["numpy", "torch"])
def test_no_module_is_first_imported_in_the_background(root, state):
    """A child forked during an import would inherit the lock of that module, and hang when it imports the module."""
    out = run(
        root,
        f"""
{state}
state(0)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            say("imported", name)
sys.meta_path.insert(0, Finder())
SLOW = False
for step in 1, 2, 3:
    snapshots.save(step, state(step))
snapshots.close()
say("saved")
""",
    )
    assert out == "saved\n"


def test_a_forked_child_that_exits_leaves_the_parents_index():
    script = """
import os, sys
from pathlib import Path
from snapstore import Repository
repository = Repository.create("memory://x")
folder = repository.context.index.folder
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
assert folder.is_dir()
repository.save({"n": 1}, run="a", step=0)
repository.close()
assert not folder.exists()
"""
    done = run_python("-W", "error", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_two_opens_in_one_process_share_the_environment(root):
    with Repository.open(root) as one:
        with Repository.open(root) as two, Repository.open(str(root) + "/../r") as three:
            environments = {id(r.context.index._environment) for r in (one, two, three)}
            assert len(environments) == 1
            two.save({"n": 5, "w": weights(5)}, run="a", step=5)
            assert [s.step for s in one.snapshots("a")] == [0, 5]
        one.save({"n": 6, "w": weights(6)}, run="a", step=6)
        assert one.context.index._environment._users == 1
    assert str(index_of(root)) not in {path for _, path in Environment._open}
    check_after(root, [0, 5, 6])


def test_threads_of_one_repository(root):
    """Two runs save, a reader restores and gc runs, all at once."""
    with Repository.open(root, options=SaveOptions(pack_bytes=16384, threads=2)) as repository:

        def work(run: str) -> None:
            for step in range(6):
                if run == "gc":
                    repository.gc()
                elif run == "read":
                    assert repository.restore("a@0")["n"] == 0
                else:
                    repository.save({"w": torch.arange(9000.0) + step, "n": step}, run=run, step=step)
                    repository.forget([KeepLast(2)], run=run)

        assert together([partial(work, run) for run in ("x", "y", "gc", "read")]) == [None] * 4
        repository.gc()
        assert repository.check("restore").ok
        assert [s.step for s in repository.snapshots("x")] == [4, 5]


def test_a_tag_of_a_save_moves_to_it(tmp_path):
    with SnapshotManager(tmp_path / "repo", run="a", options=OPTIONS) as manager:
        for step in range(3):
            manager.save(step, {"w": np.arange(step, 500 + step)}, tags=["good", f"s{step}"])
        manager.wait_until_finished()
        assert [s.tags for s in manager.repository.snapshots("a")] == [["s0"], ["s1"], ["good", "s2"]]
        assert manager.repository.snapshot("a@good").step == 2


def test_save_from_a_signal_handler_inside_save_is_refused(tmp_path):
    """It would overwrite the buffers into which the interrupted save is copying."""
    caught = []

    class Interrupting:
        """Calls the manager as a signal handler would, while the state is being copied."""

        def state_dict(self):
            for call in (lambda: manager.save(9, {"w": np.ones(9)}, force=True), manager.wait_until_finished):
                with pytest.raises(InvalidInputError, match="signal handler"):
                    call()
            caught.append(True)
            return {"w": np.zeros(500)}

        def load_state_dict(self, state):
            raise AssertionError

    with SnapshotManager(tmp_path / "repo", run="a", options=OPTIONS) as manager:
        manager.save(1, {"model": Interrupting()})
        manager.save(2, {"w": np.zeros(500)})
        manager.wait_until_finished()
        assert caught
        assert manager.all_steps() == [1, 2]
        assert manager.repository.check("restore").ok


@pytest.mark.parametrize("before", [[], [0]])
def test_a_save_that_could_not_begin_leaves_the_way_free(store, monkeypatch, before):
    with manager(store) as snapshots:
        for step in before:
            snapshots.save(step, big(step)).result(30)
        with pytest.raises(InvalidInputError):
            snapshots.save(1, {"f": object()})
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no")))
            with pytest.raises(CapabilityError, match="cannot start a thread"):
                snapshots.save(1, big(1))
        assert snapshots.save(2, big(2)).result(30).step == 2
        assert snapshots.all_steps() == [*before, 2]


def test_best_is_by_the_policies_of_the_manager(store):
    """Another manager may have stored other policies; `restore("best")` and `best_step()` mean the same snapshot."""
    with SnapshotManager(store, run="a", keep=[KeepLast(9), KeepBest("loss")], options=OPTIONS) as snapshots:
        for step in range(3):
            snapshots.save(step, {"step": step}, metrics={"loss": step, "acc": step})
        assert snapshots.restore("best") == {"step": snapshots.best_step()} == {"step": 0}
    for keep, best in ((KeepBest("acc", mode="max"), 2), (KeepBest("loss"), 0), (KeepLast(1), 0), ((), 0)):
        with SnapshotManager(store, run="a", keep=keep, read_only=True, options=OPTIONS) as snapshots:
            assert snapshots.restore("best") == {"step": best}
    with SnapshotManager(store, run="a", keep=KeepBest("val"), read_only=True, options=OPTIONS) as snapshots:
        with pytest.raises(NotFoundError, match="has the metric 'val'"):
            snapshots.restore("best")
        snapshots.repository.tag("a@1", "best")
        assert snapshots.restore("best") == {"step": 1}


def test_best_step_is_of_the_save_that_a_step_means(tmp_path):
    with SnapshotManager(tmp_path / "repo", run="a", keep=[KeepLast(9), KeepBest("loss")], options=OPTIONS) as manager:
        for step, loss, tags in ((1, 0.1, ["first"]), (1, 9.0, []), (2, 1.0, [])):
            manager.save(step, {"w": np.full(500, loss)}, metrics={"loss": loss}, tags=tags)
        manager.wait_until_finished()
        assert manager.best_step() == 2


def test_a_forced_save_waits_where_others_are_skipped():
    store = GateStore()
    with SnapshotManager(store, run="a", on_busy="skip", options=OPTIONS) as manager:
        store.gate.clear()
        manager.save(1, {"w": np.zeros(500)})
        assert manager.save(2, {"w": np.ones(500)}).skipped
        threading.Timer(0.1, store.gate.set).start()
        assert not manager.save(3, {"w": np.ones(500)}, force=True).skipped
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]


def test_an_error_in_retention_is_raised_at_the_next_call(tmp_path, monkeypatch):
    with SnapshotManager(tmp_path / "repo", run="a", keep=[KeepLast(1)], options=OPTIONS) as manager:
        monkeypatch.setattr(
            "snapstore.save.upkeep.may_forget", lambda *a, **k: (_ for _ in ()).throw(MemoryError("none left"))
        )
        manager.save(1, {"w": np.zeros(500)})
        with pytest.raises(MemoryError):
            manager.wait_until_finished()
        assert manager.all_steps() == [1]


def test_a_child_forked_while_a_listing_runs_can_end():
    """In the child the index's lock may be held by a thread that only the parent has."""
    script = """
        import os, sys, threading, time
        import numpy as np
        from snapstore import SnapshotManager
        from snapstore.storage.memory import MemoryStore

        class Slow(MemoryStore):
            def list(self, prefix, key_only=None):
                time.sleep(0.3)
                return super().list(prefix, key_only)

        manager = SnapshotManager(Slow(), run="a")
        manager.save(1, {"w": np.zeros(5000)})
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        for _ in range(6000):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            time.sleep(0.1)
        else:
            os.kill(child, 9)
            sys.exit("the child hangs")
        manager.close()
    """
    done = run_python("-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr


def test_nothing_is_written_into_the_target_after_a_restore_has_failed(tmp_path):
    with Repository.create(tmp_path / "repo", chunk_bytes=65536) as repository:
        state = {f"w{i}": np.full(512 * 1024, i, np.float64) + np.arange(512 * 1024) for i in range(24)}
        repository.save(state, run="a", step=1)
        pack = sorted((tmp_path / "repo" / "packs").rglob("*"), key=lambda p: p.stat().st_size)[-1]
        flip_file(pack, pack.stat().st_size // 2)
        target = {name: np.zeros_like(value) for name, value in state.items()}
        with pytest.raises(IntegrityError):
            repository.restore_into("a@1", target)
        for value in target.values():
            value[:] = 0
        threading.Event().wait(0.3)
        assert not any(value.any() for value in target.values())


@pytest.mark.parametrize("restores", [False, True])
def test_two_jobs_on_one_run_are_warned(store, caplog, restores):
    """Each would restore what the other saved. A job that has restored the run is not warned."""
    with manager(store) as one, manager(store) as two:
        one.save(0, big(0)).result(30)
        one.save(1, big(1)).result(30)
        assert not caplog.records
        two.save(2, big(2)).result(30)  # it has saved nothing before: it may have been started again
        assert not caplog.records
        session._begun.clear()  # as in another process
        if restores:
            one.restore_into(big(9))
        one.save(3, big(3)).result(30)
        told = [r.getMessage() for r in caplog.records if "two jobs on one run" in r.getMessage()]
        assert len(told) == (0 if restores else 1), caplog.text
        if not restores:
            assert "another process has put a@2 (id:" in told[0]
            assert "since this one saved a@1" in told[0]


def test_one_job_that_forgets_and_goes_back_is_not_warned(store, caplog):
    with manager(store, keep=[KeepLast(1)]) as one:
        for step in (0, 1, 2, 1, 0, 5):
            one.save(step, big(step), force=True).result(30)
        one.wait_until_finished()
        one.restore_into(big(9), 5)
        one.save(6, big(6)).result(30)
    assert "two jobs" not in caplog.text


def test_a_process_that_saves_many_runs_keeps_the_manifests_of_few():
    """Runs that it saves again still build on their last saves."""
    with Repository.create(MemoryStore(), options=OPTIONS) as repository:
        for step in range(2):
            for run in range(12):
                saved = repository.save({"w": torch.full((3000,), float(run))}, run=f"r{run}", step=step)
                assert (saved.new_chunks > 0) == (step == 0)
        assert len(repository.lineage.cached_manifests()) == len(repository.lineage._named) == 8


def test_prepare_takes_an_iterator_as_save_does():
    state = {"w": torch.ones(3000)}
    with SnapshotManager(MemoryStore(), run="a", options=OPTIONS) as manager:
        manager.prepare(iter(state.items()))
        manager.save(1, iter(state.items()))
        assert torch.equal(manager.restore()["w"], state["w"])


# --- the first state ---


class Loader:
    """Draws a random number when it is asked for its state, as a data loader does."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("asked for its state")

    def load_state_dict(self, state: Any) -> None: ...


def unsaveable(count: int = 30) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    model.register_buffer("packed", torch.ones(2, 2).to_mkldnn())
    return {"model": model, "loader": Loader(), "codes": {f"c{n}": print for n in range(count)}}


def test_a_state_that_cannot_be_saved_is_found_at_the_first_call(store):
    """Else a training of hours ends at its first save. All bad leaves are in one error."""
    with manager(store, save_interval_steps=1000) as snapshots:
        with pytest.raises(InvalidInputError) as caught:
            snapshots.save(1, unsaveable())
        lines = str(caught.value).splitlines()
        assert lines[0].startswith("model.packed: torch._mkldnn tensor has no stored form")
        assert (len(lines), lines[-1]) == (21, "... and 11 more")
        assert snapshots.save(2, unsaveable()).skipped  # only the first state is checked
        with pytest.raises(InvalidInputError, match=r"codes\.c1: "):
            snapshots.save(1000, {"codes": {"c1": print}})
    assert not Repository.open(store).snapshots()


def test_what_is_no_state_does_not_count_as_the_first(store):
    with manager(store, save_interval_steps=10) as snapshots:
        pairs = iter([("w", np.zeros(3))])
        for nothing in (None, pairs):
            assert snapshots.save(1, nothing).skipped
        assert next(pairs)[0] == "w"
        with pytest.raises(InvalidInputError, match="codes: "):
            snapshots.save(2, {"codes": print})


def test_a_first_state_whose_loader_is_not_asked(store):
    state = {"loader": Loader(), "own": PerRank({"loader": Loader()}), "w": np.zeros(3)}
    with manager(store, save_interval_steps=10) as snapshots:
        assert snapshots.save(1, state).skipped


def test_prepare_finds_a_state_that_cannot_be_saved(store):
    with manager(store) as snapshots, pytest.raises(InvalidInputError, match=r"(?s)codes\.c0: .*\.\.\. and 10 more"):
        snapshots.prepare({"codes": unsaveable()["codes"]})


class Run(str, enum.Enum):  # noqa: UP042  a StrEnum is read as its value everywhere
    A = "exp"


def test_a_run_may_be_a_str_of_another_class(tmp_path):
    """Jobs read names from Enums and configs; all calls take the run by its value."""
    state = {"w": torch.arange(5000)}
    with SnapshotManager(tmp_path / "repo", run=Run.A) as snapshots:
        snapshots.save(0, state)
    target = {"w": torch.zeros(5000, dtype=torch.int64)}
    with SnapshotManager(tmp_path / "repo", run=Run.A) as snapshots:
        assert type(snapshots.run) is str
        assert snapshots.restore_into(target).step == 0
        assert torch.equal(snapshots.restore(0)["w"], state["w"])
        assert torch.equal(snapshots.restore()["w"], target["w"])
