"""Runs every harness of docs/reliability.md again and again with new seeds, and counts what was tried and what failed.

    tools/torture --hours 8            go on where the last run stopped; a round is every harness once
    tools/torture --only kills,fuzz    some of them
    tools/torture --only chaos-s3,ranks-s3,lying-s3    the ones that need an S3 server: eval "$(tools/s3-server start)"
    tools/torture --fresh              forget what was tried before

The result (docs/benchmarks/torture.json) is written after every harness, so you can stop it at any moment. It has the
sums of all runs, and the last run of each harness: commit, seed, seconds, what it tried and what it skipped. A run
fails if a test fails, if it skips a test for a reason that its harness does not allow, or if it tried nothing. A
failure is kept with its seed and the command that repeats it. The exit code is 1 if the file has a failure.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from random import SystemRandom
from typing import Any

import caller

import snapstore

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "benchmarks" / "torture.json"
#: Harness -> its tests, and the factor on its examples in a round.
HARNESSES: dict[str, tuple[list[str], int]] = {
    "crash points": (["tests/stateful", "-k", "crash_points or late_and_torn or repair_faults and not random"], 1),
    "power losses": (["tests/stateful/test_power_loss.py"], 1),
    "schedules": (["tests/stateful", "-k", "interleavings or repair_faults and random"], 20),
    "lies": (["tests/stateful/test_lies.py"], 1),
    "rank faults": (["tests/stateful/test_ranks_faults.py"], 100),  # pairs of attempts at once
    "rank processes": (["tests/integration/test_rank_processes.py"], 12),  # pairs of attempts, one of which dies
    "told to end": (
        [
            "tests/integration/test_told_to_end.py",
            "tests/integration/test_requeue.py",
            "tests/stateful/test_ranks_told.py",
        ],
        1,
    ),
    "outages": (["tests/stateful/test_outages.py"], 3),  # of ten outages each
    "models": (["tests/stateful/test_models.py"], 1),
    "machine": (["tests/stateful/test_machine.py"], 1),
    "mirror machine": (["tests/stateful/test_mirror_machine.py"], 1),
    "fuzz": (["tests/attacks"], 50),
    "damage": (["tests/integration/test_damage.py", "tests/integration/test_repair.py"], 1),
    "kills": (["tests/integration/test_training.py"], 25),  # of 8 SIGKILLs and 2 SIGTERMs each
    "full disks": (["tests/integration/test_full_disk.py"], 1),
    "figures": (["tests/integration/test_figures.py"], 1),
    "leaks": (["tests/integration/test_leaks.py"], 20),
    "first uses": (["tests/integration/test_first_use.py"], 1),
    "chaos": (["tests/integration/test_chaos.py", "-k", "disk"], 24),  # of 5 s for each class
    "chaos-s3": (["tests/integration/test_chaos.py", "-k", "s3"], 60),
    "ranks-s3": (["tests/integration/test_s3_ranks.py"], 1),
    "lying-s3": (["tests/integration/test_lying_s3.py"], 15),  # of 12 s for each sort of lies
}
#: These want the server of `tools/s3-server start`; without one they are left out.
NEED_S3 = {"chaos-s3", "ranks-s3", "lying-s3"}
#: Harness -> the reasons for which it may skip a test.
ALLOWED_SKIPS = {"fuzz": {"no CUDA device"}}
FAILURES_KEPT = 100


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--hours", type=float, default=1.0, help="begin no harness after so long (default 1)")
    parser.add_argument("--rounds", type=int, help="end after so many rounds")
    parser.add_argument("--only", help=f"comma-separated: {', '.join(HARNESSES)}")
    parser.add_argument(
        "--examples",
        type=float,
        default=1.0,
        help="factor on fuzz inputs, random schedules, kills, attempts of ranks, and seconds of chaos",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of a harness")
    parser.add_argument("--out", type=caller.path, default=OUT, help="the JSON")
    parser.add_argument("--fresh", action="store_true", help="forget what was tried before")
    args = parser.parse_args()
    chosen = [name.strip() for name in args.only.split(",")] if args.only else list(HARNESSES)
    if unknown := sorted(set(chosen) - HARNESSES.keys()):
        parser.error(f"no harness {unknown[0]!r}; there are {', '.join(HARNESSES)}")
    if not os.environ.get("SNAPSTORE_TEST_S3") and (lacking := sorted(NEED_S3.intersection(chosen))):
        if args.only:
            parser.error(f'{lacking[0]} needs an S3 server: eval "$(tools/s3-server start)"')
        print(f'left out: {", ".join(lacking)}, for want of an S3 server: eval "$(tools/s3-server start)"', flush=True)
        chosen = [name for name in chosen if name not in NEED_S3]
    report = new_report() if args.fresh or not args.out.exists() else json.loads(args.out.read_text())
    ends, rounds = time.monotonic() + 3600 * args.hours, 0
    while args.rounds is None or rounds < args.rounds:
        for name in chosen:
            if time.monotonic() > ends:
                break
            run(name, args, report)
        else:
            rounds += 1
            continue
        break
    print_report(report)
    sys.exit(1 if report["failures"] else 0)


def new_report() -> dict[str, Any]:
    """Return a report in which nothing was tried yet."""
    return {"seconds": 0.0, "commits": [], "tried": {}, "runs": {}, "last": {}, "failed_runs": 0, "failures": []}


def run(name: str, args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run one harness with a new seed; add its counts and failures to the report."""
    tests, factor = HARNESSES[name]
    seed = SystemRandom().randrange(1_000_000)
    settings = {
        "SNAPSTORE_TEST_THOROUGH": "1", "SNAPSTORE_TEST_SEED": str(seed),
        "SNAPSTORE_TEST_EXAMPLES": str(max(1, round(factor * args.examples))),
    }  # fmt: skip
    print(f"{time.strftime('%H:%M:%S')} {name}, seed {seed}", flush=True)
    began, commit = time.monotonic(), commit_of()
    with tempfile.TemporaryDirectory(prefix="snapstore-tally-") as folder:
        junit = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no", "--no-header", "-rN",
                   "-p", "no:cacheprovider", "--timeout", "7200", f"--junitxml={junit}",
                   f"--hypothesis-seed={seed}", "-n", str(args.workers), "--dist", "worksteal",
                   *tests]  # fmt: skip
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **settings, "SNAPSTORE_TEST_TALLY": folder}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        counts: Counter[str] = Counter()
        for file in Path(folder).glob("*.json"):
            counts.update(json.loads(file.read_text()))
        skips = skips_of(junit)
    took = time.monotonic() - began
    lines = done.stdout.splitlines()
    print(f"         {lines[-1] if lines else 'no output'}; {dict(counts)}, {took:.0f} s", flush=True)
    report["tried"] = dict(Counter(report["tried"]) + counts)
    report["runs"][name] = report["runs"].get(name, 0) + 1
    report["seconds"] = round(report["seconds"] + took, 1)
    faults = [f"skipped {n} tests: {why}" for why, n in skips.items() if why not in ALLOWED_SKIPS.get(name, ())]
    faults += ["it tried nothing"] * (not counts)
    if done.returncode or faults:
        shown = " ".join(f"{key}={value}" for key, value in settings.items())
        again = f"{shown} python -m pytest --hypothesis-seed={seed} {shlex.join(tests)}"
        with tempfile.NamedTemporaryFile("w", prefix=f"torture-{seed}-", suffix=".txt", delete=False) as whole:
            whole.write(done.stdout)
        print("\n".join([done.stdout[-6000:], *faults, f"all of it: {whole.name}"]), flush=True)
        report["failed_runs"] += 1
        said = [line for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))] + faults
        failure = {"harness": name, "seed": seed, "again": again, "said": said[:20] or lines[-5:]}
        report["failures"] = [*report["failures"], failure][-FAILURES_KEPT:]
    report.setdefault("last", {})[name] = {
        "commit": commit, "seed": seed, "seconds": round(took, 1), "tried": dict(counts), "skipped": dict(skips),
        "failed": bool(done.returncode or faults),
    }  # fmt: skip
    if commit not in report["commits"]:
        report["commits"].append(commit)
    report |= {
        "date": time.strftime("%Y-%m-%d"), "snapstore": snapstore.__version__, "python": platform.python_version(),
        "cores": os.cpu_count(),
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def skips_of(junit: Path) -> Counter[str]:
    """Return how many tests pytest's report says were skipped, by reason; the report is missing if pytest died."""
    if not junit.exists():
        return Counter()
    skips = ElementTree.parse(junit).iter("skipped")
    return Counter(skip.get("message", "") for skip in skips if skip.get("type") == "pytest.skip")


def commit_of() -> str:
    """Return the commit under test, and whether the files differ from it."""
    git = functools.partial(subprocess.run, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
    head = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip() or "unknown"
    return head + "-dirty" * bool(git(["git", "status", "--porcelain", "snapstore", "tests", "tools"]).stdout)


def print_report(report: dict[str, Any]) -> None:
    """Print the result so far."""
    for kind, count in sorted(report["tried"].items()):
        print(f"{count:>12,}  {kind}")
    print(f"{report['failed_runs']} of {sum(report['runs'].values())} runs failed, {report['seconds'] / 3600:.2f} h")


if __name__ == "__main__":
    main()
