"""The write path of one save: session -> bases -> packs -> manifests -> the record -> the index.

In: the inputs of a save, safe to read. Out: a committed Snapshot, or an exception and no snapshot. The order is the
protocol's: everything that a record needs is durable before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from ..catalog.history import View
from ..context import Context
from ..errors import SnapstoreError, StorageError, out_of_memory
from ..format.records import COMMITTED, Snapshot
from ..protocol import tags
from ..protocol.claim import of_unknown_outcome
from ..protocol.session import SaveSession
from ..text import human_bytes, log
from .inputs import Lineage, PartInput, SaveRequest
from .known_chunks import load_bases, next_generation
from .manifest_writer import Written, write
from .retrying import Retrying
from .staging import Staging


def save(
    context: Context,
    lineage: Lineage,
    request: SaveRequest,
    inputs: Sequence[PartInput],
    staging: Staging | None,
    retrying: Retrying | None = None,
) -> Snapshot:
    """Store a state and commit it.

    Args:
        lineage: gives the manifests of the run's last save, and takes those of this one.
        inputs: from `staging.copy`; or from `inputs_of`: then the caller waits, and its own memory is read.
        staging: keeps the bytes as the next base. None: no bytes are kept; pass None for the inputs of an iterator.
        retrying: makes further attempts; the inputs must be copies. None: there is one attempt.

    Raises:
        InvalidInputError: an array was changed meanwhile. Nothing was committed; the same holds for the other errors.
        StorageError: the store failed.
        ConflictError: a gc has expired this save; save again.
        Anything that the iterator raises.
    """
    failed = retrying.failed if retrying and retrying.warns else []
    attempts = _Attempts(context, lineage, request, inputs, staging, failed)
    with staging.saving(inputs) if staging else nullcontext():
        return retrying.run(request, attempts.one) if retrying else attempts.one()


class _Attempts:
    """The attempts of one save; see `save`. Each attempt has a session of its own.

    Args:
        failed: the sessions of failed attempts, also of earlier saves; before the next attempt each has a record.
    """

    def __init__(
        self,
        context: Context,
        lineage: Lineage,
        request: SaveRequest,
        inputs: Sequence[PartInput],
        staging: Staging | None,
        failed: list[SaveSession],
    ) -> None:
        self._context, self._lineage, self._request = context, lineage, request
        self._inputs, self._staging, self._failed = inputs, staging, failed
        self._written: dict[SaveSession, Written] = {}  # of attempts that may have committed

    def one(self) -> Snapshot:
        """Commit, and keep the inputs as the next base; each attempt pins the place, which may be mounted anew.

        Raises:
            StorageError: the store failed. The message says so if this attempt or an earlier one may have committed.
        """
        context, request, staging = self._context, self._request, self._staging
        advice = "free memory, then save again; 'snapstore log' shows whether this save was committed"
        # The session checks the repository; tags leave other snapshots after it has ended.
        with self._telling_what_is_unknown(), context.store.pinned():
            before = context.index.refresh(request.run) if request.tags else None
            snapshot, written = self._settled() or (None, None)
            if snapshot is None or written is None:
                session = request.session(context)
                try:
                    with out_of_memory("save", advice), session:
                        session.watch, request.is_open = request.require_wanted, True
                        bases = load_bases(context, session, self._lineage.cached_manifests())
                        written = write(context, session, self._inputs, bases, full=request.full, staging=staging)
                        request.before_commit()
                        snapshot = commit(session, request, written, written.built_on)
                except Exception:
                    if session.written:
                        self._failed.append(session)
                    if written is not None and session.is_unclear:
                        self._written[session] = written
                    raise
            if staging:
                staging.keep_as_base(self._inputs, snapshot.id, written.in_memory)
            self._lineage.note_saved(snapshot, written.manifests_by_name)
            return finish(context, request, snapshot, written.headers, before)

    @contextmanager
    def _telling_what_is_unknown(self) -> Iterator[None]:
        try:
            yield
        except SnapstoreError as error:
            told = of_unknown_outcome(error) if self._written else error
            if told is error:
                raise
            raise told from error

    def _settled(self) -> tuple[Snapshot, Written] | None:
        """Return the snapshot of an earlier attempt if its record is there after all; else make sure it never is.

        If its record is there, and the store cannot tell whether it is durable, the next attempt saves the step a
        second time, which costs space; the newer one counts.

        Raises:
            StorageError: the store failed; no attempt begins before it is known.
        """
        while self._failed:
            session = self._failed[-1]
            try:
                found = session.settle()
            except StorageError:
                if not session.has_record():
                    raise
                self._failed.pop()
                continue
            self._failed.pop()
            written = self._written.pop(session, None)
            if written is not None and found.state == COMMITTED:
                return found, written
            session.discard()
        return None


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
