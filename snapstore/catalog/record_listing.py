"""Record listing: list the records of a store, and find the ruling one of each snapshot.

In: a store, and the records that an index knows. Out: which records rule, how they are listed if that is news, and the
known records that are not listed. There may be tens of thousands of records, and a save lists those of its run twice.
So a local store looks only at the files of ruling records, and once at each.

It also finds the records of a second snapshot under the id of another one. An id is random, so such a record is forged.
If it counted, the first snapshot would be gone, and the next gc would delete its bytes. Then a writer that may only add
a record, or a session that a gc fences, could delete any snapshot.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

import msgspec

from ..errors import SnapstoreError
from ..format import records
from ..format.keys import (
    ID_DIGITS,
    UNKNOWN_RUN,
    name_of_record,
    parse_record_key,
    record_key,
    records_prefix,
    superseded,
)
from ..format.records import Snapshot
from ..storage.base import ObjectInfo, ObjectStore
from .lmdb_file import shortened


def list_ruling(
    store: ObjectStore, records: KnownRecords, prefix: str, times: int, *, whole: bool = False
) -> tuple[dict[str, ObjectInfo | None], set[str]]:
    """List the records under a prefix some times; a record counts as listed if one of the listings shows it.

    Args:
        whole: each listing describes all records. Else it gives only the key of a record that a listing before has
            described, or that a later revision supersedes.

    Returns:
        (key of each ruling record -> how it is listed; None: as it is known), (keys of known records not listed).

    Raises:
        StorageError: the listing failed.
    """
    known = records.under(prefix)
    described: set[str] = set()
    key_only: set[str] = set()

    def others(keys: Sequence[str]) -> set[str]:
        return superseded(keys) | described.intersection(keys)

    # For each snapshot the highest revision and its key. No more is kept of each object: every thread that ever listed
    # keeps the memory that its listing took.
    highest: dict[str, tuple[int, str, ObjectInfo | None]] = {}
    for info in chain.from_iterable(store.list(prefix, None if whole else others) for _ in range(times)):
        key = info.key
        if info.is_key_only:
            key_only.add(key)
            continue
        described.add(key)
        record = known.get(key)
        if record is not None and record.is_listed_as(info):
            revision = record.snapshot.revision
            news = info if record.modified_s == JUST_MADE else None
            if news is None and record.text != info.tag:
                records[key] = record.with_text(info.tag)
        else:
            parsed = parse_record_key(key)
            if parsed is None:
                continue
            revision, news = parsed[3], info
        if (name := name_of_record(key)) not in highest or (revision, key) > highest[name][:2]:
            highest[name] = revision, key, news
    key_only -= described
    if not key_only <= superseded(key_only | described):  # a later revision is no file, or is gone again
        return list_ruling(store, records, prefix, times, whole=True)
    return {key: news for _, key, news in highest.values()}, known.keys() - described - key_only


def newest_of_runs(infos: Iterable[ObjectInfo], but: str) -> list[list[ObjectInfo]]:
    """Return for each run but one the ruling records of its two highest steps, the highest first.

    The run that was saved last comes first: the first revisions count, as a forget or a tag puts a later one. There are
    two, since a killed save leaves an aborted record.
    """
    ruling: dict[str, tuple[int, ObjectInfo]] = {}
    saved: dict[str, float] = {}
    for info in infos:
        parsed = parse_record_key(info.key)
        if parsed is not None and parsed[0] not in (but, UNKNOWN_RUN):
            name = name_of_record(info.key)
            saved[name] = min(saved.get(name, math.inf), info.modified_s)
            if name not in ruling or parsed[3] > ruling[name][0]:
                ruling[name] = parsed[3], info
    runs: dict[str, list[str]] = {}
    for name in sorted(ruling, key=lambda name: (name.rpartition("-")[0], saved[name]), reverse=True):
        of_run = runs.setdefault(name.split("/")[1], [])
        if len(of_run) < 2:
            of_run.append(name)
    last_first = sorted(runs.values(), key=lambda of_run: saved[of_run[0]], reverse=True)
    return [[ruling[name][1] for name in of_run] for of_run in last_first]


def repeated_ids(store: ObjectStore, ruling: Collection[str]) -> dict[str, str]:
    """Return `later_snapshots` of a store, given the keys of the ruling records; list all records if an id repeats."""
    if len({_id(key) for key in ruling}) == len(ruling):
        return {}
    return later_snapshots(store.list("snapshots/"))


def later_snapshots(records: Iterable[ObjectInfo]) -> dict[str, str]:
    """Return the records that repeat the id of a snapshot whose first record is older: key -> why it is left out."""
    stored: dict[str, dict[str, float]] = {}  # id -> name -> when its first record was stored
    keys = []
    for info in records:
        if parse_record_key(info.key) is not None:
            keys.append(info.key)
            names, name = stored.setdefault(_id(info.key), {}), name_of_record(info.key)
            names[name] = min(names.get(name, math.inf), info.modified_s)
    first_of: dict[str, str] = {}
    for names in stored.values():
        if len(names) > 1:
            first = min(names, key=lambda name: _rank(name, names))
            first_of |= {name: first for name in names if name != first}
    return {key: _why(key, first_of[name]) for key in keys if (name := name_of_record(key)) in first_of}


def repeats_id(key: str, others: Iterable[str]) -> bool:
    """Return whether one of the keys `others` is a record of another snapshot with the same id as `key`."""
    return any(
        name_of_record(other) != name_of_record(key) and _id(other) == _id(key)
        for other in others
        if parse_record_key(other) is not None
    )


def _id(key: str) -> str:
    return name_of_record(key)[-ID_DIGITS:]


def _rank(name: str, stored: Mapping[str, float]) -> tuple[bool, float, str]:
    """Return the sort key of a snapshot among those of one id: a stand-in for a damaged session is never the first."""
    return name.split("/")[1] == UNKNOWN_RUN, stored[name], name


def _why(key: str, first: str) -> str:
    return f"{key}: repeats the id of {first}, which was stored first: one of the two is forged; remove it"


JUST_MADE = -1.0
#: A cached record begins with this: its size, time and tag (`KnownRecord`) in the listing.
_LISTED = struct.Struct("<qd16s")


def copied(snapshot: Snapshot) -> Snapshot:
    """Return a record with lists and dicts of its own."""
    return msgspec.structs.replace(
        snapshot,
        bases=[*snapshot.bases],
        manifests=[*snapshot.manifests],
        tags=[*snapshot.tags],
        metrics={**snapshot.metrics},
        features=[*snapshot.features],
    )


@dataclass(frozen=True, slots=True)
class KnownRecord:
    """A record, and how listings show it as long as no other record takes its place."""

    snapshot: Snapshot
    size_bytes: int
    modified_s: float  # JUST_MADE: this process made it, and no listing has shown it since
    tag: bytes  # half the SHA-256 of the store's tag, which may have any length
    text: str = ""  # that tag, if a listing of this process has shown it

    @staticmethod
    def from_listing(snapshot: Snapshot, info: ObjectInfo) -> KnownRecord:
        """Return a record as a listing shows it."""
        return KnownRecord(snapshot, info.size_bytes, info.modified_s, shortened(info.tag), info.tag)

    def with_text(self, tag: str) -> KnownRecord:
        """Return the same record with the store's tag, which `is_listed_as` compares faster than its half SHA-256."""
        return replace(self, text=tag)

    @staticmethod
    def unpack(data: bytes, key: str) -> KnownRecord:
        """Return the record that `pack` has encoded.

        If no listing has shown it to the process that made it, it is read again before it is believed: another record
        of its size may lie under its key by now.

        Raises:
            FormatError, IntegrityError, struct.error: it is damaged.
        """
        size_bytes, modified_s, tag = _LISTED.unpack_from(data)
        snapshot = records.decode(data[_LISTED.size :], Snapshot, key)
        return KnownRecord(snapshot, size_bytes if modified_s != JUST_MADE else -1, modified_s, tag)

    def pack(self, data: bytes) -> bytes:
        """Return the bytes to cache, given the bytes of the record itself."""
        return _LISTED.pack(self.size_bytes, self.modified_s, self.tag) + data

    def is_listed_as(self, info: ObjectInfo) -> bool:
        """Return whether a listing shows this record, and not another one under its key."""
        if self.modified_s == JUST_MADE:
            return self.size_bytes == info.size_bytes
        if (self.size_bytes, self.modified_s) != (info.size_bytes, info.modified_s):
            return False
        return self.text == info.tag if self.text else self.tag == shortened(info.tag)


class KnownRecords(dict[str, KnownRecord]):
    """The records of one index, by key. Any thread may read; only one at a time may set a record or `update`."""

    def __init__(self) -> None:
        super().__init__()
        self._runs: dict[str, dict[str, KnownRecord]] = {}  # the same records, by the prefix of their run
        self._void: set[str] = set()  # keys of loose records that pages cover

    def __setitem__(self, key: str, record: KnownRecord) -> None:
        super().__setitem__(key, record)
        self._runs.setdefault(records_prefix(record.snapshot.run), {})[key] = record

    def drop(self, keys: Iterable[str]) -> None:
        """Forget records: pages have them."""
        for key in keys:
            record = self.pop(key)
            del self._runs[records_prefix(record.snapshot.run)][key]

    def under(self, prefix: str) -> Mapping[str, KnownRecord]:
        """Return all records by key, or those of a run, by `records_prefix`."""
        return self._runs.get(prefix, {}) if prefix != records_prefix() else self

    def set_void(self, prefix: str, void: set[str]) -> set[str]:
        """Note the keys of all loose records under a prefix that pages cover, as they were listed; return them."""
        self._void = {key for key in self._void if not key.startswith(prefix)} | void
        return void

    def count(self, run: str, *, void_too: bool = False) -> int:
        """Return how many snapshots of a run are known; if `void_too`, add loose records that pages cover."""
        known = len({record.snapshot.id for record in self.under(records_prefix(run)).values()})
        return known + void_too * sum(key.startswith(records_prefix(run)) for key in self._void)

    def ruling(self, run: str) -> list[Snapshot]:
        """Return the highest known revision of each snapshot of a run."""
        of_run = sorted((one.snapshot for one in self.under(records_prefix(run)).values()), key=lambda s: s.revision)
        return list({snapshot.id: snapshot for snapshot in of_run}.values())

    def update(self, known: Mapping[str, KnownRecord]) -> None:  # type: ignore[override]
        """Add records, by key."""
        for key, record in known.items():
            self[key] = record


def other_revisions(
    known: KnownRecords, unknown: Iterable[str], read: Callable[[str], bytes | SnapstoreError]
) -> dict[str, Snapshot]:
    """Return another revision of snapshots whose ruling record cannot be read, by id.

    Only a repair changes the seq of a snapshot.

    Args:
        unknown: keys of these records.
        read: returns the bytes of the record under a key, or the error of reading it.
    """
    keys = {parsed[2]: (key, parsed) for key in unknown if (parsed := parse_record_key(key))}
    found = {r.snapshot.id: r.snapshot for r in known.values() if r.snapshot.id in keys}
    for name, (key, (run, step, _, revision)) in keys.items():
        others = (record_key(run, step, name, other) for other in (revision - 1, 0) if other >= 0)
        for other in dict.fromkeys(others):
            if name not in found and other != key and isinstance(data := read(other), bytes):
                with suppress(SnapstoreError):
                    found[name] = records.decode(data, Snapshot, other)
    return found


def packed(known: Mapping[str, KnownRecord]) -> dict[str, bytes]:
    """Return the bytes of records in the cache, by key."""
    return {key: record.pack(records.encode(record.snapshot)) for key, record in known.items()}
