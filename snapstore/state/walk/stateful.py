"""Objects with `state_dict` and `load_state_dict`, which are stored as their state.

In: any value in a state. Out: whether it is such an object, its state, whether its names can be checked, and which
tensors are buffers. This calls the user's `state_dict`, so it belongs to the thread that owns the state. torch is used
only if the user has imported it; only this module knows the special cases of its schedulers, modules and optimizers.

torch's `load_state_dict` of an optimizer gives state to parameters by their position, whatever their names and shapes,
and casts it to their dtypes. So a save stores the shapes and dtypes of the parameters beside the state, and a restore
compares them (fill/optimizer_fit.py).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from ...errors import InvalidInputError
from ...threads import imported
from ..values.containers import CONTAINERS, Path, has, is_mapping, shown
from ..values.tensors import Node, TensorSpec, is_array

_EXTRA_STATE = "_extra_state"  # the name of what `get_extra_state` returns
#: The buffers of torch's BatchNorm and InstanceNorm. Each rank computes them from its own batches.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_stateful(value: Any) -> bool:
    """Return whether `value` is an object that is stored as its state."""
    if isinstance(value, type) or type(value) in CONTAINERS or is_array(value):
        return False
    methods = ("state_dict", "load_state_dict")
    return has(value, *methods) and all(callable(getattr(value, name)) for name in methods)


def state_of(value: Any, path: Path) -> Any:
    """Return `value.state_dict()`; of a torch scheduler, without its functions (see the docstring of flatten.py).

    Raises:
        InvalidInputError: `state_dict()` failed.
    """
    try:
        state = value.state_dict()
    except Exception as error:
        raise InvalidInputError(f"{shown(path)}: {type(value).__name__}.state_dict() failed: {error!r}") from error
    scheduler = getattr(imported("torch.optim.lr_scheduler"), "LRScheduler", None)
    if scheduler is None or not isinstance(value, scheduler) or type(state) is not dict:
        return state
    if type(value).load_state_dict is not scheduler.load_state_dict:
        return state
    functions = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    return {key: child for key, child in state.items() if not isinstance(child, functions)}


def is_strict_module(value: Any) -> bool:
    """Return whether `value` is a module whose load_state_dict accepts only the names of its state_dict."""
    if not is_torch_module(value) or "state_dict" in vars(value):
        return False
    if type(value).state_dict is not sys.modules["torch"].nn.Module.state_dict:
        return False
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
    return not any(
        _has_own_loader(child) or any(getattr(child, hook, None) for hook in hooks) for child in value.modules()
    )


def _has_own_loader(module: Any) -> bool:
    """Return whether a module has a `_load_from_state_dict` that is not one of torch's."""
    nn: Any = sys.modules["torch"].nn
    loaders = (nn.Module._load_from_state_dict, nn.modules.batchnorm._NormBase._load_from_state_dict)
    return type(module)._load_from_state_dict not in loaders


def is_of_torch(value: Any) -> bool:
    """Return whether `value` is a module or an optimizer."""
    torch = imported("torch")
    return torch is not None and isinstance(value, (torch.nn.Module, torch.optim.Optimizer))


def loads_as_torch(value: Any) -> bool:
    """Return whether `value` is a module or optimizer whose `load_state_dict` is torch's own."""
    torch = imported("torch")
    kinds = () if torch is None else (torch.nn.Module, torch.optim.Optimizer)
    if "load_state_dict" in getattr(value, "__dict__", ()):
        return False
    return any(isinstance(value, kind) and type(value).load_state_dict is kind.load_state_dict for kind in kinds)


def is_torch_module(value: Any) -> bool:
    """Return whether `value` is a module whose `load_state_dict` is torch's own, which copies values."""
    return _is_module(value) and loads_as_torch(value)


def _is_module(value: Any) -> bool:
    torch = imported("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def loader_decides(value: Any, path: Path) -> Callable[[Path], Collection[str]]:
    """Return a function that says for a place in an object's state in what a stored array may differ from the present.

    An object with a `load_state_dict` of its own decides which shapes it takes. In a module with torch's, that is so
    for submodules with a `_load_from_state_dict` of their own, such as observers; and nothing is copied into extra
    state. All other arrays of a module must have its shapes, as torch demands once the first of them are filled.

    Args:
        path: The place of the object.
    """
    if not loads_as_torch(value):
        return lambda below: ("shape",)
    inside = value.named_modules(remove_duplicate=False) if _is_module(value) else ()
    own = {name for name, one in inside if _has_own_loader(one)}

    def decides(below: Path) -> Collection[str]:
        owner, _, name = str((*below, "")[len(path)]).rpartition(".")
        return ("shape", "dtype") if name == _EXTRA_STATE else ("shape",) if owner in own else ()

    return decides


def names_in_modules(objects: Mapping[Path, Any]) -> dict[Path, dict[Any, bool]]:
    """Return the names of the parameters and buffers of each module among objects, and whether each is a buffer."""
    found: dict[Path, dict[Any, bool]] = {}
    for path, value in objects.items():
        if _is_module(value):
            buffers = dict.fromkeys((name for name, _ in value.named_buffers(remove_duplicate=False)), True)
            parameters = (name for name, _ in value.named_parameters(remove_duplicate=False))
            found[path] = buffers | dict.fromkeys(parameters, False)
    return found


def buffers_of(specs: Sequence[TensorSpec], modules: Mapping[Path, Mapping[Any, bool]]) -> frozenset[int]:
    """Return the numbers of the tensors that are buffers, which may differ between the ranks of a job by design.

    They are the buffers of a module that is in the state itself; and in a state dict, the statistics of a norm layer:
    `running_mean` beside a `running_var` of the same shape (channels,), and `num_batches_tracked` with them. A
    parameter of a module in the state is no buffer, whatever its name. A mean or variance that requires grad is none.

    Args:
        modules: what `names_in_modules` gives for the objects in the state.
    """
    found: set[int] = set()
    layers: dict[tuple[Any, ...], dict[str, int]] = {}
    for number, spec in enumerate(specs):
        path = spec.path
        name = path[-1] if path else ""
        is_buffer = modules[path[:-1]].get(name) if modules and path[:-1] in modules else None
        if is_buffer:
            found.add(number)
        elif is_buffer is None and type(name) is str and name.endswith(_STATISTICS):
            layer, _, last = name.rpartition(".")
            layers.setdefault((*path[:-1], layer), {})[last] = number
    for numbers in layers.values():
        mean, var = (specs[numbers[name]] if name in numbers else None for name in _STATISTICS[:2])
        if mean and var and mean.shape == var.shape and all(map(_is_statistic, (mean, var))):
            found.update(number for name, number in numbers.items() if name in _STATISTICS)
    return frozenset(found)


def _is_statistic(spec: TensorSpec) -> bool:
    return spec.kind == "tensor" and len(spec.shape) == 1 and not spec.requires_grad


#: The shapes and the dtypes of parameters, in the order of the groups.
Parameters = tuple[list[Any], list[Any]]
_FORM_FIELDS: list[Any] = [attrgetter("shape"), attrgetter("dtype")]


class OptimizerState:
    """The state of an optimizer that somewhere else has made, with the optimizer that it belongs to."""

    def __init__(self, optimizer: Any, state: Any) -> None:
        self.optimizer, self._state = optimizer, state

    def state_dict(self) -> Any:
        """Return the state."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Load a state into the optimizer."""
        self.optimizer.load_state_dict(state)


def is_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer of torch, or the state of one."""
    torch = imported("torch")
    return torch is not None and isinstance(value, (torch.optim.Optimizer, OptimizerState))


def parameters_of(value: Any) -> Parameters | None:
    """Return the shapes and dtypes of an optimizer's parameters; None: it has none that have a shape yet."""
    if not is_optimizer(value):
        return None
    parameters = parameter_list(value)
    try:
        shapes, dtypes = (list(map(take, parameters)) for take in _FORM_FIELDS)
    except (AttributeError, RuntimeError):  # no tensor; or a parameter whose shape its first use will tell
        return None
    return (shapes, dtypes) if parameters else None


def expand(value: Any, path: Path) -> tuple[Any, list[Node] | None] | None:
    """Return the state of an object, and the first fields of the node of an optimizer's state, or None for others.

    None: the value is no object that is stored as its state.
    """
    if not is_stateful(value):
        return None
    state = state_of(value, path)
    found = parameters_of(value) if numbers_of(state) is not None else None
    return state, None if found is None or len(found[0]) != len(numbers_of(state) or ()) else node_of(found)


def node_of(parameters: Parameters) -> list[Node]:
    """Return the tag of an optimizer, each form of its parameters once, and the numbers of their forms."""
    forms: dict[Any, int] = {}
    numbers = [forms.setdefault(form, len(forms)) for form in zip(*parameters, strict=True)]
    return ["optimizer", [[str(dtype).removeprefix("torch."), list(shape)] for shape, dtype in forms], numbers]


def parameter_list(value: Any) -> list[Any]:
    """Return the parameters of an optimizer, in the order of its groups."""
    optimizer = value.optimizer if type(value) is OptimizerState else value
    groups = getattr(optimizer, "param_groups", ())
    return list(chain.from_iterable(group["params"] for group in groups))


def numbers_of(state: Any) -> list[Any] | None:
    """Return the keys of the parameters in the state of an optimizer, in the order of its groups; None: it has none."""
    groups = state.get("param_groups") if is_mapping(state) else None
    if type(groups) is not list or not is_mapping(state.get("state")):
        return None
    if not all(is_mapping(group) and type(group.get("params")) is list for group in groups):
        return None
    return list(chain.from_iterable(group["params"] for group in groups))
