"""Sparse deltas round-trip for every dtype and follow docs/format.md. Contradictory deltas are refused."""

import struct
from functools import partial

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.forge import little_memory, little_time
from kit.samples import examples
from kit.sparse_deltas import GOOD, HOSTILE, forged, pair
from kit.states import DTYPES
from snapstore import Repository
from snapstore.engine.batches import EncodeJob
from snapstore.engine.reference import encode_chunk
from snapstore.errors import FormatError, IntegrityError
from snapstore.format import hashing
from snapstore.format.blobs import blob, chain_decode, codecs, planes
from snapstore.format.blobs.codecs import key_order, sparse, sparse_decode
from snapstore.state.values.tensors import TORCH_DTYPES
from snapstore.storage.memory import MemoryStore

SEED = 0xD1A5ED5EED
digest = partial(hashing.digest, seed=SEED)
BLOCK = codecs.BLOCK_BYTES


def payload_of(base, chunk, size, layout, block_bytes=BLOCK):
    difference = np.empty_like(chunk)
    planes.difference(chunk, base, size, difference)
    pieces, frame_lengths = sparse.encode(difference, base, size, layout, block_bytes)
    return b"".join(pieces), frame_lengths


def applied(payload, frame_lengths, base, size, layout, block_bytes=BLOCK):
    out = base.copy()
    link = sparse_decode.StoredDelta(memoryview(payload), frame_lengths, block_bytes)
    assert list(sparse_decode.apply_all([link], out.view(f"u{size}"), layout)) == [True]
    return out


def read_as_the_page_says(payload, frame_lengths, base, size, layout, block_bytes):
    """Decode element by element, as docs/format.md, "Sparse deltas", says; the payload must be valid."""
    bits, (count,) = 8 * size, struct.unpack_from("<I", payload)
    table = [struct.unpack_from("<BBBBII", payload, 4 + 12 * i) for i in range(count)]
    at, lengths = 4 + 12 * count, list(frame_lengths)

    def stream(symbols):
        nonlocal at
        found = b""
        for _ in range(-(-symbols // block_bytes)):
            length = lengths.pop(0)
            found += zstandard.ZstdDecompressor().decompress(payload[at : at + length])
            at += length
        return list(found)

    def take(n):
        nonlocal at
        at += n
        return payload[at - n : at]

    symbols, values, begin = [], [], 0
    for i, row in enumerate(table):
        if row[3]:
            symbols += stream(sum(r[4] for r in table[begin : i + 1]))
            values += stream(sum(r[5] for r in table[begin : i + 1]))
            begin = i + 1
    elements = [int(x) for x in base.view(f"<u{size}")]
    keys = [((x << 1 | x >> (bits - 1)) >> (bits - 8)) & 255 if layout else 0 for x in elements]
    first = 0
    for last, shift, value_shift, _, gaps, some in table:
        members = [i for i, key in enumerate(keys) if first <= key <= last]
        first = last + 1
        own, symbols = symbols[:gaps], symbols[gaps:]
        packed = take((gaps * (0 if shift == 255 else shift) + 7) // 8)
        low = "".join(f"{byte:08b}" for byte in packed)
        quotients = [s // 3 if s // 3 < 84 else int.from_bytes(take(4), "little") for s in own]
        w_own, values = values[:some], values[some:]
        w_low = [int.from_bytes(take(value_shift // 8), "little") for _ in w_own]
        w = [
            (w if w < 255 else int.from_bytes(take(size), "little")) << value_shift | n
            for w, n in zip(w_own, w_low, strict=True)
        ]
        if shift == 255:
            changes = list(zip(members, w, strict=True))
        else:
            changes, position, others = [], -1, iter(w)
            for k, (symbol, quotient) in enumerate(zip(own, quotients, strict=True)):
                position += 1 + (quotient << shift | int(low[k * shift : (k + 1) * shift] or "0", 2))
                changes.append((members[position], symbol % 3 + 1 if symbol % 3 < 2 else next(others) + 3))
        for i, z in changes:
            difference = z // 2 if z % 2 == 0 else -(z + 1) // 2
            elements[i] = (elements[i] + difference) % (1 << bits)
    assert at == len(payload)
    assert not lengths
    return np.array(elements, f"<u{size}").view(np.uint8)


@settings(deadline=None, max_examples=examples(150))
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([planes.BYTES, planes.ROTATED]),
    st.integers(0, 3000),
    st.sampled_from([0, 0.001, 0.02, 0.3, 0.6, 1]),
    st.sampled_from([1, 3, 100, 2**7 - 1, 2**31, 2**62]),
    st.sampled_from([7, 300, BLOCK]),
    st.integers(0, 1000),
)
def test_round_trip_and_a_reader_by_the_page(size, layout, elements, share, most, block_bytes, seed):
    """The decoder, and a reader that follows docs/format.md only, return the chunk that was encoded."""
    base, chunk = pair(size, layout, elements, share, seed, min(most, 2 ** (8 * size - 1) - 1))
    payload, lengths = payload_of(base, chunk, size, layout, block_bytes)
    np.testing.assert_array_equal(applied(payload, lengths, base, size, layout, block_bytes), chunk)
    found = read_as_the_page_says(payload, lengths, base, size, layout, block_bytes)
    np.testing.assert_array_equal(found, chunk)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", [planes.BYTES, planes.ROTATED])
def test_extreme_elements(size, layout):
    """Every extreme element may change to every other: zeros of both signs, NaNs, the smallest and largest integers."""
    top = 2 ** (8 * size - 1)
    ends = np.array([0, 1, 2, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, top // 2, top + top // 2], np.uint64)
    base, chunk = (np.ascontiguousarray(x).ravel().astype(f"u{size}").view(np.uint8) for x in np.meshgrid(ends, ends))
    np.testing.assert_array_equal(applied(*payload_of(base, chunk, size, layout), base, size, layout), chunk)


def test_gaps_beyond_a_symbol():
    """Gaps too large for one symbol round-trip: the median gap is 0, and two gaps are long."""
    base = np.zeros(300_000, np.uint8)
    chunk = base.copy()
    chunk[:200], chunk[150_000:150_200], chunk[-1] = 1, 2, 255
    payload, lengths = payload_of(base, chunk, 1, 0)
    np.testing.assert_array_equal(applied(payload, lengths, base, 1, 0), chunk)
    assert len(payload) < 200


# --- the order of the elements by key, which is kept along a chain


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", [planes.BYTES, planes.ROTATED])
@pytest.mark.parametrize("most_moves", [0, 10**6])
def test_an_order_follows_its_chain(size, layout, most_moves, monkeypatch):
    """After links that move no, few or all elements to other keys, the order equals a new one."""
    monkeypatch.setattr(key_order, "MOST_MOVES", most_moves)
    monkeypatch.setattr(key_order, "SORTED_TOGETHER", 700)
    rng = np.random.default_rng(size)
    version, _ = pair(size, layout, 3000, 0, 1)
    out = version.copy()
    order = key_order.KeyOrder(out.view(f"u{size}"), layout)
    for share in (0.01, 0.3, 0, 1, 0.002, 0.05):
        elements = version.copy().view(f"u{size}")
        at = rng.random(elements.size) < share
        elements[at] = rng.integers(0, 2**63, int(at.sum()), np.uint64).astype(elements.dtype)
        base, version = version, elements.view(np.uint8)
        payload, lengths = payload_of(base, version, size, layout)
        link = sparse_decode.StoredDelta(memoryview(payload), lengths, BLOCK)
        (changes,) = sparse_decode.unpack([link], out.view(f"u{size}"))
        sparse_decode.apply(changes, out.view(f"u{size}"), order)
        np.testing.assert_array_equal(out, version)
    order.move_noted()
    every = np.arange(3000)
    found = order.positions(every)
    np.testing.assert_array_equal(order.members(order.starts[:1], np.array([3000]), mixed=True), every)
    new = key_order.KeyOrder(version.view(f"u{size}"), layout)
    np.testing.assert_array_equal(order.starts, new.starts)
    np.testing.assert_array_equal(found, new.positions(every))


@pytest.mark.parametrize("count", [1, 32_767, 32_768, 32_769, 100_000])
@pytest.mark.parametrize("keys", [1, 3, 256])
def test_an_order_is_by_key_then_by_position(count, keys):
    elements = np.random.default_rng(count).integers(0, keys, count).astype(np.uint16) << np.uint16(7)
    order = key_order.KeyOrder(elements, planes.ROTATED)
    np.testing.assert_array_equal(order.positions(np.arange(count)), np.argsort(elements, kind="stable"))
    np.testing.assert_array_equal(np.diff(order.starts), np.bincount(elements >> 7, minlength=256))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("most_symbols", [0, 2000, 10**6])
def test_links_that_are_read_together(size, most_symbols, monkeypatch):
    """Links that are read together give each chunk of the chain in turn, also the chunks before a bad link."""
    monkeypatch.setattr(sparse_decode, "MOST_SYMBOLS", most_symbols)
    rng = np.random.default_rng(size)
    layout = planes.ROTATED
    versions, links = [pair(size, layout, 3000, 0, 1)[0]], []
    for share in (0.05, 0.01, 0.2, 0, 0.4, 0.03, 0.7):
        elements = versions[-1].copy().view(f"u{size}")
        at = rng.random(elements.size) < share
        elements[at] += rng.integers(1, 200, int(at.sum())).astype(elements.dtype)
        versions.append(elements.view(np.uint8))
        payload, lengths = payload_of(*versions[-2:], size, layout)
        links.append(sparse_decode.StoredDelta(memoryview(payload), lengths, BLOCK))
    out = versions[0].copy()
    for version, _ in zip(versions[1:], sparse_decode.apply_all(links, out.view(f"u{size}"), layout), strict=True):
        np.testing.assert_array_equal(out, version)
    links[4] = sparse_decode.StoredDelta(memoryview(bytes(links[4].payload) + b"!"), links[4].frame_lengths, BLOCK)
    out = versions[0].copy()
    applying = sparse_decode.apply_all(links, out.view(f"u{size}"), layout)
    for version in versions[1:5]:
        assert next(applying)
        np.testing.assert_array_equal(out, version)
    with pytest.raises(IntegrityError, match="sparse: groups"):
        next(applying)


def test_groups_of_one_key_and_of_several():
    """A key with many elements is a group of its own, so that no reader has to sort its members."""
    base, chunk = pair(4, planes.ROTATED, 300_000, 0.01, 3, 1)
    payload, lengths = payload_of(base, chunk, 4, planes.ROTATED)
    np.testing.assert_array_equal(applied(payload, lengths, base, 4, planes.ROTATED), chunk)
    (count,) = sparse.COUNT.unpack_from(payload)
    last_keys = np.frombuffer(payload, sparse.GROUP, count, sparse.COUNT.size)["last_key"].astype(int)
    order = key_order.KeyOrder(base.view(np.uint32), planes.ROTATED)
    first_keys = np.append(0, last_keys[:-1] + 1)
    is_mixed = order.mixed(first_keys, last_keys)
    sizes = order.starts[last_keys + 1] - order.starts[first_keys]
    assert 0 < sizes[is_mixed].max() < 2 * sparse.ALONE_ABOVE < sizes.max()


# --- blobs and chains


def encoded(chunk, base=None, size=2, layout=planes.ROTATED, delta_limit=10**9):
    out = np.empty(blob.bound(chunk.size, size), np.uint8)
    base_digest = b"" if base is None else digest(base)
    return bytes(encode_chunk(EncodeJob(chunk, digest(chunk), size, layout, base, base_digest, delta_limit), out).data)


def rebuilt(blobs, chunk, base=None):
    out = np.full(chunk.size, 0xAA, np.uint8)
    wheres = [f"blob {i}" for i in range(len(blobs))]
    chain_decode.decode_chain([memoryview(b) for b in blobs], wheres, digest(chunk), out, base, seed=SEED)
    return out


def is_sparse(data):
    return blob.parse(memoryview(data), "here").codecs[0] == codecs.SPARSE


def test_no_delta_exceeds_its_limit_even_if_the_sample_saw_no_change():
    base = np.random.default_rng(0).standard_normal(262_144).astype(np.float32)
    unseen = np.ones(base.size // planes.SAMPLE_RUN, bool)
    unseen[planes.sampled_runs(len(unseen))] = False
    chunk = np.where(np.repeat(unseen, planes.SAMPLE_RUN), base[::-1], base).view(np.uint8)
    base = base.view(np.uint8)
    data = encoded(chunk, base, size=4, delta_limit=100_000)
    assert blob.parse(memoryview(data), "here").transform == blob.FULL
    np.testing.assert_array_equal(rebuilt([data], chunk), chunk)
    assert blob.parse(memoryview(encoded(chunk, base, size=4)), "here").transform != blob.FULL


def test_a_chunk_is_sparse_if_few_elements_changed_and_it_is_smaller(monkeypatch):
    for share, most, expected in ((0, 1, True), (0.01, 1, True), (0.4, 2**14, True), (0.9, 1, False)):
        base, chunk = pair(2, planes.ROTATED, 100_000, share, 1, most)
        data = encoded(chunk, base)
        assert is_sparse(data) == expected, (share, most)
        np.testing.assert_array_equal(rebuilt([data], chunk, base), chunk)
        assert not is_sparse(encoded(chunk))
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, 200_000, np.uint8)
    half_changed = base ^ (rng.random(base.size) < 0.48)
    chosen = encoded(half_changed, base, 1, 0)
    base_16, chunk = pair(2, planes.ROTATED, 100_000, 0.01, 1)
    header = blob.parse(memoryview(encoded(chunk, base_16, delta_limit=100)), "here")
    assert header.transform == blob.FULL, "the delta is above its limit"
    monkeypatch.setattr(sparse, "worth_trying", lambda changed, elements: False)
    assert len(chosen) <= 1.01 * len(encoded(half_changed, base, 1, 0)), (
        "if half of the elements change, by 1 or -1, both forms have about the same size"
    )


def test_a_blob_grows_by_at_most_a_fifth_beyond_the_entropy():
    """A sparse delta takes at most 1.2 times the entropy of the changes, given the exponents of the base.

    The elements are fp32 weights that change by 1e-6, stored as bf16.
    """
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 400_000).astype(np.float32)
    later = weights + rng.normal(0, 1e-6, weights.size).astype(np.float32)
    base, chunk = (torch.from_numpy(w).bfloat16().view(torch.uint8).numpy() for w in (weights, later))
    keys, moved = (base.view(np.uint16) >> 7).astype(np.uint8), base.view(np.uint16) ^ chunk.view(np.uint16)
    entropy = 0.0
    for key in np.unique(keys):
        counts = np.unique(moved[keys == key], return_counts=True)[1]
        entropy += (counts * np.log2(counts.sum() / counts)).sum() / 8
    data = encoded(chunk, base)
    assert is_sparse(data)
    assert entropy * 0.9 < len(data) < 1.2 * entropy


def test_chains_of_planes_and_sparse_deltas():
    """A chain of a full blob and four deltas decodes in every order of plane deltas and sparse ones.

    Each delta also decodes alone, and `prove_chain` proves each blob.
    """
    for order in range(16):
        version, _ = pair(4, planes.ROTATED, 5000, 0, order)
        chain, kinds = [encoded(version, size=4)], []
        for i in range(4):
            few = bool(order >> i & 1)
            base, elements = version, version.copy().view(np.uint32)
            elements[:: 100 if few else 1] ^= 1 + i
            version = elements.view(np.uint8)
            chain.insert(0, encoded(version, base, 4))
            kinds.append(is_sparse(chain[0]))
            assert kinds[-1] == few
            np.testing.assert_array_equal(rebuilt(chain[:1], version, base), version)
        np.testing.assert_array_equal(rebuilt(chain, version), version)
        out = np.empty_like(version)
        wheres = [str(i) for i in range(5)]
        digests = [bytes(b[48:64]) for b in chain]
        assert digests[0] == digest(version)
        assert chain_decode.prove_chain([memoryview(b) for b in chain], wheres, digests, out, seed=SEED) == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_through_a_repository(dtype):
    torch_dtype = getattr(torch, dtype)
    itemsize = TORCH_DTYPES[dtype][0]
    states = []
    rng = np.random.default_rng(0)
    first = rng.integers(0, 2 if dtype == "bool" else 256, 8192 * itemsize, np.uint8)
    for step in range(3):
        after = first if not step else states[-1].copy()
        after[step * itemsize :: 200 * itemsize] ^= 1
        states.append(after)
    with Repository.create(MemoryStore()) as repository:
        for step, state in enumerate(states):
            repository.save({"w": torch.from_numpy(state.copy()).view(torch_dtype)}, run="r", step=step)
        for step, state in enumerate(states):
            found = repository.restore(f"r@{step}")["w"]
            assert found.dtype == torch_dtype
            np.testing.assert_array_equal(found.view(torch.uint8).numpy(), state)
        assert "sparse" in repository.stats().codecs
        assert repository.check("restore").ok


# --- hostile payloads


@pytest.mark.parametrize("what", HOSTILE)
def test_contradictions_are_refused(what):
    payload, lengths = HOSTILE[what]()
    with pytest.raises(IntegrityError):
        applied(payload, lengths, np.zeros(100, np.uint8), 1, planes.BYTES)


def test_the_contradicted_payload_is_a_good_one():
    """The payload that the hostile payloads are made from is valid, and changes two elements."""
    out = applied(*forged(*GOOD), np.zeros(100, np.uint8), 1, planes.BYTES)
    assert np.flatnonzero(out).tolist() == [10, 16]
    assert out[[10, 16]].tolist() == [255, 252]  # z = 1 and 7: -1 and -4


def relabelled(data, **fields):
    """Return a blob with other header fields and a correct checksum."""
    bad = bytearray(data)
    header = np.frombuffer(bad, blob.HEADER_COLUMNS, 1)
    for name, value in fields.items():
        header[name] = value
    struct.pack_into("<Q", bad, 8, hashing.checksum(memoryview(bad)[16:]))
    return bytes(bad)


def test_chunks_of_many_elements_have_no_sparse_deltas(monkeypatch):
    """A chunk of more than MAX_ELEMENTS elements has no sparse delta.

    A few bytes can name 64 Mi elements, and applying a delta takes memory for each of them.
    """
    base = np.zeros(sparse.MAX_ELEMENTS + 1, np.uint8)
    payload, lengths = forged([(255, 0, 0, 1, 0, 0)])
    link = sparse_decode.StoredDelta(memoryview(payload), lengths, BLOCK)
    with little_memory(), pytest.raises(IntegrityError, match="16777217 elements, expected at most 16777216"):
        next(sparse_decode.apply_all([link], base, planes.BYTES))
    base, chunk = pair(2, planes.ROTATED, 10_000, 0.01, 1)
    for most, expected in ((10_000, True), (9_999, False)):
        monkeypatch.setattr(sparse, "MAX_ELEMENTS", most)
        assert is_sparse(encoded(chunk, base)) == expected


def test_frames_that_no_group_needs_cost_no_time():
    """Frames that no group needs are refused fast. Once, each of 256 groups copied all four million lengths."""
    payload, _ = forged([(key, 0, 0, 1, 0, 0) for key in range(256)])
    with little_time(0.5), pytest.raises(IntegrityError, match="4000000 frames more"):
        applied(payload, [0] * 4_000_000, np.zeros(100, np.uint8), 1, planes.BYTES)


def test_sparse_blobs_where_none_may_be():
    """A sparse blob is refused where the format allows none, and on a wrong layout or base."""
    base, chunk = pair(2, planes.ROTATED, 100_000, 0.01, 1, 1)
    data = encoded(chunk, base)
    assert is_sparse(data)
    np.testing.assert_array_equal(rebuilt([data], chunk, base), chunk)
    cases = {
        "transform 0": relabelled(data, transform=0),
        "codecs 0303": relabelled(data, codecs=np.array([3, 3, 0, 0, 0, 0, 0, 0], np.uint8)),
        "names no base": relabelled(data, base=np.zeros(16, np.uint8)),
    }
    for message, bad in cases.items():
        with pytest.raises(IntegrityError, match=message):
            rebuilt([bad], chunk, None if "base" in message else base)
    with pytest.raises(FormatError, match="sparse, which codes all planes"):
        rebuilt([relabelled(encoded(chunk), codecs=np.array([0, 3, 0, 0, 0, 0, 0, 0], np.uint8))], chunk)
    with pytest.raises(IntegrityError, match=r"digest mismatch|sparse"):
        rebuilt([relabelled(data, layout=0)], chunk, base)
    with pytest.raises(IntegrityError, match=r"digest mismatch|sparse"):
        rebuilt([data], chunk, base ^ np.uint8(1))
