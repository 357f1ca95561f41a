"""The first saves of a process are right while kernels load, and if they cannot load; memory is locked ahead."""

import gc
import threading
import weakref

import pytest
import torch

from kit.gpu_states import differing, drift, every_dtype, facts, floats, manager, typed
from snapstore import CapabilityError, SnapshotManager, UnsupportedLeafError
from snapstore.storage.memory import MemoryStore

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


@pytest.fixture
def initialized(monkeypatch):
    """Let torch tell that it has initialised CUDA, also where a CPU plays the GPU."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def fresh(seed=0):
    """Return a state on the GPU whose optimizer has no state yet, as before its first step."""
    weights = {f"w{i}": floats(90_000, seed + i, "cuda") for i in range(3)}
    return {"model": weights, "optimizer": {"state": {}}, "loader": Loader()}


def train(state):
    for name, weight in state["model"].items():
        moments = state["optimizer"]["state"].setdefault(name, [torch.zeros_like(weight) for _ in range(2)])
        for number, moment in enumerate(moments):
            moment.mul_(0.9).add_(weight, alpha=number + 1)
        weight.mul_(1.001)


class Loader:
    """A data loader that counts how often it is asked for its state."""

    asked = 0

    def state_dict(self):
        self.asked += 1
        return {"position": self.asked}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("begins", ["restore_into", "fallback", "state", "save off the interval"])
def test_the_first_save_finds_its_memory_locked(initialized, locked, begins):
    """It is locked in the background as soon as the shapes are known, without `prepare`."""
    state, store = fresh(), MemoryStore()
    if begins in ("restore_into", "fallback"):
        train(state)
        with manager("device", store=store) as before:
            before.save(0, state)
        state = fresh(seed=9)
        train(state)
    options = {"state": state} if begins == "state" else {}
    with manager("host", store=store, save_interval_steps=2, **options) as made:
        if begins in ("restore_into", "fallback"):
            assert made.restore_into(state, fallback=begins == "fallback").step == 0
        train(state)
        if begins == "save off the interval":
            assert made.save(1, state).skipped
        elif begins == "state":
            made.wait_until_finished()
            assert len(made._staging._spare) == 3  # of the model
            assert not made.should_save(1)
        made.wait_until_finished()
        assert len(made._staging._spare) == 9
        assert state["loader"].asked == 0, "an early preparation asked a loader for its state"
        for step in (2, 4, 6):
            train(state)
            wanted = facts([state["model"], state["optimizer"]])
            before = locked.count(threading.main_thread())
            made.save(step, state).result(60)
            made.wait_until_finished()
            assert locked.count(threading.main_thread()) == before
            found = made.restore(step)
            assert differing(facts([found["model"], found["optimizer"]]), wanted) == []


@pytest.mark.parametrize("case", ["auto", "device", "read-only", "a part", "keys", "numbers"])
def test_no_memory_is_taken_early_without_need(initialized, case):
    state, store = {"n": 3} if case == "numbers" else fresh(), MemoryStore()
    if case != "numbers":
        train(state)
    with manager("device", store=store) as before:
        before.save(0, state)
    options = {"read_only": case == "read-only", "state": None if case in ("a part", "keys") else state}
    with manager(case if case in ("auto", "device") else "host", store=store, **options) as made:
        if case == "a part":
            made.restore_into(state["model"], part="model")
        else:
            made.restore_into(state, keys="model" if case == "keys" else None)
        made._background.join()
        assert not made._staging._spare


def test_a_full_device_locks_host_memory_early(initialized, locked, monkeypatch):
    monkeypatch.setattr("snapstore.engine.cuda.staging._free_bytes", lambda device: 0)
    with manager("auto", state=fresh()) as made:
        made.wait_until_finished()
        assert locked
        assert threading.main_thread() not in locked


def test_a_state_that_cannot_be_saved_is_refused_when_the_manager_is_made(initialized):
    store = MemoryStore()
    with pytest.raises(UnsupportedLeafError, match="thing"):
        SnapshotManager(store, run="r", staging="host", state={"w": floats(90_000, 1, "cuda"), "thing": object()})
    with SnapshotManager(store, run="r", staging="host") as made:  # the first one has closed
        made.save(0, {"w": floats(90_000, 1, "cuda")}).result(60)


def test_an_early_preparation_neither_waits_nor_raises_the_error_of_a_save(initialized, locked, monkeypatch):
    state = {"w": floats(300_000, 1, "cuda")}
    with manager("host") as made:
        monkeypatch.setattr(made._staging, "use_base", lambda *_: 1 / 0)
        made.save(1, state)
        made._background.join()
        made._prepare_early(state)
        with pytest.raises(ZeroDivisionError):
            made.wait_until_finished()
        with made._background.holding_slot(""):
            before = len(locked)
            threading.Thread(target=made._prepare_early, args=(state,)).start()
            made._prepare_early({"other": floats(300_000, 1, "cuda")})  # the slot is taken: it returns
        assert len(locked) == before


def test_the_expected_state_is_not_held(initialized):
    state = fresh()
    weight = state["model"]["w0"]
    ref = weakref.ref(weight)
    with manager("host", state=state) as made:
        for step in range(2):
            made.save(step, {"w": floats(9_000, step, "cuda")}).result(60)
        made.wait_until_finished()
        del state, weight
        gc.collect()
        assert ref() is None


def test_the_first_save_decides_where_its_copies_lie(initialized, locked, monkeypatch):
    """An early guess that the device is full does not bind it."""
    state = fresh()
    with monkeypatch.context() as patch:
        patch.setattr("snapstore.engine.cuda.staging._free_bytes", lambda device: 0)
        made = manager("auto", state=state)
        made.wait_until_finished()
        assert made._staging._spare
    with made:
        made.save(0, state).result(60)
        made.wait_until_finished()
        assert set(made._staging._devices._modes.values()) == {"device"}
        assert not any(isinstance(one, pinned_memory.Pinned) for one in made._staging._spare.values())
