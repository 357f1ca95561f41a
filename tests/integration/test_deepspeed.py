"""DeepSpeed on CPU: a job that is killed resumes from its snapshot with the bits of one that was not.

These tests need the package `deepspeed`, which no environment of the project has: they are skipped without it.
"""

import importlib.util
import json
import os
import signal

import pytest

from kit.processes import run_ranks
from snapstore import Repository

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def train(place, out, *, ranks, **job):
    """Train in processes; return their exit codes, and the steps and digest of each that has ended."""
    job = {"stop": 8, "kill": None, "async": False, "bf16": False, "repo": str(place / "repo")} | job
    job |= {"folder": str(place / job["folder"]), "out": str(place / out)}
    codes = run_ranks("deepspeed_worker.py", job, ranks, place / f"{out}.log", DS_ACCELERATOR="cpu")
    ended = [place / f"{out}.{rank}" for rank in range(ranks)]
    return codes, [json.loads(path.read_text()) for path in ended if path.exists()]


@pytest.mark.parametrize(
    ("stage", "ranks", "is_async", "bf16"),
    [(0, 2, False, False), (1, 1, False, False), (1, 2, True, False), (2, 2, False, True), (3, 2, True, True)],
)
def test_a_killed_job_resumes_bit_exact(tmp_path, stage, ranks, is_async, bf16):
    job = {"stage": stage, "ranks": ranks, "async": is_async, "bf16": bf16}
    _, expected = train(tmp_path, "whole", folder="a", **job)
    assert [steps for steps, _ in expected] == [list(range(1, 9))] * ranks
    codes, _ = train(tmp_path, "killed", folder="b", kill=5, **job)
    assert codes == [-signal.SIGKILL] * ranks
    assert (tmp_path / "b" / "latest").read_text() == "global_step4"
    codes, found = train(tmp_path, "resumed", folder="b", **job)
    assert codes == [0] * ranks, (tmp_path / "resumed.log.0").read_text()
    assert found == [[[5, 6, 7, 8], digest] for _, digest in expected]
    with Repository.open(tmp_path / "repo") as repository:
        parts = {ref.part for ref in repository.snapshot(f"zero{stage}@8").manifests} - {""}
        assert repository.check().ok
    files = {os.path.relpath(file, tmp_path / "b" / "global_step8") for file in (tmp_path / "b").glob("*8/*.pt")}
    assert parts == files
    assert len(files) == {0: 1, 1: 1 + ranks, 2: 1 + ranks, 3: 2 * ranks}[stage]


def test_what_cannot_be_saved_or_loaded_is_refused(tmp_path):
    import torch
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

    from snapstore import InvalidInputError, NotFoundError
    from snapstore.integrations.deepspeed import SnapstoreCheckpointEngine

    saver = SnapstoreCheckpointEngine(tmp_path / "repo", run="r", async_save=True)
    with pytest.raises(InvalidInputError, match="save_latest=False"):
        saver.create(CheckpointCommitInfo("global_step1", str(tmp_path), True))
    with pytest.raises(InvalidInputError, match="'best': expected a step"):
        saver.create(CheckpointCommitInfo("best", str(tmp_path), False))
    info = CheckpointCommitInfo("global_step1", str(tmp_path), False)
    saver.create(info)
    saver.save({"w": torch.ones(2)}, str(tmp_path / "model.bin"))  # save_16bit_model
    saver.commit(info)
    assert torch.load(tmp_path / "model.bin")["w"].tolist() == [1.0, 1.0]
    assert saver.manager.latest_step() is None
    saver.create(info)
    saver.makedirs(str(tmp_path / "global_step1"))
    path = tmp_path / "global_step1" / "mp_rank_00_model_states.pt"
    saver.save({"w": torch.ones(2)}, str(path))
    saver.commit(info)
    assert saver.load(str(path))["w"].tolist() == [1.0, 1.0]
    assert (tmp_path / "latest").read_text() == "global_step1"
    saver.manager.repository.forget_snapshots(["r@1"], force=True)
    saver.manager.repository.gc()
    with pytest.raises(NotFoundError, match="refers to r@1"):
        saver.load(str(path))
    saver.close()
