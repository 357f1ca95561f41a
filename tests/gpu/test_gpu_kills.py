"""Jobs on GPUs whose ranks are killed at any moment go on with the very bits that were saved, on any number of ranks.

`tools/train_ranks.py` is the job: FSDP2 with NCCL, under torchrun, with a larger model than the demo's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch

from kit.processes import ROOT, environment
from kit.samples import SEED, THOROUGH
from kit.tally import EXAMPLES, tally
from snapstore import Repository

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

SAVE_EVERY, JOBS = 3, 8 if THOROUGH else 3
JOB = """
import train_gpt
train_gpt.WIDTH, train_gpt.HEADS, train_gpt.LAYERS = 512, 8, 4
import train_ranks
train_ranks.main()
"""


@dataclass
class Job:
    """A job under torchrun, with its output in a file."""

    folder: Path
    number: int
    ranks: int

    def start(self, *args: object) -> subprocess.Popen[bytes]:
        script = self.folder / "job.py"
        script.write_text(JOB)
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", script]
        variables = environment(OMP_NUM_THREADS="1")
        variables["PYTHONPATH"] = f"{ROOT / 'tools'}{os.pathsep}{variables['PYTHONPATH']}"
        with self._file.open("wb") as log:
            return subprocess.Popen([*map(str, [*run, *args])], stdout=log, stderr=subprocess.STDOUT, env=variables)

    @property
    def _file(self) -> Path:
        return self.folder / f"job-{self.number}.log"

    @property
    def log(self) -> str:
        return self._file.read_text(errors="replace")

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(rf"^rank \d+ of {self.ranks} is process (\d+) on cuda", self.log, re.M)]

    def steps(self) -> int:
        return len(re.findall(r"^step \d+", self.log, re.M))


def notes(folder: Path, event: str) -> list[tuple[int, str, int]]:
    """Return what rank 0 has noted: the step, the digest of the whole state, and the number of ranks."""
    file = folder / "notes"
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    return [(line["step"], line["digest"], line["ranks"]) for line in lines if line["event"] == event]


def wait_and_kill(job: Job, process: subprocess.Popen[bytes], random: Random) -> None:
    """Wait for some steps of a job, or only for its ranks; then kill one rank or all."""
    new_steps, deadline = random.choice([0, 1, 3, 4, 7, 10]), time.monotonic() + 600
    while len(job.pids()) < job.ranks or job.steps() < new_steps:
        assert process.poll() is None, f"the job ended by itself\n{job.log}"
        assert time.monotonic() < deadline, f"the job hangs\n{job.log}"
        time.sleep(0.01)
    time.sleep(random.uniform(0, 3 if not new_steps else 0.3))
    for pid in random.choice([job.pids(), random.sample(job.pids(), 1)]):
        os.kill(pid, signal.SIGKILL)
        tally("kills of ranks on GPUs")
    process.wait(timeout=600)


@pytest.mark.parametrize("seed", range(SEED, SEED + EXAMPLES))
def test_jobs_that_lose_ranks_go_on_with_the_bits_that_were_saved(tmp_path, seed):
    random, url, before, newest = Random(seed), tmp_path / "repository", 0, 0
    for number in range(JOBS):
        job = Job(tmp_path, number, random.choice([count for count in (1, 2, 4) if count <= torch.cuda.device_count()]))
        options = "--repo", url, "--steps", 10_000, "--save-every", SAVE_EVERY, "--notes", tmp_path / "notes"
        process = job.start(*options, "--ranks-before", before)
        try:
            wait_and_kill(job, process, random)
        finally:
            process.kill()
        saved = notes(tmp_path, "saved")
        assert {note[:2] for note in notes(tmp_path, "restored")} <= {note[:2] for note in saved}
        if not (url / "config").exists():
            continue  # it was killed before it had a repository
        with Repository.open(url) as repository:
            snapshots = repository.snapshots("gpt")
            check = repository.check("restore" if number == JOBS - 1 else "metadata")
            assert check.ok, check.problems
            repository.gc()
        newest, last = max((s.step for s in snapshots), default=0), newest
        assert newest >= last
        before = next((ranks for step, _, ranks in reversed(saved) if step == newest), 0)
    assert notes(tmp_path, "restored"), "no job has resumed"
