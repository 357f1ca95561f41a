"""Warn of words, openings of sentences and subjects of commits that docs/contributing.md advises against.

    python tools/prose.py

Prints one line for each finding, and ends with 0: no build fails for a word. `tools/lint` and `tools/test` print the
same. `tests/unit/test_style.py` reads the tree with the classes of this module.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: If there is no tag, the rule of commit subjects applies to the commits after this one.
SUBJECTS_SINCE = "e1d70ef0deba03702643e5bde178d08fc1d9c1cf"
SUBJECT_CHARACTERS = 72
#: Files that quote the words.
QUOTING = {"tools/prose.py", "tests/unit/test_style.py"}
#: Words that a repository stores.
STORED = {("snapstore/format/records.py", "made up")}
#: Pages that quote old texts.
HISTORY = {"docs/changelog.md"}
WORDS = re.compile(
    r"\b(anew|upon|heed(?:s|ed|ing)?|whoever|somebody|those that|mend(?:s|ed|ing)?|at hand|twins|unpaid|made up)\b",
    re.IGNORECASE,
)
#: At the start of a text, at the start of a line of a list or table, or after a sentence.
OPENINGS = re.compile(r"(?:\A\s*|[.!?:;]\s+|\n\s*\n\s*|\n\s*[-*|]\s+)(What|Of)\s(?P<rest>[^.!?]*(?:\Z|[.!?]))")
SUSPECT = re.compile(rf"{WORDS.pattern}|\b(?-i:What|Of)\s", re.IGNORECASE)
ADVICE = {
    "word": "write: again, on, follow, anyone who, another process, what, repair, cached, duplicates, reconstructed",
    "opening": "begin with the subject, or a docstring with a verb: Return, Read, Check",
    "subject": f"a prefix and an imperative ('restore: keep strides'), at most {SUBJECT_CHARACTERS} characters",
}


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
        """Return the line of a position in the text."""
        return self.line + self.text.count("\n", 0, position)


class Source:
    """A Python file, parsed once for all rules."""

    def __init__(self, path: str) -> None:
        self.path, self.source = path, (ROOT / path).read_text()
        #: Whether the file has a word that may break a rule. If not, the rules of words need not parse it.
        self.suspect = path not in QUOTING and bool(SUSPECT.search(self.source.replace("_", " ")))

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree."""
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Return every node of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Return the functions and methods."""
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
            if (path, match[0]) not in STORED:
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


def is_subject(text: str) -> bool:
    """Return whether a text may be the subject of a commit."""
    return (
        bool(re.fullmatch(r"[a-z][\w ,./-]*: (?!(?i:say|let|take)\b)\S.*[^.]", text))
        and len(text) <= SUBJECT_CHARACTERS
    )


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


def main() -> None:
    """Print the warnings."""
    found = [(hit, "word") for hit in forbidden_words()] + [(hit, "opening") for hit in openings()]
    for hit, kind in found:
        print(f"{hit.path}:{hit.line}: warning: {hit.found}; {ADVICE[kind]}")
    for line in _subjects() or []:
        if not is_subject(line.partition(" ")[2]):
            print(f"commit {line}: warning: {ADVICE['subject']}")


if __name__ == "__main__":
    main()
