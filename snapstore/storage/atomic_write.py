"""Atomic writes: a file gets its name only when it is complete and durable.

In: an open root, a key and bytes. Out: a file under that key, or an error. Any thread may call anything.

Invariants, and what is lost without them:

- A file gets its name by `link(2)` from a finished, fsynced temporary file. link(2) is create-only, so exactly one of
  several racing writers wins. A rename would replace a listed file, and a listing that runs during a rename can miss
  live entries.
- Order of a write: make the folders durable, fsync the bytes, link, fsync the folder, return. A folder counts as
  durable only once *this* writer has fsynced its parent: another process may have made the folder and not fsynced it
  yet. A power loss would then remove that folder, and our file with it.
- `AlreadyExistsError` is raised only after the folder was fsynced, so the existing file is durable too.
- A failed fsync ends the write. Linux reports a write-back error once: a second fsync would wrongly succeed. The bytes
  are written again into another file. But a name cannot be made again, so if its folder could not be fsynced, the name
  stays in doubt: as long as this writer lives, a put of the key and a `sync` of it fail. Other processes do not know.
- A temporary file is locked (flock) while it is written. So `clean` recognizes the files of dead writers without a
  clock. A crash between create and link leaves an unlocked file under `tmp/`. A crash between link and unlink leaves a
  second name there for a complete object.
- A large object is written with O_DIRECT, except for its last bytes, if the file system takes it. The fsync stays: it
  flushes the disk's own cache, and makes the size durable.
- A file that `lock` creates is locked before its link makes it visible. So a live session never looks dead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from ..arrays import PAGE_BYTES
from ..errors import CapabilityError, StorageError, lasting
from .base import already_exists
from .folders import (
    Identity,
    closing,
    identity,
    is_empty,
    make_folder,
    open_folder,
    open_readable,
    open_root,
    share_with_group,
    stat_entry,
)
from .locks import drop_temp, keep_locked, open_temp
from .os_errors import error_name, is_full

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}
#: Objects of at least this size that begin at a page of memory are written with O_DIRECT [bytes]. That takes a fifth of
#: the CPU time, and leaves the page cache to the program's data (docs/design/cpu-engine.md).
DIRECT_MIN_BYTES = 1024 * 1024
_NO_DIRECT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EFAULT}
#: A gc may remove a folder while it is empty, again and again: a put makes it so often.
_ATTEMPTS = 5
_REMOVED = {errno.ENOENT, errno.ESTALE}
_NO_DIRECTORY_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class AtomicWriter:
    """Creates the files of one store.

    Args:
        url: The store's name in errors.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._durable: dict[str, Identity] = {}  # folders whose own entry this writer has fsynced
        self._in_doubt: set[str] = set()  # keys, and folders with a slash at the end, whose folder's fsync has failed

    def create(self, root: int, key: str, view: memoryview, lock_name: str | None) -> None:
        """Write a new file below `root`, durable on return.

        Args:
            lock_name: The file stays locked under this name (`locks.keep_locked`); None: it is not locked.

        Raises:
            AlreadyExistsError: The key has a file.
            StorageError: The key has something that is not a file.
            CapabilityError: The file system has no hard links, or cannot fsync a directory.
            OSError: Any other failure.
        """
        *above, name = key.split("/")
        with ExitStack() as opened:
            folder = opened.enter_context(closing(self.open_durable(root, above)))
            temps = opened.enter_context(open_temps(root))
            fd, temp = open_temp(temps)
            try:
                share_with_group(root, fd)
                _write_all(fd, view)
                os.fsync(fd)
                for again in range(_ATTEMPTS - 1, -1, -1):
                    try:
                        self._link(key, fd, (temps, temp), (folder, name))
                        break
                    except OSError as error:
                        if error.errno not in _REMOVED or not again:
                            raise
                        folder = opened.enter_context(closing(self.open_durable(root, above)))
                self._in_doubt.discard(key)  # the name is new
                self.fsync_name(folder, key)
                if lock_name is not None:
                    keep_locked(fd, lock_name)
            finally:
                drop_temp(fd, temps, temp)

    def open_durable(self, root: int, names: Sequence[str], *, make: bool = True) -> int:
        """Open a folder below `root` after making every level of its path durable.

        Args:
            make: Whether to make missing levels.

        Raises:
            FileNotFoundError: A level is missing and `make` is False.
            NotADirectoryError, SymbolicLinkError: A level is a file or a symbolic link.
            CapabilityError: The file system cannot fsync a directory.
        """
        folder = os.dup(root)
        for depth, name in enumerate(names):
            with closing(folder):
                shown = "/".join(names[: depth + 1])
                for again in range(_ATTEMPTS - 1, -1, -1):
                    try:
                        inner = open_folder(folder, name, shown)
                        break
                    except FileNotFoundError:
                        if not make or not again:
                            raise
                        self._durable.pop(shown, None)  # a new folder may get the inode number of a deleted one
                        self._in_doubt.discard(f"{shown}/")
                        make_folder(folder, name, root)
                is_leaf = 0 < depth == len(names) - 1
                try:
                    found = identity(os.fstat(inner))
                    # A gc may have removed an empty folder, and another process made it again with the same inode
                    # number. Who links the first name into it has made it durable before.
                    if self._durable.get(shown) != found or (make and is_leaf and is_empty(inner)):
                        self.fsync_name(folder, f"{shown}/")
                        self._durable[shown] = found
                except BaseException:
                    os.close(inner)
                    raise
            folder = inner
        return folder

    def fsync_name(self, folder: int, name: str) -> None:
        """Make a name in a folder durable.

        Args:
            name: The key of a file; or the path of a folder with a slash at its end, "" for the root: all that is below
                it must not be in doubt.

        Raises:
            StorageError: An earlier fsync has failed.
            CapabilityError: The file system cannot fsync a directory.
            OSError: The fsync failed. The name is in doubt from now on, unless the disk is full.
        """
        is_folder = name == "" or name.endswith("/")
        for other in self._in_doubt.copy():
            if other == name or (is_folder and other.startswith(name)):
                raise StorageError(
                    f"{other or '/'} in {self._url}: an fsync of its folder has failed, and a second fsync would prove "
                    "nothing: it is not known whether it survives a power loss; check the disk ('dmesg'), then open "
                    "the repository again"
                )
        try:
            fsync_directory(folder, name.rstrip("/"))
        except OSError as error:
            if not is_full(error):  # the change waits in memory for free space
                self._in_doubt.add(name)
            raise

    def end_doubt(self, key: str) -> None:
        """Note that a file was deleted."""
        self._in_doubt.discard(key)

    def _link(self, key: str, fd: int, temp: tuple[int, str], target: tuple[int, str]) -> None:
        """Link the finished temporary file to its name; `temp` and `target` are (folder, name)."""
        folder, name = target
        try:
            os.link(temp[1], name, src_dir_fd=temp[0], dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError as error:
            with suppress(FileNotFoundError):
                status = stat_entry(folder, name, key)
                if os.path.samestat(os.fstat(fd), status):
                    return  # a network file system linked it, lost its reply and asked again
                if not stat.S_ISREG(status.st_mode):
                    raise lasting(
                        StorageError(
                            f"{key} in {self._url}: expected a free name, found something that is not a file, which "
                            "snapstore never makes; remove it, then try again"
                        )
                    ) from error
            self.fsync_name(folder, key)
            raise already_exists(key, self._url) from error
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise CapabilityError(
                    f"{key} in {self._url}: cannot make a hard link ({error_name(error)}), which create-only objects "
                    "need; put the repository on one file system that has hard links (ext4, xfs, btrfs, zfs, NFS)"
                ) from error
            raise


@contextmanager
def open_temps(root: int) -> Iterator[int]:
    """Open the folder of temporary files; make it if it is missing."""
    try:
        folder = open_folder(root, "tmp", "tmp")
    except FileNotFoundError:
        make_folder(root, "tmp", root)
        folder = open_folder(root, "tmp", "tmp")
    with closing(folder):
        yield folder


def make_root(root: Path) -> None:
    """Make a folder and its missing parents, all durable.

    Raises:
        NotADirectoryError: A file has the name.
    """
    missing = [level for level in (root, *root.parents) if not level.exists()]
    for level in reversed(missing):
        with closing(open_root(level.parent)) as above:
            make_folder(above, level.name, above)
            fsync_directory(above, str(level.parent))
    if not missing:  # it may be so new that a power loss would take it; its parent may be closed to this user
        with suppress(OSError, CapabilityError), closing(open_root(root.parent)) as above:
            fsync_directory(above, str(root.parent))
    if not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def fsync_directory(folder: int, shown: str) -> None:
    """Make the names in a folder durable.

    Args:
        shown: The folder's name in errors.

    Raises:
        CapabilityError: The file system cannot fsync a directory.
    """
    with closing(open_readable(folder)) as readable:
        try:
            os.fsync(readable)
        except OSError as error:
            if error.errno in _NO_DIRECTORY_FSYNC:
                raise CapabilityError(
                    f"{shown}: cannot fsync a directory ({error_name(error)}), so nothing in it survives a power "
                    "loss; put the repository on a file system that can (ext4, xfs, btrfs, zfs, NFS)"
                ) from error
            raise


def _write_all(fd: int, view: memoryview) -> None:
    done = _write_direct(fd, view[: len(view) // PAGE_BYTES * PAGE_BYTES]) if _is_direct(view) else 0
    while done < len(view):
        written = os.write(fd, view[done:])
        if not written:  # some FUSE file systems do this
            raise OSError(errno.EIO, "the file system wrote no byte and reported no error")
        done += written


def _is_direct(view: memoryview) -> bool:
    """Return whether to write past the page cache: a large object in aligned memory."""
    if not hasattr(os, "O_DIRECT") or len(view) < DIRECT_MIN_BYTES:
        return False
    return int(np.frombuffer(view, np.uint8).ctypes.data) % PAGE_BYTES == 0


def _write_direct(fd: int, view: memoryview) -> int:
    """Write from the start of a new file with O_DIRECT; return how many bytes were written.

    They are fewer, or none, if the file system does not take it: some refuse the flag (an older tmpfs), others the
    first write.
    """
    flags, done = fcntl.fcntl(fd, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return 0
    try:
        while done < len(view) and done % PAGE_BYTES == 0:
            written = os.write(fd, view[done:])
            if not written:
                break
            done += written
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return done
