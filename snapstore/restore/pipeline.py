"""The read path: record -> manifest -> get ranges -> decode planes -> add up chains -> verify -> state.

In: a snapshot, and a target to fill if there is one. Out: the state; every chunk is checked against its digest. The
record and the manifests are enough: no index is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ..chunks import limits
from ..chunks.reader import ChunkReader, Wanted
from ..context import Context
from ..engine.cuda import require_device
from ..errors import FormatError, IntegrityError, InvalidInputError, NotFoundError, SnapstoreError, out_of_memory
from ..format.records import SWEPT, Snapshot
from ..state.classes import Types
from ..state.fit import Fit
from ..state.restore_buffers import RestoreBuffers, Want
from ..state.restore_plan import RestorePlan
from .manifests import decoding_of, spend_decoding
from .overlaps import Overlap, Reads
from .sources import ALONE, AsRank, Sources

log = logging.getLogger("snapstore")
T = TypeVar("T")


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
        See `restore` for the other errors.
    """
    snapshot = ref if isinstance(ref, Snapshot) else context.index.refresh().resolve(ref)
    while True:
        try:
            with out_of_memory(
                f"restore {snapshot.ref}", "free memory, restore parts of it with keys, or onto a device"
            ):
                options = {"into": into, "keys": keys, "device": device, "types": types, "as_rank": as_rank}
                return snapshot, restore(context, snapshot, **options)
        except (IntegrityError, FormatError) as error:
            exchange = as_rank.exchange
            if exchange is not None and exchange.has_heard:
                raise
            ruling = ruling_now(context, snapshot, error)
            if exchange is not None and exchange.has_begun:  # the other ranks are in the middle of this restore
                raise IntegrityError(
                    f"{snapshot.ref}: was rewritten or deleted while the ranks read it; restore again on all ranks"
                ) from error
            # If it was deleted, the reference means another snapshot now.
            if ruling.state == SWEPT:
                ruling = context.index.refresh().resolve(f"id:{ref.id}" if isinstance(ref, Snapshot) else ref)
            snapshot = ruling


def ruling_now(context: Context, snapshot: Snapshot, error: SnapstoreError) -> Snapshot:
    """Return the current revision of a snapshot that could not be read because it was rewritten or deleted meanwhile.

    Raises:
        The error again, with the snapshot's name: the revision that was read is the current one, so it is damaged.
        IntegrityError, StorageError: the record of the current revision is damaged, or cannot be read.
    """
    view = context.index.refresh()
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


def opened(context: Context, ref: str, open_it: Callable[[Snapshot], T]) -> T:
    """Return the result of `open_it` for the snapshot of a reference; call it again if that is rewritten meanwhile."""
    snapshot = context.index.refresh().resolve(ref)
    while True:
        try:
            return open_it(snapshot)
        except (IntegrityError, FormatError) as error:
            ruling = ruling_now(context, snapshot, error)
            snapshot = ruling if ruling.state != SWEPT else context.index.refresh().resolve(ref)


def read_into(
    context: Context,
    ref: str | Snapshot,
    target: Any,
    *,
    keys: str | Sequence[str] | Fit | None = None,
    types: Sequence[type] = (),
    as_rank: AsRank = ALONE,
) -> Snapshot:
    """Fill `target` with the state that a reference names, and return the snapshot; raises as `read` does."""
    if target is None:
        raise InvalidInputError("restore_into: the target is None; pass the state to fill, or call restore")
    return read(context, ref, into=target, keys=keys, types=types, as_rank=as_rank)[0]


def restore(
    context: Context,
    snapshot: Snapshot,
    *,
    into: Any = None,
    keys: str | Sequence[str] | Fit | None = None,
    device: Any = None,
    types: Sequence[type] = (),
    as_rank: AsRank = ALONE,
) -> Any:
    """Return the state of a snapshot, or `into` filled with it.

    Args:
        into: its sharded tensors get the boxes that they hold.
        keys: or a `Fit`, which also has new names.
        types: classes of which values are made, beside those of values in `into`. Values of other classes come back in
            their plain forms.
        as_rank: which rank reads, whose own values it gets, and whether ranks exchange chunks.

    Raises:
        InvalidInputError: `into` does not fit. The error names the differences part by part; nothing was written. Or
            the snapshot has values of each rank's own, and `as_rank` neither gives a rank that saved nor drops them.
        CapabilityError: `device` is a CUDA device that is not there; or the state does not fit into memory, or takes
            more decoding than its stored bytes explain. Nothing was written.
        IntegrityError, FormatError: the snapshot is damaged; `into` may be half written.
    """
    fit = Fit.of(keys)
    sources = Sources(context, snapshot, fit.parts_keys, as_rank)
    target = RestorePlan(
        sources.parts,
        into=into,
        keys=fit,
        device=device,
        on_device=context.engines.on_device,
        decoded=decoding_of(snapshot.ref, Types(types, into)),
        elsewhere=sources.elsewhere,
    )
    specs = (sources.parts[want.part].specs[want.entry] for want in target.wants)
    if device is not None and any(spec.kind in ("tensor", "parameter") for spec in specs):
        require_device(device)
    limits.require_memory(target.buffers.fresh_bytes(), f"{snapshot.ref}: restoring {len(target.wants)} tensors")
    overlaps = sources.overlaps(target.wants)
    require_decoding_of(context, overlaps, f"{snapshot.ref}: restoring")
    try:
        (as_rank.exchange.load if as_rank.exchange else load)(context, target.wants, overlaps, target.buffers)
    finally:
        context.engines.release_memory()
    if target.left_out:
        log.warning("%s: restored with strict=False: %s", snapshot.ref, target.left_out)
    return target.finish()


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
