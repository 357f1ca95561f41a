"""A hypothesis state machine over one repository and the dict that it ought to be.

`SNAPSTORE_TEST_THOROUGH=1` runs many more and longer programs (a nightly job).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from faults import (
    CRASHES,
    OPTIONS,
    THOROUGH,
    Crash,
    FaultStore,
    check_clean,
    one_thread,
    same,
    save,
    values,
    version_of,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tally import tally

from snapstore import (
    InvalidInputError,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSteps,
    NotFoundError,
    Repository,
    StorageError,
)
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
    ),
    min_size=1,
    max_size=2,
)


@dataclass
class Known:
    """One snapshot as it ought to be; assumed to be perfect."""

    run: str
    step: int
    order: int
    version: tuple[str, int]
    parent: str | None
    state: str = "committed"
    tags: set[str] = field(default_factory=set)


class Machine(RuleBasedStateMachine):
    """Two Repository objects, "processes", over one store; `self.known` is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        Repository.create(self.store, chunk_bytes=1024, options=OPTIONS).close()
        self.known: dict[str, Known] = {}
        self.count = 0
        self.open: list[tuple[FaultStore, Repository] | None] = [None, None]
        self.lineage: list[dict[str, str | None]] = [{}, {}]  # what each process goes on from, by run

    def teardown(self) -> None:
        for process in (0, 1):
            self.close(process)
        with Repository.open(self.store, options=OPTIONS) as repository:
            repository.gc()
        check_clean(self.store)

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

    # -- the model

    def of(self, run: str, *states: str) -> dict[str, Known]:
        found = {i: k for i, k in self.known.items() if k.run == run and k.state in (states or ("committed",))}
        return dict(sorted(found.items(), key=lambda item: item[1].order))

    def newest(self, run: str) -> str | None:
        return next(reversed(self.of(run)), None)

    def at_step(self, run: str, step: int) -> str | None:
        return next((i for i, k in reversed(self.of(run).items()) if k.step == step), None)

    # -- rules

    @initialize()
    def begin(self) -> None:
        self.save(0, "a", 0, ())

    @rule(process=st.integers(0, 1), run=RUNS, step=STEPS, tags=st.one_of(st.just(()), st.tuples(TAGS)))
    def save(self, process, run, step, tags) -> None:
        repository = self.at(process)
        self.count += 1
        lineage = self.lineage[process]
        parent = lineage.get(run, lineage.get("*")) or self.newest(run)
        snapshot = save(repository, run, step, self.count, tags=tags)
        assert snapshot.parent == parent
        assert snapshot.depth <= OPTIONS.max_depth
        if tags:
            assert snapshot.depth == 0
        for known in self.known.values():
            if known.run == run and known.state == "committed":
                known.tags -= set(tags)  # a tag names one snapshot of a run
        self.known[snapshot.id] = Known(run, step, self.count, (run, self.count), parent, tags=set(tags))
        lineage[run] = snapshot.id

    @rule(
        process=st.integers(0, 1), run=RUNS, step=STEPS, other=RUNS, k=st.integers(0, 60), mode=st.sampled_from(CRASHES)
    )
    def save_and_crash(self, process, run, step, other, k, mode) -> None:
        repository = self.at(process)
        store = self.open[process][0]
        store.at, store.mode = len(store.log) + k, mode
        self.count += 1
        try:
            snapshot = save(repository, run, step, self.count)
        except Crash:
            found = [s for s in Repository.snapshots(self.at(1 - process), run) if version_of(s) == (run, self.count)]
            for snapshot in found:
                self.known[snapshot.id] = Known(run, step, self.count, (run, self.count), snapshot.parent)
        else:
            self.known[snapshot.id] = Known(run, step, self.count, (run, self.count), snapshot.parent)
        self.close(process)

    @rule(process=st.integers(0, 1), run=RUNS, step=STEPS, k=st.integers(0, 40), mode=st.sampled_from(("fail", "lost")))
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
            self.known[snapshot.id] = Known(run, step, self.count, (run, self.count), snapshot.parent)
            self.lineage[process][run] = snapshot.id
        store.heal()

    @rule(process=st.integers(0, 1), data=st.data())
    def restore(self, process, data) -> None:
        there = [i for i, k in self.known.items() if k.state in ("committed", "forgotten")]
        if not there:  # all forgotten by name, and swept
            return
        chosen = data.draw(st.sampled_from(sorted(there, key=lambda i: self.known[i].order)))
        assert same(self.at(process).restore(f"id:{chosen}"), values(*self.known[chosen].version))
        self.lineage[process] = {"*": chosen}

    @rule(process=st.integers(0, 1), run=RUNS, step=STEPS)
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

    @rule(process=st.integers(0, 1), run=RUNS, keep=POLICIES, dry_run=st.booleans())
    def forget(self, process, run, keep, dry_run) -> None:
        of_run = self.of(run)
        if not of_run:
            with pytest.raises(NotFoundError):
                self.at(process).forget(keep, run=run)
            return
        current = {i for i, k in of_run.items() if self.at_step(run, k.step) == i}
        try:
            result = self.at(process).forget(keep, run=run, dry_run=dry_run)
        except InvalidInputError:
            assert not any(isinstance(policy, KeepLast) for policy in keep)
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

    @rule(process=st.integers(0, 1), run=RUNS, step=STEPS)
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
            of_run = [i for i, k in self.known.items() if k.run == run and k.state == "committed"]
            newest = max(of_run, key=lambda i: self.known[i].order)
            if chosen == newest:
                with pytest.raises(InvalidInputError, match="newest"):
                    repository.forget_snapshots([f"{run}@{step}"])
            repository.forget_snapshots([f"{run}@{step}"], force=chosen == newest)
            self.known[chosen].state = "forgotten"

    @rule(process=st.integers(0, 1), data=st.data())
    def unforget(self, process, data) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.known, key=lambda i: self.known[i].order)))
        state = self.known[chosen].state
        if state == "forgotten":
            assert self.at(process).unforget(f"id:{chosen}").state == "committed"
            self.known[chosen].state = "committed"
        else:
            with pytest.raises(NotFoundError if state == "swept" else InvalidInputError):
                self.at(process).unforget(f"id:{chosen}")

    @rule(process=st.integers(0, 1), run=RUNS, step=STEPS, name=TAGS)
    def tag(self, process, run, step, name) -> None:
        chosen = self.at_step(run, step)
        if chosen is None:
            return
        self.at(process).tag(f"{run}@{step}", name)
        for known in self.of(run).values():
            known.tags.discard(name)
        self.known[chosen].tags.add(name)
        assert self.at(process).snapshot(f"{run}@{name}").id == chosen

    @rule(process=st.integers(0, 1), run=RUNS, step=STEPS, name=TAGS)
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

    @rule(process=st.integers(0, 1))
    def gc(self, process) -> None:
        repository = self.at(process)
        assert repository.gc().waiting_for == []
        self.note_swept()
        assert repository.stats().unneeded_bytes == 0

    @rule(process=st.integers(0, 1), k=st.integers(0, 80), mode=st.sampled_from(CRASHES))
    def gc_and_crash(self, process, k, mode) -> None:
        repository = self.at(process)
        store = self.open[process][0]
        store.at, store.mode = len(store.log) + k, mode
        with suppress(Crash):
            repository.gc()
        self.close(process)
        self.note_swept()

    @rule(process=st.integers(0, 1), limit=st.sampled_from((None, 0, 5000)))
    def compact(self, process, limit) -> None:
        """No snapshot changes; a gc beside or after it deletes no more than it may."""
        report = self.at(process).compact(max_repack_bytes=limit)
        assert report.failed == []
        assert limit is None or report.bytes_written <= limit

    @rule(process=st.integers(0, 1), k=st.integers(0, 80), mode=st.sampled_from(CRASHES))
    def compact_and_crash(self, process, k, mode) -> None:
        repository = self.at(process)
        store = self.open[process][0]
        store.at, store.mode = len(store.log) + k, mode
        with suppress(Crash):
            repository.compact()
        self.close(process)

    def note_swept(self) -> None:
        """Which forgotten ones lost bytes is gc's to say; that it took no other is ours to check."""
        for snapshot in self.at(0).view().snapshots(states=("swept",)):
            assert self.known[snapshot.id].state in ("forgotten", "swept")
            self.known[snapshot.id].state = "swept"

    @rule(process=st.integers(0, 1))
    def rebuild_index(self, process) -> None:
        assert self.at(process).rebuild_index() >= len(self.known)

    @rule(process=st.integers(0, 1))
    def drop_index_and_reopen(self, process) -> None:
        self.close(process)

    @precondition(lambda self: self.count % 3 == 0)
    @rule(process=st.integers(0, 1), level=st.sampled_from(("metadata", "data", "restore")))
    def check(self, process, level) -> None:
        result = self.at(process).check(level)
        assert result.problems == []
        assert {s.id for s in result.restorable} == {
            i for i, k in self.known.items() if k.state in ("committed", "forgotten")
        }

    @invariant()
    def all_is_known(self) -> None:
        tally("machine steps")
        with_tags = {
            s.id: (s.state, set(s.tags), s.parent)
            for s in self.at(0).view().snapshots(states=("committed", "forgotten", "swept"))
        }
        assert with_tags == {i: (k.state, k.tags, k.parent) for i, k in self.known.items()}


@pytest.mark.no_cover  # see test_crash_points.py
@pytest.mark.timeout(7200 if THOROUGH else 300)
def test_machine(monkeypatch):
    one_thread(monkeypatch)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=2000 if THOROUGH else 100,
            stateful_step_count=60 if THOROUGH else 30,
            deadline=None,
            derandomize=not THOROUGH,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
