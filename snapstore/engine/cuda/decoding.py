"""Decoding: the stages of one batch of blobs to chunks, on one stream.

up -> headers (host) -> checksums -> Huffman, nvCOMP -> merge of planes, sparse deltas -> digests
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...arrays import Column, items_at
from ...errors import IntegrityError
from ...format import blob, codecs
from ...format.codecs import zstd
from ..batches import DecodeBatch
from . import huffman, kernels, nvcomp
from .huffman import HUFFMAN
from .nvcomp import ANS_BLOCK_BYTES
from .pinned import ALIGNMENT
from .sparse import SparseLinks, Streams
from .streams import WorkStream, addresses_of, copy_async, ragged

#: The kind of planes that hold a difference, for `merge`; those of full chunks are their layouts.
_DIFFERENCE = 2


class Decoding:
    """One batch from blobs to chunks."""

    def __init__(self, work: WorkStream, batch: DecodeBatch, digest_seed: int) -> None:
        self.work, self.batch, self.digest_seed = work, batch, digest_seed
        work.batch_bytes = 0
        self.chunk_of = np.repeat(np.arange(len(batch.counts)), batch.counts)  # the chunk of every blob

    def run(self) -> Generator[None, None, Column]:
        """Run all stages, with a yield where the host must wait for the device.

        Returns:
            The rows that the CPU must rebuild: the device does not read their form, or they are damaged and the CPU
            must find the error. A chunk whose bytes do not have its digest is one of them.

        Raises:
            IntegrityError: planes do not fill their blob.
        """
        batch, work = self.batch, self.work
        found, fine = blob.read_headers(batch.stored, batch.offsets, batch.lengths)
        fine &= self._fits(found)
        length = blob.HEADER.size + 4 * found["count"].astype(np.int64) + found["payload_bytes"]
        stored = work.room("stored", batch.stored.size)
        copy_async(stored.data_ptr(), batch.stored.ctypes.data, batch.stored.size, work.stream)
        addresses = stored.data_ptr() + batch.offsets
        checks = work.fetch(work.checksums(addresses + 16, np.where(fine, length - 16, 0)))
        yield
        fine &= checks.numpy().view(np.uint64).reshape(-1) == found["checksum"]
        chunk_fine = np.bincount(self.chunk_of, ~fine, len(batch.counts)) == 0
        self.links = self._read_links(found, chunk_fine)
        rows = np.flatnonzero(chunk_fine)
        if len(rows):
            refs = np.flatnonzero(chunk_fine[self.chunk_of])
            got = work.fetch(self._rebuild(stored, found, rows, refs))
            bad = None if self.bad is None else work.fetch(self.bad)
            yield
            chunk_fine[rows] = (got.numpy() == batch.digests[rows]).all(axis=1)
            if bad is not None:
                chunk_fine[self.chunk_of[refs[self.is_sparse[refs]]][bad.numpy() != 0]] = False
        return np.flatnonzero(~chunk_fine)

    def _fits(self, found: npt.NDArray[np.void]) -> Column:
        """Return which blobs fit their chains, share their element size, and have codecs that a device reads."""
        batch, chunk_of = self.batch, self.chunk_of
        first = np.cumsum(batch.counts) - batch.counts
        expected = np.empty((len(chunk_of), 16), np.uint8)
        expected[first] = batch.digests
        is_first = np.zeros(len(chunk_of), bool)
        is_first[first] = True
        follows = np.flatnonzero(~is_first)
        expected[follows] = found["base"][follows - 1]
        fine: Column = (found["digest"] == expected).all(axis=1)
        fine &= found["raw_bytes"] == batch.outs.lengths[chunk_of]
        fine &= found["element_size"] == found["element_size"][first][chunk_of]
        last = first + batch.counts - 1
        is_full = np.zeros(len(chunk_of), bool)
        is_full[last] = batch.bases is None or batch.bases.which < 0
        fine &= is_full == (found["transform"] == blob.FULL)
        fine &= is_full == (found["base"] == 0).all(axis=1)
        self.is_sparse = found["codecs"][:, 0] == codecs.SPARSE
        own = np.arange(8) < found["element_size"].astype(np.int64)[:, None]
        known = np.isin(found["codecs"], (codecs.RAW, codecs.ZSTD, codecs.DEFLATE, codecs.ANS)) | ~own
        coded = (own & (found["codecs"] != codecs.RAW)).sum(axis=1)
        plane_bytes = found["raw_bytes"].astype(np.int64) // np.maximum(found["element_size"], 1)
        blocks = coded * -(-plane_bytes // np.maximum(found["block_bytes"], 1))
        sparse = ~is_full & (found["codecs"][:, 1:] == 0).all(axis=1)
        fine &= np.where(self.is_sparse, sparse, known.all(axis=1) & (blocks == found["count"]))
        fine &= np.isin(found["block_bytes"], (codecs.BLOCK_BYTES, ANS_BLOCK_BYTES))
        return fine

    def _read_links(self, found: npt.NDArray[np.void], chunk_fine: Column) -> SparseLinks:
        """Read the tables of sparse deltas; chunks that need one which is not fine are no longer."""
        while True:  # again without the ones of bad tables, then of bad frames
            refs = np.flatnonzero(chunk_fine[self.chunk_of] & self.is_sparse)
            links = SparseLinks(self.batch.stored, self.batch.offsets[refs], found[refs])
            chunk_fine[self.chunk_of[refs[~links.fine]]] = False
            if links.fine.all():
                return links

    def _rebuild(self, stored: torch.Tensor, found: npt.NDArray[np.void], rows: Column, refs: Column) -> torch.Tensor:
        """Begin to decode and merge the chunks `rows`, whose blobs are `refs`; return their digests, (k, 16)."""
        batch, work = self.batch, self.work
        is_sparse = self.is_sparse[refs]
        planar = np.flatnonzero(~is_sparse)
        header = found[refs]
        streams, of, ks = self._stored_planes(refs[planar], header[planar])
        coded = streams if self.links.streams is None else streams.joined(self.links.streams)
        addresses = self._plain_addresses(stored, coded)
        planes_at = np.zeros((len(refs), 8), np.uint64)
        planes_at[planar[of], ks] = addresses[: len(of)]
        outs = batch.outs.take(rows)
        chunks = _Rows(
            addresses_of(outs),
            np.zeros(len(rows), np.uint64) if batch.bases is None else addresses_of(batch.bases.take(rows)),
            outs.lengths.astype(np.int64),
            header["element_size"][np.cumsum(batch.counts[rows]) - batch.counts[rows]],
        )
        self.bad = None
        chunk_of = np.repeat(np.arange(len(rows)), batch.counts[rows])
        if self.links.count:
            self.bad = self.links.unpack(work, stored.data_ptr(), addresses[len(of) :])
        kinds = np.where(header["transform"] == blob.FULL, header["layout"], _DIFFERENCE).astype(np.uint8)
        number = np.cumsum(is_sparse) - 1  # of every sparse delta among them
        step = _steps(is_sparse, batch.counts[rows])
        at = chunks.bases.copy()  # the plain bytes that each chunk's next step changes; 0: none
        for i in range(int(step.max()) + 1):
            now = np.flatnonzero((step == i) & ~is_sparse)
            which, counts = np.unique(chunk_of[now], return_counts=True)
            self._merge(chunks, which, at, (planes_at[now], kinds[now], counts))
            at[which] = chunks.outs[which]
            now = np.flatnonzero((step == i) & is_sparse)
            which, first, counts = np.unique(chunk_of[now], return_index=True, return_counts=True)
            self.links.apply(work, number[now[first]], counts, at[which], chunks.outs[which])
            at[which] = chunks.outs[which]
        return work.digests(chunks.outs, chunks.lengths, self.digest_seed)

    def _merge(self, chunks: _Rows, which: Column, bases: Column, blobs: tuple[Column, Column, Column]) -> None:
        """Begin to add up blobs of the chunks `which`: addresses of planes (m, 8), kinds (m,), and counts by chunk."""
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
        for i in range(0, len(which), 65_535):  # the greatest height of a grid
            n = min(65_535, len(which) - i)
            shifted = [*tables[:2], *(t + 8 * i for t in tables[2:6]), tables[6] + i]
            self.work.launch("merge", (tiles, n), *shifted)

    def _stored_planes(self, refs: Column, header: npt.NDArray[np.void]) -> tuple[Streams, Column, Column]:
        """Find the planes of the blobs `refs`; IntegrityError if they do not fill their blobs.

        Returns:
            The planes, blob after blob; the blob of each, and its number there.
        """
        batch = self.batch
        sizes = header["element_size"].astype(np.int64)
        of, ks = np.nonzero(np.arange(8) < sizes[:, None])  # every plane, blob after blob
        plane_bytes = (header["raw_bytes"].astype(np.int64) // sizes)[of]
        codec = header["codecs"][of, ks].astype(np.int64)
        is_raw = codec == codecs.RAW
        block_bytes = header["block_bytes"].astype(np.int64)[of]
        plane, within = ragged(np.where(is_raw, 1, -(-plane_bytes // block_bytes)))
        stored_sizes = plane_bytes[plane]
        stored_sizes[~is_raw[plane]] = self._block_lengths(refs, header)
        piece_of = of[plane]
        payload = np.bincount(piece_of, stored_sizes, len(refs)).astype(np.int64)
        if (payload != header["payload_bytes"]).any():
            bad = int(refs[np.argmax(payload != header["payload_bytes"])])
            raise IntegrityError(f"{batch.where(bad)}: planes do not fill the blob; run 'snapstore check --read-data'")
        before = np.cumsum(stored_sizes) - stored_sizes
        own = before - (np.cumsum(payload) - payload)[piece_of]
        start = batch.offsets[refs] + blob.HEADER.size + 4 * header["count"].astype(np.int64)
        offsets = start[piece_of] + own
        return Streams(codec, plane_bytes, block_bytes, plane, within, offsets, stored_sizes), of, ks

    def _block_lengths(self, refs: Column, header: npt.NDArray[np.void]) -> Column:
        """Return the stored lengths of the blocks of all coded planes."""
        counts = header["count"].astype(np.int64)
        which, within = ragged(counts)
        at = self.batch.offsets[refs][which] + blob.HEADER.size + 4 * within
        lengths: Column = items_at(self.batch.stored, at, "<u4").astype(np.int64)
        return lengths

    def _plain_addresses(self, stored: torch.Tensor, streams: Streams) -> Column:
        """Begin to decode the coded streams; return the addresses of all streams, plain."""
        is_raw = streams.is_raw
        addresses = np.empty(len(is_raw), np.int64)
        addresses[is_raw] = stored.data_ptr() + streams.offsets[is_raw[streams.stream]]
        addresses[~is_raw] = self._decompress(stored, streams)
        return addresses

    def _decompress(self, stored: torch.Tensor, streams: Streams) -> Column:
        """Begin to decode every coded stream; return their addresses."""
        work = self.work
        coded = np.flatnonzero(~streams.is_raw)
        if not len(coded):
            return np.empty(0, np.int64)
        rooms = (streams.sizes[coded] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        starts = np.zeros(len(streams.codec), np.int64)
        starts[coded] = np.cumsum(rooms) - rooms
        plain = work.room("plain", int(rooms.sum()) + 16)
        pieces = np.flatnonzero(~streams.is_raw[streams.stream])
        of = streams.stream[pieces]
        at = streams.within[pieces] * streams.block_bytes[of]
        destinations = plain.data_ptr() + starts[of] + at
        sizes = np.minimum(streams.sizes[of] - at, streams.block_bytes[of])
        offsets, stored_sizes, codec = streams.offsets[pieces], streams.stored_sizes[pieces], streams.codec[of]
        ours = codec == HUFFMAN.codec
        ours[ours] = zstd.is_literals(self.batch.stored, offsets[ours], stored_sizes[ours], sizes[ours])
        sources = stored.data_ptr() + offsets
        huffman.decode(work, sources[ours], stored_sizes[ours], destinations[ours], sizes[ours])
        theirs = np.flatnonzero(~ours)
        if len(theirs):
            # compressed blocks lie at any address; nvCOMP needs multiples of 16
            aligned = (stored_sizes[theirs] + 15) // 16 * 16
            moved = np.cumsum(aligned) - aligned
            room = work.room("aligned", int(aligned.sum()) + 16)
            work.gather(sources[theirs], room.data_ptr() + moved, stored_sizes[theirs])
            for one in np.unique(codec[theirs]).tolist():
                own = codec[theirs] == one
                rows = theirs[own]
                nvcomp.decode(
                    work, one, room.data_ptr() + moved[own], stored_sizes[rows], destinations[rows], sizes[rows]
                )
        addresses: Column = plain.data_ptr() + starts[coded]
        return addresses


@dataclass(frozen=True, slots=True)
class _Rows:
    """Chunks to rebuild, as columns (n,): addresses, sizes in bytes, and element sizes."""

    outs: Column
    bases: Column
    lengths: Column
    element_sizes: Column


def _steps(is_sparse: Column, counts: Column) -> Column:
    """Return in which step each blob is applied, (m,): planes, then the sparse deltas that follow them.

    Args:
        is_sparse: (m,) of all blobs, newest first, chunk after chunk.
        counts: (n,) blobs of each chunk.
    """
    last = np.cumsum(counts) - 1
    begins = ~is_sparse
    begins[:-1] &= is_sparse[1:]
    begins[last] = True
    done = np.cumsum(begins[::-1])[::-1]  # from the oldest blob of the last chunk on
    steps: Column = done - np.repeat(done[last], counts)
    return steps
