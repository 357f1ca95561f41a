"""zstd decodes the frames of huffman_encode; huffman_decode reads both encoders' frames, and stays in its memory."""

import random

import numpy as np
import pytest

from kit.machines import MACHINES
from snapstore.format.blobs import codecs
from snapstore.format.blobs.codecs import zstd

LENGTHS = [1, 2, 5, 63, 64, 65, 66, 67, 100, 255, 256, 257, 1000, 4097, 16_383, 20_001, 65_535, 65_536]
ROOM = 16


@pytest.fixture(params=MACHINES)
def machine(request):
    return request.param()


def plane(kind, n, rng):
    """Return bytes as planes have them, and harder cases."""
    if kind == "exponents":
        return np.abs(rng.normal(0, 0.02, n)).astype("<f4").view("<u4") >> 23 & 255
    if kind == "delta":
        return np.minimum(rng.geometric(0.3, n) - 1, 255)
    if kind == "wide":
        return np.clip(rng.normal(128, 40, n), 0, 255)
    if kind == "high":  # symbols too high for a table of 4-bit weights
        return 255 - np.minimum(rng.geometric(0.1, n) - 1, 255)
    if kind == "constant":
        return np.full(n, rng.integers(256))
    if kind == "rare":
        return (rng.random(n) < 0.01) * 200
    if kind == "deep":  # codes of optimal length would have 24 bits
        shares = 2.0 ** np.arange(25)
        return rng.choice(25, n, p=shares / shares.sum()) * 10
    if kind == "two":
        return rng.integers(0, 2, n) * 255
    return rng.integers(0, 256, n)


KINDS = ["exponents", "delta", "wide", "high", "constant", "rare", "deep", "two", "noise"]


def planes_of(seed):
    rng = np.random.default_rng(seed)
    return [np.asarray(plane(kind, n, rng)).astype(np.uint8) for kind in KINDS for n in LENGTHS]


def column(machine, values):
    return machine.put(np.array(values, np.uint64))


def encode(machine, blocks, misaligned=0):
    """Return the frame of every block."""
    placed = [machine.put(block, misaligned) for block in blocks]
    rooms = [machine.put(np.full((len(block) + ROOM + 3) // 4 * 4, 0xEE, np.uint8)) for block in blocks]
    sizes = machine.put(np.zeros(len(blocks), np.uint32))
    machine.launch(
        "huffman_encode", (len(blocks),), 256, column(machine, [p.address for p in placed]),
        column(machine, [r.address for r in rooms]), column(machine, [len(b) for b in blocks]), sizes,
    )  # fmt: skip
    assert all((p.get() == block).all() for p, block in zip(placed, blocks, strict=True))
    return [room.get()[:size].tobytes() for room, size in zip(rooms, sizes.get().tolist(), strict=True)]


def decode(machine, frames, lengths, misaligned=0):
    """Decode every frame with the kernel, into buffers filled with 0xEE."""
    placed = [machine.put(np.frombuffer(frame, np.uint8), misaligned) for frame in frames]
    rooms = [machine.put(np.full(n, 0xEE, np.uint8), misaligned) for n in lengths]
    machine.launch(
        "huffman_decode", (len(frames),), 32, column(machine, [p.address for p in placed]),
        column(machine, [len(f) for f in frames]), column(machine, [r.address for r in rooms]),
        column(machine, lengths),
    )  # fmt: skip
    return [room.get() for room in rooms]


@pytest.mark.parametrize("misaligned", [0, 1, 6])
def test_zstd_reads_the_frames(machine, misaligned):
    blocks = planes_of(misaligned)
    for block, frame in zip(blocks, encode(machine, blocks, misaligned), strict=True):
        out = np.empty_like(block)
        zstd.decode([memoryview(frame)], out, codecs.BLOCK_BYTES)
        assert (out == block).all()
        assert len(frame) <= len(block) + 10


def test_frames_are_as_small_as_zstds(machine):
    """A frame of a long block, where zstd finds no matches, is at most 1 % and 64 bytes larger than zstd's."""
    rng = np.random.default_rng(5)
    for kind in ("exponents", "wide", "high", "noise"):
        block = np.asarray(plane(kind, 65_536, rng)).astype(np.uint8)
        (frame,) = encode(machine, [block])
        (other,) = zstd.encode_entropy(block, codecs.BLOCK_BYTES)
        assert len(frame) <= 1.01 * len(other) + 64, kind


@pytest.mark.parametrize("misaligned", [0, 1, 6])
def test_both_encoders_frames_come_back(machine, misaligned):
    """The kernel decodes the frames that the host gives to it: all of ours, and the ones of zstd that it recognizes."""
    blocks = planes_of(10 + misaligned)
    ours = encode(machine, blocks)
    theirs = [zstd.encode_entropy(block, codecs.BLOCK_BYTES)[0] for block in blocks]
    assert known_to_host(ours, blocks).all()
    known = known_to_host(theirs, blocks)
    assert known[[kind in ("wide", "noise") and n >= 100 for kind in KINDS for n in LENGTHS]].all()
    frames = ours + [frame for frame, good in zip(theirs, known, strict=True) if good]
    expected = blocks + [block for block, good in zip(blocks, known, strict=True) if good]
    for got, block in zip(decode(machine, frames, [len(b) for b in expected], misaligned), expected, strict=True):
        assert (got == block).all()


def known_to_host(frames, blocks):
    """Return `zstd.is_literals` of frames, stored one after the other."""
    sizes = np.array([len(frame) for frame in frames])
    stored = np.frombuffer(b"".join(frames), np.uint8)
    return zstd.is_literals(stored, np.cumsum(sizes) - sizes, sizes, np.array([len(block) for block in blocks]))


@pytest.mark.parametrize("seed", range(3))
def test_hostile_frames_write_nothing_beyond_their_rooms(machine, seed):
    """On frames with flipped bits, cut ends or spliced parts, the kernel ends and writes nothing outside its output."""
    rng, dice = np.random.default_rng(seed), random.Random(seed)
    blocks = [np.asarray(plane(kind, n, rng)).astype(np.uint8) for kind in KINDS for n in (64, 300, 5_000)]
    frames = encode(machine, blocks)
    frames += [zstd.encode_entropy(block, codecs.BLOCK_BYTES)[0] for block in blocks]
    blocks = 2 * blocks
    hostile, lengths = [], []
    for _ in range(400):
        i = dice.randrange(len(frames))
        frame = bytearray(frames[i])
        for _ in range(dice.randrange(1, 4)):
            place = dice.choice([dice.randrange(min(len(frame), 60)), dice.randrange(len(frame))])
            frame[place] ^= 1 << dice.randrange(8)
        if dice.random() < 0.2:
            del frame[dice.randrange(1, len(frame)) :]
        if dice.random() < 0.2:
            frame[dice.randrange(len(frame)) :] = frames[dice.randrange(len(frames))]
        hostile.append(bytes(frame))
        lengths.append(len(blocks[dice.choice([i, dice.randrange(len(blocks))])]))
    decode(machine, hostile, lengths, misaligned=seed)
