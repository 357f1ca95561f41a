"""Liveness: which sessions a gc must wait for, which have ended, and how one is given up.

A session has ended if two listings lack it: one 404, or one listing that lacks it, proves nothing. One that is listed
and cannot be read is waited for. One whose process is dead, or whose heartbeat is too old, is fenced: the record that
it would have created is created in its place, and read back, before anything that it protects is released.
"""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress

from ..catalog.read_twice import listed
from ..errors import FormatError, IntegrityError, NotFoundError, StorageError
from ..format import records
from ..format.keys import parse_record_key, record_key
from ..format.records import ABORTED, MAX_OBJECT_BYTES, Session, Snapshot
from ..storage.base import ObjectStore
from ..text import without_advice
from . import revisions
from .session import LEFT_OVER
from .this_process import boot_id

log = logging.getLogger("snapstore")
PREFIX = "sessions/"


def there(store: ObjectStore) -> list[str]:
    """Ids of the sessions that have not ended."""
    return sorted(key.removeprefix(PREFIX) for key in listed(store, PREFIX))


def dead(store: ObjectStore, session_id: str, fence_after_s: float) -> tuple[bool, Session | None]:
    """Whether a session has ended, or may be given up as dead: then what is to be fenced."""
    key = f"{PREFIX}{session_id}"
    try:
        info = store.stat(key)
        session = records.decode(store.get(key, limit_bytes=MAX_OBJECT_BYTES), Session, key)
    except NotFoundError as error:
        if key not in listed(store, PREFIX):
            return True, None
        log.warning("gc waits for a session that is listed and cannot be read: %s", without_advice(error))
        return False, None
    except (IntegrityError, FormatError) as error:  # whose it is cannot be told, so nobody can be fenced
        log.warning("gc waits for a damaged session; run 'snapstore repair': %s", without_advice(error))
        return False, None
    same_boot = session.host == socket.gethostname() and bool(session.boot_id) and session.boot_id == boot_id()
    held = store.is_held(key) if same_boot else None
    over = session_id in LEFT_OVER or held is False
    if not over and (held is True or store.now_s() - info.modified_s < fence_after_s):
        return False, None
    return True, session


def ended(store: ObjectStore, session_id: str, fence_after_s: float, fenced: list[str]) -> bool:
    """Whether a session has ended, by itself or because it is given up now: then `fenced` gets its id.

    Raises:
        StorageError: it cannot be given up: nothing proves that its record can no longer appear.
    """
    over, session = dead(store, session_id, fence_after_s)
    if session is not None:
        _fence(store, session)
        LEFT_OVER.discard(session_id)
        fenced.append(session_id)
    return over


def _fence(store: ObjectStore, session: Session) -> None:
    """Create what stands in the way of a dead session's record; if that has been created already, it stands."""
    fence = _fence_of(store, session)
    if fence is not None:
        with suppress(IntegrityError, FormatError):  # a damaged object is in the way as well
            revisions.create(store, fence)
    store.release(records.key_of(session))


def _fence_of(store: ObjectStore, session: Session) -> Snapshot | None:
    """Of a save, its record as aborted; of a rewrite, the revision before once more; None: there is nothing to stop.

    Raises:
        IntegrityError, FormatError: the revision before is damaged.
        StorageError: it is listed, and cannot be read.
    """
    parsed = parse_record_key(session.key)
    if parsed is None:
        return None
    run, step, snapshot_id, revision = parsed
    if not revision:
        return aborted(run, step, snapshot_id, "gc gave this save up as dead")
    before = record_key(run, step, snapshot_id, revision - 1)
    with suppress(NotFoundError):
        store.stat(session.key)
        return None
    try:
        return records.decode(store.get(before, limit_bytes=MAX_OBJECT_BYTES), Snapshot, before).revised()
    except NotFoundError as error:
        if before in listed(store, f"snapshots/{run}/"):
            raise StorageError(
                f"{before} in {store.url}: is listed, then not found; run 'snapstore gc' again"
            ) from error
        return None


def aborted(run: str, step: int, snapshot_id: str, reason: str) -> Snapshot:
    """The record of a save that never was."""
    return Snapshot(
        id=snapshot_id, run=run, step=step, seq=0, state=ABORTED, write_id=records.new_id(), created=time.time(),
        reason=reason,
    )  # fmt: skip
