"""A tensor with more elements than an int32 can count saves and restores to the bit."""

import sys

import pytest
import torch

from kit.gpu_states import MIB, OPTIONS, manager, typed
from snapstore.format.chunking import DEFAULT_CHUNK_BYTES

COUNT = 2**31 + 5 * MIB + 5
#: Device memory for the tensor, its copy, its base, the restored tensor, and the engine's work [bytes].
NEEDED_BYTES = 20 * 10**9


def free_bytes():
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("kit.fake_cuda" in sys.modules, reason="too large for a CPU that plays a GPU"),
]


@pytest.mark.parametrize("mode", ["device", "host"])
def test_more_than_two_to_the_31_elements(mode):
    if free_bytes() < NEEDED_BYTES:
        pytest.skip("needs 20 GB of free device memory")
    x = torch.full((COUNT,), 7, dtype=torch.uint8, device="cuda")
    for start in (0, 2**30 - 1, 2**31 - MIB // 2 - 1, COUNT - MIB):  # the third crosses 2**31, the fourth ends at COUNT
        x[start : start + MIB] = typed("uint8", (MIB,), start % 97, "cuda")
    with manager(mode, chunk_bytes=DEFAULT_CHUNK_BYTES, options=OPTIONS) as made:
        first = made.save(0, {"x": x}).result(60)
        assert first.logical_bytes >= COUNT
        got = made.restore(0, device="cuda")["x"]
        assert torch.equal(got, x)
        changed = [2**31, 2**31 + 3 * MIB + 1, 2**31 + 4 * MIB + 100, COUNT - 1]
        for place in changed:
            x[place] ^= 255
        assert not torch.equal(got, x)
        second = made.save(1, {"x": x}).result(60)
        assert second.depth == 1, "the second save stores deltas"
        assert second.new_chunks == len({place // DEFAULT_CHUNK_BYTES for place in changed})
        made.restore_into({"x": got}, 1)
        assert torch.equal(got, x)
        for place in changed:
            x[place] ^= 255
        made.restore_into({"x": got}, 0)
        assert torch.equal(got, x)
