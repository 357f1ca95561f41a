"""CudaEngine: batches of chunks to blobs and back on one CUDA device, in the format of the CPU engine.

The stages of a batch are in encoding.py and decoding.py. What is per chunk runs on the device; the host sees columns.
Each batch has a lane (a stream and memory) of its own, so that the device computes one while the host looks at
another's sizes. A batch that does not fit into device memory is halved; what does not fit alone goes to the CPU engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch

from ...arrays import Bytes, Column
from ...errors import InvalidInputError
from ...format import blob
from ...format.pack import Encoded
from ...state.arrays import Memory
from ..base import Chunks, DecodeBatch, EncodeBatch
from ..cpu import CpuEngine
from .decoding import Decoding
from .encoding import Encoding
from .huffman import HUFFMAN
from .nvcomp import ANS, DEFLATE_MATCHES, ZSTD, ZSTD_BYTES, Coder
from .staging import Pinned
from .streams import ALIGNMENT, Lane, Lanes, PinnedBuffers, addresses_of, copy_async, let_go, out_of_memory

log = logging.getLogger("snapstore")

#: Batches that are encoded or decoded at a time, and their size: codecs need a thousand blocks to fill the device.
LANES = 3
BATCH_BYTES = 192 * 1024 * 1024
MIN_BATCH_BYTES = 8 * 1024 * 1024
#: Compressed blocks have rooms of 145 KiB however small they are: so many plain bytes of a batch count for one chunk.
MIN_BYTES_PER_CHUNK = 256 * 1024
#: Device memory that a save works in, as a multiple of a batch: planes, compressed blocks, blobs and nvCOMP's own.
WORK_PER_BATCH_BYTE = 20
#: Stored and plain bytes of a batch to decode: every batch costs the host milliseconds, however small it is.
DECODE_BYTES = 512 * 1024 * 1024
#: Buffers for reading are made in multiples of this, so that one fits the next batch as well.
BUFFER_BYTES, SMALL_BUFFER_BYTES = 32 * 1024 * 1024, 4 * 1024 * 1024
#: Threads that read packs. More read faster alone, but take the cores from the one that drives the device.
READERS = 8
#: Pinned host memory kept for the next save or restore.
PINNED_BYTES = 1280 * 1024 * 1024

_PORTABLE = {blob.SKEWED: HUFFMAN, blob.RUNS: DEFLATE_MATCHES, blob.REPEATS: DEFLATE_MATCHES}
#: Where there is room for it, in each lane.
_PORTABLE_WITH_ZSTD = {blob.SKEWED: HUFFMAN, blob.RUNS: ZSTD, blob.REPEATS: ZSTD}
_ANS = {blob.SKEWED: ANS, blob.RUNS: ANS, blob.REPEATS: ANS}


class CudaEngine:
    """One CUDA device. See `engine.Engine` for the methods, which all take columns.

    Memories are torch.uint8 tensors on the device, `Pinned` host memory (uploaded when used), or, after the device ran
    out of memory, NumPy arrays: then the CPU engine does the work.
    """

    decode_bytes = DECODE_BYTES
    depth = LANES - 1
    decode_depth = LANES - 1
    readers = READERS

    def __init__(self, device: int, codec: str, cpu: CpuEngine) -> None:
        self.device = torch.device("cuda", device)
        self.digest_seed = cpu.digest_seed
        self.batch_bytes = BATCH_BYTES
        self._limits: dict[object, int] = {}  # of the saves that run
        self._codec = codec
        self._with_zstd = self._warned = False
        self._cpu = cpu
        self._lanes = Lanes(self.device, LANES)
        self._front = Lane(self.device)  # uploads and digests, at once
        self._front_lock = threading.Lock()
        self._pinned = PinnedBuffers(PINNED_BYTES)

    # -- memory

    def settle(self) -> None:
        """Wait for what is pending on the caller's current stream: other streams may then use its tensors.

        Raises:
            InvalidInputError: a CUDA graph is being captured, which a wait would ruin.
        """
        if torch.cuda.is_current_stream_capturing():
            raise InvalidInputError("a save or restore while a CUDA graph is being captured; call it between replays")
        torch.cuda.current_stream(self.device).synchronize()

    def moved(self, plain: Bytes) -> Memory:
        """Bytes of the host in memory of this device."""
        memory = self.empty(plain.size)
        memory.copy_(torch.from_numpy(plain))
        self.settle()
        return memory

    @contextmanager
    def _at_front(self) -> Iterator[Lane]:
        with out_of_memory(), self._front_lock, self._front.current():
            try:
                yield self._front
            finally:
                self._front.sync()

    def drive(self) -> None:
        """Let batches go on that the device is done with for now."""
        self._lanes.pump()

    def empty(self, nbytes: int) -> Memory:
        """(nbytes,) uint8 on the device; in host memory where that is full."""
        try:
            with self._at_front() as lane:
                return lane.empty(nbytes)[:nbytes]
        except torch.OutOfMemoryError:
            self._shrink("a buffer")
            return np.empty(nbytes, np.uint8)

    def buffer(self, nbytes: int) -> Bytes:
        """(nbytes,) uint8 or more of pinned host memory."""
        nbytes += -nbytes % (BUFFER_BYTES if nbytes > 2 * BUFFER_BYTES else SMALL_BUFFER_BYTES)
        with torch.cuda.device(self.device):
            return self._pinned.take(nbytes)

    def give_back(self, buffer: Bytes) -> None:
        """Keep a pinned buffer for the next time."""
        self._pinned.give(buffer)

    def rest(self, *, saved: bool = False) -> None:
        """Keep no device memory between saves; `saved`: one is over, and the next may try whole batches again."""
        self._lanes.rest()
        if saved:
            self._warned = False
            self._set_batches()

    def close(self) -> None:
        """Give threads and memory back."""
        with suppress(Exception):  # a device that has failed holds no memory of ours any more
            self.rest()
        self._pinned.clear()

    @property
    def batch_chunks(self) -> int:
        """How many chunks one batch should hold at most."""
        return max(256, self.batch_bytes // MIN_BYTES_PER_CHUNK)

    @property
    def coders(self) -> dict[int, Coder]:
        """How planes are coded, by what their histograms say."""
        if self._codec == "ans":
            return _ANS
        return _PORTABLE_WITH_ZSTD if self._with_zstd else _PORTABLE

    def limit(self, saver: object, work_bytes: int | None) -> None:
        """Let a save take about this much device memory for its work; None: it is over. Of several the least counts."""
        if work_bytes is None:
            self._limits.pop(saver, None)
        else:
            self._limits[saver] = work_bytes
        self._set_batches()

    def _set_batches(self) -> None:
        """As large as the running saves let them be, whatever memory ran out meanwhile."""
        least = min(list(self._limits.values()), default=None)
        self._with_zstd = least is not None and least >= WORK_PER_BATCH_BYTE * BATCH_BYTES + LANES * ZSTD_BYTES
        work_bytes = WORK_PER_BATCH_BYTE * BATCH_BYTES if least is None else least
        self.batch_bytes = int(min(BATCH_BYTES, max(MIN_BATCH_BYTES, work_bytes // WORK_PER_BATCH_BYTE)))

    def _shrink(self, what: str) -> None:
        self.batch_bytes = max(MIN_BATCH_BYTES, self.batch_bytes // 2)
        if not self._warned:
            text = "cuda:%d: out of memory for %s; going on with smaller batches, or in host memory"
            log.warning(text, self.device.index, what)
        self._warned = True
        self._lanes.rest()
        let_go(self.device)

    # -- chunks in

    def load(self, chunks: Chunks, *, copy: bool = False) -> Chunks:
        """Pinned chunks as device memory; the others as they are, or all in memory of ours (`copy`)."""
        moved = [i for i, memory in enumerate(chunks.memories) if copy or isinstance(memory, Pinned)]
        used = np.isin(chunks.which, moved)
        if not used.any():
            return chunks
        try:
            return self._upload(chunks, np.flatnonzero(used))
        except torch.OutOfMemoryError:
            self._shrink("an upload")
            if copy:
                return _all_on_host(chunks)
            memories = [memory.array if isinstance(memory, Pinned) else memory for memory in chunks.memories]
            return Chunks(memories, chunks.which, chunks.starts, chunks.lengths)

    def _upload(self, chunks: Chunks, rows: Column) -> Chunks:
        which, starts, lengths = chunks.which[rows], chunks.starts[rows], chunks.lengths[rows]
        rooms = (lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        places = np.cumsum(rooms) - rooms
        with self._at_front() as lane:
            memory = lane.empty(int(places[-1] + rooms[-1]))
            # neighbours in one memory, and aligned in both, go in one copy
            joined = (which[1:] == which[:-1]) & (starts[1:] == starts[:-1] + rooms[:-1]) & (rooms == lengths)[:-1]
            first = np.flatnonzero(np.concatenate([[True], ~joined]))
            last = np.concatenate([first[1:], [len(rows)]]) - 1
            for i, j in zip(first.tolist(), last.tolist(), strict=True):
                source = _address_of(chunks.memories[which[i]]) + int(starts[i])
                size = int(starts[j] + lengths[j] - starts[i])
                copy_async(memory.data_ptr() + int(places[i]), source, size, lane.stream)
        moved = Chunks([*chunks.memories, memory], chunks.which.copy(), chunks.starts.copy(), chunks.lengths)
        moved.which[rows], moved.starts[rows] = len(chunks.memories), places
        return moved

    def start_digests(self, chunks: Chunks) -> Callable[[], Bytes]:
        """Begin to hash every chunk: XXH3-128 under the seed, (n, 16)."""
        if not len(chunks) or _any_on_host(chunks):
            return self._cpu.start_digests(_all_on_host(chunks))

        def steps(lane: Lane) -> Generator[None, None, Bytes]:
            found = lane.fetch(lane.digests(addresses_of(chunks), chunks.lengths, self.digest_seed))
            yield
            digests: Bytes = found.numpy()
            return digests

        task = self._lanes.start(steps, fast=True)

        def finish() -> Bytes:
            try:
                digests: Bytes = task.result()
                return digests
            except torch.OutOfMemoryError:
                self._shrink("digests")
                return self._cpu.start_digests(_all_on_host(chunks))()

        return finish

    # -- encode

    def start_encode(self, batch: EncodeBatch) -> Callable[[], Sequence[Encoded]]:
        """Begin to encode a batch on a lane."""
        if not len(batch.chunks):
            return lambda: []
        if _any_on_host(batch.chunks) or _any_on_host(batch.bases):
            return self._cpu.start_encode(_batch_on_host(batch))
        task = self._lanes.start(lambda lane: Encoding(self.coders, lane, batch).run())

        def finish() -> Sequence[Encoded]:
            count = len(batch.chunks)
            try:
                return [task.result()]
            except torch.OutOfMemoryError:
                self._shrink(f"a batch of {count} chunks")
            if count == 1:
                return self._cpu.start_encode(_batch_on_host(batch))()
            halves = np.arange(count // 2), np.arange(count // 2, count)
            return [encoded for rows in halves for encoded in self.start_encode(_rows_of(batch, rows))()]

        return finish

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Blobs on the device go with their objects."""
        self._cpu.recycle(encoded)

    # -- decode

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch on a lane."""
        count = len(batch.counts)
        if not count:
            return lambda: None
        if _any_on_host(batch.outs) or (batch.bases is not None and _any_on_host(batch.bases)):
            return self._decode_on_host(batch)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))  # the outs may have been made, and used, there

        def steps(lane: Lane) -> Generator[None, None, Column]:
            lane.stream.wait_event(ready)
            return Decoding(lane, batch, self.digest_seed).run()

        task = self._lanes.start(steps)

        def finish() -> None:
            try:
                odd = task.result()
                if len(odd):
                    self._decode_on_host(_decode_rows(batch, odd))()
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
        """Rebuild chunks on the CPU, and copy those up that belong on the device."""
        outs = [np.empty(n, np.uint8) for n in batch.outs.lengths.tolist()]
        bases = None if batch.bases is None else _all_on_host(batch.bases)
        wait = self._cpu.start_decode(
            DecodeBatch(batch.stored, batch.offsets, batch.lengths, batch.counts, batch.digests, Chunks.of(outs),
                        batch.where, bases)
        )  # fmt: skip

        def finish() -> None:
            wait()
            for view, out in zip(batch.outs.views(), outs, strict=True):
                if isinstance(view, np.ndarray):
                    view[:] = out
                else:
                    view.copy_(torch.from_numpy(out))
            self.settle()

        return finish


def _address_of(memory: Memory) -> int:
    address: int = memory.array.ctypes.data if isinstance(memory, Pinned) else memory.data_ptr()
    return address


def _any_on_host(chunks: Chunks) -> bool:
    used = set(np.unique(chunks.which).tolist()) - {-1}
    return any(isinstance(chunks.memories[i], np.ndarray) for i in used)


def _all_on_host(chunks: Chunks) -> Chunks:
    """The same chunks in host memory, each copied by itself."""
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
    return EncodeBatch(
        _all_on_host(batch.chunks), batch.digests, batch.element_sizes, batch.layouts, _all_on_host(batch.bases),
        batch.base_digests, batch.base_chain_bytes,
    )  # fmt: skip


def _rows_of(batch: EncodeBatch, rows: Column) -> EncodeBatch:
    return EncodeBatch(
        batch.chunks.take(rows), batch.digests[rows], batch.element_sizes[rows], batch.layouts[rows],
        batch.bases.take(rows), batch.base_digests[rows], batch.base_chain_bytes[rows],
    )  # fmt: skip


def _decode_rows(batch: DecodeBatch, rows: Column) -> DecodeBatch:
    chunk_of = np.repeat(np.arange(len(batch.counts)), batch.counts)
    refs = np.flatnonzero(np.isin(chunk_of, rows))
    bases = None if batch.bases is None else batch.bases.take(rows)
    return DecodeBatch(
        batch.stored, batch.offsets[refs], batch.lengths[refs], batch.counts[rows], batch.digests[rows],
        batch.outs.take(rows), lambda i: batch.where(int(refs[i])), bases,
    )  # fmt: skip
