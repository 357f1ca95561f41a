"""`keys` selects what its pattern says, with and without `into`, and reads only the parts it needs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.states import Saved, same
from snapstore.errors import InvalidInputError, NotFoundError
from snapstore.state.restore_plan import RestorePlan
from snapstore.state.selection import parts_needed


def state_for_keys():
    return {
        "model": {"layers": [{"w": torch.ones(1)}, {"w": torch.zeros(1), "b": 2}], "a.b": torch.ones(2)},
        "step": 3,
        "opt": {},
    }


def test_keys_select_leaves_and_all_below():
    saved = Saved(state_for_keys())
    same(saved.restore(keys="step"), {"step": 3})
    same(saved.restore(keys="model"), {"model": state_for_keys()["model"]})
    same(saved.restore(keys="model.*"), {"model": state_for_keys()["model"]})
    same(saved.restore(keys="*.b"), {"model": {"layers": [{"b": 2}], "a.b": torch.ones(2)}})
    same(
        saved.restore(keys=["model.layers.1", "opt"]), {"model": {"layers": [{"w": torch.zeros(1), "b": 2}]}, "opt": {}}
    )
    same(saved.restore(keys="model.layers.?.w"), {"model": {"layers": [{"w": torch.ones(1)}, {"w": torch.zeros(1)}]}})
    assert saved.target(keys="*.a.b").selected == [(1, 2)]


def test_keys_that_match_nothing():
    saved = Saved(state_for_keys())
    with pytest.raises(NotFoundError, match=r"keys 'modle\.\*': matches nothing .* step"):
        saved.restore(keys=["step", "modle.*"])
    with pytest.raises(NotFoundError):
        saved.restore(keys="MODEL.*")
    with pytest.raises(InvalidInputError, match="no pattern"):
        saved.restore(keys=[])


def test_parts_needed():
    names = ["", "model", "model.ema", "optimizer"]
    assert parts_needed(names, None) == names
    for keys, want in {
        "model": ["", "model", "model.ema"],
        "model.*": ["", "model", "model.ema"],
        "model.ema.w": ["", "model", "model.ema"],
        "opt*": ["", "optimizer"],
        "*.w": names,
        "step": [""],
        "optimizer.state.0": ["", "optimizer"],
        "[mo]*": names,
        "mod": [""],
    }.items():
        assert parts_needed(names, keys) == want, keys


@given(st.text("ab.*?", max_size=5), st.sampled_from(["a", "b", "ab", "a.b"]))
def test_parts_needed_never_leaves_out_a_match(pattern, name):
    saved = Saved({name: {"a": 1, "b": {"a": 2}}, "aa": {"x": 1}})
    try:
        whole = RestorePlan(saved.parts, keys=pattern).finish()
    except NotFoundError:
        return
    same(saved.restore(keys=pattern), whole)


def test_keys_with_into_leave_the_rest_alone():
    into = {
        "model": {
            "layers": [{"w": torch.full((1,), 5.0)}, {"w": torch.full((1,), 5.0), "b": 9}],
            "a.b": torch.zeros(2),
        },
        "other": 1,
    }
    saved = Saved(state_for_keys())
    saved.restore(into=into, keys="*.1.*")
    assert into["model"]["layers"][0]["w"].item() == 5
    assert into["model"]["layers"][1]["w"].item() == 0
    assert into["model"]["layers"][1]["b"] == 2
    assert into["other"] == 1
    with pytest.raises(InvalidInputError, match="step: missing in `into`"):
        saved.restore(into=into, keys="st*")
    with pytest.raises(InvalidInputError, match="other: missing in the snapshot"):
        saved.restore(into=into, keys="[om]*")
