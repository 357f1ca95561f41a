"""Python programs that tests keep as text use only names and arguments of snapstore that exist.

Some of these programs run only on a machine with a GPU.
"""

import ast
import importlib.util
import inspect
from functools import cache

import snapstore
from kit import processes
from snapstore import Repository, SnapshotManager

TESTS = processes.ROOT / "tests"


@cache
def scripts():
    """Return (file and line, syntax tree) of each text in tests/ that is a program of several lines with snapstore."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            is_script = isinstance(text, str) and "snapstore" in text and "import " in text and "\n" in text
            if is_script and "# error:" not in text:  # such a text is wrong on purpose
                try:
                    found.append((f"{path.relative_to(TESTS)}:{node.lineno}", ast.parse(text)))
                except SyntaxError:
                    continue  # prose, or a template
    return found


@cache
def keywords(name):
    """Return the arguments that the public methods of this name take; None if there is no such method."""
    methods = [getattr(of, name) for of in (Repository, SnapshotManager) if callable(getattr(of, name, None))]
    found = [one for method in methods for one in inspect.signature(method).parameters.values()]
    texts = [str(one.annotation) for one in found]
    options = [getattr(snapstore, text[7:-1]) for text in texts if text.startswith("Unpack[")]
    return {one.name for one in found}.union(*(option.__annotations__ for option in options)) if methods else None


def test_the_scripts_are_found():
    files = {where.split(":")[0] for where, _ in scripts()}
    assert {"gpu/test_gpu_directions.py", "gpu/test_gpu_devices.py", "gpu/test_gpu_processes.py"} <= files


def test_scripts_import_names_that_exist():
    for where, tree in scripts():
        for node in ast.walk(tree):
            folder = (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else ""
            if folder.startswith("test_"):
                assert "sys.path" in ast.unparse(tree), f"{where}: a new process finds {folder} only by sys.path"
            if folder in ("snapstore", "kit"):
                check_import(where, node)


def check_import(where, node):
    try:
        module = importlib.import_module(node.module)
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        return
    for name in {alias.name for alias in node.names} - {"*"}:
        if not hasattr(module, name):  # such a name must be a module of the folder
            assert importlib.util.find_spec(f"{node.module}.{name}"), f"{where}: {node.module} has no {name}"


def test_scripts_pass_arguments_that_exist():
    for where, tree in scripts():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                known = keywords(node.func.attr)
                taken = {argument.arg for argument in node.keywords if argument.arg}
                assert known is None or taken <= known, f"{where}: {node.func.attr}, line {node.lineno}"
