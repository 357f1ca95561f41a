"""Survey: one look over a whole repository, at one of the levels of check.py. What repair.py acts upon.

In: every object, as far as the level says. Out: what is wrong, in words (`CheckResult`) and as sets of keys and ids.
Reads only; one manifest is in memory at a time.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from ..catalog import policy_store
from ..catalog.history import View
from ..catalog.needed_keys import needed_keys
from ..catalog.read_twice import answers, tried
from ..chunks import limits
from ..context import Context
from ..errors import (
    DAMAGE,
    CapabilityError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    SnapstoreError,
    StorageError,
    UnknownFormatError,
)
from ..format import manifest, records
from ..format.keys import NAME, lost_names, pack_key, parse_record_key, quarantined_names, record_key
from ..format.manifest import Manifest, part_name
from ..format.records import COMMITTED, FORGOTTEN, Done, Lost, ManifestRef, Mark, Quarantine, Session, Snapshot, Wait
from ..protocol.gc import OBJECT_NAME
from ..protocol.marks import MARK_LIMIT_BYTES
from ..storage.base import ObjectInfo
from ..text import human_bytes, some, strip_hint
from .damaged_packs import DamagedPacks, check_tree, lost_rows, unbuilt
from .report import ACCEPT, COPY, DROP, GC, REBUILD, REPAIR, REPAIR_CHUNKS, CheckResult, Problem, stand_in

log = logging.getLogger("snapstore")
LEVELS = ("metadata", "data", "restore")
#: So many damaged chunks of one snapshot are named; the rest is counted.
CHUNKS_NAMED = 20
_NOTES = {".mark": Mark, ".wait": Wait, ".done": Done, ".quarantine": Quarantine, ".lost": Lost}


class Survey:
    """One look over a repository.

    Attributes:
        packs: those that are damaged.
        quarantined: keys of the packs that an earlier repair has found damaged.
        notes: keys of the notes that say so.
        noted: pack -> offsets of the blobs that they give up.
        lost: ids of the snapshots that an earlier repair has found to lack a manifest.
        found_again: those of them that lack none, or are collected.
        recovered: those of them that are as they should be, or gone and missed by nobody.
        ruling: the ruling revision of every snapshot whose record reads, by id.
        unreadable: key -> why, of the ruling records that do not.
        vanished: keys of records that the index knows and the store does not list.
        small: keys of damaged sessions and of damaged objects of gcs.
        sizes: of packs and manifests, by key [bytes].
        need: damaged pack -> ids of all snapshots that refer to it.
        affected: id -> SHA-256 of those of its manifests that refer to damaged packs.
        without_manifest: id -> why, of snapshots that lack a manifest.
        digest_seed: of the repository, as its config says.
        unknown: keys of records, and ids of snapshots, that are intact as far as this release or machine can read them:
            no damage, and nothing that it may change.
    """

    def __init__(
        self, context: Context, level: str, share: float = 1.0,
        subset: tuple[int, int] = (1, 1), max_decoded_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self._context = context
        if level not in LEVELS:
            raise InvalidInputError(f"check level {level!r}: expected one of {', '.join(LEVELS)}")
        self._store, self._index, self._engines = context.store, context.index, context.engines
        self._share, self._subset = share, subset
        self.digest_seed = context.engines.digest_seed
        self._budget = limits.Budget(context.store, max_decoded_bytes)
        self.result = CheckResult(level)
        self.packs = DamagedPacks(context.store)
        self.quarantined: set[str] = set()
        self.notes: list[str] = []
        self.noted: dict[str, set[int]] = {}
        self.lost: set[str] = set()
        self.found_again: set[str] = set()
        self.recovered: set[str] = set()
        self.ruling: dict[str, Snapshot] = {}
        self.unreadable: dict[str, str] = {}
        self.vanished: list[str] = []
        self.small: list[str] = []
        self.affected: dict[str, list[str]] = {}
        self.without_manifest: dict[str, str] = {}
        self.unknown: set[str] = set()
        self.sizes: dict[str, int] = {}
        self._suffer: dict[str, set[str]] = {}  # pack -> ids of the snapshots that lose by it
        self.need: dict[str, set[str]] = {}
        if context.config_problem:
            self._report("config", "config", context.config_problem)

    def read_records(self) -> None:
        """Everything but packs and manifests, which are only listed."""
        for prefix in ("packs/", "manifests/"):
            for info in self._store.list(prefix):
                if OBJECT_NAME.fullmatch(info.key):
                    self.sizes[info.key] = info.size_bytes
                else:
                    self._stray(prefix[:-2], info.key)
        self._small_objects()
        self._policies()
        self._records()
        self._vanished()

    def read_rest(self) -> CheckResult:
        """Packs and manifests, by the records in `ruling`; what was found in all."""
        result = self.result
        self._read_packs()
        snapshots = View(self.ruling.values(), {}, []).snapshots(states=(COMMITTED, FORGOTTEN))
        needed = set(self.quarantined)
        seen: set[bytes] = set()
        if result.level == "restore":
            for snapshot in reversed(snapshots):
                self._prove(snapshot, seen)
        for snapshot in snapshots:
            keys = self._snapshot(snapshot, seen)
            if snapshot.state == COMMITTED:
                needed |= keys
        result.decoded_bytes = self._budget.spent_bytes
        self._report_packs()
        self.found_again = (self.lost & self.ruling.keys()) - self.without_manifest.keys()
        for name in sorted(self.found_again):
            key = Lost(id=name, found=0, reason="").key
            self._note("gc", key, f"{key}: {self.ruling[name].ref} lacks no manifest any more, or is collected", REPAIR)
        if not self._stops_gc(needed):
            result.unneeded_bytes = sum(size for key, size in self.sizes.items() if key not in needed)
        bad = {name for problem in result.problems for name in problem.snapshots}
        snapshots = [now for s in snapshots if (now := self.ruling[s.id]).state in (COMMITTED, FORGOTTEN)]
        result.restorable = [s for s in snapshots if s.id not in bad | self.unknown]
        named = {s.id for s in result.damaged}
        result.damaged += [s for s in snapshots if s.id in bad - named]
        result.unknown = [stand_in(key) for key in sorted(self.unknown) if parse_record_key(key) is not None]
        result.unknown += [s for s in snapshots if s.id in self.unknown - bad]
        return result

    def _stops_gc(self, needed: set[str]) -> bool:
        """Whether gc would refuse or wait, or whether it cannot be told what committed snapshots need."""
        untold = any(self.ruling[name].state == COMMITTED for name in self.without_manifest)
        untold |= any(name not in self.ruling or self.ruling[name].state == COMMITTED for name in self.unknown)
        kinds = {problem.kind for problem in self.result.problems}
        absent = needed - self.sizes.keys() - self.quarantined
        return untold or not kinds.isdisjoint(("config", "session")) or bool(self.unreadable or self.vanished or absent)

    def _report(
        self, kind: str, key: str, message: str, suffer: Iterable[str] = (), *, command: str = REPAIR, instead: str = ""
    ) -> None:  # fmt: skip
        self.result.problems.append(Problem(kind, key, strip_hint(message), tuple(suffer), command, instead))

    def _note(self, kind: str, key: str, message: str, command: str = "") -> None:
        self.result.notes.append(Problem(kind, key, strip_hint(message), (), command))

    def _stray(self, kind: str, key: str) -> None:
        self._report(kind, key, f"{key}: no name of an object; it does not belong here, remove it", command="")

    def _get(self, info: ObjectInfo, limit_bytes: int = records.MAX_OBJECT_BYTES) -> bytes:
        """A listed object.

        Raises:
            IntegrityError: or it cannot be read, though the store answers.
        """
        try:
            return self._store.get(info.key, limit_bytes=limit_bytes)
        except StorageError as error:
            raise self._unreadable(info.key, error) from error

    def _unreadable(self, key: str, error: StorageError) -> IntegrityError:
        """What it means that one object cannot be read; a store that cannot be reached is no damage."""
        answers(self._store)
        return IntegrityError(f"{key}: cannot be read: {error}")

    # -- small objects

    def _small_objects(self) -> None:
        """Sessions, and what gcs have left."""
        infos = list(self._store.list("gc/"))
        self.notes = [info.key for info in infos if quarantined_names([info.key])]
        self.quarantined = quarantined_names(self.notes)
        self.lost = lost_names(info.key for info in infos)
        for kind, info in [("gc", info) for info in infos] + [("session", i) for i in self._store.list("sessions/")]:
            suffix = "." + info.key.rpartition(".")[2]
            if kind == "gc" and suffix not in _NOTES:
                self._stray(kind, info.key)
                continue
            kind_of: Any = _NOTES[suffix] if kind == "gc" else Session
            try:
                found = records.decode(self._get(info, MARK_LIMIT_BYTES), kind_of, info.key)
                if isinstance(found, Quarantine):
                    self.noted.setdefault(pack_key(found.pack), set()).update(found.blobs)
                    for offset in found.blobs:
                        self.packs.give_up(pack_key(found.pack), offset)
            except NotFoundError:
                continue  # it ended while we look
            except UnknownFormatError as error:
                self._report(kind, info.key, str(error), command="")
            except DAMAGE as error:
                self.small.append(info.key)
                command = REPAIR_CHUNKS if quarantined_names([info.key]) else REPAIR  # which blobs, only that tells
                self._report(kind, info.key, str(error), command=command)

    def _policies(self) -> None:
        """Retention policies; nobody reads those that newer ones replace."""
        newest: dict[str, int] = {}
        found: list[tuple[str, int, ObjectInfo]] = []
        for info in self._store.list("policies/"):
            run, _, revision = info.key.removeprefix("policies/").rpartition(".")
            if not NAME.fullmatch(run) or not revision.isdecimal():
                self._stray("policy", info.key)
                continue
            found.append((run, int(revision), info))
            newest[run] = max(newest.get(run, 0), int(revision))
        for run, number, info in found:
            try:
                policy_store.decode(self._get(info), info.key)
            except UnknownFormatError as error:
                self._report("policy", info.key, str(error), command="")
            except NotFoundError:
                continue
            except DAMAGE as error:
                if number < newest[run]:
                    self._note("policy", info.key, f"{error}; newer policies rule, nothing is lost")
                    continue
                message = f"{error}; what run {run!r} is to keep has to be said again"
                self._report("policy", info.key, message, command=f"snapstore forget --run {run} --keep-...")

    # -- records

    def _records(self) -> None:
        """Every record, read from the store itself, and compared with the index."""
        view: View | None = None
        try:
            view = self._index.refresh()
            self.vanished = view.vanished
        except StorageError as error:
            raised = self._unreadable("snapshots/", error)  # one record, which is found again below
            self._note("index", "snapshots/", f"not compared with the index: {raised}")
        listed: dict[str, ObjectInfo] = {}
        for info in self._store.list("snapshots/"):
            if parse_record_key(info.key) is None:
                self._stray("record", info.key)
                continue
            listed[info.key] = info
        decided: set[str] = set()  # ids whose ruling revision has been met
        for key in sorted(listed, key=lambda key: (int(key.rpartition(".")[2]), key), reverse=True):
            name = key.rpartition("-")[2].split(".")[0]
            try:
                found = records.unpack(self._get(listed[key]), Snapshot, key)
                if found.key in listed and found.id == name and found.key != key:
                    message = f"{key}: a copy of {found.key}, which does not belong here and hides it; remove it"
                    self._report("record", key, message, [name] if name not in decided else [], command="")
                    continue
                if found.key != key:
                    raise IntegrityError(f"{key}: holds the record of {found.key}")
            except NotFoundError:
                continue  # removed while we look
            except UnknownFormatError as error:
                if name not in decided:
                    decided.add(name)
                    self.unknown.add(key)
                    self._report("record", key, str(error), command="")
                continue
            except DAMAGE as error:
                if name in decided:
                    self._note("record", key, f"{error}; a later revision rules; what only this one said is lost")
                    continue
                decided.add(name)
                self.unreadable[key] = strip_hint(error)
                self._report("record", key, str(error), [name])
                self.result.damaged.append(stand_in(key))
                continue
            if name in decided:
                continue
            decided.add(name)
            self.ruling[found.id] = found
            known = view.get(found.id) if view else None
            if (
                known is not None
                and known.revision == found.revision
                and records.encode(known) != records.encode(found)  # not known != found: metrics may be NaN
            ):
                self._report("index", key, f"{key}: differs from the index", command=REBUILD)

    def _vanished(self) -> None:
        """Records that the index knows and the store does not show: who suffers, and what helps."""
        last = {gone.id: gone for gone in self.later()}
        shown = self.ruling.keys() | self._unread_ids()
        for key in self.vanished:
            why, name = f"{key}: known to the index, not in the store", stand_in(key).id
            gone = last.get(name)
            if gone is not None and self.stands(gone):
                why += "; it seems that a backup was put back, which is older than the index"
                instead = f"accepts the repository as it is; {COPY} brings back what it said"
                self._report("index", key, why, command=ACCEPT, instead=instead)
            elif gone is not None and gone.key == key and gone.state in (COMMITTED, FORGOTTEN) and name not in shown:
                self.result.damaged.append(stand_in(key))
                instead = f"puts it back; if it was removed on purpose, '{ACCEPT}' gives it up"
                self._report("index", key, why, [name], instead=instead)
            else:
                self._report("index", key, why)

    def later(self) -> list[Snapshot]:
        """Of each snapshot the last revision that vanished, unless the store shows a later one."""
        gone = filter(None, map(self._index.cached, self.vanished))
        last = {s.id: s for s in sorted(gone, key=lambda s: (s.revision, s.key))}
        return [s for s in last.values() if s.id not in self.ruling or self.ruling[s.id].revision < s.revision]

    def stands(self, gone: Snapshot) -> bool:
        """Whether what the store shows of a snapshot stands, though the index knows a later revision, which vanished.

        A backup was put back, say. What vanished may have forgotten, swept or rewritten the snapshot, so it comes back
        only where that costs nothing: it is committed and has all it needs, or what the store shows is neither whole
        nor more likely to be healed.
        """
        rules, kept = self.ruling.get(gone.id), gone.state in (COMMITTED, FORGOTTEN)
        unknown = rules is None and gone.id in self._unread_ids()
        if unknown or (rules is not None and rules.state in (COMMITTED, FORGOTTEN) and self.has_all(rules)):
            return not (gone.state == COMMITTED and self.has_all(gone))
        left = [[ref.key in self.sizes for ref in s.manifests] for s in (gone, rules) if s is not None]
        if not kept:
            return any(map(any, left))
        if rules is None or self.has_all(gone):
            return False
        return all(left[1]) or not all(left[0])

    def _unread_ids(self) -> set[str]:
        """Of the snapshots whose ruling record is damaged, or of a version that this release does not know."""
        parsed = map(parse_record_key, (*self.unreadable, *self.unknown))
        return {found[2] for found in parsed if found is not None}

    def has_all(self, snapshot: Snapshot) -> bool:
        """Whether all that a snapshot needs is there, as far as listings and manifests' headers show."""
        keys = tried(self._store, partial(needed_keys, self._index, snapshot))
        return keys is not None and keys <= self.sizes.keys()

    # -- packs

    def _read_packs(self) -> None:
        """Read packs whole, as many as the level says, and those that are known to be damaged."""
        packs, keys = sorted(key for key in self.sizes if key.startswith("packs/")), list[str]()
        if self.result.level != "metadata":
            number, count = self._subset
            keys = [key for key in packs if int(key[-8:], 16) % count == number - 1]
            if self._share < 1:
                keys = random.sample(keys, max(1, round(self._share * len(keys)))) if keys else []
        chosen = sorted(self.quarantined.union(keys))
        self.result.packs, self.result.packs_read = len(packs), len(self.sizes.keys() & chosen)
        for key in chosen:
            try:
                data = self._store.get(key, limit_bytes=self.sizes.get(key, 0))
            except NotFoundError:
                continue  # its manifests tell whether that matters
            except DAMAGE as error:
                self.packs.why[key] = strip_hint(error)
                continue
            except StorageError as error:
                self.packs.why[key] = strip_hint(self._unreadable(key, error))
                continue
            got = hashlib.sha256(data).hexdigest()
            if not key.endswith(got):
                self.packs.why[key] = f"{key}: SHA-256 is {got}: altered"

    def _report_packs(self) -> None:
        """One finding a pack, whoever suffers by it."""
        misbuilt = {key: f"{key}: holds blobs that do not give their chunks" for key in self.packs.misbuilt}
        told = {name for problem in self.result.problems for name in problem.snapshots}  # of new ones, by their chunks
        known = {
            key: why for key, why in misbuilt.items() if key in self.quarantined or self._suffer.get(key, set()) - told
        }
        for key, why in sorted((known | self.packs.why).items()):
            lost, need = sorted(self._suffer.get(key, ())), self.need.get(key, ())
            hurt = sorted((self.ruling[name] for name in lost), key=lambda s: (s.run, s.seq, s.id))
            named = ": " * bool(hurt) + some([s.ref for s in hurt])
            message = f"{why}; snapshots that need it: {len(need)}, of which {len(lost)} lose chunks{named}"
            if need or key not in self.quarantined:
                command, instead = self._what_helps(key)
                self._report("pack", key, message, lost, command=command, instead=instead)
            else:
                self._note("pack", key, f"{why}; in quarantine, nobody needs it", f"{REPAIR} --purge")
        self.recovered = self.quarantined - self.packs.why.keys() - self.packs.misbuilt.keys()
        if self.result.level != "restore":  # which blobs a damaged note gave up only rebuilding tells
            self.recovered -= quarantined_names(self.small)
        for key in sorted(self.recovered):
            self._note("pack", key, f"{key}: is in quarantine for nothing: {self.recovery(key)}", REPAIR)

    def recovery(self, key: str) -> str:
        """Why a pack need not be in quarantine any more."""
        return "it is whole" if key in self.sizes else "it is gone, and nobody needs it"

    def _what_helps(self, key: str) -> tuple[str, str]:
        """The command, and what may be done instead, about a damaged pack."""
        need, lost = self.need.get(key, set()), self._suffer.get(key, set())
        if need and key not in self.quarantined:
            return REPAIR, ""
        kept = {name for name in need if self.ruling[name].state == COMMITTED}
        if not kept:
            return GC, ""
        if kept.isdisjoint(lost):
            return REPAIR, ""  # the intact blobs that they need have not been copied out yet
        again = "save the same content again" + ", or put a copy of the pack back," * (key in self.packs.why)
        return DROP, f"forgets what no save has stored again; to keep it, {again} then '{REPAIR} --apply'"

    # -- manifests

    def _now(self, snapshot: Snapshot) -> Snapshot:
        """The revision that rules by now; a recode, a repair or a gc may have been at it while we look."""
        while True:
            key = record_key(snapshot.run, snapshot.step, snapshot.id, snapshot.revision + 1)
            try:
                snapshot = records.decode(self._store.get(key, limit_bytes=records.MAX_OBJECT_BYTES), Snapshot, key)
            except (*DAMAGE, StorageError):
                return snapshot

    def _is_there(self, key: str) -> bool:
        """Whether an object is listed, or has been put since."""
        if key not in self.sizes:
            try:
                self.sizes[key] = self._store.stat(key).size_bytes
            except NotFoundError:
                return False
        return True

    def _manifests(self, snapshot: Snapshot) -> tuple[list[tuple[ManifestRef, Manifest]], dict[str, object]]:
        """A snapshot's manifests, those that read; and by key what is wrong with the others, and with lost packs."""
        found, wrong = [], dict[str, object]()
        for ref in snapshot.manifests:
            try:
                read = self._manifest(ref)
            except DAMAGE as error:
                wrong[ref.key] = error
                continue
            found.append((ref, read))
            keys = map(pack_key, read.header.pack_names)
            wrong.update({key: f"{key} is missing" for key in keys if not self._is_there(key)})
        return found, wrong

    def _snapshot(self, snapshot: Snapshot, seen: set[bytes]) -> set[str]:
        """Look at a snapshot's manifests and all that they refer to; the keys it needs."""
        found, wrong = self._manifests(snapshot)
        while wrong and (now := self._now(snapshot)).key != snapshot.key:
            self.ruling[snapshot.id] = snapshot = now
            if snapshot.state not in (COMMITTED, FORGOTTEN):
                return set()
            found, wrong = self._manifests(snapshot)
        needed = {ref.key for ref in snapshot.manifests}
        for ref in snapshot.manifests:
            if ref.key in wrong:
                self._without_manifest(snapshot, ref.key, wrong[ref.key])
        for _, read in found:
            keys = [pack_key(name) for name in read.header.pack_names]
            for key, size in zip(keys, read.header.pack_size_list, strict=True):
                if key in wrong:
                    self.packs.why.setdefault(key, str(wrong[key]))
                elif self.sizes[key] != size:
                    self.packs.why.setdefault(
                        key, f"{key} has {self.sizes[key]} bytes, expected {size}: cut short or altered"
                    )
        failed: dict[str, dict[int, SnapstoreError]] = {}
        if self.result.level == "restore":
            failed = {ref.sha256: self._unbuilt(snapshot, read, seen) for ref, read in found}
            if any(failed.values()) and (now := self._now(snapshot)).key != snapshot.key:
                # Rewritten, and the old packs collected, while its chunks were rebuilt.
                self.ruling[snapshot.id] = now
                return self._snapshot(now, seen) if now.state in (COMMITTED, FORGOTTEN) else set()
        for ref, read in found:
            keys = [pack_key(name) for name in read.header.pack_names]
            needed.update(keys)
            lost = self.packs.lost(read)
            for number in np.unique(read.table.ref_packs[lost]).tolist():
                self._suffer.setdefault(keys[number], set()).add(snapshot.id)
            self._condemn(snapshot, read, failed.pop(ref.sha256, {}))
            for key in (key for key in keys if key in self.packs):
                self.need.setdefault(key, set()).add(snapshot.id)
            if self.packs.within(read).any():
                self.affected.setdefault(snapshot.id, []).append(ref.sha256)
        if len(found) == len(snapshot.manifests):
            self._tree(snapshot, [read for _, read in found])
        return needed

    def _manifest(self, ref: ManifestRef) -> Manifest:
        from ..restore.pipeline import check_layouts

        try:
            read = manifest.read(self._store, ref, self.digest_seed)
            check_layouts(read, ref.key)
        except StorageError as error:
            raise self._unreadable(ref.key, error) from error
        except FormatError as error:  # its SHA-256 is its name: it was written so, by a release that knows more
            raise UnknownFormatError(str(error)) from error
        return read

    def _without_manifest(self, snapshot: Snapshot, key: str, error: object) -> None:
        why = strip_hint(f"{snapshot.ref}: {error}")
        if isinstance(error, UnknownFormatError):
            self.unknown.add(snapshot.id)
            self._report("manifest", key, f"{why}; it is as it was written, and left alone", command="")
            return
        self.without_manifest[snapshot.id] = why
        if snapshot.state == COMMITTED:
            self._report("manifest", key, why, [snapshot.id], command=DROP, instead=f"forgets it; {COPY} keeps it")
        else:
            self._report("manifest", key, why, [snapshot.id], command=GC)

    def _tree(self, snapshot: Snapshot, manifests: Sequence[Manifest]) -> None:
        """The trees, the tensors and the parts belong together."""
        try:
            check_tree(manifests)
        except FormatError as error:
            self._without_manifest(snapshot, snapshot.key, error)

    # -- restore

    def _prove(self, snapshot: Snapshot, seen: set[bytes]) -> None:
        """Rebuild a snapshot's chunks, and all that they build on; `seen` gets the chains that are good.

        From the newest snapshot to the oldest, so that every blob is decoded about once. The others are found then.
        """
        for ref in snapshot.manifests:
            with suppress(*DAMAGE):
                self._unbuilt(snapshot, self._manifest(ref), seen, prove=True)

    def _unbuilt(
        self, snapshot: Snapshot, m: Manifest, seen: set[bytes], *, prove: bool = False
    ) -> dict[int, SnapstoreError]:
        """Rebuild every chunk; chains that are known to be good are rebuilt no more, lost ones not at all."""
        names, links, starts = _chains(m), _links(m), m.table.starts.tolist()
        without = set(lost_rows(m, self.packs.lost(m)).tolist())
        first = {names[starts[row]]: row for row in reversed(range(len(m.table))) if row not in without}
        rows = sorted(row for name, row in first.items() if name not in seen)
        decoded = int((m.table.lengths[rows].astype(np.int64) * m.table.ref_counts[rows]).sum())
        log.info("%s: %s to decode for level 'restore'", snapshot.ref, human_bytes(decoded))
        proven: dict[int, list[bytes]] | None = {} if prove else None
        try:
            self._budget.spend(decoded, f"{snapshot.ref}, and the snapshots that were looked at before")
            failed = unbuilt(self._context, m, rows, proven) if rows else {}
        except CapabilityError as error:
            failed = dict.fromkeys(rows, error)
        seen.update(names[starts[row]] for row in rows if row not in failed)
        for row, digests in (proven or {}).items():
            refs = range(starts[row], starts[row] + len(digests))
            seen.update(names[ref] for ref, digest in zip(refs, digests, strict=True) if links[ref].endswith(digest))
        bad = {name: failed[row] for name, row in first.items() if row in failed}
        return {row: bad[name] for row in range(len(m.table)) if (name := names[starts[row]]) in bad}

    def _condemn(self, snapshot: Snapshot, m: Manifest, failed: dict[int, SnapstoreError]) -> None:
        """Report the chunks that could not be rebuilt; their newest blobs are never believed again."""
        lacks = {row: error for row, error in failed.items() if isinstance(error, CapabilityError)}
        if lacks:
            self.unknown.add(snapshot.id)
        for lack in list(lacks.values())[:1]:  # no damage, so nobody suffers; but nobody can say that all is well
            message = f"{snapshot.ref}: {part_name(m.header.part)} cannot be rebuilt here: {lack}"
            self._report("chunk", m.header.part, message, command="")
        failed = {row: error for row, error in failed.items() if row not in lacks}
        for row, error in list(failed.items())[:CHUNKS_NAMED]:
            self._report(
                "chunk", m.header.part, f"{snapshot.ref}: {_tensor_of(m, row)}: {error}", [snapshot.id],
                command=REPAIR_CHUNKS,
            )  # fmt: skip
        if len(failed) > CHUNKS_NAMED:
            message = f"{snapshot.ref}: chunks lost beside these: {len(failed) - CHUNKS_NAMED}"
            self._report("chunk", m.header.part, message, [snapshot.id], command=REPAIR_CHUNKS)
        for row, error in failed.items():
            ref = int(m.table.starts[row])
            key = pack_key(m.header.pack_names[m.table.ref_packs[ref]])
            if isinstance(error, StorageError):  # it may be read tomorrow: the pack is damaged, no blob is condemned
                self.packs.why.setdefault(key, f"{key}: a blob cannot be read: {strip_hint(error)}")
            else:
                self.packs.give_up(key, int(m.table.ref_offsets[ref]))


def _links(m: Manifest) -> list[bytes]:
    """Of each reference the pack, the offset and the digest of the chunk that it stands for, (k,)."""
    table = m.table
    links = np.zeros(len(table.ref_packs), [("pack", "V32"), ("offset", "<u8"), ("digest", "V16")])
    if len(links):
        links["pack"] = np.frombuffer(m.header.packs, "V32")[table.ref_packs]
        links["offset"] = table.ref_offsets
        links["digest"] = np.ascontiguousarray(table.ref_digests).view("V16").reshape(-1)
        links["digest"][table.starts[:-1]] = np.ascontiguousarray(table.digests).view("V16").reshape(-1)
    data = links.tobytes()
    return [data[at : at + links.itemsize] for at in range(0, len(data), links.itemsize)]


def _chains(m: Manifest) -> list[bytes]:
    """Of each reference a name for the chain from there on, (k,)."""
    names, name = [], b""
    for kind, link in zip(m.table.ref_kinds[::-1].tolist(), reversed(_links(m)), strict=True):
        name = hashlib.blake2b(link + name * kind, digest_size=16).digest()  # the last of a chain is of kind 0
        names.append(name)
    return names[::-1]


def _tensor_of(m: Manifest, row: int) -> str:
    for entry in m.tensors:
        for box in entry.boxes:
            if box.first_chunk <= row < box.first_chunk + box.chunks:
                return f"{'.'.join(map(str, entry.path))}, chunk {row - box.first_chunk}"
    return f"chunk {row}"
