"""The verbs check, repair, compact, recode, copy, index, doctor, completion and demo."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ..errors import CapabilityError
from ..text import counted, human_bytes, some
from . import completers
from .app import CORRUPT, ERROR, PARTIAL, DryRun, Place, Shell, UsageError, size_of, verb
from .output import fields_json, line, note, note_left_out, note_unknown, print_json, spinner

if TYPE_CHECKING:
    from ..check.report import CheckResult
    from ..copy.copy import CopyResult
    from ..format.records import Snapshot
    from ..repair.report import RepairResult
    from ..rewrite.compact import CompactResult
    from ..rewrite.recode import RecodeResult
    from .doctor.doctor import Finding

ALL = "100%"
#: Text names at most so many restorable snapshots; JSON names all.
NAMED = 100
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%")
_SUBSET = re.compile(r"(\d{1,6})/(\d{1,6})")


class _OptionalValue(TyperCommand):
    """Makes the value of --read-data optional; typer has no options with an optional value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with a default for --read-data; its value and the percent sign may stand apart."""
        joined: list[str] = []
        for arg in args:
            last = joined[-1] if joined else ""
            if last == "--read-data" and arg[:1].isdigit():
                joined[-1] = f"{last}={arg}"
            elif last.startswith("--read-data=") and last[-1].isdigit() and arg == "%":
                joined[-1] = f"{last}%"
            else:
                joined.append(arg)
        return super().parse_args(ctx, [f"{arg}={ALL}" if arg == "--read-data" else arg for arg in joined])


@verb("snapstore check --read-data=10%", cls=_OptionalValue)
def check(
    shell: Shell,
    read_data: Annotated[
        str | None,
        typer.Option(
            "--read-data", metavar="[=N%|n/t]", help="Read the packs too: all, a random share, or the n-th of t parts."
        ),
    ] = None,
    restore: Annotated[bool, typer.Option("--restore", help="Also rebuild every chunk of every snapshot.")] = False,
    max_decoded: Annotated[
        str | None,
        typer.Option("--max-decoded", metavar="SIZE", help="With --restore: decode at most this, such as 500G."),
    ] = None,
) -> int | None:
    """Verify the repository and list the restorable snapshots."""
    share, subset = _portion(ALL if read_data is None else read_data)
    most = None if max_decoded is None else size_of(max_decoded, "--max-decoded")
    if most is not None and not restore:
        raise UsageError("--max-decoded: needs --restore, which decodes")
    level = "restore" if restore else "metadata" if read_data is None else "data"
    with shell.repository(damaged=True) as repository, spinner(f"checking, level {level}"):
        result = repository.check(level, share=share, subset=subset, max_decoded_bytes=most)
    names = ("ok", "problems", "notes", "restorable", "damaged", "unknown", "packs", "packs_read", "decoded_bytes")
    shell.show(fields_json(result, *names), _print_check, result)
    return None if result.ok else CORRUPT


def _portion(text: str) -> tuple[float, tuple[int, int]]:
    """Parse `N%` or `n/t` into (share, subset).

    Raises:
        UsageError: it is neither.
    """
    if (match := _SHARE.fullmatch(text)) and 0 < float(match[1]) <= 100:
        return float(match[1]) / 100, (1, 1)
    if (match := _SUBSET.fullmatch(text)) and 1 <= int(match[1]) <= int(match[2]):
        return 1.0, (int(match[1]), int(match[2]))
    raise UsageError(f"--read-data={text}: expected a share such as 10%, or a part such as 3/7")


def _restorable(result: CheckResult) -> str:
    """Return how many snapshots a check has found restorable, and how much it has read."""
    forgotten = sum(snapshot.state == "forgotten" for snapshot in result.restorable)
    count = len(result.restorable) - forgotten
    is_sure = result.level != "metadata" and result.packs_read == result.packs
    one, many = ("is", "are") if is_sure else ("looks", "look")
    found = f"{counted(count, 'snapshot')} {one if count == 1 else many} restorable"
    if forgotten:
        found += f", {forgotten} {'is' if forgotten == 1 else 'are'} forgotten"
    if result.level == "metadata":
        return f"{found} (metadata checked; --read-data verifies every byte)"
    decoded = f", {human_bytes(result.decoded_bytes)} decoded" if result.level == "restore" else ""
    return f"{found} ({result.packs_read} of {counted(result.packs, 'pack')} read{decoded})"


def _print_check(result: CheckResult) -> None:
    from ..check.report import GC

    for problem in result.problems:
        line(f"{problem.kind}: {problem.message}")
    for found in result.notes:
        line(f"note, {found.kind}: {found.message}")
    fine, lost = len(result.restorable), len(result.damaged)
    line(_restorable(result))
    if fine and (result.damaged or result.unknown):
        line(f"restorable: {some([s.ref for s in result.restorable], NAMED)}")
    if result.damaged:
        line(f"{counted(lost, 'snapshot')} cannot be restored: {_names(result.damaged)}")
    if result.unknown:
        unknown = counted(len(result.unknown), "snapshot")
        line(f"{unknown} could not be checked on this machine (see above): {_names(result.unknown)}")
    if result.unneeded_bytes:
        line(f"needed by no committed snapshot: {human_bytes(result.unneeded_bytes)}; 'snapstore gc' frees them")
    line("no problems" if result.ok else counted(len(result.problems), "problem"))
    # gc comes last: it may refuse before the other commands have run.
    helps = {(p.command == GC, p.command, p.help) for p in result.problems if p.command}
    for _, command, instead in sorted(helps):
        line(f"To fix, run: {command} ({instead})" if instead else f"To fix, run: {command}")


def _names(snapshots: Sequence[Snapshot]) -> str:
    return ", ".join(f"{s.ref} (id:{s.id[:8]})" for s in snapshots)


@verb("snapstore repair --level restore")
def repair(
    shell: Shell,
    apply: Annotated[bool, typer.Option("--apply", help="Repair; without it, only print what would be done.")] = False,
    level: Annotated[
        Literal["metadata", "data", "restore"],
        typer.Option(help="How thorough the check is: names and sizes; also all packs; also every chunk."),
    ] = "data",
    drop: Annotated[bool, typer.Option("--drop", help="Forget snapshots that cannot be healed.")] = False,
    purge: Annotated[bool, typer.Option("--purge", help="Let gc delete damaged packs that no snapshot needs.")] = False,
) -> int | None:
    """Repair what is damaged; without --apply, only print how. Deletes no data.

    Heals snapshots from other chunks of the repository, keeps saves from building on damaged packs, and rebuilds the
    index. Exit code 20: something stays damaged (without --apply: something is damaged now). Exit code 3: something
    is left open, for later or for another command.
    """
    with shell.repository(damaged=True) as repository, spinner(f"checking, level {level}"):
        report = repository.repair(apply=apply, level=level, drop=drop, purge=purge)
    lost = [{"id": s.id, "message": why, "help": report.helps.get(s.id, "")} for s, why in report.lost]
    document = fields_json(report, "applied", "ok") | fields_json(report.found, "problems")
    document |= fields_json(report, "actions", "healed") | {"lost": lost} | fields_json(report, "dropped", "open")
    shell.show(document, _print_repair, report)
    if report.left or not (report.applied or report.found.ok):
        return CORRUPT
    return PARTIAL if report.open else None


def _print_repair(report: RepairResult) -> None:
    from ..check.report import stand_in

    if report.found.ok and report.ok and all(action.kind == "index" for action in report.actions):
        line(f"no problems: {_restorable(report.found)}; nothing to repair")
        return
    for problem in report.found.problems:
        line(f"found, {problem.kind}: {problem.message}")
    for action in report.actions:
        # The rewrite of intact chunks is the same kind of action, for a lost snapshot and for one that lost nothing.
        healing = action.kind == "heal" and any(stand_in(action.key).id == s.id for s in report.healed)
        kind = action.kind if healing or action.kind != "heal" else "rewrite"
        line(f"{'done' if report.applied else 'would do'}, {kind}: {action.message}")
    for message in report.open:
        line(f"left open: {message}")
    left = {s.id: s for s in report.left}
    for snapshot, why in report.lost:
        line(f"{'lost' if snapshot.id in left else 'lost, and forgotten'}: {why} (id:{snapshot.id[:12]})")
    healed = ", ".join(f"{s.ref} (id:{s.id[:8]})" for s in report.healed) or "none"
    line(f"{'healed' if report.applied else 'would be healed'}: {healed}")
    for helps in sorted(set(report.helps.values())):
        refs = ", ".join(left[name].ref for name, what in report.helps.items() if what == helps)
        note(f"To bring back {refs}: {helps}. To forget what stays lost, run: snapstore repair --apply --drop")
    if len(report.lost) > len(left):
        note("the next 'snapstore gc' deletes what only forgotten snapshots need")
    if not report.applied:
        to_do = {action.kind for action in report.actions} != {"index"}
        to_do |= any(problem.kind == "index" for problem in report.found.problems)
        note("nothing was done; pass --apply to do it" if to_do else "nothing was done")


@verb("snapstore compact --max-repack-size 10G")
def compact(
    shell: Shell,
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...", help="Only these; default: all.")] = None,
    max_repack_size: Annotated[
        str | None,
        typer.Option("--max-repack-size", metavar="SIZE", help="Write at most this, such as 10G; best gains first."),
    ] = None,
    dry_run: DryRun = False,
) -> int | None:
    """Rewrite mostly dead packs, and chunks that build on forgotten ones.

    The next gc frees the old bytes.
    Safe beside running saves. Exit code 3: some snapshots could not be rewritten, and stay as they were.
    """
    limit = None if max_repack_size is None else size_of(max_repack_size, "--max-repack-size")
    with shell.repository() as repository, spinner("compacting"):
        report = repository.compact(refs or None, max_repack_bytes=limit, dry_run=dry_run)
    names = ("encoded", "moved", "bytes_read", "bytes_written", "bytes_before", "bytes_after", "dry_run")
    shell.show(fields_json(report, "rewritten", "skipped", "failed", *names), _print_compact, report)
    return PARTIAL if report.failed else None


def _print_compact(report: CompactResult) -> None:
    _print_failed(report.failed)
    would = "would be " if report.dry_run else ""
    line(
        f"{counted(len(report.rewritten), 'snapshot')} {would}rewritten, {len(report.skipped)} unchanged, "
        f"{len(report.failed)} failed; {counted(report.encoded, 'chunk')} {would}encoded again, "
        f"{counted(report.moved, 'blob')} {would}moved, {human_bytes(report.bytes_written)} {would}written; "
        f"needed: {human_bytes(report.bytes_before)} -> {human_bytes(report.bytes_after)}"
    )
    if report.rewritten and not report.dry_run:
        note("'snapstore gc' frees the old bytes")


def _print_failed(failed: Sequence[tuple[Snapshot, str]]) -> None:
    for snapshot, message in failed:
        line(f"failed: {message} (id:{snapshot.id[:12]})")


@verb("snapstore recode --all --codec portable")
def recode(
    shell: Shell,
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...", help="Rewrite these snapshots.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Rewrite every committed snapshot.")] = False,
    codec: Annotated[
        Literal["portable", "ans"], typer.Option(help="portable: every machine reads it; ans: nvCOMP's ANS.")
    ] = "portable",
    dry_run: DryRun = False,
) -> int | None:
    """Rewrite snapshots into another codec.

    The next gc frees the old bytes.
    Safe beside running saves. Exit code 3: some snapshots could not be rewritten, and stay as they were, or some
    records could not be read.
    """
    if bool(refs) == everything:
        raise UsageError("name snapshots, or pass --all" if not refs else "name snapshots, or pass --all, not both")
    with shell.repository() as repository, spinner(f"recoding to {codec}"):
        result = repository.recode(refs or None, codec=codec, dry_run=dry_run)
    names = ("recoded", "skipped", "failed", "unknown", "blobs", "bytes_before", "bytes_after", "dry_run")
    shell.show(fields_json(result, "codec", *names), _print_recode, result)
    return PARTIAL if note_left_out(result.unknown) or result.failed else None


def _print_recode(result: RecodeResult) -> None:
    _print_failed(result.failed)
    after = "" if result.dry_run else f" -> {human_bytes(result.bytes_after)}"
    recoded = f"{counted(len(result.recoded), 'snapshot')} {'would be recoded' if result.dry_run else 'recoded'}"
    line(
        f"{recoded} to {result.codec}, {len(result.skipped)} unchanged, {len(result.failed)} failed; "
        f"{counted(result.blobs, 'blob')}, {human_bytes(result.bytes_before)}{after}"
    )
    if result.recoded and not result.dry_run:
        note("'snapstore gc' frees the old bytes")


@verb("snapstore copy --run exp --to s3://bucket/backup")
def copy(
    shell: Shell,
    to: Annotated[str, typer.Option("--to", metavar="URL", help="The destination; created if there is none.")],
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...", help="Copy these; default: all.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="R", help="Copy a run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Copy every committed snapshot, as by default.")] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Rebuild no chunk; no save builds on these copies until proven.")
    ] = False,
    dry_run: DryRun = False,
) -> int | None:
    """Copy snapshots into another repository.

    Rebuilds each chunk that it sends and compares its digest; sends no blob that the destination has. Repeat an
    interrupted copy to continue it. Safe beside running saves. Exit code 3: some snapshots could not be copied, or some
    records could not be read.
    """
    if bool(refs) + (run is not None) + everything > 1:
        raise UsageError("name snapshots, or pass --run R or --all: at most one of the three; the default is --all")
    with shell.repository() as repository, spinner(f"copying to {to}"):
        result = repository.copy(refs or None, to=to, run=run, verify=not no_verify, dry_run=dry_run)
    names = ("copied", "present", "left_out", "failed", "unknown", "blobs", "read_bytes", "stored_bytes", "dry_run")
    shell.show(fields_json(result, "url", *names), _print_copy, result)
    return PARTIAL if note_left_out(result.unknown) or result.failed else None


def _print_copy(result: CopyResult) -> None:
    _print_failed(result.failed)
    copied = f"{counted(len(result.copied), 'snapshot')} {'would be ' if result.dry_run else ''}copied to {result.url}"
    sizes = f"; {human_bytes(result.read_bytes)} read, {human_bytes(result.stored_bytes)} stored"
    line(f"{copied}, {len(result.present)} there already, {len(result.failed)} failed{'' if result.dry_run else sizes}")
    if result.left_out:
        note(f"{counted(len(result.left_out), 'snapshot')} left out: the destination has forgotten them; name them")


@verb("snapstore index rebuild")
def index(
    shell: Shell,
    action: Annotated[Literal["rebuild"], typer.Argument(metavar="rebuild", help="Build the index from the objects.")],
    forget_missing: Annotated[
        bool, typer.Option("--forget-missing", help="Abandon records that only the index still knows.")
    ] = False,
) -> int | None:
    """Rebuild the index from the objects.

    The index is a cache, but it may hold the last copy of a record. The option --forget-missing abandons such records.
    """
    with shell.repository() as repository, spinner("reading all records"):
        count = repository.rebuild_index(forget_missing=forget_missing)
        view = repository.view()
    shell.show({"snapshots": count}, line, f"rebuilt the index: {counted(count, 'snapshot')} in any state")
    return PARTIAL if note_unknown(view) else None


@verb("snapstore doctor s3://bucket/snapshots")
def doctor(
    shell: Shell,
    place: Place = None,
) -> int | None:
    """Test this machine, and the file system or store of a place. Leaves nothing behind."""
    from .doctor import doctor as probes

    with spinner("testing"):
        url = shell.chosen(place)
        findings = probes.machine() + ([] if url is None else probes.place(url))
    ok = all(finding.ok is not False for finding in findings)
    shell.show({"ok": ok, "findings": [asdict(finding) for finding in findings]}, _print_findings, findings)
    return None if ok else ERROR


def _print_findings(findings: Sequence[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        sign = {True: "ok", False: "FAIL", None: ""}[finding.ok]
        line(f"{sign:<4} {finding.name:<{width}}  {finding.message}")


@verb('eval "$(snapstore completion bash)"')
def completion(
    shell: Shell,
    of: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
) -> None:
    """Print a script that lets your shell complete verbs, options, runs, steps, tags and metrics.

    Put the line of the example into ~/.bashrc; for zsh into ~/.zshrc, after compinit. For fish, put into config.fish:
    snapstore completion fish | source
    """
    script = completers.script(of)
    shell.show({"shell": of, "script": script}, _print_script, script)


def _print_script(script: str) -> None:
    for text in script.splitlines():
        line(text)


def _demo_script() -> Path | None:
    """Return the demo of a source checkout; an installed package has none."""
    script = Path(__file__).resolve().parents[2] / "tools" / "demo.py"
    return script if script.is_file() and script.with_name("train_gpt.py").is_file() else None


@verb("snapstore demo --keep /tmp/demo", hidden=_demo_script() is None)
def demo(
    shell: Shell,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Leave the repository in this new folder.")
    ] = None,
) -> int | None:
    """Run the demo on a real training run. Takes about three minutes."""
    script = _demo_script()
    if script is None:
        raise CapabilityError("demo: not installed; clone the repository of snapstore and run tools/demo")
    from ..storage.urls import expand_home

    command = [sys.executable, str(script), *(["--keep", expand_home(keep)] if keep else [])]
    note(f"running {script}")
    # With --json the demo prints to stderr: stdout is for data only.
    code = subprocess.run(command, stdout=sys.stderr if shell.as_json else None, check=False).returncode
    if shell.as_json:
        print_json({"ok": code == 0, "exit_code": code})
    return code if code >= 0 else ERROR
