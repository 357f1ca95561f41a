"""Codecs round-trip exactly, write standard streams, and their decoders reject invalid input."""

import zlib

import numpy as np
import pytest
import zstandard

from snapstore.errors import FormatError, IntegrityError
from snapstore.format.blobs import codecs
from snapstore.format.blobs.codecs import deflate, zstd

BLOCK = codecs.BLOCK_BYTES
ENCODERS = {
    "entropy": (zstd.encode_entropy, codecs.ZSTD),
    "matches": (zstd.encode_matches, codecs.ZSTD),
    "runs": (deflate.encode_runs, codecs.DEFLATE),
}
SIZES = (1, 2, 3, 7, 8, 255, 256, 257, 4095, 65535, 65536, 65537, 2 * 65536, 3 * 65536 + 11)


def planes_of(size):
    rng = np.random.default_rng(size)
    sparse = np.zeros(size, np.uint8)
    sparse[rng.integers(0, max(size, 1), size // 50)] = rng.integers(0, 256, size // 50)
    return {
        "noise": rng.integers(0, 256, size, np.uint8),
        "skewed": np.minimum(rng.geometric(0.2, size), 255).astype(np.uint8),
        "sparse": sparse,
        "constant": np.full(size, 7, np.uint8),
        "repeats": np.resize(rng.integers(0, 256, 300, np.uint8), size),
    }


def decode(codec, blocks, size, block_bytes=BLOCK):
    out = np.full(size, 0xAA, np.uint8)
    codecs.decoder(codec, "here")([memoryview(block) for block in blocks], out, block_bytes)
    return out


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("size", SIZES)
def test_round_trip(name, size):
    encode, codec = ENCODERS[name]
    for plane in planes_of(size).values():
        blocks = encode(plane, BLOCK)
        assert len(blocks) == -(-size // BLOCK)
        np.testing.assert_array_equal(decode(codec, blocks, size), plane)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("block_bytes", [1, 5, 64, 1000])
def test_any_block_size(name, block_bytes):
    encode, codec = ENCODERS[name]
    plane = planes_of(1003)["skewed"]
    blocks = encode(plane, block_bytes)
    assert len(blocks) == -(-1003 // block_bytes)
    np.testing.assert_array_equal(decode(codec, blocks, 1003, block_bytes), plane)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_empty_plane_has_no_blocks(name):
    encode, codec = ENCODERS[name]
    assert encode(np.empty(0, np.uint8), BLOCK) == []
    assert decode(codec, [], 0).size == 0


@pytest.mark.parametrize("name", ["entropy", "matches"])
@pytest.mark.parametrize("size", [1, 300, 65536, 65537])
def test_zstd_blocks_are_plain_frames(name, size):
    for plane in planes_of(size).values():
        for i, block in enumerate(ENCODERS[name][0](plane, BLOCK)):
            part = plane[i * BLOCK : (i + 1) * BLOCK].tobytes()
            assert zstandard.ZstdDecompressor().decompress(block) == part
            parameters = zstandard.get_frame_parameters(block)
            assert (parameters.content_size, parameters.dict_id, parameters.has_checksum) == (len(part), 0, False)
            assert block[4] & 0b0010_0000, "Single_Segment_flag (RFC 8878, 3.1.1.1.1)"
            assert parameters.window_size == len(part)


@pytest.mark.parametrize("size", [1, 300, 65536, 65537])
def test_deflate_blocks_are_raw_streams(size):
    for plane in planes_of(size).values():
        for i, block in enumerate(deflate.encode_runs(plane, BLOCK)):
            stream = zlib.decompressobj(-15)
            assert stream.decompress(block) == plane[i * BLOCK : (i + 1) * BLOCK].tobytes()
            assert stream.eof
            assert stream.unused_data == b""


def test_foreign_encoders_are_read():
    """Blocks of other encoders decode: any RFC 8878 frame with a content size, and any RFC 1951 stream."""
    data = b"the quick brown fox " * 100
    plain = np.frombuffer(data, np.uint8)
    for level in (1, 19):
        frame = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)
        np.testing.assert_array_equal(decode(codecs.ZSTD, [frame], len(data)), plain)
    for level in (0, 1, 9):
        stream = zlib.compressobj(level, zlib.DEFLATED, -9)
        block = stream.compress(data) + stream.flush()
        np.testing.assert_array_equal(decode(codecs.DEFLATE, [block], len(data)), plain)


@pytest.mark.parametrize("name", ENCODERS)
def test_wrong_lengths_are_refused(name):
    encode, codec = ENCODERS[name]
    for plane in planes_of(1000).values():
        (block,) = encode(plane, BLOCK)
        for size in (999, 1001, 1, 65536):
            with pytest.raises(IntegrityError):
                decode(codec, [block], size)
        for bad in (block[:-1], block + b"\0", block + block, b""):
            with pytest.raises(IntegrityError):
                decode(codec, [bad], 1000)


@pytest.mark.parametrize("codec", [codecs.ZSTD, codecs.DEFLATE])
@pytest.mark.parametrize("size", [1, 2, 5, 100, 5000])
def test_garbage_is_refused(codec, size):
    rng = np.random.default_rng(size)
    for _ in range(50):
        with pytest.raises(IntegrityError):
            decode(codec, [rng.bytes(size)], 65536)


def test_a_frame_without_its_content_size_is_refused():
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    frame = stream.compress(b"x" * 1000) + stream.flush()
    with pytest.raises(IntegrityError, match="expected 1000"):
        decode(codecs.ZSTD, [frame], 1000)


def test_flipped_bytes_decode_to_the_length_or_not_at_all():
    plane = planes_of(3000)["skewed"]
    for encode, codec in ENCODERS.values():
        (block,) = encode(plane, BLOCK)
        for at in range(0, len(block), 7):
            bad = bytearray(block)
            bad[at] ^= 0x55
            try:
                assert decode(codec, [bad], 3000).size == 3000  # the digest finds wrong bytes
            except IntegrityError:
                continue


@pytest.mark.parametrize(
    ("codec", "name"),
    [(3, "sparse, which codes all planes"), (4, "unknown"), (63, "unknown"), (69, "nvCOMP 5"), (255, "unknown")],
)
def test_unknown_codecs_are_refused_by_name(codec, name):
    with pytest.raises(FormatError, match=rf"^somewhere: .* does not read codec {codec} \({name}"):
        codecs.decoder(codec, "somewhere")


def test_names():
    assert codecs.NAMES == {0: "raw", 1: "zstd", 2: "deflate", 3: "sparse", 70: "nvCOMP 6 ANS"}
    assert (codecs.RAW, codecs.ZSTD, codecs.DEFLATE) == (0, 1, 2)


def test_frames_at_the_end_of_a_buffer_are_known_as_in_its_middle():
    """`is_literals` gives one answer for a frame, however many bytes follow it.

    It reads the same number of bytes of each frame, and they can go beyond the end of the buffer.
    """
    rng = np.random.default_rng(3)
    blocks = [(rng.standard_normal(n) * 8).astype(np.int8).view(np.uint8) for n in (40, 100, 255, 256, 300, 5000)]
    blocks += [np.zeros(n, np.uint8) for n in (1, 9, 300)] + [rng.integers(0, 256, 60).astype(np.uint8)]
    frames = [zstd.encode_entropy(block, codecs.BLOCK_BYTES)[0] for block in blocks]
    found = []
    for frame, block in zip(frames, blocks, strict=True):
        answers = set()
        for before, after in ((0, 0), (0, 3), (5, 0), (40, 1), (40, 15), (40, 16), (40, 60)):
            stored = np.frombuffer(bytes(before) + frame + b"\xff" * after, np.uint8)
            columns = (np.array([number]) for number in (before, len(frame), block.size))
            answers.add(bool(zstd.is_literals(stored, *columns)[0]))
        assert len(answers) == 1
        found.append(answers.pop())
    assert True in found
    assert False in found
