"""Inspection: what is in a repository (stats) and what changed between two snapshots (diff).

Reads manifests, pack footers and, for diff, the chunks that differ. Nothing is written.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import Bytes
from ..chunks.reader import ChunkReader, Wanted, whole
from ..context import Context
from ..errors import FormatError, IntegrityError
from ..format import codecs, manifest, pack
from ..format.keys import pack_key
from ..format.manifest import Manifest, TensorEntry
from ..format.records import Snapshot
from ..protocol.quarantine import in_quarantine
from ..restore.pipeline import read_manifests, require_decoding, spec_of
from ..state.arrays import as_float64
from ..state.containers import CONTAINERS, Path, children, display
from ..state.tensors import Slot, StoredPart
from ..state.tree_decode import decode
from ..state.tree_encode import encode_plain

#: So much of two tensors is compared at a time.
COMPARED_BYTES = 1024 * 1024

# --- stats -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GroupStats:
    """One group of tensors: a part, or one kind of optimizer state.

    Attributes:
        logical_bytes: over all committed snapshots.
        stored_bytes: of the blobs made for this group, each counted once.
    """

    logical_bytes: int = 0
    stored_bytes: int = 0


@dataclass(slots=True)
class Stats:
    """What a repository holds; committed snapshots unless said otherwise.

    Attributes:
        stored_bytes: every pack and manifest there is.
        ratio: logical over stored bytes.
        groups: bytes by tensor group.
        codecs: stored bytes of planes by codec, of every pack there is.
        chunks: references to chunks by all snapshots; unique_chunks: different ones among them.
        base_only_bytes: blobs that are needed only because a delta builds on them.
        unneeded_bytes: packs and manifests that no committed snapshot needs: what gc would free.
        depths: chunks by the length of their delta chain.
    """

    snapshots: int = 0
    packs: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0
    groups: dict[str, GroupStats] = field(default_factory=dict)
    codecs: dict[str, int] = field(default_factory=dict)
    chunks: int = 0
    unique_chunks: int = 0
    base_only_bytes: int = 0
    unneeded_bytes: int = 0
    depths: dict[int, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Logical over stored bytes; 0 for an empty repository."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0


def stats(context: Context) -> Stats:
    """Count a repository.

    Raises:
        IntegrityError, FormatError: a manifest or a pack's footer is damaged.
    """
    view = context.index.refresh()
    sizes = {info.key: info.size_bytes for prefix in ("packs/", "manifests/") for info in context.store.list(prefix)}
    result = Stats(stored_bytes=sum(sizes.values()), packs=sum(key.startswith("packs/") for key in sizes))
    tally = _Tally(result)
    needed: set[str] = set()
    for snapshot in view.snapshots():
        result.snapshots += 1
        result.logical_bytes += snapshot.logical_bytes
        for ref in snapshot.manifests:
            read = manifest.read(context.store, ref, None)
            needed.add(ref.key)
            needed.update(map(pack_key, read.header.pack_names))
            tally.add(read)
    tally.finish()
    kept = in_quarantine(context.store)
    result.unneeded_bytes = sum(size for key, size in sizes.items() if key not in needed | kept)
    by_codec: Counter[str] = Counter()
    for key in sorted(key for key in sizes if key.startswith("packs/") and key not in kept):
        by_codec.update(_codec_bytes(pack.read_listing(context.store, key, sizes[key]).entries))
    result.codecs = dict(by_codec)
    return result


class _Tally:
    """Counts chunks and blobs over many manifests, each blob once."""

    def __init__(self, result: Stats) -> None:
        self._result = result
        self._blobs: dict[tuple[bytes, int], tuple[int, bool]] = {}  # (pack, offset) -> length, newest of some chunk
        self._owners: dict[tuple[bytes, int], str] = {}
        self._digests: set[bytes] = set()
        self._depths: Counter[int] = Counter()

    def add(self, m: Manifest) -> None:
        table = m.table
        self._result.chunks += len(table)
        self._digests.update(row.tobytes() for row in table.digests)
        self._depths.update(table.depths.tolist())
        heads = np.zeros(len(table.ref_kinds), bool)
        heads[table.starts[:-1]] = True
        packs = [m.header.packs[i : i + 32] for i in range(0, len(m.header.packs), 32)]
        owners = _owners(m)
        for number, offset, length, head, owner in zip(
            table.ref_packs.tolist(), table.ref_offsets.tolist(), table.ref_lengths.tolist(), heads.tolist(), owners,
            strict=True,
        ):  # fmt: skip
            name = (packs[number], offset)
            self._blobs[name] = (length, head or self._blobs.get(name, (0, False))[1])
            self._owners.setdefault(name, owner)
        for entry in m.tensors:
            self._group(group_of(entry.path)).logical_bytes += spec_of(entry).nbytes

    def _group(self, name: str) -> GroupStats:
        return self._result.groups.setdefault(name, GroupStats())

    def finish(self) -> None:
        self._result.unique_chunks = len(self._digests)
        self._result.depths = dict(sorted(self._depths.items()))
        for name, (length, head) in self._blobs.items():
            self._group(self._owners[name]).stored_bytes += length
            if not head:
                self._result.base_only_bytes += length


def group_of(path: Sequence[str | int]) -> str:
    """The group that a tensor is counted in: optimizer state by its kind (`optimizer.*.exp_avg`), else its part."""
    if len(path) >= 3 and any(isinstance(element, int) for element in path[1:-1]):
        return f"{path[0]}.*.{path[-1]}"
    return str(path[0]) if path else "(root)"


def _owners(m: Manifest) -> list[str]:
    """The group of every reference's chunk, in the order of the references."""
    by_row = [""] * len(m.table)
    for entry in m.tensors:
        for box in entry.boxes:
            by_row[box.first_chunk : box.first_chunk + box.chunks] = [group_of(entry.path)] * box.chunks
    return [by_row[row] for row in np.repeat(np.arange(len(m.table)), m.table.ref_counts).tolist()]


def _codec_bytes(entries: npt.NDArray[np.void]) -> dict[str, int]:
    """Stored bytes of planes by the name of their codec."""
    used = np.arange(8) < entries["element_size"][:, None]
    found = {}
    for codec in np.unique(entries["codecs"][used]).tolist():
        name = codecs.NAMES.get(codec, f"codec {codec}")
        found[name] = int(entries["plane_bytes"][used & (entries["codecs"] == codec)].sum(dtype=np.int64))
    return found


# --- diff ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor in two snapshots.

    Attributes:
        path: dotted.
        status: "same", "changed", "added" or "removed".
        changed_share: elements that differ in any bit, 0 to 1.
        relative_l2: norm(b - a) / norm(a) over all elements, as float64; inf where a is zero, nan where not finite.
        note: why the numbers are missing, such as another shape.
    """

    path: str
    status: str
    changed_share: float | None = None
    relative_l2: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Diff:
    """What changed from snapshot a to snapshot b; `plain` lists (path, before, after) of plain values."""

    a: Snapshot
    b: Snapshot
    tensors: list[TensorDiff]
    plain: list[tuple[str, str, str]]


_Located = tuple[Manifest, TensorEntry]


def diff(context: Context, a: Snapshot, b: Snapshot) -> Diff:
    """Compare two snapshots; only tensors whose digests differ are read.

    Raises:
        IntegrityError, FormatError: damage in what had to be read.
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
    return Diff(a, b, tensors, _plain_changes(manifests_a, manifests_b))


@contextmanager
def _naming(snapshot: Snapshot) -> Iterator[None]:
    """Whose damage it is."""
    try:
        yield
    except (IntegrityError, FormatError) as error:
        raise type(error)(f"{snapshot.ref} (id:{snapshot.id[:12]}): {error}") from error


def _by_path(manifests: Sequence[Manifest]) -> dict[tuple[Path, int], _Located]:
    """Every tensor by its path, and which of that path: dict keys such as 1.0 and "1.0" look alike."""
    seen: Counter[Path] = Counter()
    found: dict[tuple[Path, int], _Located] = {}
    for m in manifests:
        for entry in m.tensors:
            path = tuple(entry.path)
            found[path, seen[path]] = m, entry
            seen[path] += 1
    return found


def _is_read(a: _Located, b: _Located) -> bool:
    """Whether two tensors can be compared, and their contents differ."""
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
    """Digests of a tensor's chunks, or its inline bytes."""
    m, entry = located
    if entry.inline:
        return m.inline[entry.inline[0] : sum(entry.inline)]
    return b"".join(m.table.digests[box.first_chunk : box.first_chunk + box.chunks].tobytes() for box in entry.boxes)


def _pieces(context: Context, snapshot: Snapshot, located: _Located) -> Iterator[Bytes]:
    """A tensor's bytes, chunk by chunk; strings, whose size need not divide a chunk's, are cut between elements."""
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
    """A tensor's bytes, chunk by chunk."""
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
    """Whole elements of both, a mebibyte at a time: as float64 they take eight times as much."""
    step = itemsize * max(1, COMPARED_BYTES // itemsize)
    for piece_a, piece_b in zip(a, b, strict=True):
        for at in range(0, piece_a.size, step):
            yield piece_a[at : at + step], piece_b[at : at + step]


def _plain_changes(a: Sequence[Manifest], b: Sequence[Manifest]) -> list[tuple[str, str, str]]:
    """Plain values that differ, appeared ("" before) or went ("" after)."""
    before, after = dict(_plain(_tree(a), None)), dict(_plain(_tree(b), None))
    paths = [*before, *(path for path in after if path not in before)]
    gone = (b"", "")
    return [
        (_dotted(p), before.get(p, gone)[1], after.get(p, gone)[1])
        for p in paths
        if before.get(p, gone)[0] != after.get(p, gone)[0]
    ]


def _tree(manifests: Sequence[Manifest]) -> Any:
    return decode([StoredPart(m.header.part, m.tree, [spec_of(entry) for entry in m.tensors]) for m in manifests])


_Chained = tuple[Any, str | int] | None  # a path as (the one above, element): paths of a tree share what they have


def _plain(tree: Any, path: _Chained) -> Iterator[tuple[_Chained, tuple[bytes, str]]]:
    """(path, (packed, shown)) of every plain leaf; what is shown is cut where it would drown the rest."""
    if type(tree) in CONTAINERS and tree:
        for element, _, child in children(tree):
            yield from _plain(child, (path, element))
    elif not isinstance(tree, Slot):
        try:
            text = repr(tree)
        except ValueError:  # an int of more than 4,300 digits
            text = f"<{type(tree).__name__}>"
        yield path, (msgspec.msgpack.encode(encode_plain(tree)), _cut(text))


def _dotted(path: _Chained) -> str:
    """The dotted path; long keys, and long paths, are cut."""
    elements: list[str] = []
    while path is not None:
        path, element = path
        elements.append(_cut(str(element)))
    return _cut(".".join(reversed(elements)), 1000)


def _cut(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
