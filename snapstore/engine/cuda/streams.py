"""Streams: CUDA streams with the memory that batches work in, and a pool of them.

A WorkStream belongs to one thread at a time. Its launches run in order; its memory is reused only on its own stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
import torch

from ...arrays import Column
from ...errors import InvalidInputError
from ...state.values.tensors import is_whole
from ..batches import Chunks
from . import kernels

#: Sizes of large device memory are rounded up to a multiple of the largest of these: this, somewhat more than a quarter
#: of a batch, and an eighth to a sixteenth of the size. So freed memory fits the next request [bytes].
STEP_BYTES = 2 * 1024 * 1024
#: The back-off of a thread that polls the device [s]: first, and at most. It doubles each time.
POLL_S, MAX_POLL_S = 20e-6, 250e-6

BatchSteps = Callable[["WorkStream"], Generator[None, None, Any]]


class WorkStream:
    """One CUDA stream, its memory, and the tables of its kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.batch_bytes = 0  # plain bytes of a full batch; 0: not known
        self._tables: list[torch.Tensor] = []  # launched kernels may still read them
        self._rooms: dict[str, torch.Tensor] = {}

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return new (nbytes,) uint8 on the device, for use on this stream."""
        return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)

    def room(self, name: str, nbytes: int) -> torch.Tensor:
        """Return at least `nbytes` that every batch needs; the next call with this name reuses it."""
        if name not in self._rooms or len(self._rooms[name]) < nbytes:
            self._rooms.pop(name, None)
            if nbytes > self.batch_bytes // 4:  # else the memory of a small batch would fit no later one
                nbytes = max(nbytes, self.batch_bytes)
            self._rooms[name] = self.large(nbytes)
        return self._rooms[name]

    def large(self, nbytes: int) -> torch.Tensor:
        """Return new memory, at least `nbytes` (`round_up`)."""
        return self.empty(round_up(nbytes, self.batch_bytes))

    def upload(self, *columns: Column) -> list[int]:
        """Copy columns to the device in one transfer; return addresses, valid until `release_tables`."""
        sizes = [-(-column.nbytes // 16) * 16 for column in columns]
        host = torch.empty(max(sum(sizes), 1), dtype=torch.uint8, device="cpu", pin_memory=True)
        view, at, offsets = host.numpy(), 0, []
        for column, size in zip(columns, sizes, strict=True):
            view[at : at + column.nbytes] = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
            offsets.append(at)
            at += size
        table = host.to(self.device, non_blocking=True)
        self._tables.append(table)
        return [table.data_ptr() + offset for offset in offsets]

    def launch(self, name: str, grid: tuple[int, ...], *arguments: int | torch.Tensor) -> None:
        """Enqueue a kernel (kernels.py)."""
        addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        if all(grid):
            kernels.launch(name, grid, self.stream, addresses)

    def gather(self, sources: Column, destinations: Column, lengths: Column) -> None:
        """Begin to copy spans of device memory, addresses (n,) to addresses (n,)."""
        pieces = -(-lengths // kernels.PIECE_BYTES)
        which, within = ragged(pieces)
        if not len(which):
            return
        at = within * kernels.PIECE_BYTES
        tables = self.upload(
            (sources[which] + at).astype(np.uint64),
            (destinations[which] + at).astype(np.uint64),
            np.minimum(lengths[which] - at, kernels.PIECE_BYTES).astype(np.uint64),
        )
        self.launch("gather", (len(which),), *tables)

    def digests(self, addresses: Column, lengths: Column, seed: int) -> torch.Tensor:
        """Begin to hash spans of device memory: XXH3-128 under a seed, (n, 16) uint8."""
        return self._hash(addresses, lengths, kernels.XXH3_128, 16, seed)

    def checksums(self, addresses: Column, lengths: Column) -> torch.Tensor:
        """Begin to take the XXH3-64 of spans of device memory: (n, 8) uint8."""
        return self._hash(addresses, lengths, kernels.XXH3_64, 8)

    def seal(self, addresses: Column, lengths: Column) -> None:
        """Begin to write the XXH3-64 of spans of device memory into the 8 bytes before each."""
        self._hash(addresses, lengths, kernels.SEAL, 0)

    def _hash(self, addresses: Column, lengths: Column, what: int, size: int, seed: int = 0) -> torch.Tensor:
        out = self.empty(size * len(addresses))
        tables = self.upload(addresses.astype(np.uint64), lengths.astype(np.uint64))
        self.launch("digest", (len(addresses),), *tables, out, what, seed)
        return out[: size * len(addresses)].view(len(addresses), size)

    def fetch(self, memory: torch.Tensor) -> torch.Tensor:
        """Begin to copy a little device memory to new pinned memory, valid once the stream is done."""
        host = torch.empty(memory.shape, dtype=memory.dtype, device="cpu", pin_memory=True)
        self._tables.append(memory)
        self.launch("fetch", (-(-memory.nbytes // kernels.PIECE_BYTES),), memory, host, memory.nbytes)
        return host

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make its device and stream the current ones."""
        with torch.cuda.device(self.device.index), torch.cuda.stream(self.stream):
            yield

    def sync(self) -> None:
        """Wait until everything launched is done."""
        self.stream.synchronize()
        self.release_tables()

    def release_tables(self) -> None:
        """Release the tables of finished kernels."""
        self._tables.clear()

    def release_memory(self) -> None:
        """Release all device memory."""
        with self.current():
            self.sync()
            self._rooms.clear()


class Task:
    """One batch: it waits for a stream, then runs on it.

    An interrupt (Ctrl-C) strikes the thread that polls, which may wait for another batch. It is raised there, and the
    batch that was advanced begins again at the next poll.
    """

    def __init__(self, pool: StreamPool, steps: BatchSteps, streams: Sequence[WorkStream]) -> None:
        self._pool = pool
        self.streams = streams  # it runs on one of these
        self.steps: BatchSteps | None = steps
        self.work: WorkStream | None = None  # None: it waits
        self.run: Generator[None, None, Any] | None = None
        self.event: torch.cuda.Event | None = None  # done when the device has reached the last yield; None: begin
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None

    def result(self) -> Any:
        """Return its steps' result; advance all batches of the device until then."""
        self._pool.poll_until(lambda: self.done)
        if self.error is not None:
            raise self.error
        return self.value

    def advance(self) -> None:
        """Run the host's part up to the next yield."""
        assert self.work is not None
        try:
            with self.work.current():
                if self.event is None:
                    assert self.steps is not None
                    self.run = self.steps(self.work)
                assert self.run is not None
                next(self.run)
                event = torch.cuda.Event()
                event.record(self.work.stream)
            self.event = event
            return
        except StopIteration as stop:
            self.value, self.done = stop.value, True
        except BaseException as error:
            self.event = None
            with suppress(Exception):  # a failed device raises the same error at every call
                self.work.sync()
            if not isinstance(error, Exception):
                raise
            # raised in `result`; a new exception has no frames that hold device memory
            found = torch.OutOfMemoryError(str(error)) if is_out_of_memory(error) else error
            self.error, self.done = found, True
        self.run = self.steps = None
        self.work.release_tables()


class StreamPool:
    """A few streams of one device, and the batches that take turns on them.

    Batches are generators that yield where the host must wait for the device. A thread that waits for one batch
    advances them all: with a thread per batch, each would wait for the interpreter's lock (docs/design/gpu-engine.md).

    An interrupt between any two steps of Python code loses no batch and no stream.

    Attributes:
        at_once: how many batches may run at a time, besides the fast ones; at most as many as there are streams.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams = [WorkStream(device) for _ in range(count)]
        self.at_once = count
        self._fast_streams = [WorkStream(device)]  # for short batches, which wait for no long one
        self._device = device
        self._waiting: deque[Task] = deque()
        self._running: list[Task] = []
        self._lock = threading.RLock()

    def start(self, steps: BatchSteps, *, fast: bool = False) -> Task:
        """Begin a batch as soon as a stream is free."""
        task = Task(self, steps, self._fast_streams if fast else self._streams)
        try:
            with self._lock:
                self._waiting.append(task)
                self.poll()
        except BaseException:  # nobody will wait for it, and its memory may be used for other things
            with self._lock, suppress(ValueError):
                self._waiting.remove(task)
            self.poll_until(lambda: task not in self._running)
            raise
        return task

    def poll_until(self, condition: Callable[[], bool]) -> None:
        """Advance batches until a condition holds.

        Each poll takes the interpreter's lock from the training, so the pauses grow while no batch can go on.
        """
        pause_s = POLL_S
        while not condition():
            if self.poll():
                pause_s = POLL_S
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_POLL_S)

    def poll(self) -> bool:
        """Advance the batches that can go on, without waiting; return whether there were any."""
        with self._lock, torch.cuda.device(self._device.index):  # else this thread would create a context on device 0
            return self._poll()

    def _poll(self) -> bool:
        """Advance every batch whose event is done; begin waiting batches while streams are free, up to `at_once`."""
        ready = [task for task in self._running if task.done or task.event is None or task.event.query()]
        for task in ready:
            self._advance(task)
        begun = False
        for task in list(self._waiting):
            if task.work is not None:  # an interrupt came when it had just begun
                self._waiting.remove(task)
            elif (work := self._stream_for(task)) is not None:
                task.work = work
                self._running.append(task)
                self._waiting.remove(task)
                self._advance(task)
                begun = True
        return bool(ready) or begun

    def _stream_for(self, task: Task) -> WorkStream | None:
        """Return a free stream for a batch; None if there is none, or it is not fast and `at_once` others run."""
        if task.streams is self._streams and sum(t.streams is self._streams for t in self._running) >= self.at_once:
            return None
        return next(filter(self._is_free, task.streams), None)

    def _is_free(self, work: WorkStream) -> bool:
        return all(task.work is not work for task in self._running)

    def _advance(self, task: Task) -> None:
        if not task.done:
            task.advance()
        if task.done:
            self._running.remove(task)

    def release_memory(self) -> None:
        """Release the device memory of the free streams."""
        with self._lock:
            for work in filter(self._is_free, (*self._streams, *self._fast_streams)):
                work.release_memory()


def round_up(nbytes: int, batch_bytes: int) -> int:
    """Round a size up, so that freed memory fits the next request (see STEP_BYTES)."""
    if nbytes < STEP_BYTES:
        return nbytes
    quarter = batch_bytes // 4 + batch_bytes // 64 if nbytes > batch_bytes // 16 else 0  # more than the planes need
    return nbytes + -nbytes % max(STEP_BYTES, quarter, 1 << (nbytes.bit_length() - 4))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch, of CUDA beneath it, or of CuPy means that the device is full."""
    if type(error).__name__ in ("CUDARuntimeError", "CUDADriverError"):
        return getattr(error, "status", None) == 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY
    # torch.AcceleratorError (torch 2.8 and newer) is a RuntimeError
    beneath = isinstance(error, RuntimeError) and str(error).startswith("CUDA error: out of memory")
    return beneath or isinstance(error, torch.OutOfMemoryError)


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Turn every error that means a full device into a torch.OutOfMemoryError."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def release_cached_memory(device: torch.device) -> None:
    """Free the cache of torch's allocator; it does nothing while any thread captures a graph."""
    with torch.cuda.device(device), suppress(RuntimeError):
        torch.cuda.empty_cache()


def copy_async(destination: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
    """Enqueue a copy from address to address, host or device; host memory should be page-locked."""
    cupy.cuda.runtime.memcpyAsync(destination, source, nbytes, cupy.cuda.runtime.memcpyDefault, stream.cuda_stream)


_copy_streams: dict[int, torch.cuda.Stream] = {}


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's stream for copies of blobs."""
    if device.index not in _copy_streams:
        _copy_streams[device.index] = torch.cuda.Stream(device)
    return _copy_streams[device.index]


def ragged(counts: Column) -> tuple[Column, Column]:
    """Expand counts per owner into (owner, position) of each piece: (2, 0, 1) gives (0, 0, 2) and (0, 1, 0)."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


def addresses_of(chunks: Chunks) -> npt.NDArray[np.uint64]:
    """Return device addresses of chunks, (n,) uint64; 0: no chunk.

    Raises:
        InvalidInputError: the memory of a chunk was freed; a kernel that reads it would end the process's CUDA work.
    """
    bases = np.array([m.data_ptr() if isinstance(m, torch.Tensor) else 0 for m in chunks.memories] or [0], np.int64)
    used = np.zeros(len(chunks.memories), bool)
    used[chunks.which[(chunks.which >= 0) & (chunks.lengths > 0)]] = True
    read = [m for m, is_used in zip(chunks.memories, used.tolist(), strict=True) if is_used]
    if not all(is_whole(m) for m in read if isinstance(m, torch.Tensor)):
        raise InvalidInputError("a tensor's memory was freed while it was saved; nothing was committed; save again")
    return np.where(chunks.which >= 0, bases[chunks.which] + chunks.starts, 0).astype(np.uint64)
