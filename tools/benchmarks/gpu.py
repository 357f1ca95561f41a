"""`tools/bench gpu`: the CUDA engine beside its peers and the machine's limits, on a real training run.

Sections run one after the other. If one fails, its error is recorded and the next one runs. The report so far is
written as JSON after every section. A GB is 1e9 bytes. Times include the device's work: the bench waits for it before
and after. The JSON is a file in the temporary folder, or that of --out. If no section failed, a run without --tiny,
--only and --out copies it to docs/benchmarks/gpu.json and writes its section of docs/benchmarks.md; if one failed, the
exit code is 1. `--page` writes the section from the records.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import caller
import torch

import snapstore
from benchmarks import gpu_cold, gpu_engine, gpu_frozen, gpu_llama, gpu_sparse
from benchmarks import gpu_limits as limits
from benchmarks import gpu_page as page
from benchmarks import gpu_peers as peers
from benchmarks.gpu_limits import GiB, MiB, seconds, synchronize
from benchmarks.gpu_page import GOALS, sustained_ratio, to_host_ratio
from benchmarks.gpu_train import FULL, GAPS, REGIMES, TINY, State, Trainer, nbytes, same_bits, tensors
from snapstore import Repository, SaveOptions, SnapshotManager

ROOT = Path(__file__).parents[2]
CODECS = ("portable", "ans")
STALL_SAVES, WARM_SAVES = 7, 2  # stalls are medians over the saves after the warm-up ones
STEPS_BETWEEN = 5  # training steps between two saves whose stall is measured
BLOCK, BLOCKS = 50, 4  # training steps per snapshot, and blocks with one; as many blocks have none

# -- snapstore: options and managers of the sections

WRITER_THREADS = 8  # so many threads write packs at a time; the raw writer of save_ratio gets as many
PACK_BYTES = SaveOptions().pack_bytes  # and it writes files of this size, each fsynced, with its folder


def options(device: torch.device, codec: str) -> SaveOptions:
    """Return options with a codec; on a CPU the defaults, so that `--tiny` works anywhere."""
    wanted: dict[str, Any] = {"codec": codec} if device.type == "cuda" else {}
    return SaveOptions(**wanted)


def manager(device: torch.device, path: Path, staging: str = "device", codec: str = "portable") -> SnapshotManager:
    """A manager of a new repository."""
    wanted: dict[str, Any] = {"staging": staging} if device.type == "cuda" else {}
    return SnapshotManager(path, run="bench", async_save=True, options=options(device, codec), **wanted)


def stored_by_kind(repository: Repository) -> dict[str, int]:
    """Return the bytes of blobs so far, by kind of tensor, without the bytes of packs and manifests themselves."""
    return {kind: group.stored_bytes for kind, group in repository.stats().groups.items()}


# -- the report


@dataclass
class Figure:
    """One number against its goal; `met` is None where there is no goal, and False where there is no number."""

    value: float | None
    goal: str
    met: bool | None
    how: str


class SkippedError(Exception):
    """A section that cannot run here; its message says why."""


class Bench:
    """Device, folder, training run and report, shared by the sections."""

    def __init__(self, args: argparse.Namespace, folder: Path, out: Path) -> None:
        self.began, self.out, self.folder, self.tiny, self.steps = time.time(), out, folder, args.tiny, args.steps
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.figures: dict[str, Figure] = {}
        self.sections: dict[str, dict[str, Any]] = {}
        self.report: dict[str, Any] = head(self.device)
        self._states: dict[str, dict[int, State]] = {}

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"{time.strftime('%H:%M:%S')} {time.time() - self.began:6.1f} s  {text}", flush=True)

    def figure(self, name: str, value: float, how: str, bound: float | None = None) -> None:
        """Record a figure."""
        goal = GOALS[name]
        self.figures[name] = Figure(value, goal.goal, goal.met(value, bound), how)
        self.say(f"{name} = {value:.5g}, goal {goal.goal or 'none'}: {self.figures[name].met}")

    @cached_property
    def trainer(self) -> Trainer:
        """The run, trained as far as the last state that was asked for."""
        return Trainer(TINY if self.tiny else FULL, self.device, self.steps)

    def states(self, regime: str) -> dict[int, State]:
        """Copies of the state by steps since the regime's first snapshot; the regimes before it are trained as well."""
        for name in REGIMES[: REGIMES.index(regime) + 1]:
            if name not in self._states:
                self._states[name] = self.trainer.snapshots(name, self.say)
        return self._states[regime]

    def release(self) -> None:
        """Free the device memory of the model and the states; the next section that wants them trains again."""
        self._states.clear()
        vars(self).pop("trainer", None)
        gpu_llama.release(self.device)

    def live(self) -> State:
        """The state that trains."""
        self.states("pretrain")
        return self.trainer.state()

    @cached_property
    def copy_rate(self) -> float:
        """Read and written bytes a second of a copy on the device."""
        return limits.device_copy(self.device, 64 * MiB if self.tiny else 4 * GiB)

    @cached_property
    def pinned_rates(self) -> tuple[float, float]:
        """Bytes a second of a copy to pinned memory, and from it."""
        return limits.pinned_copies(self.device, 32 * MiB if self.tiny else 2 * GiB)

    @contextmanager
    def scratch(self, parent: Path | None = None) -> Iterator[Path]:
        """A folder that is gone afterwards."""
        path = Path(tempfile.mkdtemp(prefix="bench-gpu-", dir=parent or self.folder))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def write(self) -> dict[str, Any]:
        """Write the report so far, and give it."""
        figures = {
            name: vars(self.figures.get(name) or Figure(None, goal.goal, goal.met(None), "not measured"))
            for name, goal in GOALS.items()
        }
        seconds_s = round(time.time() - self.began, 1)
        body = self.report | {"seconds": seconds_s, "sections": self.sections, "figures": figures}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(body, indent=1) + "\n")
        return body


def head(device: torch.device) -> dict[str, Any]:
    """Return the machine, the versions and the command."""
    versions = {"snapstore": snapstore.__version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {"CUDA": str(torch.version.cuda)}
    for name, packages in {
        "nvcomp": ("nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12"), "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "zstandard": ("zstandard",), "zipnn": ("zipnn",), "numpy": ("numpy",),
    }.items():  # fmt: skip
        versions[name] = next(filter(None, map(_version, packages)), "none")
    if versions["nvcomp"] == "none":  # unpacked by hand, perhaps
        try:
            versions["nvcomp"] = str(import_module("nvidia.nvcomp").__version__)
        except Exception as error:  # noqa: BLE001  a broken one counts as none
            versions["nvcomp"] = f"none ({type(error).__name__})"
    cuda = device.type == "cuda"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(["tools/bench", "gpu", *sys.argv[1:]]),
        "machine": {
            "device": torch.cuda.get_device_name(device) if cuda else "CPU",
            "device_memory_GiB": round(torch.cuda.mem_get_info(device)[1] / GiB, 1) if cuda else 0,
            "driver": _driver() if cuda else "none", "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "versions": versions,
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"


# -- sections: each takes the bench and gives what goes into the report under its name


def section_limits(bench: Bench) -> dict[str, Any]:
    """Measure the limits of the machine."""
    size = 32 * MiB if bench.tiny else 2 * GiB
    down, up = bench.pinned_rates
    found = {
        "device_copy_GBps": bench.copy_rate / 1e9,
        "pinned_to_host_GBps": down / 1e9,
        "pinned_to_device_GBps": up / 1e9,
    }
    with bench.scratch() as folder:
        for threads in (1, 4, 8):
            took = limits.write_files(folder, size, threads, size // threads)
            found[f"file_write_{threads}_threads_GBps"] = size / took / 1e9
        for threads in (1, 8):
            found[f"page_cache_read_{threads}_threads_GBps"] = limits.read_cached(folder, size, threads) / 1e9
        found["page_cache_to_device_8_threads_GBps"] = limits.cached_to_device(folder, size, 8, bench.device) / 1e9
    return {name: round(value, 3) for name, value in found.items()}


def section_train(bench: Bench) -> dict[str, Any]:
    """The run itself."""
    state = bench.live()
    step_s = seconds(bench.device, lambda: bench.trainer.train(10), 2) / 10
    for regime in REGIMES:
        bench.states(regime)
    return {
        "parameters": sum(t.numel() for t in state["p"].values()), "tensors": len(tensors(state)),
        "state_bytes": nbytes(state), "size": vars(bench.trainer.size), "steps_before_pretrain_snapshot": bench.steps,
        "step_s": round(step_s, 5), "loss": round(bench.trainer.loss.item(), 4), "tokens": len(bench.trainer.tokens),
        "clone_s": round(limits.device_clone(bench.device, state), 5),
        "regimes": "pretrain: AdamW 6e-4, warm-up then cosine, halfway; finetune: goes on at a constant 2e-5; bf16_rl: "
        "goes on at 1e-6 with fp32 masters, and the state is the bf16 weights alone, without masters and moments",
    }  # fmt: skip


def section_engine(bench: Bench) -> dict[str, Any]:
    """Stages of the engine, without files."""
    states = bench.states("pretrain")
    found = gpu_engine.figures(states[10], states[0])
    for codec in CODECS:  # "over all device time of a save": with the host's waits between them it is encode_*_wall
        found[f"encode_{codec}_wall_GBps"] = found[f"encode_{codec}_GBps"]
        found[f"encode_{codec}_GBps"] = found.get(f"encode_{codec}_busy_GBps", found[f"encode_{codec}_wall_GBps"])
    for name, value in found.items():
        if name not in GOALS:
            continue
        bench.figure(name, value, "engine level, device tensors, pretrain state 10 steps after its base")
    ratio = to_host_ratio(found, {"pinned_to_host_GBps": bench.pinned_rates[0] / 1e9})
    bench.figure("to_host_ratio", ratio, "to_host_GBps / pinned_to_host_GBps of the same run")
    return dict(found)


def section_stall_device(bench: Bench) -> dict[str, Any]:
    """Measure how long the caller waits with device staging, and how fast saves get to the disk."""
    found = _stalls(bench, "device", raw_writes=True)
    size = found["state_bytes"]
    floor = 2 * size / bench.copy_rate
    bench.figure("copy_floor_s", floor, "2 x state bytes / device_copy_GBps")
    how = "host time of save and the training stream's wait; median, warm, with training steps in between"
    bench.figure("stall_device_s", found["stall_s"], how, 2 * floor + 0.002)
    how = "median over saves of (stored bytes / seconds until committed) / (bytes / seconds of a raw writer: the same "
    how += f"bytes, {WRITER_THREADS} threads, same file sizes and fsyncs)"
    bench.figure("save_ratio", found["save_ratio"], how)
    return found | {"clone_s": round(limits.device_clone(bench.device, bench.live()), 5)}


def section_stall_host(bench: Bench) -> dict[str, Any]:
    """The same with host staging."""
    found = _stalls(bench, "host", raw_writes=False)
    raw = limits.pinned_copy_of(bench.device, bench.live())
    how = "median, warm; raw: every tensor copied to a pinned buffer of its own, that is there already"
    bench.figure("stall_host_s", found["stall_s"], how, 1.2 * raw)
    bench.figure("stall_host_ratio", found["stall_s"] / raw, how)
    return found | {"raw_pinned_copy_s": raw}


def _stalls(bench: Bench, staging: str, *, raw_writes: bool) -> dict[str, Any]:
    """Saves of the live state with training in between, each waited for."""
    state, device = bench.live(), bench.device
    stalls, totals, stored, ratios = [], [], [], []
    with bench.scratch() as folder, manager(device, folder / "repository", staging) as snapshots:
        for number in range(STALL_SAVES):
            bench.trainer.train(STEPS_BETWEEN)
            synchronize(device)
            os.sync()
            began = time.perf_counter()
            handle = snapshots.save(number, state)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            stalls.append(time.perf_counter() - began)
            snapshot = handle.result()
            totals.append(time.perf_counter() - began)
            assert snapshot is not None
            stored.append(snapshot.stored_bytes)
            bench.say(
                f"{staging} staging: stall {stalls[-1]:.4f} s, total {totals[-1]:.3f} s, stored {stored[-1]} bytes"
            )
            if raw_writes:
                raw = limits.write_files(folder, stored[-1], WRITER_THREADS, PACK_BYTES)
                ratios.append(raw / totals[-1])
    size, warm = nbytes(state), slice(WARM_SAVES, None)
    found = {
        "state_bytes": size, "stall_s": statistics.median(stalls[warm]), "stalls_s": [round(s, 5) for s in stalls],
        "totals_s": [round(s, 4) for s in totals], "stored_bytes": stored,
        "save_GBps": size / statistics.median(totals[warm]) / 1e9,
    }  # fmt: skip
    if raw_writes:
        found |= {"save_ratio": statistics.median(ratios[warm]), "save_ratios": [round(r, 3) for r in ratios]}
    return found


def section_restore(bench: Bench) -> dict[str, Any]:
    """Full snapshots (depth 0) back onto the device, files in the page cache."""
    state = bench.states("pretrain")[0]
    found: dict[str, Any] = {}
    for codec in CODECS:
        try:
            with bench.scratch() as folder:
                found[codec] = _restore(bench, state, folder / "repository", codec)
        except Exception as error:  # noqa: BLE001  the other codec may do
            found[codec] = {"error": f"{type(error).__name__}: {error}"}
            bench.say(f"restore {codec}: {found[codec]['error']}")
    if all("error" in row for row in found.values()):
        raise RuntimeError(f"no codec restores: {found}")
    return found


def _restore(bench: Bench, state: State, path: Path, codec: str) -> dict[str, Any]:
    with manager(bench.device, path, codec=codec) as snapshots:
        saved = snapshots.save(0, state).result()
    assert saved is not None
    into = {kind: {name: torch.zeros_like(t) for name, t in group.items()} for kind, group in state.items()}
    with Repository.open(path, options=options(bench.device, codec)) as repository:
        times = [seconds(bench.device, lambda: repository.restore_into(saved.ref, into)) for _ in range(8)][1:]
    if not same_bits(state, into):
        raise RuntimeError(f"{codec}: the restored state is not bit-equal to the one saved")
    rates = [nbytes(state) / took / 1e9 for took in times]
    how = f"into tensors on the device, depth {saved.depth}, page cache; median of 7, best {max(rates):.2f}; bit-equal"
    bench.figure(f"restore_{codec}_GBps", statistics.median(rates), how)
    return {"times_s": [round(t, 4) for t in times], "stored_bytes": saved.stored_bytes, "depth": saved.depth,
            "best_GBps": max(rates), "median_GBps": statistics.median(rates)}  # fmt: skip


def section_memory(bench: Bench) -> dict[str, Any]:
    """Device memory that saves take beyond the state, at the peak."""
    if bench.device.type != "cuda":
        raise SkippedError("needs CUDA: a CPU has no device memory to count")
    found = {}
    for staging in ("device", "host"):
        with bench.scratch() as folder:
            found[staging] = _extra_memory(bench, folder / "repository", staging)
    size = nbytes(bench.live())
    peaks = {staging: max(row["torch_bytes"], row["driver_bytes"]) for staging, row in found.items()}
    how = "peak over 4 saves of states 1 to 40 steps apart; the larger of what torch's allocator and the driver count"
    bench.figure("extra_memory_device_x", peaks["device"] / size, how)
    bench.figure("extra_memory_host_GiB", peaks["host"] / GiB, how)
    return found | {"state_bytes": size}


def _extra_memory(bench: Bench, path: Path, staging: str) -> dict[str, Any]:
    """Bytes by torch's count and by the driver's, which sees every allocator; the latter is polled every 2 ms.

    `reserved`: the most that torch had reserved from the driver. `cached`: the free part of it after the save, by
    stream. The snapshots are those of the pretraining, a few steps apart. The model does not train here, since the
    memory that torch caches for training would be counted too.
    """
    states = bench.states("pretrain")
    synchronize(bench.device)
    gc.collect()
    torch.cuda.empty_cache()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    peaks_torch, peaks_driver, reserved, cached = [], [], [], []
    before = torch.cuda.memory_reserved()
    lowest, stop = free, threading.Event()

    def poll() -> None:
        nonlocal lowest
        while not stop.wait(0.002):
            lowest = min(lowest, torch.cuda.mem_get_info(bench.device)[0])

    with manager(bench.device, path, staging) as snapshots:
        for number in (0, *GAPS):
            torch.cuda.reset_peak_memory_stats()
            lowest = torch.cuda.mem_get_info()[0]
            stop.clear()
            poller = threading.Thread(target=poll)
            poller.start()
            try:
                snapshots.save(number, states[number]).result()
                synchronize(bench.device)
            finally:
                stop.set()
                poller.join()
            peaks_torch.append(torch.cuda.max_memory_allocated() - allocated)
            peaks_driver.append(free - lowest)
            reserved.append(torch.cuda.max_memory_reserved() - before)
            cached.append(_cached_by_stream())
            counts = (round(row[-1] / 1e9, 2) for row in (peaks_torch, reserved, peaks_driver))
            bench.say(f"{staging}: GB in use, reserved, by the driver: {list(counts)}; cached: {cached[-1]}")
    return {"torch_bytes": max(peaks_torch), "driver_bytes": max(peaks_driver), "saves_torch_bytes": peaks_torch,
            "saves_driver_bytes": peaks_driver, "saves_reserved_bytes": reserved, "cached_GB": cached}  # fmt: skip


def _cached_by_stream() -> list[list[float]]:
    """Return the free blocks of 50 MB or more in torch's cache, by stream [GB]."""
    found: dict[int, list[float]] = {}
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        found.setdefault(segment["stream"], []).extend(round(size / 1e9, 2) for size in free if size >= 50e6)
    return [sorted(sizes, reverse=True) for sizes in found.values() if sizes]


def section_sizes(bench: Bench) -> dict[str, Any]:
    """Stored bytes of every regime and gap: snapstore in full and given the snapshot before, and the peers."""
    found, missing = peers.coders(bench.device)
    rows: list[dict[str, Any]] = []
    errors: dict[str, str] = dict(missing)
    # Sizes need no disk; memory saves time where there is plenty.
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > 8 * nbytes(bench.live())
    for regime in REGIMES:
        states = bench.states(regime)
        for gap in (0, *GAPS):
            for coder in found:
                if coder.name not in errors:
                    try:
                        kinds = coder.sizes(states[gap])
                        rows.append(_size_row(regime, gap, coder.name, states[gap], sum(kinds.values()), kinds))
                    except Exception as error:  # noqa: BLE001  recorded, the others go on
                        errors[coder.name] = f"{type(error).__name__}: {error}"
        for codec in CODECS:
            for gap in GAPS:
                try:
                    with bench.scratch(shm if roomy else None) as folder:
                        rows += _our_sizes(bench, states, regime, gap, codec, folder / "repository")
                except Exception as error:  # noqa: BLE001  recorded, the others go on
                    errors[f"snapstore {codec}"] = f"{type(error).__name__}: {error}"
        shown = [row for row in rows if row["regime"] == regime and row["gap"] in (0, 10)]
        each = (f"{row['who']} {'gap 10' if row['gap'] else 'full'} {row['share']:.4f}" for row in shown)
        bench.say(f"sizes: {regime}: " + ", ".join(each))
    _compare_sizes(bench, rows)
    return {"rows": rows, "missing": errors}


def _our_sizes(
    bench: Bench, states: Mapping[int, State], regime: str, gap: int, codec: str, path: Path
) -> list[dict[str, Any]]:  # fmt: skip
    """Save two snapshots; return their rows, but that of the first one, which is full, for the first gap only."""
    rows: list[dict[str, Any]] = []
    before: dict[str, int] = {}
    with manager(bench.device, path, codec=codec) as snapshots:
        for number in (0, gap):
            saved = snapshots.save(number, states[number]).result()
            assert saved is not None
            so_far = stored_by_kind(snapshots.repository)
            kinds = {kind: stored - before.get(kind, 0) for kind, stored in so_far.items()}
            before = so_far
            if number or gap == GAPS[0]:
                rows.append(_size_row(regime, number, f"snapstore {codec}", states[number], saved.stored_bytes, kinds))
    return rows


def _size_row(
    regime: str, gap: int, who: str, state: State, stored: int, kinds: Mapping[str, int]
) -> dict[str, Any]:  # fmt: skip
    logical = {kind: sum(t.nbytes for t in group.values()) for kind, group in state.items()}
    return {"regime": regime, "gap": gap, "who": who, "stored_bytes": stored, "share": stored / sum(logical.values()),
            "kinds": {kind: round(kinds.get(kind, 0) / size, 5) for kind, size in logical.items()}}  # fmt: skip


def _compare_sizes(bench: Bench, rows: list[dict[str, Any]]) -> None:
    """Our bytes against the better of the two nvCOMP recipes on the same state, in every case and with every codec."""
    recipe = peers.better_recipes(rows)
    ours = [row for row in rows if row["who"].startswith("snapstore")]
    ratios = {
        f"{row['who']} {row['regime']} {'gap ' + str(row['gap']) if row['gap'] else 'full'}":
        row["stored_bytes"] / recipe[row["regime"], row["gap"]]["stored_bytes"]
        for row in ours if (row["regime"], row["gap"]) in recipe
    }  # fmt: skip
    if not ratios:
        bench.say("sizes: no nvCOMP here, or no snapstore: nothing to compare")
        return
    smaller = sum(ratio < 1 for ratio in ratios.values())
    worst = max(ratios, key=lambda name: ratios[name])
    cases = len(CODECS) * len(REGIMES) * (1 + len(GAPS))  # a case that could not be measured is not met
    how = (
        f"share of {cases} cases (codec, regime, gap or full) with fewer bytes than the better recipe ({smaller} are); "
    )
    bench.figure("stored_smaller_everywhere", smaller / cases, how + f"worst: {worst} at {ratios[worst]:.4f} of it")


def section_peers(bench: Bench) -> dict[str, Any]:
    """Times of the peers' saves of the same state, durable, on the same disk."""
    state = bench.states("pretrain")[0]
    with bench.scratch() as folder:
        rows = peers.times(state, bench.device, folder, bench.say)
    return {"state_bytes": nbytes(state), "rows": rows}


def section_steps(bench: Bench) -> dict[str, Any]:
    """Train blocks without snapshots, then twice as many with one at the begin of each, then again without.

    The bench waits for each save before the next block, as `on_busy="wait"` does. train_step_ratio does not count this
    wait, and train_step_sustained_ratio does.
    """
    state, device, block = bench.live(), bench.device, 10 if bench.tiny else BLOCK
    with_s, without_s, stalls, late = [], [], [], []

    def train(began: float) -> float:
        bench.trainer.train(block)
        synchronize(device)
        return (time.perf_counter() - began) / block

    with bench.scratch() as folder, manager(device, folder / "repository") as snapshots:
        for number in range(WARM_SAVES):
            snapshots.save(number, state).result()
            bench.trainer.train(STEPS_BETWEEN)
        synchronize(device)
        for number in range(2 * BLOCKS):
            began = time.perf_counter()
            if not BLOCKS // 2 <= number < BLOCKS // 2 + BLOCKS:
                without_s.append(train(began))
                continue
            handle, stall = _marked_save(device, snapshots, WARM_SAVES + number, state)
            with_s.append(train(began))
            handle.result()
            late.append(time.perf_counter() - began - with_s[-1] * block)
            stalls.append(stall())
    steps = {"with_s": with_s, "without_s": without_s, "outlasted_s": late}
    plain_s = statistics.mean(without_s)
    ratio, share = statistics.mean(with_s) / plain_s, statistics.mean(stalls) / block / plain_s
    how = f"mean step with a snapshot every {block} steps / without, {BLOCKS * block} steps each; the stall is "
    bench.figure("train_step_ratio", ratio, how + f"{share:.4f} of a step")
    how = f"the same {BLOCKS} blocks, in a row, with the wait for each save, up to {max(late):.2f} s, within their time"
    bench.figure("train_step_sustained_ratio", sustained_ratio(steps, block), how)
    rounded = {name: [round(s, 5) for s in values] for name, values in (steps | {"stalls_s": stalls}).items()}
    return {**rounded, "ratio": ratio, "stall_share": share, "block": block}


def _marked_save(
    device: torch.device, snapshots: SnapshotManager, step: int, state: State
) -> tuple[snapstore.SaveHandle, Callable[[], float]]:  # fmt: skip
    """Save; return the handle, and a function that returns the seconds for which the training stream had to wait."""
    if device.type != "cuda":
        began = time.perf_counter()
        handle = snapshots.save(step, state)
        stalled = time.perf_counter() - began
        return handle, lambda: stalled
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    before.record()
    handle = snapshots.save(step, state)
    after.record()
    return handle, lambda: float(before.elapsed_time(after)) / 1e3


def section_llamas(bench: Bench) -> dict[str, Any]:
    """Stalls and memory on states for which the engine was not tuned: Llamas, and a mixture of experts."""
    found: dict[str, Any] = {}
    shapes = gpu_llama.TINY if bench.tiny else gpu_llama.LLAMAS | {"mixture of experts": gpu_llama.EXPERTS}
    for name, shape in shapes.items():
        with bench.scratch() as folder:
            run = gpu_llama.Run(shape, bench.device, experts=name == "mixture of experts")
            found[name] = gpu_llama.device_stalls(run, folder, bench.say)
        del run
        gc.collect()
        worst = max(found, key=lambda name: found[name]["stall_over_goal"])
        how = (
            f"stall without state_dict() / (1.5 x copy floor + 2 ms + 1 us a tensor), medians; the worst state: {worst}"
        )
        bench.figure("stall_over_goal", found[worst]["stall_over_goal"], how)
        bench.sections["llamas"] = {"status": "not finished", **found}
        bench.write()
    for name in (name for name in shapes if "few" in name):
        run = gpu_llama.Run(shapes[name], bench.device)
        run.train(2)
        with bench.scratch() as folder:
            found[name] |= gpu_llama.device_memory(run, folder, bench.say)
        del run
        gc.collect()
    most = {name: max(one["memory_x"]) for name, one in found.items() if "memory_x" in one}
    worst = max(most, key=lambda name: most[name])
    bench.figure("memory_every_save_x", most[worst], f"the most of any of ten saves; the worst state: {worst}")
    return found


def section_cold(bench: Bench) -> dict[str, Any]:
    """The first save and the first restores of a process, also with kernels that were never compiled."""
    if bench.device.type != "cuda":
        raise SkippedError("no CUDA device")
    bench.release()  # the new process needs room for its copies
    found: dict[str, Any] = dict(gpu_cold.first_stall(gpu_llama.LLAMAS["12 GB, few tensors"]))
    bench.figure("first_stall_ms", found["first_stall_ms"], "a process of its own with an empty cache of kernels")
    with bench.scratch() as folder:
        found["restores"] = gpu_cold.first_restores(folder, gpu_llama.LLAMAS["5 GB, few tensors"])
    bench.say(f"first restores: {found['restores']}")
    first = {name: times[0] for name, times in found["restores"].items()}
    how = "the first restore of a process, with its manager / the first dcp.load of a process, warm page cache"
    bench.figure("first_restore_over_dcp", first["compiled_s"] / first["dcp_load_s"], how)
    how += "; with an empty cache of kernels"
    bench.figure("new_machine_restore_over_dcp", first["never_compiled_s"] / first["dcp_load_s"], how)
    return found


def section_first_host(bench: Bench) -> dict[str, Any]:
    """The first saves staged on the host: without preparation, after `prepare`, and after a restore."""
    if bench.device.type != "cuda":
        raise SkippedError("no CUDA device")
    bench.release()
    found: dict[str, Any] = {}
    run = gpu_llama.Run(gpu_llama.STAGED, bench.device)
    run.train(2)
    for begins in ("nothing", "prepare", "restore_into"):
        with bench.scratch() as folder:
            found[begins] = gpu_llama.host_stalls(run, folder, bench.say, begins)
    raw_s = found["nothing"]["state_bytes"] / bench.pinned_rates[0]
    saves = {"second": ("nothing", 1), "prepared": ("prepare", 0), "restored": ("restore_into", 0)}
    for name, (begins, number) in saves.items():
        how = f"save {number + 1} with host staging after {begins} / a raw pinned copy"
        bench.figure(f"{name}_host_stall_ratio", found[begins]["stalls_s"][number] / raw_s, how)
    return found


def section_sparse(bench: Bench) -> dict[str, Any]:
    """Kernels of sparse deltas and of merges, checked against the CPU engine."""
    if bench.device.type != "cuda":
        raise SkippedError("no CUDA device")
    found = gpu_sparse.figures(bench.device, 64 if bench.tiny else 256)
    for name, one in found.items():
        bench.say(f"   {name}: {one}")
    how = "plain bytes of a link / time of its kernels but digests, bf16 weights after a step at 1e-6"
    bench.figure("sparse_encode_GBps", found["encode"]["all"], how)
    bench.figure("sparse_decode_GBps", found[f"decode_{gpu_sparse.LINKS}"]["all"], how)
    return found


def section_frozen(bench: Bench) -> dict[str, Any]:
    """LoRA runs over one frozen base."""
    bench.release()
    with bench.scratch() as folder:
        found = gpu_frozen.figures(folder, bench.device, bench.say, tiny=bench.tiny)
    how = "first save of the tenth LoRA run over a base of 3.9 GB"
    bench.figure("lora_stored_x", found["stored_over_own"], how)
    bench.figure("lora_memory_x", found["memory_over_allowed"], f"{how}, by the driver's count")
    if bench.device.type == "cuda":
        how = "later saves: stall - stall without the base - digests of the base"
        bench.figure("lora_stall_s", found["stall_beyond_digest_s"], how)
    return found


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "limits": section_limits, "train": section_train, "engine": section_engine, "stall_device": section_stall_device,
    "stall_host": section_stall_host, "restore": section_restore, "memory": section_memory, "steps": section_steps,
    "sizes": section_sizes, "peers": section_peers, "llamas": section_llamas, "cold": section_cold,
    "first_host": section_first_host, "sparse": section_sparse, "frozen": section_frozen,
}  # fmt: skip


def run(bench: Bench, chosen: list[str], limit_s: float) -> None:
    """Run the chosen sections; write the report after each, whatever happens to it."""
    for name in chosen:
        began = time.time()
        if began - bench.began > limit_s:
            bench.sections[name] = {"status": "skipped", "error": f"over the limit of {limit_s:.0f} s"}
        else:
            bench.say(f"-- {name}")
            try:
                bench.sections[name] = {"status": "ok", **SECTIONS[name](bench)}
            except SkippedError as reason:
                bench.sections[name] = {"status": "skipped", "error": str(reason)}
            except Exception as error:  # noqa: BLE001  recorded, the rest goes on
                trace = traceback.format_exc().splitlines()[-8:]
                bench.sections[name] = {"status": "failed", "error": f"{type(error).__name__}: {error}", "trace": trace}
            bench.sections[name]["seconds"] = round(time.time() - began, 1)
            gc.collect()
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
        status = bench.sections[name]
        bench.say(f"-- {name}: {status['status']} {status.get('error', '')} after {status.get('seconds', 0)} s")
        bench.write()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools/bench gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", default="", help=f"comma-separated sections: {', '.join(SECTIONS)}")
    parser.add_argument("--steps", type=int, help="of pretraining before its first snapshot (default 300, tiny 20)")
    parser.add_argument("--tiny", action="store_true", help="a model of 1 M parameters, on a CPU if need be: a dry run")
    parser.add_argument("--folder", type=caller.path, help="where repositories are written (default: a temporary one)")
    parser.add_argument("--out", type=caller.path, help="the JSON; nothing is written to docs/")
    parser.add_argument(
        "--limit", type=float, default=500, help="no section begins after so many seconds (default 500)"
    )
    parser.add_argument(
        "--page", action="store_true", help="measure nothing: write the page from the JSON that is there"
    )
    args = parser.parse_args()
    if unknown := set(filter(None, args.only.split(","))) - SECTIONS.keys():
        parser.error(f"--only: no section {', '.join(sorted(unknown))}; sections: {', '.join(SECTIONS)}")
    if not args.tiny and not args.page and not torch.cuda.is_available():
        parser.error("no CUDA device; --tiny runs on a CPU")
    args.steps = args.steps or (20 if args.tiny else 300)
    return args


def main() -> None:
    """Measure, and write the report; or write the page."""
    args = parse()
    if args.page:
        page.write()
        return
    out = args.out or Path(tempfile.gettempdir()) / "snapstore-bench-gpu.json"
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="snapstore-bench-", dir=args.folder))
    try:
        bench = Bench(args, folder, out)
        bench.say(f"{bench.report['machine']}, {bench.report['versions']}")
        chosen = [name for name in SECTIONS if not args.only or name in args.only.split(",")]
        try:
            run(bench, chosen, args.limit)
        finally:
            print(page.section({"measured": bench.write()}))
            bench.say(f"wrote {out}")
        if failed := [name for name, section in bench.sections.items() if section["status"] == "failed"]:
            sys.exit(f"bench: these sections failed, so docs/ stays as it is: {', '.join(failed)}; see {out}")
        if not (args.out or args.tiny or args.only):
            shutil.copyfile(out, ROOT / "docs" / "benchmarks" / "gpu.json")
            page.write()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
