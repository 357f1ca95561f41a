"""Staging: the private copy of the state that a save reads, and the plain bytes that the next save deltas against.

An asynchronous save copies the state into spare buffers while its caller waits, and reads them afterwards; once it has
committed they become the base, and the old base's buffers the spare ones: twice the state in all. A synchronous save
reads the state itself, and overwrites the base chunk by chunk behind itself: once the state. The base of a failed save
is no base: its bytes are forgotten.

A Staging belongs to one SnapshotManager; only one save at a time touches it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .digest import Bytes
from .state import Part, copy_into


class Buffers(dict[tuple[str, tuple[str | int, ...]], Bytes]):
    """Plain bytes of tensors by (part, path), (nbytes,) uint8."""

    def room(self, part: str, path: tuple[str | int, ...], nbytes: int) -> Bytes:
        """The buffer of a tensor, made anew when its size is another."""
        buffer = self.get((part, path))
        if buffer is None or buffer.size != nbytes:
            buffer = self[part, path] = np.empty(nbytes, np.uint8)
        return buffer


class Staging:
    """The buffers of one lineage of saves.

    With `keep_base=False` no plain bytes outlive a save: the next one reads its bases back from the store.
    """

    def __init__(self, *, keep_base: bool = True) -> None:
        self._keep_base = keep_base
        self._base = Buffers()
        self._spare = Buffers()
        self._base_id: str | None = None

    def copy(self, parts: list[Part], inline_below: int) -> list[list[Bytes]]:
        """Copy every tensor of `inline_below` bytes or more into spare buffers; the smaller ones into new memory.

        Returns:
            Per part, per tensor (nbytes,) uint8, safe from later changes of the state.
        """
        kept = {(part.name, spec.path) for part in parts for spec in part.specs}
        for gone in self._spare.keys() - kept:
            del self._spare[gone]
        copies: list[list[Bytes]] = []
        for part in parts:
            copies.append([])
            for spec, value in zip(part.specs, part.values, strict=True):
                small = spec.nbytes < inline_below
                room = np.empty(spec.nbytes, np.uint8) if small else self._spare.room(part.name, spec.path, spec.nbytes)
                copy_into(value, room)
                copies[-1].append(room)
        return copies

    def base(self, snapshot_id: str | None) -> Mapping[tuple[str, tuple[str | int, ...]], Bytes]:
        """The plain bytes of the tensors of `snapshot_id`, if they are the ones held here."""
        return self._base if snapshot_id is not None and snapshot_id == self._base_id else {}

    def overwrite(self, part: str, path: tuple[str | int, ...], nbytes: int, start: int, chunk: Bytes) -> None:
        """Put a chunk that has been encoded in its base's place (synchronous saves)."""
        if self._keep_base:
            self._base.room(part, path, nbytes)[start : start + chunk.size] = chunk

    def begin(self) -> None:
        """From here on the base may be half overwritten: it is none until `commit`."""
        self._base_id = None

    def commit(self, snapshot_id: str, *, copied: bool) -> None:
        """The save has committed: its bytes are the next base."""
        if copied and self._keep_base:
            self._base, self._spare = self._spare, self._base
        self._base_id = snapshot_id if self._keep_base else None

    def clear(self) -> None:
        """Give all memory back."""
        self._base, self._spare, self._base_id = Buffers(), Buffers(), None
