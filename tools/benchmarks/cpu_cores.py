"""`tools/bench cpu --cores 1,2,4`: whole saves and restores of the CPU engine by threads, in NumPy and in C.

The state is p, m and v in fp32 of a GPT and of a Llama in training, 10 steps apart, in host memory; on a GPU each has
about 2 GB, on a CPU some MB. Repositories and the peers' files lie in memory (/dev/shm), so that no disk limits them.
Every restore is compared with the state. A time is the least of ROUNDS, each in a new repository. Then a GPT trains on
all cores of the CPU beside saves with 1, half and all threads.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zstandard

from benchmarks import bytes as bench
from benchmarks import gpu_train, page
from snapstore import SaveOptions, SnapshotManager
from snapstore.engine import spans

ROUNDS = 2
ROOT = Path(__file__).parents[2]
SIZES = {
    "gpt": gpu_train.Size(width=1024, layers=12, heads=16, vocabulary=16384, context=256, batch=8),
    "llama": gpu_train.Size(width=1024, layers=12, heads=16, vocabulary=16384, context=256, batch=8),
}
#: The GPT that trains on a CPU beside saves: 353 MB of parameters and optimizer state.
TRAINED = gpu_train.Size(width=512, layers=8, heads=8, vocabulary=8192, context=128, batch=4)
#: Figures by name: (row, the column, its goal).
GOALS = {
    "save_full_GBps": ("full", "save", 5.0),
    "save_delta_GBps": ("delta", "save", 4.0),
    "restore_full_GBps": ("full", "restore", 8.0),
    "restore_link1_GBps": ("delta", "restore", 5.0),
}

Times = dict[str, tuple[float, float]]  # (wall, CPU) [s] of each operation


def states(model: str) -> tuple[gpu_train.State, gpu_train.State]:
    """Train, and return copies in host memory of two states, 10 steps apart."""
    on_gpu = torch.cuda.is_available()
    size = SIZES[model] if on_gpu else bench.SIZE
    trainer = bench.trainer_of(model, size, torch.device("cuda" if on_gpu else "cpu"), 200)
    trainer.train(200 if on_gpu else 20)
    before = _in_host_memory(trainer.state())
    trainer.train(10)
    return before, _in_host_memory(trainer.state())


def _in_host_memory(state: gpu_train.State) -> gpu_train.State:
    return {kind: {name: t.to("cpu", copy=True) for name, t in tensors.items()} for kind, tensors in state.items()}


@contextmanager
def _memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="snapstore-bench-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _timed(times: Times, name: str, call: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    found = time.perf_counter() - wall, time.process_time() - cpu
    times[name] = min(times.get(name, found), found)
    return result


def by_engine(engine: str, threads: int, before: gpu_train.State, after: gpu_train.State) -> Times:
    """Save two states and restore both."""
    os.environ["SNAPSTORE_ENGINE"] = engine
    times: Times = {}
    try:
        for _ in range(ROUNDS):
            with _memory() as folder:
                options = SaveOptions(threads=threads)
                with SnapshotManager(folder / "r", run="r", async_save=False, options=options) as manager:
                    _timed(times, "save full", partial(manager.save, 0, before)).result()
                    _timed(times, "save delta", partial(manager.save, 1, after)).result()
                    for name, step, expected in (("restore full", 0, before), ("restore delta", 1, after)):
                        found = _timed(times, name, partial(manager.restore, step))
                        assert all(torch.equal(found[k][n], t) for k, own in expected.items() for n, t in own.items())
                        del found
    finally:
        del os.environ["SNAPSTORE_ENGINE"]
    return times


def by_peers(threads: int, state: gpu_train.State) -> dict[str, Times]:
    """Save a state and load it by torch alone, and with zstd."""
    torch_save, zstd = Times(), Times()
    for _ in range(ROUNDS):
        with _memory() as folder:
            _timed(torch_save, "save full", partial(torch.save, state, folder / "x.pt"))
            _timed(torch_save, "restore full", partial(torch.load, folder / "x.pt", weights_only=True))
            data = (folder / "x.pt").read_bytes()
            coder, decoder = zstandard.ZstdCompressor(level=1, threads=threads), zstandard.ZstdDecompressor()
            coded = _timed(zstd, "save full", partial(coder.compress, data))
            _timed(zstd, "restore full", partial(decoder.decompress, coded))
            del data, coded
    return {"torch.save": torch_save, "zstd -1, of its bytes": zstd}


def beside_training(counts: Sequence[int], steps: int = 12) -> list[dict[str, Any]]:
    """Train on all cores beside saves one after the other, by threads of the saves; print and return the rows.

    A row has the time of a step beside saves, and the time until a save is durable beside training, both as multiples
    of what they take alone.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    trainer = bench.trainer_of("gpt", TRAINED, torch.device("cpu"), 1000)
    trainer.train(3)
    rows = []
    for threads in sorted(set(counts)):
        with _memory() as folder:
            options = SaveOptions(threads=threads)
            with SnapshotManager(folder / "r", run="r", on_busy="skip", options=options) as manager:
                alone_s: list[float] = []
                for i in range(3):
                    began = time.perf_counter()
                    manager.save(i, trainer.state()).result()
                    alone_s.append(time.perf_counter() - began)
                step_alone_s = _seconds(partial(trainer.train, steps)) / steps
                futures, began = [], time.perf_counter()
                for i in range(steps):
                    trainer.train(1)
                    futures.append(manager.save(10 + i, trainer.state()))
                step_s = (time.perf_counter() - began) / steps
                saved = [found for future in futures if (found := future.result()) is not None]
        durable_s = sum(snapshot.total_s for snapshot in saved) / len(saved)
        rows.append({
            "threads": threads, "steps": steps, "saves": len(saved), "step": round(step_s / step_alone_s, 3),
            "durable": round(durable_s / min(alone_s), 3),
        })  # fmt: skip
        print(f"training beside saves: {rows[-1]}", flush=True)
    return rows


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def report(counts: Sequence[int]) -> dict[str, Any]:
    """Measure, print the table, and return the record."""
    rows: list[dict[str, Any]] = []
    for model in SIZES:
        before, after = states(model)
        size = gpu_train.nbytes(after)
        for threads in counts:
            torch.set_num_threads(threads)
            names = ("numpy", "native") if spans.extension() is not None else ("numpy",)
            found = {f"snapstore, {name}": by_engine(name, threads, before, after) for name in names}
            for who, times in {**found, **by_peers(threads, after)}.items():
                row: dict[str, Any] = {"model": model, "bytes": size, "threads": threads, "who": who}
                for name, (wall, cpu) in times.items():
                    row[name] = {"GBps": round(size / wall / 1e9, 3), "cpu_ns_per_byte": round(cpu / size * 1e9, 3)}
                rows.append(row)
                print(_line(row), flush=True)
    most = max(counts)
    best = next((r for r in rows if r["who"] == "snapstore, native" and r["threads"] == most), None)
    figures = {}
    for name, (kind, verb, goal) in GOALS.items() if best else ():
        value = best[f"{verb} {kind}"]["GBps"] if best else 0.0
        figures[name] = {"value": value, "goal": goal, "met": value >= goal}
    cores = os.cpu_count() or 1
    training = beside_training([1, max(1, cores // 2), cores])
    return {"machine": page.machine(), "cores": cores, "figures": figures, "rows": rows, "training": training}


def _line(row: dict[str, Any]) -> str:
    cells = [
        f"{name} {row[name]['GBps']:.2f} GB/s, {row[name]['cpu_ns_per_byte']:.2f} ns/B"
        for name in ("save full", "save delta", "restore full", "restore delta")
        if name in row
    ]
    return f"{row['model']}, {row['threads']} threads, {row['who']}: {'; '.join(cells)}"


def write(record: dict[str, Any]) -> None:
    """Write the record to docs/benchmarks/, if it is of 16 cores and a large state."""
    if record["cores"] >= 16 and torch.cuda.is_available():
        (ROOT / "docs" / "benchmarks" / "cpu16.json").write_text(json.dumps(record, indent=1) + "\n")
