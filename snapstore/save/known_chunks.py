"""Bases: the snapshots that a save builds on; which chunks they hold, and which chunk is the base of which.

In: the manifests of the base snapshots. Out: for each chunk of the save the row of the same chunk in a base (dedup), or
the row of the chunk at the same place of the same tensor, to which a delta may be stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import Bytes, Column
from ..context import Context
from ..errors import DAMAGE, CapabilityError, StorageError
from ..format.keys import pack_key
from ..format.manifests import manifest
from ..format.manifests.chunk_table import ChunkTable
from ..format.manifests.delta_choice import ChainCosts
from ..format.manifests.manifest import Manifest, TensorEntry
from ..format.records import MAX_COUNTED, ManifestRef, Snapshot
from ..protocol.session import MOST_MANIFESTS, SaveSession, SharedSession, main_manifests
from ..state.values.containers import Path, display
from ..storage.base import ObjectStore
from ..text import counted, log
from .inputs import Lineage
from .near_children import NearChildren

#: Dotted path, dtype and shape of a tensor, and the offsets and sizes of a strip of it in all dimensions but the first.
BoxPlace = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=1 << 15)  # each save asks for the same places, twice
def place_of(
    path: Path,
    dtype: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...] | None = None,
    sizes: tuple[int, ...] | None = None,
) -> BoxPlace:
    """Return where a box lies in its state, without its rows; a state saved from an iterator has the same places.

    Args:
        offsets, sizes: of the box; None: it is the whole tensor.
    """
    offsets = (0,) * len(shape) if offsets is None else offsets
    return display(path), dtype, shape, offsets[1:], (shape if sizes is None else sizes)[1:]


class _BoxChunks(msgspec.Struct, frozen=True, gc=False):
    """The chunks of a stored box."""

    start: int  # of the box in its strip [bytes]
    first_row: int
    count: int
    in_first_base: bool


#: The session of a save as the writers of its ranks see it.
AnySession = SaveSession | SharedSession


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    """One snapshot that a save may build on; `is_other`: it is looked through for equal chunks alone."""

    snapshot: Snapshot
    manifests: Sequence[Manifest]
    is_other: bool = False


class Bases:
    """All chunks that a save may reference, as one chunk table over one list of packs.

    Args:
        damaged: names of packs that are missing or damaged.
        restore_cost: as in SaveOptions; None: no skips.

    Attributes:
        snapshots: the base snapshots.
        snapshot: the first of them, whose bytes staging may still keep; None if it is one of another run.
        table: the chunks of all base snapshots, and then older chunks of their chains, which are the bases of skips;
            `ref_packs` counts in `packs`.
        count: how many of the chunks the base snapshots hold.
        generation: of a snapshot that builds on all of these.
        skips: (count,) the row of the older chunk that must be the base instead of the newest one, or -1.
        usable: (n,) bool, which of the chunks need no damaged pack.
        manifests: of all base snapshots, as far as they were read.
        packs, pack_sizes: hex names and sizes [bytes].
    """

    def __init__(
        self, bases: Sequence[Base] = (), damaged: Collection[str] = (), restore_cost: float | None = None
    ) -> None:
        self.packs: list[str] = []
        self.pack_sizes: list[int] = []
        self.snapshots = [base.snapshot for base in bases]
        self.snapshot = self.snapshots[0] if bases and not bases[0].is_other else None
        self.manifests = [m for base in bases for m in base.manifests]
        self.generation = next_generation(self.snapshots)
        # most tensors have one: no list for the garbage collector
        self._places: dict[BoxPlace, _BoxChunks | list[_BoxChunks]] = {}
        self._ends: list[int] = []  # of the rows of each base
        known: dict[str, int] = {}
        tables: list[ChunkTable] = []
        rows, numbers = 0, [np.empty(0, np.int64)]
        for i, base in enumerate(bases):
            for m in (m for m in base.manifests if len(m.table)):
                tables.append(self._adopt(m, known))
                numbers.append(np.arange(len(m.table)))
                for entry in m.tensors if not base.is_other else ():
                    self._note_boxes(m, entry, rows, in_first_base=i == 0)
                rows += len(m.table)
            self._ends.append(rows)
        self._needed = sum(not base.is_other for base in bases)
        self.table, self.count = ChunkTable.concatenate(tables), rows
        self.skips = np.full(rows, -1, np.int64)
        self.costs = ChainCosts(self.table)
        if restore_cost is not None and rows and self.snapshot is not None:
            chosen, refs = self.costs.skips(restore_cost, np.concatenate(numbers))
            if len(chosen):
                self.skips[chosen] = rows + np.arange(len(chosen))
                self.table = ChunkTable.concatenate([self.table, self.table.from_links(chosen, refs)])
                self.costs = ChainCosts(self.table)
        self.depths = self.table.depths
        self.lengths = self.table.lengths
        bad = np.isin(self.table.ref_packs, [number for name, number in known.items() if name in damaged])
        self.usable = ~np.logical_or.reduceat(bad, self.table.starts[:-1]) if rows else np.zeros(0, bool)
        keys, usable = self._keys(self.table.digests), np.flatnonzero(self.usable[:rows])
        self._order = usable[np.argsort(keys[usable], kind="stable")]
        self._sorted = keys[self._order]

    def _note_boxes(self, m: Manifest, entry: TensorEntry, rows: int, *, in_first_base: bool) -> None:
        """Note where the chunks of a tensor lie; the table of its manifest begins at row `rows`."""
        for box in entry.boxes:
            if not box.chunks:
                continue
            start = 0
            if any(box.offsets[:1]):
                chunks = slice(box.first_chunk, box.first_chunk + box.chunks)
                start = box.offsets[0] * (int(m.table.lengths[chunks].sum()) // max(box.sizes[0], 1))
            place = place_of(entry.path, entry.dtype, entry.shape, box.offsets, box.sizes)
            run = _BoxChunks(start, rows + box.first_chunk, box.chunks, in_first_base)
            found = self._places.setdefault(place, run)
            if isinstance(found, list):
                found.append(run)
            elif found is not run:
                self._places[place] = [found, run]

    def _runs_at(self, place: BoxPlace) -> Sequence[_BoxChunks]:
        found = self._places.get(place, ())
        return (found,) if isinstance(found, _BoxChunks) else found

    def _adopt(self, m: Manifest, known: dict[str, int]) -> ChunkTable:
        """Return the manifest's table, its packs renumbered into `self.packs`."""
        own = m.own_packs
        for name, size in own.items():
            if name not in known:
                known[name] = len(self.packs)
                self.packs.append(name)
                self.pack_sizes.append(size)
        renumber = np.array([known[name] if name in own else 0 for name in m.header.pack_names] or [0], np.uint32)
        return dataclasses.replace(m.table, ref_packs=renumber[m.table.ref_packs])

    @staticmethod
    def _keys(digests: Bytes) -> npt.NDArray[np.uint64]:
        """Return the first half of every digest, as a sort key."""
        return np.ascontiguousarray(digests[:, :8]).view(np.uint64).reshape(-1)

    def find(self, digests: Bytes) -> npt.NDArray[np.int64]:
        """Return the row of every digest (n, 16) among all bases, -1 if unknown."""
        if not len(self._sorted) or not len(digests):
            return np.full(len(digests), -1, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, self._keys(digests)), len(self._sorted) - 1)
        rows = self._order[at]
        # Two different digests have equal halves by a chance of 2^-64. Such a chunk is stored again: that is correct.
        return np.where((self.table.digests[rows] == digests).all(axis=1), rows, -1)

    def built_on(self, rows: Column) -> list[Snapshot]:
        """Return the snapshots that a save builds on which refers to `rows`: those of other runs only if it does."""
        used = set(np.searchsorted(self._ends, np.unique(rows[rows >= 0]), side="right").tolist())
        return [one for number, one in enumerate(self.snapshots) if number < self._needed or number in used]

    def first_row(self, place: BoxPlace) -> tuple[int, bool]:
        """Return the row of the first chunk of the tensor at `place`, and whether the first base has it.

        (-1, False): no base has it.
        """
        first = next((run for run in self._runs_at(place) if run.start == 0), None)
        return (first.first_row, first.in_first_base) if first else (-1, False)

    def rows_at(self, place: BoxPlace | None, starts: Column, lengths: Column) -> tuple[Column, bool]:
        """Return the row of the chunk at each place of a strip, or -1, and whether the first base has one of them.

        Args:
            place: None: all rows are -1.
            starts, lengths: (n,) of each chunk in its strip [bytes].
        """
        runs = self._runs_at(place) if place else ()
        if len(runs) == 1 and (run := runs[0]).start == starts[0] and run.count == len(starts):
            first, end = run.first_row, run.first_row + run.count
            if run.count == 1:  # most tensors have one chunk
                return np.array([first if self.lengths[first] == lengths[0] else -1]), run.in_first_base
            return np.where(self.lengths[first:end] == lengths, np.arange(first, end), -1), run.in_first_base
        rows = np.full(len(starts), -1, np.int64)
        for run in runs:
            found = self.lengths[run.first_row : run.first_row + run.count].astype(np.int64)
            ends = run.start + np.cumsum(found)
            at = np.minimum(np.searchsorted(ends, starts, side="right"), run.count - 1)
            same = (rows < 0) & (ends[at] - found[at] == starts) & (found[at] == lengths)
            rows[same] = run.first_row + at[same]
        firsts = [run.first_row for run in runs if run.in_first_base]
        return rows, bool(firsts) and bool((rows >= 0).any())


def next_generation(bases: Sequence[Snapshot]) -> int:
    """Return the generation of a snapshot that builds on `bases`; see `Snapshot.generation`."""
    return (bases[0].generation + 1) % MAX_COUNTED if bases else 0


def load_bases(
    context: Context, session: AnySession, cached: Mapping[str, Manifest], near: NearChildren | None = None
) -> Bases:
    """Return the chunks that a save may reference, from the base snapshots that its session allows.

    A base whose manifests cannot be read is left out. So is a base with another chunk size: a repair may have
    reconstructed a config without knowing the size. Chunks in damaged packs are not used. At most MOST_MANIFESTS
    manifests of other runs' snapshots are read.

    Args:
        cached: manifests in memory, by SHA-256.
        near: chooses among the children of a base of several ranks; None: all are read.

    Raises:
        FormatError: a base has another digest seed, so the config is not that of this repository. A state that is saved
            with it would be unreadable once the right config is back.
    """
    config = context.config

    def read(ref: ManifestRef) -> Manifest:
        known = session.manifests.get(ref.sha256) or cached.get(ref.sha256)
        return known or manifest.read(context.store, ref, None)

    others = [snapshot for snapshot in session.usable_bases if snapshot.id in session.others]
    left = MOST_MANIFESTS - len({ref.sha256 for snapshot in others for ref in main_manifests(snapshot)})

    def children_of(root: Manifest, *, is_other: bool) -> Iterator[tuple[ManifestRef, Manifest]]:
        nonlocal left
        found = near.children(root, read) if near else ((of, read(of)) for of in root.header.children)
        for one in islice(found, left) if is_other else found:
            left -= is_other
            yield one

    def readable() -> Iterator[Base]:
        for snapshot in session.usable_bases:
            found: list[tuple[ManifestRef, Manifest]] = []
            is_other = snapshot.id in session.others
            if near and (own := near.own(snapshot)):  # in memory: not even the roots are read
                yield Base(snapshot, own)
                continue
            try:
                for ref in main_manifests(snapshot) if is_other else snapshot.manifests:
                    root = read(ref)
                    found.append((ref, root))
                    found += children_of(root, is_other=is_other)
            except (*DAMAGE, StorageError) as error:
                log.warning("run=%s base %s cannot be used: %s", session.run, snapshot.ref, error)
                continue
            for ref, m in found:
                manifest.check_seed(m.header, config.digest_seed, f"base {snapshot.ref}: {ref.key}")
            if all(m.header.chunk_bytes == config.chunk_bytes for _, m in found):
                yield Base(snapshot, [m for _, m in found], is_other)

    bases = list(readable())
    return Bases(bases, _damaged_packs(context.store, session, bases), context.options.restore_cost)


def expected_manifests(context: Context, run: str, lineage: Lineage) -> list[Manifest]:
    """Return manifests whose chunks the next save of one process may refer to, as far as they can be read.

    These are the parent's, or those of other runs' newest snapshots. The save itself decides, by all rules.
    """
    found = dict[str, Manifest]()
    try:
        view = context.index.refresh(run)
        parent = lineage.next_save(run)[0]
        newest = view.get(parent) if parent else view.newest(run)
        if newest is not None:
            chosen = [newest.manifests]
        else:
            others = context.index.newest_elsewhere(run, MOST_MANIFESTS) if context.options.share_runs else ()
            chosen = [main_manifests(snapshot) for snapshot in others]
        for ref in (ref for refs in chosen for ref in refs if ref.sha256 not in found):
            if newest is None and len(found) >= MOST_MANIFESTS:
                break
            found[ref.sha256] = manifest.read(context.store, ref, None)
    except (*DAMAGE, StorageError, CapabilityError) as error:
        log.info("run=%s the chunks of further bases are not known ahead: %s", run, error)
    return [m for m in found.values() if m.header.digest_seed == context.config.digest_seed]


def _damaged_packs(store: ObjectStore, session: AnySession, bases: Sequence[Base]) -> set[str]:
    """Return the names of packs that are missing, of another size, or in quarantine.

    The save does not read known chunks, so it would not notice. If the store cannot tell, for example because of a bad
    sector, return all packs: a full save needs none of them.
    """
    expected = {name: size for base in bases for m in base.manifests for name, size in m.own_packs.items()}
    try:
        sizes = store.sizes([pack_key(name) for name in expected])
    except StorageError as error:
        text = "run=%s the packs of the bases cannot be checked, saving in full; run 'snapstore repair': %s"
        log.warning(text, session.run, error)
        return set(expected)
    damaged = {
        name
        for name, size in expected.items()
        if sizes.get(pack_key(name)) != size or pack_key(name) in session.quarantined
    }
    if damaged:
        log.warning(
            "run=%s damaged bases: %s; their chunks are stored again; run 'snapstore repair': first %s",
            session.run,
            counted(len(damaged), "pack"),
            pack_key(min(damaged)),
        )
    return damaged
