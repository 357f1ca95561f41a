"""Cache: the user's own folder on this machine, where indexes and signs of life of held objects lie.

Nothing in it is the truth, and any of it may be deleted at any time. But what it says is believed, and LMDB maps its
file, so it must be the user's alone. It must lie on a local disk: LMDB and flock both fail in silence on network file
systems. It is bounded: `shrink` removes the indexes that were used longest ago.

A folder in use is locked (flock, shared) from before anything in it is read. Who removes one locks it alone and renames
it first, so a folder under its own name is always whole, and whoever waited for the lock sees that the name is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidInputError

_NETWORK_FILE_SYSTEMS = (
    "nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "glusterfs", "fuse.", "wekafs", "panfs",
    "pvfs2", "ocfs2", "gfs2", "virtiofs",
)  # fmt: skip

#: All indexes in the cache together take so many bytes, but for those in use.
CACHE_BYTES = 4 * 1024 * 1024 * 1024
#: What `shrink` may remove: indexes (`index.folder_for`), and what it was removing when it was killed. Nothing else.
_INDEX, _EVICTED = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}"), re.compile(r"evicted-[0-9a-f]{16}")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a blank in /proc/mounts, say
_IN_USE = "used"  # its time is that of the last use


def cache_folder() -> Path:
    """SNAPSTORE_CACHE_DIR, else the user's cache.

    Raises:
        InvalidInputError: the variable is no absolute path.
    """
    import platformdirs

    chosen = os.environ.get("SNAPSTORE_CACHE_DIR")
    if chosen is not None and not Path(chosen).is_absolute():
        raise InvalidInputError(f"SNAPSTORE_CACHE_DIR={chosen!r}: expected an absolute path")
    return Path(chosen or platformdirs.user_cache_dir("snapstore"))


def refusal(cache: Path) -> str:
    """Why a folder, which is made if it is missing, cannot be the cache; empty if it can."""
    if on_network(cache):
        return "lies on a network file system, where LMDB and file locks fail"
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
    """(mount point, file system type) of a folder, by /proc/mounts; ("", "") where there is none."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
        mounts = [
            [_ESCAPED.sub(lambda code: chr(int(code[1], 8)), field) for field in line.split()[1:3]] for line in lines
        ]
    except OSError:
        return "", ""
    resolved = str(folder.resolve())
    inside = [m for m in mounts if resolved == m[0] or resolved.startswith(m[0].rstrip("/") + "/")]
    point, kind = max(inside, key=lambda mount: len(mount[0]), default=["", ""])
    return point, kind


def on_network(folder: Path) -> bool:
    """Whether a folder lies on a network file system (Linux tells)."""
    return mount_of(folder)[1].startswith(_NETWORK_FILE_SYSTEMS)


def begin_use(folder: Path) -> int:
    """Make a folder and keep it from being removed.

    Returns:
        What `end_use` takes; the death of this process, and of the children that it forked, ends the use as well.
    """
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:  # it was there, and gone when pathlib looked whether it is a directory; or it is a file
            if folder.is_file():
                raise
            continue
        with suppress(FileNotFoundError):  # removed meanwhile: again
            _require_private(folder)
            fd = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                if is_used(fd, folder):
                    os.utime(fd)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def _require_private(folder: Path) -> None:
    """Raise PermissionError unless a folder is one, ours, and nobody else can write to it: LMDB trusts its file."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "expected a folder that only you can write to", str(folder))


def end_use(fd: int) -> None:
    """The folder may be removed, after those that were used before now."""
    with suppress(OSError):
        os.utime(fd)
    os.close(fd)


def is_used(fd: int, folder: Path) -> bool:
    """Whether a folder is the very one that `begin_use` gave this for, and none that has taken its place."""
    return _is_open_as(fd, folder / _IN_USE)


def shrink(limit_bytes: int = CACHE_BYTES) -> None:
    """Remove the indexes that were used longest ago, until all together take `limit_bytes`; none that is in use."""
    found: list[tuple[float, int, Path]] = []
    with suppress(OSError):  # a cache that cannot be tidied is no failure
        for folder in cache_folder().iterdir():
            if folder.is_symlink():
                continue  # nothing of ours
            if _EVICTED.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
            elif _INDEX.fullmatch(folder.name):
                found.append(_use_of(folder))
        left_bytes = sum(size_bytes for _, size_bytes, _ in found)
        for _, size_bytes, folder in sorted(found):
            if left_bytes <= limit_bytes:
                break
            with suppress(OSError):
                left_bytes -= size_bytes if _removed(folder) else 0


def _use_of(folder: Path) -> tuple[float, int, Path]:
    """(when it was last used [s], what it takes on disk [bytes], itself)."""
    used_s, size_bytes = 0.0, 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            status = file.lstat()
            size_bytes += status.st_blocks * 512  # the map of an index is sparse
            used_s = status.st_mtime if file.name == _IN_USE else used_s
    return used_s, size_bytes, folder


def _removed(folder: Path) -> bool:
    """Remove a folder that nobody uses; False if somebody does."""
    fd = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_used(fd, folder):  # somebody else was faster
            return False
        removed = folder.rename(folder.with_name(f"evicted-{os.urandom(8).hex()}"))
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    shutil.rmtree(removed, ignore_errors=True)
    return True


def _is_open_as(fd: int, file: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(fd), file.lstat())
    except FileNotFoundError:
        return False
