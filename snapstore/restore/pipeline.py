"""The read path: record -> manifest -> get ranges -> unpack -> decode -> planes -> patch chain -> verify -> state.

In: a snapshot and maybe a target to fill. Out: the state, every chunk of it checked against its digest. Needs the
record and the manifests alone, no index.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..chunks import limits
from ..chunks.reader import Fetcher, Wanted
from ..context import Context
from ..engine.cuda import require_device
from ..errors import FormatError, UnknownFormatError
from ..format import chunking, manifest
from ..format.manifest import Box, ChunkTable, Manifest, TensorEntry, part_name
from ..format.records import Snapshot
from ..state.arrays import fill
from ..state.restore_plan import RestorePlan
from ..state.selection import parts_needed
from ..state.tensors import StoredPart, TensorSpec
from ..storage.base import ObjectStore
from ..text import human_bytes

log = logging.getLogger("snapstore")


def restore(
    context: Context, snapshot: Snapshot, *, into: Any = None,
    keys: str | Sequence[str] | None = None, device: Any = None,
) -> Any:  # fmt: skip
    """The state of a snapshot, or `into` filled with it.

    Raises:
        InvalidInputError: `into` does not fit; every difference is listed and nothing was written.
        CapabilityError: `device` is a CUDA device that is not there; the state does not fit into the memory that is, or
            takes more decoding than what is stored explains. Nothing was written.
        IntegrityError, FormatError: damage; `into` may then be half written.
    """
    manifests = read_manifests(context.store, context.engines.digest_seed, snapshot, keys)
    parts = [StoredPart(m.header.part, m.tree, [spec_of(entry) for entry in m.tensors]) for m in manifests]
    target = RestorePlan(parts, into=into, keys=keys, device=device, on_device=context.engines.on_device)
    if device is not None and any(parts[p].specs[i].kind in ("tensor", "parameter") for p, i in target.selected):
        require_device(device)
    limits.require_memory(target.fresh_bytes(), f"{snapshot.ref}: restoring {len(target.selected)} tensors")
    chosen = [(manifests[part], manifests[part].tensors[index]) for part, index in target.selected]
    require_decoding(context.store, chosen, f"{snapshot.ref}: restoring")
    pending: list[tuple[int, int, int]] = []  # (part, tensor, chunks left), in order
    try:
        for done in Fetcher(context).rebuild(_wanted(manifests, parts, target, pending)):
            _complete(target, pending, done)
        _complete(target, pending, 0)
    finally:
        context.engines.rest()
    return target.finish()


def read_manifests(
    store: ObjectStore, digest_seed: int, snapshot: Snapshot, keys: str | Sequence[str] | None = None
) -> list[Manifest]:
    """The manifests whose parts `keys` can match, the root part first; their tensors are as large as they say."""
    names = parts_needed([ref.part for ref in snapshot.manifests], keys)
    manifests = [manifest.read(store, ref, digest_seed) for ref in snapshot.manifests if ref.part in names]
    for m in manifests:
        check_layouts(m, part_name(m.header.part))
    return manifests


def spec_of(entry: TensorEntry) -> TensorSpec:
    """A manifest's entry as the state knows it."""
    return TensorSpec(
        tuple(entry.path), entry.kind, entry.dtype, tuple(entry.shape), entry.requires_grad, entry.tie
    )  # fmt: skip


def check_layouts(m: Manifest, where: str) -> None:
    """`_check_layout` of every tensor."""
    for entry in m.tensors:
        _check_layout(m, entry, where)


def _check_layout(m: Manifest, entry: TensorEntry, where: str) -> None:
    """A tensor's boxes, chunks and inline bytes hold just its bytes.

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
    """Refuse chains that are longer than snapstore makes by default, and share their blobs by the thousand.

    Raises:
        CapabilityError: they take more decoding than what is stored explains.
    """
    decoded = sum(decoded_bytes(m.table, box) for m, entry in tensors for box in entry.boxes)
    nbytes = sum(spec_of(entry).nbytes for _, entry in tensors)
    what = f"{what} {human_bytes(nbytes)}"
    log.info("%s: %s to decode", what, human_bytes(decoded))
    limits.Budget(store).spend(decoded, what, free_bytes=limits.MAX_DEPTH_UNASKED * nbytes)


def decoded_bytes(table: ChunkTable, box: Box) -> int:
    """How many bytes all links of all chains of a box give together."""
    rows = slice(box.first_chunk, box.first_chunk + box.chunks)
    return int((table.lengths[rows].astype(np.int64) * table.ref_counts[rows]).sum())


def _wanted(
    manifests: Sequence[Manifest], parts: Sequence[StoredPart], target: RestorePlan, pending: list[tuple[int, int, int]]
) -> Iterator[Wanted]:
    """Every chunk of the selected tensors, in stored order; memory for a tensor is taken when it is reached."""
    packs = [m.header.pack_names for m in manifests]
    for part, index in target.selected:
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


def _complete(target: RestorePlan, pending: list[tuple[int, int, int]], done: int) -> None:
    """Hand over the tensors whose last chunk is among the `done` next ones."""
    while pending:
        part, index, left = pending[0]
        if left > done:
            pending[0] = (part, index, left - done)
            return
        done -= left
        target.complete(part, index)
        pending.pop(0)
