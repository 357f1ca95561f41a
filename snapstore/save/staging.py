"""Staging: the private copy of the state that a save reads, and the plain bytes that the next save deltas against.

An asynchronous save copies the state into spare buffers while its caller waits, and reads them afterwards; once it has
committed they become the base, and the old base's buffers the spare ones: twice the state in all. A synchronous save of
host memory reads the state itself, and overwrites the base chunk by chunk behind itself: once the state. The base of a
failed save is no base: its bytes are forgotten. A tensor none of whose deltas paid keeps no base for a while.

Tensors on a CUDA device are copied on that device, or into pinned host memory (`staging=`, cuda/staging.py); without an
engine for it they take the way of all others, through host memory.

A Staging belongs to one SnapshotManager; only one save at a time touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..arrays import Bytes
from ..engine.registry import Engines
from ..errors import InvalidInputError
from ..state.arrays import Memory
from ..state.flatten import Part
from ..state.held import Held

if TYPE_CHECKING:
    from ..engine.cuda.staging import DeviceStaging

#: Part, path, and which of the tensors of that path: keys such as 1.0 and "1.0" look alike in a path.
Key = tuple[str, tuple[str | int, ...], int]
PlainBytes = Callable[[int, int], Memory | None]  # (part, tensor) -> (nbytes,) uint8, where they are at hand
Mode = Literal["auto", "device", "host"]
MODES = ("auto", "device", "host")
#: A tensor whose deltas did not pay keeps no base for this many saves; then it is tried again.
RETRY_AFTER_SAVES = 32


def keys_of(part: Part) -> list[Key]:
    """A name for each of a part's tensors, the same in the next save."""
    seen: dict[tuple[str | int, ...], int] = {}
    keys = []
    for spec in part.specs:
        number = seen[spec.path] = seen.get(spec.path, -1) + 1
        keys.append((part.name, spec.path, number))
    return keys


class Buffers(dict[Key, Memory]):
    """Plain bytes of tensors, (nbytes,) uint8."""

    def room(self, key: Key, nbytes: int) -> Bytes:
        """The host buffer of a tensor, made anew when its size is another."""
        buffer = self.get(key)
        if not isinstance(buffer, np.ndarray) or buffer.size != nbytes:
            buffer = self[key] = np.empty(nbytes, np.uint8)
        return buffer

    def keep_only(self, keys: set[Key]) -> None:
        """Drop the buffers of tensors that are gone."""
        for gone in self.keys() - keys:
            del self[gone]


class Staging:
    """The buffers of one lineage of saves.

    Args:
        keep_base: hold the plain bytes of the last save as the next one's base; else they are read back from the store.
        mode: where copies of CUDA tensors lie: "device", "host", or "auto" by the memory that is free.
    """

    def __init__(self, engines: Engines, *, keep_base: bool = True, mode: Mode = "auto") -> None:
        if mode not in MODES:
            raise InvalidInputError(f"staging {mode!r}: expected 'auto', 'device' or 'host'")
        self._engines, self._keep_base, self._mode = engines, keep_base, mode
        self._base = Buffers()
        self._spare = Buffers()
        self._base_id: str | None = None
        self._unpaid: dict[Key, int] = {}  # -> saves until it is tried again
        self._devices: DeviceStaging | None = None

    def on_device(self, value: Any) -> bool:
        """Whether a value is a tensor on a device that has an engine."""
        device: Any = getattr(value, "device", None)  # NumPy arrays have one as well: the str "cpu"
        return getattr(device, "type", "cpu") != "cpu" and self._engines.on_device(device)

    def copy(self, parts: list[Part], inline_below: int) -> list[list[Memory]]:
        """Copy every tensor of `inline_below` bytes or more into spare buffers; the smaller ones into new memory.

        Returns:
            Per part, per tensor (nbytes,) uint8, safe from later changes of the state once `landed` has returned.

        Raises:
            InvalidInputError: an array is not what was flattened, or is changed while it is copied.
        """
        names = [keys_of(part) for part in parts]
        if self._spare:
            self._spare.keep_only({key for keys in names for key in keys})
        copies: list[list[Memory]] = []
        on_devices: list[tuple[int, int, Key, Held]] = []
        for p, (part, keys) in enumerate(zip(parts, names, strict=True)):
            copies.append([])
            for key, held in zip(keys, part.arrays, strict=True):
                nbytes = held.spec.nbytes
                if nbytes and self.on_device(held.value):
                    on_devices.append((p, len(copies[-1]), key, held))
                    copies[-1].append(None)
                    continue
                room = np.empty(nbytes, np.uint8) if nbytes < inline_below else self._spare.room(key, nbytes)
                held.copy_into(room)
                copies[-1].append(room)
        if on_devices:
            if self._devices is None:
                from ..engine.cuda.staging import DeviceStaging

                self._devices = DeviceStaging(self._engines, self._mode, twice=self._keep_base)
            memories = self._devices.copy(
                [(key, held.take(), held.spec.nbytes) for _, _, key, held in on_devices],
                self._spare, self._base, self._unpaid, inline_below,
            )  # fmt: skip
            for (p, t, _, held), memory in zip(on_devices, memories, strict=True):
                held.confirm()
                copies[p][t] = memory
        return copies

    def landed(self) -> None:
        """Wait until the last copy is complete."""
        if self._devices is not None:
            self._devices.landed(self._spare, self._base)

    def base(self, snapshot_id: str | None, parts: Sequence[Part]) -> PlainBytes:
        """The plain bytes of the tensors of `snapshot_id`, if they are the ones held here."""
        if snapshot_id is None or snapshot_id != self._base_id:
            return lambda part, tensor: None
        held, names = self._base, [keys_of(part) for part in parts]
        return lambda part, tensor: held.get(names[part][tensor])

    def no_delta(self, parts: Sequence[Part]) -> frozenset[tuple[int, int]]:
        """(part, tensor) of those whose deltas did not pay lately."""
        if not self._unpaid:
            return frozenset()
        return frozenset(
            (p, t) for p, part in enumerate(parts) for t, key in enumerate(keys_of(part)) if key in self._unpaid
        )

    def overwrite(self, parts: Sequence[Part]) -> Callable[[int, int, int, Bytes], None] | None:
        """Begin a synchronous save: what to call with (part, tensor, start, bytes) once chunks have been encoded.

        They take their bases' place; from here on the base is half overwritten, and none until `commit`.
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

    def commit(self, snapshot_id: str, parts: Sequence[Part], unpaid: set[tuple[int, int]], *, copied: bool) -> None:
        """The save has committed: its bytes are the next base, but for those of tensors whose deltas do not pay."""
        self._unpaid = {key: left - 1 for key, left in self._unpaid.items() if left > 1}
        names = [keys_of(part) for part in parts] if unpaid else []
        self._unpaid.update({names[p][t]: RETRY_AFTER_SAVES for p, t in unpaid})
        if copied and self._keep_base:
            self._base, self._spare = self._spare, self._base
            for key in self._unpaid.keys() & self._base.keys():
                self._spare[key] = self._base.pop(key)
        if self._devices is not None:
            self._devices.settle(self._spare)
        self._base_id = snapshot_id if self._keep_base else None

    def failed(self) -> None:
        """The save has failed: its copies are no base, and those on a device are let go."""
        if self._devices is not None:
            self._devices.settle(self._spare)

    def clear(self) -> None:
        """Give all memory back."""
        self._base, self._spare, self._base_id = Buffers(), Buffers(), None
