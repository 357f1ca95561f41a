"""Record listing: list the records of a store, and find the ruling one of each snapshot.

In: a store, and the records that an index knows. Out: which records rule, how they are listed if that is news, and the
known records that are not listed. There may be tens of thousands of records, and a save lists those of its run twice.
So a local store looks only at the files of ruling records, and once at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..format.keys import name_of_record, parse_record_key, superseded
from ..storage.base import ObjectInfo, ObjectStore
from .known_records import JUST_MADE, KnownRecords


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
