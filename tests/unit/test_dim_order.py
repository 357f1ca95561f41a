"""Dimension orders: the strides of every array without gaps come back, and of one with gaps their order."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapstore.state.values.arrays import from_bytes, in_memory_order, new_array
from snapstore.state.values.tensors import TensorSpec, dim_order_of, inverse, is_dim_order

shapes = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@st.composite
def permuted(draw):
    """A shape, and an order of its dimensions in memory."""
    shape = draw(shapes)
    return shape, tuple(draw(st.permutations(range(len(shape)))))


@given(permuted(), st.sampled_from(["tensor", "array"]))
def test_strides_come_back(form, kind):
    shape, order = form
    value = torch.empty_permuted(shape, order, dtype=torch.int16)
    value[...] = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)
    spec = TensorSpec(("x",), kind, "int16" if kind == "tensor" else "<i2", shape, False, None)
    source = value if kind == "tensor" else value.numpy()
    found = dim_order_of(source)
    home = np.arange(math.prod(shape), dtype="<i2").view(np.uint8)
    made = from_bytes(home, TensorSpec(*[getattr(spec, f) for f in spec.__struct_fields__[:-1]], found), None)
    assert found == () or is_dim_order(found, len(shape))
    assert (made == source).all()
    if kind == "tensor" and value.numel():
        assert made.stride() == value.stride()
        assert made.untyped_storage().nbytes() == value.nbytes, "no memory beside its elements"
        assert in_memory_order(made).is_contiguous()
    elif value.numel():
        assert all(a == b for a, b, size in zip(made.strides, source.strides, shape, strict=True) if size > 1)


@given(shapes, st.lists(st.integers(0, 9), min_size=5, max_size=5))
def test_any_strides_give_an_order_that_fits_or_none(shape, strides):
    strides = tuple(strides[: len(shape)])
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size > 1)
    view = torch.zeros(max(reach, 1)).as_strided(shape, strides)
    found = dim_order_of(view)
    assert found == () or is_dim_order(found, len(shape))
    if found:
        made = new_array(TensorSpec(("x",), "tensor", "float32", shape, False, None, found), None)
        large = [d for d, size in enumerate(shape) if size > 1]
        assert sorted(large, key=made.stride) == sorted(large, key=lambda d: strides[d]), "kernels walk the same way"
        assert torch.arange(reach).as_strided(shape, strides).unique().numel() == view.numel(), "it has no overlaps"
    dense = view.numel() and torch.ops.aten.is_non_overlapping_and_dense(view)
    if dense and not view.is_contiguous():
        assert found, "every dense layout but that of C has an order"


@pytest.mark.parametrize(
    ("value", "order"),
    [
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.zeros(2, 3, 1, 1).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.zeros(4, 6).t(), (1, 0)),
        (torch.zeros(4, 6)[:, ::2], ()),
        (torch.zeros(4, 6)[:, ::2].t(), (1, 0)),
        (torch.zeros(6, 4).t()[:2], (1, 0)),  # as the first singular vectors
        (torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last)[:, :3], (0, 2, 3, 1)),
        (torch.zeros(20).as_strided((4, 3), (1, 3)), ()),  # overlaps itself
        (torch.zeros(6, 1)[::1], ()),
        (torch.zeros(1).expand(4, 4), ()),
        (torch.zeros(3), ()),
        (torch.tensor(1.0), ()),
        (np.zeros((4, 6), order="F"), (1, 0)),
        (np.zeros((4, 6))[:, ::-1], ()),
        (np.zeros((6, 4, 2)).transpose(1, 0, 2), (1, 0, 2)),
        (b"abc", ()),
    ],
)
def test_orders(value, order):
    assert dim_order_of(value) == order


@given(st.permutations(range(5)))
def test_inverse(order):
    assert [inverse(tuple(order))[d] for d in order] == list(range(5))
