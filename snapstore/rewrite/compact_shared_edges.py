"""Shared edges: find out whether a base that several chunks share is worth freeing, by encoding all of these chunks.

In: cuts of several edges (compact_plan.py). Out: `Cut.pays`. The new blobs are dropped: each snapshot encodes its own
chunks when it is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..errors import DAMAGE, CapabilityError
from ..format.manifests.delta_chain import Digests, chains_of
from ..format.manifests.manifest import Manifest
from ..format.records import ManifestRef
from ..text import log
from .chunk_encoder import Job, Reencoder, kinds_of
from .compact_plan import Cut, Edge, max_cost, room


class SharedEdges:
    """Measures cuts of several edges.

    Args:
        kept: digests of the chunks that snapshots hold.
        manifest_of: reads a manifest.
    """

    def __init__(self, encoder: Reencoder, kept: Digests, manifest_of: Callable[[ManifestRef], Manifest]) -> None:
        self._encoder, self._kept, self._manifest_of = encoder, kept, manifest_of

    def measure(self, cuts: Sequence[Cut], heartbeat: Callable[[], object]) -> None:
        """Set `pays` of each cut of several edges that has none yet; call `heartbeat` after each."""
        unknown = list({id(cut): cut for cut in cuts if len(cut.edges) > 1 and cut.pays is None}.values())
        jobs = self._jobs_of(edge for cut in unknown for edge in cut.edges.values() if not edge.chain)
        for cut in unknown:
            cut.pays = self._pays(cut, jobs)
            heartbeat()

    def _jobs_of(self, edges: Iterable[Edge]) -> dict[bytes, Job]:
        """Return jobs that encode chunks at edges, by digest; none for a damaged manifest. Read each manifest once."""
        of_manifest: dict[ManifestRef, list[Edge]] = {}
        for edge in edges:
            of_manifest.setdefault(edge.source[0], []).append(edge)
        jobs: dict[bytes, Job] = {}
        for ref, own in of_manifest.items():
            try:
                m = self._manifest_of(ref)
                sizes, layouts = kinds_of(m)
            except DAMAGE as error:
                log.warning("chunks that share bases stay as they are: %s", error)
                continue
            rows = np.array([row for _, row in (edge.source for edge in own)], np.int64)
            chains = chains_of(m.table, m.header.pack_names, rows, self._kept)
            for edge, chain, size, layout in zip(own, chains, sizes[rows], layouts[rows], strict=True):
                at = next(i for i, link in enumerate(chain) if link.digest == edge.digest)
                base = next((i for i in range(at + 1, len(chain)) if chain[i].is_kept), len(chain))
                jobs[edge.digest] = Job(chain[at:], chain[base:], int(size), int(layout))
        return jobs

    def _pays(self, cut: Cut, found: Mapping[bytes, Job]) -> bool:
        """Encode all edges of a cut; return whether the new blobs take less than they free."""
        jobs: list[Job] = []
        for digest, edge in cut.edges.items():
            if edge.chain:
                continue
            if digest not in found:
                return False
            job, has_root = found[digest], jobs and edge is not cut.root
            jobs.append(replace(job, base=job.base or jobs[0].chain) if has_root else job)
        try:
            encoded = self._encoder.encode(jobs)
            needed = sum(int(room(made.entries["length"].astype(np.int64)).sum()) for _, made in encoded)
        except (*DAMAGE, CapabilityError) as error:
            log.warning("chunks that share bases stay as they are: %s", error)
            return False
        return needed <= max_cost(cut.freed_bytes)
