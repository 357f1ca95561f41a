"""Tensors of a device that have not changed are not copied: their digests, taken in place, are enough."""

import gc
import random

import pytest
import torch

from kit.gpu_states import MIB, differing, facts, floats, manager
from kit.objects import keys_of
from kit.samples import SEED
from snapstore import IntegrityError
from snapstore.storage.memory import MemoryStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = pytest.mark.parametrize("mode", ["device", "host"])


def lora():
    """A state of which little is trained."""
    frozen = {f"layer{i}": floats(8192, i, "cuda") for i in range(6)}
    return {"model": frozen, "adapter": floats(2000, 9, "cuda"), "step": torch.zeros((), device="cuda")}


def train(state):
    state["adapter"].mul_(1.001).add_(0.5)
    state["step"] += 1


def copied(made):
    """Return the names of the tensors that the last save has copied and kept as bases."""
    return {key[1][-1] for key in made._staging._base}


def never_copied(made):
    """Return the names of the tensors that the next save will not copy if they are unchanged."""
    return {key[1][-1] for key in made._staging._unchanged._keys}


@pytest.fixture
def watched(monkeypatch):
    """Record the bytes that each save copies."""
    from snapstore.engine.cuda.staging import DeviceStaging

    seen, real = [], DeviceStaging.copy

    def copy(self, sources, *args):
        seen.append(int(sources.nbytes.sum()))
        return real(self, sources, *args)

    monkeypatch.setattr(DeviceStaging, "copy", copy)
    return seen


@MODES
def test_what_is_frozen_is_copied_once(mode, watched):
    state, wanted = lora(), []
    whole, own = sum(t.nbytes for t in [*state["model"].values(), state["adapter"], state["step"]]), 8004
    with manager(mode) as made:
        for step in range(5):
            wanted.append(facts(state))
            made.save(step, state)
            train(state)
        made._background.join()
        assert copied(made) <= ({"adapter"} if mode == "device" else {"adapter", *state["model"]})
        assert [made.restore(step) and differing(facts(made.restore(step)), wanted[step]) for step in range(5)] == [
            []
        ] * 5
    assert watched == [whole, own, own, own, own]


@MODES
def test_a_dense_state_is_compared_once(mode, watched):
    """If nothing is frozen, later saves take no digests in place, so `save` does not wait for the device."""
    state = {"a": floats(MIB // 64, 1, "cuda"), "b": floats(MIB // 64, 2, "cuda")}
    with manager(mode) as made:
        for step in range(4):
            made.save(step, state).result()
            assert made._staging._unchanged.tries_all == (step == 0)
            for value in state.values():
                value.mul_(1.001)
        assert not never_copied(made)
    assert watched == [MIB // 8] * 4


@MODES
@pytest.mark.parametrize("change", ["one element", "all", "other memory"])
def test_a_frozen_tensor_that_changes_is_copied_again(mode, change, watched):
    state, wanted = lora(), []
    with manager(mode) as made:
        for step in range(8):
            if step == 4:
                w = state["model"]["layer3"]
                if change == "one element":
                    w[777] = 5.0
                elif change == "all":
                    w.mul_(2)
                else:
                    w.data = w * 3
            wanted.append(facts(state))
            made.save(step, state)
            state["model"]["layer3"][:10] += step == 4  # behind the save: not of this snapshot
            train(state)
        made._background.join()
        for step in range(8):
            assert differing(facts(made.restore(step)), wanted[step]) == [], step
        assert "layer3" in never_copied(made)
        assert mode == "host" or "layer3" not in copied(made)
    if change != "other memory":  # then the state may be one that is not recognised
        assert watched[4:6] == [watched[3], watched[3] + 32_768]  # before, and after the digests were known


@MODES
def test_work_that_was_enqueued_before_the_save_counts(mode):
    """The digests are those after all work that was enqueued before `save`."""
    state = lora()
    with manager(mode) as made:
        for step in range(3):
            made.save(step, state)
            train(state)
        torch.cuda._sleep(100_000_000)
        state["model"]["layer1"].fill_(7)
        made.save(3, state)
        state["model"]["layer1"].fill_(8)
        assert (made.restore(3)["model"]["layer1"] == 7).all()


def test_a_state_that_does_not_change_at_all(watched):
    state = {"w": floats(MIB // 64, 1, "cuda"), "v": floats(MIB // 64, 2, "cuda")}
    with manager() as made:
        for step in range(4):
            made.save(step, state)
        for step in range(4):
            assert differing(facts(made.restore(step)), facts(state)) == []
        state["w"].add_(1)
        made.save(4, state)
        assert differing(facts(made.restore(4)), facts(state)) == []
        assert made.repository.snapshot("r@4").new_chunks == MIB // 16 // 4096
    assert watched == [MIB // 8, 0, 0, 0, 0, MIB // 16]  # the last save: before, and after the digests were known


@MODES
def test_any_tensors_may_change_at_any_step(mode):
    rng = random.Random(SEED)
    state = {f"t{i}": floats(rng.choice([10, 2000, 9000]), i, "cuda") for i in range(10)}
    state["strided"] = floats(2500, 77, "cuda").view(50, 50).t()
    wanted = []
    with manager(mode) as made:
        for step in range(12):
            for value in rng.sample([*state.values()], rng.choice([0, 0, 1, 2, 11])):
                value[rng.randrange(len(value))] += 1
            wanted.append(facts(state))
            made.save(step, state)
            if rng.random() < 0.2:
                state["t3"].add_(1)
        for step in range(12):
            assert differing(facts(made.restore(step)), wanted[step]) == [], (SEED, step)


@MODES
@pytest.mark.parametrize("lost", ["missing", "all"])
def test_the_base_of_what_was_not_copied_is_damaged(mode, lost):
    """Chunks of a base that is gone are stored again, from the tensor that still has them."""
    state, store = lora(), MemoryStore()
    with manager(mode, store=store) as made:
        for step in range(3):
            made.save(step, state).result()
            train(state)
        packs = keys_of(store, "packs/")
        store.delete(packs if lost == "all" else [max(packs, key=lambda key: store.stat(key).size_bytes)])
        wanted = facts(state)
        made.save(3, state).result()
        assert differing(facts(made.restore(3)), wanted) == []


@MODES
def test_the_base_is_damaged_and_the_tensor_has_changed(mode, monkeypatch):
    """No snapshot may name chunks that are not there: the save fails, and the next one copies the tensor."""
    from snapstore.save import pipeline

    state, store = lora(), MemoryStore()
    with manager(mode, store=store) as made:
        for step in range(3):
            made.save(step, state).result()
            train(state)
        real = pipeline.load_bases

        def load(*args, **options):
            store.delete(keys_of(store, "packs/"))
            state["model"]["layer2"].add_(1)
            torch.cuda.synchronize()
            return real(*args, **options)

        monkeypatch.setattr(pipeline, "load_bases", load)
        with pytest.raises(IntegrityError, match=r"layer2: was not copied.*nothing was committed"):
            made.save(3, state).result()
        monkeypatch.undo()
        train(state)
        wanted = facts(state)
        made.save(4, state).result()
        assert differing(facts(made.restore(4)), wanted) == []
        assert [s.step for s in made.repository.snapshots()] == [0, 1, 2, 4]


def test_the_device_memory_is_that_of_what_changes():
    """Beside the first base, which is given back, copies take twice what changes."""
    gc.collect()
    outside = torch.cuda.memory_allocated()  # what earlier tests of this process hold
    state = {"model": floats(4 * MIB, 1, "cuda"), "adapter": floats(MIB // 4, 2, "cuda")}
    with manager(chunk_bytes=MIB) as made:
        for step in range(4):
            made.save(step, state).result()
            made._background.join()
            state["adapter"].mul_(1.001)
        assert sum(m.nbytes for m in made._staging._base.values()) <= MIB
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() - outside
        assert before < 17 * MIB + 2.1 * MIB + MIB, f"{before / 1e6:.0f} MB"


@MODES
@pytest.mark.parametrize("told", ["state", "prepare", "restore_into"])
def test_the_first_save_copies_only_what_no_base_has(mode, told, watched, monkeypatch):
    """A base of the run, or of another run, whose manifests could be read before the first save."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # also where a CPU plays the GPU
    state, store = lora(), MemoryStore()
    with manager(mode, store=store, run="first") as made:
        made.save(0, state).result()
    run = "first" if told == "restore_into" else "second"
    with manager(mode, store=store, run=run, state=state if told == "state" else None) as made:
        if told == "prepare":
            made.prepare(state)
        elif told == "restore_into":
            made.restore_into(state)
        made._background.join()
        watched.clear()
        wanted = []
        for step in range(1, 4):
            train(state)
            wanted.append(facts(state))
            made.save(step, state)
        for step in range(1, 4):
            assert differing(facts(made.restore(step)), wanted[step - 1]) == [], step
        assert made.repository.snapshot(f"{run}@1").stored_bytes < 8004 + 12_000
    assert watched == [8004] * 3


def test_the_other_run_is_gone_when_the_first_save_begins(monkeypatch):
    """A snapshot whose manifests were read ahead may be swept before the first save: the save looks again."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    state, store = lora(), MemoryStore()
    with manager(store=store, run="first") as made:
        made.save(0, state).result()
    with manager(store=store, run="second", state=state) as made:
        made._background.join()
        made.repository.forget_snapshots(["first@0"], force=True)
        made.repository.gc()
        wanted = facts(state)
        made.save(0, state).result()
        assert differing(facts(made.restore(0)), wanted) == []
        assert not made.repository.check("restore").problems
