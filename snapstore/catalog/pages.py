"""Pages: read the pages and volumes of a store, and cache them (docs/design/history.md).

In: a store. Out: for each run what its pages say (`Joined`). Pages have numbers without gaps and are never replaced or
deleted. So they are complete once a GET of the next number answers that there is none, whatever a listing shows;
volumes, copies of many pages, only save requests.

A page that is damaged or gone is read from a volume. Without one, all of its records are still loose: nobody deletes
them before a volume has them too. It counts as damaged in both cases: no gc, join or revision follows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from ..errors import DAMAGE, IntegrityError, NotFoundError, SnapstoreError, StorageError
from ..format import records
from ..format.keys import (
    ID_DIGITS,
    PAGES_IN_FOLDER,
    page_key,
    pages_prefix,
    parse_page_key,
    parse_record_key,
    parse_volume_key,
)
from ..format.pages import MAX_LIVE_BYTES, MAX_VOLUME_BYTES, RecordPage, read_page, read_volume
from ..format.records import Snapshot
from ..storage.base import ObjectInfo, ObjectStore, Skipping
from ..text import log, strip_hint
from ..threads import Threads
from .joined import UNKNOWN, Joined, rows_of
from .page_cache import KnownPage, PageCache, Shown
from .read_twice import read_small

#: The most bytes of a page or a volume as stored.
PAGE_LIMIT_BYTES, VOLUME_LIMIT_BYTES = 2 * MAX_LIVE_BYTES, 2 * MAX_VOLUME_BYTES
#: Pages that are read at once where no volume has them: on S3 each is a round trip.
PAGES_AT_ONCE = 16
#: The last pages of a run, which each listing describes.
LAST = 8
#: Pages of the cache whose rows are sorted at once.
LOADED_AT_ONCE = 1024
#: Pages that are held in memory as they are decoded.
BODIES = 16
#: If more numbers than this are missing in a row, no page of them is looked for.
GAP = 1000
#: The advice for a page that is gone.
PUT_BACK_PAGES = (
    "if an older copy of the repository was put back on purpose, run 'snapstore index rebuild --forget-missing'; else "
    "run 'snapstore repair'"
)


class _Bodies(Mapping[int, RecordPage]):
    """The pages of a run, which are read when they are asked for."""

    def __init__(self, reader: PageReader, run: str) -> None:
        self._reader, self._run = reader, run

    def __getitem__(self, number: int) -> RecordPage:
        return self._reader.body(self._run, number)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self._reader.known(self._run)[self._run].count


@dataclass(slots=True)
class _PagesOfRun:
    """The pages of one run as this process has read them, and how listings show them."""

    joined: Joined
    listed: dict[int, Shown] = field(default_factory=dict)
    is_listed: bool = False  # whether this process has listed all of them
    settled: int = 0  # how many of them later listings need not describe
    start: int = 0  # nor show: the number of the first page of the last folder


@dataclass(slots=True)
class _ListedPages:
    """How pages of a run are listed from a number on; `infos` has those that are described."""

    start: int = 0
    numbers: set[int] = field(default_factory=set)
    infos: dict[int, ObjectInfo] = field(default_factory=dict)


_NOTHING = _ListedPages()


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
        self._cache = PageCache(folder and folder / f"pages-{records.VERSION}")
        self._runs: dict[str, _PagesOfRun] = {}
        self._last: dict[str, tuple[int, int]] = {}  # by run: the last page that was read, and the XXH3-64 of its bytes
        self._settled: dict[str, tuple[str, int]] = {}  # pages and folders of them, see `_settle`
        self._bodies: dict[str, RecordPage] = {}  # by key, the one that was used last at the end
        self._has_listed_all = False
        self._lock = threading.RLock()

    def known(self, run: str) -> dict[str, Joined]:
        """Return what the pages of a run say, as far as they were read, by the run; empty: there are no pages."""
        return {run: self._known(run)} if self.exist else {}

    def _known(self, run: str) -> Joined:
        of = self._runs.get(run)
        return self._nothing(run) if of is None else of.joined

    def _nothing(self, run: str) -> Joined:
        return Joined(run, _Bodies(self, run))

    def body(self, run: str, number: int) -> RecordPage:
        """Return a page that was read before: from the cache, or once more from the store.

        Raises:
            StorageError, IntegrityError, NotFoundError: neither has it, nor has a volume.
        """
        key = page_key(run, number)
        with self._lock:
            page = self._bodies.pop(key, None) or self._body(run, number, key)
            self._bodies[key] = page
            while len(self._bodies) > BODIES:
                del self._bodies[next(iter(self._bodies))]
            return page

    def _body(self, run: str, number: int, key: str) -> RecordPage:
        if (data := self._cache.page(run, number)) is not None:
            with suppress(*DAMAGE):
                return read_page(data, key)
        try:
            return read_page(self._store.get(key, limit_bytes=PAGE_LIMIT_BYTES), key)
        except DAMAGE:
            if (copy := self.copy_of(run, number)) is None:
                raise
            return read_page(copy, key)

    def some_keys(self, count: int) -> list[str]:
        """Return the keys of some pages that were read."""
        return [page_key(run, of.joined.count - 1) for run, of in [*self._runs.items()][:count]]

    def forget(self) -> None:
        """Read all pages again."""
        with self._lock:
            self.release()
            self._cache.wipe()

    def release(self) -> None:
        """Free the memory of what was read; it is read again once it is asked for."""
        with self._lock:
            self._runs.clear()
            self._bodies.clear()
            self._settled.clear()
            self._has_listed_all = False

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
            for name in self._cache.runs() if run is None else ():
                if name not in self._runs:
                    self._load(name)
            listed = self._listed(run) if run is None or list_too else {}
            volumes = self._volumes(run) if volumes_too or (run is None and not self._has_listed_all) else None
            for name in [run] if run is not None else {**listed, **(volumes or {}), **dict.fromkeys(self._runs)}:
                of_run = listed.get(name, _ListedPages()) if run is None or list_too else None
                if again := self._must_read_again(name, of_run):
                    of_run = self._listed(name, whole=True)[name]
                of_volumes = volumes.get(name, []) if volumes is not None else None
                infos = of_run.infos if of_run is not None else {}
                self._read_run(name, infos, of_volumes, probe=run is not None, again=again)
                if of_run is not None and name in self._runs:
                    self._runs[name].is_listed = True
                    self._settle(name, of_run.numbers)
            self._has_listed_all |= run is None
            return {name: of.joined for name, of in self._runs.items()} if run is None else self.known(run)

    def _load(self, run: str) -> bool:
        """Take the pages of a run that the cache has; return whether there are some."""
        joined, listed = self._nothing(run), dict[int, Shown]()
        cached = self._cache.load(run)
        while some := [*islice(cached, LOADED_AT_ONCE)]:
            joined = joined.with_pages([(page.number, page.rows, page.mends) for page in some], {})
            listed |= {page.number: page.shown for page in some if page.shown is not None}
            self._last[run] = some[-1].number, some[-1].digest
        if joined.count:
            self._runs[run] = _PagesOfRun(joined, listed)
        return bool(joined.count)

    def copy_of(self, run: str, number: int) -> bytes | None:
        """Return the bytes of a page as a volume has them; None: none has it.

        Raises:
            StorageError: the store failed.
        """
        volumes = [one for one in self._volumes(run).get(run, []) if one[0] <= number <= one[1]]
        return next((pages[number].data for pages in self._of_volumes(run, number, volumes) if number in pages), None)

    def _listed(self, run: str | None, *, whole: bool = False) -> dict[str, _ListedPages]:
        """Return how listings show pages, by run.

        Args:
            whole: show all of them. Else, of runs that this process has listed before, the last folder is enough. No
                other page can be gone, and its number given to another one: loose records are deleted only when a
                volume holds them too, and nobody uses the number of a page that a volume holds, or one below a page
                that is listed.
        """
        of = self._runs.get(run or "")
        start, prefixes = 0, [pages_prefix(run)]
        if run is not None and of is not None and of.is_listed and not whole:
            start = of.start
            folders = range(start // PAGES_IN_FOLDER, of.joined.count // PAGES_IN_FOLDER + 1)
            prefixes = [page_key(run, PAGES_IN_FOLDER * number).rpartition("/")[0] + "/" for number in folders]
        found = {} if run is None else {run: _ListedPages(start)}
        for name in self._runs if run is None else ():
            found[name] = _ListedPages(self._runs[name].start)
        settled = {} if whole else self._settled
        known_ones = Skipping(settled.keys().__and__, str if whole else self._last_settled)
        for info in chain.from_iterable(self._store.list(prefix, known_ones) for prefix in prefixes):
            known = settled.get(info.key)
            parsed = known or parse_page_key(info.key)
            if parsed is not None and (whole or parsed[1] >= found.get(parsed[0], _NOTHING).start):
                listing = found.setdefault(parsed[0], _ListedPages())
                listing.numbers.add(parsed[1])
                if known is None:
                    listing.infos[parsed[1]] = info
        return found

    def _last_settled(self, key: str) -> str:
        """Return the last page of the full folders of a run whose pages were all listed, given one of them."""
        run, number = parse_page_key(key) or ("", 0)
        of = self._runs.get(run)
        return page_key(run, of.start - 1) if of is not None and number < of.start else key

    def _settle(self, run: str, listed: set[int]) -> None:
        """Note which pages of a run later listings need not describe: all but the last ones, once they were listed.

        The same holds for folders that are full of such pages.
        """
        of = self._runs[run]
        if not of.is_listed:
            return
        for number in range(of.settled, of.joined.count - LAST):
            if number not in listed:
                break
            self._settled[page_key(run, number)] = run, number
            of.listed.pop(number, None)
            of.settled = number + 1
            if of.settled % PAGES_IN_FOLDER == 0:
                for full in range(of.start, of.settled):
                    del self._settled[page_key(run, full)]
                self._settled[page_key(run, number).rpartition("/")[0]] = run, number
                of.start = of.settled

    def _must_read_again(self, run: str, listed: _ListedPages | None) -> bool:
        """Return whether some pages of a run were damaged, or a listing shows others in their place.

        Pages that are gone count as damaged; what they said is not forgotten.
        """
        of = self._runs.get(run)
        if of is None or listed is None:
            return False
        numbers = (n for n in range(listed.start, of.joined.count) if n not in listed.numbers)
        missing = [n for n in islice(numbers, PAGES_AT_ONCE) if page_key(run, n) not in of.joined.mended]
        if gone := [page_key(run, n) for n in missing if not self._is_there(run, n)]:
            lost = {key: f"{key}: is gone: it was read on this machine before; {PUT_BACK_PAGES}" for key in gone}
            of.joined = replace(of.joined, damaged={**of.joined.damaged} | lost)
            return False
        others = any(of.listed.get(n, _shown(info)) != _shown(info) for n, info in listed.infos.items())
        return others or bool(of.joined.damaged) or self._is_another(run, of, listed)

    def _is_another(self, run: str, of: _PagesOfRun, listed: _ListedPages) -> bool:
        """Return whether the last known page is another one by now, if no listing had shown it.

        If it is the same one, so are those before it: they were there when it was put.
        """
        last = max((n for n in listed.infos if n < of.joined.count), default=None)
        number, digest = self._last.get(run, (-1, 0))
        if last is None or last in of.listed or last != number:
            return False
        (data,) = self._get(run, [last]).values()
        return isinstance(data, bytes) and xxh3_64_intdigest(data) != digest

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
        joined = self._nothing(run) if again else self._known(run)
        if again:
            self._cache.wipe(run)
            self._bodies.clear()
        number = joined.count
        first = self._get(run, [number]) if probe and number not in listed else {}
        if volumes is None and not number and self._takes_volumes and (listed or first.get(number) is not None):
            volumes = self._volumes(run).get(run, [])  # many pages may follow
        damaged: dict[str, str] = {}
        for batch in self._batches(run, number, listed, volumes or [], damaged):
            joined = self._with_batch(joined, batch, listed, damaged)
        while probe:
            (data,) = first.values() if joined.count in first else self._get(run, [joined.count]).values()
            if data is None or (isinstance(data, SnapstoreError) and not self._is_there(run, joined.count)):
                break
            joined = self._with_batch(joined, {joined.count: data}, listed, damaged)
        if joined.count or run in self._runs:
            if again:
                self._settled = {key: of for key, of in self._settled.items() if of[0] != run}
                self._runs[run] = _PagesOfRun(joined)
            of = self._runs.setdefault(run, _PagesOfRun(joined))
            of.joined = joined
            for n, info in listed.items():
                if joined.count - LAST <= n < joined.count:
                    of.listed.setdefault(n, _shown(info))

    def _batches(
        self,
        run: str,
        number: int,
        listed: Mapping[int, ObjectInfo],
        volumes: Iterable[tuple[int, int, str]],
        damaged: dict[str, str],
    ) -> Iterator[Mapping[int, RecordPage | bytes | SnapstoreError | None]]:
        """Yield pages or their bytes, from a number on that a listing or a volume shows, in order, few at once."""
        shown = sorted(n + 1 for n in listed if n >= number)
        for held in chain(self._of_volumes(run, number, volumes), [dict[int, RecordPage]()]):
            wanted: list[int] = []
            for end in [end for end in shown if not held or end <= min(held)] + [*held][:1]:
                if end - number > GAP:  # no process leaves so many out
                    key = page_key(run, number)
                    damaged[key] = f"{key}: is gone, and so are all up to {page_key(run, end - 2)}"
                    number = end - 1
                wanted += range(number, end)
                number = max(number, end)
            fresh = {n: page for n, page in held.items() if n >= number}
            if not self._takes_volumes:
                wanted += fresh
            for at in range(0, len(wanted), PAGES_AT_ONCE):
                yield self._get(run, wanted[at : at + PAGES_AT_ONCE])
            if self._takes_volumes and fresh:
                yield fresh
            number = max([number, *(n + 1 for n in fresh)])

    def _with_batch(
        self,
        joined: Joined,
        batch: Mapping[int, RecordPage | bytes | SnapstoreError | None],
        listed: Mapping[int, ObjectInfo],
        damaged: dict[str, str],
    ) -> Joined:
        """Decode pages, and cache them; return what the run says with them."""
        pages: list[RecordPage] = []
        before = len(damaged)
        for number, data in batch.items():
            self._take(joined.run, number, data, pages, damaged)
        shown = {n: _shown(listed[n]) for n in batch if n in listed}
        known = [
            KnownPage(page.number, rows_of(page), page.mends, shown.get(page.number), xxh3_64_intdigest(page.data))
            for page in pages
        ]
        for page in known[-1:]:
            self._last[joined.run] = page.number, page.digest
        is_plain = len(damaged) == before and not any((page.rows.flags & UNKNOWN).any() for page in known)
        if pages:
            self._cache.add(joined.run, joined.count, [*zip(pages, known, strict=True)], in_memory=not is_plain)
        joined = joined.with_pages([(page.number, page.rows, page.mends) for page in known], damaged)
        return replace(joined, count=max(joined.count, 1 + max(batch, default=-1)))  # the last of them may be damaged

    def _take(
        self,
        run: str,
        number: int,
        data: RecordPage | bytes | SnapstoreError | None,
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
            pages.append(data if isinstance(data, RecordPage) else read_page(data, key))
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
        self, run: str, number: int, volumes: Iterable[tuple[int, int, str]]
    ) -> Iterator[dict[int, RecordPage]]:
        """Yield the pages of some volumes, by number, few at once, of as few volumes as have all from a number on."""
        left = [(first, last, key) for first, last, key in volumes if last >= number]
        while left:
            here = [one for one in left if one[0] <= number]
            chosen = max(here, key=lambda one: one[1]) if here else min(left)
            pages: dict[int, RecordPage] = {}
            try:
                data = self._store.get(chosen[2], limit_bytes=VOLUME_LIMIT_BYTES)
                for n, page in enumerate(read_volume(data, chosen[2]), chosen[0]):
                    if n >= number:
                        pages[n] = read_page(page, page_key(run, n))
                    if len(pages) == PAGES_AT_ONCE:
                        yield pages
                        number, pages = n + 1, {}
            except (*DAMAGE, StorageError) as error:  # another process has merged it, or it is damaged
                log.info("volume %s cannot be used: %s", chosen[2], error)
            if pages:
                yield pages
                number = 1 + max(pages)
            left = [one for one in left if one != chosen and one[1] >= number]
