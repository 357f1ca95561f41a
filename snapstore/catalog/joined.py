"""Joined: what the pages of one run say about its snapshots: for each the highest joined revision.

In: pages. Out: rows of numbers, 42 bytes for each snapshot ever joined, in which everything that a save asks can be
looked up; and records, which are decoded from their pages when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import IntegrityError
from ..format import records
from ..format.keys import name_of_record, page_key, parse_record_key, record_key
from ..format.pages import GRAVE, STATES, RecordPage
from ..format.records import COMMITTED, FORGOTTEN, SWEPT, Snapshot

Column = npt.NDArray[Any]
#: The states of a row, by their number there; a record that does not decode has another one.
ROW_STATES = (*STATES, COMMITTED, FORGOTTEN)
#: Flags of a row: the page has the whole record; the record has tags; this release cannot decode it.
WHOLE, TAGGED, UNKNOWN = 1, 2, 4
#: Rows lie in segments, each in order of the ids. A new page changes some of them, so no large array is ever copied.
SEGMENT_ROWS = 32_768
#: The most ids whose revisions are remembered.
MOST_ASKED = 10_000
#: Rows that are looked at at once for the last ones that are not hidden.
AT_ONCE = 64


class JoinedRows(NamedTuple):
    """JoinedRows about snapshots, as columns. `hi` and `lo` are the halves of the id."""

    hi: Column
    lo: Column
    step: Column
    seq: Column
    revision: Column
    page: Column
    state: Column
    flags: Column

    @staticmethod
    def empty() -> JoinedRows:
        """Return no rows."""
        return JoinedRows(*(np.empty(0, dtype) for dtype in _DTYPES))

    @staticmethod
    def of(values: Sequence[tuple[str, int, int, int, int, int, int]]) -> JoinedRows:
        """Return rows of (id, step, seq, revision, page, state, flags)."""
        columns = [*zip(*values, strict=True)] if values else [()] * 7
        hi, lo = halves(columns[0])
        rest = zip(columns[1:], _DTYPES[2:], strict=True)
        return JoinedRows(hi, lo, *(np.array(column, dtype) for column, dtype in rest))

    @staticmethod
    def joined(parts: Sequence[JoinedRows]) -> JoinedRows:
        """Return some rows, one after the other."""
        return JoinedRows(*map(np.concatenate, zip(*parts, strict=True))) if parts else JoinedRows.empty()

    @staticmethod
    def unpack(data: bytes) -> JoinedRows:
        """Return what `pack` has packed."""
        count = len(data) // ROW_BYTES
        columns, at = [], 0
        for dtype in _DTYPES:
            columns.append(np.frombuffer(data, dtype, count, at))
            at += count * dtype.itemsize
        return JoinedRows(*columns)

    def pack(self) -> bytes:
        """Return the bytes of all columns."""
        return b"".join(column.tobytes() for column in self)

    def take(self, chosen: Column | slice) -> JoinedRows:
        """Return some of the rows, by their numbers, by a mask or as a slice."""
        return JoinedRows(*(column[chosen] for column in self))

    def ids(self) -> list[str]:
        """Return the ids."""
        digits = np.stack([self.hi, self.lo], axis=1).astype(">u8").tobytes().hex()
        return [digits[at : at + 32] for at in range(0, len(digits), 32)]

    def sorted(self) -> JoinedRows:
        """Return the rows in order of their ids."""
        return self.take(np.lexsort((self.lo, self.hi)))

    def find(self, hi: Column, lo: Column) -> Column:
        """Return where each of some ids is, given their halves; -1: nowhere. The rows are in order of their ids."""
        if not len(self.hi):
            return np.full(len(hi), -1)
        at = np.searchsorted(self.hi, hi)
        at[at == len(self.hi)] = 0
        same = self.hi[at] == hi
        for i in np.flatnonzero(same & (self.lo[at] != lo)):  # ids with equal halves are forged
            end = np.searchsorted(self.hi, hi[i], "right")
            at[i] = min(at[i] + np.searchsorted(self.lo[at[i] : end], lo[i]), end - 1)
        found: Column = np.where(same & (self.lo[at] == lo), at, -1)
        return found


_DTYPES = [np.dtype(name) for name in ("<u8", "<u8", "<u8", "<u8", "<u4", "<u4", "u1", "u1")]
_HALVES = np.dtype([("hi", ">u8"), ("lo", ">u8"), *(one for one in GRAVE.descr if one[0] != "id")])
ROW_BYTES = sum(dtype.itemsize for dtype in _DTYPES)


def halves(ids: Iterable[str]) -> tuple[Column, Column]:
    """Return the two halves of each id, as numbers."""
    both = np.frombuffer(bytes.fromhex("".join(ids)), ">u8").astype(np.uint64).reshape(-1, 2)
    return both[:, 0].copy(), both[:, 1].copy()


def rows_of(page: RecordPage) -> JoinedRows:
    """Return what a page says, in order of the ids. All its records are decoded."""
    found = []
    for record in page.live:
        flags = WHOLE | (TAGGED if record.tags else 0)
        state = ROW_STATES.index(record.state)
        found.append((record.id, record.step, record.seq, record.revision, page.number, state, flags))
    for key in page.unknown:
        _, step, name, revision = parse_record_key(key) or ("", 0, "", 0)
        found.append((name, step, 0, revision, page.number, len(ROW_STATES), WHOLE | UNKNOWN))
    graves: Column = np.frombuffer(page.graves.tobytes(), _HALVES)
    numbers = np.full(len(graves), page.number)
    of = {name: graves[name] for name in graves.dtype.names or ()} | {"page": numbers, "flags": np.zeros_like(numbers)}
    both = zip(JoinedRows._fields, _DTYPES, strict=True)
    of_graves = JoinedRows(*(of[name].astype(dtype) for name, dtype in both))
    return JoinedRows.joined([JoinedRows.of(found), of_graves]).sorted()


def _decodes(rows: JoinedRows) -> Column:
    found: Column = rows.flags & UNKNOWN == 0
    return found


@dataclass(frozen=True, eq=False)
class Joined:
    """The joined records of one run. It is immutable: `with_pages` returns another one.

    Attributes:
        bodies: the pages by their numbers, for records that somebody asks for.
        count: how many pages there are.
        segments: the rows.
        damaged: key -> why, of pages that are damaged or gone, whatever their volumes have.
        mended: keys of damaged pages whose records a later page has.
    """

    run: str
    bodies: Mapping[int, RecordPage] = field(default_factory=dict)
    count: int = 0
    segments: tuple[JoinedRows, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    mended: frozenset[str] = frozenset()
    _decoded: dict[str, Snapshot] = field(default_factory=dict)  # those of later pages have them too

    def __len__(self) -> int:
        return sum(len(rows.hi) for rows in self.segments)

    def with_pages(
        self, pages: Iterable[tuple[int, JoinedRows, Collection[int]]], damaged: Mapping[str, str]
    ) -> Joined:
        """Return what the pages of the run say with the next ones: (number, rows, the numbers of those it mends)."""
        pages = list(pages)
        mended = self.mended | {page_key(self.run, number) for _, _, mends in pages for number in mends}
        count = max([self.count, *(number + 1 for number, _, _ in pages)])
        segments = self.segments
        some, rows = 0, list[JoinedRows]()
        for _, of_page, _ in pages:
            if rows and some + len(of_page.hi) > SEGMENT_ROWS:
                segments, some, rows = _with_rows(segments, JoinedRows.joined(rows)), 0, []
            rows.append(of_page)
            some += len(of_page.hi)
        if rows:
            segments = _with_rows(segments, JoinedRows.joined(rows))
        damaged = {key: why for key, why in (*self.damaged.items(), *damaged.items()) if key not in mended}
        return replace(self, count=count, segments=segments, damaged=damaged, mended=mended)

    # --- one snapshot

    def _row(self, snapshot_id: str) -> JoinedRows | None:
        hi, lo = halves([snapshot_id])
        for rows in reversed(self.segments if self._asked.get(snapshot_id, 0) >= 0 else ()):
            if (at := int(rows.find(hi, lo)[0])) >= 0:
                return rows.take(np.array([at]))
        return None

    def key_of(self, snapshot_id: str) -> str | None:
        """Return the key of the highest joined revision of a snapshot; None: no page has any."""
        row = self._row(snapshot_id)
        return None if row is None else self._key(snapshot_id, row)

    def _key(self, snapshot_id: str, row: JoinedRows, at: int = 0) -> str:
        return record_key(self.run, int(row.step[at]), snapshot_id, int(row.revision[at]))

    def revisions_of(self, ids: Iterable[str]) -> list[int]:
        """Return the highest joined revision of each snapshot; -1: no page has any."""
        names = [*ids]
        if len(self._asked) > MOST_ASKED:
            self._asked.clear()
        known = {name: revision for name in names if (revision := self._asked.get(name)) is not None}
        if fresh := [name for name in names if name not in known]:
            hi, lo = halves(fresh)
            found = np.full(len(fresh), -1)
            for rows in self.segments:
                at = rows.find(hi, lo)
                found[at >= 0] = rows.revision[at[at >= 0]]
            known.update(zip(fresh, found.tolist(), strict=True))
            self._asked.update(known)
        return [known[name] for name in names]

    def revision_of(self, snapshot_id: str) -> int:
        """Return the highest joined revision of a snapshot; -1: no page has any."""
        return self.revisions_of([snapshot_id])[0]

    def covers(self, key: str) -> bool:
        """Return whether the record under a key is void: a page has its revision of the snapshot, or a later one."""
        return bool(void_records([key], {self.run: self}))

    def makes_void(self, record: Snapshot) -> bool:
        """Return whether a record that was put is void, as a page has its revision, not by this PUT, or a later one.

        A grave has no write id, so its revision and its state are compared: a final state is the same for all writers.

        Raises:
            See `record_of`.
        """
        row = self._row(record.id)
        if row is None or row.revision[0] < record.revision:
            return False
        if row.flags[0] & UNKNOWN:
            return True
        if row.flags[0] & WHOLE:
            return self._whole(record.id, row).write_id != record.write_id
        return (int(row.revision[0]), ROW_STATES[row.state[0]]) != (record.revision, record.state)

    def record_of(self, snapshot_id: str) -> Snapshot | None:
        """Return the highest joined record of a snapshot, or what is left of it; None: there is none that decodes.

        Raises:
            StorageError, IntegrityError: its page cannot be read any more.
        """
        row = self._row(snapshot_id)
        if row is None or row.flags[0] & UNKNOWN:
            return None
        return self._whole(snapshot_id, row) if row.flags[0] & WHOLE else self._left(snapshot_id, row)

    def state_of(self, snapshot_id: str) -> str | None:
        """Return the state of a snapshot; None: no page has it, or it does not decode."""
        row = self._row(snapshot_id)
        return None if row is None or row.flags[0] & UNKNOWN else ROW_STATES[row.state[0]]

    def _whole(self, snapshot_id: str, rows: JoinedRows, at: int = 0) -> Snapshot:
        revision, found = int(rows.revision[at]), self._decoded.get(snapshot_id)
        if found is None or found.revision != revision:
            page = self.bodies[int(rows.page[at])]
            if page.whole.get(snapshot_id, ("",))[0] != self._key(snapshot_id, rows, at):
                raise IntegrityError(f"{page.key}: has changed while it was read; run 'snapstore check'")
            found = self._decoded[snapshot_id] = page.record(snapshot_id)
        return found

    def _left(self, snapshot_id: str, rows: JoinedRows, at: int = 0) -> Snapshot:
        page = self.bodies[int(rows.page[at])]
        found = page.grave_record(snapshot_id)
        if found is None:
            raise IntegrityError(f"{page.key}: has changed while it was read; run 'snapstore check'")
        return found

    # --- many snapshots

    def _chosen(self, states: Collection[str] | None, chooses: Callable[[JoinedRows], Column] = _decodes) -> JoinedRows:
        """Return the chosen rows of some states (None: of any), page by page."""
        parts = [self._in_state(state) for state in (ROW_STATES if states is None else states)]
        found = JoinedRows.joined([rows.take(chooses(rows)) for rows in parts])
        return found.take(np.argsort(found.page, kind="stable"))

    def _in_state(self, state: str) -> JoinedRows:
        """Return the rows of a state; those of swept snapshots are not kept, as they are many."""
        if state not in self._of_states:
            number = ROW_STATES.index(state)
            rows = JoinedRows.joined([rows.take(rows.state == number) for rows in self.segments])
            if state == SWEPT:
                return rows
            self._of_states[state] = rows
        return self._of_states[state]

    def _read(self, rows: JoinedRows, but: Collection[str]) -> Iterator[Snapshot]:
        for at, name in enumerate(rows.ids()):
            if name not in but:
                yield (self._whole if rows.flags[at] & WHOLE else self._left)(name, rows, at)

    def records(
        self, states: Collection[str] | None, but: Collection[str] = (), *, flags: int = 0
    ) -> Iterator[Snapshot]:
        """Yield the records in some states (None: in any) whose rows have some flags, but some ids.

        Raises:
            StorageError, IntegrityError: a page cannot be read any more.
        """
        yield from self._read(self._chosen(states, lambda rows: rows.flags & (flags | UNKNOWN) == flags), but)

    def at_step(self, step: int, states: Collection[str], but: Collection[str] = ()) -> list[Snapshot]:
        """Return the records of a step, as `records` does."""
        return [*self._read(self._chosen(states, lambda rows: rows.step == step), but)]

    def with_prefix(self, prefix: str, states: Collection[str], but: Collection[str] = ()) -> list[Snapshot]:
        """Return the records whose ids begin with some digits, as `records` does."""
        (first,), (last,) = halves([prefix.ljust(32, "0")])[0], halves([prefix.ljust(32, "f")])[0]
        rows = self._chosen(states, lambda rows: (rows.hi >= first) & (rows.hi <= last))
        return [one for one in self._read(rows, but) if one.id.startswith(prefix)]

    def has(self, states: Collection[str] | None, but: Collection[str] = ()) -> bool:
        """Return whether there is a snapshot in some states (None: in any), beside some ids."""
        if not self.states.intersection(ROW_STATES if states is None else states):
            return False
        names = self._chosen(states).take(slice(len(but) + 1)).ids()
        return any(name not in but for name in names)

    @cached_property
    def _asked(self) -> dict[str, int]:
        """Revisions by id: a save asks for those of its loose records many times."""
        return {}

    @cached_property
    def _of_states(self) -> dict[str, JoinedRows]:
        return {}

    @cached_property
    def states(self) -> frozenset[str]:
        """The states in which there are snapshots."""
        there = [np.flatnonzero(np.bincount(rows.state)).tolist() for rows in self.segments]
        return frozenset(ROW_STATES[n] for some in there for n in some if n < len(ROW_STATES))

    @cached_property
    def unknown(self) -> dict[str, tuple[str, str]]:
        """Id -> (key, why) of records that this release cannot decode."""
        parts = [rows.take(rows.flags & UNKNOWN > 0) for rows in self.segments if (rows.flags & UNKNOWN).any()]
        found: dict[str, tuple[str, str]] = {}
        for rows in parts:
            for at, name in enumerate(rows.ids()):
                key = self._key(name, rows, at)
                found[name] = key, self.bodies[int(rows.page[at])].unknown.get(key, f"{key}: does not decode")
        return found

    @cached_property
    def seqs(self) -> tuple[int, ...]:
        """Some numbers of the snapshots, by which `records.highest_seq` finds the highest one of all.

        These are the first, the last, and some between them, as far apart as a writer leaves numbers out.
        """
        found = set[int]()
        for rows in self.segments:
            ordered, at = np.sort(rows.seq), 0
            found.add(int(ordered[0]))
            while at < len(ordered) - 1:  # from each number the highest one that a writer can reach from it
                reach = int(np.searchsorted(ordered, ordered[at] + np.uint64(records.MAX_SEQ_STEP), "right")) - 1
                at = max(reach, at + 1)
                found.add(int(ordered[at]))
        return tuple(sorted(found))

    def above(self, seq: int) -> dict[str, int]:
        """Return the keys of whole records with higher numbers, and these."""
        found: dict[str, int] = {}
        for rows in self.segments:
            chosen = rows.take((rows.seq > seq) & (rows.flags & (WHOLE | UNKNOWN) == WHOLE))
            found |= {self._key(name, chosen, at): int(chosen.seq[at]) for at, name in enumerate(chosen.ids())}
        return found

    @cached_property
    def _committed(self) -> JoinedRows:
        """The committed ones, in order of seq and id."""
        rows = self._chosen([COMMITTED])
        order = np.argsort(rows.seq, kind="stable")
        ordered = rows.seq[order]
        if (ordered[1:] == ordered[:-1]).any():
            order = np.lexsort((rows.lo, rows.hi, rows.seq))
        return rows.take(order)

    def last(self, count: int, but: Collection[str] = ()) -> list[Snapshot]:
        """Return the last committed snapshots but some, in order of seq and id. Raises as `records` does."""
        found: list[Snapshot] = []
        rows = self._committed
        for end in range(len(rows.hi), 0, -AT_ONCE):
            some = rows.take(slice(max(end - AT_ONCE, 0), end))
            names = some.ids()
            left = [at for at in range(len(names))[::-1] if names[at] not in but][: count - len(found)]
            found += [self._whole(names[at], some, at) for at in left]
            if len(found) == count:
                break
        return found[::-1]

    def repeated_steps(self, besides: Sequence[int], but: Collection[str]) -> list[tuple[int, int, str]]:
        """Return (step, seq, id) of the committed snapshots, but some, whose step is there twice.

        Args:
            besides: steps that other snapshots have.
        """
        rows = self._committed
        rows = rows.take(np.argsort(rows.step, kind="stable"))
        same = rows.step[1:] == rows.step[:-1]
        twice = np.concatenate([same, [False]]) | np.concatenate([[False], same]) if len(rows.hi) else same
        rows = rows.take(twice | np.isin(rows.step, np.array(besides, np.uint64)))
        found = zip(rows.step.tolist(), rows.seq.tolist(), rows.ids(), strict=True)
        return [(step, seq, name) for step, seq, name in found if name not in but]


def _with_rows(segments: tuple[JoinedRows, ...], rows: JoinedRows) -> tuple[JoinedRows, ...]:
    """Return segments with some more rows. Of each id the highest revision stays; of two equal ones the lower page."""
    order = np.lexsort((rows.page, np.iinfo(np.uint32).max - rows.revision, rows.lo, rows.hi))
    rows = rows.take(order)
    again = (rows.hi[1:] == rows.hi[:-1]) & (rows.lo[1:] == rows.lo[:-1])
    rows = rows.take(np.concatenate([[True], ~again])) if again.any() else rows
    stays = np.ones(len(rows.hi), bool)
    found: list[JoinedRows] = []
    for segment in segments:
        at = segment.find(rows.hi, rows.lo)
        there = np.flatnonzero(at >= 0)
        newer = rows.revision[there] > segment.revision[at[there]]
        stays[there[~newer]] = False
        if newer.any():
            left = np.ones(len(segment.hi), bool)
            left[at[there[newer]]] = False
            segment = segment.take(left)
        found.append(segment)
    rows = rows.take(stays) if not stays.all() else rows
    while found and len(found[-1].hi) <= len(rows.hi) and len(found[-1].hi) + len(rows.hi) <= SEGMENT_ROWS:
        rows = JoinedRows.joined([found.pop(), rows]).sorted()
    return tuple(one for one in (*found, rows) if len(one.hi))


def void_records(keys: Iterable[str], joined: Mapping[str, Joined]) -> set[str]:
    """Return which of these keys have records that the pages of their runs cover."""
    by_run: dict[str, list[tuple[str, str, int]]] = {}
    for key in keys if joined else ():
        parsed = parse_record_key(key)
        if parsed is not None and parsed[0] in joined:
            by_run.setdefault(parsed[0], []).append((key, parsed[2], parsed[3]))
    void = set[str]()
    for run, of_run in by_run.items():
        revisions = joined[run].revisions_of(name for _, name, _ in of_run)
        void |= {key for (key, _, revision), there in zip(of_run, revisions, strict=True) if there >= revision}
    return void


def repeated_by_pages(keys: Iterable[str], joined: Mapping[str, Joined]) -> dict[str, str]:
    """Return the records that repeat the id of a joined snapshot under another name: key -> why it is left out."""
    names = {parsed[2]: key for key in keys if (parsed := parse_record_key(key))} if joined else {}
    there: list[tuple[str, Joined]] = []
    if len(joined) == 1:
        (one,) = joined.values()
        there = [(name, one) for name, found in zip(names, one.revisions_of(names), strict=True) if found >= 0]
    elif names and any(one.segments for one in joined.values()):
        shift = np.uint64(64 - min(len(names).bit_length() + 7, 20))
        begins = np.zeros(1 << (64 - int(shift)), bool)  # with which bits an id begins: few of the others do
        begins[halves(names)[0] >> shift] = True
        for one in joined.values():
            for rows in one.segments:
                there += [(name, one) for name in rows.take(begins[rows.hi >> shift]).ids() if name in names]
    repeated: dict[str, str] = {}
    for name, one in there:
        other = one.key_of(name)
        if other is not None and name_of_record(other) != name_of_record(names[name]):
            why = f"repeats the id of {other}, which is in a page: it is forged; remove it"
            repeated[names[name]] = f"{names[name]}: {why}"
    return repeated
