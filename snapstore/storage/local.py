"""A directory as an object store: the key is the path below the root.

In: keys and buffers. Out: files that are whole, durable and never change. Any thread may call anything. A forked child
may go on using a store, but never keeps the parent's locks. atomic_write.py writes the files.

Invariants, and what is lost without them:

- Below the root, no symbolic link is followed (folders.py). A link in place of a folder or an object is an error, also
  in a listing that describes it: if a user moves a folder elsewhere and leaves a link, a gc that does not see its
  snapshots must not delete their packs.
- Each operation opens the root once and works below that descriptor, so all of it happens in one place, whatever is
  mounted over the root meanwhile. While a place is `pinned`, every operation compares device and inode of the root with
  the pin; reads in `kept_open` do so when they open a file.
- `delete` unlinks the file before it drops the lock: a session that is listed and not locked looks dead.

Layout: `<root>/<key>`, and `<root>/tmp/<random>` for files being written. `<root>/index/` is ignored.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CapabilityError, NotFoundError, SnapstoreError, StorageError, lasting
from . import sandbox_folders
from .atomic_write import AtomicWriter, make_root, open_temps
from .base import (
    GET_LIMIT_BYTES,
    Buffer,
    GetRanges,
    KeyOnly,
    ObjectInfo,
    ObjectStore,
    byte_view,
    check_key,
    check_limit,
    check_prefix,
    key_alone,
    not_empty,
    not_found,
    range_memory,
    too_short,
)
from .folders import (
    GONE,
    Identity,
    SymbolicLinkError,
    closing,
    folder_names,
    identity,
    names_in,
    open_below,
    open_file,
    open_folder,
    open_readable,
    open_root,
    stat_entry,
    walk,
)
from .kept_open import KeptOpen
from .locks import clean_temp, drop_temp, is_locked, open_temp, unlock
from .os_errors import is_unreadable, translate

_READ_PIECE_BYTES = 1024 * 1024 * 1024  # one read(2) moves less than 2 GiB

_MOST_BAD_INODES = 64  # more than this mean a failing disk, where each may take half a minute
_TEMP_NAME = re.compile(r"[0-9a-f]{32}")


class LocalStore(ObjectStore):
    """An `ObjectStore` in a directory of a file system with hard links and fsync.

    Args:
        root: The directory. Nothing is read or written before the first call.
        create: Make a missing directory, durably.

    Attributes:
        root: The absolute path of the directory.
    """

    puts_at_once = 2

    def __init__(self, root: str | os.PathLike[str], *, create: bool = False) -> None:
        self.root = Path(os.fspath(root)).absolute()
        self._pins: list[Identity] = []
        self.url = str(self.root)
        self._writer = AtomicWriter(self.url)
        if create:
            with self._failures("store", "create"):
                make_root(self.root)
        self.place = os.path.realpath(self.root)  # the same through every link to it

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Raise in every operation once the path leads to another folder; see `ObjectStore.pinned`."""
        with self._failures("/", "open"):
            pin = self._root_identity()
        self._pins.append(pin)
        try:
            yield
        finally:
            self._pins.remove(pin)

    def put(self, key: str, data: Buffer) -> None:
        """Create `key` durably; see `ObjectStore.put`.

        Raises:
            CapabilityError: The file system has no hard links, or cannot fsync a directory.
        """
        self._create(key, data, lock=False)

    def lock(self, key: str, data: Buffer) -> None:
        """Create `key`, locked until `release` or the end of this process, however it ends."""
        self._create(key, data, lock=True)

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        """Return all bytes of `key`; see `ObjectStore.get`."""
        with self._open(key) as (fd, size_bytes):
            check_limit(key, self.url, size_bytes, limit_bytes)
            data = _read(fd, size_bytes)
        if len(data) != size_bytes:
            raise too_short(key, self.url, 0, size_bytes, len(data))
        return data

    def get_range(self, key: str, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        """Return a range of `key`; see `ObjectStore.get_range`. The size is checked before memory is allocated."""
        with self._open(key) as opened:
            return self._read_range(opened, key, offset, length, into)

    @contextmanager
    def kept_open(self) -> Iterator[GetRanges]:
        """Yield a function that keeps files open; see `ObjectStore.kept_open`."""
        files = KeptOpen(self._open_file, self._read_range)
        try:
            yield files.get_ranges
        finally:
            files.close()

    def _read_range(
        self, opened: tuple[int, int], key: str, offset: int, length: int, into: memoryview | None
    ) -> memoryview:
        fd, size_bytes = opened
        view = range_memory(key, self.url, offset, length, size_bytes, into)
        done = 0
        while done < length:
            try:
                got = os.preadv(fd, [view[done : done + _READ_PIECE_BYTES]], offset + done)
            except OSError as error:
                raise self._failed(key, "read", error) from error
            if got == 0:
                raise too_short(key, self.url, offset, length, offset + done)
            done += got
        return view

    def stat(self, key: str) -> ObjectInfo:
        """Return size, time and tag of `key`; a file whose inode cannot be read has size 0 and the present time."""
        with self._at(key, "stat") as (folder, name):
            try:
                status = stat_entry(folder, name, key)
            except OSError as error:
                if not self._is_bad_file(error, folder, name):
                    raise
                return ObjectInfo(key, 0, self.now_s())
        if not stat.S_ISREG(status.st_mode):
            raise not_found(key, self.url)
        return _info(key, status)

    def list(self, prefix: str, key_only: KeyOnly | None = None) -> Iterator[ObjectInfo]:
        """Yield every object under `prefix`; skip entries that vanish meanwhile, raise for any other failure.

        A file whose inode cannot be read is listed too, since its name exists: with size 0, which no object of a
        repository has, and with an infinite time, so that nothing takes it for old. Reading it fails.
        """
        check_prefix(prefix)
        return self._list(prefix, key_only)

    def delete(self, keys: Iterable[str]) -> None:
        """Unlink every key: needs no free space, and may be undone by a power loss.

        Folders below the first level are removed if this leaves them empty; a put makes them again.
        """
        folders: set[str] = set()
        for key in keys:
            with suppress(NotFoundError), self._at(key, "delete") as (folder, name), suppress(IsADirectoryError):
                os.unlink(name, dir_fd=folder)
                self._writer.end_doubt(key)
                folders.add(key.rpartition("/")[0])
            unlock(self._lock_name(key))  # after the unlink: nothing sees a live session without its lock
        for name in sorted(folders):
            if "/" in name:
                with suppress(SnapstoreError, OSError), self._at(name, "remove") as (above, last):
                    os.rmdir(last, dir_fd=above)  # fails if it is not empty

    def now_s(self) -> float:
        """Return the time that the file system gives a new file now [s since the epoch].

        On a network file system this is the server's clock. If nothing can be written (a full disk, a read-only mount),
        this host's clock is used: both agree on a local disk, and safety never rests on a clock.
        """
        try:
            with self._rooted() as root, open_temps(root) as temps:
                fd, temp = open_temp(temps)
                try:
                    return os.fstat(fd).st_mtime
                finally:
                    drop_temp(fd, temps, temp)
        except (OSError, StorageError):
            return time.time()

    def sync(self, prefix: str) -> None:
        """Fsync every folder from the root to `prefix` and below it; do nothing if it is missing.

        Raises:
            StorageError: An fsync failed, now or earlier, so what the listing shows may not be durable.
        """
        check_prefix(prefix)
        with self._failures(prefix or "/", "fsync"), self._rooted() as root:
            try:
                folder = self._writer.open_durable(root, prefix.split("/")[:-1], make=False)
            except GONE:
                return
            with closing(folder):
                self._writer.fsync_name(folder, prefix[: prefix.rfind("/") + 1])
            for below, folder in walk(root, pending := [prefix]):
                for name in folder_names(folder, below):
                    with suppress(*GONE), closing(open_folder(folder, name, below + name)) as inner:
                        self._writer.fsync_name(inner, f"{below}{name}/")
                    pending.append(f"{below}{name}/")

    def touch(self, key: str) -> None:
        """Set `modified_s` to the file system's present time; see `ObjectStore.touch`."""
        with self._at(key, "touch") as (folder, name):
            if not stat.S_ISREG(stat_entry(folder, name, key).st_mode):  # utime would also touch a folder
                raise not_found(key, self.url)
            os.utime(name, dir_fd=folder, follow_symlinks=False)

    def release(self, key: str) -> None:
        """Delete `key` and drop its lock, even if the delete fails: then a gc sees that the session has ended."""
        try:
            self.delete([key])
        finally:
            unlock(self._lock_name(key))

    def is_locked(self, key: str) -> bool | None:
        """Return whether a live process has the lock of `key`; False if it is missing, None without file locks."""
        try:
            with self._at(key, "probe the lock of") as (folder, name):
                return is_locked(folder, name, key)
        except NotFoundError:
            return False

    def clean(self) -> int:
        """Unlink temporary files that no process writes; return the bytes freed. Without file locks, unlink none."""
        freed_bytes = 0
        with self._failures("tmp/", "clean"), self._rooted() as root, suppress(*GONE):
            temps = open_folder(root, "tmp", "tmp")
            with closing(temps):
                for name in filter(_TEMP_NAME.fullmatch, names_in(temps)):
                    freed_bytes += clean_temp(temps, name)
        return freed_bytes

    def prepare(self) -> None:
        """Require an empty directory on a case-sensitive file system.

        Temporary files and sandboxes of ours may be here: a `create` or `doctor` that died leaves them.
        """
        with self._failures("/", "list"), self._rooted() as root:
            there = {name: kind for name, kind in _entries(root).items() if not sandbox_folders.NAME.fullmatch(name)}
            ours = there in ({}, {"tmp": True})
            if ours and there:
                with closing(open_folder(root, "tmp", "tmp")) as temps:
                    ours = all(map(_TEMP_NAME.fullmatch, _entries(temps)))
        if not ours:
            raise not_empty(self.url, there, "choose an empty or a new place")
        with self._failures("tmp", "write"), self._rooted() as root, open_temps(root), suppress(FileNotFoundError):
            os.stat("TMP", dir_fd=root, follow_symlinks=False)
            raise CapabilityError(
                f"{self.url}: the file system takes 'tmp' and 'TMP' for one name, expected two: runs 'a' and 'A' "
                "would share their records; use a case-sensitive file system (ext4, xfs, btrfs, zfs)"
            )

    @contextmanager
    def sandbox(self) -> Iterator[LocalStore]:
        """Yield a store in a new folder, removed at the end; its name begins with a dot, so no listing shows it."""
        with self._failures("/", "write"):
            folder = sandbox_folders.make(self.root)
        try:
            yield LocalStore(folder)
        finally:
            sandbox_folders.remove(folder)

    # --- writing ---

    def _create(self, key: str, data: Buffer, *, lock: bool) -> None:
        check_key(key)
        view = byte_view(data)
        with self._failures(key, "write"), self._rooted() as root:
            self._writer.create(root, key, view, self._lock_name(key) if lock else None)

    # --- reading ---

    @contextmanager
    def _open(self, key: str) -> Iterator[tuple[int, int]]:
        """Yield (descriptor, size in bytes) of an object."""
        fd, size_bytes = self._open_file(key)
        with closing(fd), self._failures(key, "read"):
            yield fd, size_bytes

    def _open_file(self, key: str) -> tuple[int, int]:
        with self._at(key, "read") as (folder, name):
            fd = open_file(folder, name, os.O_RDONLY, key)
            if fd is None:
                raise not_found(key, self.url)
            try:
                return fd, os.fstat(fd).st_size
            except OSError:
                os.close(fd)
                raise

    def _list(self, prefix: str, key_only: KeyOnly | None) -> Iterator[ObjectInfo]:
        bad = 0
        with self._failures(prefix or "/", "list"), self._rooted() as root:
            for below, folder in walk(root, pending := [prefix]):
                names = names_in(folder, below)
                bare = key_only([below + name for name in names]) if key_only else ()
                for name in names:
                    if (key := below + name) in bare:
                        yield key_alone(key)
                        continue
                    try:
                        status = stat_entry(folder, name, key)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        bad += 1
                        if bad > _MOST_BAD_INODES or not self._is_bad_file(error, folder, name):
                            raise
                        yield ObjectInfo(key, 0, math.inf)
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(f"{key}/")
                    elif stat.S_ISREG(status.st_mode):
                        yield _info(key, status)
            # An unmount in mid-listing makes every folder look deleted; an incomplete listing must not look complete.
            if self._root_identity() != identity(os.fstat(root)):
                raise StorageError(f"{self.url}: replaced or unmounted while it was listed; mount it and try again")

    def _is_bad_file(self, error: OSError, folder: int, name: str) -> bool:
        """Return whether an error is about this one inode, and the folder lists it as a file."""
        if not is_unreadable(error):
            return False
        self._root_identity()  # a lost mount gives the same error for every file
        with closing(open_readable(folder)) as readable, os.scandir(readable) as scan:  # may stat the file
            return any(entry.name == name and entry.is_file(follow_symlinks=False) for entry in scan)

    # --- names and errors ---

    def _lock_name(self, key: str) -> str:
        return f"{self.root}/{key}"

    @contextmanager
    def _at(self, key: str, verb: str) -> Iterator[tuple[int, str]]:
        """Yield (descriptor of the folder that an object lies in, its name there).

        Raises:
            NotFoundError: There is no such folder, or the caller's block raises a FileNotFoundError or
                NotADirectoryError.
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
        except GONE as error:
            raise not_found(key, self.url) from error
        except OSError as error:
            raise self._failed(key, verb, error) from error
        finally:
            if folder != -1:
                os.close(folder)

    @contextmanager
    def _rooted(self) -> Iterator[int]:
        """Yield a descriptor of the root for one operation; see `_open_root`."""
        with closing(self._open_root()) as root:
            yield root

    def _open_root(self) -> int:
        """Open the root; a missing root is a failed store, never an empty one.

        Raises:
            StorageError: It is missing, or is not the folder that was pinned.
        """
        try:
            root = open_root(self.root)
        except GONE as error:
            raise StorageError(
                f"{self.url}: expected a directory, found none; mount it, or make it with 'snapstore init'"
            ) from error
        try:
            if self._pins and any(pin != identity(os.fstat(root)) for pin in tuple(self._pins)):
                raise StorageError(
                    f"{self.url}: this is another folder than at the start: its volume was unmounted or replaced; "
                    "nothing was written here; mount the volume again, then try again"
                )
        except BaseException:  # on a dead mount fstat may fail, although the open succeeded
            os.close(root)
            raise
        return root

    def _root_identity(self) -> Identity:
        """Return device and inode of the root as it is now; see `_open_root`."""
        with self._rooted() as root:
            return identity(stat_entry(root, ".", "/"))

    @contextmanager
    def _failures(self, key: str, verb: str) -> Iterator[None]:
        """Turn an OSError into an error of snapstore."""
        try:
            yield
        except OSError as error:
            raise self._failed(key, verb, error) from error

    def _failed(self, key: str, verb: str, error: OSError) -> SnapstoreError:
        """Return an OSError as an error of snapstore, with the name of the thing first."""
        if isinstance(error, SymbolicLinkError):
            return lasting(
                StorageError(
                    f"{error.filename} in {self.url}: is a symbolic link, which snapstore does not follow inside a "
                    "repository; put what it leads to in its place, or remove it"
                )
            )
        return translate(f"{self.url if key == '/' else f'{key} in {self.url}'}: cannot {verb}", error, self.root)


# --- files ---


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    """Return the ObjectInfo of a file; the tag has the change time (ctime), which no copying tool can set."""
    return ObjectInfo(key, status.st_size, status.st_mtime, f"{status.st_ino:x}-{status.st_ctime_ns:x}")


def _entries(folder: int) -> dict[str, bool]:
    """Return every name in a folder, and whether it is a folder itself."""
    with closing(open_readable(folder)) as readable, os.scandir(readable) as scan:
        return {entry.name: entry.is_dir(follow_symlinks=False) for entry in scan}


def _read(fd: int, size_bytes: int) -> bytes:
    """Return up to `size_bytes` from the start; fewer if the file ends."""
    pieces: list[bytes] = []
    done = 0
    while done < size_bytes:
        piece = os.pread(fd, min(size_bytes - done, _READ_PIECE_BYTES), done)
        if not piece:
            break
        pieces.append(piece)
        done += len(piece)
    return b"".join(pieces)  # one piece, the usual case, is not copied
