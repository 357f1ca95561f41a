"""Decode the same bytes only once in a process of the tests, for harnesses with thousands of almost equal stores.

Call `remember(monkeypatch)` in a harness that tests which objects are stored, and not how a chunk or a manifest is
decoded. Only successes are remembered, under all that they depend on. Thorough runs decode everything.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kit.samples import THOROUGH
from snapstore.arrays import Bytes
from snapstore.format import chain_decode, manifest

#: Results of each kind that are kept; a chunk or manifest here has one or two KB.
KEPT = 4096
_decode_chain, _decode = chain_decode.decode_chain, manifest.decode
_CHUNKS: OrderedDict[Any, bytes] = OrderedDict()
_MANIFESTS: OrderedDict[Any, manifest.Manifest] = OrderedDict()


def remember(monkeypatch: Any) -> None:
    """Let this test decode no bytes again that a test of this process has decoded; see the module."""
    if not THOROUGH:
        monkeypatch.setattr(chain_decode, "decode_chain", _remembered_chain)
        monkeypatch.setattr(manifest, "decode", _remembered_manifest)


def _once(kept: OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    if key in kept:
        kept.move_to_end(key)
        return kept[key]
    kept[key] = made = make()
    if len(kept) > KEPT:
        kept.popitem(last=False)
    return made


def _remembered_chain(
    blobs: Sequence[memoryview], wheres: Sequence[str], chunk_digest: bytes, out: Bytes, base: Bytes | None = None,
    *, seed: int,
) -> None:  # fmt: skip
    def decoded() -> bytes:
        _decode_chain(blobs, wheres, chunk_digest, out, base, seed=seed)
        return out.tobytes()

    key = tuple(map(bytes, blobs)), chunk_digest, out.size, base if base is None else base.tobytes(), seed
    out[:] = np.frombuffer(_once(_CHUNKS, key, decoded), np.uint8)


def _remembered_manifest(data: bytes, where: str) -> manifest.Manifest:
    def decoded() -> manifest.Manifest:
        made = _decode(data, where)
        for column in dataclasses.fields(made.table):
            getattr(made.table, column.name).flags.writeable = False
        return made

    return dataclasses.replace(_once(_MANIFESTS, bytes(data), decoded))
