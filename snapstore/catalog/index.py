"""Index: records and manifest headers, cached in LMDB; `refresh` looks at the store and gives a View.

Never the truth: the objects are. Records never change, so they are cached by key; every `refresh` lists the store,
reads only what is new and rules, and answers from memory. A bucket that was restored from a backup, or another one by
the same name, may show another record under a known key: so each is cached with the size, time and tag that the listing
gave it, and read again when they differ. An index that is missing, foreign, damaged, full or unwritable costs time,
nothing else. It is LMDB (environment.py), in the user's own cache, where it is bounded: never in the repository, since
what is read from it is believed, and an index that came with an archive would be a stranger's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import lmdb

from ..errors import FormatError, IntegrityError, InvalidInputError, NotFoundError, SnapstoreError, StorageError
from ..format import manifest, records
from ..format.keys import parse_record_key, record_key
from ..format.manifest import ManifestHeader
from ..format.records import ManifestRef, Snapshot
from ..storage.base import ObjectInfo, ObjectStore
from ..storage.cache_dir import cache_folder, refusal
from ..storage.local import LocalStore
from ..threads import Threads
from .history import View
from .lmdb_file import Environment

log = logging.getLogger("snapstore")

#: LMDB's map is fixed and sparse: growing one online is where the bugs are. A thousand snapshots take about 10 MB, so
#: this is enough for a hundred thousand; an index that does not fit is dropped and built again.
MAP_BYTES = 1024 * 1024 * 1024
#: Records or headers that are read at once: on S3 each is a round trip, and a thousand are 20 s one after the other.
READ_THREADS = 16
#: Records that are read before any is cached; a header names every pack, so of those fewer are held.
RECORDS_IN_MEMORY = 1000
HEADERS_IN_MEMORY = 256
#: Before a cached record: its size, time and tag (`_Record`), as the listing says.
_SEEN = struct.Struct("<qd16s")

T = TypeVar("T")
R = TypeVar("R")


JUST_MADE = -1.0
#: A store that takes longer for a small object is asked for several at a time [s].
SLOW_S = 0.003
#: A record that could not be read, and took longer to say so [s], is left alone for so many times as long, at most [s].
SLOW_FAILURE_S, RESTS, MOST_REST_S = 1.0, 10, 60.0


@dataclass(frozen=True, slots=True)
class _Record:
    """A record, and what the listing shows as long as it is this one."""

    snapshot: Snapshot
    size_bytes: int
    modified_s: float  # JUST_MADE: here, and not seen in a listing since
    tag: bytes  # half the SHA-256 of it, since a store's own may be of any length

    @staticmethod
    def listed(snapshot: Snapshot, info: ObjectInfo) -> _Record:
        return _Record(snapshot, info.size_bytes, info.modified_s, _shortened(info.tag))

    def is_listed_as(self, info: ObjectInfo) -> bool:
        if self.modified_s == JUST_MADE:
            return self.size_bytes == info.size_bytes
        return (self.size_bytes, self.modified_s, self.tag) == (info.size_bytes, info.modified_s, _shortened(info.tag))

    def pack(self, data: bytes) -> bytes:
        return _SEEN.pack(self.size_bytes, self.modified_s, self.tag) + data


def _shortened(tag: str) -> bytes:
    return hashlib.sha256(tag.encode()).digest()[:16]


@dataclass(frozen=True, slots=True)
class _Rest:
    """A record that took long to fail. Its error as text: the frames of an exception hold the state that is saved."""

    until_s: float  # time.monotonic
    info: ObjectInfo
    why: str


class Index:
    """The cache of one repository, and the way to a View. Safe to use from several threads."""

    def __init__(
        self, store: ObjectStore, uuid: str, folder: Path, *, limit_bytes: int = MAP_BYTES,
        digest_seed: int | None = None,
    ) -> None:  # fmt: skip
        self._store, self.uuid, self.folder, self._limit_bytes = store, uuid, folder, limit_bytes
        self.digest_seed = digest_seed  # of the repository, as it was opened
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._records: dict[str, _Record] = {}
        self._resting: dict[str, _Rest] = {}
        self._environment: Environment | None = None
        self._is_new = True  # nobody has looked yet
        try:
            self._environment = Environment.open(folder, uuid, limit_bytes)
            self._load()
        except (lmdb.Error, OSError) as error:
            log.warning("index %s cannot be used (%s); every listing reads the records themselves", folder, error)

    def _load(self) -> None:
        assert self._environment is not None
        for key, data in self._environment.items(b"records"):
            try:
                snapshot = self._read(key.decode(), data[_SEEN.size :])
                self._records[snapshot.key] = _Record(snapshot, *_SEEN.unpack_from(data))
            except (FormatError, IntegrityError, UnicodeDecodeError, struct.error):
                continue  # read again from the store

    def refresh(self, *, surely: bool = False) -> View:
        """List the store, read the records that are new or others than they were, and answer.

        Args:
            surely: what either of two listings shows counts, as records never go away; so too the first time, when
                nothing that is known here would tell that one lacks some.

        Raises:
            StorageError: the listing failed, or the store cannot be read at all; one record is in `View.unread`.
        """
        self.check_process()  # before the lock: a thread that a fork left behind may hold it
        with self._lock:
            vanished = set(self._records)
            listings = [self._store.list("snapshots/") for _ in range(2 if surely or self._is_new else 1)]
            # Of every id the revision that rules, its key, and how it is listed where that is news. No more of each:
            # there may be ten thousands, and every thread that ever looked keeps the memory that its look took.
            highest: dict[str, tuple[int, str, ObjectInfo | None]] = {}
            for info in chain.from_iterable(listings):
                record = self._records.get(info.key)
                if record is not None and record.is_listed_as(info):
                    name, revision = record.snapshot.id, record.snapshot.revision
                    news = info if record.modified_s == JUST_MADE else None
                else:
                    parsed = parse_record_key(info.key)
                    if parsed is None:
                        continue
                    (name, revision), news = parsed[2:], info
                vanished.discard(info.key)
                if name not in highest or (revision, info.key) > highest[name][:2]:
                    highest[name] = revision, info.key, news
            self._is_new = False
            ruling = {key for _, key, _ in highest.values()}  # the others are history, which nobody reads
            infos = {key: info for _, key, info in highest.values() if info is not None}
            known = {
                key for key, info in infos.items() if key in self._records and self._records[key].is_listed_as(info)
            }
            self._date(infos[key] for key in known)
            unread = self._still_resting(infos)
            wanted = iter(sorted(infos.keys() - known - unread.keys()))
            damaged: dict[str, str] = {}
            while keys := list(islice(wanted, RECORDS_IN_MEMORY)):
                fresh: dict[str, bytes] = {}
                for key, (data, took_s) in zip(keys, _in_threads(self._timed_record, keys), strict=True):
                    try:
                        if isinstance(data, SnapstoreError):
                            raise data
                        record = _Record.listed(self._read(key, data), infos[key])
                        self._records[key], fresh[key] = record, record.pack(data)
                    except (FormatError, IntegrityError, NotFoundError) as error:
                        damaged[key] = str(error)
                    except StorageError as error:
                        unread[key] = str(error)
                        if took_s > SLOW_FAILURE_S:
                            until = time.monotonic() + min(RESTS * took_s, MOST_REST_S)
                            self._resting[key] = _Rest(until, infos[key], unread[key])
                self._store_all(b"records", fresh)
            unknown = damaged.keys() | unread.keys()
            shown = [self._records[key].snapshot for key in ruling - unknown]
            gone = [self._records[key].snapshot for key in sorted(vanished)]
            return View(shown, damaged, gone, unread, self._seqs_of(unknown) if unknown else None)

    def _still_resting(self, infos: Mapping[str, ObjectInfo]) -> dict[str, str]:
        """Records that lately took long to fail, as they are listed now -> why: no look asks for them, since every save
        looks several times, and each would wait as long.

        Raises:
            StorageError: the store cannot be read at all.
        """
        now = time.monotonic()
        self._resting = {
            key: rest for key, rest in self._resting.items() if now < rest.until_s and infos.get(key) == rest.info
        }
        if self._resting:
            self._require_reads()
        return {key: rest.why for key, rest in self._resting.items()}

    def _seqs_of(self, unknown: Iterable[str]) -> dict[str, int]:
        """The seq, by id, of snapshots whose ruling record cannot be read: no revision changes it."""
        keys = {parsed[2]: (key, parsed) for key in unknown if (parsed := parse_record_key(key))}
        seqs = {r.snapshot.id: r.snapshot.seq for r in self._records.values() if r.snapshot.id in keys}
        for name, (key, (run, step, _, revision)) in keys.items():
            others = (record_key(run, step, name, other) for other in (revision - 1, 0) if other >= 0)
            for other in dict.fromkeys(others):
                if name not in seqs and other != key and isinstance(data := self._get_record(other), bytes):
                    with suppress(SnapstoreError):
                        seqs[name] = self._read(other, data).seq
        return seqs

    def _date(self, infos: Iterable[ObjectInfo]) -> None:
        """Records that were made here are listed for the first time: from now on others in their place are seen."""
        dated = {info.key: _Record.listed(self._records[info.key].snapshot, info) for info in infos}
        self._records |= dated
        self._store_all(
            b"records", {key: record.pack(records.encode(record.snapshot)) for key, record in dated.items()}
        )

    def _timed_record(self, key: str) -> tuple[bytes | SnapstoreError, float]:
        began = time.monotonic()
        return self._get_record(key), time.monotonic() - began

    def _get_record(self, key: str) -> bytes | SnapstoreError:
        """The bytes of a record, or what is wrong with it.

        Raises:
            StorageError: the store cannot be read at all.
        """
        try:
            return self._store.get(key, limit_bytes=records.MAX_OBJECT_BYTES)
        except (FormatError, IntegrityError, NotFoundError) as error:
            return error
        except StorageError as error:
            self._require_reads()
            return error

    def _require_reads(self) -> None:
        """Raise StorageError unless the store can be read: a listing may go on where reads do not."""
        with suppress(NotFoundError, FormatError, IntegrityError):
            self._store.get("config", limit_bytes=records.MAX_OBJECT_BYTES)

    @staticmethod
    def _read(key: str, data: bytes) -> Snapshot:
        return records.decode(data, Snapshot, key)

    def some_keys(self, count: int = 4) -> list[str]:
        """Keys of records that were known last."""
        with self._lock:
            return list(islice(reversed(self._records), count))

    def cached(self, key: str) -> Snapshot | None:
        """The record of a key as it was last read or made, whatever the store shows by now."""
        record = self._records.get(key)
        return record.snapshot if record else None

    def add(self, snapshot: Snapshot, headers: dict[str, bytes] | None = None) -> None:
        """Remember a record that this process has just created, and headers of its manifests by SHA-256."""
        data = records.encode(snapshot)
        record = _Record(snapshot, len(data), JUST_MADE, b"")  # to ask the store for its tag would cost a request
        with self._lock:
            self._records[snapshot.key] = record
            self._store_all(b"records", {snapshot.key: record.pack(data)})
            if headers:
                self._store_all(b"manifests", headers)

    def header(self, ref: ManifestRef) -> ManifestHeader:
        """A manifest's header, from the cache or the store.

        Raises:
            NotFoundError, IntegrityError, FormatError: the manifest is missing or damaged.
            StorageError: it cannot be read.
        """
        (header,) = self.headers([ref])
        if isinstance(header, SnapstoreError):
            raise header
        return header

    def headers(self, refs: Iterable[ManifestRef]) -> Iterator[ManifestHeader | SnapstoreError]:
        """Every header in turn, or what is wrong with it; those that are not cached are read several at a time.

        Raises:
            StorageError: the store failed.
        """
        self.check_process()
        left = iter(refs)
        while some := list(islice(left, HEADERS_IN_MEMORY)):
            found: dict[str, bytes | SnapstoreError] = {}
            missing: dict[str, ManifestRef] = {}
            for ref in some:
                data = self._cached(ref)
                if data is None:
                    missing[ref.sha256] = ref
                else:
                    found[ref.sha256] = data
            read = dict(zip(missing, _in_threads(self._read_header, list(missing.values())), strict=True))
            self._store_all(b"manifests", {name: data for name, data in read.items() if isinstance(data, bytes)})
            found |= read
            for ref in some:
                header = found[ref.sha256]
                yield header if isinstance(header, SnapstoreError) else _proven(header, ref)

    def _read_header(self, ref: ManifestRef) -> bytes | SnapstoreError:
        """The bytes of a manifest's header, or what is wrong with it."""
        try:
            data = manifest.read_header(self._store, ref.key, ref.size_bytes)
            manifest.proven_header(data, ref)  # one that is not is not cached: it may be mended in the store
            return data
        except (FormatError, IntegrityError, NotFoundError) as error:
            return error
        except StorageError as error:
            self._require_reads()
            return error

    def _cached(self, ref: ManifestRef) -> bytes | None:
        """A manifest's header from the cache, if it proves to be that; a cache that cannot be read has none."""
        environment = self._environment  # another thread may close it
        try:
            data = environment.get(b"manifests", ref.sha256) if environment else None
            return data if data is not None and manifest.is_header_of(data, ref) else None
        except (lmdb.Error, OSError) as error:
            log.warning("index %s cannot be read (%s); the objects are read instead", self.folder, error)
            return None

    def rebuild(self, *, keep_unreadable: bool = False) -> View:
        """Forget everything cached and read it anew from the objects.

        Args:
            keep_unreadable: but what is known of listed records that cannot be read: `repair` writes it again.
        """
        self.check_process()
        with self._lock:
            before, self._records = self._records, {}
            self._resting.clear()
            try:
                if self._environment is None:
                    self._environment = Environment.open(self.folder, self.uuid, self._limit_bytes)
                self._environment.wipe()
            except (lmdb.Error, OSError) as error:
                log.warning("index %s cannot be rebuilt: %s", self.folder, error)
            view = self.refresh()
            if keep_unreadable:  # under a size that no listing shows, so that none of them is believed unread
                unknown = before.keys() & (view.damaged.keys() | view.unread.keys())
                kept = {key: replace(before[key], size_bytes=-1) for key in unknown}
                self._records |= kept
                self._store_all(
                    b"records", {key: record.pack(records.encode(record.snapshot)) for key, record in kept.items()}
                )
            return view

    def _store_all(self, database: bytes, items: dict[str, bytes]) -> None:
        """Cache; a cache that cannot be written is no failure."""
        environment = self._environment  # another thread may close it
        if not items or environment is None:
            return
        try:
            try:
                environment.put(database, items)
            except lmdb.MapFullError:
                log.warning("index %s does not fit its %d bytes; it is begun anew", self.folder, self._limit_bytes)
                environment.wipe()
                known = {key: parse_record_key(key) for key in self._records}
                ruling = _highest({key: parsed for key, parsed in known.items() if parsed is not None})
                kept = {key: self._records[key] for key in ruling}
                environment.put(
                    b"records", {key: record.pack(records.encode(record.snapshot)) for key, record in kept.items()}
                )
                if database != b"records":
                    environment.put(database, items)
        except (lmdb.Error, OSError) as error:
            log.warning("index %s cannot be written (%s); it will be caught up later", self.folder, error)

    def check_process(self) -> None:
        """Raise InvalidInputError in a forked child."""
        if os.getpid() != self._pid:
            raise InvalidInputError("this repository was opened before a fork; open it again in the child process")

    def close(self) -> None:
        """Let go of the environment; the last of the process closes it."""
        if os.getpid() != self._pid:  # before the lock: the fork may have left it held
            return
        with self._lock:
            self._release()

    def _release(self) -> None:
        if self._environment is not None:
            self._environment.release()
        self._environment = None


def _in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`function` of every item, several at a time where the first ones show that each takes long."""
    began = time.monotonic()
    done = [function(item) for item in items[:2]]
    rest = items[2:]
    if not rest or time.monotonic() - began < 2 * SLOW_S:  # a pool of threads would cost more, a tenth of a second
        return done + [function(item) for item in rest]
    with Threads(min(READ_THREADS, len(rest))) as threads:
        return done + threads.start(function, rest)()


def _proven(data: bytes, ref: ManifestRef) -> ManifestHeader | SnapstoreError:
    try:
        return manifest.proven_header(data, ref)
    except (FormatError, IntegrityError) as error:
        return error


def _highest(listed: Mapping[str, tuple[str, int, str, int]]) -> set[str]:
    """The key of the highest revision of every id."""
    highest: dict[str, tuple[int, str]] = {}
    for key, (_, _, snapshot_id, revision) in listed.items():
        highest[snapshot_id] = max(highest.get(snapshot_id, (-1, "")), (revision, key))
    return {key for _, key in highest.values()}


def remove(folder: Path) -> None:
    """Delete an index folder that no process uses."""
    shutil.rmtree(folder, ignore_errors=True)


def folder_for(store: ObjectStore, uuid: str) -> tuple[Path, Path | None]:
    """Where the index lies: in the user's own cache; and what to remove on closing, if that cannot be used."""
    lasts = isinstance(store, LocalStore) or ("://" in store.url and not store.url.startswith("memory://"))
    cache = cache_folder()  # a bad setting is an error for every store
    why = refusal(cache) if lasts else "is not for stores that end with this process"
    if not why:
        # A copy of a repository has its uuid, and records of its own: one index must not serve both.
        return cache / f"{uuid}-{hashlib.sha256(store.place.encode()).hexdigest()[:32]}", None
    if lasts:
        log.warning("the cache %s %s; until it is closed %s has a temporary index", cache, why, store.url)
    temporary = Path(tempfile.mkdtemp(prefix="snapstore-index-"))
    return temporary, temporary
