"""A repository behaves as a dict does under random programs of all verbs (a state machine of hypothesis).

`SNAPSTORE_TEST_THOROUGH=1` runs many more and longer programs (a nightly job).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kit import foreign
from kit.actors import Actor
from kit.faults import CRASHES, MODES, Crash, FaultStore, one_thread
from kit.objects import keys_of
from kit.ranks import RankStore, part_of, save_shared
from kit.repositories import (
    OPTIONS,
    check_clean,
    dearest,
    is_whole,
    objects_of,
    opened,
    same,
    save,
    values,
    version_in,
    version_of,
)
from kit.samples import SEED, THOROUGH
from kit.schedules import saving
from kit.tally import tally
from snapstore import (
    InvalidInputError,
    KeepBest,
    KeepBytes,
    KeepEvery,
    KeepLast,
    KeepSteps,
    NotFoundError,
    Repository,
    Snapshot,
    SnapstoreError,
    StorageError,
)
from snapstore.format import records
from snapstore.format.keys import parse_record_key, quarantined_names
from snapstore.protocol.liveness import orphaned_sessions
from snapstore.storage.memory import MemoryStore

RUNS = st.sampled_from(["a", "b"])
STEPS = st.integers(0, 5)
TAGS = st.sampled_from(["good", "best"])
POLICIES = st.lists(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 3)),
        st.builds(KeepEvery, st.integers(1, 4)),
        st.builds(KeepSteps, st.lists(STEPS, min_size=1, max_size=2)),
        st.builds(KeepBest, st.just("loss"), st.integers(1, 2)),
        st.builds(KeepBytes, st.integers(1, 30_000)),
    ),
    min_size=1,
    max_size=2,
)
PROCESSES = st.integers(0, 1)
COUNTS = st.integers(1, 4)  # of ranks
LOOKERS = st.integers(0, 2)  # see Machine.looking
KEEP = [KeepLast(2)]
#: Verbs that may fail before their end, by name.
VERBS: dict[str, Callable[[Repository, str], Any]] = {
    "forget": lambda repository, run: repository.forget(KEEP, run=run),
    "gc": lambda repository, run: repository.gc(),
    "compact": lambda repository, run: repository.compact(),
    "recode": lambda repository, run: repository.recode(),
    "repair": lambda repository, run: repository.repair(apply=True),
}
#: Where a bit flips: the class of the object, which of that class, where in it.
FLIPS = st.lists(st.tuples(st.integers(0, 29), st.integers(0, 99), st.integers(0, 2**20 - 1)), min_size=1, max_size=2)
STATES = ("committed", "forgotten", "swept")


@dataclass
class Known:
    """One snapshot as it should be.

    Attributes:
        count: the number of its save in the program.
    """

    run: str
    step: int
    count: int
    seq: int
    version: tuple[str, int]
    parent: str | None
    state: str = "committed"
    tags: set[str] = field(default_factory=set)


def leaves(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each tensor and array."""
    for part in ("model", "optimizer"):
        yield from ((f"{part}.{name}", value) for name, value in state[part].items())


def counted_ids() -> Callable[[], str]:
    """Return a source of ids that look random, but are the same for the same program.

    A pack's name depends on its content, which includes an id, and a gc that dies has gone by names. With random ids it
    would have taken other snapshots when hypothesis repeats a program, and a repetition must not differ.
    """
    numbers = itertools.count()
    return lambda: hashlib.sha256(str(next(numbers)).encode()).hexdigest()[:32]


def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the same program give all objects the same names: those of packs depend on digests, so on the seed."""
    monkeypatch.setattr("snapstore.repository.new_seed", lambda: 5)
    monkeypatch.setattr(records, "new_id", records.new_id)  # `Machine` sets its own, which ends with the test


class Machine(RuleBasedStateMachine):
    """Two Repository objects, called processes, over one store, and a slow writer; `self.known` is the model."""

    def __init__(self) -> None:
        super().__init__()
        records.new_id = counted_ids()  # `repeatable` puts the real one back
        orphaned_sessions.clear()  # an earlier program's orphaned sessions have the ids of this one's saves
        self.store = MemoryStore()
        Repository.create(self.store, chunk_bytes=1024, options=OPTIONS).close()
        self.known: dict[str, Known] = {}
        self.policies: dict[str, list[Any]] = {}
        self.count = 0
        self.saved: dict[str, int] = {}  # run -> the last version that `save` has saved
        self.open: list[tuple[FaultStore, Repository] | None] = [None, None]
        self.lineage: list[dict[str, str | None]] = [{}, {}]  # the parent of each process's next save, by run
        self.slow: tuple[Actor, str, int, int] | None = None  # a save that has stopped: (actor, run, step, version)

    def teardown(self) -> None:
        if self.slow is not None:
            self.go_on(10_000)
        for process in (0, 1):
            self.close(process)
        with opened(self.store) as repository:
            repository.repair(apply=True, purge=True)
            repository.gc()  # deletes damaged packs that nobody needs any more
            report = repository.repair(apply=True)
            assert report.ok, f"{report.open} {report.lost}"
        check_clean(self.store, level="restore")  # always decode: a repeated program must find the same

    def close(self, process: int) -> None:
        if self.open[process] is not None:
            store, repository = self.open[process]
            repository.close()
            store.die()
            self.open[process] = None
            self.lineage[process] = {}

    def at(self, process: int) -> Repository:
        if self.open[process] is None:
            store = FaultStore(self.store)
            self.open[process] = store, Repository.open(store, options=OPTIONS)
        return self.open[process][1]

    @contextmanager
    def looking(self, process: int) -> Iterator[Repository]:
        """Yield the repository of a process; 2 is a new process, without an index or a cache."""
        if process < 2:
            yield self.at(process)
        else:
            with opened(self.store, damaged=True) as repository:
                yield repository

    # -- the model

    def of(self, run: str, *states: str) -> dict[str, Known]:
        found = {i: k for i, k in self.known.items() if k.run == run and k.state in (states or ("committed",))}
        return dict(sorted(found.items(), key=lambda item: (item[1].seq, item[0])))

    def newest(self, run: str) -> str | None:
        return next(reversed(self.of(run)), None)

    def at_step(self, run: str, step: int) -> str | None:
        return next((i for i, k in reversed(self.of(run).items()) if k.step == step), None)

    def drawn(self, data: Any, *states: str) -> str | None:
        """Draw a snapshot in one of these states, if there is one."""
        there = [i for i, k in self.known.items() if k.state in states]
        return data.draw(st.sampled_from(sorted(there, key=lambda i: self.known[i].count))) if there else None

    def learn(self, snapshot: Snapshot, version: int) -> None:
        """Note that a save has committed, without tags."""
        run = snapshot.run
        self.known[snapshot.id] = Known(run, snapshot.step, version, snapshot.seq, (run, version), snapshot.parent)

    def find(self, process: int, run: str, version: int) -> None:
        """Learn the save of a version if it has committed and is not known yet."""
        for snapshot in self.at(process).snapshots(run):
            if version_of(snapshot) == (run, version) and snapshot.id not in self.known:
                self.learn(snapshot, version)

    def note_swept(self) -> None:
        """Learn which forgotten snapshots a gc has swept; check that it swept no others."""
        with self.looking(2) as repository:
            for snapshot in repository.view().snapshots(states=("swept",)):
                assert self.known[snapshot.id].state in ("forgotten", "swept")
                self.known[snapshot.id].state = "swept"

    # -- rules

    @initialize()
    def begin(self) -> None:
        self.save(0, "a", 0, (), False, False)

    @rule(
        process=PROCESSES, run=RUNS, step=STEPS, tags=st.one_of(st.just(()), st.tuples(TAGS)),
        abroad=st.integers(0, 3).map(lambda number: number == 3), unchanged=st.booleans(),
    )  # fmt: skip
    def save(self, process, run, step, tags, abroad, unchanged) -> None:
        """Save a new version, or the last one once more."""
        repository = self.at(process)
        self.count += 1
        if not unchanged or run not in self.saved:
            self.saved[run] = self.count
        lineage = self.lineage[process]
        parent = lineage.get(run) or self.newest(run)
        with foreign.written() if abroad else nullcontext():
            snapshot = save(repository, run, step, self.saved[run], tags=tags)
        assert snapshot.parent == parent
        assert all(snapshot.seq > known.seq for known in self.of(run, *STATES).values())
        assert dearest(repository.store, snapshot) <= 1.01 * OPTIONS.restore_cost
        for known in self.known.values():
            if known.run == run and known.state == "committed":
                known.tags -= set(tags)  # a tag names one snapshot of a run
        self.learn(snapshot, self.saved[run])
        self.known[snapshot.id].tags = set(tags)
        lineage[run] = snapshot.id

    @rule(process=PROCESSES, run=RUNS, step=STEPS, k=st.integers(0, 60), mode=st.sampled_from(CRASHES))
    def save_and_crash(self, process, run, step, k, mode) -> None:
        repository = self.at(process)
        store = self.open[process][0]
        store.at, store.mode = len(store.log) + k, mode
        self.count += 1
        try:
            self.learn(save(repository, run, step, self.count), self.count)
        except Crash:
            self.find(1 - process, run, self.count)
        self.close(process)

    @rule(process=PROCESSES, run=RUNS, step=STEPS, k=st.integers(0, 40), mode=st.sampled_from(("fail", "lost")))
    def save_and_fail(self, process, run, step, k, mode) -> None:
        repository = self.at(process)
        store = self.open[process][0]
        store.at, store.mode = len(store.log) + k, mode
        self.count += 1
        try:
            snapshot = save(repository, run, step, self.count)
        except StorageError:
            pass
        else:
            self.learn(snapshot, self.count)
            self.lineage[process][run] = snapshot.id
        store.heal()

    @rule(run=RUNS, step=STEPS, count=COUNTS, tags=st.one_of(st.just(()), st.tuples(TAGS)))
    def save_together(self, run, step, count, tags) -> None:
        """A job of several ranks saves one snapshot, and ends."""
        self.count += 1
        parent, before = self.newest(run), len(self.store._objects)
        found = save_shared([self.store] * count, run, step, self.count, tags=tags)
        self.order_new_keys(before)
        assert all(isinstance(snapshot, Snapshot) and snapshot.id == found[0].id for snapshot in found), found
        assert found[0].features == ["ranks"]
        assert found[0].parent == parent
        assert dearest(self.store, found[0]) <= 1.01 * OPTIONS.restore_cost
        for known in self.of(run).values():
            known.tags -= set(tags)
        self.learn(found[0], self.count)
        self.known[found[0].id].tags = set(tags)

    def order_new_keys(self, first: int) -> None:
        """Sort new objects, whichever rank was faster: `flip` depends on their order."""
        objects = list(self.store._objects.items())
        self.store._objects = dict(objects[:first] + sorted(objects[first:]))

    @precondition(lambda self: THOROUGH)  # it waits for ranks that are silent; test_ranks_faults.py has each case
    @rule(run=RUNS, step=STEPS, rank=st.integers(0, 1), k=st.integers(0, 60), mode=st.sampled_from(CRASHES))
    def save_together_and_crash(self, run, step, rank, k, mode) -> None:
        self.count += 1
        stores = [RankStore(self.store) for _ in range(2)]
        stores[rank].at, stores[rank].mode = k, mode
        before = len(self.store._objects)
        found = save_shared(stores, run, step, self.count, silent_s=0.5, tells_deaths=True)
        self.order_new_keys(before)
        for store in stores:
            store.die()
        self.find(0, run, self.count)
        committed = {i for i, known in self.known.items() if known.version == (run, self.count)}
        assert {word.id for word in found if isinstance(word, Snapshot)} <= committed

    @precondition(lambda self: self.slow is None)
    @rule(run=RUNS, step=STEPS, k=st.integers(1, 60))
    def save_slowly(self, run, step, k) -> None:
        """A third process stops in the middle of a save; all others go on."""
        self.count += 1
        self.slow = Actor("slow", self.store, saving(run, step, self.count)), run, step, self.count
        self.go_on(k)

    @precondition(lambda self: self.slow is not None)
    @rule(k=st.integers(1, 60))
    def go_on(self, k) -> None:
        actor, run, _, version = self.slow
        for _ in range(k):
            if not actor.ended:
                actor.step()
        self.find(0, run, version)
        if actor.ended:
            self.slow = None
            assert actor.finish().id in self.known

    @rule(process=PROCESSES, data=st.data())
    def restore(self, process, data) -> None:
        chosen = self.drawn(data, "committed", "forgotten")
        if chosen is None:  # all were forgotten and swept
            return
        assert same(self.at(process).restore(f"id:{chosen}"), values(*self.known[chosen].version))

    @rule(process=PROCESSES, data=st.data(), count=COUNTS)
    def restore_shares(self, process, data, count) -> None:
        """Each of some ranks restores its rows, whatever the number of ranks that saved them."""
        chosen = self.drawn(data, "committed", "forgotten")
        if chosen is None:
            return
        whole = values(*self.known[chosen].version)["model"]["drift"]
        for rank in range(count):
            target = part_of(whole.new_zeros(whole.shape), rank, count)
            self.at(process).restore_into(f"id:{chosen}", {"model": {"drift": target}}, keys="model.drift")
            assert same(target.data, part_of(whole, rank, count).data)

    @rule(process=PROCESSES, data=st.data())
    def diff(self, process, data) -> None:
        first, second = (self.drawn(data, "committed", "forgotten") for _ in range(2))
        if first is None or second is None:
            return
        old, new = (dict(leaves(values(*self.known[i].version))) for i in (first, second))
        found = self.at(process).diff(f"id:{first}", f"id:{second}")
        changed = {tensor.path for tensor in found.tensors if tensor.status != "same"}
        assert changed == {path for path in old if not same(old[path], new[path])}

    @rule(process=PROCESSES, run=RUNS, step=STEPS)
    def resolve(self, process, run, step) -> None:
        expected = self.at_step(run, step)
        forgotten = [i for i, k in self.of(run, "forgotten").items() if k.step == step]
        if expected is None and forgotten:
            expected = forgotten[-1]
        if expected is None:
            with pytest.raises(NotFoundError):
                self.at(process).snapshot(f"{run}@{step}")
        else:
            assert self.at(process).snapshot(f"{run}@{step}").id == expected

    @rule(process=PROCESSES, run=RUNS, keep=POLICIES)
    def set_policies(self, process, run, keep) -> None:
        assert self.at(process).policies(run) == self.policies.get(run, [])
        self.at(process).set_policies(run, keep)
        self.policies[run] = keep
        assert self.at(1 - process).policies(run) == keep

    @rule(process=PROCESSES, run=RUNS, keep=st.one_of(st.none(), POLICIES), dry_run=st.booleans())
    def forget(self, process, run, keep, dry_run) -> None:
        """By named policies, or by the stored ones."""
        of_run = self.of(run)
        keep = keep or self.at(process).policies(run) or [KeepLast(2)]
        if not of_run:
            with pytest.raises(NotFoundError):
                self.at(process).forget(keep, run=run)
            return
        current = {i for i, k in of_run.items() if self.at_step(run, k.step) == i}
        try:
            result = self.at(process).forget(keep, run=run, dry_run=dry_run)
        except InvalidInputError:
            assert not any(isinstance(policy, KeepLast | KeepBytes) for policy in keep)
            return
        gone = {s.id for s in result.forgotten}
        assert gone | {s.id for s, _ in result.kept} == of_run.keys()
        assert self.newest(run) not in gone
        assert not any(self.known[i].tags for i in gone)
        superseded = {i for i in of_run.keys() - current if not self.known[i].tags}
        assert superseded <= gone
        if not dry_run:
            for i in gone:
                self.known[i].state = "forgotten"

    @rule(process=PROCESSES, run=RUNS, step=STEPS)
    def forget_one(self, process, run, step) -> None:
        chosen = self.at_step(run, step)
        repository = self.at(process)
        if chosen is None:
            with pytest.raises(NotFoundError):
                repository.forget_snapshots([f"{run}@{step}"])
        elif self.known[chosen].tags:
            with pytest.raises(InvalidInputError, match="tagged"):
                repository.forget_snapshots([f"{run}@{step}"])
        else:
            newest = self.newest(run)
            if chosen == newest:
                with pytest.raises(InvalidInputError, match="newest"):
                    repository.forget_snapshots([f"{run}@{step}"])
            repository.forget_snapshots([f"{run}@{step}"], force=chosen == newest)
            self.known[chosen].state = "forgotten"

    @rule(process=PROCESSES, data=st.data())
    def unforget(self, process, data) -> None:
        chosen = self.drawn(data, *STATES)
        state = self.known[chosen].state
        if state == "forgotten":
            assert self.at(process).unforget(f"id:{chosen}").state == "committed"
            self.known[chosen].state = "committed"
        else:
            with pytest.raises(NotFoundError if state == "swept" else InvalidInputError):
                self.at(process).unforget(f"id:{chosen}")

    @rule(process=PROCESSES, run=RUNS, step=STEPS, name=TAGS)
    def tag(self, process, run, step, name) -> None:
        chosen = self.at_step(run, step)
        if chosen is None:
            return
        self.at(process).tag(f"{run}@{step}", name)
        for known in self.of(run).values():
            known.tags.discard(name)
        self.known[chosen].tags.add(name)
        assert self.at(process).snapshot(f"{run}@{name}").id == chosen

    @rule(process=PROCESSES, run=RUNS, step=STEPS, name=TAGS)
    def untag(self, process, run, step, name) -> None:
        chosen = self.at_step(run, step)
        if chosen is None:
            return
        if name in self.known[chosen].tags:
            self.at(process).untag(f"{run}@{step}", name)
            self.known[chosen].tags.discard(name)
        else:
            with pytest.raises(NotFoundError):
                self.at(process).untag(f"{run}@{step}", name)

    @rule(process=PROCESSES)
    def gc(self, process) -> None:
        repository = self.at(process)
        result = repository.gc()
        self.note_swept()
        if self.slow is None:
            assert result.waiting_for == []
            assert repository.stats().unneeded_bytes == 0

    @rule(process=PROCESSES, limit=st.sampled_from((None, 0, 5000)))
    def compact(self, process, limit) -> None:
        """Compact; the invariant and later rules check that no snapshot changes."""
        report = self.at(process).compact(max_repack_bytes=limit)
        assert report.failed == []
        assert limit is None or report.bytes_written <= limit

    @rule(process=PROCESSES)
    def recode(self, process) -> None:
        assert self.at(process).recode().failed == []
        assert self.at(1 - process).recode(dry_run=True).recoded == []

    @rule(process=PROCESSES, drop=st.booleans(), purge=st.booleans(), level=st.sampled_from(("data", "restore")))
    def repair(self, process, drop, purge, level) -> None:
        """Nothing is damaged, so it only rebuilds the index."""
        quarantined = quarantined_names(keys_of(self.store, "gc/"))  # of an earlier repair
        before = dict(self.store._objects)
        purge = purge and self.slow is None  # a pack that leaves quarantine counts as damaged until a gc has deleted it
        report = self.at(process).repair(apply=True, drop=drop, purge=purge, level=level)
        assert report.ok
        assert (report.lost, report.healed) == ([], [])
        assert quarantined or [action.kind for action in report.actions] == ["index"]
        assert quarantined or self.store._objects == before
        if quarantined and purge:
            self.at(process).gc()
            self.note_swept()

    @rule(
        process=PROCESSES, verb=st.sampled_from(sorted(VERBS)), run=RUNS, k=st.integers(0, 80),
        mode=st.sampled_from([mode for mode in MODES if mode not in ("torn", "full")]),
    )  # fmt: skip
    def fail(self, process, verb, run, k, mode) -> None:
        """A process dies in a verb, or a request of it fails, is lost or late."""
        if verb == "forget" and not self.of(run):
            return
        repository = self.at(process)
        planned = self.at(1 - process).forget(KEEP, run=run, dry_run=True).forgotten if verb == "forget" else []
        store = self.open[process][0]
        store.at, store.mode = len(store.log) + k, mode
        try:
            VERBS[verb](repository, run)
        except Crash:
            assert mode in CRASHES
        except StorageError:
            assert mode not in CRASHES
        if mode in CRASHES:
            self.close(process)
        elif mode == "late":
            self.at(1 - process).gc()  # before the late operation has its effect
        store.heal()
        if verb == "forget":
            view = self.at(1 - process).view()
            for snapshot in planned:  # all_is_known finds any other one that is gone
                if (state := view.get(snapshot.id).state) in ("forgotten", "swept"):
                    self.known[snapshot.id].state = state
        self.note_swept()
        if verb == "repair":  # objects that could not be read for a moment are whole, and may leave quarantine
            assert self.at(process).repair(apply=True).ok

    @rule(process=PROCESSES)
    def rebuild_index(self, process) -> None:
        assert self.at(process).rebuild_index() >= len(self.known)

    @rule(process=PROCESSES)
    def drop_index_and_reopen(self, process) -> None:
        self.close(process)

    @precondition(lambda self: self.count % 3 == 0)
    @rule(process=PROCESSES, level=st.sampled_from(("metadata", "data", "restore")))
    def check(self, process, level) -> None:
        result = self.at(process).check(level)
        assert result.problems == []
        assert {s.id for s in result.restorable} == {
            i for i, k in self.known.items() if k.state in ("committed", "forgotten")
        }

    # -- damage

    @precondition(lambda self: self.slow is None)
    @rule(
        flips=FLIPS, process=LOOKERS, other=LOOKERS, level=st.sampled_from(("data", "restore")), tidy=st.booleans(),
        twin=st.booleans(),
        meanwhile=st.lists(st.tuples(PROCESSES, st.sampled_from(["restore", "save", *VERBS]), RUNS), max_size=3),
    )  # fmt: skip
    def damage(self, flips, process, other, level, tidy, twin, meanwhile) -> None:
        """Flip bits, let verbs work or raise, and repair. In the end lost snapshots are dropped, and all rules hold.

        Args:
            process, other: the process that repairs, and the one that checks.
            tidy: give up quarantined packs even if nothing was lost.
            twin: the newest state of run a is stored once more, so that something can be healed.
        """
        tally("damages of the machine")
        if twin and (newest := self.newest("a")):
            self.save_again(newest)
        with self.looking(2) as repository:
            before = {s.id: s for s in repository.view().snapshots(states=("committed", "forgotten"))}
        needs = self.needs(before)
        flipped: set[str] = set()
        for kind, number, place in flips:
            flipped.add(self.flip(kind, number, place, flipped))
        # A snapshot whose record cannot be read may change: its last revision is lost, unless an index knows it.
        guessed = {parse_record_key(key)[2] for key in flipped if key.startswith("snapshots/")}
        if "config" in flipped:
            process, other = 2, 2
        whole = self.restoring(before)
        lost = before.keys() - whole
        assert lost <= {i for i, keys in needs.items() if keys & flipped}
        assert lost >= {i for i, keys in needs.items() if any(key[:5] != "packs" for key in keys & flipped)}
        self.agree(other, before, whole, guessed)

        saved = [self.go_on_damaged(*one) for one in meanwhile] if "config" not in flipped else []
        before |= {s.id: s for s in saved if s is not None}
        before = self.still(before)
        suffering = before.keys() - self.restoring(before)
        assert not whole & suffering, "what was whole was damaged by what went on"
        assert suffering <= lost or any(key.startswith("packs/") for key in flipped), "built on what cannot be read"

        with self.looking(process) as repository:
            held = dict(self.store._objects)
            planned = repository.repair(level=level)
            assert self.store._objects == held
            report = repository.repair(level=level, apply=True)
        about = f"{flipped} {report.actions} {report.open} {report.lost}"
        assert [action.kind for action in planned.actions] == [action.kind for action in report.actions], about
        healed, lost = {s.id for s in report.healed}, {s.id for s, _ in report.lost}
        before = self.still(before)
        whole = self.restoring(before)
        assert lost - guessed == before.keys() - whole - guessed, about
        assert healed - guessed == suffering & whole - guessed, about
        assert guessed & whole <= before.keys() - lost, about
        result = self.agree(other, before, whole, guessed)
        assert {i for p in result.problems for i in p.snapshots} - guessed == lost - guessed, about
        for run in ("a", "b"):
            new = self.go_on_damaged(min(process, 1), "save", run)
            assert self.restoring({new.id: new}), "a save has built on damage that is known"
        if report.ok and not result.problems and not tidy and not guessed:
            self.note_swept()  # by a gc meanwhile
            return
        self.recover(lost, guessed)

    def save_again(self, chosen: str) -> None:
        """Save the state of a snapshot in the other run."""
        self.count += 1
        known = self.known[chosen]
        with self.looking(2) as repository:
            state, run = values(*known.version), "b" if known.run == "a" else "a"
            snapshot = repository.save(state, run=run, step=9, metadata=list(known.version))
        self.known[snapshot.id] = Known(run, 9, self.count, snapshot.seq, known.version, snapshot.parent)

    def flip(self, kind: int, number: int, place: int, spared: set[str]) -> str:
        """Flip one bit of an object; return its key."""
        kinds = [*sorted({key.partition("/")[0] for key in self.store._objects}), "packs", "packs", "packs"]
        chosen = kinds[kind % len(kinds)]
        keys = [key for key in self.store._objects if key.partition("/")[0] == chosen]  # as they were put
        if not keys:  # no pack is left
            return self.flip(0, number, place, spared)
        key = keys[number % len(keys)]
        if key in spared:  # a second flip could undo the first
            return key
        data, info = self.store._objects[key]
        changed = bytearray(data)
        changed[place * len(data) >> 20] ^= 1 << place % 8
        self.store._objects[key] = bytes(changed), info  # as on a decaying disk, time and holder stay
        return key

    def needs(self, snapshots: dict[str, Snapshot]) -> dict[str, set[str]]:
        """Return, by id, the keys of all objects of each snapshot."""
        return {i: {snapshot.key, *objects_of(self.store, snapshot)} for i, snapshot in snapshots.items()}

    def restoring(self, snapshots: dict[str, Snapshot]) -> set[str]:
        """Return which of these a new process restores; check that it returns no wrong bit."""
        found = set()
        with self.looking(2) as repository:
            for i, snapshot in snapshots.items():
                with suppress(SnapstoreError):
                    state = repository.restore(f"id:{i}")
                    assert is_whole(snapshot, state), f"{snapshot.ref}: other bits were handed out"
                    found.add(i)
        return found

    def still(self, snapshots: dict[str, Snapshot]) -> dict[str, Snapshot]:
        """Return the snapshots that no gc has deleted, also those whose record cannot be read."""
        with self.looking(2) as repository:
            view = repository.view()
        return {i: s for i, s in snapshots.items() if (view.get(i) or s).state in ("committed", "forgotten")}

    def agree(self, process: int, snapshots: dict[str, Snapshot], whole: set[str], guessed: set[str]) -> Any:
        """Check that `check` agrees with what restores; return its result."""
        with self.looking(process) as repository:
            result = repository.check("restore")
        assert {s.id for s in result.restorable} - guessed == whole - guessed, result.problems
        assert {s.id for s in result.damaged} - guessed == snapshots.keys() - whole - guessed, result.problems
        assert not {s.id for s in result.restorable} & guessed & snapshots.keys() - whole
        return result

    def go_on_damaged(self, process: int, verb: str, run: str) -> Snapshot | None:
        """Call a verb in a damaged repository: it does what it should, or raises. A save must not raise."""
        repository = self.at(process)
        if verb == "save":
            self.count += 1
            snapshot = save(repository, run, 9, self.count)
            self.learn(snapshot, self.count)
            self.lineage[process][run] = snapshot.id
            return snapshot
        if verb == "restore":
            for i, known in self.known.items():
                with suppress(SnapstoreError):
                    assert same(repository.restore(f"id:{i}"), values(*known.version))
            return None
        with suppress(SnapstoreError):
            done = VERBS[verb](repository, run)
            if verb == "forget":
                for snapshot in done.forgotten:
                    self.known[snapshot.id].state = "forgotten"
        return None

    def recover(self, lost: set[str], guessed: set[str]) -> None:
        """Act as a person does after a repair; then tell the model the result."""
        now = self.store.clock() + 3601
        self.store.clock = lambda: now  # a damaged session is removed once it was silent
        if keys_of(self.store, "sessions/"):  # and no process has it open, not even the one that failed to remove it
            for process in (0, 1):
                self.close(process)
        repository = self.at(0)
        for run, keep in self.policies.items():
            repository.set_policies(run, keep)
        for snapshot in repository.snapshots():
            for tag in snapshot.tags:
                if snapshot.id in lost or tag.startswith("repaired-"):
                    repository.untag(f"id:{snapshot.id}", tag)
                    if snapshot.id in lost:
                        self.known[snapshot.id].tags.discard(tag)
            if snapshot.metadata is None:  # reconstructed from its manifests: its content is unknown
                repository.forget_snapshots([f"id:{snapshot.id}"], force=True)
        report = repository.repair(apply=True, drop=True)
        assert report.left == [], f"{report.actions} {report.open}"  # a damaged pack that nobody needs is left to gc
        repository.gc()
        report = repository.repair(apply=True, drop=True, purge=True)
        assert report.ok, f"{report.open} {report.lost}"
        repository.gc()
        assert repository.check("restore").problems == []
        there = {s.id: s for s in repository.view().snapshots(states=STATES)}
        for i in guessed:
            if i not in there:  # given up
                self.known.pop(i, None)
            else:
                s = there[i]
                self.count += 1
                known = self.known.setdefault(i, Known(s.run, s.step, self.count, s.seq, (s.run, -1), s.parent))
                known.state, known.tags, known.parent, known.seq = s.state, set(s.tags), s.parent, s.seq
                if s.state != "swept" and known.version[1] < 0:  # forgotten, and all that it needs is another one's too
                    known.version = version_in(repository.restore(f"id:{i}"))
        for i in lost - guessed:  # still committed: saves since then have stored its chunks again
            assert there[i].state in ("forgotten", "swept") or self.restoring({i: there[i]})
            self.known[i].state = there[i].state
        self.note_swept()

    @invariant()
    def all_is_known(self) -> None:
        tally("machine steps")
        with_tags = {s.id: (s.state, set(s.tags), s.parent) for s in self.at(0).view().snapshots(states=STATES)}
        assert with_tags == {i: (k.state, k.tags, k.parent) for i, k in self.known.items()}


@pytest.mark.no_cover  # see test_crash_points.py
@pytest.mark.timeout(7200 if THOROUGH else 1800)
@pytest.mark.parametrize("part", range(32 if THOROUGH else 1))  # so that several cores share the work
def test_machine(part, monkeypatch):
    one_thread(monkeypatch)
    repeatable(monkeypatch)
    run_state_machine_as_test(
        seed(32 * SEED + part)(Machine),  # other programs in every run, and the same ones for the same seed
        settings=settings(
            max_examples=63 if THOROUGH else 12,
            stateful_step_count=60 if THOROUGH else 30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )


def test_a_damaged_session_that_a_failed_save_has_left_over(monkeypatch):
    """Its process keeps it open as long as it lives: a repair waits for the end of the process."""
    one_thread(monkeypatch)
    repeatable(monkeypatch)
    for k in range(12, 40):
        machine = Machine()
        machine.begin()
        machine.save_and_fail(1, "b", 0, k, "fail")
        if keys_of(machine.store, "sessions/"):
            break
    kinds = sorted({key.partition("/")[0] for key in machine.store._objects})
    flips = [(kinds.index("sessions"), 0, 0)]
    machine.damage.__wrapped__(machine, flips, 0, 0, "data", tidy=False, twin=False, meanwhile=[])
    assert keys_of(machine.store, "sessions/") == []
    machine.teardown()


def test_a_reconstructed_record_that_a_gc_leaves_forgotten(monkeypatch):
    """Its manifests are another snapshot's too, so a gc deletes nothing of it; nothing says which version it holds."""
    one_thread(monkeypatch)
    repeatable(monkeypatch)
    machine = Machine()
    machine.begin()
    first = machine.newest("a")
    machine.save(0, "a", 0, (), False, True)
    objects = machine.store._objects
    kind = sorted({key.partition("/")[0] for key in objects}).index("snapshots")
    number = [first in key for key in objects if key.startswith("snapshots/")].index(True)
    machine.damage.__wrapped__(machine, [(kind, number, 2**19)], 2, 0, "data", tidy=True, twin=False, meanwhile=[])
    assert machine.known[first].state == "forgotten"
    snapshot = machine.at(0).unforget(f"id:{first}")
    assert snapshot.metadata is None
    assert machine.restoring({first: snapshot}) == {first}
    machine.known[first].state = "committed"
    machine.find(0, "a", 1)
    machine.teardown()


def test_programs_do_not_meet(monkeypatch):
    """Each program counts ids from 0: an earlier one's orphaned session must not let a gc fence a save of this one."""
    one_thread(monkeypatch)
    repeatable(monkeypatch)
    earlier = counted_ids()
    orphaned_sessions.update(earlier() for _ in range(100))
    machine = Machine()
    machine.begin()
    machine.save_slowly("a", 1, 8)
    assert keys_of(machine.store, "sessions/")
    machine.gc(0)
    machine.go_on(10_000)
    machine.teardown()
