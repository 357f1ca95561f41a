"""Captures of CUDA graphs by the training, beside which threads of ours work.

While a graph is being captured, CUDA fails calls such as cudaMalloc and cudaEventQuery of every thread, and the capture
with them, but for threads whose own mode is relaxed: so does torch in the watchdog of NCCL.
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
    """The driver's exchange of a thread's mode, which torch's runtime and CuPy's share; None where there is none."""
    try:
        swap = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    swap.argtypes, swap.restype = (ctypes.POINTER(ctypes.c_int),), ctypes.c_int
    return swap


def exchange(mode: int) -> int | None:
    """Give this thread another mode; its former one, or None if nothing has changed."""
    value, swap = ctypes.c_int(mode), driver()
    return value.value if swap is not None and swap(ctypes.byref(value)) == 0 else None


@contextmanager
def beside_captures() -> Iterator[None]:
    """What this thread calls meanwhile ruins no capture of another thread, and does not fail for one."""
    former = exchange(RELAXED)
    try:
        yield
    finally:
        if former is not None:
            exchange(former)
