"""Ctrl-C in the thread that drives a device: the batches of other threads go on, and nothing is lost."""

import threading
import time
from contextlib import suppress

import pytest
import torch

from kit.gpu_states import MIB, differing, facts, floats, repository
from kit.interrupts import Interrupter
from kit.samples import sampled
from snapstore import SnapshotManager

if torch.cuda.is_available():  # they import CuPy
    from snapstore.engine.cuda import encoding, streams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def steps_of(values, name, yields=2):
    """Return steps that note in `values` that they ran to their end, and return `name`."""

    def steps(work):
        for _ in range(yields):
            yield
        values.append(name)
        return name

    return steps


def ends(pool, *tasks):
    """Return the results of batches; fail if one does not end."""
    until = time.monotonic() + 60
    pool.poll_until(lambda: all(task.done for task in tasks) or time.monotonic() > until)
    assert all(task.done for task in tasks), "a batch never ends"
    return [task.result() for task in tasks]


class Interrupted:
    """A pool with batches of another thread, and a call that begins further ones and is interrupted."""

    def __init__(self):
        self.pool, self.ran = streams.StreamPool(torch.device("cuda", 0), 2), []
        self.others = [self.pool.start(steps_of(self.ran, "other"), fast=fast) for fast in (False, True, False, False)]
        self.begun = []

    def act(self):
        for fast in (True, False):
            self.begun.append(self.pool.start(steps_of(self.ran, "own"), fast=fast))
        for task in self.begun:
            task.result()

    def check(self):
        """Check that all batches end that anybody waits for, that no other one runs, and that all streams are free."""
        assert ends(self.pool, *self.others) == ["other"] * 4
        assert ends(self.pool, *self.begun) == ["own"] * len(self.begun)
        self.pool.poll()
        assert not self.pool._running
        assert not self.pool._waiting
        running, most = [], []

        def steps(work):
            running.append(work)
            most.append(len(set(running)))
            for _ in range(5):
                yield
            running.remove(work)

        ends(self.pool, *(self.pool.start(steps) for _ in range(4)), self.pool.start(iter_of_nothing, fast=True))
        assert max(most) == 2


def iter_of_nothing(work):
    return iter(())


def test_ctrl_c_at_any_place_loses_no_batch_and_no_stream():
    case, counter = Interrupted(), Interrupter("engine/cuda/streams.py")
    counter.call(case.act)
    case.check()
    assert len(counter.passed) > 50
    struck = 0
    for at in range(len(counter.passed)):
        case, interrupter = Interrupted(), Interrupter("engine/cuda/streams.py", at=at)
        try:
            interrupter.call(case.act)
        except KeyboardInterrupt:
            struck += 1
        else:  # the device was faster than the first time, so the call passed fewer places
            assert len(interrupter.passed) <= at
        before = len(case.begun)
        case.check()
        assert case.ran.count("own") - before in (0, 1), counter.passed[at]  # one whose `start` was interrupted may end
    assert struck > 50


def test_ctrl_c_in_a_batch_of_another_thread_is_raised_where_it_strikes():
    """The thread that waits for its own batch drives all of them. The other batch begins again, and goes on."""
    pool, begun, struck = streams.StreamPool(torch.device("cuda", 0), 2), [], []

    def steps(work):
        yield
        while not begun:  # the calls of `start` advance it too
            yield
        if not struck:
            struck.append(threading.get_ident())
            raise KeyboardInterrupt
        yield
        return "other"

    other, own = pool.start(steps), pool.start(steps_of([], "own", 50))
    begun.append(own)
    with pytest.raises(KeyboardInterrupt):
        own.result()
    assert ends(pool, other, own) == ["other", "own"]
    assert struck == [threading.get_ident()]


def test_ctrl_c_in_restores_does_not_end_a_save(monkeypatch):
    """Ctrl-C while a restore drives a batch of a save: the restore ends, and the save commits."""
    state = {"w": floats(MIB // 4, 1, "cuda")}
    wanted, main, struck = facts(state), threading.main_thread(), []
    split, poll = encoding.Encoding._split, streams.StreamPool.poll

    def restores():
        for _ in range(100):
            repo.restore("r@0", device="cuda")

    def strike(self, rows):
        if not struck:
            struck.append(threading.current_thread())
            raise KeyboardInterrupt
        return split(self, rows)

    with repository(chunk_bytes=65_536) as repo, SnapshotManager(repo, run="r", staging="host") as made:
        made.save(0, state).result(60)
        monkeypatch.setattr(encoding.Encoding, "_split", strike)
        monkeypatch.setattr(  # the restores drive all batches
            streams.StreamPool, "poll", lambda self: (struck or threading.current_thread() is main) and poll(self)
        )
        state["w"] += 1
        after = facts(state)
        handle = made.save(1, state)
        with pytest.raises(KeyboardInterrupt):
            restores()
        assert struck == [main]
        handle.result(60)
        made.save(2, state).result(60)
        for step, expected in enumerate((wanted, after, after)):
            assert differing(facts(made.restore(step, device="cuda")), expected) == []


def test_a_restore_writes_nothing_after_ctrl_c():
    """A batch that nobody waits for would go on when the next restore drives the device."""

    def interrupted(at):
        target = {"w": torch.zeros(MIB // 4, device="cuda")}
        interrupter = Interrupter("chunks/reader.py", "engine/cuda/engine.py", at=at)
        with suppress(KeyboardInterrupt):
            interrupter.call(repo.restore_into, "r@0", target)
        torch.cuda.synchronize()
        left = target["w"].clone()
        repo.restore("r@0", device="cuda")
        assert torch.equal(left, target["w"]), interrupter.passed[-1]
        return interrupter.passed

    with repository(chunk_bytes=65_536) as repo:
        repo.save({"w": floats(MIB // 4, 1, "cuda")}, run="r", step=0)
        for at in sampled(len(interrupted(None)), 3):
            interrupted(at)
