"""Every `pip install` line of the pages and the errors works as printed, in bash and zsh; one table has all extras."""

import ast
import importlib.metadata
import itertools
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from kit.processes import run_python
from snapstore.engine.cuda import CUDA_MAJORS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TABLE = ROOT / "docs" / "guides" / "install.md"
#: (package, extra) of other projects that errors name -> the versions that have the extra.
FOREIGN = {(f"cupy-cuda{major}x", "ctk"): ">=14" for major in CUDA_MAJORS}
REQUIREMENT = re.compile(r"(?P<name>\.|[\w-]+)(?:\[(?P<extras>[\w,-]+)\])?(?P<version>[<>=!~][\w.,<>=]*)?")


def package(requirement):
    return REQUIREMENT.match(requirement)["name"]


PACKAGES = {package(line) for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines}


def commands(text):
    """Yield the arguments of each `pip install` in a text, up to the end of the command."""
    for match in re.finditer(r"""pip install ((?:'[^'\n]*'|"[^"\n]*"|[^'"`\n;)])*)""", text):
        yield match[1].strip()


def texts_of_code():
    """Yield (path, text) of every string in the package; a formatted string once for each major version of CUDA."""
    for path in sorted((ROOT / "snapstore").rglob("*.py")):
        code = path.read_text()
        for node in ast.walk(ast.parse(code)) if "pip " in code else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.relative_to(ROOT), node.value
            elif isinstance(node, ast.JoinedStr):
                for major in CUDA_MAJORS:
                    parts = (part.value if isinstance(part, ast.Constant) else major for part in node.values)
                    yield path.relative_to(ROOT), "".join(map(str, parts))


def lines_of_code():
    seen = {(str(path), text) for path, text in texts_of_code() if "pip install" in text}
    # The constants in a formatted string are found too, and can end in the middle of a command.
    return sorted({(path, line) for path, text in seen for line in commands(text) if line.count("'") % 2 == 0 and line})


def lines_of_pages():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [(str(page.relative_to(ROOT)), line) for page in pages for line in commands(page.read_text())]


def problems(line, *, page):
    """Yield each reason why a command does not work as printed."""
    if "#" in line:
        yield "zsh takes a comment for arguments"
    for raw in shlex.split(line, posix=False):
        if re.search(r"[][<>*?~^]", raw) and raw[0] not in "'\"":
            yield f"{raw}: a shell reads its brackets or signs: quote it"
    for argument in shlex.split(line, comments=True):
        match = REQUIREMENT.fullmatch(argument)
        if match is None:
            yield f"{argument}: no requirement"
            continue
        name, extras = match["name"], (match["extras"] or "").split(",") if match["extras"] else []
        if name == "." and not page:
            yield "an error is not read in the checkout"
        if name in (".", "snapstore"):
            yield from (f"{extra}: no such extra" for extra in extras if extra not in EXTRAS)
            if name == "snapstore" and not extras:
                yield "snapstore is not on PyPI"
        elif name not in PACKAGES:
            yield f"{name}: not a package that snapstore needs"
        else:
            yield from (f"{name}[{e}]: needs a version" for e in extras if FOREIGN.get((name, e)) != match["version"])


@pytest.mark.parametrize(("place", "line"), lines_of_pages())
def test_a_line_of_a_page_works(place, line):
    assert list(problems(line, page=True)) == []


@pytest.mark.parametrize(("place", "line"), lines_of_code())
def test_a_line_of_an_error_works(place, line):
    assert list(problems(line, page=False)) == []


def test_all_lines_are_found():
    assert {line for _, line in lines_of_code()} == {
        '"snapstore[safetensors]"', '"snapstore[torchtitan]"', '"snapstore[transformers]"', '"snapstore[accelerate]"',
        '"snapstore[tensorboard]"', '"snapstore[wandb]"', '"snapstore[mlflow]"', '"snapstore[prometheus]"',
        "'snapstore[s3]'", "'snapstore[lightning]'", "pandas",
        '"snapstore[deepspeed]"', '"snapstore[megatron]"', '"snapstore[orbax]"', '"snapstore[report]"',
        "'snapstore[cuda12]'", "'snapstore[cuda13]'", "'cupy-cuda12x[ctk]>=14'", "'cupy-cuda13x[ctk]>=14'",
    }  # fmt: skip
    assert {line for _, line in lines_of_pages()} >= {".", "'.[s3]'", "'.[cuda13]'", "'.[cuda13,s3,safetensors]'"}
    assert len(lines_of_pages()) == sum(
        page.read_text().count("pip install ") for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    )


@pytest.mark.parametrize(
    ("line", "page"),
    [(".[s3]", True), (".  # all", True), ("'.[gpu]'", True), ("'snapstore[s4]'", False), ("snapstore", True),
     ("boto4", False), ("'.[s3]'", False), ("'cupy-cuda13x[ctk]'", False), ("'cupy-cuda13x[ctk]>=13'", False)],
)  # fmt: skip
def test_lines_that_do_not_work_are_found(line, page):
    assert list(problems(line, page=page))


def test_the_table_has_all_extras_and_their_packages():
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", TABLE.read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(EXTRAS)
    for name, packages in rows:
        if name != "dev":
            assert re.findall(r"`([\w-]+)`", packages) == [package(line) for line in EXTRAS[name]]
    assert {name for name in EXTRAS if name.startswith("cuda")} == {f"cuda{major}" for major in CUDA_MAJORS}


def test_pip_finds_the_extras_of_an_installed_snapstore():
    """pip accepts `snapstore[extra]`, as errors print it, without an index: snapstore is not on PyPI."""
    try:
        known = importlib.metadata.distribution("snapstore").metadata.get_all("Provides-Extra")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("snapstore is not installed here")
    assert sorted(known) == sorted(EXTRAS)
    names = [f"snapstore[{extra}]" for extra in EXTRAS]
    done = run_python("-m", "pip", "--isolated", "install", "--no-index", "--no-deps", "--dry-run", *names)
    assert done.returncode == 0, done.stderr
    assert "Requirement already satisfied: snapstore[" in done.stdout
    assert "does not provide" not in done.stderr


def test_the_readme_needs_no_more_than_it_says():
    """A fresh Debian refuses pip outside a virtual environment, so README and the guide make one first."""
    for page in (ROOT / "README.md", TABLE):
        text = page.read_text()
        assert text.index("python3 -m venv") < text.index("bin/activate") < text.index("pip install")
    assert re.search(r"Python 3\.11", TABLE.read_text())
    assert PROJECT["requires-python"] == ">=3.11"
    assert "install.md" in (ROOT / "README.md").read_text()
    assert list(itertools.islice(commands("a\n$ pip install '.[s3]'\n(`pip install .`)"), 3)) == ["'.[s3]'", "."]
