"""compact: free what gc cannot: bytes in packs that are mostly dead, and bases that live only as somebody's base.

In: the committed snapshots. Out: their next revisions (rewrite.py), and a report. Two things are rewritten:

    chunks    whose chain leads through chunks that no snapshot holds any more: encoded anew, full or as a delta to what
              the rest of the chain, or another chunk's, still leads to; and full ones, as a delta to the same place of
              the snapshot before; if that frees more than it costs
    packs     whose dead share is the largest, until what is dead in all packs together is little: their live blobs move
              as they are

What is worth it is chosen over all snapshots first (compact_plan.py), the most profitable first; then each snapshot is
rewritten under a session of its own. Every chunk that is encoded anew was rebuilt and compared with its digest before,
and is decoded and compared again before it counts. A run that dies is finished by the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..arrays import Column
from ..catalog.history import View
from ..catalog.index import Index
from ..context import Context
from ..errors import DAMAGE, CapabilityError, SnapstoreError
from ..format import planes
from ..format.blob import XOR
from ..format.delta_chain import Chain, Link, chains_of, edge_of
from ..format.keys import pack_key
from ..format.manifest import Manifest
from ..format.pack import ENTRY
from ..format.records import COMMITTED, ManifestRef, Snapshot
from ..protocol.quarantine import in_quarantine
from ..protocol.revisions import CONFLICT_ATTEMPTS
from ..restore.pipeline import spec_of
from ..save.bases import Base, Bases
from .base import Part, Target, Work, moved, target_of
from .blobs import BlobRewriting
from .compact_plan import Cut, Edge, LiveBlobs, Plan, room, rows_of, worth
from .reencode import Job, Reencoder
from .stored_blobs import batches, lengths_of, names_of

log = logging.getLogger("snapstore")


@dataclass(slots=True)
class CompactReport:
    """What a compact did, or would do (of a dry run all numbers are estimates).

    Attributes:
        rewritten: new revisions of the snapshots that needed it (of a dry run: as they are).
        skipped: those that needed nothing, or were forgotten meanwhile.
        failed: (snapshot, why) of those that could not be rewritten; they are as they were.
        encoded: chunks encoded anew.
        moved: blobs copied as they were.
        bytes_read: of packs.
        bytes_written: stored bytes of these blobs.
        bytes_before, bytes_after: packs and manifests that committed snapshots need: what a gc leaves.
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

    @property
    def freed_bytes(self) -> int:
        """By how much a gc leaves less than it would have."""
        return self.bytes_before - self.bytes_after


def compact(
    context: Context, *, only: Sequence[Snapshot] | None = None, max_repack_bytes: int | None = None,
    dry_run: bool = False,
) -> CompactReport:  # fmt: skip
    """Rewrite what is worth it; a snapshot that cannot be is reported, and the others go on.

    Args:
        only: rewrite no others; None: all committed ones.
        max_repack_bytes: of blobs written; the most profitable come first.

    Raises:
        IntegrityError: a record is damaged or missing, so what lives cannot be told.
        StorageError: the store failed; snapshots before that are rewritten.
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
            break  # what could not be read was not revised and collected meanwhile: it is damaged
    before = needed_bytes(context.index, view)
    with _Compacting(context, live, max_repack_bytes, dry_run) as compacting:
        plan = compacting.choose(view)
        sound = [s for s in chosen if s.id not in live.damaged]
        if plan.cuts or plan.left:
            compacting.run(sound)
        else:
            compacting.skipped += sound
    compacting.failed += [(s, live.damaged[s.id]) for s in chosen if s.id in live.damaged]
    report = CompactReport(
        compacting.rewritten, compacting.skipped, compacting.failed, len(compacting.anew),
        len(compacting.made.keys() - compacting.anew), compacting.all_bytes_read, compacting.spent, before, before,
        dry_run,
    )  # fmt: skip
    if dry_run:
        report.encoded, report.moved, report.bytes_written = plan.encoded, plan.moved, plan.cost_bytes
        report.bytes_after = before - plan.gain_bytes
    elif compacting.rewritten:
        report.bytes_after = needed_bytes(context.index, context.index.refresh())
    return report


def needed_bytes(index: Index, view: View) -> int:
    """Packs and manifests that committed snapshots need [bytes]; those of a damaged manifest are not known."""
    sizes: dict[str, int] = {}
    refs = [ref for snapshot in view.snapshots() for ref in snapshot.manifests]
    for ref, header in zip(refs, index.headers(refs), strict=True):
        sizes[ref.key] = ref.size_bytes
        if not isinstance(header, SnapstoreError):
            sizes.update(zip(map(pack_key, header.pack_names), header.pack_size_list, strict=True))
    return sum(sizes.values())


class _Compacting(BlobRewriting):
    """One run over some snapshots."""

    verb = "compact"

    def __init__(self, context: Context, live: LiveBlobs, max_bytes: int | None, dry_run: bool) -> None:
        super().__init__(context, context.engines.cpu, states=(COMMITTED,), dry_run=dry_run)
        self._live, self._max_bytes, self._max_depth = live, max_bytes, context.options.max_depth
        self._encoder = Reencoder(context)
        self._plan = Plan(live.kept)
        self._to_move = 0  # bytes planned, and not done yet
        self.spent = 0  # bytes written
        self.anew: set[bytes] = set()  # blobs that are no copies
        self._chains: dict[bytes, Chain] = {}  # digest -> how it is rebuilt from now on
        self._packs: set[str] = set()  # that these need, and maybe more
        self._fresh: dict[bytes, Chain] = {}  # chains that the running session adds to `_chains`
        self._old: dict[bytes, Chain] = {}  # how these were rebuilt before

    @property
    def all_bytes_read(self) -> int:
        """To move, share and encode."""
        return self.bytes_read + self._encoder.bytes_read

    # -- what goes

    def choose(self, view: View) -> Plan:
        """What is worth it. Of the full chunks of each tensor one is tried as a delta, to know what the others take.

        A damaged chunk counts for nothing here: it is found when it is to be rewritten.
        """
        for snapshot, ref, m, rows in self._live.full():
            with suppress(*DAMAGE, CapabilityError):
                self._try_deltas(ref, m, self._neighbours(view, snapshot, m, rows))
        self._plan = self._live.plan(self._max_bytes)
        self._to_move = self._plan.moved_bytes
        return self._plan

    def _try_deltas(self, ref: ManifestRef, m: Manifest, near: Mapping[int, Chain]) -> None:
        """Tell the survey which full chunks may become deltas to their neighbours, and what they may take then.

        Raises:
            IntegrityError, FormatError, CapabilityError: a chunk is damaged, or cannot be read here.
        """
        of_tensor = tensors_of(m)
        tried: dict[int, tuple[Job, list[int]]] = {}  # of every tensor one chunk, and all that it stands for
        for row, job in zip(near, self._jobs(m, near), strict=True):
            tried.setdefault(int(of_tensor[row]), (job, []))[1].append(row)
        made = [entry for _, some in self._encoder.encode([job for job, _ in tried.values()]) for entry in some.entries]
        for (job, own), entry in zip(tried.values(), made, strict=True):
            for row in own if entry["transform"] == XOR else ():
                self._live.add_delta(ref, m, row, near[row][0].digest, int(entry["length"]) / job.length)

    def _neighbours(self, view: View, snapshot: Snapshot, m: Manifest, rows: Column) -> dict[int, Chain]:
        """Of full chunks, how the one at the same place of the snapshot before is rebuilt, where that may be a base."""
        run = view.snapshots(snapshot.run)
        before = next((s for s in reversed(run) if s.seq < snapshot.seq), view.get(snapshot.parent or ""))
        if before is None or before.state != COMMITTED:
            return {}
        try:
            refs = [ref for ref in before.manifests if ref.part == m.header.part]
            bases = Bases([Base(before, [self.manifest_of(ref) for ref in refs])])
        except DAMAGE:
            return {}
        at = np.full(len(m.table), -1, np.int64)
        for entry in m.tensors:
            first, _ = bases.first_row((m.header.part, tuple(entry.path), entry.dtype, tuple(entry.shape)))
            for box in entry.boxes if first >= 0 and len(entry.boxes) == 1 else ():
                at[box.first_chunk : box.first_chunk + box.chunks] = first + np.arange(box.chunks)
        rows = rows[(at[rows] >= 0) & (at[rows] < len(bases.table))]  # one that is damaged may hold fewer
        rows = rows[bases.lengths[at[rows]] == m.table.lengths[rows]]
        found = chains_of(bases.table, bases.packs, at[rows], self._plan.kept)
        digests = [digest.tobytes() for digest in m.table.digests[rows]]
        return {
            row: chain
            for row, digest, chain in zip(rows.tolist(), digests, found, strict=True)
            if len(chain) + self._live.heights.get(digest, 0) <= self._max_depth
            and all(link.digest != digest for link in chain)
        }

    def stale(self, m: Manifest, entries: npt.NDArray[np.void]) -> Column:
        """References to packs that are left, and to chunks at the edge of what is kept."""
        left = np.array([name in self._plan.left for name in m.header.pack_names] or [False])
        stale = left[m.table.ref_packs] | self._plan.edges.has(m.table.ref_digests)
        return np.flatnonzero(stale & ~self.in_quarantine(m))

    def stays(self, name: str, entries: npt.NDArray[np.void]) -> Column:
        """All, unless the pack is left."""
        return np.full(len(entries), name not in self._plan.left)

    # -- what takes its place

    def begin(self, work: Work, parts: Sequence[Part]) -> None:
        """Forget what the session before has not published, and what a gc may delete by now."""
        self._fresh, self._old = {}, {}
        self._drop_unsafe(work)

    def write(self, work: Work, part: Part) -> Target | None:
        """Chains that lead through kept chunks alone, in packs that stay."""
        table, packs = part.manifest.table, part.manifest.header.pack_names
        rows = rows_of(table, part.stale)
        chains = list(chains_of(table, packs, rows, self._plan.kept))
        self._encode_anew(work, part.manifest, rows, chains)
        changed = [self._resolved(chain) for chain in chains]
        self._move_all(work, changed)
        changed = [[moved(link, work) for link in chain] for chain in changed]
        return target_of(part.manifest, rows, changed) if changed != chains else None

    def published(self, work: Work) -> None:
        """Others may build on what was made, and on how chunks are rebuilt now."""
        super().published(work)
        places = work.places | work.new_places()
        for digest, chain in self._fresh.items():
            self._chains[digest] = [
                replace(link, place=places[link.key], key=b"") if link.key else link for link in chain
            ]
            self._packs.update(link.place.pack for link in self._chains[digest] if link.place)

    def _drop_unsafe(self, work: Work) -> None:
        """Forget chains of other snapshots that a gc may be deleting by now: those snapshots may be gone."""
        unsafe = self._packs - self.safe(work, self._packs)
        if unsafe:
            self._chains = {
                digest: chain
                for digest, chain in self._chains.items()
                if not any(link.place and link.place.pack in unsafe for link in chain)
            }
            self._packs -= unsafe

    def _known(self, digest: bytes) -> Chain | None:
        return self._fresh.get(digest) or self._chains.get(digest)

    def _resolved(self, chain: Chain) -> Chain:
        """A chain with everything in it that is rebuilt otherwise by now."""
        edge = edge_of(chain)
        if edge is None and chain[-1].digest in self._plan.deltas:
            edge = len(chain) - 1, len(chain)
        if edge is None:
            return chain
        at, behind = edge
        known = self._known(chain[at].digest)
        if known is not None and at + len(known) <= max(len(chain), self._max_depth + 1):
            return chain[:at] + known
        return chain[:behind] + (self._resolved(chain[behind:]) if behind < len(chain) else [])

    # -- chunks anew

    def _encode_anew(self, work: Work, m: Manifest, rows: Column, chains: Sequence[Chain]) -> None:
        """Of every chunk at an edge, a chain that leads through kept chunks alone; if that is worth it."""
        wanted: dict[bytes, Job] = {}
        sizes, layouts = _kinds(m)
        for row, chain in zip(rows.tolist(), chains, strict=True):
            while (edge := edge_of(chain)) is not None:
                at, behind = edge
                wanted.setdefault(chain[at].digest, Job(chain[at:], chain[behind:], int(sizes[row]), int(layouts[row])))
                chain = chain[behind:]
        wanted = {digest: job for digest, job in wanted.items() if digest in self._plan.cuts}
        wanted |= self._deltas(work, m, dict(zip(rows.tolist(), chains, strict=True)))
        roots = {digest: self._root_of(digest) for digest in wanted}
        self._recall(work, {*wanted, *(root for root in roots.values() if root)})
        wanted = {digest: job for digest, job in wanted.items() if self._known(digest) is None}
        self._old.update({digest: job.chain for digest, job in wanted.items()})
        self._weigh(work, [self._plan.cuts[digest] for digest in wanted])
        self._add(work, [job for digest, job in wanted.items() if not roots[digest]])
        self._add(work, [self._upon(roots[digest], job) for digest, job in wanted.items() if roots[digest]])

    def _deltas(self, work: Work, m: Manifest, chains: Mapping[int, Chain]) -> dict[bytes, Job]:
        """Full chunks that may be deltas to their neighbours, as these are by now, if nobody deletes them meanwhile."""
        rows = [row for row, chain in chains.items() if len(chain) == 1 and chain[0].digest in self._plan.deltas]
        near = self._neighbours(work.view, work.ruling, m, np.array(rows, np.int64)) if rows else {}
        safe = self.safe(work, {link.place.pack for chain in near.values() for link in chain if link.place})
        near = {
            row: chain for row, chain in near.items() if all(link.place and link.place.pack in safe for link in chain)
        }
        return {job.digest: job for job in self._jobs(m, near)}

    def _jobs(self, m: Manifest, near: Mapping[int, Chain]) -> Iterator[Job]:
        """To encode rows of a manifest as deltas."""
        sizes, layouts = _kinds(m)
        rows = np.array(list(near), np.int64)
        chains = chains_of(m.table, m.header.pack_names, rows, self._plan.kept)
        for chain, base, size, layout in zip(chains, near.values(), sizes[rows], layouts[rows], strict=True):
            yield Job(chain, base, int(size), int(layout))

    def _root_of(self, digest: bytes) -> bytes:
        """The chunk at another edge that one may become a delta to, when no kept chunk is behind its own; else none."""
        cut = self._plan.cuts[digest]
        return b"" if cut.root is None or cut.root is cut.edges[digest] or cut.edges[digest].behind else cut.root.digest

    def _upon(self, root: bytes, job: Job) -> Job:
        """With the root of its cut as a base, if that is rebuilt anew by now and the chain grows no longer by it."""
        known = self._known(root) or []
        fits = 0 < len(known) < len(job.chain) and all(link.digest != job.digest for link in known)
        return replace(job, base=self._old.get(root) or known) if fits else job

    def _recall(self, work: Work, wanted: Iterable[bytes]) -> None:
        """Chains that are there already, in snapshots that this run or one that died has published, as far as safe."""
        wanted = list(wanted)
        found = [self._plan.cuts[digest].edges[digest].chain for digest in wanted if digest not in self._chains]
        found = [chain for chain in found if chain]
        for batch in batches(np.array([chain[0].size for chain in found]), self.engine):
            own = [found[i] for i in batch.tolist()]
            ends = np.cumsum([chain[0].size for chain in own])
            with suppress(*DAMAGE, CapabilityError):  # they are made anew then
                self._encoder.rebuild(own, np.empty(int(ends[-1]), np.uint8), ends - [chain[0].size for chain in own])
                self._chains.update({chain[0].digest: chain for chain in own})
                self._packs.update(link.place.pack for chain in own for link in chain if link.place)
            work.claim.heartbeat()
        packs = {link.place.pack for digest in wanted for link in self._chains.get(digest, []) if link.place}
        safe = self.safe(work, packs)
        for digest in wanted:
            if any(link.place and link.place.pack not in safe for link in self._chains.get(digest, [])):
                del self._chains[digest]

    def _weigh(self, work: Work, cuts: Sequence[Cut]) -> None:
        """Tell of cuts of several edges, where that is not known yet, whether they are worth it."""
        several = list({id(cut): cut for cut in cuts if len(cut.edges) > 1 and cut.is_worth_it is None}.values())
        jobs = self._jobs_of(edge for cut in several for edge in cut.edges.values() if not edge.chain)
        for cut in several:
            cut.is_worth_it = self._is_worth_it(cut, jobs)
            work.claim.heartbeat()

    def _jobs_of(self, edges: Iterable[Edge]) -> dict[bytes, Job]:
        """To encode chunks at edges, by digest; none where a manifest is damaged. Each manifest is read once."""
        of_manifest: dict[ManifestRef, list[Edge]] = {}
        for edge in edges:
            of_manifest.setdefault(edge.source[0], []).append(edge)
        jobs: dict[bytes, Job] = {}
        for ref, own in of_manifest.items():
            try:
                m = self.manifest_of(ref)
                sizes, layouts = _kinds(m)
            except DAMAGE as error:
                log.warning("chunks that share bases stay as they are: %s", error)
                continue
            rows = np.array([row for _, row in (edge.source for edge in own)], np.int64)
            chains = chains_of(m.table, m.header.pack_names, rows, self._plan.kept)
            for edge, chain, size, layout in zip(own, chains, sizes[rows], layouts[rows], strict=True):
                at = next(i for i, link in enumerate(chain) if link.digest == edge.digest)
                behind = next((i for i in range(at + 1, len(chain)) if chain[i].is_kept), len(chain))
                jobs[edge.digest] = Job(chain[at:], chain[behind:], int(size), int(layout))
        return jobs

    def _is_worth_it(self, cut: Cut, found: Mapping[bytes, Job]) -> bool:
        """Whether all edges of a cut together take less than what they free: each is encoded, and dropped again."""
        jobs: list[Job] = []
        for digest, edge in cut.edges.items():
            if edge.chain:
                continue
            if digest not in found:
                return False
            job, is_based = found[digest], jobs and edge is not cut.root
            jobs.append(replace(job, base=job.base or jobs[0].chain) if is_based else job)
        try:
            needed = sum(
                int(room(made.entries["length"].astype(np.int64)).sum()) for _, made in self._encoder.encode(jobs)
            )
        except (*DAMAGE, CapabilityError) as error:
            log.warning("chunks that share bases stay as they are: %s", error)
            return False
        return needed <= worth(cut.freed_bytes)

    def _add(self, work: Work, jobs: Sequence[Job]) -> None:
        """Encode chunks; pack those that take less than they free, and note how they are rebuilt."""
        jobs = [job for job in jobs if self._plan.cuts[job.digest].is_worth_it is not False]
        done: list[tuple[Job, Link]] = []
        try:
            for own, made in self._encoder.encode(jobs):
                work.claim.heartbeat()
                names, rooms = names_of(made.entries), room(made.entries["length"].astype(np.int64)).tolist()
                rows = self._worthwhile(own, rooms)
                self.reuse(work, [names[i] for i in rows])
                if new := [i for i in rows if not work.has(names[i])]:
                    before = [own[i].length for i in new]
                    packed = self.add(work, made.take(np.array(new)), [names[i] for i in new], before)
                    self.anew.update(names[new[i]] for i in packed)
                    self.spent += sum(lengths_of(made.entries[[new[i] for i in packed]]))
                for i in rows:
                    kind = int(made.entries["transform"][i])
                    done.append((own[i], Link(kind, own[i].digest, own[i].size, None, names[i])))
        except CapabilityError as error:
            log.warning("chunks that cannot be decoded here stay as they are: %s", error)
        for job, link in sorted(done, key=lambda item: len(item[0].chain)):  # what is behind comes first
            self._fresh[job.digest] = [link, *(self._resolved(job.base) if link.kind == XOR else [])]

    def _worthwhile(self, jobs: Sequence[Job], needed: Sequence[int]) -> list[int]:
        """Which of some chunks take less than they free, and fit into what may be written."""
        rows, left = (
            [],
            float("inf") if self._max_bytes is None else self._max_bytes - self.spent - max(0, self._to_move),
        )
        for i, job in enumerate(jobs):
            cut = self._plan.cuts[job.digest]
            if needed[i] <= left and (len(cut.edges) > 1 or needed[i] <= worth(cut.freed_bytes)):
                left -= needed[i]
                rows.append(i)
        return rows

    # -- blobs as they are

    def _move_all(self, work: Work, chains: Sequence[Chain]) -> None:
        """Move blobs out of packs that are left."""
        goes = {name for name in self._plan.left if pack_key(name) not in self.quarantined}
        leaving = {link.place for chain in chains for link in chain if link.place and link.place.pack in goes}
        self.reuse(work, leaving)
        places, left = [], float("inf") if self._max_bytes is None else self._max_bytes - self.spent
        for place in sorted(leaving, key=lambda place: (place.pack, place.offset)):
            if not work.has(place) and place.length <= left:
                places.append(place)
                left -= place.length
        entries = np.zeros(len(places), ENTRY)
        for i, place in enumerate(places):
            entries[i : i + 1] = self.entries_at(place.pack, np.array([place.offset], np.uint64))
        self._to_move -= sum(lengths_of(entries))
        self.spent += self.move(work, places, entries)


def _kinds(m: Manifest) -> tuple[Column, Column]:
    """(element size, layout of planes) of every chunk of a manifest."""
    sizes, layouts = np.ones(len(m.table), np.uint8), np.full(len(m.table), planes.BYTES, np.uint8)
    for entry in m.tensors:
        spec = spec_of(entry)
        for box in entry.boxes:
            own = slice(box.first_chunk, box.first_chunk + box.chunks)
            sizes[own], layouts[own] = spec.element_size, planes.ROTATED if spec.is_float else planes.BYTES
    return sizes, layouts


def tensors_of(m: Manifest) -> Column:
    """Which tensor every chunk of a manifest belongs to."""
    numbers = np.full(len(m.table), -1, np.int64)
    for number, entry in enumerate(m.tensors):
        for box in entry.boxes:
            numbers[box.first_chunk : box.first_chunk + box.chunks] = number
    return numbers
