"""Graph capture: background threads work while the training captures a CUDA graph.

While a thread captures a graph, calls such as cudaMalloc and cudaEventQuery fail in every thread, and they make the
capture fail. A thread whose capture mode is relaxed is exempt. torch's watchdog of NCCL relaxes its mode too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def driver() -> Any:
    """Return the driver's cuThreadExchangeStreamCaptureMode, which torch and CuPy share; None if it is missing."""
    try:
        swap = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    swap.argtypes, swap.restype = (ctypes.POINTER(ctypes.c_int),), ctypes.c_int
    return swap


def exchange(mode: int) -> int | None:
    """Set this thread's capture mode; return the previous mode, or None if the call failed."""
    value, swap = ctypes.c_int(mode), driver()
    return value.value if swap is not None and swap(ctypes.byref(value)) == 0 else None


@contextmanager
def beside_captures() -> Iterator[None]:
    """Relax this thread's mode: its calls neither break another thread's capture nor fail during it."""
    former = exchange(RELAXED)
    try:
        yield
    finally:
        if former is not None:
            exchange(former)
