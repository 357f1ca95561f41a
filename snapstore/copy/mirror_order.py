"""Mirror order: which snapshot of two stores is later, which tags it gets, and which snapshots a mirror lacks.

In: what the first store has, and what its mirror has. Out: answers from their records alone. Either store may lack
snapshots: the first one may be new, or an older backup, and a mirror keeps what its own policies keep.
"""

from __future__ import annotations

from ..catalog.history import View
from ..format.records import COMMITTED, FORGOTTEN, SWEPT, Snapshot

#: The states, in the mirror, of a snapshot that was mirrored once.
MIRRORED = (COMMITTED, FORGOTTEN, SWEPT)


def lacks(here: View, there: View, snapshot: Snapshot) -> bool:
    """Return whether a mirror is to get a committed snapshot: it never had it, or it has forgotten a tagged one."""
    known = there.get(snapshot.id)
    return known is None or known.state not in ((COMMITTED,) if due_tags(here, there, snapshot) else MIRRORED)


def due_tags(here: View, there: View, snapshot: Snapshot) -> list[str]:
    """Return the tags that a snapshot is to have in a mirror.

    A later snapshot keeps its tags there if the first store does not know it: that may be an older backup.
    """
    tagged = there.tagged(snapshot.run)

    def is_kept(s: Snapshot) -> bool:
        return here.get(s.id) is None and is_later_there(there, s, snapshot)

    return [name for name in here.tags_of(snapshot) if not any(map(is_kept, tagged.get(name, ())))]


def free_tags(here: View, there: View, snapshot: Snapshot) -> list[str]:
    """Return the tags of a snapshot that is copied back: a tag that is on another one there may have moved since.

    If the first store did not know the snapshot, it may be an older backup: then tags of earlier snapshots are free.
    """
    is_known = (known := there.get(snapshot.id)) is not None and known.state in MIRRORED
    tagged = there.tagged(snapshot.run)

    def is_held(s: Snapshot) -> bool:
        return is_known or not is_later_there(here, snapshot, s)

    return [name for name in here.tags_of(snapshot) if not any(map(is_held, tagged.get(name, ())))]


def is_later_there(there: View, snapshot: Snapshot, here: Snapshot) -> bool:
    """Return whether a snapshot that only the mirror has is later than one that the mirror may have too."""
    known = there.get(here.id)
    return is_later(snapshot, here) if known is None else (snapshot.seq, snapshot.id) > (known.seq, known.id)


def is_later(there: Snapshot, here: Snapshot) -> bool:
    """Return whether a snapshot that only the mirror has is later than one that only the first store has.

    Its date and its number must both say so: the clocks of two hosts may differ, and a manager without the mirror may
    have begun again with low numbers.
    """
    return there.created > here.created and there.seq > here.seq
