"""Many small tensors in host memory: a Llama of 138 layers, beside copies of its tensors, torch.save and DCP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import Figure
from benchmarks.ranks_worker import Llama
from snapstore import SnapshotManager

ROUNDS, WARM = 6, 2
SHAPE = (64, 176, 138)  # hidden and inner width, layers: 4,980 tensors, most of 16 and 44 KiB
dcp: Any = import_module("torch.distributed.checkpoint")


def small_tensors(folder: Path) -> list[Figure]:
    """Save and restore each state of a training run in turns; figures are ratios of medians."""
    torch.manual_seed(0)
    model = Llama(*SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    times: dict[str, list[float]] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        began = time.perf_counter()
        call()
        times.setdefault(name, []).append(time.perf_counter() - began)

    count = 0
    with SnapshotManager(folder / "repo", run="small") as manager:
        for step in range(ROUNDS):
            model(torch.randint(8192, (1, 16))).backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            count = sum(1 for _ in _tensors(state))
            note("copies", lambda: [tensor.clone() for tensor in _tensors(state)])  # noqa: B023
            note("stall", lambda: manager.save(step, state))  # noqa: B023
            note("rest", manager.wait_until_finished)
            note("restore", lambda: manager.restore(step))  # noqa: B023
            place = folder / f"{step}"
            note("dcp.save", lambda: dcp.save(state, checkpoint_id=place))  # noqa: B023
            note("dcp.load", lambda: dcp.load(state, checkpoint_id=place))  # noqa: B023
            note("torch.save", lambda: torch.save(state, folder / "file"))  # noqa: B023
            note("torch.load", lambda: torch.load(folder / "file"))
            if step:
                note("diff", lambda: manager.repository.diff(f"small@{step - 1}", f"small@{step}"))  # noqa: B023
    took = {name: statistics.median(seconds[WARM:]) for name, seconds in times.items()}
    name = f"{count:,} small tensors"
    return [
        Figure(f"{name}: stall of an asynchronous save / a copy of each tensor", took["stall"] / took["copies"], "x"),
        Figure(f"{name}: until a save is durable / dcp.save", (took["stall"] + took["rest"]) / took["dcp.save"], "x"),
        Figure(f"{name}: the same / torch.save", (took["stall"] + took["rest"]) / took["torch.save"], "x"),
        Figure(f"{name}: restore / dcp.load", took["restore"] / took["dcp.load"], "x"),
        Figure(f"{name}: restore / torch.load", took["restore"] / took["torch.load"], "x"),
        Figure(f"{name}: diff of two snapshots / a restore of both", took["diff"] / (2 * took["restore"]), "x"),
    ]


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list):
        for child in state.values() if isinstance(state, dict) else state:
            yield from _tensors(child)
