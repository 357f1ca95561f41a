"""The state of an optimizer in a restore: whether it fits, memory for it, and the stored values after a loader's casts.

In: an optimizer, and its state as decoded from a snapshot, with the forms of the parameters at the save. Out: the
differences, before anything is written; and the stored values in place of the ones that the loader has cast.

An optimizer over sharded parameters that has no state yet gets memory in their sharding; nothing communicates. Without
this a fresh optimizer would get whole tensors, which fit no shard. torch is only used if it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_not
from typing import Any

from ...text import log
from ...threads import imported
from ..tree.decode import Decoded, ParameterForm
from ..values.arrays import torch_dtype
from ..values.composite import SHARD, shape_of
from ..values.containers import CONTAINERS, Path, children, is_mapping
from ..values.sharded import dtensor_like
from ..values.tensors import Slot, TensorSpec, family
from ..walk.stateful import OptimizerState, numbers_of, parameter_list
from .differences import bare

_ORDER = (
    "pass the parameters in the order of the save; or restore() without the optimizer, bring its state into the order "
    "of the target by these names, and call load_state_dict"
)


# --- before anything is written ---


def states_in(tree: Any, path: Path) -> Iterator[Path]:
    """Yield the path of each dict in a decoded tree that looks like the `state_dict()` of an optimizer.

    Its parameters have numbers. With names, as DCP makes them, a rank may have some of its own.
    """
    if type(tree) not in CONTAINERS:
        return
    numbers = numbers_of(tree)
    if numbers and set(map(type, numbers)) == {int} and set(map(str, tree["state"])) <= set(map(str, numbers)):
        yield path
        return
    for element, _, child in children(tree):
        yield from states_in(child, (*path, element))


def with_numbers(state: Any) -> Any:
    """Return the state of an optimizer with numbers as keys of parameters: DCP's own save makes text of numbers."""
    texts = {str(number): number for number in numbers_of(state) or () if type(number) is int}
    if not any(type(key) is str and key in texts for key in (state["state"] if texts else ())):
        return state
    return {**state, "state": {texts.get(key, key): child for key, child in state["state"].items()}}


def differences(
    value: Any, stored: Any, present: Any, path: Path, spec_of: Callable[[Slot], TensorSpec], decoded: Decoded
) -> Iterator[tuple[Path, str]]:
    """Yield the path and a text of each difference between an optimizer and the stored state of one.

    Groups must have the same lengths, and names the same order. State of a parameter's own shape must have the shape
    that the parameter has here; other state may have any. If the program has registered a hook that changes a state
    dict before it is loaded, the hook decides. Other names are only logged: a wrapper's prefix may be new.

    Args:
        present: The result of the optimizer's `state_dict`.
    """
    numbers, here = numbers_of(stored), numbers_of(present)
    if numbers is None or here is None or getattr(value, "_optimizer_load_state_dict_pre_hooks", None):
        return
    groups, there = stored["param_groups"], present["param_groups"]
    lengths, expected = ([len(group["params"]) for group in some] for some in (groups, there))
    if lengths != expected:
        yield (
            (*path, "param_groups"),
            f"groups: expected {_groups(expected)} as in the target, got {_groups(lengths)}; make the optimizer with "
            "the groups of the save, also those of a later add_param_group",
        )
        return
    names = [_names(some) for some in (groups, there)]
    yield from _moved(names[0], names[1], path)
    forms, parameters = decoded.parameters.get(id(stored), (None, []))[1], parameter_list(value)
    if len(forms) != len(numbers) or len(parameters) != len(numbers):
        return
    of_group = list(chain.from_iterable([number] * length for number, length in enumerate(lengths)))
    for i, (number, form, parameter) in enumerate(zip(numbers, forms, parameters, strict=True)):
        shape = _shape_of(parameter, form.shape)
        if shape != form.shape:
            name = next((f" ({some[i]})" for some in names[::-1] if some[i] is not None), "")
            text = f"shape: expected {shape} as parameter {i}{name} of group {of_group[i]} has in the target, got "
            text += f"{form.shape}; give the parameter the shape of the save, or leave the optimizer out"
            below = (*path, "state", number)
            for at in _arrays_like(form, stored["state"].get(number), below, spec_of, decoded):
                yield at, text


def _shape_of(parameter: Any, unknown: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter, or `unknown` if it has none yet: a lazy module gets it when it is loaded."""
    try:
        return tuple(parameter.shape)
    except (AttributeError, RuntimeError):
        return unknown


def _groups(lengths: Sequence[int]) -> str:
    return f"{len(lengths)} group{'s' * (len(lengths) != 1)} of {', '.join(map(str, lengths)) or 'no'} parameters"


def _names(groups: Sequence[Any]) -> list[str | None]:
    """Return the name of each parameter without the prefixes of wrappers, or None if it has no name."""
    found: list[str | None] = []
    for group in groups:
        names = group.get("param_names")
        alike = type(names) is list and len(names) == len(group["params"])
        found += [bare(str(name)) for name in names] if alike else [None] * len(group["params"])
    return found


def _moved(stored: Sequence[str | None], here: Sequence[str | None], path: Path) -> Iterator[tuple[Path, str]]:
    """Yield a difference if a name is that of another parameter; log names that only one side has."""
    places = {name: i for i, name in enumerate(stored) if name is not None}
    pairs = [(i, name) for i, name in enumerate(here) if name is not None and stored[i] not in (None, name)]
    moved = next(((i, name) for i, name in pairs if name in places), None)
    if moved is not None:
        i, name = moved
        yield (
            (*path, "param_groups"),
            f"param_names: expected {name!r} as parameter {i}, as in the target, got {stored[i]!r}; in the snapshot "
            f"{name!r} is parameter {places[name]}: state belongs to a position, so {_ORDER}",
        )
    elif pairs:
        i, name = pairs[0]
        log.warning(
            "%s: %d parameters have other names than in the snapshot, the first is %r here and %r there; their state "
            "is restored by their positions",
            ".".join(map(str, path)) or "optimizer",
            len(pairs),
            name,
            stored[i],
        )


def _arrays_like(
    form: ParameterForm, stored: Any, path: Path, spec_of: Callable[[Slot], TensorSpec], decoded: Decoded
) -> Iterator[Path]:
    """Yield the path of each array in the state of a parameter that has the parameter's shape."""
    if type(stored) is Slot:
        if tuple(spec_of(stored).shape) == form.shape:
            yield path
    elif id(stored) in decoded.composites:
        if SHARD not in stored and tuple(shape_of(stored)[0]) == form.shape:
            yield path
    elif type(stored) in CONTAINERS:
        for element, _, child in children(stored):
            yield from _arrays_like(form, child, (*path, element), spec_of, decoded)


def loader_decides(stored: Any, decoded: Decoded, path: Path) -> tuple[str, ...]:
    """Return in what an array of a stored state may differ from the optimizer's: `load_state_dict` replaces them all.

    If the snapshot has no forms of parameters, the present state is the only one to compare with.
    """
    return ("shape", "dtype") if id(stored) in decoded.parameters else ()


# --- after the loader ---


def put_back(value: Any, state: Any, forms: Sequence[ParameterForm] | None, *, copy: bool = False) -> None:
    """Put the values of a loaded state in place of the ones that an optimizer's loader has cast.

    torch casts state to the dtype of its parameter, whatever dtype it had. Only parameters that have their stored dtype
    count, and tensors of the same shape under the same key; they go to the device that the loader has chosen. A cast to
    a dtype that is not the parameter's is one that a hook of the program wants.

    Args:
        state: The state that the optimizer has loaded.
        forms: The forms of the parameters at the save; None: their dtypes are the same.
        copy: Whether the optimizer gets copies of the values.
    """
    numbers, parameters = numbers_of(state), parameter_list(value)
    if numbers is None or len(numbers) != len(parameters) or (forms is not None and len(forms) != len(numbers)):
        return
    optimizer = value.optimizer if type(value) is OptimizerState else value
    hooks = bool(getattr(optimizer, "_optimizer_load_state_dict_post_hooks", None))
    for i, (number, parameter) in enumerate(zip(numbers, parameters, strict=True)):
        if forms is None or str(parameter.dtype) == f"torch.{forms[i].dtype}":
            loaded, wanted = optimizer.state.get(parameter), state["state"].get(number)
            if is_mapping(loaded):
                _put_back(loaded, wanted, parameter.dtype if hooks else None, copy)


def _put_back(loaded: Any, wanted: Any, dtype: Any, copy: bool) -> Any:
    """Return a loaded value, a list or dict itself, with the wanted tensors for casts to `dtype` (None: to any)."""
    import torch

    if isinstance(loaded, torch.Tensor):
        alike = isinstance(wanted, torch.Tensor) and wanted.shape == loaded.shape and wanted.dtype != loaded.dtype
        return wanted.to(loaded.device, copy=copy) if alike and dtype in (None, loaded.dtype) else loaded
    if type(loaded) not in CONTAINERS or type(wanted) is not type(loaded):
        return loaded
    there = {key: child for _, key, child in children(wanted)}
    new = {key: _put_back(child, there.get(key), dtype, copy) for _, key, child in children(loaded)}
    if type(loaded) is tuple:
        return tuple(new.values()) if any(map(is_not, new.values(), loaded)) else loaded
    for _, key, child in children(loaded):
        if new[key] is not child:
            loaded[key] = new[key]
    return loaded


# --- memory for sharded state ---


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
    numbers = numbers_of(present)
    if numbers is None or not is_mapping(stored) or not is_mapping(stored.get("state")):
        return present
    state = dict(present["state"])
    for number, parameter in zip(numbers, parameter_list(value), strict=True):
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
    if shape_of(plain)[0] != local.shape:
        return parameter
    empty = {
        name: torch.empty(spec_of(child).shape, dtype=torch_dtype(spec_of(child)), device=local.device)
        if type(child) is Slot
        else child
        for name, child in plain.items()
    }
    _, make = decoded.makers[id(plain)]
    return dtensor_like(parameter, make(empty))
