"""The verbs tag, untag, forget, unforget and gc: decide which snapshots stay, and delete the rest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConflictError, InvalidInputError, NotFoundError
from ..text import counted, human_bytes
from .app import PARTIAL, DryRun, Ref, Shell, UsageError, size_of, verb
from .output import fields_json, line, note, note_left_out, snapshot_json, spinner, table

if TYPE_CHECKING:
    from ..format.records import Snapshot
    from ..protocol.forget import ForgetResult
    from ..protocol.gc import GcResult
    from ..repository import Repository
    from ..retention import Policy

Name = Annotated[str, typer.Argument(metavar="TAG", help="The tag.")]
_BEST = "Keep the N best steps (default 1) by a metric; smaller is better, unless max. May be repeated."
_BYTES = "Keep the newest snapshots that take at most this much: 2T. What stays anyway is not counted."
_WITHIN = "Keep snapshots at most this much older than the newest: 90s, 30m, 12h, 7d, 1d12h."


def _period(name: str) -> Any:
    """Return the option that keeps the newest snapshot of each of the last periods."""
    text = f"Keep the newest of each of the last N {name} (UTC) that have any."
    return typer.Option(metavar="N", help=text)


@verb("snapstore tag exp@best:loss paper")
def tag(shell: Shell, ref: Ref, name: Name) -> None:
    """Tag a snapshot, so that it is never forgotten.

    If another snapshot of the run has the tag, the tag moves, and the text says from where.
    """
    with shell.repository() as repository, spinner(f"tagging {ref}"):
        before = repository.view()
        snapshot = repository.tag(ref, name)
        if name not in snapshot.tags:
            text = f"{snapshot.ref}: another process gave {name} to another snapshot of the run at the same time"
            raise ConflictError(f"{text}; tag again to move it here")
    holders = before.tagged(snapshot.run).get(name, [])  # the tag means the last of them
    source = None if not holders or holders[-1].id == snapshot.id else holders[-1]
    document = {"snapshot": snapshot_json(snapshot), "moved_from": source and snapshot_json(source)}
    moved = f"; the tag moved from {source.ref} (id:{source.id[:12]})" if source else ""
    shell.show(document, line, f"{snapshot.ref} (id:{snapshot.id[:12]}) is now tagged {name}{moved}")


@verb("snapstore untag exp@paper paper")
def untag(shell: Shell, ref: Ref, name: Name, dry_run: DryRun = False) -> None:
    """Take a tag off a snapshot."""
    with shell.repository() as repository, spinner(f"untagging {ref}"):
        snapshot = repository.snapshot(ref) if dry_run else repository.untag(ref, name)
        if dry_run and name not in snapshot.tags:
            raise NotFoundError(f"{snapshot.ref}: has no tag {name!r}; tags: {', '.join(snapshot.tags) or 'none'}")
    _print_snapshot(shell, snapshot, f"{'would no longer be' if dry_run else 'is no longer'} tagged {name}")


@verb("snapstore unforget exp@100")
def unforget(shell: Shell, ref: Ref) -> None:
    """Bring back a forgotten snapshot that no gc has collected."""
    with shell.repository() as repository, spinner(f"bringing back {ref}"):
        snapshot = repository.unforget(ref)
    _print_snapshot(shell, snapshot, "is back")


def _print_snapshot(shell: Shell, snapshot: Snapshot, what: str) -> None:
    shell.show({"snapshot": snapshot_json(snapshot)}, line, f"{snapshot.ref} (id:{snapshot.id[:12]}) {what}")


@verb("snapstore forget --run exp --keep-last 3 --keep-best loss")
def forget(
    shell: Shell,
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...", help="Forget these snapshots.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="R", help="Apply policies to this run.")] = None,
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the N newest steps.")] = None,
    keep_every: Annotated[int | None, typer.Option(metavar="STEPS", help="Keep all multiples of STEPS.")] = None,
    keep_best: Annotated[list[str] | None, typer.Option(metavar="METRIC[:N[:min|max]]", help=_BEST)] = None,
    keep_within: Annotated[str | None, typer.Option(metavar="DURATION", help=_WITHIN)] = None,
    keep_hourly: Annotated[int | None, _period("hours")] = None,
    keep_daily: Annotated[int | None, _period("days")] = None,
    keep_weekly: Annotated[int | None, _period("weeks")] = None,
    keep_monthly: Annotated[int | None, _period("months")] = None,
    keep_yearly: Annotated[int | None, _period("years")] = None,
    keep_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help=_BYTES)] = None,
    keep_steps: Annotated[str | None, typer.Option(metavar="STEP,...", help="Keep these steps: 1000,2000.")] = None,
    free: Annotated[str, typer.Option(metavar="SIZE", help="Forget until gc frees this much: 500G. Try -n.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Forget even the newest, or everything.")] = False,
    dry_run: DryRun = False,
) -> int | None:
    """Forget snapshots by name or by policy; gc frees their bytes.

    Without --keep options, the policies stored for the run apply. A snapshot that any policy keeps stays, and so do
    tagged ones and the newest of the run. If a step was saved twice, policies count only the newer save.
    Exit code 3: some records of the run could not be read; their snapshots stay, and policies did not count them.
    """
    options = {
        "KeepLast": keep_last,
        "KeepEvery": keep_every,
        "KeepWithin": keep_within,
        "KeepHourly": keep_hourly,
        "KeepDaily": keep_daily,
        "KeepWeekly": keep_weekly,
        "KeepMonthly": keep_monthly,
        "KeepYearly": keep_yearly,
        "KeepBytes": keep_bytes,
    }
    given = {kind: value for kind, value in options.items() if value is not None}
    by_policy = given or keep_best or keep_steps is not None
    if refs and (run is not None or by_policy):
        raise UsageError("name snapshots, or --run with policies, not both")
    if free and (refs or by_policy or force):
        raise UsageError("--free chooses by the stored policies: pass --run R or -n beside it, and nothing else")
    if not refs and run is None and not free:
        raise UsageError("no snapshot named; pass references, or --run R")
    keep = _policies(given, keep_best or [], keep_steps)
    with shell.repository() as repository, spinner("forgetting"):
        if free:
            result = repository.forget_to_free(size_of(free, "--free"), run=run, dry_run=dry_run)
        elif refs:
            result = repository.forget_snapshots(refs, dry_run=dry_run, force=force)
        else:
            assert run is not None
            given_here, keep = keep, keep or _stored_policies(repository, run, force)
            result = repository.forget(keep, run=run, dry_run=dry_run, force=force)
            if given_here and not dry_run:
                _replace_damaged_policies(repository, run, given_here)
    kept = [{"id": s.id, "reasons": reasons} for s, reasons in result.kept]
    shell.show({"kept": kept, **fields_json(result, "forgotten", "unknown", "frees_bytes")}, _print_forget, result)
    return PARTIAL if note_left_out(result.unknown) else None


def _policies(given: dict[str, Any], best: list[str], steps: str | None) -> list[Policy]:
    """Return the policies that the options name.

    Raises:
        UsageError: the text of an option has another form.
    """
    from .. import retention

    keep: list[Policy] = [getattr(retention, kind)(value) for kind, value in given.items()]
    for text in best:
        metric, number, mode = _best(text)
        inner = _best(metric)[1] if metric else ""
        if not metric or inner or (":" in metric and not number):  # else a typing error would name another metric
            forms = "METRIC, METRIC:N, METRIC:N:min or METRIC:N:max"
            raise UsageError(
                f"--keep-best {text!r}: expected {forms}; a METRIC with a colon needs its N, such as val:loss:1"
            )
        keep.append(retention.KeepBest(metric, int(number or 1), "max" if mode == "max" else "min"))
    if steps is not None:
        numbers = [number.strip() for number in steps.split(",")]
        if not all(map(_is_number, numbers)):
            raise UsageError(f"--keep-steps {steps!r}: expected steps such as 1000,2000")
        keep.append(retention.KeepSteps(map(int, numbers)))
    return keep


def _best(text: str) -> tuple[str, str, str]:
    """Split the form METRIC[:N[:min|max]] from the right: a metric may have colons."""
    found = re.fullmatch(r"(.*?)(?::(\d{1,16})(?::(min|max))?)?", text, re.DOTALL)
    metric, number, mode = found.groups("") if found else ("", "", "")
    return metric, number, mode


def _is_number(text: str) -> bool:
    """Return whether a text is a number that a policy may have; Python refuses to read thousands of digits."""
    return text.isdecimal() and len(text) <= 16


def _stored_policies(repository: Repository, run: str, force: bool) -> list[Policy]:
    from ..checks import check_name

    stored = repository.policies(check_name("run", run))
    if not stored and not force and repository.snapshots(run):  # else the error is about the unknown run
        raise InvalidInputError(
            f"run {run!r}: no policy is stored for it; name some, such as --keep-last 3, or save with "
            "SnapshotManager(keep=[...])"
        )
    return stored


def _replace_damaged_policies(repository: Repository, run: str, keep: list[Policy]) -> None:
    """Store the policies of this command line if those stored for the run are damaged."""
    from ..catalog import policy_store

    if policy_store.are_damaged(repository.store, run):
        repository.set_policies(run, keep)
        note(f"the policies stored for run {run!r} were damaged; these replace them")


def _print_forget(result: ForgetResult) -> None:
    goes = "would be forgotten" if result.dry_run else "forgotten"
    rows = [[s.ref, s.id[:8], "kept", "; ".join(reasons)] for s, reasons in result.kept]
    rows += [[s.ref, s.id[:8], goes, s.reason] for s in result.forgotten]
    if rows:
        table(["snapshot", "id", "", "why"], rows)
    kept = f"{len(result.kept)} kept, " if not result.frees_bytes else ""
    frees = f"; 'snapstore gc' then frees {human_bytes(result.frees_bytes)}" if result.frees_bytes else ""
    line(f"{kept}{len(result.forgotten)} {goes}{frees}")
    if result.forgotten and not result.dry_run:
        note("'snapstore gc' frees their bytes, 'snapstore unforget' brings them back until then")


_FENCE = re.compile(r"(\d{1,9})([smhdw]?)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@verb("snapstore gc --dry-run")
def gc(
    shell: Shell,
    dry_run: DryRun = False,
    fence_after: Annotated[
        str, typer.Option(metavar="DURATION", help="Fence a save of another machine without heartbeat for this time.")
    ] = "1h",
    unexplained: Annotated[
        bool, typer.Option("--unexplained", help="Also delete objects whose records are gone for good.")
    ] = False,
) -> int | None:
    """Delete the objects that no committed snapshot needs.

    Safe beside running saves. Exit code 3: gc must wait for a running save.
    """
    match = _FENCE.fullmatch(fence_after)
    if match is None:
        raise UsageError(f"--fence-after {fence_after!r}: expected a duration such as 90s, 30m, 1h or 2d")
    with shell.repository() as repository, spinner("collecting"):
        seconds = int(match[1]) * _UNIT_S[match[2]]
        result = repository.gc(dry_run=dry_run, fence_after_s=seconds, unexplained=unexplained)
    names = ("deleted_objects", "deleted_bytes", "stored_bytes", "waiting_for", "fenced", "dry_run")
    shell.show(fields_json(result, *names), _print_gc, result)
    if result.waiting_for:
        saves = counted(len(result.waiting_for), "save")
        note(
            f"snapstore: warning: {saves} may be running and may need objects that gc would delete; "
            "run 'snapstore gc' again later"
        )
        return PARTIAL
    return None


def _print_gc(result: GcResult) -> None:
    line(
        f"{'would delete' if result.dry_run else 'deleted'} {counted(result.deleted_objects, 'object')}, "
        f"{human_bytes(result.deleted_bytes)}; {human_bytes(result.stored_bytes)} stay"
    )
    if result.fenced:
        line(f"fenced {counted(len(result.fenced), 'dead save')}")
