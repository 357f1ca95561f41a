"""The verbs log, show, diff and stats: look at snapshots and at the repository."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import PARTIAL, Ref, Shell, UsageError, verb
from .output import line, local, note, note_unknown, plain, print_json, snapshot_json, spinner, table

if TYPE_CHECKING:
    from ..catalog.history import View
    from ..format.manifest import Manifest
    from ..format.records import Snapshot
    from ..repository import Repository


@verb()
def log(
    shell: Shell,
    run: Annotated[str | None, typer.Option("--run", metavar="R", help="Only this run.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list forgotten, collected and aborted snapshots.")
    ] = False,
    limit: Annotated[int | None, typer.Option("-n", "--limit", metavar="N", help="Only the newest N of a run.")] = None,
) -> int | None:
    """List snapshots, oldest first, run by run."""
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: expected at least 1")
    with shell.repository() as repository:
        view = repository.view()
        snapshots = view.snapshots(run, None if everything else ("committed",))
        _require_run(view, run, everything)
        if limit is not None:
            snapshots = _newest(snapshots, limit)
        damaged = _damaged(repository, snapshots)
    if shell.as_json:
        print_json(
            {
                "snapshots": [snapshot_json(s) for s in snapshots],
                "damaged": [s.id for s in snapshots if s.id in damaged],
                "made_up": [s.id for s in snapshots if s.is_reconstructed],
            }
        )
    else:
        _print_log(snapshots, everything, damaged)
    if damaged:
        from ..text import counted

        note(f"{counted(len(damaged), 'snapshot')} marked damaged: each {_DAMAGED}")
    if any(s.is_reconstructed for s in snapshots):
        note(f"marked reconstructed: {_RECONSTRUCTED}")
    return PARTIAL if note_unknown(view) else None


_DAMAGED = "needs a pack that a repair found damaged; run 'snapstore check --read-data' to see what is lost"
_RECONSTRUCTED = "a repair reconstructed the lost record; its order, its date and its stored size are guesses"


def _damaged(repository: Repository, snapshots: list[Snapshot]) -> set[str]:
    """Return ids of the snapshots that need a pack in quarantine, and that no gc has collected."""
    return repository.in_need_of_quarantined([s for s in snapshots if s.state in ("committed", "forgotten")])


def _require_run(view: View, run: str | None, everything: bool) -> None:
    if run is None or view.snapshots(run, None):
        return
    from ..errors import NotFoundError

    view.latest(run)  # raises if the run has only records that are gone or cannot be read
    there = sorted({s.run for s in view.snapshots(states=None)}) if everything else view.runs()
    raise NotFoundError(f"run {run!r}: no such run in this repository; runs: {', '.join(there) or 'none'}")


def _newest(snapshots: list[Snapshot], limit: int) -> list[Snapshot]:
    """Return the last `limit` snapshots of every run; the input is sorted by run and seq."""
    left: dict[str, int] = {}
    chosen = []
    for snapshot in reversed(snapshots):
        left[snapshot.run] = left.get(snapshot.run, limit) - 1
        if left[snapshot.run] >= 0:
            chosen.append(snapshot)
    return chosen[::-1]


def _print_log(snapshots: list[Snapshot], everything: bool, damaged: set[str]) -> None:
    from ..text import human_bytes

    names = {s.id: s.ref for s in snapshots}
    columns = ["snapshot", "id", "created", ">logical", ">stored", ">ratio", ">depth", "parent", "tags", "metrics"]
    health = {s.id: _health(s, damaged) for s in snapshots}
    marked = any(health.values())
    rows: list[list[object]] = []
    row: list[object]
    for s in snapshots:
        parent = names.get(s.parent, f"id:{s.parent[:8]}") if s.parent else ""
        metrics = " ".join(f"{name}={value:.4g}" for name, value in s.metrics.items())
        ratio = f"{s.ratio:.1f}x" if s.stored_bytes else ""
        row = [s.ref, s.id[:8], local(s.created), human_bytes(s.logical_bytes), human_bytes(s.stored_bytes), ratio]
        row += [s.depth, parent, ",".join(s.tags), metrics, *([s.state] if everything else [])]
        rows.append([*row, *([health[s.id]] if marked else [])])
    if not rows:
        note("no snapshots")
        return
    table([*columns, *(["state"] if everything else []), *(["health"] if marked else [])], rows)


def _health(snapshot: Snapshot, damaged: set[str]) -> str:
    marks = {"damaged": snapshot.id in damaged, "reconstructed": snapshot.is_reconstructed}
    return ", ".join(mark for mark, has in marks.items() if has)


@verb()
def show(shell: Shell, ref: Ref) -> None:
    """Show one snapshot: record, lineage, tensors, reasons to keep it."""
    with shell.repository() as repository:
        from ..format import manifest

        view = repository.view()
        snapshot = view.resolve(ref, ("committed", "forgotten", "swept", "aborted"))
        tensors: list[dict[str, Any]] = []
        if snapshot.state in ("committed", "forgotten"):  # a gc may have deleted the manifests of others
            for named in snapshot.manifests:
                tensors.extend(_tensors(manifest.read(repository.store, named, None)))
        parent = view.get(snapshot.parent) if snapshot.parent else None
        children = view.children(snapshot.id)
        reasons = _reasons(repository, view, snapshot)
        damaged = bool(_damaged(repository, [snapshot]))
    metadata = plain(snapshot.metadata)
    if shell.as_json:
        columns = ("part", "rank", "sha256", "size_bytes", "logical_bytes")
        manifests = [{name: getattr(m, name) for name in columns} for m in snapshot.manifests]
        print_json(
            {
                "snapshot": snapshot_json(snapshot),
                "parent": snapshot_json(parent) if parent else None,
                "children": [snapshot_json(s) for s in children],
                "reasons": reasons,
                "metadata": metadata,
                "chunks": snapshot.chunks,
                "new_chunks": snapshot.new_chunks,
                "stall_s": snapshot.stall_s,
                "total_s": snapshot.total_s,
                "manifests": manifests,
                "tensors": tensors,
                "damaged": damaged,
                "made_up": snapshot.is_reconstructed,
            }
        )
        return
    _print_facts(snapshot, parent, children, reasons, metadata)
    if damaged:
        line(f"damaged   {_DAMAGED}")
    if snapshot.is_reconstructed:
        line(f"record    {_RECONSTRUCTED}")
    _print_parts(snapshot, tensors)


def _tensors(m: Manifest) -> Iterator[dict[str, Any]]:
    from ..restore.pipeline import spec_of
    from ..state.containers import display

    for entry in (entry for entry in m.tensors if entry.kind != "page"):
        yield {
            "path": display(entry.path),
            "part": m.header.part,
            "kind": entry.kind,
            "dtype": entry.dtype,
            "shape": entry.shape,
            "bytes": spec_of(entry).nbytes,
            "chunks": sum(box.chunks for box in entry.boxes),
        }


def _reasons(repository: Repository, view: View, snapshot: Snapshot) -> list[str]:
    """Return why a committed snapshot stays under its run's policies, or why a forgotten one was forgotten."""
    from .. import retention
    from ..errors import DAMAGE

    if snapshot.state != "committed":
        return [text for text in (snapshot.reason, snapshot.policy) if text]
    try:
        policies = repository.policies(snapshot.run)
    except DAMAGE as error:  # the rest of the snapshot can still be shown
        return [f"unknown: {error}"]
    decisions = retention.apply(policies, view.snapshots(snapshot.run), force=True)
    return next(list(d.reasons) for d in decisions if d.snapshot.id == snapshot.id)


def _print_facts(
    snapshot: Snapshot, parent: Snapshot | None, children: list[Snapshot], reasons: list[str], metadata: Any
) -> None:
    from ..text import human_bytes

    facts = {
        "snapshot": f"{snapshot.ref} ({snapshot.state})",
        "id": snapshot.id,
        "created": local(snapshot.created),
        "parent": f"{parent.ref} (id:{parent.id[:8]})" if parent else snapshot.parent or "none",
        "children": ", ".join(f"{s.ref} (id:{s.id[:8]})" for s in children) or "none",
        "tags": ", ".join(snapshot.tags) or "none",
        "reasons": "; ".join(reasons) or "none",
        "metrics": ", ".join(f"{name}={value:.6g}" for name, value in snapshot.metrics.items()) or "none",
        "metadata": "none" if metadata is None else metadata,
        "size": f"{human_bytes(snapshot.logical_bytes)} of state, {human_bytes(snapshot.stored_bytes)} stored, "
        f"{snapshot.new_chunks} of {snapshot.chunks} chunks new, longest chain {snapshot.depth}",
        "time": f"{snapshot.total_s:.2f} s, of which the caller waited {snapshot.stall_s:.3f} s",
    }
    for name, value in facts.items():
        line(f"{name:<9} {value}")


def _print_parts(snapshot: Snapshot, tensors: list[dict[str, Any]]) -> None:
    from ..text import human_bytes

    line()
    parts = [
        [m.part or "(root)", m.sha256[:12], human_bytes(m.size_bytes), human_bytes(m.logical_bytes)]
        for m in snapshot.manifests
    ]
    table(["part", "manifest", ">size", ">logical"], parts)
    if tensors:
        line()
        rows = [[t["path"] or "(root)", t["dtype"], t["shape"], human_bytes(t["bytes"]), t["chunks"]] for t in tensors]
        table(["tensor", "dtype", "shape", ">size", ">chunks"], rows)


@verb()
def diff(
    shell: Shell, a: Annotated[str, typer.Argument(metavar="A")], b: Annotated[str, typer.Argument(metavar="B")]
) -> None:
    """Compare two snapshots, tensor by tensor."""
    with shell.repository() as repository, spinner(f"comparing {a} and {b}"):
        found = repository.diff(a, b)
    if shell.as_json:
        print_json(
            {
                "a": snapshot_json(found.a),
                "b": snapshot_json(found.b),
                "tensors": [asdict(t) for t in found.tensors],
                "plain": [{"path": path, "before": before, "after": after} for path, before, after in found.plain],
            }
        )
        return
    differing = [t for t in found.tensors if t.status != "same"]
    if differing:
        rows = [
            [t.path or "(root)", t.status, _percent(t.changed_share), _scientific(t.relative_l2), t.note]
            for t in differing
        ]
        table(["tensor", "status", ">changed", ">relative L2", "note"], rows)
    if found.plain:
        table(["value", "before", "after"], found.plain)
    line(f"{len(found.tensors) - len(differing)} of {len(found.tensors)} tensors are the same")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}%"


def _scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


@verb()
def stats(shell: Shell) -> None:
    """Count snapshots, chunks, and bytes by group and codec."""
    with shell.repository() as repository, spinner("counting"):
        found = repository.stats()
    if shell.as_json:
        document = asdict(found)
        print_json({**document, "ratio": found.ratio})
        return
    from ..text import counted, human_bytes

    facts = {
        "snapshots": found.snapshots,
        "state": human_bytes(found.logical_bytes),
        "stored": f"{human_bytes(found.stored_bytes)} in {counted(found.packs, 'pack')} and all manifests",
        "ratio": f"{found.ratio:.2f}x",
        "chunks": f"{found.chunks}, {found.unique_chunks} of them different",
        "bases": f"{human_bytes(found.base_only_bytes)} needed only as the base of a delta",
        "unneeded": f"{human_bytes(found.unneeded_bytes)}; 'snapstore gc' frees them",
    }
    for name, value in facts.items():
        line(f"{name:<9} {value}")
    if found.groups:
        line()
        rows = [[name, human_bytes(g.logical_bytes), human_bytes(g.stored_bytes)] for name, g in found.groups.items()]
        table(["group", ">logical", ">stored"], rows)
    if found.codecs:
        line()
        table(["codec", ">stored"], [[name, human_bytes(size)] for name, size in found.codecs.items()])
    if found.depths:
        line()
        table([">depth", ">chunks"], found.depths.items())
