"""CpuEngine: the stages between plain chunks and blobs, on a pool of threads over all cores.

In: batches of chunks as columns, with their bytes in host memory. Out: digests, blobs, rebuilt chunks (base.Engine).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes, Column, empty_pages, sums_before
from ..errors import IntegrityError, InvalidInputError, SnapstoreError
from ..format.blobs import blob, chain_decode, planes
from ..format.blobs.pack import Encoded
from ..state.values.arrays import Memory
from ..threads import Pending, Threads
from . import reference, spans
from .batches import (
    Chunks,
    DecodeBatch,
    DecodeJob,
    EncodeBatch,
    EncodedChunk,
    EncodeJob,
    Examination,
    Examined,
    MadeBlobs,
)

#: Copies of chunks begin at multiples of this [bytes].
COPIED_ALIGNMENT = 64
#: Plain bytes of a batch to encode: so many for each thread, within these limits.
BATCH_BYTES_PER_THREAD, MIN_BATCH_BYTES, MAX_BATCH_BYTES = 4 * 1024 * 1024, 8 * 1024 * 1024, 48 * 1024 * 1024
#: Stored plus plain bytes of a batch to decode, likewise.
DECODE_BYTES_PER_THREAD, MIN_DECODE_BYTES, MAX_DECODE_BYTES = 8 * 1024 * 1024, 24 * 1024 * 1024, 128 * 1024 * 1024
#: From so many threads on, the next batch must wait for them already, or they have nothing to do meanwhile.
THREADS_OF_DEPTH_2 = 8
#: Reading from the page cache keeps one thread busy while so many others decode.
DECODERS_PER_READER = 4
#: Buffers of blobs are kept for reuse, up to the bytes of this many batches.
FREE_BATCHES = 1
#: More cores than any machine has.
NO_QUOTA = 1 << 20

R = TypeVar("R")


class HostEncoded:
    """Blobs in host memory; see `pack.Encoded`.

    Args:
        entries: (n,) blob.ENTRY; the offsets are set here.
        places: (n,) where the blobs lie.
        threads: they make the copies; None: the thread that calls makes them.
        jobs: of the extension, if it is used.

    Attributes:
        buffers: the memory of the blobs, free for reuse once `are_copied`.
    """

    def __init__(
        self,
        entries: npt.NDArray[np.void],
        places: Chunks,
        threads: Threads | None = None,
        jobs: spans.JobQueue | None = None,
    ) -> None:
        lengths = entries["length"].astype(np.int64)
        self._ends = sums_before(lengths + -lengths % blob.ALIGNMENT)
        entries["offset"] = self._ends[:-1]
        self.entries, self.buffers = entries, places.memories
        self._places = Chunks(places.memories, places.which, places.starts, lengths)
        self._threads, self._jobs = threads, jobs
        self._are_done: list[Callable[[], bool]] = []  # of copies that were begun

    @staticmethod
    def of(blobs: Sequence[EncodedChunk]) -> HostEncoded:
        """Return these blobs."""
        return HostEncoded(_entries(blobs), _places(blobs))

    def copy(self, first: int, last: int, out: Bytes) -> Callable[[], object]:
        """Begin to copy blobs into `out`."""
        rows, ends = slice(first, last), self._ends[first : last + 1] - self._ends[first]
        blobs, zeros = self._places.take(rows), np.zeros(last - first, np.int64)
        copies = Chunks([out], zeros, ends[:-1], np.diff(ends))
        if self._threads is None or out.size < spans.COPIED_AT_ONCE_BYTES:
            _copy_padded(blobs, copies)
            return _nothing_to_wait_for
        if self._jobs is None:
            pending = self._threads.start(lambda _: _copy_padded(blobs, copies), [None])
            self._are_done.append(pending.is_done)
            return pending
        job = spans.copy_job(self._jobs, blobs, copies)
        self._are_done.append(job.done.is_set)
        return job.start(urgent=True).help

    def are_copied(self) -> bool:
        """Return whether no copy reads the buffers any more."""
        return all(is_done() for is_done in self._are_done)


def _nothing_to_wait_for() -> None:
    """Return at once: the work is done."""


def _copy_padded(chunks: Chunks, copies: Chunks) -> None:
    """Copy chunks to longer places, and fill up with zeros."""
    for chunk, copy in zip(chunks.views(), copies.views(), strict=True):
        copy[: chunk.size] = chunk
        copy[chunk.size :] = 0


def _entries(blobs: Sequence[EncodedChunk]) -> npt.NDArray[np.void]:
    """Return the entries of blobs, without offsets."""
    return np.frombuffer(bytearray().join(blob.entry(b.data, 0) for b in blobs), blob.ENTRY)


def _places(blobs: Sequence[EncodedChunk]) -> Chunks:
    """Return where blobs lie: at the beginnings of their buffers."""
    return Chunks.of([b.buffer if b.buffer.size >= len(b.data) else np.frombuffer(b.data, np.uint8) for b in blobs])


def _filled(wait: Callable[[], object], result: R) -> Callable[[], R]:
    """Return a call that waits, and returns what was filled meanwhile."""

    def finish() -> R:
        wait()
        return result

    return finish


class _Errors:
    """The errors of chunks, by row: the threads go on with other spans, and in the end the first one is raised."""

    def __init__(self) -> None:
        self._by_row: dict[int, SnapstoreError] = {}

    def act(self, row: int, act: Callable[[], object]) -> bool:
        """Do something for a chunk; return whether it succeeds."""
        try:
            act()
        except SnapstoreError as error:  # its traceback would keep the memory of the batch alive
            error.__cause__ = error.__context__ = error.__traceback__ = None
            self._by_row[row] = error
            return False
        return True

    def raised_after(self, wait: Callable[[], object]) -> Callable[[], None]:
        """Return a call that waits, and raises the error of the first chunk."""

        def finish() -> None:
            wait()
            if self._by_row:
                raise self._by_row[min(self._by_row)]

        return finish


class CpuEngine:
    """The extension in C, or NumPy, xxhash, zstandard and zlib, on a pool of threads; all of them release the GIL.

    The extension takes spans of chunks. It leaves some rows to the reference, `encode_chunk` and `decode_chain`, which
    handles all rows if there is no extension. SNAPSTORE_ENGINE, "native" or "numpy", forces one of the two.
    """

    batch_chunks = 1024
    depth = 1
    decode_depth = 1

    def __init__(self, digest_seed: int, threads: int | None = None) -> None:
        self.digest_seed = digest_seed
        native = spans.extension()
        self._threads = Threads(threads or default_threads())
        self._jobs = None if native is None else spans.JobQueue(native, self._threads)
        self._free: deque[Bytes] = deque()  # buffers of blobs
        self._read: deque[HostEncoded] = deque()  # recycled; copies may still read the buffers

    @property
    def batch_bytes(self) -> int:
        """Return the most plain bytes that one batch to encode should have."""
        return min(max(MIN_BATCH_BYTES, self._threads.count * BATCH_BYTES_PER_THREAD), MAX_BATCH_BYTES)

    @property
    def decode_bytes(self) -> int:
        """Return the most stored plus plain bytes that one batch to decode should have."""
        return min(max(MIN_DECODE_BYTES, self._threads.count * DECODE_BYTES_PER_THREAD), MAX_DECODE_BYTES)

    @property
    def examine_depth(self) -> int:
        """Return how many batches may be examined while the one before them is looked up and packed."""
        return 1 if self._threads.count < THREADS_OF_DEPTH_2 else 2

    @property
    def readers(self) -> int:
        """Return how many threads should read packs."""
        return max(1, self._threads.count // DECODERS_PER_READER)

    @property
    def puts(self) -> int:
        """Return how many packs should be hashed and put at once."""
        return self._threads.count // 2

    def load(self, chunks: Chunks, *, copy: bool = False) -> Chunks:
        """Return the chunks as they are, since they lie in host memory; with `copy`, return copies."""
        if not copy:
            return chunks
        copies = self.room_for(chunks.lengths, None)
        for own, given in zip(copies.views(), chunks.views(), strict=True):
            own[:] = given
        return copies

    def room_for(self, lengths: Column, memory: Bytes | None) -> Chunks:
        """Return memory for copies of chunks: the given one if it is large enough, else new memory."""
        ends = np.cumsum(lengths + -lengths % COPIED_ALIGNMENT)
        nbytes = int(ends[-1]) if len(ends) else 0
        if memory is None or memory.size < nbytes:
            memory = np.empty(nbytes, np.uint8)
        return Chunks([memory], np.zeros(len(ends), np.int64), ends - lengths - -lengths % COPIED_ALIGNMENT, lengths)

    def start_digests(self, chunks: Chunks, copies: Chunks | None = None) -> Callable[[], Bytes]:
        """Begin to hash every chunk, (n, 16) XXH3-128; `copies`: where to copy it, index -1: nowhere."""
        out, seed = np.empty((len(chunks), 16), np.uint8), self.digest_seed
        if self._jobs is not None:
            job = spans.copy_job(self._jobs, chunks, copies, seed=seed, digests=out)
            return _filled(job.start(urgent=True).help, out)

        def hash_span(rows: slice) -> None:
            reference.digests(chunks.take(rows), copies and copies.take(rows), seed, out[rows])

        return _filled(self._start_spans(chunks, hash_span), out)

    def start_examine(self, given: Examination) -> Callable[[], Examined]:
        """Begin to hash chunks, and to copy them or to encode them at once."""
        chunks, count = given.chunks, len(given.chunks)
        found = Examined(np.zeros((count, 16), np.uint8), np.zeros((count, 16), np.uint8), np.zeros(count, np.uint8))
        if self._jobs is not None:
            job, made = spans.examine_job(self._jobs, given, found, self._buffer, self.digest_seed)
            return _filled(job.start(), replace(found, made=made))

        def examine_span(rows: slice) -> None:
            reference.examine(given.take(rows), self.digest_seed, found.digests[rows], found.base_digests[rows])
            found.copied[rows] = given.copies is not None

        return _filled(self._start_spans(chunks, examine_span), found)

    def _start_spans(self, chunks: Chunks, act: Callable[[slice], None]) -> Pending[None]:
        """Begin to handle spans of chunks on the threads, while their memory may be used."""
        if chunks.gate is not None:
            act = chunks.gate.guarded(act)
        return self._threads.start(act, _slices(spans.cut(chunks.lengths, self._threads.count)))

    def start_encode(self, batch: EncodeBatch) -> Callable[[], Sequence[Encoded]]:
        """Begin to encode a batch on the threads."""
        made, jobs = batch.made, self._jobs
        if not len(batch.chunks) and made is None:
            return lambda: []
        is_done = np.zeros(len(batch.chunks), bool) if made is None else made.entries["length"] > 0
        by_reference = (batch.layouts == planes.BYTES) & (batch.bases.which < 0)
        if made is not None:
            by_reference |= made.tried
        if jobs is None or batch.raw:
            by_reference = ~is_done
        parts: list[tuple[Column, Callable[[], MadeBlobs]]] = []
        if made is not None:  # even if it has no blobs: then its buffers are recycled
            ready = made.take(is_done)
            parts.append((is_done, lambda: ready))
        for rows, start in ((by_reference & ~is_done, self._start_reference), (~is_done & ~by_reference, self._start)):
            if rows.any():
                parts.append((rows, start(batch if rows.all() else batch.take(rows))))

        def finish() -> Sequence[Encoded]:
            entries, number = np.zeros(len(batch.chunks), blob.ENTRY), np.empty(len(batch.chunks), np.int64)
            places: Chunks | None = None
            for rows, wait in parts:
                part = wait()
                entries[rows], at = part.entries, 0 if places is None else len(places)
                number[rows] = at + np.arange(len(part.places))
                places = part.places if places is None else places.joined(part.places)
            assert places is not None
            return [HostEncoded(entries, places.take(number), self._threads, jobs)]

        return finish

    def _start(self, batch: EncodeBatch) -> Callable[[], MadeBlobs]:
        """Begin to encode chunks by the extension, and those that it declines by the reference."""
        assert self._jobs is not None
        job, made = spans.encode_job(self._jobs, batch, self._buffer)
        others: dict[int, EncodedChunk] = {}

        def encode_others(first: int, last: int) -> None:
            rows = first + np.flatnonzero(made.entries["length"][first:last] == 0)
            for row, given in zip(rows.tolist(), reference.encode_jobs(batch.take(rows)), strict=True):
                with planes.scratch.borrowed():
                    others[row] = reference.encode_chunk(given, self._buffer_for(given))

        wait = job.start(encode_others)

        def finish() -> MadeBlobs:
            wait()
            if not others:
                return made
            rows, blobs = np.array(list(others)), list(others.values())
            made.entries[rows] = _entries(blobs)
            number = np.arange(len(made.entries))
            number[rows] = len(number) + np.arange(len(rows))
            return MadeBlobs(made.entries, made.places.joined(_places(blobs)).take(number), made.tried)

        return finish

    def _start_reference(self, batch: EncodeBatch) -> Callable[[], MadeBlobs]:
        """Begin to encode chunks one by one, in NumPy."""
        encode = reference.store_chunk if batch.raw else reference.encode_chunk

        def encode_job(job: EncodeJob) -> EncodedChunk:
            with planes.scratch.borrowed():
                return encode(job, self._buffer_for(job))

        wait = self._threads.start(encode_job, reference.encode_jobs(batch))

        def finish() -> MadeBlobs:
            blobs = wait()
            return MadeBlobs(_entries(blobs), _places(blobs), np.ones(len(blobs), bool))

        return finish

    def _buffer_for(self, job: EncodeJob) -> Bytes:
        return self._buffer(blob.bound(job.chunk.size, job.element_size))

    def _buffer(self, needed: int) -> Bytes:
        """Return a free buffer that is large enough and at most twice as large as needed, or a new one."""
        with suppress(IndexError):
            for _ in range(len(self._read)):
                read = self._read.popleft()
                if read.are_copied():
                    self._free.extend(read.buffers)
                else:
                    self._read.append(read)
            while sum(buffer.size for buffer in list(self._free)) > FREE_BATCHES * self.batch_bytes:
                self._free.popleft()
        with suppress(IndexError):
            for _ in range(len(self._free)):
                buffer = self._free.popleft()
                if needed <= buffer.size <= 2 * needed:
                    return buffer
                self._free.append(buffer)
        return np.empty(needed, np.uint8)

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Take back the memory of blobs once their copies are complete."""
        self._read.extend(e for e in encoded if isinstance(e, HostEncoded))

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch on the threads."""
        if self._jobs is None:
            return self._threads.start(batch.gate.guarded(self._decode_chunk), reference.decode_jobs(batch))
        done, errors = np.zeros(len(batch.counts), np.uint8), _Errors()

        def decode_others(first: int, last: int) -> None:
            rows = (first + np.flatnonzero(done[first:last] == 0)).tolist()
            for row, job in zip(rows, reference.decode_jobs(batch, rows), strict=True):
                if not errors.act(row, partial(self._decode_chunk, job)):
                    return

        job = spans.decode_job(self._jobs, batch, done, self.digest_seed)
        return errors.raised_after(job.start(decode_others, urgent=True).help)

    def _decode_chunk(self, job: DecodeJob) -> None:
        with planes.scratch.borrowed():
            chain_decode.decode_chain(job.blobs, job.wheres, job.digest, job.out, job.base, seed=self.digest_seed)

    def poll(self) -> None:
        """Do nothing: the threads need no polling."""

    def empty(self, nbytes: int) -> Memory:
        """Return new memory, (nbytes,) uint8."""
        return np.empty(nbytes, np.uint8)

    def upload(self, plain: Bytes) -> Bytes:
        """Return the bytes themselves."""
        return plain

    def buffer(self, nbytes: int) -> Bytes:
        """Return new memory, (nbytes,) uint8."""
        return empty_pages(nbytes)

    def give_back(self, buffer: Bytes) -> None:
        """Do nothing: it is ordinary memory."""

    def close(self) -> None:
        """End the threads and drop the buffers."""
        self._threads.close()
        self._free.clear()
        self._read.clear()
        planes.scratch.clear()


class ProvingEngine(CpuEngine):
    """Rebuilds and verifies all chunks of each chain, on the threads of another CPU engine.

    Args:
        digests: (m, 16) of the chunk of each blob that will be decoded, in order, by the manifest.
        checksums: (m,) of the bytes of each blob, if they are known, else 0; see `hashing.keyed_checksum`.

    Attributes:
        proven: the result of `chain_decode.prove_chain` for each chunk so far, in order: a number of blobs.
    """

    def __init__(self, engine: CpuEngine, digests: Bytes, checksums: Column) -> None:
        self._threads, self._free, self.digest_seed = engine._threads, engine._free, engine.digest_seed
        self._jobs, self._read = engine._jobs, engine._read
        self._digests, self._checksums, self._at = digests, checksums, 0
        self.proven: list[int] = []

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch whose last blobs are all full."""
        firsts = sums_before(batch.counts)
        own = slice(self._at, self._at + int(firsts[-1]))
        self._at = own.stop
        digests, checksums, proven = self._digests[own], self._checksums[own], batch.counts.copy()
        done, errors = np.zeros(len(batch.counts), np.uint8), _Errors()

        def prove(row: int, job: DecodeJob, other_read: str | None) -> None:
            if other_read is not None:
                raise IntegrityError(f"{other_read}: two reads return different bytes")
            each = [d.tobytes() for d in digests[firsts[row] : firsts[row + 1]]]
            with planes.scratch.borrowed():
                proven[row] = chain_decode.prove_chain(job.blobs, job.wheres, each, job.out, seed=self.digest_seed)

        def prove_others(first: int, last: int) -> None:
            unequal = reference.unequal(batch, firsts, slice(first, last), checksums)
            rest = sorted({*(first + np.flatnonzero(done[first:last] == 0)).tolist(), *unequal})
            for row, job in zip(rest, reference.decode_jobs(batch, rest) if rest else (), strict=True):
                if not errors.act(row, partial(prove, row, job, unequal.get(row))):
                    return

        wait: Callable[[], object]
        if self._jobs is not None:
            job = spans.decode_job(self._jobs, batch, done, self.digest_seed, each=digests, reports_all=True)
            wait = job.start(prove_others)
        else:

            def prove_span(rows: slice) -> None:
                prove_others(rows.start, rows.stop)

            spans_ = _slices(spans.cut(batch.outs.lengths, self._threads.count))
            wait = self._threads.start(batch.gate.guarded(prove_span), spans_)
        wait_all = errors.raised_after(wait)

        def finish() -> None:
            wait_all()
            self.proven.extend(proven.tolist())

        return finish


def _slices(firsts: Column) -> list[slice]:
    """Return spans as slices; see `spans.cut`."""
    return [slice(first, last) for first, last in pairwise(firsts.tolist())]


def default_threads() -> int:
    """Return SNAPSTORE_THREADS, else the number of cores that this process may use: by affinity and by quota.

    Raises:
        InvalidInputError: the variable is not a number from 1 to 1024.
    """
    value = os.environ.get("SNAPSTORE_THREADS")
    if value is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, cores_of_quota())
    if not value.isdecimal() or not 1 <= int(value) <= 1024:
        raise InvalidInputError(f"SNAPSTORE_THREADS={value!r}: expected a number of threads from 1 to 1024")
    return int(value)


def cores_of_quota(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many cores the quotas of this process's cgroup and of those around it allow, rounded up.

    A pod with a limit of 300m on 64 cores has a quota of 0.3 cores: more threads would only wait for each other.
    Without a quota, or if it cannot be read, the result is larger than any number of cores.

    Source: cgroup-v2 `cpu.max` and cgroup-v1 `cpu.cfs_quota_us`, `cpu.cfs_period_us`, of the Linux kernel's manual.
    """
    least = NO_QUOTA
    with suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / controllers if controllers else root
            folder = top / name.lstrip("/")
            for place in [folder, *folder.parents]:
                if place == top or top in place.parents:
                    least = min(least, _quota(place, is_v2=not controllers))
    return least


def _quota(folder: Path, *, is_v2: bool) -> int:
    """Return the cores that the quota of one cgroup allows, rounded up."""
    try:
        if is_v2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return NO_QUOTA if quota == "max" or int(quota) <= 0 else max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return NO_QUOTA
