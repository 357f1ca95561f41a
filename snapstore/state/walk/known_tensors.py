"""The tensors of a known state, and a fast check that those of the next state have the same form, and where they lie.

In: the arrays of a state, DTensors among them. Out: its tensors and their storages; or DifferentStructureError if one
has another form or is sharded in another way. It runs while training waits, so C code compares each property of all
tensors of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter, eq, methodcaller
from typing import Any

from ...threads import imported
from ..values.arrays import Array
from ..values.sharded import local_of, sharding_of
from ..values.wrapped import unwrapped
from .learner import DifferentStructureError

#: Properties of a tensor that must be as they were, beside its type, its device and its address.
_PROPERTIES: list[Any] = [
    *(attrgetter(name) for name in ("dtype", "shape", "requires_grad")),
    *(methodcaller(name) for name in ("stride", "is_conj", "is_neg")),
]
#: Arrays that are looked at together.
BLOCK_ARRAYS = 512


class Block:
    """Arrays of a known state that are compared together: they are so few that torch's data stay in a core's cache.

    Args:
        arrays: of the state.
        start: the position of the first one of the block.

    Attributes:
        batched: positions of the arrays that a match gives as columns, with the local tensors of DTensors.
        properties: of these.
        places: their addresses at the last match; None before.
        sizes: of the storages in host memory at the last match [bytes].
        device_sizes: of the storages on devices.

    Raises:
        DifferentStructureError: see `KnownShards`; or an array changed meanwhile.
    """

    def __init__(self, arrays: list[Any], start: int) -> None:
        self._of = slice(start, start + BLOCK_ARRAYS)
        self._shards = KnownShards(arrays[self._of])
        local = self.localize(arrays)
        self._count = len(local)
        self.batched = [i for i, array in enumerate(local) if _is_batched(array)]
        tensors = self.tensors_of(local)
        self._positions = list(range(len(tensors)))
        self._on_host = [k for k in self._positions if tensors[k].device.type == "cpu"]
        self._on_devices = [k for k in self._positions if tensors[k].device.type != "cpu"]
        self.properties = [list(map(take, tensors)) for take in _PROPERTIES]
        _, shapes, _, strides, *_ = self.properties
        self._guards = _guards(tensors, shapes, strides)
        if not self._has_properties(tensors):  # the caller has changed one: the guards may be those of before
            raise DifferentStructureError
        self.places: Sequence[int] | None = None
        self.sizes: list[int] = []
        self.device_sizes: list[int] = []

    def note(self, places: Sequence[int], sizes: Sequence[int]) -> None:
        """Note the addresses of the batched tensors, and the sizes of their storages."""
        self.places, self.sizes = places, [sizes[k] for k in self._on_host]
        self.device_sizes = [sizes[k] for k in self._on_devices]

    def localize(self, arrays: list[Any]) -> list[Any]:
        """Return a state's arrays that are in this block, with the local tensors of DTensors.

        Raises:
            DifferentStructureError: one is sharded in another way.
        """
        return self._shards.localize(arrays[self._of])

    def tensors_of(self, arrays: list[Any]) -> list[Any]:
        """Return the batched ones among the block's arrays."""
        return arrays if len(self.batched) == self._count else [arrays[i] for i in self.batched]

    def storages(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Return the storages in host memory; None if a tensor has moved since the last match, or its storage's end.

        Raises:
            DifferentStructureError: no tensor has moved, but one has another form.
        """
        if self.places is None:
            return None
        storages = storages_of([tensors[k] for k in self._on_host])  # taken before the addresses are read
        if not lie_at(tensors, self.places, self._positions) or list(map(len, storages)) != self.sizes:
            return None
        if not self.has_form(tensors):
            raise DifferentStructureError
        return storages

    def lie_where_noted(self, tensors: Sequence[Any]) -> bool:
        """Return whether the batched tensors have the known form and the noted addresses, and storages their sizes.

        torch lets other threads run within `set_`: a match may find the new address of a tensor and its old shape.
        """
        assert self.places is not None
        if not lie_at(tensors, self.places, self._positions) or not self.has_form(tensors):
            return False
        return list(map(len, storages_of([tensors[k] for k in self._on_devices]))) == self.device_sizes

    def has_form(self, tensors: Sequence[Any]) -> bool:
        """Return whether tensors have the known properties."""
        return (self._guards is not None and self._guards.check(*tensors)) or self._has_properties(tensors)

    def _has_properties(self, tensors: Sequence[Any]) -> bool:
        return all(
            all(map(eq, map(take, tensors), old)) for take, old in zip(_PROPERTIES, self.properties, strict=True)
        )


def lie_at(tensors: Sequence[Any], places: Sequence[int], at: Sequence[int]) -> bool:
    """Return whether the tensors at positions `at` begin at these addresses."""
    at_once = getattr(sys.modules["torch"]._C, "_tensors_data_ptrs_at_indices_equal", None) if at else None
    if at_once is None:
        return addresses_of([tensors[k] for k in at]) == [places[k] for k in at]
    return bool(at_once(tensors, places, at))


def storages_of(tensors: Sequence[Any]) -> list[Any]:
    """Return the storages of tensors; each has its bytes as its length."""
    return list(map(sys.modules["torch"].Tensor.untyped_storage, tensors)) if tensors else []


def addresses_of(tensors: Sequence[Any]) -> list[int]:
    """Return the addresses of the first elements."""
    return list(map(sys.modules["torch"].Tensor.data_ptr, tensors)) if tensors else []


def _is_batched(array: Array) -> bool:
    torch = imported("torch")
    if torch is None or not isinstance(array, torch.Tensor) or not array.numel():
        return False
    return array.device.type != "cpu" or (array.is_contiguous() and not array.is_conj() and not array.is_neg())


def _guards(tensors: Sequence[Any], shapes: Sequence[Any], strides: Sequence[Any]) -> Any:
    """Return torch's own check of the form of many tensors at once, which torch.compile uses on its inputs; or None.

    It is not public. If it is missing, or says no, each property is compared.
    """
    try:
        kind = sys.modules["torch"]._C._dynamo.guards.TensorGuards
        dims = {"dynamic_dims_sizes": list(map(list, shapes)), "dynamic_dims_strides": list(map(list, strides))}
        guards = kind(*tensors, **dims)
        return guards if guards.check(*tensors) else None
    except Exception:  # noqa: BLE001  whatever another release of torch raises
        return None


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
