"""The CPU engine without its extension, in the middle of a test: then a test can replace functions of the reference.

Engines that exist already change too. SNAPSTORE_ENGINE=numpy only changes engines that are made later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from snapstore.engine import cpu, reference
from snapstore.format.blobs import blob


def use_reference(patch: pytest.MonkeyPatch) -> None:
    """Let every CPU engine do its work in NumPy."""

    def keep(engine: cpu.CpuEngine, jobs: object) -> None:  # for later, when the patch is undone
        engine.__dict__["_jobs"] = jobs

    patch.setattr(cpu.CpuEngine, "_jobs", property(lambda _: None, keep), raising=False)


def replace_encode(patch: pytest.MonkeyPatch, encode: Callable[..., Any]) -> None:
    """Encode every blob in planes by a function in place of `blob.encode`."""
    use_reference(patch)
    patch.setattr(blob, "encode", encode)


def replace_digest(patch: pytest.MonkeyPatch, digest: Callable[[Any, int], bytes]) -> None:
    """Let the CPU engine hash by a function in place of `hashing.digest`."""
    use_reference(patch)
    patch.setattr(reference, "digest", digest)
