"""Known records: what an index knows of each record, by key and by run.

In: records, and how a listing shows them. Out: whether a listing still shows them so, and copies: a program may change
lists and dicts of a record, as to make a table of metrics, and no later answer may show that. The number of records may
be large, so the keys of one run are found without a look at those of other runs.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from ..format import records
from ..format.keys import records_prefix
from ..format.records import Snapshot
from ..storage.base import ObjectInfo
from .lmdb_file import shortened

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


class KnownRecords:
    """The records of one index. Not safe to change from several threads.

    Attributes:
        superseded: keys of records, of which a listing has shown a later revision too. No record is ever deleted.
    """

    def __init__(self) -> None:
        self.superseded: set[str] = set()
        self._by_key: dict[str, KnownRecord] = {}
        self._runs: dict[str, dict[str, KnownRecord]] = {}  # the same records, by the prefix of their run

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def __getitem__(self, key: str) -> KnownRecord:
        return self._by_key[key]

    def __setitem__(self, key: str, record: KnownRecord) -> None:
        self._by_key[key] = self._runs.setdefault(records_prefix(record.snapshot.run), {})[key] = record

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._by_key)

    def get(self, key: str) -> KnownRecord | None:
        """Return a record; None if it is not known. Any thread may ask."""
        return self._by_key.get(key)

    def under(self, prefix: str) -> Mapping[str, KnownRecord]:
        """Return all records by key, or those of a run, by `records_prefix`."""
        return self._runs.get(prefix, {}) if prefix != records_prefix() else self._by_key

    def values(self) -> Collection[KnownRecord]:
        """Return all records."""
        return self._by_key.values()

    def update(self, known: Mapping[str, KnownRecord]) -> None:
        """Add records, by key."""
        for key, record in known.items():
            self[key] = record


def packed(known: Mapping[str, KnownRecord]) -> dict[str, bytes]:
    """Return the bytes of records in the cache, by key."""
    return {key: record.pack(records.encode(record.snapshot)) for key, record in known.items()}
