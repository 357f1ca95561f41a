"""Engines: the stages between plain chunks and blobs, in batches. The CPU engine runs them on all cores.

In: batches of chunks as columns, their bytes in host memory (the CPU engine) or where an engine of a device can reach
them. Out: digests, blobs, rebuilt chunks. An engine holds no state of a save; its methods may be called from one
thread at a time each. `Engines` finds the engine of a memory.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Bytes
from ..errors import InvalidInputError
from ..format import blob, delta, planes
from ..format.hashing import digest
from ..format.pack import Encoded
from ..state.arrays import Memory
from ..threads import Threads
from .base import Chunks, DecodeBatch, DecodeJob, EncodeBatch, EncodeJob

if TYPE_CHECKING:
    pass

log = logging.getLogger("snapstore")

#: Copies of chunks begin at multiples of this.
COPIED_ALIGNMENT = 64
#: Blobs of this many chunks may be on their way from the threads to the packs.
MAX_FREE_BUFFERS = 64


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """One new blob, in a buffer that the engine takes back."""

    data: memoryview
    is_delta: bool
    buffer: Bytes


class HostEncoded:
    """The blobs of a batch in host memory; see `pack.Encoded`."""

    def __init__(self, blobs: Sequence[EncodedChunk]) -> None:
        self.blobs = blobs
        offsets = np.zeros(len(blobs) + 1, np.int64)
        np.cumsum([len(b.data) + -len(b.data) % blob.ALIGNMENT for b in blobs], out=offsets[1:])
        self.entries = np.frombuffer(
            b"".join(blob.entry(b.data, offset) for b, offset in zip(blobs, offsets[:-1].tolist(), strict=True)),
            blob.ENTRY,
        )

    def copy(self, first: int, last: int, out: Bytes) -> Callable[[], object]:
        """Copy blobs into `out`, at once."""
        at = 0
        for b in self.blobs[first:last]:
            end = at + len(b.data)
            out[at:end] = np.frombuffer(b.data, np.uint8)
            at = end + -end % blob.ALIGNMENT
            out[end:at] = 0
        return _nothing_to_wait_for


def _nothing_to_wait_for() -> None:
    pass


class CpuEngine:
    """NumPy, xxhash, zstandard and zlib over a pool of threads; all of them release the GIL."""

    batch_bytes = 16 * 1024 * 1024
    batch_chunks = 1024
    decode_bytes = 24 * 1024 * 1024
    depth = 1
    decode_depth = 1
    readers = 1

    def __init__(self, digest_seed: int, threads: int | None = None) -> None:
        self.digest_seed = digest_seed
        self._threads = Threads(threads or default_threads())
        self._free: deque[Bytes] = deque(maxlen=MAX_FREE_BUFFERS)

    def load(self, chunks: Chunks, *, copy: bool = False) -> Chunks:
        """They are in host memory already."""
        if not copy:
            return chunks
        ends = np.cumsum(chunks.lengths + -chunks.lengths % COPIED_ALIGNMENT)
        starts = ends - chunks.lengths - -chunks.lengths % COPIED_ALIGNMENT
        copies = Chunks([np.empty(int(ends[-1]), np.uint8)], np.zeros(len(ends), np.int64), starts, chunks.lengths)
        for own, given in zip(copies.views(), chunks.views(), strict=True):
            own[:] = given
        return copies

    def start_digests(self, chunks: Chunks) -> Callable[[], Bytes]:
        """XXH3-128 of every chunk, (n, 16); by whoever waits for it, at tens of GB/s, beside an encoding batch."""
        seed = self.digest_seed
        return lambda: np.frombuffer(b"".join(digest(c, seed) for c in chunks.views()), np.uint8).reshape(-1, 16)

    def start_encode(self, batch: EncodeBatch) -> Callable[[], Sequence[Encoded]]:
        """Begin to encode a batch."""
        jobs = _encode_jobs(batch)
        made = self._threads.start(lambda job: encode_chunk(job, self._room(job)), jobs)
        return lambda: [HostEncoded(made())]

    def _room(self, job: EncodeJob) -> Bytes:
        """A used buffer that fits, else a new one."""
        needed = blob.bound(job.chunk.size, job.element_size)
        with suppress(IndexError):
            buffer = self._free.popleft()
            if needed <= buffer.size <= 2 * needed:
                return buffer
        return np.empty(needed, np.uint8)

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Take back the memory of blobs that have been copied away."""
        for e in encoded:
            if isinstance(e, HostEncoded):
                self._free.extend(b.buffer for b in e.blobs)

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch."""
        return self._threads.start(self._decode_chunk, _decode_jobs(batch))

    def _decode_chunk(self, job: DecodeJob) -> None:
        blob.decode_chain(job.blobs, job.wheres, job.digest, job.out, job.base, seed=self.digest_seed)

    def drive(self) -> None:
        """Nothing to do: the threads go on by themselves."""

    def empty(self, nbytes: int) -> Memory:
        """(nbytes,) uint8."""
        return np.empty(nbytes, np.uint8)

    def moved(self, plain: Bytes) -> Bytes:
        """The bytes themselves."""
        return plain

    def buffer(self, nbytes: int) -> Bytes:
        """(nbytes,) uint8."""
        return np.empty(nbytes, np.uint8)

    def give_back(self, buffer: Bytes) -> None:
        """Nothing to do: it is ordinary memory."""

    def close(self) -> None:
        """End the threads, drop the buffers."""
        self._threads.close()
        self._free.clear()


class ProvingEngine(CpuEngine):
    """Rebuilds chunks on the threads of another one, and every chunk that they build on.

    Attributes:
        proven: of every chunk so far, in order, the digests that the blobs of its chain give (`blob.prove_chain`).
    """

    def __init__(self, engine: CpuEngine) -> None:
        self._threads, self._free, self.digest_seed = engine._threads, engine._free, engine.digest_seed
        self.proven: list[list[bytes]] = []

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch; its bases must lie in it."""
        wait = self._threads.start(self._prove_chunk, _decode_jobs(batch))
        return lambda: self.proven.extend(wait())

    def _prove_chunk(self, job: DecodeJob) -> list[bytes]:
        return blob.prove_chain(job.blobs, job.wheres, job.digest, job.out, seed=self.digest_seed)


def default_threads() -> int:
    """SNAPSTORE_THREADS, else the cores that this process may use.

    Raises:
        InvalidInputError: the variable is no positive number.
    """
    value = os.environ.get("SNAPSTORE_THREADS")
    if value is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not value.isdecimal() or not 1 <= int(value) <= 1024:
        raise InvalidInputError(f"SNAPSTORE_THREADS={value!r}: expected a number of threads from 1 to 1024")
    return int(value)


def _encode_jobs(batch: EncodeBatch) -> list[EncodeJob]:
    columns = (batch.element_sizes, batch.layouts, batch.bases.which, batch.base_chain_bytes)
    return [
        EncodeJob(chunk, chunk_digest.tobytes(), size, layout)
        if which < 0
        else EncodeJob(chunk, chunk_digest.tobytes(), size, layout, base, base_digest.tobytes(), chain_bytes)
        for chunk, chunk_digest, base, base_digest, size, layout, which, chain_bytes in zip(
            batch.chunks.views(), batch.digests, batch.bases.views(), batch.base_digests,
            *(column.tolist() for column in columns), strict=True,
        )
    ]  # fmt: skip


def _decode_jobs(batch: DecodeBatch) -> list[DecodeJob]:
    stored = batch.stored.data
    spans = zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=True)
    blobs = [stored[offset : offset + length] for offset, length in spans]
    bases: list[Bytes | None] = [None] * len(batch.counts)
    if batch.bases is not None:
        bases = [
            view if which >= 0 else None for view, which in zip(batch.bases.views(), batch.bases.which, strict=True)
        ]
    jobs, at = [], 0
    for count, chunk_digest, out, base in zip(
        batch.counts.tolist(), batch.digests, batch.outs.views(), bases, strict=True
    ):
        wheres = [batch.where(i) for i in range(at, at + count)]
        jobs.append(DecodeJob(blobs[at : at + count], wheres, chunk_digest.tobytes(), out, base))
        at += count
    return jobs


def encode_chunk(job: EncodeJob, out: Bytes) -> EncodedChunk:
    """Delta or full by their sampled histograms, then the blob, into `out` (see `blob.bound`)."""
    source, base, chosen = job.chunk, None, _statistics(job.chunk, job)
    if job.base is not None:
        difference = planes.scratch.room("difference", job.chunk.size)
        np.bitwise_xor(job.chunk, job.base, out=difference)
        xor = _statistics(difference, job)
        plane_bytes = job.chunk.size // job.element_size
        full_bytes = blob.estimate_bytes(chosen.bits.tolist(), plane_bytes)
        if delta.pays(blob.estimate_bytes(xor.bits.tolist(), plane_bytes), full_bytes, job.base_chain_bytes):
            source, base, chosen = difference, job.base_digest, xor
    data = blob.encode(source, job.element_size, job.layout, chosen, job.digest, base, out)
    return EncodedChunk(data, base is not None, out)


def _statistics(source: Bytes, job: EncodeJob) -> planes.Statistics:
    return planes.statistics(planes.histograms(planes.sample(source, job.element_size, job.layout)))
