"""Delta choice: whether a changed chunk is stored as a delta, its difference from a base, or full.

In: estimated sizes, chain sizes, generations; numbers or arrays. Out: the decision, in the same form.
"""

from __future__ import annotations

from typing import Any

#: A delta must be this much smaller than the full chunk, as every restore pays for one more read.
MIN_SAVING = 1 / 32
#: The most that all blobs of a chain may take together, as a multiple of the full encoded chunk.
MAX_CHAIN_RATIO = 4.0
DEFAULT_MAX_DEPTH = 8


def pays(delta_bytes: Any, full_bytes: Any, chain_bytes: Any) -> Any:
    """Return whether a delta of about `delta_bytes` is worth more than a full chunk of about `full_bytes`.

    Args:
        chain_bytes: stored bytes of every blob that the base needs. All arguments are numbers or arrays.
    """
    return (delta_bytes <= full_bytes * (1 - MIN_SAVING)) & (chain_bytes + delta_bytes <= MAX_CHAIN_RATIO * full_bytes)


def is_keyframe(generation: int, chunk_index: Any, max_depth: int) -> Any:
    """Return whether a changed chunk is stored full in this generation; `chunk_index` is an int or an array.

    Every chunk is full once in max_depth + 1 generations, and neighbours in different ones, so that no snapshot stores
    all of them in full.
    """
    return (generation + chunk_index) % (max_depth + 1) == 0
