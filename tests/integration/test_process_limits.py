"""A process that runs out of files or memory gets an error of snapstore, loses nothing, and can save again later."""

import re

import pytest

from kit.processes import run_python
from snapstore import Repository

PROGRAM = """
import os, resource, sys
import numpy as np
from snapstore import SnapshotManager, SnapstoreError
limit, verb, root = sys.argv[1:]
used = int(open("/proc/self/statm").read().split()[0]) * 4096
LIMITS = {
    "files": (resource.RLIMIT_NOFILE, lambda: len(os.listdir("/proc/self/fd")) - 1),
    "memory": (resource.RLIMIT_AS, lambda: int(open("/proc/self/statm").read().split()[0]) * 4096 + (24 << 20)),
}
kind, most = LIMITS[limit]
before = resource.getrlimit(kind)
large = np.broadcast_to(np.arange(256, dtype=np.uint8), (1 << 19, 256))  # 128 MiB in 256 bytes
with SnapshotManager(root, run="a") as snapshots:
    snapshots.save(0, {"w": np.arange(10)}).result()
    if verb == "restore":
        snapshots.save(1, {"w": large}).result()
    resource.setrlimit(kind, (most(), before[1]))
    try:
        snapshots.restore(1) if verb == "restore" else snapshots.save(1, {"w": large}).result()
    except SnapstoreError as error:
        text = type(error).__name__ + ": " + str(error)
    resource.setrlimit(kind, before)
    try:
        snapshots.check_for_errors()
    except SnapstoreError:
        pass
    print(text)
    snapshots.save(2, {"w": np.arange(20)}).result()
    print(*snapshots.all_steps(), snapshots.repository.check("restore").ok)
"""


@pytest.mark.parametrize(
    ("limit", "verb", "says", "steps"),
    [
        ("files", "save", "StorageError: .*too many open files .EMFILE.; raise the limit .ulimit -n.", "0 2"),
        ("files", "restore", "StorageError: .*too many open files .EMFILE.; raise the limit .ulimit -n.", "0 1 2"),
        ("memory", "save", "CapabilityError: save: out of memory .*; nothing was committed", "0 2"),
        ("memory", "restore", "CapabilityError: (restore a@1: out of memory|a@1: restoring 1 tensor: needs)", "0 1 2"),
    ],
)
def test_a_limit_of_the_machine(tmp_path, limit, verb, says, steps):
    done = run_python("-c", PROGRAM, limit, verb, tmp_path / "r")
    assert done.returncode == 0, done.stderr
    text, after = done.stdout.splitlines()
    assert after == f"{steps} True"
    assert re.match(says, text), text


def test_closed_standard_descriptors(tmp_path):
    """No file of snapstore gets the number of a closed output, into which a program may still write."""
    script = """
import os, sys
import snapstore
os.closerange(0, 3)
with snapstore.SnapshotManager(sys.argv[1], run="a") as manager:
    for step in range(4):
        manager.save(step, {"a": [step] * 10_000})
        for number in range(3):
            assert os.readlink(f"/proc/self/fd/{number}") == os.devnull
            os.write(number, b"x" * 5000)
"""
    place = tmp_path / "repository"
    done = run_python("-c", script, place)
    assert done.returncode == 0, done.stderr
    with Repository.open(place) as repository:
        assert not repository.check().problems
        assert [repository.restore(f"a@{step}") for step in range(4)] == [{"a": [step] * 10_000} for step in range(4)]
