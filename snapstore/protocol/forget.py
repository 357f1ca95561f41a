"""Forget: mark snapshots of a run as forgotten, and bring them back. The bytes stay until a gc.

In: policies, or references. Out: new revisions of the records, in state `forgotten` or `committed`; `revisions` writes
them. Pure functions in `retention` decide what a policy keeps.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from .. import retention
from ..checks import check_list, check_name
from ..context import Context
from ..errors import InvalidInputError, NotFoundError
from ..format.keys import records_prefix
from ..format.records import COMMITTED, FORGOTTEN, SWEPT, Snapshot
from ..text import brief
from . import revisions
from .notes import in_need_of_quarantined

#: At most so many snapshots stay only because they are held.
HELD_AT_MOST = 8
#: The reason of a snapshot that was forgotten by its name, not by a policy.
NAMED = "named by the user"


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """The result of a forget, or of its dry run.

    Attributes:
        kept: (snapshot, reasons) of every snapshot that stays.
        forgotten: the snapshots that were forgotten; in a dry run, that would be.
        unknown: the records of the run that cannot be read or are gone (key: why): policies do not count their
            snapshots, which stay. Empty if references name the snapshots.
    """

    kept: list[tuple[Snapshot, tuple[str, ...]]]
    forgotten: list[Snapshot]
    dry_run: bool = False
    unknown: dict[str, str] = field(default_factory=dict)

    __repr__ = brief


def forget(
    context: Context,
    keep: Sequence[retention.Policy],
    *,
    run: str,
    dry_run: bool = False,
    force: bool = False,
    held: Container[str] = (),
) -> ForgetResult:
    """Forget the snapshots of a run that no policy keeps; see `Repository.forget`.

    Args:
        held: ids of snapshots that are not mirrored yet. The oldest HELD_AT_MOST of them that no policy keeps stay.
    """
    run = check_name("run", run)
    if not (view := context.index.refresh(run)).snapshots(run):
        (view := context.index.refresh()).require_run(run)
    context.store.sync(records_prefix(run))  # no power loss may cost a newer snapshot after an older one is forgotten
    snapshots = view.snapshots(run)
    damaged = in_need_of_quarantined(context, snapshots)
    gone = {s.id for s in view.missing} - damaged  # tags may be gone with the last record
    decisions = retention.apply(keep, [s for s in snapshots if s.id not in damaged | gone], force=force)
    chosen = {d.snapshot.id for d in decisions if not d.reasons}
    by_id = {s.id: s for s in snapshots}
    kept = [(by_id[d.snapshot.id], d.reasons) for d in decisions if d.reasons]
    kept += [(s, ("damaged: 'snapstore repair' heals it, or drops it",)) for s in snapshots if s.id in damaged]
    kept += [(s, ("its last record is gone: 'snapstore repair' puts it back",)) for s in snapshots if s.id in gone]
    holding = [s for s in snapshots if s.id in chosen and s.id in held][:HELD_AT_MOST]
    kept += [(s, ("not mirrored yet",)) for s in holding]
    chosen -= {s.id for s in holding}
    going = [s for s in snapshots if s.id in chosen]
    if dry_run:
        return ForgetResult(kept, going, True, view.unknown(run))
    superseded, policy = view.superseded(run), retention.describe(keep)
    forgotten: list[Snapshot] = []
    for reason, group in (
        ("superseded by a later save of its step", [s for s in going if s.id in superseded]),
        ("kept by no policy", [s for s in going if s.id not in superseded]),
    ):
        forgotten += revisions.forget(context, group, policy=policy, reason=reason)
    return ForgetResult(kept, sorted(forgotten, key=lambda s: s.seq), unknown=view.unknown(run))


def forget_snapshots(
    context: Context, refs: Sequence[str], *, dry_run: bool = False, force: bool = False
) -> ForgetResult:
    """Forget the named snapshots; see `Repository.forget_snapshots`."""
    check_list("refs", refs)
    view = context.index.refresh()
    chosen = list({s.id: s for s in (view.resolve(ref, (COMMITTED,)) for ref in refs)}.values())
    for snapshot in chosen:
        view.require_last(snapshot)
        if snapshot.tags:
            raise InvalidInputError(f"{snapshot.ref}: is tagged {', '.join(snapshot.tags)}; untag it first")
        if snapshot == view.newest(snapshot.run) and not force:
            raise InvalidInputError(f"{snapshot.ref}: is the newest of its run, needed to resume; pass force (--force)")
    if not dry_run:
        chosen = revisions.forget(context, chosen, policy="", reason=NAMED)
    return ForgetResult([], chosen, dry_run)


def unforget(context: Context, ref: str) -> Snapshot:
    """Bring a forgotten snapshot back; see `Repository.unforget`."""
    view = context.index.refresh()
    snapshot = view.resolve(ref, (FORGOTTEN, COMMITTED, SWEPT))
    forgotten = [s for s in view.snapshots(snapshot.run, (FORGOTTEN,)) if s.step == snapshot.step]
    if snapshot.state != FORGOTTEN and forgotten and "@" in ref:  # an id names one snapshot
        snapshot = forgotten[-1]
    view.require_last(snapshot)
    if snapshot.state == COMMITTED:
        raise InvalidInputError(f"{ref}: is not forgotten")
    if snapshot.state == SWEPT:
        raise NotFoundError(f"{ref}: was forgotten and a gc has deleted its bytes; it cannot come back")
    return revisions.revise(context, snapshot, state=COMMITTED, policy="", reason="")
