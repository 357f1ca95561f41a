"""The extension in C, from the sources in native/."""

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes, Column
from .spans import Place

#: Bytes of scratch memory that a call needs beside those of its longest chunk.
SCRATCH_BYTES: int
#: And for each of these; if it may write sparse deltas.
SCRATCH_PER_BYTE: int
SPARSE_SCRATCH_PER_BYTE: int
#: A frame may take this many bytes more than its block.
FRAME_SLACK: int

def digests(chunks: Place, copies: Place | None, seed: int, out: Bytes) -> None:
    """Fill `out`, (n, 16), with the digests of chunks; copy the chunks to memories that do not overlap with them."""

def sample(
    chunks: Place, bases: Place, sizes: Bytes, layouts: Bytes, mode: int, terms: Column, sampled: npt.NDArray[np.void]
) -> None:
    """Fill the rows of `sampled`, (n,) spans.SAMPLED, that are not valid.

    Args:
        sizes, layouts: (n,) of elements.
        mode: of deltas, 1: differences, 2: XORs.
        terms: planes.ENTROPY_TERMS.
    """

def examine(
    chunks: Place,
    bases: Place,
    copies: Place | None,
    sizes: Bytes,
    layouts: Bytes,
    mode: int,
    terms: Column | None,
    sampled: npt.NDArray[np.void],
    seed: int,
    digests: Bytes,
    base_digests: Bytes,
    copied: Bytes,
) -> None:
    """Hash chunks and their bases; copy and sample the chunks that differ from theirs.

    Args:
        sizes, layouts, mode, sampled: see `sample`; the rows of other chunks are left as they are.
        terms: None: nothing is sampled.
        digests, base_digests: (n, 16), filled; no digest is written for a missing base.
        copied: (n,), filled: NOT_COPIED, COPIED, or CHANGED: the copy has another digest.
    """

def encode(
    chunks: Place,
    bases: Place,
    sizes: Bytes,
    layouts: Bytes,
    mode: int,
    digests: Bytes,
    base_digests: Bytes,
    kinds: Bytes,
    how: Bytes,
    most: Column,
    entries: npt.NDArray[np.void],
    out: Bytes,
    scratch: Bytes,
) -> None:
    """Encode chunks, blob after blob, into `out`.

    Args:
        mode: of deltas, 1: differences, 2: XORs.
        kinds: (n, 8) of planes; see plane_kinds.py.
        how: (n,) BY_REFERENCE, STORE_FULL, STORE_DELTA, SPARSE_OR_FULL or SPARSE_OR_DELTA.
        most: (n,) int64, the most bytes of a sparse delta; a larger one is stored full, or in planes.
        entries: (n,) blob.ENTRY, filled; length 0: the blob is not written.
    """

def decode(
    stored: Bytes,
    offsets: Column,
    lengths: Column,
    counts: Column,
    digests: Bytes,
    each: Bytes | None,
    outs: Place,
    bases: Place,
    seed: int,
    done: Bytes,
    scratch: Bytes,
) -> None:
    """Rebuild chunks from their chains; see DecodeBatch.

    Args:
        each: (m, 16) digests of the chunks of all blobs, which are verified too; None: only those of `digests` are.
        done: (n,), filled: 1 if a chunk is rebuilt and verified.
    """

def checksum(data: Bytes) -> int:
    """Return the XXH3-64."""

def split(source: Bytes, base: Bytes | None, size: int, layout: int, mode: int, out: Bytes) -> None:
    """Split elements into planes; mode 0: without a base, 1: their differences from it, 2: exclusive or."""

def merge(planes: Bytes, base: Bytes | None, size: int, layout: int, mode: int, out: Bytes) -> None:
    """Merge planes; the inverse of `split`."""

def encode_frame(block: Bytes, out: Bytes) -> int:
    """Write a block as a zstd frame; return its length."""

def decode_frame(frame: Bytes, out: Bytes) -> bool:
    """Fill `out` from a frame; return False if the reference must decode it."""

def encode_runs(block: Bytes, out: Bytes) -> int:
    """Write a block as a deflate stream; return its length, 0 if it would not shrink."""

def decode_runs(stream: Bytes, out: Bytes) -> bool:
    """Fill `out` from a deflate stream; return False if the reference must decode it."""

def use_avx2(wanted: bool) -> bool:
    """Use AVX2 or not, in this process; return whether it is used."""

def uses_avx2() -> bool:
    """Return whether AVX2 is used."""
