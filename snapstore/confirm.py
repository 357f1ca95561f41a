"""Confirm: a verb that writes or deletes keeps to the repository that was opened, whatever is mounted there by now.

A volume that is unmounted beneath an open repository leaves an empty folder of the same name; what is saved into that
is gone when the volume comes back. So each such verb pins the place (`ObjectStore.pinned`), reads the config there
again and compares its uuid. As long as the pin stands, the store refuses any other place under that name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from . import records
from .errors import FormatError, IntegrityError, NotFoundError, StorageError
from .records import Config
from .storage import ObjectStore

log = logging.getLogger("snapstore")


@contextmanager
def confirmed(store: ObjectStore, uuid: str) -> Iterator[None]:
    """Keep to the place of this repository, by its config's uuid; none was ever known if that is empty.

    Raises:
        StorageError: the store holds no repository, or another one; or the config cannot be read.
    """
    with store.pinned():
        if uuid:
            _compare(store, uuid)
        yield


def _compare(store: ObjectStore, uuid: str) -> None:
    try:
        found = records.decode(store.get("config", limit_bytes=records.MAX_OBJECT_BYTES), Config, "config").uuid
    except NotFoundError as error:
        raise StorageError(
            f"{store.url}: the repository that was opened here is gone: its volume was unmounted or replaced; nothing "
            "was written; mount it again, then try again"
        ) from error
    except (IntegrityError, FormatError) as error:  # a bit that flips in it must not stop the training
        log.warning("%s: its config has been damaged since it was opened; run 'snapstore repair': %s", store.url, error)
        return
    if found != uuid:
        raise StorageError(
            f"{store.url}: another repository lies here than was opened, expected uuid {uuid}, got {found[:80]!r}: its "
            "volume was replaced, or its config was repaired; nothing was written; mount the volume, or open it again"
        )
