"""Near children: which manifests of a base of several ranks a rank reads.

In: the boxes that this rank stores, and the root manifest of a part of a base. Out: the child manifests whose boxes
overlap them, by the root's box map. If this rank has values of its own, also the child of the nearest rank: the one
with about the same position among the ranks of the base. Without a map, children are read in order of that nearness.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from ..format.manifests.box_map import Box, ranks_with
from ..format.manifests.boxes import overlap
from ..format.manifests.manifest import Manifest, manifest_name
from ..format.records import ManifestRef, Snapshot
from .inputs import PartInput

TensorForm = tuple[tuple[str | int, ...], str, tuple[int, ...]]  # path, dtype and shape of a whole tensor


class NearChildren:
    """Chooses the children that one rank reads, by the boxes that it stores.

    Args:
        last: the manifests that the record of this rank's last save names, and the children that it wrote.
    """

    def __init__(
        self,
        inputs: Sequence[PartInput],
        rank: int,
        world_size: int,
        last: tuple[Sequence[ManifestRef], Sequence[Manifest]] = ((), ()),
    ) -> None:
        self._inputs, self._last = inputs, last
        self._place = (rank + 0.5) / world_size
        self._with_own = {part.name for part in inputs if part.own_nodes is not None}

    @cached_property
    def _boxes(self) -> dict[str, dict[TensorForm, list[Box]]]:
        """The boxes of each tensor, by part; most saves build on this rank's last one, and need none."""
        found: dict[str, dict[TensorForm, list[Box]]] = defaultdict(lambda: defaultdict(list))
        for part in self._inputs:
            for tensor in part.tensors:
                if of := tensor.box_of:
                    form = of.spec.path, of.spec.dtype, of.spec.shape
                    found[part.name][form].append((of.piece.offsets, tensor.spec.shape))
        return found

    def own(self, snapshot: Snapshot) -> Sequence[Manifest]:
        """Return the children that this rank wrote, if the base is its last save and was not rewritten since."""
        named, children = self._last
        return children if named and list(named) == snapshot.manifests else ()

    def children(
        self, root: Manifest, read: Callable[[ManifestRef], Manifest]
    ) -> Iterator[tuple[ManifestRef, Manifest]]:
        """Yield children of a root until they hold all of this rank's boxes that are in the base.

        If this rank has values of its own in the part, at least one child is yielded: its own if the ranks are the
        same.

        Raises:
            Anything that `read` raises.
        """
        own, needs_one = self._boxes[root.header.part], root.header.part in self._with_own
        if not own and not needs_one:
            return
        there: dict[TensorForm, list[int]] = {}
        for number, entry in enumerate(root.tensors):
            there.setdefault((entry.path, entry.dtype, entry.shape), []).append(number)
        wanted = {form: boxes for form, boxes in own.items() if form in there}
        missing = sum(math.prod(sizes) for boxes in wanted.values() for _, sizes in boxes)
        places = ((number, box) for form, boxes in wanted.items() for number in there[form] for box in boxes)
        named = ranks_with(root.header.box_map, places, manifest_name(root.header))
        at = self._place * root.header.world_size - 0.5
        near = sorted(root.header.children, key=lambda ref: abs(ref.rank - at))
        first = near[0].rank if near and needs_one else None
        for ref in sorted(near, key=lambda ref: (ref.rank != first, ref.rank not in named)):
            if missing <= 0 and not needs_one:
                return
            needs_one = False
            child = read(ref)
            for entry in child.tensors:
                for box in wanted.get((entry.path, entry.dtype, entry.shape), ()):
                    shared = (overlap(box, (stored.offsets, stored.sizes)) for stored in entry.boxes)
                    missing -= sum(math.prod(found[1]) for found in shared if found)
            yield ref, child
