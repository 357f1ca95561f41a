"""Blobs in codec 70 without a GPU: zlib at level 9 plays nvCOMP's ANS, in its blocks of 256 KiB."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kit.reference import use_reference
from snapstore.errors import IntegrityError
from snapstore.format.blobs import blob, codecs
from snapstore.format.blobs.codecs import sparse

BLOCK_BYTES = 256 * 1024


def decode(blocks: Sequence[memoryview], out: np.ndarray, block_bytes: int) -> None:
    """As nvcomp.decode."""
    assert block_bytes == BLOCK_BYTES
    for i, block in enumerate(blocks):
        part = out[i * block_bytes : (i + 1) * block_bytes]
        try:
            plain = zlib.decompress(block)
        except zlib.error as error:
            raise IntegrityError(f"ANS block {i}: {error}") from error
        if len(plain) != part.size:
            raise IntegrityError(f"ANS block {i}: {len(plain)} bytes, expected {part.size}")
        part[:] = np.frombuffer(plain, np.uint8)


def encode_plane(plane: np.ndarray, kind: int) -> tuple[int, list[Any]]:
    """As blob._encode_plane; compress every plane that shrinks."""
    data = np.ascontiguousarray(plane).data
    blocks = [zlib.compress(data[i : i + BLOCK_BYTES], 9) for i in range(0, len(data), BLOCK_BYTES)]
    if blocks and sum(map(len, blocks)) + 4 * len(blocks) < len(data):
        return codecs.ANS, blocks
    return codecs.RAW, [data]


def readable(monkeypatch: Any) -> None:
    """Let this process decode codec 70."""
    monkeypatch.setitem(codecs._DECODERS, codecs.ANS, decode)


@contextmanager
def written() -> Iterator[None]:
    """Write new blobs in codec 70, and none as a sparse delta, as a GPU does."""
    kept = blob._encode_plane, codecs.BLOCK_BYTES, sparse.TRIED_BELOW_SHARE
    blob._encode_plane, codecs.BLOCK_BYTES, sparse.TRIED_BELOW_SHARE = encode_plane, BLOCK_BYTES, -1.0
    try:
        with pytest.MonkeyPatch.context() as patch:
            use_reference(patch)
            yield
    finally:
        blob._encode_plane, codecs.BLOCK_BYTES, sparse.TRIED_BELOW_SHARE = kept
