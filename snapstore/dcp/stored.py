"""Stored state: a snapshot as DCP loads it: its leaves by DCP's keys, and boxes of its tensors, read into given memory.

In: a reference. Out: the leaves, filled tensors, and values. It reads the manifests at once, and chunks when a caller
needs them. If the snapshot is rewritten meanwhile, it is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import is_not
from typing import Any, NamedTuple, TypeVar

import torch

from ..chunks import limits
from ..errors import FormatError, IntegrityError, InvalidInputError, out_of_memory
from ..format.records import SWEPT, Snapshot
from ..repository import Repository
from ..restore.manifests import decoding_of
from ..restore.overlaps import dim_orders_of
from ..restore.pipeline import deleted_meanwhile, load, opened, require_decoding_of, ruling_now
from ..restore.sources import AsRank, PartSources
from ..state.fill import composite_fit, optimizer_fit
from ..state.fill.buffers import RestoreBuffers, Want, slots_of
from ..state.fill.differences import MAX_LINES
from ..state.fill.optimizer_fit import with_sharded_state
from ..state.tree.decode import ELSEWHERE, decode
from ..state.values.arrays import mismatch, torch_dtype
from ..state.values.classes import known_classes
from ..state.values.composite import inner_of, plain_of
from ..state.values.containers import CONTAINERS, Path, is_mapping, like, shown
from ..state.values.sharded import sharding_of
from ..state.values.tensors import Slot, TensorSpec, strides_of
from ..state.values.torch_layouts import layout_of
from ..state.walk import stateful
from ..state.walk.stateful import is_strict_module
from ..text import counted, log
from .names import Closed, Leaf, ObjectTypes, flat_leaves, is_tensor
from .planner import Shards

T = TypeVar("T")


class TargetBox(NamedTuple):
    """A box of a stored tensor, to be filled.

    Attributes:
        slot: of the tensor.
        offsets, sizes: of the box.
        target: the tensor to fill, of these sizes.
    """

    slot: Slot
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor


class StoredState:
    """A snapshot, opened for DCP.

    Args:
        ref: of the snapshot.
        types: classes of which values are made.
        as_rank: which rank reads, and whose own values it gets.

    Attributes:
        snapshot: as it was read last.
        leaves: by DCP's keys, in the order of the state.
        tree: the decoded state.

    Raises:
        NotFoundError: the reference names nothing.
        InvalidInputError: the state is no dict, or two of its leaves have one key in DCP.
        IntegrityError, FormatError: the snapshot is damaged.
    """

    def __init__(self, repository: Repository, ref: str, types: Sequence[type], as_rank: AsRank) -> None:
        self._context, self._types, self._as_rank = repository.context, types, as_rank
        self.leaves: dict[str, Leaf] = {}
        self._rooms: list[tuple[Want, torch.Tensor]] = []  # the new tensors of `completed`
        opened(self._context, ref, self._open)
        gone = [key for key, leaf in self.leaves.items() if leaf.value is ELSEWHERE]
        if gone:
            why = self._sources.elsewhere or "each rank's own (PerRank, RngState), as per_rank='drop' asks"
            log.warning("%s: leaving out %s: %s", self.snapshot.ref, counted(len(gone), "key"), why)
        self.leaves = {key: leaf for key, leaf in self.leaves.items() if leaf.value is not ELSEWHERE}

    def _open(self, snapshot: Snapshot) -> None:
        """Read the manifests."""
        self.snapshot, where = snapshot, snapshot.ref
        self._sources = PartSources(self._context, snapshot, None, self._as_rank)
        self._parts = self._sources.parts
        self._decoded = decoding_of(where, ObjectTypes(self._types, None, known_classes()))
        self.tree = decode(self._parts, decoded=self._decoded)
        self.leaves = flat_leaves(self.tree, self._decoded, where)

    def _until_read(self, read: Callable[[], T]) -> T:
        """Return the result of `read`; read again if a recode or a compact has rewritten the snapshot meanwhile.

        Raises:
            NotFoundError: the snapshot was deleted meanwhile.
        """
        while True:
            try:
                with out_of_memory(f"load {self.snapshot.ref}", "free memory, or load fewer keys at a time"):
                    return read()
            except (IntegrityError, FormatError) as error:
                ruling = ruling_now(self._context, self.snapshot, error)
                if ruling.state == SWEPT:
                    raise deleted_meanwhile(self.snapshot) from error
                specs = [part.specs for part in self._parts]
                self._open(ruling)
                if [part.specs for part in self._parts] != specs:
                    raise

    def form(self, slot: Slot) -> torch.Tensor:
        """Return a tensor without memory that has the dtype and shape of a stored one.

        Raises:
            CapabilityError: this torch does not have the dtype.
        """
        spec = self._parts[slot.part].specs[slot.index]
        return torch.empty(spec.shape, dtype=torch_dtype(spec), device="meta")

    def fill(self, pieces: Sequence[TargetBox]) -> None:
        """Fill tensors with boxes of stored tensors; if the dtypes differ, the values are cast.

        Raises:
            InvalidInputError: tensors share memory, and the snapshot has different values for them, after the cast.
            CapabilityError: memory for an array in its stored dtype is not available.
            IntegrityError, FormatError: a chunk is damaged; the tensors may be half written.
        """
        self._until_read(lambda: self._fill(pieces))

    def completed(self, stored: Any, present: Any, target: Any, path: Path) -> Any:
        """Return the state of an object with a place for each stored value; containers are copied if they change.

        Names that the snapshot lacks go, except those of a module, which would refuse the state: DCP raises an error.

        Args:
            stored: the decoded value at the place of the object.
            present: the result of its `state_dict`.
            target: the object.

        Raises:
            InvalidInputError: it is an optimizer, and the state does not fit it.
        """
        if stateful.is_optimizer(target):
            stored = optimizer_fit.with_numbers(stored)
            found = optimizer_fit.differences(target, stored, present, path, self._spec, self._decoded)
            if lines := [f"{shown(below)}: {text}" for below, text in found]:
                raise InvalidInputError(*lines[:MAX_LINES], "nothing was loaded")
            present = with_sharded_state(target, stored, present, self._spec, self._decoded)
        self._rooms = []
        merged = self._merged(stored, present, kept=present if is_strict_module(target) else None)
        # New tensors get the dimension orders of the stored ones: fused optimizers walk memory.
        orders = dim_orders_of(self._sources.overlaps({want for want, _ in self._rooms}))
        for want, room in self._rooms:
            if want in orders:
                room.as_strided_(room.shape, strides_of(room.shape, orders[want]))
        return merged

    def put_back(self, stored: Any, target: Any, loaded: Any) -> None:
        """Put the values of a loaded state in place of the ones that the loader of an optimizer has cast."""
        if (found := self._decoded.parameters.get(id(stored))) and stateful.is_optimizer(target):
            optimizer_fit.put_back(target, loaded, found[1])

    def _merged(self, stored: Any, present: Any, kept: Any = None) -> Any:
        if stored is ELSEWHERE or id(stored) in self._decoded.makers:
            return present
        if type(stored) not in CONTAINERS:
            is_alike = is_tensor(stored) == isinstance(present, torch.Tensor) and type(present) not in CONTAINERS
            return present if is_alike or sharding_of(present) is not None else self._room(stored)
        if is_mapping(stored) and is_mapping(present):
            items = {key: self._merged(stored[key], child) for key, child in present.items() if key in stored}
            items |= {key: child for key, child in (kept or {}).items() if key not in items}
            items |= {key: self._room(child) for key, child in stored.items() if key not in items}
            is_same = len(items) == len(present) and all(items.get(key) is child for key, child in present.items())
            return present if is_same else like(present, items.items())
        if type(stored) is not type(present) or len(stored) != len(present):
            return self._room(stored)
        if type(stored) is not list:
            return present
        new = list(map(self._merged, stored, present))
        return new if any(map(is_not, new, present)) else present

    def _room(self, value: Any) -> Any:
        """Return a value like a decoded one, with new tensors; DCP replaces all else in it."""
        if is_tensor(value):
            self._rooms.append((Want(value.part, value.index), torch.empty_like(self.form(value), device="cpu")))
            return self._rooms[-1][1]
        if id(value) in self._decoded.composites and id(value) in self._decoded.makers:
            _, make = self._decoded.makers[id(value)]
            return make({name: self._room(child) if is_tensor(child) else child for name, child in value.items()})
        if value is ELSEWHERE or type(value) not in CONTAINERS or id(value) in self._decoded.makers:
            return Closed(value)
        if is_mapping(value):
            return like(value, ((key, self._room(child)) for key, child in value.items() if child is not ELSEWHERE))
        return list(map(self._room, value)) if type(value) is list else value

    def left_out(self, keys: Collection[str]) -> str | None:
        """Return the key of a value that a load leaves out although it takes others of the same optimizer; or None.

        Args:
            keys: of the values that it takes.
        """
        for path in optimizer_fit.states_in(self.tree, ()):
            prefix = "".join(f"{element}." for element in path)
            below = [key for key in self.leaves if key.startswith(prefix)]
            missing = [key for key in below if key not in keys]
            if 0 < len(missing) < len(below):
                return missing[0]
        return None

    def _spec(self, slot: Slot) -> TensorSpec:
        return self._parts[slot.part].specs[slot.index]

    def is_composite(self, value: Any) -> bool:
        """Return whether the value of a leaf is the plain form of a composite tensor."""
        return id(value) in self._decoded.composites

    def pieces_in(self, value: Any, target: Any, key: str) -> list[TargetBox]:
        """Return the pieces that fill the tensors in a composite tensor of the state.

        Args:
            value: of a leaf, or in one.
            target: the value of the state.

        Raises:
            InvalidInputError: it does not fit.
        """
        spec = self._parts[value.part].specs[value.index] if type(value) is Slot else None
        text = composite_fit.mismatch(value, target, self._decoded) if spec is None else mismatch(spec, target)
        if text is None and spec is None and (layout := layout_of(target)) is not None:
            text = f"type: a {layout.__qualname__} tensor is restored as a whole"
        if text is not None:
            raise InvalidInputError(f"{key}: {text}; DCP fills only such tensors: use Repository.restore_into")
        if spec is not None:
            return [TargetBox(value, (0,) * len(spec.shape), spec.shape, target)]
        inner = inner_of(plain_of(target)).items()
        found = (self.pieces_in(value[name], child, f"{key}.{name}") for name, child in inner)
        return [piece for pieces in found for piece in pieces]

    def values(self, keys: Sequence[str]) -> list[Any]:
        """Return the values of leaves, with their arrays read.

        Raises:
            IntegrityError, FormatError: a chunk is damaged.
        """
        return self._until_read(lambda: self._values(keys))

    def _fill(self, pieces: Sequence[TargetBox]) -> None:
        buffers = self._buffers()
        for slot, offsets, sizes, target in pieces:
            shape = self.form(slot).shape
            whole = sizes == tuple(shape)
            place = Slot(slot.part, slot.index, "tensor")  # a tensor may be wanted by several pieces
            buffers.add(place)
            buffers.claim(place, target if whole else Shards(shape, ((offsets, sizes),), [target]), owned=False)
        buffers.find_overlaps()
        self._read(buffers)
        buffers.fill_overlapping()

    def _values(self, keys: Sequence[str]) -> list[Any]:
        buffers, values = self._buffers(), [self.leaves[key].value for key in keys]
        for value in values:
            for slot in slots_of(value, self._decoded.plain):
                buffers.add(slot)
        self._read(buffers)
        return [buffers.build(value) for value in values]

    def _buffers(self) -> RestoreBuffers:
        engines = self._context.engines
        return RestoreBuffers(self._parts, None, on_device=engines.on_device, decoded=self._decoded)

    def _read(self, buffers: RestoreBuffers) -> None:
        wants, what = buffers.wants(), f"{self.snapshot.ref}: loading"
        overlaps = self._sources.overlaps(wants)
        buffers.lay_out(dim_orders_of(overlaps))
        limits.require_memory(buffers.fresh_bytes(), f"{what} {counted(len(wants), 'tensor')}")
        require_decoding_of(self._context, overlaps, what)
        try:
            load(self._context, wants, overlaps, buffers)
        finally:
            self._context.engines.release_memory()
