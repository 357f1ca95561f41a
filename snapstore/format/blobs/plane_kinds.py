"""Plane kinds: the kind of a plane, which decides its codec, and the estimated stored size of planes.

In: entropies of planes, and the shares of their most frequent bytes. Out: kinds, and estimated bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays import Column
from . import codecs, planes

#: A plane with more bits per byte than this is stored raw: a Huffman table costs more than it saves.
RAW_ABOVE_BITS = 7.9
#: A plane whose most frequent byte has at least this share is coded as runs (docs/design/cpu-engine.md).
RUNS_ABOVE_SHARE = 0.78
#: Stored bytes that a coded block costs beyond its entropy: frame header, Huffman table, jump table.
BLOCK_OVERHEAD_BYTES = 96
#: Kinds of planes: noise; skewed noise; mostly one value; planes of chunks that are not floats, which may have repeats.
NOISE, SKEWED, RUNS, REPEATS = range(4)


def estimate_bytes(bits: Sequence[float], plane_bytes: int) -> float:
    """Estimate the stored bytes of planes by their entropies [bits per byte]."""
    overhead = BLOCK_OVERHEAD_BYTES * -(-plane_bytes // codecs.BLOCK_BYTES)
    return sum(plane_bytes if b > RAW_ABOVE_BITS else min(plane_bytes, plane_bytes * b / 8 + overhead) for b in bits)


def estimates(bits: npt.NDArray[np.float64], element_sizes: Column, plane_bytes: Column) -> npt.NDArray[np.float64]:
    """Estimate the stored bytes of many chunks, (n,), equal to `estimate_bytes`: planes are added up in order.

    Args:
        bits: (n, 8) entropies [bits per byte].
        element_sizes, plane_bytes: (n,), of each chunk and of each of its planes.
    """
    size = plane_bytes[:, None].astype(np.float64)
    overhead = BLOCK_OVERHEAD_BYTES * np.ceil(size / codecs.BLOCK_BYTES)
    stored = np.where(bits > RAW_ABOVE_BITS, size, np.minimum(size, size * bits / 8 + overhead))
    total: npt.NDArray[np.float64] = (stored * (np.arange(8) < element_sizes[:, None])).cumsum(axis=1)[:, -1]
    return total


def plane_kinds(bits: npt.NDArray[np.float64], top_share: npt.NDArray[np.float64], layout: Any) -> Any:
    """Return NOISE, SKEWED, RUNS or REPEATS for every plane; the arguments broadcast."""
    of_floats = np.where(top_share >= RUNS_ABOVE_SHARE, RUNS, SKEWED)
    return np.where(bits > RAW_ABOVE_BITS, NOISE, np.where(layout == planes.BYTES, REPEATS, of_floats))
