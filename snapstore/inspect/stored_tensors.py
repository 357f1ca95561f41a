"""Stored tensors: where the bytes of each tensor of a snapshot lie, and its bytes piece by piece, to compare them.

In: the manifests that a record names. Out: tensors by path; if several ranks saved a tensor, with its boxes in all
children. A tensor of one process is read chunk by chunk; one of several ranks is put together in memory first.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ..arrays import Bytes
from ..chunks import limits
from ..chunks.reader import ChunkReader, Wanted, whole
from ..context import Context
from ..errors import FormatError, IntegrityError
from ..format.manifests.manifest import Manifest, TensorEntry
from ..format.manifests.rank_checks import entries_by_path, match_entries, read_children
from ..format.manifests.tensor_layout import spec_of
from ..format.records import Snapshot
from ..restore.manifests import read_manifests
from ..restore.overlaps import StoredBox
from ..restore.sources import stored_boxes
from ..state.values.containers import Path
from ..state.values.tensors import TensorSpec


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a snapshot, and the manifests' entries that hold its bytes."""

    snapshot: Snapshot
    spec: TensorSpec
    pieces: list[tuple[Manifest, TensorEntry]] = field(default_factory=list)

    @property
    def boxes(self) -> list[StoredBox]:
        """Return all boxes of the tensor."""
        return [box for m, entry in self.pieces for box in stored_boxes(m, entry, self.spec.itemsize)]

    @property
    def fingerprint(self) -> object:
        """Return the boxes with their chunk digests or inline bytes; tensors with equal fingerprints are equal."""
        boxes = self.boxes
        data = ((digests_of(box) if box.chunks else self.inline(box)).tobytes() for box in boxes)
        return sorted((tuple(box.offsets), tuple(box.sizes), one) for box, one in zip(boxes, data, strict=True))

    def inline(self, box: StoredBox) -> Bytes:
        """Return the bytes of a box without chunks."""
        return np.frombuffer(box.m.inline, np.uint8)[box.inline :][: math.prod(box.sizes) * self.spec.itemsize]


@contextmanager
def naming(snapshot: Snapshot) -> Iterator[None]:
    """Add the name of the snapshot to the errors about damage that the block raises."""
    try:
        yield
    except (IntegrityError, FormatError) as error:
        raise type(error)(f"{snapshot.ref} (id:{snapshot.id[:12]}): {error}") from error


def read_tensors(context: Context, snapshot: Snapshot) -> tuple[list[Manifest], dict[tuple[Path, int], StoredTensor]]:
    """Return the manifests that a record names, and every tensor of the snapshot.

    A tensor's key is its path and a number: dict keys such as 1.0 and "1.0" give the same path.

    Raises:
        IntegrityError, FormatError: a manifest is missing or damaged, or contradicts its root.
    """
    seen: Counter[Path] = Counter()
    found: dict[tuple[Path, int], StoredTensor] = {}
    with naming(snapshot):
        manifests = read_manifests(context.store, context.engines.digest_seed, snapshot)
        for ref, m in zip(snapshot.manifests, manifests, strict=True):
            own: list[StoredTensor] = []
            for entry in m.tensors:
                own.append(StoredTensor(snapshot, spec_of(entry)))
                if entry.kind == "page":  # it holds plain values, which are compared one by one
                    continue
                if not m.header.world_size:
                    own[-1].pieces.append((m, entry))
                path = entry.path
                found[path, seen[path]] = own[-1]
                seen[path] += 1
            by_path = entries_by_path(m) if m.header.world_size else {}
            for child in read_children(context.store, ref, m, context.engines.digest_seed):
                for entry, number in match_entries(by_path, child.tensors):
                    if number is not None:
                        own[number].pieces.append((child, entry))
    return manifests, found


def bytes_of_each(context: Context, tensors: Iterable[StoredTensor]) -> Iterator[Iterator[Bytes]]:
    """Yield for each tensor its bytes in C order, in pieces of any length; read each to its end before the next one.

    Chunks of several tensors are read and decoded together.

    Raises:
        IntegrityError, FormatError: a chunk is damaged.
        CapabilityError: there is no memory to put a tensor together.
    """
    of = [(stored, stored.boxes) for stored in tensors]
    chunks = chunks_of(context, [box for _, boxes in of for box in boxes if box.chunks])
    for stored, boxes in of:
        each = ((box, islice(chunks, box.chunks) if box.chunks else [stored.inline(box)]) for box in boxes)
        yield _tensor_bytes(stored, each, len(boxes))


def _tensor_bytes(
    stored: StoredTensor, boxes: Iterable[tuple[StoredBox, Iterable[Bytes]]], count: int
) -> Iterator[Bytes]:
    """Yield the bytes of a tensor; the bytes of several boxes are put together first."""
    if count <= 1:
        for _, chunks in boxes:
            yield from chunks
        return
    spec = stored.spec
    limits.require_memory(2 * spec.nbytes, f"{stored.snapshot.ref}: putting a tensor of several ranks together")
    together = np.empty(spec.shape, f"V{spec.itemsize}")
    for box, chunks in boxes:
        room = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        together[room] = np.concatenate(list(chunks)).view(together.dtype).reshape(box.sizes)
    yield together.reshape(-1).view(np.uint8)


def digests_of(box: StoredBox) -> Bytes:
    """Return the digests of the chunks of a box, (n, 16)."""
    return box.m.table.digests[box.first_chunk : box.first_chunk + box.chunks]


def chunks_of(context: Context, boxes: Iterable[StoredBox], first: int = 0) -> Iterator[Bytes]:
    """Yield the bytes of boxes, chunk by chunk, from chunk `first` of each on."""
    outs: deque[Bytes] = deque()

    def wanted() -> Iterator[Wanted]:
        for box in boxes:
            m, rows = box.m, range(box.first_chunk + first, box.first_chunk + box.chunks)
            for row, length in zip(rows, m.table.lengths[rows.start : rows.stop].tolist(), strict=True):
                outs.append(np.empty(length, np.uint8))
                yield whole(m.table, m.header.pack_names, row, outs[-1])

    for done in ChunkReader(context).rebuild(wanted()):
        for _ in range(done):
            yield outs.popleft()
