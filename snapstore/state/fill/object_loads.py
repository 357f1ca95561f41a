"""The calls of `load_state_dict` with which a restore ends, and the checks of what they leave.

In: objects of the target, and how to make the state that each one loads. A loader may change the state that it gets,
cast it, or clear the arrays that the restore has filled. Out: objects with the stored values, or an error.

It belongs to the thread that owns the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InvalidInputError
from ...text import said
from ..tree.decode import Decoded
from ..values import composite, objects
from ..values.arrays import dtype_name
from ..values.containers import CONTAINERS, Path, children, is_mapping, shown
from ..values.tensors import Slot, family, is_array
from ..walk import stateful
from ..walk.stateful import loads_as_torch, state_of
from . import optimizer_fit
from .buffers import RestoreBuffers, slots_of
from .differences import MAX_LINES
from .repeated_places import is_plain

_FILL_DTENSORS = (
    "to fill DTensors, restore without a target and call torch.distributed.checkpoint.state_dict.set_model_state_dict("
    "model, state, options=StateDictOptions(full_state_dict=True))"
)


@dataclass(slots=True)
class Load:
    """A call of `load_state_dict`."""

    path: Path
    object: Any
    stored: Any  # the decoded tree below path
    assemble: Callable[[], Any]


def arrays_of_both(
    stored: Any, present: Any, path: Path, matches: Callable[[Path], bool]
) -> Iterator[tuple[Path, Slot, Any]]:
    """Yield the path, the slot and the present array of each selected place where both sides have an array."""
    if type(stored) is Slot:
        if is_array(present) and matches(path):
            yield path, stored, present
        return
    present = composite.fillable(present)
    if type(stored) in CONTAINERS and type(present) in CONTAINERS and is_mapping(stored) == is_mapping(present):
        there = {key: child for _, key, child in children(present)}
        for element, key, child in children(stored):
            if key in there:
                yield from arrays_of_both(child, there[key], (*path, element), matches)


class ObjectLoads:
    """The calls of one restore.

    Args:
        buffers: Have the arrays, all of them complete.
        matches: Whether the leaf at a path is selected.
        decoded: The notes of the tree's decoding.
    """

    def __init__(self, buffers: RestoreBuffers, matches: Callable[[Path], bool], decoded: Decoded) -> None:
        self._buffers, self._matches, self._decoded = buffers, matches, decoded
        self._loads: list[Load] = []

    def add(self, load: Load) -> None:
        """Add a call."""
        self._loads.append(load)

    def run(self) -> None:
        """Make all calls, and check the objects.

        Raises:
            InvalidInputError: A `load_state_dict` failed, cast or changed values, or left tensors on the meta device;
                or arrays that share memory have other values than are stored.
        """
        # Generators come last: loading the others (a loader that starts its workers) may draw random numbers.
        for load in sorted(self._loads, key=lambda load: getattr(type(load.object), "load_last", False) is True):
            self._run(load)
        self._check_overlapping()

    def _run(self, load: Load) -> None:
        name = f"{shown(load.path)}: {type(load.object).__name__}.load_state_dict"
        state = load.assemble()
        filled = {} if loads_as_torch(load.object) else self._buffers.samples(load.stored)
        try:
            load.object.load_state_dict(state)
        except Exception as error:
            advice = [_FILL_DTENSORS] if "DTensor" in str(error) else []
            raise InvalidInputError(f"{name} failed: {said(error)}", *advice) from error
        objects.move_beside_parameters(load.object)
        if (slot := self._buffers.changed_since(filled)) is not None:
            raise InvalidInputError(
                f"{name} changed {shown(self._buffers.spec(slot).path)}, so the state differs from the snapshot: a "
                "restore fills the arrays that state_dict() returns, and passes them to load_state_dict, which may not "
                "clear them or add to them; let state_dict() return copies"
            )
        if (found := self._decoded.parameters.get(id(load.stored))) and stateful.is_optimizer(load.object):
            optimizer_fit.put_back(load.object, state, found[1])
        if not is_plain(load.stored):
            self._check(load)

    def _check(self, load: Load) -> None:
        """Check that an object has the dtypes that are stored, and in memory that it shares also the values."""
        casts = list(self._casts(load.stored, state_of(load.object, load.path), load.path))
        if casts:
            raise InvalidInputError(
                f"{shown(load.path)}: {type(load.object).__name__}.load_state_dict changed dtypes, so the state "
                "differs from the snapshot; build the object with the dtypes it was saved with; or, if it casts them, "
                "as torch.optim does to those of the parameters, restore() without it and set its state yourself:",
                *(f"  {line}" for line in casts[:MAX_LINES]),
            )

    def _check_overlapping(self) -> None:
        """Check memory that several places share once more: a later load may have replaced what an earlier one wrote.

        Only objects with such memory are asked for their state: asking a loader for it may draw random numbers.
        """
        self._buffers.check_overlapping()
        for load in self._loads:
            if any(map(self._buffers.is_overlapping, slots_of(load.stored))):
                self._check(load)

    def _casts(self, stored: Any, present: Any, path: Path) -> Iterator[str]:
        for below, slot, array in arrays_of_both(stored, present, path, self._matches):
            spec = self._buffers.spec(slot)
            dtype = dtype_name(array)
            if family(spec.kind) == "tensor" and isinstance(array, np.ndarray):  # torch's files hold no arrays
                dtype = array.dtype.name
            if getattr(array, "is_meta", False):  # torch warns, and loads nothing
                raise InvalidInputError(
                    f"{shown(below)}: expected a tensor with memory to load into, got one on the meta device; give the "
                    "module memory before the restore: module.to_empty(device=...)"
                )
            if dtype != spec.dtype:
                yield f"{shown(below)}: dtype: expected {spec.dtype}, got {dtype}"
            elif self._buffers.is_overlapping(slot):
                self._buffers.require_equal(slot, array, below)
