"""The state of an optimizer over sharded parameters, before its first step: memory in the parameters' sharding.

In: an optimizer of torch.optim, and its state as decoded from a snapshot. Out: its present state, with a new DTensor in
the place of each stored array that the optimizer lacks and that has the shape of a DTensor parameter. Nothing
communicates. Without this a fresh optimizer would get whole tensors, which fit no shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..threads import imported
from .arrays import torch_dtype
from .composite import SHAPE
from .containers import is_mapping
from .sharded import dtensor_like
from .tensors import Slot, TensorSpec, family
from .tree_decode import Decoded


def with_sharded_state(
    value: Any, stored: Any, present: Any, spec_of: Callable[[Slot], TensorSpec], decoded: Decoded
) -> Any:
    """Return the state of an object, with memory for the sharded arrays that it lacks if it is an optimizer.

    Args:
        stored: The decoded state of the snapshot.
        present: The result of the object's `state_dict`; it is not changed.
        decoded: Makes the composite tensors, which are local tensors.
    """
    torch, tensors = imported("torch"), imported("torch.distributed.tensor")
    if torch is None or tensors is None or not isinstance(value, torch.optim.Optimizer):
        return present
    if not all(is_mapping(state) and is_mapping(state.get("state")) for state in (stored, present)):
        return present
    numbers = [number for group in present["param_groups"] for number in group["params"]]
    parameters = [parameter for group in value.param_groups for parameter in group["params"]]
    state = dict(present["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        arrays = stored["state"].get(number)
        if not isinstance(parameter, tensors.DTensor) or not is_mapping(arrays) or state.get(number):
            continue
        local = parameter.to_local().detach()
        state[number] = {
            name: dtensor_like(parameter, torch.empty_like(local, dtype=torch_dtype(spec_of(slot))))
            for name, slot in arrays.items()
            if type(slot) is Slot and family(slot.tag) == "tensor" and spec_of(slot).shape == tuple(parameter.shape)
        }
        for name, plain in arrays.items():
            if id(plain) in decoded.composites and id(plain) in decoded.makers:
                state[number][name] = _composite(parameter, plain, spec_of, decoded)
    return {**present, "state": state}


def _composite(parameter: Any, plain: Any, spec_of: Callable[[Slot], TensorSpec], decoded: Decoded) -> Any:
    """Return a DTensor like a parameter, with a new composite tensor as its local tensor.

    If the local tensor of the parameter has another shape, return the parameter, for which it is a difference.
    """
    import torch

    local = parameter.to_local().detach()
    if plain[SHAPE] != local.shape:
        return parameter
    empty = {
        name: torch.empty(spec_of(child).shape, dtype=torch_dtype(spec_of(child)), device=local.device)
        if type(child) is Slot
        else child
        for name, child in plain.items()
    }
    _, make = decoded.makers[id(plain)]
    return dtensor_like(parameter, make(empty))
