"""Tensor entries of a manifest: which boxes of which tensors it holds, and the dimension orders beside them.

In: entries, and dimension orders by the number of the entry. Out: the section `strides`, and back (docs/format.md,
"Manifest"). A manifest has this section if and only if it has the feature: a release that does not know the section
refuses the manifest. The entries themselves stay as they were before there were orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ...errors import FormatError
from ...state.values.containers import display
from ...state.values.dim_order import DimOrder, is_dim_order
from ...threads import msgpack_decoder
from ..records import STRIDES, Count


class Box(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A sub-array stored as consecutive chunks; without chunks, in its entry's inline bytes."""

    offsets: tuple[int, ...]  # tuples and gc=False: such objects bring no full garbage collection nearer
    sizes: tuple[int, ...]
    first_chunk: Count
    chunks: Count


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One tensor, or the boxes of it that a rank has written (docs/format.md, "Tensor entry")."""

    path: tuple[str | int, ...]
    kind: str
    dtype: str
    shape: tuple[Count, ...]
    requires_grad: bool
    tie: tuple[str, int] | None
    boxes: tuple[Box, ...]
    inline: tuple[Count, Count] | None


def check_entries(tensors: Sequence[TensorEntry], chunks: int, inline: int) -> None:
    """Raise FormatError if an entry leads out of so many chunks and inline bytes. There may be thousands."""
    for entry in tensors:
        dimensions = len(entry.shape)
        for box in entry.boxes:
            if box.first_chunk + box.chunks > chunks:
                problem = f"chunks {box.first_chunk}+{box.chunks} of {chunks}"
                raise FormatError(f"{display(entry.path)}: {problem}")
            if len(box.offsets) != dimensions or len(box.sizes) != dimensions:
                raise FormatError(f"{display(entry.path)}: a box of other rank than the tensor")
        if entry.inline and sum(entry.inline) > inline:
            raise FormatError(f"{display(entry.path)}: inline bytes {entry.inline} of {inline}")


def encode_orders(orders: Mapping[int, DimOrder]) -> dict[str, bytes]:
    """Return the section by its name; {} if all entries are in C order."""
    return {STRIDES: msgspec.msgpack.encode(sorted(orders.items()))} if orders else {}


def decode_orders(
    raw: Mapping[str, bytes], features: Sequence[str], entries: Sequence[TensorEntry]
) -> dict[int, DimOrder]:
    """Return the dimension orders of a manifest by the number of the entry.

    Args:
        raw: its sections by name.
        features, entries: of the manifest.

    Raises:
        FormatError: the section is there without the feature, or the feature without it; or an entry cannot have its
            order.
        msgspec.DecodeError: it does not decode.
    """
    if (STRIDES in features) != (STRIDES in raw):
        raise FormatError(f"features {list(features)}, and the sections {sorted(raw)}")
    if STRIDES not in raw:
        return {}
    found = msgpack_decoder(list[tuple[int, DimOrder]]).decode(raw[STRIDES])
    before = -1
    for number, order in found:
        if not before < number < len(entries):
            raise FormatError(f"section {STRIDES!r}: entry {number} of {len(entries)} behind entry {before}")
        entry, before = entries[number], number
        if entry.kind not in ("tensor", "parameter", "array") or not is_dim_order(order, len(entry.shape)):
            raise FormatError(
                f"section {STRIDES!r}: order {list(order)} of entry {number}, {entry.kind} {list(entry.shape)}"
            )
    if not found:
        raise FormatError(f"section {STRIDES!r} is empty")
    return dict(found)
