"""CudaEngine: batches of chunks to blobs and back on one CUDA device, in the format of the CPU engine.

encoding.py and decoding.py hold the stages of a batch. All work on chunks runs on the device; the host reads only
columns. Up to three batches run at a time, each on a stream of its own: the device computes one batch while the host
reads the sizes of another. A batch that does not fit into device memory is halved; one chunk that does not fit goes to
the CPU engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import torch

from ...arrays import Bytes, Column
from ...errors import InvalidInputError
from ...format.blobs.pack import Encoded
from ...format.blobs.plane_kinds import REPEATS, RUNS, SKEWED
from ...state.values.arrays import Memory
from ...text import log
from ...threads import Gate
from ..batches import Chunks, DecodeBatch, EncodeBatch, Examination, Examined
from ..cpu import CpuEngine
from .decoding import Decoding
from .encoding import Encoding
from .huffman import HUFFMAN
from .nvcomp import ANS, DEFLATE_MATCHES, ZSTD, ZSTD_BYTES, Coder
from .pinned import ALIGNMENT, Pinned, PinnedBuffers
from .streams import StreamPool, WorkStream, addresses_of, copy_async, out_of_memory, release_cached_memory

#: How many batches run at a time at most, and their size [bytes]: codecs need a thousand blocks to fill the device.
BATCHES_AT_ONCE = 3
BATCH_BYTES = 192 * 1024 * 1024
MIN_BATCH_BYTES = 8 * 1024 * 1024
#: A compressed block gets memory for the largest possible result, 145 KiB with deflate, even if it is small. So a batch
#: should have at most one chunk per this many of its plain bytes.
MIN_BYTES_PER_CHUNK = 256 * 1024
#: Device memory that a stream needs per byte of a batch: planes, compressed blocks, blobs, and nvCOMP's memory.
WORK_PER_BATCH_BYTE = 7
#: Stored plus plain bytes of a batch to decode: each batch costs the host milliseconds, even if it is small.
DECODE_BYTES = 512 * 1024 * 1024
#: Packs hashed and put at once: batches fill them faster than one core hashes them.
PUTS = 10
#: The sizes of read buffers are multiples of these, so that a buffer also fits the next batch [bytes].
BUFFER_BYTES, SMALL_BUFFER_BYTES = 32 * 1024 * 1024, 4 * 1024 * 1024
#: Threads that read packs. More threads would read faster, but would take cores from the thread that polls the device.
READERS = 8
#: Pinned host memory that is kept for the next save or restore [bytes].
PINNED_BYTES = 1280 * 1024 * 1024

_PORTABLE = {SKEWED: HUFFMAN, RUNS: DEFLATE_MATCHES, REPEATS: DEFLATE_MATCHES}
#: Used if every stream has memory for zstd.
_PORTABLE_WITH_ZSTD = {SKEWED: HUFFMAN, RUNS: ZSTD, REPEATS: ZSTD}
_ANS = {SKEWED: ANS, RUNS: ANS, REPEATS: ANS}


class CudaEngine:
    """The engine of one CUDA device. See `base.Engine` for the methods; all of them take columns.

    A memory is a torch.uint8 tensor on the device, `Pinned` host memory, which is uploaded before use, or a NumPy array
    after the device ran out of memory. Then the CPU engine does the work.
    """

    decode_bytes = DECODE_BYTES
    examine_depth = 1
    decode_depth = BATCHES_AT_ONCE - 1
    readers = READERS
    puts = PUTS

    def __init__(self, device: int, codec: str, cpu: CpuEngine) -> None:
        self.device = torch.device("cuda", device)
        self.digest_seed = cpu.digest_seed
        self.batch_bytes, self.depth = BATCH_BYTES, BATCHES_AT_ONCE - 1
        self._limits: dict[object, int] = {}  # running save -> device memory [bytes]
        self._limits_lock = threading.Lock()
        self._codec = codec
        self._with_zstd = self._warned = False
        self._cpu = cpu
        self._pool = StreamPool(self.device, BATCHES_AT_ONCE)
        self._front = WorkStream(self.device)  # for uploads and allocations, without waiting for batches
        self._front_lock = threading.Lock()
        self._pinned = PinnedBuffers(PINNED_BYTES)

    # -- memory

    def sync(self) -> None:
        """Wait for the caller's current stream; then other streams may use its tensors.

        Raises:
            InvalidInputError: a CUDA graph is being captured; a wait would break it.
        """
        if torch.cuda.is_current_stream_capturing():
            raise InvalidInputError("a save or restore while a CUDA graph is being captured; call it between replays")
        torch.cuda.current_stream(self.device).synchronize()

    def upload(self, plain: Bytes) -> Memory:
        """Return a copy of host bytes on this device, or in host memory if the device is full."""
        memory = self.empty(plain.size)
        if isinstance(memory, np.ndarray):
            memory[:] = plain
            return memory
        memory.copy_(torch.from_numpy(plain))
        self.sync()
        return memory

    @contextmanager
    def _at_front(self) -> Iterator[WorkStream]:
        with out_of_memory(), self._front_lock, self._front.current():
            try:
                yield self._front
            finally:
                self._front.sync()

    def poll(self) -> None:
        """Advance the batches whose enqueued work is done."""
        self._pool.poll()

    def empty(self, nbytes: int) -> Memory:
        """Return (nbytes,) uint8 on the device, or in host memory if the device is full."""
        try:
            with self._at_front() as work:
                return work.empty(nbytes)[:nbytes]
        except torch.OutOfMemoryError:
            self._shrink("a buffer")
            return np.empty(nbytes, np.uint8)

    def buffer(self, nbytes: int) -> Bytes:
        """Return at least (nbytes,) uint8 of pinned host memory."""
        nbytes += -nbytes % (BUFFER_BYTES if nbytes > 2 * BUFFER_BYTES else SMALL_BUFFER_BYTES)
        with torch.cuda.device(self.device):
            return self._pinned.take(nbytes)

    def give_back(self, buffer: Bytes) -> None:
        """Keep a pinned buffer for the next use."""
        self._pinned.give(buffer)

    def release_memory(self, *, saved: bool = False) -> None:
        """Release device memory. `saved`: a save has ended, so the next one may try full batches again."""
        self._pool.release_memory()
        if saved:
            self._warned = False
            with self._limits_lock:
                self._set_batches()

    def close(self) -> None:
        """Release threads and memory."""
        with suppress(Exception):  # a failed device has no memory to release
            self.release_memory()
        self._pinned.clear()

    @property
    def batch_chunks(self) -> int:
        """Return the most chunks that one batch should have."""
        return max(256, self.batch_bytes // MIN_BYTES_PER_CHUNK)

    @property
    def coders(self) -> dict[int, Coder]:
        """Return the coder by kind of plane (see plane_kinds.py)."""
        if self._codec == "ans":
            return _ANS
        return _PORTABLE_WITH_ZSTD if self._with_zstd else _PORTABLE

    def limit(self, saver: object, work_bytes: int | None) -> None:
        """Limit a save's device memory [bytes, about]; None removes it. The least limit of all saves counts."""
        with self._limits_lock:
            if work_bytes is None:
                self._limits.pop(saver, None)
            else:
                self._limits[saver] = work_bytes
            self._set_batches()

    def _set_batches(self) -> None:
        """Set the size of batches, and how many run at a time, by the limits of running saves; this undoes `_shrink`.

        The caller holds the lock of the limits.

        Little memory goes to one large batch rather than to three small ones: each batch costs the host milliseconds.
        """
        least = min(list(self._limits.values()), default=None)
        of_stream = WORK_PER_BATCH_BYTE * BATCH_BYTES
        work_bytes = BATCHES_AT_ONCE * of_stream if least is None else least
        self._with_zstd = least is not None and least >= BATCHES_AT_ONCE * (of_stream + ZSTD_BYTES)
        self._pool.at_once = at_once = int(min(BATCHES_AT_ONCE, max(1, work_bytes // of_stream)))
        self.depth = max(1, at_once - 1)
        most = work_bytes // at_once // WORK_PER_BATCH_BYTE
        fitting = most // MIN_BATCH_BYTES * MIN_BATCH_BYTES  # equal from save to save
        self.batch_bytes = int(min(BATCH_BYTES, max(MIN_BATCH_BYTES, fitting)))

    def _shrink(self, what: str) -> None:
        """Halve the batches and release memory, after the device had none for `what`; warn once per save."""
        self.batch_bytes = max(MIN_BATCH_BYTES, self.batch_bytes // 2)
        if not self._warned:
            text = "cuda:%d: out of memory for %s; continuing with smaller batches, or in host memory"
            log.warning(text, self.device.index, what)
        self._warned = True
        self._pool.release_memory()
        release_cached_memory(self.device)

    # -- chunks in

    def load(self, chunks: Chunks, *, copy: bool = False) -> Chunks:
        """Upload pinned chunks and return the others as they are; with `copy`, copy all to new device memory."""
        uploaded = [i for i, memory in enumerate(chunks.memories) if copy or isinstance(memory, Pinned)]
        used = np.isin(chunks.which, uploaded)
        if not used.any():
            return chunks
        try:
            return self._upload_chunks(chunks, np.flatnonzero(used))
        except torch.OutOfMemoryError:
            self._shrink("an upload")
            if copy:
                return self._cpu.load(_all_on_host(chunks), copy=True)
            memories = [memory.array if isinstance(memory, Pinned) else memory for memory in chunks.memories]
            return replace(chunks, memories=memories)

    def _upload_chunks(self, chunks: Chunks, rows: Column) -> Chunks:
        """Copy the chunks `rows` to one new allocation on the device; return all chunks."""
        which, starts, lengths = chunks.which[rows], chunks.starts[rows], chunks.lengths[rows]
        rooms = (lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        places = np.cumsum(rooms) - rooms
        with self._at_front() as work:
            memory = work.empty(int(places[-1] + rooms[-1]))
            # chunks that are adjacent in one memory, and aligned in both memories, go in one copy
            joined = (which[1:] == which[:-1]) & (starts[1:] == starts[:-1] + rooms[:-1]) & (rooms == lengths)[:-1]
            first = np.flatnonzero(np.concatenate([[True], ~joined]))
            last = np.concatenate([first[1:], [len(rows)]]) - 1
            for i, j in zip(first.tolist(), last.tolist(), strict=True):
                source = _address_of(chunks.memories[which[i]]) + int(starts[i])
                size = int(starts[j] + lengths[j] - starts[i])
                copy_async(memory.data_ptr() + int(places[i]), source, size, work.stream)
        moved = Chunks([*chunks.memories, memory], chunks.which.copy(), chunks.starts.copy(), chunks.lengths)
        moved.which[rows], moved.starts[rows] = len(chunks.memories), places
        return moved

    def start_digests(self, chunks: Chunks) -> Callable[[], Bytes]:
        """Begin to hash every chunk: XXH3-128 under the seed, (n, 16)."""
        if not len(chunks) or _any_on_host(chunks):
            return self._cpu.start_digests(_all_on_host(chunks))

        def steps(work: WorkStream) -> Generator[None, None, Bytes]:
            found = work.fetch(work.digests(addresses_of(chunks), chunks.lengths, self.digest_seed))
            yield
            digests: Bytes = found.numpy()
            return digests

        task = self._pool.start(steps, fast=True)

        def finish() -> Bytes:
            try:
                digests: Bytes = task.result()
                return digests
            except torch.OutOfMemoryError:
                self._shrink("digests")
                return self._cpu.start_digests(_all_on_host(chunks))()

        return finish

    # -- encode

    def start_examine(self, given: Examination) -> Callable[[], Examined]:
        """Begin to hash chunks and their bases. Nothing is copied: the inputs of devices are copies."""
        count, has_base = len(given.chunks), np.flatnonzero(given.bases.which >= 0)
        wait = self.start_digests(given.chunks.joined(given.bases.take(has_base)))

        def finish() -> Examined:
            found, base_digests = wait(), np.zeros((count, 16), np.uint8)
            base_digests[has_base] = found[count:]
            return Examined(found[:count], base_digests, np.zeros(count, np.uint8))

        return finish

    def start_encode(self, batch: EncodeBatch) -> Callable[[], Sequence[Encoded]]:
        """Begin to encode a batch on a stream of the pool."""
        if not len(batch.chunks):
            return lambda: []
        if _any_on_host(batch.chunks) or _any_on_host(batch.bases):
            return self._cpu.start_encode(_batch_on_host(batch))
        task = self._pool.start(lambda work: Encoding(self.coders, work, batch, self.batch_bytes).run())

        def finish() -> Sequence[Encoded]:
            count = len(batch.chunks)
            try:
                return [task.result()]
            except torch.OutOfMemoryError:
                self._shrink(f"a batch of {count} chunks")
            if count == 1:
                return self._cpu.start_encode(_batch_on_host(batch))()
            halves = np.arange(count // 2), np.arange(count // 2, count)
            return [encoded for rows in halves for encoded in self.start_encode(batch.take(rows))()]

        return finish

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Recycle host buffers in the CPU engine; device memory is freed with the blobs."""
        self._cpu.recycle(encoded)

    # -- decode

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch on a stream of the pool."""
        count = len(batch.counts)
        if not count:
            return lambda: None
        if _any_on_host(batch.outs) or (batch.bases is not None and _any_on_host(batch.bases)):
            return self._decode_on_host(batch)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))  # which may still use the memory of the outs

        def steps(work: WorkStream) -> Generator[None, None, Column]:
            work.stream.wait_event(ready)
            return _while_open(batch.gate, Decoding(work, batch, self.digest_seed).run())

        task = self._pool.start(steps)

        def finish() -> None:
            try:
                fallback = task.result()
                if len(fallback):
                    self._decode_on_host(_decode_rows(batch, fallback))()
                return
            except torch.OutOfMemoryError:
                self._shrink(f"a batch of {count} chunks")
            if count == 1:
                self._decode_on_host(batch)()
                return
            for rows in (np.arange(count // 2), np.arange(count // 2, count)):
                self.start_decode(_decode_rows(batch, rows))()

        return finish

    def _decode_on_host(self, batch: DecodeBatch) -> Callable[[], object]:
        """Rebuild chunks on the CPU, then copy them to their memory."""
        outs = [np.empty(n, np.uint8) for n in batch.outs.lengths.tolist()]
        bases = None if batch.bases is None else _all_on_host(batch.bases)
        wait = self._cpu.start_decode(replace(batch, outs=Chunks.of(outs), bases=bases))

        def finish() -> None:
            wait()
            for view, out in zip(batch.outs.views(), outs, strict=True):
                if isinstance(view, np.ndarray):
                    view[:] = out
                else:
                    view.copy_(torch.from_numpy(out))
            self.sync()

        return finish


def _while_open(gate: Gate, run: Generator[None, None, Column]) -> Generator[None, None, Column]:
    """Run the stages of a batch while its gate is open; nobody waits for the result of a closed one."""
    while not gate.is_closed:
        try:
            next(run)
        except StopIteration as stop:
            return np.asarray(stop.value)
        yield
    return np.empty(0, np.int64)


def _address_of(memory: Memory) -> int:
    address: int = memory.array.ctypes.data if isinstance(memory, Pinned) else memory.data_ptr()
    return address


def _any_on_host(chunks: Chunks) -> bool:
    on_host = [i for i, memory in enumerate(chunks.memories) if isinstance(memory, np.ndarray)]
    return bool(on_host) and bool(np.isin(chunks.which, on_host).any())


def _all_on_host(chunks: Chunks) -> Chunks:
    """Return the chunks in host memory, copied if on the device."""
    copies = []
    for which, start, length in zip(
        chunks.which.tolist(), chunks.starts.tolist(), chunks.lengths.tolist(), strict=True
    ):
        memory = chunks.memories[which] if which >= 0 else np.empty(0, np.uint8)
        span = (memory.array if isinstance(memory, Pinned) else memory)[start : start + length]
        copies.append(span if isinstance(span, np.ndarray) else span.cpu().numpy())
    which = np.where(chunks.which >= 0, np.arange(len(chunks)), -1)
    return Chunks(copies, which, np.zeros(len(chunks), np.int64), chunks.lengths)


def _batch_on_host(batch: EncodeBatch) -> EncodeBatch:
    return replace(batch, chunks=_all_on_host(batch.chunks), bases=_all_on_host(batch.bases))


def _decode_rows(batch: DecodeBatch, rows: Column) -> DecodeBatch:
    chunk_of = np.repeat(np.arange(len(batch.counts)), batch.counts)
    refs = np.flatnonzero(np.isin(chunk_of, rows))
    bases = None if batch.bases is None else batch.bases.take(rows)
    return replace(
        batch,
        offsets=batch.offsets[refs],
        lengths=batch.lengths[refs],
        counts=batch.counts[rows],
        digests=batch.digests[rows],
        outs=batch.outs.take(rows),
        where=lambda i: batch.where(int(refs[i])),
        bases=bases,
    )
