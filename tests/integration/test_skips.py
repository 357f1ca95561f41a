"""Skips keep long chains of small deltas short: a skip is a delta against an older chunk than the last one."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch

from kit.objects import flip_in_place
from kit.repositories import dearest
from snapstore import KeepLast, Repository, SaveOptions, SnapshotManager, StorageError
from snapstore.chunks import reader
from snapstore.engine.cpu import CpuEngine
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore

CHUNK, CHUNKS, SAVES = 64 * 1024, 4, 40
OPTIONS = SaveOptions(restore_cost=2, threads=2)


class Store(MemoryStore):
    """A store that may refuse to read packs, or be far away; it counts how many reads of packs run at once."""

    refuses, delay_s = False, 0.0
    now = most = 0

    def get_range(self, key, offset, length, into=None):
        if not key.startswith("packs/"):
            return super().get_range(key, offset, length, into)
        if self.refuses:
            raise StorageError("refused")
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(self.delay_s)
        self.now -= 1
        return super().get_range(key, offset, length, into)


@pytest.fixture
def store():
    store = Store()
    Repository.create(store, chunk_bytes=CHUNK, options=OPTIONS).close()
    return store


def states(count):
    """Yield states of slowly changing weights: each step changes 1 % of them, always among the same 5 %."""
    rng = np.random.default_rng(0)
    bits = torch.from_numpy(rng.normal(0, 0.02, CHUNK * CHUNKS // 2).astype(np.float32)).bfloat16().view(torch.int16)
    for _ in range(count):
        bits = bits.clone()
        bits[torch.from_numpy(20 * rng.integers(0, len(bits) // 20, len(bits) // 100))] += 1
        yield {"w": bits.view(torch.bfloat16)}


def chains(store, snapshot):
    """Return, for every chunk, the places of the blobs of its chain."""
    m = manifest.read(store, snapshot.manifests[0], None)
    packs = m.header.pack_names
    places = [(packs[n], offset) for n, offset in zip(m.table.ref_packs, m.table.ref_offsets.tolist(), strict=True)]
    return [places[a:b] for a, b in zip(m.table.starts[:-1], m.table.starts[1:], strict=True)]


def skipped(before, after):
    """Return the chunks whose chains a skip has kept from growing since the snapshot before: the oldest blob stays."""
    return [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if 1 < len(b) <= len(a) and a[-1] == b[-1]]


def test_chains_stay_short_by_skips(store):
    saved, given = [], list(states(SAVES))
    with SnapshotManager(store, run="r", async_save=False, options=OPTIONS) as manager:
        for step, state in enumerate(given):
            saved.append(manager.save(step, state).result())
    found = [chains(store, snapshot) for snapshot in saved]
    skips = [len(skipped(a, b)) for a, b in pairwise(found)]
    assert sum(skips) >= CHUNKS, "every chunk skips"
    assert max(skips) <= CHUNKS / 2, "not all in the same save"
    assert all(len({chain[-1] for chain in of_chunk}) == 1 for of_chunk in zip(*found, strict=True)), (
        "none is full again"
    )
    assert max(map(len, found[-1])) < SAVES * 0.6
    assert max(dearest(store, snapshot) for snapshot in saved) <= OPTIONS.restore_cost
    with Repository.open(store, options=OPTIONS) as repository:
        for step in range(0, SAVES, 5):
            assert torch.equal(repository.restore(f"r@{step}")["w"], given[step]["w"])
        repository.forget([KeepLast(2)], run="r")
        repository.gc()
        assert repository.compact().failed == []
        repository.gc()
        assert repository.check("restore").ok
        for step in (SAVES - 1, SAVES - 2):
            assert torch.equal(repository.restore(f"r@{step}")["w"], given[step]["w"])


@pytest.mark.parametrize("how", ["refused", "flipped"])
def test_a_chunk_whose_older_base_cannot_be_read_is_stored_full(store, how):
    given = list(states(SAVES))
    with SnapshotManager(store, run="r", async_save=False, options=OPTIONS) as manager:
        first = manager.save(0, given[0]).result()
        if how == "flipped":
            for name, offset in (chain[-1] for chain in chains(store, first)):
                flip_in_place(store, pack_key(name), offset + 400)
        store.refuses = how == "refused"
        saved = [first, *(manager.save(step, state).result() for step, state in enumerate(given[1:], 1))]
        store.refuses = False
    found = [chains(store, snapshot) for snapshot in saved]
    assert all(before[-1] != after[-1] for before, after in zip(found[0], found[-1], strict=True)), (
        "all were full again"
    )
    with Repository.open(store, options=OPTIONS) as repository:
        assert torch.equal(repository.restore(f"r@{SAVES - 1}")["w"], given[-1]["w"])


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_chain_is_read_by_as_many_requests_as_the_store_serves_well(store, at_once):
    """Each blob of the chain is in another pack: one request after the other would take a second per chunk on S3."""
    with Repository.open(store, options=OPTIONS) as repository:
        for step, state in enumerate(states(12)):
            snapshot = repository.save(state, run="r", step=step)
        assert max(map(len, chains(store, snapshot))) > 8
        store.gets_at_once, store.delay_s, store.most = at_once, 0.02, 0
        restored = repository.restore("r@11")
    assert torch.equal(restored["w"].view(torch.int16), state["w"].view(torch.int16))
    assert store.most <= at_once
    assert store.most > at_once // 2


def test_one_thread_opens_the_packs_of_a_chain(tmp_path, monkeypatch):
    """Several threads that open files would wait for each other."""
    real, opened = LocalStore._open_file, []
    monkeypatch.setattr(reader, "OPEN_AHEAD_S", 600)

    def open_file(self, key):
        opened.append((key, threading.current_thread()))
        return real(self, key)

    with Repository.create(tmp_path / "r", options=OPTIONS) as repository:
        for step, state in enumerate(states(9)):
            repository.save(state, run="r", step=step)
        monkeypatch.setattr(LocalStore, "_open_file", open_file)
        restored = repository.restore("r@8")
    assert torch.equal(restored["w"].view(torch.int16), state["w"].view(torch.int16))
    packs = [(key, thread) for key, thread in opened if key.startswith("packs/")]
    assert len(packs) == len(set(packs)) >= 8
    assert {thread for _, thread in packs} == {threading.current_thread()}


def test_a_far_store_is_asked_for_a_batch_while_the_first_is_read(store, monkeypatch):
    monkeypatch.setattr(CpuEngine, "decode_bytes", CHUNK)
    with Repository.open(store, options=OPTIONS) as repository:
        repository.save(next(states(1)), run="r", step=0)
        store.gets_at_once, store.delay_s, store.most = 8, 0.05, 0
        repository.restore("r@0")
    assert store.most >= 2
