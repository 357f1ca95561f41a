"""The shell as people use it: verbs as processes of their own, in pipes, on terminals and with their shells."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from kit.processes import ROOT, environment
from snapstore import Repository, SaveOptions


def state(step):
    small = {f"w{i}": torch.full((64,), float(i + step)) for i in range(400)}
    return {"model": small | {"large": torch.arange(100_000) * (step + 1)}, "epoch": step}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a repository with two runs: exp has the steps 0 to 3, a tag and two metrics, and fork has two steps."""
    url = tmp_path_factory.mktemp("shell") / "repo"
    losses = {0: 4.0, 100: float("nan"), 200: 1.0, 300: 2.0}
    with Repository.create(url, options=SaveOptions(threads=1)) as repository:
        for step, loss in losses.items():
            repository.save(state(step), run="exp", step=step, metrics={"loss": loss, "lr": step / 1000})
        repository.save(state(7), run="fork", step=7, parent="exp@200", metrics={"loss": 1.5, "acc": 0.5})
        repository.save(state(8), run="fork", step=8, metrics={"loss": 0.5, "acc": 0.25})
        repository.tag("exp@200", "good")
    return url


def bash(line, url, **more):
    """Run a line of bash in which `snapstore` is this checkout's shell; return the finished process."""
    function = f'snapstore() {{ "{sys.executable}" -m snapstore "$@"; }}\n'
    env = environment(SNAPSTORE_REPO=str(url), **more)
    return subprocess.run(["bash", "-c", function + line], env=env, capture_output=True, text=True, check=False)


# --- pipes


@pytest.mark.parametrize("verb", ["show exp@200", "show exp@200 --json", "log", "--help", "log --help", "check"])
def test_a_reader_that_stops_early_is_no_error(place, verb):
    """The reader has ended before the verb prints, so each print finds a closed pipe."""
    done = bash(f'{{ sleep 0.1; snapstore {verb}; echo "code $?" >&2; }} | true', place)
    assert done.stderr == "code 0\n"
    done = bash(f"set -o pipefail; snapstore {verb} | head -1", place)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


def test_a_verb_keeps_its_exit_code_when_its_reader_stops(place, tmp_path):
    assert bash(f"snapstore copy --to {tmp_path}/broken", place).returncode == 0
    for pack in (tmp_path / "broken" / "packs").glob("*/*"):
        pack.unlink()
    line = 'snapstore check | true; echo "${PIPESTATUS[0]}"'
    assert bash(line, tmp_path / "broken").stdout == "20\n"


def test_copy_without_names_copies_all(place, tmp_path):
    done = bash(f"snapstore copy --to {tmp_path}/backup && snapstore log --json --repo {tmp_path}/backup", place)
    said, listed = done.stdout.splitlines()
    assert said.startswith("6 snapshots copied to ")
    assert [f"{s['run']}@{s['step']}" for s in json.loads(listed)["snapshots"]] == [
        "exp@0", "exp@100", "exp@200", "exp@300", "fork@7", "fork@8",
    ]  # fmt: skip
    both = bash(f"snapstore copy exp@0 --all --to {tmp_path}/other", place)
    assert both.returncode == 2
    assert "at most one of the three" in both.stderr
    assert not os.path.exists(f"{tmp_path}/other")  # noqa: PTH110


# --- runs and metrics


def test_a_run_is_enough_for_log_and_show(place):
    by_option, by_name = (bash(f"snapstore log {run} --json", place).stdout for run in ("--run exp", "exp"))
    assert by_name == by_option
    assert [s["step"] for s in json.loads(by_name)["snapshots"]] == [0, 100, 200, 300]
    shown = bash("snapstore show exp --json", place).stdout
    assert json.loads(shown)["snapshot"]["step"] == 300
    both = bash("snapstore log exp --run exp", place)
    assert (both.returncode, both.stderr) == (2, "snapstore: error: name the run once, as RUN or with --run\n")
    missing = bash("snapstore log none", place)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "run 'none': has no snapshots in this repository; runs: exp, fork" in missing.stderr


def rows(text):
    """Return the snapshots of a log, and the columns after its fifth."""
    return [(line.split()[0], line.split()[5:]) for line in text.splitlines()[1:]]


def test_log_sorts_by_a_metric_across_runs(place):
    done = bash("snapstore log --sort loss --metrics loss,lr", place)
    assert done.stdout.splitlines()[0].split() == ["snapshot", "id", "created", "stored", "loss", "lr", "notes"]
    assert rows(done.stdout) == [
        ("fork@8", ["0.5", "-"]),
        ("exp@200", ["1", "0.2", "@good"]),
        ("fork@7", ["1.5", "-"]),
        ("exp@300", ["2", "0.3"]),
        ("exp@0", ["4", "0"]),
        ("exp@100", ["nan", "0.1"]),  # NaN is no value
    ]
    # the best of each run: the runs by their loss
    assert rows(bash("snapstore log --sort loss -n 1", place).stdout) == [
        ("fork@8", ["0.5"]),
        ("exp@200", ["1", "@good"]),
    ]
    reverse = bash("snapstore log exp --sort loss --reverse --json", place)
    assert [s["step"] for s in json.loads(reverse.stdout)["snapshots"]] == [0, 300, 200, 100]
    by_acc = bash("snapstore log --sort acc --reverse --metrics acc", place)
    assert [name for name, _ in rows(by_acc.stdout)[:2]] == ["fork@7", "fork@8"]
    for wrong in ("--sort los", "--metrics loss,los"):
        done = bash(f"snapstore log {wrong}", place)
        assert (done.returncode, done.stdout) == (1, "")
        assert "metric 'los': no listed snapshot has it; metrics: acc, loss, lr" in done.stderr
    assert bash("snapstore log --reverse", place).returncode == 2


def test_the_best_by_a_metric_is_a_name(place, tmp_path):
    names = {"exp@best:loss": 200, "exp@best:lr:max": 300, "exp@best:loss:min": 200, "exp@best:lr": 0}
    for name, step in names.items():
        assert json.loads(bash(f"snapstore show {name} --json", place).stdout)["snapshot"]["step"] == step, name
    assert bash(f"snapstore restore exp@best:loss -o {tmp_path}/best.pt", place).returncode == 0
    assert torch.load(tmp_path / "best.pt")["epoch"] == 200
    with Repository.open(place) as repository:
        assert repository.restore("fork@best:acc:max")["epoch"] == 7
    done = bash("snapstore show exp@best:acc", place)
    assert done.returncode == 1
    assert "no snapshot of run 'exp' has the metric 'acc' (NaN is no value); metrics: loss, lr" in done.stderr
    for wrong in ("exp@best:", "exp@best::max"):
        assert bash(f"snapstore show {wrong}", place).returncode == 1


# --- the guide


def commands_of(page):
    """Yield each command of the console blocks of a page, with the output that follows it."""
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        yield from re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)


def masked(text):
    """Return the words of an output, without what differs in each run: ids, dates and stored sizes."""
    text = re.sub(r"\b[0-9a-f]{8,32}\b", "ID", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "DATE", text)
    return re.sub(r"\d+(\.\d+)?(k|M)?B\b", "SIZE", text).split()


def test_the_commands_of_the_guide_print_what_it_shows(place, tmp_path):
    shutil.copytree(place, tmp_path / "repo")
    found = list(commands_of(ROOT / "docs" / "guides" / "shell.md"))
    assert len(found) >= 5
    for command, output in found:
        done = bash(f"cd {tmp_path} && {command}", tmp_path / "repo")
        assert (done.returncode, done.stderr) == (0, ""), command
        assert masked(done.stdout) == masked(output), command
