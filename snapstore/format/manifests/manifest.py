"""Manifest: which tensors a snapshot's part holds and, per chunk, where its blob and the blobs of its bases lie.

In: tensor entries and a chunk table (chunk_table.py). Out: one immutable object, named by its SHA-256; and back
(docs/format.md, "Manifest"; bytes in sections.py). A million chunks encode and decode in under a second each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import FormatError, IntegrityError, NotFoundError
from ...state.tree.decode import unpack_nodes
from ...state.values.tensors import DimOrder
from ...storage.base import ObjectStore
from ...text import counted
from ...threads import msgpack_decoder
from .. import chunking, open_maps
from ..chunking import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from ..keys import manifest_key, sha256_names
from ..open_maps import NONE_UNKNOWN, UnknownKeys
from ..records import (
    RANKS,
    STRIDES,
    XOR,
    Count,
    MadeFor,
    ManifestRef,
    Rank,
    RunName,
    Seed,
    Step,
    require_known_features,
)
from . import sections as layout
from .chunk_table import COLUMNS, ChunkTable
from .sections import Box as Box
from .sections import TensorEntry as TensorEntry
from .sections import check_entries, decode_orders, encode_orders

#: The first read of a header takes this many bytes; most headers fit.
HEADER_READ_BYTES = 64 * 1024


class ManifestHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a manifest that gc and listings need: its writer, its sizes, and every pack that it uses.

    Attributes:
        digest_seed: the repository's seed, under which every digest was taken. So the seed outlives a lost config.
        features: the features that a reader must know beyond format 1.
        world_size: the number of ranks of the job; 0: one process, without ranks.
        children: in a root manifest: the manifests of its part, by rank. They hold the bytes of the tensors.
        box_map: in a root, a packed `BoxMap` of the children's boxes; in a child, of its own boxes. b"": there is none.
        depth: the most deltas in a chain, here or in a child.
        run, step: of the snapshot that it was written for; unset: an early writer has not told them.
        packs, pack_sizes: the SHA-256 of each pack (32 bytes each), and its size in bytes (u64 each).
        unknown: the keys that this release does not know; see open_maps.py.
    """

    save_id: bytes
    snapshot: bytes
    revision: Count
    rank: Rank
    sequence: Count
    part: str
    chunk_bytes: int
    digest_seed: Seed
    tensors: Count
    chunks: Count
    refs: Count
    logical_bytes: Count
    depth: Count
    packs: bytes
    pack_sizes: bytes
    sections: list[layout.Section]
    features: list[str] = []
    world_size: Count = 0
    children: list[ManifestRef] = []
    box_map: bytes = b""
    run: RunName | msgspec.UnsetType = msgspec.UNSET
    step: Step | msgspec.UnsetType = msgspec.UNSET
    unknown: UnknownKeys = NONE_UNKNOWN

    @property
    def made_for(self) -> MadeFor:
        """Return the record that the manifest was written for."""
        return MadeFor(self.snapshot, self.revision, self.run, self.step)

    @property
    def pack_names(self) -> list[str]:
        """Return the SHA-256 of every pack, hex; `ref_packs` are indices in it."""
        return sha256_names(self.packs)

    @property
    def pack_size_list(self) -> list[int]:
        """Return the size of every pack [bytes]."""
        return list(np.frombuffer(self.pack_sizes, "<u8").tolist())


@dataclass(slots=True)
class Manifest:
    """A whole manifest in memory.

    Attributes:
        dim_orders: by the number of the entry; see sections.py.
        unknown: the sections that this release does not know.
        ref: its reference; None before the manifest is written, or read by a reference.
    """

    header: ManifestHeader
    tree: Any
    tensors: list[TensorEntry]
    inline: bytes
    table: ChunkTable
    dim_orders: Mapping[int, DimOrder] = field(default_factory=dict)
    unknown: Sequence[layout.UnknownSection] = ()
    ref: ManifestRef | None = None

    @property
    def own_packs(self) -> dict[str, int]:
        """Return the packs of its own chunks: name -> size [bytes]; a root's header also names its children's."""
        used = np.flatnonzero(np.bincount(self.table.ref_packs)).tolist()
        names, sizes = self.header.pack_names, self.header.pack_size_list
        return {names[number]: sizes[number] for number in used}

    @property
    def owners(self) -> npt.NDArray[np.int64]:
        """Return the number of the tensor that each chunk belongs to, (n,)."""
        owners = np.full(len(self.table), -1, np.int64)
        for number, entry in enumerate(self.tensors):
            for box in entry.boxes:
                owners[box.first_chunk : box.first_chunk + box.chunks] = number
        return owners

    @property
    def content(self) -> bytes:
        """Return tree, entries, inline bytes and orders, packed: as bytes, a NaN equals itself."""
        return msgspec.msgpack.encode((self.tree, self.tensors, self.inline, sorted(self.dim_orders.items())))

    def says_the_same(self, other: Manifest) -> bool:
        """Return whether two manifests differ only in the session and the record that they were written for.

        Then a record may name either of them. If one has keys or sections that this release does not know, they differ.
        """
        if not np.array_equal(self.table.digests, other.table.digests):
            return False
        headers = [self.header, other.header]
        packs = [dict(zip(header.pack_names, header.pack_size_list, strict=True)) for header in headers]
        of_writer: dict[str, Any] = {"save_id": b"", "sequence": 0, **MadeFor(b"", 0)._asdict()}
        places: dict[str, Any] = {"packs": b"", "pack_sizes": b"", "sections": []}  # packs may differ in their order
        alike = [msgspec.structs.replace(header, **of_writer, **places) for header in headers]
        if alike[0] != alike[1] or packs[0] != packs[1] or self.header.unknown or self.unknown or other.unknown:
            return False
        numbers = {name: number for number, name in enumerate(packs[1])}
        renumber = np.array([numbers[name] for name in packs[0]] or [0], np.uint32)
        table = replace(self.table, ref_packs=renumber[self.table.ref_packs])
        columns = ((getattr(table, name), getattr(other.table, name)) for name in COLUMNS)
        return all(np.array_equal(*pair) for pair in columns) and self.content == other.content


#: The fields that ManifestHeader and ManifestContents share.
_SAME = ["save_id", "rank", "sequence", "part", "chunk_bytes", "digest_seed", "logical_bytes", "features"]
_SAME += ["world_size", "children", "box_map"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestContents:
    """The contents of a manifest to be written; `encode` derives the rest of its header.

    Attributes:
        packs: hex SHA-256 names; `table.ref_packs` are indices in it.
        pack_sizes: of each of them [bytes].
        tree: a node, or `msgspec.Raw` of a packed one.
        made_for: the record that will name the manifest; None: revision 0 of the snapshot `save_id`.
        features, world_size, children, box_map: see `ManifestHeader`; `encode` adds those of `dim_orders` and XORs.
        depth: the most deltas in a chain of the children.
        unknown_keys, unknown_sections: of the manifest that this one replaces.
    """

    save_id: bytes
    rank: int
    sequence: int
    part: str
    chunk_bytes: int
    digest_seed: int
    tree: Any
    tensors: list[TensorEntry]
    inline: bytes
    table: ChunkTable
    packs: Sequence[str]
    pack_sizes: Sequence[int]
    logical_bytes: int
    made_for: MadeFor | None = None
    features: Sequence[str] = ()
    world_size: int = 0
    children: Sequence[ManifestRef] = ()
    box_map: bytes = b""
    depth: int = 0
    dim_orders: Mapping[int, DimOrder] = field(default_factory=dict)
    unknown_keys: UnknownKeys = msgspec.UNSET
    unknown_sections: Sequence[layout.UnknownSection] = ()

    @classmethod
    def of(cls, m: Manifest) -> ManifestContents:
        """Return the contents of a manifest, for `dataclasses.replace` and another `encode`.

        `depth` becomes 0: for a root manifest, set it again.
        """
        return cls(
            **{name: getattr(m.header, name) for name in (*_SAME, "made_for")},
            tree=m.tree,
            tensors=m.tensors,
            inline=m.inline,
            table=m.table,
            packs=m.header.pack_names,
            pack_sizes=m.header.pack_size_list,
            dim_orders=m.dim_orders,
            unknown_keys=m.header.unknown,
            unknown_sections=m.unknown,
        )


def encode(contents: ManifestContents) -> bytes:
    """Return a manifest's bytes."""
    c, table = contents, contents.table
    made_for = c.made_for or MadeFor(c.save_id, 0)
    sections, body = layout.encode_sections(
        {
            "tree": msgspec.msgpack.encode(c.tree),
            "tensors": msgspec.msgpack.encode(c.tensors),
            "inline": c.inline,
            **table.to_bytes(),
            **encode_orders(c.dim_orders),
        },
        c.unknown_sections,
    )
    header = ManifestHeader(
        **{name: getattr(c, name) for name in _SAME if name != "features"},
        features=_features_of(c),
        **made_for._asdict(),
        tensors=len(c.tensors),
        chunks=len(table),
        refs=len(table.ref_kinds),
        depth=max(int(table.depths.max(initial=0)), c.depth),
        packs=bytes.fromhex("".join(c.packs)),
        pack_sizes=np.asarray(c.pack_sizes, "<u8").tobytes(),
        sections=sections,
        unknown=c.unknown_keys,
    )
    return layout.join(open_maps.encode(header, "children"), body)


def _features_of(c: ManifestContents) -> list[str]:
    """Return the features of a manifest; a rewrite may have replaced the last XOR of one."""
    found = [feature for feature in c.features if feature != XOR]
    found += [STRIDES] if c.dim_orders else []
    found += [XOR] if (c.table.ref_kinds == chunking.XOR).any() else []
    return list(dict.fromkeys(found))


def decode_header(data: bytes | memoryview, where: str) -> ManifestHeader:
    """Return the header, from a manifest's first bytes.

    Raises:
        FormatError, IntegrityError: not a manifest, damaged, or inconsistent.
        UnknownFormatError: it has a version or a feature that this release does not know.
    """
    packed = layout.packed_header(data, where)
    try:
        require_known_features(packed, where)
        header = msgpack_decoder(ManifestHeader).decode(packed)
        header = open_maps.with_unknown(header, packed, "children")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{where}: manifest header does not decode: {error}") from error
    if len(header.packs) % 32 or len(header.pack_sizes) != len(header.packs) // 4:
        raise FormatError(f"{where}: {len(header.packs)} bytes of pack names, {len(header.pack_sizes)} of sizes")
    if header.chunk_bytes % 16 or not MIN_CHUNK_BYTES <= header.chunk_bytes <= MAX_CHUNK_BYTES:
        raise FormatError(f"{where}: chunks of {header.chunk_bytes} bytes")
    _check_ranks(header, where)
    return header


def _check_ranks(header: ManifestHeader, where: str) -> None:
    """Check the ranks and children of a header; raises FormatError."""
    size, children = header.world_size, header.children
    if (RANKS in header.features) != (size > 0):
        raise FormatError(f"{where}: of {counted(size, 'rank')}, with the features {header.features}")
    if header.rank >= max(size, 1):
        raise FormatError(f"{where}: rank {header.rank} of {size}")
    if not children:
        return
    if not size or header.rank:
        raise FormatError(f"{where}: rank {header.rank} of {size}: it cannot have children")
    before = -1
    for child in children:
        if child.part != header.part or not before < child.rank < size:
            raise FormatError(
                f"{where}: a child of rank {child.rank} of {size} for part {child.part!r} behind rank {before}, "
                f"expected part {header.part!r} and ranks in order, each at most once"
            )
        before = child.rank
    if len({child.sha256 for child in children}) < len(children):
        raise FormatError(f"{where}: names a child twice")


def part_name(part: str) -> str:
    """Return a part's name for messages; the root part has no name of its own."""
    return f"part {part!r}" if part else "the root part"


def manifest_name(header: ManifestHeader) -> str:
    """Return a manifest's name for messages: its part, and its rank in a job of ranks."""
    return part_name(header.part) + (f" of rank {header.rank}" if header.world_size else "")


def header_bytes(data: bytes) -> bytes:
    """Return a manifest's bytes up to the end of its header, the input of `decode_header`."""
    return data[: layout.header_end(data, "manifest")]


def read_header(store: ObjectStore, key: str, size_bytes: int, first: bytes | memoryview = b"") -> bytes:
    """Read a manifest's bytes up to the end of its header, in at most two reads; they are not verified.

    Args:
        first: the first `HEADER_READ_BYTES`, or the whole manifest, if they were read already.

    Raises:
        IntegrityError: the manifest is shorter than its prefix and header.
        FormatError: not a manifest, or of another version.
    """
    data = first or store.get_range(key, 0, min(HEADER_READ_BYTES, size_bytes))
    end = layout.header_end(data, key)
    if end > size_bytes:
        raise IntegrityError(f"{key}: prefix and header of {end} bytes in a manifest of {size_bytes}")
    if end > len(data):
        data = store.get_range(key, 0, end)
    return bytes(data[:end])


def is_header_of(data: bytes, ref: ManifestRef) -> bool:
    """Return whether these are a manifest's bytes up to the end of its header, as its reference says."""
    return hashlib.sha256(data).hexdigest() == ref.header_sha256


def proven_header(data: bytes, ref: ManifestRef) -> ManifestHeader:
    """Return the header of a manifest from its bytes up to the header's end, checked against its reference.

    Raises:
        IntegrityError: the bytes are another manifest's, or damaged, or contradict the record.
        FormatError: not a header, or inconsistent.
    """
    if not is_header_of(data, ref):
        decode_header(data, ref.key)  # a damaged header raises a better message
        raise IntegrityError(f"{ref.key}: its header is not the one that the record names; run 'snapstore check'")
    header = decode_header(data, ref.key)
    size_bytes = len(data) + max((offset + stored for _, offset, stored, _, _ in header.sections), default=0)
    pairs = {
        "part": (header.part, ref.part),
        "rank": (header.rank, ref.rank),
        "size": (size_bytes, ref.size_bytes),
        "logical size": (header.logical_bytes, ref.logical_bytes),
    }
    for what, (got, expected) in pairs.items():
        if got != expected:
            raise IntegrityError(
                f"{ref.key}: its {what} is {got!r}, the record says {expected!r}; run 'snapstore check'"
            )
    return header


def header_or_error(data: bytes, ref: ManifestRef) -> ManifestHeader | FormatError | IntegrityError:
    """Return the header of a manifest, or the error if the bytes do not match the reference."""
    try:
        return proven_header(data, ref)
    except (FormatError, IntegrityError) as error:
        return error


def ref_of(data: bytes) -> ManifestRef:
    """Return the reference by which a record names a manifest, from all its bytes."""
    head = header_bytes(data)
    header = decode_header(head, "manifest")
    return ManifestRef(
        part=header.part,
        rank=header.rank,
        sha256=hashlib.sha256(data).hexdigest(),
        header_sha256=hashlib.sha256(head).hexdigest(),
        size_bytes=len(data),
        logical_bytes=header.logical_bytes,
    )


def read(store: ObjectStore, ref: ManifestRef, digest_seed: int | None) -> Manifest:
    """Read a whole manifest, checked against its name and the record.

    Args:
        digest_seed: the repository's. None: the caller compares no chunk with its digest, or calls `check_seed` itself.

    Raises:
        IntegrityError: it is missing, cut short or altered.
        FormatError: it has another version or seed, or is inconsistent.
    """
    return checked(read_bytes(store, ref.sha256, ref.size_bytes), ref, digest_seed)


def checked(data: bytes, ref: ManifestRef, digest_seed: int | None) -> Manifest:
    """Decode bytes whose SHA-256 was verified, and compare the manifest with the record; see `read`."""
    proven_header(header_bytes(data), ref)
    m = decode(data, ref.key)
    if digest_seed is not None:
        check_seed(m.header, digest_seed, ref.key)
    _check_sizes(m, ref.key)
    m.ref = ref
    return m


def check_seed(header: ManifestHeader, digest_seed: int, where: str) -> None:
    """Compare a manifest's seed with the config's. The error shows neither seed: people share logs.

    Raises:
        FormatError: they differ, so no digest can be verified or compared with others.
    """
    if header.digest_seed != digest_seed:
        raise FormatError(
            f"{where}: its digests have another seed than config says: one of the two is another repository's; run "
            "'snapstore check', and if it finds fault with config, 'snapstore repair --apply'"
        )


def _check_sizes(m: Manifest, where: str) -> None:
    """Check that each chunk and each inline byte belongs to exactly one tensor, and that all sums agree.

    Else raise FormatError, before memory is sized by them. So a state takes no more memory than its record declares,
    and no chunk is restored as part of two tensors.
    """
    boxes = [(box.first_chunk, box.chunks) for entry in m.tensors for box in entry.boxes]
    ranges = [entry.inline for entry in m.tensors if entry.inline]
    for what, spans, total in (("chunks", boxes, len(m.table)), ("inline bytes", ranges, len(m.inline))):
        end = 0
        for first, count in sorted(spans):
            if first != end and count:
                raise FormatError(f"{where}: {what} {first}+{count}, expected the next from {end}: each has one tensor")
            end += count
        if end != total:
            raise FormatError(f"{where}: its tensors have {end} {what}, {total} are there")
    header, held = m.header, int(m.table.lengths.sum(dtype=np.int64)) + len(m.inline)
    held += sum(child.logical_bytes for child in header.children)
    if header.logical_bytes != held:
        raise FormatError(f"{where}: holds {held} bytes of tensors, its header says {header.logical_bytes}")


def read_bytes(store: ObjectStore, sha256: str, size_bytes: int) -> bytes:
    """Read all bytes of a manifest, checked against its name.

    Raises:
        IntegrityError: it is missing, cut short or altered.
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
    """Decode a manifest: the inverse of `encode`. No field of the result leads out of bounds.

    Raises:
        FormatError, IntegrityError: not a manifest, damaged, or inconsistent.
    """
    header = decode_header(data, where)
    raw = layout.decode_sections(data, layout.header_end(data, where), header.sections, where)
    try:
        table = ChunkTable.from_bytes(raw)
        tensors = msgpack_decoder(list[TensorEntry]).decode(raw["tensors"])
        tree = unpack_nodes(raw["tree"])
        inline = raw["inline"]
        orders = decode_orders(raw, header.features, tensors)
        check_entries(tensors, len(table), len(inline))
    except KeyError as error:
        raise FormatError(f"{where}: section {error} is missing") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{where}: manifest does not decode: {error}") from error
    except FormatError as error:
        raise type(error)(f"{where}: {error}") from error
    table.check(header.chunks, header.chunk_bytes, np.frombuffer(header.pack_sizes, "<u8"), where)
    if XOR not in header.features and (table.ref_kinds == chunking.XOR).any():
        raise FormatError(f"{where}: references to XORs, but the header does not have the feature {XOR!r}")
    unknown = layout.unknown_sections(data, layout.header_end(data, where), header.sections, where)
    held = len(tensors), len(table.ref_kinds)
    if held != (header.tensors, header.refs):
        raise FormatError(
            f"{where}: {held[0]} tensors and {held[1]} references, header says {header.tensors} and {header.refs}"
        )
    return Manifest(header, tree, tensors, inline, table, orders, unknown)
