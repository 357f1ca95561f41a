"""Staging holds bases between saves, and drops for a while the base of a tensor whose deltas do not pay."""

import numpy as np
import pytest
import torch

from snapstore import InvalidInputError, Repository, SaveOptions, SnapshotManager
from snapstore.engine.registry import Engines
from snapstore.save import staging
from snapstore.save.staging import Staging
from snapstore.state.flatten import flatten
from snapstore.storage.memory import MemoryStore

OPTIONS = SaveOptions(threads=2)
COUNT = 20_000


def steady(step):
    start = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    return torch.from_numpy(start * np.float32(1 + 1e-5 * step))


def noise(step):
    return torch.from_numpy(np.random.default_rng(100 + step).standard_normal(COUNT).astype(np.float32))


@pytest.fixture
def snapshots(request):
    store = MemoryStore()
    Repository.create(store, chunk_bytes=4096, options=OPTIONS).close()
    with SnapshotManager(store, run="a", options=OPTIONS) as made:
        yield made


def save(snapshots, step, state):
    snapshots.save(step, state).result()
    found = snapshots.repository.restore(f"a@{step}")
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(found[name], value)
    return snapshots.repository.snapshot(f"a@{step}")


def held(snapshots):
    """Names of the tensors whose bytes are held as bases."""
    return {key[1][-1] for key in snapshots._staging._base}


def test_a_tensor_whose_deltas_never_pay_keeps_no_base(snapshots, monkeypatch):
    monkeypatch.setattr(staging, "RETRY_AFTER_SAVES", 3)
    without = []
    for step in range(12):
        save(snapshots, step, {"steady": steady(step), "noise": noise(step)})
        assert "steady" in held(snapshots)
        without.append("noise" not in held(snapshots))
    # tried in save 1 and dropped; not tried in three saves, the last of which keeps it; tried again in the fifth
    assert without == [False, True, True, True, False, True, True, True, False, True, True, True]


def test_dropped_bases_are_used_again_as_room(snapshots):
    for step in range(4):
        save(snapshots, step, {"steady": steady(step), "noise": noise(step)})
    buffers = [*snapshots._staging._base.values(), *snapshots._staging._spare.values()]
    assert len({b.ctypes.data for b in buffers}) == len(buffers) == 3, "two of the steady one, one of the noise"


def test_a_tensor_whose_deltas_pay_again_has_deltas_again(snapshots, monkeypatch):
    """Noise, then steps that are near: after the retry its chunks are deltas; then noise again, and again near."""
    monkeypatch.setattr(staging, "RETRY_AFTER_SAVES", 2)
    depths, unpaid = [], []
    for step in range(24):
        is_noise = step // 6 % 2 == 0
        snapshot = save(snapshots, step, {"w": noise(step) if is_noise else steady(step)})
        depths.append(snapshot.depth)
        unpaid.append(bool(snapshots._staging._delta_rejected))
    assert not any(depths[:6]), depths
    assert all(depths[9:12]), depths
    assert not any(depths[12:18]), depths
    assert all(depths[21:24]), depths
    assert not any(unpaid[10:12])
    first = unpaid.index(True, 12)
    assert first <= 13, "the chunk may be full in its turn, before a delta is tried"
    assert unpaid[first : first + 3] == [True, True, False]


def test_an_unchanged_tensor_is_no_rejected_delta(snapshots):
    for step in range(4):
        save(snapshots, step, {"w": noise(0), "v": steady(step)})
    assert held(snapshots) == {"w", "v"}
    assert not snapshots._staging._delta_rejected


def test_without_deltas_nothing_is_tried_and_nothing_rejected():
    store = MemoryStore()
    options = SaveOptions(threads=2, restore_cost=1.0)
    Repository.create(store, chunk_bytes=4096, options=options).close()
    with SnapshotManager(store, run="a", options=options) as snapshots:
        for step in range(3):
            save(snapshots, step, {"w": noise(step)})
        assert not snapshots._staging._delta_rejected
        assert held(snapshots) == {"w"}


def used(made, state, name):
    """Copy a state, and lend it the bytes of a snapshot."""
    inputs = made.copy(flatten(state))
    made.use_base(inputs, name)
    return [tensor for part in inputs for tensor in part.tensors]


def saved(made, state, name, *, rejected):
    """Copy a state and take it for committed; the deltas of some tensors were rejected."""
    inputs = made.copy(flatten(state))
    tensors = [tensor for part in inputs for tensor in part.tensors]
    for tensor in tensors:
        tensor.bases_tried, tensor.deltas_stored = 1, int(tensor.spec.path[-1] not in rejected)
    with made.saving(inputs):
        made.keep_as_base(inputs, name)
    return tensors


def test_rejected_deltas_are_known_by_name():
    made = Staging(Engines(0, threads=1))
    state = {"a": {"x": noise(0), "y": noise(1)}, "b": {"x": noise(2)}}
    x, y, z = saved(made, state, "0" * 32, rejected={"y"})
    assert [t.may_delta for t in (x, y, z)] == [True, True, True]
    x, y, z = used(made, state, "0" * 32)
    assert [t.may_delta for t in (x, y, z)] == [True, False, True]
    assert y.base is None
    assert np.array_equal(x.base, noise(0).numpy().view(np.uint8))
    assert all(tensor.base is None for tensor in used(made, state, "1" * 32))
    (y,) = used(made, {"a": {"y": noise(1)}}, "0" * 32)
    assert not y.may_delta, "by name, wherever it is now"


def test_a_failed_save_keeps_the_base_and_the_rejected_deltas():
    made = Staging(Engines(0, threads=1))
    saved(made, {"x": noise(0), "y": noise(1)}, "0" * 32, rejected={"x"})
    x, y = used(made, {"x": noise(3), "y": noise(4)}, "0" * 32)  # and no commit
    x, y = used(made, {"x": noise(3), "y": noise(4)}, "0" * 32)
    assert not x.may_delta
    assert np.array_equal(y.base, noise(1).numpy().view(np.uint8))


# --- where copies of CUDA tensors lie


@pytest.mark.parametrize("value", ["gpu", "", None, "Device"])
def test_a_mode_that_is_none_is_named(value):
    with pytest.raises(InvalidInputError, match="expected one of auto, device, host"):
        Staging(Engines(0, threads=1), mode=value)
    store = MemoryStore()
    Repository.create(store).close()
    with pytest.raises(InvalidInputError, match="expected one of auto, device, host"):
        SnapshotManager(store, run="a", staging=value)


@pytest.mark.parametrize("mode", ["auto", "device", "host"])
@pytest.mark.parametrize("async_save", [True, False])
def test_every_mode_saves_host_tensors(mode, async_save):
    store = MemoryStore()
    Repository.create(store, chunk_bytes=4096, options=OPTIONS).close()
    with SnapshotManager(store, run="a", staging=mode, async_save=async_save, options=OPTIONS) as snapshots:
        for step in range(3):
            save(snapshots, step, {"w": steady(step)})
        assert snapshots.repository.snapshot("a@2").depth == 2


def test_a_save_stands_if_no_memory_can_be_taken_for_the_next_one(monkeypatch, caplog):
    def fails(self):
        raise OSError("no memory to lock")

    monkeypatch.setattr(Staging, "prepare_next", fails)
    with SnapshotManager(MemoryStore(), run="a", options=OPTIONS) as snapshots:
        for step in range(2):
            assert snapshots.save(step, {"w": noise(step)}).result(30).step == step
        snapshots.wait_until_finished()
        assert snapshots.all_steps() == [0, 1]
    assert "no memory to lock" in caplog.text
