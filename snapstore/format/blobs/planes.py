"""Planes: split a chunk or its difference from a base into byte planes, merge them again, and measure their entropy.

Plane k holds the k-th byte (little-endian) of every element: exponents with exponents, noise with noise. LMC calls this
byte grouping; Blosc calls it shuffle. Shifts and narrowing casts on whole arrays run at 6-7 GB/s on one core; a strided
copy of bytes runs at 3.6 GB/s, and a transpose at 0.7-1.3 GB/s (docs/design/cpu-engine.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...arrays import Bytes, Column

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
#: Layouts: plane k holds byte k of each element, or of each element rotated left by one bit.
BYTES, ROTATED = 0, 1
#: A sampled histogram counts this many runs of this many elements: 4,096 give the entropy of a plane to 0.01 bits, and
#: to count more would cost as much as to split the chunk.
SAMPLE_RUNS, SAMPLE_RUN = 128, 32


class Scratch(threading.local):
    """Memory that is reused for every chunk: new pages cost more than the work in them.

    A thread has its own, or borrows some for one job. So jobs of a pool take as much memory as run at the same time,
    not as the pool has threads.
    """

    _free: ClassVar[list[dict[str, Bytes]]] = []  # of all threads; the last one is borrowed first

    def __init__(self) -> None:
        self._rooms: dict[str, Bytes] = {}
        self._borrows = False

    def room(self, purpose: str, nbytes: int) -> Bytes:
        """Return (nbytes,) uint8, valid until this thread calls again for the same purpose."""
        room = self._rooms.get(purpose)
        if room is None or room.size < nbytes:
            room = self._rooms[purpose] = np.empty(nbytes, np.uint8)
        return room[:nbytes]

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Use borrowed memory in this thread; inside another such use, the same memory, for other purposes."""
        if self._borrows:
            yield
            return
        own = self._rooms
        try:
            self._rooms = self._free.pop()
        except IndexError:
            self._rooms = {}
        try:
            self._borrows = True
            yield
        finally:
            self._borrows = False
            self._free.append(self._rooms)
            self._rooms = own

    def clear(self) -> None:
        """Release the memory that nothing borrows."""
        self._free.clear()


scratch = Scratch()


def split(chunk: Bytes, element_size: int, layout: int = BYTES, out: Bytes | None = None) -> Bytes:
    """Split a chunk into its planes.

    Args:
        chunk: (r,) uint8, r a multiple of `element_size`.
        element_size: 1, 2, 4 or 8.
        layout: BYTES, or ROTATED for floats: each element is first rotated left by one bit, so that the sign bit, which
            is noise, does not share a plane with the exponent.
        out: (r,) uint8, filled; None: new memory.

    Returns:
        (element_size, r / element_size) uint8; a view of `chunk` for element size 1.
    """
    if element_size == 1:
        return chunk.reshape(1, -1)
    elements = chunk.view(_UNSIGNED[element_size])
    planes = (np.empty(chunk.size, np.uint8) if out is None else out).reshape(element_size, -1)
    shifted = scratch.room("shifted", chunk.size).view(elements.dtype)
    for k in range(element_size):
        if layout == BYTES and k == 0:
            np.copyto(planes[0], elements, casting="unsafe")
            continue
        if k:
            np.right_shift(elements, 8 * k - layout, out=shifted)
        else:
            np.right_shift(elements, 8 * element_size - 1, out=shifted)
            np.bitwise_or(shifted, elements << 1, out=shifted)
        np.copyto(planes[k], shifted, casting="unsafe")
    return planes


def merge(planes: Bytes | Sequence[Bytes], out: Bytes, layout: int = BYTES) -> None:
    """Merge e planes, each (n,) uint8, into out (e * n,) uint8: the inverse of `split`."""
    element_size = len(planes)
    if element_size == 1:
        out[:] = planes[0]
        return
    elements = out.view(_UNSIGNED[element_size])
    np.copyto(elements, planes[element_size - 1])
    for k in range(element_size - 2, -1, -1):
        np.left_shift(elements, 8, out=elements)
        np.bitwise_or(elements, planes[k], out=elements)
    if layout == ROTATED:
        sign = elements << (8 * element_size - 1)
        np.right_shift(elements, 1, out=elements)
        np.bitwise_or(elements, sign, out=elements)


def difference(chunk: Bytes, base: Bytes, element_size: int, out: Bytes) -> None:
    """Fill `out` with the zigzag form of the differences of a chunk's elements from its base's.

    Elements are integers, and differences wrap around. As signed numbers, 0, -1, 1, -2, ... become 0, 1, 2, 3, ...

    Args:
        chunk, base, out: (r,) uint8, r a multiple of `element_size`.
        element_size: 1, 2, 4 or 8.
    """
    after, before, found = (array.view(_UNSIGNED[element_size]) for array in (chunk, base, out))
    signs = scratch.room("shifted", out.size).view(f"i{element_size}")
    np.subtract(after, before, out=found)
    if element_size == 1:  # NumPy shifts bytes ten times as slowly as it compares and negates them
        np.less(found.view(np.int8), 0, out=signs.view(bool))
        np.negative(signs, out=signs)
    else:
        np.right_shift(found.view(signs.dtype), 8 * element_size - 1, out=signs)
    np.add(found, found, out=found)
    np.bitwise_xor(found, signs.view(found.dtype), out=found)


def add(planes: Sequence[Bytes], base: Bytes, out: Bytes) -> None:
    """Fill `out` with a base plus a difference in planes: the inverse of `difference` and `split`.

    Args:
        planes: of the difference, (n,) uint8 each, plane 0 first.
        base, out: (e * n,) uint8; they may be the same memory.
    """
    element_size = len(planes)
    before, after = (array.view(_UNSIGNED[element_size]) for array in (base, out))
    found = scratch.room("added", out.size).view(after.dtype)
    merge(planes, found.view(np.uint8))
    signs = scratch.room("shifted", out.size).view(after.dtype)
    np.bitwise_and(found, 1, out=signs)
    np.negative(signs, out=signs)
    np.right_shift(found, 1, out=found)
    np.bitwise_xor(found, signs, out=found)
    np.add(before, found, out=after)


def unxor(planes: Sequence[Bytes], base: Bytes, out: Bytes, layout: int) -> None:
    """Fill `out` with the XOR of a base and of what `planes` merge to in a layout.

    Args:
        planes: of the XOR of a chunk and the base, (n,) uint8 each, plane 0 first.
        base, out: (e * n,) uint8; they may be the same memory.
    """
    found = scratch.room("added", out.size)
    merge(planes, found, layout)
    np.bitwise_xor(base, found, out=out)


def sample(chunk: Bytes, element_size: int, layout: int = BYTES) -> Bytes:
    """Return runs of a chunk's elements, as planes (e, m) uint8; all elements of a short chunk."""
    elements = chunk.view(_UNSIGNED[element_size])
    runs = elements.size // SAMPLE_RUN
    if runs >= 2 * SAMPLE_RUNS:
        elements = elements[: runs * SAMPLE_RUN].reshape(runs, SAMPLE_RUN)[sampled_runs(runs)].ravel()
    return split(elements.view(np.uint8), element_size, layout)


def sampled_runs(runs: int) -> npt.NDArray[np.int64]:
    """Return which of the runs of a chunk are sampled, (SAMPLE_RUNS,), ascending.

    One at a pseudo-random place in each of SAMPLE_RUNS equal parts of the chunk. Runs at equal distances would all lie
    in the same columns of many matrices.
    """
    return (_SAMPLED_AT * np.uint64(runs) >> np.uint64(32 + SAMPLE_RUNS.bit_length() - 1)).astype(np.int64)


def _sampled_at() -> npt.NDArray[np.uint64]:
    """Return where each sampled run begins, in units of 2^-32 of a part; mixed as by MurmurHash3's finalizer."""
    part = np.arange(SAMPLE_RUNS, dtype=np.uint32)
    mixed = (part + np.uint32(1)) * np.uint32(2654435769)
    for shift, factor in ((15, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ mixed >> np.uint32(shift)) * np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return part.astype(np.uint64) << np.uint64(32) | mixed


_SAMPLED_AT = _sampled_at()


@dataclass(frozen=True, slots=True)
class Statistics:
    """Entropy and skew of every plane, from its histogram."""

    bits: npt.NDArray[np.float64]  # (e,) order-0 entropy [bits per byte]
    top_share: npt.NDArray[np.float64]  # (e,) share of the most frequent byte


def histograms(planes: Bytes) -> npt.NDArray[np.int64]:
    """Count every byte value of each plane, (e, 256) int64."""
    return np.stack([np.bincount(plane, minlength=256) for plane in planes])


def statistics(counts: npt.NDArray[Any]) -> Statistics:
    """Return entropy and skew of planes from their histograms (e, 256), integers."""
    is_sampled = counts.size == 0 or int(counts.max()) < ENTROPY_TERMS.size
    terms = ENTROPY_TERMS[counts] if is_sampled else _terms(counts)
    total, distinct = counts.sum(axis=1), (counts > 0).sum(axis=1)
    return statistics_of(total, terms.sum(axis=1), distinct, counts.max(axis=1))


def statistics_of(total: Column, terms: npt.NDArray[Any], distinct: Column, top: Column) -> Statistics:
    """Return entropy and skew of planes from sums over their histograms; all of them are (e,).

    A sampled histogram looks less random than its plane; the Miller-Madow term (K-1)/2N corrects this
    (Miller 1955, "Note on the bias of information estimates").

    Args:
        total: the number of bytes counted.
        terms: the sum of ENTROPY_TERMS, by the counts.
        distinct, top: how many byte values there are, and the count of the most frequent one.
    """
    total = np.maximum(total, 1)
    bits = (_terms(total) - terms) / (total * ENTROPY_UNIT)
    bias = (distinct - 1) / (2 * np.log(2) * total)
    return Statistics(np.clip(bits + bias, 0.0, 8.0), top / total)


#: The entropy of a plane of N bytes is log2(N) minus the sum of c * log2(c) / N over its counts c. The terms are taken
#: as integers in this unit: sums of integers do not depend on their order, so engines agree to the last bit.
ENTROPY_UNIT = 2.0**32


def _terms(counts: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return c * log2(c) of counts."""
    terms: npt.NDArray[np.float64] = np.rint(counts * np.log2(np.maximum(counts, 1)) * ENTROPY_UNIT)
    return terms


#: The terms by counts, for all counts of a sample.
ENTROPY_TERMS = _terms(np.arange(2 * SAMPLE_RUNS * SAMPLE_RUN)).astype(np.int64)
