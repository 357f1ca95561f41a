"""The read path: record -> manifest -> get ranges -> unpack -> decode -> planes -> patch chain -> verify -> state.

In: a snapshot, and a target to fill if there is one. Out: the state; every chunk is checked against its digest. The
record and the manifests are enough: no index is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..chunks import limits
from ..chunks.reader import ChunkReader, Wanted
from ..context import Context
from ..engine.cuda import require_device
from ..errors import (
    FormatError,
    IntegrityError,
    InvalidInputError,
    SnapstoreError,
    UnknownFormatError,
    out_of_memory,
)
from ..format import chunking, manifest
from ..format.chunk_table import ChunkTable
from ..format.manifest import Box, Manifest, TensorEntry, part_name
from ..format.records import SWEPT, Snapshot
from ..state.arrays import fill
from ..state.classes import Types
from ..state.restore_buffers import RestoreBuffers
from ..state.restore_plan import RestorePlan
from ..state.selection import parts_needed
from ..state.tensors import Node, StoredPart, TensorSpec
from ..state.tree_decode import Decoded, unpack_nodes, unpacked_bytes
from ..storage.base import ObjectStore
from ..text import human_bytes

log = logging.getLogger("snapstore")


def read(
    context: Context,
    ref: str,
    *,
    into: Any = None,
    keys: str | Sequence[str] | None = None,
    device: Any = None,
    types: Sequence[type] = (),
) -> tuple[Snapshot, Any]:
    """Return the snapshot that a reference names, and its state, or `into` filled with it.

    Raises:
        NotFoundError: the reference names nothing.
        See `restore` for the others.
    """
    snapshot = context.index.refresh().resolve(ref)
    while True:
        try:
            with out_of_memory(
                f"restore {snapshot.ref}", "free memory, restore parts of it with keys, or onto a device"
            ):
                return snapshot, restore(context, snapshot, into=into, keys=keys, device=device, types=types)
        except (IntegrityError, FormatError) as error:
            ruling = ruling_now(context, snapshot, error)
            # If it was deleted, the reference means another snapshot now.
            snapshot = ruling if ruling.state != SWEPT else context.index.refresh().resolve(ref)


def ruling_now(context: Context, snapshot: Snapshot, error: SnapstoreError) -> Snapshot:
    """Return what rules a snapshot whose reading failed: it was rewritten or deleted meanwhile, and a gc has deleted
    its old packs.

    Raises:
        The error again, with the snapshot's name: it rules as it was read, so it is damaged.
    """
    ruling = context.index.refresh().get(snapshot.id)
    if ruling is None or (ruling.state != SWEPT and ruling.manifests == snapshot.manifests):
        raise type(error)(f"{snapshot.ref} (id:{snapshot.id[:12]}): {error}") from error
    return ruling


def read_into(
    context: Context,
    ref: str,
    target: Any,
    *,
    keys: str | Sequence[str] | None = None,
    types: Sequence[type] = (),
) -> Snapshot:
    """Fill `target` with the state that a reference names, and return the snapshot; raises as `read` does."""
    if target is None:
        raise InvalidInputError("restore_into: the target is None; pass the state to fill, or call restore")
    return read(context, ref, into=target, keys=keys, types=types)[0]


def restore(
    context: Context,
    snapshot: Snapshot,
    *,
    into: Any = None,
    keys: str | Sequence[str] | None = None,
    device: Any = None,
    types: Sequence[type] = (),
) -> Any:
    """Return the state of a snapshot, or `into` filled with it.

    Args:
        types: classes whose values are made; those in `into` are made too. Others come back in their plain forms.

    Raises:
        InvalidInputError: `into` does not fit; the differences are named part by part, and nothing was written.
        CapabilityError: `device` is a CUDA device that is not there; or the state does not fit into memory, or takes
            more decoding than its stored bytes explain. Nothing was written.
        IntegrityError, FormatError: the snapshot is damaged; `into` may be half written.
    """
    manifests = read_manifests(context.store, context.engines.digest_seed, snapshot, keys)
    parts = stored_parts(context, manifests, snapshot.ref)
    decoded = decoding_of(snapshot.ref, Types(types, into))
    target = RestorePlan(
        parts, into=into, keys=keys, device=device, on_device=context.engines.on_device, decoded=decoded
    )
    if device is not None and any(parts[p].specs[i].kind in ("tensor", "parameter") for p, i in target.selected):
        require_device(device)
    limits.require_memory(target.fresh_bytes(), f"{snapshot.ref}: restoring {len(target.selected)} tensors")
    chosen = [(manifests[part], manifests[part].tensors[index]) for part, index in target.selected]
    require_decoding(context.store, chosen, f"{snapshot.ref}: restoring")
    pending: list[tuple[int, int, int]] = []  # (part, tensor, chunks left), in order
    try:
        for done in ChunkReader(context).rebuild(wanted(manifests, target.selected, target, pending)):
            complete(target, pending, done)
        complete(target, pending, 0)
    finally:
        context.engines.release_memory()
    return target.finish()


def read_manifests(
    store: ObjectStore, digest_seed: int, snapshot: Snapshot, keys: str | Sequence[str] | None = None
) -> list[Manifest]:
    """Read and check the manifests whose parts `keys` can match; return them, the root part first."""
    names = parts_needed([ref.part for ref in snapshot.manifests], keys)
    manifests = [manifest.read(store, ref, digest_seed) for ref in snapshot.manifests if ref.part in names]
    for m in manifests:
        check_layouts(m, part_name(m.header.part))
    return manifests


def stored_parts(context: Context, manifests: Sequence[Manifest], what: str) -> list[StoredPart]:
    """Return the parts that manifests store, each with its whole tree; trees in pages are read.

    Args:
        what: names the snapshot in errors.

    Raises:
        CapabilityError: the pages do not fit into memory, or take more decoding than their stored bytes explain.
        IntegrityError, FormatError: a page is damaged, or is none; or the pages of a tree do not unpack.
    """
    parts = []
    for m in manifests:
        pages = pages_of(m)
        parts.append(part_of(m, m.tree if pages is None else unpack_nodes(read_pages(context, m, pages, what))))
    return parts


def part_of(m: Manifest, tree: Node) -> StoredPart:
    """Return the part that a manifest stores, with its whole tree."""
    return StoredPart(m.header.part, tree, [spec_of(entry) for entry in m.tensors])


def decoding_of(what: str, types: Types | None = None) -> Decoded:
    """Return what counts the memory of the values in large trees, and refuses more than the machine has."""
    pending = 0

    def spend(nbytes: int) -> None:
        nonlocal pending
        pending += nbytes
        if pending >= limits.SMALL_BYTES:
            limits.require_memory(pending, f"{what}: restoring its plain values")
            pending = 0  # taken from here on

    return Decoded(spend, types)


def pages_of(m: Manifest) -> Sequence[TensorEntry] | None:
    """Return the pages of a part's tree; None if it lies in the manifest.

    Raises:
        FormatError: it names entries that are no pages.
    """
    if type(m.tree) is not list or m.tree[:1] != ["pages"]:
        return None
    if [type(field) for field in m.tree] != [str, int, int] or not 0 <= m.tree[1] < m.tree[1] + m.tree[2]:
        raise FormatError(f"{part_name(m.header.part)}: the pages of its tree are not named by two numbers")
    pages = m.tensors[m.tree[1] : m.tree[1] + m.tree[2]]
    if len(pages) != m.tree[2] or any(page.kind != "page" or len(page.boxes) != 1 for page in pages):
        raise FormatError(f"{part_name(m.header.part)}: the pages of its tree are not among its tensors")
    return pages


def read_pages(context: Context, m: Manifest, pages: Sequence[TensorEntry], what: str) -> memoryview:
    """Return the bytes of pages, joined; the machine has the memory to unpack them. Raises as `stored_parts` does."""
    what = f"{what}: reading the plain values of {part_name(m.header.part)}"
    rows = np.concatenate([box.first_chunk + np.arange(box.chunks) for page in pages for box in page.boxes])
    lengths = m.table.lengths[rows].astype(np.int64)
    limits.require_memory(int(lengths.sum()), what)
    require_decoding(context.store, [(m, page) for page in pages], f"{what},")
    packed = np.empty(int(lengths.sum()), np.uint8)
    wanted = Wanted(m.table, m.header.pack_names, rows, packed, np.cumsum(lengths) - lengths)
    for _ in ChunkReader(context).rebuild([wanted]):
        pass
    limits.require_memory(unpacked_bytes(packed), what)
    return packed.data


def spec_of(entry: TensorEntry) -> TensorSpec:
    """Return the spec of a manifest's entry."""
    return TensorSpec(tuple(entry.path), entry.kind, entry.dtype, tuple(entry.shape), entry.requires_grad, entry.tie)


def check_layouts(m: Manifest, where: str) -> None:
    """Check the layout of every tensor; raises as `_check_layout` does."""
    for entry in m.tensors:
        _check_layout(m, entry, where)


def _check_layout(m: Manifest, entry: TensorEntry, where: str) -> None:
    """Check that a tensor's boxes, chunks and inline bytes have exactly its number of bytes.

    Raises:
        FormatError: they do not, or this release cannot read them.
    """
    name = ".".join(map(str, entry.path))
    nbytes = spec_of(entry).nbytes
    if entry.inline is not None or not entry.boxes:
        stored = entry.inline[1] if entry.inline else 0
        if stored != nbytes:
            raise FormatError(f"{where}: {name}: {nbytes} bytes, of which {stored} are stored")
        return
    if len(entry.boxes) != 1 or any(entry.boxes[0].offsets) or entry.boxes[0].sizes != entry.shape:
        raise UnknownFormatError(f"{where}: {name}: in {len(entry.boxes)} shards; a newer snapstore reads them")
    first, count = entry.boxes[0].first_chunk, entry.boxes[0].chunks
    if not count or count != chunking.chunk_count(nbytes, m.header.chunk_bytes):
        raise FormatError(f"{where}: {name}: {nbytes} bytes in {count} chunks of {m.header.chunk_bytes}")
    lengths = np.full(count, m.header.chunk_bytes, np.uint32)
    lengths[-1] = nbytes - (count - 1) * m.header.chunk_bytes
    if (m.table.lengths[first : first + count] != lengths).any():
        raise FormatError(f"{where}: {name}: its chunks are not the lengths of its bytes")


def require_decoding(store: ObjectStore, tensors: Sequence[tuple[Manifest, TensorEntry]], what: str) -> None:
    """Check that tensors take no more decoding than their stored bytes explain: long chains may share blobs.

    Raises:
        CapabilityError: they take more.
    """
    decoded = sum(decoded_bytes(m.table, box) for m, entry in tensors for box in entry.boxes)
    nbytes = sum(spec_of(entry).nbytes for _, entry in tensors)
    what = f"{what} {human_bytes(nbytes)}"
    log.info("%s: %s to decode", what, human_bytes(decoded))
    limits.Budget(store).spend(decoded, what, free_bytes=limits.MAX_DEPTH_UNASKED * nbytes)


def decoded_bytes(table: ChunkTable, box: Box) -> int:
    """Return how many bytes are decoded for a box: those of all links of its chains."""
    rows = slice(box.first_chunk, box.first_chunk + box.chunks)
    return int((table.lengths[rows].astype(np.int64) * table.ref_counts[rows]).sum())


def wanted(
    manifests: Sequence[Manifest],
    selected: Sequence[tuple[int, int]],
    target: RestorePlan | RestoreBuffers,
    pending: list[tuple[int, int, int]],
) -> Iterator[Wanted]:
    """Yield every chunk of the selected tensors, in stored order; a tensor's memory is taken when it is reached.

    Args:
        selected: (position of the manifest, index) of each tensor.
        pending: gets (manifest, tensor, chunks) of each tensor that is reached, for `complete`.
    """
    packs = {part: manifests[part].header.pack_names for part in {part for part, _ in selected}}
    for part, index in selected:
        m = manifests[part]
        entry = m.tensors[index]
        buffer = target.buffer(part, index)
        if entry.inline:
            fill(buffer, np.frombuffer(m.inline, np.uint8, entry.inline[1], entry.inline[0]))
        pending.append((part, index, sum(box.chunks for box in entry.boxes)))
        if not entry.boxes:
            continue
        box = entry.boxes[0]
        rows, starts = box.first_chunk + np.arange(box.chunks), np.arange(box.chunks) * m.header.chunk_bytes
        yield Wanted(m.table, packs[part], rows, buffer, starts)


def complete(target: RestorePlan | RestoreBuffers, pending: list[tuple[int, int, int]], done: int) -> None:
    """Complete the tensors whose last chunk is among the next `done` chunks."""
    while pending:
        part, index, left = pending[0]
        if left > done:
            pending[0] = (part, index, left - done)
            return
        done -= left
        target.complete(part, index)
        pending.pop(0)
