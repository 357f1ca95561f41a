"""Sparse deltas: the elements of a chunk that differ from its base, as gaps and integer differences.

In: a difference and its base. Out: the payload of a blob, which sparse_decode.py reads. docs/format.md, "Sparse
deltas", defines the payload; docs/design/sparse-deltas.md has the measurements.

Small weights change more often than large ones. So elements are grouped by their key: the byte of their base that holds
the exponent. Within a group the lengths of gaps between changed elements are nearly geometrically distributed, and few
symbols code them well.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ....arrays import Bytes, Column
from ..planes import scratch
from . import zstd
from .key_order import POSITION_BITS, Elements, keys_of

ID = 3
#: A group: its last key, gap shift, value shift and flags, and its numbers of gaps and of values.
GROUP = np.dtype(
    [
        ("last_key", "u1"),
        ("gap_shift", "u1"),
        ("value_shift", "u1"),
        ("flags", "u1"),
        ("gaps", "<u4"),
        ("values", "<u4"),
    ]
)
COUNT = struct.Struct("<I")
#: The gap shift of a dense group, which has a value for every element and no gaps; and the greatest other gap shift.
DENSE, MAX_GAP_SHIFT = 255, 26
#: The flag of a group after which the streams of symbols begin new frames.
ENDS_FRAMES = 1
#: A symbol is 3 times the quotient of a gap, at most GAP_ESCAPE, plus the kind of the difference: 0 for -1, 1 for +1,
#: OTHER for any other.
GAP_ESCAPE, OTHER = 84, 2
VALUE_ESCAPE = 255
#: A sparse delta is tried if at most this share of the elements changed; above it, planes are as small and faster.
TRIED_BELOW_SHARE = 0.5
#: A chunk of more elements gets no sparse delta: to apply one takes memory for each element, even if it is short.
MAX_ELEMENTS = 1 << POSITION_BITS
#: A group takes neighbouring keys until it has MIN_GROUP changed elements. If more than this share of its elements
#: changed, it is dense.
DENSE_ABOVE_SHARE = 0.55
MIN_GROUP = 128
#: A key with more elements is a group of its own: a reader must sort the elements of a group of several keys.
ALONE_ABOVE = 32_768
#: One element in this many is counted, to estimate the number of elements of a key.
SAMPLED = 61
#: Stored bytes that one more frame costs: its header, and its Huffman table, per distinct symbol.
FRAME_BYTES, SYMBOL_BYTES = 20.0, 0.45


def worth_trying(changed: Any, elements: Any) -> Any:
    """Return whether a sparse delta may be smaller than planes; the arguments are numbers or arrays."""
    return (changed <= TRIED_BELOW_SHARE * elements) & (elements <= MAX_ELEMENTS)


def encode(
    difference: Bytes, base: Bytes, element_size: int, layout: int, block_bytes: int
) -> tuple[list[bytes], list[int]]:
    """Encode a difference from a base of the same length.

    Args:
        difference: (r,) uint8, r a multiple of `element_size`: `planes.difference` of the chunk and its base.
        base: (r,) uint8.
        element_size: 1, 2, 4 or 8.
        layout: planes.ROTATED for floats, which are grouped by exponent, else planes.BYTES.
        block_bytes: the most symbols in a frame.

    Returns:
        The payload in pieces, and the stored lengths of its frames [bytes].
    """
    zigzag, before = (array.view(f"u{element_size}") for array in (difference, base))
    keys = keys_of(before, layout)
    at = np.flatnonzero(np.not_equal(zigzag, 0, out=_mask_room(zigzag.size)))
    last_keys = _last_keys(np.bincount(keys[at], minlength=256), np.bincount(keys[::SAMPLED], minlength=256))
    of_key = np.searchsorted(last_keys, np.arange(256)).astype(np.uint8)
    group_of = of_key[keys[at]]
    at = at[np.argsort(group_of, kind="stable")]
    ends = np.cumsum(np.bincount(group_of, minlength=len(last_keys)))
    found, groups = zigzag[at], []
    for first_key, last_key, begin, end in zip(
        [0, *(key + 1 for key in last_keys)], last_keys, [0, *ends.tolist()], ends.tolist(), strict=False
    ):
        members = _mask(keys, first_key, last_key)
        ranks, size = _ranks(members, at[begin:end])
        if end - begin > DENSE_ABOVE_SHARE * size:
            groups.append(_encode_dense(zigzag[members], last_key))
        else:
            groups.append(_encode_gaps(ranks, found[begin:end], last_key))
    frames = _encode_frames(groups, block_bytes)
    table = np.array([tuple(group.row) for group in groups], GROUP)
    low = [part for group in groups for part in group.low]
    return [COUNT.pack(len(groups)), table.tobytes(), *frames, *low], [len(frame) for frame in frames]


def _last_keys(changed: Column, sampled: Column) -> list[int]:
    """Join neighbouring keys to groups; return the last key of each.

    Args:
        changed: (256,) the number of changed elements of each key.
        sampled: (256,) the number of all elements of each key, in a sample.
    """
    found, own, members, left = [], 0, 0, int(changed.sum())
    for key, (count, seen) in enumerate(zip(changed.tolist(), sampled.tolist(), strict=True)):
        is_alone = seen * SAMPLED > ALONE_ABOVE
        if is_alone and members:
            found.append(key - 1)
            own = members = 0
        own, members, left = own + count, members + seen, left - count
        if is_alone or (own >= MIN_GROUP and left >= MIN_GROUP):
            found.append(key)
            own = members = 0
    return [*(key for key in found if key < 255), 255]


def _mask(keys: Bytes, first: int, last: int) -> npt.NDArray[np.bool_]:
    """Return which keys are from `first` to `last`, inclusive; valid until the next call."""
    mask = _mask_room(keys.size)
    if first == last:
        np.equal(keys, first, out=mask)
    else:
        np.less_equal(keys - np.uint8(first), last - first, out=mask)
    return mask


def _mask_room(size: int) -> npt.NDArray[np.bool_]:
    return scratch.room("mask", size).view(bool)


def _ranks(members: npt.NDArray[np.bool_], at: Column) -> tuple[Column, int]:
    """Return how many members come before each of the positions `at`; and how many there are in all."""
    packed = np.zeros(8 * -(-members.size // 64), np.uint8)
    packed[: -(-members.size // 8)] = np.packbits(members, bitorder="little")
    words = packed.view("<u8")
    through = np.cumsum(np.bitwise_count(words), dtype=np.int64)
    word, below = at >> 6, np.uint64(2) << (at & 63).astype(np.uint64)
    ranks: Column = through[word] - np.bitwise_count(words[word] & -below) - 1
    return ranks, int(through[-1]) if len(through) else 0


@dataclass(slots=True)
class _EncodedGroup:
    """One encoded group, without its frames."""

    row: list[int]  # a GROUP; `_encode_frames` sets its flag
    symbols: Bytes
    values: Bytes
    low: list[bytes]  # low bits of gaps, escaped gaps, low bytes of values, escaped values


def _encode_dense(zigzag: Elements, last_key: int) -> _EncodedGroup:
    """Encode a group in which most elements changed."""
    value_shift, values, low = _encode_values(zigzag)
    return _EncodedGroup([last_key, DENSE, value_shift, 0, 0, len(values)], np.empty(0, np.uint8), values, low)


def _encode_gaps(changed: Column, zigzag: Elements, last_key: int) -> _EncodedGroup:
    """Encode a group by the ascending ranks of its changed elements, and their differences."""
    gaps = np.diff(changed, prepend=-1) - 1
    kinds = np.minimum(zigzag - zigzag.dtype.type(1), OTHER).astype(np.int64)
    # then at least half of the quotients are below 4
    shift = max(0, int(_median(gaps)).bit_length() - 2) if len(gaps) else 0
    quotients = gaps >> shift
    symbols = (3 * np.minimum(quotients, GAP_ESCAPE) + kinds).astype(np.uint8)
    escapes = quotients[quotients >= GAP_ESCAPE].astype("<u4").tobytes()
    value_shift, values, value_low = _encode_values(zigzag[kinds == OTHER] - zigzag.dtype.type(3))
    row = [last_key, shift, value_shift, 0, len(gaps), len(values)]
    return _EncodedGroup(row, symbols, values, [_pack_bits(gaps, shift), escapes, *value_low])


def _encode_values(values: Elements) -> tuple[int, Bytes, list[bytes]]:
    """Return the shift of values, their symbols, and [their low bytes, escaped quotients]."""
    size = values.itemsize
    low_bytes = min(size - 1, max(0, int(_median(values)).bit_length() - 1) // 8) if values.size else 0
    quotients = values >> values.dtype.type(8 * low_bytes)
    low = values.astype(f"<u{size}").view(np.uint8).reshape(-1, size)[:, :low_bytes].tobytes()
    escapes = quotients[quotients >= VALUE_ESCAPE].astype(f"<u{size}").tobytes()
    return 8 * low_bytes, np.minimum(quotients, VALUE_ESCAPE).astype(np.uint8), [low, escapes]


def _median(values: Column) -> Any:
    """Return the median of values, the greater of two."""
    return np.partition(values, values.size // 2)[values.size // 2]


def _pack_bits(values: Column, bits: int) -> bytes:
    """Pack the lowest bits of integers, the highest bit first."""
    if not bits:
        return b""
    return np.packbits((values[:, None] >> np.arange(bits - 1, -1, -1) & 1).astype(np.uint8)).tobytes()


def _encode_frames(groups: Sequence[_EncodedGroup], block_bytes: int) -> list[bytes]:
    """Choose which groups share frames, set the flags of their rows, and return the frames in order."""
    frames, begin = [], 0
    counts = np.array([[np.bincount(part, minlength=256) for part in (g.symbols, g.values)] for g in groups], float)
    costs = _costs(counts).tolist()
    joined, cost = counts[0], costs[0]
    for i in range(1, len(groups) + 1):
        if i < len(groups):
            more = joined + counts[i]
            together = float(_costs(more))
            if together <= cost + costs[i]:
                joined, cost = more, together
                continue
            joined, cost = counts[i], costs[i]
        groups[i - 1].row[3] = ENDS_FRAMES
        for part in ([g.symbols for g in groups[begin:i]], [g.values for g in groups[begin:i]]):
            frames += zstd.encode_entropy(np.concatenate(part), block_bytes)
        begin = i
    return frames


def _costs(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Estimate the stored bytes of pairs of streams, one frame each, by their histograms (..., 2, 256): (...)."""
    total = counts.sum(axis=-1)
    distinct = (counts > 0).sum(axis=-1)
    bits = total * np.log2(np.maximum(total, 1)) - (counts * np.log2(np.maximum(counts, 1))).sum(axis=-1)
    coded = np.where(distinct > 1, np.maximum(bits, total), 0) / 8  # a Huffman code takes at least one bit
    found: npt.NDArray[np.float64] = np.where(total > 0, coded + FRAME_BYTES + SYMBOL_BYTES * distinct, 0).sum(axis=-1)
    return found
