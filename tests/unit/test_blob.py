"""Blobs round-trip in chains of every shape, no payload exceeds its chunk, and every flipped byte is found."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.samples import examples
from snapstore.errors import FormatError, IntegrityError
from snapstore.format import hashing
from snapstore.format.blobs import blob, chain_decode, codecs, planes
from snapstore.format.blobs.plane_kinds import NOISE, REPEATS, RUNS, SKEWED, estimate_bytes, estimates, plane_kinds
from snapstore.format.hashing import checksum

SEED = 0xD1A5ED5EED
digest = partial(hashing.digest, seed=SEED)

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
    of_planes = layout if base is None else planes.BYTES
    statistics = planes.statistics(planes.histograms(planes.sample(source, element_size, of_planes)))
    out = np.empty(blob.bound(source.size, element_size), np.uint8)
    return bytearray(blob.encode(source, element_size, layout, statistics, (chunk_digest, base), out))


def full(chunk, element_size=4, layout=planes.ROTATED):
    return encode(chunk, element_size, digest(chunk), None, layout)


def delta(chunk, base, element_size=4, layout=planes.ROTATED):
    difference = np.empty_like(chunk)
    planes.difference(chunk, base, element_size, difference)
    return encode(difference, element_size, digest(chunk), digest(base), layout)


def decode(blobs, chunk_digest, size):
    out = np.full(size, 0xAA, np.uint8)
    chain_decode.decode_chain(
        [memoryview(b) for b in blobs], [f"blob {i}" for i in range(len(blobs))], chunk_digest, out, seed=SEED
    )
    return out


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([1, 2, 4, 8]), LAYOUTS), min_size=1, max_size=9),
    st.integers(1, 400),
    st.integers(0, 1000),
)
def test_chains_round_trip(versions, elements, seed):
    """One full blob and up to eight deltas decode to the chunk; each has its own element size and layout."""
    size = 8 * elements
    chunk = content(versions[0][0], size, seed)
    blobs = [full(chunk, *versions[0][1:])]
    for i, (kind, element_size, layout) in enumerate(versions[1:], 1):
        changed = np.bitwise_xor(chunk, content(kind, size, seed + i))
        blobs.insert(0, delta(changed, chunk, element_size, layout))
        chunk = changed
    np.testing.assert_array_equal(decode(blobs, digest(chunk), size), chunk)


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from([1, 2, 4, 8]), LAYOUTS, st.integers(0, 40_000), st.booleans())
def test_parse_gives_what_encode_was_told_and_nothing_grows(kind, element_size, layout, elements, is_delta):
    source = content(kind, elements * element_size)
    base = bytes(range(16)) if is_delta else None
    data = encode(source, element_size, b"d" * 16, base, layout)
    header = blob.parse(memoryview(data), "here")
    assert header.layout == (planes.BYTES if is_delta else layout)
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
    """For planes of floats the skew decides the codec. Other planes are coded by their repeats. Noise stays raw."""
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
    estimate = estimate_bytes(statistics.bits.tolist(), chunk.size // 4)
    assert len(full(chunk)) == pytest.approx(estimate, rel=0.01)


@pytest.mark.parametrize("kind", ["noise", "skewed", "sparse"])
@pytest.mark.parametrize("is_delta", [False, True])
def test_every_flipped_byte_is_found(kind, is_delta):
    base = content("noise", 512, 1)
    chunk = content(kind, 512)
    blobs = [delta(chunk, base), full(base)] if is_delta else [full(chunk)]
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
    with pytest.raises(IntegrityError, match=f"blob of {len(data)} bytes, but the manifest says {len(data) + 7}"):
        decode([data + b"\xff" * 7], digest(chunk), 2000)


def test_chains_that_do_not_fit_are_refused():
    a, b, c = (content("noise", 256, seed) for seed in range(3))
    other = content("noise", 128)
    cases = {
        "expected": ([full(a)], b),
        "ends in a delta": ([delta(b, a)], b),
        r"blob 1: blob of chunk": ([delta(b, a), full(c)], b),
        r"128 bytes\), expected": ([full(other)], a),
    }
    for message, (blobs, wanted) in cases.items():
        with pytest.raises(IntegrityError, match=message):
            decode(blobs, digest(wanted), 256)


def test_headers_that_contradict_themselves_are_refused():
    a, b = content("noise", 256, 0), content("noise", 256, 1)
    cases = {
        "a difference in planes of layout 1": (delta(b, a), 18, b"\1"),
        "transform 0, but it names a base": (delta(b, a), 16, b"\0"),
        "transform 1, but it names no base": (full(b, layout=planes.BYTES), 16, b"\1"),
    }
    for message, (data, at, value) in cases.items():
        data[at : at + 1] = value
        data[8:16] = checksum(memoryview(data)[16:]).to_bytes(8, "little")
        with pytest.raises(IntegrityError, match=message):
            decode([data, full(a)], digest(b), 256)
    with pytest.raises(IntegrityError, match="a full blob, which has no base"):
        chain_decode.decode_chain([memoryview(full(b))], ["0"], digest(b), np.empty(256, np.uint8), a, seed=SEED)


def test_wrong_bytes_under_a_right_checksum_are_found_by_the_digest():
    a, b = content("noise", 256, 0), content("noise", 256, 1)
    forged = encode(b, 4, digest(a), None)
    with pytest.raises(IntegrityError, match=r"blob 0: digest mismatch, expected .* got "):
        decode([forged], digest(a), 256)


def test_an_empty_chunk():
    empty = np.empty(0, np.uint8)
    assert decode([full(empty)], digest(empty), 0).size == 0


# --- many blobs at once


shapes = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from([1, 2, 4, 8]), LAYOUTS, st.integers(0, 400), st.booleans()),
    max_size=12,
)


def encode_all(drawn, scale=1):
    """Return a blob for each (kind, element size, layout, elements, whether it is a delta)."""
    return [
        encode(content(kind, scale * n * e, i), e, bytes([i]) * 16, b"base" * 4 if delta else None, layout)
        for i, (kind, e, layout, n, delta) in enumerate(drawn)
    ]


def check_headers(blobs):
    """Check `headers` against the blobs that `encode` wrote, and `read_headers` against `parse`.

    `headers` writes no checksums, so they are added before the comparison.
    """
    entries = np.frombuffer(b"".join(blob.entry(memoryview(b), 8 * i) for i, b in enumerate(blobs)), blob.ENTRY)
    parsed = [blob.parse(memoryview(b), "here") for b in blobs]
    counts = np.array([len(h.block_lengths) for h in parsed], np.int64)
    lengths = np.array([n for h in parsed for n in h.block_lengths], np.int64)
    layouts = np.array([h.layout for h in parsed], np.uint8)
    found, starts = blob.headers(entries, layouts, np.full(len(entries), codecs.BLOCK_BYTES), counts, lengths)
    assert starts.tolist() == [0, *np.cumsum([h.payload_start for h in parsed]).tolist()]
    for i, (data, header) in enumerate(zip(blobs, parsed, strict=True)):
        made = bytearray(found[starts[i] : starts[i + 1]].tobytes() + data[header.payload_start :])
        made[8:16] = checksum(memoryview(made)[16:]).to_bytes(8, "little")
        assert made == data
    stored = np.frombuffer(b"".join(bytes(i % 3) + b for i, b in enumerate(blobs)), np.uint8)
    sizes = np.array(list(map(len, blobs)), np.int64)
    offsets = np.cumsum(sizes + np.arange(len(blobs)) % 3) - sizes
    columns, fine = blob.read_headers(stored, offsets, sizes)
    assert fine.shape == (len(blobs),)
    assert fine.all()
    for row, header in enumerate(parsed):
        for name in ("checksum", "transform", "element_size", "layout", "raw_bytes", "payload_bytes", "block_bytes"):
            assert getattr(columns, name)[row] == getattr(header, name)
        assert columns.count[row] == len(header.block_lengths)
        assert columns.payload_start[row] == header.payload_start
        assert columns.plane_codecs()[row].tobytes() == columns.codecs[row].tobytes() == header.codecs
        for name in ("digest", "base"):
            assert getattr(columns, name)[:, row].tobytes() == getattr(header, name)
    some = columns.take(np.arange(0, len(blobs), 2))
    for name in ("checksum", "raw_bytes", "codecs", "digest", "base"):
        assert (getattr(some, name) == getattr(columns, name)[..., ::2]).all()


@settings(deadline=None)
@given(shapes)
def test_headers_of_many_equal_the_single_ones(drawn):
    check_headers(encode_all(drawn))


def test_headers_with_many_block_lengths():
    drawn = [(k, e, layout, n, True) for k in KINDS for e in (1, 4) for layout in (0, 1) for n in (65_536, 150_001)]
    blobs = encode_all(drawn)
    assert max(len(blob.parse(memoryview(b), "x").block_lengths) for b in blobs) > 8
    check_headers(blobs)


#: The error of `parse` that `read_headers` cannot find: it looks only at 80 bytes and a length.
UNSEEN = "checksum mismatch"


def agree(data, length=None):
    """Correct the checksum of a blob; check that `read_headers` and `parse` agree; return whether it is valid."""
    stored = np.frombuffer(bytes(data), np.uint8)
    length = len(data) if length is None else length
    mended = bytearray(data)[:length]
    if len(mended) >= blob.HEADER.size:
        count, payload = (int.from_bytes(mended[at : at + 4], "little") for at in (40, 24))
        mended[8:16] = checksum(memoryview(mended)[16 : blob.HEADER.size + 4 * count + payload]).to_bytes(8, "little")
    _, (fine,) = blob.read_headers(stored, np.zeros(1, np.int64), np.array([length]))
    said = None
    try:
        blob.parse(memoryview(mended), "here")
    except (FormatError, IntegrityError) as error:
        said = str(error)
    assert UNSEEN not in (said or "")
    assert fine == (said is None), said
    return bool(fine)


@pytest.mark.parametrize("kind", ["noise", "skewed", "zero"])
def test_read_headers_and_parse_agree_on_every_flipped_bit(kind):
    data = full(content(kind, 512), 2)
    assert agree(data)
    said = set()
    for bit in range(8 * blob.HEADER.size):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        said.add(agree(bad))
    assert said == {True, False}


@settings(deadline=None, max_examples=examples(300))
@given(st.sampled_from(KINDS), st.lists(st.tuples(st.integers(0, 79), st.integers(0, 255)), max_size=4), st.data())
def test_read_headers_and_parse_agree_on_anything(kind, changes, data):
    bad = full(content(kind, 64), 4)
    for at, value in changes:
        bad[at] = value
    agree(bad)
    agree(bad, data.draw(st.integers(0, len(bad))))


def test_read_headers_of_what_is_too_short():
    data = np.frombuffer(bytes(full(content("noise", 64))), np.uint8)
    for stored in (data, data[:79], data[:0]):
        _, fine = blob.read_headers(stored, np.zeros(3, np.int64), np.array([0, 79, 1]))
        assert not fine.any()
    _, fine = blob.read_headers(data, np.empty(0, np.int64), np.empty(0, np.int64))
    assert fine.shape == (0,)
    # a short blob at the end: 80 bytes from its start would reach beyond the buffer
    _, fine = blob.read_headers(data, np.array([0, data.size - 10]), np.array([data.size, 10]))
    assert fine.tolist() == [True, False]


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 8) | st.sampled_from([7.9, 0.0, 8.0]), min_size=8, max_size=8),
            st.sampled_from([1, 2, 4, 8]),
            st.integers(0, 10**7),
        ),
        max_size=20,
    )
)
def test_estimates_of_many_equal_the_single_ones(drawn):
    bits = np.array([b for b, _, _ in drawn], np.float64).reshape(-1, 8)
    sizes, lengths = (np.array([d[i] for d in drawn], np.int64) for i in (1, 2))
    found = estimates(bits, sizes.astype(np.uint8), lengths)
    expected = [estimate_bytes(b[:e], n) for b, e, n in drawn]
    assert found.tolist() == expected


def test_kinds_of_planes():
    bits = np.array([7.95, 7.9, 3.0, 0.1, 0.1, 7.95])
    share = np.array([0.1, 0.1, 0.77, 0.78, 1.0, 0.9])
    floats = [NOISE, SKEWED, SKEWED, RUNS, RUNS, NOISE]
    others = [NOISE, *[REPEATS] * 4, NOISE]
    assert plane_kinds(bits, share, planes.ROTATED).tolist() == floats
    assert plane_kinds(bits, share, planes.BYTES).tolist() == others
    both = plane_kinds(np.stack([bits, bits]), np.stack([share, share]), np.array([[planes.ROTATED], [planes.BYTES]]))
    assert both.tolist() == [floats, others]


# --- a base whose plain bytes are cached


@pytest.mark.parametrize("deltas", [1, 3])
def test_a_chain_on_plain_bytes(deltas):
    base = content("floats", 4096, 1)
    blobs, chunk = [], base
    for i in range(deltas):
        changed = np.bitwise_xor(chunk, content("sparse", 4096, i))
        blobs.insert(0, delta(changed, chunk))
        chunk = changed

    def decode_on(plain):
        out = np.full(4096, 0xAA, np.uint8)
        chain_decode.decode_chain(
            [memoryview(b) for b in blobs], list(map(str, range(deltas))), digest(chunk), out, plain, seed=SEED
        )
        return out

    kept = base.copy()
    np.testing.assert_array_equal(decode_on(base), chunk)
    np.testing.assert_array_equal(base, kept)
    with pytest.raises(IntegrityError, match=r"^0: digest mismatch"):
        decode_on(content("floats", 4096, 2))
    with pytest.raises(IntegrityError, match="ends in a delta"):
        decode_on(None)
    with pytest.raises(IntegrityError):
        chain_decode.decode_chain([memoryview(full(base))], ["0"], digest(base), np.empty_like(base), base, seed=SEED)
