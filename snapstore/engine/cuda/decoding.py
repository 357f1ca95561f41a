"""Decoding: the stages of one batch of blobs to chunks, on one stream.

up -> headers (host) -> checksums, tables of sparse deltas -> Huffman, nvCOMP -> planes merged, sparse deltas -> digests
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch

from ...arrays import Column, items_at
from ...errors import IntegrityError
from ...format.blobs import blob, codecs
from ...format.blobs.codecs import zstd
from ..batches import DecodeBatch
from . import huffman, kernels, nvcomp
from .huffman import HUFFMAN
from .nvcomp import ANS_BLOCK_BYTES
from .pinned import ALIGNMENT
from .sparse import SparseLinks
from .streams import WorkStream, addresses_of, copy_async, ragged

#: For the kernel `merge`, the kind of planes less their layout, by transform; a difference has layout 0.
_KINDS = np.array([0, 2, 3], np.uint8)
#: Whether a device decodes planes of each codec, (256,) bool.
_DECODED = np.isin(np.arange(256), (codecs.RAW, codecs.ZSTD, codecs.DEFLATE, codecs.ANS))


@dataclass(frozen=True, slots=True)
class Planes:
    """Stored planes, and their pieces. A piece is a coded block, or a whole raw plane."""

    codec: Column  # (p,)
    sizes: Column  # (p,) plain bytes
    block_bytes: Column  # (p,) plain bytes of a block
    plane: Column  # (q,) the plane of each piece
    within: Column  # (q,) the number of each piece within its plane
    offsets: Column  # (q,) in the batch's stored bytes
    stored_sizes: Column  # (q,) [bytes]

    @property
    def is_raw(self) -> Column:
        """Return which planes are stored raw, (p,) bool."""
        raw: Column = self.codec == codecs.RAW
        return raw


class Decoding:
    """One batch from blobs to chunks."""

    def __init__(self, work: WorkStream, batch: DecodeBatch, digest_seed: int) -> None:
        self.work, self.batch, self.digest_seed = work, batch, digest_seed
        work.batch_bytes = 0
        self.chunk_of = np.repeat(np.arange(len(batch.counts)), batch.counts)  # the chunk of every blob
        self.last = np.cumsum(batch.counts) - 1  # the oldest blob of every chunk
        self.first = self.last - batch.counts + 1

    def run(self) -> Generator[None, None, Column]:
        """Run all stages, with a yield where the host must wait for the device.

        Returns:
            The rows that the CPU must rebuild: the device cannot read their blobs, or they are damaged, and the CPU
            finds the error. A chunk that does not have its digest is one of them.

        Raises:
            IntegrityError: planes do not fill their blob.
        """
        batch, work = self.batch, self.work
        found, fine = blob.read_headers(batch.stored, batch.offsets, batch.lengths)
        fine &= self._fits(found)
        length = found.payload_start + found.payload_bytes
        stored = work.room("stored", batch.stored.size)
        copy_async(stored.data_ptr(), batch.stored.ctypes.data, batch.stored.size, work.stream)
        addresses = stored.data_ptr() + batch.offsets
        checks = work.fetch(work.checksums(addresses + 16, np.where(fine, length - 16, 0)))
        sparse = np.flatnonzero(self._are_fine(fine)[self.chunk_of] & self.is_sparse)
        self.links = SparseLinks(work, batch, stored.data_ptr(), found, sparse)
        yield
        fine &= checks.numpy().view(np.uint64).reshape(-1) == found.checksum
        frames = self.links.place()
        if frames is not None:
            yield
        self.links.unpack(frames, fine)
        fine[self.links.refs] &= self.links.fine
        chunk_fine = self._are_fine(fine)
        rows = np.flatnonzero(chunk_fine)
        if len(rows):
            refs = np.flatnonzero(chunk_fine[self.chunk_of])
            got = work.fetch(self._rebuild(stored, found, rows, refs))
            bad = work.fetch(self.links.bad)
            yield
            chunk_fine[rows] = (got.numpy() == batch.digests[rows]).all(axis=1)
            chunk_fine[self.chunk_of[self.links.refs[bad.numpy() != 0]]] = False
        return np.flatnonzero(~chunk_fine)

    def _are_fine(self, blobs: Column) -> Column:
        """Return which chunks have only fine blobs, (n,)."""
        fine: Column = np.logical_and.reduceat(blobs, self.first)
        return fine

    def _fits(self, found: blob.Headers) -> Column:
        """Return which blobs (m,) fit their chains and have codecs and forms that a device reads."""
        batch, chunk_of, last = self.batch, self.chunk_of, self.last
        expected = np.empty_like(found.digest)
        expected[:, 1:] = found.base[:, :-1]
        expected[:, self.first] = np.ascontiguousarray(batch.digests).view("<u8").T
        fine: Column = (found.digest == expected).all(axis=0)
        fine &= found.raw_bytes == batch.outs.lengths[chunk_of]
        fine &= found.payload_start + found.payload_bytes == batch.lengths
        fine &= found.element_size == found.element_size[self.first][chunk_of]
        is_full = np.zeros(len(chunk_of), bool)
        is_full[last] = batch.bases is None or batch.bases.which < 0
        fine &= is_full == (found.transform == blob.FULL)
        fine &= is_full == (found.base[0] | found.base[1] == 0)
        fine &= (found.block_bytes == codecs.BLOCK_BYTES) | (found.block_bytes == ANS_BLOCK_BYTES)
        self.is_sparse = found.codecs & 255 == codecs.SPARSE
        fine &= ~self.is_sparse | ~is_full & (found.codecs == codecs.SPARSE)  # no codec for other planes
        planar = np.flatnonzero(~self.is_sparse)
        fine[planar] &= self._are_known(found.take(planar))
        return fine

    @staticmethod
    def _are_known(found: blob.Headers) -> Column:
        """Return which blobs have codecs that a device reads, and as many blocks as their planes need."""
        own = np.arange(8) < found.element_size[:, None]
        plane_codecs = found.plane_codecs()
        coded = (own & (plane_codecs != codecs.RAW)).sum(axis=1)
        plane_bytes = found.raw_bytes // np.maximum(found.element_size, 1)
        blocks = coded * -(-plane_bytes // np.maximum(found.block_bytes, 1))
        known: Column = (_DECODED[plane_codecs] | ~own).all(axis=1) & (blocks == found.count)
        return known

    def _rebuild(self, stored: torch.Tensor, found: blob.Headers, rows: Column, refs: Column) -> torch.Tensor:
        """Begin to decode and merge the chunks `rows`, whose blobs are `refs`; return their digests, (k, 16)."""
        batch, work = self.batch, self.work
        is_sparse = self.is_sparse[refs]
        planar, sparse = np.flatnonzero(~is_sparse), np.flatnonzero(is_sparse)
        header = found.take(refs[planar])
        planes, of, ks = self._stored_planes(refs[planar], header)
        planes_at = np.zeros((len(planar), 8), np.uint64)
        planes_at[of, ks] = self._plain_addresses(stored, planes)
        outs = batch.outs.take(rows)
        chunks = _RebuildRows(
            addresses_of(outs),
            np.zeros(len(rows), np.uint64) if batch.bases is None else addresses_of(batch.bases.take(rows)),
            outs.lengths.astype(np.int64),
            found.element_size[self.first[rows]].astype(np.uint8),
        )
        chunk_of = np.repeat(np.arange(len(rows)), batch.counts[rows])
        kinds = (_KINDS[header.transform] + header.layout).astype(np.uint8)
        step = _steps(is_sparse, batch.counts[rows])
        at = chunks.bases.copy()  # the address of the plain bytes that each chunk's next step changes; 0: none
        for i in range(int(step.max()) + 1):
            now = np.flatnonzero(step[planar] == i)
            which, _, counts = _runs(chunk_of[planar[now]])
            self._merge(chunks, which, at, (planes_at[now], kinds[now], counts))
            at[which] = chunks.outs[which]
            now = sparse[step[sparse] == i]
            which, first, counts = _runs(chunk_of[now])
            newest = np.searchsorted(self.links.refs, refs[now[first]])
            self.links.apply(newest, counts, at[which], chunks.outs[which])
            at[which] = chunks.outs[which]
        return work.digests(chunks.outs, chunks.lengths, self.digest_seed)

    def _merge(self, chunks: _RebuildRows, which: Column, bases: Column, blobs: tuple[Column, Column, Column]) -> None:
        """Begin to apply the blobs of chunks `which`: (addresses of planes (m, 8), kinds (m,), counts by chunk)."""
        if not len(which):
            return
        planes_at, kinds, counts = blobs
        tables = self.work.upload(
            planes_at,
            kinds,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64),
            bases[which],
            chunks.outs[which],
            chunks.lengths[which].astype(np.uint64),
            chunks.element_sizes[which],
        )
        tiles = -(-int(chunks.lengths[which].max()) // kernels.MERGE_TILE_BYTES)
        for i in range(0, len(which), 65_535):  # the greatest y dimension of a grid
            n = min(65_535, len(which) - i)
            shifted = [*tables[:2], *(t + 8 * i for t in tables[2:6]), tables[6] + i]
            self.work.launch("merge", (tiles, n), *shifted)

    def _stored_planes(self, refs: Column, header: blob.Headers) -> tuple[Planes, Column, Column]:
        """Find the planes of the blobs `refs`.

        Returns:
            The planes, blob after blob; the blob of each plane; and its number in the blob.

        Raises:
            IntegrityError: the planes do not fill a blob.
        """
        batch = self.batch
        sizes = header.element_size
        of, ks = np.nonzero(np.arange(8) < sizes[:, None])  # every plane, blob after blob
        plane_bytes = (header.raw_bytes // sizes)[of]
        codec = header.plane_codecs()[of, ks].astype(np.int64)
        is_raw = codec == codecs.RAW
        block_bytes = header.block_bytes[of]
        plane, within = ragged(np.where(is_raw, 1, -(-plane_bytes // block_bytes)))
        stored_sizes = plane_bytes[plane]
        stored_sizes[~is_raw[plane]] = self._block_lengths(refs, header)
        piece_of = of[plane]
        payload = np.bincount(piece_of, stored_sizes, len(refs)).astype(np.int64)
        if (payload != header.payload_bytes).any():
            bad = int(refs[np.argmax(payload != header.payload_bytes)])
            raise IntegrityError(f"{batch.where(bad)}: planes do not fill the blob; run 'snapstore check --read-data'")
        before = np.cumsum(stored_sizes) - stored_sizes
        own = before - (np.cumsum(payload) - payload)[piece_of]
        offsets = (batch.offsets[refs] + header.payload_start)[piece_of] + own
        return Planes(codec, plane_bytes, block_bytes, plane, within, offsets, stored_sizes), of, ks

    def _block_lengths(self, refs: Column, header: blob.Headers) -> Column:
        """Return the stored lengths of the blocks of all coded planes."""
        which, within = ragged(header.count)
        at = self.batch.offsets[refs][which] + blob.HEADER.size + 4 * within
        lengths: Column = items_at(self.batch.stored, at, "<u4").astype(np.int64)
        return lengths

    def _plain_addresses(self, stored: torch.Tensor, planes: Planes) -> Column:
        """Begin to decode the coded planes; return the address of every plain plane."""
        is_raw = planes.is_raw
        addresses = np.empty(len(is_raw), np.int64)
        addresses[is_raw] = stored.data_ptr() + planes.offsets[is_raw[planes.plane]]
        addresses[~is_raw] = self._decompress(stored, planes)
        return addresses

    def _decompress(self, stored: torch.Tensor, planes: Planes) -> Column:
        """Begin to decode the coded planes; return their addresses."""
        work = self.work
        coded = np.flatnonzero(~planes.is_raw)
        if not len(coded):
            return np.empty(0, np.int64)
        rooms = (planes.sizes[coded] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        starts = np.zeros(len(planes.codec), np.int64)
        starts[coded] = np.cumsum(rooms) - rooms
        plain = work.room("plain", int(rooms.sum()) + 16)
        pieces = np.flatnonzero(~planes.is_raw[planes.plane])
        of = planes.plane[pieces]
        at = planes.within[pieces] * planes.block_bytes[of]
        destinations = plain.data_ptr() + starts[of] + at
        sizes = np.minimum(planes.sizes[of] - at, planes.block_bytes[of])
        offsets, stored_sizes, codec = planes.offsets[pieces], planes.stored_sizes[pieces], planes.codec[of]
        ours = codec == HUFFMAN.codec
        ours[ours] = zstd.is_literals(self.batch.stored, offsets[ours], stored_sizes[ours], sizes[ours])
        sources = stored.data_ptr() + offsets
        huffman.decode(work, sources[ours], stored_sizes[ours], destinations[ours], sizes[ours])
        for one in np.unique(codec[~ours]).tolist():
            own = np.flatnonzero(~ours & (codec == one))
            nvcomp.decode_anywhere(work, one, sources[own], stored_sizes[own], destinations[own], sizes[own])
        addresses: Column = plain.data_ptr() + starts[coded]
        return addresses


@dataclass(frozen=True, slots=True)
class _RebuildRows:
    """Chunks to rebuild, as columns (n,): addresses, lengths and element sizes [bytes]."""

    outs: Column
    bases: Column
    lengths: Column
    element_sizes: Column


def _runs(numbers: Column) -> tuple[Column, Column, Column]:
    """Return the runs of equal numbers (m,): (number, first index, length) of each."""
    first = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]])[: len(numbers)])
    return numbers[first], first, np.diff(first, append=len(numbers))


def _steps(is_sparse: Column, counts: Column) -> Column:
    """Return the step that applies each blob, (m,): planes, then the sparse deltas that follow them.

    Args:
        is_sparse: (m,) of all blobs, chunk after chunk, newest first.
        counts: (n,) how many blobs each chunk has.
    """
    last = np.cumsum(counts) - 1
    begins = ~is_sparse
    begins[:-1] &= is_sparse[1:]
    begins[last] = True
    done = np.cumsum(begins[::-1])[::-1]  # counted from the oldest blob of the last chunk
    steps: Column = done - np.repeat(done[last], counts)
    return steps
