"""Columns over the chunks of a save: where each one begins in its tensor, and where it is stored.

In: the inputs of a save. Out: the chunks of each, for chunk_writer.py, which fills the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from ..arrays import Bytes, Column
from ..format.manifests.boxes import cut, strip_start
from ..state.values.arrays import Memory
from ..state.values.tensors import TensorSpec
from .inputs import TensorInput
from .known_chunks import BoxPlace, place_of


class ChunkRange(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Consecutive chunks of one tensor, or of one box of it."""

    tensor: TensorInput
    first_row: int  # the row of the first chunk
    data: Memory
    base: Memory | None  # its bytes in the first base, if they are cached where the engine works
    starts: Column  # (n,) where each chunk begins in the data [bytes]
    lengths: Column  # (n,) [bytes]
    candidates: Column  # (n,) row of the chunk at its place in a base, or -1
    numbers: Column  # (n,) a number for each chunk, by which chunks take turns to be stored full

    def part(self, rows: slice) -> ChunkRange:
        """Return some of the chunks."""
        columns = (self.starts, self.lengths, self.candidates, self.numbers)
        first_row = self.first_row + rows.start
        return ChunkRange(self.tensor, first_row, self.data, self.base, *(column[rows] for column in columns))


@dataclass(slots=True)
class Rows:
    """Columns over chunks of this save."""

    numbers: Column  # (n,) the row of each
    digests: Bytes  # (n, 16)
    lengths: Column  # (n,)
    sources: Column  # (n,) the row whose blob this chunk has: the first one of equal chunks
    base_rows: Column  # (n,) the row among the bases of the chunk itself, or of the base of its delta; -1: neither
    blobs: Column  # (n, 4) kind, pack, offset and length of its own blob; -1: none

    @staticmethod
    def concatenate(rows: Sequence[Rows]) -> Rows:
        """Return all rows as one, in order."""
        nothing = np.empty(0, np.int64)
        rows = [
            Rows(nothing, np.empty((0, 16), np.uint8), nothing, nothing, nothing, np.empty((0, 4), np.int64)),
            *rows,
        ]
        columns = zip(*((r.numbers, r.digests, r.lengths, r.sources, r.base_rows, r.blobs) for r in rows), strict=True)
        numbers, *others = map(np.concatenate, columns)
        order = np.argsort(numbers)
        return Rows(numbers[order], *(column[order] for column in others))


def places_in(tensor: TensorInput, number: int, chunk_bytes: int) -> tuple[BoxPlace, Column, Column, Column, Column]:
    """Cut a tensor, or a box of one, into chunks; see `_cuts_of`."""
    spec, of = tensor.spec, tensor.box_of
    whole, offsets = (spec.shape, None) if of is None else (of.spec.shape, of.piece.offsets)
    return _cuts_of(spec, whole, offsets, number, chunk_bytes)


@lru_cache(maxsize=1 << 15)  # each save cuts the same tensors
def _cuts_of(
    spec: TensorSpec, whole: tuple[int, ...], offsets: tuple[int, ...] | None, number: int, chunk_bytes: int
) -> tuple[BoxPlace, Column, Column, Column, Column]:
    """Cut a tensor, or a box of one, into chunks; those of a box end where the chunks of its strip end.

    Args:
        spec: of the tensor or the box.
        whole, offsets: the shape of the tensor, and where the box lies in it; None: it is the whole tensor.
        number: of the tensor within its part.

    Returns:
        Its place; and of each chunk (n,): where it begins in the box and in its strip, and its length [bytes], and its
        number (see `_ChunkRange`). They are read-only.
    """
    if offsets is None:
        start, place = 0, place_of(spec.path, spec.dtype, spec.shape)
    else:
        start = strip_start(offsets, spec.shape, spec.itemsize)
        place = place_of(spec.path, spec.dtype, whole, offsets, spec.shape)
    lengths = cut(start, spec.nbytes, chunk_bytes)
    starts = np.cumsum(lengths) - lengths
    columns = starts, lengths, start + starts, np.arange(len(starts)) + (number + start // chunk_bytes)
    for column in columns:
        column.setflags(write=False)
    return place, *columns
