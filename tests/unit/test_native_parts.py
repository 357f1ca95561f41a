"""The parts of the extension in C equal their references: hashes, planes, and blocks of both codecs, both ways."""

import zlib

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from snapstore.engine import spans
from snapstore.errors import IntegrityError
from snapstore.format.blobs import codecs, planes
from snapstore.format.blobs.codecs import deflate, zstd
from snapstore.format.blobs.plane_kinds import RUNS_ABOVE_SHARE

native = spans.extension()
pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")

NONE, DIFFERENCE, XOR = range(3)
SIZES = st.sampled_from((1, 2, 4, 8))
BLOCK = codecs.BLOCK_BYTES
#: Lengths around each form of a frame, and around the steps of the loops.
LENGTHS = st.integers(1, 300) | st.sampled_from([1000, 4096, 65_535, BLOCK]) | st.integers(1, BLOCK)


@pytest.fixture(autouse=True, params=[True, False], ids=["avx2", "plain"])
def avx2(request):
    """Run each test with the code for AVX2, and with the plain code."""
    if native.use_avx2(request.param) is not request.param:
        pytest.skip("no AVX2 here")
    yield
    native.use_avx2(True)


def noise(count, seed):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def symbols(count, values, skew, seed):
    """Return bytes of so many values, the more skewed the smaller `skew` is."""
    rng = np.random.default_rng(seed)
    kinds = rng.permutation(256)[:values]
    return kinds[rng.choice(values, count, p=rng.dirichlet(np.full(values, skew)))].astype(np.uint8)


def digest_of(data, seed):
    out = np.empty((1, 16), np.uint8)
    place = [data], np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([data.size])
    job, scratch_bytes, _ = native.copy_job(place, None, seed, out, np.array([0, 1]), None)
    assert native.run(job, np.empty(scratch_bytes, np.uint8), print)
    return out.tobytes()


@pytest.mark.no_cover
def test_copies_of_every_length_and_place():
    """Long copies go past the cache, in whole vectors; nothing beside them is written."""
    source = noise(300_000, 1)
    for length in [*range(0, 200), *range(65_530, 65_700), 131_072, 199_999]:
        for start in (0, 1, 31, 32, 63):
            out, digests = np.full(length + 128, 0xEE, np.uint8), np.zeros(16, np.uint8)
            chunk = [source], np.zeros(1, np.int64), np.array([length % 7]), np.array([length])
            copy = [out], np.zeros(1, np.int64), np.array([start]), np.array([length])
            job, scratch_bytes, _ = native.copy_job(chunk, copy, 0, digests, np.array([0, 1]), None)
            assert native.run(job, np.empty(scratch_bytes, np.uint8), print)
            assert (out[start : start + length] == source[length % 7 :][:length]).all()
            assert (out[:start] == 0xEE).all()
            assert (out[start + length :] == 0xEE).all()


@pytest.mark.no_cover
def test_hashes_of_every_length_equal_xxhash():
    whole = noise(70_000, 0)
    for length in [*range(1100), 2047, 2048, 2049, 65_536, 69_990]:
        data, seed = whole[length % 8 :][:length], (length * 0x9E3779B97F4A7C15) % 2**64
        assert digest_of(data, seed) == xxhash.xxh3_128_digest(data.data, seed), length
        assert native.checksum(data) == xxhash.xxh3_64_intdigest(data.data), length


@given(
    SIZES, st.sampled_from([NONE, DIFFERENCE, XOR]), st.sampled_from([0, 1]), st.integers(0, 3000), st.integers(0, 9),
    st.integers(0, 2**31), st.booleans(),
)  # fmt: skip
def test_planes_equal_the_reference(size, mode, layout, elements, shift, seed, in_place):
    room = noise(elements * size + shift, seed)
    chunk = room[shift:]  # at any address
    base = None if mode == NONE else noise(chunk.size, seed + 1)
    expected = chunk
    if mode == DIFFERENCE:
        planes.difference(chunk, base, size, expected := np.empty_like(chunk))
    elif mode == XOR:
        expected = chunk ^ base
    split = planes.split(expected, size, planes.BYTES if mode == DIFFERENCE else layout)
    found = np.empty(chunk.size, np.uint8)
    native.split(chunk, base, size, layout, mode, found)
    assert found.tobytes() == split.tobytes()
    out = base if in_place and base is not None else np.empty(chunk.size, np.uint8)
    native.merge(found, base, size, layout, mode, out)
    assert out.tobytes() == chunk.tobytes()


def encoded(block):
    out = np.full(block.size + native.FRAME_SLACK, 0xEE, np.uint8)
    return out[: native.encode_frame(block, out)]


def decoded(stored, length, decode="decode_frame"):
    """Return the bytes of a block; None if the extension declines it. It writes nothing beyond them."""
    out = np.full(length + 64, 0xEE, np.uint8)
    done = getattr(native, decode)(stored, out[:length])
    assert (out[length:] == 0xEE).all()
    return out[:length].tobytes() if done else None


blocks = st.builds(
    symbols, LENGTHS, st.integers(1, 256), st.sampled_from([0.02, 0.1, 0.5, 2, 50]), st.integers(0, 2**31)
)


@given(blocks)
def test_frames_are_read_by_zstd_and_back(block):
    frame = encoded(block)
    assert zstandard.frame_content_size(frame.data) == block.size
    out = np.empty(block.size, np.uint8)
    zstd.decode([frame.data], out, BLOCK)
    assert out.tobytes() == block.tobytes()
    assert decoded(frame, block.size) == block.tobytes()
    offsets, sizes = np.zeros(1, np.int64), np.array([frame.size])
    assert zstd.is_literals(frame, offsets, sizes, np.array([block.size])).all(), "the GPU reads it too"
    assert frame.size <= block.size + 10
    if np.bincount(block).max() < RUNS_ABOVE_SHARE * block.size:
        (theirs,) = zstd.encode_entropy(block, BLOCK)
        assert frame.size <= 1.01 * len(theirs) + 24


@given(blocks)
def test_frames_of_zstd_are_read_or_declined(block):
    (frame,) = zstd.encode_entropy(block, BLOCK)
    found = decoded(np.frombuffer(frame, np.uint8), block.size)
    assert found in (None, block.tobytes())


@pytest.mark.parametrize("values", [4, 30, 60, 130, 256])
@pytest.mark.parametrize("length", [100, 255, 256, 5000, BLOCK])
def test_frames_of_zstd_without_matches_are_read(values, length):
    block = symbols(length, values, 3, length)
    (frame,) = zstd.encode_entropy(block, BLOCK)
    data, one = np.frombuffer(frame, np.uint8), np.zeros(1, np.int64)
    if zstd.is_literals(data, one, one + data.size, one + length)[0]:
        assert decoded(data, length) == block.tobytes()


@pytest.mark.parametrize("frame", [b"", b"(", encoded(noise(9, 0)).tobytes()[:-1] if native else b""])
def test_short_frames_are_declined(frame):
    assert decoded(np.frombuffer(frame, np.uint8), 9) is None


def by_reference(codec, stored, length):
    """Return the bytes of a stored block as zstandard or zlib decode it; None if they refuse it."""
    out = np.empty(length, np.uint8)
    try:
        codec.decode([memoryview(stored)], out, BLOCK)
    except IntegrityError:
        return None
    return out.tobytes()


def damaged(frame, rng):
    """Return a frame with a few flipped bits, a changed byte, another length, or other bytes at its end."""
    frame = bytearray(frame)
    kind = rng.integers(0, 4)
    head = min(len(frame), 80)  # where headers and trees lie
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, head if rng.integers(0, 3) else len(frame)))
        if kind == 0:
            frame[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            frame[at] = int(rng.integers(0, 256))
    if kind == 2:
        del frame[int(rng.integers(0, len(frame))) :]
    elif kind == 3:
        frame += rng.integers(0, 256, rng.integers(1, 9), np.uint8).tobytes()
    return bytes(frame)


def test_shares_of_weights_that_no_code_has():
    """zstd refuses them, though no symbol has such a weight: the fuzzer found this frame."""
    tree, streams = "0771733fc0498b04", "070007000700ffff3ffffef67ffc7ffe7fffff3fff7dfffffffd3fffffffffffff0700"
    frame = bytes.fromhex("28b52ffd20c88501008e0c800a00" + tree + streams)
    assert by_reference(zstd, frame, 200) is None
    assert decoded(np.frombuffer(frame, np.uint8), 200) is None


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_frame_is_declined_unless_zstd_reads_the_same(seed):
    """Else the CPU engine would accept frames that other readers refuse."""
    rng = np.random.default_rng(seed)
    accepted = 0
    for number in range(250):
        length = int(rng.choice([70, 200, 300, 1000, 5000]))
        block = symbols(length, int(rng.choice([2, 5, 40, 140, 250])), float(rng.choice([0.1, 1, 9])), number)
        frames = [encoded(block).tobytes(), *zstd.encode_entropy(block, BLOCK)]
        for frame in frames:
            for _ in range(3):
                bad = damaged(frame, rng)
                found = decoded(np.frombuffer(bad, np.uint8), length)
                if found is not None:
                    accepted += 1
                    assert found == by_reference(zstd, bad, length), bad.hex()
    assert accepted > 10, "damage in literals alone changes bytes, but is no error of a frame"


def mostly_zero(count, share, longest, seed):
    """Return bytes of which about this share is zero, in runs of up to `longest`."""
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(count) < share, 0, np.minimum(rng.geometric(0.4, count), 255))
    return np.repeat(values, rng.integers(1, longest + 1, count))[:count].astype(np.uint8)


def runs_encoded(block):
    out = np.full(block.size + native.FRAME_SLACK, 0xEE, np.uint8)
    return out[: native.encode_runs(block, out)]


run_blocks = st.builds(
    mostly_zero, LENGTHS, st.sampled_from([0, 0.5, 0.8, 0.95, 1]), st.sampled_from([1, 4, 300, 2000]),
    st.integers(0, 2**31),
)  # fmt: skip


@given(run_blocks | blocks)
def test_streams_of_runs_are_read_by_zlib_and_back(block):
    stream = runs_encoded(block)
    (theirs,) = deflate.encode_runs(block, BLOCK)
    if not stream.size:
        assert len(theirs) > block.size - 100, "only short blocks and noise are declined"
        return
    assert by_reference(deflate, stream, block.size) == block.tobytes()
    assert decoded(stream, block.size, "decode_runs") == block.tobytes()
    assert stream.size < block.size
    if np.bincount(block).max() >= RUNS_ABOVE_SHARE * block.size:
        assert stream.size <= 1.02 * len(theirs) + 64


@given(run_blocks | blocks)
def test_streams_of_zlib_are_read(block):
    (stream,) = deflate.encode_runs(block, BLOCK)
    assert decoded(np.frombuffer(stream, np.uint8), block.size, "decode_runs") == block.tobytes()


@pytest.mark.parametrize("level", [0, 1, 6, 9])
@pytest.mark.parametrize("strategy", ["Z_DEFAULT_STRATEGY", "Z_FILTERED", "Z_HUFFMAN_ONLY", "Z_RLE", "Z_FIXED"])
def test_other_streams_are_read_or_declined(level, strategy):
    for seed, length in enumerate([1, 9, 300, 5000, BLOCK]):
        block = mostly_zero(length, 0.8, 9, seed)
        stream = zlib.compressobj(level, zlib.DEFLATED, -15, 9, getattr(zlib, strategy))
        data = np.frombuffer(stream.compress(block.data) + stream.flush(), np.uint8)
        found = decoded(data, length, "decode_runs")
        assert found in (None, block.tobytes())
        assert found or strategy not in ("Z_HUFFMAN_ONLY", "Z_RLE")


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_stream_is_declined_unless_zlib_reads_the_same(seed):
    rng = np.random.default_rng(seed)
    accepted = 0
    for number in range(250):
        length = int(rng.choice([70, 200, 1000, 5000]))
        block = mostly_zero(length, float(rng.choice([0.5, 0.8, 0.95])), int(rng.choice([1, 5, 300])), number)
        streams = [runs_encoded(block).tobytes(), *deflate.encode_runs(block, BLOCK)]
        for stream in filter(None, streams):
            for _ in range(3):
                bad = damaged(stream, rng)
                found = decoded(np.frombuffer(bad, np.uint8), length, "decode_runs")
                if found is not None:
                    accepted += 1
                    assert found == by_reference(deflate, bad, length), bad.hex()
    assert accepted > 10


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(2))
def test_random_bytes_are_declined_unless_the_reference_reads_the_same(seed):
    rng = np.random.default_rng(seed)
    for _ in range(3000):
        stream = rng.integers(0, 256, rng.integers(0, 40), np.uint8)
        length = int(rng.integers(1, 300))
        found = decoded(stream, length, "decode_runs")
        assert found is None or found == by_reference(deflate, stream, length), stream.tobytes().hex()
        head = bytes.fromhex("28b52ffd20") + bytes([length % 256]) + rng.integers(0, 256, 3, np.uint8).tobytes()
        frame = np.frombuffer(head + stream.tobytes(), np.uint8)
        found = decoded(frame, length, "decode_frame")
        assert found is None or found == by_reference(zstd, frame, length), frame.tobytes().hex()
