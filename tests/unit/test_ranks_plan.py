"""The planned jobs of `tools/bench ranks` read as many bytes and manifests as real restores read."""

import math
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

from kit import rank_saves
from kit.rank_saves import as_rank, sharded
from snapstore import Repository
from snapstore.chunks.reader import ChunkReader
from snapstore.restore.pipeline import read_into
from snapstore.restore.sources import AsRank, PartSources
from snapstore.storage.memory import MemoryStore

SHAPES = {"w": (641, 16), "v": (8192,), "small": (12, 5)}
CHUNK = 1024


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    from benchmarks import ranks_plan

    return ranks_plan


@pytest.fixture
def commits(plan):
    from benchmarks import ranks_commit

    return ranks_commit


def job(plan, count):
    shapes = [((name,), shape, "") for name, shape in SHAPES.items()]
    return plan.Job("", count, shapes=shapes, copies=[("m", ())], chunk_bytes=CHUNK)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_plan_counts_the_bytes_and_manifests_of_a_restore(plan, monkeypatch, count):
    def state(ranks):
        return {"m": {name: sharded(torch.ones(shape), [ranks], [Shard(0)]) for name, shape in SHAPES.items()}}

    decoded, opened = [0], set()
    decode, read = ChunkReader._decode, PartSources._read

    def counted(self, reading, decoding):
        decoded[0] += int(reading[0].batch.outs.lengths.sum())
        decode(self, reading, decoding)

    monkeypatch.setattr(ChunkReader, "_decode", counted)
    monkeypatch.setattr(PartSources, "_read", lambda self, root, refs: opened.update(refs) or read(self, root, refs))
    with Repository.create(MemoryStore(), chunk_bytes=CHUNK) as repository:
        snapshot, _ = rank_saves.save(repository, [lambda: state(4)] * 4, 1)
        saved, into = job(plan, 4), job(plan, count)
        for rank in range(count):
            decoded[0] = 0
            opened.clear()
            with as_rank(rank, count):
                read_into(repository.context, snapshot.ref, state(count), as_rank=AsRank("drop", rank, count))
            found = plan.reading(saved, into, rank)
            assert (found.decoded_bytes, found.manifests) == (decoded[0], len(opened))
            assert found.wanted_bytes == sum(math.prod(b[1]) * 4 for own in into.wanted(rank, "m") for b in own)


def test_a_planned_job_of_a_llama(plan):
    """The plan gives the figures that an earlier study with other code found."""
    found = plan.amplification(plan.Job("8B", 64), plan.Job("8B", 48))
    assert round(found["decoded_over_wanted"], 2) == 1.26
    assert round(found["worst_rank"], 2) == 1.41
    assert found["manifests_a_rank"] == 2 * 4
    assert found["box_map_bytes"] < 1000


def test_rank_0_commits_a_planned_job(plan, commits):
    with Repository.create(MemoryStore(), chunk_bytes=CHUNK) as repository:
        found = commits.measure(job(plan, 4), repository, pack_bytes=16 * CHUNK, times=2, slow=[(0.001, 0.01)])
        assert [len(found["seconds"]), len(found["slow"]), found["ranks"], found["tensors"]] == [2, 1, 4, len(SHAPES)]
        nbytes = sum(math.prod(shape) * 4 for shape in SHAPES.values())
        assert [one.logical_bytes for one in repository.snapshots()] == [nbytes] * 3
