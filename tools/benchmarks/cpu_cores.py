"""`tools/bench cpu --cores 1,2,4`: whole saves and restores of the CPU engine by threads, beside its peers.

The state is p, m and v in fp32 of a GPT and of a Llama in training, 10 steps apart, in host memory; on a GPU each has
about 2 GB, on a CPU some MB. Repositories and the peers' files lie in memory (/dev/shm), so that no disk limits them;
one thread also saves to the disk of this checkout. Every restore is compared with the state. A time is the least of
ROUNDS, each in a new repository. Then 12,000 tensors of 8 KiB are saved and restored; and a GPT trains on all cores of
the CPU beside saves with 1, half and all threads, in every step and in every tenth.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from benchmarks import bytes as bench
from benchmarks import gpu_train, page, peers
from snapstore import SaveOptions, SnapshotManager
from snapstore.engine import spans

ROUNDS = 3
ROOT = Path(__file__).parents[2]
SIZES = {
    "gpt": gpu_train.Size(width=1024, layers=12, heads=16, vocabulary=16384, context=256, batch=8),
    "llama": gpu_train.Size(width=1024, layers=12, heads=16, vocabulary=16384, context=256, batch=8),
}
#: The GPT that trains on a CPU beside saves: 353 MB of parameters and optimizer state.
TRAINED = gpu_train.Size(width=512, layers=8, heads=8, vocabulary=8192, context=128, batch=4)
SMALL_TENSORS, SMALL_SHAPE = 12_000, (2, 1024)
#: Figures of the most threads by name: (operation, its goal in GB/s).
RATES = {
    "save_full_GBps": ("save full", 5.0),
    "save_delta_GBps": ("save delta", 4.0),
    "restore_full_GBps": ("restore full", 8.0),
    "restore_link1_GBps": ("restore delta", 5.0),
}
#: Figures of one thread and a disk by name: (operation, its goal in ns of CPU a byte).
CPU = {
    "cpu_ns_per_byte_save_full": ("save full", 1.5),
    "cpu_ns_per_byte_save_delta": ("save delta", 1.8),
    "cpu_ns_per_byte_restore": ("restore full", 1.0),
}
SCALING_GOAL, SMALL_GOAL, STEP_GOAL = 1.7, 1.5, 1.15
LMC_CHUNK = 1 << 20  # bytes

Times = dict[str, tuple[float, float]]  # (wall, CPU) [s] of each operation
Row = dict[str, Any]


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
def _folder(below: Path = Path("/dev/shm")) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=below))
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


def by_engine(
    engine: str, threads: int, before: gpu_train.State, after: gpu_train.State, below: Path = Path("/dev/shm")
) -> Times:
    """Save two states and restore both."""
    os.environ["SNAPSTORE_ENGINE"] = engine
    times: Times = {}
    try:
        for _ in range(ROUNDS):
            with _folder(below) as folder:
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


def by_peers(threads: int, before: gpu_train.State, after: gpu_train.State) -> dict[str, Times]:
    """Save a state and load it by each peer with this number of threads."""
    peers.THREADS = threads
    found: dict[str, Times] = {}
    for _ in range(ROUNDS - 1):
        with _folder() as folder:
            for peer in peers.peers(after):
                if "ZStandard" not in peer.name:
                    times, path = found.setdefault(peer.name, {}), folder / "x"
                    _timed(times, "save full", partial(peer.save, after, path))
                    _timed(times, "restore full", partial(peer.load, path))
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        data, base = (np.concatenate([_bytes(t) for k in s.values() for t in k.values()]) for s in (after, before))
        coder, decoder = zstandard.ZstdCompressor(level=1, threads=threads), zstandard.ZstdDecompressor()
        times = found.setdefault("zstd -1 of the bytes, in memory", {})
        coded = _timed(times, "save full", partial(coder.compress, data.data))
        _timed(times, "restore full", partial(decoder.decompress, coded))
        times = found.setdefault("LMC's scheme, in memory", {})
        blocks = _timed(times, "save delta", partial(lmc_encode, threads, data, base))
        assert (_timed(times, "restore delta", partial(lmc_decode, threads, blocks, base)) == data).all()
    return found


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    found: np.ndarray[Any, np.dtype[np.uint8]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def lmc_encode(threads: int, data: Any, base: Any) -> list[list[bytes]]:
    """XOR with the snapshot before, group the bytes of fp32 numbers by place, code each group by Huffman alone.

    Source: the paper of LMC (Waddington et al. 2025). The digests, the index and the file are left out.
    """

    def encode(at: int) -> list[bytes]:
        xor = data[at : at + LMC_CHUNK] ^ base[at : at + LMC_CHUNK]
        coded = []
        for k in range(4):
            coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
            coded.append(coder.compress(np.ascontiguousarray(xor[k::4]).data) + coder.flush())
        return coded

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(encode, range(0, data.size, LMC_CHUNK)))


def lmc_decode(threads: int, blocks: list[list[bytes]], base: Any) -> Any:
    """Return the bytes again."""
    out = np.empty_like(base)

    def decode(number: int) -> None:
        part = slice(number * LMC_CHUNK, (number + 1) * LMC_CHUNK)
        for k, coded in enumerate(blocks[number]):
            out[part][k::4] = np.frombuffer(zlib.decompress(coded, -15), np.uint8)
        out[part] ^= base[part]

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(decode, range(len(blocks))))
    return out


def small_tensors(threads: int) -> list[Row]:
    """Save and restore many small tensors; return the times as multiples of torch's, the file's fsync included."""
    generator = torch.Generator().manual_seed(0)
    state = {f"t{i}": torch.randn(SMALL_SHAPE, generator=generator) for i in range(SMALL_TENSORS)}
    times: Times = {}

    def torch_save(path: Path) -> None:
        torch.save(state, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def save(manager: SnapshotManager, step: int) -> None:
        manager.save(step, state).result()

    for _ in range(ROUNDS):
        with _folder() as folder:
            options = SaveOptions(threads=threads)
            with SnapshotManager(folder / "r", run="r", options=options) as manager:
                for step in range(2):  # the first one meets every code path for the first time
                    for tensor in state.values():
                        tensor.mul_(1.0001)
                    _timed(times, "save", partial(save, manager, step))
                    _timed(times, "restore", partial(manager.restore, step))
            _timed(times, "torch.save", partial(torch_save, folder / "x.pt"))
            _timed(times, "torch.load", partial(torch.load, folder / "x.pt"))
    rows = [{"verb": verb, "over": peer, "times": round(times[verb][0] / times[peer][0], 3)}
            for verb, peer in (("save", "torch.save"), ("restore", "torch.load"))]  # fmt: skip
    print(f"{SMALL_TENSORS:,} small tensors, {threads} threads: {rows}", flush=True)
    return rows


def beside_training(counts: Sequence[int], intervals: Sequence[int] = (1, 10)) -> list[dict[str, Any]]:
    """Train on all cores beside saves in every step and in every tenth, by threads of the saves; print and return rows.

    A row has the time of a step beside saves, and the time until a save is durable beside training, both as multiples
    of what they take alone.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    trainer = bench.trainer_of("gpt", TRAINED, torch.device("cpu"), 1000)
    trainer.train(3)
    rows = []
    for threads, every in product(sorted(set(counts)), intervals):
        steps = max(12, 3 * every)
        with _folder() as folder:
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
                    if i % every == 0:
                        futures.append(manager.save(10 + i, trainer.state()))
                    trainer.train(1)
                step_s = (time.perf_counter() - began) / steps
                saved = [found for future in futures if (found := future.result()) is not None]
        durable_s = sum(snapshot.total_s for snapshot in saved) / len(saved)
        rows.append({
            "threads": threads, "every": every, "steps": steps, "saves": len(saved),
            "step_alone_s": round(step_alone_s, 3), "step": round(step_s / step_alone_s, 3),
            "durable": round(durable_s / min(alone_s), 3),
        })  # fmt: skip
        print(f"training beside saves: {rows[-1]}", flush=True)
    return rows


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _row(size: int, times: Times, **of: Any) -> Row:
    """Return rates as a row of the record, and print it."""
    row: Row = {**of, "bytes": size}
    for name, (wall, cpu) in times.items():
        row[name] = {"GBps": round(size / wall / 1e9, 3), "cpu_ns_per_byte": round(cpu / size * 1e9, 3)}
    cells = [f"{name} {row[name]['GBps']:.2f} GB/s, {row[name]['cpu_ns_per_byte']:.2f} ns/B" for name in times]
    print(f"{', '.join(str(value) for value in of.values())}: {'; '.join(cells)}", flush=True)
    return row


def report(counts: Sequence[int]) -> dict[str, Any]:
    """Measure, print the rows, and return the record."""
    rows: list[Row] = []
    cores, most = os.cpu_count() or 1, max(counts)
    for model in SIZES:
        before, after = states(model)
        size, is_first = gpu_train.nbytes(after), model == next(iter(SIZES))
        for threads in counts:
            torch.set_num_threads(threads)
            names = ["native"] if spans.extension() is not None else []
            if is_first and threads in (1, most):
                names.append("numpy")
            for name in names:
                times = by_engine(name, threads, before, after)
                rows.append(_row(size, times, model=model, place="memory", threads=threads, who=f"snapstore, {name}"))
        if is_first:
            for who, times in by_peers(most, before, after).items():
                rows.append(_row(size, times, model=model, place="memory", threads=most, who=who))
        times = by_engine("native", 1, before, after, ROOT)
        rows.append(_row(size, times, model=model, place="disk", threads=1, who="snapstore, native"))
    small = small_tensors(most)
    training = beside_training([1, max(1, cores // 2), cores])
    figures = _figures(rows, most)
    figures |= {f"small_{row['verb']}_over_torch": _figure(row["times"], SMALL_GOAL, least=False) for row in small}
    for row in training[-2:]:  # with all threads, the default
        figures[f"training_step_saved_every_{row['every']}"] = _figure(row["step"], STEP_GOAL, least=False)
    return {
        "machine": page.machine(), "cores": cores, "figures": figures, "rows": rows, "small": small,
        "training": training,
    }  # fmt: skip


def _figure(value: float, goal: float, *, least: bool) -> Row:
    return {"value": value, "goal": goal, "met": value >= goal if least else value <= goal}


def _figures(rows: Sequence[Row], most: int) -> dict[str, Row]:
    """Return the figures of the rows: the worst of the models."""

    def of(place: str, threads: int, verb: str, unit: str) -> list[float]:
        chosen = [r for r in rows if (r["place"], r["threads"], r["who"]) == (place, threads, "snapstore, native")]
        return [row[verb][unit] for row in chosen]

    figures = {}
    for name, (verb, goal) in RATES.items():
        figures[name] = _figure(min(of("memory", most, verb, "GBps")), goal, least=True)
    for name, (verb, goal) in CPU.items():
        figures[name] = _figure(max(of("disk", 1, verb, "cpu_ns_per_byte")), goal, least=False)
    for verb, _ in RATES.values():
        one, all_ = (of("memory", threads, verb, "cpu_ns_per_byte") for threads in (1, most))
        if one and all_:
            name = f"scaling_{most}_over_1_{verb.replace(' ', '_')}"
            figures[name] = _figure(
                round(max(b / a for a, b in zip(one, all_, strict=True)), 3), SCALING_GOAL, least=False
            )
    return figures


def write(record: dict[str, Any]) -> None:
    """Print the figures; write the record to docs/benchmarks/, if it is of 16 cores and a large state."""
    for name, figure in record["figures"].items():
        print(f"{name}: {figure['value']} (goal {figure['goal']}){'' if figure['met'] else ', missed'}")
    if record["cores"] >= 16 and torch.cuda.is_available():
        (ROOT / "docs" / "benchmarks" / "cpu16.json").write_text(json.dumps(record, indent=1) + "\n")
