"""Boxes: rectangular parts of tensors, the cuts of their chunks, and the overlap of two boxes.

In: offsets and sizes, one per dimension. Out: spans of bytes. The strip of a box is the box extended over all of
dimension 0. The bytes of a box in C order are consecutive in its strip. A strip is cut at multiples of the chunk size
(docs/design/ranks.md, "Cuts").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Offsets = Sequence[int]
Sizes = Sequence[int]


def strip_start(offsets: Offsets, sizes: Sizes, itemsize: int) -> int:
    """Return where a box begins in its strip [bytes]."""
    return offsets[0] * math.prod(sizes[1:]) * itemsize if sizes else 0


def cut(start: int, nbytes: int, chunk_bytes: int) -> npt.NDArray[np.int64]:
    """Return the chunk lengths (n,) of a box at byte `start` of its strip [bytes]."""
    if not nbytes:
        return np.zeros(0, np.int64)
    inner = np.arange(start // chunk_bytes + 1, -(-(start + nbytes) // chunk_bytes)) * chunk_bytes
    ends = np.concatenate([inner, [start + nbytes]])
    return np.diff(ends, prepend=start)


def overlap(a: tuple[Offsets, Sizes], b: tuple[Offsets, Sizes]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the box that two boxes (offsets, sizes) share; None if there is none."""
    offsets = tuple(map(max, a[0], b[0]))
    ends = [min(p + m, q + n) for p, m, q, n in zip(a[0], a[1], b[0], b[1], strict=True)]
    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def start_of(at: Offsets, sizes: Sizes) -> int:
    """Return the number of elements before index `at`, in C order."""
    start = 0
    for offset, size in zip(at, sizes, strict=True):
        start = start * size + offset
    return start


def is_run(inner: Sizes, sizes: Sizes) -> bool:
    """Return whether a box of sizes `inner` is contiguous within a box of `sizes`, in C order."""
    behind = False  # whether an earlier dimension of the inner box has more than one row
    for size, whole in zip(inner, sizes, strict=True):
        if behind and size != whole:
            return False
        behind = behind or size > 1
    return True


def counts_before(
    ends: npt.NDArray[np.int64], at: Offsets, inner: Sizes, sizes: Sizes, steps: Sequence[int] = ()
) -> npt.NDArray[np.int64]:
    """Count the elements of an inner box that lie before positions of the box around it, in C order.

    Args:
        ends: (n,) positions in the outer box, from 0 to its number of elements.
        at, inner: offsets and sizes of the inner box.
        sizes: of the outer box.
        steps: the distance between neighbouring elements of the inner box, one per dimension; by default 1.

    Returns:
        (n,) int64.
    """
    counts = np.zeros(len(ends), np.int64)
    is_within = np.ones(len(ends), bool)
    left, stride, own = ends, math.prod(sizes), math.prod(inner)
    for offset, count, size, step in zip(at, inner, sizes, steps or [1] * len(sizes), strict=True):
        stride, own = stride // size, own // count
        row, left = np.divmod(left, stride)
        counts += np.where(is_within, np.clip(-((offset - row) // step), 0, count) * own, 0)
        is_within &= (row >= offset) & (row < offset + count * step) & ((row - offset) % step == 0)
    return counts


def span_boxes(first: int, end: int, sizes: Sizes) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the elements `first` to `end` - 1 of a box into boxes (offsets, sizes), in C order.

    There are at most two boxes per dimension, and one more.
    """
    if first >= end:
        return []
    if len(sizes) == 1:
        return [((first,), (end - first,))]
    inner = math.prod(sizes[1:])
    (top, before), (bottom, behind) = divmod(first, inner), divmod(end, inner)
    if top == bottom:
        return [((top, *at), (1, *count)) for at, count in span_boxes(before, behind, sizes[1:])]
    found = []
    if before:
        found += [((top, *at), (1, *count)) for at, count in span_boxes(before, inner, sizes[1:])]
        top += 1
    if top < bottom:
        found.append(((top, *(0 for _ in sizes[1:])), (bottom - top, *sizes[1:])))
    return found + [((bottom, *at), (1, *count)) for at, count in span_boxes(0, behind, sizes[1:])]
