"""Reader: rebuilds chunks from packs. get ranges -> decode planes -> add up chains -> verify digests.

In: rows of chunk tables, and the memory of each chunk. Out: filled memory; every chunk is checked against its digest.
The stored plus plain bytes of a batch are bounded. A batch is read while the batch before it is decoded. So memory
stays bounded for states of any size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import numpy as np

from ..arrays import Bytes, Column
from ..context import Context
from ..engine.base import Engine
from ..engine.batches import Chunks, DecodeBatch
from ..engine.cpu import CpuEngine
from ..errors import IntegrityError, NotFoundError
from ..format.blobs import pack
from ..format.keys import pack_key
from ..format.manifests.chunk_table import ChunkTable
from ..state.values.arrays import Memory
from ..storage import progress
from ..storage.base import GetRanges
from ..text import strip_hint
from ..threads import Gate, Pending, Threads
from .bad_sectors import read_around

#: No pack is so long [bytes]. Larger offsets, in forged tables, could overflow sums.
_BEYOND = np.uint64(1 << 62)
#: While a batch is read, the engine is polled this often [s].
POLL_S = 0.0005
#: One thread opens packs for at most this time, before several threads read them [s].
OPEN_AHEAD_S = 0.01
#: Buffers are larger than needed by this share, so that they suit the next batches too: new pages cost time.
BUFFER_SLACK = 1 / 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """Chunks to rebuild, all of them in one memory."""

    table: ChunkTable
    packs: Sequence[str]  # hex names; `table.ref_packs` are indices in it
    rows: Column  # (k,) of the table
    out: Memory
    starts: Column  # (k,) the first byte of each chunk in `out`


def whole(table: ChunkTable, packs: Sequence[str], row: int, out: Memory) -> Wanted:
    """Request one chunk that fills `out`."""
    return Wanted(table, packs, np.array([row]), out, np.zeros(1, np.int64))


@dataclass(frozen=True, slots=True)
class _ReadBatch:
    """Chunks of one engine, as columns, and what they need from the store."""

    keys: list[str]  # of packs
    packs: Column  # (m,) the index of each blob's pack in `keys`
    offsets: Column  # (m,)
    lengths: Column  # (m,)
    counts: Column  # (n,) how many blobs each chunk has
    digests: Bytes  # (n, 16)
    outs: Chunks  # (n,)

    def where(self, blob: int) -> str:
        """Return a blob's name for errors."""
        name = self.keys[self.packs[blob]].rpartition("/")[2]
        return f"pack {name[:12]} at {self.offsets[blob]}+{self.lengths[blob]}"


@dataclass(slots=True)
class _Reading:
    """A batch on its way from the store."""

    batch: _ReadBatch
    engine: Engine
    buffer: Bytes  # lent by the engine
    stored: Bytes  # the part of `buffer` that is used
    positions: Column  # (m,) of each blob in `stored`
    wait: Pending[None]
    gate: Gate = field(default_factory=Gate)  # of its decoding


class ChunkReader:
    """Rebuilds chunks of one repository.

    Args:
        engine: decodes all chunks; None: each chunk is decoded by the engine of its memory.
        counts: whether its bytes are progress of the running verb; False: they are a part of other work.
    """

    def __init__(self, context: Context, engine: Engine | None = None, *, counts: bool = True) -> None:
        self._store, self._engines = context.store, context.engines
        self._engine, self._counts = engine, counts
        self._readers: Threads | None = None
        self._opened: set[str] = set()  # packs that have been opened ahead
        self._spare: list[Bytes] = []  # buffers of the CPU engine, which has no pool as others do
        self._get_ranges: GetRanges

    def rebuild(self, wanted: Iterable[Wanted]) -> Iterator[int]:
        """Fill the memory of every chunk, in order; yield the number of chunks after each batch.

        Raises:
            IntegrityError, FormatError: a chunk cannot be rebuilt; the memory then holds garbage.
            StorageError: the store failed.
        """
        reading: deque[_Reading] = deque()
        decoding: deque[tuple[_Reading, Callable[[], object]]] = deque()
        with self._store.kept_open() as self._get_ranges:
            try:
                for engine, batch in self._batches(wanted):
                    # Nothing is decoded yet: wait for the first batch, and begin to decode it before threads read the
                    # second one, since these take Python's lock. With a remote store, requests must not wait for that.
                    if reading and not decoding and self._store.gets_at_once == 1:
                        self._decode(reading, decoding)
                    reading.append(self._read(engine, batch))
                    if len(reading) > 1:
                        self._decode(reading, decoding)
                    if len(decoding) > engine.decode_depth:  # one batch is read while others are decoded
                        yield self._finished(decoding)
                while reading:
                    self._decode(reading, decoding)
                while decoding:
                    yield self._finished(decoding)
            finally:
                for begun in (*reading, *(begun for begun, _ in decoding)):
                    begun.gate.close()  # after this, nothing may write into the memory any more
                for begun in reading:
                    _ended(begun.wait)
                    begun.engine.give_back(begun.buffer)
                for begun, wait in decoding:
                    _ended(wait)
                    begun.engine.give_back(begun.buffer)
                while self._spare:
                    self._engines.cpu.give_back(self._spare.pop())
                if self._readers is not None:
                    self._readers.close()

    def _read(self, engine: Engine, batch: _ReadBatch) -> _Reading:
        """Begin to read the blobs of a batch into one buffer."""
        reads, positions, size = pack.plan_reads(batch.packs, batch.offsets, batch.lengths)
        if size > engine.decode_bytes:  # one chunk declares many bytes: check first that its blobs exist
            for one in reads:
                if one.length:
                    self._get(batch.keys[one.pack], [one.offset + one.length - 1], [memoryview(bytearray(1))])
        self._open_ahead(batch.keys)
        buffer = self._buffer(engine, size)
        stored = buffer[:size]
        count = max(engine.readers, self._store.gets_at_once)
        if self._readers is None or self._readers.count < count:
            if self._readers is not None:
                self._readers.close()
            self._readers = Threads(count)

        def fill(some: Sequence[pack.RangeRead]) -> None:
            for number, own in groupby(some, attrgetter("pack")):
                reads = list(own)
                rooms = [stored[one.position : one.position + one.length].data for one in reads]
                self._get(batch.keys[number], [one.offset for one in reads], rooms)

        def read(some: list[pack.RangeRead]) -> None:
            read_around(fill, some, (batch.offsets, batch.lengths, positions))

        wait = self._readers.start(read, _grouped(reads, count))
        return _Reading(batch, engine, buffer, stored, positions, wait)

    def _buffer(self, engine: Engine, nbytes: int) -> Bytes:
        """Return a spare buffer if it suits, else a new one."""
        if not isinstance(engine, CpuEngine):
            return engine.buffer(nbytes)
        while self._spare:
            buffer = self._spare.pop()
            if nbytes <= len(buffer):
                return buffer
            engine.give_back(buffer)
        return engine.buffer(nbytes + int(nbytes * BUFFER_SLACK))

    def _open_ahead(self, keys: Sequence[str]) -> None:
        """Open packs, for at most OPEN_AHEAD_S.

        An open takes ten system calls, and a thread waits for Python's lock after each of them. If an open takes long,
        as on a network, the threads that read open the remaining packs.
        """
        ends = time.monotonic() + OPEN_AHEAD_S
        for key in keys:
            if key in self._opened:
                continue
            self._get(key, [], [])
            self._opened.add(key)
            if time.monotonic() > ends:
                return

    def _get(self, key: str, offsets: Sequence[int], into: Sequence[memoryview]) -> None:
        """Read ranges of a pack.

        Raises:
            IntegrityError: the pack is missing, or shorter than a range needs.
        """
        try:
            self._get_ranges(key, offsets, into)
        except NotFoundError as error:
            raise IntegrityError(f"{strip_hint(error)}: a pack is missing; run 'snapstore check'") from error

    def _decode(self, reading: deque[_Reading], decoding: deque[tuple[_Reading, Callable[[], object]]]) -> None:
        """Begin to decode the oldest batch in `reading`."""
        begun = reading[0]
        while not begun.wait.ready(POLL_S):
            begun.engine.poll()
        begun.wait()
        batch = begun.batch
        job = DecodeBatch(
            begun.stored,
            begun.positions,
            batch.lengths,
            batch.counts,
            batch.digests,
            batch.outs,
            batch.where,
            gate=begun.gate,
        )
        decoding.append((begun, begun.engine.start_decode(job)))
        reading.popleft()  # now: an error leaves the buffer where it is given back

    def _finished(self, decoding: deque[tuple[_Reading, Callable[[], object]]]) -> int:
        begun, wait = decoding[0]
        wait()
        decoding.popleft()
        if self._counts:
            progress.advance(int(begun.batch.outs.lengths.sum()))
        if isinstance(begun.engine, CpuEngine):
            self._spare.append(begun.buffer)
        else:
            begun.engine.give_back(begun.buffer)
        return len(begun.batch.counts)

    def _batches(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Engine, _ReadBatch]]:
        """Yield batches of bounded size and number of chunks, for one engine."""
        pending: list[Wanted] = []
        engine: Engine | None = None
        cost = count = 0
        sizes = _ChunkSizes()
        for w in wanted:
            if not len(w.rows):
                continue
            own = self._engine or self._engines.of(w.out)
            if engine is not None and own is not engine and pending:
                yield engine, _columns(pending)
                pending, cost, count = [], 0, 0
            engine = own
            costs = sizes.of(w.table, w.rows)
            all_bytes = int(costs.sum())
            if cost + all_bytes <= engine.decode_bytes and count + len(w.rows) <= engine.batch_chunks:
                pending.append(w)
                cost, count = cost + all_bytes, count + len(w.rows)
                continue
            costs = np.cumsum(costs)
            done = 0  # rows of `w` that are in a batch
            while done < len(w.rows):
                spent = int(costs[done - 1]) if done else 0
                limit = engine.decode_bytes - cost + spent
                room = engine.batch_chunks - count
                fits = min(int(np.searchsorted(costs, limit, "right")), done + room)
                if fits == done and not pending:
                    fits = done + 1
                if fits > done:
                    pending.append(Wanted(w.table, w.packs, w.rows[done:fits], w.out, w.starts[done:fits]))
                    cost, count = cost + int(costs[fits - 1]) - spent, count + fits - done
                    done = fits
                if done < len(w.rows):
                    yield engine, _columns(pending)
                    pending, cost, count = [], 0, 0
        if pending and engine is not None:
            yield engine, _columns(pending)


class _ChunkSizes:
    """Sizes of rows of tables. After many requests for one table, all its sizes are computed."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[ChunkTable, int]] = {}  # by id
        self._whole: dict[int, Column] = {}

    def of(self, table: ChunkTable, rows: Column) -> Column:
        """Return plain bytes plus stored bytes of one or more rows, (n,)."""
        number = id(table)
        if number not in self._whole:
            asked = self._asked.get(number, (table, 0))[1] + len(rows)
            self._asked[number] = table, asked  # the reference keeps it alive, so no other table gets its id
            if asked < len(table) // 16:
                return table.lengths[rows] + table.chain_bytes_of(rows)
            self._whole[number] = table.lengths + table.chain_bytes
        return self._whole[number][rows]


def _grouped(reads: Sequence[pack.RangeRead], threads: int) -> list[list[pack.RangeRead]]:
    """Group reads, in order: about four groups for each thread, if there are so many reads.

    Each group makes a thread wait for Python's lock several times, while another thread decodes the batch before.
    """
    most = max(1, len(reads) // (4 * threads))
    found: list[list[pack.RangeRead]] = []
    size = 0
    for one in reads:
        size += one.length
        if found and len(found[-1]) < most and size <= pack.JOIN_MAX_BYTES:
            found[-1].append(one)
        else:
            found.append([one])
            size = one.length
    return found


def _ended(wait: Callable[[], object]) -> None:
    """Wait for work whose result is not used."""
    try:
        wait()
    except Exception as error:  # noqa: BLE001
        error.__traceback__ = None  # the result holds the error, whose frames hold the result and the chunks' memory


def _columns(wanted: Sequence[Wanted]) -> _ReadBatch:
    """Return chunks of several tensors as one batch."""
    numbers: dict[str, int] = {}
    columns: list[tuple[Column, ...]] = []
    # few calls of NumPy: while threads read packs, each call may wait for Python's lock
    for _, same in groupby(wanted, lambda w: (id(w.table), id(w.packs))):
        run = list(same)
        table, packs, rows = run[0].table, run[0].packs, np.concatenate([w.rows for w in run])
        refs = table.refs_of(rows)
        used, inverse = np.unique(table.ref_packs[refs], return_inverse=True)
        own = np.array([numbers.setdefault(packs[n], len(numbers)) for n in used.tolist()], np.int64)
        offsets = np.minimum(table.ref_offsets[refs], _BEYOND).astype(np.int64)
        lengths, counts = table.ref_lengths[refs].astype(np.int64), table.ref_counts[rows].astype(np.int64)
        columns.append(
            (own[inverse], offsets, lengths, counts, table.digests[rows], table.lengths[rows].astype(np.int64))
        )
    joined = (np.concatenate(column) for column in zip(*columns, strict=True))
    blob_packs, blob_offsets, blob_lengths, blob_counts, digests, plain_bytes = joined
    which = np.repeat(np.arange(len(wanted)), [len(w.rows) for w in wanted])
    outs = Chunks([w.out for w in wanted], which, np.concatenate([w.starts for w in wanted]), plain_bytes)
    keys = [pack_key(name) for name in numbers]
    return _ReadBatch(keys, blob_packs, blob_offsets, blob_lengths, blob_counts, digests, outs)
