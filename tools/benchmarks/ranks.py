"""`tools/bench ranks`: saves and restores of a whole job, beside torch.distributed.checkpoint in the same run.

Worlds of processes (`ranks_worker.py`) train a Llama under FSDP2, with NCCL where there are as many GPUs as ranks, with
gloo on the CPU otherwise. Absolute times count only on GPUs. Counts of bytes and chunks hold everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import ROOT, Row, publish, row
from snapstore import Repository

#: hidden size, inner size, layers: 543 and some 3,700 tensors with AdamW's moments; on CPUs small ones.
SHAPES = {"few": (2048, 5632, 20), "many": (512, 1408, 138)}
SMALL = {"few": (256, 704, 4), "many": (64, 176, 40)}
LIMIT_S = 300


def world(ranks: int, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a task on so many ranks; return what rank 0 writes."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    argument = json.dumps(task | {"folder": str(folder), "out": str(out)})
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.ranks_worker", argument],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [error for process, error in zip(processes, errors, strict=True) if process.returncode]
    if failed:
        raise RuntimeError(failed[0][-2000:])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def warm(times: list[float]) -> float:
    """The median of the times after the first two."""
    return statistics.median(times[2:] or times)


def save_rows(ranks: int, shapes: dict[str, Any], folder: Path, details: dict[str, Any]) -> list[Row]:
    """Stalls and durable times, of few large tensors and of many small ones."""
    for name, shape in shapes.items():
        at = folder / name
        at.mkdir()
        details[f"save {name}"] = world(ranks, {"do": "save", "shape": shape, "peers": name == "few"}, at)
        shutil.rmtree(at)
    saves = {name: details[f"save {name}"] for name in shapes}
    worst = max(saves, key=lambda name: saves[name]["stall_over_goal"])
    together, own = (warm(saves["few"][name]["durable_s"]) for name in ("together", "own_share"))
    modes = {name: one for name, one in saves["few"]["dcp"].items() if name != "save" and "error" not in one}
    best = min((warm(one["stalls_s"]) for one in modes.values()), default=float("nan"))
    stall = warm(saves["few"]["together"]["stalls_s"]) / best
    value = saves[worst]["stall_over_goal"]
    return [
        row(f"stall_over_goal: the worst of two states ({worst} tensors)", value, "x", "<= 1", value <= 1),
        row("stall_over_dcp: stall / dcp.async_save's best mode", stall, "x", "<= 0.025", stall <= 0.025),
        row("durable_over_own_share", together / own, "x", "<= 1.1", together / own <= 1.1),
        row("durable: dcp.save / snapstore", warm(saves["few"]["dcp"]["save"]["durable_s"]) / together, "x"),
    ]


def restore_rows(ranks: int, shape: Any, folder: Path, details: dict[str, Any]) -> list[Row]:
    """Restores by as many ranks, by half of them, and by one, beside dcp.load of the same state."""
    world(ranks, {"do": "reference", "shape": shape}, folder)
    rows = []
    for count in dict.fromkeys((ranks, max(ranks // 2, 1), 1)):
        found = details[f"restore {ranks} -> {count}"] = world(count, {"do": "restore", "shape": shape}, folder)
        assert found["equal"], found
        ratio = statistics.median(found["seconds"]["dcp"]) / statistics.median(found["seconds"]["snapstore"])
        rows.append(row(f"restore_over_dcp, {ranks} -> {count}", ratio, "x as fast", ">= 5", ratio >= 5))
    return rows


def reshard_rows(shape: Any, folder: Path, details: dict[str, Any]) -> list[Row]:
    """Chunks stored again when the same values are saved by another number of ranks."""
    rows = []
    for count, goal in ((2, 0.1), (1, 0.1), (3, 0.14)):
        at = folder / f"to-{count}"
        at.mkdir()
        world(4, {"do": "reference", "shape": shape}, at)
        world(count, {"do": "again", "shape": shape}, at)
        with Repository.open(at / "repository") as repository:
            last = repository.snapshots()[-1]
        share = last.new_chunks / last.chunks
        details[f"reshard 4 -> {count}"] = {"chunks": last.chunks, "new": last.new_chunks}
        rows.append(row(f"reshard_new_chunks, 4 -> {count}", share, "of the chunks", f"<= {goal}", share <= goal))
    return rows


def train_rows(ranks: int, shape: Any, folder: Path, details: dict[str, Any]) -> list[Row]:
    """Training steps beside saves."""
    found = details["train"] = world(ranks, {"do": "train", "shape": shape}, folder)
    ratio = found["saving"] / found["alone"]
    return [row("train_step_ratio: 150 steps with a snapshot every 50", ratio, "x", "<= 1.03", ratio <= 1.03)]


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description="Measure saves and restores of several ranks.")
    parser.add_argument("--ranks", type=int, help="default: the number of GPUs, or 4")
    parser.add_argument("--quick", action="store_true", help="small states; nothing is written to docs/")
    parser.add_argument("--only", default="save,restore,reshard,train", help="comma-separated sections")
    parser.add_argument("--folder", type=Path, help="where repositories are written (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="write the measured details there as JSON, and nothing to docs/")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    ranks = args.ranks or gpus or 4
    shapes = SHAPES if gpus >= ranks and not args.quick else SMALL
    began, rows, details = time.time(), [], dict[str, Any]()
    sections = {
        "save": lambda at: save_rows(ranks, shapes, at, details),
        "restore": lambda at: restore_rows(ranks, shapes["few"], at, details),
        "reshard": lambda at: reshard_rows(SMALL["few"], at, details),
        "train": lambda at: train_rows(ranks, shapes["few"], at, details),
    }
    for name in args.only.split(","):
        folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=args.folder or ROOT))
        try:
            rows += sections[name](folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"-- {name}: {time.time() - began:.0f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps({"figures": rows, "details": details}, indent=1) + "\n")
    publish("ranks", rows, began, ("torch", "numpy"), quick=args.quick or args.out is not None)
