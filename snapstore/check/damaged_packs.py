"""Damaged packs: which of their blobs are still intact, and which chunks are lost with the other blobs.

In: manifests. Out: columns over their references, for scan_objects.py and repair/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import Column
from ..catalog.read_twice import answers, tried
from ..chunks.reader import ChunkReader, whole
from ..context import Context
from ..engine.cpu import ProvingEngine
from ..errors import DAMAGE, CapabilityError, FormatError, IntegrityError, SnapstoreError, StorageError
from ..format.blobs import blob
from ..format.keys import pack_key
from ..format.manifests.manifest import Manifest, manifest_name
from ..format.manifests.tensor_layout import check_ties
from ..restore.manifests import decoding_of, pages_of, part_of, read_pages
from ..state.tree.decode import decode, unpack_nodes
from ..state.values.tensors import StoredPart
from ..storage.base import ObjectStore
from ..storage.os_errors import is_withheld


class DamagedPacks:
    """The damaged packs of a repository, and which of their blobs are intact. Reads a blob once and remembers it.

    Attributes:
        why: key -> why, of the packs whose bytes are damaged, missing or cannot be read.
        misbuilt: key -> offsets of the blobs whose bytes are as written, but which do not give their chunks.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.why: dict[str, str] = {}
        self.misbuilt: dict[str, set[int]] = {}
        self._found: dict[tuple[str, int, bytes], bool] = {}  # (key, offset, digest) -> whether that blob lies there

    def __contains__(self, key: object) -> bool:
        return key in self.why or key in self.misbuilt

    def condemn(self, key: str, offset: int) -> None:
        """Note that a blob does not give its chunk: nothing uses it again, not even in another copy of its pack."""
        self.misbuilt.setdefault(key, set()).add(offset)

    def holds(self, key: str, offset: int, length: int, digest: bytes) -> bool:
        """Return whether the intact blob of a chunk lies at a place; False if two reads fail.

        Args:
            offset, length: of the blob in the pack `key` [bytes].
            digest: of the chunk.

        Raises:
            StorageError: the store does not answer at all, which is no damage.
        """
        if offset in self.misbuilt.get(key, ()):
            return False
        place = key, offset, digest
        if place not in self._found:
            self._found[place] = tried(self._store, lambda: self._read(*place, length)) is not None
        return self._found[place]

    def _read(self, key: str, offset: int, digest: bytes, length: int) -> bytes:
        """Return the digest of a chunk, if its intact blob lies there."""
        found = blob.parse(self._store.get_range(key, offset, length), key).digest
        if found != digest:  # perhaps another object's bytes: a second read shows it
            raise IntegrityError(f"{key}: offset {offset}: expected the blob of {digest.hex()}, got {found.hex()}")
        return found

    def within(self, m: Manifest) -> Column:
        """Return which references of a manifest point into damaged packs, (k,) bool."""
        numbers = [number for number, name in enumerate(m.header.pack_names) if pack_key(name) in self]
        return np.isin(m.table.ref_packs, numbers)

    def lost(self, m: Manifest) -> Column:
        """Return which references of a manifest point at blobs that are not intact, (k,) bool."""
        lost, table = self.within(m), m.table
        keys = [pack_key(name) for name in m.header.pack_names]
        for ref in np.flatnonzero(lost).tolist():
            place = keys[table.ref_packs[ref]], int(table.ref_offsets[ref]), int(table.ref_lengths[ref])
            lost[ref] = not self.holds(*place, table.ref_digests[ref].tobytes())
        return lost


def lost_rows(m: Manifest, lost: Column) -> Column:
    """Return the rows of a manifest's chunks that need a lost reference, sorted, (n,) int64; `lost` is (k,) bool."""
    rows = np.repeat(np.arange(len(m.table)), m.table.ref_counts)
    return np.unique(rows[lost])


def check_tree(context: Context, manifests: Sequence[Manifest], *, with_pages: bool) -> None:
    """Check that the manifests together hold one whole state.

    Args:
        manifests: the ones that a record names; if several ranks have saved it, then the children of all of these.
        with_pages: read the pages of large trees too, not only the trees in manifests. A page that cannot be read is
            skipped: rebuilding its chunks finds the damage.

    Raises:
        FormatError: they do not hold one whole state.
    """
    check_ties({m.header.part: m.tensors for m in reversed(manifests)})  # of the roots, which come first
    parts: list[StoredPart] = []
    for m in manifests:
        is_own = m.header.world_size > 0 and any(part.name == m.header.part for part in parts)
        tree, pages = m.tree, pages_of(m)
        if pages is not None:
            if not (with_pages or m.header.part or is_own):
                return  # the root, which names the other parts
            try:
                packed = read_pages(context, m, pages, "check") if with_pages else None
            except (*DAMAGE, StorageError, CapabilityError):
                if is_own:
                    continue
                return
            tree = None if packed is None else unpack_nodes(packed)
        if not is_own:
            parts.append(part_of(m, tree))
        elif tree is not None:
            _check_own_values(m, tree)
    _require_state(parts)


def _check_own_values(m: Manifest, tree: Any) -> None:
    """Raise FormatError unless a tree is one of a rank's own values."""
    if type(tree) is not list or len(tree) != 2 or tree[0] != "own" or type(tree[1]) is not list:
        raise FormatError(f"{manifest_name(m.header)}: its tree is not one of the rank's own values")
    _require_state([replace(part_of(m, ["list", tree[1]]), name="")])


def _require_state(parts: Sequence[StoredPart]) -> None:
    """Raise FormatError unless the trees of parts decode; more values than this machine has room for are no damage."""
    try:
        decode(parts, decoded=decoding_of("check"))
    except CapabilityError as error:
        if isinstance(error, FormatError):
            raise


def unbuilt(
    context: Context,
    m: Manifest,
    rows: Sequence[int],
    proven: dict[int, int] | None = None,
    checksums: Column | None = None,
) -> dict[int, SnapstoreError]:
    """Rebuild chunks, compare the headers of their blobs with the manifest; return row -> error of each that fails.

    A CapabilityError means that this machine cannot rebuild the row, or one that was tried with it. It is no damage,
    although UnknownFormatError is in DAMAGE as well. A row with any other error has also failed alone.

    Args:
        proven: receives, for each row that does not fail, how many blobs of its chain give their chunks
            (`chain_decode.prove_chain`).
        checksums: (k,) of the blob of each reference, as in `ProvingEngine`; None: none is known.

    Raises:
        StorageError: the store does not answer at all, or withholds a pack, which may be whole.
    """
    packs, lengths = m.header.pack_names, m.table.lengths
    refs = m.table.refs_of(np.array(rows, np.int64))
    known = np.zeros(len(refs), np.uint64) if checksums is None else checksums[refs]
    engine = ProvingEngine(context.engines.cpu, m.table.ref_digests[refs], known)
    try:
        rebuilt = (whole(m.table, packs, row, np.empty(int(lengths[row]), np.uint8)) for row in rows)
        for _ in ChunkReader(context, engine).rebuild(rebuilt):
            pass
        if proven is not None:
            proven.update(zip(rows, engine.proven, strict=True))
        return {}
    except CapabilityError as error:
        return dict.fromkeys(rows, _without_traceback(error))
    except (*DAMAGE, StorageError) as error:
        if is_withheld(error):
            raise
        _without_traceback(error)
        if isinstance(error, StorageError):
            answers(context.store)
        if len(rows) == 1:
            return {rows[0]: error}
    half = len(rows) // 2  # halves, not single rows: each try is a request
    failed = unbuilt(context, m, rows[:half], proven, checksums)
    return failed | unbuilt(context, m, rows[half:], proven, checksums)


def _without_traceback(error: SnapstoreError) -> SnapstoreError:
    """Return the error without its traceback, which would keep the chunk's memory alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
