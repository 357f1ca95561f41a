"""Tags: keep each tag on one snapshot of a run, even if several processes move it at the same time.

In: a snapshot that has just got tags, and the records before that. Out: the run's other snapshots lose these tags.

At every moment a tag must be on at least one snapshot: a policy may forget a snapshot that has no tag. So a process
that takes the tag off a snapshot (1) lists the records, then (2) creates a revision, with the tag, of the snapshot that
keeps it, then (3) creates the very next revision of the other snapshot as it was listed. If another process has revised
the other snapshot since, it begins again. Thus a snapshot loses a tag only to a snapshot that got or confirmed the tag
later, and the last snapshot that gets a tag keeps it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

from ..catalog.history import View, run_of
from ..checks import check_tag, check_tags
from ..context import Context
from ..errors import ConflictError, InvalidInputError, NotFoundError
from ..format.records import COMMITTED, FORGOTTEN, Snapshot
from ..text import log, quoted
from .revisions import retry_conflicts, revise

#: After this many attempts, two processes that take a tag from each other both let the newest snapshot keep it.
ATTEMPTS_FOR_TAKER = 3


def tag(context: Context, ref: str, name: str) -> Snapshot:
    """Put a tag on a committed snapshot; see `Repository.tag`."""
    check_tag(name)
    before, tagged = _revise_committed(context, ref, lambda snapshot: check_tags([*snapshot.tags, name]))
    return take(context, [name], tagged, before)


def untag(context: Context, ref: str, name: str) -> Snapshot:
    """Take a tag off a committed snapshot; see `Repository.untag`."""

    def remove(snapshot: Snapshot) -> list[str]:
        if name not in snapshot.tags:
            there = ", ".join(snapshot.tags) or "none"
            raise NotFoundError(f"{snapshot.ref}: has no tag {quoted(name)}; tags: {there}")
        return [tag for tag in snapshot.tags if tag != name]

    return _revise_committed(context, ref, remove)[1]


def _revise_committed(context: Context, ref: str, tags_of: Callable[[Snapshot], list[str]]) -> tuple[View, Snapshot]:
    """Give a committed snapshot other tags; return (the records before that, the snapshot).

    Raises:
        NotFoundError: there is no such snapshot.
        InvalidInputError: it is not committed.
        ConflictError: other processes keep revising it.
    """

    def attempt() -> tuple[View, Snapshot]:
        view = context.index.refresh_for(run_of(ref), (COMMITTED, FORGOTTEN))
        snapshot = view.resolve(ref)
        view.require_last(snapshot)
        if snapshot.state != COMMITTED:
            raise InvalidInputError(f"{ref}: is {snapshot.state}; 'snapstore unforget' brings a forgotten one back")
        return view, revise(context, snapshot, tags=tags_of(snapshot))

    return retry_conflicts(attempt, lambda _: ConflictError(f"{ref}: other processes keep revising it; try again"))


def take(context: Context, names: Sequence[str], taker: Snapshot, before: View) -> Snapshot:
    """Take tags off the other snapshots of a run, after one snapshot (the taker) has got them.

    The taker keeps a tag against the snapshots that had it before. Among snapshots that got a tag at the same time, the
    newest keeps it, in the order that decides which snapshot a reference names: all takers know this order. If two
    takers each see the other as the earlier holder, after a few attempts both use this order too.

    Args:
        names: the tags.
        before: the records as listed before the taker got the tags.

    Returns:
        The taker as it is now: it may have lost the tags to a snapshot that got them meanwhile.

    Raises:
        ConflictError: other processes keep revising the snapshots; several of them have the tags.
    """
    if unknown := before.unknown(taker.run):
        text = "run=%s tags %s may also be on snapshots whose records cannot be read or are gone: %s"
        log.warning(text, taker.run, ", ".join(names), ", ".join(unknown))
    had = {name: {s.id for s in _holders(before, taker, name)} - {taker.id} for name in names}
    losers = [s for s in before.snapshots(taker.run) if any(s.id in had[name] for name in names)]
    losing = {s.id: {name for name in names if s.id in had[name]} for s in losers}
    attempts = itertools.count()

    def attempt() -> Snapshot:
        nonlocal taker, losers, losing
        takers_turn = next(attempts) < ATTEMPTS_FOR_TAKER
        due, losers = losers, []  # after a conflict, list and decide again first
        for snapshot in due:
            revise(context, snapshot, tags=[tag for tag in snapshot.tags if tag not in losing[snapshot.id]])
        view = context.index.refresh(taker.run)
        taker = view.get(taker.id) or taker
        keepers, losing = _decide(view, names, taker, had if takers_turn else {})
        if not losing:
            return taker
        confirmed = {s.id: revise(context, s, tags=s.tags) for s in keepers}
        losers = [confirmed.get(s.id, s) for s in view.snapshots(taker.run) if s.id in losing]
        raise ConflictError(f"{taker.ref}: several snapshots of its run are tagged {', '.join(names)}")

    return retry_conflicts(
        attempt,
        lambda _: ConflictError(
            f"{taker.ref}: other processes keep revising the snapshots of its run, several of which are tagged "
            f"{', '.join(names)} now; tag again"
        ),
    )


def _holders(view: View, taker: Snapshot, name: str) -> list[Snapshot]:
    gone = {s.id for s in view.missing}  # no record may take the place of their last one, which `repair` puts back
    return [s for s in view.snapshots(taker.run) if name in s.tags and s.id not in gone]


def _decide(
    view: View, names: Sequence[str], taker: Snapshot, had: dict[str, set[str]]
) -> tuple[list[Snapshot], dict[str, set[str]]]:
    """Return (the snapshots that keep a tag, the tags that each other snapshot loses, by its id)."""
    keepers: dict[str, Snapshot] = {}
    losing: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        holders = _holders(view, taker, name)
        if len(holders) < 2 or all(s.id != taker.id for s in holders):
            continue  # the process that has taken the tag from the taker handles the others
        keeper = [s for s in holders if s.id not in had.get(name, ())][-1]
        keepers[keeper.id] = keeper
        for other in holders:
            if other.id != keeper.id:
                losing[other.id].add(name)
    return list(keepers.values()), losing
