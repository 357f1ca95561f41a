"""The given ranks save together, or all of the job, or one process alone; no rank saves into the run of another."""

from __future__ import annotations

import logging
import sys
import textwrap
import types

import pytest

from kit.local_ranks import LocalRanks
from kit.processes import run_python
from snapstore import InvalidInputError, RanksError, Repository, SnapshotManager
from snapstore.distributed import choose
from snapstore.storage.memory import MemoryStore


def distributed(size, *, initialized=True, available=True):
    """Return a stand-in for the module torch.distributed."""
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
    said = r"run 'a': this is rank 1 of 4.*SnapshotManager, made on every rank.*run=f\"a-rank\{rank\}\".*ranks=False"
    with pytest.raises(InvalidInputError, match=said):
        repository.save({}, run="a", step=0)
    assert repository.snapshots() == []


def test_a_manager_that_was_made_too_early_says_so(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    with SnapshotManager(tmp_path, run="a") as manager:
        monkeypatch.setitem(sys.modules, "torch.distributed", distributed(4))
        said = r"run 'a': this is rank 1 of 4.*made before init_process_group.*make it after that, on every rank"
        with pytest.raises(InvalidInputError, match=said):
            manager.save(0, {})
        monkeypatch.delitem(sys.modules, "torch.distributed")


def test_a_manager_takes_the_ranks_of_the_job_by_itself(repository, monkeypatch, caplog):
    """It logs that, and it owns the channel that it has made, but not a channel that it was given."""
    made = LocalRanks(4)[1]
    made.close = lambda: made.posted.append("closed")
    torch_ranks = types.SimpleNamespace(TorchRanks=lambda: made)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(4))
    monkeypatch.setitem(sys.modules, "snapstore.distributed.torch_ranks", torch_ranks)
    with caplog.at_level(logging.INFO, "snapstore"):
        assert choose.choose("a", None) == (made, True)
    assert "run=a this is rank 1 of 4: all ranks save together; ranks=False saves alone" in caplog.text
    assert choose.choose("a", False) == (None, False)
    assert choose.choose("a", made) == (made, False)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(1))
    alone, is_made_here = choose.choose("a", None)
    assert (alone.count, is_made_here) == (1, True)
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert choose.choose("a", None) == (None, False)


def test_nothing_is_made_where_the_ranks_do_not_come(tmp_path, monkeypatch):
    def torch_ranks():
        raise RanksError("rank 0 of 2: did not come")

    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(2))
    module = types.SimpleNamespace(TorchRanks=torch_ranks)
    monkeypatch.setitem(sys.modules, "snapstore.distributed.torch_ranks", module)
    with pytest.raises(RanksError, match="rank 0 of 2"):
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
    with pytest.raises(InvalidInputError, match=f"ranks={given!r}: expected False or None.*ranks=False"):
        repository.save({}, run="a", step=0, ranks=given)
    with pytest.raises(InvalidInputError, match=f"ranks={given!r}: expected a Ranks"):
        SnapshotManager(repository, run="a", ranks=given)


def test_a_launcher_without_a_group_is_warned_of_once(repository, monkeypatch, caplog):
    """Child processes of a rank inherit its variables, so these variables are no reason to refuse."""
    choose._warn.cache_clear()
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
        choose._warn.cache_clear()
        caplog.clear()
        monkeypatch.setenv("WORLD_SIZE", wrong)
        repository.save({}, run="a", step=9)
        assert not caplog.records


def test_torch_distributed_is_not_imported_for_it():
    """A program that has not imported torch has no process group, so the check need not import torch."""
    program = """
        import sys
        from snapstore.distributed import choose
        choose.check("a", None)
        assert "torch" not in sys.modules and "torch.distributed" not in sys.modules
    """
    done = run_python("-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
