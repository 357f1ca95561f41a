"""Needed keys: list the packs and manifests that snapshots need, from the cached headers of their manifests.

The header of a root manifest (manifest_refs.py) names its children, and all of their packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import SnapstoreError
from ..format.keys import pack_key
from ..format.records import Snapshot
from .index import Index


def needed_keys(index: Index, snapshot: Snapshot) -> set[str]:
    """Return the keys of every manifest and pack that a snapshot needs.

    Raises:
        NotFoundError, IntegrityError, FormatError, StorageError: a manifest is missing or damaged, or cannot be read.
    """
    ((_, keys),) = all_needed_keys(index, [snapshot])
    if isinstance(keys, SnapstoreError):
        raise keys
    return keys


def all_needed_keys(
    index: Index, snapshots: Sequence[Snapshot]
) -> Iterator[tuple[Snapshot, set[str] | SnapstoreError]]:
    """Yield every snapshot with its `needed_keys`, or with the error of a manifest. Headers are read in parallel."""
    headers = index.headers(ref for snapshot in snapshots for ref in snapshot.manifests)
    for snapshot in snapshots:
        keys = set(snapshot.named_keys)
        first_error: SnapstoreError | None = None
        for _ in snapshot.manifests:
            header = next(headers)
            if isinstance(header, SnapstoreError):
                first_error = first_error or header
            else:
                keys.update(child.key for child in header.children)
                keys.update(map(pack_key, header.pack_names))
        yield snapshot, first_error or keys
