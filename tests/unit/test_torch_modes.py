"""Inside transforms of torch.func, and under FakeTensorMode, tensors may have no memory: each verb refuses them."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from snapstore import InvalidInputError, SnapshotManager, UnsupportedLeafError
from snapstore.storage.memory import MemoryStore

VALUES = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
STATE = {"m": {"w": VALUES, "turned": VALUES.t(), "b": VALUES[0, :3]}, "n": 1}


def transformed(transform):
    def inside(call):
        transform(lambda x: (call(), x.sum())[1])(torch.ones(3))

    return inside


def faked(**options):
    def inside(call):
        with FakeTensorMode(**options):
            call()

    return inside


INSIDE = {
    "grad": transformed(torch.func.grad),
    "vmap": transformed(torch.func.vmap),
    "functionalize": transformed(torch.func.functionalize),
    "fake": faked(),
    "fake, real ones allowed": faked(allow_non_fake_inputs=True),
}


@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("async_save", [False, True])
def test_no_verb_reads_or_writes_tensors_without_memory(inside, async_save):
    """Some of these saves committed other bytes, without an error."""
    with SnapshotManager(MemoryStore(), run="a", async_save=async_save) as snapshots:
        snapshots.save(0, STATE).result(60)
        lazy = snapshots.repository.tensors("a@0")["m.turned"]
        target = {"m": {"w": torch.zeros(60, 100), "turned": torch.zeros(100, 60), "b": torch.zeros(3)}, "n": 0}
        calls = [
            lambda: snapshots.save(1, STATE),
            lambda: snapshots.restore(0),
            lambda: snapshots.restore_into(target),
            lambda: lazy[:3],
        ]

        def refused():
            for call in calls:
                with pytest.raises(
                    InvalidInputError, match=r"(call it outside of the transform|leave the mode first)$"
                ):
                    call()

        inside(refused)
        assert [one.step for one in snapshots.repository.snapshots()] == [0]
        assert not target["m"]["w"].any()
        snapshots.save(1, STATE).result(60)
        for step in (0, 1):
            assert all(torch.equal(value, STATE["m"][name]) for name, value in snapshots.restore(step)["m"].items())


def kept(transform):
    found = []
    transform(lambda x: (found.append(x), x.sum())[1])(torch.ones(3))
    return found[0]


def fake():
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    "make",
    [lambda: kept(torch.func.grad), lambda: kept(torch.func.vmap), lambda: kept(torch.func.functionalize), fake],
    ids=["grad", "vmap", "functionalize", "fake"],
)
def test_tensors_that_leave_a_transform_or_a_mode_are_named(make):
    value = make()
    advice = r"m\.w: .*(pass the result of the transform|make the state outside of FakeTensorMode)"
    with SnapshotManager(MemoryStore(), run="a") as snapshots:
        with pytest.raises(UnsupportedLeafError, match=advice):
            snapshots.save(0, {"m": {"w": value}})
        snapshots.save(0, {"m": {"w": torch.ones(3)}}).result(60)
        with pytest.raises(InvalidInputError, match=advice):
            snapshots.restore_into({"m": {"w": value}})
        assert torch.equal(snapshots.restore(0)["m"]["w"], torch.ones(3))
