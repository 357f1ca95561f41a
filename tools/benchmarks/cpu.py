"""`tools/bench cpu`: every figure of the CPU engine, side by side with its peers, on real training runs.

Peers and snapstore save the same live state, in rotating order, with as many threads, to the same disk. Figures are
ratios of medians, since machines are noisy. Every save ends durable: snapstore's own fsyncs are in its time, and the
peers' files are fsynced in theirs. The peers' times without fsync are reported too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("SNAPSTORE_THREADS", "2")

import numpy as np
import torch

import snapstore
from benchmarks import page
from benchmarks.data import SERIES, logical_bytes, plain, tensors_of
from benchmarks.engine_stages import engine_stages
from benchmarks.page import Figure
from benchmarks.peers import THREADS, Peer, peers, stored_bytes
from benchmarks.plain_state import plain_state
from benchmarks.small_tensors import small_tensors
from snapstore import KeepEvery, KeepLast, Repository, SnapshotManager
from snapstore.format.blobs import blob, codecs, pack, planes
from snapstore.format.records import Snapshot

ROOT = Path(__file__).parents[2]
MiB = 1024 * 1024
SECTIONS = ("compare", "engine", "retained", "memory", "plain", "small")


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the disk that holds the repository of this code, so that fsync is real."""
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    os.sync()  # so that no call waits for the write-back of another
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def durable(peer: Peer, tree: Any, path: Path, quick: dict[str, list[float]]) -> None:
    """Save by a peer, then fsync what it wrote; append the time without fsync to `quick`."""
    began = time.perf_counter()
    peer.save(tree, path)
    quick.setdefault(peer.name, []).append(time.perf_counter() - began)
    for file in [path, *path.rglob("*")] if path.is_dir() else [path, path.parent]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# -- compare: stored bytes, save and restore throughput


def compare(name: str, snapshots: int, every: int) -> tuple[list[Figure], list[dict[str, Any]]]:
    """Save a series by snapstore and every peer; then restore some of snapstore's snapshots, and the peers' first."""
    with scratch() as folder:
        saves: dict[str, list[float]] = {}
        quick_saves: dict[str, list[float]] = {}
        stored: dict[str, list[int]] = {}
        everyone: list[Peer] = []
        bound = Bound()
        history: list[Snapshot] = []
        manager = SnapshotManager(folder / "snapstore", run=name, async_save=False)
        for number, (step, state) in enumerate(SERIES[name](snapshots, every)):
            tree = plain(state)
            everyone = everyone or peers(tree)
            size = logical_bytes(tree)

            def ours(step: int = step, state: Any = state) -> None:
                saved = manager.save(step, state).result()
                assert saved is not None
                history.append(saved)

            turns: list[tuple[str, Callable[[], Any]]] = [("snapstore", ours)]
            for peer in everyone:
                turns.append((peer.name, partial(durable, peer, tree, folder / f"{peer.name}-{number}", quick_saves)))
            shift = number % len(turns)
            for who, call in turns[shift:] + turns[:shift]:
                saves.setdefault(who, []).append(timed(call))
                written = history[-1].stored_bytes if who == "snapstore" else stored_bytes(folder / f"{who}-{number}")
                stored.setdefault(who, []).append(written)
            bound.add(tree)
            print(
                f"  {name} step {step}: " + ", ".join(f"{w} {b[-1] / size:.3f}" for w, b in stored.items()), flush=True
            )
        loads: dict[str, list[float]] = {}
        for _ in range(3):
            for peer in everyone:
                loads.setdefault(peer.name, []).append(timed(partial(peer.load, folder / f"{peer.name}-0")))
            for number in sorted({0, 1, snapshots // 2, snapshots - 1}):
                snapshot = history[number]
                key = f"snapstore depth {snapshot.depth}"
                loads.setdefault(key, []).append(timed(partial(manager.restore, snapshot.step)))
        entropy = sum(planes_entropy(manager.repository))
        manager.close()
        return _figures(name, size, saves, quick_saves, stored, loads, history, entropy, bound)


def _figures(
    name: str, size: int, saves: dict[str, list[float]], quick_saves: dict[str, list[float]],
    stored: dict[str, list[int]], loads: dict[str, list[float]], history: list[Snapshot], entropy: float, bound: Bound,
) -> tuple[list[Figure], list[dict[str, Any]]]:  # fmt: skip
    median = {who: statistics.median(times) for who, times in saves.items()}
    rows = []
    for who, seconds in median.items():
        load = statistics.median(loads[who if who != "snapstore" else "snapstore depth 0"])
        rows.append({
            "series": name, "who": who, "ratio": round(size * len(stored[who]) / sum(stored[who]), 4),
            "stored_MB": round(sum(stored[who]) / len(stored[who]) / 1e6, 1),
            "save_MBps": round(size / seconds / 1e6), "restore_MBps": round(size / load / 1e6),
        })  # fmt: skip
    ours = sum(stored["snapstore"])
    theirs = [b for who, b in stored.items() if who != "snapstore"]
    best = min(map(sum, theirs))
    fewer = sum(mine < min(b[i] for b in theirs) for i, mine in enumerate(stored["snapstore"]))
    first = stored["snapstore"][0] / min(b[0] for b in theirs)
    quick = statistics.median(quick_saves["torch.save + zstd -3"]) / median["snapstore"]
    flat = statistics.median(loads["snapstore depth 0"])
    restore = statistics.median(loads["torch.save + zstd -3"]) / flat
    figures = [
        Figure(f"{name}: stored bytes / best peer's, over the series", ours / best, "x", "< 1", ours < best),
        Figure(f"{name}: snapshots smaller than every peer's", fewer, f"of {len(history)}", "all",
               fewer == len(history)),
        Figure(f"{name}: first snapshot (no base) / best peer's", first, "x"),
        Figure(f"{name}: stored bytes / order-0 entropy of the planes stored", ours / entropy, "x", "<= 1.02",
               ours <= 1.02 * entropy),
        Figure(f"{name}: stored bytes / bound that may delta everywhere", ours / bound.bytes, "x"),
        *_beside(name, "save throughput", median["snapstore"], median,
                 {"torch.save": 1.2, "torch.save + zstd -3": 2.2, "ZipNN": 2.0}),
        Figure(f"{name}: the same, where the peer does without fsync", quick, "x"),
        Figure(f"{name}: restore throughput at depth 0 / zstd + torch.load", restore, "x", ">= 1.5", restore >= 1.5),
        *_beside(name, "restore throughput at depth 0", flat,
                 {who: statistics.median(times) for who, times in loads.items()}, {"torch.save": 0.4, "ZipNN": 1.0}),
    ]  # fmt: skip
    for key, times in loads.items():
        if key.startswith("snapstore depth") and (depth := int(key.split()[-1])):
            ratio = statistics.median(times) / flat
            figures.append(
                Figure(f"{name}: restore time at depth {depth} / at depth 0", ratio, "x", f"<= {0.9 * depth + 1:.1f}",
                       ratio <= 0.9 * depth + 1)
            )  # fmt: skip
    figures.append(Figure(f"{name}: stall of a synchronous save (median)", median["snapstore"], "s"))
    return figures, rows


def _beside(name: str, what: str, seconds: float, peers: dict[str, float], goals: dict[str, float]) -> list[Figure]:
    """Return how often as fast as each of some peers snapstore is, both durable."""
    found = []
    for who, goal in goals.items():
        if who in peers:
            ratio = peers[who] / seconds
            found.append(Figure(f"{name}: {what} / {who}'s", ratio, "x", f">= {goal}", ratio >= goal))
    return found


def planes_entropy(repository: Repository) -> Iterator[float]:
    """Yield the order-0 entropy [bytes] of the planes of every blob, from whole histograms."""
    for info in repository.store.list("packs/"):
        data = memoryview(repository.store.get(info.key))
        for offset in pack.read_listing(repository.store, info.key, info.size_bytes).entries["offset"].tolist():
            header = blob.parse(data[offset:], info.key)
            is_sparse = header.codecs[0] == codecs.SPARSE  # it has no planes: its size counts
            yield (
                float(header.payload_bytes)
                if is_sparse
                else _entropy_bytes(blob.decode_planes(data[offset:], header, info.key))
            )


def _entropy_bytes(split: Any) -> float:
    counts = planes.histograms(split).astype(np.float64)
    share = counts / counts.sum(axis=1, keepdims=True)
    bits = -(counts * np.log2(share, where=share > 0, out=np.zeros_like(share))).sum()
    return float(bits / 8)


class Bound:
    """The bytes of order-0 coding if every chunk may be a delta to the snapshot before, at no cost."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self._last: dict[str, Any] = {}

    def add(self, tree: Any) -> None:
        """One more snapshot."""
        seen = set()
        for name, tensor in tensors_of(tree):
            if not tensor.nbytes or tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
            last = self._last.get(name)
            element = min(8, tensor.element_size())
            for start in range(0, data.size, MiB):
                chunk = data[start : start + MiB]
                full = _entropy_bytes(planes.split(chunk, element))
                if last is not None and last.size == data.size:
                    base = last[start : start + MiB]
                    full = min(full, _entropy_bytes(planes.split(chunk ^ base, element)))
                    full = 0.0 if np.array_equal(chunk, base) else full
                self.bytes += full
            self._last[name] = data


# -- retained bytes


def retained(snapshots: int) -> list[Figure]:
    """Train, save every step, keep the last 3 and every 50th; return how much is left, and why."""
    with scratch() as folder:
        size = 0
        keep = [KeepLast(3), KeepEvery(steps=50)]
        with SnapshotManager(folder / "repo", run="gpt", keep=keep) as manager:
            for step, state in SERIES["gpt"](snapshots, 1):
                size = logical_bytes(plain(state))
                manager.save(step, state)
            manager.wait_until_finished()
            kept = len(manager.all_steps())
            manager.repository.gc()
            stats = manager.repository.stats()
        return [
            Figure(f"retained after {snapshots} snapshots under KeepLast(3) + KeepEvery(50)", stats.stored_bytes / size,
                   f"x the state, for {kept} snapshots"),
            Figure("of it needed only as a base", stats.base_only_bytes / stats.stored_bytes, "share"),
        ]  # fmt: skip


# -- memory


def memory() -> list[Figure]:
    """Peak resident memory beyond the state (save) or beyond the result (restore), each in a process of its own."""
    figures = []
    for mode, states in (("async", 2), ("sync", 1), ("restore", 0)):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.cpu", mode], capture_output=True, text=True, check=True
        )
        extra, size = map(int, done.stdout.split())
        over = (extra - states * size) / MiB
        what = {"async": "asynchronous save, beyond 2x the state", "sync": "synchronous save, beyond 1x the state",
                "restore": "restore, beyond its result"}[mode]  # fmt: skip
        figures.append(Figure(f"peak host memory: {what}", over, "MiB", "<= 256", over <= 256))
    return figures


def memory_child(mode: str) -> None:
    """Print (peak extra bytes, state bytes) of four saves, or of a restore."""
    torch.manual_seed(0)
    state = {"model": {f"w{i}": torch.randn(2048, 2048) * 0.02 for i in range(64)}}
    size = logical_bytes(state)
    with scratch() as folder:
        if mode == "restore":
            with SnapshotManager(folder / "r", run="m", async_save=False, keep_base=False) as manager:
                for step in range(4):
                    manager.save(step, state)
                    _drift(state)
            with Repository.open(folder / "r") as repository:
                repository.snapshots()
                _reset_peak()
                before = _resident("VmRSS")
                result = repository.restore("m@3")
                print(_resident("VmHWM") - before - logical_bytes(result), size)
            return
        with SnapshotManager(folder / "r", run="m", async_save=mode == "async") as manager:
            _reset_peak()
            before = _resident("VmRSS")
            for step in range(4):
                manager.save(step, state)
                manager.wait_until_finished()
                _drift(state)
            print(_resident("VmHWM") - before, size)


def _drift(state: Any) -> None:
    for tensor in state["model"].values():
        tensor.mul_(1.0001)


def _resident(field: str) -> int:
    """A line of /proc/self/status [bytes]."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def _reset_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator keeps free must not count
    Path("/proc/self/clear_refs").write_text("5")


# -- all of it


def main() -> None:
    """Run the chosen sections."""
    parser = argparse.ArgumentParser(description="Measure snapstore beside its peers.")
    parser.add_argument("--quick", action="store_true", help="fewer snapshots; nothing is written to docs/")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(SECTIONS)}")
    parser.add_argument("--cores", default="", help="whole saves by these numbers of threads: 1,2,4; see cpu_cores.py")
    args = parser.parse_args()
    if args.cores:
        from benchmarks import cpu_cores

        cpu_cores.write(cpu_cores.report([int(count) for count in args.cores.split(",")]))
        return
    chosen = set(filter(None, args.only.split(","))) or set(SECTIONS)
    if unknown := chosen - set(SECTIONS):
        parser.error(f"--only: no section {', '.join(sorted(unknown))}; sections: {', '.join(SECTIONS)}")
    torch.set_num_threads(THREADS)
    figures: list[Figure] = []
    rows: list[dict[str, Any]] = []
    began = time.time()
    if "compare" in chosen:
        for name, snapshots, every in (("gpt", 3 if args.quick else 10, 10), ("minilm", 3 if args.quick else 6, 5)):
            print(f"compare: {name}", flush=True)
            more, table = compare(name, snapshots, every)
            figures += more
            rows += table
    if "engine" in chosen:
        print("engine", flush=True)
        figures += engine_stages()
    if "retained" in chosen:
        print("retained", flush=True)
        figures += retained(10 if args.quick else 100)
    if "memory" in chosen:
        print("memory", flush=True)
        figures += memory()
    if "plain" in chosen:
        print("plain", flush=True)
        with scratch() as folder:
            figures += plain_state(folder)
    if "small" in chosen:
        print("small", flush=True)
        with scratch() as folder:
            figures += small_tensors(folder)
    report = {
        "machine": page.machine(),
        "versions": {"python": platform.python_version()}
        | {n: version(n) for n in ("torch", "numpy", "zstandard", "xxhash", "lmdb", "msgspec")},
        "threads": THREADS,
        "seconds": round(time.time() - began),
        "figures": [asdict(f) for f in figures],
        "peers": rows,
    }
    text = to_markdown(report)
    print(text)
    if not args.quick and not args.only:
        folder = ROOT / "docs" / "benchmarks"
        folder.mkdir(exist_ok=True)
        (folder / "cpu.json").write_text(json.dumps(report, indent=1) + "\n")
        page.place("cpu", text)


def to_markdown(report: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md."""
    text = f"\nsnapstore {snapstore.__version__}, {report['machine']}, {report['threads']} threads, "
    text += ", ".join(f"{k} {v}" for k, v in report["versions"].items()) + "\n"
    text += page.figures(report["figures"])
    columns = ("series", "who", "logical / stored", "stored MB", "save MB/s", "restore MB/s")
    rows = [
        (r["series"], r["who"], f"{r['ratio']:.3f}", r["stored_MB"], r["save_MBps"], r["restore_MBps"])
        for r in report["peers"]
    ]
    return text + (page.table(columns, rows) + "\n" if rows else "")


if __name__ == "__main__":  # one measurement of `memory`, in a process of its own
    torch.set_num_threads(THREADS)
    memory_child(sys.argv[1])
