"""compact: free bytes that gc cannot: unneeded bytes in needed packs, and chunks kept only as a delta's base.

In: the committed snapshots. Out: their next revisions (base.py), and a result. Two things are rewritten:

    chunks    If the chain of a chunk leads through chunks that no snapshot holds any more, the chunk is encoded again,
              full or as a delta to a chunk that is kept (compact_shared_edges.py: several chunks share such a base). A
              full chunk may become a delta to the same place of the previous snapshot (compact_neighbours.py). Both
              happen only if they free more than they cost.
    packs     The packs with the largest dead share are emptied, until few bytes in all packs together are dead. Their
              live blobs are copied unchanged. Of blobs with equal bytes all but one count as dead: they are shared.

First comes a plan over all snapshots (compact_plan.py), which takes the most profitable changes first. Then each
snapshot is rewritten under a session of its own. Every chunk is rebuilt and compared with its digest before it is
encoded, and its new blob is decoded and compared before it is packed. The next run finishes the work of a run that
died.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..arrays import Column
from ..catalog.history import View
from ..context import Context
from ..errors import DAMAGE, CapabilityError, SnapstoreError
from ..format.blobs.blob import FULL
from ..format.blobs.pack import ENTRY
from ..format.keys import manifest_key, pack_key
from ..format.manifests.delta_chain import Chain, Link, chains_of, cost_of, edge_of
from ..format.manifests.delta_choice import MAX_LINKS
from ..format.manifests.manifest import Manifest
from ..format.records import COMMITTED, Snapshot
from ..protocol.notes import in_quarantine
from ..protocol.revisions import CONFLICT_ATTEMPTS
from ..storage import progress
from ..text import brief, log
from .base import NewTable, StaleManifest, Work, moved, target_of
from .blob_rewriting import BlobRewriting
from .chunk_encoder import Job, Reencoder, kinds_of
from .compact_neighbours import Neighbours
from .compact_plan import CompactPlan, LiveBlobs, max_cost, room, rows_of
from .compact_shared_edges import SharedEdges
from .stored_blobs import batches, lengths_of, names_of


@dataclass(slots=True)
class CompactResult:
    """The result of a compact (of a dry run all numbers are estimates).

    Attributes:
        rewritten: new revisions of the snapshots that changed (of a dry run: the revisions as they are).
        skipped: snapshots that needed nothing, or were forgotten meanwhile.
        failed: (snapshot, why) of the snapshots that could not be rewritten; they are unchanged.
        encoded: chunks encoded again.
        moved: blobs copied as they were.
        bytes_read: stored bytes read from packs.
        bytes_written: stored bytes of the new blobs.
        bytes_before, bytes_after: size of the packs and manifests that committed snapshots need; a gc leaves only them.
    """

    rewritten: list[Snapshot] = field(default_factory=list)
    skipped: list[Snapshot] = field(default_factory=list)
    failed: list[tuple[Snapshot, str]] = field(default_factory=list)
    encoded: int = 0
    moved: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    dry_run: bool = False

    __repr__ = brief

    @property
    def freed_bytes(self) -> int:
        """Return how many bytes less a gc leaves than before the compact."""
        return self.bytes_before - self.bytes_after


def compact(
    context: Context,
    *,
    only: Sequence[Snapshot] | None = None,
    max_repack_bytes: int | None = None,
    dry_run: bool = False,
) -> CompactResult:
    """Rewrite snapshots where that pays. One that cannot be rewritten is reported; the others are rewritten.

    Args:
        only: rewrite no other snapshots; None: all committed ones.
        max_repack_bytes: the most bytes of blobs to write; the most profitable changes come first. None: no limit.

    Raises:
        IntegrityError: a record is damaged or missing, so nothing tells which blobs are needed.
        StorageError: the store failed, or a record cannot be read; the snapshots before that are rewritten.
    """
    named = None if only is None else {snapshot.id for snapshot in only}
    for _ in range(CONFLICT_ATTEMPTS):
        view = context.index.refresh()
        view.require_all_records("compact", "nothing was rewritten")
        chosen = [s for s in view.snapshots() if named is None or s.id in named]
        live = LiveBlobs(
            context.store, context.engines.digest_seed, view, {s.id for s in chosen}, in_quarantine(context.store)
        )
        now = context.index.refresh() if live.damaged else view
        if {s.key for s in now.snapshots()}.issuperset(s.key for s in view.snapshots() if s.id in live.damaged):
            break  # the unreadable manifests were not replaced and collected meanwhile: they are damaged
    before = needed_bytes(context, view)
    with _Compacting(context, live, max_repack_bytes, dry_run) as compacting:
        with progress.whole(0):  # the samples that it reads are no part of what is rewritten
            plan = compacting.choose(view)
        sound = [s for s in chosen if s.id not in live.damaged]
        if plan.cuts or plan.emptied:
            compacting.run(sound)
        else:
            compacting.skipped += sound
    compacting.failed += [(s, live.damaged[s.id]) for s in chosen if s.id in live.damaged]
    result = CompactResult(
        compacting.rewritten,
        compacting.skipped,
        compacting.failed,
        len(compacting.encoded),
        len(compacting.made.keys() - compacting.encoded),
        compacting.bytes_read + compacting.encoder.bytes_read,
        compacting.spent,
        before,
        before,
        dry_run,
    )
    if dry_run:
        result.encoded, result.moved, result.bytes_written = plan.encoded, plan.moved, plan.cost_bytes
        result.bytes_after = before - plan.gain_bytes
    elif compacting.rewritten:
        result.bytes_after = needed_bytes(context, context.index.refresh())
    return result


def needed_bytes(context: Context, view: View) -> int:
    """Return the bytes of all packs and manifests that committed snapshots need, as far as manifests can be read."""
    lists = {manifest_key(s.manifest_list) for s in view.snapshots() if s.manifest_list}
    sizes = context.store.sizes(lists)
    refs = [ref for snapshot in view.snapshots() for ref in snapshot.manifests]
    for ref, header in zip(refs, context.index.headers(refs), strict=True):
        sizes[ref.key] = ref.size_bytes
        if not isinstance(header, SnapstoreError):
            sizes.update({child.key: child.size_bytes for child in header.children})
            sizes.update(zip(map(pack_key, header.pack_names), header.pack_size_list, strict=True))
    return sum(sizes.values())


class _Compacting(BlobRewriting):
    """Compacts the snapshots of one repository.

    Attributes:
        encoder: encodes chunks again, and counts the bytes that it reads for that.
        spent: bytes of blobs written.
        encoded: names of the blobs that were encoded; the other new ones are copies.
    """

    verb = "compact"

    def __init__(self, context: Context, live: LiveBlobs, max_bytes: int | None, dry_run: bool) -> None:
        super().__init__(context, context.engines.cpu, states=(COMMITTED,), dry_run=dry_run)
        self._live, self._restore_cost = live, context.options.restore_cost
        self._max_bytes = float("inf") if max_bytes is None else max_bytes
        self.encoder = Reencoder(context)
        self._neighbours = Neighbours(live, self.encoder, self._restore_cost, self.manifest_of)
        self._shared_edges = SharedEdges(self.encoder, live.kept, self.manifest_of)
        self._plan = CompactPlan(live.kept)
        self._to_move = 0  # bytes planned to be moved, and not moved yet
        self.spent = 0
        self.encoded: set[bytes] = set()
        self._chains: dict[bytes, Chain] = {}  # digest -> how the chunk is rebuilt from now on
        self._packs: set[str] = set()  # packs that these chains need, and perhaps more
        self._fresh: dict[bytes, Chain] = {}  # chains that the running session adds to `_chains`
        self._old: dict[bytes, Chain] = {}  # how these chunks were rebuilt before

    # -- choose

    def choose(self, view: View) -> CompactPlan:
        """Return the plan: the chunks and packs that are worth rewriting."""
        self._neighbours.estimate(view)
        self._plan = self._live.plan(self._max_bytes)
        self._to_move = self._plan.moved_bytes
        return self._plan

    def stale(self, m: Manifest, entries: npt.NDArray[np.void]) -> Column:
        """Return the references into packs that are emptied, and to chunks at planned edges."""
        emptied = np.array([name in self._plan.emptied for name in m.header.pack_names] or [False])
        stale = emptied[m.table.ref_packs] | self._plan.edges.has(m.table.ref_digests)
        return np.flatnonzero(stale & ~self.in_quarantine(m))

    def stays(self, name: str, entries: npt.NDArray[np.void]) -> Column:
        """Return all blobs of a pack, unless it is emptied."""
        return np.full(len(entries), name not in self._plan.emptied)

    # -- write

    def begin(self, work: Work, parts: Sequence[StaleManifest]) -> None:
        """Forget new chains that the previous session has not published, and those in packs that a gc may delete."""
        self._fresh, self._old = {}, {}
        unsafe = self._packs - self.safe(work, self._packs)  # of other snapshots, which may be gone
        if unsafe:
            self._chains = {
                digest: chain
                for digest, chain in self._chains.items()
                if not any(link.place and link.place.pack in unsafe for link in chain)
            }
            self._packs -= unsafe

    def write(self, work: Work, part: StaleManifest) -> NewTable | None:
        """Pack chunks and blobs so that every chain leads only through kept chunks, in packs that stay."""
        table, packs = part.manifest.table, part.manifest.header.pack_names
        rows = rows_of(table, part.stale)
        chains = list(chains_of(table, packs, rows, self._plan.kept))
        self._encode_part(work, part.manifest, rows, chains)
        changed = [self._resolved(chain) for chain in chains]
        self._move_all(work, changed)
        changed = [[moved(link, work) for link in chain] for chain in changed]
        return target_of(part.manifest, rows, changed) if changed != chains else None

    def published(self, work: Work) -> None:
        """Let later snapshots build on the new blobs and the new chains."""
        super().published(work)
        for digest, chain in self._fresh.items():
            self._chains[digest] = [
                replace(link, place=work.places[link.key], key=b"") if link.key else link for link in chain
            ]
            self._packs.update(link.place.pack for link in self._chains[digest] if link.place)

    def _known(self, digest: bytes) -> Chain | None:
        return self._fresh.get(digest) or self._chains.get(digest)

    def _resolved(self, chain: Chain) -> Chain:
        """Return a chain that uses, for every chunk in it, the chunk's new chain if there is one that fits."""
        edge = edge_of(chain)
        if edge is None and chain[-1].digest in self._plan.deltas:
            edge = len(chain) - 1, len(chain)
        if edge is None:
            return chain
        at, base = edge
        known = self._known(chain[at].digest)
        if known is not None and self._fits(changed := chain[:at] + known, chain):
            return changed
        changed = chain[:base] + (self._resolved(chain[base:]) if base < len(chain) else [])
        return changed if self._fits(changed, chain) else chain

    def _fits(self, changed: Chain, chain: Chain) -> bool:
        """Return whether a changed chain costs a restore no more than a save would allow, or no more than before."""
        is_short = len(changed) <= max(len(chain), MAX_LINKS + 1)
        return is_short and cost_of(changed) <= max(cost_of(chain), self._restore_cost * cost_of(changed[-1:]))

    # -- encode

    def _encode_part(self, work: Work, m: Manifest, rows: Column, chains: Sequence[Chain]) -> None:
        """Encode the chunks of a part that the plan names, unless a chain for them is known."""
        wanted = self._edge_jobs(m, rows, chains)
        wanted |= {job.digest: job for job in self._neighbour_jobs(work, m, rows, chains)}
        roots = {digest: self._plan.cuts[digest].root_of(digest) for digest in wanted}
        self._reload(work, {*wanted, *(root for root in roots.values() if root)})
        wanted = {digest: job for digest, job in wanted.items() if self._known(digest) is None}
        self._old.update({digest: job.chain for digest, job in wanted.items()})
        self._shared_edges.measure([self._plan.cuts[digest] for digest in wanted], work.claim.heartbeat)
        self._add(work, [job for digest, job in wanted.items() if not roots[digest]])
        self._add(work, [self._based_on(roots[digest], job) for digest, job in wanted.items() if roots[digest]])

    def _edge_jobs(self, m: Manifest, rows: Column, chains: Sequence[Chain]) -> dict[bytes, Job]:
        """Return a job for every chunk at a planned edge, with the next kept chunk of its chain as the base."""
        jobs: dict[bytes, Job] = {}
        sizes, layouts = kinds_of(m)
        for row, chain in zip(rows.tolist(), chains, strict=True):
            rest = chain
            while (edge := edge_of(rest)) is not None:
                at, base = edge
                job = Job(rest[at:], rest[base:], int(sizes[row]), int(layouts[row]))
                if job.digest in self._plan.cuts:
                    jobs.setdefault(job.digest, job)
                rest = rest[base:]
        return jobs

    def _neighbour_jobs(self, work: Work, m: Manifest, rows: Column, chains: Sequence[Chain]) -> list[Job]:
        """Return jobs for planned full chunks whose neighbours, their bases, lie in packs that no gc deletes."""
        full = [
            row
            for row, chain in zip(rows.tolist(), chains, strict=True)
            if len(chain) == 1 and chain[0].digest in self._plan.deltas
        ]
        jobs = self._neighbours.jobs(work.view, work.ruling, m, full)
        safe = self.safe(work, {link.place.pack for job in jobs for link in job.base if link.place})
        return [job for job in jobs if all(link.place and link.place.pack in safe for link in job.base)]

    def _based_on(self, root: bytes, job: Job) -> Job:
        """Return a job with the root of its cut as the base, if the root has a new chain and this one gets shorter."""
        known = self._known(root) or []
        fits = 0 < len(known) < len(job.chain) and all(link.digest != job.digest for link in known)
        return replace(job, base=self._old.get(root) or known) if fits else job

    def _reload(self, work: Work, digests: set[bytes]) -> None:
        """Find new chains that this run, or one that died, has published; keep those whose packs are safe."""
        planned = [self._plan.cuts[digest].edges[digest].chain for digest in digests if digest not in self._chains]
        found = [chain for chain in planned if chain]
        for batch in batches(np.array([chain[0].size for chain in found]), self.engine):
            own = [found[i] for i in batch.tolist()]
            ends = np.cumsum([chain[0].size for chain in own])
            with suppress(*DAMAGE, CapabilityError):  # else the chunks are encoded again
                self.encoder.rebuild(own, np.empty(int(ends[-1]), np.uint8), ends - [chain[0].size for chain in own])
                self._chains.update({chain[0].digest: chain for chain in own})
                self._packs.update(link.place.pack for chain in own for link in chain if link.place)
            work.claim.heartbeat()
        packs = {link.place.pack for digest in digests for link in self._chains.get(digest, []) if link.place}
        safe = self.safe(work, packs)
        for digest in digests:
            if any(link.place and link.place.pack not in safe for link in self._chains.get(digest, [])):
                del self._chains[digest]

    def _add(self, work: Work, jobs: Sequence[Job]) -> None:
        """Encode chunks, pack those whose blobs take less than they free, and note their new chains."""
        jobs = [job for job in jobs if self._plan.cuts[job.digest].pays is not False]
        done: list[tuple[Job, Link]] = []
        try:
            for own, made in self.encoder.encode(jobs):
                work.claim.heartbeat()
                names, rooms = names_of(made.entries), room(made.entries["length"].astype(np.int64)).tolist()
                rows = self._worthwhile(own, rooms)
                self.reuse(work, [names[i] for i in rows])
                if new := [i for i in rows if not work.has(names[i])]:
                    before = [own[i].length for i in new]
                    packed = self.add(work, made.take(np.array(new)), [names[i] for i in new], before)
                    self.encoded.update(names[new[i]] for i in packed)
                    self.spent += sum(lengths_of(made.entries[[new[i] for i in packed]]))
                for i in rows:
                    kind, length = int(made.entries["transform"][i]), int(made.entries["length"][i])
                    done.append((own[i], Link(kind, own[i].digest, own[i].size, None, names[i], new_bytes=length)))
        except CapabilityError as error:
            log.warning("chunks that cannot be decoded here stay as they are: %s", error)
        for job, link in sorted(done, key=lambda item: len(item[0].chain)):  # bases come first
            self._fresh[job.digest] = [link, *(self._resolved(job.base) if link.kind != FULL else [])]

    def _worthwhile(self, jobs: Sequence[Job], needed: Sequence[int]) -> list[int]:
        """Return the positions of the jobs whose blobs take less than they free, as far as the byte limit allows."""
        rows, left = [], self._max_bytes - self.spent - max(0, self._to_move)
        for i, job in enumerate(jobs):
            cut = self._plan.cuts[job.digest]
            if needed[i] <= left and (len(cut.edges) > 1 or needed[i] <= max_cost(cut.freed_bytes)):
                left -= needed[i]
                rows.append(i)
        return rows

    # -- move

    def _move_all(self, work: Work, chains: Sequence[Chain]) -> None:
        """Move blobs out of packs that are emptied."""
        emptied = {name for name in self._plan.emptied if pack_key(name) not in self.quarantined}
        leaving = {link.place for chain in chains for link in chain if link.place and link.place.pack in emptied}
        self.reuse(work, leaving)
        places, left = [], self._max_bytes - self.spent
        for place in sorted(leaving, key=lambda place: (place.pack, place.offset)):
            if not work.has(place) and place.length <= left:
                places.append(place)
                left -= place.length
        entries = np.zeros(len(places), ENTRY)
        for i, place in enumerate(places):
            entries[i : i + 1] = self.entries_at(place.pack, np.array([place.offset], np.uint64))
        self._to_move -= sum(lengths_of(entries))
        self.spent += self.move(work, places, entries)
