"""The bytes of one array: what it is, where its memory lies, and copies into it and out of it.

In: a tensor of any device and strides, an ndarray, or bytes. Out: its kind, dtype and shape, or its bytes in C order as
(nbytes,) uint8; and back into an array that exists or a new one. Both directions use this: saving reads, restoring
writes.

Invariants: copies keep every bit, a NaN's payload too; no function keeps a reference to what it is given. torch is
imported only once there are tensors. Different arrays may be worked on by different threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CapabilityError, UnsupportedLeafError
from .containers import shown
from .tensors import MAX_DIMENSIONS, TORCH_DTYPES, TensorSpec, family, is_array, numpy_dtype, numpy_dtype_name

if TYPE_CHECKING:
    import torch

Array = Any  # torch.Tensor | np.ndarray | bytes


def described(value: Any) -> tuple[str, str, tuple[int, ...]]:
    """Return kind, dtype name and shape of an array leaf.

    Raises:
        UnsupportedLeafError: It is of a type, layout or dtype without a stored form.
    """
    if type(value) in (bytes, bytearray):
        return type(value).__name__, "bytes", (len(value),)
    kind, dtype = _described_ndarray(value) if isinstance(value, np.ndarray) else _described_tensor(value)
    shape = tuple(value.shape)
    if len(shape) > MAX_DIMENSIONS:
        raise UnsupportedLeafError(f"{len(shape)} dimensions, at most {MAX_DIMENSIONS} can be stored: reshape it")
    return kind, dtype, shape


def _described_ndarray(value: np.ndarray[Any, Any]) -> tuple[str, str]:
    name = numpy_dtype_name(value.dtype)
    if type(value) is not np.ndarray or name is None or not value.itemsize:
        raise UnsupportedLeafError(
            f"{type(value).__name__} of dtype {value.dtype} has no stored form: convert it to a plain ndarray of "
            "numbers, strings or times"
        )
    return "array", name


def _described_tensor(value: torch.Tensor) -> tuple[str, str]:
    import torch

    dtype = dtype_name(value)
    problem = None
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        problem = f"tensor subclass {type(value).__module__}.{type(value).__qualname__}"
    elif value.is_nested or value.layout is not torch.strided or value.is_mkldnn:
        problem = f"{'nested' if value.is_nested else value.layout} tensor"
    elif value.is_quantized or dtype not in TORCH_DTYPES:
        problem = f"tensor of dtype {value.dtype}"
    elif value.is_meta:
        problem = "meta tensor, which has no values,"
    elif value.numel() and not value.untyped_storage().nbytes():
        problem = "tensor whose storage was freed"
    if problem:
        raise UnsupportedLeafError(
            f"{problem} has no stored form: convert it to a dense torch.Tensor, or wrap it in an object with "
            "state_dict/load_state_dict"
        )
    return "parameter" if type(value) is torch.nn.Parameter else "tensor", dtype


def dtype_name(value: Any) -> str:
    """Return the name a spec stores of an array's dtype: torch's name or NumPy's `dtype.str`."""
    return value.dtype.str if isinstance(value, np.ndarray) else str(value.dtype).removeprefix("torch.")


def memory_key(value: Array) -> tuple[Any, ...] | None:
    """Return what two leaves share when they are tied; None for empty ones, which share nothing."""
    if type(value) is bytes:
        return ("bytes", id(value))
    if isinstance(value, np.ndarray):
        place = value.__array_interface__["data"][0]
        return ("array", place, value.shape, value.strides, value.dtype.str) if value.nbytes else None
    if not value.numel():
        return None
    bits = (value.is_conj(), value.is_neg())  # a conjugated view has other values in the same memory
    return ("tensor", str(value.device), value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, *bits)


def extent_of(target: Any) -> tuple[str, int, int]:
    """Return (device, first byte, end) of an array's memory."""
    if isinstance(target, np.ndarray):
        start, end = np.lib.array_utils.byte_bounds(target) if target.size else (0, 0)
        return "cpu", int(start), int(end)
    if not target.numel():
        return str(target.device), 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True)) + 1
    return str(target.device), target.data_ptr(), target.data_ptr() + reach * target.dtype.itemsize


def cannot_take(spec: TensorSpec, target: Any) -> str | None:
    """Say why an array of `into` cannot hold a stored one, or return None."""
    if not is_array(target):
        return f"type: expected {type(target).__name__} as in `into`, got {spec.kind} {spec.dtype}{list(spec.shape)}"
    try:
        kind, dtype, shape = described(target)
    except UnsupportedLeafError as error:
        return f"type: {error}"
    if family(kind) != family(spec.kind):
        return f"type: expected {kind} as in `into`, got {spec.kind}"
    if shape != spec.shape:
        return f"shape: expected {shape} as in `into`, got {spec.shape}"
    if dtype != spec.dtype:
        return f"dtype: expected {dtype} as in `into`, got {spec.dtype}"
    strides = target.strides if kind == "array" else target.stride()
    if _overlaps_itself(shape, strides, target.itemsize if kind == "array" else 1):
        return "elements share memory in `into` (an expanded view); give it memory of its own"
    if kind == "array" and not target.flags.writeable:
        return "read-only in `into`; give it a writable copy"
    return None


def _overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether elements may share memory; a layout that interleaves without sharing counts as sharing."""
    reach = itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < reach:
            return math.prod(shape) > 0
        reach += stride * (size - 1)
    return False


def copy_into(value: Array, destination: np.ndarray[Any, Any]) -> None:
    """Copy a value's bytes in C order; torch copies tensors with its own threads.

    Args:
        value: Tensor of any device and strides, ndarray, or bytes.
        destination: (nbytes,) uint8, writable, aligned to 64.
    """
    if not destination.size:
        return
    if isinstance(value, bytes):
        destination[:] = np.frombuffer(value, np.uint8)
    elif isinstance(value, np.ndarray):
        opaque = np.dtype(f"V{value.itemsize}")  # copies bits whatever they mean
        np.copyto(destination.view(opaque).reshape(value.shape), value.view(opaque))
    else:
        import torch

        _copy_tensor(torch.from_numpy(destination).view(value.dtype).view(value.shape), value)


def _copy_tensor(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bits between tensors of one dtype and shape, on any devices."""
    import torch

    with torch.no_grad():
        plain = not any(t.is_conj() or t.is_neg() for t in (destination, source))
        if plain:  # as integers: no float unit may touch a NaN's payload, and rare dtypes need no kernels of their own
            destination, source = _as_integers(destination), _as_integers(source)
        destination.detach().copy_(source.detach())


def _as_integers(value: torch.Tensor) -> torch.Tensor:
    import torch

    value = value.detach()
    if value.dtype is torch.complex128:
        value = torch.view_as_real(value)
    return value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.dtype.itemsize])


def as_bytes(value: Array) -> np.ndarray[Any, Any]:
    """Return a value's bytes in C order as (nbytes,) uint8: a view where memory holds them so, else a fresh copy."""
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    if not isinstance(value, np.ndarray):
        count = value.numel() * value.dtype.itemsize
    else:
        count = value.nbytes
    view = memory_view(value) if count else np.empty(0, np.uint8)
    if view is None:
        view = np.empty(count + 64, np.uint8)
        view = view[-view.ctypes.data % 64 :][:count]
        copy_into(value, view)
    return view


def memory_view(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the memory of a non-empty array as bytes, or None where it is not CPU memory in C order."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1).view(np.uint8) if value.flags.c_contiguous else None
    if value.device.type != "cpu" or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return None
    import torch

    memory: np.ndarray[Any, Any] = value.detach().reshape(-1).view(torch.uint8).numpy()
    return memory


def _torch_dtype(spec: TensorSpec) -> torch.dtype:
    import torch

    dtype = getattr(torch, spec.dtype, None)  # spec.check() found the name in our own table
    if not isinstance(dtype, torch.dtype):
        raise CapabilityError(
            f"{shown(spec.path)}: dtype {spec.dtype} is unknown to torch {torch.__version__}; update it"
        )
    return dtype


def new_array(spec: TensorSpec, device: str | torch.device | None) -> Any:
    """Return an uninitialized ndarray, or tensor on `device` (CPU by default), for a stored array."""
    if spec.kind == "array":
        return np.empty(spec.shape, numpy_dtype(spec.dtype))
    import torch

    # Bytes first: torch warns when it is asked for empty complex32. `.data` is a tensor of its own, no view of them.
    memory = torch.empty(spec.nbytes, dtype=torch.uint8, device=device or "cpu")
    return memory.view(_torch_dtype(spec)).view(spec.shape).data


def from_bytes(home: np.ndarray[Any, Any], spec: TensorSpec, device: str | torch.device | None) -> Any:
    """Return a new array, or bytes, that holds `home`, the bytes of a stored array in C order."""
    if spec.kind == "bytes":
        return home.tobytes()
    fresh = new_array(spec, device)
    assign(fresh, home, spec)
    return fresh


def assign(target: Any, home: np.ndarray[Any, Any], spec: TensorSpec) -> None:
    """Copy bytes in C order into an array of any strides and device."""
    if not home.size:
        return
    if isinstance(target, np.ndarray):
        opaque = np.dtype(f"V{target.itemsize}")
        np.copyto(target.view(opaque), home.view(opaque).reshape(spec.shape))
    else:
        import torch

        _copy_tensor(target, torch.from_numpy(home).view(_torch_dtype(spec)).view(spec.shape))
