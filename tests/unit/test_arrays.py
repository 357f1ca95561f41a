"""Arrays of every dtype, layout and kind come back bit by bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from kit.states import DTYPES, again, random_tensor, same
from snapstore.state.values.arrays import as_bytes, as_memory, copy_box
from snapstore.state.values.tensors import TORCH_DTYPES
from snapstore.state.walk.flatten import flatten


@pytest.mark.parametrize("name", DTYPES)
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


@pytest.mark.parametrize("name", DTYPES)
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


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_conjugates_of_complex32_keep_every_bit():
    """torch's own conjugates of complex32 change the payloads of signaling NaNs."""
    halves = np.random.default_rng(0).integers(0, 2**16, (6, 40, 2), np.uint16)
    halves[0, 0] = 0x7D01, 0xFC5E  # signaling NaNs
    flipped = halves ^ np.array([0, 0x8000], np.uint16)

    def tensor(values):
        return torch.from_numpy(values.copy()).view(torch.int32)[..., 0].view(torch.complex32)

    def halves_of(value):
        assert not value.is_conj()
        return value.reshape(-1).view(torch.int32).numpy().view(np.uint16).reshape(*value.shape, 2)

    value = tensor(halves)
    state = {"c": value.conj(), "turned": value.t().conj(), "one": value[0, 0].conj(), "plain": value}
    restored = again(state)
    for key, expected in (
        ("c", flipped),
        ("turned", flipped.swapaxes(0, 1)),
        ("one", flipped[0, 0]),
        ("plain", halves),
    ):
        np.testing.assert_array_equal(halves_of(restored[key]), expected)
    target = {key: torch.zeros_like(restored[key]) for key in ("turned", "one")}
    target |= {key: torch.zeros(6, 40, dtype=torch.complex32).conj() for key in ("c", "plain")}
    again(state, into=target)
    for key, expected in (("turned", flipped.swapaxes(0, 1)), ("one", flipped[0, 0])):
        np.testing.assert_array_equal(halves_of(target[key]), expected)
    np.testing.assert_array_equal(halves_of(target["c"].conj()), halves)
    np.testing.assert_array_equal(halves_of(target["plain"].conj()), flipped)


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


def test_as_bytes_is_a_view_where_it_can_be():
    tensor = torch.zeros(4)
    as_bytes(tensor)[:] = 255
    assert tensor.isnan().all()
    strided = torch.zeros(4, 4).t()
    as_bytes(strided)[:] = 255
    assert not strided.any()
    assert as_bytes(b"ab").tolist() == [97, 98]


def test_one_element_of_any_stride_is_contiguous():
    base = torch.zeros(2, 3)
    for view in (base[1, ::3], base[1:, ::3], base[:0, ::2]):
        assert view.is_contiguous()
        as_bytes(view)[:] = 255
        again([torch.ones(view.shape)], into=[view])
        same(again([view]), [torch.ones(view.shape)])
    assert base.tolist() == [[0, 0, 0], [1, 0, 0]]


def test_as_memory_without_a_device_is_as_bytes():
    tensor, array = torch.zeros(4), np.zeros(4)
    for predicate in (None, lambda device: False):
        assert as_memory(tensor, predicate).ctypes.data == tensor.data_ptr()
    for predicate in (None, lambda device: False, lambda device: True):
        assert as_memory(array, predicate).ctypes.data == array.ctypes.data
        assert as_memory(b"ab", predicate).tolist() == [97, 98]


def test_copy_box_takes_either_kind_of_memory():
    data = np.frombuffer(b"\x01\xff\x00", np.uint8)  # read-only, like the inline bytes of a manifest
    for memory in (np.zeros(3, np.uint8), torch.zeros(3, dtype=torch.uint8)):
        copy_box((memory, (3,), (0,)), (data, (3,), (0,)), (3,))
        assert memory.tolist() == [1, 255, 0]
        copy_box((memory[:0], (0,), (0,)), (data[:0], (0,), (0,)), (0,))
