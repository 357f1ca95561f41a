"""File locks: which temporary files are being written, and which objects are locked.

In: names in open folders (folders.py). Out: descriptors with a flock on them. A flock ends when its descriptor is
closed or the process dies, however it dies.

Invariant: a flock belongs to the open file, which a forked child shares. A DataLoader worker would keep a dead
trainer's session alive. So every locked descriptor is listed here, and closed in the child. Opening and listing happen
under one lock that os.fork takes too, so a fork from any thread sees both or neither. That lock is reentrant because a
signal handler may save, or fork, on the thread that has it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..threads import after_fork_in_child, lock_in_forks
from .folders import open_file

_TEMP_TRIES = 16  # a cleaner can unlink a new file only between two of our system calls
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

_FORK_LOCK = threading.RLock()
_LOCKED_FDS: set[int] = set()
_KEPT_FDS: dict[str, int] = {}  # name of a lock -> descriptor, which is in _LOCKED_FDS too


def _forget_in_child() -> None:
    for fd in _LOCKED_FDS:
        with suppress(OSError):
            os.close(fd)  # close, never LOCK_UN: that would unlock the parent's file
    _LOCKED_FDS.clear()
    _KEPT_FDS.clear()


lock_in_forks(_FORK_LOCK)
after_fork_in_child(_forget_in_child)


def open_temp(folder: int) -> tuple[int, str]:
    """Create a locked temporary file in a folder; return (descriptor, name).

    Without file locks it is not locked.

    Raises:
        BlockingIOError: Cleaners locked every file that was tried.
        OSError: The file cannot be made.
    """
    for _ in range(_TEMP_TRIES):
        temp = os.urandom(16).hex()
        fd = _open_tracked(temp, os.O_EXCL, folder)
        try:
            ours = _try_lock(fd, fcntl.LOCK_EX) is not False and os.fstat(fd).st_nlink > 0
        except BaseException:  # or the file would stay as long as this process
            drop_temp(fd, folder, temp)
            raise
        if ours:
            return fd, temp
        _close(fd)
    raise BlockingIOError(errno.EWOULDBLOCK, f"{_TEMP_TRIES} new temporary files were locked by another process")


def drop_temp(fd: int, folder: int, temp: str) -> None:
    """Unlink a temporary file, and close its descriptor unless `keep_locked` keeps it."""
    with suppress(OSError):  # `clean` removes it later
        os.unlink(temp, dir_fd=folder)
    with _FORK_LOCK:
        if fd not in _KEPT_FDS.values():  # asked here, since a Ctrl-C may end `keep_locked` after its work is done
            _close(fd)


def clean_temp(folder: int, name: str) -> int:
    """Unlink a temporary file unless its writer lives or it is not a regular file; return the bytes freed.

    A file that this user may not open stays. It belongs to another member of the group whose process died before it set
    the mode; that member's next `clean` unlinks it.

    Raises:
        SymbolicLinkError: It is a link.
    """
    try:
        fd = open_file(folder, name, os.O_RDWR, f"tmp/{name}")
    except (FileNotFoundError, PermissionError):
        return 0
    if fd is None:
        return 0
    try:
        if not _try_lock(fd, fcntl.LOCK_EX):
            return 0
        status = os.fstat(fd)
        os.unlink(name, dir_fd=folder)
        return status.st_size if status.st_nlink == 1 else 0  # two names: the object itself remains
    except FileNotFoundError:
        return 0
    finally:
        os.close(fd)


def keep_locked(fd: int, name: str) -> None:
    """Keep the descriptor of a locked file open, under a name, until `unlock`."""
    with _FORK_LOCK:
        unlock(name)  # the name may be of an earlier file, which another process deleted
        _KEPT_FDS[name] = fd


def unlock(name: str) -> None:
    """Close the descriptor that `keep_locked` kept under a name; do nothing if there is none.

    After a Ctrl-C at any line it may be called again: a descriptor stays listed as long as it is locked.
    """
    with _FORK_LOCK:
        fd = _KEPT_FDS.get(name)
        if fd is not None:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            del _KEPT_FDS[name]
            _close(fd)


def is_locked(folder: int, name: str, shown: str = "") -> bool | None:
    """Return whether a live process has the lock of a file; None on a file system without locks.

    It tries to take a shared lock: such probes do not block each other, and need no write permission (on NFS, LOCK_EX
    needs it).

    Args:
        shown: The file's name in errors.

    Returns:
        False also for anything but a regular file.

    Raises:
        SymbolicLinkError: It is a link.
        FileNotFoundError: There is no such file.
    """
    fd = open_file(folder, name, os.O_RDONLY, shown or name)
    if fd is None:
        return False
    try:
        free = _try_lock(fd, fcntl.LOCK_SH)
        if free:
            fcntl.flock(fd, fcntl.LOCK_UN)  # now, even if a fork+exec in another thread shares the file
    finally:
        os.close(fd)
    return None if free is None else not free


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing; wait while this or another process has it.

    Raises:
        TimeoutError: The lock was not free in time. A process that was stopped (SIGSTOP) may keep it for days.
    """
    fd = _open_tracked(path)
    try:
        wait_for_lock(fd, path, timeout_s)
        yield
    finally:
        try:
            _close(fd)
        except BaseException:  # a Ctrl-C: it may have come before the lock was released
            _close(fd)
            raise


def _open_tracked(path: str | Path, flags: int = 0, folder: int | None = None) -> int:
    """Open or create a file, never through a link; children that are forked from now on close the descriptor."""
    with _FORK_LOCK:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666, dir_fd=folder)
        _LOCKED_FDS.add(fd)
    return fd


def _close(fd: int) -> None:
    with _FORK_LOCK, suppress(OSError):  # all errors that matter were seen at the fsync
        if fd in _LOCKED_FDS:  # in a child, the number may be another file's by now
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a Ctrl-C may come before the file is closed
            _LOCKED_FDS.discard(fd)
            os.close(fd)


def wait_for_lock(fd: int, path: Path, timeout_s: float, kind: int = fcntl.LOCK_EX) -> None:
    """Take a lock as soon as it is free.

    Args:
        path: The file's name in errors.
        kind: fcntl.LOCK_EX or LOCK_SH.

    Raises:
        TimeoutError: It was not free in time.
    """
    until_s, pause_s = time.monotonic() + timeout_s, 0.0005
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked", str(path)) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)


def _try_lock(fd: int, kind: int) -> bool | None:
    """Try to take a lock; return True if taken, False if another process has it, None without file locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True
