"""Write the figures of benches: a JSON file under docs/benchmarks/, and a table in docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import snapstore

ROOT = Path(__file__).parents[2]
MET = {True: "yes", False: "**no**", None: ""}
Row = dict[str, Any]


@dataclass
class Figure:
    """One measured number against its goal; `met` is None if there is no goal."""

    name: str
    value: float
    unit: str
    goal: str = ""
    met: bool | None = None


def row(name: str, value: float, unit: str, goal: str = "", met: bool | None = None) -> Row:
    """Return one measured number against its goal; `met` is None if there is no goal."""
    return {"name": name, "value": value, "unit": unit, "goal": goal, "met": met}


def publish(bench: str, rows: list[Row], began: float, packages: tuple[str, ...], *, quick: bool) -> None:
    """Print the table; unless `quick`, write `docs/benchmarks/<bench>.json` and the table between its two marks.

    A row that says no machine and versions has those of the report.
    """
    report = {
        "machine": machine(),
        "versions": {"python": platform.python_version(), "snapstore": snapstore.__version__}
        | {name: version(name) for name in packages},
        "seconds": round(time.time() - began),
        "figures": rows,
    }
    text = figures(rows)
    print(text)
    if quick:
        return
    (ROOT / "docs" / "benchmarks" / f"{bench}.json").write_text(json.dumps(report, indent=1) + "\n")
    place(bench, text)


def machine() -> str:
    """Return what the record says of this machine."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def recorded(bench: str) -> list[Row]:
    """Return the rows that `publish` wrote last, each with the machine and the versions of its run."""
    report = json.loads((ROOT / "docs" / "benchmarks" / f"{bench}.json").read_text())
    of_run = {name: report[name] for name in ("machine", "versions")}
    return [of_run | one for one in report["figures"]]


def figures(rows: Iterable[Row]) -> str:
    """Return the table of figures."""
    cells = ((r["name"], f"{r['value']:.3g} {r['unit']}", r["goal"], MET[r["met"]]) for r in rows)
    return f"\n{table(('figure', 'measured', 'goal', 'met'), cells)}\n"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |\n" for row in (columns, *rows)]
    lines.insert(1, f"|{'---|' * len(columns)}\n")
    return "".join(lines)


def place(bench: str, text: str) -> None:
    """Write a bench's section of docs/benchmarks.md, between its two marks."""
    page = ROOT / "docs" / "benchmarks.md"
    head, begin, _, end, tail = _split(page.read_text(), bench)
    page.write_text(f"{head}{begin}{text}{end}{tail}")


def placed(bench: str) -> str:
    """Return the section that is in docs/benchmarks.md now."""
    return _split((ROOT / "docs" / "benchmarks.md").read_text(), bench)[2]


def _split(page: str, bench: str) -> tuple[str, str, str, str, str]:
    marks = re.compile(f"(<!-- {bench}: written by [^\n]* -->\n)(.*?)(<!-- end of {bench} -->)", re.DOTALL)
    if (match := marks.search(page)) is None:
        raise ValueError(
            f"docs/benchmarks.md: {bench}: expected the two marks of its section, found none; put them there"
        )
    return page[: match.start()], match[1], match[2], match[3], page[match.end() :]
