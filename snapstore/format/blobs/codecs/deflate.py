"""Raw deflate (RFC 1951): Huffman codes and runs of one byte, no search for other matches.

It codes planes of mostly one value: on blocks of 64 KiB, zlib's Z_RLE beats zstd (docs/design/cpu-engine.md).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ....arrays import Bytes
from ....errors import IntegrityError

ID = 2


def encode_runs(plane: Bytes, block_bytes: int) -> list[bytes]:
    """Return the stored blocks of a plane of mostly one value."""
    blocks = []
    for i in range(0, plane.size, block_bytes):
        stream = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
        blocks.append(stream.compress(plane[i : i + block_bytes].data) + stream.flush())
    return blocks


def decode(blocks: Sequence[memoryview], out: Bytes, block_bytes: int) -> None:
    """Fill `out` from its blocks; none writes beyond its part of `out`.

    Raises:
        IntegrityError: a block does not decode to its length.
    """
    for i, block in enumerate(blocks):
        part = out[i * block_bytes : (i + 1) * block_bytes]
        stream = zlib.decompressobj(-15)
        try:
            plain = stream.decompress(block, part.size + 1)
        except zlib.error as error:
            raise IntegrityError(f"deflate block {i}: {error}") from error
        if len(plain) != part.size or not stream.eof or stream.unused_data:
            raise IntegrityError(f"deflate block {i}: decodes to {len(plain)} bytes, expected {part.size}")
        part[:] = np.frombuffer(plain, np.uint8)
