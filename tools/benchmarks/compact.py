"""`tools/bench compact`: what a training run keeps under a policy, before and after compact, beside two bounds.

The bench's GPT is saved at each of 100 steps into two repositories, under KeepLast(3) and KeepLast(3) + KeepEvery(50);
a Llama, trained by SGD with momentum, at each of 60 steps under KeepEvery(10). Then there are forks, whose origin is
forgotten: four of the GPT's step 20, saved at each of 2 and of 8 steps under KeepLast(3); eight of the bf16 weights of
a Llama, which go on at 2e-5, and eight of word vectors, saved at each of 2 steps. Forget and gc run as the manager runs
them; then compact and gc run. The bounds are really encoded, from the states that the first repository restores: all
three snapshots full, and one full with each of the others a delta to the one before.
At the end it measures compact's survey of a million chunks over a thousand snapshots (scale.py), as a dry run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("SNAPSTORE_THREADS", "2")

import caller
import torch

from benchmarks.data import gpt_fork, gpt_series, llama_forks, llama_series, tensors_of, word_forks
from benchmarks.page import ROOT, Row, publish, recorded, row
from benchmarks.scale import surveyed
from snapstore import KeepEvery, KeepLast, Repository, SaveOptions, SnapshotManager
from snapstore.retention import Policy
from snapstore.state.values.arrays import as_bytes

GOAL = 1.05
FORK_RATES = (1e-4, 3e-4, 1e-3, 3e-3)


def encoded(folder: Path, states: Sequence[Any], restore_cost: float) -> int:
    """Save states one after the other; return the stored bytes. All are full if `restore_cost` is 1, else one is."""
    with Repository.create(folder, options=SaveOptions(restore_cost=restore_cost)) as repository:
        for step, state in enumerate(states):
            repository.save(state, run="r", step=step)
        return repository.stats().stored_bytes


def same(a: Any, b: Any) -> bool:
    """Return whether all tensors are equal to the bit."""
    mine, theirs = ([(name, as_bytes(tensor).tobytes()) for name, tensor in tensors_of(tree)] for tree in (a, b))
    return mine == theirs


def compacted(repository: Repository, size: int, name: str) -> list[Row]:
    """Compact and collect; return the figures of before and after."""
    repository.gc()
    before, count = repository.stats(), len(repository.snapshots())
    states = [repository.restore(s.ref) for s in repository.snapshots()]
    began = time.perf_counter()
    report = repository.compact()
    seconds = time.perf_counter() - began
    assert report.failed == [], report.failed
    repository.gc()
    after = repository.stats()
    assert after.stored_bytes == report.bytes_after, (after.stored_bytes, report.bytes_after)
    assert all(same(repository.restore(s.ref), state) for s, state in zip(repository.snapshots(), states, strict=True))
    return [
        row(f"{name}: retained before, {count} snapshots", before.stored_bytes / size, "x the state"),
        row(f"{name}: of it needed only as a base", before.base_only_bytes / before.stored_bytes, "share"),
        row(f"{name}: retained after compact and gc", after.stored_bytes / size, "x the state"),
        row(f"{name}: bytes after compact and gc", after.stored_bytes / 1e6, "MB"),
        row(f"{name}: of that needed only as a base", after.base_only_bytes / after.stored_bytes, "share"),
        row(f"{name}: bytes that compact wrote / bytes freed", report.bytes_written / max(1, report.freed_bytes), "x"),
        row(f"{name}: compact took", seconds, "s"),
    ]  # fmt: skip


def train(folder: Path, series: Iterable[tuple[int, Any]], keep: list[Policy]) -> None:
    """Save every step of a training run."""
    with SnapshotManager(folder, run="gpt", keep=keep) as manager:
        for step, state in series:
            manager.save(step, state)
            print(f"  {folder.name}: step {step}", flush=True)


def train_forks(folder: Path, origin: int, saves: int) -> None:
    """Save every step of a training run and of its forks; then forget the snapshots of the run."""
    train(folder, gpt_series(origin, 1), [KeepLast(3)])
    with Repository.open(folder) as repository:
        for number, rate in enumerate(FORK_RATES):
            parent, steps = f"gpt@{origin}", range(origin + 1, origin + saves + 1)
            with SnapshotManager(repository, run=f"fork{number}", parent=parent, keep=[KeepLast(3)]) as manager:
                for step, state in gpt_fork(repository, parent, rate, steps):
                    manager.save(step, state)
                    print(f"  {folder.name}: fork {number}, step {step}", flush=True)
        repository.forget_snapshots([s.ref for s in repository.snapshots("gpt")], force=True)


def save_forks(folder: Path, series: Iterable[tuple[int, int, Any]]) -> None:
    """Save a step of a training run, fork -1, and every step of its forks; then forget the snapshot of the run."""
    with Repository.create(folder) as repository:
        origin = None
        for number, step, state in series:
            run = f"fork{number}" if number >= 0 else "origin"
            is_first = number >= 0 and run not in repository.view().runs()
            saved = repository.save(state, run=run, step=step, parent=origin if is_first else None)
            origin = origin or saved.ref
            print(f"  {folder.name}: {saved.ref}", flush=True)
        assert origin is not None
        repository.forget_snapshots([origin], force=True)


def trainings(quick: bool) -> dict[str, Callable[[Path], None]]:
    """Return the runs by name, as functions that train into a folder."""
    snapshots, every, tenth, origin, saves = (12, 5, 4, 3, 3) if quick else (100, 50, 10, 20, 8)

    def last(folder: Path) -> None:
        train(folder, gpt_series(snapshots, 1), [KeepLast(3)])

    def some(folder: Path) -> None:
        train(folder, gpt_series(snapshots, 1), [KeepLast(3), KeepEvery(steps=every)])

    def tenths(folder: Path) -> None:
        train(folder, llama_series(6 * tenth, 1), [KeepEvery(steps=tenth)])

    return {
        "KeepLast(3)": last,
        f"KeepLast(3) + KeepEvery({every})": some,
        f"Llama, KeepEvery({tenth})": tenths,
        "forks of 2 saves": lambda folder: train_forks(folder, origin, 2),
        f"forks of {saves} saves": lambda folder: train_forks(folder, origin, saves),
        "forks in bf16": lambda folder: save_forks(folder, llama_forks(origin, 8, 2)),
        "forks of word vectors": lambda folder: save_forks(folder, word_forks(15 * origin, 8, 2)),
    }


def figures(folder: Path, runs: Path, trained: Mapping[str, Callable[[Path], None]]) -> list[Row]:
    """Train the runs that are not there yet, by the functions `trained`, and compact copies of them."""
    rows: list[Row] = []
    for number, (name, training) in enumerate(trained.items()):
        if not (runs / str(number)).exists():
            training(folder / "run")
            shutil.move(folder / "run", runs / str(number))
        shutil.copytree(runs / str(number), folder / str(number))
        with Repository.open(folder / str(number)) as repository:
            size = repository.snapshots()[-1].logical_bytes
            rows += compacted(repository, size, name)
            if number:
                continue
            stored = repository.stats().stored_bytes
            states = [repository.restore(s.ref) for s in repository.snapshots()]
        full, delta = encoded(folder / "full", states, 1), encoded(folder / "delta", states, 100)
        ratio = stored / min(full, delta)
        rows += [
            row("three full encodings", full / size, "x the state"),
            row("one full and two deltas", delta / size, "x the state"),
            row(f"{name}: retained / the smaller of the two", ratio, "x", f"<= {GOAL}", ratio <= GOAL),
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what compact frees.")
    parser.add_argument("--quick", action="store_true", help="fewer snapshots; nothing is written to docs/")
    parser.add_argument("--survey", action="store_true", help="measure the survey only; other figures stay as they are")
    parser.add_argument("--runs", type=caller.path, help="a folder that keeps the trained repositories, or has them")
    args = parser.parse_args()
    torch.set_num_threads(2)
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))
    began = time.time()
    try:
        if args.survey:
            rows = [one for one in recorded("compact") if not one["name"].startswith("survey")]
        else:
            runs = args.runs or folder / "runs"
            runs.mkdir(parents=True, exist_ok=True)
            rows = figures(folder, runs, trainings(args.quick))
        with get_context("spawn").Pool(1) as small:  # a process without torch
            rows += small.apply(surveyed, (folder / "survey", 100 if args.quick else 1000))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish("compact", rows, began, ("torch", "numpy", "zstandard"), quick=args.quick)
