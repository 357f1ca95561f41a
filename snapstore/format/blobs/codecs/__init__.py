"""Codecs: a plane to stored blocks and back; only sparse.py and sparse_decode.py take a whole delta.

docs/format.md, "Blob", defines codec ids and streams. Encoders may run in any thread: a compression context belongs to
one call or to one thread. Read zstd.py first: most planes go through it.

zstd.py           zstd (RFC 8878): one single-segment frame per block
deflate.py        raw deflate (RFC 1951): Huffman codes and runs of one byte
nvcomp.py         nvCOMP's ANS: a GPU decodes its blocks, a CPU cannot
sparse.py         the elements that differ from the base, as gaps and integer differences
key_order.py      the elements of a chunk, sorted by key
sparse_decode.py  consecutive sparse deltas of a chain, read together and applied in order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....arrays import Bytes
from ....errors import UnknownFormatError
from . import deflate, nvcomp, sparse, zstd

RAW = 0
ZSTD = zstd.ID
DEFLATE = deflate.ID
SPARSE = sparse.ID  # codes a whole delta, not a plane
ANS = nvcomp.ID
NAMES = {RAW: "raw", ZSTD: "zstd", DEFLATE: "deflate", SPARSE: "sparse", ANS: f"nvCOMP {nvcomp.MAJOR} ANS"}
BLOCK_BYTES = 64 * 1024
#: The ways to code new blobs: in standard streams that every machine reads, or in nvCOMP's ANS.
CODECS = ("portable", "ans")


#: (stored blocks of a plane, out (n,) uint8, plain bytes of a block): fills `out`; IntegrityError: one does not decode.
Decoder = Callable[[Sequence[memoryview], Bytes, int], None]
_DECODERS: dict[int, Decoder] = {ZSTD: zstd.decode, DEFLATE: deflate.decode, ANS: nvcomp.decode}


def decoder(codec: int, where: str) -> Decoder:
    """Return the decoder of a codec id.

    Raises:
        UnknownFormatError: this release does not know the id, or it is SPARSE, which codes no plane.
    """
    try:
        return _DECODERS[codec]
    except KeyError:
        hint = "unknown" if codec != SPARSE else "sparse, which codes all planes of a delta and stands in plane 0"
        if 64 <= codec < 128:
            hint = f"nvCOMP {codec - 64}'s own format, which only nvCOMP {codec - 64} reads: use the release of "
            hint += "snapstore that wrote it, and 'snapstore recode' there"
        raise UnknownFormatError(f"{where}: this release of snapstore does not read codec {codec} ({hint})") from None
