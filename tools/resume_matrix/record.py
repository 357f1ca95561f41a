"""The judgement of outcomes, and the record of a whole run: docs/benchmarks/resume.json and its table.

A pair fails if torch.save resumes exactly and snapstore does not, and has not told so when it saved; if its process
died; or if snapstore does not resume exactly and docs/reliability.md names no cause.
"""

from __future__ import annotations

import json
import platform
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import snapstore
from benchmarks import page

from .paths import DIFFERS, ERROR, NOT_RUN, PATHS, SAME, TOLD, Outcome
from .training import Case

ROOT = Path(__file__).parents[2]
LINE_CHARACTERS = 106
HEADING = "## Trainings that do not resume exactly"


class Pair(NamedTuple):
    """A case, a path, and the outcome."""

    case: Case
    path: str
    outcome: Outcome


class Cause(NamedTuple):
    """A row of the table of docs/reliability.md: patterns of names, the kind of outcome, and the cause."""

    optimizers: list[str]
    layouts: list[str]
    dtypes: list[str]
    paths: list[str]
    outcome: str
    text: str

    def explains(self, pair: Pair) -> bool:
        """Return whether this is the cause of a pair's outcome."""
        named = zip(
            (self.optimizers, self.layouts, self.dtypes, self.paths),
            (pair.case.optimizer, pair.case.layout, pair.case.dtype, pair.path),
            strict=True,
        )
        fits = all(any(fnmatchcase(name, pattern) for pattern in patterns) for patterns, name in named)
        return fits and kind(pair.outcome.snapstore) == self.outcome


def kind(outcome: str) -> str:
    """Return "same", "differs", "not run", "error" or "told"."""
    return outcome.partition(":")[0]


def causes(text: str | None = None) -> list[Cause]:
    """Read the table of causes in docs/reliability.md.

    Raises:
        ValueError: a row has another number of cells, or an outcome other than "differs", "error" and "told".
    """
    whole = (ROOT / "docs" / "reliability.md").read_text() if text is None else text
    section = whole.partition(HEADING)[2].partition("\n## ")[0]
    found = []
    for line in [one for one in section.splitlines() if one.startswith("|")][2:]:
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) != 6 or cells[4] not in (DIFFERS, ERROR, TOLD):
            raise ValueError(
                "docs/reliability.md: expected | optimizers | layouts | dtypes | paths | differs, error, told | cause, "
                f"got {line!r}"
            )
        optimizers, layouts, dtypes, paths = (re.findall("`([^`]+)`", cell) for cell in cells[:4])
        found.append(Cause(optimizers, layouts, dtypes, paths, *cells[4:]))
    return found


def failures(pairs: Iterable[Pair], known: list[Cause]) -> list[str]:
    """Return a line for each pair that fails."""
    found = []
    for pair in pairs:
        ours, theirs = pair.outcome
        why = ""
        if kind(ours) not in (SAME, NOT_RUN):
            if theirs == SAME and kind(ours) != TOLD:
                why = "torch.save resumes exactly"
            elif "process ended" in ours:
                why = "a crash"
            elif not any(cause.explains(pair) for cause in known):
                why = "docs/reliability.md names no cause"
        if why:
            found.append(f"{', '.join(pair.case)}, {pair.path}: {ours}; {why} (torch.save: {theirs})")
    return found


def unused(pairs: list[Pair], known: list[Cause]) -> list[str]:
    """Return a line for each row of docs/reliability.md that explains no pair."""
    return [
        f"docs/reliability.md: no pair fits the row {cause[:5]}: {cause.text}"
        for cause in known
        if not any(cause.explains(pair) for pair in pairs)
    ]


def record(pairs: list[Pair], missing: list[str], seconds: float, device: str) -> dict[str, Any]:
    """Return the record of a whole run. Pairs with one outcome by both that is not "same" are grouped by it."""
    groups: dict[tuple[str, str, Outcome], list[Case]] = {}
    for pair in pairs:
        if pair.outcome != (SAME, SAME):
            groups.setdefault((pair.case.optimizer, pair.path, pair.outcome), []).append(pair.case)
    names = {package: version(package) for package in ("torch", "transformers", "lightning", "accelerate")}
    return {
        "machine": page.machine(),
        "device": device,
        "versions": {"python": platform.python_version(), "snapstore": snapstore.__version__} | names,
        "seconds": round(seconds),
        "not_installed": missing,
        "optimizers": sorted({pair.case.optimizer for pair in pairs}),
        "counts": counts(pairs),
        "not_same": [
            {
                "optimizer": name,
                "path": path,
                "snapstore": outcome.snapstore,
                "torch.save": outcome.torch_save,
                "cases": sorted(f"{case.layout} {case.dtype}" for case in cases),
            }
            for (name, path, outcome), cases in sorted(groups.items())
        ],
    }


def counts(pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """Return, for each path and pair of outcomes, how many pairs have them."""
    tally = Counter((pair.path, *map(kind, pair.outcome)) for pair in pairs)
    order = sorted(tally, key=lambda one: (PATHS.index(one[0]), one[1:]))
    return [
        {"path": path, "snapstore": ours, "torch.save": theirs, "pairs": tally[path, ours, theirs]}
        for path, ours, theirs in order
    ]


def table(made: dict[str, Any]) -> str:
    """Return the section of docs/benchmarks.md."""
    by_path: dict[str, Counter[str]] = {}
    for row in made["counts"]:
        ours, theirs = row["snapstore"], row["torch.save"]
        column = ours if NOT_RUN in (ours, theirs) else f"{ours}/{theirs}"
        by_path.setdefault(row["path"], Counter())[column] += row["pairs"]
    columns = {
        "both exact": (f"{SAME}/{SAME}",),
        "only snapstore exact": (f"{SAME}/{DIFFERS}", f"{SAME}/{ERROR}"),
        "only torch.save exact": (f"{DIFFERS}/{SAME}", f"{ERROR}/{SAME}"),
        "told at the save": tuple(f"{TOLD}/{b}" for b in (SAME, DIFFERS, ERROR)),
        "neither exact": tuple(f"{a}/{b}" for a in (DIFFERS, ERROR) for b in (DIFFERS, ERROR)),
        "not run": (NOT_RUN,),
    }
    rows = [
        (f"`{path}`", sum(tally.values()), *(sum(tally[one] for one in kinds) for kinds in columns.values()))
        for path, tally in by_path.items()
    ]
    missing = f"\nNot installed: {', '.join(made['not_installed'])}.\n" if made["not_installed"] else ""
    named = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    about = f"{made['machine']}, device {made['device']}, {named}: {len(made['optimizers'])} optimizers"
    about = textwrap.fill(about, LINE_CHARACTERS) + "\n"
    return f"\n{about}{missing}\n{page.table(('path', 'pairs', *columns), rows)}\n"


def packed(made: dict[str, Any]) -> str:
    """Return a record as JSON with a line for each row."""
    lines = []
    for key, value in made.items():
        is_rows = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]" if is_rows else json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def publish(made: dict[str, Any], name: str) -> None:
    """Write docs/benchmarks/<name>.json and the section of docs/benchmarks.md."""
    (ROOT / "docs" / "benchmarks" / f"{name}.json").write_text(packed(made))
    page.place(name, table(made))
