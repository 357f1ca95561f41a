"""Digest: the identity of a chunk, XXH3-128 of its plain bytes; and the XXH3-64 that guards stored bytes.

In: buffers. Out: digests as rows of bytes. xxhash releases the GIL for long inputs, so a thread pool scales.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]


def digest(chunk: Bytes) -> bytes:
    """XXH3-128 of one chunk, canonical byte order, seed 0 (https://xxhash.com/doc/v0.8.3/)."""
    return xxhash.xxh3_128_digest(chunk.data)


def checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64, the guard of stored bytes."""
    return xxhash.xxh3_64_intdigest(data)
