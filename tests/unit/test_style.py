"""The tree follows the rules of the project: plain words, small files and functions, one argument for each verb.

Each rule counts its breaches in each file. `style_allowed.json` lists the allowed counts: the breaches from before the
rule was written. A count must be equal to the allowed one, so a breach that is removed cannot come back.
`python tests/unit/test_style.py --write` writes the counts of this tree.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from house import code_lines  # noqa: E402

ALLOWED = Path(__file__).with_name("style_allowed.json")
HERE = "tests/unit/test_style.py"

#: If there is no tag, the rule of commit subjects applies to the commits after this one.
SUBJECTS_SINCE = "e1d70ef0deba03702643e5bde178d08fc1d9c1cf"
SUBJECT_CHARACTERS = 72
FILE_LINES, FUNCTION_LINES, PARAMETERS, ROOT_MODULES, DOC_CHARACTERS, SENTENCES = 400, 60, 7, 14, 110, 3
#: Pages that quote old texts.
HISTORY = {"docs/changelog.md"}
WORDS = re.compile(
    r"\b(anew|upon|heed(?:s|ed|ing)?|whoever|somebody|those that|mend(?:s|ed|ing)?|at hand|twins|unpaid|made up)\b",
    re.IGNORECASE,
)
#: At the start of a text, at the start of a line of a list or table, or after a sentence.
OPENINGS = re.compile(r"(?:\A\s*|[.!?:;]\s+|\n\s*\n\s*|\n\s*[-*|]\s+)(What|Of)\s(?P<rest>[^.!?]*(?:\Z|[.!?]))")
SUSPECT = re.compile(rf"{WORDS.pattern}|\b(?-i:What|Of)\s", re.IGNORECASE)


class Hit(NamedTuple):
    """A place that breaks a rule."""

    path: str
    line: int
    found: str


class Text(NamedTuple):
    """A piece of a file that a person reads, and the line at which it begins."""

    line: int
    kind: str  # docstring, comment, string or prose
    text: str

    def line_at(self, position: int) -> int:
        return self.line + self.text.count("\n", 0, position)


class Source:
    """A Python file, parsed once for all rules."""

    def __init__(self, path: str) -> None:
        self.path, self.source = path, (ROOT / path).read_text()
        #: Whether the file has a word that may break a rule. If not, the rules of words need not parse it.
        self.suspect = path != HERE and bool(SUSPECT.search(self.source.replace("_", " ")))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @cached_property
    def texts(self) -> list[Text]:
        """Return the docstrings, the comments (adjacent lines as one) and the other strings."""
        docstrings = set()
        for node in self.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0] if node.body else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    docstrings.add(id(first.value))
        found = [
            Text(node.lineno, "docstring" if id(node) in docstrings else "string", node.value)
            for node in self.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        return found + list(self._comments())

    def _comments(self) -> Iterator[Text]:
        begin, lines, previous = 0, [], (-2, -1)
        for number, column, words in self._each_comment():
            if (number, column) == (previous[0] + 1, previous[1]):
                lines.append(words)
            else:
                if lines:
                    yield Text(begin, "comment", "\n".join(lines))
                begin, lines = number, [words]
            previous = number, column
        if lines:
            yield Text(begin, "comment", "\n".join(lines))

    def _each_comment(self) -> Iterator[tuple[int, int, str]]:
        """Yield (line, column, words) of each comment: a `#` outside the strings. A tokenizer would take seconds."""
        inside: dict[int, list[tuple[int, int]]] = {}
        for node in self.nodes:
            if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
            ):
                for line in range(node.lineno, (node.end_lineno or 0) + 1):
                    begin = node.col_offset if line == node.lineno else 0
                    end = node.end_col_offset if line == node.end_lineno else None
                    inside.setdefault(line, []).append((begin, 1 << 20 if end is None else end))
        for number, text in enumerate(self.source.encode().split(b"\n"), 1):
            at = text.find(b"#")
            while at >= 0 and any(begin <= at < end for begin, end in inside.get(number, ())):
                at = text.find(b"#", at + 1)
            if at >= 0:
                yield number, at, text[at:].decode().lstrip("#: ")


# --- the files of the tree -------------------------------------------------------------------------------------------


def below(folder: str, pattern: str) -> list[str]:
    """Return the sorted paths of a folder's files, without caches and hidden folders."""
    found = (path.relative_to(ROOT) for path in (ROOT / folder).rglob(pattern) if path.is_file())
    return sorted(str(path) for path in found if not any(part.startswith((".", "__pycache__")) for part in path.parts))


@cache
def python(*folders: str) -> list[Source]:
    return [source(path) for folder in folders for path in below(folder, "*.py")]


@cache
def source(path: str) -> Source:
    return Source(path)


def pages() -> list[str]:
    return [path for path in ("README.md", *below("docs", "*.md")) if path not in HISTORY]


def scripts() -> list[str]:
    """Return the paths of the tools that are not Python."""
    shell = (path for path in below("tools", "*") if (ROOT / path).read_bytes()[:2] == b"#!")
    return [path for path in (*shell, "tools/setup.sh") if not path.endswith(".py")]


def prose(path: str) -> str:
    """Return a page without its code and its generated tables: their lines are empty."""
    text = (ROOT / path).read_text()
    for part in (r"^```.*?^```", r"^<!-- (\w+): written by .*?^<!-- end of \1 -->"):
        text = re.sub(part, lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    return text


# --- rules: each yields its breaches ---------------------------------------------------------------------------------


def forbidden_words() -> Iterator[Hit]:
    texts = [(s.path, text) for s in python("snapstore", "tools", "tests") if s.suspect for text in s.texts]
    texts += [(path, Text(1, "prose", (ROOT / path).read_text())) for path in (*pages(), *scripts())]
    texts += [
        (s.path, Text(f.lineno, "name", f.name.replace("_", " ")))
        for s in python("tests")
        if s.suspect
        for f in s.functions
    ]
    for path, text in texts:
        for match in WORDS.finditer(text.text):
            yield Hit(path, text.line_at(match.start()), match[0])


def openings() -> Iterator[Hit]:
    texts = [
        (s.path, text)
        for s in python("snapstore", "tools", "tests")
        if s.suspect
        for text in s.texts
        if text.kind != "string"
    ]
    texts += [(path, Text(1, "prose", prose(path))) for path in pages()]
    for path, text in texts:
        for match in OPENINGS.finditer(text.text):
            if not match["rest"].endswith("?"):
                yield Hit(path, text.line_at(match.start(1)), f"{match[1]} {match['rest'][:40].split(chr(10))[0]}...")


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
    modules = sorted((ROOT / "snapstore").glob("*.py"))
    for path in modules[ROOT_MODULES:]:
        yield Hit("snapstore", 0, f"{len(modules)} modules; {path.name} is one too many")


def folders_without_words() -> Iterator[Hit]:
    folders = {str(Path(path).parent) for path in below("snapstore", "*.py")} | {"tools/benchmarks", "tests/kit"}
    for folder in sorted(folders):
        path = f"{folder}/__init__.py"
        words = (ast.get_docstring(source(path).tree) or "") if (ROOT / path).exists() else ""
        if (count := len(re.findall(r"[.!?](?=\s|\Z)", words))) < SENTENCES:
            yield Hit(path, 1, f"{count} sentences")


def unmapped_modules() -> Iterator[Hit]:
    """Yield the modules that the docstring of their folder does not name in a line of its own, and the other way."""
    for folder in sorted({str(Path(path).parent) for path in below("snapstore", "*.py")} - {"snapstore"}):
        path = f"{folder}/__init__.py"
        words = (ast.get_docstring(source(path).tree) or "") if (ROOT / path).exists() else ""
        named = re.findall(r"^(\w+(?:\.py|/))  +\S", words, re.MULTILINE)
        there = [p.name for p in (ROOT / folder).glob("*.py") if p.name != "__init__.py"]
        there += [f"{p.name}/" for p in (ROOT / folder).iterdir() if (p / "__init__.py").exists()]
        for name in sorted({*named} ^ {*there}) + [name for name, count in Counter(named).items() if count > 1]:
            yield Hit(path, 1, name)


def unformatted_code() -> Iterator[Hit]:
    for s in python("snapstore"):
        for number, line in enumerate(s.source.splitlines(), 1):
            if re.search(r"#\s*fmt:\s*(skip|off)", line):
                yield Hit(s.path, number, line.strip()[-40:])


def long_lines_of_docs() -> Iterator[Hit]:
    for path in ("README.md", *below("docs", "*.md")):
        for number, line in enumerate(prose(path).splitlines(), 1):
            if len(line) > DOC_CHARACTERS and not line.lstrip().startswith(("|", "<", "[", "![")):
                yield Hit(path, number, f"{len(line)} characters")


class Rule(NamedTuple):
    """A rule: its text, the advice for a breach, and the search for breaches."""

    text: str
    do: str
    find: Callable[[], Iterator[Hit]]


RULES = {
    "words": Rule(
        "Plain words: no anew, upon, heed, whoever, somebody, those that, mend, at hand, twins, unpaid, made up.",
        "Write: again, on, follow, anyone who, another process, what, repair, cached, duplicates, reconstructed.",
        forbidden_words,
    ),
    "openings": Rule(
        "No sentence begins with 'What ...' or 'Of ...'.",
        "Begin with the subject, or a docstring with a verb: Return, Read, Check.",
        openings,
    ),
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


def is_subject(text: str) -> bool:
    """Return whether a text may be the subject of a commit."""
    return (
        bool(re.fullmatch(r"[a-z][\w ,./-]*: (?!(?i:say|let|take)\b)\S.*[^.]", text))
        and len(text) <= SUBJECT_CHARACTERS
    )


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
    assert is_subject(text) is expected


def test_subjects_of_commits_are_short():
    subjects = _subjects()
    if subjects is None:
        pytest.skip("no git, or no history since the commit where this rule begins")
    wrong = [line for line in subjects if not is_subject(line.partition(" ")[2])]
    text = (
        "The subject of a commit has a prefix and an imperative ('restore: keep strides'), at most "
        f"{SUBJECT_CHARACTERS} characters and no period at its end."
    )
    assert not wrong, f"{text} Reword (git commit --amend, git rebase -i):\n" + "\n".join(wrong)


def _subjects() -> list[str] | None:
    """Return hash and subject of each commit since the newest tag, or since the rule began."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    since = git("describe", "--tags", "--abbrev=0") or git("rev-parse", "--verify", f"{SUBJECTS_SINCE}^{{commit}}")
    listed = git("log", "--no-merges", "--format=%h %s", f"{since}..HEAD") if since else None
    return None if listed is None else listed.splitlines()


def test_the_rules_find_what_breaks_them(tmp_path, monkeypatch):
    """In a tree that breaks every rule, each rule finds exactly the lines that break it."""
    folder = tmp_path / "snapstore" / "deep"
    folder.mkdir(parents=True)
    for name in ("docs", "tools/benchmarks", "tests/kit"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text('"""One. Two. Three."""\n')
    (tmp_path / "tools" / "setup.sh").write_text("")
    (tmp_path / "README.md").write_text("# Title\n\n" + "word " * 30 + "\n\n```\n" + "code " * 40 + "\n```\n")
    (folder / "__init__.py").write_text('"""One. Two."""\n')
    (tmp_path / "snapstore" / "__init__.py").write_text('"""One. Two. Three!"""\n' + "x = 1\n" * 401)
    for number in range(14):
        (tmp_path / "snapstore" / f"m{number:02}.py").write_text("")
    (folder / "bad.py").write_text(
        '"""What this does."""\n# It is\n# made anew. Of all\nx = 1  # fmt: skip\n'
        "def f(a, b, c, d, e, store, index, *g):\n" + "    pass\n" * 60 + "class Bad:\n    pass\n"
    )
    (tmp_path / "snapstore" / "m00.py").write_text("class _Bad:\n    pass\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for cached in (python, source):
        cached.cache_clear()
    try:
        found = {name: [(hit.path, hit.line) for hit in rule.find()] for name, rule in RULES.items()}
    finally:
        for cached in (python, source):
            cached.cache_clear()
    bad = "snapstore/deep/bad.py"
    assert found == {
        "words": [(bad, 3)], "openings": [(bad, 1), (bad, 3)], "file length": [("snapstore/__init__.py", 1)],
        "function length": [(bad, 5)], "parameters": [(bad, 5)], "one argument": [(bad, 5)],
        "class names": [("snapstore/m00.py", 1)], "root": [("snapstore", 0)],
        "folders": [("snapstore/deep/__init__.py", 1)],
        "maps": [("snapstore/deep/__init__.py", 1)], "formatter": [(bad, 4)], "docs lines": [("README.md", 3)],
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"expected: python {HERE} --write")
    counts = {name: Counter(hit.path for hit in rule.find()) for name, rule in RULES.items()}
    ALLOWED.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    print({name: sum(found.values()) for name, found in counts.items()})
