"""Sections: the bytes of a manifest: prefix, header, then sections, each plain or compressed; and entries of tensors.

In: a packed header and sections by name. Out: one object's bytes, and back (docs/format.md, "Manifest"). Every declared
size is compared with the bytes that are there, before anything of that size is allocated. The dimension orders of
entries are a section of their own, so a release that does not know it refuses the manifest.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import msgspec
import zstandard

from ...errors import FormatError, IntegrityError
from ...state.values.containers import display
from ...state.values.tensors import DimOrder, is_dim_order
from ...threads import msgpack_decoder
from ..hashing import checksum
from ..records import STRIDES, Count, wrong_version
from .chunk_table import COLUMNS

PREFIX = struct.Struct("<8sHHIQ")  # magic, version, zero, header length, XXH3-64 of the header
MAGIC = b"SNAPMANI"
VERSION = 1
#: All columns together unpack to at most this times the size of the manifest. The digests are more than half of them,
#: and are never compressed.
MAX_COLUMNS_RATIO = 4
#: Nodes and entries become Python objects of fifty times their size. So a tree or a list of tensors above the first
#: number may unpack to at most the second times its stored size: kilobytes cannot become millions of objects.
MAX_NODES_BYTES, MAX_NODES_RATIO = 64 * 1024, 64
#: Inline bytes beyond this are not compressed.
MAX_INLINE_BYTES = 16 * 1024 * 1024
_NODES = ("tree", "tensors", STRIDES)
_NAMES = {*COLUMNS, *_NODES, "inline"}

Section = tuple[str, int, int, int, int]  # name, offset after the header, stored bytes, plain bytes, codec (1: zstd)
#: A section that this release does not know: name, as stored, plain bytes, codec.
UnknownSection = tuple[str, bytes, int, int]


def encode_sections(
    raw: Mapping[str, bytes | memoryview], unknown: Sequence[UnknownSection] = ()
) -> tuple[list[Section], list[bytes | memoryview]]:
    """Compress sections where that makes them smaller; return their entries in the header, and their stored bytes."""
    compressor = zstandard.ZstdCompressor(level=1)
    parts: list[tuple[str, bytes | memoryview, int, int]] = []
    for name, data in raw.items():
        stored = data if name.endswith("digests") else compressor.compress(data)  # digests are noise
        codec = int(len(stored) < len(data) <= _max_plain_bytes(name, len(stored), len(data)))
        parts.append((name, stored if codec else data, len(data), codec))
    parts += unknown
    sections, at = list[Section](), 0
    for name, stored, plain_bytes, codec in parts:
        sections.append((name, at, len(stored), plain_bytes, codec))
        at += len(stored)
    return sections, [stored for _, stored, _, _ in parts]


def decode_sections(data: bytes, start: int, sections: Sequence[Section], where: str) -> dict[str, bytes]:
    """Return the plain bytes of all sections that this release knows.

    Args:
        data: the whole manifest.
        start: offset of the first section in `data`, after the header.
        where: names the manifest in errors.

    Raises:
        FormatError: a section is there twice, lies outside the manifest, declares more than it can hold, has an unknown
            codec, or does not decompress.
    """
    names = [section[0] for section in sections]
    if len(set(names)) != len(names):
        raise FormatError(f"{where}: a section is there twice, expected once: {', '.join(map(repr, names))}")
    known = {section[0]: section for section in sections if section[0] in _NAMES}
    total = sum(plain_bytes for name, _, _, plain_bytes, _ in known.values() if name in COLUMNS)
    if total > MAX_COLUMNS_RATIO * len(data):
        raise FormatError(f"{where}: sections declare {total} bytes in a manifest of {len(data)}")
    return {name: _decode_section(data, start, section, where) for name, section in known.items()}


def unknown_sections(data: bytes, start: int, sections: Sequence[Section], where: str) -> list[UnknownSection]:
    """Return the sections that this release does not know, as they are stored.

    Raises:
        FormatError: one lies outside the manifest, or together they are longer than it.
    """
    if sum(section[2] for section in sections if section[0] not in _NAMES) > len(data):
        raise FormatError(f"{where}: unknown sections declare more bytes than the manifest's {len(data)}")
    return [
        (name, bytes(_stored(data, start, (name, offset, stored_bytes, plain_bytes, codec), where)), plain_bytes, codec)
        for name, offset, stored_bytes, plain_bytes, codec in sections
        if name not in _NAMES
    ]


def _stored(data: bytes, start: int, section: Section, where: str) -> memoryview:
    """Return the stored bytes of a section.

    Raises:
        FormatError: it lies outside the manifest.
    """
    name, offset, stored_bytes, plain_bytes, _ = section
    stored = memoryview(data)[start + offset : start + offset + stored_bytes]
    if len(stored) != stored_bytes or min(offset, plain_bytes) < 0:
        raise FormatError(f"{where}: section {name!r} lies outside the manifest")
    return stored


def _decode_section(data: bytes, start: int, section: Section, where: str) -> bytes:
    name, _, stored_bytes, plain_bytes, codec = section
    stored = _stored(data, start, section, where)
    if codec not in (0, 1):
        raise FormatError(f"{where}: section {name!r} has an unknown codec {codec}")
    if codec == 1 and plain_bytes > _max_plain_bytes(name, stored_bytes, plain_bytes):
        raise FormatError(f"{where}: section {name!r} declares {plain_bytes} bytes, more than it can hold")
    if codec == 0:
        if plain_bytes != stored_bytes:
            raise FormatError(f"{where}: section {name!r} declares {plain_bytes} bytes and holds {stored_bytes}")
        return bytes(stored)
    try:
        if zstandard.frame_content_size(stored) != plain_bytes:
            raise FormatError(f"{where}: section {name!r} does not hold {plain_bytes} bytes")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=plain_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{where}: section {name!r}: {error}") from error


def _max_plain_bytes(name: str, stored_bytes: int, otherwise: int) -> int:
    """Return the most bytes that a compressed section may unpack to; `otherwise` for columns: their sum is bounded."""
    if name.endswith("digests"):
        return 0
    if name in _NODES:
        return max(MAX_NODES_BYTES, MAX_NODES_RATIO * stored_bytes)
    return MAX_INLINE_BYTES if name == "inline" else otherwise


def join(header: bytes, body: Sequence[bytes | memoryview]) -> bytes:
    """Return the bytes of a manifest from its packed header and its stored sections."""
    return b"".join([PREFIX.pack(MAGIC, VERSION, 0, len(header), checksum(header)), header, *body])


def header_end(data: bytes | memoryview, where: str) -> int:
    """Return the length of prefix and header, from a manifest's first bytes.

    Raises:
        IntegrityError: the bytes are shorter than the prefix.
        FormatError: not a manifest.
        UnknownFormatError: of another version.
    """
    return _read_prefix(data, where)[0]


def packed_header(data: bytes | memoryview, where: str) -> memoryview:
    """Return the packed header, checked against its checksum.

    Raises:
        IntegrityError: the header is damaged or cut short.
        FormatError, UnknownFormatError: see `header_end`.
    """
    end, expected = _read_prefix(data, where)
    packed = memoryview(data)[PREFIX.size : end]
    if len(packed) != end - PREFIX.size or checksum(packed) != expected:
        raise IntegrityError(f"{where}: manifest header damaged or cut short; run 'snapstore check'")
    return packed


def _read_prefix(data: bytes | memoryview, where: str) -> tuple[int, int]:
    """Return the end of the header and its checksum."""
    if len(data) < PREFIX.size:
        raise IntegrityError(f"{where}: {len(data)} bytes, expected at least {PREFIX.size}")
    magic, version, _, length, expected = PREFIX.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION):
        raise wrong_version(where, "manifest", (magic, version), (MAGIC, VERSION))
    return PREFIX.size + length, expected


class Box(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A sub-array stored as consecutive chunks; without chunks, in its entry's inline bytes."""

    offsets: tuple[int, ...]  # tuples and gc=False: such objects bring no full garbage collection nearer
    sizes: tuple[int, ...]
    first_chunk: Count
    chunks: Count


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One tensor, or the boxes of it that a rank has written (docs/format.md, "Tensor entry")."""

    path: tuple[str | int, ...]
    kind: str
    dtype: str
    shape: tuple[Count, ...]
    requires_grad: bool
    tie: tuple[str, int] | None
    boxes: tuple[Box, ...]
    inline: tuple[Count, Count] | None


def check_entries(tensors: Sequence[TensorEntry], chunks: int, inline: int) -> None:
    """Raise FormatError if an entry leads out of so many chunks and inline bytes. There may be thousands."""
    for entry in tensors:
        dimensions = len(entry.shape)
        for box in entry.boxes:
            if box.first_chunk + box.chunks > chunks:
                problem = f"chunks {box.first_chunk}+{box.chunks} of {chunks}"
                raise FormatError(f"{display(entry.path)}: {problem}")
            if len(box.offsets) != dimensions or len(box.sizes) != dimensions:
                raise FormatError(f"{display(entry.path)}: a box of other rank than the tensor")
        if entry.inline and sum(entry.inline) > inline:
            raise FormatError(f"{display(entry.path)}: inline bytes {entry.inline} of {inline}")


def encode_orders(orders: Mapping[int, DimOrder]) -> dict[str, bytes]:
    """Return the section by its name; {} if all entries are in C order."""
    return {STRIDES: msgspec.msgpack.encode(sorted(orders.items()))} if orders else {}


def decode_orders(
    raw: Mapping[str, bytes], features: Sequence[str], entries: Sequence[TensorEntry]
) -> dict[int, DimOrder]:
    """Return the dimension orders of a manifest by the number of the entry.

    Args:
        raw: its sections by name.
        features, entries: of the manifest.

    Raises:
        FormatError: the section is there without the feature, or the feature without it; or an entry cannot have its
            order.
        msgspec.DecodeError: it does not decode.
    """
    if (STRIDES in features) != (STRIDES in raw):
        raise FormatError(f"features {list(features)}, and the sections {sorted(raw)}")
    if STRIDES not in raw:
        return {}
    found = msgpack_decoder(list[tuple[int, DimOrder]]).decode(raw[STRIDES])
    before = -1
    for number, order in found:
        if not before < number < len(entries):
            raise FormatError(f"section {STRIDES!r}: entry {number} of {len(entries)} behind entry {before}")
        entry, before = entries[number], number
        if entry.kind not in ("tensor", "parameter", "array") or not is_dim_order(order, len(entry.shape)):
            raise FormatError(
                f"section {STRIDES!r}: order {list(order)} of entry {number}, {entry.kind} {list(entry.shape)}"
            )
    if not found:
        raise FormatError(f"section {STRIDES!r} is empty")
    return dict(found)
