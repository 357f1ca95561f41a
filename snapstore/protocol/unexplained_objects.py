"""Unexplained: find packs and manifests that no committed snapshot needs and that no record accounts for.

A gc that sees no record of a snapshot must not conclude that there never was one: a listing may lack it. So each object
names the record for which it was made (`MadeFor`). It may be deleted only if that revision of the record, or a higher
one, is listed, in any state: then the ruling (highest) revision says what the snapshot needs. Every claim that ends
without its record leaves another one: a save that fails creates its own as `aborted`, a rewrite that fails creates a
copy of the previous revision, and a gc does both for dead processes. A session explains what its process is writing.

Cost: one ranged read (the first 64 bytes of a pack, the header of a manifest) for each candidate that neither a ruling
record nor an explained manifest names: objects of dead or running saves, and objects that a rewrite has replaced. A
process reads each once. A few unexplained objects are read whole: one whose bytes do not match its name is damaged, so
no whole snapshot needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from ..catalog.config import read_unproven
from ..catalog.history import View
from ..catalog.index import Index
from ..catalog.needed_keys import all_needed_keys
from ..catalog.read_twice import read_twice, tried
from ..context import Context
from ..errors import DAMAGE, IntegrityError, NotFoundError, SnapstoreError
from ..format.blobs import pack
from ..format.keys import pack_key
from ..format.manifests.manifest import ManifestHeader
from ..format.records import FORGOTTEN, MadeFor
from ..storage.base import ObjectStore
from ..text import counted, some
from ..threads import Threads

#: On S3 each header is a round trip.
HEADER_THREADS = 16
#: At most this many unexplained objects are read whole, so that a damaged header does not stop gc for good.
MAX_READ_WHOLE = 16
#: The advice for objects that nothing explains.
DELETE_UNEXPLAINED = "snapstore gc --unexplained"


@dataclass(frozen=True, slots=True)
class Origin:
    """The writer of a pack or a manifest, as its header states it.

    Attributes:
        save_id: id of the session.
        made_for: the record for which it was made.
        named: keys of the packs and the children that a manifest names.
    """

    save_id: str
    made_for: MadeFor
    named: frozenset[str] = frozenset()


#: The origin of an object that names none: nothing explains it.
UNKNOWN_ORIGIN = Origin("", MadeFor(bytes(16), 0))
#: Origins of candidates that are still there, by key, as this process has read them.
_read_origins: WeakKeyDictionary[Index, dict[str, Origin]] = WeakKeyDictionary()


def find_damaged(store: ObjectStore, sizes: Mapping[str, int]) -> set[str]:
    """Read whole objects, and return the keys of the damaged ones; none if there are more than MAX_READ_WHOLE.

    Args:
        sizes: of the objects, by key [bytes].
    """
    few = sizes if len(sizes) <= MAX_READ_WHOLE else {}
    return {key for key, size in few.items() if _is_damaged(store, key, size)}


def require_explained(unexplained: Mapping[str, int]) -> None:
    """Raise IntegrityError if there are unexplained objects (their sizes by key [bytes])."""
    if unexplained:
        raise IntegrityError(
            f"gc: {counted(len(unexplained), 'object')} that no record explains, of {sum(unexplained.values())} bytes: "
            f"{some(sorted(unexplained), 1)}; nothing was deleted; the store may have listed too few records: run gc "
            f"again; if their records and snapshots are gone for good, '{DELETE_UNEXPLAINED}' deletes them"
        )


def find_unexplained(context: Context, view: View, sizes: Mapping[str, int], sessions: Collection[str]) -> set[str]:
    """Return the keys of the objects that neither a record nor a session explains.

    Args:
        view: the records, listed after the objects.
        sizes: of the objects, which no committed snapshot needs, by key [bytes].
        sessions: ids of the sessions that existed after the objects were listed, and before the records were.

    Raises:
        StorageError: the store cannot be read.
    """
    known = _read_origins.get(context.index, {})
    _read_origins[context.index] = {key: known[key] for key in known.keys() & sizes.keys()}
    left = set(sizes)
    for _, keys in all_needed_keys(context.index, view.snapshots(states=(FORGOTTEN,))):
        if not isinstance(keys, SnapstoreError):
            left -= keys
    if left:
        left -= {key for snapshot in view.with_records() for key in snapshot.named_keys}
    for kind in ("manifests/", "packs/"):  # an explained manifest explains what it names
        chosen = sorted(key for key in left if key.startswith(kind))
        for key, origin in _origins(context, {key: sizes[key] for key in chosen}).items():
            if origin is None or _explains(view, sessions, origin):
                left -= {key, *(origin.named if origin else ())}
    return left


def _explains(view: View, sessions: Collection[str], origin: Origin) -> bool:
    """Return whether a record or a session explains an object of this origin."""
    snapshot_id, revision = origin.made_for.snapshot.hex(), origin.made_for.revision
    record = view.get(snapshot_id)
    if record is not None and record.revision >= revision:
        return True
    return origin.save_id in sessions or view.get(origin.save_id) is not None


def _origins(context: Context, sizes: Mapping[str, int]) -> dict[str, Origin | None]:
    """Return each object's origin; None for one that is gone."""
    known = _read_origins.setdefault(context.index, {})
    unread = [key for key in sizes if key not in known]
    with Threads(HEADER_THREADS) as threads:
        origins = threads.start(lambda key: _read_origin(context.store, key, sizes[key]), unread)()
    found = dict(zip(unread, origins, strict=True))
    known.update({key: origin for key, origin in found.items() if origin is not None})
    return {key: known.get(key) or found[key] for key in sizes}


def _read_origin(store: ObjectStore, key: str, size_bytes: int) -> Origin | None:
    """Return the origin of one object from its header; None if it is gone.

    Raises:
        StorageError: the store cannot be read.
    """
    try:
        if key.startswith("packs/"):
            head = read_twice(store, partial(pack.read_header, store, key))
            return Origin(head.save_id.hex(), head.made_for)
        found = read_twice(store, partial(read_unproven, store, key, size_bytes))
        named = frozenset[str]()
        if isinstance(found, ManifestHeader):
            named = frozenset(map(pack_key, found.pack_names)) | {child.key for child in found.children}
        return Origin(found.save_id.hex(), found.made_for, named)
    except NotFoundError:
        return None
    except DAMAGE:  # or of a later release
        return UNKNOWN_ORIGIN


def _is_damaged(store: ObjectStore, key: str, size_bytes: int) -> bool:
    """Return whether the bytes of an object do not match its name.

    Raises:
        StorageError: the store does not answer at all, or withholds the object (`is_withheld`).
    """
    data = tried(store, partial(store.get, key, limit_bytes=size_bytes))
    return data is None or hashlib.sha256(data).hexdigest() != key[-64:]
