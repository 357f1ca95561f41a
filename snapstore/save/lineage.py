"""Lineage: what this process restored or saved last, which its next saves go on from.

In: snapshots that were restored or committed here. Out: the parent of the next save of a run, and the manifests of each
run's last save, so that the next one need not read them again. Any thread may use it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..format.records import Snapshot

if TYPE_CHECKING:
    from ..format.manifest import Manifest


class Lineage:
    """The last snapshots that one Repository restored or committed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}  # run -> id of what its next save goes on from
        self._restored: str | None = None  # what any run goes on from
        self._restored_for: set[str] = set()  # runs that have saved since
        self._manifests: dict[str, dict[str, Manifest]] = {}  # run -> manifests of its last save, by SHA-256

    def parent(self, run: str) -> str | None:
        """Return the id that the next save of a run goes on from: a restore since its last save, else that save."""
        with self._lock:
            if self._restored is not None and run not in self._restored_for:
                return self._restored
            return self._last.get(run)

    def cached_manifests(self) -> Mapping[str, Manifest]:
        """Return the manifests of every run's last save, by SHA-256."""
        with self._lock:
            return {name: m for of_run in self._manifests.values() for name, m in of_run.items()}

    def note_restored(self, snapshot: Snapshot) -> None:
        """The next save of every run goes on from this snapshot."""
        with self._lock:
            self._restored, self._restored_for = snapshot.id, set()

    def go_on_from(self, run: str, snapshot: Snapshot) -> None:
        """The next save of one run goes on from this snapshot; other runs keep their parents."""
        with self._lock:
            self._last[run] = snapshot.id
            self._restored_for.add(run)

    def note_saved(self, snapshot: Snapshot, manifests: dict[str, Manifest]) -> None:
        """The next save of the run goes on from this snapshot, with these manifests by SHA-256."""
        self.go_on_from(snapshot.run, snapshot)
        with self._lock:
            self._manifests[snapshot.run] = manifests
