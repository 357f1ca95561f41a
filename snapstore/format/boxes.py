"""Boxes: rectangular parts of tensors, the strips that their chunks are cut by, and where two boxes overlap.

In: offsets and sizes, one per dimension. Out: spans of bytes. A strip is a box extended over all of dimension 0; the
bytes of a box in C order are consecutive in its strip (docs/design/ranks.md, "Cuts").
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
    """Return the lengths (n,) of the chunks of a box that begins at `start` of its strip."""
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
