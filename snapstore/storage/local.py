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
- Nothing beneath the root is reached through a symbolic link (folders.py), and a link where a folder or an object may
  be is an error, also in a listing: a user who moved a folder elsewhere and left a link must not lose its snapshots to
  a gc that does not see them.
- Each operation opens the root once and goes on from there, so all of it happens in one place, whatever is mounted over
  the root meanwhile. While a place is `pinned`, every operation compares device and inode of the root with the pin.

Layout: `<root>/<key>`, and `<root>/tmp/<random>` for files being written; an `<root>/index/` is left alone.
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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import CapabilityError, InvalidInputError, NotFoundError, SnapstoreError, StorageError, StorageFullError
from .base import (
    GET_LIMIT_BYTES,
    MAX_LEVELS,
    RESERVED,
    Buffer,
    ObjectInfo,
    byte_view,
    check_key,
    check_limit,
    check_prefix,
    check_range,
    is_component,
    memory_for,
    missing,
    short,
    sizes_one_by_one,
    taken,
)
from .folders import (
    Identity,
    SymbolicLinkError,
    closing,
    identity,
    look,
    open_below,
    open_file,
    open_folder,
    open_readable,
    open_root,
)
from .locks import clean_temp, drop_temp, is_locked, keep_locked, open_temp, unlock

_READ_PIECE_BYTES = 1024 * 1024 * 1024  # one read(2) moves less than 2 GiB at most

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_GONE = (FileNotFoundError, NotADirectoryError)
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}
#: What a file system says of one inode that it cannot read.
_BAD_INODE = {errno.EIO, errno.EBADMSG, errno.ENODATA, getattr(errno, "EUCLEAN", errno.EIO)}
_MOST_BAD_INODES = 64  # more are a failing disk, which may take half a minute over each
_TEMP_NAME = re.compile(r"[0-9a-f]{32}")
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
        self._durable: dict[str, Identity] = {}  # folders whose own entry this store has fsynced
        self._pins: list[Identity] = []
        self.url = str(self._root)
        if create:
            with self._failures("store", "create"):
                _make_root(self._root)
        self.place = os.path.realpath(self._root)  # one place, by whatever links it is reached

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep to the folder that lies here now; see `ObjectStore.pinned`."""
        with self._failures("/", "open"), self._rooted() as root:
            pin = identity(os.fstat(root))
        self._pins.append(pin)
        try:
            yield
        finally:
            self._pins.remove(pin)

    def put(self, key: str, data: Buffer) -> None:
        """Create `key` durably; see `ObjectStore.put`. CapabilityError on a file system without hard links."""
        self._publish(key, data, held=False)

    def lock(self, key: str, data: Buffer) -> None:
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

    def get_range(self, key: str, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        """Return a range of `key`; see `ObjectStore.get_range`. The size is checked before memory is allocated."""
        with self._open(key) as (fd, size_bytes):
            check_range(key, offset, length)
            if offset + length > size_bytes:
                raise short(key, self.url, offset, length, size_bytes)
            view = memory_for(key, length, into)
            done = 0
            while done < length:
                got = os.preadv(fd, [view[done : done + _READ_PIECE_BYTES]], offset + done)
                if got == 0:
                    raise short(key, self.url, offset, length, offset + done)
                done += got
            return view

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of `key`; NotFoundError when missing. Of a file whose inode cannot be read: none, and now."""
        with self._at(key, "stat") as (folder, name):
            try:
                status = look(folder, name, key)
            except OSError as error:
                if not self._is_bad_file(error, folder, name):
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
            with suppress(NotFoundError), self._at(key, "delete") as (folder, name), suppress(IsADirectoryError):
                os.unlink(name, dir_fd=folder)
            unlock(self._lock_name(key))  # in this order no one sees a session that is there but dead

    def now_s(self) -> float:
        """The clock of the file system: what it stamps on a new file right now [s since the epoch].

        On a network file system that is the server's clock, not ours. Where nothing can be written (a full disk, a
        read-only mount) this host's clock has to do: both agree on a local disk, and safety never rests on a clock.
        """
        try:
            with self._rooted() as root, self._temps(root) as temps:
                fd, temp = open_temp(temps)
                try:
                    return os.fstat(fd).st_mtime
                finally:
                    drop_temp(fd, temps, temp)
        except (OSError, StorageError):
            return time.time()

    def sync(self, prefix: str) -> None:
        """Fsync every directory from the root to `prefix` and below it; nothing to do when it is missing."""
        check_prefix(prefix)
        with self._failures(prefix or "/", "fsync"), self._rooted() as root:
            try:
                folder = self._made_levels(root, prefix.split("/")[:-1], make=False)
            except _GONE:
                return
            with closing(folder):
                _fsync_directory(folder, prefix)
            for key, status, above in self._walk(root, prefix):
                if status is not None and stat.S_ISDIR(status.st_mode):
                    with suppress(*_GONE), closing(open_folder(above, key.rpartition("/")[2], key)) as below:
                        _fsync_directory(below, key)

    def touch(self, key: str) -> None:
        """Set `modified_s` to the file system's present; NotFoundError when the object is gone."""
        with self._at(key, "touch") as (folder, name):
            if not stat.S_ISREG(look(folder, name, key).st_mode):  # utime would touch a directory as well
                raise missing(key, self.url)
            os.utime(name, dir_fd=folder, follow_symlinks=False)

    def release(self, key: str) -> None:
        """Delete `key` and drop its lock, also where it cannot be deleted: then a gc sees that its holder is dead."""
        try:
            self.delete([key])
        finally:
            unlock(self._lock_name(key))

    def is_locked(self, key: str) -> bool | None:
        """True while a live process holds `key`, False when none does or it is missing, None without file locks."""
        try:
            with self._at(key, "probe the lock of") as (folder, name):
                return is_locked(folder, name, key)
        except NotFoundError:
            return False

    def clean(self) -> int:
        """Unlink the temporary files that nobody writes; bytes freed. Without file locks all of them are left."""
        freed_bytes = 0
        with self._failures("tmp/", "clean"), self._rooted() as root, suppress(*_GONE):
            temps = open_folder(root, "tmp", "tmp")
            with closing(temps):
                for name in filter(_TEMP_NAME.fullmatch, _names(temps)):
                    freed_bytes += clean_temp(temps, name)
        return freed_bytes

    def prepare(self) -> None:
        """Nothing may be here but what a `create` leaves that died or failed, our temporary files; and case counts."""
        with self._failures("/", "list"), self._rooted() as root:
            there = _entries(root)
            ours = there in ({}, {"tmp": True})
            if ours and there:
                with closing(open_folder(root, "tmp", "tmp")) as temps:
                    ours = all(map(_TEMP_NAME.fullmatch, _entries(temps)))
        if not ours:
            raise InvalidInputError(f"{self.url}: is not empty and no repository; choose an empty or a new place")
        with self._failures("tmp", "write"), self._rooted() as root, self._temps(root), suppress(FileNotFoundError):
            os.stat("TMP", dir_fd=root, follow_symlinks=False)
            raise CapabilityError(
                f"{self.url}: the file system takes 'tmp' and 'TMP' for one name, expected two: runs 'a' and 'A' "
                "would share their records; put the repository where names differ by case (ext4, xfs, btrfs, zfs)"
            )

    @contextmanager
    def sandbox(self) -> Iterator[LocalStore]:
        """A store in a folder whose name begins with a dot, so that no listing shows it; removed at the end."""
        with self._failures("/", "write"):
            folder = tempfile.mkdtemp(prefix=".snapstore-trial-", dir=self._root)
        try:
            yield LocalStore(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # it follows no links

    # --- writing ---

    def _publish(self, key: str, data: Buffer, *, held: bool) -> None:
        check_key(key)
        view = byte_view(data)
        *above, name = key.split("/")
        with self._failures(key, "write"), self._rooted() as root, ExitStack() as opened:
            folder = opened.enter_context(closing(self._made_levels(root, above)))
            temps = opened.enter_context(self._temps(root))
            fd, temp = open_temp(temps)
            kept = False
            try:
                _write_all(fd, view)
                os.fsync(fd)
                self._link(key, fd, (temps, temp), (folder, name))
                _fsync_directory(folder, key)
                if held:
                    keep_locked(fd, self._lock_name(key))
                    kept = True
            finally:
                drop_temp(None if kept else fd, temps, temp)

    def _link(self, key: str, fd: int, temp: tuple[int, str], target: tuple[int, str]) -> None:
        """Give the finished file its name, or say who has it."""
        folder, name = target
        try:
            os.link(temp[1], name, src_dir_fd=temp[0], dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError as error:
            with suppress(FileNotFoundError):
                status = look(folder, name, key)
                if os.path.samestat(os.fstat(fd), status):
                    return  # a network file system did it, lost its reply and asked again
                if not stat.S_ISREG(status.st_mode):
                    raise StorageError(
                        f"{key} in {self.url}: expected a free name, found something that is no file, which no "
                        "snapstore made; remove it, then try again"
                    ) from error
            _fsync_directory(folder, key)
            raise taken(key, self.url) from error
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise CapabilityError(
                    f"{key} in {self.url}: cannot make a hard link ({_name(error)}), which create-only objects need; "
                    "put the repository on one file system that has hard links (ext4, xfs, btrfs, zfs, NFS)"
                ) from error
            raise

    @contextmanager
    def _temps(self, root: int) -> Iterator[int]:
        """A descriptor of the folder of temporary files, which is made if it is missing."""
        try:
            folder = open_folder(root, "tmp", "tmp")
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir("tmp", dir_fd=root)
            folder = open_folder(root, "tmp", "tmp")
        with closing(folder):
            yield folder

    def _made_levels(self, root: int, names: Sequence[str], *, make: bool = True) -> int:
        """Open a folder below the root; every level above it is there, and a power loss cannot take it.

        Raises:
            FileNotFoundError, NotADirectoryError: a level is missing, and not to be made.
        """
        folder = os.dup(root)
        for depth, name in enumerate(names):
            with closing(folder):
                shown = "/".join(names[: depth + 1])
                try:
                    inner = open_folder(folder, name, shown)
                except FileNotFoundError:
                    if not make:
                        raise
                    self._durable.pop(shown, None)  # a new folder may have the number of the one before
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder)
                    inner = open_folder(folder, name, shown)
                try:
                    found = identity(os.fstat(inner))
                    if self._durable.get(shown) != found:
                        _fsync_directory(folder, shown)
                        self._durable[shown] = found
                except BaseException:
                    os.close(inner)
                    raise
            folder = inner
        return folder

    # --- reading ---

    @contextmanager
    def _open(self, key: str) -> Iterator[tuple[int, int]]:
        """(descriptor, size in bytes) of an object."""
        with self._at(key, "read") as (folder, name):
            fd = open_file(folder, name, os.O_RDONLY, key)
            if fd is None:
                raise missing(key, self.url)
            try:
                yield fd, os.fstat(fd).st_size
            finally:
                os.close(fd)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._failures(prefix or "/", "list"), self._rooted() as root:
            for key, status, _ in self._walk(root, prefix):
                if status is None:
                    yield ObjectInfo(key, 0, math.inf)
                elif stat.S_ISREG(status.st_mode):
                    yield _info(key, status)
            # An unmount in mid-listing makes every directory look vanished; less than there is must not pass for all.
            if self._root_identity() != identity(os.fstat(root)):
                raise StorageError(f"{self.url}: replaced or unmounted while it was listed; mount it and try again")

    def _walk(self, root: int, prefix: str) -> Iterator[tuple[str, os.stat_result | None, int]]:
        """(key, status, descriptor of its folder) of files and directories below `prefix`; a stack, so that depth is no
        attack.

        No status of a file whose inode cannot be read. Of a directory that fails: nobody knows what is in it.

        Raises:
            SymbolicLinkError: there is a link.
        """
        pending, bad = [prefix], 0
        while pending:
            below = pending.pop()
            try:
                folder = open_below(root, below.split("/")[:-1])
            except _GONE:
                continue
            with closing(folder):
                for name in _names(folder):
                    if not below and name in RESERVED:
                        continue
                    key = below + name
                    status: os.stat_result | None
                    try:
                        status = look(folder, name, key)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        bad += 1
                        if bad > _MOST_BAD_INODES or not self._is_bad_file(error, folder, name):
                            raise
                        status = None
                    if status is not None and stat.S_ISDIR(status.st_mode) and key.count("/") < MAX_LEVELS - 1:
                        pending.append(f"{key}/")
                    yield key, status, folder

    def _is_bad_file(self, error: OSError, folder: int, name: str) -> bool:
        """Whether an error speaks of this one inode, and the folder says that it is a file's."""
        if error.errno not in _BAD_INODE:
            return False
        self._root_identity()  # a mount that is gone says the same of every file
        with closing(open_readable(folder)) as readable, os.scandir(readable) as scan:  # asks the file if it must
            return any(entry.name == name and entry.is_file(follow_symlinks=False) for entry in scan)

    # --- names and errors ---

    def _lock_name(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextmanager
    def _at(self, key: str, verb: str) -> Iterator[tuple[int, str]]:
        """(descriptor of the folder that an object lies in, its name there).

        Raises:
            NotFoundError: there is no such folder; and for a FileNotFoundError or NotADirectoryError of the caller.
        """
        check_key(key)
        *above, name = key.split("/")
        folder = -1
        try:
            root = self._open_root()
            try:
                folder = open_below(root, above)
            finally:
                os.close(root)
            yield folder, name
        except _GONE as error:
            raise missing(key, self.url) from error
        except OSError as error:
            raise self._failed(key, verb, error) from error
        finally:
            if folder != -1:
                os.close(folder)

    @contextmanager
    def _rooted(self) -> Iterator[int]:
        """A descriptor of the root for one operation; see `_open_root`."""
        with closing(self._open_root()) as root:
            yield root

    def _open_root(self) -> int:
        """Open the root; a missing one is a failed store, never an empty one.

        Raises:
            StorageError: it is missing, or another one than it was when it was pinned.
        """
        try:
            root = open_root(self._root)
        except _GONE as error:
            raise self._no_root() from error
        if self._pins and any(pin != identity(os.fstat(root)) for pin in tuple(self._pins)):
            os.close(root)
            raise StorageError(
                f"{self.url}: another folder lies here than when this began: its volume was unmounted or replaced; "
                "nothing was written here; mount the volume again, then try again"
            )
        return root

    def _root_identity(self) -> Identity:
        """Which folder the root is now."""
        try:
            status = self._root.stat()
        except _GONE as error:
            raise self._no_root() from error
        if not stat.S_ISDIR(status.st_mode):
            raise self._no_root()
        return identity(status)

    def _no_root(self) -> StorageError:
        return StorageError(f"{self.url}: expected a directory, found none; mount it, or make it with 'snapstore init'")

    @contextmanager
    def _failures(self, key: str, verb: str) -> Iterator[None]:
        """Turn an OSError into the error tree."""
        try:
            yield
        except OSError as error:
            raise self._failed(key, verb, error) from error

    def _failed(self, key: str, verb: str, error: OSError) -> SnapstoreError:
        """An OSError in the error tree, with the name of the thing first."""
        if isinstance(error, SymbolicLinkError):
            return StorageError(
                f"{error.filename} in {self.url}: is a symbolic link, and nothing in a repository is reached through "
                "one; put what it leads to in its place, or remove it"
            )
        return _translate(f"{key} in {self.url}: cannot {verb}", error)


# --- files ---


def _make_root(root: Path) -> None:
    missing = [level for level in (root, *root.parents) if not level.exists()]
    for level in reversed(missing):
        with suppress(FileExistsError):
            level.mkdir()
        with closing(open_root(level.parent)) as above:
            _fsync_directory(above, str(level.parent))
    if not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    """The tag holds the time of the last change (ctime), which no copying or restoring tool can set."""
    return ObjectInfo(key, status.st_size, status.st_mtime, f"{status.st_ino:x}-{status.st_ctime_ns:x}")


def _names(folder: int) -> list[str]:
    """What is there and could be part of a key; nothing when the directory has vanished.

    At once, since one that is read while files in it are deleted may hide others; without their status, which of
    thousands takes megabytes.
    """
    try:
        with closing(open_readable(folder)) as readable, os.scandir(readable) as scan:
            return [entry.name for entry in scan if is_component(entry.name)]
    except _GONE:
        return []


def _entries(folder: int) -> dict[str, bool]:
    """Everything that is there, and whether it is a folder."""
    with closing(open_readable(folder)) as readable, os.scandir(readable) as scan:
        return {entry.name: entry.is_dir(follow_symlinks=False) for entry in scan}


def _fsync_directory(folder: int, shown: str) -> None:
    """Make the names in a folder durable.

    Args:
        shown: what errors call it.
    """
    with closing(open_readable(folder)) as readable:
        try:
            os.fsync(readable)
        except OSError as error:
            if error.errno in _NO_DIRECTORY_FSYNC:
                raise CapabilityError(
                    f"{shown}: cannot fsync a directory ({_name(error)}), so nothing in it survives a power loss; "
                    "put the repository on a file system that can (ext4, xfs, btrfs, zfs, NFS)"
                ) from error
            raise


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
