"""Chain decode: rebuild one chunk from the blobs of its chain.

In: blobs, newest first, and the plain bytes of the last one's base if that is a delta. Out: the chunk, verified by its
digest. Planes of neighbouring xor deltas are XORed together and merged once; a sparse delta patches its plain base.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Bytes
from ..errors import FormatError, IntegrityError
from . import codecs, planes
from .blob import NO_BASE, XOR, Header, parse, patch_planes
from .codecs import sparse
from .hashing import digest


def prove_chain(
    blobs: Sequence[memoryview], wheres: Sequence[str], chunk_digest: bytes, out: Bytes, *, seed: int
) -> list[bytes]:
    """Rebuild one chunk as `decode_chain` does, and every chunk that it builds on.

    Returns:
        For each blob, newest first, the digest of the chunk that its chain decodes to; only the first digest if an
        older blob does not decode to its chunk.

    Raises:
        FormatError, IntegrityError: the requested chunk cannot be rebuilt.
    """
    digests = [
        chunk_digest,
        *(bytes(blob[64:80]) for blob in blobs[:-1]),
    ]  # of each blob's chunk
    rooms, base = (out, planes.scratch.room("link", out.size)), None
    try:
        for i in range(len(blobs) - 1, -1, -1):
            decode_chain(blobs[i : i + 1], wheres[i : i + 1], digests[i], rooms[i % 2], base, seed=seed)
            base = rooms[i % 2]
    except (FormatError, IntegrityError):
        decode_chain(blobs, wheres, chunk_digest, out, seed=seed)
        return digests[:1]
    return digests


def decode_chain(
    blobs: Sequence[memoryview],
    wheres: Sequence[str],
    chunk_digest: bytes,
    out: Bytes,
    base: Bytes | None = None,
    *,
    seed: int,
) -> None:
    """Rebuild one chunk from its chain, newest first: planes are XORed, then merged once.

    Args:
        blobs: the stored blobs; all but the last are xor, and the base of each is the chunk of the next.
        wheres: names of the blobs in errors.
        chunk_digest: of the requested chunk.
        out: (r,) uint8, filled.
        base: (r,) uint8, plain bytes of the last blob's base; None: the last blob is full.
        seed: the repository's.

    Raises:
        FormatError, IntegrityError: `out` is then garbage.
    """
    expected, headers = chunk_digest, []
    for blob, where in zip(blobs, wheres, strict=True):
        header = parse(blob, where)
        if header.digest != expected or header.raw_bytes != out.size:
            raise IntegrityError(
                f"{where}: blob of chunk {header.digest.hex()} ({header.raw_bytes} bytes), "
                f"expected {expected.hex()} ({out.size} bytes); run 'snapstore check'"
            )
        headers.append(header)
        expected = header.base
    if expected != NO_BASE and base is None:
        raise IntegrityError(f"{wheres[-1]}: the chain ends in a delta; its base {expected.hex()} is not referenced")
    end = len(blobs)
    while end:  # from the oldest blob to the newest: runs of planes, and single sparse deltas
        begin = end - 1
        if not _is_sparse(headers[begin]):
            while begin and not _is_sparse(headers[begin - 1]):
                begin -= 1
            _merge_planes(blobs[begin:end], headers[begin:end], wheres[begin:end], out, base)
        else:
            if base is None:
                raise IntegrityError(f"{wheres[begin]}: sparse, but it names no base")
            out[:] = base
            _apply_sparse(blobs[begin], headers[begin], wheres[begin], out)
        base, end = out, begin
    got = digest(out, seed)
    if got != chunk_digest:
        raise IntegrityError(
            f"{wheres[0]}: digest mismatch, expected {chunk_digest.hex()}, got {got.hex()}; "
            "run 'snapstore check --restore'"
        )


def _is_sparse(header: Header) -> bool:
    return header.codecs[0] == codecs.SPARSE


def _merge_planes(
    blobs: Sequence[memoryview], headers: Sequence[Header], wheres: Sequence[str], out: Bytes, base: Bytes | None
) -> None:
    """XOR the planes of blobs together, merge them into `out`, and XOR a base to it, which may be `out` itself."""
    by_layout: dict[tuple[int, int], Bytes] = {}  # deduplication across dtypes can give a chain two
    for blob, header, where in zip(blobs, headers, wheres, strict=True):
        kind = (header.element_size, header.layout)
        fresh = kind not in by_layout
        if fresh:
            room = planes.scratch.room(f"planes {kind}", out.size)
            by_layout[kind] = room.reshape(header.element_size, -1)
        patch_planes(blob, header, by_layout[kind], fresh, where)
    for i, ((_, layout), merged) in enumerate(by_layout.items()):
        if i == 0 and base is not out:
            planes.merge(merged, out, layout)
        else:
            other = planes.scratch.room("merged", out.size)
            planes.merge(merged, other, layout)
            np.bitwise_xor(out, other, out=out)
    if base is not None and base is not out:
        np.bitwise_xor(out, base, out=out)


def _apply_sparse(blob: memoryview, header: Header, where: str, out: Bytes) -> None:
    """Turn the base of a sparse delta, which `out` holds, into its chunk."""
    if header.transform != XOR or any(header.codecs[1:]):
        raise IntegrityError(f"{where}: sparse, but transform {header.transform} and codecs {header.codecs.hex()}")
    payload = blob[header.payload_start : header.payload_start + header.payload_bytes]
    try:
        sparse.apply(payload, header.block_lengths, out, header.element_size, header.layout, header.block_bytes)
    except IntegrityError as error:
        raise IntegrityError(f"{where}: {error}") from error
