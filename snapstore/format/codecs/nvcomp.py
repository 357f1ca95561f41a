"""nvCOMP's ANS, for readers in host memory: its blocks go to a GPU and come back. No CPU reads them.

nvCOMP does not promise its streams beyond a major release (its header says so of 6.0), hence the id: 64 + the major.
Engines of devices decode whole batches themselves (engine/cuda/engine.py); this serves check, diff and restores into
host memory, one plane at a time. The decoder itself comes from the engine registry: the format knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...arrays import Bytes
from ...errors import CapabilityError

MAJOR = 6
ID = 64 + MAJOR

BlockDecoder = Callable[[int, Sequence[Bytes], Bytes, int], None]  # codec, blocks, out (n,) uint8, bytes of a block
_find: Callable[[], BlockDecoder] | None = None


def decode_with(find: Callable[[], BlockDecoder]) -> None:
    """Set how the decoder is found; `find` raises CapabilityError or ImportError where there is none."""
    global _find
    _find = find


def decode(blocks: Sequence[memoryview], out: Bytes, block_bytes: int) -> None:
    """Fill `out`.

    Raises:
        CapabilityError: no GPU here, or no nvCOMP of this major.
        IntegrityError: a block gives other than its length.
    """
    try:
        if _find is None:
            raise CapabilityError("no engine is loaded")
        decode_blocks = _find()
    except (CapabilityError, ImportError) as error:
        raise CapabilityError(
            f"stored in nvCOMP {MAJOR}'s ANS, which only a GPU with nvCOMP {MAJOR} reads ({error}); "
            "restore it there, or run 'snapstore recode' there first"
        ) from error
    decode_blocks(ID, [np.frombuffer(block, np.uint8) for block in blocks], out, block_bytes)
