"""A run with a mirror loses no snapshot that its policies, tags or the mirror need, under random programs.

The mirror is often down, records, packs and manifests cannot be read for a moment or longer, and the first store is
lost or is an older backup. Packs and manifests of either store vanish or are damaged, until a repair there drops the
snapshots that it cannot heal.
`SNAPSTORE_TEST_THOROUGH=1` runs many more and longer programs.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from kit.faults import READ_FAULTS, FaultStore, misread, one_thread
from kit.objects import clone, flip_in_place, keys_of
from kit.objects import replace as replace_object
from kit.repositories import OPTIONS, created, objects_of, opened, same, snapshot_of, values
from kit.samples import SEED, THOROUGH
from kit.tally import tally
from snapstore import (
    IntegrityError,
    InvalidInputError,
    KeepBest,
    KeepBytes,
    KeepEvery,
    KeepLast,
    KeepSteps,
    NotFoundError,
    SnapshotManager,
    StorageError,
    retention,
)
from snapstore.catalog.history import DROPPED
from snapstore.copy import mirror as mirrors
from snapstore.format import records
from snapstore.protocol.forget import HELD_AT_MOST, NAMED
from snapstore.storage.memory import MemoryStore

STEPS = st.integers(0, 5)
TAGS = st.sampled_from(["good", "best"])
LOSSES = st.sampled_from([0.5, 0.5, 1.0, 2.0, 3.0, math.nan, None])
KEEPS = st.lists(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 3)),
        st.builds(KeepEvery, st.integers(2, 4)),
        st.builds(KeepSteps, st.lists(STEPS, min_size=1, max_size=2)),
        st.builds(KeepBest, st.just("loss"), st.integers(1, 2), st.sampled_from(["min", "max"])),
        st.sampled_from([KeepBytes(1), KeepBytes("1P")]),
    ),
    max_size=2,
)
PLACES = st.sampled_from(["first", "mirror"])
REFS = st.one_of(STEPS, st.sampled_from([None, "best", "highest", "good"]))
UNREAD = (StorageError, IntegrityError)
BYTES = ("packs/", "manifests/")
BREAKS = st.sampled_from(["gone", "cut", "flipped"])
ABORTED, COMMITTED, FORGOTTEN, SWEPT = "aborted", "committed", "forgotten", "swept"


class Door(FaultStore):
    """A store that can be shut, whose records may be unreadable, and that lets a mirror's thread wait.

    Attributes:
        shut: every operation raises StorageError.
        bad: keys that cannot be read.
        gate: the thread of the mirror waits until it is set.
        shaky: how its first read of each pack and manifest fails; "": it does not.
        lost: keys that it cannot read (key: how).
    """

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.shut, self.bad, self.gate = False, set[str](), threading.Event()
        self.shaky, self.lost, self.shaken = "", dict[str, str](), set[str]()
        self.gate.set()

    def _act(self, name: str, key: str, effect: Callable[[], Any]) -> Any:
        is_mirror = threading.current_thread().name.startswith("snapstore-mirror")
        if is_mirror:
            assert self.gate.wait(60)
        if self.shut or (key in self.bad and name in ("get", "get_range")):
            raise StorageError(f"{key}: {name} failed (injected)")
        if is_mirror and name == "get" and key in self.lost:
            return misread(self.lost[key], key, effect)
        if is_mirror and name == "get" and self.shaky and key.startswith(BYTES) and key not in self.shaken:
            self.shaken.add(key)
            tally("mirror machine shaken reads")
            return misread(self.shaky, key, effect)
        return effect()

    def prepare(self) -> None:
        self._act("prepare", "", self.inner.prepare)


@dataclass(frozen=True)
class Row:
    """A snapshot in one store, as the policies look at it; `order` is the place of its save in the program."""

    id: str
    order: int
    step: int
    seq: int
    state: str
    tags: tuple[str, ...]
    metrics: dict[str, float]
    key: str
    reason: str = ""
    run: str = "a"

    @property
    def is_dropped(self) -> bool:
        """Whether a repair has given it up: nobody chose to be without it."""
        return self.state in (FORGOTTEN, SWEPT) and self.reason.startswith(DROPPED)

    @property
    def created(self) -> float:
        """The order of the saves."""
        return float(self.order)


Rows = dict[str, Row]


def committed(rows: Rows) -> Rows:
    return {row.id: row for row in sorted(rows.values(), key=lambda r: (r.seq, r.id)) if row.state == COMMITTED}


def left_by(keep: Any, rows: Iterable[Row]) -> set[str]:
    """Return the ids of rows that policies do not keep; none if there are no policies, or they would keep nothing."""
    if not keep:
        return set()
    try:
        rows = list(rows)
        needs = {row.id: {row.id: 2} for row in rows}  # each has a manifest, or a list, of its own
        return {found.snapshot.id for found in retention.apply(keep, rows, needs=lambda: needs) if not found.reasons}
    except InvalidInputError:
        return set()


class Machine(RuleBasedStateMachine):
    """A first store, a mirror, and at most one manager; `self.saves` and `self.rows` are the model."""

    def __init__(self) -> None:
        super().__init__()
        numbers = itertools.count()  # the same program gives the same ids
        records.new_id = lambda: hashlib.sha256(str(next(numbers)).encode()).hexdigest()[:32]
        self.stores = {"first": created(), "mirror": MemoryStore()}
        self.doors = {place: Door(store) for place, store in self.stores.items()}
        self.saves: dict[str, tuple[int, int, dict[str, float]]] = {}  # id -> (order, step, metrics)
        self.rows: dict[str, Rows] = {"first": {}, "mirror": {}}
        self.manager: SnapshotManager | None = None
        self.keep: list[Any] = []
        self.mirror_keep: list[Any] = []
        self.held: set[str] = set()  # that the manager must take for not mirrored
        self.unread: set[str] = set()  # that the manager may take for not mirrored
        self.parent: str | None = None
        self.backup: MemoryStore | None = None
        self.broken: dict[str, set[str]] = {"first": set(), "mirror": set()}  # keys of packs and manifests
        self.broken_in_backup: set[str] = set()
        self.losing: tuple[str, str] | None = None  # how the mirror misreads the next save, and which of its objects

    def teardown(self) -> None:
        self.close()
        for place in self.stores:
            for row in committed(self.look(place)).values():
                self.check_values(place, row)

    # -- the model

    def look(self, place: str) -> Rows:
        """Return what a store has, by a new process for which nothing fails."""
        if "config" not in keys_of(self.stores[place]):
            return {}
        with opened(self.stores[place]) as repository:
            found = repository.view().snapshots("a", states=None)
        return {
            s.id: Row(
                s.id, self.saves[s.id][0], s.step, s.seq, s.state, tuple(s.tags), self.saves[s.id][2], s.key, s.reason
            )
            for s in found
        }

    def check_values(self, place: str, row: Row) -> None:
        with opened(self.stores[place]) as repository:
            try:
                state = repository.restore(f"id:{row.id}")
            except UNREAD:
                assert self.is_hurt(place, row.id), f"{place}: step {row.step} is damaged"
                return
        assert same(state, values("a", row.order)), f"{place}: step {row.step} differs"

    def is_hurt(self, place: str, name: str) -> bool:
        """Return whether a snapshot needs an object that is broken in a store."""
        if not self.broken[place]:
            return False
        with opened(self.stores[place]) as repository:
            snapshot = repository.view().get(name)
        if snapshot is None or snapshot.state not in (COMMITTED, FORGOTTEN):
            return False
        if any(ref.key in self.broken[place] for ref in snapshot.manifests):
            return True
        return not self.broken[place].isdisjoint(objects_of(self.stores[place], snapshot))

    def hurt(self, place: str) -> set[str]:
        """Return the ids of the committed snapshots of a store that need a broken object."""
        return {i for i in committed(self.rows[place]) if self.is_hurt(place, i)}

    def learn(self, place: str, *, going: Iterable[str] = (), untagged: Iterable[tuple[str, str]] = ()) -> None:
        """Look at a store after a rule, which forgets exactly `going`, and takes exactly `untagged` from others."""
        before, now = self.rows[place], self.look(place)
        gone = {i for i in committed(before) if i not in committed(now)}
        assert gone == {*going}, f"{place}: {self.named(gone)} forgotten, expected {self.named(going)}"
        lost = {(i, name) for i in committed(now) if i in before for name in before[i].tags if name not in now[i].tags}
        assert lost == {*untagged}, f"{place}: lost tags {lost}"
        self.take(place, now)

    def take(self, place: str, now: Rows) -> None:
        """Note what a store has; restore what is new there."""
        before, self.rows[place] = self.rows[place], now
        for i, row in committed(now).items():
            if i not in committed(before):
                self.check_values(place, row)

    def named(self, ids: Iterable[str]) -> list[str]:
        return sorted(f"{self.saves[i][1]} (save {self.saves[i][0]})" for i in ids)

    @property
    def is_reached(self) -> bool:
        return not self.doors["mirror"].shut

    @property
    def is_read(self) -> bool:
        return not any(door.bad or door.lost for door in self.doors.values())

    def both(self) -> Rows:
        """Return the committed snapshots of both stores, as far as they can be reached; those of the first count."""
        return {**(committed(self.rows["mirror"]) if self.is_reached else {}), **committed(self.rows["first"])}

    def newest(self) -> Row | None:
        """Return the last save of both stores, without the last ones of the first that were forgotten by name."""
        saved = [row for row in self.rows["first"].values() if row.state != ABORTED]
        saved.sort(key=lambda row: row.order, reverse=True)
        unwanted = {row.id for row in itertools.takewhile(lambda row: row.reason == NAMED, saved)}
        return max((row for i, row in self.both().items() if i not in unwanted), key=lambda r: r.order, default=None)

    def by_step(self) -> dict[int, Row]:
        """Return the snapshot that each step names: in the first store if it has the step, else in the mirror."""
        found: dict[int, Row] = {}
        for place in ("mirror", "first") if self.is_reached else ("first",):
            rows = committed(self.rows[place])
            for row in rows.values():  # the last save of a step comes last
                found[row.step] = row
        return found

    def best(self) -> list[Row]:
        """Return the best snapshots, which have equal metrics; those of different stores have no order."""
        policy = next((policy for policy in self.keep if isinstance(policy, KeepBest)), None)
        ranked = policy.ranked(self.by_step().values()) if policy else []
        return [row for row in ranked if row.metrics == ranked[0].metrics]

    # -- the manager

    def close(self) -> None:
        if self.manager is not None:
            self.doors["mirror"].gate.set()
            manager, self.manager = self.manager, None
            manager.close(30)
            before, now = self.rows["mirror"], self.look("mirror")  # it may have gone on under its own policies
            self.judge_mirror(before, now)
            self.take("mirror", now)
            self.held, self.unread, self.parent = set(), set(), None
        for door in self.doors.values():
            door.bad.clear()
        self.doors = {place: replaced(door, self.stores[place]) for place, door in self.doors.items()}

    def catch_up(self) -> None:
        """Wait until everything is mirrored, and look at what the mirror did."""
        manager = self.manager
        if manager is None:
            return
        # An attempt from before the mirror could be reached may end only now. And policies do not count a snapshot that
        # has failed, so the next attempt may copy another one.
        for _ in range(3):
            left = manager.wait_until_mirrored(30)
            if not left or not self.is_reached:
                break
        self.learn("first")
        before, now = self.rows["mirror"], self.look("mirror")
        if not self.is_reached:
            assert now == before
        self.judge_mirror(before, now)
        self.take("mirror", now)
        self.unread = {row.id for row in now.values() if row.key in self.doors["mirror"].bad}
        if self.is_reached:
            self.held |= {i for i, row in now.items() if row.is_dropped}
        lacking = {i for i in self.held & committed(self.rows["first"]).keys() if not is_mirrored(now.get(i))}
        steps = [self.saves[i][1] for i in lacking]
        if self.is_reached:
            count = Counter(left)  # of several saves of a step, the last ones; a step may be that of an unread record
            self.held = set()
            for i in sorted(lacking | self.unread, key=lambda i: -self.saves[i][0]):
                if count[self.saves[i][1]]:
                    count[self.saves[i][1]] -= 1
                    self.held |= {i} & lacking
        else:
            assert {*steps} <= {*left}, "not_mirrored names too few steps"
        assert manager.not_mirrored() == left
        if self.is_reached and self.is_read:
            hurt = {self.saves[i][1] for i in self.hurt("first")}
            assert {*left} <= hurt, f"not mirrored: {left}, expected only {hurt}"
        if self.is_reached and not any(door.bad for door in self.doors.values()):
            self.judge_idle(now, left)

    def judge_mirror(self, before: Rows, now: Rows) -> None:
        """Check that the mirror forgot only what its policies do not keep, and moved only tags that have moved."""
        first = self.rows["first"]
        for i, row in committed(before).items():
            for name in {*row.tags} - {*now[i].tags}:
                holders = [other for other in committed(first).values() if name in other.tags and other.id != i]
                moved = any(i in first or other.order > row.order for other in holders)
                assert moved, f"mirror: {self.named([i])} lost its tag {name}"
        gone = [i for i, row in now.items() if is_gone(row) and not is_gone(before.get(i))]
        new = [row for i, row in committed(now).items() if i not in committed(before)]
        new += [now[i] for i in gone if i not in committed(before)]
        new.sort(key=lambda row: (first[row.id].seq, row.id) if row.id in first else (-1, row.id))
        there = [replace(now[i], tags=() if i in gone else now[i].tags) for i in committed(before)]
        free: set[str] = set()
        for count in range(len(new) + 1):
            free |= left_by(self.mirror_keep, [*there, *new[:count]])
        assert {*gone} <= free, f"mirror: {self.named({*gone} - free)} forgotten"

    def judge_idle(self, there: Rows, left: list[int]) -> None:
        """Check that a mirror that is idle has all that it is to have, but for the steps that are left."""
        first, kept = self.rows["first"], committed(there)
        later = {name for i, row in kept.items() if i not in first for name in row.tags}
        holders = {name: i for i, row in committed(first).items() for name in row.tags}  # a tag means the last of them
        for name, i in holders.items():
            if name not in later:  # the first store may be an older backup
                assert i in kept or first[i].step in left, f"mirror: lacks {self.named([i])}, tagged {name}"
                assert i not in kept or name in kept[i].tags
        lacking = [row for i, row in committed(first).items() if not is_mirrored(there.get(i))]
        due = self.kept_of(lacking, (*kept.values(), *lacking))
        due = self.kept_of(due, (*kept.values(), *due))  # the mirror does not know the others, which may replace steps
        due = self.kept_of(due, {**kept, **committed(first)}.values())  # or it forgot some for others
        due = [row for row in due if row.step not in left]
        assert not due, f"mirror: lacks {self.named(row.id for row in due)}"
        if self.mirror_keep:
            with opened(self.stores["mirror"]) as repository:
                assert repository.policies("a") == self.mirror_keep

    def kept_of(self, some: Iterable[Row], rows: Iterable[Row]) -> list[Row]:
        """Return those rows that the policies of the mirror keep among others, in the order of the saves."""
        free = left_by(self.mirror_keep, [replace(row, seq=row.order) for row in rows])
        return [row for row in some if row.id not in free]

    # -- rules

    @initialize(keep=KEEPS, mirror_keep=KEEPS, shut=st.booleans())
    def begin(self, keep, mirror_keep, shut) -> None:
        self.doors["mirror"].shut = shut
        self.open(keep, mirror_keep, None, 0)

    @rule(keep=KEEPS, mirror_keep=KEEPS, unread=st.one_of(st.none(), st.none(), PLACES), number=st.integers(0, 9))
    def open(self, keep, mirror_keep, unread, number) -> None:
        """Close the manager, and make another one; a record of one store may be unreadable."""
        self.close()
        rows = list(self.rows[unread].values()) if unread else []
        if rows:
            self.doors[unread].bad = {rows[-1 - number % len(rows)].key}
        self.keep, self.mirror_keep = keep, mirror_keep
        doors = self.doors
        try:
            self.manager = SnapshotManager(
                doors["first"], run="a", mirror=doors["mirror"], keep=keep, mirror_keep=mirror_keep,
                async_save=False, options=OPTIONS, ranks=False,
            )  # fmt: skip
        except StorageError:  # a new first store takes the seed of the mirror
            assert not self.is_reached
            assert "config" not in keys_of(self.stores["first"])
            return
        self.held = {*committed(self.rows["first"])}
        self.catch_up()

    @precondition(lambda self: self.manager is None)
    @rule(keep=KEEPS, mirror_keep=KEEPS)
    def start(self, keep, mirror_keep) -> None:
        self.open(keep, mirror_keep, None, 0)

    @rule()
    def start_again(self) -> None:
        self.open(self.keep, self.mirror_keep, None, 0)

    @rule()
    def go_down(self) -> None:
        self.doors["mirror"].shut = True
        self.catch_up()

    @rule()
    def come_up(self) -> None:
        self.doors["mirror"].shut = False
        self.catch_up()

    @precondition(lambda self: not self.is_read)
    @rule()
    def heal(self) -> None:
        for door in self.doors.values():
            door.bad.clear()
            door.lost.clear()

    @rule(how=st.sampled_from(READ_FAULTS))
    def shake(self, how) -> None:
        """Let the mirror's first read of each pack and manifest of the first store fail."""
        self.doors["first"].shaky = how

    @precondition(lambda self: self.manager is not None)
    @rule(step=STEPS, loss=LOSSES, how=st.sampled_from(READ_FAULTS), kind=st.sampled_from(BYTES))
    def train_and_lose(self, step, loss, how, kind) -> None:
        """Save a step whose packs or manifests the mirror cannot read in the first store."""
        self.losing = how, kind
        self.save(step, loss, [])

    @precondition(lambda self: self.manager is not None)
    @rule(step=STEPS, losses=st.lists(LOSSES, min_size=1, max_size=5), tag=st.one_of(st.none(), st.none(), TAGS))
    def train(self, step, losses, tag) -> None:
        """Save some steps, of which the first one may be tagged."""
        for number, loss in enumerate(losses):
            self.save(step + number, loss, [tag] if tag and not number else [])

    @precondition(lambda self: self.manager is not None and self.saves)
    @rule(losses=st.lists(LOSSES, min_size=1, max_size=2), tag=st.one_of(st.none(), TAGS))
    def train_on(self, losses, tag) -> None:
        """Save the steps that follow the last save."""
        self.train(next(reversed(self.saves.values()))[1] + 1, losses, tag)

    @precondition(lambda self: self.manager is not None and not self.is_reached and len(self.held) < 4)
    @rule(count=st.integers(HELD_AT_MOST, HELD_AT_MOST + 2))
    def train_long(self, count) -> None:
        """Save more steps than the first store holds for the mirror."""
        self.train(1, [1.0] * count, None)

    def save(self, step: int, loss: float | None, tags: list[str]) -> None:
        order, metrics = len(self.saves), {} if loss is None else {"loss": loss}
        self.doors["mirror"].gate.clear()  # the policies of the first store come before the mirror
        snapshot = self.manager.save(step, values("a", order), metrics=metrics, tags=tags, force=True).result()
        try:
            self.manager.check_for_errors()
        except IntegrityError:  # of a gc, which misses a pack
            assert self.broken["first"]
        if self.losing is not None:
            (how, kind), self.losing = self.losing, None
            keys = sorted(key for key in objects_of(self.stores["first"], snapshot) if key.startswith(kind))
            self.doors["first"].lost |= dict.fromkeys(keys, how)
            tally("mirror machine lost saves")
        self.saves[snapshot.id] = order, step, metrics
        self.held.add(snapshot.id)
        if self.parent is not None:
            assert snapshot.parent == self.parent
        self.parent = snapshot.id
        rows = committed(self.rows["first"])
        taken = [(i, name) for i, row in rows.items() for name in row.tags if name in tags]
        rows = {i: replace(row, tags=tuple(name for name in row.tags if name not in tags)) for i, row in rows.items()}
        new = Row(snapshot.id, order, step, snapshot.seq, COMMITTED, tuple(tags), metrics, snapshot.key)
        rows[new.id] = new
        damaged = self.in_need_of_quarantined()
        free = left_by(self.keep, [row for i, row in rows.items() if i not in damaged])
        going = free - self.oldest(rows, free & self.held)
        if not self.is_read or self.unread:  # policies do not count a record that cannot be read, and its tags stay
            now = self.look("first")
            gone = {i for i in rows if now[i].state != COMMITTED}
            going |= free - self.oldest(rows, free & (self.held | self.unread))
            assert gone <= going, f"first: {self.named(gone - going)} forgotten"
            going = gone
            taken = [(i, name) for i, name in taken if name not in now[i].tags]
        self.learn("first", going=going & self.rows["first"].keys(), untagged=[t for t in taken if t[0] not in going])
        self.doors["mirror"].gate.set()
        self.catch_up()

    def in_need_of_quarantined(self) -> set[str]:
        """Return what may need a pack in quarantine in the first store: it stays, and no policy counts it.

        A repair has dropped the snapshots that need one. But a manifest that was lost since may have named one.
        """
        with opened(self.stores["first"]) as repository:
            damaged = repository.in_need_of_quarantined(repository.view().snapshots("a"))
        lost = [key for key in self.broken["first"] if key.startswith("manifests/")]
        assert not damaged or lost
        assert all(self.is_hurt("first", i) for i in damaged)
        return damaged

    @staticmethod
    def oldest(rows: Rows, held: set[str]) -> set[str]:
        """Return the snapshots that the first store holds for the mirror."""
        return {*[i for i in rows if i in held][:HELD_AT_MOST]}

    @precondition(lambda self: self.manager is not None)
    @rule(ref=REFS)
    def restore(self, ref) -> None:
        """Restore, and go on from there: later saves are a branch."""
        expected = self.meant(ref)
        try:
            state = self.manager.restore(ref)
        except NotFoundError:
            assert not expected or not self.is_read or (ref == "best" and not self.best())
            return
        except UNREAD:
            hurt = any(self.is_hurt(place, row.id) for place in self.rows for row in expected)
            assert not self.is_read or hurt or not expected  # else the step has no save but dropped ones
            self.catch_up()
            return
        expected = expected or self.dropped(ref)
        if self.is_read or expected:
            assert any(same(state, values("a", row.order)) for row in expected), f"restore({ref!r})"
        self.parent = next(i for i, (order, *_) in self.saves.items() if same(state, values("a", order)))
        self.catch_up()

    def meant(self, ref: int | str | None) -> list[Row]:
        """Return the snapshots of which `restore` may return any."""
        if ref is None:
            newest = self.newest()
            return [newest] if newest else []
        if isinstance(ref, str):
            first = committed(self.rows["first"])
            besides = first if ref in ("best", "highest") else ()  # the tags in the first store count, if it has it
            for place in ("first", "mirror") if self.is_reached else ("first",):
                rows = [row for row in committed(self.rows[place]).values() if ref in row.tags]
                if tagged := [row for row in rows if place == "first" or row.id not in besides]:
                    return tagged
        if ref == "best":
            return self.best() if any(isinstance(p, KeepBest) for p in self.keep) else self.stored_best()
        by_step = self.by_step()
        if ref == "highest":
            return [by_step[max(by_step)]] if by_step else []
        if ref in by_step:
            return [by_step[ref]]
        left = [*self.rows["first"].values(), *(self.rows["mirror"].values() if self.is_reached else ())]
        return [row for row in left if row.state == FORGOTTEN and row.step == ref and not row.is_dropped]

    def dropped(self, ref: int | str | None) -> list[Row]:
        """Return the saves of a step that a repair has dropped: a later copy may have put the same pack again."""
        rows = [*self.rows["first"].values(), *(self.rows["mirror"].values() if self.is_reached else ())]
        return [row for row in rows if row.state == FORGOTTEN and row.step == ref and row.is_dropped]

    def stored_best(self) -> list[Row]:
        """Return all: the stored policies may be those of an earlier manager, in either store."""
        return list(self.both().values())

    def drawn(self, data: Any, place: str, *states: str) -> Row | None:
        there = [row for row in self.rows[place].values() if row.state in states]
        return data.draw(st.sampled_from(sorted(there, key=lambda row: row.order))) if there else None

    @rule(place=PLACES, name=TAGS, data=st.data(), ref=st.one_of(st.none(), STEPS))
    def tag(self, place, name, data, ref) -> None:
        """Tag a snapshot; restore a step before the mirror hears of the tag."""
        if row := self.drawn(data, place, COMMITTED):
            with opened(self.stores[place]) as repository:
                repository.tag(f"id:{row.id}", name)
            others = [i for i, other in committed(self.rows[place]).items() if name in other.tags and i != row.id]
            self.learn(place, untagged=[(i, name) for i in others])
            if ref is not None and self.manager is not None:
                self.restore(ref)
            self.catch_up()

    @rule(place=PLACES, name=TAGS)
    def untag(self, place, name) -> None:
        for i, row in committed(self.rows[place]).items():
            if name in row.tags:
                with opened(self.stores[place]) as repository:
                    repository.untag(f"id:{i}", name)
                self.learn(place, untagged=[(i, name)])
                self.catch_up()
                return

    @rule(place=PLACES, data=st.data())
    def forget(self, place, data) -> None:
        self.forget_row(place, self.drawn(data, place, COMMITTED))

    @rule(place=PLACES)
    def forget_last(self, place) -> None:
        rows = committed(self.rows[place]).values()
        self.forget_row(place, max(rows, key=lambda row: row.order, default=None))

    def forget_row(self, place: str, row: Row | None) -> None:
        if row and not row.tags:
            with opened(self.stores[place]) as repository:
                repository.forget_snapshots([f"id:{row.id}"], force=True)
            self.learn(place, going=[row.id])
            self.catch_up()

    @rule(place=PLACES, data=st.data())
    def unforget(self, place, data) -> None:
        row = self.drawn(data, place, FORGOTTEN)
        if row and not row.is_dropped and not self.is_hurt(place, row.id):
            with opened(self.stores[place]) as repository:
                repository.unforget(f"id:{row.id}")
            self.learn(place)
            self.catch_up()

    @rule(place=PLACES)
    def gc(self, place) -> None:
        if "config" in keys_of(self.stores[place]):
            with opened(self.stores[place]) as repository:
                try:
                    repository.gc()
                except UNREAD:
                    assert self.hurt(place)
            self.learn(place)
            for row in committed(self.rows[place]).values():
                self.check_values(place, row)

    @rule(place=PLACES, kind=st.sampled_from(BYTES), how=BREAKS, data=st.data())
    def break_object(self, place, kind, how, data) -> None:
        """Lose a pack or a manifest of a committed snapshot, or damage it."""
        row = self.drawn(data, place, COMMITTED)
        if row is None or self.is_hurt(place, row.id):
            return
        store = self.stores[place]
        keys = [key for key in objects_of(store, snapshot_of(store, f"id:{row.id}")) if key.startswith(kind)]
        if keys:
            key = data.draw(st.sampled_from(sorted(keys)))
            self.broken[place].add(key)
            break_one(store, key, how)
            tally("mirror machine broken objects")
            self.catch_up()

    @rule(place=PLACES, kind=st.sampled_from(BYTES), how=BREAKS, data=st.data(), purge=st.booleans())
    def break_and_repair(self, place, kind, how, data, purge) -> None:
        self.break_object(place, kind, how, data)
        self.repair(place, purge)

    @precondition(lambda self: any(self.broken.values()))
    @rule(place=PLACES, purge=st.booleans())
    def repair(self, place, purge) -> None:
        """Repair a store, and let the repair drop what stays damaged; its tags go first."""
        hurt = self.hurt(place)
        if not hurt:
            return
        with opened(self.stores[place]) as repository:
            lost = repository.repair(apply=True).left
            untagged = [(s.id, name) for s in lost for name in s.tags]
            for i, name in untagged:
                repository.untag(f"id:{i}", name)
            report = repository.repair(apply=True, drop=True, purge=purge)
        going = {s.id for s in report.dropped}
        assert report.left == []
        assert going == {s.id for s in lost}
        assert going <= hurt
        self.learn(place, going=going, untagged=[t for t in untagged if t[0] not in going])
        assert not self.hurt(place)
        for row in committed(self.rows[place]).values():
            self.check_values(place, row)
        tally("mirror machine dropped snapshots", len(going))
        self.catch_up()

    @rule()
    def lose(self) -> None:
        """Lose the first store; without a mirror nothing is left of it."""
        if "config" not in keys_of(self.stores["mirror"]):
            self.backup = None  # the seed of the new store may be another one
        self.replace_first(MemoryStore(), set())

    @rule()
    def keep_backup(self) -> None:
        if "config" in keys_of(self.stores["first"]) and "config" in keys_of(self.stores["mirror"]):
            self.backup, self.broken_in_backup = clone(self.stores["first"]), {*self.broken["first"]}

    @precondition(lambda self: self.backup is not None)
    @rule()
    def go_back(self) -> None:
        """Put an older backup in the place of the first store."""
        self.replace_first(clone(self.backup), {*self.broken_in_backup})

    def replace_first(self, store: MemoryStore, broken: set[str]) -> None:
        self.close()
        self.broken["first"] = broken
        self.stores["first"], self.doors["first"] = store, Door(store)
        self.rows["first"] = self.look("first")
        self.open(self.keep, self.mirror_keep, None, 0)

    # -- invariants

    @invariant()
    def answers(self) -> None:
        tally("mirror machine steps")
        manager = self.manager
        if manager is None:
            return
        newest, by_step = self.newest(), self.by_step()
        self.check_answer(manager.latest_step, [newest.step if newest else None])
        self.check_answer(manager.highest_step, [max(by_step, default=None)])
        self.check_answer(manager.all_steps, [sorted(by_step)])
        if any(isinstance(policy, KeepBest) for policy in self.keep):
            self.check_answer(manager.best_step, [row.step for row in self.best()] or [None])

    def check_answer(self, ask: Callable[[], Any], expected: list[Any]) -> None:
        try:
            found = ask()
        except UNREAD:
            assert not self.is_read
            return
        assert found in expected, f"{ask.__name__} returned {found}, expected one of {expected}"


def replaced(door: Door, store: MemoryStore) -> Door:
    """Return a new door to a store, as open as the one before: what is left of a manager has the old one."""
    new = Door(store)
    new.shut = door.shut
    door.shut = True
    return new


def break_one(store: MemoryStore, key: str, how: str) -> None:
    """Lose an object, its last byte, or one bit of it."""
    data = store.get(key)
    if how == "flipped":
        flip_in_place(store, key, len(data) // 2)
    elif how == "cut":
        replace_object(store, key, data[:-1])
    else:
        store.delete([key])


def is_mirrored(row: Row | None) -> bool:
    return row is not None and row.state in (COMMITTED, FORGOTTEN, SWEPT) and not row.is_dropped


def is_gone(row: Row | None) -> bool:
    return row is not None and row.state in (FORGOTTEN, SWEPT) and not row.is_dropped


@pytest.mark.sampled(1)
@pytest.mark.no_cover  # see test_crash_points.py
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(16 if THOROUGH else 2))  # so that several cores share the work
def test_mirror_machine(part, monkeypatch):
    """No policy, restart, loss or outage costs a snapshot that one of the stores is to have, and no answer is wrong."""
    one_thread(monkeypatch, index=False)
    monkeypatch.setattr("snapstore.repository.new_seed", lambda: 5)
    monkeypatch.setattr(records, "new_id", records.new_id)  # `Machine` sets its own, which ends with the test
    monkeypatch.setattr(mirrors, "RETRY_S", 60.0)  # it tries again when it is waited for, and not at any time
    run_machine(
        seed(16 * (SEED if THOROUGH else 0) + part)(Machine),
        settings=settings(
            max_examples=60 if THOROUGH else 8,
            stateful_step_count=50 if THOROUGH else 30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
