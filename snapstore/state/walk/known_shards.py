"""The shardings of a known state's DTensors, and a fast check that the next state has the same ones.

In: the arrays of a state. Out: the same, with the local tensor in the place of each DTensor; or DifferentStructureError
if one is sharded in another way. It runs while training waits, so C code compares each property of all DTensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from ...threads import imported
from ..values.sharded import local_of, sharding_of
from ..values.wrapped import unwrapped
from .learner import DifferentStructureError

_spec: Any = attrgetter("_spec")  # mesh, placements, global shape and dtype: `==` compares all of them
_requires_grad: Any = attrgetter("requires_grad")
_local: Any = attrgetter("_local_tensor")


class KnownShards:
    """The DTensors among the arrays of a known state.

    Args:
        arrays: of the state.

    Raises:
        DifferentStructureError: there is a sharded tensor that is no DTensor, or whose local tensor is special.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._count = len(arrays)
        self._at = [i for i, array in enumerate(arrays) if sharding_of(array) is not None]
        found = [arrays[i] for i in self._at]
        if not all(hasattr(array, "_spec") and local_of(array) is unwrapped(array._local_tensor) for array in found):
            raise DifferentStructureError
        self._wrapped = [i for i, array in enumerate(found) if local_of(array) is not array._local_tensor]
        self._specs = list(map(_spec, found))
        self._grads = _grads_of(found)
        self._need_grad = any(self._grads)

    def localize(self, arrays: list[Any]) -> list[Any]:
        """Return arrays with the local tensors of DTensors.

        Raises:
            DifferentStructureError: a DTensor has another mesh, placement, shape, dtype or `requires_grad` than the
                known one, or a special local tensor.
        """
        if not self._at:
            return arrays
        found = arrays if len(self._at) == self._count else [arrays[i] for i in self._at]
        specs = list(map(_spec, found))
        if specs != self._specs or not self._have_same_grads(found):
            raise DifferentStructureError
        self._specs = specs  # comparing with the same objects is faster
        local = list(map(_local, found))
        for i in self._wrapped:
            local[i] = unwrapped(local[i])
        if set(map(type, local)) != {sys.modules["torch"].Tensor}:
            raise DifferentStructureError
        if found is arrays:
            return local
        replaced = list(arrays)
        for i, tensor in zip(self._at, local, strict=True):
            replaced[i] = tensor
        return replaced

    def _have_same_grads(self, found: Sequence[Any]) -> bool:
        """Return whether the same DTensors as before require gradients; mostly none does, and torch tells at once."""
        if not self._need_grad and (any_of := getattr(sys.modules["torch"]._C, "_any_requires_grad", None)) is not None:
            return not any_of(*found)
        return _grads_of(found) == self._grads


def _grads_of(arrays: Sequence[Any]) -> list[bool]:
    torch = imported("torch")
    if torch is None or not arrays:
        return []
    with torch._C.DisableTorchFunctionSubclass():  # half the time
        return list(map(_requires_grad, arrays))
