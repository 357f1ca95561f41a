"""An array of a state while a save reads it, and the check that nothing changed it meanwhile.

In: an array of the user, and the spec that `flatten` made of it. Out: its bytes, or an error if another thread or a
later `state_dict()` gave it other memory or another form. A save calls `take` and `confirm` once per tensor while
training waits, so both must be fast.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ...errors import InvalidInputError, UnsupportedLeafError
from .arrays import Array, Memory, copy_into, describe, memory_key
from .containers import Path, shown
from .tensors import TensorSpec, dim_order_of


class Held:
    """An array of a state, from `flatten` until its bytes are read.

    A later `state_dict()`, or another thread, may give it other memory (`.data =`, `set_`), resize it or its storage,
    or assign its dtype or shape. A reader calls `take`, reads the array that it returns, then calls `confirm`. If both
    return, all that was read is in the array's own memory, and has the form in `spec`.

    The memory stays alive meanwhile, except for a storage that another thread resizes while torch copies from it: torch
    has no lock against that. NumPy does not resize an array in place while a weak reference to it exists.

    Attributes:
        spec: with the dimension order of the array.
        others: of a sharded tensor whose boxes have local tensors of their own: the other local tensors.
    """

    __slots__ = ("_alias", "_place", "_unresizable", "others", "spec", "ties", "value")

    def __init__(self, value: Array, spec: TensorSpec) -> None:
        self.value, self.spec = value, spec
        self.ties: tuple[tuple[Path, Array], ...] = ()  # the state's other arrays over this memory
        self.others: tuple[Held, ...] = ()
        self._alias: Array = None
        self._place: tuple[Any, ...] = ()
        self._unresizable: Any = None

    @classmethod
    def of(cls, value: Array, spec: TensorSpec) -> Held:
        """Return an array with its spec, to which the dimension order of the array is added."""
        order = dim_order_of(value)
        return cls(value, msgspec.structs.replace(spec, dim_order=order) if order else spec)

    def take(self) -> Array:
        """Return an alias: an array of our own over the same memory, whose form no other code can change.

        Raises:
            InvalidInputError: The array is not as it was flattened.
        """
        value, spec = self.value, self.spec
        try:
            if isinstance(value, np.ndarray):
                self._unresizable = weakref.ref(value)
            self._alias = alias = _alias_of(value)
            self._place, form = _place_of(alias), describe(value, alias)
        except (UnsupportedLeafError, RuntimeError) as error:  # torch raises it if the tensor is no longer strided
            raise changed(spec, str(error)) from error
        if form != (spec.kind, spec.dtype, spec.shape):
            raise changed(spec, f"{form[0]} {form[1]}{list(form[2])}")
        if dim_order_of(alias) != spec.dim_order:
            raise changed(spec, "other strides")
        for path, other in self.ties:
            if memory_key(other) != memory_key(alias):
                raise changed(spec, f"memory to which {shown(path)} is no longer tied")
        return alias

    def confirm(self) -> None:
        """Check that the array is as it was at `take`; call this after its last byte was read.

        Raises:
            InvalidInputError: It has changed.
        """
        try:
            same = self._place == _place_of(_alias_of(self.value)) == _place_of(self._alias)
        except RuntimeError as error:
            raise changed(self.spec, str(error)) from error
        if not same:
            raise changed(self.spec, "other memory, or another form, while it was read")

    def memory(self, memory_of: Callable[[Array], Memory]) -> Memory:
        """Return what `memory_of` gives for the alias; if it is the array's own memory, call `confirm` after the read.

        Raises:
            InvalidInputError: The array is not as it was flattened.
        """
        alias = self.take()
        try:
            memory = memory_of(alias)
        except (RuntimeError, ValueError):  # torch or NumPy found a storage that is now too short, or another shape
            self.confirm()
            raise
        self.confirm()
        return memory

    def copy_into(self, destination: np.ndarray[Any, Any]) -> None:
        """Copy the bytes in C order into (nbytes,) uint8, as `arrays.copy_into` does.

        Raises:
            InvalidInputError: The array is not as it was flattened.
        """
        self.memory(lambda alias: copy_into(alias, destination))


def _alias_of(value: Array) -> Array:
    """Return a new array over the memory of another one; of bytes, which cannot change, the bytes themselves.

    Python's lock is held while a tensor's `data` is read, and also during another thread's `.data =`. `detach` releases
    the lock: it crashes the process if another thread assigns at that moment.
    """
    if isinstance(value, bytes):
        return value
    return value.view() if isinstance(value, np.ndarray) else value.data


def _place_of(value: Array) -> tuple[Any, ...]:
    """Return the place and form of an array's elements: a faster `memory_key`."""
    if isinstance(value, bytes):
        return (id(value),)
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0], value.dtype, value.shape, value.strides
    storage = value.untyped_storage().nbytes()
    is_conj = value.dtype.is_complex and value.is_conj()  # this call releases Python's lock, and waits for it
    form = (value.dtype, value.shape, value.stride(), value.device, is_conj, value.is_neg())
    return value.data_ptr(), storage, *form


def changed(spec: TensorSpec, got: str) -> InvalidInputError:
    """Return the error for an array that was changed during a save."""
    return InvalidInputError(
        f"{shown(spec.path)}: was changed while it was saved (by a thread, a later state_dict(), or in a mapped "
        f"file?): expected {spec.kind} {spec.dtype}{list(spec.shape)} as it was, got {got}; nothing was committed; "
        "save again, and do not change it until the save is done"
    )
