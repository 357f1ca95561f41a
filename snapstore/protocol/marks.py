"""marks."""

from __future__ import annotations

from ..catalog.read_twice import listed
from ..errors import (
    IntegrityError,
    NotFoundError,
)
from ..format import records
from ..format.records import Mark
from ..storage.base import ObjectStore


def is_mark(key: str) -> bool:
    """Whether a key below `gc/` is that of a mark."""
    return key.endswith(".mark")


def read_mark(store: ObjectStore, key: str) -> Mark | None:
    """A gc mark that was listed; None for one that has vanished meanwhile: it was finished or given up.

    Raises:
        IntegrityError, FormatError: it is damaged; or the store lists it and does not give it.
    """
    try:
        return records.decode(store.get(key, limit_bytes=MARK_LIMIT_BYTES), Mark, key)
    except NotFoundError as error:
        if key in listed(store, "gc/"):
            raise IntegrityError(f"{key}: is listed, and cannot be read: {error}") from error
        return None


#: A mark names each candidate in 32 bytes: 32 million objects.
MARK_LIMIT_BYTES = 1024 * 1024 * 1024
