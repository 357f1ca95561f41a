"""Objects with `state_dict` and `load_state_dict`, which are stored as their state.

In: any value in a state. Out: whether it is such an object, its state, and whether its names can be checked. This calls
the user's `state_dict`, so it belongs to the thread that owns the state. torch is used only if the user has imported
it; only this module knows the special cases of its schedulers and modules.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from ..errors import InvalidInputError
from .containers import CONTAINERS, Path, shown
from .tensors import is_array


def is_stateful(value: Any) -> bool:
    """Return whether `value` is an object that is stored as its state."""
    if isinstance(value, type) or type(value) in CONTAINERS or is_array(value):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def state_of(value: Any, path: Path) -> Any:
    """Return `value.state_dict()`, without the functions in a torch scheduler's (docstring of flatten.py).

    Raises:
        InvalidInputError: `state_dict()` failed.
    """
    try:
        state = value.state_dict()
    except Exception as error:
        raise InvalidInputError(f"{shown(path)}: {type(value).__name__}.state_dict() failed: {error!r}") from error
    scheduler = getattr(sys.modules.get("torch.optim.lr_scheduler"), "LRScheduler", None)
    if scheduler is None or not isinstance(value, scheduler) or type(state) is not dict:
        return state
    if type(value).load_state_dict is not scheduler.load_state_dict:
        return state
    functions = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    return {key: child for key, child in state.items() if not isinstance(child, functions)}


def is_strict_module(value: Any) -> bool:
    """Return whether `value` is a module whose load_state_dict accepts only the names of its state_dict."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return False
    module = torch.nn.Module
    own = {"state_dict", "load_state_dict"} & vars(value).keys()
    if (
        own
        or type(value).load_state_dict is not module.load_state_dict
        or type(value).state_dict is not module.state_dict
    ):
        return False
    loaders = (module._load_from_state_dict, torch.nn.modules.batchnorm._NormBase._load_from_state_dict)
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
    return all(
        type(child)._load_from_state_dict in loaders and not any(getattr(child, hook, None) for hook in hooks)
        for child in value.modules()
    )
