"""Roots: encode new root manifests for the children that a rewrite has replaced.

In: a snapshot of several ranks, and its new manifests: children, and roots whose own chunks have moved. Out: new roots
that name the children as they are now, and all packs that are needed now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from ..catalog.index import Index
from ..errors import DAMAGE
from ..format.manifests import manifest
from ..format.manifests.manifest import Manifest
from ..format.records import RANKS, ManifestRef, Snapshot
from ..protocol.claim import Claim

#: The manifests that a revision names in place of others, by the SHA-256 of the one that each replaces, with their
#: bytes; b"": it was written for another snapshot of the run (shared_manifests.py).
ReplacedManifests = dict[str, tuple[ManifestRef, bytes]]


def new_roots(
    index: Index, read: Callable[[ManifestRef], Manifest], claim: Claim, ruling: Snapshot, written: ReplacedManifests
) -> ReplacedManifests:
    """Return new roots for the roots whose children were replaced, or whose own chunks have moved.

    There are none if one process has written the snapshot. A root that cannot be read, such as one that a repair has
    found lost, stays as it is if none of its children is new.

    Args:
        read: returns a whole manifest.
        written: the new children, roots over new tables that still name the old children, and new roots without bytes.

    Raises:
        NotFoundError, IntegrityError, FormatError: a root of a new child, or a child that stays beside one, is missing
            or damaged.
    """
    roots: ReplacedManifests = {}
    rootless, lost = set(written), list[Exception]()
    for ref in ruling.manifests if RANKS in ruling.features else ():
        try:
            old = index.header(ref).children
        except DAMAGE as error:
            lost.append(error)
            continue
        of_root = {ref.sha256, *(child.sha256 for child in old)}
        if ref.sha256 in written and not written[ref.sha256][1]:
            rootless -= of_root
            continue
        if written.keys().isdisjoint(of_root):
            continue
        rootless -= of_root
        root = manifest.decode(written[ref.sha256][1], ref.key) if ref.sha256 in written else read(ref)
        children, depth, packs = list[ManifestRef](), int(root.table.depths.max(initial=0)), root.own_packs
        places = {name: number for number, name in enumerate(packs)}  # its own packs come first
        numbers = np.array([places.get(name, 0) for name in root.header.pack_names] or [0], np.uint32)
        for child in old:
            new, data = written.get(child.sha256, (child, b""))
            header = manifest.decode_header(data, new.key) if data else index.header(new)
            children.append(new)
            depth = max(depth, header.depth)
            packs.update(zip(header.pack_names, header.pack_size_list, strict=True))
        contents = replace(
            manifest.ManifestContents.of(root),
            save_id=bytes.fromhex(claim.id),
            table=replace(root.table, ref_packs=numbers[root.table.ref_packs]),
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
