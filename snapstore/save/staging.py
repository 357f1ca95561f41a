"""Staging: the private copy of the state that a save reads, and the bytes that the next save deltas against.

An asynchronous save copies the state into spare buffers while its caller waits, and reads them afterwards. Once it has
committed, they become the base, and the buffers of the old base become the spare ones: twice the state in all. A
synchronous save of host memory reads the state itself, and overwrites the base chunk by chunk: once the state. A save
that fails leaves no base of its own. A tensor whose deltas were all rejected keeps no base for a while.

Tensors on a CUDA device are copied on that device, or into pinned host memory (`staging=`, engine/cuda/staging.py).
Without an engine for the device they are copied through host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..arrays import Bytes
from ..engine.registry import Engines
from ..errors import InvalidInputError, out_of_memory
from ..format.chunking import INLINE_BYTES
from ..state.arrays import Memory
from ..state.flatten import Part
from ..state.held_array import Held
from .inputs import Key, PartInput, TensorInput, inputs_of

if TYPE_CHECKING:
    from ..engine.cuda.staging import DeviceStaging

Mode = Literal["auto", "device", "host"]
MODES = ("auto", "device", "host")
#: A tensor whose deltas were rejected keeps no base for this many saves; then it is tried again.
RETRY_AFTER_SAVES = 32


class Buffers(dict[Key, Memory]):
    """Bytes of tensors, (nbytes,) uint8."""

    def room(self, key: Key, nbytes: int) -> Bytes:
        """Return the host buffer of a tensor; make a new one where the size differs."""
        buffer = self.get(key)
        if not isinstance(buffer, np.ndarray) or buffer.size != nbytes:
            buffer = self[key] = np.empty(nbytes, np.uint8)
        return buffer

    def keep_only(self, keys: set[Key]) -> None:
        """Drop the buffers of all other tensors."""
        for gone in self.keys() - keys:
            del self[gone]


class Staging:
    """The buffers of one SnapshotManager. One save at a time uses them, in this order:

        inputs = staging.copy(parts)            asynchronous: in the caller's thread, which then goes on;
        inputs = inputs_of(parts)               or synchronous: the caller waits, and its own memory is read
        with staging.saving():                  waits until the copies are complete
            staging.use_base(inputs, id)        lends the bytes of snapshot `id`, if they are the ones kept here
            ...                                 the inputs are written, and committed
            staging.keep_as_base(inputs, id)    their bytes are what the next save deltas against

    A save that raises within `saving`, or does not get there, leaves no base.

    Args:
        keep_base: keep the bytes of the last save as the next one's base; else they are read back from the store.
        mode: where copies of CUDA tensors lie: "device", "host", or "auto" by the memory that is free.
    """

    def __init__(self, engines: Engines, *, keep_base: bool = True, mode: Mode = "auto") -> None:
        if mode not in MODES:
            raise InvalidInputError(f"staging {mode!r}: expected 'auto', 'device' or 'host'")
        self._engines, self._keep_base, self._mode = engines, keep_base, mode
        self._base = Buffers()
        self._spare = Buffers()
        self._base_id: str | None = None
        self._delta_rejected: dict[Key, int] = {}  # -> saves until it is tried again
        self._devices: DeviceStaging | None = None

    def on_device(self, value: Any) -> bool:
        """Return whether a value is a tensor on a device that has an engine."""
        device: Any = getattr(value, "device", None)  # NumPy arrays have one as well: the str "cpu"
        return getattr(device, "type", "cpu") != "cpu" and self._engines.on_device(device)

    def copy(self, parts: Sequence[Part], inline_below: int = INLINE_BYTES) -> list[PartInput]:
        """Copy every tensor of `inline_below` bytes or more into spare buffers; the smaller ones into new memory.

        Returns:
            The inputs; nothing of the caller's is in them. On a device the copies are complete within `saving`.

        Raises:
            InvalidInputError: an array is not the one that was flattened, or is changed while it is copied.
        """
        inputs = inputs_of(parts)
        if self._spare:
            self._spare.keep_only({tensor.key for part in inputs for tensor in part.tensors})
        try:
            with out_of_memory("save", "nothing was committed; free memory, or save with async_save=False"):
                self._copy(inputs, inline_below)
        except BaseException:
            self.release_copies()
            raise
        return inputs

    def _copy(self, inputs: Sequence[PartInput], inline_below: int) -> None:
        on_devices: list[tuple[TensorInput, Held]] = []
        for tensor in _tensors(inputs):
            held, nbytes = tensor.array, tensor.spec.nbytes
            assert held is not None
            if nbytes and self.on_device(held.value):
                on_devices.append((tensor, held))
                continue
            room = np.empty(nbytes, np.uint8) if nbytes < inline_below else self._spare.room(tensor.key, nbytes)
            held.copy_into(room)
            tensor.copy, tensor.array = room, None
        if on_devices:
            self._copy_on_devices(on_devices, inline_below)

    def _copy_on_devices(self, tensors: Sequence[tuple[TensorInput, Held]], inline_below: int) -> None:
        if self._devices is None:
            from ..engine.cuda.staging import DeviceStaging

            self._devices = DeviceStaging(self._engines, self._mode, twice=self._keep_base)
        items = [(tensor.key, held.take(), tensor.spec.nbytes) for tensor, held in tensors]
        memories = self._devices.copy(items, self._spare, self._base, self._delta_rejected, inline_below)
        for (tensor, held), memory in zip(tensors, memories, strict=True):
            held.confirm()
            tensor.copy, tensor.array = memory, None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Wait until the last copies are complete; let go of those on devices if the save fails."""
        try:
            if self._devices is not None:
                self._devices.wait_copied(self._spare, self._base)
            yield
        except BaseException:
            self.release_copies()
            raise

    def use_base(self, inputs: Sequence[PartInput], snapshot_id: str | None) -> None:
        """Lend each tensor its bytes in snapshot `snapshot_id`, if those are kept here, and say where its own go."""
        known = snapshot_id is not None and snapshot_id == self._base_id
        for tensor in _tensors(inputs):
            tensor.base = self._base.get(tensor.key) if known else None
            tensor.may_delta = tensor.key not in self._delta_rejected
            tensor.bases_tried = tensor.deltas_stored = 0
        if _are_copies(inputs):
            return
        self._base_id = None  # half overwritten from here on, and no base until `keep_as_base`
        if self._keep_base:
            self._base.keep_only({tensor.key for tensor in _tensors(inputs)})
            for tensor in _tensors(inputs):
                if tensor.spec.nbytes >= INLINE_BYTES:
                    tensor.keep_in = self._base.room(tensor.key, tensor.spec.nbytes)

    def keep_as_base(self, inputs: Sequence[PartInput], snapshot_id: str) -> None:
        """Keep the bytes of a committed save as the next base, but for tensors whose deltas were rejected."""
        self._delta_rejected = {key: left - 1 for key, left in self._delta_rejected.items() if left > 1}
        rejected = [tensor.key for tensor in _tensors(inputs) if tensor.delta_rejected]
        self._delta_rejected.update(dict.fromkeys(rejected, RETRY_AFTER_SAVES))
        if self._keep_base and _are_copies(inputs):
            self._base, self._spare = self._spare, self._base
            for key in self._delta_rejected.keys() & self._base.keys():
                self._spare[key] = self._base.pop(key)
        self.release_copies()
        self._base_id = snapshot_id if self._keep_base else None

    def release_copies(self) -> None:
        """Let go of copies on devices that no save needs any more."""
        if self._devices is not None:
            self._devices.release_memory(self._spare)

    def clear(self) -> None:
        """Give all memory back."""
        self._base, self._spare, self._base_id = Buffers(), Buffers(), None


def _tensors(inputs: Sequence[PartInput]) -> Iterator[TensorInput]:
    return (tensor for part in inputs for tensor in part.tensors)


def _are_copies(inputs: Sequence[PartInput]) -> bool:
    """Return whether staging copied the inputs: all of them, or none."""
    return any(tensor.copy is not None for tensor in _tensors(inputs))
