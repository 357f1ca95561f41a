"""Stored state: a snapshot as DCP loads it: its leaves by DCP's keys, and boxes of its tensors, read into given memory.

In: a reference. Out: the leaves, filled tensors, and values. It reads the manifests at once, and chunks when a caller
needs them. If the snapshot is rewritten meanwhile, it is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..chunks import limits
from ..errors import FormatError, IntegrityError, InvalidInputError, out_of_memory
from ..format.records import SWEPT, Snapshot
from ..repository import Repository
from ..restore.manifests import decoding_of
from ..restore.overlaps import dim_orders_of
from ..restore.pipeline import deleted_meanwhile, load, opened, require_decoding_of, ruling_now
from ..restore.sources import AsRank, Sources
from ..state import composite_fit
from ..state.arrays import mismatch, torch_dtype
from ..state.composite import inner_of, plain_of
from ..state.restore_buffers import RestoreBuffers, slots_of
from ..state.tensors import Slot
from ..state.torch_layouts import layout_of
from ..state.tree_decode import ELSEWHERE, decode
from ..text import counted, log
from .names import Leaf, ObjectTypes, flat_leaves
from .planner import Shards

T = TypeVar("T")


class Piece(NamedTuple):
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

    Raises:
        NotFoundError: the reference names nothing.
        InvalidInputError: the state is no dict, or two of its leaves have one key in DCP.
        IntegrityError, FormatError: the snapshot is damaged.
    """

    def __init__(self, repository: Repository, ref: str, types: Sequence[type], as_rank: AsRank) -> None:
        self._context, self._types, self._as_rank = repository.context, types, as_rank
        self.leaves: dict[str, Leaf] = {}
        opened(self._context, ref, self._open)
        gone = [key for key, leaf in self.leaves.items() if leaf.value is ELSEWHERE]
        if gone:
            why = self._sources.elsewhere or "each rank's own (PerRank, RngState), as per_rank='drop' asks"
            log.warning("%s: leaving out %s: %s", self.snapshot.ref, counted(len(gone), "key"), why)
        self.leaves = {key: leaf for key, leaf in self.leaves.items() if leaf.value is not ELSEWHERE}

    def _open(self, snapshot: Snapshot) -> None:
        """Read the manifests."""
        self.snapshot, where = snapshot, snapshot.ref
        self._sources = Sources(self._context, snapshot, None, self._as_rank)
        self._parts = self._sources.parts
        self._decoded = decoding_of(where, ObjectTypes(self._types))
        self.leaves = flat_leaves(decode(self._parts, decoded=self._decoded), self._decoded, where)

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

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Fill tensors with boxes of stored tensors; if the dtypes differ, the values are cast.

        Raises:
            InvalidInputError: tensors share memory, and the snapshot has different values for them, after the cast.
            CapabilityError: memory for an array in its stored dtype is not available.
            IntegrityError, FormatError: a chunk is damaged; the tensors may be half written.
        """
        self._until_read(lambda: self._fill(pieces))

    def is_composite(self, value: Any) -> bool:
        """Return whether the value of a leaf is the plain form of a composite tensor."""
        return id(value) in self._decoded.composites

    def pieces_in(self, value: Any, target: Any, key: str) -> list[Piece]:
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
            return [Piece(value, (0,) * len(spec.shape), spec.shape, target)]
        inner = inner_of(plain_of(target)).items()
        found = (self.pieces_in(value[name], child, f"{key}.{name}") for name, child in inner)
        return [piece for pieces in found for piece in pieces]

    def values(self, keys: Sequence[str]) -> list[Any]:
        """Return the values of leaves, with their arrays read.

        Raises:
            IntegrityError, FormatError: a chunk is damaged.
        """
        return self._until_read(lambda: self._values(keys))

    def _fill(self, pieces: Sequence[Piece]) -> None:
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
