"""History: answer questions about snapshots from one listing of their records.

In: the ruling (highest) revision of every snapshot's record, the keys of records that are damaged or cannot be read,
and records that have vanished. Out: references resolved, lineage, sequence numbers, all from memory; only `run@best`
reads the policies of the run. If a record that is unknown might change an answer, the answer is an error. A View never
changes: any thread may use it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

from .. import retention
from ..checks import check_ref
from ..errors import IntegrityError, InvalidInputError, NotFoundError, StorageError, UnreadRecordError
from ..format import records
from ..format.keys import ID_DIGITS, NAME, parse_record_key
from ..format.records import COMMITTED, FORGOTTEN, SWEPT, Snapshot
from ..storage.base import ObjectStore
from ..text import counted, quoted, some, strip_hint
from . import policy_store
from .joined import TAGGED, WHOLE, Joined
from .record_listing import copied

#: The advice for records that have vanished: the index may hold the last copy.
PUT_BACK = (
    "run 'snapstore repair --apply', which puts missing records back from the index, or, if they were removed on "
    "purpose, 'snapstore index rebuild --forget-missing', after which 'snapstore gc --unexplained' deletes their bytes"
)

#: References, for people.
FORMS = "run@step, run@latest, run@highest, run@best, run@best:METRIC, run@tag or an id"
#: The lowest sequence number of a save. Copies of snapshots that are older than the first save get lower ones.
FIRST_SEQ = 1_000_000
#: The reason of a snapshot begins with this if a repair has forgotten it because it stays damaged.
DROPPED = "damaged: "
#: An id in a reference: fewer digits without `id:` might be meant as a step.
_ID = re.compile(r"id:|[0-9a-fA-F]{8,32}\Z")


class View:
    """The ruling revision of every snapshot, as one listing showed it.

    Attributes:
        only_run: the listing showed the records of this run alone, so a question about other runs is an AssertionError:
            no gc can act on such a View. None: it showed all records.
        damaged: key -> why its record cannot be decoded, or believed (`misnumbered`).
        unread: key -> why its record could not be read, though the store answers: a later read may succeed.
        repeated: key -> why its record is left out: it repeats the id of another snapshot. One of the two is forged.
        vanished: keys that the index knows and the listing did not show: a gc must not act on such a listing.
        missing: the vanished records that were ruling, as far as the index knows; older revisions are never read.
    """

    only_run: str | None = None

    def __init__(
        self,
        ruling: Iterable[Snapshot],
        damaged: dict[str, str],
        vanished: Sequence[Snapshot],
        unread: Mapping[str, str] | None = None,
        known: Mapping[str, Snapshot] | None = None,
        repeated: Mapping[str, str] | None = None,
        store: ObjectStore | None = None,
    ) -> None:
        self._given = list(ruling), damaged, vanished, dict(known or {})
        self._store = store  # for the policies that `run@best` needs
        self._by_run: dict[str, list[Snapshot]] = {}  # these two are filled once a run is asked for
        self._tagged: dict[str, dict[str, list[Snapshot]]] = {}
        self.unread, self.repeated = dict(unread or {}), dict(repeated or {})
        self.vanished = [snapshot.key for snapshot in vanished]
        self._decide({})

    def _decide(self, joined: Mapping[str, Joined], only_run: str | None = None) -> View:
        """Decide which records are believed, given what pages say by run; return this View."""
        self.only_run = only_run
        ruling, damaged, vanished, known = self._given
        self._joined = joined
        wrong = misnumbered(ruling, joined)
        self._by_id = {snapshot.id: snapshot for snapshot in ruling if not wrong or snapshot.key not in wrong}
        known_by = {parsed[2] for parsed in map(parse_record_key, (*damaged, *wrong, *self.unread)) if parsed}
        self._loose = self._by_id.keys() | known_by  # the ids about which pages are not asked
        self.damaged = {**damaged, **wrong, **self._damaged_in_pages()}
        self._grouped: dict[str, list[Snapshot]] = {}
        self._known = dict(known)  # id -> another revision, where a damaged or unread record has one
        self.missing = self._missing(vanished) if vanished else []
        self._known |= {snapshot.id: snapshot for snapshot in self.missing}
        return self

    def _missing(self, vanished: Iterable[Snapshot]) -> list[Snapshot]:
        """Return the newest vanished revision of each snapshot for which no later revision is listed."""
        shown = {snapshot.id: snapshot.revision for snapshot in self._by_id.values()}
        for _, _, name, revision in filter(None, map(parse_record_key, (*self.damaged, *self.unread))):
            shown[name] = revision
        for run, one in self._joined.items():
            names = [s.id for s in vanished if s.run == run]
            shown |= {
                name: max(shown.get(name, -1), found)
                for name, found in zip(names, one.revisions_of(names), strict=True)
            }
        last: dict[str, Snapshot] = {}
        for snapshot in sorted(vanished, key=lambda s: s.revision):
            if snapshot.revision > shown.get(snapshot.id, -1):
                last[snapshot.id] = snapshot
        return sorted(last.values(), key=lambda s: (s.run, s.seq, s.id))

    def with_revisions(self, made: Iterable[Snapshot]) -> View:
        """Return this View with later revisions of some of its snapshots, which this process has made since."""
        view = copy.copy(self)
        view._by_id = {**self._by_id, **{snapshot.id: snapshot for snapshot in made}}
        view._loose = self._loose | view._by_id.keys()
        view._by_run, view._tagged, view._grouped = {}, {}, {}
        return view

    def _damaged_in_pages(self) -> dict[str, str]:
        """Return key -> why of damaged pages, and of those of their records that do not decode."""
        found: dict[str, str] = {}
        for one in self._joined.values():
            found |= one.damaged
            found |= {key: why for name, (key, why) in one.unknown.items() if name not in self._loose}
        return found

    def _require_listed(self, run: str | None = None) -> None:
        """Raise AssertionError if the listing did not show all records of a run (None: of all runs)."""
        if self.only_run not in (None, run):
            raise AssertionError(f"a listing of run {self.only_run!r} says nothing about {run or 'all runs'!r}")

    def _unknown(self, run: str | None = None) -> Iterator[tuple[int, str, str]]:
        """Yield (step, id, key) of every snapshot of a run (None: of all) whose ruling record is not known."""
        self._require_listed(run)
        for key in (*self.damaged, *self.unread):
            parsed = parse_record_key(key)
            if parsed is not None and run in (None, parsed[0]):
                yield parsed[1], parsed[2], key
        for s in self.missing:
            shown, one = self._by_id.get(s.id), self._joined.get(s.run)
            in_page = one.state_of(s.id) if one is not None and s.id not in self._loose else None
            is_listed = COMMITTED in (shown.state if shown is not None else None, in_page)
            if run in (None, s.run) and s.state in (COMMITTED, FORGOTTEN) and not is_listed:
                yield s.step, s.id, s.key  # else a committed revision is listed, or a gc has deleted the bytes

    def unknown_ids(self, run: str) -> dict[str, tuple[str, Snapshot | None]]:
        """Return the snapshots of a run whose records are not known: id -> (the record's key, another revision).

        The seq and the date of the other revision are those of the record; None: there is none.
        """
        return {name: (key, self._known.get(name)) for _, name, key in self._unknown(run)}

    def require_last(self, snapshot: Snapshot) -> None:
        """Raise IntegrityError if a later record of a snapshot is gone: its tags and its state are not known."""
        for s in self.missing:
            if s.id == snapshot.id:
                raise IntegrityError(
                    f"{snapshot.ref}: its last record {s.key} is gone; nothing was changed; {PUT_BACK}"
                )

    def unknown(self, run: str | None = None) -> dict[str, str]:
        """Return the records of a run (None: of all runs) that are damaged, unread, repeated or gone: key -> why."""
        self._require_listed(run)
        gone = {s.key: "is gone" for s in self.missing if s.state in (COMMITTED, FORGOTTEN)}
        found = {**self.damaged, **self.unread, **self.repeated, **gone}
        keys = [(key, parse_record_key(key)) for key in found]
        return {key: found[key] for key, parsed in keys if run is None or parsed is None or parsed[0] == run}

    def require_all_records(self, verb: str, outcome: str) -> None:
        """Raise unless every record is there and can be read; the error names the verb and its outcome.

        Raises:
            IntegrityError: a record is damaged, missing or forged.
            StorageError: a record cannot be read.
        """
        self._require_listed()
        if self.damaged:
            raise IntegrityError(f"{verb}: {_first(self.damaged)}; {outcome}; run 'snapstore check'")
        if self.unread:
            raise StorageError(f"{verb}: {_first(self.unread)}; {outcome}; try again, or run 'snapstore check'")
        if self.repeated:
            raise IntegrityError(f"{verb}: {_first(self.repeated)}; {outcome}")
        if self.vanished:
            raise IntegrityError(
                f"{verb}: the listing lacks {counted(len(self.vanished), 'known record')}, first {self.vanished[0]}; "
                f"{outcome}; {PUT_BACK}"
            )

    def is_unknown(self, snapshot_id: str, run: str | None = None) -> bool:
        """Return whether there is such a snapshot, of a run or of any, whose record cannot be read or is gone."""
        return any(name == snapshot_id for _, name, _ in self._unknown(run))

    def require_record(self, snapshot_id: str, run: str | None = None) -> None:
        """Raise if there is such a snapshot, of a run or of any, whose record cannot be read or is gone.

        Raises:
            UnreadRecordError: it could not be read; it may be next time.
            IntegrityError: it is damaged or gone.
        """
        for _, name, key in self._unknown(run):
            if name == snapshot_id and key in self.unread:
                why = strip_hint(self.unread[key]).removeprefix(f"{key}: ")
                raise UnreadRecordError(f"its record {key} cannot be read: {why}; try again")
            if name == snapshot_id:
                raise IntegrityError(f"its record {key} is damaged or gone; run 'snapstore check'")

    def unknown_steps(self, run: str) -> dict[str, int]:
        """Return the snapshots of a run whose record is damaged, unread or gone: id -> step."""
        return {name: step for step, name, _ in self._unknown(run)}

    def require_all_known(
        self, asked: str, run: str, besides: Container[str] = (), matters: Callable[[int], bool] = lambda step: True
    ) -> None:
        """Raise if a snapshot of a run, of a step that matters, has a record that is not known.

        Args:
            asked: the question, for the error.
            besides: ids that do not matter: another store has their records.
            matters: returns whether a snapshot of this step may change the answer.

        Raises:
            StorageError: its record could not be read.
            IntegrityError: its record is damaged or gone.
        """
        for name, step in self.unknown_steps(run).items():
            if matters(step) and name not in besides:
                self.require_known(asked, run, snapshot_id=name)

    def require_known(
        self, asked: str, run: str, found: Snapshot | None = None, step: int | None = None, snapshot_id: str = ""
    ) -> None:
        """Raise if the answer may be a snapshot whose record is not known, instead of `found`.

        Args:
            asked: the reference, for the error.
            step, snapshot_id: only a snapshot with these may be the answer; None, empty: with any.

        Raises:
            StorageError: its record could not be read.
            IntegrityError: its record is damaged or gone.
        """
        for of_step, name, key in self._unknown(run):
            known = self._known.get(name)
            older = found is not None and known is not None and (known.seq, name) < (found.seq, found.id)
            if older or (step is not None and of_step != step) or snapshot_id not in ("", name):
                continue
            kind = StorageError if key in self.unread else IntegrityError
            instead = f"; or name the one that can be read, id:{found.id[:12]} ({found.ref})" if found else ""
            why = self.damaged.get(key) or self.unread.get(key)
            gone = f"is gone: the index knows {key}, which is not in the store; {PUT_BACK}"
            problem = f"cannot be read: {strip_hint(why)}; run 'snapstore repair'" if why else gone
            raise kind(f"{asked}: may be {run}@{of_step} (id:{name[:12]}), whose record {problem}{instead}")

    def snapshots(self, run: str | None = None, states: tuple[str, ...] | None = (COMMITTED,)) -> list[Snapshot]:
        """Return the snapshots of a run (None: of all runs) in some states (None: in any), sorted by run and seq."""
        return [copied(s) for s in self._chosen(run, states)]

    def last(self, run: str, count: int) -> list[Snapshot]:
        """Return the last committed snapshots of a run, as `snapshots` sorts them; no others are decoded."""
        self._require_listed(run)
        found = [s for s in self._loose_of(run) if s.state == COMMITTED]
        one = self._joined.get(run)
        if one is not None and one.seqs and sum(s.seq > one.seqs[-1] for s in found) < count:
            found += one.last(count, self._loose)
        return [copied(s) for s in sorted(found, key=lambda s: (s.seq, s.id))[-count:]]

    def _chosen(self, run: str | None = None, states: tuple[str, ...] | None = (COMMITTED,)) -> list[Snapshot]:
        """Return the same as `snapshots`, not copied, so only for use in here."""
        if run is not None and states == (COMMITTED,):
            return self._committed(run)
        self._require_listed(run)
        loose = (s for s in self._loose_of(run) if states is None or s.state in states)
        return sorted((*loose, *self._of_pages(run, states)), key=lambda s: (s.run, s.seq, s.id))

    def _loose_of(self, run: str | None) -> Collection[Snapshot]:
        """Return the snapshots of a run (None: of all) whose records are loose."""
        if run is None:
            return self._by_id.values()
        if not self._grouped:
            for snapshot in self._by_id.values():
                self._grouped.setdefault(snapshot.run, []).append(snapshot)
        return self._grouped.get(run, [])

    def _of_pages(self, run: str | None, states: tuple[str, ...] | None, flags: int = 0) -> Iterator[Snapshot]:
        """Yield the records of a run (None: of all) that pages have, see `Joined.records`."""
        for one in self._joined.values():
            if run in (None, one.run):
                yield from one.records(states, self._loose, flags=flags)

    def _committed(self, run: str) -> list[Snapshot]:
        """Return the committed snapshots of a run, oldest first; the list is sorted once."""
        self._require_listed(run)
        if run not in self._by_run:
            loose = (s for s in self._loose_of(run) if s.state == COMMITTED)
            of_pages = self._of_pages(run, (COMMITTED,))
            self._by_run[run] = sorted((*loose, *of_pages), key=lambda s: (s.seq, s.id))
        return self._by_run[run]

    def has(self, run: str, states: tuple[str, ...] | None = (COMMITTED,)) -> bool:
        """Return whether there is a snapshot of a run in some states (None: in any)."""
        self._require_listed(run)
        if any(states is None or s.state in states for s in self._loose_of(run)):
            return True
        return run in self._joined and self._joined[run].has(states, self._loose)

    def require_run(self, run: str, states: tuple[str, ...] | None = (COMMITTED,)) -> None:
        """Raise unless there is a snapshot of this run in one of the states (None: in any).

        Raises:
            NotFoundError: there is none; the message lists the runs.
            IntegrityError, StorageError: it may have one, whose record is gone or cannot be read.
        """
        if not self.has(run, states):
            self.require_known(f"run {quoted(run)}", run)
            there = "" if self.only_run else f"; runs: {', '.join(self.runs(states)) or 'none'}"
            raise NotFoundError(f"run {quoted(run)}: has no snapshots in this repository{there}")

    def get(self, snapshot_id: str) -> Snapshot | None:
        """Return the snapshot of this full id, in any state; None if the listing showed none."""
        if (found := self._by_id.get(snapshot_id)) is not None:
            return copied(found)
        is_id = len(snapshot_id) == ID_DIGITS and set(snapshot_id) <= set("0123456789abcdef")
        found_in = (one.record_of(snapshot_id) for one in self._joined.values() if is_id)
        found = next((one for one in found_in if one is not None), None) if snapshot_id not in self._loose else None
        return copied(found) if found is not None else None

    def with_records(self) -> list[Snapshot]:
        """Return the snapshots whose records are there whole: all but those of which pages keep graves."""
        return [copied(s) for s in (*self._by_id.values(), *self._of_pages(None, None, WHOLE))]

    def tagged(self, run: str) -> dict[str, list[Snapshot]]:
        """Return the committed snapshots with each tag of a run, in their order. The tag means the last of them."""
        if run not in self._tagged:
            found: dict[str, list[Snapshot]] = {}
            self._require_listed(run)
            loose = (s for s in self._loose_of(run) if s.state == COMMITTED)
            of_pages = self._of_pages(run, (COMMITTED,), TAGGED)
            for snapshot in sorted((*loose, *of_pages), key=lambda s: (s.seq, s.id)):
                for name in snapshot.tags:
                    found.setdefault(name, []).append(copied(snapshot))
            self._tagged[run] = found
        return self._tagged[run]

    def tags_of(self, snapshot: Snapshot) -> list[str]:
        """Return the tags of a snapshot, except each one that means a later snapshot."""
        tagged = self.tagged(snapshot.run)
        return [name for name in snapshot.tags if name not in tagged or tagged[name][-1].id == snapshot.id]

    def tags_for(self, other: View, snapshot: Snapshot, keeps: Callable[[Snapshot], bool]) -> list[str]:
        """Return the tags that a copy of a snapshot gets in another store.

        Args:
            other: the view of that store.
            keeps: returns whether a snapshot there keeps a tag that it has.
        """
        tagged = other.tagged(snapshot.run)
        return [name for name in self.tags_of(snapshot) if not any(map(keeps, tagged.get(name, ())))]

    def newest(self, run: str) -> Snapshot | None:
        """Return the readable committed snapshot of the highest seq; None if there is none."""
        found = self.last(run, 1)
        return found[0] if found else None

    def latest(self, run: str) -> Snapshot | None:
        """Return the newest committed snapshot; None if there is none. Unlike `newest`, raise if that is not certain.

        Raises:
            IntegrityError, StorageError: a record that may be newer is gone, or cannot be read.
        """
        found = self.newest(run)
        self.require_known(f"{run}@latest", run, found)
        return found

    def latest_beside(self, other: View, run: str, asked: str, besides: Container[str] = ()) -> Snapshot | None:
        """Return the newest committed snapshot.

        Raise as `latest` does, unless the other store has the record, and it decides nothing.

        Args:
            other: the view of the other store of the run, where `latest` is certain.
            asked: the question, for the error.
            besides: ids of snapshots that are not to be the answer.

        Raises:
            IntegrityError, StorageError: a record that may be newer is gone, or cannot be read.
        """
        found = next((copied(s) for s in reversed(self._committed(run)) if s.id not in besides), None)
        last = other.newest(run)
        known = [s for s in (found, self.get(last.id) if last else None) if s is not None]
        last_here = max(known, key=lambda s: (s.seq, s.id), default=None)
        for name in self.unknown_steps(run):
            held = other.get(name)
            is_older = held is not None and last is not None and (held.seq, held.id) <= (last.seq, last.id)
            if not is_older and name not in besides and not other.is_unknown(name, run):
                self.require_known(asked, run, last_here, snapshot_id=name)
        return found

    def next_seq(self, run: str, at_least: int = 0) -> int:
        """Return the next sequence number of a run, from `FIRST_SEQ` on, above that of any unreadable record.

        If the number of such a record is unknown, numbers are left free for it: otherwise a save could have the same
        number as that record once it is repaired.

        Args:
            at_least: the lowest number to return, as far as one save may raise it; see `records.highest_seq`.

        Raises:
            InvalidInputError: (forged) records have used the highest numbers, so none can follow.
        """
        names = {name for _, name, _ in self._unknown(run)}
        of_run = self._loose_of(run)
        seqs = {s.id: s.seq for s in of_run} | {name: self._known[name].seq for name in names & self._known.keys()}
        of_pages = self._joined[run].seqs if run in self._joined else ()
        highest = records.highest_seq((*seqs.values(), *of_pages))
        unknown = [name for name in names if seqs.get(name, highest + 1) > highest]
        # Each snapshot of unknown seq may have begun at the next multiple (see copy/mirror.py), and have left room for
        # all the others.
        number = max(1 + highest, FIRST_SEQ) + len(unknown) * (FIRST_SEQ + len(unknown))
        number = min(max(number, min(at_least, records.MAX_COUNTED)), highest + records.MAX_SEQ_STEP)
        if number > records.MAX_COUNTED:
            last = max(of_run, key=lambda s: s.seq).key if of_run else run
            raise InvalidInputError(f"{last}: has the highest sequence number of its run; save into another run")
        return number

    def children(self, snapshot_id: str) -> list[Snapshot]:
        """Return the committed snapshots whose parent is this snapshot."""
        return [copied(s) for s in self._chosen() if s.parent == snapshot_id]

    def runs(self, states: tuple[str, ...] | None = (COMMITTED,)) -> list[str]:
        """Return the runs with a snapshot in some states (None: in any), sorted."""
        self._require_listed()
        of_pages = {run for run, one in self._joined.items() if one.states and self.has(run, states)}
        return sorted(of_pages | {s.run for s in self._by_id.values() if states is None or s.state in states})

    def superseded(self, run: str | None = None) -> set[str]:
        """Return the ids of committed snapshots, of a run or of all, whose (run, step) has one of higher seq."""
        self._require_listed(run)
        found = set[str]()
        loose: dict[str, list[Snapshot]] = {}
        for s in self._loose_of(run):
            if s.state == COMMITTED:
                loose.setdefault(s.run, []).append(s)
        for name in loose.keys() | self._joined.keys():
            if run in (None, name):
                found |= self._superseded(loose.get(name, []), self._joined.get(name))
        return found

    def _superseded(self, loose: Iterable[Snapshot], joined: Joined | None) -> set[str]:
        places = [(s.step, s.seq, s.id) for s in loose]
        if joined is not None:
            places += joined.repeated_steps([s.step for s in loose], self._loose)
        last = {step: name for step, _, name in sorted(places)}
        return {name for _, _, name in places} - set(last.values())

    def resolve(self, ref: str, states: tuple[str, ...] = (COMMITTED, FORGOTTEN)) -> Snapshot:
        """Return the snapshot that a reference names: `run@step`, `run@tag`, `run@latest` or another word, or an id.

        The words are `latest`, the newest save; `highest`, the highest step; and `best`, the best by the first KeepBest
        policy of the run. A tag named `highest` or `best` takes precedence over the word. `run@best:loss` is the
        snapshot with the smallest loss, and `run@best:acc:max` the one with the largest acc. An id is `id:` and its
        first digits, or at least 8 digits, as `snapstore log` prints them. A step finds a forgotten snapshot if there
        is no committed one, and one that a repair has dropped if there is no other. An id finds a committed or a
        forgotten snapshot. Tags and words name only committed ones.

        Raises:
            InvalidInputError: it is not a reference, or an ambiguous prefix.
            NotFoundError: it names nothing; the message lists what there is.
            IntegrityError, StorageError: the answer may be a snapshot whose record is gone or cannot be read.
        """
        check_ref(ref)
        if _ID.match(ref):
            return self._resolve_id(ref, states)
        run, at, name = _parts(ref)
        if not at or not run or not name or name == "best:":
            raise InvalidInputError(f"reference {quoted(ref)}: expected {FORMS}")
        if not self.has(run, states):
            self.require_known(ref, run)
            there = "" if self.only_run else f"; runs: {', '.join(self.runs()) or 'none'}"
            raise NotFoundError(f"reference {quoted(ref)}: no run {quoted(run)} in this repository{there}")
        step = int(name) if name.isdecimal() and len(name) <= 128 else None  # int() refuses thousands of digits
        asks_committed = COMMITTED in states
        if name == "latest":
            found = self.last(run, 1) if asks_committed else []
        else:
            if name.startswith("best:"):  # no tag has a colon
                return copied(self._first_of(ref, run, self._committed(run) if asks_committed else [], name))
            found = self.tagged(run).get(name, []) if asks_committed else []
            if not found and step is not None:
                of_step = self._of_step(run, step, states)
                found = [s for s in of_step if s.state == COMMITTED]
                found = found or [s for s in of_step if not is_dropped(s)] or of_step
            if not found and name in ("highest", "best") and asks_committed and self.has(run):
                return copied(self._first_of(ref, run, self._committed(run), name))
        best = max(found, key=lambda s: (s.seq, s.id), default=None)
        if best is None or name not in best.tags:  # a tag is on one snapshot of its run
            self.require_known(ref, run, best, step)
        if best is None:
            committed = self._committed(run) if asks_committed else []
            newest = retention.current(committed)[:10]
            steps = ", ".join(str(s.step) for s in reversed(newest)) or "none"
            tags = ", ".join(sorted({tag for s in committed for tag in s.tags})) or "none"
            raise NotFoundError(
                f"reference {quoted(ref)}: run {quoted(run)} has no such step or tag; last steps: {steps}; tags: {tags}"
            )
        return copied(best)

    def _of_step(self, run: str, step: int, states: tuple[str, ...]) -> list[Snapshot]:
        """Return the snapshots of a step in some states."""
        loose = [s for s in self._loose_of(run) if s.step == step and s.state in states]
        one = self._joined.get(run)
        return loose if one is None or step > records.MAX_STEP else loose + one.at_step(step, states, self._loose)

    def _first_of(self, ref: str, run: str, committed: Sequence[Snapshot], name: str) -> Snapshot:
        """Return the highest step, or the best by a metric, of the committed snapshots of a run.

        Args:
            name: `highest`; `best`, by the policy of the run; or `best:METRIC`, to which `:min` or `:max` may be added.
        """
        self.require_known(ref, run)
        current = retention.current(committed)
        if name == "highest":
            return max(current, key=lambda s: s.step)
        best = retention.KeepBest.of_text(name.removeprefix("best:")) if name != "best" else self._policy_of(run)
        if best is None:
            raise NotFoundError(
                f"reference {quoted(ref)}: "
                f"run {quoted(run)} has no KeepBest policy, which would say by which metric, and no such "
                "tag; save it with SnapshotManager(..., keep=[KeepBest('metric')])"
            )
        ranked = best.ranked(current)
        if not ranked:
            raise NotFoundError(
                f"reference {quoted(ref)}: no snapshot of run {quoted(run)} has the metric {quoted(best.metric)} "
                f"(NaN is no value); metrics: {some(sorted({m for s in current for m in s.metrics})) or 'none'}"
            )
        return ranked[0]

    def _policy_of(self, run: str) -> retention.KeepBest | None:
        """Return the first KeepBest policy that is stored for a run."""
        policies = policy_store.read(self._store, run) if self._store is not None else []
        return next((policy for policy in policies if isinstance(policy, retention.KeepBest)), None)

    def _resolve_id(self, ref: str, states: tuple[str, ...]) -> Snapshot:
        prefix = ref.removeprefix("id:").lower()
        if not prefix or not set(prefix) <= set("0123456789abcdef"):
            raise InvalidInputError(f"reference {quoted(ref)}: expected id: and hexadecimal digits")
        self._require_listed()
        found = [s for s in self._by_id.values() if s.id.startswith(prefix) and s.state in states]
        for one in self._joined.values() if len(prefix) <= ID_DIGITS else ():
            found += one.with_prefix(prefix, states, self._loose)
        for _, name, key in self._unknown():
            if name.startswith(prefix) and (parsed := parse_record_key(key)):
                self.require_known(ref, parsed[0], snapshot_id=name)
        if not found:
            raise NotFoundError(
                f"reference {quoted(ref)}: no snapshot whose id starts with {quoted(prefix)}; see 'snapstore log'"
            )
        if len(found) > 1:
            ids = ", ".join(sorted(s.id[:12] for s in found)[:5])
            raise InvalidInputError(
                f"reference {quoted(ref)}: ambiguous, {len(found)} snapshots: {ids}; give more digits"
            )
        return copied(found[0])


def _parts(ref: str) -> tuple[str, str, str]:
    """Return the run, "@" and the name of a reference; without an "@", two empty texts and the reference."""
    if "@best:" in ref:  # a metric may have any characters
        run, _, name = ref.partition("@best:")
        return run, "@", f"best:{name}"
    return ref.rpartition("@")


def run_of(ref: str) -> str | None:
    """Return the run that a reference names; None: an id names none, or it is no reference."""
    check_ref(ref)
    run = "" if _ID.match(ref) else _parts(ref)[0]
    return run if NAME.fullmatch(run) else None


def is_dropped(snapshot: Snapshot) -> bool:
    """Return whether a repair has forgotten a snapshot because it stays damaged: nobody chose to be without it."""
    return snapshot.state in (FORGOTTEN, SWEPT) and snapshot.reason.startswith(DROPPED)


def misnumbered(ruling: Iterable[Snapshot], joined: Mapping[str, Joined] | None = None) -> dict[str, str]:
    """Return the records whose seq is too high for any writer to have counted to: key -> why it is damaged.

    Args:
        joined: what pages say of other snapshots, by run.
    """
    runs: dict[str, dict[str, int]] = {}
    for snapshot in ruling:
        runs.setdefault(snapshot.run, {})[snapshot.key] = snapshot.seq
    found: dict[str, str] = {}
    for run in runs.keys() | (joined or {}).keys():
        seqs, of_pages = runs.get(run, {}), joined.get(run) if joined else None
        known = (*seqs.values(), *(of_pages.seqs if of_pages is not None else ()))
        if max(known, default=0) < records.MAX_SEQ_STEP:
            continue
        highest = records.highest_seq(known)
        for key, seq in (seqs | (of_pages.above(highest) if of_pages is not None else {})).items():
            if seq > highest:
                found[key] = f"{key}: seq {seq} is out of reach, the highest one of the run below it is {highest}"
    return found


def _first(problems: Mapping[str, str]) -> str:
    """Return the first of some keys with its problem; the text has the key once."""
    key, why = next(iter(problems.items()))
    return strip_hint(why) if key in why else f"{key}: {strip_hint(why)}"
