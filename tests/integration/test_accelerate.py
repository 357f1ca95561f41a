"""Trainings with Hugging Face's Accelerate resume to the bit; what cannot be saved is refused."""

import importlib
import sys
import types

import pytest
import torch

from kit.processes import ROOT, run_python
from kit.repositories import same
from snapstore import CapabilityError, InvalidInputError, RngState, SaveHandle, SnapshotManager

STEPS = 14  # 6 in an epoch


@pytest.fixture
def ours():
    """snapstore.integrations.accelerate: imported by the tests that run, since it takes seconds."""
    pytest.importorskip("accelerate")
    yield importlib.import_module("snapstore.integrations.accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


class Counter:
    """An object to register for checkpointing."""

    def __init__(self):
        self.seen = torch.zeros(3)

    def state_dict(self):
        return {"seen": self.seen.clone()}

    def load_state_dict(self, state):
        self.seen = state["seen"].clone()


class Training:
    """Two layers with dropout, shuffled data, gradients of two batches, and a counter."""

    def __init__(self, *, seed=0, **options):
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        config = DataLoaderConfiguration(use_seedable_sampler=True, **options)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        loader = torch.utils.data.DataLoader(torch.arange(48.0).reshape(12, 4) / 48, batch_size=2, shuffle=True)
        self.prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def run(self, step, stop, manager=None, save=None):
        """Train from a step on; `manager` gives the generators of that step if it is inside an epoch."""
        model, optimizer, scheduler, loader = self.prepared
        begin = step
        while step < stop:
            loader.set_epoch(step // 6)
            skipped = step % 6
            stateful = loader.use_stateful_dataloader
            batches = self.accelerator.skip_first_batches(loader, skipped) if skipped and not stateful else loader
            for batch in batches:
                if step == begin and skipped:  # to make the iterator, a number was drawn
                    manager.restore_into({"rng": RngState()}, step, keys="rng")
                with self.accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    self.accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                self.counter.seen += batch[0, :3]
                step += 1
                if save is not None:
                    save(step)
                if step == stop:
                    break

    def end(self):
        model, optimizer, scheduler, _ = self.prepared
        states = [dict(model.state_dict()), optimizer.state_dict(), scheduler.get_last_lr(), self.accelerator.step]
        return [*states, self.counter.seen, torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("stateful", [False, True])
def test_a_training_resumes_to_the_bit(ours, tmp_path, stateful):
    first = Training(use_stateful_dataloader=stateful)
    with SnapshotManager(tmp_path, run="a", save_interval_steps=2) as manager:
        first.run(0, STEPS, save=lambda step: ours.save_state(first.accelerator, manager, step))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 4, 6, 8, 10, 12, 14]
        expected = first.end()
        for step in (4, 6, 10):
            again = Training(seed=7, use_stateful_dataloader=stateful)
            assert not same(again.end(), expected)
            assert ours.load_state(again.accelerator, manager, step).step == step
            assert again.accelerator.project_configuration.iteration == step // 2
            assert again.accelerator.step == step % 6
            assert again.prepared[3].iteration == step // 6
            again.run(step, STEPS, manager)
            assert same(again.end(), expected)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_a_resume_at_the_end_of_an_epoch_goes_on_with_the_next(ours, tmp_path, stateful, inside):
    """The loop leaves the epochs to the loader, and saves at the last batch, or after it."""

    def run(training, epochs, save=lambda: None):
        seen = []
        for _ in range(epochs):
            for batch in training.prepared[3]:
                seen.append(batch[:, 0].tolist())
                if inside and len(seen) == 6:
                    save()
            if not inside and len(seen) == 6:
                save()
        return seen

    first, again = (Training(use_stateful_dataloader=stateful) for _ in range(2))
    with SnapshotManager(tmp_path, run="a") as manager:
        expected = run(first, 3, lambda: ours.save_state(first.accelerator, manager, 6))
        ours.load_state(again.accelerator, manager)
        assert run(again, 2) == expected[6:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("evaluations", [0, 1, 2])
def test_a_stateful_loader_outside_an_epoch_changes_no_random_number(ours, tmp_path, evaluations):
    """Such as the loader of an evaluation, while the training is inside an epoch."""

    def made():
        training = Training(use_stateful_dataloader=True)
        return training, training.accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2))

    def evaluate(loader):
        return [batch.tolist() for batch in loader], torch.rand(1).item()

    first, loader = made()
    next(iter(first.prepared[3]))
    for _ in range(evaluations):
        evaluate(loader)
    with SnapshotManager(tmp_path, run="a") as manager:
        ours.save_state(first.accelerator, manager, 1)
        expected = [evaluate(loader) for _ in range(2)]
        again, loader = made()
        ours.load_state(again.accelerator, manager)
        assert [evaluate(loader) for _ in range(2)] == expected


def test_parts_skipped_steps_and_gradients(ours, tmp_path, caplog):
    training = Training()
    more = training.accelerator.prepare(torch.nn.Linear(1, 1))
    training.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    training.run(0, 1)
    with SnapshotManager(tmp_path, run="a", save_interval_steps=2) as manager:
        assert ours.save_state(training.accelerator, manager, 1).skipped
        assert not caplog.records
        other = training.accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4.0), shuffle=True))
        assert type(other.get_sampler()).__name__ == "SeedableRandomSampler"
        other.set_sampler(torch.utils.data.RandomSampler(range(4)))
        ours.save_state(training.accelerator, manager, 1, force=True, metrics={"loss": 3}, tags=["kept"]).result()
        assert "between two optimizer steps: without gradients" in caplog.text
        assert "the order of a loader with shuffle=True is not stored" in caplog.text
        assert sorted(manager.restore("kept")) == [
            "accelerator", "custom", "dataloader", "dataloader_1", "model", "model_1", "optimizer", "rng", "scaler",
            "scheduler",
        ]  # fmt: skip
        with torch.no_grad():
            more.weight += 1
        training.accelerator.scaler.update(9.0)
        ours.load_state(training.accelerator, manager, "kept")
        assert same(more.weight.data, manager.restore("kept")["model_1"]["weight"])
        assert training.accelerator.scaler.get_scale() == 4.0


def test_nothing_that_is_prepared(ours, tmp_path):
    """After free_memory() a snapshot would hold the generators and the registered objects only."""
    training = Training()
    training.accelerator.free_memory()
    with SnapshotManager(tmp_path, run="a") as manager:
        with pytest.raises(InvalidInputError, match=r"has prepared nothing, or free_memory\(\) has let it go"):
            ours.save_state(training.accelerator, manager, 1)
        assert manager.latest_step() is None


def test_what_is_refused(ours, tmp_path, monkeypatch):
    training = Training()
    accelerator = training.accelerator
    with SnapshotManager(tmp_path, run="a") as manager:
        handle = accelerator.register_save_state_pre_hook(print)
        with pytest.raises(InvalidInputError, match="register_save_state_pre_hook: a hook gets the path"):
            ours.save_state(accelerator, manager, 1)
        handle.remove()
        ours.save_state(accelerator, manager, 1).result()
        handle = accelerator.register_load_state_pre_hook(print)
        with pytest.raises(InvalidInputError, match="register_load_state_pre_hook"):
            ours.load_state(accelerator, manager)
        handle.remove()
        configuration = accelerator.project_configuration
        configuration.automatic_checkpoint_naming, configuration.total_limit = True, 2
        with pytest.raises(InvalidInputError, match=r"keep=\[KeepLast\(2\)\]"):
            ours.save_state(accelerator, manager, 2)
        configuration.total_limit = None
        from accelerate.utils import DistributedType

        with monkeypatch.context() as patch:
            patch.setitem(accelerator.state.__dict__, "distributed_type", DistributedType.DEEPSPEED)
            with pytest.raises(CapabilityError, match="got DEEPSPEED on cpu"):
                ours.save_state(accelerator, manager, 2)
        with monkeypatch.context() as patch:
            patch.delattr(accelerator, "_dataloaders")
            with pytest.raises(CapabilityError, match=r"keeps its prepared objects elsewhere than 1\.15"):
                ours.load_state(accelerator, manager)
        assert manager.all_steps() == [1]
        with monkeypatch.context() as patch:
            patch.setattr(manager, "save", lambda *_, **__: SaveHandle(skipped=True))
            assert ours.save_state(accelerator, manager, 2).skipped
        accelerator.register_for_checkpointing(types.SimpleNamespace(state_dict=lambda: print, load_state_dict=print))
        with pytest.raises(InvalidInputError, match="has no stored form"):
            ours.save_state(accelerator, manager, 2)
        assert configuration.iteration == 1
    monkeypatch.delitem(sys.modules, "snapstore.integrations.accelerate")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(CapabilityError, match=r"install it with 'pip install \"snapstore\[accelerate\]\"'"):
        importlib.import_module("snapstore.integrations.accelerate")


def script_of_the_guide(place):
    guide = (ROOT / "docs" / "guides" / "accelerate.md").read_text()
    script = guide.split("```python\n")[1].split("```")[0].replace("/data/snapshots", str(place))
    return script.replace("interval_steps=100", "interval_steps=2").replace("Accelerator(", "Accelerator(cpu=True, ")


def test_the_script_of_the_guide_runs_on_two_ranks(tmp_path):
    """Each rank has a loss of its own, and the metrics of a snapshot must be equal on all ranks."""
    (tmp_path / "train.py").write_text(script_of_the_guide(tmp_path / "snapshots"))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py", "4"]
    ran = run_python(*command, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    with SnapshotManager(tmp_path / "snapshots", run="exp1", read_only=True) as manager:
        assert manager.all_steps() == [2, 4]


def test_the_script_of_the_guide_runs(ours, tmp_path, monkeypatch, capsys):
    script = script_of_the_guide(tmp_path)
    for total in ("3", "4"):
        monkeypatch.setattr(sys, "argv", ["train.py", total])
        exec(script, {})
    assert capsys.readouterr().out.splitlines() == ["starting after step 0", "starting after step 2"]


def test_an_error_of_load_state_advises_what_its_caller_can_do(ours, tmp_path):
    """`load_state` takes no `keys`."""
    first, more = Training(), Training()
    added = more.accelerator.prepare(torch.nn.Linear(1, 1))
    with SnapshotManager(tmp_path, run="a") as manager:
        ours.save_state(first.accelerator, manager, 1)
        with pytest.raises(InvalidInputError, match="model_1: missing in the snapshot") as caught:
            ours.load_state(more.accelerator, manager)
        assert "keys=[" not in str(caught.value)
        assert "prepare what was prepared at the save; or load some of it yourself" in str(caught.value)
        model = more.accelerator.unwrap_model(more.prepared[0])
        manager.restore_into({"model": model}, 1, keys="model")
        assert same(model.state_dict(), first.prepared[0].state_dict())
        assert added is not None


def test_processes_that_train_alone_are_warned_of(ours, tmp_path, monkeypatch, caplog):
    """On a machine without a GPU, Accelerator() makes a group of all processes, and does not train with it."""
    training = Training()
    ours._warn_of_alone.cache_clear()
    with SnapshotManager(tmp_path, run="a") as manager:
        ours.save_state(training.accelerator, manager, 0)
        assert "trains alone" not in caplog.text
        monkeypatch.setattr(ours, "place", lambda: (0, 2))
        for step in (1, 2):
            ours.save_state(training.accelerator, manager, step)
    assert caplog.text.count("each of the 2 processes trains alone, without the gradients of the others") == 1
