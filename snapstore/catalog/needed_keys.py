"""Needed keys: list the packs and manifests that snapshots need, from the cached headers of their manifests.

A record names one manifest a part. If several ranks have written the snapshot, these are roots: the header of each
names its children, one manifest a rank, and all of their packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..errors import SnapstoreError
from ..format import records
from ..format.keys import manifest_key, pack_key
from ..format.manifests.manifest import Manifest, ManifestHeader
from ..format.records import RANKS, MadeFor, ManifestList, ManifestRef, Snapshot
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
    for snapshot, headers in _all_headers(index, snapshots):
        yield snapshot, headers if isinstance(headers, SnapstoreError) else keys_of(snapshot, headers)


def keys_of(snapshot: Snapshot, headers: Iterable[ManifestHeader]) -> set[str]:
    """Return the keys that a record names, and those that the headers of its manifests name."""
    keys = set(snapshot.named_keys)
    for header in headers:
        keys.update(child.key for child in header.children)
        keys.update(map(pack_key, header.pack_names))
    return keys


def needed_sizes(index: Index, snapshots: Sequence[Snapshot]) -> dict[str, dict[str, int]]:
    """Return the sizes of all objects that each snapshot needs [bytes]: snapshot id -> key -> size.

    Raises:
        NotFoundError, IntegrityError, FormatError, StorageError: a manifest is missing or damaged, or cannot be read.
    """
    found = {}
    for snapshot, headers in _all_headers(index, snapshots):
        if isinstance(headers, SnapstoreError):
            raise type(headers)(f"{snapshot.ref}: its size is not known: {headers}") from headers
        sizes = {ref.key: ref.size_bytes for ref in snapshot.manifests}
        if snapshot.manifest_list:  # its size follows from the number of names
            names = ManifestList.of(snapshot.id, MadeFor(bytes(16), 0, snapshot.run, snapshot.step), snapshot.manifests)
            sizes[manifest_key(snapshot.manifest_list)] = len(records.encode(names))
        for header in headers:
            sizes.update((child.key, child.size_bytes) for child in header.children)
            sizes.update(zip(map(pack_key, header.pack_names), header.pack_size_list, strict=True))
        found[snapshot.id] = sizes
    return found


def _all_headers(
    index: Index, snapshots: Sequence[Snapshot]
) -> Iterator[tuple[Snapshot, list[ManifestHeader] | SnapstoreError]]:
    """Yield every snapshot with the headers of the manifests that its record names, or with the first error."""
    headers = index.headers(ref for snapshot in snapshots for ref in snapshot.manifests)
    for snapshot in snapshots:
        found: list[ManifestHeader] = []
        first_error: SnapstoreError | None = None
        for _ in snapshot.manifests:
            header = next(headers)
            if isinstance(header, SnapstoreError):
                first_error = first_error or header
            else:
                found.append(header)
        yield snapshot, first_error or found


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
