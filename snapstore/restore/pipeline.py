"""The read path: record -> manifest -> get ranges -> decode planes -> add up chains -> verify -> state.

In: a snapshot, and a target to fill if there is one. Out: the state; every chunk is checked against its digest. The
record and the manifests are enough: no index is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ..chunks import limits
from ..chunks.reader import ChunkReader, Wanted
from ..context import Context
from ..engine.cuda import require_device
from ..errors import (
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    SnapstoreError,
    add_line,
    out_of_memory,
)
from ..format.records import SWEPT, Snapshot
from ..state.fill.buffers import RestoreBuffers, Want
from ..state.fill.fit import Fit
from ..state.fill.plan import PARTLY_FILLED, RestorePlan
from ..state.values.arrays import require_memory_of_tensors
from ..state.values.classes import Types, known_classes
from ..state.values.containers import shown
from ..text import counted, log, some
from ..threads import without_gc
from .manifests import decoding_of, spend_decoding
from .overlaps import Overlap, Reads, dim_orders_of
from .sources import ALONE, AsRank, PartSources

T = TypeVar("T")


#: Called with the overlaps that a restore is about to read, and the memory where they arrive, before anything of the
#: state changes; it may raise.
BeforeFill = Callable[[Mapping[Want, Sequence[Overlap]], RestoreBuffers], object]


class _FilledState:
    """The state that a restore fills, or None; as a context, it lets an error say that it may be partly filled.

    A read is tried again if the snapshot is rewritten meanwhile, so the error may come before the later try has begun.
    """

    def __init__(self, into: Any, before_fill: BeforeFill = lambda overlaps, buffers: None) -> None:
        self.into, self.before_fill, self._has_begun = into, before_fill, False

    def begin(self) -> None:
        """Note that all that follows may change the state."""
        self._has_begun = self.into is not None

    def __enter__(self) -> _FilledState:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._has_begun and isinstance(error, Exception):
            add_line(error, PARTLY_FILLED)


def read(
    context: Context,
    ref: str | Snapshot,
    *,
    into: Any = None,
    keys: str | Sequence[str] | Fit | None = None,
    device: Any = None,
    types: Sequence[type] = (),
    as_rank: AsRank = ALONE,
) -> tuple[Snapshot, Any]:
    """Return the snapshot that `ref` names or is, and its state, or `into` filled with it.

    Raises:
        NotFoundError: the reference names nothing.
        See `restore` for the other errors. Each of them says so if `into` may be partly filled.
    """

    def restored(snapshot: Snapshot) -> tuple[Snapshot, Any]:
        with out_of_memory(f"restore {snapshot.ref}", "free memory, restore parts of it with keys, or onto a device"):
            return snapshot, restore(context, snapshot, target, keys=keys, device=device, types=types, as_rank=as_rank)

    with into if isinstance(into, _FilledState) else _FilledState(into) as target:
        return opened(context, ref, restored)


def ruling_now(context: Context, snapshot: Snapshot, error: SnapstoreError) -> Snapshot:
    """Return the current revision of a snapshot that could not be read because it was rewritten or deleted meanwhile.

    Raises:
        The error again, with the snapshot's name: the revision that was read is the current one, so it is damaged.
        IntegrityError, StorageError: the record of the current revision is damaged, or cannot be read.
    """
    view = context.index.refresh(snapshot.run)
    view.require_known(snapshot.ref, snapshot.run, snapshot_id=snapshot.id)
    ruling = view.get(snapshot.id)
    if ruling is None or (ruling.state != SWEPT and ruling.manifests == snapshot.manifests):
        raise type(error)(f"{snapshot.ref} (id:{snapshot.id[:12]}): {error}") from error
    return ruling


def read_as_ruled(context: Context, snapshots: Sequence[Snapshot], read_them: Callable[..., T]) -> T:
    """Return the result of `read_them` for some snapshots; they are read again if one is rewritten meanwhile.

    Raises:
        NotFoundError: one was deleted meanwhile.
        IntegrityError, FormatError: the revisions that were read are the current ones, so one is damaged.
        IntegrityError, StorageError: the record of a current revision is damaged, or cannot be read.
    """
    while True:
        try:
            return read_them(*snapshots)
        except (IntegrityError, FormatError) as error:
            view = context.index.refresh()
            for snapshot in snapshots:
                view.require_known(snapshot.ref, snapshot.run, snapshot_id=snapshot.id)
            ruling = [view.get(snapshot.id) or snapshot for snapshot in snapshots]
            for snapshot in ruling:
                if snapshot.state == SWEPT:
                    raise deleted_meanwhile(snapshot) from error
            if [snapshot.manifests for snapshot in ruling] == [snapshot.manifests for snapshot in snapshots]:
                raise
            snapshots = ruling


def deleted_meanwhile(snapshot: Snapshot) -> NotFoundError:
    """Return the error for a snapshot that a gc has deleted while it was read."""
    return NotFoundError(f"{snapshot.ref} (id:{snapshot.id[:12]}): was forgotten and deleted by a gc while it was read")


def opened(context: Context, ref: str | Snapshot, open_it: Callable[[Snapshot], T]) -> T:
    """Return the result of `open_it` for the snapshot that `ref` names or is.

    It is called again if the snapshot was rewritten meanwhile. If it was deleted, the reference means another one now.
    """
    snapshot = ref if isinstance(ref, Snapshot) else context.index.find(ref)
    while True:
        try:
            return open_it(snapshot)
        except (IntegrityError, FormatError) as error:
            ruling = ruling_now(context, snapshot, error)
            if ruling.state == SWEPT:
                ruling = context.index.find(f"id:{ref.id}" if isinstance(ref, Snapshot) else ref)
            snapshot = ruling


def read_into(
    context: Context,
    ref: str | Snapshot,
    target: Any,
    *,
    keys: str | Sequence[str] | Fit | None = None,
    types: Sequence[type] = (),
    as_rank: AsRank = ALONE,
    before_fill: BeforeFill = lambda overlaps, buffers: None,
) -> Snapshot:
    """Fill `target` with the state that a reference names, and return the snapshot; raises as `read` does."""
    if target is None:
        raise InvalidInputError("restore_into: the target is None; pass the state to fill, or call restore")
    filled = _FilledState(target, before_fill)
    return read(context, ref, into=filled, keys=keys, types=types, as_rank=as_rank)[0]


def restore(
    context: Context,
    snapshot: Snapshot,
    target: _FilledState,
    *,
    keys: str | Sequence[str] | Fit | None = None,
    device: Any = None,
    types: Sequence[type] = (),
    as_rank: AsRank = ALONE,
) -> Any:
    """Return the state of a snapshot, or the state `into` of a target filled with it.

    Args:
        target: sharded tensors of `into` get the boxes that they hold.
        keys: or a `Fit`, which also has new names.
        types: classes of which values are made, beside those of values in `into`. Values of other classes come back in
            their plain forms.
        as_rank: which rank reads, and whose own values it gets.

    Raises:
        InvalidInputError: `into` does not fit. The error names the differences part by part; nothing was written. Or
            the snapshot has values of each rank's own, and `as_rank` neither gives a rank that saved nor drops them. Or
            tensors have no memory here, see `require_memory_of_tensors`.
        CapabilityError: `device` is a CUDA device that is not there; or the state does not fit into memory, or takes
            more decoding than its stored bytes explain. Nothing was written.
        IntegrityError, FormatError: the snapshot is damaged; `into` may be half written.
    """
    require_memory_of_tensors(f"restore {snapshot.ref}")
    with without_gc():
        fit = Fit.of(keys)
        sources = PartSources(context, snapshot, fit.parts_keys, as_rank, fills=target.into is not None)
        plan = RestorePlan(
            sources.parts,
            into=target.into,
            keys=fit,
            device=device,
            on_device=context.engines.on_device,
            decoded=decoding_of(snapshot.ref, Types(types, target.into, known_classes())),
            generators_stay=as_rank.is_other_number(sources.saved),
        )
        sources.require_own([shown(path) for path in plan.elsewhere])
        specs = (sources.parts[want.part].specs[want.entry] for want in plan.wants)
        if device is not None and any(spec.kind in ("tensor", "parameter") for spec in specs):
            require_device(device)
        overlaps = sources.overlaps(plan.wants)
        plan.buffers.lay_out(dim_orders_of(overlaps))
        limits.require_memory(
            plan.buffers.fresh_bytes(), f"{snapshot.ref}: restoring {counted(len(plan.wants), 'tensor')}"
        )
        require_decoding_of(context, overlaps, f"{snapshot.ref}: restoring")
        target.before_fill(overlaps, plan.buffers)
        if plan.buffers.fills_at_once():
            target.begin()
        try:
            load(context, plan.wants, overlaps, plan.buffers)
        finally:
            context.engines.release_memory()
    _warn_of_left_out(snapshot, plan, sources.saved, as_rank)
    target.begin()
    return plan.finish()


def _warn_of_left_out(snapshot: Snapshot, plan: RestorePlan, saved: int, as_rank: AsRank) -> None:
    """Warn of names that only one side has, and, on rank 0, of generators that stay as they are."""
    if plan.left_out:
        log.warning("%s: restored with strict=False: %s", snapshot.ref, plan.left_out)
    if plan.generators and as_rank.rank == 0:
        ranks = f"{counted(max(saved, 1), 'rank')} saved and {counted(as_rank.world_size, 'rank')} restored"
        advice = ", or pass per_rank=<rank> for those of a rank" if saved else ""
        text = "%s: %s: the random generators stay as they are, as %s; seed them%s"
        log.warning(text, snapshot.ref, some([shown(path) for path in plan.generators], 5), ranks, advice)


def load(
    context: Context,
    wants: Sequence[Want],
    overlaps: Mapping[Want, Sequence[Overlap]],
    target: RestoreBuffers,
) -> None:
    """Read the wanted arrays: first those in manifests, then those in chunks, in the order in which they are stored.

    A temporary buffer is allocated when its array is reached. Most calls of torch come first: while threads read, each
    call would wait for Python's lock.

    Raises:
        IntegrityError, FormatError: a chunk is damaged; memory of the target may be half written.
    """
    reads = Reads(lambda memory, nbytes: context.engines.of(memory).empty(nbytes))

    def wanted(some: Iterable[Want]) -> Iterator[Wanted]:
        for want in some:
            home = target.buffer(want)
            for overlap in overlaps[want]:
                yield from reads.of(overlap, home)
            reads.then(partial(target.complete, want))

    in_chunks = [want for want in wants if any(overlap.stored.chunks for overlap in overlaps[want])]
    inline = set(wants).difference(in_chunks)
    list(wanted(want for want in wants if want in inline))  # puts their bytes in place, and yields nothing
    reads.arrived(0)
    for want in in_chunks:
        target.find_home(want)
    for count in ChunkReader(context).rebuild(wanted(in_chunks)):
        reads.arrived(count)
    reads.arrived(0)


def require_decoding_of(context: Context, overlaps: Mapping[Want, Sequence[Overlap]], what: str) -> None:
    """Check that arrays take no more decoding than their stored bytes explain.

    Raises:
        CapabilityError: they take more.
    """
    every = [overlap for found in overlaps.values() for overlap in found]
    decoded = sum(overlap.decoded_bytes for overlap in every)
    spend_decoding(context.store, decoded, sum(overlap.nbytes for overlap in every), what)
