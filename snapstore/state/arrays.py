"""The bytes of one array: its form, where its memory lies, and copies into it and out of it.

In: a tensor of any device and strides, an ndarray, or bytes. Out: its kind, dtype and shape, or its bytes in C order as
(nbytes,) uint8; and back into an array that exists or a new one. Both directions use this: saving reads, restoring
writes. Bytes lie in host memory, or where the caller works on a device itself, in the memory of that device.

Invariants: copies keep every bit, a NaN's payload too; no function keeps a reference to its arguments, only `Held`
does. torch is imported only once there are tensors. Different arrays may be worked on by different threads.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes
from ..errors import CapabilityError, InvalidInputError, UnsupportedLeafError
from .containers import Path, shown
from .tensors import (
    MAX_DIMENSIONS,
    TORCH_DTYPES,
    TensorSpec,
    family,
    is_array,
    numpy_dtype,
    numpy_dtype_name,
)

if TYPE_CHECKING:
    import torch

Array = Any  # torch.Tensor | np.ndarray | bytes
Memory = Any  # np.ndarray (nbytes,) uint8 in host memory, or torch.Tensor (nbytes,) uint8 on a device
OnDevice = Callable[["torch.device"], bool] | None  # whether bytes of tensors there are device memory; None: none are


def described(value: Any, alias: Any = None) -> tuple[str, str, tuple[int, ...]]:
    """Return kind, dtype name and shape of an array leaf; dtype and shape of `alias`, a view of its memory, if given.

    Raises:
        UnsupportedLeafError: It is of a type, layout or dtype without a stored form.
    """
    form = value if alias is None else alias
    if isinstance(value, np.ndarray):
        kind, dtype = _described_ndarray(form)
    elif type(value) in (bytes, bytearray):
        return type(value).__name__, "bytes", (len(value),)
    else:
        kind, dtype = _described_tensor(type(value), form)
    shape = tuple(form.shape)
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


def _described_tensor(form: type, value: torch.Tensor) -> tuple[str, str]:
    kind, dtype, problem = _tensor_form(form, value.dtype, "nested" if value.is_nested else value.layout)
    if problem is None:
        if value.is_meta:
            problem = "meta tensor, which has no values,"
        elif not _is_whole(value):
            problem = "tensor whose storage was freed, or cut short,"
    if problem:
        raise UnsupportedLeafError(
            f"{problem} has no stored form: convert it to a dense torch.Tensor, or wrap it in an object with "
            "state_dict/load_state_dict"
        )
    return kind, dtype


def _is_whole(value: torch.Tensor) -> bool:
    """Whether the storage of a tensor holds all of its elements."""
    count = value.numel()
    if count and not value.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return not count or (value.storage_offset() + count) * value.dtype.itemsize <= value.untyped_storage().nbytes()


@cache  # a state has thousands of tensors of a few forms
def _tensor_form(form: type, dtype: torch.dtype, layout: Any) -> tuple[str, str, str | None]:
    """Return kind and dtype name of tensors of a type, dtype and layout, and what is wrong with them."""
    import torch

    problem, name = None, _torch_name(dtype)
    if form not in (torch.Tensor, torch.nn.Parameter):
        problem = f"tensor subclass {form.__module__}.{form.__qualname__}"
    elif layout is not torch.strided:
        problem = f"{layout} tensor"
    elif name not in TORCH_DTYPES:
        problem = f"tensor of dtype {dtype}"
    return "parameter" if form is torch.nn.Parameter else "tensor", name, problem


def dtype_name(value: Any) -> str:
    """Return the name a spec stores of an array's dtype: torch's name or NumPy's `dtype.str`."""
    return value.dtype.str if isinstance(value, np.ndarray) else _torch_name(value.dtype)


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def address_of(value: Array) -> int:
    """Return where an array's memory begins, the same of tied ones and quickly found; 0 of an empty one."""
    if isinstance(value, np.ndarray):
        return int(value.__array_interface__["data"][0]) if value.nbytes else 0
    return id(value) if type(value) is bytes else value.data_ptr()


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

    if not _is_whole(source):  # torch does not look
        raise RuntimeError("the storage of a tensor was freed, or cut short")
    with torch.no_grad():
        source = source.resolve_conj().resolve_neg()  # torch 2.11 copies strided conjugates wrongly between devices
        if not destination.is_conj() and not destination.is_neg():
            # as integers: no float unit may touch a NaN's payload, and rare dtypes need no kernels of their own
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
    view: np.ndarray[Any, Any] | None = memory_view(value) if count else np.empty(0, np.uint8)
    if view is None:
        view = np.empty(count + 64, np.uint8)
        view = view[-view.ctypes.data % 64 :][:count]
        copy_into(value, view)
    return view


def as_memory(value: Array, on_device: OnDevice) -> Memory:
    """Return a value's bytes as `as_bytes` does, but in device memory where a tensor's device is `on_device`.

    Work of the current stream may still be writing them; other streams must wait for it.
    """
    device = device_of(value, on_device)
    if device is None:
        return as_bytes(value)
    view = memory_view(value, on_device)
    if view is None:
        view = new_memory(value.numel() * value.dtype.itemsize, device)
        _copy_tensor(view.view(value.dtype).view(value.shape), value)
    return view


def device_of(value: Array, on_device: OnDevice) -> torch.device | None:
    """Return where a value's bytes are device memory; None for host memory."""
    if on_device is None or isinstance(value, (bytes, np.ndarray)) or not on_device(value.device):
        return None
    device: torch.device = value.device
    return device


def new_memory(nbytes: int, device: torch.device | None) -> Memory:
    """Return uninitialized memory of a device, or of the host."""
    if device is None:
        return np.empty(nbytes, np.uint8)
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def memory_view(value: Any, on_device: OnDevice = None) -> Memory | None:
    """Return the memory of an array as bytes, or None where it is not in C order or out of reach."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1).view(np.uint8) if value.flags.c_contiguous else None
    direct = device_of(value, on_device) is not None
    if not (direct or value.device.type == "cpu") or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return None
    import torch

    # `.data`: as through NumPy, writes are none of autograd's business, so inference tensors can be filled too. The
    # strides of a contiguous tensor may be any where sizes are 0 or 1.
    memory = value.data.as_strided((value.numel(),), (1,)).view(torch.uint8)
    return memory if direct else memory.numpy()


class Held:
    """An array of a state, from `flatten` until its bytes have been taken; others may change it meanwhile.

    A `state_dict()` that is called later, or a thread, may give it other memory (`.data =`, `set_`), resize it or its
    storage, or assign its dtype or shape. Whoever reads it calls `take`, reads what that returns, then `confirm`: if
    both return, all that was read lies in memory of the array's own, and is of the form in `spec`.

    The memory stays alive meanwhile, but for a storage that another thread resizes while torch copies out of it: torch
    has no lock against that. NumPy resizes no array in place to which there is a weak reference.
    """

    __slots__ = ("_alias", "_place", "_unresizable", "spec", "ties", "value")

    def __init__(self, value: Array, spec: TensorSpec) -> None:
        self.value, self.spec = value, spec
        self.ties: tuple[tuple[Path, Array], ...] = ()  # other objects of the state over the same memory
        self._alias: Array = None
        self._place: tuple[Any, ...] = ()
        self._unresizable: Any = None

    def take(self) -> Array:
        """Return an array of our own over the memory: nobody else can change its form.

        Raises:
            InvalidInputError: The array is not what was flattened.
        """
        value, spec = self.value, self.spec
        try:
            if isinstance(value, np.ndarray):
                self._unresizable = weakref.ref(value)
            self._alias = alias = _alias_of(value)
            self._place, form = _place_of(alias), described(value, alias)
        except (UnsupportedLeafError, RuntimeError) as error:  # torch's of a tensor that is not strided any more
            raise changed(spec, str(error)) from error
        if form != (spec.kind, spec.dtype, spec.shape):
            raise changed(spec, f"{form[0]} {form[1]}{list(form[2])}")
        for path, other in self.ties:
            if memory_key(other) != memory_key(alias):
                raise changed(spec, f"memory of its own, to which {shown(path)} is not tied any more")
        return alias

    def confirm(self) -> None:
        """Check that the array is as it was when it was taken: call it once its last byte has been read.

        Raises:
            InvalidInputError: It is not.
        """
        try:
            same = self._place == _place_of(self.value) == _place_of(self._alias)
        except RuntimeError as error:
            raise changed(self.spec, str(error)) from error
        if not same:
            raise changed(self.spec, "other memory, or another form, while it was read")

    def memory(self, memory_of: Callable[[Array], Memory]) -> Memory:
        """Return the bytes as `memory_of` gives them; `confirm` them again if they are the array's own memory.

        Raises:
            InvalidInputError: The array is not what was flattened.
        """
        return self._read(memory_of)

    def copy_into(self, destination: np.ndarray[Any, Any]) -> None:
        """Copy the bytes in C order, as the function of this name does.

        Raises:
            InvalidInputError: The array is not what was flattened.
        """
        self._read(lambda alias: copy_into(alias, destination))

    def _read(self, read: Callable[[Array], Any]) -> Any:
        alias = self.take()
        try:
            found = read(alias)
        except (RuntimeError, ValueError):  # of torch or NumPy: a storage that is too short by now, or another shape
            self.confirm()
            raise
        self.confirm()
        return found


def _alias_of(value: Array) -> Array:
    """Return an array of our own over the memory of another; bytes cannot change and are their own."""
    if isinstance(value, bytes):
        return value
    return value.view() if isinstance(value, np.ndarray) else value.detach()


def _place_of(value: Array) -> tuple[Any, ...]:
    """Return where an array's elements lie, and of which form they are; `memory_key` without what takes time."""
    if isinstance(value, bytes):
        return (id(value),)
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0], value.dtype, value.shape, value.strides
    storage = value.untyped_storage().nbytes()
    form = (value.dtype, value.shape, value.stride(), value.device, value.is_conj(), value.is_neg())
    return value.data_ptr(), storage, *form


def changed(spec: TensorSpec, got: str) -> InvalidInputError:
    """Return the error for an array of a state that has become another one."""
    return InvalidInputError(
        f"{shown(spec.path)}: was changed while it was saved (by a thread, a later state_dict(), or in a mapped "
        f"file?): expected {spec.kind} {spec.dtype}{list(spec.shape)} as it was, got {got}; nothing was committed; "
        "save again, and let nothing change it until that is done"
    )


def fill(memory: Memory, data: np.ndarray[Any, Any]) -> None:
    """Copy bytes of the host, (nbytes,) uint8, into memory of their size."""
    if isinstance(memory, np.ndarray):
        memory[:] = data
    else:
        import torch

        memory.copy_(torch.from_numpy(data.copy()))  # a copy, because torch warns of memory that is read-only


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


def from_bytes(home: Memory, spec: TensorSpec, device: str | torch.device | None) -> Any:
    """Return a new array, or bytes, that holds `home`, the bytes of a stored array in C order."""
    if spec.kind == "bytes":
        return as_bytes(home).tobytes()
    fresh = new_array(spec, device)
    assign(fresh, home, spec)
    return fresh


def assign(target: Any, home: Memory, spec: TensorSpec) -> None:
    """Copy bytes in C order into an array of any strides and device."""
    if not len(home):
        return
    if isinstance(target, np.ndarray):
        opaque = np.dtype(f"V{target.itemsize}")
        np.copyto(target.view(opaque), as_bytes(home).view(opaque).reshape(spec.shape))
    else:
        import torch

        stored = torch.from_numpy(home) if isinstance(home, np.ndarray) else home
        _copy_tensor(target, stored.view(_torch_dtype(spec)).view(spec.shape))


def as_float64(data: Bytes, spec: TensorSpec) -> npt.NDArray[np.float64] | None:
    """Bytes as numbers (complex: real and imaginary parts); None for what has no numbers."""
    if spec.kind == "bytes" or data.size == 0:
        return None
    if spec.kind == "array":
        dtype = np.dtype(spec.dtype)
        if dtype.kind not in "biufc":
            return None
        values = data.view(dtype)
        return (values.view(values.real.dtype) if dtype.kind == "c" else values).astype(np.float64)
    import torch

    if spec.dtype.startswith(("bits", "float4")):
        return None
    tensor = torch.from_numpy(data if data.flags.writeable else data.copy()).view(getattr(torch, spec.dtype))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    result: npt.NDArray[np.float64] = tensor.to(torch.float64).numpy().reshape(-1)
    return result
