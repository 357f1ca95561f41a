"""Streaming: the tensors of a snapshot one by one, so a state larger than memory passes through.

In: a reference. Out: (dotted path, tensor or array) in the order of the manifests, which is the order of the packs.
Small tensors are read together, in groups of at most one batch; a larger one alone. So memory holds one group or one
tensor, the reader's batches, and what the caller keeps. Nothing is read ahead while the caller works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ..chunks import limits
from ..context import Context
from ..engine.cuda import require_device
from ..errors import FormatError, IntegrityError, NotFoundError, out_of_memory
from ..format.records import SWEPT, Snapshot
from ..state.containers import CONTAINERS, display, leaves
from ..state.restore_buffers import RestoreBuffers, Want
from ..state.selection import Selection
from ..state.tensors import Slot, StoredPart, TensorSpec, family
from ..state.tree_decode import decode, part_names
from .manifests import decoding_of
from .overlaps import Overlap
from .pipeline import load, require_decoding_of, ruling_now
from .sources import SHARED_ONLY, AsRank, Sources

Named = tuple[str, Slot]


class TensorReader:
    """The selected tensors of one snapshot; going through it reads them.

    It may be gone through several times, and goes on if the snapshot is rewritten meanwhile.

    Args:
        ref, keys, device: see `Repository.restore`.
        as_rank: whose own values are read; by default none.

    Attributes:
        snapshot: as it was read last.
        specs: (dotted path, spec) of every tensor and array, in the order of reading.
        others: dotted paths of the selected leaves that are neither.

    Raises:
        NotFoundError: the reference or a key names nothing.
        CapabilityError: `device` is not there, or a tensor does not fit into memory.
        IntegrityError, FormatError: the snapshot is damaged.
    """

    def __init__(
        self,
        context: Context,
        ref: str,
        *,
        keys: str | Sequence[str] | None = None,
        device: Any = None,
        as_rank: AsRank = SHARED_ONLY,
    ) -> None:
        self._context, self._keys, self._device, self._as_rank = context, keys, device, as_rank
        self.snapshot = context.index.refresh().resolve(ref)
        while True:
            try:
                self._open(self.snapshot)
                break
            except (IntegrityError, FormatError) as error:
                ruling = ruling_now(context, self.snapshot, error)
                self.snapshot = ruling if ruling.state != SWEPT else context.index.refresh().resolve(ref)
        if device is not None and any(family(spec.kind) == "tensor" for _, spec in self.specs):
            require_device(device)
        most = max((sum(self._spec(slot).nbytes for _, slot in group) for group in self._groups), default=0)
        limits.require_memory(most, f"{self.snapshot.ref}: reading its largest tensor")
        require_decoding_of(context, self._overlaps, f"{self.snapshot.ref}: restoring")

    def _open(self, snapshot: Snapshot) -> None:
        """Read the manifests, and find the selected tensors."""
        sources = Sources(self._context, snapshot, self._keys, self._as_rank)
        self._parts: list[StoredPart] = sources.parts
        self._selection = Selection(self._keys)
        tree = decode(self._parts, partial=self._keys is not None, decoded=decoding_of(snapshot.ref))
        self._selection.resolve(tree, part_names(self._parts))
        places: dict[tuple[int, int], list[Named]] = {}
        self.others: list[str] = []
        for path, leaf in leaves(tree, ()):
            if not self._selection.matches(path):
                continue
            if type(leaf) is Slot and family(leaf.tag) != "bytes":
                places.setdefault((leaf.part, leaf.index), []).append((display(path), leaf))
            elif type(leaf) not in CONTAINERS:  # an empty container is a leaf too
                self.others.append(display(path))
        self._groups = list(self._grouped([places[place] for place in sorted(places)]))
        slots = [(path, slot) for group in self._groups for path, slot in group]
        self.specs = [(path, self._spec(slot)) for path, slot in slots]
        wants = dict.fromkeys(Want(slot.part, slot.index) for _, slot in slots)
        self._overlaps: dict[Want, list[Overlap]] = sources.overlaps(wants)

    def _spec(self, slot: Slot) -> TensorSpec:
        return self._parts[slot.part].specs[slot.index]

    def _grouped(self, sources: Sequence[list[Named]]) -> Iterator[list[Named]]:
        """Yield the paths and slots of stored tensors, in groups that are read together."""
        group: list[Named] = []
        size = 0
        for named in sources:
            nbytes = self._spec(named[0][1]).nbytes
            if group and size + nbytes > self._context.engines.cpu.decode_bytes:
                yield group
                group, size = [], 0
            group, size = group + named, size + nbytes
        if group:
            yield group

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (dotted path, tensor or array), each once it is verified.

        Raises:
            NotFoundError: the snapshot was deleted meanwhile.
            IntegrityError, FormatError: a tensor is damaged.
            CapabilityError: there is no memory for a tensor.
        """
        number = 0
        try:
            while number < len(self._groups):
                try:
                    arrays = self._read(self._groups[number])
                except (IntegrityError, FormatError) as error:
                    self._reopen(error)
                    continue
                number += 1
                while arrays:
                    yield arrays.popleft()
        finally:
            self._context.engines.release_memory()

    def _read(self, group: Sequence[Named]) -> deque[tuple[str, Any]]:
        """Return the arrays of a group by path; those of one stored tensor share memory."""
        engines = self._context.engines
        with out_of_memory(f"restore {self.snapshot.ref}", "free memory, then read the rest of it with keys"):
            buffers = RestoreBuffers(self._parts, self._selection, self._device, on_device=engines.on_device)
            for _, slot in group:
                buffers.add(slot)
            load(self._context, buffers.wants(), self._overlaps, buffers)
            return deque((path, buffers.build(slot)) for path, slot in group)

    def _reopen(self, error: IntegrityError | FormatError) -> None:
        """Go on with the packs that a recode or compact has written since; it leaves the tensors as they are."""
        ruling = ruling_now(self._context, self.snapshot, error)
        if ruling.state == SWEPT:
            raise NotFoundError(
                f"{self.snapshot.ref} (id:{self.snapshot.id[:12]}): was forgotten and deleted by a gc while it was read"
            ) from error
        specs, self.snapshot = self.specs, ruling
        self._open(ruling)
        if self.specs != specs:
            raise error
