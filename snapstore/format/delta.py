"""delta."""

from __future__ import annotations

from typing import Any

#: A delta must be this much smaller than the full chunk, to pay for the extra read at every restore.
MIN_SAVING = 1 / 32


#: All blobs of a chain together, as a multiple of the full encoded chunk.
MAX_CHAIN_RATIO = 4.0


def pays(delta_bytes: Any, full_bytes: Any, chain_bytes: Any) -> Any:
    """Whether to store a delta of about `delta_bytes` where the full chunk takes about `full_bytes`; numbers or arrays.

    Args:
        chain_bytes: stored bytes of every blob that the base needs.
    """
    return (delta_bytes <= full_bytes * (1 - MIN_SAVING)) & (chain_bytes + delta_bytes <= MAX_CHAIN_RATIO * full_bytes)


DEFAULT_MAX_DEPTH = 8


def is_keyframe(generation: int, chunk_index: Any, max_depth: int) -> Any:
    """Whether a changed chunk is stored full in this generation; an int, or an array of them.

    Every chunk has its turn once in max_depth + 1 generations, and neighbours have theirs in different ones, so no
    snapshot pays for all of them.
    """
    return (generation + chunk_index) % (max_depth + 1) == 0
