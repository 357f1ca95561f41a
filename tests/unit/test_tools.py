"""Each command under tools/ prints its help and sets up nothing for it: no environment, no package, no file."""

import shutil
import subprocess

import pytest

from kit.processes import ROOT


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Copy only the tools to a folder where nothing is set up."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("argument", ["--help", "-h"])
@pytest.mark.parametrize("tool", ["bench", "demo", "flicker", "lint", "test", "test-gpu", "torture"])
def test_help_sets_up_nothing(checkout, tool, argument):
    before = sorted(checkout.rglob("*"))
    done = subprocess.run([checkout / "tools" / tool, argument], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: tools/{tool}")
    assert sorted(checkout.rglob("*")) == before


def test_bench_refuses_a_name_that_is_no_benchmark(checkout):
    done = subprocess.run([checkout / "tools" / "bench", "speed"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "expected cpu, s3, scale, compact, gpu, ranks, bytes or import, got 'speed'" in done.stderr
    assert not (checkout / ".venv").exists()
