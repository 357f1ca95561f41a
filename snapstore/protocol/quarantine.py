"""quarantine."""

from __future__ import annotations

from collections.abc import Sequence

from ..catalog.needed_keys import all_needed_keys
from ..catalog.read_twice import listed
from ..context import Context
from ..errors import (
    NotFoundError,
)
from ..format.keys import lost_names, quarantined_names
from ..format.records import Snapshot
from ..storage.base import ObjectStore


def in_quarantine(store: ObjectStore) -> set[str]:
    """Keys of the packs that a repair has found damaged: whatever they still hold stays until a person says so."""
    return quarantined_names(listed(store, "gc/"))


def in_need_of_quarantined(context: Context, snapshots: Sequence[Snapshot]) -> set[str]:
    """Ids of the snapshots that need a pack in quarantine, or that a repair has found to lack a manifest.

    One that was healed needs none; no other data is read.
    """
    notes = listed(context.store, "gc/")
    damaged, found = quarantined_names(notes), lost_names(notes) & {s.id for s in snapshots}
    if damaged:
        found |= {
            s.id for s, keys in all_needed_keys(context.index, snapshots) if not isinstance(keys, set) or keys & damaged
        }
    return found


def _exists(store: ObjectStore, key: str) -> bool:
    """Objects of a save that committed after our listing are there, though the listing lacks them."""
    try:
        store.stat(key)
    except NotFoundError:
        return False
    return True
