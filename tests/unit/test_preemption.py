"""A job that is told to end saves once more: all ranks at the same step, without a collective."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from kit.faults import FaultStore
from kit.local_ranks import LocalRanks
from kit.objects import keys_of
from kit.processes import environment
from kit.ranks import together
from kit.repositories import OPTIONS, created, opened
from kit.waits import until
from snapstore import InvalidInputError, KeepLast, SnapshotManager, SnapstoreError, StorageError
from snapstore.distributed import base, preemption
from snapstore.distributed.preemption import Preemption


class Held(FaultStore):
    """A store whose puts of packs wait for an event."""

    def __init__(self, inner, gate):
        super().__init__(inner)
        self.gate = gate

    def _act(self, name, key, effect):
        if name == "put" and key.startswith("packs/"):
            self.gate.wait(60)
        return super()._act(name, key, effect)


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_stop_at_one_step(seed, monkeypatch):
    """All ranks stop at the same step, though each has its own speed and only one gets the signal."""
    monkeypatch.setattr(base, "CALL_S", 0.01)
    count, random_of = 4, random.Random(seed)
    ranks = LocalRanks(count)
    told, at = random_of.randrange(count), random_of.randrange(30)
    reached = [0] * count

    def train(rank):
        end = Preemption(ranks[rank], "p/")
        heart = base.Heart(ranks[rank])
        heart.add(end.poll)
        try:
            for step in range(5000):
                while step > min(reached) + 3:  # as if the ranks communicated every few steps
                    time.sleep(0.0005)
                if rank == told and step == at:
                    end.notice(signal.SIGTERM)
                if end.reached(step):
                    return step
                reached[rank] = step
                time.sleep(0.0005 * (1 + rank))
            return None
        finally:
            reached[rank] = 10**9
            heart.close()

    steps = together([lambda r=r: train(r) for r in range(count)])
    assert len(set(steps)) == 1, steps
    assert steps[0] is not None
    assert steps[0] > at - 4


def test_ranks_in_a_collective_agree_all_the_same(monkeypatch):
    """Ranks that wait for each other in a collective agree on one step: the threads in the background agree."""
    monkeypatch.setattr(base, "CALL_S", 0.01)
    ranks, barrier = LocalRanks(2), threading.Barrier(2)

    def train(rank):
        end = Preemption(ranks[rank], "p/")
        heart = base.Heart(ranks[rank])
        heart.add(end.poll)
        try:
            for step in range(2000):
                if rank == 0 and step == 5:
                    end.notice()
                if end.reached(step):
                    return step
                barrier.wait(30)
            return None
        finally:
            heart.close()

    steps = together([lambda r=r: train(r) for r in range(2)])
    assert steps[0] == steps[1] is not None
    assert steps[0] >= 5


@pytest.mark.parametrize("told", [0, 1])
def test_a_rank_that_waits_for_the_others_to_agree_stays_alive(monkeypatch, told):
    """It sends heartbeats meanwhile: else the others take it for dead where `silent_s` is shorter than the wait."""
    monkeypatch.setattr(preemption, "AGREE_S", 2.5)
    monkeypatch.setattr(preemption, "LATE_S", 2.5)
    ranks = LocalRanks(2, silent_s=1.0)
    end = Preemption(ranks[told], "p/")
    end.notice()
    heart = base.Heart(ranks[told])
    try:
        heart.add(end.poll)
        silences, began = [0.0], time.monotonic()
        while time.monotonic() < began + 2.5:
            silences += ranks[1 - told].silences([told])
            time.sleep(0.02)
        assert end.reached(0)
    finally:
        heart.close()
    assert max(silences) < 1.0


def test_a_rank_that_does_not_agree_keeps_the_others_for_some_seconds_at_most(monkeypatch):
    monkeypatch.setattr(preemption, "AGREE_S", 0.2)
    end = Preemption(LocalRanks(3)[0], "p/")
    assert not end.reached(4)
    end.notice()
    end.poll()
    assert end.reached(5)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_saves_at_the_step_of_the_others(monkeypatch, late, caplog):
    """Python of one rank does not run for longer than AGREE_S, for example in a C extension that holds the GIL."""
    monkeypatch.setattr(preemption, "AGREE_S", 0.2)
    ranks = LocalRanks(3)
    ends = [Preemption(one, "p/") for one in ranks]
    for rank, end in enumerate(ends):
        assert not end.reached(3 if rank == late else 10 + rank)
        end.notice()

    def poll(rank):
        time.sleep(1.0 if rank == late else 0.0)
        ends[rank].poll()

    assert together([lambda r=r: poll(r) for r in range(3)]) == [None] * 3
    assert [[end.reached(step) for step in (12, 13)] for end in ends] == [[False, True]] * 3
    assert ("rank 1 of 3: no step within 0.2 s" in caplog.text) == (late == 1)
    assert "by itself" not in caplog.text


def test_a_rank_whose_channel_is_broken_ends_by_itself(caplog):
    """Our handler has taken the SIGTERM, so nothing else would end this process."""
    ranks = LocalRanks(2)
    ranks[0].is_hosted = ranks[0].dead = True
    end = Preemption(ranks[1], "p/")
    assert not end.reached(4)
    end.notice()
    end.poll()
    assert [end.reached(step) for step in (4, 5)] == [False, True]
    assert "rank 1 ends by itself: rank 0 of 2: its process is gone" in caplog.text


@pytest.mark.parametrize("hangs", ["look", "post"])
def test_a_rank_whose_channel_does_not_answer_ends_by_itself(monkeypatch, hangs, caplog):
    """The process of rank 0 is stopped: a call of the channel waits for `silent_s`."""
    monkeypatch.setattr(preemption, "LATE_S", 0.3)
    monkeypatch.setattr(preemption, "GRACE_S", 0.1)
    ranks, gate, begun = LocalRanks(2), threading.Event(), threading.Event()

    def hang(*_):
        begun.set()
        gate.wait(60)

    setattr(ranks[1], hangs, hang)
    end = Preemption(ranks[1], "p/")
    if hangs == "post":
        end.notice()
    poll = threading.Thread(target=end.poll, daemon=True)
    poll.start()
    try:
        assert begun.wait(60)
        end.notice()
        began = time.monotonic()
        step = next(step for step in range(1000) if end.reached(step) or time.sleep(0.01))
        assert 0.2 < time.monotonic() - began < 30
        assert end.reached(step + 1)
        assert "rank 1 ends by itself: the channel does not answer" in caplog.text
    finally:
        gate.set()
        poll.join(60)
    assert end.reached(step)
    assert not end.reached(step - 1)


def test_one_process_saves_once_more_and_ends():
    store = created()
    before = signal.getsignal(signal.SIGTERM)
    manager = SnapshotManager(store, run="a", save_interval_steps=100, options=OPTIONS)
    with pytest.raises(InvalidInputError, match="handle_preemption"):
        manager.reached_preemption(0)
    manager.handle_preemption()

    def train():
        for step in range(50):
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                manager.save(step, {"w": torch.ones(5000)})

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 128 + signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)  # the process ends, and a second signal does not change its status
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [0, 7]
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:  # a program that goes on all the same
        manager.handle_preemption()
        assert not manager.reached_preemption(8)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU])
def test_other_signals_tell_the_job_if_they_are_named(number):
    """The status says which came first; a second one changes nothing."""
    store, names = created(), [signal.SIGTERM, number]
    manager = SnapshotManager(store, run="a", save_interval_steps=100, options=OPTIONS)
    manager.handle_preemption(signals=[number])
    assert not manager.should_save(7)
    for one in reversed(names):
        os.kill(os.getpid(), one)
    with pytest.raises(SystemExit) as ended:
        manager.save(7, {"w": torch.ones(5000)})
    assert ended.value.code == 128 + number
    with opened(store) as repository:
        assert [s.step for s in repository.snapshots()] == [7]


def test_a_signal_that_is_not_named_does_what_it_did_before():
    """Programs use SIGUSR1 themselves; nobody takes it from them."""
    heard, before = [], signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        with SnapshotManager(created(), run="a", options=OPTIONS) as manager:
            manager.handle_preemption(end=False)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not manager.reached_preemption(1)
            manager.handle_preemption(end=False, signals=[signal.SIGUSR1])
            os.kill(os.getpid(), signal.SIGUSR1)
            assert manager.reached_preemption(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [1, 1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_each_manager_hears_the_signals_that_it_names():
    before = signal.getsignal(signal.SIGUSR1)
    with SnapshotManager(created(), run="a", options=OPTIONS) as one:
        one.handle_preemption(end=False)
        with SnapshotManager(created(), run="a", options=OPTIONS) as two:
            two.handle_preemption(end=False, signals=[signal.SIGUSR1])
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (one.reached_preemption(1), two.reached_preemption(1)) == (False, True)
        assert signal.getsignal(signal.SIGUSR1) is before
        os.kill(os.getpid(), signal.SIGTERM)
        assert one.reached_preemption(1)


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGKILL], [signal.SIGSEGV], [0], [10**9], "TERM", 10, [None], ["SIGUSR1"]]
)
def test_signals_that_cannot_tell_a_job_are_refused(signals):
    """Ctrl-C must always work, and Python cannot handle the other ones. What was set before goes on."""
    before = signal.getsignal(signal.SIGTERM)
    with SnapshotManager(created(), run="a", options=OPTIONS) as manager:
        manager.handle_preemption(end=False)
        with pytest.raises(InvalidInputError, match=r"expected a list with some of signal.SIGTERM, signal.SIGUSR1"):
            manager.handle_preemption(signals=signals)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.reached_preemption(1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_that_are_told_in_different_ways_at_once_agree_on_one_of_them(monkeypatch):
    """All processes of a job end with one status."""
    monkeypatch.setattr(preemption, "AGREE_S", 5.0)
    ranks, kinds = LocalRanks(4), [signal.SIGUSR1, preemption.NOTICE, signal.SIGTERM]
    look = ranks[2].look
    ranks[2].look = lambda key: None if key == "p/preempt" else look(key)  # what another one posted first is late
    ends = [Preemption(one, "p/") for one in ranks]
    for number, end in enumerate(ends):
        assert not end.reached(number)
        if number < 3:
            end.notice(kinds[number])
    assert together([end.poll for end in ends]) == [None] * 4
    assert [[end.reached(step) for step in (3, 4)] for end in ends] == [[False, True]] * 4
    ends[3].notice(signal.SIGUSR2)  # too late
    told = {(end.status, end.teller) for end in ends}
    assert len(told) == 1
    assert told <= {(138, "SIGUSR1"), (143, "a notice"), (143, "SIGTERM")}


def test_a_loop_may_end_by_itself():
    store = created()
    with SnapshotManager(store, run="a", save_interval_steps=100, options=OPTIONS) as manager:
        manager.handle_preemption(end=False)
        assert not manager.reached_preemption(3)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.reached_preemption(4)
        assert not manager.should_save(4)
        assert manager.save(4, {"w": torch.ones(3)}, force=True).result().step == 4


def test_a_handler_that_is_set_twice_gives_the_first_one_back():
    before = signal.getsignal(signal.SIGTERM)
    with SnapshotManager(created(), run="a", options=OPTIONS) as manager:
        manager.handle_preemption(end=False)
        manager.handle_preemption()
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("is_reversed", [False, True])
def test_all_managers_of_a_process_hear_the_signal(is_reversed):
    """The handler from before returns when the last manager is closed, in any order."""
    before = signal.getsignal(signal.SIGTERM)
    managers = [SnapshotManager(created(), run="a", options=OPTIONS) for _ in range(3)]
    for manager in managers:
        manager.handle_preemption(end=False)
    managers.pop(1).close()
    assert signal.getsignal(signal.SIGTERM) is not before
    os.kill(os.getpid(), signal.SIGTERM)
    assert [manager.reached_preemption(1) for manager in managers] == [True, True]
    for manager in reversed(managers) if is_reversed else managers:
        manager.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_of_the_program_is_kept_and_ours_swallows_no_signal():
    """The program sets its own handler after ours, and later restores ours, which nobody listens to any more."""
    heard, before = [], signal.signal(signal.SIGTERM, lambda *_: heard.append("before"))
    try:
        with SnapshotManager(created(), run="a", options=OPTIONS) as manager:
            manager.handle_preemption(end=False)
            ours = signal.signal(signal.SIGTERM, lambda *_: heard.append("after"))
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["after"]
        signal.signal(signal.SIGTERM, ours)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["after", "before"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_child_process_that_is_forked_while_a_manager_handles_preemption_ends_at_the_signal():
    with SnapshotManager(created(), run="a", options=OPTIONS) as manager:
        manager.handle_preemption(end=False)
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not manager.reached_preemption(1)


def test_a_forked_child_ignores_the_other_signals_while_its_parent_handles_them():
    """Slurm signals all processes: a worker of a DataLoader that ends would end the loop before its last save."""
    with SnapshotManager(created(), run="a", options=OPTIONS) as manager:
        manager.handle_preemption(end=False, signals=[signal.SIGUSR1])
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert not manager.reached_preemption(1)


@pytest.mark.parametrize("when", ["finally", "exit"])
def test_a_signal_that_comes_while_the_process_ends_does_not_change_its_status(when):
    program = f"""
import atexit, os, signal, torch
from kit.repositories import created
from snapstore import SnapshotManager
tell = lambda: [os.kill(os.getpid(), one) for one in (signal.SIGTERM, signal.SIGUSR1)]
if {when!r} == "exit":
    atexit.register(tell)
manager = SnapshotManager(created(), run="a")
manager.handle_preemption(signals=[signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR1)
try:
    manager.save(1, {{"w": torch.ones(3)}})
finally:
    tell()
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment(), timeout=300, check=False)
    assert done.returncode == 128 + signal.SIGUSR1


def test_a_last_save_that_fails_restores_the_handlers():
    class Away(FaultStore):
        def _act(self, name, key, effect):
            if name == "put" and key.startswith("packs/"):
                raise StorageError("the store is away")
            return super()._act(name, key, effect)

    before = signal.getsignal(signal.SIGTERM)
    manager = SnapshotManager(Away(created()), run="a", options=OPTIONS)
    manager.handle_preemption()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StorageError, match="the store is away"):
        manager.save(1, {"w": torch.ones(5000)})
    assert signal.getsignal(signal.SIGTERM) is before


def test_more_signals_in_the_last_save_change_nothing():
    """The save goes on, and the status is that of the first one."""
    inner, gate = created(), threading.Event()
    manager = SnapshotManager(Held(inner, gate), run="a", options=OPTIONS)
    manager.handle_preemption(signals=[signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    for number, after_s in ((signal.SIGTERM, 0.2), (signal.SIGUSR1, 0.3)):
        threading.Timer(after_s, os.kill, [os.getpid(), number]).start()
    threading.Timer(0.5, gate.set).start()
    with pytest.raises(SystemExit) as ended:
        manager.save(3, {"w": torch.ones(5000)})
    assert ended.value.code == 128 + signal.SIGUSR1
    with opened(inner) as repository:
        assert [s.step for s in repository.snapshots()] == [3]


def test_the_last_save_waits_for_the_running_one():
    """The last save waits even with `on_busy="skip"`: skipping it would lose the steps since the running save."""
    inner, gate = created(), threading.Event()

    manager = SnapshotManager(Held(inner, gate), run="a", on_busy="skip", options=OPTIONS)
    manager.handle_preemption()
    manager.save(1, {"w": torch.ones(5000)})
    assert manager.save(2, {"w": torch.ones(5000)}).skipped
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Timer(0.3, gate.set).start()
    with pytest.raises(SystemExit):
        manager.save(3, {"w": 3 * torch.ones(5000)})
    with opened(inner) as repository:
        assert [s.step for s in repository.snapshots()] == [1, 3]


@pytest.mark.parametrize("when", ["before the next save", "while it waits"])
def test_the_timeout_bounds_the_wait_for_the_running_save_too(monkeypatch, caplog, when):
    """A scheduler kills the process some time after SIGTERM, whatever still runs.

    If saves take longer than the interval, the main thread is nearly always inside `save`.
    """
    monkeypatch.setattr("snapstore.manager.GIVE_UP_S", 0.5)
    inner, gate = created(), threading.Event()

    manager = SnapshotManager(Held(inner, gate), run="a", options=OPTIONS)
    manager.handle_preemption(timeout=0.2)
    before = signal.getsignal(signal.SIGTERM)
    first = manager.save(1, {"w": torch.ones(5000)})
    if when == "while it waits":
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    else:
        os.kill(os.getpid(), signal.SIGTERM)
    began = time.monotonic()
    try:
        with pytest.raises((TimeoutError, SnapstoreError, SystemExit)):
            manager.save(2, {"w": 2 * torch.ones(5000)})
        assert time.monotonic() - began < 30, "it waited for the save before"
        assert "a step=2 is not saved: the save before it still runs" in caplog.text
    finally:
        gate.set()
        if signal.getsignal(signal.SIGTERM) is before:
            manager._ending.close()
    with pytest.raises(SnapstoreError, match="has given it up; nothing was committed"):
        first.result(60)
    with opened(inner) as repository:
        assert repository.snapshots() == []


def test_the_timeout_is_an_error_of_its_own_in_a_job_too(monkeypatch):
    """The guide says to call `os._exit` after it. The channel is closed by then."""
    monkeypatch.setattr("snapstore.manager.GIVE_UP_S", 0.2)
    monkeypatch.setattr(base, "CALL_S", 0.01)
    inner, gate, ranks = created(), threading.Event(), LocalRanks(1)[0]

    def closed(*_):
        raise base.ClosedError("these ranks are closed")

    ranks.close = lambda limit_s: setattr(ranks, "post", closed)
    manager = SnapshotManager(Held(inner, gate), run="a", ranks=ranks, options=OPTIONS)
    manager._made_ranks = True
    manager.handle_preemption(timeout=0.2)
    first = manager.save(1, {"w": torch.ones(5000)})
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        with pytest.raises(TimeoutError, match="has not ended"):
            manager.save(2, {"w": 2 * torch.ones(5000)})
    finally:
        gate.set()
        manager._ending.close()
    with pytest.raises(SnapstoreError, match="has given it up; nothing was committed"):
        first.result(60)


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_that_outlives_its_manager_releases_memory_and_repository(monkeypatch, fails):
    """The program may keep the manager and go on, in a notebook."""
    monkeypatch.setattr("snapstore.manager.GIVE_UP_S", 0.1)
    gate, done = threading.Event(), threading.Event()
    manager = SnapshotManager(Held(created(), gate), run="a", options=OPTIONS)
    if not fails:
        monkeypatch.setattr(
            manager._upkeep, "retain", lambda keep: done.wait(60)
        )  # the save itself has committed by then
        manager.keep = [KeepLast(1)]
        gate.set()
    saved = manager.save(1, {"w": torch.ones(5000)})
    if not fails:
        saved.result(60)
    with pytest.raises(TimeoutError, match="has not ended"):
        manager.close(timeout=0.1)
    assert manager.repository.context.index._environment is not None
    for event in (gate, done):
        event.set()
    until(lambda: manager.repository.context.index._environment is None)
    assert manager._staging._base.keys() == manager._staging._spare.keys() == set()
    if fails:
        with pytest.raises(SnapstoreError, match="has given it up; nothing was committed"):
            saved.result(60)


def test_a_preparation_in_the_background_costs_no_last_save(monkeypatch):
    """The timeout bounds saves. A preparation that runs at the signal is waited for."""
    inner, begun = created(), threading.Event()

    def slow(*_, **__):
        begun.set()
        time.sleep(1.5)

    manager = SnapshotManager(inner, run="a", keep=[KeepLast(1)], options=OPTIONS)
    manager.handle_preemption(timeout=0.3)
    state = {"w": torch.ones(5000)}
    monkeypatch.setattr(manager._background, "take_memory", slow)
    manager.prepare(state)
    assert begun.wait(60)
    os.kill(os.getpid(), signal.SIGTERM)
    close = manager.close
    monkeypatch.setattr(manager, "close", lambda _: close(60))  # the wait before is judged, not the last save's own
    with pytest.raises(SystemExit):
        manager.save(2, state)
    with opened(inner) as repository:
        assert [s.step for s in repository.snapshots()][-1] == 2


class SlowGc:
    """A store whose gcs wait at one put or delete of theirs, until they may go on."""

    def __init__(self, inner, at):
        self._inner, self._at = inner, at
        self.begun, self.gate = threading.Event(), threading.Event()
        self.deleted = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def _wait(self, verb, keys):
        kind = {"put": "gc/", "delete": "packs/"}[verb]
        if self._at == verb and any(key.startswith(kind) for key in keys) and not self.begun.is_set():
            self.begun.set()
            assert self.gate.wait(60)

    def put(self, key, data):
        self._wait("put", [key])
        return self._inner.put(key, data)

    def delete(self, keys):
        self._inner.delete(keys)
        self.deleted += keys
        self._wait("delete", keys)


def beside_a_gc(inner, at):
    """Return a manager whose gc waits, and its store; step 2 has committed, step 1 was forgotten."""
    store = SlowGc(inner, at)
    manager = SnapshotManager(store, run="a", keep=[KeepLast(1)], options=OPTIONS)
    manager.save(1, {"w": torch.rand(5000)}).result(60)
    manager.wait_until_finished()
    manager.save(2, {"w": torch.rand(5000)}).result(60)
    assert store.begun.wait(60)
    return manager, store


@pytest.mark.parametrize("at", ["put", "delete"])
def test_a_gc_stops_for_the_last_save(monkeypatch, at):
    """It ends at its next step, wherever it is; the next gc goes on."""
    monkeypatch.setattr("snapstore.protocol.gc.DELETED_AT_ONCE", 1)
    inner = created()
    manager, store = beside_a_gc(inner, at)
    manager.handle_preemption(timeout=60)
    os.kill(os.getpid(), signal.SIGTERM)
    store.gate.set()
    with pytest.raises(SystemExit):
        manager.save(3, {"w": torch.rand(5000)})
    with opened(inner) as repository:
        assert [s.step for s in repository.snapshots()] == [2, 3]
        assert [info.key for info in inner.list("gc/") if info.key.endswith(".mark")], "the gc has not ended"
        before = len([key for key in store.deleted if key.startswith(("packs/", "manifests/"))])
        assert (before > 0) == (at == "delete")
        assert repository.gc().deleted_objects > 0
        assert repository.check("restore").ok


def test_the_timeout_bounds_the_wait_for_a_gc_that_does_not_stop(monkeypatch, caplog):
    """Its store does not answer. The error says that the save before it is committed."""
    monkeypatch.setattr("snapstore.manager.GIVE_UP_S", 0.2)
    inner = created()
    manager, store = beside_a_gc(inner, "put")
    manager.handle_preemption(timeout=0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        with pytest.raises(TimeoutError, match="the gc behind the last save, which is committed, has not ended"):
            manager.save(3, {"w": torch.rand(5000)})
        assert "a step=3 is not saved: the save before it still runs, or its gc" in caplog.text
    finally:
        store.gate.set()
        manager._ending.close()


def test_close_with_a_timeout_stops_a_gc(monkeypatch):
    monkeypatch.setattr("snapstore.manager.GIVE_UP_S", 60)
    inner = created()
    manager, store = beside_a_gc(inner, "put")
    threading.Timer(0.3, store.gate.set).start()
    manager.close(timeout=0.1)
    assert [info.key for info in inner.list("gc/") if info.key.endswith(".mark")], "the gc has not ended"


class Struck:
    """Raises KeyboardInterrupt once, right after a call of C code in a function of the package returns."""

    def __init__(self, function, called):
        self._function, self._called = function, called
        self.is_done = False

    def __call__(self, frame, event, arg):
        if event == "c_return" and frame.f_code.co_name == self._function and self._called in repr(arg):
            sys.setprofile(None)
            self.is_done = True
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("function", "called"),
    [("join", "acquire"), ("join", "list"), ("join", "bool"), ("reached", "acquire"), ("__enter__", "next")],
)
def test_ctrl_c_leaves_no_lock(function, called):
    """A handler of `SIGINT` runs right after any call; after it, a save begins, and the manager closes."""
    with SnapshotManager(created(), run="a", ranks=LocalRanks(1)[0], options=OPTIONS) as manager:
        manager.handle_preemption(end=False)
        manager.save(1, {"w": torch.ones(50)}).result(60)
        manager.wait_until_finished()
        struck = Struck(function, called)
        sys.setprofile(struck)
        try:
            manager.reached_preemption(2)
            manager.save(2, {"w": torch.ones(50)})
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert manager._background.join(60)
        assert manager._preemption._lock.acquire(timeout=60)
        manager._preemption._lock.release()
        assert manager._background._inside == set()
        manager.save(3, {"w": torch.ones(50)}).result(60)


def test_handlers_belong_to_the_main_thread():
    with SnapshotManager(created(), run="a", options=OPTIONS) as manager:
        (error,) = together([manager.handle_preemption])
        assert isinstance(error, InvalidInputError)
        assert "main thread" in str(error)


def test_an_error_of_gc_does_not_change_the_status_of_a_job_that_was_told():
    """The pack of a tagged snapshot is gone, so every gc fails; the last save is committed, and the status tells it."""
    store = created()
    with SnapshotManager(store, run="a", options=OPTIONS) as manager:
        manager.save(0, {"w": torch.ones(5000)}, tags=["old"]).result()
    store.delete(keys_of(store, "packs/"))
    manager = SnapshotManager(store, run="a", options=OPTIONS, keep=KeepLast(1))
    manager.handle_preemption(signals=[signal.SIGUSR1])

    def train():
        for step in range(1, 100):
            if step == 4:
                os.kill(os.getpid(), signal.SIGUSR1)
            manager.save(step, {"w": torch.full((5000,), float(step))})
            manager._background.join()
            if step == 3:
                assert isinstance(manager._upkeep.error, SnapstoreError)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 128 + signal.SIGUSR1
    with opened(store) as repository:
        assert max(s.step for s in repository.snapshots()) >= 4
