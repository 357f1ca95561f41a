"""`on_error="warn"`: a store that is away ends no training, and the newest state is saved once it is back."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from botocore import exceptions as aws

from kit import waits
from kit.faults import Crash, FaultStore
from kit.processes import run_python
from kit.ranks import Managers, fail_message, together
from kit.repositories import OPTIONS, created, opened, same
from kit.s3_stores import moto_bucket
from kit.samples import some
from snapstore import (
    CapabilityError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    KeepLast,
    PerRank,
    Repository,
    SnapshotManager,
    SnapstoreError,
    StorageError,
    StorageFullError,
)
from snapstore.save import retrying
from snapstore.storage import atomic_write, progress
from snapstore.storage.local import LocalStore
from snapstore.storage.os_errors import translate
from snapstore.storage.s3 import retry as s3_retry
from snapstore.storage.s3.failures import Failure, failure_of
from snapstore.storage.s3.retry import pause as pause_of_s3
from snapstore.storage.s3.store import S3Store


def until(condition):
    waits.until(condition, 60)  # of a hang


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "RETRY_S", 0.02)
    monkeypatch.setattr(retrying, "RETRY_MAX_S", 0.2)


@pytest.fixture
def store():
    return FaultStore(created())


def manager(store, run="a", **options):
    return SnapshotManager(store, run=run, options=OPTIONS, **{"on_error": "warn"} | options)


def state(step, size=3000):
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    values[: step + 1] += 1
    return {"w": torch.from_numpy(values), "step": step}


def away(store, mode="outage"):
    store.at, store.mode = len(store.log), mode


class Silent(FaultStore):
    """Answers nothing while it is `silent`, as S3 that is gone: each request is sent again and again.

    Attributes:
        silent_at: prefixes of keys; the first delete of such a key makes it silent.
    """

    silent, silent_at = False, ()

    def _act(self, name, key, effect):
        if name == "delete" and key.startswith(self.silent_at):
            self.silent = True
        try:
            while self.silent:
                s3_retry.pause(1)
        finally:
            progress.end_retry()
        return super()._act(name, key, effect)


class Lost(Silent):
    """Goes away at the first record, which lands."""

    def put(self, key, data):
        if key.startswith("snapshots/") and self.at is None and not self.fired:
            away(self, "lost-outage")
        super().put(key, data)


def pending(snapshots):
    """Wait until the save has failed once."""
    until(lambda: snapshots._retrying.is_pending(snapshots._running))


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_is_repeated_until_its_store_is_back(store, async_save, caplog):
    caplog.set_level(logging.INFO, "snapstore")
    with manager(store, async_save=async_save) as snapshots:
        snapshots.save(0, state(0)).result()
        away(store)
        values = state(1)
        handle = snapshots.save(1, values)
        values["w"].zero_()  # the copy is retried
        pending(snapshots)
        assert not handle.done()
        until(lambda: len(store.log) > store.at + 3)
        store.heal()
        assert handle.result(30).step == 1
        assert same(snapshots.restore(1), state(1))
        assert snapshots.save(2, state(2)).result().depth == 2  # its base is not lost
    texts = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert re.match(
        r"run=a step=1 is not durable yet: attempt 1 has failed, .*nothing is durable since step 0, \d{4}-", texts[0]
    )
    assert re.match(r"run=a step=1 is durable, after \d+ s, \d+ failed attempts, and 0 saves that newer", texts[-1])


def test_the_newest_state_replaces_the_pending_one_at_once(store, caplog):
    caplog.set_level(logging.INFO, "snapstore")
    with manager(store) as snapshots:
        snapshots.save(0, state(0)).result()
        away(store)
        handles = []
        for step in range(1, 6):
            began = time.monotonic()
            handles.append(snapshots.save(step, state(step)))
            assert time.monotonic() - began < 60
            pending(snapshots)
        assert [h.skipped for h in handles] == [True] * 4 + [False]
        assert [h.result() for h in handles[:-1]] == [None] * 4
        store.heal()
        assert handles[-1].result(30).step == 5
        assert snapshots.all_steps() == [0, 5]
        assert same(snapshots.restore(), state(5))
    for step in range(1, 5):
        assert f"run=a step={step}: save a@{step + 1} has replaced this one" in caplog.text
    assert "4 saves that newer ones replaced" in caplog.text


def test_a_state_in_back_off_is_never_kept_by_skipping_a_newer_one(store):
    with manager(store, on_busy="skip") as snapshots:
        away(store)
        first = snapshots.save(0, state(0))
        pending(snapshots)
        second = snapshots.save(1, state(1))
        assert (first.skipped, second.skipped) == (True, False)
        pending(snapshots)
        store.heal()
        assert second.result(30).step == 1


@pytest.mark.parametrize("call", ["wait_until_finished", "close", "result", "restore", "restore_into"])
def test_a_caller_that_waits_gets_one_more_attempt_and_its_error(store, call, monkeypatch):
    monkeypatch.setattr(retrying, "RETRY_S", 600.0)
    monkeypatch.setattr(retrying, "RETRY_MAX_S", 600.0)
    snapshots = manager(store)
    snapshots.save(0, state(0)).result()
    away(store)
    handle = snapshots.save(1, state(1))
    until(lambda: snapshots._running.is_pausing)
    tried = len(store.log)
    calls = {"result": handle.result, "restore_into": lambda: snapshots.restore_into(state(9))}
    with pytest.raises(StorageError, match=r"^config: get failed \(injected: outage\)$"):
        calls.get(call, getattr(snapshots, call, None))()
    assert len(store.log) == tried + 1
    store.heal()
    if call != "close":
        assert snapshots.save(2, state(2)).result(30).step == 2  # the error was raised: it is not raised again
        assert snapshots.all_steps() == [0, 2]
        snapshots.close()


@pytest.mark.parametrize("call", ["wait_until_finished", "close", "result", "restore"])
def test_a_caller_that_waits_gets_a_pending_save_committed_if_the_store_is_back(store, call, monkeypatch):
    monkeypatch.setattr(retrying, "RETRY_S", 600.0)
    snapshots = manager(store)
    away(store)
    handle = snapshots.save(1, state(1))
    until(lambda: snapshots._running.is_pausing)
    store.heal()
    (handle.result if call == "result" else getattr(snapshots, call))()
    assert handle.result().step == 1
    snapshots.close()


@pytest.mark.parametrize("timeout", [0.2, 5.0])
def test_close_with_a_timeout_ends_a_pending_save(store, timeout, monkeypatch):
    monkeypatch.setattr(retrying, "RETRY_S", 600.0)
    snapshots = manager(store)
    away(store)
    handle = snapshots.save(1, state(1))
    until(lambda: snapshots._running.is_pausing)
    with pytest.raises(StorageError, match="injected: outage"):
        snapshots.close(timeout)
    assert handle.done()


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("later", [True, False])
def test_an_error_that_lasts_is_raised_as_without_the_option(store, async_save, later):
    """At the first attempt and at a later one."""
    with manager(store, async_save=async_save) as snapshots:
        if later:
            away(store)
            handle = snapshots.save(0, state(0))
            pending(snapshots)
        away(store, "full")
        if not later and not async_save:
            with pytest.raises(StorageFullError):
                snapshots.save(0, state(0))
        else:
            handle = handle if later else snapshots.save(0, state(0))
            until(handle.done)
            with pytest.raises(StorageFullError, match="save a@1 was not begun: the save of a@0 has failed"):
                snapshots.save(1, state(1))
        store.heal()
        assert snapshots.save(2, state(2)).result().step == 2


def test_an_outcome_that_is_unclear_is_settled_before_the_next_attempt(store):
    """The record has landed, and the store went away before it could say so: the step is saved once."""
    lost = Lost(store.inner)
    with manager(lost) as snapshots:
        handle = snapshots.save(0, state(0))
        until(lambda: snapshots._retrying._attempts > 3)  # the store cannot tell at several attempts
        lost.heal()
        assert handle.result(60).step == 0
        assert snapshots.save(1, state(1)).result().depth == 1  # a delta of it
    with opened(store.inner) as repository:
        assert [s.step for s in repository.snapshots()] == [0, 1]
        assert repository.check("restore").ok


@pytest.mark.parametrize("ended", ["by result", "by close"])
def test_no_error_says_that_nothing_was_committed_if_that_is_unknown(store, ended, monkeypatch):
    """The record has landed; the store is away, or silent, until the save ends."""
    monkeypatch.setattr(retrying, "RETRY_S", 600.0)
    lost = Lost(store.inner)
    snapshots = manager(lost)
    handle = snapshots.save(0, state(0))
    until(lambda: lost.fired and snapshots._running.is_pausing)
    if ended == "by close":
        lost.heal()
        lost.silent = True
        with suppress(SnapstoreError, TimeoutError):
            snapshots.close(0.5)
    with pytest.raises(StorageError, match=r"; whether it was committed is unknown: run 'snapstore log'") as caught:
        handle.result()
    assert "nothing was committed" not in str(caught.value)
    lost.silent = False
    lost.heal()
    with suppress(SnapstoreError):
        snapshots.close()
    with opened(store.inner) as repository:
        assert [s.step for s in repository.snapshots()] == [0]


def test_a_record_whose_fsync_failed_is_saved_again(tmp_path, monkeypatch):
    """The record is there, and this process can never tell whether it is durable: the save does not wait for that."""
    failed = []

    def fsync(folder, shown):
        if shown.startswith("snapshots/a/") and len(shown) > 50 and not failed:
            failed.append(shown)
            raise OSError(errno.EIO, "failed")
        return real(folder, shown)

    real = atomic_write.fsync_directory
    monkeypatch.setattr(atomic_write, "fsync_directory", fsync)
    with manager(tmp_path / "r") as snapshots:
        assert snapshots.save(0, state(0)).result(60).step == 0
        assert failed
        assert snapshots.save(1, state(1)).result(60).step == 1


@pytest.mark.parametrize("replaced", [False, True])
def test_failed_attempts_leave_one_session_at_most(replaced, tmp_path, monkeypatch):
    """Of one save, and of saves that replace each other: no lock, descriptor or object is left of each."""
    bad = False

    def put(self, key, data):
        if bad and (key.startswith("snapshots/") or (key.startswith("manifests/") and not replaced)):
            raise StorageError(f"{key}: cannot write")
        return real(self, key, data)

    def held():
        packs = sum(path.is_file() for path in (tmp_path / "r/packs").rglob("*"))
        return len(list(Path("/proc/self/fd").iterdir())), len(list((tmp_path / "r/sessions").iterdir())), packs

    def attempts(number):
        until(lambda: snapshots._retrying._attempts >= number)
        until(lambda: snapshots._running.is_pausing)

    real = LocalStore.put
    monkeypatch.setattr(LocalStore, "put", put)
    with manager(tmp_path / "r") as snapshots:
        snapshots.save(0, state(0)).result()
        bad = True
        handle = snapshots.save(1, state(1))
        attempts(2)
        first = held()
        for number in range(3, 8):
            if replaced:
                handle = snapshots.save(number, state(number))
            attempts(number)
        now = held()
        assert (now[0] <= first[0] + 1, now[1:]) == (True, first[1:])
        bad = False
        handle.result(60)
        assert held()[1:] == (0, 2)
    with opened(tmp_path / "r") as repository:
        assert repository.check("restore").ok


def test_failed_attempts_leave_no_packs(store):
    """An attempt whose aborted record could be made: the next one deletes what it has put."""

    class NoManifests(FaultStore):
        bad = False

        def put(self, key, data):
            if self.bad and key.startswith("manifests/"):
                raise StorageError(f"{key}: cannot write")
            super().put(key, data)

    bad = NoManifests(store.inner)
    with manager(bad) as snapshots:
        snapshots.save(0, state(0)).result()
        before = len(list(store.inner.list("packs/")))
        bad.bad = True
        handle = snapshots.save(1, state(1))
        until(lambda: snapshots._retrying._attempts > 5)
        assert len(list(store.inner.list("packs/"))) <= before + 1  # of the last attempt
        bad.bad = False
        assert handle.result(60).step == 1
        assert len(list(store.inner.list("packs/"))) == before + 1
    with opened(store.inner) as repository:
        assert repository.check("restore").ok


def test_a_caller_that_only_looks_ends_no_save(store):
    """`result(timeout)` raises TimeoutError, and the save is tried again as before."""
    with manager(store) as snapshots:
        away(store)
        handle = snapshots.save(0, state(0))
        for _ in range(5):
            with pytest.raises(TimeoutError):
                handle.result(0.05)
        tried = snapshots._retrying._attempts
        until(lambda: snapshots._retrying._attempts > tried + 2)
        assert not handle.done()
        store.heal()
        assert handle.result(60).step == 0


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
def test_a_store_that_is_silent_during_gc_keeps_no_newer_save(store, on_busy, monkeypatch, caplog):
    monkeypatch.setattr(retrying, "SILENT_S", 0.3)
    quiet = Silent(store.inner)
    with manager(quiet, on_busy=on_busy, keep=KeepLast(1)) as snapshots:
        for step in range(2):
            snapshots.save(step, state(step)).result()
            snapshots._background.join()
        quiet.silent_at = ("packs/", "manifests/", "gc/")
        snapshots.save(2, state(2)).result()
        until(lambda: quiet.silent)
        if on_busy == "skip":
            until(lambda: not snapshots._background.is_busy())
        handle = snapshots.save(3, state(3))  # it would wait as long as the store is silent
        assert quiet.silent
        assert "retention ended early, the next save tries again: S3 has not answered" in caplog.text
        quiet.silent_at, quiet.silent = (), False
        assert handle.result(60).step == 3
        snapshots.wait_until_finished()
        assert snapshots.all_steps() == [3]


def test_the_log_says_why_a_newer_save_has_replaced_the_first_attempt(store, monkeypatch, caplog):
    monkeypatch.setattr(retrying, "SILENT_S", 0.2)
    monkeypatch.setattr(retrying, "ANSWER_S", 0.2)
    quiet = Silent(store.inner)
    with manager(quiet) as snapshots:
        snapshots.save(0, state(0)).result()
        quiet.silent = True
        for step in range(1, 4):
            handle = snapshots.save(step, state(step))
        quiet.silent = False
        assert handle.result(60).step == 3
    first = next(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert re.match(r"run=a step=1 is not durable yet: attempt 1 has failed, .*: S3 has not answered for \d+ s$", first)
    assert "2 failed attempts, and 2 saves that newer ones replaced" in caplog.text
    assert "has replaced it" not in caplog.text


def test_the_copies_of_a_pending_save_are_all_that_it_keeps(store):
    """Two copies of the state in all, as without an outage: the base, and the pending state."""
    with manager(store) as snapshots:
        for step in range(2):
            snapshots.save(step, state(step, 300_000)).result()
        buffers = {id(b) for held in (snapshots._staging._base, snapshots._staging._spare) for b in held.values()}
        assert len(buffers) == 2
        away(store)
        for step in range(2, 9):
            snapshots.save(step, state(step, 300_000))
            pending(snapshots)
            now = [b for held in (snapshots._staging._base, snapshots._staging._spare) for b in held.values()]
            assert {id(b) for b in now} == buffers
        store.heal()


def test_an_iterator_has_one_attempt(store):
    with manager(store) as snapshots:
        away(store)
        with pytest.raises(StorageError):
            snapshots.save(0, iter([("a", torch.zeros(4))]))
        store.heal()


def test_prepare_does_not_wait_for_a_pending_save(store):
    with manager(store) as snapshots:
        away(store)
        snapshots.save(0, state(0))
        pending(snapshots)
        snapshots.prepare(state(0))
        store.heal()


def test_a_bad_choice_is_refused(store):
    with pytest.raises(InvalidInputError, match="on_error 'log': expected"):
        manager(store, on_error="log")


# -- several ranks

COUNT = 3


def job(inner, **options):
    stores = [FaultStore(inner) for _ in range(COUNT)]
    return Managers(inner, COUNT, stores=stores, **{"on_error": "warn"} | options), stores


def rank_state(step, rank):
    return {"own": PerRank(rank), "w": torch.full((3000,), float(step)), "step": step}


def tried(managers):
    """Wait until a save has failed once on all ranks."""
    until(lambda: all(m._retrying.is_pending(m._running) for m in managers))


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("bad", [[0], [1], [2], [0, 1, 2]])
def test_ranks_repeat_a_save_together(store, bad, async_save):
    """The store is away for some ranks; all ranks try again, and commit together."""
    managers, stores = job(store.inner, async_save=async_save)
    managers.each(lambda m, r: m.save(0, rank_state(0, r)).result())
    for rank in bad:
        away(stores[rank])
    handles = managers.each(lambda m, r: m.save(1, rank_state(1, r)))
    tried(managers)
    first = stores[bad[0]]  # if rank 0's store is away, the others are not asked
    tried_before = len(first.log)
    until(lambda: len(first.log) > tried_before)
    for rank in bad:
        stores[rank].heal()
    found = managers.each(lambda m, r: handles[r].result(60))
    assert [one.id for one in found] == [found[0].id] * COUNT
    assert managers.each(lambda m, r: m.restore()["step"]) == [1] * COUNT
    assert managers.each(lambda m, r: m.save(2, rank_state(2, r)).result().step) == [2] * COUNT
    assert managers.end() == [None] * COUNT
    with opened(store.inner) as repository:
        assert [s.step for s in repository.snapshots()] == [0, 1, 2]
        assert repository.check("restore").ok


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
@pytest.mark.parametrize("bad", [[0], [2], [0, 1, 2]])
def test_a_newer_state_replaces_the_pending_one_on_all_ranks(store, bad, on_busy):
    managers, stores = job(store.inner, on_busy=on_busy)
    for rank in bad:
        away(stores[rank])
    handles = []
    for step in range(4):
        handles.append(managers.each(lambda m, r, s=step: m.save(s, rank_state(s, r))))
        tried(managers)
    assert [[h.skipped for h in of] for of in handles] == [[True] * COUNT] * 3 + [[False] * COUNT]
    for rank in bad:
        stores[rank].heal()
    assert managers.each(lambda m, r: handles[-1][r].result(60).step) == [3] * COUNT
    assert managers.each(lambda m, r: m.all_steps()) == [[3]] * COUNT
    assert managers.end() == [None] * COUNT


@pytest.mark.parametrize("call", ["wait_until_finished", "close", "restore", "result of rank 0", "result of rank 2"])
@pytest.mark.parametrize("bad", [0, 1])
def test_ranks_that_wait_get_one_more_attempt_and_its_error(store, call, bad, monkeypatch):
    monkeypatch.setattr(retrying, "RETRY_S", 600.0)
    monkeypatch.setattr(retrying, "RETRY_MAX_S", 600.0)
    managers, stores = job(store.inner)
    managers.each(lambda m, r: m.save(0, rank_state(0, r)).result())
    away(stores[bad])
    handles = managers.each(lambda m, r: m.save(1, rank_state(1, r)))
    until(lambda: managers[0]._running.is_pausing)
    if call.startswith("result"):
        asking = int(call[-1])
        with pytest.raises(StorageError, match="injected"):
            handles[asking].result()
        assert all(isinstance(one, StorageError) for one in managers.all(lambda m, r: handles[r].result(60)))
    else:
        found = managers.all(lambda m, r: getattr(m, call)())
        assert all(isinstance(one, StorageError) and "injected" in str(one) for one in found), found
    stores[bad].heal()
    if call != "close":
        assert managers.each(lambda m, r: m.save(2, rank_state(2, r)).result(60).step) == [2] * COUNT
        assert managers.end() == [None] * COUNT


@pytest.mark.parametrize("bad", range(COUNT))
@pytest.mark.parametrize("later", [True, False])
def test_an_error_that_lasts_on_one_rank_ends_the_save_on_all(store, bad, later):
    managers, stores = job(store.inner)
    if later:
        away(stores[bad])
        handles = managers.each(lambda m, r: m.save(0, rank_state(0, r)))
        tried(managers)
    away(stores[bad], "full")
    if not later:
        handles = managers.each(lambda m, r: m.save(0, rank_state(0, r)))
    until(lambda: all(h.done() for h in handles))
    assert all(isinstance(one, StorageFullError) for one in managers.all(lambda m, r: m.save(1, rank_state(1, r))))
    stores[bad].heal()
    assert managers.each(lambda m, r: m.save(2, rank_state(2, r)).result(60).step) == [2] * COUNT
    assert managers.end() == [None] * COUNT


def test_ranks_settle_an_outcome_that_is_unclear(store):
    """Rank 0's record lands, and its store goes away before it can know: all ranks get that snapshot, once."""
    lost = Lost(store.inner)
    managers = Managers(
        store.inner, COUNT, stores=[lost, *(FaultStore(store.inner) for _ in range(2))], on_error="warn"
    )
    handles = managers.each(lambda m, r: m.save(0, rank_state(0, r)))
    until(lambda: lost.fired and managers[0]._running.is_pausing)
    lost.heal()
    found = managers.each(lambda m, r: handles[r].result(60))
    assert len({one.id for one in found}) == 1
    assert managers.each(lambda m, r: m.save(1, rank_state(1, r)).result().step) == [1] * COUNT
    assert managers.end() == [None] * COUNT
    with opened(store.inner) as repository:
        assert [s.step for s in repository.snapshots()] == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_closes_with_a_timeout_ends_the_pending_save_on_all(store, rank, monkeypatch):
    monkeypatch.setattr(retrying, "RETRY_S", 600.0)
    managers, stores = job(store.inner)
    away(stores[2])
    handles = managers.each(lambda m, r: m.save(0, rank_state(0, r)))
    until(lambda: managers[0]._running.is_pausing)
    managers.all(lambda m, r: m.close(1.0) if r == rank else None)
    until(lambda: all(h.done() for h in handles))
    stores[2].heal()
    managers.end()


def test_ranks_must_agree_on_what_an_error_does(store):
    with pytest.raises(InvalidInputError, match="on_error='raise'"):
        Managers(store.inner, COUNT, of_rank=lambda rank: {"on_error": "raise" if rank == 1 else "warn"})


class SilentFor(FaultStore):
    """While it is `silent`, requests are sent again and again, as to an S3 that does not answer."""

    silent, put_s, request_s, loses_record = False, 0.0, 60.0, False

    def _act(self, name, key, effect):
        attempt, end = 1, time.monotonic() + self.request_s
        try:
            while self.silent:
                if time.monotonic() > end:
                    raise StorageError(f"{key}: no answer (injected)")
                pause_of_s3(min(attempt, 3))
                attempt += 1
        finally:
            progress.end_retry()
        return super()._act(name, key, effect)

    def put(self, key, data):
        if key.startswith("packs/"):
            time.sleep(self.put_s)
        if key.startswith("snapshots/") and self.loses_record and not self.fired:
            away(self, "lost-outage")
        super().put(key, data)


@pytest.fixture
def silent_job(store, monkeypatch):
    """Two ranks whose stores may be silent, and short times for that."""
    monkeypatch.setattr(retrying, "SILENT_S", 0.5)
    monkeypatch.setattr(retrying, "ANSWER_S", 0.5)
    stores = [SilentFor(store.inner) for _ in range(2)]
    managers = Managers(store.inner, 2, stores=stores, on_error="warn", total_s=120.0)
    managers.each(lambda m, r: m.save(0, rank_state(0, r)).result())
    yield managers, stores
    assert managers.end() == [None] * 2
    with opened(store.inner) as repository:
        assert repository.check("restore").ok


def test_a_healthy_store_commits_after_a_silent_first_attempt_was_replaced(silent_job):
    """Its puts take longer than a newer save waits for an answer, and the saves follow each other soon."""
    managers, stores = silent_job
    for store in stores:
        store.silent = True
    managers.each(lambda m, r: m.save(1, rank_state(1, r)))
    until(lambda: (progress.retrying(managers[0]._running.watch) or ("", 0))[1] > retrying.SILENT_S)
    handles = [managers.each(lambda m, r: m.save(2, rank_state(2, r)))]
    for store in stores:
        store.silent, store.put_s = False, 1.2
    for step in range(3, 6):
        handles.append(managers.each(lambda m, r, s=step: m.save(s, rank_state(s, r))))
        time.sleep(0.7)
    assert not all(of[0].skipped for of in handles[:-1])
    assert [h.result(60).step for h in handles[-1]] == [5, 5]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_silent_store_of_one_rank_stalls_no_rank(silent_job, bad, caplog):
    """Each `save` returns long before the store's requests end: at the first attempt, and at later ones."""
    managers, stores = silent_job
    stores[bad].silent = True
    handles = []
    for step in range(1, 5):
        began = time.monotonic()
        handles.append(managers.each(lambda m, r, s=step: m.save(s, rank_state(s, r))))
        assert time.monotonic() - began < stores[bad].request_s / 2
    assert [[h.skipped for h in of] for of in handles] == [[True] * 2] * 3 + [[False] * 2]
    stores[bad].silent = False
    assert [h.result(60).step for h in handles[-1]] == [4, 4]
    assert managers.each(lambda m, r: m.all_steps()) == [[0, 4]] * 2
    assert "cannot be used" not in caplog.text  # no base was left out, to store all in full, for a silent store


@pytest.mark.parametrize("call", ["close", "newer state"])
def test_no_rank_says_that_nothing_was_committed_if_an_attempt_before_may_have_been(silent_job, call):
    """The record has landed, unheard; then rank 0's store is silent, and the save ends before that can be settled."""
    managers, stores = silent_job
    first = stores[0]
    first.loses_record = True
    handles = managers.each(lambda m, r: m.save(1, rank_state(1, r)))
    until(lambda: managers[0]._running.is_pausing)
    first.silent = True
    first.heal()
    until(lambda: progress.retrying(managers[0]._running.watch))
    if call == "close":
        found = managers.all(lambda m, _: m.close(0.5))
        assert all("whether it was committed is unknown" in str(one) for one in found), found
        found = managers.all(lambda m, r: handles[r].result(60))
        assert all("whether it was committed is unknown" in str(one) for one in found), found
        assert not any("nothing was committed" in str(one) for one in found), found
        first.silent = False
    else:
        newer = managers.each(lambda m, r: m.save(2, rank_state(2, r)))
        first.silent = False
        assert [h.result(60).step for h in newer] == [2, 2]
        assert all(h.skipped for h in handles)
    with opened(first.inner) as repository:
        assert {s.step for s in repository.snapshots()} >= {0, 1}


# -- the table of docs/guides/recovery.md


class Failing(FaultStore):
    """Raises errors, made by the code of a store, when a save begins."""

    error: Exception | None = None

    def lock(self, key, data):
        if self.error is not None:
            raise self.error
        super().lock(key, data)


def of_errno(*names):
    return [translate("sessions/x: cannot write", OSError(getattr(errno, name), "failed")) for name in names]


def of_s3(*answers):
    return [Failure("ClientError", "", status=status, code=code).as_error("sessions/x") for status, code in answers]


def of_botocore(*failures):
    return [failure_of(error).as_error("sessions/x") for error in failures]


_URL = {"endpoint_url": "http://s3"}
#: What has happened -> errors that a store raises then, or the name of a test.
ROWS = {
    "the volume is unmounted: its folder is missing, or holds no repository": "test_a_volume_that_is_unmounted",
    "the file system fails (EIO, ESTALE, ENOTCONN, ETIMEDOUT, EHOSTDOWN), or this process has too many open files": (
        of_errno("EIO", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EMFILE")
    ),
    "S3 cannot be reached, or does not answer in time": of_botocore(
        aws.EndpointConnectionError(**_URL), aws.ConnectTimeoutError(**_URL), aws.ReadTimeoutError(**_URL)
    ),
    "S3 answers with a status of 5xx, 408 or 429, asks for fewer requests, or knows no such bucket": of_s3(
        *[(500, "InternalError"), (502, "502"), (503, "SlowDown"), (520, "520"), (408, "RequestTimeout"), (429, "429")],
        (404, "NoSuchBucket"),
    ),
    "a gc took the save for dead (`ConflictError`)": "test_a_save_that_a_gc_took_for_dead_is_repeated",
    "the store went away before it could say whether the save was committed": (
        "test_an_outcome_that_is_unclear_is_settled_before_the_next_attempt"
    ),
    "the disk or the quota is full (`StorageFullError`)": [
        *of_errno("ENOSPC", "EDQUOT"), *of_s3((507, "507"), (403, "QuotaExceeded"))
    ],
    "a permission is refused (EACCES, EPERM, EROFS; S3: 403, or credentials that have expired or are unknown)": [
        *of_errno("EACCES", "EPERM", "EROFS"),
        *of_s3((403, "AccessDenied"), (403, "403"), (400, "ExpiredToken"), (403, "InvalidAccessKeyId")),
        *of_botocore(aws.NoCredentialsError()),
    ],
    "another repository is in the place": "test_a_repository_that_was_replaced",
    "bytes are damaged or altered (`IntegrityError`, `FormatError`)": [IntegrityError("a"), FormatError("b")],
    "the state or an argument cannot be saved (`InvalidInputError`)": [InvalidInputError("a")],
    "the machine or the server lacks something, such as memory (`CapabilityError`)": [
        CapabilityError("a"), *of_s3((501, "NotImplemented"))
    ],
    "another rank has ended, or does not answer (`RanksError`)": "test_a_rank_that_is_dead_ends_the_save",
}  # fmt: skip


def table():
    text = (Path(__file__).parents[2] / "docs/guides/recovery.md").read_text()
    rows = text.partition('| what has happened | with "warn" |\n|---|---|\n')[2].partition("\n\n")[0].splitlines()
    return dict(row.strip("| ").split(" | ") for row in rows)


def test_the_guide_has_a_row_for_each_case_and_each_row_a_case():
    assert table().keys() == ROWS.keys()
    assert all(row in globals() for row in ROWS.values() if isinstance(row, str))


@pytest.mark.parametrize(
    ("what", "number"),
    [(what, i) for what, row in ROWS.items() if isinstance(row, list) for i in range(len(row))],
)
def test_each_row_of_the_table(what, number):
    store = Failing(created())
    error = ROWS[what][number]
    with manager(store) as snapshots:
        store.error = error
        handle = snapshots.save(0, state(0))
        if table()[what] == "retried":
            until(lambda: snapshots._running.is_pausing)
            store.error = None
            assert handle.result(60).step == 0
        else:
            until(handle.done)
            with pytest.raises(type(error), match="save a@1 was not begun"):
                snapshots.save(1, state(1))
            store.error = None


@pytest.mark.parametrize("left", ["missing", "empty"])
def test_a_volume_that_is_unmounted(left, tmp_path):
    place, aside = tmp_path / "r", tmp_path / "aside"
    with manager(place) as snapshots:
        snapshots.save(0, state(0)).result()
        place.rename(aside)
        if left == "empty":
            place.mkdir()
        handle = snapshots.save(1, state(1))
        until(lambda: snapshots._running.is_pausing)
        if left == "empty":
            assert list(place.iterdir()) == []
            place.rmdir()
        shutil.copytree(aside, place)  # another device and inode, as after a mount
        assert handle.result(60).step == 1
        assert table()["the volume is unmounted: its folder is missing, or holds no repository"] == "retried"


def test_a_repository_that_was_replaced(tmp_path):
    place = tmp_path / "r"
    with manager(place) as snapshots:
        snapshots.save(0, state(0)).result()
        place.rename(tmp_path / "aside")
        Repository.create(place).close()
        handle = snapshots.save(1, state(1))
        until(handle.done)
        with pytest.raises(StorageError, match="not the repository that was opened: its config has another uuid"):
            snapshots.save(2, state(2))
        assert table()["another repository is in the place"] == "raised"


def test_a_save_that_a_gc_took_for_dead_is_repeated(store, caplog):
    class Fenced(FaultStore):
        def put(self, key, data):
            if key.startswith("packs/") and not self.fired:
                self.fired = True
                for info in list(self.inner.list("sessions/")):
                    self.inner.release(info.key)
            super().put(key, data)

    with manager(Fenced(store.inner)) as snapshots:
        handle = snapshots.save(0, state(0))
        until(lambda: "its session is gone" in caplog.text)
        until(lambda: snapshots.latest_step() == 0)
        assert handle.result(60).step == 0
        assert table()["a gc took the save for dead (`ConflictError`)"] == "retried"


def test_a_rank_that_is_dead_ends_the_save(store):
    managers, stores = job(store.inner, silent_s=0.5)
    away(stores[1])
    handles = managers.each(lambda m, r: m.save(0, rank_state(0, r)))
    tried(managers)
    managers.ranks[2].dead = True
    for handle in handles[:2]:
        with pytest.raises(SnapstoreError):
            handle.result(60)
    stores[1].heal()
    assert table()["another rank has ended, or does not answer (`RanksError`)"] == "raised"
    managers.all(lambda m, _: m.close(1.0))


# -- S3


def test_a_newer_save_does_not_wait_for_the_retries_of_requests(monkeypatch):
    """A request to a server that is gone is sent ten times, for 35 s; no attempt keeps a newer save so long."""
    monkeypatch.setattr(retrying, "SILENT_S", 0.5)
    monkeypatch.setattr(retrying, "ANSWER_S", 0.5)
    is_down = False

    def fail(**_):
        if is_down:
            raise aws.EndpointConnectionError(endpoint_url="http://s3")

    with moto_bucket(monkeypatch) as url:
        place = S3Store(f"{url}/r")
        place._client.meta.events.register("before-send.s3", fail)
        with manager(place) as snapshots:
            snapshots.save(0, state(0)).result()
            is_down = True
            handles = [snapshots.save(1, state(1))]
            for step in range(2, 5):
                began = time.monotonic()
                handles.append(snapshots.save(step, state(step)))
                assert time.monotonic() - began < 15
            assert [h.skipped for h in handles] == [True, True, True, False]
            is_down = False
            assert handles[-1].result(60).step == 4
            assert snapshots.save(5, state(5)).result().depth == 2
            assert snapshots.all_steps() == [0, 4, 5]


def test_a_save_that_was_given_up_in_a_pause_of_its_commit_may_be_committed(monkeypatch):
    """The record's PUT may land: no error says that nothing was committed."""

    def fail(request, **_):
        if request.method == "PUT" and "/snapshots/" in request.url:
            raise aws.EndpointConnectionError(endpoint_url="http://s3")

    with moto_bucket(monkeypatch) as url:
        place = S3Store(f"{url}/r")
        snapshots = manager(place, on_error="raise")
        place._client.meta.events.register("before-send.s3", fail)
        handle = snapshots.save(0, state(0))
        until(lambda: progress.retrying())
        with suppress(SnapstoreError, TimeoutError):
            snapshots.close(1.0)
        with pytest.raises(StorageError, match="whether it was committed is unknown"):
            handle.result(60)


# -- the process ends


EXIT = """
import sys, torch, snapstore
from snapstore.save import retrying
retrying.RETRY_S = retrying.RETRY_MAX_S = 600.0
snapshots = snapstore.SnapshotManager(sys.argv[1], run="a", on_error="warn")
snapshots.save(0, {"w": torch.zeros(3000)}).result()
import pathlib
place = pathlib.Path(sys.argv[1])
place.rename(sys.argv[2])
snapshots.save(1, {"w": torch.ones(3000)})
while not snapshots._running.is_pausing:
    pass
if sys.argv[3] == "back":
    pathlib.Path(sys.argv[2]).rename(place)
print("end", flush=True)
"""


@pytest.mark.parametrize("then", ["back", "away"])
def test_the_end_of_the_interpreter_makes_one_more_attempt(then, tmp_path):
    place, aside = tmp_path / "r", tmp_path / "aside"
    done = run_python("-c", EXIT, str(place), str(aside), then)
    assert "end" in done.stdout
    assert ("save failed" in done.stderr) == (then == "away")
    with opened(place if then == "back" else aside) as repository:
        assert [s.step for s in repository.snapshots()] == ([0, 1] if then == "back" else [0])


@pytest.mark.parametrize("comes_back", [True, False])
def test_the_last_save_before_the_end_is_tried_until_its_time_is_over(store, comes_back, monkeypatch):
    monkeypatch.setattr(retrying, "RETRY_MAX_S", 600.0)
    snapshots = manager(store, save_interval_steps=10)
    snapshots.handle_preemption(timeout=3.0 if not comes_back else 60.0)
    away(store)
    snapshots.save(0, state(0))
    pending(snapshots)
    os.kill(os.getpid(), signal.SIGTERM)
    if comes_back:
        threading.Timer(1.0, store.heal).start()
    assert snapshots.should_save(1)
    with pytest.raises(SystemExit if comes_back else StorageError):
        snapshots.save(1, state(1))
    store.heal()
    with opened(store.inner) as repository:
        assert [s.step for s in repository.snapshots()] == ([1] if comes_back else [])


# -- messages


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads of a dead process
@pytest.mark.parametrize("mode", ["delay", "double", "drop", "crash-before", "crash-after"])
@pytest.mark.parametrize(("rank", "at"), some([(r, at) for r in range(COUNT) for at in range(8)], 3))
def test_ranks_whose_messages_go_wrong_get_one_result(store, mode, rank, at):
    """A message is late, lost, doubled or the last one of its process, while the ranks try a save again."""
    managers, stores = job(store.inner, silent_s=1.0, total_s=4.0)
    managers.each(lambda m, r: m.save(0, rank_state(0, r)).result())
    away(stores[chance := (rank + at) % COUNT])
    managers.ranks[rank].die = lambda: setattr(managers.ranks[rank], "dead", True)
    fail_message(managers.ranks[rank], at, mode, 0.3)
    handles = managers.all(lambda m, r: m.save(1, rank_state(1, r)))
    time.sleep(0.5)
    stores[chance].heal()
    found = together([lambda h=h: h.result(60) if not isinstance(h, BaseException) else h for h in handles])
    alive = [one for r, one in enumerate(found) if r != rank or not mode.startswith("crash")]
    if mode in ("delay", "double"):
        assert len({one.id for one in alive}) == 1
    committed = {one.id for one in alive if not isinstance(one, BaseException)}
    with opened(store.inner) as repository:
        there = {s.id for s in repository.snapshots() if s.step == 1}
        assert committed <= there
        assert not (there and any("nothing was committed" in str(one) for one in alive)), alive
        assert repository.check("restore").ok
    with suppress(Exception, Crash):
        managers.all(lambda m, _: m.close(1.0))
