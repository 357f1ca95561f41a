"""Ranks save together while one of them crashes, fails or pauses at any operation, or any message goes wrong.

After each fault: no survivor hangs; no survivor contradicts the record of the save; every committed snapshot restores
bit for bit; the next job saves; and gc frees all the rest.

The tests of the protocol have a data side of their own (`RankSide`). Those of managers have all that users have:
shards, tensors that some ranks hold, which the ranks exchange, values of each rank, pages, deltas and box maps.
"""

from __future__ import annotations

import threading
from functools import cache
from random import Random

import numpy as np
import pytest
import torch

from kit.faults import Crash, one_thread
from kit.local_ranks import MessageFaults
from kit.objects import clone
from kit.ranks import LocalJob, Managers, RankStore, fail_message, of_all, part_of, small_boxes, together
from kit.repositories import check_clean, created, opened, same
from kit.samples import SEED, THOROUGH, sampled, some
from kit.tally import EXAMPLES, tally
from snapstore import PerRank, RanksError, Snapshot
from snapstore.storage.memory import MemoryStore

COUNT = 3
SILENT_S = 0.4
#: More operations or messages of a rank than one save has.
MOST = 60
STORE_MODES = ("crash-before", "crash-after", "fail", "lost", "late", "outage", "lost-outage", "pause")
MESSAGE_MODES = ("drop", "delay", "double", "crash-before", "crash-after")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    one_thread(monkeypatch, index=False)


@cache
def history() -> MemoryStore:
    """a@0 and a@1, saved by all ranks."""
    store = created()
    with LocalJob(store, COUNT) as job:
        for step in range(2):
            assert len({s.id for s in job.save("a", step, step)}) == 1
    return store


def job_of(store: MemoryStore) -> LocalJob:
    return LocalJob(store, COUNT, silent_s=SILENT_S, total_s=4 * SILENT_S)


def operations(rank: int) -> int:
    """Return how many store operations a rank makes for a save."""
    with job_of(clone(history())) as job:
        store = job.members[rank].store
        before = len(store.log)
        job.save("a", 2, 2)
        return len(store.log) - before


def judge_words(store: MemoryStore, words: list, about: str, blind: int | None, *, step: int) -> None:
    """Compare what the ranks say about a@`step` with its record."""
    with opened(store) as repository:
        found = [s for s in repository.snapshots("a") if s.step == step]
    for rank, word in enumerate(words):
        if isinstance(word, Snapshot):
            assert [s.id for s in found] == [word.id], f"{about}: rank {rank} says committed, the record does not"
        elif not isinstance(word, Crash) and found:
            unknown = "whether it was committed" in str(word) or "is committed as" in str(word)
            assert unknown, f"{about}: rank {rank} says {word!r}, the record is committed"
            assert rank == blind, f"{about}: rank {rank} could know that the record is committed: {word!r}"


def judge(store: MemoryStore, words: list, about: str, blind: int | None = None) -> None:
    """Check what must hold after a save with a fault; only rank `blind`, whose store fails, may not know its result."""
    store.drop_locks()  # the processes of the job have ended
    judge_words(store, words, about, blind, step=2)
    with LocalJob(store, 2) as job:  # the next attempt, with another number of ranks
        words = job.save("b", 0, 7)
        assert all(isinstance(word, Snapshot) for word in words), f"{about}: {words}"
    with opened(store) as repository:
        assert repository.gc(fence_after_s=0).waiting_for == [], about
        by_run = {s.ref: s for s in repository.snapshots()}
        assert by_run.keys() >= {"a@0", "a@1", "b@0"}, about
    check_clean(store, about, expected=expected)


def expected(run: str, version: int):
    """The state of a version: the next attempt has two ranks."""
    return of_all(COUNT if run == "a" else 2)(run, version)


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("mode", STORE_MODES)
@pytest.mark.parametrize("rank", range(COUNT))
def test_a_fault_at_any_operation_of_any_rank(rank, mode):
    total = operations(rank)
    assert total > (5 if rank else 15)
    for at in sampled(total, 6 if mode != "pause" else 9):
        store = clone(history())
        with job_of(store) as job:
            faulty = job.members[rank].store
            faulty.at = len(faulty.log) + at
            if mode == "pause":
                faulty.pause_s = 3 * SILENT_S
            else:
                faulty.mode = mode
            words = job.save("a", 2, 2)
            assert faulty.fired
            faulty.pause_s = None
            faulty.heal()
            about = f"rank {rank}, operation {at} {faulty.log[faulty.at or 0] if faulty.at else ''}, {mode}"
        judge(store, words, about, blind=rank)
        tally("ranks: store faults")


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("mode", MESSAGE_MODES)
@pytest.mark.parametrize("rank", range(COUNT))
def test_a_fault_of_any_message_of_any_rank(rank, mode):
    for at in range(MOST):
        store = clone(history())
        with job_of(store) as job:
            ranks = job.members[rank].ranks
            before = len(ranks.posted)
            fail_message(ranks, at, mode, 2 * SILENT_S)
            words = job.save("a", 2, 2)
            reached = len(ranks.posted) - before > at or any(isinstance(word, Crash) for word in words)
        judge(store, words, f"rank {rank}, message {at}, {mode}")
        tally("ranks: message faults")
        if not reached:
            break
    assert at > 0


@pytest.mark.parametrize("of", ["operations", "messages"])
def test_the_end_of_rank_0_takes_the_messages_with_it(of):
    """The others' errors name rank 0 and the save, and say that nothing was committed, and what to do."""
    ats = sampled(operations(0), 6) if of == "operations" else range(MOST)
    for at in ats:
        store = clone(history())
        with job_of(store) as job:
            first = job.members[0]
            first.ranks.is_hosted = True
            if of == "operations":
                first.store.at, first.store.mode = len(first.store.log) + at, "crash-after"
            else:
                fail_message(first.ranks, at, "crash-after", 0.0)
            words = job.save("a", 2, 2)
        about = f"{of} {at}: {words}"
        judge(store, words, about)
        for word in words[1:]:
            if not isinstance(word, Snapshot):
                assert isinstance(word, RanksError), about
                assert str(word).startswith("save a@2: rank 0 of 3: its process is gone"), about
                assert "; nothing was committed; start the job again: " in str(word), about
                assert word.ranks == (0,), about
        tally("ranks: store faults" if of == "operations" else "ranks: message faults")
        if not isinstance(words[0], Crash):
            break
    else:
        assert of == "operations"
    assert at > 0


@pytest.mark.parametrize("number", range(EXAMPLES))
def test_two_attempts_at_once_and_gcs_beside_them(number):
    """Each snapshot is whole and of one attempt, and no gc deletes what one needs."""
    store = created()
    ended = threading.Event()
    random = Random(SEED + number)
    counts = (2, 3) if number == 0 else (random.randint(1, 4), random.randint(1, 4))
    late = MessageFaults(delay=0.3, double=0.3, delay_s=0.02, seed=random.randrange(1000)) if number else None

    def collect():
        while not ended.is_set():
            with opened(store) as repository:
                repository.gc()

    def attempt(count, offset):
        with LocalJob(store, count, faults=late) as job:
            return [job.save("a", offset + step, offset + step) for step in range(6)]

    def attempts():
        try:
            return together([lambda: attempt(counts[0], 100), lambda: attempt(counts[1], 200)])
        finally:
            ended.set()

    collected, found = together([collect, attempts])
    assert collected is None, collected
    for saves in found:
        assert not isinstance(saves, BaseException), saves
        for words in saves:
            assert all(isinstance(word, Snapshot) and word.id == words[0].id for word in words), words
    with opened(store) as repository:
        assert len(repository.snapshots("a")) == 12
        repository.gc()
    check_clean(store, expected=lambda run, version: of_all(counts[version >= 200])(run, version))
    tally("ranks: two attempts at once")


# --- managers

#: In every job, ranks 1 and 2 hold a tensor that rank 0 does not hold, and each rank holds one of its own. From a@1 on,
#: ranks hold one more in two kinds; if rank 0 does, all ranks exchange again. The third kind has a tree of pages.
KINDS = ("rank 1 holds more", "rank 0 holds more", "pages")
#: Kind, step of the save with the fault (a@0 has an exchange, a@1 has bases), rank.
PLACES = [(kind, step, rank) for kind in KINDS for step in range(2) for rank in range(COUNT)]


def held(kind: str, step: int, rank: int, count: int) -> dict:
    """Return the state of one rank of a job."""
    whole = np.random.default_rng(step).standard_normal((24, 40)).astype(np.float32)
    model = {
        "w": torch.arange(3000.0) + step,
        f"layer{rank}": torch.full((700,), float(rank + 10 * step)),
        "shard": part_of(torch.from_numpy(whole), rank, count),
    }
    if rank:
        model["late"] = torch.arange(2000.0) * (step + 1)
    if step and rank in {"rank 1 holds more": (1,), "rank 0 holds more": (0, 2)}.get(kind, ()):
        model["more"] = torch.arange(1500.0) + step
    own = PerRank({"rank": rank, "at": step, "values": torch.full((900,), float(rank * 100 + step))})
    state = {"model": model, "own": own, "step": step}
    if kind == "pages":
        state["data"] = {f"k{i}": (i * 7919 + (step if i == 70 else 0)) % 100003 for i in range(20000)}
    return state


def all_of(kind: str, step: int, count: int) -> dict:
    """Return the whole state of a job, without the values that each rank has for itself."""
    states = [held(kind, step, rank, count) for rank in range(count)]
    model = {name: value for state in states for name, value in state["model"].items()}
    model["shard"] = torch.cat([state["model"]["shard"].data for state in states])
    return {name: value for name, value in states[0].items() if name != "own"} | {"model": model}


class FaultyJob:
    """Managers of a job; the store and the messages of each rank may fail. Only a save with a fault is impatient."""

    def __init__(self, store: MemoryStore, kind: str, count: int = COUNT) -> None:
        self.kind, self.count = kind, count
        self.stores = [RankStore(store) for _ in range(count)]
        self.managers = Managers(store, count, stores=self.stores, silent_s=20.0, total_s=40.0, async_save=False)
        self.ranks = self.managers.ranks
        for of_rank, rank in zip(self.stores, self.ranks, strict=True):
            of_rank.ranks, rank.die = rank, of_rank.die

    def save(self, step: int) -> list:
        states = [held(self.kind, step, rank, self.count) for rank in range(self.count)]
        return self.managers.all(lambda m, rank: m.save(step, states[rank], metadata=self.count).result())

    def save_whole(self, step: int, about: str = "") -> None:
        words = self.save(step)
        assert all(isinstance(word, Snapshot) for word in words), f"{about}: step {step}: {words}"

    def save_with_a_fault(self, step: int) -> list:
        for rank in self.ranks:
            rank.silent_s, rank.total_s = SILENT_S, 4 * SILENT_S
        try:
            return self.save(step)
        finally:
            for rank in self.ranks:
                rank.silent_s, rank.total_s = 20.0, 40.0


def go_on(store: MemoryStore, job: FaultyJob, words: list, step: int, about: str, blind: int | None) -> None:
    """Let the job go on, or start it again with two ranks if a rank has died; check all that is left."""
    if not any(isinstance(word, Crash) for word in words):
        again = job.save(step + 1)
        if not all(isinstance(word, Snapshot) for word in again):  # at most one more: it hears of the fault
            job.save_whole(step + 2, about)
    job.managers.end()
    store.drop_locks()  # the processes of the job have ended
    judge_words(store, words, about, blind, step=step)
    if any(isinstance(word, Crash) for word in words):
        after = FaultyJob(store, job.kind, 2)
        after.save_whole(step + 3, about)
        after.managers.end()
    with opened(store) as repository:
        assert repository.gc(fence_after_s=0).waiting_for == [], about
        found = repository.check("restore")
        assert found.problems == [], about
        assert found.unneeded_bytes == 0, about
        assert {s.step for s in repository.snapshots("a")} >= set(range(step)), about
        for snapshot in repository.snapshots("a"):
            whole = all_of(job.kind, snapshot.step, snapshot.metadata)
            state = repository.restore(f"id:{snapshot.id}", keys=list(whole))
            assert sorted(state["model"]) == sorted(whole["model"]), about
            ordered = state | {"model": {name: state["model"][name] for name in whole["model"]}}
            assert same({name: ordered[name] for name in whole}, whole), f"{about}: {snapshot.ref} differs"
        assert list(repository.store.list("sessions/")) == [], about


@pytest.fixture
def _frequent_beats(monkeypatch):
    """Ranks beat as often as an impatient save wants; the boxes of small states have chunks."""
    monkeypatch.setattr("snapstore.distributed.base.BEAT_S", SILENT_S / 4)
    with small_boxes():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_frequent_beats")
@pytest.mark.parametrize("mode", some(STORE_MODES, 2))
@pytest.mark.parametrize(("kind", "step", "rank"), some(PLACES, 1))
def test_a_fault_at_any_operation_of_any_manager(kind, step, rank, mode):
    for at in range(1000) if THOROUGH else range(SEED % 12, 1000, 12):
        store = created()
        job = FaultyJob(store, kind)
        for before in range(step):
            job.save_whole(before)
        faulty = job.stores[rank]
        first = faulty.at = len(faulty.log) + at
        if mode == "pause":
            faulty.pause_s = 3 * SILENT_S
        else:
            faulty.mode = mode
        words = job.save_with_a_fault(step)
        fired, faulty.pause_s = faulty.fired, None
        faulty.heal()
        about = f"{kind}, a@{step}, rank {rank}, operation {at} {faulty.log[first : first + 1]}, {mode}: {words}"
        go_on(store, job, words, step, about, rank)
        tally("ranks: store faults")
        if not fired:
            break
    assert at > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_frequent_beats")
@pytest.mark.parametrize("mode", some(MESSAGE_MODES, 1))
@pytest.mark.parametrize(("kind", "step", "rank"), some(PLACES, 2))
def test_a_fault_of_any_message_of_any_manager(kind, step, rank, mode):
    for at in range(MOST) if THOROUGH else [SEED % 5]:
        store = created()
        job = FaultyJob(store, kind)
        for before in range(step):
            job.save_whole(before)
        ranks = job.ranks[rank]
        posted, post = len(ranks.posted), ranks.post
        fail_message(ranks, at, mode, 2 * SILENT_S)
        words = job.save_with_a_fault(step)
        reached = len(ranks.posted) - posted > at or any(isinstance(word, Crash) for word in words)
        ranks.post = post
        go_on(store, job, words, step, f"{kind}, a@{step}, rank {rank}, message {at}, {mode}: {words}", None)
        tally("ranks: message faults")
        if not reached:
            break


@pytest.mark.parametrize("number", range(EXAMPLES))
def test_small_tensors_that_change_while_ranks_forget_or_fail(number):
    """All ranks cut each tensor by one choice of rank 0, whichever rank has failed, or has forgotten something."""
    random = Random(SEED + number)
    count, store = random.randint(2, 4), created()
    managers = Managers(store, count, async_save=random.random() < 0.5)
    sizes, saved = {f"w{i}": 20 * i + 1 for i in range(6)}, []
    for step in range(8):
        for name in random.sample([f"w{i}" for i in range(12)], random.randrange(4)):
            sizes[name] = random.choice([random.randrange(1, 250), random.randrange(1, 3000)])
            if random.random() < 0.3:
                del sizes[name]
        saved.append({"m": {name: torch.arange(float(size)) + step for name, size in sizes.items()}})
        chosen = random.randrange(count)
        event = random.choice(["none", "forgets holders", "forgets structure", "fails"])
        if event == "forgets holders":
            managers[chosen]._job._holders_are_sure = False
        elif event == "forgets structure":
            managers[chosen]._staging._known = None
        elif event == "fails":
            states = [saved[-1] | ({"bad": object()} if rank == chosen else {}) for rank in range(count)]
            words = managers.all(lambda m, rank, states=states, step=step: m.save(step, states[rank]).result())
            assert all(isinstance(word, Exception) for word in words), words
        words = managers.all(lambda m, _, step=step: m.save(step, saved[step]).result())
        assert all(isinstance(word, Snapshot) for word in words), f"a@{step}, rank {chosen} {event}: {words}"
    managers.end()
    with opened(store) as repository:
        for step, state in enumerate(saved):
            restored = repository.restore(f"a@{step}")["m"]
            assert same({name: restored[name] for name in state["m"]}, state["m"])
            assert restored.keys() == state["m"].keys()
    tally("ranks: small tensors")
