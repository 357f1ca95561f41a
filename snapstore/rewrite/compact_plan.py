"""Compact plan: find the bytes that compact could free, over all committed snapshots, and choose what pays.

In: manifests; no pack is read here. Out: a plan: chunks to encode again, packs to empty. Memory grows with the number
of different blobs (some 70 bytes each) and of chains that could be cut, not with the number of snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes, Column
from ..catalog.history import View
from ..catalog.read_twice import read_twice
from ..errors import DAMAGE, FormatError
from ..format.blobs.blob import ALIGNMENT, ENTRY, FULL
from ..format.blobs.pack import HEADER, TRAILER
from ..format.keys import pack_key
from ..format.manifests import manifest
from ..format.manifests.chunk_table import ChunkTable
from ..format.manifests.delta_chain import Chain, Digests, Numbers, chains_of
from ..format.manifests.delta_choice import ChainCosts
from ..format.manifests.manifest import Manifest
from ..format.records import ManifestRef, Snapshot
from ..storage.base import ObjectStore

#: Packs are emptied, the worst first, until the dead bytes of all packs are this share of the live ones.
MAX_DEAD_SHARE = 1 / 64
#: The bytes freed must exceed the bytes written for them by this share of the bytes written: for an encoded chunk, for
#: an emptied pack, and for the whole plan.
MIN_GAIN = 1 / 32
#: A new manifest and its packs may be this much longer than the old ones.
PART_BYTES = 512
HEIGHT_UNITS = 1 / 16
_OFFSET_BITS = 40  # of a blob's key: packs are far smaller than a TiB


def max_cost(freed_bytes: float) -> float:
    """Return the most bytes to write for some bytes that are freed."""
    return freed_bytes / (1 + MIN_GAIN)


@dataclass(slots=True)
class Edge:
    """A chunk that a snapshot holds, and whose blob is a delta to a chunk that no snapshot holds any more.

    Attributes:
        source: a manifest, and one of its rows whose chain passes the edge.
        base: digest of the next kept chunk of that chain; empty: none.
        blobs: keys of the blobs that are freed once no chain passes the edge.
        length: stored bytes of its blob now.
        estimate_bytes: stored bytes of its new blob, estimated.
        chain: its new chain, if a compacted snapshot has one; else empty.
    """

    digest: bytes
    source: tuple[ManifestRef, int]
    base: bytes
    blobs: set[int]
    length: int
    estimate_bytes: int
    chain: Chain = field(default_factory=list)


@dataclass(slots=True)
class Cut:
    """Edges that share blobs. The blobs are freed only once all of the edges are encoded again.

    Attributes:
        edges: by digest.
        pays: whether encoding them frees more than it costs; None until their real sizes are known.
    """

    edges: dict[bytes, Edge]
    blobs: set[int]
    freed_bytes: int = 0
    pays: bool | None = None

    @property
    def cost_bytes(self) -> int:
        """Return the stored bytes of the new blobs, estimated."""
        return sum(edge.estimate_bytes for edge in self.edges.values())

    @property
    def root(self) -> Edge | None:
        """Return the edge to which the other edges without a base may become deltas; None if every edge has a base."""
        return next((edge for edge in self.edges.values() if not edge.base), None)

    def root_of(self, digest: bytes) -> bytes:
        """Return the digest of the root if a chunk may become a delta to it; empty: it is the root, or has a base."""
        root, edge = self.root, self.edges[digest]
        return b"" if root is None or root is edge or edge.base else root.digest


@dataclass(slots=True)
class CompactPlan:
    """The chunks and packs to rewrite.

    Attributes:
        kept: digests of the chunks that snapshots hold.
        cuts: by the digest of each edge.
        edges: the digests of `cuts`.
        deltas: the digests of full chunks that may become deltas to their neighbours.
        emptied: packs whose live blobs move.
        moved, moved_bytes: number of these blobs without copies of others, and stored bytes of all of them.
        cost_bytes, gain_bytes: estimates: bytes to write, and by how many bytes the repository shrinks.
    """

    kept: Digests
    cuts: dict[bytes, Cut] = field(default_factory=dict)
    edges: Digests = field(default_factory=Digests)
    deltas: set[bytes] = field(default_factory=set)
    emptied: set[str] = field(default_factory=set)
    moved: int = 0
    moved_bytes: int = 0
    cost_bytes: int = 0
    gain_bytes: int = 0

    @property
    def encoded(self) -> int:
        """Return how many chunks are to be encoded."""
        return sum(not cut.edges[digest].chain for digest, cut in self.cuts.items())


class LiveBlobs:
    """All live blobs, and the chains that lead through chunks that no snapshot holds.

    Args:
        digest_seed: the repository's; chunks with the same digest are the same.
        chosen: ids of the snapshots that may be rewritten.
        quarantined: keys of the packs that no gc deletes: no byte in them is freed.

    Attributes:
        damaged: id -> why, of snapshots whose manifests cannot be read.
        kept: digests of the chunks that snapshots hold.
        full: the rows of full chunks that no earlier snapshot needs, by manifest: they may become deltas.
        heights: for the digest of a full chunk, the most that links on top of it cost a restore, in HEIGHT_UNITS of
            what the full chunk costs.
    """

    def __init__(
        self, store: ObjectStore, digest_seed: int, view: View, chosen: set[str], quarantined: set[str]
    ) -> None:
        self._store, self._digest_seed, self._view, self._chosen = store, digest_seed, view, chosen
        self.damaged: dict[str, str] = {}
        self._deltas: dict[bytes, Edge] = {}
        self._delta_bases: set[bytes] = set()
        self._survey()
        while any(snapshot.id in self.damaged for snapshot, _, _ in self.full):  # its first parts were noted as sound
            self._survey()
        self._stays = np.array([pack_key(name) in quarantined for name in self._names], bool)
        self._packs = (self._blobs >> np.uint64(_OFFSET_BITS)).astype(np.uint32)  # the pack of every blob
        self._pinned |= self._stays[self._packs]

    def _survey(self) -> None:
        """Read every manifest once; read again each one with chains through chunks that no snapshot holds."""
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._parts = 0
        self._edges: dict[bytes, Edge] = {}
        self.full: list[tuple[Snapshot, ManifestRef, Column]] = []
        self.kept, self.heights = Digests(), Digests()
        blobs, pinned, contents = Numbers(), Numbers(), Numbers()
        strays: list[tuple[Snapshot, ManifestRef]] = []
        for is_chosen, snapshot, ref, m in self._manifests():
            table, keys = m.table, self._keys_of(m)
            blobs.add(keys, table.ref_lengths)
            contents.add(keys, np.where(table.ref_kinds == FULL, _contents_of(table), 0))
            heads = np.zeros(len(table.ref_kinds), bool)
            heads[table.starts[:-1]] = True
            seen = self.kept.add(table.ref_digests, heads)
            deltas, costs = np.flatnonzero(table.ref_counts > 1), ChainCosts(table)
            heights = np.ceil((costs.whole / costs.full - 1)[deltas] / HEIGHT_UNITS)
            self.heights.add(table.ref_digests[table.starts[deltas + 1] - 1], np.minimum(heights, 255))
            if not is_chosen:
                pinned.add(keys, table.ref_lengths)
                continue
            self._parts += len(table) > 0
            self.full.append((snapshot, ref, np.flatnonzero((table.ref_counts == 1) & ~seen[table.starts[:-1]])))
            if not self.kept.has(table.ref_digests[~heads]).all():
                strays.append((snapshot, ref))
        self._blobs, lengths = blobs.all()
        self._lengths, self._contents = lengths.astype(np.int64), contents.all()[1]
        self._pinned = pinned.numbers_of(self._blobs) > 0
        for snapshot, ref in strays:
            if (stray := self._tried(snapshot, ref)) is not None:
                self._find_edges(ref, stray)
        if self._edges:
            self._find_chains()

    def _tried(self, snapshot: Snapshot, ref: ManifestRef) -> Manifest | None:
        """Return a manifest; None, and note its snapshot as damaged, if it cannot be read."""
        try:
            m = read_twice(self._store, lambda: manifest.read(self._store, ref, self._digest_seed))
            if (m.table.ref_offsets >> np.uint64(_OFFSET_BITS)).any():
                raise FormatError(f"{ref.key}: a reference beyond the first TiB of a pack")
        except DAMAGE as error:
            self.damaged[snapshot.id] = f"{snapshot.ref}: {error}"
            return None
        return m

    def _manifests(self) -> Iterator[tuple[bool, Snapshot, ManifestRef, Manifest]]:
        """Yield (may be rewritten, snapshot, reference, manifest) for all parts of committed snapshots."""
        for snapshot in self._view.snapshots():
            left = list(reversed(snapshot.manifests))
            while left:
                ref = left.pop()
                if (m := self._tried(snapshot, ref)) is not None:
                    left += reversed(m.header.children)
                    yield snapshot.id in self._chosen and snapshot.id not in self.damaged, snapshot, ref, m

    def _keys_of(self, m: Manifest) -> npt.NDArray[np.uint64]:
        """Return a key of the blob of every reference: its pack and offset in one number."""
        for name, size in zip(m.header.pack_names, m.header.pack_size_list, strict=True):
            if name not in self._numbers:
                self._numbers[name] = len(self._names)
                self._names.append(name)
                self._sizes.append(size)
        numbers = np.array([self._numbers[name] for name in m.header.pack_names] or [0], np.uint64)
        return (numbers[m.table.ref_packs] << np.uint64(_OFFSET_BITS)) | m.table.ref_offsets

    def _find_edges(self, ref: ManifestRef, m: Manifest) -> None:
        """Note as an edge every kept link whose next link is not kept; the first link of a chain is always kept."""
        table, keys = m.table, self._keys_of(m)
        kept = self.kept.has(table.ref_digests)
        begins = np.flatnonzero(kept[:-1] & ~kept[1:])
        stops = np.append(np.flatnonzero(kept), len(kept))
        ends = stops[np.searchsorted(stops, begins, "right")]
        has_base = ~np.isin(ends, table.starts)
        lengths = table.ref_lengths
        longest = np.maximum.reduceat(np.append(lengths, 0), np.column_stack([begins, ends]).reshape(-1))[::2]
        estimates = np.where(has_base, longest, lengths[ends - 1])
        rows = np.searchsorted(table.starts, begins, "right") - 1
        columns = (column.tolist() for column in (rows, begins, ends, has_base, lengths[begins], estimates))
        for row, begin, end, is_based, length, estimate in zip(*columns, strict=True):
            digest, blobs = table.ref_digests[begin].tobytes(), set(keys[begin:end].tolist())
            if digest in self._edges:
                self._edges[digest].blobs |= blobs
            else:
                base = table.ref_digests[end].tobytes() if is_based else b""
                self._edges[digest] = Edge(digest, (ref, row), base, blobs, length, estimate)

    def _find_chains(self) -> None:
        """Find chunks at edges that an interrupted compact has already rewritten in some snapshot."""
        edges = Digests(self._edges)
        for _, _, _, m in self._manifests():
            rows = np.flatnonzero(edges.has(m.table.digests))
            refs = m.table.refs_of(rows)
            rows = np.setdiff1d(rows, rows_of(m.table, refs[~self.kept.has(m.table.ref_digests[refs])]))
            for found in chains_of(m.table, m.header.pack_names, rows, self.kept):
                edge = self._edges[found[0].digest]
                if not edge.chain:
                    edge.chain, edge.estimate_bytes = found, 0

    def add_deltas(self, ref: ManifestRef, m: Manifest, rows: Column, bases: Bytes, shares: Column) -> None:
        """Note full chunks that may become deltas to their neighbours.

        A chunk that is the base of its neighbour, also through other deltas, stays full: one of a circle must.

        Args:
            rows: (k,) of the chunks in the manifest.
            bases: (k, 16) digests of the neighbours.
            shares: (k,) estimated stored bytes of the deltas, as shares of those of the full chunks.
        """
        at = m.table.starts[rows]
        lengths = m.table.ref_lengths[at]
        estimates = (shares * lengths).astype(np.int64)
        columns = (column.tolist() for column in (rows, self._keys_of(m)[at], lengths, estimates))
        for digest, base, row, key, length, estimate in zip(m.table.digests[rows], bases, *columns, strict=True):
            if (name := digest.tobytes()) not in self._edges and not self._is_base_of(name, base.tobytes()):
                self._deltas[name] = Edge(name, (ref, row), base.tobytes(), {key}, length, estimate)
                self._delta_bases.add(base.tobytes())

    def _is_base_of(self, digest: bytes, other: bytes) -> bool:
        """Return whether a noted delta needs a chunk, `digest`, as its base or as one below it."""
        if digest not in self._delta_bases:
            return False
        while other != digest and other in self._deltas:
            other = self._deltas[other].base
        return other == digest

    # -- choose

    def plan(self, max_bytes: float) -> CompactPlan:
        """Return the most profitable plan that writes at most `max_bytes`; an empty plan if it would not pay."""
        cuts = list(self._cuts())
        at, counts = self._blobs_of(cuts)
        rooms = np.where(self._pinned[at], 0, room(self._lengths[at]))
        freed = np.bincount(np.repeat(np.arange(len(cuts)), counts), rooms, len(cuts))
        for cut, freed_bytes in zip(cuts, freed.astype(np.int64).tolist(), strict=True):
            cut.freed_bytes = freed_bytes
        cuts = [cut for cut in cuts if cut.cost_bytes < max_cost(cut.freed_bytes)]
        cuts.sort(key=_gain, reverse=True)
        plan = max(self._plan_of(cuts, max_bytes), self._plan_of([], max_bytes), key=lambda plan: plan.gain_bytes)
        if plan.gain_bytes < max(PART_BYTES * self._parts, MIN_GAIN * plan.cost_bytes):
            return CompactPlan(self.kept)
        return plan

    def _cuts(self) -> Iterator[Cut]:
        """Yield the cuts: each group of edges that share blobs, and each full chunk that may become a delta."""
        owner: dict[int, bytes] = {}  # blob -> an edge
        parent = {digest: digest for digest in self._edges}

        def root(digest: bytes) -> bytes:
            while parent[digest] != digest:
                parent[digest] = parent[parent[digest]]
                digest = parent[digest]
            return digest

        for digest, edge in self._edges.items():
            for key in edge.blobs:
                parent[root(digest)] = root(owner.setdefault(key, digest))
        groups: dict[bytes, dict[bytes, Edge]] = {}
        for digest, edge in self._edges.items():
            groups.setdefault(root(digest), {})[digest] = edge
        for edges in groups.values():
            blobs = set().union(*(edge.blobs for edge in edges.values()))
            cut = Cut(edges, blobs)
            for edge in edges.values():
                if not edge.base and not edge.chain and edge is not cut.root:
                    edge.estimate_bytes = edge.length  # a delta to the root, about as long as that to the old base
            yield cut
        for digest, edge in self._deltas.items():
            yield Cut({digest: edge}, edge.blobs)

    def _blobs_of(self, cuts: Sequence[Cut]) -> tuple[Column, list[int]]:
        """Return the numbers of the blobs of all cuts, cut after cut, and how many each has."""
        counts = [len(cut.blobs) for cut in cuts]
        keys = np.fromiter(chain.from_iterable(cut.blobs for cut in cuts), np.uint64, sum(counts))
        return np.searchsorted(self._blobs, keys), counts

    def _plan_of(self, cuts: list[Cut], max_bytes: float) -> CompactPlan:
        """Return the plan of some cuts and of packs to empty, the worst first, as far as `max_bytes` allows."""
        plan = CompactPlan(self.kept)
        alive = np.ones(len(self._blobs), bool)
        if math.isfinite(max_bytes):  # packs that pay more than a cut come before it
            rivals = [(gain, cost) for gain, cost, _ in self._worst(self._live(alive))]
            cuts = _affordable(cuts, rivals, max_bytes)
        freed, _ = self._blobs_of(cuts)
        alive[freed[~self._pinned[freed]]] = False
        for cut in cuts:
            plan.cuts.update(dict.fromkeys(cut.edges, cut))
            plan.cost_bytes += cut.cost_bytes
            plan.gain_bytes -= cut.cost_bytes
        plan.deltas = plan.cuts.keys() & self._deltas.keys()
        plan.edges = Digests(plan.cuts)
        left_bytes = max_bytes - plan.cost_bytes
        unique = self._without_copies(alive)
        live, packs = self._live(unique), self._packs[unique]
        counts = np.bincount(packs, minlength=len(self._names))
        written = np.bincount(packs, self._lengths[unique], len(self._names))
        dead = float((np.array(self._sizes) - live - _FRAME)[~self._stays].sum())
        lengths = np.bincount(self._packs[alive], self._lengths[alive], len(self._names))  # whether shared or not
        for _, _, number in self._worst(live):
            gain = self._sizes[number] - int(live[number])
            if dead <= MAX_DEAD_SHARE * live[~self._stays].sum():
                break
            if lengths[number] > left_bytes:
                continue
            left_bytes -= lengths[number]
            dead -= gain
            plan.emptied.add(self._names[number])
            plan.moved += int(counts[number])
            plan.moved_bytes += int(lengths[number])
            plan.cost_bytes += int(written[number])
            plan.gain_bytes += gain
        return plan

    def _without_copies(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return the live blobs without all but one of those that hold the same chunk, full.

        If the pack of such a copy is emptied, the copy is not moved: BlobRewriting shares the other blob, if their
        bytes are equal. The one that counts lies in a pack that must stay, if one does, else in the oldest pack.
        """
        rows = np.flatnonzero(alive & (self._contents != 0) & ~self._stays[self._packs])
        rows = rows[np.lexsort((rows, ~self._pinned[rows], self._contents[rows]))]
        copies = rows[1:][self._contents[rows[1:]] == self._contents[rows[:-1]]]
        unique = alive.copy()
        unique[copies[~self._pinned[copies]]] = False
        return unique

    def _live(self, alive: npt.NDArray[np.bool_]) -> Column:
        """Return the bytes that the live blobs of each pack need there."""
        return np.bincount(self._packs[alive], room(self._lengths[alive]), len(self._names))

    def _worst(self, live: Column) -> list[tuple[float, float, int]]:
        """Return (gain, cost, number) of the packs that may be emptied, those with the largest dead share first."""
        may = np.ones(len(self._names), bool)
        may[self._packs[self._pinned]] = False
        sizes = np.array(self._sizes, np.float64)
        gain = sizes - live - _FRAME
        may &= (gain > _FRAME) & (gain >= MIN_GAIN * live)
        numbers = np.flatnonzero(may)
        order = np.argsort(-(gain[numbers] / sizes[numbers]), kind="stable")
        return [(float(gain[n]), float(live[n]), n) for n in numbers[order].tolist()]


def _contents_of(table: ChunkTable) -> Column:
    """Return a number for each reference, equal for chunks of one digest and stored length; (m,) int64."""
    halves = np.ascontiguousarray(table.ref_digests[:, :8]).view(np.int64).reshape(-1)
    return np.asarray(halves ^ table.ref_lengths.astype(np.int64))


#: Bytes of a pack besides its blobs.
_FRAME = HEADER.size + TRAILER.size + 32


def room(lengths: Column) -> Column:
    """Return the bytes that blobs need in a pack: padded, and with their entries in the footer."""
    return -(-lengths // ALIGNMENT) * ALIGNMENT + ENTRY.itemsize


def rows_of(table: ChunkTable, refs: Column) -> Column:
    """Return the rows whose chains some references belong to, each once."""
    return np.unique(np.searchsorted(table.starts, refs, "right") - 1)


def _gain(cut: Cut) -> float:
    return (cut.freed_bytes - cut.cost_bytes) / max(1, cut.cost_bytes)


def _affordable(cuts: list[Cut], packs: list[tuple[float, float]], max_bytes: float) -> list[Cut]:
    """Return the cuts that fit into `max_bytes` if cuts and packs are taken in order of their gain per byte written."""
    items = [(_gain(cut), cut.cost_bytes, cut) for cut in cuts] + [(g / max(1.0, c), c, None) for g, c in packs]
    chosen: list[Cut] = []
    for _, cost, cut in sorted(items, key=lambda item: -item[0]):
        if cost <= max_bytes:
            max_bytes -= int(cost)
            if cut is not None:
                chosen.append(cut)
    return chosen
