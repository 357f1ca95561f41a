"""Mirror order: which snapshot of two stores is later, which tags it gets, and which snapshots a mirror gets, and when.

In: what the first store has, and what its mirror has. Out: answers from their records alone. Either store may lack
snapshots: the first one may be new, or an older backup, and a mirror keeps what its own policies keep.

A snapshot that could not be copied is never given up: a damaged one may be repaired, and one that a store withholds may
be whole. But each attempt may read and put all of its bytes, so each further attempt comes later.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import itemgetter

import msgspec

from .. import retention
from ..catalog.history import View, is_dropped
from ..errors import InvalidInputError, NotFoundError
from ..format.records import ABORTED, COMMITTED, FORGOTTEN, SWEPT, Snapshot
from ..protocol.forget import NAMED

#: The states, in the mirror, of a snapshot that was mirrored once.
MIRRORED = (COMMITTED, FORGOTTEN, SWEPT)


def is_mirrored(known: Snapshot | None) -> bool:
    """Return whether a mirror has a snapshot, or had it and did not lose it, by its record there."""
    return known is not None and known.state in MIRRORED and not is_dropped(known)


def lacks(here: View, there: View, snapshot: Snapshot) -> bool:
    """Return whether a mirror is to get a committed snapshot.

    It never had it, or a repair has dropped it there, or the mirror has forgotten it and it is tagged.
    """
    known = there.get(snapshot.id)
    is_due = known is not None and known.state != COMMITTED and bool(due_tags(here, there, snapshot))
    return is_due or not is_mirrored(known)


def wanted(
    keep: Sequence[retention.Policy],
    here: View,
    kept: Sequence[Snapshot],
    found: Sequence[Snapshot],
    failed: Container[str],
) -> list[Snapshot]:
    """Return those of `found` that the policies of a mirror would keep, in the place that a copy would take.

    Args:
        kept: the snapshots of the mirror that policies count, in order.
        failed: ids of snapshots that could not be copied. The policies do not count them for any other, since the
            mirror may never get them.
    """
    chosen = _chosen(keep, here, kept, [s for s in found if s.id not in failed])
    for one in (s for s in found if s.id in failed):
        if one.id in _chosen(keep, here, kept, [s for s in found if s is one or s.id not in failed]):
            chosen.add(one.id)
    return [s for s in found if s.id in chosen]


def _chosen(
    keep: Sequence[retention.Policy], here: View, kept: Sequence[Snapshot], found: Sequence[Snapshot]
) -> set[str]:
    """Return the ids of what policies keep of `kept` and `found`; of all, if they would keep nothing."""
    if not found:
        return set()
    order = {s.id: number for number, s in enumerate(here.snapshots(found[0].run, states=None))}
    highest = list(accumulate((order.get(s.id, -1) for s in kept), max))
    only_there = [(i, s) for i, s in enumerate(kept) if s.id not in order]
    places = [(i, 1, s) for i, s in enumerate(kept)]
    for s in found:  # before the first that was saved later
        place = next((i for i, other in only_there if is_later(other, s)), len(kept))
        places.append((min(bisect(highest, order[s.id]), place), 0, s))
    places.sort(key=itemgetter(0, 1))
    in_order = [msgspec.structs.replace(s, seq=number) for number, (*_, s) in enumerate(places)]
    with suppress(InvalidInputError):  # policies that would keep nothing leave nothing out
        return {d.snapshot.id for d in retention.apply(keep, in_order) if d.reasons}
    return {s.id for s in in_order}


def due_tags(here: View, there: View, snapshot: Snapshot) -> list[str]:
    """Return the tags that a snapshot is to have in a mirror.

    A later snapshot keeps its tags there if the first store does not know it: that may be an older backup.
    """
    return here.tags_for(there, snapshot, lambda s: here.get(s.id) is None and is_later_there(there, s, snapshot))


def free_tags(here: View, there: View, snapshot: Snapshot) -> list[str]:
    """Return the tags of a snapshot that is copied back: a tag that is on another one there may have moved since.

    If the first store did not know the snapshot, it may be an older backup: then tags of earlier snapshots are free.
    """
    is_known = (known := there.get(snapshot.id)) is not None and known.state in MIRRORED
    return here.tags_for(there, snapshot, lambda s: is_known or not is_later_there(here, snapshot, s))


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


def newest_of_both(
    here: View, view_of_mirror: Callable[[], View | None], run: str, asked: str
) -> tuple[Snapshot | None, bool]:
    """Return (the newest snapshot of a run in both stores, whether only the mirror has it).

    If the first store knows the mirror's newest snapshot, the order in the first store decides, because the clocks of
    two hosts may differ. Otherwise the first store may be an older backup. Then their numbers in the mirror decide, or
    `is_later` if the mirror never had the first store's newest snapshot.

    Args:
        view_of_mirror: returns what the mirror has; None if it cannot be reached.
        asked: the question about the mirror, for errors.

    Raises:
        IntegrityError, StorageError: a record that may be newer is gone, or cannot be read: in the first store, or in
            the mirror if the first store does not have it.
    """
    ours, there = here.latest(run), view_of_mirror()
    theirs = there.latest_beside(here, run, asked, forgotten_last(here, run)) if there else None
    if theirs is None or there is None:
        return ours, False
    held = here.get(theirs.id)
    if ours is not None:
        known = there.get(ours.id)
        if known is None or known.state not in MIRRORED:
            is_newer = not is_later(theirs, ours)
        else:
            is_newer = known.seq >= theirs.seq
        if is_newer if held is None else ours.seq >= held.seq:
            return ours, False
    return theirs, held is None or held.state not in (COMMITTED, FORGOTTEN) or is_dropped(held)


def forgotten_last(here: View, run: str) -> set[str]:
    """Return the ids of the newest snapshots of the first store, if they were forgotten by name: nobody resumes there.

    An earlier one that was forgotten by name counts in the mirror: the later ones may be damaged.
    """
    saved = [s for s in here.snapshots(run, states=None) if s.state != ABORTED]
    return {s.id for s in takewhile(lambda s: s.reason == NAMED, reversed(saved))}


def only_there(here: View, view_of_mirror: Callable[[], View | None], run: str, name: str) -> Snapshot | None:
    """Return the snapshot that a step, a tag or a word names, if only the mirror has it; None: read the first store.

    A forgotten snapshot of the first store counts only if no store has a committed one. One that a repair has dropped
    there counts only if the mirror does not have it.

    Args:
        view_of_mirror: returns what the mirror has; None if it cannot be reached. It is called only if it matters.

    Raises:
        NotFoundError: the name names nothing in either store.
        IntegrityError, StorageError: the answer may be a snapshot whose record is gone or cannot be read.
    """
    ref, is_word = f"{run}@{name}", name in ("best", "highest") and name not in here.tagged(run)
    there = view_of_mirror() if is_word else None
    tagged = there.tagged(run).get(name, ()) if there else ()
    known = {s.id for s in here.snapshots(run)} if tagged else ()
    if all(s.id in known for s in tagged):  # a tag comes before the word, also on what only the mirror has
        with suppress(NotFoundError):
            here.resolve(ref, (COMMITTED,))
            return None
        there = there or view_of_mirror()
    if there is None:
        return None
    try:
        forgotten = here.resolve(ref)
    except NotFoundError:
        return there.resolve(ref)
    dropped = is_dropped(forgotten)
    with suppress(NotFoundError):
        found = there.resolve(ref, (COMMITTED, FORGOTTEN) if dropped else (COMMITTED,))
        return found if dropped or found.id != forgotten.id else None
    return None


#: Between two attempts to copy one snapshot there is at most this time [s].
PAUSE_MAX_S = 24 * 3600.0


@dataclass(slots=True)
class _CopyFailure:
    """The last failure of a snapshot; `next_s` is when to try again, by the monotonic clock."""

    why: str
    pause_s: float
    next_s: float


class Failures:
    """The failures of one mirror, by the id of the snapshot. Its caller holds a lock."""

    def __init__(self) -> None:
        self._found: dict[str, _CopyFailure] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def note(self, name: str, why: str, pause_s: float) -> bool:
        """Note a failure; return whether it is news.

        Args:
            pause_s: how long to wait after the first failure; after each further one it is twice as long [s].
        """
        before = self._found.get(name)
        pause_s = pause_s if before is None else min(2 * before.pause_s, PAUSE_MAX_S)
        self._found[name] = _CopyFailure(why, pause_s, time.monotonic() + pause_s)
        return before is None or before.why != why

    def keep_only(self, names: Container[str]) -> None:
        """Forget the failures of all other snapshots."""
        self._found = {name: failure for name, failure in self._found.items() if name in names}

    def end(self, name: str) -> None:
        """Forget the failure of a snapshot, if there is one."""
        self._found.pop(name, None)

    def try_all(self) -> None:
        """Make every snapshot due now."""
        for failure in self._found.values():
            failure.next_s = 0.0

    def is_due(self, name: str) -> bool:
        """Return whether a snapshot is to be tried now."""
        failure = self._found.get(name)
        return failure is None or failure.next_s <= time.monotonic()

    def pause_s(self) -> float | None:
        """Return how long to wait until some snapshot is to be tried again; None: there is none."""
        if not self._found:
            return None
        return max(0.0, min(failure.next_s for failure in self._found.values()) - time.monotonic())

    def whys(self) -> list[str]:
        """Return why the snapshots could not be copied, each reason once."""
        return list(dict.fromkeys(failure.why for failure in self._found.values()))
