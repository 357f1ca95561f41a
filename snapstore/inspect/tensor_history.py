"""Tensor history: the tensors of several snapshots of one run, which of their pieces changed when, and their values.

In: snapshots, in the order in which they were trained. Out: a Track for each tensor of floating-point numbers. Reads
manifests once, and compares them by the digests of chunks. Reads values when a caller asks for them. Counts the bytes
that it reads.

A piece is a chunk of a tensor, or the bytes of a box that lies in a manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes
from ..chunks.reader import ChunkReader, Wanted, whole
from ..context import Context
from ..errors import DAMAGE, NotFoundError
from ..format.records import Snapshot
from ..restore.manifests import spend_decoding
from ..restore.overlaps import StoredBox
from ..restore.pipeline import read_as_ruled
from ..state.values.arrays import as_float64
from ..state.values.containers import Path, display
from ..state.values.tensors import TensorSpec
from .stored_tensors import StoredTensor, digests_of, naming, read_tensors

Key = tuple[Path, int]
Values = npt.NDArray[np.float64]
Pieces = npt.NDArray[np.int64]
_NONE = np.empty(0, np.int64)
#: Manifests of this size are kept in memory; the others are read again where values are needed [bytes].
KEPT_BYTES = 512 * 1024 * 1024
#: The bits of the mantissa, by the beginning of the name of torch's dtype.
_MANTISSA = {"float64": 52, "complex128": 52, "float32": 23, "complex64": 23, "float16": 10, "complex32": 10}
_MANTISSA |= {"bfloat16": 7, "float8_e4": 3, "float8_e5": 2, "float": 0}
#: One read asks for at most so many bytes of values.
READ_BYTES = 64 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Track:
    """One tensor of floating-point numbers over the snapshots of a history.

    Attributes:
        begin: number of the first snapshot that has it, in its last dtype, shape and pieces.
        end: number behind the last snapshot that has it.
        changed: for each snapshot from `begin` on, the pieces that differ from those of the snapshot before.
    """

    key: Key
    spec: TensorSpec
    begin: int
    end: int
    form: tuple[object, ...]
    digests: Bytes
    changed: list[Pieces] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Return the dotted path."""
        return display(self.key[0])

    @property
    def part(self) -> str | int:
        """Return the top-level key."""
        return self.key[0][0] if self.key[0] else ""

    @property
    def is_optimizer(self) -> bool:
        """Return whether it is of an optimizer: its state dict has `state`, a number or name, and a word."""
        return "state" in self.key[0][:-2]

    def moved(self, number: int) -> bool:
        """Return whether it changed between a snapshot and the one before."""
        return self.begin < number < self.end and bool(self.changed[number - self.begin].size)

    def pieces_changed(self, after: int, until: int) -> Pieces:
        """Return the pieces that changed behind snapshot `after`, up to `until`."""
        between = self.changed[max(after + 1 - self.begin, 0) : until + 1 - self.begin]
        return np.unique(np.concatenate([_NONE, *between]))


class TensorHistory:
    """The tensors of floating-point numbers of some snapshots.

    Attributes:
        snapshots: those that could be read.
        skipped: name of a snapshot -> why its manifests could not be read.
        tracks: by path and number, in the order of the newest save.
        read_bytes: of all manifests and blobs that were read.
        plain_bytes: of the states of `snapshots`.
    """

    def __init__(self, context: Context, snapshots: Sequence[Snapshot]) -> None:
        self._context = context
        self.snapshots: list[Snapshot] = []
        self.skipped: dict[str, str] = {}
        self.tracks: dict[Key, Track] = {}
        self.read_bytes = self._kept_bytes = 0
        self._kept: dict[int, dict[Key, StoredTensor]] = {}
        for snapshot in snapshots:
            try:
                tensors = self._read(snapshot, len(self.snapshots))
            except (*DAMAGE, NotFoundError) as error:
                self.skipped[f"{snapshot.ref} (id:{snapshot.id[:12]})"] = str(error)
                continue
            self._compare(tensors, len(self.snapshots))
            self.snapshots.append(snapshot)
        self.plain_bytes = sum(snapshot.logical_bytes for snapshot in self.snapshots)

    def _read(self, snapshot: Snapshot, number: int) -> dict[Key, StoredTensor]:
        manifests, tensors = read_as_ruled(self._context, [snapshot], partial(read_tensors, self._context))
        found = {key: stored for key, stored in tensors.items() if _is_float(stored.spec)}
        size = sum(ref.size_bytes for m in manifests for ref in (*filter(None, [m.ref]), *m.header.children))
        self.read_bytes += size
        while self._kept and self._kept_bytes + size > KEPT_BYTES:
            self._kept.pop(next(iter(self._kept)))
            self._kept_bytes -= self._kept_bytes // (len(self._kept) + 1)
        self._kept[number] = found
        self._kept_bytes += size
        return found

    def _compare(self, tensors: dict[Key, StoredTensor], number: int) -> None:
        """Note which pieces of each tensor differ from those of the snapshot before."""
        for key, stored in tensors.items():
            boxes = _boxes(stored)
            form = (stored.spec.dtype, stored.spec.shape, *map(_form, boxes))
            digests = np.concatenate([np.empty((0, 16), np.uint8), *(_digests(stored, box) for box in boxes)])
            track = self.tracks.get(key)
            if track is None or track.form != form or track.end != number:
                self.tracks[key] = Track(key, stored.spec, number, number + 1, form, digests, [_NONE])
                continue
            changed = np.flatnonzero((track.digests != digests).any(axis=1))
            track.changed.append(changed if changed.size else _NONE)
            track.digests, track.end = digests, number + 1

    def stored(self, number: int, track: Track) -> StoredTensor:
        """Return a tensor of a snapshot."""
        if number not in self._kept:
            self._read(self.snapshots[number], number)
        return self._kept[number][track.key]

    def values(self, wanted: Sequence[tuple[int, Track, Pieces]]) -> Iterator[Values]:
        """Yield the values of pieces of tensors, piece by piece; each is asked for by the number of a snapshot.

        Raises:
            IntegrityError, FormatError: a chunk is damaged.
            CapabilityError: it must decode more than the limits allow.
        """
        todo: list[tuple[TensorSpec, Bytes]] = []
        reads: list[Wanted] = []
        size = 0
        for number, track, pieces in wanted:
            stored = self.stored(number, track)
            places = _places(stored)
            for piece in pieces.tolist():
                box, row = places[piece]
                if row is None:
                    todo.append((track.spec, stored.inline(box)))
                    continue
                out = np.empty(int(box.m.table.lengths[row]), np.uint8)
                todo.append((track.spec, out))
                reads.append(whole(box.m.table, box.m.header.pack_names, row, out))
                size += out.size
                if size >= READ_BYTES:
                    yield from self._decoded(number, reads, todo)
                    todo, reads, size = [], [], 0
        if todo:
            yield from self._decoded(wanted[-1][0], reads, todo)

    def _decoded(self, number: int, reads: list[Wanted], todo: list[tuple[TensorSpec, Bytes]]) -> Iterator[Values]:
        """Read chunks, and yield the values of all pieces."""
        snapshot = self.snapshots[number]
        blobs: dict[tuple[str, int], int] = {}  # a blob that two chains share is read once
        decoded = 0
        for w in reads:
            refs = w.table.refs_of(w.rows)
            places = zip(w.table.ref_packs[refs].tolist(), w.table.ref_offsets[refs].tolist(), strict=True)
            names = ((w.packs[pack], offset) for pack, offset in places)
            blobs.update(zip(names, w.table.ref_lengths[refs].tolist(), strict=True))
            decoded += len(w.out) * len(refs)
        with naming(snapshot):
            size = sum(len(w.out) for w in reads)
            spend_decoding(self._context.store, decoded, size, f"{snapshot.ref}: reading")
            for _ in ChunkReader(self._context).rebuild(reads):
                pass
        self.read_bytes += sum(blobs.values())
        for spec, data in todo:
            with np.errstate(all="ignore"):  # also a cast of a signaling NaN
                values = as_float64(data, spec)
            yield np.empty(0) if values is None else values

    def cost(self, number: int, track: Track, pieces: Pieces) -> int:
        """Return how many bytes must be read for the values of pieces."""
        places = _places(self.stored(number, track))
        found = [places[piece] for piece in pieces.tolist()]
        return sum(int(box.m.table.chain_bytes_of(np.array([row]))[0]) for box, row in found if row is not None)


def _is_float(spec: TensorSpec) -> bool:
    if spec.kind == "array":
        return spec.dtype[1] in "fc"
    return spec.dtype.startswith(("float", "bfloat", "complex")) and not spec.dtype.startswith("float4")


def eps_of(spec: TensorSpec) -> float:
    """Return the distance from 1.0 to the next number of a floating-point dtype."""
    if spec.kind == "array":
        return float(np.finfo(spec.dtype).eps)
    return next(2.0**-bits for name, bits in _MANTISSA.items() if spec.dtype.startswith(name))


def _boxes(stored: StoredTensor) -> list[StoredBox]:
    return sorted(stored.boxes, key=lambda box: tuple(box.offsets))


def _form(box: StoredBox) -> object:
    return tuple(box.offsets), tuple(box.sizes), box.chunks, box.chunks and box.m.header.chunk_bytes


def _digests(stored: StoredTensor, box: StoredBox) -> Bytes:
    """Return a digest of each piece of a box, (n, 16)."""
    if box.chunks:
        return digests_of(box)
    digest = hashlib.blake2b(stored.inline(box).tobytes(), digest_size=16).digest()
    return np.frombuffer(digest, np.uint8).reshape(1, 16)


def _places(stored: StoredTensor) -> list[tuple[StoredBox, int | None]]:
    """Return for each piece its box and the row of its chunk; None: it lies in the manifest."""
    found: list[tuple[StoredBox, int | None]] = []
    for box in _boxes(stored):
        found += [(box, row) for row in range(box.first_chunk, box.first_chunk + box.chunks)] or [(box, None)]
    return found
