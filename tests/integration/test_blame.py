"""`blame` names the step and the tensor of a fault that is injected into a real training, and nothing without one."""

import json
import threading

import numpy as np
import pytest
import torch

from kit.blamed import FAULTS, MODELS, SCHEDULES, train
from kit.repositories import OPTIONS
from kit.shell import invoke
from snapstore import InvalidInputError, KeepEvery, NotFoundError, Repository
from snapstore.storage.memory import MemoryStore

CASES = [(fault, model, seed) for fault in FAULTS for model in MODELS for seed in range(2)]
CLEAN = [
    (model, optimizer, schedule) for model in MODELS for optimizer in ("adamw", "momentum") for schedule in SCHEDULES
]


class CountingStore(MemoryStore):
    """Counts the bytes that it serves."""

    def __init__(self):
        super().__init__()
        self.served, self._counting = 0, threading.Lock()

    def get(self, key, **options):
        data = super().get(key, **options)
        self._count(len(data))
        return data

    def get_range(self, key, offset, length, into=None):
        data = super().get_range(key, offset, length, into)
        self._count(length)
        return data

    def _count(self, nbytes):
        with self._counting:
            self.served += nbytes


@pytest.mark.no_cover
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("fault", "model", "seed"), CASES)
def test_a_fault_is_named(fault, model, seed):
    trained = train(fault, model, seed, optimizer=("adamw", "momentum")[seed])
    with trained.repository as repository:
        found = repository.blame("r")
    assert found
    first = found.found[0]
    assert (first.step, first.after, first.path, first.what) == (
        trained.step, trained.step - 1, trained.tensor, trained.what
    ), found.found  # fmt: skip


@pytest.mark.no_cover
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "optimizer", "schedule"), CLEAN)
def test_a_run_without_a_fault_has_nothing_to_blame(model, optimizer, schedule):
    with train(None, model, 0, optimizer=optimizer, schedule=schedule).repository as repository:
        assert repository.blame("r").found == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ["row", "frozen element"])
def test_few_bytes_of_a_sparse_run_are_read(fault):
    store = CountingStore()
    trained = train(fault, "large lora", 0, optimizer="momentum", schedule="constant", steps=100, store=store)
    with trained.repository as repository:
        plain = sum(snapshot.logical_bytes for snapshot in repository.snapshots("r"))
        store.served = 0
        found = repository.blame("r")
    assert (found.found[0].step, found.found[0].path) == (trained.step, trained.tensor)
    assert len(found.steps) == 100
    assert found.plain_bytes == plain
    assert store.served <= 0.05 * plain
    assert 0.8 * store.served <= found.read_bytes <= 1.1 * store.served


@pytest.fixture
def repository():
    with Repository.create(MemoryStore(), options=OPTIONS) as opened:
        yield opened


def state(step, frozen=0.0, width=4, **more):
    """Return a state: a trained tensor, a frozen one, and more."""
    moved = torch.arange(width, dtype=torch.float32) + 0.1 * step
    return {"model": {"moved": moved, "also": moved * 2, "frozen": torch.full((width,), frozen), **more}, "step": step}


def rows_of(repository, **options):
    return [(one.after, one.step, one.path, one.what) for one in repository.blame("r", **options).found]


def test_a_gap_between_snapshots_is_said(repository):
    for step in range(20):
        repository.save(state(step, frozen=float(step > 13)), run="r", step=step)
    assert rows_of(repository) == [(13, 14, "model.frozen", "thawed")]
    repository.forget([KeepEvery(steps=3)], run="r")
    result = repository.blame("r")
    assert [s.step for s in repository.snapshots("r")] == result.steps == [0, 3, 6, 9, 12, 15, 18, 19]
    assert rows_of(repository) == [(12, 15, "model.frozen", "thawed")]
    assert result.cells[0][0] == "12 - 15"


def test_the_line_of_the_newest_snapshot_is_followed(repository):
    """Steps that a restore has left behind, and another run's, are not of it."""
    for step in range(8):
        repository.save(state(step, frozen=float(step == 7)), run="r", step=step)
    assert rows_of(repository) == [(6, 7, "model.frozen", "thawed")]
    repository.save(state(5.5), run="r", step=6, parent="r@5")
    repository.save(state(9), run="r", step=8)
    repository.save(state(6.5), run="r", step=8)
    assert repository.blame("r").steps == [0, 1, 2, 3, 4, 5, 6, 8]
    assert rows_of(repository) == []
    repository.save(state(0, frozen=9.0), run="fork", step=9, parent="r@8")
    repository.save(state(1, frozen=9.0), run="fork", step=10)
    assert repository.blame("fork").steps == [9, 10]


def test_steps_can_be_chosen(repository):
    for step in range(20):
        repository.save(state(step, frozen=float(step >= 5) + float(step >= 14)), run="r", step=step)
    assert rows_of(repository) == [], "as far as this shows, few batches may use it"
    assert rows_of(repository, until=13) == [(4, 5, "model.frozen", "thawed")]
    assert rows_of(repository, since=6) == [(13, 14, "model.frozen", "thawed")]
    assert rows_of(repository, until=4) == []
    assert repository.blame("r", since=6, until=12).steps == list(range(6, 13))


def test_counters_generators_and_averages_are_no_layers(repository):
    """Nor is a best loss, a part that begins to change as a whole, nor a tensor that few batches change."""
    for step in range(24):
        more = {"rare": torch.full((4,), float(step // 7)), "never": torch.zeros(4), "ids": torch.tensor([step > 9])}
        made = state(step, **more)
        made["average"] = {name: value * float(step > 12) for name, value in made["model"].items() if name != "ids"}
        made["rng"] = torch.full((64,), step, dtype=torch.uint8)
        made["scale"], made["best"] = torch.tensor(2.0 ** (step // 9)), torch.tensor(1.0 / min(step + 1, 9))
        repository.save(made, run="r", step=step)
    assert rows_of(repository) == []


def with_statistics(step, steps, mean):
    """Return a state after so many steps of an optimizer, with a running mean and a moving average of the weights."""
    made = state(steps, running_mean=torch.arange(4.0) * mean)
    made["average"] = {"moved": made["model"]["moved"] + bool(steps) * 0.9**step}
    made["optimizer"] = {"state": {0: {"step": torch.tensor(float(steps))}}} if steps else {}
    return made


@pytest.mark.parametrize("steps", [lambda step: max(0, step - 5), lambda step: min(step, 10), lambda step: step // 4])
def test_an_optimizer_that_takes_no_step_is_no_fault(repository, steps):
    """A loss that is scaled too high skips steps, and gradients may be summed; statistics and averages go on."""
    for step in range(16):
        repository.save(with_statistics(step, steps(step), mean=step), run="r", step=step)
    assert rows_of(repository) == []


@pytest.mark.parametrize(("mean", "what"), [(lambda step: min(step, 9), "died"), (lambda step: max(step, 9), "thawed")])
def test_statistics_that_a_mode_switches(repository, mean, what):
    for step in range(16):
        repository.save(with_statistics(step, step, mean(step)), run="r", step=step)
    assert rows_of(repository) == [(9, 10, "model.running_mean", what)]


def test_statistics_stop_although_a_moment_of_their_shape_moves(repository):
    for step in range(16):
        made = with_statistics(step, step, min(step, 9))
        made["optimizer"] = {"state": {0: {"exp_avg": torch.tensor([1.0, -1, 1, -1]) * (step % 3 + 1)}}}
        repository.save(made, run="r", step=step)
    assert rows_of(repository) == [(9, 10, "model.running_mean", "died")]


def test_a_frozen_layer_that_changes_between_two_steps(repository):
    for step in range(20):
        repository.save(state(step // 4, frozen=float(step > 13)), run="r", step=step)
    assert rows_of(repository) == [(13, 14, "model.frozen", "thawed")]


def test_a_nan_from_the_first_snapshot_on(repository):
    for step in range(5):
        repository.save(state(step, bad=torch.tensor([float("nan"), step])), run="r", step=step)
    result = repository.blame("r")
    (found,) = result.found
    assert result.cells[0][0] == "<= 0"
    assert result.to_pandas().path.tolist() == ["model.bad"]
    assert "model.bad" in result._repr_html_()
    assert (found.after, found.step, found.path, found.what) == (None, 0, "model.bad", "nan")
    assert found.evidence.startswith("1 of 2 values")


def test_arrays_and_low_precision(repository):
    for step in range(9):
        drift = np.arange(8, dtype=np.float16) + np.float16(step / 4) + np.float16(300 * (step >= 6))
        brain = (torch.arange(5000) / 7 + step / 4).to(torch.bfloat16)
        brain[17] = float("inf") if step >= 7 else 0
        repository.save(state(step, drift=drift, brain=brain), run="r", step=step)
    assert rows_of(repository) == [(5, 6, "model.drift", "jumped"), (6, 7, "model.brain", "nan")]


def test_bad_questions(repository):
    with pytest.raises(NotFoundError, match="run 'r': has no snapshots in this repository; runs: none"):
        repository.blame("r")
    repository.save(state(0), run="r", step=0)
    with pytest.raises(InvalidInputError, match="run 'r': 1 snapshot to compare, expected at least 2"):
        repository.blame("r")
    with pytest.raises(InvalidInputError, match="expected a str, got int"):
        repository.blame(3)
    repository.save(state(1), run="r", step=1)
    with pytest.raises(InvalidInputError, match="0 snapshots to compare"):
        repository.blame("r", since=2)


def test_the_shell_says_what_was_found_and_read_and_left_out(tmp_path):
    url = str(tmp_path / "repository")
    with Repository.create(url, options=OPTIONS) as repository:
        for step in range(6):
            saved = repository.save(state(step, frozen=float(step >= 4)), run="r", step=step)
    shown = invoke(["blame", "r", "--repo", url])
    assert shown.exit_code == 0
    assert "model.frozen" in shown.stdout
    assert "6 snapshots of r, steps 0 to 5; read" in shown.stdout
    (path,) = (file for file in tmp_path.rglob("*") if saved.manifests[0].sha256 == file.name)
    path.write_bytes(path.read_bytes()[:-1])
    shown = invoke(["blame", "r", "--repo", url, "--json"])
    document = json.loads(shown.stdout)
    assert shown.exit_code == 3
    assert document["steps"] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in document["found"]] == [4]
    assert list(document["skipped"]) == [f"r@5 (id:{saved.id[:12]})"]
    assert "left out r@5" in shown.stderr
    assert invoke(["blame", "r", "--since", "4", "--repo", url]).exit_code == 20, "one snapshot is left"
    assert "no tensor moved away" in invoke(["blame", "r", "--until", "3", "--repo", url]).stdout
    assert invoke(["blame", "nowhere", "--repo", url]).exit_code == 1
