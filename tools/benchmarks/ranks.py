"""`tools/bench ranks`: saves and restores of a whole job, beside torch.distributed.checkpoint in the same run.

Worlds of processes (`ranks_worker.py`) train a Llama under FSDP2, with NCCL where there are as many GPUs as ranks, with
gloo on the CPU otherwise. Absolute times count only on GPUs. Counts of bytes and chunks hold everywhere. So do the
figures of jobs on paper, which are planned and not run (`ranks_plan.py`), and of the commit of one (`ranks_commit.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import caller
import torch

from benchmarks.page import ROOT, Row, figures, place, row
from benchmarks.ranks_commit import measure
from benchmarks.ranks_plan import Job, amplification, new_chunks, objects
from benchmarks.ranks_worker import Llama
from snapstore import Repository

#: hidden size, inner size, layers: 543 and some 3,700 tensors with AdamW's moments; on CPUs small ones.
SHAPES = {"few": (2048, 5632, 20), "many": (512, 1408, 138)}
SMALL = {"few": (256, 704, 4), "many": (64, 176, 40)}
LIMIT_S = 300
#: A share of a quarter of the small model's largest matrices has 11 chunks then; one of an 8B on 16 ranks has 14.
RESHARDED_CHUNK_BYTES = 16 * 1024
SECTIONS = "save,restore,reshard,reads,train,commit,wire,scaling,job,plan"


def world(ranks: int, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a task on `ranks` ranks; return what rank 0 writes."""
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
    modes = {name: one for name, one in saves["few"]["dcp"].items() if name != "save" and "error" not in one}
    best = min((warm(one["stalls_s"]) for one in modes.values()), default=float("nan"))
    stall = warm(saves["few"]["together"]["stalls_s"]) / best
    value = max(one["stall_over_goal"] for one in saves.values())
    durable = warm(saves["few"]["dcp"]["save"]["durable_s"]) / warm(saves["few"]["together"]["durable_s"])
    calm = [(one["tensors"], ratio) for one in saves.values() if (ratio := one["undisturbed"].get("stall_over_goal"))]
    return [
        row("stall_over_goal: the worst of two states", value, "x", "<= 1", value <= 1),
        *(
            row(f"stall_over_goal of saves on undisturbed cores, {tensors:,} tensors", one, "x")
            for tensors, one in calm
        ),
        row("stall_over_dcp: stall / dcp.async_save's best mode", stall, "x", "<= 0.025", stall <= 0.025),
        *(one for save in saves.values() for one in share_rows(save)),
        row("durable: dcp.save / snapstore", durable, "x"),
    ]


def share_rows(save: dict[str, Any]) -> list[Row]:
    """Return durable times over those of the slowest own share, of the same saves."""
    rows = []
    for name, when in {"own_share": "at the same time", "own_share_in_turn": "one after the other"}.items():
        own = save[name]["durable_s"]
        ratio = warm(save["together"]["durable_s"][: len(own)]) / warm(own)
        title = f"durable_over_own_share, {save['tensors']:,} tensors: over the slowest rank's own share, saved {when}"
        rows.append(row(title, ratio, "x", "<= 1.1", ratio <= 1.1))
    return rows


def restore_rows(ranks: int, shape: Any, folder: Path, details: dict[str, Any]) -> list[Row]:
    """Restores by as many ranks, by half of them, by one and by twice as many, beside dcp.load of the same state."""
    half, rows = max(ranks // 2, 1), []
    for saved, into in dict.fromkeys(((ranks, ranks), (ranks, half), (ranks, 1), (half, ranks))):
        at = folder / f"of-{saved}"
        if not at.exists():
            at.mkdir()
            world(saved, {"do": "reference", "shape": shape}, at)
        found = details[f"restore {saved} -> {into}"] = world(into, {"do": "restore", "shape": shape}, at)
        assert found["equal"], found
        ratio = statistics.median(found["seconds"]["dcp"]) / statistics.median(found["seconds"]["snapstore"])
        rows.append(row(f"restore_over_dcp, {saved} -> {into}", ratio, "x as fast", ">= 5", ratio >= 5))
    return rows


def reshard_rows(shape: Any, folder: Path, details: dict[str, Any]) -> list[Row]:
    """Chunks stored again when the same values are saved by another number of ranks.

    The model is small, and so are its chunks: with chunks of 1 MiB a rank's share of a tensor would be one chunk.
    """
    rows = []
    paper = {f"8B, {a} -> {b}": new_chunks(Job("8B", a), Job("8B", b)) for a, b in ((8, 4), (8, 1), (8, 6))}
    details["reshard_new_chunks on paper, chunks of 1 MiB"] = paper
    for count, goal in ((2, 0.1), (1, 0.1), (3, 0.14)):
        at = folder / f"to-{count}"
        at.mkdir()
        Repository.create(at / "repository", chunk_bytes=RESHARDED_CHUNK_BYTES).close()
        world(4, {"do": "reference", "shape": shape}, at)
        world(count, {"do": "again", "shape": shape}, at)
        with Repository.open(at / "repository") as repository:
            last = repository.snapshots()[-1]
        share = last.new_chunks / last.chunks
        details[f"reshard 4 -> {count}"] = {
            "chunks": last.chunks,
            "new": last.new_chunks,
            "chunk_bytes": RESHARDED_CHUNK_BYTES,
        }
        rows.append(row(f"reshard_new_chunks, 4 -> {count}", share, "of the chunks", f"<= {goal}", share <= goal))
    return rows


def train_rows(ranks: int, shape: Any, folder: Path, details: dict[str, Any]) -> list[Row]:
    """Training steps beside saves: on a busy GPU, and in a loop whose pace is set by Python, which launches kernels."""
    rows = []
    for name, busy in (("train", True), ("train, 64 tokens a step", False)):
        found = details[name] = world(ranks, {"do": "train", "shape": shape, "busy": busy}, folder)
        ratio = found["saving"] / found["alone"]
        title = "train_step_ratio: 150 steps with a snapshot every 50"
        rows.append(
            row(title, ratio, "x", "<= 1.03", ratio <= 1.03) if busy else row(f"{title}, 64 tokens a step", ratio, "x")
        )
    return rows


def plan_rows(details: dict[str, Any], *, quick: bool) -> list[Row]:
    """Jobs on paper: manifests and bytes that a rank reads in another mesh, and the objects of a job of 405B."""
    small, large = ("8B", 64), ("8B", 64) if quick else ("405B", 1024)
    middle = [] if quick else [(Job("70B", 256), Job("70B", 192)), (Job("70B", 256), Job("70B", 32, 8))]
    pairs = [(Job(*small), Job("8B", 48)), (Job(*small), Job("8B", 8, 8)), (Job("8B", 8, 8), Job(*small)), *middle]
    if not quick:
        big = Job(*large)
        pairs += [(big, Job("405B", 768)), (big, Job("405B", 128, 8)), (Job("405B", 128, 8), big)]
    found = details["readers on paper"] = [
        amplification(saved, into, range(0, into.world, max(into.world // 32, 1) | 1)) for saved, into in pairs
    ]
    job = details["job_405B_1024"] = objects(Job(*large))
    most = max(one["manifests_a_rank"] for one in found)
    listing = job["listing_s"]
    return [
        row("manifests that a rank opens, worst of the jobs on paper", most, f"of {2 * job['ranks']}"),
        row("job_405B_1024: a listing of 100 snapshots, 0.2 s a request", listing, "s", "<= 60", listing <= 60),
    ]


def job_rows(details: dict[str, Any], at: Path, *, quick: bool) -> list[Row]:
    """The commit of 1,024 ranks, whose messages and objects are real; and with a store as slow as S3."""
    job = Job("8B", 64) if quick else Job("405B", 1024)
    slow = [(0.05, 0.0), (0.2, 0.0), (0.05, 10.0), (0.2, 10.0)]
    with Repository.create(at / "repository") as repository:
        found = details["commit_1024_s"] = measure(job, repository, pack_bytes=128 * 1024 * 1024, slow=slow)
    value = statistics.median(found["seconds"])
    rows = [row("commit_1024_s", value, "s", "<= 1.5", value <= 1.5)]
    for one in found["slow"]:
        when = f"within {one['reports_within_s']:.0f} s" if one["reports_within_s"] else "all at once"
        rows.append(row(f"commit_1024_s, {one['request_s']} s a request, reports {when}", one["seconds"], "s"))
    return rows


def commit_rows(ranks: int, shapes: dict[str, Any], folder: Path, details: dict[str, Any]) -> list[Row]:
    """The time of rank 0 from the last report to the record; and what the thread of a save computes for a tensor."""
    for name, shape in shapes.items():
        at = folder / name
        at.mkdir()
        details[f"commit_ms {name}"] = world(ranks, {"do": "commit", "shape": shape}, at)
    few, many = (details[f"commit_ms {name}"] for name in ("few", "many"))
    value, title = 1000 * warm(few["commit_s"]), "commit_ms: from the last report to the record"
    each = 1e6 * warm(many["write_processor_s"]) / many["tensors"]
    return [
        row(f"{title}, {ranks} ranks", value, "ms", "<= 20", value <= 20),
        row(f"{title}, {ranks} ranks, {many['tensors']:,} tensors", 1000 * warm(many["commit_s"]), "ms"),
        row(f"processor time of a save's thread for a tensor, {many['tensors']:,} tensors", each, "us"),
    ]


def wire_rows(ranks: int, shape: Any, folder: Path, details: dict[str, Any]) -> list[Row]:
    """The bytes of keys and values that a rank sends and receives over the job's store for a save, the worst rank."""
    found = details["wire_bytes_per_rank"] = world(ranks, {"do": "wire", "shape": shape}, folder)
    found["how"] = (
        "counted at each rank's client of the TCPStore: keys and values of all its calls; looks: for keys that are not "
        "there yet, at most 20 a second; median of the saves after the first two"
    )
    messages = warm([max(one["messages"]) for one in found["saves"]])
    both = warm([max(a + b for a, b in zip(one["messages"], one["looks"], strict=True)) for one in found["saves"]])
    return [
        row(f"wire_bytes_per_rank of a save, {ranks} ranks", both, "bytes", "<= 2,048", both <= 2048),
        row("wire_bytes_per_rank without looks for what is not there yet", messages, "bytes"),
    ]


def scaling_rows(folder: Path, gpus: int, details: dict[str, Any]) -> list[Row]:
    """The rate of four ranks together over that of one, each with a quarter of the cores; on two GPUs that of two."""
    ranks, cores = 2 if gpus in (2, 3) else 4, os.cpu_count() or 1
    task = {"do": "rate", "bytes_a_rank": (4 << 30) if gpus > 1 else (64 << 20), "threads": max(cores // ranks, 1)}
    found = details[f"scaling_{ranks}_ranks"] = {str(count): world(count, task, folder) for count in (1, ranks)}
    found["cores"] = cores
    value, plain = (
        ranks * warm(found["1"][key]) / warm(found[str(ranks)][key]) for key in ("durable_s", "plain_files_s")
    )
    goal = 0.9 * ranks
    return [
        row(f"scaling_{ranks}_ranks", value, "x", f">= {goal:.1f}", value >= goal),
        row(f"scaling_{ranks}_ranks of plain files: the same bytes and threads", plain, "x"),
    ]


def reads_rows(shape: Any, folder: Path, details: dict[str, Any]) -> list[Row]:
    """Bytes decoded over bytes wanted, measured on another number of ranks, against a simulation of the same model."""
    world(4, {"do": "reference", "shape": shape}, folder)
    with torch.device("meta"):
        model: Any = Llama(*shape)
    shapes = [((name,), tuple(parameter.shape), "") for name, parameter in model.named_parameters()]
    worst = 0.0
    for count in (3, 2, 1):
        found = world(count, {"do": "reads", "shape": shape}, folder)
        saved, into = (Job("", ranks, shapes=shapes) for ranks in (4, count))
        expected = amplification(saved, into)["decoded_over_wanted"]
        got = sum(found["decoded"]) / sum(found["wanted"])
        details[f"reshard_read 4 -> {count}"] = found | {"measured": got, "simulated": expected}
        worst = max(worst, abs(got / expected - 1))
    return [row("reshard_read: measured / simulated, the largest difference", 100 * worst, "%", "<= 2", worst <= 0.02)]


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description="Measure saves and restores of several ranks.")
    parser.add_argument("--ranks", type=int, help="default: the number of GPUs, or 4")
    parser.add_argument("--quick", action="store_true", help="small states; nothing is written to docs/")
    parser.add_argument("--only", default=SECTIONS, help=f"comma-separated sections (default: {SECTIONS})")
    parser.add_argument(
        "--folder", type=caller.path, help="where repositories are written (default: a temporary folder)"
    )
    parser.add_argument(
        "--out", type=caller.path, help="put figures and details into this JSON, and nothing into docs/"
    )
    parser.add_argument("--publish", type=caller.path, help="measure nothing: put what --out has written into docs/")
    args = parser.parse_args()
    if args.publish:
        publish(json.loads(args.publish.read_text()))
        return
    gpus = torch.cuda.device_count()
    ranks = args.ranks or gpus or 4
    shapes = SHAPES if gpus >= ranks and not args.quick else SMALL
    began, details = time.time(), dict[str, Any]()
    rows: list[Row] = []
    sections: dict[str, Callable[[Path], list[Row]]] = {
        "save": lambda at: save_rows(ranks, shapes, at, details),
        "restore": lambda at: restore_rows(ranks, shapes["few"], at, details),
        "reshard": lambda at: reshard_rows(SMALL["few"], at, details),
        "train": lambda at: train_rows(ranks, shapes["few"], at, details),
        "reads": lambda at: reads_rows(SMALL["few"], at, details),
        "commit": lambda at: commit_rows(4, SMALL | {"many": (64, 176, 138)}, at, details),
        "wire": lambda at: wire_rows(4, SMALL["few"], at, details),
        "scaling": lambda at: scaling_rows(at, gpus, details),
        "job": lambda at: job_rows(details, at, quick=args.quick),
        "plan": lambda _: plan_rows(details, quick=args.quick),
    }
    for name in args.only.split(","):
        folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=args.folder or ROOT))
        try:
            rows += sections[name](folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"-- {name}: {time.time() - began:.0f} s", flush=True)
        if args.out:
            earlier = json.loads(args.out.read_text()) if args.out.exists() else {}
            args.out.write_text(json.dumps(merged(earlier, measured(rows, details, gpus)), indent=1) + "\n")
    print(figures(rows))
    if not args.quick and not args.out:
        publish_beside(measured(rows, details, gpus))


def measured(rows: list[Row], details: dict[str, Any], gpus: int) -> dict[str, Any]:
    """Figures and details, each with the machine, the date and the command."""
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU"
    here = {
        "machine": f"{os.cpu_count()} cores, {device}; torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["tools/bench", "ranks", *sys.argv[1:]]),
    }
    return {
        "figures": [one | here for one in rows],
        "details": {name: found if isinstance(found, list) else found | here for name, found in details.items()},
    }


def merged(record: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return a record in which new figures and details replace the ones of the same names."""
    new = {one["name"]: one for one in found["figures"]}
    rows = [new.pop(one["name"], one) for one in record.get("figures", [])] + list(new.values())
    return {"figures": rows, "details": record.get("details", {}) | found["details"]}


def publish_beside(found: dict[str, Any]) -> None:
    """Publish, unless rows of a CPU would replace rows of GPUs, or the reverse: then only --publish does so."""
    record = json.loads((ROOT / "docs" / "benchmarks" / "ranks.json").read_text())
    on_cpu = {one["name"]: "no GPU" in one["machine"] for one in found["figures"]}
    others = [
        one["name"] for one in record["figures"] if on_cpu.get(one["name"]) not in (None, "no GPU" in one["machine"])
    ]
    if others:
        kept = Path(tempfile.gettempdir()) / "snapstore-bench-ranks.json"
        kept.write_text(json.dumps(found, indent=1) + "\n")
        sys.exit(
            f"docs/benchmarks/ranks.json: not changed: these rows are of another kind of device: {'; '.join(others)}\n"
            f"to replace them: tools/bench ranks --publish {kept}"
        )
    publish(found)


def publish(found: dict[str, Any]) -> None:
    """Put figures and details into the record of docs/, beside those of other machines, and write the page's table."""
    path = ROOT / "docs" / "benchmarks" / "ranks.json"
    record = merged(json.loads(path.read_text()), found)
    path.write_text(json.dumps(record, indent=1) + "\n")
    place("ranks", figures(record["figures"]))
