"""Every engine keeps one contract: the CPU engine is tested everywhere, with its extension and without; the CUDA
engine where there is a GPU.

Each engine decodes what the other has encoded.
"""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
import xxhash

from kit.reference import use_reference
from kit.sparse_deltas import GOOD, HOSTILE, forged, pair
from snapstore.engine import spans
from snapstore.engine.batches import Chunks, DecodeBatch, EncodeBatch
from snapstore.engine.registry import Engines
from snapstore.errors import FormatError, IntegrityError
from snapstore.format import hashing
from snapstore.format.blobs import blob, codecs, planes
from snapstore.format.blobs.codecs import sparse

SEED = 0xD1A5ED5EED
digest = partial(hashing.digest, seed=SEED)

DAMAGE = (FormatError, IntegrityError)
MIB = 1024 * 1024
SIZES, LAYOUTS = (1, 2, 4, 8), (planes.BYTES, planes.ROTATED)
KINDS = ("noise", "constant", "floats", "sparse", "skewed", "repeats")


@pytest.fixture(scope="module")
def reference():
    """The CPU engine without its extension, which every other engine must agree with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNAPSTORE_ENGINE", "numpy")
        made = Engines(SEED, threads=2)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["numpy", "native", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request, reference):
    """The engine under test."""
    if request.param == "numpy":
        yield reference.cpu
        return
    if request.param == "native" and spans.extension() is None:
        pytest.skip("the extension is not built")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = Engines(SEED, threads=2)
    yield made.cpu if request.param == "native" else made.of(torch.empty(1, dtype=torch.uint8, device="cuda"))
    made.close()


@pytest.fixture
def cpu(reference):
    """The engine that every other one must agree with."""
    return reference.cpu


# --- what the tests share


def to_memory(engine, array):
    """Return an array's bytes in the memory of an engine."""
    memory = engine.empty(array.size)
    assert len(memory) == array.size
    if isinstance(memory, np.ndarray):
        memory[:] = array
    else:
        memory.copy_(torch.from_numpy(np.array(array)))
        torch.cuda.synchronize()
    return memory


def to_numpy(memory):
    """Return the bytes of an engine's memory."""
    return memory if isinstance(memory, np.ndarray) else memory.cpu().numpy()


def content(kind, size, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "noise":
        return rng.integers(0, 256, size, np.uint8)
    if kind == "skewed":
        return np.minimum(rng.geometric(0.3, size), 255).astype(np.uint8)
    if kind == "floats":
        return rng.normal(0, 0.02, size // 4 + 1).astype(np.float32).view(np.uint8)[:size].copy()
    if kind == "repeats":
        return np.resize(rng.integers(0, 256, 997, np.uint8), size)
    out = np.full(size, 7 * seed % 256, np.uint8)
    if kind == "sparse":
        places = slice(seed % 5, None, 50)
        out[places] = rng.integers(0, 256, out[places].size)
    return out


def changed(base, seed=0):
    """Return floats that differ a little from a base."""
    values = base[: base.size // 4 * 4].view(np.float32)
    moved = values * np.float32(1 + 1e-5 * (1 + seed))
    return np.concatenate([moved.view(np.uint8), base[values.size * 4 :]])


def digests_of(arrays):
    return np.frombuffer(b"".join(map(digest, arrays)), np.uint8).reshape(-1, 16)


def chunks_of(engine, arrays):
    """Return arrays as chunks of one memory, placed as those of tensors are; None is no chunk."""
    lengths = np.array([0 if a is None else a.size for a in arrays], np.int64)
    starts = np.cumsum(lengths + -lengths % 64) - lengths - -lengths % 64
    whole = np.zeros(int((starts + lengths).max(initial=0)), np.uint8)
    for start, array in zip(starts.tolist(), arrays, strict=True):
        if array is not None:
            whole[start : start + array.size] = array
    which = np.array([-1 if a is None else 0 for a in arrays], np.int64)
    return Chunks([to_memory(engine, whole)], which, starts, lengths)


def column(value, count, dtype):
    """Return a column with one value for all rows, or with one for each."""
    return np.array(np.broadcast_to(value, count), dtype)


def encode(engine, arrays, size=1, layout=planes.BYTES, bases=None, delta_limit=2**40, *, xor=False):
    """Encode a batch; return (entries, bytes of every blob)."""
    n = len(arrays)
    bases = bases or [None] * n
    batch = EncodeBatch(
        engine.load(chunks_of(engine, arrays)), digests_of(arrays), column(size, n, np.uint8),
        column(layout, n, np.uint8), engine.load(chunks_of(engine, bases)),
        digests_of([np.empty(0, np.uint8) if b is None else b for b in bases]), column(delta_limit, n, np.int64),
        xor=xor,
    )  # fmt: skip
    made = engine.start_encode(batch)()
    entries, blobs = [], []
    for encoded in made:
        own = encoded.entries
        entries += list(own)
        blobs += read(encoded, 0, len(own))
    engine.recycle(made)
    assert len(blobs) == n
    return entries, blobs


def read(encoded, first, last):
    """Return the blobs of some rows; check their offsets and their padding."""
    entries = encoded.entries[first:last]
    if not len(entries):
        return []
    begin = int(entries["offset"][0])
    end = int(entries["offset"][-1]) + int(entries["length"][-1])
    end += -end % blob.ALIGNMENT
    out = np.full(end - begin, 0xEE, np.uint8)
    encoded.copy(first, last, out)()
    blobs, at = [], begin
    for entry in entries:
        assert entry["offset"] == at, "they follow each other"
        assert at % blob.ALIGNMENT == 0
        stop = at + int(entry["length"])
        blobs.append(out[at - begin : stop - begin].tobytes())
        at = stop + -stop % blob.ALIGNMENT
        assert not out[stop - begin : at - begin].any(), "padding is zeros"
    return blobs


def decode_batch(engine, chains, arrays, bases=None):
    """Return a batch that rebuilds chains of blobs, newest first, into memory that is filled with other bytes."""
    blobs = [b for chain in chains for b in chain]
    pieces, offsets, at = [], [], 0
    for b in blobs:
        offsets.append(at)
        pieces.append(b + bytes(-len(b) % 8))
        at += len(pieces[-1])
    stored = engine.buffer(at)[:at]
    stored[:] = np.frombuffer(b"".join(pieces), np.uint8)
    outs = chunks_of(engine, [np.full(a.size, 0xAA, np.uint8) for a in arrays])
    return DecodeBatch(
        stored, np.array(offsets, np.int64), np.array(list(map(len, blobs)), np.int64),
        np.array(list(map(len, chains)), np.int64), digests_of(arrays), outs, lambda i: f"blob {i}",
        None if bases is None else chunks_of(engine, bases),
    )  # fmt: skip


def decode(engine, chains, arrays, bases=None):
    """Return the chunks as an engine rebuilds them."""
    batch = decode_batch(engine, chains, arrays, bases)
    engine.start_decode(batch)()
    found = to_numpy(batch.outs.memories[0])
    engine.give_back(batch.stored)
    return [found[s : s + n] for s, n in zip(batch.outs.starts.tolist(), batch.outs.lengths.tolist(), strict=True)]


def check_decodes(engines, chains, arrays, bases=None):
    """Check that every engine rebuilds the chunks to the bit."""
    for one in dict.fromkeys(engines):
        found = decode(one, chains, arrays, bases)
        for i, (got, expected) in enumerate(zip(found, arrays, strict=True)):
            assert np.array_equal(got, expected), f"chunk {i} of {expected.size} bytes by {type(one).__name__}"


def check_entries(entries, blobs, arrays, sizes, layouts):
    """Check that the footer's entries and the headers agree with each other and the request; nothing grows."""
    n = len(arrays)
    assert len(entries) == n
    for entry, data, array, size, layout in zip(
        entries, blobs, arrays, column(sizes, n, np.uint8), column(layouts, n, np.uint8), strict=True
    ):
        header = blob.parse(memoryview(data), "here")
        assert blob.length_of(header) == len(data) == entry["length"]
        assert (header.digest, header.raw_bytes) == (digest(array), array.size)
        is_planes = header.transform == blob.DIFFERENCE and header.codecs[0] != codecs.SPARSE
        assert (header.element_size, header.layout) == (size, planes.BYTES if is_planes else layout)
        assert entry["digest"].tobytes() == header.digest
        assert entry["base"].tobytes() == header.base
        assert (entry["transform"], entry["raw_bytes"]) == (header.transform, header.raw_bytes)
        assert entry["element_size"] == header.element_size
        assert entry["codecs"].tobytes() == header.codecs
        assert entry["plane_bytes"].tolist() == blob.stored_plane_bytes(memoryview(data))
        assert (header.transform != blob.FULL) == (header.base != blob.NO_BASE)
        assert len(data) <= blob.bound(array.size, header.element_size)
        if header.codecs[0] == codecs.SPARSE:
            continue
        for codec, blocks in blob.stored_planes(memoryview(data), header, "here"):
            coded = sum(map(len, blocks)) + 4 * len(blocks)
            assert not codec or coded < array.size // header.element_size


# --- digests


def test_digests_of_every_length_and_alignment(engine):
    lengths = np.array([*range(0, 1100), 1500, 4095, 4096, 4097, 65_537, MIB - 1, MIB, MIB + 16], np.int64)
    whole = content("noise", 2 * MIB, 3)
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 2 * MIB - lengths)
    starts[:64] = np.arange(64)
    chunks = Chunks(
        [to_memory(engine, whole), to_memory(engine, whole[::-1])], np.arange(len(lengths)) % 2, starts, lengths
    )
    found = engine.start_digests(engine.load(chunks))()
    assert (found.shape, found.dtype) == ((len(lengths), 16), np.uint8)
    for row, which, start, length in zip(found, chunks.which, starts, lengths, strict=True):
        data = (whole, whole[::-1])[which][start : start + length].tobytes()
        assert row.tobytes() == xxhash.xxh3_128_digest(data, SEED), f"{length} bytes at {start}"


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 0, 16]], ids=str)
def test_digests_of_small_batches(engine, lengths):
    arrays = [content("noise", n, n) for n in lengths]
    found = engine.start_digests(engine.load(chunks_of(engine, arrays)))()
    assert found.shape == (len(lengths), 16)
    assert found.tobytes() == b"".join(map(digest, arrays))


# --- encode and decode


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_round_trip_of_every_shape(engine, cpu, size, layout):
    """From one element to more than a page, with tails; every kind of data; each engine decodes what both encode."""
    elements = [1, 2, 3, 5, 8, 15, 17, 31, 33, 63, 64, 65, 127, 512, 4096 // size, 4096 // size + 1, 4095, 5001]
    arrays = [content(kind, n * size, i) for i, n in enumerate(elements) for kind in KINDS]
    entries, blobs = encode(engine, arrays, size, layout)
    check_entries(entries, blobs, arrays, size, layout)
    assert not any(e["transform"] for e in entries)
    check_decodes([engine, cpu], [[b] for b in blobs], arrays)
    entries, blobs = encode(cpu, arrays, size, layout)
    check_decodes([engine], [[b] for b in blobs], arrays)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_round_trip_of_a_mebibyte(engine, cpu, size, layout):
    arrays = [content(kind, MIB + d * 16, i) for i, d in enumerate((-1, 0, 1)) for kind in KINDS]
    entries, blobs = encode(engine, arrays, size, layout)
    check_entries(entries, blobs, arrays, size, layout)
    check_decodes([engine, cpu], [[b] for b in blobs], arrays)
    _, by_cpu = encode(cpu, arrays, size, layout)
    check_decodes([engine], [[b] for b in by_cpu], arrays)
    for kind, ours, theirs in zip(KINDS * 3, blobs, by_cpu, strict=True):
        slack = 2 if kind == "sparse" else 1.05  # nvCOMP's deflate against zstd and zlib on planes of few values
        assert len(ours) < slack * len(theirs) + 8192 or kind == "repeats", f"{kind}: {len(ours)} for {len(theirs)}"


def test_a_batch_of_every_shape_at_once(engine, cpu):
    rng = np.random.default_rng(1)
    kinds, sizes, layouts = rng.choice(KINDS, 300), rng.choice(SIZES, 300), rng.choice(LAYOUTS, 300)
    drawn = zip(kinds, sizes, rng.integers(1, 3000, 300), strict=True)
    arrays = [content(kind, int(size) * int(n), i) for i, (kind, size, n) in enumerate(drawn)]
    entries, blobs = encode(engine, arrays, sizes, layouts)
    check_entries(entries, blobs, arrays, sizes, layouts)
    check_decodes([engine, cpu], [[b] for b in blobs], arrays)


def test_no_chunks(engine):
    assert encode(engine, []) == ([], [])
    assert decode(engine, [], []) == []


def test_compressible_data_is_small(engine):
    for kind, limit in (("constant", 0.01), ("sparse", 0.2), ("floats", 0.9), ("noise", 1.001)):
        _, (data,) = encode(engine, [content(kind, MIB)], 4, planes.ROTATED)
        assert len(data) < limit * MIB, kind


def test_blobs_may_be_copied_in_any_pieces(engine):
    arrays = [content(kind, 1000 + 4 * i, i) for i in range(6) for kind in KINDS]
    none = chunks_of(engine, [None] * len(arrays))
    n = len(arrays)
    batch = EncodeBatch(
        engine.load(chunks_of(engine, arrays)), digests_of(arrays), column(4, n, np.uint8),
        column(planes.ROTATED, n, np.uint8), none, np.zeros((n, 16), np.uint8), np.zeros(n, np.int64),
    )  # fmt: skip
    for encoded in engine.start_encode(batch)():
        count = len(encoded.entries)
        whole = read(encoded, 0, count)
        for first, last in ((0, 1), (count - 1, count), (count // 3, count // 2 + 1), (1, count)):
            if first < last:
                assert read(encoded, first, last) == whole[first:last]


# --- deltas


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_delta_is_stored_where_it_pays(engine, cpu, layout):
    base = content("floats", 80_000)
    near, far = changed(base), content("floats", 80_000, 9)
    arrays = [near, far, near, base, near]
    bases, limits = [base, base, base, base, None], [70_000, 70_000, 1000, 70_000, 0]
    entries, blobs = encode(engine, arrays, 4, layout, bases, limits)
    check_entries(entries, blobs, arrays, 4, layout)
    assert [int(e["transform"]) for e in entries] == [1, 0, 0, 1, 0], "near, far, over its limit, same, without a base"
    assert [e["base"].tobytes() for e in entries] == [digest(base) if e["transform"] else blob.NO_BASE for e in entries]
    assert len(blobs[0]) < 0.8 * len(blobs[4])
    assert len(blobs[3]) < 2000
    _, (of_base,) = encode(engine, [base], 4, layout)
    chained = [[b, of_base] if e["transform"] else [b] for e, b in zip(entries, blobs, strict=True)]
    check_decodes([engine, cpu], chained, arrays)
    check_decodes([engine, cpu], [[b] for b in blobs], arrays, [base if e["transform"] else None for e in entries])


@pytest.mark.parametrize("xor", [False, True])
def test_the_engines_choose_alike(engine, cpu, xor):
    """Whether a delta is stored depends only on the bytes."""
    base = content("floats", 400_000)
    bits = base.view(np.uint32)
    arrays = [
        (bits ^ np.random.default_rng(k).integers(0, 2**k, bits.size, np.uint64).astype(np.uint32)).view(np.uint8)
        for k in range(1, 33)
    ]
    args = (arrays, 4, planes.ROTATED, [base] * 32, 300_000)
    ours, theirs = (encode(one, *args, xor=xor)[0] for one in (engine, cpu))
    chosen = [int(e["transform"]) for e in ours]
    assert chosen == [int(e["transform"]) for e in theirs]
    assert set(chosen) == {0, 2 if xor else 1}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bytes_of_chunk", [64, 4096, 40_008])
def test_chains_link_by_link(engine, cpu, size, bytes_of_chunk):
    """Chains of depth 0 to 8, with links of both engines: each version is rebuilt, from blobs and from plain bases."""
    version = content("floats", bytes_of_chunk)
    _, (first,) = encode(engine, [version], size, planes.ROTATED)
    chain, chains, versions = [first], [[first]], [version]
    for depth in range(1, 9):
        after = np.array(version)
        after[depth % 7 :: 40] ^= depth
        by = engine if depth % 3 else cpu
        (entry,), (data,) = encode(by, [after], size, planes.ROTATED, [version])
        chain = [data, *chain] if entry["transform"] else [data]
        version = after
        chains.append(chain)
        versions.append(version)
    assert max(map(len, chains)) == 9 or bytes_of_chunk == 64
    check_decodes([engine, cpu], chains, versions)
    tops, plain = [c[: max(1, len(c) // 2)] for c in chains], []
    for i, (top, whole) in enumerate(zip(tops, chains, strict=True)):
        plain.append(versions[i - len(top)] if len(top) < len(whole) else None)
    check_decodes([engine, cpu], tops, versions, plain)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
def test_sparse_deltas_of_the_cpu_engine(engine, cpu, dtype):
    """Every engine rebuilds them: in chains with other deltas, beside chunks without deltas, and from plain bases."""
    size, layout = np.dtype(dtype).itemsize, int(np.dtype(dtype).kind == "f")
    versions = [np.random.default_rng(0).normal(0, 20, 5000).astype(dtype).view(np.uint8)]
    _, chain = encode(cpu, versions, size, layout)
    found = []
    for depth in range(1, 6):
        after = versions[-1].copy().view(f"u{size}")
        after[depth :: 1 if depth == 3 else 50] ^= 1
        after = after.view(np.uint8)
        by = engine if depth == 3 else cpu
        (entry,), (data,) = encode(by, [after], size, layout, [versions[-1]])
        assert entry["transform"] == blob.DIFFERENCE
        found.append(entry["codecs"][0] == codecs.SPARSE)
        chain.insert(0, data)
        versions.append(after)
    assert found == [True, True, False, True, True]
    _, (plain,) = encode(engine, [versions[0]], size, layout)
    check_decodes([engine, cpu], [chain, [plain], chain[1:]], [versions[-1], versions[0], versions[-2]])
    check_decodes([engine, cpu], [chain[:2]], [versions[-1]], [versions[-3]])


def sparse_blob(payload, lengths, chunk, base, size, layout):
    out = np.empty(blob.HEADER.size + 4 * len(lengths) + len(payload), np.uint8)
    shape = (chunk.size, size, layout, bytes([codecs.SPARSE]))
    return bytes(blob._assemble(shape, [payload], lengths, (digest(chunk), digest(base)), out))


def sparse_payload(chunk, base, size, layout):
    difference = np.empty_like(chunk)
    planes.difference(chunk, base, size, difference)
    pieces, frame_lengths = sparse.encode(difference, base, size, layout, codecs.BLOCK_BYTES)
    return b"".join(pieces), frame_lengths


@pytest.fixture
def check_applied(engine, monkeypatch):
    """As `check_decodes`; a device's engine leaves no chunk to the CPU, however its blocks share the tiles."""

    def check(chains, arrays, bases):
        check_decodes([engine], chains, arrays, bases)
        if not hasattr(engine, "_decode_on_host"):
            return
        from snapstore.engine.cuda import sparse

        is_real = sparse.blocks_of(np.array([1000.0]), engine.device)[0] > 1
        for blocks in (40, *((1, 3) if is_real else ())):  # 40: a block for each tile
            monkeypatch.setattr(sparse, "blocks_of", lambda effort, device, blocks=blocks: np.full(len(effort), blocks))
            check_decodes([engine], chains, arrays, bases)

    if hasattr(engine, "_decode_on_host"):
        monkeypatch.setattr(type(engine), "_decode_on_host", lambda *args: pytest.fail("left to the CPU"))
    return check


def apply_every_kind(check_applied, size, layout):
    chains, arrays, bases = [], [], []
    for i, (elements, share, most) in enumerate([
        (1, 1, 1), (5, 0.5, 3), (100, 0, 1), (5000, 0.01, 1), (8192, 0.1, 3), (8193, 0.5, 100), (20_000, 0.6, 3),
        (16_384, 0.1, 3), (16_385, 0.3, 3), (20_000, 0.02, 2**62), (20_000, 0.003, 1), (70_000, 0.3, 2**31),
        (30_000, 0.95, 2), (12_700, 0.3, 1),
    ]):  # fmt: skip
        base, chunk = pair(size, layout, elements, share, i, min(most, 2 ** (8 * size - 1) - 1))
        chains.append([sparse_blob(*sparse_payload(chunk, base, size, layout), chunk, base, size, layout)])
        arrays.append(chunk)
        bases.append(base)
    check_applied(chains, arrays, bases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_sparse_deltas_of_every_kind(check_applied, size, layout):
    """Few and many changes, dense groups, small and large differences, in chunks of many lengths at once."""
    apply_every_kind(check_applied, size, layout)


def test_sparse_deltas_of_all_element_sizes_in_one_batch(check_applied):
    """A device has a kernel for each element size."""
    chains, arrays, bases = [], [], []
    for i, (size, elements) in enumerate([(2, 9000), (8, 70), (1, 20_000), (2, 3), (4, 30_000), (1, 1), (8, 5000)]):
        base, chunk = pair(size, planes.ROTATED, elements, 0.1, i, 3)
        payload = sparse_payload(chunk, base, size, planes.ROTATED)
        chains.append([sparse_blob(*payload, chunk, base, size, planes.ROTATED)])
        arrays.append(chunk)
        bases.append(base)
    check_applied(chains, arrays, bases)


@pytest.fixture
def small_tiles(engine):
    """The device has little shared memory: its thread blocks take smaller tiles."""
    if not hasattr(engine, "_decode_on_host"):
        yield
        return
    from snapstore.engine.cuda import kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "apply_tile_bytes", lambda device: min(kernels.APPLY_SHARED_BYTES))
        kernels._load(engine.device.index)
        yield
    kernels._load(engine.device.index)


@pytest.mark.parametrize("size", SIZES)
def test_sparse_deltas_on_a_device_with_little_shared_memory(check_applied, small_tiles, size):
    """Thread blocks with small tiles apply the same deltas."""
    apply_every_kind(check_applied, size, planes.ROTATED)


def apply_chains(check_applied, size, layout):
    rng = np.random.default_rng(size)
    chains, arrays, bases = [], [], []
    step = 2 ** (8 * size - 9) if size > 1 else 1  # from one key to the next
    for elements, keys, most, shares in [
        (3, 0, 3, (1, 1)), (20_000, 12, step // 40 + 1, (0.1,) * 4), (20_000, 0, 2 ** (8 * size - 2), (0.02,) * 3),
        (20_000, 0, 3, (0.02, 0.3, 0.02, 0.7, 0.05)), (20_000, 0, 3, (0.4,)),
    ]:  # fmt: skip
        version, _ = pair(size, layout, elements, 0.01, elements)
        if keys:
            version = (rng.integers(keys, size=elements) * step + rng.integers(step, size=elements)).astype(f"u{size}")
            version = version.view(np.uint8)
        bases.append(version)
        chain = []
        for i, share in enumerate(shares):
            before, version = version, version.copy()
            at = np.flatnonzero(rng.random(elements) < share)
            version.view(f"u{size}")[at] += rng.integers(-most, most, at.size, endpoint=True).astype(f"u{size}")
            other = layout ^ (i == 3 and not keys)
            payload = sparse_payload(version, before, size, other)
            chain.insert(0, sparse_blob(*payload, version, before, size, other))
        chains.append(chain)
        arrays.append(version)
    check_applied(chains, arrays, bases)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_chains_of_sparse_deltas(check_applied, size, layout):
    """Links that move few or many elements to other groups, with few or many groups, and with another layout."""
    apply_chains(check_applied, size, layout)


@pytest.mark.parametrize("size", SIZES)
def test_chains_on_a_device_with_little_shared_memory(check_applied, small_tiles, size):
    """Thread blocks with small tiles apply the same chains."""
    apply_chains(check_applied, size, planes.ROTATED)


@pytest.mark.parametrize("seed", range(3))
def test_links_whose_groups_end_at_other_keys(check_applied, seed):
    """Each link alone has few groups; more than a few links have too many to be applied together."""
    rng = np.random.default_rng(seed)
    elements, size, layout = 30_000, 2, planes.ROTATED
    first = version = (rng.integers(1 << 16, size=elements) | 1 << 14).astype(np.uint16).view(np.uint8)  # keys from 128
    chain = []
    for _ in range(8):
        before, version = version, version.copy()
        likely = np.repeat(rng.choice([0.01, 0.1, 0.6], 8), 32)  # that an element changes, by its exponent
        at = np.flatnonzero(rng.random(elements) < np.roll(likely, rng.integers(32))[before.view(np.uint16) >> 7 & 255])
        version.view(np.uint16)[at] += rng.integers(-9, 9, at.size, endpoint=True).astype(np.uint16)
        payload = sparse_payload(version, before, size, layout)
        chain.insert(0, sparse_blob(*payload, version, before, size, layout))
    check_applied([chain], [version], [first])


def test_blocks_that_are_waited_for_in_vain(engine, monkeypatch):
    """Blocks stop waiting: the digest is then wrong, and the CPU rebuilds the chunk. A real device runs all blocks."""
    base, chunk = pair(2, planes.ROTATED, 60_000, 0.05, 1)
    chain = [sparse_blob(*sparse_payload(chunk, base, 2, planes.ROTATED), chunk, base, 2, planes.ROTATED)]
    if hasattr(engine, "_decode_on_host"):
        from snapstore.engine.cuda import sparse

        monkeypatch.setattr(sparse, "blocks_of", lambda effort, device: np.full(len(effort), 3))  # of 4 tiles
    check_decodes([engine], [chain], [chunk], [base])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_the_engines_write_the_same_sparse_deltas(engine, cpu, size, layout):
    """All bytes but those of frames are the same, and both engines choose sparse deltas unless sizes are close."""
    pairs = [
        pair(size, layout, elements, share, i, min(most, 2 ** (8 * size - 1) - 1))
        for i, (elements, share, most) in enumerate([
            (1, 1, 1), (5, 0.5, 3), (100, 0, 1), (5000, 0.01, 1), (8193, 0.5, 100), (20_000, 0.02, 2**62),
            (20_000, 0.4, 3), (70_000, 0.3, 2**31), (30_000, 0.95, 2), (40_000, 0.01, 2),
            *((9000, 0.0008, 1) for _ in range(8)),  # groups of two and four gaps, which have two medians
        ])
    ]  # fmt: skip
    bases, arrays = zip(*pairs, strict=True)
    ours, by_engine = encode(engine, arrays, size, layout, bases)
    theirs, by_cpu = encode(cpu, arrays, size, layout, bases)
    check_entries(ours, by_engine, arrays, size, layout)
    plain = [base if entry["transform"] else None for entry, base in zip(ours, bases, strict=True)]
    check_decodes([engine, cpu], [[b] for b in by_engine], arrays, plain)
    both = [i for i in range(len(arrays)) if ours[i]["codecs"][0] == theirs[i]["codecs"][0] == codecs.SPARSE]
    assert {2, 3, 5} <= set(both)
    for i in both:
        assert without_frames(by_engine[i]) == without_frames(by_cpu[i])
        assert len(by_engine[i]) <= 1.01 * len(by_cpu[i]) + 8


def without_frames(data):
    """Return the table of groups and the low parts of a sparse delta."""
    header = blob.parse(memoryview(data), "here")
    payload, frames = data[header.payload_start :], sum(header.block_lengths)
    end = 4 + 12 * int.from_bytes(payload[:4], "little")
    return payload[:end], payload[end + frames :]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_xors_of_every_shape(engine, cpu, size, layout):
    """An XOR has the planes of a full chunk, in its layout; each engine reads those of the other."""
    arrays, bases = [], []
    for i, length in enumerate((size, 8 * size, 4096, 40_008, 300_000)):
        for kind in KINDS:
            bases.append(content(kind, length, i))
            arrays.append(bases[-1] ^ content("sparse", length, i + 1))
    for writer in dict.fromkeys((engine, cpu)):
        entries, blobs = encode(writer, arrays, size, layout, bases, xor=True)
        check_entries(entries, blobs, arrays, size, layout)
        assert {int(entry["transform"]) for entry in entries} == {blob.FULL, blob.XOR}
        plain = [base if entry["transform"] else None for entry, base in zip(entries, bases, strict=True)]
        check_decodes([engine, cpu], [[b] for b in blobs], arrays, plain)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(24))
def test_chains_of_differences_and_xors_are_applied_oldest_first(engine, cpu, seed):
    """Sums and XORs do not commute. Links are XORs, differences in planes and sparse deltas, by either engine."""
    draw = np.random.default_rng(seed)
    chains, versions, found = [], [], set()
    for _ in range(6):
        version = content("floats", 8 * int(draw.integers(64, 4000)), int(draw.integers(100)))
        size, layout = int(draw.choice(SIZES)), int(draw.choice(LAYOUTS))
        chain = encode(cpu, [version], size, layout)[1]
        for _ in range(int(draw.integers(1, 9))):
            before, version = version, np.array(version)
            moved = version[int(draw.integers(8)) :: int(draw.choice([1, 2, 50]))]
            moved += np.uint8(draw.integers(1, 4))
            size = int(draw.choice([size, size, *SIZES]))
            by, xor = (engine, cpu)[draw.integers(2)], bool(draw.integers(2))
            (entry,), (data,) = encode(by, [version], size, layout, [before], xor=xor)
            chain = [data, *chain] if entry["transform"] else [data]
            found.add((int(entry["transform"]), int(entry["codecs"][0]) == codecs.SPARSE))
        chains.append(chain)
        versions.append(version)
    assert found >= {(blob.XOR, False)}
    check_decodes([engine, cpu], chains, versions)


def test_a_sparse_xor_is_refused(engine):
    base, meant = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    meant[[10, 16]] = 255, 252
    data = bytearray(sparse_blob(*forged(*GOOD), meant, base, 1, 0))
    data[16] = blob.XOR
    data[8:16] = hashing.checksum(data[16:]).to_bytes(8, "little")
    with pytest.raises(IntegrityError, match="blob 0: a sparse delta of transform 2, expected 1"):
        decode(engine, [[bytes(data)]], [meant], [base])


@pytest.mark.parametrize("what", HOSTILE)
def test_sparse_deltas_that_contradict_themselves(engine, what):
    """They are refused, even with the digest of the chunk that a reader without checks would make."""
    payload, lengths = HOSTILE[what]()
    base = np.zeros(100, np.uint8)
    meant = base.copy()
    meant[[10, 16]] = 255, 252
    for chunk in (meant, base):
        with pytest.raises(DAMAGE):
            decode(engine, [[sparse_blob(payload, lengths, chunk, base, 1, 0)]], [chunk], [base])


@pytest.mark.parametrize("link", [0, 1])
def test_blobs_of_another_length_than_their_reference_says(engine, link):
    base, meant = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    meant[[10, 16]] = 255, 252
    chain = [sparse_blob(*forged(*GOOD), meant, base, 1, 0), encode(engine, [base])[1][0]]
    np.testing.assert_array_equal(decode(engine, [chain], [meant])[0], meant)
    chain[link] += bytes(8)
    with pytest.raises(IntegrityError, match=f"blob {link}: .* but the manifest says {len(chain[link])}"):
        decode(engine, [chain], [meant])


def test_sparse_deltas_of_too_many_elements(engine, monkeypatch):
    """Such a delta is refused, though nothing else is wrong with it."""
    base, meant = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    meant[[10, 16]] = 255, 252
    links = [[sparse_blob(*forged(*GOOD), meant, base, 1, 0)]]
    np.testing.assert_array_equal(decode(engine, links, [meant], [base])[0], meant)
    monkeypatch.setattr(sparse, "MAX_ELEMENTS", 99)
    use_reference(monkeypatch)  # the extension has the real limit
    with pytest.raises(IntegrityError, match="a chunk of 100 elements, expected at most 99"):
        decode(engine, links, [meant], [base])


def test_sparse_deltas_of_more_elements_than_any_chunk_may_have(engine):
    base = np.zeros(sparse.MAX_ELEMENTS + 1, np.uint8)
    meant = base.copy()
    meant[[10, 16]] = 255, 252
    with pytest.raises(IntegrityError, match="a chunk of 16777217 elements, expected at most 16777216"):
        decode(engine, [[sparse_blob(*forged(*GOOD), meant, base, 1, 0)]], [meant], [base])


def test_a_chain_that_crosses_element_sizes_and_layouts(engine, cpu):
    version, links = content("floats", 8192), []
    for i, (size, layout) in enumerate([(4, 1), (2, 1), (2, 0), (8, 0), (1, 0), (4, 1)]):
        before, version = version, np.array(version)
        if i:
            version[i::64] ^= i
        (entry,), (data,) = encode(cpu, [version], size, layout, [before if i else None])
        assert entry["transform"] == (1 if i else 0)
        links.insert(0, data)
    check_decodes([engine, cpu], [links], [version])


# --- damage


def failure(engine, chains, arrays, bases=None):
    """Return the error of decoding; if there is none, check the bytes and return None."""
    try:
        found = decode(engine, chains, arrays, bases)
    except DAMAGE as error:
        return str(error)
    assert all(np.array_equal(a, b) for a, b in zip(found, arrays, strict=True)), "wrong bytes"
    return None


@pytest.mark.parametrize("kind", ["noise", "floats", "sparse"])
def test_no_flipped_bit_gives_wrong_bytes(engine, kind):
    array = content(kind, 2048)
    _, (data,) = encode(engine, [array], 4, planes.ROTATED)
    places = [*range(8 * blob.HEADER.size), *range(8 * blob.HEADER.size, 8 * len(data), 8 * len(data) // 150)]
    for bit in places:
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        said = failure(engine, [[bytes(bad)]], [array])
        assert said is not None, f"bit {bit}"
        assert said.startswith("blob 0"), said


def test_the_first_damage_is_named(engine):
    arrays = [content("floats", 4000, i) for i in range(30)]
    _, blobs = encode(engine, arrays, 4, planes.ROTATED)
    assert failure(engine, [[b] for b in blobs], arrays) is None
    for places in ((7,), (29, 12), (0, 1, 2)):
        bad = [bytearray(b) for b in blobs]
        for i in places:
            bad[i][200] ^= 1
        said = failure(engine, [[bytes(b)] for b in bad], arrays)
        assert said is not None
        assert said.startswith(f"blob {min(places)}: checksum mismatch"), said


def test_damage_deep_in_a_chain_is_named(engine):
    base = content("floats", 4000)
    middle, top = changed(base, 1), changed(base, 2)
    _, (full,) = encode(engine, [base], 4, planes.ROTATED)
    _, (one,) = encode(engine, [middle], 4, planes.ROTATED, [base])
    _, (two,) = encode(engine, [top], 4, planes.ROTATED, [middle])
    other = content("noise", 100)
    _, (beside,) = encode(engine, [other])
    for i in range(3):
        chain = [bytearray(b) for b in (two, one, full)]
        chain[i][120] ^= 4
        said = failure(engine, [[beside], list(map(bytes, chain))], [other, top])
        assert said is not None
        assert said.startswith(f"blob {i + 1}:"), said


def test_truncated_blobs(engine):
    array = content("floats", 2048)
    _, (data,) = encode(engine, [array], 4, planes.ROTATED)
    for length in (0, 1, 16, 79, 80, 81, len(data) // 2, len(data) - 1):
        said = failure(engine, [[data[:length]]], [array])
        assert said is not None
        assert said.startswith("blob 0:"), said


def test_a_digest_that_is_not_the_chunks(engine):
    """Every checksum is right: only the digest shows the error."""
    array, other = content("floats", 4096), content("floats", 4096, 1)
    n = 1
    chunks = chunks_of(engine, [array])
    lie = EncodeBatch(
        engine.load(chunks), digests_of([other]), column(4, n, np.uint8), column(planes.ROTATED, n, np.uint8),
        chunks_of(engine, [None]), np.zeros((n, 16), np.uint8), np.zeros(n, np.int64),
    )  # fmt: skip
    (encoded,) = engine.start_encode(lie)()
    (data,) = read(encoded, 0, 1)
    said = failure(engine, [[data]], [other])
    assert said is not None
    assert "blob 0: digest mismatch" in said
    assert digest(other).hex() in said


def test_blobs_in_the_wrong_order(engine):
    base = content("floats", 4096)
    top, other = changed(base), content("floats", 4096, 5)
    _, (full, beside) = encode(engine, [base, other], 4, planes.ROTATED)
    (entry,), (delta,) = encode(engine, [top], 4, planes.ROTATED, [base])
    assert entry["transform"]
    cases = [
        ([[full, delta]], [top]), ([[delta]], [top]), ([[delta, beside]], [top]), ([[full]], [top]),
        ([[delta, full, full]], [top]), ([[delta, delta]], [top]), ([[beside], [full]], [base, other]),
        ([[full]], [base[:4080]]), ([[full]], [np.concatenate([base, base])]),
    ]  # fmt: skip
    for number, (chains, arrays) in enumerate(cases):
        assert failure(engine, chains, arrays) is not None, number
    assert "digest mismatch" in failure(engine, [[delta]], [top], [other])
    assert failure(engine, [[full]], [base], [base]) is not None, "a full blob has no base"


def test_an_engine_works_on_after_damage(engine):
    array = content("floats", 4096)
    _, (data,) = encode(engine, [array], 4, planes.ROTATED)
    for _ in range(3):
        assert failure(engine, [[data[:90] + b"?" + data[91:]]], [array]) is not None
        assert failure(engine, [[data]], [array]) is None


# --- memory


def test_load_gives_the_same_chunks(engine):
    arrays = [content("noise", n, n) for n in (1, 64, 1000)]
    chunks = chunks_of(engine, [*arrays, None])
    loaded = engine.load(chunks)
    assert loaded.lengths.tolist() == chunks.lengths.tolist()
    assert [to_numpy(view).tolist() for view in loaded.views()[:3]] == [a.tolist() for a in arrays]


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 3 * MIB + 1])
def test_empty_and_buffer(engine, nbytes):
    memory = engine.empty(nbytes)
    assert len(memory) == nbytes
    data = content("noise", nbytes)
    assert np.array_equal(to_numpy(to_memory(engine, data)), data)
    for _ in range(3):
        buffer = engine.buffer(nbytes)
        assert isinstance(buffer, np.ndarray)
        assert buffer.dtype == np.uint8
        assert buffer.ndim == 1
        assert len(buffer) >= nbytes
        buffer[:nbytes] = data
        assert np.array_equal(buffer[:nbytes], data)
        engine.give_back(buffer)


def test_buffers_in_use_are_apart(engine):
    buffers = [engine.buffer(1000) for _ in range(5)]
    for i, buffer in enumerate(buffers):
        buffer[:] = i
    assert [int(b[0]) for b in buffers] == [0, 1, 2, 3, 4]
    for buffer in buffers:
        engine.give_back(buffer)


def test_sizes_and_counts(engine):
    for name in ("batch_bytes", "decode_bytes", "batch_chunks", "depth", "readers"):
        assert getattr(engine, name) >= 1


def test_batches_at_once(engine):
    """One batch more than `depth` is started, and the results are waited for in reverse order."""
    batches = []
    for seed in range(engine.depth + 1):
        arrays = [content(kind, 4000, seed) for kind in KINDS]
        _, blobs = encode(engine, arrays, 4, planes.ROTATED)
        batches.append((arrays, decode_batch(engine, [[b] for b in blobs], arrays)))
    waits = [engine.start_decode(batch) for _, batch in batches]
    for wait in waits[::-1]:
        wait()
    for arrays, batch in batches:
        for view, array in zip(batch.outs.views(), arrays, strict=True):
            assert np.array_equal(to_numpy(view), array)


def test_an_engine_may_be_used_again_after_close(engine, cpu):
    arrays = [content("floats", 4096, i) for i in range(3)]
    for _ in range(3):
        _, blobs = encode(engine, arrays, 4, planes.ROTATED)
        check_decodes([engine, cpu], [[b] for b in blobs], arrays)
        engine.close()
        engine.close()


def test_nothing_beside_the_outs_is_written(engine):
    arrays = [content("floats", n, n) for n in (40, 1000, 4096)]
    _, blobs = encode(engine, arrays, 1)
    batch = decode_batch(engine, [[b] for b in blobs], arrays)
    room = to_memory(engine, np.full(10_000, 0x55, np.uint8))
    starts = np.array([1, 3001, 5003])
    outs = Chunks([room], np.zeros(3, np.int64), starts, batch.outs.lengths)
    engine.start_decode(dataclasses.replace(batch, outs=outs))()
    expected = np.full(10_000, 0x55, np.uint8)
    for start, array in zip(starts.tolist(), arrays, strict=True):
        expected[start : start + array.size] = array
    np.testing.assert_array_equal(to_numpy(room), expected)
