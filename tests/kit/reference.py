"""The CPU engine without its extension, in the middle of a test: then a test can replace functions of the reference.

Engines that exist already change too. SNAPSTORE_ENGINE=numpy only changes engines that are made later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from snapstore.engine import cpu, spans
from snapstore.format.blobs import blob


def encode_by_reference(patch: pytest.MonkeyPatch) -> None:
    """Let `cpu.encode_chunk` encode every chunk."""
    patch.setattr(spans, "choose", lambda _, batch: (np.zeros(len(batch.chunks), np.uint8), None))


def decode_by_reference(patch: pytest.MonkeyPatch) -> None:
    """Let `chain_decode.decode_chain` rebuild every chunk."""
    patch.setattr(spans, "decode", lambda _, batch, rows, seed: np.arange(rows.start, rows.stop))


def replace_encode(patch: pytest.MonkeyPatch, encode: Callable[..., Any]) -> None:
    """Encode every blob in planes by a function in place of `blob.encode`."""
    encode_by_reference(patch)
    patch.setattr(blob, "encode", encode)


def replace_digest(patch: pytest.MonkeyPatch, digest: Callable[[Any, int], bytes]) -> None:
    """Let the CPU engine hash by a function in place of `hashing.digest`."""
    patch.setattr(cpu, "digest", digest)
    patch.setattr(
        spans,
        "digests",
        lambda _, chunks, seed: np.array([list(digest(c, seed)) for c in chunks.views()], np.uint8).reshape(-1, 16),
    )
