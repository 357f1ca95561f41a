"""Runs of many snapshots for `tools/bench bytes`: their stored bytes beside the entropy, and the cost of restores.

`rl`: bf16 weights of a GPT, a Llama and a small mixture of experts, one step at 1e-6 apart. `pretrain`: p, m and v of
the GPT, several steps apart. All objects of a repository count, also manifests and records. A section stops saving when
its time is over; the report says how many snapshots it has.
"""

from __future__ import annotations

import shutil
import statistics
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

from benchmarks import bytes as codings
from benchmarks import gpu_train
from benchmarks.gpu_limits import synchronize
from benchmarks.gpu_train import Size, State
from snapstore import Repository, SaveOptions, Snapshot, SnapshotManager
from snapstore.format.blobs import planes
from snapstore.format.chunking import DEFAULT_CHUNK_BYTES
from snapstore.format.manifests import manifest

#: Restores that are timed, spread over a run, and how often each; before each of them a full one is timed.
TIMED_RESTORES, TRIES = 12, 5
#: How many chunks of a pretraining run are sized by the rules of commit be3f797, and how many steps of an RL run are
#: compressed by other tools.
SAMPLED_CHUNKS, SAMPLED_STEPS = 12, 3
PEER_BYTES = 8_000_000  # plain bytes of a state that other tools compress


@dataclass(frozen=True)
class Scale:
    """How large a bench is.

    Attributes:
        models: the sizes of the RL run's models, by name.
        pretrained: the GPT of the pretraining run.
        lead: steps of pretraining before an RL run.
        snapshots, gap: of the pretraining run; and snapshots of an RL run.
        rl_s, pretrain_s: time limits of one run [s].
        limit_s: no run begins after this time [s].
        chunk_bytes: of the repositories.
    """

    models: dict[str, Size]
    pretrained: Size
    lead: int
    snapshots: tuple[int, int]
    gap: int
    rl_s: float
    pretrain_s: float
    limit_s: float
    chunk_bytes: int = DEFAULT_CHUNK_BYTES


#: 168 M parameters as a GPT, 0.4 G as a Llama, 0.2 G as a mixture of 8 experts; the pretrained GPT has 29 M.
GPU = Scale(
    {
        "gpt": Size(width=1024, layers=12, heads=16, vocabulary=16384, context=256, batch=8),
        "llama": Size(width=1536, layers=12, heads=24, vocabulary=16384, context=256, batch=8),
        "moe": Size(width=512, layers=8, heads=8, vocabulary=16384, context=256, batch=8),
    },
    Size(width=512, layers=8, heads=8, vocabulary=8192, context=256, batch=8), 200, (100, 100), 50, 60, 75, 240,
)  # fmt: skip
CPU = Scale({"gpt": codings.SIZE, "llama": codings.SIZE}, codings.SIZE, 60, (10, 50), 5, 60, 60, 200)
#: A GPT of 67 M parameters on a CPU: ten minutes.
WIDE = Scale(
    {"gpt": Size(width=1024, layers=4, heads=16, vocabulary=16384, context=128, batch=4)},
    codings.SIZE, 120, (10, 100), 5, 3600, 60, 1,
)  # fmt: skip
QUICK = Scale({"gpt": gpu_train.TINY, "moe": gpu_train.TINY}, gpu_train.TINY, 4, (4, 6), 1, 20, 20, 300)


# -- entropy


def entropy_bytes(before: Tensor, after: Tensor) -> float:
    """Entropy of the difference of bf16 tensors given the exponent of the base, each chunk by itself [bytes].

    Order 0, with Miller's and Madow's correction; differences beyond 62 count 16 bits more.
    """
    a, b = (x.contiguous().view(torch.int16).flatten() for x in (before, after))
    chunk = torch.arange(a.numel(), device=a.device) // (DEFAULT_CHUNK_BYTES // 2)
    groups = chunk * 256 + ((a.int() >> 7) & 255)
    totals = torch.bincount(groups).double()
    at = torch.nonzero(a != b).flatten()
    step = (b[at] - a[at]).int()
    values = (step << 1) ^ (step >> 31)
    counts = torch.bincount(groups[at] * 64 + values.clamp(max=63), minlength=totals.numel() * 64).double()
    counts = counts.view(-1, 64)
    counts[:, 0] = totals - counts.sum(1)
    bits = torch.special.xlogy(totals, totals).sum() - torch.special.xlogy(counts, counts).sum()
    symbols = (counts > 0).sum() - (totals > 0).sum()
    return float((bits / np.log(2) + symbols / (2 * np.log(2)) + 16 * counts[:, 63].sum()) / 8)


# -- runs


@dataclass
class Run:
    """A run of snapshots in a repository.

    Attributes:
        chain_bytes: stored bytes that a restore of each snapshot reads from packs.
        took: seconds of each save.
    """

    repository: Repository
    saved: list[Snapshot]
    chain_bytes: list[int]
    depths: list[int]
    took: list[float]

    @property
    def stored_bytes(self) -> int:
        """All objects of the repository."""
        return sum(info.size_bytes for info in self.repository.store.list(""))


def run_of(folder: Path, states: Callable[[int], State | None], device: torch.device, chunk_bytes: int) -> Run:
    """Save `states(0)`, `states(1)` and so on, until one is None."""
    wanted: Any = {"staging": "device"} if device.type == "cuda" else {}
    run = Run(Repository.create(folder, chunk_bytes=chunk_bytes, options=SaveOptions()), [], [], [], [])
    with SnapshotManager(run.repository, run="bench", **wanted) as snapshots:
        while (state := states(len(run.saved))) is not None:
            synchronize(device)
            began = time.perf_counter()
            saved = snapshots.save(len(run.saved), state).result()
            assert saved is not None
            run.took.append(time.perf_counter() - began)
            tables = [manifest.read(run.repository.store, ref, None).table for ref in saved.manifests]
            run.saved.append(saved)
            run.chain_bytes.append(sum(int(table.chain_bytes.sum()) for table in tables))
            run.depths.append(max(int(table.depths.max(initial=0)) for table in tables))
    return run


def restore_figures(run: Run, like: State, device: torch.device) -> dict[str, Any]:
    """Bytes and time of restores beside those of the first snapshot, which is full.

    A full restore is timed right before each other one, since a shared host gets faster and slower within seconds. A
    time is the ratio of the medians; `best` is that of the fastest ones, of which the full snapshot has many more.
    """
    bytes_x = [n / run.chain_bytes[0] for n in run.chain_bytes]
    into = {kind: {name: torch.zeros_like(t) for name, t in group.items()} for kind, group in like.items()}

    def seconds(number: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        run.repository.restore_into(run.saved[number].ref, into)
        synchronize(device)
        return time.perf_counter() - began

    chosen = {round(i) for i in np.linspace(0, len(bytes_x) - 1, min(TIMED_RESTORES, len(bytes_x)))}
    chosen |= {int(np.argmax(bytes_x)), int(np.argmax(run.depths))}
    for number in (0, len(bytes_x) - 1) * 2:  # to warm up
        seconds(number)
    pairs = {number: [(seconds(0), seconds(number)) for _ in range(TRIES)] for number in sorted(chosen)}
    fulls = [full for tries in pairs.values() for full, _ in tries]
    time_x = [statistics.median(t for _, t in tries) / statistics.median(fulls) for tries in pairs.values()]
    best_x = [min(t for _, t in tries) / min(fulls) for tries in pairs.values()]
    return {
        "bytes_worst": max(bytes_x), "bytes_mean": statistics.mean(bytes_x),
        "full_restore_s": statistics.median(fulls), "fastest_full_restore_s": min(fulls),
        "time_worst": max(time_x), "time_mean": statistics.mean(time_x),
        "best_worst": max(best_x), "best_mean": statistics.mean(best_x),
        "longest_chain": max(run.depths), "save_median_s": statistics.median(run.took[1:]),
    }  # fmt: skip


def rl_run(model: str, scale: Scale, folder: Path, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """One RL run: stored bytes beside the entropy and other tools, restores beside a full one."""
    trainer = codings.trainer_of(model, scale.models[model], device, scale.lead)
    trainer.train(scale.lead)
    trainer.train(gpu_train.SETTLE_STEPS, gpu_train.RL_LR)
    began, wanted = time.perf_counter(), scale.snapshots[1]
    before: State = {}
    entropies: list[float] = []
    pool, peers = ThreadPoolExecutor(), list[Future[dict[str, float]]]()

    def state_of(number: int) -> State | None:
        nonlocal before
        if number == wanted or (time.perf_counter() - began > scale.rl_s and number > 2):
            return None
        trainer.train(1, gpu_train.RL_LR)
        state = gpu_train.weights_only(trainer.state())
        if number:
            entropies.append(sum(entropy_bytes(a, state["w"][name]) for name, a in before["w"].items()))
        if number in {round(i) for i in np.linspace(1, wanted - 1, SAMPLED_STEPS)}:
            peers.append(pool.submit(peer_shares, *some_of(before, state)))
        before = state
        return state

    run = run_of(folder, state_of, device, scale.chunk_bytes)
    measured = [peer.result() for peer in peers]  # while none of them uses a core, restores are timed
    restored = restore_figures(run, before, device)
    plain, full = gpu_train.nbytes(before), run.saved[0].stored_bytes
    steps = len(run.saved) - 1
    floor = full + sum(entropies)
    shares = {name: statistics.mean(p[name] for p in measured) for name in measured[0]}
    of_peers = {name: full + steps * share * plain for name, share in shares.items()}
    found = {
        "plain_bytes": plain, "snapshots": len(run.saved), "chunk_bytes": scale.chunk_bytes,
        "stored_bytes": run.stored_bytes, "full_bytes": full,
        "entropy_bytes_of_steps": sum(entropies), "over_entropy": run.stored_bytes / floor,
        "manifest_bytes": sum(ref.size_bytes for s in run.saved for ref in s.manifests),
        "peer_bytes": of_peers, "missing_peers": codings.missing_tools(),
        "over_best_peer": run.stored_bytes / min(of_peers.values()), "restore": restored,
    }  # fmt: skip
    say(f"rl {model}: {found}")
    run.repository.close()
    shutil.rmtree(folder)
    return found


def some_of(before: State, after: State) -> tuple[codings.Arrays, codings.Arrays]:
    """Return copies of some tensors of two states, PEER_BYTES or more, from the middle of the model on."""
    found: tuple[codings.Arrays, codings.Arrays] = ([], [])
    pairs = list(zip(gpu_train.tensors(before), gpu_train.tensors(after), strict=True))
    for pair in pairs[len(pairs) // 2 :] + pairs[: len(pairs) // 2]:
        if sum(y.nbytes for y in found[1]) < PEER_BYTES:
            for arrays, tensor in zip(found, pair, strict=True):
                arrays.append(tensor.flatten()[: PEER_BYTES // 2].cpu().view(torch.uint16).numpy().copy())
    return found


def peer_shares(a: codings.Arrays, b: codings.Arrays) -> dict[str, float]:
    """Bytes of one step by other tools, as shares of the plain bytes."""
    size = sum(y.nbytes for y in b)
    found = {"positions and values, zstd": codings.positions_and_values(a, b), **codings.by_tool(a, b)}
    return {name: value / size for name, value in found.items()}


def pretrain_run(scale: Scale, folder: Path, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """The pretraining run: stored bytes beside those of be3f797, restores beside a full one."""
    wanted, gap = scale.snapshots[0], scale.gap
    trainer = codings.trainer_of("gpt", scale.pretrained, device, scale.lead + wanted * gap)
    trainer.train(scale.lead)
    began = time.perf_counter()
    before = Before()
    last: State = {}

    def state_of(number: int) -> State | None:
        nonlocal last
        if number == wanted or (time.perf_counter() - began > scale.pretrain_s and number > 2):
            return None
        trainer.train(gap)
        last = trainer.state()
        before.add(last)
        return last

    run = run_of(folder, state_of, device, scale.chunk_bytes)
    plain = gpu_train.nbytes(last)
    share = run.stored_bytes / plain / len(run.saved)
    restored = restore_figures(run, last, device)
    share_before, zstd_share = before.shares()
    found = {
        "plain_bytes": plain, "snapshots": len(run.saved), "gap": gap, "stored_bytes": run.stored_bytes,
        "stored_share": share, "share_by_be3f797": share_before, "over_before": share / share_before,
        "zstd_share": zstd_share, "restore": restored,
    }  # fmt: skip
    say(f"pretrain: {found}")
    run.repository.close()
    shutil.rmtree(folder)
    return found


class Before:
    """Bytes of some chunks of a run under the rules of be3f797.

    XOR planes, each in its best codec; a delta if it saves 1/32 and the chain stays within four full chunks; full once
    in nine saves, in turn.
    """

    def __init__(self) -> None:
        self._last: list[Any] = []
        self._sizes: list[Any] = []
        self._pool = ThreadPoolExecutor()

    def add(self, state: State) -> None:
        """Begin to measure a snapshot."""
        chunks = self._sample(state)
        self._sizes.append(self._pool.map(_sizes, chunks, self._last or [None] * len(chunks)))
        self._last = chunks

    def shares(self) -> tuple[float, float]:
        """Return stored bytes over plain bytes, and those of zstd -3 on each chunk, as DCP with zstd would store."""
        chains: dict[int, int] = {}
        stored = by_zstd = plain = 0
        for number, sizes in enumerate(self._sizes):
            for i, (full, delta, own, zstd) in enumerate(sizes):
                chain, turn = chains.get(i, 0), (number + i) % 9 == 0
                is_full = delta is None or turn or delta > full * 31 / 32 or chain + delta > 4 * full
                chains[i] = full if is_full else chain + delta
                stored += full if is_full else delta
                by_zstd, plain = by_zstd + zstd, plain + own
        return stored / plain, by_zstd / plain

    @staticmethod
    def _sample(state: State) -> list[Any]:
        """Return some chunks: the same number of each kind of tensor, spread evenly over its bytes."""
        found = []
        for group in state.values():
            whole = torch.cat([t.flatten()[: t.numel() // 262144 * 262144] for t in group.values()])
            whole = whole if len(whole) else torch.cat([t.flatten() for t in group.values()])
            count = max(1, len(whole) // 262144)
            for i in np.unique(np.linspace(0, count - 1, SAMPLED_CHUNKS // 3).astype(int)).tolist():
                found.append(whole[i * 262144 : (i + 1) * 262144].view(torch.int32).cpu().numpy().view(np.uint32))
        return found


def _sizes(chunk: Any, last: Any) -> tuple[int, int | None, int, int]:
    full = codings.coded_planes(chunk, planes.ROTATED)
    delta = None if last is None else codings.coded_planes(chunk ^ last, planes.ROTATED)
    return full, delta, chunk.nbytes, len(zstandard.ZstdCompressor(level=3).compress(chunk.tobytes()))


# -- all of them


def figures_of(sections: dict[str, Any]) -> dict[str, float]:
    """Return the figures of the sections that were run; of several RL runs the worst one counts."""
    measured = {name: found for name, found in sections.items() if "restore" in found}
    rl = [found for name, found in measured.items() if name.startswith("rl ")]
    dense = [found for name, found in measured.items() if name == "pretrain"]
    figures: dict[str, float] = {}
    if rl:
        figures["rl_run_over_entropy"] = max(found["over_entropy"] for found in rl)
        figures["rl_over_best_peer"] = max(found["over_best_peer"] for found in rl)
    if dense:
        figures["pretrain_over_before"] = dense[0]["over_before"]
    for name, runs in (("sparse", rl), ("dense", dense)):
        for which in ("worst", "mean"):
            for what in ("bytes", "time"):
                if runs:
                    figures[f"{name}_restore_{which}_{what}"] = max(f["restore"][f"{what}_{which}"] for f in runs)
            if runs:
                figures[f"{name}_restore_{which}"] = max(
                    figures[f"{name}_restore_{which}_{what}"] for what in ("bytes", "time")
                )
    return {name: round(value, 4) for name, value in figures.items()}


def measure(
    scale: Scale,
    folder: Path,
    note: Callable[[str, dict[str, Any]], None],
    say: Callable[[str], None],
) -> None:
    """Measure every section, and note each as it is done; none begins beyond the limit."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sections: dict[str, Callable[[], dict[str, Any]]] = {}
    for model in scale.models:
        sections[f"rl {model}"] = partial(rl_run, model, scale, folder / model, device, say)
        if model == "gpt":
            sections["pretrain"] = partial(pretrain_run, scale, folder / "pretrain", device, say)
    first = time.perf_counter()
    for name, section in sections.items():
        began = time.perf_counter()
        if began - first > scale.limit_s:
            note(name, {"status": f"skipped: over the limit of {scale.limit_s:.0f} s"})
            continue
        try:
            found = section()
        except Exception as error:  # noqa: BLE001  the other sections go on
            traceback.print_exc()
            found = {"status": f"failed: {type(error).__name__}: {error}"}
        note(name, found | {"seconds": round(time.perf_counter() - began, 1)})
        if device.type == "cuda":
            torch.cuda.empty_cache()
