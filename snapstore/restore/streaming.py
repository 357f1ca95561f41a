"""Streaming: the tensors of a snapshot one by one, for a state larger than memory.

In: a reference. Out: (dotted path, tensor or array) in the order of the manifests, which is the order of the packs.
Small tensors are read together, in groups of at most one batch; a larger tensor is read alone. So memory holds one
group or one tensor, the reader's batches, and the tensors that the caller keeps. Nothing is read ahead while the caller
works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..chunks import limits
from ..context import Context
from ..engine.cuda import require_device
from ..errors import FormatError, IntegrityError, out_of_memory
from ..format.records import SWEPT, Snapshot
from ..state.fill.buffers import RestoreBuffers, Want, slots_of
from ..state.fill.fit import Fit
from ..state.tree.decode import ELSEWHERE
from ..state.values.containers import CONTAINERS, Path, children, display, leaves
from ..state.values.tensors import Slot, StoredPart, TensorSpec, family
from ..storage import progress
from .manifests import decoding_of
from .overlaps import Overlap, dim_orders_of
from .pipeline import deleted_meanwhile, load, opened, require_decoding_of, ruling_now
from .sources import SHARED_ONLY, AsRank, PartSources

#: Tensors that are read together have at most this many bytes, or are one.
GROUP_BYTES = 24 * 1024 * 1024

Named = tuple[str, Slot]


class OpenSnapshot:
    """The tensors of a snapshot by name, as its manifests were when they were read.

    Args:
        keys, as_rank: see `TensorReader`; `keys` may be a `Fit`, which also has new names.

    Attributes:
        sources: where the bytes of the tensors lie.
        parts, selection: the parts of the snapshot, and the selection by `keys`.
        tree, decoded: the decoded tree, with slots for arrays, and notes about its containers.
        places: for each stored array, in the order of the manifests, its (dotted path, slot); tied arrays have several.
        others: dotted paths of the selected leaves that are neither tensors nor arrays.
        of_ranks: those among them that each rank keeps for itself, and that no part has.

    Raises:
        NotFoundError: a key names nothing.
        InvalidInputError: values of each rank's own are selected; `as_rank` neither gives a rank that saved nor drops
            them.
        IntegrityError, FormatError: the snapshot is damaged.
    """

    def __init__(
        self,
        context: Context,
        snapshot: Snapshot,
        keys: str | Sequence[str] | Fit | None,
        as_rank: AsRank = SHARED_ONLY,
    ) -> None:
        self._context, self._keys, self._as_rank = context, keys, as_rank
        self.snapshot = snapshot
        fit = Fit.of(keys)
        self.sources = PartSources(context, snapshot, fit.parts_keys, as_rank)
        self.parts: list[StoredPart] = self.sources.parts
        self.decoded = decoding_of(snapshot.ref)
        self.tree, self.selection = fit.decode(self.parts, self.decoded)
        places: dict[tuple[int, int], list[Named]] = {}
        self.others: list[str] = []
        self.of_ranks: list[str] = []
        for path, leaf in leaves(self.tree, ()):
            if not self.selection.matches(path):
                continue
            if type(leaf) is Slot and family(leaf.tag) != "bytes":
                places.setdefault((leaf.part, leaf.index), []).append((display(path), leaf))
            elif type(leaf) not in CONTAINERS:  # an empty container is a leaf too
                self.others.append(display(path))
                if leaf is ELSEWHERE:
                    self.of_ranks.append(display(path))
        self.sources.require_own(self.of_ranks)
        self.places = [places[place] for place in sorted(places)]

    @classmethod
    def of(
        cls, context: Context, ref: str, keys: str | Sequence[str] | Fit | None, as_rank: AsRank = SHARED_ONLY
    ) -> OpenSnapshot:
        """Open the snapshot that a reference names, also if it is rewritten meanwhile."""
        return opened(context, ref, lambda snapshot: cls(context, snapshot, keys, as_rank))

    def spec(self, slot: Slot) -> TensorSpec:
        """Return the spec of a stored array."""
        return self.parts[slot.part].specs[slot.index]

    def by_rank(self, tree: Any = ..., path: Path = ()) -> Iterator[str]:
        """Yield the dotted paths of selected values of which there are those of all ranks, by rank."""
        tree = self.tree if tree is ... else tree
        if id(tree) in self.decoded.by_rank and self.selection.extent(tree, path) != "none":
            yield display(path)
        elif type(tree) in CONTAINERS and self.decoded.by_rank:
            for element, _, child in children(tree):
                yield from self.by_rank(child, (*path, element))

    @property
    def specs(self) -> list[tuple[str, TensorSpec]]:
        """Return (dotted path, spec) of every tensor and array."""
        return [(path, self.spec(slot)) for named in self.places for path, slot in named]

    def reopened(self, error: IntegrityError | FormatError) -> OpenSnapshot:
        """Return the current revision of the snapshot, after a recode or compact; its tensors are the same.

        Raises:
            NotFoundError: the snapshot was deleted meanwhile.
            The error again: the revision that was read is the current one, so it is damaged.
        """
        ruling = ruling_now(self._context, self.snapshot, error)
        if ruling.state == SWEPT:
            raise deleted_meanwhile(self.snapshot) from error
        new = OpenSnapshot(self._context, ruling, self._keys, self._as_rank)
        if new.specs != self.specs:
            raise error
        return new


def _expect(overlaps: Mapping[Want, Sequence[Overlap]]) -> None:
    """Add the bytes of all chunks of overlaps to the total of the running verb."""
    every = (overlap for found in overlaps.values() for overlap in found)
    progress.expect(sum(overlap.nbytes for overlap in every if overlap.stored.chunks))


class TensorReader:
    """The selected tensors of one snapshot; iterating over it reads them.

    It may be iterated over several times. An iteration continues if the snapshot is rewritten meanwhile.

    Args:
        ref, keys, device: see `Repository.restore`.
        as_rank: whose own values are read; by default none.

    Attributes:
        snapshot: as it was read last.
        specs: (dotted path, spec) of every tensor and array, in the order of reading.
        others: dotted paths of the selected leaves that are neither.
        of_ranks: those among them that each rank keeps for itself, and that are not read.

    Raises:
        NotFoundError: the reference or a key names nothing.
        InvalidInputError: values of each rank's own are selected; `as_rank` neither gives a rank that saved nor drops
            them.
        CapabilityError: `device` is not there, a tensor does not fit into memory, or the tensors take more decoding
            than their stored bytes explain.
        IntegrityError, FormatError: the snapshot is damaged.
    """

    def __init__(
        self,
        context: Context,
        ref: str,
        *,
        keys: str | Sequence[str] | Fit | None = None,
        device: Any = None,
        as_rank: AsRank = SHARED_ONLY,
    ) -> None:
        self._context, self._device = context, device
        self._use(OpenSnapshot.of(context, ref, keys, as_rank))
        self.others, self.of_ranks = self._opened.others, self._opened.of_ranks
        if device is not None and any(family(spec.kind) == "tensor" for _, spec in self.specs):
            require_device(device)
        copied = 1 + bool(self._dim_orders)  # an array that is not in C order is copied into its layout
        most = max((sum(self._opened.spec(slot).nbytes for _, slot in group) for group in self._groups), default=0)
        limits.require_memory(copied * most, f"{self.snapshot.ref}: reading its largest tensor")
        require_decoding_of(context, self._overlaps, f"{self.snapshot.ref}: restoring")

    def _use(self, opened: OpenSnapshot) -> None:
        """Plan the reads of a snapshot."""
        self._opened, self.snapshot, self.specs = opened, opened.snapshot, opened.specs
        self._groups = list(self._grouped(opened.places))
        buffers = RestoreBuffers(opened.parts, None)
        for group in self._groups:
            for _, slot in group:
                buffers.add(slot)
        self._overlaps: dict[Want, list[Overlap]] = opened.sources.overlaps(buffers.wants())
        self._dim_orders = dim_orders_of(self._overlaps)

    def _grouped(self, sources: Sequence[list[Named]]) -> Iterator[list[Named]]:
        """Yield the paths and slots of stored tensors, in groups that are read together."""
        group: list[Named] = []
        size = 0
        for named in sources:
            nbytes = self._opened.spec(named[0][1]).nbytes
            if group and size + nbytes > min(self._context.engines.cpu.decode_bytes, GROUP_BYTES):
                yield group
                group, size = [], 0
            group, size = group + named, size + nbytes
        if group:
            yield group

    @property
    def by_rank(self) -> list[str]:
        """Return the dotted paths of selected values that come as a dict of the values of all ranks, by rank."""
        return list(self._opened.by_rank())

    @property
    def plain_forms(self) -> list[tuple[str, str]]:
        """Return (dotted path, class) of the selected values of classes of users, which come in their plain forms."""
        selection, unknown = self._opened.selection, self._opened.decoded.unknown
        return [(display(path), ".".join(named)) for path, named in unknown if selection.matches(path)]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (dotted path, tensor or array), each once it is verified.

        Raises:
            NotFoundError: the snapshot was deleted meanwhile.
            IntegrityError, FormatError: a tensor is damaged.
            CapabilityError: there is no memory for a tensor.
        """
        number = 0
        _expect(self._overlaps)
        try:
            while number < len(self._groups):
                try:
                    arrays = self._read(self._groups[number])
                except (IntegrityError, FormatError) as error:
                    self._use(self._opened.reopened(error))
                    continue
                number += 1
                while arrays:
                    yield arrays.popleft()
        finally:
            self._context.engines.release_memory()

    def _read(self, group: Sequence[Named]) -> deque[tuple[str, Any]]:
        """Return (dotted path, array) of a group; the arrays of one stored tensor share memory."""
        engines, opened = self._context.engines, self._opened
        with out_of_memory(f"restore {self.snapshot.ref}", "free memory, then read the rest of it with keys"):
            buffers = RestoreBuffers(opened.parts, self._device, on_device=engines.on_device)
            for _, slot in group:
                buffers.add(slot)
            buffers.lay_out(self._dim_orders)
            load(self._context, buffers.wants(), self._overlaps, buffers)
            return deque((path, buffers.build(slot)) for path, slot in group)

    def unread(self) -> tuple[Any, list[Any]]:
        """Return the selected state without the values of tensors, and its tensors and arrays in the order of `specs`.

        The memory of the tensors is allocated but never written, so it costs nothing. Tied tensors share it. All other
        leaves are read, arrays included.

        Raises:
            NotFoundError: the snapshot was deleted meanwhile.
            IntegrityError, FormatError: it is damaged.
            CapabilityError: there is no memory for it.
        """
        while True:
            try:
                with out_of_memory(f"read {self.snapshot.ref}", "free memory, or read parts of it with keys"):
                    return self._read_others()
            except (IntegrityError, FormatError) as error:
                self._use(self._opened.reopened(error))
            finally:
                self._context.engines.release_memory()

    def _read_others(self) -> tuple[Any, list[Any]]:
        opened = self._opened
        buffers = RestoreBuffers(opened.parts, None, decoded=opened.decoded)
        tree = opened.selection.prune(opened.tree, ())
        for slot in slots_of(tree, opened.decoded.plain):
            buffers.add(slot)
        wants = {want: opened.parts[want.part].specs[want.entry] for want in buffers.wants()}
        # A tensor that lies in the `_metadata` of a dict is a value too.
        others = [want for want, spec in wants.items() if family(spec.kind) != "tensor" or want not in self._overlaps]
        limits.require_memory(sum(wants[want].nbytes for want in others), f"{self.snapshot.ref}: reading its values")
        overlaps = opened.sources.overlaps(others)
        buffers.lay_out(self._dim_orders | dim_orders_of(overlaps))
        for want in wants.keys() - set(others):
            buffers.allocate(want)
        require_decoding_of(self._context, overlaps, f"{self.snapshot.ref}: reading its values")
        _expect(overlaps)
        load(self._context, others, overlaps, buffers)
        return buffers.build(tree), [buffers.build(slot) for group in self._groups for _, slot in group]
