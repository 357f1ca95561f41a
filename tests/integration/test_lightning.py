"""Lightning: a killed training that resumes from snapshots ends with the bits of an undisturbed one.

The trainings run in forks of one process (kit/lightning_worker.py). The checkpoint files of the adapter are tested in
this process.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from kit.faults import FaultStore, Unreadable
from kit.objects import flip
from kit.processes import TESTS, environment, free_port
from kit.samples import some
from snapstore import (
    CapabilityError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    KeepBest,
    KeepLast,
    NotFoundError,
    Repository,
    SnapshotManager,
    StorageError,
)
from snapstore.integrations.lightning_loops import connector
from snapstore.storage.memory import MemoryStore

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")

STEPS = 20


class Worker:
    """The process that has imported Lightning."""

    def __init__(self, folder):
        script = [sys.executable, str(TESTS / "kit" / "lightning_worker.py")]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            script, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.folder, self.number = folder, 0

    def train(self, kind, *, saves=True, ranks=1, stop=STEPS, kill=None, resume="latest", per_rank="same"):
        """Train; return the exit codes, and (steps, digest) of each rank that has ended."""
        self.number += 1
        out = self.folder / f"out-{self.number}"
        repo = str(self.folder / "repo") if saves else None
        job = {"kind": kind, "ranks": ranks, "repo": repo, "stop": stop, "kill": kill, "resume": resume}
        job |= {"per_rank": per_rank, "port": free_port(), "out": str(out)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        codes = next(json.loads(line) for line in self.process.stdout if line.startswith("[") and "Gloo" not in line)
        ended = [self.folder / f"{out.name}.{rank}" for rank in range(ranks)]
        return codes, [json.loads(path.read_text()) for path in ended if path.exists()]

    def said(self):
        self.log.seek(0)
        return self.log.read()


@pytest.fixture(scope="module")
def adapter():
    """The adapter's module. Only a process that runs such a test imports it: the import of Lightning takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own imports warn
        import lightning.pytorch  # noqa: F401

        from snapstore.integrations import lightning as adapter
    return adapter


def check_kill(worker, kind):
    _, [[steps, expected]] = worker.train(kind, saves=False)
    assert steps == list(range(1, STEPS + 1))
    codes, ended = worker.train(kind, kill=13)
    assert (codes, ended) == ([-9], [])
    codes, [[steps, found]] = worker.train(kind)
    assert codes == [0], worker.said()
    assert steps[0] in (6, 11), kind  # the kill may come before the save of step 10 is committed
    assert found == expected, kind


def check_ranks(worker, kind):
    codes, expected = worker.train(kind, ranks=2)
    assert codes == [0, 0], worker.said()
    codes, found = worker.train(kind, ranks=2, resume=10)
    assert codes == [0, 0], worker.said()
    assert [steps[0] for steps, _ in found] == [11, 11], kind
    assert [digest for _, digest in found] == [digest for _, digest in expected], kind


def check_one_of_two_ranks(worker):
    """One process resumes from the snapshot of two ranks if `per_rank` names the rank whose loop state it takes."""
    assert worker.train("sharded", resume=10, stop=12)[0] == [1]
    assert "per_rank" in worker.said()
    codes, [[steps, _]] = worker.train("sharded", resume=10, stop=12, per_rank=0)
    assert codes == [0], worker.said()
    assert steps == [11, 12]


def test_trainings_resume_bit_exact(tmp_path):
    """One test, so that one worker process trains them all: its imports take longer than the trainings."""
    worker = Worker(tmp_path)
    try:
        for kind in some(["one", "io"], 1):
            check_kill(worker, kind)
        for kind in (*some(["ddp", None], 1), "sharded"):
            if kind is not None:
                check_ranks(worker, kind)
        check_one_of_two_ranks(worker)
    finally:
        worker.process.stdin.close()
        worker.process.wait(60)
        worker.process.stdout.close()
        worker.log.close()


def fit(epochs, *callbacks, loader=DataLoader, validation=None, ckpt_path=None, **more):
    """Train a net with dropout on shuffled data, and validate it after each epoch; return the weights."""
    import lightning.pytorch

    class Net(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))

        def training_step(self, batch, index):
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(batch[0]).square().mean())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    data, net = TensorDataset(torch.arange(192.0).reshape(24, 8) / 100), Net()
    torch.manual_seed(1)
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "enable_checkpointing": bool(callbacks)} | more
    trainer = lightning.pytorch.Trainer(max_epochs=epochs, callbacks=list(callbacks), **options)
    loaders = loader(data, 4, shuffle=True), DataLoader(data, 4) if validation is None else validation
    trainer.fit(net, *loaders, ckpt_path=ckpt_path)
    return net.state_dict()


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
@pytest.mark.parametrize("when", ["step", "validation"])
def test_the_next_epoch_draws_as_if_nothing_had_happened(adapter, tmp_path, when):
    expected = fit(3)
    best = KeepBest("val_loss", mode="min")
    with SnapshotManager(tmp_path, run="r", save_interval_steps=6, keep=[KeepLast(9), best]) as manager:
        fit(2, adapter.SnapshotCallback(manager, when=when))
        assert manager.all_steps() == [6, 12]
        found = fit(3, adapter.SnapshotCallback(manager, when=when))
        assert manager.all_steps() == [6, 12, 18]
        assert len(manager.repository.snapshots("r")) == 3
        assert all(snapshot.metrics for snapshot in manager.repository.snapshots("r"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def hooks(seen):
    """Return a callback that notes the hooks of a training, with the epoch and the step."""
    import lightning.pytorch

    def noted(name):
        def hook(self, trainer, *_):
            if not trainer.sanity_checking:
                seen.append((name, trainer.current_epoch, trainer.global_step))

        return hook

    names = ("on_train_epoch_start", "on_train_batch_end", "on_validation_start", "on_validation_end")
    names += ("on_train_epoch_end", "on_train_end")
    return type("Hooks", (lightning.pytorch.Callback,), {name: noted(name) for name in names})()


ENDS = {"epochs": {}, "steps": {"max_steps": 24}, "early stopping": {}, "validations": {"val_check_interval": 0.5}}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
@pytest.mark.parametrize("when", ["step", "validation"])
@pytest.mark.parametrize("end", ENDS)
def test_a_resume_at_the_end_of_an_epoch_leaves_out_no_hook_and_repeats_none(adapter, tmp_path, end, when):
    from lightning.pytorch.callbacks import EarlyStopping

    def train(*callbacks):
        seen = []
        stops = [EarlyStopping("val_loss", mode="max", patience=2)] if end == "early stopping" else []
        options = {"enable_checkpointing": bool(callbacks)} | ENDS[end]
        weights = fit(-1 if "max_steps" in options else 4, hooks(seen), *stops, *callbacks, **options)
        return seen, weights, torch.rand(1)

    expected = train()
    assert expected[0][-1][2] == (18 if end == "early stopping" else 24)
    with SnapshotManager(tmp_path, run="r", save_interval_steps=6) as manager:
        for step in (None, 6, 12):
            seen, weights, number = train(adapter.SnapshotCallback(manager, when=when, resume=step))
            assert seen == expected[0][-len(seen) :]
            assert seen[0] == ("on_train_epoch_start", (step or 0) // 6, step or 0)
            assert all(torch.equal(weights[name], expected[1][name]) for name in weights)
            assert torch.equal(number, expected[2])


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
@pytest.mark.parametrize(
    "every", [{"val_check_interval": 2}, {"val_check_interval": 4, "check_val_every_n_epoch": None}]
)
def test_a_resume_leaves_out_no_validation_within_an_epoch(adapter, tmp_path, every):
    """Here a validation draws a random number, so the dropout after it would differ, too."""
    import lightning.pytorch
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Draw(lightning.pytorch.Callback):
        def on_validation_batch_end(self, *_):
            torch.rand(1)

    def train(*callbacks):
        seen = []
        options = {"loader": StatefulDataLoader, "enable_checkpointing": bool(callbacks)} | every
        weights = fit(3, Draw(), hooks(seen), *callbacks, **options)
        return seen, weights, torch.rand(1)

    expected = train()
    with SnapshotManager(tmp_path, run="r", save_interval_steps=4) as manager:
        for step in (None, 4, 8, 16):
            seen, weights, number = train(adapter.SnapshotCallback(manager, resume=step))
            assert manager.all_steps() == [4, 8, 12, 16]
            assert seen == expected[0][-len(seen) :]
            assert next(step for name, _, step in seen if name == "on_train_batch_end") == (step or 0) + 1
            assert all(torch.equal(weights[name], expected[1][name]) for name in weights)
            assert torch.equal(number, expected[2])


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
def test_a_save_waits_for_no_validation_that_does_not_come(adapter, tmp_path):
    """The loader of the validation has no batches, so Lightning calls none of its hooks."""
    with SnapshotManager(tmp_path, run="r", save_interval_steps=2) as manager:
        fit(1, adapter.SnapshotCallback(manager), val_check_interval=2, validation=[])
        assert manager.all_steps() == [3, 5, 6]


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
def test_a_job_that_is_told_to_end_saves_before_the_validation(adapter, tmp_path, caplog):
    """The resumed training leaves out the end of that epoch, and no batch of the next ones."""
    import lightning.pytorch

    class End(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 11:
                os.kill(os.getpid(), signal.SIGTERM)

    seen = []
    with SnapshotManager(tmp_path, run="r", save_interval_steps=6) as manager:
        manager.handle_preemption()
        with pytest.raises(SystemExit):
            fit(4, hooks(seen), End(), adapter.SnapshotCallback(manager))
    assert seen[-1] == ("on_train_batch_end", 1, 12)
    assert "step=12 is saved before the end of its epoch" in caplog.text
    for more in ({"epochs": 4}, {"epochs": -1, "max_steps": 24}):
        seen.clear()
        with SnapshotManager(tmp_path, run="r", save_interval_steps=6) as manager:
            fit(more.pop("epochs"), hooks(seen), adapter.SnapshotCallback(manager, resume=12), **more)
        assert seen[0] == ("on_train_epoch_start", 2, 12)
        assert [step for name, _, step in seen if name == "on_train_batch_end"] == list(range(13, 25))
        assert [epoch for name, epoch, _ in seen if name == "on_train_epoch_end"] == [2, 3]


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
@pytest.mark.parametrize("is_ours", [False, True])
def test_lightning_requeues_on_slurm_unless_the_job_has_its_signal(adapter, tmp_path, monkeypatch, is_ours):
    """Lightning writes a file and calls scontrol at SIGUSR1. If it is named to `handle_preemption`, we alone act."""
    import lightning.pytorch
    from lightning.fabric.plugins.environments import SLURMEnvironment

    class End(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 11:
                os.kill(os.getpid(), signal.SIGUSR1)

    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    for name, value in {"JOB_ID": "77", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning may have left ours after an earlier test
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    with SnapshotManager(tmp_path / "r", run="r", save_interval_steps=6) as manager:
        manager.handle_preemption(signals=[signal.SIGUSR1] if is_ours else ())
        status = None
        try:
            fit(4, End(), adapter.SnapshotCallback(manager), plugins=[SLURMEnvironment()], default_root_dir=tmp_path)
        except SystemExit as end:
            status = end.code
    assert status == (138 if is_ours else None)
    assert (tmp_path / "called").exists() == (tmp_path / "hpc_ckpt_1.ckpt").exists() == (not is_ours)
    assert is_ours or (tmp_path / "called").read_text() == "requeue 77\n"
    after = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    assert is_ours or after == before  # else Lightning has restored our handlers after `close`
    with Repository.open(tmp_path / "r") as repository:
        assert [one.step for one in repository.snapshots("r")] == ([6, 12] if is_ours else [6, 12, 18, 24])


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
def test_only_one_of_two_callbacks_resumes(adapter, tmp_path):
    """With two, the training would go on from the snapshot of the last callback, which may be an older one."""
    expected = fit(3)
    with (
        SnapshotManager(tmp_path / "new", run="r", save_interval_steps=6) as new,
        SnapshotManager(tmp_path / "old", run="r", save_interval_steps=12) as old,
    ):
        both = [adapter.SnapshotCallback(new), adapter.SnapshotCallback(old, resume=None)]
        fit(3, *both)
        assert (new.all_steps(), old.all_steps()) == ([6, 12, 18], [12])
        with pytest.raises(InvalidInputError, match=r"2 SnapshotCallbacks would resume.* resume=None to all but one"):
            fit(4, *[adapter.SnapshotCallback(manager) for manager in (new, old)])
        seen = []
        found = fit(3, hooks(seen), adapter.SnapshotCallback(new, resume=6), both[1])
        assert seen[0] == ("on_train_epoch_start", 1, 6)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
def test_the_next_fit_resumes_from_a_save_that_still_runs(adapter):
    """An error has ended the fit before it, so nothing has waited for its last save."""
    import lightning.pytorch

    class Ends(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 7:
                raise RuntimeError("the training ends")

    seen, store = [], HeldStore(MemoryStore())
    Repository.create(store.inner).close()
    with SnapshotManager(store, run="r", save_interval_steps=6) as manager:
        with pytest.raises(RuntimeError, match="the training ends"):
            fit(2, Ends(), adapter.SnapshotCallback(manager))
        threading.Timer(0.5, store.may.set).start()
        fit(2, adapter.SnapshotCallback(manager), hooks(seen))
        assert seen[0] == ("on_train_epoch_start", 1, 6)
        assert manager.all_steps() == [6, 12]


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
def test_no_fit_resumes_from_a_snapshot_that_something_else_saved(adapter, tmp_path):
    """Such as the plugin, if the callback has its run."""
    with SnapshotManager(tmp_path, run="r", save_interval_steps=6) as manager:
        manager.save(6, {"state_dict": {"w": torch.ones(2)}})
        with pytest.raises(InvalidInputError, match=r"r@6: was not saved by a SnapshotCallback.* use another run, or"):
            fit(1, adapter.SnapshotCallback(manager))


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
def test_a_stateful_loader_skips_no_epoch(adapter, tmp_path):
    """A resume at the end of an epoch goes on with the batches of the next epoch."""
    import lightning.pytorch
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Watch(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, index):
            seen.append((trainer.current_epoch, index, batch[0][:, 0].tolist()))

    seen = []
    fit(4, Watch(), loader=StatefulDataLoader, enable_checkpointing=False)
    expected = list(seen)
    assert [epoch for epoch, *_ in expected] == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6
    with SnapshotManager(tmp_path, run="r", save_interval_steps=6) as manager:
        fit(2, adapter.SnapshotCallback(manager), loader=StatefulDataLoader)
        seen.clear()
        fit(4, adapter.SnapshotCallback(manager), Watch(), loader=StatefulDataLoader)
        assert seen == expected[12:]
        assert manager.all_steps() == [6, 12, 18, 24]


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
def test_no_save_before_the_first_step_of_the_optimizer(adapter, tmp_path):
    """The optimizer accumulates the gradients of three batches, and no checkpoint holds gradients."""
    with SnapshotManager(tmp_path, run="r", save_interval_steps=2) as manager:
        fit(2, adapter.SnapshotCallback(manager), accumulate_grad_batches=3)
        assert manager.all_steps() == [2, 4]


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
@pytest.mark.parametrize("when", ["step", "validation"])
def test_a_fast_dev_run_neither_saves_nor_resumes(adapter, tmp_path, when):
    """A training would resume from its snapshot, and leave out the rest of the first epoch."""
    seen = []
    with SnapshotManager(tmp_path, run="r") as manager:
        fit(2, adapter.SnapshotCallback(manager, when=when), fast_dev_run=True)
        assert manager.all_steps() == []
        fit(2, adapter.SnapshotCallback(manager, when=when), hooks(seen))
        assert seen[0] == ("on_train_epoch_start", 0, 0)
        assert manager.latest_step() == 12
        seen.clear()
        fit(2, adapter.SnapshotCallback(manager, when=when), hooks(seen), fast_dev_run=True)
        assert seen[0] == ("on_train_epoch_start", 0, 0)
        assert manager.latest_step() == 12


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
def test_batches_with_several_optimizer_steps_pass_over_no_save(adapter, tmp_path):
    """Here the global step is always odd, so it is never a multiple of the interval."""
    import lightning.pytorch

    class Gan(lightning.pytorch.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def training_step(self, batch, index):
            for optimizer in self.optimizers()[: 1 if self.global_step == 0 else 2]:
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), 1e-2) for _ in range(2)]

    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for stop, steps in ((11, [5, 9]), (17, [5, 9, 13, 17])):
        with SnapshotManager(tmp_path, run="r", save_interval_steps=4) as manager:
            callback = adapter.SnapshotCallback(manager)
            trainer = lightning.pytorch.Trainer(max_steps=stop, callbacks=[callback], **options)
            trainer.fit(Gan(), DataLoader(torch.ones(20, 8)))
            assert manager.all_steps() == steps


# -- the files of the plugin


def checkpoint(step):
    return {"global_step": step, "state_dict": {"w": torch.full((3, 2), float(step))}, "callbacks": {"a": (1, None)}}


class HeldStore(FaultStore):
    """Commits no snapshot until the event `may` is set."""

    def __init__(self, inner):
        super().__init__(inner)
        self.may, self.refuses = threading.Event(), False

    def put(self, key, *args, **kwargs):
        if key.startswith("snapshots/"):
            assert self.may.wait(60)
            if self.refuses:
                raise StorageError("the store is gone")
        return super().put(key, *args, **kwargs)


def test_a_reference_is_never_ahead_of_its_commit(adapter, tmp_path):
    store, path = HeldStore(MemoryStore()), tmp_path / "a" / "last.ckpt"
    Repository.create(store.inner).close()
    with Repository.open(store) as repository:
        io = adapter.SnapstoreCheckpointIO(repository, run="r")
        store.may.set()
        io.save_checkpoint(checkpoint(0), path)  # there is no file, so it waits
        assert json.loads(path.read_text())["step"] == 0
        store.may.clear()
        io.save_checkpoint(checkpoint(1), path)
        assert json.loads(path.read_text())["step"] == 0
        store.may.set()
        assert io.load_checkpoint(path)["global_step"] == 1  # it waits
        old = path.read_text()
        store.refuses = True
        io.save_checkpoint(checkpoint(2), path)
        with pytest.raises(StorageError, match="the store is gone"):
            io.load_checkpoint(path)
        assert path.read_text() == old
        store.refuses = False
        io.save_checkpoint(checkpoint(3), path)  # the error was raised once
        io.teardown()
        assert json.loads(path.read_text())["step"] == 3
        assert io.load_checkpoint(path)["global_step"] == 3
        io.teardown()


class LateStore(FaultStore):
    """Commits each snapshot late, so that Lightning chooses the next name in the meantime if nothing waits."""

    def put(self, key, *args, **kwargs):
        if key.startswith("snapshots/"):
            time.sleep(0.1)
        return super().put(key, *args, **kwargs)


CHECKPOINTS = {
    "two callbacks, equal names": [{"monitor": "loss"}, {"monitor": "step", "mode": "max", "save_top_k": -1}],
    "names without the step": [{"monitor": "loss", "filename": "{epoch}", "save_top_k": 2}],
    "links": [{"monitor": "loss", "save_last": "link"}],
}


@pytest.mark.filterwarnings("ignore")  # Lightning warns about the number of workers
@pytest.mark.parametrize("options", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_the_same_checkpoints_as_with_files_of_lightning(adapter, tmp_path, options):
    """`ModelCheckpoint` looks at the disk for a free name, and removes by name."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    kept = {}
    for kind in ("files", "sync", "async"):
        store, folder = LateStore(MemoryStore()), tmp_path / kind
        Repository.create(store.inner).close()
        with Repository.open(store) as repository:
            io = adapter.SnapstoreCheckpointIO(repository, run="r", async_save=kind == "async")
            more = {} if kind == "files" else {"plugins": [io]}
            for epochs in (1, 2):  # the second training resumes, and removes files of the first
                callbacks = [ModelCheckpoint(folder, every_n_train_steps=2, **one) for one in options]
                path = max(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns, default=None)
                fit(epochs, *callbacks, ckpt_path=path, **more)
            load = (lambda file: torch.load(file, weights_only=False)) if kind == "files" else io.load_checkpoint
            files = sorted(folder.iterdir())
            steps = {file.name: (load(file)["global_step"], file.is_symlink()) for file in files}
            kept[kind] = steps, [sorted(one.best_k_models.values()) for one in callbacks]
            if kind != "files":
                assert len(repository.snapshots("r")) == sum(not file.is_symlink() for file in files)
            io.teardown()
    assert kept["sync"] == kept["files"]
    assert kept["async"] == kept["files"]


def test_hooks_hear_of_the_checkpoints(adapter, tmp_path):
    told = []
    io = adapter.SnapstoreCheckpointIO(tmp_path / "repo", run="r", on_commit=told.append)
    io.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    io.teardown()
    assert [event.step for event in told] == [1]


@pytest.mark.parametrize("async_save", [True, False])
def test_removed_and_replaced_files_forget_their_snapshots(adapter, tmp_path, async_save):
    io = adapter.SnapstoreCheckpointIO(tmp_path / "repo", run="r", async_save=async_save)
    for step in (1, 2, 3):
        io.save_checkpoint(checkpoint(step), tmp_path / f"step={step}.ckpt")
        io.save_checkpoint(checkpoint(step), tmp_path / "last.ckpt")
    io.remove_checkpoint(tmp_path / "step=1.ckpt")
    io.remove_checkpoint(tmp_path / "step=1.ckpt")
    io.teardown()
    with Repository.open(tmp_path / "repo") as repository:
        files = sorted(path.name for path in tmp_path.glob("*.ckpt"))
        assert files == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]
        assert [snapshot.step for snapshot in repository.snapshots("r")] == [2, 3, 3]
        repository.tag("r@2", "good")
        io.remove_checkpoint(tmp_path / "step=2.ckpt")
        io.teardown()
        assert repository.snapshot("r@good").state == "committed"
        repository.forget_snapshots([repository.snapshot("r@3").id], force=True)
        repository.gc()
    with pytest.raises(NotFoundError, match=r"refers to r@3 .* which is not there.*snapstore log --run r"):
        io.load_checkpoint(tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "step=3.ckpt")["state_dict"]["w"].tolist() == [[3.0, 3.0]] * 3


@pytest.mark.parametrize("how", ["damaged", "unread", "gone"])
def test_no_record_that_is_unknown_ends_a_training_when_a_file_is_removed(adapter, tmp_path, caplog, how):
    store = Unreadable(MemoryStore())
    Repository.create(store.inner).close()
    path = {step: tmp_path / f"step={step}.ckpt" for step in (1, 2, 3)}
    with Repository.open(store) as repository:
        io = adapter.SnapstoreCheckpointIO(repository, run="r", async_save=True)
        for step in (1, 2):
            io.save_checkpoint(checkpoint(step), path[step])
        io.teardown()
        key = repository.snapshot("r@1").key
        if how == "gone":
            store.inner.delete([key])
        elif how == "damaged":
            flip(store.inner, key, 60)
        else:
            store.bad.add(key)
        if how != "gone":
            repository.rebuild_index()
        with pytest.raises(StorageError if how == "unread" else IntegrityError, match="may be r@1 "):
            io.load_checkpoint(path[1])
        for step in (1, 2):
            io.remove_checkpoint(path[step])
        io.save_checkpoint(checkpoint(3), path[3])
        io.teardown()
        assert [file.name for file in tmp_path.glob("*.ckpt")] == ["step=3.ckpt"]
        assert [snapshot.step for snapshot in repository.snapshots("r")] == [3]
    assert "step=1 its file is gone, but its bytes stay: id:" in caplog.text
    assert "step=2 its file is gone, but its bytes stay: gc: " in caplog.text


def test_a_removed_or_replaced_link_keeps_the_snapshot_of_its_file(adapter, tmp_path):
    """ModelCheckpoint(save_last="link") makes such links."""
    io = adapter.SnapstoreCheckpointIO(tmp_path / "repo", run="r", async_save=False)
    best, link = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    io.save_checkpoint(checkpoint(1), best)
    for change in (io.remove_checkpoint, lambda path: io.save_checkpoint(checkpoint(2), path)):
        link.unlink(missing_ok=True)
        link.symlink_to(best)
        change(link)
        assert not link.is_symlink()
        assert io.load_checkpoint(best)["global_step"] == 1
    assert io.load_checkpoint(link)["global_step"] == 2
    link.unlink()
    link.symlink_to(tmp_path / "gone.ckpt")
    io.remove_checkpoint(link)
    assert not link.is_symlink()
    io.teardown()


def test_files_that_lead_nowhere_say_so(adapter, tmp_path):
    path, repo = tmp_path / "a.ckpt", tmp_path / "repo"
    io = adapter.SnapstoreCheckpointIO(repo, run="r", async_save=False)
    with pytest.raises(NotFoundError, match="no such checkpoint"):
        io.load_checkpoint(path)
    torch.save({"global_step": 1}, path)
    with pytest.raises(FormatError, match="is not a reference to a snapshot"):
        io.load_checkpoint(path)
    io.save_checkpoint(checkpoint(1), path)
    io.teardown()
    named = json.loads(path.read_text())
    path.write_text(json.dumps(named | {"version": 2}))
    with pytest.raises(FormatError, match="a reference of version 2, expected 1"):
        io.load_checkpoint(path)
    path.write_text(json.dumps(named))
    repo.rename(tmp_path / "moved")
    with pytest.raises(NotFoundError, match="if it has moved, pass its new URL"):
        io.load_checkpoint(path)
    moved = adapter.SnapstoreCheckpointIO(tmp_path / "moved", run="another")
    assert moved.load_checkpoint(path)["callbacks"] == {"a": (1, None)}
    with pytest.raises(TypeError, match="storage_options"):
        moved.save_checkpoint(checkpoint(1), path, storage_options={})
    with pytest.raises(InvalidInputError, match="expected a device or None"):
        moved.load_checkpoint(path, map_location={"cuda:1": "cpu"})


@pytest.mark.parametrize("async_save", [True, False])
def test_a_folder_in_the_place_of_a_checkpoint_is_refused_before_the_save(adapter, tmp_path, async_save):
    """Sharded strategies of Lightning write folders, also under names such as last.ckpt."""
    folder, repo = tmp_path / "last.ckpt", tmp_path / "repo"
    io = adapter.SnapstoreCheckpointIO(repo, run="r", async_save=async_save)
    folder.mkdir()
    with pytest.raises(InvalidInputError, match=r"last\.ckpt: is a folder; a checkpoint is a file"):
        io.save_checkpoint(checkpoint(1), folder)
    io.save_checkpoint(checkpoint(2), tmp_path / "a.ckpt")
    io.teardown()
    with Repository.open(repo) as repository:
        snapshot = repository.snapshot("r@2")
        assert repository.snapshots("r") == [snapshot]
        for path in (folder, tmp_path / "a.ckpt" / "b.ckpt"):
            with pytest.raises(StorageError, match=r"cannot be written: (Is a directory|File exists)"):
                adapter.references.write(str(path), repository, snapshot)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "last.ckpt", "repo"]


def test_a_reference_may_lie_in_a_remote_file_system(adapter, tmp_path):
    io = adapter.SnapstoreCheckpointIO(tmp_path / "repo", run="r")
    path = f"memory://snapstore-{os.getpid()}/a.ckpt"
    io.save_checkpoint(checkpoint(4), path)
    assert io.load_checkpoint(path)["global_step"] == 4
    io.remove_checkpoint(path)
    io.teardown()
    with pytest.raises(NotFoundError, match="no such checkpoint"):
        io.load_checkpoint(path)


def test_what_the_callback_does_not_know_is_refused(adapter):
    strategy = type("DeepSpeedStrategy", (), {})()
    callback = adapter.SnapshotCallback(lambda: None)
    with pytest.raises(InvalidInputError, match=r"DeepSpeedStrategy: .* docs/guides/deepspeed.md"):
        callback.setup(SimpleNamespace(strategy=strategy), None, "fit")
    with pytest.raises(CapabilityError, match=r"knows the releases 2\.5 and 2\.6"):
        connector(type("Trainer", (), {"__module__": "lightning.pytorch"})())
    with pytest.raises(InvalidInputError, match='state_dict_type="sharded"'):
        adapter._require_sharded({"state_dict": {"w": torch.ones(2)}})
    with pytest.raises(InvalidInputError, match="expected 'step' or 'validation'"):
        adapter.SnapshotCallback(lambda: None, when="epoch")


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_hyperparameters_of_omegaconf_come_back(tmp_path):
    """Hydra passes them. Lightning keeps the class of the config too, beside the config."""
    pytest.importorskip("omegaconf")
    import lightning.pytorch as pl
    from omegaconf import DictConfig, OmegaConf

    from snapstore.integrations.lightning import SnapshotCallback, SnapstoreCheckpointIO

    config = OmegaConf.create({"lr": 0.1, "width": 8, "out": "${width}"})
    OmegaConf.set_struct(config, True)

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters(config)
            self.net, self.loaded = torch.nn.Linear(8, 1), None

        def on_load_checkpoint(self, checkpoint):
            self.loaded = checkpoint

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.hparams.lr)

    def fit_it(epochs, callbacks, plugins=(), path=None):
        options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        net, loader = Net(), DataLoader(TensorDataset(torch.ones(8, 8)), 4)
        trainer = pl.Trainer(
            max_epochs=epochs, callbacks=callbacks, plugins=list(plugins), default_root_dir=tmp_path, **options
        )
        trainer.fit(net, loader, ckpt_path=path)
        return net.loaded

    for epochs in (1, 2):
        with SnapshotManager(tmp_path / "r", run="a") as manager:
            of_callback = fit_it(epochs, [SnapshotCallback(manager)])
        files = pl.callbacks.ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_last=True)
        plugin = SnapstoreCheckpointIO(tmp_path / "r", run="b")
        of_plugin = fit_it(epochs, [files], [plugin], tmp_path / "c" / "last.ckpt" if epochs == 2 else None)
    for loaded in (of_callback, of_plugin):
        assert (loaded["hyper_parameters"], loaded["hparams_type"]) == (config, DictConfig)
        assert OmegaConf.is_struct(loaded["hyper_parameters"])
        assert OmegaConf.is_interpolation(loaded["hyper_parameters"], "out")


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_hyperparameters_that_cannot_be_saved_are_found_after_the_first_batch(tmp_path):
    import lightning.pytorch as pl

    from snapstore.integrations.lightning import SnapshotCallback

    class Net(pl.LightningModule):
        def __init__(self, activation):
            super().__init__()
            self.save_hyperparameters()
            self.net, self.batches = torch.nn.Linear(8, 1), 0

        def training_step(self, batch, index):
            self.batches += 1
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    net = Net(torch.relu)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with SnapshotManager(tmp_path / "r", run="a", save_interval_steps=1000) as manager:
        trainer = pl.Trainer(max_epochs=1, callbacks=[SnapshotCallback(manager)], **options)
        with pytest.raises(InvalidInputError, match=r"hyper_parameters\.0\.activation: .*no stored form"):
            trainer.fit(net, DataLoader(TensorDataset(torch.ones(8, 8)), 1))
    assert net.batches == 1
