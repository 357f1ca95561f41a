"""Key order: the elements of a chunk, sorted by key. In this order sparse_decode.py finds the members of groups.

In: elements. Out: the position of an element, by its number in the order. The order follows the links of a chain.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....arrays import Bytes, Column, sums_before
from ..planes import scratch

#: An order with more changed names than this is sorted again.
MOST_MOVES = 8192
#: A name stands for an element: it has this many bits for the element's position, and 8 above them for its key.
POSITION_BITS = 24

#: So many keys are sorted at a time: the order fits into a cache of the core.
SORTED_TOGETHER = 32_768

_POSITION = np.uint32((1 << POSITION_BITS) - 1)
_LOW_HALF = np.uint64(0xFFFFFFFF)

Elements = npt.NDArray[np.unsignedinteger]
Words = npt.NDArray[np.uint64]


def keys_of(elements: Elements, layout: int) -> Bytes:
    """Return each element's key: its byte in the highest plane (layout 1), or 0; valid until the next call."""
    keys = scratch.room("keys", elements.size)
    if not layout:
        keys[:] = 0
        return keys
    bits = 8 * elements.itemsize
    shifted = scratch.room("shifted", elements.nbytes).view(elements.dtype)
    np.right_shift(elements, bits - 9 if bits > 8 else 7, out=shifted)
    if bits == 8:
        np.bitwise_or(shifted, elements << 1, out=shifted)
    np.copyto(keys, shifted, casting="unsafe")
    return keys


class KeyOrder:
    """The elements of a chunk in the order of their keys, then of their positions; it follows a chain link by link.

    A thread may use one KeyOrder at a time: the next one takes its memory.

    To sort the elements takes longer than to apply a link, which changes the keys of few elements. So they are sorted
    once. The names that have entered or left the order since then are kept in a separate list.

    Args:
        elements: (n,) of the oldest base, at most 2^POSITION_BITS.
        layout: planes.ROTATED if keys are exponents, else planes.BYTES: then all keys are 0.
        low, high: keys below `low` count as `low`, and keys above `high` as `high`. No group of any link ends between
            such keys, so their elements may stay in the order of their positions.

    Attributes:
        starts: (257,) the elements of key k have the numbers starts[k] to starts[k + 1] - 1 in this order.
    """

    def __init__(self, elements: Elements, layout: int, low: int = 0, high: int = 255) -> None:
        self._layout, self._low, self._high = layout, low, high
        self._names = scratch.room("names", elements.size * 4).view(np.uint32)  # key << shift | position, ascending
        if layout:
            _name(self._keys_of(elements), self._names)
        else:
            self._names[:] = np.arange(elements.size, dtype=np.uint32)
        firsts = _named(np.arange(256, dtype=np.uint8))
        self.starts: Column = np.append(np.searchsorted(self._names, firsts), elements.size).astype(np.int64)
        self._news: tuple[Column, Elements, Elements] | None = None
        self._set_moves(np.empty(0, np.uint64))

    def _keys_of(self, elements: Elements) -> Bytes:
        keys = keys_of(elements, self._layout)
        if self._layout:  # np.clip takes longer for few elements
            np.maximum(keys, self._low, out=keys)
            np.minimum(keys, self._high, out=keys)
        return keys

    def _set_moves(self, moves: Words) -> None:
        """Set the names that entered or left: (k,) ascending, name << 32 | number << 1 | has left.

        The number is the index that the name has, or would have, in `_names`.
        """
        self._moves = moves
        gone = (moves & np.uint64(1)).view(np.int64)
        ahead = 2 * gone - 1
        self._ahead = sums_before(ahead)  # index in `_names` minus number, after each move
        self._from = ((moves & _LOW_HALF) >> np.uint64(1)).view(np.int64) - self._ahead[:-1] + 1 - gone
        self._has_come = gone == 0

    def positions(self, numbers: Column) -> Column:
        """Return the positions (k,) int64 of elements with ascending numbers (k,)."""
        return self._found(numbers).astype(np.int64)

    def _found(self, numbers: Column) -> Elements:
        """Do `positions` in uint32."""
        if not len(self._moves) or not len(numbers):
            return self._names.take(numbers) & _POSITION
        first = int(np.searchsorted(self._from, numbers[0], "right"))
        last = int(np.searchsorted(self._from, numbers[-1] + 1, "right"))
        cuts = np.searchsorted(numbers, self._from[first:last])
        ends = np.append(cuts, len(numbers))
        ends[1:] -= cuts
        ahead = np.repeat(self._ahead[first : last + 1], ends)
        ahead += numbers
        found = self._names.take(ahead, mode="clip")  # a name that has entered may have the index after the last
        asked = self._has_come[first:last] & (cuts > 0)
        asked &= numbers.take(cuts - 1, mode="clip") == self._from[first:last] - 1
        found[cuts[asked] - 1] = (self._moves[first:last][asked] >> np.uint64(32)).astype(np.uint32)
        found &= _POSITION
        return found

    def members(self, firsts: Column, sizes: Column, mixed: bool) -> Column:
        """Return positions (k,) int64 of groups' elements, group by group, ascending in each.

        Args:
            firsts: (g,) the number of the first element of each group.
            sizes: (g,) the number of elements of each group.
            mixed: whether a group has elements of several keys.
        """
        ends = np.cumsum(sizes)
        found = self._found(np.arange(int(ends[-1])) + np.repeat(firsts - (ends - sizes), sizes))
        if not mixed:
            return found.astype(np.int64)
        group = np.repeat(np.arange(len(sizes), dtype=np.uint32) << np.uint32(POSITION_BITS), sizes)
        found |= group
        found.sort(kind="stable")  # merges the runs of the keys
        found &= _POSITION
        return found.astype(np.int64)

    def mixed(self, first_keys: Column, last_keys: Column) -> npt.NDArray[np.bool_]:
        """Return which groups (g,) have elements of several keys: their positions do not ascend here."""
        present = sums_before(self.starts[1:] > self.starts[:-1])
        several: npt.NDArray[np.bool_] = present[last_keys + 1] - present[first_keys] > 1
        return several

    def note(self, at: Column, before: Elements, after: Elements) -> None:
        """Note new values of elements at distinct positions; `move_noted` moves them, if another link follows."""
        if self._layout:
            self._news = at, before, after

    def move_noted(self) -> None:
        """Move the noted elements to their new places."""
        if self._news is None:
            return
        at, *news = self._news
        before, after = (self._keys_of(elements).copy() for elements in news)
        self._news = None
        moved = np.flatnonzero(before != after)
        before, after, at = before[moved], after[moved], at[moved].astype(np.uint32)
        gone, come = (_named(keys) | at for keys in (before, after))
        self.starts[1:] += (np.bincount(after, minlength=256) - np.bincount(before, minlength=256)).cumsum()
        names = np.sort(np.concatenate([gone, come]), kind="stable")
        numbers = np.searchsorted(self._names, names)
        was_there = self._names.take(numbers, mode="clip") == names
        new = names.astype(np.uint64) << np.uint64(32)
        new |= (2 * numbers + was_there).view(np.uint64)
        moves = np.concatenate([self._moves, new])
        moves.sort(kind="stable")  # merges two runs
        again = np.zeros(len(moves), bool)  # names that entered and left again, or left and came back
        again[1:] = moves[1:] == moves[:-1]
        again[:-1] |= again[1:]
        self._set_moves(moves[~again])
        if len(self._moves) > MOST_MOVES:
            gone = ((self._moves & _LOW_HALF) >> np.uint64(1))[~self._has_come].view(np.int64)
            come = (self._moves[self._has_come] >> np.uint64(32)).astype(np.uint32)
            self._names[:] = np.concatenate([np.delete(self._names, gone), come])
            self._names.sort(kind="stable")  # merges two runs
            self._set_moves(self._moves[:0])


def _name(keys: Bytes, out: Elements) -> None:
    """Fill `out` with the names of elements with these keys, in ascending order.

    This takes 2.4 ms for 512 Ki elements. NumPy's sort of 32-bit integers takes 1.2 to 2.8 ms on most processors, and
    15 ms on some (AMD's Zen 4), where one of its vector instructions is slow. Its sort of bytes uses none of them.
    """
    starts = range(0, keys.size, SORTED_TOGETHER)
    blocks = [keys[start : start + SORTED_TOGETHER] for start in starts]
    orders = [(np.argsort(b, kind="stable") + i).astype(np.uint32) for b, i in zip(blocks, starts, strict=True)]
    counts = np.array([np.bincount(block, minlength=256) for block in blocks]).reshape(-1, 256)
    ends = np.cumsum(counts, axis=1).tolist()
    begins = (np.cumsum(counts, axis=1) - counts).tolist()
    at = 0
    for key in np.flatnonzero(counts.any(axis=0)).tolist():
        pieces = [order[i[key] : j[key]] for order, i, j in zip(orders, begins, ends, strict=True)]
        end = at + sum(map(len, pieces))
        np.concatenate(pieces, out=out[at:end])
        out[at:end] |= np.uint32(key << POSITION_BITS)
        at = end


def _named(keys: Bytes) -> Elements:
    """Return names with these keys and position 0."""
    names: Elements = keys.astype(np.uint32) << np.uint32(POSITION_BITS)
    return names
