"""flatten cuts a state into the right parts, finds tied arrays, and refuses what cannot be stored."""

import enum
import random
import re
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from kit.states import Saved, again, same
from snapstore.errors import InvalidInputError, UnsupportedLeafError
from snapstore.state.fill.fit import Fit
from snapstore.state.walk.flatten import flatten

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


class Mode(enum.Enum):
    TRAIN = "train"


@pytest.mark.parametrize(
    "keys", [(Mode.TRAIN, "train"), [i * (2**61 - 1) for i in range(300)]], ids=["alike", "crowded"]
)
def test_the_root_has_only_keys_that_a_restore_accepts(keys):
    state = dict.fromkeys(keys, 1) | {"model": {"w": torch.ones(1)}}
    for one in (state, {"below": state}):
        with pytest.raises(UnsupportedLeafError, match=r"dict has (keys or members that differ|more than 256 keys)"):
            flatten(one)


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
    assert saved.target().wants == [(0, 0, None)]
    restored = saved.restore()
    same(restored, state)
    assert restored["a"][0].data_ptr() == restored["b"]["w"].data_ptr() == restored["top"].data_ptr()
    assert torch.equal(saved.restore(keys="b")["b"]["w"], weight)
    into = {"a": [torch.zeros(3)], "b": {"w": torch.zeros(3)}, "top": torch.zeros(3)}
    saved.restore(into=into)
    same(into, state)
    assert into["a"][0].data_ptr() != into["top"].data_ptr()


@pytest.mark.parametrize("rename", [None, {"v": "x", "w": "y"}])
def test_a_tie_holds_if_the_first_of_its_places_is_not_selected(rename):
    weight = torch.randn(3)
    saved = Saved({"a": {"first": weight, "v": weight}, "b": {"w": weight}})
    v, w = ("x", "y") if rename else ("v", "w")
    restored = saved.restore(keys=Fit([f"a.{v}", f"b.{w}"], rename=rename))
    assert len(saved.buffers) == 1
    same(restored, {"a": {v: weight}, "b": {w: weight}})
    assert restored["a"][v].data_ptr() == restored["b"][w].data_ptr()
    same(saved.restore(keys=Fit(f"b.{w}", rename=rename)), {"b": {w: weight}})
    assert len(saved.buffers) == 1


def test_no_tie_where_values_differ_or_nothing_is_shared():
    value = torch.randn(2, dtype=torch.complex64)
    state = [value, value.conj(), value.view(torch.float32), torch.empty(0), torch.empty(0), value.t()[None]]
    assert len(flatten(state)[0].specs) == 6
    same(again(state), state)


def test_ties_of_several_views_at_one_address():
    flat = torch.randn(12)
    head, grid = flat[:4], flat.view(3, 4)
    state = {
        "a": [flat, head, grid, grid.t()],
        "b": [flat[:4], grid.view(3, 4), flat[:4], flat.numpy(), flat.numpy(), flat[:0]],
        "c": [flat.numpy(), flat.view(torch.int32), grid.clone().t(), flat[:0], flat],
    }
    ties = [[spec.tie for spec in part.specs] for part in flatten(state)[1:]]
    assert ties == [[None] * 4, [("a", 1), ("a", 2), None, None], [("b", 2), None, None, None, ("a", 0)]]
    same(again(state), state)


def test_temporary_tensors_of_state_dicts_are_not_tied_by_reused_memory():
    class Fresh:
        def state_dict(self):
            return {"t": torch.full((1000,), random.random())}

        def load_state_dict(self, state): ...

    assert [spec.tie for part in flatten({str(i): Fresh() for i in range(20)}) for spec in part.specs] == [None] * 20


# --- refusals


def test_unsupported_leaves_are_named_all_at_once():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated
        quantized = torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.quint4x2)
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)

    class Sub(torch.Tensor): ...

    bad = {
        "sparse": torch.ones(2, 2).to_mkldnn(),
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


@pytest.mark.parametrize(
    ("make", "can_be_saved"),
    [
        (lambda: np.array([1.5], np.longdouble), True),
        (lambda: np.array([1.5j], np.clongdouble), True),
        (lambda: np.array([(1, 2.5)], [("n", "i4"), ("x", "f4")]), True),
        (lambda: np.array([None, 1, "a"]), True),
        (lambda: np.array([object()]), False),  # then the advice after "or" holds
    ],
    ids=["longdouble", "clongdouble", "fields", "plain objects", "objects"],
)
def test_the_advice_for_an_array_without_a_stored_form_works(make, can_be_saved):
    array = make()
    with pytest.raises(UnsupportedLeafError) as caught:
        flatten({"x": array})
    advice = re.search(r"array(\.|\[)[^,]*", str(caught.value)).group()
    value = eval(advice, {"array": array, "numpy": np})
    if can_be_saved:
        assert again({"x": value})["x"] is not None
    else:
        assert "or convert it" in str(caught.value)


def test_the_advice_for_a_lazy_module_works():
    module = nn.LazyLinear(3)
    with pytest.raises(UnsupportedLeafError, match=r"call its module once, so that it has a shape and values"):
        flatten({"m": module})
    module(torch.ones(2, 4))
    assert torch.equal(again({"m": module})["m"]["weight"], module.weight)


def test_the_advice_for_a_sub_byte_dtype_works():
    for name in ("int4", "uint1", "uint7", "bits1x8", "bits4x2"):
        tensor = torch.tensor([1, 255, 7], dtype=torch.uint8).view(getattr(torch, name))
        with pytest.raises(UnsupportedLeafError) as caught:
            flatten({"t": tensor})
        save, load = re.search(r"pass its bytes, (.*); after a restore, (.*) is the tensor", str(caught.value)).groups()
        restored = again({"t": eval(save, {"tensor": tensor, "torch": torch})})["t"]
        loaded = eval(load, {"restored": restored, "torch": torch})
        assert (loaded.dtype, loaded.view(torch.uint8).tolist()) == (tensor.dtype, [1, 255, 7])
        with pytest.raises(InvalidInputError, match=r"t: type: .* pass its bytes, tensor.view\(torch.uint8\)"):
            again({"t": restored}, into={"t": tensor})
        filled = torch.zeros(3, dtype=torch.uint8).view(tensor.dtype)
        again({"t": restored}, into={"t": eval(save, {"tensor": filled, "torch": torch})})
        assert filled.view(torch.uint8).tolist() == [1, 255, 7]


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_advice_for_dtensors_works(mesh):
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.fsdp import fully_shard

    options = state_dict.StateDictOptions(full_state_dict=True)
    sharded, other, plain = fully_shard(nn.Linear(2, 3), mesh=mesh), nn.Linear(2, 3), nn.Linear(2, 3)
    with pytest.raises(UnsupportedLeafError) as caught:
        flatten({"m": sharded})
    advice = "DTensor has no stored form: save tensor.full_tensor() on one rank (for a model: "
    assert f"m.weight: {advice}torch.distributed.checkpoint.state_dict.get_model_state_dict with " in str(caught.value)
    saved = again({"m": state_dict.get_model_state_dict(sharded, options=options)})["m"]
    assert torch.equal(saved["weight"], sharded.weight.full_tensor())
    assert torch.equal(again([sharded.weight.to_local()])[0], sharded.weight.to_local())

    again({"m": plain}, into={"m": sharded})
    assert torch.equal(sharded.weight.full_tensor(), plain.weight)
    state_dict.set_model_state_dict(sharded, again({"m": other})["m"], options=options)
    assert torch.equal(sharded.weight.full_tensor(), other.weight)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    with pytest.raises(UnsupportedLeafError, match="nested"):
        flatten([torch.nested.nested_tensor([torch.ones(1)], layout=torch.strided)])


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


def test_memory_that_is_used_again_is_no_tie():
    """A tensor in reused memory is not tied to the tensor that was there before.

    Here a later `state_dict()` gives two tied tensors other memory, and returns a new tensor in their old memory.
    """
    memory = np.arange(2000, dtype=np.float32)
    w = torch.from_numpy(memory)
    v = w.detach()

    class Later:
        def state_dict(self):
            w.data = v.data = torch.full((2000,), 7.0)
            memory[:] = 1
            return {"own": torch.from_numpy(memory)}

        def load_state_dict(self, state): ...

    restored = again({"a": {"w": w, "v": v}, "later": Later()})
    assert torch.equal(restored["later"]["own"], torch.ones(2000))
    for name in ("w", "v"):
        assert torch.equal(restored["a"][name], torch.full((2000,), 7.0))
