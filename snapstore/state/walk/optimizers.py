"""Optimizers of torch: the parameters that their state belongs to.

torch's `load_state_dict` gives state to parameters by their position, whatever their names and shapes, and casts it to
their dtypes. So a save stores the shapes and dtypes of the parameters beside the state, and a restore compares them
(fill/optimizer_fit.py). torch is only used if it is imported.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import Any

from ...threads import imported
from ..values.containers import Path, is_mapping
from ..values.tensors import Node
from .stateful import is_stateful, state_of

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
