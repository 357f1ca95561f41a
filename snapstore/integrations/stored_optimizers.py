"""Optimizers that a trainer loads itself: the checks of `restore_into`, around its calls of `load_state_dict`.

In: optimizers, and the part of a snapshot that has their states. Out: an error if they do not fit; and, after the
trainer has loaded them, the stored values in place of the ones that torch has cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..context import Context
from ..errors import InvalidInputError
from ..format.records import Snapshot
from ..manager import SnapshotManager
from ..restore.manifests import decoding_of
from ..restore.pipeline import read_as_ruled
from ..restore.sources import AsRank, PartSources
from ..state.fill import optimizer_fit
from ..state.tree.decode import decode
from ..state.values.containers import Path, shown
from ..state.values.tensors import Slot, TensorSpec


class StoredOptimizers:
    """The states of the optimizers in a part of a snapshot, without their arrays.

    Args:
        manager: of the run.
        step: of the snapshot.
        part: the state of one optimizer, or a list of states.

    Raises:
        NotFoundError: the run has no such step.
        SnapstoreError: it cannot be read.
    """

    def __init__(self, manager: SnapshotManager, step: int | str, part: str) -> None:
        context, snapshot = manager._found(step)
        self._part, self._ref = part, snapshot.ref
        self._decoded = decoding_of(snapshot.ref)
        self._specs, tree = read_as_ruled(context, [snapshot], lambda one: self._read(context, one))
        found = tree.get(part)
        self._states = list(enumerate(found)) if isinstance(found, list) else [(None, found)]

    def _read(self, context: Context, snapshot: Snapshot) -> tuple[list[list[TensorSpec]], Any]:
        parts = PartSources(context, snapshot, [self._part], AsRank("same")).parts
        return [list(part.specs) for part in parts], decode(parts, partial=True, decoded=self._decoded)

    def require_fit(self, of: Sequence[Any]) -> None:
        """Check groups, names and shapes.

        Raises:
            InvalidInputError: a state does not fit its optimizer.
        """
        lines = list[str]()
        for optimizer, path, stored in self._pairs(of):
            state = optimizer.state_dict()
            for below, text in optimizer_fit.differences(optimizer, stored, state, path, self._spec_of, self._decoded):
                lines.append(f"  {shown(below)}: {text}")
        if lines:
            raise InvalidInputError(f"{self._ref}: the state does not fit the optimizer:", *lines[:20])

    def put_back(self, of: Sequence[Any], states: Sequence[Any], *, copy: bool = False) -> None:
        """Put the values of loaded states in place of the ones that torch has cast; see `optimizer_fit.put_back`.

        Args:
            states: as the optimizers have loaded them.
            copy: whether the memory of `states` does not last.
        """
        for (optimizer, _, stored), state in zip(self._pairs(of), states, strict=False):
            if (found := self._decoded.parameters.get(id(stored))) is not None:
                optimizer_fit.put_back(optimizer, state, found[1], copy=copy)

    def _pairs(self, of: Sequence[Any]) -> Iterator[tuple[Any, Path, Any]]:
        """Yield each optimizer with the path and the decoded form of its state."""
        for optimizer, (number, stored) in zip(of, self._states, strict=False):
            yield optimizer, (self._part,) if number is None else (self._part, number), stored

    def _spec_of(self, slot: Slot) -> TensorSpec:
        return self._specs[slot.part][slot.index]


def put_back_by_name(model: Any, optimizer: Any, state: Any) -> None:
    """Put the values of a sharded state, which `set_optimizer_state_dict` has loaded, in place of casts of torch.

    Args:
        model: whose weights were restored too, so that they have their stored dtypes.
        state: of the form of `get_optimizer_state_dict`.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    optimizer_fit.put_back(optimizer, {"state": state["state"], "param_groups": groups}, None)
