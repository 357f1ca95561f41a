"""A state on several GPUs of one process saves and restores to the bit."""

import pytest
import torch

from kit.gpu_states import (
    MIB,
    differing,
    drift,
    facts,
    floats,
    manager,
    odd_ones,
    python,
    repository,
    scrambled,
    tensors,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def state_on(*devices):
    state = {f"t{i}": floats(200_000 + i, i, device) for i, device in enumerate(devices * 2)}
    return state | {f"s{i}": floats(9, i, device) for i, device in enumerate(devices)}


@pytest.mark.parametrize("mode", ["device", "host", "auto"])
def test_a_state_on_two_devices(mode):
    state = state_on("cuda:0", "cuda:1", "cpu")
    with manager(mode) as made:
        for step in range(4):
            wanted = facts(state)
            made.save(step, state)
            drift(state, step)
            assert differing(facts(made.restore(step)), wanted) == []
            into = scrambled(state)
            made.restore_into(into, step)
            assert differing(facts(into), wanted) == []
            assert [t.device for t in tensors(into)] == [t.device for t in tensors(state)]
            assert differing(facts(made.restore(step, device="cuda:1")), wanted) == []


def test_a_synchronous_save_of_two_devices():
    state = state_on("cuda:1", "cuda:0")
    with repository() as repo:
        for step in range(3):
            repo.save(state, run="r", step=step)
            assert differing(facts(repo.restore(f"r@{step}", device="cuda:1")), facts(state)) == []
            drift(state, step)


@pytest.mark.parametrize("current", [0, 1])
def test_the_current_device_does_not_matter(current):
    state = odd_ones("cuda:1")
    wanted = facts(state)
    with torch.cuda.device(current), manager("device") as made:
        made.save(0, state).result(60)
        assert torch.cuda.current_device() == current
        assert differing(facts(made.restore(0, device="cuda:1")), wanted) == []
        assert differing(facts(made.restore(0, device="cuda:0")), wanted) == []
        assert torch.cuda.current_device() == current


def test_tensors_that_change_their_device():
    state = {"w": floats(300_000, 1, "cuda:0")}
    with manager("device") as made:
        for step in range(5):
            wanted = facts(state)
            saved = made.save(step, state).result(60)
            assert differing(facts(made.restore(step)), wanted) == []
            drift(state, step)
            state["w"] = state["w"].to(f"cuda:{(step + 1) % 2}")
        assert saved.depth > 0, "a delta to a base that is read back from the store"


def test_streams_of_both_devices():
    w = [torch.zeros(MIB, device=f"cuda:{i}") for i in range(2)]
    streams = [torch.cuda.Stream(i) for i in range(2)]
    with manager("device") as made:
        for step in range(4):
            with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):  # each sets the stream of its own device
                with torch.cuda.device(0):
                    torch.cuda._sleep(50_000_000)
                    w[0].fill_(step)
                with torch.cuda.device(1):
                    torch.cuda._sleep(50_000_000)
                    w[1].fill_(step)
                made.save(step, {"a": w[0], "b": w[1]})
                for value in w:
                    with torch.cuda.device(value.device):
                        value.fill_(-1)
        for step in range(4):
            assert all((value == step).all() for value in made.restore(step).values()), step


def test_two_managers_each_on_its_device():
    makers = [manager("device"), manager("device")]
    states = [state_on(f"cuda:{i}") for i in range(2)]
    for step in range(4):
        wanted = [facts(state) for state in states]
        for made, state in zip(makers, states, strict=True):
            made.save(step, state)
            drift(state, step)
        for made, want in zip(makers, wanted, strict=True):
            assert differing(facts(made.restore(step, device="cuda:0")), want) == []
    for made in makers:
        made.close()


def test_ans_of_two_devices():
    state = state_on("cuda:0", "cuda:1")
    with repository(codec="ans") as repo:
        repo.save(state, run="r", step=0)
        assert differing(facts(repo.restore("r@0", device="cuda:1")), facts(state)) == []
        assert differing(facts(repo.restore("r@0")), facts(state)) == []


OTHER_DEVICE = """
import json, sys
import torch
from snapstore import SnapshotManager
torch.cuda.set_device(1)
state = {"w": torch.arange(300_000.0, device="cuda"), "s": torch.ones(3, device="cuda")}
assert not torch._C._cuda_hasPrimaryContext(0)
with SnapshotManager(sys.argv[1], run="r", staging=sys.argv[2]) as snapshots:
    for step in range(3):
        snapshots.save(step, state)
        state["w"] *= 1.001
    snapshots.restore_into(state, 1)
print(json.dumps(torch._C._cuda_hasPrimaryContext(0)))
"""


@pytest.mark.parametrize("mode", ["device", "host"])
def test_a_process_of_one_device_leaves_the_others_alone(tmp_path, mode):
    """A process that uses only cuda:1 makes no context on cuda:0, though threads use device 0 by default.

    A context takes half a GB, so those of eight ranks on a node would take 4 GB of the first GPU.
    """
    assert python(OTHER_DEVICE, tmp_path / "repo", mode, gpu=True) is False
