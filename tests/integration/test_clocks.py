"""Hosts whose clocks differ by an hour or a year lose nothing, and no live session is fenced.

A store whose clock is set back leaves no session that is never fenced.
"""

from __future__ import annotations

import time

import pytest

from kit.faults import Crash, FaultStore, one_thread
from kit.objects import keys_of
from kit.repositories import check_clean, committed, created, opened, save
from snapstore import KeepLast, Repository
from snapstore.format import records
from snapstore.protocol.liveness import orphaned_sessions
from snapstore.storage.memory import MemoryStore


class Beside(FaultStore):
    """A store where only a heartbeat tells who lives, as S3; `verbs` run once, before the first pack is put."""

    def __init__(self, inner, verbs):
        super().__init__(inner)
        self.verbs = verbs

    def is_locked(self, key):
        return None

    def _act(self, name, key, effect):
        if self.verbs is not None and name == "put" and key.startswith("packs/"):
            verbs, self.verbs = self.verbs, None
            verbs()
        return super()._act(name, key, effect)


@pytest.mark.parametrize("off_by_hours", [-24 * 365, -1, 1, 24 * 365])
def test_a_host_whose_clock_is_off(monkeypatch, off_by_hours):
    """It saves, forgets and collects beside a save of a host whose clock is right, and the other way round."""
    one_thread(monkeypatch, index=False)
    inner = MemoryStore()
    Repository.create(inner, chunk_bytes=1024).close()
    with opened(inner) as repository:
        for step in range(3):
            save(repository, "a", step, step)
    right, waited = time.time, []

    def verbs(run, off_by_s):
        def act():
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda: right() + off_by_s)
                with opened(Beside(inner, None)) as repository:
                    save(repository, run, 0, 7)
                    repository.forget([KeepLast(1)], run="a")
                    waited.append(len(repository.gc().waiting_for))

        return act

    with opened(Beside(inner, verbs("b", 3600 * off_by_hours))) as repository:
        save(repository, "a", 3, 3)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: right() + 3600 * off_by_hours)
        with opened(Beside(inner, verbs("c", -3600 * off_by_hours))) as repository:
            save(repository, "a", 4, 4)
    assert waited == [1, 1]  # both gcs wait for the live save and do not fence it
    with opened(inner) as repository:
        assert repository.snapshot("a@latest").step == 4
        assert repository.gc().waiting_for == []
        assert repository.check("restore").ok
    found = {(step, version[0]) for step, version, *_ in committed(inner).values()}
    assert found >= {(3, "a"), (4, "a"), (0, "b"), (0, "c")}
    check_clean(inner)


def dead_save(inner, ahead_s):
    """Leave a save that died while the store's clock was ahead; then set the clock right."""
    right = inner.clock
    inner.clock = lambda: right() + ahead_s
    store = Beside(inner, None)
    store.mode = "crash-before"
    with opened(store) as repository:
        store.verbs = lambda: setattr(store, "at", len(store.log) + 1)  # the next operation
        with pytest.raises(Crash):
            save(repository, "a", 1, 1)
    orphaned_sessions.clear()  # of the process that is dead
    inner.clock = right
    assert keys_of(inner, "sessions/")
    assert keys_of(inner, "packs/")


@pytest.mark.parametrize("ahead_hours", [0.5, 2, 24 * 365])
@pytest.mark.parametrize("way", ["at once", "gc", "repair"])
def test_a_dead_session_that_is_dated_in_the_future_is_expired(monkeypatch, ahead_hours, way):
    """It is dated now: an hour of silence later a gc fences it, and with a limit of 0 s at once."""
    one_thread(monkeypatch, index=False)
    inner = created()
    dead_save(inner, 3600 * ahead_hours)
    right = inner.clock
    with opened(Beside(inner, None)) as repository:
        if way == "at once":
            assert len(repository.gc(fence_after_s=0).fenced) == 1
        else:
            if way == "gc":
                assert len(repository.gc(dry_run=True).waiting_for) == 1
                assert len(repository.gc().waiting_for) == 1
            else:
                assert [a.kind for a in repository.repair().actions] == ["session", "index"]
                assert [a.kind for a in repository.repair(apply=True).actions] == ["session", "index"]
            inner.clock = lambda: right() + 3590
            assert repository.gc().fenced == [], "it may be a live save's whose next heartbeat is due"
            inner.clock = lambda: right() + 3610
            assert len(repository.gc().fenced) == 1
    check_clean(inner)


def test_a_damaged_session_that_is_dated_in_the_future_is_removed(monkeypatch):
    """An hour of silence after the first repair."""
    one_thread(monkeypatch, index=False)
    inner = created()
    right = inner.clock
    inner.clock = lambda: right() + 1e7
    inner.put("sessions/" + records.new_id(), b"")
    inner.clock = right
    with opened(inner) as repository:
        assert not repository.repair(apply=True).ok
        inner.clock = lambda: right() + 3610
        assert repository.repair(apply=True).ok
    assert keys_of(inner, "sessions/") == []


def test_a_live_session_that_is_dated_in_the_future_is_not_fenced(monkeypatch):
    """The clock of the store is set back by a year in the middle of a save."""
    one_thread(monkeypatch, index=False)
    inner = created()
    right, gcs = inner.clock, []
    with opened(inner) as repository:
        save(repository, "a", 0, 0)
    inner.clock = lambda: right() + 3600 * 24 * 365

    def set_back():
        inner.clock = right
        with opened(Beside(inner, None)) as repository:
            repository.forget_snapshots(["a@0"], force=True)
            gcs.extend(repository.gc() for _ in range(2))

    with opened(Beside(inner, set_back)) as repository:
        save(repository, "a", 1, 1)
    assert [(len(gc.waiting_for), gc.fenced) for gc in gcs] == [(1, []), (1, [])]
    with opened(inner) as repository:
        repository.gc()
    check_clean(inner)
