"""Blocks in host memory through a codec of the GPU: up, decode, down."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from ...arrays import Bytes
from ...errors import IntegrityError
from . import nvcomp
from .capture import beside_captures
from .streams import Lane

_lane: Lane | None = None
_lock = threading.Lock()


def decode_blocks(codec: int, blocks: Sequence[Bytes], out: Bytes, block_bytes: int) -> None:
    """Fill `out` (n,) uint8 from its blocks, on the current device.

    Raises:
        IntegrityError: a block does not fill its room.
    """
    global _lane
    sizes = np.array([block.size for block in blocks])
    offsets = np.cumsum([0, *(-(-sizes // 16) * 16)])
    stored = np.zeros(int(offsets[-1]), np.uint8)
    for block, offset in zip(blocks, offsets.tolist(), strict=False):
        stored[offset : offset + block.size] = block
    starts = np.arange(0, out.size, block_bytes)
    lengths = np.minimum(block_bytes, out.size - starts)
    with _lock, beside_captures():  # in a thread of a pool
        lane = _lane = _lane or Lane(torch.device("cuda", torch.cuda.current_device()))
        with lane.current():
            try:
                up, plain = torch.from_numpy(stored).to(lane.device), lane.empty(out.size)
                places = up.data_ptr() + offsets[:-1], sizes, plain.data_ptr() + starts, lengths
                found = nvcomp.decode(lane, codec, *places).cpu()
                if (nvcomp.sizes_of(found) != lengths).any():
                    raise IntegrityError("nvCOMP: a block does not give as many bytes as it should")
                out[:] = plain[: out.size].cpu().numpy()
            finally:
                lane.sync()
