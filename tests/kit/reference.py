"""The CPU engine without its extension, in the middle of a test: then a test can replace functions of the reference.

Engines that exist already change too. SNAPSTORE_ENGINE=numpy only changes engines that are made later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from snapstore.arrays import Bytes
from snapstore.engine import cpu, spans
from snapstore.engine.batches import Chunks, EncodeBatch, Examination, Examined
from snapstore.format.blobs import blob


def encode_by_reference(patch: pytest.MonkeyPatch) -> None:
    """Let `cpu.encode_chunk` encode every chunk."""

    def choose(_: object, batch: EncodeBatch) -> spans.Choice:
        n = len(batch.chunks)
        return spans.Choice(np.full(n, spans.BY_REFERENCE, np.uint8), np.zeros((n, 8), np.uint8), np.zeros(n, np.int64))

    patch.setattr(spans, "choose", choose)


def decode_by_reference(patch: pytest.MonkeyPatch) -> None:
    """Let `chain_decode.decode_chain` rebuild every chunk."""
    patch.setattr(spans, "decode", lambda _, batch, rows, *rest: np.arange(rows.start, rows.stop))


def replace_encode(patch: pytest.MonkeyPatch, encode: Callable[..., Any]) -> None:
    """Encode every blob in planes by a function in place of `blob.encode`."""
    encode_by_reference(patch)
    patch.setattr(blob, "encode", encode)


def replace_digest(patch: pytest.MonkeyPatch, digest: Callable[[Any, int], bytes]) -> None:
    """Let the CPU engine hash by a function in place of `hashing.digest`."""
    patch.setattr(cpu, "digest", digest)

    def fill(_: object, chunks: Chunks, copies: Chunks | None, seed: int, out: Bytes) -> None:
        for row, chunk in zip(out, chunks.views(), strict=True):
            row[:] = np.frombuffer(digest(chunk, seed), np.uint8)
        for copy, chunk in zip(copies.views() if copies else (), chunks.views(), strict=False):
            copy[:] = chunk[: copy.size]

    def examine(_: object, given: Examination, seed: int, found: Examined, rows: slice) -> None:
        cpu._examine(given.take(rows), seed, found.digests[rows], found.base_digests[rows], found.copied[rows])

    patch.setattr(spans, "digests", fill)
    patch.setattr(spans, "examine", examine)
