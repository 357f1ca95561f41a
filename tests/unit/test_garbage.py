"""A save leaves few objects to Python's garbage collector, so that full collections, which stop training, are rare."""

import gc

import pytest
import torch

from kit.garbage import survivors
from kit.ranks import Managers, part_of
from snapstore import Repository, SaveOptions, SnapshotManager
from snapstore.engine.batches import DecodeJob, EncodeJob
from snapstore.engine.cpu import EncodedChunk
from snapstore.format.manifests.manifest import Box, TensorEntry
from snapstore.save import chunk_columns, known_chunks
from snapstore.save.inputs import BoxOf, TensorInput
from snapstore.save.replicas import Replica
from snapstore.save.shares import Piece
from snapstore.state.values.tensors import TensorSpec
from snapstore.storage.memory import MemoryStore

TENSORS, SAVES = 500, 4


#: There is one of these for each tensor, box or chunk of a save.
MANY = [Box, TensorEntry, TensorSpec, TensorInput, BoxOf, Piece, Replica, EncodeJob, DecodeJob, EncodedChunk]
MANY += [chunk_columns.ChunkRange, known_chunks._BoxChunks]


def tensors():
    """Return tensors by name: half are stored inline, half in two chunks."""
    return {f"layer.{i}": torch.zeros(1 if i % 2 else 500, 4) for i in range(TENSORS)}


def made_store():
    """Return a store with an empty repository of chunks of 4 KiB."""
    store = MemoryStore()
    Repository.create(store, chunk_bytes=4096, options=SaveOptions(threads=1)).close()
    return store


def test_the_counter_counts_what_lives():
    with survivors() as counts:
        kept = [[] for _ in range(10_000)]
    assert 10_000 <= sum(counts) < 11_000
    with survivors() as counts:
        for _ in range(10_000):
            kept = [[]]
    assert sum(counts) < 500
    assert kept
    assert gc.get_threshold()[2] < 1000


@pytest.mark.parametrize("kind", MANY, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_the_collector_does_not_look_at(kind):
    assert kind.__struct_config__.gc is False


def test_a_save_by_a_manager():
    state, found = {"model": tensors()}, []
    with SnapshotManager(made_store(), run="r") as snapshots:
        for step in range(SAVES):
            for one in state["model"].values():
                one += step
            with survivors() as counts:
                snapshots.save(step, state)
                snapshots.wait_until_finished()
            found.append(sum(counts))
    assert min(found[1:]) < 2 * TENSORS


def test_a_save_by_ranks():
    managers, whole, found = Managers(made_store(), 2), tensors(), []
    states = [{"model": {k: part_of(w, r, 2) if len(w) > 1 else w for k, w in whole.items()}} for r in range(2)]
    for step in range(SAVES):
        for one in (one for state in states for one in state["model"].values()):
            getattr(one, "data", one).add_(step)
        with survivors() as counts:
            for result in managers.all(lambda m, rank, n=step: m.save(n, states[rank]).result()):
                assert not isinstance(result, Exception), result
        found.append(sum(counts))
    managers.end()
    # The least: a rank may switch the collector on while the other one copies, and it then finds all that is copied.
    assert min(found[1:]) < 2 * 6 * TENSORS
