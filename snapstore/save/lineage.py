"""Lineage: the parent of a run's next save.

In: the snapshots that this process committed, or that a manager restored for its run. Out: the parent of the next save
of a run, and the manifests of the last saves of a few runs, so that the next ones need not read them again. Any thread
may use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..format.records import ManifestRef, Snapshot

if TYPE_CHECKING:
    from ..format.manifests.manifest import Manifest


#: The manifests of the runs that were saved last are kept, of so many. A process may save thousands of runs.
CACHED_RUNS = 8


class Lineage:
    """The parents of the next saves of one Repository, by run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}  # run -> id of the parent of its next save
        self._saved: dict[str, str] = {}  # run -> id of the last save, until a restore
        self._seqs: dict[str, Callable[[], int]] = {}  # run -> what gives the lowest sequence number of its next save
        self._manifests: dict[str, dict[str, Manifest]] = {}  # run -> manifests of its last save, by SHA-256
        self._named: dict[str, list[ManifestRef]] = {}  # run -> the manifests that the record of that save names

    def parent(self, run: str) -> str | None:
        """Return the id of the parent of a run's next save; None if nothing was noted."""
        with self._lock:
            return self._last.get(run)

    def saved(self, run: str) -> str | None:
        """Return the id of a run's last save, unless the run has been restored since."""
        with self._lock:
            return self._saved.get(run)

    def first_seq(self, run: str) -> int:
        """Return the lowest sequence number that a run's next save may take."""
        with self._lock:
            lowest = self._seqs.get(run)
        return lowest() if lowest is not None else 0

    def number_from(self, run: str, lowest: Callable[[], int]) -> None:
        """Let a run's next saves take sequence numbers from that on which `lowest` returns; it must not block."""
        with self._lock:
            self._seqs[run] = lowest

    def cached_manifests(self) -> Mapping[str, Manifest]:
        """Return the manifests of the last saves of a few runs, by SHA-256."""
        with self._lock:
            return {name: m for of_run in self._manifests.values() for name, m in of_run.items()}

    def own_children(self, run: str) -> tuple[Sequence[ManifestRef], Sequence[Manifest]]:
        """Return the manifests that the record of a run's last save names, and the children that this rank wrote."""
        with self._lock:
            found = self._manifests.get(run, {}).values()
            return self._named.get(run, ()), [m for m in found if m.header.world_size and not m.header.children]

    def go_on_from(self, run: str, snapshot: Snapshot) -> None:
        """Make this snapshot the parent of the run's next save."""
        with self._lock:
            self._last[run] = snapshot.id
            self._saved.pop(run, None)

    def note_saved(self, snapshot: Snapshot, manifests: dict[str, Manifest]) -> None:
        """Make this snapshot, with these manifests by SHA-256, the parent of the run's next save."""
        self.go_on_from(snapshot.run, snapshot)
        with self._lock:
            self._manifests.pop(snapshot.run, None)  # else a run keeps its place in the dict
            self._manifests[snapshot.run], self._named[snapshot.run] = manifests, snapshot.manifests
            while len(self._manifests) > CACHED_RUNS:
                oldest = next(iter(self._manifests))
                del self._manifests[oldest], self._named[oldest]
            self._saved[snapshot.run] = snapshot.id
