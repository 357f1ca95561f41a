"""Values that are each rank's own: a job's snapshot keeps one for every rank.

In: any value of a state. Out: whether each rank keeps its own. An object is each rank's own if it is stored as its
state (stateful.py) and its class has `per_rank = True`, as `PerRank` and `RngState` have. A process without ranks
stores such an object as it stores any other.
"""

from __future__ import annotations

from typing import Any

from .stateful import is_stateful


class PerRank:
    """A value of which each rank keeps its own: `state = {"loader": PerRank(loader.state_dict()), ...}`.

    Plain values and plain tensors of a state must be equal on all ranks, but not within a `PerRank`. A restore gives
    each rank its own value back if there are as many ranks.

    Args:
        value: containers, plain values, plain tensors, arrays, and objects with state_dict/load_state_dict.

    Attributes:
        value: the value; a restore into this object replaces it.
        per_rank: Makes a save of several ranks keep the value of each.
    """

    per_rank = True

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def state_dict(self) -> Any:
        """Return the value."""
        return self.value

    def load_state_dict(self, state: Any) -> None:
        """Replace the value by a restored one."""
        self.value = state


def is_per_rank(value: Any) -> bool:
    """Return whether each rank of a job keeps its own of this value."""
    return getattr(type(value), "per_rank", False) is True and is_stateful(value)
