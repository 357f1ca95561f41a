"""Jobs whose ranks are killed go on with the bits that were saved, on CPUs; test_gpu_kills.py has them on GPUs."""

from __future__ import annotations

import subprocess
import sys
import time
from random import Random

import pytest

from kit import killed_jobs
from kit.killed_jobs import Job, run_jobs, wait_and_kill
from kit.samples import SEED

CPU = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "SNAPSTORE_THREADS": "1"}


@pytest.mark.slow
def test_jobs_that_lose_ranks_go_on_with_the_bits_that_were_saved(tmp_path):
    """However slow the machine is, one job commits, and another one resumes."""
    killed = run_jobs(tmp_path, SEED, 2, [1, 2], model=(32, 2, 1), **CPU)
    assert killed[0] == "commits"


SLOW = """
import os, sys, time
print(f"rank 0 of 1 is process {os.getpid()} on cpu", flush=True)
for number in range(100):
    time.sleep(0.1)
    open(sys.argv[1], "a").write('{"event": "saved", "step": %d, "digest": "", "ranks": 1}\\n' % number)
"""


class Slow(Job):
    """A job that needs long until it saves."""

    def start(self):
        command = [sys.executable, "-c", SLOW, str(self.folder / "notes")]
        with self._file.open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def test_a_job_is_killed_after_its_event_and_not_after_a_time(tmp_path, monkeypatch):
    job = Slow(tmp_path, 0, 1, (1, 1, 1))
    process = job.start()
    assert wait_and_kill(job, process, Random(SEED), ["saves"]) == "saves"
    assert process.returncode == -9
    assert killed_jobs.notes(tmp_path, "saved")
    monkeypatch.setattr(killed_jobs, "HANGS_AFTER_S", 0.5)
    process = job.start()
    began = time.monotonic()
    with pytest.raises(AssertionError, match="never resumes"):
        wait_and_kill(job, process, Random(SEED), ["resumes"])
    process.kill()
    process.wait()
    assert time.monotonic() - began < 30
