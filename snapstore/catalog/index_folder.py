"""Index folder: where the index of a repository lies.

In: a store and the repository's uuid. Out: a folder in the user's own cache, else a temporary one, else none. A machine
without any of them costs time, nothing else: every start reads all records.
"""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import suppress
from pathlib import Path

from ..storage.base import ObjectStore
from ..storage.cache_dir import cache_folder, remove_left_behind, usable_cache
from ..storage.local import LocalStore
from ..text import log

#: The names of temporary indexes begin so.
TEMPORARY = "snapstore-index-"


def folder_for(store: ObjectStore, uuid: str) -> tuple[Path | None, bool]:
    """Return (the folder of the index, whether it is temporary): in the user's own cache, if that can be used.

    The folder is None if no temporary folder can be made.

    Raises:
        InvalidInputError: SNAPSTORE_CACHE_DIR is not an absolute path.
    """
    lasts = isinstance(store, LocalStore) or ("://" in store.url and not store.url.startswith("memory://"))
    if not lasts:
        with suppress(FileNotFoundError):
            cache_folder()  # a wrong setting is an error for every store
        return temporary_folder(store)
    cache, why = usable_cache()
    if cache is None:
        return temporary_folder(store, why)
    # A copy of a repository has its uuid, and records of its own: one index must not serve both.
    return cache / f"{uuid}-{shortened(store.place).hex()}", False


def temporary_folder(store: ObjectStore, why: str = "") -> tuple[Path | None, bool]:
    """Make a folder and return (the folder, True); return (None, False) if there is no place for it.

    Args:
        why: why the cache cannot be used, for a warning; "": it is not wanted.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        remove_left_behind(folder.parent, TEMPORARY)
    except OSError as error:
        reasons = "; ".join(filter(None, (why, f"a temporary folder cannot be made: {error.strerror or error}")))
        log.warning("%s; %s has no index: every start reads all records", reasons, store.url)
        return None, False
    if why:
        log.warning("%s; %s has a temporary index until it is closed", why, store.url)
    return folder, True


def shortened(text: str) -> bytes:
    """Return 16 bytes that stand for a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:16]  # a path need not be UTF-8
