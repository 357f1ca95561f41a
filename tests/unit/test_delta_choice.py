"""Delta finds known chunks, chooses a base, and stores a difference only where it pays."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.format.manifests import delta_choice
from snapstore.format.manifests.chunk_table import ChunkTable
from snapstore.format.manifests.delta_chain import Digests, Numbers
from snapstore.format.manifests.delta_choice import ChainCosts
from snapstore.format.manifests.manifest import Box, Manifest, ManifestHeader, TensorEntry
from snapstore.format.records import Snapshot
from snapstore.save.known_chunks import Base, Bases, place_of


def pack_name(number):
    return hashlib.sha256(bytes([number])).hexdigest()


def wide(digest):
    return np.frombuffer(digest.to_bytes(16, "big"), np.uint8)


def a_manifest(digests, packs=(0,), part="model", entries=(), depth=0):
    """Return a manifest whose chunks have `depth` deltas each; their blobs lie in the packs in turn."""
    n, per = len(digests), depth + 1
    table = ChunkTable(
        digests=np.array([wide(d) for d in digests], np.uint8).reshape(-1, 16),
        ref_counts=np.full(n, per, np.uint16),
        ref_kinds=np.resize(np.array([1] * depth + [0], np.uint8), n * per),
        ref_packs=np.resize(np.arange(len(packs), dtype=np.uint32), n * per),
        ref_offsets=np.arange(n * per, dtype=np.uint64),
        ref_lengths=np.full(n * per, 100, np.uint32),
        ref_digests=np.zeros((n * per, 16), np.uint8),
        lengths=np.full(n, 64, np.uint32),
    )
    header = ManifestHeader(
        save_id=bytes(16), snapshot=bytes(16), revision=0, rank=0, sequence=0, part=part, chunk_bytes=64,
        digest_seed=0, tensors=len(entries), chunks=n, refs=n * per, logical_bytes=0, depth=depth,
        packs=b"".join(bytes.fromhex(pack_name(p)) for p in packs),
        pack_sizes=np.array([1000 + p for p in packs], "<u8").tobytes(), sections=[],
    )  # fmt: skip
    return Manifest(header, None, list(entries), b"", table)


def a_base(*manifests, generation=0):
    snapshot = Snapshot(id="0" * 32, run="r", step=0, seq=0, state="committed", write_id="", generation=generation)
    return Base(snapshot, manifests)


def entry(path, first, chunks, dtype="float32", shape=(16,), boxes=1):
    box = Box((0,), tuple(shape), first, chunks)
    return TensorEntry(tuple(path), "tensor", dtype, tuple(shape), False, None, (box,) * boxes, None)


# Bases sort digests by their first half. Here it has few values, so equal halves are common.
digests = st.tuples(st.integers(0, 5), st.integers(0, 2)).map(lambda halves: halves[0] << 64 | halves[1])


@given(st.lists(st.lists(st.integers(0, 2**128 - 1) | digests, max_size=30), max_size=4), st.data())
def test_find_agrees_with_a_dict(tables, data):
    """The second of two digests with equal first halves may look unknown. No digest gets the row of another one."""
    bases = Bases([a_base(a_manifest(table)) for table in tables])
    flat = [d for table in tables for d in table]
    rows: dict[int, int] = {}
    first_of_half: dict[int, int] = {}
    for row, d in enumerate(flat):
        rows.setdefault(d, row)
        first_of_half.setdefault(d >> 64, d)
    wanted = data.draw(st.lists(st.sampled_from(flat) | digests if flat else digests, max_size=40))
    found = bases.find(np.array([wide(d) for d in wanted], np.uint8).reshape(-1, 16))
    assert found.dtype == np.int64
    for d, row in zip(wanted, found.tolist(), strict=True):
        if row >= 0:
            assert flat[row] == d
        if first_of_half.get(d >> 64, d) == d:
            assert row == rows.get(d, -1)


def test_no_bases():
    bases = Bases()
    assert bases.find(np.zeros((3, 16), np.uint8)).tolist() == [-1, -1, -1]
    assert bases.find(np.zeros((0, 16), np.uint8)).tolist() == []
    assert (bases.snapshot, bases.generation, bases.packs) == (None, 0, [])
    assert bases.first_row(place_of(("w",), "float32", (16,))) == (-1, False)


def test_packs_are_renumbered_into_one_list():
    bases = Bases([a_base(a_manifest([1, 2], packs=(7, 3))), a_base(a_manifest([3, 4], packs=(3, 9)), generation=5)])
    assert bases.packs == [pack_name(7), pack_name(3), pack_name(9)]
    assert bases.pack_sizes == [1007, 1003, 1009]
    assert bases.table.ref_packs.tolist() == [0, 1, 1, 2]
    assert bases.generation == 1, "the generation of the first base, plus 1"


def test_manifests_are_left_as_they_were():
    m = a_manifest([1, 2], packs=(7, 3))
    Bases([a_base(a_manifest([5], packs=(3,)), m)])
    assert m.table.ref_packs.tolist() == [0, 1]


def test_depths_and_costs():
    bases = Bases([a_base(a_manifest([1], depth=0), a_manifest([2], depth=3))])
    assert bases.depths.tolist() == [0, 3]
    assert bases.costs.whole.tolist() == [100 + 128.5, 400 + 4 * 128.5]
    assert bases.costs.full.tolist() == [228.5, 228.5]


def test_places_come_from_the_first_base_that_has_them():
    first = a_base(a_manifest([1, 2, 3], entries=[entry("a", 0, 1), entry("b", 1, 2)]), a_manifest([4], part="opt"))
    second = a_base(a_manifest([5, 6, 7], entries=[entry("b", 0, 2), entry("c", 2, 1)]))
    bases = Bases([first, second])
    assert bases.first_row(place_of(("a",), "float32", (16,))) == (0, True)
    assert bases.first_row(place_of(("b",), "float32", (16,))) == (1, True)
    assert bases.first_row(place_of(("c",), "float32", (16,))) == (6, False)
    for place in [(("d",), "float32", (16,)), (("a",), "int32", (16,)), (("a",), "float32", (4, 4))]:
        assert bases.first_row(place_of(*place)) == (-1, False)


def test_inline_tensors_have_no_place():
    bases = Bases([a_base(a_manifest([1], entries=[entry("a", 0, 1), entry("b", 0, 1, boxes=0)]))])
    assert bases.first_row(place_of(("b",), "float32", (16,))) == (-1, False)


def rows_at(bases, place, starts, lengths):
    rows, is_first = bases.rows_at(place, np.array(starts), np.array(lengths))
    return rows.tolist(), is_first


def test_chunks_are_found_by_their_place_in_the_strip():
    """A chunk is found by its strip, start and length. Two boxes lie in one strip, a third in another."""

    def boxes(*found):
        return TensorEntry(("w",), "tensor", "float32", (8, 32), False, None, tuple(Box(*box) for box in found), None)

    first = a_manifest([1, 2], entries=[boxes(((0, 0), (2, 16), 0, 2))])
    second = a_manifest([3, 4, 5, 6], entries=[boxes(((2, 0), (3, 16), 0, 3), ((0, 16), (1, 16), 3, 1))])
    bases = Bases([a_base(first, second)])
    left = place_of(("w",), "float32", (8, 32), (4, 0), (1, 16))
    assert rows_at(bases, left, [64, 128], [64, 64]) == ([1, 2], True)
    assert rows_at(bases, left, [256, 320], [64, 64]) == ([4, -1], True), "the second place is behind the last box"
    assert rows_at(bases, left, [0, 32, 128], [32, 64, 64]) == ([-1, -1, 2], True), "no chunk has this start and length"
    assert rows_at(bases, left, [0, 64], [64, 64]) == ([0, 1], True)
    assert rows_at(bases, place_of(("w",), "float32", (8, 32), (0, 16), (1, 16)), [0], [64]) == ([5], True)
    assert rows_at(bases, place_of(("w",), "float32", (8, 32)), [0], [64]) == ([-1], False)


def test_the_first_base_goes_before_the_others():
    entries = [entry("a", 0, 2)]
    bases = Bases(
        [a_base(a_manifest([1, 2], entries=entries)), a_base(a_manifest([3, 4, 5], entries=[entry("a", 0, 3)]))]
    )
    place = place_of(("a",), "float32", (16,))
    assert rows_at(bases, place, [0, 64, 128], [64, 64, 64]) == ([0, 1, 4], True)
    bases = Bases([a_base(), a_base(a_manifest([3, 4], entries=entries))])
    assert rows_at(bases, place, [0, 64], [64, 64]) == ([0, 1], False)


def run_of(restore_cost, delta_bytes, saves, chunks=72, full_bytes=800_000, plain_bytes=2**20):
    """Return, for each save, (number of full chunks, cost of the dearest chain / cost of its full blob, most links).

    All deltas take the same number of bytes.
    """
    chains = [[full_bytes] for _ in range(chunks)]
    found = []
    for generation in range(1, saves):
        costs = ChainCosts(a_table(chains, plain_bytes))
        rows = np.arange(chunks)
        grows = costs.may_grow(rows, restore_cost, generation, rows)
        grows &= delta_choice.pays(delta_bytes, full_bytes, costs.delta_limits(rows, restore_cost))
        chains = [[delta_bytes, *c] if grow else [full_bytes] for c, grow in zip(chains, grows.tolist(), strict=True)]
        costs = ChainCosts(a_table(chains, plain_bytes))
        found.append((chunks - int(grows.sum()), (costs.whole / costs.full).max(), max(map(len, chains)) - 1))
    return found


def a_table(chains, plain_bytes):
    """Return a table of chains, each given by the stored lengths of its blobs, newest first."""
    refs, counts = sum(map(len, chains)), np.array([len(c) for c in chains], np.uint16)
    kinds = np.ones(refs, np.uint8)
    kinds[np.cumsum(counts) - 1] = 0
    return ChunkTable(
        digests=np.zeros((len(chains), 16), np.uint8), ref_counts=counts, ref_kinds=kinds,
        ref_packs=np.zeros(refs, np.uint32), ref_offsets=np.zeros(refs, np.uint64),
        ref_lengths=np.array([length for c in chains for length in c], np.uint32),
        ref_digests=np.zeros((refs, 16), np.uint8), lengths=np.full(len(chains), plain_bytes, np.uint32),
    )  # fmt: skip


@pytest.mark.parametrize("restore_cost", [1.5, 2, 3.0, 10])
@pytest.mark.parametrize("delta_bytes", [1000, 10_000, 100_000, 400_000, 760_000])
def test_no_chain_costs_more_than_it_may(restore_cost, delta_bytes):
    found = run_of(restore_cost, delta_bytes, 60)
    assert max(dearest for _, dearest, _ in found) <= restore_cost
    assert max(depth for _, _, depth in found) <= delta_choice.MAX_LINKS


def test_a_cost_of_one_means_no_deltas():
    assert run_of(1.0, 1, 5) == [(72, 1.0, 0)] * 4


def test_dense_chains_are_two_deltas_deep():
    found = run_of(3.0, 750_000, 20)
    assert max(depth for _, _, depth in found) == 2
    fulls = [full for full, _, _ in found]
    assert fulls[0] == 0, "at first all chunks get deltas, because the size of a delta is unknown"
    assert max(fulls) <= 72 / 2
    assert {sum(fulls[i : i + 3]) for i in range(4, 16)} == {72}, "each chunk is full once in three saves"


@pytest.mark.parametrize("delta_bytes", [100_000, 250_000, 400_000])
def test_chunks_that_were_full_together_do_not_become_full_together_again(delta_bytes):
    period = max(depth for _, _, depth in run_of(3.0, delta_bytes, 40)) + 1
    found = [full for full, _, _ in run_of(3.0, delta_bytes, 6 * period)]
    assert max(found) <= 72 / 2
    assert sum(found[-3 * period :]) <= 3.2 * 72, "no more full chunks than the restore cost needs"


def skips_of(*chains, plain_bytes=2**20, restore_cost=3.0):
    table = a_table(chains, plain_bytes)
    rows, refs = ChainCosts(table).skips(restore_cost, np.zeros(len(chains)))
    return dict(zip(rows.tolist(), (refs - table.starts[rows]).tolist(), strict=True))


def test_a_skip_leaves_out_the_links_since_the_last_one():
    full, link, skip = 700_000, 10_000, 65_000
    assert skips_of([full], [link, full], [*[link] * 30, full]) == {}
    assert skips_of([*[link] * 55, full]) == {0: 55}
    assert skips_of([*[link] * 55, skip, full]) == {0: 55}
    assert skips_of([link, skip, skip, full], [*[link] * 5, skip, skip, full]) == {}
    assert skips_of([*[skip] * 14, full]) == {0: 14}, "many skips are joined as well"
    assert skips_of([*[300_000] * 3, full]) == {}, "three links are too few for a skip"
    assert skips_of([*[link] * 5, full], restore_cost=1.2) == {0: 5}
    assert skips_of(*[[*[link] * n, full] for n in (1, 55, 3, 56)]) == {1: 55, 3: 56}


@pytest.mark.parametrize("restore_cost", [3.0, 30.0])
def test_very_small_links_are_skipped_before_there_are_too_many(restore_cost):
    """Each link has a cost, however few bytes it has. So at most SKIP_LINKS links follow each other without a skip."""
    full = 2**20 + 50
    last = next(n for n in range(1, 400) if skips_of([*[100] * n, full], restore_cost=restore_cost))
    assert last == delta_choice.SKIP_LINKS + 1
    assert skips_of([*[100] * last, 9000, full], restore_cost=restore_cost) == {0: last}


@pytest.mark.parametrize("times", [1, 2, 2.5, 3])
def test_a_link_that_happens_to_be_large_is_no_skip(times):
    """The links after it do not count as a new chain; a skip over so many links has at least six times their bytes."""
    link, full = 10_000, 700_000
    assert skips_of([*[link] * 30, round(times * link), *[link] * 25, full]) == {0: 56}
    assert skips_of([*[link] * 30, 6 * link, *[link] * 25, full]) == {}


def test_skips_are_spread_over_saves():
    table = a_table([[10_000] * 30 + [700_000]] * 1000, 2**20)
    share = len(ChainCosts(table).skips(3.0, np.arange(1000))[0]) / 1000
    table = a_table([[10_000] * 31 + [700_000]] * 1000, 2**20)
    more = len(ChainCosts(table).skips(3.0, np.arange(1000))[0]) / 1000
    assert 0.02 < more - share < 0.08


def test_older_chunks_of_chains_as_a_table():
    table = a_table([[5, 4, 100], [200], [9, 8, 7, 300]], 64)
    table.ref_digests[:, 0] = np.arange(8)
    older = table.from_links(np.array([0, 2]), np.array([1, 6]))
    assert older.ref_lengths.tolist() == [4, 100, 7, 300]
    assert older.ref_counts.tolist() == [2, 2]
    assert older.ref_kinds.tolist() == [1, 0, 1, 0]
    assert older.digests[:, 0].tolist() == [1, 6]
    assert len(table.from_links(np.empty(0, np.int64), np.empty(0, np.int64))) == 0


@pytest.mark.parametrize(
    ("delta_bytes", "full_bytes", "limit_bytes", "expected"),
    [
        (0, 100, 100, True),
        (96.875, 100, 100, True),
        (96.9, 100, 100, False),  # the delta saves less than 1/32
        (50, 100, 50, True),
        (51, 100, 50, False),  # a restore would cost too much
        (0, 0, 0, True),
        (1, 0, 0, False),
    ],
)
def test_pays(delta_bytes, full_bytes, limit_bytes, expected):
    assert delta_choice.pays(delta_bytes, full_bytes, limit_bytes) is expected


def test_chunks_of_damaged_packs_are_unknown():
    bases = Bases(
        [a_base(a_manifest([n << 64 for n in range(4)], packs=(7, 3))), a_base(a_manifest([1 << 64], packs=(9,)))],
        [pack_name(3)],
    )
    assert bases.usable.tolist() == [True, False, True, False, True]
    assert bases.find(np.array([wide(n << 64) for n in range(4)])).tolist() == [0, 4, 2, -1]
    nothing = Bases([a_base(a_manifest([1, 2], packs=(3,), depth=2))], [pack_name(3)])
    assert nothing.find(np.array([wide(1)])).tolist() == [-1]


# --- sorted columns --------------------------------------------------------------------------------------------------

HALVES = [bytes(8), bytes([0] * 7 + [1]), bytes([255] * 8)]
DIGESTS = st.builds(lambda first, second: first + second, st.sampled_from(HALVES), st.sampled_from(HALVES))


@given(st.lists(st.lists(st.tuples(DIGESTS, st.integers(0, 255)))))
def test_numbers_of_digests_whose_halves_are_often_equal(batches):
    """`Digests` gives the same numbers as a dict."""
    found, expected = Digests(), {}
    for batch in batches:
        digests = np.frombuffer(b"".join(digest for digest, _ in batch), np.uint8).reshape(-1, 16)
        known = found.add(digests, np.array([number for _, number in batch], np.uint8))
        assert known.tolist() == [digest in expected for digest, _ in batch]
        for digest, number in batch:
            expected[digest] = max(number, expected.get(digest, 0))
    every = [first + second for first in HALVES for second in HALVES]
    column = np.frombuffer(b"".join(every), np.uint8).reshape(-1, 16)
    assert found.numbers_of(column).tolist() == [expected.get(digest, 0) for digest in every]
    assert found.has(column).tolist() == [expected.get(digest, 0) > 0 for digest in every]


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)))))
def test_numbers_of_integers(batches):
    found, expected = Numbers(), {}
    for batch in batches:
        keys, numbers = np.array(batch, np.uint64).reshape(-1, 2).T
        assert found.add(keys, numbers).tolist() == [key in expected for key, _ in batch]
        for key, number in batch:
            expected[key] = max(number, expected.get(key, 0))
    keys, numbers = found.all()
    assert list(zip(keys.tolist(), numbers.tolist(), strict=True)) == sorted(expected.items())
