"""The write path of one save: session -> bases -> packs -> manifests -> the record -> the index.

In: the inputs of a save, safe to read. Out: a committed Snapshot, or an exception and no snapshot. The order is the
protocol's: everything that a record needs is durable before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

from ..catalog.history import View
from ..context import Context
from ..errors import SnapstoreError, out_of_memory
from ..format.records import Snapshot
from ..protocol import tags
from ..protocol.session import SaveSession
from ..text import human_bytes, log
from .inputs import Lineage, PartInput, SaveRequest
from .known_chunks import load_bases, next_generation
from .manifest_writer import Written, write
from .staging import Staging


def save(
    context: Context, lineage: Lineage, request: SaveRequest, inputs: Sequence[PartInput], staging: Staging | None
) -> Snapshot:
    """Store a state and commit it.

    Args:
        lineage: gives the manifests of the run's last save, and takes those of this one.
        inputs: from `staging.copy`; or from `inputs_of`: then the caller waits, and its own memory is read.
        staging: keeps the bytes as the next base. None: no bytes are kept; pass None for the inputs of an iterator.

    Raises:
        InvalidInputError: an array was changed meanwhile. Nothing was committed; the same holds for the other errors.
        StorageError: the store failed.
        ConflictError: a gc has expired this save; save again.
        Anything that the iterator raises.
    """
    with context.store.pinned():  # the session checks the repository; tags leave other snapshots after it has ended
        before = context.index.refresh(request.run) if request.tags else None
        advice = "free memory, then save again; 'snapstore log' shows whether this save was committed"
        with staging.saving(inputs) if staging else nullcontext():
            with out_of_memory("save", advice), request.session(context) as session:
                session.watch = request.require_wanted
                bases = load_bases(context, session, lineage.cached_manifests())
                written = write(context, session, inputs, bases, full=request.full, staging=staging)
                request.before_commit()
                snapshot = commit(session, request, written, written.bases.snapshots)
            if staging:
                staging.keep_as_base(inputs, snapshot.id)
        lineage.note_saved(snapshot, written.manifests_by_name)
        return finish(context, request, snapshot, written.headers, before)


def finish(
    context: Context, request: SaveRequest, snapshot: Snapshot, headers: dict[str, bytes], before: View | None
) -> Snapshot:
    """Index and log a committed save; remove its tags from the other snapshots of its run.

    Args:
        headers: of its manifests: the bytes up to the header's end, by SHA-256.
        before: the records of the run before the save; None: the save has no tags.

    Returns:
        The snapshot with the tags that it keeps; see `tags.take`.
    """
    context.index.add(snapshot, headers)
    log.info(
        "run=%s step=%d logical=%s stored=%s new=%d/%d chunks stall=%.0fms total=%.2fs",
        snapshot.run,
        snapshot.step,
        human_bytes(snapshot.logical_bytes),
        human_bytes(snapshot.stored_bytes),
        snapshot.new_chunks,
        snapshot.chunks,
        1000 * snapshot.stall_s,
        snapshot.total_s,
    )
    try:
        return snapshot if before is None else tags.take(context, request.tags, snapshot, before)
    except SnapstoreError as error:  # the save is committed; a tag on two snapshots means the newest
        log.warning("run=%s tags %s stay on an older snapshot as well: %s", request.run, request.tags, error)
        return snapshot


def commit(
    session: SaveSession,
    request: SaveRequest,
    written: Written,
    bases: Sequence[Snapshot],
    features: Sequence[str] = (),
) -> Snapshot:
    """Create the record.

    Args:
        written: the manifests that the record names, and the counts of all that was written.
        bases: the snapshots that the save builds on; of a job, those on which at least one rank has built.

    Raises:
        ConflictError: a gc has expired this save; nothing was committed.
        StorageError: the store failed.
    """
    total_s = time.monotonic() - request.started
    return session.commit(
        bases=[base.id for base in bases],
        manifests=written.manifests,
        manifest_list=written.manifest_list,
        tags=request.tags,
        metrics=request.read_metrics(),
        metadata_node=request.metadata_node,
        created=time.time() if request.created is None else request.created,
        generation=next_generation(bases),
        depth=written.depth,
        chunks=written.chunks,
        new_chunks=written.new_chunks,
        logical_bytes=written.logical_bytes,
        stored_bytes=written.stored_bytes,
        stall_s=total_s if request.stall_s is None else request.stall_s,
        total_s=total_s,
        features=list(features),
    )
