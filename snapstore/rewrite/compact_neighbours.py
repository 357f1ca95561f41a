"""Neighbours: encode a full chunk as a delta to its neighbour, the chunk at the same place of the previous snapshot.

In: the full chunks of snapshots that may be rewritten. Out: an estimate for the plan, then jobs for the encoder. No
chain costs a restore more than `restore_cost`, and no chunk becomes a delta to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from ..arrays import Column
from ..catalog.history import View
from ..errors import DAMAGE, CapabilityError
from ..format.blobs.blob import FULL
from ..format.manifests.delta_chain import chains_of
from ..format.manifests.delta_choice import ChainCosts
from ..format.manifests.manifest import Manifest
from ..format.records import COMMITTED, ManifestRef, Snapshot
from ..save.known_chunks import Base, Bases, place_of
from .chunk_encoder import Job, Reencoder, kinds_of
from .compact_plan import HEIGHT_UNITS, LiveBlobs

#: The most manifests that are kept in memory while neighbours are looked for [stored bytes].
RECENT_BYTES = 4 * 1024 * 1024


class Neighbours:
    """Finds the deltas to neighbours.

    Args:
        manifest_of: reads a manifest.
    """

    def __init__(
        self, live: LiveBlobs, encoder: Reencoder, restore_cost: float, manifest_of: Callable[[ManifestRef], Manifest]
    ) -> None:
        self._live, self._encoder, self._manifest_of = live, encoder, manifest_of
        self._restore_cost = restore_cost
        self._recent: dict[ManifestRef, Manifest] = {}

    def estimate(self, view: View) -> None:
        """Note in the live blobs which full chunks may become deltas, and the estimated lengths of these deltas.

        It encodes one chunk of each tensor. A damaged chunk is skipped: the rewrite of its snapshot reports it.
        """
        for snapshot, ref, rows in self._live.full:
            with suppress(*DAMAGE, CapabilityError):
                if len(rows):
                    self._estimate_part(view, snapshot, ref, rows)
        self._recent.clear()

    def _estimate_part(self, view: View, snapshot: Snapshot, ref: ManifestRef, rows: Column) -> None:
        """Estimate the full chunks of one manifest.

        Raises:
            IntegrityError, FormatError, CapabilityError: a chunk is damaged, or cannot be read here.
        """
        m = self._read(ref)
        rows, bases, at = self._bases(view, snapshot, m, rows)
        if not len(rows):
            return
        tensors = m.owners[rows]
        order = np.argsort(tensors, kind="stable")
        groups = sorted(np.split(order, np.flatnonzero(np.diff(tensors[order])) + 1), key=lambda group: int(group[0]))
        samples = np.array([group[0] for group in groups])
        jobs = self._jobs(m, rows[samples], bases, at[samples])
        entries = [entry for _, made in self._encoder.encode(jobs) for entry in made.entries]
        shares = [int(entry["length"]) / job.length for job, entry in zip(jobs, entries, strict=True)]
        deltas = [i for i, entry in enumerate(entries) if entry["transform"] != FULL]
        if deltas:
            chosen = np.concatenate([groups[i] for i in deltas])
            digests = bases.table.ref_digests[bases.table.starts[at[chosen]]]
            shares_of = np.repeat([shares[i] for i in deltas], [len(groups[i]) for i in deltas])
            self._live.add_deltas(ref, m, rows[chosen], digests, shares_of)

    def jobs(self, view: View, snapshot: Snapshot, m: Manifest, rows: Iterable[int]) -> list[Job]:
        """Return jobs that encode full chunks of a manifest as deltas to their neighbours, by the records in `view`."""
        chosen = np.array(list(rows), np.int64)
        return self._jobs(m, *self._bases(view, snapshot, m, chosen)) if len(chosen) else []

    def _jobs(self, m: Manifest, rows: Column, bases: Bases, at: Column) -> list[Job]:
        """Return jobs that encode chunks of a manifest as deltas to the chunks in the rows `at` of bases."""
        sizes, layouts = kinds_of(m)
        chains = chains_of(m.table, m.header.pack_names, rows, self._live.kept)
        bases_of = chains_of(bases.table, bases.packs, at, self._live.kept)
        columns = (sizes[rows].tolist(), layouts[rows].tolist(), self._above(m, rows).tolist())
        return [Job(*one) for one in zip(chains, bases_of, *columns, strict=True)]

    def _read(self, ref: ManifestRef) -> Manifest:
        """Return a manifest. Recent ones are kept: a snapshot is soon read again, as the previous one of the next."""
        m = self._recent.pop(ref, None) or self._manifest_of(ref)
        self._recent[ref] = m
        while len(self._recent) > 1 and sum(one.size_bytes for one in self._recent) > RECENT_BYTES:
            del self._recent[next(iter(self._recent))]
        return m

    def _bases(self, view: View, snapshot: Snapshot, m: Manifest, rows: Column) -> tuple[Column, Bases, Column]:
        """Find the rows of a manifest whose neighbour may be their base, and these neighbours.

        Returns:
            (rows (k,) of the manifest, the chunks of the previous snapshot, rows (k,) of the neighbours among these).
        """
        nothing = rows[:0], Bases(), rows[:0]
        run = view.snapshots(snapshot.run)
        before = next((s for s in reversed(run) if s.seq < snapshot.seq), view.get(snapshot.parent or ""))
        if before is None or before.state != COMMITTED:
            return nothing
        try:
            named = [self._read(ref) for ref in before.manifests if ref.part == m.header.part]
            children = (child for root in named for child in root.header.children if child.rank == m.header.rank)
            bases = Bases([Base(before, [*named, *map(self._read, children)])])
        except DAMAGE:
            return nothing
        at = np.full(len(m.table), -1, np.int64)
        for entry in m.tensors:
            first, _ = bases.first_row(place_of(entry.path, entry.dtype, entry.shape))
            for box in entry.boxes if first >= 0 and len(entry.boxes) == 1 else ():
                at[box.first_chunk : box.first_chunk + box.chunks] = first + np.arange(box.chunks)
        table = bases.table
        rows = rows[(at[rows] >= 0) & (at[rows] < len(table))]  # a damaged manifest may hold fewer
        rows = rows[bases.lengths[at[rows]] == m.table.lengths[rows]]
        digests, counts = m.table.digests[rows], table.ref_counts[at[rows]].astype(np.int64)
        own = (table.ref_digests[table.refs_of(at[rows])] == np.repeat(digests, counts, axis=0)).all(axis=1)
        limits = bases.costs.delta_limits(at[rows], self._restore_cost, self._above(m, rows))
        fits = limits > 0
        fits[np.repeat(np.arange(len(rows)), counts)[own]] = False  # no chunk becomes a delta to itself
        return rows[fits], bases, at[rows[fits]]

    def _above(self, m: Manifest, rows: Column) -> Column:
        """Return the most that a restore pays for links on top of full chunks of a manifest, (k,)."""
        heights = self._live.heights.numbers_of(m.table.digests[rows])
        return np.asarray(heights * HEIGHT_UNITS * ChainCosts(m.table).full[rows])
