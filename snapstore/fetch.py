"""Fetch: chunks out of packs. get ranges -> unpack -> decode -> planes -> patch chain -> verify digest.

In: rows of a chunk table and where each chunk's bytes go. Out: filled buffers, every one checked against its digest.
Batches are bounded in stored plus plain bytes; the next one is read while this one is decoded, so memory stays bounded
whatever the state's size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from . import pack
from .digest import Bytes
from .engine import DecodeJob, Engine, Threads
from .errors import IntegrityError, NotFoundError
from .manifest import ChunkTable
from .records import pack_key
from .storage import ObjectStore

#: Stored and plain bytes of one batch; up to four are in memory at a time.
BATCH_BYTES = 24 * 1024 * 1024
BATCH_CHUNKS = 4096


@dataclass(frozen=True, slots=True)
class Wanted:
    """One chunk to rebuild."""

    table: ChunkTable
    packs: Sequence[str]  # hex names that `table.ref_packs` counts in
    row: int
    out: Bytes  # (r,) uint8


Read = Callable[[], list[list[memoryview]]]


class Fetcher:
    """Rebuilds chunks of one repository."""

    def __init__(self, store: ObjectStore, engine: Engine) -> None:
        self._store, self._engine = store, engine
        self._reader = Threads(1)

    def rebuild(self, wanted: Iterable[Wanted]) -> Iterator[int]:
        """Fill every chunk's buffer, in order; yields how many more are done after each batch.

        Raises:
            IntegrityError, FormatError: a chunk cannot be rebuilt; buffers are then garbage.
            StorageError: the store failed.
        """
        reading: deque[tuple[list[Wanted], Read]] = deque()
        decoding: deque[tuple[int, Callable[[], object]]] = deque()
        try:
            for batch in _batches(wanted):
                reading.append((batch, self._reader.start(self._read, [batch])))
                if len(reading) > 1:
                    decoding.append(self._decode(*reading.popleft()))
                if len(decoding) > 1:  # one batch is read and two are decoded: no core waits for the next
                    yield _finished(*decoding.popleft())
            decoding.extend(self._decode(*begun) for begun in reading)
            while decoding:
                yield _finished(*decoding.popleft())
        finally:
            for _, wait in decoding:  # nothing may write into the caller's memory any more
                with suppress(Exception):
                    wait()
            self._reader.close()

    def _read(self, batch: list[Wanted]) -> list[memoryview]:
        """The blobs of a batch, chunk after chunk, newest first within each."""
        refs = [(pack_key(name), offset, length) for w in batch for name, offset, length in _refs(w)]
        try:
            return pack.read_blobs(self._store, refs)
        except NotFoundError as error:
            raise IntegrityError(f"{error}: a pack is missing; run 'snapstore check'") from error

    def _decode(self, batch: list[Wanted], read: Read) -> tuple[int, Callable[[], object]]:
        blobs = read()[0]
        jobs: list[DecodeJob] = []
        at = 0
        for w in batch:
            count = int(w.table.ref_counts[w.row])
            wheres = [f"pack {name[:12]} at {offset}+{length}" for name, offset, length in _refs(w)]
            jobs.append(DecodeJob(blobs[at : at + count], wheres, w.table.digests[w.row].tobytes(), w.out))
            at += count
        return len(batch), self._engine.start_decode(jobs)


def _finished(count: int, wait: Callable[[], object]) -> int:
    wait()
    return count


def _refs(wanted: Wanted) -> list[tuple[str, int, int]]:
    """(pack, offset, length) of every blob of a chunk's chain."""
    table = wanted.table
    span = slice(int(table.starts[wanted.row]), int(table.starts[wanted.row + 1]))
    numbers, offsets, lengths = table.ref_packs[span], table.ref_offsets[span], table.ref_lengths[span]
    return [
        (wanted.packs[n], o, s) for n, o, s in zip(numbers.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    ]


def _batches(wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    """Runs of chunks that fit in memory together."""
    batch: list[Wanted] = []
    size_bytes = 0
    for w in wanted:
        span = slice(int(w.table.starts[w.row]), int(w.table.starts[w.row + 1]))
        cost = w.out.size + int(w.table.ref_lengths[span].sum(dtype="u8"))
        if batch and (size_bytes + cost > BATCH_BYTES or len(batch) >= BATCH_CHUNKS):
            yield batch
            batch, size_bytes = [], 0
        batch.append(w)
        size_bytes += cost
    if batch:
        yield batch
