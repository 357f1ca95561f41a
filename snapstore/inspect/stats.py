"""Count what a repository holds: snapshots, bytes by group and codec, chunks, chains.

In: an open repository. Out: StatsResult. Reads every manifest and every pack's footer; writes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..catalog.history import View
from ..catalog.needed_keys import all_manifests
from ..context import Context
from ..errors import FormatError, IntegrityError, NotFoundError
from ..format.blobs import codecs, pack
from ..format.keys import pack_key
from ..format.manifests import manifest
from ..format.manifests.manifest import Manifest
from ..format.manifests.tensor_layout import held_bytes
from ..protocol.forget import object_sizes
from ..protocol.notes import in_quarantine
from ..text import brief, counted, html_table, human_bytes
from .tables import data_frame

T = TypeVar("T")
_SIZES = ("logical", "stored")


@dataclass(slots=True)
class GroupStats:
    """One group of tensors: a part, or one kind of optimizer state.

    Attributes:
        logical_bytes: over all committed snapshots.
        stored_bytes: size of the blobs of this group, each counted once.
    """

    logical_bytes: int = 0
    stored_bytes: int = 0


@dataclass(slots=True)
class StatsResult:
    """The content of a repository, counted over committed snapshots unless an attribute says otherwise.

    Attributes:
        stored_bytes: size of all packs and manifests.
        ratio: logical over stored bytes.
        groups: bytes by tensor group.
        codecs: stored bytes of planes by codec, over all packs that are not in quarantine.
        chunks: number of references to chunks.
        unique_chunks: number of different chunks among them.
        base_only_bytes: size of the blobs that are needed only as the base of a delta.
        unneeded_bytes: size of the packs and manifests that no committed snapshot needs; gc would free them. Packs in
            quarantine do not count. 0 if there are `unknown` records, which may need them: gc would refuse.
        depths: number of deltas in a chain -> number of chunks.
        unknown: key -> why, of records that cannot be read or are gone; their snapshots are not counted.
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
    unknown: dict[str, str] = field(default_factory=dict)

    __repr__ = brief

    @property
    def ratio(self) -> float:
        """Logical over stored bytes; 0 for an empty repository."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def to_pandas(self) -> Any:
        """Return `groups` as a `pandas.DataFrame` with the columns group, logical_bytes and stored_bytes [bytes].

        Raises:
            CapabilityError: pandas is not installed.
        """
        logical, stored = ([getattr(one, f"{name}_bytes") for one in self.groups.values()] for name in _SIZES)
        return data_frame({"group": list(self.groups), "logical_bytes": logical, "stored_bytes": stored})

    def _repr_html_(self) -> str:
        sizes = f"{human_bytes(self.logical_bytes)} of state in {human_bytes(self.stored_bytes)}"
        caption = f"{counted(self.snapshots, 'snapshot')}: {sizes}, ratio {self.ratio:.3g}"
        groups = [
            [name, human_bytes(one.logical_bytes), human_bytes(one.stored_bytes)] for name, one in self.groups.items()
        ]
        codecs = [[name, human_bytes(count)] for name, count in self.codecs.items()]
        by_codec = html_table("codecs", ["codec", ">stored"], codecs)
        return html_table(caption, ["group", ">size", ">stored"], groups) + by_codec


def stats(context: Context) -> StatsResult:
    """Count what a repository holds.

    Raises:
        IntegrityError, FormatError: a manifest or a pack's footer is damaged.
        NotFoundError: a pack that a snapshot needs is missing.
    """
    return while_unchanged(context, partial(_count, context))


def while_unchanged(context: Context, count: Callable[[dict[str, int], View], T]) -> T:
    """Return what `count` returns; call it again if a read fails because another process has changed the snapshots.

    It gets the sizes of all packs and manifests, listed before the records: a save may commit meanwhile.
    """
    while True:
        sizes = object_sizes(context.store)
        view = context.index.refresh()
        try:
            return count(sizes, view)
        except (IntegrityError, FormatError, NotFoundError):
            if _revisions(context.index.refresh()) == _revisions(view):
                raise


def _revisions(view: View) -> set[str]:
    return {snapshot.key for snapshot in view.with_records()}


def _count(context: Context, sizes: dict[str, int], view: View) -> StatsResult:
    result = StatsResult(stored_bytes=sum(sizes.values()), packs=sum(key.startswith("packs/") for key in sizes))
    result.unknown = view.unknown()
    tally = _Tally(result)
    needed: set[str] = set()
    for snapshot in view.snapshots():
        result.snapshots += 1
        result.logical_bytes += snapshot.logical_bytes
        needed.update(snapshot.named_keys)
        for ref, read in all_manifests(snapshot, lambda ref: manifest.read(context.store, ref, None)):
            needed.add(ref.key)
            needed.update(map(pack_key, read.header.pack_names))
            tally.add(read)
    tally.finish()
    kept = in_quarantine(context.store)
    if not result.unknown:
        result.unneeded_bytes = sum(size for key, size in sizes.items() if key not in needed | kept)
    by_codec: Counter[str] = Counter()
    for key in sorted(key for key in sizes if key.startswith("packs/") and key not in kept):
        try:
            by_codec.update(codec_bytes(pack.read_listing(context.store, key, sizes[key]).entries))
        except NotFoundError:
            if key in needed:
                raise
    result.codecs = dict(by_codec)
    return result


class _Tally:
    """Counts chunks and blobs over many manifests, each blob once."""

    def __init__(self, result: StatsResult) -> None:
        self._result = result
        self._blobs: dict[tuple[bytes, int], tuple[int, bool, str]] = {}  # by pack, offset: length, is first, group
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
        columns = (table.ref_packs, table.ref_offsets, table.ref_lengths, heads)
        groups = [group_of(entry.path) for entry in m.tensors]
        owners = [groups[number] for number in np.repeat(m.owners, table.ref_counts).tolist()]
        rows = zip(*(column.tolist() for column in columns), owners, strict=True)
        for number, offset, length, head, owner in rows:
            name = (packs[number], offset)
            _, is_head, first_owner = self._blobs.get(name, (0, False, owner))
            self._blobs[name] = (length, head or is_head, first_owner)
        for entry in m.tensors:
            self._group(group_of(entry.path)).logical_bytes += held_bytes(m, entry)

    def _group(self, name: str) -> GroupStats:
        return self._result.groups.setdefault(name, GroupStats())

    def finish(self) -> None:
        self._result.unique_chunks = len(self._digests)
        self._result.depths = dict(sorted(self._depths.items()))
        for length, head, owner in self._blobs.values():
            self._group(owner).stored_bytes += length
            if not head:
                self._result.base_only_bytes += length


def group_of(path: Sequence[str | int]) -> str:
    """Return the group of a tensor: its kind if it is optimizer state (`optimizer.*.exp_avg`), else its part."""
    if len(path) >= 3 and any(isinstance(element, int) for element in path[1:-1]):
        return f"{path[0]}.*.{path[-1]}"
    return str(path[0]) if path else "(root)"


def codec_bytes(entries: npt.NDArray[np.void]) -> dict[str, int]:
    """Return the stored bytes of planes, by the name of their codec."""
    used = np.arange(8) < entries["element_size"][:, None]
    found = {}
    for codec in np.unique(entries["codecs"][used]).tolist():
        name = codecs.NAMES.get(codec, f"codec {codec}")
        found[name] = int(entries["plane_bytes"][used & (entries["codecs"] == codec)].sum(dtype=np.int64))
    return found
