"""The limits of the machine, to compare figures with: copies on the device and over PCIe, and files with fsync."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpu_train import State, tensors

MiB, GiB = 1024**2, 1024**3
PIECE_BYTES = 16 * MiB


def synchronize(device: torch.device) -> None:
    """Wait for everything that was given to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, call: Callable[[], object], repeat: int = 1) -> float:
    """Wall time of one call, the device's work included; the mean of `repeat` calls in one go."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeat):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / repeat


def median(device: torch.device, call: Callable[[], object], times: int = 5, repeat: int = 1) -> float:
    """The median of several `seconds`, after one call that is not counted."""
    call()
    return statistics.median(seconds(device, call, repeat) for _ in range(times))


def device_copy(device: torch.device, size: int) -> float:
    """Read and written bytes per second of one large contiguous copy on the device."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(device, lambda: target.copy_(source), repeat=10)


def device_clone(device: torch.device, state: State) -> float:
    """Seconds to clone every tensor, with the allocator warm."""
    return median(device, lambda: [tensor.clone() for tensor in tensors(state)])


def pinned_copies(device: torch.device, size: int) -> tuple[float, float]:
    """Bytes per second (to the host, from the host) of one large contiguous copy from and to pinned memory."""
    pinned = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    up = size / median(device, lambda: there.copy_(pinned, non_blocking=True), repeat=2)
    down = size / median(device, lambda: pinned.copy_(there, non_blocking=True), repeat=2)
    return down, up


def pinned_copy_of(device: torch.device, state: State) -> float:
    """Seconds to copy every tensor into pinned buffers of its own that are there already."""
    pairs = [(torch.empty_like(t, device="cpu", pin_memory=device.type == "cuda"), t) for t in tensors(state)]
    return median(device, lambda: [room.copy_(tensor, non_blocking=True) for room, tensor in pairs])


def write_files(folder: Path, size: int, threads: int, file_bytes: int) -> float:
    """Seconds to write `size` bytes as files of `file_bytes` from `threads` threads; each file and its folder fsynced.

    The files are removed again, outside the time.
    """
    data = memoryview(os.urandom(min(PIECE_BYTES, file_bytes)))
    starts = range(0, size, file_bytes)

    def write(start: int) -> Path:
        path = folder / f"raw-{start}"
        left = min(file_bytes, size - start)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        while left > 0:
            left -= os.write(descriptor, data[: min(left, len(data))])
        os.fsync(descriptor)
        os.close(descriptor)
        fsync_folder(folder)
        return path

    os.sync()
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        paths = list(pool.map(write, starts))
        took = time.perf_counter() - began
    for path in paths:
        path.unlink()
    return took


def read_cached(folder: Path, size: int, threads: int) -> float:
    """Bytes per second of reading a file that is in the page cache, in pieces, from `threads` threads."""
    path = folder / "cached"
    path.write_bytes(os.urandom(min(size, PIECE_BYTES)) * max(1, size // PIECE_BYTES))
    total = path.stat().st_size
    share = -(-total // threads)

    def read(number: int) -> None:
        room = memoryview(bytearray(PIECE_BYTES))
        with path.open("rb", buffering=0) as file:
            file.seek(number * share)
            left = max(0, min(share, total - number * share))
            while left > 0:
                left -= file.readinto(room[: min(left, PIECE_BYTES)]) or left

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
        began = time.perf_counter()
        list(pool.map(read, range(threads)))
        took = time.perf_counter() - began
    path.unlink()
    return total / took


def cached_to_device(folder: Path, size: int, threads: int, device: torch.device) -> float:
    """Bytes per second from a file in the page cache to a device, through pinned memory that `threads` threads fill."""
    path = folder / "cached"
    path.write_bytes(os.urandom(min(size, PIECE_BYTES)) * max(1, size // PIECE_BYTES))
    total = path.stat().st_size
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(total, dtype=torch.uint8, device=device)
    rooms = pinned.numpy().data

    def move(start: int) -> None:
        end = min(total, start + PIECE_BYTES)
        at = start
        while at < end:
            at += os.preadv(descriptor, [rooms[at:end]], at)
        there[start:end].copy_(pinned[start:end], non_blocking=True)

    with path.open("rb") as file, ThreadPoolExecutor(threads) as pool:
        descriptor = file.fileno()
        took = median(device, lambda: list(pool.map(move, range(0, total, PIECE_BYTES))))
    path.unlink()
    return total / took


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Make a file, or all files under a folder, durable."""
    files: Sequence[Path] = [path, *path.rglob("*")] if path.is_dir() else [path, path.parent]
    for file in files:
        fsync_folder(file)
