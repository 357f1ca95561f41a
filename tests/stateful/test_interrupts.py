"""Ctrl-C anywhere in a save's session leaves no session that another process would wait for.

The process lives on, as a notebook does: its locks do not end with it.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from kit.interrupts import Interrupter
from kit.objects import keys_of
from kit.repositories import OPTIONS, check_clean, opened, save
from kit.s3_stores import moto_bucket
from kit.samples import sampled
from snapstore import Repository
from snapstore.protocol.liveness import orphaned_sessions
from snapstore.storage.local import LocalStore
from snapstore.storage.s3.store import S3Store

FILES = ("protocol/commit.py", "storage/locks.py", "storage/local.py", "storage/s3/lock_files.py")
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
    check_each(lambda name: LocalStore(tmp_path / str(name), create=True), failing, 25)


def test_on_s3(monkeypatch, tmp_path):
    """On S3 the lock is a file in the cache, and the removal of a session is a request."""
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path))
    with moto_bucket(monkeypatch) as bucket:
        check_each(lambda name: S3Store(f"{bucket}/{name}"), None, 30)
