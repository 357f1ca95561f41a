"""Neighbours: encode a full chunk as a delta to the chunk at the same place of the snapshot before.

In: the full chunks of snapshots that may be rewritten. Out: an estimate for the plan, then jobs for the encoder. No
chain becomes longer than `max_depth`, and no chunk becomes a delta to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import numpy as np

from ..arrays import Column
from ..catalog.history import View
from ..errors import DAMAGE, CapabilityError
from ..format.blob import XOR
from ..format.delta_chain import Chain, chains_of
from ..format.manifest import Manifest
from ..format.records import COMMITTED, ManifestRef, Snapshot
from ..save.bases import Base, Bases, place_of
from .chunk_encoder import Job, Reencoder, kinds_of
from .compact_plan import LiveBlobs


class Neighbours:
    """Finds the deltas to neighbours.

    Args:
        manifest_of: reads a manifest.
    """

    def __init__(
        self, live: LiveBlobs, encoder: Reencoder, max_depth: int, manifest_of: Callable[[ManifestRef], Manifest]
    ) -> None:
        self._live, self._encoder, self._max_depth, self._manifest_of = live, encoder, max_depth, manifest_of

    def estimate(self, view: View) -> None:
        """Note in the live blobs which full chunks may become deltas, and how long.

        One chunk of each tensor is encoded for it. A damaged chunk is skipped: its rewrite finds it.
        """
        for snapshot, ref, m, rows in self._live.full():
            with suppress(*DAMAGE, CapabilityError):
                self._estimate_part(ref, m, self._bases(view, snapshot, m, rows))

    def _estimate_part(self, ref: ManifestRef, m: Manifest, bases: dict[int, Chain]) -> None:
        """Estimate the full chunks of one manifest.

        Raises:
            IntegrityError, FormatError, CapabilityError: a chunk is damaged, or cannot be read here.
        """
        of_tensor = _tensors_of(m)
        samples: dict[int, tuple[Job, list[int]]] = {}  # tensor -> the chunk to encode, and the rows it stands for
        for row, job in zip(bases, self._jobs(m, bases), strict=True):
            samples.setdefault(int(of_tensor[row]), (job, []))[1].append(row)
        encoded = self._encoder.encode([job for job, _ in samples.values()])
        entries = [entry for _, made in encoded for entry in made.entries]
        for (job, rows), entry in zip(samples.values(), entries, strict=True):
            for row in rows if entry["transform"] == XOR else ():
                self._live.add_delta(ref, m, row, bases[row][0].digest, int(entry["length"]) / job.length)

    def jobs(self, view: View, snapshot: Snapshot, m: Manifest, rows: Iterable[int]) -> list[Job]:
        """Return jobs that encode full chunks of a manifest as deltas to their neighbours, as these are now."""
        chosen = np.array(list(rows), np.int64)
        return list(self._jobs(m, self._bases(view, snapshot, m, chosen))) if len(chosen) else []

    def _jobs(self, m: Manifest, bases: dict[int, Chain]) -> Iterator[Job]:
        sizes, layouts = kinds_of(m)
        rows = np.array(list(bases), np.int64)
        chains = chains_of(m.table, m.header.pack_names, rows, self._live.kept)
        for chain, base, size, layout in zip(chains, bases.values(), sizes[rows], layouts[rows], strict=True):
            yield Job(chain, base, int(size), int(layout))

    def _bases(self, view: View, snapshot: Snapshot, m: Manifest, rows: Column) -> dict[int, Chain]:
        """Return the chain of the chunk at the same place of the snapshot before, for every row that it may serve."""
        run = view.snapshots(snapshot.run)
        before = next((s for s in reversed(run) if s.seq < snapshot.seq), view.get(snapshot.parent or ""))
        if before is None or before.state != COMMITTED:
            return {}
        try:
            named = [self._manifest_of(ref) for ref in before.manifests if ref.part == m.header.part]
            children = (child for root in named for child in root.header.children if child.rank == m.header.rank)
            bases = Bases([Base(before, [*named, *map(self._manifest_of, children)])])
        except DAMAGE:
            return {}
        at = np.full(len(m.table), -1, np.int64)
        for entry in m.tensors:
            first, _ = bases.first_row(place_of(entry.path, entry.dtype, entry.shape))
            for box in entry.boxes if first >= 0 and len(entry.boxes) == 1 else ():
                at[box.first_chunk : box.first_chunk + box.chunks] = first + np.arange(box.chunks)
        rows = rows[(at[rows] >= 0) & (at[rows] < len(bases.table))]  # a damaged manifest may hold fewer
        rows = rows[bases.lengths[at[rows]] == m.table.lengths[rows]]
        found = chains_of(bases.table, bases.packs, at[rows], self._live.kept)
        digests = [digest.tobytes() for digest in m.table.digests[rows]]
        return {
            row: chain
            for row, digest, chain in zip(rows.tolist(), digests, found, strict=True)
            if len(chain) + self._live.heights.get(digest, 0) <= self._max_depth
            and all(link.digest != digest for link in chain)
        }


def _tensors_of(m: Manifest) -> Column:
    """Return the number of the tensor that every chunk of a manifest belongs to, (n,)."""
    numbers = np.full(len(m.table), -1, np.int64)
    for number, entry in enumerate(m.tensors):
        for box in entry.boxes:
            numbers[box.first_chunk : box.first_chunk + box.chunks] = number
    return numbers
