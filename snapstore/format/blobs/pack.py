"""Pack: many blobs in one immutable object named by the SHA-256 of its bytes (docs/format.md, "Pack").

In: blobs in tensor order. Out: one buffer per pack; and back: the listing of a pack, and ranges of packs joined into
longer reads. A PackWriter belongs to one thread; reads may run in any thread.

    header, 64 bytes        footer entry, 96 bytes         trailer, 32 bytes
     0  8 magic SNAPPACK     0  8 offset of the blob        0  8 offset of the footer
     8  2 version            8  4 length of the blob        8  4 entries
    10  2 zero              12  4 raw length               12  4 length of the part's name
    12  4 rank              16  1 transform                16  8 XXH3-64 of footer and name
    16 16 save id           17  1 element size             24  8 magic SNAPFOOT
    32  8 sequence number   18  6 zero
    40 16 snapshot id       24  8 codecs
    56  4 revision          32 16 digest
    60  4 zero              48 16 digest of the base
                            64 32 stored length of plane 0 to 7
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...arrays import Bytes, Column
from ...errors import FormatError, IntegrityError
from ...storage.base import ObjectStore
from ..hashing import checksum
from ..records import MadeFor, wrong_version
from . import blob

DEFAULT_PACK_BYTES = 32 * 1024 * 1024
#: A state that would fill more packs than this goes into large packs, as listings and headers grow with their number.
MANY_PACKS, LARGE_PACK_BYTES = 16 * 1024, 128 * 1024 * 1024
HEADER = struct.Struct("<8sHHI16sQ16sI4x")
TRAILER = struct.Struct("<QIIQ8s")
MAGIC, FOOTER_MAGIC = b"SNAPPACK", b"SNAPFOOT"
VERSION = 1
ENTRY = blob.ENTRY
#: Ranges with a smaller gap are read as one: a seek or a request costs more than these bytes.
JOIN_GAP_BYTES = 64 * 1024
#: Ranges with wider gaps, up to this size, are joined too, the narrowest gaps first, while these gaps are at most this
#: share of the wanted bytes. One more read costs a thread of Python the time of half a megabyte.
WIDE_GAP_BYTES, WIDE_GAPS_SHARE = 512 * 1024, 1 / 10
#: If a disk cannot read some bytes, ranges are read without the gaps of at least a page between them [bytes].
PAGE_BYTES = 4096
#: Ranges are joined to reads of at most this size, so that memory stays bounded.
JOIN_MAX_BYTES = 16 * 1024 * 1024


class PackWriter:
    """Collects blobs in one buffer; `seal` returns the pack's bytes.

    Args:
        save_id: (16 bytes) id of the session.
        sequence: number of the pack within session and rank.
        buffer: (n,) uint8 of an earlier pack, to be reused; a larger one replaces it when needed.
        made_for: the record that will need the pack; by default revision 0 of the snapshot `save_id`.

    Attributes:
        count: how many blobs the pack has.
        size_bytes: bytes of the pack so far.
        grown: whether a larger buffer has replaced the given one.
    """

    def __init__(
        self,
        save_id: bytes,
        rank: int,
        sequence: int,
        part: str,
        buffer: Bytes | None = None,
        *,
        made_for: MadeFor | None = None,
    ) -> None:
        self.buffer = np.empty(HEADER.size, np.uint8) if buffer is None else buffer
        self._entries: list[bytes] = []
        self._part = part
        self._copies: list[Callable[[], object]] = []  # waits for copies that still write into the buffer
        self.count = 0
        self.size_bytes = 0
        self.grown = False
        record = made_for or MadeFor(save_id, 0)
        self._write(HEADER.pack(MAGIC, VERSION, 0, rank, save_id, sequence, record.snapshot, record.revision))

    def _room(self, nbytes: int) -> Bytes:
        """Return the next `nbytes` of the buffer."""
        end = self.size_bytes + nbytes
        if end > self.buffer.size:
            self.sync()
            grown = np.empty(max(end, 2 * self.buffer.size), np.uint8)
            grown[: self.size_bytes] = self.buffer[: self.size_bytes]
            self.buffer, self.grown = grown, True
        room = self.buffer[self.size_bytes : end]
        self.size_bytes = end
        return room

    def _write(self, data: bytes) -> None:
        self._room(len(data))[:] = np.frombuffer(data, np.uint8)

    def sync(self) -> None:
        """Wait for copies into the buffer."""
        while self._copies:
            self._copies.pop()()

    def extend(self, encoded: Encoded, first: int, last: int) -> npt.NDArray[np.int64]:
        """Add the blobs `first` to `last` - 1; return their offsets in the pack, (n,)."""
        entries = np.zeros(last - first, ENTRY)  # not copy(): it leaves the bytes between the fields undefined
        entries[:] = encoded.entries[first:last]
        begin = int(entries["offset"][0])
        end = int(entries["offset"][-1]) + int(entries["length"][-1])
        moved = entries["offset"].astype(np.int64) + (self.size_bytes - begin)
        entries["offset"] = moved
        self._copies.append(encoded.copy(first, last, self._room(end - begin + -end % blob.ALIGNMENT)))
        self._entries.append(entries.tobytes())
        self.count += last - first
        return moved

    def seal(self) -> memoryview:
        """Add the footer; return all bytes of the pack, in `buffer`. Call it last."""
        self.sync()
        start, name = self.size_bytes, self._part.encode()
        footer = b"".join(self._entries) + name
        self._write(footer)
        self._write(TRAILER.pack(start, self.count, len(name), checksum(footer), FOOTER_MAGIC))
        return self.buffer[: self.size_bytes].data


class Encoded(Protocol):
    """New blobs of a batch, in host or device memory."""

    @property
    def entries(self) -> npt.NDArray[np.void]:
        """Return (n,) ENTRY; every offset is a multiple of ALIGNMENT, and the blobs follow each other."""

    def copy(self, first: int, last: int, out: Bytes) -> Callable[[], object]:
        """Begin to copy blobs `first` to `last` - 1 into `out`, padded with zeros; return a call that waits."""


@dataclass(frozen=True, slots=True)
class PackHeader:
    """The header of a pack: its writer and its record."""

    rank: int
    save_id: bytes
    sequence: int
    made_for: MadeFor


@dataclass(frozen=True, slots=True)
class PackListing:
    """The contents of a pack by its header and its footer."""

    header: PackHeader
    part: str
    entries: npt.NDArray[np.void]  # (n,) ENTRY


def read_header(store: ObjectStore, key: str) -> PackHeader:
    """Read the first 64 bytes of a pack.

    Raises:
        FormatError: not a pack.
        UnknownFormatError: of another version.
        NotFoundError, IntegrityError: the pack is missing, or shorter than its header.
    """
    head = store.get_range(key, 0, HEADER.size)
    magic, version, _, rank, save_id, sequence, snapshot, revision = HEADER.unpack(head)
    if (magic, version) != (MAGIC, VERSION):
        raise wrong_version(key, "pack", (magic, version), (MAGIC, VERSION))
    return PackHeader(rank, save_id, sequence, MadeFor(snapshot, revision))


def read_listing(store: ObjectStore, key: str, size_bytes: int) -> PackListing:
    """Read header and footer of a pack of `size_bytes`.

    Raises:
        FormatError, IntegrityError: see `read_header`, or the footer is damaged. The blobs can still be found one after
            the other (docs/format.md, "Pack").
    """
    header = read_header(store, key)
    if size_bytes < HEADER.size + TRAILER.size:
        raise IntegrityError(f"{key}: {size_bytes} bytes, expected at least {HEADER.size + TRAILER.size}")
    tail = store.get_range(key, size_bytes - TRAILER.size, TRAILER.size)
    start, count, name_bytes, check, magic = TRAILER.unpack(tail)
    length = count * ENTRY.itemsize + name_bytes
    if magic != FOOTER_MAGIC or start < HEADER.size or start + length + TRAILER.size != size_bytes:
        raise IntegrityError(f"{key}: damaged footer; run 'snapstore check --read-data'")
    footer = store.get_range(key, start, length)
    if checksum(footer) != check:
        raise IntegrityError(f"{key}: footer checksum mismatch; run 'snapstore check --read-data'")
    entries = np.frombuffer(footer, ENTRY, count)
    try:
        return PackListing(header, bytes(footer[count * ENTRY.itemsize :]).decode(), entries)
    except UnicodeDecodeError as error:
        raise FormatError(f"{key}: the part's name is not UTF-8") from error


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One read of neighbouring ranges of a pack, and the position of its bytes in a batch's buffer."""

    pack: int
    offset: int
    length: int
    position: int


def plan_reads(packs: Column, offsets: Column, lengths: Column) -> tuple[list[RangeRead], npt.NDArray[np.int64], int]:
    """Join neighbouring ranges of packs into reads.

    Args:
        packs, offsets, lengths: (m,) the pack of every blob to read, its offset and its length [bytes].

    Returns:
        The reads, by pack; the position of each blob in the buffer, (m,) int64; the length of the buffer [bytes].
    """
    order = np.lexsort((offsets, packs))
    pack, start = packs[order], offsets[order]
    end = start + lengths[order]
    begins = np.ones(len(order), bool)  # whether a read begins with this range
    same_pack = np.diff(pack) == 0
    is_repeated = np.concatenate([[False], same_pack & (np.diff(start) == 0)])[: len(order)]
    wanted_bytes = int((end - start)[~is_repeated].sum())
    begins[1:] = ~(same_pack & _joined(start[1:] - end[:-1], same_pack, wanted_bytes))
    first = np.flatnonzero(begins)
    for i in np.flatnonzero(np.maximum.reduceat(end, first) - start[first] > JOIN_MAX_BYTES).tolist():
        at, last = int(first[i]), int(first[i + 1]) if i + 1 < len(first) else len(order)
        while at < last:
            begins[at] = True
            within = np.searchsorted(np.maximum.accumulate(end[at:last]), start[at] + JOIN_MAX_BYTES, "right")
            at += max(1, int(within))
    first = np.flatnonzero(begins)
    sizes = np.maximum.reduceat(end, first) - start[first]
    before = np.cumsum(sizes) - sizes
    columns = (pack[first], start[first], sizes, before)
    read = np.cumsum(begins) - 1
    positions = np.empty(len(order), np.int64)
    positions[order] = before[read] + start - start[first][read]
    return list(map(RangeRead, *(column.tolist() for column in columns))), positions, int(sizes.sum())


def apart(reads: Sequence[RangeRead], offsets: Column, lengths: Column, positions: Column) -> list[RangeRead]:
    """Split reads at the gaps of a page or more between their ranges.

    Args:
        reads: some of the reads that `plan_reads` has returned for these ranges.
        offsets, lengths: (m,) of the ranges.
        positions: (m,) of the ranges in the buffer, from `plan_reads`.

    Returns:
        More reads than before, without these gaps; an empty list if there is no such gap.
    """
    order = np.argsort(positions, kind="stable")
    order = order[lengths[order] > 0]
    ascending = positions[order]
    found: list[RangeRead] = []
    for read in reads:
        first, end = np.searchsorted(ascending, (read.position, read.position + read.length))
        starts = ascending[first:end]
        reach = np.maximum.accumulate(starts + lengths[order[first:end]])
        gaps = np.flatnonzero(starts[1:] - reach[:-1] >= PAGE_BYTES) + 1
        for i, j in pairwise([0, *gaps.tolist(), len(starts)]):
            if i < j:
                start, length = int(starts[i]), int(reach[j - 1] - starts[i])
                found.append(RangeRead(read.pack, read.offset + start - read.position, length, start))
    return found if len(found) > sum(read.length > 0 for read in reads) else []


def _joined(gaps: Column, same_pack: Column, wanted_bytes: int) -> Column:
    """Return which gaps to read with the ranges around them; `same_pack`: gaps within a pack."""
    joined: Column = gaps <= JOIN_GAP_BYTES
    wide = np.flatnonzero(same_pack & ~joined & (gaps <= WIDE_GAP_BYTES))
    wide = wide[np.argsort(gaps[wide], kind="stable")]
    joined[wide[np.cumsum(gaps[wide]) <= WIDE_GAPS_SHARE * wanted_bytes]] = True
    return joined
