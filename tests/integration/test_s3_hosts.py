"""Several hosts can use one repository on S3 at once; processes with their own caches stand for the hosts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kit import hosts
from kit.objects import keys_of
from kit.processes import environment
from kit.repositories import OPTIONS, check_clean, check_restores, opened, same, save
from kit.s3_stores import fresh_url, needs_server
from snapstore import Repository
from snapstore.format.records import Snapshot, encode, new_id
from snapstore.storage.s3.store import S3Store

pytestmark = needs_server


def process(monkeypatch, folder: Path, *args: str) -> subprocess.Popen:
    """Start a process of kit/hosts.py with its own cache."""
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(folder))
    return subprocess.Popen([sys.executable, "-m", hosts.__name__, *args], env=environment())


def wait_for_passes(collector: subprocess.Popen, log: Path, count: int) -> None:
    """Wait until a collector has made so many passes."""
    ends = time.monotonic() + 60
    while not log.exists() or len(log.read_text().split()) < count:
        assert collector.poll() is None, "the collector has ended"
        assert time.monotonic() < ends, "the collector hangs"
        time.sleep(0.02)


@pytest.fixture
def url(monkeypatch, tmp_path):
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    return fresh_url()


def test_two_writers_and_a_collector(url, monkeypatch, tmp_path):
    """Two hosts save and forget while a third collects; every committed snapshot restores here to the bit."""
    Repository.create(url, chunk_bytes=1024, options=OPTIONS).close()
    log = tmp_path / "collected"
    processes = [process(monkeypatch, tmp_path / "c", "collector", url, str(log))]
    collector = processes[0]
    try:
        wait_for_passes(collector, log, 1)
        writers = [process(monkeypatch, tmp_path / run, "writer", url, run) for run in "ab"]
        processes += writers
        assert [writer.wait(120) for writer in writers] == [0, 0]
        beside = len(log.read_text().split()) - 1
        assert beside >= 2, "passes while they wrote"
        wait_for_passes(collector, log, beside + 3)
        assert collector.poll() is None
    finally:
        for one in processes:
            one.kill()
            one.wait()
    assert collector.returncode == -signal.SIGKILL
    assert sum(map(int, log.read_text().split())) > 0
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "fresh"))
    store = S3Store(url)
    with opened(store) as repository:
        assert {run: [s.step for s in repository.snapshots(run)] for run in "ab"} == {
            "a": [3, 4, 5], "b": [3, 4, 5],
        }  # fmt: skip
        check_restores(repository, expected=hosts.values)
        repository.gc()
    check_clean(store, expected=hosts.values)


def test_a_snapshot_made_there_restores_here(url, monkeypatch, tmp_path):
    """It can be the parent of a save here, and the host there restores that save."""
    Repository.create(url, chunk_bytes=1024, options=OPTIONS).close()
    assert process(monkeypatch, tmp_path / "there", "writer", url, "a").wait(60) == 0
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "here"))
    with opened(url) as repository:
        assert same(repository.restore("a@5"), hosts.values("a", 5))
        own = hosts.save(repository, "b", 12, parent="a@5")
        assert own.parent == repository.snapshot("a@5").id
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "there"))
    with opened(url) as repository:
        assert same(repository.restore("b@12"), hosts.values("b", 12))


def test_a_dead_save_of_this_host_is_collected_at_once(url, monkeypatch, tmp_path):
    """gc sees that its process is gone. It cannot see that for a host with another cache, so it waits for that save."""
    Repository.create(url, chunk_bytes=1024, options=OPTIONS).close()
    store = S3Store(url)
    for cache in ("here", "there"):
        assert process(monkeypatch, tmp_path / cache, "killed", url).wait(60) == 9
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "here"))
    with opened(url) as repository:
        first = repository.gc()
        assert (len(first.fenced), len(first.waiting_for)) == (1, 1)
        second = repository.gc(fence_after_s=0)
        assert (len(second.fenced), second.waiting_for) == (1, [])
        assert repository.snapshots() == []
    check_clean(store)
    assert keys_of(store, "packs/") == []


def test_a_cold_cache_opens_a_thousand_snapshots(url):
    """The first opening reads only the newest record of each snapshot, with one GET; the second reads none."""
    store = S3Store(url)
    Repository.create(store, chunk_bytes=1024, options=OPTIONS).close()

    def put(step: int) -> None:
        snapshot = Snapshot(id=new_id(), run="a", step=step, seq=step, state="committed", write_id=new_id())
        store.put(snapshot.key, encode(snapshot))
        if step % 10 == 0:  # the older revision need not be read
            revised = snapshot.revised(tags=["tagged"])
            store.put(revised.key, encode(revised))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(put, range(1000)))
    sent: list[str] = []
    store._client.meta.events.register("before-send.s3", lambda request, **_: sent.append(request.method))
    began = time.monotonic()
    with opened(store) as repository:
        assert len(repository.snapshots("a")) == 1000
    assert len(sent) == 1 + 2 * 2 + 1000 + 1, "config, two pages twice, one record each, no page of records"
    assert time.monotonic() - began < 600, "it hangs"
    sent.clear()
    with opened(store) as repository:
        assert len(repository.snapshots("a")) == 1000
        assert repository.snapshot("a@990").tags == ["tagged"]
    looks = (2 * 2 + 1) + (2 + 1)  # the first lists twice; each asks for the next page of records
    assert len(sent) == 1 + looks, "config; the index had the rest"


def test_a_copy_of_a_repository_has_an_index_of_its_own(url):
    """It has the same uuid under another URL, but its index does not mix its records with those of the original."""
    one, other = S3Store(f"{url}/one"), S3Store(f"{url}/other")
    with Repository.create(one, chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
    for key in keys_of(one):
        other.put(key, one.get(key))
    with opened(one) as first, opened(other) as second:
        save(first, "a", 1, 1)
        save(second, "a", 2, 2)
        for repository in (first, second):
            repository.gc()
            check_restores(repository)
