"""Mark damage: tell later choices, saves and gcs of the damage that a restore has found.

In: a snapshot and the chunk that it has lost. Out: a mark in the local index, and a note of quarantine for each damaged
pack, if this process may write. A note keeps saves off the pack, and keeps the pack from gcs until a repair.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from ..catalog.damage_marks import MANIFEST, NOTED
from ..context import Context
from ..errors import SnapstoreError
from ..format.blobs.chain_decode import ReferenceMismatchError
from ..format.keys import pack_key
from ..format.records import Quarantine, Snapshot
from ..protocol.notes import put_quarantine
from ..protocol.same_repository import confirmed
from ..text import log, strip_hint
from .damaged_packs import DamagedPacks
from .verify_wanted import LostChunk, first_lost_of


def damaged_blobs(context: Context, lost: LostChunk) -> dict[str, list[int]]:
    """Return the packs that hold the damaged blobs of a lost chunk, with the offsets of misbuilt ones, by key.

    A blob is misbuilt if its bytes are as they were written, but do not give the chunk. None is if the manifest is
    wrong.
    """
    if isinstance(lost.error, ReferenceMismatchError):
        return {}
    packs, table, names = DamagedPacks(context.store), lost.m.table, lost.m.header.pack_names
    found: dict[str, list[int]] = {}
    refs = table.refs_of(np.array([lost.row])).tolist()
    places = [(pack_key(names[table.ref_packs[ref]]), int(table.ref_offsets[ref])) for ref in refs]
    for ref, (key, offset) in zip(refs, places, strict=True):
        if not packs.holds(key, offset, int(table.ref_lengths[ref]), table.ref_digests[ref].tobytes()):
            found.setdefault(key, [])
    if not found and first_lost_of(context, lost.m, np.array([lost.row])) is None:
        return {}  # all of it is as it was written, and gives the chunk: the store has lied
    return found or {places[0][0]: [places[0][1]]}  # the newest one, as in a check


def mark_damaged(context: Context, snapshot: Snapshot, why: str, lost: LostChunk | None, *, may_write: bool) -> None:
    """Mark a snapshot in the index and, if this process may write, put its damaged packs in quarantine."""
    blobs: Mapping[str, Sequence[int]] = {}
    try:
        blobs = damaged_blobs(context, lost) if lost is not None else {}
    except SnapstoreError as error:  # the mark of the snapshot does without
        log.info("%s: its damaged packs are not known: %s", snapshot.ref, error)
    context.index.marks.add(snapshot, why, blobs, MANIFEST if lost is None else None)
    is_noted = bool(blobs) and may_write
    for key, offsets in blobs.items() if may_write else ():
        reason = strip_hint(f"{snapshot.ref}: {why}")[:500]
        note = Quarantine(pack=key.rpartition("/")[2], found=time.time(), reason=reason, blobs=list(offsets))
        try:
            with confirmed(context):
                put_quarantine(context.store, note)
            log.warning(
                "%s goes into quarantine: no save builds on it, and no gc deletes it; run 'snapstore repair'", key
            )
        except SnapstoreError as error:  # a store that refuses it must not prevent a restore
            is_noted = False
            log.warning("%s is damaged, and cannot be put in quarantine: %s", key, error)
    if is_noted:
        context.index.marks.add(snapshot, why, blobs, NOTED)
