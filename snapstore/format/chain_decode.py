"""Chain decode: rebuild one chunk from the blobs of its chain.

In: blobs, newest first, and the plain bytes of the last one's base if that is a delta. Out: the chunk, verified by its
digest. Links are applied from the oldest to the newest: each is a difference that is added to the plain bytes of its
base, as planes or as the elements that changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays import Bytes
from ..errors import FormatError, IntegrityError
from . import codecs, planes
from .blob import FULL, NO_BASE, Header, decode_planes, parse
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
    """Rebuild one chunk from its chain, newest first.

    Args:
        blobs: the stored blobs; all but the last are differences, and the base of each is the chunk of the next.
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
        if (header.transform == FULL) != (header.base == NO_BASE):
            names = "no base" if header.base == NO_BASE else "a base"
            raise IntegrityError(f"{where}: transform {header.transform}, but it names {names}")
        headers.append(header)
        expected = header.base
    if expected != NO_BASE and base is None:
        raise IntegrityError(f"{wheres[-1]}: the chain ends in a delta; its base {expected.hex()} is not referenced")
    if expected == NO_BASE and base is not None:
        raise IntegrityError(f"{wheres[-1]}: the chain ends in a full blob, which has no base")
    for i in range(len(blobs) - 1, -1, -1):
        _apply(blobs[i], headers[i], wheres[i], base, out)
        base = out
    got = digest(out, seed)
    if got != chunk_digest:
        raise IntegrityError(
            f"{wheres[0]}: digest mismatch, expected {chunk_digest.hex()}, got {got.hex()}; "
            "run 'snapstore check --restore'"
        )


def _apply(blob: memoryview, header: Header, where: str, base: Bytes | None, out: Bytes) -> None:
    """Fill `out` with the chunk of a blob on a plain base, which may be `out` itself."""
    if base is None:
        planes.merge(decode_planes(blob, header, where), out, header.layout)
    elif header.codecs[0] != codecs.SPARSE:
        planes.add(decode_planes(blob, header, where), base, out)
    else:
        if base is not out:
            out[:] = base
        _apply_sparse(blob, header, where, out)


def _apply_sparse(blob: memoryview, header: Header, where: str, out: Bytes) -> None:
    """Turn the base of a sparse delta, which `out` holds, into its chunk."""
    if any(header.codecs[1:]):
        raise IntegrityError(f"{where}: sparse, but codecs {header.codecs.hex()}")
    payload = blob[header.payload_start : header.payload_start + header.payload_bytes]
    try:
        sparse.apply(payload, header.block_lengths, out, header.element_size, header.layout, header.block_bytes)
    except IntegrityError as error:
        raise IntegrityError(f"{where}: {error}") from error
