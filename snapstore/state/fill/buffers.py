"""The memory of a restore: one buffer for every stored array, and the places of the state that share it.

In: the parts, the selected slots, and the arrays of `into` that can be filled directly. Out: one buffer per array that
is read, however many places want it, and decoded trees with arrays in their slots. A buffer is host memory, or device
memory that the caller can write itself. The buffer for a sharded tensor of `into` has the boxes that the local tensor
holds, one after the other.

Invariants: nothing of `into` is modified before the first `buffer`. Tied arrays are read once, and share memory if
there is no `into`. Arrays of `into` that overlap are filled last and then compared: both must have the stored values.

`buffer` and `complete` of different arrays may run on any threads; everything else belongs to the thread that owns the
state. torch is imported only when there are tensors.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ...errors import FormatError, InvalidInputError
from ..tree.decode import ELSEWHERE, Decoded
from ..values.arrays import (
    SHARED_ELEMENTS,
    Memory,
    OnDevice,
    as_bytes,
    as_memory,
    assign,
    device_of,
    dtype_name,
    extent_of,
    from_bytes,
    memory_key,
    memory_view,
    new_array,
    new_memory,
    note_written,
    overlaps_itself,
    torch_dtype,
)
from ..values.containers import CONTAINERS, Path, children, like, metadata_of, shown
from ..values.sharded import Boxes, local_of, locals_of, sharding_of
from ..values.tensors import DimOrder, Slot, StoredPart, TensorSpec, can_tie, dim_order_of, family
from ..values.wrapped import unwrapped

if TYPE_CHECKING:
    import torch


#: The bytes of an array that are compared before and after its object has loaded it; at least one element.
SAMPLE_BYTES = 64 * 1024


class Want(NamedTuple):
    """An array to read.

    Attributes:
        part: the position of its part.
        entry: the index of its spec in the part.
        boxes: (offsets, sizes) of the boxes that are wanted of it, whose bytes follow each other; None: all of it.
    """

    part: int
    entry: int
    boxes: Boxes | None = None


@dataclass(slots=True, eq=False)
class _Source:
    """One stored array, or some boxes of it, and every place that wants it; `spec` has the shape of the memory.

    Its bytes arrive in `home`: the memory of the first target that can be filled directly, else the fresh array that
    the state will contain, else a temporary buffer.
    """

    want: Want
    spec: TensorSpec
    slots: list[Slot] = field(default_factory=list)
    fresh: Any = None  # a new array for the places without a target
    home: Memory | None = None
    home_slot: Slot | None = None
    parameters: dict[bool, Any] = field(default_factory=dict)
    complete: bool = False


class RestoreBuffers:
    """The arrays of one restore and their memory.

    Call sequence: `add` every selected slot, `claim` the arrays of `into` for them, `find_overlaps`; once it is known
    where the bytes lie, `lay_out`; then `buffer` and `complete` every entry of `wants`; at the end `fill_overlapping`
    and `build`.

    Args:
        parts: The decoded parts; slots contain their positions.
        device: The device of new tensors; CPU by default.
        on_device: Whether bytes for arrays on a device arrive in memory of that device; None: all arrive in host
            memory.
        decoded: Which decoded containers have no arrays in them, and which are plain forms of classes.
    """

    def __init__(
        self,
        parts: Sequence[StoredPart],
        device: str | int | torch.device | None,
        *,
        on_device: OnDevice = None,
        decoded: Decoded | None = None,
    ) -> None:
        self._parts = list(parts)
        self._device = device
        self._on_device = on_device
        self._decoded = decoded or Decoded()
        self._sources: dict[Want, _Source] = {}
        self._boxes: dict[Slot, Boxes] = {}  # of the targets that are sharded
        self._targets: dict[Slot, Any] = {}  # arrays of `into` to fill; of sharded and wrapped ones the inner tensors
        self._wholes: dict[Slot, Any] = {}  # the sharded and wrapped ones themselves
        self._owned: set[Slot] = set()  # slots whose target belongs to an object
        self._replaceable: set[Slot] = set()  # those among them whose object would take another array as well
        self._overlapping: set[Slot] = set()  # slots whose target shares memory with that of another source

    def add(self, slot: Slot) -> None:
        """Add a place that wants its array.

        Raises:
            FormatError: Its spec is tied to an entry of another kind, dtype or shape.
        """
        self._source(slot).slots.append(slot)

    def remove(self, slot: Slot) -> None:
        """Remove a place, if it was added; an array that no other place wants is then not read."""
        source = self._sources.get(self._want(slot))
        if source is not None and slot in source.slots:
            source.slots.remove(slot)
            if not source.slots:
                del self._sources[source.want]

    def claim(self, slot: Slot, target: Any, *, owned: bool, replaceable: bool = False) -> None:
        """Use an array of `into` for a place; `owned` if it is in the state of an object, which loads it itself.

        Args:
            replaceable: whether the object may take a new array instead, if this one has another layout. A module
                copies the values, whatever their layout is.
        """
        if owned:
            self._owned.add(slot)
        sharding = sharding_of(target)
        if sharding is None:
            self._targets[slot] = inner = unwrapped(target)
            if inner is not target:
                self._wholes[slot] = target
            elif replaceable:
                self._replaceable.add(slot)
            return
        self.remove(slot)
        self._wholes[slot] = target
        if sharding.is_apart:
            for box, local in zip(sharding.boxes, locals_of(target), strict=True):
                self._fill_boxes(Slot(slot.part, slot.index, slot.tag), (box,), local)
        else:
            self._fill_boxes(slot, sharding.boxes, local_of(target))

    def _fill_boxes(self, slot: Slot, boxes: Boxes, local: Any) -> None:
        """Fill a local tensor with the boxes that it holds."""
        self._boxes[slot], self._targets[slot] = boxes, local
        source = self._source(slot)
        source.slots.append(slot)
        source.spec = msgspec.structs.replace(source.spec, shape=tuple(local.shape))

    def __len__(self) -> int:
        """Return the number of arrays to read."""
        return len(self._sources)

    def wants(self) -> list[Want]:
        """Return every array to read, in the order of the manifests."""
        return sorted(self._sources, key=lambda want: (want.part, want.entry, want.boxes or ()))

    def spec(self, slot: Slot) -> TensorSpec:
        """Return the spec of the array that is stored for a place."""
        return self._parts[slot.part].specs[slot.index]

    def waiting(self) -> list[Path]:
        """Return the paths of arrays that are not complete."""
        return [source.spec.path for source in self._sources.values() if not source.complete]

    def is_overlapping(self, slot: Slot) -> bool:
        """Return whether the array of `into` for a place shares memory with another array."""
        return slot in self._overlapping

    def _want(self, slot: Slot) -> Want:
        return Want(*self._origin(slot.part, slot.index), self._boxes.get(slot))

    def _source(self, slot: Slot) -> _Source:
        want = self._want(slot)
        if want not in self._sources:
            self._sources[want] = _Source(want, self._parts[want.part].specs[want.entry])
        return self._sources[want]

    def _origin(self, part: int, index: int) -> tuple[int, int]:
        """Follow a tie to its origin if the part of that is read: its path need not be selected."""
        spec = self._parts[part].specs[index]
        if spec.tie is None:
            return part, index
        name, other = spec.tie
        found = next((i for i, stored in enumerate(self._parts) if stored.name == name), None)
        if found is None:
            return part, index
        specs = self._parts[found].specs
        same = found != part and 0 <= other < len(specs) and can_tie(spec, specs[other])
        if not same:
            raise FormatError(
                f"{shown(spec.path)}: tied to entry {other} of part {name!r}, which has another kind, dtype or shape"
            )
        return found, other

    def compare_loaded(self, slot: Slot) -> None:
        """Compare an array of an object with the stored values after its load: its elements share memory."""
        self._overlapping.add(slot)

    def find_overlaps(self) -> None:
        """Find targets that share memory although the snapshot stores them as separate arrays.

        They are filled at the end and compared: the stored values may be the same (views saved as copies) or differ.
        """
        claims = sorted(
            ((*extent_of(array), memory_key(array), slot) for slot, array in self._targets.items()),
            key=lambda claim: claim[:3],
        )
        group: list[Any] = []
        end = 0
        for claim in claims:
            if group and (claim[0] != group[0][0] or claim[1] >= end):
                self._note_overlap(group)
                group = []
            end = max(end, claim[2]) if group else claim[2]
            group.append(claim)
        self._note_overlap(group)

    def _note_overlap(self, group: list[Any]) -> None:
        places = {(id(self._source(slot)), memory) for _, _, _, memory, slot in group}
        if len(places) > 1:
            self._overlapping.update(slot for *_, slot in group)
            for *_, slot in group:
                if slot in self._owned and slot not in self._wholes:  # its object decides how to load it
                    del self._targets[slot]

    def lay_out(self, orders: Mapping[Want, DimOrder]) -> None:
        """Give new arrays their dimension orders, and objects new arrays in place of those with other orders.

        Args:
            orders: of the stored arrays; others are in C order.
        """
        for want, source in self._sources.items():
            order = orders.get(want, ())
            if order:
                source.spec = msgspec.structs.replace(source.spec, dim_order=order)
            for slot in source.slots:
                if slot in self._replaceable and slot in self._targets and dim_order_of(self._targets[slot]) != order:
                    del self._targets[slot]

    def fills_at_once(self) -> bool:
        """Return whether arrays of `into` are filled while bytes arrive, before all of them are complete."""
        return not self._overlapping.issuperset(self._targets)

    def fresh_bytes(self) -> int:
        """Return how many bytes of host memory are needed for arrays that `into` lacks, or has only overlapping.

        Arrays of `into` are not counted: their memory exists already. A cast, or an array that is not in C order, needs
        a temporary buffer, which is freed when its array is complete: the largest one is counted.
        """
        total = temporary = 0
        is_cpu = self._device is None or str(self._device).startswith("cpu")
        for source in self._sources.values():
            is_new = any(slot not in self._targets or slot in self._overlapping for slot in source.slots)
            on_device = family(source.spec.kind) == "tensor" and not is_cpu
            total += source.spec.nbytes if is_new and not on_device else 0
            is_cast = any(_cast_from(source.spec, array) for _, array in self._filled_at_once(source))
            if is_cast or (is_new and source.spec.dim_order):
                temporary = max(temporary, source.spec.nbytes if self._temporary_device(source) is None else 0)
        return total + temporary

    def find_home(self, want: Want) -> Memory | None:
        """Return the memory of an array of `into`, or of a new one, for an entry of `wants`.

        None: no array has its bytes in C order and its dtype, so a temporary buffer is needed.
        """
        source = self._sources[want]
        if source.home is None:
            arrays = ((s, array) for s, array in self._filled_at_once(source) if not _cast_from(source.spec, array))
            places = ((slot, memory_view(array, self._on_device)) for slot, array in arrays)
            source.home_slot, source.home = next((place for place in places if place[1] is not None), (None, None))
        if source.home is None and self._in_fresh(source):
            source.fresh = new_array(source.spec, self._device)
            source.home = as_memory(source.fresh, self._on_device)
        return source.home

    def device_of(self, want: Want) -> torch.device | None:
        """Return the device where the bytes of an entry of `wants` arrive; None: host memory."""
        home = self.find_home(want)
        if home is None:
            return self._temporary_device(self._sources[want])
        return None if isinstance(home, np.ndarray) else home.device

    def allocate(self, want: Want) -> None:
        """Make the new array for an entry of `wants` that will not be read."""
        self._sources[want].fresh = new_array(self._sources[want].spec, self._device)

    def buffer(self, want: Want) -> Memory:
        """Return the memory for an entry of `wants`: that of `find_home`, or a temporary buffer.

        Returns:
            (nbytes,) uint8, writable; the same on every call until `complete`. Work on the current stream may still use
            device memory: other streams must wait for it before they write.
        """
        source, home = self._sources[want], self.find_home(want)
        if home is None:
            home = source.home = new_memory(source.spec.nbytes, self._temporary_device(source))
        return home

    def _filled_at_once(self, source: _Source) -> list[tuple[Slot, Any]]:
        """Return the places that have an array in `into`, with that array; overlapping ones are left out."""
        slots = (slot for slot in source.slots if slot in self._targets and slot not in self._overlapping)
        return [(slot, self._targets[slot]) for slot in slots]

    def _in_fresh(self, source: _Source) -> bool:
        """Return whether the bytes can be read directly into the new array of a place without a target."""
        if source.spec.kind == "bytes" or all(slot in self._targets for slot in source.slots):
            return False
        if source.spec.dim_order:  # the bytes arrive in C order
            return False
        if self._device is None or source.spec.kind == "array":
            return True
        if self._on_device is None:
            return False
        import torch

        return self._on_device(torch.empty(0, device=self._device).device)  # "cuda" becomes the current "cuda:0"

    def _temporary_device(self, source: _Source) -> torch.device | None:
        """Return the device of the first target that keeps its bytes there and does not overlap; None: host memory."""
        devices = (device_of(array, self._on_device) for _, array in self._filled_at_once(source))
        return next(filter(None, devices), None)

    def complete(self, want: Want) -> None:
        """Copy the bytes in `buffer`, which are complete and verified, to every place that wants them.

        Device memory is copied on the current stream, which must have waited for the streams that wrote it.
        """
        source = self._sources[want]
        home = self.buffer(want)
        if source.fresh is None and any(slot not in self._targets for slot in source.slots):
            source.fresh = from_bytes(home, source.spec, self._device)
        for slot, array in self._filled_at_once(source):
            if slot is source.home_slot:
                note_written(array)
            else:
                assign(array, home, _cast_from(source.spec, array))
        source.complete = True
        if self._overlapping.isdisjoint(source.slots):
            source.home = None

    def fill_overlapping(self) -> None:
        """Fill the arrays of `into` that share memory, once every entry of `wants` is complete.

        Raises:
            InvalidInputError: The snapshot has different values for them.
        """
        for slot in self._overlapping & self._targets.keys():
            source, array = self._source(slot), self._targets[slot]
            assign(array, self.buffer(source.want), _cast_from(source.spec, array))
        self.check_overlapping()

    def check_overlapping(self) -> None:
        """Check that the arrays that `fill_overlapping` has filled still have the values that are stored for them.

        Raises:
            InvalidInputError: One has other values: an object that shares its memory has loaded them.
        """
        for slot in self._overlapping & self._targets.keys():
            self.require_equal(slot, self._targets[slot], self._source(slot).spec.path)

    def is_alike(self, one: Slot, other: Slot) -> bool:
        """Return whether two places get equal arrays or bytes, once every entry of `wants` is complete.

        Places that are left out are alike, and so are those whose arrays `fill_overlapping` compares.
        """
        sources = [self._sources.get(self._want(slot)) for slot in (one, other)]
        compared = self._wholes.keys() | (self._overlapping & self._targets.keys())
        for slot, source in zip((one, other), sources, strict=True):
            if source is None or slot not in source.slots or slot in compared:
                return True
        if sources[0] is sources[1]:
            return True
        first, second = self._value(one), self._value(other)
        if family(one.tag) == "bytes":
            return bool(first == second)
        specs = self.spec(one), self.spec(other)
        is_same = (specs[0].dtype, specs[0].shape) == (specs[1].dtype, specs[1].shape)
        return is_same and np.array_equal(as_bytes(first), as_bytes(second))

    def samples(self, tree: Any) -> dict[Slot, bytes]:
        """Return the first bytes of each array in the state of an object that was filled directly."""
        slots = slots_of(tree, self._decoded.plain)
        filled = (slot for slot in slots if slot in self._owned and slot in self._targets)
        return {slot: _first_bytes(self._targets[slot]) for slot in filled}

    def changed_since(self, samples: dict[Slot, bytes]) -> Slot | None:
        """Return the place of an array that has other first bytes than before, or None."""
        for slot, before in samples.items():
            with suppress(RuntimeError):  # its object has released the memory
                if _first_bytes(self._targets[slot]) != before:
                    return slot
        return None

    def require_equal(self, slot: Slot, value: Any, path: Path) -> None:
        """Check that an array has the values that are stored for an overlapping place.

        Raises:
            InvalidInputError: It has other values.
        """
        source = self._source(slot)
        array = unwrapped(value) if sharding_of(value) is None else local_of(value)
        stored = self.buffer(source.want)
        if dtype := _cast_from(source.spec, array):
            expected = array.new_empty(array.shape)
            assign(expected, stored, dtype)
            stored = expected
        if not np.array_equal(as_bytes(array), as_bytes(stored)):
            if overlaps_itself(array):
                raise InvalidInputError(f"{shown(path)}: {SHARED_ELEMENTS}: it cannot hold the stored values")
            raise InvalidInputError(
                f"{shown(path)}: shares memory with another array in the target, but the snapshot has different values "
                "for the two; untie them in the target and restore again"
            )

    def build(self, tree: Any) -> Any:
        """Return a decoded tree with its arrays in their slots."""
        if type(tree) is Slot:
            return self._value(tree)
        if tree is ELSEWHERE:
            return None
        if type(tree) not in CONTAINERS:
            return tree
        new = tree
        if id(tree) not in self._decoded.plain:
            items = []
            for _, key, child in children(tree):
                if child is not ELSEWHERE:
                    items.append((key, self.build(child)))
            new = self.like(tree, items)
        _, make = self._decoded.makers.get(id(tree), (None, None))
        return new if make is None else make(new)

    def like(self, tree: Any, items: Iterable[tuple[Any, Any]]) -> Any:
        """Return a new container like a decoded one with `items` (key, child), and with its `_metadata` built."""
        new = like(tree, items)
        if (metadata := metadata_of(tree)) is not None:
            new._metadata = self.build(metadata)
        return new

    def _value(self, slot: Slot) -> Any:
        target = self._wholes.get(slot, self._targets.get(slot))
        if target is not None:
            return target
        source = self._source(slot)
        if slot.tag == "bytearray":
            return bytearray(source.fresh)
        if slot.tag not in ("tensor", "parameter"):
            return source.fresh
        import torch

        value = source.fresh.detach()  # one object per place, all over the same memory: they are tied
        if slot.tag == "tensor":
            return value.requires_grad_(slot.requires_grad)
        if slot.requires_grad not in source.parameters:
            source.parameters[slot.requires_grad] = torch.nn.Parameter(value, slot.requires_grad)
        return source.parameters[slot.requires_grad]


def slots_of(tree: Any, plain: Container[int] = ()) -> Iterator[Slot]:
    """Yield the slot of every array of a decoded tree; `plain` has the ids of containers without any."""
    if type(tree) is Slot:
        yield tree
    elif type(tree) in CONTAINERS and id(tree) not in plain:
        for _, _, child in children(tree):
            yield from slots_of(child, plain)
        yield from slots_of(metadata_of(tree), plain)


def _first_bytes(array: Any) -> bytes:
    """Return the bytes of an array's first elements."""
    while array.ndim > 1 and array.nbytes > SAMPLE_BYTES:
        rows = SAMPLE_BYTES * array.shape[0] // array.nbytes
        array = array[:rows] if rows else array[0]
    first = array[: max(1, SAMPLE_BYTES // array.itemsize)] if array.ndim else array
    return as_bytes(first).tobytes()


def _cast_from(spec: TensorSpec, target: Any) -> torch.dtype | None:
    """Return the stored dtype if the values are cast to that of the target, a tensor; None: both are the same."""
    is_same = isinstance(target, np.ndarray) or dtype_name(target) == spec.dtype
    return None if is_same else torch_dtype(spec)
