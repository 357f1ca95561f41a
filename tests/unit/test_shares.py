"""The shares of replicas hold each row once, are cut on the grid where that is possible, and are balanced."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapstore.format.manifests.boxes import cut, strip_start
from snapstore.save.shares import MIN_CHUNKS_OFF_GRID, RankShares, balanced_turns, common
from snapstore.state.values.held_array import Held
from snapstore.state.values.sharded import Sharding
from snapstore.state.values.tensors import TensorSpec

CHUNK = 1024


def spec_of(shape, dtype="float32", kind="tensor"):
    return TensorSpec(("m", "w"), kind, dtype, tuple(shape), False, None)


def pieces_of_all(shape, ranks, name="w", boxes=None, dtype="float32"):
    """Return the pieces of each rank, if all ranks hold the same boxes."""
    found = []
    for rank in range(ranks):
        sharding = None if boxes is None else Sharding(tuple(shape), boxes, rank, ranks, tuple(range(ranks)))
        shares = RankShares(rank, ranks, CHUNK)
        found.append(shares.pieces(("m", ("m", name), 0), spec_of(shape, dtype), sharding))
    return found


@given(
    st.lists(st.integers(0, 70), max_size=3),
    st.integers(1, 9),
    st.sampled_from(["float32", "int8", "complex128"]),
    st.data(),
)
def test_each_row_is_stored_once(shape, ranks, dtype, data):
    """The ranks together store each row of a tensor once. The same holds for one box in it and for several."""
    boxes = None
    if shape and data.draw(st.booleans()):
        ends = sorted(data.draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=6)))
        rest = [data.draw(st.integers(0, n)) for n in shape[1:]]
        found = [
            ((a, *rest), (b - a, *(n - r for n, r in zip(shape[1:], rest, strict=True))))
            for a, b in zip(ends[::2], ends[1::2], strict=False)
        ]
        boxes = tuple(box for box in found if all(box[1]))
    seen = np.zeros(shape, int)
    expected = np.zeros(shape, int)
    for offsets, box in [((0,) * len(shape), tuple(shape))] if boxes is None else boxes:
        expected[tuple(slice(o, o + n) for o, n in zip(offsets, box, strict=True))] += 1
    rows = np.flatnonzero(expected.reshape(expected.shape[0], -1).any(axis=1)) if shape and expected.size else []
    for pieces in pieces_of_all(shape, ranks, boxes=boxes, dtype=dtype):
        for piece in pieces:
            assert all(piece.sizes), "no box is empty"
            seen[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))] += 1
            if piece.sizes:
                local = rows[piece.first_row : piece.first_row + piece.sizes[0]]
                assert local.tolist() == list(range(piece.offsets[0], piece.offsets[0] + piece.sizes[0]))
    np.testing.assert_array_equal(seen, expected)


def ends_of(pieces, shape):
    return {strip_start(p.offsets, p.sizes, 4) + np.prod(p.sizes) * 4 for of in pieces for p in of} - {
        np.prod(shape) * 4
    }


@given(st.sampled_from([1, 2, 16, 64, 256, 512]), st.integers(1, 2000), st.integers(2, 8))
def test_cuts_lie_on_the_grid_where_rows_end_there(width, rows, ranks):
    assert all(end % CHUNK == 0 for end in ends_of(pieces_of_all((rows, width), ranks), (rows, width)))


def test_rows_that_rarely_end_on_the_grid_are_cut_anywhere():
    """Only one row of 1,020 bytes in 256 ends on the grid. A share has many chunks: two off the grid cost little."""
    pieces = pieces_of_all((400, 255), 4)
    assert [sum(p.sizes[0] for p in of) for of in pieces] == [100] * 4
    small = pieces_of_all((8, 255), 4)
    assert sorted(len(of) for of in small) == [0, 0, 0, 1], "each share would have fewer than MIN_CHUNKS_OFF_GRID"
    assert MIN_CHUNKS_OFF_GRID == 4


def test_small_tensors_are_spread_over_all_ranks():
    counts = np.zeros(8)
    for i in range(800):
        counts += [len(of) for of in pieces_of_all((3,), 8, name=f"layers.{i}.bias")]
    assert counts.sum() == 800
    assert counts.min() > 60


def test_many_tensors_are_balanced():
    held = np.zeros(8)
    for i in range(60):
        for shape in ((64, 64), (172, 64), (64, 172), (64,), ()):
            pieces = pieces_of_all(shape, 8, name=f"layers.{i}.w{len(shape)}")
            held += [sum(np.prod(p.sizes) * 4 for p in of) for of in pieces]
    assert held.max() < 1.15 * held.mean()


def test_a_whole_tensor_is_cut_as_its_shares_are():
    whole = cut(0, 512 * 300 * 4, CHUNK)
    parts = [
        cut(strip_start(p.offsets, p.sizes, 4), int(np.prod(p.sizes)) * 4, CHUNK)
        for of in pieces_of_all((512, 300), 3)
        for p in of
    ]
    grid = set(np.cumsum(whole).tolist())
    assert len(grid - set(np.cumsum(np.concatenate(parts)).tolist())) == 0
    assert sum(map(len, parts)) <= len(whole) + 2


def test_a_box_is_a_view_of_its_rows():
    local = torch.arange(12.0).reshape(6, 2)
    (piece,) = RankShares(1, 3, 16).pieces(("m", ("w",), 0), spec_of((6, 2)), None)
    held = piece.held(Held(local, spec_of((6, 2))))
    assert held.value.data_ptr() == local[piece.first_row :].data_ptr()
    assert held.value.shape == piece.sizes
    parameter = torch.nn.Parameter(local)
    held = piece.held(Held(parameter, spec_of((6, 2), kind="parameter")))
    room = np.empty(held.spec.nbytes, np.uint8)
    held.copy_into(room)
    assert room.tobytes() == local[piece.first_row : piece.first_row + piece.sizes[0]].numpy().tobytes()


def test_a_rank_outside_of_the_group_stores_nothing():
    shares = RankShares(3, 4, CHUNK, {("m", ("w",), 0): (0, 1)})
    assert shares.pieces(("m", ("w",), 0), spec_of((600, 2)), None) == []
    assert shares.pieces(("m", ("v",), 0), spec_of((600, 2)), Sharding((600, 2), (), 0, 1, ())) == []
    megatron = Sharding((600, 2), (((0, 0), (600, 2)),), 1, 1, ())
    assert shares.pieces(("m", ("v",), 0), spec_of((600, 2)), megatron) == []


def stored_bytes(specs, ranks, turns):
    """Return how much each rank stores of plain tensors that all ranks hold, and check that together it is all."""
    found = []
    for rank in range(ranks):
        shares = RankShares(rank, ranks, CHUNK, turns=turns)
        pieces = [(spec, piece) for name, spec in specs.items() for piece in shares.pieces(name, spec, None)]
        found.append(sum(int(np.prod(piece.sizes)) * spec.itemsize for spec, piece in pieces))
    assert sum(found) == sum(spec.nbytes for spec in specs.values())
    return np.array(found)


def named(shapes):
    return {("m", ("m", number), 0): spec_of(shape) for number, shape in enumerate(shapes)}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_few_small_tensors_are_balanced(ranks):
    """A convolutional network under DDP: most tensors have fewer chunks than there are ranks."""
    widths = [16, 32, 64, 128]
    shapes = [(4 * w, w) for w in widths * 6] + [(w, w, 3, 3) for w in widths[:3] * 4] + [(w,) for w in widths * 8]
    specs = named(shapes)
    held = stored_bytes(specs, ranks, balanced_turns(specs, {}, ranks, CHUNK))
    assert held.max() < 1.05 * held.mean()


@given(st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=12), st.integers(1, 9), st.data())
def test_turns_are_the_same_on_all_ranks_and_stay(shapes, ranks, data):
    """They follow from the tensors, not from their order; tensors that come later change no turn."""
    specs = named(shapes)
    some = dict(data.draw(st.permutations(list(specs.items()))))
    turns = balanced_turns(specs, {}, ranks, CHUNK)
    assert balanced_turns(some, {}, ranks, CHUNK) == turns
    assert common(some, ()) == common(specs, ())
    stored_bytes(specs, ranks, turns)
    more = specs | {("m", ("m", f"new {number}"), 0): spec for number, spec in enumerate(specs.values())}
    later = balanced_turns(more, turns, ranks, CHUNK)
    assert {name: later[name] for name in specs} == turns
    stored_bytes(more, ranks, later)


def test_the_turns_of_tensors_that_only_some_ranks_hold_do_not_matter():
    name = ("m", ("m", "w"), 0)
    for turn in range(3):
        held = [
            len(RankShares(rank, 3, CHUNK, {name: (0, 2)}, turns={name: turn}).pieces(name, spec_of((4,)), None))
            for rank in range(3)
        ]
        assert held in ([1, 0, 0], [0, 0, 1])
        assert held == [
            len(RankShares(rank, 3, CHUNK, {name: (0, 2)}).pieces(name, spec_of((4,)), None)) for rank in range(3)
        ]
