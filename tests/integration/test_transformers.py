"""Trainings with Hugging Face's Trainer resume to the bit, and its options are honoured or refused."""

import importlib
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from kit.forked import Forked
from kit.objects import flip
from kit.processes import ROOT, environment
from kit.ranks import Managers
from kit.repositories import created, opened, same
from snapstore import (
    CapabilityError,
    IntegrityError,
    InvalidInputError,
    KeepLast,
    NotFoundError,
    RanksError,
    RngState,
    SnapshotManager,
)
from snapstore.storage.local import LocalStore


@pytest.fixture
def hf():
    """Import kit.hugging_face only for tests that run, since the import takes seconds."""
    pytest.importorskip("transformers")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("kit.hugging_face")
    torch.set_num_threads(before)


def open_manager(tmp_path, **options):
    return SnapshotManager(tmp_path / "snapshots", run="a", **options)


def end_of(trained):
    """Return all that a training has at its end: states, the next random numbers, and its log without speeds."""
    logged = [
        {name: value for name, value in sorted(entry.items()) if "_per_sec" not in name and "_runtime" not in name}
        for entry in trained.state.log_history
        if "train_runtime" not in entry
    ]
    scheduler = {name: value for name, value in trained.lr_scheduler.state_dict().items() if name != "lr_lambdas"}
    states = [trained.model.state_dict(), trained.optimizer.state_dict(), scheduler]
    return [dict(states[0]), *states[1:], torch.get_rng_state(), random.random(), np.random.random(), logged]


def resumed(hf, tmp_path, step=None, **options):
    with open_manager(tmp_path) as manager, hf.checkpoint_dir(manager, step) as path:
        made = hf.trainer(tmp_path / "resumed", hf.SnapshotCallback(manager), **options)
        made.train(resume_from_checkpoint=path)
        return made


def test_a_killed_training_resumes_to_the_bit(hf, tmp_path):
    killed = Forked("-m", "kit.hugging_face", str(tmp_path), "6", log=tmp_path / "log", env=environment())
    assert killed.wait(600) == -signal.SIGKILL, killed.text()
    assert not list((tmp_path / "killed").glob("checkpoint-*"))
    whole = hf.trainer(tmp_path / "whole", save_strategy="no")
    whole.train()
    expected = end_of(whole)
    with open_manager(tmp_path, read_only=True) as manager:
        steps = manager.all_steps()
        assert steps in ([3], [3, 6])
    assert same(end_of(resumed(hf, tmp_path)), expected)
    assert same(end_of(resumed(hf, tmp_path, 3)), expected)
    with open_manager(tmp_path) as manager:
        assert manager.all_steps() == [3, 6, 8]
        torch.manual_seed(7)  # so the test sees if other random numbers are drawn
        with hf.checkpoint_dir(manager, 3) as path:
            Path(path, "rng_state.pth").unlink()
            other = hf.trainer(tmp_path / "other")
            other.train(resume_from_checkpoint=path)
        assert not same(end_of(other)[0], expected[0])
        assert manager.repository.snapshot("a@6").metrics.keys() == {
            "loss", "grad_norm", "learning_rate", "epoch", "eval_loss",
        }  # fmt: skip


def test_the_end_of_an_epoch_and_the_intervals_of_the_manager(hf, tmp_path):
    """The snapshot of the last step of an epoch has the metrics of the evaluation after it."""
    options = {"eval_strategy": "epoch", "save_strategy": "no"}
    whole = hf.trainer(tmp_path / "whole", **options)
    whole.train()
    expected = end_of(whole)
    with open_manager(tmp_path, save_interval_steps=5) as manager, hf.checkpoint_dir(manager) as path:
        assert path is None
        hf.trainer(tmp_path / "first", hf.SnapshotCallback(manager), **options).train()
        assert manager.all_steps() == [5]
        assert "eval_loss" in manager.repository.snapshot("a@5").metrics
    assert same(end_of(resumed(hf, tmp_path, **options)), expected)


class Fifty(torch.utils.data.IterableDataset):
    """Fifty texts without a length."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(2)
        for _ in range(50):
            text = torch.randint(0, 64, (8,), generator=generator)
            yield {"input_ids": text, "labels": text}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"train_dataset": Fifty()},
        {"dataloader_num_workers": 1},
        {"gradient_accumulation_steps": 3},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}},
        {"optim": "adafactor", "neftune_noise_alpha": 5},
        {"bf16": True, "include_num_input_tokens_seen": "non_padding"},
        {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"},
        {"eval_strategy": "no", "accelerator_config": {"split_batches": True}, "logging_first_step": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_a_resume_is_exact_with_other_options(hf, tmp_path, options):
    """The snapshots of a training resume to the end of another one, which saves none."""
    expected = end_of(trained(hf, tmp_path / "whole", **options | {"save_strategy": "no"}))
    with open_manager(tmp_path) as manager:
        trained(hf, tmp_path / "first", hf.SnapshotCallback(manager), **options)
        steps = manager.all_steps()
    assert steps in ([3, 6, 8], [5, 8])
    for step in steps[:-1]:  # a training that has ended makes one more step
        place = tmp_path / str(step)
        shutil.copytree(tmp_path / "snapshots", place / "snapshots")
        with open_manager(place) as manager, hf.checkpoint_dir(manager, step) as path:
            found = end_of(trained(hf, place, hf.SnapshotCallback(manager), path=path, **options))
        assert same(found, expected), step


def test_state_that_torch_casts_resumes_to_the_bit(hf, tmp_path):
    """Adafactor has float32 state for bfloat16 weights. The Trainer alone loads it as bfloat16, and differs."""
    options = {"optim": "adafactor", "dtype": torch.bfloat16, "eval_strategy": "no"}
    whole = trained(hf, tmp_path / "whole", **options)
    assert whole.optimizer.state_dict()["state"][0]["exp_avg_sq_row"].dtype == torch.float32
    alone = trained(hf, tmp_path / "alone", path=str(tmp_path / "whole" / "checkpoint-3"), **options)
    assert not same(end_of(alone)[1], end_of(whole)[1])
    with open_manager(tmp_path) as manager:
        expected = end_of(trained(hf, tmp_path / "first", hf.SnapshotCallback(manager), **options))
        with hf.checkpoint_dir(manager, 3) as path:
            found = trained(hf, tmp_path / "second", hf.SnapshotCallback(manager), path=path, **options)
    assert same(end_of(found), expected)  # the folder is gone, and the state still there


def test_state_of_other_parameters_is_refused_when_the_training_begins(hf, tmp_path):
    """torch gives it to the parameters at the same positions."""

    def named(made, reverse):
        parameters = list(made.model.named_parameters())
        made.optimizer = torch.optim.AdamW(parameters[::-1] if reverse else parameters, 0.01)

    with open_manager(tmp_path) as manager:
        for reverse in (False, True):
            made = hf.trainer(tmp_path / "out", hf.SnapshotCallback(manager))
            named(made, reverse)
            with hf.checkpoint_dir(manager, 3 if reverse else None) as path:
                if not reverse:
                    made.train()
                    continue
                with pytest.raises(InvalidInputError, match="a@3: the state does not fit the optimizer") as error:
                    made.train(resume_from_checkpoint=path)
    assert "optimizer.state.0.exp_avg: shape: expected (16,) as parameter 0" in error.value.args[1]


def trained(hf, folder, *callbacks, path=None, train_dataset=None, dtype=torch.float32, **options):
    if options.get("eval_strategy") == "no":
        options["metric_for_best_model"] = None
    made = hf.trainer(folder, *callbacks, **options)
    made.train_dataset = train_dataset or made.train_dataset
    made.model.to(dtype)
    if made.args.metric_for_best_model is None:
        made.remove_callback(hf.EarlyStoppingCallback)
    made.train(resume_from_checkpoint=path)
    return made


@pytest.mark.parametrize("restores", [True, False])
def test_the_patience_of_early_stopping_is_restored_only_on_demand(hf, tmp_path, restores):
    """The evaluations get worse from the first on, and the patience is 5. The guide says what the default does."""
    options = {"max_steps": 12, "eval_steps": 1, "save_steps": 4, "greater_is_better": True}
    options["restore_callback_states_from_checkpoint"] = restores
    whole = hf.trainer(tmp_path / "whole", **options | {"save_strategy": "no"})
    whole.train()
    expected = end_of(whole)
    assert whole.state.global_step == 6
    with open_manager(tmp_path) as manager:
        hf.trainer(tmp_path / "first", hf.SnapshotCallback(manager), **options).train()
    found = resumed(hf, tmp_path, 4, **options)
    assert found.state.global_step == (6 if restores else 9)
    assert same(end_of(found), expected) is restores


def test_the_count_of_tokens_changes_no_save(hf, tmp_path):
    """With it, every log entry has the speed of the training, as otherwise only the last entry has."""
    options = {"include_num_input_tokens_seen": "all", "load_best_model_at_end": True}
    with open_manager(tmp_path) as manager:
        made = hf.trainer(tmp_path / "out", hf.SnapshotCallback(manager), **options)
        made.train()
        expected = end_of(made)
        assert manager.repository.snapshot("a@best-model").step == made.state.best_global_step
        assert manager.repository.snapshot("a@3").metrics.keys() == {
            "loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen", "eval_loss",
        }  # fmt: skip
    assert same(end_of(resumed(hf, tmp_path, 3, **options)), expected)


def test_a_callback_that_draws_numbers_or_counts_where_a_step_begins(hf, tmp_path):
    """A resumed Trainer tells it of that step again, so the snapshot is taken before it hears of the step."""

    class Steps(hf.TrainerCallback, hf.ExportableState):
        def __init__(self, count=0):
            self.count = count

        def on_step_begin(self, *args, **kwargs):
            self.count += 1
            torch.rand(1)

        def state(self):
            return {"args": {}, "attributes": {"count": self.count}}

    ends = []
    for step in (None, 3, 6):
        with open_manager(tmp_path) as manager, hf.checkpoint_dir(manager, step) as path:
            made = hf.trainer(tmp_path / "out", Steps(), hf.SnapshotCallback(manager))
            made.train(resume_from_checkpoint=path)
            states = [one.state() for one in made.callback_handler.callbacks if isinstance(one, hf.ExportableState)]
            ends.append([*end_of(made), states])
    assert {"args": {}, "attributes": {"count": 8}} in ends[0][-1]
    assert same(ends[1], ends[0])
    assert same(ends[2], ends[0])


def test_a_save_that_a_callback_asks_for_after_an_evaluation_or_a_log(hf, tmp_path):
    class Ask(hf.TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 3

        def on_log(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 5

    with open_manager(tmp_path) as manager:
        hf.trainer(tmp_path / "out", Ask(), hf.SnapshotCallback(manager), save_steps=100).train()
        assert manager.all_steps() == [3, 5, 8]
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_the_last_step_is_saved_if_the_trainer_logs_its_end_in_another_way(hf, tmp_path):
    """Such as in a `log` that renames the numbers. Callbacks that change the model at the end see it saved."""

    class Renaming(hf.Trainer):
        def log(self, logs, *arguments):
            super().log({f"train/{name}": value for name, value in logs.items()}, *arguments)

    class Clear(hf.TrainerCallback):
        def on_train_end(self, args, state, control, model, **kwargs):
            model.lm_head.weight.data.zero_()

    with open_manager(tmp_path) as manager:
        made = hf.trainer(tmp_path / "out", Clear(), hf.SnapshotCallback(manager))
        made.__class__ = Renaming
        made.train()
        assert manager.all_steps() == [3, 6, 8]
        assert manager.restore(8)["model"]["lm_head.weight"].any()


def test_limits_and_the_best_model(hf, tmp_path):
    """The loss falls, so the first evaluation is the best one if greater is better."""
    options = {"eval_steps": 2, "save_steps": 2, "save_total_limit": 2, "load_best_model_at_end": True}
    with open_manager(tmp_path) as manager:
        callback = hf.SnapshotCallback(manager)
        made = hf.trainer(tmp_path / "out", callback, greater_is_better=True, **options)
        made.train()
        assert manager.all_steps() == [2, 6, 8]
        assert manager.repository.policies("a") == [KeepLast(2)]
        assert same(dict(made.model.state_dict()), dict(manager.restore("best-model")["model"]))
        assert not same(dict(made.model.state_dict()), dict(manager.restore(8)["model"]))
        with hf.checkpoint_dir(manager, 6) as path:
            callbacks = json.loads(Path(path, "trainer_state.json").read_text())["stateful_callbacks"]
            assert callbacks["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 2}
        assert not Path(path).exists()
        with pytest.raises(NotFoundError), hf.checkpoint_dir(manager, 4):
            pass
        made.args.save_total_limit = 3  # a second Trainer may have another limit
        hf.SnapshotCallback(manager).on_train_begin(made.args, made.state, made.control)
        assert manager.repository.policies("a") == list(manager.keep) == [KeepLast(3)]
    with open_manager(tmp_path, keep=KeepLast(2)) as manager:
        callback = hf.SnapshotCallback(manager)
        with pytest.raises(InvalidInputError, match="save_total_limit=3: the manager has policies"):
            hf.trainer(tmp_path / "out", callback, save_total_limit=3).train()


def test_a_return_to_an_earlier_step_returns_to_its_best_model(hf, tmp_path):
    """The loss falls: the first training finds its last step best, and the second one the step where it begins."""
    options = {"eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    with open_manager(tmp_path) as manager:
        callback = hf.SnapshotCallback(manager)
        first = hf.trainer(tmp_path / "out", callback, max_steps=6, greater_is_better=False, **options)
        first.train()
        assert manager.repository.snapshot("a@best-model").step == 6
    made = resumed(hf, tmp_path, 2, greater_is_better=True, save_total_limit=2, **options)
    assert made.state.best_global_step == 2
    with open_manager(tmp_path) as manager:
        assert manager.repository.snapshot("a@best-model").step == 2
        assert manager.all_steps() == [2, 6, 8]
        assert same(dict(made.model.state_dict()), dict(manager.restore(2)["model"]))
        made.args.load_best_model_at_end = False
        hf.SnapshotCallback(manager).on_train_begin(made.args, hf.transformers.TrainerState(), made.control)
        with pytest.raises(NotFoundError):
            manager.repository.snapshot("a@best-model")


def test_the_best_evaluation_may_be_of_a_step_that_is_not_saved(hf, tmp_path):
    """The loss falls and greater is better, so the best evaluation is that of step 2."""
    options = {"eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    with open_manager(tmp_path) as manager:
        hf.trainer(tmp_path / "out", hf.SnapshotCallback(manager), max_steps=4, save_steps=4, **options).train()
        assert manager.all_steps() == [4]
    made = resumed(hf, tmp_path, save_steps=4, **options)
    assert made.state.best_global_step == 2
    with open_manager(tmp_path) as manager:
        assert same(dict(made.model.state_dict()), dict(manager.restore(8)["model"]))  # as Trainer does alone
        callback = hf.SnapshotCallback(manager)
        manager.repository.tag("a@4", "best-model")
        callback.on_train_begin(made.args, made.state, made.control)
        callback.on_train_end(made.args, made.state, made.control, model=made.model)
        assert same(dict(made.model.state_dict()), dict(manager.restore(4)["model"]))


def test_the_best_snapshot_may_be_one_whose_record_cannot_be_read(hf, tmp_path):
    """Another one would be loaded at the end, or none. A training that loads no best model begins."""
    options = {"eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    with open_manager(tmp_path) as manager:
        callback = hf.SnapshotCallback(manager)
        made = hf.trainer(tmp_path / "out", callback, max_steps=6, **options)
        made.train()
        assert made.state.best_global_step == 2
        manager.wait_until_finished()
        keys = {step: manager.repository.snapshot(f"a@{step}").key for step in (2, 4)}
    store = LocalStore(tmp_path / "snapshots")
    for step in (4, 2):
        flip(store, keys[step], 60)
        with open_manager(tmp_path) as manager:
            begin = hf.SnapshotCallback(manager).on_train_begin
            if step == 4:
                begin(made.args, made.state, made.control)
                continue
            with pytest.raises(IntegrityError, match="step 2 of a: may be a@2 "):
                begin(made.args, made.state, made.control)
            made.args.load_best_model_at_end = False
            begin(made.args, made.state, made.control)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_strategy": "best"}, "save_strategy='best': .*KeepBest"),
        ({"push_to_hub": True, "hub_strategy": "checkpoint"}, "hub_strategy='end'"),
        ({"save_on_each_node": True}, "save_on_each_node"),
        ({"enable_jit_checkpoint": True}, "handle_preemption"),
    ],
)
def test_options_that_are_refused(hf, tmp_path, options, message, monkeypatch):
    monkeypatch.setattr("transformers.Trainer.init_hf_repo", lambda *_, **__: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of the Trainer's own checkpoint at a SIGTERM
    with open_manager(tmp_path) as manager, pytest.raises(InvalidInputError, match=message):
        hf.trainer(tmp_path / "out", hf.SnapshotCallback(manager), **options).train()


def test_two_callbacks_are_refused(hf, tmp_path):
    """The second would never save."""
    with open_manager(tmp_path) as one, SnapshotManager(tmp_path / "second", run="a") as two:
        callbacks = [hf.SnapshotCallback(one), hf.SnapshotCallback(two)]
        made = hf.trainer(tmp_path / "out", *callbacks, save_total_limit=2)
        with pytest.raises(InvalidInputError, match=r"expected one SnapshotCallback, got 2: .* mirror= and"):
            made.train()
        assert one.all_steps() == two.all_steps() == []
        assert not one.keep


@pytest.mark.parametrize("read_only", [False, True])
def test_a_snapshot_that_only_the_mirror_has_is_resumed(hf, tmp_path, read_only):
    with open_manager(tmp_path, mirror=tmp_path / "mirror") as manager:
        hf.trainer(tmp_path / "first", hf.SnapshotCallback(manager)).train()
    shutil.rmtree(tmp_path / "snapshots")
    open_manager(tmp_path, mirror=tmp_path / "mirror").close()
    with open_manager(tmp_path, mirror=tmp_path / "mirror", read_only=read_only) as manager:
        with hf.checkpoint_dir(manager) as path:
            found = {file.name for file in Path(path).iterdir()}
        assert found == {
            "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json",
        }  # fmt: skip
        assert [s.step for s in manager.repository.snapshots("a")] == ([] if read_only else [8])


def test_a_snapshot_whose_record_was_reconstructed_is_resumed(hf, tmp_path, monkeypatch):
    """A repair that finds the record in no index reconstructs it without its metadata."""
    with open_manager(tmp_path) as manager:
        hf.trainer(tmp_path / "first", hf.SnapshotCallback(manager)).train()
        record = manager.repository.snapshot("a@8").key
        with hf.checkpoint_dir(manager, 8) as path:
            expected = {file.name: file.read_bytes() for file in Path(path).iterdir()}
    flip(LocalStore(tmp_path / "snapshots"), record, 60)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    with open_manager(tmp_path) as manager:
        manager.repository.repair(apply=True)
        assert manager.repository.snapshot("a@8").metadata is None
        with hf.checkpoint_dir(manager, 8) as path:
            assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == expected


def test_weights_alone_and_snapshots_of_others(hf, tmp_path):
    with open_manager(tmp_path) as manager:
        hf.trainer(tmp_path / "out", hf.SnapshotCallback(manager), save_only_model=True, max_steps=3).train()
        assert manager.restore().keys() == {"model", "trainer"}
        with hf.checkpoint_dir(manager) as path:
            assert {file.name for file in Path(path).iterdir()} == {
                "config.json", "model.safetensors", "trainer_state.json",
            }  # fmt: skip
            again = hf.LlamaForCausalLM.from_pretrained(path)
        assert same(dict(again.state_dict()), dict(manager.restore()["model"]))
        manager.save(9, {"model": again}, force=True).result()
        with (
            pytest.raises(InvalidInputError, match="a@9: was not saved by a SnapshotCallback"),
            hf.checkpoint_dir(manager),
        ):
            pass


def test_scalers_and_callbacks_that_are_not_found(hf, tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    kwargs = {"model": model, "optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}
    args = SimpleNamespace(save_only_model=False, save_strategy="steps")
    control = hf.transformers.TrainerControl(should_save=True)
    with open_manager(tmp_path) as manager:
        callback = hf.SnapshotCallback(manager)
        callback.on_step_end(args, hf.transformers.TrainerState(global_step=1), control, **kwargs)
        assert not control.should_save
        callback.on_step_begin(args, hf.transformers.TrainerState(global_step=1), control, **kwargs)
        with hf.checkpoint_dir(manager) as path:
            assert torch.load(Path(path, "scaler.pt")) == optimizer.scaler.state_dict()
        control.should_save = True
        callback.on_step_end(args, hf.transformers.TrainerState(global_step=2), control, **kwargs)
        with pytest.raises(CapabilityError, match="cannot find the other callbacks"):
            callback.on_step_begin(
                args, hf.transformers.TrainerState(global_step=2, stateful_callbacks={"Other": {}}), control, **kwargs
            )


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_the_script_of_the_guide_runs(hf, tmp_path, monkeypatch):
    """The test replaces its number of steps by a smaller one."""
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "guides" / "transformers.md").read_text()
    script = guide.split("```python\n")[1].split("```")[0].replace("/data/snapshots", str(tmp_path / "snapshots"))
    for steps in (2, 3):
        exec(script.replace("max_steps=300, save_steps=50", f"max_steps={steps}, save_steps=2"), {})
    with SnapshotManager(tmp_path / "snapshots", run="exp1", read_only=True) as manager:
        assert manager.all_steps() == [2, 3]
    assert not list(tmp_path.glob("out/*"))


def test_a_step_that_is_saved_before_its_evaluation(hf, tmp_path, monkeypatch, caplog):
    args, kwargs = SimpleNamespace(save_only_model=True, save_strategy="steps"), {"model": torch.nn.Linear(1, 1)}
    with open_manager(tmp_path) as manager:
        monkeypatch.setattr(manager, "_is_told_to_end", lambda step: True)
        callback = hf.SnapshotCallback(manager)
        for step, evaluates in ((1, False), (2, True)):
            control = hf.transformers.TrainerControl(should_evaluate=evaluates)
            callback.on_step_end(args, hf.transformers.TrainerState(global_step=step), control, **kwargs)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
    assert [one.args[1] for one in caplog.records if "is saved before its evaluation" in one.message] == [2]


@pytest.mark.parametrize("ends", [False, True])
def test_a_job_that_is_told_to_end_saves_once_more(hf, tmp_path, ends):
    """It saves after the running step, before logging and evaluation; with end=False the Trainer ends the training."""

    class Tell(hf.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGUSR1 if ends else signal.SIGTERM)

    with open_manager(tmp_path) as manager:
        manager.handle_preemption(end=ends, signals=[signal.SIGUSR1])
        made = hf.trainer(tmp_path / "out", Tell(), hf.SnapshotCallback(manager), save_strategy="epoch")
        if ends:
            with pytest.raises(SystemExit, match=str(128 + signal.SIGUSR1)):
                made.train()
        else:
            made.train()
    with open_manager(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == [4]
    if ends:
        return
    whole = hf.trainer(tmp_path / "whole", save_strategy="no")
    whole.train()
    expected = end_of(whole)
    assert same(end_of(resumed(hf, tmp_path, save_strategy="epoch"))[:-1], expected[:-1])


def test_the_best_and_the_last_step_wait_for_a_running_save(hf, tmp_path, monkeypatch):
    """With on_busy="skip" only the other steps may be skipped."""
    saved = []
    args, kwargs = SimpleNamespace(save_only_model=True, save_strategy="steps"), {"model": torch.nn.Linear(1, 1)}
    with open_manager(tmp_path, on_busy="skip") as manager:
        monkeypatch.setattr(manager, "save", lambda step, _, *, force, **__: saved.append((step, force)))
        callback = hf.SnapshotCallback(manager)
        for step, best, stops in ((1, None, False), (2, 2, False), (3, 2, False), (4, 2, True)):
            state = hf.transformers.TrainerState(global_step=step, best_global_step=best)
            control = hf.transformers.TrainerControl(should_save=True, should_training_stop=stops)
            callback.on_step_end(args, state, control, **kwargs)
            callback.on_step_begin(args, state, control, **kwargs)
    assert saved == [(1, False), (2, True), (3, False), (4, True)]


def test_ranks_that_log_other_numbers_save_those_of_rank_0(hf):
    """Such as a term of a rank's own loss, or the time that its evaluation has taken."""
    store, model = created(), torch.nn.Linear(1, 1)
    args = SimpleNamespace(save_only_model=True, save_strategy="steps")

    def train(manager, rank):
        callback, control = hf.SnapshotCallback(manager), hf.transformers.TrainerControl()
        for step in (1, 2):
            logged = [{"step": step, "eval_model_preparation_time": 0.5 + rank, "loss": float("inf")}]
            best = step if rank == 0 else None
            state = hf.transformers.TrainerState(global_step=step, log_history=logged, best_global_step=best)
            control.should_save = True
            callback.on_step_end(args, state, control, model=model)
            callback.on_step_begin(args, state, control, model=model)
        return callback._best

    managers = Managers(store, 2)
    assert managers.all(train) == [2, 2]
    assert managers.end() == [None, None]
    with opened(store) as repository:
        assert repository.snapshot("a@best-model").step == 2
        expected = {"eval_model_preparation_time": 0.5, "loss": float("inf")}
        assert [one.metrics for one in repository.snapshots("a")] == [expected] * 2


def test_generators_of_gpus(hf, tmp_path, monkeypatch):
    """One process gets the generator of its device, as the Trainer stores it; processes of a launcher get all."""
    from accelerate.state import DistributedType, PartialState

    PartialState(cpu=True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    states = {"cuda": [torch.tensor([1]), torch.tensor([2])], **RngState().state_dict()}
    given = {"rng": states, "trainer": {"trainer_state.json": "{}"}}
    with open_manager(tmp_path) as manager:
        manager.save(1, given, metadata={"transformers": "5", "ranks": 1, "parts": ["rng"]})
        with hf.checkpoint_dir(manager) as path:
            assert torch.load(Path(path, "rng_state.pth"), weights_only=False)["cuda"] == 2
        monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.MULTI_GPU)
        with hf.checkpoint_dir(manager) as path:
            assert torch.load(Path(path, "rng_state.pth"), weights_only=False)["cuda"] == states["cuda"]
        monkeypatch.setattr("snapstore.integrations.transformers_files.place", lambda: (1, 2))
        monkeypatch.setattr("torch.distributed.all_gather_object", lambda found, mine: found.__init__([mine] * 2))
        manager.save(2, given, metadata={"transformers": "5", "ranks": 2, "parts": ["rng"]})
        with hf.checkpoint_dir(manager) as path:
            assert torch.load(Path(path, "rng_state_1.pth"), weights_only=False)["cuda"] == states["cuda"]

        def gather(found, mine):
            found[:] = [mine, mine] if isinstance(mine, tuple) else ["rank 0: no room", mine]

        monkeypatch.setattr("torch.distributed.all_gather_object", gather)
        with pytest.raises(RanksError, match="checkpoint_dir: rank 0: no room"), hf.checkpoint_dir(manager):
            pass


def test_kinds_of_training_that_are_refused_and_a_missing_package(hf, tmp_path, monkeypatch):
    from accelerate.state import PartialState

    with open_manager(tmp_path) as manager:
        callback = hf.SnapshotCallback(manager)
        made = hf.trainer(tmp_path / "out", callback)
        callback.on_train_begin(made.args, made.state, made.control)
        kind = hf.transformers.training_args.DistributedType.FSDP
        monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
        with pytest.raises(CapabilityError, match="covers one process and DDP, on CPU and CUDA; got FSDP on cpu"):
            callback.on_train_begin(made.args, made.state, made.control)
    monkeypatch.delitem(sys.modules, "snapstore.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CapabilityError, match=r"install it with 'pip install \"snapstore\[transformers\]\"'"):
        importlib.import_module("snapstore.integrations.transformers")


def test_a_logged_number_that_no_float_can_hold_is_left_out():
    """It would end the training with an OverflowError."""
    from snapstore.integrations.transformers import _metrics

    logged = [{"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.0, "tokens": 10**400}]
    assert _metrics(SimpleNamespace(global_step=3, log_history=logged)) == {"loss": 1.0}
