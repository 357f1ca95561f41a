"""PartSources: the manifests of a snapshot that one process or several ranks saved, and the tensors that each holds.

In: a snapshot, and which rank's own values are wanted. Out: its parts, for the plan of a restore; then, for each array
that the plan wants, the overlaps with the stored boxes. If several ranks saved, the root manifests are read first, and
children only when arrays are wanted: the children that hold a byte of them, by the root's box map. If the root has no
map, or a wrong one, the child of the reading rank is read, then others until no byte is missing.

The stored boxes must cover each wanted box exactly once, else it is an error: so no memory stays unfilled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..context import Context
from ..errors import FormatError, InvalidInputError
from ..format.manifests import manifest
from ..format.manifests.box_map import ranks_with
from ..format.manifests.manifest import Manifest, TensorEntry, manifest_name, part_name
from ..format.manifests.rank_checks import Cover, entries_by_path, match_entries, require_same_form
from ..format.manifests.tensor_layout import ChunkSums, check_boxes, check_whole, spec_of
from ..format.records import ManifestRef, Snapshot
from ..state.fill.buffers import Want
from ..state.tree.form import has_own
from ..state.values.containers import display
from ..state.values.tensors import DimOrder, TensorSpec
from ..text import counted, quoted, some
from ..threads import Threads
from .manifests import read_manifests, stored_parts
from .overlaps import Overlap, StoredBox, overlap_of

PerRankOption = Literal["same", "drop"] | int | None
#: Children that are read at once.
CHILDREN_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class AsRank:
    """Which rank reads a snapshot, and whose own values (`PerRank`) it gets.

    Attributes:
        per_rank: None: those of the rank with the same number, if as many ranks read as saved; else those of all ranks,
            and a state to fill keeps its generators. "same": likewise; else it is an error. A number: those of that
            rank. "drop": none; a state to fill keeps its own.
        rank, world_size: of the process that reads.
    """

    per_rank: PerRankOption = None
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.per_rank in (None, "same", "drop"):
            return
        if type(self.per_rank) is not int or self.per_rank < 0:
            raise InvalidInputError(
                f"per_rank {quoted(self.per_rank)}: expected 'same', 'drop' or the number of a rank"
            )

    def is_other_number(self, saved: int) -> bool:
        """Return whether nothing was chosen, and another number of ranks reads than saved; 0 ranks are one process."""
        return self.per_rank is None and self.world_size != max(saved, 1)

    def owner(self, saved: int) -> int | None:
        """Return the rank whose own values are read from a snapshot of `saved` ranks; None: there is none.

        Raises:
            InvalidInputError: there is no such rank.
        """
        if self.per_rank is None or self.per_rank == "same":
            return self.rank if self.world_size == saved else None
        if self.per_rank == "drop":
            return None
        if self.per_rank >= saved:
            ranks = "0" if saved == 1 else f"a rank from 0 to {saved - 1}"
            raise InvalidInputError(
                f"per_rank {self.per_rank}: {counted(saved, 'rank')} saved this snapshot; pass {ranks}, or 'drop'"
            )
        return self.per_rank

    def advice(self, saved: int) -> str | None:
        """Return the text of the error if each rank's own values would be left out; None: that is wanted."""
        if self.per_rank == "drop":
            return None
        if (owner := self.owner(saved)) is not None:
            return (
                f"each rank's own (PerRank, RngState): rank {owner} saved none here, other ranks did; leave "
                "it out with keys=[...], which selects the rest"
            )
        return (
            f"each rank's own (PerRank, RngState): {counted(saved, 'rank')} saved, and {self.world_size} restore, so "
            f"none is this rank; pass per_rank=<rank> (0 to {saved - 1}; in the shell: --per-rank) for that rank's "
            "values, or per_rank='drop' to leave them out"
        )


ALONE = AsRank()
SHARED_ONLY = AsRank("drop")


class PartSources:
    """The parts of a snapshot, and where the bytes of their arrays lie.

    Args:
        keys: only parts that they can match are read.
        fills: whether a state is filled, which has no place for the values of all ranks.

    Attributes:
        parts: for `RestorePlan`: those of the record, then the own values of a rank, or of all ranks.
        saved: how many ranks saved the snapshot; 0: one process.
        elsewhere: why values of other ranks are not among the parts; None: they are to be left out.

    Raises:
        IntegrityError, FormatError: a manifest is damaged.
        InvalidInputError: there is no such rank.
    """

    def __init__(
        self,
        context: Context,
        snapshot: Snapshot,
        keys: str | Sequence[str] | None,
        as_rank: AsRank,
        *,
        fills: bool = False,
    ) -> None:
        self._store, self._seed = context.store, context.engines.digest_seed
        self._roots = read_manifests(self._store, self._seed, snapshot, keys)
        self._rank = as_rank.rank
        self._children: dict[tuple[str, int], Manifest] = {}
        self._own: list[Manifest] = []  # children whose own values are wanted
        self.parts = stored_parts(context, self._roots, snapshot.ref)
        self.saved = saved = self._roots[0].header.world_size if self._roots else 0
        self.elsewhere = as_rank.advice(saved) if saved else None
        owner = as_rank.owner(saved) if saved else None
        takes_all = as_rank.is_other_number(saved) and not fills
        for root, shared in list(zip(self._roots, self.parts, strict=True)) if saved else ():
            if owner is None and not (takes_all and has_own(shared.tree)):
                continue
            refs = [ref for ref in root.header.children if owner is None or ref.rank == owner]
            own = [child for child in self._read(root, refs) if child.tree is not None]
            self._own += own
            for child, part in zip(own, stored_parts(context, own, snapshot.ref), strict=True):
                self.parts.append(replace(part, of_rank=True, rank=child.header.rank if owner is None else None))

    def require_own(self, paths: Sequence[str]) -> None:
        """Check that the places of values of other ranks, which are left out, are none, or are to be left out.

        Raises:
            InvalidInputError: the values were neither chosen nor dropped.
        """
        if paths and self.elsewhere is not None:
            raise InvalidInputError(f"{some(paths, 5)}: {self.elsewhere}")

    def overlaps(self, wants: Iterable[Want]) -> dict[Want, list[Overlap]]:
        """Return for each array the overlaps to be read.

        Raises:
            IntegrityError, FormatError: a manifest is damaged, or the stored boxes of an array do not cover each wanted
                byte exactly once.
        """
        opened = [_Open(want, self.parts[want.part].specs[want.entry]) for want in wants]
        by_part: dict[int, list[_Open]] = {}
        for one in opened:
            by_part.setdefault(one.want.part, []).append(one)
        for part, ones in by_part.items():
            self._fill(part, ones)
        return {one.want: one.found for one in opened}

    def _fill(self, part: int, opened: Sequence[_Open]) -> None:
        """Find the overlaps of arrays of one part."""
        if part >= len(self._roots):
            _check(self._own[part - len(self._roots)], [(one, one.want.entry) for one in opened])
        elif self._roots[part].header.world_size:
            root = self._roots[part]
            by_path = entries_by_path(root)
            by_index: dict[int | None, list[_Open]] = {}
            for one in opened:
                by_index.setdefault(one.want.entry, []).append(one)
            for child in self._children_of(root, opened):
                entries = enumerate(match_entries(by_path, child.tensors))
                held = [(number, index) for number, (entry, index) in entries if entry.boxes or entry.inline]
                _check(child, [(one, number) for number, index in held for one in by_index.get(index, ())])
        else:  # `read_manifests` has checked that each tensor is whole
            m = self._roots[part]
            for one in opened:
                one.add(m, one.want.entry)
            return
        for one in opened:
            one.require_covered(part_name(self.parts[part].name))

    def _children_of(self, root: Manifest, opened: Sequence[_Open]) -> Iterator[Manifest]:
        """Yield children of a root until no byte is missing: those of the box map, this rank's own, then the others."""
        wanted = ((one.want.entry, box) for one in opened for box in one.boxes)
        named = ranks_with(root.header.box_map, wanted, manifest_name(root.header))
        groups: list[list[ManifestRef]] = [[], [], []]
        for ref in root.header.children:
            groups[0 if ref.rank in named else 1 if ref.rank == self._rank else 2].append(ref)
        for refs in groups:
            for first in range(0, len(refs), CHILDREN_AT_ONCE):
                if not any(one.left for one in opened):
                    return
                yield from self._read(root, refs[first : first + CHILDREN_AT_ONCE])

    def _read(self, root: Manifest, refs: Sequence[ManifestRef]) -> list[Manifest]:
        """Return children of a root; they are kept in memory."""
        new = [ref for ref in refs if (ref.part, ref.rank) not in self._children]
        with Threads(CHILDREN_AT_ONCE) as threads:
            read = threads.start(lambda ref: manifest.read(self._store, ref, self._seed), new)()
        for ref, child in zip(new, read, strict=True):
            header = child.header
            if header.world_size != root.header.world_size or header.children:
                raise FormatError(
                    f"{ref.key}: of {header.world_size} ranks, with {len(header.children)} children; its root says "
                    f"{root.header.world_size} ranks, and a child has none"
                )
            self._children[ref.part, ref.rank] = child
        return [self._children[ref.part, ref.rank] for ref in refs]


class _Open:
    """A wanted array while its stored boxes are looked for.

    Attributes:
        spec: of the whole array.
        boxes: the wanted boxes.
        found: the overlaps so far.
        left: how many elements no stored box has given yet.
    """

    def __init__(self, want: Want, spec: TensorSpec) -> None:
        self.want, self.spec = want, spec
        self.found: list[Overlap] = []
        whole = ((0,) * len(spec.shape), spec.shape)
        self.boxes = [whole] if want.boxes is None else list(want.boxes)
        self.left = sum(math.prod(sizes) for _, sizes in self.boxes)

    def add(self, m: Manifest, number: int) -> None:
        """Add the overlaps with an entry of a manifest; the entry has been checked."""
        itemsize = self.spec.itemsize
        for stored in stored_boxes(m, m.tensors[number], itemsize, m.dim_orders.get(number, ())):
            start = 0
            for wanted in self.boxes:
                found = overlap_of(stored, wanted, itemsize, start)
                start += math.prod(wanted[1]) * itemsize
                if found is not None:
                    self.found.append(found)
                    self.left -= math.prod(found.sizes[:-1])

    def require_covered(self, where: str) -> None:
        """Check that the overlaps hold each wanted element exactly once.

        Raises:
            FormatError: one is missing, or is held twice.
        """
        starts = [0]
        for _, sizes in self.boxes:
            starts.append(starts[-1] + math.prod(sizes) * self.spec.itemsize)
        cover = Cover(sizes for _, sizes in self.boxes)
        for found in self.found:
            cover.add(starts.index(found.target_start), found.target_at[:-1], found.sizes[:-1])
        if self.left or cover.wrong():
            problem = f"{self.left} of its elements are missing" if self.left > 0 else "its boxes overlap"
            raise FormatError(f"{where}: {display(self.spec.path)}: {problem}; run 'snapstore check'")


def _check(child: Manifest, entries: Sequence[tuple[_Open, int]]) -> None:
    """Check entries of a child, given by their numbers, and add their overlaps to the wanted arrays.

    Raises:
        FormatError: an entry contradicts the root's, or itself.
    """
    sums, where = ChunkSums(child.table), f"{part_name(child.header.part)}, rank {child.header.rank}"
    for one, number in entries:
        entry = child.tensors[number]
        require_same_form(spec_of(entry), one.spec, where)
        if entry.boxes:
            check_boxes(entry, sums, where)
        else:
            check_whole(entry, sums, where)
        one.add(child, number)


def stored_boxes(m: Manifest, entry: TensorEntry, itemsize: int, order: DimOrder = ()) -> Iterator[StoredBox]:
    """Yield the boxes of an entry; boxes without chunks lie in the inline bytes, one after the other."""
    at = entry.inline[0] if entry.inline else 0
    if not entry.boxes and entry.inline is not None:
        yield StoredBox(m, (0,) * len(entry.shape), entry.shape, inline=at, dim_order=order)
    for box in entry.boxes:
        yield StoredBox(m, box.offsets, box.sizes, box.first_chunk, box.chunks, at, order)
        at += 0 if box.chunks else math.prod(box.sizes) * itemsize
