"""Verify wanted: rebuild the chunks that a restore is about to read, before it changes anything.

In: the overlaps of a restore, or rows of a manifest. Out: the first chunk that is lost, or None: each gave the bytes of
its digest. The bytes are not kept: chunks are rebuilt in spans of SPAN_BYTES, all in the same memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Column
from ..catalog.read_twice import read_object_twice, require_damage
from ..chunks.reader import ChunkReader, Wanted
from ..context import Context
from ..errors import DAMAGE, CapabilityError, IntegrityError, SnapstoreError, StorageError, UnknownFormatError
from ..format.keys import pack_key
from ..format.manifests import manifest
from ..format.manifests.manifest import Manifest
from ..format.manifests.rank_checks import read_children
from ..format.records import Snapshot
from ..restore.manifests import pages_of
from ..restore.overlaps import Overlap
from ..state.fill.buffers import RestoreBuffers, Want
from ..state.values.arrays import Memory, new_memory

#: Chunks are rebuilt in spans of at most this much, or one by one [plain bytes].
SPAN_BYTES = 8 * 1024 * 1024


class LostChunk(NamedTuple):
    """A chunk that two reads could not rebuild.

    Attributes:
        row: of the chunk in the table of its manifest.
    """

    m: Manifest
    row: int
    error: SnapstoreError


def first_lost(
    context: Context, overlaps: Mapping[Want, Sequence[Overlap]], buffers: RestoreBuffers
) -> LostChunk | None:
    """Rebuild every chunk of the overlaps of a restore; return the first one that cannot be rebuilt, or None.

    A chunk is rebuilt where the restore will do that, on a device or in host memory: some codecs need a GPU.

    Raises:
        CapabilityError: this machine cannot rebuild one, which is no damage.
        StorageError: the store does not answer, or withholds a pack, which may be whole.
    """
    wanted: dict[tuple[int, str], tuple[Manifest, Any, list[Column]]] = {}
    for want, found in overlaps.items():
        for overlap in found:
            if overlap.stored.chunks:
                m, device = overlap.stored.m, buffers.device_of(want)
                wanted.setdefault((id(m), str(device)), (m, device, []))[2].append(overlap.rows)
    for m, device, rows in wanted.values():
        if (lost := first_lost_of(context, m, np.unique(np.concatenate(rows)), device)) is not None:
            return lost
    return None


def lost_chunk_in(context: Context, snapshot: Snapshot, *, pages_only: bool) -> LostChunk | None:
    """Return the first lost chunk of a snapshot, as far as its manifests can be read; None if there is none.

    Args:
        pages_only: look only among the chunks that hold the trees of its root manifests.
    """
    for ref in snapshot.manifests:
        with suppress(*DAMAGE, StorageError):
            m = manifest.read(context.store, ref, context.engines.digest_seed)
            children = [] if pages_only else read_children(context.store, ref, m, context.engines.digest_seed)
            pages = pages_of(m) or ()
            rows = [box.first_chunk + np.arange(box.chunks) for page in pages for box in page.boxes]
            chosen = np.unique(np.concatenate(rows)) if rows else np.arange(0)
            found = first_lost_of(context, m, chosen if pages_only else np.arange(len(m.table)))
            for child in children:
                found = found or first_lost_of(context, child, np.arange(len(child.table)))
            if found is not None:
                return found
    return None


def first_lost_of(context: Context, m: Manifest, rows: Column, device: Any = None) -> LostChunk | None:
    """Rebuild some rows of a manifest, in spans; return the first one that is lost, or None. Raises as `first_lost`.

    Args:
        device: where they are rebuilt, a torch.device; None: in host memory.
    """
    room = new_memory(0, device)
    for span in _spans(m.table.lengths[rows].astype(np.int64)):
        size = int(m.table.lengths[rows[span]].astype(np.int64).sum())
        if size > len(room):
            room = new_memory(size, device)
        if (lost := _first_lost_in(context, m, rows[span], room)) is not None:
            return lost
    return None


def _spans(lengths: Column) -> Iterator[slice]:
    """Yield slices of neighbours that have at most SPAN_BYTES together, or are one chunk."""
    ends, first = np.cumsum(lengths), 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(ends, before + SPAN_BYTES, "right")))
        yield slice(first, end)
        first = end


def _first_lost_in(context: Context, m: Manifest, rows: Column, room: Memory) -> LostChunk | None:
    """Rebuild the rows of a span at once, and after a failure one by one: the one that fails again twice is lost."""
    try:
        _rebuild(context, m, rows, room)
        return None
    except UnknownFormatError:
        pass  # its pack tells whether a bit of its version has flipped
    except CapabilityError:
        raise
    except (*DAMAGE, StorageError) as error:
        require_damage(context.store, error)
    for row in rows.tolist():
        try:
            read_object_twice(context.store, partial(_rebuild, context, m, np.array([row]), room))
        except CapabilityError as error:
            if not (isinstance(error, UnknownFormatError) and _is_altered(context, m, row)):
                raise
            return LostChunk(m, row, IntegrityError(f"{error}; the SHA-256 of its pack is another: it is altered"))
        except DAMAGE as error:
            error.__cause__ = error.__context__ = None
            return LostChunk(m, row, error.with_traceback(None))  # whose frames hold the memory
    return None


def _is_altered(context: Context, m: Manifest, row: int) -> bool:
    """Return whether a pack of a chunk's chain has another SHA-256 than its name, in two reads."""
    sizes, refs = m.header.pack_size_list, m.table.refs_of(np.array([row]))

    def altered(number: int) -> bool:
        name = m.header.pack_names[number]
        try:
            data = context.store.get(pack_key(name), limit_bytes=max(sizes[number], 1))
        except DAMAGE:
            return True
        return hashlib.sha256(data).hexdigest() != name

    return any(altered(number) and altered(number) for number in np.unique(m.table.ref_packs[refs]).tolist())


def _rebuild(context: Context, m: Manifest, rows: Column, room: Memory) -> None:
    lengths = m.table.lengths[rows].astype(np.int64)
    wanted = Wanted(m.table, m.header.pack_names, rows, room, np.cumsum(lengths) - lengths)
    for _ in ChunkReader(context, counts=False).rebuild([wanted]):
        pass
