"""Wrapped parameters: tensors that FSDP2 gathers in another form, such as those of torchao for training in float8.

In: a tensor of a class with `fsdp_pre_all_gather` (torch.distributed.fsdp's extension for all-gathers). Out: the tensor
that holds its values, which the optimizer updates. A save stores this one, and a restore fills it in place.
"""

from __future__ import annotations

from typing import Any


def unwrapped(value: Any) -> Any:
    """Return the tensor that holds all values of a wrapped parameter; any other value itself.

    A wrapper is followed only if it has one inner tensor, of its own shape, dtype and device. A wrapper with scales or
    zero points beside the values stays as it is, and has no stored form.
    """
    while hasattr(type(value), "fsdp_pre_all_gather") and hasattr(type(value), "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        inner = getattr(value, names[0]) if len(names) == 1 else None
        if inner is None or _form_of(inner) != _form_of(value):
            break
        value = inner
    return value


def _form_of(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape), value.dtype, value.device
