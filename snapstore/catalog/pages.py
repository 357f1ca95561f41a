"""Pages: what the pages of a run say about its snapshots (docs/design/history.md).

In: the pages and volumes of a store. Out: for each run the highest joined revision of every snapshot: whole records,
and graves. Pages have numbers without gaps and are never replaced or deleted. So they are complete once a GET of the
next number answers that there is none, whatever a listing shows; volumes, copies of many pages, only save requests.

A page that is damaged or gone is read from a volume. Without one, all of its records are still loose: nobody deletes
them before a volume has them too. It counts as damaged in both cases: no gc, join or revision follows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from ..errors import DAMAGE, IntegrityError, NotFoundError, SnapstoreError, StorageError
from ..format import records
from ..format.keys import (
    ID_DIGITS,
    name_of_record,
    page_key,
    pages_prefix,
    parse_page_key,
    parse_record_key,
    parse_volume_key,
)
from ..format.pages import (
    GRAVE,
    MAX_LIVE_BYTES,
    MAX_VOLUME_BYTES,
    Graves,
    RecordPage,
    grave_key,
    grave_record,
    read_page,
    read_volume,
    unpack_pasts,
)
from ..format.records import Snapshot
from ..storage.base import ObjectInfo, ObjectStore
from ..text import log, strip_hint
from ..threads import Threads
from .page_cache import PageCache, Shown
from .read_twice import read_small

#: The most bytes of a page or a volume as stored.
PAGE_LIMIT_BYTES, VOLUME_LIMIT_BYTES = 2 * MAX_LIVE_BYTES, 2 * MAX_VOLUME_BYTES
#: Pages that are read at once where no volume has them: on S3 each is a round trip.
PAGES_AT_ONCE = 16
#: If more numbers than this are missing in a row, no page of them is looked for.
GAP = 1000
#: The advice for a page that is gone.
PUT_BACK_PAGES = (
    "run 'snapstore repair --apply', or, if an older copy of the repository was put back on purpose, 'snapstore index "
    "rebuild --forget-missing'"
)
#: A grave, and where its past is: the number of its page, and its place there.
HELD = np.dtype([*GRAVE.descr, ("page", "<u4"), ("at", "<u2")])


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The joined records of one run. It is immutable: `with_pages` returns another one.

    Attributes:
        count: how many pages there are.
        live: id -> the committed or forgotten record.
        unknown: id -> (key, why) of records that this release cannot decode.
        graves: rows of `HELD` of all others, in order of their ids.
        pasts: the packed pasts of the graves of each page, by its number.
        seqs: some numbers of the graves, by which `records.highest_seq` finds the highest one.
        damaged: key -> why, of pages that are damaged or gone, whatever their volumes have.
        mended: keys of damaged pages whose records a later page has.
    """

    run: str
    count: int = 0
    live: Mapping[str, Snapshot] = field(default_factory=dict)
    unknown: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    graves: Graves = field(default_factory=lambda: np.empty(0, HELD))
    pasts: Mapping[int, bytes] = field(default_factory=dict)
    seqs: tuple[int, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    mended: frozenset[str] = frozenset()

    def grave(self, snapshot_id: str) -> np.void | None:
        """Return the grave of a snapshot; None: it has none here."""
        name = np.array([bytes.fromhex(snapshot_id)], "S16")
        at = int(np.searchsorted(self.graves["id"], name[0]))
        is_there = at < len(self.graves) and self.graves["id"][at] == name[0]
        return self.graves[at] if is_there else None

    def grave_record(self, snapshot_id: str) -> Snapshot | None:
        """Return what is left of a snapshot's record; None: it has no grave here."""
        row = self.grave(snapshot_id)
        return None if row is None else next(self._records(np.array([row])))

    def grave_records(self) -> Iterator[Snapshot]:
        """Yield what is left of the record of every grave."""
        yield from self._records(self.graves)

    def _records(self, rows: Graves) -> Iterator[Snapshot]:
        pasts = {number: unpack_pasts(self.pasts[number], self.run) for number in np.unique(rows["page"]).tolist()}
        ids: dict[int, str | None] = {}  # by seq; None: several have it
        if any(isinstance(past.parent, int) for of_page in pasts.values() for past in of_page):
            for seq, name in self._numbers():
                ids[seq] = None if seq in ids else name
        for row in rows:
            of_page = pasts[int(row["page"])]
            past = of_page[row["at"]] if row["at"] < len(of_page) else None
            if past is not None and isinstance(past.parent, int):
                past = past._replace(parent=ids.get(past.parent))
            yield grave_record(self.run, row, past)

    def _numbers(self) -> Iterator[tuple[int, str]]:
        """Yield (seq, id) of every snapshot here."""
        names = self.graves["id"].astype("S16").tobytes() if len(self.graves) else b""
        for i, seq in enumerate(self.graves["seq"].tolist()):
            yield seq, names[16 * i : 16 * i + 16].hex()
        for name, record in self.live.items():
            yield record.seq, name

    def key_of(self, snapshot_id: str) -> str | None:
        """Return the key of the highest joined revision of a snapshot; None: no page has any."""
        if (record := self.live.get(snapshot_id)) is not None:
            return record.key
        if snapshot_id in self.unknown:
            return self.unknown[snapshot_id][0]
        row = self.grave(snapshot_id)
        return None if row is None else grave_key(self.run, row)

    def revision_of(self, snapshot_id: str) -> int:
        """Return the highest joined revision of a snapshot; -1: no page has any."""
        key = self.key_of(snapshot_id)
        return -1 if key is None else int(key.rpartition(".")[2])

    def covers(self, key: str) -> bool:
        """Return whether the record under a key is void: a page has its revision of the snapshot, or a later one."""
        parsed = parse_record_key(key)
        return parsed is not None and self.revision_of(parsed[2]) >= parsed[3]

    def makes_void(self, record: Snapshot) -> bool:
        """Return whether a record that was put is void, as a page has its revision, not by this PUT, or a later one.

        A grave has no write id, so its revision and its state are compared: a final state is the same for all writers.
        """
        if self.revision_of(record.id) < record.revision:
            return False
        if record.id in self.live:
            return self.live[record.id].write_id != record.write_id
        left = self.grave_record(record.id)
        return left is None or (left.revision, left.state) != (record.revision, record.state)

    def record_of(self, snapshot_id: str) -> Snapshot | None:
        """Return the highest joined record of a snapshot, or what is left of it; None: there is none that decodes."""
        return self.live.get(snapshot_id) or self.grave_record(snapshot_id)

    def with_pages(self, pages: Iterable[RecordPage], damaged: Mapping[str, str]) -> Joined:
        """Return what the pages of the run say with the next ones."""
        live, unknown, count = dict(self.live), dict(self.unknown), self.count
        damaged, mended = {**self.damaged, **damaged}, set(self.mended)
        fresh: dict[str, np.void] = {}
        pasts = dict(self.pasts)

        def revision_of(name: str) -> int:
            if name in live:
                return live[name].revision
            if name in unknown:
                return int(unknown[name][0].rpartition(".")[2])
            return int(fresh[name]["revision"]) if name in fresh else self.revision_of(name)

        def drop(name: str) -> None:
            for of in (live, unknown, fresh):
                of.pop(name, None)

        for page in pages:
            for record in page.live:
                if record.revision > revision_of(record.id):
                    drop(record.id)
                    live[record.id] = record
            for key, why in page.unknown.items():
                parsed = parse_record_key(key)
                if parsed is not None and parsed[3] > revision_of(parsed[2]):
                    drop(parsed[2])
                    unknown[parsed[2]] = key, why
            pasts[page.number] = page.packed_past
            held = np.empty(len(page.graves), HELD)
            for name in GRAVE.names or ():
                held[name] = page.graves[name]
            held["page"], held["at"] = page.number, np.arange(len(held))
            for row in held:
                if int(row["revision"]) > revision_of(name := row.tobytes()[:16].hex()):
                    drop(name)
                    fresh[name] = row
            mended |= {page_key(self.run, number) for number in page.mends}
            count = max(count, page.number + 1)
        gone = [name for name in (*live, *unknown, *fresh) if self.grave(name) is not None] if len(self.graves) else []
        old = self.graves
        if gone:
            old = old[~np.isin(old["id"], np.array([bytes.fromhex(name) for name in gone], "S16"))]
        rows = np.concatenate([old, np.array([*fresh.values()], HELD)])
        rows = rows[np.argsort(rows["id"], kind="stable")]
        damaged = {key: why for key, why in damaged.items() if key not in mended}
        return Joined(self.run, count, live, unknown, rows, pasts, _outer(rows["seq"]), damaged, frozenset(mended))


def _outer(seqs: np.ndarray) -> tuple[int, ...]:
    """Return the first and the last of some numbers, and those beside gaps that no writer leaves."""
    if not len(seqs):
        return ()
    ordered = np.unique(seqs.astype(np.uint64))
    wide = np.flatnonzero(np.diff(ordered) > records.MAX_SEQ_STEP)
    return tuple(ordered[np.unique([0, *wide, *(wide + 1), len(ordered) - 1])].tolist())


def void_records(keys: Iterable[str], joined: Mapping[str, Joined]) -> set[str]:
    """Return which of these keys have records that the pages of their runs cover."""
    if not joined:
        return set()
    return {key for key in keys if (run := key.split("/")[1]) in joined and joined[run].covers(key)}


def repeated_by_pages(keys: Iterable[str], joined: Mapping[str, Joined]) -> dict[str, str]:
    """Return the records that repeat the id of a joined snapshot under another name: key -> why it is left out."""
    if not joined:
        return {}
    names = {parsed[2]: key for key in keys if (parsed := parse_record_key(key))}
    ids = np.array([bytes.fromhex(name) for name in names], "S16")
    found: dict[str, str] = {}
    for one in joined.values():
        buried = [row.tobytes()[:16].hex() for row in one.graves[np.isin(one.graves["id"], ids)]]
        for name in (*buried, *(names.keys() & one.live.keys()), *(names.keys() & one.unknown.keys())):
            key, other = names[name], one.key_of(name)
            if other is not None and name_of_record(other) != name_of_record(key):
                found[key] = f"{key}: repeats the id of {other}, which is in a page: it is forged; remove it"
    return found


@dataclass(slots=True)
class _PagesOfRun:
    """The pages of one run as this process has read them, and how listings show them."""

    joined: Joined
    listed: dict[int, Shown] = field(default_factory=dict)


def _shown(info: ObjectInfo) -> Shown:
    return info.size_bytes, info.modified_s, info.tag


class PageReader:
    """Reads the pages of one store. Safe to use from several threads.

    Args:
        folder: of the index, for the pages that earlier processes have read; None: nothing is cached.
        takes_volumes: whether volumes may save the reads of pages.

    Attributes:
        exist: whether the repository may have pages. If not, nothing is read.
    """

    def __init__(
        self, store: ObjectStore, folder: Path | None = None, *, has_pages: bool = True, takes_volumes: bool = True
    ) -> None:
        self._store, self.exist, self._takes_volumes = store, has_pages, takes_volumes
        self._cache = PageCache(folder and folder / "pages")
        self._runs: dict[str, _PagesOfRun] = {}
        self._has_listed_all = False
        self._lock = threading.RLock()

    def known(self, run: str) -> dict[str, Joined]:
        """Return what the pages of a run say, as far as they were read, by the run; empty: there are no pages."""
        return {run: self._known(run)} if self.exist else {}

    def _known(self, run: str) -> Joined:
        of = self._runs.get(run)
        return Joined(run) if of is None else of.joined

    def some_keys(self, count: int) -> list[str]:
        """Return the keys of some pages that were read."""
        return [page_key(run, of.joined.count - 1) for run, of in [*self._runs.items()][:count]]

    def forget(self) -> None:
        """Read all pages again."""
        with self._lock:
            self._runs.clear()
            self._has_listed_all = False
            self._cache.wipe()

    def look(self, run: str, *, list_too: bool = True, volumes_too: bool = False) -> Joined | None:
        """Read the pages of a run that are new; None: there are no pages. See `read`."""
        return self.read(run, list_too=list_too, volumes_too=volumes_too).get(run)

    def joined_as(self, record: Snapshot) -> Snapshot | None:
        """Return the record that counts in a page in place of one whose key is free; None: no page covers it.

        Raises:
            StorageError: the store failed.
        """
        joined = self.look(record.run)
        if joined is None or joined.revision_of(record.id) < record.revision:
            return None
        return joined.record_of(record.id) if joined.makes_void(record) else record

    def record(self, key: str) -> Snapshot:
        """Return the record under a key, loose or of a page.

        Raises:
            NotFoundError, IntegrityError, FormatError: it is gone or damaged.
            StorageError: the store failed.
        """
        try:
            return read_small(self._store, Snapshot, key)
        except NotFoundError:
            parsed = parse_record_key(key)
            joined = self.look(parsed[0]) if parsed is not None else None
            found = joined.record_of(key.rpartition(".")[0][-ID_DIGITS:]) if joined is not None else None
            if found is None or found.key != key:
                raise
            return found

    def newest(self, record: Snapshot) -> Snapshot:
        """Return the later revision of a record that a page has; the record itself if none has, or it is not known."""
        with suppress(StorageError):
            return self.joined_as(msgspec.structs.replace(record, revision=record.revision + 1)) or record
        return record

    def keys_of(self, snapshot_id: str) -> set[str]:
        """Return the keys under which pages of any run have a snapshot.

        Raises:
            StorageError: the store failed.
        """
        return {key for one in self.read(None).values() if (key := one.key_of(snapshot_id)) is not None}

    def require_whole(self, run: str) -> None:
        """Raise IntegrityError if a page of a run is known to be damaged: then no record of the run may change."""
        if damaged := self._known(run).damaged:
            why = strip_hint(next(iter(damaged.values())))
            raise IntegrityError(f"{why}; nothing was changed; run 'snapstore repair'")

    def read(self, run: str | None, *, list_too: bool = False, volumes_too: bool = False) -> dict[str, Joined]:
        """Read the pages of a run that are new, until there is no next one; None: the pages of all runs, as listed.

        Args:
            list_too: list the pages of the run as well: one wrong answer must not mislead who asks.
            volumes_too: list volumes as well: a page that one of them has was there. Who uses the next number must.

        Returns:
            The joined records by run; an empty dict if the repository has no pages.

        Raises:
            StorageError: the store failed.
        """
        if not self.exist:
            return {}
        with self._lock:
            is_cached = run is not None and run not in self._runs and self._load(run)
            list_too = list_too or is_cached  # the pages there may be those of another time
            listed = self._listed(run) if run is None or list_too else {}
            for name in self._cache.runs() if run is None else ():
                if name not in self._runs:
                    self._load(name)
            volumes = self._volumes(run) if volumes_too or (run is None and not self._has_listed_all) else None
            for name in [run] if run is not None else {**listed, **(volumes or {}), **dict.fromkeys(self._runs)}:
                of_run = listed.get(name, {}) if run is None or list_too else None
                again = self._must_read_again(name, of_run)
                of_volumes = volumes.get(name, []) if volumes is not None else None
                self._read_run(name, of_run or {}, of_volumes, probe=run is not None, again=again)
            self._has_listed_all |= run is None
            return {name: of.joined for name, of in self._runs.items()} if run is None else self.known(run)

    def _load(self, run: str) -> bool:
        """Take the pages of a run that the cache has; return whether there are some."""
        cached = self._cache.load(run)
        if cached:
            joined = Joined(run).with_pages([page for page, _ in cached], {})
            listed = {page.number: shown for page, shown in cached if shown is not None}
            self._runs[run] = _PagesOfRun(joined, listed)
        return bool(cached)

    def copy_of(self, run: str, number: int) -> bytes | None:
        """Return the bytes of a page as a volume has them; None: none has it.

        Raises:
            StorageError: the store failed.
        """
        return self._of_volumes(run, number, self._volumes(run).get(run, []), most=1).get(number)

    def _listed(self, run: str | None) -> dict[str, dict[int, ObjectInfo]]:
        """Return how listings show pages: by run and number."""
        found: dict[str, dict[int, ObjectInfo]] = {} if run is None else {run: {}}
        for info in self._store.list(pages_prefix(run)):
            if (parsed := parse_page_key(info.key)) is not None:
                found.setdefault(parsed[0], {})[parsed[1]] = info
        return found

    def _must_read_again(self, run: str, listed: Mapping[int, ObjectInfo] | None) -> bool:
        """Return whether some pages of a run were damaged, or a listing shows others in their place.

        Pages that are gone count as damaged; what they said is not forgotten.
        """
        of = self._runs.get(run)
        if of is None or listed is None:
            return False
        missing = [n for n in range(of.joined.count) if n not in listed]
        missing = [n for n in missing if page_key(run, n) not in of.joined.mended]
        if gone := [page_key(run, n) for n in missing if not self._is_there(run, n)]:
            lost = {key: f"{key}: is gone: this process has read it; {PUT_BACK_PAGES}" for key in gone}
            of.joined = replace(of.joined, damaged={**of.joined.damaged} | lost)
            return False
        others = any(of.listed.get(n, _shown(info)) != _shown(info) for n, info in listed.items())
        return others or bool(of.joined.damaged)

    def _is_there(self, run: str, number: int) -> bool:
        try:
            self._store.stat(page_key(run, number))
        except NotFoundError:
            return False
        return True

    def _read_run(
        self,
        run: str,
        listed: Mapping[int, ObjectInfo],
        volumes: list[tuple[int, int, str]] | None,
        *,
        probe: bool,
        again: bool,
    ) -> None:
        """Read the next pages of a run: those that a listing or a volume shows, and if `probe`, those after them.

        Args:
            volumes: (first, last, key) of its volumes; None: they were not listed.
            again: read all of them, in place of the known ones.
        """
        before = Joined(run) if again else self._known(run)
        pages: list[RecordPage] = []
        damaged: dict[str, str] = {}
        number = before.count
        first = self._get(run, [number]) if probe and number not in listed else {}
        if volumes is None and not number and self._takes_volumes and (listed or first.get(number) is not None):
            volumes = self._volumes(run).get(run, [])  # many pages may follow
        held = self._of_volumes(run, number, volumes or [])
        there = {n for n in (*listed, *held) if n >= number}
        for end in sorted(there):
            if end - number > GAP:  # no process leaves so many out
                key = page_key(run, number)
                damaged[key] = f"{key}: is gone, and so are all up to {page_key(run, end - 1)}"
                number = end
            there.update(range(number, end))
            number = end + 1
        wanted = sorted(n for n in there)
        for at in range(0, len(wanted), PAGES_AT_ONCE):
            some = wanted[at : at + PAGES_AT_ONCE]
            unread = [n for n in some if n not in held or not self._takes_volumes]
            found = self._get(run, unread) if unread else {}
            for n in some:
                self._take(run, n, found.get(n, held.get(n) if n not in found else None), pages, damaged)
        while probe:
            (data,) = first.values() if number in first else self._get(run, [number]).values()
            if data is None or (isinstance(data, SnapstoreError) and not self._is_there(run, number)):
                break
            self._take(run, number, data, pages, damaged)
            number += 1
        joined = before.with_pages(pages, damaged) if pages or damaged else before
        if joined.count < number:  # the last of them are damaged
            joined = replace(joined, count=number)
        if joined.count or run in self._runs:
            shown = {} if again else dict(self._runs[run].listed) if run in self._runs else {}
            fresh = {n: _shown(info) for n, info in listed.items() if n < joined.count}
            self._runs[run] = _PagesOfRun(joined, fresh | shown)
            if again or damaged:
                self._cache.wipe(run)
            if pages and not damaged:
                self._cache.add(run, before.count, [(page, fresh.get(page.number)) for page in pages])

    def _take(
        self,
        run: str,
        number: int,
        data: bytes | SnapstoreError | None,
        pages: list[RecordPage],
        damaged: dict[str, str],
    ) -> None:
        """Decode a page, or a copy of it; note it if it is damaged or gone."""
        key = page_key(run, number)
        try:
            if data is None or isinstance(data, SnapstoreError):  # one answer proves nothing
                (data,) = self._get(run, [number]).values()
            if data is None:
                raise NotFoundError(f"{key}: is gone: a later page or a volume shows that it was there")
            if isinstance(data, SnapstoreError):
                raise data
            pages.append(read_page(data, key))
        except (*DAMAGE, StorageError) as error:
            damaged[key] = str(error)
            log.warning("page %s cannot be used: %s", key, error)
            if (copy := self.copy_of(run, number)) is not None:
                pages.append(read_page(copy, key))

    def _get(self, run: str, numbers: Sequence[int]) -> dict[int, bytes | SnapstoreError | None]:
        """Return the bytes of pages, or the error of reading each; None: there is none.

        Raises:
            StorageError: the store cannot be read at all.
        """

        def get(number: int) -> bytes | SnapstoreError | None:
            try:
                return self._store.get(page_key(run, number), limit_bytes=PAGE_LIMIT_BYTES)
            except NotFoundError:
                return None
            except DAMAGE as error:
                return error
            except StorageError as error:
                self._store.get("config", limit_bytes=records.MAX_OBJECT_BYTES)
                return error

        if len(numbers) == 1:
            return {numbers[0]: get(numbers[0])}
        with Threads(PAGES_AT_ONCE) as threads:
            return dict(zip(numbers, threads.start(get, numbers)(), strict=True))

    def _volumes(self, run: str | None) -> dict[str, list[tuple[int, int, str]]]:
        """Return (first, last, key) of the volumes of a run (None: of all), by run."""
        found: dict[str, list[tuple[int, int, str]]] = {}
        for info in self._store.list("volumes/" if run is None else f"volumes/{run}/"):
            if (parsed := parse_volume_key(info.key)) is not None:
                found.setdefault(parsed[0], []).append((parsed[1], parsed[2], info.key))
        return found

    def _of_volumes(
        self, run: str, number: int, volumes: Iterable[tuple[int, int, str]], *, most: int = 1 << 30
    ) -> dict[int, bytes]:
        """Return the pages from a number on that volumes have, as few of them as possible; at most `most` are read.

        The range in a name may be forged: it counts only after the volume was read.
        """
        found: dict[int, bytes] = {}
        left = [(first, last, key) for first, last, key in volumes if last >= number]
        while left and most:
            here = [one for one in left if one[0] <= number]
            if not here and most == 1:
                break
            chosen = max(here, key=lambda one: one[1]) if here else min(left)
            try:
                data = self._store.get(chosen[2], limit_bytes=VOLUME_LIMIT_BYTES)
                pages = dict(enumerate(read_volume(data, chosen[2]), chosen[0]))
                for n, page in pages.items():
                    read_page(page, page_key(run, n))
                found = pages | found
                number, most = max(number, chosen[1] + 1), most - 1
            except (*DAMAGE, StorageError) as error:  # another process has merged it, or it is damaged
                log.info("volume %s cannot be used: %s", chosen[2], error)
            left = [one for one in left if one != chosen and one[1] >= number]
        return found
