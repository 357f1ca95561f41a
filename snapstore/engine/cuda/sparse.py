"""Sparse deltas on the device: codec 3 of docs/format.md, whose streams of symbols are zstd frames as planes have them.

Decode: group tables (host) -> frames -> ranks and differences of changed elements (sparse_unpack.cu) -> the base
becomes the chunk in place (sparse_apply.cu). Host code checks the tables, kernels the rest; a blob that contradicts
itself is left to the CPU engine, which finds the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...arrays import Bytes, Column
from ...format import blob, codecs
from ...format.codecs.sparse import COUNT, DENSE, ENDS_FRAMES, GROUP, MAX_GAP_SHIFT
from .streams import WorkStream, ragged

#: The structs of a blob and of a group in sparse_unpack.cu and sparse_apply.cu.
_BLOB = np.dtype(
    [
        ("out", "<u8"),
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
        ("last_key", "u1"),
        ("gap_shift", "u1"),
        ("value_shift", "u1"),
        ("unused", "u1", 5),
    ]
)


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
        fine: Column = payload_bytes >= COUNT.size
        at = np.where(fine, self.payload_at, 0)[:, None] + np.arange(COUNT.size)
        counts = stored[at].view("<u4").reshape(-1).astype(np.int64)
        fine &= (counts >= 1) & (counts <= 256) & (COUNT.size + GROUP.itemsize * counts <= payload_bytes)
        self.counts = np.where(fine, counts, 0)
        self.of, within = ragged(self.counts)  # the blob of every group, and its number there
        at = (self.payload_at[self.of] + COUNT.size + GROUP.itemsize * within)[:, None] + np.arange(GROUP.itemsize)
        groups = self.groups = stored[at].view(GROUP).reshape(-1)
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
        at = (offsets[which] + blob.HEADER.size + 4 * within)[:, None] + np.arange(4)
        lengths = stored[at].view("<u4").reshape(-1).astype(np.int64)
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

    def unpack(self, work: WorkStream, stored: int, plain: Column, outs: Column) -> torch.Tensor:
        """Begin to unpack all blobs; return which are bad, (k,) int32, as soon as they are unpacked and applied.

        Args:
            stored: address of the batch's stored bytes.
            plain: (p,) addresses of the decoded streams.
            outs: (k,) addresses of the chunks.
        """
        blobs, groups = np.zeros(self.count, _BLOB), np.zeros(len(self.groups), _GROUP)
        blobs["out"], blobs["elements"], blobs["groups"] = outs, self.elements, self.counts
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
        groups["gaps"], groups["value_count"] = self.groups["gaps"], self.groups["values"]
        for name in ("last_key", "gap_shift", "value_shift"):
            groups[name] = self.groups[name]
        self._tables = work.upload(blobs, groups)
        self._bad = work.empty(4 * self.count)[: 4 * self.count].zero_()
        work.launch("sparse_unpack", (self.count,), *self._tables, self._bad)
        return self._bad.view(torch.int32)

    def apply(self, work: WorkStream, which: Column) -> None:
        """Begin to turn the base at each of these blobs' `outs` into its chunk; (j,) of different chunks."""
        if len(which):
            (table,) = work.upload(which.astype(np.uint32))
            work.launch("sparse_apply", (len(which),), *self._tables, table, self._bad)
