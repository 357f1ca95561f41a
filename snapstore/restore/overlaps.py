"""Overlaps: the chunks of a stored box that a wanted box needs, and where their bytes go.

In: a box that a manifest holds, a box that is wanted, and the memory of the wanted box. Out: the chunks to rebuild, and
the copies that put them in place. A chunk is decoded only if it holds a byte of the overlap. If the overlap is a run of
bytes in both boxes, chunks inside it are decoded in place; every other chunk goes through a buffer.

All boxes here are boxes of bytes: the bytes of an element are one more dimension, the last.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from ..arrays import Bytes, Column
from ..chunks.reader import Wanted
from ..format.manifests import boxes
from ..format.manifests.manifest import Manifest
from ..state.values.arrays import Memory, copy_box
from ..state.values.tensors import DimOrder

#: Chunks that go through a buffer are rebuilt in groups of at most this much, or one by one [bytes].
BUFFERED_BYTES = 8 * 1024 * 1024
_NONE = np.empty(0, np.int64)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor that a manifest holds: in chunks; if there are none, in the inline bytes from `inline` on.

    Attributes:
        dim_order: of the tensor that the writer had.
    """

    m: Manifest
    offsets: Sequence[int]
    sizes: Sequence[int]
    first_chunk: int = 0
    chunks: int = 0
    inline: int = 0
    dim_order: DimOrder = ()


@dataclass(frozen=True, slots=True)
class Overlap:
    """The part of a wanted box that a stored box holds.

    Attributes:
        rows, starts: the chunks that hold a byte of it, and where each begins in the stored box [bytes]; no chunks if
            the stored box is inline.
        sizes: of the overlap.
        stored_at, target_at: where it begins in the stored box, and in the wanted box.
        stored_sizes, target_sizes: the sizes of the two boxes.
        target_start: where the wanted box begins in its memory [bytes].
    """

    stored: StoredBox
    rows: Column
    starts: Column
    sizes: Sequence[int]
    stored_at: Sequence[int]
    stored_sizes: Sequence[int]
    target_at: Sequence[int]
    target_sizes: Sequence[int]
    target_start: int

    @property
    def lengths(self) -> Column:
        """Return the plain bytes of each chunk."""
        lengths: Column = self.stored.m.table.lengths[self.rows].astype(np.int64)
        return lengths

    @property
    def nbytes(self) -> int:
        """Return how many bytes its chunks have; if it is inline, how many bytes it has."""
        return int(self.lengths.sum()) if self.stored.chunks else math.prod(self.sizes)

    @property
    def decoded_bytes(self) -> int:
        """Return how many bytes are decoded for it, in all links of its chunks' chains."""
        return int((self.lengths * self.stored.m.table.ref_counts[self.rows]).sum())

    @property
    def span(self) -> tuple[int, int] | None:
        """Return where it begins and ends in the stored box, if it is a run of bytes in both boxes; else None."""
        if not (boxes.is_run(self.sizes, self.stored_sizes) and boxes.is_run(self.sizes, self.target_sizes)):
            return None
        first = boxes.start_of(self.stored_at, self.stored_sizes)
        return first, first + math.prod(self.sizes)

    def target(self, home: Memory) -> Memory:
        """Return the memory of the wanted box within the memory of its tensor."""
        return home[self.target_start : self.target_start + math.prod(self.target_sizes)]

    def put_inline(self, home: Memory, inline: Memory) -> None:
        """Copy the overlap out of the inline bytes of the manifest, which lie in host memory or on `home`'s device."""
        source = inline[self.stored.inline : self.stored.inline + math.prod(self.stored_sizes)]
        here = source, self.stored_sizes, self.stored_at
        copy_box((self.target(home), self.target_sizes, self.target_at), here, self.sizes)

    def put_span(self, home: Memory, buffer: Memory, first: int) -> None:
        """Copy the bytes of the overlap out of a buffer, which has the bytes of the stored box from `first` on."""
        target, start = self.target(home), 0
        for at, sizes in boxes.span_boxes(first, first + len(buffer), self.stored_sizes):
            end = start + math.prod(sizes)
            common = boxes.overlap((at, sizes), (self.stored_at, self.sizes))
            if common is not None:
                here = [place - corner for place, corner in zip(common[0], at, strict=True)]
                moved = zip(common[0], self.stored_at, self.target_at, strict=True)
                there = [place - corner + to for place, corner, to in moved]
                copy_box((target, self.target_sizes, there), (buffer[start:end], sizes, here), common[1])
            start = end


def overlap_of(
    stored: StoredBox, wanted: tuple[Sequence[int], Sequence[int]], itemsize: int, target_start: int
) -> Overlap | None:
    """Return the overlap of a stored box with a wanted one, (offsets, sizes) in elements; None: there is none.

    Args:
        itemsize: bytes of an element.
        target_start: where the wanted box begins in its memory [bytes].
    """
    common = boxes.overlap((stored.offsets, stored.sizes), wanted)
    if common is None:
        return None
    sizes, stored_sizes = (*common[1], itemsize), (*stored.sizes, itemsize)
    stored_at = [*(place - corner for place, corner in zip(common[0], stored.offsets, strict=True)), 0]
    target_at = [*(place - corner for place, corner in zip(common[0], wanted[0], strict=True)), 0]
    target_sizes = (*wanted[1], itemsize)
    if not stored.chunks:
        return Overlap(stored, _NONE, _NONE, sizes, stored_at, stored_sizes, target_at, target_sizes, target_start)
    rows = stored.first_chunk + np.arange(stored.chunks)
    lengths = stored.m.table.lengths[stored.first_chunk : stored.first_chunk + stored.chunks].astype(np.int64)
    ends = np.cumsum(lengths)
    if common[1] != tuple(stored.sizes):
        counts = boxes.counts_before(np.concatenate([[0], ends]), stored_at, sizes, stored_sizes)
        is_needed = np.diff(counts) > 0
        rows, lengths, ends = rows[is_needed], lengths[is_needed], ends[is_needed]
    starts = ends - lengths
    return Overlap(stored, rows, starts, sizes, stored_at, stored_sizes, target_at, target_sizes, target_start)


def dim_orders_of(overlaps: Mapping[T, Sequence[Overlap]]) -> dict[T, DimOrder]:
    """Return the dimension orders of the arrays that are made of overlaps.

    An array whose writers had different orders is in C order. Those in C order are left out.
    """
    orders = {key: {overlap.stored.dim_order for overlap in found} for key, found in overlaps.items()}
    return {key: next(iter(found)) for key, found in orders.items() if len(found) == 1 and found != {()}}


@dataclass(slots=True)
class Reads:
    """Chunks that are being read, and the actions to do when they have arrived; they arrive in the order of `of`.

    Args:
        empty: returns a buffer of so many bytes where a given memory lies: on its device, or in host memory.
    """

    empty: Callable[[Memory, int], Memory]
    _pending: deque[tuple[int, Callable[[], None] | None]] = field(default_factory=deque)
    _packs: dict[int, list[str]] = field(default_factory=dict)  # by id of the manifest, which lives as long as this
    _inline: dict[tuple[int, str], Memory] = field(default_factory=dict)  # and by the device

    def of(self, overlap: Overlap, home: Memory) -> Iterator[Wanted]:
        """Yield the chunks of an overlap; inline bytes are in place on return."""
        if not overlap.stored.chunks:
            overlap.put_inline(home, self._inline_of(overlap.stored.m, home))
            return
        span, lengths = overlap.span, overlap.lengths
        is_inside, moved = np.zeros(len(lengths), bool), 0
        if span is not None:
            is_inside = (overlap.starts >= span[0]) & (overlap.starts + lengths <= span[1])
            moved = overlap.target_start + boxes.start_of(overlap.target_at, overlap.target_sizes) - span[0]
        for first, end in _groups(overlap.starts, lengths, is_inside):
            rows, starts = overlap.rows[first:end], overlap.starts[first:end]
            if is_inside[first]:
                yield self._wanted(overlap, rows, home, starts + moved, None)
            else:
                start = int(starts[0])
                buffer = self.empty(home, int(starts[-1] + lengths[end - 1]) - start)
                then = partial(overlap.put_span, home, buffer, start)
                yield self._wanted(overlap, rows, buffer, starts - start, then)

    def _inline_of(self, m: Manifest, home: Memory) -> Memory:
        """Return the inline bytes of a manifest, in host memory or on the device of `home`."""
        host = np.frombuffer(m.inline, np.uint8)
        if isinstance(home, np.ndarray):
            return host
        key = id(m), str(home.device)
        if key not in self._inline:
            self._inline[key] = buffer = self.empty(home, len(host))
            copy_box((buffer, [len(host)], [0]), (host, [len(host)], [0]), [len(host)])
        return self._inline[key]

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` when all chunks that were yielded so far have arrived."""
        self._pending.append((0, action))

    def arrived(self, count: int) -> None:
        """Note that the next `count` chunks have arrived; do the actions that waited for them."""
        while self._pending:
            left, action = self._pending[0]
            if left > count:
                self._pending[0] = (left - count, action)
                return
            count -= left
            self._pending.popleft()
            if action is not None:
                action()

    def _wanted(
        self, overlap: Overlap, rows: Column, out: Memory, starts: Column, then: Callable[[], None] | None
    ) -> Wanted:
        self._pending.append((len(rows), then))
        m = overlap.stored.m
        if id(m) not in self._packs:
            self._packs[id(m)] = m.header.pack_names
        return Wanted(m.table, self._packs[id(m)], rows, out, starts)


def _groups(starts: Column, lengths: Column, is_inside: Bytes) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of chunks that are read together: neighbours inside the span, or neighbours for one buffer."""
    if is_inside.all():  # nearly every tensor of a restore into the same sharding
        yield 0, len(starts)
        return
    first, size = 0, 0
    for i in range(1, len(starts) + 1):
        size += int(lengths[i - 1])
        ends = i == len(starts) or is_inside[i] != is_inside[first] or starts[i] != starts[i - 1] + lengths[i - 1]
        if ends or (not is_inside[first] and size + int(lengths[i]) > BUFFERED_BYTES):
            yield first, i
            first, size = i, 0
