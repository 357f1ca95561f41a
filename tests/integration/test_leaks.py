"""After hundreds of saves a process has no more threads and open files than before, and hardly more memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kit.tally import EXAMPLES, tally

#: `tools/torture` asks for twenty times as many: two thousand.
SAVES = 100 * EXAMPLES
#: The first saves fill the pools of the allocators.
WARM_SAVES = 40
MIB = 1024 * 1024

SCRIPT = """
import gc, json, os, sys, threading
import torch
from snapstore import KeepLast, SnapshotManager

def numbers(snapshots):
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:  # without the pages of files: LMDB's are the kernel's to drop
        private = 1024 * next(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))
    return {"bytes": private, "threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")),
            "objects": len(gc.get_objects())}

where, saves, warm, background = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
state = {"w": torch.randn(200, 500), "m": torch.zeros(100_000), "step": 0}
found = []
with SnapshotManager(where, run="r", keep=[KeepLast(3)], async_save=background) as snapshots:
    for step in range(warm + saves):
        if step in (warm, warm + saves // 2):
            snapshots.wait_until_finished()
            found.append(numbers(snapshots))
        state["w"] *= 1.0001
        state["m"][step % 100_000] = step
        state["step"] = step
        snapshots.save(step, state)
        if step % 25 == 24:
            snapshots.wait_until_finished()
            snapshots.repository.gc()
        if step % 20 == 19:
            assert snapshots.restore()["step"] == step
    snapshots.wait_until_finished()
    found.append(numbers(snapshots))
print(json.dumps(found))
"""


@pytest.mark.sampled(1)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("background", [True, False])
def test_many_saves_in_one_process(tmp_path, background):
    arguments = [str(tmp_path / "repository"), str(SAVES), str(WARM_SAVES), str(background)]
    environment = os.environ | {"SNAPSTORE_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=3600, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    warm, half, end = json.loads(done.stdout.splitlines()[-1])
    tally("saves in one process", SAVES)
    about = f"{warm} {half} {end}"
    assert end["files"] <= warm["files"], f"files: {about}"
    assert end["threads"] <= warm["threads"] + 1, (
        f"threads: {about}"
    )  # the pool starts its second one when it is needed
    # The index and the view keep a record of each snapshot: eighteen objects, 4 KB. The rest is noise.
    assert end["objects"] - half["objects"] <= 20 * (SAVES // 2), about
    assert end["bytes"] - half["bytes"] <= 6 * MIB + 8192 * (SAVES // 2), about
