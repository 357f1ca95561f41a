"""Sparse deltas on the device: codec 3 of docs/format.md, whose streams of symbols are zstd frames as planes have them.

Encode: counts by key, groups (sparse_count.cu) -> ranks and differences of changed elements (sparse_rank.cu) -> table,
symbols and low parts (sparse_pack.cu) -> frames. The groups and symbols are the CPU engine's, bit for bit.
Decode: group tables (host) -> frames -> ranks and differences of changed elements (sparse_unpack.cu) -> the chunk, of
its base and all neighbouring links at once (sparse_apply.cu). Host code checks the tables, kernels the rest; a blob
that contradicts itself is left to the CPU engine, which finds the error.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from ...arrays import Bytes, Column, items_at
from ...format import blob, codecs
from ...format.codecs.sparse import COUNT, DENSE, ENDS_FRAMES, GROUP, MAX_GAP_SHIFT, worth_trying
from ..cpu import FEW_CHANGED_EXCESS, FEW_CHANGED_SHARE
from . import huffman
from .streams import WorkStream, ragged

#: The structs of sparse.cuh.
_BLOB = np.dtype(
    [
        ("low", "<u8"),
        ("low_end", "<u8"),
        ("elements", "<u8"),
        ("first_group", "<u4"),
        ("groups", "<u4"),
        ("element_size", "u1"),
        ("layout", "u1"),
        ("unused", "u1", 6),
    ]
)
_GROUP = np.dtype(
    [
        ("symbols", "<u8"),
        ("values", "<u8"),
        ("ranks", "<u8"),
        ("zigzag", "<u8"),
        ("found", "<u8"),
        ("gaps", "<u4"),
        ("value_count", "<u4"),
        ("blob", "<u4"),
        ("last_key", "u1"),
        ("gap_shift", "u1"),
        ("value_shift", "u1"),
        ("unused", "u1"),
        ("seen", "<u4"),
        ("applied", "<u4"),
    ]
)
_CHAIN = np.dtype([("base", "<u8"), ("out", "<u8"), ("oldest", "<u4"), ("links", "<u4")])
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


@dataclass(frozen=True, slots=True)
class Streams:
    """Stored streams of bytes, and their pieces: blocks that are coded by themselves, or the whole of a raw plane."""

    codec: Column  # (p,)
    sizes: Column  # (p,) plain bytes
    block_bytes: Column  # (p,)
    stream: Column  # (q,) the stream of every piece
    within: Column  # (q,) its number within the stream
    offsets: Column  # (q,) in the batch's stored bytes
    stored_sizes: Column  # (q,)

    @property
    def is_raw(self) -> Column:
        """Return which streams are stored as they are, (p,) bool."""
        raw: Column = self.codec == codecs.RAW
        return raw

    def joined(self, others: Streams) -> Streams:
        """Return these streams, then the others."""
        columns = ("codec", "sizes", "block_bytes", "stream", "within", "offsets", "stored_sizes")
        pairs = [(getattr(self, name), getattr(others, name)) for name in columns]
        pairs[3] = (self.stream, others.stream + len(self.codec))
        return Streams(*(np.concatenate(pair) for pair in pairs))


class SparseLinks:
    """Sparse deltas of one batch."""

    def __init__(self, stored: Bytes, offsets: Column, header: npt.NDArray[np.void]) -> None:
        """Read the tables of some blobs.

        Args:
            stored: the batch's stored bytes.
            offsets: (k,) of the blobs in it; they lie in it as a whole.
            header: (k,) blob.HEADER_COLUMNS, valid, all of codec 3.
        """
        self.header, self.count = header, len(header)
        self.elements = header["raw_bytes"].astype(np.int64) // np.maximum(header["element_size"], 1)
        self.payload_at = offsets + blob.HEADER.size + 4 * header["count"].astype(np.int64)
        self.fine = self._read_groups(stored) if self.count else np.ones(0, bool)
        self.streams: Streams | None = None
        if self.count and self.fine.all():
            self._find_frames(stored, offsets)

    def _read_groups(self, stored: Bytes) -> Column:
        """Read the tables of groups; return which blobs have one that does not contradict itself."""
        payload_bytes = self.header["payload_bytes"].astype(np.int64)
        fine: Column = (payload_bytes >= COUNT.size) & (self.elements <= codecs.sparse.MAX_ELEMENTS)
        counts = items_at(stored, np.where(fine, self.payload_at, 0), "<u4").astype(np.int64)
        fine &= (counts >= 1) & (counts <= 256) & (COUNT.size + GROUP.itemsize * counts <= payload_bytes)
        self.counts = np.where(fine, counts, 0)
        self.of, within = ragged(self.counts)  # the blob of every group, and its number there
        at = self.payload_at[self.of] + COUNT.size + GROUP.itemsize * within
        groups = self.groups = items_at(stored, at, GROUP)
        dense = self.dense = groups["gap_shift"] == DENSE
        last_keys, is_last = groups["last_key"].astype(np.int64), within == self.counts[self.of] - 1
        wrong = is_last & ((last_keys != 255) | (groups["flags"] != ENDS_FRAMES))
        wrong[1:] |= (within[1:] > 0) & (np.diff(last_keys) <= 0)
        wrong |= (groups["flags"] > ENDS_FRAMES) | (~dense & (groups["gap_shift"] > MAX_GAP_SHIFT))
        wrong |= np.where(dense, groups["gaps"] > 0, groups["values"] > groups["gaps"])
        bits = 8 * self.header["element_size"].astype(np.int64)[self.of]
        wrong |= (groups["value_shift"] % 8 > 0) | (groups["value_shift"] >= bits)
        #: (g,) changed elements of every group; all elements of a dense one
        self.changed = np.where(dense, groups["values"], groups["gaps"]).astype(np.int64)
        fine &= np.bincount(self.of, wrong, self.count) == 0
        fine &= np.bincount(self.of, self.changed, self.count) <= self.elements
        return fine

    def _find_frames(self, stored: Bytes, offsets: Column) -> None:
        """Find the frames of all streams; blobs whose frames do not fit are not fine."""
        ends = self.groups["flags"] == ENDS_FRAMES
        self.run = np.cumsum(ends) - ends  # groups of a run share frames
        totals = [
            np.bincount(self.run, self.groups[name], int(ends.sum())).astype(np.int64) for name in ("gaps", "values")
        ]
        sizes = np.stack(totals, axis=1).reshape(-1)  # run after run: gaps, values
        of = np.repeat(self.of[ends], 2)
        block_bytes = self.header["block_bytes"].astype(np.int64)[of]
        blocks = -(-sizes // block_bytes)
        count = self.header["count"].astype(np.int64)
        self.fine &= np.bincount(of, blocks, self.count) == count
        if not self.fine.all():
            return
        which, within = ragged(count)
        lengths = items_at(stored, offsets[which] + blob.HEADER.size + 4 * within, "<u4").astype(np.int64)
        totals_of = np.bincount(which, lengths, self.count).astype(np.int64)
        frames_at = self.payload_at + COUNT.size + GROUP.itemsize * self.counts
        self.low = frames_at + totals_of
        self.low_end = self.payload_at + self.header["payload_bytes"].astype(np.int64)
        self.fine &= self.low <= self.low_end
        before = np.cumsum(lengths) - lengths
        own = before - (np.cumsum(totals_of) - totals_of)[which]
        stream, number = ragged(blocks)
        codec = np.full(len(sizes), codecs.ZSTD)
        self.streams = Streams(codec, sizes, block_bytes, stream, number, frames_at[which] + own, lengths)

    def unpack(self, work: WorkStream, stored: int, plain: Column) -> torch.Tensor:
        """Begin to unpack all blobs; return which are bad, (k,) int32, as soon as they are unpacked and applied.

        Args:
            stored: address of the batch's stored bytes.
            plain: (p,) addresses of the decoded streams.
        """
        blobs, groups = np.zeros(self.count, _BLOB), np.zeros(len(self.groups), _GROUP)
        blobs["elements"], blobs["groups"] = self.elements, self.counts
        blobs["low"], blobs["low_end"] = stored + self.low, stored + self.low_end
        blobs["first_group"] = np.cumsum(self.counts) - self.counts
        for name in ("element_size", "layout"):
            blobs[name] = self.header[name]
        first = np.concatenate([[True], np.diff(self.run) > 0])
        for number, (name, to) in enumerate((("gaps", "symbols"), ("values", "values"))):
            counts = self.groups[name].astype(np.int64)
            before = np.cumsum(counts) - counts
            groups[to] = plain[2 * self.run + number] + before - before[first][self.run]
        size = self.header["element_size"].astype(np.int64)[self.of]
        rooms = np.stack(
            [np.where(self.dense, 0, 4 * self.changed), size * self.changed, size * self.groups["values"]], axis=1
        )
        rooms = (rooms + 7) // 8 * 8
        places = (np.cumsum(rooms) - rooms.reshape(-1)).reshape(-1, 3)
        places += work.room("sparse", int(rooms.sum()) + 8).data_ptr()
        groups["ranks"], groups["zigzag"], groups["found"] = places.T
        groups["gaps"], groups["value_count"], groups["blob"] = self.groups["gaps"], self.groups["values"], self.of
        for name in ("last_key", "gap_shift", "value_shift"):
            groups[name] = self.groups[name]
        self._tables = work.upload(blobs, groups)
        self._bad = work.empty(4 * self.count)[: 4 * self.count].zero_()
        lows = work.empty(16 * len(groups))
        work.launch("sparse_lows", (len(groups),), *self._tables, lows)
        work.launch("sparse_unpack", (len(groups),), *self._tables, lows, self._bad)
        return self._bad.view(torch.int32)

    def apply(self, work: WorkStream, newest: Column, links: Column, bases: Column, outs: Column) -> None:
        """Begin to make chunks of plain bases by neighbouring links.

        Args:
            newest: (j,) the newest of these blobs; the others of each chunk follow it.
            links: (j,) how many they are.
            bases, outs: (j,) addresses; they may be the same.
        """
        if not len(newest):
            return
        chains = np.zeros(len(newest), _CHAIN)
        chains["base"], chains["out"], chains["oldest"], chains["links"] = bases, outs, newest + links - 1, links
        work.launch("sparse_apply", (len(chains),), *work.upload(chains), *self._tables, self._bad)


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
    full_bytes: Column  # estimated, as planes: of the chunk
    delta_bytes: Column  # and of its difference

    def take(self, which: Column) -> Candidates:
        """Return some of them."""
        return Candidates(*(getattr(self, field.name)[which] for field in fields(self)))

    @property
    def elements(self) -> Column:
        """Return how many elements each has."""
        return self.lengths // self.element_sizes


class SparseEncoding:
    """Candidates on their way to sparse deltas, all but header, block lengths and checksum.

    Call `count`, `pack`, `begin_frames` and `stored_bytes` in this order, each once the device is done with the one
    before.
    """

    def __init__(self, work: WorkStream, candidates: Candidates) -> None:
        self.work, self.candidates = work, candidates

    def count(self) -> torch.Tensor:
        """Begin to count changes and to form groups; return the counts, in pinned memory."""
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
        """Begin to make all but frames of the candidates with few changes; return their tables when that is done.

        Args:
            counted: from `count`.

        Returns:
            Pinned memory; None if there is no such candidate.
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
        """Return the sizes of the blobs, (n,) of the candidates that are left.

        Args:
            sizes: from `begin_frames`.
        """
        self.frame_sizes = sizes.astype(np.int64)
        self.table_bytes = COUNT.size + GROUP.itemsize * self.counts
        frames = np.bincount(self.frame_of, self.frame_sizes + 4, len(self.jobs)).astype(np.int64)
        found: Column = blob.HEADER.size + self.table_bytes + self.low_bytes + frames
        return found

    def pieces(self, chosen: Column) -> Pieces:
        """Return the pieces of the chosen blobs, (n,) bool."""
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

    rows: Column  # the chunk of each
    addresses: Column
    lengths: Column
    is_block: Column  # its length is one of the block lengths in the blob's header

    @staticmethod
    def none() -> Pieces:
        """Return no pieces."""
        nothing = np.empty(0, np.int64)
        return Pieces(nothing, nothing, nothing, np.empty(0, bool))

    def joined(self, others: Pieces) -> Pieces:
        """Return these pieces and the others, by chunk."""
        rows = np.concatenate([self.rows, others.rows])
        order = np.argsort(rows, kind="stable")
        columns = ((self.addresses, others.addresses), (self.lengths, others.lengths), (self.is_block, others.is_block))
        addresses, lengths, is_block = (np.concatenate(pair)[order] for pair in columns)
        return Pieces(rows[order], addresses, lengths, is_block)


def _places(sizes: Column) -> tuple[Column, int]:
    """Return where memory of these sizes begins, one after the other, at multiples of 16; and the sum."""
    rooms = -(-sizes // 16) * 16
    ends = np.cumsum(rooms)
    return ends - rooms, int(ends[-1]) if len(ends) else 0
