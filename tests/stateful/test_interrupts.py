"""Ctrl-C anywhere in a save's session leaves no session that another process would wait for.

The process lives on, as a notebook does: its locks do not end with it. And after Ctrl-C in a restore, no thread writes
into the state any more.
"""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch

from kit.interrupts import Interrupter
from kit.objects import keys_of
from kit.reference import use_reference
from kit.repositories import OPTIONS, check_clean, created, opened, save
from kit.s3_stores import moto_bucket
from kit.samples import sampled
from snapstore import Repository, SnapshotManager, StorageError
from snapstore.engine import spans
from snapstore.engine.cpu import CpuEngine
from snapstore.format.blobs import chain_decode
from snapstore.protocol.liveness import orphaned_sessions
from snapstore.save import chunk_writer
from snapstore.save.chunk_writer import ChunkWriter
from snapstore.storage.local import LocalStore
from snapstore.storage.s3.store import S3Store
from snapstore.threads import Gate

FILES = ("protocol/claim.py", "storage/locks.py", "storage/local.py", "storage/s3/lock_files.py")
#: A save that commits, and saves that fail before the first pack or after the last.
FAILING = (None, "load_bases", "commit")


def interrupted_save(make_store, failing, at):
    """Interrupt a save at one of its places for a Ctrl-C; return (file, line) of all that it has passed."""
    Repository.create(make_store(), chunk_bytes=1024, options=OPTIONS).close()
    interrupter = Interrupter(*FILES, at=at)
    with opened(make_store()) as repository, pytest.MonkeyPatch.context() as patch:
        if failing:
            patch.setattr(f"snapstore.save.pipeline.{failing}", lambda *args, **options: 1 // 0)
        with suppress(KeyboardInterrupt, ZeroDivisionError):
            interrupter.call(save, repository, "a", 1, 1)
    return interrupter.passed


def check_each(make_store, failing, every):
    """Check each place, or a sample: no locked session is left, and a gc of another process removes all the rest."""
    count = len(interrupted_save(lambda: make_store("whole"), failing, None))
    assert count > 100
    struck = 0
    for at in sampled(count, every):
        passed = interrupted_save(lambda at=at: make_store(at), failing, at)
        struck += len(passed) > at
        orphaned_sessions.clear()  # another process does not know them
        store = make_store(at)
        assert [key for key in keys_of(store, "sessions/") if store.is_locked(key)] == [], passed[-1]
        with opened(store) as repository:
            assert repository.gc().waiting_for == [], passed[-1]
        if isinstance(store, LocalStore):
            for temp in (store.root / "tmp").iterdir():  # one may stay until the process ends: a gc removes it then
                temp.unlink()
        check_clean(store, str(passed[-1]))
    assert struck


@pytest.mark.parametrize("failing", FAILING)
def test_on_a_local_disk(tmp_path, failing):
    check_each(lambda name: LocalStore(tmp_path / str(name), create=True), failing, 40)


def test_on_s3(monkeypatch, tmp_path):
    """On S3 the lock is a file in the cache, and the removal of a session is a request."""
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path))
    with moto_bucket(monkeypatch) as bucket:
        check_each(lambda name: S3Store(f"{bucket}/{name}"), None, 60)


def interrupted_restore(store, at):
    """Interrupt a restore; return the places that it has passed, and how many chunks were decoded after it ended."""
    begun, ended, decode = [], [], chain_decode.decode_chain

    def slowly(*args, **options):
        begun.append(0)
        time.sleep(0.002)
        decode(*args, **options)
        ended.append(0)

    interrupter = Interrupter("chunks/reader.py", "engine/cpu.py", "engine/spans.py", "threads.py", at=at)
    with opened(store) as repository, pytest.MonkeyPatch.context() as patch:
        use_reference(patch)
        patch.setattr(chain_decode, "decode_chain", slowly)
        target = {"w": torch.zeros(8192)}
        with suppress(KeyboardInterrupt):
            interrupter.call(repository.restore_into, "a@0", target)
        done = len(ended)
        time.sleep(0.01)
    return interrupter.passed, max(len(begun), len(ended)) - done


def test_a_restore_writes_nothing_after_ctrl_c(monkeypatch):
    """A program may handle Ctrl-C, or the exception of another handler, and fill the same state with an older step."""
    monkeypatch.setattr(CpuEngine, "decode_bytes", 16_384)
    store = created(1024)
    with opened(store) as repository:
        repository.save({"w": torch.arange(8192.0)}, run="a", step=0)
    passed, late = interrupted_restore(store, None)
    assert late == 0
    for at in sampled(len(passed), 25):
        passed, late = interrupted_restore(store, at)
        assert late == 0, passed[-1]


def interrupted_reads(store, at):
    """Interrupt a save of the caller's own memory; return the places that it has passed, and how many jobs might still
    read that memory, or write the bases, after it had ended."""
    begun, gates, start = [], [], spans.SharedJob.start

    def started(job, *args, **options):
        begun.append(job)
        return start(job, *args, **options)

    class Counted(Gate):
        def __init__(self):
            super().__init__()
            gates.append(self)

    interrupter = Interrupter("save/chunk_writer.py", "engine/cpu.py", "engine/spans.py", "threads.py", at=at)
    state = {"w": torch.arange(8192.0)}
    with SnapshotManager(store, run="a", async_save=False, options=OPTIONS) as manager:
        manager.save(0, state).result()
        state["w"] += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans.SharedJob, "start", started)
            patch.setattr(chunk_writer, "Gate", Counted)
            with suppress(KeyboardInterrupt):
                interrupter.call(lambda: manager.save(1, state).result())
            late = sum(gate._inside + int(gate.flags[1]) for gate in gates)
            late += sum(job._gate in gates and not (job._gate.is_closed or job.done.is_set()) for job in begun)
            done = sum(job.done.is_set() for job in begun)
        manager.save(2, state).result()  # with whatever the base is now
        assert torch.equal(manager.restore(2)["w"], state["w"])
    assert at is not None or done > 5
    return interrupter.passed, late


@pytest.mark.skipif(spans.extension() is None, reason="the reference has other functions")
def test_a_save_reads_nothing_after_ctrl_c(monkeypatch):
    """The program may free the state, or load another step into it."""
    monkeypatch.setattr(CpuEngine, "batch_bytes", 8192)
    monkeypatch.setattr(spans, "SPAN_BYTES", 2048)
    passed, late = interrupted_reads(created(1024), None)
    assert late == 0
    assert len(passed) > 300
    for at in sampled(len(passed), 25):
        passed, late = interrupted_reads(created(1024), at)
        assert late == 0, passed[-1]


@pytest.mark.skipif(spans.extension() is None, reason="the reference has other functions")
def test_a_save_that_fails_waits_for_its_last_reads(monkeypatch):
    """Engines of devices know no gate."""
    monkeypatch.setattr(CpuEngine, "batch_bytes", 8192)
    monkeypatch.setattr(spans, "_flags", lambda gate: None)
    start, begun = spans.SharedJob.start, []

    def started(self, *args, **options):
        begun.append(self)
        return start(self, *args, **options)

    def fail(*args):
        raise StorageError("no such disk")

    with opened(created(1024)) as repository:
        monkeypatch.setattr(spans.SharedJob, "start", started)
        monkeypatch.setattr(ChunkWriter, "end_part", fail)
        with pytest.raises(StorageError, match="no such disk"):
            repository.save({"w": torch.arange(2.0**20)}, run="a", step=0)
        assert all(job.done.is_set() for job in begun)
        assert len(begun) > 10
