"""Reference: the stages of the CPU engine for one chunk after the other, in NumPy, xxhash, zstandard and zlib.

The extension and the engines of devices store and choose as this code does. It also does the work where there is no
extension, and for chunks that the extension declines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Bytes, Column, sums_before
from ..format.blobs import blob, planes
from ..format.blobs.codecs import sparse
from ..format.blobs.plane_kinds import estimate_bytes
from ..format.hashing import digest, keyed_checksum
from ..format.manifests import delta_choice
from .batches import Chunks, DecodeBatch, DecodeJob, EncodeBatch, EncodedChunk, EncodeJob, Examination


def digests(chunks: Chunks, copies: Chunks | None, seed: int, out: Bytes) -> None:
    """Fill `out`, (n, 16), with the digests of chunks; copy those that have a place in `copies`."""
    out[:] = np.frombuffer(b"".join(digest(c, seed) for c in chunks.views()), np.uint8).reshape(-1, 16)
    for chunk, copy in zip(chunks.views(), copies.views() if copies else (), strict=False):
        copy[:] = chunk[: copy.size]  # none, if it has no place


def examine(given: Examination, seed: int, digests: Bytes, base_digests: Bytes) -> None:
    """Copy chunks, if copies are wanted; hash them, and their bases."""
    chunks = given.chunks.views()
    if given.copies is not None:
        copies = given.copies.views()
        for copy, chunk in zip(copies, chunks, strict=True):
            copy[:] = chunk
        chunks = copies
    for i, (chunk, base) in enumerate(zip(chunks, given.bases.views(), strict=True)):
        digests[i] = np.frombuffer(digest(chunk, seed), np.uint8)
        if given.bases.which[i] >= 0:
            base_digests[i] = np.frombuffer(digest(base, seed), np.uint8)


def encode_jobs(batch: EncodeBatch) -> list[EncodeJob]:
    """Return the share of each chunk of a batch."""
    columns = (batch.element_sizes, batch.layouts, batch.bases.which, batch.delta_limits)
    chunks = zip(batch.chunks.views(), batch.digests, batch.bases.views(), batch.base_digests, strict=True)
    return [
        EncodeJob(chunk, chunk_digest.tobytes(), size, layout)
        if which < 0
        else EncodeJob(chunk, chunk_digest.tobytes(), size, layout, base, base_digest.tobytes(), limit, batch.xor)
        for (chunk, chunk_digest, base, base_digest), size, layout, which, limit in zip(
            chunks, *(column.tolist() for column in columns), strict=True
        )
    ]


def decode_jobs(batch: DecodeBatch, rows: Sequence[int] | None = None) -> list[DecodeJob]:
    """Return the jobs of some rows; None: of all."""
    stored, firsts = batch.stored.data, sums_before(batch.counts).tolist()
    offsets, lengths = batch.offsets, batch.lengths
    chosen = np.arange(len(batch.counts)) if rows is None else np.array(rows, np.int64)
    bases: list[Bytes | None] = [None] * len(chosen)
    if batch.bases is not None:
        some = batch.bases.take(chosen)
        bases = [view if which >= 0 else None for view, which in zip(some.views(), some.which, strict=True)]
    jobs = []
    for row, out, base in zip(chosen.tolist(), batch.outs.take(chosen).views(), bases, strict=True):
        span = slice(firsts[row], firsts[row + 1])
        places = zip(offsets[span].tolist(), lengths[span].tolist(), strict=True)
        blobs = [stored[offset : offset + length] for offset, length in places]
        wheres = [batch.where(i) for i in range(firsts[row], firsts[row + 1])]
        jobs.append(DecodeJob(blobs, wheres, batch.digests[row].tobytes(), out, base))
    return jobs


def encode_chunk(job: EncodeJob, out: Bytes) -> EncodedChunk:
    """Encode one chunk into `out` (see `blob.bound`): full, as a delta in planes, or as a sparse delta; or as an XOR.

    The sizes of planes are estimated from sampled histograms. A sparse delta is tried if few enough elements changed,
    and stored if it is smaller than the planes. No delta is stored that takes more than `job.delta_limit`.
    """
    of_chunk = _statistics(job.chunk, job.element_size, job.layout)
    source, base, chosen = job.chunk, None, of_chunk
    if job.base is not None:
        difference = planes.scratch.room("difference", job.chunk.size)
        if job.xor:
            np.bitwise_xor(job.chunk, job.base, out=difference)
        else:
            planes.difference(job.chunk, job.base, job.element_size, difference)
        of_difference = _statistics(difference, job.element_size, job.layout if job.xor else planes.BYTES)
        plane_bytes = job.chunk.size // job.element_size
        full_bytes = estimate_bytes(of_chunk.bits.tolist(), plane_bytes)
        delta_bytes = estimate_bytes(of_difference.bits.tolist(), plane_bytes)
        changed = int(np.count_nonzero(difference.view(f"u{job.element_size}")))
        if not job.xor and sparse.worth_trying(changed, plane_bytes):
            digests = (job.digest, job.base_digest)
            few = changed <= delta_choice.FEW_CHANGED_SHARE * plane_bytes
            most = min(full_bytes, delta_bytes * (delta_choice.FEW_CHANGED_EXCESS if few else 1)) + blob.HEADER.size
            data = blob.encode_sparse(difference, job.base, job.element_size, job.layout, digests, most, out)
            if data is not None and delta_choice.pays(len(data), full_bytes, job.delta_limit):
                return EncodedChunk(data, True, out)
        if delta_choice.pays(delta_bytes, full_bytes, job.delta_limit):
            source, base, chosen = difference, job.base_digest, of_difference
    data = blob.encode(source, job.element_size, job.layout, chosen, (job.digest, base), out, xor=job.xor)
    if base is not None and len(data) > job.delta_limit:  # the estimate was too low
        data, base = blob.encode(job.chunk, job.element_size, job.layout, of_chunk, (job.digest, None), out), None
    return EncodedChunk(data, base is not None, out)


def store_chunk(job: EncodeJob, out: Bytes) -> EncodedChunk:
    """Store one chunk in `out` (see `blob.bound`): as a sparse delta if that pays, else as one raw plane."""
    if job.base is not None and not job.xor:
        difference = planes.scratch.room("difference", job.chunk.size)
        planes.difference(job.chunk, job.base, job.element_size, difference)
        elements = job.chunk.size // job.element_size
        if sparse.worth_trying(int(np.count_nonzero(difference.view(f"u{job.element_size}"))), elements):
            digests = (job.digest, job.base_digest)
            most = job.chunk.size
            data = blob.encode_sparse(difference, job.base, job.element_size, job.layout, digests, most, out)
            if data is not None and delta_choice.pays(len(data), most, job.delta_limit):
                return EncodedChunk(data, True, out)
    return EncodedChunk(blob.encode(job.chunk, 1, planes.BYTES, _NOISE, (job.digest, None), out), False, out)


#: The statistics of a plane that is stored raw.
_NOISE = planes.Statistics(np.array([8.0]), np.array([0.0]))


def _statistics(source: Bytes, element_size: int, layout: int) -> planes.Statistics:
    return planes.statistics(planes.histograms(planes.sample(source, element_size, layout)))


def unequal(batch: DecodeBatch, firsts: Column, rows: slice, checksums: Column) -> dict[int, str]:
    """Return the rows with a blob of another checksum than is known, and the blob's name."""
    found: dict[int, str] = {}
    stored, offsets, lengths = batch.stored.data, batch.offsets.tolist(), batch.lengths.tolist()
    for row in range(rows.start, rows.stop):
        for i in range(int(firsts[row]), int(firsts[row + 1])):
            if checksums[i] and keyed_checksum(stored[offsets[i] : offsets[i] + lengths[i]]) != checksums[i]:
                found.setdefault(row, batch.where(i))
    return found
