"""Where the bytes of a restore go: memory for every stored array, and the places of the state that share it.

In: the parts, the slots that were selected, and the arrays of `into` that take them as they come. Out: one buffer per
array that is read, whatever number of places wants it, and decoded trees with arrays in their slots. A buffer is host
memory, or memory of a device onto which the caller can put bytes itself.

Invariants: nothing of `into` is modified before the first `buffer`. Tied arrays are read once, and share memory where
there is no `into`. Arrays of `into` that overlap are filled last and then compared: both must hold what was stored.

`buffer` and `complete` of different arrays may run on any threads; all else belongs to the thread that owns the state.
torch is imported only once there are tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError, InvalidInputError
from .arrays import (
    Memory,
    OnDevice,
    as_bytes,
    as_memory,
    assign,
    device_of,
    extent_of,
    from_bytes,
    memory_key,
    memory_view,
    new_array,
    new_memory,
)
from .containers import CONTAINERS, Path, children, like, shown
from .selection import Selection
from .tensors import Slot, StoredPart, TensorSpec, family

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class _Source:
    """One stored array on its way to every place that wants it.

    Its bytes arrive in `home`: the memory of the first target that can take them as they come, else the fresh array
    that the state will hold, else a temporary.
    """

    part: int
    index: int
    spec: TensorSpec
    slots: list[Slot] = field(default_factory=list)
    fresh: Any = None  # made for the places without a target
    home: Memory | None = None
    home_slot: Slot | None = None
    parameters: dict[bool, Any] = field(default_factory=dict)
    complete: bool = False


class Filling:
    """The arrays of one restore and their memory.

    Call sequence: `add` every selected slot, `claim` what `into` has for them, `find_overlaps`; then `buffer` and
    `complete` every entry of `selected`; at last `fill_overlapping` and `build`.

    Args:
        parts: Those that were decoded; slots name their positions.
        selection: Which leaves are restored.
        device: Where new tensors go; CPU by default.
        on_device: Whether bytes for arrays on a device arrive as memory of that device; None has all arrive in host
            memory.
    """

    def __init__(
        self,
        parts: Sequence[StoredPart],
        selection: Selection,
        device: str | torch.device | None,
        *,
        on_device: OnDevice = None,
    ) -> None:
        self._parts = list(parts)
        self._selection = selection
        self._device = device
        self._on_device = on_device
        self._sources: dict[tuple[int, int], _Source] = {}
        self._targets: dict[Slot, Any] = {}  # memory to fill
        self._owned: set[Slot] = set()  # whose target is the state of an object
        self._overlapping: set[Slot] = set()  # whose target shares memory with that of another source

    def add(self, slot: Slot) -> None:
        """Note a place that wants its array.

        Raises:
            FormatError: Its spec is tied to one that it cannot be tied to.
        """
        self._source(slot).slots.append(slot)

    def claim(self, slot: Slot, target: Any, *, owned: bool) -> None:
        """Take memory of `into` for a place; `owned` where it is the state of an object, which loads it itself."""
        self._targets[slot] = target
        if owned:
            self._owned.add(slot)

    def selected(self) -> list[tuple[int, int]]:
        """Return (position of the part, index) of the arrays to read, in order, each once."""
        return sorted(self._sources)

    def spec(self, slot: Slot) -> TensorSpec:
        """Return what is stored for a place."""
        return self._parts[slot.part].specs[slot.index]

    def waiting(self) -> list[Path]:
        """Return the paths of arrays that are not complete."""
        return [source.spec.path for source in self._sources.values() if not source.complete]

    def is_overlapping(self, slot: Slot) -> bool:
        """Whether the memory that `into` has for a place is also that of another array."""
        return slot in self._overlapping

    def _source(self, slot: Slot) -> _Source:
        place = self._origin(slot.part, slot.index)
        if place not in self._sources:
            self._sources[place] = _Source(*place, self._parts[place[0]].specs[place[1]])
        return self._sources[place]

    def _origin(self, part: int, index: int) -> tuple[int, int]:
        """Follow a tie to the array it names, if that was selected as well."""
        spec = self._parts[part].specs[index]
        if spec.tie is None:
            return part, index
        name, other = spec.tie
        found = next((i for i, stored in enumerate(self._parts) if stored.name == name), None)
        if found is None:
            return part, index
        specs = self._parts[found].specs
        same = found != part and 0 <= other < len(specs) and _ties_to(spec, specs[other])
        if not same:
            raise FormatError(f"{shown(spec.path)}: tied to entry {other} of part {name!r}, which is not its like")
        return (found, other) if self._selection.matches(specs[other].path) else (part, index)

    def find_overlaps(self) -> None:
        """Find targets that share memory although the snapshot holds them as arrays of their own.

        They are filled at the end and compared: the snapshot may hold the same values (views saved as copies) or not.
        """
        claims = sorted(
            ((*extent_of(target), memory_key(target), slot) for slot, target in self._targets.items()),
            key=lambda claim: claim[:3],
        )
        group: list[Any] = []
        end = 0
        for claim in claims:
            if group and (claim[0] != group[0][0] or claim[1] >= end):
                self._settle(group)
                group = []
            end = max(end, claim[2]) if group else claim[2]
            group.append(claim)
        self._settle(group)

    def _settle(self, group: list[Any]) -> None:
        places = {(id(self._source(slot)), memory) for _, _, _, memory, slot in group}
        if len(places) > 1:
            self._overlapping.update(slot for *_, slot in group)
            for *_, slot in group:
                if slot in self._owned:  # its object decides what becomes of the memory
                    del self._targets[slot]

    def fresh_bytes(self) -> int:
        """Return how much host memory the arrays take for which `into` has none, or none that can be filled as it is.

        Those of `into` that can take as much as they say, so they bound themselves.
        """
        total = 0
        for source in self._sources.values():
            is_new = any(slot not in self._targets or slot in self._overlapping for slot in source.slots)
            on_device = family(source.spec.kind) == "tensor" and not str(self._device or "cpu").startswith("cpu")
            total += source.spec.nbytes if is_new and not on_device else 0
        return total

    def buffer(self, part: int, index: int) -> Memory:
        """Return the memory for an entry of `selected`, allocated now if it is not that of `into`.

        Returns:
            (nbytes,) uint8, writable; the same on every call until `complete`. Work of the current stream may still use
            device memory: other streams must wait for it before they write.
        """
        source = self._sources[part, index]
        if source.home is None:
            places = ((slot, self._memory_of(slot)) for slot in source.slots)
            source.home_slot, source.home = next((place for place in places if place[1] is not None), (None, None))
        if source.home is None and self._in_fresh(source):
            source.fresh = new_array(source.spec, self._device)
            source.home = as_memory(source.fresh, self._on_device)
        elif source.home is None:
            source.home = new_memory(source.spec.nbytes, self._temporary_device(source))
        return source.home

    def _memory_of(self, slot: Slot) -> Memory | None:
        """Of a target that takes bytes as they come."""
        if slot not in self._targets or slot in self._overlapping:
            return None
        return memory_view(self._targets[slot], self._on_device)

    def _in_fresh(self, source: _Source) -> bool:
        """Whether a place without a target wants memory that bytes can be read into."""
        if source.spec.kind == "bytes" or all(slot in self._targets for slot in source.slots):
            return False
        if self._device is None or source.spec.kind == "array":
            return True
        if self._on_device is None:
            return False
        import torch

        return self._on_device(torch.empty(0, device=self._device).device)  # "cuda" becomes the current "cuda:0"

    def _temporary_device(self, source: _Source) -> torch.device | None:
        """Return where the bytes of the first target may lie; overlapping ones keep theirs to the end, on the host."""
        slots = [slot for slot in source.slots if slot in self._targets and slot not in self._overlapping]
        devices = (device_of(self._targets[slot], self._on_device) for slot in slots)
        return next(filter(None, devices), None)

    def complete(self, part: int, index: int) -> None:
        """Pass the bytes in `buffer` on to every place that wants them; they are all there and verified.

        Device memory is copied on the current stream, which must have waited for those that wrote it.
        """
        source = self._sources[part, index]
        home = self.buffer(part, index)
        if source.fresh is None and any(slot not in self._targets for slot in source.slots):
            source.fresh = from_bytes(home, source.spec, self._device)
        for slot in source.slots:
            if slot in self._targets and slot is not source.home_slot and slot not in self._overlapping:
                assign(self._targets[slot], home, source.spec)
        source.complete = True
        if self._overlapping.isdisjoint(source.slots):
            source.home = None

    def fill_overlapping(self) -> None:
        """Fill the arrays of `into` that share memory; every entry of `selected` is complete.

        Raises:
            InvalidInputError: The snapshot holds different values for them.
        """
        slots = [slot for slot in self._overlapping if slot in self._targets]
        for slot in slots:
            source = self._source(slot)
            assign(self._targets[slot], self.buffer(source.part, source.index), source.spec)
        for slot in slots:
            self.require_equal(slot, self._targets[slot], self._source(slot).spec.path)

    def require_equal(self, slot: Slot, value: Any, path: Path) -> None:
        """Refuse an array that does not hold what was stored for an overlapping place.

        Raises:
            InvalidInputError: It does not.
        """
        source = self._source(slot)
        if not np.array_equal(as_bytes(value), as_bytes(self.buffer(source.part, source.index))):
            raise InvalidInputError(
                f"{shown(path)}: shares memory with another array in `into`, but the snapshot holds other values for "
                "the two; untie them in `into` and restore again"
            )

    def build(self, tree: Any) -> Any:
        """Return a decoded tree with its arrays in their slots."""
        if type(tree) is Slot:
            return self._value(tree)
        if type(tree) not in CONTAINERS:
            return tree
        items = []
        for _, key, child in children(tree):
            items.append((key, self.build(child)))
        return like(tree, items)

    def _value(self, slot: Slot) -> Any:
        if slot in self._targets:
            return self._targets[slot]
        source = self._source(slot)
        if slot.tag == "bytearray":
            return bytearray(source.fresh)
        if slot.tag not in ("tensor", "parameter"):
            return source.fresh
        import torch

        value = source.fresh.detach()  # one object per place; all of them share the memory, which is what tied means
        if slot.tag == "tensor":
            return value.requires_grad_(slot.requires_grad)
        if slot.requires_grad not in source.parameters:
            source.parameters[slot.requires_grad] = torch.nn.Parameter(value, slot.requires_grad)
        return source.parameters[slot.requires_grad]


def _ties_to(spec: TensorSpec, origin: TensorSpec) -> bool:
    alike = (family(spec.kind), spec.dtype, spec.shape) == (family(origin.kind), origin.dtype, origin.shape)
    return alike and origin.tie is None
