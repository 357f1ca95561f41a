"""Files that stay open while a restore reads ranges of them: opening one takes ten system calls.

In: keys, and how to open one. Out: descriptors, which any thread may read from. All are closed at the end.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import StorageError
from .os_errors import is_stale, is_too_many_files

#: The most files that stay open while no thread reads them: MOST_UNUSED, and at most 1 / ONE_IN of the files that the
#: process may open.
MOST_UNUSED, ONE_IN = 128, 8


@dataclass(slots=True)
class _File:
    fd: int
    size_bytes: int
    users: int = 0


class KeptOpen:
    """Files by their keys.

    Args:
        open_file: returns a descriptor and the size in bytes.
        read_range: fills a memory from an open file; takes ((descriptor, size), key, offset, length, memory).
    """

    def __init__(self, open_file: Callable[[str], tuple[int, int]], read_range: Callable[..., object]) -> None:
        self._open_file, self._read_range = open_file, read_range
        self._files: OrderedDict[str, _File] = OrderedDict()  # in order of use, the latest last
        self._lock = threading.Lock()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_unused = MOST_UNUSED if most == resource.RLIM_INFINITY else min(MOST_UNUSED, most // ONE_IN)

    def get_ranges(self, key: str, offsets: Sequence[int], into: Sequence[memoryview]) -> None:
        """Fill each memory with the bytes of `key` from its offset on.

        Without offsets, only open the file, and only if it may stay open.

        Raises:
            NotFoundError, IntegrityError, InvalidInputError: As `ObjectStore.get_range` raises them.
            StorageError: The file cannot be opened or read.
        """
        if not offsets and len(self._files) >= self._most_unused:
            return
        try:
            self._read(key, offsets, into)
        except StorageError as error:
            if not is_stale(error.__cause__):
                raise
            self._read(key, offsets, into)  # another host has deleted the file: open the key again

    def _read(self, key: str, offsets: Sequence[int], into: Sequence[memoryview]) -> None:
        file = self._open(key)
        try:
            for offset, memory in zip(offsets, into, strict=True):
                self._read_range((file.fd, file.size_bytes), key, offset, len(memory), memory)
        except StorageError as error:
            with self._lock:
                if is_stale(error.__cause__) and self._files.get(key) is file:
                    del self._files[key]
            raise
        finally:
            with self._lock:
                file.users -= 1
                if not file.users and self._files.get(key) is not file:
                    os.close(file.fd)
            self._close_unused(self._most_unused)

    def _open(self, key: str) -> _File:
        """Return the file of a key with one more user; open it if it is not open."""
        file = self._take(key)
        if file is None:
            try:
                new = _File(*self._open_file(key))
            except StorageError as error:
                if not is_too_many_files(error.__cause__):
                    raise
                self._close_unused(0)
                new = _File(*self._open_file(key))
            file = self._take(key, new) or new
        return file

    def _take(self, key: str, new: _File | None = None) -> _File | None:
        """Return the open file of a key with one more user, or None.

        If the key has no open file, `new` becomes its file; otherwise `new` is closed.
        """
        with self._lock:
            file = self._files.get(key, new)
            if file is None:
                return None
            file.users += 1
            self._files[key] = file
            self._files.move_to_end(key)
        if new is not None and file is not new:
            os.close(new.fd)
        return file

    def _close_unused(self, most: int) -> None:
        """Close the least recently used files, until at most `most` open files have no user."""
        if len(self._files) <= most:
            return
        with self._lock:
            unused = [key for key, file in self._files.items() if not file.users]
            for key in unused[: max(0, len(unused) - most)]:
                os.close(self._files.pop(key).fd)

    def close(self) -> None:
        """Close all files; a file that a thread still reads is closed when that read ends."""
        self._most_unused = 0
        self._close_unused(0)
