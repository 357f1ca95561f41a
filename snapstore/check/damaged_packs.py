"""Damage: which packs are not what they should be, which of their blobs still are, and which chunks that costs.

In: manifests. Out: columns over their references. What survey.py reports and repair.py mends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from ..arrays import Column
from ..catalog.read_twice import answers
from ..chunks.reader import ChunkReader, Wanted, whole
from ..context import Context
from ..engine.cpu import ProvingEngine
from ..errors import DAMAGE, CapabilityError, SnapstoreError, StorageError
from ..format import blob
from ..format.keys import pack_key
from ..format.manifest import Manifest
from ..storage.base import ObjectStore

T = TypeVar("T")


class DamagedPacks:
    """Packs that are not what they should be, and which of their blobs still are.

    Attributes:
        why: by key, what is wrong with a pack.
        misbuilt: by key, the offsets of blobs that are as they were written and do not give their chunks.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.why: dict[str, str] = {}
        self.misbuilt: dict[str, set[int]] = {}
        self._found: dict[tuple[str, int], bytes] = {}  # (key, offset) -> digest of the blob there; empty: none intact

    def __contains__(self, key: object) -> bool:
        return key in self.why or key in self.misbuilt

    def give_up(self, key: str, offset: int) -> None:
        """A blob does not give its chunk: it is never believed again, not even in a copy of its pack."""
        self.misbuilt.setdefault(key, set()).add(offset)

    def holds(self, key: str, offset: int, length: int, digest: bytes) -> bool:
        """Whether the blob of a chunk is intact there."""
        if offset in self.misbuilt.get(key, ()):
            return False
        if (key, offset) not in self._found:
            self._found[key, offset] = self._digest(key, offset, length)
        return self._found[key, offset] == digest

    def _digest(self, key: str, offset: int, length: int) -> bytes:
        """Of the intact blob there; empty: there is none, or it could not be read twice.

        Raises:
            StorageError: the store does not answer at all, which is no damage.
        """
        for _ in range(2):
            try:
                data = self._store.get_range(key, offset, length)
                return blob.parse(data, key).digest
            except DAMAGE:
                return b""
            except StorageError:
                answers(self._store)
        return b""

    def within(self, m: Manifest) -> Column:
        """Which references of a manifest point into damaged packs, (k,) bool."""
        numbers = [number for number, name in enumerate(m.header.pack_names) if pack_key(name) in self]
        return np.isin(m.table.ref_packs, numbers)

    def lost(self, m: Manifest) -> Column:
        """Which references of a manifest point at blobs that are not intact, (k,) bool."""
        lost, table = self.within(m), m.table
        keys = [pack_key(name) for name in m.header.pack_names]
        for ref in np.flatnonzero(lost).tolist():
            place = keys[table.ref_packs[ref]], int(table.ref_offsets[ref]), int(table.ref_lengths[ref])
            lost[ref] = not self.holds(*place, table.ref_digests[ref].tobytes())
        return lost


def lost_rows(m: Manifest, lost: Column) -> Column:
    """The chunks of a manifest that need a lost reference."""
    rows = np.repeat(np.arange(len(m.table)), m.table.ref_counts)
    return np.unique(rows[lost])


def check_tree(manifests: Sequence[Manifest]) -> None:
    """Raise FormatError unless the manifests are those of one whole state."""
    from ..restore.pipeline import spec_of
    from ..state.tensors import StoredPart
    from ..state.tree_decode import decode

    decode([StoredPart(m.header.part, m.tree, [spec_of(entry) for entry in m.tensors]) for m in manifests])


def unbuilt(
    context: Context, m: Manifest, rows: Sequence[int], proven: dict[int, list[bytes]] | None = None
) -> dict[int, SnapstoreError]:
    """Rebuild chunks; row -> why, of those that cannot be: each was tried by itself at last.

    A CapabilityError says that this machine cannot, of any of them: no damage, though an unknown codec is in DAMAGE.

    Args:
        proven: gets, of every other row, the digests that the blobs of its chain give (`blob.prove_chain`).

    Raises:
        StorageError: the store does not answer at all.
    """
    engine = None if proven is None else ProvingEngine(context.engines.cpu)
    try:
        for _ in ChunkReader(context, engine).rebuild(_scratch(m, rows)):
            pass
        if proven is not None and engine is not None:
            proven.update(zip(rows, engine.proven, strict=True))
        return {}
    except CapabilityError as error:
        return dict.fromkeys(rows, _bare(error))
    except (*DAMAGE, StorageError) as error:
        _bare(error)
        if isinstance(error, StorageError):
            answers(context.store)
        if len(rows) == 1:
            return {rows[0]: error}
    half = len(rows) // 2  # and not row by row: each try is a request
    failed = unbuilt(context, m, rows[:half], proven)
    return failed | unbuilt(context, m, rows[half:], proven)


def _bare(error: SnapstoreError) -> SnapstoreError:
    """The error without the frames that it came through: these hold the memory of the chunk as long as it lives."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _scratch(m: Manifest, rows: Iterable[int]) -> Iterator[Wanted]:
    """Rows to rebuild into memory that nobody looks at."""
    packs = m.header.pack_names
    lengths = m.table.lengths
    for row in rows:
        yield whole(m.table, packs, row, np.empty(int(lengths[row]), np.uint8))
