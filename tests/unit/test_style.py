"""The tree follows the rules of the project: small files and functions, one argument for each verb, true maps.

Each rule counts its breaches in each file. `style_allowed.json` lists the allowed counts: the breaches from before the
rule was written. A count must be equal to the allowed one, so a breach that is removed cannot come back.
`python tests/unit/test_style.py --write` writes the counts of this tree. Words, openings of sentences and subjects of
commits fail no test: `tools/prose.py` warns of them.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import prose
from house import code_lines
from prose import Hit, below, python, source

ALLOWED = Path(__file__).with_name("style_allowed.json")
HERE = "tests/unit/test_style.py"
FILE_LINES, FUNCTION_LINES, PARAMETERS, ROOT_MODULES, DOC_CHARACTERS, SENTENCES = 400, 60, 7, 14, 110, 3


# --- rules: each yields its breaches ---------------------------------------------------------------------------------


def long_files() -> Iterator[Hit]:
    for s in python("snapstore"):
        if (lines := code_lines(s.source, s.tree)) > FILE_LINES:
            yield Hit(s.path, 1, f"{lines} lines of code")


def long_functions() -> Iterator[Hit]:
    for s in python("snapstore"):
        for f in s.functions:
            if (lines := (f.end_lineno or f.lineno) - f.lineno + 1) > FUNCTION_LINES:
                yield Hit(s.path, f.lineno, f"{f.name}: {lines} lines")


def many_parameters() -> Iterator[Hit]:
    for s in python("snapstore"):
        if s.path.startswith("snapstore/cli/"):  # typer's verbs have one for each option
            continue
        for f in s.functions:
            if (count := len(parameters(f))) > PARAMETERS:
                yield Hit(s.path, f.lineno, f"{f.name}: {count} parameters")


def loose_arguments() -> Iterator[Hit]:
    for s in python("snapstore"):
        for f in s.functions if s.path != "snapstore/context.py" else []:
            if len(loose := {"store", "index", "engines"} & set(parameters(f))) > 1:
                yield Hit(s.path, f.lineno, f"{f.name}({', '.join(sorted(loose))})")


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a function's parameters, without self and cls."""
    a = function.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if arg is not None]
    return [name for name in names if name not in ("self", "cls")]


def repeated_class_names() -> Iterator[Hit]:
    """Yield the classes whose name a class of an earlier module has; a leading underscore makes no other name."""
    first: dict[str, str] = {}
    for s in python("snapstore"):
        for node in s.nodes:
            if isinstance(node, ast.ClassDef):
                path = first.setdefault(node.name.lstrip("_"), s.path)
                if path != s.path:
                    yield Hit(s.path, node.lineno, f"{node.name} is also a class of {path}")


def crowded_root() -> Iterator[Hit]:
    modules = sorted((prose.ROOT / "snapstore").glob("*.py"))
    for path in modules[ROOT_MODULES:]:
        yield Hit("snapstore", 0, f"{len(modules)} modules; {path.name} is one too many")


def folders_without_words() -> Iterator[Hit]:
    folders = {str(Path(path).parent) for path in below("snapstore", "*.py")} | {"tools/benchmarks", "tests/kit"}
    for folder in sorted(folders):
        path = f"{folder}/__init__.py"
        words = (ast.get_docstring(source(path).tree) or "") if (prose.ROOT / path).exists() else ""
        if (count := len(re.findall(r"[.!?](?=\s|\Z)", words))) < SENTENCES:
            yield Hit(path, 1, f"{count} sentences")


def unmapped_modules() -> Iterator[Hit]:
    """Yield the modules that the docstring of their folder does not name in a line of its own, and the other way."""
    for folder in sorted({str(Path(path).parent) for path in below("snapstore", "*.py")}):
        path = f"{folder}/__init__.py"
        words = (ast.get_docstring(source(path).tree) or "") if (prose.ROOT / path).exists() else ""
        named = re.findall(r"^(\w+(?:\.py|/))  +\S", words, re.MULTILINE)
        there = [p.name for p in (prose.ROOT / folder).glob("*.py") if p.name != "__init__.py"]
        there += [f"{p.name}/" for p in (prose.ROOT / folder).iterdir() if (p / "__init__.py").exists()]
        for name in sorted({*named} ^ {*there}) + [name for name, count in Counter(named).items() if count > 1]:
            yield Hit(path, 1, name)


def unformatted_code() -> Iterator[Hit]:
    for s in python("snapstore"):
        for number, line in enumerate(s.source.splitlines(), 1):
            if re.search(r"#\s*fmt:\s*(skip|off)", line):
                yield Hit(s.path, number, line.strip()[-40:])


def long_lines_of_docs() -> Iterator[Hit]:
    for path in ("README.md", *below("docs", "*.md")):
        for number, line in enumerate(prose.prose(path).splitlines(), 1):
            if len(line) > DOC_CHARACTERS and not line.lstrip().startswith(("|", "<", "[", "![")):
                yield Hit(path, number, f"{len(line)} characters")


class Rule(NamedTuple):
    """A rule: its text, the advice for a breach, and the search for breaches."""

    text: str
    do: str
    find: Callable[[], Iterator[Hit]]


RULES = {
    "file length": Rule(
        f"A file of snapstore/ has at most {FILE_LINES} lines of code, docstrings and comments not counted.",
        "Cut it into two modules by meaning.",
        long_files,
    ),
    "function length": Rule(
        f"A function of snapstore/ has at most {FUNCTION_LINES} lines.", "Cut it into steps with names.", long_functions
    ),
    "parameters": Rule(
        f"A function of snapstore/ has at most {PARAMETERS} parameters, self and cls not counted.",
        "Make the parameters that travel together one object.",
        many_parameters,
    ),
    "one argument": Rule(
        "No function takes two of store, index and engines loose.", "Take a Context.", loose_arguments
    ),
    # One is allowed: SnapshotCallback is the public name both in Lightning's and in transformers' module.
    "class names": Rule(
        "A class name stands in one module of snapstore/.",
        "Give the class a name that says how it differs.",
        repeated_class_names,
    ),
    "root": Rule(
        f"The root of the package has at most {ROOT_MODULES} modules.", "Move one into its folder.", crowded_root
    ),
    "folders": Rule(
        f"The __init__.py of a folder says in {SENTENCES} sentences what the folder is for, and what to read first.",
        "Write its docstring.",
        folders_without_words,
    ),
    "maps": Rule(
        "The __init__.py of a folder names each module and folder in it, in one line: 'name.py  what it does'.",
        "Write the line, or remove it.",
        unmapped_modules,
    ),
    "formatter": Rule("The formatter formats all of snapstore/.", "Take 'fmt: skip' away.", unformatted_code),
    "docs lines": Rule(
        f"A line of README.md and docs/ has at most {DOC_CHARACTERS} characters outside tables and code.",
        "Wrap it.",
        long_lines_of_docs,
    ),
}


# --- tests -----------------------------------------------------------------------------------------------------------


def allowed() -> dict[str, dict[str, int]]:
    return json.loads(ALLOWED.read_text())


@pytest.mark.parametrize("name", RULES)
def test_the_tree_keeps(name):
    rule, expected = RULES[name], allowed().get(name, {})
    hits = list(rule.find())
    counts = Counter(hit.path for hit in hits)
    lines = []
    for path in sorted(counts.keys() | expected.keys()):
        found, limit = counts[path], expected.get(path, 0)
        if found > limit:
            lines.append(f"{path}: {found}, allowed {limit}; {rule.do}")
            lines += [f"    {hit.path}:{hit.line}: {hit.found}" for hit in hits if hit.path == path]
        elif found < limit:
            lines.append(f"{path}: {found}, allowed {limit}; lower the count: python {HERE} --write")
    assert not lines, f"{rule.text}\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("restore: keep strides", True),
        ("save, s3: retry once", True),
        ("Keep strides", False),
        ("restore: keep strides.", False),
        ("docs: say it", False),
        ("restore: " + "keep " * 20 + "it", False),
    ],
)
def test_subjects(text, expected):
    assert prose.is_subject(text) is expected


def test_ci_runs_all_tests():
    """An emptied file would pass."""
    assert (prose.ROOT / ".ci" / "run").read_text().splitlines()[-1] == "tools/test"


def test_the_rules_find_what_breaks_them(tmp_path, monkeypatch, capsys):
    """In a tree that breaks every rule, each rule finds exactly the lines that break it."""
    folder = tmp_path / "snapstore" / "deep"
    folder.mkdir(parents=True)
    for name in ("docs", "tools/benchmarks", "tests/kit"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text('"""One. Two. Three."""\n')
    (tmp_path / "tools" / "setup.sh").write_text("")
    (tmp_path / "README.md").write_text("# Title\n\n" + "word " * 30 + "\n\n```\n" + "code " * 40 + "\n```\n")
    (folder / "__init__.py").write_text('"""One. Two."""\n')
    modules = [f"m{number:02}.py" for number in range(14)]
    root_map = "".join(f"{name}  words\n" for name in [*modules, "deep/"])
    (tmp_path / "snapstore" / "__init__.py").write_text(f'"""One. Two. Three!\n\n{root_map}"""\n' + "x = 1\n" * 401)
    for name in modules:
        (tmp_path / "snapstore" / name).write_text("")
    (folder / "bad.py").write_text(
        '"""What this does."""\n# It is\n# made anew. Of all\nx = 1  # fmt: skip\n'
        "def f(a, b, c, d, e, store, index, *g):\n" + "    pass\n" * 60 + "class Bad:\n    pass\n"
    )
    (tmp_path / "snapstore" / "m00.py").write_text("class _Bad:\n    pass\n")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    for cached in (python, source):
        cached.cache_clear()
    try:
        found = {name: [(hit.path, hit.line) for hit in rule.find()] for name, rule in RULES.items()}
        prose.main()
    finally:
        for cached in (python, source):
            cached.cache_clear()
    bad = "snapstore/deep/bad.py"
    assert found == {
        "file length": [("snapstore/__init__.py", 1)],
        "function length": [(bad, 5)], "parameters": [(bad, 5)], "one argument": [(bad, 5)],
        "class names": [("snapstore/m00.py", 1)], "root": [("snapstore", 0)],
        "folders": [("snapstore/deep/__init__.py", 1)],
        "maps": [("snapstore/deep/__init__.py", 1)], "formatter": [(bad, 4)], "docs lines": [("README.md", 3)],
    }  # fmt: skip
    warnings = [line.partition(": warning: ")[0] for line in capsys.readouterr().out.splitlines()]
    assert warnings == [f"{bad}:3", f"{bad}:1", f"{bad}:3"]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"expected: python {HERE} --write")
    counts = {name: Counter(hit.path for hit in rule.find()) for name, rule in RULES.items()}
    ALLOWED.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    print({name: sum(found.values()) for name, found in counts.items()})
