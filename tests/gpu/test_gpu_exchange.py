"""Two ranks, each on its own GPU, restore a state: they decode each chunk once per node and exchange it by NCCL."""

from __future__ import annotations

import pytest
import torch

from kit import dcp_ranks, exchange_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def test_on_two_gpus(tmp_path):
    exchange_ranks.other_worlds(tmp_path / "repository")
    names = ["cuda", "replicated"]
    found = dcp_ranks.run(tmp_path, 2, names, "kit.exchange_ranks", "cpu:gloo,cuda:nccl")
    failed = [f"{name}:\n{text}" for name in found for text in found[name] if text]
    assert not failed, "\n".join(failed)
