"""Changed elements: the share of each layer that a save changed, from its stored deltas alone.

In: the tensors of a snapshot, and the packs that its own save wrote. Out: a LayerChange for each layer. Reads deltas up
to a limit, and rebuilds no value.

An element of a stored difference or XOR is zero if and only if the element is that of the base. A chunk that an earlier
save has stored is unchanged. A chunk that was written whole says nothing, nor does a delta to a chunk older than the
parent's (docs/design/chains.md, skips): it sums the changes of several saves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import numpy as np

from ..arrays import Bytes, Column
from ..context import Context
from ..errors import CapabilityError, IntegrityError
from ..format.blobs import blob, codecs
from ..format.blobs.codecs import sparse_decode
from ..format.keys import pack_key
from ..restore.overlaps import StoredBox
from ..state.values.containers import Path, display
from .stats import group_of
from .stored_tensors import StoredTensor

T = TypeVar("T")
#: (digests (n, 16) of chunks, names of their packs) -> which of them the parent has, (n,) bool.
OfParent = Callable[[Bytes, list[str]], Column]
#: If more than this share of a layer was written whole, its share of changed elements is not known.
MOST_WHOLE = 0.1
#: The most deltas of a layer that are read for one snapshot.
DELTAS_PER_LAYER = 4


@dataclass(frozen=True, slots=True)
class DeltaPlace:
    """Where the delta of a chunk lies, and the length of the chunk [bytes]."""

    pack: str
    offset: int
    length: int
    chunk_bytes: int


@dataclass(slots=True)
class LayerChange:
    """The changes of one layer, as far as the deltas of a save tell them.

    Attributes:
        nbytes: of all its chunks. Small tensors, which lie in the manifest, do not count [bytes].
        whole_bytes: of its new chunks that were written whole.
        delta_bytes: of its new chunks that were written as deltas.
        deltas: where each of them lies whose base is a chunk of the parent.
        elements, changed: the elements of the deltas that were read, and how many of these changed.
    """

    nbytes: int = 0
    whole_bytes: int = 0
    delta_bytes: int = 0
    deltas: list[DeltaPlace] = field(default_factory=list)
    elements: int = 0
    changed: int = 0

    @property
    def share(self) -> float | None:
        """Return the share of changed elements since the parent, 0 to 1; None if it is not known."""
        known = self.nbytes - self.whole_bytes
        if self.whole_bytes > MOST_WHOLE * self.nbytes or not known or (self.delta_bytes and not self.elements):
            return None
        return self.changed / max(1, self.elements) * self.delta_bytes / known


def layer_of(path: Path) -> str:
    """Return the layer of a tensor: its path up to the first number, or else without its last name.

    `model.h.3.attn.weight` is in `model.h.3`, and `model.wte.weight` in `model.wte`. Optimizer state is grouped by its
    kind: `optimizer.*.exp_avg`.
    """
    if (group := group_of(path)) != str(path[0] if path else "(root)"):
        return group
    names = display(path).split(".")
    numbers = [at for at, name in enumerate(names) if name.isdecimal()]
    return ".".join(names[: numbers[0] + 1] if numbers else names[:-1] or names)


def changes_by_layer(
    context: Context,
    tensors: Iterable[tuple[Path, StoredTensor]],
    own_packs: Container[str],
    of_parent: OfParent,
    limit_bytes: int,
) -> tuple[dict[str, LayerChange], int, int]:
    """Return the changes of each layer, how many deltas were read, and their bytes.

    Args:
        own_packs: names of the packs that the save wrote.
        of_parent: tells which bases are chunks of the parent.
        limit_bytes: read at most so many bytes: one delta of each layer, then a second one, and so on.

    Raises:
        IntegrityError, FormatError, NotFoundError: a delta is damaged or missing.
    """
    found: dict[str, LayerChange] = {}
    for path, stored in tensors:
        layer = found.setdefault(layer_of(path), LayerChange())
        for box in stored.boxes:
            if box.chunks:
                _add_box(layer, box, own_packs, of_parent)
    count = read_bytes = 0
    for number in range(DELTAS_PER_LAYER):
        for layer in found.values():
            some = evenly(layer.deltas, DELTAS_PER_LAYER)
            if number < len(some) and read_bytes + some[number].length <= limit_bytes:
                count, read_bytes = count + 1, read_bytes + some[number].length
                _count(context, layer, some[number])
    return {name: layer for name, layer in found.items() if layer.nbytes}, count, read_bytes


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` items, evenly spread, with the first and the last one."""
    if len(items) <= count:
        return list(items)
    return [items[at] for at in np.linspace(0, len(items) - 1, count).round().astype(int).tolist()]


def _add_box(layer: LayerChange, box: StoredBox, own_packs: Container[str], of_parent: OfParent) -> None:
    table, names = box.m.table, box.m.header.pack_names
    rows = slice(box.first_chunk, box.first_chunk + box.chunks)
    heads, lengths = table.starts[rows], table.lengths[rows].astype(np.int64)
    is_own = np.array([name in own_packs for name in names], bool)[table.ref_packs[heads]]
    is_whole = is_own & (table.ref_kinds[heads] == blob.FULL)
    is_delta = is_own & ~is_whole
    layer.nbytes += int(lengths.sum())
    layer.whole_bytes += int(lengths[is_whole].sum())
    layer.delta_bytes += int(lengths[is_delta].sum())
    if not is_delta.any():
        return
    heads, lengths = heads[is_delta], lengths[is_delta]
    bases = heads + 1  # the next link of each chain
    is_direct = of_parent(table.ref_digests[bases], [names[pack] for pack in table.ref_packs[bases].tolist()])
    columns = (table.ref_packs, table.ref_offsets, table.ref_lengths)
    places = zip(*(column[heads[is_direct]].tolist() for column in columns), lengths[is_direct].tolist(), strict=True)
    layer.deltas += [DeltaPlace(names[pack], *place) for pack, *place in places]


def _count(context: Context, layer: LayerChange, delta: DeltaPlace) -> None:
    where = f"pack {delta.pack[:12]} at {delta.offset}+{delta.length}"
    data = context.store.get_range(pack_key(delta.pack), delta.offset, delta.length)
    try:
        changed, elements = changed_elements(data, delta.chunk_bytes, where)
    except CapabilityError:  # coded in nvCOMP's ANS, and there is no GPU with nvCOMP here
        return
    layer.changed += changed
    layer.elements += elements


def changed_elements(data: memoryview, chunk_bytes: int, where: str) -> tuple[int, int]:
    """Return how many elements of a stored delta differ from its base, and how many elements it has.

    Args:
        chunk_bytes: the length of its chunk, by the manifest.
        where: its name in errors.

    Raises:
        IntegrityError, FormatError: it is damaged, or of another chunk.
        CapabilityError: it is coded in nvCOMP's ANS, and there is no GPU with nvCOMP here.
    """
    header = blob.parse(data, where)
    if header.raw_bytes != chunk_bytes or header.transform == blob.FULL:
        raise IntegrityError(f"{where}: not the delta that the manifest names; run 'snapstore check --read-data'")
    elements = header.raw_bytes // header.element_size
    if header.codecs[0] != codecs.SPARSE:
        planes = blob.decode_planes(data, header, where)
        return int(np.count_nonzero(reduce(np.bitwise_or, planes))), elements
    payload = data[header.payload_start : blob.length_of(header)]
    link = sparse_decode.StoredDelta(payload, header.block_lengths, header.block_bytes)
    try:
        (changes,) = sparse_decode.unpack([link], np.empty(elements, f"u{header.element_size}"))
    except IntegrityError as error:
        raise IntegrityError(f"{where}: {error}") from error
    gaps = len(changes.ranks)  # each of them changed; the elements of dense groups may have the difference 0
    return gaps + int(np.count_nonzero(changes.steps[gaps:])), elements
