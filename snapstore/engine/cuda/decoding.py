"""Decoding: the stages of one batch of blobs to chunks, on one stream.

up -> headers (host) -> checksums -> Huffman, nvCOMP -> merge of chains -> digests
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...arrays import Column
from ...errors import IntegrityError
from ...format import blob, codecs
from ...format.codecs import zstd
from ..batches import DecodeBatch
from . import huffman, kernels, nvcomp
from .huffman import HUFFMAN
from .nvcomp import ANS_BLOCK_BYTES
from .pinned import ALIGNMENT
from .streams import WorkStream, addresses_of, copy_async, ragged


@dataclass(frozen=True, slots=True)
class _StoredPlanes:
    """The planes of some blobs, blob after blob, and their stored pieces: blocks, or the whole of a raw plane."""

    blob: Column  # (p,) the blob of every plane
    k: Column  # (p,) its number within the blob
    codec: Column  # (p,)
    sizes: Column  # (p,) plain bytes
    block_bytes: Column  # (p,)
    plane: Column  # (q,) the plane of every piece
    within: Column  # (q,) its number within the plane
    offsets: Column  # (q,) in the batch's stored bytes
    stored_sizes: Column  # (q,)

    @property
    def is_raw(self) -> Column:
        """Return which planes are stored as they are, (p,) bool."""
        raw: Column = self.codec == codecs.RAW
        return raw


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
        rows = np.flatnonzero(chunk_fine)
        if len(rows):
            refs = np.flatnonzero(chunk_fine[self.chunk_of])
            got = work.fetch(self._rebuild(stored, found, rows, refs))
            yield
            chunk_fine[rows] = (got.numpy() == batch.digests[rows]).all(axis=1)
        return np.flatnonzero(~chunk_fine)

    def _fits(self, found: npt.NDArray[np.void]) -> Column:
        """Return which blobs fit their chains, share element size and layout, and have codecs that a device reads."""
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
        fine &= found["layout"] == found["layout"][first][chunk_of]
        last = first + batch.counts - 1
        no_base = (found["base"][last] == 0).all(axis=1)
        if batch.bases is not None:
            no_base |= batch.bases.which >= 0
        fine[last] &= no_base
        own = np.arange(8) < found["element_size"].astype(np.int64)[:, None]
        known = np.isin(found["codecs"], (codecs.RAW, codecs.ZSTD, codecs.DEFLATE, codecs.ANS)) | ~own
        fine &= known.all(axis=1)
        coded = (own & (found["codecs"] != codecs.RAW)).sum(axis=1)
        plane_bytes = found["raw_bytes"].astype(np.int64) // np.maximum(found["element_size"], 1)
        blocks = coded * -(-plane_bytes // np.maximum(found["block_bytes"], 1))
        fine &= (blocks == found["count"]) & np.isin(found["block_bytes"], (codecs.BLOCK_BYTES, ANS_BLOCK_BYTES))
        return fine

    def _rebuild(self, stored: torch.Tensor, found: npt.NDArray[np.void], rows: Column, refs: Column) -> torch.Tensor:
        """Begin to decode and merge the chunks `rows`, whose blobs are `refs`; return their digests, (k, 16)."""
        batch, work = self.batch, self.work
        header = found[refs]
        planes = self._stored_planes(refs, header)
        table = np.zeros((len(refs), 8), np.uint64)
        table[planes.blob, planes.k] = self._plain_addresses(stored, planes)
        outs = batch.outs.take(rows)
        lengths, targets = outs.lengths.astype(np.int64), addresses_of(outs)
        firsts = np.concatenate([[0], np.cumsum(batch.counts[rows])])
        bases = np.zeros(len(rows), np.uint64) if batch.bases is None else addresses_of(batch.bases.take(rows))
        tables = work.upload(
            table,
            firsts.astype(np.uint64),
            bases,
            targets,
            lengths.astype(np.uint64),
            header["element_size"][firsts[:-1]],
            header["layout"][firsts[:-1]],
        )
        tiles = -(-int(lengths.max()) // kernels.MERGE_TILE_BYTES)
        for i in range(0, len(rows), 65_535):  # the greatest height of a grid
            n = min(65_535, len(rows) - i)
            shifted = [tables[0], tables[1] + 8 * i, *(t + 8 * i for t in tables[2:5]), *(t + i for t in tables[5:])]
            work.launch("merge", (tiles, n), *shifted)
        return work.digests(targets, lengths, self.digest_seed)

    def _stored_planes(self, refs: Column, header: npt.NDArray[np.void]) -> _StoredPlanes:
        """Find the planes of the blobs `refs` and their pieces; IntegrityError if they do not fill their blobs."""
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
        return _StoredPlanes(of, ks, codec, plane_bytes, block_bytes, plane, within, offsets, stored_sizes)

    def _block_lengths(self, refs: Column, header: npt.NDArray[np.void]) -> Column:
        """Return the stored lengths of the blocks of all coded planes."""
        counts = header["count"].astype(np.int64)
        which, within = ragged(counts)
        at = self.batch.offsets[refs][which] + blob.HEADER.size + 4 * within
        lengths: Column = self.batch.stored[at[:, None] + np.arange(4)].view("<u4").reshape(-1).astype(np.int64)
        return lengths

    def _plain_addresses(self, stored: torch.Tensor, planes: _StoredPlanes) -> Column:
        """Begin to decode the coded planes; return the addresses of all planes, plain."""
        is_raw = planes.is_raw
        addresses = np.empty(len(is_raw), np.int64)
        addresses[is_raw] = stored.data_ptr() + planes.offsets[is_raw[planes.plane]]
        addresses[~is_raw] = self._decompress(stored, planes)
        return addresses

    def _decompress(self, stored: torch.Tensor, planes: _StoredPlanes) -> Column:
        """Begin to decode every coded plane; return their addresses."""
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
