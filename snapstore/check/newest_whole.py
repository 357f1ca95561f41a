"""Newest whole: name the snapshot to resume from if the newest one of a run cannot be restored.

In: the reference of a snapshot whose restore failed. Out: the end of the error, which names the newest older snapshot
whose every chunk can be rebuilt. `snapshots.py` adds it to the error. The search reads snapshots from the newest to the
oldest and each blob about once. The bytes are not kept.
"""

from __future__ import annotations

from ..catalog.read_twice import answers
from ..context import Context
from ..errors import DAMAGE, StorageError
from ..format.manifests.rank_checks import read_children
from ..format.records import Snapshot
from ..restore.manifests import read_manifests
from ..text import log, some
from .damaged_packs import DamagedPacks, check_tree
from .verify_chunks import ChunkRebuilder


def advice(context: Context, ref: str, *, maybe_whole: bool) -> str:
    """Return the end of the error; empty unless the reference names the newest snapshot of its run.

    One wrong answer proves no damage, so the snapshot is read again first.

    Args:
        maybe_whole: whether the store failed. Then a snapshot that is whole needs no words: the error says it all.

    Raises:
        SnapstoreError: the search failed.
    """
    answers(context.store)
    damaged = context.index.find(ref)
    view = context.index.refresh(damaged.run)
    newest = view.newest(damaged.run)
    if newest is None or newest.id != damaged.id:
        return ""
    log.warning("%s cannot be restored; reading it again, then older ones, to find the newest whole one", damaged.ref)
    packs, rebuilder = DamagedPacks(context.store), ChunkRebuilder(context, None)
    if _is_whole(context, damaged, packs, rebuilder):
        return "" if maybe_whole else f"; {damaged.ref} was read again and is whole: restore it again"
    older = (snapshot for snapshot in reversed(view.snapshots(damaged.run)) if snapshot.id != damaged.id)
    found = next((snapshot for snapshot in older if _is_whole(context, snapshot, packs, rebuilder)), None)
    unknown = [f"{damaged.run}@{step}" for step in sorted(view.unknown_steps(damaged.run).values())]
    besides = f", besides {some(unknown)}, whose records cannot be read or are gone," if unknown else ""
    if found is None:
        return f"; no older snapshot of run {damaged.run!r}{besides} is whole"
    return (
        f"; the newest whole snapshot of run {damaged.run!r}{besides} is {found.ref} (id:{found.id[:12]}); to go on "
        "from it, name it in the restore, restore with fallback (--fallback), or run 'snapstore repair --apply "
        "--drop', which forgets what stays damaged"
    )


def _is_whole(context: Context, snapshot: Snapshot, packs: DamagedPacks, rebuilder: ChunkRebuilder) -> bool:
    try:
        seed = context.engines.digest_seed
        manifests = read_manifests(context.store, seed, snapshot)
        for ref, root in zip(snapshot.manifests, list(manifests), strict=True):
            manifests += read_children(context.store, ref, root, seed)
        check_tree(context, manifests, with_pages=True)
    except (*DAMAGE, StorageError):
        answers(context.store)
        return False
    for m in manifests:
        rebuilder.failures(snapshot.ref, m, packs, prove=True)  # also proves chains of older snapshots
    return not any(rebuilder.failures(snapshot.ref, m, packs) for m in manifests)
