"""Kernels match plain references at odd sizes, every element size and any alignment, and stay within bounds.

Each test runs on an emulator of thread blocks, and on a CUDA device if there is one."""

from itertools import pairwise

import numpy as np
import pytest
import xxhash

from kit.machines import MACHINES
from snapstore.format.blobs import planes

rng = np.random.default_rng(7)
LENGTHS = [*range(0, 33), 63, 64, 65, 96, 97, 127, 128, 129, 130, 159, 160, 161, 191, 192, 239, 240, 241, 255, 256, 257,
           511, 512, 513, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 4097, 65536, 65537, 66561,
           131073]  # fmt: skip
SIZES = [1, 2, 4, 8]
LAYOUTS = [planes.BYTES, planes.ROTATED]


@pytest.fixture(params=MACHINES)
def machine(request):
    return request.param()


def addresses(machine, placed):
    return machine.put(np.array([p.address if p is not None else 0 for p in placed], np.uint64))


def numbers(machine, values, dtype=np.uint64):
    return machine.put(np.array(values, dtype))


def random_bytes(n):
    return rng.integers(0, 256, n, np.uint8)


SEEDS = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF, int(rng.integers(2**64, dtype=np.uint64))]


@pytest.mark.parametrize("misaligned", [0, 1, 4, 7, 8, 13])
@pytest.mark.parametrize(
    ("what", "seed"), [*((0, seed) for seed in SEEDS), (1, 0), (2, 0)],
    ids=[*(f"xxh3-128, {seed:#x}" for seed in SEEDS), "xxh3-64", "seal"],
)  # fmt: skip
def test_digest(machine, what, seed, misaligned):
    data = [random_bytes(n + 8) for n in LENGTHS]  # eight bytes before each input, for the seal
    placed = [machine.put(d, misaligned) for d in data]
    inputs = machine.put(np.array([p.address + 8 for p in placed], np.uint64))
    out = machine.put(np.zeros((len(data), 2 if what == 0 else 1), np.uint64))
    machine.launch("digest", (len(data),), 544, inputs, numbers(machine, LENGTHS), out, what, seed)
    got = out.get()
    for i, (d, p) in enumerate(zip(data, placed, strict=True)):
        if what == 0:
            assert got[i].tobytes() == xxhash.xxh3_128_digest(d[8:].data, seed), LENGTHS[i]
        elif what == 1:
            assert int(got[i, 0]) == xxhash.xxh3_64_intdigest(d[8:].data), LENGTHS[i]
        else:
            after = p.get()
            assert int(after[:8].view("<u8")[0]) == xxhash.xxh3_64_intdigest(d[8:].data), LENGTHS[i]
            assert (after[8:] == d[8:]).all()


def test_digests_of_any_length_under_any_seed(machine):
    draw = np.random.default_rng(11)
    most = [3, 8, 16, 128, 240, 1024, 5000, 200_000]  # of every class of lengths
    for _ in range(10):
        seed = int(draw.integers(2**64, dtype=np.uint64))
        lengths = [int(draw.integers(length + 1)) for length in most for _ in range(3)]
        data = [draw.integers(0, 256, n, np.uint8) for n in lengths]
        placed = [machine.put(d, int(draw.integers(16))) for d in data]
        out = machine.put(np.zeros((len(data), 2), np.uint64))
        machine.launch("digest", (len(data),), 544, addresses(machine, placed), numbers(machine, lengths), out, 0, seed)
        for row, d in zip(out.get(), data, strict=True):
            assert row.tobytes() == xxhash.xxh3_128_digest(d.data, seed), (d.size, seed)


def chunk_of(elements, size, kind):
    if kind == "noise":
        return random_bytes(elements * size)
    if kind == "zero":
        return np.zeros(elements * size, np.uint8)
    floats = rng.normal(0, 0.02, elements * size // 4 + 1).astype("<f4")
    return floats.view(np.uint8)[: elements * size].copy()


#: Kinds of planes for `merge`, beside the layouts 0 and 1 of full chunks; that of an XOR is XOR plus its layout.
DIFFERENCE, XOR = 2, 3


def zigzag(chunk, base, size):
    """Return the difference of two chunks as the CPU engine makes it, but computed independently."""
    bits = 8 * size
    differences = (chunk.view(f"u{size}") - base.view(f"u{size}")).view(f"i{size}")
    wide = [2 * d if d >= 0 else -2 * d - 1 for d in differences.tolist()]
    return np.array([z % 2**bits for z in wide], f"u{size}").view(np.uint8)


ELEMENTS = [1, 2, 3, 7, 8, 15, 16, 17, 63, 100, 511, 512, 4095, 4096, 4097, 8191, 8192, 20_001, 65_536, 262_177]


@pytest.mark.sampled(32)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("delta", ["none", "difference", "xor"])
@pytest.mark.parametrize("misaligned", [0, 8, 3])
def test_split_and_merge(machine, size, layout, delta, misaligned):
    """`split` matches the reference, and `merge` restores the chunks; one launch takes chunks of many lengths."""
    layout = planes.BYTES if size == 1 else layout
    chunks = [chunk_of(n, size, ("noise", "floats", "zero")[i % 3]) for i, n in enumerate(ELEMENTS)]
    bases = [chunk_of(n, size, "floats") if delta != "none" and i % 4 else None for i, n in enumerate(ELEMENTS)]
    strides = [-(-n // 16) * 16 for n in ELEMENTS]
    placed = [machine.put(c, misaligned) for c in chunks]
    placed_bases = [None if b is None else machine.put(b, misaligned) for b in bases]
    split = [machine.put(np.zeros((size, stride), np.uint8)) for stride in strides]
    n, lengths = len(chunks), [c.size for c in chunks]
    sizes, layouts = numbers(machine, [size] * n, np.uint8), numbers(machine, [layout] * n, np.uint8)
    tiles = -(-max(lengths) // (16 * 256 * 4))
    machine.launch("split", (tiles, n), 256, addresses(machine, placed), addresses(machine, placed_bases),
                   addresses(machine, split), numbers(machine, lengths), numbers(machine, strides), sizes,
                   layouts, int(delta == "xor"))  # fmt: skip
    for i, out in enumerate(split):
        source = planes.split(chunks[i], size, layout)
        if bases[i] is not None and delta == "xor":
            source = planes.split(chunks[i] ^ bases[i], size, layout)
        elif bases[i] is not None:
            source = planes.split(zigzag(chunks[i], bases[i], size), size)
        assert (out.get()[:, : ELEMENTS[i]] == source).all(), ELEMENTS[i]

    # merge: planes lie at odd addresses, as raw planes do in a payload
    loose = [
        [machine.put(p.get()[k, :count], 5 * k + 1) for k in range(size)]
        for p, count in zip(split, ELEMENTS, strict=True)
    ]
    table = np.zeros((n, 8), np.uint64)
    for i, row in enumerate(loose):
        table[i, :size] = [p.address for p in row]
    outs = [machine.put(np.zeros(c.size, np.uint8), misaligned) for c in chunks]
    tiles = -(-max(lengths) // (16 * 256 * 2))
    kind = XOR + layout if delta == "xor" else DIFFERENCE
    kinds = [kind if base is not None else layout for base in bases]
    machine.launch("merge", (tiles, n), 256, machine.put(table), numbers(machine, kinds, np.uint8),
                   numbers(machine, range(n + 1)), addresses(machine, placed_bases), addresses(machine, outs),
                   numbers(machine, lengths), sizes)  # fmt: skip
    for i, out in enumerate(outs):
        assert (out.get() == chunks[i]).all(), ELEMENTS[i]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_merge_of_chains(machine, size, layout):
    """`merge` applies the deltas of chains of one to nine blobs, the oldest first: sums and XORs do not commute.

    The oldest blob is full, or there is a base.
    """
    layout = planes.BYTES if size == 1 else layout
    depths = [1, 2, 3, 9, 1, 4]
    counts = [5, 4096, 100, 1023, 3, 7777]
    table, kinds, firsts, bases, expected, kept = [], [], [0], [], [], []
    for i, (depth, count) in enumerate(zip(depths, counts, strict=True)):
        versions = [chunk_of(count, size, "noise") for _ in range(depth + i % 2)]  # oldest first
        expected.append(versions[-1])
        rows, of_rows = [], []
        for j, (before, after) in enumerate(pairwise(versions)):
            is_xor = (i + j // 2) % 2
            of_rows.insert(0, XOR + layout if is_xor else DIFFERENCE)
            delta = after ^ before if is_xor else zigzag(after, before, size)
            rows.insert(0, planes.split(delta, size, layout if is_xor else planes.BYTES))
        kinds += of_rows
        bases.append(machine.put(versions[0]) if i % 2 else None)
        if bases[-1] is None:
            rows.append(planes.split(versions[0], size, layout))
            kinds.append(layout)
        for j, row in enumerate(rows):
            placed = [machine.put(p, (j + k) % 16) for k, p in enumerate(row)]
            kept.append(placed)
            table.append([*(p.address for p in placed), *[0] * (8 - size)])
        firsts.append(len(table))
    n = len(depths)
    outs = [machine.put(np.zeros(e.size, np.uint8)) for e in expected]
    lengths = [e.size for e in expected]
    machine.launch("merge", (-(-max(lengths) // 8192), n), 256, machine.put(np.array(table, np.uint64)),
                   numbers(machine, kinds, np.uint8), numbers(machine, firsts), addresses(machine, bases),
                   addresses(machine, outs), numbers(machine, lengths),
                   numbers(machine, [size] * n, np.uint8))  # fmt: skip
    for out, want in zip(outs, expected, strict=True):
        assert (out.get() == want).all()


@pytest.mark.parametrize("xor", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_histograms(machine, size, layout, xor):
    """The kernel takes the same sample as the CPU engine, and computes the same statistics."""
    layout = planes.BYTES if size == 1 else layout
    chunks = [chunk_of(n, size, ("noise", "floats", "zero")[i % 3]) for i, n in enumerate(ELEMENTS)]
    bases = [c ^ (random_bytes(c.size) & (rng.random(c.size) < 0.1)) if i % 3 else None for i, c in enumerate(chunks)]
    n = len(chunks)
    placed = [machine.put(c, size * (i % 3)) for i, c in enumerate(chunks)]
    placed_bases = [None if b is None else machine.put(b, size * (i % 2)) for i, b in enumerate(bases)]
    out = machine.put(np.full((n, 2, 8, 2), -1.0))
    machine.launch("histograms", (n,), 256, addresses(machine, placed), addresses(machine, placed_bases),
                   numbers(machine, [c.size for c in chunks]), numbers(machine, [size] * n, np.uint8),
                   numbers(machine, [layout] * n, np.uint8), out, xor)  # fmt: skip
    got = out.get()
    for i, (chunk, base) in enumerate(zip(chunks, bases, strict=True)):
        sources = [(chunk, layout)]
        if base is not None:
            sources.append((chunk ^ base, layout) if xor else (zigzag(chunk, base, size), planes.BYTES))
        for j, (source, own) in enumerate(sources):
            want = planes.statistics(planes.histograms(planes.sample(source, size, own)))
            np.testing.assert_allclose(got[i, j, :size, 0], want.bits, rtol=0, atol=1e-9)
            np.testing.assert_allclose(got[i, j, :size, 1], want.top_share, rtol=0, atol=1e-12)


def test_gather(machine):
    lengths = [0, 1, 2, 15, 16, 17, 31, 100, 4095, 4096, 4097, 20_000, 65_536, 66_000]
    cases = [(n, a, b) for n in lengths for a, b in [(0, 0), (3, 0), (0, 5), (7, 11), (4, 8)]]
    data = [random_bytes(n) for n, _, _ in cases]
    sources = [machine.put(d, a) for d, (_, a, _) in zip(data, cases, strict=True)]
    outs = [machine.put(np.zeros(n, np.uint8), b) for n, _, b in cases]
    machine.launch("gather", (len(cases),), 256, addresses(machine, sources), addresses(machine, outs),
                   numbers(machine, [n for n, _, _ in cases]))  # fmt: skip
    for out, want, case in zip(outs, data, cases, strict=True):
        assert (out.get() == want).all(), case


@pytest.mark.parametrize("nbytes", [1, 15, 4097, 64 * 1024, 64 * 1024 + 1, 200_003])
@pytest.mark.parametrize(("source_at", "at"), [(0, 0), (3, 8), (16, 5)])
def test_fetch(machine, nbytes, source_at, at):
    data = random_bytes(nbytes)
    source, out = machine.put(data, source_at), machine.put(np.zeros(nbytes, np.uint8), at)
    machine.launch("fetch", (-(-nbytes // (64 * 1024)),), 256, source, out, nbytes)
    assert (out.get() == data).all()
