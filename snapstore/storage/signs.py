"""Signs of life of held objects whose store has no locks: a locked file in this machine's cache folder for each.

In: keys of objects, with what tells their store from others. A sign ends with `end` or with its process, however that
dies, so a gc on this machine knows the dead without a clock. Where there can be no sign (a read-only or network cache),
nothing is known, and heartbeats alone decide. A file without its object does no harm.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from ..cache import cache_folder, on_network
from .locks import drop_temp, is_locked, keep, let_go, open_temp


class Signs:
    """The signs of one store; `place` tells it from others."""

    def __init__(self, place: str) -> None:
        cache = cache_folder()
        self._place = place
        self._folder = None if on_network(cache) else cache / "held"  # flock means nothing there

    def begin(self, key: str) -> bool:
        """Give a sign; False if there is one already, or none can be given."""
        file = self._file(key)
        if file is None:
            return False
        try:
            if is_locked(file):
                return False
            file.parent.mkdir(parents=True, exist_ok=True)
            fd, temp = open_temp(file.parent)
            try:
                temp.rename(file)
            except OSError:
                drop_temp(fd, temp)
                raise
            keep(fd, file)
        except OSError:
            return False
        return True

    def end(self, key: str) -> None:
        """Take the sign away, whoever gave it."""
        file = self._file(key)
        if file is not None:
            with suppress(OSError):
                file.unlink(missing_ok=True)
            let_go(file)

    def alive(self, key: str) -> bool | None:
        """Whether a live process of this machine gives a sign; None if none ever has."""
        file = self._file(key)
        try:
            return is_locked(file) if file is not None and file.exists() else None
        except OSError:
            return None

    def _file(self, key: str) -> Path | None:
        name = hashlib.sha256(f"{self._place} {key}".encode()).hexdigest()
        return self._folder / name if self._folder is not None else None
