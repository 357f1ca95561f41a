"""Stored blobs: blobs in memory as they are stored, with their footer entries; their names, and where duplicates lie.

For rewrites only: a restore needs no names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes, Column
from ..chunks.verify import Verifier
from ..engine.base import Engine
from ..engine.batches import EncodeBatch
from ..errors import IntegrityError
from ..format.blobs import blob
from ..format.blobs.blob import ENTRY
from ..format.blobs.pack import Encoded
from ..format.manifests.delta_chain import Place

#: The bytes of a footer entry that name its blob, wherever it lies: transform, element size, digest, base.
NAME = np.array([16, 17, *range(32, 64)])
_NAME = f"S{len(NAME)}"


@dataclass(frozen=True, slots=True)
class StoredBlobs:
    """Blobs in host memory, one after the other; see `pack.Encoded`."""

    entries: npt.NDArray[np.void]
    blobs: Bytes

    def copy(self, first: int, last: int, out: Bytes) -> Callable[[], object]:
        """Copy blobs, with their padding, into `out`; the returned call has nothing to wait for."""
        begin = int(self.entries["offset"][first])
        out[:] = self.blobs[begin : begin + out.size]
        return lambda: None

    def take(self, rows: Column) -> StoredBlobs:
        """Return a copy of the blobs in some rows."""
        entries = np.zeros(len(rows), ENTRY)
        entries[:] = self.entries[rows]
        offsets, stored = laid_out(entries["length"])
        for old, new, length in zip(entries["offset"].tolist(), offsets.tolist(), lengths_of(entries), strict=True):
            stored[new : new + length] = self.blobs[old : old + length]
        entries["offset"] = offsets
        return StoredBlobs(entries, stored)


def gathered(made: Sequence[Encoded]) -> StoredBlobs:
    """Copy the blobs that an engine has encoded into one memory."""
    entries = np.zeros(sum(len(encoded.entries) for encoded in made), ENTRY)
    entries[:] = np.concatenate([encoded.entries for encoded in made])
    offsets, stored = laid_out(entries["length"])
    entries["offset"], ends, first = offsets, [*offsets[1:].tolist(), stored.size], 0
    for encoded in made:
        last = first + len(encoded.entries)
        encoded.copy(0, last - first, stored[offsets[first] : ends[last - 1]])()
        first = last
    return StoredBlobs(entries, stored)


def stored_of(blobs: Sequence[memoryview]) -> StoredBlobs:
    """Copy blobs, whose headers were checked, into one memory, one after the other."""
    offsets, stored = laid_out(np.array([len(data) for data in blobs], np.int64))
    entries = b"".join(blob.entry(data, offset) for data, offset in zip(blobs, offsets.tolist(), strict=True))
    for data, offset in zip(blobs, offsets.tolist(), strict=True):
        stored[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    return StoredBlobs(np.frombuffer(entries, ENTRY), stored)


def verified(engine: Engine, batch: EncodeBatch, made: Sequence[Encoded]) -> StoredBlobs:
    """Copy the blobs of a batch that an engine has encoded into one memory, and decode them.

    Raises:
        IntegrityError: a blob does not decode to its source.
    """
    stored = gathered(made)
    engine.recycle(made)
    verifier = Verifier("what it was made of", "nothing was changed; try again")
    verifier.start(engine, batch, stored)
    verifier.finish()
    return stored


def bytes_of(entries: npt.NDArray[np.void]) -> Bytes:
    """Return entries as they are stored, (n, 96); a view."""
    return entries.view(np.uint8).reshape(-1, ENTRY.itemsize)


def digests_of(entries: npt.NDArray[np.void]) -> Bytes:
    """Return the digests of the chunks, (n, 16)."""
    return bytes_of(np.ascontiguousarray(entries))[:, 32:48]


def lengths_of(entries: npt.NDArray[np.void]) -> list[int]:
    """Return the stored bytes of the blobs, (n,)."""
    lengths: list[int] = entries["length"].tolist()
    return lengths


def names_of(entries: npt.NDArray[np.void]) -> list[bytes]:
    """Return the names of the blobs: which blob each entry is, wherever it lies."""
    joined = bytes_of(np.ascontiguousarray(entries))[:, NAME].tobytes()
    return [joined[i : i + len(NAME)] for i in range(0, len(joined), len(NAME))]


def parse(data: memoryview, name: bytes, where: str) -> blob.Header:
    """Return the header of a blob.

    Raises:
        FormatError, IntegrityError: the blob is damaged, or has another name.
    """
    header = blob.parse(data, where)
    if bytes([header.transform, header.element_size]) + header.digest + header.base != name:
        raise IntegrityError(f"{where}: not the blob that the pack's footer says; run 'snapstore check --read-data'")
    return header


def laid_out(lengths: Column) -> tuple[npt.NDArray[np.int64], Bytes]:
    """Return (offsets, zeroed memory) for blobs of these lengths, one after the other."""
    rooms = (lengths.astype(np.int64) + blob.ALIGNMENT - 1) // blob.ALIGNMENT * blob.ALIGNMENT
    return np.cumsum(rooms) - rooms, np.zeros(int(rooms.sum()), np.uint8)


def batches(sizes: Column, engine: Engine) -> Iterator[Column]:
    """Yield consecutive indices in batches that an engine takes at a time, by their sizes [bytes]."""
    ends = np.cumsum(sizes, dtype=np.int64)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + engine.batch_bytes, "right"))
        last = min(max(last, first + 1), first + engine.batch_chunks)
        yield np.arange(first, last)
        first = last


class Duplicates:
    """The places of stored blobs by their names: columns of the blobs that were there, and a dict of newer ones.

    Attributes:
        newer: name -> place, of the blobs that this run has put.
    """

    def __init__(self, listed: Iterable[tuple[str, npt.NDArray[np.void]]]) -> None:
        self._packs: list[str] = []
        parts = [(np.empty(0, _NAME), np.empty(0, np.uint32), np.empty(0, np.uint64), np.empty(0, np.uint32))]
        for number, (name, entries) in enumerate(listed):
            self._packs.append(name)
            numbers = np.full(len(entries), number, np.uint32)
            parts.append((_sortable(entries), numbers, entries["offset"].copy(), entries["length"].copy()))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        self._names, self._numbers, self._offsets, self._lengths = (column[order] for column in columns)
        self.newer: dict[bytes, Place] = {}

    def find(self, entries: npt.NDArray[np.void]) -> dict[int, Place]:
        """Return index -> place, for each entry whose name and length a stored blob has too."""
        wanted, lengths = _sortable(entries), lengths_of(entries)
        at = np.searchsorted(self._names, wanted)
        at[at == len(self._names)] = 0
        hits = np.flatnonzero(self._names[at] == wanted) if len(self._names) else at[:0]
        columns = (hits, *(column[at[hits]] for column in (self._numbers, self._offsets, self._lengths)))
        found = {
            i: Place(self._packs[number], offset, length)
            for i, number, offset, length in zip(*(column.tolist() for column in columns), strict=True)
        }
        found.update({i: self.newer[name] for i, name in enumerate(names_of(entries)) if name in self.newer})
        return {i: place for i, place in found.items() if place.length == lengths[i]}


def _sortable(entries: npt.NDArray[np.void]) -> Column:
    """Return names as strings, which NumPy sorts; it compares them padded with zeros, so none is cut short."""
    return np.ascontiguousarray(bytes_of(np.ascontiguousarray(entries))[:, NAME]).view(_NAME).reshape(-1)
