"""Spans: the jobs of the extension `_native`. The threads of an engine run a job together, without the GIL.

In: batches of chunks as columns, with their bytes in host memory. Out: digests, blobs, rebuilt chunks; and which rows
the extension leaves to the reference in NumPy: planes with repeats, other codecs, some sparse deltas, and all damage.
So every error is the reference's. The choices are equal too, bit for bit (native/choice.c). Only between a sparse delta
and planes of nearly the same size, which are compared as stored, may they differ.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..arrays import Bytes, Column, sums_before
from ..errors import CapabilityError, InvalidInputError
from ..format.blobs import blob, codecs, planes
from ..threads import MAX_RUNS, Gate, Threads
from .batches import Chunks, DecodeBatch, EncodeBatch, Examination, Examined, MadeBlobs

_native: Any
try:
    from . import _native
except ImportError:  # installed without a compiler
    _native = None

#: Chunks as the extension takes them: memories, which, starts, lengths; see Chunks.
Place = tuple[Sequence[Any], Column, Column, Column]
#: Shorter copies of blobs take less time than a thread to begin them while others wait [bytes].
COPIED_AT_ONCE_BYTES = 1024 * 1024
#: The bytes that a span needs behind its blobs.
ROOM_BYTES = 4096
#: Who has waited so long for a job takes its spans, if any are left [s].
PATIENCE_S = 1.0
#: Scratch memory of a thread, until a job needs more [bytes].
SCRATCH_BYTES = 1024 * 1024
#: Memory for jobs that need no scratch memory.
NO_SCRATCH = np.empty(64, np.uint8)
#: A span has at least this many bytes, if there are as many.
SPAN_BYTES = 512 * 1024
#: At most about this many spans for each thread, so that threads end at about the same time.
SPANS_PER_THREAD = 4


def extension() -> Any:
    """Return the extension; None if it is not there, or SNAPSTORE_ENGINE=numpy.

    Raises:
        CapabilityError: SNAPSTORE_ENGINE=native, and it is not there.
        InvalidInputError: the variable has another value.
    """
    wanted = os.environ.get("SNAPSTORE_ENGINE", "")
    if wanted not in ("", "native", "numpy"):
        raise InvalidInputError(f"SNAPSTORE_ENGINE={wanted!r}: expected 'native' or 'numpy'")
    if wanted == "native" and _native is None:
        raise CapabilityError(
            "SNAPSTORE_ENGINE=native: the extension is missing; install a C compiler, then snapstore again"
        )
    return None if wanted == "numpy" else _native


def engine_in_use() -> str:
    """Return which code the CPU engine runs, and why, for people.

    Raises:
        CapabilityError, InvalidInputError: see `extension`.
    """
    if extension() is not None:
        return "C with AVX2" if _native.uses_avx2() else "C"
    if _native is not None:
        return "NumPy, since SNAPSTORE_ENGINE=numpy"
    return "NumPy: the extension in C is missing; install a C compiler, then snapstore again"


def cut(lengths: Column, threads: int) -> Column:
    """Cut chunks of these lengths [bytes] into spans; return the first chunk of each, and behind them their number."""
    ends = sums_before(lengths)
    span_bytes = max(SPAN_BYTES, -(-int(ends[-1]) // (threads * SPANS_PER_THREAD)))
    of_span = ends[:-1] // span_bytes  # by where a chunk begins
    firsts: Column = np.append(np.flatnonzero(np.diff(of_span, prepend=-1)), len(lengths)).astype(np.int64)
    return firsts


def place(chunks: Chunks) -> Place:
    """Return chunks as the extension takes them."""
    which, starts, lengths = (np.ascontiguousarray(c, np.int64) for c in (chunks.which, chunks.starts, chunks.lengths))
    return chunks.memories, which, starts, lengths


class SharedJob:
    """Spans of chunks, which threads take one after the other; see _native.pyi. It keeps their memory alive.

    Args:
        queue: of its threads.
        made: what the extension returned: the job, the bytes of scratch memory that it needs, and its number.
        gate: of the memory of the chunks, the one that the extension has got.
    """

    def __init__(self, queue: JobQueue, made: tuple[Any, int, int], firsts: Column, gate: Gate | None = None) -> None:
        self._queue, self._firsts, self._gate = queue, firsts, gate
        self.handle, self.scratch_bytes, self.number = made
        self._look: Callable[[int, int], object] | None = None
        self.done = threading.Event()
        self.in_queue: Any = None  # the queue of the extension must live as long as the job
        self._error: Exception | None = None
        if len(firsts) == 1:
            self.done.set()

    @property
    def spans(self) -> int:
        """Return how many spans it has."""
        return len(self._firsts) - 1

    def start(self, look: Callable[[int, int], object] | None = None, *, urgent: bool = False) -> SharedJob:
        """Begin to run it on the threads; return it, a call that waits.

        Args:
            look: called with the first and the last chunk, plus one, of spans that Python must look at.
            urgent: before the jobs that wait already.
        """
        self._look = look
        if self.spans:
            self._queue.start(self, urgent=urgent)
        return self

    def run(self) -> None:
        """Take spans in this thread until none is left."""
        native = self._queue.native
        while native.spans_left(self.handle) > 0:  # a thread that comes too late needs no memory
            if not self.scratch_bytes:
                ends = native.run(self.handle, NO_SCRATCH, self.look_at)
            else:
                with planes.scratch.borrowed():
                    ends = native.run(self.handle, planes.scratch.room("native", self.scratch_bytes), self.look_at)
            if ends:
                self.end()

    def help(self) -> None:
        """Take spans too, since the threads may have other work first; then wait for it."""
        with suppress(MemoryError):
            self.run()
        self()

    def look_at(self, span: int) -> None:
        """Look at a span; an exception is raised in the end, but the one of a signal handler at once."""
        if self._look is None:
            return
        try:
            self._look(int(self._firsts[span]), int(self._firsts[span + 1]))
        except Exception as error:  # noqa: BLE001  raised by `__call__`
            self._error = self._error or error

    def look_guarded(self, span: int) -> None:
        """Look at a span in a thread of the pool, if its memory may be used."""
        (self.look_at if self._gate is None else self._gate.guarded(self.look_at))(span)

    def end(self) -> None:
        """Note that all spans are done."""
        self._queue.forget(self)
        self._look = None  # it holds memory that nothing needs any more
        self.done.set()

    def __call__(self) -> None:
        """Wait until all spans are done; raise an exception of `look`. Then nothing uses the memory any more.

        Raises:
            MemoryError: there is no memory for the work.
        """
        native = self._queue.native
        while not self.done.wait(PATIENCE_S):
            try:
                self.run()  # the threads may have died, or have no memory
            except MemoryError:
                if native.withdraw(self.handle):
                    raise
            if not native.spans_undone(self.handle):  # an interrupt has struck before `end`
                self.end()
        if self._error is not None:
            raise self._error


class JobQueue:
    """Jobs that the threads of a pool run, the first one first. A thread that has taken one goes from job to job."""

    def __init__(self, native: Any, threads: Threads) -> None:
        self.native, self.threads = native, threads
        self._begin()

    def _begin(self) -> None:
        self._queue, self._pid, self._lock = self.native.queue(), os.getpid(), threading.Lock()
        self._jobs: dict[int, SharedJob] = {}  # by number, until they are done
        self._serving: set[object] = set()  # a token of each thread that serves the queue, or soon will

    def start(self, job: SharedJob, *, urgent: bool) -> None:
        """Add a job.

        Raises:
            CapabilityError: not one thread can be started.
        """
        if self._pid != os.getpid():  # a fork has left the threads behind
            self._begin()
        for other in list(self._jobs.values()):  # an interrupt has struck before `end`
            if not self.native.spans_undone(other.handle):
                other.end()
        tokens: list[object] = []
        try:
            job.in_queue, self._jobs[job.number] = self._queue, job
            if not self.native.push(self._queue, job.handle, urgent):  # there are many already
                job.run()
                return
            with self._lock:
                tokens = [object() for _ in range(min(self.threads.count - len(self._serving), job.spans))]
                self._serving.update(tokens)
            for first in range(0, len(tokens), MAX_RUNS):
                self.threads.start(self._serve, tokens[first : first + MAX_RUNS])
        except BaseException:
            self._serving.difference_update(tokens)
            if self.native.withdraw(job.handle):
                self.forget(job)
            raise

    def forget(self, job: SharedJob) -> None:
        """Note that a job is done."""
        self._jobs.pop(job.number, None)

    def _serve(self, token: object) -> None:
        """Run jobs until there are none."""
        try:
            while token in self._serving:
                self._run_jobs()
                with self._lock:
                    if not self.native.queued(self._queue):
                        self._serving.discard(token)
        finally:
            self._serving.discard(token)

    def _run_jobs(self) -> None:
        nbytes = SCRATCH_BYTES
        while self.native.queued(self._queue):
            with planes.scratch.borrowed():
                number, span = self.native.serve(self._queue, planes.scratch.room("native", nbytes))
            if not number:
                nbytes = max(nbytes, span)  # what the next job needs, or -1
                continue
            job = self._jobs.get(number)  # None: who waits for it has noticed its end
            if job is None:
                continue
            try:
                if span >= 0:
                    job.look_guarded(span)
            finally:
                if span == self.native.ENDED or self.native.done(job.handle):
                    job.end()


def copy_job(
    queue: JobQueue, chunks: Chunks, copies: Chunks | None, *, seed: int = 0, digests: Bytes | None = None
) -> SharedJob:
    """Return a job that fills `digests`, (n, 16), of chunks, and copies them where `copies` has a place."""
    firsts = cut(chunks.lengths, queue.threads.count)
    own = place(chunks), None if copies is None else place(copies), seed, digests, firsts, _flags(chunks.gate)
    return SharedJob(queue, queue.native.copy_job(*own), firsts, chunks.gate)


def examine_job(
    queue: JobQueue, given: Examination, found: Examined, buffer: Callable[[int], Bytes], seed: int
) -> tuple[SharedJob, MadeBlobs]:
    """Return a job that fills `found`, and makes blobs.

    Args:
        buffer: returns memory for blobs, at least as many bytes as it is asked for.
    """
    columns = (found.digests, found.base_digests, found.copied, np.ascontiguousarray(given.wanted, np.uint8))
    room = buffer if given.wanted.any() else _new_buffer
    return _encode_job(queue, given, columns, given.copies, room, seed)


def encode_job(queue: JobQueue, batch: EncodeBatch, buffer: Callable[[int], Bytes]) -> tuple[SharedJob, MadeBlobs]:
    """Return a job that encodes chunks. It reports spans with chunks that the reference must encode."""
    digests, base_digests = (np.ascontiguousarray(c, np.uint8) for c in (batch.digests, batch.base_digests))
    return _encode_job(queue, batch, (digests, base_digests, None, None), None, buffer, 0)


def _encode_job(
    queue: JobQueue,
    given: Examination | EncodeBatch,
    columns: tuple[Bytes, Bytes, Column | None, Column | None],
    copies: Chunks | None,
    buffer: Callable[[int], Bytes],
    seed: int,
) -> tuple[SharedJob, MadeBlobs]:
    count, firsts, wanted = len(given.chunks), cut(given.chunks.lengths, queue.threads.count), columns[3]
    sizes, layouts = (np.ascontiguousarray(column, np.uint8) for column in (given.element_sizes, given.layouts))
    rooms = _room_bytes(given.chunks.lengths, sizes, (layouts == planes.BYTES) & (given.bases.which < 0))
    ends = sums_before(rooms if wanted is None else rooms * wanted)
    places = ends[firsts] + ROOM_BYTES * np.arange(len(firsts))
    entries, starts, out = np.zeros(count, blob.ENTRY), np.zeros(count, np.int64), buffer(int(places[-1]))
    job = queue.native.encode_job(
        place(given.chunks),
        place(given.bases),
        None if copies is None else place(copies),
        sizes,
        layouts,
        blob.XOR if given.xor else blob.DIFFERENCE,
        planes.ENTROPY_TERMS,
        np.ascontiguousarray(given.delta_limits, np.int64),
        *columns,
        entries.view(np.uint8),
        starts,
        places,
        out,
        seed,
        firsts,
        _flags(given.chunks.gate),
    )
    tried = np.ones(count, bool) if wanted is None else wanted.view(bool)
    return SharedJob(queue, job, firsts, given.chunks.gate), MadeBlobs(
        entries, Chunks([out], np.zeros(count, np.int64), starts, rooms), tried
    )


def _new_buffer(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def _flags(gate: Gate | None) -> Column | None:
    return None if gate is None else gate.flags


def _room_bytes(lengths: Column, sizes: Bytes, are_full_integers: Column) -> Column:
    """Return how many bytes the blobs of chunks may take in `_encode_job`, (n,), multiples of 8.

    The extension encodes few full chunks of integers; the reference encodes those that need more room.
    """
    lengths = np.where(are_full_integers, lengths // 4, lengths)
    blocks = 1 + sizes * (1 + lengths // sizes // codecs.BLOCK_BYTES)
    frames = (_native.FRAME_SLACK + 4) * blocks  # a frame may be larger than its block until it is replaced
    room = blob.HEADER.size + lengths + frames + blob.ALIGNMENT
    padded: Column = room + -room % blob.ALIGNMENT
    return padded


def decode_job(
    queue: JobQueue,
    batch: DecodeBatch,
    done: Column,
    seed: int,
    *,
    each: Bytes | None = None,
    reports_all: bool = False,
) -> SharedJob:
    """Return a job that rebuilds and verifies chunks, and reports spans with chunks that the reference must decode.

    Args:
        done: (n,) uint8, filled: 1 if a chunk is rebuilt.
        each: (m, 16) digests of the chunks of all blobs, to verify them too.
        reports_all: report all spans.
    """
    firsts, none = cut(batch.outs.lengths, queue.threads.count), np.full(len(batch.counts), -1, np.int64)
    columns = (np.ascontiguousarray(c, np.int64) for c in (batch.offsets, batch.lengths, batch.counts))
    job = queue.native.decode_job(
        batch.stored,
        *columns,
        np.ascontiguousarray(batch.digests),
        None if each is None else np.ascontiguousarray(each),
        place(batch.outs),
        ([], none, none, none) if batch.bases is None else place(batch.bases),
        seed,
        done,
        reports_all,
        firsts,
        batch.gate.flags,
    )
    return SharedJob(queue, job, firsts, batch.gate)
