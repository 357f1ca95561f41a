"""Roots: the root manifests over the children that a rewrite has replaced.

In: a snapshot of several ranks, and new children. Out: new roots that name them, and all packs that are needed now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from ..catalog.index import Index
from ..errors import DAMAGE
from ..format import manifest
from ..format.manifest import Manifest
from ..format.records import RANKS, ManifestRef, Snapshot
from ..protocol.commit import Claim

#: The manifests that a session has written, by the SHA-256 of the one that each replaces, with their bytes.
Written = dict[str, tuple[ManifestRef, bytes]]


def new_roots(
    index: Index, read: Callable[[ManifestRef], Manifest], claim: Claim, ruling: Snapshot, written: Written
) -> Written:
    """Return new roots in place of those with replaced children; none if one process has written the snapshot.

    A root that cannot be read, such as one that a repair has found lost, stays as it is if none of its children is new.

    Args:
        read: returns a whole manifest.
        written: the new children.

    Raises:
        NotFoundError, IntegrityError, FormatError: a root of a new child, or a child that stays beside one, is missing
            or damaged.
    """
    roots: Written = {}
    rootless, lost = set(written), list[Exception]()
    for ref in ruling.manifests if RANKS in ruling.features else ():
        try:
            old = index.header(ref).children
        except DAMAGE as error:
            lost.append(error)
            continue
        if written.keys().isdisjoint(child.sha256 for child in old):
            continue
        rootless -= {child.sha256 for child in old}
        children, depth, packs = list[ManifestRef](), 0, dict[str, int]()
        for child in old:
            new, data = written.get(child.sha256, (child, b""))
            header = manifest.decode_header(data, new.key) if data else index.header(child)
            children.append(new)
            depth = max(depth, header.depth)
            packs.update(zip(header.pack_names, header.pack_size_list, strict=True))
        contents = replace(
            manifest.ManifestContents.of(read(ref)),
            save_id=bytes.fromhex(claim.id),
            packs=list(packs),
            pack_sizes=list(packs.values()),
            made_for=claim.made_for,
            children=children,
            depth=depth,
        )
        data = manifest.encode(contents)
        roots[ref.sha256] = msgspec.structs.replace(manifest.ref_of(data), unknown=ref.unknown), data
    if rootless and lost:
        raise lost[0]
    return roots
