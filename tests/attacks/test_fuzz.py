"""A mutated object raises one of our own errors or restores the right bytes, also with valid checksums."""

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kit.forge import SEED, SIZE, World, delta, digest, full, header_of, little_memory, noise
from kit.packs import scan
from kit.samples import examples
from kit.tally import EXAMPLES, tally
from snapstore.engine.cpu import EncodedChunk, HostEncoded
from snapstore.errors import CapabilityError, FormatError, IntegrityError, NotFoundError
from snapstore.format import records
from snapstore.format.blobs import blob, chain_decode, codecs, pack
from snapstore.format.hashing import checksum
from snapstore.format.manifests import manifest, sections
from snapstore.format.records import Config, Mark, RunPolicies, Session, Snapshot
from snapstore.state.tree.decode import READERS
from snapstore.storage.memory import MemoryStore

OURS = (FormatError, IntegrityError, NotFoundError)
A, B = noise(1), noise(2)
fuzz = settings(
    max_examples=examples(300) * EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.data_too_large]
)

mutations = st.lists(
    st.tuples(
        st.sampled_from(["set", "flip", "cut", "insert", "repeat", "u32"]), st.floats(0, 1), st.integers(0, 2**32 - 1)
    ),
    min_size=1,
    max_size=6,
)


def mutate(data, changes):
    tally("fuzz inputs")
    out = bytearray(data)
    for kind, where, value in changes:
        at = min(int(where * len(out)), max(0, len(out) - 1))
        if kind == "set" and out:
            out[at] = value & 0xFF
        elif kind == "flip" and out:
            out[at] ^= 1 << value % 8
        elif kind == "cut":
            del out[at : at + value % 50]
        elif kind == "insert":
            out[at:at] = bytes([value & 0xFF]) * (value >> 8 & 7)
        elif kind == "repeat":
            out[at:at] = out[at : at + value % 40]
        elif kind == "u32":
            out[at : at + 4] = struct.pack("<I", value)
    return bytes(out)


OBJECTS = [
    Config(uuid="a" * 32, version=1, chunk_bytes=1024, digest_seed=7, features=["x"], created=1.0, writer="me"),
    Snapshot(
        id="a" * 32, run="r", step=1, seq=2, state="committed", write_id="b", tags=["t"], metrics={"m": 1.5},
        metadata_node=["dict", ["a"], [1]],
        manifests=[
            records.ManifestRef(
                part="p", rank=0, sha256="0" * 64, header_sha256="0" * 64, size_bytes=1, logical_bytes=2
            )
        ],
    ),
    Session(id="a", key="k", host="h", boot_id="b", pid=3, started=1.0),
    RunPolicies(run="r", revision=0, policies=[{"kind": "last", "n": 3}]),
    Mark(id="a", started=0.0, packs=bytes(32), manifests=b""),
    records.ManifestList(save_id=bytes(16), snapshot=bytes(16), revision=0, manifests=bytes(32)),
]  # fmt: skip


@fuzz
@given(st.sampled_from(OBJECTS), mutations, st.booleans())
def test_small_objects(value, changes, mended):
    """Mitigation: the checksum; if it holds, a typed decoder, of which every failure is caught."""
    data = records.encode(value)
    if mended:
        payload = mutate(data[24:], changes)
        head = data[:8] + struct.pack("<Q", len(payload))
        data = head + struct.pack("<Q", xxh3_64_intdigest(head + payload)) + payload
    else:
        data = mutate(data, changes)
    with little_memory(), suppress(*OURS):
        assert isinstance(records.unpack(data, type(value), "key"), type(value))


@fuzz
@given(st.binary(max_size=200), st.sampled_from(OBJECTS))
def test_any_payload(payload, value):
    """Mitigation: as above."""
    tally("fuzz inputs")
    head = records.encode(value)[:8] + struct.pack("<Q", len(payload))
    data = head + struct.pack("<Q", xxh3_64_intdigest(head + payload)) + payload
    with little_memory(), suppress(*OURS):
        records.unpack(data, type(value), "key")


def a_world():
    world = World()
    a, b = world.pack(full(A), full(B))
    (ba,) = world.pack(delta(B, A))
    return world, world.manifest([(digest(A), [a]), (digest(B), [ba, a]), (digest(B), [b])])


WORLD, MANIFEST = a_world()
HEADER = len(manifest.header_bytes(MANIFEST))


def corrected_header(data, changes):
    packed = mutate(data[24:HEADER], changes)
    return sections.PREFIX.pack(sections.MAGIC, 1, 0, len(packed), checksum(packed)) + packed + data[HEADER:]


def planted(data):
    """Return a world with the fuzzed manifest as a committed snapshot, under its own SHA-256."""
    world = World()
    world.store._objects.update(WORLD.store._objects)
    world.packs = WORLD.packs
    world.commit(data)
    return world


@pytest.mark.parametrize("what", ["any", "header", "sections"])
@settings(fuzz, max_examples=examples(150) * EXAMPLES)
@given(mutations)
def test_manifests(what, changes):
    """Mitigation: everything is validated before it is followed; what still decodes restores, or is found damaged."""
    if what == "any":
        data = mutate(MANIFEST, changes)
    elif what == "header":
        data = corrected_header(MANIFEST, changes)
    else:
        data = MANIFEST[:HEADER] + mutate(MANIFEST[HEADER:], changes)
    with little_memory(64 * 1024 * 1024), suppress(*OURS):
        manifest.decode(data, "m")
        planted(data).restore()


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
nodes = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)
tags = st.sampled_from(sorted(READERS))
trees = st.recursive(
    leaves,
    lambda inner: st.builds(
        lambda tag, rest: [tag, *rest], tags, st.lists(inner | st.lists(inner, max_size=4), max_size=4)
    ),
)


@settings(fuzz, max_examples=examples(200) * EXAMPLES)
@given(nodes | trees)
def test_trees(tree):
    """Mitigation: nodes are looked up in a table; whatever their reader raises is a FormatError."""
    tally("fuzz inputs")
    world = World()
    try:
        data = world.manifest(tree=["dict", ["w"], [tree]])
    except (TypeError, OverflowError):
        return
    world.commit(data)
    with little_memory(64 * 1024 * 1024), world.open() as repo:
        try:
            repo.restore("r@0")
        except OURS:
            assert not repo.check("metadata").ok
        else:
            assert repo.check("metadata").ok


entries = st.fixed_dictionaries(
    {
        "path": st.lists(st.text(max_size=3) | st.integers(0, 9), max_size=3),
        "kind": st.sampled_from(["tensor", "parameter", "array", "bytes", "x"]),
        "dtype": st.sampled_from(
            ["float32", "bool", "complex32", "<f4", "|S3", "<U2", "bytes", "<M8[s]", "bits8", "x"]
        ),
        "shape": st.lists(st.sampled_from([0, 1, 2, SIZE, 2**40, -1]), max_size=3),
        "requires_grad": st.booleans(),
        "tie": st.none() | st.tuples(st.sampled_from(["", "x"]), st.integers(-1, 2)),
        "boxes": st.lists(st.tuples(st.just([0]), st.just([SIZE]), st.integers(-1, 3), st.integers(-1, 3)), max_size=2),
        "inline": st.none() | st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
    }
)


@settings(fuzz, max_examples=examples(200) * EXAMPLES)
@given(
    st.lists(entries, min_size=1, max_size=3), st.sampled_from(["tensor", "parameter", "array", "bytes"]), st.booleans()
)
def test_tensor_entries(made, tag, grad):
    """Mitigation: a spec must make sense before memory is sized by it."""
    tally("fuzz inputs")
    world = World()
    chunks = [(digest(A), world.pack(full(A)))]
    node = [tag, 0, grad] if tag in ("tensor", "parameter") else [tag, 0]
    tensors = [list(entry.values()) for entry in made]
    world.commit(world.manifest(chunks, tensors=tensors, tree=["dict", ["w"], [node]], inline=b"12345678"))
    with little_memory(64 * 1024 * 1024), suppress(*OURS):
        world.restore()


@fuzz
@given(mutations, st.booleans())
def test_packs(changes, mended):
    """Mitigation: the footer's checksum, sizes that must add up, a scan that ends at the first damage."""
    writer = pack.PackWriter(bytes(16), 0, 0, "größe")
    blobs = [EncodedChunk(memoryview(bytearray(b)), False, np.empty(0, np.uint8)) for b in (full(A), delta(B, A))]
    writer.extend(HostEncoded.of(blobs), 0, 2)
    data = bytes(writer.seal())
    if mended:
        start = int.from_bytes(data[-32:-24], "little")
        footer = mutate(data[start:-32], changes)
        trailer = pack.TRAILER.unpack(data[-32:])
        data = data[:start] + footer + pack.TRAILER.pack(start, trailer[1], trailer[2], checksum(footer), trailer[4])
    else:
        data = mutate(data, changes)
    store = MemoryStore()
    store.put("packs/00/x", data)
    with little_memory():
        with suppress(*OURS):
            pack.read_listing(store, "packs/00/x", len(data))
        for at, header in scan(memoryview(data), "x"):
            assert at + blob.length_of(header) <= len(data)


@fuzz
@given(mutations, mutations, st.booleans())
@example([("set", 0.25, 70)], [], True)  # a codec of GPUs
def test_blobs(head, body, coded):
    """Mitigation: a blob that decodes under a corrected checksum still has to match its digest."""
    chunk = np.resize(noise(5, 100) % 7, SIZE).astype(np.uint8) if coded else A
    data = full(chunk, 2)
    bad = bytearray(data[:16] + mutate(data[16:80], head)[:64].ljust(64, b"\0") + mutate(data[80:], body))
    struct.pack_into("<Q", bad, 8, checksum(bytes(bad[16:])))
    out = np.empty(SIZE, np.uint8)
    try:
        with little_memory():
            chain_decode.decode_chain([memoryview(bad)], ["x"], digest(chunk), out, seed=SEED)
    except OURS:
        return
    except CapabilityError:  # the bytes name a codec of GPUs
        assert codecs.ANS in np.frombuffer(bad, blob.HEADER_COLUMNS, 1)["codecs"]
        return
    np.testing.assert_array_equal(out, chunk)


@fuzz
@given(mutations, mutations, st.sampled_from([1, 2, 4, 8]), st.integers(0, 1), st.booleans())
def test_sparse_blobs(head, body, size, layout, in_frames):
    """Mitigation: counts, positions and values are checked before they are used; the digest finds what is left."""
    base = np.resize(noise(5, 100) % 7, 8 * 1024).astype(np.uint8)
    chunk = base.copy()
    chunk.view(f"u{size}")[::9] += np.arange(len(chunk.view(f"u{size}")[::9])).astype(f"u{size}") % 5
    out = np.empty(blob.bound(base.size, size), np.uint8)
    data = bytes(blob.encode_sparse(chunk, base, size, layout, (digest(chunk), digest(base)), 10**6, out))
    at = blob.HEADER.size + (0 if in_frames else 4 * len(blob.parse(memoryview(data), "x").block_lengths))
    bad = bytearray(data[:16] + mutate(data[16:80], head)[:64].ljust(64, b"\0") + data[80:at] + mutate(data[at:], body))
    struct.pack_into("<Q", bad, 8, checksum(bytes(bad[16:])))
    found = np.empty_like(chunk)
    with little_memory(), suppress(*OURS, CapabilityError):
        chain_decode.decode_chain([memoryview(bad)], ["x"], digest(chunk), found, base, seed=SEED)
        np.testing.assert_array_equal(found, chunk)


def test_the_fuzzed_objects_are_good_ones():
    assert header_of(MANIFEST).chunks == 3
    np.testing.assert_array_equal(planted(MANIFEST).restore()["w"].numpy(), np.concatenate([A, B, B]))
