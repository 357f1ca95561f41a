"""A box map names the ranks whose boxes overlap a wanted box. A wrong map may cost reads, but no byte is wrong."""

from __future__ import annotations

import logging
import math
import tracemalloc
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from kit import rank_saves
from kit.rank_saves import as_rank, sharded
from kit.rank_snapshots import RankWriter, columns, rows, strided
from kit.repositories import created
from kit.samples import examples
from snapstore import FormatError, Repository
from snapstore.format.manifests import boxes, manifest
from snapstore.format.manifests.box_map import MAX_BYTES, BoxMap, ranks_with
from snapstore.format.manifests.rank_checks import read_children
from snapstore.restore.pipeline import read_into
from snapstore.restore.sources import AsRank, PartSources
from snapstore.storage.memory import MemoryStore

CUTTERS = {"rows": rows, "columns": columns, "strided": strided}


def map_of(shapes, world, cut):
    """Return the map that is merged from the maps of all ranks, and the boxes by rank and tensor.

    Args:
        cut: gives the boxes of a tensor's shape that a rank holds.
    """
    held = [{t: found for t, shape in enumerate(shapes) if (found := cut(shape, r, world))} for r in range(world)]
    numbers = np.arange(len(shapes))
    maps = [BoxMap.of_rank(r, own, len(shapes)).encode() for r, own in enumerate(held)]
    read = [(r, BoxMap.decode(data, "x"), numbers) for r, data in enumerate(maps) if data]
    return BoxMap.decode(BoxMap.merged(read, len(shapes)).encode(), "x"), held


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=5),
    st.integers(1, 7),
    st.sampled_from(sorted(CUTTERS)),
    st.data(),
)
@settings(max_examples=examples(80), deadline=None)
def test_the_ranks_named_are_those_whose_boxes_overlap(shapes, world, cut, data):
    found, held = map_of([tuple(shape) for shape in shapes], world, CUTTERS[cut])
    for tensor, shape in enumerate(shapes):
        ends = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
        box = [a for a, _ in ends], [b - a for a, b in ends]
        expected = {r for r in range(world) for own in held[r].get(tensor, ()) if boxes.overlap(own, box)}
        assert found.ranks(tensor, box) == expected
        for rank in range(world):
            assert found.boxes(tensor, rank) == [[*o, *s] for o, s in held[rank].get(tensor, ())]
        assert found.count(tensor) == sum(len(own.get(tensor, ())) for own in held)
    assert found.torn([tuple(shape) for shape in shapes]) == []


@given(st.integers(2, 9), st.integers(1, 4), st.integers(2, 5), st.data())
@settings(max_examples=examples(80), deadline=None)
def test_a_tensor_is_torn_unless_its_boxes_are_disjoint_and_cover_it(height, width, world, data):
    """A tensor is torn unless each element is in exactly one box; the tensors beside it, of the same shape, are not.

    Shards are moved, or cut at the edges of the tensor. The sizes of moved shards can still add up.
    """
    held: dict[int, list] = {}
    counts = np.zeros((height, width), int)
    for rank in range(world):
        first, end = (height * r // world for r in (rank, rank + 1))
        moved = data.draw(st.sampled_from([0, 0, 0, -1, 1]))
        low, high = max(first + moved, 0), min(end + moved, height)
        if high > low:
            held[rank] = [((low, 0), (high - low, width))]
            counts[low:high] += 1
    if not held:
        return
    maps = [(rank, BoxMap.of_rank(rank, {0: own}, 1), np.array([1])) for rank, own in held.items()]
    maps.append((world, BoxMap.of_rank(world, {n: [((0, 0), (height, width))] for n in (0, 1)}, 2), np.array([0, 2])))
    assert BoxMap.merged(maps, 3).torn([(height, width)] * 3) == ([] if (counts == 1).all() else [1])


def test_a_tensor_without_boxes_is_not_called_torn():
    found = BoxMap.merged([(0, BoxMap.of_rank(0, {1: [((), ())]}, 2), np.arange(2))], 2)
    assert found.torn([(3,), ()]) == []


def test_its_size_grows_with_the_forms_of_tensors_and_not_with_their_number():
    """A map of 150 tensors with three shapes takes less than twice the bytes of a map of three tensors."""
    few = [(4096, 128), (4096,), (1024, 512)]
    small, large = (map_of(few * count, 128, rows)[0].encode() for count in (1, 50))
    assert len(small) < 800
    assert len(large) < 2 * len(small)


def test_stages_count_their_tensors_in_orders_of_their_own():
    """A merged map has one number for a tensor that several stages of a pipeline number differently."""
    own = [BoxMap.of_rank(0, {0: [((0,), (4,))]}, 1), BoxMap.of_rank(3, {0: [((4,), (4,))], 1: [((), ())]}, 2)]
    found = BoxMap.merged([(0, own[0], np.array([2])), (3, own[1], np.array([2, 0]))], 3)
    assert found.ranks(2, ((3,), (2,))) == {0, 3}
    assert found.ranks(0, ((), ())) == {3}
    assert found.ranks(1, ((0,), (1,))) is None
    assert BoxMap.merged([], 3).encode() == b""


def test_patterns_that_do_not_fit_are_left_out(monkeypatch, caplog):
    monkeypatch.setattr("snapstore.format.manifests.box_map.MAX_BYTES", 2500)
    found, _ = map_of([(40,), (41,), (40,)], 40, rows)
    assert [found.count(tensor) for tensor in range(3)] == [40, None, 40]
    assert "no room for 1 of 3 tensors" in caplog.text
    assert "larger chunk_bytes" in caplog.text


def test_many_replicas_fit():
    """A map of 200 patterns of 4,096 boxes, as 512 replicas of 8 shards have, packs 33 MB of numbers into 100 kB."""
    numbers = np.arange(4096)
    columns = [numbers, numbers * 32, numbers * 0, numbers * 0 + 32]
    patterns = [np.stack([*columns, numbers * 0 + 8000 + n], 1) for n in range(200)]
    data = BoxMap(np.arange(1, 201), patterns).encode()
    assert len(data) < 100_000
    assert BoxMap.decode(data, "x").ranks(199, ((64, 0), (64, 10))) == {2, 3}


def packed(*fields, size=None):
    return zstandard.ZstdCompressor(write_content_size=size is None).compress(msgspec.msgpack.encode(list(fields)))


def bomb():
    frame = zstandard.ZstdCompressor().compressobj(size=MAX_BYTES + 1)
    return b"".join(
        [*(frame.compress(bytes(1 << 20)) for _ in range(MAX_BYTES >> 20)), frame.compress(b"x"), frame.flush()]
    )


U32, I64 = (lambda *n: np.array(n, "<u4").tobytes()), (lambda *n: np.array(n, "<i8").tobytes())
BAD = {
    "no frame": b"x",
    "no size": packed(b"", b"", b"", size=0),
    "no list": zstandard.ZstdCompressor().compress(b"\x01"),
    "a field more": packed(b"", b"", b"", b""),
    "half a number": packed(b"abc", b"", b""),
    "half a pattern": packed(b"", U32(1), b""),
    "a pattern of nobody": packed(U32(1), b"", b""),
    "numbers missing": packed(U32(1), U32(1, 2), I64(0)),
    "numbers beyond all": packed(U32(1), U32(*[64, 2**32 - 1] * 1000), I64(0)),
    "dimensions beyond all": packed(U32(1), U32(2**31, 1), I64(0)),
    "a bomb": bomb(),
    "bytes behind the frame": packed(U32(1, 0), U32(1, 1), I64(5, 6, 7)) + b"x",
    "two frames": packed(U32(1, 0), U32(1, 1), I64(5, 6, 7)) * 2,
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_map_is_refused(what, caplog):
    """Bytes that are no box map are a FormatError. A reader logs a warning instead, and uses no map."""
    assert BoxMap.decode(packed(U32(1, 0), U32(1, 1), I64(5, 6, 7)), "x").boxes(0, 5) == [[6, 7]]
    with pytest.raises(FormatError, match=r"^x: "):
        BoxMap.decode(BAD[what], "x")
    with caplog.at_level(logging.WARNING):
        assert ranks_with(BAD[what], [(0, ((0,), (1,)))], "x") == set()
    assert "run 'snapstore check'" in caplog.text


WHOLE_MAP = map_of([(40, 3), (7,), (), (64, 64)], 5, columns)[0].encode()


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4), st.booleans())
def test_a_map_with_other_bytes_is_refused_or_names_some_ranks(changes, within):
    """A map with changed bytes raises a FormatError or gives some answer.

    The changed bytes are in the compressed frame, or in its content.
    """
    data = bytearray(zstandard.ZstdDecompressor().decompress(WHOLE_MAP) if within else WHOLE_MAP)
    for at, value in changes:
        data[at % len(data)] = value
    try:
        found = BoxMap.decode(zstandard.ZstdCompressor().compress(bytes(data)) if within else bytes(data), "x")
    except FormatError:
        return
    for tensor, shape in enumerate([(40, 3), (7,), (), (64, 64)]):
        found.ranks(tensor, ((0,) * len(shape), shape))
        found.boxes(tensor, 1)
        found.count(tensor)


def test_absurd_numbers_name_ranks_that_nobody_has():
    """A map with absurd numbers raises no error. It may name ranks that do not exist."""
    wild = BoxMap.decode(packed(U32(1, 1), U32(1, 3), I64(-1, 2**62, 2**62, -5, 2**63 - 1, 9, 2**63 - 1, 1, 1)), "x")
    assert wild.ranks(0, ((0,), (10,))) is not None
    assert wild.ranks(0, ((0, 0), (1, 1))) is None  # the box has another number of dimensions
    assert wild.ranks(7, ((0,), (1,))) is None


def test_a_map_of_many_boxes_costs_no_object_for_each():
    """A few kilobytes may stand for so many."""
    count = 200_000
    found = BoxMap.decode(packed(U32(1, 1), U32(0, count), I64(*[0] * count)), "x")
    tracemalloc.start()
    try:
        assert found.count(0) == count
        assert tracemalloc.get_traced_memory()[1] < 100_000
        assert len(found.boxes(0, 0)) == count
        assert found.boxes(0, 1) == []
        before = tracemalloc.get_traced_memory()[0]
        assert found.boxes(1, 5) == []
        assert tracemalloc.get_traced_memory()[0] - before < 1_000_000
    finally:
        tracemalloc.stop()


def test_patterns_that_declare_more_boxes_than_there_are_numbers():
    for forms in (U32(2, 2**32 - 1), U32(*[64, 2**32 - 1] * 1000)):
        with pytest.raises(FormatError, match="its patterns have others"):
            BoxMap.decode(packed(U32(1), forms, I64(1, 2, 3)), "x")


# -- whole snapshots

WHOLE = {"w": torch.arange(64 * 24.0).reshape(64, 24), "v": torch.arange(1280.0).reshape(640, 2)}
MESHES = {
    "fsdp 8": ([8], [Shard(0)]),
    "fsdp 6": ([6], [Shard(0)]),
    "fsdp 2": ([2], [Shard(0)]),
    "fsdp x columns": ([4, 2], [Shard(0), Shard(1)]),
}


def state_of(name):
    return {"m": {key: sharded(whole, *MESHES[name]) for key, whole in WHOLE.items()}}


@pytest.fixture
def repository():
    with Repository.create(MemoryStore(), chunk_bytes=256) as found:
        yield found


@pytest.fixture
def opened(monkeypatch):
    """Collect the ranks whose manifests are read."""
    found = []
    real = PartSources._read
    monkeypatch.setattr(
        PartSources, "_read", lambda self, root, refs: found.extend(r.rank for r in refs) or real(self, root, refs)
    )
    return found


def fill(repository, snapshot, name, rank):
    """Restore on one rank; return the number of elements that are wrong."""
    world = math.prod(MESHES[name][0])
    with as_rank(rank, world):
        into, whole = state_of(name), state_of(name)
        for value in into["m"].values():
            value._local_tensor.fill_(-1)
        read_into(repository.context, snapshot.ref, into, as_rank=AsRank("drop", rank, world))
        pairs = ((into["m"][key]._local_tensor, whole["m"][key]._local_tensor) for key in WHOLE)
        return sum(int((a != b).sum()) for a, b in pairs)


@pytest.mark.parametrize(
    ("target", "rank", "expected"),
    [("fsdp 8", 5, {5}), ("fsdp 6", 1, {1, 2}), ("fsdp 2", 1, {4, 5, 6, 7}), ("fsdp x columns", 5, {4, 5})],
)
def test_a_rank_opens_only_the_manifests_that_overlap(repository, opened, target, rank, expected):
    snapshot, _ = rank_saves.save(repository, [lambda: state_of("fsdp 8")] * 8, 1)
    assert repository.check("data").problems == []
    opened.clear()
    assert fill(repository, snapshot, target, rank) == 0
    assert set(opened) == expected
    assert len(opened) == len(expected)


def test_a_rewrite_keeps_the_map(repository):
    snapshot, _ = rank_saves.save(repository, [lambda: state_of("fsdp 8")] * 8, 1)
    store, ref = repository.context.store, next(ref for ref in snapshot.manifests if ref.part)
    root = manifest.read(store, ref, None)
    assert root.header.box_map
    for m in (root, *read_children(store, ref, root, None)):
        assert manifest.ManifestContents.of(m).box_map == m.header.box_map


def altered(change):
    """Save a state of five ranks whose root has a changed map; return its repository and snapshot."""
    store = created()
    state = {"": {}, "m": {"w": np.arange(640, dtype=np.float32).reshape(64, 10), "v": np.arange(99, dtype=np.int16)}}
    whole, _ = map_of([a.shape for a in state["m"].values()], 5, rows)

    def with_map(contents):
        return replace(contents, box_map=change(whole)) if contents.children else contents

    snapshot = RankWriter(store).save(state, world=5, changes=with_map)
    return store, snapshot, state["m"]


def moved(found):
    rows = [one.copy() for one in found.patterns]
    rows[0][:, 0] = rows[0][::-1, 0]
    return BoxMap(found.tensors, rows).encode()


def grown(found):
    rows = [np.concatenate([one, one[-1:]]) for one in found.patterns]
    for one in rows:
        one[-1, 0] += 1
    return BoxMap(found.tensors, rows).encode()


LIES = {
    "other ranks": moved,
    "a rank too few": lambda found: BoxMap(found.tensors, [one[1:] for one in found.patterns]).encode(),
    "a rank that is none": grown,
    "no map": lambda found: b"x",
}


@pytest.mark.parametrize("what", LIES)
def test_a_wrong_map_is_found_by_a_check_and_restores_the_right_bytes(what):
    honest, snapshot, _ = altered(BoxMap.encode)
    ref = snapshot.manifests[1]
    read_children(honest, ref, manifest.read(honest, ref, None), None)
    store, snapshot, whole = altered(LIES[what])
    ref = snapshot.manifests[1]
    with pytest.raises(FormatError, match="box map"):
        read_children(store, ref, manifest.read(store, ref, None), None)
    with Repository.open(store) as repository:
        assert any("box map" in str(problem) for problem in repository.check().problems)
        state = repository.restore(snapshot.ref)["m"]
    assert all(np.array_equal(state[key], array) for key, array in whole.items())
