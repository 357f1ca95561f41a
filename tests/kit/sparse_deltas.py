"""Sparse deltas to test readers with: chunks that differ a little from their bases, and payloads that are invalid."""

import struct

import numpy as np
import zstandard


def pair(size, layout, elements, share, seed, most=3):
    """Return a base like trained weights, or any integers, and a chunk with some elements changed by up to `most`."""
    rng = np.random.default_rng(seed)
    if layout and size > 1:
        bits = rng.normal(0, 0.02, elements).astype({2: np.float16, 4: np.float32, 8: np.float64}[size])
    else:
        bits = rng.integers(0, 2**63, elements, np.uint64).astype(f"u{size}")
    base = bits.view(f"u{size}")
    chunk = base.copy()
    at = rng.random(elements) < share
    moves = rng.integers(-most, most + 1, int(at.sum())).astype(np.int64)
    chunk[at] += moves.astype(f"i{size}").view(f"u{size}")
    return base.view(np.uint8), chunk.view(np.uint8)


def frame(symbols):
    return zstandard.ZstdCompressor().compress(bytes(symbols)) if symbols else b""


def forged(rows, symbols=(), values=(), low=b"", more_frames=()):
    """Return a payload of one run of groups over a base of 100 zero bytes, and the lengths of its frames."""
    frames = [f for f in (frame(symbols), frame(values), *more_frames) if f]
    table = b"".join(struct.pack("<BBBBII", *row) for row in rows)
    return struct.pack("<I", len(rows)) + table + b"".join(frames) + low, [len(f) for f in frames]


GOOD = [(255, 0, 0, 1, 2, 1)], [3 * 10 + 0, 3 * 5 + 2], [4]
HOSTILE = {
    "no groups": lambda: forged([]),
    "more groups than bytes": lambda: (struct.pack("<I", 200), []),
    "2^32 groups": lambda: (struct.pack("<I", 2**32 - 1) + bytes(100), []),
    "less than a count": lambda: (b"\1", []),
    "last key": lambda: forged([(254, 0, 0, 1, 0, 0)]),
    "keys that do not rise": lambda: forged([(255, 0, 0, 0, 0, 0), (255, 0, 0, 1, 0, 0)]),
    "keys that fall": lambda: forged([(7, 0, 0, 0, 0, 0), (6, 0, 0, 0, 0, 0), (255, 0, 0, 1, 0, 0)]),
    "no end of frames": lambda: forged([(255, 0, 0, 0, 0, 0)]),
    "a flag": lambda: forged([(255, 0, 0, 3, 0, 0)]),
    "a gap shift": lambda: forged([(255, 27, 0, 1, 0, 0)]),
    "a value shift": lambda: forged([(255, 0, 8, 1, 0, 0)]),
    "a value shift within a byte": lambda: forged([(255, 0, 4, 1, 0, 0)]),
    "more gaps than elements": lambda: forged([(255, 0, 0, 1, 101, 0)], [0] * 101),
    "2^32 gaps": lambda: forged([(255, 0, 0, 1, 2**32 - 1, 0)], [0]),
    "gaps in a group of no elements": lambda: forged([(0, 0, 0, 0, 0, 0), (255, 0, 0, 1, 1, 0)], [0]),
    "more values than gaps": lambda: forged([(255, 0, 0, 1, 1, 2)], [2], [0, 0]),
    "fewer values than symbols say": lambda: forged([(255, 0, 0, 1, 2, 1)], [2, 2], [0]),
    "more values than symbols say": lambda: forged([(255, 0, 0, 1, 2, 1)], [0, 0], [0]),
    "gaps in a dense group": lambda: forged([(255, 255, 0, 1, 1, 100)], [0], [0] * 100),
    "a dense group of few": lambda: forged([(255, 255, 0, 1, 0, 99)], [], [0] * 99),
    "a dense group of many": lambda: forged([(255, 255, 0, 1, 0, 101)], [], [0] * 101),
    "a symbol of 255": lambda: forged([(255, 0, 0, 1, 1, 0)], [255]),
    "a position beyond": lambda: forged([(255, 0, 0, 1, 2, 0)], [3 * 60, 3 * 60]),
    "the position after the last": lambda: forged([(255, 0, 0, 1, 2, 0)], [3 * 49, 3 * 50]),
    "a gap beyond": lambda: forged([(255, 0, 0, 1, 1, 0)], [3 * 84], low=struct.pack("<I", 100)),
    "gaps whose sum overflows": lambda: forged(
        [(255, 26, 0, 1, 100, 0)], [3 * 84] * 100, low=bytes(325) + b"\xff" * 400
    ),
    "an escape that is cut": lambda: forged([(255, 0, 0, 1, 1, 0)], [3 * 84], low=b"\1\0\0"),
    "low bits that are cut": lambda: forged([(255, 3, 0, 1, 3, 0)], [0, 0, 0], low=b"\0"),
    "a value that is cut": lambda: forged([(255, 0, 0, 1, 1, 1)], [2], [255]),
    "a z beyond the element": lambda: forged([(255, 0, 0, 1, 1, 1)], [2], [253]),
    "trailing bytes": lambda: forged(*GOOD, low=b"\0"),
    "one frame more": lambda: forged(*GOOD, more_frames=[frame([1])]),
    "one frame less": lambda: forged([(255, 0, 0, 1, 2, 1)], [32, 17]),
    "a longer frame": lambda: forged([(255, 0, 0, 1, 2, 0)], [0, 0, 0]),
    "a shorter frame": lambda: forged([(255, 0, 0, 1, 2, 0)], [0]),
    "a frame beyond the payload": lambda: (forged(*GOOD)[0], [11, 2**32 - 1]),
    "no frames": lambda: (forged(*GOOD)[0], []),
}
