"""Print the figures of the house: `tools/house [--since COMMIT]`.

The modules that a steady save and a steady `dcp.save` enter; lines of code of each folder of the package; lines of the
tests; words of the documents. With a commit, each figure of that commit stands beside it.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SAVES = """
import sys, threading, torch, snapstore

entered = set()
def enter(frame, event, _):
    name = frame.f_globals.get("__name__", "")
    if event == "call" and name.startswith("snapstore.") and frame.f_code.co_name != "<module>":
        entered.add(name)

model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
optimizer = torch.optim.AdamW(model.parameters())
with snapstore.SnapshotManager(sys.argv[1], run="a", keep=[snapstore.KeepLast(3)]) as snapshots:
    for step in range(6):
        model(torch.ones(4, 300)).sum().backward()
        optimizer.step()
        if step == 5:  # the first saves learn the structure, and make bases
            snapshots.wait_until_finished()
            threading.setprofile(enter)
            sys.setprofile(enter)
        snapshots.save(step, {"model": model, "optimizer": optimizer}).result()
        snapshots.wait_until_finished()
    sys.setprofile(None)
    threading.setprofile(None)
print(*sorted(entered))
"""


def code_lines(source: str, tree: ast.Module | None = None) -> int:
    """Return the number of lines of a Python file that are no docstring, no comment and not blank.

    Args:
        tree: of the file, if it was parsed.
    """
    docstrings: set[int] = set()
    for node in ast.walk(tree or ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), 1)
    return len({n for n, text in lines if text.strip() and not text.lstrip().startswith("#")} - docstrings)


def entered(tree: Path) -> list[str]:
    """Return the modules that a steady save enters in a tree."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _SAVES, folder + "/repository"]
        environment = {"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin", "HOME": folder}
        # in a folder of its own: Python puts the current one before PYTHONPATH
        saves = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
        return saves.stdout.split()


def figures(tree: Path) -> Counter[str]:
    """Return the figures of a tree."""
    found: Counter[str] = Counter()
    found["modules that a steady save enters"] = len(entered(tree))
    for path in sorted((tree / "snapstore").rglob("*.py")):
        folder = path.relative_to(tree).parts[1] if len(path.relative_to(tree).parts) > 2 else "(root)"
        count = code_lines(path.read_text())
        found["modules"] += 1
        found["code lines"] += count
        found[f"  {folder}"] += count
    found["lines of tests"] = sum(len(path.read_text().splitlines()) for path in (tree / "tests").rglob("*.py"))
    pages = [tree / "README.md", *(tree / "docs").rglob("*.md")]
    found["words of the documents"] = sum(len(path.read_text().split()) for path in pages)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="tools/house", description=__doc__.partition("\n")[0])
    parser.add_argument("--since", metavar="COMMIT", help="print the figures of this commit too")
    parser.add_argument("--modules", action="store_true", help="print the modules that a steady save enters")
    options = parser.parse_args()
    if options.modules:
        print(*entered(ROOT), sep="\n")
        return
    now, before = figures(ROOT), Counter[str]()
    if options.since:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", options.since], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            before = figures(Path(folder))
    print(f"| figure | {f'{options.since[:8]} | now | change' if options.since else 'now'} |")
    print("|---|---:|" + ("---:|---:|" if options.since else ""))
    for name in [*now, *(before - now).keys() - now.keys()]:
        row = [before[name], now[name], f"{now[name] - before[name]:+}"] if options.since else [now[name]]
        print(f"| {name} | {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
