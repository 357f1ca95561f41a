"""A state restores from its parts, the target is filled in place, and every difference is named before any write."""

import collections
import copy
import dataclasses
import re
import types
import typing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kit.device_memory import CHECKS, check_any_places, everywhere, sources
from kit.states import DTYPES, Saved, again, random_tensor, same
from snapstore.errors import FormatError, InvalidInputError
from snapstore.state.fill import buffers as restore_buffers
from snapstore.state.fill.buffers import Want
from snapstore.state.fill.fit import Fit
from snapstore.state.fill.plan import RestorePlan
from snapstore.state.tree.decode import Decoded
from snapstore.state.values.arrays import as_bytes
from snapstore.state.values.classes import Types
from snapstore.state.values.tensors import StoredPart, TensorSpec
from snapstore.state.walk.per_rank import PerRank

dtypes = st.sampled_from(sorted(DTYPES))
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(random_tensor, dtypes, shapes, st.integers(0, 99))
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=4))
arrays = st.builds(
    lambda kind, shape: np.arange(int(np.prod(shape))).astype(kind).reshape(shape),
    st.sampled_from(["<i4", ">f4", "<c8", "|u1", "<U3", "|S2", "<M8[s]"]),
    shapes,
)
names = st.one_of(st.text(max_size=3), st.integers(-5, 5))
states = st.recursive(
    st.one_of(tensors, arrays, plain),
    lambda below: st.one_of(
        st.lists(below, max_size=4),
        st.lists(below, max_size=4).map(tuple),
        st.dictionaries(names, below, max_size=4),
        st.dictionaries(names, below, max_size=4).map(collections.OrderedDict),
    ),
    max_leaves=12,
)
predicates = st.sampled_from([None, everywhere])


@given(states, predicates)
def test_any_state(state, on_device):
    same(again(state, on_device=on_device), state)


@given(states, predicates)
def test_any_state_into_a_copy_of_its_shape(state, on_device):
    if not isinstance(state, dict | list):
        state = [state]

    def blank(value):
        if isinstance(value, torch.Tensor):
            return random_tensor(str(value.dtype)[6:], value.shape, 7)
        if isinstance(value, np.ndarray):
            return np.zeros_like(value)
        if isinstance(value, dict):
            return type(value)((key, blank(child)) for key, child in value.items())
        return type(value)(map(blank, value)) if isinstance(value, list | tuple) else None

    into = blank(state)
    assert again(state, into=into, on_device=on_device) is into
    same(into, state)


def test_a_broken_tie_is_a_format_error():
    spec = TensorSpec(("b", "w"), "tensor", "float32", (3,), False, ("", 0))
    root = StoredPart("", ["dict", ["t", "b"], [["tensor", 0, False], ["part", "b"]]], [])
    below = StoredPart("b", ["dict", ["w"], [["tensor", 0, False]]], [spec])
    for other in ({"shape": (4,)}, {"dtype": "int32"}, {"kind": "array", "dtype": "<f4"}, {"tie": ("b", 0)}):
        fields = {
            "path": ("t",),
            "kind": "tensor",
            "dtype": "float32",
            "shape": (3,),
            "requires_grad": False,
            "tie": None,
        }
        tree = [
            "dict",
            ["t", "b"],
            [["array" if "kind" in other else "tensor", 0, *([] if "kind" in other else [False])], ["part", "b"]],
        ]
        with pytest.raises(FormatError, match="tied to entry 0"):
            RestorePlan([StoredPart("", tree, [TensorSpec(**{**fields, **other})]), below])
    with pytest.raises(FormatError):
        RestorePlan([root, below])


def test_target_memory_is_that_of_into_where_it_can_be():
    into = {"a": torch.zeros(3), "b": torch.zeros(2, 2).t()}
    target = Saved({"a": torch.ones(3), "b": torch.ones(2, 2)}).target(into=into)
    assert target.buffers.buffer(Want(0, 0)).ctypes.data == into["a"].data_ptr()
    assert target.buffers.buffer(Want(0, 1)).ctypes.data != into["b"].data_ptr()
    assert target.buffers.buffer(Want(0, 1)) is target.buffers.buffer(Want(0, 1))


# --- into


def test_into_fills_in_place_and_replaces_plain_leaves():
    state = {
        "t": torch.arange(3.0),
        "list": [1, "x"],
        "d": {"e": 5},
        "tuple": (torch.ones(2), 7),
        "log": [1, 2, 3],
        "s": {1},
    }
    into = {"t": torch.zeros(3), "list": [0, 0], "d": {"e": 0}, "tuple": (torch.zeros(2), 6), "log": [], "s": set()}
    held = dict(into)
    Saved(state).restore(into=into)
    same(into, state)
    assert into["t"] is held["t"]
    assert into["list"] is held["list"]
    assert into["d"] is held["d"]
    assert into["log"] is held["log"]
    assert into["tuple"][0] is held["tuple"][0]
    unchanged = into["tuple"]
    Saved(state).restore(into=into)
    assert into["tuple"] is unchanged


def test_into_keeps_what_its_containers_and_tensors_are():
    into = {
        "order": {"b": 0, "a": 0},
        "class": collections.OrderedDict(x=0),
        "key": {1: 0},
        "factory": collections.defaultdict(list, x=0),
        "maxlen": collections.deque([torch.zeros(1)], 9),
        "grad": nn.Parameter(torch.zeros(1)),
        "list": [{"b": 0, "a": 0}],
    }
    state = {
        "order": {"a": 1, "b": 2},
        "class": {"x": 3},
        "key": {True: 4},
        "factory": collections.defaultdict(int, x=5),
        "maxlen": collections.deque([torch.ones(1)], 3),
        "grad": torch.ones(1),
        "list": [{"a": 1, "b": 2}],
    }
    expected = {
        "order": {"b": 2, "a": 1},
        "class": collections.OrderedDict(x=3),
        "key": {1: 4},
        "factory": collections.defaultdict(list, x=5),
        "maxlen": collections.deque([torch.ones(1)], 9),
        "grad": nn.Parameter(torch.ones(1)),
        "list": [{"a": 1, "b": 2}],
    }
    same(again(state, into=into), expected)
    assert (into["factory"].default_factory, into["maxlen"].maxlen) == (list, 9)
    with pytest.raises(InvalidInputError, match="p: type"):
        again({"p": collections.deque([1], 3)}, into={"p": collections.deque([1], 9)})


def test_into_parameters_and_strided_memory():
    parameter = nn.Parameter(torch.zeros(3, 2))
    base, array = torch.zeros(2, 6), np.zeros((2, 6))
    into = {"p": parameter, "v": base.t()[::2], "n": array.T[::2]}
    state = {"p": torch.randn(3, 2), "v": torch.randn(3, 2), "n": np.random.default_rng(0).random((3, 2))}
    again(state, into=into)
    assert torch.equal(parameter.detach(), state["p"])
    assert torch.equal(base[:, ::2].t(), state["v"])
    assert np.array_equal(array[:, ::2].T, state["n"])
    assert not base[:, 1::2].any()
    assert parameter.grad is None


@pytest.mark.parametrize("weight", [torch.ones(4, 4), torch.ones(4, 4).t(), torch.ones(4, 4, dtype=torch.bfloat16)])
def test_a_backward_that_needs_the_values_before_a_restore_is_an_error(weight):
    saved = Saved({"w": torch.zeros_like(weight)})
    into = {"w": nn.Parameter(weight.clone(memory_format=torch.preserve_format))}
    loss = (into["w"] * into["w"]).sum()
    saved.restore(into=into)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (into["w"] * into["w"]).sum().backward()
    assert not into["w"].grad.any()


def test_into_a_tensor_or_a_tuple():
    into = torch.zeros(2)
    assert again(torch.ones(2), into=into) is into
    assert torch.equal(into, torch.ones(2))
    pair = (torch.zeros(2), 3)
    again((torch.ones(2), 3), into=pair)
    assert torch.equal(pair[0], torch.ones(2))
    for state, target in (((torch.ones(2), 4), pair), (5, 6), (b"x" * 5000, b"x" * 5000)):
        with pytest.raises(InvalidInputError, match="would have to be replaced"):
            again(state, into=target)


def test_every_difference_is_listed_and_nothing_changes():
    state = {
        "m": {"a": torch.ones(2, 3), "b": torch.ones(2), "c": torch.ones(2), "gone": [1, torch.ones(1)]},
        "n": np.ones(2),
        "x": 1,
        "l": [torch.ones(1)] * 2,
    }
    into = {
        "m": {
            "a": torch.zeros(3, 2),
            "b": torch.zeros(2, dtype=torch.bfloat16),
            "c": torch.zeros(2),
            "new": {"w": torch.zeros(1)},
        },
        "n": torch.zeros(2, dtype=torch.float64),
        "x": torch.zeros(1),
        "l": [torch.zeros(1)],
    }
    with pytest.raises(InvalidInputError) as caught:
        again(state, into=into)
    for line in (
        "m.a: shape: expected (3, 2) as in the target, got (2, 3)",
        "m.b: dtype: expected bfloat16 as in the target, got float32",
        "m.gone.0: missing in the target",
        "m.gone.1: missing in the target",
        "m.new.w: missing in the snapshot",
        "n: type: expected tensor as in the target, got array",
        "x: type: expected Tensor as in the target, got int",
        "l.1: missing in the target",
    ):
        assert line in str(caught.value)
    assert not into["m"]["c"].any()


def test_at_most_fifty_differences_are_listed():
    with pytest.raises(InvalidInputError, match=r"and 10 more"):
        again({"m": {str(i): torch.ones(1) for i in range(60)}}, into={"m": {}})


def test_targets_that_cannot_be_filled():
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    for target, reason in (
        (torch.zeros(1).expand(2).double(), None),
        (torch.zeros(1, dtype=torch.float64).expand(2), "share memory"),
        (frozen, "read-only"),
        (torch.zeros(2, dtype=torch.float64, device="meta"), "meta"),
        (np.zeros(2).view(np.matrix), "matrix"),
        ([1.0, 2.0], "expected list"),
        (None, "NoneType"),
    ):
        state = {"t": np.zeros(2) if isinstance(target, np.ndarray) else torch.zeros(2, dtype=torch.float64)}
        if reason is None:
            again(state, into={"t": target})
        else:
            with pytest.raises(InvalidInputError, match=reason):
                again(state, into={"t": target})


@pytest.mark.filterwarnings("ignore:.*which is a no-op")
def test_a_module_on_the_meta_device_is_refused():
    """torch's load_state_dict only warns, and leaves the module as it was."""
    layer = nn.Linear(2, 2)
    with pytest.raises(InvalidInputError, match=r"m.weight: expected a tensor with memory .*to_empty\(device"):
        again({"m": layer}, into={"m": nn.Linear(2, 2, device="meta")})
    given = again({"m": layer}, into={"m": nn.Linear(2, 2, device="meta").to_empty(device="cpu")})["m"]
    same(given.state_dict(), layer.state_dict())


def test_containers_of_other_types():
    for state, into in (
        ({"a": [torch.ones(1)]}, {"a": (torch.ones(1),)}),
        ({"a": {"b": 1}}, {"a": [1]}),
        ({"a": [1]}, {"a": 1}),
        ({"a": 1}, {"a": [1]}),
        ({"a": (1,)}, {"a": [1]}),
        ({"a": collections.deque([1], 1)}, {"a": collections.deque(maxlen=2)}),
    ):
        with pytest.raises(InvalidInputError, match=r"a: type: expected"):
            again(state, into=into)
    with pytest.raises(InvalidInputError, match=r"expected deque\(maxlen=2\) as in the target, got deque\(maxlen=1\)"):
        again(state, into=into)
    cycle = {}
    cycle["a"] = cycle
    with pytest.raises(InvalidInputError):
        again({"a": {"b": 1}}, into=cycle)


def test_views_saved_as_copies_go_back_into_views():
    flat = torch.arange(6.0)
    state = {"flat": flat, "head": flat[:4], "tail": flat[2:]}
    memory = torch.zeros(6)
    again(state, into={"flat": memory, "head": memory[:4], "tail": memory[2:]})
    assert torch.equal(memory, flat)
    with pytest.raises(InvalidInputError, match=r"shares memory with another array[^/]*may be partly filled"):
        again({"a": torch.ones(2), "b": torch.zeros(2)}, into={"a": memory[:2], "b": memory[:2]})


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_memory_of_two_objects_gets_one_value(order):
    """Each object has the stored value when it has loaded it; the next load may replace it."""

    def places(a, b):
        return {name: {"a": a, "b": b}[name] for name in order}

    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    target, tied = nn.Linear(3, 3), nn.Linear(3, 3)
    tied.weight = target.weight
    for into in (places(target, tied), places(target, target), places(target, target.weight.data)):
        stored = places(one, other.weight.detach() if isinstance(into["b"], torch.Tensor) else other)
        with pytest.raises(InvalidInputError, match=r"different values[^/]*may be partly filled"):
            again(stored, into=into)
        again(places(one, one if isinstance(into["b"], nn.Module) else one.weight.detach()), into=into)
        assert torch.equal(target.weight, one.weight)


class Copies:
    """An object whose `state_dict` has a copy of its tensor, or nothing until it has loaded one."""

    def __init__(self, tensor=None):
        self.tensor = tensor

    def state_dict(self):
        return {} if self.tensor is None else {"tensor": self.tensor.clone()}

    def load_state_dict(self, state):
        self.tensor = state["tensor"].clone()


@pytest.mark.parametrize("tensor", [None, torch.zeros(2)])
def test_an_object_at_two_places_whose_memory_is_not_in_its_state(tensor):
    target = Copies(tensor)
    for other in (torch.zeros(2), torch.ones(2).double(), torch.ones(2).int()):
        with pytest.raises(InvalidInputError, match=r"b: is the same Copies as a|b.tensor: dtype"):
            again({"a": Copies(torch.ones(2)), "b": Copies(other)}, into={"a": target, "b": target})
    again({"a": Copies(torch.ones(2)), "b": Copies(torch.ones(2))}, into={"a": target, "b": target})
    assert torch.equal(target.tensor, torch.ones(2))


class Item:
    """An object whose state is one value."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def stored(state):
    """Return what a save stores of a state, to compare values of any class."""
    saved = Saved({"state": state})
    return [repr(part.tree) for part in saved.parts], [bytes(one) for of_part in saved.bytes for one in of_part]


@pytest.mark.parametrize(
    "hold",
    [
        lambda value: {"x": value},
        lambda value: [value],
        lambda value: collections.deque([value]),
        lambda value: types.SimpleNamespace(x=value),
        lambda value: Item(value),
        lambda value: PerRank(Item(value)),
        lambda value: {"t": torch.ones(1), "deep": [{"x": value}]},
    ],
)
@pytest.mark.parametrize(("one", "other"), [(1, 2), (b"a" * 100_000, b"b" * 100_000), ([1], [1, 2]), (0.0, -0.0)])
def test_a_container_or_object_that_a_target_has_twice_gets_one_value(hold, one, other):
    """With another value at its second place, this would silently replace the first."""

    def made(value):
        return hold(copy.deepcopy(value))

    def twice(shared, n):
        return {"a": shared, "b": {"c": shared, "n": n}}

    target = made(other)
    again(twice(made(one), 5), into=twice(target, 0))
    assert stored(target) == stored(made(one))
    target = made(one)
    into = twice(target, 0)
    with pytest.raises(InvalidInputError) as caught:
        again({"a": made(one), "b": {"c": made(other), "n": 5}}, into=into)
    assert re.search(
        r"b.c\S*: is the same \w+ as a\S* in the target, but the snapshot has different", str(caught.value)
    )
    if "may be partly filled" not in str(caught.value):  # long bytes are compared once they are read
        assert into["b"]["n"] == 0
        assert stored(target) == stored(made(one))


def test_a_place_that_is_not_selected_may_have_another_value():
    target = {"x": 0, "y": 0}
    into = {"a": target, "b": target}
    again({"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 4}}, into=into, keys=["a.x", "b.y"])
    assert target == {"x": 1, "y": 4}
    with pytest.raises(InvalidInputError, match="is the same dict"):
        again({"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 4}}, into=into, keys=["a.*", "b.y"])
    value = (1,)
    into = {"a": value, "b": value}
    assert again({"a": (2,), "b": (3,)}, into=into) == {"a": (2,), "b": (3,)}


def test_device_is_for_new_tensors():
    assert again({"a": torch.ones(2), "n": np.ones(1)}, device="cpu")["a"].device.type == "cpu"
    with pytest.raises(InvalidInputError, match="device"):
        again({"a": 1}, into={"a": 2}, device="cpu")


def test_finish_before_complete_is_a_bug():
    with pytest.raises(RuntimeError, match=r"a: finish\(\)"):
        Saved({"a": torch.ones(1)}).target().finish()


class Fields(typing.NamedTuple):
    x: typing.Any
    y: typing.Any = 0


class Dict(dict):
    pass


class List(list):
    pass


@pytest.mark.parametrize(
    "outer", [lambda x: [x], lambda x: (x,), lambda x: collections.deque([x]), lambda x: [{"k": [x]}]]
)
@pytest.mark.parametrize(
    "inner",
    [
        lambda value: Point(value, 0),
        lambda value: Fields(value),
        lambda value: Dict(x=value),
        lambda value: List([value]),
        lambda value: types.SimpleNamespace(x=value),
        lambda value: Fields(Point(List([value]), 0)),
    ],
)
def test_objects_and_tensors_in_values_of_classes_in_sequences(outer, inner):
    target, tensor = Item(0), torch.zeros(2)
    into = {"item": outer(inner(target)), "tensor": outer(inner(tensor))}
    again({"item": outer(inner(Item(7))), "tensor": outer(inner(torch.ones(2)))}, into=into)
    assert target.value == 7
    assert torch.equal(tensor, torch.ones(2))
    assert stored(into) == stored({"item": outer(inner(Item(7))), "tensor": outer(inner(torch.ones(2)))})
    into = {"tensor": outer(inner(tensor))}
    with pytest.raises(InvalidInputError, match="type: expected Tensor as in the target, got int"):
        again({"tensor": outer(inner(5))}, into=into)
    assert stored(into) == stored({"tensor": outer(inner(torch.ones(2)))})


def test_a_target_whose_values_contain_themselves():
    cycle = Point(1, 2)
    cycle.x = [cycle]
    with pytest.raises(InvalidInputError, match="contains itself"):
        again({"a": [Point(1, 2)]}, into={"a": [cycle]})
    cycle.x = cycle
    with pytest.raises(InvalidInputError, match="contains itself"):
        again({"a": PerRank([Point(1, 2)])}, into={"a": PerRank([cycle])})


def test_a_target_with_many_ways_through_it():
    """Each of its values is looked into once for its class, not once for each way to it."""
    tree = Point(None, Point(None, None))
    tree.x = tree.y.x = tree.y.y = tree
    into = {"fields": Fields(1, 2), "tree": tree}
    again({"fields": Fields(3, 4), "tree": None}, into=into, decoded=Decoded(types=Types(into=into)))
    assert into == {"fields": Fields(3, 4), "tree": None}


class Loading:
    """Loads its arrays by a function of itself and the state."""

    def __init__(self, load, *, copies=False):
        self.load, self.copies = load, copies
        self.tensor, self.array = torch.zeros(3), np.zeros(2)

    def state_dict(self):
        arrays = [self.tensor, self.array]
        return {"deep": copy.deepcopy(arrays) if self.copies else arrays}

    def load_state_dict(self, state):
        self.load(self, *state["deep"])


def clear_first(self, tensor, array):
    self.tensor.zero_()
    self.array[:] = 0
    self.tensor.copy_(tensor)
    self.array[:] = array


def add(self, tensor, array):
    self.tensor += tensor
    self.array += array


def put(self, tensor, array):
    self.tensor, self.array = tensor, array


@pytest.mark.parametrize("load", [clear_first, add, put])
def test_an_object_that_changes_arrays_before_it_loads_them(load):
    """It gets its own arrays, filled: a load that clears them, or adds to them, is an error."""
    saved = Loading(load)
    saved.tensor, saved.array = torch.full((3,), 5.0), np.full(2, 6.0)
    for copies in (True, False):
        into = Loading(load, copies=copies)
        if load is put or copies:
            again({"x": saved}, into={"x": into})
            assert (into.tensor.tolist(), into.array.tolist()) == ([5.0] * 3, [6.0] * 2)
        else:
            with pytest.raises(
                InvalidInputError, match=r"x: Loading\.load_state_dict changed x\.deep\.0, so the state"
            ):
                again({"x": saved}, into={"x": into})


@pytest.mark.parametrize("array", [
    torch.arange(60_000.0).view(1, 2, 30_000), torch.arange(60_000.0).view(30_000, 2, 1), torch.arange(6.0).view(2, 3),
    np.arange(60_000.0).reshape(3, -1), np.array(["x" * 20_000, "y"]), torch.zeros(3, 0), torch.tensor(7.0),
    torch.arange(60_000.0).view(300, 200).t(),
])  # fmt: skip
def test_few_bytes_of_an_array_are_compared(array):
    """Its first elements, at most SAMPLE_BYTES of them, or one."""
    found = restore_buffers._first_bytes(array)
    whole = as_bytes(array).tobytes()
    assert whole.startswith(found)
    assert min(len(whole), array.itemsize) <= len(found) <= max(restore_buffers.SAMPLE_BYTES, array.itemsize)


# --- `_metadata` of an OrderedDict


def annotated(fill, **values):
    """Return an OrderedDict with arrays, long bytes, an object and a value of a class in its `_metadata`."""
    state = collections.OrderedDict(values or {"a": fill, "t": torch.full((2,), fill)})
    state._metadata = {
        "tensor": torch.full((3,), fill),
        "array": np.full(2, fill),
        "bytes": bytes([int(fill)]) * 5000,
        "item": Item(torch.full((1,), fill)),
        "point": [Point(fill, 0)],
    }
    return state


@dataclasses.dataclass
class Point:
    x: float
    y: float


def check_metadata(found, fill, point):
    metadata = found._metadata
    same(metadata.pop("point"), point)
    expected = annotated(fill)._metadata | {"item": {"value": torch.full((1,), fill)}}
    del expected["point"]
    same(metadata, expected)


def test_metadata_of_an_ordered_dict_has_its_arrays():
    saved = Saved({"m": annotated(5.0)})
    plain = [{"x": 5.0, "y": 0}]
    check_metadata(saved.restore()["m"], 5.0, plain)
    check_metadata(saved.restore(keys="m.a")["m"], 5.0, plain)
    found = saved.restore(decoded=Decoded(types=Types([Point])))["m"]
    assert found._metadata["point"] == [Point(5.0, 0)]
    for keys in (None, "m.t"):
        into = {"m": annotated(0.0)}
        saved.restore(into=into, keys=keys)
        check_metadata(into["m"], 5.0, plain)
    into = {"m": {"a": 0.0, "t": torch.zeros(2)}}
    saved.restore(into=into)
    same(into["m"]["t"], torch.full((2,), 5.0))


@pytest.mark.parametrize("strict", [True, False])
def test_metadata_of_a_module_has_its_arrays(strict):
    module, seen = nn.Linear(2, 2), []
    state = module.state_dict()
    state._metadata[""]["scale"] = torch.ones(3)
    module._load_from_state_dict = lambda state, prefix, metadata, *_: seen.append(metadata["scale"])
    again({"m": state}, into={"m": module}, keys=Fit(strict=strict))
    same(seen, [torch.ones(3)])


# --- device memory


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_device_memory(check):
    check("cpu")


@given(sources(["cpu"]))
def test_any_places(drawn):
    check_any_places(drawn, everywhere)


def test_devices_that_are_not_ours_have_host_memory():
    into = {"a": torch.zeros(2), "b": torch.zeros(2, 2).t()}
    state = {"a": torch.ones(2), "b": torch.ones(2, 2)}
    for options in ({"into": into}, {"device": "cpu"}, {}):
        saved = Saved(state)
        same(saved.restore(**options, on_device=lambda device: device.type != "cpu"), state)
        assert [type(buffer) for buffer in saved.buffers] == [np.ndarray] * 2
