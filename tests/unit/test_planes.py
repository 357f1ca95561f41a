"""split and merge match a plain reference, and sampled histograms match the exact entropy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.format.blobs import planes

ELEMENT_SIZES = (1, 2, 4, 8)
LAYOUTS = (planes.BYTES, planes.ROTATED)
sizes = st.sampled_from(ELEMENT_SIZES)


def noise(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def unaligned(chunk, shift):
    """Return the same bytes at an address that is `shift` bytes above a multiple of 64."""
    room = np.empty(chunk.size + 128, np.uint8)
    start = -room.ctypes.data % 64 + shift
    view = room[start : start + chunk.size]
    view[:] = chunk
    return view


def entropy(plane):
    counts = np.array([np.count_nonzero(plane == value) for value in range(256)])
    share = counts[counts > 0] / plane.size
    return float(-(share * np.log2(share)).sum())


def rotated(chunk, element_size):
    """Return the bytes of every element rotated left by one bit, computed with Python's integers."""
    bits = 8 * element_size
    out = bytearray()
    for at in range(0, chunk.size, element_size):
        x = int.from_bytes(chunk[at : at + element_size].tobytes(), "little")
        out += ((x << 1 | x >> bits - 1) & (1 << bits) - 1).to_bytes(element_size, "little")
    return bytes(out)


@given(sizes, st.sampled_from(LAYOUTS), st.integers(0, 300), st.integers(0, 9), st.integers(0, 2**31))
def test_split_and_merge_agree_with_a_plain_reference(element_size, layout, elements, shift, seed):
    chunk = unaligned(noise(elements * element_size, seed), shift)
    split = planes.split(chunk, element_size, layout)
    assert split.dtype == np.uint8
    assert split.shape == (element_size, elements)
    plain = rotated(chunk, element_size) if layout == planes.ROTATED and element_size > 1 else bytes(chunk)
    for k in range(element_size):
        assert split[k].tobytes() == plain[k::element_size]
    out = unaligned(np.zeros(chunk.size, np.uint8), shift)
    planes.merge(split, out, layout)
    assert out.tobytes() == chunk.tobytes()


@given(sizes, st.integers(0, 300), st.integers(0, 9), st.integers(0, 2**31), st.booleans())
def test_differences_agree_with_a_plain_reference(element_size, elements, shift, seed, in_place):
    """Differences are as docs/format.md says: modulo 2^8e, signed, in zigzag form. `add` is the inverse."""
    chunk, base = (unaligned(noise(elements * element_size, seed + i), shift) for i in (0, 1))
    chunk[: chunk.size // 2] = base[: chunk.size // 2]
    out = unaligned(np.zeros(chunk.size, np.uint8), shift)
    planes.difference(chunk, base, element_size, out)
    span, expected = 1 << 8 * element_size, bytearray()
    for at in range(0, chunk.size, element_size):
        after, before = (int.from_bytes(x[at : at + element_size].tobytes(), "little") for x in (chunk, base))
        difference = (after - before + span // 2) % span - span // 2
        expected += (2 * difference if difference >= 0 else -2 * difference - 1).to_bytes(element_size, "little")
    assert out.tobytes() == bytes(expected)
    found = base if in_place else unaligned(noise(chunk.size, 1), shift)
    planes.add(list(planes.split(out, element_size)), base, found)
    assert found.tobytes() == chunk.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rotation_moves_the_sign_out_of_the_highest_plane(dtype):
    """If all values have the same exponent, the highest plane is constant. Without rotation it also has the signs."""
    values = (1 + np.random.default_rng(0).random(3000) * 2**-4) * np.resize([1.0, -1.0], 3000)
    split = planes.split(values.astype(dtype).view(np.uint8), np.dtype(dtype).itemsize, planes.ROTATED)
    assert len(np.unique(split[-1])) == 1
    assert len(np.unique(planes.split(values.astype(dtype).view(np.uint8), np.dtype(dtype).itemsize)[-1])) == 2


@pytest.mark.parametrize("element_size", ELEMENT_SIZES)
@pytest.mark.parametrize("elements", [1, 2, 3, 127, 65535, 65536, 65537])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_lengths(element_size, elements, layout):
    chunk = noise(elements * element_size)
    out = np.empty_like(chunk)
    planes.merge(planes.split(chunk, element_size, layout), out, layout)
    np.testing.assert_array_equal(out, chunk)


def test_split_reads_read_only_bytes_and_leaves_them_alone():
    data = bytes(range(64))
    for element_size in ELEMENT_SIZES:
        split = planes.split(np.frombuffer(data, np.uint8), element_size)
        assert split[0, 1] == element_size
    assert data == bytes(range(64))


@given(sizes, st.sampled_from(LAYOUTS), st.integers(0, 2 * planes.SAMPLE_RUN * planes.SAMPLE_RUNS + 7))
def test_a_short_chunk_is_sampled_whole(element_size, layout, elements):
    elements = min(elements, 2 * planes.SAMPLE_RUN * planes.SAMPLE_RUNS - 1)
    chunk = np.resize(noise(1021), elements * element_size)
    whole = planes.split(chunk, element_size, layout)
    np.testing.assert_array_equal(planes.sample(chunk, element_size, layout), whole)


@pytest.mark.parametrize("element_size", ELEMENT_SIZES)
@pytest.mark.parametrize("runs", [256, 257, 600, 16384])
def test_a_sample_is_runs_spread_evenly(element_size, runs):
    chunk = noise((runs * planes.SAMPLE_RUN + 5) * element_size)
    whole = planes.split(chunk, element_size)
    chosen = planes.sampled_runs(runs).tolist()
    picked = [whole[:, i * planes.SAMPLE_RUN : (i + 1) * planes.SAMPLE_RUN] for i in chosen]
    np.testing.assert_array_equal(planes.sample(chunk, element_size), np.concatenate(picked, axis=1))


@given(st.integers(2 * planes.SAMPLE_RUNS, 2**24))
def test_each_part_of_a_chunk_has_one_sampled_run(runs):
    chosen = planes.sampled_runs(runs)
    begins = np.arange(planes.SAMPLE_RUNS) * runs // planes.SAMPLE_RUNS
    assert (chosen >= begins).all()
    assert (chosen <= begins + runs // planes.SAMPLE_RUNS + 1).all()
    assert chosen[-1] < runs


@pytest.mark.parametrize("width", [*(2**n for n in range(7, 15)), *(3 * 2**n for n in range(6, 13)), 1792, 11008])
def test_a_sample_sees_all_columns_of_a_matrix(width):
    """A quarter of the columns is special: about a quarter of the sample is, too."""
    is_special = np.zeros((512 * 1024 // width, width), np.uint16)
    is_special[:, : width // 4] = 1
    assert 0.12 < planes.sample(is_special.view(np.uint8).ravel(), 2)[0].mean() < 0.4


@given(sizes, st.binary(max_size=600))
def test_histograms_count_every_byte(element_size, data):
    data = data[: len(data) - len(data) % element_size]
    split = planes.split(np.frombuffer(data, np.uint8), element_size)
    counts = planes.histograms(split)
    assert counts.shape == (element_size, 256)
    for k in range(element_size):
        plane = data[k::element_size]
        assert counts[k].tolist() == [plane.count(value) for value in range(256)]


@pytest.mark.parametrize("values", [1, 2, 3, 16, 200, 256])
def test_statistics_give_the_exact_entropy_of_a_long_plane(values):
    plane = np.random.default_rng(values).integers(0, values, 400_000).astype(np.uint8)
    plane[: plane.size // 3] = 0
    found = planes.statistics(planes.histograms(plane.reshape(1, -1)))
    bias = (len(np.unique(plane)) - 1) / (2 * np.log(2) * plane.size)
    assert found.bits[0] == pytest.approx(min(8.0, entropy(plane) + bias), abs=1e-9)
    assert found.top_share[0] == pytest.approx(np.bincount(plane).max() / plane.size)


def test_a_sample_estimates_the_entropy_of_its_plane():
    values = np.random.default_rng(3).normal(0, 0.02, 512 * 1024).astype(np.float32)
    chunk = values.view(np.uint8)
    sampled = planes.statistics(planes.histograms(planes.sample(chunk, 4)))
    exact = [entropy(plane) for plane in planes.split(chunk, 4)]
    np.testing.assert_allclose(sampled.bits, exact, atol=0.03)


def test_the_bias_of_a_short_sample_is_corrected():
    """The counts of 1,000 random bytes give 7.81 bits per byte. The estimate is corrected to 8."""
    found = [planes.statistics(planes.histograms(noise(1000, seed).reshape(1, -1))).bits[0] for seed in range(40)]
    assert np.mean(found) == pytest.approx(8.0, abs=0.02)


@pytest.mark.parametrize(
    ("plane", "bits", "top"), [(b"", 0.0, 0.0), (b"a", 0.0, 1.0), (b"aaaa", 0.0, 1.0), (b"ab" * 2048, 1.0, 0.5)]
)
def test_statistics_of_simple_planes(plane, bits, top):
    found = planes.statistics(planes.histograms(np.frombuffer(plane, np.uint8).reshape(1, -1)))
    assert found.bits[0] == pytest.approx(bits, abs=1e-3)
    assert found.top_share[0] == top
