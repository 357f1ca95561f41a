"""Where the benches' figures go: a JSON file under docs/benchmarks/, and a table in docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import snapstore

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]


def row(name: str, value: float, unit: str, goal: str = "", met: bool | None = None) -> Row:
    """One measured number against its goal; `met` is None where there is none."""
    return {"name": name, "value": value, "unit": unit, "goal": goal, "met": met}


def publish(bench: str, rows: list[Row], began: float, packages: tuple[str, ...], *, quick: bool) -> None:
    """Print the table; unless `quick`, write `docs/benchmarks/<bench>.json` and the table between its two marks."""
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), "snapstore": snapstore.__version__}
        | {name: version(name) for name in packages},
        "seconds": round(time.time() - began),
        "figures": rows,
    }
    met = {True: "yes", False: "**no**", None: ""}
    lines = ["| figure | measured | goal | met |", "|---|---|---|---|"]
    lines += [f"| {r['name']} | {r['value']:.3g} {r['unit']} | {r['goal']} | {met[r['met']]} |" for r in rows]
    table = "\n" + "\n".join(lines) + "\n\n"
    print(table)
    if quick:
        return
    (ROOT / "docs" / "benchmarks" / f"{bench}.json").write_text(json.dumps(report, indent=1) + "\n")
    page = ROOT / "docs" / "benchmarks.md"
    begin, end = f"<!-- {bench}: written by tools/bench {bench} -->\n", f"<!-- end of {bench} -->"
    head, _, rest = page.read_text().partition(begin)
    page.write_text(f"{head}{begin}{table}{end}{rest.partition(end)[2]}")
