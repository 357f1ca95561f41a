"""The C sources, compiled with sanitizers, survive a fuzzer: no access outside of a buffer, nothing undefined."""

import shutil
import subprocess

import pytest

from kit.processes import ROOT
from kit.samples import SEED, THOROUGH

SOURCES = sorted((ROOT / "snapstore" / "engine" / "native").glob("*.c"))
OF_PYTHON = ("arguments.c", "jobs.c", "module.c")


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    """Returns the program of kit/native_fuzz.c, with AddressSanitizer and UndefinedBehaviorSanitizer."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc")
    program = tmp_path_factory.mktemp("fuzz") / "native_fuzz"
    done = subprocess.run(
        [
            gcc, "-g", "-O1", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all", f"-I{SOURCES[0].parent}", str(ROOT / "tests" / "kit" / "native_fuzz.c"),
            *(str(source) for source in SOURCES if source.name not in OF_PYTHON), "-o", str(program),
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    if "cannot find" in done.stderr:
        pytest.skip("no sanitizers")
    assert done.returncode == 0, done.stderr
    return program


def test_damage_reaches_no_memory_outside_of_buffers(fuzzer):
    rounds = 20_000 if THOROUGH else 1500
    done = subprocess.run([fuzzer, str(SEED), str(rounds)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
