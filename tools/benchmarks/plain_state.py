"""Plain Python values beside pickle: the stall of a save, the time of a restore, and the bytes of the next save."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.page import Figure
from snapstore import Repository, SnapshotManager

ROUNDS = 7


def states() -> dict[str, Any]:
    """The states by name; each is a list or a dict of plain values."""
    return {
        "300,000 tuples": [(i, f"name{i}", i * 0.5) for i in range(300_000)],
        "dict of 1,000,000 str -> int": {f"key{i}": i for i in range(1_000_000)},
        "100,000 nested dicts": [
            {"id": i, "tags": ["a", "b", str(i)], "pos": {"x": i * 0.1, "y": -i}} for i in range(100_000)
        ],
    }


def plain_state(folder: Path) -> list[Figure]:
    """Save and restore each state beside pickle, in turns; figures are ratios of medians."""
    figures: list[Figure] = []
    for name, value in states().items():
        with SnapshotManager(folder / str(len(figures)), run="plain") as manager:
            figures += _figures(name, {"data": value}, manager)
    return figures


def _figures(name: str, state: dict[str, Any], manager: SnapshotManager) -> list[Figure]:
    times: dict[str, list[float]] = {"dumps": [], "stall": [], "loads": [], "restore": []}
    packed = b""
    for step in range(ROUNDS):

        def dumps() -> None:
            nonlocal packed
            packed = pickle.dumps(state, 5)

        times["dumps"].append(_seconds(dumps))
        times["stall"].append(_seconds(lambda step=step: manager.save(step, state)))  # type: ignore[misc]
        manager.wait_until_finished()
        times["loads"].append(_seconds(lambda: pickle.loads(packed)))
        times["restore"].append(_seconds(lambda step=step: manager.restore(step)))  # type: ignore[misc]
    median = {what: statistics.median(seconds) for what, seconds in times.items()}
    first, unchanged = _stored(manager.repository, 0), _stored(manager.repository, 1)
    value = state["data"]
    if isinstance(value, dict):
        value["key500000"], value["a new key"] = -1, 1
    else:
        value.insert(len(value) // 2, value[0])
    manager.save(ROUNDS, state)
    manager.wait_until_finished()
    stall, restore = median["stall"] / median["dumps"], median["restore"] / median["loads"]
    edited = _stored(manager.repository, ROUNDS)
    return [
        Figure(f"plain_state_over_pickle, {name}: stall of a save / pickle.dumps", stall, "x", "<= 2", stall <= 2),
        Figure(f"plain_state_over_pickle, {name}: restore / pickle.loads", restore, "x"),
        Figure(
            f"plain state, {name}: stored by an unchanged save / by the first",
            unchanged / first,
            "x",
            "<= 0.01",
            unchanged <= first / 100,
        ),
        Figure(f"plain state, {name}: stored after one edit / by the first", edited / first, "x"),
    ]


def _stored(repository: Repository, step: int) -> int:
    return repository.snapshot(f"plain@{step}").stored_bytes


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
