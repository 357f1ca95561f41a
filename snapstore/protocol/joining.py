"""Joining: copy the loose records of a run into its next page, then delete them (docs/design/history.md).

    look      LIST loose records, LIST sessions after them; leave out what a session announces, the newest committed
              snapshot, what is damaged, forged or revised meanwhile, and what a page covers already
    page      PUT the next page, create-only; read it back, and see it in a listing
    volume    PUT a copy of the last pages, read it back, and read the page once more
    delete    the loose records that the listing showed, and that pages cover

A joiner may stop anywhere: loose records beside their page are void, and the next one deletes them. No join follows a
damaged page. A join never matters to a caller: it only makes later listings short.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ..catalog.history import View
from ..catalog.joined import Joined, void_records
from ..catalog.pages import PAGE_LIMIT_BYTES, VOLUME_LIMIT_BYTES, PageReader
from ..catalog.read_twice import exists, listed, read_small
from ..context import Context
from ..errors import DAMAGE, AlreadyExistsError, NotFoundError, StorageError, UnknownFormatError
from ..format import records
from ..format.keys import page_key, parse_page_key, parse_record_key, parse_volume_key, records_prefix
from ..format.pages import MAX_LIVE_BYTES, make_page, make_volume, read_page
from ..format.records import MAX_OBJECT_BYTES, Session, Snapshot
from ..storage.base import ObjectInfo
from ..text import log
from .liveness import PREFIX, listed_sessions

#: A page is made once so many snapshots can be joined; it takes at most MOST of them.
AT_LEAST, MOST = 64, 256
#: A larger record stays loose [bytes]: a page of MOST such records still has room for their names.
LARGEST_BYTES = MAX_LIVE_BYTES // MOST - 1024
#: The message of a join that has failed.
STAY_LOOSE = "records stay loose, until a later save or gc joins them"
#: Each volume covers as many pages, or this many times as many, as one before it.
GROWTH = 8


@dataclass(slots=True)
class JoinResult:
    """The outcome of a join.

    Attributes:
        snapshots: how many snapshots are in the new pages.
        pages: how many pages it has put.
        deleted: how many loose records it has deleted.
    """

    snapshots: int = 0
    pages: int = 0
    deleted: int = 0


def join(
    context: Context, run: str, *, at_least: int | None = None, stops: Callable[[], bool] = lambda: False
) -> JoinResult:
    """Join the records of a run, as far as they can be joined now.

    Args:
        at_least: make a page only of so many snapshots or more; None: AT_LEAST.
        stops: whether to stop; it is asked before each page.

    Raises:
        StorageError: the store failed, or does not show what was put.
        IntegrityError: a page is damaged.
    """
    result = JoinResult()
    if context.index.pages.exist:
        _join(context, run, at_least or AT_LEAST, stops, result)
    return result


def _join(context: Context, run: str, at_least: int, stops: Callable[[], bool], result: JoinResult) -> None:
    """Make pages of what one look shows: each with its volume and its deletions before the next one."""
    index, store = context.index, context.store
    view = index.refresh(run)
    index.pages.require_whole(run)
    infos = {i.key: i for i in store.list(records_prefix(run)) if parse_record_key(i.key) is not None}
    sessions = listed_sessions(store)  # after the records
    if len({_id(key) for key in infos}.difference(sessions)) < at_least:  # do not read thousands of sessions in vain
        if len(sessions) >= at_least:
            why = f"{len(sessions)} sessions announce snapshots; gc ends those of dead saves"
            log.info("run=%s records stay loose: %s", run, why)
        return
    busy = _announced(context, sessions)
    joined = index.pages.look(run, volumes_too=True)
    assert joined is not None
    index.pages.require_whole(run)
    loose: dict[str, list[str]] = {}
    for key in infos:
        loose.setdefault(_id(key), []).append(key)
    keys = [key for key in infos if _id(key) not in busy]  # those that are left of an earlier join go first
    chosen = _chosen(view, loose, busy, joined)
    pages = [chosen[at : at + MOST] for at in range(0, len(chosen), MOST)]
    for some in [some for some in pages if len(some) >= at_least] or [[]]:
        if stops():
            break
        void = void_records([record.key for record in some], {run: joined})  # another joiner may have them by now
        facts = _with_bytes(context, [record for record in some if record.key not in void], infos)
        if len(facts) >= at_least:
            joined = _put_page(context, run, joined.count, facts)
            if joined is None:
                break  # another joiner was faster
            result.pages += 1
            result.snapshots += len(facts)
            keys += [key for record, _ in facts for key in loose[record.id]]
        if void := void_records(keys, {run: joined}):
            _hold_in_volumes(context, joined)
            store.delete(sorted(void))
            result.deleted += len(void)
        keys = []
    index.drop_joined(run)


def _announced(context: Context, sessions: Collection[str]) -> set[str]:
    """Return the ids of the snapshots whose records these sessions announce.

    Raises:
        StorageError, IntegrityError, FormatError: a session cannot be read, so it is not known what it announces.
    """
    found = set(sessions)
    for name in sessions:
        with suppress(NotFoundError):  # it has ended
            if parsed := parse_record_key(read_small(context.store, Session, f"{PREFIX}{name}").key):
                found.add(parsed[2])
    return found


def _chosen(view: View, loose: dict[str, list[str]], busy: set[str], joined: Joined) -> list[Snapshot]:
    """Return the records to join, the oldest first; `loose` are the listed keys of each snapshot."""
    newest = view.newest(view.only_run or "")
    left_out = busy | {_id(key) for key in (*view.damaged, *view.unread, *view.repeated) if parse_record_key(key)}
    left_out |= {s.id for s in view.missing} | ({newest.id} if newest is not None else set())
    found: list[Snapshot] = []
    for name in loose.keys() - left_out:
        record = view.get(name)
        if record is not None and record.key == max(loose[name], key=lambda key: int(key.rpartition(".")[2])):
            found.append(record)
    void = void_records([record.key for record in found], {joined.run: joined})
    return sorted((record for record in found if record.key not in void), key=lambda s: (s.seq, s.id))


def _with_bytes(context: Context, chosen: list[Snapshot], infos: dict[str, ObjectInfo]) -> list[tuple[Snapshot, bytes]]:
    """Return records with their bytes as stored, but those that are too large for a page."""
    found: list[tuple[Snapshot, bytes]] = []
    for record in chosen:
        data, whole = records.encode(record), record
        if len(data) != infos[record.key].size_bytes:  # of another release, which packs otherwise
            data = context.store.get(record.key, limit_bytes=MAX_OBJECT_BYTES)
            whole = records.decode(data, Snapshot, record.key)
        if len(data) <= LARGEST_BYTES:
            found.append((whole, data))
    return found


def _put_page(context: Context, run: str, number: int, chosen: list[tuple[Snapshot, bytes]]) -> Joined | None:
    """Put a page, read it back and see it listed; return what the pages say then. None: another joiner's has its key.

    Raises:
        StorageError: it is not there.
    """
    key, data = page_key(run, number), make_page(run, number, chosen)
    read_page(data, key)  # nobody could read it otherwise, nor replace it
    try:
        context.store.put(key, data)
    except AlreadyExistsError:
        with suppress(NotFoundError):
            if context.store.get(key, limit_bytes=PAGE_LIMIT_BYTES) != data:
                return None
    _require_same(context, key, data)
    joined = context.index.pages.look(run)  # it lists the pages as well
    if joined is None or joined.count <= number or joined.damaged:
        raise StorageError(f"{key} in {context.store.url}: was put, and is not found; its records stay as they are")
    return joined


def mend(context: Context, key: str) -> None:
    """Mend a page that is damaged or gone: a gone one is put again, of a damaged one the next page gets the records.

    They come from a volume. If none has them, they are all still loose.

    Raises:
        ConflictError: another process has put a page.
        UnknownFormatError: it has records that only another release can read.
        StorageError: the store failed.
    """
    run, number = parse_page_key(key) or ("", 0)
    reader = PageReader(context.store, takes_volumes=False)
    joined, copy = reader.read(run, list_too=True, volumes_too=True)[run], reader.copy_of(run, number)
    if key not in joined.damaged:
        return
    if copy is not None and not exists(context.store, key):
        context.store.put(key, copy)
        return
    chosen: list[tuple[Snapshot, bytes]] = []
    if copy is not None:
        page = read_page(copy, key)
        if page.unknown:
            raise UnknownFormatError(f"{next(iter(page.unknown.values()))}; {key} stays damaged")
        chosen += [(record, records.encode(record)) for record in page.live]
        chosen += [(record, b"") for record in page.grave_records()]
    context.store.put(page_key(run, joined.count), make_page(run, joined.count, chosen, [number]))


def _require_same(context: Context, key: str, data: bytes) -> None:
    """Raise StorageError unless the store has these bytes under a key."""
    try:
        if context.store.get(key, limit_bytes=VOLUME_LIMIT_BYTES) == data:
            return
        why = "has other bytes"
    except DAMAGE as error:
        why = str(error)
    raise StorageError(f"{key} in {context.store.url}: was put, but {why}; its records stay as they are")


def _hold_in_volumes(context: Context, joined: Joined) -> None:
    """Put a volume if one of the pages is in none; then read the pages of this run once more.

    A volume covers as many of the last pages as a power of GROWTH divides their count, and more if some are in none. It
    ends before a page that was mended: that one is damaged or gone, and a later page has its records.

    Raises:
        StorageError: the volume or a page is not there.
        IntegrityError, FormatError, NotFoundError: a page is damaged or gone, so no volume of it may replace another.
    """
    store, run, count = context.store, joined.run, joined.count
    volumes = {key: parsed for key in listed(store, f"volumes/{run}/") if (parsed := parse_volume_key(key))}
    held = {number for _, first, last in volumes.values() for number in range(first, last + 1)}
    whole = [number for number in range(count) if page_key(run, number) not in joined.mended]
    lacking = [number for number in whole if number not in held]
    if lacking:
        size = 1
        while count % (size * GROWTH) == 0:
            size *= GROWTH
        first = min(lacking[0], count - size)
        pages = {number: _page_bytes(context, run, number) for number in whole if number >= first}
        for start in pages:
            if start - 1 not in pages:
                _put_volume(context, run, start, pages)
        for number in lacking:  # one that was lost meanwhile may have been put again, with other records
            _require_same(context, page_key(run, number), pages[number])
    again = context.index.pages.look(run)  # its listing shows whether any of the others has changed
    if again is None or again.damaged or again.count < count:
        raise StorageError(f"{page_key(run, count - 1)} in {store.url}: is not found; its records stay as they are")
    if lacking:
        store.delete(sorted(old for old, (_, a, b) in volumes.items() if a >= first and b < count))


def _put_volume(context: Context, run: str, first: int, pages: Mapping[int, bytes]) -> None:
    """Put a volume of the pages from a number on, up to one that is not given; read it back."""
    last = first
    while last + 1 in pages:
        last += 1
    key, data = make_volume(run, first, [pages[number] for number in range(first, last + 1)])
    context.store.put(key, data)
    _require_same(context, key, data)


def _page_bytes(context: Context, run: str, number: int) -> bytes:
    """Return the bytes of a page, as stored.

    Raises:
        IntegrityError, FormatError: it is damaged. This process may not know that, if it has read a volume in its
            place; a larger volume of the damaged bytes would replace that one.
    """
    data = context.store.get(key := page_key(run, number), limit_bytes=PAGE_LIMIT_BYTES)
    read_page(data, key)
    return data


def _id(key: str) -> str:
    parsed = parse_record_key(key)
    return parsed[2] if parsed is not None else ""
