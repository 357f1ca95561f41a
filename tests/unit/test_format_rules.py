"""Rules of docs/format.md that its tables do not show: gaps, tags on two snapshots, zero fields, closed lists."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta
from pathlib import PurePosixPath

import msgspec
import numpy as np
import pytest
import zstandard

from kit.forge import SIZE, World, digest, full, noise, rewrite, with_section
from kit.repositories import created, opened, save
from snapstore import FormatError, IntegrityError
from snapstore.format import records
from snapstore.format.hashing import checksum
from snapstore.format.manifests import manifest, sections
from snapstore.format.records import ENVELOPE, Snapshot
from snapstore.state.tree.decode import READERS, decode, decode_plain
from snapstore.state.tree.encode import encode_plain
from snapstore.state.values.tensors import StoredPart, TensorSpec

VALUES = [
    2**70, "\ud800", bytearray(b"x"), 1j, [1], (1,), {1}, frozenset([1]), deque([1], 3), {"a": 1}, OrderedDict(a=1),
    Counter("a"), defaultdict(int, a=1), np.float32(1), np.str_("a"), np.bytes_(b"a"), np.dtype("<f4"),
    PurePosixPath("a"), date(2020, 1, 1), time(1), datetime(2020, 1, 1, tzinfo=UTC), timedelta(1),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_longer_node_is_refused(value):
    """A node of a tree may not get more fields: an old reader would ignore them, and so lose data."""
    node = encode_plain(value)
    assert type(node) is list
    assert node[0] in READERS
    optional = {"odict": [None]}.get(node[0], [])
    with pytest.raises(FormatError):
        decode_plain([*node, *optional, 7])


@pytest.mark.parametrize("node", [["tensor", 0, False], ["array", 0], ["part", "x"], ["columns", ["values", b"\x90"]]])
def test_a_longer_node_of_arrays_is_refused(node):
    part = StoredPart("", [*node, 7], [TensorSpec((), "tensor", "uint8", (1,), False, None)])
    with pytest.raises(FormatError):
        decode([part])


def with_revision(store, snapshot, revision, **changes):
    record = msgspec.structs.replace(snapshot, revision=revision, **changes)
    store.put(record.key, records.encode(record))


def test_revisions_may_have_gaps():
    store = created()
    with opened(store) as repository:
        snapshot = save(repository, "a", 0, 0)
    with_revision(store, snapshot, 7, tags=["late"])
    with opened(store) as repository:
        assert repository.view().resolve("a@late").revision == 7
        assert repository.tag("a@0", "next").revision == 8
        assert repository.check("restore").problems == []
        repository.gc()
        assert repository.check("restore").problems == []
    store.delete([snapshot.key])
    with opened(store) as repository:
        assert repository.view().resolve("a@next").revision == 8


def test_seqs_may_have_gaps_and_be_equal():
    store = created()
    with opened(store) as repository:
        snapshots = [save(repository, "a", step, step) for step in range(3)]
    for snapshot, seq in zip(snapshots, (0, 2_000_000, 2_000_000), strict=True):
        with_revision(store, snapshot, 1, seq=seq)
    with opened(store) as repository:
        newest = max(snapshots[1:], key=lambda s: s.id)
        assert repository.view().resolve("a@latest").id == newest.id
        assert save(repository, "a", 3, 3).seq == 2_000_001
        assert repository.check("restore").problems == []


def test_a_tag_on_two_snapshots_means_the_newest():
    store = created()
    with opened(store) as repository:
        snapshots = [save(repository, "a", step, step) for step in range(3)]
    for snapshot in snapshots[:2]:
        with_revision(store, snapshot, 1, tags=["best"])
    with opened(store) as repository:
        assert repository.view().resolve("a@best").id == snapshots[1].id
        repository.tag("a@2", "best")
        assert [s.step for s in repository.snapshots() if "best" in s.tags] == [2]


def test_fields_called_zero():
    """Bytes 6 and 7 of a blob, which its checksum does not cover, must be zero. A reader ignores other zero fields."""
    chunk = noise(1)
    for name, refused in {"zero": True, "zero2": False, "zero3": False}.items():
        world = World()
        world.commit(world.manifest([(digest(chunk), world.pack(rewrite(full(chunk), **{name: 1})))]))
        if refused:
            with pytest.raises(IntegrityError, match="must be zero"):
                world.restore()
        else:
            assert world.restore()["w"].numpy().tobytes() == chunk.tobytes()
    world = World()
    data = bytearray(world.manifest([(digest(chunk), world.pack(full(chunk)))]))
    struct.pack_into("<H", data, 10, 7)
    snapshot = world.commit(bytes(data))
    assert world.restore()["w"].numel() == SIZE
    packed = records.encode(snapshot)
    head = packed[:6] + b"\7\0" + packed[8:16]
    odd = head + checksum(head + packed[ENVELOPE.size :]).to_bytes(8, "little") + packed[ENVELOPE.size :]
    assert records.decode(odd, Snapshot, snapshot.key) == snapshot


@pytest.mark.parametrize("behind", [b"x", zstandard.ZstdCompressor().compress(b"x")])
def test_a_section_is_one_frame(behind):
    plain = msgspec.msgpack.encode(["dict", [], []])
    frame = zstandard.ZstdCompressor().compress(plain)
    empty = World().manifest(tree=None)
    assert manifest.decode(with_section(empty, "tree", frame, len(plain)), "x").tree == ["dict", [], []]
    with pytest.raises(FormatError, match="x: section 'tree': "):
        manifest.decode(with_section(empty, "tree", frame + behind, len(plain)), "x")


def test_a_longer_section_is_refused():
    world = World()
    header = manifest.decode_header(world.manifest(), "x")
    fields = msgspec.to_builtins(header, builtin_types=(bytes,))
    fields["sections"] = [[*section, 0] for section in fields["sections"]]
    packed = msgspec.msgpack.encode(fields)
    prefix = sections.PREFIX.pack(sections.MAGIC, 1, 0, len(packed), checksum(packed))
    with pytest.raises(FormatError, match="length 5"):
        manifest.decode_header(prefix + packed, "x")
