"""Report page: one page of HTML about some runs, which a browser shows without any network.

In: an open repository. Out: a RunReport. The page holds plotly, the figures as JSON, and a table for each figure. Its
content security policy lets the browser run these two scripts and nothing else, and load nothing.

Names of runs, layers, metrics and tags come from users: they are escaped in HTML, in JSON and in labels.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checks import check_list
from ..context import Context
from ..errors import InvalidInputError, needs
from ..format.records import ABORTED, COMMITTED, FORGOTTEN, SWEPT, VERSION, Snapshot
from ..retention import utc
from ..text import brief, counted, html_table, human_bytes, printable, quoted
from .estimate import PUT_PRICE, STORAGE_PRICE
from .report import ReportData, collect
from .report_figures import Figure, lineage, metrics, of_run, space, times

#: Requests of a save beside packs and manifests: its session and its record (docs/s3.md).
OTHER_PUTS = 2
#: At most so many rows of reasons, and of steps that were not read.
MOST_REASONS = 60


@dataclass(frozen=True, slots=True)
class RunReport:
    """A page about some runs, and what was read for it.

    Attributes:
        html: the page. It holds all that it needs: a browser loads nothing for it.
        runs: the names of the runs.
        snapshots: the number of records on the page.
        sampled: the number of steps of which manifests and packs were read. Bytes by part and codec, planes and changed
            elements are of these steps alone.
        manifests, packs: how many were read; of a pack, the list of its blobs, and some deltas.
        valued: the number of steps whose values were read.
        read_bytes: of manifests, lists of blobs, deltas and values.
        unread: reference -> why, of steps that were to be read and could not.
        unknown: key -> why, of records that cannot be read or are gone; their snapshots are not on the page.
    """

    html: str = field(repr=False)
    runs: list[str]
    snapshots: int
    sampled: int
    manifests: int
    packs: int
    valued: int
    read_bytes: int
    unread: dict[str, str]
    unknown: dict[str, str]

    __repr__ = brief


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a store: of a GB per month, and of a thousand requests [USD]."""

    storage: float
    put: float


def report(context: Context, runs: Sequence[str], *, values: bool, storage_price: float, put_price: float) -> RunReport:
    """Return a page about some runs; see `Repository.report`."""
    check_list("runs", runs)
    for name, price in (("storage_price", storage_price), ("put_price", put_price)):
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise InvalidInputError(f"{name} {quoted(price)}: expected a number of 0 or more")
    library = _library()
    data = collect(context, list(runs), values=values)
    return RunReport(
        html=_page(data, Prices(storage_price, put_price), library),
        runs=data.runs,
        snapshots=len(data.snapshots),
        sampled=sum(map(len, data.sampled.values())),
        manifests=data.manifests[0],
        packs=data.packs[0],
        valued=len(_valued(data)),
        read_bytes=data.manifests[1] + data.packs[1] + data.deltas[1] + data.values[1],
        unread=data.unread,
        unknown=data.unknown,
    )


def _valued(data: ReportData) -> set[str]:
    """Return the ids of the snapshots whose values were read."""
    return {s.id for steps in (data.moved or {}).values() for step in steps for s in (step.before, step.snapshot)}


def _library() -> str:
    """Return the source of plotly.js.

    Raises:
        CapabilityError: plotly is not installed.
    """
    with needs("plotly", 'pip install "snapstore[report]"'):
        from plotly.offline import get_plotlyjs
    return str(get_plotlyjs())


def _page(data: ReportData, prices: Prices, library: str) -> str:
    figures: list[Figure] = []
    body = [_section("Lineage", [lineage(data)], figures, _reasons(data))]
    body.append(_section("Space", space(data), figures))
    body.append(_section("Time", times(data), figures))
    if found := metrics(data):
        body.append(_section("Metrics", found, figures))
    for run in data.sampled:
        if found := of_run(data, run):
            body.append(_section(f"Sampled steps of {run}", found, figures))
    body.append(_section("Cost", [], figures, _cost(data, prices)))
    body.append(_section("What was read", [], figures, _read(data)))
    drawn = [
        {"id": f"figure-{i}", "data": f.traces, "layout": f.layout, "labels": f.phone_labels}
        for i, f in enumerate(figures)
    ]
    text = _in_script(json.dumps(_finite(drawn), separators=(",", ":"), ensure_ascii=False))
    scripts = f"{_hash(library)} {_hash(_SCRIPT)}"
    policy = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"
    title = ", ".join(data.runs[:3]) + (f" and {len(data.runs) - 3} more" if len(data.runs) > 3 else "") or "no runs"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>snapstore: {_text(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        f"<header><h1>{_text(title)}</h1>\n<p>{_text(data.url)}, read {utc(data.created):%Y-%m-%d %H:%M} UTC by "
        f"snapstore {VERSION}</p>\n{_tiles(data)}</header>\n"
        f"<noscript><p>The figures need JavaScript. The tables below each of them do not.</p></noscript>\n"
        f"<main>{''.join(body)}</main>\n"
        f'<script type="application/json" id="figures">{text}</script>\n'
        f"<script>{library}</script>\n<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def _finite(value: Any) -> Any:
    """Return what JSON can hold: None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _section(title: str, shown: Sequence[Figure], figures: list[Figure], more: str = "") -> str:
    """Return a section of the page; its figures are added to those of the page."""
    parts = [f"<section><h2>{_text(title)}</h2>"]
    for figure in shown:
        name = f"figure-{len(figures)}"
        figures.append(figure)
        parts.append(f"<figure><figcaption><h3>{_text(figure.title)}</h3><p>{_text(figure.note)}</p></figcaption>")
        parts.append(f'<div class="plot" id="{name}" role="img" aria-label="{_text(figure.title)}"></div>')
        if figure.rows:
            table = html_table(counted(len(figure.rows), "value"), figure.columns, figure.rows)
            parts.append(f'<details><summary>Table</summary><div class="table">{table}</div></details>')
        parts.append("</figure>")
    return "".join([*parts, more, "</section>\n"])


def _tiles(data: ReportData) -> str:
    states = Counter(s.state for s in data.snapshots)
    kept = [s for s in data.snapshots if s.state == COMMITTED]
    logical, stored = sum(s.logical_bytes for s in data.snapshots), sum(s.stored_bytes for s in data.snapshots)
    tiles = [
        (f"{states[COMMITTED]:,}", f"kept of {counted(len(data.snapshots), 'snapshot')}"),
        (f"{states[FORGOTTEN]:,} / {states[SWEPT]:,}", "forgotten / swept"),
        (human_bytes(max((s.logical_bytes for s in kept), default=0)), "largest state"),
        (human_bytes(stored), f"stored by all saves, for {human_bytes(logical)} of states"),
        (f"{sum(s.stall_s for s in data.snapshots):.3g} s", "the loop waited, in all saves"),
    ]
    return f"<ul class=tiles>{''.join(f'<li><b>{_text(value)}</b> {_text(name)}</li>' for value, name in tiles)}</ul>"


def _reasons(data: ReportData) -> str:
    """Return a table of the reasons why snapshots are kept or gone."""
    groups: dict[tuple[str, str], list[Snapshot]] = {}
    for snapshot in data.snapshots:
        groups.setdefault((snapshot.state, data.reasons.get(snapshot.id, "")), []).append(snapshot)
    ranked = sorted(
        groups.items(),
        key=lambda group: (list(_STATES).index(group[0][0]) if group[0][0] in _STATES else 9, -len(group[1])),
    )
    rows: list[list[object]] = [
        [_STATES.get(state, state), why or "no reason recorded", len(of), of[0].ref, of[-1].ref]
        for (state, why), of in ranked[:MOST_REASONS]
    ]
    left = len(ranked) - MOST_REASONS
    note = f" {counted(left, 'more reason')} not shown." if left > 0 else ""
    text = "Why snapshots are kept or gone. A gc has deleted the bytes of swept ones; their records stay, and say why."
    return _table(text + note, ["state", "reason", ">snapshots", "first", "last"], rows)


_STATES = {COMMITTED: "kept", FORGOTTEN: "forgotten, its bytes are still there", SWEPT: "swept", ABORTED: "aborted"}


def _cost(data: ReportData, prices: Prices) -> str:
    """Return a table of what the snapshots cost."""
    there = [s for s in data.snapshots if s.state in (COMMITTED, FORGOTTEN)]
    steps = [step for of_run in data.sampled.values() for step in of_run]
    packs = sum(step.packs for step in steps) / len(steps) if steps else 0.0
    puts = sum(len(s.named_keys) + OTHER_PUTS + packs for s in data.snapshots)
    ranks = {run: max((step.ranks for step in of_run), default=1) for run, of_run in data.sampled.items()}
    stall_s, total_s = sum(s.stall_s for s in data.snapshots), sum(s.total_s for s in data.snapshots)
    gpu_s = sum(s.stall_s * ranks.get(s.run, 1) for s in data.snapshots)
    gb, own = data.stored_bytes / 1e9, sum(s.stored_bytes for s in there)
    of_ranks = "one GPU for each rank, by the manifests of sampled steps; one for a run without any"
    rows: list[list[object]] = [
        [
            "The repository now",
            human_bytes(data.stored_bytes),
            _usd(gb * prices.storage, " a month"),
            f"{data.objects:,} packs and manifests, as listed",
        ],
        [
            "These runs, kept and forgotten",
            human_bytes(own),
            _usd(own / 1e9 * prices.storage, " a month"),
            "what their saves stored, by their records",
        ],
        [
            "Requests of all saves",
            f"about {puts:,.0f} PUTs",
            _usd(puts / 1000 * prices.put, ""),
            f"{packs:.1f} packs a save, the mean of sampled steps; manifests, record, session",
        ],
        ["GPU time lost to stalls", f"{gpu_s:,.4g} GPU s", "", of_ranks],
        ["Time of all saves", f"{total_s:,.4g} s", "", f"of which the loop waited {stall_s:,.4g} s"],
    ]
    source = f"{prices.storage:g} USD per GB and month, {prices.put:g} USD per 1,000 requests"
    default = (prices.storage, prices.put) == (STORAGE_PRICE, PUT_PRICE)
    source += ": AWS list prices of S3 Standard, us-east-1, 2025" if default else ": as given"
    return _table(f"Prices: {source}.", ["", ">amount", ">price", "how counted"], rows)


def _usd(amount: float, per: str) -> str:
    return f"{amount:,.2f} USD{per}" if amount >= 0.01 or not amount else f"{amount:.2g} USD{per}"


def _read(data: ReportData) -> str:
    """Return tables of what was read, and of what could not be."""
    sampled, kept = sum(map(len, data.sampled.values())), sum(s.state == COMMITTED for s in data.snapshots)
    of = f"of {sampled} of {kept:,} kept snapshots, evenly spread over {counted(len(data.sampled), 'run')}"
    valued = counted(len(_valued(data)), "step")
    rows: list[list[object]] = [
        ["records", f"{len(data.snapshots):,}", "", "all of these runs"],
        ["manifests", f"{data.manifests[0]:,}", human_bytes(data.manifests[1]), f"{of}, and of their parents"],
        ["packs, their lists of blobs", f"{data.packs[0]:,}", human_bytes(data.packs[1]), of],
        [
            "deltas, for changed elements",
            f"{data.deltas[0]:,}",
            human_bytes(data.deltas[1]),
            f"{of}, some of each layer",
        ],
        ["values", "", human_bytes(data.values[1]), "not asked for" if data.moved is None else f"of {valued}"],
    ]
    parts = [_table("Read for this page.", ["what", ">number", ">bytes", "of"], rows)]
    if left_out := [[run] for run in data.runs if run not in data.sampled]:
        parts.append(_table("Runs without sampled steps: nothing is kept, or others are longer.", ["run"], left_out))
    if data.unread:
        parts.append(_table("Steps that could not be read.", ["snapshot", "why"], list(data.unread.items())))
    if data.unknown:
        text = "Records that cannot be read or are gone. Their snapshots are not on this page."
        parts.append(_table(text, ["record", "why"], list(data.unknown.items())))
    return "".join(parts)


def _table(text: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a paragraph and a table, which scrolls if the page is narrow."""
    return f'<p>{_text(text)}</p><div class="table">{html_table("", columns, rows)}</div>'


def _text(text: str) -> str:
    """Return a text as HTML."""
    return html.escape(printable(text))


def _in_script(json: str) -> str:
    """Return JSON in which no character ends a script or a comment of HTML."""
    for character in "<>&\u2028\u2029":
        json = json.replace(character, f"\\u{ord(character):04x}")
    return json


def _hash(script: str) -> str:
    """Return the name of a script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


_STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1100px;padding:0 16px 48px;font:16px/1.5 system-ui,sans-serif;color:#1a1a1a}
h1{margin:24px 0 0;font-size:28px;overflow-wrap:anywhere}
h2{margin:40px 0 8px;padding-top:16px;border-top:2px solid #1a1a1a;font-size:21px;overflow-wrap:anywhere}
h3{margin:0;font-size:16px;overflow-wrap:anywhere}
p{margin:0;color:#555;font-size:14px;overflow-wrap:anywhere}
figure{margin:24px 0}
.plot{width:100%}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;padding:0;margin:16px 0}
.tiles li{list-style:none;padding:12px;border:1px solid #ccc;border-radius:8px;color:#555;font-size:14px}
.tiles b{display:block;color:#1a1a1a;font-size:22px}
.table{overflow-x:auto;margin:8px 0}
details .table{max-height:420px;overflow-y:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
caption{padding:4px 0;color:#555}
td,th{padding:3px 12px 3px 0;border-bottom:1px solid #ddd;vertical-align:top}
td:last-child,td:nth-child(2):nth-last-child(4){min-width:14em}
summary{cursor:pointer;color:#555;font-size:14px}
@media(max-width:600px){body{padding:0 10px 32px}h1{font-size:22px}.tiles{grid-template-columns:1fr 1fr}}
@media print{.plot,figure{break-inside:avoid}}
"""

#: Draws the figures. On a narrow screen, labels are shorter, and a finger scrolls the page instead of the figure.
_SCRIPT = """
const narrow = window.innerWidth < 640;
for (const {id, data, layout, labels} of JSON.parse(document.getElementById("figures").textContent)) {
  const {yaxis, xaxis} = layout;
  if (narrow && labels.length) yaxis.ticktext = labels;
  for (const axis of [xaxis, yaxis]) {
    const showgrid = axis.showgrid ?? true;
    Object.assign(axis, {automargin: true, linecolor: "#999", zeroline: false, showgrid, gridcolor: "#e5e5e5"});
  }
  Plotly.newPlot(id, data, {
    height: 330, dragmode: narrow ? false : "zoom",
    paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    font: {family: "system-ui, sans-serif", size: narrow ? 10 : 12, color: "#1a1a1a"},
    margin: {l: 8, r: 8, t: 30, b: 8},
    legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom"},
    hoverlabel: {namelength: -1, align: "left"},
    ...layout,
  }, {responsive: true, displaylogo: false, displayModeBar: !narrow,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]]});
}
document.body.dataset.drawn = "yes";
"""
