"""needed_keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import (
    SnapstoreError,
)
from ..format.keys import pack_key
from ..format.records import Snapshot
from .index import Index


def needed_keys(index: Index, snapshot: Snapshot) -> set[str]:
    """Keys of every manifest and pack that a snapshot needs."""
    ((_, keys),) = all_needed_keys(index, [snapshot])
    if isinstance(keys, SnapstoreError):
        raise keys
    return keys


def all_needed_keys(
    index: Index, snapshots: Sequence[Snapshot]
) -> Iterator[tuple[Snapshot, set[str] | SnapstoreError]]:
    """Of every snapshot its `needed_keys`, or what is wrong with a manifest; manifests are read several at a time."""
    headers = index.headers(ref for snapshot in snapshots for ref in snapshot.manifests)
    for snapshot in snapshots:
        keys: set[str] = set()
        wrong: SnapstoreError | None = None
        for ref in snapshot.manifests:
            header = next(headers)
            if isinstance(header, SnapstoreError):
                wrong = wrong or header
            else:
                keys.add(ref.key)
                keys.update(map(pack_key, header.pack_names))
        yield snapshot, wrong or keys
