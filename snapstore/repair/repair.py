"""repair: make the best of damage: what is lost is named, what is stored elsewhere is used, and nothing gets worse.

In: what a Survey finds. Out: a report; with `apply`, in this order, each step whole by itself:

    records      those that vanished come back from the index, where that costs nothing (`Survey.stands`); the next
                 revision of one that cannot be read: from the index, the one before, or the manifests
    notes        damaged sessions that nobody keeps alive, and damaged notes of gcs, are removed
    quarantine   PUT gc/<sha256>.quarantine for every damaged pack that somebody needs: from now on no save builds on
                 it, and no gc deletes it. Not a byte of it moves. PUT gc/<id>.lost for every snapshot that lacks a
                 manifest: from now on no policy counts it
    heal         snapshots that need such a pack (heal.py), as the next revision of their records
    drop         only if asked for: what stays damaged is forgotten
    purge        only if asked for: packs in quarantine that nobody needs are left to gc
    index        is built anew, unless the store is older: then it alone knows what vanished, and keeps gc from it

A crash anywhere leaves less to do for the next repair.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ..catalog.history import View
from ..catalog.needed_keys import all_needed_keys
from ..catalog.read_twice import listed
from ..check.recoverable import Salvage, is_foreign
from ..check.report import ACCEPT, COPY, GC, REBUILD, REPAIR, REPAIR_CHUNKS, UNREADABLE, CheckResult, stand_in
from ..check.scan import Survey
from ..context import Context
from ..errors import (
    DAMAGE,
    AlreadyExistsError,
    CapabilityError,
    ConflictError,
    NotFoundError,
    SnapstoreError,
    StorageError,
)
from ..format import records
from ..format.keys import lost_names, parse_record_key, quarantined_names
from ..format.records import ABORTED, COMMITTED, FORGOTTEN, Config, Lost, Quarantine, Snapshot
from ..protocol import gc, liveness, revisions
from ..text import without_advice
from .snapshots import Healer

log = logging.getLogger("snapstore")
_STATES = (COMMITTED, FORGOTTEN)
#: Of the record that stands for a session whose own nobody knows. It sorts before all runs: it hides no record.
UNKNOWN_RUN = "0-damaged-session"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing done, or of a dry run: that would be.

    Attributes:
        kind: "config", "record", "remove", "quarantine", "release", "heal", "drop", "purge" or "index".
        key: the object that it is about.
    """

    kind: str
    key: str
    message: str


@dataclass(slots=True)
class RepairReport:
    """What a repair did, or would do.

    Attributes:
        found: what was wrong before.
        applied: whether anything was done.
        actions: in their order.
        healed: snapshots that are whole again.
        lost: (snapshot, what is lost) of those that stay damaged, dropped ones included; where the record cannot be
            read, a stand-in of state "unreadable".
        dropped: those of them that were forgotten.
        helps: what brings a snapshot back that stays damaged, by its id; of none that is forgotten or dropped.
        open: what could not be done now, and why.
    """

    found: CheckResult
    applied: bool
    actions: list[Action] = field(default_factory=list)
    healed: list[Snapshot] = field(default_factory=list)
    lost: list[tuple[Snapshot, str]] = field(default_factory=list)
    dropped: list[Snapshot] = field(default_factory=list)
    helps: dict[str, str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)

    @property
    def left(self) -> list[Snapshot]:
        """Snapshots that stay damaged; those that are forgotten only wait for a gc."""
        dropped = {snapshot.id for snapshot in self.dropped}
        return [s for s, _ in self.lost if s.state != FORGOTTEN and s.id not in dropped]

    @property
    def ok(self) -> bool:
        """Whether nothing stays damaged, and nothing was left open."""
        return not self.left and not self.open


def repair(
    context: Context, *, level: str, apply: bool, drop: bool, purge: bool,
    fence_after_s: float = gc.DEFAULT_FENCE_AFTER_S,
) -> RepairReport:  # fmt: skip
    """Look at everything up to a level of `check`, and mend what can be mended.

    Args:
        drop: forget what stays damaged, unless it is tagged.
        purge: let gc delete the packs in quarantine that nobody needs.
        fence_after_s: a damaged session that was silent for so long is removed [s].

    Raises:
        StorageError: the store failed; what was done is whole.
    """
    survey = Survey(context, level)
    report = RepairReport(survey.result, apply)
    one = _Repair(context, survey, report, fence_after_s)
    one.run(drop=drop, purge=purge)
    return report


class _Repair:
    """One run."""

    def __init__(self, context: Context, survey: Survey, report: RepairReport, fence_after_s: float) -> None:
        self._context = context
        self._store, self._index, self._survey, self._report = context.store, context.index, survey, report
        self._fence_after_s = fence_after_s
        self._mended: set[str] = set()  # ids of the snapshots that a step has made whole, as far as it could
        self._unwritten_notes: set[str] = set()  # damaged ones of quarantine, which this level cannot write
        self._salvage = Salvage(context, survey)
        self._older: set[str] = set()  # ids of snapshots whose record is older than the index, and stands (`stands`)

    def run(self, *, drop: bool, purge: bool) -> None:
        """Everything, in the order of this module's first lines."""
        if self._context.config_problem:
            config = self._context.config
            message = f"config: written anew, chunks of {config.chunk_bytes} bytes, digest seed as in the manifests"
            self._do("config", "config", message, partial(self._replace, "config", config))
        self._survey.read_records()
        self._records(drop)
        self._survey.read_rest()
        self._small_objects()
        self._quarantine()
        self._heal()
        if drop:
            self._drop()
        if purge:
            self._purge()
        self._left_to_others()
        self._say_what_helps()
        if not self._older:
            self._do("index", "index", "the index is built anew from the objects", self._index.rebuild)

    def _left_to_others(self) -> None:
        """What `check` will go on reporting, since another command or a person has to mend it."""
        let_out = {action.key for action in self._report.actions if action.kind in ("purge", "release")}
        for key in sorted(self._unwritten_notes - let_out):
            self._report.open.append(f"{key}: is damaged; run '{REPAIR_CHUNKS} --apply'")
        for problem in self._report.found.problems:
            waits = problem.command == GC and problem.snapshots  # what is forgotten is left to gc, and nothing is open
            if not problem.command.startswith((REBUILD, REPAIR)) and not waits:
                self._report.open.append(problem.message + f"; run '{problem.command}'" * bool(problem.command))

    def _say_what_helps(self) -> None:
        survey = self._survey
        for snapshot in self._report.left:
            packs = {key for key, names in survey.need.items() if snapshot.id in names}
            if snapshot.id in survey.without_manifest or snapshot.state == UNREADABLE:
                helps = f"{COPY} and nothing else"
            elif not packs:
                continue  # its own message says what to do
            elif packs & survey.packs.why.keys():
                helps = f"a save of the same content, or a copy of the pack put back, then '{REPAIR} --apply'"
            else:  # its bytes are as they were written
                helps = f"a save of the same content, then '{REPAIR} --apply'"
            self._report.helps[snapshot.id] = helps

    def _do(self, kind: str, key: str, message: str, effect: Callable[[], object]) -> bool:
        """Do it, if anything is to be done at all; whether nobody was in the way."""
        if self._report.applied:
            try:
                effect()
            except (ConflictError, AlreadyExistsError) as error:
                self._report.open.append(f"{message}: another process was first, repair again: {without_advice(error)}")
                return False
            log.info("repair: %s", message)
        self._report.actions.append(Action(kind, key, message))
        return True

    def _replace(self, key: str, value: Config) -> None:
        """Put a damaged config anew: no two processes decide anything by it.

        Raises:
            ConflictError: it is good by now: another repair was first, or reading it had failed for a moment.
        """
        found: Config | None = None
        with suppress(*DAMAGE, StorageError):
            found = records.decode(self._store.get(key), Config, key)
        if found is not None and not is_foreign(self._store, found):
            raise ConflictError(f"{key}: can be read")
        self._store.delete([key])
        self._store.put(key, records.encode(value))

    # -- records

    def _records(self, drop: bool) -> None:
        """Records that vanished, and the next revision of every one that cannot be read, from what is known."""
        survey = self._survey
        for gone in survey.later():
            if survey.stands(gone):
                self._older.add(gone.id)
                self._report.open.append(
                    f"{gone.ref}: stays as the store shows it; the index knows revision {gone.revision}, {gone.state}: "
                    f"it seems that an older backup was put back; '{ACCEPT}' accepts it as it is"
                )
                continue
            message = f"{gone.ref}: its record is put back from the index"
            if self._do("record", gone.key, message, partial(self._put, gone)):
                survey.ruling[gone.id] = gone
                survey.unreadable = {k: why for k, why in survey.unreadable.items() if stand_in(k).id != gone.id}
                self._mended.add(gone.id)
        for key, why in list(survey.unreadable.items()):
            if self._reads_by_now(key):
                continue
            found = self._salvage.record_for(key)
            if found is not None:
                record, whence = found
                if self._do("record", record.key, f"{record.ref}: {whence}", partial(self._put, record)):
                    survey.ruling[record.id] = record
                    del survey.unreadable[key]
                    self._mended.add(record.id)
            elif drop:
                lost = stand_in(key)
                reason = f"dropped by a repair: {why}"[:500]
                record = msgspec.structs.replace(lost, state=ABORTED).revised(reason=reason)
                message = f"{lost.ref}: is given up, nothing tells what it held: {why}"
                if self._do("drop", record.key, message, partial(self._put, record)):
                    self._report.dropped.append(lost)

    def _reads_by_now(self, key: str) -> bool:
        """Whether a record that could not be read a moment ago can be: no guess takes its place then."""
        with suppress(*DAMAGE, StorageError):
            found = records.decode(self._store.get(key), Snapshot, key)
            if found.key == key:
                self._survey.ruling[found.id] = found
                del self._survey.unreadable[key]
                self._mended.add(found.id)
                self._report.open.append(f"{key}: could not be read a moment ago, and can be now; check the disk")
                return True
        return False

    def _put(self, record: Snapshot) -> None:
        """Create a record; one that is there already must be this one."""
        if revisions.create(self._store, record).write_id != record.write_id:
            raise ConflictError(f"{record.key}: another process has created it")
        self._index.add(record)

    # -- small objects, quarantine

    def _small_objects(self) -> None:
        """Damaged sessions that nobody keeps alive, and damaged notes of gcs: those begin anew without them."""
        for key in sorted(self._survey.small, key=lambda key: (not key.endswith(".mark"), key)):
            if quarantined_names([key]):
                if self._report.found.level != "restore":  # its name keeps the pack in quarantine; which blobs it
                    self._unwritten_notes.add(key)  # gave up only rebuilding tells
                continue
            try:
                silent_s = self._store.now_s() - self._store.stat(key).modified_s
            except NotFoundError:
                continue
            until = ""
            if key.startswith("sessions/"):
                if self._store.is_held(key):
                    until = "the process that has it open on this host has ended"
                elif silent_s < self._fence_after_s:
                    until = f"it was silent for {self._fence_after_s:.0f} s"
            if until:
                self._report.open.append(f"{key}: is damaged, and its save may be running; repair again once {until}")
                continue
            effect = self._end_session if key.startswith("sessions/") else lambda key: self._store.delete([key])
            self._do("remove", key, f"{key}: is damaged and removed", partial(effect, key))

    def _end_session(self, key: str) -> None:
        """Remove a damaged session. A record that never was explains what it has put, since nobody knows its own.

        Raises:
            ConflictError: it can be read: one wrong answer must not take the session of a save that runs.
        """
        with suppress(*DAMAGE, NotFoundError):
            records.decode(self._store.get(key, limit_bytes=records.MAX_OBJECT_BYTES), records.Session, key)
            raise ConflictError(f"{key}: can be read")
        name = key.removeprefix("sessions/")
        if re.fullmatch(r"[0-9a-f]{32}", name) and self._index.refresh().get(name) is None:
            record = liveness.aborted(UNKNOWN_RUN, 0, name, "a repair has removed its damaged session")
            revisions.create(self._store, record)
        self._store.delete([key])

    def _note(self, key: str, why: str) -> Quarantine:
        blobs = sorted(self._survey.packs.misbuilt.get(key, ()))  # not those that are altered: a copy may mend them
        return Quarantine(pack=key.rpartition("/")[2], found=time.time(), reason=why[:500], blobs=blobs)

    def _quarantine(self) -> None:
        """Tell saves and gcs of the packs that are damaged, and of those that no longer are."""
        survey = self._survey
        fresh = sorted(survey.need.keys() - survey.quarantined)
        for key in fresh:
            note = self._note(key, survey.packs.why.get(key, "a blob does not give its chunk"))
            message = f"{key}: goes into quarantine: no save builds on it, no gc deletes it"
            self._do("quarantine", note.key, message, partial(self._put_note, note))
        damaged = quarantined_names(survey.small) if self._report.found.level == "restore" else set()
        for key in sorted(survey.quarantined - survey.recovered):
            if key in damaged or not survey.packs.misbuilt.get(key, set()) <= survey.noted.get(key, set()):
                note = self._note(key, survey.packs.why.get(key, "a blob does not give its chunk"))
                message = f"{key}: its note is written anew; blobs that do not give their chunks: {len(note.blobs)}"
                self._do("quarantine", note.key, message, partial(self._renew, key, note))
        running = [info.key for info in self._store.list("sessions/")] if fresh else []
        if running:
            self._report.open.append(
                f"saves that run and may have built on what is damaged: {len(running)}; repair again once they end "
                f"('{GC}' gives up those that died)"
            )
        for key in sorted(survey.recovered):
            self._let_out("release", key, f"{key}: leaves the quarantine: {survey.recovery(key)}")
        lacking = {name: why for name, why in survey.without_manifest.items() if survey.ruling[name].state in _STATES}
        for name in sorted(lacking.keys() - (survey.lost - lost_names(survey.small))):
            lost = Lost(id=name, found=time.time(), reason=lacking[name][:500])
            message = f"{survey.ruling[name].ref}: no policy counts it, since it lacks a manifest"
            self._do("quarantine", lost.key, message, partial(self._put_note, lost))
        for name in sorted(survey.found_again):
            found = Lost(id=name, found=0, reason="").key
            message = f"{survey.ruling[name].ref}: lacks no manifest any more, or is collected: policies may count it"
            self._do("release", found, message, partial(self._store.delete, [found]))

    def _put_note(self, note: Quarantine | Lost) -> None:
        with suppress(AlreadyExistsError):  # another repair has found the same
            self._store.put(note.key, records.encode(note))
        if note.key not in listed(self._store, "gc/"):  # else saves would build on the pack, or policies count it
            raise StorageError(f"{note.key} in {self._store.url}: was put and is not listed; repair again")

    def _renew(self, key: str, note: Quarantine) -> None:
        """Put a note beside those of its pack, and only then remove the ones that say no more.

        A pack without any, were it for a moment, would be built upon by a save that begins then, and deleted by a gc.
        """
        note = msgspec.structs.replace(note, id=records.new_id())
        self._put_note(note)
        for old in self._survey.notes:
            if quarantined_names([old]) == {key}:
                with suppress(*DAMAGE, StorageError):  # a damaged one says nothing
                    if not set(records.decode(self._store.get(old), Quarantine, old).blobs) <= set(note.blobs):
                        continue  # another repair was at it
                self._store.delete([old])

    def _let_out(self, kind: str, key: str, message: str) -> None:
        # Of a pack that is whole, no note that was put since we looked: another repair has found more.
        listed = self._survey.notes if kind == "release" else [info.key for info in self._store.list("gc/")]
        notes = [note for note in listed if quarantined_names([note]) == {key}]
        for note in notes or [Quarantine(pack=key.rpartition("/")[2], found=0, reason="").key]:
            self._do(kind, note, message, partial(self._store.delete, [note]))

    # -- heal

    def _heal(self) -> None:
        """Every snapshot that needs a damaged pack, committed ones first: what they need is safe from gcs."""
        survey, report = self._survey, self._report
        healer = Healer(self._context, survey.packs, survey.affected)
        view = View(survey.ruling.values(), {}, [])
        chosen = sorted(
            (survey.ruling[name] for name in survey.affected.keys() - self._older),
            key=lambda s: (s.state != COMMITTED, s.run, s.seq, s.id),
        )
        healer.find_chains(chosen, view)
        suffered = {name: problem for problem in survey.result.problems for name in problem.snapshots}
        lost = {name: (survey.ruling[name], why) for name, why in survey.without_manifest.items()}
        for key, why in survey.unreadable.items():
            lost[stand_in(key).id] = stand_in(key), why
        for snapshot in chosen:
            try:
                done = healer.heal(snapshot) if report.applied else healer.plan(snapshot, view)
            except CapabilityError as error:  # not lost: it may be whole where it can be read
                report.open.append(f"{snapshot.ref}: cannot be healed here: {without_advice(error)}")
                suffered.pop(snapshot.id, None)
                continue
            except (*DAMAGE, ConflictError) as error:
                why = without_advice(error)
                report.open.append(f"{snapshot.ref}: could not be healed now, repair again: {why}")
                suffered.pop(snapshot.id, None)  # neither healed nor lost: what is lost may be dropped
                continue
            if done is None:
                suffered.pop(snapshot.id, None)
                continue
            survey.ruling[snapshot.id] = done.snapshot
            if done.changes:
                message = (
                    f"{snapshot.ref}: chunks read from where else they are stored: {done.elsewhere}, "
                    f"blobs copied out of damaged packs: {done.copied}"
                )
                if done.lost or snapshot.id in lost:
                    message += "; it stays lost, and what is still good of it does not hang on those packs any more"
                report.actions.append(Action("heal", done.snapshot.key, message))
                log.info("repair: %s", message)
            if done.lost:
                lost.setdefault(snapshot.id, (done.snapshot, f"{snapshot.ref}: {done.lost}"))
            self._mended.add(snapshot.id)
        for name in suffered.keys() & survey.ruling.keys() - self._mended:  # nothing here was about what ails it
            lost.setdefault(name, (survey.ruling[name], suffered[name].message))
        report.lost = [lost[name] for name in sorted(lost)]
        whole = [survey.ruling[name] for name in suffered.keys() - lost.keys() if name in survey.ruling]
        report.healed = sorted((s for s in whole if s.state in _STATES), key=lambda s: (s.run, s.seq, s.id))

    # -- drop, purge

    def _drop(self) -> None:
        """Forget what stays damaged; nothing as long as a record that might heal it could not be read."""
        if self._report.applied and (unread := self._index.refresh().unread):
            self._report.open.append(f"nothing is dropped: {without_advice(next(iter(unread.values())))}; repair again")
            return
        for snapshot, why in self._report.lost:
            if snapshot.state != COMMITTED or snapshot.id in self._older:
                continue
            if snapshot.tags:
                for tag in snapshot.tags:
                    untag = f"snapstore untag id:{snapshot.id[:12]} {tag}"
                    self._report.open.append(f"{snapshot.ref}: is tagged {tag}; to drop it, run '{untag}' first")
            elif self._do("drop", snapshot.key, f"{snapshot.ref}: is forgotten: {why}",
                          partial(self._forget, snapshot, why)):  # fmt: skip
                self._report.dropped.append(snapshot)

    def _forget(self, snapshot: Snapshot, why: str) -> None:
        # This revision, and no later one: that may have been healed.
        revisions.revise(self._context, snapshot, state=FORGOTTEN, policy="", reason=f"{gc.DROPPED}{why}"[:500])

    def _purge(self) -> None:
        """Let gc have what is in quarantine and needed by nobody."""
        applied, survey = self._report.applied, self._survey
        dropped = {snapshot.id for snapshot in self._report.dropped}
        unread = {key: why for key, why in survey.unreadable.items() if stand_in(key).id not in dropped}
        unread |= {key: "of another version" for key in survey.unknown if parse_record_key(key)}
        vanished = [gone for gone in map(self._index.cached, survey.vanished) if gone is not None]
        view = self._index.refresh() if applied else View(survey.ruling.values(), unread, vanished)
        if unknown := _unknown(view):
            self._report.open.append(f"nothing is purged: what {unknown[0]} says of what it needs cannot be told")
            return
        unneeded = quarantined_names(info.key for info in self._store.list("gc/"))
        if not applied:
            unneeded |= survey.need.keys()
        whole = {s.id for s in self._report.healed} if not applied else set()
        for snapshot, keys in all_needed_keys(self._index, view.snapshots(states=_STATES)):
            if isinstance(keys, SnapstoreError):
                self._report.open.append(
                    f"nothing is purged: what {snapshot.ref} needs cannot be told: {without_advice(keys)}"
                )
                return
            if snapshot.id not in whole:
                unneeded -= keys
        for key in sorted(unneeded - survey.recovered):
            self._let_out("purge", key, f"{key}: leaves the quarantine: nobody needs it, the next gc deletes it")


def _unknown(view: View) -> list[str]:
    """Keys of the records that decide what a snapshot needs, and that are not there or cannot be read."""
    last = {key: view.get(stand_in(key).id) for key in view.vanished}
    vanished = (key for key, shown in last.items() if shown is None or shown.revision < stand_in(key).revision)
    return [*view.damaged, *view.unread, *vanished]
