"""Quarantine: which packs a repair has found damaged, and which snapshots need one.

In: the notes below `gc/`, and records. Out: keys of packs, ids of snapshots, or answers about one. No save builds on a
pack in quarantine, and no gc deletes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..catalog.needed_keys import all_needed_keys
from ..catalog.read_twice import listed
from ..context import Context
from ..errors import SnapstoreError
from ..format.keys import lost_names, pack_key, quarantined_names
from ..format.records import SWEPT, Lost, Snapshot
from ..storage.base import ObjectStore


def in_quarantine(store: ObjectStore) -> set[str]:
    """Return the keys of the packs in quarantine: their intact blobs may still be needed to heal a snapshot."""
    return quarantined_names(listed(store, "gc/"))


def in_need_of_quarantined(context: Context, snapshots: Sequence[Snapshot]) -> set[str]:
    """Return the ids of the snapshots that need a pack in quarantine, or whose manifest a repair has not found.

    A healed snapshot needs none. Without notes, no manifest is read.
    """
    notes = listed(context.store, "gc/")
    damaged, found = quarantined_names(notes), lost_names(notes) & {s.id for s in snapshots}
    if damaged:
        found |= {
            s.id for s, keys in all_needed_keys(context.index, snapshots) if not isinstance(keys, set) or keys & damaged
        }
    return found


def has_bytes(context: Context, snapshot: Snapshot) -> bool:
    """Return whether the packs and manifests of a snapshot are there with their sizes, and not in quarantine."""
    sizes = {ref.key: ref.size_bytes for ref in snapshot.manifests}
    for header in context.index.headers(snapshot.manifests):
        if isinstance(header, SnapstoreError):
            return False
        sizes |= {child.key: child.size_bytes for child in header.children}
        sizes |= zip(map(pack_key, header.pack_names), header.pack_size_list, strict=True)
    return context.store.sizes(list(sizes)) == sizes and not in_need_of_quarantined(context, [snapshot])


def remove_note(store: ObjectStore, snapshot: Snapshot) -> None:
    """Delete the note of a snapshot that lacked a manifest, if there is one: it has all its manifests again."""
    store.delete([Lost(id=snapshot.id, found=0, reason="").key])


def remove_notes_of_swept(context: Context, keys: Iterable[str]) -> None:
    """Delete, among some keys, the notes of lost manifests whose snapshots are swept, since these cannot come back."""
    if lost := lost_names(keys):
        swept = {s.id for s in context.index.refresh().snapshots(states=(SWEPT,))}
        context.store.delete([Lost(id=name, found=0, reason="").key for name in sorted(lost & swept)])
