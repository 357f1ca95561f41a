"""Under a key that may not delete, or not create pages, nobody joins: it costs little, and raises no error.

The first key that may do so joins all of it. tests/integration/test_s3_policies.py has the policies on a server.
"""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest

from kit.objects import keys_of
from snapstore import KeepLast, Repository, SnapshotManager, StorageError
from snapstore.catalog import config
from snapstore.errors import lasting
from snapstore.format.records import PAGES
from snapstore.protocol import joining
from snapstore.storage.memory import MemoryStore

SAVES = 150

#: What a key may not do: (operation, prefix of the keys).
KEYS = {
    "delete nothing": [("delete", "")],
    "delete only sessions": [("delete", kind) for kind in ("snapshots/", "packs/", "manifests/", "gc/", "volumes/")],
    "delete no records": [("delete", "snapshots/")],
    "delete no volumes": [("delete", "volumes/")],
    "create no pages": [("put", "pages/"), ("put", "volumes/")],
    "create no volumes": [("put", "volumes/")],
    "restricted": [("put", "pages/"), ("put", "volumes/"), ("delete", "snapshots/")],
}


class Denying(MemoryStore):
    """A store whose server answers 403 to some requests, and that counts all of them."""

    def __init__(self):
        super().__init__()
        self.denied = []
        self.requests = Counter()

    def _ask(self, name, key):
        self.requests[name, key.partition("/")[0]] += 1
        self._require(name, key)

    def _require(self, name, key):
        if any(name == denied and key.startswith(prefix) for denied, prefix in self.denied):
            raise lasting(StorageError(f"{key}: cannot {name}: no permission; docs/s3.md lists what is needed"))

    def put(self, key, data):
        self._ask("put", key)
        super().put(key, data)

    def get(self, key, *args, **kwargs):
        self._ask("get", key)
        return super().get(key, *args, **kwargs)

    def stat(self, key):
        self._ask("stat", key)
        return super().stat(key)

    def list(self, prefix, *args, **kwargs):
        self._ask("list", prefix)
        return super().list(prefix, *args, **kwargs)

    def delete(self, keys):
        if keys := list(keys):
            self.requests["delete", keys[0].partition("/")[0]] += 1
        for key in keys:
            self._require("delete", key)
            super().delete([key])


def made(monkeypatch, denied, *, pages=True):
    monkeypatch.setattr(config, "NEW_FEATURES", (PAGES,) if pages else ())
    store = Denying()
    Repository.create(store).close()
    store.denied = denied
    store.requests.clear()
    return store


def saved(store, count, keep=(), first=0, run="a"):
    """Save some steps in one process."""
    with SnapshotManager(store, run=run, keep=keep, async_save=False) as snapshots:
        for step in range(first, first + count):
            snapshots.save(step, {"w": np.full(4, step)})
    return store


def answers(store):
    with Repository.open(store) as repository:
        assert repository.check("restore").ok
        return [(s.step, s.seq) for s in repository.view().snapshots(states=None)]


@pytest.mark.parametrize("keep", [[], [KeepLast(3)]])
@pytest.mark.parametrize("denied", KEYS.values(), ids=KEYS)
def test_saves_go_on_and_a_later_key_joins(monkeypatch, caplog, denied, keep):
    store = made(monkeypatch, denied)
    saved(store, SAVES, keep)
    refused = [r for r in caplog.records if joining.STAY_LOOSE in r.getMessage()]
    assert store.requests["put", "pages"] <= 3 >= store.requests["put", "volumes"]
    assert len(refused) <= 3
    assert all("no permission" in r.getMessage() and r.levelno == logging.WARNING for r in refused)
    before = answers(store)
    assert len(before) == SAVES
    store.denied = []
    with Repository.open(store) as repository:
        repository.gc(fence_after_s=0)
        repository.gc(fence_after_s=0)  # the first has ended the sessions that could not be deleted
    assert answers(store) == before
    assert len({key.rpartition(".")[0] for key in keys_of(store, "snapshots/")}) <= joining.AT_LEAST
    saved(store, 70, keep, SAVES)
    assert len(answers(store)) == SAVES + 70


def test_a_gc_deletes_what_could_not_be_deleted_in_all_runs(monkeypatch):
    """These records are in pages already, so too few are left for another page."""
    store = made(monkeypatch, KEYS["delete no records"])
    for run in ("a", "b", "c"):
        saved(store, 70, run=run)
    assert len(keys_of(store, "snapshots/")) == 3 * 70
    store.denied = []
    with Repository.open(store) as repository:
        repository.gc()
        assert len(keys_of(store, "snapshots/")) <= 3 * 7
        assert repository.check("restore").ok


def test_a_log_line_says_why(monkeypatch, caplog):
    """Sessions that nobody may delete are no error: each of them may be of a save that runs."""
    caplog.set_level(logging.INFO, "snapstore")
    saved(made(monkeypatch, KEYS["delete nothing"]), 80)
    (line,) = [r for r in caplog.records if "stay loose" in r.getMessage()]
    assert line.getMessage() == "run=a records stay loose: 65 sessions announce snapshots; gc ends those of dead saves"
    caplog.clear()
    saved(made(monkeypatch, KEYS["restricted"]), 80)
    (line,) = [r for r in caplog.records if "stay loose" in r.getMessage()]
    assert line.getMessage().startswith("run=a records stay loose, until a later save or gc joins them: pages/a/")


@pytest.mark.parametrize("denied", KEYS.values(), ids=KEYS)
def test_one_process_pays_as_with_a_key_that_joins(monkeypatch, denied):
    costs = [saved(made(monkeypatch, rules), SAVES).requests for rules in (denied, [])]
    assert costs[0].total() <= costs[1].total() + SAVES


@pytest.mark.parametrize("denied", KEYS.values(), ids=KEYS)
def test_many_processes_pay_as_without_pages(monkeypatch, denied):
    """Each process reads all records here, as its index is in memory: 100 requests and more. A refused join adds 13."""
    costs = []
    for store in (made(monkeypatch, denied), made(monkeypatch, denied, pages=False)):
        saved(store, 100)
        before = store.requests.total()
        for step in range(100, 105):
            saved(store, 1, first=step)
        costs.append(store.requests.total() - before)
        assert store.requests["put", "volumes"] <= 2
    assert costs[0] <= costs[1] + 5 * 20
