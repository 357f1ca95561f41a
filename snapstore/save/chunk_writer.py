"""Chunk writer: the batched middle of a save. cut -> examine -> known? -> encode -> pack -> keep as base.

In: the inputs of a save, part by part. Out: blobs in packs, and columns that say where each chunk lies. While one batch
is encoded, the next is examined (hashed, copied, sampled), the one before is packed, and earlier packs are hashed and
put; all of it is bounded in bytes. It runs in the thread that calls it; engines work on the bytes in theirs.

Invariant: no engine uses the caller's memory after `__exit__`, however the save ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from ..arrays import Bytes, Column
from ..chunks.reader import ChunkReader, Wanted
from ..chunks.uploader import PackUploader
from ..chunks.verify import Verifier
from ..context import Context
from ..engine.base import Engine
from ..engine.batches import Chunks, EncodeBatch, Examination, Examined, MadeBlobs
from ..errors import DAMAGE, CapabilityError, InvalidInputError, StorageError
from ..format.blobs import blob, planes
from ..format.blobs.pack import Encoded
from ..state.values.arrays import Memory
from ..state.values.held_array import changed
from ..storage import progress
from ..text import log
from ..threads import Gate
from .chunk_columns import ChunkRange, Rows, places_in
from .inputs import TensorInput
from .known_chunks import AnySession, Bases
from .unchanged import unchanged_gone

#: `verify_writes="sample"` decodes one new blob in VERIFY_ONE_IN; each generation chooses other blobs. After the first
#: VERIFY_ONE_IN * k blobs of a save it takes k neighbours together, for each k of VERIFIED_TOGETHER: for a device, to
#: decode several blobs costs the host as much time as to decode one. They have at most VERIFIED_BYTES.
VERIFY_ONE_IN, VERIFIED_TOGETHER, VERIFIED_BYTES = 64, (4, 16), 16 * 1024 * 1024


R = TypeVar("R")


class BaseDamagedError(Exception):
    """A base cannot be read back: the save starts again without bases (never leaves snapstore)."""


@dataclass(frozen=True, slots=True)
class _ExaminedBatch:
    """A batch that is being examined."""

    engine: Engine
    part: tuple[int, str]  # rank and name
    runs: Sequence[ChunkRange]
    numbers: Column  # (n,) the row of each chunk
    which: Column  # (n,) the run of each chunk
    candidates: Column  # (n,) the row of each chunk's candidate base, or -1
    given: Examination
    wait: Callable[[], Examined]


@dataclass(frozen=True, slots=True)
class _EncodingBatch:
    """A batch whose new chunks are being encoded."""

    examined: _ExaminedBatch
    rows: Rows
    new: Column  # (k,) the rows of the new chunks
    same: Column  # (n,) whether the base in memory has the bytes of the chunk already
    batch: EncodeBatch
    wait: Callable[[], Sequence[Encoded]]


def _waited(wait: Callable[[], R], runs: Sequence[ChunkRange]) -> R:
    """Wait for a batch; if an engine finds memory gone, name the tensor that was changed."""
    try:
        return wait()
    except InvalidInputError:
        for run in runs:
            run.tensor.confirm()
        raise


class ChunkWriter:
    """Writes the chunks of one save. Use as a context manager; call `begin_part`, `add`, `end_part`, then `finish`.

    Args:
        full: store no chains of deltas.
        state_bytes: of the whole state, on all ranks, as far as it is known.

    Attributes:
        rows: how many chunks were added.
        new_chunks: how many of them were stored.
        done: columns over all chunks, in order, complete after `finish`.
        packs: the new packs.
    """

    def __init__(
        self, context: Context, session: AnySession, bases: Bases, *, full: bool, state_bytes: int = 0
    ) -> None:
        self.bases, self._session, self._full = bases, session, full
        self._context, self._engines, self._chunk_bytes = context, context.engines, context.config.chunk_bytes
        self.packs = PackUploader(session, context.options.pack_bytes_of(state_bytes), self._chunk_bytes)
        self.packs.hasten(context.engines.cpu.puts)
        self.rows = self.new_chunks = 0
        self.done: list[Rows] = []
        self._runs: list[ChunkRange] = []  # the batch that is being filled
        self._size_bytes = self._count = 0
        self._stores_raw = context.engines.stores_raw(context.store)
        self._engine: Engine = context.engines.cpu
        self._part = (0, "")
        self._examining: deque[_ExaminedBatch] = deque()
        self._encoding: deque[_EncodingBatch] = deque()
        self._keeping: deque[tuple[_EncodingBatch, Column, Callable[[], Bytes]]] = deque()
        self._gate = Gate()  # of the memory of the inputs
        self._copies: list[Bytes] = []  # memory for copies of the caller's chunks, of batches that are done
        self._verifier = Verifier("what was saved", "nothing was committed; save again")
        self._own: dict[bytes, int] = {}  # digest -> row of this save

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        """End the threads; then nothing reads the caller's memory any more."""
        self._gate.close()
        begun: list[Callable[[], object]] = [h.wait for h in self._examining]
        begun += [*(e.wait for e in self._encoding), *(wait for _, _, wait in self._keeping)]
        for wait in begun:
            with suppress(Exception):
                wait()
        self._verifier.close()
        self.packs.close()
        self._engines.release_memory(self.packs.idle, saved=True)

    # -- chunks in

    def begin_part(self, name: str, rank: int = 0) -> None:
        """Begin a part: packs never mix parts."""
        self._flush()
        self._part = rank, name

    def add(self, tensor: TensorInput, number: int) -> int:
        """Cut a tensor's bytes into chunks and begin to write them; return how many chunks there are.

        Args:
            number: of the tensor within its part.

        Raises:
            InvalidInputError: it was changed while it was saved.
            BaseDamagedError: a base cannot be read.
            UnchangedGoneError: it was not copied, as a base had its chunks, which are gone; and it has changed.
        """
        if tensor.digests is not None:
            known = self._known(tensor.digests)
            if (known >= 0).all():
                return self._refer(tensor, tensor.digests, known)
            tensor = self._copied_late(tensor, tensor.digests)
        data = tensor.data(self._engines.memory_of)
        self._use(self._engines.of(data))
        if self._runs and (self._runs[0].tensor.copy is None) != (tensor.copy is None):  # a batch has one kind only
            self._flush()
            self._advance()
        chunks = self._cut(tensor, data, number)
        total, first = len(chunks.starts), 0
        while first < total:
            room = (self._engine.batch_bytes - self._size_bytes) // self._chunk_bytes
            room = min(room, self._engine.batch_chunks - self._count)
            count = min(max(room, 0 if self._runs else 1), total - first)
            if count:
                run = chunks if count == total else chunks.part(slice(first, first + count))
                self._runs.append(run)
                self._size_bytes += tensor.spec.nbytes if run is chunks else int(run.lengths.sum())
                self._count += count
                first += count
            if first < total:
                self._flush()
                self._advance()
        self.rows += total
        if tensor.lent:
            self._finish_batches()
            self._verifier.finish()  # it may hold the memory
        return total

    def _refer(self, tensor: TensorInput, digests: Bytes, known: Column) -> int:
        """Refer to the chunks of a base for a tensor that was not copied; return how many there are."""
        numbers = self.rows + np.arange(len(known))
        lengths = self.bases.lengths[known].astype(np.int64)
        self.done.append(Rows(numbers, digests, lengths, numbers, known, np.full((len(known), 4), -1, np.int64)))
        self.rows += len(known)
        progress.advance(tensor.spec.nbytes)
        return len(known)

    def _copied_late(self, tensor: TensorInput, digests: Bytes) -> TensorInput:
        """Copy a tensor that was not copied because a base had its chunks: some of them are gone.

        Raises:
            UnchangedGoneError: it has changed since then.
        """
        assert tensor.array is not None
        with suppress(InvalidInputError, RuntimeError):  # another form, or a storage that is gone: it has changed
            data = tensor.array.memory(self._engines.memory_of)
            engine = self._engines.of(data)
            _, starts, lengths, _, _ = places_in(tensor, 0, self._chunk_bytes)
            whole = Chunks([data], np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([tensor.spec.nbytes]))
            copied = engine.load(whole, copy=True)
            (memory,) = copied.views()
            chunks = Chunks([memory], np.zeros(len(starts), np.int64), starts, lengths)
            if np.array_equal(engine.start_digests(chunks)(), digests):
                return msgspec.structs.replace(tensor, array=None, copy=memory, digests=None, base=None)
        raise unchanged_gone(tensor.spec)

    def _cut(self, tensor: TensorInput, data: Memory, number: int) -> ChunkRange:
        """Return the chunks of a tensor or a box, with the chunks of the bases at the same places."""
        spec = tensor.spec
        place, starts, lengths, in_strip, numbers = places_in(tensor, number, self._chunk_bytes)
        may_delta = tensor.may_delta and self._context.options.delta != "none"
        candidates, is_cached = self.bases.rows_at(place if may_delta else None, in_strip, lengths)
        base = tensor.base if is_cached else None
        if base is not None and (base.nbytes < spec.nbytes or self._engines.of(base) is not self._engine):
            base = None
        return ChunkRange(tensor, self.rows, data, base, starts, lengths, candidates, numbers)

    def end_part(self) -> None:
        """Begin to write the last chunks of the part."""
        self._flush()

    def finish(self) -> None:
        """Wait until every pack is durable and verified.

        Raises:
            InvalidInputError: a tensor was changed while it was saved.
            IntegrityError: a blob does not decode to its chunk.
        """
        self._finish_batches()
        self.packs.seal()
        self._verifier.finish()
        self.packs.finish()

    # -- one batch

    def _use(self, engine: Engine) -> None:
        """Begin a new batch if the engine changes: no batch has chunks of two engines."""
        if engine is self._engine:
            return
        self._flush()
        self._advance()
        self._engine = engine
        self.packs.hasten(engine.puts)

    def _flush(self) -> None:
        """Begin to hash the batch."""
        runs, self._runs, self._size_bytes, self._count = self._runs, [], 0, 0
        if not runs:
            return
        engine = self._engine
        which = np.repeat(np.arange(len(runs)), [len(run.starts) for run in runs])
        starts = np.concatenate([run.starts for run in runs])
        lengths = np.concatenate([run.lengths for run in runs])
        for run in runs:
            run.tensor.confirm()  # before it is read: memory that was moved elsewhere is gone
        chunks = engine.load(Chunks([run.data for run in runs], which, starts, lengths, self._gate))
        found, candidates = self._candidates(runs)
        in_memory = (found >= 0) & (not self._full) & np.array([run.base is not None for run in runs])[which]
        memories = [run.base if run.base is not None else run.data for run in runs]
        layouts = [planes.ROTATED if run.tensor.spec.is_float else planes.BYTES for run in runs]
        wanted = self._encoded_at_once(found, candidates, in_memory)
        given = Examination(
            chunks,
            np.array([run.tensor.spec.element_size for run in runs], np.uint8)[which],
            np.array(layouts, np.uint8)[which],
            engine.load(Chunks(memories, np.where(in_memory, which, -1), starts, lengths)),
            np.where(candidates >= 0, self._delta_limits(candidates), -1),
            wanted & (np.array(layouts) == planes.ROTATED)[which],  # of others, the reference encodes most
            self._room_for_copies(runs, lengths),
            xor=self._context.options.delta == "xor",
        )
        wait = engine.start_examine(given)
        rows = np.concatenate([run.first_row + np.arange(len(run.starts)) for run in runs])
        self._examining.append(_ExaminedBatch(engine, self._part, runs, rows, which, candidates, given, wait))

    def _encoded_at_once(self, found: Column, candidates: Column, in_memory: Column) -> Column:
        """Return which chunks may be encoded before they are looked up: those that are likely new."""
        if self._stores_raw:
            return np.zeros(len(found), bool)
        if not len(self.bases.table):
            return np.ones(len(found), bool)
        wanted: Column = in_memory & ((candidates < 0) | (candidates == found))
        return wanted

    def _delta_limits(self, candidates: Column) -> Column:
        if not len(self.bases.table):
            return np.zeros(len(candidates), np.int64)
        return self.bases.costs.delta_limits(np.maximum(candidates, 0), self._context.options.restore_cost)

    def _room_for_copies(self, runs: Sequence[ChunkRange], lengths: Column) -> Chunks | None:
        """Return memory for copies of chunks in the caller's memory; None if no copies are needed."""
        if runs[0].tensor.copy is not None or self._engine is not self._engines.cpu:
            return None
        return self._engines.cpu.room_for(lengths, self._copies.pop() if self._copies else None)

    def _advance(self, examining: int | None = None) -> None:
        """Begin to encode the oldest batches, until `examining` are left; pack batches that were encoded meanwhile."""
        while len(self._examining) > (self._engine.examine_depth if examining is None else examining):
            self._encode()
            depth = self._encoding[-1].examined.engine.depth
            while len(self._encoding) > depth:
                self._drain()

    def _finish_batches(self) -> None:
        """Put all chunks that were added into packs; then nothing reads the memory of an input any more."""
        self._flush()
        self._advance(examining=0)
        while self._encoding:
            self._drain()
        while self._keeping:
            self._finish_keeping()

    def _known(self, digests: Bytes) -> Column:
        """Return the row of each chunk (n, 16) among the bases; -1: none, or not one that this save may refer to."""
        known = self.bases.find(digests)
        if self._full and len(self.bases.table):  # no chains: this snapshot outlives its bases
            known = np.where((known >= 0) & (self.bases.depths[known] == 0), known, -1)
        return known

    def _encode(self) -> None:
        """Look up the chunks of the oldest hashed batch, and begin to encode the new ones."""
        batch = self._examining[0]
        found = _waited(batch.wait, batch.runs)
        self._examining.popleft()
        digests, given = found.digests, batch.given
        count, lengths = len(given.chunks), given.chunks.lengths
        known, sources = self._known(digests), batch.numbers.copy()
        for i in np.flatnonzero(known < 0).tolist():
            sources[i] = self._own.setdefault(digests[i].tobytes(), int(sources[i]))
        stored = np.bincount(batch.which[known < 0], minlength=len(batch.runs)).tolist()
        for run, more in zip(batch.runs, stored, strict=True):
            run.tensor.stored += more
        new = np.flatnonzero((known < 0) & (sources == batch.numbers))
        rows = Rows(batch.numbers, digests, lengths, sources, known, np.full((count, 4), -1, np.int64))
        self.done.append(rows)
        same = (given.bases.which >= 0) & (found.base_digests == digests).all(axis=1)
        encode = self._batch(batch, found, new)
        self._encoding.append(_EncodingBatch(batch, rows, new, same, encode, batch.engine.start_encode(encode)))

    def _copies_of(self, batch: _ExaminedBatch, found: Examined, new: Column, made: MadeBlobs | None) -> Chunks:
        """Return the new chunks in memory that nobody changes: only these are encoded.

        So no chunk is stored under a digest that it does not have. A chunk that has a blob already need not be there.

        Raises:
            InvalidInputError: a chunk was changed while it was copied.
        """
        given = batch.given.chunks.take(new)
        if batch.runs[0].tensor.copy is not None or not len(new):
            return given
        has_blob = np.zeros(len(new), bool) if made is None else made.entries["length"] > 0
        if batch.given.copies is not None and (has_blob | (found.copied[new] > 0)).all():
            return batch.given.copies.take(new)
        copies = batch.engine.load(given, copy=True)
        same = (batch.engine.start_digests(copies)() == found.digests[new]).all(axis=1)
        self._require(batch, batch.which[new], same)
        return copies

    def _candidates(self, runs: Sequence[ChunkRange]) -> tuple[Column, Column]:
        """Return the row of the chunk at each chunk's place in a base, and the row of the base that a delta may have.

        Both are -1 for none. They differ where no delta is allowed, or a skip is due.
        """
        found = np.concatenate([run.candidates for run in runs])
        if self._full or not len(self.bases.table) or not (found >= 0).any():
            return found, np.full(len(found), -1, np.int64)
        rows, bases = np.maximum(found, 0), self.bases
        skips = np.where(found >= 0, bases.skips[rows], -1)
        allowed = (found >= 0) & bases.usable[rows]
        numbers = np.concatenate([run.numbers for run in runs])
        allowed &= bases.costs.may_grow(rows, self._context.options.restore_cost, bases.generation, numbers)
        return found, np.where((skips >= 0) & bases.usable[skips], skips, np.where(allowed, rows, -1))

    def _batch(self, batch: _ExaminedBatch, found: Examined, new: Column) -> EncodeBatch:
        """Return the new chunks as a batch to encode, each with the bytes of its candidate base if it has one."""
        given, candidates = batch.given, batch.candidates[new]
        base_digests = np.zeros((len(new), 16), np.uint8)
        if len(self.bases.table):
            base_digests = self.bases.table.digests[np.maximum(candidates, 0)]
        is_expected = (candidates >= 0) & (found.base_digests[new] == base_digests).all(axis=1)
        made = None if found.made is None else found.made.take(new)
        if made is not None:  # if the memory of a base is damaged, its deltas are of no use
            is_wrong = (made.entries["transform"] != blob.FULL) & ~is_expected
            made.entries["length"][is_wrong], made.tried[is_wrong] = 0, False
        chunks = self._copies_of(batch, found, new, made)
        bases = self._base_bytes(batch, new, is_expected, made)
        limits = np.maximum(given.delta_limits[new], 0)
        sizes, layouts = given.element_sizes[new], given.layouts[new]
        raw, xor = self._stores_raw, given.xor
        return EncodeBatch(
            chunks, found.digests[new], sizes, layouts, bases, base_digests, limits, raw=raw, xor=xor, made=made
        )

    def _base_bytes(self, batch: _ExaminedBatch, new: Column, is_expected: Column, made: MadeBlobs | None) -> Chunks:
        """Return the bytes of the new chunks' candidate bases, verified: from memory, else from the store.

        Args:
            is_expected: (k,) bool, whether the base in memory, if there is one, has the digest of the candidate.
            made: chunks that have a blob need no other base.
        """
        cached, candidates = batch.given.bases.take(new), batch.candidates[new]
        is_cached = (cached.which >= 0) & is_expected
        memories = list(cached.memories)
        which, starts, lengths = np.where(is_cached, cached.which, -1), cached.starts.copy(), cached.lengths
        missing = (candidates >= 0) & ~is_cached
        if made is not None:
            missing &= made.entries["length"] == 0
        for rows in (missing & (candidates < self.bases.count), missing & (candidates >= self.bases.count)):
            if not rows.any():
                continue
            rooms = lengths[rows] + -lengths[rows] % 256
            places = np.cumsum(rooms) - rooms
            memory = batch.engine.empty(int(rooms.sum()))
            wanted = Wanted(self.bases.table, self.bases.packs, candidates[rows], memory, places)
            try:
                for _ in ChunkReader(self._context, counts=False).rebuild([wanted]):
                    self._session.heartbeat()
            except (*DAMAGE, StorageError, CapabilityError) as error:  # an ANS blob without a GPU cannot be read either
                if candidates[rows][0] < self.bases.count:
                    raise BaseDamagedError(str(error)) from error
                log.warning("run=%s older bases cannot be read, storing chunks in full: %s", self._session.run, error)
                batch.candidates[new[rows]] = -1
                continue
            memories.append(memory)
            which[rows], starts[rows] = len(memories) - 1, places
        return Chunks(memories, which, starts, lengths)

    def _drain(self) -> None:
        """Put the blobs of the oldest batch into the part's packs."""
        encoding, examined = self._encoding[0], self._encoding[0].examined
        made = _waited(encoding.wait, examined.runs)
        self._encoding.popleft()
        progress.advance(int(encoding.rows.lengths.sum()))
        self.packs.begin(*examined.part)
        at = 0
        for encoded in made:
            places = self.packs.add(encoded, examined.engine)
            self._note_places(encoding, at, encoded, *places)
            self._verify(encoding, at, encoded)
            at += len(encoded.entries)
        examined.engine.recycle(made)
        if examined.given.copies is not None:
            self._copies.append(examined.given.copies.memories[0])
        if examined.runs[0].tensor.copy is None:
            self._keep(encoding)

    def _keep(self, encoding: _EncodingBatch) -> None:
        """Begin to check that the caller's memory was not changed meanwhile, and to copy it over the bases."""
        runs, chunks, which = encoding.examined.runs, encoding.examined.given.chunks, encoding.examined.which
        kept = np.array([run.tensor.keep_in is not None for run in runs])
        is_base = np.array([run.base is not None and run.base is run.tensor.keep_in for run in runs])
        has_place = kept[which] & ~(encoding.same & is_base[which])
        is_new = np.zeros(len(chunks), bool)
        is_new[encoding.new] = True
        rows = np.flatnonzero(is_new | has_place)
        places = [run.data if run.tensor.keep_in is None else run.tensor.keep_in for run in runs]
        outs = Chunks(places, np.where(has_place, which, -1), chunks.starts, chunks.lengths).take(rows)
        if has_place.any():
            self._verifier.finish()  # until then it reads the bases
        for run in runs:
            run.tensor.confirm()
        while len(self._keeping) > self._engine.examine_depth:
            self._finish_keeping()
        if has_place.any():  # in host memory
            wait = self._engines.cpu.start_digests(chunks.take(rows), outs)
        else:
            wait = encoding.examined.engine.start_digests(chunks.take(rows))
        self._keeping.append((encoding, rows, wait))

    def _finish_keeping(self) -> None:
        """Finish what `_keep` has begun for the oldest batch.

        Raises:
            InvalidInputError: the memory was changed meanwhile.
        """
        encoding, rows, wait = self._keeping.popleft()
        unchanged = (wait() == encoding.rows.digests[rows]).all(axis=1)
        self._require(encoding.examined, encoding.examined.which[rows], unchanged)

    def _require(self, batch: _ExaminedBatch, which: Column, unchanged: Column) -> None:
        """Raise InvalidInputError if memory is not the tensors' any more, or a chunk of a run was changed."""
        if not unchanged.all():
            for run in batch.runs:
                run.tensor.confirm()
            raise changed(batch.runs[which[np.argmin(unchanged)]].tensor.spec, "other values")

    def _note_places(self, encoding: _EncodingBatch, at: int, encoded: Encoded, packs: Column, offsets: Column) -> None:
        """Put the places of blobs into the columns; `at` is the number of the first one among the new chunks."""
        entries = encoded.entries
        blobs = np.empty((len(entries), 4), np.int64)
        blobs[:, 0], blobs[:, 3] = entries["transform"], entries["length"]
        blobs[:, 1], blobs[:, 2] = packs + len(self.bases.packs), offsets  # own packs follow those of the bases
        new = slice(at, at + len(entries))
        rows = encoding.new[new]
        candidates = encoding.examined.candidates[rows]
        is_delta = entries["transform"] != blob.FULL
        encoding.rows.blobs[rows] = blobs
        encoding.rows.base_rows[rows] = np.where(is_delta, candidates, -1)
        self.new_chunks += len(entries)
        run_of, has_full = encoding.examined.which[rows], (candidates >= 0) & (candidates < self.bases.count)
        has_full[has_full] = self.bases.depths[candidates[has_full]] == 0  # if any delta pays, one to a full chunk does
        tried, stored = (
            np.bincount(run_of[rows], minlength=len(encoding.examined.runs)) for rows in (has_full, is_delta)
        )
        for number in np.flatnonzero(tried | stored).tolist():
            encoding.examined.runs[number].tensor.bases_tried += int(tried[number])
            encoding.examined.runs[number].tensor.deltas_stored += int(stored[number])

    def _verify(self, encoding: _EncodingBatch, first: int, encoded: Encoded) -> None:
        """Begin to verify new blobs: all, or one in VERIFY_ONE_IN; `first` is the number of the first one."""
        verify, count = self._context.options.verify_writes, len(encoded.entries)
        chosen = np.arange(count)
        if verify == "sample":
            turn = number = self.new_chunks - count + chosen  # among this save's
            for together in (k for k in VERIFIED_TOGETHER if k * self._chunk_bytes <= VERIFIED_BYTES):
                turn = np.where(number < VERIFY_ONE_IN * together, turn, number // together)
            chosen = np.flatnonzero((number == 0) | ((turn - self.bases.generation) % VERIFY_ONE_IN == 0))
        if verify != "off":
            self._verifier.start(encoding.examined.engine, encoding.batch, encoded, first=first, chosen=chosen)
