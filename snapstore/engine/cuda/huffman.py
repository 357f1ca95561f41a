"""Huffman: planes that are noise with a skew, to zstd frames of Huffman-coded literals and back, by kernels of our own.

The frames are RFC 8878's, so every zstd reads them; nvCOMP's codecs of standard streams are ten times as slow on such
planes (docs/design/gpu-engine.md). Calls return before the device is done.
"""

from __future__ import annotations

import numpy as np
import torch

from ...arrays import Column
from ...format import codecs
from .nvcomp import Coder
from .streams import Lane

HUFFMAN = Coder(codecs.ZSTD, "", b"", codecs.BLOCK_BYTES, codecs.BLOCK_BYTES + 256, 0)


def encode(lane: Lane, sources: Column, lengths: Column, destinations: Column) -> torch.Tensor:
    """Begin to make a frame of every block, addresses (n,) to addresses (n,), lengths 1 to 65,791 bytes.

    Args:
        destinations: aligned to 4 bytes, each with room for 16 bytes more than its block.

    Returns:
        (n,) int32, sizes of the frames, in pinned memory: there once the stream is done.
    """
    sizes = lane.empty(4 * len(sources))
    columns = (column.astype(np.uint64) for column in (sources, destinations, lengths))
    lane.launch("huffman_encode", (len(sources),), *lane.upload(*columns), sizes)
    return lane.fetch(sizes[: 4 * len(sources)].view(torch.int32))


def decode(lane: Lane, sources: Column, sizes: Column, destinations: Column, lengths: Column) -> None:
    """Begin to fill every room with what its frame holds, of those that `zstd.is_literals` names.

    A damaged frame leaves garbage, in its own room.
    """
    columns = (column.astype(np.uint64) for column in (sources, sizes, destinations, lengths))
    lane.launch("huffman_decode", (len(sources),), *lane.upload(*columns))
