"""Folders: reach files below a root by descriptors, never through a symbolic link.

The kernel follows links in a path that it gets whole, so a repository from a stranger could lead a write or a delete to
any file of the user. Here each folder is opened by its name in the folder above it, and a link is an error that names
it. The root may be a link: the user named it.

In: descriptors of folders and names in them. Out: descriptors, which the caller closes before it returns: one that
stays open would keep the volume from being unmounted.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

#: To reach what lies in a folder: needs no right to list it and opens nothing on a server (Linux).
_REACH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

Identity = tuple[int, int]  # device and inode


class SymbolicLinkError(OSError):
    """A symbolic link lies where a folder or a file was expected; `filename` is its place below the root."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.ELOOP, os.strerror(errno.ELOOP), name)


def identity(status: os.stat_result) -> Identity:
    """What tells a file or folder from all others that there are at the same time."""
    return status.st_dev, status.st_ino


def open_root(path: str | os.PathLike[str]) -> int:
    """Open a folder that may be, or be reached by, a link."""
    return os.open(path, _REACH)


def open_readable(folder: int) -> int:
    """Open a folder again, to list or to fsync it."""
    return os.open(".", _READ, dir_fd=folder)


def open_folder(above: int, name: str, shown: str) -> int:
    """Open the folder `name` of another.

    Args:
        shown: its place below the root, for errors.

    Raises:
        SymbolicLinkError: it is a link.
        FileNotFoundError, NotADirectoryError: there is none.
    """
    try:
        return os.open(name, _REACH | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EMLINK):  # systems differ
            look(above, name, shown)
        raise


def open_below(root: int, names: Sequence[str]) -> int:
    """Open the folder that lies some levels below another; see `open_folder` for what it raises."""
    folder = os.dup(root) if not names else root
    for depth, name in enumerate(names):
        try:
            inner = open_folder(folder, name, "/".join(names[: depth + 1]))
        finally:
            if folder != root:
                os.close(folder)
        folder = inner
    return folder


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def look(folder: int, name: str, shown: str) -> os.stat_result:
    """The status of a file or folder.

    Raises:
        SymbolicLinkError: it is a link.
        FileNotFoundError: there is none.
    """
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise SymbolicLinkError(shown)
    return status


def open_file(folder: int, name: str, flags: int, shown: str) -> int | None:
    """Open a regular file; None for anything else that lies there: to open a pipe or a device can do something.

    Raises:
        SymbolicLinkError: it is a link.
        FileNotFoundError: there is none.
    """
    if not stat.S_ISREG(look(folder, name, shown).st_mode):
        return None
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
