"""Decode the same bytes only once in a process of the tests: half of the time of a small restore goes into decoding.

A file of tests about which objects are stored, read or damaged, and not about how a chunk or a manifest is decoded, has
the mark `usefixtures("remembering")`; its fixture calls `remember(monkeypatch)`. Damaged bytes are other bytes, so they
are decoded. Only successes are remembered, under all that they depend on. Thorough runs decode everything.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kit.samples import THOROUGH
from snapstore.arrays import Bytes
from snapstore.format.blobs import chain_decode
from snapstore.format.manifests import manifest

#: Results of each kind that are kept; a chunk or manifest here has one or two KB.
KEPT = 4096
#: A larger chunk is decoded each time, so that what is kept stays small [bytes].
LARGEST = 8192
_decode_chain, _prove_chain, _decode = chain_decode.decode_chain, chain_decode.prove_chain, manifest.decode
_CHUNKS: OrderedDict[Any, bytes] = OrderedDict()
_PROVEN: OrderedDict[Any, tuple[int, bytes]] = OrderedDict()
_MANIFESTS: OrderedDict[Any, manifest.Manifest] = OrderedDict()


def remember(monkeypatch: Any) -> None:
    """Let this test decode no bytes again that a test of this process has decoded; see the module."""
    if not THOROUGH:
        monkeypatch.setattr(chain_decode, "decode_chain", _remembered_chain)
        monkeypatch.setattr(chain_decode, "prove_chain", _remembered_proof)
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

    if out.size > LARGEST:
        _decode_chain(blobs, wheres, chunk_digest, out, base, seed=seed)
        return
    key = tuple(map(bytes, blobs)), chunk_digest, out.size, base if base is None else base.tobytes(), seed
    out[:] = np.frombuffer(_once(_CHUNKS, key, decoded), np.uint8)


def _remembered_proof(
    blobs: Sequence[memoryview], wheres: Sequence[str], digests: Sequence[bytes], out: Bytes, *, seed: int
) -> int:
    def proven() -> tuple[int, bytes]:
        return _prove_chain(blobs, wheres, digests, out, seed=seed), out.tobytes()

    if out.size > LARGEST:
        return _prove_chain(blobs, wheres, digests, out, seed=seed)
    count, chunk = _once(_PROVEN, (tuple(map(bytes, blobs)), tuple(digests), out.size, seed), proven)
    out[:] = np.frombuffer(chunk, np.uint8)
    return count


def _remembered_manifest(data: bytes, where: str) -> manifest.Manifest:
    def decoded() -> manifest.Manifest:
        made = _decode(data, where)
        for column in dataclasses.fields(made.table):
            getattr(made.table, column.name).flags.writeable = False
        return made

    return dataclasses.replace(_once(_MANIFESTS, bytes(data), decoded))
