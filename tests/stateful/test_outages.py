"""Stores that are away again and again during a run with `on_error="warn"`, of one process and of a job of four ranks.

No step of the training raises or ends; every state is committed, or a newer one has replaced it; the last one is
committed; and a pending save holds no more memory than a save that runs. Stores fail at random operations, on random
ranks; and the folder of a repository is really renamed, or an empty one takes its place, under real processes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from kit import waits
from kit.faults import FaultStore
from kit.processes import environment
from kit.ranks import Managers
from kit.repositories import OPTIONS, created, opened, same
from kit.samples import SEED, THOROUGH, some
from kit.tally import EXAMPLES, tally
from snapstore import PerRank, Repository, SnapshotManager
from snapstore.save import retrying

pytestmark = [pytest.mark.no_cover, pytest.mark.usefixtures("short_pauses")]

OUTAGES = 10 if THOROUGH else 2
#: Steps of an outage, and between two; the length of a step [s].
AWAY, BETWEEN, STEP_S = (1, 12), (0, 6), 0.02


def state(step: int, rank: int, count: int) -> dict[str, Any]:
    values = np.random.default_rng(0).standard_normal(6000).astype(np.float32)
    values[: step % 6000] += step
    return {"w": torch.from_numpy(values), "own": PerRank(rank), "step": step} if count > 1 else {
        "w": torch.from_numpy(values), "step": step}  # fmt: skip


class Job:
    """A training by managers of one or several ranks, each with a store that may fail."""

    def __init__(self, inner: Any, count: int, on_busy: str) -> None:
        self.stores = [FaultStore(inner) for _ in range(count)]
        self.count, self.step, self.raised = count, 0, 0
        self.handles: list[list[Any]] = []
        options: dict[str, Any] = {"on_error": "warn", "on_busy": on_busy}
        if count == 1:
            self.managers: Any = [SnapshotManager(self.stores[0], run="a", options=OPTIONS, **options)]
        else:
            self.managers = Managers(inner, count, stores=self.stores, **options)

    def each(self, call: Any) -> list[Any]:
        return [call(self.managers[0], 0)] if self.count == 1 else self.managers.all(call)

    def train(self, steps: int) -> None:
        """Run some steps; all ranks save between the same two steps."""
        for _ in range(steps):
            found = self.each(lambda m, r: m.save(self.step, state(self.step, r, self.count)))
            self.raised += sum(isinstance(one, Exception) for one in found)
            self.handles.append(found)
            self.step += 1
            time.sleep(STEP_S)

    def held_bytes(self) -> int:
        """Return the bytes of all copies that the managers hold."""
        held = {
            id(buffer): buffer.nbytes
            for manager in self.managers
            for buffers in (manager._staging._base, manager._staging._spare)
            for buffer in list(buffers.values())
        }
        return sum(held.values())


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "RETRY_S", 0.02)
    monkeypatch.setattr(retrying, "RETRY_MAX_S", 0.2)


@pytest.mark.parametrize("number", range(EXAMPLES))
@pytest.mark.parametrize(("count", "on_busy"), some([(1, "wait"), (4, "skip"), (1, "skip"), (4, "wait")], 2))
def test_outages_lose_no_step_and_no_state_that_none_has_replaced(count, on_busy, number):
    chance = random.Random(f"{SEED} {number} {count} {on_busy}")
    inner = created()
    job = Job(inner, count, on_busy)
    for _ in range(3):
        job.train(1)
        job.each(lambda m, _: m.wait_until_finished())
    normal = job.held_bytes()
    for _ in range(OUTAGES):
        away = [store for store in job.stores if chance.random() < 0.5] or [chance.choice(job.stores)]
        for store in away:
            store.at, store.mode = len(store.log) + chance.randrange(12), chance.choice(["outage", "lost-outage"])
        job.train(chance.randint(*AWAY))
        assert job.held_bytes() <= normal
        for store in away:
            store.heal()
        job.train(chance.randint(*BETWEEN))
    job.train(1)
    left_out = job.handles[-1][0].skipped  # by on_busy="skip"
    assert job.each(lambda m, _: m.wait_until_finished()) == [None] * count
    assert job.raised == 0
    committed = []
    for step, of in enumerate(job.handles):
        results = [one.result(60) for one in of]
        assert len({one and one.id for one in results}) == 1, f"step {step}: the ranks do not agree"
        assert all(one.skipped == (result is None) for one, result in zip(of, results, strict=True))
        committed += [step] if results[0] else []
    assert left_out or committed[-1] == job.step - 1
    assert job.each(lambda m, _: m.close()) == [None] * count
    with opened(inner) as repository:
        there = {s.step for s in repository.snapshots("a")}  # a replaced save may have landed as well, unheard
        assert set(committed) <= there <= set(committed) | {i for i, of in enumerate(job.handles) if of[0].skipped}
        assert repository.check("restore").ok
        newest = repository.restore(f"a@{committed[-1]}")
        assert same(newest["w"], state(committed[-1], 0, count)["w"])
    tally("outages", OUTAGES)


def test_a_pending_save_holds_the_memory_of_one_state():
    """All memory of Python and NumPy: not more after many failed attempts and newer states than after the first one."""
    nbytes = 4_000_000
    store = FaultStore(created())
    with SnapshotManager(store, run="a", options=OPTIONS, on_error="warn") as snapshots:
        for step in range(2):
            snapshots.save(step, {"w": torch.full((nbytes // 4,), float(step))}).result()
        store.at, store.mode = len(store.log), "outage"
        tracemalloc.start()
        try:
            sizes = []
            for step in range(2, 12):
                snapshots.save(step, {"w": torch.full((nbytes // 4,), float(step))})
                waits.until(lambda: snapshots._running.is_pausing, 60)
                tried = len(store.log)
                waits.until(lambda n=tried: len(store.log) > n + 2, 60)
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
            store.heal()
        assert max(sizes) - sizes[0] < nbytes / 2


SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
import snapstore
from snapstore.save import retrying

place, rank, count, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
retrying.RETRY_S, retrying.RETRY_MAX_S = 0.02, 0.2
if count > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
handles, raised, step = [], 0, 0
snapshots = snapstore.SnapshotManager(place, run="a", on_error="warn")
while True:
    stop = torch.tensor(float(os.path.exists(f"{folder}/stop")))
    if count > 1:
        dist.all_reduce(stop)
    weights = torch.arange(20000.0) + step
    try:
        handles.append(snapshots.save(step, {"w": weights, "step": step}))
    except snapstore.SnapstoreError as error:
        print(error, file=sys.stderr)
        raised += 1
    if rank == 0:
        open(f"{folder}/step", "w").write(str(step))
    if stop:
        break
    step += 1
    time.sleep(0.02)
snapshots.wait_until_finished()
results = [handle.result() for handle in handles]
snapshots.close()
print(json.dumps({"steps": step + 1, "raised": raised, "committed": [r.step for r in results if r],
                  "replaced": sum(h.skipped for h in handles)}), flush=True)
os._exit(0) if count > 1 else None
"""


@pytest.mark.parametrize("count", some([1, 4], 1))
def test_processes_whose_folder_goes_away(count, tmp_path):
    """It is renamed, so its name is missing, or an empty folder has it, as under an unmounted volume."""
    chance = random.Random(f"{SEED} {count}")
    place, aside = tmp_path / "repository", tmp_path / "aside"
    Repository.create(place).close()
    command = [sys.executable, "-c", SCRIPT, str(place)]
    jobs = [
        subprocess.Popen([*command, str(rank), str(count), str(tmp_path)], stdout=subprocess.PIPE, text=True,
                         env=environment(OMP_NUM_THREADS="1"))
        for rank in range(count)
    ]  # fmt: skip

    def steps(number: int) -> None:
        """Wait until the job has begun some more steps."""

        def now() -> int:
            path = tmp_path / "step"
            return int((path.read_text() if path.exists() else "") or -1)

        first = now()
        waits.until(lambda: now() >= first + number or any(job.poll() is not None for job in jobs), 120)
        assert all(job.poll() is None for job in jobs)

    try:
        steps(3)
        for _ in range(OUTAGES):
            place.rename(aside)
            is_empty = chance.random() < 0.5
            if is_empty:
                place.mkdir()
            steps(chance.randint(2, 20))
            if is_empty:
                assert list(place.iterdir()) == []
                place.rmdir()
            aside.rename(place)
            steps(chance.randint(1, 15))
        (tmp_path / "stop").touch()
        found = [json.loads(job.communicate(timeout=120)[0]) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert all(one == found[0] for one in found)
    assert found[0]["raised"] == 0
    assert found[0]["committed"][-1] == found[0]["steps"] - 1
    assert len(found[0]["committed"]) + found[0]["replaced"] == found[0]["steps"]
    with Repository.open(place) as repository:
        assert {s.step for s in repository.snapshots("a")} >= set(found[0]["committed"])
        assert repository.check("restore").ok
    tally("outages of processes", OUTAGES)
