"""Hosts whose clocks differ by an hour or a year lose nothing, and no live session is expired."""

from __future__ import annotations

import time

import pytest

from kit.faults import FaultStore, one_thread
from kit.repositories import check_clean, committed, opened, save
from snapstore import KeepLast, Repository
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
    assert waited == [1, 1]  # for the save that lives, which is not given up
    with opened(inner) as repository:
        assert repository.snapshot("a@latest").step == 4
        assert repository.gc().waiting_for == []
        assert repository.check("restore").ok
    found = {(step, version[0]) for step, version, *_ in committed(inner).values()}
    assert found >= {(3, "a"), (4, "a"), (0, "b"), (0, "c")}
    check_clean(inner)
