"""A manager with a mirror, in tests: how it is made, what it saves, and what a store then has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kit.damage import three
from kit.repositories import OPTIONS, opened, values
from snapstore import SnapshotManager
from snapstore.storage.memory import MemoryStore


def manager(fast: Any, slow: Any, **options: Any) -> SnapshotManager:
    """Return a manager of run "a"."""
    return SnapshotManager(fast, run="a", mirror=slow, options=OPTIONS, ranks=False, **options)


def mirrored() -> tuple[MemoryStore, MemoryStore]:
    """Return a store with a@0 to a@2, and a mirror that has them."""
    fast, slow = three(), MemoryStore()
    with opened(fast) as repository:
        repository.copy(to=slow)
    return fast, slow


def saved(snapshots: SnapshotManager, steps: Iterable[int]) -> None:
    """Save steps of run "a", and wait until they are committed."""
    for step in steps:
        snapshots.save(step, values("a", step), metadata=["a", step], force=True)
    snapshots.wait_until_finished()


def steps_in(store: Any) -> list[int]:
    """Return the steps of run "a" that are committed in a store."""
    with opened(store) as repository:
        return [snapshot.step for snapshot in repository.snapshots("a")]
