"""Over snapshots, Megatron's dist_checkpointing loads in other layouts, and a killed save leaves no checkpoint.

The tests run on CPU. They need the package `megatron-core` and are skipped without it; no environment of the project
has it.
"""

import importlib.util
import signal

import pytest

from kit.processes import run_ranks
from snapstore import Repository

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")


def run(place, name, *, ranks=2, **job):
    job = {"repo": str(place / "repo"), "folder": str(place / "iter_{}"), "objects": True} | job
    codes = run_ranks("megatron_worker.py", job, ranks, place / f"{name}.log")
    return codes, "".join((place / f"{name}.log.{rank}").read_text() for rank in range(ranks))


def load(place, step, *, ranks=2):
    folder = str(place / f"iter_{step}")
    return run(place, "load", ranks=ranks, do="load", step=step, saved=step, folder=folder, objects=ranks == 2)


@pytest.mark.parametrize("do", ["save", "async", "default"])
def test_what_two_ranks_save_other_layouts_load(tmp_path, do):
    codes, said = run(tmp_path, "save", do=do, steps=[100, 200])
    assert codes == [0, 0], said
    for ranks in (2, 1):
        codes, said = load(tmp_path, 100, ranks=ranks)
        assert codes == [0] * ranks, said
    with Repository.open(tmp_path / "repo") as repository:
        assert [snapshot.step for snapshot in repository.snapshots("megatron")] == [100, 200]
        assert repository.check().ok
        assert repository.restore("megatron@100")["decoder"]["layers.1.weight"].shape == (24, 16)
        repository.forget_snapshots(["megatron@100"])
        repository.gc()
    codes, said = load(tmp_path, 100, ranks=1)
    assert codes == [1]
    assert "refers to megatron@100" in said


def test_a_killed_save_leaves_no_checkpoint(tmp_path):
    codes, said = run(tmp_path, "save", do="async", steps=[100, 200], kill=200)
    assert codes == [-signal.SIGKILL] * 2, said
    assert sorted(path.name for path in (tmp_path / "iter_200").iterdir()) == ["common.pt"]
    codes, said = load(tmp_path, 100)
    assert codes == [0, 0], said
    codes, said = load(tmp_path, 200)
    assert codes == [1, 1]
    assert "is not a distributed checkpoint" in said
