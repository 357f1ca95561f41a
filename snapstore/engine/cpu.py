"""CpuEngine: the stages between plain chunks and blobs, on a pool of threads over all cores.

In: batches of chunks as columns, with their bytes in host memory. Out: digests, blobs, rebuilt chunks (base.Engine).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..arrays import Bytes, Column, empty_pages, sums_before
from ..errors import IntegrityError, InvalidInputError, SnapstoreError
from ..format.blobs import blob, chain_decode, planes
from ..format.blobs.codecs import sparse
from ..format.blobs.pack import Encoded
from ..format.blobs.plane_kinds import estimate_bytes
from ..format.hashing import digest, keyed_checksum
from ..format.manifests import delta_choice
from ..state.values.arrays import Memory
from ..threads import Threads
from . import spans
from .batches import (
    CHANGED,
    COPIED,
    Chunks,
    DecodeBatch,
    DecodeJob,
    EncodeBatch,
    EncodedChunk,
    EncodeJob,
    Examination,
    Examined,
)

#: Copies of chunks begin at multiples of this [bytes].
COPIED_ALIGNMENT = 64
#: Plain bytes of a batch to encode: so many for each thread, within these limits.
BATCH_BYTES_PER_THREAD, MIN_BATCH_BYTES, MAX_BATCH_BYTES = 4 * 1024 * 1024, 8 * 1024 * 1024, 64 * 1024 * 1024
#: At most this many buffers of blobs are kept for reuse.
MAX_FREE_BUFFERS = 64
#: More cores than any machine has.
NO_QUOTA = 1 << 20

R = TypeVar("R")


class HostEncoded:
    """The blobs of a batch in host memory; see `pack.Encoded`."""

    def __init__(self, blobs: Sequence[EncodedChunk], copies: spans.Copies | None = None) -> None:
        self.blobs, self.copies = blobs, copies or spans.Copies()
        self.buffers = list({id(b.buffer): b.buffer for b in blobs}.values())
        offsets = np.zeros(len(blobs) + 1, np.int64)
        np.cumsum([len(b.data) + -len(b.data) % blob.ALIGNMENT for b in blobs], out=offsets[1:])
        self.entries = np.frombuffer(
            b"".join(blob.entry(b.data, offset) for b, offset in zip(blobs, offsets[:-1].tolist(), strict=True)),
            blob.ENTRY,
        )

    def copy(self, first: int, last: int, out: Bytes) -> Callable[[], object]:
        """Begin to copy blobs into `out`."""

        def copy() -> None:
            at = 0
            for b in self.blobs[first:last]:
                end = at + len(b.data)
                out[at:end] = np.frombuffer(b.data, np.uint8)
                at = end + -end % blob.ALIGNMENT
                out[end:at] = 0

        return self.copies.start(copy, out.size)


class CpuEngine:
    """The extension in C, or NumPy, xxhash, zstandard and zlib, on a pool of threads; all of them release the GIL.

    The extension takes spans of chunks. It leaves some rows to the reference, `encode_chunk` and `decode_chain`, which
    handles all rows if there is no extension. SNAPSTORE_ENGINE, "native" or "numpy", forces one of the two.
    """

    batch_chunks = 1024
    decode_bytes = 24 * 1024 * 1024
    depth = 1
    decode_depth = 1
    readers = 1

    def __init__(self, digest_seed: int, threads: int | None = None) -> None:
        self.digest_seed = digest_seed
        self._native = spans.extension()
        self._threads = Threads(threads or default_threads())
        self._free: deque[Bytes] = deque(maxlen=MAX_FREE_BUFFERS)
        self._read: deque[HostEncoded | spans.SpanEncoded]  # recycled; copies may still read the buffers
        self._read = deque(maxlen=MAX_FREE_BUFFERS)

    @property
    def batch_bytes(self) -> int:
        """Return the most plain bytes that one batch to encode should have."""
        return min(max(MIN_BATCH_BYTES, self._threads.count * BATCH_BYTES_PER_THREAD), MAX_BATCH_BYTES)

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

        def hash_span(rows: slice) -> None:
            own, others = chunks.take(rows), copies and copies.take(rows)
            if self._native is not None:
                spans.digests(self._native, own, others, seed, out[rows])
                return
            out[rows] = np.frombuffer(b"".join(digest(c, seed) for c in own.views()), np.uint8).reshape(-1, 16)
            for chunk, copy in zip(own.views(), others.views() if others else (), strict=False):
                copy[:] = chunk[: copy.size]  # none, if it has no place

        return self._start_spans(chunks, hash_span, out)

    def start_examine(self, given: Examination) -> Callable[[], Examined]:
        """Begin to hash chunks, and to copy and sample them."""
        found, chunks, seed = spans.nothing_found(len(given.chunks)), given.chunks, self.digest_seed

        def examine_span(rows: slice) -> None:
            if self._native is not None:
                spans.examine(self._native, given, seed, found, rows)
            else:
                _examine(given.take(rows), seed, *(c[rows] for c in (found.digests, found.base_digests, found.copied)))

        return self._start_spans(chunks, examine_span, found)

    def _start_spans(self, chunks: Chunks, act: Callable[[slice], None], filled: R) -> Callable[[], R]:
        """Begin to handle spans of chunks on the threads, while their memory may be used, and fill a result."""
        if chunks.gate is not None:
            act = chunks.gate.guarded(act)
        wait = self._threads.start(act, spans.cut(chunks.lengths, self._threads.count))

        def finish() -> R:
            wait()
            return filled

        return finish

    def start_encode(self, batch: EncodeBatch) -> Callable[[], Sequence[Encoded]]:
        """Begin to encode a batch on the threads."""
        if self._native is not None and not batch.raw:
            choice = None if batch.sampled is None else spans.choose(self._native, batch)
            rows = spans.cut(batch.chunks.lengths, self._threads.count)
            return self._threads.start(lambda span: self._encode_span(batch, span, choice), rows)
        jobs = _encode_jobs(batch)
        encode = store_chunk if batch.raw else encode_chunk

        def encode_job(job: EncodeJob) -> EncodedChunk:
            with planes.scratch.borrowed():
                return encode(job, self._buffer_for(job))

        encoded = self._threads.start(encode_job, jobs)
        return lambda: [HostEncoded(encoded(), spans.Copies(self._threads))]

    def _encode_span(self, whole: EncodeBatch, rows: slice, choice: spans.Choice | None) -> Encoded:
        """Encode rows of a batch in this thread: by the extension, then the others by the reference."""
        batch, copies = whole.take(rows), spans.Copies(self._threads)
        chosen = choice and choice.take(rows)
        with planes.scratch.borrowed():
            made = spans.encode(self._native, batch, chosen, self._buffer, copies)
            others = np.flatnonzero(made.entries["length"] == 0)
            if not len(others):
                return made
            others_made = [encode_chunk(job, self._buffer_for(job)) for job in _encode_jobs(batch.take(others))]
        found = dict(zip(others.tolist(), others_made, strict=True))
        return HostEncoded([found.get(row) or made.chunk(row) for row in range(len(made.entries))], copies)

    def _buffer_for(self, job: EncodeJob) -> Bytes:
        return self._buffer(blob.bound(job.chunk.size, job.element_size))

    def _buffer(self, needed: int) -> Bytes:
        """Return the oldest free buffer, or a new one.

        If the oldest buffer is too small, or more than twice as large as needed, it is dropped.
        """
        with suppress(IndexError):
            for _ in range(len(self._read)):
                read = self._read.popleft()
                if read.copies.are_done():
                    self._free.extend(read.buffers)
                else:
                    self._read.append(read)
        with suppress(IndexError):
            buffer = self._free.popleft()
            if needed <= buffer.size <= 2 * needed:
                return buffer
        return np.empty(needed, np.uint8)

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Take back the memory of blobs once their copies are complete."""
        self._read.extend(e for e in encoded if isinstance(e, HostEncoded | spans.SpanEncoded))

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch on the threads."""
        if self._native is not None:
            rows = spans.cut(batch.outs.lengths, self._threads.count)
            return self._threads.start(batch.gate.guarded(lambda span: self._decode_span(batch, span)), rows)
        return self._threads.start(batch.gate.guarded(self._decode_chunk), _decode_jobs(batch))

    def _decode_span(self, batch: DecodeBatch, rows: slice) -> None:
        """Rebuild the chunks of some rows: by the extension, then the other rows by the reference."""
        with planes.scratch.borrowed():
            others = spans.decode(self._native, batch, rows, self.digest_seed)
        for job in _decode_jobs(batch, others.tolist()) if len(others) else ():
            self._decode_chunk(job)

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
        self._native, self._read = engine._native, engine._read
        self._digests, self._checksums, self._at = digests, checksums, 0
        self.proven: list[int] = []

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch whose last blobs are all full."""
        firsts, rows = sums_before(batch.counts), spans.cut(batch.outs.lengths, self._threads.count)
        own = slice(self._at, self._at + int(firsts[-1]))
        self._at = own.stop
        digests, checksums, proven = self._digests[own], self._checksums[own], batch.counts.copy()

        errors: dict[int, SnapstoreError] = {}  # by row

        def prove_span(span: slice) -> None:
            others = np.arange(span.start, span.stop)
            if self._native is not None:
                with planes.scratch.borrowed():
                    others = spans.decode(self._native, batch, span, self.digest_seed, digests)
            unequal = _unequal(batch, firsts, span, checksums)
            rest = sorted({*others.tolist(), *unequal})
            for row, job in zip(rest, _decode_jobs(batch, rest) if rest else (), strict=True):
                each = [d.tobytes() for d in digests[firsts[row] : firsts[row + 1]]]
                try:
                    if row in unequal:
                        raise IntegrityError(f"{unequal[row]}: two reads return different bytes")
                    with planes.scratch.borrowed():
                        proven[row] = chain_decode.prove_chain(
                            job.blobs, job.wheres, each, job.out, seed=self.digest_seed
                        )
                except SnapstoreError as error:  # its traceback would keep the memory of the batch alive
                    error.__cause__ = error.__context__ = error.__traceback__ = None
                    errors[row] = error
                    return

        wait = self._threads.start(batch.gate.guarded(prove_span), rows)

        def finish() -> None:
            wait()
            if errors:
                raise errors[min(errors)]
            self.proven.extend(proven.tolist())

        return finish


def _unequal(batch: DecodeBatch, firsts: Column, rows: slice, checksums: Column) -> dict[int, str]:
    """Return the rows with a blob of another checksum than is known, and the blob's name."""
    found: dict[int, str] = {}
    stored, offsets, lengths = batch.stored.data, batch.offsets.tolist(), batch.lengths.tolist()
    for row in range(rows.start, rows.stop):
        for i in range(int(firsts[row]), int(firsts[row + 1])):
            if checksums[i] and keyed_checksum(stored[offsets[i] : offsets[i] + lengths[i]]) != checksums[i]:
                found.setdefault(row, batch.where(i))
    return found


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


def _examine(given: Examination, seed: int, digests: Bytes, base_digests: Bytes, copied: Column) -> None:
    """Hash chunks and their bases, and copy the chunks that differ from theirs."""
    copies = given.copies.views() if given.copies is not None else None
    for i, (chunk, base) in enumerate(zip(given.chunks.views(), given.bases.views(), strict=True)):
        found = digest(chunk, seed)
        digests[i] = np.frombuffer(found, np.uint8)
        if given.bases.which[i] >= 0:
            base_digests[i] = np.frombuffer(digest(base, seed), np.uint8)
        if copies is not None and not (given.bases.which[i] >= 0 and (digests[i] == base_digests[i]).all()):
            copies[i][:] = chunk
            copied[i] = COPIED if digest(copies[i], seed) == found else CHANGED


def _encode_jobs(batch: EncodeBatch) -> list[EncodeJob]:
    columns = (batch.element_sizes, batch.layouts, batch.bases.which, batch.delta_limits)
    chunks = zip(batch.chunks.views(), batch.digests, batch.bases.views(), batch.base_digests, strict=True)
    return [
        EncodeJob(chunk, chunk_digest.tobytes(), size, layout)
        if which < 0
        else EncodeJob(chunk, chunk_digest.tobytes(), size, layout, base, base_digest.tobytes(), limit, batch.xor)
        for (chunk, chunk_digest, base, base_digest), size, layout, which, limit in zip(
            chunks, *(column.tolist() for column in columns), strict=True
        )
    ]


def _decode_jobs(batch: DecodeBatch, rows: Sequence[int] | None = None) -> list[DecodeJob]:
    """Return the jobs of some rows; None: of all."""
    stored, firsts = batch.stored.data, sums_before(batch.counts).tolist()
    offsets, lengths = batch.offsets, batch.lengths
    chosen = np.arange(len(batch.counts)) if rows is None else np.array(rows, np.int64)
    bases: list[Bytes | None] = [None] * len(chosen)
    if batch.bases is not None:
        some = batch.bases.take(chosen)
        bases = [view if which >= 0 else None for view, which in zip(some.views(), some.which, strict=True)]
    jobs = []
    for row, out, base in zip(chosen.tolist(), batch.outs.take(chosen).views(), bases, strict=True):
        span = slice(firsts[row], firsts[row + 1])
        places = zip(offsets[span].tolist(), lengths[span].tolist(), strict=True)
        blobs = [stored[offset : offset + length] for offset, length in places]
        wheres = [batch.where(i) for i in range(firsts[row], firsts[row + 1])]
        jobs.append(DecodeJob(blobs, wheres, batch.digests[row].tobytes(), out, base))
    return jobs


def encode_chunk(job: EncodeJob, out: Bytes) -> EncodedChunk:
    """Encode one chunk into `out` (see `blob.bound`): full, as a delta in planes, or as a sparse delta; or as an XOR.

    The sizes of planes are estimated from sampled histograms. A sparse delta is tried if few enough elements changed,
    and stored if it is smaller than the planes. No delta is stored that takes more than `job.delta_limit`.
    """
    of_chunk = _statistics(job.chunk, job.element_size, job.layout)
    source, base, chosen = job.chunk, None, of_chunk
    if job.base is not None:
        difference = planes.scratch.room("difference", job.chunk.size)
        if job.xor:
            np.bitwise_xor(job.chunk, job.base, out=difference)
        else:
            planes.difference(job.chunk, job.base, job.element_size, difference)
        of_difference = _statistics(difference, job.element_size, job.layout if job.xor else planes.BYTES)
        plane_bytes = job.chunk.size // job.element_size
        full_bytes = estimate_bytes(of_chunk.bits.tolist(), plane_bytes)
        delta_bytes = estimate_bytes(of_difference.bits.tolist(), plane_bytes)
        changed = int(np.count_nonzero(difference.view(f"u{job.element_size}")))
        if not job.xor and sparse.worth_trying(changed, plane_bytes):
            digests = (job.digest, job.base_digest)
            few = changed <= delta_choice.FEW_CHANGED_SHARE * plane_bytes
            most = min(full_bytes, delta_bytes * (delta_choice.FEW_CHANGED_EXCESS if few else 1)) + blob.HEADER.size
            data = blob.encode_sparse(difference, job.base, job.element_size, job.layout, digests, most, out)
            if data is not None and delta_choice.pays(len(data), full_bytes, job.delta_limit):
                return EncodedChunk(data, True, out)
        if delta_choice.pays(delta_bytes, full_bytes, job.delta_limit):
            source, base, chosen = difference, job.base_digest, of_difference
    data = blob.encode(source, job.element_size, job.layout, chosen, (job.digest, base), out, xor=job.xor)
    if base is not None and len(data) > job.delta_limit:  # the estimate was too low
        data, base = blob.encode(job.chunk, job.element_size, job.layout, of_chunk, (job.digest, None), out), None
    return EncodedChunk(data, base is not None, out)


def store_chunk(job: EncodeJob, out: Bytes) -> EncodedChunk:
    """Store one chunk in `out` (see `blob.bound`): as a sparse delta if that pays, else as one raw plane."""
    if job.base is not None and not job.xor:
        difference = planes.scratch.room("difference", job.chunk.size)
        planes.difference(job.chunk, job.base, job.element_size, difference)
        elements = job.chunk.size // job.element_size
        if sparse.worth_trying(int(np.count_nonzero(difference.view(f"u{job.element_size}"))), elements):
            digests = (job.digest, job.base_digest)
            most = job.chunk.size
            data = blob.encode_sparse(difference, job.base, job.element_size, job.layout, digests, most, out)
            if data is not None and delta_choice.pays(len(data), most, job.delta_limit):
                return EncodedChunk(data, True, out)
    return EncodedChunk(blob.encode(job.chunk, 1, planes.BYTES, _NOISE, (job.digest, None), out), False, out)


#: The statistics of a plane that is stored raw.
_NOISE = planes.Statistics(np.array([8.0]), np.array([0.0]))


def _statistics(source: Bytes, element_size: int, layout: int) -> planes.Statistics:
    return planes.statistics(planes.histograms(planes.sample(source, element_size, layout)))
