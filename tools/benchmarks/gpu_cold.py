"""The first save and the first restore of a process, also on a machine that has never compiled the kernels.

Each is timed in a process of its own, by `python -m benchmarks.gpu_cold WORK FOLDER SHAPE`, which prints its figures.
A job that goes on in a new container has neither compiled kernels nor page-locked memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_limits as limits
from benchmarks.gpu_llama import Run, State, stalled_s, tensors
from snapstore import SnapshotManager

dcp: Any = import_module("torch.distributed.checkpoint")
Shape = tuple[int, int, int]


def first_stall(shape: Shape) -> dict[str, float]:
    """Return the stall of the first save, with kernels that were never compiled."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        stalled, durable, constructed = _in_a_process("save", Path(folder), shape, cache)
    return {"first_stall_ms": stalled * 1e3, "durable_s": durable, "manager_s": constructed}


def first_restores(folder: Path, shape: Shape) -> dict[str, list[float]]:
    """Return the seconds of the first three restores of a process, by snapstore and by DCP.

    For snapstore, the first one includes the construction of the manager.
    """
    with tempfile.TemporaryDirectory() as cache:
        _in_a_process("save both", folder, shape, cache)
        dcp_s = _in_a_process("dcp.load", folder, shape, cache)
        compiled_s = _in_a_process("restore", folder, shape, cache)
    with tempfile.TemporaryDirectory() as cache:
        return {
            "never_compiled_s": _in_a_process("restore", folder, shape, cache),
            "compiled_s": compiled_s,
            "dcp_load_s": dcp_s,
        }


def _in_a_process(work: str, folder: Path, shape: Shape, cache: str) -> list[float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_cold", work, str(folder)]
    done = subprocess.run(
        [*command, *map(str, shape)],
        env=os.environ | {"CUPY_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or "staging=host" in done.stderr:  # on a full device the copies go to host memory
        raise RuntimeError(done.stderr[-2000:])
    return [float(number) for number in done.stdout.splitlines()[-1].split()]


def _save(run: Run, folder: Path) -> list[float]:
    """Return the seconds of the first stall, until it is durable, and of making the manager."""
    run.train(2)
    limits.synchronize(run.device)
    began = time.perf_counter()
    snapshots = SnapshotManager(folder, run="bench", staging="device")
    constructed = time.perf_counter() - began
    stall = stalled_s(run.device, snapshots, 0, run.state())
    snapshots.close()
    return [stall, time.perf_counter() - began, constructed]


def _save_both(run: Run, folder: Path) -> list[float]:
    run.train(2)
    state = run.state()
    with SnapshotManager(folder / "repository", run="bench") as snapshots:
        snapshots.save(0, state)
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return [0]


def _restore(run: Run, folder: Path) -> list[float]:
    run.train()
    state, times = run.state(), []
    _zero(run, state)
    began = time.perf_counter()
    with SnapshotManager(folder / "repository", run="bench") as snapshots:
        for _ in range(3):
            snapshots.restore_into(state)
            limits.synchronize(run.device)
            times.append(time.perf_counter() - began)
            _zero(run, state)
            began = time.perf_counter()
    return times


def _dcp_load(run: Run, folder: Path) -> list[float]:
    run.train()
    state, times = run.state(), []
    for _ in range(3):
        _zero(run, state)
        began = time.perf_counter()
        dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
        limits.synchronize(run.device)
        times.append(time.perf_counter() - began)
    return times


def _zero(run: Run, state: State) -> None:
    for tensor in tensors(state):
        tensor.zero_()
    limits.synchronize(run.device)


WORK: dict[str, Callable[[Run, Path], list[float]]] = {
    "save": _save, "save both": _save_both, "restore": _restore, "dcp.load": _dcp_load,
}  # fmt: skip

if __name__ == "__main__":
    name, place, hidden, intermediate, layers = sys.argv[1:]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(*WORK[name](Run((int(hidden), int(intermediate), int(layers)), device), Path(place)))
