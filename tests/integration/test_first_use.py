"""Threads that are the first to use snapstore in a process, all at once, neither crash it nor give a wrong answer.

Modules are imported, structs prepared and caches filled at their first use. So each process here is a new one.
"""

from __future__ import annotations

import pytest

from kit.processes import ROOT, run_python
from kit.repositories import save
from kit.samples import SEED, THOROUGH
from kit.tally import tally
from snapstore import Repository

PROGRAM = """
import faulthandler, importlib, pkgutil, random, sys, threading, traceback
from snapstore import KeepLast, Repository, SnapshotManager

faulthandler.enable()
sys.setswitchinterval(1e-6)
url, seed = sys.argv[1], int(sys.argv[2])


def reads(verb):
    def read(number):
        with Repository.open(url) as repository:
            return verb(repository)
    return read


def saves(number):
    import numpy as np
    run, state = f"own{number}", {"x": np.arange(5000) + number, "step": number}
    with SnapshotManager(url, run=run, keep=[KeepLast(2)]) as snapshots:
        snapshots.save(1, state)
        snapshots.wait_until_finished()
        found = snapshots.restore()
    assert (found["x"] == state["x"]).all() and found["step"] == number, found
    return "saved"


VERBS = {
    "log": (reads(lambda r: [s.step for s in r.snapshots("a")]), [0, 1, 2]),
    "restore": (reads(lambda r: r.restore("a@1")["version"]), 1),
    "tensors": (reads(lambda r: len(list(r.named_tensors("a@2")))), 4),
    "diff": (reads(lambda r: len(r.diff("a@0", "a@1").tensors)), 4),
    "check": (reads(lambda r: r.check("restore").problems), []),
    "policies": (reads(lambda r: r.policies("a")), []),
    "save": (saves, "saved"),
}
names = random.Random(seed).choices(list(VERBS), k=8)
if seed % 2:  # all alike
    names = names[:1] * 8
if seed % 4 > 1:  # all but the first use of modules
    for folder in ("catalog", "check", "chunks", "format", "inspect", "protocol", "restore", "save", "state"):
        for module in pkgutil.walk_packages([f"{sys.argv[3]}/{folder}"], f"snapstore.{folder}."):
            importlib.import_module(module.name)
barrier, failed = threading.Barrier(8), []


def run(number):
    try:
        verb, expected = VERBS[names[number]]
        barrier.wait()
        got = verb(number)
        assert got == expected, (names[number], got, expected)
    except BaseException:
        failed.append(traceback.format_exc())


threads = [threading.Thread(target=run, args=[number]) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(names, *failed)
sys.exit(bool(failed))
"""


@pytest.mark.timeout(1800)
def test_the_first_use_is_by_eight_threads_at_once(tmp_path):
    url = str(tmp_path / "repository")
    with Repository.create(url) as repository:
        for step in range(3):
            save(repository, "a", step, step)
    for number in range(100 if THOROUGH else 2):
        tally("processes of first uses")
        env = {"SNAPSTORE_CACHE_DIR": str(tmp_path / f"cache{number}"), "OMP_NUM_THREADS": "1"}
        done = run_python("-c", PROGRAM, url, SEED + number, ROOT / "snapstore", **env)
        assert done.returncode == 0, f"{done.returncode}: {done.stdout[-3000:]} {done.stderr[-3000:]}"
