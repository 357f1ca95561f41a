"""Engines: the stages between plain chunks and blobs, in batches. The CPU engine runs them on all cores.

In: lists of chunks (r,) uint8 in host memory. Out: digests, blobs, rebuilt chunks. An engine holds no state of a
save; its methods may be called from one thread at a time each. A GPU engine takes the same jobs with device arrays.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any, Protocol, TypeVar

import numpy as np

from . import blob, delta, planes
from .digest import Bytes, digest
from .errors import InvalidInputError

#: Blobs of this many chunks may be on their way from the threads to the packs.
MAX_FREE_BUFFERS = 64

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One new chunk to store."""

    chunk: Bytes  # (r,) uint8
    digest: bytes
    element_size: int
    layout: int = planes.BYTES  # planes.ROTATED for floats
    base: Bytes | None = None  # (r,) uint8, the candidate base's plain bytes
    base_digest: bytes = b""
    base_chain_bytes: int = 0  # stored bytes of every blob that the base needs


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One chunk to rebuild."""

    blobs: Sequence[memoryview]  # newest first
    wheres: Sequence[str]
    digest: bytes
    out: Bytes  # (r,) uint8, filled


@dataclass(frozen=True, slots=True)
class Encoded:
    """One new blob, in a buffer that the engine takes back with `recycle`."""

    data: memoryview
    is_delta: bool
    buffer: Bytes


class Engine(Protocol):
    """Batches of chunks to blobs and back. `start_*` returns at once; the call it returns waits for the result."""

    def digests(self, chunks: Sequence[Bytes]) -> list[bytes]:
        """XXH3-128 of every chunk, in order."""
        ...

    def start_encode(self, jobs: Sequence[EncodeJob]) -> Callable[[], list[Encoded]]:
        """Begin to encode a batch: delta or full, planes, codecs."""
        ...

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Take back the memory of blobs that have been copied away."""
        ...

    def start_decode(self, jobs: Sequence[DecodeJob]) -> Callable[[], list[None]]:
        """Begin to rebuild a batch of chunks; the call raises the first FormatError or IntegrityError."""
        ...

    def close(self) -> None:
        """Give threads and memory back; the engine may be used again."""
        ...


class Threads:
    """A pool of threads, made at first use and again after a fork.

    Threads of a `multiprocessing.pool.ThreadPool` are daemons: a save that runs while the interpreter exits still
    finds them, where concurrent.futures refuses work from that moment on.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPool | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def start(self, function: Callable[[T], R], items: Sequence[T]) -> Callable[[], list[R]]:
        """Begin `function` of every item; the call it returns waits for the results, in order."""
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                self._pool, self._pid = ThreadPool(self.count), os.getpid()
            result: AsyncResult[Any] = self._pool.map_async(function, items, chunksize=max(1, len(items) // 64))
        return result.get

    def close(self) -> None:
        """End the threads once they are idle."""
        if self._pid != os.getpid():  # before the lock: a fork may have left it held
            return
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool.join()
            self._pool = None


class CpuEngine:
    """NumPy, xxhash, zstandard and zlib over a pool of threads; all of them release the GIL."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = Threads(threads or default_threads())
        self._free: deque[Bytes] = deque(maxlen=MAX_FREE_BUFFERS)

    def digests(self, chunks: Sequence[Bytes]) -> list[bytes]:
        """XXH3-128 of every chunk, in order; in the caller's thread, at tens of GB/s, beside an encoding batch."""
        return [digest(chunk) for chunk in chunks]

    def start_encode(self, jobs: Sequence[EncodeJob]) -> Callable[[], list[Encoded]]:
        """Begin to encode a batch."""
        return self._threads.start(lambda job: encode_chunk(job, self._buffer(job)), jobs)

    def _buffer(self, job: EncodeJob) -> Bytes:
        """A used buffer that fits, else a new one."""
        needed = blob.bound(job.chunk.size, job.element_size)
        with suppress(IndexError):
            buffer = self._free.popleft()
            if needed <= buffer.size <= 2 * needed:
                return buffer
        return np.empty(needed, np.uint8)

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Take back the memory of blobs that have been copied away."""
        self._free.extend(e.buffer for e in encoded)

    def start_decode(self, jobs: Sequence[DecodeJob]) -> Callable[[], list[None]]:
        """Begin to rebuild a batch."""
        return self._threads.start(_decode_chunk, jobs)

    def close(self) -> None:
        """End the threads, drop the buffers."""
        self._threads.close()
        self._free.clear()


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


def encode_chunk(job: EncodeJob, out: Bytes) -> Encoded:
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
    return Encoded(data, base is not None, out)


def _statistics(source: Bytes, job: EncodeJob) -> planes.Statistics:
    return planes.statistics(planes.histograms(planes.sample(source, job.element_size, job.layout)))


def _decode_chunk(job: DecodeJob) -> None:
    blob.decode_chain(job.blobs, job.wheres, job.digest, job.out)
