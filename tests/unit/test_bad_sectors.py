"""If a disk cannot read bytes that nothing needs, the wanted ranges around them are read without these bytes."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.chunks.bad_sectors import read_around
from snapstore.errors import StorageError
from snapstore.format.blobs import pack

#: Ranges, as (pack, gap before the range, length); with a negative gap, a range overlaps the one before it.
RANGES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([-3000, -1, 0, 7, 4095, 4096, 20_000, 65_000]), st.integers(0, 9000)),
    min_size=1,
    max_size=30,
)


def planned(drawn):
    """Return the planned reads, the columns of the ranges that they join, and the size of the buffer."""
    at, columns = [0, 0, 0], []
    for number, gap, length in drawn:
        at[number] = max(0, at[number] + gap)
        columns.append((number, at[number], length))
        at[number] += length
    packs, offsets, lengths = np.array(columns, np.int64).T
    reads, positions, size = pack.plan_reads(packs, offsets, lengths)
    return reads, (packs, offsets, lengths, positions), size


@given(RANGES)
def test_ranges_apart_cover_what_is_wanted_and_no_wide_gap(drawn):
    reads, (_, offsets, lengths, positions), size = planned(drawn)
    wanted = np.zeros(size, bool)
    for at, length in zip(positions.tolist(), lengths.tolist(), strict=True):
        wanted[at : at + length] = True
    apart = pack.apart(reads, offsets, lengths, positions)
    covered = np.zeros(size, bool)
    for one in apart or reads:
        covered[one.position : one.position + one.length] = True
        if apart:
            (around,) = (r for r in reads if r.position <= one.position < r.position + r.length)
            assert (one.pack, one.offset - one.position) == (around.pack, around.offset - around.position)
            assert one.length
            holes = np.diff(
                np.flatnonzero(wanted[one.position : one.position + one.length]), prepend=-1, append=one.length
            )
            assert holes.max() <= pack.PAGE_BYTES
    assert (covered >= wanted).all()
    assert not apart or len(apart) > sum(one.length > 0 for one in reads)


class Disk:
    """Records the calls of `fill`, which fails if a read contains the bad byte."""

    def __init__(self, bad, number=errno.EIO):
        self.bad, self.number, self.calls = bad, number, []

    def fill(self, reads):
        self.calls.append([(one.offset, one.length) for one in reads])
        for one in reads:
            if one.offset <= self.bad < one.offset + one.length:
                try:
                    raise OSError(self.number, os.strerror(self.number))
                except OSError as error:
                    raise StorageError(f"cannot read {one.offset}") from error


THREE = [(0, 0, 1000), (0, 20_000, 1000), (0, 10, 500)]  # one read; the last two are neighbours


def test_a_bad_sector_between_ranges_is_left_out(caplog):
    reads, (_, *ranges), _ = planned(THREE)
    assert [(one.offset, one.length) for one in reads] == [(0, 22_510)]
    disk = Disk(5000)
    read_around(disk.fill, reads, tuple(ranges))
    assert disk.calls == [[(0, 22_510)], [(0, 1000), (21_000, 1510)]]
    assert "cannot read 0; skipping bytes that nothing needs" in caplog.text
    assert all(isinstance(argument, str) for record in caplog.records for argument in record.args)


def test_a_bad_sector_in_a_range_is_an_error_that_holds_no_other():
    reads, (_, *ranges), _ = planned(THREE)
    disk = Disk(500)
    with pytest.raises(StorageError, match="cannot read 0") as caught:
        read_around(disk.fill, reads, tuple(ranges))
    assert len(disk.calls) == 2
    assert caught.value.__context__ is caught.value.__cause__, "the first error would hold the memory that is filled"


@pytest.mark.parametrize(("drawn", "number"), [(THREE, errno.ETIMEDOUT), (THREE[1:], errno.EIO)])
def test_other_errors_and_reads_without_gaps_are_not_repeated(drawn, number):
    """Otherwise a read would wait twice for a store that does not answer."""
    reads, (_, *ranges), _ = planned(drawn)
    disk = Disk(20_500, number)
    with pytest.raises(StorageError, match="cannot read"):
        read_around(disk.fill, reads, tuple(ranges))
    assert len(disk.calls) == 1


def test_a_forged_range_of_no_bytes_has_no_reads_apart():
    reads, (_, *ranges), _ = planned([(0, 0, 0)])
    assert pack.apart(reads, *ranges) == []
