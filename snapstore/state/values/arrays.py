"""The bytes of one array: its form, the place of its memory, and copies into it and out of it.

In: a tensor of any device and strides, an ndarray, or bytes. Out: its kind, dtype and shape, or its bytes in C order as
(nbytes,) uint8; and bytes back into an existing array or a new one. Saves read, restores write. The bytes are in host
memory, or in device memory if the caller works on the device itself.

Invariants: copies keep every bit, also a NaN's payload. No function keeps a reference to its arguments. torch is
imported only when there are tensors. Different threads may work on different arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...arrays import Bytes
from ...errors import CapabilityError, InvalidInputError, UnsupportedLeafError
from ...threads import imported
from .composite import core_of, is_composite_class
from .containers import shown
from .sharded import Sharding, locals_of, sharding_of
from .tensors import (
    MAX_DIMENSIONS,
    TORCH_DTYPES,
    TensorSpec,
    dim_order_of,
    family,
    inverse,
    is_array,
    is_whole,
    numpy_dtype,
    numpy_dtype_name,
    reach_of,
)
from .torch_layouts import LAYOUTS
from .wrapped import unwrapped

if TYPE_CHECKING:
    import torch

Array = Any  # torch.Tensor | np.ndarray | bytes
Memory = Any  # np.ndarray (nbytes,) uint8 in host memory, or torch.Tensor (nbytes,) uint8 on a device
Boxed = tuple[Memory, Sequence[int], Sequence[int]]
OnDevice = Callable[["torch.device"], bool] | None  # whether tensors of a device keep their bytes there; None: none do


def describe(value: Any, alias: Any = None) -> tuple[str, str, tuple[int, ...]]:
    """Return kind, dtype name and shape of an array leaf.

    Args:
        alias: An array over the same memory; if given, dtype and shape are taken from it.

    Raises:
        UnsupportedLeafError: Its type, layout or dtype has no stored form, or it has more than 64 dimensions.
    """
    form = value if alias is None else alias
    if isinstance(value, np.ndarray):
        kind, dtype = _describe_ndarray(form)
    elif type(value) in (bytes, bytearray):
        return type(value).__name__, "bytes", (len(value),)
    else:
        kind, dtype = _describe_tensor(type(value), form)
    shape = tuple(form.shape)
    if len(shape) > MAX_DIMENSIONS:
        raise UnsupportedLeafError(f"{len(shape)} dimensions, at most {MAX_DIMENSIONS} can be stored: reshape it")
    return kind, dtype, shape


def _describe_ndarray(value: np.ndarray[Any, Any]) -> tuple[str, str]:
    name = numpy_dtype_name(value.dtype)
    if type(value) is not np.ndarray or name is None or not value.itemsize:
        advice = "convert it to a plain ndarray of numbers, strings or times"
        if value.dtype.names is not None:
            advice = f"pass each field as an array of its own, such as array[{value.dtype.names[0]!r}].copy()"
        elif value.dtype.kind == "O":
            advice = "pass array.tolist(), or convert it to a plain ndarray of numbers, strings or times"
        elif value.dtype.kind in "fc" and name is None:
            narrower = "complex128" if value.dtype.kind == "c" else "float64"
            advice = f"machines differ in its format: pass array.astype(numpy.{narrower}), which rounds the values"
        raise UnsupportedLeafError(f"{type(value).__name__} of dtype {value.dtype} has no stored form: {advice}")
    return "array", name


def _describe_tensor(form: type, value: torch.Tensor) -> tuple[str, str]:
    import torch

    kind, dtype, problem, advice = _tensor_form(form, value.dtype, "nested" if value.is_nested else value.layout)
    if problem is None:
        if value.is_meta:
            problem, advice = (
                "meta tensor, which has no values,",
                "give it values first, as model.to_empty() and a load do",
            )
        elif torch._C._functorch.is_functorch_wrapped_tensor(value):  # some have a storage, which is not theirs
            problem, advice = "tensor of torch.func.grad, vmap or another transform", "pass the result of the transform"
        elif not is_whole(value):
            problem, advice = "tensor whose storage was freed, or cut short,", "pass a tensor that has all its values"
    if problem:
        raise UnsupportedLeafError(f"{problem} has no stored form: {advice}")
    return kind, dtype


_DTENSOR = (
    "save tensor.full_tensor() on one rank (for a model: torch.distributed.checkpoint.state_dict.get_model_state_dict "
    "with StateDictOptions(full_state_dict=True)), or tensor.to_local() in a run of each rank"
)


@cache  # a state has thousands of tensors of a few forms
def _tensor_form(form: type, dtype: torch.dtype, layout: Any) -> tuple[str, str, str | None, str]:
    """Return (kind, dtype name, problem or None, advice) of tensors of a type, dtype and layout."""
    import torch

    problem, name = None, _torch_name(dtype)
    advice = "convert it to a dense torch.Tensor, or wrap it in an object with state_dict/load_state_dict"
    if form not in (torch.Tensor, torch.nn.Parameter):
        problem = f"tensor subclass {form.__module__}.{form.__qualname__}"
        names = {base.__name__ for base in form.__mro__}
        if "DTensor" in names:
            problem, advice = "DTensor", _DTENSOR
        elif is_composite_class(form):
            advice = "save it in a nested state, such as a dict"
        elif "FakeTensor" in names:
            problem, advice = "fake tensor, which has no values,", "make the state outside of FakeTensorMode"
        elif "UninitializedTensorMixin" in names:
            advice = "call its module once, so that it has a shape and values"
    elif layout is not torch.strided:
        problem = f"{layout} tensor"
        if str(layout).removeprefix("torch.") in LAYOUTS:
            advice = "save it in a nested state, such as a dict"
        elif layout == "nested":
            advice = "pass list(tensor.unbind()), or a nested tensor of layout=torch.jagged"
    elif name not in TORCH_DTYPES:
        problem = f"tensor of dtype {dtype}"
        if name.startswith(("qint", "quint")):
            advice = "pass tensor.dequantize(), or tensor.int_repr() beside its scale and zero point"
        elif dtype.itemsize == 1:
            advice = f"pass its bytes, tensor.view(torch.uint8); after a restore, restored.view({dtype}) is the tensor"
    return "parameter" if form is torch.nn.Parameter else "tensor", name, problem, advice


def require_memory_of_tensors(what: str) -> None:
    """Check that the tensors that this thread makes now have memory, also its views of other tensors.

    Under FakeTensorMode, and in some transforms of torch.func, they have none, and torch may read other bytes instead.

    Args:
        what: The caller, in the error.

    Raises:
        InvalidInputError: They have none.
    """
    torch = imported("torch")  # if torch is not imported, there are no tensors
    if torch is None:
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise InvalidInputError(
            f"{what}: was called in a function that torch.func.grad, vmap or another transform runs, whose tensors may "
            "have no memory; call it outside of the transform"
        )
    if type(torch.empty(0, device="cpu")) is not torch.Tensor:
        raise InvalidInputError(
            f"{what}: was called under FakeTensorMode, or a mode like it, whose tensors have no memory; "
            "leave the mode first"
        )


def dtype_name(value: Any) -> str:
    """Return the name of an array's dtype as a spec stores it: torch's name or NumPy's `dtype.str`."""
    return value.dtype.str if isinstance(value, np.ndarray) else _torch_name(value.dtype)


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def address_of(value: Array) -> int:
    """Return the first address of an array's memory, which tied arrays share; 0 for an empty array. It is fast.

    For bytes, return their id.
    """
    if isinstance(value, np.ndarray):
        return int(value.__array_interface__["data"][0]) if value.nbytes else 0
    return id(value) if type(value) is bytes else value.data_ptr()


def memory_key(value: Array) -> tuple[Any, ...] | None:
    """Return a key that is equal for tied arrays (same memory and form); None for an empty array."""
    if type(value) is bytes:
        return ("bytes", id(value))
    if isinstance(value, np.ndarray):
        place = value.__array_interface__["data"][0]
        return ("array", place, value.shape, value.strides, value.dtype.str) if value.nbytes else None
    if not value.numel():
        return None
    bits = (value.is_conj(), value.is_neg())  # a conjugated view has different values in the same memory
    return ("tensor", str(value.device), value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, *bits)


def extent_of(target: Any) -> tuple[str, int, int]:
    """Return (device, first address, end address) of an array's memory."""
    if isinstance(target, np.ndarray):
        start, end = np.lib.array_utils.byte_bounds(target) if target.size else (0, 0)
        return "cpu", int(start), int(end)
    start = target.data_ptr() if target.numel() else 0
    return str(target.device), start, start + reach_of(target.shape, target.stride()) * target.dtype.itemsize


#: A problem of `mismatch`.
SHARED_ELEMENTS = "elements share memory in the target (an expanded view); give it memory of its own"


def mismatch(spec: TensorSpec, target: Any) -> str | None:
    """Return why an array of `into` cannot be filled with a stored one, or None if it can.

    A sharded tensor must have the whole shape that is stored.
    """
    try:
        sharding = sharding_of(target)
    except UnsupportedLeafError as error:
        return f"type: {error}"
    if core_of(target) is not None:
        return _other_type(spec, target)
    targets = [unwrapped(target)] if sharding is None else locals_of(target)
    found = (_mismatch(spec, one, sharding) for one in targets)
    return next(filter(None, found), None)


def _other_type(spec: TensorSpec, target: Any) -> str:
    return f"type: expected {type(target).__name__} as in the target, got {spec.kind} {spec.dtype}{list(spec.shape)}"


def _mismatch(spec: TensorSpec, target: Any, sharding: Sharding | None) -> str | None:
    """Return why an array cannot be filled with a stored one, or a local tensor with its box; None if it can."""
    if not is_array(target):
        return _other_type(spec, target)
    try:
        kind, dtype, shape = describe(target)
    except UnsupportedLeafError as error:
        return f"type: {error}"
    if family(kind) != family(spec.kind):
        return f"type: expected {kind} as in the target, got {spec.kind}"
    whole = shape if sharding is None else sharding.global_shape
    if whole != spec.shape:
        return f"shape: expected {whole} as in the target, got {spec.shape}"
    if dtype != spec.dtype:
        return f"dtype: expected {dtype} as in the target, got {spec.dtype}"
    if overlaps_itself(target):
        return SHARED_ELEMENTS
    if kind == "array" and not target.flags.writeable:
        return "read-only in the target; give it a writable copy"
    return None


def overlaps_itself(target: Any) -> bool:
    """Return whether elements may share memory; also True for layouts that interleave without sharing."""
    is_ndarray = isinstance(target, np.ndarray)
    strides, reach = (target.strides, target.itemsize) if is_ndarray else (target.stride(), 1)
    sizes = zip(strides, target.shape, strict=True)
    for stride, size in sorted((abs(stride), size) for stride, size in sizes if size > 1):
        if stride < reach:
            return bool(math.prod(target.shape))
        reach += stride * (size - 1)
    return False


def copy_into(value: Array, destination: Memory) -> None:
    """Copy a value's bytes in C order; torch copies tensors with its own threads.

    Args:
        value: A tensor of any device and strides, an ndarray, or bytes.
        destination: (nbytes,) uint8, writable; in host memory aligned to 64 bytes.
    """
    if not len(destination):
        return
    if isinstance(value, bytes):
        destination[:] = np.frombuffer(value, np.uint8)
    else:
        copy_bits(_in_form_of(value, destination), value)


def assign(target: Any, home: Memory, dtype: torch.dtype | None = None) -> None:
    """Copy bytes in C order into an array of any strides and device.

    Args:
        dtype: of the bytes, whose values are cast to that of the target, a tensor; None: the target has the same dtype.
    """
    if len(home):
        home = as_bytes(home) if isinstance(target, np.ndarray) else home
        if dtype is None:
            copy_bits(target, _in_form_of(target, home))
        else:
            target.detach().copy_(_in_form_of(target, home, dtype))


def _in_form_of(array: Any, memory: Memory, dtype: torch.dtype | None = None) -> Any:
    """Return bytes in C order as an array of the dtype, or of `dtype`, and of the shape of another one."""
    if isinstance(array, np.ndarray):
        return memory.view(array.dtype).reshape(array.shape)
    import torch

    stored = torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory
    return stored.view(dtype or array.dtype).view(array.shape)


def copy_bits(destination: Any, source: Any) -> None:
    """Copy bits between ndarrays, or tensors on any devices, of one dtype and shape."""
    if isinstance(destination, np.ndarray):
        opaque = np.dtype(f"V{destination.itemsize}")  # copies bits without conversion
        np.copyto(destination.view(opaque), source.view(opaque))
        return
    import torch

    if not is_whole(source):  # torch does not check
        raise RuntimeError("the storage of a tensor was freed, or cut short")
    with torch.no_grad():
        if source.dtype is torch.complex32 and destination.is_conj() != source.is_conj():
            # torch conjugates it in float32, which changes the payload of a signaling NaN
            destination, source = (one.conj() if one.is_conj() else one for one in (destination, source))
            source = (_as_integers(source) ^ -(2**31)).view(torch.complex32)  # the sign of the imaginary part
        source = source.resolve_conj().resolve_neg()  # torch 2.11 copies strided conjugates wrongly between devices
        if not destination.is_conj() and not destination.is_neg():
            # as integers: float units may change a NaN's payload, and rare dtypes may have no copy kernels
            destination, source = _as_integers(destination), _as_integers(source)
        destination.detach().copy_(source.detach())


def _as_integers(value: torch.Tensor) -> torch.Tensor:
    import torch

    value = value.detach()
    if value.dtype is torch.complex128:
        value = torch.view_as_real(value)
    return value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.dtype.itemsize])


def as_bytes(value: Array) -> np.ndarray[Any, Any]:
    """Return a value's bytes in C order as (nbytes,) uint8: a view of its memory if possible, else a copy."""
    memory: np.ndarray[Any, Any] = as_memory(value, None)
    return memory


def as_memory(value: Array, on_device: OnDevice) -> Memory:
    """Return a value's bytes as `as_bytes` does, but in device memory if `on_device` accepts its device.

    Work on the current stream may still be writing them; other streams must wait for it.
    """
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    view = memory_view(value, on_device) if value.nbytes else None
    if view is None:
        view = new_memory(value.nbytes, device_of(value, on_device))
        copy_into(value, view)
    return view


def device_of(value: Array, on_device: OnDevice) -> torch.device | None:
    """Return the device on which a value's bytes stay; None if they are read in host memory."""
    if on_device is None or isinstance(value, (bytes, np.ndarray)) or not on_device(value.device):
        return None
    device: torch.device = value.device
    return device


def new_memory(nbytes: int, device: torch.device | None) -> Memory:
    """Return (nbytes,) uint8 of uninitialized memory: on a device, or in host memory, aligned to 64 bytes."""
    if device is None:
        memory = np.empty(nbytes + 64, np.uint8)
        return memory[-memory.ctypes.data % 64 :][:nbytes]
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def memory_view(value: Any, on_device: OnDevice) -> Memory | None:
    """Return the memory of an array as bytes; None if it is not in C order or cannot be accessed from here."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1).view(np.uint8) if value.flags.c_contiguous else None
    direct = device_of(value, on_device) is not None
    if not (direct or value.device.type == "cpu") or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return None
    import torch

    # `.data`: autograd does not track writes to it, as with NumPy, so inference tensors can be filled too. A contiguous
    # tensor may have any strides where sizes are 0 or 1.
    memory = value.data.as_strided((value.numel(),), (1,)).view(torch.uint8)
    return memory if direct else memory.numpy()


def note_written(array: Any) -> None:
    """Tell autograd that the memory of a tensor was written: a backward that needs its old values then raises."""
    if not isinstance(array, np.ndarray) and not array.is_inference():
        import torch

        torch.autograd.graph.increment_version(array)


def copy_box(target: Boxed, source: Boxed, sizes: Sequence[int]) -> None:
    """Copy a box of bytes out of one box of bytes into another, both in C order.

    Args:
        target, source: each (memory of the box, its sizes, where the copied box begins in it). Host memory may go into
            device memory.
        sizes: of the box that is copied, one for each dimension.
    """
    (to, to_sizes, to_start), (of, of_sizes, of_start) = target, source
    if len(sizes) > MAX_DIMENSIONS:  # the last one has the bytes of an element; most of the others have the size 1
        kept = [pair != (1, 1) for pair in zip(to_sizes, of_sizes, strict=True)]
        to_sizes, to_start, of_sizes, of_start, sizes = (
            list(compress(one, kept)) for one in (to_sizes, to_start, of_sizes, of_start, sizes)
        )
    there = to.reshape(to_sizes)[tuple(slice(at, at + size) for at, size in zip(to_start, sizes, strict=True))]
    here = of.reshape(of_sizes)[tuple(slice(at, at + size) for at, size in zip(of_start, sizes, strict=True))]
    if isinstance(to, np.ndarray):
        there[...] = here
    else:
        import torch

        here = torch.from_numpy(here.copy()) if isinstance(of, np.ndarray) else here  # torch warns of read-only memory
        there.copy_(here)
        if here.is_cuda:  # another stream's memory: the allocator would reuse it as soon as nothing refers to it
            here.record_stream(torch.cuda.current_stream(here.device))


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Return the dtype of a stored tensor.

    Raises:
        CapabilityError: this torch does not have it.
    """
    import torch

    dtype = getattr(torch, spec.dtype, None)  # spec.check() found the name in our table
    if not isinstance(dtype, torch.dtype):
        raise CapabilityError(
            f"{shown(spec.path)}: dtype {spec.dtype} is unknown to torch {torch.__version__}; update it"
        )
    return dtype


def new_array(spec: TensorSpec, device: str | int | torch.device | None) -> Any:
    """Return an uninitialized ndarray, or tensor on `device` (CPU by default), for a stored array, in its layout."""
    order = spec.dim_order
    shape = [spec.shape[d] for d in order] if order else spec.shape
    if spec.kind == "array":
        fresh = np.empty(shape, numpy_dtype(spec.dtype))
        return fresh.transpose(inverse(order)) if order else fresh
    import torch

    # Bytes first: torch warns about an empty complex32. `.data` is a tensor of its own, not a view of them.
    memory = torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu" if device is None else device)
    value = memory.view(torch_dtype(spec)).view(shape)
    return value.permute(inverse(order)).data if order else value.data


def in_memory_order(value: Any) -> Any:
    """Return a view of a tensor or ndarray whose C order is the order in memory."""
    order = dim_order_of(value)
    if not order:
        return value
    return value.transpose(order) if isinstance(value, np.ndarray) else value.detach().permute(order)


def from_bytes(home: Memory, spec: TensorSpec, device: str | int | torch.device | None) -> Any:
    """Return a new array, or bytes, with the values of `home`, the bytes of a stored array in C order."""
    if spec.kind == "bytes":
        return as_bytes(home).tobytes()
    fresh = new_array(spec, device)
    assign(fresh, home)
    return fresh


def as_float64(data: Bytes, spec: TensorSpec) -> npt.NDArray[np.float64] | None:
    """Return bytes as numbers, (n,) float64 (complex: real and imaginary parts); None if empty or not numbers."""
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
