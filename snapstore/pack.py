"""Pack: many blobs in one immutable object named by the SHA-256 of its bytes (docs/format.md, "Pack").

In: blobs in tensor order. Out: one buffer a pack; and back: ranges of packs into blobs, neighbours joined into long
reads. A PackWriter belongs to one thread; reads may run in any.

    header, 64 bytes        footer entry, 96 bytes         trailer, 32 bytes
     0  8 magic SNAPPACK     0  8 offset of the blob        0  8 offset of the footer
     8  2 version            8  4 length of the blob        8  4 entries
    10  2 zero              12  4 raw length               12  4 length of the part's name
    12  4 rank              16  1 transform                16  8 XXH3-64 of footer and name
    16 16 save id           17  1 element size             24  8 magic SNAPFOOT
    32  8 sequence number   18  6 zero
    40 24 zero              24  8 codecs
                            32 16 digest
                            48 16 digest of the base
                            64 32 stored length of plane 0 to 7
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import blob
from .digest import Bytes, checksum
from .errors import FormatError, IntegrityError
from .storage import ObjectStore

DEFAULT_PACK_BYTES = 32 * 1024 * 1024
HEADER = struct.Struct("<8sHHI16sQ24x")
TRAILER = struct.Struct("<QIIQ8s")
MAGIC, FOOTER_MAGIC = b"SNAPPACK", b"SNAPFOOT"
VERSION = 1
ENTRY = np.dtype(
    {
        "names": [
            "offset",
            "length",
            "raw_bytes",
            "transform",
            "element_size",
            "codecs",
            "digest",
            "base",
            "plane_bytes",
        ],
        "formats": ["<u8", "<u4", "<u4", "u1", "u1", ("u1", 8), "V16", "V16", ("<u4", 8)],
        "offsets": [0, 8, 12, 16, 17, 24, 32, 48, 64],
        "itemsize": 96,
    }
)
#: Ranges nearer than this are read as one: a seek, or a request, costs more than these bytes.
JOIN_GAP_BYTES = 64 * 1024
#: And no single read grows beyond this, so that memory stays bounded.
JOIN_MAX_BYTES = 16 * 1024 * 1024


class PackWriter:
    """Collects blobs in one buffer; `seal` gives the pack's bytes.

    Args:
        buffer: (n,) uint8 of an earlier pack to use again; it grows when it must.
    """

    def __init__(self, save_id: bytes, rank: int, sequence: int, part: str, buffer: Bytes | None = None) -> None:
        self.buffer = np.empty(HEADER.size, np.uint8) if buffer is None else buffer
        self._entries: list[bytes] = []
        self._part = part
        self.size_bytes = 0
        self._write(HEADER.pack(MAGIC, VERSION, 0, rank, save_id, sequence))

    def _write(self, data: bytes | memoryview) -> None:
        end = self.size_bytes + len(data)
        if end > self.buffer.size:
            grown = np.empty(max(end, 2 * self.buffer.size), np.uint8)
            grown[: self.size_bytes] = self.buffer[: self.size_bytes]
            self.buffer = grown
        self.buffer[self.size_bytes : end] = np.frombuffer(data, np.uint8)
        self.size_bytes = end

    def append(self, data: memoryview) -> tuple[int, int]:
        """Add a blob; its (offset, length) in the pack."""
        offset, length = self.size_bytes, len(data)
        fields = blob.HEADER.unpack_from(data)
        _, _, _, _, transform, element_size, _, _, raw_bytes, _, _, codec_ids, _, _, chunk_digest, base = fields
        self._write(data)
        self._write(bytes(-length % blob.ALIGNMENT))
        self._entries.append(
            struct.pack("<QIIBB6x8s16s16s8I", offset, length, raw_bytes, transform, element_size, codec_ids,
                        chunk_digest, base, *blob.stored_plane_bytes(data))
        )  # fmt: skip
        return offset, length

    def seal(self) -> memoryview:
        """All bytes of the pack, in `buffer`; nothing can be added any more."""
        start, name = self.size_bytes, self._part.encode()
        footer = b"".join(self._entries) + name
        self._write(footer)
        self._write(TRAILER.pack(start, len(self._entries), len(name), checksum(footer), FOOTER_MAGIC))
        return self.buffer[: self.size_bytes].data


@dataclass(frozen=True, slots=True)
class PackHeader:
    """Who wrote a pack."""

    rank: int
    save_id: bytes
    sequence: int


@dataclass(frozen=True, slots=True)
class PackListing:
    """What a pack holds, read from its two ends."""

    header: PackHeader
    part: str
    entries: npt.NDArray[np.void]  # (n,) ENTRY


def read_header(store: ObjectStore, key: str) -> PackHeader:
    """The first 64 bytes of a pack.

    Raises:
        FormatError: no pack, or of another version.
    """
    (head,) = store.get_ranges(key, [(0, HEADER.size)])
    magic, version, _, rank, save_id, sequence = HEADER.unpack(head)
    if magic != MAGIC:
        raise FormatError(f"{key}: no pack: magic {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise FormatError(f"{key}: pack version {version}, this snapstore reads {VERSION}")
    return PackHeader(rank, save_id, sequence)


def read_listing(store: ObjectStore, key: str, size_bytes: int) -> PackListing:
    """The footer of a pack of `size_bytes`.

    Raises:
        FormatError, IntegrityError: damaged; `scan` may still find the blobs.
    """
    header = read_header(store, key)
    if size_bytes < HEADER.size + TRAILER.size:
        raise IntegrityError(f"{key}: {size_bytes} bytes, expected at least {HEADER.size + TRAILER.size}")
    (tail,) = store.get_ranges(key, [(size_bytes - TRAILER.size, TRAILER.size)])
    start, count, name_bytes, check, magic = TRAILER.unpack(tail)
    length = count * ENTRY.itemsize + name_bytes
    if magic != FOOTER_MAGIC or start < HEADER.size or start + length + TRAILER.size != size_bytes:
        raise IntegrityError(f"{key}: damaged footer; run 'snapstore check --read-data'")
    (footer,) = store.get_ranges(key, [(start, length)])
    if checksum(footer) != check:
        raise IntegrityError(f"{key}: footer checksum mismatch; run 'snapstore check --read-data'")
    entries = np.frombuffer(footer, ENTRY, count)
    try:
        return PackListing(header, bytes(footer[count * ENTRY.itemsize :]).decode(), entries)
    except UnicodeDecodeError as error:
        raise FormatError(f"{key}: the part's name is no UTF-8") from error


def scan(data: memoryview, where: str) -> Iterator[tuple[int, blob.Header]]:
    """(offset, header) of every whole blob of a pack from its start, without the footer; ends at the first damage."""
    at = HEADER.size
    while at + blob.HEADER.size <= len(data):
        try:
            header = blob.parse(data[at:], f"{where} at {at}")
        except (FormatError, IntegrityError):
            return
        yield at, header
        at += blob.length_of(header)
        at += -at % blob.ALIGNMENT


def read_blobs(store: ObjectStore, wanted: Sequence[tuple[str, int, int]]) -> list[memoryview]:
    """The bytes of every (pack key, offset, length), in the order given; neighbours are read together."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    found: list[memoryview] = [memoryview(b"")] * len(wanted)
    i = 0
    while i < len(order):
        key = wanted[order[i]][0]
        runs: list[tuple[int, int]] = []  # (offset, length) of joined reads
        members: list[list[int]] = []
        while i < len(order) and wanted[order[i]][0] == key:
            _, offset, length = wanted[order[i]]
            if runs and offset - sum(runs[-1]) <= JOIN_GAP_BYTES and offset + length - runs[-1][0] <= JOIN_MAX_BYTES:
                runs[-1] = (runs[-1][0], max(runs[-1][1], offset + length - runs[-1][0]))
                members[-1].append(order[i])
            else:
                runs.append((offset, length))
                members.append([order[i]])
            i += 1
        for (start, _), view, group in zip(runs, store.get_ranges(key, runs), members, strict=True):
            for index in group:
                _, offset, length = wanted[index]
                found[index] = view[offset - start : offset - start + length]
    return found
