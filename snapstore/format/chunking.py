"""Chunking: where a tensor and a tree are cut. A chunk is a fixed span of one tensor's bytes.

Chunk sizes are multiples of 16, the size of the largest element (complex128), so a cut never splits an element.

The packed bytes of a large tree are cut into pages at places that depend on the bytes near them. An insertion moves all
bytes after it, and the cuts move with them. So the pages after it stay known chunks (docs/design/plain-values.md).
"""

from __future__ import annotations

import numpy as np

from ..arrays import Bytes
from ..errors import InvalidInputError
from ..text import quoted

#: How the bytes of a chunk are stored: as they are; as differences of its elements, as integers, from those of a base;
#: as the XOR of its bytes with those of a base. In blobs, footers and the references of manifests.
FULL, DIFFERENCE, XOR = 0, 1, 2
DEFAULT_CHUNK_BYTES = 1024 * 1024
MIN_CHUNK_BYTES = 64
MAX_CHUNK_BYTES = 64 * 1024 * 1024
#: Smaller tensors lie in the manifest: a blob's header and one more read would cost more [bytes].
INLINE_BYTES = 4 * 1024
#: A packed tree of this size or more lies in pages; a smaller one lies in the manifest [bytes].
PAGED_BYTES = 64 * 1024
#: Sizes of pages, 64 KiB on average [bytes]. The last page may be longer than the maximum, by up to the minimum.
MIN_PAGE_BYTES, MAX_PAGE_BYTES = 16 * 1024, 256 * 1024
_CUT_BELOW = np.uint64(2**64 // (48 * 1024))  # one place in 48 Ki; pages have MIN_PAGE_BYTES before it
_WINDOW_BYTES = 16  # a cut depends on this many bytes before it, taken as two words
_MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # odd constants of SplitMix64 and xxHash
_STRIDE_BYTES = 64 * 1024  # hashed in one step, so that the hashes stay in the CPU cache


def check_chunk_bytes(chunk_bytes: object) -> None:
    """Raise InvalidInputError unless chunks may have this size."""
    if not isinstance(chunk_bytes, int) or chunk_bytes % 16 or not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise InvalidInputError(
            f"chunk size {quoted(chunk_bytes)}: "
            f"expected a multiple of 16 from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} bytes"
        )


def page_ends(data: Bytes) -> list[int]:
    """Return the end of each page of a packed tree [bytes].

    A cut follows 16 bytes whose hash is small. So a change affects the cuts near it and no others.
    """
    ends: list[int] = []
    start = 0
    for cut in _cuts(data):
        while cut - start > MAX_PAGE_BYTES:
            start += MAX_PAGE_BYTES
            ends.append(start)
        if cut - start >= MIN_PAGE_BYTES and data.size - cut >= MIN_PAGE_BYTES:
            start = cut
            ends.append(start)
    while data.size - start > MAX_PAGE_BYTES + MIN_PAGE_BYTES:
        start += MAX_PAGE_BYTES
        ends.append(start)
    return [*ends, data.size]


def _cuts(data: Bytes) -> list[int]:
    """Return all offsets where the content allows a cut, in order."""
    found = []
    for at in range(0, data.size - _WINDOW_BYTES + 1, _STRIDE_BYTES):
        piece = data[at : at + _STRIDE_BYTES + _WINDOW_BYTES - 1]
        words = np.ndarray((piece.size - 7,), "<u8", piece, strides=(1,))
        hashes = words[:-8] * _MULTIPLIERS[0] + words[8:] * _MULTIPLIERS[1]
        found += (np.flatnonzero(hashes < _CUT_BELOW) + (at + _WINDOW_BYTES)).tolist()
    return found
