"""Engines: the stages between plain chunks and blobs, in batches. The CPU engine runs them on all cores.

In: batches of chunks as columns, their bytes in host memory (the CPU engine) or where an engine of a device can reach
them. Out: digests, blobs, rebuilt chunks. An engine holds no state of a save; its methods may be called from one
thread at a time each. `Engines` finds the engine of a memory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from . import blob, delta, planes
from .blob import Column
from .digest import Bytes, digest
from .errors import CapabilityError, InvalidInputError
from .pack import Encoded
from .state.arrays import Memory, as_memory
from .threads import Threads

if TYPE_CHECKING:
    import torch

    from .cuda.engine import CudaEngine

log = logging.getLogger("snapstore")

#: Copies of chunks begin at multiples of this.
COPIED_ALIGNMENT = 64
#: Blobs of this many chunks may be on their way from the threads to the packs.
MAX_FREE_BUFFERS = 64
#: How new blobs are coded: by standard streams that every machine reads, or by nvCOMP's ANS.
CODECS = ("portable", "ans")


@dataclass(frozen=True, slots=True)
class Chunks:
    """Spans of a few memories, as columns."""

    memories: Sequence[Memory]
    which: Column  # (n,) which memory; -1: no chunk
    starts: Column  # (n,) its first byte there
    lengths: Column  # (n,) [bytes]

    def __len__(self) -> int:
        return len(self.which)

    def take(self, rows: Column) -> Chunks:
        """Some of them."""
        return Chunks(self.memories, self.which[rows], self.starts[rows], self.lengths[rows])

    def views(self) -> list[Memory]:
        """One view a chunk, (r,) uint8; an empty one where there is none."""
        nothing = np.empty(0, np.uint8)
        return [
            self.memories[w][s : s + n] if w >= 0 else nothing
            for w, s, n in zip(self.which.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]

    def and_those(self, others: Chunks) -> Chunks:
        """Both, one after the other."""
        which = np.where(others.which >= 0, others.which + len(self.memories), -1)
        return Chunks(
            [*self.memories, *others.memories], np.concatenate([self.which, which]),
            np.concatenate([self.starts, others.starts]), np.concatenate([self.lengths, others.lengths]),
        )  # fmt: skip

    @staticmethod
    def of(memories: Sequence[Memory]) -> Chunks:
        """Each memory as one chunk."""
        lengths = np.array([len(memory) for memory in memories], np.int64)
        return Chunks(memories, np.arange(len(memories)), np.zeros(len(memories), np.int64), lengths)


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """New chunks to store, a row each."""

    chunks: Chunks
    digests: Bytes  # (n, 16)
    element_sizes: Column  # (n,) 1, 2, 4 or 8
    layouts: Column  # (n,) planes.ROTATED for floats, else planes.BYTES
    bases: Chunks  # (n,) plain bytes of the candidate bases
    base_digests: Bytes  # (n, 16)
    base_chain_bytes: Column  # (n,) stored bytes of every blob that the base needs


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Chunks to rebuild, a row each; their blobs lie newest first, chunk after chunk, in one buffer."""

    stored: Bytes
    offsets: Column  # (m,) of every blob
    lengths: Column  # (m,)
    counts: Column  # (n,) how many of the blobs are a chunk's
    digests: Bytes  # (n, 16)
    outs: Chunks  # filled
    where: Callable[[int], str]  # how to name a blob in an error
    bases: Chunks | None = None  # plain bytes of what each last blob is a delta to; None: the last ones are full


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One chunk's share of an EncodeBatch."""

    chunk: Bytes
    digest: bytes
    element_size: int
    layout: int = planes.BYTES
    base: Bytes | None = None
    base_digest: bytes = b""
    base_chain_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One chunk's share of a DecodeBatch."""

    blobs: Sequence[memoryview]  # newest first
    wheres: Sequence[str]
    digest: bytes
    out: Bytes  # (r,) uint8, filled
    base: Bytes | None = None


class Engine(Protocol):
    """Batches of chunks to blobs and back. `start_*` returns at once; the call it returns waits for the result.

    Attributes:
        digest_seed: of the one repository that it works for: whatever it hashes, it hashes under this.
        batch_bytes: how much one batch should hold at most.
        decode_bytes: stored and plain bytes of a batch to decode.
        depth, decode_depth: how many batches may be on their way beside the one that is made ready.
        readers: how many threads should read for it.
    """

    digest_seed: int
    batch_bytes: int
    decode_bytes: int
    depth: int
    decode_depth: int
    readers: int

    @property
    def batch_chunks(self) -> int:
        """How many chunks one batch should hold at most."""
        ...

    def load(self, chunks: Chunks, *, copy: bool = False) -> Chunks:
        """The same chunks where the engine works; they may be read until the save ends. `copy`: in memory of ours."""
        ...

    def start_digests(self, chunks: Chunks) -> Callable[[], Bytes]:
        """Begin to hash every chunk: XXH3-128 under the seed, (n, 16)."""
        ...

    def start_encode(self, batch: EncodeBatch) -> Callable[[], Sequence[Encoded]]:
        """Begin to encode a batch: delta or full, planes, codecs. The results' rows make up the batch's, in order."""
        ...

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Take back the memory of blobs that have been copied away."""
        ...

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch of chunks; the call raises the first FormatError or IntegrityError."""
        ...

    def drive(self) -> None:
        """Let what was begun go on; for whoever waits for something else meanwhile."""
        ...

    def empty(self, nbytes: int) -> Memory:
        """(nbytes,) uint8 where the engine works."""
        ...

    def buffer(self, nbytes: int) -> Bytes:
        """At least (nbytes,) uint8 of host memory that the engine copies into and out of fastest."""
        ...

    def give_back(self, buffer: Bytes) -> None:
        """Take back a buffer that nothing uses any more."""
        ...

    def close(self) -> None:
        """Give threads and memory back; the engine may be used again."""
        ...


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


@dataclass(slots=True)
class Engines:
    """The engines of one repository, one a memory; those of CUDA devices are made when a tensor on one is first seen.

    Args:
        digest_seed: of the repository.
        codec: "portable" or "ans", how engines of devices code new blobs.
        required: whether the GPU was asked for, so that its lack is an error.
    """

    digest_seed: int
    threads: int | None = None
    codec: str = "portable"
    required: bool = False
    cpu: CpuEngine = field(init=False)
    _cuda: dict[int, CudaEngine] = field(init=False, default_factory=dict)
    _lacking: str | None = field(init=False, default=None)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _pid: int = field(init=False, default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.cpu = CpuEngine(self.digest_seed, self.threads)

    def of(self, memory: Memory) -> Engine:
        """The engine that works where a memory lies."""
        if isinstance(memory, np.ndarray):
            return self.cpu
        return self.on(memory.device)

    def memory_of(self, value: Any) -> Memory:
        """An array's own bytes where they can be read as they lie, else a copy; nothing is pending on them."""
        memory = as_memory(value, self.on_device)
        if not isinstance(memory, np.ndarray):
            self.on(memory.device).settle()
        return memory

    def on(self, device: torch.device) -> CudaEngine:
        """The engine of a CUDA device.

        Raises:
            CapabilityError: CuPy or nvCOMP are not installed, or do not fit.
        """
        from .cuda import engine_for

        with self._lock:
            if device.index not in self._cuda:
                self._cuda[device.index] = engine_for(device.index, self.codec, self.cpu)
            return self._cuda[device.index]

    def on_device(self, device: torch.device) -> bool:
        """Whether there is an engine for a device: if not, its tensors take the way through host memory.

        Raises:
            CapabilityError: there is none, and the GPU was asked for.
        """
        if device.type != "cuda":
            return False
        if device.index in self._cuda:
            return True
        if self._lacking is None:
            try:
                self.on(device)
                return True
            except CapabilityError as error:
                if self.required:
                    raise
                self._lacking = str(error)
                log.warning("CUDA tensors are compressed on the CPU: %s", error)
        if self.required:
            raise CapabilityError(self._lacking)
        return False

    def in_background(self) -> AbstractContextManager[None]:
        """For a thread of ours: what it does on devices ruins no CUDA graph that another one captures meanwhile."""
        if not self._cuda:
            return nullcontext()
        from .cuda import beside_captures

        return beside_captures()

    def rest(self, buffers: Sequence[Bytes] = (), *, saved: bool = False) -> None:
        """A save (`saved`) or a restore is over: the engines of devices keep no device memory that nobody uses.

        Whichever lent a buffer has it back.
        """
        for engine in list(self._cuda.values()):
            for buffer in buffers:
                engine.give_back(buffer)
            engine.rest(saved=saved)

    def close(self) -> None:
        """Give threads and memory of all engines back."""
        self.cpu.close()
        if os.getpid() == self._pid:  # CUDA does not survive a fork
            for engine in list(self._cuda.values()):
                engine.close()
