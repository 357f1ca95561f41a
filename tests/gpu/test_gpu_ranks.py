"""The boxes and digests that a rank stages on a CUDA device are those of the values when `save` was called."""

import numpy as np
import pytest
import torch

from kit.gpu_states import floats
from snapstore.engine.registry import Engines
from snapstore.save.inputs import inputs_of
from snapstore.save.replicas import digest_arrays, group_digests
from snapstore.save.shares import RankShares
from snapstore.save.staging import Staging
from snapstore.state.walk.flatten import flatten

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def engines():
    made = Engines(7, threads=1)
    if torch.cuda.is_available():
        made.on(torch.device("cuda", torch.cuda.current_device()))  # its kernels are loaded
    yield made
    made.close()


def host(memory, nbytes):
    if isinstance(memory, np.ndarray):
        return memory.tobytes()
    return (memory.array if hasattr(memory, "array") else memory.cpu().numpy())[:nbytes].tobytes()


def state(version):
    return {
        "model": {
            "rows": floats(90_000, version, "cuda").view(300, 300),
            "turned": floats(40_000, version + 1, "cuda").view(200, 200).t(),
            "long": floats(700_000, version + 2, "cuda"),
            "small": floats(10, version + 3, "cuda"),
            "host": floats(5_000, version + 4, "cpu"),
        },
        "step": torch.tensor(float(version)),
    }


@pytest.mark.parametrize("mode", ["device", "host"])
def test_plain_tensors_of_unknown_holders_are_copied_whole_and_cut_later(engines, mode):
    known = RankShares(1, 3, 4096)
    staging = Staging(engines, mode=mode, shares=RankShares(1, 3, 4096, None))
    made = state(1)
    expected = inputs_of(flatten(made, of_rank=True), known)
    wanted = [[(t.key, host(t.data(engines.memory_of), t.spec.nbytes)) for t in part.tensors] for part in expected]
    inputs = staging.copy_state(made)()
    assert sum(t.spec.nbytes for part in inputs for t in part.tensors) == 4 * (90_000 + 40_000 + 705_011)
    with staging.saving(inputs):
        cut = staging.use_holders(inputs, known)
        assert [[(t.key, host(t.copy, t.spec.nbytes)) for t in part.tensors] for part in cut] == wanted
        staging.keep_as_base(cut, "first")


@pytest.mark.parametrize("mode", ["device", "host"])
@pytest.mark.parametrize("rank", [0, 2])
def test_boxes_and_digests(engines, mode, rank):
    shares = RankShares(rank, 3, 64 * 1024)
    staging = Staging(engines, mode=mode, shares=shares)
    recognised = []
    for version in range(4):
        made = state(version)
        expected = inputs_of(flatten(made, of_rank=True), shares)
        wanted = [[(t.key, host(t.data(engines.memory_of), t.spec.nbytes)) for t in part.tensors] for part in expected]
        for part in expected:
            digest_arrays(part.replicas, engines)
        inputs = staging.copy_state(made)
        for value in made["model"].values():
            value.mul_(2)
        inputs = inputs()
        with staging.saving(inputs):
            assert [[(t.key, host(t.copy, t.spec.nbytes)) for t in part.tensors] for part in inputs] == wanted
            got = [group_digests(part.replicas) for part in inputs]
            assert got == [group_digests(part.replicas) for part in expected]
            assert [len(found) for found in got] == [1, 1]
        recognised.append(staging._known)
    assert recognised[0] is not None
    assert all(known is recognised[0] for known in recognised)
