"""A torchtitan job that is killed resumes from its snapshot, and ends with the bits of a job that was not killed.

The tests use torchtitan's components on CPU. Most need the package `torchtitan` and are skipped without it; no
environment of the project has it.
"""

import importlib.util
import json
import signal
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kit.faults import Unreadable
from kit.objects import flip
from kit.processes import run_ranks
from snapstore import CapabilityError, IntegrityError, InvalidInputError, NotFoundError, Repository, StorageError
from snapstore.integrations import torchtitan as adapter
from snapstore.integrations.torchtitan import checkpoint_manager, use_by_default
from snapstore.storage.local import LocalStore

needs_torchtitan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
)
CONFIG = {"enable": True, "interval": 2, "async_mode": "async", "last_save_model_only": False, "keep_latest_k": 0}


def train(place, out, *, repo="repo", ranks=2, stop=8, kill=None, load_step=-1, **config):
    job = {"repo": str(place / repo), "stop": stop, "kill": kill, "load_step": load_step, "out": str(place / out)}
    codes = run_ranks("torchtitan_worker.py", job | {"config": CONFIG | config}, ranks, place / f"{out}.log")
    ended = [place / f"{out}.{rank}" for rank in range(ranks)]
    said = "".join((place / f"{out}.log.{rank}").read_text() for rank in range(ranks))
    return codes, [json.loads(path.read_text()) for path in ended if path.exists()], said


@needs_torchtitan
def test_a_killed_job_resumes_bit_exact(tmp_path):
    _, expected, said = train(tmp_path, "whole", repo="other")
    assert [found[:2] for found in expected] == [[False, list(range(1, 9))]] * 2, said
    codes, _, said = train(tmp_path, "killed", kill=5)
    assert codes == [-signal.SIGKILL] * 2, said
    codes, found, said = train(tmp_path, "resumed")
    assert codes == [0, 0], said
    first = found[0][1][0]
    assert first in (3, 5)  # the kill may come before the save of step 4 is committed
    assert found == [[True, list(range(first, 9)), digest] for _, _, digest in expected]
    codes, found, said = train(tmp_path, "alone", ranks=1, load_step=6, exclude_from_loading=["dataloader"])
    assert codes == [0], said
    assert found[0][:2] == [True, [7, 8]]
    with Repository.open(tmp_path / "repo") as repository:
        parts = set(repository.restore("titan@latest"))
        assert parts == {"model", "optimizer", "lr_scheduler", "dataloader", "train_state"}
        assert repository.check().ok


@needs_torchtitan
def test_the_last_step_stores_the_model_alone_and_old_steps_go(tmp_path):
    config = {"last_save_model_only": True, "export_dtype": "bfloat16", "keep_latest_k": 2, "async_mode": "disabled"}
    codes, _, said = train(tmp_path, "a", **config)
    assert codes == [0, 0], said
    with Repository.open(tmp_path / "repo") as repository:
        assert [snapshot.step for snapshot in repository.snapshots("titan")] == [6, 8]
        state = repository.restore("titan@8")
    assert list(state) == ["model"]
    assert {value.dtype for value in state["model"].values()} == {torch.bfloat16}


class Counter:
    """A component of a Trainer, with a state of one number."""

    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def make(place, run="r", repository=None, release=2, hooks=None, **config):
    """Make a manager over a model of one layer, by the interface of torchtitan 0.<release> but without torchtitan."""
    known = {"load_only": False, "interval": 2, "enable_first_step_checkpoint": True, "exclude_from_loading": []}
    known |= {"initial_load_path": None, "initial_load_model_only": True, "initial_load_in_hf": False}
    known |= {"last_save_in_hf": False, "export_dtype": "float32"}
    model, counter = torch.nn.Linear(3, 2), Counter()
    manager = checkpoint_manager(repository or place / "repo", run=run, **hooks or {})(
        dataloader=Counter(),
        model_parts=[model],
        optimizers=Counter(),
        lr_schedulers=Counter(),
        states={"train_state": counter},
        **{"checkpoint_config" if release == 2 else "config": SimpleNamespace(**CONFIG | known | config)},
    )
    return manager, model, counter


def test_hooks_hear_of_the_saves(tmp_path):
    told = []
    manager, _, _ = make(tmp_path, hooks={"on_commit": told.append})
    assert manager.save(2) is True
    manager.close()
    assert [event.step for event in told] == [2]


def test_the_config_decides(tmp_path):
    manager, model, counter = make(tmp_path)
    assert manager.load() is False
    weights = model.weight.detach().clone()
    counter.at = 7
    assert [manager.save(step) for step in (1, 2, 3)] == [True, True, False]
    counter.at = 8
    assert manager.save(5, last_step=True) is True
    with torch.no_grad():
        model.weight.zero_()
    counter.at = 0
    with pytest.raises(NotFoundError, match="load_step 4"):
        manager.load(4)
    assert manager.load(2) is True
    assert (counter.at, torch.equal(model.weight, weights)) == (7, True)
    manager.close()
    manager.close()

    manager, model, counter = make(tmp_path, run="next", initial_load_path="r@5")
    assert manager.load() is True
    assert (counter.at, torch.equal(model.weight, weights)) == (0, True)  # the model alone
    manager.close()
    with Repository.open(tmp_path / "repo") as repository:
        repository.tag("r@5", "v2")
    manager, _, counter = make(tmp_path, run="next", initial_load_path="r@v2", initial_load_model_only=False)
    assert manager.load() is True
    assert counter.at == 8
    manager.close()
    manager, *_ = make(tmp_path, run="next", initial_load_path="r@v1")
    with pytest.raises(NotFoundError, match="tags: v2"):  # and not step 1
        manager.load()
    manager.close()
    manager, *_ = make(tmp_path, load_only=True)
    assert [manager.load(), manager.save(2), manager.save(3, last_step=True)] == [True, False, False]
    manager.close()
    manager, *_ = make(tmp_path, enable=False)
    assert [manager.load(), manager.save(2)] == [False, False]
    manager.close()


def test_the_arguments_of_release_0_3(tmp_path):
    """It passes its config under another name, and takes only paths and URIs as `initial_load_path`."""
    manager, model, _ = make(tmp_path, release=3)
    weights = model.weight.detach().clone()
    assert manager.save(2) is True
    manager.close()
    manager, model, _ = make(tmp_path, run="next", release=3, initial_load_path="snapstore://r@2")
    assert manager.load() is True
    assert torch.equal(model.weight, weights)
    manager.close()


def test_a_trainer_of_each_release_makes_our_manager(tmp_path, monkeypatch):
    train, components = ModuleType("torchtitan.train"), ModuleType("torchtitan.components.checkpointer")
    for module in (ModuleType("torchtitan"), train, components):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["torchtitan"].train = train
    monkeypatch.setattr(adapter, "version", lambda package: "0.4")
    with pytest.raises(CapabilityError, match=r"torchtitan 0\.4: makes its checkpoint manager in another way"):
        use_by_default(tmp_path / "repo", run="a")
    theirs = type("CheckpointManager", (), {"Config": type("Config", (), {})})
    components.CheckpointManager = theirs
    with pytest.raises(CapabilityError, match=r"torchtitan 0\.4"):
        use_by_default(tmp_path / "repo", run="a")
    theirs.Config._owner = theirs
    for run in ("a", "b"):  # as a cell of a notebook, executed twice
        use_by_default(tmp_path / "repo", run=run)
        made = theirs.Config()._owner(config=SimpleNamespace(enable=False, load_only=False))
        assert isinstance(made, adapter.SnapstoreCheckpointManager)
    train.CheckpointManager = theirs  # 0.2 looks it up there
    use_by_default(tmp_path / "repo", run="a")
    assert train.CheckpointManager.func is adapter.SnapstoreCheckpointManager


@pytest.mark.parametrize(
    ("how", "error"), [("damaged", IntegrityError), ("unread", StorageError), ("gone", IntegrityError)]
)
def test_a_step_whose_record_is_unknown_is_not_called_missing(tmp_path, how, error):
    manager, *_ = make(tmp_path)
    assert [manager.save(step) for step in (1, 2)] == [True, True]
    manager.close()
    store = LocalStore(tmp_path / "repo")
    with Repository.open(store) as repository:
        key = repository.snapshot("r@1").key
    if how == "gone":
        store.delete([key])
    elif how == "damaged":
        flip(store, key, 60)
    with Repository.open(Unreadable(store, key) if how == "unread" else store) as repository:
        manager, *_ = make(tmp_path, repository=repository)
        with pytest.raises(error, match="step 1 of r: may be r@1 "):
            manager.load(1)
        with pytest.raises(NotFoundError, match="load_step 4"):
            manager.load(4)
        assert manager.load(2) is True
        manager.close()


def test_a_config_for_other_formats_is_refused(tmp_path):
    for config in ({"initial_load_in_hf": True}, {"last_save_in_hf": True}):
        with pytest.raises(InvalidInputError, match="snapstore export"):
            make(tmp_path, **config)
    with pytest.raises(InvalidInputError, match="exclude_from_loading"):
        make(tmp_path, exclude_from_loading=["loader"])
    manager, *_ = make(tmp_path, initial_load_path="/checkpoints/step-100")
    with pytest.raises(InvalidInputError, match="expected a reference such as 'exp0@1000'"):
        manager.load()
    manager.close()
