"""The trees of ranks are merged: dicts are united, one error names the differences, tensors get their right numbers."""

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from snapstore import InvalidInputError, PerRank
from snapstore.save.inputs import inputs_of
from snapstore.save.ranks.merged_trees import decode_trees, encode_trees, merge_trees, trees_of
from snapstore.save.shares import RankShares
from snapstore.state.tree.decode import decode, unpack_nodes
from snapstore.state.tree.encode import pack
from snapstore.state.values.tensors import StoredPart
from snapstore.state.walk.flatten import flatten


def trees(state, rank=0, size=2):
    """Return the trees of one rank as rank 0 gets them."""
    inputs = inputs_of(flatten(state, of_rank=True), RankShares(rank, size, 1024))
    return decode_trees(encode_trees(trees_of(inputs)))


def merge(*states):
    return merge_trees([([rank], trees(state, rank, len(states))) for rank, state in enumerate(states)])


def same_as(parts, state):
    """Compare merged trees with those of one rank that has the whole state; the order of parts may differ."""
    expected = {part.name: part for part in trees(state)}
    assert {part.name for part in parts} == set(expected)
    for part in parts:
        assert part.name == "" or pack(part.tree) == pack(expected[part.name].tree)
        assert list(part.specs) == list(expected[part.name].specs)
    decode([StoredPart(part.name, unpack_nodes(pack(part.tree)), part.specs) for part in parts])


def layer(i, n=3):
    return {f"layers.{i}.w": torch.ones(i + 1, n), f"layers.{i}.b": torch.ones(n)}


def test_equal_trees_stay_as_they_are():
    state = {"model": layer(0), "step": 3, "own": PerRank(1)}
    same_as(merge(state, {**state, "own": PerRank([2, torch.ones(1)])}), state)


def test_stages_of_a_pipeline_become_one_state():
    def stage(i):
        names = [f"layers.{i}", f"layers.{i}.w"]
        model = OrderedDict(layer(i))
        model._metadata = OrderedDict((name, {"version": 1}) for name in ["", *names])
        return {
            "model": model,
            "optimizer": {"state": {name: {"step": torch.tensor(1.0), "exp": value} for name, value in model.items()}},
            f"only{i}": {"x": torch.ones(5), "y": [i]},
            "epoch": 4,
            "own": PerRank(i),
        }

    merged = merge(stage(0), stage(1), stage(2))
    assert [part.name for part in merged] == ["", "model", "optimizer", "only0", "own", "only1", "only2"]
    whole = {"model": OrderedDict(), "optimizer": {"state": {}}, "epoch": 4, "own": PerRank(0)}
    whole["model"]._metadata = OrderedDict()
    for i in range(3):
        one = stage(i)
        whole["model"].update(one["model"])
        whole["model"]._metadata.update(one["model"]._metadata)
        whole["optimizer"]["state"].update(one["optimizer"]["state"])
        whole[f"only{i}"] = one[f"only{i}"]
    same_as(merged, whole)


@pytest.mark.parametrize("flat", [True, False])
def test_an_optimizer_of_a_stage_must_be_flattened(flat):
    """The param_groups of an optimizer list the parameters of its stage, so those of two stages cannot be merged.

    The error says how to flatten the state of the optimizer. Flattened states can be merged.
    """

    def stage(*numbers):
        model = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(3, 3) for i in numbers})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}

    if flat:
        assert {part.name for part in merge(stage(0, 1), stage(2))} == {"", "model", "optimizer"}
        return
    with pytest.raises(InvalidInputError, match=r"flatten_optimizer_state_dict=True\).* keys= of this rank") as raised:
        merge(stage(0, 1), stage(2))
    assert "optimizer.param_groups.0.params" in str(raised.value)


@dataclass
class Expert:
    layers: dict
    calls: int


@pytest.mark.parametrize("kind", [dict, OrderedDict, Counter, partial(defaultdict, dict), partial(Expert, calls=3)])
def test_experts_in_any_container_become_one_state(kind):
    """Tensors and plain values are merged from paths that only one rank has, in mappings and in objects.

    The values at these paths may be sequences.
    """

    def experts(*numbers):
        found = {f"expert{i}": layer(i) | {"at": deque([i, torch.ones(i + 2)], 9), "calls": i} for i in numbers}
        return {
            "before": torch.zeros(7),
            "moe": kind(found if kind is not Counter else {f"calls{i}": i for i in numbers}),
        }

    def state(*numbers):
        return {"model": experts(*numbers), "other": {f"e{i}": Expert({"w": torch.ones(i + 1)}, i) for i in numbers}}

    same_as(merge(state(0), state(1, 3), state(2)), state(0, 1, 3, 2))
    with pytest.raises(InvalidInputError, match=r"other\.e1\.calls: 1 on rank 0, 5 on rank 1"):
        merge(state(0, 1), {**state(1), "other": {"e1": Expert({"w": torch.ones(2)}, 5)}})


def test_dicts_in_columns_become_one():
    first, second = {f"a{i}": i for i in range(500)}, {f"b{i}": str(i) for i in range(3)}
    (root, part) = merge({"m": {"w": torch.ones(1), "d": first}}, {"m": {"w": torch.ones(1), "d": {**second, "a7": 7}}})
    (got,) = [node for key, node in zip(*part.tree[1:], strict=True) if key == "d"]
    assert dict(zip(*got[1:], strict=True)) == {**first, **second}
    with pytest.raises(InvalidInputError, match="m: "):
        merge({"m": {"d": first}}, {"m": {"d": {**first, "a7": 8}}})
    assert root.name == ""


def test_ties_are_counted_in_the_merged_part():
    shared = torch.ones(9)
    first = {"model": {"a": torch.ones(2), "tied": shared}, "ema": {"tied": shared, "x": torch.zeros(1)}}
    second = {"model": {"b": torch.ones(3), "a": torch.ones(2), "tied": shared}, "ema": first["ema"]}
    model, ema = merge(first, second)[1:]
    assert [spec.path[-1] for spec in model.specs] == ["a", "tied", "b"]
    assert ema.specs[0].tie == ("model", 1)


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ({"lr": 0.2}, r"o\.lr: 0.1 on rank 0, 0.2 on rank 1"),
        ({"lr": 1}, r"o\.lr: 0.1 on rank 0, 1 on rank 1"),
        ({"lr": "x" * 999}, r"o\.lr: 0.1 on rank 0, 'xxx.*\.\.\. on rank 1"),
        ({"lr": torch.ones(3)}, r"o\.lr: 0.1 on rank 0, tensor float32\[3\] on rank 1"),
        ({"lr": {"a": torch.ones(1)}}, r"o\.lr: 0.1 on rank 0, dict of 1 on rank 1"),
        ({"w": torch.ones(4)}, r"o\.w: tensor float32\[3\] on rank 0, tensor float32\[4\] on rank 1"),
        ({"w": torch.ones(3).half()}, r"o\.w: .*float16\[3\] on rank 1"),
        ({"w": torch.ones(3, requires_grad=True)}, r"o\.w: .*requires grad on rank 1"),
        ({"w": torch.nn.Parameter(torch.ones(3))}, r"o\.w: .*parameter float32\[3\] that requires grad on rank 1"),
        ({"w": torch.ones(3).numpy()}, r"o\.w: .*array <f4\[3\] on rank 1"),
        ({"list": [1, 2, 3]}, r"o\.list: \[1, 2\] on rank 0, \[1, 2, 3\] on rank 1"),
        ({"list": (1, 2)}, r"o\.list: "),
        ({"list": [1, 3]}, r"o\.list\.1: 2 on rank 0, 3 on rank 1"),
        ({"own": 3}, r"o\.own: a value of the rank's own on rank 0, 3 on rank 1"),
        ({"own2": PerRank(1)}, r"o\.own2: a value of the rank's own, which all ranks must have .*, only on rank 1"),
        (
            {"in": {"own3": PerRank(1)}},
            r"o\.in: a value of the rank's own, which all ranks must have .*, only on rank 1",
        ),
    ],
)
def test_values_that_differ_are_named(second, told):
    first = {"lr": 0.1, "w": torch.ones(3), "list": [1, 2], "own": PerRank(1)}
    with pytest.raises(InvalidInputError, match=told) as caught:
        merge({"o": first}, {"o": {**first, **second}})
    assert "snapstore.PerRank" in str(caught.value)
    assert len(caught.value.args) == 2


def test_one_error_names_twenty_differences_and_counts_the_rest():
    with pytest.raises(InvalidInputError) as caught:
        merge({f"k{i}": i for i in range(40)}, {f"k{i}": -i for i in range(40)})
    assert len(caught.value.args) == 22
    assert caught.value.args[-1] == "and 19 more"


def test_a_tie_to_a_part_that_comes_later_is_reversed():
    """Ties refer to the first tied tensor of the merged parts, also if a rank has its parts in another order."""
    shared = torch.ones(3)
    stage = {"embed": {"w": shared}, "x": {"b": torch.ones(1), "w": shared}, "y": {"w": shared}}
    _, y, x, embed = merge({"y": {}, "x": {"a": torch.ones(2)}, "embed": {}}, stage)
    assert [spec.tie for spec in y.specs] == [None]
    assert {spec.path[-1]: spec.tie for spec in x.specs} == {"a": None, "b": None, "w": ("y", 0)}
    assert [spec.tie for spec in embed.specs] == [("y", 0)]


def test_ties_that_differ_are_an_error():
    shared = torch.ones(9)
    with pytest.raises(InvalidInputError, match=r"ema\.x: tensor float32\[9\] tied to m\.x on rank 0, tensor float32"):
        merge({"m": {"x": shared}, "ema": {"x": shared}}, {"m": {"x": shared}, "ema": {"x": shared.clone()}})
    with pytest.raises(
        InvalidInputError, match=r"m\.y: tensor float32\[9\] tied to m\.x on rank 0, tensor float32\[9\] on"
    ):
        merge({"m": {"x": shared, "y": shared}}, {"m": {"x": shared, "y": shared.clone()}})


def test_many_ranks_are_named_shortly():
    ranks = [list(range(9)), [9]]
    states = [(of, trees({"a": number})) for number, of in enumerate(ranks)]
    with pytest.raises(InvalidInputError, match=r"a: 0 on ranks 0, 1, 2, 3 and 5 more, 1 on rank 9"):
        merge_trees(states)


def test_keys_that_look_alike_may_not_differ():
    """Ranks with different trees may not have two keys that look alike.

    Readers find the tensors of one path by their order, which may differ between ranks.
    """
    with pytest.raises(InvalidInputError, match="look alike"):
        merge({"m": {1.0: torch.ones(2), "1.0": torch.ones(3)}}, {"m": {"1.0": torch.ones(3)}})


@pytest.mark.parametrize(
    ("first", "second"),
    [(7, 7.0), (1, True), (0, False), (0.0, -0.0), (np.int64(3), 3), (np.float64(3), 3), ((1, "a"), (1.0, "a"))],
    ids=repr,
)
@pytest.mark.parametrize("value", [torch.ones(3), 5], ids=["tensor", "plain"])
def test_keys_that_are_equal_in_python_may_not_differ(first, second, value):
    """A dict has only one of them, so no reader could restore both."""
    equal = "which equals another rank's in Python, on rank"
    with pytest.raises(InvalidInputError) as caught:
        merge({"m": {"x": value, first: value}}, {"m": {second: value, "x": value}})
    assert f"m.{first}: the key {first!r}, {equal} 0, the key {second!r}, {equal} 1" in str(caught.value)


def test_keys_that_are_equal_in_python_may_not_differ_in_columns():
    many = {str(i): i / 7 for i in range(5000)}
    with pytest.raises(InvalidInputError, match=r"m.*: .* on rank 0, .* on rank 1"):
        merge({"m": {"n": many, "k": {7: 1}}}, {"m": {"n": many, "k": {7.0: 1}}})


def test_keys_of_several_types_become_one_state():
    merged = merge({"m": {7: torch.ones(3), "7.0": 2, (1, 2): 3}}, {"m": {8.0: torch.ones(3), None: 4}})
    same_as(merged, {"m": {7: torch.ones(3), "7.0": 2, (1, 2): 3, 8.0: torch.ones(3), None: 4}})
