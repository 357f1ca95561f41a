"""The shell as people use it: verbs as processes of their own, in pipes, on terminals and with their shells."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
import torch

from kit.hostile_s3 import HostileS3
from kit.objects import flip_file
from kit.processes import ROOT, environment
from kit.samples import some
from kit.shell import invoke
from snapstore import Repository, SaveOptions
from snapstore.cli.app import VERBS


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


@pytest.mark.parametrize("verb", ["--help", "log --help", "--version", "completion bash"])
def test_a_help_text_that_cannot_be_written_is_an_error(place, verb):
    done = bash(f"snapstore {verb} >/dev/full", place)
    assert done.returncode == 1
    assert done.stderr.startswith("snapstore: error: stdout: cannot be written: No space left on device")
    assert done.stderr.count("\n") == 1


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


# --- completion


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Put a `snapstore` on PATH whose completions may take as long as they like: a busy machine is slow."""
    program = "from snapstore.cli import completers, main; completers.COMPLETE_WITHIN_S = 300; main()"
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "snapstore"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{program}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return script


def replies(line, url, shell="fish", **more):
    """Return what the shell's script gets for a line, without the help of verbs."""
    asked = {"_SNAPSTORE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line, "COMP_LINE": line}
    env = environment(SNAPSTORE_REPO=str(url), _TYPER_COMPLETE_FISH_ACTION="get-args", **asked, **more)
    done = subprocess.run(["snapstore"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), line
    return done.stdout if shell == "zsh" else [reply.partition("\t")[0] for reply in done.stdout.splitlines() if reply]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_verbs_runs_references_tags_and_metrics_are_completed(place, on_path, shell):
    words = ["latest", "highest", "best:loss", "best:lr"]
    expected = {
        "snapstore un": ["untag", "unforget"],
        "snapstore show ": ["exp@", "fork@"],
        "snapstore show e": [f"exp@{name}" for name in ["good", *words, "300", "200", "100", "0"]],
        "snapstore restore exp@2": ["exp@200"],
        "snapstore copy exp@0 fork@best:": ["fork@best:acc", "fork@best:loss"],
        "snapstore diff exp@0 exp@g": ["exp@good"],
        "snapstore log --run f": ["fork"],
        "snapstore log f": ["fork"],
        "snapstore log --sort l": ["loss", "lr"],
        "snapstore log --metrics loss,a": ["loss,acc"],
        "snapstore tag exp@0 ": ["good"],
        "snapstore untag exp@200 g": ["good"],
        "snapstore untag exp@0 ": [],
        "snapstore unforget ex": [],  # nothing is forgotten
        "snapstore save --tag": ["--tag"],
        "snapstore show none@": [],
        "snapstore show 'e": [f"exp@{name}" for name in ["good", *words, "300", "200", "100", "0"]],
    }
    for line, names in expected.items():
        assert replies(line, place, shell) == names, line
    assert replies(f"snapstore --repo '{place}' log e", "/nowhere", shell) == ["exp"]
    assert replies(f"snapstore log --repo {place} e", "/nowhere", shell) == ["exp"]


def test_only_names_that_a_terminal_can_show_are_completed(on_path, tmp_path):
    """A metric may have any name; a name such as acc:max is one of a reference only with its :min or :max."""
    metrics = {"acc:max": 1.0, "a\nb": 2.0, "a\x1b[31mc": 3.0, "a d": 4.0}
    with Repository.create(tmp_path / "repo") as repository:
        repository.save(state(0), run="exp", step=0, metrics=metrics)
        assert repository.snapshot("exp@best:acc:max:min").metrics == metrics
    for shell in ("bash", "fish"):
        expected = ["exp@best:a d", "exp@best:acc:max:min"]
        assert replies("snapstore show exp@best:", tmp_path / "repo", shell) == expected
        assert replies("snapstore log --sort a", tmp_path / "repo", shell) == ["a d", "acc:max"]


def files_of(folder):
    return {path: path.stat()[:-3] for path in sorted(folder.rglob("*"))}  # without the times


def test_a_completion_changes_nothing_and_says_nothing(place, on_path, tmp_path):
    missing = tmp_path / "missing"
    for url in (missing, "", "s3:///", tmp_path / "bin", "ftp://x"):
        assert replies("snapstore show ", url) == []
        assert replies("snapstore init ", url) == []
    assert not missing.exists()
    before = files_of(place)
    assert replies("snapstore tag exp@0 g", place) == ["good"]
    assert files_of(place) == before
    flip_file(next((place / "snapshots").rglob("exp/*")), 9)  # a damaged record: the others are completed
    try:
        assert replies("snapstore log f", place) == ["fork"]
    finally:
        flip_file(next((place / "snapshots").rglob("exp/*")), 9)


def test_a_store_that_does_not_answer_is_given_up(monkeypatch):
    """A key press waits three seconds at most, and not for all retries of a request."""
    with HostileS3() as server:
        server.lie("/bucket", lambda wire, honest: wire.stall())
        env = environment(
            AWS_ENDPOINT_URL_S3=server.url, AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none",
            AWS_DEFAULT_REGION="us-east-1", SNAPSTORE_REPO="s3://bucket/repo", COMP_LINE="snapstore show ",
            _SNAPSTORE_COMPLETE="complete_bash",
        )  # fmt: skip
        command = [sys.executable, "-m", "snapstore"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert server.seen or server.connections == 0  # it asked, or this machine is too slow to get there


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_can_be_read(shell, place, tmp_path):
    done = bash(f"snapstore completion {shell}", place)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_SNAPSTORE_COMPLETE=complete_" in done.stdout
    document = json.loads(bash(f"snapstore completion {shell} --json", place).stdout)
    assert document == {"shell": shell, "script": done.stdout.removesuffix("\n")}
    if shutil.which(shell):
        (tmp_path / "script").write_text(done.stdout)
        assert subprocess.run([shell, "-n", tmp_path / "script"], check=False).returncode == 0


@contextmanager
def typing(url, *keys, shell="bash"):
    """Type keys into an interactive shell on a terminal; yield all that it showed."""
    ours, theirs = pty.openpty()
    env = environment(SNAPSTORE_REPO=str(url), PS1="> ", TERM="dumb", HISTFILE="/dev/null")
    command = ["bash", "--norc", "--noprofile", "-i"] if shell == "bash" else ["zsh", "-f", "-i"]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(command, env=env, start_new_session=True, **streams) as child:
        os.close(theirs)
        os.write(ours, "".join([*keys, "exit\n"]).encode())  # the shell reads them as it gets to them
        seen = b""
        with suppress(OSError):  # the shell has closed its end
            while data := os.read(ours, 65536):
                seen += data
        child.wait(60)
        os.close(ours)
        yield seen.decode()


def test_bash_completes_what_is_typed(place, on_path):
    """One line in ~/.bashrc; then each tab key below completes a name, and the commands print what they should."""
    keys = [
        'eval "$(snapstore completion bash)"\n',
        "snapstore show exp@lat\t| head -1\n",
        "snapstore show exp@best:lo\t| head -1\n",
        "snapstore sh\tfo\t8\t| head -2 | tail -1\n",
        "snapstore log --run=fo\t--sort lo\t| tail -1\n",
        "snapstore tag exp@good go\t\n",  # completes the tag
        f"cat {place}/conf\t| wc -c\n",  # another command keeps its own
    ]
    with typing(place, *keys) as seen:
        with Repository.open(place) as repository:
            ids = {s.ref: s.id for s in repository.snapshots()}
        for expected in (
            "snapshot  exp@300 (committed)",
            "snapshot  exp@200 (committed)",
            f"id        {ids['fork@8']}",
            f"fork@7    {ids['fork@7'][:8]}",
            f"exp@200 (id:{ids['exp@200'][:12]}) is now tagged good\r\n",
            f"\n{(place / 'config').stat().st_size}\r\n",
        ):
            assert expected in seen, seen


ODD = {
    "a": "two words",
    "b": "it's",
    "c": "$(touch ran)",
    "d": "\\$(touch ran)",
    "e": 'say "no"',
    "f": "50%;touch ran",
}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_no_name_of_a_metric_is_run(on_path, tmp_path, monkeypatch, shell):
    """typer's script for zsh ran a command in a name when the tab key was pressed, and bash with the enter key."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    with Repository.create(tmp_path / "repo") as repository:
        for run, name in ODD.items():
            repository.save({"w": torch.zeros(4)}, run=run, step=7, metrics={name: 1.0})
    monkeypatch.chdir(tmp_path)
    keys = ["autoload -U compinit; compinit -u -D\n"] if shell == "zsh" else []
    keys += [f'eval "$(snapstore completion {shell})"\n']
    keys += [f"snapstore show {run}@best:\t| head -1\n" for run in ODD]
    keys += ["snapstore show 'a@best:tw\t| head -1\n", "snapstore show a@best:two\\ w\t| head -1\n"]
    with typing(tmp_path / "repo", *keys, shell=shell) as seen:
        assert not (tmp_path / "ran").exists()
        shown = re.findall(r"snapshot  (.)@7 \(committed\)", seen)
        assert shown == [*ODD, "a", "a"], seen


# --- help


def example_of(help_text):
    """Return the example in a help text, on one line."""
    assert help_text.count("Example:\n") == 1
    return help_text.partition("Example:\n")[2].strip()


@pytest.mark.slow
def test_the_example_of_each_verb_runs(tmp_path):
    """One after the other, in a folder with the files that they name; only the places differ."""
    states = {step: {"model.w": torch.arange(20_000.0) * step} for step in (100, 200, 300)}
    torch.save(states[100], tmp_path / "model.pt")
    (tmp_path / "checkpoints").mkdir()
    for step in (200, 300):
        torch.save(states[step], tmp_path / "checkpoints" / f"step_{step}.pt")
    (tmp_path / "bucket").mkdir()
    lines = {verb: example_of(invoke([verb, "--help"], {}).stdout) for verb in VERBS if verb != "demo"}
    assert all(re.search(rf"\bsnapstore {verb}\b", line) for verb, line in lines.items())
    before = {"log": "snapstore save model.pt --run exp --step 99 --metric lr=1 --metric loss=2 && "}
    before["unforget"] = "snapstore forget exp@100 && "
    order = ["init", "save", "import", "log", "show", "diff", "restore", "export", "tag", "untag"]
    for verb in [*order, *some([verb for verb in lines if verb not in order], 8)]:
        line = f"cd {tmp_path} && {before.get(verb, '')}{lines[verb]}"
        line = line.replace("s3://bucket", str(tmp_path / "bucket")).replace("/data/snapshots", str(tmp_path / "repo"))
        done = bash(line, tmp_path / "repo")
        assert (done.returncode, done.stderr.count("error")) == (0, 0), (line, done.stderr)
    assert torch.equal(torch.load(tmp_path / "best.pt")["model.w"], states[100]["model.w"])


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
