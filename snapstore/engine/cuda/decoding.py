"""Decoding: one batch of blobs on its way to chunks, on one lane.

up -> headers (host) -> checksums -> Huffman, nvCOMP -> merge of chains -> digests
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import numpy.typing as npt
import torch

from ...arrays import Column
from ...errors import IntegrityError
from ...format import blob, codecs
from ...format.codecs import zstd
from ..base import DecodeBatch
from . import huffman, kernels, nvcomp
from .huffman import HUFFMAN
from .nvcomp import ANS_BLOCK_BYTES
from .streams import ALIGNMENT, Lane, addresses_of, copy_async, ragged


class Decoding:
    """One batch on its way from blobs to chunks."""

    def __init__(self, lane: Lane, batch: DecodeBatch, digest_seed: int) -> None:
        self.lane, self.batch, self.digest_seed = lane, batch, digest_seed
        self.chunk_of = np.repeat(np.arange(len(batch.counts)), batch.counts)  # of every blob

    def run(self) -> Generator[None, None, Column]:
        """All stages, a yield where the host must wait for the device.

        Returns:
            Rows that must be rebuilt on the CPU, because they are odd, or damaged so that their error must be found:
            those as well whose bytes are not what their digest stands for.

        Raises:
            IntegrityError: planes do not fill their blob.
        """
        batch, lane = self.batch, self.lane
        found, fine = blob.read_headers(batch.stored, batch.offsets, batch.lengths)
        fine &= self._fits(found)
        length = blob.HEADER.size + 4 * found["count"].astype(np.int64) + found["payload_bytes"]
        stored = lane.room("stored", batch.stored.size)
        copy_async(stored.data_ptr(), batch.stored.ctypes.data, batch.stored.size, lane.stream)
        addresses = stored.data_ptr() + batch.offsets
        checks = lane.fetch(lane.checksums(addresses + 16, np.where(fine, length - 16, 0)))
        yield
        fine &= checks.numpy().view(np.uint64).reshape(-1) == found["checksum"]
        chunk_fine = np.bincount(self.chunk_of, ~fine, len(batch.counts)) == 0
        rows = np.flatnonzero(chunk_fine)
        if len(rows):
            refs = np.flatnonzero(chunk_fine[self.chunk_of])
            got = lane.fetch(self._rebuild(stored, found, rows, refs))
            yield
            chunk_fine[rows] = (got.numpy() == batch.digests[rows]).all(axis=1)
        return np.flatnonzero(~chunk_fine)

    def _fits(self, found: npt.NDArray[np.void]) -> Column:
        """Which blobs are what their chains want, of one element size and layout, in codecs that a device reads."""
        batch, chunk_of = self.batch, self.chunk_of
        first = np.cumsum(batch.counts) - batch.counts
        wanted = np.empty((len(chunk_of), 16), np.uint8)
        wanted[first] = batch.digests
        is_first = np.zeros(len(chunk_of), bool)
        is_first[first] = True
        follows = np.flatnonzero(~is_first)
        wanted[follows] = found["base"][follows - 1]
        fine: Column = (found["digest"] == wanted).all(axis=1)
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
        """Begin to decode and merge the chunks `rows`, whose blobs are `refs`; their digests then, (k, 16)."""
        batch, lane = self.batch, self.lane
        header = found[refs]
        sizes = header["element_size"].astype(np.int64)
        plane_bytes = header["raw_bytes"].astype(np.int64) // sizes
        of, ks = np.nonzero(np.arange(8) < sizes[:, None])  # every plane, blob after blob
        codec = header["codecs"][of, ks].astype(np.int64)
        is_raw = codec == codecs.RAW
        block_bytes = header["block_bytes"].astype(np.int64)[of]
        counts = np.where(is_raw, 1, -(-plane_bytes[of] // block_bytes))
        plane, within = ragged(counts)  # of every stored piece
        raw = is_raw[plane]
        stored_sizes = plane_bytes[of][plane]
        stored_sizes[~raw] = self._block_lengths(refs, header)
        piece_of = of[plane]
        payload = np.bincount(piece_of, stored_sizes, len(refs)).astype(np.int64)
        if (payload != header["payload_bytes"]).any():
            bad = int(refs[np.argmax(payload != header["payload_bytes"])])
            raise IntegrityError(f"{batch.where(bad)}: planes do not fill the blob; run 'snapstore check --read-data'")
        before = np.cumsum(stored_sizes) - stored_sizes
        own = before - (np.cumsum(payload) - payload)[piece_of]
        start = batch.offsets[refs] + blob.HEADER.size + 4 * header["count"].astype(np.int64)
        places = start[piece_of] + own  # of every piece in `stored`

        address = np.empty(len(of), np.int64)  # of every plane, plain
        address[is_raw] = stored.data_ptr() + places[raw]
        decoded = self._decompress(
            stored, codec, plane, within, raw, places, stored_sizes, plane_bytes[of], block_bytes
        )
        address[~is_raw] = decoded

        table = np.zeros((len(refs), 8), np.uint64)
        table[of, ks] = address
        outs = batch.outs.take(rows)
        lengths, targets = outs.lengths.astype(np.int64), addresses_of(outs)
        chunk_counts = batch.counts[rows]
        firsts = np.concatenate([[0], np.cumsum(chunk_counts)])
        bases = np.zeros(len(rows), np.uint64) if batch.bases is None else addresses_of(batch.bases.take(rows))
        tables = lane.upload(
            table, firsts.astype(np.uint64), bases, targets, lengths.astype(np.uint64),
            header["element_size"][firsts[:-1]], header["layout"][firsts[:-1]],
        )  # fmt: skip
        tiles = -(-int(lengths.max()) // kernels.MERGE_TILE_BYTES)
        for i in range(0, len(rows), 65_535):  # a grid's height
            n = min(65_535, len(rows) - i)
            shifted = [tables[0], tables[1] + 8 * i, *(t + 8 * i for t in tables[2:5]), *(t + i for t in tables[5:])]
            lane.launch("merge", (tiles, n), *shifted)
        return lane.digests(targets, lengths, self.digest_seed)

    def _block_lengths(self, refs: Column, header: npt.NDArray[np.void]) -> Column:
        """Stored lengths of the blocks of all coded planes."""
        counts = header["count"].astype(np.int64)
        which, within = ragged(counts)
        at = self.batch.offsets[refs][which] + blob.HEADER.size + 4 * within
        lengths: Column = self.batch.stored[at[:, None] + np.arange(4)].view("<u4").reshape(-1).astype(np.int64)
        return lengths

    def _decompress(
        self, stored: torch.Tensor, codec: Column, plane: Column, within: Column, raw: Column, places: Column,
        stored_sizes: Column, plane_bytes: Column, block_bytes: Column,
    ) -> Column:  # fmt: skip
        """Begin to decode every coded plane; their addresses."""
        lane = self.lane
        coded = np.flatnonzero(codec != codecs.RAW)
        if not len(coded):
            return np.empty(0, np.int64)
        rooms = (plane_bytes[coded] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        starts = np.zeros(len(codec), np.int64)
        starts[coded] = np.cumsum(rooms) - rooms
        plain = lane.room("plain", int(rooms.sum()) + 16)
        pieces = np.flatnonzero(~raw)
        of = plane[pieces]
        out_at = starts[of] + within[pieces] * block_bytes[of]
        sizes = np.minimum(plane_bytes[of] - within[pieces] * block_bytes[of], block_bytes[of])
        places, stored_sizes, codec_of = places[pieces], stored_sizes[pieces], codec[of]
        ours = codec_of == HUFFMAN.codec
        ours[ours] = zstd.is_literals(self.batch.stored, places[ours], stored_sizes[ours], sizes[ours])
        huffman.decode(
            lane, stored.data_ptr() + places[ours], stored_sizes[ours], plain.data_ptr() + out_at[ours], sizes[ours]
        )
        theirs = np.flatnonzero(~ours)
        if len(theirs):
            # compressed blocks lie at any address; nvCOMP wants 16
            aligned = (stored_sizes[theirs] + 15) // 16 * 16
            moved = np.cumsum(aligned) - aligned
            room = lane.room("aligned", int(aligned.sum()) + 16)
            lane.gather(stored.data_ptr() + places[theirs], room.data_ptr() + moved, stored_sizes[theirs])
            for one in np.unique(codec_of[theirs]).tolist():
                own = codec_of[theirs] == one
                rows = theirs[own]
                nvcomp.decode(
                    lane, one, room.data_ptr() + moved[own], stored_sizes[rows], plain.data_ptr() + out_at[rows],
                    sizes[rows],
                )  # fmt: skip
        addresses: Column = plain.data_ptr() + starts[coded]
        return addresses
