"""A process loads nothing for the GPU before its first CUDA tensor. It may fork, or exit while a save runs."""

import pytest
import torch

from kit.gpu_states import python

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HOST_ONLY = """
import json, sys
import snapstore
assert "torch" not in sys.modules
import numpy as np
import torch
from snapstore import Repository, RngState, SnapshotManager
state = {"w": torch.arange(100_000.0), "a": np.arange(5000), "s": torch.ones(3), "rng": RngState()}
with SnapshotManager(sys.argv[1], run="r") as snapshots:
    for step in range(3):
        snapshots.save(step, state)
        state["w"] += 1
    snapshots.restore_into(state, 1)
    assert state["w"][5] == 6
with Repository.open(sys.argv[1]) as repository:
    assert repository.restore("r@2")["w"][5] == 7
    assert repository.check("restore").ok
loaded = [name for name in ("cupy", "nvidia.libnvcomp") if name in sys.modules]
print(json.dumps([*loaded, torch.cuda.is_initialized()]))
"""

FIRST_TENSOR = """
import json, sys
import torch
from snapstore import SnapshotManager
with SnapshotManager(sys.argv[1], run="host") as snapshots:
    assert "cupy" not in sys.modules, "there is no tensor on a device yet"
state = {"w": torch.arange(100_000.0, device="cuda")}
with SnapshotManager(sys.argv[1], run="r") as snapshots:
    assert "cupy" in sys.modules, "it loads the kernels in the background"
    snapshots.save(0, state)
    state["w"].zero_()
    got = snapshots.restore(0, device="cuda")["w"]
    assert torch.equal(got, torch.arange(100_000.0, device="cuda"))
    snapshots.save(1, state)
print(json.dumps(True))
"""

LEFT_OPEN = """
import json, sys
import torch
from snapstore import Repository, SaveOptions, SnapshotManager
options = SaveOptions(codec="ans")
snapshots = SnapshotManager(sys.argv[1], run="r", options=options)
state = {"w": torch.arange(300_000.0, device="cuda"), "s": torch.ones(3, device="cuda")}
snapshots.save(0, state)
snapshots.restore(0)
state["w"] *= 1.001
print(json.dumps(True), flush=True)
snapshots.save(1, state)  # the interpreter's exit waits for it
"""


FORKED = """
import gc, json, os
import numpy as np
import torch
from snapstore.engine.cuda.pinned import PinnedBuffers
torch.zeros(1, device="cuda")
SIZE = 64 * 1024 * 1024
buffers = PinnedBuffers(8 * SIZE)
buffers.give(buffers.take(SIZE))
child = os.fork()
if child == 0:
    own = [np.ones(SIZE // 2, np.uint8) for _ in range(8)]
    buffers.clear()
    gc.collect()
    os._exit(sum(int(memory.sum()) for memory in own) != 4 * SIZE)
print(json.dumps(os.waitpid(child, 0)[1]))
"""

IMPORTS = """
import json, sys, threading
import torch
from snapstore import SaveOptions, SnapshotManager
found = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            found.append(name)
sys.meta_path.insert(0, Finder())
state = {"w": torch.arange(100_000.0, device="cuda")}
options = SaveOptions(codec=sys.argv[2])
with SnapshotManager(sys.argv[1], run="r", staging=sys.argv[3], options=options) as snapshots:
    for step in range(3):
        snapshots.save(step, state)
        state["w"] += 1
    snapshots.restore(1, device="cuda")
    snapshots.restore(1)
print(json.dumps(found))
"""


def test_no_cuda_before_a_cuda_tensor_is_seen(tmp_path):
    assert python(HOST_ONLY, tmp_path / "repo", gpu=True) == [False]


def test_a_process_of_its_own(tmp_path):
    """A new process saves and restores CUDA tensors without the preparation of these tests (conftest.py)."""
    assert python(FIRST_TENSOR, tmp_path / "repo", gpu=True)


def test_a_process_that_ends_during_a_save(tmp_path):
    from snapstore import Repository

    assert python(LEFT_OPEN, tmp_path / "repo", gpu=True)
    with Repository.open(tmp_path / "repo") as repository:
        assert [s.step for s in repository.snapshots()] == [0, 1]
        expected = torch.arange(300_000.0, device="cuda") * 1.001
        assert torch.equal(repository.restore("r@1", device="cuda")["w"], expected)


def test_a_forked_child_lets_go_of_pinned_memory():
    """A child has none of the pinned pages. If it drops their arrays, it keeps its own memory at these addresses."""
    assert python(FORKED, gpu=True) == 0


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("codec", ["portable", "ans"])
def test_no_module_is_first_imported_in_the_background(tmp_path, codec, staging):
    """No thread is the first to import a module: a child forked meanwhile could never import it (threads.py)."""
    assert python(IMPORTS, tmp_path / "repo", codec, staging, gpu=True) == []
