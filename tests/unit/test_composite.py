"""Composite tensors, as torchao's optimizers have them in their states, are saved by the tensors in them.

`Coded` is written like torchao's classes: what a save or restore does with the real ones is what it does with this one.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from kit import rank_saves
from kit.rank_saves import as_rank, sharded
from kit.repositories import created, opened, same
from kit.states import again, through_torch
from snapstore import InvalidInputError, PerRank, Repository, SnapshotManager, UnsupportedLeafError
from snapstore.dcp import SnapstoreReader, SnapstoreWriter
from snapstore.errors import FormatError
from snapstore.restore.pipeline import read_into
from snapstore.restore.sources import AsRank
from snapstore.state.fill.plan import RestorePlan
from snapstore.state.values import composite
from snapstore.state.values.composite import require_classes
from snapstore.state.values.sharded import dtensor_like
from snapstore.state.values.tensors import StoredPart
from snapstore.state.walk.flatten import flatten, flatten_and_learn
from snapstore.state.walk.learner import DifferentStructureError

VALUES = torch.arange(600.0).reshape(100, 6)


class Coded(torch.Tensor):
    """A tensor of codes with a scale for each block of 50; it looks like a tensor of `dtype`."""

    inner = ("codes", "scale")

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, context: Any = (), dtype: Any = torch.float32) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=dtype)

    def __init__(self, codes: Any, scale: Any, context: Any = (), dtype: Any = torch.float32) -> None:
        self.codes, self.scale, self.context = codes, scale, context

    @classmethod
    def of(cls, values: torch.Tensor, context: Any = (True, None)) -> Any:
        scale = values.reshape(-1, 50).abs().amax(1) / 127
        codes = (values.reshape(-1, 50) / scale.clamp(1e-9)[:, None]).round().to(torch.int8).view(values.shape)
        return cls(codes, scale, context)

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return [*self.inner], [self.context, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(*(inner[name] for name in cls.inner), *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.view.default:  # as DTensor.from_local calls it
            return cls(args[0].codes.view(args[1]), args[0].scale, args[0].context, args[0].dtype)
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return cls(*(func(getattr(args[0], name)) for name in cls.inner), args[0].context, args[0].dtype)
        args, kwargs = pytree.tree_map_only(Coded, lambda one: one.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def dequantize(self) -> torch.Tensor:
        return (self.codes.view(-1, 50) * self.scale[:, None]).view(self.codes.shape)


class Other(Coded):
    """The same with another name."""


class Shifted(Coded):
    """The same with a zero point."""

    inner = ("codes", "scale", "zero")

    def __init__(self, codes: Any, scale: Any, context: Any = (), dtype: Any = torch.float32) -> None:
        super().__init__(codes, scale, context, dtype)
        self.zero = torch.zeros(())


class Adam(torch.optim.Optimizer):
    """An optimizer whose moments are coded."""

    def __init__(self, params: Any, kind: Any = Coded) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kind = kind

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                before = state["moment"].dequantize() if state else torch.zeros_like(parameter)
                moment = before * 0.9 + parameter.detach()
                state["step"] = state.get("step", torch.zeros(())) + 1
                state["moment"] = self.kind.of(moment)
                parameter.data -= group["lr"] * moment


def trained(steps: int, kind: Any = Coded) -> dict[str, Any]:
    """Return a module and its optimizer after some steps."""
    model = torch.nn.Linear(50, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 200).view(4, 50))
    optimizer = Adam(model.parameters(), kind)
    for _ in range(steps):
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def alike(one: Any, other: Any) -> None:
    """Check that two values are equal to the bit, and composite tensors by all that they have."""
    if isinstance(one, Coded):
        assert type(one) is type(other)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        same(one.context, other.context)
        for name in one.inner:
            same(getattr(one, name), getattr(other, name))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            alike(one[key], other[key])
    else:
        same(one, other)


@pytest.fixture
def repository() -> Iterator[Repository]:
    with opened(created()) as found:
        yield found


def test_a_composite_tensor_is_saved_by_its_tensors_and_made_of_them(repository):
    value = Coded.of(VALUES)
    repository.save({"m": {"w": value, "b": VALUES}}, run="a", step=0)
    plain = repository.restore("a@0")["m"]["w"]
    about = {"__context__": [(True, None), torch.float32], "__shape__": torch.Size((100, 6))}
    same(plain, {"codes": value.codes, "scale": value.scale, **about})
    alike(repository.restore("a@0", types=[Coded])["m"]["w"], value)


def test_a_class_that_torch_may_load_need_not_be_passed(repository):
    repository.save({"w": Coded.of(VALUES), "o": Other.of(VALUES)}, run="a", step=0)
    with torch.serialization.safe_globals([Coded]):
        found = repository.restore("a@0")
    alike(found["w"], Coded.of(VALUES))
    assert type(found["o"]) is dict


def test_a_composite_tensor_of_the_target_is_filled_in_place(repository):
    repository.save({"w": Coded.of(VALUES), "many": [Coded.of(VALUES * 2)]}, run="a", step=0)
    target = {"w": Coded.of(VALUES * 0), "many": [Coded.of(VALUES * 0)]}
    whole, codes, scale = target["w"], target["w"].codes, target["w"].scale
    repository.restore_into("a@0", target)
    assert target["w"] is whole
    assert (whole.codes is codes, whole.scale is scale) == (True, True)
    alike(target["w"], Coded.of(VALUES))
    alike(target["many"][0], Coded.of(VALUES * 2))


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "with a state"])
def test_an_optimizer_goes_on_with_the_same_bits(repository, steps):
    state, target = trained(3), trained(steps)
    repository.save(state, run="a", step=0)
    with torch.serialization.safe_globals([Coded] if not steps else []):
        repository.restore_into("a@0", target)
    for _ in range(3):
        alike(target["optimizer"].state_dict(), state["optimizer"].state_dict())
        state["optimizer"].step()
        target["optimizer"].step()
    same(target["model"].weight.detach(), state["model"].weight.detach())


def test_a_fresh_optimizer_needs_the_class(repository):
    state, target = trained(3), trained(0)
    repository.save(state, run="a", step=0)
    with pytest.raises(InvalidInputError, match=r"optimizer.*\.moment: type: .*Coded is not known here: import"):
        repository.restore_into("a@0", target)
    assert not target["optimizer"].state
    same(target["model"].weight.detach(), trained(0)["model"].weight.detach())
    repository.restore_into("a@0", target, keys="model")
    repository.restore_into("a@0", target, types=[Coded])
    alike(target["optimizer"].state_dict(), state["optimizer"].state_dict())


@pytest.mark.parametrize("in_object", [False, True], ids=["plain", "in an optimizer"])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda values: Other.of(values), r"type: expected .*Other as in the target, got .*Coded"),
        (lambda values: values.clone(), "type: expected "),
        (lambda values: Coded.of(torch.zeros(50, 6)), r"shape: expected \(50, 6\) as in the target, got"),
        (lambda values: Coded.of(values, (False, None)), "context of Coded: expected"),
        (lambda values: Coded.of(values, (1, None)), "context of Coded: expected"),
    ],
    ids=["class", "tensor", "shape", "context", "type in the context"],
)
def test_another_composite_tensor_is_a_difference(repository, make, text, in_object):
    repository.save({"a": VALUES, "w": wrapped(Coded.of(VALUES), in_object=in_object)}, run="a", step=0)
    value = make(torch.zeros_like(VALUES))
    target = {"a": torch.zeros_like(VALUES), "w": wrapped(value, in_object=in_object)}
    for types in ([], [Coded], [Other]):
        with pytest.raises(InvalidInputError, match=text):
            repository.restore_into("a@0", target, types=types)
    assert not target["a"].any()
    assert not (value.codes if isinstance(value, Coded) else value).any()


def test_other_tensors_in_it_are_a_difference(repository):
    repository.save({"w": Shifted.of(VALUES)}, run="a", step=0)
    named = type("Shifted", (Coded,), {"__qualname__": "Shifted"})
    with pytest.raises(InvalidInputError, match=r"of tensors \['codes', 'scale'\] as in the target, got \['codes', 's"):
        repository.restore_into("a@0", {"w": named.of(VALUES)})


class Holder:
    """An object with one value as its state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def wrapped(value: Any, *, in_object: bool) -> Any:
    return Holder(value) if in_object else value


def test_a_plain_tensor_does_not_fill_a_composite_one(repository):
    repository.save({"w": VALUES}, run="a", step=0)
    target = Coded.of(VALUES * 0)
    with pytest.raises(InvalidInputError, match=r"w: type: expected Coded as in the target, got tensor float32"):
        repository.restore_into("a@0", {"w": target})
    assert not target.codes.any()


def test_some_tensors_of_it_are_restored_by_keys(repository):
    repository.save({"w": Coded.of(VALUES)}, run="a", step=0)
    assert repository.restore("a@0", keys="w.scale", types=[Coded])["w"].keys() == {"scale"}
    target = {"w": Coded.of(VALUES * 0)}
    repository.restore_into("a@0", target, keys="w.scale")
    same(target["w"].scale, Coded.of(VALUES).scale)
    assert not target["w"].codes.any()
    holder = Holder(Coded.of(VALUES * 0))
    repository.save({"w": Holder(Coded.of(VALUES))}, run="b", step=0)
    with pytest.raises(InvalidInputError, match="select all of it"):
        repository.restore_into("b@0", {"w": holder}, keys="w.value.scale")


class Mode(enum.Enum):
    FAST = 1


class Other2(enum.Enum):
    """Has the values of `Mode`."""

    FAST = 1


@dataclasses.dataclass(frozen=True)
class PerRow:
    dim: int = -1


@dataclasses.dataclass(frozen=True)
class PerColumn:
    """Has the plain form of `PerRow`."""

    dim: int = -1


@dataclasses.dataclass
class Options:
    """As torchao keeps it of weights for dynamic quantization."""

    granularity: Any
    mode: Mode = Mode.FAST
    many: Any = ()


#: The plain list is large enough for a column.
OPTIONS = {"options": Options(PerRow(), many=(1,) * 300), "kernel": Mode.FAST, "dtype": torch.int8, "block": [1, 50]}
CLASSES = [Coded, Mode, PerRow, Options]


@pytest.mark.parametrize("is_safe", [False, True])
def test_a_context_may_have_enums_and_dataclasses(repository, is_safe):
    value = Coded.of(VALUES, OPTIONS)
    repository.save({"m": {"w": value}}, run="a", step=0)
    with torch.serialization.safe_globals(CLASSES if is_safe else []):
        found = repository.restore("a@0", types=[] if is_safe else CLASSES)["m"]["w"]
        assert type(found) is Coded
        assert (found.context, type(found.context["kernel"])) == (OPTIONS, Mode)
        same([found.codes, found.scale], [value.codes, value.scale])
        assert found.context == through_torch(value).context


def test_classes_beside_an_allowed_one_are_known(repository):
    """torchao allows NF4Tensor, and not the dataclass in its context."""
    repository.save({"m": {"w": Coded.of(VALUES, OPTIONS)}}, run="a", step=0)
    with torch.serialization.safe_globals([Coded]):
        assert repository.restore("a@0")["m"]["w"].context == OPTIONS


def test_without_a_class_of_its_context_it_comes_back_in_its_plain_form(repository):
    """Else it would have a plain value in the place of a member of an enum."""
    repository.save({"m": {"w": Coded.of(VALUES, OPTIONS)}}, run="a", step=0)
    found = repository.restore("a@0", types=[Coded, PerRow, Options])["m"]["w"]
    assert type(found) is dict
    assert found["__context__"][0]["kernel"] == 1
    with pytest.raises(InvalidInputError, match=r"m\.w: is stored as the tensors"):
        require_classes(repository.restore("a@0", types=[Coded, PerRow, Options]))
    model = Keeper(None)
    with pytest.raises(InvalidInputError, match=r"m\.w: type: .*Mode is not known here: import"):
        repository.restore_into("a@0", {"m": model}, types=[Coded, PerRow, Options])
    repository.restore_into("a@0", {"m": model}, types=CLASSES)
    assert model.w.context == OPTIONS


class Keeper:
    """An object that has a composite tensor in its state."""

    def __init__(self, w: Any) -> None:
        self.w = w

    def state_dict(self) -> dict[str, Any]:
        return {} if self.w is None else {"w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = state["w"]


@pytest.mark.parametrize("kind", [dict, Keeper])
def test_the_target_shows_the_classes_of_its_context(repository, kind):
    value = Coded.of(VALUES, OPTIONS)
    repository.save({"m": kind(w=value)}, run="a", step=0)
    target = {"m": kind(w=Coded.of(VALUES * 0, OPTIONS))}
    repository.restore_into("a@0", target)
    found = target["m"].w if kind is Keeper else target["m"]["w"]
    assert found.context == OPTIONS
    same([found.codes, found.scale], [value.codes, value.scale])


@pytest.mark.parametrize("kind", [dict, Keeper])
@pytest.mark.parametrize(
    "change", [{"kernel": Other2.FAST}, {"options": Options(PerColumn(), many=(1,) * 300)}, {"kernel": 1}]
)
def test_a_context_of_another_class_does_not_fit(repository, kind, change):
    repository.save({"m": kind(w=Coded.of(VALUES, OPTIONS))}, run="a", step=0)
    with pytest.raises(InvalidInputError, match=r"m\.w: context of Coded: expected"):
        repository.restore_into("a@0", {"m": kind(w=Coded.of(VALUES * 0, {**OPTIONS, **change}))})


def test_a_context_with_classes_is_never_taken_for_a_known_one():
    state = {"m": {"w": Coded.of(VALUES, OPTIONS), "b": VALUES}}
    assert flatten_and_learn(state)[1] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Coded.of(VALUES, {1: object()}), "no stored form"),
        (Coded.of(VALUES, VALUES), "only plain values"),
        (Coded.of(VALUES).requires_grad_(), "requires grad"),
        (torch.nn.Parameter(Coded.of(VALUES)), "requires grad"),
    ],
    ids=["object", "tensor", "requires grad", "parameter"],
)
def test_what_would_not_come_back_is_refused(value, text):
    with pytest.raises(UnsupportedLeafError, match=rf"w: .*{text}"):
        flatten({"w": value})


def test_an_iterator_of_tensors_takes_none(repository):
    with pytest.raises(UnsupportedLeafError, match=r"w: tensor subclass .*Coded has no stored form: save it in"):
        repository.save(iter([("w", Coded.of(VALUES))]), run="a", step=0)


def test_tied_tensors_and_composite_tensors_in_others_come_back():
    scale = Coded.of(VALUES).scale
    one, other = (Coded(Coded.of(values).codes, scale) for values in (VALUES, -VALUES))
    nested = Coded(Coded.of(VALUES), scale)
    found = again({"one": one, "other": other, "nested": nested}, decoded=decoded_with(Coded))
    assert found["one"].scale.data_ptr() == found["other"].scale.data_ptr() == found["nested"].scale.data_ptr()
    alike(found["nested"].codes, nested.codes)


def decoded_with(*classes: type) -> Any:
    from snapstore.state.tree.decode import Decoded
    from snapstore.state.values.classes import Types

    return Decoded(types=Types(classes))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9)
    | st.sampled_from([torch.float32, torch.Size((2, 3)), torch.device("cpu"), 1j]),
    lambda some: (
        st.lists(some, max_size=3) | st.tuples(some, some) | st.dictionaries(st.text(max_size=3), some, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


@given(PLAIN, st.sampled_from([(0, 50), (50,), (10, 5), (2, 5, 10)]))
def test_any_plain_context_comes_back(context, shape):
    value = Coded.of(torch.ones(shape), context)
    alike(again({"w": value}, decoded=decoded_with(Coded))["w"], value)
    target = {"w": Coded.of(torch.zeros(shape), context)}
    alike(again({"w": value}, into=target)["w"], value)
    _, learnt = flatten_and_learn({"w": value, "b": VALUES})
    if learnt is not None and "nan" not in repr(context):
        learnt[0].match({"w": Coded.of(torch.ones(shape), context), "b": VALUES})


# --- a state that is known ---


def known() -> tuple[dict[str, Any], Any]:
    state = {"m": {"w": Coded.of(VALUES), "v": [Coded.of(-VALUES)], "b": VALUES.clone()}}
    _, learnt = flatten_and_learn(state)
    assert learnt is not None
    return state, learnt[0]


def test_a_known_state_with_composite_tensors_is_recognised():
    """Else each save walks the whole state while training waits."""
    state, structure = known()
    parts = flatten(state)
    for _ in range(2):
        match = structure.match(state)
        match.confirm()
        assert match.trees == {part.name: part.tree for part in parts}
        codes = [structure.specs[row].path for row in structure.rows].index(("m", "w", "codes"))
        assert match.tensors[codes] is state["m"]["w"].codes
        state["m"]["w"] = Coded.of(VALUES + 1)  # as an optimizer makes new ones


@pytest.mark.parametrize(
    "change",
    [
        lambda state: setattr(state["m"]["w"], "context", (False, None)),
        lambda state: setattr(state["m"]["w"], "context", (1, None)),
        lambda state: setattr(state["m"]["w"], "scale", torch.zeros(3)),
        lambda state: setattr(state["m"]["w"], "inner", ("codes",)),
        lambda state: state["m"].update(w=Other.of(VALUES)),
        lambda state: state["m"].update(w=Coded.of(VALUES[:50])),
        lambda state: state["m"].update(w=VALUES),
        lambda state: state["m"]["w"].requires_grad_(),
        lambda state: state["m"]["v"].append(Coded.of(VALUES)),
    ],
)
def test_a_changed_composite_tensor_is_not_taken_for_the_known_one(change):
    state, structure = known()
    change(state)
    with pytest.raises(DifferentStructureError):
        structure.match(state)


def test_a_context_that_changes_in_place_is_not_taken_for_the_known_one():
    context = [1]
    state = {"m": {"w": Coded.of(VALUES, context)}}
    _, (structure, _) = flatten_and_learn(state)
    context[0] = 2
    with pytest.raises(DifferentStructureError):
        structure.match(state)


def test_the_next_save_stores_the_tensors_that_changed(repository):
    state = {"m": {"w": Coded.of(VALUES), "b": VALUES}}
    for step in range(4):
        state["m"]["w"].codes += 1
        if step == 2:
            state["m"]["w"] = Coded.of(VALUES * step)
        repository.save(state, run="a", step=step)
        alike(repository.restore(f"a@{step}", types=[Coded])["m"]["w"], state["m"]["w"])


def test_ranks_store_them_as_one_process_does(repository):
    state = lambda: {"m": {"w": Coded.of(VALUES), "b": VALUES.clone()}}  # noqa: E731
    snapshot, _ = rank_saves.save(repository, [state] * 2, 0)
    alike(repository.restore(snapshot.ref, types=[Coded])["m"]["w"], Coded.of(VALUES))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_fills_composite_tensors_in_place(repository):
    state = {"o": {0: {"w": Coded.of(VALUES), "n": Coded(Coded.of(VALUES), Coded.of(VALUES).scale)}, "b": VALUES}}
    writer = SnapstoreWriter(repository, run="a")
    dcp.save(state, storage_writer=writer, checkpoint_id=0, no_dist=True)
    writer.close()
    load = partial(dcp.load, storage_reader=SnapstoreReader(repository, run="a"), checkpoint_id=0, no_dist=True)
    target = {"o": {0: {"w": Coded.of(VALUES * 0), "n": Coded(Coded.of(VALUES * 0), torch.zeros(12))}}}
    codes = target["o"][0]["w"].codes
    load(target)
    assert target["o"][0]["w"].codes is codes
    alike(target["o"], {0: state["o"][0]})
    for value in (Other.of(VALUES), Coded.of(VALUES[:50]), Coded(VALUES * 0, torch.zeros(12), (True, None))):
        with pytest.raises(dcp.CheckpointException, match=r"o\.0\.w.*: (type|shape|dtype|context)"):
            load({"o": {0: {"w": value}}})
    with pytest.raises(
        dcp.CheckpointException, match=r"o\.0\.w: type: expected .*Tensor as in the target, got .*Coded"
    ):
        load({"o": {0: {"w": VALUES.clone()}}})


def test_a_restored_state_may_have_to_have_its_classes():
    state = {"o": [{"w": VALUES}, Coded.of(VALUES)]}
    assert require_classes(state) is state
    with pytest.raises(InvalidInputError, match=r"o\.1: is stored as the tensors"):
        require_classes(again(state))


# --- shards ---


def shard(values: torch.Tensor, count: int) -> DTensor:
    """Return a DTensor of `count` ranks whose local tensor is composite, as torchao makes it of a sharded parameter."""
    plain = sharded(values, [count], [Shard(0)])
    return dtensor_like(plain, Coded.of(plain.to_local()))


def of_ranks(values: torch.Tensor, count: int) -> dict[str, Any]:
    return {"m": {"w": shard(values, count), "b": sharded(values, [count], [Shard(0)])}}


def test_each_rank_stores_its_composite_shards_and_fills_them(repository):
    snapshot, _ = rank_saves.save(repository, [lambda: of_ranks(VALUES, 2)] * 2, 0)
    for rank in range(2):
        with as_rank(rank, 2):
            into = of_ranks(VALUES * 0, 2)
            local = into["m"]["w"]._local_tensor
            read_into(repository.context, snapshot.ref, into, as_rank=AsRank("same", rank, 2))
            assert into["m"]["w"]._local_tensor is local
            alike(local, Coded.of(VALUES[50 * rank : 50 * rank + 50]))
            with pytest.raises(InvalidInputError, match="2 ranks saved, and 4 restore"):
                read_into(repository.context, snapshot.ref, into, as_rank=AsRank("same", rank, 4))
            with pytest.raises(InvalidInputError, match=r"shape: expected \(100, 6\) as in the target, got .*50, 6"):
                read_into(repository.context, snapshot.ref, {"m": {"w": Coded.of(VALUES), "b": into["m"]["b"]}},
                          as_rank=AsRank("same", rank, 2))  # fmt: skip


def permuted(values: torch.Tensor, placements: list[Any], kind: Any = dict) -> Any:
    """Return a state of four ranks, or an optimizer, with a composite shard on a mesh of 2 x 2."""
    plain = sharded(values, [2, 2], placements)
    value = dtensor_like(plain, Coded.of(plain.to_local()))
    if kind is dict:
        return {"w": value}
    optimizer = torch.optim.SGD([torch.nn.Parameter(plain)])
    if kind is not None:
        (parameter,) = optimizer.param_groups[0]["params"]
        optimizer.state[parameter] = {"moment": value}
    return {"optimizer": optimizer}


@pytest.mark.parametrize("kind", [dict, torch.optim.SGD, None], ids=["in place", "optimizer", "fresh optimizer"])
def test_ranks_that_hold_other_rows_than_at_the_save_are_refused(repository, kind):
    """Else a job whose mesh has its dimensions in another order would train with the moments of other rows."""
    saved, other = [Shard(0), Replicate()], [Replicate(), Shard(0)]
    snapshot, _ = rank_saves.save(repository, [lambda: permuted(VALUES, saved, kind or torch.optim.SGD)] * 4, 0)
    for rank in range(4):
        with as_rank(rank, 4):
            load = partial(read_into, repository.context, snapshot.ref, as_rank=AsRank("same", rank, 4), types=[Coded])
            load(permuted(VALUES * 0, saved, kind))
            into = permuted(VALUES * 0, other, kind)
            if rank in (0, 3):
                load(into)
                continue
            with pytest.raises(InvalidInputError, match=r"shard: expected the boxes .* of \(100, 6\) as in the target"):
                load(into)
            if kind is dict:
                assert not into["w"]._local_tensor.codes.any()


def test_a_known_shard_that_is_cut_in_another_way_is_not_taken_for_it():
    with as_rank(1, 4):
        _, (structure, _) = flatten_and_learn(permuted(VALUES, [Shard(0), Replicate()]), of_rank=True)
        structure.match(permuted(VALUES, [Shard(0), Replicate()]))
        with pytest.raises(DifferentStructureError):
            structure.match(permuted(VALUES, [Replicate(), Shard(0)]))


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "with a state"])
def test_an_optimizer_of_sharded_parameters_goes_on(repository, steps):
    def state(steps: int, count: int = 2) -> dict[str, Any]:
        parameter = torch.nn.Parameter(sharded(VALUES, [count], [Shard(0)]))
        optimizer = torch.optim.SGD([parameter])
        for step in range(steps):
            optimizer.state[parameter] = {"moment": shard(VALUES * (step + 1), count), "b": parameter.detach() * step}
        return {"optimizer": optimizer}

    snapshot, _ = rank_saves.save(repository, [lambda: state(3)] * 2, 0)
    for rank in range(2):
        with as_rank(rank, 2):
            into, load = state(steps), partial(read_into, repository.context, snapshot.ref)
            load(into, as_rank=AsRank("same", rank, 2), types=[] if steps else [Coded])
            (found,) = into["optimizer"].state.values()
            assert isinstance(found["moment"], DTensor)
            assert isinstance(found["b"], DTensor)
            alike(found["moment"]._local_tensor, Coded.of(VALUES[50 * rank : 50 * rank + 50] * 3))
            if not steps:
                with pytest.raises(InvalidInputError, match="Coded is not known here"):
                    load(state(0), as_rank=AsRank("same", rank, 2))
    with as_rank(0, 1), pytest.raises(InvalidInputError, match=r"moment: type: expected .*DTensor as in"):
        load(state(0, 1), as_rank=AsRank(0, 0, 1), types=[Coded])


def test_a_composite_shard_needs_a_save_of_ranks(repository):
    with as_rank(0, 1), pytest.raises(UnsupportedLeafError, match="w: DTensor has no stored form"):
        flatten({"w": shard(VALUES, 1)})
    with as_rank(0, 1), pytest.raises(UnsupportedLeafError, match="is sharded over ranks"):
        flatten({"w": PerRank(shard(VALUES, 1))}, of_rank=True)


def test_a_known_state_with_composite_shards_is_recognised():
    with as_rank(1, 2):
        state = of_ranks(VALUES, 2)
        parts, learnt = flatten_and_learn(state, of_rank=True)
        assert learnt is not None
        match = learnt[0].match(state)
        match.confirm()
        assert match.trees == {part.key: part.tree for part in parts}
        assert any(tensor is state["m"]["w"]._local_tensor.codes for tensor in match.tensors)
        state["m"]["w"]._local_tensor.context = None
        with pytest.raises(DifferentStructureError):
            learnt[0].match(state)


# --- hostile snapshots ---


def restored(tree: Any, *, into: Any = None, kind: type = Coded) -> Any:
    """Return what a restore makes of a tree with one tensor of three floats."""
    (part,) = flatten([torch.ones(3)])
    plan = RestorePlan([StoredPart("", tree, part.specs)], decoded=decoded_with(kind), into=into)
    for want in plan.wants:
        plan.buffers.buffer(want)
        plan.buffers.complete(want)
    return plan.finish()


def node(keys: list[Any], nodes: list[Any], name: str = "Coded") -> Any:
    return ["object", "dataclass", Coded.__module__, name, ["dict", keys, nodes]]


TENSOR, SIZE, ABOUT = ["tensor", 0, False], ["size", [3]], ["list", [True, ["dtype", "float32"]]]
NAMES = ["codes", "scale", "__context__", "__shape__"]


@pytest.mark.parametrize(
    "tree",
    [
        node(["codes", "__context__", "__shape__"], [TENSOR, ABOUT, SIZE]),
        node(NAMES, [TENSOR, 1, ABOUT, SIZE]),
        node(NAMES, [TENSOR, TENSOR, None, SIZE]),
        node(NAMES, [TENSOR, TENSOR, ABOUT, ["size", [1 << 40]]]),
        node(NAMES, [TENSOR, TENSOR, ABOUT, ["size", [-1]]]),
        node(NAMES, [TENSOR, TENSOR, ABOUT, "abc"]),
        node(NAMES, [TENSOR, TENSOR, ["list", [1, 2, 3, 4]], SIZE]),
        node(NAMES[:3], [TENSOR, TENSOR, ABOUT]),
        node([], []),
        ["object", "subclass", Coded.__module__, "Coded", 5],
    ],
)
def test_a_class_refuses_what_does_not_fit_it(tree):
    with pytest.raises(InvalidInputError, match=r"cannot make a .*Coded of what is stored"):
        restored(tree)


def test_a_named_class_is_never_imported():
    tree = node(NAMES, [TENSOR, TENSOR, ABOUT, SIZE], name="system")
    tree[2] = "os"
    assert type(restored(tree)) is dict
    for module in (5, ["list", []], None):
        tree[2] = module
        with pytest.raises(FormatError):
            restored(tree)


@pytest.mark.parametrize("number", range(4))
def test_a_target_refuses_what_does_not_fit_it(number):
    value = Coded(torch.zeros(3), torch.zeros(3), True)
    nodes = [TENSOR, TENSOR, ABOUT, SIZE]
    nodes[number] = ["list", []]
    with pytest.raises(InvalidInputError, match="w"):
        restored(["dict", ["w"], [node(NAMES, nodes)]], into={"w": value}, kind=Other)
    assert not value.codes.any()


class Laid(Coded):
    """One that has the layout of its codes, as torchao's weights have."""

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, strides: Any = None, dtype: Any = torch.float32) -> Any:
        form = {"strides": codes.stride() if strides is None else strides, "device": codes.device, "dtype": dtype}
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, **form)

    def __init__(self, codes: Any, scale: Any, strides: Any = None, dtype: Any = torch.float32) -> None:
        self.codes, self.scale, self.context = codes, scale, ()

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], stride)


class Packed(Laid):
    """One of two codes in a byte: no tensor in it has its shape."""

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, strides: Any = None, dtype: Any = torch.float32) -> Any:
        rows, columns = codes.shape
        form = {"strides": strides or (2 * columns, 1), "device": codes.device, "dtype": dtype}
        return torch.Tensor._make_wrapper_subclass(cls, (rows, 2 * columns), **form)


@pytest.mark.parametrize("strides", [None, (12, 1), (1, 100)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("kind", [Laid, Packed])
def test_its_layout_is_what_torch_save_keeps(repository, kind, order, strides):
    """Whether it is that of a tensor in it, or one of its own; also in a state that is recognised, and in a target."""
    strides = (6, 1) if kind is Laid and strides == (12, 1) else strides
    codes = torch.empty_permuted((100, 6), order, dtype=torch.int8).copy_(torch.arange(600).reshape(100, 6) % 100)
    value = kind(codes, torch.ones(12), strides)
    expected = through_torch(value)
    with SnapshotManager(repository, run="laid") as manager:
        for step in (1, 2, 3):
            if step == 3:  # the structure that is known has other strides
                value = kind(codes, torch.ones(12), (1, 100) if value.stride()[0] != 1 else (value.shape[1], 1))
            manager.save(step, {"w": value}).result()
    for step in (1, 2, 3):
        found = repository.restore(f"laid@{step}", types=[kind])["w"]
        assert type(found) is type(expected) is kind
        assert found.stride() == (expected if step < 3 else value).stride()
        assert found.codes.stride() == codes.stride()
        assert torch.equal(found.codes, codes)
        target = {"w": kind(torch.zeros_like(codes), torch.zeros(12), value.stride())}
        repository.restore_into(f"laid@{step}", target)
        assert torch.equal(target["w"].codes, codes)


@pytest.mark.parametrize("shape", [(100, 6), ((100, 6), (1, 0)), (torch.Size((100, 6)), (1, 1)), (torch.Size((6,)), 0)])
def test_a_shape_that_is_none(shape):
    plain = {**composite.plain_of(Coded.of(VALUES)), composite.SHAPE: shape}
    with pytest.raises(TypeError):
        composite.make(Coded, plain)
