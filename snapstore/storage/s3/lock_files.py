"""Liveness locks: which objects of a store without locks are locked by a live process of this machine.

In: keys of objects, and the place of their store. Out: a locked file in this machine's cache folder for each key. The
lock ends with `end` or with its process, however that dies, so a gc on this machine recognizes dead sessions without a
clock. If the cache cannot be used (it is read-only, on a network, or others can write to it), nothing is known, and
heartbeats alone decide. A lock file without its object is harmless.

A lock file states its own device and inode. No process locks the files in a copy of the cache folder, so every live
session would look dead to a gc that uses the copy. But the copied files state the device and inode of the originals, so
they prove nothing.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress

from ..cache_dir import usable_cache
from ..folders import closing, identity, open_root
from ..locks import drop_temp, is_locked, keep_locked, open_temp, unlock


class LivenessLocks:
    """The liveness locks of one store.

    Args:
        place: Identifies the store (`ObjectStore.place`).
    """

    def __init__(self, place: str) -> None:
        cache, _ = usable_cache()
        self._place = place
        self._folder = cache and cache / "held"

    def begin(self, key: str) -> bool:
        """Take the lock of a key; return False if it is taken already, or the cache cannot be used."""
        if self._folder is None:
            return False
        name = self._name(key)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with closing(open_root(self._folder)) as folder:
                with suppress(FileNotFoundError):
                    if is_locked(folder, name):
                        return False
                fd, temp = open_temp(folder)
                try:
                    os.write(fd, _identity(os.fstat(fd)))
                    os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    drop_temp(fd, folder, temp)
                    raise
                keep_locked(fd, f"{self._folder}/{name}")
        except OSError:
            return False
        return True

    def end(self, key: str) -> None:
        """Drop the lock of a key and remove its file, also if another process locked it."""
        if self._folder is not None:
            file = self._folder / self._name(key)
            with suppress(OSError):
                file.unlink(missing_ok=True)
            unlock(str(file))

    def unlock(self, key: str) -> None:
        """Drop the lock of a key and keep its file, which says that its process has ended."""
        if self._folder is not None:
            unlock(str(self._folder / self._name(key)))

    def is_alive(self, key: str) -> bool | None:
        """Return whether a live process of this machine has the lock of a key; None if there is no such lock file."""
        if self._folder is None:
            return None
        file = self._folder / self._name(key)
        try:
            with closing(open_root(self._folder)) as folder:
                held = is_locked(folder, file.name)
            return held if file.read_bytes() == _identity(file.stat()) else None
        except OSError:
            return None

    def _name(self, key: str) -> str:
        return hashlib.sha256(f"{self._place} {key}".encode()).hexdigest()


def _identity(status: os.stat_result) -> bytes:
    """Return the content of a lock file: no copy of it has the same device and inode while it exists."""
    return b"%d %d" % identity(status)
