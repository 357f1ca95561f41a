"""Sparse decode: consecutive sparse deltas of a chain, read together, then applied one after the other.

In: payloads of sparse.py, and the base of the oldest. Out: the chunk of each link in turn, in place.

Most links change few elements, so a call of NumPy takes longer than its work. So the first part, to read the changed
elements and their differences, which needs no base, is done for many links in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ....arrays import Bytes, Column, sums_before
from ....errors import IntegrityError
from . import sparse, zstd
from .key_order import Elements, KeyOrder
from .sparse import COUNT, DENSE, ENDS_FRAMES, GAP_ESCAPE, GROUP, MAX_GAP_SHIFT, OTHER, VALUE_ESCAPE

#: At most this many symbols and links are read together, so that the decoded arrays fit into CPU caches.
MOST_SYMBOLS = 131_072
MOST_LINKS = 32

Words = npt.NDArray[np.uint64]
#: The lowest 0 to 8 bytes of a word.
_LOWEST_BYTES = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


@dataclass(frozen=True, slots=True)
class StoredDelta:
    """One sparse delta as it is stored."""

    payload: memoryview
    frame_lengths: Sequence[int]
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one sparse delta, before a base is known: group after group, dense groups last."""

    groups: npt.NDArray[np.void]  # (g,) GROUP
    gaps_end: Column  # (g,) how many changed elements precede the end of each group
    ranks: Column  # (c,) the rank of each changed element in its group
    steps: Elements  # (c + d,) the summand of each changed element, then of each element of the dense groups


def apply_all(links: Sequence[StoredDelta], elements: Elements, layout: int) -> Iterator[bool]:
    """Turn a base into the chunk of each link, in place; yield True after each.

    Args:
        links: sparse deltas, the oldest first.
        elements: (n,) unsigned integers: the base of the oldest link.
        layout: planes.ROTATED or planes.BYTES, as the links have it.

    Raises:
        IntegrityError: the next link contradicts itself or its base; `elements` are then garbage.
    """
    order, done = None, 0
    while done < len(links):
        try:
            ready = unpack(links[done : done + MOST_LINKS], elements)
        except IntegrityError:  # any of them may be bad
            ready = unpack(links[done : done + 1], elements)
        if order is None:
            order = KeyOrder(elements, layout, *_undivided(links))
        for changes in ready:
            apply(changes, elements, order)
            yield True
        done += len(ready)


def apply(changes: Changes, elements: Elements, order: KeyOrder) -> None:
    """Turn a base into its chunk, in place. `order`: of the base.

    Raises:
        IntegrityError: the base contradicts the changes; `elements` and `order` are then garbage.
    """
    order.move_noted()
    where = _positions(changes, order)
    before = elements.take(where)
    after = before + changes.steps
    elements[where] = after
    order.note(where, before, after)


def _positions(changes: Changes, order: KeyOrder) -> Column:
    """Return the positions of changed elements, then of dense groups."""
    groups, ranks = changes.groups, changes.ranks
    last_keys = groups["last_key"].astype(np.int64)
    first_keys = np.zeros_like(last_keys)
    first_keys[1:] = last_keys[:-1] + 1
    firsts = order.starts[first_keys]
    sizes = order.starts[last_keys + 1] - firsts
    counts, values = groups["gaps"].astype(np.int64), groups["values"]
    dense = groups["gap_shift"] == DENSE
    wrong = np.where(dense, values != sizes, (counts > sizes) | (values > counts))
    if wrong.any():
        raise IntegrityError(f"sparse group {int(np.argmax(wrong))}: counts that the base contradicts")
    last_ranks = ranks[changes.gaps_end[counts > 0] - 1]
    if (last_ranks >= sizes[counts > 0]).any():
        raise IntegrityError("sparse: names an element beyond its group")
    found = order.positions(ranks + np.repeat(firsts, counts))
    is_mixed = order.mixed(first_keys, last_keys)
    mixed = is_mixed & (counts > 0)
    if mixed.any():
        members = order.members(firsts[mixed], sizes[mixed], mixed=True)
        own = np.repeat(mixed, counts)
        member_starts = np.cumsum(sizes[mixed]) - sizes[mixed]
        found[own] = members[ranks[own] + np.repeat(member_starts, counts[mixed])]
    if dense.any():
        found = np.concatenate([found, order.members(firsts[dense], sizes[dense], mixed=bool(is_mixed[dense].any()))])
    return found


def _undivided(links: Iterable[StoredDelta]) -> tuple[int, int]:
    """Return KeyOrder's `low` and `high`: no group ends below `low`, or from `high` to 254."""
    low, high = 255, 0
    for payload in (link.payload for link in links):
        count = COUNT.unpack_from(payload)[0] if len(payload) >= COUNT.size else 0
        if 2 <= count <= 256 and COUNT.size + count * GROUP.itemsize <= len(payload):
            low = min(low, payload[COUNT.size])
            high = max(high, payload[COUNT.size + (count - 2) * GROUP.itemsize] + 1)
    return low, min(255, max(low, high))


def unpack(links: Sequence[StoredDelta], base: Elements) -> list[Changes]:
    """Read the first sparse delta, and as many of the next ones as MOST_SYMBOLS allows.

    Args:
        base: (n,) of the dtype and length of the chunk's elements; it is not read.

    Raises:
        IntegrityError: one of them contradicts itself.
    """
    element_size, elements = base.itemsize, base.size
    if elements > sparse.MAX_ELEMENTS:
        raise IntegrityError(f"sparse: a chunk of {elements} elements, expected at most {sparse.MAX_ELEMENTS}")
    tables: list[npt.NDArray[np.void]] = []
    starts, symbols = [], 0
    for link in links:
        groups, start = _read_groups(link.payload, element_size)
        gaps, values = (groups[name].astype(np.int64) for name in ("gaps", "values"))
        wrong = (gaps.cumsum() > elements) | (values.cumsum() > elements)
        if wrong.any():
            raise IntegrityError(f"sparse group {int(np.argmax(wrong))}: counts that the base contradicts")
        symbols += int(gaps.sum() + values.sum())
        if tables and symbols > MOST_SYMBOLS:
            break
        tables.append(groups)
        starts.append(start)
    streams, lows = _read_frames(links, starts, tables)
    return _decode_changes(tables, streams, lows, element_size, elements)


def _read_groups(payload: memoryview, element_size: int) -> tuple[npt.NDArray[np.void], int]:
    """Return the checked table of groups, and its end in the payload."""
    count = COUNT.unpack_from(payload)[0] if len(payload) >= COUNT.size else 0
    end = COUNT.size + count * GROUP.itemsize
    if not 1 <= count <= 256 or end > len(payload):
        raise IntegrityError(f"sparse: {count} groups in {len(payload)} bytes")
    groups = np.frombuffer(payload[COUNT.size : end], GROUP)
    dense = groups["gap_shift"] == DENSE
    fine = (groups["last_key"][-1] == 255) & (groups["flags"][-1] == ENDS_FRAMES)
    fine &= (groups["last_key"][1:] > groups["last_key"][:-1]).all() & (groups["flags"] <= ENDS_FRAMES).all()
    fine &= (dense | (groups["gap_shift"] <= MAX_GAP_SHIFT)).all() & (groups["gaps"][dense] == 0).all()
    fine &= (groups["value_shift"] % 8 == 0).all() & (groups["value_shift"] < 8 * element_size).all()
    if not fine:
        raise IntegrityError("sparse: a table of groups that contradicts itself")
    return groups, end


def _read_frames(
    links: Sequence[StoredDelta], starts: Sequence[int], tables: Sequence[npt.NDArray[np.void]]
) -> tuple[tuple[Bytes, Bytes], list[memoryview]]:
    """Decode the frames of links, which begin at `starts`; return (symbols of gaps, of values), and low parts."""
    names = ("gaps", "values")
    streams = {name: np.empty(sum(int(t[name].sum(dtype=np.int64)) for t in tables), np.uint8) for name in names}
    filled, lows = dict.fromkeys(streams, 0), []
    for link, at, groups in zip(links, starts, tables, strict=False):
        through = {name: list(accumulate(groups[name].tolist(), initial=0)) for name in names}
        begin, used = 0, 0
        for end in (np.flatnonzero(groups["flags"]) + 1).tolist():
            for name, stream in streams.items():
                out = stream[filled[name] :][: through[name][end] - through[name][begin]]
                lengths = link.frame_lengths[used : used + -(-out.size // link.block_bytes)]
                used += len(lengths)
                stops = [at]
                for length in lengths:
                    stops.append(stops[-1] + length)
                if len(lengths) != -(-out.size // link.block_bytes) or stops[-1] > len(link.payload):
                    raise IntegrityError("sparse: fewer frames than the groups need")
                zstd.decode([link.payload[a:b] for a, b in pairwise(stops)], out, link.block_bytes)
                filled[name], at = filled[name] + out.size, stops[-1]
            begin = end
        if used < len(link.frame_lengths):
            raise IntegrityError(f"sparse: {len(link.frame_lengths) - used} frames more than the groups need")
        lows.append(link.payload[at:])
    return (streams["gaps"], streams["values"]), lows


class _Low:
    """Low parts of all groups.

    Args:
        lows: the bytes of each link.
        of_link: (g,) the link of each group.
        sizes: (g, 4) bytes of each part: low bits of gaps, escaped gaps, low bytes of values, escaped values.

    Attributes:
        starts: (g, 4) the first byte of each part in the bytes of all links.
    """

    def __init__(self, lows: Sequence[memoryview], of_link: Column, sizes: Column) -> None:
        needed = np.bincount(of_link, sizes.sum(axis=1), len(lows)).astype(np.int64)
        for low, expected in zip(lows, needed.tolist(), strict=True):
            if len(low) != expected:
                raise IntegrityError(f"sparse: groups with low parts of {expected} bytes, in {len(low)} bytes")
        self.starts: Column = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
        self._bytes = np.frombuffer(b"".join([*lows, bytes(8)]), np.uint8)

    def bits(self, at: Column, widths: Column) -> Column:
        """Return the integers of up to 26 bits that begin at bits `at`, highest bit first."""
        # a big-endian word of the bytes is a little-endian word of the reversed bytes, which NumPy reads faster
        words = _words(self._bytes[::-1].copy(), len(self._bytes) - 8 - (at >> 3))
        words <<= (at & 7).view(np.uint64)
        words >>= (63 - widths).view(np.uint64)
        words >>= np.uint64(1)
        return words.view(np.int64)

    def integers(self, at: Column, widths: Column) -> Words:
        """Return the little-endian integers of up to 8 bytes that begin at `at`."""
        found: Words = _words(self._bytes, at) & _LOWEST_BYTES[widths]
        return found


def _words(data: Bytes, at: Column) -> Words:
    """Return the little-endian words of 8 bytes that begin at bytes `at`."""
    words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    found: Words = words.take(at).astype(np.uint64, copy=False)
    return found


@dataclass(frozen=True, slots=True)
class _Symbols:
    """Quotients of gaps or of values, group after group."""

    plain: Bytes  # (m,) as in the symbols
    counts: Column  # (g,) how many each group has
    firsts: Column  # (g,) the index of each group's first one
    escapes: Column  # (k,) the indices of the escaped ones: their quotients are in the low parts
    escape_group: Column  # (k,) the groups of these
    escape_counts: Column  # (g,) how many of these each group has

    @classmethod
    def of(cls, plain: Bytes, counts: Column, is_escape: npt.NDArray[np.bool_]) -> _Symbols:
        """Find the escapes."""
        ends, escapes = counts.cumsum(), np.flatnonzero(is_escape)
        group = np.searchsorted(ends, escapes, "right")
        return cls(plain, counts, ends - counts, escapes, group, np.bincount(group, minlength=len(counts)))

    def each(self, column: Column) -> Column:
        """Repeat each group's value for its symbols."""
        return np.repeat(column, self.counts)

    def each_at(self, starts: Column, step: Column) -> Column:
        """Return where the part of each symbol begins, (m,), if parts of `step` follow a group's start."""
        at = np.arange(len(self.plain))
        at *= self.each(step)
        at += self.each(starts - self.firsts * step)
        return at

    def quotients(self, dtype: type, low: _Low, part: int, width: int) -> Column:
        """Return the quotients (m,); those of escapes are integers of `width` bytes in a low part."""
        found: Column = self.plain.astype(dtype)
        if len(self.escapes):
            number = (
                np.arange(len(self.escapes)) - (np.cumsum(self.escape_counts) - self.escape_counts)[self.escape_group]
            )
            at = low.starts[self.escape_group, part] + width * number
            found[self.escapes] = low.integers(at, np.full(len(at), width))
        return found


def _decode_changes(
    tables: Sequence[npt.NDArray[np.void]],
    streams: tuple[Bytes, Bytes],
    lows: Sequence[memoryview],
    size: int,
    elements: int,
) -> list[Changes]:
    """Decode all groups of all links.

    Args:
        tables: (g,) GROUP, of each link.
        streams: the symbols of all gaps, and of all values.
        lows: the low parts of each link.
        size: of an element [bytes].
        elements: the number of elements of the chunk.
    """
    groups, of_link = np.concatenate(tables), np.repeat(np.arange(len(tables)), [len(t) for t in tables])
    counts, value_counts = (groups[name].astype(np.int64) for name in ("gaps", "values"))
    dense, widths = groups["gap_shift"] == DENSE, groups["value_shift"].astype(np.int64) // 8
    shifts = np.where(dense, 0, groups["gap_shift"]).astype(np.int64)
    quotients = streams[0] // np.uint8(3)
    kinds = streams[0] - np.uint8(3) * quotients
    gaps = _Symbols.of(quotients, counts, quotients >= GAP_ESCAPE)
    values = _Symbols.of(streams[1], value_counts, streams[1] == VALUE_ESCAPE)
    others = np.flatnonzero(kinds == OTHER)
    through = np.searchsorted(others, sums_before(counts))
    found = through[1:] - through[:-1]
    if (quotients[gaps.escapes] > GAP_ESCAPE).any() or (found[~dense] != value_counts[~dense]).any():
        raise IntegrityError(f"sparse: {value_counts.tolist()} values, and symbols for {found.tolist()}")
    parts = [-(-counts * shifts // 8), 4 * gaps.escape_counts, widths * value_counts, size * values.escape_counts]
    low = _Low(lows, of_link, np.stack(parts, axis=1))
    ranks, plain = _decode_ranks(gaps, shifts, low, elements), _decode_values(values, widths, low, size)
    of_dense = values.each(dense)
    if (plain[~of_dense] > _LOWEST_BYTES[size] - np.uint64(3)).any():
        raise IntegrityError("sparse: a value beyond the element size")
    dtype = np.dtype(f"u{size}")
    steps = kinds.astype(dtype)  # becomes -1 for kind 0 (z = 1), and 1 for kind 1 (z = 2)
    steps += steps
    steps -= dtype.type(1)
    steps[others] = _steps(plain[~of_dense].astype(dtype) + dtype.type(3))
    dense_steps = _steps(plain[of_dense].astype(dtype))
    changes, at, dense_at = list[Changes](), 0, 0
    for table in tables:
        through = np.cumsum(table["gaps"], dtype=np.int64)
        end = at + int(through[-1])
        dense_end = dense_at + int(table["values"][table["gap_shift"] == DENSE].sum(dtype=np.int64))
        own = steps[at:end]
        if dense_end > dense_at:
            own = np.concatenate([own, dense_steps[dense_at:dense_end]])
        changes.append(Changes(table, through, ranks[at:end], own))
        at, dense_at = end, dense_end
    return changes


def _steps(zigzag: Elements) -> Elements:
    """Return zigzag differences as summands of unsigned elements."""
    one = zigzag.dtype.type(1)
    steps: Elements = (zigzag >> one) ^ (~(zigzag & one) + one)
    return steps


def _decode_ranks(gaps: _Symbols, shifts: Column, low: _Low, elements: int) -> Column:
    """Return the ranks of changed elements in their groups."""
    found = gaps.quotients(np.int64, low, 1, 4)
    if shifts.any():
        widths = gaps.each(shifts)
        found <<= widths
        found += low.bits(gaps.each_at(8 * low.starts[:, 0], shifts), widths)
    if found.size and found.max() >= elements:  # checked before the sum, which could overflow
        raise IntegrityError(f"sparse: a gap of {found.max()} beyond its group")
    found += 1
    through = sums_before(found)
    ranks = through[1:]
    ranks -= gaps.each(through[gaps.firsts] + 1)
    return ranks


def _decode_values(values: _Symbols, widths: Column, low: _Low, size: int) -> Words:
    """Return the values of all groups."""
    found: Words = values.quotients(np.uint64, low, 3, size)
    if widths.any():
        if (found[values.escapes] > _LOWEST_BYTES[size - widths[values.escape_group]]).any():
            raise IntegrityError("sparse: a value beyond the element size")
        width = values.each(widths)
        found <<= (8 * width).view(np.uint64)
        found |= low.integers(values.each_at(low.starts[:, 2], widths), width)
    return found
