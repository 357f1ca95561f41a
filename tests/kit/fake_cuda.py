"""A CUDA device made of this CPU, so that the host code of the GPU engine (engine/cuda) runs where there is no GPU.

A plugin of pytest, for a process of its own: `pytest -p kit.fake_cuda tests/gpu` with tests/ on PYTHONPATH. It replaces
everything below snapstore that needs the device: torch.cuda's streams, events and allocator, tensors on the device
(`CudaTensor`), CuPy, and nvCOMP. Kernels run on the emulator of thread blocks (emulator.h).

Work is done when it is enqueued, on whatever stream, so a missing wait is not noticed. Sizes are those of nvCOMP; the
bit streams are those of other libraries. Only tests/gpu on a real device proves the engine (docs/contributing.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import re
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from torch.overrides import TorchFunctionMode

from kit.machines import emulated

DEVICE = torch.device("cuda", 0)

# --- memory ----------------------------------------------------------------------------------------------------------


class Memory:
    """torch's allocator: counts what is allocated, fails beyond a limit, and has guards around everything.

    Only what factories and transfers make is counted, not what operators return.
    """

    TOTAL_BYTES = 80 * 1024**3
    STEP_BYTES = 512  # as torch's: sizes and addresses are multiples
    GUARD, FILLING = 0xA5, 0xC3
    #: The first bytes of new memory hold garbage, as on a device. Filling more would take time.
    FILLED_BYTES = 64 * 1024

    def __init__(self) -> None:
        self.limit = self.TOTAL_BYTES
        self.allocated = self.peak = 0
        self.overruns: list[str] = []
        self._lock = threading.RLock()  # a finalizer may run at any time

    def take(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8; it is given back once no tensor uses it."""
        size = -(-nbytes // self.STEP_BYTES) * self.STEP_BYTES
        with self._lock:
            unsafe("cudaMalloc", by_torch=True)
            if self.allocated + size > self.limit:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {nbytes} bytes of the fake device")
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
        room = np.empty(size + 3 * self.STEP_BYTES, np.uint8)
        start = self.STEP_BYTES + -room.ctypes.data % self.STEP_BYTES
        before, after = room[start - self.STEP_BYTES : start], room[start + nbytes : start + size + self.STEP_BYTES]
        before[:] = after[:] = self.GUARD
        array = room[start : start + nbytes]
        array[: self.FILLED_BYTES] = self.FILLING
        weakref.finalize(array, self._give, size, nbytes, before, after).atexit = False
        return torch.from_numpy(array)

    def _give(self, size: int, nbytes: int, before: np.ndarray, after: np.ndarray) -> None:
        with self._lock:
            self.allocated -= size
            if (before != self.GUARD).any() or (after != self.GUARD).any():
                self.overruns.append(f"written beyond {nbytes} bytes of device memory")

    def limit_to(self, fraction: float, device: Any = None) -> None:
        """As torch.cuda.set_per_process_memory_fraction."""
        self.limit = round(fraction * self.TOTAL_BYTES)


MEMORY = Memory()

# --- tensors ---------------------------------------------------------------------------------------------------------

#: Operators that take tensors of both the host and the device, beside copies.
MIXED = {
    torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.data.__set__, torch.Tensor.grad.__set__,
}  # fmt: skip


class CudaTensor(torch.Tensor):
    """A tensor that says it lies on the device; the host cannot look into it without a copy."""

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results of operators lie on the device as well."""
        if func is torch.Tensor.copy_:  # its result lies where its target does
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func not in MIXED and any(type(a) in (torch.Tensor, torch.nn.Parameter) and a.dim() for a in args):
            raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
        return super().__torch_function__(func, types, args, kwargs or {})

    def get_device(self) -> int:
        return DEVICE.index

    def record_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy: copy it to host memory first")

    __array__ = numpy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return from_device(self).__reduce_ex__(protocol)


def is_cuda(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


def from_device(value: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory."""
    with torch._C.DisableTorchFunctionSubclass():
        copy = value.detach().as_subclass(torch.Tensor).clone()
        return copy.requires_grad_(value.requires_grad)


def to_device(value: torch.Tensor) -> torch.Tensor:
    """Return a copy on the device, or the tensor itself if it lies there; unlike torch's, autograd does not see it."""
    if isinstance(value, CudaTensor):
        return value
    plain = value.detach().clone().resolve_conj().resolve_neg()
    memory = new_on_device(plain.shape, plain.stride(), plain.dtype)
    return memory.copy_(plain).requires_grad_(value.requires_grad)


def new_on_device(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor on the device."""
    count = 0 if 0 in shape else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = MEMORY.take(count * dtype.itemsize).view(dtype)
    return memory.as_strided(shape, strides).as_subclass(CudaTensor)


FACTORIES = (
    "empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "arange",
    "linspace", "eye", "tensor", "as_tensor", "rand", "rand_like", "randn", "randn_like", "randint",
)  # fmt: skip


def factory(name: str) -> Callable[..., torch.Tensor]:
    """Return torch's factory, which then takes our device and page-locked memory too."""
    real = getattr(torch, name)

    def made(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        like = name.endswith("_like")
        if pin_memory:
            unsafe("cudaHostAlloc", by_torch=True)
            if device is None:  # as under torch.set_default_device("cuda")
                raise RuntimeError("Only dense CPU tensors can be pinned")
        if device is None and not (like and isinstance(args[0], CudaTensor)):
            return real(*args, **options)
        if not is_cuda(device or DEVICE):
            return real(*(from_device(a) if like and a is args[0] else a for a in args), device=device, **options)
        if name.startswith("empty"):
            with torch._C.DisableTorchFunctionSubclass():
                shape = real(*args, device="meta", **options)
            return new_on_device(shape.shape, shape.stride(), shape.dtype).requires_grad_(shape.requires_grad)
        with torch._C.DisableTorchFunctionSubclass():
            return to_device(real(*args, **options).as_subclass(torch.Tensor))

    return made


def transfer(self: torch.Tensor, *args: Any, non_blocking: bool = False, **options: Any) -> torch.Tensor:
    """As torch.Tensor.to."""
    device, rest = options.pop("device", None), []
    for argument in args:
        if isinstance(argument, torch.Tensor):
            device, argument = argument.device, argument.dtype
        if isinstance(argument, torch.device | str | int) and not isinstance(argument, bool):
            device = argument
        elif argument is not None:
            rest.append(argument)
    out = _TO(self, *rest, **options) if rest or options else self
    if device is None:
        return out
    if is_cuda(device):
        return to_device(out)
    return _TO(from_device(out) if isinstance(out, CudaTensor) else out, device)


_TO = torch.Tensor.to

# --- torch.cuda ------------------------------------------------------------------------------------------------------


class Stream:
    """Does everything at once. As in torch, new streams come from a pool of 32, in turn."""

    _POOL = itertools.cycle(range(1, 33))

    def __init__(self, device: Any = None, number: int | None = None, priority: int = 0) -> None:
        self.cuda_stream = next(self._POOL) if number is None else number
        self.device = DEVICE

    def synchronize(self) -> None: ...

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    """Once recorded, done only at the second query: code that polls it lets other threads go on in between."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._asked = 1

    def record(self, stream: Stream | None = None) -> None:
        self._asked = 0

    def query(self) -> bool:
        unsafe("cudaEventQuery")
        self._asked += 1
        return self._asked > 1

    def synchronize(self) -> None:
        unsafe("cudaEventSynchronize")

    def wait(self, stream: Stream | None = None) -> None: ...


class _Current(threading.local):
    stream = Stream(number=0)
    capture_mode = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL


_current = _Current()


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, _current.stream = _current.stream, stream
    try:
        yield
    finally:
        _current.stream = before


def entered(*args: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context that changes nothing; it may be entered again and again."""
    return contextlib.nullcontext()


def nothing(*args: Any) -> None:
    """There is nothing to do."""


class Graph:
    """torch.cuda.CUDAGraph: the recorded calls of in-place operators."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


class Capture(TorchFunctionMode):
    """torch.cuda.graph: records in-place operators, and does not run them."""

    running: Capture | None = None

    def __init__(self, graph: Graph, **options: Any) -> None:
        super().__init__()
        self.graph, self.thread = graph, threading.get_ident()
        self.ruined_by: str | None = None

    def __enter__(self) -> Any:
        Capture.running = self
        return super().__enter__()

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)
        Capture.running = None
        if kind is None and self.ruined_by is not None:
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture: {self.ruined_by}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not name.endswith("_") or name.endswith("__"):
            return func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}))
        return args[0]


def unsafe(call: str, *, by_torch: bool = False) -> None:
    """Fail as a call that CUDA forbids during a capture, and ruin the capture; not in a thread whose mode is relaxed.

    `by_torch`: torch relaxes the mode of the capturing thread for this call.
    """
    capture = Capture.running
    own = capture is not None and capture.thread == threading.get_ident()
    if capture is not None and _current.capture_mode != 2 and not (own and by_torch):
        capture.ruined_by = call
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {call}")


def exchange_capture_mode(mode: Any) -> int:
    """cuThreadExchangeStreamCaptureMode"""
    _current.capture_mode, mode._obj.value = mode._obj.value, _current.capture_mode
    return 0


def empty_cache() -> None:
    if Capture.running is not None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    unsafe("cudaMemGetInfo")
    return MEMORY.TOTAL_BYTES - MEMORY.allocated, MEMORY.TOTAL_BYTES


TORCH_CUDA = {
    "Stream": Stream,
    "Event": Event,
    "ExternalStream": lambda pointer, device: Stream(number=pointer),
    "current_stream": lambda device=None: _current.stream,
    "default_stream": lambda device=None: _Current.stream,
    "stream": on_stream,
    "device": entered,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "is_initialized": lambda: False,  # there are no random numbers of the device
    "is_current_stream_capturing": lambda: (
        Capture.running is not None and Capture.running.thread == threading.get_ident()
    ),
    "CUDAGraph": Graph,
    "graph": Capture,
    "get_device_name": lambda device=None: "a CPU that plays a GPU",
    "set_device": nothing,
    "synchronize": nothing,
    "empty_cache": empty_cache,
    "manual_seed_all": nothing,
    "_sleep": nothing,
    "mem_get_info": mem_get_info,
    "memory_allocated": lambda device=None: MEMORY.allocated,
    "memory_reserved": lambda device=None: MEMORY.allocated,
    "max_memory_allocated": lambda device=None: MEMORY.peak,
    "reset_peak_memory_stats": lambda device=None: setattr(MEMORY, "peak", MEMORY.allocated),
    "set_per_process_memory_fraction": MEMORY.limit_to,
}

# --- CuPy: kernels ---------------------------------------------------------------------------------------------------


def column(address: int, count: int) -> list[int]:
    """(count,) uint64 in device memory."""
    return np.frombuffer((ctypes.c_char * (8 * count)).from_address(address), np.uint64).tolist() if count else []


def digest(count: int, addresses: int, lengths: int, out: int, what: int, seed: int) -> None:
    """snapstore/engine/cuda/digest.cu."""
    for i, (address, length) in enumerate(zip(column(addresses, count), column(lengths, count), strict=True)):
        data = (ctypes.c_char * length).from_address(address)
        if what == 0:
            ctypes.memmove(out + 16 * i, xxhash.xxh3_128_digest(data, seed), 16)
        else:
            assert not seed, "checksums have none"
            to = address - 8 if what == 2 else out + 8 * i
            ctypes.memmove(to, xxhash.xxh3_64_intdigest(data).to_bytes(8, "little"), 8)


def gather(count: int, sources: int, destinations: int, lengths: int) -> None:
    """snapstore/engine/cuda/gather.cu."""
    columns = (column(at, count) for at in (sources, destinations, lengths))
    for source, destination, length in zip(*columns, strict=True):
        ctypes.memmove(destination, source, length)


def fetch(count: int, source: int, destination: int, length: int) -> None:
    """snapstore/engine/cuda/fetch.cu."""
    assert length <= count * 64 * 1024
    ctypes.memmove(destination, source, length)


#: Kernels that touch every byte several times: the emulator is slow at that. tests/gpu/test_kernels.py runs their code.
ON_HOST: dict[str, Callable[..., None]] = {"digest": digest, "gather": gather, "fetch": fetch}


class RawKernel:
    """One kernel, on this CPU; the emulator takes one at a time."""

    _lock = threading.Lock()

    def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
        assert re.search(rf'extern "C" __global__ void (__launch_bounds__\(.*\) )?{name}\(', code)
        self.name, self.definitions = name, [option for option in options if option.startswith("-D")]

    num_regs = 32
    max_dynamic_shared_size_bytes = 48 * 1024

    def compile(self) -> None: ...

    def kernel(
        self, grid: tuple[int, ...], block: tuple[int], arguments: tuple[np.uint64, ...], shared_mem: int, stream: Any
    ) -> None:
        assert all(isinstance(argument, np.uint64) for argument in arguments), "CuPy would guess at their types"
        assert shared_mem <= self.max_dynamic_shared_size_bytes, f"{self.name} has not asked for so much shared memory"
        values = [int(argument) for argument in arguments]
        if self.name in ON_HOST:
            ON_HOST[self.name](grid[0], *values)
            return
        with self._lock:
            function = getattr(emulated(self.name, *self.definitions), f"launch_{self.name}")
            assert len(function.argtypes) == 3 + len(values), f"{self.name} has other parameters"
            function(*(*grid, 1)[:2], *block, *values)


class CupyDevice(contextlib.nullcontext[None]):
    """cupy.cuda.Device"""

    attributes = types.MappingProxyType({"MaxSharedMemoryPerMultiprocessor": 228 * 1024})  # an H200's


class CUDARuntimeError(RuntimeError):
    """CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status} of cudaError_t")
        self.status = status


class CUDADriverError(CUDARuntimeError):
    """CuPy's."""


class Runtime:
    """cupy.cuda.runtime"""

    CUDARuntimeError = CUDARuntimeError
    memcpyDefault = 4  # noqa: N815

    def __init__(self) -> None:
        self._registered: set[int] = set()

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        unsafe("cudaHostRegister")
        if address in self._registered:
            raise CUDARuntimeError(712)  # cudaErrorHostMemoryAlreadyRegistered
        self._registered.add(address)

    def hostUnregister(self, address: int) -> None:
        unsafe("cudaHostUnregister")
        self._registered.remove(address)

    def memcpyAsync(self, destination: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == self.memcpyDefault
        ctypes.memmove(destination, source, nbytes)


def from_external(stream: Any) -> contextlib.AbstractContextManager[None]:
    """As cupy.cuda.Stream.from_external; torch's streams have the protocol from torch 2.10 on, ours have not."""
    version, address = stream.__cuda_stream__()
    assert version == 0
    assert isinstance(address, int)
    return contextlib.nullcontext()


def cupy() -> types.ModuleType:
    module: Any = types.ModuleType("cupy")
    module.RawKernel = RawKernel
    driver = types.SimpleNamespace(CUDADriverError=CUDADriverError)
    stream = types.SimpleNamespace(null=contextlib.nullcontext(), from_external=from_external)
    module.cuda = types.SimpleNamespace(runtime=Runtime(), driver=driver, Stream=stream, Device=CupyDevice)
    return module


# --- nvCOMP ----------------------------------------------------------------------------------------------------------

DONE, INVALID, CANNOT_DECOMPRESS = 0, 10, 12  # nvcompStatus_t


class Codec:
    """A codec in the place of one of nvCOMP's, with the sizes of nvCOMP 6.0.

    Args:
        block_bytes, room_bytes: the size of the blocks that snapstore makes, and nvCOMP's bound for a compressed one.
        compress_bytes, decompress_bytes: the temporary memory that it needs for each block.
    """

    def __init__(
        self, encode: Callable[[bytes], bytes], decode: Callable[[bytes, int], bytes], block_bytes: int,
        room_bytes: int, compress_bytes: int = 0, decompress_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.encode, self.decode = encode, decode
        self.block_bytes, self.room_bytes = block_bytes, room_bytes
        self.temp_bytes = {"Compress": compress_bytes, "Decompress": decompress_bytes}


def deflated(strategy: int, magic: bytes = b"") -> Callable[[bytes], bytes]:
    def encode(data: bytes) -> bytes:
        stream = zlib.compressobj(1, zlib.DEFLATED, -15, 8, strategy)
        return magic + stream.compress(data) + stream.flush()

    return encode


def inflated(data: bytes, room: int, magic: bytes = b"") -> bytes:
    stream = zlib.decompressobj(-15)
    if not data.startswith(magic):
        raise zlib.error("of another codec")
    return stream.decompress(data[len(magic) :], room)


MAGIC = b"ANS"
CODECS = {
    "Deflate": Codec(deflated(zlib.Z_DEFAULT_STRATEGY), inflated, 65_536, 148_256, compress_bytes=655_400),
    "Zstd": Codec(
        lambda data: zstandard.ZstdCompressor(level=1).compress(data),
        lambda data, room: zstandard.ZstdDecompressor().decompress(data, max_output_size=room),
        65_536, 65_547, compress_bytes=1 << 20, decompress_bytes=203_544,
    ),
    "ANS": Codec(
        deflated(zlib.Z_HUFFMAN_ONLY, MAGIC), lambda data, room: inflated(data, room, MAGIC), 256 * 1024, 363_056,
    ),
}  # fmt: skip


class Function:
    """A function of libnvcomp."""

    argtypes: tuple[Any, ...]
    restype: Any

    def __init__(self, name: str) -> None:
        self._codec = next(codec for key, codec in CODECS.items() if name.startswith(f"nvcompBatched{key}"))
        self._direction = "Decompress" if "Decompress" in name else "Compress"
        self._verb = name.rpartition("press")[2]

    def __call__(self, *arguments: Any) -> int:
        for kind, argument in zip(self.argtypes, arguments, strict=True):
            kind.from_param(argument)  # as ctypes would
        if self._verb == "GetMaxOutputChunkSize":
            return self._room_bytes(*arguments)
        if self._verb == "GetTempSize":
            return self._temp_bytes(*arguments)
        return self._compress(*arguments) if self._direction == "Compress" else self._decompress(*arguments)

    def _room_bytes(self, block_bytes: int, options: Any, out: Any) -> int:
        if block_bytes != self._codec.block_bytes:
            return INVALID
        out._obj.value = self._codec.room_bytes
        return DONE

    def _temp_bytes(self, count: int, block_bytes: int, options: Any, out: Any, total: int, stream: int) -> int:
        out._obj.value = count * self._codec.temp_bytes[self._direction]
        return DONE

    def _lacks(self, count: int, temp: int | None, temp_bytes: int, *addresses: int) -> bool:
        needed = count * self._codec.temp_bytes[self._direction]
        return temp_bytes < needed or bool(needed and not temp) or any(address % 16 for address in addresses)

    def _compress(
        self, blocks: int, sizes: int, largest: int, count: int, temp: int | None, temp_bytes: int, rooms: int,
        out_sizes: int, options: Any, statuses: int, stream: int,
    ) -> int:  # fmt: skip
        places = column(blocks, count), column(sizes, count), column(rooms, count)
        if self._lacks(count, temp, temp_bytes, *places[0], *places[2]) or largest > self._codec.block_bytes:
            return INVALID
        for i, (source, size, room) in enumerate(zip(*places, strict=True)):
            if not 0 < size <= largest:
                return INVALID
            done = self._codec.encode(ctypes.string_at(source, size))
            ctypes.memmove(room, done, len(done))
            _result(out_sizes, statuses, i, len(done), DONE)
        return DONE

    def _decompress(
        self, blocks: int, sizes: int, room_sizes: int, out_sizes: int, count: int, temp: int | None, temp_bytes: int,
        rooms: int, options: Any, statuses: int, stream: int,
    ) -> int:  # fmt: skip
        places = column(blocks, count), column(sizes, count), column(rooms, count), column(room_sizes, count)
        if self._lacks(count, temp, temp_bytes, *places[0], *places[2]):
            return INVALID
        for i, (source, size, room, room_bytes) in enumerate(zip(*places, strict=True)):
            try:
                done = self._codec.decode(ctypes.string_at(source, size), room_bytes)[:room_bytes]
            except (zlib.error, zstandard.ZstdError):
                _result(out_sizes, statuses, i, 0, CANNOT_DECOMPRESS)
            else:
                ctypes.memmove(room, done, len(done))
                _result(out_sizes, statuses, i, len(done), DONE)
        return DONE


def _result(sizes: int, statuses: int, i: int, size: int, status: int) -> None:
    ctypes.c_uint64.from_address(sizes + 8 * i).value = size
    ctypes.c_int.from_address(statuses + 4 * i).value = status


class Library:
    """libnvcomp."""

    def __getattr__(self, name: str) -> Function:
        return Function(name)


def libnvcomp() -> types.ModuleType:
    module: Any = types.ModuleType("nvidia.libnvcomp")
    module.__version__ = "6.0.0.12"
    module.load_library = Library
    return module


# --- all of it -------------------------------------------------------------------------------------------------------


def kind_of(value: Any) -> type:
    """As `type`, but a CudaTensor counts as torch.Tensor: snapstore stores no subclasses."""
    kind = type(value)
    if kind is CudaTensor:
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    return kind


def install() -> None:
    """Give this process a CUDA device."""
    for name in FACTORIES:
        setattr(torch, name, factory(name))
    for name, value in TORCH_CUDA.items():
        setattr(torch.cuda, name, value)
    tensor: Any = torch.Tensor
    tensor.to = transfer
    tensor.cpu = lambda self: transfer(self, "cpu")
    tensor.cuda = lambda self, device=DEVICE: transfer(self, device)
    nvidia: Any = types.ModuleType("nvidia")
    nvidia.libnvcomp = libnvcomp()
    sys.modules |= {"cupy": cupy(), "nvidia": nvidia, "nvidia.libnvcomp": nvidia.libnvcomp}
    from snapstore.engine.cuda import graph_capture, sparse
    from snapstore.state.values import arrays
    from snapstore.state.walk import known_tensors, learner, structure

    arrays.type = structure.type = learner.type = known_tensors.type = kind_of
    graph_capture.driver = lambda: exchange_capture_mode
    # The emulator runs one block after the other; blocks that share a chunk would wait for each other.
    sparse.blocks_of = lambda effort, device: np.ones(len(effort), np.int64)


install()  # before tests/gpu/conftest.py asks whether there is a device


#: By the name of a test module: replacements that make its states smaller. The emulator is slow.
SMALLER: dict[str, dict[str, Callable[[Any], Any]]] = {
    "test_gpu_ans": {
        "DTYPES": lambda names: names[::8],
        "floats": lambda real: lambda count, *args: real(min(count, 15_001), *args),
    },
    "test_gpu_memory": {"MIB": lambda real: real // 32},
    "test_gpu_staging": {"MIB": lambda real: real // 32},
    "test_gpu_graphs": {"MIB": lambda real: real // 256},
    "test_gpu_directions": {"MIB": lambda real: real // 32},
}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Make states smaller, before any fixture makes one."""
    for module in {item.module for item in items}:
        for name, smaller in SMALLER.get(module.__name__, {}).items():
            setattr(module, name, smaller(getattr(module, name)))


@pytest.fixture(autouse=True)
def _guards() -> Iterator[None]:
    """Check that no test writes beyond memory of the device."""
    yield
    overruns, MEMORY.overruns = MEMORY.overruns, []
    assert overruns == []
