"""Repair a repository: save what can be saved, name what is lost, and make nothing worse.

In: a scan (check/scan_records.py, check/scan_objects.py). Out: a RepairResult. With `apply`, these steps in this order,
each complete by itself:

    records      vanished records come back from the index, unless that could lose data (`RecordScan.outdated`); a
                 damaged record gets a next revision, from the index, an earlier revision, or the manifests
    notes        give sessions that are dated in the future the present date; remove damaged sessions that no process
                 keeps alive, and damaged notes of gcs
    quarantine   PUT gc/<sha256>.quarantine for every damaged pack that a snapshot needs: from now on no save builds on
                 it, and no gc deletes it. The pack itself does not change. PUT gc/<id>.lost for every snapshot that
                 lacks a manifest: from now on no policy counts it
    heal         rewrite snapshots that need such a pack (heal.py), as the next revision of their records; write damaged
                 lists of manifests again, in the same way
    prove        at level "restore": let saves build on snapshots that were copied without verification
    drop         only on request: forget the snapshots that stay damaged
    purge        only on request: take packs that no snapshot needs out of quarantine, so that gc deletes them
    index        rebuild it, unless the store is an older backup: then only the index knows which records vanished, and
                 by that it stops gc

After a crash at any point, the next repair has less to do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from ..catalog.config import is_foreign
from ..catalog.history import DROPPED, View
from ..catalog.needed_keys import all_needed_keys
from ..catalog.read_twice import expecting_damage, read_small, tried
from ..check.recoverable import recover_record
from ..check.report import (
    ACCEPT,
    COPY,
    GC,
    REBUILD,
    REPAIR,
    REPAIR_CHUNKS,
    UNREADABLE,
    CheckResult,
    require_level,
    stand_in,
)
from ..check.scan_objects import ScanResult, scan_objects, why_recovered
from ..check.scan_records import RecordScan, scan_records
from ..checks import check_flags
from ..context import Context
from ..errors import (
    DAMAGE,
    AlreadyExistsError,
    CapabilityError,
    ConflictError,
    NotFoundError,
    SnapstoreError,
)
from ..format import records
from ..format.keys import UNKNOWN_RUN, lost_names, quarantined_names
from ..format.records import ABORTED, COMMITTED, FORGOTTEN, Config, Lost, Quarantine, Session, Snapshot
from ..protocol import gc, joining, liveness, revisions
from ..protocol.notes import put_note
from ..text import log, strip_hint
from .heal import Healer, Healing, renew_list
from .report import RepairAction, RepairResult

_STATES = (COMMITTED, FORGOTTEN)
#: The advice for pages that only the index knows.
ACCEPT_PAGES = (
    "put the page back; or, if an older repository was put back, run 'snapstore index rebuild --forget-missing'"
)


def repair(context: Context, *, level: str, apply: bool, drop: bool, purge: bool) -> RepairResult:
    """Check everything up to a level of `check`, and repair what can be repaired.

    Args:
        level: "metadata", "data" or "restore".
        apply: make the changes; False: a dry run.
        drop: forget the snapshots that stay damaged, unless they are tagged.
        purge: let gc delete the packs in quarantine that no snapshot needs.

    Raises:
        InvalidInputError: there is no such level, or an argument is no bool.
        StorageError: the store failed; every step until then is complete.
    """
    require_level(level)
    check_flags(apply=apply, drop=drop, purge=purge)
    report = RepairResult(CheckResult(level), apply)
    _Repair(context, report).run(drop=drop, purge=purge)
    return report


class _Repair:
    """One run.

    Attributes:
        _records: the records, including the ones that this run has written.
        _scan: what was found before this run changed a manifest.
        _ruling: the ruling revision of every snapshot by id, including the ones that this run has written.
        _repaired: ids of the snapshots that a step has made whole, as far as it could.
        _unwritten_notes: damaged notes of quarantine that this level cannot write again.
    """

    _records: RecordScan
    _scan: ScanResult

    def __init__(self, context: Context, report: RepairResult) -> None:
        self._context, self._store, self._index = context, context.store, context.index
        self._report, self._level = report, report.found.level
        self._ruling: dict[str, Snapshot] = {}
        self._repaired: set[str] = set()
        self._unwritten_notes: set[str] = set()

    def run(self, *, drop: bool, purge: bool) -> None:
        """Run every step, in the order of this module's docstring."""
        if self._context.config_problem:
            config = self._context.config
            message = f"config: is written again: chunks of {config.chunk_bytes} bytes, digest seed of the manifests"
            self._do("config", "config", message, partial(self._replace_config, config))
        self._records = scan_records(self._context)
        self._mend_pages()
        self._write_vanished_records()
        self._write_damaged_records(drop)
        self._scan = scan_objects(self._context, self._records, self._level)
        if self._level == "restore":  # every other snapshot was rebuilt, to the last chunk
            self._context.index.marks.keep_only((*self._scan.report.damaged, *self._scan.report.unknown))
        self._ruling = dict(self._scan.records.ruling)
        self._report.found = self._scan.report
        self._date_sessions()
        self._remove_damaged_small()
        self._quarantine()
        self._note_lost()
        self._heal()
        self._renew_lists()
        self._prove()
        if drop:
            self._drop()
        if purge:
            self._purge()
        self._leave_open()
        self._explain_helps()
        if gone := self._records.pages.gone:
            self._report.open.append(f"{gone[0]}: is gone, and only the index knows what it said; {ACCEPT_PAGES}")
        if not self._records.outdated and not gone:
            self._do("index", "index", "the index is rebuilt from the objects", self._index.rebuild)

    def _leave_open(self) -> None:
        """Add to `open` each problem that `check` will report again: another command or a person must fix it."""
        let_out = {action.key for action in self._report.actions if action.kind in ("purge", "release")}
        for key in sorted(self._unwritten_notes - let_out):
            self._report.open.append(f"{key}: is damaged; run '{REPAIR_CHUNKS} --apply'")
        for problem in self._report.found.problems:
            waits = problem.command == GC and problem.snapshots  # only a gc is left to do: nothing is open
            if not problem.command.startswith((REBUILD, REPAIR)) and not waits:
                advice = f"; run '{problem.command}'" if problem.command else ""
                self._report.open.append(problem.message + advice)

    def _explain_helps(self) -> None:
        scan = self._scan
        for snapshot in self._report.left:
            packs = {key for key, names in scan.need.items() if snapshot.id in names}
            if snapshot.id in scan.without_manifest or snapshot.state == UNREADABLE:
                helps = f"{COPY}; nothing else helps"
            elif not packs:
                continue  # its own message says what to do
            elif packs & scan.packs.why.keys():
                helps = f"save the same content again, or put a copy of the pack back, then run '{REPAIR} --apply'"
            else:  # its bytes are as they were written
                helps = f"save the same content again, then run '{REPAIR} --apply'"
            self._report.helps[snapshot.id] = helps

    def _do(self, kind: str, key: str, message: str, effect: Callable[[], object]) -> bool:
        """Run an effect, unless this is a dry run, and report it; return False if another process was first."""
        if self._report.applied:
            try:
                effect()
            except (ConflictError, AlreadyExistsError) as error:
                self._report.open.append(f"{message}: another process was first, repair again: {strip_hint(error)}")
                return False
            log.info("repair: %s", message)
        self._report.actions.append(RepairAction(kind, key, message))
        return True

    def _replace_config(self, config: Config) -> None:
        """Replace a damaged config: delete it, then put a new one. No process depends on which one writes it first.

        Raises:
            ConflictError: it can be read now: another repair was first, or a read had failed for a moment.
        """
        found: Config | None = None
        with expecting_damage():
            found = read_small(self._store, Config, "config")
        if found is not None and not is_foreign(self._store, found):
            raise ConflictError("config: can be read")
        self._store.delete(["config"])
        self._store.put("config", records.encode(config))

    # -- records

    def _write_vanished_records(self) -> None:
        """Put records that vanished back from the index, unless older ones in the store stay."""
        written = []
        for gone in self._records.gone:
            if gone.id in self._records.outdated:
                self._report.open.append(
                    f"{gone.ref}: stays as the store shows it; the index knows revision {gone.revision}, {gone.state}; "
                    f"it seems that an older backup was put back; to accept it, run '{ACCEPT}'"
                )
                continue
            message = f"{gone.ref}: its record is put back from the index"
            if self._do("record", gone.key, message, partial(self._put, gone)):
                written.append(gone)
        self._know(written)

    def _know(self, written: Sequence[Snapshot]) -> None:
        """Remember that these records can be read now."""
        self._records = self._records.with_ruling(written)
        self._repaired.update(snapshot.id for snapshot in written)

    def _write_damaged_records(self, drop: bool) -> None:
        """Write the next revision of every damaged record, from what is known of it."""
        for key, why in self._records.unreadable.items():
            if key not in self._records.misnumbered and self._reads_by_now(key):
                continue
            found = recover_record(self._context, self._records, key)
            if found is not None:
                record, whence = found
                if self._do("record", record.key, f"{record.ref}: {whence}", partial(self._put, record)):
                    self._know([record])
            elif drop:
                lost = stand_in(key)
                reason = f"dropped by a repair: {why}"[:500]
                record = msgspec.structs.replace(lost, state=ABORTED).revised(reason=reason)
                message = f"{lost.ref}: is abandoned: nothing tells what it held: {why}"
                if self._do("drop", record.key, message, partial(self._put, record)):
                    self._report.dropped.append(lost)

    def _reads_by_now(self, key: str) -> bool:
        """Return whether a damaged record can be read now: then no guess replaces it."""
        with expecting_damage():
            found = read_small(self._store, Snapshot, key)
            self._know([found])
            self._report.open.append(f"{key}: could not be read at first and can be read now; check the disk")
            return True
        return False

    def _put(self, record: Snapshot) -> None:
        """Create a record; if its key exists already, it must hold this record."""
        if revisions.create(self._context, record).write_id != record.write_id:
            raise ConflictError(f"{record.key}: another process has created it")
        self._index.add(record)

    # -- small objects, quarantine

    def _date_sessions(self) -> None:
        """Give sessions that are dated in the future the present date: otherwise no gc would ever find them silent."""
        infos = list(self._store.list("sessions/"))
        now_s = self._store.now_s() if infos else 0.0
        for info in infos:
            if liveness.is_in_future(info, now_s):
                message = f"{info.key}: is dated {info.modified_s - now_s:.0f} s in the future, gets the present date"
                self._do("session", info.key, message, partial(self._touch, info.key))

    def _touch(self, key: str) -> None:
        with suppress(NotFoundError):  # its save has ended
            self._store.touch(key)

    def _remove_damaged_small(self) -> None:
        """Remove damaged sessions that no process keeps alive, and damaged notes of gcs, which no gc needs."""
        for key in sorted(self._records.damaged_small, key=lambda key: (not key.endswith(".mark"), key)):
            if quarantined_names([key]):
                if self._level != "restore":  # only rebuilding tells which blobs the note named
                    self._unwritten_notes.add(key)
                continue
            try:
                silent_s = max(0.0, self._store.now_s() - self._store.stat(key).modified_s)
            except NotFoundError:
                continue
            until = ""
            if key.startswith("sessions/"):
                if self._store.is_locked(key):
                    until = "the process that has it open on this host has ended"
                elif silent_s < gc.DEFAULT_FENCE_AFTER_S:
                    until = f"it was silent for {gc.DEFAULT_FENCE_AFTER_S:.0f} s"
            if until:
                self._report.open.append(f"{key}: is damaged, and its save may be running; repair again once {until}")
                continue
            effect = self._end_session if key.startswith("sessions/") else lambda key: self._store.delete([key])
            self._do("remove", key, f"{key}: is damaged and removed", partial(effect, key))

    def _end_session(self, key: str) -> None:
        """Create an aborted record with the id of a damaged session, which explains its objects; remove the session.

        Raises:
            ConflictError: it can be read: one wrong answer must not remove the session of a running save.
        """
        if tried(self._store, partial(read_small, self._store, Session, key)) is not None:
            raise ConflictError(f"{key}: can be read")
        name = key.removeprefix("sessions/")
        if re.fullmatch(r"[0-9a-f]{32}", name) and self._index.refresh().get(name) is None:
            record = liveness.aborted(UNKNOWN_RUN, 0, name, "a repair has removed its damaged session")
            revisions.create(self._context, record)
        self._store.delete([key])

    def _mend_pages(self) -> None:
        """Give the records of damaged pages to later ones, and remove volumes that are no copies."""
        for one in self._records.pages.joined.values():
            for key in one.damaged:
                message = f"{key}: its records are in another page"
                self._do("mend", key, message, partial(joining.mend, self._context, key))
        for key in self._records.pages.bad_volumes:
            self._do(
                "remove", key, f"{key}: is removed; the next join makes another", partial(self._store.delete, [key])
            )

    def _note(self, key: str, why: str) -> Quarantine:
        blobs = sorted(self._scan.packs.misbuilt.get(key, ()))  # not altered blobs: a copy may replace them
        return Quarantine(pack=key.rpartition("/")[2], found=time.time(), reason=why[:500], blobs=blobs)

    def _quarantine(self) -> None:
        """Tell saves and gcs which packs are damaged, and which no longer are."""
        scan, quarantined = self._scan, self._records.quarantined
        fresh = sorted(scan.need.keys() - quarantined)
        for key in fresh:
            note = self._note(key, scan.packs.why.get(key, "a blob does not rebuild its chunk"))
            message = f"{key}: goes into quarantine: no save builds on it, no gc deletes it"
            self._do("quarantine", note.key, message, partial(put_note, self._store, note))
        damaged = quarantined_names(self._records.damaged_small) if self._level == "restore" else set()
        for key in sorted(quarantined - scan.recovered):
            noted = self._records.noted_blobs.get(key, frozenset())
            if key in damaged or not scan.packs.misbuilt.get(key, set()) <= noted:
                note = self._note(key, scan.packs.why.get(key, "a blob does not rebuild its chunk"))
                message = f"{key}: its note is written again; blobs that do not rebuild their chunks: {len(note.blobs)}"
                self._do("quarantine", note.key, message, partial(self._renew, key, note))
        running = [info.key for info in self._store.list("sessions/")] if fresh else []
        if running:
            self._report.open.append(
                f"running saves that may have built on damaged packs: {len(running)}; repair again once they end "
                f"('{GC}' fences saves that died)"
            )
        for key in sorted(scan.recovered):
            why = why_recovered(scan.records.sizes, key)
            self._release("release", key, f"{key}: leaves the quarantine: {why}")

    def _note_lost(self) -> None:
        """Tell policies which snapshots lack a manifest, and which no longer do."""
        scan, ruling = self._scan, self._ruling
        lacking = {name: why for name, why in scan.without_manifest.items() if ruling[name].state in _STATES}
        for name in sorted(lacking.keys() - (self._records.noted_lost - lost_names(self._records.damaged_small))):
            lost = Lost(id=name, found=time.time(), reason=lacking[name][:500])
            message = f"{ruling[name].ref}: no policy counts it, since it lacks a manifest"
            self._do("quarantine", lost.key, message, partial(put_note, self._store, lost))
        for name in sorted(scan.found_again):
            found = Lost(id=name, found=0, reason="").key
            message = f"{ruling[name].ref}: has all its manifests again, or was collected: policies may count it"
            self._do("release", found, message, partial(self._store.delete, [found]))

    def _renew(self, key: str, note: Quarantine) -> None:
        """Put a note beside the other notes of its pack, and only then remove the notes that name no other blobs.

        If a pack had no note for a moment, a save that begins then would build on it, and a gc would delete it.
        """
        note = msgspec.structs.replace(note, id=records.new_id())
        put_note(self._store, note)
        for old in self._records.quarantine_notes:
            if quarantined_names([old]) == {key}:
                with expecting_damage():  # a damaged one says nothing
                    if not set(records.decode(self._store.get(old), Quarantine, old).blobs) <= set(note.blobs):
                        continue  # another repair has found more
                self._store.delete([old])

    def _release(self, kind: str, key: str, message: str) -> None:
        # If a pack is intact, remove only notes from before the scan: another repair may have found more since.
        listed = self._records.quarantine_notes if kind == "release" else [info.key for info in self._store.list("gc/")]
        notes = [note for note in listed if quarantined_names([note]) == {key}]
        for note in notes or [Quarantine(pack=key.rpartition("/")[2], found=0, reason="").key]:
            self._do(kind, note, message, partial(self._store.delete, [note]))

    # -- heal

    def _heal(self) -> None:
        """Heal every snapshot that needs a damaged pack; committed ones first: gcs keep the packs that they need."""
        scan, report, ruling = self._scan, self._report, self._ruling
        healer = Healer(self._context, scan.packs, scan.affected, scan.without_manifest.keys())
        view = View(ruling.values(), {}, [])
        chosen = sorted(
            (ruling[name] for name in scan.affected.keys() - self._records.outdated),
            key=lambda s: (s.state != COMMITTED, s.run, s.seq, s.id),
        )
        healer.find_chains(chosen, view)
        suffered = {name: problem for problem in scan.report.problems for name in problem.snapshots}
        lost = {name: (ruling[name], why) for name, why in scan.without_manifest.items()}
        for key, why in self._records.unreadable.items():
            lost[stand_in(key).id] = stand_in(key), why
        for snapshot in chosen:
            done = self._heal_one(healer, snapshot, view)
            if done is None:
                suffered.pop(snapshot.id, None)  # neither healed nor lost: lost snapshots may be dropped
                continue
            ruling[snapshot.id] = done.snapshot
            if done.elsewhere or done.copied:
                message = (
                    f"{snapshot.ref}: chunks that now come from other packs: {done.elsewhere}, "
                    f"blobs copied out of damaged packs: {done.copied}"
                )
                if done.lost or snapshot.id in lost:
                    message += "; it stays lost, but its intact chunks no longer need the damaged packs"
                report.actions.append(RepairAction("heal", done.snapshot.key, message))
                log.info("repair: %s", message)
            if done.lost or snapshot.id in lost:  # to drop it, the revision that rules now is forgotten
                _, why = lost.get(snapshot.id, (snapshot, f"{snapshot.ref}: {done.lost}"))
                lost[snapshot.id] = done.snapshot, why
            self._repaired.add(snapshot.id)
        for name in suffered.keys() & ruling.keys() - self._repaired:  # no step repaired its problem
            lost.setdefault(name, (ruling[name], suffered[name].message))
        # A record that cannot be read tells no sequence number, but its key tells the step.
        report.lost = sorted(lost.values(), key=lambda found: (found[0].run, found[0].seq, found[0].step, found[0].id))
        whole = [ruling[name] for name in suffered.keys() - lost.keys() if name in ruling]
        report.healed = sorted((s for s in whole if s.state in _STATES), key=lambda s: (s.run, s.seq, s.id))

    def _heal_one(self, healer: Healer, snapshot: Snapshot, view: View) -> Healing | None:
        """Heal a snapshot, or plan it; return None if it needs no healing any more, or cannot be healed now."""
        try:
            return healer.heal(snapshot) if self._report.applied else healer.plan(snapshot, view)
        except CapabilityError as error:  # not lost: another machine may rebuild it
            self._report.open.append(f"{snapshot.ref}: cannot be healed here: {strip_hint(error)}")
        except (*DAMAGE, ConflictError) as error:
            self._report.open.append(f"{snapshot.ref}: could not be healed now, repair again: {strip_hint(error)}")
        return None

    def _renew_lists(self) -> None:
        """Write lists of manifests again that are missing or damaged, unless their snapshots were healed just now."""
        lost = {snapshot.id for snapshot, _ in self._report.lost}
        for name in sorted(self._scan.without_list - self._records.outdated - lost):
            snapshot = self._ruling[name]
            if snapshot.state in _STATES and snapshot.manifest_list == self._scan.records.ruling[name].manifest_list:
                message = f"{snapshot.ref}: its list of manifests is written again"
                self._do("record", snapshot.key, message, partial(renew_list, self._context, snapshot))

    def _prove(self) -> None:
        """Let saves build on the snapshots that were copied without verification, and that this scan has proven."""
        for snapshot in (s for s in self._scan.report.restorable if s.unproven and s.id in self._scan.proven):
            message = f"{snapshot.ref}: each of its chunks has its digest: saves may build on it"
            effect = partial(revisions.revise, self._context, snapshot, unproven=msgspec.UNSET)
            self._do("prove", snapshot.key, message, effect)

    # -- drop, purge

    def _drop(self) -> None:
        """Forget the snapshots that stay damaged; none while a record cannot be read: it might help to heal them."""
        if self._report.applied and (unread := self._index.refresh().unread):
            self._report.open.append(f"nothing is dropped: {strip_hint(next(iter(unread.values())))}; repair again")
            return
        for snapshot, why in self._report.lost:
            if snapshot.state != COMMITTED or snapshot.id in self._records.outdated:
                continue
            if snapshot.tags:
                for tag in snapshot.tags:
                    untag = f"snapstore untag id:{snapshot.id[:12]} {tag}"
                    self._report.open.append(f"{snapshot.ref}: is tagged {tag}; to drop it, run '{untag}' first")
                continue
            message = f"{snapshot.ref}: is forgotten: {why}"
            if self._do("drop", snapshot.key, message, partial(self._forget, snapshot, why)):
                self._report.dropped.append(snapshot)

    def _forget(self, snapshot: Snapshot, why: str) -> None:
        # Only this revision: a later one may be healed.
        revisions.revise(self._context, snapshot, state=FORGOTTEN, policy="", reason=f"{DROPPED}{why}"[:500])

    def _purge(self) -> None:
        """Take packs that no snapshot needs out of quarantine, so that gc deletes them."""
        applied = self._report.applied
        dropped = {snapshot.id for snapshot in self._report.dropped}
        unread = {key: why for key, why in self._records.unreadable.items() if stand_in(key).id not in dropped}
        unread |= dict.fromkeys(self._records.unknown, "of another version")
        vanished = [gone for gone in map(self._index.cached, self._records.vanished) if gone is not None]
        view = self._index.refresh() if applied else View(self._ruling.values(), unread, vanished)
        if unknown := _unknown(view):
            self._report.open.append(f"nothing is purged: {unknown[0]} cannot be read, and may need any pack")
            return
        unneeded = quarantined_names(info.key for info in self._store.list("gc/"))
        if not applied:
            unneeded |= self._scan.need.keys()
        whole = {s.id for s in self._report.healed} if not applied else set()
        for snapshot, keys in all_needed_keys(self._index, view.snapshots(states=_STATES)):
            if isinstance(keys, SnapstoreError):
                self._report.open.append(
                    f"nothing is purged: nothing tells what {snapshot.ref} needs: {strip_hint(keys)}"
                )
                return
            if snapshot.id not in whole:
                unneeded -= keys
        for key in sorted(unneeded - self._scan.recovered):
            self._release("purge", key, f"{key}: leaves the quarantine: no snapshot needs it, the next gc deletes it")


def _unknown(view: View) -> list[str]:
    """Return keys of the records that decide what a snapshot needs, and that are gone or cannot be read."""
    last = {key: view.get(stand_in(key).id) for key in view.vanished}
    vanished = (key for key, shown in last.items() if shown is None or shown.revision < stand_in(key).revision)
    return [*view.damaged, *view.unread, *vanished]
