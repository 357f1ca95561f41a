"""Ranges: which requests read many ranges of one object. Neighbours are joined, long ranges are split.

In: (offset, length) of every range. Out: pieces, each one request, and which bytes of it belong to which range. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Ranges nearer than this are read as one: a request costs more than these bytes.
JOIN_GAP_BYTES = 64 * 1024
#: A piece is at most so long; a longer range is read in several at once, since one connection gives 50 to 100 MB/s.
PIECE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Share:
    """What one range gets of a piece."""

    which: int  # index of the range
    start: int  # first byte in the range
    at: int  # first byte in the piece
    length: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A span of the object that one request reads."""

    offset: int
    length: int
    shares: tuple[Share, ...]

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + self.length


def plan_pieces(ranges: Sequence[tuple[int, int]]) -> list[Piece]:
    """The requests that read every byte of every range, in the order of their offsets; none for empty ranges."""
    pieces: list[Piece] = []
    group: list[int] = []  # ranges that one piece will hold
    begin = end = 0  # of the group
    for which in sorted((i for i, (_, length) in enumerate(ranges) if length), key=lambda i: ranges[i]):
        offset, length = ranges[which]
        if group and (offset - end > JOIN_GAP_BYTES or max(end, offset + length) - begin > PIECE_BYTES):
            pieces += _pieces_of(ranges, group, begin, end)
            group = []
        begin, end = (begin, max(end, offset + length)) if group else (offset, offset + length)
        group.append(which)
    return pieces + (_pieces_of(ranges, group, begin, end) if group else [])


def _pieces_of(ranges: Sequence[tuple[int, int]], group: Sequence[int], begin: int, end: int) -> list[Piece]:
    if len(group) > 1 or end - begin <= PIECE_BYTES:
        shares = tuple(Share(i, 0, ranges[i][0] - begin, ranges[i][1]) for i in group)
        return [Piece(begin, end - begin, shares)]
    count = -(-(end - begin) // PIECE_BYTES)
    size = -(-(end - begin) // count)
    starts = range(0, end - begin, size)
    lengths = [min(size, end - begin - start) for start in starts]
    return [Piece(begin + s, n, (Share(group[0], s, 0, n),)) for s, n in zip(starts, lengths, strict=True)]
