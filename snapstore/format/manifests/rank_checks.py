"""Rank checks: whether the root manifest of a part and its children, one per rank, fit together and are complete.

In: a root manifest, then its children one by one. Out: nothing, or FormatError. Memory grows with the tensors, not with
the ranks (docs/format.md, "Several ranks").
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from ...errors import FormatError
from ...state.values.containers import display
from ...state.values.tensors import TensorSpec, family
from ...storage.base import ObjectStore
from ..records import RANKS, ManifestRef
from . import manifest
from .box_map import BoxMap
from .manifest import Manifest, ManifestHeader, TensorEntry
from .tensor_layout import ChunkSums, check_boxes, check_whole, spec_of

#: A prime. Boxes that do not tile their tensor pass with a probability of at most 64 in this number.
_PRIME = 2**61 - 1


def check_roots(headers: Iterable[ManifestHeader], features: Sequence[str], where: str) -> None:
    """Check the manifests of a record: all are of one process, or all are roots of equally many ranks.

    Args:
        features: of the record.

    Raises:
        FormatError: their numbers of ranks differ, or contradict the features.
    """
    sizes = {header.world_size for header in headers}
    several = RANKS in features
    if len(sizes) > 1 or any((size > 0) != several for size in sizes):
        raise FormatError(f"{where}: manifests of {sorted(sizes)} ranks, and the features {list(features)}")


class Cover:
    """Checks that boxes tile whole tensors: each element lies in exactly one box.

    The value of a box is the product, over its dimensions, of x[end] - x[start], where x[0], x[1], ... are variables of
    that dimension. The values of disjoint boxes that cover a tensor add up to the value of the whole tensor, as inner
    terms cancel. For any other boxes the two polynomials differ, so their values at random points almost always differ.
    The check takes one product per box, in any order.

    Args:
        shapes: of the tensors.
    """

    def __init__(self, shapes: Iterable[Sequence[int]]) -> None:
        self._points = defaultdict[int, defaultdict[int, int]](lambda: defaultdict(lambda: secrets.randbelow(_PRIME)))
        self._left = [self._product([0] * len(shape), shape) for shape in shapes]

    def add(self, tensor: int, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Add a box that is not empty and lies within its tensor."""
        self._left[tensor] = (self._left[tensor] - self._product(offsets, sizes)) % _PRIME

    def wrong(self) -> list[int]:
        """Return the numbers of tensors without a tiling."""
        return [number for number, left in enumerate(self._left) if left]

    def _product(self, offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for dimension, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            points = self._points[dimension]
            product = product * (points[start + size] - points[start]) % _PRIME
        return product


def entries_by_path(root: Manifest) -> dict[bytes, list[int]]:
    """Return packed path -> numbers of a root's entries, without pages, for `match_entries`."""
    numbers: dict[bytes, list[int]] = {}
    for number, entry in enumerate(root.tensors):
        if entry.kind != "page":
            numbers.setdefault(_key_of(entry), []).append(number)
    return numbers


def match_entries(
    by_path: Mapping[bytes, Sequence[int]], entries: Iterable[TensorEntry]
) -> Iterator[tuple[TensorEntry, int | None]]:
    """Yield each entry of a child with the number of the root's entry that it is a part of, or None.

    None means that the entry is the rank's own. The n-th entry of a path belongs to the root's n-th entry of that path.
    """
    seen: dict[bytes, int] = {}
    for entry in entries:
        key = _key_of(entry)
        numbers, n = by_path.get(key, ()), seen.get(key, 0)
        seen[key] = n + 1
        yield entry, numbers[n] if n < len(numbers) and entry.kind != "page" else None


def _key_of(entry: TensorEntry) -> bytes:
    return msgspec.msgpack.encode(entry.path)  # the hashes of bytes are secret, those of tuples of numbers are not


def read_children(store: ObjectStore, ref: ManifestRef, root: Manifest, digest_seed: int | None) -> list[Manifest]:
    """Read and check all children of a root manifest; the manifest of one process has none.

    Raises:
        IntegrityError: one is missing, cut short or altered.
        FormatError: the children and the root do not fit together.
    """
    if not root.header.world_size:
        return []
    ranks, children = RankCheck(root, ref.key), []
    for child in root.header.children:
        children.append(manifest.read(store, child, digest_seed))
        ranks.add(children[-1], child.key)
    ranks.finish()
    return children


def require_same_form(spec: TensorSpec, whole: TensorSpec, where: str) -> None:
    """Raise FormatError unless a child's entry has the kind, dtype and shape of the root's entry."""
    if (family(spec.kind), spec.dtype, spec.shape) != (family(whole.kind), whole.dtype, whole.shape):
        raise FormatError(
            f"{where}: {display(spec.path)}: {spec.kind} {spec.dtype} {list(spec.shape)}, the root says {whole.kind} "
            f"{whole.dtype} {list(whole.shape)}"
        )


class RankCheck:
    """Checks the children of one root manifest: `add` each of them, then `finish`.

    Args:
        where: names the root in errors.

    Raises:
        FormatError: an entry of the root is not valid, or its box map does not decode.
    """

    def __init__(self, root: Manifest, where: str) -> None:
        self._root, self._where = root, where
        self._by_path = entries_by_path(root)
        self._specs = [spec_of(entry) for entry in root.tensors]
        for spec in self._specs:
            spec.check()
        self._cover = Cover(spec.shape for spec in self._specs)
        for number, entry in enumerate(root.tensors):
            if entry.kind == "page":  # the root's own
                self._cover.add(number, [0] * len(entry.shape), entry.shape)
        self._packs = root.own_packs
        self._depth = int(root.table.depths.max(initial=0))
        self._left = [child.rank for child in reversed(root.header.children)]
        self._map = BoxMap.decode(root.header.box_map, where) if root.header.box_map else None
        self._mapped = [0] * len(root.tensors)  # boxes of each tensor that children and map agree on

    def add(self, child: Manifest, where: str) -> None:
        """Check the next child, in the root's order.

        Raises:
            FormatError: it contradicts the root, or its entries, chunks and inline bytes disagree.
        """
        self._check_header(child.header, where)
        self._check_tree(child, where)
        sums, has_own = ChunkSums(child.table), False
        for entry, number in match_entries(self._by_path, child.tensors):
            if number is not None:
                if has_own:
                    raise FormatError(f"{where}: {display(entry.path)}: after values that are the rank's own")
                self._add_entry(number, entry, sums, where)
                self._compare_map(number, entry, child.header.rank)
                continue
            has_own = True
            check_whole(entry, sums, where)
        if has_own and child.tree is None:
            raise FormatError(f"{where}: entries of its own, and no tree")
        self._packs.update(zip(child.header.pack_names, child.header.pack_size_list, strict=True))
        self._depth = max(self._depth, child.header.depth)

    def finish(self) -> None:
        """Check all children together.

        Raises:
            FormatError: a child was not added, the boxes of a tensor overlap or leave a gap, or the root's box map,
                packs or depth are not those of its children.
        """
        header = self._root.header
        if self._left:
            raise FormatError(f"{self._where}: the child of rank {self._left[-1]} is missing")
        for number in self._cover.wrong()[:1]:
            raise FormatError(
                f"{self._where}: {display(self._root.tensors[number].path)}: the boxes of its {header.world_size} "
                "ranks overlap, or leave a gap"
            )
        for number, entry in enumerate(self._root.tensors if self._map else ()):
            if self._map and self._map.count(number) not in (None, self._mapped[number]):
                raise FormatError(f"{self._where}: {display(entry.path)}: its box map names boxes that no child has")
        packs = dict(zip(header.pack_names, header.pack_size_list, strict=True))
        if len(packs) < len(header.pack_names) or packs != self._packs:
            odd = sorted(packs.items() ^ self._packs.items())
            raise FormatError(
                f"{self._where}: its packs are not its own and its children's, each once: {len(header.pack_names)} and "
                f"{len(self._packs)}" + (f", first {odd[0][0]}" if odd else "")
            )
        if header.depth != self._depth:
            raise FormatError(
                f"{self._where}: chains of {header.depth} deltas, its own and its children's {self._depth}"
            )

    def _check_header(self, header: ManifestHeader, where: str) -> None:
        root = self._root.header
        if not self._left or header.rank != self._left.pop():
            raise FormatError(f"{where}: rank {header.rank} is not the next child of {self._where}")
        if header.children:
            raise FormatError(f"{where}: a child with children of its own")
        for name in ("part", "world_size", "chunk_bytes", "digest_seed"):
            if getattr(header, name) != getattr(root, name):
                raise FormatError(f"{where}: its {name} is not that of its root")

    @staticmethod
    def _check_tree(child: Manifest, where: str) -> None:
        tree = child.tree
        if tree is not None and (type(tree) is not list or tree[:1] not in (["own"], ["pages"])):
            raise FormatError(f"{where}: the tree of a child is neither nil nor of the rank's own values")

    def _add_entry(self, number: int, entry: TensorEntry, sums: ChunkSums, where: str) -> None:
        spec, whole = spec_of(entry), self._specs[number]
        require_same_form(spec, whole, where)
        if not entry.boxes and not entry.inline:
            return  # an entry without bytes: only `match_entries` needs it, to count
        check_boxes(entry, sums, where)
        for box in entry.boxes:
            self._cover.add(number, box.offsets, box.sizes)

    def _compare_map(self, number: int, entry: TensorEntry, rank: int) -> None:
        """Compare the boxes of a child with the root's map."""
        named = self._map.boxes(number, rank) if self._map else None
        if named is None:
            return
        if sorted(named) != sorted([*box.offsets, *box.sizes] for box in entry.boxes):
            raise FormatError(
                f"{self._where}: {display(entry.path)}: its box map names other boxes of rank {rank}: {named}"
            )
        self._mapped[number] += len(named)
