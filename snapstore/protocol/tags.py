"""Tags: each names one snapshot of a run, whoever puts it on another one at the same time.

In: a snapshot that has just got tags, and the records before that. Out: the same tags off the run's other snapshots.

A tag must never be on none, since a policy forgets what has none. So whoever takes it off a snapshot (1) lists the
records, then (2) creates a revision, with the tag, of the snapshot that keeps it, then (3) creates the very next
revision of the other one as it was listed. If somebody has revised the other one since, all begins anew. Thus a
snapshot loses a tag only to one that was given it, or confirmed in it, later; the last one given it loses it to none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..catalog.history import View
from ..context import Context
from ..errors import ConflictError
from ..format.records import Snapshot
from . import revisions

ATTEMPTS = 20
#: After so many, two that take it back from each other go by one order.
OWN_ATTEMPTS = 3


def take(context: Context, names: Sequence[str], taker: Snapshot, before: View) -> Snapshot:
    """Take tags off the other snapshots of the run of one that has just got them.

    It keeps them against those that had them before. Of those that got them at the same time the newest keeps them, by
    the order that decides which one a reference names: all who take them at once agree on it, at last even those that
    see each other as the one that had it before.

    Args:
        before: the records on a listing from before it got them.

    Returns:
        The taker as it is now: it may have lost them to others that got them meanwhile.

    Raises:
        ConflictError: other processes keep revising the snapshots; several have the tags.
    """
    had = {name: {s.id for s in _holders(before, taker, name)} - {taker.id} for name in names}
    losers = [s for s in before.snapshots(taker.run) if any(s.id in had[name] for name in names)]
    losing = {s.id: {name for name in names if s.id in had[name]} for s in losers}
    for attempt in range(ATTEMPTS):
        try:
            for snapshot in losers:
                tags = [tag for tag in snapshot.tags if tag not in losing[snapshot.id]]
                revisions.revise(context, snapshot, tags=tags)
            view = context.index.refresh()
            taker = view.get(taker.id) or taker
            keepers, losing = _decide(view, names, taker, had if attempt < OWN_ATTEMPTS else {})
            if not losing:
                return taker
            confirmed = {s.id: revisions.revise(context, s, tags=s.tags) for s in keepers}
            losers = [confirmed.get(s.id, s) for s in view.snapshots(taker.run) if s.id in losing]
        except ConflictError:
            losers = []
    raise ConflictError(
        f"{taker.ref}: other processes keep revising the snapshots of its run, several of which are tagged "
        f"{', '.join(names)} now; tag again"
    )


def _holders(view: View, taker: Snapshot, name: str) -> list[Snapshot]:
    return [s for s in view.snapshots(taker.run) if name in s.tags]


def _decide(
    view: View, names: Sequence[str], taker: Snapshot, had: dict[str, set[str]]
) -> tuple[list[Snapshot], dict[str, set[str]]]:
    """(who keeps tags that others lose, by id which tags who loses)."""
    keepers: dict[str, Snapshot] = {}
    losing: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        holders = _holders(view, taker, name)
        if len(holders) < 2 or all(s.id != taker.id for s in holders):
            continue  # if it has lost the tag, those who took it see to the rest
        keeper = [s for s in holders if s.id not in had.get(name, ())][-1]
        keepers[keeper.id] = keeper
        for other in holders:
            if other.id != keeper.id:
                losing[other.id].add(name)
    return list(keepers.values()), losing
