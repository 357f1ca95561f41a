"""Index: cache records and manifest headers in LMDB; `refresh` lists the store and returns a View.

In: the objects of a store. Out: a View, or manifest headers. The objects are the truth, never the index. Records never
change, so they are cached by key: every `refresh` lists the store, reads only records that are new and rule, and
answers from memory. A bucket that was restored from a backup, or another one by the same name, may show another record
under a known key. So each record is cached with the size, time and tag of the listing, and read again when they differ.

An index that is missing, foreign, damaged, full or unwritable costs time, nothing else, with one exception: another
program that writes into the open file at the wrong moment may end the process (lmdb_file.py). It also keeps the marks
of damaged snapshots, which only withhold choices (damage_marks.py). The index lies in the user's own cache, where its
size is bounded. It never lies in the repository: snapstore trusts its content, and anyone could have written an index
that came with an archive.
"""

from __future__ import annotations

import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import lmdb

from ..errors import DAMAGE, FormatError, IntegrityError, InvalidInputError, SnapstoreError, StorageError
from ..format import records
from ..format.keys import NAME, records_prefix
from ..format.manifests import manifest
from ..format.manifests.manifest import ManifestHeader
from ..format.records import COMMITTED, FORGOTTEN, Config, ManifestRef, Snapshot
from ..storage import progress
from ..storage.base import ObjectInfo, ObjectStore
from ..storage.cache_dir import shrink
from ..text import log
from ..threads import in_threads_if_slow
from .damage_marks import DamageMarks
from .gathering import Gathering
from .history import View, run_of
from .joined import Joined, repeated_by_pages, void_records
from .lmdb_file import Environment, folder_for, temporary_folder
from .pages import PageReader
from .record_listing import (
    JUST_MADE,
    KnownRecord,
    KnownRecords,
    copied,
    list_ruling,
    newest_of_runs,
    other_revisions,
    packed,
    repeated_ids,
)

#: LMDB's map is fixed and sparse, since growing one online is error-prone. A thousand snapshots take about 10 MB, so
#: this is enough for a hundred thousand; an index that does not fit is dropped and built again.
MAP_BYTES = 1024 * 1024 * 1024
#: Records that are read before any is cached; a header names every pack, so fewer headers are held.
RECORDS_IN_MEMORY = 1000
HEADERS_IN_MEMORY = 256

T = TypeVar("T")
R = TypeVar("R")


#: If the read of a record fails and takes longer than SLOW_FAILURE_S, the record is not read again for PAUSE_FACTOR
#: times as long, at most MAX_PAUSE_S.
SLOW_FAILURE_S, PAUSE_FACTOR, MAX_PAUSE_S = 1.0, 10, 60.0


@dataclass(frozen=True, slots=True)
class _Pause:
    """A record whose read failed slowly, with its error as text: an exception's frames would hold the saved state."""

    until_s: float  # time.monotonic
    info: ObjectInfo
    why: str


class Index:
    """The cache of one repository. Safe to use from several threads, not across a fork.

    Args:
        folder: None: what is cached stays in memory.
        limit_bytes: size of the LMDB map.
        temporary: `close` removes the folder.
        has_pages: whether records of the repository may be joined into pages.

    Attributes:
        pages: reads the pages of the repository.
        marks: the snapshots that are known to be damaged.
    """

    def __init__(
        self,
        store: ObjectStore,
        uuid: str,
        folder: Path | None,
        *,
        limit_bytes: int = MAP_BYTES,
        temporary: bool = False,
        has_pages: bool = False,
    ) -> None:
        self._store, self.uuid, self.folder, self._limit_bytes = store, uuid, folder, limit_bytes
        self._pid, self.temporary = os.getpid(), temporary
        self._lock = threading.RLock()
        self._records = KnownRecords()
        self.marks = DamageMarks(lambda changed: self._store_all({b"damaged": changed}))
        self._pauses: dict[str, _Pause] = {}
        self._environment: Environment | None = None
        self._noted: set[str] = set()  # keys of records of which the cache does not know it (`_note_listing`)
        self._listed: set[str | None] = set()  # the runs that were listed; None: all of them at once
        self._loaded: set[str] = set()  # the prefixes whose cached records are in memory
        self._gathering, self.pages = Gathering(), PageReader(store, folder, has_pages=has_pages)
        if folder is None:
            return
        try:
            self._environment = Environment.open(folder, uuid, limit_bytes)
            for key, data in self._environment.items(b"damaged"):
                self.marks.load(key.decode(errors="replace"), data)
        except (lmdb.Error, OSError) as error:
            log.warning("index %s cannot be used (%s); every listing reads the records themselves", folder, error)

    def _load(self, prefix: str) -> None:
        """Load the cached records under a prefix into memory, where those that are there already are newer."""
        environment = self._environment  # another thread may close it
        if environment is None or not self._loaded.isdisjoint((prefix, records_prefix())):
            return
        items: list[tuple[bytes, bytes]] = []
        try:
            items = environment.items(b"records", prefix)
            self._loaded.add(prefix)
        except FileNotFoundError:
            self._open_again(environment)
        except (lmdb.Error, OSError) as error:
            if self._environment is environment:
                log.warning("index %s cannot be read (%s); the records are read instead", self.folder, error)
        for key, data in items:
            try:
                record = KnownRecord.unpack(data, key.decode())
            except (FormatError, IntegrityError, UnicodeDecodeError, struct.error):
                continue  # read again from the store
            if record.snapshot.key not in self._records:
                self._records[record.snapshot.key] = record

    @contextmanager
    def one_write(self) -> Iterator[None]:
        """Write what a block caches once, at its end: each write digests the whole file.

        See gathering.py. If the process dies before, the cache lacks it.
        """
        try:
            with self._gathering.gather():
                yield
        finally:
            self._store_all({})

    def refresh(self, run: str | None = None, *, list_twice: bool = False) -> View:
        """List the store, read the records that are new or changed, and return a View.

        Args:
            run: list only the records of this run. The View answers questions about this run alone.
            list_twice: list twice. A record counts as listed if either listing shows it, since records are never
                deleted. The first refresh always does so, of all runs or of a run: no known records yet show that a
                listing lacks some.

        Raises:
            StorageError: the listing failed, or the store cannot be read at all. If one record cannot be read, it is
                in `View.unread` instead.
        """
        self.check_process()  # before the lock: a thread that a fork left behind may hold it
        with self._lock:
            prefix = records_prefix(run)
            self._load(prefix)
            times = 2 if list_twice or self._listed.isdisjoint((None, run)) else 1
            ruling, gone = list_ruling(self._store, self._records, prefix, times)
            joined = self.pages.read(run)  # after the loose records
            gone -= self._drop_joined(gone, joined)
            vanished = [copied(self._records[key].snapshot) for key in sorted(gone)]
            self._listed.add(run)
            repeated = repeated_ids(self._store, ruling) | repeated_by_pages(ruling, joined)
            left_out = repeated.keys() | self._records.set_void(prefix, void_records(ruling, joined))
            ruling = {key: info for key, info in ruling.items() if key not in left_out}
            infos = {key: info for key, info in ruling.items() if info is not None}
            known = {
                key for key, info in infos.items() if key in self._records and self._records[key].is_listed_as(info)
            }
            self._note_listing(infos[key] for key in known)
            paused = self._paused(prefix, infos)
            damaged, unread = self._read_records({key: infos[key] for key in infos.keys() - known - paused.keys()})
            if damaged and void_records(damaged, self.pages.read(run)):  # joined, and deleted, since they were listed
                return self.refresh(run, list_twice=list_twice)
            unknown = damaged.keys() | (unread := paused | unread).keys()
            others = other_revisions(self._records, unknown, self._get_record) if unknown else None
            shown = [self._records[key].snapshot for key in ruling.keys() - unknown]
            return View(shown, damaged, vanished, unread, others, repeated, self._store)._decide(joined, run)

    def drop_joined(self, run: str) -> None:
        """Drop the records of a run that pages cover, as far as they were read: they were deleted."""
        with self._lock:
            self._drop_joined([*self._records.under(records_prefix(run))], self.pages.known(run))
            self._records.set_void(records_prefix(run), set())

    def loose(self, run: str, *, void_too: bool = False) -> int:
        """Return how many snapshots of a run this process knows whose records are loose; 0: none can be joined.

        Args:
            void_too: count those as well whose loose records are in a page already, and could not be deleted.
        """
        with self._lock:
            return self.pages.exist and self._records.count(run, void_too=void_too)

    def _drop_joined(self, keys: Iterable[str], joined: Mapping[str, Joined]) -> set[str]:
        """Drop the records among these that pages cover, and return their keys."""
        void = void_records(keys, joined)
        self._records.drop(void)
        self._noted -= void
        self._store_all({b"records": dict.fromkeys(void)})
        return void

    def find(self, ref: str, states: tuple[str, ...] = (COMMITTED, FORGOTTEN)) -> Snapshot:
        """Return `View.resolve` of a reference as of now; list only the records of the run that it names.

        Raises:
            SnapstoreError: see `View.resolve`.
            StorageError: see `refresh`.
        """
        return self.refresh_for(run_of(ref), states).resolve(ref, states)

    def refresh_for(self, run: str | None, states: tuple[str, ...] | None = None) -> View:
        """Return `refresh` of a run; of all runs if it has no snapshot in some states (None: any).

        So an error can name the runs that there are.
        """
        if run is None or not NAME.fullmatch(run):
            return self.refresh()
        view = self.refresh(run)
        return view if view.has(run, states) else self.refresh()

    def _read_records(self, infos: Mapping[str, ObjectInfo]) -> tuple[dict[str, str], dict[str, str]]:
        """Read and cache records, given how they are listed.

        Returns:
            (key -> why, of damaged records), (key -> why, of records that could not be read).

        Raises:
            StorageError: the store cannot be read at all.
        """
        damaged: dict[str, str] = {}
        unread: dict[str, str] = {}
        names, step = sorted(infos), RECORDS_IN_MEMORY
        pieces = [names[first : first + step] for first in range(0, len(names), step)]
        is_work = len(pieces) > 1  # else the records of a restore would be all of its progress until it begins
        size = partial(_bytes_of, infos if is_work else {})
        for keys in progress.through(pieces, size):
            fresh: dict[str, bytes] = {}
            for key, (data, took_s) in zip(keys, in_threads_if_slow(self._timed_record, keys), strict=True):
                try:
                    if isinstance(data, SnapstoreError):
                        raise data
                    record = KnownRecord.from_listing(records.decode(data, Snapshot, key), infos[key])
                    self._records[key], fresh[key] = record, record.pack(data)
                except DAMAGE as error:
                    damaged[key] = str(error)
                except StorageError as error:
                    unread[key] = str(error)
                    if took_s > SLOW_FAILURE_S:
                        until_s = time.monotonic() + min(PAUSE_FACTOR * took_s, MAX_PAUSE_S)
                        self._pauses[key] = _Pause(until_s, infos[key], unread[key])
            self._store_all({b"records": fresh})
        return damaged, unread

    def _paused(self, prefix: str, infos: Mapping[str, ObjectInfo]) -> dict[str, str]:
        """Return the records whose read failed slowly a short time ago, and that are listed as then: key -> why.

        They are not read now: a save refreshes several times, and each read would take as long.

        Args:
            prefix: of the listing.

        Raises:
            StorageError: the store cannot be read at all.
        """
        now = time.monotonic()
        self._pauses = {
            key: pause
            for key, pause in self._pauses.items()
            if now < pause.until_s and (infos.get(key) == pause.info or not key.startswith(prefix))
        }
        paused = {key: pause.why for key, pause in self._pauses.items() if key in infos}
        if paused:
            self._require_reads()
        return paused

    def _note_listing(self, infos: Iterable[ObjectInfo]) -> None:
        """Remember how records that this process made are listed, so that another record in their place is noticed.

        The cache learns it with the next record: each write looks at all of its pages.
        """
        noted = {info.key: KnownRecord.from_listing(self._records[info.key].snapshot, info) for info in infos}
        self._records.update(noted)
        self._noted |= noted.keys()

    def _packed_noted(self) -> dict[str, bytes]:
        return packed({key: self._records[key] for key in self._noted})

    def _timed_record(self, key: str) -> tuple[bytes | SnapstoreError, float]:
        """Return (`_get_record`, how long it took [s])."""
        began = time.monotonic()
        return self._get_record(key), time.monotonic() - began

    def _get_record(self, key: str) -> bytes | SnapstoreError:
        """Return the bytes of a record, or the error of reading it; raises as `_tried` does."""
        return self._tried(lambda: self._store.get(key, limit_bytes=records.MAX_OBJECT_BYTES))

    def _tried(self, read: Callable[[], bytes]) -> bytes | SnapstoreError:
        """Return the bytes that a read of one object gives, or its error.

        Raises:
            StorageError: the store cannot be read at all.
        """
        try:
            return read()
        except DAMAGE as error:
            return error
        except StorageError as error:
            self._require_reads()
            return error

    def _require_reads(self) -> None:
        """Raise StorageError unless the store can be read: listings may succeed although reads fail."""
        with suppress(*DAMAGE):
            self._store.get("config", limit_bytes=records.MAX_OBJECT_BYTES)

    def newest_elsewhere(self, run: str, most: int) -> Iterator[Snapshot]:
        """Yield the newest committed snapshot, by its step, of other runs; the run that was saved last comes first.

        One listing shows the records, and at most `most` that are not cached are read. One that is missed costs only
        space.

        Raises:
            StorageError: the listing failed, or the store cannot be read at all.
        """
        for infos in newest_of_runs(self._store.list(records_prefix(None)), run):
            for info in infos:
                with self._lock:
                    self._load(records_prefix(info.key.split("/")[1]))
                    known = self._records.get(info.key)
                    if known is None or not known.is_listed_as(info):
                        most -= 1
                        if most < 0:
                            return
                        known = self._read_record(info)
                if known is not None and known.snapshot.state == records.COMMITTED:
                    yield copied(known.snapshot)
                    break

    def _read_record(self, info: ObjectInfo) -> KnownRecord | None:
        """Read a listed record; return None if it is damaged, or cannot be read now."""
        pause = self._pauses.get(info.key)
        if pause is not None and time.monotonic() < pause.until_s:
            return None
        damaged, unread = self._read_records({info.key: info})
        return None if damaged or unread else self._records[info.key]

    def some_keys(self, count: int = 4) -> list[str]:
        """Return the keys of the `count` records that were cached last."""
        with self._lock:
            if not self._records:
                self._load(records_prefix())
            return [*islice(reversed(self._records), count), *self.pages.some_keys(count)]

    def known(self, run: str) -> View:
        """Return what this process knows of a run, without a listing: it may be out of date."""
        with self._lock:
            joined = self.pages.known(run)
            ruling = {s.key: s for s in self._records.ruling(run)}
            left = [ruling[key] for key in ruling.keys() - void_records(ruling, joined)]
            return View(left, {}, [])._decide(joined, run)

    def cached(self, key: str) -> Snapshot | None:
        """Return the record that was last read or made under a key, whatever the store shows now; None: none was."""
        with self._lock:
            self._load(records_prefix())
            record = self._records.get(key)
        return record.snapshot if record else None

    def add(self, snapshot: Snapshot, headers: dict[str, bytes] | None = None) -> None:
        """Cache a record that this process has just created, and headers of its manifests by SHA-256."""
        data = records.encode(snapshot)
        # Its tag is not known: asking the store for it would cost a request.
        record = KnownRecord(copied(snapshot), len(data), JUST_MADE, b"")
        with self._lock:
            self._records[snapshot.key] = record
            self._store_all(
                {b"records": self._packed_noted() | {snapshot.key: record.pack(data)}, b"manifests": headers or {}}
            )
            self._noted.clear()

    def header(self, ref: ManifestRef) -> ManifestHeader:
        """Return a manifest's header, from the cache or the store.

        Raises:
            NotFoundError, IntegrityError, FormatError: the manifest is missing or damaged.
            StorageError: it cannot be read.
        """
        (header,) = self.headers([ref])
        if isinstance(header, SnapstoreError):
            raise header
        return header

    def headers(self, refs: Iterable[ManifestRef]) -> Iterator[ManifestHeader | SnapstoreError]:
        """Yield every header in turn, or its error. Headers that are not cached are read in parallel.

        Raises:
            StorageError: the store cannot be read at all.
        """
        self.check_process()
        left = iter(refs)
        while some := list(islice(left, HEADERS_IN_MEMORY)):
            found: dict[str, bytes | SnapstoreError] = {**self._cached_headers(some)}
            missing = {ref.sha256: ref for ref in some if ref.sha256 not in found}
            read = dict(zip(missing, in_threads_if_slow(self._get_header, list(missing.values())), strict=True))
            self._store_all({b"manifests": {name: data for name, data in read.items() if isinstance(data, bytes)}})
            found |= read
            for ref in some:
                header = found[ref.sha256]
                yield header if isinstance(header, SnapstoreError) else manifest.header_or_error(header, ref)

    def drop_headers(self, keys: Iterable[str]) -> None:
        """Drop the headers of the manifests among some keys: these were deleted."""
        names = [key.rpartition("/")[2] for key in keys if key.startswith("manifests/")]
        self._store_all({b"manifests": dict.fromkeys(names)})

    def _get_header(self, ref: ManifestRef) -> bytes | SnapstoreError:
        """Return the bytes of a manifest's header, or the error of reading it; raises as `_tried` does."""

        def read() -> bytes:
            data = manifest.read_header(self._store, ref.key, ref.size_bytes)
            manifest.proven_header(data, ref)  # a wrong one is not cached: it may be repaired in the store
            return data

        return self._tried(read)

    def _cached_headers(self, refs: Sequence[ManifestRef]) -> dict[str, bytes]:
        """Return the cached bytes of the headers of manifests, by SHA-256, as far as they match their references."""
        environment = self._environment  # another thread may close it
        found = self._gathering.get_all(b"manifests", [ref.sha256 for ref in refs])
        names = [ref.sha256 for ref in refs if ref.sha256 not in found]
        try:
            found |= environment.get_all(b"manifests", names) if environment and names else {}
        except FileNotFoundError:
            self._open_again(environment)
        except (lmdb.Error, OSError) as error:
            if self._environment is environment:
                log.warning("index %s cannot be read (%s); the objects are read instead", self.folder, error)
        cached = ((ref, found[ref.sha256]) for ref in refs if ref.sha256 in found)
        return {ref.sha256: data for ref, data in cached if manifest.is_header_of(data, ref)}

    def rebuild(self, *, keep_unreadable: bool = False) -> View:
        """Drop the cache, and read all records again from the store.

        Args:
            keep_unreadable: keep the cached records that are listed but cannot be read: `repair` writes them again.

        Raises:
            StorageError: the listing failed, or the store cannot be read at all.
        """
        self.check_process()
        with self._lock:
            self._load(records_prefix())
            before, self._records = self._records, KnownRecords()
            self._pauses.clear()
            self._noted.clear()
            self._gathering.take()
            self.pages.forget()
            try:
                if self._environment is None and self.folder is not None:
                    self._environment = Environment.open(self.folder, self.uuid, self._limit_bytes)
                if self._environment is not None:
                    self._environment.wipe()
            except FileNotFoundError:
                self._open_again(self._environment)
            except (lmdb.Error, OSError) as error:
                log.warning("index %s cannot be rebuilt: %s", self.folder, error)
            self._store_all({b"damaged": self.marks.packed()})
            view = self.refresh()
            if keep_unreadable:  # with a size that no listing shows, so that each is read before it is believed
                unknown = before.under(records_prefix()).keys() & (view.damaged.keys() | view.unread.keys())
                kept = {key: replace(before[key], size_bytes=-1) for key in unknown}
                self._records.update(kept)
                self._store_all({b"records": packed(kept)})
            return view

    def _store_all(self, items: Mapping[bytes, Mapping[str, bytes | None]]) -> None:
        """Cache items of databases, at once or at the end of `one_write`; if it cannot be written, only log that."""
        environment = self._environment  # another thread may close it
        if environment is None:
            return
        items = self._gathering.add(items)
        if not any(items.values()):
            return
        try:
            try:
                environment.put(items)
            except lmdb.MapFullError:
                with self._lock:
                    self._load(records_prefix())
                log.warning(
                    "index %s does not fit into its %d bytes; it is built again", self.folder, self._limit_bytes
                )
                environment.wipe()
                by_revision = sorted(self._records.values(), key=lambda record: record.snapshot.revision)
                ruling = {record.snapshot.id: record for record in by_revision}
                known = packed({record.snapshot.key: record for record in ruling.values()})
                environment.put({**items, b"records": known, b"damaged": self.marks.packed()})
            except FileNotFoundError:
                environment = self._open_again(environment)
                if environment is not None:
                    environment.put({**items, b"records": {}, b"damaged": {}})
        except (lmdb.Error, OSError, MemoryError) as error:  # a save may be committed already
            if self._environment is environment:
                why = str(error) or type(error).__name__
                log.warning("index %s cannot be written (%s); the next write adds what is missing", self.folder, why)

    def _open_again(self, gone: Environment | None) -> Environment | None:
        """Make a new index with all known records, in place of one whose folder was removed; None: there is none."""
        with self._lock:
            if gone is None or self._environment is not gone:  # another thread was faster, or has closed it
                return self._environment
            log.warning("index %s was removed while it was open; it is built again", self.folder)
            self._environment = None
            gone.release()
            try:
                # not under the old name if it was temporary: anyone can make a folder of that name
                find = temporary_folder(self._store) if self.temporary else folder_for(self._store, self.uuid)
                self.folder, self.temporary = find
                if self.folder is not None:
                    self._environment = Environment.open(self.folder, self.uuid, self._limit_bytes)
                    self._loaded = {records_prefix()}
                    self._environment.put({b"records": packed(self._records), b"damaged": self.marks.packed()})
            except (lmdb.Error, OSError, InvalidInputError) as error:
                log.warning("index %s cannot be built again: %s", self.folder, error)
            return self._environment

    def check_process(self) -> None:
        """Raise InvalidInputError in a forked child."""
        if os.getpid() != self._pid:
            raise InvalidInputError("this repository was opened before a fork; open it again in the child process")

    def close(self) -> None:
        """Release the environment, which its last index in the process closes; remove a temporary folder."""
        if os.getpid() != self._pid:  # before the lock: the fork may have left it held; and the folder is the parent's
            return
        with self._lock:
            environment, self._environment = self._environment, None
            self.pages.release()
            if environment is not None:
                try:
                    left = self._gathering.take()
                    left.setdefault(b"records", {}).update(self._packed_noted())
                    if any(left.values()) and not self.temporary:
                        with suppress(lmdb.Error, OSError, MemoryError):  # each record is then read once more
                            environment.put(left)
                finally:
                    environment.release()
            if self.temporary and self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)


def _bytes_of(infos: Mapping[str, ObjectInfo], keys: Iterable[str]) -> int:
    return sum(infos[key].size_bytes for key in keys if key in infos)


def open_index(store: ObjectStore, config: Config, *, reconstructed: bool) -> Index:
    """Open the index of a repository, and shrink the cache to its limit.

    Args:
        reconstructed: whether the config is reconstructed. Its uuid is new then, so the index is temporary and the
            cached index stays as it is.

    Raises:
        InvalidInputError: SNAPSTORE_CACHE_DIR is not an absolute path.
    """
    folder, temporary = folder_for(store, config.uuid)
    if reconstructed and folder is not None and not temporary:
        folder, temporary = temporary_folder(store)
    index = Index(store, config.uuid, folder, limit_bytes=MAP_BYTES, temporary=temporary, has_pages=config.has_pages)
    if not temporary:
        shrink()
    return index
