"""A state restores into, and saves from, the memory of CUDA devices to the bit."""

import pytest
import torch
from hypothesis import given, settings

from kit.device_memory import CHECKS, check_any_places, noise, ours, raw, sources
from kit.states import Saved, again, random_tensor, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_device_memory(check):
    check("cuda")


@given(sources(["cpu", "cuda"]))
@settings(deadline=None)
def test_any_places_on_host_and_device(drawn):
    check_any_places(drawn, ours("cuda"))


@several
@given(sources(["cpu", "cuda:0", "cuda:1"]))
@settings(deadline=None)
def test_any_places_where_only_one_device_is_ours(drawn):
    check_any_places(drawn, lambda device: device == torch.device("cuda", 1))


@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_one_array_for_host_and_device(first):
    value = random_tensor("bfloat16", (5, 3))
    into = [noise("bfloat16", (5, 3), device) for device in (first, "cuda" if first == "cpu" else "cpu")]
    saved = Saved([value, value])
    saved.restore(into=into, on_device=ours("cuda"))
    assert isinstance(saved.buffers[0], torch.Tensor) == (first == "cuda")
    assert raw(into[0]) == raw(into[1]) == raw(value)


def test_the_device_without_a_number_is_the_current_one():
    saved, asked = Saved([torch.ones(3)]), []
    restored = saved.restore(device="cuda", on_device=lambda device: not asked.append(device))
    assert set(asked) == {torch.device("cuda", torch.cuda.current_device())}
    assert restored[0].data_ptr() == saved.buffers[0].data_ptr()


def test_a_device_that_is_not_ours_is_filled_through_the_host():
    state = {"a": torch.ones(3), "b": torch.ones(2, 2).t()}
    saved = Saved(state)
    into = {"a": torch.zeros(3, device="cuda"), "b": torch.zeros(2, 2, device="cuda")}
    for options in ({"into": into}, {"device": "cuda"}):
        for on_device in (None, lambda device: False):
            same(saved.restore(**options, on_device=on_device), state)
            assert not any(isinstance(buffer, torch.Tensor) for buffer in saved.buffers)


@several
def test_devices_of_one_state():
    state = {str(i): random_tensor("float16", (i + 1, 4), i) for i in range(4)}
    into = {key: noise("float16", value.shape, f"cuda:{int(key) % 2}") for key, value in state.items()}
    again(state, into=into, on_device=ours("cuda"))
    same(into, state)
