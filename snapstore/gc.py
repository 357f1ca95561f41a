"""gc: forget snapshots, then delete what no committed snapshot needs: mark, wait, sweep.

    mark    (1) LIST packs and manifests  (2) LIST records, read manifest headers: live = all that ruling committed
            records need; candidates = 1 minus 2  (3) PUT gc/<id>.mark  (4) only then LIST sessions, PUT .wait
    sweep   every session of .wait has ended or is fenced; live again from scratch; `swept` revisions for forgotten
            records that lose bytes; look for the mark again, stop if it is gone; delete; remove mark, wait; PUT .done

Why this order (the models that explore it are described in docs/design/protocol.md): a save that began before the
listing of sessions is waited for; one that began after it has seen the mark, and will not build on its candidates. A
gc that finds another's mark completes it, dead or alive; looking for the mark after recomputing keeps the two apart.
Nothing here trusts a clock, except to give up a session of another host.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from . import records
from .errors import (
    AlreadyExistsError,
    ConflictError,
    FormatError,
    IntegrityError,
    NotFoundError,
    SnapstoreError,
    StorageError,
    StorageFullError,
    without_advice,
)
from .index import Index
from .records import ABORTED, COMMITTED, FORGOTTEN, SWEPT, Done, Lost, Mark, Session, Snapshot, Wait, counted, some
from .session import LEFT_OVER, MARK_LIMIT_BYTES, all_needed_keys, mark_keys, read_mark
from .storage import ObjectStore
from .threads import Threads
from .view import PUT_BACK, View

log = logging.getLogger("snapstore")
DEFAULT_FENCE_AFTER_S = 3600.0
#: Each revision is one small durable put: they wait for the disk, not for a core.
FORGET_THREADS = 8
#: How the reason of a snapshot begins that a repair has forgotten, because it stays damaged.
DROPPED = "damaged: "
#: What else may lie there was put there by somebody else, and is left alone.
OBJECT_NAME = re.compile(r"(?:packs|manifests)/[0-9a-f]{2}/[0-9a-f]{64}")


@dataclass(slots=True)
class GcResult:
    """What a gc did, or would do.

    Attributes:
        deleted_objects, deleted_bytes: packs and manifests removed (in a dry run: that would be).
        stored_bytes: packs and manifests left [bytes].
        waiting_for: sessions of live saves, and damaged ones; while there are any, nothing is deleted (of a dry run:
            would be): run gc again later.
        fenced: sessions of dead saves that were given up.
    """

    deleted_objects: int = 0
    deleted_bytes: int = 0
    stored_bytes: int = 0
    waiting_for: list[str] = field(default_factory=list)
    fenced: list[str] = field(default_factory=list)
    dry_run: bool = False


def collect(
    store: ObjectStore, index: Index, *, dry_run: bool = False, fence_after_s: float = DEFAULT_FENCE_AFTER_S
) -> GcResult:
    """Delete every pack and manifest that no committed snapshot needs.

    Raises:
        IntegrityError: a manifest is unreadable, a live object is missing, or the listing lacks known records; nothing
            was deleted.
        StorageError: a listing failed; nothing was deleted.
    """
    result = GcResult(dry_run=dry_run)
    if dry_run:
        _, candidates, sizes = _candidates(store, index)
        result.deleted_objects, result.deleted_bytes = len(candidates), sum(sizes[key] for key in candidates)
        result.stored_bytes = sum(sizes.values()) - result.deleted_bytes
        sessions = [info.key.split("/")[1] for info in store.list("sessions/")] if candidates else []
        result.waiting_for = sorted(name for name in sessions if not _is_over(store, name, fence_after_s)[0])
        return result
    store.clean()
    pending: set[str] = set()  # candidates of marks that wait for sessions
    for mark in _standing_marks(store):  # of gcs that died, or run beside us
        if not _sweep(store, index, mark, fence_after_s, result):
            pending |= mark.keys()
    mark_now = _mark(store, index, pending)
    if mark_now is not None:
        _sweep(store, index, mark_now, fence_after_s, result)
    else:
        _fence_dead(store, fence_after_s, result)
    _forget_done(store, index)
    result.waiting_for = sorted(set(result.waiting_for))
    result.stored_bytes = sum(_sizes(store).values())
    return result


def _sizes(store: ObjectStore) -> dict[str, int]:
    """Size of every pack and manifest, by key."""
    found = (info for prefix in ("packs/", "manifests/") for info in store.list(prefix))
    return {info.key: info.size_bytes for info in found if OBJECT_NAME.fullmatch(info.key)}


def _standing_marks(store: ObjectStore) -> list[Mark]:
    """Every mark; one that cannot be read is removed: its gc, if it lives, finds it gone and stops."""
    marks: list[Mark] = []
    for key in mark_keys(store):
        try:
            mark = read_mark(store, key)
        except (IntegrityError, FormatError) as error:
            log.warning("a damaged gc mark is removed: %s", error)
            store.delete([key])
            continue
        if mark is not None:
            marks.append(mark)
    return marks


def need_all_records(view: View, verb: str, outcome: str) -> None:
    """Raise, naming a verb and its outcome, unless every record is there and can be read.

    Raises:
        IntegrityError: one is damaged, or missing.
        StorageError: one cannot be read.
    """
    if view.damaged:
        raise IntegrityError(f"{verb}: {_first(view.damaged)}; {outcome}; run 'snapstore check'")
    if view.unread:
        raise StorageError(f"{verb}: {_first(view.unread)}; {outcome}; try again, or run 'snapstore check'")
    if view.vanished:
        raise IntegrityError(
            f"{verb}: the listing lacks {counted(len(view.vanished), 'known record')}, first {view.vanished[0]}; "
            f"{outcome}; {PUT_BACK}"
        )


def _first(wrong: Mapping[str, str]) -> str:
    """One of the records that are wrong, named once, and why."""
    key, why = next(iter(wrong.items()))
    return without_advice(why) if key in why else f"{key}: {without_advice(why)}"


def live_keys(store: ObjectStore, index: Index, view: View, present: Iterable[str]) -> set[str]:
    """Everything that ruling committed records need.

    Raises:
        IntegrityError: what is live cannot be told, or is not all there.
    """
    need_all_records(view, "gc", "nothing was deleted")
    live: set[str] = set()
    for snapshot, keys in all_needed_keys(index, view.snapshots()):
        if isinstance(keys, NotFoundError):
            raise IntegrityError(
                f"gc: {snapshot.ref}: {without_advice(keys)}; nothing was deleted; run 'snapstore check'"
            ) from keys
        if isinstance(keys, SnapstoreError):
            raise keys
        live |= keys
    absent = live.difference(present)
    absent -= in_quarantine(store) if absent else set()  # known to be lost, and to whom: no reason to stop
    missing = [key for key in sorted(absent) if not _exists(store, key)]
    if missing:
        raise IntegrityError(
            f"gc: {counted(len(missing), 'live object')} missing: {some(missing, 1)}; nothing was deleted; "
            "run 'snapstore check'"
        )
    return live


def in_quarantine(store: ObjectStore) -> set[str]:
    """Keys of the packs that a repair has found damaged: whatever they still hold stays until a person says so."""
    return records.quarantined(info.key for info in store.list("gc/"))


def in_need_of_quarantined(store: ObjectStore, index: Index, snapshots: Sequence[Snapshot]) -> set[str]:
    """Ids of the snapshots that need a pack in quarantine, or that a repair has found to lack a manifest.

    One that was healed needs none; no other data is read.
    """
    notes = [info.key for info in store.list("gc/")]
    damaged, found = records.quarantined(notes), records.lost(notes) & {s.id for s in snapshots}
    if damaged:
        found |= {s.id for s, keys in all_needed_keys(index, snapshots) if not isinstance(keys, set) or keys & damaged}
    return found


def _put(store: ObjectStore, key: str, data: bytes) -> None:
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


def _exists(store: ObjectStore, key: str) -> bool:
    """Objects of a save that committed after our listing are there, though the listing lacks them."""
    try:
        store.stat(key)
    except NotFoundError:
        return False
    return True


def _settled_view(store: ObjectStore, index: Index) -> View:
    """The records, on a listing that a power cut cannot take back."""
    view = index.refresh()
    for run in {snapshot.run for snapshot in view.snapshots(states=None)}:
        store.settle(f"snapshots/{run}/")
    return view


def _live(store: ObjectStore, index: Index, present: Iterable[str]) -> tuple[View, set[str]]:
    """The records now, and all that they need.

    A snapshot that is forgotten and swept by another gc while we read its manifests is no damage: we look again.
    """
    while True:
        view = _settled_view(store, index)
        try:
            return view, live_keys(store, index, view, present)
        except IntegrityError:
            still = {snapshot.key for snapshot in index.refresh().snapshots()}
            if still.issuperset(snapshot.key for snapshot in view.snapshots()):
                raise


def _candidates(store: ObjectStore, index: Index) -> tuple[View, set[str], dict[str, int]]:
    """(the records, keys that nothing live needs, sizes of all): objects are listed before records."""
    sizes = _sizes(store)
    view, live = _live(store, index, sizes)
    return view, sizes.keys() - live - in_quarantine(store), sizes


def _mark(store: ObjectStore, index: Index, pending: set[str]) -> Mark | None:
    """Steps 1 to 3; None when there is nothing to delete that no standing mark names."""
    view, candidates, _ = _candidates(store, index)
    candidates -= pending
    if not candidates:
        if not pending:  # a forgotten snapshot whose manifests are all gone has nothing left to delete, and is over
            _write_swept(store, index, view, set())
        return None
    names = {"packs": bytearray(), "manifests": bytearray()}
    for key in sorted(candidates):
        kind, _, name = key.split("/")
        names[kind] += bytes.fromhex(name)
    mark = Mark(
        id=records.new_id(), started=time.time(), packs=bytes(names["packs"]), manifests=bytes(names["manifests"])
    )
    _put(store, f"gc/{mark.id}.mark", records.encode(mark))
    return mark


def _wait_list(store: ObjectStore, mark: Mark) -> Wait:
    """Step 4: the sessions listed after the mark was put; the first such list stands."""
    key = f"gc/{mark.id}.wait"
    sessions = [info.key.split("/")[1] for info in store.list("sessions/")]
    wait = Wait(id=mark.id, sessions=sessions)
    try:
        _put(store, key, records.encode(wait))
    except AlreadyExistsError:
        try:
            return records.decode(store.get(key, limit_bytes=MARK_LIMIT_BYTES), Wait, key)
        except (NotFoundError, IntegrityError, FormatError):  # its gc is done, or it is damaged: ours is as good
            return wait
    except StorageFullError:
        return wait  # any list made behind the mark will do, and deleting makes room
    return wait


def _sweep(store: ObjectStore, index: Index, mark: Mark, fence_after_s: float, result: GcResult) -> bool:
    """Complete a mark; False when it must wait."""
    wait = _wait_list(store, mark)
    waiting = [session for session in wait.sessions if not _ended(store, session, fence_after_s, result)]
    if waiting:
        result.waiting_for.extend(waiting)
        return False
    sizes = _sizes(store)
    doomed = mark.keys() & sizes.keys()
    while True:  # until no un-forget has slipped in between
        view, live = _live(store, index, sizes)
        doomed -= live | in_quarantine(store)
        if _write_swept(store, index, view, doomed):
            break
    try:
        store.stat(f"gc/{mark.id}.mark")
    except NotFoundError:
        return True  # another gc has completed this mark; what it left may have come alive since
    store.delete(sorted(doomed))
    result.deleted_objects += len(doomed)
    result.deleted_bytes += sum(sizes[key] for key in doomed)
    store.delete([f"gc/{mark.id}.mark"])
    store.delete([f"gc/{mark.id}.wait"])
    done = Done(id=mark.id, deleted_objects=len(doomed), deleted_bytes=sum(sizes[key] for key in doomed))
    with suppress(AlreadyExistsError, StorageError):  # two gcs completed it; and a note is not worth a failure
        store.put(f"gc/{mark.id}.done", records.encode(done))
    return True


def _write_swept(store: ObjectStore, index: Index, view: View, doomed: set[str]) -> bool:
    """A `swept` revision for every forgotten record that loses bytes; False when one was revised under us."""
    for snapshot, keys in all_needed_keys(index, view.snapshots(states=(FORGOTTEN,))):
        # A bad sector must not stop every gc: what a repair has dropped was given up by somebody who knew of it.
        if isinstance(keys, StorageError) and not snapshot.reason.startswith(DROPPED):
            raise keys  # it cannot be read, which does not say that it is gone
        # Another error: its manifest is gone, as an earlier sweep died between deleting and here.
        if isinstance(keys, SnapstoreError) or not keys.isdisjoint(doomed):
            try:
                revise(store, index, snapshot, state=SWEPT)
            except ConflictError:
                return False
    return True


def _ended(store: ObjectStore, session_id: str, fence_after_s: float, result: GcResult) -> bool:
    """Whether a session has ended, by itself or because we fence it now."""
    over, dead = _is_over(store, session_id, fence_after_s)
    if dead is not None:
        _fence(store, f"sessions/{session_id}", dead)
        LEFT_OVER.discard(session_id)
        result.fenced.append(session_id)
    return over


def _is_over(store: ObjectStore, session_id: str, fence_after_s: float) -> tuple[bool, Session | None]:
    """Whether a session has ended, or may be given up as dead: then what is to be fenced."""
    key = f"sessions/{session_id}"
    try:
        info = store.stat(key)
        session = records.decode(store.get(key, limit_bytes=records.MAX_OBJECT_BYTES), Session, key)
    except NotFoundError:
        return True, None
    except (IntegrityError, FormatError) as error:  # whose it is cannot be told, so nobody can be fenced
        log.warning("gc waits for a damaged session; run 'snapstore repair': %s", without_advice(error))
        return False, None
    same_boot = session.host == socket.gethostname() and bool(session.boot_id) and session.boot_id == records.boot_id()
    held = store.is_held(key) if same_boot else None
    over = session_id in LEFT_OVER or held is False
    if not over and (held is True or store.now_s() - info.modified_s < fence_after_s):
        return False, None
    return True, session


def _fence(store: ObjectStore, key: str, session: Session) -> None:
    """Create what stands in the way of a dead session's record; if that has been created already, it stands."""
    fence = _fence_of(store, session)
    if fence is not None:
        with suppress(AlreadyExistsError):
            _put(store, fence.key, records.encode(fence))
    store.release(key)  # the key that was listed, not what the object says of itself


def _fence_of(store: ObjectStore, session: Session) -> Snapshot | None:
    """Of a save, its record as aborted; of a rewrite, the revision before once more; None: there is nothing to stop.

    Raises:
        IntegrityError, FormatError: the revision before is damaged.
    """
    parsed = records.parse_record_key(session.key)
    if parsed is None:
        return None
    run, step, snapshot_id, revision = parsed
    if not revision:
        return Snapshot(
            id=snapshot_id, run=run, step=step, seq=0, state=ABORTED, write_id=records.new_id(),
            created=time.time(), reason="gc gave this save up as dead",
        )  # fmt: skip
    before = records.record_key(run, step, snapshot_id, revision - 1)
    if _exists(store, session.key) or not _exists(store, before):
        return None
    found = records.decode(store.get(before, limit_bytes=records.MAX_OBJECT_BYTES), Snapshot, before)
    if found.key != before:
        raise IntegrityError(f"{before}: holds the record of {found.key}; it was moved or altered")
    return found.revised()


def _fence_dead(store: ObjectStore, fence_after_s: float, result: GcResult) -> None:
    """Tidy up sessions of the dead when there is nothing to sweep."""
    for info in list(store.list("sessions/")):
        _ended(store, info.key.split("/")[1], fence_after_s, result)


def _forget_done(store: ObjectStore, index: Index, keep: int = 10) -> None:
    """Notes of finished gcs are for people; the last few do. Nobody needs a wait list without its mark, nor what is
    said of a snapshot that never comes back.
    """
    infos = list(store.list("gc/"))
    done = sorted((i for i in infos if i.key.endswith(".done")), key=lambda i: (i.modified_s, i.key))
    store.delete([info.key for info in done[:-keep]])
    for key in (info.key for info in infos):
        if key.endswith(".wait") and not _exists(store, key.removesuffix(".wait") + ".mark"):
            store.delete([key])
    if lost := records.lost(info.key for info in infos):
        swept = {s.id for s in index.refresh().snapshots(states=(SWEPT,))}
        store.delete([Lost(id=name, found=0, reason="").key for name in sorted(lost & swept)])


def revise(store: ObjectStore, index: Index, snapshot: Snapshot, **changes: object) -> Snapshot:
    """Create the next revision of a record.

    Raises:
        ConflictError: somebody else created it; read again and decide again.
    """
    revision = snapshot.revised(**changes)
    try:
        _put(store, revision.key, records.encode(revision))
    except AlreadyExistsError as error:
        found = records.decode(store.get(revision.key), Snapshot, revision.key)
        if found.write_id != revision.write_id:
            raise ConflictError(f"{snapshot.ref}: another process revised it first; try again") from error
    index.add(revision)
    return revision


def forget(store: ObjectStore, index: Index, chosen: Sequence[Snapshot], *, policy: str, reason: str) -> list[Snapshot]:
    """Forget snapshots; those that were tagged or revised away meanwhile are left alone.

    Returns:
        The new revisions.
    """
    threads = Threads(min(FORGET_THREADS, max(1, len(chosen))))
    try:
        done = threads.start(lambda s: _forget_one(store, index, s, policy, reason), chosen)()
    finally:
        threads.close()
    return [snapshot for snapshot in done if snapshot is not None]


def _forget_one(store: ObjectStore, index: Index, snapshot: Snapshot, policy: str, reason: str) -> Snapshot | None:
    current: Snapshot | None = snapshot
    while current is not None and current.state == COMMITTED and not current.tags:
        try:
            return revise(store, index, current, state=FORGOTTEN, policy=policy, reason=reason)
        except ConflictError:
            current = index.refresh().get(snapshot.id)
    return None
