"""Scan the records and the small objects of a repository: the first half of a check and of a repair.

In: an open repository. Out: a RecordScan. Packs and manifests are listed, and not read: see scan_objects.py.
Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ..catalog import policy_store
from ..catalog.history import View, misnumbered
from ..catalog.joined import repeated_by_pages, void_records
from ..catalog.needed_keys import needed_keys
from ..catalog.read_twice import answers, exists, listed, tried
from ..catalog.record_listing import later_snapshots
from ..context import Context
from ..errors import DAMAGE, FormatError, IntegrityError, NotFoundError, StorageError, UnknownFormatError
from ..format import records
from ..format.keys import (
    is_note,
    lost_names,
    pack_key,
    parse_page_key,
    parse_policy_key,
    parse_record_key,
    quarantined_names,
)
from ..format.records import ABORTED, COMMITTED, FORGOTTEN, Done, Lost, Mark, Quarantine, Session, Snapshot, Wait
from ..protocol.gc import OBJECT_NAME
from ..protocol.notes import MARK_LIMIT_BYTES
from ..storage.base import ObjectInfo, ObjectStore
from ..storage.os_errors import is_withheld
from ..text import strip_hint
from .report import ACCEPT, COPY, REBUILD, REPAIR, REPAIR_CHUNKS, Findings, Problem, stand_in
from .scan_pages import PageScan, scan_pages

T = TypeVar("T")
_NOTES = {".mark": Mark, ".wait": Wait, ".done": Done, ".quarantine": Quarantine, ".lost": Lost}


@dataclass(frozen=True, slots=True)
class RecordScan:
    """The content of a repository's records and small objects. Nobody changes it.

    Attributes:
        problems: the problems so far.
        notes: damage so far that harms no snapshot.
        damaged: stand-ins for the snapshots whose ruling record is damaged or gone.
        sizes: size of every pack and manifest that is listed, by key [bytes].
        ruling: the ruling revision of every snapshot whose record can be read, by id.
        unreadable: key -> why, of the ruling records that are damaged.
        misnumbered: those of them that can be read, by key: only their seq is damaged.
        unknown: keys of the ruling records that only another release can read. They are not damaged: a repair must not
            replace them.
        vanished: keys of the records that the index knows and the store does not list.
        gone: the last vanished revision of each snapshot, unless the store shows a later one.
        outdated: ids of the snapshots in `gone` whose older record in the store stays the ruling one.
        damaged_small: keys of damaged sessions and of damaged objects of gcs.
        quarantine_notes: keys of the notes that keep packs in quarantine.
        quarantined: keys of those packs.
        noted_blobs: pack -> offsets of the blobs that its notes call misbuilt.
        noted_lost: ids of the snapshots that a note says lack a manifest.
        pages: what pages say.
    """

    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...]
    damaged: tuple[Snapshot, ...]
    sizes: Mapping[str, int]
    ruling: Mapping[str, Snapshot]
    unreadable: Mapping[str, str]
    misnumbered: Mapping[str, Snapshot]
    unknown: frozenset[str]
    vanished: tuple[str, ...]
    gone: tuple[Snapshot, ...]
    outdated: frozenset[str]
    damaged_small: tuple[str, ...]
    quarantine_notes: tuple[str, ...]
    quarantined: frozenset[str]
    noted_blobs: Mapping[str, frozenset[int]]
    noted_lost: frozenset[str]
    pages: PageScan

    def with_ruling(self, snapshots: Iterable[Snapshot]) -> RecordScan:
        """Return a copy in which these revisions rule, and their records can be read."""
        new = {snapshot.id: snapshot for snapshot in snapshots}
        unreadable = {key: why for key, why in self.unreadable.items() if stand_in(key).id not in new}
        return replace(self, ruling={**self.ruling, **new}, unreadable=unreadable)


def scan_records(context: Context) -> RecordScan:
    """Read every record and every small object, and list packs and manifests.

    Raises:
        StorageError: the store cannot be listed; a single object that cannot be read is a problem.
    """
    return _RecordScanner(context).scan()


def read_failure(store: ObjectStore, key: str, error: StorageError) -> IntegrityError:
    """Return the damage that a failed read of one object means.

    Raises:
        StorageError: the store does not answer at all, or withholds the object (`is_withheld`), which is no damage.
    """
    if is_withheld(error):
        raise error
    answers(store)
    return IntegrityError(f"{key}: cannot be read: {error}")


def read_again(store: ObjectStore, key: str, read: Callable[[], T]) -> T:
    """Return the result of reading one object; after any failure, read it a second time: one answer proves nothing.

    Raises:
        NotFoundError: it is missing.
        IntegrityError, FormatError: it is damaged, or it cannot be read though the store answers.
        StorageError: the store does not answer at all, or withholds the object.
    """
    with suppress(*DAMAGE, StorageError):
        return read()
    try:
        return read()
    except NotFoundError as error:
        if not exists(store, key):
            raise
        with suppress(NotFoundError, StorageError):  # the first read may have found damage, or a gc puts its note again
            return read()
        raise IntegrityError(f"{key}: cannot be read, although it is there") from error
    except StorageError as error:
        raise read_failure(store, key, error) from error


def has_all(context: Context, sizes: Mapping[str, int], snapshot: Snapshot) -> bool:
    """Return whether every object that a snapshot needs is listed, as its manifests' headers say."""
    keys = tried(context.store, partial(needed_keys, context.index, snapshot))
    return keys is not None and keys <= sizes.keys()


class _RecordScanner:
    """Makes one RecordScan. It lists twice, and reads an object again that is missing or damaged."""

    def __init__(self, context: Context) -> None:
        self._context, self._store, self._index = context, context.store, context.index
        self._findings = Findings()
        self._damaged: list[Snapshot] = []
        self._sizes: dict[str, int] = {}
        self._ruling: dict[str, Snapshot] = {}
        self._unreadable: dict[str, str] = {}
        self._misnumbered: dict[str, Snapshot] = {}
        self._unknown: set[str] = set()
        self._vanished: list[str] = []
        self._damaged_small: list[str] = []
        self._pages = PageScan({})
        self._noted_blobs: dict[str, set[int]] = {}

    def scan(self) -> RecordScan:
        """Read everything but packs and manifests."""
        if self._context.config_problem:
            self._findings.problem("config", "config", self._context.config_problem)
        self._list_objects()
        of_gc = list(listed(self._store, "gc/").values())
        self._read_small_objects(of_gc)
        self._read_policies()
        self._read_records()
        gone = self._gone()
        outdated = frozenset(snapshot.id for snapshot in gone if self._stays_outdated(snapshot))
        self._report_vanished({snapshot.id: snapshot for snapshot in gone}, outdated)
        notes = [info.key for info in of_gc if quarantined_names([info.key])]
        return RecordScan(
            problems=tuple(self._findings.problems),
            notes=tuple(self._findings.notes),
            damaged=tuple(self._damaged),
            sizes=self._sizes,
            ruling=self._ruling,
            unreadable=self._unreadable,
            misnumbered=self._misnumbered,
            unknown=frozenset(self._unknown),
            vanished=tuple(self._vanished),
            gone=tuple(gone),
            outdated=outdated,
            damaged_small=tuple(self._damaged_small),
            quarantine_notes=tuple(notes),
            quarantined=frozenset(quarantined_names(notes)),
            noted_blobs={key: frozenset(offsets) for key, offsets in self._noted_blobs.items()},
            noted_lost=frozenset(lost_names(info.key for info in of_gc)),
            pages=self._pages,
        )

    def _list_objects(self) -> None:
        for prefix in ("packs/", "manifests/"):
            for info in listed(self._store, prefix).values():
                if OBJECT_NAME.fullmatch(info.key):
                    self._sizes[info.key] = info.size_bytes
                else:
                    self._findings.stray(prefix[:-2], info.key)

    def _read(self, key: str, decode: Callable[[bytes], T], *, limit_bytes: int = records.MAX_OBJECT_BYTES) -> T:
        """Return a listed object, decoded; raise as `read_again` does."""
        return read_again(self._store, key, lambda: decode(self._store.get(key, limit_bytes=limit_bytes)))

    # -- small objects

    def _read_small_objects(self, of_gc: Iterable[ObjectInfo]) -> None:
        """Read sessions, and the objects that gcs and repairs have written."""
        sessions = listed(self._store, "sessions/").values()
        for kind, info in [("gc", i) for i in of_gc] + [("session", i) for i in sessions]:
            suffix = "." + info.key.rpartition(".")[2]
            if kind == "gc" and not is_note(info.key):
                self._findings.stray(kind, info.key)
                continue
            type_: Any = _NOTES[suffix] if kind == "gc" else Session
            try:
                decode = partial(records.decode, kind=type_, key=info.key)
                found = self._read(info.key, decode, limit_bytes=MARK_LIMIT_BYTES)
            except NotFoundError:
                continue  # it was removed since it was listed
            except UnknownFormatError as error:
                self._findings.problem(kind, info.key, error, command="")
            except DAMAGE as error:
                self._damaged_small.append(info.key)
                # Only rebuilding tells which blobs a damaged note of quarantine names.
                command = REPAIR_CHUNKS if quarantined_names([info.key]) else REPAIR
                self._findings.problem(kind, info.key, error, command=command)
            else:
                if isinstance(found, Quarantine):
                    self._noted_blobs.setdefault(pack_key(found.pack), set()).update(found.blobs)

    def _read_policies(self) -> None:
        """Read retention policies. A damaged one that a newer one replaces does no harm."""
        newest: dict[str, int] = {}
        found: list[tuple[str, int, str]] = []
        for key in listed(self._store, "policies/"):
            parsed = parse_policy_key(key)
            if parsed is None:
                self._findings.stray("policy", key)
                continue
            run, revision = parsed
            found.append((run, revision, key))
            newest[run] = max(newest.get(run, 0), revision)
        for run, number, key in found:
            try:
                self._read(key, partial(policy_store.decode, key=key))
            except UnknownFormatError as error:
                self._findings.problem("policy", key, error, command="")
            except NotFoundError:
                continue
            except DAMAGE as error:
                if number < newest[run]:
                    self._findings.note("policy", key, f"{error}; newer policies replace it, nothing is lost")
                    continue
                message = f"{error}; set the policies of run {run!r} again"
                self._findings.problem("policy", key, message, command=f"snapstore forget --run {run} --keep-...")

    # -- records

    def _read_records(self) -> None:
        """Read every record from the store itself, newest revisions first, and compare it with the index."""
        view = self._view()
        infos = listed(self._store, "snapshots/")
        for key in [key for key in infos if parse_record_key(key) is None]:
            self._findings.stray("record", key)
            del infos[key]
        self._pages = scan_pages(self._store, self._findings) if self._index.pages.exist else PageScan({})
        joined = self._pages.joined
        known = {key: why for key, why in (view.damaged if view is not None else {}).items() if parse_page_key(key)}
        gone = known.keys() - {key for one in joined.values() for key in one.damaged}
        self._pages = replace(self._pages, gone=tuple(sorted(gone)))
        for key in self._pages.gone:
            self._findings.problem("index", key, known[key], command=ACCEPT)
        for key, why in (later_snapshots(infos.values()) | repeated_by_pages(infos, joined)).items():
            self._findings.problem("record", key, why, command="")
            del infos[key]
        for key in void_records(infos, joined):
            del infos[key]
        decided: set[str] = set()  # ids of the snapshots whose ruling revision was read, or could not be
        for key in sorted(infos, key=lambda key: (int(key.rpartition(".")[2]), key), reverse=True):
            name = stand_in(key).id
            rules = name not in decided
            try:
                found = self._read_record(key)
                if found.key in infos and found.id == name and found.key != key:
                    message = f"{key}: a copy of {found.key} under another key, which hides that record; remove it"
                    self._findings.problem("record", key, message, [name] if rules else [], command="")
                    continue
                if found.key != key:
                    raise IntegrityError(f"{key}: holds the record of {found.key}")
            except NotFoundError:
                continue  # it was removed since it was listed
            except UnknownFormatError as error:
                if rules:
                    self._unknown.add(key)
                    self._findings.problem("record", key, error, command="")
            except DAMAGE as error:
                self._report_damaged_record(key, error, rules=rules)
            else:
                if rules:
                    self._ruling[name] = found
                    self._compare_with_index(found, view)
                    self._read_metadata(found)
            decided.add(name)
        for one in joined.values():
            for name, (key, why) in one.unknown.items():
                if name not in decided:
                    self._unknown.add(key)
                    self._findings.problem("record", key, why, command="")
            rest = {s.id: s for s in one.records(None, decided)}
            self._ruling |= rest
            for found in rest.values():
                self._compare_with_index(found, view)
                self._read_metadata(found)
        for key, why in misnumbered(self._ruling.values()).items():
            self._misnumbered[key] = self._ruling.pop(stand_in(key).id)
            self._report_damaged_record(key, IntegrityError(why), rules=True)

    def _read_record(self, key: str) -> Snapshot:
        """Return the record under a key; it may be that of another key. Raises as `_read` does."""
        decode = partial(records.unpack, kind=Snapshot, key=key)
        found = self._read(key, decode)
        return found if found.key == key else self._read(key, decode)

    def _view(self) -> View | None:
        """Return what the index shows; None: it cannot refresh, and the scan will find why."""
        try:
            view = self._index.refresh(list_twice=True)
        except StorageError as error:
            failure = read_failure(self._store, "snapshots/", error)
            self._findings.note("index", "snapshots/", f"not compared with the index: {failure}")
            return None
        self._vanished = view.vanished
        return view

    def _report_damaged_record(self, key: str, error: Exception, *, rules: bool) -> None:
        if not rules:
            message = f"{error}; a later revision replaces it; only the content of this revision is lost"
            self._findings.note("record", key, message)
            return
        self._unreadable[key] = strip_hint(error)
        self._findings.problem("record", key, error, [stand_in(key).id])
        self._damaged.append(stand_in(key))

    def _compare_with_index(self, found: Snapshot, view: View | None) -> None:
        known = view.get(found.id) if view else None
        is_other = known is not None and known.revision == found.revision and known.write_id != found.write_id
        if is_other and found.write_id and self._index.pages.exist:
            known = self._index.refresh(found.run).get(found.id)  # one was void, and a join has deleted it
        if known is None or known.revision != found.revision or not (known.write_id and found.write_id):
            return
        if records.encode(known) != records.encode(found):  # not `known != found`: metrics may be NaN
            self._findings.problem("index", found.key, f"{found.key}: differs from the index", command=REBUILD)

    def _read_metadata(self, found: Snapshot) -> None:
        """Report metadata that cannot be read; no restore needs them."""
        try:
            _ = found.metadata
        except FormatError as error:
            message = f"{found.ref}: {found.key}: its metadata cannot be read: {error}; its state can be restored"
            self._findings.problem("record", found.key, message, command="")

    # -- records that vanished

    def _gone(self) -> list[Snapshot]:
        """Return the last vanished revision of each snapshot, unless the store shows a later one."""
        gone = filter(None, map(self._index.cached, self._vanished))
        last = {s.id: s for s in sorted(gone, key=lambda s: (s.revision, s.key))}
        return [s for s in last.values() if s.id not in self._ruling or self._ruling[s.id].revision < s.revision]

    def _stays_outdated(self, gone: Snapshot) -> bool:
        """Return whether a repair keeps the older record in the store, although the index knows a later revision.

        This happens if an older backup was put back, for example. The vanished revision may have forgotten, swept or
        rewritten the snapshot. A repair writes it again only if that loses nothing: it is committed and everything that
        it needs is there, or the older state is neither complete nor easier to heal. The first record of a copy, which
        is aborted, is no older state.
        """
        older, kept = self._ruling.get(gone.id), gone.state in (COMMITTED, FORGOTTEN)
        if older is not None and older.state == ABORTED:
            older = None
        unknown = older is None and gone.id in self._unread_ids()
        if unknown or (older is not None and older.state in (COMMITTED, FORGOTTEN) and self._has_all(older)):
            return not (gone.state == COMMITTED and self._has_all(gone))
        there = [[ref.key in self._sizes for ref in s.manifests] for s in (gone, older) if s is not None]
        if not kept:
            return any(map(any, there))
        if older is None or self._has_all(gone):
            return False
        return all(there[1]) or not all(there[0])

    def _has_all(self, snapshot: Snapshot) -> bool:
        return has_all(self._context, self._sizes, snapshot)

    def _unread_ids(self) -> set[str]:
        """Return ids of the snapshots whose ruling record is damaged or of another version."""
        return {stand_in(key).id for key in (*self._unreadable, *self._unknown)}

    def _report_vanished(self, gone_by_id: Mapping[str, Snapshot], outdated: frozenset[str]) -> None:
        """Report the records that the index knows and the store does not list, and what to do about each."""
        shown = {s.id for s in self._ruling.values() if s.state != ABORTED} | self._unread_ids()
        for key in self._vanished:
            why, name = f"{key}: known to the index, not in the store", stand_in(key).id
            gone = gone_by_id.get(name)
            if name in outdated:
                why += "; it seems that a backup older than the index was put back"
                instead = f"accepts the repository as it is; to get the later record back, {COPY}"
                self._findings.problem("index", key, why, command=ACCEPT, instead=instead)
            elif gone is not None and gone.key == key and gone.state in (COMMITTED, FORGOTTEN) and name not in shown:
                self._damaged.append(stand_in(key))
                instead = f"puts it back; if it was removed on purpose, '{ACCEPT}' abandons it"
                self._findings.problem("index", key, why, [name], instead=instead)
            else:
                self._findings.problem("index", key, why)
