"""The package contains nothing that could run stored bytes as code."""

import ast
from pathlib import Path

import pytest

import snapstore

PACKAGE = Path(snapstore.__file__).parent
#: Calls that make code or objects from bytes. torch.load is allowed only with weights_only.
FORBIDDEN = {"eval", "exec", "compile", "__import__", "loads", "load_module", "Unpickler", "unsafe_load", "run_path"}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "code", "runpy"}
#: pickle: only its error, which torch.load raises if it refuses a file; and an unpickler that makes plain records for
#: names of DCP and refuses all others (test_import_hostile.py). marshal: only `dumps`, to compare values.
KNOWN = {
    ("convert/files.py", "import pickle"), ("convert/dcp_folder.py", "import pickle"),
    ("engine/cuda/kernels.py", "compile"),  # a kernel of ours
    ("state/walk/learner.py", "import marshal"),
}  # fmt: skip


def found_in(file):
    name = file.relative_to(PACKAGE).as_posix()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in FORBIDDEN and ast.unparse(node.func) not in ("re.compile", "json.loads"):
                yield name, function
            safe = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in node.keywords)
            if ast.unparse(node.func) in ("torch.load", "numpy.load", "np.load") and not safe:
                yield name, ast.unparse(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for module in names:
                if module.partition(".")[0] in MODULES:
                    yield name, ast.unparse(node)


def test_nothing_in_the_package_runs_stored_bytes():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    assert {found for file in files for found in found_in(file)} == KNOWN


@pytest.mark.parametrize(
    "bad", ["import pickle\npickle.loads(x)", "torch.load(p)", "eval(s)", "from marshal import loads"]
)
def test_the_search_finds_it(tmp_path, monkeypatch, bad):
    (tmp_path / "a.py").write_text(bad)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert list(found_in(tmp_path / "a.py"))
