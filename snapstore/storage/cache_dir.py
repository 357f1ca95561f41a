"""The user's cache folder on this machine: it holds the indexes, and the lock files of stores without file locks.

Nothing in it is the only copy, and any of it may be deleted at any time. But its contents are trusted, and LMDB maps
its file, so only the user may write to it. It must be on a local disk: LMDB and flock both fail silently on network
file systems. Its size is bounded: `shrink` removes the least recently used indexes.

A folder in use is locked (flock, shared) before anything in it is read. To remove a folder, a process locks it
exclusively and renames it first. So a folder under its own name is always whole, and a process that waited for the lock
sees that the name is gone.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import re
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidInputError
from .locks import wait_for_lock

_NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs|cifs|smb|lustre|gpfs|beegfs|ceph|9p|afs|glusterfs|fuse\.|wekafs|panfs|pvfs2|ocfs2|gfs2|virtiofs"
)

#: The limit for all indexes together [bytes]. Indexes in use may exceed it: they are never removed.
CACHE_BYTES = 4 * 1024 * 1024 * 1024
#: The only folders that `shrink` removes: indexes (`catalog.index.folder_for`), and the rest of an index that a killed
#: process was removing.
_INDEX, _EVICTED = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}"), re.compile(r"evicted-[0-9a-f]{16}")
#: A temporary index may be so new that the process that made it has not locked it yet [s].
NEW_S = 60.0
_ESCAPED = re.compile(r"\\([0-7]{3})")  # in /proc/mounts: \040 is a space
_IN_USE = "used"  # a file in each folder; its modification time is the time of the last use


def cache_folder() -> Path:
    """Return SNAPSTORE_CACHE_DIR, else `snapstore` in the user's cache.

    Raises:
        InvalidInputError: The variable is not an absolute path.
        FileNotFoundError: The variable is not set, and the user's home folder is not known.
    """
    import platformdirs

    chosen = os.environ.get("SNAPSTORE_CACHE_DIR")
    if chosen is not None and not Path(chosen := os.path.expanduser(chosen)).is_absolute():  # noqa: PTH111
        raise InvalidInputError(f"SNAPSTORE_CACHE_DIR={chosen!r}: expected an absolute path")
    if chosen is not None:
        return Path(chosen)
    with suppress(RuntimeError):  # some versions of platformdirs raise it, others return a relative path
        if (cache := Path(platformdirs.user_cache_dir("snapstore"))).is_absolute():
            return cache
    raise FileNotFoundError(errno.ENOENT, "the home folder of this user is not known (set SNAPSTORE_CACHE_DIR)")


def usable_cache() -> tuple[Path | None, str]:
    """Return (the cache folder, ""), or (None, why it cannot be used); make the folder if it is missing.

    Raises:
        InvalidInputError: SNAPSTORE_CACHE_DIR is not an absolute path.
    """
    try:
        cache = cache_folder()
    except FileNotFoundError as error:
        return None, f"the cache cannot be found: {error.strerror}"
    why = refusal(cache)
    return (None, f"the cache {cache} {why}") if why else (cache, "")


def refusal(cache: Path) -> str:
    """Return why a folder cannot be the cache, or ""; make the folder if it is missing."""
    if on_network(cache):
        return "is on a network file system, where LMDB and file locks fail"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = cache.stat()
    except OSError as error:
        return f"cannot be made: {error.strerror}"
    if status.st_uid != os.geteuid():
        return f"belongs to another user ({status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others; run 'chmod go-w' on it"
    return ""


def mount_of(folder: Path) -> tuple[str, str]:
    """Return (mount point, file system type) of a folder from /proc/mounts; ("", "") without that file.

    The last of several mounts at one point counts: an automounter mounts a network file system over its own.
    """
    try:
        rows = [line.split(" ") for line in os.fsdecode(Path("/proc/mounts").read_bytes()).split("\n")]
        mounts = [[_ESCAPED.sub(lambda code: chr(int(code[1], 8)), field) for field in row[1:3]] for row in rows[:-1]]
    except OSError:
        return "", ""
    resolved = str(folder.resolve())
    inside = [m for m in mounts if resolved == m[0] or resolved.startswith(m[0].rstrip("/") + "/")]
    point, kind = max(reversed(inside), key=lambda mount: len(mount[0]), default=["", ""])
    return point, kind


def on_network(folder: Path) -> bool:
    """Return whether a folder is on a network file system; False if the system has no /proc/mounts."""
    return _NETWORK_FILE_SYSTEMS.match(mount_of(folder)[1]) is not None


def begin_use(folder: Path, timeout_s: float) -> int:
    """Make a folder and protect it from removal.

    Args:
        timeout_s: how long to wait while another process removes the folder. A stopped process (SIGSTOP) may take days.

    Returns:
        A descriptor for `end_use`. The use also ends when this process and the children that it forked are dead.

    Raises:
        FileExistsError: The name of the folder, or of one above it, is that of a file, or of a link that leads nowhere.
        PermissionError: The folder is not ours alone.
        TimeoutError: Another process was about to remove the folder, and did not end in time.
        OSError: The folder cannot be made or locked.
    """
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError as error:  # it vanished before pathlib's check that it is a directory; or it is none
            if os.path.lexists(error.filename) and not Path(error.filename).is_dir():
                raise
            continue
        with suppress(FileNotFoundError):  # removed meanwhile: try again
            _require_private(folder)
            fd = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                wait_for_lock(fd, folder / _IN_USE, timeout_s, fcntl.LOCK_SH)
                if is_used(fd, folder):
                    os.utime(fd)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def _require_private(folder: Path) -> None:
    """Raise PermissionError unless this is a folder of ours that only we can write to: LMDB trusts its file."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "expected a folder that only you can write to", str(folder))


def end_use(fd: int) -> None:
    """End the use of a folder, at the present time; `shrink` may remove it after folders that were used earlier."""
    with suppress(OSError):
        os.utime(fd)
    os.close(fd)


def is_used(fd: int, folder: Path) -> bool:
    """Return whether a folder is still the one that `begin_use` opened, and not another under its name."""
    try:
        return os.path.samestat(os.fstat(fd), (folder / _IN_USE).lstat())
    except FileNotFoundError:
        return False


def shrink(limit_bytes: int = CACHE_BYTES) -> None:
    """Remove the least recently used indexes until all take at most `limit_bytes`; never remove one in use."""
    found: list[tuple[float, int, Path]] = []
    with suppress(OSError):  # a cache that cannot be shrunk is not a failure
        for folder in cache_folder().iterdir():
            if folder.is_symlink():
                continue  # not ours
            if _EVICTED.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
            elif _INDEX.fullmatch(folder.name):
                found.append(_use_of(folder))
        left_bytes = sum(size_bytes for _, size_bytes, _ in found)
        for _, size_bytes, folder in sorted(found):
            if left_bytes <= limit_bytes:
                break
            with suppress(OSError):
                left_bytes -= size_bytes if _remove_unused(folder) else 0


def _use_of(folder: Path) -> tuple[float, int, Path]:
    """Return (time of its last use [s], its size on disk [bytes], the folder)."""
    used_s, size_bytes = 0.0, 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            status = file.lstat()
            size_bytes += status.st_blocks * 512  # the file of an index is sparse
            used_s = status.st_mtime if file.name == _IN_USE else used_s
    return used_s, size_bytes, folder


@functools.cache
def remove_left_behind(place: Path, prefix: str) -> None:
    """Remove the temporary indexes of this user that killed processes have left; only once in a process.

    Args:
        place: where they lie, which may be open to all users. Their names begin with the prefix.
    """
    with suppress(OSError):
        for folder in [] if on_network(place) else place.glob(f"{prefix}*"):  # file locks may fail on a network
            with suppress(OSError):
                _require_private(folder)
                if folder.lstat().st_mtime < time.time() - NEW_S:
                    _remove_unused(folder, prefix)


def _remove_unused(folder: Path, prefix: str = "evicted-") -> bool:
    """Remove a folder unless it is in use, under a new name with the prefix; return whether it was removed."""
    fd = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_used(fd, folder):  # another process was faster
            return False
        removed = folder.rename(folder.with_name(f"{prefix}{os.urandom(8).hex()}"))
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    shutil.rmtree(removed, ignore_errors=True)
    return True
