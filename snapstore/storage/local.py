"""A directory as an object store: the key is the path below the root.

In: keys and buffers. Out: files that are whole, durable and never change. Any thread may call anything; a forked child
may go on using a store, but it never keeps the parent's locks.

Invariants, and what is lost without them:

- A file gets its name by `link(2)` from a finished, fsynced temporary file. Create-only, so racing writers have one
  winner; and nothing listed is ever replaced by a rename, because a listing beside a rename can miss live entries.
- Order of a put: directory levels durable, bytes fsynced, link, directory fsynced, return. A level counts as durable
  only once *this* store has fsynced its parent: another process may have made it and not fsynced it yet, and a power
  loss would then take our object with that level.
- `AlreadyExistsError` is given only after the directory was fsynced, so that what it speaks of is durable too.
- A failed fsync ends the put. Linux reports a write-back error once: a second fsync would lie.
- A temporary file is locked (flock) for as long as somebody writes it. So `clean` knows the dead ones without a clock:
  a crash between create and link leaves an unlocked file under `tmp/`; a crash between link and unlink leaves a second
  name there for an object that is complete.
- A held object is locked before its link makes it visible. There is no moment in which a live session looks dead.

Layout: `<root>/<key>`, and `<root>/tmp/<random>` for files being written; `<root>/index/` belongs to the index.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ..errors import (
    CapabilityError,
    InvalidInputError,
    SnapstoreError,
    StorageError,
    StorageFullError,
)
from . import (
    GET_LIMIT_BYTES,
    RESERVED,
    Buffer,
    ObjectInfo,
    byte_view,
    check_into,
    check_key,
    check_limit,
    check_prefix,
    check_range,
    is_component,
    missing,
    short,
    sizes_one_by_one,
    taken,
)
from .locks import clean_temp, drop_temp, is_locked, keep, let_go, open_temp

_READ_PIECE_BYTES = 1024 * 1024 * 1024  # one read(2) moves less than 2 GiB at most

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_GONE = (FileNotFoundError, NotADirectoryError)
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}
#: What a file system says of one inode that it cannot read.
_BAD_INODE = {errno.EIO, errno.EBADMSG, errno.ENODATA, getattr(errno, "EUCLEAN", errno.EIO)}
_MOST_BAD_INODES = 64  # more are a failing disk, which may take half a minute over each
_NO_DIRECTORY_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class LocalStore:
    """An `ObjectStore` in a directory of a file system with hard links and fsync.

    Args:
        root: The directory; nothing is read or written until the first call.
        create: Make the directory, durably, when it is missing.
    """

    puts_at_once = 2

    def __init__(self, root: str | os.PathLike[str], *, create: bool = False) -> None:
        self._root = Path(os.fspath(root)).absolute()
        self._temps = self._root / "tmp"
        self._durable: set[Path] = set()  # directories whose own entry this store has fsynced
        self.url = self.place = str(self._root)
        if create:
            with self._failures("store", "create"):
                _make_root(self._root)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    def writable(self) -> bool:
        """Whether this process may write here, by the file system's word (permissions, read-only mounts)."""
        return os.access(self._root, os.W_OK | os.X_OK)

    def put(self, key: str, data: Buffer) -> None:
        """Create `key` durably; see `ObjectStore.put`. CapabilityError on a file system without hard links."""
        self._publish(key, data, held=False)

    def hold(self, key: str, data: Buffer) -> None:
        """`put` with a lock on the file that ends with `release` or with this process, however it dies."""
        self._publish(key, data, held=True)

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        """All bytes of `key`; see `ObjectStore.get`."""
        with self._open(key) as (fd, size_bytes):
            check_limit(key, self.url, size_bytes, limit_bytes)
            data = _read(fd, size_bytes)
        if len(data) != size_bytes:
            raise short(key, self.url, 0, size_bytes, len(data))
        return data

    def get_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview] | None = None
    ) -> list[memoryview]:
        """One view per range; see `ObjectStore.get_ranges`. Sizes are checked before anything is allocated."""
        with self._open(key) as (fd, size_bytes):
            for offset, length in ranges:
                check_range(key, offset, length)
                if offset + length > size_bytes:
                    raise short(key, self.url, offset, length, size_bytes)
            check_into(key, ranges, into)
            # not bytearrays: those would be zeroed first
            views = into if into is not None else [np.empty(length, np.uint8).data for _, length in ranges]
            for (offset, length), view in zip(ranges, views, strict=True):
                self._read_range(key, fd, offset, length, view)
            return list(views)

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of `key`; NotFoundError when missing. Of a file whose inode cannot be read: none, and now."""
        path = self._path(key)
        with self._failures(key, "stat"):
            try:
                status = path.stat()
            except _GONE as error:
                raise missing(key, self.url) from error
            except OSError as error:
                if not self._is_bad_file(error, path):
                    raise
                return ObjectInfo(key, 0, self.now_s())
        if not stat.S_ISREG(status.st_mode):
            raise missing(key, self.url)
        return _info(key, status)

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        """The size of each of these that is there."""
        return sizes_one_by_one(self, keys)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object under `prefix`; entries that vanish meanwhile are skipped, any other failure raises.

        A file whose inode cannot be read is there as well, since its name is: as empty, which no object of a repository
        is, and as written after all others, so that none who judges by age takes it for dead. Reading it fails.
        """
        check_prefix(prefix)
        return self._list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Unlink every key: needs no free space, leaves directories, and may be undone by a power loss."""
        for key in keys:
            path = self._path(key)
            with self._failures(key, "delete"), suppress(*_GONE, IsADirectoryError):
                path.unlink()
            let_go(path)  # in this order no one sees a session that is there but dead

    def now_s(self) -> float:
        """The clock of the file system: what it stamps on a new file right now [s since the epoch].

        On a network file system that is the server's clock, not ours. Where nothing can be written (a full disk, a
        read-only mount) this host's clock has to do: both agree on a local disk, and safety never rests on a clock.
        """
        try:
            fd, temp = open_temp(self._temps)
            try:
                return os.fstat(fd).st_mtime
            finally:
                drop_temp(fd, temp)
        except OSError:
            return time.time()

    def settle(self, prefix: str) -> None:
        """Fsync every directory from the root to `prefix` and below it; nothing to do when it is missing."""
        check_prefix(prefix)
        with self._failures(prefix or "/", "fsync"):
            self._root_identity()
            if (self._root / prefix).is_dir():
                self._make_levels(self._root / prefix)
                _fsync_directory(self._root / prefix)
                for key, status in self._walk(prefix):
                    if status is not None and stat.S_ISDIR(status.st_mode):
                        _fsync_directory(self._root / key)

    def touch(self, key: str) -> None:
        """Set `modified_s` to the file system's present; NotFoundError when the object is gone."""
        self.stat(key)  # utime would touch a directory as well
        with self._failures(key, "touch"):
            try:
                os.utime(self._path(key))
            except _GONE as error:
                raise missing(key, self.url) from error

    def release(self, key: str) -> None:
        """Delete `key` and drop its lock."""
        self.delete([key])

    def is_held(self, key: str) -> bool | None:
        """True while a live process holds `key`, False when none does or it is missing, None without file locks."""
        path = self._path(key)
        with self._failures(key, "probe the lock"):
            return is_locked(path)

    def clean(self) -> int:
        """Unlink the temporary files that nobody writes; bytes freed. Without file locks all of them are left."""
        freed_bytes = 0
        with self._failures("tmp/", "clean"):
            self._root_identity()
            for name in _names(self._temps):
                freed_bytes += clean_temp(self._temps / name)
        return freed_bytes

    def prepare(self) -> None:
        """Nothing may be here but what a `create` leaves that died or failed, our temporary files; and case counts."""
        with self._failures("/", "list"):
            for entry in self._root.iterdir():
                ours = entry.name == "tmp" and entry.is_dir() and not entry.is_symlink()
                if not ours or not all(re.fullmatch(r"[0-9a-f]{32}", file.name) for file in entry.iterdir()):
                    raise InvalidInputError(
                        f"{self.url}: is not empty and no repository; choose an empty or a new place"
                    )
        with self._failures("tmp", "write"):
            self._temps.mkdir(exist_ok=True)
            if (self._root / "TMP").exists():
                raise CapabilityError(
                    f"{self.url}: the file system takes 'tmp' and 'TMP' for one name, expected two: runs 'a' and 'A' "
                    "would share their records; put the repository where names differ by case (ext4, xfs, btrfs, zfs)"
                )

    @contextmanager
    def trial(self) -> Iterator[LocalStore]:
        """A store in a folder whose name begins with a dot, so that no listing shows it; removed at the end."""
        with self._failures("/", "write"):
            folder = tempfile.mkdtemp(prefix=".snapstore-trial-", dir=self._root)
        try:
            yield LocalStore(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # --- writing ---

    def _publish(self, key: str, data: Buffer, *, held: bool) -> None:
        path = self._path(key)
        view = byte_view(data)
        with self._failures(key, "write"):
            self._root_identity()
            self._make_levels(path.parent)
            fd, temp = open_temp(self._temps)
            kept = False
            try:
                _write_all(fd, view)
                os.fsync(fd)
                self._link(key, fd, temp, path)
                _fsync_directory(path.parent)
                if held:
                    keep(fd, path)
                    kept = True
            finally:
                drop_temp(None if kept else fd, temp)

    def _link(self, key: str, fd: int, temp: Path, path: Path) -> None:
        """Give the finished file its name, or say who has it."""
        try:
            os.link(temp, path)
        except FileExistsError as error:
            if _is_open_as(fd, path):
                return  # a network file system did it, lost its reply and asked again
            _fsync_directory(path.parent)
            raise taken(key, self.url) from error
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise CapabilityError(
                    f"{key} in {self.url}: cannot make a hard link ({_name(error)}), which create-only objects need; "
                    "put the repository on one file system that has hard links (ext4, xfs, btrfs, zfs, NFS)"
                ) from error
            raise

    def _make_levels(self, directory: Path) -> None:
        """Every level from the root down to `directory` exists, and a power loss cannot take it."""
        level = self._root
        for name in directory.relative_to(self._root).parts:
            parent, level = level, level / name
            if level in self._durable and level.is_dir():
                continue
            with suppress(FileExistsError):
                level.mkdir()
            _fsync_directory(parent)
            self._durable.add(level)

    # --- reading ---

    @contextmanager
    def _open(self, key: str) -> Iterator[tuple[int, int]]:
        """(descriptor, size in bytes) of an object."""
        path = self._path(key)
        with self._failures(key, "read"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a planted FIFO must not make us wait
            except _GONE as error:
                raise missing(key, self.url) from error
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise missing(key, self.url)
                yield fd, status.st_size
            finally:
                os.close(fd)

    def _read_range(self, key: str, fd: int, offset: int, length: int, view: memoryview) -> None:
        done = 0
        while done < length:
            got = os.preadv(fd, [view[done : done + _READ_PIECE_BYTES]], offset + done)
            if got == 0:
                raise short(key, self.url, offset, length, offset + done)
            done += got

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._failures(prefix or "/", "list"):
            before = self._root_identity()
            for key, status in self._walk(prefix):
                if status is None:
                    yield ObjectInfo(key, 0, math.inf)
                elif stat.S_ISREG(status.st_mode):
                    yield _info(key, status)
            # An unmount in mid-listing makes every directory look vanished; less than there is must not pass for all.
            if self._root_identity() != before:
                raise StorageError(f"{self.url}: replaced or unmounted while it was listed; mount it and try again")

    def _walk(self, prefix: str) -> Iterator[tuple[str, os.stat_result | None]]:
        """(key, status) of files and directories below `prefix`; a stack, so that depth is no attack.

        No status of a file whose inode cannot be read. Of a directory that fails: nobody knows what is in it.
        """
        pending, bad = [prefix], 0
        while pending:
            below = pending.pop()
            for name in _names(self._root / below):
                if below or name not in RESERVED:
                    key = below + name
                    status: os.stat_result | None
                    try:
                        status = os.stat(f"{self._root}/{key}")  # noqa: PTH116  a Path takes longer than the stat
                    except _GONE:
                        continue
                    except OSError as error:
                        bad += 1
                        if bad > _MOST_BAD_INODES or not self._is_bad_file(error, self._root / key):
                            raise
                        status = None
                    if status is not None and stat.S_ISDIR(status.st_mode):
                        pending.append(f"{key}/")
                    yield key, status

    def _is_bad_file(self, error: OSError, path: Path) -> bool:
        """Whether an error speaks of this one inode, and the folder says that it is a file's."""
        if error.errno not in _BAD_INODE:
            return False
        self._root_identity()  # a mount that is gone says the same of every file
        with os.scandir(path.parent) as scan:  # asks the file, if the folder does not say
            return any(entry.name == path.name and entry.is_file(follow_symlinks=False) for entry in scan)

    # --- names and errors ---

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._root / key

    def _root_identity(self) -> tuple[int, int]:
        """Device and inode of the root; a missing root is a failed store, never an empty one."""
        status = None
        with suppress(*_GONE):
            status = self._root.stat()
        if status is None or not stat.S_ISDIR(status.st_mode):
            raise StorageError(
                f"{self.url}: expected a directory, found none; mount it, or make it with 'snapstore init'"
            )
        return status.st_dev, status.st_ino

    @contextmanager
    def _failures(self, key: str, verb: str) -> Iterator[None]:
        """Turn an OSError into the error tree, with the name of the thing first."""
        try:
            yield
        except OSError as error:
            raise _translate(f"{key} in {self.url}: cannot {verb}", error) from error


# --- files ---


def _make_root(root: Path) -> None:
    missing = [level for level in (root, *root.parents) if not level.exists()]
    for level in reversed(missing):
        with suppress(FileExistsError):
            level.mkdir()
        _fsync_directory(level.parent)
    if not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    """The tag holds the time of the last change (ctime), which no copying or restoring tool can set."""
    return ObjectInfo(key, status.st_size, status.st_mtime, f"{status.st_ino:x}-{status.st_ctime_ns:x}")


def _names(directory: Path) -> list[str]:
    """What is there and could be part of a key; nothing when the directory has vanished.

    At once, since one that is read while files in it are deleted may hide others; without their status, which of
    thousands takes megabytes.
    """
    try:
        with os.scandir(directory) as scan:
            return [entry.name for entry in scan if is_component(entry.name)]
    except _GONE:
        return []


def _fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in _NO_DIRECTORY_FSYNC:
            raise CapabilityError(
                f"{directory}: cannot fsync a directory ({_name(error)}), so nothing in it survives a power loss; "
                "put the repository on a file system that can (ext4, xfs, btrfs, zfs, NFS)"
            ) from error
        raise
    finally:
        os.close(fd)


def _write_all(fd: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])


def _read(fd: int, size_bytes: int) -> bytes:
    """Up to `size_bytes` from the start; shorter when the file ends."""
    pieces: list[bytes] = []
    done = 0
    while done < size_bytes:
        piece = os.pread(fd, min(size_bytes - done, _READ_PIECE_BYTES), done)
        if not piece:
            break
        pieces.append(piece)
        done += len(piece)
    return b"".join(pieces)  # of one piece, as nearly always: no copy


def _is_open_as(fd: int, path: Path) -> bool:
    with suppress(*_GONE):
        return os.path.samestat(os.fstat(fd), path.lstat())
    return False


# --- errors ---


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "unknown error")


def _translate(what: str, error: OSError) -> SnapstoreError:
    name = _name(error)
    if error.errno in _FULL:
        return StorageFullError(f"{what}: no space or quota left ({name}); free some, or run 'snapstore gc'")
    if error.errno in _REFUSED:
        return StorageError(f"{what}: read-only or no permission ({name}); check the mount and who owns the directory")
    return StorageError(f"{what}: {error.strerror or error} ({name}); check the disk and the mount, then try again")
