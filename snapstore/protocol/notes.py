"""Notes: read the objects below `gc/`: marks, and packs in quarantine.

A mark announces what a gc will delete; one that is listed and cannot be read may name any object. A repair, or a
restore with fallback, puts a pack that it has found damaged in quarantine: no save builds on it, and no gc deletes it.

In: keys below `gc/`, and records. Out: marks, keys of packs and manifests, ids of snapshots.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress

import msgspec

from ..catalog.needed_keys import all_manifests, all_needed_keys
from ..catalog.read_twice import listed
from ..context import Context
from ..errors import (
    AlreadyExistsError,
    FormatError,
    IntegrityError,
    NotFoundError,
    SnapstoreError,
    StorageError,
)
from ..format import records
from ..format.keys import lost_names, notes_of_gc, pack_key, quarantined_names
from ..format.manifests import manifest
from ..format.records import SWEPT, Lost, Mark, Quarantine, Snapshot
from ..storage.base import ObjectStore
from ..text import log

#: A mark names each candidate in 32 bytes: this is enough for 32 million objects.
MARK_LIMIT_BYTES = 1024 * 1024 * 1024


def read_mark(store: ObjectStore, key: str) -> Mark | None:
    """Return a mark that was listed; None if its gc has finished meanwhile, or another gc has removed it.

    Raises:
        IntegrityError, FormatError: it is damaged, or the store lists it and does not return it.
        StorageError: the store cannot be read.
    """
    try:
        return records.decode(store.get(key, limit_bytes=MARK_LIMIT_BYTES), Mark, key)
    except NotFoundError as error:
        if key in listed(store, "gc/"):
            raise IntegrityError(f"{key}: is listed, and cannot be read: {error}") from error
        return None


def marked_keys(store: ObjectStore, keys: Iterable[str]) -> set[str]:
    """Return the keys of all packs and manifests that the marks among some keys name.

    Raises:
        IntegrityError, FormatError, StorageError: a mark cannot be read.
    """
    marked: set[str] = set()
    for key in notes_of_gc(keys, "mark"):
        mark = read_mark(store, key)
        marked |= mark.keys() if mark else set()
    return marked


def standing_marks(store: ObjectStore) -> list[Mark]:
    """Return every mark; remove a mark that is damaged in two reads.

    If the gc of that mark still runs, it finds its mark gone and stops.

    Raises:
        StorageError: the store cannot be read.
    """
    marks: list[Mark] = []
    for key in notes_of_gc([info.key for info in store.list("gc/")], "mark"):
        for again in (True, False):
            try:
                mark = read_mark(store, key)
                marks += [mark] if mark is not None else []
                break
            except (IntegrityError, FormatError) as error:
                if not again:
                    log.warning("a damaged gc mark is removed: %s", error)
                    store.delete([key])
    return marks


def in_quarantine(store: ObjectStore) -> set[str]:
    """Return the keys of the packs in quarantine: their intact blobs may still be needed to heal a snapshot."""
    return quarantined_names(listed(store, "gc/"))


def in_need_of_quarantined(context: Context, snapshots: Sequence[Snapshot]) -> set[str]:
    """Return the ids of the snapshots that need a pack in quarantine, or whose manifest a repair has not found.

    A healed snapshot needs none. Snapshots that the local index knows to be damaged count too. Without notes, no
    manifest is read.
    """
    notes = listed(context.store, "gc/")
    damaged, found = quarantined_names(notes), lost_names(notes) & {s.id for s in snapshots}
    settle_marks(context, snapshots, damaged)
    found |= {s.id for s in snapshots if context.index.marks.why(s)}
    if damaged:
        found |= {
            s.id for s, keys in all_needed_keys(context.index, snapshots) if not isinstance(keys, set) or keys & damaged
        }
    return found


def settle_marks(context: Context, snapshots: Iterable[Snapshot], quarantined: Container[str] | None = None) -> None:
    """Remove the marks of snapshots in the local index that have ended: a repair, or a person, has put them right.

    Args:
        quarantined: keys of the packs in quarantine; None: list them.
    """

    def reads(snapshot: Snapshot) -> bool:
        try:
            return all(m for _, m in all_manifests(snapshot, lambda ref: manifest.read(context.store, ref, seed)))
        except SnapstoreError:
            return False

    seed = context.engines.digest_seed
    if context.index.marks:
        found = in_quarantine(context.store) if quarantined is None else quarantined
        context.index.marks.settle(snapshots, found, reads)


def put_note(store: ObjectStore, note: Quarantine | Lost) -> None:
    """Put a note; raise StorageError unless it is listed then: else saves would build on the pack."""
    with suppress(AlreadyExistsError):  # somebody else has noted the same
        store.put(note.key, records.encode(note))
    if note.key not in listed(store, "gc/"):  # or policies would count the snapshot
        raise StorageError(f"{note.key} in {store.url}: was put and is not listed; repair again")


def put_quarantine(store: ObjectStore, note: Quarantine) -> None:
    """Put a pack in quarantine, beside other notes only if this one names misbuilt blobs; raises as `put_note`."""
    if pack_key(note.pack) in in_quarantine(store):
        if not note.blobs:
            return
        note = msgspec.structs.replace(note, id=records.new_id())
    put_note(store, note)


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
        view = context.index.refresh()
        swept = [name for name in sorted(lost) if (found := view.get(name)) is not None and found.state == SWEPT]
        context.store.delete([Lost(id=name, found=0, reason="").key for name in swept])
