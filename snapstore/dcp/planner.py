"""SnapstorePlanner: the planner that keeps the state as it was given, beside DCP's flat view of it.

In: the state of a save. Out, to the writer: the state to store. DCP's flat keys lose what is not a dict with text as
keys, or a list: an OrderedDict, a key that is an int, an empty dict. `state_of` gives the state of any planner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.tensor import DTensor

from ..errors import InvalidInputError
from ..save.inputs import PartInput
from .target import NO_PROCESS

#: The key of the only leaf of a state that was staged.
STAGED = "snapstore.staged"
_CHANGING = ("set_up_planner", "create_local_plan", "lookup_object", "resolve_data", "transform_object")


@dataclass(slots=True, eq=False)
class Staged:
    """The copies of a state.

    Attributes:
        number: of the copies that the writer has made; it keeps the last ones alone.
        give: gives them once; it takes time.
        started: when the caller began to wait [s, time.monotonic].
        stall_s: how long it waited.
    """

    number: int
    give: Callable[[], Sequence[PartInput]] | None
    started: float
    stall_s: float
    _inputs: Sequence[PartInput] = ()

    def inputs(self) -> Sequence[PartInput]:
        """Return the copies."""
        if self.give is not None:
            self._inputs, self.give = self.give(), None
        return self._inputs

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(f"a state that was staged {NO_PROCESS}")


def staged_of(planner: SavePlanner) -> Staged | None:
    """Return the copies of a state that was staged; None: the planner has a state as it is.

    Raises:
        InvalidInputError: the planner changes the state, which it cannot do with copies.
    """
    flat = getattr(planner, "state_dict", None) or {}
    staged = next((leaf for leaf in flat.values() if type(leaf) is Staged), None) if len(flat) == 1 else None
    if staged is not None and not is_plain(planner):
        raise InvalidInputError(
            f"planner {type(planner).__name__}: changes names or values, and the state was staged as a whole; pass "
            "async_stager=torch.distributed.checkpoint.staging.DefaultStager() beside it, or change the state first"
        )
    return staged


class SnapstorePlanner(DefaultSavePlanner):
    """DefaultSavePlanner, which also keeps the state dict with its own containers and keys.

    Attributes:
        given: the state dict of the save that is being planned.
    """

    given: Any = None

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state dict of a save."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.given = state_dict


def is_plain(planner: SavePlanner) -> bool:
    """Return whether a planner leaves the state as it is: it overrides nothing that gives names or values."""
    kind = type(planner)
    known = (DefaultSavePlanner, SnapstorePlanner)
    return isinstance(planner, DefaultSavePlanner) and all(
        any(getattr(kind, name) is getattr(one, name) for one in known) for name in _CHANGING
    )


def state_of(planner: SavePlanner, plan: SavePlan) -> Any:
    """Return the state that a planner wants to be stored.

    Args:
        plan: what its `create_local_plan` returned.

    Raises:
        InvalidInputError: the planner is none that keeps its state dict; or it changes values that cannot be replaced.
    """
    if isinstance(planner, SnapstorePlanner) and is_plain(planner):
        return planner.given
    if not isinstance(planner, DefaultSavePlanner):
        raise InvalidInputError(
            f"planner {type(planner).__name__}: expected a subclass of DefaultSavePlanner, which keeps the state dict"
        )
    flat = dict(planner.state_dict)
    if not is_plain(planner):
        if not plan.usable:  # it is the one of the last save
            plan = SavePlanner._cached_save_plan.get(planner._cached_plans_key, plan)
        planned = {item.index.fqn for item in plan.items}
        flat = {key: value for key, value in flat.items() if key in planned}
        flat.update(_changed(planner, plan, flat))
    # FSDP's flattening of sharded tensors may change keys, which then have no path.
    return unflatten_state_dict(flat, {key: planner.mappings.get(key, (key,)) for key in flat})


def _changed(planner: DefaultSavePlanner, plan: SavePlan, flat: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors that a planner resolves to others than the state dict has, by key.

    Raises:
        InvalidInputError: it is a tensor in shards, or the new one has another shape.
    """
    changed: dict[str, Any] = {}
    for item in plan.items:
        key = item.index.fqn
        held = flat.get(key)
        if item.type is WriteItemType.BYTE_IO:
            continue
        value = planner.resolve_data(item)
        if not isinstance(value, torch.Tensor) or not isinstance(held, torch.Tensor):
            raise InvalidInputError(f"{key}: {type(planner).__name__} makes a {type(value).__name__} of a tensor")
        local = held.to_local() if isinstance(held, DTensor) else held
        if value is local or value is held:
            continue
        if value.shape != local.shape or type(held) not in (torch.Tensor, torch.nn.Parameter, DTensor):
            raise InvalidInputError(
                f"{key}: {type(planner).__name__} makes {tuple(value.shape)} of a {type(held).__name__} of local shape "
                f"{tuple(local.shape)}: change values and dtypes alone, or change the state before it is saved"
            )
        changed[key] = value if not isinstance(held, DTensor) else _like(held, value)
    return changed


def _like(held: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with another local tensor of the same shape."""
    return DTensor.from_local(
        local.detach(), held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )
