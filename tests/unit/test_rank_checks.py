"""The rank checks accept a root and its children if they fit together and are complete, and refuse all others.

Boxes are compared with a count of every element. Roots and children are forged field by field; each forgery is found.
"""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.rank_snapshots import RankWriter, columns, rows, strided
from kit.repositories import created
from kit.samples import THOROUGH, examples
from snapstore.errors import FormatError, IntegrityError, UnknownFormatError
from snapstore.format.hashing import checksum
from snapstore.format.manifests import manifest, sections
from snapstore.format.manifests.chunk_table import COLUMNS, ChunkTable
from snapstore.format.manifests.manifest import Box, Manifest, ManifestContents, TensorEntry
from snapstore.format.manifests.rank_checks import Cover, RankCheck, read_children
from snapstore.format.manifests.tensor_layout import ChunkSums, check_boxes, check_layouts, check_whole
from snapstore.format.records import RANKS, ManifestRef

SHAPES = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def boxes_within(draw, shape):
    """Draw a box that lies within a shape and is not empty."""
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return [a for a, _ in ends], [b - a for a, b in ends]


@given(st.data(), SHAPES)
@settings(max_examples=examples(300))
def test_boxes_cover_a_tensor_if_every_element_is_in_one(data, shape):
    count = np.zeros(shape, np.int64)
    cover = Cover([shape])
    for offsets, sizes in data.draw(st.lists(boxes_within(shape), max_size=6)) if all(shape) else []:
        count[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))] += 1
        cover.add(0, offsets, sizes)
    assert (cover.wrong() == []) == bool((count == 1).all())


def split(draw, offsets, sizes, depth):
    """Cut a box into two repeatedly; the result is a tiling, but usually no grid."""
    cuttable = [d for d, n in enumerate(sizes) if n > 1]
    if not depth or not cuttable or draw(st.integers(0, 3)) == 0:
        return [(offsets, sizes)]
    d = draw(st.sampled_from(cuttable))
    at = draw(st.integers(1, sizes[d] - 1))
    low, high = [*sizes], [*sizes]
    low[d], high[d] = at, sizes[d] - at
    moved = [*offsets]
    moved[d] += at
    return split(draw, offsets, low, depth - 1) + split(draw, moved, high, depth - 1)


@given(st.data(), st.lists(st.integers(1, 2**40), min_size=1, max_size=4))
@settings(max_examples=examples(150))
def test_any_tiling_of_any_size_covers_and_no_other_set_of_its_boxes_does(data, shape):
    boxes = split(data.draw, [0] * len(shape), shape, 5)
    boxes = data.draw(st.permutations(boxes))

    def wrong(chosen):
        cover = Cover([[1], shape])
        cover.add(0, [0], [1])
        for offsets, sizes in chosen:
            cover.add(1, offsets, sizes)
        return cover.wrong()

    assert wrong(boxes) == []
    assert wrong(boxes[1:]) == [1]
    assert wrong([*boxes, boxes[0]]) == [1]
    (offsets, sizes), *rest = boxes
    shifted = [offsets[0] + 1, *offsets[1:]]
    assert wrong([(shifted, sizes), *rest]) == [1]  # as many elements, but one box lies one row further
    if len(rest):
        assert wrong([rest[0], *rest]) == [1] or math.prod(sizes) == 0


def table_of(lengths):
    """Return a table of chunks of these lengths, each stored as one full blob."""
    n = len(lengths)
    return ChunkTable(
        digests=np.zeros((n, 16), np.uint8),
        ref_counts=np.ones(n, np.uint16),
        ref_kinds=np.zeros(n, np.uint8),
        ref_packs=np.zeros(n, np.uint32),
        ref_offsets=(64 + 8192 * np.arange(n)).astype(np.uint64),
        ref_lengths=np.full(n, 100, np.uint32),
        ref_digests=np.zeros((n, 16), np.uint8),
        lengths=np.array(lengths, np.uint32),
    )


def entry(shape, boxes, inline=None, dtype="float32", path=("m", "w"), kind="tensor"):
    return TensorEntry(tuple(path), kind, dtype, tuple(shape), False, None, boxes, inline)


@given(st.lists(st.integers(1, 256), min_size=1, max_size=12))
def test_chunks_of_any_lengths_are_a_box_if_they_are_its_bytes_in_whole_elements(lengths):
    total = sum(lengths)
    sums = ChunkSums(table_of(lengths))
    whole = entry([-(-total // 4)], [Box((0,), (-(-total // 4),), 0, len(lengths))])
    if total % 4 == 0 and all(n % 4 == 0 for n in lengths):
        check_whole(whole, sums, "x")
    else:
        with pytest.raises(FormatError):
            check_whole(whole, sums, "x")
    check_whole(entry([total], [Box((0,), (total,), 0, len(lengths))], dtype="uint8"), sums, "x")


WRONG_BOXES = {
    "none": [],
    "beyond the end": [Box((2,), (4,), 0, 2)],
    "before the start": [Box((-1,), (2,), 0, 2)],
    "empty": [Box((0,), (0,), 0, 0)],
    "fewer chunks": [Box((0,), (4,), 0, 1)],
    "more bytes than its chunks": [Box((0,), (3,), 0, 2)],
    "inline bytes that are not there": [Box((0,), (2,), 0, 0)],
}


@pytest.mark.parametrize("what", WRONG_BOXES)
def test_boxes_that_do_not_match_their_bytes_are_found(what):
    sums = ChunkSums(table_of([8, 8]))
    check_boxes(entry([5], [Box((0,), (4,), 0, 2)]), sums, "x")
    check_boxes(entry([5], [Box((0,), (4,), 0, 2), Box((4,), (1,), 2, 0)], (0, 4)), sums, "x")
    with pytest.raises(FormatError):
        check_boxes(entry([5], WRONG_BOXES[what]), sums, "x")


def test_a_tensor_in_several_boxes_without_ranks_is_an_unknown_format():
    with pytest.raises(UnknownFormatError, match="2 shards"):
        check_whole(entry([4], [Box((0,), (2,), 0, 1), Box((2,), (2,), 1, 1)]), ChunkSums(table_of([8, 8])), "x")


# -- whole snapshots


def state():
    return {
        "": {},
        "m": {
            "w": np.arange(64 * 24, dtype=np.float32).reshape(64, 24),
            "b": np.arange(9, dtype=np.int16),
            "s": np.float64(3.0).reshape(()),
        },
    }


@pytest.mark.parametrize("cut", [rows, columns, strided])
@pytest.mark.parametrize("world", [1, 3, 5])
def test_what_is_written_passes(cut, world):
    store = created()
    snapshot = RankWriter(store).save(state(), world=world, cut=cut)
    for ref in snapshot.manifests:
        root = manifest.read(store, ref, None)
        check_layouts(root, ref.key)
        assert len(read_children(store, ref, root, None)) == len(root.header.children)


def altered(change_root=lambda c: c, change_child=lambda c: c):
    """Write the state of three ranks with changes to the manifests of part `m`, and check it."""
    store = created()

    def change(contents: ManifestContents) -> ManifestContents:
        if contents.part != "m":
            return contents
        return change_root(contents) if not contents.packs or contents.sequence else change_child(contents)

    snapshot = RankWriter(store).save(state(), world=3, changes=change)
    ref = snapshot.manifests[1]
    root = manifest.read(store, ref, None)
    check_layouts(root, ref.key)
    read_children(store, ref, root, None)


def of_rank(rank, change):
    return lambda c: change(c) if c.rank == rank else c


def with_entry(number, **changes):
    def change(c):
        tensors = [*c.tensors]
        tensors[number] = msgspec.structs.replace(tensors[number], **changes)
        return replace(c, tensors=tensors)

    return change


def with_box(number, **changes):
    def change(c):
        box = msgspec.structs.replace(c.tensors[number].boxes[0], **changes)
        return with_entry(number, boxes=[box])(c)

    return change


EMPTY = msgspec.structs.replace(entry([3], []), path=("m", "w"))
WRONG_CHILDREN = {
    "another world": lambda c: replace(c, world_size=4),
    "no world": lambda c: replace(c, world_size=0, features=[]),
    "another seed": lambda c: replace(c, digest_seed=c.digest_seed ^ 1),
    "another chunk size": lambda c: replace(c, chunk_bytes=2048),
    "a tree of no rank": lambda c: replace(c, tree=["dict", [], []]),
    "another dtype": with_entry(0, dtype="<i4"),
    "another shape": with_entry(0, shape=[64, 25]),
    "another kind": with_entry(0, kind="tensor", dtype="float32"),
    "a box elsewhere": with_box(0, offsets=[0, 0]),
    "a box beyond the tensor": with_box(0, offsets=[60, 0]),
    "a box of other sizes": with_box(0, sizes=[24, 22]),
    "an entry twice": lambda c: replace(c, tensors=[*c.tensors, c.tensors[0]]),
    "an entry of no tensor": with_entry(0, path=["m", "other"]),
    "an entry too few": lambda c: replace(c, tensors=c.tensors[1:]),
    "own values without a tree": lambda c: replace(
        c, tensors=[*c.tensors, entry([0], [], dtype="<f4", kind="array", path=("m", "own"))]
    ),
    "own values before others": lambda c: replace(
        c, tree=["own", []], tensors=[entry([0], [], dtype="<f4", kind="array", path=("m", "own")), *c.tensors]
    ),
}


@pytest.mark.parametrize("what", WRONG_CHILDREN)
def test_a_wrong_child_is_found(what):
    altered()
    with pytest.raises((FormatError, IntegrityError)):
        altered(change_child=of_rank(1, WRONG_CHILDREN[what]))


def test_own_values_and_entries_that_only_count_pass():
    own = entry([0], [], dtype="<f4", kind="array", path=("m", "own"))
    altered(change_child=of_rank(1, lambda c: replace(c, tree=["own", [["array", 2]]], tensors=[*c.tensors, own])))
    # This rank holds the second of two tensors with one path.
    both = [entry([0, 3], [], dtype="<f4", kind="array", path=("m", "w"))]
    altered(
        change_root=lambda c: replace(c, tensors=[*both, *c.tensors]) if c.children else c,
        change_child=lambda c: replace(c, tensors=[*both, *c.tensors]) if c.tensors[0].path == ("m", "w") else c,
    )


def with_page(c, pack=None, **changes):
    """Add a page to a root; its chunk lies in the last pack of the root, or in `pack`, which no child needs."""
    packs = [*c.packs, pack] if pack else c.packs
    table = replace(table_of([512]), ref_packs=np.array([len(packs) - 1], np.uint32))
    page = entry([512], [Box((0,), (512,), 0, 1)], dtype="bytes", kind="page", path=("m",))
    return replace(
        c,
        tree=["pages", len(c.tensors), 1],
        tensors=[*c.tensors, msgspec.structs.replace(page, **changes)],
        table=table,
        packs=packs,
        pack_sizes=[*c.pack_sizes, 1000] if pack else c.pack_sizes,
        logical_bytes=c.logical_bytes + 512,
    )


@pytest.mark.parametrize("pack", [None, "ab" * 32])
def test_a_root_holds_its_pages(pack):
    altered(change_root=lambda c: with_page(c, pack) if c.children else c)


def test_a_page_is_no_entry_of_a_child():
    """A value that is a rank's own may have the path of the root's page, which is that of the part."""
    own = entry([0], [], dtype="<f4", kind="array", path=("m",))
    altered(
        change_root=lambda c: with_page(c) if c.children else c,
        change_child=of_rank(1, lambda c: replace(c, tree=["own", [["array", 2]]], tensors=[*c.tensors, own])),
    )


WRONG_ROOTS = {
    "a page before a tensor": lambda c: replace(with_page(c), tensors=[with_page(c).tensors[-1], *c.tensors]),
    "a page of more bytes than its chunks": lambda c: with_page(c, shape=[513], boxes=[Box((0,), (513,), 0, 1)]),
    "a page of half a chunk": lambda c: with_page(c, shape=[256], boxes=[Box((0,), (256,), 0, 1)]),
    "a page in two boxes": lambda c: with_page(c, boxes=[Box((0,), (512,), 0, 1), Box((0,), (512,), 1, 0)]),
    "a page of a tensor": lambda c: with_page(c, kind="bytes"),
    "a page of another dtype": lambda c: with_page(c, dtype="float32"),
    "a page that lies inline": lambda c: replace(
        with_page(c, shape=[4], boxes=[], inline=[0, 4]),
        inline=b"abcd",
        table=c.table,
        logical_bytes=c.logical_bytes + 4,
    ),
    "a chunk of no page": lambda c: replace(with_page(c), tensors=c.tensors),
    "a page that its bytes do not count": lambda c: replace(with_page(c), logical_bytes=c.logical_bytes),
    "a pack of its own too many": lambda c: replace(with_page(c, "ab" * 32), table=with_page(c).table),
    "a pack of a child of another size": lambda c: replace(with_page(c), pack_sizes=[10**6, *c.pack_sizes[1:]]),
    "inline bytes": lambda c: replace(c, inline=b"x", logical_bytes=c.logical_bytes + 1),
    "boxes": with_entry(0, boxes=[Box((0, 0), (64, 24), 0, 0)]),
    "another shape": with_entry(0, shape=[65, 24]),
    "a tensor more": lambda c: replace(c, tensors=[*c.tensors, entry([1], [], path=("m", "more"))]),
    "a tensor less": lambda c: replace(c, tensors=c.tensors[:-1]),
    "an impossible tensor": with_entry(0, shape=[2**62, 2**62]),
    "an unknown dtype": with_entry(0, dtype="<f9"),
}


@pytest.mark.parametrize("what", WRONG_ROOTS)
def test_a_wrong_root_is_found(what):
    with pytest.raises((FormatError, IntegrityError)):
        altered(change_root=lambda c: WRONG_ROOTS[what](c) if c.children else c)


def test_a_child_has_no_children():
    """A child with children is an error: only a root may have children."""
    store = created()
    writer = RankWriter(store)
    snapshot = writer.save(state(), world=2)
    root = manifest.read(store, snapshot.manifests[1], None)
    contents = replace(ManifestContents.of(root), depth=root.header.depth)
    outer = writer.put_manifest(replace(contents, children=[snapshot.manifests[1]]))
    read = manifest.read(store, outer, None)
    with pytest.raises(FormatError, match="a child with children of its own"):
        read_children(store, outer, read, None)


def root_with(children: list[ManifestRef], world: int) -> bytes:
    return manifest.encode(
        ManifestContents(
            save_id=bytes(16), rank=0, sequence=0, part="m", chunk_bytes=1024, digest_seed=1, tree=None, tensors=[],
            inline=b"", table=ChunkTable.empty(), packs=[], pack_sizes=[], features=[RANKS], world_size=world,
            children=children, logical_bytes=sum(child.logical_bytes for child in children),
        )
    )  # fmt: skip


def child_ref(rank: int, name: int | None = None) -> ManifestRef:
    number = f"{rank if name is None else name:064x}"
    return ManifestRef(part="m", rank=rank, sha256=number, header_sha256=number, size_bytes=1, logical_bytes=2)


@pytest.mark.slow
def test_many_children_take_memory_and_time_by_their_bytes():
    """The memory to decode a header grows with its bytes; only the time limit of the suite bounds the time."""
    count = 200_000 if THOROUGH else 20_000
    data = root_with([child_ref(rank) for rank in range(count)], count)
    tracemalloc.start()
    try:
        header = manifest.decode_header(data, "x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(header.children) == count
    assert peak < 16 * len(data)
    check = RankCheck(Manifest(header, None, [], b"", ChunkTable.empty()), "x")
    with pytest.raises(FormatError, match="the child of rank 0 is missing"):
        check.finish()


@pytest.mark.parametrize(
    "children",
    [
        [child_ref(1), child_ref(0)],
        [child_ref(0), child_ref(0, 7)],
        [child_ref(0), child_ref(1, 0)],
        [child_ref(2)],
        [msgspec.structs.replace(child_ref(0), part="other")],
    ],
)
def test_children_come_by_rank_each_once(children):
    with pytest.raises(FormatError):
        manifest.decode_header(root_with(children, 2), "x")
    manifest.decode_header(root_with([child_ref(0), child_ref(1)], 2), "x")


@given(st.data())
def test_a_header_of_any_ranks_is_decoded_or_refused(data):
    """For any values of its fields, a header is decoded and is consistent, or FormatError is raised."""
    good = root_with([child_ref(0), child_ref(1)], 2)
    fields = msgspec.to_builtins(manifest.decode_header(good, "x"), builtin_types=(bytes,))
    number = st.integers(-3, 3) | st.sampled_from([2**32, 2**63, 2**64 - 1])
    for name in ("world_size", "rank", "chunks", "logical_bytes"):
        if data.draw(st.booleans()):
            fields[name] = data.draw(number)
    fields["features"] = data.draw(st.lists(st.sampled_from([RANKS, "tiles"]), max_size=2))
    for child in fields["children"]:
        child["rank"] = data.draw(number)
    packed = msgspec.msgpack.encode(fields)
    prefix = sections.PREFIX.pack(sections.MAGIC, 1, 0, len(packed), checksum(packed))
    try:
        header = manifest.decode_header(prefix + packed, "x")
    except FormatError:
        return
    first, second = (child.rank for child in header.children)
    assert 0 <= first < second < header.world_size
    assert (header.world_size >= 2, header.rank, header.features[:1]) == (True, 0, [RANKS])


def test_lists_are_closed():
    """An entry or a box with more fields than this release knows is refused: no field may be ignored."""
    store = created()
    snapshot = RankWriter(store).save(state(), world=1)
    root = manifest.read(store, snapshot.manifests[1], None)
    child = root.header.children[0]
    data = store.get(child.key)
    m = manifest.decode(data, "x")
    fields = msgspec.to_builtins(m.tensors)
    longer = [[*fields[0], 7], *fields[1:]]
    boxed = [[*fields[0][:6], [[*fields[0][6][0], 7]], fields[0][7]], *fields[1:]]
    for tensors in (longer, boxed):
        entries, body = sections.encode_sections(
            {"tree": b"\xc0", "tensors": msgspec.msgpack.encode(tensors), "inline": m.inline, **m.table.to_bytes()}
        )
        header = msgspec.structs.replace(m.header, sections=entries)
        with pytest.raises(FormatError, match="at most length"):
            manifest.decode(sections.join(msgspec.msgpack.encode(header), body), "x")
    assert hashlib.sha256(data).hexdigest() == child.sha256
    assert set(COLUMNS) <= {s[0] for s in m.header.sections}
