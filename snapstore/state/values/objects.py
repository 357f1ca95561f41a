"""Objects that are stored by their attributes: an allow-list of classes, which users extend.

In: an object in a state, such as the projector of GaLore's optimizers. Out: whether its attributes (plain values and
tensors) are all of it. The list has the classes below, and each that the program passes to
torch.serialization.add_safe_globals. torch.load makes values of them in the same way: without a call of `__init__`.

Invariant: nothing is imported. A class of the list is known once the program has imported its module.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ...threads import imported

_SHAMPOO = ("Graft", "SGDGraft", "SQRTNGraft", "AdaGradGraft", "RMSPropGraft")

#: The modules and names of classes whose objects have their whole state in their attributes.
ALLOWED: dict[str, tuple[str, ...]] = {
    "apollo_torch.random_projector": ("GradientProjector",),
    "apollo_torch.svd_projector": ("GaLoreProjector",),
    "galore_torch.galore_projector": ("GaLoreProjector",),
    "pytorch_optimizer.optimizer.utils.galore": ("GaLoreProjector",),
    "pytorch_optimizer.optimizer.utils.graft": _SHAMPOO,
    "pytorch_optimizer.optimizer.utils.partition": ("BlockPartitioner",),
    "pytorch_optimizer.optimizer.utils.preconditioner": ("PreConditioner",),
}


def is_allowed(kind: type) -> bool:
    """Return whether objects of a class are stored by their attributes."""
    return has_attributes_only(kind) and (
        kind.__qualname__ in ALLOWED.get(kind.__module__, ()) or kind in safe_globals()
    )


@lru_cache(maxsize=4096)
def has_attributes_only(kind: Any) -> bool:
    """Return whether the attributes of an object of this class are all that pickle would store of it."""
    if not isinstance(kind, type) or str(kind.__module__).partition(".")[0] in ("builtins", "torch"):
        return False
    own: Any = object
    pickled = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")
    return (
        all(getattr(kind, name) is getattr(own, name) for name in pickled)
        and not any(hasattr(kind, name) for name in ("__setstate__", "__getnewargs__", "__getnewargs_ex__"))
        and not any("__slots__" in vars(base) for base in kind.__mro__[:-1])
        and kind.__dictoffset__ != 0
    )


def make(kind: Any, plain: dict[str, Any]) -> Any:
    """Return an object with these attributes, made without `__init__`, as pickle and copy make it.

    Raises:
        TypeError: the attributes of such an object are not all of it.
    """
    if not has_attributes_only(kind):
        raise TypeError("it is no dataclass, and its objects have more than attributes")
    value: Any = object.__new__(kind)
    vars(value).update(plain)
    return value


def move_beside_parameters(value: Any) -> None:
    """Move the tensors in the objects of an optimizer's state to the device of their parameter.

    `load_state_dict` moves only tensors that are no part of an object. Tensors without dimensions stay: as for `step`,
    each device reads them where they are.
    """
    torch: Any = imported("torch")
    if torch is None or not isinstance(value, torch.optim.Optimizer):
        return
    for parameter, state in value.state.items():
        for child in state.values() if isinstance(state, dict) and isinstance(parameter, torch.Tensor) else ():
            if is_allowed(type(child)):
                _moved(child, parameter.device)


def _moved(value: Any, device: Any) -> Any:
    """Return a value with its tensors on a device; objects change in place."""
    torch: Any = imported("torch")
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.ndim else value
    if type(value) in (list, tuple):
        return type(value)(_moved(child, device) for child in value)
    if type(value) is dict:
        return {key: _moved(child, device) for key, child in value.items()}
    if is_allowed(type(value)):
        vars(value).update({name: _moved(child, device) for name, child in vars(value).items()})
    return value


def safe_globals() -> list[Any]:
    """Return what the program allows `torch.load` to make; see torch.serialization.add_safe_globals."""
    torch = imported("torch")
    found = [] if torch is None else torch.serialization.get_safe_globals()
    return [one[0] if type(one) is tuple else one for one in found]


def allowed_classes() -> list[Any]:
    """Return the classes of `ALLOWED` that the program has imported."""
    modules = ((imported(module), names) for module, names in ALLOWED.items())
    found: list[Any] = [vars(module).get(name) for module, names in modules if module is not None for name in names]
    return [kind for kind in found if has_attributes_only(kind)]
