"""Manifest refs: all manifests of a snapshot, not only the ones that its record names.

In: a snapshot, and a way to read the manifests that its record names. Out: references. A record names one manifest a
part. If several ranks have written the snapshot, these are roots, and each names its children: one manifest a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..format.manifests.manifest import Manifest
from ..format.records import RANKS, ManifestRef, Snapshot
from .index import Index


def data_refs(index: Index, snapshot: Snapshot) -> list[ManifestRef]:
    """Return the references of the manifests that hold a snapshot's chunks: each root that has some, then its children.

    Reads nothing if one process has written the snapshot.

    Raises:
        NotFoundError, IntegrityError, FormatError: a root is missing or damaged.
        StorageError: one cannot be read.
    """
    if RANKS not in snapshot.features:
        return snapshot.manifests
    headers = [(ref, index.header(ref)) for ref in snapshot.manifests]
    return [found for ref, head in headers for found in ([ref] if head.chunks else []) + head.children]


def all_manifests(
    snapshot: Snapshot, read: Callable[[ManifestRef], Manifest]
) -> Iterator[tuple[ManifestRef, Manifest]]:
    """Yield every manifest of a snapshot with its reference: each root, then its children; raises as `read` does."""
    for ref in snapshot.manifests:
        m = read(ref)
        yield ref, m
        for child in m.header.children:
            yield child, read(child)
