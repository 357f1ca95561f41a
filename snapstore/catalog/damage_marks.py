"""Damage marks: which snapshots a restore or a check on this machine has found damaged.

In: a snapshot, and its damage in words. Out: the same, for later choices. A mark belongs to the manifests of a
snapshot: one that a repair has healed has others, and is marked no longer. It also ends with what it stands on: the
quarantine of its packs, or a manifest that cannot be read. A mark never proves anything. It may only keep a snapshot
from being chosen or counted, and packs from being built on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

from ..format.records import Snapshot

#: The text of a mark is cut to this many characters.
MAX_WHY = 500
#: What a mark stands on: its packs are in quarantine; or a manifest cannot be read.
NOTED, MANIFEST = "noted", "manifest"
#: Tells whether the manifests of a snapshot can be read.
Reads = Callable[[Snapshot], bool]
#: Stores marks by name; None removes one.
PutMarks = Callable[[Mapping[str, bytes | None]], object]


def mark_name(snapshot: Snapshot) -> str:
    """Return the name of a snapshot with its manifests of now."""
    names = "".join(ref.sha256 for ref in snapshot.manifests)
    return f"{snapshot.id}.{hashlib.sha256(names.encode()).hexdigest()[:16]}"


class DamageMark(NamedTuple):
    """What is known of a damaged snapshot.

    Attributes:
        why: its damage in words.
        packs: keys of the packs in which it has damaged blobs.
        basis: what the mark stands on, and ends with: NOTED, MANIFEST, or "": only a new proof ends it.
    """

    why: str
    packs: list[str]
    basis: str


class DamageMarks:
    """The marks of one repository, in memory.

    Args:
        put: called with each change, to keep it beyond this process.
    """

    def __init__(self, put: PutMarks) -> None:
        self._put = put
        self._marks: dict[str, DamageMark] = {}

    def __bool__(self) -> bool:
        return bool(self._marks)

    def load(self, name: str, data: bytes) -> None:
        """Take over a mark as it was put; one that does not decode is left out."""
        try:
            why, packs, basis = json.loads(data)
            self._marks[name] = DamageMark(str(why), [str(key) for key in packs], str(basis))
        except (ValueError, TypeError):
            return

    def packed(self) -> dict[str, bytes]:
        """Return all marks as they are put."""
        return {name: json.dumps(mark).encode() for name, mark in list(self._marks.items())}

    def why(self, snapshot: Snapshot) -> str:
        """Return the damage of a snapshot; "" if none is known."""
        mark = self._marks.get(mark_name(snapshot)) if self._marks else None
        return mark.why if mark is not None else ""

    def packs(self) -> set[str]:
        """Return the keys of the packs in which marked snapshots have damaged blobs."""
        return {key for mark in list(self._marks.values()) for key in mark.packs}

    def add(self, snapshot: Snapshot, why: str, packs: Iterable[str] = (), basis: str | None = None) -> None:
        """Mark a snapshot, in place of an earlier mark; the packs of both count. `basis` None: as before, or ""."""
        name = mark_name(snapshot)
        known = self._marks.get(name, DamageMark("", [], ""))
        old = [other for other in list(self._marks) if other.startswith(f"{snapshot.id}.") and other != name]
        basis = known.basis if basis is None else basis
        self._marks[name] = DamageMark(why[:MAX_WHY] or "damaged", sorted({*known.packs, *packs}), basis)
        self._change({name: json.dumps(self._marks[name]).encode()}, old)

    def keep_only(self, damaged: Iterable[Snapshot]) -> None:
        """Remove all marks but those of some snapshots: every other one was rebuilt, or is gone."""
        kept = {mark_name(snapshot) for snapshot in damaged} if self._marks else set()
        self._change({}, [name for name in list(self._marks) if name not in kept])

    def settle(self, snapshots: Iterable[Snapshot], quarantined: Container[str], reads: Reads) -> None:
        """Remove the marks whose basis is gone.

        Args:
            quarantined: keys of the packs in quarantine; a repair releases those that are whole again.
            reads: whether the manifests of a snapshot can be read again.
        """
        gone = []
        for snapshot in snapshots if self._marks else ():
            mark = self._marks.get(name := mark_name(snapshot))
            if mark is None:
                continue
            if (mark.basis == NOTED and not any(key in quarantined for key in mark.packs)) or (
                mark.basis == MANIFEST and reads(snapshot)
            ):
                gone.append(name)
        self._change({}, gone)

    def _change(self, new: Mapping[str, bytes], old: Iterable[str]) -> None:
        gone = dict.fromkeys(old)
        for name in gone:
            self._marks.pop(name, None)
        if new or gone:
            self._put({**new, **gone})
