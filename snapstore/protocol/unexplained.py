"""Orphans: packs and manifests that nothing committed needs, and whether a record explains that they lie there.

A gc that sees no record of a snapshot must not take it for one that never was: a listing may lack it. So each object
says for which record it was made (`MadeFor`), and it may be deleted only if a revision as high is listed, whatever its
state: the ruling one then says what the snapshot needs. Every way to end without a record leaves one that says so: a
save that fails creates its own as `aborted`, a rewrite that fails a copy of the revision before, and a gc does both for
the dead. A session explains what is being written.

Cost: one ranged read (64 bytes of a pack, of a manifest its header) for each candidate that neither a ruling record
names nor a manifest that is explained: what dead or running saves have put, or a rewrite has replaced. Each once in a
process. A few that nothing explains are read whole: one whose bytes are not those of its name was damaged, and no
snapshot that is whole needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from ..catalog.history import View
from ..catalog.index import Index
from ..catalog.needed_keys import all_needed_keys
from ..catalog.read_twice import read_twice, tried
from ..context import Context
from ..errors import DAMAGE, IntegrityError, NotFoundError, SnapstoreError
from ..format import manifest, pack
from ..format.keys import pack_key
from ..format.records import FORGOTTEN, MadeFor
from ..storage.base import ObjectStore
from ..text import counted, some
from ..threads import Threads

#: On S3 each is a round trip.
READ_THREADS = 16
#: If no more are left without an explanation, they are read whole: damage of a header must not stop gc for good.
MOST_READ = 16
#: What to do about objects that nothing explains.
GIVE_UP = "snapstore gc --unexplained"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a pack's or manifest's header says of who wrote it.

    Attributes:
        save_id: of the session.
        packs: that a manifest names, by key.
    """

    save_id: str
    made_for: MadeFor
    packs: frozenset[str] = frozenset()


#: Of an object that does not say: nothing explains it.
NOBODY = Origin("", MadeFor(bytes(16), 0))
#: What was read of candidates that are still there, by key.
_KNOWN: WeakKeyDictionary[Index, dict[str, Origin]] = WeakKeyDictionary()


def damaged(store: ObjectStore, sizes: Mapping[str, int]) -> set[str]:
    """Those of a few objects whose headers are no word of their writers; of many, which take long to read: none."""
    return {key for key, size in sizes.items() if _is_damaged(store, key, size)} if len(sizes) <= MOST_READ else set()


def refuse(sizes: Mapping[str, int]) -> None:
    """Raise IntegrityError for objects that nothing explains; none: nothing."""
    if sizes:
        raise IntegrityError(
            f"gc: {counted(len(sizes), 'object')} that no record explains, of {sum(sizes.values())} bytes: "
            f"{some(sorted(sizes), 1)}; nothing was deleted; the store may have listed too few records: run gc again; "
            f"if their records are gone for good, and so are their snapshots, '{GIVE_UP}' deletes them"
        )


def unexplained(context: Context, view: View, sizes: Mapping[str, int], sessions: Collection[str]) -> set[str]:
    """Those of some objects that nothing committed needs for which neither a record nor a session stands.

    Args:
        view: records, listed after the objects were.
        sizes: of the objects, by key [bytes].
        sessions: ids of those that were there after the objects were listed, and before the records.

    Raises:
        StorageError: the store cannot be read.
    """
    known = _KNOWN.get(context.index, {})
    _KNOWN[context.index] = {key: known[key] for key in known.keys() & sizes.keys()}
    left = set(sizes)
    left -= {ref.key for snapshot in view.snapshots(states=None) for ref in snapshot.manifests}
    for _, keys in all_needed_keys(context.index, view.snapshots(states=(FORGOTTEN,))):
        if not isinstance(keys, SnapstoreError):
            left -= keys
    for kind in ("manifests/", "packs/"):  # the first explain most of the second
        chosen = sorted(key for key in left if key.startswith(kind))
        for key, origin in _origins(context, {key: sizes[key] for key in chosen}).items():
            if origin is None or _explains(view, sessions, origin):
                left -= {key, *(origin.packs if origin else ())}
    return left


def _explains(view: View, sessions: Collection[str], origin: Origin) -> bool:
    snapshot_id, revision = origin.made_for.snapshot.hex(), origin.made_for.revision
    record = view.get(snapshot_id)
    if record is not None and record.revision >= revision:
        return True
    return origin.save_id in sessions or view.get(origin.save_id) is not None


def _origins(context: Context, sizes: Mapping[str, int]) -> dict[str, Origin | None]:
    """What each object says of itself; None: it is gone."""
    known = _KNOWN.setdefault(context.index, {})
    unread = [key for key in sizes if key not in known]
    found: dict[str, Origin | None] = {}
    if unread:
        with Threads(min(READ_THREADS, len(unread))) as threads:
            origins = threads.start(lambda key: _origin(context.store, key, sizes[key]), unread)()
        found = dict(zip(unread, origins, strict=True))
        known.update({key: origin for key, origin in found.items() if origin is not None})
    return {key: known.get(key) or found[key] for key in sizes}


def _origin(store: ObjectStore, key: str, size_bytes: int) -> Origin | None:
    """What one object says of itself; None: it is gone.

    Raises:
        StorageError: the store cannot be read.
    """
    try:
        if key.startswith("packs/"):
            head = read_twice(store, partial(pack.read_header, store, key))
            return Origin(head.save_id.hex(), head.made_for)
        data = read_twice(store, partial(manifest.read_header, store, key, size_bytes))
        header = manifest.decode_header(data, key)
        return Origin(header.save_id.hex(), header.made_for, frozenset(map(pack_key, header.pack_names)))
    except NotFoundError:
        return None
    except DAMAGE:  # or of a later release
        return NOBODY


def _is_damaged(store: ObjectStore, key: str, size_bytes: int) -> bool:
    """Whether the bytes of an object are not those of its name."""
    data = tried(store, partial(store.get, key, limit_bytes=size_bytes))
    return data is None or hashlib.sha256(data).hexdigest() != key[-64:]
