"""Writer: the middle of the write path. split -> digest -> known? -> delta -> planes -> encode -> pack -> manifest.

In: the parts of a state and their bytes. Out: durable packs, then durable manifests. Batches of chunks are encoded
while the last one is packed and packs before it are hashed and put; all of it is bounded in bytes. Runs in the thread
that calls it; nothing here knows of the training loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..arrays import Bytes, Column
from ..chunks.reader import Fetcher, Wanted
from ..chunks.uploader import Packs
from ..context import Context
from ..engine.base import Chunks, DecodeBatch, EncodeBatch, Engine
from ..errors import DAMAGE, CapabilityError, FormatError, IntegrityError, StorageError
from ..format import blob, chunking, delta, manifest, planes
from ..format.keys import pack_key
from ..format.manifest import Box, ChunkTable, TensorEntry
from ..format.pack import DEFAULT_PACK_BYTES, Encoded
from ..format.records import ManifestRef
from ..protocol.session import Session
from ..state.arrays import Memory, as_bytes, changed
from ..state.flatten import Part
from ..state.tensors import TensorSpec
from ..storage.base import ObjectStore
from .bases import Base, Bases

log = logging.getLogger("snapstore")
#: Packs put at once when an engine fills them faster than one core hashes them.
PUTS_IN_FLIGHT_OF_DEVICES = 10
#: `verify_writes="sample"` decodes one new blob in this many, another one in every generation.
VERIFY_ONE_IN = 64


class BaseDamagedError(Exception):
    """A base cannot be read back: the save starts again without bases (never leaves snapstore)."""


Source = Callable[[int, int], Memory]  # (part, tensor) -> (nbytes,) uint8, safe to read until the save ends
Plain = Callable[[int, int], Memory | None]  # (part, tensor) -> the first base's bytes of it, if still at hand


@dataclass(frozen=True, slots=True)
class Plan:
    """How a save stores what is new."""

    chunk_bytes: int
    pack_bytes: int = DEFAULT_PACK_BYTES
    max_depth: int = delta.DEFAULT_MAX_DEPTH
    full: bool = False  # no chains at all: for snapshots that are kept for long
    no_delta: frozenset[tuple[int, int]] = frozenset()  # (part, tensor) of those whose deltas do not pay
    verify: Literal["off", "sample", "full"] = "sample"


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
    unpaid: set[tuple[int, int]] = field(default_factory=set)  # (part, tensor): had bases, and no delta paid
    sizes: dict[str, int] = field(default_factory=dict)  # of every object put, by key [bytes]


def write(
    context: Context, session: Session, parts: Sequence[Part], source: Source, bases: Bases,
    plain: Plain, plan: Plan, *, rank: int = 0, on_run: Callable[[int, int, int, Bytes], None] | None = None,
    confirm: Callable[[int, int], None] | None = None,
) -> Written:  # fmt: skip
    """Store the parts' tensors, packs first, then one manifest a part; all durable on return.

    Args:
        source: the bytes of every tensor.
        bases: what may be referenced.
        plain: the plain bytes of the first base; what is not there is read from the store.
        on_run: told (part, tensor, start, bytes) of a run of chunks once their bases are no longer needed.
        confirm: the bytes are those of the caller's own memory, which others may change in spite of all promises; it
            is called with (part, tensor) once they have been read, and raises if they may not be the tensor's.

    Raises:
        InvalidInputError: they were changed.
        IntegrityError: what was encoded does not decode to what was given; nothing refers to it.
    """
    chunks = _Chunks(context, session, bases, plain, plan, rank, on_run, confirm)
    try:
        layouts = [_write_part(chunks, number, part, source, plan) for number, part in enumerate(parts)]
        chunks.finish()
        return _write_manifests(session, parts, layouts, chunks, plan, rank)
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
            layout.inline += chunks.inline_bytes(number, index, source)
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
    session: Session, parts: Sequence[Part], layouts: Sequence[_Layout], chunks: _Chunks,
    plan: Plan, rank: int,
) -> Written:  # fmt: skip
    """One manifest a part, durable; every pack they name is durable before."""
    written = Written(stored_bytes=sum(chunks.packs.sizes), chunks=chunks.rows)
    written.new_chunks, written.unpaid = chunks.new_chunks, chunks.unpaid()
    written.sizes.update(zip(map(pack_key, chunks.packs.names), chunks.packs.sizes, strict=True))
    rows = _Rows.concatenate(chunks.done)
    puts = []
    for sequence, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
        table, packs, sizes = chunks.table(rows, layout.first_row, layout.rows)
        logical_bytes = sum(spec.nbytes for spec in part.specs)
        data = manifest.encode(
            save_id=bytes.fromhex(session.id), rank=rank, sequence=sequence, part=part.name,
            chunk_bytes=plan.chunk_bytes, digest_seed=chunks.digest_seed, tree=part.tree, tensors=layout.entries,
            inline=bytes(layout.inline), table=table, packs=packs, pack_sizes=sizes, logical_bytes=logical_bytes,
        )  # fmt: skip
        ref = manifest.ref_of(data)
        puts.append(chunks.packs.start_put(ref.key, data))
        written.sizes[ref.key] = len(data)
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


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive chunks of one tensor."""

    part: int
    tensor: int
    spec: TensorSpec
    data: Memory
    plain: Memory | None  # the first base's bytes of this tensor, if at hand
    candidate: int  # row of the chunk at the same place in a base, or -1
    first: int  # which chunk of the tensor
    count: int

    def starts(self, chunk_bytes: int) -> Column:
        """Where every chunk begins in the tensor."""
        return (self.first + np.arange(self.count)) * chunk_bytes


@dataclass(slots=True)
class _Rows:
    """Columns over chunks of this save."""

    digests: Bytes  # (n, 16)
    lengths: Column  # (n,)
    twins: Column  # (n,) the row whose blob this chunk has: an earlier one that is the same, else its own
    base_rows: Column  # (n,) among the bases: the chunk itself, or what its blob is a delta to; -1: neither
    blobs: Column  # (n, 4) kind, pack, offset and length of its own blob; -1: none

    @staticmethod
    def concatenate(rows: Sequence[_Rows]) -> _Rows:
        """All of them, as one."""
        nothing = np.empty(0, np.int64)
        rows = [_Rows(np.empty((0, 16), np.uint8), nothing, nothing, nothing, np.empty((0, 4), np.int64)), *rows]
        return _Rows(
            digests=np.concatenate([r.digests for r in rows]), lengths=np.concatenate([r.lengths for r in rows]),
            twins=np.concatenate([r.twins for r in rows]), base_rows=np.concatenate([r.base_rows for r in rows]),
            blobs=np.concatenate([r.blobs for r in rows]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Hashing:
    """A batch whose chunks, and those of their bases that are at hand, are being hashed."""

    engine: Engine
    runs: Sequence[_Run]
    which: Column  # of every chunk, which of the runs
    starts: Column
    chunks: Chunks
    candidates: Column  # of every chunk, the row of its candidate base, or -1
    at_hand: Column  # which chunks have their base's bytes in memory
    plain: Chunks  # those
    wait: Callable[[], Bytes]


@dataclass(frozen=True, slots=True)
class _Encoding:
    """A batch whose new chunks are being encoded."""

    engine: Engine
    runs: Sequence[_Run]
    rows: _Rows
    new: Column  # which of the rows are new
    run_of: Column  # of every new one, which of the runs it belongs to
    candidates: Column  # of every new one
    given: Chunks  # every new one where the source has it; `batch` has copies if that is the caller's memory
    batch: EncodeBatch
    wait: Callable[[], Sequence[Encoded]]


class _Chunks:
    """The batched middle of the write path: chunks in, blobs in packs and columns of the manifest out."""

    def __init__(
        self, context: Context, session: Session, bases: Bases, plain: Plain, plan: Plan, rank: int,
        on_run: Callable[[int, int, int, Bytes], None] | None, confirm: Callable[[int, int], None] | None,
    ) -> None:  # fmt: skip
        self._context = context
        self._confirm, self.digest_seed = confirm, context.engines.digest_seed
        self._store, self._engines, self._session = context.store, context.engines, session
        self.bases, self._plain, self._plan, self._rank, self._on_run = bases, plain, plan, rank, on_run
        self.rows = 0
        self._rows_begun = 0  # of them, those that have been hashed
        self.new_chunks = 0
        self.done: list[_Rows] = []
        self._runs: list[_Run] = []  # the batch that is being filled
        self._size_bytes = self._count = 0
        self._engine: Engine = context.engines.cpu
        self._hashing: deque[_Hashing] = deque()
        self._encoding: deque[_Encoding] = deque()
        self._verifying: list[Callable[[], object]] = []
        self._deltas: dict[tuple[int, int], list[int]] = {}  # (part, tensor) -> [bases tried, deltas stored]
        self.packs = Packs(session, plan.pack_bytes, plan.chunk_bytes)
        self._own: dict[bytes, int] = {}  # digest -> row of this save

    # -- chunks in

    def begin_part(self, name: str) -> None:
        """Packs never mix parts."""
        self.packs.begin(self._rank, name)

    def inline_bytes(self, part: int, index: int, source: Source) -> bytes:
        """The bytes of a small tensor, which lie in the manifest.

        Raises:
            InvalidInputError: it was changed while they were read.
        """
        try:
            data = as_bytes(source(part, index)).tobytes()  # from a device, a copy of what may be resized meanwhile
        except RuntimeError:
            self.confirm(part, index)
            raise
        self.confirm(part, index)
        return data

    def add_tensor(self, part: int, index: int, name: str, spec: TensorSpec, data: Memory) -> None:
        """Cut a tensor's bytes into chunks."""
        self._use(self._engines.of(data))
        candidate, is_first_base = self.bases.first_row((name, spec.path, spec.dtype, spec.shape))
        if (part, index) in self._plan.no_delta:
            candidate = -1
        plain = self._plain(part, index) if is_first_base and candidate >= 0 else None
        if plain is not None and (len(plain) < spec.nbytes or self._engines.of(plain) is not self._engine):
            plain = None
        total, chunk_bytes = chunking.chunk_count(spec.nbytes, self._plan.chunk_bytes), self._plan.chunk_bytes
        first = 0
        while first < total:
            room = min((self._engine.batch_bytes - self._size_bytes) // chunk_bytes,
                       self._engine.batch_chunks - self._count)  # fmt: skip
            count = min(max(room, 0 if self._runs else 1), total - first)
            if count:
                self.rows += count
                self._runs.append(_Run(part, index, spec, data, plain, candidate, first, count))
                self._size_bytes += min(count * chunk_bytes, spec.nbytes - first * chunk_bytes)
                self._count += count
                first += count
            if first < total:
                self._flush()

    def confirm(self, part: int, tensor: int) -> None:
        """Memory of the caller's own is still the tensor's.

        Raises:
            InvalidInputError: it is not.
        """
        if self._confirm is not None:
            self._confirm(part, tensor)

    def end_part(self) -> None:
        """Everything of the part is in its packs."""
        self._flush()
        while self._hashing:
            self._encode()
        while self._encoding:
            self._drain()
        self.packs.seal()

    def finish(self) -> None:
        """Every pack is durable, and what was to be verified is."""
        self.packs.finish()
        self._verified()

    def close(self) -> None:
        """End the threads; nothing touches the caller's memory any more."""
        begun: list[Callable[[], object]] = [*(h.wait for h in self._hashing), *(e.wait for e in self._encoding)]
        for wait in (*begun, *self._verifying):
            with suppress(Exception):
                wait()
        self.packs.close()
        self._engines.rest(self.packs.idle, saved=True)

    def unpaid(self) -> set[tuple[int, int]]:
        """(part, tensor) of those for which bases were tried and no delta paid."""
        return {place for place, (tried, stored) in self._deltas.items() if tried and not stored}

    # -- one batch

    def _use(self, engine: Engine) -> None:
        """Batches are of one engine."""
        if engine is self._engine:
            return
        self._flush()
        self._engine = engine
        if engine is not self._engines.cpu:
            self.packs.hasten(PUTS_IN_FLIGHT_OF_DEVICES)

    def _flush(self) -> None:
        """Begin to hash the batch; encode the one before, whose digests are there by now."""
        runs, self._runs, self._size_bytes, self._count = self._runs, [], 0, 0
        if not runs:
            return
        engine, chunk_bytes = self._engine, self._plan.chunk_bytes
        which = np.repeat(np.arange(len(runs)), [run.count for run in runs])
        starts = np.concatenate([run.starts(chunk_bytes) for run in runs])
        lengths = np.minimum(np.array([run.spec.nbytes for run in runs])[which] - starts, chunk_bytes)
        for run in runs:
            self.confirm(run.part, run.tensor)  # before it is read: what was moved elsewhere is not there any more
        chunks = engine.load(Chunks([run.data for run in runs], which, starts, lengths))
        candidates = self._candidates(runs, which, starts, lengths)
        has_plain = np.array([run.plain is not None for run in runs])[which]
        at_hand = np.flatnonzero((candidates >= 0) & has_plain)
        memories = [run.plain if run.plain is not None else run.data for run in runs]
        plain = engine.load(Chunks(memories, which[at_hand], starts[at_hand], lengths[at_hand]))
        wait = engine.start_digests(chunks.and_those(plain))
        self._hashing.append(_Hashing(engine, runs, which, starts, chunks, candidates, at_hand, plain, wait))
        if len(self._hashing) > 1:
            self._encode()

    def _encode(self) -> None:
        """Look up the chunks of the batch that was hashed first, begin to encode the new ones; pack older batches."""
        batch = self._hashing[0]
        found = batch.wait()
        self._hashing.popleft()
        count, lengths = len(batch.chunks), batch.chunks.lengths
        digests, plain_digests = found[:count], found[count:]
        known = self.bases.find(digests)
        if self._plan.full and len(self.bases.table):  # no chains: this snapshot is to outlive its bases
            known = np.where((known >= 0) & (self.bases.depths[known] == 0), known, -1)
        twins = self._rows_begun + np.arange(count)
        for i in np.flatnonzero(known < 0).tolist():
            twins[i] = self._own.setdefault(digests[i].tobytes(), self._rows_begun + i)
        new = np.flatnonzero((known < 0) & (twins == self._rows_begun + np.arange(count)))
        rows = _Rows(digests, lengths, twins, known, np.full((count, 4), -1, np.int64))
        self._rows_begun += count
        self.done.append(rows)
        given = chunks = batch.chunks.take(new)
        if self._confirm is not None and len(new):
            chunks = batch.engine.load(given, copy=True)
            self._check_unchanged(batch, batch.which[new], chunks, digests[new])
        encode = self._batch(batch, rows, new, chunks, self._base_bytes(batch, new, plain_digests))
        encoding = batch.engine.start_encode(encode)
        self._encoding.append(
            _Encoding(
                batch.engine, batch.runs, rows, new, batch.which[new], batch.candidates[new], given, encode, encoding
            )
        )  # fmt: skip
        while len(self._encoding) > batch.engine.depth:
            self._drain()

    def _candidates(self, runs: Sequence[_Run], which: Column, starts: Column, lengths: Column) -> Column:
        """The row of the chunk at the same place in a base, where a delta to it is allowed; else -1."""
        first = np.array([run.candidate for run in runs])[which]
        if self._plan.full or not len(self.bases.table) or not (first >= 0).any():
            return np.full(len(which), -1, np.int64)
        index = starts // self._plan.chunk_bytes
        rows = np.where(first >= 0, first + index, 0)
        tensor = np.array([run.tensor for run in runs])[which]
        allowed = (first >= 0) & (self.bases.depths[rows] < self._plan.max_depth)
        allowed &= self.bases.usable[rows] & (self.bases.lengths[rows] == lengths)
        allowed &= ~delta.is_keyframe(self.bases.generation, tensor + index, self._plan.max_depth)
        return np.where(allowed, rows, -1)

    def _batch(self, batch: _Hashing, rows: _Rows, new: Column, chunks: Chunks, bases: Chunks) -> EncodeBatch:
        """What to encode, each chunk with its base's bytes where it has a candidate."""
        runs, which = batch.runs, batch.which[new]
        taken = np.maximum(batch.candidates[new], 0)
        has = len(self.bases.table) > 0
        return EncodeBatch(
            chunks, rows.digests[new],
            np.array([run.spec.element_size for run in runs], np.uint8)[which],
            np.array([planes.ROTATED if run.spec.is_float else planes.BYTES for run in runs], np.uint8)[which], bases,
            self.bases.table.digests[taken] if has else np.zeros((len(new), 16), np.uint8),
            self.bases.chain_bytes[taken] if has else np.zeros(len(new), np.int64),
        )  # fmt: skip

    def _base_bytes(self, batch: _Hashing, new: Column, plain_digests: Bytes) -> Chunks:
        """Plain bytes of the new chunks' candidate bases, checked: from memory, else from the store."""
        memories = list(batch.plain.memories)
        which, starts = np.full(len(batch.chunks), -1, np.int64), np.zeros(len(batch.chunks), np.int64)
        expected = batch.candidates[batch.at_hand]
        same = (plain_digests == self.bases.table.digests[expected]).all(axis=1) if len(expected) else expected > 0
        which[batch.at_hand[same]] = batch.plain.which[same]
        starts[batch.at_hand[same]] = batch.plain.starts[same]
        which, starts, lengths, candidates = which[new], starts[new], batch.chunks.lengths[new], batch.candidates[new]
        missing = np.flatnonzero((candidates >= 0) & (which < 0))
        if len(missing):
            rooms = lengths[missing] + -lengths[missing] % 256
            places = np.cumsum(rooms) - rooms
            memories.append(batch.engine.empty(int(rooms.sum())))
            wanted = Wanted(self.bases.table, self.bases.packs, candidates[missing], memories[-1], places)
            try:
                for _ in Fetcher(self._context).rebuild([wanted]):
                    self._session.heartbeat()
            except (
                *DAMAGE,
                StorageError,
                CapabilityError,
            ) as error:  # an ANS blob, and no GPU here, is as good as damaged
                raise BaseDamagedError(str(error)) from error
            which[missing], starts[missing] = len(memories) - 1, places
        return Chunks(memories, which, starts, lengths)

    def _drain(self) -> None:
        """Put the blobs of the batch that was begun first into the part's packs."""
        encoding = self._encoding[0]
        made = encoding.wait()
        self._encoding.popleft()
        if self._confirm is not None:
            self._check_unchanged(encoding, encoding.run_of, encoding.given, encoding.batch.digests)
        at = 0
        for encoded in made:
            self._place(encoding, at, encoded)
            at += len(encoded.entries)
        encoding.engine.recycle(made)
        if self._on_run is not None:
            self._verified()
            for run in encoding.runs:
                start = run.first * self._plan.chunk_bytes
                self._on_run(run.part, run.tensor, start, run.data[start : start + run.count * self._plan.chunk_bytes])

    def _check_unchanged(self, batch: _Hashing | _Encoding, run_of: Column, chunks: Chunks, digests: Bytes) -> None:
        """The caller's memory, or the copy that is encoded, holds what was digested, and is still the tensors'.

        Only the copy is encoded, so that no chunk is stored under a digest that it does not have, whatever changes.

        Raises:
            InvalidInputError: something has changed it meanwhile.
        """
        for run in batch.runs:
            self.confirm(run.part, run.tensor)
        others = np.flatnonzero((batch.engine.start_digests(chunks)() != digests).any(axis=1))
        if len(others):
            raise changed(batch.runs[run_of[others[0]]].spec, "other values")

    def _place(self, encoding: _Encoding, at: int, encoded: Encoded) -> None:
        """Blobs into packs, and where they lie into the columns; `at`: the first one's place among the new ones."""
        entries = encoded.entries
        blobs = np.empty((len(entries), 4), np.int64)
        blobs[:, 0], blobs[:, 3] = entries["transform"], entries["length"]
        blobs[:, 1], blobs[:, 2] = self.packs.add(encoded, encoding.engine)
        blobs[:, 1] += len(self.bases.packs)  # own packs follow those of the bases
        new = slice(at, at + len(entries))
        rows, candidates = encoding.new[new], encoding.candidates[new]
        is_delta = entries["transform"] == blob.XOR
        encoding.rows.blobs[rows] = blobs
        encoding.rows.base_rows[rows] = np.where(is_delta, candidates, -1)
        self.new_chunks += len(entries)
        for number in np.unique(encoding.run_of[new]).tolist():
            run, own = encoding.runs[number], encoding.run_of[new] == number
            counts = self._deltas.setdefault((run.part, run.tensor), [0, 0])
            counts[0] += int((candidates[own] >= 0).sum())
            counts[1] += int(is_delta[own].sum())
        self._verify(encoding, new, encoded)

    # -- verify

    def _verify(self, encoding: _Encoding, new: slice, encoded: Encoded) -> None:
        """Begin to decode some of the new blobs, as a restore would, and compare their digests."""
        if self._plan.verify == "off":
            return
        count, entries = len(encoded.entries), encoded.entries
        chosen = np.arange(count)
        if self._plan.verify == "sample":
            number = self.new_chunks - count + chosen  # among this save's
            chosen = np.flatnonzero((number == 0) | ((number - self.bases.generation) % VERIFY_ONE_IN == 0))
        if not len(chosen):
            return
        lengths = entries["length"][chosen].astype(np.int64)
        rooms = (lengths + blob.ALIGNMENT - 1) // blob.ALIGNMENT * blob.ALIGNMENT
        offsets = np.cumsum(rooms) - rooms
        stored = np.empty(int(rooms.sum()), np.uint8)
        copies = [
            encoded.copy(i, i + 1, stored[offset : offset + room])
            for i, offset, room in zip(chosen.tolist(), offsets.tolist(), rooms.tolist(), strict=True)
        ]
        for wait in copies:
            wait()
        rows = np.arange(new.start, new.stop)[chosen]
        batch, is_delta = encoding.batch, entries["transform"][chosen] == blob.XOR
        sizes = batch.chunks.lengths[rows]
        places = np.cumsum(sizes + -sizes % 256) - sizes - -sizes % 256
        room = encoding.engine.empty(int(places[-1] + sizes[-1]))
        outs = Chunks([room], np.zeros(len(rows), np.int64), places, sizes)
        bases = batch.bases.take(rows)
        bases = Chunks(bases.memories, np.where(is_delta, bases.which, -1), bases.starts, bases.lengths)
        self._verified()
        self._verifying.append(
            encoding.engine.start_decode(
                DecodeBatch(stored, offsets, lengths, np.ones(len(rows), np.int64), batch.digests[rows], outs,
                            lambda i: f"new blob {i} of {len(rows)}", bases)
            )
        )  # fmt: skip

    def _verified(self) -> None:
        """What was being verified is what was given.

        Raises:
            IntegrityError: it is not.
        """
        while self._verifying:
            try:
                self._verifying.pop()()
            except (IntegrityError, FormatError) as error:
                raise IntegrityError(
                    f"what was encoded does not decode to what was saved ({error}); nothing was committed; save again, "
                    "and test the memory of this machine and its GPU"
                ) from error

    # -- columns out

    def table(self, rows: _Rows, first_row: int, count: int) -> tuple[ChunkTable, list[str], list[int]]:
        """(chunk table, packs, pack sizes) of a run of rows, packs renumbered to those used."""
        span = slice(first_row, first_row + count)
        sources = rows.twins[span]  # a chunk that this save holds twice refers to the blob of its first
        base_rows, blobs = rows.base_rows[sources], rows.blobs[sources]
        has_own, has_base = blobs[:, 0] >= 0, base_rows >= 0
        blobs = blobs[has_own]
        digests, lengths = rows.digests[span], rows.lengths[span].astype(np.uint32)
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
        names, sizes = [*self.bases.packs, *self.packs.names], [*self.bases.pack_sizes, *self.packs.sizes]
        return table, [names[n] for n in used.tolist()], [sizes[n] for n in used.tolist()]


def load_bases(
    store: ObjectStore, session: Session, cache: Mapping[str, manifest.Manifest], chunk_bytes: int, digest_seed: int
) -> Bases:
    """The manifests of the session's base snapshots; one that cannot be read is none, nor is what a bad pack holds.

    Nor one in chunks of another size, as after a repair of a config that nothing told the size of.

    Raises:
        FormatError: one has another seed. Then config is no longer the one of this repository, as far as can be told:
            what is saved under it would be unreadable once it is put back.
    """

    def readable() -> Iterator[Base]:
        for snapshot in session.usable_bases:
            try:
                manifests = [cache.get(ref.sha256) or manifest.read(store, ref, None) for ref in snapshot.manifests]
            except (*DAMAGE, StorageError) as error:
                log.warning("run=%s base %s cannot be used: %s", session.run, snapshot.ref, error)
                continue
            for ref, m in zip(snapshot.manifests, manifests, strict=True):
                manifest.check_seed(m.header, digest_seed, f"base {snapshot.ref}: {ref.key}")
            if all(m.header.chunk_bytes == chunk_bytes for m in manifests):
                yield Base(snapshot, manifests)

    bases = list(readable())
    session.used_bases = [base.snapshot for base in bases]
    return Bases(bases, _damaged_packs(store, session, bases))


def _damaged_packs(store: ObjectStore, session: Session, bases: Sequence[Base]) -> set[str]:
    """Packs that are missing, of another size, or in quarantine: a chunk that is known is referenced unread.

    All of them if the store cannot tell, as of one that lies on a bad sector: it is not needed to save in full.
    """
    expected = {
        name: size
        for base in bases
        for m in base.manifests
        for name, size in zip(m.header.pack_names, m.header.pack_size_list, strict=True)
    }
    try:
        sizes = store.sizes([pack_key(name) for name in expected])
    except StorageError as error:
        text = "run=%s packs of the bases cannot be looked at, saving in full; run 'snapstore repair': %s"
        log.warning(text, session.run, error)
        return set(expected)
    damaged = {
        name
        for name, size in expected.items()
        if sizes.get(pack_key(name)) != size or pack_key(name) in session.quarantined
    }
    if damaged:
        log.warning(
            "run=%s %d packs of the bases are damaged, what they hold is stored anew; run 'snapstore repair': first %s",
            session.run, len(damaged), pack_key(min(damaged)),
        )  # fmt: skip
    return damaged
