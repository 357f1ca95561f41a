"""Jobs of `tools/train_ranks.py` under torchrun, one after the other, whose ranks are killed.

    run_jobs(folder, seed, jobs=3, counts=[1, 2], model=(64, 2, 1))

Each job is killed after an event that its seed draws, and that is waited for, however slow the machine is. The first
one is killed after it has committed a snapshot, and the last one after it has resumed: so there is always a job that
resumes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kit.processes import ROOT, environment
from kit.tally import tally
from snapstore import Repository

SAVE_EVERY, HANGS_AFTER_S = 3, 600.0
JOB = """
import train_gpt
train_gpt.WIDTH, train_gpt.HEADS, train_gpt.LAYERS = {model}
import train_ranks
train_ranks.main()
"""


@dataclass
class Job:
    """A job under torchrun, with its output in a file."""

    folder: Path
    number: int
    ranks: int
    model: tuple[int, int, int]

    def start(self, *args: object, **variables: str) -> subprocess.Popen[bytes]:
        script = self.folder / "job.py"
        script.write_text(JOB.format(model=self.model))
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", script]
        env = environment(OMP_NUM_THREADS="1", **variables)
        env["PYTHONPATH"] = f"{ROOT / 'tools'}{os.pathsep}{env['PYTHONPATH']}"
        with self._file.open("wb") as log:
            return subprocess.Popen([*map(str, [*run, *args])], stdout=log, stderr=subprocess.STDOUT, env=env)

    @property
    def _file(self) -> Path:
        return self.folder / f"job-{self.number}.log"

    @property
    def log(self) -> str:
        return self._file.read_text(errors="replace")

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(rf"^rank \d+ of {self.ranks} is process (\d+) on ", self.log, re.M)]

    def steps(self) -> int:
        return len(re.findall(r"^step \d+", self.log, re.M))


def notes(folder: Path, event: str) -> list[tuple[int, str, int]]:
    """Return what rank 0 has noted: the step, the digest of the whole state, and the number of ranks."""
    file = folder / "notes"
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    return [(line["step"], line["digest"], line["ranks"]) for line in lines if line["event"] == event]


def committed(folder: Path) -> list[int]:
    """Return the steps of the committed snapshots."""
    if not (folder / "repository/config").exists():
        return []
    with Repository.open(folder / "repository") as repository:
        return [snapshot.step for snapshot in repository.snapshots("gpt")]


def counted(job: Job) -> dict[str, Callable[[], int]]:
    """Return by event, in their order in a job, how often it has happened."""
    return {
        "is up": lambda: len(job.pids()) == job.ranks,
        "resumes": lambda: len(notes(job.folder, "restored")),
        "trains": job.steps,
        "saves": lambda: len(notes(job.folder, "saved")),
        "commits": lambda: len(committed(job.folder)),
    }


def wait_and_kill(job: Job, process: subprocess.Popen[bytes], random: Random, events: Sequence[str]) -> str:
    """Wait until one of some events has happened in a job; then kill one rank or all. Return the event."""
    event, deadline = random.choice(events), time.monotonic() + HANGS_AFTER_S
    count = counted(job)[event]
    before = count()
    while len(job.pids()) < job.ranks or count() <= before:
        assert process.poll() is None, f"the job ended by itself before it {event}\n{job.log}"
        assert time.monotonic() < deadline, f"the job has run for {HANGS_AFTER_S:.0f} s and never {event}\n{job.log}"
        time.sleep(0.01 if event != "commits" else 0.1)
    time.sleep(random.uniform(0, 3 if event == "is up" else 0.3))
    for pid in random.choice([job.pids(), random.sample(job.pids(), 1)]):
        os.kill(pid, signal.SIGKILL)
        tally("kills of ranks of jobs")
    process.wait(timeout=HANGS_AFTER_S)
    return event


def run_jobs(
    folder: Path, seed: int, jobs: int, counts: Sequence[int], model: tuple[int, int, int], **variables: str
) -> list[str]:
    """Run jobs, kill each, and check that it has lost nothing; return the events after which they were killed.

    Args:
        counts: numbers of ranks to draw from.
        model: its width, heads and layers.
        variables: of the jobs' environment.
    """
    random, url, before, newest, killed = Random(seed), folder / "repository", 0, 0, []
    for number in range(jobs):
        job = Job(folder, number, random.choice(counts), model)
        events = ["commits"] if number == 0 else ["resumes", "trains", "saves", "commits"]
        events += ["is up"] if 0 < number < jobs - 1 else []
        options = "--repo", url, "--steps", 1_000_000, "--save-every", SAVE_EVERY, "--notes", folder / "notes"
        process = job.start(*options, "--ranks-before", before, **variables)
        try:
            killed.append(wait_and_kill(job, process, random, events))
        finally:
            process.kill()
            process.wait()
            for pid in job.pids():  # after a failure they would train on, and slow all other tests
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        saved, restored = notes(folder, "saved"), notes(folder, "restored")
        assert {note[:2] for note in restored} <= {note[:2] for note in saved}
        with Repository.open(url) as repository:
            check = repository.check("restore" if number == jobs - 1 else "metadata")
            assert check.ok, check.problems
            repository.gc()
        newest, last = max(committed(folder)), newest
        assert newest >= last
        before = next((ranks for step, _, ranks in reversed(saved) if step == newest), 0)
    assert restored, f"no job has resumed; they were killed after {killed}"
    assert restored[-1][0] >= SAVE_EVERY
    return killed
