"""Figures of a report, as plotly takes them: traces and layouts as plain dicts.

In: a ReportData. Out: sections with figures, each with a table of its values. Nobody must tell colours apart: lines
differ in dashes and markers, bars in patterns, and heat maps in lightness.

plotly reads labels as a subset of HTML, so names of users pass through `label`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..format.records import ABORTED, COMMITTED, FORGOTTEN, SWEPT, Snapshot
from ..text import counted, human_bytes, printable
from .changed_elements import evenly
from .report import MovedStep, ReportData, SampledStep

#: Colours of Okabe and Ito, which differ in lightness too; and the dashes, markers and patterns beside them.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")
PATTERNS = ("", "/", "x", ".", "-", "+", "\\", "|")
#: A figure has at most so many points, evenly spread; a lineage so many, and so many branches.
MOST_POINTS, MOST_NODES, MOST_BRANCHES = 30_000, 3_000, 40
#: So many metrics and layers are shown.
MOST_METRICS, MOST_LAYERS = 12, 120
#: Longer texts are cut: texts of a mark, names in legends, and names beside figures on a phone.
HOVER_CHARACTERS, NAME_CHARACTERS, PHONE_CHARACTERS = 120, 40, 16
#: Aborted saves are drawn so far below the row of their run, since the step was often saved later.
BELOW = 0.25
#: Ratios that differ by more than this factor get a logarithmic axis.
WIDE = 20
_STATES = {
    COMMITTED: ("kept", "circle", "#0072B2"),
    FORGOTTEN: ("forgotten", "circle-open", "#D55E00"),
    SWEPT: ("swept", "x-thin-open", "#666666"),
    ABORTED: ("aborted", "triangle-down-open", "#000000"),
}
Series = tuple[str, Sequence[Any], Sequence[float | None]]


@dataclass(slots=True)
class Figure:
    """One figure: its heading, a sentence about it, what plotly draws, and a table of the same values.

    Attributes:
        phone_labels: of the rows, for a narrow screen.
    """

    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    columns: list[str] = field(default_factory=list)
    rows: Sequence[Sequence[object]] = field(default_factory=list)
    phone_labels: list[str] = field(default_factory=list)


def label(text: str, most: int = NAME_CHARACTERS) -> str:
    """Return a text for a label of plotly, which shows it as it is: one line, cut in the middle if it is long."""
    shown = printable(text)
    if len(shown) > most:
        shown = f"{shown[: most // 2 - 1]}…{shown[len(shown) - (most + 1) // 2 :]}"
    return html.escape(shown, quote=False)


def lines(title: str, note: str, series: Iterable[Series], unit: str, **axis: Any) -> Figure:
    """Return lines over steps, with a gap where a run went back.

    `unit`: B, s, or empty for plain numbers; `axis`: more options of the y axis.
    """
    shown = [one for one in series if any(y is not None for y in one[2])]
    points = sum(len(xs) for _, xs, _ in shown)
    if points > MOST_POINTS:
        note += f" {MOST_POINTS:,} of {points:,} points are drawn, evenly spread."
    traces, rows = [], []
    form = f"%{{y:.4~s}}{unit}" if unit else "%{y:.5~g}"
    for number, (name, xs, ys) in enumerate(shown):
        pairs = evenly(list(zip(xs, ys, strict=True)), max(2, MOST_POINTS * len(xs) // max(points, MOST_POINTS)))
        rows += [[name, x, text_of(y, unit)] for x, y in pairs]
        for at in [at for at in range(len(pairs) - 1, 0, -1) if pairs[at][0] < pairs[at - 1][0]]:
            pairs.insert(at, (None, None))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(name),
                "x": [x for x, _ in pairs],
                "y": [rounded(y) for _, y in pairs],
                "line": {"dash": DASHES[number % len(DASHES)], "color": COLOURS[number % len(COLOURS)], "width": 1.8},
                "marker": {
                    "symbol": MARKERS[number % len(MARKERS)],
                    "size": 7,
                    "maxdisplayed": 0 if len(pairs) <= 50 else 12,
                },
                "hovertemplate": f"step %{{x}}: {form}",
            }
        )
    layout = {
        "xaxis": {"title": {"text": "step"}, "type": "linear"},
        "yaxis": {"rangemode": "tozero", "tickformat": "~s" if unit else "~g", "ticksuffix": unit, **axis},
        "showlegend": len(traces) > 1,
        "hovermode": "closest",
    }
    return Figure(title, note, traces, layout, ["series", ">step", ">value"], rows)


def bars(
    title: str, note: str, steps: Sequence[SampledStep], values: Callable[[SampledStep], dict[str, float]]
) -> Figure:
    """Return stacked bars of bytes, one for each sampled step."""
    names = sorted({name for step in steps for name in values(step)})
    refs = [str(step.snapshot.step) for step in steps]
    traces = [
        {
            "type": "bar",
            "name": label(name or "(root)"),
            "x": refs,
            "y": [rounded(values(step).get(name, 0.0)) for step in steps],
            "marker": {
                "color": COLOURS[number % len(COLOURS)],
                "pattern": {
                    "shape": PATTERNS[number % len(PATTERNS)],
                    "fillmode": "overlay",
                    "fgcolor": "#ffffff",
                    "size": 6,
                    "solidity": 0.25,
                },
                "line": {"color": "#333333", "width": 0.5},
            },
            "hovertemplate": "step %{x}: %{y:.4~s}B",
        }
        for number, name in enumerate(names)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.1,
        "xaxis": {"title": {"text": "step"}, "type": "category", "nticks": 8},
        "yaxis": {"tickformat": "~s", "ticksuffix": "B"},
        "showlegend": True,
    }
    rows = [
        [step.snapshot.step, name or "(root)", human_bytes(nbytes)]
        for step in steps
        for name, nbytes in values(step).items()
    ]
    return Figure(title, note, traces, layout, [">step", "name", ">stored"], rows)


def heat_map(
    title: str, note: str, steps: Sequence[SampledStep | MovedStep], value: Callable[[Any], float | None], scale: Any
) -> Figure:
    """Return a heat map: a row for each layer, a column for each step, and a cross for each cell without a value.

    Args:
        value: of a layer.
        scale: options of the colours, the form of the values, and `is_log`: colours are logarithmic.
    """
    names = list(dict.fromkeys(name for step in steps for name in step.layers))
    if len(names) > MOST_LAYERS:
        note += f" {MOST_LAYERS} of {len(names)} layers are shown, evenly spread."
        names = evenly(names, MOST_LAYERS)
    refs, shown = [str(step.snapshot.step) for step in steps], [label(name) for name in names]
    found = [[rounded(value(s.layers[name])) if name in s.layers else None for s in steps] for name in names]
    form, options = scale["form"], {key: scale[key] for key in scale if key not in ("form", "is_log")}
    cells = {
        "type": "heatmap",
        "x": refs,
        "y": list(range(len(names))),
        "z": found,
        "text": [[name] * len(refs) for name in shown],
        "colorscale": "Cividis",
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": f"%{{text}}, step %{{x}}: %{{z:{form}}}<extra></extra>",
        "colorbar": {"thickness": 12, "tickformat": form, "outlinewidth": 0},
        **options,
    }
    if scale.get("is_log"):
        cells |= _logarithmic(cells)
    layout = {
        "xaxis": {"title": {"text": "step"}, "type": "category", "nticks": 8, "showgrid": False},
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": shown,
            "range": [len(names) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
        },
        "height": 140 + 18 * max(4, len(names)),
        "showlegend": False,
    }
    rows = [
        [name, ref, "not known" if z is None else f"{z:.4g}"]
        for name, of in zip(names, found, strict=True)
        for ref, z in zip(refs, of, strict=True)
    ]
    phone = [label(name, PHONE_CHARACTERS) for name in names]
    return Figure(
        title, note, [cells, _crosses(refs, found)] if names else [], layout, ["layer", ">step", ">value"], rows, phone
    )


def _crosses(refs: Sequence[str], found: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Return the marks of the cells without a value, by row and then by column."""
    missing = [(ref, row) for row, of in enumerate(found) for ref, z in zip(refs, of, strict=True) if z is None]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "not known",
        "x": [ref for ref, _ in missing],
        "y": [row for _, row in missing],
        "marker": {"symbol": "x-thin-open", "size": 5, "color": "#888888"},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _logarithmic(cells: dict[str, Any]) -> dict[str, Any]:
    """Return what makes the colours of a heat map logarithmic. Zeros get the lowest colour, and 8 decades are shown."""
    found: list[list[float | None]] = cells["z"]
    positive = [z for of in found for z in of if z]
    if not positive:
        return {}
    high = math.ceil(math.log10(max(positive)))
    low = min(high - 1, max(high - 8, math.floor(math.log10(min(positive)))))
    ticks = list(range(low, high + 1))
    return {
        "z": [[None if z is None else rounded(math.log10(max(z, 10.0**low))) for z in of] for of in found],
        "customdata": found,
        "hovertemplate": cells["hovertemplate"].replace("%{z:", "%{customdata:"),
        "colorbar": cells["colorbar"] | {"tickvals": ticks, "ticktext": [f"{10.0**tick:g}" for tick in ticks]},
        "zmin": low,
        "zmax": high,
    }


def rounded(value: float | None) -> float | None:
    """Return a number in six digits, which is shorter in JSON; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def text_of(value: float | None, unit: str) -> str:
    """Return a value for a table."""
    if value is None:
        return "none"
    return human_bytes(value) if unit == "B" else f"{value:.5g}{f' {unit}' if unit else ''}"


# -- the figures


def lineage(data: ReportData) -> Figure:
    """Return the snapshots as a graph: a row for each branch of each run, and a dashed line for each fork."""
    branches = _branches(data.snapshots)
    note = "A row is a branch of a run, a dashed line a fork. Touch a mark to see why the snapshot is kept or gone."
    if len(branches) > MOST_BRANCHES:
        note += f" The {MOST_BRANCHES} longest of {len(branches)} branches are drawn."
        longest = sorted(branches, key=len, reverse=True)[:MOST_BRANCHES]
        branches = [branch for branch in branches if branch in longest]
    total = sum(map(len, branches))
    row_of = {s.id: row for row, branch in enumerate(branches) for s in branch}
    forked = {branch[0].parent for branch in branches}
    nodes = []
    for branch in branches:
        some = evenly(branch, max(2, MOST_NODES * len(branch) // max(total, MOST_NODES)))
        wanted = {s.id for s in some} | {s.id for s in branch if s.tags or s.id in forked}
        nodes += [s for s in branch if s.id in wanted]
    if len(nodes) < total:
        note += f" {len(nodes):,} of {total:,} snapshots are drawn: forks, tagged ones, and others evenly spread."
    by_id = {s.id: s for s in (*data.snapshots, *data.outside.values())}
    saved = [[s for s in branch if s.state != ABORTED] for branch in branches]
    spans = [(branch[0], branch[-1]) for branch in saved if branch]
    forks = [(by_id[b[0].parent], b[0]) for b in branches if b[0].parent in by_id and b[0].parent in row_of]
    traces = [_edges(spans, row_of, "#999999", "solid", "steps of a run")]
    traces += [_edges(forks, row_of, "#000000", "dash", "fork")] if forks else []
    for state, (name, symbol, colour) in _STATES.items():
        traces += _nodes([s for s in nodes if s.state == state], row_of, data, (name, symbol, colour))
    tagged = [s for s in nodes if s.tags and s.state == COMMITTED]
    traces += _nodes(tagged, row_of, data, ("tagged", "star", "#000000"))
    names = [branch[0].run for branch in branches]
    names = [run if run not in names[:row] else f"{run} again" for row, run in enumerate(names)]
    layout = {
        "xaxis": {"title": {"text": "step"}, "type": "linear"},
        "yaxis": {
            "tickvals": list(range(len(branches))),
            "ticktext": list(map(label, names)),
            "range": [len(branches) - 0.4, -0.6],
            "zeroline": False,
        },
        "height": 170 + 36 * max(2, len(branches)),
        "showlegend": True,
        "hovermode": "closest",
    }
    phone = [label(name, PHONE_CHARACTERS) for name in names]
    return Figure("Snapshots and forks", note, traces, layout, phone_labels=phone)


def _branches(snapshots: Sequence[Snapshot]) -> list[list[Snapshot]]:
    """Return the snapshots of each run in branches: a snapshot whose parent is not the last of a branch begins one.

    Saves that were aborted come behind the first branch of their run: their records name no parent.
    """
    branches: list[list[Snapshot]] = []
    last: dict[str, list[Snapshot]] = {}  # the id of the last snapshot of each branch
    for snapshot in (s for s in snapshots if s.state != ABORTED):
        branch = last.pop(snapshot.parent or "", None)
        if branch is None or branch[-1].run != snapshot.run:
            if branch is not None:
                last[branch[-1].id] = branch
            branch = []
            branches.append(branch)
        branch.append(snapshot)
        last[snapshot.id] = branch
    first_of = {branch[0].run: branch for branch in reversed(branches)}
    for snapshot in (s for s in snapshots if s.state == ABORTED):
        if snapshot.run not in first_of:
            first_of[snapshot.run] = []
            branches.append(first_of[snapshot.run])
        first_of[snapshot.run].append(snapshot)
    return branches


def _edges(
    pairs: Sequence[tuple[Snapshot, Snapshot]], row_of: dict[str, int], colour: str, dash: str, name: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [x for a, b in pairs for x in (a.step, b.step, None)],
        "y": [y for a, b in pairs for y in (row_of[a.id], row_of[b.id], None)],
        "line": {"color": colour, "dash": dash, "width": 1.5},
        "hoverinfo": "skip",
    }


def _nodes(
    snapshots: Sequence[Snapshot], row_of: dict[str, int], data: ReportData, style: tuple[str, str, str]
) -> list[dict[str, Any]]:
    if not snapshots:
        return []
    name, symbol, colour = style
    reasons = [data.reasons.get(s.id) or "no reason recorded" for s in snapshots]
    texts = [
        f"<b>{label(s.ref, HOVER_CHARACTERS)}</b> {name}<br>{label(why, HOVER_CHARACTERS)}"
        for s, why in zip(snapshots, reasons, strict=True)
    ]
    is_tagged = name == "tagged"
    return [
        {
            "type": "scatter",
            "mode": "markers+text" if is_tagged else "markers",
            "name": name,
            "x": [s.step for s in snapshots],
            "y": [row_of[s.id] + (BELOW if s.state == ABORTED else 0) for s in snapshots],
            "text": [label(", ".join(s.tags), PHONE_CHARACTERS) for s in snapshots] if is_tagged else None,
            "textposition": "top center",
            "hovertext": texts,
            "hoverinfo": "text",
            "marker": {
                "symbol": symbol,
                "size": 13 if is_tagged else 9,
                "color": colour,
                "line": {"width": 1.5, "color": colour},
            },
        }
    ]


def over_steps(data: ReportData, value: Callable[[Snapshot], float | None]) -> list[Series]:
    """Return a value of every snapshot over steps, a series for each run. Aborted saves have none."""
    found: dict[str, tuple[list[int], list[float | None]]] = {run: ([], []) for run in data.runs}
    for snapshot in (s for s in data.snapshots if s.state != ABORTED):
        xs, ys = found[snapshot.run]
        xs.append(snapshot.step)
        ys.append(value(snapshot))
    return [(run, xs, ys) for run, (xs, ys) in found.items()]


def space(data: ReportData) -> list[Figure]:
    """Return the figures of bytes, from records."""
    written = [s for s in data.snapshots if not s.is_reconstructed]
    note = "Bytes that each save added to the repository, packs and manifests. From the records of all snapshots."
    stored = lines("Stored by each save", note, over_steps(data, lambda s: s.stored_bytes), "B")
    note = "Bytes of state over bytes stored, of each save. Higher is better."
    ratios = [s.ratio for s in data.snapshots if s.ratio]
    factor = max(ratios) / min(ratios) if ratios else 1.0  # a snapshot of an unchanged state has a huge one
    axis = {"type": "log", "dtick": "D2" if factor < 1000 else 1} if factor > WIDE else {}
    ratio = lines("Ratio", note, over_steps(data, lambda s: s.ratio or None), "", **axis)
    parts: dict[str, tuple[list[int], list[float | None]]] = {}
    for snapshot in written:
        prefix = f"{snapshot.run}: " if len(data.runs) > 1 else ""
        by_part: dict[str, int] = {}
        for ref in snapshot.manifests:
            by_part[ref.part] = by_part.get(ref.part, 0) + ref.logical_bytes
        for part, nbytes in by_part.items():
            xs, ys = parts.setdefault(f"{prefix}{part or '(root)'}", ([], []))
            xs.append(snapshot.step)
            ys.append(nbytes)
    note = "Bytes of the state itself, before dedup, deltas and codecs. From the records of all snapshots."
    state = lines("State by part", note, [(name, *xy) for name, xy in parts.items()], "B")
    return [figure for figure in (stored, ratio, state) if figure.traces]


def times(data: ReportData) -> list[Figure]:
    """Return the figures of time, from records."""
    note = "Seconds that the training loop waited in each save."
    stall = lines("Stall", note, over_steps(data, lambda s: s.stall_s), "s")
    note = "Seconds from the call of each save to its commit, most of them in the background."
    return [stall, lines("Duration", note, over_steps(data, lambda s: s.total_s), "s")]


def metrics(data: ReportData) -> list[Figure]:
    """Return a figure for each metric; the metrics of most snapshots come first."""
    counts: dict[str, int] = {}
    for name in (name for s in data.snapshots for name in s.metrics):
        counts[name] = counts.get(name, 0) + 1
    names = sorted(counts, key=lambda name: -counts[name])
    figures = []
    for name in names[:MOST_METRICS]:
        bad = sum(not math.isfinite(s.metrics.get(name, 0.0)) for s in data.snapshots)
        note = f"Saved with {counted(counts[name], 'snapshot')}."
        note += f" {counted(bad, 'value')} NaN or infinite, and not drawn." if bad else ""
        more = len(names) - MOST_METRICS
        note += f" {counted(more, 'more metric')} not shown." if more > 0 and name == names[MOST_METRICS - 1] else ""
        series = []
        for run, xs, ys in over_steps(data, partial(_metric, name)):
            known = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
            series.append((run, [x for x, _ in known], [y for _, y in known]))
        figures.append(lines(name, note, series, "", rangemode="normal"))
    return figures


def _metric(name: str, snapshot: Snapshot) -> float | None:
    return snapshot.metrics.get(name)


def of_run(data: ReportData, run: str) -> list[Figure]:
    """Return the figures of the sampled steps of a run."""
    steps = data.sampled.get(run, [])
    if not steps:
        return []
    sample = f"Of {counted(len(steps), 'step')}, evenly spread over the run."
    note = f"Share of the elements that changed since the parent of each snapshot, from stored deltas. {sample}"
    note += (
        " A cross: not known. The layer is new or missing, its deltas skip saves, or a tenth of it was written whole."
    )
    scale = {"zmin": 0, "zmax": 1, "form": ".2~%"}
    figures = [heat_map("Changed elements by layer", note, steps, lambda layer: layer.share, scale)]
    if data.moved and data.moved.get(run):
        figures += _moves(data.moved[run])
    figures += _planes(steps, sample)
    note = f"Bytes of the packs that a save wrote. {sample}"
    figures.append(bars("Stored by part", note, steps, lambda step: step.parts))
    figures.append(bars("Stored by codec", note, steps, lambda step: step.codecs))
    return [figure for figure in figures if figure.traces]


def _moves(moved: Sequence[MovedStep]) -> list[Figure]:
    """Return the figures of how far each layer moved."""
    of = f"of each step b and the one a before it, of {len(moved) + 1} steps whose values were read."
    cross = "A cross: a is zero, a value is not finite, or the layer is not in both."
    note = f"norm(b - a) / norm(a) {of} The colours are logarithmic. {cross}"
    scale = {"form": ".2~g", "is_log": True}
    l2 = heat_map("Relative L2 by layer", note, moved, lambda move: move.relative_l2, scale)
    cosines = [layer.cosine for step in moved for layer in step.layers.values()]
    least = min((cosine for cosine in cosines if math.isfinite(cosine)), default=1.0)
    note = f"a b / (norm(a) norm(b)) {of} {cross}"
    scale = {"form": ".6~g", "zmin": min(0.99, least), "zmax": 1}
    return [l2, heat_map("Cosine by layer", note, moved, lambda move: move.cosine, scale)]


def _planes(steps: Sequence[SampledStep], sample: str) -> list[Figure]:
    """Return a figure for each element size: the coded size of each byte plane over steps."""
    figures = []
    keys = sorted({key for step in steps for key in step.planes})
    for size in sorted({key[0] for key in keys}):
        series = []
        for _, is_delta, plane in (key for key in keys if key[0] == size):
            pairs = [(s.snapshot.step, s.planes.get((size, is_delta, plane))) for s in steps]
            known = [(step, stored / plain) for step, pair in pairs if pair for stored, plain in [pair]]
            place = "highest byte" if plane == size - 1 else "lowest byte" if plane == 0 else f"byte {plane}"
            name = f"{place}{', delta' if is_delta else ', whole'}"
            series.append((name, [x for x, _ in known], [y for _, y in known]))
        note = "Bytes of each plane after coding, over its plain bytes: at 100 %, it does not compress. The highest "
        note += f"byte of a float is its exponent. Without sparse deltas, which have no planes. {sample}"
        title = f"Compressibility by plane: elements of {counted(size, 'byte')}"
        figures.append(lines(title, note, series, "", tickformat=".0%"))
    return figures
