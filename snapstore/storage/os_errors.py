"""Errors of the operating system as errors of snapstore.

In: an OSError, and the thing that failed. Out: an error that names the thing, the cause and what to do.
"""

from __future__ import annotations

import errno
import os

from ..errors import NotFoundError, SnapstoreError, StorageError, StorageFullError, lasting

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
#: The disk cannot read some bytes or an inode. Not every system has all of these.
_UNREADABLE = {errno.EIO, errno.EBADMSG, errno.ENODATA, getattr(errno, "EUCLEAN", errno.EIO)}
#: After a full disk has refused a file, its own few files are gone again, and their inodes are free.
_FEW_INODES = 8
#: Something else has the name of a file: a folder, a link, a socket.
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}


def is_full(error: OSError) -> bool:
    """Return whether an error says that there is no space or quota left."""
    return error.errno in _FULL


def error_name(error: OSError) -> str:
    """Return the symbol of an error, such as `ENOSPC`."""
    return errno.errorcode.get(error.errno or 0, "unknown error")


def is_too_many_files(error: BaseException | None) -> bool:
    """Return whether an error says that this process, or the system, has too many files open."""
    return isinstance(error, OSError) and error.errno in _TOO_MANY_FILES


def is_withheld(error: BaseException | None) -> bool:
    """Return whether an object that cannot be read may be whole, by the cause of the error.

    Only a disk that cannot read its bytes, or something else in its place, is damage. If this user may not read it, its
    server is busy or slow, a connection broke off, or this process has no memory or files left, it may be whole. So it
    may be after every failure of S3: a server that has lost an object says that there is none.
    """
    while error is not None and not isinstance(error, NotFoundError):
        if isinstance(error, OSError) and error.errno not in _UNREADABLE | _NO_FILE:
            return True
        if getattr(error, "is_withheld", False):  # of S3
            return True
        error = error.__cause__
    return False


def is_stale(error: BaseException | None) -> bool:
    """Return whether an error says that the server has deleted an open file (NFS)."""
    return isinstance(error, OSError) and error.errno == errno.ESTALE


def is_unreadable(error: BaseException | None) -> bool:
    """Return whether an error says that the disk cannot read some bytes, or an inode."""
    return isinstance(error, OSError) and error.errno in _UNREADABLE


def inodes(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return (how many inodes are free for this user, how many there are) on the file system of a path.

    None: it makes them as they are needed, or does not tell.
    """
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return (status.f_favail, status.f_files) if status.f_files else None


def translate(what: str, error: OSError, place: str | os.PathLike[str] | None = None) -> SnapstoreError:
    """Return the error to raise for an OSError.

    Args:
        what: says which thing and which action failed.
        place: a path on the file system; a full one may lack inodes, not bytes.
    """
    name = error_name(error)
    left = inodes(place) if place is not None and error.errno == errno.ENOSPC else None
    if left is not None and left[0] < _FEW_INODES:
        text = f"no free inodes ({name}): {left[0]} of {left[1]} are left, and each file and folder takes one"
        return StorageFullError(f"{what}: {text}; remove files, or run 'snapstore gc'")
    if is_full(error):
        return StorageFullError(f"{what}: no space or quota left ({name}); free some, or run 'snapstore gc'")
    if error.errno in _REFUSED:
        advice = "check the mount and who owns the directory"
        return lasting(StorageError(f"{what}: read-only or no permission ({name}); {advice}"))
    if is_too_many_files(error):
        return StorageError(f"{what}: too many open files ({name}); raise the limit (ulimit -n), then try again")
    return StorageError(f"{what}: {error.strerror or error} ({name}); check the disk and the mount, then try again")
