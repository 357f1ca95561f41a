"""Decode blocks that lie in host memory with nvCOMP: upload, decode, download."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from ...arrays import Bytes
from ...errors import IntegrityError
from . import nvcomp
from .graph_capture import beside_captures
from .streams import WorkStream

_stream: WorkStream | None = None
_lock = threading.Lock()


def decode_blocks(codec: int, blocks: Sequence[Bytes], out: Bytes, block_bytes: int) -> None:
    """Fill `out` (n,) uint8 from its blocks, on a device that this process uses already, if there is one.

    Args:
        block_bytes: plain bytes of each block but the last.

    Raises:
        IntegrityError: a block does not decode to its length.
    """
    global _stream
    sizes = np.array([block.size for block in blocks])
    offsets = np.cumsum([0, *(-(-sizes // 16) * 16)])
    stored = np.zeros(int(offsets[-1]), np.uint8)
    for block, offset in zip(blocks, offsets.tolist(), strict=False):
        stored[offset : offset + block.size] = block
    starts = np.arange(0, out.size, block_bytes)
    lengths = np.minimum(block_bytes, out.size - starts)
    with _lock, beside_captures():  # several threads of a pool may call it
        work = _stream = _stream or WorkStream(_device())
        with work.current():
            try:
                up, plain = torch.from_numpy(stored).to(work.device), work.empty(out.size)
                places = up.data_ptr() + offsets[:-1], sizes, plain.data_ptr() + starts, lengths
                found = nvcomp.decode(work, codec, *places).cpu()
                if (nvcomp.sizes_of(found) != lengths).any():
                    raise IntegrityError("nvCOMP: a block does not decode to its length")
                out[:] = plain[: out.size].cpu().numpy()
            finally:
                work.sync()


def _device() -> torch.device:
    """Return a device that has a context already: another one takes half a gigabyte.

    The threads of a pool have device 0 as their current one, whatever the program has chosen.
    """
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda _: False)
    used = [index for index in range(torch.cuda.device_count()) if has_context(index)]
    return torch.device("cuda", used[0] if used else torch.cuda.current_device())
