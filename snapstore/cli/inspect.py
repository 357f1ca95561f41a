"""The verbs log, show, diff and blame: look at snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DAMAGE, CapabilityError, NotFoundError, StorageError
from ..retention import KeepBest
from ..text import counted, human_bytes, quoted, some
from .app import FORMS, PARTIAL, Shell, UsageError, verb
from .output import (
    fields_json,
    line,
    local,
    note,
    note_left_out,
    note_unknown,
    plain,
    print_json,
    snapshot_json,
    spinner,
    table,
)

if TYPE_CHECKING:
    from ..catalog.history import View
    from ..format.manifests.manifest import Manifest
    from ..format.records import Snapshot
    from ..inspect.blame import BlameResult
    from ..inspect.divergence import DivergenceResult
    from ..repository import Repository

    #: A snapshot as it was read, its manifests, and (path, value) of its plain values.
    Contents = tuple[Snapshot, list[Manifest], list[tuple[Any, Any]]]


@verb("snapstore log exp --sort loss --metrics loss,lr")
def log(
    shell: Shell,
    name: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Only this run; default: all runs.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="R", help="The same as RUN.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list forgotten, collected and aborted snapshots.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("-n", "--limit", metavar="N", help="Only the newest N of a run; or the first, sorted.")
    ] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="METRIC", help="Smallest value first, across runs.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="With --sort: largest value first.")] = False,
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="NAME,...", help="One column for each of these metrics.")
    ] = None,
    mirror: Annotated[
        str | None, typer.Option("--mirror", metavar="URL", help="Mark snapshots that this repository does not have.")
    ] = None,
) -> int | None:
    """List snapshots, oldest first, run by run; or sorted by a metric, across runs.

    Snapshots without the metric, or with NaN, come last. Exit code 3: some records of what is listed, here or in the
    mirror, are unreadable or gone.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: expected at least 1")
    if reverse and sort is None:
        raise UsageError("--reverse: needs --sort METRIC")
    if name is not None and run is not None:
        raise UsageError("name the run once, as RUN or with --run")
    run = name if run is None else run
    columns = [sort] if metrics is None and sort is not None else metrics.split(",") if metrics is not None else []
    with shell.repository() as repository, spinner("listing snapshots"):
        view = repository.view(run)
        if run is not None:
            view.require_run(run, None)
        if limit is not None and not (everything or columns):  # a long run has many others
            snapshots = [s for name in ([run] if run is not None else view.runs()) for s in view.last(name, limit)]
        else:
            snapshots = view.snapshots(run, None if everything else ("committed",))
        _require_metrics([*columns, *filter(None, [sort])], snapshots)
        snapshots = _chosen(snapshots, limit, sort, reverse=reverse)
        marks = {"superseded": view.superseded(run), "damaged": _damaged(repository, snapshots)}
    marks["made_up"] = {s.id for s in snapshots if s.is_reconstructed}
    marks["unproven"] = {s.id for s in snapshots if s.unproven}
    if mirror is not None:
        marks |= _not_mirrored(view, snapshots, mirror)
    if shell.as_json:
        marked = {mark: [s.id for s in snapshots if s.id in ids] for mark, ids in marks.items()}
        print_json({"snapshots": [snapshot_json(s) for s in snapshots], **marked})
    else:
        _print_log(snapshots, marks, columns, by_run=sort is None)
    _note_marks(marks, mirror)
    return PARTIAL if note_unknown(view) or marks.get("mirror_unknown") else None


def _note_marks(marks: dict[str, set[str]], mirror: str | None) -> None:
    """Explain the marks of a log on stderr."""
    if marks["damaged"]:
        note(f"{counted(len(marks['damaged']), 'snapshot')} marked damaged: each {_DAMAGED}")
    if marks["made_up"]:
        note(f"marked reconstructed: {_RECONSTRUCTED}")
    if unknown := marks.get("mirror_unknown"):
        records = counted(len(unknown), "record")
        note(f"snapstore: warning: {mirror}: {records} of these snapshots unreadable or gone; run 'snapstore check'")


def _not_mirrored(here: View, snapshots: list[Snapshot], url: str) -> dict[str, set[str]]:
    """Return the ids of committed snapshots that the mirror is still to get, and of those of which that is unknown."""
    from ..copy.mirror_order import lacks
    from ..repository import Repository

    with spinner(f"listing {url}"), Repository.open(url) as repository:
        there = repository.view()
    absent = {s.id for s in snapshots if s.state == "committed" and lacks(here, there, s)}
    unknown = {name for run in {s.run for s in snapshots} for name in there.unknown_steps(run)} & absent
    return {"not_mirrored": absent - unknown, "mirror_unknown": unknown}


_DAMAGED = "needs an object that is damaged or missing; run 'snapstore check --read-data' to see what is lost"
_RECONSTRUCTED = "a repair reconstructed the lost record; its order, its date and its stored size are guesses"
_UNPROVEN = "copied without verification, so no save builds on it; 'snapstore repair --level restore --apply' proves it"


def _damaged(repository: Repository, snapshots: list[Snapshot]) -> set[str]:
    """Return ids of the snapshots that need a pack in quarantine, and that no gc has collected."""
    return repository.in_need_of_quarantined([s for s in snapshots if s.state in ("committed", "forgotten")])


def _require_metrics(names: list[str], snapshots: list[Snapshot]) -> None:
    """Raise NotFoundError unless each metric is one of some snapshot, if there are snapshots."""
    there = sorted({name for s in snapshots for name in s.metrics})
    for name in names:
        if snapshots and name not in there:
            raise NotFoundError(f"metric {quoted(name)}: no listed snapshot has it; metrics: {some(there) or 'none'}")


def _chosen(snapshots: list[Snapshot], limit: int | None, metric: str | None, *, reverse: bool) -> list[Snapshot]:
    """Return the last `limit` snapshots of every run; or, sorted by a metric, the first of every run.

    If values are equal, the newer snapshot comes first. Snapshots without the metric, or with NaN, are last.
    """
    if metric is None:
        return snapshots if limit is None else _newest(snapshots, limit)
    best = KeepBest(metric, mode="max" if reverse else "min").ranked(snapshots)
    ranked = {s.id for s in best}
    best += [s for s in snapshots if s.id not in ranked]
    return best if limit is None else _newest(best[::-1], limit)[::-1]


def _newest(snapshots: list[Snapshot], limit: int) -> list[Snapshot]:
    """Return the last `limit` snapshots of every run, in their order."""
    left: dict[str, int] = {}
    chosen = []
    for snapshot in reversed(snapshots):
        left[snapshot.run] = left.get(snapshot.run, limit) - 1
        if left[snapshot.run] >= 0:
            chosen.append(snapshot)
    return chosen[::-1]


#: The log fits a terminal of this width, unless names are long: metrics that do not fit are counted.
LOG_WIDTH = 80
#: The text of marks whose names in JSON differ.
_MARKS = {"made_up": "reconstructed", "not_mirrored": "not mirrored", "mirror_unknown": "mirror unknown"}


def _print_log(
    snapshots: list[Snapshot], marks: dict[str, set[str]], metrics: Sequence[str] = (), *, by_run: bool = True
) -> None:
    """Print a table.

    Args:
        metrics: a column for each; none: the metrics that fit are among the notes.
        by_run: whether the rows are in the order of saves, so that a parent in the row above needs no note.
    """
    if not snapshots:
        note("no snapshots")
        return
    columns = ["snapshot", "id", "created", ">stored", *(f">{name}" for name in metrics)]
    rows, notes = [], []
    for above, s in zip([None, *snapshots], snapshots, strict=False):
        values = [f"{s.metrics[name]:.6g}" if name in s.metrics else "-" for name in metrics]
        rows.append([s.ref, s.id[:8], local(s.created).rpartition(":")[0], human_bytes(s.stored_bytes), *values])
        marked = [s.state] if s.state != "committed" else []
        marked += [_MARKS.get(mark, mark) for mark, ids in marks.items() if s.id in ids]
        notes.append([*marked, *(f"@{tag}" for tag in s.tags), *(_parent(s, above) if by_run else [])])
    width = sum(max(map(len, column)) + 2 for column in zip(columns, *rows, strict=True))
    others = [{} if metrics else s.metrics for s in snapshots]
    texts = [_fitting(words, values, LOG_WIDTH - width) for words, values in zip(notes, others, strict=True)]
    table([*columns, "notes"], [[*row, text] for row, text in zip(rows, texts, strict=True)])


def _parent(snapshot: Snapshot, above: Snapshot | None) -> list[str]:
    """Return a note about the parent; none if it is the snapshot in the row above, or if a first row has none."""
    if snapshot.parent == (above.id if above and above.run == snapshot.run else None):
        return []
    return [f"from {snapshot.parent[:8]}" if snapshot.parent else "no parent"]


def _fitting(words: list[str], metrics: dict[str, float], room: int) -> str:
    """Return the words, the metrics that fit beside them, and how many do not: @best loss=0.5 +2."""
    values = [f"{name}={value:.4g}" for name, value in metrics.items()]
    for count in range(len(values), -1, -1):
        left_out = [f"+{len(values) - count}"] if count < len(values) else []
        text = " ".join([*words, *values[:count], *left_out])
        if len(text) <= room:
            break
    return text


@verb("snapstore show exp@latest")
def show(
    shell: Shell,
    ref: Annotated[str, typer.Argument(metavar="REF|RUN", help=f"{FORMS}; or a run: its newest snapshot.")],
) -> int | None:
    """Show one snapshot: record, lineage, tensors, reasons to keep it.

    Exit code 3: other records are unreadable or gone, and may be of children or change the reasons.
    """
    with shell.repository() as repository, spinner(f"reading {ref}"):
        from ..inspect.plain_values import dotted

        view = repository.view()
        ref = f"{ref}@latest" if ref in view.runs(states=None) else ref  # before ids: a date may be a run, and digits
        snapshot = view.resolve(ref, ("committed", "forgotten", "swept", "aborted"))
        held = snapshot.state in ("committed", "forgotten")  # a gc may have deleted the manifests of others
        snapshot, manifests, values = _contents(repository, snapshot) if held else (snapshot, [], [])
        ranks = max((m.header.world_size for m in manifests), default=0)
        parent = view.get(snapshot.parent) if snapshot.parent else None
        children = view.children(snapshot.id)
        reasons = _reasons(repository, view, snapshot)
        damaged, superseded = bool(_damaged(repository, [snapshot])), snapshot.id in view.superseded()
    code = PARTIAL if note_left_out(view.unknown()) else None
    metadata = plain(snapshot.metadata)
    tensors = [row for m in manifests for row in _tensors(m)]
    if shell.as_json:
        columns = ("part", "rank", "sha256", "size_bytes", "logical_bytes")
        print_json(
            {
                "snapshot": snapshot_json(snapshot),
                "parent": snapshot_json(parent) if parent else None,
                "children": [snapshot_json(s) for s in children],
                "reasons": reasons,
                "metadata": metadata,
                **fields_json(snapshot, "chunks", "new_chunks", "stall_s", "total_s"),
                "ranks": ranks,
                "manifests": [fields_json(m, *columns) for m in snapshot.manifests],
                "tensors": tensors,
                "plain": [{"path": dotted(path), "value": value} for path, value in values],
                "superseded": superseded,
                "damaged": damaged,
                "made_up": snapshot.is_reconstructed,
                "unproven": bool(snapshot.unproven),
            }
        )
        return code
    _print_facts(snapshot, parent, children, reasons, metadata)
    if superseded:
        line(f"mark      superseded: {snapshot.ref} means a newer save of the step")
    if damaged:
        line(f"damaged   {_DAMAGED}")
    if snapshot.is_reconstructed:
        line(f"record    {_RECONSTRUCTED}")
    if snapshot.unproven:
        line(f"unproven  {_UNPROVEN}")
    if ranks:
        line(f"ranks     {ranks}, each with a manifest for every part of which it stores a piece")
    _print_parts(snapshot, tensors, ranks)
    _print_values(values)
    return code


def _tensors(m: Manifest) -> Iterator[dict[str, Any]]:
    from ..format.manifests.tensor_layout import spec_of
    from ..state.values.containers import display

    for entry in (entry for entry in m.tensors if entry.kind != "page"):
        yield {
            "path": display(entry.path),
            "part": m.header.part,
            "kind": entry.kind,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "bytes": spec_of(entry).nbytes,
            "chunks": None if m.header.world_size else sum(box.chunks for box in entry.boxes),  # None: in children
        }


def _contents(repository: Repository, snapshot: Snapshot) -> Contents:
    """Return (the snapshot as it was read, its manifests, (path, value) of every value that is not a tensor).

    A list of such values is one value. If the values cannot be read, print a warning and return none of them.

    Raises:
        NotFoundError: the snapshot was deleted meanwhile.
        IntegrityError, FormatError: a manifest is damaged.
    """
    from ..format.manifests import manifest
    from ..inspect.plain_values import decode_tree, plain_values
    from ..restore.pipeline import read_as_ruled

    def read(snapshot: Snapshot) -> Contents:
        return snapshot, [manifest.read(repository.store, ref, None) for ref in snapshot.manifests], []

    def read_all(snapshot: Snapshot) -> Contents:
        snapshot, manifests, _ = read(snapshot)
        if not manifests:
            return snapshot, [], []
        tree = decode_tree(repository.context, manifests, snapshot.ref)
        return snapshot, manifests, list(plain_values(tree, whole_lists=True))

    try:
        return read_as_ruled(repository.context, [snapshot], read_all)
    except (*DAMAGE, CapabilityError, StorageError) as error:
        found = read_as_ruled(repository.context, [snapshot], read)  # raises if more than the values cannot be read
        note(f"snapstore: warning: the plain values cannot be shown: {error}")
        return found


def _reasons(repository: Repository, view: View, snapshot: Snapshot) -> list[str]:
    """Return why a committed snapshot stays under its run's policies, or why a forgotten one was forgotten."""
    from .. import retention
    from ..protocol.forget import needs_of

    if snapshot.state != "committed":
        return [text for text in (snapshot.reason, snapshot.policy) if text]
    try:
        policies, snapshots = repository.policies(snapshot.run), view.snapshots(snapshot.run)
        needs = needs_of(repository.context, snapshots, view)
        decisions = retention.apply(policies, snapshots, force=True, needs=needs)
    except (*DAMAGE, StorageError) as error:  # the rest of the snapshot can still be shown
        return [f"unknown: {error}"]
    return next((list(d.reasons) for d in decisions if d.snapshot.id == snapshot.id), [])  # none: of an older view


def _print_facts(
    snapshot: Snapshot, parent: Snapshot | None, children: list[Snapshot], reasons: list[str], metadata: Any
) -> None:
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


def _print_parts(snapshot: Snapshot, tensors: list[dict[str, Any]], ranks: int) -> None:
    line()
    parts = [
        [m.part or "(root)", m.sha256[:12], human_bytes(m.size_bytes), human_bytes(m.logical_bytes)]
        for m in snapshot.manifests
    ]
    table(["part", "manifest", ">size", ">logical"], parts)
    if tensors:
        line()
        rows = [
            [t["path"] or "(root)", t["dtype"], t["shape"], human_bytes(t["bytes"]), "-" if ranks else t["chunks"]]
            for t in tensors
        ]
        table(["tensor", "dtype", "shape", ">size", ">chunks"], rows)


#: At most so many plain values are printed; JSON has all.
VALUES_SHOWN = 50


def _print_values(values: list[tuple[Any, Any]]) -> None:
    from ..inspect.plain_values import dotted, show_value

    if not values:
        return
    line()
    more = len(values) - VALUES_SHOWN
    values = sorted(values, key=lambda value: _depth(value[0]))[:VALUES_SHOWN]  # an epoch before an optimizer's options
    table(["value", "is"], [[dotted(path) or "(root)", show_value(value, 60)] for path, value in values])
    if more > 0:
        line(f"and {more} more; --json prints all")


def _depth(path: Any) -> int:
    """Return the number of elements of a path of `plain_values`."""
    return 0 if path is None else 1 + _depth(path[0])


@verb("snapstore diff exp@100 exp@200")
def diff(
    shell: Shell,
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    first: Annotated[
        bool, typer.Option("--first", help="Find where two runs first differ: the step, tensor and element.")
    ] = False,
) -> int | None:
    """Compare two snapshots tensor by tensor, or find where two runs diverge.

    Exit code 3: --first left out snapshots whose records are unreadable or gone.
    """
    if first:
        return _first_difference(shell, a, b)
    with shell.repository() as repository, spinner(f"comparing {a} and {b}"):
        found = repository.diff(a, b)
    if shell.as_json:
        print_json(
            {
                "a": snapshot_json(found.a),
                "b": snapshot_json(found.b),
                **fields_json(found, "tensors"),
                "plain": [{"path": path, "before": before, "after": after} for path, before, after in found.plain],
            }
        )
        return None
    differing = [t for t in found.tensors if t.status != "same"]
    if differing:
        rows = [
            [t.path or "(root)", t.status, _form(t.changed_share, ".2%"), _form(t.relative_l2, ".2e"), t.note]
            for t in differing
        ]
        table(["tensor", "status", ">changed", ">relative L2", "note"], rows)
    if found.plain:
        table(["value", "before", "after"], found.plain)
    line(f"{len(found.tensors) - len(differing)} of {len(found.tensors)} tensors are the same")
    return None


def _first_difference(shell: Shell, a: str, b: str) -> int | None:
    with shell.repository() as repository, spinner(f"comparing {a} and {b}"):
        found = repository.first_difference(a, b)
    columns = ("steps", "path", "index", "chunk", "before", "after", "note", "unknown")
    shown = {name: getattr(found, name) for name in columns}
    document = {"a": snapshot_json(found.a), "b": snapshot_json(found.b), **shown}
    shell.show(document, _print_first_difference, found)
    return PARTIAL if note_left_out(found.unknown) else None


def _print_first_difference(found: DivergenceResult) -> None:
    looked = counted(len(found.steps), "common step")
    if found.path is None:
        line(f"all tensors are the same in {looked}, up to {found.a.ref} and {found.b.ref}")
        return
    before = counted(len(found.steps) - 1, "common step")
    line(f"first difference: {found.a.ref} and {found.b.ref}, after {before} without any")
    if found.index is None:
        line(f"{found.path or '(root)'}: {found.note}")
    else:
        place = f"{found.path or '(root)'}{list(found.index) if found.index else ''}"
        line(f"{place} in chunk {found.chunk}: {found.before} -> {found.after}")


@verb("snapstore blame exp")
def blame(
    shell: Shell,
    run: Annotated[str, typer.Argument(metavar="RUN")],
    since: Annotated[int | None, typer.Option(metavar="STEP", help="Only snapshots from this step on.")] = None,
    until: Annotated[int | None, typer.Option(metavar="STEP", help="Only snapshots up to this step.")] = None,
) -> int | None:
    """Find the step at which a tensor of a run began to move away: NaNs, jumps, frozen layers that changed, dead ones.

    Exit code 3: some snapshots were left out, because records or manifests are unreadable or gone.
    """
    with shell.repository() as repository, spinner(f"looking at {run}"):
        found = repository.blame(run, since=since, until=until)
    shell.show(asdict(found), _print_blame, found)
    for ref, why in found.skipped.items():
        note(f"snapstore: warning: left out {ref}: {why}")
    return PARTIAL if note_left_out(found.unknown) or found.skipped else None


def _print_blame(found: BlameResult) -> None:
    if found:
        table([">step", "tensor", "what", "evidence"], found.cells)
    else:
        line("no tensor moved away")
    line(found.summary)


def _form(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
