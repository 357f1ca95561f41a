"""Hashing: the digest that identifies a chunk (seeded XXH3-128), and the checksum of stored bytes (XXH3-64).

Every repository has its own random seed (docs/design/digest-seed.md). Without a seed, anyone can construct two chunks
with one digest, and the second would restore as the first.

In: buffers. Out: digests as bytes, checksums as ints. xxhash releases the GIL for long inputs, so a thread pool scales.
"""

from __future__ import annotations

import secrets

import xxhash

from ..arrays import Bytes

_KEY = secrets.randbits(64)  # of this process


def new_seed() -> int:
    """Return 64 random bits, for the config of a new repository."""
    return secrets.randbits(64)


def digest(chunk: Bytes, seed: int) -> bytes:
    """Return a chunk's XXH3-128 under its repository's seed: 16 bytes in canonical order.

    Canonical means big-endian, see https://xxhash.com/doc/v0.8.3/.
    """
    return xxhash.xxh3_128_digest(chunk.data, seed)


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the XXH3-64 without a seed. It detects damage of stored bytes; it never identifies content."""
    return xxhash.xxh3_64_intdigest(data)


def keyed_checksum(data: bytes | bytearray | memoryview) -> int:
    """Return an XXH3-64 that only this process can compute, not 0: it tells whether two reads return the same bytes."""
    return xxhash.xxh3_64_intdigest(data, _KEY) or 1
