"""Packs can be listed, scanned and read back in a few long reads."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.packs import scan
from snapstore.arrays import items_at
from snapstore.engine.cpu import EncodedChunk, HostEncoded
from snapstore.errors import FormatError, IntegrityError
from snapstore.format import hashing
from snapstore.format.blobs import blob, pack, planes
from snapstore.format.records import MadeFor
from snapstore.storage.memory import MemoryStore

SEED = 0xD1A5ED5EED
digest = partial(hashing.digest, seed=SEED)

SAVE = bytes(range(16))


class Counting(MemoryStore):
    """Remembers the ranges that were read."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def get_range(self, key, offset, length, into=None):
        self.reads.append((key, offset, length))
        return super().get_range(key, offset, length, into)


def a_blob(size, element_size=2, seed=0, base=None):
    chunk = np.random.default_rng(seed).geometric(0.3, size * element_size).astype(np.uint8)
    statistics = planes.statistics(planes.histograms(planes.split(chunk, element_size)))
    out = np.empty(blob.bound(chunk.size, element_size), np.uint8)
    return blob.encode(chunk, element_size, planes.BYTES, statistics, (digest(chunk), base), out)


def encoded(blobs):
    """Return blobs in the form in which an engine returns them."""
    return HostEncoded.of([EncodedChunk(memoryview(b), False, np.empty(0, np.uint8)) for b in blobs])


def append(writer, blobs, cuts=()):
    """Add blobs in one call, or in several that `cuts` divide; return the (offset, length) of each in the pack."""
    made, offsets = encoded(blobs), []
    ends = sorted({*cuts, len(blobs)} - {0})
    for first, last in zip([0, *ends], ends, strict=False):
        offsets += writer.extend(made, first, last).tolist()
    return list(zip(offsets, map(len, blobs), strict=True))


def a_pack(blobs, part="model", rank=3, sequence=7):
    writer = pack.PackWriter(SAVE, rank, sequence, part)
    places = append(writer, blobs)
    size = writer.size_bytes
    data = bytearray(writer.seal())
    assert len(data) == size + 96 * len(blobs) + len(part.encode()) + 32
    return data, places


def listing(data):
    store = MemoryStore()
    store.put("packs/00/p", data)
    return pack.read_listing(store, "packs/00/p", len(data))


class Late:
    """Encoded blobs whose bytes are copied only when the caller waits, as with the engine of a device."""

    def __init__(self, blobs):
        self.inner, self.entries, self.waited = encoded(blobs), encoded(blobs).entries, 0

    def copy(self, first, last, out):
        out[:] = 0xEE

        def wait():
            self.waited += 1
            self.inner.copy(first, last, out)()

        return wait


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=8), st.data())
def test_blobs_added_in_several_calls_equal_those_of_one_call(shapes, data):
    blobs = [a_blob(size, e, i) for i, (size, e) in enumerate(shapes)]
    whole, places = a_pack(blobs)
    for make in (encoded, Late):
        for buffer in (None, np.full(200, 0xFF, np.uint8), np.full(len(whole) + 99, 0xFF, np.uint8)):
            writer, made, found = pack.PackWriter(SAVE, 3, 7, "model", buffer), make(blobs), []
            ends = sorted({*data.draw(st.sets(st.integers(1, len(blobs)))), len(blobs)})
            for first, last in zip([0, *ends], ends, strict=False):
                found += writer.extend(made, first, last).tolist()
            assert found == [offset for offset, _ in places]
            assert writer.count == len(blobs)
            assert writer.seal() == whole
            if make is Late:
                assert made.waited == len(ends)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 8]), st.booleans()), max_size=8),
    st.text(st.characters(codec="utf-8"), max_size=12),
)
def test_listing_and_scan_give_what_was_appended(shapes, part):
    blobs = [a_blob(size, e, i, b"b" * 16 if delta else None) for i, (size, e, delta) in enumerate(shapes)]
    data, places = a_pack(blobs, part)
    found = listing(data)
    assert found.header == pack.PackHeader(3, SAVE, 7, MadeFor(SAVE, 0))
    assert found.part == part
    assert [(int(e["offset"]), int(e["length"])) for e in found.entries] == places
    scanned = list(scan(memoryview(data), "here"))
    assert [at for at, _ in scanned] == [offset for offset, _ in places]
    for data_of, entry, (_, header) in zip(blobs, found.entries, scanned, strict=True):
        assert entry["digest"].tobytes() == header.digest
        assert entry["base"].tobytes() == header.base
        assert (entry["raw_bytes"], entry["transform"]) == (header.raw_bytes, header.transform)
        assert entry["element_size"] == header.element_size
        assert entry["codecs"].tobytes() == header.codecs
        assert entry["plane_bytes"].tolist() == blob.stored_plane_bytes(data_of)


def test_blobs_are_aligned_and_padded_with_zeros():
    data, places = a_pack([a_blob(size) for size in range(60, 70)])
    end = pack.HEADER.size
    for offset, length in places:
        assert offset % blob.ALIGNMENT == 0
        assert not any(data[end:offset])
        end = offset + length


def test_two_packs_of_one_save_never_have_the_same_bytes():
    blobs = [a_blob(50)]
    assert len({bytes(a_pack(blobs, rank=r, sequence=s)[0]) for r in range(2) for s in range(2)}) == 4


def test_a_damaged_footer_is_found_and_a_scan_still_works():
    blobs = [a_blob(100, seed=i) for i in range(4)]
    data, places = a_pack(blobs)
    start = places[-1][0] + places[-1][1]
    start += -start % blob.ALIGNMENT
    for at in range(start, len(data)):
        bad = bytearray(data)
        bad[at] ^= 0x10
        with pytest.raises((FormatError, IntegrityError)):
            listing(bad)
        assert [at for at, _ in scan(memoryview(bad), "here")] == [offset for offset, _ in places]


def test_a_scan_ends_at_the_first_damage():
    data, places = a_pack([a_blob(100, seed=i) for i in range(4)])
    data[places[2][0] + 90] ^= 1
    assert [at for at, _ in scan(memoryview(data), "here")] == [offset for offset, _ in places[:2]]


def test_every_truncation_is_found():
    data, _ = a_pack([a_blob(40), a_blob(40)])
    for length in range(len(data)):
        with pytest.raises((FormatError, IntegrityError)):
            listing(data[:length])
    with pytest.raises(IntegrityError, match="damaged footer"):
        listing(data + b"\0")


@pytest.mark.parametrize(("at", "message"), [(0, "not a pack: magic"), (8, "pack version 254, this snapstore reads 1")])
def test_other_objects_and_versions_are_named(at, message):
    data, _ = a_pack([a_blob(40)])
    data[at] ^= 0xFF
    with pytest.raises(FormatError, match=message):
        listing(data)


def read(store, wanted):
    """Read each (key, offset, length) as a ChunkReader does; return views of the bytes."""
    keys = sorted({key for key, _, _ in wanted})
    columns = [
        np.array(c, np.int64)
        for c in ([keys.index(k) for k, _, _ in wanted], *([w[i] for w in wanted] for i in (1, 2)))
    ]
    reads, positions, size = pack.plan_reads(*columns)
    buffer = np.full(size, 0xEE, np.uint8)
    filled = np.zeros(size, np.uint8)
    for one in reads:
        room = buffer[one.position : one.position + one.length]
        assert room.size == one.length
        filled[one.position : one.position + one.length] += 1
        store.get_range(keys[one.pack], one.offset, one.length, room.data)
    assert (filled == 1).all(), "every byte of the buffer must be read once"
    return [buffer[at : at + n].data for at, n in zip(positions.tolist(), columns[2].tolist(), strict=True)]


def test_neighbours_are_read_together():
    store = Counting()
    places = {}
    for key in ("packs/00/a", "packs/00/b"):
        data, places[key] = a_pack([a_blob(500, seed=i) for i in range(20)])
        store.put(key, data)
    wanted = [(key, *place) for key, of_pack in places.items() for place in of_pack]
    found = read(store, wanted[::-1])[::-1]
    for (key, offset, length), view in zip(wanted, found, strict=True):
        assert bytes(view) == store.get(key)[offset : offset + length]
    assert [key for key, _, _ in store.reads] == ["packs/00/a", "packs/00/b"]


def planned(wanted):
    """Return the (offset, length) of every read that is planned for these ranges of one pack."""
    reads, _, _ = pack.plan_reads(np.zeros(len(wanted), np.int64), *np.array(wanted, np.int64).T)
    return [(one.offset, one.length) for one in reads]


def test_a_wide_gap_splits_a_read_and_a_narrow_one_does_not():
    near, far = 100 + pack.JOIN_GAP_BYTES, 300 + 2 * pack.JOIN_GAP_BYTES
    assert planned([(at, 100) for at in (0, near, far)]) == [(0, near + 100), (far, 100)]


def test_a_few_wide_gaps_are_read_too():
    """Wide gaps are read, the narrowest first, while together they are at most a tenth of the wanted bytes."""
    size, narrow, wide = 1_500_000, 200_000, 450_000
    assert wide < pack.WIDE_GAP_BYTES
    starts = [0, size + wide, 2 * size + wide + narrow, 3 * size + 2 * wide + narrow]
    assert planned([(at, size) for at in starts]) == [
        (0, size), (starts[1], 2 * size + narrow), (starts[3], size),
    ]  # fmt: skip
    assert planned([(at, size) for at in (*starts, starts[3] + size)]) == [
        (0, starts[2] + size), (starts[3], 2 * size),
    ]  # fmt: skip
    beyond = pack.WIDE_GAP_BYTES + 1
    assert planned([(0, 9 * size), (9 * size + beyond, size)]) == [(0, 9 * size), (9 * size + beyond, size)]


def test_a_range_that_is_wanted_often_counts_once():
    wanted = [(0, 100_000)] * 1000 + [(100_000 * i, 100) for i in range(2, 100)]
    assert sum(length for _, length in planned(wanted)) < 1.2 * 100_000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**8), st.integers(1, 10**5)), min_size=1, max_size=200))
def test_the_buffer_is_little_larger_than_what_is_wanted(wanted):
    packs, offsets, lengths = np.array(wanted, np.int64).T
    reads, positions, size = pack.plan_reads(packs, offsets, lengths)
    most = lengths.sum() * (1 + pack.WIDE_GAPS_SHARE) + len(wanted) * pack.JOIN_GAP_BYTES
    assert size == sum(one.length for one in reads) <= most
    assert (positions + lengths <= size).all()


def test_no_read_grows_beyond_its_bound(monkeypatch):
    monkeypatch.setattr(pack, "JOIN_MAX_BYTES", 1000)
    found = planned([(300 * i, 300) for i in range(10)] + [(50_000, 5000)])
    assert found == [(0, 900), (900, 900), (1800, 900), (2700, 300), (50_000, 5000)]


def test_no_ranges_are_no_reads():
    nothing = np.empty(0, np.int64)
    reads, positions, size = pack.plan_reads(nothing, nothing, nothing)
    assert (reads, positions.tolist(), size) == ([], [], 0)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 900), st.integers(0, 99)), max_size=30),
    st.sampled_from([(0, 50), (10, 100), (100, 10**6)]),
)
def test_any_ranges_overlapping_or_repeated(wanted, bounds):
    store = MemoryStore()
    for name in "ab":
        store.put(f"packs/00/{name}", np.random.default_rng(ord(name)).bytes(1000))
    wanted = [(f"packs/00/{name}", offset, length) for name, offset, length in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "JOIN_GAP_BYTES", bounds[0])
        patch.setattr(pack, "JOIN_MAX_BYTES", bounds[1])
        found = read(store, wanted)
    assert [bytes(view) for view in found] == [store.get(key)[at : at + length] for key, at, length in wanted]


def test_items_begin_at_any_byte():
    data = np.arange(40, dtype=np.uint8)
    dtype = np.dtype([("a", "u1"), ("b", "<u4")])
    for end in (40, 9, 5):
        found = items_at(data[:end], np.array([end - 5, 0, end - 5]), dtype)
        assert found["a"].tolist() == [end - 5, 0, end - 5]
        assert found["b"].tolist() == [
            int.from_bytes(bytes(range(at + 1, at + 5)), "little") for at in (end - 5, 0, end - 5)
        ]
        with pytest.raises(IndexError):
            items_at(data[:end], np.array([end - 4]), dtype)
    assert len(items_at(data[:3], np.empty(0, np.int64), dtype)) == 0
