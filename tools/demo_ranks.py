"""Shows one snapshot of a whole job: train under torchrun, lose a rank to SIGKILL in a save, resume on other ranks.

Every claim is checked. It ends with a line for each check, and with exit code 1 if one of them failed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import Demo, Proofs, console

from snapstore import Repository
from snapstore.storage.urls import open_store

STEPS, SAVE_EVERY, KILL_FROM = 40, 5, 15
TRAINER = Path(__file__).with_name("train_ranks.py")


@dataclass(frozen=True)
class Job:
    """A job under torchrun, with its output in a file."""

    demo: Demo
    name: str
    ranks: int

    def start(self, steps: int, ranks_before: int) -> subprocess.Popen[bytes]:
        """Start the trainer on all ranks."""
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={self.ranks}",
            TRAINER,
        ]
        command += ["--repo", self.demo.url, "--steps", steps, "--save-every", SAVE_EVERY]
        command += ["--notes", self.demo.file("notes"), "--ranks-before", ranks_before]
        paths = filter(None, [str(TRAINER.parent), os.environ.get("PYTHONPATH")])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        with self.demo.file(f"{self.name}.log").open("wb") as log:
            return subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=environment)

    @property
    def log(self) -> str:
        """Return what the job has printed."""
        return self.demo.file(f"{self.name}.log").read_text(errors="replace")

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a job that must succeed."""
        if process.wait(timeout=300):
            raise SystemExit(f"{self.log}\ndemo: the job ended with {process.returncode}; its output is above")


def notes(demo: Demo, event: str) -> dict[tuple[int, int], str]:
    """The digests that the trainer noted: (step, ranks) -> SHA-256."""
    lines = map(json.loads, demo.file("notes").read_text().splitlines())
    return {(line["step"], line["ranks"]): line["digest"] for line in lines if line["event"] == event}


def lose_a_rank(demo: Demo, ranks: int) -> None:
    """Kill the last rank when a save has just written its first pack."""
    job = Job(demo, "first", ranks)
    process = job.start(STEPS, 0)
    between, victim, found = demo.counts(), 0, 0
    while process.poll() is None and not victim:
        found = max(map(int, re.findall(r"^step (\d+)", job.log, re.M)), default=0)
        if found >= KILL_FROM and demo.in_save(between):
            victim = int(re.findall(rf"rank {ranks - 1} of {ranks} is process (\d+)", job.log)[0])
            os.kill(victim, signal.SIGKILL)
        elif not demo.objects("sessions/"):
            between = demo.counts()
        time.sleep(0.005)
    process.wait(timeout=300)
    if not victim:
        raise SystemExit(f"{job.log}\ndemo: the job ended before one of its saves was seen; its output is above")
    demo.proofs.add(bool(victim), f"SIGKILL hit rank {ranks - 1} at step {found}, in the middle of a save")
    with Repository.open(demo.url) as repository:
        steps = ", ".join(str(snapshot.step) for snapshot in repository.snapshots("gpt"))
        check = repository.check("restore")
        demo.proofs.add(check.ok, f"committed and whole: steps {steps}; nothing of the interrupted save counts")


def resume(demo: Demo, name: str, ranks: int, before: int, steps: int) -> None:
    """Go on from the newest snapshot, with another number of ranks."""
    with Repository.open(demo.url) as repository:
        newest = repository.snapshot("gpt@latest")
    job = Job(demo, name, ranks)
    began = time.monotonic()
    job.finish(job.start(steps, before))
    console.print(f"  trained to step {steps} on {ranks} ranks in {time.monotonic() - began:.0f} s")
    saved, restored = notes(demo, "saved"), notes(demo, "restored")
    same = saved[newest.step, before] == restored[newest.step, ranks]
    demo.proofs.add(same, f"step {newest.step}, saved by {before} ranks: all bits restored on {ranks}")
    with Repository.open(demo.url) as repository:
        first = repository.snapshot(f"gpt@{newest.step + SAVE_EVERY}")
        demo.proofs.add(first.parent == newest.id, f"step {first.step} descends from step {newest.step}")


def end(demo: Demo) -> None:
    """One process collects what the lost rank has left, and reads every snapshot."""
    with Repository.open(demo.url) as repository:
        collected = repository.gc()
        check = repository.check("restore")
        count = len(repository.snapshots("gpt"))
        last = repository.restore("gpt@latest", keys="model.*")
        console.print(f"  gc deleted {collected.deleted_objects} objects; {count} snapshots are left")
        demo.proofs.add(check.ok and not demo.objects("sessions/"), f"all {count} snapshots restore on one process")
        names: dict[str, Any] = last["model"]
        demo.proofs.add(all(not hasattr(t, "placements") for t in names.values()), "without ranks, tensors are whole")


def main() -> int:
    """Run the story."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the job (default 2)")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: expected 2 or more")
    folder = Path(tempfile.mkdtemp(prefix="snapstore-demo-"))
    url, began = str(folder / "repository"), time.monotonic()
    demo = Demo(folder, url, Proofs(), open_store(url, create=True))
    try:
        console.print(f"\n[bold]1. {args.ranks} ranks train; one is killed in a save[/]")
        lose_a_rank(demo, args.ranks)
        console.print("\n[bold]2. Resume on one rank[/]")
        resume(demo, "second", 1, args.ranks, STEPS - 2 * SAVE_EVERY)
        console.print(f"\n[bold]3. Resume on {args.ranks} ranks[/]")
        resume(demo, "third", args.ranks, 1, STEPS)
        console.print("\n[bold]4. Collect, and check everything[/]")
        end(demo)
    finally:
        shutil.rmtree(folder)
    failed = sum(not held for held, _ in demo.proofs.lines)
    console.print(f"\n[bold]Summary[/] after {time.monotonic() - began:.0f} s")
    for held, claim in demo.proofs.lines:
        console.print(demo.proofs.line(held, claim))
    console.print(f"[red]{failed} proofs failed[/]" if failed else "[green]All proofs hold[/]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
