"""LMDB file: the one LMDB environment of a folder in this process, and the seal on its file.

In: items by key. Out: the same items, or none. LMDB's own rules hold here: one environment per process and path however
often a repository is opened, no use across a fork, no long readers, no writemap, never on a network file system.

Every transaction runs under the folder's lock, in place of LMDB's own locks. These identify readers by pid: if two
processes in different containers had the same pid and shared a cache, the second one could not read.

LMDB trusts its file, and a flipped bit in a page can kill the process. So after every write the XXH3-64 of the file's
used pages goes into the file `verified`, the seal, under the folder's lock. A data file that does not match its seal is
deleted before LMDB opens it. Every transaction first compares the file's size and times with those after the last one:
if another program has written to the open file, or cut it, and it does not match its seal, it is closed, deleted and
built again. Nothing protects from a program that writes during a transaction, or without a change of size and times:
LMDB may then end the process. Each value is stored with a checksum over its key and data, so that no value is taken for
that of another key. The folder counts as in use (storage/cache_dir.py) while the environment is open.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import ClassVar

import lmdb
import xxhash

from ..storage.base import ObjectStore
from ..storage.cache_dir import begin_use, cache_folder, end_use, is_used, remove_left_behind, usable_cache
from ..storage.local import LocalStore
from ..storage.locks import locked
from ..text import log
from ..threads import after_fork_in_child

SCHEMA = b"5"
DATABASES = (b"meta", b"records", b"manifests", b"damaged")
#: The file is read in small pieces: for each thread, C's allocator keeps the memory that the thread took once.
DIGEST_PIECE_BYTES = 128 * 1024
#: A process holds the lock, or that of the folder, for milliseconds, but a stopped one (SIGSTOP) for as long as it is
#: stopped. If the lock is not free after this time [s], the index is not used.
PATIENCE_S = 10.0


class Environment:
    """Named databases `meta`, `records`, `manifests` and `damaged` in a folder; any thread may call anything.

    Args:
        uuid: of the repository; items of another one are dropped.
        limit_bytes: size of the LMDB map; a put that does not fit raises lmdb.MapFullError.

    Raises:
        lmdb.Error, OSError: it cannot be used.
    """

    _open: ClassVar[dict[tuple[int, str], Environment]] = {}
    _open_lock = threading.Lock()

    def __init__(self, folder: Path, uuid: str, limit_bytes: int) -> None:
        self._folder, self._uuid, self._limit_bytes = folder, uuid, limit_bytes
        self._data = folder / "data.mdb"
        self._file: tuple[int, ...] | None = None  # as the last transaction left it (`_file_now`)
        self._users = 0
        self._name = self._name_of(folder)
        self._patience_s = PATIENCE_S
        self._lock = threading.RLock()  # `wipe` replaces the environment that other threads use
        self._use = begin_use(folder, PATIENCE_S)
        try:
            with self._locked():
                self._open_lmdb()
        except BaseException:
            end_use(self._use)
            raise

    @classmethod
    def open(cls, folder: Path, uuid: str, limit_bytes: int) -> Environment:
        """Return the environment of a folder, and count one user more.

        A process opens it once, and again if another folder has taken the place of the first.

        Raises:
            lmdb.Error, OSError: it cannot be used.
        """
        with cls._open_lock:
            environment = cls._open.get(cls._name_of(folder))
            if environment is None or not is_used(environment._use, folder):
                environment = cls(folder, uuid, limit_bytes)
            cls._open[environment._name] = environment
            environment._users += 1
            return environment

    @staticmethod
    def _name_of(folder: Path) -> tuple[int, str]:
        return os.getpid(), str(folder.resolve())

    def release(self) -> None:
        """Count one user less; when the last user is gone, close the environment."""
        with self._open_lock:
            self._users -= 1
            if self._users == 0:
                if self._open.get(self._name) is self:  # not by name: a link may lead elsewhere now
                    del self._open[self._name]
                with self._lock:  # another thread may read
                    self._env.close()
                end_use(self._use)

    def _open_lmdb(self) -> None:
        """Open the file if it matches its seal, else a new one; drop items of another repository or schema; seal it."""
        if not self._seal_holds():
            self._remove()
        self._env = lmdb.open(
            os.fsencode(self._folder),
            map_size=self._limit_bytes,
            max_dbs=4,
            lock=False,
            readahead=False,
            sync=False,
            metasync=False,
        )
        self._databases = {name: self._env.open_db(name) for name in DATABASES}
        with self._env.begin(write=True) as transaction:
            identity = SCHEMA + b" " + self._uuid.encode()
            if transaction.get(b"identity", db=self._databases[b"meta"]) != identity:
                for database in self._databases.values():
                    transaction.drop(database, delete=False)
                transaction.put(b"identity", identity, db=self._databases[b"meta"])
        self._seal()

    def _file_now(self) -> tuple[int, ...] | None:
        """Return (device, inode, size, times of the last changes) of the file that has the name now; None: no file."""
        try:
            status = self._data.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _follow(self) -> None:
        """Open the file again if another process has replaced it, or if another program has damaged it.

        A seal of a replaced file would not match the new one. LMDB would end this process (SIGBUS) at a page that was
        cut off, so the map is not touched before the file is known to match its seal.
        """
        now = self._file_now()
        if now == self._file or not self._users:  # without users this process may have another environment
            return
        is_ours = now is not None and self._file is not None and now[:2] == self._file[:2]
        if is_ours and self._seal_holds():
            self._file = now  # another process has put something
            return
        self._env.close()
        if is_ours:
            self._remove()
        self._open_lmdb()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file lock, so that no process reads a half-written data file or seal.

        Raises:
            TimeoutError: another process keeps it.
            FileNotFoundError: another folder has taken the place of ours: the cache was removed by hand.
        """
        with self._lock:
            patience_s, self._patience_s = self._patience_s, 0.0  # after a time-out, do not wait again
            with locked(self._folder / "lock", patience_s):
                self._patience_s = PATIENCE_S
                if not is_used(self._use, self._folder):
                    raise FileNotFoundError(errno.ENOENT, "its folder was removed or replaced", str(self._folder))
                yield

    def _digest(self, used_bytes: int) -> str:
        """Return the length and the XXH3-64 of the first bytes of the data file, as text."""
        state, room, left = xxhash.xxh3_64(), memoryview(bytearray(DIGEST_PIECE_BYTES)), used_bytes
        with self._data.open("rb", buffering=0) as file:
            while left > 0 and (count := file.readinto(room[:left])):
                state.update(room[:count])
                left -= count
        return f"{used_bytes} {state.hexdigest()}"

    def _seal(self) -> None:
        """Write the digest of the used pages into `verified`."""
        self._file = self._file_now()  # before the digest: what is written meanwhile is noticed
        used_bytes = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        seal, file = self._digest(used_bytes), self._folder / "verified"
        if file.exists() and file.read_text(errors="replace") == seal:
            return  # a refresh that finds nothing new writes nothing
        file.write_text(seal)

    def _seal_holds(self) -> bool:
        """Return whether the data file matches its seal."""
        if not self._data.exists():
            return False
        try:
            seal = (self._folder / "verified").read_text()
            used_bytes, status = int(seal.split()[0]), self._data.stat()
            holds = status.st_size >= used_bytes and self._digest(used_bytes) == seal
        except (OSError, ValueError, IndexError):
            holds = False
        if not holds:
            log.warning("index %s is damaged or unfinished; it is rebuilt from the objects", self._folder)
        return holds

    def _remove(self) -> None:
        for name in ("data.mdb", "verified"):
            (self._folder / name).unlink(missing_ok=True)

    def wipe(self) -> None:
        """Replace the file by an empty one."""
        with self._locked():
            self._env.close()
            self._remove()
            self._open_lmdb()

    def put(self, items: Mapping[bytes, Mapping[str, bytes | None]]) -> None:
        """Store all items of some databases in one transaction (None: remove); its seal reads all used pages."""
        with self._locked():
            self._follow()
            with self._env.begin(write=True) as transaction:
                for database, of_it in items.items():
                    for key, data in of_it.items():
                        if data is None:
                            transaction.delete(key.encode(), db=self._databases[database])
                            continue
                        value = self._checksum(database, key.encode(), data) + data
                        transaction.put(key.encode(), value, db=self._databases[database])
            self._seal()

    def get_all(self, database: bytes, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the items of some keys, except those whose checksum is wrong; many at once, since the lock is slow."""
        with self._locked():
            self._follow()
            with self._env.begin() as transaction:
                values = [(key, transaction.get(key.encode(), db=self._databases[database])) for key in keys]
        checked = ((key, self._checked(database, key.encode(), value)) for key, value in values if value is not None)
        return {key: data for key, data in checked if data is not None}

    def items(self, database: bytes, prefix: str = "") -> list[tuple[bytes, bytes]]:
        """Return all items whose keys begin with a prefix, copied so that no reader stays open."""
        first = prefix.encode()
        with self._locked():
            self._follow()
            with self._env.begin() as transaction:
                cursor = transaction.cursor(db=self._databases[database])
                found = cursor.iternext() if cursor.set_range(first) else ()
                values = list(takewhile(lambda item: item[0].startswith(first), found))
        checked = ((key, self._checked(database, key, value)) for key, value in values)
        return [(key, data) for key, data in checked if data is not None]

    def _checksum(self, database: bytes, key: bytes, data: bytes) -> bytes:
        """Return the checksum of a value with its repository and key: a gc deletes by what is cached under a key."""
        return xxhash.xxh3_64_digest(b"\0".join((self._uuid.encode(), database, key, data)))

    def _checked(self, database: bytes, key: bytes, value: bytes) -> bytes | None:
        """Return the data of a value; None if it was put under another key, or for another repository."""
        data = value[8:]
        return data if value[:8] == self._checksum(database, key, data) else None


def _renew_lock() -> None:
    Environment._open_lock = threading.Lock()  # a thread that the child lacks may hold the parent's


after_fork_in_child(_renew_lock)


#: The names of temporary indexes begin so.
TEMPORARY = "snapstore-index-"


def folder_for(store: ObjectStore, uuid: str) -> tuple[Path | None, bool]:
    """Return (the folder of the index, whether it is temporary): in the user's own cache, if that can be used.

    The folder is None if no temporary folder can be made.

    Raises:
        InvalidInputError: SNAPSTORE_CACHE_DIR is not an absolute path.
    """
    lasts = isinstance(store, LocalStore) or ("://" in store.url and not store.url.startswith("memory://"))
    if not lasts:
        with suppress(FileNotFoundError):
            cache_folder()  # a wrong setting is an error for every store
        return temporary_folder(store)
    cache, why = usable_cache()
    if cache is None:
        return temporary_folder(store, why)
    # A copy of a repository has its uuid, and records of its own: one index must not serve both.
    return cache / f"{uuid}-{shortened(store.place).hex()}", False


def temporary_folder(store: ObjectStore, why: str = "") -> tuple[Path | None, bool]:
    """Make a folder and return (the folder, True); return (None, False) if there is no place for it.

    Args:
        why: why the cache cannot be used, for a warning; "": it is not wanted.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        remove_left_behind(folder.parent, TEMPORARY)
    except OSError as error:
        reasons = "; ".join(filter(None, (why, f"a temporary folder cannot be made: {error.strerror or error}")))
        log.warning("%s; %s has no index: every start reads all records", reasons, store.url)
        return None, False
    if why:
        log.warning("%s; %s has a temporary index until it is closed", why, store.url)
    return folder, True


def shortened(text: str) -> bytes:
    """Return 16 bytes that stand for a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:16]  # a path need not be UTF-8
