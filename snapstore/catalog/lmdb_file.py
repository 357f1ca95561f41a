"""Environment: the one LMDB environment of a folder in this process, and the seal on its file.

LMDB's own rules hold here: one environment per process and path however often a repository is opened, no use across a
fork, no long readers, no writemap, never on a network file system. LMDB trusts its file, and a flipped bit in a page
can kill the process; so behind every write the XXH3-64 of the file's used pages goes into `verified`, under a lock that
openers share, and a file that does not match it is built anew before LMDB sees it. Each value has a checksum of its own
with its key, so that none is taken for another's. The folder is in use (cache.py) as
long as the environment is open.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import lmdb
import xxhash

from ..storage.cache_dir import begin_use, end_use, is_used
from ..storage.locks import locked

log = logging.getLogger("snapstore")
SCHEMA = b"5"
#: What a thread takes to read a file of megabytes stays with it: C's allocator keeps it for that thread.
DIGEST_PIECE_BYTES = 128 * 1024
#: Others hold the lock for milliseconds, but one that was stopped until it goes on: then we do without the index [s].
PATIENCE_S = 10.0


class Environment:
    """Named databases `meta`, `records` and `manifests` in a folder; any thread may call anything.

    Args:
        uuid: of the repository; what the folder holds of another one is dropped.
        limit_bytes: of the map; a put that does not fit raises lmdb.MapFullError.

    Raises:
        lmdb.Error, OSError: it cannot be used.
    """

    _open: ClassVar[dict[tuple[int, str], Environment]] = {}
    _open_lock = threading.Lock()

    def __init__(self, folder: Path, uuid: str, limit_bytes: int) -> None:
        self._folder, self._uuid, self._limit_bytes = folder, uuid, limit_bytes
        self._users = 0
        self._name = self._name_of(folder)
        self._patience_s = PATIENCE_S
        self._lock = threading.RLock()  # `wipe` swaps the environment under the feet of other threads
        self._use = begin_use(folder)
        try:
            with self._locked():
                if not self._seal_holds():
                    self._remove()
                self._open_lmdb()
        except BaseException:
            end_use(self._use)
            raise

    @classmethod
    def open(cls, folder: Path, uuid: str, limit_bytes: int) -> Environment:
        """The environment of a folder; opened once a process, and anew if another folder has taken its place."""
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
        """One user less; the last closes."""
        with self._open_lock:
            self._users -= 1
            if self._users == 0:
                if self._open.get(self._name) is self:  # not by what a link leads to by now
                    del self._open[self._name]
                self._env.close()
                end_use(self._use)

    def _open_lmdb(self) -> None:
        self._env = lmdb.open(
            str(self._folder), map_size=self._limit_bytes, max_dbs=3, readahead=False, sync=False, metasync=False
        )
        self._env.reader_check()  # no page is used again as long as a reader stands that was killed
        self._databases = {name: self._env.open_db(name) for name in (b"meta", b"records", b"manifests")}
        with self._env.begin(write=True) as transaction:
            identity = SCHEMA + b" " + self._uuid.encode()
            if transaction.get(b"identity", db=self._databases[b"meta"]) != identity:
                for database in self._databases.values():
                    transaction.drop(database, delete=False)
                transaction.put(b"identity", identity, db=self._databases[b"meta"])
        self._file = self._file_now()
        self._seal()

    def _file_now(self) -> tuple[int, int]:
        """Which file lies there."""
        status = (self._folder / "data.mdb").stat()
        return status.st_dev, status.st_ino

    def _follow(self) -> None:
        """Go on with the file that another process has begun in place of ours, of which our seal would be none."""
        if self._users and self._file_now() != self._file:  # without users there may be another one in this process
            self._env.close()
            if not self._seal_holds():
                self._remove()
            self._open_lmdb()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The file lock that keeps a reader of `verified` away from a half-written index.

        Raises:
            TimeoutError: somebody keeps it.
            FileNotFoundError: another folder has taken the place of ours: the cache was removed by hand.
        """
        with self._lock:
            patience_s, self._patience_s = self._patience_s, 0.0  # none is left for who has waited in vain before
            with locked(self._folder / "lock", patience_s):
                self._patience_s = PATIENCE_S
                if not is_used(self._use, self._folder):
                    raise FileNotFoundError(errno.ENOENT, "its folder was removed or replaced", str(self._folder))
                yield

    def _digest(self, used_bytes: int) -> str:
        """XXH3-64 of the first bytes of the data file."""
        state, room, left = xxhash.xxh3_64(), memoryview(bytearray(DIGEST_PIECE_BYTES)), used_bytes
        with (self._folder / "data.mdb").open("rb", buffering=0) as file:
            while left > 0 and (count := file.readinto(room[:left])):
                state.update(room[:count])
                left -= count
        return f"{used_bytes} {state.hexdigest()}"

    def _seal(self) -> None:
        used_bytes = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        seal, file = self._digest(used_bytes), self._folder / "verified"
        if file.exists() and file.read_text(errors="replace") == seal:
            return  # a look that finds nothing new writes nothing
        file.write_text(seal)

    def _seal_holds(self) -> bool:
        data = self._folder / "data.mdb"
        if not data.exists():
            return False
        try:
            seal = (self._folder / "verified").read_text()
            used_bytes, status = int(seal.split()[0]), data.stat()
            holds = status.st_size >= used_bytes and self._digest(used_bytes) == seal
        except (OSError, ValueError, IndexError):
            holds = False
        if not holds:
            log.warning("index %s is damaged or unfinished; it is built anew from the objects", self._folder)
        return holds

    def _remove(self) -> None:
        for name in ("data.mdb", "lock.mdb", "verified"):
            (self._folder / name).unlink(missing_ok=True)

    def wipe(self) -> None:
        """Start again with an empty index."""
        with self._locked():
            self._env.close()
            self._remove()
            self._open_lmdb()

    def put(self, database: bytes, items: dict[str, bytes]) -> None:
        """Store all items in one transaction."""
        with self._locked():
            self._follow()
            with self._env.begin(write=True) as transaction:
                for key, data in items.items():
                    value = self._own(database, key.encode(), data) + data
                    transaction.put(key.encode(), value, db=self._databases[database])
            self._seal()

    def get(self, database: bytes, key: str) -> bytes | None:
        """One item."""
        with self._lock, self._env.begin() as transaction:
            value: bytes | None = transaction.get(key.encode(), db=self._databases[database])
        return None if value is None else self._opened(database, key.encode(), value)

    def items(self, database: bytes) -> list[tuple[bytes, bytes]]:
        """All items, copied out so that no reader stays open."""
        with self._lock, self._env.begin() as transaction:
            values = list(transaction.cursor(db=self._databases[database]))
        opened = ((key, self._opened(database, key, value)) for key, value in values)
        return [(key, data) for key, data in opened if data is not None]

    def _own(self, database: bytes, key: bytes, data: bytes) -> bytes:
        """What goes before a value: an XXH3-64 that is no other's, since a gc deletes by what is cached under a key."""
        return xxhash.xxh3_64_digest(b"\0".join((self._uuid.encode(), database, key, data)))

    def _opened(self, database: bytes, key: bytes, value: bytes) -> bytes | None:
        """The data of a value; None if it was put under another key, or into the index of another repository."""
        data = value[8:]
        return data if value[:8] == self._own(database, key, data) else None


def _renew_lock() -> None:
    Environment._open_lock = threading.Lock()  # the parent's may be held, by a thread that a child does not have


os.register_at_fork(after_in_child=_renew_lock)
