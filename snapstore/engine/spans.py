"""Spans: many chunks in one call of the extension `_native`, which releases the GIL once.

In: batches of chunks as columns, with their bytes in host memory. Out: digests, blobs, rebuilt chunks; and which rows
the extension leaves to the reference in NumPy: planes with repeats, other codecs, some sparse deltas, and all damage.
So every error is the reference's. The choices are equal too, bit for bit: NumPy makes them, from the extension's sums.
Only between a sparse delta and planes of nearly the same size, which are compared as stored, may they differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes, Column, sums_before
from ..errors import CapabilityError, InvalidInputError
from ..format.blobs import blob, codecs, planes
from ..format.blobs.codecs import sparse
from ..format.blobs.plane_kinds import NOISE, REPEATS, estimates, plane_kinds
from ..format.manifests import delta_choice
from ..threads import Pending, Threads
from .batches import Chunks, DecodeBatch, EncodeBatch, EncodedChunk, Examination, Examined

_native: Any
try:
    from . import _native
except ImportError:  # installed without a compiler
    _native = None

#: Chunks as the extension takes them: memories, which, starts, lengths; see Chunks.
Place = tuple[Sequence[Any], Column, Column, Column]
#: A sampled chunk: total, terms, distinct and top of its planes and of those of its delta, see
#: `planes.statistics_of`; how many elements changed, or any number above half of them; and 1 if it was sampled.
SAMPLED = np.dtype([("sums", "<i8", (2, 8, 4)), ("changed", "<i8"), ("is_valid", "<i8")])
#: Shorter copies into packs take less time than a thread to begin them [bytes].
COPIED_AT_ONCE_BYTES = 64 * 1024
#: How the extension stores a chunk: left to the reference, full, as a delta in planes; or as a sparse delta, but as one
#: of the former two if that would be too large.
BY_REFERENCE, STORE_FULL, STORE_DELTA, SPARSE_OR_FULL, SPARSE_OR_DELTA = range(5)
#: The bytes that a call needs behind its blobs.
ROOM_BYTES = 4096
#: A span has at least this many bytes, if there are as many: the choices in NumPy take time for each call.
SPAN_BYTES = 1024 * 1024
#: At most about this many spans for each thread, so that threads end at about the same time.
SPANS_PER_THREAD = 2


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


def cut(lengths: Column, threads: int) -> list[slice]:
    """Cut rows of chunks of these lengths [bytes] into spans."""
    ends = sums_before(lengths)
    span_bytes = max(SPAN_BYTES, -(-int(ends[-1]) // (threads * SPANS_PER_THREAD)))
    of_span = ends[:-1] // span_bytes  # by where a chunk begins
    firsts = np.flatnonzero(np.diff(of_span, prepend=-1)).tolist()
    return [slice(first, last) for first, last in pairwise([*firsts, len(lengths)])]


def place(chunks: Chunks) -> Place:
    """Return chunks as the extension takes them."""
    which, starts, lengths = (np.ascontiguousarray(c, np.int64) for c in (chunks.which, chunks.starts, chunks.lengths))
    return chunks.memories, which, starts, lengths


def digests(native: Any, chunks: Chunks, copies: Chunks | None, seed: int, out: Bytes) -> None:
    """Fill `out`, (n, 16), with the digests of chunks; copy the chunks, where `copies` has a place."""
    native.digests(place(chunks), copies and place(copies), seed, out)


def examine(native: Any, given: Examination, seed: int, found: Examined, rows: slice) -> None:
    """Examine a span's chunks, the rows of `given`; fill these rows of `found`."""
    sizes, layouts = (np.ascontiguousarray(column[rows], np.uint8) for column in (given.element_sizes, given.layouts))
    native.examine(
        place(given.chunks.take(rows)),
        place(given.bases.take(rows)),
        given.copies and place(given.copies.take(rows)),
        sizes,
        layouts,
        blob.XOR if given.xor else blob.DIFFERENCE,
        planes.ENTROPY_TERMS if given.sample else None,
        found.sampled[rows] if found.sampled is not None else None,
        seed,
        found.digests[rows],
        found.base_digests[rows],
        found.copied[rows],
    )


def nothing_found(count: int) -> Examined:
    """Return memory for the result of an Examination of `count` chunks."""
    columns = np.zeros((count, 16), np.uint8), np.zeros((count, 16), np.uint8), np.zeros(count, np.uint8)
    return Examined(*columns, np.zeros(count, SAMPLED))


def encode(
    native: Any,
    batch: EncodeBatch,
    choice: Choice | None,
    buffer: Callable[[int], Bytes],
    copies: Copies,
) -> SpanEncoded:
    """Encode a span's chunks, except the ones that the reference encodes: their entries have length 0.

    Args:
        batch: of one span.
        choice: the result of `choose`; None: chunks are sampled now.
        buffer: returns memory for the blobs, at least as many bytes as it is asked for.
        copies: makes the copies out of this memory.
    """
    choice = choice or choose(native, batch)
    rows = np.flatnonzero(choice.how != BY_REFERENCE)
    entries = np.zeros(len(choice.how), blob.ENTRY)
    if not len(rows):
        return SpanEncoded(entries, [], copies)
    given, chosen = (batch, choice) if len(rows) == len(entries) else (batch.take(rows), choice.take(rows))
    sizes, layouts = (np.ascontiguousarray(column, np.uint8) for column in (given.element_sizes, given.layouts))
    columns = (given.digests, given.base_digests, chosen.kinds, chosen.how)
    out = buffer(_room_bytes(given))
    written = np.empty(len(rows), blob.ENTRY)
    native.encode(
        place(given.chunks),
        place(given.bases),
        sizes,
        layouts,
        blob.XOR if batch.xor else blob.DIFFERENCE,
        *(np.ascontiguousarray(column, np.uint8) for column in columns),
        np.ascontiguousarray(chosen.most, np.int64),
        written.view(np.uint8),
        out,
        _scratch(native, given.chunks.lengths, is_sparse=bool((chosen.how >= SPARSE_OR_FULL).any())),
    )
    is_large = written["length"] > given.delta_limits
    written["length"][is_large & (written["transform"] != blob.FULL)] = 0  # it was underestimated
    entries[rows] = written
    return SpanEncoded(entries, [out], copies)


def _room_bytes(batch: EncodeBatch) -> int:
    """Return how many bytes the blobs of a batch may take in `encode`."""
    lengths, sizes = batch.chunks.lengths, batch.element_sizes.astype(np.int64)
    blocks = 1 + sizes * (1 + lengths // sizes // codecs.BLOCK_BYTES)
    frames = (_native.FRAME_SLACK + 4) * blocks  # a frame may be larger than its block until it is replaced
    return int((blob.HEADER.size + lengths + frames + blob.ALIGNMENT).sum()) + ROOM_BYTES


@dataclass(frozen=True, slots=True)
class Choice:
    """How to store each chunk of a batch, as columns."""

    how: Bytes  # (n,) BY_REFERENCE to SPARSE_OR_DELTA
    kinds: Bytes  # (n, 8) of planes
    most: Column  # (n,) the most bytes of a sparse delta

    def take(self, rows: Column | slice) -> Choice:
        """Return these rows."""
        return Choice(self.how[rows], self.kinds[rows], self.most[rows])


def choose(native: Any, batch: EncodeBatch) -> Choice:
    """Choose as `cpu.encode_chunk` does."""
    sizes = np.ascontiguousarray(batch.element_sizes, np.uint8)
    elements = batch.chunks.lengths // sizes
    has_base = batch.bases.which >= 0
    is_plane = np.arange(8) < sizes[:, None]
    ((full_bits, full_share), (delta_bits, delta_share)), changed = _statistics(native, batch, sizes, is_plane)
    full, delta = (estimates(bits, sizes, elements) for bits in (full_bits, delta_bits))
    is_sparse = has_base & sparse.worth_trying(changed, elements) & (not batch.xor)
    is_delta = has_base & delta_choice.pays(delta, full, batch.delta_limits)
    few = changed <= delta_choice.FEW_CHANGED_SHARE * elements
    below = np.minimum(full, delta * np.where(few, delta_choice.FEW_CHANGED_EXCESS, 1)) + blob.HEADER.size
    most = np.minimum(np.ceil(below) - 1, delta_choice.most_bytes(full, batch.delta_limits))
    bits = np.where(is_delta[:, None], delta_bits, full_bits)
    share = np.where(is_delta[:, None], delta_share, full_share)
    kinds = np.where(is_plane, plane_kinds(bits, share, batch.layouts[:, None]), NOISE)
    declined = ((kinds == REPEATS) & (share < 1)).any(axis=1) & ~is_sparse | is_sparse & ~np.isin(sizes, (2, 4))
    how = np.where(is_delta, STORE_DELTA, STORE_FULL) + np.where(is_sparse, SPARSE_OR_FULL - STORE_FULL, 0)
    how[declined] = BY_REFERENCE
    return Choice(how.astype(np.uint8), kinds.astype(np.uint8), np.maximum(most, 0).astype(np.int64))


def _statistics(
    native: Any, batch: EncodeBatch, sizes: Bytes, is_plane: npt.NDArray[np.bool_]
) -> tuple[list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]], Column]:
    """Return bits and top share of every plane, (n, 8), full and as a delta; and how many elements changed, (n,).

    Planes that do not exist have 0 bits. If more than half of the elements changed, any number above that is returned.
    """
    sampled = np.zeros(len(sizes), SAMPLED) if batch.sampled is None else batch.sampled
    if not sampled["is_valid"].all():
        layouts, mode = np.ascontiguousarray(batch.layouts, np.uint8), blob.XOR if batch.xor else blob.DIFFERENCE
        sampled = sampled.copy()
        native.sample(place(batch.chunks), place(batch.bases), sizes, layouts, mode, planes.ENTROPY_TERMS, sampled)
    statistics = planes.statistics_of(*np.moveaxis(sampled["sums"], -1, 0))
    bits, share = np.where(is_plane[:, None], statistics.bits, 0), statistics.top_share
    return [(bits[:, i], share[:, i]) for i in (0, 1)], sampled["changed"]


def nothing_to_wait_for() -> None:
    """Return at once: the work is done."""


class Copies:
    """Copies of blobs from one engine's buffers into packs, on its threads: the thread of the save has other work.

    Args:
        threads: None: the thread that calls makes the copies.
    """

    def __init__(self, threads: Threads | None = None) -> None:
        self._threads = threads
        self._begun: list[Pending[None]] = []

    def start(self, copy: Callable[[], None], nbytes: int) -> Callable[[], object]:
        """Begin a copy; return a call that waits for it. A short copy is made at once."""
        if self._threads is None or nbytes < COPIED_AT_ONCE_BYTES:
            copy()
            return nothing_to_wait_for
        pending = self._threads.start(lambda act: act(), [copy])
        self._begun.append(pending)
        return pending

    def are_done(self) -> bool:
        """Return whether no copy reads the buffers any more."""
        return all(copy.is_done() for copy in self._begun)


class SpanEncoded:
    """The blobs of a span, one after the other in one buffer; `pack.Encoded` if all of them are there."""

    def __init__(self, entries: npt.NDArray[np.void], buffers: list[Bytes], copies: Copies) -> None:
        self.entries, self.buffers, self.copies = entries, buffers, copies

    def copy(self, first: int, last: int, out: Bytes) -> Callable[[], object]:
        """Begin to copy blobs into `out`."""
        begin = int(self.entries["offset"][first])
        nbytes = int(self.entries["offset"][last - 1]) + int(self.entries["length"][last - 1]) - begin

        def copy() -> None:
            out[:nbytes] = self.buffers[0][begin : begin + nbytes]
            out[nbytes:] = 0

        return self.copies.start(copy, nbytes)

    def chunk(self, row: int) -> EncodedChunk:
        """Return one blob."""
        entry, buffer = self.entries[row], self.buffers[0]
        begin, end = int(entry["offset"]), int(entry["offset"]) + int(entry["length"])
        return EncodedChunk(buffer[begin:end].data, int(entry["transform"]) != blob.FULL, buffer)


def decode(native: Any, batch: DecodeBatch, rows: slice, seed: int, each: Bytes | None = None) -> Column:
    """Rebuild and verify the chunks of a span; return the rows that the reference decodes.

    Args:
        each: (m, 16) digests of the chunks of all blobs of the batch, to verify them too.
    """
    blobs = slice(*sums_before(batch.counts)[[rows.start, rows.stop]].tolist())
    counts, offsets, lengths = (
        np.ascontiguousarray(c, np.int64) for c in (batch.counts[rows], batch.offsets[blobs], batch.lengths[blobs])
    )
    outs = place(batch.outs.take(rows))
    none = np.full(len(counts), -1, np.int64)
    bases = ([], none, none, none) if batch.bases is None else place(batch.bases.take(rows))
    done = np.empty(len(counts), np.uint8)
    chunk_digests, scratch = np.ascontiguousarray(batch.digests[rows]), _scratch(native, outs[3])
    own = None if each is None else np.ascontiguousarray(each[blobs])
    native.decode(batch.stored, offsets, lengths, counts, chunk_digests, own, outs, bases, seed, done, scratch)
    others: Column = rows.start + np.flatnonzero(done == 0)
    return others


def _scratch(native: Any, lengths: Column, *, is_sparse: bool = False) -> Bytes:
    per_byte = native.SPARSE_SCRATCH_PER_BYTE if is_sparse else native.SCRATCH_PER_BYTE
    return planes.scratch.room("native", native.SCRATCH_BYTES + per_byte * int(lengths.max(initial=0)))
