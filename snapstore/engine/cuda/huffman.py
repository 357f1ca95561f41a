"""Huffman: skewed noise planes to zstd frames of Huffman-coded literals and back, by kernels of this package.

The frames follow RFC 8878, so every zstd reads them. nvCOMP's codecs of standard streams are ten times as slow on such
planes (docs/design/gpu-engine.md). Calls return before the device is done.
"""

from __future__ import annotations

import numpy as np
import torch

from ...arrays import Column
from ...format import codecs
from .nvcomp import Coder
from .streams import WorkStream

HUFFMAN = Coder(codecs.ZSTD, "", b"", codecs.BLOCK_BYTES, codecs.BLOCK_BYTES + 256, 0)


def encode(work: WorkStream, sources: Column, lengths: Column, destinations: Column) -> torch.Tensor:
    """Begin to make a frame from each block, addresses (n,) to addresses (n,), lengths 1 to 65,791 bytes.

    Args:
        destinations: aligned to 4 bytes, each with room for 16 bytes more than its block.

    Returns:
        (n,) int32, sizes of the frames, in pinned memory; valid once the stream is done.
    """
    sizes = work.empty(4 * len(sources))
    columns = (column.astype(np.uint64) for column in (sources, destinations, lengths))
    work.launch("huffman_encode", (len(sources),), *work.upload(*columns), sizes)
    return work.fetch(sizes[: 4 * len(sources)].view(torch.int32))


def decode(work: WorkStream, sources: Column, sizes: Column, destinations: Column, lengths: Column) -> None:
    """Begin to decode frames for which `zstd.is_literals` holds, each into its own room.

    A damaged frame leaves garbage, in its own room only.
    """
    order = np.argsort(-lengths, kind="stable")  # a warp decodes a frame, so the longest begin first
    columns = (column[order].astype(np.uint64) for column in (sources, sizes, destinations, lengths))
    work.launch("huffman_decode", (len(sources),), *work.upload(*columns))
