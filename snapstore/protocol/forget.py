"""Forget: mark snapshots of a run as forgotten, and bring them back. The bytes stay until a gc.

In: policies, or references. Out: new revisions of the records, in state `forgotten` or `committed`; `revisions` writes
them. Pure functions in `retention` decide what a policy keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from .. import retention
from ..catalog import policy_store
from ..catalog.history import View, run_of
from ..catalog.needed_keys import all_needed_keys, needed_sizes
from ..catalog.read_twice import listed
from ..checks import check_list, check_name
from ..context import Context
from ..errors import IntegrityError, InvalidInputError, NotFoundError, SnapstoreError
from ..format.keys import records_prefix
from ..format.records import COMMITTED, FORGOTTEN, SWEPT, Snapshot
from ..storage.base import ObjectStore
from ..text import brief, human_bytes
from . import revisions
from .gc import running_sessions
from .notes import in_need_of_quarantined, in_quarantine

#: At most so many snapshots stay only because they are held.
HELD_AT_MOST = 8
#: The reason of a snapshot that was forgotten by its name, not by a policy; and of one whose space was asked for.
NAMED, FOR_SPACE = "named by the user", "to free space"


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """The result of a forget, or of its dry run.

    Attributes:
        kept: (snapshot, reasons) of every snapshot that stays.
        forgotten: the snapshots that were forgotten; in a dry run, that would be.
        unknown: the records of the run that cannot be read or are gone (key: why): policies do not count their
            snapshots, which stay. Empty if references name the snapshots.
        frees_bytes: of `forget_to_free`: what a gc then frees; else 0.
        left: how many more no policy keeps; the upkeep of a save leaves them to the next one.
    """

    kept: list[tuple[Snapshot, tuple[str, ...]]]
    forgotten: list[Snapshot]
    dry_run: bool = False
    unknown: dict[str, str] = field(default_factory=dict)
    frees_bytes: int = 0
    left: int = 0

    __repr__ = brief


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which of the snapshots that no policy keeps stay for now.

    Attributes:
        held: ids of snapshots that are not mirrored yet: the oldest HELD_AT_MOST of them stay.
        most: forget at most so many, the oldest first; None: all.
        stops: whether to forget no more.
    """

    held: Container[str] = ()
    most: int | None = None
    stops: Callable[[], bool] = lambda: False


def forget(
    context: Context,
    keep: Sequence[retention.Policy],
    *,
    run: str,
    dry_run: bool = False,
    force: bool = False,
    view: View | None = None,
    bounds: Bounds | None = None,
) -> ForgetResult:
    """Forget the snapshots of a run that no policy keeps; see `Repository.forget`.

    Args:
        view: a listing of all records; None: list those of the run.
        bounds: which of the snapshots that no policy keeps stay; None: none.
    """
    bounds = bounds or Bounds()
    run = check_name("run", run)
    view = view or context.index.refresh_for(run, (COMMITTED,))
    view.require_run(run)
    context.store.sync(records_prefix(run))  # no power loss may cost a newer snapshot after an older one is forgotten
    snapshots = view.snapshots(run)
    damaged = in_need_of_quarantined(context, snapshots)
    gone = {s.id for s in view.missing} - damaged  # tags may be gone with the last record
    counted = [s for s in snapshots if s.id not in damaged | gone]
    decisions = retention.apply(keep, counted, force=force, needs=needs_of(context, counted, view))
    chosen = {d.snapshot.id for d in decisions if not d.reasons}
    by_id = {s.id: s for s in snapshots}
    kept = [(by_id[d.snapshot.id], d.reasons) for d in decisions if d.reasons]
    kept += [(s, ("damaged: 'snapstore repair' heals it, or drops it",)) for s in snapshots if s.id in damaged]
    kept += [(s, ("its last record is gone: 'snapstore repair' puts it back",)) for s in snapshots if s.id in gone]
    holding = [s for s in snapshots if s.id in chosen and s.id in bounds.held][:HELD_AT_MOST]
    kept += [(s, ("not mirrored yet",)) for s in holding]
    chosen -= {s.id for s in holding}
    going = [s for s in snapshots if s.id in chosen]
    left = len(going[bounds.most :]) if bounds.most is not None else 0
    going = going[: bounds.most]
    if dry_run:
        return ForgetResult(kept, going, True, view.unknown(run))
    superseded, policy = view.superseded(run), retention.describe(keep)
    forgotten: list[Snapshot] = []
    for reason, group in (
        ("superseded by a later save of its step", [s for s in going if s.id in superseded]),
        ("kept by no policy", [s for s in going if s.id not in superseded]),
    ):
        forgotten += revisions.forget(context, group, policy=policy, reason=reason, stops=bounds.stops)
    return ForgetResult(kept, sorted(forgotten, key=lambda s: s.seq), unknown=view.unknown(run), left=left)


def may_forget(context: Context, keep: Sequence[retention.Policy], run: str) -> list[Snapshot] | None:
    """Return what `forget` may forget, by what this process knows of the run; it lists nothing.

    A snapshot that another process has saved since is left to the next look. None: only `forget` finds out.
    """
    if any(isinstance(policy, retention.KeepBytes) for policy in keep):
        return None
    try:
        decisions = retention.apply(keep, context.index.known(run).snapshots(run))
    except InvalidInputError:  # the policies would keep nothing, which `forget` reports
        return None
    return [d.snapshot for d in decisions if not d.reasons]


def needs_of(context: Context, snapshots: Sequence[Snapshot], view: View) -> retention.Needs:
    """Return what tells the objects that some snapshots of a run need, without those that any other snapshot needs.

    It reads the headers of manifests that the index does not know.

    Args:
        view: the records; if these are of the run alone, those of all runs are listed.
    """

    def needs() -> dict[str, dict[str, int]]:
        counted = {s.id for s in snapshots}
        of_all = view if view.only_run is None else context.index.refresh()
        others = [s for s in of_all.snapshots() if s.id not in counted]
        found = needed_sizes(context.index, [*snapshots, *others])
        stay = set().union(*(found.pop(s.id) for s in others))
        return {name: {key: size for key, size in sizes.items() if key not in stay} for name, sizes in found.items()}

    return needs


def forget_snapshots(
    context: Context, refs: Sequence[str], *, dry_run: bool = False, force: bool = False
) -> ForgetResult:
    """Forget the named snapshots; see `Repository.forget_snapshots`."""
    check_list("refs", refs)
    view = context.index.refresh()
    chosen = list({s.id: s for s in (view.resolve(ref, (COMMITTED,)) for ref in refs)}.values())
    whole = {} if force else {run: _newest_whole(context, view, run) for run in {s.run for s in chosen}}
    for snapshot in chosen:
        view.require_last(snapshot)
        if snapshot.tags:
            raise InvalidInputError(f"{snapshot.ref}: is tagged {', '.join(snapshot.tags)}; untag it first")
        if snapshot == view.newest(snapshot.run) and not force:
            raise InvalidInputError(f"{snapshot.ref}: is the newest of its run, needed to resume; pass force (--force)")
        if snapshot == whole.get(snapshot.run):
            raise InvalidInputError(
                f"{snapshot.ref}: is the newest of its run that is not known to be damaged, needed to resume; pass "
                "force (--force)"
            )
    if not dry_run:
        chosen = revisions.forget(context, chosen, policy="", reason=NAMED)
    return ForgetResult([], chosen, dry_run)


def forget_to_free(context: Context, free_bytes: int, *, run: str | None = None, dry_run: bool = False) -> ForgetResult:
    """Forget snapshots until a gc would free some bytes; see `Repository.forget_to_free`."""
    sizes = object_sizes(context.store)  # before the records: a save may commit meanwhile
    view = context.index.refresh()
    if run is not None:
        view.require_run(check_name("run", run))
    if unknown := view.unknown():
        text = f"forget: {next(iter(unknown))} and what it needs are not known, so a gc frees nothing"
        raise IntegrityError(f"{text}; run 'snapstore repair' first")
    space = _Space(context, view.snapshots(), sizes)
    runs = sorted({s.run for s in view.snapshots(run)})
    for name in runs if not dry_run else ():
        context.store.sync(records_prefix(name))  # see `forget`
    order = [(rank, s) for name in runs for rank, s in _by_policy(context, view, name)]
    order.sort(key=lambda one: (one[0], one[1].created, one[1].id))
    chosen: list[Snapshot] = []
    for _, snapshot in order:
        if space.freed >= free_bytes:
            break
        space.take(snapshot)
        chosen.append(snapshot)
    if space.freed < free_bytes:
        raise InvalidInputError(
            f"forget: expected {human_bytes(free_bytes)} to free, got at most {human_bytes(space.freed)}: the newest "
            "snapshot of each run, tagged and damaged ones stay; untag some, or copy a run away"
        )
    for snapshot in reversed(chosen):  # the one that is worth most first
        if space.freed - space.only(snapshot) >= free_bytes:
            space.give_back(snapshot)
            chosen.remove(snapshot)
    if not dry_run:
        forgotten = revisions.forget(context, chosen, policy="", reason=FOR_SPACE)
        for snapshot in chosen:
            if snapshot.id not in {one.id for one in forgotten}:  # it was tagged meanwhile, for example
                space.give_back(snapshot)
        chosen = forgotten
    return ForgetResult([], chosen, dry_run, frees_bytes=space.freed)


def object_sizes(store: ObjectStore) -> dict[str, int]:
    """Return the sizes of all packs and manifests, by key."""
    return {key: info.size_bytes for key, info in (listed(store, "packs/") | listed(store, "manifests/")).items()}


def _by_policy(context: Context, view: View, run: str) -> list[tuple[int, Snapshot]]:
    """Return the snapshots of a run that may go, each with a rank; the lowest rank goes first.

    First those that no policy keeps, then those that only the last of the stored policies keep, and so on.
    """
    snapshots = view.snapshots(run)
    stay = in_need_of_quarantined(context, snapshots) | {s.id for s in view.missing}
    policies = policy_store.read(context.store, run)
    steps = [s for s in snapshots if s.id not in stay]
    kept = retention.reasons_by_policy(policies, steps, needs_of(context, steps, view))
    found = []
    for decision in retention.apply([], steps, force=True):
        if not decision.reasons:  # neither tagged nor the newest
            first = next((number for number, reasons in enumerate(kept) if decision.snapshot.id in reasons), len(kept))
            found.append((len(kept) - first, decision.snapshot))
    return found


class _Space:
    """The objects of a repository, and the snapshots that need them.

    Attributes:
        freed: size of the objects that no snapshot needs [bytes]. While a save runs, those that none needed from the
            beginning do not count: they may be its own.
    """

    def __init__(self, context: Context, snapshots: Sequence[Snapshot], sizes: Mapping[str, int]) -> None:
        kept = in_quarantine(context.store)
        self._sizes = {key: size for key, size in sizes.items() if key not in kept}
        self._keys: dict[str, set[str]] = {}
        for snapshot, keys in all_needed_keys(context.index, snapshots):
            if isinstance(keys, SnapstoreError):
                raise keys
            self._keys[snapshot.id] = keys & self._sizes.keys()
        self._users = Counter(key for keys in self._keys.values() for key in keys)
        unneeded = sum(size for key, size in self._sizes.items() if key not in self._users)
        self.freed = 0 if unneeded and running_sessions(context.store) else unneeded

    def only(self, snapshot: Snapshot) -> int:
        """Return the bytes that are free only because a snapshot was taken."""
        return sum(self._sizes[key] for key in self._keys[snapshot.id] if not self._users[key])

    def take(self, snapshot: Snapshot) -> None:
        """Let a snapshot need nothing."""
        self._users.subtract(self._keys[snapshot.id])
        self.freed += self.only(snapshot)

    def give_back(self, snapshot: Snapshot) -> None:
        """Let a snapshot that was taken need its objects again."""
        self.freed -= self.only(snapshot)
        self._users.update(self._keys[snapshot.id])


def _newest_whole(context: Context, view: View, run: str) -> Snapshot | None:
    """Return the newest snapshot of a run that is not known to be damaged; None if there is none.

    If all need packs in quarantine, it is the newest one without a mark: it may need only intact blobs of them.
    """
    snapshots = view.snapshots(run)[::-1]
    damaged = in_need_of_quarantined(context, snapshots)
    whole = [s for s in snapshots if s.id not in damaged]
    return next(iter(whole or [s for s in snapshots if not context.index.marks.why(s)]), None)


def unforget(context: Context, ref: str) -> Snapshot:
    """Bring a forgotten snapshot back; see `Repository.unforget`."""
    states = (FORGOTTEN, COMMITTED, SWEPT)
    view = context.index.refresh_for(run_of(ref), states)
    snapshot = view.resolve(ref, states)
    forgotten = [s for s in view.snapshots(snapshot.run, (FORGOTTEN,)) if s.step == snapshot.step]
    if snapshot.state != FORGOTTEN and forgotten and "@" in ref:  # an id names one snapshot
        snapshot = forgotten[-1]
    view.require_last(snapshot)
    if snapshot.state == COMMITTED:
        raise InvalidInputError(f"{ref}: is not forgotten")
    if snapshot.state == SWEPT:
        raise NotFoundError(f"{ref}: was forgotten and a gc has deleted its bytes; it cannot come back")
    return revisions.revise(context, snapshot, state=COMMITTED, policy="", reason="")
