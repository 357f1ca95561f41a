"""Key order: the elements of a chunk by their keys, in which sparse.py finds the members of its groups.

In: elements. Out: their positions by number in that order, which is kept up to date from link to link of a chain.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...arrays import Bytes, Column
from ..planes import scratch

#: An order in which more elements change their places is sorted again.
MOST_MOVES = 1000
#: A name has so many bits for the position of an element, and 8 above them for its key.
POSITION_BITS = 24

Elements = npt.NDArray[np.unsignedinteger]


def keys_of(elements: Elements, layout: int) -> Bytes:
    """Return the key of every element, its byte in the highest plane (layout 1) or 0; valid until the next call."""
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

    A thread has one at a time: the next one takes its memory.

    To sort them takes longer than to apply a link, which gives few of them another key.

    Args:
        elements: (n,) of the oldest base, at most 2^POSITION_BITS.
        layout: planes.ROTATED if keys are exponents, else planes.BYTES: then all keys are 0.

    Attributes:
        starts: (257,) the elements of key k have the numbers starts[k] to starts[k + 1] - 1 in this order.
    """

    def __init__(self, elements: Elements, layout: int) -> None:
        self._layout = layout
        self._rooms = [scratch.room(f"names {i}", elements.size * 4) for i in (0, 1)]
        self._names = self._rooms[0].view(np.uint32)  # key << shift | position, ascending
        np.copyto(self._names, keys_of(elements, layout))
        np.left_shift(self._names, POSITION_BITS, out=self._names)
        np.bitwise_or(self._names, np.arange(elements.size, dtype=np.uint32), out=self._names)
        if layout:
            self._names.sort()
        firsts = self._first_name(np.arange(256, dtype=np.uint8))
        self.starts: Column = np.append(np.searchsorted(self._names, firsts), elements.size).astype(np.int64)
        self._news: tuple[Column, Elements, Elements] | None = None

    def _first_name(self, keys: Bytes) -> Elements:
        names: Elements = keys.astype(np.uint32) << np.uint32(POSITION_BITS)
        return names

    def positions(self, numbers: Column | slice) -> Column:
        """Return where the elements with these numbers lie in the chunk."""
        found: Column = self._names[numbers] & np.uint32((1 << POSITION_BITS) - 1)
        return found

    def members(self, first_key: int, last_key: int) -> Column:
        """Return the positions of the elements of a group, ascending."""
        return np.sort(self.positions(slice(self.starts[first_key], self.starts[last_key + 1])))

    def mixed(self, first_keys: Column, last_keys: Column) -> npt.NDArray[np.bool_]:
        """Return which groups have elements of several keys, so that their members are not in this order."""
        present = np.append(0, np.cumsum(np.diff(self.starts) > 0))
        several: npt.NDArray[np.bool_] = present[last_keys + 1] - present[first_keys] > 1
        return several

    def note(self, at: Column, before: Elements, after: Elements) -> None:
        """Note new values of elements at distinct positions, for `settle`: the newest link of a chain needs none."""
        if self._layout:
            self._news = at, before, after

    def settle(self) -> None:
        """Give the elements that were noted their new places."""
        if self._news is None:
            return
        at, *news = self._news
        before, after = (keys_of(elements, self._layout).copy() for elements in news)
        self._news = None
        moved = np.flatnonzero(before != after)
        before, after, at = before[moved], after[moved], at[moved].astype(np.uint32)
        gone, come = (np.sort(self._first_name(keys) | at) for keys in (before, after))
        moves = np.bincount(after, minlength=256) - np.bincount(before, minlength=256)
        self.starts[1:] += np.cumsum(moves)
        cuts = np.concatenate([np.searchsorted(self._names, gone), np.searchsorted(self._names, come)])
        if len(moved) > MOST_MOVES:
            self._names[cuts[: len(moved)]] = come
            self._names.sort()
            return
        events = np.argsort(cuts, kind="stable")
        cuts, is_gone = cuts[events], events < len(moved)
        begins = [0, *np.maximum.accumulate(cuts + is_gone).tolist()]
        kept = [self._names[begin:end] for begin, end in zip(begins, [*cuts.tolist(), None], strict=True)]
        new = [come[:0] if i < 0 else come[i : i + 1] for i in (events - len(moved)).tolist()]
        pieces = [piece for pair in zip(kept, [*new, come[:0]], strict=True) for piece in pair]
        self._rooms.reverse()
        self._names = np.concatenate(pieces, out=self._rooms[0].view(np.uint32))
