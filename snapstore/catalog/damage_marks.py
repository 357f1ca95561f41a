"""Damage marks: which snapshots a restore or a check on this machine has found damaged.

In: a snapshot, and its damage in words. Out: the same, for later choices. A mark belongs to the manifests of a
snapshot: one that a repair has healed has others, and is marked no longer. A mark never proves anything. It may only
keep a snapshot from being chosen or counted, and packs from being built on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping

from ..format.records import Snapshot

#: The text of a mark is cut to this many characters.
MAX_WHY = 500
#: Stores marks by name; None removes one.
PutMarks = Callable[[Mapping[str, bytes | None]], object]


def mark_name(snapshot: Snapshot) -> str:
    """Return the name of a snapshot with its manifests of now."""
    names = "".join(ref.sha256 for ref in snapshot.manifests)
    return f"{snapshot.id}.{hashlib.sha256(names.encode()).hexdigest()[:16]}"


class DamageMarks:
    """The marks of one repository, in memory.

    Args:
        put: called with each change, to keep it beyond this process.
    """

    def __init__(self, put: PutMarks) -> None:
        self._put = put
        self._marks: dict[str, tuple[str, list[str]]] = {}

    def load(self, name: str, data: bytes) -> None:
        """Take over a mark as it was put; one that does not decode is left out."""
        try:
            why, packs = json.loads(data)
            self._marks[name] = str(why), [str(key) for key in packs]
        except (ValueError, TypeError):
            return

    def packed(self) -> dict[str, bytes]:
        """Return all marks as they are put."""
        return {name: json.dumps(mark).encode() for name, mark in self._marks.items()}

    def why(self, snapshot: Snapshot) -> str:
        """Return the damage of a snapshot; "" if none is known."""
        return self._marks.get(mark_name(snapshot), ("", []))[0] if self._marks else ""

    def packs(self) -> set[str]:
        """Return the keys of the packs in which marked snapshots have damaged blobs."""
        return {key for _, packs in self._marks.values() for key in packs}

    def add(self, snapshot: Snapshot, why: str, packs: Iterable[str] = ()) -> None:
        """Mark a snapshot, in place of an earlier mark; the packs of both count."""
        name = mark_name(snapshot)
        known = self._marks.get(name, ("", []))[1]
        old = [other for other in self._marks if other.startswith(f"{snapshot.id}.") and other != name]
        self._marks[name] = why[:MAX_WHY] or "damaged", sorted({*known, *packs})
        self._change({name: json.dumps(self._marks[name]).encode()}, old)

    def keep_only(self, damaged: Iterable[Snapshot]) -> None:
        """Remove all marks but those of some snapshots: every other one was rebuilt, or is gone."""
        kept = {mark_name(snapshot) for snapshot in damaged} if self._marks else set()
        self._change({}, [name for name in self._marks if name not in kept])

    def _change(self, new: Mapping[str, bytes], old: Iterable[str]) -> None:
        gone = dict.fromkeys(old)
        for name in gone:
            del self._marks[name]
        if new or gone:
            self._put({**new, **gone})
