"""State to parts and back: every dtype, ties, `into`, `keys`, objects, and what must be refused."""

import collections
import copy
import inspect
import random
import warnings

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils

from snapstore.errors import FormatError, InvalidInputError, NotFoundError, UnsupportedLeafError
from snapstore.state import (
    RngState,
    StoredPart,
    Target,
    TensorSpec,
    as_bytes,
    copy_into,
    flatten,
    parts_needed,
)
from snapstore.tree import TORCH_DTYPES, encode_plain


def packed(value):
    return msgspec.msgpack.encode(encode_plain(value))  # bytes, in which nan equals nan


def same(a, b):
    """Equal to the type and the bit, tensors by their bytes."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        assert as_bytes(a).tobytes() == as_bytes(b).tobytes()
    elif isinstance(a, np.ndarray):
        assert (a.dtype.str, a.shape, as_bytes(a).tobytes()) == (b.dtype.str, b.shape, as_bytes(b).tobytes())
    elif isinstance(a, dict):
        assert packed(list(a)) == packed(list(b))
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        for left, right in zip(a.values(), b.values(), strict=True):
            same(left, right)
    elif isinstance(a, list | tuple | collections.deque):
        for left, right in zip(a, b, strict=True):
            same(left, right)
    elif len(a) > 4096 if isinstance(a, bytes | bytearray) else False:
        assert a == b
    else:
        assert packed(a) == packed(b)


class Saved:
    """A snapshot in memory: the bytes of every array and the packed trees."""

    def __init__(self, state):
        parts = flatten(state)
        pack = msgspec.msgpack
        self.parts = [StoredPart(p.name, pack.decode(pack.encode(p.tree)), p.specs) for p in parts]
        self.bytes = []
        for part in parts:
            self.bytes.append([])
            for spec, value in zip(part.specs, part.values, strict=True):
                memory = np.empty(spec.nbytes, np.uint8)
                copy_into(value, memory)
                assert memory.tobytes() == as_bytes(value).tobytes()
                self.bytes[-1].append(memory)

    def spec(self, name, index=0):
        return next(part.specs[index] for part in self.parts if part.name == name)

    def target(self, **options):
        names = parts_needed([part.name for part in self.parts], options.get("keys"))
        self.read = [i for i, part in enumerate(self.parts) if part.name in names]
        return Target([self.parts[i] for i in self.read], **options)

    def restore(self, **options):
        target = self.target(**options)
        for part, index in target.selected:
            buffer = target.buffer(part, index)
            assert buffer.dtype == np.uint8
            buffer[:] = self.bytes[self.read[part]][index]
        for part, index in target.selected:
            target.complete(part, index)
        return target.finish()


def again(state, **options):
    return Saved(state).restore(**options)


def random_tensor(name, shape, seed=0):
    size = int(np.prod(shape)) * TORCH_DTYPES[name][0]
    noise = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    if name == "bool":
        noise &= 1
    memory = torch.from_numpy(noise) if size else torch.empty(0, dtype=torch.uint8)
    return memory.view(getattr(torch, name)).view(shape)


# --- values


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (7, 5), (2, 3, 4)])
def test_every_dtype_and_shape_bit_by_bit(name, shape):
    value = random_tensor(name, shape)
    grad = value.detach().clone().requires_grad_() if TORCH_DTYPES[name][2] and name != "complex32" else value
    state = {"a": value, "m": {"w": grad}}
    restored = again(state)
    same(restored, state)
    assert restored["a"].is_contiguous()
    assert restored["a"].is_leaf
    assert not restored["a"]._is_view()


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_strided_tensors_keep_their_bits(name):
    base = random_tensor(name, (6, 8))
    raw = as_bytes(base).reshape(6, 8, -1)
    for view, want in (
        (base.t(), raw.transpose(1, 0, 2)),
        (base[::2, 1::3], raw[::2, 1::3]),
        (base[:1].expand(4, 8), np.broadcast_to(raw[:1], (4, *raw.shape[1:]))),
        (base[:, None, :].permute(2, 1, 0), raw[:, None].transpose(2, 1, 0, 3)),
    ):
        restored = again([view])[0]
        assert (restored.dtype, restored.shape) == (view.dtype, view.shape)
        assert as_bytes(restored).tobytes() == want.tobytes()


def test_conjugated_and_negated_views_are_resolved():
    value = torch.tensor([1 + 2j, 3 - 4j])
    state = {"c": value.conj(), "n": value.conj().imag, "plain": value}
    restored = again(state)
    assert torch.equal(restored["c"], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(restored["n"], torch.tensor([-2.0, 4.0]))
    assert torch.equal(restored["plain"], value)
    target = {key: torch.zeros_like(tensor.resolve_conj().resolve_neg()) for key, tensor in state.items()}
    target["c"] = target["c"].conj()
    again(state, into=target)
    assert torch.equal(target["c"], value.conj())


def test_a_tensor_with_grad_fn_comes_back_as_a_leaf():
    value = torch.ones(3, requires_grad=True) * 2
    restored = again([value])[0]
    assert restored.is_leaf
    assert restored.requires_grad
    assert torch.equal(restored, value.detach())


def test_parameters_and_buffers():
    state = {
        "p": nn.Parameter(torch.ones(2)),
        "q": nn.Parameter(torch.ones(2), requires_grad=False),
        "b": nn.Buffer(torch.ones(2)),
    }
    same(again(state), state)


ARRAYS = [
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.arange(6, dtype="<f8").reshape(2, 3).T,
    np.arange(10, dtype="u2")[::3],
    np.zeros((), "f2"),
    np.zeros((0, 2), "c16"),
    np.array([True, False]),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bc"]),
    np.array(["2020-01-01", "NaT"], "M8[ns]"),
    np.array([1, 2], ">m8[ms]"),
    np.broadcast_to(np.float32(3), (2, 2)),
    np.array([0x7FC00001, 0x7F800001], "u4").view("f4"),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
]


@pytest.mark.parametrize("array", ARRAYS, ids=range(len(ARRAYS)))
def test_arrays(array):
    restored = again({"a": array})["a"]
    same(restored, array)
    assert restored.flags.writeable
    into = {"a": np.zeros_like(array, order="C")}
    held = into["a"]
    again({"a": array}, into=into)
    assert into["a"] is held
    same(held, array)


def test_long_bytes_are_leaves():
    long = random.Random(0).randbytes(5000)
    state = {"b": long, "a": bytearray(long), "twice": [long, long], "short": b"x" * 4096}
    same(again(state), state)
    assert [spec.kind for part in flatten(state) for spec in part.specs] == ["bytes", "bytes", "bytes"]
    assert [spec.shape for spec in flatten(state)[0].specs] == [(5000,), (5000,)]
    into = {"b": b"", "a": None, "twice": [], "short": 1}
    again(state, into=into)
    same(into, state)


dtypes = st.sampled_from(sorted(TORCH_DTYPES))
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


@given(states)
def test_any_state(state):
    same(again(state), state)


@given(states)
def test_any_state_into_a_copy_of_its_shape(state):
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
    assert again(state, into=into) is into
    same(into, state)


# --- parts


def test_parts_are_the_top_level_containers_and_objects():
    model = nn.Linear(2, 2)
    state = {"step": 1, "model": model, "lr": torch.ones(1), "extra": {"a": [1]}, 3: [1], "": {}, "empty": {}}
    parts = flatten(state)
    assert [part.name for part in parts] == ["", "model", "extra", "empty"]
    assert [spec.path for part in parts for spec in part.specs] == [("lr",), ("model", "weight"), ("model", "bias")]
    restored = again(state)
    assert list(restored) == list(state)
    assert torch.equal(restored["model"]["weight"], model.weight)
    assert [part.name for part in flatten([{"a": 1}])] == [""]
    assert [part.name for part in flatten(model)] == [""]
    assert [part.name for part in flatten(torch.ones(1))] == [""]
    assert [part.name for part in flatten(torch.optim.SGD(model.parameters()))] == ["", "state", "param_groups"]


def test_many_parts_share_one():
    state = {f"p{i}": [i] for i in range(65)}
    assert [part.name for part in flatten(state)] == [""]
    del state["p64"]
    assert len(flatten(state)) == 65
    same(again(state), state)


# --- ties


def test_ties_within_a_part_are_stored_once_and_tied_again():
    weight = nn.Parameter(torch.randn(3))
    array = np.arange(3)
    plain = torch.randn(2)
    state = {
        "m": {
            "a": weight,
            "b": weight,
            "c": weight.detach(),
            "x": array,
            "y": array,
            "p": plain,
            "q": plain,
            "view": plain[:1],
        }
    }
    saved = Saved(state)
    assert len(saved.parts[1].specs) == 4
    m = saved.restore()["m"]
    assert m["a"] is m["b"]
    assert m["c"].data_ptr() == m["a"].data_ptr()
    assert not m["c"].requires_grad
    assert type(m["c"]) is torch.Tensor
    assert m["x"] is m["y"]
    assert m["p"] is not m["q"]
    assert m["p"].data_ptr() == m["q"].data_ptr() != m["view"].data_ptr()


def test_ties_across_parts():
    weight = torch.randn(3)
    state = {"a": [weight], "b": {"w": weight}, "top": weight}
    saved = Saved(state)
    assert [part.specs[0].tie for part in saved.parts] == [None, ("", 0), ("", 0)]
    assert saved.target().selected == [(0, 0)]
    restored = saved.restore()
    same(restored, state)
    assert restored["a"][0].data_ptr() == restored["b"]["w"].data_ptr() == restored["top"].data_ptr()
    assert torch.equal(saved.restore(keys="b")["b"]["w"], weight)
    into = {"a": [torch.zeros(3)], "b": {"w": torch.zeros(3)}, "top": torch.zeros(3)}
    saved.restore(into=into)
    same(into, state)
    assert into["a"][0].data_ptr() != into["top"].data_ptr()


def test_no_tie_where_values_differ_or_nothing_is_shared():
    value = torch.randn(2, dtype=torch.complex64)
    state = [value, value.conj(), value.view(torch.float32), torch.empty(0), torch.empty(0), value.t()[None]]
    assert len(flatten(state)[0].specs) == 6
    same(again(state), state)


def test_temporary_tensors_of_state_dicts_are_not_tied_by_reused_memory():
    class Fresh:
        def state_dict(self):
            return {"t": torch.full((1000,), random.random())}

        def load_state_dict(self, state): ...

    assert [spec.tie for part in flatten({str(i): Fresh() for i in range(20)}) for spec in part.specs] == [None] * 20


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
            Target([StoredPart("", tree, [TensorSpec(**{**fields, **other})]), below])
    with pytest.raises(FormatError):
        Target([root, below])


# --- keys


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
        whole = Target(saved.parts, keys=pattern).finish()
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
        "m.a: shape: expected (3, 2) as in `into`, got (2, 3)",
        "m.b: dtype: expected bfloat16 as in `into`, got float32",
        "m.gone.0: missing in `into`",
        "m.gone.1: missing in `into`",
        "m.new.w: missing in the snapshot",
        "n: type: expected tensor as in `into`, got array",
        "x: type: expected Tensor as in `into`, got int",
        "l.1: missing in `into`",
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
    with pytest.raises(InvalidInputError, match="shares memory with another array"):
        again({"a": torch.ones(2), "b": torch.zeros(2)}, into={"a": memory[:2], "b": memory[:2]})


def test_device_is_for_new_tensors():
    assert again({"a": torch.ones(2), "n": np.ones(1)}, device="cpu")["a"].device.type == "cpu"
    with pytest.raises(InvalidInputError, match="device"):
        again({"a": 1}, into={"a": 2}, device="cpu")


def test_finish_before_complete_is_a_bug():
    with pytest.raises(RuntimeError, match=r"a: finish\(\)"):
        Saved({"a": torch.ones(1)}).target().finish()


# --- refusals


def test_unsupported_leaves_are_named_all_at_once():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated
        quantized = torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)

    class Sub(torch.Tensor): ...

    bad = {
        "sparse": torch.ones(2, 2).to_sparse(),
        "sub": torch.ones(1).as_subclass(Sub),
        "meta": torch.ones(1, device="meta"),
        "quantized": quantized,
        "int4": torch.empty(2, dtype=torch.int4),
        "freed": freed,
        "objects": np.array([None]),
        "matrix": np.zeros(2).view(np.matrix),
        "long": np.zeros(1, np.longdouble),
        "fields": np.zeros(1, "i4,f4"),
        "uninitialized": nn.UninitializedParameter(),
        "fn": len,
        "many": torch.ones([1] * 65),
    }
    with pytest.raises(UnsupportedLeafError) as caught:
        flatten({"a": {"deep": bad}})
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"a.deep.{name}" for name in bad]
    with pytest.raises(UnsupportedLeafError, match=r"and 80 more"):
        flatten([object() for _ in range(100)])


def test_nested_tensors_are_refused():
    with pytest.raises(UnsupportedLeafError, match="nested"):
        flatten([torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)])


def test_cycles_depth_and_failing_state_dicts():
    cycle = {"a": []}
    cycle["a"].append(cycle)
    with pytest.raises(InvalidInputError, match=r"a\.0: contains itself"):
        flatten(cycle)

    class Endless:
        def state_dict(self):
            return {"x": Endless()}

        def load_state_dict(self, state): ...

    with pytest.raises(InvalidInputError, match="levels deep"):
        flatten({"o": Endless()})

    class Broken(Endless):
        def state_dict(self):
            raise KeyError("x")

    with pytest.raises(InvalidInputError, match=r"o: .*Broken.state_dict\(\) failed"):
        flatten({"o": Broken()})


# --- objects


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)


def train(model, optimizer, steps=3):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.linspace(0, 1, 12).view(3, 4).to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        if type(optimizer).__name__ == "SparseAdam":
            for parameter in model.parameters():
                parameter.grad = parameter.grad.to_sparse()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


OPTIMIZERS = [
    kind
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


def optimizer_of(kind, model, **options):
    parameters = [p for p in model.parameters() if kind.__name__ != "Muon" or p.ndim == 2]
    return kind(parameters, lr=0.01, **options)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("stepped", [False, True])
def test_every_optimizer(kind, stepped):
    model = net()
    optimizer = optimizer_of(kind, model)
    train(model, optimizer)
    saved = Saved({"model": model, "optimizer": optimizer})
    want = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer)
    after = copy.deepcopy(model.state_dict())

    other = net()
    fresh = optimizer_of(kind, other)
    if stepped:
        train(other, fresh, 1)
    places = [p.data_ptr() for p in other.parameters()]
    saved.restore(into={"model": other, "optimizer": fresh})
    same(other.state_dict(), want["model"])
    same(fresh.state_dict(), want["optimizer"])
    assert [p.data_ptr() for p in other.parameters()] == places
    train(other, fresh)
    same(other.state_dict(), after)
    rebuilt = saved.restore()
    same(rebuilt, want)
    fresh.load_state_dict(rebuilt["optimizer"])


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, epoch):
        return self.factor**epoch


class WithFunctions(lrs.ExponentialLR):
    def __init__(self, optimizer):
        self.anneal = lambda x: x
        self.clamp = max
        super().__init__(optimizer, 0.9)


SCHEDULERS = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, Scale(0.9)),
    "LambdaLR-function": lambda o: lrs.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, Scale(0.9)),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lrs.ConstantLR,
    "LinearLR": lrs.LinearLR,
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 5),
    "PolynomialLR": lrs.PolynomialLR,
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.1, 0.2),
    "CyclicLR-fn": lambda o: lrs.CyclicLR(o, 0.1, 0.2, scale_fn=Scale(0.5)),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
    "SWALR-linear": lambda o: swa_utils.SWALR(o, 0.05, anneal_strategy="linear"),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)], milestones=[2]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
    "functions": WithFunctions,
}


def test_every_scheduler_of_torch_is_covered():
    kinds = {n for n, k in inspect.getmembers(lrs, inspect.isclass) if issubclass(k, lrs.LRScheduler)}
    assert kinds - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_every_scheduler(name, tensor_lr):
    def make():
        optimizer = torch.optim.SGD(
            [nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1) if tensor_lr else 0.1, momentum=0.9
        )
        return {"optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    def run(both, steps):
        rates = []
        for _ in range(steps):
            both["optimizer"].step()
            both["scheduler"].step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(float(both["optimizer"].param_groups[0]["lr"]))
        return rates

    both = make()
    run(both, 3)
    saved = Saved(both)
    want = copy.deepcopy(both["scheduler"].state_dict())
    rates = run(both, 4)
    other = make()
    saved.restore(into=other)
    if name == "functions":
        assert other["scheduler"].anneal(3) == 3
        assert other["scheduler"].clamp is max
        want = {key: value for key, value in want.items() if key not in ("anneal", "clamp")}
        assert saved.restore()["scheduler"].keys() == want.keys()
        same({key: other["scheduler"].state_dict()[key] for key in want}, want)
    else:
        same(other["scheduler"].state_dict(), want)
        same(saved.restore()["scheduler"], want)
    assert run(other, 4) == rates


def test_functions_are_dropped_of_nothing_but_schedulers_that_only_update():
    class Loads(WithFunctions):
        def load_state_dict(self, state):
            super().load_state_dict(state)

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(UnsupportedLeafError, match=r"s\.anneal: function"):
        flatten({"s": Loads(optimizer)})


def test_grad_scaler_and_averaged_model():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = net()
    average = swa_utils.AveragedModel(model)
    average.update_parameters(model)
    saved = Saved({"scaler": scaler, "average": average})
    other = {"scaler": torch.amp.GradScaler("cpu"), "average": swa_utils.AveragedModel(net())}
    saved.restore(into=other)
    same(other["scaler"].state_dict(), scaler.state_dict())
    same(other["average"].state_dict(), average.state_dict())


class Loader:
    """As torchdata's StatefulDataLoader: asking for the state of a fresh one is costly."""

    def __init__(self):
        self.position, self.asked = 0, 0

    def state_dict(self):
        self.asked += 1
        return {
            "_snapshot": {"_steps": self.position, "workers": [{"id": 0, "rng": (3, None, b"x")}]},
            "_iterator_finished": False,
        }

    def load_state_dict(self, state):
        self.position = state["_snapshot"]["_steps"]


def test_a_loader_without_tensors_is_not_asked_for_its_state():
    loader = Loader()
    loader.position = 7
    other = Loader()
    again({"loader": loader}, into={"loader": other})
    assert (other.position, other.asked) == (7, 0)


def test_the_root_may_be_an_object():
    model, other = net(), net()
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert again(model, into=other) is other
    same(other.state_dict(), model.state_dict())
    assert type(again(model)) is collections.OrderedDict
    assert again(model)._metadata == model.state_dict()._metadata


def test_a_module_goes_into_plain_dicts_and_back():
    model = net()
    into = {"m": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}
    again({"m": model}, into=into)
    other = net()
    again(into, into={"m": other})
    same(other.state_dict(), model.state_dict())


def test_names_shapes_and_dtypes_of_a_module_are_listed_before_anything_changes():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    other = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 2, bias=False), nn.Linear(1, 1)).to(torch.float64)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(InvalidInputError) as caught:
        again({"m": model}, into={"m": other})
    for line in (
        "m.0.weight: shape: expected (4, 2)",
        "m.1.weight: dtype: expected float64",
        "m.1.bias: missing in `into`",
        "m.2.bias: missing in the snapshot",
    ):
        assert line in str(caught.value)
    same(other.state_dict(), before)


def test_modules_that_change_their_names_are_not_checked():
    class Renames(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))
            self.register_load_state_dict_pre_hook(self.rename)

        @staticmethod
        def rename(module, state, prefix, *_):
            if prefix + "old" in state:
                state[prefix + "w"] = state.pop(prefix + "old")

    model = Renames()
    again({"m": {"old": torch.ones(2)}}, into={"m": model})
    assert torch.equal(model.w.detach(), torch.ones(2))
    with pytest.raises(InvalidInputError, match=r"m: Renames.load_state_dict failed: [^/]*Unexpected") as caught:
        again({"m": {"w": torch.ones(2), "other": torch.ones(2)}}, into={"m": model})
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_tied_modules():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    model, other = Tied(), Tied()
    saved = Saved({"m": model})
    assert len(saved.parts[1].specs) == 3
    saved.restore(into={"m": other})
    same(other.state_dict(), model.state_dict())
    assert other.a.weight is other.b.weight
    untied = {key: value.clone() for key, value in model.state_dict().items()}
    again({"m": untied}, into={"m": other})
    same(dict(other.state_dict()), untied)
    untied["a.weight"] += 1
    with pytest.raises(InvalidInputError, match=r"m\.[ab]\.weight: shares memory"):
        again({"m": untied}, into={"m": other})


def test_an_optimizer_that_casts_is_an_error():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    saved = Saved({"optimizer": optimizer})
    with pytest.raises(InvalidInputError, match=r"optimizer\.state\.0\.exp_avg: dtype: expected float32, got bfloat16"):
        saved.restore(into={"optimizer": torch.optim.AdamW(net(torch.bfloat16).parameters())})


def test_part_of_an_object():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer)
    saved = Saved({"model": model, "optimizer": optimizer})
    other = net()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.25)
    before = copy.deepcopy(other.state_dict())
    saved.restore(into={"model": other, "optimizer": fresh}, keys=["model.0.*", "optimizer.state"])
    assert torch.equal(other[0].weight, model[0].weight)
    same(other.state_dict()["3.weight"], before["3.weight"])
    assert fresh.param_groups[0]["lr"] == 0.25
    same(fresh.state_dict()["state"], optimizer.state_dict()["state"])
    saved.restore(into={"optimizer": fresh}, keys="optimizer.param_groups.0.lr")
    assert fresh.param_groups[0]["lr"] == 0.5
    another = torch.optim.AdamW(net().parameters())
    saved.restore(into={"optimizer": another}, keys="optimizer.state.0.*")
    same(another.state_dict()["state"], {0: optimizer.state_dict()["state"][0]})
    with pytest.raises(InvalidInputError, match="missing in `into`"):
        saved.restore(into={"model": nn.Sequential(nn.Linear(4, 8))}, keys="model.3.*")
    two = torch.optim.SGD([{"params": [p]} for p in net().parameters()])
    with pytest.raises(InvalidInputError, match=r"optimizer\.param_groups: `keys` selects some of it"):
        saved.restore(into={"optimizer": two}, keys="optimizer.param_groups.0.lr")


class Metric:
    """Hands out its own arrays, some of which it makes anew when it loads."""

    def __init__(self, fill):
        self.state = {
            "array": np.full(3, fill),
            "strided": torch.full((2, 3), fill).t(),
            "note": fill,
            "long": bytes(5000),
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_objects_own_arrays_are_filled_in_place():
    saved, other = Metric(1.0), Metric(2.0)
    held = dict(other.state)
    again({"m": saved}, into={"m": other})
    same(other.state, saved.state)
    assert other.state["array"] is held["array"]
    assert other.state["strided"] is held["strided"]
    other.state["array"] = np.zeros(4)
    with pytest.raises(InvalidInputError, match=r"m\.array: shape"):
        again({"m": saved}, into={"m": other})


# --- random numbers


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


# --- memory


def test_as_bytes_is_a_view_where_it_can_be():
    tensor = torch.zeros(4)
    as_bytes(tensor)[:] = 255
    assert tensor.isnan().all()
    strided = torch.zeros(4, 4).t()
    as_bytes(strided)[:] = 255
    assert not strided.any()
    assert as_bytes(b"ab").tolist() == [97, 98]


def test_target_memory_is_that_of_into_where_it_can_be():
    into = {"a": torch.zeros(3), "b": torch.zeros(2, 2).t()}
    target = Saved({"a": torch.ones(3), "b": torch.ones(2, 2)}).target(into=into)
    assert target.buffer(0, 0).ctypes.data == into["a"].data_ptr()
    assert target.buffer(0, 1).ctypes.data != into["b"].data_ptr()
    assert target.buffer(0, 1) is target.buffer(0, 1)
