"""The recipes for a job that is told to end and starts again: the code of docs/guides/recipes.md itself, run here.

Local programs take the place of `srun` and `scontrol`. The job is told at random moments, also while Python still
imports torch, and by one task or all. The last weights, moments and generators equal those of a training that was never
told, to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kit.processes import ROOT, environment, free_port
from kit.repositories import same
from kit.samples import SEED, THOROUGH, some
from kit.tally import EXAMPLES, tally
from snapstore import Repository
from snapstore.distributed import notices

HANG_S = 300.0
PAGE = (ROOT / "docs" / "guides" / "recipes.md").read_text()
TOTAL = 1000

#: Starts its command once for each task, as Slurm does with `--kill-on-bad-exit=1`, and returns the highest status.
SRUN = """
import json, os, subprocess, sys, time
count = int(os.environ["SLURM_NTASKS"])
tasks = [subprocess.Popen(sys.argv[2:], env=os.environ | {"SLURM_PROCID": str(rank)}) for rank in range(count)]
with open("tasks.new", "w") as file:
    json.dump([one.pid for one in tasks], file)
os.rename("tasks.new", "tasks")
while any(one.poll() is None for one in tasks):
    if any(one.poll() for one in tasks):
        time.sleep(0.3)
        for one in tasks:
            one.kill()
    time.sleep(0.01)
sys.exit(max(one.returncode if one.returncode >= 0 else 128 - one.returncode for one in tasks))
"""
SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("127.0.0.1")
elif sys.argv[1] == "requeue":
    assert sys.argv[2] == os.environ["SLURM_JOB_ID"]
    open("requeued", "w").close()
else:
    sys.exit(1)
"""


def blocks(heading, kind):
    """Return the blocks of a kind below a heading of the page."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [one.split("```")[0] for one in section.split(f"```{kind}\n")[1:]]


def make_job(folder, script):
    """Put train.py, a script of the page and the programs that it calls into a folder; return its environment."""
    (folder / "bin").mkdir(parents=True)
    text = blocks("Requeue", "python")[0]
    text = text.replace("/data/snapshots", str(folder / "snapshots")).replace(
        "interval_steps=1000", "interval_steps=400"
    )
    assert "interval_steps=400" in text
    (folder / "train.py").write_text(text)
    shell = dict(zip(("job.sh", "run.sh"), blocks("Requeue", "bash"), strict=True))[script]
    port = str(free_port())
    assert "100000" in shell
    (folder / script).write_text(shell.replace("100000", str(TOTAL)).replace("29500", port))
    for name, program in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / f"{name}.py").write_text(program)
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/{name}.py "$@"\n')
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore "$@"\n')
    for one in (folder / "bin").iterdir():
        one.chmod(0o755)
    paths = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return environment(**paths)


def children(pid):
    """Return the processes that a process has started."""
    with contextlib.suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def send(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_for_a_moment(dice, folder, job):
    """Wait for a random moment of an attempt: often of its training, sometimes of the start of Python."""
    if dice.random() < 0.25:
        time.sleep(dice.random() * 3.0)
        return
    starts = (folder / "log").read_text().count("starting at step")
    while job.poll() is None and (folder / "log").read_text().count("starting at step") == starts:
        time.sleep(0.01)
    time.sleep(dice.random() * 2.0)


def end_of(folder, ranks):
    with Repository.open(folder / "snapshots") as repository:
        assert repository.check("restore").ok
        snapshot = repository.snapshot("requeue@latest")
        assert snapshot.step == TOTAL
        found = repository.restore("requeue@latest")
    rng = found["rng"]
    own = [rng[rank] for rank in sorted(rng)] if 0 in rng else [rng]
    assert len(own) == ranks
    return found["model"], found["optimizer"], [one["torch"] for one in own]  # nothing draws from the others


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH and SEED % 2 != 0, reason="a run takes the loop or the job of Slurm")
@pytest.mark.parametrize("number", range(10 * EXAMPLES if THOROUGH else 1))
def test_the_loop_ends_with_the_bits_of_a_training_that_was_never_told(tmp_path, number):
    dice, times = random.Random(SEED + number), 4 if THOROUGH else 1
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(["bash", "run.sh"], cwd=whole, env=make_job(whole, "run.sh"), check=True, timeout=HANG_S)
    environ, said = make_job(parts, "run.sh"), ""
    with (parts / "log").open("w") as log:
        loop = subprocess.Popen(["bash", "run.sh"], cwd=parts, env=environ, stdout=log, stderr=log)
        told, before = 0, None
        try:
            deadline = time.monotonic() + HANG_S
            while loop.poll() is None:
                assert time.monotonic() < deadline, (parts / "log").read_text()
                found = children(loop.pid)
                if told < times and found and found[0] != before:
                    wait_for_a_moment(dice, parts, loop)
                    if loop.poll() is None and children(loop.pid) == found:
                        send(found, dice.choice([signal.SIGUSR1, signal.SIGTERM]))
                        told, before = told + 1, found[0]
                time.sleep(0.01)
        finally:
            started = children(loop.pid)
            loop.kill()
            send(started, signal.SIGKILL)
    said = (parts / "log").read_text()
    assert loop.returncode == 0, said
    assert said.count("starting again") in (told, told - 1), said  # the last one may come when all is done
    assert same(end_of(parts, 1), end_of(whole, 1)), said
    tally("requeues of a loop", told)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH and SEED % 2 != 1, reason="a run takes the loop or the job of Slurm")
@pytest.mark.parametrize("number", range(10 * EXAMPLES if THOROUGH else 1))
def test_a_job_of_slurm_ends_with_the_bits_of_a_job_that_was_never_told(tmp_path, number):
    """It is in the queue again only if it was told."""
    dice, times = random.Random(SEED + number), 4 if THOROUGH else 1
    count = dice.choice([2, 4]) if THOROUGH else 2
    ends, said = [], ""
    for name in ("whole", "parts"):
        folder = tmp_path / name
        environ = make_job(folder, "job.sh") | {
            "SLURM_NTASKS": str(count), "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "here",
        }  # fmt: skip
        told = 0
        for _ in range(times + 1):
            for one in ("requeued", "tasks"):
                (folder / one).unlink(missing_ok=True)
            with (folder / "log").open("a") as log:
                job = subprocess.Popen(["bash", "job.sh"], cwd=folder, env=environ, stdout=log, stderr=log)
                try:
                    if name == "parts" and told < times:
                        while not (folder / "tasks").exists() and job.poll() is None:
                            time.sleep(0.01)
                        wait_for_a_moment(dice, folder, job)
                        pids = json.loads((folder / "tasks").read_text())
                        send(pids if dice.random() < 0.7 else [dice.choice(pids)], signal.SIGUSR1)
                        told += 1
                    status = job.wait(HANG_S)
                finally:
                    if job.poll() is None:
                        send(json.loads((folder / "tasks").read_text()), signal.SIGKILL)
                        job.kill()
            said = (folder / "log").read_text()
            assert (folder / "requeued").exists() == (status == 138), said
            assert status in (0, 138), said
            if status == 0:
                break
        assert status == 0, said
        ends.append(end_of(folder, count))
    assert same(ends[0], ends[1]), said
    tally("requeues of a job", told)


LOADER = """
import os, signal, sys, torch
from snapstore import RngState, SnapshotManager, resumable

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4000, 4))
ignore = (lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN)) if sys.argv[2] == "SIGTERM" else None
loader = resumable(torch.utils.data.DataLoader(data, 10, shuffle=True, num_workers=2, worker_init_fn=ignore))
total = torch.zeros(4)
state = {"total": total, "loader": loader, "rng": RngState()}
with SnapshotManager(sys.argv[1], run="a", save_interval_steps=1000) as snapshots:
    snapshots.handle_preemption(signals=[signal.SIGUSR1])
    step = snapshots.restore_into(state).step if snapshots.latest_step() is not None else 0
    start = step
    for (batch,) in loader:
        step += 1
        total += batch.sum(0) * step
        if step - start == 30:
            print("trains", flush=True)
            signal.sigtimedwait([], 1) if len(sys.argv) > 3 else None
        snapshots.save(step, state, force=step == 400)
print(total.tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", some(["SIGUSR1", "SIGTERM"], 1))
def test_a_signal_to_all_processes_of_a_job_with_a_data_loader(tmp_path, sent):
    """Slurm signals the workers too. They go on, so the loop gets its batches, and saves."""
    (tmp_path / "train.py").write_text(LOADER)
    ends = []
    for folder, times in (("whole", 0), ("parts", 1)):
        for told in range(times + 1):
            command = [sys.executable, "-W", "ignore", str(tmp_path / "train.py"), str(tmp_path / folder), sent]
            command += ["wait"] if told < times else []
            with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as job:
                if told < times:
                    assert job.stdout.readline() == "trains\n"
                    workers = children(job.pid)
                    assert len(workers) >= 2
                    send([*workers, job.pid], getattr(signal, sent))
                said = job.communicate(timeout=HANG_S)[0]
            assert job.returncode == (128 + getattr(signal, sent) if told < times else 0), said
        ends.append(said.splitlines()[-1])
    assert ends[0] == ends[1]


class Cloud:
    """A metadata server of a cloud, as far as its documentation says; `event` is what it announces."""

    def __init__(self):
        self.event, self.tokens, cloud = None, set(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            def reply(self, status, body):
                data = body.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_PUT(self):
                if self.path != "/latest/api/token" or not self.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
                    return self.reply(400, "bad request")
                cloud.tokens.add(token := os.urandom(16).hex())
                return self.reply(200, token)

            def do_GET(self):
                headers = self.headers
                if self.path == "/latest/meta-data/spot/instance-action":
                    if headers["X-aws-ec2-metadata-token"] not in cloud.tokens:
                        return self.reply(401, "unauthorized")
                    return self.reply(404, "not found") if cloud.event is None else self.reply(200, cloud.event)
                if self.path == "/computeMetadata/v1/instance/preempted":
                    if headers["Metadata-Flavor"] != "Google":
                        return self.reply(403, "Missing Metadata-Flavor:Google header.")
                    return self.reply(200, "FALSE" if cloud.event is None else cloud.event)
                if headers["Metadata"] != "true":
                    return self.reply(400, "bad request")
                if self.path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
                    return self.reply(200, "node_3")
                if self.path == "/metadata/scheduledevents?api-version=2020-07-01":
                    events = [] if cloud.event is None else json.loads(cloud.event)
                    return self.reply(200, json.dumps({"DocumentIncarnation": 1, "Events": events}))
                return self.reply(404, "not found")

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=functools.partial(self._server.serve_forever, 0.01), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def azure(kind, *machines):
    return json.dumps([{"EventId": "1", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": machines}])


@pytest.mark.parametrize(
    ("number", "others", "event"),
    [
        (0, [], "TRUE"),
        (1, [], '{"action": "terminate", "time": "2026-11-30T08:22:00Z"}'),
        (2, [azure("Reboot", "node_3"), azure("Preempt", "node_4")], azure("Preempt", "node_4", "node_3")),
    ],
    ids=["google", "aws", "azure"],
)
def test_the_notice_of_a_cloud(number, others, event, monkeypatch, caplog, tmp_path):
    """The recipe tells the job of its own machine's end, and of nothing else. It uses no proxy of the environment."""
    from snapstore import SnapshotManager

    monkeypatch.setattr(notices, "POLL_S", 0.02)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    cloud = Cloud()
    code = blocks("Notices of spot machines", "python")[number]
    for name in ("metadata.google.internal", "169.254.169.254"):
        code = code.replace(f"http://{name}/", f"http://{cloud.host}/")
    assert cloud.host in code
    try:
        with SnapshotManager(tmp_path / "r", run="a") as manager:
            (tmp_path / "code").write_text(code.replace("handle_preemption(", "handle_preemption(end=False, "))
            exec((tmp_path / "code").read_text(), {"snapshots": manager})
            for other in [None, *others]:
                cloud.event = other
                time.sleep(0.3)
                assert not manager.reached_preemption(1)
            cloud.event = event
            deadline = time.monotonic() + HANG_S
            while not manager.reached_preemption(2):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert "cannot be read" not in caplog.text
    finally:
        cloud.close()
