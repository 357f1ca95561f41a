"""Delta: which bases a save may use, which chunk is the base of which, and when a delta pays.

In: the manifests of the base snapshots. Out: for every chunk its row of known references, or its candidate base. A
chunk that a base snapshot holds anywhere is referenced (dedup); else the chunk at the same place of the same tensor is
its base, if the chain stays short enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes
from ..format.chunk_table import ChunkTable
from ..format.manifest import Manifest
from ..format.records import MAX_COUNTED, Snapshot

Place = tuple[str, tuple[str | int, ...], str, tuple[int, ...]]  # part, path, dtype, shape


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    """One snapshot that a save may build on."""

    snapshot: Snapshot
    manifests: Sequence[Manifest]


class Bases:
    """All that a save may reference, as one chunk table over one list of packs.

    Args:
        damaged: names of packs that nothing is to be built upon.

    Attributes:
        table: the chunks of all base snapshots; `ref_packs` counts in `packs`.
        usable: (n,) bool, which of them need no pack that is missing or damaged.
        packs, pack_sizes: hex names and sizes [bytes].
        snapshot: the first base: the one whose plain bytes a caller may still hold in memory.
    """

    def __init__(self, bases: Sequence[Base] = (), damaged: Collection[str] = ()) -> None:
        self.packs: list[str] = []
        self.pack_sizes: list[int] = []
        self.snapshot = bases[0].snapshot if bases else None
        self.generation = (self.snapshot.generation + 1) % MAX_COUNTED if self.snapshot else 0
        self._places: dict[Place, tuple[int, bool]] = {}
        known: dict[str, int] = {}
        tables: list[ChunkTable] = []
        rows = 0
        for i, base in enumerate(bases):
            for manifest in base.manifests:
                tables.append(self._adopt(manifest, known))
                for entry in manifest.tensors:
                    place = (manifest.header.part, tuple(entry.path), entry.dtype, tuple(entry.shape))
                    if len(entry.boxes) == 1:
                        self._places.setdefault(place, (rows + entry.boxes[0].first_chunk, i == 0))
                rows += len(manifest.table)
        self.table = ChunkTable.concatenate(tables)
        self.depths = self.table.depths
        self.lengths = self.table.lengths
        self.chain_bytes = self.table.chain_bytes
        bad = np.isin(self.table.ref_packs, [number for name, number in known.items() if name in damaged])
        self.usable = ~np.logical_or.reduceat(bad, self.table.starts[:-1]) if rows else np.zeros(0, bool)
        keys, usable = self._keys(self.table.digests), np.flatnonzero(self.usable)
        self._order = usable[np.argsort(keys[usable], kind="stable")]
        self._sorted = keys[self._order]

    def _adopt(self, manifest: Manifest, known: dict[str, int]) -> ChunkTable:
        """The manifest's table, its packs renumbered into `self.packs`."""
        numbers = []
        for name, size in zip(manifest.header.pack_names, manifest.header.pack_size_list, strict=True):
            if name not in known:
                known[name] = len(self.packs)
                self.packs.append(name)
                self.pack_sizes.append(size)
            numbers.append(known[name])
        renumber = np.array(numbers or [0], np.uint32)
        return dataclasses.replace(manifest.table, ref_packs=renumber[manifest.table.ref_packs])

    @staticmethod
    def _keys(digests: Bytes) -> npt.NDArray[np.uint64]:
        """The first half of every digest, as a sort key."""
        return np.ascontiguousarray(digests[:, :8]).view(np.uint64).reshape(-1)

    def find(self, digests: Bytes) -> npt.NDArray[np.int64]:
        """The row of every digest (n, 16) among all bases, -1 where unknown."""
        if not len(self._sorted) or not len(digests):
            return np.full(len(digests), -1, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, self._keys(digests)), len(self._sorted) - 1)
        rows = self._order[at]
        # Equal halves of different digests: 2^-64 a pair; taking such a chunk for new costs bytes, never truth.
        return np.where((self.table.digests[rows] == digests).all(axis=1), rows, -1)

    def first_row(self, place: Place) -> tuple[int, bool]:
        """(row of the first chunk of the tensor at `place`, whether the first base has it); (-1, False) if none has."""
        return self._places.get(place, (-1, False))
