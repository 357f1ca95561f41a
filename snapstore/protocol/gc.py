"""gc: delete what no committed snapshot needs: mark, wait, sweep.

    mark    (1) LIST packs and manifests  (2) LIST records, read manifest headers: live = all that ruling committed
            records need; candidates = 1 minus 2, each explained by a record or a session (orphans.py)
            (3) PUT gc/<id>.mark  (4) only then LIST sessions, PUT .wait
    sweep   every session of .wait has ended or is fenced (liveness.py); 1 and 2 again from scratch; `swept` revisions
            for forgotten records that lose bytes; look for the mark again, stop if it is gone; delete; remove mark,
            wait; PUT .done

Why this order (the models that explore it are described in docs/design/protocol.md): a save that began before the
listing of sessions is waited for; one that began after it has seen the mark, and will not build on its candidates. A
gc that finds another's mark completes it, dead or alive; looking for the mark after recomputing keeps the two apart.
Nothing here trusts a clock, except to give up a session of another host. And nothing is deleted because of one answer:
records, sessions and notes are listed twice, headers are proven by the records' digests, revisions are read back.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ..catalog.history import PUT_BACK, View
from ..catalog.needed_keys import all_needed_keys
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
from ..format.keys import lost_names
from ..format.records import FORGOTTEN, SWEPT, Done, Lost, Mark, Snapshot, Wait
from ..storage.base import ObjectStore
from ..text import counted, some, strip_hint
from . import liveness, revisions
from . import unexplained as orphans
from .marks import MARK_LIMIT_BYTES, is_mark, read_mark
from .quarantine import _exists, in_quarantine

log = logging.getLogger("snapstore")
DEFAULT_FENCE_AFTER_S = 3600.0
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
    context: Context, *, dry_run: bool = False, fence_after_s: float = DEFAULT_FENCE_AFTER_S,
    unexplained: bool = False,
) -> GcResult:  # fmt: skip
    """Delete every pack and manifest that no committed snapshot needs.

    Args:
        fence_after_s: a session of another host whose heartbeat is older is given up as dead [s].
        unexplained: delete also objects that no record explains (orphans.py).

    Raises:
        IntegrityError: a manifest is unreadable, a live object is missing, the listing lacks known records, or no
            record explains an object; nothing was deleted.
        StorageError: a listing failed; nothing was deleted.
    """
    gc = _Gc(context, fence_after_s, unexplained, GcResult(dry_run=dry_run))
    if dry_run:
        gc.look()
    else:
        gc.run()
    return gc.result


@dataclass(slots=True)
class _Gc:
    """One run."""

    context: Context
    fence_after_s: float
    unexplained: bool
    result: GcResult

    @property
    def store(self) -> ObjectStore:
        return self.context.store

    def look(self) -> None:
        """What a gc would do."""
        result = self.result
        _, candidates, sizes = self._candidates()
        result.deleted_objects, result.deleted_bytes = len(candidates), sum(sizes[key] for key in candidates)
        result.stored_bytes = sum(sizes.values()) - result.deleted_bytes
        sessions = liveness.there(self.store) if candidates else []
        result.waiting_for = [s for s in sessions if not liveness.dead(self.store, s, self.fence_after_s)[0]]

    def run(self) -> None:
        """Complete the marks that stand, then mark and sweep."""
        self.store.clean()
        pending: set[str] = set()  # candidates of marks that wait for sessions
        for mark in _standing_marks(self.store):  # of gcs that died, or run beside us
            if not self._sweep(mark):
                pending |= mark.keys()
        mark_now = self._mark(pending)
        if mark_now is not None:
            self._sweep(mark_now)
        else:  # tidy up the sessions of the dead
            self._still_running(liveness.there(self.store))
        _forget_done(self.context)
        self.result.waiting_for = sorted(set(self.result.waiting_for))
        self.result.stored_bytes = sum(_sizes(self.store).values())

    def _still_running(self, sessions: Iterable[str]) -> list[str]:
        """Those that have not ended, by themselves or because they are given up now."""
        ended, fenced = liveness.ended, self.result.fenced
        return [s for s in sessions if not ended(self.store, s, self.fence_after_s, fenced)]

    def _candidates(self) -> tuple[View, set[str], dict[str, int]]:
        """(the records, keys that nothing live needs and something explains, sizes of all): objects are listed first.

        Raises:
            IntegrityError, StorageError: see `collect`.
        """
        before: set[str] = set()
        sessions: list[str] = []
        while True:
            sizes = _sizes(self.store)
            view, live = _live(self.context, sizes)
            unneeded = sizes.keys() - live - in_quarantine(self.store)
            if self.unexplained:
                return view, unneeded, sizes
            left = orphans.unexplained(
                self.context, view, {key: sizes[key] for key in unneeded}, sessions
            )  # fmt: skip
            if not left or before:  # what has come since is young, and left to the next gc
                left -= orphans.damaged(self.store, {key: sizes[key] for key in left & before})
                orphans.refuse({key: sizes[key] for key in left & before})
                return view, unneeded - left, sizes
            # A session explains them; of one that has ended since, the record is there when all is looked at again.
            before, sessions = left, liveness.there(self.store)

    def _mark(self, pending: set[str]) -> Mark | None:
        """Steps 1 to 3; None when there is nothing to delete that no standing mark names."""
        view, candidates, _ = self._candidates()
        candidates -= pending
        if not candidates:
            if not pending:  # a forgotten snapshot whose manifests are all gone has nothing left to delete, and is over
                _write_swept(self.context, view, set())
            return None
        names = {"packs": bytearray(), "manifests": bytearray()}
        for key in sorted(candidates):
            kind, _, name = key.split("/")
            names[kind] += bytes.fromhex(name)
        mark = Mark(
            id=records.new_id(), started=time.time(), packs=bytes(names["packs"]), manifests=bytes(names["manifests"])
        )
        revisions.put(self.store, records.key_of(mark), records.encode(mark))
        return mark

    def _sweep(self, mark: Mark) -> bool:
        """Complete a mark; False when it must wait."""
        store, waited = self.store, _wait_list(self.store, mark).sessions
        left = self._still_running(sorted(set(waited).intersection(liveness.there(store)))) if waited else []
        if left:
            self.result.waiting_for.extend(left)
            return False
        for tries in range(revisions.ATTEMPTS, -1, -1):  # until no un-forget has slipped in between
            view, unneeded, sizes = self._candidates()
            doomed = mark.keys() & unneeded
            revised = _write_swept(self.context, view, doomed)
            if revised is None:
                break
            if not tries:
                raise revisions.hidden(store, revised)
        try:
            store.stat(records.key_of(mark))
        except NotFoundError:
            return True  # another gc has completed this mark; what it left may have come alive since
        store.delete(sorted(doomed))
        deleted_bytes = sum(sizes[key] for key in doomed)
        self.result.deleted_objects += len(doomed)
        self.result.deleted_bytes += deleted_bytes
        store.delete([records.key_of(mark)])
        store.delete([f"gc/{mark.id}.wait"])
        done = Done(id=mark.id, deleted_objects=len(doomed), deleted_bytes=deleted_bytes)
        with suppress(AlreadyExistsError, StorageError):  # two gcs completed it; and a note is not worth a failure
            store.put(records.key_of(done), records.encode(done))
        return True


def _sizes(store: ObjectStore) -> dict[str, int]:
    """Size of every pack and manifest, by key."""
    found = (info for prefix in ("packs/", "manifests/") for info in store.list(prefix))
    return {info.key: info.size_bytes for info in found if OBJECT_NAME.fullmatch(info.key)}


def _standing_marks(store: ObjectStore) -> list[Mark]:
    """Every mark; one that cannot be read, twice, is removed: its gc, if it lives, finds it gone and stops."""
    marks: list[Mark] = []
    for key in filter(is_mark, [info.key for info in store.list("gc/")]):
        for again in (True, False):
            try:
                mark = read_mark(store, key)
                marks += [mark] if mark is not None else []
                break
            except (IntegrityError, FormatError) as error:
                if not again:
                    log.warning("a damaged gc mark is removed: %s", error)
                    store.delete([key])
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
    return strip_hint(why) if key in why else f"{key}: {strip_hint(why)}"


def live_keys(context: Context, view: View, present: Iterable[str]) -> set[str]:
    """Everything that ruling committed records need.

    Raises:
        IntegrityError: what is live cannot be told, or is not all there.
    """
    need_all_records(view, "gc", "nothing was deleted")
    live: set[str] = set()
    for snapshot, keys in all_needed_keys(context.index, view.snapshots()):
        if isinstance(keys, NotFoundError):
            raise IntegrityError(
                f"gc: {snapshot.ref}: {strip_hint(keys)}; nothing was deleted; run 'snapstore check'"
            ) from keys
        if isinstance(keys, SnapstoreError):
            raise keys
        live |= keys
    absent = live.difference(present)
    absent -= in_quarantine(context.store) if absent else set()  # known to be lost, and to whom: no reason to stop
    missing = [key for key in sorted(absent) if not _exists(context.store, key)]
    if missing:
        raise IntegrityError(
            f"gc: {counted(len(missing), 'live object')} missing: {some(missing, 1)}; nothing was deleted; "
            "run 'snapstore check'"
        )
    return live


def _settled_view(context: Context) -> View:
    """The records, on listings that a power cut cannot take back."""
    view = context.index.refresh(surely=True)
    for run in {snapshot.run for snapshot in view.snapshots(states=None)}:
        context.store.sync(f"snapshots/{run}/")
    return view


def _live(context: Context, present: Iterable[str]) -> tuple[View, set[str]]:
    """The records now, and all that they need.

    A snapshot that is forgotten and swept by another gc while we read its manifests is no damage: we look again.
    """
    for left in range(revisions.ATTEMPTS, -1, -1):
        view = _settled_view(context)
        try:
            return view, live_keys(context, view, present)
        except IntegrityError:
            still = {snapshot.key for snapshot in context.index.refresh().snapshots()}
            if not left or still.issuperset(snapshot.key for snapshot in view.snapshots()):
                raise
    raise AssertionError("unreachable")


def _wait_list(store: ObjectStore, mark: Mark) -> Wait:
    """Step 4: the sessions listed after the mark was put; the first such list stands."""
    key = f"gc/{mark.id}.wait"
    wait = Wait(id=mark.id, sessions=liveness.there(store))
    try:
        revisions.put(store, key, records.encode(wait))
    except AlreadyExistsError:
        try:
            return records.decode(store.get(key, limit_bytes=MARK_LIMIT_BYTES), Wait, key)
        except (NotFoundError, IntegrityError, FormatError):  # its gc is done, or it is damaged: ours is as good
            return wait
    except StorageFullError:
        return wait  # any list made behind the mark will do, and deleting makes room
    return wait


def _write_swept(context: Context, view: View, doomed: set[str]) -> Snapshot | None:
    """A `swept` revision for every forgotten record that loses bytes; gives one that was revised under us, if any."""
    for snapshot, keys in all_needed_keys(context.index, view.snapshots(states=(FORGOTTEN,))):
        # A bad sector must not stop every gc: what a repair has dropped was given up by somebody who knew of it.
        if isinstance(keys, StorageError) and not snapshot.reason.startswith(DROPPED):
            raise keys  # it cannot be read, which does not say that it is gone
        # Another error: its manifest is gone, as an earlier sweep died between deleting and here.
        if isinstance(keys, SnapstoreError) or not keys.isdisjoint(doomed):
            try:
                revisions.revise(context, snapshot, state=SWEPT)
            except ConflictError:
                return snapshot
    return None


def _forget_done(context: Context, keep: int = 10) -> None:
    """Notes of finished gcs are for people; the last few do. Nobody needs a wait list without its mark, nor what is
    said of a snapshot that never comes back.
    """
    infos = list(context.store.list("gc/"))
    done = sorted((i for i in infos if i.key.endswith(".done")), key=lambda i: (i.modified_s, i.key))
    context.store.delete([info.key for info in done[:-keep]])
    for key in (info.key for info in infos):
        if key.endswith(".wait") and not _exists(context.store, key.removesuffix(".wait") + ".mark"):
            context.store.delete([key])
    if lost := lost_names(info.key for info in infos):
        swept = {s.id for s in context.index.refresh().snapshots(states=(SWEPT,))}
        context.store.delete([Lost(id=name, found=0, reason="").key for name in sorted(lost & swept)])
