"""Two ranks train on CPUs, with gloo, while snapshots are written; tests/gpu has the same on two GPUs, with NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from kit import dcp_ranks, trained_ranks
from snapstore import Repository


@pytest.mark.timeout(300)
def test_on_two_ranks(tmp_path: Path) -> None:
    Repository.create(tmp_path / "repository", chunk_bytes=trained_ranks.CHUNK).close()
    found = dcp_ranks.run(tmp_path, 2, trained_ranks.CASES, "kit.trained_ranks")
    failed = [f"{name}:\n{text}" for name in found for text in found[name] if text]
    assert not failed, "\n".join(failed)
