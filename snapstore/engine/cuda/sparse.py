"""Sparse deltas on the device: codec 3 of docs/format.md. Its streams of symbols are zstd frames, as in planes.

Encode: counts by key, groups (sparse_count.cu) -> ranks and differences of changed elements (sparse_rank.cu) -> table,
symbols and low parts (sparse_pack.cu) -> frames. The groups and symbols equal the CPU engine's, bit for bit.
Decode: group tables (sparse_tables.cu) -> memory (host, sparse_place.cu) -> frames -> ranks and differences of changed
elements (sparse_unpack.cu) -> the chunk, from its base and all consecutive sparse links at once (sparse_apply.cu).
Kernels check everything that a blob declares. The CPU engine rebuilds an inconsistent blob, and finds the error.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from ...arrays import Bytes, Column, items_at
from ...format.blobs import blob, codecs
from ...format.blobs.codecs.sparse import COUNT, ENDS_FRAMES, GROUP, worth_trying
from ...format.manifests.delta_choice import FEW_CHANGED_EXCESS, FEW_CHANGED_SHARE
from ..batches import DecodeBatch
from . import huffman, kernels, nvcomp
from .streams import WorkStream, ragged

#: The structs Stored and Needs of sparse_tables.cu.
_STORED = np.dtype(
    [
        *((name, "<u8") for name in ("payload", "payload_bytes", "lengths", "elements")),
        *((name, "<u4") for name in ("first_group", "groups", "first_frame", "frames", "block_bytes")),
        ("element_size", "u1"),
        ("layout", "u1"),
        ("unused", "<u2"),
    ]
)
_NEEDS = np.dtype([("streams", "<u8"), ("changes", "<u8"), ("others", "<u4"), ("fine", "<u4")])
#: The structs of sparse.cuh and of sparse_apply.cu: Blob, Group; Chain; Counted, CountedGroup, Job.
_BLOB_BYTES, _GROUP_BYTES = 48, 64
_CHAIN = np.dtype(
    [("base", "<u8"), ("out", "<u8"), ("oldest", "<u4"), ("links", "<u4"), ("block", "<u4"), ("blocks", "<u4")]
)
_COUNTED = np.dtype([("changed", "<u4"), ("groups", "<u4"), ("listed", "<u4"), ("unused", "<u4")])
_COUNTED_GROUP_BYTES = 16
_ADDRESSES = ("ranks", "zigzag", "found", "symbols", "values")
_JOB = np.dtype(
    [
        *((name, "<u8") for name in ("chunk", "base", "elements", "groups", *_ADDRESSES, "table", "low", "low_room")),
        ("group_count", "<u4"),
        ("element_size", "u1"),
        ("layout", "u1"),
        ("unused", "<u2"),
    ]
)
_MAX_GROUPS = 256
#: If ranks and differences of changes take this many bytes, they are as much effort as one more link of a 1 MiB chunk.
_BYTES_PER_LINK = 90_000
#: About `_BLOCKS` thread blocks per multiprocessor apply sparse deltas: twice as many as run at the same time. With
#: fewer, most of the device would wait for the last ones. At most `_MOST_BLOCKS` share a chunk, each with the effort of
#: at least `_MIN_EFFORT` links. Blocks of a chunk wait for each other. So a chunk gets at most one block per 16
#: multiprocessors: then some blocks can go on even if many batches share the device.
_BLOCKS, _MOST_BLOCKS, _MIN_EFFORT, _MULTIPROCESSORS_PER_BLOCK = 4, 8, 4, 16


class SparseLinks:
    """Sparse deltas of one batch. Call `place`, `unpack` and `apply` in this order.

    Attributes:
        refs: (k,) their numbers in the batch, ascending.
        fine: (k,) bool, whether the table of each is valid; set by `place`.
        bad: (k,) int32 on the device, not 0 if the payload or the base contradicts the table; valid after `apply`.
    """

    def __init__(self, work: WorkStream, batch: DecodeBatch, at: int, headers: blob.Headers, refs: Column) -> None:
        """Begin to read the tables of the blobs `refs`.

        Args:
            at: the device address of the batch's stored bytes.
            headers: of all blobs of the batch, (m,); those of `refs` are valid, with codec 3.
            refs: (k,) the numbers of the blobs, ascending.
        """
        self._work, self.refs, self.fine = work, refs, np.ones(len(refs), bool)
        self.bad = work.empty(4 * len(refs))[: 4 * len(refs)].zero_().view(torch.int32)
        if not len(refs):
            return
        header, starts = headers.take(refs), batch.offsets[refs]
        payload_at, frames = starts + header.payload_start, header.count
        elements = header.raw_bytes // np.maximum(header.element_size, 1)
        has_table = (header.payload_bytes >= COUNT.size) & (elements <= codecs.sparse.MAX_ELEMENTS)
        groups = items_at(batch.stored, np.where(has_table, payload_at, 0), "<u4").astype(np.int64)
        has_table &= (groups >= 1) & (groups <= _MAX_GROUPS)
        has_table &= COUNT.size + GROUP.itemsize * groups <= header.payload_bytes
        groups[~has_table] = 0
        jobs = np.zeros(len(refs), _STORED)
        jobs["payload"], jobs["payload_bytes"] = at + payload_at, header.payload_bytes
        jobs["lengths"], jobs["elements"] = at + starts + blob.HEADER.size, elements
        jobs["groups"], jobs["frames"] = groups, frames
        jobs["first_group"], jobs["first_frame"] = np.cumsum(groups) - groups, np.cumsum(frames) - frames
        for name in ("block_bytes", "element_size", "layout"):
            jobs[name] = getattr(header, name)
        self._groups, self._frames, self._header = int(groups.sum()), int(frames.sum()), header
        needs = work.empty(len(refs) * _NEEDS.itemsize)[: len(refs) * _NEEDS.itemsize]
        self._tables = work.empty(len(refs) * _BLOB_BYTES), work.empty(self._groups * _GROUP_BYTES)
        self._columns = work.empty(4 * 8 * self._frames)[: 4 * 8 * self._frames]  # see `unpack`
        self._columns_at = [self._columns.data_ptr() + 8 * self._frames * i for i in range(4)]
        (table,) = work.upload(jobs)
        work.launch("sparse_tables", (len(refs),), table, needs, *self._tables, *self._columns_at)
        self._needs = work.fetch(needs)

    def place(self) -> torch.Tensor | None:
        """Allocate memory, once the device has read the tables.

        Returns:
            The table of frames in pinned memory, if nvCOMP must decode some; valid once the device is done again.
        """
        if not len(self.refs):
            return None
        work, needs = self._work, self._needs.numpy().view(_NEEDS)
        self.fine = needs["fine"] != 0
        places = []
        for name, room in (("streams", "symbols"), ("changes", "sparse")):
            sizes = needs[name].astype(np.int64)
            places.append(work.room(room, int(sizes.sum()) + 16).data_ptr() + np.cumsum(sizes) - sizes)
        work.launch("sparse_place", (len(self.refs),), *work.upload(*places), *self._tables, self._columns_at[2])
        return work.fetch(self._columns) if needs["others"].any() else None

    def unpack(self, frames: torch.Tensor | None, sound: Column) -> None:
        """Begin to unpack all blobs.

        Args:
            frames: from `place`.
            sound: (m,) bool, which blobs of the batch match their checksums; nvCOMP gets only their frames.
        """
        if not len(self.refs):
            return
        work = self._work
        work.launch("huffman_decode", (self._frames,), *self._columns_at)
        if frames is not None:
            sources, sizes, destinations, lengths = frames.numpy().view(np.int64).reshape(4, -1)
            others = (sizes < 0) & np.repeat(sound[self.refs], self._header.count)
            blocks = (sources, sizes & 0xFFFFFFFF, destinations, lengths)
            nvcomp.decode_anywhere(work, codecs.ZSTD, *(column[others] for column in blocks))
        lows = work.empty(16 * self._groups)
        work.launch("sparse_lows", (self._groups,), *self._tables, lows)
        work.launch("sparse_unpack", (self._groups,), *self._tables, lows, self.bad)

    def apply(self, newest: Column, links: Column, bases: Column, outs: Column) -> None:
        """Begin to apply consecutive sparse deltas to plain bases.

        Args:
            newest: (j,) for each chunk, the index in `refs` of the newest delta to apply; the older ones follow it.
            links: (j,) how many deltas to apply to each chunk.
            bases, outs: (j,) addresses; they may be equal.
        """
        if not len(newest):
            return
        chains = np.zeros(len(newest), _CHAIN)
        chains["base"], chains["out"], chains["oldest"], chains["links"] = bases, outs, newest + links - 1, links
        until = np.concatenate([[0.0], np.cumsum(1 + self._needs.numpy().view(_NEEDS)["changes"] / _BYTES_PER_LINK)])
        effort = until[newest + links] - until[newest]
        size, nbytes = (column[newest] for column in (self._header.element_size, self._header.raw_bytes))
        tiles = -(-nbytes // (kernels.apply_tile_bytes(self._work.device.index) // np.where(size == 1, 2, 1)))
        chains["blocks"] = blocks = np.minimum(blocks_of(effort, self._work.device), np.maximum(1, tiles))
        order = np.lexsort((-effort / blocks, size))  # of each element size, the longest work begins first
        chain, block = ragged(blocks[order])
        chains, size = chains[order][chain], size[order][chain]
        chains["block"] = block
        (table,) = self._work.upload(chains)
        begun = self._work.empty(4 * len(kernels.APPLY))[: 4 * len(kernels.APPLY)].zero_()
        for i, (name, own) in enumerate(kernels.APPLY.items()):
            first, end = np.searchsorted(size, (own, own + 1)).tolist()
            at = table + first * _CHAIN.itemsize, begun.data_ptr() + 4 * i
            self._work.launch(name, (end - first,), *at, *self._tables, self.bad)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def blocks_of(effort: npt.NDArray[np.float64], device: torch.device) -> Column:
    """Return how many thread blocks share each chunk, by its effort (n,) [links].

    A chunk gets several if it is more effort than the share of one block in all chunks.
    """
    count = _multiprocessors(device)
    most = max(1, min(_MOST_BLOCKS, count // _MULTIPROCESSORS_PER_BLOCK))
    share = max(_MIN_EFFORT, effort.sum() / (_BLOCKS * count))
    blocks: Column = np.clip(effort / share, 1, most).astype(np.int64)
    return blocks


# -- encode


@dataclass(frozen=True, slots=True)
class Candidates:
    """Chunks that may be stored as sparse deltas, as columns (n,)."""

    rows: Column  # their numbers in the batch
    addresses: Column
    bases: Column  # addresses
    lengths: Column
    element_sizes: Column
    layouts: Column
    full_bytes: Column  # estimated stored bytes of the chunk in planes
    delta_bytes: Column  # estimated stored bytes of the difference in planes

    def take(self, which: Column) -> Candidates:
        """Return these rows."""
        return Candidates(*(getattr(self, field.name)[which] for field in fields(self)))

    @property
    def elements(self) -> Column:
        """Return how many elements each has."""
        return self.lengths // self.element_sizes


class SparseEncoding:
    """Encodes candidates as sparse deltas, without header, block lengths and checksum.

    Call `count`, `pack`, `begin_frames` and `stored_bytes` in this order, each once the device is done with the
    previous one. `pack` and `begin_frames` drop candidates; `candidates` holds the others.
    """

    def __init__(self, work: WorkStream, candidates: Candidates) -> None:
        self.work, self.candidates = work, candidates

    def count(self) -> torch.Tensor:
        """Begin to count changes and form groups; return the counts, in pinned memory."""
        chunks, n = self.candidates, len(self.candidates.rows)
        self._groups = self.work.empty(n * _MAX_GROUPS * _COUNTED_GROUP_BYTES)
        counted = self.work.empty(n * _COUNTED.itemsize)
        tables = self.work.upload(
            *(c.astype(np.uint64) for c in (chunks.addresses, chunks.bases, chunks.elements)),
            *(c.astype(np.uint8) for c in (chunks.element_sizes, chunks.layouts)),
        )
        self.work.launch("sparse_count", (n,), *tables, counted, self._groups)
        return self.work.fetch(counted[: n * _COUNTED.itemsize])

    def pack(self, counted: Bytes) -> torch.Tensor | None:
        """Begin to encode candidates with few changes, without frames; return their tables.

        Args:
            counted: from `count`.

        Returns:
            Pinned memory, valid once the stream is done; None if no candidate has few changes.
        """
        counts = counted.view(_COUNTED)
        which = np.flatnonzero(worth_trying(counts["changed"], self.candidates.elements))
        groups_at = self._groups.data_ptr() + which * _MAX_GROUPS * _COUNTED_GROUP_BYTES
        chunks, counts = self.candidates.take(which), counts[which]
        self.candidates, n = chunks, len(which)
        if not n:
            return None
        size, listed = chunks.element_sizes, counts["listed"].astype(np.int64)
        self.counts = counts["groups"].astype(np.int64)
        few = counts["changed"] <= FEW_CHANGED_SHARE * chunks.elements
        planes_bytes = np.minimum(chunks.full_bytes, chunks.delta_bytes * np.where(few, FEW_CHANGED_EXCESS, 1))
        most = np.minimum(planes_bytes + blob.HEADER.size, blob.bound(chunks.lengths, size))
        self.max_bytes = np.ceil(most).astype(np.int64)  # the blobs must be smaller
        low = np.minimum(listed * (8 + 2 * size) + 8, self.max_bytes)
        tables = COUNT.size + GROUP.itemsize * self.counts
        self.summary_bytes = -(-8 * n // 16) * 16
        self.tables_at, tables_bytes = _places(tables)
        low_at, low_bytes = _places(low)
        frames = -(-2 * listed // codecs.BLOCK_BYTES) + 2 * self.counts
        frame_bytes = int((2 * listed + 32 * frames).sum())  # a frame has up to 16 bytes more than its symbols
        self.kept = self.work.room("sparse", self.summary_bytes + tables_bytes + low_bytes + frame_bytes + 16)
        self.tables_at += self.kept.data_ptr() + self.summary_bytes
        self.low_at = low_at + self.kept.data_ptr() + self.summary_bytes + tables_bytes
        self.frames_at = self.kept.data_ptr() + self.summary_bytes + tables_bytes + low_bytes
        jobs = self.jobs = np.zeros(n, _JOB)
        jobs["chunk"], jobs["base"], jobs["elements"] = chunks.addresses, chunks.bases, chunks.elements
        jobs["element_size"], jobs["layout"], jobs["group_count"] = size, chunks.layouts, self.counts
        jobs["groups"], jobs["table"], jobs["low"], jobs["low_room"] = groups_at, self.tables_at, self.low_at, low
        rooms = np.stack([4 * listed, size * listed, size * listed, listed, listed], axis=1)
        places, scratch = _places(rooms.reshape(-1))
        places += self.work.room("compressed", scratch + 16).data_ptr()
        for name, column in zip(_ADDRESSES, places.reshape(n, 5).T, strict=True):
            jobs[name] = column
        (table,) = self.work.upload(jobs)
        self.work.launch("sparse_rank", (n,), table)
        self.work.launch("sparse_pack", (n,), table, self.kept)
        return self.work.fetch(self.kept[: self.summary_bytes + tables_bytes])

    def begin_frames(self, packed: Bytes) -> torch.Tensor:
        """Begin to make the frames; return their sizes, in pinned memory.

        Args:
            packed: from `pack`.
        """
        low_bytes = packed[: 8 * len(self.jobs)].view(np.int64)
        which = np.flatnonzero(low_bytes >= 0)
        self.candidates, self.jobs, self.low_bytes = self.candidates.take(which), self.jobs[which], low_bytes[which]
        self.counts, self.tables_at, self.max_bytes = self.counts[which], self.tables_at[which], self.max_bytes[which]
        of, within = ragged(self.counts)
        at = (self.tables_at - self.kept.data_ptr() + COUNT.size)[of] + GROUP.itemsize * within
        groups = items_at(packed, at, GROUP)
        ends = groups["flags"] == ENDS_FRAMES
        run = np.cumsum(ends) - ends
        sizes, starts = (np.empty((int(ends.sum()), 2), np.int64) for _ in range(2))
        for k, (name, room) in enumerate((("gaps", "symbols"), ("values", "values"))):
            sizes[:, k] = np.bincount(run, groups[name], len(sizes)).astype(np.int64)
            before = np.cumsum(sizes[:, k]) - sizes[:, k]
            of_run = of[ends]
            first = np.concatenate([[True], np.diff(of_run) > 0])[: len(of_run)]
            own = before - before[first][np.cumsum(first) - 1]
            starts[:, k] = self.jobs[room].astype(np.int64)[of_run] + own
        stream, number = ragged(-(-sizes.reshape(-1) // codecs.BLOCK_BYTES))
        at = number * codecs.BLOCK_BYTES
        lengths = np.minimum(sizes.reshape(-1)[stream] - at, codecs.BLOCK_BYTES)
        self.frame_of = np.repeat(of[ends], 2)[stream]
        places, _ = _places(lengths + 16)
        self.frames = self.frames_at + places
        return huffman.encode(self.work, starts.reshape(-1)[stream] + at, lengths, self.frames)

    def stored_bytes(self, sizes: npt.NDArray[np.int32]) -> Column:
        """Return the size of the blob of each candidate that is left, (n,).

        Args:
            sizes: from `begin_frames`.
        """
        self.frame_sizes = sizes.astype(np.int64)
        self.table_bytes = COUNT.size + GROUP.itemsize * self.counts
        frames = np.bincount(self.frame_of, self.frame_sizes + 4, len(self.jobs)).astype(np.int64)
        found: Column = blob.HEADER.size + self.table_bytes + self.low_bytes + frames
        return found

    def pieces(self, chosen: Column) -> Pieces:
        """Return pieces of the blobs `chosen`, (n,) bool."""
        n = len(self.jobs)
        job = np.concatenate([np.arange(n), self.frame_of, np.arange(n)])
        order = np.argsort(job, kind="stable")
        order = order[chosen[job[order]]]
        addresses = np.concatenate([self.tables_at, self.frames, self.jobs["low"].astype(np.int64)])
        is_block = np.concatenate([np.zeros(n, bool), np.ones(len(self.frames), bool), np.zeros(n, bool)])
        lengths = np.concatenate([self.table_bytes, self.frame_sizes, self.low_bytes])
        return Pieces(self.candidates.rows[job[order]], addresses[order], lengths[order], is_block[order])


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of the payloads of blobs in device memory, blob after blob, as columns (p,)."""

    rows: Column  # the chunk of each piece
    addresses: Column
    lengths: Column
    is_block: Column  # whether its length is one of the block lengths in the blob's header

    @staticmethod
    def none() -> Pieces:
        """Return no pieces."""
        nothing = np.empty(0, np.int64)
        return Pieces(nothing, nothing, nothing, np.empty(0, bool))

    def joined(self, others: Pieces) -> Pieces:
        """Return these pieces and others, by chunk."""
        rows = np.concatenate([self.rows, others.rows])
        order = np.argsort(rows, kind="stable")
        columns = ((self.addresses, others.addresses), (self.lengths, others.lengths), (self.is_block, others.is_block))
        addresses, lengths, is_block = (np.concatenate(pair)[order] for pair in columns)
        return Pieces(rows[order], addresses, lengths, is_block)


def _places(sizes: Column) -> tuple[Column, int]:
    """Return the starts of memory of these sizes, laid out at multiples of 16; and the total size."""
    rooms = -(-sizes // 16) * 16
    ends = np.cumsum(rooms)
    return ends - rooms, int(ends[-1]) if len(ends) else 0
