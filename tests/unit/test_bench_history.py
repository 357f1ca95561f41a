"""`tools/bench scale --history` writes the histories that saves, policies and joins would leave."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from snapstore import KeepLast, Repository, SnapshotManager
from snapstore.catalog import config
from snapstore.format import records
from snapstore.format.keys import parse_page_key, parse_volume_key
from snapstore.storage.memory import MemoryStore


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Return the module that writes histories; new repositories have pages."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    monkeypatch.setattr(config, "NEW_FEATURES", [records.PAGES])
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache" / "first"))
    from benchmarks import history_write

    return history_write


@pytest.mark.parametrize(
    "fields",
    [
        {"keep": 3},
        {"keep": 3, "loose": 50},
        {"keep": 70, "loose": 10},
        {"keep": 3, "after": 40, "loose": 20},
        {"loose": 199},
        {},
    ],
)
def test_a_written_history_has_the_snapshots_that_it_claims(write, tmp_path, fields):
    history = write.RunHistory("mine", 200, **fields)
    write.write_histories(tmp_path / "store", [history, write.RunHistory("other", 7, 3, loose=7)])
    kept = [f"mine@{step}" for step in history.kept]
    with Repository.open(tmp_path / "store") as repository:
        assert [snapshot.ref for snapshot in repository.snapshots("mine")] == kept
        checked = repository.check(level="restore")
        assert (checked.problems, checked.notes, len(checked.restorable)) == ([], [], len(kept) + 3)
        collected = repository.gc()
        assert (collected.deleted_objects, collected.fenced) == (0, [])
        restored = repository.restore("mine@latest")
        np.testing.assert_array_equal(restored["w"], np.arange(64))
        repository.save({"w": np.arange(64)}, run="mine", step=200)
    command = [sys.executable, "-m", "snapstore", "log", "mine", "--all", "--json", "--repo", str(tmp_path / "store")]
    listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["snapshots"]
    assert [one["step"] for one in listed] == list(range(201))


def test_real_saves_leave_the_same_pages_and_volumes(write, tmp_path):
    store = MemoryStore()
    with SnapshotManager(store, run="mine", keep=KeepLast(3), async_save=False) as manager:
        for step in range(600):
            manager.save(step, {"w": np.arange(64) + step})
    real = [parse_page_key(info.key) for info in store.list("pages/")]
    volumes = sorted(parse_volume_key(info.key) for info in store.list("volumes/"))
    assert volumes == [("mine", *pages) for pages in write.volume_ranges(len(real))]
    loose = 600 - write.EACH_PAGE * len(real)
    write.write_histories(tmp_path / "store", [write.RunHistory("mine", 600, 3, loose=loose)])
    with Repository.open(tmp_path / "store") as repository:
        assert {parse_page_key(info.key) for info in repository.store.list("pages/")} == set(real)
