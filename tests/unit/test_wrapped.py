"""Wrapped parameters of FSDP2's extension for all-gathers, as torchao has them for float8, are saved by their values.

`Gathered` is written like torchao's class: what a save does with the real one is what it does with this one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from kit import rank_saves
from kit.rank_saves import as_rank, sharded
from kit.repositories import created, opened, same
from snapstore import InvalidInputError, Repository, UnsupportedLeafError
from snapstore.restore.pipeline import read_into
from snapstore.restore.sources import AsRank
from snapstore.state.walk.flatten import flatten, flatten_and_learn
from snapstore.state.walk.learner import DifferentStructureError

WHOLE = torch.arange(6000.0).reshape(1000, 6)


class Inner(torch.Tensor):
    """A tensor around another one, on which all operations are done.

    Attributes:
        inner: holds the values.
        scale: a second tensor, or None.
    """

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: Any = None, dtype: Any = None) -> Any:
        options = {"dtype": dtype or inner.dtype, "device": inner.device, "requires_grad": inner.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), **options)

    def __init__(self, inner: torch.Tensor, scale: Any = None, dtype: Any = None) -> None:
        self.inner, self.scale = inner, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"] if self.scale is None else ["inner", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Inner, lambda one: one.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        kept = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.view.default)
        return pytree.tree_map_only(torch.Tensor, cls, out) if func in kept else out


class Gathered(Inner):
    """The same, with FSDP2's extension."""

    def fsdp_pre_all_gather(self, *args: Any) -> Any:
        raise NotImplementedError

    def fsdp_post_all_gather(self, *args: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def repository() -> Any:
    with opened(created()) as found:
        yield found


@pytest.mark.parametrize("value", [Gathered(WHOLE.clone()), Gathered(Gathered(WHOLE.clone()))], ids=["one", "in two"])
def test_a_wrapped_tensor_is_saved_as_its_values_and_filled_in_place(repository, value):
    repository.save({"w": value, "b": torch.ones(3)}, run="a", step=0)
    assert same(repository.restore("a@0"), {"w": WHOLE, "b": torch.ones(3)})
    inner = torch.zeros_like(WHOLE)
    target = {"w": Gathered(inner), "b": torch.zeros(3)}
    whole = target["w"]
    assert repository.restore_into("a@0", target).step == 0
    assert target["w"] is whole
    assert torch.equal(inner, WHOLE)


class Average:
    """An object that takes the tensor of its state as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["w"]


@pytest.mark.parametrize("layout", ["C", "columns"])
def test_a_wrapped_tensor_of_an_object_is_filled_whatever_its_layout(repository, layout):
    repository.save({"o": Average(Gathered(WHOLE.t().contiguous().t()))}, run="a", step=0)
    inner = torch.zeros_like(WHOLE) if layout == "C" else torch.zeros(WHOLE.shape[::-1]).to(WHOLE.dtype).t()
    target = Average(Gathered(inner))
    whole = target.value
    repository.restore_into("a@0", {"o": target})
    assert target.value is whole
    assert torch.equal(inner, WHOLE)


def test_a_wrapped_parameter_needs_gradients_as_it_does(repository):
    value = torch.nn.Parameter(Gathered(WHOLE.clone()))
    assert type(value) is Gathered
    repository.save(iter([("w", value)]), run="a", step=0)
    repository.save({"w": value}, run="a", step=1)
    assert all(repository.restore(f"a@{step}")["w"].requires_grad for step in (0, 1))


def test_it_is_tied_to_its_values(repository):
    values = WHOLE.clone()
    repository.save({"w": Gathered(values), "v": values}, run="a", step=0)
    found = repository.restore("a@0")
    assert found["w"].data_ptr() == found["v"].data_ptr()


@pytest.mark.parametrize(
    "value",
    [
        Inner(WHOLE.clone()),
        Gathered(WHOLE.clone(), torch.ones(())),
        Gathered(WHOLE.clone(), dtype=torch.bfloat16),
    ],
    ids=["not for FSDP", "a scale beside the values", "another dtype"],
)
def test_no_other_wrapper_is_taken_for_its_values(repository, value):
    for state in ({"w": value}, iter([("w", value)])):
        with pytest.raises(UnsupportedLeafError, match=type(value).__qualname__):
            repository.save(state, run="a", step=0)
    repository.save({"w": WHOLE}, run="a", step=0)
    with pytest.raises(InvalidInputError, match=type(value).__qualname__):
        repository.restore_into("a@0", {"w": value})
    assert torch.equal(value.inner, WHOLE)


def wrapped(whole: torch.Tensor, count: int) -> DTensor:
    """Return a DTensor of `count` ranks whose local tensor is wrapped."""
    plain = sharded(whole, [count], [Shard(0)])
    return DTensor.from_local(
        Gathered(plain.to_local()), plain.device_mesh, plain.placements, run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_store_their_shards_and_fill_them_on_any_mesh(repository: Repository, count):
    state = lambda whole, ranks: {"m": {"w": wrapped(whole, ranks), "b": sharded(whole, [ranks], [Shard(0)])}}  # noqa: E731
    snapshot, _ = rank_saves.save(repository, [lambda: state(WHOLE, 2)] * 2, 0)
    for values in rank_saves.read(repository, snapshot).values():
        assert values.tobytes() == WHOLE.numpy().tobytes()
    for rank in range(count):
        with as_rank(rank, count):
            into = state(torch.zeros_like(WHOLE), count)
            local = into["m"]["w"]._local_tensor
            read_into(repository.context, snapshot.ref, into, as_rank=AsRank("drop", rank, count))
            assert into["m"]["w"]._local_tensor is local
            assert torch.equal(local.inner, WHOLE.chunk(count)[rank])


def test_a_known_state_with_wrapped_shards_is_recognised():
    """Else each save walks the whole state while training waits."""
    with as_rank(1, 2):
        state = {"m": {"w": wrapped(WHOLE, 2), "b": sharded(WHOLE, [2], [Shard(0)])}}
        parts, learnt = flatten_and_learn(state, of_rank=True)
        assert learnt is not None
        match = learnt[0].match(state)
        assert match.tensors[0].data_ptr() == state["m"]["w"]._local_tensor.inner.data_ptr()
        match.confirm()
        state["m"]["w"]._local_tensor.scale = torch.ones(())
        with pytest.raises(DifferentStructureError):
            learnt[0].match(state)
        with pytest.raises(UnsupportedLeafError, match="Gathered"):
            flatten(state, of_rank=True)
        assert [held.spec.path for part in parts for held in part.arrays] == [("m", "w"), ("m", "b")]
