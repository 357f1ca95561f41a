"""RngState is loaded last and restores the same draws; another number of CUDA devices is an error."""

import random

import numpy as np
import pytest
import torch

from kit.states import Loader, Saved
from snapstore.errors import InvalidInputError
from snapstore.state.rng import RngState


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
