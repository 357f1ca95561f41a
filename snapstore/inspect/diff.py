"""Compare two snapshots, tensor by tensor and value by value.

In: an open repository and two snapshots. Out: a DiffResult. Reads both snapshots' manifests, and the chunks of the
tensors that differ; writes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..arrays import Bytes
from ..chunks.reader import ChunkReader, Wanted, whole
from ..context import Context
from ..errors import FormatError, IntegrityError
from ..format.manifest import Manifest, TensorEntry
from ..format.records import Snapshot
from ..restore.pipeline import read_manifests, require_decoding, spec_of
from ..state.arrays import as_float64
from ..state.containers import Path, display
from ..state.tree_encode import encode_plain
from ..text import brief
from .plain_values import Chained, decode_tree, dotted, plain_values, show_value

#: Two tensors are compared in pieces of this size.
COMPARED_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor in two snapshots.

    Attributes:
        path: dotted.
        status: "same", "changed", "added" or "removed".
        changed_share: share of the elements that differ in any bit, 0 to 1.
        relative_l2: norm(b - a) / norm(a) over all elements, as float64; inf if a is zero, nan if not finite.
        note: why the numbers are missing, such as another shape.
    """

    path: str
    status: str
    changed_share: float | None = None
    relative_l2: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class DiffResult:
    """The changes from snapshot a to snapshot b; `plain` lists (path, before, after) of plain values that differ."""

    a: Snapshot
    b: Snapshot
    tensors: list[TensorDiff]
    plain: list[tuple[str, str, str]]

    __repr__ = brief


_Located = tuple[Manifest, TensorEntry]


def diff(context: Context, a: Snapshot, b: Snapshot) -> DiffResult:
    """Compare two snapshots. Reads only tensors whose digests differ.

    Raises:
        IntegrityError, FormatError: an object that must be read is damaged.
        CapabilityError: the comparison must decode more than this machine or the limits allow.
    """
    with _naming(a):
        manifests_a = read_manifests(context.store, context.engines.digest_seed, a)
    with _naming(b):
        manifests_b = read_manifests(context.store, context.engines.digest_seed, b)
    before, after = _by_path(manifests_a), _by_path(manifests_b)
    changed = [(before[key], after[key]) for key in before.keys() & after.keys() if _is_read(before[key], after[key])]
    require_decoding(context.store, list(itertools.chain.from_iterable(changed)), f"comparing {a.ref} and {b.ref}:")
    tensors = []
    for key in [*before, *(key for key in after if key not in before)]:
        path = display(key[0])
        if key not in after:
            tensors.append(TensorDiff(path, "removed"))
        elif key not in before:
            tensors.append(TensorDiff(path, "added"))
        else:
            pieces = _pieces(context, a, before[key]), _pieces(context, b, after[key])
            tensors.append(_compare(path, before[key], after[key], pieces))
    with _naming(a):
        tree_a = decode_tree(context, manifests_a, a.ref)
    with _naming(b):
        tree_b = decode_tree(context, manifests_b, b.ref)
    return DiffResult(a, b, tensors, _plain_changes(tree_a, tree_b))


@contextmanager
def _naming(snapshot: Snapshot) -> Iterator[None]:
    """Name the snapshot in errors about damage."""
    try:
        yield
    except (IntegrityError, FormatError) as error:
        raise type(error)(f"{snapshot.ref} (id:{snapshot.id[:12]}): {error}") from error


def _by_path(manifests: Sequence[Manifest]) -> dict[tuple[Path, int], _Located]:
    """Return every tensor by path and a number: dict keys such as 1.0 and "1.0" give the same path."""
    seen: Counter[Path] = Counter()
    found: dict[tuple[Path, int], _Located] = {}
    for m in manifests:
        for entry in m.tensors:
            if entry.kind == "page":  # plain values are compared one by one
                continue
            path = tuple(entry.path)
            found[path, seen[path]] = m, entry
            seen[path] += 1
    return found


def _is_read(a: _Located, b: _Located) -> bool:
    """Return whether two tensors can be compared and differ."""
    entry, other = a[1], b[1]
    return (entry.dtype, entry.shape) == (other.dtype, other.shape) and not _same_content(a, b)


def _compare(path: str, a: _Located, b: _Located, pieces: tuple[Iterator[Bytes], Iterator[Bytes]]) -> TensorDiff:
    spec_a, spec_b = spec_of(a[1]), spec_of(b[1])
    if (spec_a.dtype, spec_a.shape) != (spec_b.dtype, spec_b.shape):
        note = f"{spec_a.dtype} {list(spec_a.shape)} -> {spec_b.dtype} {list(spec_b.shape)}"
        return TensorDiff(path, "changed", note=note)
    if _same_content(a, b):
        return TensorDiff(path, "same")
    changed, difference, norm = 0, 0.0, 0.0
    for piece_a, piece_b in _in_step(*pieces, spec_a.itemsize):
        rows_a = piece_a.reshape(-1, spec_a.itemsize)
        changed += int((rows_a != piece_b.reshape(-1, spec_a.itemsize)).any(axis=1).sum())
        values_a, values_b = as_float64(piece_a, spec_a), as_float64(piece_b, spec_a)
        if values_a is not None and values_b is not None:
            with np.errstate(all="ignore"):
                difference += float(((values_b - values_a) ** 2).sum())
                norm += float((values_a**2).sum())
    relative = None
    if as_float64(np.zeros(spec_a.itemsize, np.uint8), spec_a) is not None:
        relative = math.sqrt(difference) / math.sqrt(norm) if norm else math.inf if difference else 0.0
        relative = relative if math.isfinite(difference) and math.isfinite(norm) else math.nan
    return TensorDiff(path, "changed", changed / max(1, spec_a.nbytes // spec_a.itemsize), relative)


def _same_content(a: _Located, b: _Located) -> bool:
    return _fingerprint(a) == _fingerprint(b)


def _fingerprint(located: _Located) -> bytes:
    """Return the digests of a tensor's chunks, or its inline bytes."""
    m, entry = located
    if entry.inline:
        return m.inline[entry.inline[0] : sum(entry.inline)]
    return b"".join(m.table.digests[box.first_chunk : box.first_chunk + box.chunks].tobytes() for box in entry.boxes)


def _pieces(context: Context, snapshot: Snapshot, located: _Located) -> Iterator[Bytes]:
    """Yield a tensor's bytes in pieces of whole elements, about one per chunk.

    Strings may have a size that does not divide that of a chunk.
    """
    itemsize = spec_of(located[1]).itemsize
    left = np.empty(0, np.uint8)
    with _naming(snapshot):
        for piece in _chunks(context, located):
            if 16 % itemsize == 0:
                yield piece
                continue
            piece = np.concatenate([left, piece])
            whole = piece.size - piece.size % itemsize
            left = piece[whole:]
            yield piece[:whole]


def _chunks(context: Context, located: _Located) -> Iterator[Bytes]:
    """Yield a tensor's bytes, chunk by chunk."""
    m, entry = located
    if entry.inline:
        yield np.frombuffer(m.inline, np.uint8, entry.inline[1], entry.inline[0])
    for box in entry.boxes:
        lengths = m.table.lengths[box.first_chunk : box.first_chunk + box.chunks].tolist()
        outs: list[Bytes] = []

        def wanted(
            first: int = box.first_chunk, lengths: list[int] = lengths, outs: list[Bytes] = outs
        ) -> Iterator[Wanted]:
            for i, length in enumerate(lengths):
                outs.append(np.empty(length, np.uint8))
                yield whole(m.table, m.header.pack_names, first + i, outs[-1])

        for done in ChunkReader(context).rebuild(wanted()):
            yield from outs[:done]
            del outs[:done]


def _in_step(a: Iterator[Bytes], b: Iterator[Bytes], itemsize: int) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield pairs of pieces of whole elements, at most a mebibyte each: as float64 they may take eight times that."""
    step = itemsize * max(1, COMPARED_BYTES // itemsize)
    for piece_a, piece_b in zip(a, b, strict=True):
        for at in range(0, piece_a.size, step):
            yield piece_a[at : at + step], piece_b[at : at + step]


def _plain_changes(a: Any, b: Any) -> list[tuple[str, str, str]]:
    """Return (path, before, after) of plain values that differ; "" is before a new value and after a removed one."""
    before, after = _packed(a), _packed(b)
    paths = [*before, *(path for path in after if path not in before)]
    gone = (b"", "")
    return [
        (dotted(p), before.get(p, gone)[1], after.get(p, gone)[1])
        for p in paths
        if before.get(p, gone)[0] != after.get(p, gone)[0]
    ]


def _packed(tree: Any) -> dict[Chained, tuple[bytes, str]]:
    """Return (packed, shown) of every plain value, by path."""
    values = plain_values(tree)
    return {path: (msgspec.msgpack.encode(encode_plain(value)), show_value(value)) for path, value in values}
