"""Compare two snapshots, tensor by tensor and value by value.

In: an open repository and two snapshots. Out: a DiffResult. Reads both snapshots' manifests, and the chunks of the
tensors that differ; writes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import Bytes
from ..context import Context
from ..format.manifests.manifest import Manifest
from ..format.records import Snapshot
from ..restore.manifests import require_decoding
from ..restore.pipeline import read_as_ruled
from ..state.tree.decode import ELSEWHERE
from ..state.tree.encode import encode_plain
from ..state.values.arrays import as_float64
from ..state.values.containers import display
from ..state.values.tensors import TensorSpec
from ..storage import progress
from ..text import brief, html_table
from .plain_values import Chained, container_types, decode_tree, dotted, plain_values, show_value
from .stored_tensors import StoredTensor, bytes_of_each, naming, read_tensors
from .tables import data_frame

T = TypeVar("T")
#: Two tensors are compared in pieces of this size [bytes].
COMPARED_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor in two snapshots.

    Attributes:
        path: its dotted path.
        status: "same", "changed", "added" or "removed".
        changed_share: share of the elements that differ in any bit, 0 to 1.
        relative_l2: norm(b - a) / norm(a) over all elements, as float64; inf if a is zero, nan if not finite.
        note: why the two numbers are None, such as another shape.
    """

    path: str
    status: str
    changed_share: float | None = None
    relative_l2: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class DiffResult:
    """The changes from snapshot a to snapshot b.

    Attributes:
        tensors: one entry for each tensor of a or b.
        plain: (path, before, after) of each plain value that differs, and of each container of another type, such as
            "list" and "tuple". Values that each rank has for itself are left out.
    """

    a: Snapshot
    b: Snapshot
    tensors: list[TensorDiff]
    plain: list[tuple[str, str, str]]

    __repr__ = brief

    def to_pandas(self) -> Any:
        """Return `tensors` as a `pandas.DataFrame`; its columns are the attributes of `TensorDiff`.

        Raises:
            CapabilityError: pandas is not installed.
        """
        names = [field.name for field in fields(TensorDiff)]
        return data_frame({name: [getattr(one, name) for one in self.tensors] for name in names})

    def _repr_html_(self) -> str:
        count = Counter(one.status for one in self.tensors)
        caption = f"{self.a.ref} -> {self.b.ref}: " + ", ".join(f"{number} {name}" for name, number in count.items())
        rows = [
            [one.path, one.status, _percent(one.changed_share), _number(one.relative_l2), one.note]
            for one in self.tensors
            if one.status != "same"
        ]
        tensors = html_table(caption, ["tensor", "", ">changed", ">relative L2", ""], rows)
        return tensors + (html_table("plain values", ["value", "before", "after"], self.plain) if self.plain else "")


def diff(context: Context, a: Snapshot, b: Snapshot) -> DiffResult:
    """Compare two snapshots. Reads only tensors whose digests differ.

    Raises:
        NotFoundError: one of them was deleted meanwhile.
        IntegrityError, FormatError: an object that must be read is damaged.
        CapabilityError: the comparison must decode more than this machine or the limits allow.
    """
    return read_as_ruled(context, (a, b), partial(_diff, context))


def _diff(context: Context, a: Snapshot, b: Snapshot) -> DiffResult:
    manifests_a, before = read_tensors(context, a)
    manifests_b, after = read_tensors(context, b)
    both = {key: (before[key], after[key]) for key in before if key in after}
    unlike = {key: unlike_form(a.spec, b.spec) for key, (a, b) in both.items()}
    changed = {key: (a, b) for key, (a, b) in both.items() if not unlike[key] and a.fingerprint != b.fingerprint}
    pieces_read = [piece for pair in changed.values() for stored in pair for piece in stored.pieces]
    require_decoding(context.store, pieces_read, f"comparing {a.ref} and {b.ref}:")
    read_bytes = (
        math.prod(box.sizes) * stored.spec.itemsize
        for pair in changed.values()
        for stored in pair
        for box in stored.boxes
        if box.chunks
    )
    progress.expect(sum(read_bytes))
    read = (pieces_of(context, [pair[i] for pair in changed.values()]) for i in (0, 1))
    pieces = zip(*read, strict=True)
    tensors = []
    for key in before | after:
        path = display(key[0])
        if key not in after:
            tensors.append(TensorDiff(path, "removed"))
        elif key not in before:
            tensors.append(TensorDiff(path, "added"))
        elif key in changed:
            tensors.append(_compare(path, before[key].spec, next(pieces)))
        else:
            tensors.append(TensorDiff(path, "changed" if unlike[key] else "same", note=unlike[key]))
    plain = plain_changes(_tree(context, a, manifests_a), _tree(context, b, manifests_b))
    return DiffResult(a, b, tensors, plain)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def unlike_form(a: TensorSpec, b: TensorSpec) -> str:
    """Return the dtypes and shapes of two tensors that cannot be compared; "" if they can."""
    if (a.dtype, a.shape) == (b.dtype, b.shape):
        return ""
    return f"{a.dtype} {list(a.shape)} -> {b.dtype} {list(b.shape)}"


def _compare(path: str, spec: TensorSpec, pieces: tuple[Iterator[Bytes], Iterator[Bytes]]) -> TensorDiff:
    """Return the difference of two tensors of one dtype and shape by their pieces."""
    changed, difference, norm = 0, 0.0, 0.0
    for piece_a, piece_b in zip(*pieces, strict=True):
        rows_a = piece_a.reshape(-1, spec.itemsize)
        changed += int((rows_a != piece_b.reshape(-1, spec.itemsize)).any(axis=1).sum())
        with np.errstate(all="ignore"):  # also a cast of a signaling NaN
            values_a, values_b = as_float64(piece_a, spec), as_float64(piece_b, spec)
            if values_a is not None and values_b is not None:
                difference = math.hypot(difference, _norm(values_b - values_a))
                norm = math.hypot(norm, _norm(values_a))
    if not changed:  # the same bytes in other boxes
        return TensorDiff(path, "same")
    relative = None
    if as_float64(np.zeros(spec.itemsize, np.uint8), spec) is not None:
        relative = difference / norm if norm else math.inf if difference else 0.0
        relative = relative if math.isfinite(difference) and math.isfinite(norm) else math.nan
    return TensorDiff(path, "changed", changed / max(1, spec.nbytes // spec.itemsize), relative)


def _norm(values: npt.NDArray[np.float64]) -> float:
    """Return the Euclidean norm, also of numbers whose squares are too large or too small for float64."""
    largest = float(np.abs(values).max())
    return largest * float(np.sqrt(((values / largest) ** 2).sum())) if 0 < largest < math.inf else largest


def pieces_of(context: Context, tensors: Sequence[StoredTensor]) -> Iterator[Iterator[Bytes]]:
    """Yield each tensor's pieces of whole elements, all but the last of one length, at most a mebibyte each.

    As float64 a piece may take eight times that. Read each tensor to its end before the next one.
    """
    return map(_pieces, tensors, bytes_of_each(context, tensors))


def _pieces(stored: StoredTensor, read: Iterator[Bytes]) -> Iterator[Bytes]:
    step = stored.spec.itemsize * max(1, COMPARED_BYTES // stored.spec.itemsize)
    left = np.empty(0, np.uint8)
    with naming(stored.snapshot):
        for piece in read:
            left = np.concatenate([left, piece]) if left.size else piece
            end = left.size - left.size % step
            yield from (left[at : at + step] for at in range(0, end, step))
            left = left[end:]
    if left.size:
        yield left


def _tree(context: Context, snapshot: Snapshot, manifests: Sequence[Manifest]) -> Any:
    with naming(snapshot):
        return decode_tree(context, manifests, snapshot.ref)


def plain_changes(tree_a: Any, tree_b: Any) -> list[tuple[str, str, str]]:
    """Return (path, before, after) of plain values and types of containers that differ; "": it does not exist."""
    gone = (b"", "")
    before, after = _packed(tree_a), _packed(tree_b)
    types_a, types_b = (dict(_numbered(container_types(tree))) for tree in (tree_a, tree_b))
    changed = [p for p in types_a if types_b.get(p, types_a[p]) != types_a[p]]
    return [(dotted(p[0]), types_a[p], types_b[p]) for p in changed] + [
        (dotted(p[0]), before.get(p, gone)[1], after.get(p, gone)[1])
        for p in before | after
        if before.get(p, gone)[0] != after.get(p, gone)[0]
    ]


def _packed(tree: Any) -> dict[tuple[Chained, int], tuple[bytes, str]]:
    """Return (packed, shown) of every plain value by its numbered path."""
    shared = ((path, value) for path, value in plain_values(tree) if value is not ELSEWHERE)
    return {p: (msgspec.msgpack.encode(encode_plain(value)), show_value(value)) for p, value in _numbered(shared)}


def _numbered(found: Iterable[tuple[Chained, T]]) -> Iterator[tuple[tuple[Chained, int], T]]:
    """Yield ((path, number), value): keys such as 1.0 and "1.0" give one path."""
    seen: Counter[Chained] = Counter()
    for path, value in found:
        yield (path, seen[path]), value
        seen[path] += 1
