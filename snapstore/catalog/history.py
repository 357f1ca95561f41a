"""View: what one listing of the records showed; references, lineage, and which snapshots nobody can know.

In: the ruling record of every snapshot, the keys of those that are damaged or cannot be read, and records that have
vanished. Out: answers, from memory. A View never changes: any thread may ask it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import IntegrityError, InvalidInputError, NotFoundError, StorageError
from ..format import records
from ..format.keys import parse_record_key
from ..format.records import COMMITTED, FORGOTTEN, Snapshot
from ..text import strip_hint

#: What to do about records that have vanished: the index may hold the last copy.
PUT_BACK = (
    "run 'snapstore repair --apply', which puts back from the index what is gone, or, if it was removed on purpose, "
    "'snapstore index rebuild --forget-missing', which gives it up, and its bytes to 'snapstore gc --unexplained'"
)


class View:
    """What one listing showed: the ruling revision of every snapshot.

    Attributes:
        damaged: key -> why its record is none: damaged bytes.
        unread: key -> why its record could not be read, though the store answers: it may be read tomorrow.
        vanished: keys that the index knows and the listing did not show: a gc must not act on such a listing.
        missing: of their snapshots what ruled as far as the index knows; vanished history harms nobody who reads.
    """

    def __init__(
        self, ruling: Iterable[Snapshot], damaged: dict[str, str], vanished: Sequence[Snapshot],
        unread: Mapping[str, str] | None = None, seqs: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._by_id = {snapshot.id: snapshot for snapshot in ruling}
        self.damaged = damaged
        self.unread = dict(unread or {})
        self.vanished = [snapshot.key for snapshot in vanished]
        self._seqs = dict(seqs or {})  # of damaged and unread ones by id, where an earlier revision tells
        self.missing = self._missing(vanished) if vanished else []
        self._seqs |= {snapshot.id: snapshot.seq for snapshot in self.missing}

    def _missing(self, vanished: Iterable[Snapshot]) -> list[Snapshot]:
        shown = {snapshot.id: snapshot.revision for snapshot in self._by_id.values()}
        for _, _, name, revision in filter(None, map(parse_record_key, (*self.damaged, *self.unread))):
            shown[name] = revision
        last: dict[str, Snapshot] = {}
        for snapshot in sorted(vanished, key=lambda s: s.revision):
            if snapshot.revision > shown.get(snapshot.id, -1):
                last[snapshot.id] = snapshot
        return sorted(last.values(), key=lambda s: (s.run, s.seq, s.id))

    def _unknown(self) -> Iterator[tuple[str, int, str, str]]:
        """(run, step, id, key) of every snapshot whose ruling record is damaged, could not be read or has vanished."""
        for key in (*self.damaged, *self.unread):
            parsed = parse_record_key(key)
            if parsed is not None:
                yield parsed[0], parsed[1], parsed[2], key
        for s in self.missing:
            shown = self._by_id.get(s.id)
            if s.state in (COMMITTED, FORGOTTEN) and (shown is None or shown.state != COMMITTED):
                yield s.run, s.step, s.id, s.key  # else it is there, or its bytes are gone anyway

    def is_unknown(self, snapshot_id: str) -> bool:
        """Whether there is such a snapshot, and its record cannot be read or is gone."""
        return any(name == snapshot_id for _, _, name, _ in self._unknown())

    def _require_known(
        self, asked: str, run: str, found: Snapshot | None, step: int | None = None, snapshot_id: str = ""
    ) -> None:  # fmt: skip
        """Raise if a snapshot that nothing is known of may be what a run's newest (of a step, or the one of an id) is,
        rather than `found`.

        Raises:
            StorageError, IntegrityError: its record could not be read; is damaged or gone.
        """
        for of_run, of_step, name, key in self._unknown():
            seq = self._seqs.get(name)
            older = found is not None and seq is not None and (seq, name) < (found.seq, found.id)
            if of_run != run or older or (step is not None and of_step != step) or snapshot_id not in ("", name):
                continue
            kind = StorageError if key in self.unread else IntegrityError
            instead = f"; or name the one that can be read, id:{found.id[:12]} ({found.ref})" if found else ""
            why = self.damaged.get(key) or self.unread.get(key)
            known = f"is gone: {key} is known to the index and not in the store; {PUT_BACK}"
            what = f"cannot be read: {strip_hint(why)}; run 'snapstore repair'" if why else known
            raise kind(f"{asked}: may be {run}@{of_step} (id:{name[:12]}), whose record {what}{instead}")

    def snapshots(self, run: str | None = None, states: tuple[str, ...] | None = (COMMITTED,)) -> list[Snapshot]:
        """Snapshots of a run (of all runs) in these states (in any), by run and seq."""
        chosen = (
            s for s in self._by_id.values() if (run is None or s.run == run) and (states is None or s.state in states)
        )
        return sorted(chosen, key=lambda s: (s.run, s.seq, s.id))

    def get(self, snapshot_id: str) -> Snapshot | None:
        """The snapshot of this full id, in whatever state."""
        return self._by_id.get(snapshot_id)

    def newest(self, run: str) -> Snapshot | None:
        """The committed snapshot of the highest seq."""
        return max(self.snapshots(run), key=lambda s: (s.seq, s.id), default=None)

    def latest(self, run: str) -> Snapshot | None:
        """`newest`, for those to whom an older one would be a loss.

        Raises:
            IntegrityError, StorageError: a newer one may be behind a record that cannot be read, or is gone.
        """
        found = self.newest(run)
        self._require_known(f"{run}@latest", run, found)
        return found

    def next_seq(self, run: str) -> int:
        """What comes behind every snapshot of a run, those included whose records cannot be read: where nobody knows
        their seq, a save that took the same would tie with them, or stand before them, once they are repaired.

        Raises:
            InvalidInputError: a forged record leaves no number.
        """
        names = {name for of_run, _, name, _ in self._unknown() if of_run == run}
        seqs = [s.seq for s in self.snapshots(run, states=None)]
        seqs += [self._seqs[name] for name in names & self._seqs.keys()]
        # Each of the others may have been saved beside the rest, and have left room for them.
        number = 1 + len(names - self._seqs.keys()) ** 2 + max(seqs, default=-1)
        if number > records.MAX_COUNTED:
            raise InvalidInputError(f"run {run!r}: a record of it has the last number that there is; save another run")
        return number

    def children(self, snapshot_id: str) -> list[Snapshot]:
        """Committed snapshots whose parent this is."""
        return [s for s in self.snapshots() if s.parent == snapshot_id]

    def runs(self) -> list[str]:
        """Runs with a committed snapshot, sorted."""
        return sorted({s.run for s in self.snapshots()})

    def superseded(self) -> set[str]:
        """Ids of committed snapshots whose (run, step) has a committed one of higher seq."""
        last: dict[tuple[str, int], Snapshot] = {}
        old: set[str] = set()
        for snapshot in self.snapshots():
            before = last.get((snapshot.run, snapshot.step))
            if before is not None:
                old.add(before.id)
            last[snapshot.run, snapshot.step] = snapshot
        return old

    def resolve(self, ref: str, states: tuple[str, ...] = (COMMITTED, FORGOTTEN)) -> Snapshot:
        """The snapshot that a reference names: `run@step`, `run@latest`, `run@tag` or `id:<prefix>`.

        A forgotten snapshot is found by step or id as long as no committed one answers; `latest` and tags name
        committed ones only.

        Raises:
            InvalidInputError: not a reference, or an ambiguous prefix.
            NotFoundError: names nothing; the message lists what there is.
        """
        if not isinstance(ref, str):
            raise InvalidInputError(f"reference {ref!r}: expected a str, got {type(ref).__name__}")
        if ref.startswith("id:"):
            return self._resolve_id(ref, states)
        run, at, name = ref.rpartition("@")
        if not at or not run or not name:
            raise InvalidInputError(f"reference {ref!r}: expected run@step, run@latest, run@tag or id:<prefix>")
        of_run = self.snapshots(run, states)
        if not of_run:
            self._require_known(ref, run, None)
            there = ", ".join(self.runs()) or "none"
            raise NotFoundError(f"reference {ref!r}: no run {run!r} in this repository; runs: {there}")
        committed = [s for s in of_run if s.state == COMMITTED]
        step = int(name) if name.isdecimal() and len(name) <= 128 else None  # int() refuses thousands of digits
        if name == "latest":
            found = committed
        else:
            found = [s for s in committed if name in s.tags]
            if not found and step is not None:
                found = [s for s in committed if s.step == step] or [s for s in of_run if s.step == step]
        best = max(found, key=lambda s: (s.seq, s.id), default=None)
        if best is None or name not in best.tags:  # a tag is on one snapshot of its run
            self._require_known(ref, run, best, step)
        if best is None:
            steps = ", ".join(str(s.step) for s in committed[-10:]) or "none"
            tags = ", ".join(sorted({tag for s in committed for tag in s.tags})) or "none"
            raise NotFoundError(
                f"reference {ref!r}: run {run!r} has no such step or tag; last steps: {steps}; tags: {tags}"
            )
        return best

    def _resolve_id(self, ref: str, states: tuple[str, ...]) -> Snapshot:
        prefix = ref[3:].lower()
        if not prefix or not set(prefix) <= set("0123456789abcdef"):
            raise InvalidInputError(f"reference {ref!r}: expected id: and hexadecimal digits")
        found = [s for s in self._by_id.values() if s.id.startswith(prefix) and s.state in states]
        for run, _, name, _ in self._unknown():
            if name.startswith(prefix):
                self._require_known(ref, run, None, snapshot_id=name)
        if not found:
            raise NotFoundError(f"reference {ref!r}: no snapshot whose id starts with {prefix!r}; see 'snapstore log'")
        if len(found) > 1:
            ids = ", ".join(sorted(s.id[:12] for s in found)[:5])
            raise InvalidInputError(f"reference {ref!r}: ambiguous, {len(found)} snapshots: {ids}; give more digits")
        return found[0]
