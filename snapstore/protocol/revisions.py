"""Revisions: the create-only records that follow a snapshot's first, and proof that they lie where they were put.

In: a record as it was listed, and a change. Out: the next revision, read back from the store; or ConflictError, where
another process has created it. Forgetting is such a change.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..context import Context
from ..errors import (
    AlreadyExistsError,
    ConflictError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StorageError,
    StorageFullError,
)
from ..format import records
from ..format.records import COMMITTED, FORGOTTEN, MAX_OBJECT_BYTES, Snapshot
from ..storage.base import ObjectStore
from ..threads import Threads

#: So often is decided again by a new listing; a revision that no listing shows must not keep anybody for ever.
ATTEMPTS = 20
#: Each revision is one small durable put: they wait for the disk, not for a core.
FORGET_THREADS = 8


def put(store: ObjectStore, key: str, data: bytes) -> None:
    """Put a revision or a note of gc.

    Raises:
        StorageFullError: not even these few kilobytes fit.
    """
    try:
        store.put(key, data)
    except StorageFullError as error:
        raise StorageFullError(
            f"{str(error).partition(';')[0]}; forget and gc write a few kilobytes before they delete: "
            "free so much, then try again"
        ) from error


def create(store: ObjectStore, record: Snapshot) -> Snapshot:
    """Create a record unless its key is taken; whatever the store has answered, what lies there then is returned.

    Raises:
        StorageError: the store failed, or gives nothing under that key, though it said that something is there, twice.
        IntegrityError, FormatError: what lies there is damaged.
    """
    data = records.encode(record)
    for again in (True, False):
        said = "stored"
        try:
            put(store, record.key, data)
        except AlreadyExistsError:
            said = "reported as existing"
        try:
            got = store.get(record.key, limit_bytes=MAX_OBJECT_BYTES)
            return record if got == data else records.decode(got, Snapshot, record.key)
        except NotFoundError as error:
            if not again:
                raise StorageError(f"{record.key} in {store.url}: {said}, then not found; try again") from error
        except (FormatError, IntegrityError):
            if not again:
                raise
    raise AssertionError("unreachable")


def revise(context: Context, snapshot: Snapshot, **changes: object) -> Snapshot:
    """Create the next revision of a record.

    Raises:
        ConflictError: somebody else created it; read again and decide again.
        StorageError: the store failed, or has not kept it.
    """
    revision = snapshot.revised(**changes)
    if create(context.store, revision).write_id != revision.write_id:
        raise ConflictError(f"{snapshot.ref}: another process revised it first; try again")
    context.index.add(revision)
    return revision


def forget(context: Context, chosen: Sequence[Snapshot], *, policy: str, reason: str) -> list[Snapshot]:
    """Forget snapshots; those that were tagged or revised away meanwhile are left alone.

    Returns:
        The new revisions.
    """
    threads = Threads(min(FORGET_THREADS, max(1, len(chosen))))
    try:
        done = threads.start(lambda s: _forget_one(context, s, policy, reason), chosen)()
    finally:
        threads.close()
    return [snapshot for snapshot in done if snapshot is not None]


def _forget_one(context: Context, snapshot: Snapshot, policy: str, reason: str) -> Snapshot | None:
    """Forget one; None if it was tagged or revised away.

    Raises:
        StorageError: a revision of it is there that no listing shows.
    """
    current: Snapshot | None = snapshot
    for _ in range(ATTEMPTS):
        if current is None or current.state != COMMITTED or current.tags:
            return None
        try:
            return revise(context, current, state=FORGOTTEN, policy=policy, reason=reason)
        except ConflictError:
            current = context.index.refresh().get(snapshot.id)
    raise hidden(context.store, snapshot)


def hidden(store: ObjectStore, snapshot: Snapshot) -> StorageError:
    """The error of a revision that is there, and that no listing shows."""
    return StorageError(
        f"{snapshot.ref} (id:{snapshot.id[:12]}) in {store.url}: a later revision of its record is there, and the "
        "listing does not show it; nothing was changed; try again"
    )
