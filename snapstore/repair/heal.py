"""Heal: publish new manifests of a snapshot, which refer to intact blobs instead of damaged packs.

In: a snapshot, and the damage (../check/damaged_packs.py). Out: new packs, new manifests and the next revision of its
record, as every rewrite publishes them (../rewrite/base.py). A chunk that needs a lost blob gets another chain: it
keeps the first references of its own chain, and continues with the chain of a committed snapshot that gives the same
digest. Intact blobs of damaged packs are copied. Each new chain is decoded from the stored blobs before it goes into a
manifest, and must give the chunk's digest. A chunk that cannot be healed keeps its references: nothing gets worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ..catalog.history import View
from ..catalog.read_twice import tried
from ..check.damaged_packs import DamagedPacks, lost_rows, unbuilt
from ..chunks import limits
from ..context import Context
from ..errors import CapabilityError, ConflictError, IntegrityError
from ..format.blobs import blob
from ..format.keys import pack_key, record_key
from ..format.manifests.chunk_table import MAX_CHAIN
from ..format.manifests.delta_chain import Chain, Digests, Link, Place, chains_of, table_of
from ..format.manifests.manifest import Manifest, manifest_name
from ..format.records import COMMITTED, FORGOTTEN, RANKS, ManifestRef, Snapshot
from ..protocol.claim import Claim
from ..protocol.revisions import is_ruling
from ..rewrite.base import NewTable, Rewriting, StaleManifest, Work, moved, target_of
from ..rewrite.roots import ReplacedManifests
from ..rewrite.shared_manifests import put_list
from ..rewrite.stored_blobs import batches, stored_of
from ..text import counted

#: The most chains that are remembered for each wanted digest: a gc may want to delete the first.
CHAINS_KEPT = 3
#: Healing does not need to know which links of a chain are chunks of some snapshot.
_NOTHING = Digests()


@dataclass(slots=True)
class _HealPlan:
    """The new chains of one manifest.

    Attributes:
        chains: row -> the chain that it gets; each was decoded from the stored blobs.
        rerouted: rows whose own chains need a lost blob.
        lost: rows that no known chain gives.
    """

    manifest: Manifest
    chains: dict[int, Chain] = field(default_factory=dict)
    rerouted: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Healing:
    """The result of healing a snapshot, done or planned.

    Attributes:
        snapshot: its revision after healing.
        elsewhere: number of chunks that another chain gives.
        copied: number of intact blobs copied out of damaged packs.
        lost: the chunks that stay lost, in words; empty: none.
    """

    snapshot: Snapshot
    elsewhere: int
    copied: int
    lost: str


class Healer(Rewriting):
    """Heals snapshots of one repository, one after the other; a blob that several need is copied once.

    Args:
        affected: id -> SHA-256 of the manifests that refer to damaged packs.
        lacking: ids of the snapshots that lack a manifest.
    """

    verb = "repair"

    def __init__(
        self,
        context: Context,
        packs: DamagedPacks,
        affected: Mapping[str, Sequence[str]],
        lacking: Collection[str],
    ) -> None:
        super().__init__(context, context.engines.cpu, states=(COMMITTED, FORGOTTEN))
        self._packs = packs
        self._affected = {name: set(refs) for name, refs in affected.items()}
        self._lacking = lacking
        self._budget = limits.Budget(context.store)
        self._chains: dict[bytes, list[Chain]] = {}  # digest -> intact chains that give it
        self._lost: set[bytes] = set()  # digests whose blobs were lost
        self._looked_at: set[str] = set()  # SHA-256 of the snapshot's manifests that were examined for damage
        self._usable: set[str] = set()  # packs whose blobs the running session may refer to
        self._plans: dict[str, _HealPlan] = {}  # of the snapshot, by the SHA-256 of the manifest

    def find_chains(self, snapshots: Iterable[Snapshot], view: View) -> None:
        """Look for chains of committed snapshots that give the chunks which some snapshots have lost."""
        wanted: set[bytes] = set()
        for snapshot in snapshots:
            # none: it was revised meanwhile, and collected
            for part in tried(self.store, lambda: self._affected_parts(snapshot)) or ():  # noqa: B023 (called at once)
                table, lost = part.manifest.table, self._packs.lost(part.manifest)
                refs = table.refs_of(lost_rows(part.manifest, lost))
                wanted.update(digest.tobytes() for digest in table.ref_digests[refs])
                self._lost.update(digest.tobytes() for digest in table.ref_digests[lost])
        if not wanted:
            return
        digests = Digests(wanted)
        for snapshot in view.snapshots():
            for ref in tried(self.store, lambda: self.data_refs(snapshot)) or ():  # noqa: B023 (called at once)
                if (m := tried(self.store, lambda: self.sized_manifest(ref))) is not None:  # noqa: B023
                    self._add_chains(m, digests)

    def _add_chains(self, m: Manifest, wanted: Digests) -> None:
        """Remember the intact chains of one manifest that give wanted digests: for each, the rest of its chain."""
        table = m.table
        found = np.flatnonzero(wanted.has(table.ref_digests))
        if not len(found):
            return
        lost = self._packs.lost(m)
        rows = np.searchsorted(table.starts, found, "right") - 1
        for ref, row in zip(found.tolist(), rows.tolist(), strict=True):
            first, end = int(table.starts[row]), int(table.starts[row + 1])
            chains = self._chains.setdefault(table.ref_digests[ref].tobytes(), [])
            if lost[ref:end].any() or len(chains) >= CHAINS_KEPT:
                continue
            (whole,) = chains_of(table, m.header.pack_names, np.array([row]), _NOTHING)
            chain = whole[ref - first :]
            if all(other[0] != chain[0] for other in chains):
                chains.append(chain)

    def data_refs(self, snapshot: Snapshot) -> list[ManifestRef]:
        """Return the references of the manifests that hold a snapshot's chunks, and that can be written again.

        A part of several ranks gets a new root, which names all children with their packs. If the root or a child is
        lost, the part stays as it is.

        Raises:
            NotFoundError, IntegrityError, FormatError: a root manifest is missing or damaged, or two reads failed.
        """
        if snapshot.id not in self._lacking or RANKS not in snapshot.features:
            return super().data_refs(snapshot)
        found: list[ManifestRef] = []
        for ref in snapshot.manifests:
            root = tried(self.store, lambda: self.manifest_of(ref))  # noqa: B023 (called at once)
            children = root.header.children if root else []
            if all(tried(self.store, lambda: self.manifest_of(child)) for child in children):  # noqa: B023
                found += [ref, *children] if root and root.header.chunks else children
        return found

    def _affected_parts(self, snapshot: Snapshot) -> list[StaleManifest]:
        """Read the manifests of a snapshot that refer to damaged packs."""
        parts = []
        for ref in self.data_refs(snapshot):
            if ref.sha256 in self._affected[snapshot.id]:
                m = self.sized_manifest(ref)
                parts.append(StaleManifest(ref, m, np.flatnonzero(self._packs.within(m))))
        return parts

    # -- one snapshot

    def plan(self, snapshot: Snapshot, view: View) -> Healing:
        """Return the result that healing a snapshot would have, for a dry run."""
        needed = self.needed(view, self._packs_of_chains())
        there = self.store.sizes([pack_key(name) for name in needed]) if needed else {}
        self._usable = {name for name in needed if pack_key(name) in there}
        self._plan_all(self._affected_parts(snapshot), snapshot.ref)
        return self._healing(snapshot)

    def heal(self, snapshot: Snapshot) -> Healing | None:
        """Publish the next revision of a snapshot, which refers to intact blobs.

        Returns:
            The result; None: it needs no healing any more.

        Raises:
            CapabilityError: this machine cannot decode its chunks.
            ConflictError: other processes keep revising it.
            IntegrityError, FormatError, NotFoundError: during this repair it was damaged further, or another process
                rewrote it together with its damage.
        """
        self._looked_at = {ref.sha256 for ref in self.data_refs(snapshot)}
        revision = self.rewrite_one(snapshot)
        return None if revision is None else self._healing(revision)

    def _healing(self, snapshot: Snapshot) -> Healing:
        plans = list(self._plans.values())
        lost = [
            f"{counted(len(plan.lost), 'chunk')} of {manifest_name(plan.manifest.header)}"
            for plan in plans
            if plan.lost
        ]
        elsewhere = sum(len(plan.rerouted & plan.chains.keys()) for plan in plans)
        return Healing(snapshot, elsewhere, sum(len(self._to_copy(plan)) for plan in plans), ", ".join(lost))

    def parts(self, ruling: Snapshot, view: View) -> list[StaleManifest]:
        """Read the manifests that refer to damaged packs; the others may be lost themselves.

        Raises:
            IntegrityError: another process has published a manifest that is damaged too.
        """
        for ref in (ref for ref in self.data_refs(ruling) if ref.sha256 not in self._looked_at):
            self._look_at(ruling, ref, view)
            self._looked_at.add(ref.sha256)
        return self._affected_parts(ruling)

    def _look_at(self, ruling: Snapshot, ref: ManifestRef, view: View) -> None:
        """Examine a manifest that another process has published since the scan, for damage and copies of it.

        Raises:
            IntegrityError: a rewrite that had read the quarantine notes before ours were put has copied damaged blobs
                into a pack that counts as intact.
        """
        m = self.manifest_of(ref)
        if self._packs.within(m).any():
            self._affected[ruling.id].add(ref.sha256)
            self.find_chains([ruling], view)
        held = Digests(self._lost).has(m.table.ref_digests)
        rows = np.setdiff1d(lost_rows(m, held), lost_rows(m, self._packs.lost(m)))
        for error in unbuilt(self.context, m, rows.tolist()).values() if len(rows) else ():
            if isinstance(error, CapabilityError):
                raise error
            raise IntegrityError(f"{ref.key}: was written while this repair looked, and is damaged too: {error}")

    def shared(self, work: Work, parts: Sequence[StaleManifest]) -> ReplacedManifests:
        """Return none: the plan of each snapshot must tell which of its chunks stay lost."""
        return {}

    def begin(self, work: Work, parts: Sequence[StaleManifest]) -> None:
        """Find the new chains of all parts, with blobs of packs that no gc deletes."""
        self._usable = self.staying(work, self._packs_of_chains())
        self._plan_all(parts, work.ruling.ref)

    def _plan_all(self, parts: Sequence[StaleManifest], ref: str) -> None:
        self._plans = {}
        self._plans = {part.ref.sha256: self._plan(part.manifest, ref) for part in parts}

    def write(self, work: Work, part: StaleManifest) -> NewTable | None:
        """Copy the intact blobs that the new chains need out of damaged packs."""
        plan = self._plans[part.ref.sha256]
        if not plan.chains:
            return None
        blobs = self._to_copy(plan)
        self.reuse(work, blobs)
        self._copy(work, {place: digest for place, digest in blobs.items() if not work.has(place)})
        rows = sorted(plan.chains)
        chains = [[moved(link, work) for link in plan.chains[row]] for row in rows]
        return target_of(part.manifest, np.array(rows), chains)

    def _copy(self, work: Work, blobs: Mapping[Place, bytes]) -> None:
        """Copy blobs into new packs: place -> digest. Each is read by itself, since its neighbours may be unreadable.

        Raises:
            IntegrityError: one has changed since it was looked at.
        """
        places = sorted(blobs, key=lambda place: (place.pack, place.offset))
        for batch in batches(np.array([place.length for place in places], np.int64), self.engine):
            own, found = [places[i] for i in batch.tolist()], []
            for place in own:
                where = f"{pack_key(place.pack)} at {place.offset}"
                data = self.store.get_range(pack_key(place.pack), place.offset, place.length)
                if blob.parse(data, where).digest != blobs[place]:
                    raise IntegrityError(f"{where}: another blob than a moment ago")
                found.append(data)
            work.pack(stored_of(found), own, [0] * len(own), self.engine)

    # -- chains

    def _packs_of_chains(self) -> set[str]:
        chains = (chain for some in self._chains.values() for chain in some)
        return {link.place.pack for chain in chains for link in chain if link.place}

    def _is_damaged(self, link: Link) -> bool:
        return link.place is not None and pack_key(link.place.pack) in self._packs

    def _to_copy(self, plan: _HealPlan) -> dict[Place, bytes]:
        """Return the blobs of the new chains that lie in damaged packs: place -> digest."""
        links = (link for chain in plan.chains.values() for link in chain)
        return {link.place: link.digest for link in links if link.place and self._is_damaged(link)}

    def _plan(self, m: Manifest, ref: str) -> _HealPlan:
        """Find a chain for every row that needs a damaged pack; each was decoded from the stored blobs.

        Raises:
            CapabilityError: this machine cannot rebuild one.
        """
        plan, lost = _HealPlan(m), self._packs.lost(m)
        rows = lost_rows(m, self._packs.within(m))
        ways: dict[int, Iterator[Chain]] = {}
        for row, chain in zip(rows.tolist(), chains_of(m.table, m.header.pack_names, rows, _NOTHING), strict=True):
            own_lost = np.flatnonzero(lost[int(m.table.starts[row]) : int(m.table.starts[row + 1])])
            if len(own_lost):
                plan.rerouted.add(row)
            ways[row] = self._other_chains(chain, int(own_lost[0])) if len(own_lost) else iter([chain])
        left, lengths = set(ways), m.table.lengths
        while left:
            tried = {row: chain for row in left for chain in itertools.islice(ways[row], 1)}
            plan.lost.update(left - tried.keys())
            work = sum(int(lengths[row]) * len(chain) for row, chain in tried.items())
            self._budget.spend(work, f"repair of {ref}")
            left = self._not_rebuilt(m, tried) if tried else set()
            plan.chains.update({row: chain for row, chain in tried.items() if row not in left})
        return plan

    def _other_chains(self, chain: Chain, bad: int) -> Iterator[Chain]:
        """Yield chains without a bad blob: the first links of a chain, then another chain that gives the same digest.

        Args:
            bad: position of the first link whose blob is lost.
        """
        for first in range(bad, -1, -1):
            for other in self._chains.get(chain[first].digest, ()):
                usable = all(
                    self._is_damaged(link) or (link.place and link.place.pack in self._usable) for link in other
                )
                if usable and first + len(other) <= MAX_CHAIN:
                    yield chain[:first] + other

    def _not_rebuilt(self, m: Manifest, chains: Mapping[int, Chain]) -> set[int]:
        """Rebuild chunks by other chains; return the rows that do not give their digests.

        Raises:
            CapabilityError: this machine cannot rebuild one.
            StorageError: the store withholds a pack, which may be whole.
        """
        numbers: dict[str, int] = {}
        table = table_of(list(chains.values()), numbers)
        header = msgspec.structs.replace(m.header, packs=bytes.fromhex("".join(numbers)))
        failed = unbuilt(self.context, Manifest(header, m.tree, m.tensors, m.inline, table), list(range(len(chains))))
        if lack := next((error for error in failed.values() if isinstance(error, CapabilityError)), None):
            raise lack
        rows = list(chains)
        return {rows[number] for number in failed}


def renew_list(context: Context, snapshot: Snapshot) -> Snapshot:
    """Publish the next revision of a snapshot, with a new list of its manifests; return it.

    Raises:
        ConflictError: another process has revised it.
        StorageError: the store failed.
    """
    key = record_key(snapshot.run, snapshot.step, snapshot.id, snapshot.revision + 1)
    with Claim(context, key, Healer.verb, lambda _: snapshot.revised()) as claim:
        if not is_ruling(context.index.refresh(), snapshot):
            raise ConflictError("another process has revised it")
        name = put_list(context, claim, snapshot.manifests, {})
        revision = claim.publish(snapshot.revised(manifest_list=name))
    context.index.add(revision)
    return revision
