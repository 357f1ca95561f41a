"""Delta chain: the blobs that rebuild one chunk, newest first, as objects; from chunk tables and back into them.

Only the few chunks whose chains change become objects; all others stay columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...arrays import Bytes, Column
from .chunk_table import ChunkTable
from .delta_choice import cost


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a blob: pack, offset, length."""

    pack: str
    offset: int
    length: int


#: Identifies a blob that moves or is new: its old place, or its name (the bytes stored_blobs.NAME of its entry).
BlobKey = Place | bytes


@dataclass(frozen=True, slots=True)
class Link:
    """One blob of a chain.

    Attributes:
        kind, digest, size: its transform, the digest of its chunk, and the size of that chunk [plain bytes].
        place: where the blob lies; None while its pack is not durable.
        key: identifies a blob that is being created or moved.
        is_kept: whether a snapshot holds the chunk itself, not only as a base in its chains.
        new_bytes: its stored bytes while it has no place.
    """

    kind: int
    digest: bytes
    size: int
    place: Place | None
    key: BlobKey = b""
    is_kept: bool = True
    new_bytes: int = 0


Chain = list[Link]


class Numbers:
    """A map of keys to numbers; a key added twice keeps its larger number.

    Keys are uint64, or strings of 16 bytes.

    The keys lie in sorted columns, each at least twice as long as the next, so that merges are rare. Strings are
    searched by their first eight bytes as integers, which is ten times as fast, and then compared in full.
    """

    def __init__(self) -> None:
        self._columns: list[tuple[Column, Column, Column]] = []  # (keys, first halves, numbers)

    def all(self) -> tuple[Column, Column]:
        """Return (sorted keys, numbers)."""
        while len(self._columns) > 1:
            self._merge(*self._columns.pop())
        return (self._columns[0][0], self._columns[0][2]) if self._columns else (np.empty(0, np.uint64), _NO_NUMBERS)

    def add(self, keys: Column, numbers: Column) -> Column:
        """Add keys (n,), which may repeat, with their numbers; return which were there before, (n,) bool."""
        known = np.zeros(len(keys), bool)
        for own, found, at in self._find(keys):
            column, given = self._columns[own][2], numbers[found]
            higher = given > column[at]
            np.maximum.at(column, at[higher], given[higher])
            known[found] = True
        rest, given = keys[~known], numbers[~known]
        order = np.argsort(rest, kind="stable")
        rest, given = rest[order], given[order]
        first = np.ones(len(rest), bool)
        first[1:] = rest[1:] != rest[:-1]
        if len(rest):
            keys = rest[first]
            self._columns.append((keys, _halves_of(keys), np.maximum.reduceat(given, np.flatnonzero(first))))
        while len(self._columns) > 1 and len(self._columns[-2][0]) < 2 * len(self._columns[-1][0]):
            self._merge(*self._columns.pop())
        return known

    def numbers_of(self, keys: Column) -> Column:
        """Return the number of each key, (n,) int64; 0 if unknown."""
        numbers = np.zeros(len(keys), np.int64)
        for own, found, at in self._find(keys):
            numbers[found] = self._columns[own][2][at]
        return numbers

    def _merge(self, keys: Column, _: Column, numbers: Column) -> None:
        """Merge a column into the last one; they share no key."""
        others, _, their = self._columns.pop()
        keys = np.concatenate([others, keys])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        self._columns.append((keys, _halves_of(keys), np.concatenate([their, numbers])[order]))

    def _find(self, keys: Column) -> Iterator[tuple[int, Column, Column]]:
        """Yield (column, indices of keys in it, their rows there)."""
        order = np.argsort(_halves_of(keys))  # a search for sorted keys is three times as fast
        keys = keys[order]
        wanted = _halves_of(keys)
        for number, (column, halves, _) in enumerate(self._columns):
            at = np.minimum(np.searchsorted(halves, wanted), len(column) - 1)
            near = np.flatnonzero(halves[at] == wanted)
            at, sought = at[near], keys[near]
            if len(others := np.flatnonzero(column[at] != sought)):  # different keys with the same first half
                at[others] = np.minimum(np.searchsorted(column, sought[others]), len(column) - 1)
                same = column[at] == sought
                near, at = near[same], at[same]
            yield number, order[near], at


_NO_NUMBERS = np.empty(0, np.int64)


class Digests:
    """A set of digests, each with a number from 0 to 255. A digest with number 0 is not in the set."""

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._numbers = Numbers()
        self.add(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16))

    def add(self, digests: Bytes, numbers: Column | int = 1) -> Column:
        """Add digests (n, 16) with numbers from 0 to 255; return which had been added before, (n,) bool."""
        keys = digest_strings(digests)
        return self._numbers.add(keys, np.broadcast_to(np.asarray(numbers, np.uint8), keys.shape))

    def has(self, digests: Bytes) -> Column:
        """Return which of these digests (n, 16) are in the set, (n,) bool."""
        return np.asarray(self.numbers_of(digests) > 0)

    def numbers_of(self, digests: Bytes) -> Column:
        """Return the largest number that was added for each of these digests (n, 16), or 0; (n,) int64."""
        return self._numbers.numbers_of(digest_strings(digests))


def digest_strings(digests: Bytes) -> Column:
    """Return digests (n, 16) as strings of 16 bytes, (n,), which NumPy sorts; it compares all 16 bytes."""
    return np.ascontiguousarray(digests).view("S16").reshape(-1)


def _halves_of(keys: Column) -> Column:
    """Return keys as integers that sort alike: the first eight bytes of strings."""
    return keys.view(">u8")[::2].astype(np.uint64) if keys.dtype.kind == "S" else keys


def chains_of(table: ChunkTable, packs: Sequence[str], rows: Column, kept: Digests) -> Iterator[Chain]:
    """Yield the chains of some rows of a table.

    Args:
        packs: hex names; `table.ref_packs` are indices in it.
        kept: digests of the chunks that snapshots hold themselves.
    """
    refs = table.refs_of(rows)
    is_kept = kept.has(table.ref_digests[refs]).tolist()
    links = [
        Link(kind, digest.tobytes(), size, Place(packs[number], offset, length), b"", keep)
        for kind, digest, size, number, offset, length, keep in zip(
            table.ref_kinds[refs].tolist(),
            table.ref_digests[refs],
            np.repeat(table.lengths[rows], table.ref_counts[rows]).tolist(),
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
    """Return chains as a table.

    Args:
        numbers: packs -> their numbers in the table; new packs are added. A link without a place gets pack 0.
    """
    links = [link for chain in chains for link in chain]
    nowhere = Place("", 0, 0)
    places = [link.place or nowhere for link in links]
    digests = np.frombuffer(b"".join(link.digest for link in links), np.uint8).reshape(-1, 16)
    counts = np.array([len(chain) for chain in chains], np.uint16)
    return ChunkTable(
        digests=digests[np.cumsum(counts, dtype=np.int64) - counts],
        lengths=np.array([chain[0].size for chain in chains], np.uint32),
        ref_counts=counts,
        ref_kinds=np.array([link.kind for link in links], np.uint8),
        ref_packs=np.array([numbers.setdefault(p.pack, len(numbers)) if p.pack else 0 for p in places], np.uint32),
        ref_offsets=np.array([p.offset for p in places], np.uint64),
        ref_lengths=np.array([p.length for p in places], np.uint32),
        ref_digests=digests,
    )


def cost_of(chain: Chain) -> float:
    """Return the cost to rebuild a chunk [bytes] (`delta_choice.cost`)."""
    stored_bytes = sum(link.place.length if link.place else link.new_bytes for link in chain)
    return float(cost(stored_bytes, chain[0].size, len(chain))) if chain else 0.0


def edge_of(chain: Chain) -> tuple[int, int] | None:
    """Return the edge of a chain's first run of links that are not kept; None if all links are kept.

    The edge is (index of the kept link before the run, or -1; index of the kept link after it, or the chain's length).
    """
    for i, link in enumerate(chain):
        if not link.is_kept:
            behind = next((j for j in range(i, len(chain)) if chain[j].is_kept), len(chain))
            return i - 1, behind
    return None
