"""Revisions: create the create-only records that follow a snapshot's first record, and read each back from the store.

In: a record as it was listed, and a change. Out: the next revision, or ConflictError if another process has created it.
To forget a snapshot is such a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from ..catalog.history import View
from ..context import Context
from ..errors import (
    AlreadyExistsError,
    ConflictError,
    FormatError,
    IntegrityError,
    NotFoundError,
    SnapstoreError,
    StorageError,
    StorageFullError,
)
from ..format import records
from ..format.records import COMMITTED, FORGOTTEN, MAX_OBJECT_BYTES, Snapshot
from ..storage.base import ObjectStore
from ..threads import Threads

#: Bounds the retries: a revision that no listing shows would cause an endless loop.
CONFLICT_ATTEMPTS = 20
#: So many revisions are written at once: each is one small durable put, which waits for the disk, not for a core.
REVISIONS_AT_ONCE = 16

T = TypeVar("T")
R = TypeVar("R")


def retry_conflicts(attempt: Callable[[], T], failure: Callable[[ConflictError], SnapstoreError]) -> T:
    """Call `attempt` until no other process revises a record first, and return its result.

    Args:
        attempt: lists the records, decides, and creates revisions. It raises ConflictError if it lost the race.
        failure: makes the error to raise after the last of CONFLICT_ATTEMPTS attempts has lost.
    """
    for left in range(CONFLICT_ATTEMPTS - 1, -1, -1):
        try:
            return attempt()
        except ConflictError as error:
            if not left:
                raise failure(error) from error
    raise AssertionError("unreachable")


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
            "free a few kilobytes, then try again"
        ) from error


def create(context: Context, record: Snapshot) -> Snapshot:
    """Create a record unless its key is taken; return the record that the key holds after that, whatever PUT answered.

    If it was joined at once, and its key is free again, that is the one in a page.

    Raises:
        StorageError: the store failed; or, twice, it returns nothing under a key that it reported as stored or taken.
        IntegrityError, FormatError: the record that the key holds is damaged.
    """
    data, store = records.encode(record), context.store
    for again in (True, False):
        answer = "stored"
        try:
            put(store, record.key, data)
        except AlreadyExistsError:
            answer = "reported as existing"
        try:
            got = store.get(record.key, limit_bytes=MAX_OBJECT_BYTES)
            return record if got == data else records.decode(got, Snapshot, record.key)
        except NotFoundError as error:
            if (joined := context.index.pages.joined_as(record)) is not None:
                return joined
            if not again:
                raise StorageError(f"{record.key} in {store.url}: {answer}, then not found; try again") from error
        except (FormatError, IntegrityError):
            if not again:
                raise
    raise AssertionError("unreachable")


def revise(context: Context, snapshot: Snapshot, **changes: object) -> Snapshot:
    """Create the next revision of a record.

    Raises:
        ConflictError: another process created it first; read the records again and decide again.
        IntegrityError: a page of the run is damaged; nothing was changed.
        StorageError: the store failed, or has not kept it.
    """
    revision = put_revision(context, snapshot, **changes)
    if void(context, [revision]):
        raise _revised_first(snapshot)
    return revision


def put_revision(context: Context, snapshot: Snapshot, **changes: object) -> Snapshot:
    """Create the next revision of a record, as `revise` does; the caller then looks whether it is `void`."""
    context.index.pages.require_whole(snapshot.run)
    revision = snapshot.revised(**changes)
    if create(context, revision).write_id != revision.write_id:
        raise _revised_first(snapshot)
    context.index.add(revision)
    return revision


def _revised_first(snapshot: Snapshot) -> ConflictError:
    return ConflictError(
        f"{snapshot.ref} (id:{snapshot.id[:12]}): another process revised it first; nothing was changed; try again"
    )


def void(context: Context, made: Sequence[Snapshot]) -> list[Snapshot]:
    """Return which of some revisions are void, after their PUT: a page has another one in their place, or a later one.

    Their keys were free, because the records there had been joined, and deleted. The page was there before.

    Raises:
        StorageError: the store failed.
    """
    found: list[Snapshot] = []
    for run in dict.fromkeys(record.run for record in made):
        joined = context.index.pages.look(run)
        if joined is not None:
            of_run = [record for record in made if record.run == run]
            found += of_run if joined.damaged else [record for record in of_run if joined.makes_void(record)]
    return found


def at_once(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `function` of every item; it creates a revision of each.

    Raises:
        The error of the first item, in their order, that failed; the others may have been revised.
    """
    if len(items) < 2:
        return [function(item) for item in items]
    with Threads(REVISIONS_AT_ONCE) as threads:
        return threads.start(function, items)()


def is_ruling(view: View, snapshot: Snapshot) -> bool:
    """Return whether a revision is still the highest one of its record."""
    ruling = view.get(snapshot.id)
    return ruling is not None and ruling.key == snapshot.key


def same_content(now: Snapshot | None, before: Snapshot) -> bool:
    """Return whether a record has its earlier content; failed claims may have created copies of it (claim.py)."""
    if now is None:
        return False
    copy = msgspec.structs.replace(now, revision=before.revision, write_id=before.write_id)
    return records.encode(copy) == records.encode(before)  # in bytes a NaN equals itself


def forget(
    context: Context,
    chosen: Sequence[Snapshot],
    *,
    policy: str,
    reason: str,
    stops: Callable[[], bool] = lambda: False,
) -> list[Snapshot]:
    """Forget snapshots, except those tagged or revised to another state meanwhile.

    Args:
        stops: whether to forget no more; it is asked before each.

    Returns:
        The new revisions.

    Raises:
        StorageError: the store failed, or has a revision that no listing shows.
    """
    done = at_once(lambda s: None if stops() else _forget_one(context, s, policy, reason), chosen)
    made = {snapshot.id: snapshot for snapshot in done if snapshot is not None}
    for lost in void(context, [*made.values()]):
        current = context.index.refresh(lost.run).get(lost.id)
        again = _forget_one(context, current, policy, reason, looks=True)
        if again is None:
            del made[lost.id]
        else:
            made[lost.id] = again
    return [*made.values()]


def _forget_one(
    context: Context, current: Snapshot | None, policy: str, reason: str, *, looks: bool = False
) -> Snapshot | None:
    """Forget one snapshot; return None if it was tagged or revised to another state.

    Args:
        looks: whether to look if the revision is void; else the caller does.

    Raises:
        StorageError: it has a revision that no listing shows.
    """

    def attempt() -> Snapshot | None:
        nonlocal current
        if current is None or current.state != COMMITTED or current.tags:
            return None
        try:
            put = revise if looks else put_revision
            return put(context, current, state=FORGOTTEN, policy=policy, reason=reason)
        except ConflictError:
            current = context.index.refresh(current.run).get(current.id)
            raise

    return retry_conflicts(attempt, lambda error: hidden_revision(context.store, error))


def hidden_revision(store: ObjectStore, error: ConflictError) -> StorageError:
    """Return the error for a revision that exists and that no listing shows."""
    conflict = str(error).partition(";")[0]
    return StorageError(
        f"{store.url}: {conflict}, and the listing does not show its revision; nothing was changed; try again"
    )
