"""`tools/bench copies`: the cost of a copy that rebuilds each chunk it sends, beside one that does not, and the saves;
and the cost of every verb that encodes or decodes, by the extension in C and without it.

A GPT is trained on the CPU on Python's sources (gpu_train.py). Its state in fp32 (weights and the two moments) is saved
every few steps, as a run. Then the run is copied to new repositories in memory: in one pass, as `snapstore copy --run`,
and one snapshot after the other, each by a copy of its own, as a mirror does. The figures are CPU seconds of the
process, the least of a few rounds; each is printed beside that of the saves. Nothing is written to docs/.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks import gpu_train
from benchmarks.bytes import SIZE
from snapstore import Repository
from snapstore.convert import import_checkpoints
from snapstore.storage.memory import MemoryStore

SNAPSHOTS, GAP_STEPS, ROUNDS = 8, 5, 3


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds that a call takes, in all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def saved(states: list[gpu_train.State]) -> Repository:
    """Save states as the run "r" in a new repository in memory."""
    repository = Repository.create(MemoryStore())
    for step, state in enumerate(states):
        repository.save(state, run="r", step=step)
    return repository


def copied(source: Repository, *, verify: bool, one_by_one: bool) -> None:
    """Copy the run to a new repository in memory."""
    with Repository.create(MemoryStore(), like=source) as target:
        for refs in [[s.ref] for s in source.snapshots()] if one_by_one else [None]:
            result = source.copy(refs, to=target, verify=verify)
            if result.failed:
                raise SystemExit(f"bench: {result.failed}")


def verbs(states: list[gpu_train.State], engine: str) -> dict[str, float]:
    """Return the CPU seconds of each verb by an engine, "native" or "numpy"."""
    os.environ["SNAPSTORE_ENGINE"] = engine
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, saved(states) as source, Repository.create(MemoryStore()) as target:
        refs, paths = [s.ref for s in source.snapshots()], [f"{folder}/{step}.pt" for step in range(len(states))]
        for path, state in zip(paths, states, strict=True):
            torch.save(state, path)
        work: dict[str, Callable[[], object]] = {
            "save": lambda: saved(states).close(),
            "restore": lambda: [source.restore(ref) for ref in refs],
            "check --read-data": lambda: source.check("data"),
            "check --restore": lambda: source.check("restore"),
            "copy, verified": lambda: copied(source, verify=True, one_by_one=False),
            "diff": lambda: source.diff(refs[0], refs[-1]),
            "import": lambda: list(import_checkpoints(target, paths, run="i")),
            "forget, compact": lambda: (source.forget_snapshots(refs[:-1:2]), source.compact()),
        }
        for name, call in work.items():
            found[name] = cpu_s(call)
    del os.environ["SNAPSTORE_ENGINE"]
    return found


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny state, one round")
    quick = parser.parse_args().quick
    trainer = gpu_train.Trainer(gpu_train.TINY if quick else SIZE, torch.device("cpu"), SNAPSHOTS * GAP_STEPS)
    states, training_s = [], 0.0
    for _ in range(SNAPSHOTS):
        training_s += cpu_s(lambda: trainer.train(GAP_STEPS))
        states.append(gpu_train.clone(trainer.state()))
    rounds = range(1 if quick else ROUNDS)
    saves_s = min(cpu_s(lambda: saved(states).close()) for _ in rounds)
    sizes = [gpu_train.nbytes(state) / 1e6 for state in states]
    with saved(states) as source:
        stored = sum(s.stored_bytes for s in source.snapshots()) / 1e6
        print(f"{len(states)} snapshots of {sizes[0]:.1f} MB, {stored:.1f} MB stored, every {GAP_STEPS} steps")
        print(f"{'':32}{'CPU s':>8}{'/ saves':>9}{'/ training':>12}")
        rows = {"training": training_s, "saves": saves_s}
        for what, one_by_one in (("one pass", False), ("one by one", True)):
            for how, verify in (("not verified", False), ("verified", True)):
                work = lambda v=verify, o=one_by_one: copied(source, verify=v, one_by_one=o)  # noqa: E731
                rows[f"copy, {what}, {how}"] = min(cpu_s(work) for _ in rounds)
        rows["check --restore"] = min(cpu_s(lambda: source.check("restore")) for _ in rounds)
    for name, spent_s in rows.items():
        print(f"{name:32}{spent_s:8.2f}{spent_s / saves_s:9.2f}{spent_s / training_s:12.3f}")
    by_engine = [[verbs(states, engine) for _ in rounds] for engine in ("numpy", "native")]
    print(f"{'CPU s by verb':32}{'NumPy':>8}{'C':>8}{'NumPy / C':>12}")
    for name in by_engine[0][0]:
        numpy_s, native_s = (min(one[name] for one in found) for found in by_engine)
        print(f"{name:32}{numpy_s:8.2f}{native_s:8.2f}{numpy_s / native_s:12.2f}")
