"""Quarantine: which packs a repair has found damaged, and which snapshots need one.

In: the notes below `gc/`. Out: keys of packs, or ids of snapshots. No save builds on a pack in quarantine, and no gc
deletes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..catalog.needed_keys import all_needed_keys
from ..catalog.read_twice import listed
from ..context import Context
from ..format.keys import lost_names, quarantined_names
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


def remove_notes_of_swept(context: Context, keys: Iterable[str]) -> None:
    """Delete, among some keys, the notes of lost manifests whose snapshots are swept, since these cannot come back."""
    if lost := lost_names(keys):
        swept = {s.id for s in context.index.refresh().snapshots(states=(SWEPT,))}
        context.store.delete([Lost(id=name, found=0, reason="").key for name in sorted(lost & swept)])
