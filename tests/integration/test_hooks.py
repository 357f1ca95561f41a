"""`on_commit=` and `on_failure=`: one event for each save, in another thread, and nothing waits for a hook."""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch

from kit.faults import FAILURES, Crash, FaultStore, one_thread
from kit.local_ranks import LocalRanks
from kit.mirrored import manager as mirrored_manager
from kit.processes import run_python
from kit.ranks import Managers, together
from kit.repositories import OPTIONS, created, opened
from kit.waits import until
from snapstore import (
    CommitEvent,
    FailureEvent,
    InvalidInputError,
    SnapshotManager,
    SnapstoreError,
    StorageError,
    UnsupportedLeafError,
)
from snapstore.save import hooks, retrying
from snapstore.storage.memory import MemoryStore


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "RETRY_S", 0.02)
    monkeypatch.setattr(retrying, "RETRY_MAX_S", 0.1)


@pytest.fixture
def store():
    return FaultStore(created())


class Events(list):
    """A hook that keeps its events, and the names of the threads that called it."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def __call__(self, event):
        self.threads.add(threading.current_thread().name)
        self.append(event)

    def ends(self):
        """Return (step, whether it was committed) of each save that has ended, in order."""
        return [(e.step, isinstance(e, CommitEvent)) for e in self if not getattr(e, "will_retry", False)]


def manager(store, events=None, run="a", **options):
    both = {} if events is None else {"on_commit": events, "on_failure": events}
    return SnapshotManager(store, run=run, options=OPTIONS, **both | options)


def state(step):
    values = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    values[: step + 1] += 1
    return {"w": torch.from_numpy(values), "step": step}


def committed(store):
    with opened(store) as repository:
        return [snapshot.step for snapshot in repository.snapshots()]


@pytest.mark.parametrize("async_save", [True, False])
def test_each_commit_is_told_once_it_is_durable(store, async_save):
    def look(event):
        with opened(store.inner) as repository:
            found.append([snapshot.id for snapshot in repository.snapshots()])

    events, found = Events(), []
    with manager(store, None, on_commit=[events, look], on_failure=events, async_save=async_save) as snapshots:
        handles = [snapshots.save(step, state(step)) for step in range(3)]
    assert events.ends() == [(0, True), (1, True), (2, True)]
    ids = [event.snapshot.id for event in events]
    assert ids == [handle.result().id for handle in handles]
    assert all(id in there for id, there in zip(ids, found, strict=True))
    event = events[-1]
    assert (event.run, event.snapshot.depth) == ("a", handles[-1].result().depth)
    assert event.snapshot.stall_s > 0
    assert event.snapshot.total_s >= event.snapshot.stall_s
    assert event.ages.mirror_s is None


@pytest.mark.parametrize("async_save", [True, False])
def test_no_hook_runs_in_the_thread_of_the_loop_or_of_a_save(store, async_save):
    events = Events()
    with manager(store, events, async_save=async_save) as snapshots:
        snapshots.save(0, state(0)).result()
        with pytest.raises(UnsupportedLeafError):
            snapshots.save(1, {"w": object()})
        store.at = len(store.log)
        with pytest.raises(StorageError):
            snapshots.save(2, state(2)).result()
        with suppress(StorageError):
            snapshots.check_for_errors()
    assert events.ends() == [(0, True), (1, False), (2, False)]
    assert events.threads == {"snapstore-hooks-a"}
    assert threading.current_thread().name != "snapstore-hooks-a"


def test_a_save_in_the_background_enters_no_code_of_the_hooks_in_the_loop(store):
    entered = []

    def note(frame, event, arg):
        if event == "call":
            entered.append(frame.f_code.co_filename)

    with manager(store, Events()) as snapshots:
        snapshots.save(0, state(0)).result()
        sys.setprofile(note)
        try:
            handle = snapshots.save(1, state(1))
        finally:
            sys.setprofile(None)
        handle.result()
    assert any(path.endswith("snapstore/manager.py") for path in entered)
    assert not any(path == hooks.__file__ for path in entered)


def test_a_hanging_hook_delays_no_save_and_close_only_for_a_while(store, monkeypatch, caplog):
    monkeypatch.setattr(hooks, "DRAIN_S", 0.05)
    monkeypatch.setattr(hooks, "MAX_EVENTS", 2)
    going_on, told = threading.Event(), Events()

    def hang(event):
        told(event)
        going_on.wait(60)

    snapshots = manager(store, None, on_commit=hang)
    for step in range(5):
        snapshots.save(step, state(step)).result()
    snapshots.close()
    assert committed(store.inner) == [0, 1, 2, 3, 4]
    assert told.ends() == [(0, True)]
    assert snapshots._hooks.dropped == 4  # two waited until close, two came too late
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [text.partition(" ")[2] for text in texts] == [
        "hooks are too slow, or get no thread: events are dropped from now on",
        "a hook has not returned 0.05 s after the last save",
        "4 events were dropped: no hook got them",
    ]
    assert snapshots._hooks not in hooks._all, "the interpreter's exit would wait once more"
    going_on.set()
    until(lambda: snapshots._hooks._thread is None, 60)
    assert told.ends() == [(0, True)]


def test_the_exit_waits_for_all_managers_together(store, monkeypatch):
    waits = []
    monkeypatch.setattr(hooks, "DRAIN_S", 0.05)
    monkeypatch.setattr(hooks, "_all", made := [hooks.Hooks("a", waits.append, None) for _ in range(3)])
    for one in made:
        monkeypatch.setattr(one, "drain", lambda timeout: waits.append(timeout) or time.sleep(timeout))
    hooks._drain_all()
    assert sum(waits) < 0.06


def test_a_hook_begins_no_save_while_its_manager_closes(store):
    closing, refused = threading.Event(), []

    def save(event):
        closing.wait(60)
        try:
            snapshots.save(1, state(1))
        except InvalidInputError as error:
            refused.append(str(error))

    snapshots = manager(store, None, on_commit=save)
    real = snapshots._hooks.drain
    snapshots._hooks.drain = lambda timeout: (closing.set(), real(timeout))
    snapshots.save(0, state(0)).result()
    snapshots.close()
    assert len(refused) == 1
    assert committed(store.inner) == [0]


def test_a_hanging_hook_does_not_hold_up_the_end_of_a_job_that_was_told(store, monkeypatch):
    monkeypatch.setattr(hooks, "DRAIN_S", 0.05)
    going_on = threading.Event()
    snapshots = manager(store, None, on_commit=lambda event: going_on.wait(60))
    snapshots.handle_preemption()
    snapshots.save(0, state(0))
    signal.raise_signal(signal.SIGTERM)

    def train():
        for step in range(1, 100):
            snapshots.save(step, state(step))

    with pytest.raises(SystemExit) as ended:
        train()
    going_on.set()
    assert ended.value.code == 128 + signal.SIGTERM
    assert len(committed(store.inner)) >= 2


@pytest.mark.parametrize("error", [ValueError("no route"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_of_a_hook_is_logged_and_ends_nothing(store, error, caplog):
    def fail(event):
        raise error

    events = Events()
    with manager(store, None, on_commit=[fail, events]) as snapshots:
        for step in range(2):
            snapshots.save(step, state(step)).result()
    assert events.ends() == [(0, True), (1, True)]
    kind = type(error).__name__
    assert len(re.findall(rf"run=a hook .*fail.* has failed: {kind}: ", caplog.text)) == 2


def test_a_hook_may_save_and_close(store):
    events = Events()

    def save(event):
        events(event)
        if event.step == 0:
            snapshots.save(1, state(1)).result(60)
            snapshots.close()

    snapshots = manager(store, None, on_commit=save)
    snapshots.save(0, state(0))
    until(lambda: len(events) == 2, 60)
    assert events.ends() == [(0, True), (1, True)]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_that_fails_is_told_once(store, async_save):
    events = Events()
    with manager(store, events, async_save=async_save) as snapshots:
        snapshots.save(0, state(0)).result()
        store.at = len(store.log)
        with pytest.raises(StorageError) as raised:
            snapshots.save(1, state(1)).result()
        snapshots.save(2, state(2)).result()
    assert events.ends() == [(0, True), (1, False), (2, True)]
    failed = events[1]
    assert failed.error is raised.value
    assert (failed.run, failed.attempt, failed.will_retry) == ("a", 1, False)


def test_a_state_that_cannot_be_saved_is_a_failure_and_a_wrong_argument_is_none(store):
    events = Events()
    with manager(store, events) as snapshots:
        with pytest.raises(UnsupportedLeafError) as raised:
            snapshots.save(3, {"w": object()})
        with pytest.raises(InvalidInputError):
            snapshots.save(4, state(4), tags=["latest"])
        with pytest.raises(InvalidInputError):
            snapshots.save(-1, state(4))
    assert events.ends() == [(3, False)]
    assert events[0].error is raised.value


def test_skipped_saves_are_no_events(store):
    events, going_on = Events(), threading.Event()
    put = store.inner.put
    store.inner.put = lambda key, data: (going_on.wait(60), put(key, data))
    with manager(store, events, on_busy="skip", save_interval_steps=2) as snapshots:
        snapshots.save(0, state(0))
        assert snapshots.save(2, state(2)).skipped
        assert snapshots.save(3, state(3)).skipped
        going_on.set()
    assert events.ends() == [(0, True)]


def test_attempts_are_told_and_one_end_of_each_save(store):
    """`on_error="warn"`: attempts of step 1 fail, step 2 replaces it and is committed once the store is back."""
    events = Events()
    with manager(store, events, on_error="warn") as snapshots:
        snapshots.save(0, state(0)).result()
        store.at, store.mode = len(store.log), "outage"
        snapshots.save(1, state(1))
        until(lambda: len(events) >= 3, 60)
        snapshots.save(2, state(2))
        until(lambda: events[-1].step == 2, 60)
        store.heal()
    assert events.ends() == [(0, True), (1, False), (2, True)]
    attempts = [event for event in events if getattr(event, "will_retry", False)]
    of_first = [event.attempt for event in attempts if event.step == 1]
    assert of_first == list(range(1, len(of_first) + 1))
    assert all(isinstance(event.error, StorageError) for event in attempts)
    (replaced,) = [event for event in events if event.step == 1 and event not in attempts]
    assert (replaced.attempt, str(replaced.error)) == (
        len(of_first) + 1,
        "save a@1: the newer save a@2 has replaced it",
    )


def test_a_commit_whose_outcome_was_unclear_is_told_once(store, monkeypatch):
    """The record lands, and the store goes away before it says so: a later attempt finds it."""
    one_thread(monkeypatch)
    put = store.put

    def land(key, data):
        if key.startswith("snapshots/") and not store.fired:
            store.at, store.mode = len(store.log), "lost-outage"
        put(key, data)

    store.put, events = land, Events()
    with manager(store, events, on_error="warn") as snapshots:
        handle = snapshots.save(0, state(0))
        until(lambda: len(events) >= 3, 60)
        assert not handle.done()
        store.heal()
        handle.result(60)
    assert events.ends() == [(0, True)]
    assert committed(store.inner) == [0]


#: Each fault at operations of the second of three saves; there are fewer than 40.
CASES = [
    (mode, k) for mode in ("crash-before", "crash-after", "torn", *FAILURES) if mode != "full" for k in range(0, 40, 3)
]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("mode", "k"), CASES)
def test_no_commit_is_told_that_is_not_there(mode, k, monkeypatch):
    """Whatever the store does: what was told is there; what is there was told, or its end said that it is unknown."""
    one_thread(monkeypatch, index=False)
    store, events = FaultStore(created()), Events()
    with suppress(SnapstoreError, Crash), manager(store, events) as snapshots:
        snapshots.save(0, state(0)).result()
        store.at, store.mode = len(store.log) + k, mode
        for step in (1, 2):
            with suppress(SnapstoreError, Crash):
                snapshots.save(step, state(step)).result()
        store.heal()
    until(lambda: snapshots._hooks._thread is None, 60)
    ends = events.ends()
    assert [step for step, _ in ends] == sorted({step for step, _ in ends})
    there = committed(store.inner)
    told = [step for step, is_there in ends if is_there]
    assert set(told) <= set(there)
    for step in set(there) - set(told):
        (event,) = [event for event in events if event.step == step]
        assert isinstance(event.error, Crash) or "whether it was committed is unknown" in str(event.error)


def test_of_several_ranks_the_first_hears_of_commits_and_each_of_failures():
    store, jobs, events = created(), LocalRanks(2), [Events(), Events()]

    def rank(number):
        with manager(store, events[number], ranks=jobs[number]) as snapshots:
            snapshots.save(0, {"w": torch.ones(50)}).result(60)
            with pytest.raises(SnapstoreError):
                snapshots.save(1, {"w": object() if number else torch.ones(50)}).result(60)
            with suppress(SnapstoreError):
                snapshots.check_for_errors()
            snapshots.save(2, {"w": torch.ones(50)}).result(60)

    assert together([partial(rank, 0), partial(rank, 1)]) == [None, None]
    assert events[0].ends() == [(0, True), (1, False), (2, True)]
    assert events[1].ends() == [(1, False)]


def test_ranks_hear_of_the_same_attempts(store):
    events = [Events(), Events()]
    managers = Managers(
        store,
        2,
        on_error="warn",
        of_rank=lambda rank: {"on_commit": events[rank], "on_failure": events[rank]},
    )
    managers.each(lambda m, _: m.save(0, {"w": torch.ones(50)}).result(60))
    store.at, store.mode = len(store.log), "outage"
    handles = managers.each(lambda m, _: m.save(1, {"w": torch.zeros(50)}))
    until(lambda: all(len(found) >= 2 for found in events), 60)
    store.heal()
    for handle in handles:
        until(handle.done, 60)
    managers.end()
    assert events[0].ends() == [(0, True), (1, True)]
    assert events[1].ends() == []
    attempts = [[event.attempt for event in found if isinstance(event, FailureEvent)] for found in events]
    assert attempts[0] == attempts[1] == list(range(1, len(attempts[0]) + 1))
    assert all(event.will_retry for event in events[1])


def test_ages_are_those_of_now(store):
    events, mirror = Events(), FaultStore(MemoryStore())
    with opened(store.inner) as repository:
        repository.copy(to=mirror.inner)  # makes it
    with mirrored_manager(store, mirror, on_commit=events) as snapshots:
        snapshots.save(0, state(0)).result()
        until(lambda: events, 60)
        assert snapshots.wait_until_mirrored(60) == []
        ages = events[0].ages
        before = ages.mirror_s
        until(lambda: ages.mirror_s > before and ages.commit_s > before, 60)
        mirror.at, mirror.mode = len(mirror.log), "outage"
        created_0 = events[0].snapshot.created
        assert snapshots._mirror.newest_created() == created_0
        snapshots.save(1, state(1)).result()
        until(lambda: len(events) == 2, 60)
        assert snapshots.wait_until_mirrored(60) == [1]
        assert ages.mirror_s > ages.commit_s  # the mirror lacks the newest commit
        mirror.heal()
        assert snapshots.wait_until_mirrored(60) == []
        assert snapshots._mirror.newest_created() == events[1].snapshot.created
    with mirrored_manager(store, mirror) as again:  # a new process reads it from the mirror
        assert again._mirror.newest_created() == events[1].snapshot.created


@pytest.mark.parametrize("hook", ["log", 3, [print, "log"], {}])
def test_a_hook_that_cannot_be_called_is_refused(store, hook):
    with pytest.raises(InvalidInputError, match=r"on_failure .*: expected a function of one event, or a list of them"):
        manager(store, None, on_failure=hook)


def test_the_exit_of_the_interpreter_waits_for_the_hooks_of_the_last_save(tmp_path):
    """The program does not close its manager."""
    script = f"""if True:
        import time, torch
        from snapstore import SnapshotManager
        def told(event):
            time.sleep(0.05)
            print(event.step, flush=True)
        manager = SnapshotManager({str(tmp_path / "r")!r}, run="a", on_commit=told)
        manager.save(3, {{"w": torch.ones(500000)}})
        print("end", flush=True)
    """
    done = run_python("-c", script)
    assert (done.returncode, done.stdout.split()) == (0, ["end", "3"]), done.stderr


def test_no_thread_for_hooks_ends_no_save(store, monkeypatch, caplog):
    real = threading.Thread.start

    def start(self):
        if self.name.startswith("snapstore-hooks"):
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    events = Events()
    with manager(store, events) as snapshots:
        snapshots.save(0, state(0)).result()
    assert not events
    assert snapshots._hooks.dropped == 1
    assert "run=a 1 events were dropped: no hook got them" in caplog.text


def test_a_save_that_a_job_cannot_begin_before_its_end_is_a_failure(store, monkeypatch):
    """The store hangs, and the time after the signal has passed."""
    monkeypatch.setattr("snapstore.manager.GIVE_UP_S", 0.1)
    going_on, events = threading.Event(), Events()
    put = store.inner.put
    with manager(store, events) as snapshots:
        snapshots.handle_preemption(timeout=0.1)
        store.inner.put = lambda key, data: (going_on.wait(60), put(key, data))
        snapshots.save(0, state(0))
        signal.raise_signal(signal.SIGTERM)
        with suppress(TimeoutError, SystemExit):
            snapshots.save(1, state(1))
        going_on.set()
        until(lambda: len(events) == 2, 60)
    assert isinstance(events[0], FailureEvent)
    assert sorted(events.ends()) == [(0, False), (1, False)]
