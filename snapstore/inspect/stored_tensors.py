"""Stored tensors: where the bytes of each tensor of a snapshot lie, and its bytes piece by piece, to compare them.

In: the manifests that a record names. Out: tensors by path; if several ranks saved a tensor, with its boxes in all
children. A tensor of one process is read chunk by chunk; one of several ranks is put together in memory first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..arrays import Bytes
from ..chunks import limits
from ..chunks.reader import ChunkReader, Wanted, whole
from ..context import Context
from ..errors import FormatError, IntegrityError
from ..format.manifest import Box, Manifest, TensorEntry
from ..format.rank_checks import entries_by_path, match_entries, read_children
from ..format.records import Snapshot
from ..format.tensor_layout import spec_of
from ..restore.manifests import read_manifests
from ..state.containers import Path
from ..state.tensors import TensorSpec


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a snapshot, and the manifests' entries that hold its bytes."""

    snapshot: Snapshot
    spec: TensorSpec
    pieces: list[tuple[Manifest, TensorEntry]] = field(default_factory=list)

    @property
    def fingerprint(self) -> object:
        """Return the boxes with their chunk digests or inline bytes; tensors with equal fingerprints are equal."""
        found = [
            (box.offsets, box.sizes, data if data is not None else _digests(m, box))
            for m, entry in self.pieces
            for box, data in boxes_of(m, entry)
        ]
        return sorted(found, key=lambda of: of[:2])


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


def tensor_bytes(context: Context, stored: StoredTensor) -> Iterator[Bytes]:
    """Yield the bytes of a tensor in C order, in pieces of any length.

    Raises:
        IntegrityError, FormatError: a chunk is damaged.
        CapabilityError: there is no memory to put the tensor together.
    """
    if len(stored.pieces) == 1 and len(stored.pieces[0][1].boxes) <= 1:
        m, entry = stored.pieces[0]
        for box, data in boxes_of(m, entry):
            yield from chunks_of(context, m, box) if data is None else [np.frombuffer(data, np.uint8)]
        return
    spec = stored.spec
    limits.require_memory(2 * spec.nbytes, f"{stored.snapshot.ref}: putting a tensor of several ranks together")
    together = np.empty(spec.shape, f"V{spec.itemsize}")
    for m, entry in stored.pieces:
        for box, data in boxes_of(m, entry):
            chunks = [np.frombuffer(data, np.uint8)] if data is not None else list(chunks_of(context, m, box))
            room = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            together[room] = np.concatenate(chunks).view(together.dtype).reshape(box.sizes)
    yield together.reshape(-1).view(np.uint8)


def boxes_of(m: Manifest, entry: TensorEntry) -> Iterator[tuple[Box, bytes | None]]:
    """Yield the boxes of an entry, with their bytes if these lie inline; an entry without boxes is one box."""
    at = entry.inline[0] if entry.inline else 0
    if not entry.boxes and entry.inline:
        yield Box((0,) * len(entry.shape), entry.shape, 0, 0), m.inline[at : sum(entry.inline)]
    for box in entry.boxes:
        if box.chunks:
            yield box, None
            continue
        end = at + math.prod(box.sizes) * spec_of(entry).itemsize
        yield box, m.inline[at:end]
        at = end


def _digests(m: Manifest, box: Box) -> bytes:
    return m.table.digests[box.first_chunk : box.first_chunk + box.chunks].tobytes()


def chunks_of(context: Context, m: Manifest, box: Box, first: int = 0) -> Iterator[Bytes]:
    """Yield the bytes of a box, chunk by chunk, from its chunk `first` on."""
    lengths = m.table.lengths[box.first_chunk + first : box.first_chunk + box.chunks].tolist()
    outs: list[Bytes] = []
    names = m.header.pack_names

    def wanted() -> Iterator[Wanted]:
        for i, length in enumerate(lengths):
            outs.append(np.empty(length, np.uint8))
            yield whole(m.table, names, box.first_chunk + first + i, outs[-1])

    for done in ChunkReader(context).rebuild(wanted()):
        yield from outs[:done]
        del outs[:done]
