"""nvCOMP's ANS, for readers in host memory: its blocks go to a GPU and come back. No CPU reads them.

nvCOMP does not promise its streams beyond a major release (its header says so of 6.0), hence the id: 64 + the major.
Engines of devices decode whole batches themselves (cuda/engine.py); this serves check, diff and restores into host
memory, a plane at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..digest import Bytes
from ..errors import CapabilityError

MAJOR = 6
ID = 64 + MAJOR


def decode(blocks: Sequence[memoryview], out: Bytes, block_bytes: int) -> None:
    """Fill `out`.

    Raises:
        CapabilityError: no GPU here, or no nvCOMP of this major.
        IntegrityError: a block gives other than its length.
    """
    try:
        from ..cuda import require

        require()
        from ..cuda.hosted import decode_blocks
    except (CapabilityError, ImportError) as error:
        raise CapabilityError(
            f"stored in nvCOMP {MAJOR}'s ANS, which only a GPU with nvCOMP {MAJOR} reads ({error}); "
            "restore it there, or run 'snapstore recode' there first"
        ) from error
    decode_blocks(ID, [np.frombuffer(block, np.uint8) for block in blocks], out, block_bytes)
