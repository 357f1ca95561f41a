"""Digest: the identity of a chunk, seeded XXH3-128 of its plain bytes; and the XXH3-64 that guards stored bytes.

Every repository has a seed of its own, drawn at random (docs/design/digest-seed.md). Without one, anybody can write
down two chunks of one digest, and the second would restore as the first.

In: buffers. Out: digests as rows of bytes. xxhash releases the GIL for long inputs, so a thread pool scales.
"""

from __future__ import annotations

import secrets

import xxhash

from ..arrays import Bytes


def new_seed() -> int:
    """64 random bits, for the config of a new repository."""
    return secrets.randbits(64)


def digest(chunk: Bytes, seed: int) -> bytes:
    """XXH3-128 of one chunk under its repository's seed, canonical byte order (https://xxhash.com/doc/v0.8.3/)."""
    return xxhash.xxh3_128_digest(chunk.data, seed)


def checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 without a seed: it finds damage to stored bytes, and never says that two things are the same."""
    return xxhash.xxh3_64_intdigest(data)
