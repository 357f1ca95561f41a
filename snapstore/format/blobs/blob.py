"""Blob: one chunk as stored, header and encoded planes (docs/format.md, "Blob").

In: a chunk (r,) uint8, or its difference from a base (`planes.difference`), or its XOR with one. Out: one bytes-like
blob; and back, to planes; chain_decode.py rebuilds chunks. The checksum of stored bytes is verified before any decoder
sees them.

    off size field               off size field
      0    4 magic SNBL           24    4 payload length
      4    2 version              28    4 block size
      6    2 zero                 32    8 codec of every plane
      8    8 XXH3-64 of [16, end) 40    4 number of block lengths n
     16    1 transform            44    4 zero
     17    1 element size         48   16 digest
     18    1 plane layout         64   16 digest of the base
     19    1 zero                 80   4n block lengths
     20    4 raw length        80+4n      payload
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import Bytes, Column, items_at, sums_before
from ...errors import IntegrityError, UnknownFormatError
from ..chunking import DIFFERENCE as DIFFERENCE
from ..chunking import FULL as FULL
from ..chunking import XOR as XOR
from ..hashing import checksum
from ..records import wrong_version
from . import codecs, planes
from .codecs import deflate, sparse, zstd
from .plane_kinds import NOISE, REPEATS, RUNS, plane_kinds

HEADER = struct.Struct("<4sHHQBBBxIII8sI4x16s16s")
MAGIC = b"SNBL"
VERSION = 1
TRANSFORMS = {FULL: "full", DIFFERENCE: "difference", XOR: "XOR"}
NO_BASE = bytes(16)
ALIGNMENT = 8


def _row(itemsize: int, *fields: tuple[str, Any, int]) -> np.dtype[np.void]:
    """Return the dtype of a row of `itemsize` bytes with these fields: (name, format, offset)."""
    names, formats, offsets = (list(column) for column in zip(*fields, strict=True))
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})


#: A blob's header without its block lengths, as columns.
HEADER_COLUMNS = _row(
    80,
    ("magic", "S4", 0),
    ("version", "<u2", 4),
    ("zero", "<u2", 6),
    ("checksum", "<u8", 8),
    ("transform", "u1", 16),
    ("element_size", "u1", 17),
    ("layout", "u1", 18),
    ("raw_bytes", "<u4", 20),
    ("payload_bytes", "<u4", 24),
    ("block_bytes", "<u4", 28),
    ("codecs", ("u1", 8), 32),
    ("count", "<u4", 40),
    ("digest", ("u1", 16), 48),
    ("base", ("u1", 16), 64),
)
#: A blob's entry in a pack's footer (docs/format.md, "Pack"). `offset` counts from the start of the pack; in `Encoded`,
#: from the start of the batch's blobs.
ENTRY = _row(
    96,
    ("offset", "<u8", 0),
    ("length", "<u4", 8),
    ("raw_bytes", "<u4", 12),
    ("transform", "u1", 16),
    ("element_size", "u1", 17),
    ("codecs", ("u1", 8), 24),
    ("digest", "V16", 32),
    ("base", "V16", 48),
    ("plane_bytes", ("<u4", 8), 64),
)


class Header(NamedTuple):
    """A blob's header; `parse` adds the block lengths."""

    magic: bytes
    version: int
    zero: int
    checksum: int
    transform: int
    element_size: int
    layout: int
    raw_bytes: int
    payload_bytes: int
    block_bytes: int
    codecs: bytes
    blocks: int
    digest: bytes
    base: bytes
    block_lengths: tuple[int, ...] = ()

    @property
    def payload_start(self) -> int:
        """Return the offset of the payload in the blob."""
        return HEADER.size + 4 * self.blocks


def bound(raw_bytes: Any, element_size: Any) -> Any:
    """Return the most bytes of the blob of a chunk; the arguments are numbers or arrays."""
    blocks = element_size * -(-raw_bytes // element_size // codecs.BLOCK_BYTES)
    return HEADER.size + 4 * blocks + raw_bytes


def encode(
    source: Bytes,
    element_size: int,
    layout: int,
    statistics: planes.Statistics,
    digests: tuple[bytes, bytes | None],
    out: Bytes,
    *,
    xor: bool = False,
) -> memoryview:
    """Encode one blob.

    Args:
        source: (r,) uint8, the chunk, or its `planes.difference` from a base, or its XOR with one.
        element_size: 1, 2, 4 or 8; divides r.
        layout: of the chunk: planes.ROTATED for floats, else planes.BYTES. A difference is always split in
            planes.BYTES, an XOR as the chunk itself would be.
        statistics: of the planes of `source`; they decide each plane's codec.
        digests: (16 bytes each) of the chunk itself, and of the base; None: `source` is the chunk.
        out: (`bound`,) uint8.
        xor: whether a source with a base is an XOR.

    Returns:
        The blob: the first bytes of `out`.
    """
    kinds = plane_kinds(statistics.bits, statistics.top_share, layout).tolist()
    layout = layout if digests[1] is None or xor else planes.BYTES
    split = planes.split(source, element_size, layout, planes.scratch.room("planes", source.size))
    encoded = [_encode_plane(plane, kind) for kind, plane in zip(kinds, split, strict=True)]
    payload = [block for _, blocks in encoded for block in blocks]
    lengths = [len(block) for codec, blocks in encoded if codec != codecs.RAW for block in blocks]
    codec_ids = bytes(codec for codec, _ in encoded)
    return _assemble((source.size, element_size, layout, codec_ids), payload, lengths, digests, out, xor=xor)


def encode_sparse(
    difference: Bytes,
    base: Bytes,
    element_size: int,
    layout: int,
    digests: tuple[bytes, bytes],
    max_bytes: float,
    out: Bytes,
) -> memoryview | None:
    """Encode a sparse delta: the elements that differ from the base.

    Args:
        difference: (r,) uint8, `planes.difference` of the chunk and its base.
        base: (r,) uint8.
        element_size, layout, out: as for `encode`.
        digests: of the chunk and of its base.
        max_bytes: the blob must be smaller than this.

    Returns:
        The blob: the first bytes of `out`; None if it would be too large.
    """
    pieces, lengths = sparse.encode(difference, base, element_size, layout, codecs.BLOCK_BYTES)
    if HEADER.size + 4 * len(lengths) + sum(map(len, pieces)) >= min(max_bytes, out.size):
        return None
    return _assemble((base.size, element_size, layout, bytes([codecs.SPARSE])), pieces, lengths, digests, out)


def _assemble(
    shape: tuple[int, int, int, bytes],
    payload: Sequence[bytes | memoryview],
    block_lengths: Sequence[int],
    digests: tuple[bytes, bytes | None],
    out: Bytes,
    *,
    xor: bool = False,
) -> memoryview:
    """Write header, block lengths and payload to `out`; `shape`: raw length, element size, layout and codecs."""
    raw_bytes, element_size, layout, codec_ids = shape
    chunk_digest, base = digests
    at = HEADER.size + 4 * len(block_lengths)
    HEADER.pack_into(
        out.data,
        0,
        MAGIC,
        VERSION,
        0,
        0,
        FULL if base is None else XOR if xor else DIFFERENCE,
        element_size,
        layout,
        raw_bytes,
        sum(map(len, payload)),
        codecs.BLOCK_BYTES,
        codec_ids.ljust(8, b"\0"),
        len(block_lengths),
        chunk_digest,
        base or NO_BASE,
    )
    struct.pack_into(f"<{len(block_lengths)}I", out.data, HEADER.size, *block_lengths)
    for piece in payload:
        out[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    blob = out[:at].data
    struct.pack_into("<Q", blob, 8, checksum(blob[16:]))
    return blob


def _encode_plane(plane: Bytes, kind: int) -> tuple[int, list[bytes] | list[memoryview]]:
    """Return (codec, stored blocks); the codec is RAW if no other makes it smaller."""
    if kind != NOISE and plane.size:
        if kind == REPEATS:
            codec, blocks = codecs.ZSTD, zstd.encode_matches(plane, codecs.BLOCK_BYTES)
        elif kind == RUNS:
            codec, blocks = codecs.DEFLATE, deflate.encode_runs(plane, codecs.BLOCK_BYTES)
        else:
            codec, blocks = codecs.ZSTD, zstd.encode_entropy(plane, codecs.BLOCK_BYTES)
        if sum(map(len, blocks)) + 4 * len(blocks) < plane.size:
            return codec, blocks
    return codecs.RAW, [np.ascontiguousarray(plane).data]


def headers(
    entries: npt.NDArray[np.void], layouts: Column, block_bytes: Column, counts: Column, block_lengths: Column
) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Return the headers of many blobs, concatenated, with block lengths, without checksums.

    Args:
        entries: (n,) ENTRY.
        layouts, block_bytes: (n,).
        counts: (n,) how many block lengths each blob has.
        block_lengths: (sum of counts,), blob after blob [bytes].

    Returns:
        The bytes; and where each header begins in them, with the end of the last one, (n + 1,) int64.
    """
    starts = sums_before(HEADER.size + 4 * counts)
    fixed = np.zeros(len(entries), HEADER_COLUMNS)
    fixed["magic"], fixed["version"], fixed["layout"] = MAGIC, VERSION, layouts
    for name in ("transform", "element_size", "raw_bytes", "codecs"):
        fixed[name] = entries[name]
    for name in ("digest", "base"):
        fixed[name] = np.ascontiguousarray(entries[name]).view(np.uint8).reshape(-1, 16)
    fixed["payload_bytes"] = entries["length"] - np.diff(starts)
    fixed["block_bytes"], fixed["count"] = block_bytes, counts
    words = np.empty(int(starts[-1]) // 4, np.uint32)
    is_fixed = np.zeros(len(words), bool)
    is_fixed[(starts[:-1, None] // 4 + np.arange(HEADER.size // 4)).ravel()] = True
    words[is_fixed] = fixed.view(np.uint32)
    words[~is_fixed] = block_lengths
    return words.view(np.uint8), starts


@dataclass(frozen=True, slots=True)
class Headers:
    """Headers of many blobs, one column per field, (m,) int64 unless noted."""

    checksum: Column  # (m,) uint64
    transform: Column
    element_size: Column
    layout: Column
    raw_bytes: Column
    payload_bytes: Column
    block_bytes: Column
    codecs: Column  # (m,) uint64; byte k is the codec of plane k
    count: Column  # number of block lengths
    digest: Column  # (2, m) uint64
    base: Column  # (2, m) uint64

    @property
    def payload_start(self) -> Column:
        """Return the offset of each payload in its blob."""
        starts: Column = HEADER.size + 4 * self.count
        return starts

    def take(self, rows: Column) -> Headers:
        """Return these rows."""
        return Headers(*(getattr(self, field.name)[..., rows] for field in fields(self)))

    def plane_codecs(self) -> Bytes:
        """Return the codec of every plane, (m, 8)."""
        return np.ascontiguousarray(self.codecs).view(np.uint8).reshape(-1, 8)


def read_headers(stored: Bytes, offsets: Column, lengths: Column) -> tuple[Headers, npt.NDArray[np.bool_]]:
    """Return the headers of blobs at `offsets` of a buffer, and which are valid, (m,) bool.

    It checks everything that `parse` checks, except the checksum. For an invalid blob, `parse` raises the error.
    """
    whole = lengths >= HEADER.size
    fixed = np.zeros(len(offsets), HEADER_COLUMNS)
    if len(stored) >= HEADER.size:
        fixed = items_at(stored, np.where(whole, offsets, 0), HEADER_COLUMNS)
    numbers = ("transform", "element_size", "layout", "raw_bytes", "payload_bytes", "block_bytes", "count")
    found = Headers(
        checksum=fixed["checksum"],
        codecs=fixed["codecs"].view(np.uint64)[:, 0],
        digest=np.ascontiguousarray(fixed["digest"].view(np.uint64).T),
        base=np.ascontiguousarray(fixed["base"].view(np.uint64).T),
        **{name: fixed[name].astype(np.int64) for name in numbers},
    )
    size = found.element_size
    fine: npt.NDArray[np.bool_] = whole & (fixed["magic"] == MAGIC) & (fixed["version"] == VERSION)
    fine &= fixed["zero"] == 0
    fine &= (found.payload_start + found.payload_bytes <= lengths) & (found.transform <= XOR)
    fine &= found.layout <= planes.ROTATED
    is_sparse = found.codecs & 255 == codecs.SPARSE
    fine &= (found.transform != DIFFERENCE) | (found.layout == planes.BYTES) | is_sparse
    fine &= ~is_sparse | (found.transform != XOR)
    fine &= (size > 0) & (size <= 8) & (size & size - 1 == 0) & (found.block_bytes > 0)
    fine &= found.raw_bytes & size - 1 == 0  # a power of two divides it
    return found, fine


def parse(blob: memoryview, where: str) -> Header:
    """Check a blob's frame and read its header; the buffer may be longer than the blob (padding).

    Raises:
        FormatError: not a blob.
        UnknownFormatError: of an unknown version, transform or layout.
        IntegrityError: the blob is cut short, its checksum does not match, or the fields of its header contradict each
            other.
    """
    if len(blob) < HEADER.size:
        raise IntegrityError(f"{where}: blob of {len(blob)} bytes, expected at least {HEADER.size}")
    h = Header(*HEADER.unpack_from(blob))
    if h[:2] != (MAGIC, VERSION):
        raise wrong_version(where, "blob", h[:2], (MAGIC, VERSION), "; run 'snapstore check --read-data'")
    if h.zero:  # the checksum covers neither this field nor the two before it
        raise IntegrityError(f"{where}: {h.zero} in a field that must be zero; run 'snapstore check --read-data'")
    length = length_of(h)
    if length > len(blob):
        raise IntegrityError(f"{where}: blob declares {length} bytes, {len(blob)} are there")
    if checksum(blob[16:length]) != h.checksum:
        raise IntegrityError(f"{where}: checksum mismatch in stored bytes; run 'snapstore check --read-data'")
    if h.transform not in TRANSFORMS or h.layout not in (planes.BYTES, planes.ROTATED):
        raise UnknownFormatError(
            f"{where}: blob of transform {h.transform}, layout {h.layout}, which this snapstore does not read; use the "
            "release that wrote it, or a newer one"
        )
    if h.transform == DIFFERENCE and h.layout != planes.BYTES and h.codecs[0] != codecs.SPARSE:
        raise IntegrityError(f"{where}: a difference in planes of layout {h.layout}, expected {planes.BYTES}")
    if h.transform == XOR and h.codecs[0] == codecs.SPARSE:
        raise IntegrityError(f"{where}: a sparse delta of transform {XOR}, expected {DIFFERENCE}")
    if h.element_size not in (1, 2, 4, 8) or h.raw_bytes % h.element_size or not h.block_bytes:
        got = f"{h.raw_bytes} bytes of element size {h.element_size} in blocks of {h.block_bytes}"
        raise IntegrityError(f"{where}: {got}")
    return h._replace(block_lengths=struct.unpack_from(f"<{h.blocks}I", blob, HEADER.size))


def length_of(header: Header) -> int:
    """Return the bytes of a blob, without padding."""
    return header.payload_start + header.payload_bytes


def entry(blob: memoryview, offset: int) -> bytes:
    """Return the footer entry (an ENTRY) of a blob at `offset`."""
    h = Header(*HEADER.unpack_from(blob))
    return struct.pack(
        "<QIIBB6x8s16s16s8I",
        offset,
        len(blob),
        h.raw_bytes,
        h.transform,
        h.element_size,
        h.codecs,
        h.digest,
        h.base,
        *stored_plane_bytes(blob),
    )


def stored_plane_bytes(blob: memoryview) -> list[int]:
    """Return the stored lengths of planes 0 to 7 of a new blob, 0 beyond its element size [bytes]."""
    _, _, _, _, _, element_size, _, raw_bytes, _, block_bytes, codec_ids, count, *_ = HEADER.unpack_from(blob)
    if codec_ids[0] == codecs.SPARSE:  # one payload for all planes
        return [len(blob) - HEADER.size - 4 * count] + [0] * 7
    plane_bytes = raw_bytes // element_size
    blocks = -(-plane_bytes // block_bytes)
    lengths = iter(struct.unpack_from(f"<{count}I", blob, HEADER.size))
    used = codec_ids[:element_size]
    stored = [plane_bytes if codec == codecs.RAW else sum(islice(lengths, blocks)) for codec in used]
    return stored + [0] * (8 - element_size)


def stored_planes(blob: memoryview, header: Header, where: str) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield (codec, stored blocks) of every plane; a raw plane is one block.

    Raises:
        IntegrityError: the planes are shorter or longer than the blob's payload.
    """
    plane_bytes = header.raw_bytes // header.element_size
    blocks_per_plane = -(-plane_bytes // header.block_bytes)
    at, entry = header.payload_start, 0
    end = length_of(header)
    for k in range(header.element_size):
        lengths: tuple[int, ...] = (plane_bytes,)
        if header.codecs[k] != codecs.RAW:
            lengths = header.block_lengths[entry : entry + blocks_per_plane]
            entry += blocks_per_plane
            if len(lengths) != blocks_per_plane:
                raise IntegrityError(f"{where}: plane {k} lacks block lengths")
        blocks = []
        for length in lengths:
            blocks.append(blob[at : at + length])
            at += length
        if at > end:
            raise IntegrityError(f"{where}: plane {k} ends at {at}, the blob at {end}")
        yield header.codecs[k], blocks
    if at != end or entry != len(header.block_lengths):
        raise IntegrityError(f"{where}: planes end at {at}, the blob at {end}")


def decode_planes(blob: memoryview, header: Header, where: str) -> list[Bytes]:
    """Return a blob's planes, (n,) uint8 each, valid in this thread until its next call.

    Raises:
        IntegrityError: a plane does not decode.
        UnknownFormatError: this release does not know a codec.
        CapabilityError: a plane is coded in nvCOMP's ANS, and there is no GPU with nvCOMP here.
    """
    rooms = planes.scratch.room("planes", header.raw_bytes).reshape(header.element_size, -1)
    found = []
    for k, (codec, blocks) in enumerate(stored_planes(blob, header, where)):
        if codec == codecs.RAW:
            found.append(np.frombuffer(blocks[0], np.uint8))
            continue
        try:
            codecs.decoder(codec, where)(blocks, rooms[k], header.block_bytes)
        except IntegrityError as error:
            raise IntegrityError(f"{where}: plane {k}: {error}") from error
        found.append(rooms[k])
    return found


def relabel(blob: memoryview, transform: int, chunk_digest: bytes, base: bytes) -> None:
    """Change in place a blob's transform, digest and base; its planes stay; those of a difference get layout 0."""
    blob[16:17] = bytes([transform])
    if transform == DIFFERENCE:
        blob[18:19] = bytes([planes.BYTES])
    blob[48:80] = chunk_digest + base
    struct.pack_into("<Q", blob, 8, checksum(blob[16:]))
