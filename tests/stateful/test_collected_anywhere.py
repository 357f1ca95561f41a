"""Python's garbage collector may free a repository at any point of another one's work without a deadlock.

It runs in any thread, between any two instructions, also while the thread holds a lock.
"""

from __future__ import annotations

import gc
import threading

import pytest

from kit.interrupts import Interrupter
from kit.repositories import OPTIONS, opened, save
from kit.s3_stores import moto_bucket
from kit.samples import sampled
from kit.waits import until
from snapstore import Repository
from snapstore.catalog.lmdb_file import Environment
from snapstore.storage.local import LocalStore
from snapstore.storage.s3.store import S3Store

FILES = ("catalog/lmdb_file.py", "storage/cache_dir.py", "storage/locks.py")
#: A thread hangs if it takes longer [s].
PATIENCE_S = 300


def drop_in_a_cycle(repository):
    """Drop a repository so that only the garbage collector frees it."""
    cycle = [repository]
    cycle.append(cycle)


def worked(make_store, at):
    """Open, save and close; let another repository be collected at one place; return all places that were passed."""
    Repository.create(make_store(f"other{at}"), options=OPTIONS).close()
    passed = []

    def work():
        other = Repository.open(make_store(f"other{at}"))
        list(other.snapshots())
        drop_in_a_cycle(other)
        del other
        interrupter = Interrupter(*FILES, at=at, strike=gc.collect)

        def use():
            with opened(make_store("this")) as repository:
                save(repository, "a", 1, 1)

        interrupter.call(use)
        passed.extend(interrupter.passed)

    gc.collect()
    gc.disable()
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"place {at} deadlocks"
    finally:
        gc.enable()
    return passed


def check_each(make_store, cases):
    before = set(Environment._open)  # fixtures of modules may keep some
    Repository.create(make_store("this"), chunk_bytes=1024, options=OPTIONS).close()
    count = len(worked(make_store, None))
    assert count > 100
    for at in sampled(count, count // cases):
        assert len(worked(make_store, at)) > 100
    gc.collect()
    until(lambda: not set(Environment._open) - before, PATIENCE_S)  # threads close what is found


def test_on_a_local_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    check_each(lambda name: LocalStore(tmp_path / name, create=True), 3)


def test_on_s3(monkeypatch, tmp_path):
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path))
    with moto_bucket(monkeypatch) as bucket:
        check_each(lambda name: S3Store(f"{bucket}/{name}"), 1)


@pytest.mark.parametrize("lock", [threading._active_limbo_lock, Environment._open_lock], ids=["threads", "index"])
def test_with_a_lock_of_all_threads_held(tmp_path, lock):
    """The repository is freed while this thread holds a lock that is needed to close it, or to start a thread."""
    Repository.create(tmp_path / "r", options=OPTIONS).close()
    repository = Repository.open(tmp_path / "r")
    list(repository.snapshots())
    environment = repository.context.index._environment
    done = threading.Event()

    def collect():
        with lock:
            gc.collect()
        done.set()

    drop_in_a_cycle(repository)
    del repository
    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(PATIENCE_S)
    until(lambda: environment._users == 0, PATIENCE_S)
