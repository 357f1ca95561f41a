"""Blocks in host memory through a codec of the GPU: up, decode, down."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from ..digest import Bytes
from ..errors import IntegrityError
from .lanes import Lane
from .nvcomp import refused

_lane: Lane | None = None
_lock = threading.Lock()


def decode_blocks(codec: int, blocks: Sequence[Bytes], out: Bytes, block_bytes: int) -> None:
    """Fill `out` (n,) uint8 from its blocks, on the current device.

    Raises:
        IntegrityError: nvCOMP refused a block.
    """
    global _lane
    sizes = [block.size for block in blocks]
    offsets = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)])
    stored = np.zeros(int(offsets[-1]), np.uint8)
    for block, offset in zip(blocks, offsets.tolist(), strict=False):
        stored[offset : offset + block.size] = block
    starts = list(range(0, out.size, block_bytes))
    lengths = [min(block_bytes, out.size - start) for start in starts]
    with _lock:
        lane = _lane = _lane or Lane(torch.device("cuda", torch.cuda.current_device()))
        with lane.current():
            try:
                up, plain = torch.from_numpy(stored).to(lane.device), lane.empty(out.size)
                lane.codecs.decode(codec, up, offsets[:-1].tolist(), sizes, plain, starts, lengths)
                out[:] = plain[: out.size].cpu().numpy()
            except (RuntimeError, ValueError) as error:
                if not refused(error):
                    raise
                raise IntegrityError(f"nvCOMP: {error}") from error
            finally:
                lane.sync()
