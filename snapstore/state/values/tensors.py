"""Descriptions of stored arrays: kind, dtype, shape, ties, and their places in a decoded tree; no values.

In: names and numbers from a state or a manifest. Out: `TensorSpec`, its size in bytes, and a FormatError for a spec
that no save can have made. The tables list the dtypes that can be stored; they name torch's without importing it.

The dimension order of an array is the one part of its strides that a snapshot keeps: its dimensions from the largest
stride to the smallest, as torch's `dim_order` and `empty_permuted` have it; never C order, for which () stands. Kernels
that walk memory, such as fused optimizers, need parameters and moments of one layout.

Invariants: a spec that passed `check` has a known dtype and fewer than 2**63 bytes, so it may be used to size memory.
Specs and parts are immutable, and a `Slot` is never changed: any thread may use them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...errors import FormatError
from ...threads import imported
from .containers import INT_MAX, Path, shown

if TYPE_CHECKING:
    import torch

Node = Any  # None | bool | int | float | str | bytes | list[Any], as msgpack decodes it

#: The tags of nodes that stand for arrays; see tree.py.
ARRAY_TAGS = ("tensor", "parameter", "array", "bytes", "bytearray")
MAX_DIMENSIONS = 64  # of an array: the limit of NumPy and of torch's copy

#: torch dtypes that can be stored: bytes per element, bytes per number (for byte planes), may require grad.
TORCH_DTYPES: dict[str, tuple[int, int, bool]] = {
    **{"float64": (8, 8, True), "float32": (4, 4, True), "float16": (2, 2, True), "bfloat16": (2, 2, True)},
    **{"float8_e4m3fn": (1, 1, True), "float8_e4m3fnuz": (1, 1, True), "float8_e5m2": (1, 1, True)},
    **{"float8_e5m2fnuz": (1, 1, True), "float8_e8m0fnu": (1, 1, True), "float4_e2m1fn_x2": (1, 1, True)},
    **{"complex32": (4, 2, True), "complex64": (8, 4, True), "complex128": (16, 8, True)},
    **{"bool": (1, 1, False), "uint8": (1, 1, False), "int8": (1, 1, False), "bits8": (1, 1, False)},
    **{"uint16": (2, 2, False), "int16": (2, 2, False), "bits16": (2, 2, False)},
    **{"uint32": (4, 4, False), "int32": (4, 4, False), "uint64": (8, 8, False), "int64": (8, 8, False)},
}

_NUMPY_DTYPE = re.compile(
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|[<>]c(?:8|16)|[<>][mM]8(?:\[\w{1,24}\])?|\|S\d{1,10}|[<>]U\d{1,10}"
)


def numpy_dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Return `dtype.str` if the dtype can be stored and that name describes it completely, else None."""
    if dtype.char in "gG" or dtype.metadata is not None or dtype.fields is not None or dtype.subdtype is not None:
        return None  # longdouble differs between machines
    return dtype.str if _NUMPY_DTYPE.fullmatch(dtype.str) else None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a `dtype.str`.

    Raises:
        FormatError: snapstore does not store such a dtype.
    """
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise FormatError(f"NumPy dtype {name!r}: not one that can be stored")
    try:
        return np.dtype(name)
    except (TypeError, ValueError) as error:
        raise FormatError(f"NumPy dtype {name!r}: {error}") from error


@lru_cache(maxsize=4096, typed=True)  # a state has thousands of tensors of a few shapes; True is not 1
def _nbytes(kind: str, dtype: str, *shape: int) -> int:
    """Return the bytes of all elements.

    Raises:
        FormatError: kind or dtype is unknown; or an array of this shape would exceed 2**63 bytes.
        ValueError: the shape is impossible.
    """
    itemsize = _itemsize(kind, dtype)
    if len(shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(shape)
    if math.prod(max(n, 1) for n in shape) * itemsize > INT_MAX:  # strides of an empty array count sizes of 1
        raise FormatError(f"shape {shape!r} of {dtype} exceeds 2**63 bytes")
    return math.prod(shape) * itemsize


def _itemsize(kind: str, dtype: str) -> int:
    """Return the bytes of an element.

    Raises:
        FormatError: kind or dtype is unknown.
    """
    if kind in ("tensor", "parameter") and dtype in TORCH_DTYPES:
        return TORCH_DTYPES[dtype][0]
    if kind == "array" and (size := numpy_dtype(dtype).itemsize):
        return size
    if kind in ("bytes", "page") and dtype == "bytes":
        return 1
    raise FormatError(f"{kind!r} of dtype {dtype!r} is unknown to this release")


class TensorSpec(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The description of one array in a manifest, without its values.

    A Struct, because a save makes one per tensor while the GPU waits: a frozen dataclass takes ten times as long.

    Attributes:
        path: Its place in the whole state; the first element is the top-level key if there is one.
        kind: `tensor`, `parameter`, `array`, `bytes`, or `page` (bytes of a tree).
        dtype: torch's name (`bfloat16`), NumPy's `dtype.str` (`<f4`), or `bytes`.
        shape: For bytes: (length,).
        requires_grad: For tensors and parameters; False for the others.
        tie: (part, index) of an earlier tensor in another part with the same memory.
        dim_order: of the array that a save reads or a restore makes; () in all other specs.
    """

    path: Path
    kind: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    tie: tuple[str, int] | None
    dim_order: DimOrder = ()

    @property
    def itemsize(self) -> int:
        """Bytes per element.

        Raises:
            FormatError: kind or dtype is unknown.
        """
        try:
            return _itemsize(self.kind, self.dtype)
        except FormatError as error:
            raise FormatError(f"{shown(self.path)}: {error}") from None

    @property
    def element_size(self) -> int:
        """Bytes per number (1, 2, 4 or 8), the number of its byte planes; a complex number is two numbers."""
        itemsize = self.itemsize
        if self.kind in ("tensor", "parameter"):
            return TORCH_DTYPES[self.dtype][1]
        if self.kind == "array" and self.dtype[1] == "c":
            return itemsize // 2
        return itemsize if self.kind == "array" and self.dtype[1] not in "SU" else 1

    @property
    def is_float(self) -> bool:
        """Whether a number is a little-endian float of two bytes or more: sign, exponent and mantissa."""
        if self.kind in ("tensor", "parameter"):
            return self.element_size > 1 and self.dtype.startswith(("float", "bfloat", "complex"))
        return self.kind == "array" and self.dtype[0] == "<" and self.dtype[1] in "fc"

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, at most 2**63 - 1.

        Raises:
            FormatError: kind, dtype or shape is invalid.
        """
        try:
            return _nbytes(self.kind, self.dtype, *self.shape)
        except (TypeError, ValueError):  # a size that is a list cannot be looked up
            raise FormatError(f"{shown(self.path)}: shape {self.shape!r} is impossible") from None
        except FormatError as error:
            raise FormatError(f"{shown(self.path)}: {error}") from None

    def check(self) -> None:
        """Check that `flatten` can have made this spec.

        Raises:
            FormatError: kind, dtype or shape is invalid.
        """
        size = self.nbytes
        if self.kind in ("bytes", "page") and self.shape != (size,):
            raise FormatError(f"{shown(self.path)}: bytes of shape {self.shape!r}, expected one dimension")


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part as its manifest stores it: name, tree and specs; the values are in packs.

    Attributes:
        of_rank: whether it holds one rank's own values of the part with that name; its tree is then
            `["own", [node, ...]]`. Such parts come after all others.
        rank: the rank, if the values of all ranks are read; None: `of_rank` is the only one that is read, or False.
    """

    name: str
    tree: Node
    specs: Sequence[TensorSpec]
    of_rank: bool = False
    rank: int | None = None


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one array in a decoded tree; compared by identity, since several places may have one source.

    Attributes:
        part: The position of its part.
        index: The index of its spec in the part.
        tag: `tensor`, `parameter`, `array`, `bytes` or `bytearray`.
        requires_grad: At this path; tied tensors may differ in it.
    """

    part: int
    index: int
    tag: str
    requires_grad: bool = False


def reach_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of a memory there are from the first of a tensor to its last; 0 if it has none."""
    return math.prod(shape) and 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def is_whole(value: torch.Tensor) -> bool:
    """Return whether the storage of a tensor has all of its elements."""
    count = value.numel() if value.is_contiguous() else reach_of(value.shape, value.stride())
    return not count or (value.storage_offset() + count) * value.dtype.itemsize <= value.untyped_storage().nbytes()


def is_array(value: Any) -> bool:
    """Return whether `value` is a tensor or an ndarray, of any subclass."""
    torch = imported("torch")  # if torch is not imported, there are no tensors
    return (torch is not None and isinstance(value, torch.Tensor)) or isinstance(value, np.ndarray)


def array_node(tag: str, index: int, requires_grad: bool) -> list[Any]:
    """Return the node of an array (tree.py); `tag` as in `Slot`."""
    return [tag, index, requires_grad] if tag in ("tensor", "parameter") else [tag, index]


def family(kind: str) -> str:
    """Return `tensor`, `array` or `bytes`: which kinds can be tied to each other."""
    return {"parameter": "tensor", "bytearray": "bytes"}.get(kind, kind)


def can_tie(spec: TensorSpec, origin: TensorSpec) -> bool:
    """Return whether a tensor can be tied to another one: they have one form, and the other is tied to none."""
    alike = (family(spec.kind), spec.dtype, spec.shape) == (family(origin.kind), origin.dtype, origin.shape)
    return alike and origin.tie is None


DimOrder = tuple[int, ...]


def dim_order_of(value: Any) -> DimOrder:
    """Return the dimension order of a tensor, ndarray or bytes; () if it is in C order or overlaps itself.

    An array with gaps, such as some rows of a matrix in Fortran order, has the order of its strides.
    """
    if isinstance(value, bytes | bytearray) or value.ndim < 2:
        return ()
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous or any(stride % value.itemsize for stride in value.strides):
            return ()
        return _order(value.shape, tuple(stride // value.itemsize for stride in value.strides))
    return _order(tuple(value.shape), value.stride())


@lru_cache(maxsize=4096)  # a state has thousands of tensors of a few shapes
def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> DimOrder:
    """Return the dimension order of elements at these strides; see `dim_order_of`.

    A dimension of size 1 has a stride too, from which torch chooses the layout of a convolution's output. If some order
    gives all strides, that is the order. Else dimensions of size 1 keep their places. A stride reaches at least over
    the dimension that comes next in the order, or elements may share memory.
    """
    if not math.prod(shape):
        return ()
    every = tuple(range(len(shape)))
    found = tuple(sorted(every, key=lambda d: (-strides[d], shape[d] == 1, d)))
    if strides_of(shape, found) != strides:
        large = [d for d in every if shape[d] > 1]
        of_large = iter(sorted(large, key=lambda d: -strides[d]))
        found = tuple(next(of_large) if shape[d] > 1 else d for d in every)
        inside = sorted(large, key=lambda d: strides[d])
        reach = [1, *(strides[d] * shape[d] for d in inside)]
        if any(strides[d] < least for d, least in zip(inside, reach, strict=False)):
            return ()
    return () if found == every else found


def strides_of(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides [elements] of a shape whose dimensions lie in memory in an order without gaps."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def inverse(order: DimOrder) -> DimOrder:
    """Return the permutation that undoes an order."""
    return tuple(order.index(d) for d in range(len(order)))


def is_dim_order(order: Sequence[int], dimensions: int) -> bool:
    """Return whether a sequence is an order of so many dimensions other than C order."""
    every = list(range(dimensions))
    return sorted(order) == every != list(order)
