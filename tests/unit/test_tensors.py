"""Specs of arrays give the right sizes, and a spec that no save could have written is refused."""

import pytest

from kit.states import spec
from snapstore.errors import FormatError
from snapstore.state.tree.decode import decode
from snapstore.state.values.tensors import StoredPart, numpy_dtype


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (-1,)},
        {"shape": (2**62, 2**62)},
        {"shape": (0, 2**62, 2**62)},
        {"shape": (1,) * 65},
        {"shape": (True,)},
        {"shape": ("1",)},
        {"dtype": "float7"},
        {"dtype": "qint8"},
        {"kind": "object"},
        {"kind": "array", "dtype": "|O"},
        {"kind": "array", "dtype": "float32"},
        {"kind": "bytes"},
        {"kind": "bytes", "dtype": "bytes"},
        {"kind": "array", "dtype": "|S0"},
    ],
)
def test_a_hostile_spec_is_a_format_error(changes):
    with pytest.raises(FormatError):
        decode([StoredPart("", None, [spec(**changes)])])


@pytest.mark.parametrize(
    ("kind", "dtype", "itemsize", "element"),
    [
        ("tensor", "float32", 4, 4),
        ("parameter", "bfloat16", 2, 2),
        ("tensor", "complex32", 4, 2),
        ("tensor", "complex64", 8, 4),
        ("tensor", "complex128", 16, 8),
        ("tensor", "bool", 1, 1),
        ("array", "<c8", 8, 4),
        ("array", ">c16", 16, 8),
        ("array", "<M8[ns]", 8, 8),
        ("array", "<U3", 12, 1),
        ("array", "|S5", 5, 1),
        ("array", "<f2", 2, 2),
        ("array", "|b1", 1, 1),
    ],
)
def test_sizes_of_a_spec(kind, dtype, itemsize, element):
    one = spec(kind=kind, dtype=dtype)
    assert (one.itemsize, one.element_size, one.nbytes) == (itemsize, element, 6 * itemsize)


@pytest.mark.parametrize("shape", [(True, 3), (2.0, 3), (2, -3), ([2], 3), (1,) * 65, ("2", 3)])
def test_a_shape_that_is_no_shape_is_refused_also_after_an_equal_one(shape):
    """Sizes are looked up by shape, and True equals 1."""
    for right in ((1, 3), (2, 3), (1,) * 64):
        assert spec(shape=right).nbytes > 0
    for _ in range(2):
        with pytest.raises(FormatError, match="impossible"):
            _ = spec(shape=shape).nbytes


def test_numpy_dtype_refuses_what_is_not_a_name():
    with pytest.raises(FormatError):
        numpy_dtype(3)
