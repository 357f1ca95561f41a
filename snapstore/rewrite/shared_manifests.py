"""Shared manifests: let several snapshots name the manifest that a rewrite has put in place of one that they share.

In: the manifests that a rewrite has published. Out: those of them that another snapshot may name too, by the rules for
packs of other snapshots; and the list that such a snapshot needs (docs/format.md, "Manifest list").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from ..catalog.history import View
from ..catalog.index import Index
from ..catalog.read_twice import tried
from ..chunks.uploader import put_once
from ..context import Context
from ..format import records
from ..format.manifests.manifest import ManifestHeader
from ..format.records import COMMITTED, RANKS, ManifestList, ManifestRef, Snapshot
from ..protocol.claim import Claim
from .roots import ReplacedManifests


class Replacements:
    """The manifests that a rewrite has published, by the SHA-256 of the manifest that each replaces."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._found: dict[str, tuple[ManifestRef, Snapshot]] = {}

    def note(self, revision: Snapshot, written: ReplacedManifests) -> None:
        """Remember the new manifests that a published revision names in place of others."""
        self._found.update({old: (ref, revision) for old, (ref, data) in written.items() if data})

    def usable(
        self, view: View, marked: set[str] | None, refs: Iterable[ManifestRef], safe: Callable[[set[str]], set[str]]
    ) -> ReplacedManifests:
        """Return replacements of manifests that another snapshot may name too; b"" stands for their bytes.

        No gc deletes them: the snapshot for which they were written is still committed with them, no mark names them,
        and they are there. The same holds for their children and packs. Each reference keeps the keys that this release
        does not know.

        Args:
            view, marked: see `Work`.
            safe: returns which packs new manifests may refer to.
        """
        found: ReplacedManifests = {}
        for ref in refs:
            new, revision = self._found.get(ref.sha256, (ref, None))
            now = view.get(revision.id) if revision else None
            if revision is None or now is None or now.state != COMMITTED or now.manifests != revision.manifests:
                continue
            header = _header(self._context, new)
            if header is None or marked is None:
                continue
            packs, sizes = set(header.pack_names), {one.key: one.size_bytes for one in (new, *header.children)}
            if marked.isdisjoint(sizes) and safe(packs) == packs and self._context.store.sizes(list(sizes)) == sizes:
                found[ref.sha256] = msgspec.structs.replace(new, unknown=ref.unknown), b""
        return found


def beside(index: Index, ruling: Snapshot, shared: ReplacedManifests) -> set[str]:
    """Return the SHA-256 of the manifests of a snapshot that need not be written again: `shared` replaces them."""
    roots = [ref for ref in ruling.manifests if ref.sha256 in shared and RANKS in ruling.features]
    return shared.keys() | {child.sha256 for ref in roots for child in index.header(ref).children}


def put_list(
    context: Context, claim: Claim, refs: Sequence[ManifestRef], written: ReplacedManifests
) -> str | UnsetType:
    """Put the list of the manifests that a revision will name, and return its name.

    Put none and return UNSET if all of them were written for this snapshot.

    Raises:
        StorageError, ConflictError: the list is not there; see `Claim.confirm`.
    """
    own = {ref.sha256 for ref, data in written.values() if data}
    headers = [_header(context, ref) for ref in refs if ref.sha256 not in own]
    if all(header and header.snapshot == claim.made_for.snapshot for header in headers):
        return UNSET
    names = ManifestList.of(claim.id, claim.made_for, refs)
    data = records.encode(names)
    put_once(claim, names.key, data)
    claim.confirm({names.key: len(data)})
    return names.sha256


def _header(context: Context, ref: ManifestRef) -> ManifestHeader | None:
    """Return the header of a manifest; None if it is lost."""
    return tried(context.store, lambda: context.index.header(ref))
