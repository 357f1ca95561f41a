"""A save never commits mixed values, whatever changes its state at whatever moment (tests/kit/changes.py)."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from kit import changes
from kit.repositories import OPTIONS
from kit.samples import THOROUGH, sampled, some
from snapstore import InvalidInputError, Repository, SaveOptions, SnapshotManager
from snapstore.engine.cpu import CpuEngine
from snapstore.save import known_state
from snapstore.storage.memory import MemoryStore

EVERY = {**changes.CHANGES, **changes.OF_FEW}


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    monkeypatch.setattr(CpuEngine, "batch_bytes", changes.BATCH_BYTES)
    monkeypatch.setattr(known_state, "COPIED_BY_TORCH_BYTES", 4 * changes.LARGE**2)


@pytest.mark.parametrize(
    ("mode", "recognise"), some([*((mode, True) for mode in changes.MODES), ("asynchronous", False)], 1)
)
def test_a_change_at_any_moment(mode, recognise):
    """Either an error that names the array, and nothing committed; or arrays that are whole, as before or after."""
    sizes = (changes.LARGE, changes.MIDDLE, changes.SMALL)
    cases = [(name, rows) for name in EVERY for rows in (sizes if name in changes.CHANGES else (1,))]
    always = cases.index(("storage: freed", changes.LARGE))  # refused at any moment
    totals: dict[object, int] = {}
    with changes.Runs(changes.MODES[mode], recognise=recognise) as runs:
        for number in {always, *sampled(len(cases), 6)}:
            name, rows = cases[number]
            kind = (EVERY[name].make, rows, EVERY[name].writes)
            if kind not in totals:
                totals[kind] = runs.moments(EVERY[name], rows)
            # most errors are possible while arrays are taken, between flatten and the first batch
            early = range(min(totals[kind], 24))
            for at in range(totals[kind]) if THOROUGH else {*sampled(len(early), 12), *sampled(totals[kind], 60)}:
                runs.run(EVERY[name], rows, at)
    assert runs.refused > 10
    assert runs.committed > 10


@pytest.mark.parametrize("mode", changes.MODES)
@pytest.mark.parametrize("name", ["data: half", "data: other dtype, as large", "storage: freed", "array: other dtype"])
def test_a_change_by_a_later_object(name, mode):
    """The original bug: the array has been flattened, and then another object's state_dict() changes it."""
    with changes.Runs(changes.MODES[mode], recognise=False) as runs:
        last = runs.flattened(EVERY[name], changes.MIDDLE)
        runs.run(EVERY[name], changes.MIDDLE, last)
        assert runs.refused == 1


@pytest.mark.parametrize("async_save", [True, False])
def test_a_thread_that_swaps_all_the_time(async_save):
    """Every snapshot holds one of the forms, whole."""
    forms = [changes.numbers(n, seed=n) for n in (100, 99, 3)]
    forms += [forms[0].half(), forms[0].view(torch.int32) + 1, forms[0].t().contiguous() + 1, torch.empty(0)]
    allowed = [changes.image(form) for form in forms]
    w, over = forms[0].clone(), threading.Event()

    def swap():
        for form in itertools.cycle(forms):
            if over.is_set():
                return
            w.data = form.clone()

    thread = threading.Thread(target=swap)
    store = MemoryStore()
    refused = 0
    Repository.create(store, chunk_bytes=changes.CHUNK_BYTES, options=OPTIONS).close()
    with SnapshotManager(store, run="a", async_save=async_save, options=OPTIONS) as snapshots:
        thread.start()
        try:
            for step in range(1000 if THOROUGH else 60):
                try:
                    snapshots.save(step, {"w": w, "n": np.ones(9)})
                except InvalidInputError as error:
                    assert str(error).startswith("w: ")  # noqa: PT017
                    refused += 1
        finally:
            over.set()
            thread.join()
        snapshots.wait_until_finished()
        steps = snapshots.all_steps()
        assert len(steps) + refused == step + 1
        for step in steps:
            assert changes.image(snapshots.restore(step)["w"]) in allowed


@pytest.mark.parametrize("verify", ["off", "sample"])
def test_a_change_that_is_taken_back(monkeypatch, verify):
    """Digested, changed, encoded, changed back: what is encoded is what was digested, whatever the memory held."""
    w = np.random.default_rng(0).integers(0, 256, 8000, np.uint8)  # one batch
    before, encode = w.copy(), CpuEngine.start_encode

    def changed(self, batch):
        w[:] = ~before
        finish = encode(self, batch)

        def finished():
            made = finish()
            w[:] = before
            return made

        return finished

    monkeypatch.setattr(CpuEngine, "start_encode", changed)
    options = SaveOptions(pack_bytes=4096, threads=1, verify_writes=verify)
    with Repository.create(MemoryStore(), chunk_bytes=changes.CHUNK_BYTES, options=options) as repository:
        repository.save({"w": w}, run="a", step=0)
        assert (repository.restore("a@0")["w"] == before).all()
        assert repository.check("restore").ok


def test_a_tensor_whose_storage_is_too_short_is_refused():
    """A save would read, and a restore would write, beyond the storage."""
    for rows, strided in itertools.product((changes.LARGE, changes.SMALL), (False, True)):
        w = changes.numbers(rows).t() if strided else changes.numbers(rows)
        w.untyped_storage().resize_(w.nbytes - 1)
        state = {"m": {"w": w}}
        with Repository.create(MemoryStore()) as repository:
            with pytest.raises(InvalidInputError, match=r"m\.w: tensor whose storage was freed, or cut short"):
                repository.save(state, run="a", step=0)
            repository.save({"m": {"w": changes.numbers(rows)}}, run="a", step=0)
            with pytest.raises(InvalidInputError, match=r"m\.w.*storage was freed, or cut short"):
                repository.restore_into("a@0", state)


@pytest.mark.parametrize("async_save", [True, False])
def test_the_error_says_what_was_expected_and_found(async_save):
    w = changes.numbers(changes.MIDDLE)

    class Ema:
        def state_dict(self):
            w.data = w.half()
            return {"decay": 0.9}

        def load_state_dict(self, state): ...

    said = (
        r"^model\.w: was changed while it was saved .*: expected tensor float32\[33, 33\] as it was, got tensor "
        r"float16\[33, 33\]; nothing was committed; save again"
    )
    with SnapshotManager(MemoryStore(), run="a", async_save=async_save) as snapshots:
        with pytest.raises(InvalidInputError, match=said):
            snapshots.save(0, {"model": {"w": w}, "ema": Ema()})
        assert snapshots.all_steps() == []
        snapshots.save(1, {"model": {"w": w}})
        snapshots.wait_until_finished()
        assert torch.equal(snapshots.restore(1)["model"]["w"], w)
