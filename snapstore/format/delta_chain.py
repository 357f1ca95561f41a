"""Delta chain: the blobs that rebuild one chunk, newest first, as objects; from chunk tables and back into them.

Only the few chunks whose chains change take this form; all others stay columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Bytes, Column
from .chunk_table import ChunkTable


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a blob: pack, offset, length."""

    pack: str
    offset: int
    length: int


#: A blob on its way to a new place: the place where it lay, or the name (stored_blobs.NAME) of a new blob.
Key = Place | bytes


@dataclass(frozen=True, slots=True)
class Link:
    """One blob of a chain.

    Attributes:
        kind, digest, size: its transform, the chunk that it stands for, and the size of that chunk [plain bytes].
        place: where it lies; None while its pack is not durable.
        key: identifies a blob that is being created or moved.
        is_kept: whether some snapshot holds the chunk as its own.
    """

    kind: int
    digest: bytes
    size: int
    place: Place | None
    key: Key = b""
    is_kept: bool = True


Chain = list[Link]


class Digests:
    """A set of digests, as sorted columns, each at least twice as long as the next, so that merges are rare."""

    def __init__(self, parts: Iterable[Bytes] = ()) -> None:
        self._columns: list[Column] = []
        for part in parts:
            self.add(part)

    def __len__(self) -> int:
        return sum(map(len, self._columns))

    def add(self, digests: Bytes) -> None:
        """Add digests (n, 16)."""
        keys = np.sort(_keys(digests))
        new = np.ones(len(keys), bool)
        new[1:] = keys[1:] != keys[:-1]
        new &= ~self._has(keys)
        column = keys[new]
        while self._columns and len(self._columns[-1]) < 2 * len(column):
            column = np.sort(np.concatenate([self._columns.pop(), column]), kind="stable")
        if len(column):
            self._columns.append(column)

    def has(self, digests: Bytes) -> Column:
        """Return which of these digests (n, 16) are in the set, (n,) bool."""
        keys = _keys(digests)
        order = np.argsort(keys)  # searching keys in order is three times as fast
        found = np.empty(len(keys), bool)
        found[order] = self._has(keys[order])
        return found

    def _has(self, keys: Column) -> Column:
        found = np.zeros(len(keys), bool)
        for column in self._columns:
            found |= column[np.minimum(np.searchsorted(column, keys), len(column) - 1)] == keys
        return found


def _keys(digests: Bytes) -> Column:
    """Return digests as strings of 16 bytes, which NumPy sorts; it compares them padded with zeros, so in full."""
    return np.ascontiguousarray(digests).view("S16").reshape(-1)


def chains_of(table: ChunkTable, packs: Sequence[str], rows: Column, kept: Digests) -> Iterator[Chain]:
    """Yield the chains of these rows of a table."""
    refs = table.refs_of(rows)
    is_kept = kept.has(table.ref_digests[refs]).tolist()
    links = [
        Link(kind, digest.tobytes(), size, Place(packs[number], offset, length), b"", keep)
        for kind, digest, size, number, offset, length, keep in zip(
            table.ref_kinds[refs].tolist(),
            table.ref_digests[refs],
            table.ref_sizes[refs].tolist(),
            *(column[refs].tolist() for column in (table.ref_packs, table.ref_offsets, table.ref_lengths)),
            is_kept,
            strict=True,
        )
    ]
    at = 0
    for count in table.ref_counts[rows].tolist():
        yield links[at : at + count]
        at += count


def table_of(chains: Sequence[Chain], numbers: dict[str, int]) -> ChunkTable:
    """Return chains as a table. `numbers` maps packs to numbers and gets new ones; a link without a place: pack 0."""
    links = [link for chain in chains for link in chain]
    nowhere = Place("", 0, 0)
    places = [link.place or nowhere for link in links]
    digests = np.frombuffer(b"".join(link.digest for link in links), np.uint8).reshape(-1, 16)
    counts = np.array([len(chain) for chain in chains], np.uint16)
    return ChunkTable(
        digests=digests[np.cumsum(counts, dtype=np.int64) - counts],
        ref_counts=counts,
        ref_kinds=np.array([link.kind for link in links], np.uint8),
        ref_packs=np.array([numbers.setdefault(p.pack, len(numbers)) if p.pack else 0 for p in places], np.uint32),
        ref_offsets=np.array([p.offset for p in places], np.uint64),
        ref_lengths=np.array([p.length for p in places], np.uint32),
        ref_digests=digests,
        ref_starts=np.zeros(len(links), np.uint32),
        ref_sizes=np.array([link.size for link in links], np.uint32),
    )


def edge_of(chain: Chain) -> tuple[int, int] | None:
    """Return where a chain leaves the kept links: (last kept link before, next kept link or the chain's length).

    None: all links are kept.
    """
    for i, link in enumerate(chain):
        if not link.is_kept:
            behind = next((j for j in range(i, len(chain)) if chain[j].is_kept), len(chain))
            return i - 1, behind
    return None
