"""Encoding: the stages of one batch of chunks to blobs, on one stream.

sample -> delta or full, codecs (host) -> sparse deltas -> split of the others -> Huffman, nvCOMP -> sizes (host) ->
headers + gather -> seal
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...arrays import Bytes, Column
from ...format.blobs import blob, codecs, planes
from ...format.blobs.plane_kinds import NOISE, RUNS, SKEWED, estimates, plane_kinds
from ...format.manifests import delta_choice
from ..batches import EncodeBatch
from . import huffman, kernels, nvcomp
from .graph_capture import beside_captures
from .huffman import HUFFMAN
from .nvcomp import ANS, Coder
from .pinned import ALIGNMENT
from .sparse import Candidates, Pieces, SparseEncoding
from .streams import WorkStream, addresses_of, copy_async, copy_stream, ragged

#: The device searches a plane of mostly one value for matches only if they save at least this share of the blob.
MATCHES_SAVE = 1 / 16
#: Changes are counted if at least this share of a sample seems unchanged: one half, less the error of sampling.
MIN_UNCHANGED_SAMPLED = 0.45


@dataclass(frozen=True, slots=True)
class DeviceEncoded:
    """New blobs in device memory, one after the other; see `pack.Encoded`."""

    entries: npt.NDArray[np.void]
    blobs: torch.Tensor
    stream: torch.cuda.Stream  # on which blobs are copied

    def copy(self, first: int, last: int, out: Bytes) -> Callable[[], object]:
        """Begin to copy blobs, with their padding, into `out`."""
        begin = int(self.entries["offset"][first])
        with torch.cuda.device(self.stream.device):
            return self._copy(begin, out)

    def _copy(self, begin: int, out: Bytes) -> Callable[[], object]:
        self.blobs.record_stream(self.stream)  # torch must not reuse the memory before the copy is done
        copy_async(out.ctypes.data, self.blobs.data_ptr() + begin, out.size, self.stream)
        done, device = torch.cuda.Event(blocking=True), self.stream.device  # else each thread that waits takes a core
        done.record(self.stream)

        def wait() -> None:  # it runs in the thread that puts the pack; it keeps no blobs, whose memory is reused
            with beside_captures(), torch.cuda.device(device):
                done.synchronize()

        return wait


class Encoding:
    """One batch from chunks to blobs."""

    def __init__(self, coders: dict[int, Coder], work: WorkStream, batch: EncodeBatch, batch_bytes: int) -> None:
        self.coders, self.work, self.batch = coders, work, batch
        work.batch_bytes = batch_bytes
        self.count = len(batch.chunks)
        self.lengths = batch.chunks.lengths.astype(np.int64)
        self.sizes = batch.element_sizes.astype(np.int64)
        self.plane_bytes = self.lengths // self.sizes
        self.addresses = addresses_of(batch.chunks)
        self.base_addresses = addresses_of(batch.bases)
        self.block_bytes = ANS.block_bytes if ANS in coders.values() else codecs.BLOCK_BYTES

    def run(self) -> Generator[None, None, DeviceEncoded]:
        """Run all stages, with a yield where the host must wait for the device; return the complete blobs."""
        statistics = self.work.fetch(self.sample())
        yield
        kinds = self._choose(statistics.numpy())
        pieces = yield from self._encode_sparse(statistics.numpy())
        rows = np.flatnonzero(~self.is_sparse)
        planes_at = self._split(rows)
        begun = self._begin_codecs(np.where(self.is_sparse[:, None], NOISE, kinds), planes_at)
        yield
        encoded = self._assemble(*self._plane_pieces(rows, planes_at, begun), pieces)
        yield
        return encoded

    def _choose(self, found: npt.NDArray[np.float64]) -> Column:
        """Choose which chunks are stored as deltas, by estimated sizes; return the kind of each plane (n, 8)."""
        full, delta = (estimates(found[:, i, :, 0], self.sizes, self.plane_bytes) for i in (0, 1))
        has_base = self.base_addresses != 0
        self.is_delta = is_delta = has_base & delta_choice.pays(delta, full, self.batch.delta_limits)
        self.full_bytes, self.delta_bytes = full, delta
        bits, top_share = np.moveaxis(np.where(is_delta[:, None, None], found[:, 1], found[:, 0]), -1, 0)
        kinds = plane_kinds(bits, top_share, self.batch.layouts[:, None])
        # a Huffman code takes at least one bit per byte; below it, matches must save enough for their device time
        saved = self.plane_bytes[:, None] * (1 - bits) / 8
        worthwhile = saved > np.where(is_delta, delta, full)[:, None] * MATCHES_SAVE
        kinds = np.where((kinds == RUNS) & ~worthwhile, SKEWED, kinds)
        beyond = (np.arange(8) >= self.sizes[:, None]) | (self.plane_bytes[:, None] == 0)
        return np.where(beyond, NOISE, kinds)

    def _encode_sparse(self, found: npt.NDArray[np.float64]) -> Generator[None, None, Pieces]:
        """Encode chunks with few changes as sparse deltas; return the pieces of the deltas that pay."""
        self.is_sparse = np.zeros(self.count, bool)
        # in the lowest plane of a difference, all unchanged elements are 0, and a few changed ones
        few = (self.base_addresses != 0) & (found[:, 1, 0, 1] >= MIN_UNCHANGED_SAMPLED) & (self.lengths > 0)
        rows = np.flatnonzero(few)
        if not len(rows) or self.batch.xor:
            return Pieces.none()
        every = Candidates(
            np.arange(self.count),
            self.addresses,
            self.base_addresses,
            self.lengths,
            self.sizes,
            self.batch.layouts,
            self.full_bytes,
            self.delta_bytes,
        )
        deltas = SparseEncoding(self.work, every.take(rows))
        counted = deltas.count()
        yield
        packed = deltas.pack(counted.numpy())
        if packed is None:
            return Pieces.none()
        yield
        frames = deltas.begin_frames(packed.numpy())
        yield
        stored, rows = deltas.stored_bytes(frames.numpy()), deltas.candidates.rows
        chosen = stored < deltas.max_bytes
        chosen &= delta_choice.pays(stored, self.full_bytes[rows], self.batch.delta_limits[rows])
        self.is_sparse[rows[chosen]] = self.is_delta[rows[chosen]] = True
        return deltas.pieces(chosen)

    def sample(self) -> torch.Tensor:
        """Begin to compute entropy and skew of all planes: (n, 2, 8, 2) float64.

        The axes: chunk; itself or its difference; plane; bits per byte or share of the most frequent byte.
        """
        statistics = torch.empty((self.count, 2, 8, 2), dtype=torch.float64, device=self.work.device)
        tables = self.work.upload(
            self.addresses,
            self.base_addresses,
            self.lengths.astype(np.uint64),
            self.batch.element_sizes,
            self.batch.layouts,
        )
        self.work.launch("histograms", (self.count,), *tables, statistics, int(self.batch.xor))
        return statistics

    def _split(self, rows: Column) -> Column:
        """Begin to split chunks or differences into planes; return their offsets in `self.planes`, (n, 8).

        Args:
            rows: the chunks to split; the offsets of other chunks have no meaning.
        """
        strides = (self.plane_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        rooms = np.zeros(self.count, np.int64)
        rooms[rows] = (strides * self.sizes)[rows]
        starts = np.cumsum(rooms) - rooms
        self.planes = self.work.room("planes", int(rooms.sum()) + 16)
        columns = (
            self.addresses,
            np.where(self.is_delta, self.base_addresses, 0).astype(np.uint64),
            (self.planes.data_ptr() + starts).astype(np.uint64),
            self.lengths.astype(np.uint64),
            strides.astype(np.uint64),
            self.batch.element_sizes,
            self.batch.layouts,
        )
        if len(rows):
            tiles = -(-int(self.lengths[rows].max()) // kernels.SPLIT_TILE_BYTES)
            tables = self.work.upload(*(column[rows] for column in columns))
            self.work.launch("split", (tiles, len(rows)), *tables, int(self.batch.xor))
        at: Column = starts[:, None] + strides[:, None] * np.arange(8)
        return at

    def _begin_codecs(self, kinds: Column, planes_at: Column) -> list[_Begun]:
        """Begin to compress every plane that is not noise."""
        parts = []
        for coder in dict.fromkeys(self.coders.values()):
            of_coder = [kind for kind, c in self.coders.items() if c is coder]
            rows, ks = np.nonzero(np.isin(kinds, of_coder))
            counts = -(-self.plane_bytes[rows] // coder.block_bytes)
            if len(rows):
                parts.append((coder, rows, ks, counts))
        out = self.work.room("compressed", sum(int(counts.sum()) * coder.room_bytes for coder, _, _, counts in parts))
        begun, used = [], 0
        for coder, rows, ks, counts in parts:
            size = self.plane_bytes[rows]
            which, within = ragged(counts)
            at = within * coder.block_bytes
            plain = np.minimum(size[which] - at, coder.block_bytes)
            offsets = planes_at[rows, ks][which] + at
            rooms = used + np.arange(len(which)) * coder.room_bytes
            used += len(which) * coder.room_bytes
            sizes = self._begin_codec(coder, offsets, plain, out, rooms)
            begun.append(_Begun(coder, sizes, rows, ks, counts, size, out.data_ptr() + rooms))
        return begun

    def _begin_codec(
        self, coder: Coder, offsets: Column, plain: Column, out: torch.Tensor, rooms: Column
    ) -> Callable[[], Column]:
        """Begin to compress blocks of planes; the returned call gives their sizes once the stream is done."""
        if coder is HUFFMAN:
            found = huffman.encode(self.work, self.planes.data_ptr() + offsets, plain, out.data_ptr() + rooms)
            return lambda: found.numpy().astype(np.int64)
        begun = nvcomp.encode(self.work, coder, self.planes.data_ptr() + offsets, plain, out.data_ptr() + rooms)
        return lambda: nvcomp.sizes_of(begun)

    def _compressed(self, begun: Sequence[_Begun]) -> tuple[Column, Column, Column]:
        """Return the compressed planes.

        Returns:
            Codec and first block of each plane, both (n, 8); (address, size) of each block, (b, 2). A plane that its
            codec does not make smaller has codec RAW.
        """
        codec_of = np.full((self.count, 8), codecs.RAW, np.int64)
        first_of = np.zeros((self.count, 8), np.int64)
        blocks: list[Column] = [np.empty((0, 2), np.int64)]
        total = 0
        for b in begun:
            stored = b.sizes()
            firsts = np.cumsum(b.counts) - b.counts
            smaller = np.add.reduceat(stored, firsts) + 4 * b.counts < b.size
            codec_of[b.rows, b.ks] = np.where(smaller, b.coder.codec, codecs.RAW)
            first_of[b.rows, b.ks] = total + firsts
            blocks.append(np.stack([b.addresses, stored], axis=1))
            total += len(stored)
        return codec_of, first_of, np.concatenate(blocks)

    def _plane_pieces(self, of: Column, planes_at: Column, begun: Sequence[_Begun]) -> tuple[Column, Pieces]:
        """Return each plane's codec (n, 8), and the pieces of the chunks `of`, which are stored as planes."""
        codec_of, first_of, blocks = self._compressed(begun)
        row, ks = np.nonzero(np.arange(8) < self.sizes[of][:, None])  # every plane, blob after blob
        rows = of[row]
        codec, plane_bytes = codec_of[rows, ks], self.plane_bytes[rows]
        is_raw = codec == codecs.RAW
        counts = np.where(is_raw, 1, -(-plane_bytes // self.block_bytes))
        plane, within = ragged(counts)  # of every piece
        pieces = np.empty((len(plane), 2), np.int64)  # address, size
        raw = is_raw[plane]
        pieces[raw, 0] = self.planes.data_ptr() + planes_at[rows, ks][plane[raw]]
        pieces[raw, 1] = plane_bytes[plane[raw]]
        pieces[~raw] = blocks[first_of[rows, ks][plane[~raw]] + within[~raw]]
        self.stored_planes = np.zeros((self.count, 8), np.int64)
        self.stored_planes[rows, ks] = np.bincount(plane, pieces[:, 1], len(rows))
        return codec_of, Pieces(rows[plane], pieces[:, 0], pieces[:, 1], ~raw)

    def _assemble(self, codec_of: Column, of_planes: Pieces, of_sparse: Pieces) -> DeviceEncoded:
        """Begin to gather headers, block lengths and payloads into one buffer, then to write the checksums."""
        pieces = of_planes.joined(of_sparse)
        payload = np.bincount(pieces.rows, pieces.lengths, self.count).astype(np.int64)
        block_counts = np.bincount(pieces.rows, pieces.is_block, self.count).astype(np.int64)
        entries = np.zeros(self.count, blob.ENTRY)
        entries["length"] = blob.HEADER.size + 4 * block_counts + payload
        entries["raw_bytes"], entries["element_size"] = self.lengths, self.sizes
        entries["transform"] = np.where(self.is_delta, blob.XOR if self.batch.xor else blob.DIFFERENCE, blob.FULL)
        entries["codecs"] = np.where(np.arange(8) < self.sizes[:, None], codec_of, 0)
        entries["plane_bytes"] = self.stored_planes
        entries["codecs"][self.is_sparse] = [codecs.SPARSE] + [0] * 7
        entries["plane_bytes"][self.is_sparse, 0] = payload[self.is_sparse]
        entries["digest"] = np.ascontiguousarray(self.batch.digests).view("V16").reshape(-1)
        base = np.where(self.is_delta[:, None], self.batch.base_digests, 0).astype(np.uint8)
        entries["base"] = np.ascontiguousarray(base).view("V16").reshape(-1)
        rooms = (entries["length"].astype(np.int64) + blob.ALIGNMENT - 1) // blob.ALIGNMENT * blob.ALIGNMENT
        offsets = np.cumsum(rooms) - rooms
        entries["offset"] = offsets

        is_planar = self.is_delta & ~self.is_sparse & (not self.batch.xor)  # planes of a difference
        layouts = np.where(is_planar, planes.BYTES, self.batch.layouts)
        block_bytes = np.where(self.is_sparse, codecs.BLOCK_BYTES, self.block_bytes)
        headers, starts = blob.headers(entries, layouts, block_bytes, block_counts, pieces.lengths[pieces.is_block])
        out = self.work.large(int(rooms.sum())).zero_()  # padding is zero
        (headers_at,) = self.work.upload(headers)
        before = np.cumsum(pieces.lengths) - pieces.lengths  # payload bytes before a piece, in all blobs
        own = before - (np.cumsum(payload) - payload)[pieces.rows]
        places = (offsets + np.diff(starts))[pieces.rows] + own
        self.work.gather(
            np.concatenate([headers_at + starts[:-1], pieces.addresses]),
            out.data_ptr() + np.concatenate([offsets, places]),
            np.concatenate([np.diff(starts), pieces.lengths]),
        )
        covered = out.data_ptr() + offsets + 16
        self.work.seal(covered, entries["length"].astype(np.int64) - 16)
        return DeviceEncoded(entries, out, copy_stream(self.work.device))


@dataclass(frozen=True, slots=True)
class _Begun:
    """Planes that one coder compresses."""

    coder: Coder
    sizes: Callable[[], Column]  # (b,) stored bytes of every block
    rows: Column  # (p,) the chunk of each plane
    ks: Column  # (p,) the number of each plane within its chunk
    counts: Column  # (p,) the number of blocks of each plane
    size: Column  # (p,) plain bytes of each plane
    addresses: Column  # (b,) of every compressed block
