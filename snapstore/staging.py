"""Staging: the private copy of the state that a save reads, and the plain bytes that the next save deltas against.

An asynchronous save copies the state into spare buffers while its caller waits, and reads them afterwards; once it has
committed they become the base, and the old base's buffers the spare ones: twice the state in all. A synchronous save
reads the state itself, and overwrites the base chunk by chunk behind itself: once the state. The base of a failed save
is no base: its bytes are forgotten.

A Staging belongs to one SnapshotManager; only one save at a time touches it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from .digest import Bytes
from .state.arrays import copy_into
from .state.flatten import Part

#: Part, path, and which of the tensors of that path: keys such as 1.0 and "1.0" look alike in a path.
Key = tuple[str, tuple[str | int, ...], int]
PlainBytes = Callable[[int, int], Bytes | None]  # (part, tensor) -> (nbytes,) uint8, where they are at hand


def keys_of(part: Part) -> list[Key]:
    """A name for each of a part's tensors, the same in the next save."""
    seen: Counter[tuple[str | int, ...]] = Counter()
    keys = []
    for spec in part.specs:
        keys.append((part.name, spec.path, seen[spec.path]))
        seen[spec.path] += 1
    return keys


class Buffers(dict[Key, Bytes]):
    """Plain bytes of tensors, (nbytes,) uint8."""

    def room(self, key: Key, nbytes: int) -> Bytes:
        """The buffer of a tensor, made anew when its size is another."""
        buffer = self.get(key)
        if buffer is None or buffer.size != nbytes:
            buffer = self[key] = np.empty(nbytes, np.uint8)
        return buffer

    def keep_only(self, keys: set[Key]) -> None:
        """Drop the buffers of tensors that are gone."""
        for gone in self.keys() - keys:
            del self[gone]


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
        names = [keys_of(part) for part in parts]
        self._spare.keep_only({key for keys in names for key in keys})
        copies: list[list[Bytes]] = []
        for part, keys in zip(parts, names, strict=True):
            copies.append([])
            for key, spec, value in zip(keys, part.specs, part.values, strict=True):
                small = spec.nbytes < inline_below
                room = np.empty(spec.nbytes, np.uint8) if small else self._spare.room(key, spec.nbytes)
                copy_into(value, room)
                copies[-1].append(room)
        return copies

    def base(self, snapshot_id: str | None, parts: Sequence[Part]) -> PlainBytes:
        """The plain bytes of the tensors of `snapshot_id`, if they are the ones held here."""
        if snapshot_id is None or snapshot_id != self._base_id:
            return lambda part, tensor: None
        held, names = self._base, [keys_of(part) for part in parts]
        return lambda part, tensor: held.get(names[part][tensor])

    def overwrite(self, parts: Sequence[Part]) -> Callable[[int, int, int, Bytes], None] | None:
        """Begin a synchronous save: what to call with (part, tensor, start, chunk) once a chunk has been encoded.

        The chunk takes its base's place; from here on the base is half overwritten, and none until `commit`.
        """
        self._base_id = None
        if not self._keep_base:
            return None
        names = [keys_of(part) for part in parts]
        self._base.keep_only({key for keys in names for key in keys})

        def put(part: int, tensor: int, start: int, chunk: Bytes) -> None:
            room = self._base.room(names[part][tensor], parts[part].specs[tensor].nbytes)
            room[start : start + chunk.size] = chunk

        return put

    def commit(self, snapshot_id: str, *, copied: bool) -> None:
        """The save has committed: its bytes are the next base."""
        if copied and self._keep_base:
            self._base, self._spare = self._spare, self._base
        self._base_id = snapshot_id if self._keep_base else None

    def clear(self) -> None:
        """Give all memory back."""
        self._base, self._spare, self._base_id = Buffers(), Buffers(), None
