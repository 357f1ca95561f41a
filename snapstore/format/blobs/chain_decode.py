"""Chain decode: rebuild one chunk from the blobs of its chain.

In: blobs, newest first, and the plain bytes of the oldest one's base if that blob is a delta. Out: the chunk, verified
by its digest. Links are applied from the oldest to the newest: each is a difference that is added to the plain bytes of
its base, as planes or as the elements that changed, or an XOR with them. Sums and XORs do not commute, so the order
matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...arrays import Bytes
from ...errors import FormatError, IntegrityError
from ..hashing import digest
from . import codecs, planes
from .blob import FULL, NO_BASE, XOR, Header, decode_planes, length_of, parse
from .codecs import sparse_decode


class ReferenceMismatchError(IntegrityError):
    """A manifest's reference contradicts the header of its blob, which may be whole."""


def prove_chain(
    blobs: Sequence[memoryview], wheres: Sequence[str], digests: Sequence[bytes], out: Bytes, *, seed: int
) -> int:
    """Rebuild one chunk as `decode_chain` does; verify all chunks of its chain.

    Args:
        digests: of each blob's chunk by the manifest, newest first.

    Returns:
        How many blobs, from the newest on, decode to their chunks: all of them, or 1 if an older one does not.

    Raises:
        ReferenceMismatchError: a blob is of another chunk than the manifest says.
        FormatError, IntegrityError: the requested chunk cannot be rebuilt.
    """
    headers = _parsed(blobs, wheres, digests[0], None, out)
    for header, expected, where in zip(headers, digests, wheres, strict=True):
        if header.digest != expected:
            raise ReferenceMismatchError(
                f"{where}: blob of chunk {header.digest.hex()}, but the manifest says {expected.hex()}"
            )
    try:
        for i in _apply_links(blobs, headers, wheres, None, out):
            _compare(out, digests[i], wheres[i], seed)
    except (FormatError, IntegrityError):
        decode_chain(blobs, wheres, digests[0], out, seed=seed)
        return 1
    return len(blobs)


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
        seed: the repository's digest seed.

    Raises:
        ReferenceMismatchError: a blob has another length than the manifest says.
        FormatError, IntegrityError: a blob is damaged or does not continue the chain; `out` then holds garbage.
    """
    headers = _parsed(blobs, wheres, chunk_digest, base, out)
    for _ in _apply_links(blobs, headers, wheres, base, out):
        pass
    _compare(out, chunk_digest, wheres[0], seed)


def _parsed(
    blobs: Sequence[memoryview], wheres: Sequence[str], expected: bytes, base: Bytes | None, out: Bytes
) -> list[Header]:
    """Return the headers of a chain; `expected` is its chunk's digest.

    Raises:
        FormatError, IntegrityError: a blob is damaged, or does not continue the chain.
    """
    headers = []
    for blob, where in zip(blobs, wheres, strict=True):
        header = parse(blob, where)
        if length_of(header) != len(blob):
            raise ReferenceMismatchError(
                f"{where}: blob of {length_of(header)} bytes, but the manifest says {len(blob)}; run 'snapstore check'"
            )
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
    return headers


def _apply_links(
    blobs: Sequence[memoryview], headers: Sequence[Header], wheres: Sequence[str], base: Bytes | None, out: Bytes
) -> Iterator[int]:
    """Fill `out` with each blob's chunk in turn, the oldest first; yield the blob's number each time."""
    deltas: Iterator[bool] = iter(())  # applies consecutive sparse deltas
    for i in range(len(blobs) - 1, -1, -1):
        blob, header, where = blobs[i], headers[i], wheres[i]
        if base is None:
            planes.merge(decode_planes(blob, header, where), out, header.layout)
        elif header.transform == XOR:
            planes.unxor(decode_planes(blob, header, where), base, out, header.layout)
        elif header.codecs[0] == codecs.SPARSE:
            if base is not out:
                out[:] = base
            if any(header.codecs[1:]):
                raise IntegrityError(f"{where}: sparse, but codecs {header.codecs.hex()}")
            try:
                if not next(deltas, False):
                    deltas = _sparse_deltas(blobs[: i + 1], headers[: i + 1], out)
                    next(deltas)
            except IntegrityError as error:
                raise IntegrityError(f"{where}: {error}") from error
        else:
            planes.add(decode_planes(blob, header, where), base, out)
        base = out
        yield i


def _sparse_deltas(blobs: Sequence[memoryview], headers: Sequence[Header], out: Bytes) -> Iterator[bool]:
    """Apply the last blob, a sparse delta, then those before it of equal size and layout; yield after each."""
    newest, links = headers[-1], list[sparse_decode.StoredDelta]()
    for blob, header in zip(reversed(blobs), reversed(headers), strict=True):
        kinds = [(h.codecs[0], h.element_size, h.layout) for h in (header, newest)]
        if kinds[0] != kinds[1]:
            break
        payload = blob[header.payload_start : header.payload_start + header.payload_bytes]
        links.append(sparse_decode.StoredDelta(payload, header.block_lengths, header.block_bytes))
    return sparse_decode.apply_all(links, out.view(f"u{newest.element_size}"), newest.layout)


def _compare(out: Bytes, expected: bytes, where: str, seed: int) -> None:
    got = digest(out, seed)
    if got != expected:
        raise IntegrityError(
            f"{where}: digest mismatch, expected {expected.hex()}, got {got.hex()}; run 'snapstore check --restore'"
        )
