"""Signs of life of held objects whose store has no locks: a locked file in this machine's cache folder for each.

In: keys of objects, with what tells their store from others. A sign ends with `end` or with its process, however that
dies, so a gc on this machine knows the dead without a clock. Where there can be no sign (a cache that is read-only, on
a network, or not the user's alone), nothing is known, and heartbeats alone decide. A file without its object does no
harm.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress

from ..cache_dir import cache_folder, refusal
from ..folders import closing, open_root
from ..locks import drop_temp, is_locked, keep_locked, open_temp, unlock


class Signs:
    """The signs of one store; `place` tells it from others."""

    def __init__(self, place: str) -> None:
        cache = cache_folder()
        self._place = place
        self._folder = None if refusal(cache) else cache / "held"

    def begin(self, key: str) -> bool:
        """Give a sign; False if there is one already, or none can be given."""
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
                    os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    drop_temp(fd, folder, temp)
                    raise
                keep_locked(fd, f"{self._folder}/{name}")
        except OSError:
            return False
        return True

    def end(self, key: str) -> None:
        """Take the sign away, whoever gave it."""
        if self._folder is not None:
            file = self._folder / self._name(key)
            with suppress(OSError):
                file.unlink(missing_ok=True)
            unlock(str(file))

    def alive(self, key: str) -> bool | None:
        """Whether a live process of this machine gives a sign; None if none ever has."""
        if self._folder is None:
            return None
        try:
            with closing(open_root(self._folder)) as folder:
                return is_locked(folder, self._name(key))
        except OSError:
            return None

    def _name(self, key: str) -> str:
        return hashlib.sha256(f"{self._place} {key}".encode()).hexdigest()
