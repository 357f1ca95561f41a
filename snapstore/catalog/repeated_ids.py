"""Repeated ids: find the records of a second snapshot under the id of another one.

In: keys of records. Out: which of them are left out, and why. An id is random, so a second snapshot with the same id is
forged. If the forged record counted, the first snapshot would be gone, and the next gc would delete its bytes. Then a
writer that may only add a record, or a session that a gc fences, could delete any snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from ..format.keys import ID_DIGITS, UNKNOWN_RUN, name_of_record, parse_record_key
from ..storage.base import ObjectInfo, ObjectStore


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
