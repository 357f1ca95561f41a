"""Kernels: CUDA C++, one operation per .cu file of this folder, compiled by CuPy for each device that has an engine.

In: columns of addresses, in device memory. A launch returns at once; the stream orders it. A thread of its own compiles
the kernels of a device, which takes seconds on a new machine; a launch before that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import cupy
import numpy as np
import torch

from ...errors import SnapstoreError
from ...threads import Pending, no_threads
from .graph_capture import beside_captures

THREADS = {
    "digest": 544,
    "histograms": 256,
    "split": 256,
    "merge": 256,
    "gather": 256,
    "huffman_encode": 256,
    "huffman_decode": 32,
    "sparse_tables": 128,
    "sparse_place": 128,
    "sparse_lows": 128,
    "sparse_unpack": 128,
    "sparse_apply": 512,
    "sparse_count": 512,
    "sparse_rank": 512,
    "sparse_pack": 512,
}
#: Dynamic shared memory of a thread block [bytes]; devices of compute capability 7 and newer have 64 KiB or more.
SHARED_BYTES = {"sparse_apply": 60 * 1024}
#: Bytes of a chunk that one thread block of `split` and of `merge` takes.
SPLIT_TILE_BYTES, MERGE_TILE_BYTES = 16 * 256 * 4, 16 * 256 * 2
#: Bytes that one thread block of `gather` should move.
PIECE_BYTES = 64 * 1024
#: Modes of `digest`: seeded XXH3-128; XXH3-64; XXH3-64 written into the 8 bytes before its input.
XXH3_128, XXH3_64, SEAL = 0, 1, 2


@cache
def _kernel(name: str) -> Any:
    """Return a kernel of this folder; CuPy compiles and loads it once per device, and caches the binary."""
    folder = resources.files(__package__)
    shared = {"zstd.cuh": name in ("huffman_decode", "sparse_tables"), "sparse.cuh": name.startswith("sparse_")}
    files = ["memory.cuh", *(file for file, used in shared.items() if used), f"{name}.cu"]
    code = "".join((folder / file).read_text() for file in files)
    return cupy.RawKernel(code, name, options=("-std=c++17",))


@cache
def _stream(pointer: int, device: int) -> Any:
    """Return CuPy's object for a stream of torch; torch never destroys the streams of its pool."""
    if not pointer:  # torch would take an ExternalStream of it for another stream
        return cupy.cuda.Stream.null
    stream = torch.cuda.ExternalStream(pointer, torch.device("cuda", device))
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(pointer, device)


def start_loading(device: int) -> Pending[None]:
    """Begin to compile all kernels of a device and to make the driver load them; the result waits for that.

    All of them, at once: later the device may have no memory for it. Whatever compiling imports is imported by now.
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
    return device in _loads and _loads[device].ready(0)


def wait_loaded(device: int) -> None:
    """Wait until the kernels of a device are loaded.

    Raises:
        Exception: the one that ended the loading; the next `start_loading` tries again.
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
_lock = threading.Lock()


def _load(device: int) -> None:
    with beside_captures(), torch.cuda.device(device):  # CuPy's would make a context on device 0 when it ends
        for name in THREADS:
            _kernel(name).compile()
            _kernel(name).num_regs  # noqa: B018  # the driver loads a kernel when it is first asked about
        for name, nbytes in SHARED_BYTES.items():
            _kernel(name).max_dynamic_shared_size_bytes = nbytes


def launch(name: str, grid: tuple[int, ...], stream: torch.cuda.Stream, arguments: Sequence[int]) -> None:
    """Enqueue a kernel on a stream.

    Args:
        grid: thread blocks, (x,) or (x, y).
        arguments: addresses or numbers, in the order of the kernel's parameters.
    """
    device = stream.device.index
    if not loaded(device):
        wait_loaded(device)
    with cupy.cuda.Device(device), _stream(stream.cuda_stream, device):
        values = tuple(np.uint64(argument) for argument in arguments)
        _kernel(name)(grid, (THREADS[name],), values, shared_mem=SHARED_BYTES.get(name, 0))
