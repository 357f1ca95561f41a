"""Manifest writer: the inputs of a save into durable packs and manifests.

In: the inputs, and the bases that they may reference. Out: one durable manifest per part; every pack that it names is
durable before it. If a part has not changed, the manifest is that of a base, and nothing is written. In a job of ranks,
each rank writes child manifests of the boxes that it stores; `ranks/roots` writes the roots above them. `chunk_writer`
writes the packs. Tensors of less than 4 KiB lie in the manifest itself, and so does a tree of less than 64 KiB. A
larger tree is cut into pages, which are stored as tensors are: pages that a base has cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from ..arrays import Column
from ..context import Context
from ..errors import DAMAGE, IntegrityError, SnapstoreError, StorageError
from ..format import records
from ..format.chunking import INLINE_BYTES, PAGED_BYTES, page_ends
from ..format.keys import pack_key
from ..format.manifests import box_map, manifest
from ..format.manifests.chunk_table import ChunkTable
from ..format.manifests.manifest import Box, Manifest, ManifestContents, TensorEntry
from ..format.manifests.tensor_layout import check_ties
from ..format.records import PARAMETER_SHAPES, RANKS, ManifestList, ManifestRef, Snapshot
from ..state.tree.encode import has_parameters, pack
from ..state.values.arrays import as_bytes
from ..state.values.tensors import DimOrder, Node, TensorSpec
from ..text import log
from .chunk_columns import Rows
from .chunk_writer import BaseDamagedError, ChunkWriter
from .inputs import BoxOf, PartInput, TensorInput
from .known_chunks import AnySession, Bases
from .replicas import digest_arrays
from .shares import Name
from .staging import Staging

#: A packed tree that is None.
NO_TREE = b"\xc0"


@dataclass(slots=True)
class Written:
    """The objects that a save has put into the store.

    Attributes:
        manifests: at most one per part, in order; `in_memory` has them decoded.
        headers: the bytes up to the header's end of the manifests that were put, by SHA-256.
        manifest_list: SHA-256 of the list of `manifests`, if some belong to another snapshot.
        depth: of the longest chain of deltas.
        sizes: of every object put, by key [bytes].
        built_on: the snapshots that it builds on, best first.
    """

    manifests: list[ManifestRef] = field(default_factory=list)
    headers: dict[str, bytes] = field(default_factory=dict)
    in_memory: list[Manifest] = field(default_factory=list)
    manifest_list: str | msgspec.UnsetType = msgspec.UNSET
    logical_bytes: int = 0
    stored_bytes: int = 0
    chunks: int = 0
    new_chunks: int = 0
    depth: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    built_on: list[Snapshot] = field(default_factory=list)

    @classmethod
    def of_chunks(cls, chunks: ChunkWriter) -> Written:
        """Return the packs that a finished ChunkWriter has put, and its counts."""
        sizes = dict(zip(map(pack_key, chunks.packs.names), chunks.packs.sizes, strict=True))
        stored_bytes, new_chunks = sum(sizes.values()), chunks.new_chunks
        built_on = chunks.bases.built_on(Rows.concatenate(chunks.done).base_rows)
        return cls(stored_bytes=stored_bytes, chunks=chunks.rows, new_chunks=new_chunks, sizes=sizes, built_on=built_on)

    @property
    def manifests_by_name(self) -> dict[str, Manifest]:
        """Return the manifests by SHA-256."""
        return {ref.sha256: m for ref, m in zip(self.manifests, self.in_memory, strict=True)}

    def add(self, session: AnySession, data: bytes, bases: Sequence[Manifest]) -> list[tuple[str, bytes]]:
        """Add a manifest, or a base's manifest that says the same; return the (key, bytes) to put for it.

        A manifest of a base is read first: no snapshot may depend on one that is damaged or gone.
        """
        ref = manifest.ref_of(data)
        made = manifest.decode(data, ref.key)
        made.ref = ref
        for m in bases:
            if m.ref is not None and (m.ref.part, m.ref.rank) == (ref.part, ref.rank) and made.says_the_same(m):
                with suppress(*DAMAGE, StorageError):
                    manifest.read_bytes(session.store, m.ref.sha256, m.ref.size_bytes)
                    made, ref = m, m.ref
                    break
        self.manifests.append(ref)
        self.in_memory.append(made)
        self.logical_bytes += ref.logical_bytes
        self.depth = max(self.depth, made.header.depth)
        if made.header.save_id.hex() != session.id:
            return []
        self.headers[ref.sha256] = manifest.header_bytes(data)
        self._note_put(ref.key, data)
        return [(ref.key, data)]

    def add_list(self, session: AnySession) -> list[tuple[str, bytes]]:
        """Make the list of the manifests if some belong to another snapshot; return the (key, bytes) to put."""
        if all(m.header.save_id.hex() == session.id for m in self.in_memory):
            return []
        names = ManifestList.of(session.id, session.made_for, self.manifests)
        self.manifest_list, data = names.sha256, records.encode(names)
        self._note_put(names.key, data)
        return [(names.key, data)]

    def _note_put(self, key: str, data: bytes) -> None:
        self.sizes[key] = len(data)
        self.stored_bytes += len(data)


def write(
    context: Context,
    session: AnySession,
    inputs: Sequence[PartInput],
    bases: Bases,
    *,
    full: bool,
    staging: Staging | None = None,
    place: tuple[int, int] = (0, 0),
) -> Written:
    """Store the inputs; all of it is durable on return. If a base cannot be read, they are stored again without bases.

    Args:
        bases: the chunks that may be referenced.
        full: store no chains of deltas.
        staging: lends the inputs their bytes of the base.
        place: (rank, world size) in a job of ranks: the rank writes child manifests, and none for a part of which it
            stores nothing. A world size of 0: one process writes all.

    Raises:
        InvalidInputError: the caller's memory was changed meanwhile.
        IntegrityError: a blob does not decode to its chunk; nothing refers to the blob.
        SnapstoreError: a base cannot be read, and a gc has fenced the session, or the inputs come from an iterator.
    """
    rank, world_size = place
    share_bytes = sum(tensor.spec.nbytes for part in inputs if world_size for tensor in part.tensors)
    while True:
        if staging is not None:
            staging.use_base(inputs, bases.snapshot.id if bases.snapshot else None)
        layouts: list[PartLayout] = []
        wholes: Sequence[TensorSpec] = ()
        try:
            with ChunkWriter(context, session, bases, full=full, state_bytes=world_size * share_bytes) as chunks:
                for part in inputs:
                    if part.own_nodes is None:
                        layouts.append(PartLayout(part.name, first_row=chunks.rows, wholes=len(part.specs)))
                        chunks.begin_part(part.name, rank)
                        digest_arrays(part.replicas, context.engines)
                        wholes = part.specs
                    else:
                        layouts[-1].append_alike(wholes, part.tensors)
                    layout = layouts[-1]  # a rank's own values follow the boxes of their part
                    for node, index in part.own_nodes or ():
                        node[1] = len(layout.entries) + index
                    for number, tensor in enumerate(part.tensors):
                        if tensor.spec.nbytes >= INLINE_BYTES:
                            session.heartbeat()
                            layout.append(tensor, chunks.add(tensor, tensor.number(number)), b"")
                        else:
                            layout.append(tensor, 0, _inline_bytes(context, tensor))
                    if not world_size or part.own_nodes is not None:
                        add_tree(chunks, layout, part.tree, pack(part.tree))
                    chunks.end_part()
                chunks.finish()
                return _write_manifests(context, session, chunks, layouts, place)
        except BaseDamagedError as damage:
            _require_repeatable(session, inputs, damage)
            log.warning("run=%s step=%d saving in full, a base cannot be read: %s", session.run, session.step, damage)
            bases = Bases()


def _require_repeatable(session: AnySession, inputs: Sequence[PartInput], damage: BaseDamagedError) -> None:
    """Raise the error of the damaged base if the inputs come from an iterator, which cannot be read again.

    Raise ConflictError if the session is gone: a gc has fenced it, and deleted the base.
    """
    session.require_session()
    if any(part.once for part in inputs):
        cause = damage.__cause__
        raise (type(cause) if isinstance(cause, SnapstoreError) else IntegrityError)(
            f"a base of this save cannot be read: {damage}; nothing was committed, and the iterator cannot be read "
            "again; repair the base ('snapstore repair'), or save with full=True; either way pass a new iterator"
        ) from damage


@dataclass(slots=True)
class PartLayout:
    """Where the tensors of a part lie: in `rows` chunks from `first_row` on, or in `inline`; and its packed tree."""

    part: str
    tree: bytes = NO_TREE
    features: list[str] = field(default_factory=list)  # that a reader of the tree must know
    entries: list[TensorEntry] = field(default_factory=list)
    inline: bytearray = field(default_factory=bytearray)
    first_row: int = 0
    rows: int = 0
    logical_bytes: int = 0
    whole: Name | None = None  # the tensor of which the last entry has boxes
    wholes: int = 0  # in a job of ranks: how many tensors the tree counts
    boxes: dict[int, tuple[box_map.Box, ...]] = field(default_factory=dict)  # by number of the tensor
    dim_orders: dict[int, DimOrder] = field(default_factory=dict)  # by number of the entry

    def append(self, tensor: TensorInput, chunks: int, inline: bytes) -> None:
        """Add the entry of a tensor, or a box to its entry; it lies in `chunks` chunks, or inline."""
        spec, nbytes = tensor.spec, tensor.spec.nbytes
        place = (len(self.inline), nbytes) if inline else None
        if tensor.box_of is None:
            boxes = [Box((0,) * len(spec.shape), spec.shape, self.rows, chunks)] if chunks else []
            self.entries.append(entry_of(spec, boxes, place))
        else:
            self._append_box(tensor, tensor.box_of, chunks, place)
        if spec.dim_order:
            self.dim_orders[len(self.entries) - 1] = spec.dim_order
        self.rows += chunks
        self.logical_bytes += nbytes
        self.inline += inline

    def _append_box(self, tensor: TensorInput, of: BoxOf, chunks: int, place: tuple[int, int] | None) -> None:
        offsets, sizes = of.piece.offsets, tensor.spec.shape
        boxes: tuple[Box, ...] = (Box(offsets, sizes, self.rows, chunks),)
        if self.whole == of.name:  # a further box of the last entry
            last = self.entries.pop()
            boxes = (*last.boxes, *boxes)
            if last.inline is not None:
                place = (last.inline[0], last.inline[1] + (place[1] if place else 0))
        elif of.name[2]:
            before = sum(entry.path == of.spec.path for entry in self.entries)
            self.entries += map(entry_of, of.same_path[before : of.name[2]])  # readers count the entries of a path
        self.entries.append(entry_of(of.spec, boxes, place))
        self.whole = of.name
        self.boxes[of.number] = (*self.boxes.get(of.number, ()), (offsets, sizes))

    def append_alike(self, wholes: Sequence[TensorSpec], own: Iterable[TensorInput]) -> None:
        """Add entries without bytes for tensors that share a path with a rank's own value.

        Readers count the entries of a path.
        """
        paths = {spec.path for spec in wholes} & {tensor.spec.path for tensor in own}
        for path in sorted(paths, key=repr):
            alike = [msgspec.structs.replace(spec, tie=None) for spec in wholes if spec.path == path]
            before = sum(entry.path == path for entry in self.entries)
            self.entries += [entry_of(spec) for spec in alike[before:]]


def entry_of(spec: TensorSpec, boxes: Sequence[Box] = (), inline: tuple[int, int] | None = None) -> TensorEntry:
    """Return the entry of a tensor; `boxes` are the boxes of it that are stored."""
    return TensorEntry(spec.path, spec.kind, spec.dtype, spec.shape, spec.requires_grad, spec.tie, tuple(boxes), inline)


def add_tree(chunks: ChunkWriter, layout: PartLayout, node: Node, tree: bytes) -> None:
    """Add the tree of a part, also packed as `tree`; if it is large, write it as pages after the tensors."""
    layout.tree = tree
    if has_parameters(node, tree):
        layout.features.append(PARAMETER_SHAPES)
    if len(tree) < PAGED_BYTES:
        return
    data = np.frombuffer(tree, np.uint8)
    path = (layout.part,) if layout.part else ()
    first, start = len(layout.entries), 0
    for number, end in enumerate(page_ends(data)):
        spec = TensorSpec(path, "page", "bytes", (end - start,), False, None)
        page = TensorInput((layout.part, path, number), spec, None, copy=data[start:end], may_delta=False)
        layout.append(page, chunks.add(page, first + number), b"")
        start = end
    layout.tree = pack(["pages", first, len(layout.entries) - first])


def _inline_bytes(context: Context, tensor: TensorInput) -> bytes:
    """Return the bytes of a small tensor.

    Raises:
        InvalidInputError: it was changed while they were read.
    """
    if not tensor.spec.nbytes:
        return b""
    try:
        memory = tensor.data(context.engines.memory_of)
        data = (memory if isinstance(memory, np.ndarray) else as_bytes(memory)).tobytes()
    except RuntimeError:  # torch's: the storage of a tensor on a device was resized while it was copied
        tensor.confirm()
        raise
    tensor.confirm()
    return data


def _write_manifests(
    context: Context,
    session: AnySession,
    chunks: ChunkWriter,
    layouts: Sequence[PartLayout],
    writer: tuple[int, int],
) -> Written:
    """Put one manifest per part, after every pack that it names; `writer` is (rank, world size)."""
    rank, world_size = writer
    if not world_size:
        check_ties({layout.part: layout.entries for layout in layouts})
    written = Written.of_chunks(chunks)
    rows = Rows.concatenate(chunks.done)
    puts = list[tuple[str, bytes]]()
    for sequence, layout in enumerate(layouts):
        if world_size and not layout.entries and layout.tree == NO_TREE:
            continue  # this rank stores nothing of the part
        contents = replace(
            contents_of(context, session, chunks, rows, layout),
            rank=rank,
            sequence=sequence,
            features=[RANKS, *layout.features] if world_size else layout.features,
            world_size=world_size,
            box_map=box_map.BoxMap.of_rank(rank, layout.boxes, layout.wholes).encode(),
        )
        puts += written.add(session, manifest.encode(contents), chunks.bases.manifests)
    if not world_size:
        puts += written.add_list(session)
    chunks.packs.put_all(puts)
    if context.options.verify_writes == "full":
        session.confirm(written.sizes)
    session.heartbeat()
    return written


def contents_of(
    context: Context, session: AnySession, chunks: ChunkWriter, rows: Rows, layout: PartLayout
) -> ManifestContents:
    """Return the contents of the manifest of a part, as one process writes it: the first one that it writes."""
    bases, packs = chunks.bases, chunks.packs
    span = slice(layout.first_row, layout.first_row + layout.rows)
    sources = rows.sources[span]  # equal chunks of this save refer to the blob of the first
    base_rows, blobs = rows.base_rows[sources], rows.blobs[sources]
    has_own, has_base = blobs[:, 0] >= 0, base_rows >= 0
    blobs = blobs[has_own]
    digests, lengths = rows.digests[span], rows.lengths[span].astype(np.uint32)
    taken = bases.table.take(base_rows[has_base])
    counts = has_own.astype(np.int64)
    counts[has_base] += taken.ref_counts
    starts = np.cumsum(counts) - counts
    is_own = np.zeros(int(counts.sum()), bool)
    is_own[starts[has_own]] = True

    def column(own: Column, from_bases: Column) -> Column:
        out = np.empty((len(is_own), *from_bases.shape[1:]), from_bases.dtype)
        out[is_own], out[~is_own] = own, from_bases
        return out

    used, ref_packs = np.unique(column(blobs[:, 1], taken.ref_packs), return_inverse=True)
    table = ChunkTable(
        digests=digests,
        lengths=lengths,
        ref_counts=counts.astype(np.uint16),
        ref_kinds=column(blobs[:, 0], taken.ref_kinds),
        ref_packs=ref_packs.astype(np.uint32),
        ref_offsets=column(blobs[:, 2], taken.ref_offsets),
        ref_lengths=column(blobs[:, 3], taken.ref_lengths),
        ref_digests=column(digests[has_own], taken.ref_digests),
    )
    names, sizes = [*bases.packs, *packs.names], [*bases.pack_sizes, *packs.sizes]
    return ManifestContents(
        save_id=bytes.fromhex(session.id),
        rank=0,
        sequence=0,
        part=layout.part,
        chunk_bytes=context.config.chunk_bytes,
        digest_seed=context.engines.digest_seed,
        tree=msgspec.Raw(layout.tree),
        tensors=layout.entries,
        inline=bytes(layout.inline),
        table=table,
        packs=[names[n] for n in used.tolist()],
        pack_sizes=[sizes[n] for n in used.tolist()],
        logical_bytes=layout.logical_bytes,
        made_for=session.made_for,
        features=layout.features,
        dim_orders=layout.dim_orders,
    )
