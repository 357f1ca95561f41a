"""Chunk table: the digest and the chain of blobs of every chunk of a manifest, as columns; no object per chunk.

In: columns. Out: their bytes as stored (docs/format.md, "Manifest"), and back; rows selected or joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays import Bytes, sums_before
from ...errors import FormatError, UnknownFormatError
from ..chunking import XOR

MAX_CHAIN = 255
#: dtype of every column, and shape of a row, in the order in which they are stored.
COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "digests": ("u1", (16,)),
    "lengths": ("<u4", ()),
    "ref_counts": ("<u2", ()),
    "ref_kinds": ("u1", ()),
    "ref_packs": ("<u4", ()),
    "ref_offsets": ("<u8", ()),
    "ref_lengths": ("<u4", ()),
    "ref_digests": ("u1", (16,)),
}
_PER_CHUNK = ("digests", "lengths", "ref_counts")


@dataclass(slots=True)
class ChunkTable:
    """Columns over chunks, and one flat table of references (CSR), newest first within a chunk."""

    digests: Bytes  # (n, 16) uint8
    lengths: npt.NDArray[np.uint32]  # (n,) [plain bytes]
    ref_counts: npt.NDArray[np.uint16]  # (n,)
    ref_kinds: npt.NDArray[np.uint8]  # (m,) chunking.FULL, DIFFERENCE or XOR
    ref_packs: npt.NDArray[np.uint32]  # (m,) index into the manifest's packs
    ref_offsets: npt.NDArray[np.uint64]  # (m,)
    ref_lengths: npt.NDArray[np.uint32]  # (m,)
    ref_digests: Bytes  # (m, 16) uint8; the first of every chunk is the chunk's digest, and is not stored
    starts: npt.NDArray[np.int64] = field(init=False)  # (n + 1,) the first reference of every chunk, and m

    def __post_init__(self) -> None:
        self.starts = sums_before(self.ref_counts)

    @classmethod
    def empty(cls) -> ChunkTable:
        """Return a table of no chunks."""
        return cls(**{name: np.empty((0, *shape), dtype) for name, (dtype, shape) in COLUMNS.items()})

    @classmethod
    def from_bytes(cls, raw: Mapping[str, bytes]) -> ChunkTable:
        """Return a table from its columns as stored; only `check` finds out whether they agree.

        Raises:
            KeyError: a column is missing.
            FormatError: a column does not consist of whole rows, a chain is empty, or the numbers of chunks, references
                and digests contradict each other.
        """
        columns = {name: _column(raw[name], name) for name in COLUMNS}
        digests, counts, others = columns["digests"], columns["ref_counts"].astype(np.int64), columns["ref_digests"]
        is_first = np.zeros(len(digests) + len(others), bool)
        if not counts.all():
            raise FormatError(f"a chain of 0 references, expected 1 to {MAX_CHAIN}")
        if len(counts) != len(digests) or counts.sum() != len(is_first):
            raise FormatError(f"{len(digests)} digests and {len(others)} of references, for {counts.sum()} references")
        is_first[np.cumsum(counts) - counts] = True
        columns["ref_digests"] = np.empty((len(is_first), 16), np.uint8)
        columns["ref_digests"][is_first], columns["ref_digests"][~is_first] = digests, others
        return cls(**columns)

    def to_bytes(self) -> dict[str, bytes | memoryview]:
        """Return every column as stored."""
        raw: dict[str, bytes | memoryview] = {}
        for name, (dtype, _) in COLUMNS.items():
            column = np.ascontiguousarray(getattr(self, name), dtype)
            if name == "ref_digests":
                column = np.delete(column, self.starts[:-1], axis=0)
            raw[name] = column.reshape(-1).view(np.uint8).data if column.size else b""
        return raw

    def __len__(self) -> int:
        return len(self.ref_counts)

    @property
    def depths(self) -> npt.NDArray[np.int64]:
        """Return the number of deltas in each chunk's chain, (n,)."""
        return self.ref_counts.astype(np.int64) - 1

    @property
    def chain_bytes(self) -> npt.NDArray[np.int64]:
        """Return the stored bytes of every chunk's chain, (n,)."""
        return np.add.reduceat(self.ref_lengths, self.starts[:-1], dtype=np.int64)

    def chain_bytes_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `chain_bytes` of these chunks."""
        counts = self.ref_counts[rows].astype(np.int64)
        return np.add.reduceat(self.ref_lengths[self.refs_of(rows)], np.cumsum(counts) - counts, dtype=np.int64)

    def refs_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the indices of all references of `rows`, chunk after chunk."""
        return spans(self.starts[rows], self.ref_counts[rows].astype(np.int64))

    def take(self, rows: npt.NDArray[np.int64]) -> ChunkTable:
        """Return the table of the chunks `rows`."""
        refs = self.refs_of(rows)
        return ChunkTable(**{name: getattr(self, name)[rows if name in _PER_CHUNK else refs] for name in COLUMNS})

    def from_links(self, rows: npt.NDArray[np.int64], refs: npt.NDArray[np.int64]) -> ChunkTable:
        """Return a table of older chunks: those of the references `refs` (k,) in the chains of `rows` (k,)."""
        counts = self.starts[rows + 1] - refs
        kept = spans(refs, counts)
        columns = {name: getattr(self, name)[kept] for name in COLUMNS if name not in _PER_CHUNK}
        columns |= {"digests": self.ref_digests[refs], "lengths": self.lengths[rows]}
        return ChunkTable(ref_counts=counts.astype(np.uint16), **columns)

    @classmethod
    def concatenate(cls, tables: Sequence[ChunkTable]) -> ChunkTable:
        """Concatenate tables; their `ref_packs` must already be numbers in one list of packs."""
        if not tables:
            return cls.empty()
        return cls(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS})

    def check(self, chunks: int, chunk_bytes: int, pack_sizes: npt.NDArray[np.uint64], where: str) -> None:
        """Check everything that readers rely on: no damaged or hostile table can lead them out of bounds.

        Args:
            chunks, chunk_bytes, pack_sizes: from the manifest's header; pack_sizes (p,) in bytes.

        Raises:
            FormatError: the table is inconsistent.
            UnknownFormatError: a reference is of a kind that this release does not know.
        """
        refs = int(self.starts[-1])
        per_ref = (len(getattr(self, name)) for name in COLUMNS if name not in _PER_CHUNK)
        per_chunk = (len(getattr(self, name)) for name in _PER_CHUNK)
        if any(count != chunks for count in per_chunk) or any(count != refs for count in per_ref):
            raise FormatError(f"{where}: columns of {[len(getattr(self, f.name)) for f in fields(self)]} rows disagree")
        if not len(self):
            return
        last = self.starts[1:] - 1
        if self.ref_counts.min() < 1 or self.ref_counts.max() > MAX_CHAIN:
            least, most = self.ref_counts.min(), self.ref_counts.max()
            raise FormatError(f"{where}: chains of {least} to {most} references, expected 1 to {MAX_CHAIN}")
        if self.ref_kinds.max() > XOR:
            raise UnknownFormatError(
                f"{where}: a reference of kind {self.ref_kinds.max()}, which this snapstore does not know; use the "
                "release that wrote it, or a newer one"
            )
        if self.ref_kinds[last].any() or np.count_nonzero(self.ref_kinds) != refs - len(self):
            raise FormatError(f"{where}: a chain is not delta, ..., delta, full")
        if self.ref_packs.max() >= len(pack_sizes):
            raise FormatError(f"{where}: a reference to a pack that the header does not name")
        if self.lengths.max() > chunk_bytes or self.lengths.min() < 1:
            least, most = self.lengths.min(), self.lengths.max()
            raise FormatError(f"{where}: chunks of {least} to {most} bytes, expected 1 to {chunk_bytes}")
        ends = self.ref_offsets + self.ref_lengths
        if (ends > pack_sizes[self.ref_packs]).any() or (ends < self.ref_offsets).any():
            raise FormatError(f"{where}: a reference beyond the end of its pack")


def spans(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Concatenate ranges: starts[0], starts[0] + 1, ... (counts[0] numbers), then the next range."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def _column(raw: bytes, name: str) -> npt.NDArray[Any]:
    dtype, shape = COLUMNS[name]
    row = np.dtype(dtype).itemsize * (16 if shape else 1)
    if len(raw) % row:
        raise FormatError(f"column {name!r} of {len(raw)} bytes, expected a multiple of {row}")
    return np.frombuffer(raw, dtype).reshape(-1, *shape)
