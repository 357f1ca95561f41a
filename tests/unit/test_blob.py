"""Blobs: chains of every shape round-trip, nothing grows, and no flipped byte passes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstore import blob, codecs, planes
from snapstore.digest import digest
from snapstore.errors import FormatError, IntegrityError

LAYOUTS = st.sampled_from([planes.BYTES, planes.ROTATED])
KINDS = ("noise", "skewed", "sparse", "constant", "zero", "floats")


def content(kind, size, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "noise":
        return rng.integers(0, 256, size, np.uint8)
    if kind == "skewed":
        return np.minimum(rng.geometric(0.3, size), 255).astype(np.uint8)
    if kind == "floats":
        return np.resize(rng.normal(0, 0.02, size // 4 + 1).astype(np.float32).view(np.uint8), size)
    out = np.full(size, 9 if kind == "constant" else 0, np.uint8)
    if kind == "sparse":
        out[:: max(1, size // 20)] = rng.integers(0, 256, out[:: max(1, size // 20)].size)
    return out


def encode(source, element_size, chunk_digest, base, layout=planes.ROTATED):
    statistics = planes.statistics(planes.histograms(planes.sample(source, element_size, layout)))
    out = np.empty(blob.bound(source.size, element_size), np.uint8)
    return bytearray(blob.encode(source, element_size, layout, statistics, chunk_digest, base, out))


def full(chunk, element_size=4, layout=planes.ROTATED):
    return encode(chunk, element_size, digest(chunk), None, layout)


def xor(chunk, base, element_size=4, layout=planes.ROTATED):
    return encode(np.bitwise_xor(chunk, base), element_size, digest(chunk), digest(base), layout)


def decode(blobs, chunk_digest, size):
    out = np.full(size, 0xAA, np.uint8)
    blob.decode_chain([memoryview(b) for b in blobs], [f"blob {i}" for i in range(len(blobs))], chunk_digest, out)
    return out


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([1, 2, 4, 8]), LAYOUTS), min_size=1, max_size=9),
    st.integers(1, 400),
    st.integers(0, 1000),
)
def test_chains_round_trip(versions, elements, seed):
    """Up to eight deltas over one full blob, each with an element size and a layout of its own."""
    size = 8 * elements
    chunk = content(versions[0][0], size, seed)
    blobs = [full(chunk, *versions[0][1:])]
    for i, (kind, element_size, layout) in enumerate(versions[1:], 1):
        changed = np.bitwise_xor(chunk, content(kind, size, seed + i))
        blobs.insert(0, xor(changed, chunk, element_size, layout))
        chunk = changed
    np.testing.assert_array_equal(decode(blobs, digest(chunk), size), chunk)


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from([1, 2, 4, 8]), LAYOUTS, st.integers(0, 40_000), st.booleans())
def test_parse_gives_what_encode_was_told_and_nothing_grows(kind, element_size, layout, elements, is_delta):
    source = content(kind, elements * element_size)
    base = bytes(range(16)) if is_delta else None
    data = encode(source, element_size, b"d" * 16, base, layout)
    header = blob.parse(memoryview(data), "here")
    assert header.layout == layout
    assert (header.transform, header.element_size, header.raw_bytes) == (int(is_delta), element_size, source.size)
    assert (header.digest, header.base) == (b"d" * 16, base or blob.NO_BASE)
    assert blob.length_of(header) == len(data)
    assert len(data) <= blob.HEADER.size + 4 * len(header.block_lengths) + source.size
    stored = blob.stored_plane_bytes(data)
    assert sum(stored) == header.payload_bytes
    assert stored[element_size:] == [0] * (8 - element_size)
    views = list(blob.stored_planes(memoryview(data), header, "here"))
    assert [sum(map(len, blocks)) for _, blocks in views] == stored[:element_size]
    for k, (codec, blocks) in enumerate(views):
        coded = sum(map(len, blocks)) + (4 * len(blocks) if codec else 0)
        assert coded == elements if codec == codecs.RAW else coded < elements, f"plane {k} in codec {codec}"


def test_each_kind_of_plane_gets_its_codec():
    """Of floats by their skew, of anything else by its repeats; noise stays raw."""
    split = np.stack([content(kind, 65536) for kind in ("noise", "skewed", "sparse", "zero")])
    chunk = np.empty(4 * 65536, np.uint8)
    raw, zstd, deflate = codecs.RAW, codecs.ZSTD, codecs.DEFLATE
    for layout, expected in ((planes.ROTATED, [raw, zstd, deflate, deflate]), (planes.BYTES, [raw, zstd, zstd, zstd])):
        planes.merge(split, chunk, layout)
        header = blob.parse(memoryview(full(chunk, 4, layout)), "here")
        assert list(header.codecs[:4]) == expected
        assert len(header.block_lengths) == 3


def test_the_estimate_is_near_what_is_stored():
    chunk = content("floats", 1024 * 1024)
    statistics = planes.statistics(planes.histograms(planes.sample(chunk, 4, planes.ROTATED)))
    estimate = blob.estimate_bytes(statistics.bits.tolist(), chunk.size // 4)
    assert len(full(chunk)) == pytest.approx(estimate, rel=0.01)


@pytest.mark.parametrize("kind", ["noise", "skewed", "sparse"])
@pytest.mark.parametrize("is_delta", [False, True])
def test_every_flipped_byte_is_found(kind, is_delta):
    base = content("noise", 512, 1)
    chunk = content(kind, 512)
    blobs = [xor(chunk, base), full(base)] if is_delta else [full(chunk)]
    for at in range(len(blobs[0])):
        for bit in (0x01, 0x80, 0xFF):
            bad = bytearray(blobs[0])
            bad[at] ^= bit
            with pytest.raises((FormatError, IntegrityError)):
                decode([bad, *blobs[1:]], digest(chunk), 512)


def test_every_truncation_is_found():
    data = full(content("skewed", 2000))
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            blob.parse(memoryview(data)[:length], "here")


def test_padding_behind_a_blob_is_no_part_of_it():
    chunk = content("skewed", 2000)
    data = full(chunk)
    assert blob.length_of(blob.parse(memoryview(data + b"\xff" * 7), "here")) == len(data)
    np.testing.assert_array_equal(decode([data + b"\xff" * 7], digest(chunk), 2000), chunk)


def test_chains_that_do_not_fit_are_refused():
    a, b, c = (content("noise", 256, seed) for seed in range(3))
    other = content("noise", 128)
    cases = {
        "expected": ([full(a)], b),
        "ends in a delta": ([xor(b, a)], b),
        r"blob 1: blob of chunk": ([xor(b, a), full(c)], b),
        r"128 bytes\), expected": ([full(other)], a),
    }
    for message, (blobs, wanted) in cases.items():
        with pytest.raises(IntegrityError, match=message):
            decode(blobs, digest(wanted), 256)


def test_wrong_bytes_under_a_right_checksum_are_found_by_the_digest():
    a, b = content("noise", 256, 0), content("noise", 256, 1)
    forged = encode(b, 4, digest(a), None)
    with pytest.raises(IntegrityError, match=r"blob 0: digest mismatch, expected .* got "):
        decode([forged], digest(a), 256)


def test_an_empty_chunk():
    empty = np.empty(0, np.uint8)
    assert decode([full(empty)], digest(empty), 0).size == 0
