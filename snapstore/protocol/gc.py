"""gc: delete the packs and manifests that no committed snapshot needs: mark, wait, sweep.

    mark    (1) LIST packs and manifests  (2) LIST records, read manifest headers: live = all that ruling committed
            records need; candidates = 1 minus 2, each explained by a record or a session (unexplained_objects.py)
            (3) PUT gc/<id>.mark  (4) only then LIST sessions, PUT .wait
    sweep   every session of .wait has ended or is fenced (liveness.py); 1 and 2 again from scratch; `swept` revisions
            for forgotten records that lose bytes; look for the mark again, stop if it is gone; delete; remove mark,
            wait; PUT .done

Why this order (docs/design/protocol.md describes the models that explore it): gc waits for a save that began before
the listing of sessions. A save that began after this listing has seen the mark, and does not build on its candidates. A
gc that finds the mark of another gc completes it, whether that gc is dead or alive. Two gcs of one mark do no harm,
because each looks for the mark after it has computed `live` again. No step trusts a clock, except to fence a session of
another host. No single answer deletes anything: the sweep lists records twice, sessions and notes are listed twice,
manifest headers are checked against the digests in the records, and revisions are read back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from ..catalog.history import View, is_dropped
from ..catalog.needed_keys import all_needed_keys
from ..catalog.read_twice import exists
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
from ..format.keys import notes_of_gc
from ..format.records import FORGOTTEN, SWEPT, Done, Mark, Snapshot, Wait
from ..storage import progress
from ..storage.base import ObjectInfo, ObjectStore
from ..text import brief, counted, log, some, strip_hint
from ..threads import Threads
from . import joining
from .liveness import examine, fence_if_dead, listed_sessions
from .notes import MARK_LIMIT_BYTES, in_quarantine, remove_notes_of_swept, standing_marks
from .revisions import at_once, hidden_revision, put, put_revision, retry_conflicts, void
from .unexplained_objects import find_damaged, find_unexplained, require_explained

DEFAULT_FENCE_AFTER_S = 3600.0
#: With FEW_OBJECTS packs or manifests, or more, they are listed in parallel, by the first two digits of their names.
FEW_OBJECTS, LISTINGS_AT_ONCE = 8000, 16
#: Between so many deletes, a gc asks whether to stop.
DELETED_AT_ONCE = 1000
#: Objects of other names were put by another program, and are left alone.
OBJECT_NAME = re.compile(r"(?:packs|manifests)/[0-9a-f]{2}/[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a repository: its packs and manifests, and after them its records.

    Attributes:
        sizes: of every pack and manifest, by key [bytes].
        view: all records.
    """

    sizes: dict[str, int]
    view: View

    @staticmethod
    def at(context: Context) -> Look:
        """List packs and manifests, then records.

        Raises:
            StorageError: a listing failed.
        """
        return Look(_sizes(context.store), context.index.refresh())

    def with_revisions(self, made: Iterable[Snapshot]) -> Look:
        """Return this look with revisions that this process has made since."""
        return Look(self.sizes, self.view.with_revisions(made))


@dataclass(slots=True)
class GcResult:
    """The outcome of a gc, or the expected one of a dry run.

    Attributes:
        deleted_objects, deleted_bytes: packs and manifests deleted.
        stored_bytes: packs and manifests left, as far as this gc has listed them [bytes].
        waiting_for: ids of sessions of live saves, and of damaged sessions. The objects that wait for them were not
            deleted; a later gc deletes them.
        fenced: ids of sessions of dead saves, which can no longer commit.
        left: how many forgotten snapshots keep bytes until the next gc, because this one had a bound.
    """

    deleted_objects: int = 0
    deleted_bytes: int = 0
    stored_bytes: int = 0
    waiting_for: list[str] = field(default_factory=list)
    fenced: list[str] = field(default_factory=list)
    left: int = 0
    dry_run: bool = False

    __repr__ = brief


def collect(
    context: Context,
    *,
    dry_run: bool = False,
    fence_after_s: float = DEFAULT_FENCE_AFTER_S,
    unexplained: bool = False,
    stops: Callable[[], bool] = lambda: False,
    look: Look | None = None,
    most: int | None = None,
) -> GcResult:
    """Delete every pack and manifest that no committed snapshot needs.

    Args:
        fence_after_s: a session of another host whose heartbeat is older counts as dead [s].
        unexplained: delete also objects that no record explains (unexplained_objects.py).
        stops: whether to stop; it is asked between the steps. The next gc goes on.
        look: for the mark; None: look now. The sweep always looks again.
        most: let at most so many forgotten snapshots lose bytes, the oldest first; None: all.

    Raises:
        IntegrityError: a manifest is unreadable, a live object is missing, the listing lacks known records, or no
            record explains an object; nothing was deleted.
        StorageError: a listing failed; nothing was deleted.
        SnapstoreError: it was told to stop.
    """
    gc = _Gc(context, fence_after_s, unexplained, GcResult(dry_run=dry_run), stops, look, most)
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
    stops: Callable[[], bool]
    first: Look | None
    most: int | None
    _losing: int = 0  # the snapshots that the last sweep has swept

    @property
    def store(self) -> ObjectStore:
        """Return the store; raise SnapstoreError if this gc is to stop: it can at each of its steps."""
        self._may_go_on()
        return self.context.store

    def _may_go_on(self) -> bool:
        if self.stops():
            raise SnapstoreError("gc was stopped; the next one goes on")
        return True

    def look(self) -> None:
        """Set `result` to what a gc would do."""
        result = self.result
        _, candidates, sizes = self._candidates(list_twice=True)
        result.deleted_objects, result.deleted_bytes = len(candidates), sum(sizes[key] for key in candidates)
        result.stored_bytes -= result.deleted_bytes
        result.waiting_for = running_sessions(self.store, self.fence_after_s) if candidates else []

    def run(self) -> None:
        """Complete the marks that stand, then mark and sweep."""
        self.store.clean()
        pending: set[str] = set()  # candidates of marks that wait for sessions
        for mark in standing_marks(self.store):  # of gcs that died, or run beside this one
            self.first = None  # its sweep may delete what that look has listed
            if not self._sweep(mark):
                pending |= mark.keys()
        mark_now = self._mark(pending)
        if mark_now is not None:
            self._sweep(mark_now)
        else:  # end the sessions of dead processes
            self._still_running(listed_sessions(self.store))
        _remove_old_notes(self.context)
        if self.most is None:  # else the upkeep of a save does it
            self._join()
        self.result.waiting_for = sorted(set(self.result.waiting_for))

    def _join(self) -> None:
        """Join the loose records of all runs; what fails costs only time."""
        index = self.context.index
        for run in index.refresh().runs(states=None) if index.pages.exist else ():
            if index.loose(run, void_too=True) > joining.AT_LEAST and self._may_go_on():
                try:
                    joining.join(self.context, run, stops=self.stops)
                except SnapstoreError as error:
                    log.warning("run=%s %s: %s", run, joining.STAY_LOOSE, error)

    def _still_running(self, sessions: Iterable[str]) -> list[str]:
        """Fence the dead ones of some sessions; return the ids of the sessions that still run."""
        context, after_s, fenced = self.context, self.fence_after_s, self.result.fenced
        return [s for s in sessions if self._may_go_on() and not fence_if_dead(context, s, after_s, fenced)]

    def _candidates(self, *, list_twice: bool) -> tuple[View, set[str], dict[str, int]]:
        """Return (the records, the keys that nothing live needs and something explains, the sizes of all objects).

        Objects are listed before records.

        Args:
            list_twice: list the records twice, as before each deletion; else only if one listing lacks some.

        Raises:
            IntegrityError, StorageError: see `collect`.
        """
        before: set[str] = set()
        sessions: list[str] = []
        while True:
            look, self.first = (None, self.first) if list_twice or before else (self.first, None)
            sizes = look.sizes if look is not None else _sizes(self.store)
            self.result.stored_bytes = sum(sizes.values())
            seen = look.view if look is not None else None
            view, live = _live(self.context, sizes, seen, list_twice=list_twice or bool(before))
            unneeded = sizes.keys() - live - in_quarantine(self.store)
            if self.unexplained:
                return view, unneeded, sizes
            left = find_unexplained(self.context, view, {key: sizes[key] for key in unneeded}, sessions)
            if not left or before:  # objects put since the first look are left to the next gc
                left -= find_damaged(self.store, {key: sizes[key] for key in left & before})
                require_explained({key: sizes[key] for key in left & before})
                return view, unneeded - left, sizes
            # A session may explain them. If it has ended since, the next look finds its record.
            before, sessions = left, listed_sessions(self.store)

    def _mark(self, pending: set[str]) -> Mark | None:
        """Do steps 1 to 3; return None if there is nothing to delete that no standing mark names."""
        view, candidates, _ = self._candidates(list_twice=False)  # the sweep looks again before it deletes
        candidates = self._bounded(view, candidates - pending)
        if not candidates:
            if not pending:  # a forgotten snapshot whose manifests are all gone has nothing left to delete
                with suppress(ConflictError):
                    _write_swept(self.context, view, set())
            return None
        names = {"packs": bytearray(), "manifests": bytearray()}
        for key in sorted(candidates):
            kind, _, name = key.split("/")
            names[kind] += bytes.fromhex(name)
        mark = Mark(
            id=records.new_id(), started=time.time(), packs=bytes(names["packs"]), manifests=bytes(names["manifests"])
        )
        put(self.store, records.key_of(mark), records.encode(mark))
        return mark

    def _bounded(self, view: View, doomed: set[str]) -> set[str]:
        """Return the keys that may be deleted now, so that at most `most` forgotten snapshots lose bytes."""
        if self.most is None:
            return doomed
        if not self.most:  # the sweeps of earlier marks have used it up
            self.result.left = max(self.result.left, len(doomed) and 1)
            return set()
        later, losing = set[str](), 0
        for _, keys in all_needed_keys(self.context.index, view.snapshots(states=(FORGOTTEN,))):
            if isinstance(keys, set) and not keys.isdisjoint(doomed):
                losing += 1
                if losing > self.most:
                    later |= keys
        self.result.left = max(self.result.left, losing - self.most)
        return (doomed - later) or doomed  # else snapshots of equal content would stay for ever

    def _sweep(self, mark: Mark) -> bool:
        """Complete a mark; return False if it must wait, or if the bound has left something of it.

        Then the mark stays: another gc may be deleting what was left, and no save builds on that while the mark stands.
        """
        store, waited = self.context.store, _wait_list(self.store, mark).sessions
        left = self._still_running(sorted(set(waited).intersection(listed_sessions(store)))) if waited else []
        if left:
            self.result.waiting_for.extend(left)
            return False

        def decide() -> tuple[set[str], dict[str, int], bool]:  # called again if an unforget revised a record first
            view, unneeded, sizes = self._candidates(list_twice=True)
            doomed = self._bounded(view, of_mark := mark.keys() & unneeded)
            self._losing = _write_swept(self.context, view, doomed)
            return doomed, sizes, doomed == of_mark

        doomed, sizes, is_whole = retry_conflicts(decide, lambda error: hidden_revision(store, error))
        try:
            store.stat(records.key_of(mark))
        except NotFoundError:
            return True  # another gc has completed this mark; the objects that it kept may be live by now
        keys = sorted(doomed)
        batches = [keys[first : first + DELETED_AT_ONCE] for first in range(0, len(keys), DELETED_AT_ONCE)]
        for batch in progress.through(batches, lambda batch: sum(sizes[key] for key in batch)):
            self.store.delete(batch)
            self.context.index.drop_headers(batch)
        deleted_bytes = sum(sizes[key] for key in doomed)
        self.result.deleted_objects += len(doomed)
        self.result.deleted_bytes += deleted_bytes
        self.result.stored_bytes -= deleted_bytes
        if self.most is not None:
            self.most = max(0, self.most - self._losing)
        if not is_whole:
            return False
        store.delete([records.key_of(mark)])
        store.delete([f"gc/{mark.id}.wait"])
        done = Done(id=mark.id, deleted_objects=len(doomed), deleted_bytes=deleted_bytes)
        with suppress(AlreadyExistsError, StorageError):  # another gc has put it; or it is not worth a failure
            store.put(records.key_of(done), records.encode(done))
        return True


def _sizes(store: ObjectStore) -> dict[str, int]:
    """Return the size of every pack and manifest, by key."""
    found: dict[str, int] = {}
    for kind in ("packs/", "manifests/"):
        first = list(islice(store.list(kind), FEW_OBJECTS))
        if len(first) < FEW_OBJECTS:
            found |= _object_sizes(first)
            continue
        with Threads(LISTINGS_AT_ONCE) as threads:  # one listing gives its pages only one after the other
            prefixes = [f"{kind}{number:02x}/" for number in range(256)]
            for sizes in threads.start(lambda prefix: _object_sizes(store.list(prefix)), prefixes)():
                found |= sizes
    return found


def _object_sizes(infos: Iterable[ObjectInfo]) -> dict[str, int]:
    return {info.key: info.size_bytes for info in infos if OBJECT_NAME.fullmatch(info.key)}


def _live_keys(context: Context, view: View, present: Iterable[str]) -> set[str]:
    """Return the keys of all that ruling committed records need.

    Raises:
        IntegrityError: a record or a manifest is damaged or missing, or a live object is missing.
        StorageError: a record or a manifest cannot be read.
    """
    view.require_all_records("gc", "nothing was deleted")
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
    absent -= in_quarantine(context.store) if absent else set()  # a repair has reported their loss: do not stop
    # Objects of a save that committed after our listing exist, although the listing lacks them.
    missing = [key for key in sorted(absent) if not exists(context.store, key)]
    if missing:
        raise IntegrityError(
            f"gc: {counted(len(missing), 'live object')} missing: {some(missing, 1)}; nothing was deleted; run "
            "'snapstore check'; a lost snapshot stops every gc until 'snapstore repair --drop' gives it up"
        )
    return live


def _live(context: Context, present: Iterable[str], seen: View | None, *, list_twice: bool) -> tuple[View, set[str]]:
    """Return (the records, the keys of all that the committed ones need); see `_Gc._candidates`.

    Args:
        seen: the records as they were listed; None: list them now.
    """

    def look() -> tuple[View, set[str]]:
        nonlocal seen
        view, seen = seen or context.index.refresh(list_twice=list_twice), None
        if view.vanished and not list_twice:
            view = context.index.refresh(list_twice=True)
        for run in view.runs(states=None):
            context.store.sync(f"snapshots/{run}/")  # a power cut must not take back what the listings show
        try:
            return view, _live_keys(context, view, present)
        except IntegrityError as error:
            still = {snapshot.key for snapshot in context.index.refresh().snapshots()}
            if still.issuperset(snapshot.key for snapshot in view.snapshots()):
                raise
            # Another gc has swept a snapshot while we read its manifests: that is no damage.
            raise ConflictError(str(error)) from error

    return retry_conflicts(look, lambda error: IntegrityError(str(error)))


def running_sessions(store: ObjectStore, fence_after_s: float = DEFAULT_FENCE_AFTER_S) -> list[str]:
    """Return the ids of the sessions that a gc waits for: what they have put may belong to a save that runs."""
    return [found for found in listed_sessions(store) if not examine(store, found, fence_after_s)[0]]


def _wait_list(store: ObjectStore, mark: Mark) -> Wait:
    """Do step 4: return the sessions listed after the mark was put; if several gcs list them, the first list counts."""
    key = f"gc/{mark.id}.wait"
    wait = Wait(id=mark.id, sessions=listed_sessions(store))
    try:
        put(store, key, records.encode(wait))
    except AlreadyExistsError:
        try:
            return records.decode(store.get(key, limit_bytes=MARK_LIMIT_BYTES), Wait, key)
        except (NotFoundError, IntegrityError, FormatError):  # its gc has ended, or it is damaged: use ours
            return wait
    except StorageFullError:
        return wait  # any list made after the mark is valid, and deleting makes room
    return wait


def _write_swept(context: Context, view: View, doomed: set[str]) -> int:
    """Create a `swept` revision for every forgotten record that loses bytes; return of how many.

    Raises:
        ConflictError: another process has revised a record first; others may be swept.
    """
    losing: list[Snapshot] = []
    for snapshot, keys in all_needed_keys(context.index, view.snapshots(states=(FORGOTTEN,))):
        # A bad sector must not stop every gc: a snapshot that a repair has dropped may be deleted unread.
        if isinstance(keys, StorageError) and not is_dropped(snapshot):
            raise keys  # it cannot be read, which does not say that it is gone
        # Another error: its manifest is gone, because an earlier sweep died before it wrote this revision.
        if isinstance(keys, SnapstoreError) or not keys.isdisjoint(doomed):
            losing.append(snapshot)
    swept = at_once(lambda snapshot: put_revision(context, snapshot, state=SWEPT), losing)
    if lost := void(context, swept):
        raise ConflictError(f"{lost[0].ref}: another process revised it first; nothing was deleted; try again")
    return len(losing)


def _remove_old_notes(context: Context, keep: int = 10) -> None:
    """Delete notes of finished gcs except the last `keep`, wait lists without a mark, and notes of swept snapshots."""
    infos = list(context.store.list("gc/"))
    keys = {info.key: info.modified_s for info in infos}
    done = sorted(notes_of_gc(keys, "done"), key=lambda key: (keys[key], key))
    context.store.delete(done[:-keep])
    for key in notes_of_gc(keys, "wait"):
        if not exists(context.store, key.removesuffix(".wait") + ".mark"):
            context.store.delete([key])
    remove_notes_of_swept(context, keys)
