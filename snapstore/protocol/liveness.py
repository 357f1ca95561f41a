"""Liveness: which sessions a gc must wait for, which have ended, and how a dead one is fenced.

A session has ended if a GET answers 404 and two listings lack it: one wrong answer proves nothing. A gc waits for a
session that is listed and cannot be read. A session whose process is dead, or whose heartbeat is stale, is fenced: gc
creates another record under the key that the session would have created, and reads it back, before it releases anything
that the session protects. A session names the host, the boot and the pid of its process.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

from ..catalog.read_twice import listed, read_small
from ..catalog.record_listing import repeats_id
from ..context import Context
from ..errors import CapabilityError, FormatError, IntegrityError, NotFoundError, StorageError, UnknownFormatError
from ..format import records
from ..format.keys import parse_record_key, record_key
from ..format.records import ABORTED, Session, Snapshot
from ..storage.base import ObjectInfo, ObjectStore
from ..text import log, strip_hint
from .revisions import create

PREFIX = "sessions/"
_ID = re.compile("[0-9a-f]{32}")
#: If a session is dated further in the future than this [s], the store's clock was set back after its last heartbeat,
#: or another program has set the date.
FUTURE_S = 60.0
#: Ids of this process's sessions that have ended but could not be removed, or whose commit is unclear. The process
#: lives, so only a gc of this process can know that it may fence them.
orphaned_sessions: set[str] = set()


def listed_sessions(store: ObjectStore) -> list[str]:
    """Return the ids of the sessions that either of two listings shows, sorted; files of other programs are none."""
    return sorted(id_ for key in listed(store, PREFIX) if _ID.fullmatch(id_ := key.removeprefix(PREFIX)))


def is_in_future(info: ObjectInfo, now_s: float) -> bool:
    """Return whether a listed session is dated in the future; an unreadable one, whose date is infinite, is not."""
    return FUTURE_S < info.modified_s - now_s < math.inf


def _silence_s(store: ObjectStore, info: ObjectInfo, *, redate: bool) -> float:
    """Return how long a session has been silent by the store's clock [s]; 0 if it is dated in the future.

    Args:
        redate: touch a session that is dated in the future, as its heartbeat would: its silence counts from now on.
    """
    now_s = store.now_s()
    if redate and is_in_future(info, now_s):
        ahead_s = info.modified_s - now_s
        log.warning("%s is dated %.0f s in the future: its silence counts from now on", info.key, ahead_s)
        try:
            store.touch(info.key)
        except (NotFoundError, CapabilityError, StorageError) as error:
            log.warning("the date of %s cannot be changed: %s", info.key, strip_hint(error))
    return max(0.0, now_s - info.modified_s)


def examine(
    store: ObjectStore, session_id: str, fence_after_s: float, *, redate: bool = False
) -> tuple[bool, Session | None]:
    """Return (True if a gc need not wait for a session, the session if it is dead and must be fenced).

    Args:
        fence_after_s: a session of another host whose heartbeat is older counts as dead [s].
        redate: see `_silence_s`; False writes nothing.

    Raises:
        StorageError: the store cannot be read.
    """
    key = f"{PREFIX}{session_id}"
    try:
        info = store.stat(key)
        session = read_small(store, Session, key)
    except NotFoundError as error:
        if key not in listed(store, PREFIX):
            return True, None
        log.warning("gc waits for a session that is listed and cannot be read: %s", strip_hint(error))
        return False, None
    except (IntegrityError, FormatError) as error:  # it does not tell which record to create in its place
        log.warning("gc waits for a damaged session; run 'snapstore repair': %s", strip_hint(error))
        return False, None
    same_boot = session.host == host_name() and bool(session.boot_id) and session.boot_id == boot_id()
    held = store.is_locked(key) if same_boot else None
    dead = session_id in orphaned_sessions or held is False
    if not dead and (held is True or _silence_s(store, info, redate=redate) < fence_after_s):
        return False, None
    return True, session


def fence_if_dead(context: Context, session_id: str, fence_after_s: float, fenced: list[str]) -> bool:
    """Fence a session if it is dead, and append its id to `fenced`; return whether it has ended or is fenced.

    Raises:
        StorageError: it cannot be read, or cannot be fenced: nothing proves that its record can no longer appear.
    """
    ended, dead_session = examine(context.store, session_id, fence_after_s, redate=True)
    if dead_session is not None:
        _fence(context, dead_session)
        orphaned_sessions.discard(session_id)
        fenced.append(session_id)
    return ended


def _fence(context: Context, session: Session) -> None:
    """Create the record that blocks a dead session's own record; an object that has the key already blocks it too."""
    record = _blocking_record(context, session)
    if record is not None:
        with suppress(IntegrityError, FormatError):  # a damaged object blocks it too
            create(context, record)
    context.store.release(records.key_of(session))


def _blocking_record(context: Context, session: Session) -> Snapshot | None:
    """Return the record that blocks a session's record; None if there is none to block.

    For a save it is the save's own record as aborted, for a rewrite a copy of the previous revision as it rules: from a
    page rather than from a loose record, which may be void.

    Raises:
        IntegrityError, FormatError: the previous revision is damaged.
        StorageError: it is listed, and cannot be read.
    """
    parsed = parse_record_key(session.key)
    if parsed is None:
        return None
    store = context.store
    run, step, snapshot_id, revision = parsed
    if not revision:
        others = listed(store, "snapshots/").keys() | context.index.pages.keys_of(snapshot_id)
        if session.id != snapshot_id or repeats_id(session.key, others):
            return None  # the session is forged: the record would hide another snapshot's record
        return aborted(run, step, snapshot_id, "gc gave this save up as dead")
    before = record_key(run, step, snapshot_id, revision - 1)
    with suppress(NotFoundError):
        store.stat(session.key)
        return None
    context.index.pages.require_whole(run)
    joined = context.index.pages.look(run)
    if joined is not None and joined.revision_of(snapshot_id) >= revision - 1:
        record = joined.record_of(snapshot_id)
        if record is None:
            raise UnknownFormatError(f"{before}: is in a page, and only another release can read it; run that one's gc")
        return record.revised() if record.key == before else None  # a later page blocks it
    try:
        return read_small(store, Snapshot, before).revised()
    except NotFoundError as error:
        if before in listed(store, f"snapshots/{run}/"):
            raise StorageError(
                f"{before} in {store.url}: is listed, then not found; run 'snapstore gc' again"
            ) from error
        return None


def aborted(run: str, step: int, snapshot_id: str, reason: str) -> Snapshot:
    """Return the record of a save that never committed."""
    return Snapshot(
        id=snapshot_id,
        run=run,
        step=step,
        seq=0,
        state=ABORTED,
        write_id=records.new_id(),
        created=time.time(),
        reason=reason,
    )


def this_session(save_id: str, key: str) -> Session:
    """Return a session of this process."""
    return Session(id=save_id, key=key, host=host_name(), boot_id=boot_id(), pid=os.getpid(), started=time.time())


def host_name() -> str:
    """Return the name of this host, the same in every locale; a byte that is not UTF-8 is shown as that byte."""
    return os.fsencode(socket.gethostname()).decode("utf-8", "backslashreplace")


def boot_id() -> str:
    """Return the id of this boot, "" where unknown. Within one boot, a free lock proves that a process is dead."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
