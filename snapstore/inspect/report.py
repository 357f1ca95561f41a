"""Report: collect what the page about some runs shows, and count what was read for it.

In: an open repository. Out: a ReportData, which report_page.py shows. The figures of each snapshot come from its
record. Manifests, packs and values are read for a few steps, evenly spread over each run. A step that cannot be read
is named, and the rest is shown.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TypeVar

import numpy as np

from .. import retention
from ..catalog import policy_store
from ..catalog.history import View
from ..context import Context
from ..errors import FormatError, IntegrityError, NotFoundError, SnapstoreError, StorageError
from ..format.blobs import blob, codecs, pack
from ..format.keys import pack_key
from ..format.manifests.delta_chain import Digests
from ..format.manifests.manifest import Manifest
from ..format.records import COMMITTED, FORGOTTEN, Snapshot
from ..protocol.forget import object_sizes
from ..restore.pipeline import read_as_ruled
from ..state.values.containers import Path
from ..text import strip_hint
from .changed_elements import LayerChange, OfParent, changes_by_layer, evenly
from .layer_values import LayerMove, moves_by_layer
from .stats import codec_bytes
from .stored_tensors import StoredTensor, read_tensors

T = TypeVar("T")
#: So many steps are sampled in all, and at least two in each of the SAMPLED_RUNS longest runs.
SAMPLED_STEPS, SAMPLED_RUNS = 64, 6
#: The values of so many steps are read in all.
VALUED_STEPS = 50
#: For a step, the footers of so many packs are read, and so many bytes of deltas: a core reads 29 MB of sparse ones a
#: second, so all steps take 14 s at most.
PACKS_PER_STEP, DELTA_BYTES_PER_STEP = 32, 6 * 1024 * 1024


@dataclass(slots=True)
class SampledStep:
    """The figures of one snapshot that its manifests and packs tell.

    Attributes:
        ranks: of the job that saved it.
        packs: the number of packs that its save wrote.
        parts, codecs: the bytes that its save put into packs, by part and by codec.
        planes: (element size, is a delta, plane) -> (stored bytes, plain bytes).
        layers: what changed; empty if there is no base: of a first snapshot, or of one that was rewritten.
    """

    snapshot: Snapshot
    ranks: int = 1
    packs: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    codecs: dict[str, float] = field(default_factory=dict)
    planes: dict[tuple[int, bool, int], tuple[int, int]] = field(default_factory=dict)
    layers: dict[str, LayerChange] = field(default_factory=dict)


@dataclass(slots=True)
class MovedStep:
    """How far each layer moved between two snapshots whose values were read."""

    before: Snapshot
    snapshot: Snapshot
    layers: dict[str, LayerMove]


@dataclass(slots=True)
class ReportData:
    """All that the page shows.

    Attributes:
        created: time of the report [s since the epoch].
        snapshots: of the runs, in any state, sorted by run and order of saves.
        outside: parents in other runs, by id.
        reasons: id -> why a snapshot stays, or was forgotten.
        unknown: key -> why, of records that cannot be read or are gone.
        stored_bytes, objects: the size and the number of all packs and manifests of the repository.
        sampled: steps by run.
        moved: steps by run; None: values were not asked for.
        manifests, packs, deltas, values: the number of each that was read, and their bytes.
        unread: reference -> why it was not read.
    """

    url: str
    created: float
    runs: list[str]
    snapshots: list[Snapshot]
    outside: dict[str, Snapshot]
    reasons: dict[str, str]
    unknown: dict[str, str]
    stored_bytes: int = 0
    objects: int = 0
    sampled: dict[str, list[SampledStep]] = field(default_factory=dict)
    moved: dict[str, list[MovedStep]] | None = None
    manifests: tuple[int, int] = (0, 0)
    packs: tuple[int, int] = (0, 0)
    deltas: tuple[int, int] = (0, 0)
    values: tuple[int, int] = (0, 0)
    unread: dict[str, str] = field(default_factory=dict)


def collect(context: Context, runs: Sequence[str], *, values: bool) -> ReportData:
    """Return what the page about some runs shows; none named: about all runs.

    Raises:
        NotFoundError: there is no such run, or no snapshot.
        IntegrityError, StorageError: a run has only records that are damaged, gone or cannot be read.
    """
    view = context.index.refresh()
    for run in runs:
        view.require_run(run, states=None)
    chosen = list(dict.fromkeys(runs)) or view.runs(states=None)
    if not chosen and not view.unknown():
        raise NotFoundError(f"{context.store.url}: has no snapshots to report; save one first")
    snapshots = [s for run in chosen for s in view.snapshots(run, states=None)]
    here = {s.id for s in snapshots}
    parents = {s.parent for s in snapshots if s.parent and s.parent not in here}
    outside = {s.id: s for s in map(view.get, sorted(parents)) if s}
    unknown = {key: why for run in chosen for key, why in view.unknown(run).items()} if runs else view.unknown()
    reasons = {name: why for run in chosen for name, why in _reasons(context, view, run)}
    data = ReportData(context.store.url, time.time(), chosen, snapshots, outside, reasons, unknown)
    sizes = object_sizes(context.store)
    data.stored_bytes, data.objects = sum(sizes.values()), len(sizes)
    collector = _Collector(context, view, data)
    kept = {run: [s for s in snapshots if s.run == run and s.state == COMMITTED] for run in chosen}
    for run, some in _spread(kept, SAMPLED_STEPS).items():
        data.sampled[run] = [step for step in map(collector.sampled, some) if step]
    if values:
        pairs = {run: list(pairwise(some)) for run, some in _spread(kept, VALUED_STEPS).items()}
        data.moved = {
            run: [step for pair in of for step in [collector.moved(*pair)] if step] for run, of in pairs.items()
        }
    return data


def _reasons(context: Context, view: View, run: str) -> Iterable[tuple[str, str]]:
    """Yield the id of each snapshot of a run with why it stays, or why it was forgotten."""
    try:
        policies = policy_store.read(context.store, run)
        decisions = retention.apply(policies, view.snapshots(run), force=True)
        otherwise = "no policy keeps it: the next forget drops it" if policies else "no policy is stored for its run"
        yield from ((one.snapshot.id, "; ".join(one.reasons) or otherwise) for one in decisions)
    except (IntegrityError, FormatError, StorageError) as error:
        yield from ((s.id, f"the policies cannot be read: {error}") for s in view.snapshots(run))
    for s in view.snapshots(run, states=None):
        if s.state != COMMITTED:
            yield s.id, "; ".join(text for text in (s.reason, s.policy) if text)


def _spread(kept: dict[str, list[Snapshot]], count: int) -> dict[str, list[Snapshot]]:
    """Return at most `count` snapshots in all, evenly spread over the longest runs, two of each or more, by step."""
    longest = sorted((run for run in kept if kept[run]), key=lambda run: -len(kept[run]))[:SAMPLED_RUNS]
    total = sum(len(kept[run]) for run in longest)
    more = count - 2 * len(longest)
    current = {run: sorted(retention.current(kept[run]), key=lambda s: s.step) for run in longest}
    return {run: evenly(current[run], 2 + more * len(kept[run]) // total) for run in kept if run in longest}


class _Collector:
    """Reads single steps, and counts what it reads."""

    def __init__(self, context: Context, view: View, data: ReportData) -> None:
        self._context, self._view, self._data = context, view, data
        self._chunks: tuple[str, Digests] = "", Digests()  # of the snapshot that was read last

    def sampled(self, snapshot: Snapshot) -> SampledStep | None:
        """Return what manifests and packs tell of a snapshot; None if they cannot be read."""
        return self._tried([snapshot], self._sample)

    def moved(self, a: Snapshot, b: Snapshot) -> MovedStep | None:
        """Return how far each layer moved; None if the values cannot be read."""
        return self._tried([a, b], self._move)

    def _tried(self, snapshots: Sequence[Snapshot], read: Callable[..., T]) -> T | None:
        try:
            return read_as_ruled(self._context, snapshots, read)
        except SnapstoreError as error:  # damaged, deleted meanwhile, or the store failed: show the rest
            self._data.unread[snapshots[-1].ref] = strip_hint(error)
            return None

    def _move(self, a: Snapshot, b: Snapshot) -> MovedStep:
        layers, nbytes = moves_by_layer(self._context, a, b)
        self._data.values = _plus(self._data.values, 2, nbytes)
        return MovedStep(a, b, layers)

    def _sample(self, snapshot: Snapshot) -> SampledStep:
        read, manifests, tensors = self._manifests(snapshot)
        step = SampledStep(snapshot, ranks=max((m.header.world_size for m in manifests), default=0) or 1)
        own, is_rewritten = self._own_packs(step, manifests)
        parent = self._view.get(snapshot.parent) if snapshot.parent else None
        if parent is not None and not is_rewritten:
            named = ((path, stored) for (path, _), stored in tensors.items())
            of_parent = self._of_parent(parent)
            step.layers, *found = changes_by_layer(self._context, named, own, of_parent, DELTA_BYTES_PER_STEP)
            self._data.deltas = _plus(self._data.deltas, *found)
        self._chunks = snapshot.id, _digests(read.values())
        return step

    def _of_parent(self, parent: Snapshot) -> OfParent:
        """Return what tells which chunks the parent has: its manifests, or the packs of its save if they are gone."""
        if self._chunks[0] != parent.id and parent.state in (COMMITTED, FORGOTTEN):
            with suppress(SnapstoreError):  # deleted meanwhile, or damaged
                self._chunks = parent.id, _digests(self._manifests(parent)[0].values())
        if self._chunks[0] == parent.id:
            digests = self._chunks[1]
            return lambda found, _: digests.has(found)

        @cache
        def is_of_save(name: str) -> bool:
            return pack.read_header(self._context.store, pack_key(name)).made_for.snapshot.hex() == parent.id

        return lambda _, names: np.array([is_of_save(name) for name in names], bool)

    def _manifests(
        self, snapshot: Snapshot
    ) -> tuple[dict[int, Manifest], list[Manifest], dict[tuple[Path, int], StoredTensor]]:
        """Read the manifests of a snapshot: all of them by their `id`, those that its record names, and the tensors."""
        manifests, tensors = read_tensors(self._context, snapshot)
        read = {id(m): m for stored in tensors.values() for m, _ in stored.pieces} | {id(m): m for m in manifests}
        nbytes = sum(m.ref.size_bytes for m in read.values() if m.ref)
        self._data.manifests = _plus(self._data.manifests, len(read), nbytes)
        return read, manifests, tensors

    def _own_packs(self, step: SampledStep, manifests: Sequence[Manifest]) -> tuple[set[str], bool]:
        """Read the lists of blobs of the packs that the save of a snapshot wrote.

        Returns:
            The names of these packs, and whether a later rewrite wrote them.
        """
        before = self._packs_before(step.snapshot)
        sizes = {
            name: size
            for m in manifests
            for name, size in zip(m.header.pack_names, m.header.pack_size_list, strict=True)
            if name not in before
        }
        some, own, is_rewritten, listings = evenly(sorted(sizes), PACKS_PER_STEP), set(sizes), False, []
        for name in some:
            listing = pack.read_listing(self._context.store, pack_key(name), sizes[name])
            nbytes = listing.entries.nbytes + pack.HEADER.size + pack.TRAILER.size
            self._data.packs = _plus(self._data.packs, 1, nbytes)
            if listing.header.made_for.snapshot.hex() != step.snapshot.id:
                own.discard(name)  # of an earlier save, whose snapshot is gone
                continue
            is_rewritten = is_rewritten or listing.header.made_for.revision > 0
            listings.append(listing)
        if len(listings) < len(some):  # the parent is gone: of packs that were not read, nobody knows whose they are
            own &= set(some)
        step.packs = len(own)
        _add_listings(step, listings, len(own) / max(1, len(listings)))
        return own, is_rewritten

    def _packs_before(self, snapshot: Snapshot) -> set[str]:
        """Return the names of the packs that the parent has, so far as its manifests are still there."""
        parent = self._view.get(snapshot.parent) if snapshot.parent else None
        if parent is None or parent.state not in (COMMITTED, FORGOTTEN):
            return set()
        headers = self._context.index.headers(parent.manifests)
        return {name for h in headers if not isinstance(h, SnapstoreError) for name in h.pack_names}


def _add_listings(step: SampledStep, listings: Sequence[pack.PackListing], scale: float) -> None:
    """Add the bytes of packs to a step; `scale`: of all its packs over these."""
    parts: dict[str, float] = defaultdict(float)
    by_codec: dict[str, float] = defaultdict(float)
    for listing in listings:
        parts[listing.part] += scale * int(listing.entries["length"].sum(dtype=np.int64))
        for name, nbytes in codec_bytes(listing.entries).items():
            by_codec[name] += scale * nbytes
        in_planes = listing.entries[listing.entries["codecs"][:, 0] != codecs.SPARSE]
        for size in np.unique(in_planes["element_size"]).tolist():
            for is_delta in (False, True):
                of_kind = (in_planes["element_size"] == size) & ((in_planes["transform"] != blob.FULL) == is_delta)
                entries = in_planes[of_kind]
                plain = int(entries["raw_bytes"].sum(dtype=np.int64)) // size
                for plane, stored in enumerate(entries["plane_bytes"].sum(axis=0, dtype=np.int64).tolist()[:size]):
                    if plain:
                        key = (size, is_delta, plane)
                        step.planes[key] = _plus(step.planes.get(key, (0, 0)), stored, plain)
    step.parts, step.codecs = dict(parts), dict(by_codec)


def _digests(manifests: Iterable[Manifest]) -> Digests:
    """Return the digests of all chunks of some manifests."""
    found = Digests()
    for m in manifests:
        found.add(m.table.digests)
    return found


def _plus(pair: tuple[int, int], first: int, second: int) -> tuple[int, int]:
    return pair[0] + first, pair[1] + second
