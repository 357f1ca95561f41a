"""Spans: many chunks in one call of the extension `_native`, which releases the GIL once.

In: batches of chunks as columns, with their bytes in host memory. Out: digests, blobs, rebuilt chunks; and which rows
the extension leaves to the reference in NumPy: sparse deltas, planes with repeats, other codecs, and all
damage. So every error is the reference's. The choices are equal too, bit for bit: NumPy makes them, from the
extension's sums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
from .batches import Chunks, DecodeBatch, EncodeBatch, EncodedChunk

_native: Any
try:
    from . import _native
except ImportError:  # installed without a compiler
    _native = None

#: Chunks as the extension takes them: memories, which, starts, lengths; see Chunks.
Place = tuple[Sequence[Any], Column, Column, Column]
#: How the extension stores a chunk.
BY_REFERENCE, STORE_FULL, STORE_DELTA = range(3)
#: A span has at least this many bytes, if there are as many: the choices in NumPy take time for each call.
SPAN_BYTES = 1024 * 1024
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


def digests(native: Any, chunks: Chunks, seed: int) -> Bytes:
    """Return the digest of every chunk, (n, 16)."""
    out = np.empty((len(chunks), 16), np.uint8)
    native.digests(place(chunks), seed, out)
    return out


def encode(native: Any, batch: EncodeBatch, buffer: Callable[[int], Bytes]) -> SpanEncoded:
    """Encode a span's chunks, except the ones that the reference encodes: their entries have length 0.

    Args:
        batch: of one span.
        buffer: returns memory for the blobs, at least as many bytes as it is asked for.
    """
    how, kinds = choose(native, batch)
    rows = np.flatnonzero(how != BY_REFERENCE)
    entries = np.zeros(len(how), blob.ENTRY)
    if not len(rows):
        return SpanEncoded(entries, [])
    given = batch if len(rows) == len(how) else batch.take(rows)
    sizes, layouts = (np.ascontiguousarray(column, np.uint8) for column in (given.element_sizes, given.layouts))
    columns = (given.digests, given.base_digests, kinds[rows], how[rows])
    out = buffer(_room_bytes(given))
    written = np.empty(len(rows), blob.ENTRY)
    native.encode(
        place(given.chunks),
        place(given.bases),
        sizes,
        layouts,
        blob.XOR if batch.xor else blob.DIFFERENCE,
        *(np.ascontiguousarray(column, np.uint8) for column in columns),
        written.view(np.uint8),
        out,
        _scratch(native, given.chunks.lengths),
    )
    written["length"][(how[rows] == STORE_DELTA) & (written["length"] > given.delta_limits)] = 0  # underestimated
    entries[rows] = written
    return SpanEncoded(entries, [out])


def _room_bytes(batch: EncodeBatch) -> int:
    """Return how many bytes the blobs of a batch may take in `encode`."""
    lengths, sizes = batch.chunks.lengths, batch.element_sizes.astype(np.int64)
    blocks = 1 + sizes * (1 + lengths // sizes // codecs.BLOCK_BYTES)
    frames = (_native.FRAME_SLACK + 4) * blocks  # a frame may be larger than its block until it is replaced
    return int((blob.HEADER.size + lengths + frames + blob.ALIGNMENT).sum())


def choose(native: Any, batch: EncodeBatch) -> tuple[Bytes, Bytes]:
    """Choose as `cpu.encode_chunk` does.

    Returns:
        How to store each chunk, (n,): STORE_FULL, STORE_DELTA, or BY_REFERENCE; and the kinds of planes, (n, 8).
    """
    sizes = np.ascontiguousarray(batch.element_sizes, np.uint8)
    elements = batch.chunks.lengths // sizes
    has_base = batch.bases.which >= 0
    is_plane = np.arange(8) < sizes[:, None]
    found, changed = _statistics(native, batch, sizes, is_plane)
    (full_bits, full_share), (delta_bits, delta_share) = found
    full, delta = (estimates(bits, sizes, elements) for bits in (full_bits, delta_bits))
    is_sparse = has_base & sparse.worth_trying(changed, elements) & (not batch.xor)
    is_delta = has_base & ~is_sparse & delta_choice.pays(delta, full, batch.delta_limits)
    bits = np.where(is_delta[:, None], delta_bits, full_bits)
    share = np.where(is_delta[:, None], delta_share, full_share)
    kinds = np.where(is_plane, plane_kinds(bits, share, batch.layouts[:, None]), NOISE)
    declined = is_sparse | ((kinds == REPEATS) & (share < 1)).any(axis=1)
    how = np.where(declined, BY_REFERENCE, np.where(is_delta, STORE_DELTA, STORE_FULL)).astype(np.uint8)
    return how, kinds.astype(np.uint8)


def _statistics(
    native: Any, batch: EncodeBatch, sizes: Bytes, is_plane: npt.NDArray[np.bool_]
) -> tuple[list[npt.NDArray[np.float64]], Column]:
    """Return bits and top share of every plane, full and as a delta, [2] (2, n, 8); and how many elements changed.

    Planes that do not exist have 0 bits. If more than half of the elements changed, any number above that is returned.
    """
    both = np.stack([is_plane, is_plane & (batch.bases.which >= 0)[:, None]], axis=1)  # (n, 2, 8)
    sums = np.empty((int(np.count_nonzero(both)), 4), np.int64)
    changed = np.empty(len(sizes), np.int64)
    layouts = np.ascontiguousarray(batch.layouts, np.uint8)
    mode = blob.XOR if batch.xor else blob.DIFFERENCE
    terms = planes.ENTROPY_TERMS
    native.sample(place(batch.chunks), place(batch.bases), sizes, layouts, mode, terms, sums, changed)
    statistics = planes.statistics_of(*sums.T)
    found = np.zeros((2, *both.shape))
    found[0][both], found[1][both] = statistics.bits, statistics.top_share
    return [found[:, :, 0], found[:, :, 1]], changed


class SpanEncoded:
    """The blobs of a span, one after the other in one buffer; `pack.Encoded` if all of them are there."""

    def __init__(self, entries: npt.NDArray[np.void], buffers: list[Bytes]) -> None:
        self.entries, self.buffers = entries, buffers

    def copy(self, first: int, last: int, out: Bytes) -> Callable[[], object]:
        """Copy blobs into `out`, at once."""
        begin = int(self.entries["offset"][first])
        nbytes = int(self.entries["offset"][last - 1]) + int(self.entries["length"][last - 1]) - begin
        out[:nbytes] = self.buffers[0][begin : begin + nbytes]
        out[nbytes:] = 0
        return nothing_to_wait_for

    def chunk(self, row: int) -> EncodedChunk:
        """Return one blob."""
        entry, buffer = self.entries[row], self.buffers[0]
        begin, end = int(entry["offset"]), int(entry["offset"]) + int(entry["length"])
        return EncodedChunk(buffer[begin:end].data, int(entry["transform"]) != blob.FULL, buffer)


def nothing_to_wait_for() -> None:
    """Return at once: the work is done."""


def decode(native: Any, batch: DecodeBatch, rows: slice, seed: int) -> Column:
    """Rebuild and verify the chunks of a span; return the rows that the reference decodes."""
    blobs = slice(*sums_before(batch.counts)[[rows.start, rows.stop]].tolist())
    counts, offsets, lengths = (
        np.ascontiguousarray(c, np.int64) for c in (batch.counts[rows], batch.offsets[blobs], batch.lengths[blobs])
    )
    outs = place(batch.outs.take(rows))
    none = np.full(len(counts), -1, np.int64)
    bases = ([], none, none, none) if batch.bases is None else place(batch.bases.take(rows))
    done = np.empty(len(counts), np.uint8)
    chunk_digests, scratch = np.ascontiguousarray(batch.digests[rows]), _scratch(native, outs[3])
    native.decode(batch.stored, offsets, lengths, counts, chunk_digests, outs, bases, seed, done, scratch)
    others: Column = rows.start + np.flatnonzero(done == 0)
    return others


def _scratch(native: Any, lengths: Column) -> Bytes:
    return planes.scratch.room("native", native.SCRATCH_BYTES + int(lengths.max(initial=0)))
