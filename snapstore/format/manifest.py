"""Manifest: which tensors a snapshot's part holds and, per chunk, where its bytes and its bases' lie.

In: tensor entries and a columnar chunk table (NumPy, no object a chunk). Out: one immutable object named by its
SHA-256; and back (docs/format.md, "Manifest"). A million chunks encode and decode in under a second each.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ..arrays import Bytes
from ..errors import FormatError, IntegrityError, NotFoundError, UnknownFormatError
from ..state.tree_decode import unpack_nodes
from ..storage.base import ObjectStore
from .chunking import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from .hashing import checksum
from .keys import manifest_key, sha256_names
from .records import MadeFor, ManifestRef, Seed

PREFIX = struct.Struct("<8sHHIQ")  # magic, version, zero, header length, XXH3-64 of the header
MAGIC = b"SNAPMANI"
VERSION = 1
MAX_CHAIN = 255
#: All columns unpack to at most this times the size of the manifest: the digests, which are never compressed, are
#: more than half of them.
MAX_COLUMNS_RATIO = 4
#: Nodes and entries become Python objects of fifty times their size: a tree or a list of tensors above the first is
#: compressed by no more than the second, so that some kilobytes cannot become millions of objects.
MAX_NODES_BYTES, MAX_NODES_RATIO = 64 * 1024, 64
#: Inline bytes beyond this are not compressed.
MAX_INLINE_BYTES = 16 * 1024 * 1024
_NODES = ("tree", "tensors")
#: The first read of a header takes this much; most headers fit.
HEADER_READ_BYTES = 64 * 1024


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A sub-array stored as a run of chunks; a plain tensor is one box."""

    offsets: list[int]
    sizes: list[int]
    first_chunk: int
    chunks: int


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor (docs/format.md, "Tensor entry")."""

    path: list[str | int]
    kind: str
    dtype: str
    shape: list[int]
    requires_grad: bool
    tie: tuple[str, int] | None
    boxes: list[Box]
    inline: tuple[int, int] | None


class ManifestHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What gc and listings need: who wrote it, its sizes and every pack it uses.

    Attributes:
        digest_seed: of every digest in the manifest: the repository's, so that it outlives a config that is lost.
    """

    save_id: bytes
    snapshot: bytes
    revision: int
    rank: int
    sequence: int
    part: str
    chunk_bytes: int
    digest_seed: Seed
    tensors: int
    chunks: int
    refs: int
    logical_bytes: int
    depth: int
    packs: bytes
    pack_sizes: bytes
    sections: list[tuple[str, int, int, int, int]]

    @property
    def made_for(self) -> MadeFor:
        """The record that it was written for."""
        return MadeFor(self.snapshot, self.revision)

    @property
    def pack_names(self) -> list[str]:
        """SHA-256 of every pack, hex, in the order that `ref_packs` counts."""
        return sha256_names(self.packs)

    @property
    def pack_size_list(self) -> list[int]:
        """Size of every pack [bytes]."""
        return list(np.frombuffer(self.pack_sizes, "<u8").tolist())


@dataclass(slots=True)
class ChunkTable:
    """Columns over chunks, and one flat table of references (CSR), newest first within a chunk."""

    digests: Bytes  # (n, 16) uint8
    ref_counts: npt.NDArray[np.uint16]  # (n,)
    ref_kinds: npt.NDArray[np.uint8]  # (m,) blob.FULL or blob.XOR
    ref_packs: npt.NDArray[np.uint32]  # (m,) index into the manifest's packs
    ref_offsets: npt.NDArray[np.uint64]  # (m,)
    ref_lengths: npt.NDArray[np.uint32]  # (m,)
    ref_digests: Bytes  # (m, 16) uint8
    ref_starts: npt.NDArray[np.uint32]  # (m,)
    ref_sizes: npt.NDArray[np.uint32]  # (m,)
    starts: npt.NDArray[np.int64] = field(init=False)  # (n + 1,) first reference of every chunk

    def __post_init__(self) -> None:
        self.starts = np.zeros(len(self.ref_counts) + 1, np.int64)
        np.cumsum(self.ref_counts, out=self.starts[1:])

    @classmethod
    def empty(cls) -> ChunkTable:
        """A table of no chunks."""
        return cls(**{name: np.empty((0, *shape), dtype) for name, (dtype, shape) in COLUMNS.items()})

    def __len__(self) -> int:
        return len(self.ref_counts)

    @property
    def lengths(self) -> npt.NDArray[np.uint32]:
        """Plain bytes of every chunk, (n,)."""
        return self.ref_sizes[self.starts[:-1]]

    @property
    def depths(self) -> npt.NDArray[np.int64]:
        """Deltas in every chunk's chain, (n,)."""
        return self.ref_counts.astype(np.int64) - 1

    @property
    def chain_bytes(self) -> npt.NDArray[np.int64]:
        """Stored bytes that rebuilding every chunk reads, (n,)."""
        if not len(self):
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.ref_lengths.astype(np.int64), self.starts[:-1])

    def refs_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Indices of all references of `rows`, chunk after chunk."""
        counts = self.ref_counts[rows].astype(np.int64)
        ends = np.cumsum(counts)
        return np.repeat(self.starts[rows] - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)

    def take(self, rows: npt.NDArray[np.int64]) -> ChunkTable:
        """The table of these chunks."""
        refs = self.refs_of(rows)
        per_chunk = {"digests", "ref_counts"}
        return ChunkTable(**{name: getattr(self, name)[rows if name in per_chunk else refs] for name in COLUMNS})

    @classmethod
    def concatenate(cls, tables: Sequence[ChunkTable]) -> ChunkTable:
        """One table after the other; `ref_packs` must count in one list of packs already."""
        if not tables:
            return cls.empty()
        return cls(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS})


#: dtype and shape beyond the row of every column, in the order in which they are stored.
COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "digests": ("u1", (16,)),
    "ref_counts": ("<u2", ()),
    "ref_kinds": ("u1", ()),
    "ref_packs": ("<u4", ()),
    "ref_offsets": ("<u8", ()),
    "ref_lengths": ("<u4", ()),
    "ref_digests": ("u1", (16,)),
    "ref_starts": ("<u4", ()),
    "ref_sizes": ("<u4", ()),
}


_SECTIONS = {*COLUMNS, *_NODES, "inline"}


@dataclass(slots=True)
class Manifest:
    """A whole manifest in memory."""

    header: ManifestHeader
    tree: Any
    tensors: list[TensorEntry]
    inline: bytes
    table: ChunkTable


def encode(
    *, save_id: bytes, rank: int, sequence: int, part: str, chunk_bytes: int, digest_seed: int, tree: Any,
    tensors: list[TensorEntry], inline: bytes, table: ChunkTable, packs: Sequence[str], pack_sizes: Sequence[int],
    logical_bytes: int, made_for: MadeFor | None = None,
) -> bytes:  # fmt: skip
    """A manifest's bytes.

    Args:
        packs: hex SHA-256 names, in the order that `table.ref_packs` counts.
        made_for: the record that will name it; by default revision 0 of the snapshot `save_id`.
    """
    snapshot, revision = made_for or MadeFor(save_id, 0)
    raw: dict[str, bytes | memoryview] = {
        "tree": msgspec.msgpack.encode(tree),
        "tensors": msgspec.msgpack.encode(tensors),
        "inline": inline,
    }
    for name, (dtype, _) in COLUMNS.items():
        column = np.ascontiguousarray(getattr(table, name), dtype)
        raw[name] = column.reshape(-1).view(np.uint8).data if column.size else b""
    compressor = zstandard.ZstdCompressor(level=1)
    body: list[bytes | memoryview] = []
    sections: list[tuple[str, int, int, int, int]] = []
    at = 0
    for name, data in raw.items():
        stored = data if name.endswith("digests") else compressor.compress(data)  # those are noise
        codec = int(len(stored) < len(data) <= _most(name, len(stored), len(data)))
        stored = stored if codec else data
        sections.append((name, at, len(stored), len(data), codec))
        body.append(stored)
        at += len(stored)
    header = msgspec.msgpack.encode(
        ManifestHeader(
            save_id=save_id, snapshot=snapshot, revision=revision, rank=rank, sequence=sequence, part=part,
            chunk_bytes=chunk_bytes, digest_seed=digest_seed, tensors=len(tensors), chunks=len(table),
            refs=len(table.ref_kinds), logical_bytes=logical_bytes, depth=int(table.depths.max(initial=0)),
            packs=bytes.fromhex("".join(packs)),
            pack_sizes=np.asarray(pack_sizes, "<u8").tobytes(), sections=sections,
        )
    )  # fmt: skip
    return b"".join([PREFIX.pack(MAGIC, VERSION, 0, len(header), checksum(header)), header, *body])


def _most(name: str, stored_bytes: int, otherwise: int) -> int:
    """The most bytes that a compressed section may unpack to; `otherwise`: a column, which all together bounds."""
    if name.endswith("digests"):
        return 0
    if name in _NODES:
        return max(MAX_NODES_BYTES, MAX_NODES_RATIO * stored_bytes)
    return MAX_INLINE_BYTES if name == "inline" else otherwise


def _prefix(data: bytes | memoryview, where: str) -> tuple[int, int]:
    """(length, checksum) of the header."""
    if len(data) < PREFIX.size:
        raise IntegrityError(f"{where}: {len(data)} bytes, expected at least {PREFIX.size}")
    magic, version, _, length, check = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise FormatError(f"{where}: no manifest: magic {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise UnknownFormatError(
            f"{where}: manifest version {version}, this snapstore reads {VERSION}; use the release that writes it, or "
            "a newer one"
        )
    return length, check


def decode_header(data: bytes | memoryview, where: str) -> ManifestHeader:
    """The header, from a manifest's beginning.

    Raises:
        FormatError, IntegrityError: not a manifest, damaged, or inconsistent.
    """
    length, check = _prefix(data, where)
    packed = memoryview(data)[PREFIX.size : PREFIX.size + length]
    if len(packed) != length or checksum(packed) != check:
        raise IntegrityError(f"{where}: manifest header damaged or cut short; run 'snapstore check'")
    try:
        header = msgspec.msgpack.decode(packed, type=ManifestHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{where}: manifest header does not decode: {error}") from error
    if len(header.packs) % 32 or len(header.pack_sizes) != len(header.packs) // 4:
        raise FormatError(f"{where}: {len(header.packs)} bytes of pack names, {len(header.pack_sizes)} of sizes")
    if header.chunk_bytes % 16 or not MIN_CHUNK_BYTES <= header.chunk_bytes <= MAX_CHUNK_BYTES:
        raise FormatError(f"{where}: chunks of {header.chunk_bytes} bytes")
    return header


def part_name(part: str) -> str:
    """A part of a state for people; the one at its root has no name."""
    return f"part {part!r}" if part else "the root part"


def header_bytes(data: bytes) -> bytes:
    """A manifest's bytes up to the end of its header, fit for `decode_header`."""
    return data[: PREFIX.size + _prefix(data, "manifest")[0]]


def read_header(store: ObjectStore, key: str, size_bytes: int) -> bytes:
    """The bytes of a manifest up to the end of its header, with one or two ranged reads; nothing proves them yet."""
    data = store.get_range(key, 0, min(HEADER_READ_BYTES, size_bytes))
    length, _ = _prefix(data, key)
    if PREFIX.size + length > size_bytes:
        raise IntegrityError(f"{key}: header of {length} bytes in a manifest of {size_bytes}")
    if PREFIX.size + length > len(data):
        data = store.get_range(key, 0, PREFIX.size + length)
    return bytes(data[: PREFIX.size + length])


def is_header_of(data: bytes, ref: ManifestRef) -> bool:
    """Whether these are the bytes of a referred manifest up to the end of its header."""
    return hashlib.sha256(data).hexdigest() == ref.header_sha256


def proven_header(data: bytes, ref: ManifestRef) -> ManifestHeader:
    """The header of a referred manifest, from its bytes up to the header's end.

    Raises:
        IntegrityError: the bytes are another manifest's, or damaged; or the record says something else than they do.
        FormatError: no header, or inconsistent.
    """
    if not is_header_of(data, ref):
        decode_header(data, ref.key)  # says it better, if it is damaged
        raise IntegrityError(f"{ref.key}: its header is not the one that the record names; run 'snapstore check'")
    header = decode_header(data, ref.key)
    size_bytes = len(data) + max((offset + stored for _, offset, stored, _, _ in header.sections), default=0)
    for what, said, expected in (
        ("part", header.part, ref.part), ("rank", header.rank, ref.rank), ("size", size_bytes, ref.size_bytes),
        ("logical size", header.logical_bytes, ref.logical_bytes),
    ):  # fmt: skip
        if said != expected:
            raise IntegrityError(
                f"{ref.key}: is of {what} {said!r}, the record says {expected!r}; run 'snapstore check'"
            )
    return header


def ref_of(data: bytes) -> ManifestRef:
    """What a record says of a manifest, from all its bytes."""
    head = header_bytes(data)
    header = decode_header(head, "manifest")
    return ManifestRef(
        part=header.part, rank=header.rank, sha256=hashlib.sha256(data).hexdigest(),
        header_sha256=hashlib.sha256(head).hexdigest(), size_bytes=len(data), logical_bytes=header.logical_bytes,
    )  # fmt: skip


def read(store: ObjectStore, ref: ManifestRef, digest_seed: int | None) -> Manifest:
    """A whole manifest, checked against its name and the record.

    Args:
        digest_seed: of the repository; None: no chunk is compared with its digest, or the caller asks `check_seed`.

    Raises:
        IntegrityError: missing, cut short or altered.
        FormatError: of another version, or inconsistent; or of another seed.
    """
    return checked(read_bytes(store, ref.sha256, ref.size_bytes), ref, digest_seed)


def checked(data: bytes, ref: ManifestRef, digest_seed: int | None) -> Manifest:
    """All bytes of a manifest that have its name, decoded and compared with the record; see `read`."""
    proven_header(header_bytes(data), ref)
    m = decode(data, ref.key)
    if digest_seed is not None:
        check_seed(m.header, digest_seed, ref.key)
    _check_sizes(m, ref.key)
    return m


def check_seed(header: ManifestHeader, digest_seed: int, where: str) -> None:
    """Compare a manifest's seed with the config's. Neither is shown: logs go further than a repository does.

    Raises:
        FormatError: they differ, so no digest can be verified, nor compared with others.
    """
    if header.digest_seed != digest_seed:
        raise FormatError(
            f"{where}: its digests have another seed than config says: one of the two is another repository's; run "
            "'snapstore check', and if it finds fault with config, 'snapstore repair --apply'"
        )


def _check_sizes(m: Manifest, where: str) -> None:
    """Every byte that the table and the inline section hold is of one tensor, and all that name their sum say the same.

    So a state takes no more than its record says, and nothing that is stored once restores as many tensors.

    Raises:
        FormatError: they do not agree; nothing has been sized by them yet.
    """
    boxes = [(box.first_chunk, box.chunks) for entry in m.tensors for box in entry.boxes]
    ranges = [entry.inline for entry in m.tensors if entry.inline]
    for what, spans, total in (("chunks", boxes, len(m.table)), ("inline bytes", ranges, len(m.inline))):
        end = 0
        for first, count in sorted(spans):
            if first != end and count:
                raise FormatError(f"{where}: {what} {first}+{count}, expected the next from {end}: one tensor has each")
            end += count
        if end != total:
            raise FormatError(f"{where}: its tensors have {end} {what}, {total} are there")
    header, held = m.header, int(m.table.lengths.sum(dtype=np.int64)) + len(m.inline)
    if header.logical_bytes != held:
        raise FormatError(f"{where}: holds {held} bytes of tensors, its header says {header.logical_bytes}")


def read_bytes(store: ObjectStore, sha256: str, size_bytes: int) -> bytes:
    """All bytes of a manifest, checked against its name.

    Raises:
        IntegrityError: missing, cut short or altered.
    """
    key = manifest_key(sha256)
    try:
        data = store.get(key, limit_bytes=size_bytes)
    except NotFoundError as error:
        raise IntegrityError(f"{key}: manifest is missing; run 'snapstore check'") from error
    except FormatError as error:
        raise IntegrityError(f"{key}: larger than the {size_bytes} bytes recorded") from error
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise IntegrityError(f"{key}: SHA-256 is {got}: the manifest is damaged; run 'snapstore check'")
    return data


def decode(data: bytes, where: str) -> Manifest:
    """The inverse of `encode`; every count is checked against the bytes that are there before it is believed."""
    header = decode_header(data, where)
    start = PREFIX.size + _prefix(data, where)[0]
    sections = {section[0]: section for section in header.sections if section[0] in _SECTIONS}
    total = sum(section[3] for name, section in sections.items() if name in COLUMNS)
    if total > MAX_COLUMNS_RATIO * len(data):
        raise FormatError(f"{where}: sections declare {total} bytes in a manifest of {len(data)}")
    raw = {name: _section(data, start, section, where) for name, section in sections.items()}
    try:
        table = ChunkTable(**{name: _column(raw[name], name, where) for name in COLUMNS})
        tensors = msgspec.msgpack.decode(raw["tensors"], type=list[TensorEntry])
        tree = unpack_nodes(raw["tree"])
        inline = raw["inline"]
    except KeyError as error:
        raise FormatError(f"{where}: section {error} is missing") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{where}: manifest does not decode: {error}") from error
    except FormatError as error:
        raise type(error)(f"{where}: {error}") from error
    _validate(header, table, tensors, len(inline), where)
    return Manifest(header, tree, tensors, inline, table)


def _section(data: bytes, start: int, section: tuple[str, int, int, int, int], where: str) -> bytes:
    name, offset, stored_bytes, raw_bytes, codec = section
    stored = memoryview(data)[start + offset : start + offset + stored_bytes]
    if len(stored) != stored_bytes or codec not in (0, 1) or min(offset, raw_bytes) < 0:
        raise FormatError(f"{where}: section {name!r} lies outside the manifest or has an unknown codec {codec}")
    if codec == 1 and raw_bytes > _most(name, stored_bytes, raw_bytes):
        raise FormatError(f"{where}: section {name!r} declares {raw_bytes} bytes, more than it can hold")
    if codec == 0:
        if raw_bytes != stored_bytes:
            raise FormatError(f"{where}: section {name!r} declares {raw_bytes} bytes and holds {stored_bytes}")
        return bytes(stored)
    try:
        if zstandard.frame_content_size(stored) != raw_bytes:
            raise FormatError(f"{where}: section {name!r} does not hold {raw_bytes} bytes")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise FormatError(f"{where}: section {name!r}: {error}") from error


def _column(raw: bytes, name: str, where: str) -> npt.NDArray[Any]:
    dtype, shape = COLUMNS[name]
    row = np.dtype(dtype).itemsize * (16 if shape else 1)
    if len(raw) % row:
        raise FormatError(f"{where}: column {name!r} of {len(raw)} bytes, expected a multiple of {row}")
    return np.frombuffer(raw, dtype).reshape(-1, *shape)


def _validate(header: ManifestHeader, table: ChunkTable, tensors: list[TensorEntry], inline: int, where: str) -> None:
    """Everything that readers rely on, so that a damaged or hostile manifest cannot lead them out of bounds."""
    refs = int(table.starts[-1])
    per_ref = (len(getattr(table, name)) for name in COLUMNS if name not in ("digests", "ref_counts"))
    if len(table.digests) != len(table) or len(table) != header.chunks or any(count != refs for count in per_ref):
        raise FormatError(f"{where}: columns of {[len(getattr(table, f.name)) for f in fields(table)]} rows disagree")
    if len(table):
        first, last = table.starts[:-1], table.starts[1:] - 1
        if table.ref_counts.min() < 1 or table.ref_counts.max() > MAX_CHAIN:
            raise FormatError(f"{where}: a chain of {table.ref_counts.max()} references, expected 1 to {MAX_CHAIN}")
        if table.ref_kinds.max() > 1:
            raise UnknownFormatError(
                f"{where}: a reference of kind {table.ref_kinds.max()}, which this snapstore does not know; use the "
                "release that wrote it, or a newer one"
            )
        if table.ref_kinds[last].any() or table.ref_kinds.sum() != refs - len(table):
            raise FormatError(f"{where}: a chain is not xor, ..., xor, full")
        if table.ref_packs.max() >= max(1, len(header.packs) // 32) or not header.packs:
            raise FormatError(f"{where}: a reference to a pack that the header does not name")
        if table.ref_starts.any() or table.ref_sizes.max() > header.chunk_bytes or table.ref_sizes.min() < 1:
            raise FormatError(f"{where}: a reference to part of a chunk, or beyond {header.chunk_bytes} bytes")
        if (table.ref_sizes != np.repeat(table.ref_sizes[first], table.ref_counts)).any():
            raise FormatError(f"{where}: a chain over chunks of different lengths")
        ends = table.ref_offsets + table.ref_lengths
        if (ends > np.frombuffer(header.pack_sizes, "<u8")[table.ref_packs]).any() or (ends < table.ref_offsets).any():
            raise FormatError(f"{where}: a reference beyond the end of its pack")
    if len(tensors) != header.tensors:
        raise FormatError(f"{where}: {len(tensors)} tensors, header says {header.tensors}")
    for entry in tensors:
        _validate_entry(entry, len(table), inline, where)


def _validate_entry(entry: TensorEntry, chunks: int, inline: int, where: str) -> None:
    name = ".".join(map(str, entry.path))
    for box in entry.boxes:
        if box.first_chunk < 0 or box.chunks < 0 or box.first_chunk + box.chunks > chunks:
            raise FormatError(f"{where}: {name}: chunks {box.first_chunk}+{box.chunks} of {chunks}")
        if len(box.offsets) != len(entry.shape) or len(box.sizes) != len(entry.shape):
            raise FormatError(f"{where}: {name}: a box of other rank than the tensor")
    if entry.inline and not 0 <= entry.inline[0] <= sum(entry.inline) <= inline:
        raise FormatError(f"{where}: {name}: inline bytes {entry.inline} of {inline}")
    if entry.inline and entry.boxes:
        raise FormatError(f"{where}: {name}: both inline and in chunks")
    if any(size < 0 for size in entry.shape):
        raise FormatError(f"{where}: {name}: shape {entry.shape}")
