"""Confirm: a verb that writes or deletes keeps to the repository that was opened, whatever is mounted there by now.

A volume that is unmounted beneath an open repository leaves an empty folder of the same name; what is saved into that
is gone when the volume comes back. So each such verb pins the place (`ObjectStore.pinned`), reads the config there
again and compares its uuid. As long as the pin stands, the store refuses any other place under that name.

A config that was damaged, lost or repaired since must not stop a training run: a record that this process knows proves
the place as well, since its name is random and no record is ever deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ..context import Context
from ..errors import FormatError, IntegrityError, NotFoundError, StorageError
from ..format import records
from ..format.records import Config
from ..storage.base import ObjectStore

log = logging.getLogger("snapstore")


@contextmanager
def confirmed(context: Context) -> Iterator[Config | None]:
    """Keep to the place of the repository that an index is of; gives its config as it is now, if that can be read.

    Raises:
        StorageError: the store holds no repository, or another one; or it cannot be read.
    """
    with context.store.pinned():
        config, wrong = _look(context.store, context.index.uuid)
        if wrong:
            if not _has_known_record(context):
                raise StorageError(
                    f"{context.store.url}: this is not the repository that was opened: {wrong}; its volume was "
                    "unmounted or replaced; nothing was written; mount it again, then try again"
                )
            log.warning("%s: %s, since it was opened; open it again", context.store.url, wrong)
        yield config


def _look(store: ObjectStore, uuid: str) -> tuple[Config | None, str]:
    """The config, and what is wrong with it; empty if it is that of a repository."""
    try:
        found = records.decode(store.get("config", limit_bytes=records.MAX_OBJECT_BYTES), Config, "config")
    except NotFoundError:
        return None, "it has no config"
    except (IntegrityError, FormatError):
        return None, "its config is damaged"
    wrong = f"its config has another uuid, expected {uuid}, got {found.uuid[:80]!r}"
    return found, "" if found.uuid == uuid else wrong


def _has_known_record(context: Context) -> bool:
    for key in context.index.some_keys():
        try:
            context.store.stat(key)
        except NotFoundError:
            continue
        return True
    return False
