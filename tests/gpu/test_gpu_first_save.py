"""The first saves of a process are right while kernels load, and if they cannot load; memory is locked ahead."""

import threading

import pytest
import torch

from kit.gpu_states import differing, drift, every_dtype, facts, floats, manager, typed
from snapstore import CapabilityError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():  # it imports CuPy
    from snapstore.engine.cuda import kernels
    from snapstore.engine.cuda import pinned as pinned_memory


def mixed(seed):
    """Return a state of large, small, strided, empty and host tensors."""
    large = floats(300_000, seed, "cuda")
    return {
        "a": large, "b": typed("bfloat16", (90_001,), seed + 1, "cuda", "floats"), "small": large[:10].clone(),
        "strided": floats(60_000, seed + 2, "cuda").view(200, 300).t(), "empty": large[:0].clone(),
        "host": floats(50_000, seed + 3, "cpu"), "scalar": torch.tensor(1.5), "n": seed,
    }  # fmt: skip


@pytest.fixture
def loading(monkeypatch):
    """Delay the loading of kernels until the event is set. If the event has an error, loading raises it."""
    held, real = threading.Event(), kernels._load
    held.error = None

    def load(device):
        assert held.wait(60)
        if held.error:
            raise held.error
        real(device)

    monkeypatch.setattr(kernels, "_load", load)
    monkeypatch.setattr(kernels, "_functions", {})
    kernels._loads.clear()
    yield held
    held.error = None
    held.set()
    for load in list(kernels._loads.values()):
        load.ready(60)
    kernels._loads.clear()


@pytest.mark.parametrize("mode", ["device", "host"])
def test_a_save_does_not_wait_for_kernels(loading, mode):
    state = mixed(1)
    wanted = facts(state)
    with manager(mode) as made:
        handle = made.save(0, state)
        assert not kernels.loaded(0)
        assert not handle.done()
        drift(state, 0)
        later = facts(state)
        loading.set()
        handle.result(60)
        made.save(1, state).result(60)
        assert differing(facts(made.restore(0)), wanted) == []
        assert differing(facts(made.restore(1)), later) == []


def test_every_dtype_without_kernels(loading):
    state = every_dtype("cuda", (4097,))
    with manager("device") as made:
        handle = made.save(0, state)
        loading.set()
        handle.result(60)
        assert differing(facts(made.restore(0)), facts(state)) == []


@pytest.mark.parametrize("mode", ["device", "host"])
def test_kernels_that_cannot_be_loaded_are_an_error_if_the_gpu_was_asked_for(loading, mode):
    loading.error = OSError("no NVRTC here")
    with manager(mode) as made:
        handle = made.save(0, mixed(1))
        loading.set()
        with pytest.raises(CapabilityError, match="no NVRTC here"):
            handle.result(60)
        with pytest.raises(CapabilityError, match="no NVRTC here"):
            made.wait_until_finished()


@pytest.mark.parametrize("before", [False, True])
def test_without_kernels_the_cpu_saves_what_lies_on_the_device(loading, caplog, before):
    """The loading may fail while the first save waits for it, or before that save."""
    loading.error = OSError("no NVRTC here")
    state, wanted = mixed(1), []
    with manager("auto") as made:
        if before:
            loading.set()
            assert kernels.start_loading(0).ready(60)
        for step in range(3):
            wanted.append(facts(state))
            handle = made.save(step, state)
            loading.set()
            handle.result(60)
            drift(state, step)
        for step in range(3):
            assert differing(facts(made.restore(step)), wanted[step]) == [], step
    assert sum("compressed on the CPU" in record.getMessage() for record in caplog.records) == 1


@pytest.fixture
def locked(monkeypatch):
    """Record the threads that page-lock memory for copies: one entry for each allocation."""
    threads, real = [], pinned_memory.pinned

    def pinned(nbytes):
        threads.append(threading.current_thread())
        return real(nbytes)

    monkeypatch.setattr(pinned_memory, "pinned", pinned)
    return threads


def saves_lock_nothing(made, state, steps, locked):
    for step in steps:
        before = locked.count(threading.main_thread())
        wanted = facts(state)
        made.save(step, state).result(60)
        made.wait_until_finished()
        assert locked.count(threading.main_thread()) == before, step
        assert differing(facts(made.restore(step)), wanted) == []
        drift(state, step)


def test_prepare_locks_the_memory_of_the_first_save(locked):
    state = {"w": floats(300_000, 1, "cuda"), "v": floats(90_000, 2, "cuda"), "host": floats(50_000, 3, "cpu")}
    with manager("host") as made:
        made.prepare(state)
        made.wait_until_finished()
        assert locked
        saves_lock_nothing(made, state, range(4), locked)


def test_the_first_save_locks_the_memory_of_the_second(locked):
    state = {"w": floats(300_000, 1, "cuda"), "v": floats(90_000, 2, "cuda")}
    with manager("host") as made:
        made.save(0, state).result(60)
        made.wait_until_finished()
        assert threading.main_thread() in locked
        saves_lock_nothing(made, state, range(1, 5), locked)


def test_prepare_for_another_state_than_is_saved(locked):
    with manager("host") as made:
        made.prepare(mixed(1))
        made.prepare({"other": floats(9_000, 1, "cuda")})
        state = mixed(4)
        made.save(0, state).result(60)
        assert differing(facts(made.restore(0)), facts(state)) == []
