"""Writer: the middle of the write path. split -> digest -> known? -> delta -> planes -> encode -> pack -> manifest.

In: the parts of a state and their bytes. Out: durable packs, then durable manifests. One batch of chunks is
encoded while the last one is packed and packs before it are hashed and put; all of it is bounded in bytes. Runs in the
thread that calls it; nothing here knows of the training loop.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from . import blob, chunking, delta, manifest, planes
from .delta import Base, Bases
from .digest import Bytes
from .engine import Encoded, EncodeJob, Engine, Threads
from .errors import AlreadyExistsError, FormatError, IntegrityError, NotFoundError
from .fetch import Fetcher, Wanted
from .manifest import Box, ChunkTable, TensorEntry
from .pack import DEFAULT_PACK_BYTES, PackWriter
from .records import ManifestRef, manifest_key, pack_key
from .session import Session
from .state.flatten import Part
from .state.tensors import TensorSpec
from .storage import ObjectStore

log = logging.getLogger("snapstore")
BATCH_BYTES = 16 * 1024 * 1024
BATCH_CHUNKS = 1024
#: Packs being hashed and put while the next ones fill; each is held in memory.
PUTS_IN_FLIGHT = 2
#: Room in a pack's buffer for the blob that fills it and for the footer; a larger pack makes its buffer grow.
PACK_SLACK_BYTES = 2 * 1024 * 1024

#: What reading a damaged repository raises.
DAMAGE = (IntegrityError, FormatError, NotFoundError)


class BaseDamagedError(Exception):
    """A base cannot be read back: the save starts again without bases (never leaves snapstore)."""


Source = Callable[[int, int], Bytes]  # (part, tensor) -> (nbytes,) uint8, safe to read until the save ends
Plain = Callable[[int, int], Bytes | None]  # (part, tensor) -> the first base's bytes of it, if still at hand
Encoding = Callable[[], list[Encoded]]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a save stores what is new."""

    chunk_bytes: int
    pack_bytes: int = DEFAULT_PACK_BYTES
    max_depth: int = delta.DEFAULT_MAX_DEPTH
    full: bool = False  # no chains at all: for snapshots that are kept for long


@dataclass(slots=True)
class Written:
    """What a save has put into the store, one rank's share."""

    manifests: list[ManifestRef] = field(default_factory=list)
    headers: dict[str, bytes] = field(default_factory=dict)  # manifest bytes up to the header's end, by SHA-256
    in_memory: list[manifest.Manifest] = field(default_factory=list)
    logical_bytes: int = 0
    stored_bytes: int = 0
    chunks: int = 0
    new_chunks: int = 0
    depth: int = 0


def write(
    store: ObjectStore, engine: Engine, session: Session, parts: Sequence[Part], source: Source, bases: Bases,
    plain: Plain, plan: Plan, *, rank: int = 0, on_chunk: Callable[[int, int, int, Bytes], None] | None = None,
) -> Written:  # fmt: skip
    """Store the parts' tensors, packs first, then one manifest a part; all durable on return.

    Args:
        source: the bytes of every tensor.
        bases: what may be referenced.
        plain: the plain bytes of the first base; what is not there is read from the store.
        on_chunk: told (part, tensor, start, chunk) once a chunk's base is no longer needed.
    """
    chunks = _Chunks(store, engine, session, bases, plain, plan, rank, on_chunk or (lambda *_: None))
    try:
        layouts = [_write_part(chunks, number, part, source, plan) for number, part in enumerate(parts)]
        chunks.finish()
        return _write_manifests(store, session, parts, layouts, chunks, plan, rank)
    finally:
        chunks.close()


@dataclass(slots=True)
class _Layout:
    """Where a part's tensors lie."""

    entries: list[TensorEntry] = field(default_factory=list)
    inline: bytearray = field(default_factory=bytearray)
    first_row: int = 0
    rows: int = 0


def _write_part(chunks: _Chunks, number: int, part: Part, source: Source, plan: Plan) -> _Layout:
    """Cut every tensor into chunks, or put it inline, and pass the chunks on."""
    layout = _Layout(first_row=chunks.rows)
    chunks.begin_part(part.name)
    for index, spec in enumerate(part.specs):
        boxes: list[Box] = []
        inline: tuple[int, int] | None = None
        if 0 < spec.nbytes < chunking.INLINE_BYTES:
            inline = (len(layout.inline), spec.nbytes)
            layout.inline += source(number, index).tobytes()
        elif spec.nbytes:
            count = chunking.chunk_count(spec.nbytes, plan.chunk_bytes)
            boxes = [Box([0] * len(spec.shape), list(spec.shape), layout.rows, count)]
            layout.rows += count
            chunks.add_tensor(number, index, part.name, spec, source(number, index))
        layout.entries.append(
            TensorEntry(list(spec.path), spec.kind, spec.dtype, list(spec.shape), spec.requires_grad, spec.tie,
                        boxes, inline)
        )  # fmt: skip
    chunks.end_part()
    return layout


def _write_manifests(
    store: ObjectStore, session: Session, parts: Sequence[Part], layouts: Sequence[_Layout], chunks: _Chunks,
    plan: Plan, rank: int,
) -> Written:  # fmt: skip
    """One manifest a part, durable; every pack they name is durable before."""
    written = Written(stored_bytes=sum(chunks.pack_sizes[len(chunks.bases.packs) :]), chunks=chunks.rows)
    written.new_chunks = chunks.new_chunks
    puts = []
    for sequence, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
        table, packs, sizes = chunks.table(layout.first_row, layout.rows)
        logical_bytes = sum(spec.nbytes for spec in part.specs)
        data = manifest.encode(
            save_id=bytes.fromhex(session.id), rank=rank, sequence=sequence, part=part.name,
            chunk_bytes=plan.chunk_bytes, tree=part.tree, tensors=layout.entries, inline=bytes(layout.inline),
            table=table, packs=packs, pack_sizes=sizes, logical_bytes=logical_bytes,
        )  # fmt: skip
        ref = ManifestRef(
            part=part.name, rank=rank, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data),
            logical_bytes=logical_bytes,
        )  # fmt: skip
        puts.append(chunks.start_put(manifest_key(ref.sha256), data))
        written.manifests.append(ref)
        written.headers[ref.sha256] = manifest.header_bytes(data)
        written.in_memory.append(manifest.decode(data, ref.key))
        written.logical_bytes += logical_bytes
        written.stored_bytes += len(data)
        written.depth = max(written.depth, int(table.depths.max(initial=0)))
    for durable in puts:
        durable()
    session.heartbeat()
    return written


def _put_once(store: ObjectStore, key: str, data: bytes | memoryview) -> None:
    """Put a content-addressed object; one that is there already is this very one (a lost response, repeated)."""
    with suppress(AlreadyExistsError):
        store.put(key, data)


@dataclass(slots=True)
class _Batch:
    """Chunks on their way, in tensor order."""

    part: list[int] = field(default_factory=list)
    tensor: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    chunk: list[Bytes] = field(default_factory=list)
    element_size: list[int] = field(default_factory=list)
    layout: list[int] = field(default_factory=list)
    candidate: list[int] = field(default_factory=list)  # row of the chunk at the same place in a base, or -1
    plain: list[Bytes | None] = field(default_factory=list)  # that chunk's bytes, if at hand
    size_bytes: int = 0


class _Chunks:
    """The batched middle of the write path: chunks in, blobs in packs and columns of the manifest out."""

    def __init__(
        self, store: ObjectStore, engine: Engine, session: Session, bases: Bases, plain: Plain, plan: Plan, rank: int,
        on_chunk: Callable[[int, int, int, Bytes], None],
    ) -> None:  # fmt: skip
        self._store, self._engine, self._session = store, engine, session
        self.bases, self._plain, self._plan, self._rank, self._on_chunk = bases, plain, plan, rank, on_chunk
        self._save_id = bytes.fromhex(session.id)
        self.rows = 0
        self.new_chunks = 0
        self._batch = _Batch()
        self._encoding: tuple[list[int], list[EncodeJob], list[int], _Batch, Encoding] | None = None
        self._part = ""
        self._writer: PackWriter | None = None
        self._putters = Threads(PUTS_IN_FLIGHT)
        self._free: list[Bytes] = []  # buffers of packs that have been put
        self._puts: list[tuple[int, Callable[[], list[tuple[str, int]]]]] = []
        self.packs = list(bases.packs)  # own packs follow; their names are known once they are put
        self.pack_sizes = list(bases.pack_sizes)
        self._own: dict[bytes, int] = {}  # digest -> row of this save
        # columns of this save's chunks, a row each
        self._digests: list[bytes] = []
        self._lengths: list[int] = []
        self._base_rows: list[int] = []  # known chunk, or base of a delta; -1: none
        self._blobs: list[tuple[int, int, int, int] | None] = []  # kind, pack, offset, length of its own blob

    # -- chunks in

    def begin_part(self, name: str) -> None:
        """Packs never mix parts."""
        self._part = name

    def add_tensor(self, part: int, index: int, name: str, spec: TensorSpec, data: Bytes) -> None:
        """Cut a tensor's bytes into chunks."""
        first, is_first_base = self.bases.first_row((name, spec.path, spec.dtype, spec.shape))
        plain = self._plain(part, index) if is_first_base else None
        if plain is not None and plain.size != data.size:
            plain = None
        batch = self._batch
        for i, (start, stop) in enumerate(chunking.spans(spec.nbytes, self._plan.chunk_bytes)):
            batch.part.append(part)
            batch.tensor.append(index)
            batch.start.append(start)
            batch.chunk.append(data[start:stop])
            batch.element_size.append(spec.element_size)
            batch.layout.append(planes.ROTATED if spec.is_float else planes.BYTES)
            batch.candidate.append(first + i if first >= 0 else -1)
            batch.plain.append(plain[start:stop] if plain is not None else None)
            batch.size_bytes += stop - start
            if batch.size_bytes >= BATCH_BYTES or len(batch.chunk) >= BATCH_CHUNKS:
                self._flush()
                batch = self._batch

    def end_part(self) -> None:
        """Everything of the part is in its packs."""
        self._flush()
        self._drain()
        self._seal()

    def finish(self) -> None:
        """Every pack is durable."""
        while self._puts:
            self._await_put()

    def close(self) -> None:
        """End the threads."""
        self._putters.close()

    # -- one batch

    def _flush(self) -> None:
        """Digest the batch, look its chunks up, start to encode the new ones; then pack the batch before."""
        batch, self._batch = self._batch, _Batch()
        if not batch.chunk:
            return
        digests = self._engine.digests(batch.chunk)
        table = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
        known = self.bases.find(table)
        if self._plan.full and len(self.bases.table):  # no chains: this snapshot is to outlive its bases
            known = np.where((known >= 0) & (self.bases.depths[known] == 0), known, -1)
        new: list[int] = []
        for i, (row, chunk_digest) in enumerate(zip(known.tolist(), digests, strict=True)):
            self._digests.append(chunk_digest)
            self._lengths.append(batch.chunk[i].size)
            self._base_rows.append(row)
            self._blobs.append(None)
            if row < 0:
                twin = self._own.setdefault(chunk_digest, self.rows + i)
                if twin == self.rows + i:
                    new.append(i)
                else:
                    self._base_rows[-1] = -2 - twin  # resolved when all blobs have their place
        jobs = self._jobs(batch, digests, new)
        encoding = self._engine.start_encode(jobs)
        first_row, self.rows = self.rows, self.rows + len(batch.chunk)
        self._drain()
        self._encoding = ([first_row + i for i in new], jobs, [batch.candidate[i] for i in new], batch, encoding)

    def _jobs(self, batch: _Batch, digests: list[bytes], new: list[int]) -> list[EncodeJob]:
        """What to encode, each chunk with its base's bytes where it has a candidate."""
        with_base = [i for i in new if self._may_delta(batch, i)]
        plain = self._base_bytes(batch, with_base)
        jobs = []
        for i in new:
            base = plain.get(i)
            row = batch.candidate[i]
            jobs.append(
                EncodeJob(batch.chunk[i], digests[i], batch.element_size[i], batch.layout[i])
                if base is None
                else EncodeJob(batch.chunk[i], digests[i], batch.element_size[i], batch.layout[i], base,
                               self.bases.table.digests[row].tobytes(), int(self.bases.chain_bytes[row]))
            )  # fmt: skip
        return jobs

    def _may_delta(self, batch: _Batch, i: int) -> bool:
        row = batch.candidate[i]
        return (
            row >= 0
            and not self._plan.full
            and int(self.bases.depths[row]) < self._plan.max_depth
            and int(self.bases.table.lengths[row]) == batch.chunk[i].size
            and not delta.is_keyframe(
                self.bases.generation, batch.tensor[i] + batch.start[i] // self._plan.chunk_bytes, self._plan.max_depth
            )
        )

    def _base_bytes(self, batch: _Batch, wanted: list[int]) -> dict[int, Bytes]:
        """Plain bytes of the candidate bases, each checked against its digest: from memory, else from the store."""
        found: dict[int, Bytes] = {}
        at_hand = [(i, plain) for i in wanted if (plain := batch.plain[i]) is not None]
        for (i, plain), got in zip(at_hand, self._engine.digests([p for _, p in at_hand]), strict=True):
            if got == self.bases.table.digests[batch.candidate[i]].tobytes():
                found[i] = plain
        missing = [i for i in wanted if i not in found]
        outs = [np.empty(batch.chunk[i].size, np.uint8) for i in missing]
        jobs = [
            Wanted(self.bases.table, self.bases.packs, batch.candidate[i], out)
            for i, out in zip(missing, outs, strict=True)
        ]
        try:
            for _ in Fetcher(self._store, self._engine).rebuild(jobs):
                self._session.heartbeat()
        except DAMAGE as error:
            raise BaseDamagedError(str(error)) from error
        found.update(zip(missing, outs, strict=True))
        return found

    def _drain(self) -> None:
        """Append the blobs of the batch that is being encoded to the part's pack."""
        if self._encoding is None:
            return
        rows, _, candidates, batch, encoding = self._encoding
        self._encoding = None
        made = encoding()
        for row, candidate, encoded in zip(rows, candidates, made, strict=True):
            if self._writer is None:
                sequence = len(self.packs) - len(self.bases.packs)
                buffer = (
                    self._free.pop() if self._free else np.empty(self._plan.pack_bytes + PACK_SLACK_BYTES, np.uint8)
                )
                self._writer = PackWriter(self._save_id, self._rank, sequence, self._part, buffer)
                self.packs.append("")
                self.pack_sizes.append(0)
            offset, length = self._writer.append(encoded.data)
            self._blobs[row] = (blob.XOR if encoded.is_delta else blob.FULL, len(self.packs) - 1, offset, length)
            self._base_rows[row] = candidate if encoded.is_delta else -1
            self.new_chunks += 1
            if self._writer.size_bytes >= self._plan.pack_bytes:
                self._seal()
        self._engine.recycle(made)
        for part, tensor, start, chunk in zip(batch.part, batch.tensor, batch.start, batch.chunk, strict=True):
            self._on_chunk(part, tensor, start, chunk)

    # -- packs out

    def _seal(self) -> None:
        """Hash and put the pack in the background, at most PUTS_IN_FLIGHT at a time."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        while len(self._puts) >= PUTS_IN_FLIGHT:
            self._await_put()
        self._puts.append((len(self.packs) - 1, self._putters.start(self._put, [writer])))

    def _put(self, writer: PackWriter) -> tuple[str, int]:
        data = writer.seal()
        name = hashlib.sha256(data).hexdigest()
        _put_once(self._store, pack_key(name), data)
        self._free.append(writer.buffer)
        return name, len(data)

    def start_put(self, key: str, data: bytes) -> Callable[[], object]:
        """Begin to put a manifest; the call it returns waits until it is durable."""
        return self._putters.start(lambda item: _put_once(self._store, *item), [(key, data)])

    def _await_put(self) -> None:
        number, result = self._puts.pop(0)
        ((self.packs[number], self.pack_sizes[number]),) = result()
        self._session.heartbeat()

    # -- columns out

    def table(self, first_row: int, count: int) -> tuple[ChunkTable, list[str], list[int]]:
        """(chunk table, packs, pack sizes) of a run of rows, packs renumbered to those used."""
        rows = range(first_row, first_row + count)
        # a chunk that this save holds twice refers to the blob of its first
        sources = [-2 - self._base_rows[row] if self._base_rows[row] <= -2 else row for row in rows]
        base_rows = np.array([self._base_rows[row] for row in sources], np.int64)
        own = [self._blobs[row] for row in sources]
        has_own = np.array([b is not None for b in own], bool)
        blobs = np.array([b for b in own if b is not None], np.int64).reshape(-1, 4)
        digests = np.frombuffer(b"".join(self._digests[row] for row in rows), np.uint8).reshape(-1, 16)
        lengths = np.array([self._lengths[row] for row in rows], np.uint32)
        has_base = base_rows >= 0
        taken = self.bases.table.take(base_rows[has_base])
        counts = has_own.astype(np.int64)
        counts[has_base] += taken.ref_counts
        starts = np.cumsum(counts) - counts
        is_own = np.zeros(int(counts.sum()), bool)
        is_own[starts[has_own]] = True

        def column(own_values: np.ndarray, taken_values: np.ndarray) -> np.ndarray:
            out = np.empty((len(is_own), *taken_values.shape[1:]), taken_values.dtype)
            out[is_own], out[~is_own] = own_values, taken_values
            return out

        ref_packs = column(blobs[:, 1], taken.ref_packs)
        used, ref_packs = np.unique(ref_packs, return_inverse=True)
        table = ChunkTable(
            digests=digests,
            ref_counts=counts.astype(np.uint16),
            ref_kinds=column(blobs[:, 0], taken.ref_kinds),
            ref_packs=ref_packs.astype(np.uint32),
            ref_offsets=column(blobs[:, 2], taken.ref_offsets),
            ref_lengths=column(blobs[:, 3], taken.ref_lengths),
            ref_digests=column(digests[has_own], taken.ref_digests),
            ref_starts=np.zeros(len(is_own), np.uint32),
            ref_sizes=np.repeat(lengths, counts),
        )
        return table, [self.packs[n] for n in used.tolist()], [self.pack_sizes[n] for n in used.tolist()]


def load_bases(store: ObjectStore, session: Session, cache: Mapping[str, manifest.Manifest]) -> Bases:
    """The manifests of the session's base snapshots; a base that cannot be read, or lacks a pack, is none."""

    def readable() -> Iterator[Base]:
        for snapshot in session.bases:
            try:
                manifests = [cache.get(ref.sha256) or manifest.read(store, ref) for ref in snapshot.manifests]
                _check_packs(store, manifests)
            except DAMAGE as error:
                log.warning("run=%s base %s cannot be used: %s", session.run, snapshot.ref, error)
                continue
            yield Base(snapshot, manifests)

    bases = list(readable())
    session.bases = [base.snapshot for base in bases]
    return Bases(bases)


def _check_packs(store: ObjectStore, manifests: Sequence[manifest.Manifest]) -> None:
    """Every pack is there, of its size: a chunk that is known is referenced unread, and would be lost again."""
    sizes = {n: s for m in manifests for n, s in zip(m.header.pack_names, m.header.pack_size_list, strict=True)}
    for name, expected in sizes.items():
        size = store.stat(pack_key(name)).size_bytes
        if size != expected:
            raise IntegrityError(f"{pack_key(name)}: {size} bytes, expected {expected}; run 'snapstore check'")
