"""Layouts of CUDA tensors come back, and a fused optimizer trains on with them as after torch.load."""

import pytest
import torch

from kit.gpu_states import manager
from kit.states import through_torch
from snapstore import Repository
from snapstore.storage.memory import MemoryStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def layouts():
    """Return CUDA tensors of every layout, in chunks and inline; their bytes are in C order in the repository."""
    torch.manual_seed(0)
    return {
        "channels_last": torch.randn(64, 32, 3, 3).to("cuda", memory_format=torch.channels_last),
        "1x1": torch.randn(64, 32, 1, 1).to("cuda", memory_format=torch.channels_last),
        "inline": torch.randn(5, 3).cuda().t(),
        "transposed": torch.randn(3000, 500).to(torch.bfloat16).cuda().t(),
        "permuted": torch.randn(40, 50, 60).cuda().permute(2, 0, 1),
        "in order": torch.randn(300, 400).cuda(),
    }


def on(state, device):
    return {name: value.to(device) for name, value in state.items()}


def forms(state):
    return {name: (v.device.type, v.dtype, v.shape, v.stride(), v.reshape(-1).tolist()) for name, v in state.items()}


@pytest.mark.parametrize("staging", ["device", "host"])
def test_they_come_back_on_each_device(staging):
    state, store = layouts(), MemoryStore()
    with manager(staging, store=store) as snapshots:
        for step in range(3):  # from the second on the state is known
            snapshots.save(step, state).result()
        state["in order"] = state["in order"].t().contiguous().t()
        snapshots.save(3, state).result()
        assert forms(snapshots.restore(3, device="cuda")) == forms(on(through_torch(state), "cuda"))
        state["in order"] = state["in order"].contiguous()
        for step in range(3):
            assert forms(snapshots.restore(step, device="cuda")) == forms(on(through_torch(state), "cuda"))
            assert forms(snapshots.restore(step)) == forms(on(through_torch(state), "cpu"))
            target = {name: torch.zeros_like(value).contiguous() for name, value in state.items()}
            snapshots.restore_into(target, step)
            assert all(torch.equal(target[name], value) for name, value in state.items())


KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True),
    "capturable": lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_optimizer_trains_on(kind):
    """Convolutions of 3x3 and of 1x1 in channels_last."""

    def made():
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 1)]
        net = torch.nn.Sequential(*layers).to("cuda", memory_format=torch.channels_last)
        return net, KINDS[kind](net.parameters())

    def losses(net, optimizer, steps):
        found = []
        for step in steps:
            torch.manual_seed(step)
            batch = torch.randn(2, 8, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)
            loss = (net(batch) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False  # it may choose another algorithm
    torch.use_deterministic_algorithms(True)
    try:
        net, optimizer = made()
        losses(net, optimizer, range(3))
        by_torch = through_torch({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
        with Repository.create(MemoryStore()) as repo:
            repo.save({"net": net, "optimizer": optimizer}, run="r", step=3)
            expected = losses(net, optimizer, range(3, 6))
            for way in ("torch", "restore", "restore_into", "a rollback"):
                if way != "a rollback":
                    net, optimizer = made()
                if way in ("torch", "restore"):
                    state = by_torch if way == "torch" else repo.restore("r@3")
                    net.load_state_dict(state["net"])
                    optimizer.load_state_dict(state["optimizer"])
                else:
                    repo.restore_into("r@3", {"net": net, "optimizer": optimizer})
                assert losses(net, optimizer, range(3, 6)) == expected, way
    finally:
        torch.backends.cudnn.enabled = before
        torch.use_deterministic_algorithms(False)
