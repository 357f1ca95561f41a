"""If a state on a device changes while it is saved, no mixed values are committed (see tests/kit/changes.py)."""

import sys

import pytest
import torch

from kit import changes
from kit.samples import THOROUGH, sampled
from snapstore import InvalidInputError

if torch.cuda.is_available():  # they import CuPy
    from snapstore.engine.cuda import engine, kernels, staging

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = {
    "repository": None,
    "synchronous": {"async_save": False},
    "asynchronous, device": {"staging": "device"},
    "asynchronous, host": {"staging": "host"},
}
NAMES = [
    "data: fewer", "data: more", "data: empty", "data: other dtype, as large", "data: half, of a parameter",
    "data: other shape, as large", "data: same form", "data: contiguous", "data: fewer, of a strided one",
    "data: conjugated", "data: swapped, and the old one overwritten", "resize_: fewer", "storage: freed",
    "storage: cut", "set_: other", "transposed in place", "transposed in place, of a strided one",
    "untied, and changed", "empty: more", "0-dim: other dtype",
]  # fmt: skip
#: Storages of the CPU that plays a GPU cannot be resized.
CAN_FREE = "kit.fake_cuda" not in sys.modules


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    for name in ("BATCH_BYTES", "MIN_BATCH_BYTES"):
        monkeypatch.setattr(engine, name, changes.BATCH_BYTES)


def watched():
    found = [(staging, name) for name in ("copy_async", "as_memory", "copy_into", "_host_rooms")]
    found += [(staging.DeviceStaging, name) for name in ("_begin", "_address", "_copy_small", "_rooms", "_gather")]
    names = ("load", "start_examine", "start_digests", "start_encode", "sync")
    return found + [(engine.CudaEngine, name) for name in names]


@pytest.mark.parametrize("by", ["kernels", "torch"])
@pytest.mark.parametrize("mode", [*MODES, "not recognised"])
def test_a_change_at_any_moment(monkeypatch, mode, by):
    """The copies are made by kernels, or by torch, as long as the kernels are not loaded."""
    kernels.wait_loaded(torch.cuda.current_device())
    if by == "torch":
        monkeypatch.setattr(staging.kernels, "loaded", lambda device: False)
    every = {**changes.CHANGES, **changes.OF_FEW}
    cases = [(name, rows) for name in NAMES for rows in (changes.MIDDLE, changes.SMALL)]
    always = {cases.index(("storage: freed", rows)) for rows in (changes.MIDDLE, changes.SMALL)} if CAN_FREE else set()
    with changes.Runs(MODES.get(mode, {}), "cuda", watched(), recognise=mode in MODES) as runs:
        for number in always | {*sampled(len(cases), 4)}:
            name, rows = cases[number]
            total = runs.moments(every[name], rows)
            for at in range(total) if THOROUGH or number in always else sampled(total, 1 + total // 3):
                runs.run(every[name], rows, at)
    assert runs.refused
    assert runs.committed


@pytest.mark.parametrize("mode", ["asynchronous, device", "asynchronous, host"])
def test_another_form_at_the_same_address(mode):
    """A strided tensor of a recognised state is copied in the form that was recognised, or not at all."""
    change = changes.CHANGES["transposed in place, of a strided one"]
    with changes.Runs(MODES[mode], "cuda", watched()) as runs:
        for at in range(runs.moments(change, changes.SMALL)):
            runs.run(change, changes.SMALL, at)
    assert runs.refused
    assert runs.committed


@pytest.mark.parametrize("mode", ["asynchronous, device", "asynchronous, host"])
def test_the_save_after_a_change(mode):
    """After a change while a save learns the structure of a state, the next save stores its unchanged state exactly."""
    change = changes.CHANGES["data: contiguous"]
    with changes.Runs(MODES[mode], "cuda", watched()) as runs:
        for at in range(2 * runs.moments(change, changes.SMALL)):  # a save that learns the structure has more moments
            runs.run(changes.CHANGES["data: half"], changes.SMALL, changes.NEVER)  # so the next save learns
            runs.run(change, changes.SMALL, at)
            runs.run(change, changes.SMALL, changes.NEVER)


def test_a_device_is_waited_for_before_its_memory_is_copied():
    """A synchronous save waits for the work that is still running on the caller's stream."""
    with changes.Runs(None, "cuda") as runs:
        for _ in range(3):
            w = torch.zeros(300, 300, device="cuda")
            for _ in range(50):
                w = w @ w + 1
            runs.repository.save({"w": w}, run="a", step=0)
            assert torch.equal(runs.repository.restore("a@0")["w"], w.cpu())


@pytest.mark.parametrize("back", [False, True])
def test_values_that_change_during_a_synchronous_save(monkeypatch, back):
    """If values change between digest and encoding, no chunk is stored under the digest of other bytes.

    The save fails. If the values change back before it ends, it commits them.
    """
    w = changes.numbers(changes.MIDDLE, device="cuda")
    before, encode = w.clone(), engine.CudaEngine.start_encode

    def changed(self, batch):
        w.add_(1)
        torch.cuda.synchronize()
        finish = encode(self, batch)

        def finished():
            made = finish()
            if back:
                w.copy_(before)
                torch.cuda.synchronize()
            return made

        return finished

    with changes.Runs(None, "cuda") as runs, monkeypatch.context() as patch:
        patch.setattr(engine.CudaEngine, "start_encode", changed)
        if back:
            runs.repository.save({"w": w}, run="a", step=0)
            assert changes.image(runs.repository.restore("a@0")["w"]) == changes.image(before)
        else:
            with pytest.raises(InvalidInputError, match=r"w: was changed while it was saved.*got other values"):
                runs.repository.save({"w": w}, run="a", step=0)
            assert runs.repository.snapshots() == []


@pytest.mark.parametrize("stage", ["start_digests", "start_encode"])
def test_memory_that_is_freed_while_a_synchronous_save_reads_it(monkeypatch, stage):
    """The save fails, and no kernel reads the freed memory: that would end all CUDA work of the process."""
    w = torch.arange(300_000.0, device="cuda")
    real = getattr(engine.CudaEngine, stage)

    def freed(self, batch):
        w.untyped_storage().resize_(0)
        return real(self, batch)

    with changes.Runs(None, "cuda") as runs:
        with monkeypatch.context() as patch:
            patch.setattr(engine.CudaEngine, stage, freed)
            with pytest.raises(InvalidInputError, match=r"^w: was changed while it was saved"):
                runs.repository.save({"w": w}, run="a", step=0)
        assert not runs.repository.snapshots()
        w = torch.arange(300_000.0, device="cuda")
        runs.repository.save({"w": w}, run="a", step=0)
        assert torch.equal(runs.repository.restore("a@0")["w"], w.cpu())
