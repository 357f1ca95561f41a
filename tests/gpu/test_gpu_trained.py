"""Two ranks train on two GPUs, with NCCL, while snapshots are written; tests/integration has the same on CPUs."""

from __future__ import annotations

import pytest
import torch

from kit import dcp_ranks, trained_ranks
from snapstore import Repository

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def test_on_two_gpus(tmp_path):
    Repository.create(tmp_path / "repository", chunk_bytes=trained_ranks.CHUNK).close()
    found = dcp_ranks.run(tmp_path, 2, trained_ranks.CASES, "kit.trained_ranks", "cpu:gloo,cuda:nccl")
    failed = [f"{name}:\n{text}" for name in found for text in found[name] if text]
    assert not failed, "\n".join(failed)
