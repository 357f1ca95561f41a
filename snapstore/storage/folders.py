"""Folders: open files below a root by descriptors, and never follow a symbolic link.

The kernel follows links inside a path, so an untrusted repository could lead a write or a delete to any file of the
user. Here each folder is opened by its name in the folder above it, and a link is an error that names it. The root may
be a link: the user chose it.

In: descriptors of folders, and names in them. Out: descriptors. The caller closes them before it returns: a volume with
an open descriptor cannot be unmounted. `shown` is always the path below the root, for errors.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from .base import MAX_LEVELS, RESERVED, is_component

#: The errors of a folder that is not there, or no folder.
GONE = (FileNotFoundError, NotADirectoryError)
#: Flags to open a folder only to reach its entries. On Linux this needs no permission to list it, and opens nothing on
#: the server of a network file system.
_REACH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

Identity = tuple[int, int]  # device and inode


class SymbolicLinkError(OSError):
    """A symbolic link was found in place of a folder or a file; `filename` is its path below the root."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.ELOOP, os.strerror(errno.ELOOP), name)


def identity(status: os.stat_result) -> Identity:
    """Return device and inode: no two files or folders share them at the same time."""
    return status.st_dev, status.st_ino


def open_root(path: str | os.PathLike[str]) -> int:
    """Open a folder; links are followed."""
    return os.open(path, _REACH)


def open_readable(folder: int) -> int:
    """Open a folder again, to list or to fsync it."""
    return os.open(".", _READ, dir_fd=folder)


def open_folder(above: int, name: str, shown: str) -> int:
    """Open the folder `name` inside another.

    Raises:
        SymbolicLinkError: It is a link.
        FileNotFoundError, NotADirectoryError: There is no such folder.
    """
    try:
        return os.open(name, _REACH | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EMLINK):  # which one depends on the system
            stat_entry(above, name, shown)
        raise


def open_below(root: int, names: Sequence[str]) -> int:
    """Open a folder some levels below another; raises what `open_folder` raises."""
    folder = os.dup(root) if not names else root
    for depth, name in enumerate(names):
        try:
            inner = open_folder(folder, name, "/".join(names[: depth + 1]))
        finally:
            if folder != root:
                os.close(folder)
        folder = inner
    return folder


def make_folder(above: int, name: str, root: int) -> None:
    """Make a folder in another one, unless it exists; see `share_with_group`."""
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=above)
        with suppress(OSError), closing(os.open(name, _READ | os.O_NOFOLLOW, dir_fd=above)) as folder:
            share_with_group(root, folder)


def share_with_group(root: int, fd: int) -> None:
    """Give the group the same permissions on a new file or folder as on a setgid root, whatever the umask is.

    If a root is setgid and its group may write to it, a group shares it. Otherwise a member whose umask is 022 would
    make folders that the others cannot write to. The mode comes from the root, not from the folder above: another
    thread may be making that folder, and may not have set its mode yet.
    """
    shared, mode = os.fstat(root).st_mode, os.fstat(fd).st_mode
    if shared & stat.S_ISGID and shared & stat.S_IWGRP:
        wanted = shared & (0o070 if stat.S_ISDIR(mode) else 0o060)
        if mode & wanted != wanted:
            with suppress(OSError):  # a file system without modes
                os.fchmod(fd, stat.S_IMODE(mode) | wanted)


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Yield a descriptor, and close it at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def walk(root: int, pending: list[str]) -> Iterator[tuple[str, int]]:
    """Yield (prefix, descriptor) of folders below a root, except of any that is gone or too deep for objects.

    A folder that cannot be read raises, because its entries are unknown. Folders are taken from `pending`, so a deep
    folder cannot exhaust Python's stack.

    Args:
        pending: The prefixes; the caller adds those of the folders that it finds.

    Raises:
        SymbolicLinkError: A folder is a link.
    """
    while pending:
        below = pending.pop()
        if below.count("/") >= MAX_LEVELS:
            continue
        try:
            folder = open_below(root, below.split("/")[:-1])
        except GONE:
            continue
        with closing(folder):
            yield below, folder


def names_in(folder: int, below: str = "tmp/") -> list[str]:
    """Return the names in a folder that could be part of a key; none if the folder has vanished.

    All names are read at once: if files are deleted while a folder is read, the listing may miss other files. The
    status of the files is not kept: for thousands of files it takes megabytes.

    Args:
        below: The prefix of the folder; the root, which has an empty one, has names that are reserved.
    """
    try:
        with closing(open_readable(folder)) as readable, os.scandir(readable) as scan:
            names = [entry.name for entry in scan if is_component(entry.name)]
    except GONE:
        return []
    return names if below else [name for name in names if name not in RESERVED]


def is_empty(folder: int) -> bool:
    """Return whether a folder has no entry."""
    with closing(open_readable(folder)) as readable, os.scandir(readable) as scan:
        return next(scan, None) is None


def folder_names(folder: int, below: str) -> list[str]:
    """Return the names of the folders in a folder that could be part of a key.

    Most file systems tell them without a look at each file.

    Raises:
        SymbolicLinkError: There is a link.
    """
    found = []
    try:
        with closing(open_readable(folder)) as readable, os.scandir(readable) as scan:
            for entry in scan:
                if not is_component(entry.name) or (not below and entry.name in RESERVED):
                    continue
                if entry.is_symlink():
                    raise SymbolicLinkError(below + entry.name)
                if entry.is_dir(follow_symlinks=False):
                    found.append(entry.name)
    except GONE:
        return []
    return found


def stat_entry(folder: int, name: str, shown: str) -> os.stat_result:
    """Return the status of a file or folder inside another folder.

    Raises:
        SymbolicLinkError: It is a link.
        FileNotFoundError: There is no such entry.
    """
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise SymbolicLinkError(shown)
    return status


def open_file(folder: int, name: str, flags: int, shown: str) -> int | None:
    """Open a regular file; return None for anything else, since opening a pipe or a device can have effects.

    Raises:
        SymbolicLinkError: It is a link.
        FileNotFoundError: There is no such file.
    """
    if not stat.S_ISREG(stat_entry(folder, name, shown).st_mode):
        return None
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags | os.O_NONBLOCK, dir_fd=folder)
    except BlockingIOError:  # a file server has a lease on the file: wait until the kernel has taken it back
        return os.open(name, flags, dir_fd=folder)
