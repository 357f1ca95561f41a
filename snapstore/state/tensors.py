"""What is stored of an array besides its values: kind, dtype, shape, ties, and its place in a decoded tree.

In: names and numbers from a state or a manifest. Out: `TensorSpec`, its sizes in bytes, and FormatError for a spec that
no save can have made. The tables here say which dtypes can be stored; they name torch's without importing it.

Invariants: a spec that passed `check` has a known dtype and fewer than 2**63 bytes, so it may be used to size memory.
Specs and parts are immutable, a `Slot` is never changed: any thread may use them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..errors import FormatError
from .containers import INT_MAX, Path, shown

Node = Any  # None | bool | int | float | str | bytes | list[Any]; a recursive alias buys nothing over msgpack's Any

MAX_DIMENSIONS = 64  # of an array; NumPy and torch's copy stop there as well

#: torch dtypes that can be stored: bytes per element, bytes per number (what makes the planes), may require grad.
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
    """Return `dtype.str` if it says all of a dtype that can be stored, else None."""
    if dtype.char in "gG" or dtype.metadata is not None or dtype.fields is not None or dtype.subdtype is not None:
        return None  # longdouble differs between machines
    return dtype.str if _NUMPY_DTYPE.fullmatch(dtype.str) else None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a `dtype.str`.

    Raises:
        FormatError: it names no dtype that snapstore stores.
    """
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise FormatError(f"NumPy dtype {name!r}: not one that can be stored")
    try:
        return np.dtype(name)
    except (TypeError, ValueError) as error:
        raise FormatError(f"NumPy dtype {name!r}: {error}") from error


class TensorSpec(msgspec.Struct, frozen=True):
    """What a manifest stores of one array, without its values.

    A Struct, because saves make one per tensor while the GPU waits: a frozen dataclass takes ten times as long.

    Attributes:
        path: Place in the whole state; the first element is the top-level key where there is one.
        kind: `tensor`, `parameter`, `array` or `bytes`.
        dtype: torch's name (`bfloat16`), NumPy's `dtype.str` (`<f4`), or `bytes`.
        shape: Of bytes: (length,).
        requires_grad: Of tensors and parameters; False for the others.
        tie: (part, index) of an earlier tensor in another part that is the same memory.
    """

    path: Path
    kind: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    tie: tuple[str, int] | None

    @property
    def itemsize(self) -> int:
        """Bytes per element.

        Raises:
            FormatError: kind or dtype is unknown.
        """
        if self.kind in ("tensor", "parameter") and self.dtype in TORCH_DTYPES:
            return TORCH_DTYPES[self.dtype][0]
        if self.kind == "array" and (size := numpy_dtype(self.dtype).itemsize):
            return size
        if self.kind == "bytes" and self.dtype == "bytes":
            return 1
        raise FormatError(f"{shown(self.path)}: {self.kind!r} of dtype {self.dtype!r} is unknown to this release")

    @property
    def element_size(self) -> int:
        """Bytes per number (1, 2, 4 or 8): what byte planes are made of; a complex number is two numbers."""
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
            FormatError: kind, dtype or shape make no sense.
        """
        if len(self.shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in self.shape):
            raise FormatError(f"{shown(self.path)}: shape {self.shape!r} is impossible")
        elements, itemsize = math.prod(self.shape), self.itemsize
        # Strides are computed from non-zero sizes, so an empty tensor must not overflow them either.
        if (elements or math.prod(max(n, 1) for n in self.shape)) * itemsize > INT_MAX:
            raise FormatError(f"{shown(self.path)}: shape {self.shape!r} of {self.dtype} exceeds 2**63 bytes")
        return elements * itemsize

    def check(self) -> None:
        """Refuse a spec that no flatten can have made.

        Raises:
            FormatError: kind, dtype, shape or requires_grad make no sense.
        """
        size = self.nbytes
        if self.kind == "bytes" and self.shape != (size,):
            raise FormatError(f"{shown(self.path)}: bytes of shape {self.shape!r}, expected one dimension")


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part as manifests give it back: name, tree and specs; the values are still in packs."""

    name: str
    tree: Node
    specs: Sequence[TensorSpec]


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one array in a decoded tree; its identity is the place, several places may have one source.

    Attributes:
        part: Position of the part among the parts given.
        index: Which of the part's specs.
        tag: `tensor`, `parameter`, `array`, `bytes` or `bytearray`.
        requires_grad: Of this place: tied tensors may differ in it.
    """

    part: int
    index: int
    tag: str
    requires_grad: bool = False


def is_array(value: Any) -> bool:
    """Whether `value` is a tensor or an ndarray, of whatever subclass."""
    torch = sys.modules.get("torch")  # while torch is not imported, nothing can be a tensor
    return (torch is not None and isinstance(value, torch.Tensor)) or isinstance(value, np.ndarray)


def family(kind: str) -> str:
    """Return which memory a kind lives in: tied arrays are of one family."""
    return {"parameter": "tensor", "bytearray": "bytes"}.get(kind, kind)
