"""A program may call torch.set_default_device: snapstore says where its own tensors lie."""

import ast
from pathlib import Path

import pytest
import torch

import snapstore
from snapstore import SnapshotManager
from snapstore.storage.memory import MemoryStore

FACTORIES = {"empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "rand", "randn", "empty_strided", "eye"}


def test_every_tensor_that_snapstore_makes_names_its_device():
    missing = []
    for path in Path(snapstore.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or called.attr not in FACTORIES:
                continue
            if isinstance(called.value, ast.Name) and called.value.id == "torch":
                missing += [] if "device" in {k.arg for k in node.keywords} else [f"{path.name}:{node.lineno}"]
    assert not missing


@pytest.fixture(params=["meta", "with meta"])
def _elsewhere(request):
    if request.param == "meta":
        torch.set_default_device("meta")
        yield
        torch.set_default_device(None)
    else:
        with torch.device("meta"):
            yield


@pytest.mark.usefixtures("_elsewhere")
def test_saves_and_restores_under_another_default_device():
    def numbers(n):
        return torch.arange(n, dtype=torch.float32, device="cpu")

    state = {"m": {"w": numbers(3000), "b": numbers(3)}, "n": 1, "loss": numbers(1)[0]}
    with SnapshotManager(MemoryStore(), run="a", async_save=True) as snapshots:
        for step in range(3):
            snapshots.save(step, state, metrics={"loss": state["loss"]}).result(60)
        restored = snapshots.restore(2)
        assert torch.equal(restored["m"]["w"], state["m"]["w"])
        into = {"m": {"w": torch.zeros(3000, device="cpu"), "b": torch.zeros(3, device="cpu")}, "n": 0, "loss": 0}
        snapshots.restore_into(into, keys=["m"])
        assert torch.equal(into["m"]["w"], state["m"]["w"])
