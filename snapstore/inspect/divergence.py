"""Divergence: the first step, tensor and element at which two runs differ.

In: two runs, or two snapshots. Out: a DivergenceResult. The common steps are compared in ascending order. A binary
search would be wrong: runs that have diverged may become equal again, as two runs that restore the same snapshot do.
Manifests are compared by their digests; only the chunks of one tensor are read, from the first chunk that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from .. import retention
from ..arrays import Bytes
from ..catalog.history import View
from ..context import Context
from ..errors import InvalidInputError, NotFoundError
from ..format.records import Snapshot
from ..restore.manifests import require_decoding
from ..restore.overlaps import StoredBox
from ..restore.pipeline import read_as_ruled
from ..state.values.arrays import from_bytes
from ..state.values.containers import display
from ..state.values.tensors import TensorSpec
from ..text import quoted, some
from .diff import pieces_of, unlike_form
from .stored_tensors import StoredTensor, chunks_of, digests_of, naming, read_tensors

#: An error names at most so many steps.
STEPS_NAMED = 5


@dataclass(frozen=True, slots=True)
class DivergenceResult:
    """The first difference of two runs.

    Attributes:
        steps: the steps that were compared, in ascending order; if two snapshots differ, the last step is theirs.
        a, b: the two snapshots of the last step.
        path: dotted path of the first tensor that differs, in the order of the save; "" for a tensor without a name;
            None if no tensor differs.
        index: its first element that differs, one number per dimension; None if the tensors cannot be compared.
        chunk: number of the tensor's chunk in a, in C order, that has this element. If several ranks saved the tensor,
            or it has no chunk: the number that it would have in chunks of the whole tensor.
        before, after: the element in a and in b, as text.
        note: why there is no such element, such as another shape.
        unknown: key -> why, of records of the two runs that cannot be read or are gone. Their snapshots were not
            compared, so the runs may differ at their steps.
    """

    steps: list[int]
    a: Snapshot
    b: Snapshot
    path: str | None = None
    index: tuple[int, ...] | None = None
    chunk: int | None = None
    before: str = ""
    after: str = ""
    note: str = ""
    unknown: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.path is not None


def first_difference(context: Context, a: str, b: str) -> DivergenceResult:
    """Return where two runs, or the snapshots that two references name, first differ. Plain values are not compared.

    Raises:
        NotFoundError: a name is no run or snapshot, the runs have no step in common, or a snapshot was deleted
            meanwhile.
        InvalidInputError: a name is neither a run nor a reference.
        IntegrityError, FormatError: an object that must be read is damaged.
        IntegrityError, StorageError: a run has only records that are damaged, gone or cannot be read; or the runs have
            no step in common, and one of them has such a record.
        CapabilityError: the comparison must decode more than the limits allow.
    """
    for name in (a, b):
        if not isinstance(name, str):
            raise InvalidInputError(f"run {quoted(name)}: expected a str, got {type(name).__name__}")
    steps: list[int] = []
    view = context.index.refresh()
    for one, other in _pairs(view, a, b):
        steps.append(one.step)
        found = read_as_ruled(context, (one, other), partial(_compare, context, steps))
        if found:
            break
    runs = view.runs()
    return replace(found, unknown=view.unknown(a) | view.unknown(b)) if a in runs or b in runs else found


def _pairs(view: View, a: str, b: str) -> list[tuple[Snapshot, Snapshot]]:
    """Return the snapshots to compare, in ascending order of their steps."""
    runs = view.runs()
    if a not in runs and b not in runs:
        return [(_resolve(view, a), _resolve(view, b))]
    for name in (a, b):
        view.require_run(name)
    by_step = [{snapshot.step: snapshot for snapshot in retention.current(view.snapshots(run))} for run in (a, b)]
    common = sorted(by_step[0].keys() & by_step[1].keys())
    if not common:
        for run in (a, b):
            view.require_known(f"first common step of {a!r} and {b!r}", run)
        texts = [
            f"{run!r} has {some(list(map(str, sorted(of))), STEPS_NAMED)}"
            for run, of in zip((a, b), by_step, strict=True)
        ]
        raise NotFoundError(f"runs {a!r} and {b!r} have no step in common: {', '.join(texts)}")
    return [(by_step[0][step], by_step[1][step]) for step in common]


def _resolve(view: View, name: str) -> Snapshot:
    """Return the snapshot that a reference names; if it names none, it may be a run without a readable record."""
    try:
        return view.resolve(name)
    except (InvalidInputError, NotFoundError):
        view.require_known(f"run {quoted(name)}", name)
        raise


def _compare(context: Context, steps: list[int], a: Snapshot, b: Snapshot) -> DivergenceResult:
    """Return where two snapshots first differ; no path if all of their tensors are the same."""
    same = DivergenceResult(steps, a, b)
    if a.manifests == b.manifests:
        return same
    (_, before), (_, after) = read_tensors(context, a), read_tensors(context, b)
    for key in before | after:
        path = display(key[0])
        if key not in before or key not in after:
            return replace(same, path=path, note=f"only in {(a if key in before else b).ref}")
        one, other = before[key].spec, after[key].spec
        if note := unlike_form(one, other):
            return replace(same, path=path, note=note)
        if before[key].fingerprint != after[key].fingerprint:
            place = _first_byte(context, before[key], after[key])
            if place is not None:
                at, texts = place[0] // one.itemsize, [_text(data, one) for data in place[1:]]
                if texts[0] == texts[1]:  # such as NaNs of other bits
                    texts = [
                        f"{text} (0x{data[::-1].tobytes().hex()})" for text, data in zip(texts, place[1:], strict=True)
                    ]
                index = tuple(int(n) for n in np.unravel_index(at, one.shape)) if one.shape else ()
                chunk = _chunk_at(before[key], place[0])
                return replace(same, path=path, index=index, chunk=chunk, before=texts[0], after=texts[1])
    return same


def _first_byte(context: Context, a: StoredTensor, b: StoredTensor) -> tuple[int, Bytes, Bytes] | None:
    """Return (the byte at which the first different element begins, its bytes in a, in b); None: there is none."""
    require_decoding(context.store, [*a.pieces, *b.pieces], f"comparing {a.snapshot.ref} and {b.snapshot.ref}:")
    itemsize, of_a, of_b = a.spec.itemsize, _chunked(a), _chunked(b)
    start, pieces = 0, (next(pieces_of(context, [a])), next(pieces_of(context, [b])))
    if of_a is not None and of_b is not None:
        lengths = _lengths(of_a)
        are_whole = not (lengths % itemsize).any()  # else an element may lie in two chunks
        if are_whole and np.array_equal(lengths, _lengths(of_b)):
            first = int(np.argmax((digests_of(of_a) != digests_of(of_b)).any(axis=1)))
            start = int(lengths[:first].sum())
            pieces = _from(context, a.snapshot, of_a, first), _from(context, b.snapshot, of_b, first)
    for one, other in zip(*pieces, strict=True):
        different = np.flatnonzero(one != other)
        if different.size:
            at = max((start + int(different[0])) // itemsize * itemsize - start, 0)
            return start + at, one[at : at + itemsize], other[at : at + itemsize]
        start += len(one)
    return None


def _chunked(stored: StoredTensor) -> StoredBox | None:
    """Return the box of a tensor that lies in one box of chunks; None for any other tensor."""
    boxes = stored.boxes if len(stored.pieces) == 1 else []
    return boxes[0] if len(boxes) == 1 and boxes[0].chunks else None


def _lengths(box: StoredBox) -> npt.NDArray[np.int64]:
    """Return the lengths of the chunks of a box, (n,) [bytes]."""
    return box.m.table.lengths[box.first_chunk : box.first_chunk + box.chunks].astype(np.int64)


def _chunk_at(stored: StoredTensor, byte: int) -> int:
    """Return `DivergenceResult.chunk` of a byte. A manifest may have chunks of another size than the config says."""
    if (chunked := _chunked(stored)) is not None:
        return int(np.searchsorted(np.cumsum(_lengths(chunked)), byte, side="right"))
    return byte // stored.pieces[0][0].header.chunk_bytes


def _from(context: Context, snapshot: Snapshot, chunked: StoredBox, first: int) -> Iterator[Bytes]:
    with naming(snapshot):
        yield from chunks_of(context, [chunked], first)


def _text(data: Bytes, spec: TensorSpec) -> str:
    """Return an element as text: its value, or its bytes if it has none."""
    if spec.kind != "bytes":
        with suppress(TypeError, RuntimeError, NotImplementedError):
            value = from_bytes(data.copy(), msgspec.structs.replace(spec, shape=()), None)
            is_time = spec.kind == "array" and spec.dtype[1] in "mM"  # Python has no NaT, and no nanoseconds
            return str(value if is_time else value.item())
    return f"0x{data[::-1].tobytes().hex()}"
