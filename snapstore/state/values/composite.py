"""Composite tensors: tensors of a class whose values lie in other tensors, such as the states of torchao's optimizers.

In: a tensor of a class with torch's `__tensor_flatten__` and `__tensor_unflatten__`, which takes it apart and puts it
together. Out: its plain form, a dict of its tensors by name, with its context and its shape; and back. So a snapshot
has the tensors in it, as chunks like all others, and the name of its class (classes.py).

Sparse, jagged and quantized tensors of torch are composite too (torch_layouts.py). Other classes of torch are none: a
DTensor is a shard of a larger tensor, and others stand for values that are still computed. A wrapper for all-gathers is
none either if its inner tensor has all its values (wrapped.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from operator import is_
from typing import Any, TypeVar

from ...errors import InvalidInputError, UnsupportedLeafError
from ...threads import imported
from . import torch_layouts
from .containers import CONTAINERS, MAX_DEPTH, Path, children, shown
from .sharded import dtensor_like, is_dtensor, sharding_of
from .tensors import DimOrder, dim_order_of, is_dim_order, strides_of
from .torch_layouts import is_layout, layout_of
from .wrapped import unwrapped

#: The keys of the plain form that hold no tensor: what `__tensor_flatten__` returns beside the names; the shape, or if
#: the layout is not that of the first tensor in it of this shape, (shape, dimension order); and, if it is the local
#: tensor of a DTensor, the shape of that and the boxes of it that this rank has.
CONTEXT, SHAPE, SHARD = "__context__", "__shape__", "__shard__"

Plain = dict[str, Any]
About = tuple[Any, Any, Any]  # the context, the shape, and the `dtensor_spec`
T = TypeVar("T")


def is_composite(value: Any) -> bool:
    """Return whether a value is a composite tensor."""
    kind: Any = type(value)
    return (_is_class(kind) and unwrapped(value) is value) or layout_of(value) is not None


def kind_of(value: Any) -> Any:
    """Return the class of a composite tensor; of one of torch's own, its kind in torch_layouts.py."""
    return layout_of(value) or type(value)


def core_of(value: Any) -> Any:
    """Return a composite tensor, or the one that is the local tensor of a DTensor; None: the value has none."""
    core = value._local_tensor if is_dtensor(value) else value
    return core if is_composite(core) else None


def like(value: Any, plain: Plain) -> Any:
    """Return the composite tensor of a plain form, in the class of another one, and in a DTensor if that is in one."""
    new = make(kind_of(core_of(value)), plain)
    return new if is_composite(value) else dtensor_like(value, new)


@lru_cache(maxsize=4096)
def _is_class(kind: Any) -> bool:
    methods = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    torch = imported("torch") if methods else None
    if torch is None or not issubclass(kind, torch.Tensor):
        return False
    others = (base for base in kind.__mro__ if base not in torch.Tensor.__mro__)
    return all(base.__module__.partition(".")[0] != "torch" for base in others)


def is_composite_class(kind: Any) -> bool:
    """Return whether values of a class may be composite tensors."""
    return isinstance(kind, type) and (_is_class(kind) or is_layout(kind))


def plain_of(value: Any) -> Plain:
    """Return the plain form of a composite tensor, or of that in a DTensor; the tensors in it are the value's own.

    Raises:
        UnsupportedLeafError: A tensor in it has the name of another entry of the form.
    """
    core = core_of(value)
    inner, context, shape = _flatten(core)
    if taken := {CONTEXT, SHAPE, SHARD} & {*inner}:
        raise UnsupportedLeafError(f"{type(core).__name__} has a tensor of the name {min(taken)}: rename it")
    form = {**inner, CONTEXT: context, SHAPE: shape}
    return form if core is value else {**form, SHARD: shard_of(value)}


def _flatten(core: Any) -> tuple[Plain, Any, Any]:
    """Return the tensors in a composite tensor by name, its context, and what the plain form has as `SHAPE`."""
    if layout_of(core) is not None:
        return torch_layouts.flatten(core)
    names, context = core.__tensor_flatten__()
    inner, shape = {name: getattr(core, name) for name in names}, core.shape
    of_inner = next((dim_order_of(one) for one in inner.values() if one.shape == shape), ())
    order = dim_order_of(core)
    return inner, context, shape if order == of_inner else (shape, order)


def fillable(value: Any) -> Any:
    """Return the plain form of a composite tensor whose tensors can be filled; None for one of torch's own, which is
    made and assigned as a whole; any other value itself.
    """
    core = core_of(value)
    return value if core is None else None if layout_of(core) is not None else plain_of(value)


def shard_of(value: Any) -> tuple[Any, ...]:
    """Return what the plain form of the composite tensor in a DTensor has as `SHARD`."""
    sharding = sharding_of(value)
    assert sharding is not None
    return sharding.global_shape, sharding.boxes


def shape_of(plain: Plain) -> tuple[Any, DimOrder | None]:
    """Return the shape of a plain form, and its dimension order; None: that of the first tensor in it of this shape.

    Raises:
        TypeError: It is none, in a plain form from a store.
    """
    torch, found = imported("torch"), plain[SHAPE]
    if type(found) is not tuple:
        return torch.Size(found), None
    if len(found) == 2 and type(found[0]) is torch.Size and type(found[1]) is tuple:
        shape, order = found
        if not order or is_dim_order(order, len(shape)):
            return shape, order
    raise TypeError(f"its shape is {found}")


def inner_of(plain: Plain) -> Plain:
    """Return the tensors of a plain form, by name."""
    return {name: value for name, value in plain.items() if name not in (CONTEXT, SHAPE, SHARD)}


def tensors_of(value: Any, names: list[str], about: About) -> list[Any] | None:
    """Return the tensors in a composite tensor, or in that in a DTensor.

    None: it is none, or has other names, another context, shape or sharding, or requires grad.

    It runs while training waits, so it asks torch without the functions of the class.

    Args:
        about: Its context, its shape and its `dtensor_spec`, as they were before.
    """
    context, shape, spec = about
    if dtensor_spec(value) != spec:
        return None
    kind: Any = type(value)
    value = value if _is_class(kind) else core_of(value)
    if value is None or (value.requires_grad and layout_of(value) is None):
        return None
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        found, *now = _flatten(value)
        return list(found.values()) if list(found) == names and _is_same(now, [context, shape]) else None


def dtensor_spec(value: Any) -> Any:
    """Return the mesh, placements and shape of a DTensor, or None for a composite tensor."""
    kind: Any = type(value)
    return None if _is_class(kind) or layout_of(value) else getattr(value, "_spec", None)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two contexts are the same; False if it takes long to tell."""
    kind = type(one)
    if one is other or kind is not type(other):
        return one is other
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and (all(map(is_, one, other)) or all(map(_is_same, one, other)))
    if kind is dict:
        return list(one) == list(other) and all(map(_is_same, one.values(), other.values()))
    is_plain = kind in (int, str, bytes) or kind.__module__ == "torch"
    return (is_plain and bool(one == other)) or (kind is float and one.hex() == other.hex())


def is_plain_form(plain: Any) -> bool:
    """Return whether a stored dict is the plain form of a composite tensor."""
    return type(plain) is dict and CONTEXT in plain and SHAPE in plain


def require_classes(state: T) -> T:
    """Return a restored state, in which no composite tensor may be left in its plain form.

    Raises:
        InvalidInputError: One is, because its class is not known.
    """
    for path, value in _containers(state, ()):
        if is_plain_form(value):
            raise InvalidInputError(
                f"{shown(path)}: is stored as the tensors in a composite tensor, whose class is not known here: import "
                "the library that has it first, such as torchao.optim"
            )
    return state


def _containers(state: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if type(state) in CONTAINERS and len(path) < MAX_DEPTH:
        yield path, state
        for element, _, child in children(state):
            yield from _containers(child, (*path, element))


def make(kind: Any, plain: Plain) -> Any:
    """Return the composite tensor of a plain form, which may come from a store.

    Raises:
        Exception: Whatever the class raises if it does not take what is stored.
    """
    torch = imported("torch")
    inner = inner_of(plain)
    if not is_plain_form(plain) or not all(isinstance(value, torch.Tensor) for value in inner.values()):
        raise TypeError("it has other fields than tensors, a context and a shape")
    shape, order = shape_of(plain)
    if is_layout(kind):
        return torch_layouts.make(kind, inner, plain[CONTEXT], shape)
    strides = strides_of(shape, order or range(len(shape)))
    if order is None:
        strides = next((one.stride() for one in inner.values() if one.shape == shape), strides)
    value = kind.__tensor_unflatten__(inner, plain[CONTEXT], shape, strides)
    if type(value) is not kind or value.shape != shape:
        raise TypeError(f"it makes a {type(value).__name__} of shape {tuple(value.shape)}, stored is {tuple(shape)}")
    return value
