"""The error for an the target that does not fit groups the differences by part. The code that it recommends works."""

import math
import re

import pytest
import torch
from torch import nn

from kit.states import Saved, again, net, same
from snapstore.errors import InvalidInputError
from snapstore.state.fill.differences import MAX_LINES
from snapstore.state.fill.fit import Fit

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch warns about its own code


def refusal(state, into, **options):
    with pytest.raises(InvalidInputError) as caught:
        again(state, into=into, **options)
    return str(caught.value)


def test_differences_are_grouped_by_part():
    state = {
        "m": {"a": torch.ones(2, 3), "b": torch.ones(2), "c": 1, "d": [1, 2], "gone": torch.ones(1)},
        "opt": {"state": {i: torch.ones(1) for i in range(5)}},
        "step": 3,
        "same": 1,
    }
    into = {
        "m": {"a": torch.zeros(3, 2), "b": torch.zeros(2).double(), "c": torch.ones(1), "d": (1,)},
        "new": {"x": torch.ones(1), "y": {"z": 1}},
        "scheduler": torch.optim.SGD([torch.zeros(1)]),
        "same": 2,
    }
    into["m"]["extra"] = torch.ones(1)
    assert refusal(state, into) == (
        "the snapshot does not fit the target; nothing was changed:\n"
        "  m: 1 of another shape, 1 of another dtype, 2 of another type, 1 missing in the target, "
        "1 missing in the snapshot\n"
        "    m.a: shape: expected (3, 2) as in the target, got (2, 3)\n"
        "    m.b: dtype: expected float64 as in the target, got float32\n"
        "    m.c: type: expected Tensor as in the target, got int\n"
        "    m.d: type: expected tuple as in the target, got list\n"
        "    m.gone: missing in the target\n"
        "    m.extra: missing in the snapshot\n"
        "  opt: missing in the target (5 names)\n"
        "  step: missing in the target\n"
        "  new: missing in the snapshot (2 names)\n"
        "  scheduler: missing in the snapshot\n"
        "restore without a target to get all of it, or only the parts that fit: restore_into(..., keys=['same'])"
    )
    assert into["same"] == 2


def test_every_part_shows_some_differences():
    state = {str(part): {str(i): torch.ones(1) for i in range(60)} for part in range(20)}
    text = refusal(state, {name: {"0": torch.ones(2)} for name in state})
    lines = text.splitlines()
    for part in state:
        assert f"  {part}: 1 of another shape, 59 missing in the target" in lines
        assert f"    {part}.0: shape: expected (2,) as in the target, got (1,)" in lines
    assert lines.count("    ... and 56 more") == 20
    assert "keys=" not in text
    many = refusal({str(i): [torch.ones(1)] * 2 for i in range(60)}, {str(i): [] for i in range(60)})
    assert "... and 10 more parts" in many
    assert len(many.splitlines()) < 5 * MAX_LINES


def test_an_into_with_some_parts_gets_the_line_that_restores_just_these():
    model, into = net(), {"model": net(), "a[0]": [0]}
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "step": 3, "a[0]": [1], "a0": [2]}
    with torch.no_grad():
        model[0].weight += 1
    text = refusal(state, into)
    assert "  optimizer: missing in the target (" in text
    keys = eval(re.search(r"restore_into\(\.\.\., keys=(\[.*\])\)", text)[1])
    assert keys == ["model", "a[0]"]
    again(state, into=into, keys=keys)
    same(into["model"].state_dict(), model.state_dict())
    assert into["a[0]"] == [1]


def test_no_line_where_no_keys_select_just_the_parts_that_fit():
    assert "with `keys` what fits" in refusal({"a": 1, "a.b": 2}, {"a": 0})
    assert "with `keys` what fits" in refusal({"a": 1, "b": 2}, {"a": 0}, keys=["a", "b"])
    assert "with `keys` what fits" in refusal({str(i): i for i in range(99)}, {str(i): 0 for i in range(98)})


def layers(numbers):
    return nn.ModuleDict({"layers": nn.ModuleDict({str(number): nn.Linear(2, 2) for number in numbers})})


@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize("numbers", [(0, 10), (1, 11)])
def test_a_stage_of_a_pipeline_gets_the_line_that_restores_all_of_it(numbers, as_module):
    """The snapshot has the layers of all stages. The keys in the error name all that the stage has, in every part."""
    model, stage = layers((0, 1, 10, 11)), layers(numbers)
    own = [f"layers.{number}" for number in numbers]
    optimizer = {"state": {f"layers.{number}": {"step": number, "seen": [1]} for number in (0, 1, 10, 11)}, "lr": 0.1}
    into = {
        "model": stage if as_module else stage.state_dict(),
        "optimizer": {"state": {name: {"step": -1, "seen": []} for name in own}, "lr": 0.0},
        "rng": 0,
    }
    state = {"model": model if as_module else model.state_dict(), "optimizer": optimizer, "rng": 7}
    text = refusal(state, into)
    keys = eval(re.search(r"only what the target has: restore_into\(\.\.\., keys=(\[.*\])\)", text)[1])
    expected = {f"{part}.{name}" for name in own for part in ("model", "optimizer.state")}
    assert set(keys) == expected | {"optimizer.lr", "rng"}
    again(state, into=into, keys=keys)
    for name, value in stage.state_dict().items():
        same(value, model.state_dict()[name])
    assert into["optimizer"] == {"state": {name: optimizer["state"][name] for name in own}, "lr": 0.1}
    assert into["rng"] == 7


def test_a_part_that_lacks_some_names_in_the_snapshot_is_not_left_out():
    """An optimizer has no state of a parameter that never got a gradient; `get_state_dict` makes one in the target."""
    state = {"model": {"a": 1, "b": 2}, "optimizer": {"state.a.step": 3}}
    into = {"model": {"a": 0, "b": 0}, "optimizer": {"state.a.step": 0, "state.b.step": 7}}
    text = refusal(state, into)
    assert "optimizer.state.b.step: missing in the snapshot" in text
    assert "only the names that both have: restore_into(..., strict=False)" in text
    assert "keys=" not in text
    assert "strict=False" in refusal(state | {"more": 1}, into)
    again(state, into=into, keys=Fit(strict=False))
    assert into == {"model": {"a": 1, "b": 2}, "optimizer": {"state.a.step": 3, "state.b.step": 7}}
    assert "keys=['model']" in refusal(state, into | {"optimizer": {"state.a.step": torch.ones(2)}})


def test_no_line_that_leaves_out_a_part_of_into_which_fits():
    """No short list of keys selects the names of `m` that the target has; so `same` alone is not recommended."""
    state = {"m": {"a": 1, "a.b": 2}, "same": 1}
    assert "with `keys` what fits" in refusal(state, {"m": {"a": 0}, "same": 0})
    many = {"m": {f"{i}.{name}": i for i in range(99) for name in "ab"}, "same": 1}
    assert "with `keys` what fits" in refusal(many, {"m": {f"{i}.a": 0 for i in range(99)}, "same": 0})


class Inner(nn.Module):
    """A module whose `body` may have a wrapper."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.head, self.body = nn.Linear(2, 2), wrap(nn.Linear(2, 2))


WRAPS = {
    "plain": lambda module: module,
    "compile": torch.compile,
    "parallel": nn.DataParallel,  # gives the same names as DDP, and needs no process group
    "both": lambda module: torch.compile(nn.DataParallel(module)),
}


COMPILE, DDP = "the prefix '_orig_mod.' of torch.compile", "the prefix 'module.' of DDP"
BOTH = "the prefix '_orig_mod.module.' of torch.compile and DDP"
PREFIXES = {("compile", "parallel"): f"{COMPILE} in the snapshot, and {DDP} in the target"}
PREFIXES["parallel", "compile"] = f"{DDP} in the snapshot, and {COMPILE} in the target"
for name, other, prefix in (
    ("compile", "plain", COMPILE),
    ("parallel", "plain", DDP),
    ("both", "plain", BOTH),
    ("both", "parallel", COMPILE),
):
    PREFIXES |= {(name, other): f"{prefix} in the snapshot alone", (other, name): f"{prefix} in the target alone"}
PREFIXES["both", "compile"] = f"{BOTH} in the snapshot, and {COMPILE} in the target"
PREFIXES["compile", "both"] = f"{COMPILE} in the snapshot, and {BOTH} in the target"


@pytest.mark.parametrize("into", WRAPS)
@pytest.mark.parametrize("saved", WRAPS)
@pytest.mark.parametrize("as_module", [True, False])
def test_the_prefix_of_a_wrapper_is_named_and_the_line_works(saved, into, as_module):
    torch.manual_seed(1)
    module, other = Inner(), Inner()
    state, target = {"nets": {"m": WRAPS[saved](module)}}, {"nets": {"m": WRAPS[into](other)}}
    if not as_module:
        target["nets"]["m"] = target["nets"]["m"].state_dict()
    if saved != into:
        text = refusal(state, target)
        assert f"\n  nets: 4 names with another prefix\n    the names have {PREFIXES[saved, into]}; pass " in text
        assert "missing" not in text
        line, place, rename = re.search(r"; pass (.*) instead of (.*?)(?:, or rename=(.*))?\n", text).groups()
        assert place == "into['nets']['m']"
        assert bool(rename) != PREFIXES[saved, into].endswith("in the target alone")
        if rename:
            again(state, into=target, keys=Fit(rename=eval(rename)))
            same(other.state_dict(), module.state_dict())
            nn.init.zeros_(other.body.weight)
        target["nets"]["m"] = eval(line, {"torch": torch, "into": target})
    again(state, into=target)
    same(other.state_dict(), module.state_dict())


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
@pytest.mark.parametrize("as_module", [True, False])
def test_a_wrapper_inside_a_module(wrap, as_module):
    torch.manual_seed(1)
    module, other = Inner(), Inner(wrap)
    target = {"m": other if as_module else other.state_dict()}
    text = refusal({"m": module}, target)
    assert "m: 2 names with another prefix\n" in text
    line = re.search(r"; pass (.*) instead of into\['m'\]\n", text)[1]
    again({"m": module}, into={"m": eval(line, {"into": target})})
    same(list(other.state_dict().values()), list(module.state_dict().values()))

    text = refusal({"m": other}, {"m": module})
    line = re.search(r"; restore without a target, and load (.*)\n", text)[1]
    restored = eval(line, {"state": again({"m": other})["m"]})
    module.load_state_dict(restored)
    mixed = refusal({"m": Inner(lambda module: torch.compile(nn.DataParallel(module)))}, {"m": module})
    assert "inside; wrap the modules as they were at the save" in mixed


def test_other_differences_stay_listed_beside_a_prefix():
    module, other = Inner(), torch.compile(nn.Module())
    other._orig_mod.head, other._orig_mod.tail = nn.Linear(2, 2), nn.Linear(2, 2)
    text = refusal({"m": module}, {"m": other})
    assert "m: 2 names with another prefix, 2 missing in the target, 2 missing in the snapshot\n" in text
    assert "    m.body.weight: missing in the target\n" in text
    assert "    m._orig_mod.tail.bias: missing in the snapshot\n" in text
    assert "pass into['m']._orig_mod instead of into['m']\n" in text


def test_keys_that_select_one_side_of_a_prefix():
    module, other = Inner(), torch.compile(Inner())
    text = refusal({"m": module, "n": 1}, {"m": other, "n": 1}, keys=["m.head"])
    assert "pass into['m']._orig_mod instead of into['m']" in text
    saved = Saved({"m": module, "n": 1})
    saved.restore(into={"m": other, "n": 2}, keys=["n"])


def test_a_model_may_have_a_module_of_a_wrapper_s_name():
    module, other = nn.ModuleDict({"module": Inner()}), nn.ModuleDict({"module": Inner()})
    text = refusal({"m": module}, {"m": torch.compile(other)})
    assert "the prefix '_orig_mod.' of torch.compile in the target alone; pass into['m']._orig_mod instead" in text
    refused = refusal({"module": [1, torch.ones(1)]}, {"_orig_mod": [1, torch.ones(1)]})
    assert "  module: missing in the target (2 names)\n  _orig_mod: missing in the snapshot (2 names)\n" in refused


def test_a_wrapped_root():
    assert "pass into._orig_mod instead of into\n" in refusal(Inner(), torch.compile(Inner()))


@pytest.mark.parametrize("key", [None, True, 1.5, (1, 2), b"a", float("nan")])
@pytest.mark.parametrize("turned", [False, True])
def test_keys_of_the_same_text_that_are_not_equal(key, turned):
    """A file of JSON turns keys into text, and no NaN is equal to another one."""
    other = float("nan") if isinstance(key, float) and math.isnan(key) else str(key)
    stored, into = {"a": {key: 1, "b": 2}}, {"a": {other: 1, "b": 2}}
    if turned:
        stored, into = into, stored
    text = str(key)
    assert refusal(stored, into) == (
        "the snapshot does not fit the target; nothing was changed:\n"
        "  a: 1 missing in the target, 1 missing in the snapshot\n"
        f"    a.{text}: missing in the target, which has an unequal key of the same text\n"
        f"    a.{text}: missing in the snapshot, which has an unequal key of the same text\n"
        "restore without a target to get all of it, or only the names that both have: restore_into(..., strict=False); "
        "the others keep their values"
    )
