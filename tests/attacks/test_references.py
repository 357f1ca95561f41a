"""Manifests and packs with huge counts, ranges out of bounds, endless chains or swapped blobs are refused."""

import struct

import numpy as np
import pytest

from kit.forge import (
    CHUNK_BYTES,
    SEED,
    SIZE,
    World,
    delta,
    difference,
    digest,
    forge_blob,
    full,
    header_of,
    little_memory,
    noise,
    reheader,
    rewrite,
)
from snapstore import Repository
from snapstore.errors import FormatError, IntegrityError
from snapstore.format.blobs import blob, chain_decode, pack
from snapstore.format.hashing import checksum
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.format.manifests.manifest import Box, TensorEntry
from snapstore.storage.memory import MemoryStore

A, B, C = noise(1), noise(2), noise(3)
HUGE = (2**31, 2**32 - 1)


def restored(world):
    return world.restore()["w"].numpy()


def refused(world, error=(FormatError, IntegrityError), match=None):
    """Check that `restore` and `check` both refuse it, and take little memory."""
    with little_memory(16 * 1024 * 1024), pytest.raises(error, match=match):
        world.restore()
    with world.open() as repo:
        result = repo.check("restore")
    assert not result.ok
    assert result.restorable == []


def test_the_forge_makes_good_repositories():
    world = World()
    (a,) = world.pack(full(A))
    b, c = world.pack(delta(B, A), delta(C, B))
    world.commit(world.manifest([(digest(A), [a]), (digest(C), [c, b, a])]))
    np.testing.assert_array_equal(restored(world), np.concatenate([A, C]))


# --- counts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["count", "payload_bytes", "raw_bytes"])
@pytest.mark.parametrize("number", HUGE)
def test_huge_lengths_in_a_blob(field, number):
    """Mitigation: a blob's lengths must fit in the bytes that were read, its raw length must be the chunk's."""
    world = World()
    world.commit(world.manifest([(digest(A), world.pack(rewrite(full(A), **{field: number})))]))
    refused(world, IntegrityError)


@pytest.mark.parametrize(
    "changes", [{"block_bytes": 0}, {"element_size": 0}, {"element_size": 3}, {"element_size": 255}]
)
def test_sizes_that_cannot_be_divided_by(changes):
    """Mitigation: element and block sizes are checked before anything is divided by them."""
    world = World()
    world.commit(world.manifest([(digest(A), world.pack(rewrite(full(A), **changes)))]))
    refused(world, IntegrityError, "element size")


def test_more_block_lengths_than_blocks():
    """Mitigation: lengths and payload must be used up exactly by the planes."""
    world = World()
    data = full(A)
    data = data[: blob.HEADER.size] + bytes(4) + data[blob.HEADER.size :]
    world.commit(world.manifest([(digest(A), world.pack(rewrite(data, count=1)))]))
    refused(world, IntegrityError, "planes end")


@pytest.mark.parametrize(
    ("start", "count", "name_bytes"),
    [(0, 2**32 - 1, 0), (64, 0, 2**32 - 1), (2**64 - 1, 1, 1), (2**63, 0, 0), (0, 0, 64)],
)
def test_huge_counts_in_a_pack_footer(start, count, name_bytes):
    """Mitigation: footer and trailer must fill the pack's end exactly, after its header."""
    store = MemoryStore()
    data = pack.HEADER.pack(pack.MAGIC, 1, 0, 0, bytes(16), 0, bytes(16), 0)
    data += pack.TRAILER.pack(start, count, name_bytes, checksum(data), pack.FOOTER_MAGIC)
    store.put("packs/00/x", data)
    with little_memory(), pytest.raises(IntegrityError, match="damaged footer"):
        pack.read_listing(store, "packs/00/x", len(data))


@pytest.mark.parametrize("field", ["chunks", "tensors"])
@pytest.mark.parametrize("number", [2**40, 2**63, -1])
def test_huge_counts_in_a_manifest_header(field, number):
    """Mitigation: nothing is sized by a count; the sections that are there must agree with it."""
    with little_memory(), pytest.raises(FormatError):
        manifest.decode(reheader(World().manifest(), **{field: number}), "here")


@pytest.mark.parametrize("chunk_bytes", [0, -64, 65, 2**27, 2**62])
def test_chunk_sizes_that_no_repository_has(chunk_bytes):
    """Mitigation: the header's chunk size is bounded like the config's, before lengths are divided by it."""
    with pytest.raises(FormatError, match=f"chunks of {chunk_bytes} bytes"):
        manifest.decode(reheader(World().manifest(), chunk_bytes=chunk_bytes), "here")


SHAPES = [[2**40], [2**62], [2**32, 2**32], [2**63], [1] * 65, [-1], [0, 2**62, 2**62]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("boxes", [0, 1])
def test_huge_shapes(shape, boxes):
    """Mitigation: a tensor's bytes must be those of its chunks before room is made for it."""
    world = World()
    (a,) = world.pack(full(A))
    box = [Box((0,) * len(shape), shape, 0, 1)] * boxes
    entry = TensorEntry(("w",), "tensor", "float64", shape, False, None, box, None)
    world.commit(world.manifest([(digest(A), [a])], tensors=[entry]))
    refused(world, FormatError)


@pytest.mark.parametrize(
    "box",
    [
        Box((0,), (SIZE,), 0, 0),
        Box((0,), (SIZE,), 1, 1),
        Box((0,), (SIZE,), 0, 2**62),
        Box((0,), (SIZE,), -1, 1),
        Box((0,), (SIZE,), 2**63, 1),
        Box((1,), (SIZE,), 0, 1),
        Box((0,), (SIZE - 1,), 0, 1),
        Box((), (), 0, 1),
        Box((0, 0), (SIZE, 1), 0, 1),
    ],
)
def test_boxes_that_do_not_hold_the_tensor(box):
    """Mitigation: boxes must lie in the table and have exactly the tensor's shape."""
    world = World()
    entry = TensorEntry(("w",), "tensor", "uint8", (SIZE,), False, None, (box,), None)
    world.commit(world.manifest([(digest(A), world.pack(full(A)))], tensors=[entry]))
    refused(world, FormatError)


def test_an_empty_tensor_with_a_box_of_no_chunks():
    """Mitigation: an empty tensor must have no box, so the length of a missing last chunk is never read."""
    world = World()
    entry = TensorEntry(("w",), "tensor", "uint8", (0,), False, None, (Box((0,), (0,), 0, 0),), None)
    world.commit(world.manifest(tensors=[entry]))
    refused(world, FormatError)


@pytest.mark.parametrize("inline", [(0, 2**62), (2**63, 1), (-1, 5), (3, 2), (0, 3)])
def test_inline_bytes_outside(inline):
    """Mitigation: the range must lie in the section and be as long as the tensor."""
    world = World()
    entry = TensorEntry(("w",), "tensor", "uint8", (4,), False, None, (), inline)
    world.commit(world.manifest(tensors=[entry], inline=b"1234"))
    refused(world, FormatError)


# --- ranges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [(0, 2**40, 100), (0, 64, 2**32 - 1), (0, 2**62, 100)])
def test_references_beyond_a_pack_that_is_said_to_be_huge(place):
    """Mitigation: stores check an object's size before they take memory for a range of it."""
    world = World()
    world.pack(full(A), size_bytes=2**63)
    world.commit(world.manifest([(digest(A), [place])]))
    refused(world, IntegrityError, "expected all")


def test_references_beyond_the_pack():
    """Mitigation: every reference must end within the size that the manifest gives its pack, without overflow."""
    for place in ((0, 2**40, 100), (0, 2**64 - 1, 2**32 - 1)):
        world = World()
        world.pack(full(A))
        world.commit(world.manifest([(digest(A), [place])]))
        refused(world, FormatError, "beyond the end of its pack")


@pytest.mark.parametrize("shift", [-8, -1, 1, 8, 80])
def test_references_between_blobs(shift):
    """Overlapping references. Mitigation: the bytes there must be a whole blob, with its checksum and its digest."""
    world = World()
    (a, (n, at, length)) = world.pack(full(A), full(B))
    world.commit(world.manifest([(digest(A), [a]), (digest(B), [(n, at + shift, length - abs(shift))])]))
    refused(world)


def test_many_references_to_one_blob_are_read_once():
    """Overlap as amplification. Mitigation: ranges of one pack are joined before they are read."""
    world = World()
    (a,) = world.pack(full(A))
    world.commit(world.manifest([(digest(A), [a])] * 50))
    read = []
    original = world.store.get_range

    def counting(key, offset, length, into=None):
        read.append(length)
        return original(key, offset, length, into)

    world.store.get_range = counting
    np.testing.assert_array_equal(restored(world), np.tile(A, 50))
    assert sum(read) < 2 * SIZE


def test_a_pack_that_is_not_named():
    """Mitigation: `ref_packs` must count in the header's list."""
    world = World()
    (a,) = world.pack(full(A))
    data = world.manifest([(digest(A), [a])])
    with pytest.raises(FormatError, match="does not name"):
        manifest.decode(reheader(data, packs=b"", pack_sizes=b""), "here")
    for changes in ({"packs": bytes(33)}, {"pack_sizes": bytes(8)}, {"pack_sizes": b""}):
        with pytest.raises(FormatError):
            manifest.decode(reheader(data, **changes | ({} if "packs" in changes else {"packs": bytes(64)})), "here")


# --- chains ---------------------------------------------------------------------------------------------------------


def test_a_forged_cycle():
    """A is a delta on B and B on A. Mitigation: chains are lists of bounded length, and the last must be full."""
    world = World()
    ab, ba = world.pack(delta(A, B), delta(B, A))
    for length in (2, 3, 254):
        again = World()
        again.store, again.packs = world.store, world.packs
        chain = [(ab, ba)[i % 2] for i in range(length)]
        data = again.manifest([(digest(A), chain)])
        out = np.empty(SIZE, np.uint8)
        blobs = [
            world.store.get_range(pack_key(world.packs[number][0]), offset, size) for number, offset, size in chain
        ]
        with pytest.raises(IntegrityError, match="ends in a delta"):
            chain_decode.decode_chain(blobs, ["x"] * length, digest(A), out, seed=SEED)
        assert manifest.decode(data, "x").header.depth == length - 1
    world.commit(world.manifest([(digest(A), [ab, ba])]))
    refused(world, IntegrityError, "ends in a delta")


def test_chains_of_more_than_255():
    """Mitigation: a chain has at most 255 references."""
    world = World()
    ab, ba = world.pack(delta(A, B), delta(B, A))
    world.commit(world.manifest([(digest(A), [(ab, ba)[i % 2] for i in range(256)])]))
    refused(world, FormatError, "expected 1 to 255")


#: name -> (the blobs of a pack; (chunk, the numbers of its blobs) for each chunk of the manifest; the error).
BAD_CHAINS = {
    "a delta is its own base": ([delta(A, A)], [(A, [0])], "ends in a delta"),
    "a chain has another base": ([full(C), delta(B, A)], [(B, [1, 0])], "blob of chunk"),
    "a base lies": ([rewrite(full(C), digest=digest(A)), delta(B, A)], [(B, [1, 0])], "digest mismatch"),
    "two blobs are swapped": ([full(A), full(B)], [(A, [1]), (B, [0])], "blob of chunk"),
    "a full blob has a base": ([full(A), full(B)], [(B, [1, 0])], None),
    "chunks of a chain differ in length": ([full(A[:64]), delta(B, A)], [(B, [1, 0])], None),
}


@pytest.mark.parametrize("name", BAD_CHAINS)
def test_chains_that_lead_to_other_bytes(name):
    """Mitigation: the last blob of a chain is full, and no other is.

    Each blob names its chunk and its base by digest, and has the length of the table. Its bytes are hashed.
    """
    blobs, chunks, match = BAD_CHAINS[name]
    world = World()
    refs = world.pack(*blobs)
    chains = [(digest(chunk), [refs[number] for number in chain]) for chunk, chain in chunks]
    world.commit(world.manifest(chains))
    refused(world, IntegrityError, match)
    assert header_of(world.manifest()).chunk_bytes == CHUNK_BYTES


def three_in_a_chain():
    """Return a world, and the chunks of a good manifest: A, and C as a delta to B, which is a delta to A."""
    world = World()
    (a,) = world.pack(full(A))
    b, c = world.pack(delta(B, A), delta(C, B))
    return world, [(digest(A), [a]), (digest(C), [c, b, a])]


def checked(world):
    """Return the problems of a check of all levels, and the snapshots that it calls restorable and damaged."""
    with world.open() as repo:
        found = repo.check("restore")
        report = repo.repair(level="restore", apply=True)
    assert not [action for action in report.actions if action.kind == "quarantine"], "the blobs are whole"
    return found.problems, *([s.ref for s in snapshots] for snapshots in (found.restorable, found.damaged))


@pytest.mark.parametrize("ref", [1, 2, 3])
def test_wrong_digests_of_references(ref):
    """Mitigation: a check compares the header of each blob with the manifest; a restore hashes the chunk itself."""
    world, chunks = three_in_a_chain()
    table = world.table(chunks)
    assert table.ref_counts.tolist() == [1, 3]
    table.ref_digests[ref, 5] ^= 1
    world.commit(world.manifest(chunks))
    world.commit(world.manifest(chunks, table=table), id="b" * 32, step=1, seq=1)
    if ref == 1:  # the first reference of a chunk has no digest of its own
        assert checked(world) == ([], ["r@0", "r@1"], [])
        return
    (problem,), restorable, damaged = checked(world)
    assert (restorable, damaged, problem.command) == (["r@0"], ["r@1"], "")
    assert "w, chunk 1: pack " in problem.message
    assert "but the manifest says " in problem.message
    with world.open() as repo:
        np.testing.assert_array_equal(repo.restore("r@1")["w"].numpy(), np.concatenate([A, C]))


@pytest.mark.parametrize("ref", [0, 1, 2])
def test_wrong_lengths_of_references(ref):
    """Mitigation: a blob has exactly the length that its reference says."""
    world, chunks = three_in_a_chain()
    table = world.table(chunks)
    table.ref_lengths[ref] += 4
    world.commit(world.manifest(chunks))
    world.commit(world.manifest(chunks, table=table), id="b" * 32, step=1, seq=1)
    (problem,), restorable, damaged = checked(world)
    assert (restorable, damaged) == (["r@0"], ["r@1"])
    assert f"but the manifest says {table.ref_lengths[ref]}" in problem.message
    with world.open() as repo, pytest.raises(IntegrityError, match="but the manifest says"):
        repo.restore("r@1")


@pytest.mark.parametrize("kind", ["manifest", "record"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_wrong_depth(kind, depth):
    """Mitigation: a check compares the depth with the longest chain; no restore needs it."""
    world, chunks = three_in_a_chain()
    if kind == "manifest":
        world.commit(reheader(world.manifest(chunks), depth=depth))
    else:
        world.commit(world.manifest(chunks), depth=depth)
    (problem,), restorable, _ = checked(world)
    assert (problem.kind, restorable) == (kind, ["r@0"])
    assert f"depth {depth}, expected 2" in problem.message
    np.testing.assert_array_equal(restored(world), np.concatenate([A, C]))


# --- trees and ties -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [("", 0), ("", 5), ("", -1), ("other", 0)])
def test_ties_to_nowhere(tie):
    """Mitigation: a tie names an entry of another part of the same kind, dtype and shape; it is followed once."""
    world = World()
    entry = TensorEntry(("w",), "tensor", "uint8", (SIZE,), False, tie, (Box((0,), (SIZE,), 0, 1),), None)
    world.commit(world.manifest([(digest(A), world.pack(full(A)))], tensors=[entry]))
    if tie[0] == "other":  # with `keys` a part may be left out, and then the tensor stands for itself
        np.testing.assert_array_equal(restored(world), A)
    else:
        with pytest.raises(FormatError, match="tied to entry"):
            world.restore()


@pytest.mark.parametrize(
    "entry",
    [
        ["tensor", "float3"], ["tensor", "<f4"], ["array", "float32"], ["array", "|O"], ["array", "|V8"],
        ["array", "<U9999999999"], ["array", "|S0"], ["bytes", "uint8"], ["novel", "float32"], ["array", "<M8[foo]"],
    ],
)  # fmt: skip
def test_dtypes_that_are_none(entry):
    """Mitigation: dtypes are looked up in a table of names and a pattern, never evaluated."""
    world = World()
    kind, dtype = entry
    made = TensorEntry(("w",), kind, dtype, (SIZE,), False, None, (Box((0,), (SIZE,), 0, 1),), None)
    world.commit(world.manifest([(digest(A), world.pack(full(A)))], tensors=[made]))
    refused(world, FormatError)


@pytest.mark.parametrize(
    "tree", [["tensor", 1, False], ["tensor", -1, False], ["array", 0], ["part", ""], ["tensor", 0], 5]
)
def test_trees_that_point_outside(tree):
    """Mitigation: a node must name an entry of its kind."""
    world = World()
    world.commit(world.manifest([(digest(A), world.pack(full(A)))], tree=["dict", ["w"], [tree]]))
    if tree == 5:  # a tensor that no node names is only left out
        assert world.restore() == {"w": 5}
    else:
        refused(world, FormatError)


# --- copies ---------------------------------------------------------------------------------------------------------

#: Chains whose checksums and names all hold, and in which a blob of A or C has the digest of B.
FORGED = {
    "a full blob": lambda: ([forge_blob(A, digest(B), None)], [digest(B)]),
    "a delta": lambda: ([forge_blob(difference(C, A), digest(B), digest(A)), full(A)], [digest(B), digest(A)]),
    "the base of a delta": lambda: (
        [forge_blob(difference(C, A), digest(C), digest(B)), forge_blob(A, digest(B), None)],
        [digest(C), digest(B)],
    ),
}


def gift(kind):
    """Return a repository whose only snapshot, r@0, has a forged chain."""
    world = World()
    blobs, names = FORGED[kind]()
    world.commit(world.manifest([(names[0], world.pack(*blobs))]), seq=1)
    return world


def of_mine(world):
    """Return a store with a repository of the same seed."""
    store = MemoryStore()
    with world.open() as theirs:
        Repository.create(store, like=theirs).close()
    return store


@pytest.mark.parametrize("kind", FORGED)
def test_a_copy_brings_no_chunk_under_the_digest_of_another(kind):
    """Mitigation: copied chunks are rebuilt, and the digests of all chunks of their chains are compared."""
    world = gift(kind)
    store = of_mine(world)
    with world.open() as theirs, Repository.open(store) as mine:
        result = theirs.copy(to=mine)
        ((failed, why),) = result.failed
        assert (failed.ref, result.copied) == ("r@0", [])
        assert "w, chunk 0: its stored bytes are not the content of its digest" in why
        assert mine.snapshots() == []
        mine.save({"w": B}, run="r", step=1)
        np.testing.assert_array_equal(mine.restore("r@1")["w"], B)
    assert [key for key in store._objects if key.startswith("packs/")] != []  # of the save
    with Repository.open(store) as mine:
        assert mine.check("restore").ok
        assert mine.check().unneeded_bytes == 0  # the copy has deleted what it had put


class TwoFaced(MemoryStore):
    """Returns the pack of another store to reads of ranges, and its own to reads of the whole."""

    other = b""

    def get_range(self, key, offset, length, into=None):
        if not key.startswith("packs/"):
            return super().get_range(key, offset, length, into)
        data = self.other[offset : offset + length]
        if into is not None:
            into[:] = data
        return memoryview(data)


def test_a_source_that_answers_otherwise_the_second_time():
    """Mitigation: chunks are rebuilt from the bytes that were copied, compared by a checksum with a secret key."""
    world, good = gift("a full blob"), World()
    good.pack(full(B))
    world.store.__class__ = TwoFaced
    world.store.other = next(data for key, (data, _) in good.store._objects.items() if key.startswith("packs/"))
    np.testing.assert_array_equal(restored(world), B)
    with world.open() as theirs:
        ((_, why),) = theirs.copy(to=of_mine(world)).failed
    assert "two reads return different bytes" in why


@pytest.mark.parametrize("kind", FORGED)
def test_no_save_builds_on_a_copy_that_was_not_verified(kind):
    """Mitigation: its record says so until a repair, or a verified copy, has proven it."""
    world = gift(kind)
    store = of_mine(world)
    with world.open() as theirs, Repository.open(store) as mine:
        assert [s.ref for s in theirs.copy(to=mine, verify=False).copied] == ["r@0"]
    with Repository.open(store) as mine:  # another process
        assert mine.snapshot("r@0").unproven == world.open().config.uuid
        saves = [
            mine.save({"w": B}, run="r", step=1),
            mine.save({"w": B}, run="fork", step=1, parent="r@0"),
            mine.save({"w": B}, run="other", step=1, bases=["r@0"]),
        ]
        for snapshot in saves:
            np.testing.assert_array_equal(mine.restore(f"id:{snapshot.id}")["w"], B)
        mine.compact()
        mine.recode()
        mine.repair(apply=True)
        assert mine.snapshot("r@0").unproven
        for snapshot in (*saves, mine.save({"w": B}, run="late", step=2, bases=["r@0"])):
            np.testing.assert_array_equal(mine.restore(f"id:{snapshot.id}")["w"], B)


def test_a_copy_without_verification_builds_on_none_of_another_repository():
    """Mitigation: the record names the repository that it came from; what is forged there hurts only its own copies."""
    world = gift("a full blob")
    honest, store = of_mine(world), of_mine(world)
    with world.open() as theirs, Repository.open(honest) as source, Repository.open(store) as mine:
        source.save({"w": B}, run="r", step=1)
        theirs.copy(to=mine, verify=False)
        source.copy(to=mine, verify=False)
        np.testing.assert_array_equal(mine.restore("r@1")["w"], B)


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_copy_is_never_proven(kind):
    """Mitigation: a repair and a verified copy rebuild each chunk, and also the older chunks of its chain."""
    world = gift(kind)
    with world.open() as theirs, Repository.open(of_mine(world)) as mine:
        theirs.copy(to=mine, verify=False)
        mine.repair(apply=True, level="restore")
        assert mine.snapshot("r@0").unproven
        assert [s.ref for s, _ in theirs.copy(to=mine).failed] == ["r@0"]
        assert mine.snapshot("r@0").unproven


def test_structs_are_what_the_forge_thinks():
    assert struct.calcsize(blob.HEADER.format) == 80
