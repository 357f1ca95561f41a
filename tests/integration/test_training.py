"""A training run that is killed again and again ends with the losses and snapshots of an undisturbed run.

Each run of `tools/train_gpt.py` is a process of its own, with a smaller model. The launcher imports torch once and
forks one child per run, which saves three seconds each time. A child is a real process, and is really killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kit.samples import SEED, THOROUGH
from kit.tally import EXAMPLES, tally
from snapstore import Repository

TOOLS = Path(__file__).parents[2] / "tools"
STEPS, SAVE_EVERY, KEEP_LAST = 100 if THOROUGH else 70, 5, 4
SIGNALS = [signal.SIGKILL] * 8 + [signal.SIGTERM] * 2 if THOROUGH else [signal.SIGKILL] * 4 + [signal.SIGTERM]
#: New steps until a signal: too few for a commit, just enough, or enough for two saves, so that the run makes progress.
#: Their sum is well below STEPS.
MOMENTS = [2, 2, 3, 5, 6, 7, 8, 12, 13, 16]
STEP_S = 0.02  # so that the run has not ended when a late signal comes

LAUNCHER = f"""
import json, os, sys, time
sys.path.insert(0, {str(TOOLS)!r})
import torch._dynamo  # the first optimizer imports it: half of what a start costs
import train_gpt

train_gpt.WIDTH, train_gpt.HEADS, train_gpt.LAYERS, train_gpt.BATCH, train_gpt.CONTEXT = 64, 4, 2, 4, 32
report = train_gpt.report

def slow_report(*args):
    report(*args)
    if args[0].repo:
        time.sleep({STEP_S})

train_gpt.report = slow_report
print("ready", flush=True)
for line in sys.stdin:
    sys.argv = ["train_gpt.py", *json.loads(line)]
    pid = os.fork()
    if pid == 0:
        train_gpt.main()
        sys.exit()
    print("pid", pid, flush=True)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Launcher:
    """Starts training runs, one at a time, and kills them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._line() == ["ready"]

    def _line(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the launcher has died"
        return line.split()

    def run(self, *args: object, kill: tuple[int, int, Callable[[], object]] | None = None) -> tuple[int, list[str]]:
        """Run to the end or, with kill=(signal, n, wait), send the signal once `wait` returns after the n-th new step.

        Returns:
            The exit code, and the line that it printed about the snapshot from which it resumed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(arg) for arg in args]) + "\n")
        self._process.stdin.flush()
        pid, new, resumed = 0, 0, []
        while (line := self._line())[0] != "ended":
            if line[0] == "pid":
                pid = int(line[1])
            elif line[0] == "resumed":
                resumed = line
            elif line[0] == "step":
                new += 1
                if kill and pid and new >= kill[1]:
                    kill[2]()
                    os.kill(pid, kill[0])  # it has not ended yet: the moments are far from the last step
                    kill = None
        return int(line[1]), resumed


@pytest.fixture
def launcher(tmp_path) -> Iterator[Launcher]:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    # One thread each: on a busy machine two threads would wait for each other longer than they compute.
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield Launcher(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def losses_of(file: Path) -> list[tuple[int, str]]:
    """Return (step, loss as a hex float) of every whole line: one for each computed step, also for repeated steps."""
    lines = file.read_text().splitlines(keepends=True)
    return [(int(line.split()[0]), line.split()[1]) for line in lines if line.endswith("\n")]


def look_after(url: Path, expected: dict[int, dict[str, str]], committed: dict[str, int]) -> tuple[int, int]:
    """Check what must hold after every death; return (newest committed step, number of sessions that the run left).

    Args:
        committed: {id: step} of the snapshots seen after earlier deaths; the snapshots seen now are added.
    """
    import train_gpt

    with Repository.open(url) as repository:
        left = len(list(repository.store.list("sessions/")))
        snapshots = repository.snapshots("gpt")
        for snapshot in snapshots:
            assert train_gpt.digests(repository.restore(f"id:{snapshot.id}")) == expected[snapshot.step]
        checked = repository.check("restore")
        assert checked.ok, checked.problems
        assert {s.id for s in snapshots} <= {s.id for s in checked.restorable}
        assert repository.gc().waiting_for == []
        assert list(repository.store.list("sessions/")) == []
        assert repository.stats().unneeded_bytes == 0
        assert [s.id for s in repository.snapshots("gpt")] == [s.id for s in snapshots]
        assert repository.check("restore").ok
    newest = max((s.step for s in snapshots), default=0)
    oldest = newest - SAVE_EVERY * (KEEP_LAST - 1)  # the policy may have forgotten only older snapshots
    assert {s.step for s in snapshots} >= {*range(SAVE_EVERY, newest + 1, SAVE_EVERY)} - {*range(oldest)}
    assert {i for i, step in committed.items() if step >= oldest} <= {s.id for s in snapshots}
    committed |= {s.id: s.step for s in snapshots}
    return newest, left


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED, SEED + EXAMPLES))
def test_a_run_killed_at_random_moments_computes_the_very_same_losses(launcher, tmp_path, monkeypatch, seed):
    monkeypatch.syspath_prepend(TOOLS)
    random = Random(seed)
    whole = tmp_path / "whole.txt", tmp_path / "digests.txt"
    arguments = "--steps", STEPS, "--save-every", SAVE_EVERY, "--seed", seed
    assert launcher.run(*arguments, "--losses", whole[0], "--digests", whole[1])[0] == 0
    reference = dict(losses_of(whole[0]))
    assert list(reference) == list(range(1, STEPS + 1))
    expected = {entry["step"]: entry["digests"] for entry in map(json.loads, whole[1].read_text().splitlines())}

    url, losses = tmp_path / "repo", tmp_path / "losses.txt"
    arguments += "--repo", url, "--losses", losses, "--keep-last", KEEP_LAST

    def wait_for_a_save() -> None:
        deadline = time.monotonic() + 300
        while not any(url.glob("sessions/*")) and time.monotonic() < deadline:
            time.sleep(0.0005)

    def wait_a_little() -> None:
        time.sleep(random.uniform(0, 0.05))

    waits = [wait_for_a_save] * (len(SIGNALS) // 2 + 1) + [wait_a_little] * (len(SIGNALS) // 2)
    plan = zip(*(random.sample(column, len(SIGNALS)) for column in (SIGNALS, MOMENTS, waits)), strict=True)
    newest, left, committed = 0, 0, dict[str, int]()
    for number, new_steps, wait in plan:
        tally("kills" if number == signal.SIGKILL else "terminations")
        code, resumed = launcher.run(*arguments, kill=(number, new_steps, wait))
        assert code == -number
        assert resumed == (["resumed", "after", "step", str(newest)] if newest else [])
        before = newest
        newest, sessions = look_after(url, expected, committed)
        left += sessions
        # Only the running save may be lost: the save before it had committed when this one began.
        begun = (losses_of(losses)[-1][0] - 1) // SAVE_EVERY * SAVE_EVERY
        assert newest >= max(before, begun - SAVE_EVERY)
    assert left, "no signal met a save"
    assert launcher.run(*arguments) == (0, ["resumed", "after", "step", str(newest)])

    computed = losses_of(losses)
    assert [step for step, loss in computed if loss != reference[step]] == []
    assert {step for step, _ in computed} == set(reference)
    assert len(computed) > STEPS  # some steps were computed again
    assert look_after(url, expected, committed) == (STEPS, 0)
    with Repository.open(url) as repository:
        steps = [snapshot.step for snapshot in repository.snapshots("gpt")]
        assert steps == list(range(STEPS - SAVE_EVERY * (KEEP_LAST - 1), STEPS + 1, SAVE_EVERY))
        assert repository.snapshot(f"gpt@{STEPS}").metrics == {"loss": float.fromhex(reference[STEPS])}
