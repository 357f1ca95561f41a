"""Batches: the arguments of engines, as columns with one row per chunk; and one chunk's share, for the CPU engine.

In: memories, and columns of positions in them. Out: the same, selected or joined; no byte of a chunk is copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import Bytes, Column
from ..format.blobs import planes
from ..state.values.arrays import Memory
from ..threads import Gate


@dataclass(frozen=True, slots=True)
class Chunks:
    """Spans of a few memories, as columns."""

    memories: Sequence[Memory]
    which: Column  # (n,) index of the memory; -1: no chunk
    starts: Column  # (n,) the first byte in that memory
    lengths: Column  # (n,) [bytes]
    gate: Gate | None = None  # closed: the memories may not be used any more

    def __len__(self) -> int:
        return len(self.which)

    def take(self, rows: Column | slice) -> Chunks:
        """Return the chunks of these rows."""
        return Chunks(self.memories, self.which[rows], self.starts[rows], self.lengths[rows], self.gate)

    def views(self) -> list[Memory]:
        """Return a view of each chunk, (r,) uint8; an empty one for index -1."""
        nothing = np.empty(0, np.uint8)
        return [
            self.memories[w][s : s + n] if w >= 0 else nothing
            for w, s, n in zip(self.which.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]

    def joined(self, others: Chunks) -> Chunks:
        """Return these chunks, then the others."""
        which = np.where(others.which >= 0, others.which + len(self.memories), -1)
        return Chunks(
            [*self.memories, *others.memories],
            np.concatenate([self.which, which]),
            np.concatenate([self.starts, others.starts]),
            np.concatenate([self.lengths, others.lengths]),
            self.gate or others.gate,
        )

    @staticmethod
    def of(memories: Sequence[Memory]) -> Chunks:
        """Return each memory as one chunk."""
        lengths = np.array([len(memory) for memory in memories], np.int64)
        return Chunks(memories, np.arange(len(memories)), np.zeros(len(memories), np.int64), lengths)


@dataclass(frozen=True, slots=True)
class MadeBlobs:
    """Blobs of some chunks, made while they were examined, as columns."""

    entries: npt.NDArray[np.void]  # (n,) blob.ENTRY without offsets; length 0: there is no blob
    places: Chunks  # (n,) where the blobs lie
    tried: Column  # (n,) bool; if there is no blob although it was tried, the reference must encode the chunk

    def take(self, rows: Column | slice) -> MadeBlobs:
        """Return these rows."""
        return MadeBlobs(self.entries[rows], self.places.take(rows), self.tried[rows])


@dataclass(frozen=True, slots=True)
class Examination:
    """Chunks of a state to hash, and to compare with the chunks at the same places in a base, as columns."""

    chunks: Chunks
    element_sizes: Column  # (n,) 1, 2, 4 or 8
    layouts: Column  # (n,) planes.ROTATED for floats, else planes.BYTES
    bases: Chunks  # (n,) index -1: no base in memory
    delta_limits: Column  # (n,) the most stored bytes that a delta may take; -1: no delta is wanted
    wanted: Column  # (n,) bool, the chunks to encode at once if they differ from their bases and the engine can
    copies: Chunks | None = None  # (n,) where to copy chunks that were not encoded; None: they are not copied
    xor: bool = False  # as in EncodeBatch

    def take(self, rows: Column | slice) -> Examination:
        """Return these rows."""
        return Examination(*_taken(self, rows))


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of an Examination. If copies were wanted, the digests and the blobs are those of copies."""

    digests: Bytes  # (n, 16) of the chunks
    base_digests: Bytes  # (n, 16); without a meaning if there is no base
    copied: Column  # (n,) 1 if there is a copy
    made: MadeBlobs | None = None


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """New chunks to store, as columns."""

    chunks: Chunks
    digests: Bytes  # (n, 16)
    element_sizes: Column  # (n,) 1, 2, 4 or 8
    layouts: Column  # (n,) planes.ROTATED for floats, else planes.BYTES
    bases: Chunks  # (n,) plain bytes of the candidate bases; index -1: no base
    base_digests: Bytes  # (n, 16)
    delta_limits: Column  # (n,) the most stored bytes that a delta may take
    raw: bool = False  # True: the CPU engine stores chunks uncompressed, or as sparse deltas
    xor: bool = False  # True: deltas are XORs; False: differences
    made: MadeBlobs | None = None  # blobs that are there already; the bytes of their chunks are not

    def take(self, rows: Column | slice) -> EncodeBatch:
        """Return these rows."""
        return EncodeBatch(*_taken(self, rows))


def _taken(batch: Any, rows: Column | slice) -> list[Any]:
    """Return the fields of a batch for some rows."""
    columns = [getattr(batch, field.name) for field in fields(batch)]
    return [
        c if c is None or isinstance(c, bool) else c.take(rows) if isinstance(c, Chunks | MadeBlobs) else c[rows]
        for c in columns
    ]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Chunks to rebuild, one row each. Their blobs are columns: chunk after chunk, newest first."""

    stored: Bytes  # the buffer that holds all blobs
    offsets: Column  # (m,) of each blob in `stored`
    lengths: Column  # (m,)
    counts: Column  # (n,) how many blobs each chunk has
    digests: Bytes  # (n, 16)
    outs: Chunks  # (n,) the memory to fill
    where: Callable[[int], str]  # names a blob in an error
    bases: Chunks | None = None  # (n,) plain bytes of the base of each last blob; None, or index -1: that blob is full
    gate: Gate = field(default_factory=Gate)  # closed: `outs` must not be written any more


class EncodeJob(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One chunk's share of an EncodeBatch."""

    chunk: Bytes
    digest: bytes
    element_size: int
    layout: int = planes.BYTES
    base: Bytes | None = None
    base_digest: bytes = b""
    delta_limit: int = 0
    xor: bool = False


class EncodedChunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One new blob, in a buffer that `recycle` takes back."""

    data: memoryview
    is_delta: bool
    buffer: Bytes


class DecodeJob(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One chunk's share of a DecodeBatch."""

    blobs: Sequence[memoryview]  # newest first
    wheres: Sequence[str]
    digest: bytes
    out: Bytes  # (r,) uint8, filled
    base: Bytes | None = None
