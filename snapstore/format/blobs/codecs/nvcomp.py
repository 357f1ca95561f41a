"""nvCOMP's ANS, for readers in host memory: a GPU decodes the blocks, a CPU cannot.

nvCOMP promises to read its streams only within a major release (the header of 6.0 says so). So the codec's id is 64 +
the major. CUDA engines decode whole batches themselves (engine/cuda/decoding.py). This module serves check, diff and
restores into host memory, one plane at a time. engine/registry.py sets the decoder: format/ imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ....arrays import Bytes
from ....errors import CapabilityError

MAJOR = 6
ID = 64 + MAJOR

BlockDecoder = Callable[[int, Sequence[Bytes], Bytes, int], None]  # codec, blocks, out (n,) uint8, bytes of a block
_find: Callable[[], BlockDecoder] | None = None


def decode_with(find: Callable[[], BlockDecoder]) -> None:
    """Set the function that finds the decoder; it raises CapabilityError or ImportError if there is none."""
    global _find
    _find = find


def decode(blocks: Sequence[memoryview], out: Bytes, block_bytes: int) -> None:
    """Fill `out` from its blocks.

    Raises:
        CapabilityError: there is no GPU here, or no nvCOMP of this major.
        IntegrityError: a block does not decode to its length.
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
