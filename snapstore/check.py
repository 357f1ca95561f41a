"""check: verify a repository, from the records down to the last bit, and say which snapshots stay restorable.

Three levels, each with all of the one before:

    metadata   every record and manifest reads and is what its name says; every pack needed is there, of its size; the
               index agrees
    data       every byte of the packs is what their SHA-256 says; else, blob by blob, what is lost
    restore    every chunk of every snapshot is rebuilt and its digest compared

Reads only. Reports everything it finds; a problem names the snapshots that suffer from it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import blob, manifest, records
from .engine import Engines
from .errors import FormatError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from .fetch import Fetcher, Wanted, whole
from .gc import OBJECT_NAME
from .index import Index
from .manifest import Manifest
from .records import COMMITTED, FORGOTTEN, Snapshot
from .storage import ObjectStore

LEVELS = ("metadata", "data", "restore")
_DAMAGE = (IntegrityError, FormatError, NotFoundError)
#: So many damaged chunks of one snapshot are named; the rest is counted.
CHUNKS_NAMED = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding.

    Attributes:
        kind: "record", "index", "manifest", "pack" or "chunk".
        key: the object it lies in.
        message: what is wrong, and what to do.
        snapshots: ids of the snapshots that cannot be restored because of it.
    """

    kind: str
    key: str
    message: str
    snapshots: tuple[str, ...] = ()


@dataclass(slots=True)
class CheckResult:
    """What a check found.

    Attributes:
        problems: everything wrong.
        restorable: committed and forgotten snapshots without a finding against them, in order.
        unneeded_bytes: packs and manifests that no committed snapshot needs; gc frees them.
    """

    level: str
    problems: list[Problem] = field(default_factory=list)
    restorable: list[Snapshot] = field(default_factory=list)
    damaged: list[Snapshot] = field(default_factory=list)
    unneeded_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.problems


def check(
    store: ObjectStore, index: Index, engines: Engines, *, level: str = "metadata", share: float = 1.0,
    subset: tuple[int, int] = (1, 1),
) -> CheckResult:  # fmt: skip
    """Verify everything up to a level.

    Args:
        share: the part of the packs that level "data" reads, chosen at random, 0 to 1.
        subset: (n, t): level "data" reads the n-th of t fixed shares of the packs, so that t checks read them all.
    """
    if level not in LEVELS:
        raise InvalidInputError(f"check level {level!r}: expected one of {', '.join(LEVELS)}")
    if not 0 < share <= 1:
        raise InvalidInputError(f"share {share!r}: expected more than 0 and at most 1")
    if not 1 <= subset[0] <= subset[1]:
        raise InvalidInputError(f"subset {subset[0]}/{subset[1]}: expected n/t with n from 1 to t")
    return _Check(store, index, engines, CheckResult(level), share, subset).run()


class _Check:
    """One run over a repository."""

    def __init__(
        self, store: ObjectStore, index: Index, engines: Engines, result: CheckResult, share: float,
        subset: tuple[int, int],
    ) -> None:  # fmt: skip
        self._store, self._index, self._engines, self._result, self._share = store, index, engines, result, share
        self._subset = subset
        self._bad: set[str] = set()  # ids of snapshots that are not restorable
        self._sizes: dict[str, int] = {}

    def run(self) -> CheckResult:
        """All levels up to the one asked for."""
        result = self._result
        for prefix in ("packs/", "manifests/"):
            for info in self._store.list(prefix):
                if OBJECT_NAME.fullmatch(info.key):
                    self._sizes[info.key] = info.size_bytes
                else:
                    self._report(prefix[:-2], info.key, f"{info.key}: no name of an object; it does not belong here")
        snapshots = self._records()
        manifests = {s.id: self._manifests(s) for s in snapshots}
        needed = {ref.key for s in snapshots if s.state == COMMITTED for ref in s.manifests}
        for snapshot in snapshots:
            if snapshot.state == COMMITTED:
                needed.update(records.pack_key(name) for m in manifests[snapshot.id] for name in m.header.pack_names)
        result.unneeded_bytes = sum(size for key, size in self._sizes.items() if key not in needed)
        if result.level != "metadata":
            self._packs(snapshots, manifests)
        if result.level == "restore":
            seen: set[tuple[str, int, bytes]] = set()
            for snapshot in snapshots:
                if snapshot.id not in self._bad:
                    self._rebuild(snapshot, manifests[snapshot.id], seen)
        result.restorable = [s for s in snapshots if s.id not in self._bad]
        result.damaged = [s for s in snapshots if s.id in self._bad]
        return result

    def _report(self, kind: str, key: str, message: str, suffer: Iterable[str] = ()) -> None:
        ids = tuple(suffer)
        self._bad.update(ids)
        self._result.problems.append(Problem(kind, key, message, ids))

    def _records(self) -> list[Snapshot]:
        """Every record, read from the store itself; committed and forgotten snapshots."""
        view = self._index.refresh()
        for key in view.vanished:
            self._report("index", key, f"{key}: known to the index, not in the store; run 'snapstore index rebuild'")
        for info in list(self._store.list("snapshots/")):
            if records.parse_record_key(info.key) is None:
                self._report("record", info.key, f"{info.key}: no name of a record; it does not belong here")
                continue
            try:
                data = self._store.get(info.key, limit_bytes=records.MAX_OBJECT_BYTES)
                found = records.decode(data, Snapshot, info.key)
                if found.key != info.key:
                    raise IntegrityError(f"{info.key}: holds the record of {found.key}")
                known = view.get(found.id)
                if (
                    known is not None
                    and known.revision == found.revision
                    and records.encode(known) != records.encode(found)  # not known != found: metrics may be NaN
                ):
                    raise IntegrityError(f"{info.key}: differs from the index; run 'snapstore index rebuild'")
            except NotFoundError:
                continue  # removed while we look
            except _DAMAGE as error:
                suffers = info.key.rpartition("-")[2].split(".")[0]
                ruling = view.get(suffers)  # a later revision that reads stands, whatever happened to this one
                self._report(
                    "record", info.key, str(error), [suffers] if ruling is None or ruling.key == info.key else []
                )
        return view.snapshots(states=(COMMITTED, FORGOTTEN))

    def _manifests(self, snapshot: Snapshot) -> list[Manifest]:
        """A snapshot's manifests, those that read; and whether the packs they need are there."""
        found = []
        for ref in snapshot.manifests:
            try:
                read = manifest.read(self._store, ref)
                _check_entries(read, ref.key)
            except _DAMAGE as error:
                self._report("manifest", ref.key, f"{snapshot.ref}: {error}", [snapshot.id])
                continue
            found.append(read)
            for number, (name, size) in enumerate(zip(read.header.pack_names, read.header.pack_size_list, strict=True)):
                key = records.pack_key(name)
                if key not in self._sizes:
                    self._report("pack", key, f"{snapshot.ref}: {key} is missing", [snapshot.id])
                elif self._sizes[key] != size:
                    message = (
                        f"{snapshot.ref}: {key} has {self._sizes[key]} bytes, expected {size}: cut short or altered"
                    )
                    self._report("pack", key, message, [snapshot.id] if _beyond(read, number, self._sizes[key]) else [])
        if len(found) == len(snapshot.manifests):
            self._tree(snapshot, found)
        return found

    def _tree(self, snapshot: Snapshot, manifests: Sequence[Manifest]) -> None:
        """The trees, the tensors and the parts belong together."""
        from .restore import spec_of
        from .state.tensors import StoredPart
        from .state.tree import decode

        try:
            decode([StoredPart(m.header.part, m.tree, [spec_of(entry) for entry in m.tensors]) for m in manifests])
        except FormatError as error:
            self._report("manifest", snapshot.key, f"{snapshot.ref}: {error}", [snapshot.id])

    # -- data

    def _packs(self, snapshots: Sequence[Snapshot], manifests: dict[str, list[Manifest]]) -> None:
        """Read packs whole; of a damaged one, find out which snapshots lose a blob."""
        needed: dict[str, list[tuple[Snapshot, Manifest, int]]] = {}
        for snapshot in snapshots:
            for m in manifests[snapshot.id]:
                for number, name in enumerate(m.header.pack_names):
                    needed.setdefault(records.pack_key(name), []).append((snapshot, m, number))
        number, count = self._subset
        keys = sorted(
            key for key in self._sizes if key.startswith("packs/") and int(key[-8:], 16) % count == number - 1
        )
        if self._share < 1:
            keys = random.sample(keys, max(1, round(self._share * len(keys)))) if keys else []
        for key in keys:
            try:
                data = self._store.get(key, limit_bytes=self._sizes[key])
            except NotFoundError:
                continue
            except (*_DAMAGE, StorageError) as error:
                self._report("pack", key, f"{key}: cannot be read: {error}", {s.id for s, _, _ in needed.get(key, [])})
                continue
            got = hashlib.sha256(data).hexdigest()
            if not key.endswith(got):
                lost = {s.id for s, m, number in needed.get(key, []) if _loses(memoryview(data), m, number, key)}
                message = f"{key}: SHA-256 is {got}: altered; {len(lost)} snapshots lose chunks by it"
                self._report("pack", key, message, sorted(lost))

    # -- restore

    def _rebuild(self, snapshot: Snapshot, manifests: Sequence[Manifest], seen: set[tuple[str, int, bytes]]) -> None:
        """Rebuild every chunk; chains that an earlier snapshot shares are rebuilt once."""
        for m in manifests:
            rows = [row for row in range(len(m.table)) if _chain(m, row) not in seen]
            try:
                for _ in Fetcher(self._store, self._engines).rebuild(_scratch(m, rows)):
                    pass
            except _DAMAGE:
                self._rebuild_singly(snapshot, m, rows)
            else:
                seen.update(_chain(m, row) for row in rows)

    def _rebuild_singly(self, snapshot: Snapshot, m: Manifest, rows: Sequence[int]) -> None:
        """Name the chunks that are lost."""
        lost = 0
        for row in rows:
            try:
                for _ in Fetcher(self._store, self._engines).rebuild(_scratch(m, [row])):
                    pass
            except _DAMAGE as error:
                lost += 1
                if lost <= CHUNKS_NAMED:
                    where = _tensor_of(m, row)
                    self._report("chunk", m.header.part, f"{snapshot.ref}: {where}: {error}", [snapshot.id])
        if lost > CHUNKS_NAMED:
            message = f"{snapshot.ref}: {lost - CHUNKS_NAMED} more chunks are lost"
            self._report("chunk", m.header.part, message, [snapshot.id])


def _check_entries(m: Manifest, where: str) -> None:
    """Every tensor has as many chunks as its bytes need."""
    from .restore import check_layout

    for entry in m.tensors:
        check_layout(m, entry, where)


def _scratch(m: Manifest, rows: Iterable[int]) -> Iterator[Wanted]:
    """Rows to rebuild into memory that nobody looks at."""
    packs = m.header.pack_names
    lengths = m.table.lengths
    for row in rows:
        yield whole(m.table, packs, row, np.empty(int(lengths[row]), np.uint8))


def _chain(m: Manifest, row: int) -> tuple[str, int, bytes]:
    """What names a chunk's chain: its newest blob and its digest; older blobs follow from it."""
    ref = int(m.table.starts[row])
    start = 32 * int(m.table.ref_packs[ref])
    return m.header.packs[start : start + 32].hex(), int(m.table.ref_offsets[ref]), m.table.digests[row].tobytes()


def _tensor_of(m: Manifest, row: int) -> str:
    for entry in m.tensors:
        for box in entry.boxes:
            if box.first_chunk <= row < box.first_chunk + box.chunks:
                return f"{'.'.join(map(str, entry.path))}, chunk {row - box.first_chunk}"
    return f"chunk {row}"


def _beyond(m: Manifest, number: int, size_bytes: int) -> bool:
    """Whether a manifest uses bytes of a pack beyond this size."""
    refs = m.table.ref_packs == number
    return bool((m.table.ref_offsets[refs] + m.table.ref_lengths[refs] > size_bytes).any())


def _loses(data: memoryview, m: Manifest, number: int, key: str) -> bool:
    """Whether a blob that a manifest uses is damaged in these bytes of its pack."""
    refs = np.flatnonzero(m.table.ref_packs == number)
    for offset, length, wanted in zip(
        m.table.ref_offsets[refs].tolist(), m.table.ref_lengths[refs].tolist(), m.table.ref_digests[refs], strict=True
    ):
        try:
            if blob.parse(data[offset : offset + length], f"{key} at {offset}").digest != wanted.tobytes():
                return True
        except _DAMAGE:
            return True
    return False
