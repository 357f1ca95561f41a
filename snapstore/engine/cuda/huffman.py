"""Huffman: skewed noise planes to zstd frames of Huffman-coded literals and back, by kernels of this package.

The frames follow RFC 8878, so every zstd decoder reads them. nvCOMP's codecs of standard streams are ten times as slow
on such planes (docs/design/gpu-engine.md). Calls return before the device is done.
"""

from __future__ import annotations

import numpy as np
import torch

from ...arrays import Column
from ...format.blobs import codecs
from .nvcomp import Coder
from .streams import WorkStream

HUFFMAN = Coder(codecs.ZSTD, "", b"", codecs.BLOCK_BYTES, codecs.BLOCK_BYTES + 256, 0)


def encode(work: WorkStream, sources: Column, lengths: Column, destinations: Column) -> torch.Tensor:
    """Begin to encode each block as a frame, from address to address.

    Args:
        sources: (n,) addresses of the blocks.
        lengths: (n,) of the blocks, 1 to 65,791 bytes.
        destinations: (n,) addresses, multiples of 4, with room for 16 bytes more than the block.

    Returns:
        (n,) int32, sizes of the frames [bytes], in pinned memory; valid once the stream is done.
    """
    sizes = work.empty(4 * len(sources))
    columns = (column.astype(np.uint64) for column in (sources, destinations, lengths))
    work.launch("huffman_encode", (len(sources),), *work.upload(*columns), sizes)
    return work.fetch(sizes[: 4 * len(sources)].view(torch.int32))


def decode(work: WorkStream, sources: Column, sizes: Column, destinations: Column, lengths: Column) -> None:
    """Begin to decode frames for which `zstd.is_literals` holds, each to its own memory.

    A damaged frame leaves garbage, but only in its own memory.

    Args:
        sources, sizes: (n,) addresses and sizes of the frames [bytes].
        destinations, lengths: (n,) addresses and lengths of the plain blocks [bytes].
    """
    order = np.argsort(-lengths, kind="stable")  # one warp decodes a frame, so the longest frames begin first
    columns = (column[order].astype(np.uint64) for column in (sources, sizes, destinations, lengths))
    work.launch("huffman_decode", (len(sources),), *work.upload(*columns))
