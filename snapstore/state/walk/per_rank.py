"""Values that differ by rank: the snapshot of a job keeps one value for every rank.

In: any value of a state. Out: whether each rank keeps its own. An object is each rank's own if it is stored as its
state (stateful.py) and its class has `per_rank = True`, as `PerRank` and `RngState` have. A process without ranks
stores such an object as it stores any other. A restore on another number of ranks makes `RankValues` of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..values.classes import view_of
from ..values.containers import Path, leaves
from .stateful import is_stateful


class PerRank:
    """A value that each rank saves for itself: `state = {"loader": PerRank(loader.state_dict()), ...}`.

    Plain values and plain tensors of a state must be equal on all ranks, but not within a `PerRank`. A restore gives
    each rank its own value back, if as many ranks restore as saved; else `restore` returns `RankValues`.

    The value may be an object, or have objects in its containers: `PerRank(loader)`. `restore_into` then keeps
    each object and calls its `load_state_dict` with the state of its rank. Such a value is filled as a whole state is:
    its keys must be those of the snapshot.

    Args:
        value: containers, plain values, plain tensors, arrays, and objects with state_dict/load_state_dict.

    Attributes:
        value: the value; a restore into this object replaces it, unless it is or has objects with state_dict.
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


class RankValues(PerRank, Mapping[int, Any]):
    """The values of all ranks at one place of a state, by rank: `state["rng"][0]` is the value of rank 0.

    `restore` returns it for each `PerRank` and `RngState` if another number of ranks restores than saved, such as one
    process. A rank that had no such value is not among its keys. If it is saved again, it is stored as a dict by rank.

    Args:
        value: the values by rank.

    Attributes:
        value: the same, as a dict.
    """

    def __init__(self, value: Mapping[int, Any]) -> None:
        super().__init__(dict(value))

    def __repr__(self) -> str:
        return f"RankValues({self.value!r})"

    def __getitem__(self, rank: int) -> Any:
        return self.value[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)


def is_per_rank(value: Any) -> bool:
    """Return whether each rank of a job keeps its own of this value."""
    return getattr(type(value), "per_rank", False) is True and is_stateful(value)


def has_objects(value: Any, path: Path = ()) -> bool:
    """Return whether a value is an object that is stored as its state, or has one in its containers and dataclasses.

    Raises:
        InvalidInputError: The value is nested too deeply, or contains itself.
    """
    return any(
        is_stateful(leaf) or ((view := view_of(leaf)) is not None and has_objects(view, below))
        for below, leaf in leaves(value, path)
    )
