"""Spans: the jobs of the extension `_native`. The threads of an engine run a job together, without the GIL.

In: batches of chunks as columns, with their bytes in host memory. Out: digests, blobs, rebuilt chunks; and which rows
the extension leaves to the reference in NumPy: planes with repeats, other codecs, some sparse deltas, and all damage.
So every error is the reference's. The choices are equal too, bit for bit (native/choice.c). Only between a sparse delta
and planes of nearly the same size, which are compared as stored, may they differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays import Bytes, Column, sums_before
from ..errors import CapabilityError, InvalidInputError
from ..format.blobs import blob, codecs, planes
from ..threads import Gate, Pending, Threads
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
    """Spans of chunks, which the threads that run it take one after the other; see _native.pyi.

    It keeps the memory of the chunks alive.
    """

    def __init__(self, native: Any, made: tuple[Any, int], firsts: Column) -> None:
        self._native, self._firsts = native, firsts
        self._job, self._scratch_bytes = made

    def run(self, look: Callable[[int, int], object] | None = None) -> None:
        """Take spans until none is left, or the gate of their memory is closed.

        Args:
            look: called with the first and the last chunk, plus one, of spans that Python must look at.
        """
        while self._native.spans_left(self._job):  # a thread that comes too late needs no memory
            with planes.scratch.borrowed():
                span = self._native.run(self._job, planes.scratch.room("native", self._scratch_bytes))
            if span >= 0 and look is not None:
                look(int(self._firsts[span]), int(self._firsts[span + 1]))

    def start(
        self, threads: Threads, gate: Gate | None = None, look: Callable[[int, int], object] | None = None
    ) -> Pending[None]:
        """Begin to run it on all threads."""

        def run(_: int) -> None:
            self.run(look)

        act = run if gate is None else gate.guarded(run)
        return threads.start(act, range(min(threads.count, len(self._firsts) - 1)))

    def help(
        self, begun: Pending[None], gate: Gate | None = None, look: Callable[[int, int], object] | None = None
    ) -> None:
        """Run it in this thread too, since its threads may have other work first; then wait for it."""
        if gate is None:
            self.run(look)
        else:
            gate.guarded(self.run)(look)
        begun()


def copy_job(
    native: Any, chunks: Chunks, copies: Chunks | None, threads: int, *, seed: int = 0, digests: Bytes | None = None
) -> SharedJob:
    """Return a job that fills `digests`, (n, 16), of chunks, and copies them where `copies` has a place."""
    firsts = cut(chunks.lengths, threads)
    own = place(chunks), copies and place(copies), seed, digests, firsts, _closed(chunks)
    return SharedJob(native, native.copy_job(*own), firsts)


def examine_job(
    native: Any, given: Examination, found: Examined, buffer: Callable[[int], Bytes], seed: int, threads: int
) -> tuple[SharedJob, MadeBlobs]:
    """Return a job that fills `found`, and makes blobs.

    Args:
        buffer: returns memory for blobs, at least as many bytes as it is asked for.
    """
    columns = (found.digests, found.base_digests, found.copied, np.ascontiguousarray(given.wanted, np.uint8))
    room = buffer if given.wanted.any() else _new_buffer
    return _encode_job(native, given, columns, given.copies, room, seed, threads)


def encode_job(
    native: Any, batch: EncodeBatch, buffer: Callable[[int], Bytes], threads: int
) -> tuple[SharedJob, MadeBlobs]:
    """Return a job that encodes chunks. It reports spans with chunks that the reference must encode."""
    digests, base_digests = (np.ascontiguousarray(c, np.uint8) for c in (batch.digests, batch.base_digests))
    return _encode_job(native, batch, (digests, base_digests, None, None), None, buffer, 0, threads)


def _encode_job(
    native: Any,
    given: Examination | EncodeBatch,
    columns: tuple[Bytes, Bytes, Column | None, Column | None],
    copies: Chunks | None,
    buffer: Callable[[int], Bytes],
    seed: int,
    threads: int,
) -> tuple[SharedJob, MadeBlobs]:
    count, firsts, wanted = len(given.chunks), cut(given.chunks.lengths, threads), columns[3]
    sizes, layouts = (np.ascontiguousarray(column, np.uint8) for column in (given.element_sizes, given.layouts))
    rooms = _room_bytes(given.chunks.lengths, sizes)
    ends = sums_before(rooms if wanted is None else rooms * wanted)
    places = ends[firsts] + ROOM_BYTES * np.arange(len(firsts))
    entries, starts, out = np.zeros(count, blob.ENTRY), np.zeros(count, np.int64), buffer(int(places[-1]))
    job = native.encode_job(
        place(given.chunks),
        place(given.bases),
        copies and place(copies),
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
        _closed(given.chunks),
    )
    tried = np.ones(count, bool) if wanted is None else wanted.view(bool)
    return SharedJob(native, job, firsts), MadeBlobs(
        entries, Chunks([out], np.zeros(count, np.int64), starts, rooms), tried
    )


def _new_buffer(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def _closed(chunks: Chunks) -> bytearray | None:
    return None if chunks.gate is None else chunks.gate.closed


def _room_bytes(lengths: Column, sizes: Bytes) -> Column:
    """Return how many bytes the blobs of chunks may take in `_encode_job`, (n,), multiples of 8."""
    blocks = 1 + sizes * (1 + lengths // sizes // codecs.BLOCK_BYTES)
    frames = (_native.FRAME_SLACK + 4) * blocks  # a frame may be larger than its block until it is replaced
    room = blob.HEADER.size + lengths + frames + blob.ALIGNMENT
    padded: Column = room + -room % blob.ALIGNMENT
    return padded


def decode_job(
    native: Any,
    batch: DecodeBatch,
    done: Column,
    seed: int,
    threads: int,
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
    firsts, none = cut(batch.outs.lengths, threads), np.full(len(batch.counts), -1, np.int64)
    columns = (np.ascontiguousarray(c, np.int64) for c in (batch.offsets, batch.lengths, batch.counts))
    job = native.decode_job(
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
        batch.gate.closed,
    )
    return SharedJob(native, job, firsts)
