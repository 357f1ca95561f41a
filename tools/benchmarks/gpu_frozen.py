"""LoRA runs over one frozen base, for `tools/bench gpu --only frozen`: what each run stores, and what its saves take.

The base is a Llama in bf16 (3.9 GB). Each run has adapters of its own, with AdamW's state; every run saves the base,
too. "What changes" are the adapters and their state.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import gpu_limits as limits
from benchmarks.gpu_llama import copy_floor_s, most_used_bytes, release, stalled_s, tensors
from snapstore import SnapshotManager
from snapstore.engine.batches import Chunks
from snapstore.engine.registry import Engines
from snapstore.format.hashing import new_seed
from snapstore.save.replicas import spans

#: Hidden and intermediate size, layers: in bf16 3.9 GB, and for a dry run.
FULL, TINY = (2048, 5632, 38), (64, 128, 2)
RANK, RUNS, SAVES, WARM = 8, 10, 24, 4
State = dict[str, Any]


def base_of(shape: tuple[int, int, int], device: torch.device) -> State:
    """Return frozen weights."""
    hidden, intermediate, layers = shape
    generator = torch.Generator(device).manual_seed(1)

    def weights(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * 0.02).bfloat16()

    found = {"embed": weights(8192, hidden), "head": weights(8192, hidden)}
    for layer in range(layers):
        found |= {f"{layer}.{name}": weights(hidden, hidden) for name in "qkvo"}
        found |= {f"{layer}.{name}": weights(intermediate, hidden) for name in ("gate", "up", "down")}
    return found


class LoraRun:
    """Adapters over the query and value weights of a base, trained by AdamW on random gradients."""

    def __init__(self, base: State, seed: int, device: torch.device) -> None:
        self.base, self._generator = base, torch.Generator(device).manual_seed(seed)
        self.adapters: dict[str, torch.nn.Parameter] = {}
        for name, weight in base.items():
            if name[-2:] in (".q", ".v"):
                for side, shape in (("a", (RANK, weight.shape[1])), ("b", (weight.shape[0], RANK))):
                    values = torch.randn(shape, generator=self._generator, device=device) * 0.01
                    self.adapters[f"{name}.{side}"] = torch.nn.Parameter(values)
        self.optimizer = torch.optim.AdamW(self.adapters.values(), lr=1e-4)
        self.train()

    def train(self) -> None:
        """Take one step."""
        for value in self.adapters.values():
            value.grad = torch.randn(value.shape, generator=self._generator, device=value.device)
        self.optimizer.step()

    def own(self) -> State:
        """Return what changes."""
        adapters = {name: value.detach() for name, value in self.adapters.items()}
        return {"adapters": adapters, "optimizer": self.optimizer.state_dict()}

    def state(self) -> State:
        """Return the state that a user saves."""
        return {"model": self.base, **self.own()}


def device_bytes(state: State) -> int:
    """Return the bytes of the tensors of a state."""
    return sum(t.nbytes for t in tensors(state))


def stalls(run: LoraRun, folder: Path, device: torch.device) -> tuple[float, float]:
    """Return the median stalls of later saves with and without the base, taken in turn."""
    found: tuple[list[float], list[float]] = [], []
    with ExitStack() as stack:
        both = [SnapshotManager(folder / name, run="stalls", staging="device") for name in ("whole", "alone")]
        for snapshots in both:
            stack.enter_context(snapshots)
        for step in range(SAVES):
            for snapshots, state, took in zip(both, (run.state, run.own), found, strict=True):
                run.train()
                took.append(stalled_s(device, snapshots, step, state()))
                snapshots.wait_until_finished()
    return statistics.median(found[0][WARM:]), statistics.median(found[1][WARM:])


def digest_s(base: State, device: torch.device) -> float:
    """Return the time in which the device takes the digests of a base, in chunks of 1 MiB."""
    memories = [value.view(-1).view(torch.uint8) for value in base.values()]
    chunks = Chunks(memories, *spans(np.array([len(memory) for memory in memories], np.int64)))
    engines = Engines(new_seed())
    engine = engines.on(device)
    try:
        return limits.median(device, lambda: engine.start_digests(chunks)())
    finally:
        engines.close()


def figures(folder: Path, device: torch.device, say: Callable[[str], None], *, tiny: bool) -> dict[str, Any]:
    """Return what the first save of the tenth run stores and takes, and the stalls of later saves."""
    base = base_of(TINY if tiny else FULL, device)
    options: dict[str, Any] = {"staging": "device"} if device.type == "cuda" else {}
    found: dict[str, Any] = {"base_bytes": device_bytes(base), "stored_bytes": [], "first_memory_bytes": []}
    for number in range(RUNS):
        run = LoraRun(base, 100 + number, device)
        own = device_bytes(run.own())
        limits.synchronize(device)
        release(device)
        with most_used_bytes(device) as most:
            most()
            before = most()
            with SnapshotManager(folder / "runs", run=f"lora{number}", state=run.state(), **options) as snapshots:
                snapshots.wait_until_finished()  # a training has loaded its data meanwhile
                saved = snapshots.save(0, run.state()).result()
            assert saved is not None
            found["stored_bytes"].append(saved.stored_bytes)
            found["first_memory_bytes"].append(most() - before)
    found |= {"own_bytes": own, "stored_over_own": found["stored_bytes"][-1] / own}
    found["memory_over_allowed"] = found["first_memory_bytes"][-1] / (2.1 * own + 5e8)
    say(f"10 runs: {found}")
    if device.type == "cuda":
        whole, alone = stalls(run, folder, device)
        found |= {"stall_s": whole, "stall_without_base_s": alone, "digest_s": digest_s(base, device)}
        found |= {"copy_floor_s": copy_floor_s(device, device_bytes(run.state()))}
        found["stall_beyond_digest_s"] = whole - alone - found["digest_s"]
        say(f"stalls: {found}")
    return found
