"""Kernels: CUDA C++, one operation per .cu file of this folder, compiled by CuPy for each device that has an engine.

In: columns of addresses, in device memory. A launch returns at once; the kernel runs in the order of its stream. A
Separate threads compile the kernels of a device, which takes seconds on a new machine. An earlier launch waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any

import cupy
import numpy as np
import torch

from ...errors import SnapstoreError
from ...threads import Pending, Threads, no_threads
from ..cpu import default_threads
from .graph_capture import beside_captures

#: Kernel -> the element size [bytes] for which it is compiled. One kernel for all sizes took as long to compile as all
#: other kernels together.
APPLY = {f"sparse_apply_{size}": size for size in (1, 2, 4, 8)}
#: Kernel -> threads of a block, in the order in which they are compiled: the longest ones first.
THREADS = {
    "sparse_count": 512,
    "sparse_rank": 512,
    **dict.fromkeys(APPLY, 512),
    "split": 256,
    "huffman_encode": 256,
    "digest": 544,
    "merge": 256,
    "sparse_pack": 512,
    "huffman_decode": 32,
    "sparse_unpack": 128,
    "sparse_tables": 128,
    "histograms": 256,
    "gather": 256,
    "fetch": 256,
    "sparse_place": 128,
    "sparse_lows": 128,
}
#: Kernels that are compiled at the same time, if there are as many cores.
_COMPILED_AT_ONCE = 8
#: Bytes of a chunk that a thread block of `sparse_apply` takes at a time -> its dynamic shared memory [bytes]. More
#: bytes are faster if a multiprocessor has the memory of two such blocks. Every device of compute capability 7 or newer
#: has at least 64 KiB of shared memory.
APPLY_SHARED_BYTES = {32 * 1024: 112 * 1024, 16 * 1024: 60 * 1024}
#: Shared memory that CUDA itself takes for each thread block [bytes].
_SYSTEM_SHARED_BYTES = 1024
#: Bytes of a chunk that one thread block of `split` and of `merge` takes.
SPLIT_TILE_BYTES, MERGE_TILE_BYTES = 16 * 256 * 4, 16 * 256 * 2
#: The most bytes that a thread block of `gather` moves for a batch, and that one of `fetch` moves.
PIECE_BYTES = 64 * 1024
#: Modes of `digest`: seeded XXH3-128; XXH3-64; XXH3-64 written to the 8 bytes before its input.
XXH3_128, XXH3_64, SEAL = 0, 1, 2


@cache
def apply_tile_bytes(device: int) -> int:
    """Return how many bytes of a chunk a thread block of `sparse_apply` takes at a time on a device."""
    room = cupy.cuda.Device(device).attributes["MaxSharedMemoryPerMultiprocessor"]
    fitting = (tile for tile, shared in APPLY_SHARED_BYTES.items() if 2 * (shared + _SYSTEM_SHARED_BYTES) <= room)
    return max(fitting, default=min(APPLY_SHARED_BYTES))


def _shared_bytes(name: str, device: int) -> int:
    return APPLY_SHARED_BYTES[apply_tile_bytes(device)] if name in APPLY else 0


def _source(name: str) -> str:
    """Return the source of a kernel, with the headers that it needs; the CPU engine has those of `native` too."""
    engine = resources.files("snapstore.engine")
    cuda, native = engine / "cuda", engine / "native"
    headers = {
        "memory.cuh": True,
        "xxh3.h": name == "digest",
        "huffman_tree.h": name in ("huffman_encode", "huffman_decode"),
        "zstd.cuh": name in ("huffman_decode", "sparse_tables"),
        "sparse.cuh": name.startswith("sparse_"),
    }
    files = [(native if file.endswith(".h") else cuda) / file for file, used in headers.items() if used]
    return "".join(file.read_text() for file in [*files, cuda / f"{name}.cu"])


def _kernel(name: str, device: int) -> Any:
    """Compile a kernel of this folder for a device. CuPy caches the binary for all devices of the same kind."""
    options = ["-std=c++17"]
    if name in APPLY:
        options += [f"-DTILE_BYTES={apply_tile_bytes(device)}", f"-DELEMENT_SIZE={APPLY[name]}"]
        name = "sparse_apply"
    return cupy.RawKernel(_source(name), name, options=tuple(options))


@dataclass(frozen=True, slots=True)
class _Pointer:
    """A stream by CUDA's stream protocol. torch's own streams follow it from torch 2.10 on."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _stream(pointer: int, device: int) -> Any:
    """Return CuPy's object for a stream of torch, on the current device; torch never destroys those of its pool.

    There is one object for each stream, and it is kept: CuPy 14 destroys a stream with any object for it.
    """
    if not pointer:
        return cupy.cuda.Stream.null
    found = _streams.get((pointer, device))
    if found is None:
        with _lock:
            found = _streams.get((pointer, device))
            if found is None:
                found = _streams[pointer, device] = _stream_of(pointer, device)
    return found


def _stream_of(pointer: int, device: int) -> Any:
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        return cupy.cuda.Stream.from_external(_Pointer(pointer))
    return cupy.cuda.ExternalStream(pointer, device)


def start_loading(device: int) -> Pending[None]:
    """Begin to compile and load all kernels of a device; calling the result waits until they are loaded.

    All kernels are loaded now, since later the device may have no memory for them. The modules that compiling imports
    are imported already: a thread must not be the first to import a module (threads.py).

    Raises:
        CapabilityError: the thread cannot be started.
    """
    with _lock:
        if device not in _loads:
            loading = Pending(_load, [device])
            try:
                threading.Thread(target=loading.compute, args=[0], name="snapstore-kernels").start()
            except RuntimeError as error:
                raise no_threads() from error
            _loads[device] = loading
        return _loads[device]


def loaded(device: int) -> bool:
    """Return whether the kernels of a device can be launched without a wait."""
    load = _loads.get(device)
    return load is not None and load.succeeded()


def wait_loaded(device: int) -> None:
    """Wait until the kernels of a device are loaded.

    Raises:
        Exception: the one that loading raised; the next `start_loading` tries again.
    """
    try:
        start_loading(device)()
    except SnapstoreError:
        raise
    except Exception:
        with _lock:
            _loads.pop(device, None)
        raise


_loads: dict[int, Pending[None]] = {}  # device -> the loading of its kernels
#: (kernel, device) -> its function, which costs the host less time to call than a RawKernel; its shared memory [bytes].
_functions: dict[tuple[str, int], tuple[Any, int]] = {}
_streams: dict[tuple[int, int], Any] = {}  # (address, device) -> CuPy's object
_lock = threading.Lock()


def _load(device: int) -> None:
    with Threads(min(_COMPILED_AT_ONCE, default_threads())) as threads:
        threads.start(partial(_load_one, device), list(THREADS))()


def _load_one(device: int, name: str) -> None:
    with beside_captures(), torch.cuda.device(device):  # CuPy's Device would make a context on device 0 at its end
        kernel = _kernel(name, device)
        kernel.compile()
        kernel.num_regs  # noqa: B018  # the driver loads a kernel when an attribute is first read
        if shared := _shared_bytes(name, device):
            kernel.max_dynamic_shared_size_bytes = shared
        _functions[name, device] = kernel.kernel, shared


def launch(name: str, grid: tuple[int, ...], stream: torch.cuda.Stream, arguments: Sequence[int]) -> None:
    """Enqueue a kernel on a stream.

    Args:
        name: of the kernel; the first launch waits until the device's kernels are loaded.
        grid: numbers of thread blocks, (x,) or (x, y).
        arguments: addresses or numbers, in the order of the kernel's parameters.
    """
    device = stream.device.index
    if not loaded(device):
        wait_loaded(device)
    with torch.cuda.device(device):
        function, shared = _functions[name, device]
        values = tuple(map(np.uint64, arguments))
        function(grid, (THREADS[name],), values, shared, _stream(stream.cuda_stream, device))
