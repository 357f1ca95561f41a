"""Marks: read the objects in which gcs announce what they will delete.

In: keys below `gc/`. Out: the marks, or the keys of the packs and manifests that they name. A mark that is listed and
cannot be read may name any object.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..catalog.read_twice import listed
from ..errors import FormatError, IntegrityError, NotFoundError
from ..format import records
from ..format.keys import notes_of_gc
from ..format.records import Mark
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
