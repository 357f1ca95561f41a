"""Unchanged tensors: those on a device whose chunks the last snapshot holds already, so that a save need not copy them.

In: the digests of the last snapshot, and the tensors of a state that was recognised. Out: the digests of the tensors'
chunks, taken where the tensors lie. They are compared before `save` returns: afterwards the training may change the
tensors. So the caller waits for the device, up to the digests; it does so only where the last saves say that it pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Bytes, Column
from ..errors import IntegrityError, lasting
from ..format.chunking import INLINE_BYTES
from ..format.manifests.boxes import cut
from ..format.manifests.delta_chain import Digests
from ..format.manifests.manifest import Manifest
from ..state.values.containers import shown
from ..state.values.tensors import TensorSpec
from .inputs import InputKey, TensorInput
from .known_state import Group

#: It pays if the tensors that may be unchanged are this share of a device's state.
MIN_SHARE = 0.1


class UnchangedGoneError(IntegrityError):
    """A tensor was not copied, as a base had its chunks. Now the base is damaged, and the tensor has changed."""


def unchanged_gone(spec: TensorSpec) -> UnchangedGoneError:
    """Return the error for a tensor; no attempt can save it any more."""
    return lasting(
        UnchangedGoneError(
            f"{shown(spec.path)}: was not copied, because its chunks were stored already; now they are damaged or "
            "gone, and training has changed the tensor; nothing was committed; save again: the next save copies it"
        )
    )


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """The tensors of a group that may be unchanged.

    Attributes:
        group: of the known state, with all tensors of a device.
        tried: those that may be unchanged; `at` are their positions in `group`.
        rest: all others of the group.
        spans: of their chunks: the tensor of each one among `tried`, its start and its length [bytes], (n,) each.
    """

    group: Group
    tried: Group
    at: Column
    rest: Group
    spans: tuple[Column, Column, Column]


class UnchangedTensors:
    """Which tensors of one lineage of saves may be unchanged, by the last ones.

    Attributes:
        held: the digests of the chunks that the next save's base has; None: nothing is known.
        tries_all: whether the next save tries all tensors, because none has been compared with a base yet.
    """

    def __init__(self) -> None:
        self.held: Digests | None = None
        self.tries_all = True
        self._chunk_bytes = 0
        self._keys: frozenset[InputKey] = frozenset()
        self._trials: dict[Any, Trial] = {}  # by device

    def expect(self, manifests: Sequence[Manifest]) -> None:
        """Let the next save find the chunks of these manifests, of one chunk size."""
        chunk_bytes = {m.header.chunk_bytes for m in manifests}
        self.held = None
        if len(chunk_bytes) == 1:
            self.held, (self._chunk_bytes,) = Digests(), chunk_bytes
            for m in manifests:
                self.held.add(m.table.digests)

    def note(self, tensors: Iterable[TensorInput], manifests: Sequence[Manifest]) -> None:
        """Take note of a save that has committed these tensors in these manifests."""
        unchanged = frozenset(one.key for one in tensors if not one.stored and one.spec.nbytes >= INLINE_BYTES)
        self.tries_all = self.held is None and not unchanged
        self.expect(manifests)
        if unchanged != self._keys:
            self._keys = unchanged
            self._trials.clear()

    def forget(self) -> None:
        """Copy all tensors in the next save."""
        self.__init__()  # type: ignore[misc]

    def trial(self, device: Any, group: Group) -> Trial | None:
        """Return which tensors of a device's group to compare with the base; None: it would not pay."""
        if self.held is None or not (self._keys or self.tries_all):
            return None
        known = self._trials.get(device)
        if known is not None and known.group is group:
            return known if len(known.at) else None
        may_be = np.array([self.tries_all or key in self._keys for key in group.keys], bool)
        may_be &= (group.nbytes >= INLINE_BYTES) & ~group.is_in_pieces
        if int(group.nbytes[may_be].sum()) < MIN_SHARE * int(group.nbytes.sum()):
            may_be[:] = False
        at = np.flatnonzero(may_be)
        tried = group.take(at)
        made = Trial(group, tried, at, group.take(np.flatnonzero(~may_be)), self._spans(tried))
        self._trials[device] = made
        return made if len(at) else None

    def split(self, trial: Trial, digests: Bytes) -> tuple[Group, list[tuple[int, Bytes]]]:
        """Return the tensors to copy; and the others: each position among the slots, and digests of its chunks (k, 16).

        Args:
            digests: (n, 16) of the chunks of the trial.
        """
        assert self.held is not None
        which, firsts = trial.spans[0], np.searchsorted(trial.spans[0], np.arange(len(trial.at)))
        same = np.logical_and.reduceat(self.held.has(digests), firsts)
        ends = np.append(firsts[1:], len(which))
        rows = zip(trial.tried.rows, firsts.tolist(), ends.tolist(), same.tolist(), strict=True)
        unchanged = [(row, digests[first:end]) for row, first, end, is_same in rows if is_same]
        if same.all():
            return trial.rest, unchanged
        is_copied = np.ones(len(trial.group.rows), bool)
        is_copied[trial.at[same]] = False
        return trial.group.take(np.flatnonzero(is_copied)), unchanged

    def _spans(self, group: Group) -> tuple[Column, Column, Column]:
        """Return the spans of the chunks of tensors, as in `Trial`."""
        nothing = np.zeros(0, np.int64)
        sizes = zip(group.strip_starts(), group.nbytes.tolist(), strict=True)
        cuts = [cut(start, nbytes, self._chunk_bytes) for start, nbytes in sizes]
        which = np.repeat(np.arange(len(cuts)), [len(one) for one in cuts])
        starts = np.concatenate([nothing, *(np.cumsum(one) - one for one in cuts)])
        return which, starts, np.concatenate([nothing, *cuts])
