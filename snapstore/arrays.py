"""Types of NumPy arrays that many modules share.

`Bytes` is (n,) uint8. `Column` is (n,) of any dtype: one field of many chunks or blobs. Several columns form a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Column = npt.NDArray[Any]
#: Memory that is written with O_DIRECT begins at a multiple of this [bytes].
PAGE_BYTES = 4096


def sums_before(column: Column) -> Column:
    """Return the sums of the items before each item of a column (n,), and the sum of all, (n + 1,) int64."""
    sums = np.zeros(len(column) + 1, np.int64)
    column.cumsum(dtype=np.int64, out=sums[1:])
    return sums


def items_at(data: Bytes, at: Column, dtype: npt.DTypeLike) -> Column:
    """Return copies, (n,), of the items of `dtype` at the byte offsets `at` (n,) of `data`, in any alignment.

    Raises:
        IndexError: an item ends outside of `data`.
    """
    dtype = np.dtype(dtype)
    starts = max(0, data.size - dtype.itemsize + 1)
    found: Column = np.ndarray((starts,), f"V{dtype.itemsize}", data, strides=(1,))[at].view(dtype)
    return found


def empty_pages(nbytes: int) -> Bytes:
    """Return new memory, (nbytes,) uint8, that begins at a page: a file can be written from it with O_DIRECT."""
    memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + nbytes]
