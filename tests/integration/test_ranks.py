"""No rank of a distributed job saves over the run of another rank without `ranks=False`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

import snapstore
from snapstore import InvalidInputError, Repository, SnapshotManager, ranks
from snapstore.storage.memory import MemoryStore

RANK = textwrap.dedent("""
    import sys
    from datetime import timedelta

    import torch

    import snapstore
    from snapstore import InvalidInputError, Repository, SnapshotManager

    def refused(act):
        try:
            act()
        except InvalidInputError as error:
            assert "ranks=False" in str(error) and f"rank {rank} of 2" in str(error), error
        else:
            raise AssertionError("was not refused")

    folder, rank = sys.argv[1], int(sys.argv[2])
    early = SnapshotManager(folder, run=f"early-{rank}")
    early.save(0, {"w": torch.ones(3)}).result()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=240)
    )
    refused(lambda: early.save(1, {"w": torch.ones(3)}))
    early.close()
    refused(lambda: SnapshotManager(folder, run="job"))
    with Repository.open(folder) as repository:
        refused(lambda: repository.save({"w": torch.ones(3)}, run="job", step=0))
        repository.save({"w": torch.ones(3)}, run=f"alone-{rank}", step=0, ranks=False)
    torch.manual_seed(rank)
    state = {"w": torch.full((5000,), float(rank)), "rng": snapstore.RngState()}
    with SnapshotManager(folder, run=f"job-rank{rank}", ranks=False) as snapshots:
        snapshots.save(7, state)
    expected = torch.rand(4)
    torch.distributed.barrier()
    with SnapshotManager(folder, run=f"job-rank{1 - rank}", read_only=True) as other:
        assert (other.restore()["w"] == 1 - rank).all()
    with SnapshotManager(folder, run=f"job-rank{rank}", ranks=False) as snapshots:
        torch.manual_seed(99)
        state["w"].zero_()
        assert snapshots.restore_into(state).step == 7
    assert (state["w"] == rank).all()
    assert torch.equal(torch.rand(4), expected)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    print("done", rank)
""")


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """Two processes with gloo: each is refused; with a run each, and told so, each restores what is its own."""
    folder = tmp_path / "repository"
    Repository.create(folder).close()
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "SNAPSTORE_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(rank)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=250)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, text in enumerate(said):
        assert processes[rank].returncode == 0, text
        assert f"done {rank}" in text
    with Repository.open(folder) as repository:
        runs = {snapshot.run for snapshot in repository.snapshots()}
        assert runs == {f"{name}{rank}" for name in ("early-", "alone-", "job-rank") for rank in range(2)}
        assert repository.check("restore").ok


def distributed(size, *, initialized=True, available=True):
    """As torch.distributed is."""
    return types.SimpleNamespace(
        is_available=lambda: available, is_initialized=lambda: initialized, get_world_size=lambda: size,
        get_rank=lambda: 1,
    )  # fmt: skip


@pytest.fixture
def repository():
    with Repository.create(MemoryStore()) as made:
        yield made


def test_the_error_says_what_to_do(repository, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(4))
    said = r"run 'a': this is rank 1 of 4.*run=f\"a-rank\{rank\}\".*rank 0 alone.*full_state_dict=True.*ranks=False"
    with pytest.raises(InvalidInputError, match=said):
        repository.save({}, run="a", step=0)
    with pytest.raises(InvalidInputError, match=said):
        SnapshotManager(repository, run="a")
    assert repository.snapshots() == []


def test_nothing_is_made_where_a_manager_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(2))
    with pytest.raises(InvalidInputError, match="rank 1 of 2"):
        SnapshotManager(tmp_path / "new", run="a")
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_are_not_refused(repository, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(2))
    repository.save({"n": 1}, run="a", step=0, ranks=False)
    assert repository.restore("a@0") == {"n": 1}
    with SnapshotManager(repository, run="a", read_only=True) as snapshots:
        assert snapshots.restore() == {"n": 1}
    with SnapshotManager(repository, run="a", ranks=False) as snapshots:
        assert snapshots.save(1, {"n": 2}).result().step == 1
    for other in (distributed(1), distributed(2, initialized=False), distributed(2, available=False)):
        monkeypatch.setitem(sys.modules, "torch.distributed", other)
        repository.save({"n": 1}, run="b", step=0)
        SnapshotManager(repository, run="b").close()
    monkeypatch.delitem(sys.modules, "torch.distributed")
    repository.save({"n": 1}, run="b", step=1)


def test_a_group_that_is_formed_later_is_seen_at_the_next_save(repository, monkeypatch):
    with SnapshotManager(repository, run="a") as snapshots:
        snapshots.save(0, {"n": 1}).result()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch.distributed", distributed(2))
            with pytest.raises(InvalidInputError, match="rank 1 of 2"):
                snapshots.save(1, {"n": 1})
        snapshots.save(2, {"n": 1}).result()
        assert snapshots.all_steps() == [0, 2]


@pytest.mark.parametrize("given", [True, 2, "no"])
def test_no_other_value_is_taken(repository, given):
    with pytest.raises(InvalidInputError, match=f"ranks={given!r}: .*not built yet.*ranks=False"):
        repository.save({}, run="a", step=0, ranks=given)
    with pytest.raises(InvalidInputError, match="not built yet"):
        SnapshotManager(repository, run="a", ranks=given)


def test_a_launcher_without_a_group_is_warned_of_once(repository, monkeypatch, caplog):
    """Child processes of a rank inherit its variables, so they are no reason to refuse."""
    ranks._warn.cache_clear()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.WARNING, "snapstore"):
        repository.save({}, run="a", step=0, ranks=False)
        assert not caplog.records
        for step in range(1, 4):
            repository.save({}, run="a", step=step)
        SnapshotManager(repository, run="a").close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "RANK=1 and WORLD_SIZE=2" in caplog.text
    assert "ranks=False" in caplog.text
    for wrong in ("1", "", "many"):
        ranks._warn.cache_clear()
        caplog.clear()
        monkeypatch.setenv("WORLD_SIZE", wrong)
        repository.save({}, run="a", step=9)
        assert not caplog.records


def test_torch_distributed_is_not_imported_for_it():
    """Where the program has not imported torch, a refusal could have no reason."""
    program = """
        import sys
        from snapstore import ranks
        ranks.check("a", None)
        assert "torch" not in sys.modules and "torch.distributed" not in sys.modules
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(snapstore.__path__[0]).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, env=env, timeout=120)
