"""Ranks on threads are told to end, in random ways at random moments: one snapshot of one step, and all resume there.

tests/integration/test_told_to_end.py has the same with processes and real signals. Here are many more schedules: late
and doubled messages, ranks with and without collectives, saves that run, are skipped or wait, and up to four ranks that
are told at once.
"""

from __future__ import annotations

import signal
import threading
import time
from random import Random

import numpy as np
import pytest

from kit.faults import one_thread
from kit.local_ranks import MessageFaults
from kit.ranks import Managers
from kit.repositories import created, opened
from kit.samples import SEED, THOROUGH
from kit.tally import EXAMPLES, tally
from snapstore import PerRank
from snapstore.distributed import base, notices
from snapstore.distributed.preemption import NOTICE

KINDS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, NOTICE)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    one_thread(monkeypatch, index=False)
    monkeypatch.setattr(base, "CALL_S", 0.02)
    monkeypatch.setattr(notices, "POLL_S", 0.02)


def weights(step):
    return np.random.default_rng(step).random(3000, np.float32)


def train(manager, rank, dice, barrier):
    """Resume, and train until the job is told to end; return the step, the status and the step of the resume."""
    state = {"w": np.zeros(3000, np.float32), "own": PerRank({"rank": rank, "step": 0}), "step": 0}
    start = manager.latest_step() or 0
    if start:
        manager.restore_into(state)
        assert np.array_equal(state["w"], weights(start))
        assert (state["own"].value, state["step"]) == ({"rank": rank, "step": start}, start)
    for step in range(start + 1, start + 100_000):
        if barrier is not None:
            barrier.wait(60)
        time.sleep(dice.random() * 0.004)
        state = {"w": weights(step), "own": PerRank({"rank": rank, "step": step}), "step": step}
        try:
            if manager.should_save(step):
                manager.save(step, state)
        except SystemExit as end:
            return step, end.code, start
    return None


def run_attempt(store, dice, count):
    """Run one attempt of a job; return what was told, and what each rank's `train` returned or raised."""
    managers = Managers(
        store,
        count,
        silent_s=60.0,
        total_s=60.0,
        save_interval_steps=dice.choice([1, 3, 10, 1000]),
        on_busy=dice.choice(["wait", "skip"]),
        async_save=dice.random() < 0.8,
    )
    managers.ranks._board.faults = MessageFaults(delay=dice.random() * 0.5, double=dice.random() * 0.3)
    flags, told = [threading.Event() for _ in range(count)], []
    for manager, flag in zip(managers, flags, strict=True):
        manager.handle_preemption(signals=[signal.SIGUSR1, signal.SIGUSR2], notice=flag.is_set)

    def tell(rank, kind):
        if kind == NOTICE:
            flags[rank].set()
        else:  # what the handler does in the process of this rank
            managers[rank]._preemption.notice(kind)

    moment_s = dice.choice([0.0, dice.random() * 0.02, dice.random() * 0.4])
    timers = []
    for rank in dice.sample(range(count), dice.randint(1, count)):
        kind = dice.choice(KINDS)
        told.append(kind)
        timers.append(threading.Timer(moment_s, tell, [rank, kind]))
        moment_s += dice.choice([0.0, dice.random() * 0.01, dice.random() * 0.1])
    barrier = threading.Barrier(count) if dice.random() < 0.7 else None
    seeds = [dice.random() for _ in range(count)]
    for timer in timers:
        timer.start()
    found = managers.all(lambda manager, rank: train(manager, rank, Random(seeds[rank]), barrier))
    for timer in timers:
        timer.join(60)
    return told, found


@pytest.mark.parametrize("number", range(70 * EXAMPLES if THOROUGH else 2))
def test_ranks_that_are_told_to_end_save_one_step_and_resume_there(number):
    seed = SEED + 1000 * number
    dice, store, before = Random(seed), created(), 0
    count = dice.choice([2, 3, 4])
    for attempt in range(3):
        told, found = run_attempt(store, dice, count)
        context = f"seed {seed}, attempt {attempt}: {told} {found}"
        assert len(set(map(str, found))) == 1, context
        assert isinstance(found[0], tuple), context
        last, status, start = found[0]
        assert start == before < last, context
        assert status in {128 + (kind or signal.SIGTERM) for kind in told}, context
        with opened(store) as repository:
            made = [one.step for one in repository.snapshots("a") if one.step > before]
            assert made == sorted(set(made)), context
            assert made[-1] == last, context
            assert repository.check("restore").ok
            assert list(store.list("sessions/")) == [], context
        before = last
        tally("jobs of ranks on threads told to end")
