"""RngState is loaded last and restores the same draws; another number of CUDA devices is an error."""

import random
import re
import time

import numpy as np
import pytest
import torch

from kit.states import Loader, Saved
from snapstore import KeepLast, Repository, SnapshotManager, resumable
from snapstore.errors import InvalidInputError, UnsupportedLeafError
from snapstore.state.walk.rng import RngState


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()


def test_rng_state_draws_the_same_again():
    draw()
    state = {"rng": RngState(), "x": 1}
    saved = Saved(state)
    want = [draw() for _ in range(3)]
    saved.restore(into={"rng": RngState(), "x": 0})
    assert [draw() for _ in range(3)] == want
    RngState().load_state_dict(saved.restore()["rng"])
    assert [draw() for _ in range(3)] == want


@pytest.mark.parametrize(
    ("generator", "draws"),
    [
        (random.Random(3), lambda one: one.gauss(0, 1)),
        (np.random.default_rng(3), lambda one: one.normal()),
        (np.random.MT19937(3), lambda one: one.random_raw()),
        (np.random.RandomState(3), lambda one: one.randn()),
        (torch.Generator().manual_seed(3), lambda one: torch.rand(1, generator=one).item()),
    ],
    ids=lambda one: type(one).__name__,
)
def test_the_error_for_a_generator_names_the_lines_that_work(generator, draws):
    """The lines of the error, run as they stand, give the same draws after a restore."""
    with pytest.raises(UnsupportedLeafError, match="RngState") as caught:
        Saved({"a": {"sampler": generator}})
    get, put = re.search(r"sampler: .* save (\S+) in .* (?:call|assign) (.*); Rng", str(caught.value)).groups()
    draws(generator)
    saved = Saved({"rng": eval(get, {"generator": generator})})
    want = [draws(generator) for _ in range(3)]
    for target in (None, {"rng": eval(get, {"generator": generator})}):
        exec(put, {"generator": generator, "value": saved.restore(into=target)["rng"]})
        assert [draws(generator) for _ in range(3)] == want


def test_the_error_for_a_loader_without_a_position_names_one_that_has_it():
    loader = torch.utils.data.DataLoader([1.0, 2.0])
    with pytest.raises(UnsupportedLeafError, match=r"^loader: .*DataLoader does not know its .*resumable\(loader\)"):
        Saved({"loader": loader})
    loader = resumable(loader)
    batches = iter(loader)
    next(batches)
    new = resumable(torch.utils.data.DataLoader([1.0, 2.0]))
    Saved({"loader": loader}).restore(into={"loader": new})
    assert list(new) == [2.0]


def test_rng_state_is_loaded_last():
    class Draws(Loader):
        def load_state_dict(self, state):
            draw()

    saved = Saved({"rng": RngState(), "loader": Draws()})
    want = draw()
    saved.restore(into={"rng": RngState(), "loader": Draws()})
    assert draw() == want


def test_rng_state_of_other_cuda_devices(monkeypatch):
    state = RngState().state_dict()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 2
    before = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidInputError, match=r"expected 1, .* got 2"):
        RngState().load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    RngState(cuda=False).load_state_dict(state)
    loaded = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", loaded.extend)
    RngState().load_state_dict(state)
    assert len(loaded) == 2


def test_no_verb_draws_from_the_generators_of_the_program(tmp_path):
    before = RngState().state_dict()
    with SnapshotManager(tmp_path, run="a", keep=KeepLast(1)) as snapshots:
        for step in range(3):
            snapshots.save(step, {"w": torch.full((300_000,), step)}, metrics={"loss": step})
            snapshots.restore()
    with Repository.open(tmp_path) as repository:
        assert repository.check("data", share=0.5).packs_read
        repository.compact()
        repository.repair(apply=True)
    assert_unchanged(before)


def test_a_pause_before_a_retry_draws_from_no_generator_of_the_program(monkeypatch):
    retry = pytest.importorskip("snapstore.storage.s3.retry")
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    before = RngState().state_dict()
    for _ in range(2):
        random.seed(7)
        retry.pause(3)
    assert slept[0] != slept[1]  # ranks with one seed do not all come back at the same moment
    RngState().load_state_dict(before)
    retry.pause(1)
    assert_unchanged(before)


def assert_unchanged(before):
    after = RngState().state_dict()
    assert np.array_equal(after["python"]["words"], before["python"]["words"])
    assert np.array_equal(after["numpy"]["state"]["key"], before["numpy"]["state"]["key"])
    assert after["numpy"]["state"]["pos"] == before["numpy"]["state"]["pos"]
    assert torch.equal(after["torch"], before["torch"])
