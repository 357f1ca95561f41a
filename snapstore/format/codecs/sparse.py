"""Sparse deltas: the elements of a chunk in which it differs from its base, as gaps and integer differences.

docs/format.md, "Sparse deltas", defines the payload; docs/design/sparse-deltas.md has the numbers behind it. In: a
difference and its base. Out: the payload of a blob. And back: a base becomes the chunk in place.

Small weights change more often than large ones, so elements are grouped by the byte of their base that holds the
exponent. Within a group the gaps between changed elements are nearly geometric, which few symbols code well.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays import Bytes, Column
from ...errors import IntegrityError
from . import zstd

ID = 3
#: A group: last key, gap shift, value shift, flags, changed elements, values.
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
#: The gap shift of a group that has a value for every element, and no gaps; and the greatest other one.
DENSE, MAX_GAP_SHIFT = 255, 26
#: The flag of a group after which streams begin new frames.
ENDS_FRAMES = 1
#: A symbol is 3 times the quotient of a gap, up to this one, plus the kind of the value: -1, +1, another one.
GAP_ESCAPE, OTHER = 84, 2
VALUE_ESCAPE = 255
#: A chunk is tried if at most this share of its elements changed; beyond, planes are as small and faster.
TRIED_BELOW_SHARE = 0.5
#: A group has at least MIN_GROUP changed elements, if there are as many. Above this share of changed ones it is dense.
DENSE_ABOVE_SHARE = 0.55
MIN_GROUP = 128
#: Stored bytes that another frame costs: its header, and the table of its Huffman code per symbol.
FRAME_BYTES, SYMBOL_BYTES = 20.0, 0.45

Elements = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload in pieces, and the stored lengths of its frames."""

    pieces: list[bytes]
    frame_lengths: list[int]


def _keys(base: Elements, layout: int) -> Bytes:
    """Return the key of every element: the byte of the base in the highest plane (layout 1), or 0."""
    if not layout:
        return np.zeros(base.size, np.uint8)
    bits = 8 * base.itemsize
    rotated = base >> (bits - 9) if bits > 8 else base << 1 | base >> 7
    return rotated.astype(np.uint8)


# -- encode


def worth_trying(changed: int, elements: int) -> bool:
    """Return whether a delta that changes so many of its elements may be smaller as gaps than as planes."""
    return changed <= TRIED_BELOW_SHARE * elements


def encode(difference: Bytes, base: Bytes, element_size: int, layout: int, block_bytes: int) -> Encoded:
    """Encode a difference from a base of the same length.

    Args:
        difference: (r,) uint8, r a multiple of `element_size`: `planes.difference` of the chunk and its base.
        base: (r,) uint8.
        element_size: 1, 2, 4 or 8.
        layout: planes.ROTATED for floats, which are grouped by exponent, else planes.BYTES.
        block_bytes: the most symbols of a frame.
    """
    zigzag, before = (array.view(f"u{element_size}") for array in (difference, base))
    keys = _keys(before, layout)
    at = np.flatnonzero(zigzag)
    keys_at, found = keys[at], zigzag[at]
    groups, first_key = [], 0
    for last_key in _last_keys(np.bincount(keys_at, minlength=256)):
        mine = _mask(keys_at, first_key, last_key)
        members = _mask(keys, first_key, last_key)
        if np.count_nonzero(mine) > DENSE_ABOVE_SHARE * np.count_nonzero(members):
            groups.append(_encode_dense(zigzag[members], last_key))
        else:
            groups.append(_encode_gaps(_ranks(members, at[mine]), found[mine], last_key))
        first_key = last_key + 1
    frames = _encode_frames(groups, block_bytes)
    table = np.array([tuple(group.row) for group in groups], GROUP)
    low = [part for group in groups for part in group.low]
    return Encoded([COUNT.pack(len(groups)), table.tobytes(), *frames, *low], [len(frame) for frame in frames])


def _last_keys(changed: Column) -> list[int]:
    """Join neighbouring keys to groups with enough changed elements; return the last key of each."""
    found, own, left = [], 0, int(changed.sum())
    for key, count in enumerate(changed.tolist()):
        own, left = own + count, left - count
        if own >= MIN_GROUP and left >= MIN_GROUP:
            found.append(key)
            own = 0
    return [*found, 255]


def _mask(keys: Bytes, first: int, last: int) -> npt.NDArray[np.bool_]:
    """Return which keys lie in a range, its last one included."""
    mask: npt.NDArray[np.bool_] = keys == first if first == last else (keys >= first) & (keys <= last)
    return mask


def _ranks(members: npt.NDArray[np.bool_], at: Column) -> Column:
    """Return, for each member at these positions, how many members come before it."""
    words = np.zeros(-(-members.size // 64), ">u8")
    packed = np.packbits(members)
    words.view(np.uint8)[: packed.size] = packed
    words = words.astype(np.uint64)
    counts = np.bitwise_count(words)
    before = np.cumsum(counts, dtype=np.int64) - counts
    word, up_to = at >> 6, (63 - (at & 63)).astype(np.uint64)
    ranks: Column = before[word] + np.bitwise_count(words[word] >> up_to) - 1
    return ranks


@dataclass(slots=True)
class _Group:
    """One group, encoded but for its frames."""

    row: list[int]  # a GROUP, its flag still to be set
    symbols: Bytes
    values: Bytes
    low: list[bytes]  # low bits of gaps, escaped gaps, low bytes of values, escaped values


def _encode_dense(zigzag: Elements, last_key: int) -> _Group:
    """Encode a group in which most elements changed."""
    value_shift, values, low = _encode_values(zigzag)
    return _Group([last_key, DENSE, value_shift, 0, 0, len(values)], np.empty(0, np.uint8), values, low)


def _encode_gaps(changed: Column, zigzag: Elements, last_key: int) -> _Group:
    """Encode a group by the ranks of its changed elements, ascending, and their differences."""
    gaps = np.diff(changed, prepend=-1) - 1
    kinds = np.minimum(zigzag - zigzag.dtype.type(1), OTHER).astype(np.int64)
    # half of the quotients are below 4
    shift = max(0, int(np.median(gaps)).bit_length() - 2) if len(gaps) else 0
    quotients = gaps >> shift
    symbols = (3 * np.minimum(quotients, GAP_ESCAPE) + kinds).astype(np.uint8)
    escapes = quotients[quotients >= GAP_ESCAPE].astype("<u4").tobytes()
    value_shift, values, value_low = _encode_values(zigzag[kinds == OTHER] - zigzag.dtype.type(3))
    row = [last_key, shift, value_shift, 0, len(gaps), len(values)]
    return _Group(row, symbols, values, [_pack_bits(gaps, shift), escapes, *value_low])


def _encode_values(values: Elements) -> tuple[int, Bytes, list[bytes]]:
    """Return the shift of values, their symbols, and [their low bytes, escaped quotients]."""
    size = values.itemsize
    low_bytes = min(size - 1, max(0, int(np.median(values)).bit_length() - 1) // 8) if values.size else 0
    quotients = values >> values.dtype.type(8 * low_bytes)
    low = values.astype(f"<u{size}").view(np.uint8).reshape(-1, size)[:, :low_bytes].tobytes()
    escapes = quotients[quotients >= VALUE_ESCAPE].astype(f"<u{size}").tobytes()
    return 8 * low_bytes, np.minimum(quotients, VALUE_ESCAPE).astype(np.uint8), [low, escapes]


def _pack_bits(values: Column, bits: int) -> bytes:
    """Pack the lowest bits of integers, the highest bit first."""
    if not bits:
        return b""
    return np.packbits((values[:, None] >> np.arange(bits - 1, -1, -1) & 1).astype(np.uint8)).tobytes()


def _unpack_bits(packed: Bytes, count: int, bits: int) -> Column:
    """Return (count,) int64: the inverse of `_pack_bits`."""
    if not bits:
        return np.zeros(count, np.int64)
    found = np.unpackbits(packed, count=count * bits).reshape(count, bits)
    out: Column = found @ (1 << np.arange(bits - 1, -1, -1))
    return out


def _encode_frames(groups: Sequence[_Group], block_bytes: int) -> list[bytes]:
    """Choose which groups share frames, set the flags of their rows, and return the frames in order."""
    frames, begin = [], 0
    counts = [np.stack([np.bincount(part, minlength=256) for part in (g.symbols, g.values)]) for g in groups]
    joined = counts[0]
    for i in range(1, len(groups) + 1):
        if i < len(groups) and _cost(joined + counts[i]) <= _cost(joined) + _cost(counts[i]):
            joined = joined + counts[i]
            continue
        groups[i - 1].row[3] = ENDS_FRAMES
        for part in ([g.symbols for g in groups[begin:i]], [g.values for g in groups[begin:i]]):
            frames += zstd.encode_entropy(np.concatenate(part), block_bytes)
        begin = i
        joined = counts[i] if i < len(groups) else joined
    return frames


def _cost(counts: npt.NDArray[np.int64]) -> float:
    """Estimate the stored bytes of streams with these histograms, (n, 256), in a frame each."""
    total = counts.sum(axis=1)
    distinct = (counts > 0).sum(axis=1)
    logs = np.log2(np.maximum(counts, 1))
    bits = total * np.log2(np.maximum(total, 1)) - (counts * logs).sum(axis=1)
    coded = np.where(distinct > 1, np.maximum(bits, total), 0) / 8  # a Huffman code takes a bit at least
    return float(np.where(total > 0, coded + FRAME_BYTES + SYMBOL_BYTES * distinct, 0).sum())


# -- decode


def apply(
    payload: memoryview, frame_lengths: Sequence[int], base: Bytes, element_size: int, layout: int, block_bytes: int
) -> None:
    """Turn a base into its chunk, in place; `base` is (r,) uint8.

    Raises:
        IntegrityError: the payload contradicts itself or the base; `base` is then garbage.
    """
    elements = base.view(f"u{element_size}")
    groups, at = _read_groups(payload, element_size)
    keys = _keys(elements, layout)
    sizes = np.diff(np.cumsum(np.bincount(keys, minlength=256))[groups["last_key"]], prepend=0)
    dense = groups["gap_shift"] == DENSE
    wrong = np.where(dense, groups["values"] != sizes, (groups["gaps"] > sizes) | (groups["values"] > groups["gaps"]))
    if wrong.any():
        raise IntegrityError(f"sparse group {int(np.argmax(wrong))}: counts that the base contradicts")
    symbols, values, at = _read_frames(payload, at, groups, frame_lengths, block_bytes)
    low = _Low(payload, at)
    where, differences, first_key = [], [], 0
    for i, row in enumerate(groups):
        try:
            own, found = _decode_group(row, symbols, values, low, int(sizes[i]), elements.dtype)
        except IntegrityError as error:
            raise IntegrityError(f"sparse group {i}: {error}") from error
        symbols, values = symbols[int(row["gaps"]) :], values[int(row["values"]) :]
        last_key = int(row["last_key"])
        where.append(np.flatnonzero(_mask(keys, first_key, last_key))[own] if len(own) else own)
        differences.append(found)
        first_key = last_key + 1
    low.finish()
    at_elements = np.concatenate(where)
    zigzag, one = np.concatenate(differences), elements.dtype.type(1)
    elements[at_elements] += (zigzag >> one) ^ (~(zigzag & one) + one)


def _read_groups(payload: memoryview, element_size: int) -> tuple[npt.NDArray[np.void], int]:
    """Return the table of groups, checked by itself, and where it ends."""
    count = COUNT.unpack_from(payload)[0] if len(payload) >= COUNT.size else 0
    end = COUNT.size + count * GROUP.itemsize
    if not 1 <= count <= 256 or end > len(payload):
        raise IntegrityError(f"sparse: {count} groups in {len(payload)} bytes")
    groups = np.frombuffer(payload[COUNT.size : end], GROUP)
    dense = groups["gap_shift"] == DENSE
    fine = (groups["last_key"][-1] == 255) & (groups["flags"][-1] == ENDS_FRAMES)
    fine &= (np.diff(groups["last_key"].astype(int)) > 0).all() & (groups["flags"] <= ENDS_FRAMES).all()
    fine &= (dense | (groups["gap_shift"] <= MAX_GAP_SHIFT)).all() & (groups["gaps"][dense] == 0).all()
    fine &= (groups["value_shift"] % 8 == 0).all() & (groups["value_shift"] < 8 * element_size).all()
    if not fine:
        raise IntegrityError("sparse: a table of groups that contradicts itself")
    return groups, end


def _read_frames(
    payload: memoryview, at: int, groups: npt.NDArray[np.void], frame_lengths: Sequence[int], block_bytes: int
) -> tuple[Bytes, Bytes, int]:
    """Decode the frames that begin at `at`; return all symbols, all values, and where the frames end."""
    counts = {name: groups[name].astype(np.int64) for name in ("gaps", "values")}
    streams = {name: np.empty(int(column.sum()), np.uint8) for name, column in counts.items()}
    filled, begin, left = dict.fromkeys(streams, 0), 0, list(frame_lengths)
    for end in (np.flatnonzero(groups["flags"]) + 1).tolist():
        for name, stream in streams.items():
            out = stream[filled[name] :][: int(counts[name][begin:end].sum())]
            lengths = left[: -(-out.size // block_bytes)]
            left = left[len(lengths) :]
            stops = (at + np.cumsum([0, *lengths])).tolist()
            if len(lengths) != -(-out.size // block_bytes) or stops[-1] > len(payload):
                raise IntegrityError("sparse: fewer frames than the groups need")
            blocks = [payload[a:b] for a, b in pairwise(stops)]
            zstd.decode(blocks, out, block_bytes)
            filled[name], at = filled[name] + out.size, stops[-1]
        begin = end
    if left:
        raise IntegrityError(f"sparse: {len(left)} frames more than the groups need")
    return streams["gaps"], streams["values"], at


@dataclass(slots=True)
class _Low:
    """The bytes behind the frames, read from front to back."""

    payload: memoryview
    at: int

    def take(self, count: int) -> Bytes:
        """Return the next bytes."""
        self.at += count
        if self.at > len(self.payload):
            raise IntegrityError(f"needs {self.at} bytes of a payload of {len(self.payload)}")
        return np.frombuffer(self.payload[self.at - count : self.at], np.uint8)

    def finish(self) -> None:
        """Require that nothing is left."""
        if self.at != len(self.payload):
            raise IntegrityError(f"sparse: groups end at {self.at} of a payload of {len(self.payload)} bytes")


def _decode_group(
    row: np.void, symbols: Bytes, values: Bytes, low: _Low, size: int, dtype: np.dtype[Any]
) -> tuple[Column, Elements]:
    """Return the positions of the changed elements within a group of `size`, and their zigzagged differences.

    Args:
        symbols, values: of this group and the ones behind it.
    """
    count, shift, values = int(row["gaps"]), int(row["gap_shift"]), values[: int(row["values"])]
    if shift == DENSE:
        zigzag = _decode_values(values, int(row["value_shift"]), low, dtype)
        changed = np.flatnonzero(zigzag)
        return changed, zigzag[changed]
    quotients, kinds = np.divmod(symbols[:count], 3)
    gaps, others = quotients.astype(np.int64), np.flatnonzero(kinds == OTHER)
    if (quotients > GAP_ESCAPE).any() or len(others) != len(values):
        raise IntegrityError(f"{len(values)} values, and symbols for {len(others)}")
    lowest = _unpack_bits(low.take(-(-count * shift // 8)), count, shift)
    escaped = np.flatnonzero(quotients == GAP_ESCAPE)
    gaps[escaped] = low.take(4 * len(escaped)).view("<u4")
    gaps = (gaps << shift) + lowest
    if (gaps >= size).any():  # before they are summed up, so that the sum cannot overflow
        raise IntegrityError(f"a gap of {gaps.max()} in {size} elements")
    changed = np.cumsum(gaps + 1) - 1
    if count and changed[-1] >= size:
        raise IntegrityError(f"names element {changed[-1]} of {size}")
    zigzag = (kinds + 1).astype(dtype)
    zigzag[others] = _decode_values(values, int(row["value_shift"]), low, dtype) + dtype.type(3)
    if (zigzag[others] < 3).any():
        raise IntegrityError("a value beyond the element size")
    return changed, zigzag


def _decode_values(symbols: Bytes, shift: int, low: _Low, dtype: np.dtype[Any]) -> Elements:
    """Return values from their symbols: the inverse of `_encode_values`."""
    size = dtype.itemsize
    lowest = np.zeros((len(symbols), size), np.uint8)
    lowest[:, : shift // 8] = low.take(len(symbols) * shift // 8).reshape(len(symbols), shift // 8)
    values, escaped = symbols.astype(dtype), np.flatnonzero(symbols == VALUE_ESCAPE)
    values[escaped] = low.take(size * len(escaped)).view(f"<u{size}")
    if shift and (values >> dtype.type(8 * size - shift)).any():
        raise IntegrityError("a value beyond the element size")
    shifted: Elements = (values << dtype.type(shift)) | lowest.view(f"<u{size}")[:, 0]
    return shifted
