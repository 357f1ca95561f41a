"""A writer puts the right objects and holds a bounded amount of memory; whole saves are in tests/integration."""

from __future__ import annotations

import hashlib
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.repositories import OPTIONS, check_restores, save
from snapstore import AlreadyExistsError, IntegrityError, InvalidInputError, Repository, SaveOptions, StorageError
from snapstore.chunks import uploader
from snapstore.engine.cpu import CpuEngine
from snapstore.engine.registry import Engines
from snapstore.format.keys import pack_key
from snapstore.protocol.session import SaveSession
from snapstore.storage.memory import MemoryStore

DATA = bytes(range(256)) * 40
KEY = pack_key(hashlib.sha256(DATA).hexdigest())


def claim_of(store):
    return SimpleNamespace(store=store, written=set())


# --- an object that is there already ---------------------------------------------------------------------------------


def test_an_object_that_exists_with_the_same_bytes_is_accepted(monkeypatch):
    monkeypatch.setattr(uploader, "COMPARED_BYTES", 1000)  # several pieces, the last one short
    store = MemoryStore()
    for data in (DATA, memoryview(DATA)):
        uploader.put_once(claim_of(store), KEY, data)
        assert store.get(KEY) == DATA


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (DATA[:-1], "expected 10240 bytes, got 10239"),
        (b"", "got 0"),
        (DATA[:-1] + b"x", "got other bytes from offset 10000"),
    ],
)
def test_an_object_that_is_not_what_its_name_says_ends_the_save(monkeypatch, there, said):
    monkeypatch.setattr(uploader, "COMPARED_BYTES", 1000)
    store = MemoryStore()
    store.put(KEY, there)
    with pytest.raises(IntegrityError, match=f"{KEY} in memory://.*{said}.*snapstore check"):
        uploader.put_once(claim_of(store), KEY, DATA)


@pytest.mark.parametrize("times", [1, uploader.PUT_ATTEMPTS - 1, uploader.PUT_ATTEMPTS])
def test_an_object_that_is_deleted_meanwhile_is_put_again(monkeypatch, times):
    store, put, left = MemoryStore(), MemoryStore.put, iter(range(times))

    def put_and_lose(self, key, data):
        if next(left, None) is None:
            put(self, key, data)
        else:
            raise AlreadyExistsError("it is there; a moment later it is not")

    monkeypatch.setattr(MemoryStore, "put", put_and_lose)
    if times < uploader.PUT_ATTEMPTS:
        uploader.put_once(claim_of(store), KEY, DATA)
        assert store.get(KEY) == DATA
    else:
        with pytest.raises(StorageError, match="reported as existing and then not found, 4 times"):
            uploader.put_once(claim_of(store), KEY, DATA)


def test_a_save_whose_pack_is_taken_commits_nothing(monkeypatch):
    """A save commits nothing if other bytes lie under the name of its pack.

    This happens when only half of a pack is stored and the answer to its put is lost.
    """
    store, put = MemoryStore(), MemoryStore.put

    def put_half(self, key, data):
        if key.startswith("packs/"):
            put(self, key, data[: len(data) // 2])
            raise AlreadyExistsError(key)
        put(self, key, data)

    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 0, 0)
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStore, "put", put_half)
            with pytest.raises(IntegrityError, match=r"expected \d+ bytes, got \d+"):
                save(repository, "a", 1, 1)
        repository.gc()
        assert [s.step for s in check_restores(repository)] == [0]


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pack_mb", "wanted", "expected"),
    [(32, 10, 8), (32, 2, 2), (128, 10, 2), (129, 10, 1), (256, 2, 1), (512, 2, 1), (1024, 10, 1), (1, 10, 10)],
)
def test_packs_in_flight_fit_their_bound_or_are_one(pack_mb, wanted, expected):
    assert uploader.puts_in_flight(pack_mb * 2**20, wanted) == expected


@pytest.mark.parametrize(("bound_bytes", "most"), [(4 * 65536, 4), (2 * 65536, 2), (2 * 65536 - 1, 1), (1, 1)])
@pytest.mark.parametrize("chunk_bytes", [1024, 4 * 2**20])
def test_a_save_holds_no_more_packs_than_the_bound_allows(monkeypatch, bound_bytes, most, chunk_bytes):
    """At most `most` packs are in flight, and there is at most one more buffer than that.

    Blobs of 4 MiB are larger than a pack, and still fit into its buffer. A buffer that grows is not used again, so it
    would show as one buffer more.
    """
    monkeypatch.setattr(uploader, "PUT_BYTES_IN_FLIGHT", bound_bytes)
    lock, in_flight, highest, made = threading.Lock(), 0, 0, []
    put, buffer = MemoryStore.put, CpuEngine.buffer

    def slow_put(self, key, data):
        nonlocal in_flight, highest
        if key.startswith("packs/"):
            with lock:
                in_flight += 1
                highest = max(highest, in_flight)
            time.sleep(0.02)
            with lock:
                in_flight -= 1
        put(self, key, data)

    def counted_buffer(self, nbytes):
        if nbytes == options.pack_bytes + max(uploader.PACK_SLACK_BYTES, 2 * chunk_bytes):  # verification needs others
            made.append(nbytes)
        return buffer(self, nbytes)

    monkeypatch.setattr(MemoryStore, "put", slow_put)
    monkeypatch.setattr(MemoryStore, "puts_at_once", 4)
    monkeypatch.setattr(CpuEngine, "buffer", counted_buffer)
    options = SaveOptions(pack_bytes=65536, threads=1)
    size_bytes = 2**21 if chunk_bytes == 1024 else 12 * chunk_bytes
    state = {"w": np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)}
    with Repository.create(MemoryStore(), chunk_bytes=chunk_bytes, options=options) as repository:
        repository.save(state, run="a", step=0)
        buffers = len(made)
        assert (repository.restore("a@0")["w"] == state["w"]).all()
    assert 1 <= highest <= most
    assert 1 <= buffers <= most + 1


def test_a_small_tensor_that_is_cut_short_while_its_bytes_are_read(monkeypatch):
    """The caller gets an error that names the tensor, instead of the error of torch.

    This can happen to a tensor on a device, whose bytes are copied some time after its size was read.
    """
    tensor = torch.zeros(8)

    def cut(_):
        tensor.data = torch.zeros(4)
        raise RuntimeError("the storage of a tensor was freed, or cut short")

    monkeypatch.setattr(Engines, "memory_of", lambda *_: object())  # memory on a device
    monkeypatch.setattr("snapstore.save.manifest_writer.as_bytes", cut)
    with Repository.create(MemoryStore()) as repository:
        with pytest.raises(InvalidInputError, match="w: was changed while it was saved"):
            repository.save({"w": tensor}, run="a", step=0)
        assert repository.snapshots() == []


def test_heartbeats_go_on_while_a_pack_is_put(monkeypatch):
    """On a slow network a pack may take an hour; without heartbeats a gc elsewhere would fence the save."""
    beats = []
    real = MemoryStore.put

    def slow(self, key, data):
        if key.startswith("packs/"):
            started = len(beats)
            for _ in range(3000):  # until there are some, and not for a fixed time
                if len(beats) >= started + 3:
                    break
                time.sleep(0.01)
            assert len(beats) >= started + 3
        real(self, key, data)

    monkeypatch.setattr(MemoryStore, "put", slow)
    monkeypatch.setattr(uploader, "BEAT_S", 0.01)
    monkeypatch.setattr(SaveSession, "heartbeat", lambda self: beats.append(1))
    with Repository.create(MemoryStore()) as repository:
        repository.save({"w": torch.arange(5000.0)}, run="a", step=0)
        assert repository.check("restore").ok
