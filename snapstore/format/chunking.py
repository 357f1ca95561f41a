"""Chunking: where a tensor is cut. A chunk is a fixed span of one tensor's bytes.

Chunk sizes are multiples of 16, the size of the largest element (complex128), so a cut never splits an element.
"""

from __future__ import annotations

from ..errors import InvalidInputError

DEFAULT_CHUNK_BYTES = 1024 * 1024
MIN_CHUNK_BYTES = 64
MAX_CHUNK_BYTES = 64 * 1024 * 1024
#: Smaller tensors lie in the manifest: a blob's header and a separate read would cost more [bytes].
INLINE_BYTES = 4 * 1024


def check_chunk_bytes(chunk_bytes: object) -> int:
    """Return `chunk_bytes` if chunks may have that size, else raise InvalidInputError."""
    if not isinstance(chunk_bytes, int) or chunk_bytes % 16 or not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise InvalidInputError(
            f"chunk size {chunk_bytes!r}: expected a multiple of 16 from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} bytes"
        )
    return chunk_bytes


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """Return into how many chunks `nbytes` are cut."""
    return -(-nbytes // chunk_bytes)
