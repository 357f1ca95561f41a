"""`keys` selects the leaves that it names or matches, with and without the target, and needs only their parts."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.states import Saved, same
from snapstore.errors import InvalidInputError, NotFoundError
from snapstore.state.fill import selection
from snapstore.state.fill.plan import RestorePlan
from snapstore.state.fill.selection import parts_needed


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
    assert saved.target(keys="*.a.b").wants == [(1, 2, None)]


def test_keys_that_match_nothing():
    saved = Saved(state_for_keys())
    with pytest.raises(NotFoundError) as caught:
        saved.restore(keys=["step", "modle.*"])
    assert str(caught.value) == "keys 'modle.*': matches nothing in this snapshot; its parts are model, opt, step"
    with pytest.raises(
        NotFoundError, match=r"keys 'model.layer', 'x': match nothing .* model holds model.layers.0.w, "
    ):
        saved.restore(keys=["model.layer", "x", "step"])
    with pytest.raises(NotFoundError):
        saved.restore(keys="MODEL.*")
    with pytest.raises(InvalidInputError, match="no pattern"):
        saved.restore(keys=[])


def test_a_name_with_wildcards_in_it_is_a_name_where_it_exists():
    leaves = {"a[0]": torch.ones(1), "a0": torch.zeros(1), "w*": 1, "w1": 2, "x?": {"y": 3}, "xy": {"y": 4}}
    saved = Saved({"m": leaves, "p[1]": {"q": 5}, "p1": {"q": 6}})
    for keys, want in {
        "m.a[0]": {"m": {"a[0]": torch.ones(1)}},
        "m.w*": {"m": {"w*": 1}},
        "m.x?": {"m": {"x?": {"y": 3}}},
        "m.x?.y": {"m": {"x?": {"y": 3}}},
        "m.?[0]": {"m": {"a0": torch.zeros(1)}},  # no such name: a pattern
        "p[1].q": {"p[1]": {"q": 5}},
        "p[1]": {"p[1]": {"q": 5}},
        "p[[]1]": {"p[1]": {"q": 5}},
        "p?": {"p1": {"q": 6}},
    }.items():
        same(saved.restore(keys=keys), want)
    into = {"m": {"a[0]": torch.zeros(1), "a0": torch.full((1,), 7.0)}}
    saved.restore(into=into, keys=["m.a[0]"])
    same(into, {"m": {"a[0]": torch.ones(1), "a0": torch.full((1,), 7.0)}})


class Work:
    """Counts how often a path is made into text, and how often a pattern is tried."""

    def __init__(self, monkeypatch):
        self.paths = self.tries = 0
        display, compiled = selection.display, selection._compiled

        def counted_display(path):
            self.paths += 1
            return display(path)

        def counted_match(expression, text):
            self.tries += 1
            return expression.match(text)

        monkeypatch.setattr(selection, "display", counted_display)
        monkeypatch.setattr(
            selection, "_compiled", lambda pattern: SimpleNamespace(match=partial(counted_match, compiled(pattern)))
        )


@pytest.mark.parametrize(
    ("suffix", "tries"),
    [
        ("", 0),
        ("[0]", 0),
        (".*", 2000),
        ("*", 10 * 1 + 90 * 2 + 900 * 3 + 1000 * 4),  # the path m.layer1234 begins with the text of four patterns
    ],
)
def test_two_thousand_keys_take_two_looks_at_every_leaf(monkeypatch, suffix, tries):
    inside = "[0]" if suffix == "[0]" else ".w"
    state = {"m": {f"layer{i}{inside}": i for i in range(2000)}, "o": {f"layer{i}{inside}": i for i in range(2000)}}
    saved, work = Saved(state), Work(monkeypatch)
    keys = [f"m.layer{i}{suffix}" for i in range(2000)]
    same(saved.restore(keys=keys), {"m": state["m"]})
    assert work.paths <= 2 * 2000
    assert work.tries == tries


def test_a_pattern_is_tried_where_its_text_is(monkeypatch):
    state = {"m": {f"layers.{i}.{name}": i for i in range(100) for name in ("weight", "bias")}}
    saved, work = Saved(state), Work(monkeypatch)
    same(
        saved.restore(keys=[f"*.{i}.w*" for i in range(100)]), {"m": {k: v for k, v in state["m"].items() if "w" in k}}
    )
    assert work.tries == 100


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


@given(st.text("ab.*?[]", max_size=5), st.sampled_from(["a", "b", "ab", "a.b", "a*", "[b]", "a[b]"]))
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
    with pytest.raises(InvalidInputError, match="step: missing in the target"):
        saved.restore(into=into, keys="st*")
    with pytest.raises(InvalidInputError, match="other: missing in the snapshot"):
        saved.restore(into=into, keys="[om]*")
