"""Staging keeps bases between saves. If the deltas of a tensor do not pay, it drops their base for some saves."""

import gc
import os

import numpy as np
import pytest
import torch

from snapstore import InvalidInputError, Repository, SaveOptions, SnapshotManager
from snapstore.engine.registry import Engines
from snapstore.format.chunking import INLINE_BYTES
from snapstore.save import known_state, staging
from snapstore.save.staging import Staging
from snapstore.state.walk.flatten import flatten
from snapstore.state.walk.learner import DifferentStructureError
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
    """Return the names of the tensors whose bytes are held as bases."""
    return {key[1][-1] for key in snapshots._staging._base}


def test_a_tensor_whose_deltas_never_pay_keeps_no_base(snapshots, monkeypatch):
    monkeypatch.setattr(staging, "RETRY_AFTER_SAVES", 3)
    without = []
    for step in range(12):
        save(snapshots, step, {"steady": steady(step), "noise": noise(step)})
        assert "steady" in held(snapshots)
        without.append("noise" not in held(snapshots))
    # save 1 tries deltas, and its base is dropped; saves 2 to 4 try none; save 4 keeps a base, so save 5 tries again
    assert without == [False, True, True, True, False, True, True, True, False, True, True, True]


def test_dropped_bases_are_used_again_as_room(snapshots):
    for step in range(4):
        save(snapshots, step, {"steady": steady(step), "noise": noise(step)})
    buffers = [*snapshots._staging._base.values(), *snapshots._staging._spare.values()]
    assert len({b.ctypes.data for b in buffers}) == len(buffers) == 3, "two buffers of `steady`, one of `noise`"


def test_a_tensor_whose_deltas_pay_again_has_deltas_again(snapshots, monkeypatch):
    """After a retry, a tensor has deltas again as soon as they pay.

    Its values are noise for six steps, then close to each other for six steps, then the same again.
    """
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
    assert first <= 14, "a delta counts as tried only if its base is a full chunk"
    assert unpaid[first : first + 4] == [True, False, True, True], "it waits for one save, then for two"


def test_one_complete_change_costs_one_full_save(snapshots):
    """Weights that change a little in each save are replaced once, and go on to change a little."""
    states = [steady(step) if step < 4 else noise(0) * (1 + 1e-5 * step) for step in range(8)]
    stored = [save(snapshots, step, {"w": state}).stored_bytes for step, state in enumerate(states)]
    assert stored[4] > 0.9 * stored[0]
    assert max(stored[5:]) < 0.8 * stored[0], stored


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
    """Copy a state, lend it the bytes of a snapshot as bases, and return its tensors."""
    inputs = made.copy(flatten(state))
    made.use_base(inputs, name)
    return [tensor for part in inputs for tensor in part.tensors]


def saved(made, state, name, *, rejected):
    """Copy a state and keep it as if committed, with the deltas of some tensors rejected; return its tensors."""
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
    assert not y.may_delta, "a tensor is known by its name, at any position"


def test_a_failed_save_keeps_the_base_and_the_rejected_deltas():
    made = Staging(Engines(0, threads=1))
    saved(made, {"x": noise(0), "y": noise(1)}, "0" * 32, rejected={"x"})
    x, y = used(made, {"x": noise(3), "y": noise(4)}, "0" * 32)  # this save does not commit
    x, y = used(made, {"x": noise(3), "y": noise(4)}, "0" * 32)
    assert not x.may_delta
    assert np.array_equal(y.base, noise(1).numpy().view(np.uint8))


# --- where copies of CUDA tensors lie


@pytest.mark.parametrize("value", ["gpu", "", None, "Device"])
def test_an_invalid_mode_is_refused(value):
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


def test_a_tensor_with_other_strides_than_at_the_match_is_not_read():
    """A copy in parts would mix two forms: another thread may transpose a square tensor at the same address."""
    w = torch.arange(40_000.0).view(200, 200)
    assert w.nbytes >= known_state.COPIED_BY_TORCH_BYTES
    made = Staging(Engines(0, threads=1))
    made.copy_state({"m": {"w": w}})()
    known = made._known
    group, match = known.copied.others, known.structure.match({"m": {"w": w}})
    assert torch.equal(group._taken(match, 0), w)
    w.t_()
    with pytest.raises(DifferentStructureError):
        match.confirm()
    with pytest.raises(DifferentStructureError):
        group._taken(match, 0)


def test_host_tensors_of_every_size_are_copied_whole(snapshots):
    """Tensors are copied in three ways by their size: into the manifest, by their addresses, and by torch."""
    limits = (INLINE_BYTES, known_state.COPIED_BY_TORCH_BYTES)
    sizes = [limit + more for limit in limits for more in (-1, 0, 1)]
    memory = torch.zeros(2 * sum(sizes), dtype=torch.uint8)
    firsts = np.cumsum([0, *sizes])  # so most of them begin at odd addresses
    for step in range(3):
        memory.random_(256)
        state = {f"{size}": memory[first : first + size] for first, size in zip(firsts, sizes, strict=False)}
        state |= {f"{size} float64": torch.full((-(-size // 8),), step + 0.5, dtype=torch.float64) for size in sizes}
        save(snapshots, step, state)


def test_freed_memory_is_not_read(monkeypatch):
    """Another thread may free the memory of a tensor between the match and the copies."""
    w = torch.arange(2000.0)
    made = Staging(Engines(0, threads=1))
    made.copy_state({"m": {"w": w}})()
    known = made._known
    match, reads = known.structure.match({"m": {"w": w}}), []
    monkeypatch.setattr(known_state.Group, "copy_to_host", lambda *given: reads.append(given))
    w.untyped_storage().resize_(0)
    with pytest.raises(DifferentStructureError):
        made._copy_known(known, match)
    assert not reads


@pytest.mark.parametrize("allowed", [True, False])
def test_a_process_that_a_state_dict_forks_collects_garbage_as_the_program_does(snapshots, allowed):
    """The `state_dict` of torchdata's loader may start its workers."""

    class Forks:
        found = None

        def state_dict(self):
            child = os.fork()
            if child == 0:
                os._exit(int(gc.isenabled()))
            self.found = bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return {"n": 1}

        def load_state_dict(self, state):
            pass

    if not allowed:
        gc.disable()
    try:
        for step in range(2):  # the second state has the structure of the first one, which is another path
            loader = Forks()
            snapshots.save(step, {"loader": loader, "w": steady(step)}).result()
            assert loader.found is gc.isenabled() is allowed
    finally:
        gc.enable()
