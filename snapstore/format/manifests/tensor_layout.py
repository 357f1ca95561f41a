"""Tensor layout: check that the boxes, chunks and inline bytes of a tensor are exactly its bytes, and check its ties.

In: a manifest that was read and checked (manifest.py). Out: nothing, or FormatError. A restore relies on these checks:
it sizes memory by a tensor's entry, and puts each chunk at the place that its box declares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...arrays import sums_before
from ...errors import FormatError, UnknownFormatError
from ...state.values.tensors import TensorSpec, can_tie
from .chunk_table import ChunkTable
from .manifest import Box, Manifest, TensorEntry, part_name


def spec_of(entry: TensorEntry) -> TensorSpec:
    """Return the spec of an entry's whole tensor, even if only some boxes of it are stored."""
    return TensorSpec(entry.path, entry.kind, entry.dtype, entry.shape, entry.requires_grad, entry.tie)


def held_bytes(m: Manifest, entry: TensorEntry) -> int:
    """Return how many bytes of a tensor a manifest holds."""
    rows = (m.table.lengths[box.first_chunk : box.first_chunk + box.chunks] for box in entry.boxes)
    return (entry.inline[1] if entry.inline else 0) + sum(int(lengths.sum(dtype=np.int64)) for lengths in rows)


def check_layouts(m: Manifest, where: str) -> None:
    """Check the tensors of a manifest that a record names: it holds each of them whole.

    The root of several ranks holds only pages of its tree: the children hold the tensors.

    Raises:
        FormatError: the bytes of a tensor are not all there, or the root of several ranks holds bytes of tensors.
        UnknownFormatError: this release cannot read the layout of a tensor.
    """
    held = m.tensors
    if m.header.world_size:
        held = [entry for entry in m.tensors if entry.kind == "page"]
        tensors = m.tensors[: len(m.tensors) - len(held)]
        if m.inline or any(entry.boxes or entry.inline is not None for entry in tensors):
            raise FormatError(f"{where}: the root of {m.header.world_size} ranks holds bytes of tensors itself")
        if any(entry.kind == "page" for entry in tensors):
            raise FormatError(f"{where}: a tensor after the pages of its tree")
    sums = ChunkSums(m.table)
    for entry in held:
        check_whole(entry, sums, where)


def check_ties(parts: Mapping[str, Sequence[TensorEntry]]) -> None:
    """Check the ties of all parts of a state; a tie to a part that is not among them says nothing.

    Raises:
        FormatError: an entry is tied to one of another kind, dtype or shape.
    """
    for name, entries in parts.items():
        for entry in entries:
            if entry.tie is None or entry.tie[0] not in parts:
                continue
            part, index = entry.tie
            others = parts[part]
            if part == name or not 0 <= index < len(others) or not can_tie(spec_of(entry), spec_of(others[index])):
                raise FormatError(
                    f"{_name(entry, part_name(name))}: tied to entry {index} of {part_name(part)}, which has another "
                    "kind, dtype or shape"
                )


class ChunkSums:
    """Sums over the chunk lengths of one table, so that a box costs no loop over its chunks."""

    def __init__(self, table: ChunkTable) -> None:
        self._lengths = table.lengths.astype(np.int64)
        self._ends = sums_before(self._lengths)
        self._broken: dict[int, npt.NDArray[np.int64]] = {1: np.zeros(len(self._ends), np.int64)}

    def plain_bytes(self, box: Box) -> int:
        """Return the bytes of a box's chunks."""
        return int(self._ends[box.first_chunk + box.chunks] - self._ends[box.first_chunk])

    def cuts_elements(self, box: Box, element_size: int) -> bool:
        """Return whether a chunk of a box cuts an element."""
        if element_size not in self._broken:
            self._broken[element_size] = sums_before(self._lengths % element_size != 0)
        broken = self._broken[element_size]
        return bool(broken[box.first_chunk + box.chunks] - broken[box.first_chunk])


def check_whole(entry: TensorEntry, sums: ChunkSums, where: str) -> None:
    """Check that a manifest holds a whole tensor: inline or in one box; an empty one needs neither.

    Raises:
        FormatError: bytes of the tensor are missing, or too many.
        UnknownFormatError: the tensor lies in several boxes.
    """
    spec = spec_of(entry)
    if not entry.boxes:
        stored = entry.inline[1] if entry.inline else 0
        if stored != spec.nbytes:
            raise FormatError(f"{_name(entry, where)}: {spec.nbytes} bytes, of which {stored} are stored")
        return
    box = entry.boxes[0]
    if len(entry.boxes) != 1 or any(box.offsets) or box.sizes != entry.shape:
        raise UnknownFormatError(
            f"{_name(entry, where)}: in {len(entry.boxes)} shards, expected one; a newer snapstore may read them"
        )
    check_boxes(entry, sums, where)


def check_boxes(entry: TensorEntry, sums: ChunkSums, where: str) -> None:
    """Check that the boxes of an entry lie within its tensor, and that their bytes are in chunks or inline.

    Raises:
        FormatError: a box lies outside, or chunks or inline bytes have another length.
    """
    spec, inline = spec_of(entry), 0
    spec.check()
    if not entry.boxes:
        raise FormatError(f"{_name(entry, where)}: has no boxes")
    for box in entry.boxes:
        if not is_within(box.offsets, box.sizes, entry.shape):
            raise FormatError(
                f"{_name(entry, where)}: a box at {list(box.offsets)} of {list(box.sizes)} in a tensor of "
                f"{list(entry.shape)}"
            )
        nbytes = math.prod(box.sizes) * spec.itemsize
        if not box.chunks:
            inline += nbytes
        elif sums.plain_bytes(box) != nbytes or sums.cuts_elements(box, spec.element_size):
            raise FormatError(
                f"{_name(entry, where)}: {nbytes} bytes in {box.chunks} chunks of {sums.plain_bytes(box)} bytes, "
                f"expected as many, in whole elements of {spec.element_size}"
            )
    stored = entry.inline[1] if entry.inline else 0
    if inline != stored:
        raise FormatError(
            f"{_name(entry, where)}: {inline} bytes in boxes without chunks, of which {stored} are stored"
        )


def is_within(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a box is not empty and lies within a shape of the same rank."""
    return all(0 <= at < at + size <= whole for at, size, whole in zip(offsets, sizes, shape, strict=True))


def _name(entry: TensorEntry, where: str) -> str:
    return f"{where}: {'.'.join(map(str, entry.path))}"
