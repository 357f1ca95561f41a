"""When device memory runs out, training goes on, the snapshot is right, and no memory stays allocated."""

import ctypes
import gc
import logging
import mmap
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from kit.gpu_states import (
    MIB,
    OPTIONS,
    differing,
    drift,
    exhaust,
    facts,
    floats,
    headroom,
    manager,
    moved,
    repository,
    settles,
    tensors,
    typed,
)
from snapstore import Repository, SnapshotManager
from snapstore.engine.batches import Chunks
from snapstore.engine.registry import Engines
from snapstore.save.staging import Staging
from snapstore.state.walk.flatten import flatten
from snapstore.storage.memory import MemoryStore

if torch.cuda.is_available():  # they import CuPy
    import cupy

    from snapstore.engine.cuda import encoding, kernels, staging, streams
    from snapstore.engine.cuda import engine as cuda_engine
    from snapstore.engine.cuda import pinned as pinned_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def state_of(device="cuda"):
    """Return six tensors, each in a segment of its own in torch's allocator."""
    return {str(i): floats(4 * MIB, i, device) for i in range(6)}


def warned(caplog, text):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and text in r.getMessage()]


# --- staging


def test_copies_that_do_not_fit_go_to_the_host(caplog):
    state = state_of()
    wanted = [facts(state)]
    with manager("device", chunk_bytes=MIB) as made:
        with headroom(40 * MIB):
            made.save(0, state).result(120)
            drift(state, 0)
            made.save(1, state).result(120)
        wanted.append(facts(state))
        assert len(warned(caplog, "staging=host from here on")) == 1
        for step in range(2):
            assert differing(facts(made.restore(step, device="cuda")), wanted[step]) == []


def test_memory_that_runs_out_after_some_saves(caplog):
    """If a later save finds no memory, the manager drops the base on the device, and all snapshots are right."""
    state, wanted = state_of(), []
    with manager("device", chunk_bytes=MIB) as made:
        for step in range(4):
            wanted.append(facts(state))
            if step == 2:
                with headroom(24 * MIB):
                    made.save(step, state).result(120)
            else:
                made.save(step, state).result(120)
            drift(state, step)
        assert len(warned(caplog, "staging=host from here on")) == 1
        for step in range(4):
            assert differing(facts(made.restore(step)), wanted[step]) == [], step


@pytest.mark.parametrize("mode", ["device", "host", "auto"])
@pytest.mark.parametrize("kind", ["large", "small", "transposed", "all"])
def test_no_device_memory_at_all(mode, kind):
    """If torch cannot allocate any device memory, `save` does not raise, and the snapshot is right."""
    state = {}
    if kind in ("large", "all"):
        state |= {str(i): floats(MIB, i, "cuda") for i in range(3)}
    if kind in ("small", "all"):
        state |= {f"s{i}": floats(10 + i, i, "cuda") for i in range(4)}
    if kind in ("transposed", "all"):
        state["t"] = floats(600_000, 9, "cuda").view(2000, 300).t()
    wanted = facts(state)
    with manager(mode, chunk_bytes=65_536) as made, headroom(0):
        taken = exhaust()
        made.save(0, state).result(120)
        made.save(1, state).result(120)
        got = [made.restore(step) for step in (0, 1)]
        del taken
    for restored in got:
        assert differing(facts(restored), wanted) == []


def test_a_synchronous_save_without_device_memory():
    state = {"a": floats(MIB, 1, "cuda"), "s": floats(9, 2, "cuda")}
    wanted = facts(state)
    with repository(chunk_bytes=65_536) as repo, headroom(0):
        taken = exhaust()
        repo.save(state, run="r", step=0)
        got = repo.restore("r@0")
        del taken
    assert differing(facts(got), wanted) == []


def test_a_restore_without_device_memory():
    """A restore into existing tensors works if torch cannot allocate any device memory."""
    state = {"a": floats(2 * MIB, 1, "cuda"), "b": typed("bfloat16", (100_001,), 2, "cuda", "floats"),
             "s": floats(9, 3, "cuda")}  # fmt: skip
    wanted = facts(state)
    with repository(chunk_bytes=65_536) as repo:
        repo.save(state, run="r", step=0)
        with headroom(0):
            taken = exhaust()
            for value in state.values():
                value.zero_()
            repo.restore_into("r@0", state)
            del taken
        assert differing(facts(state), wanted) == []


# --- the engine


def beneath_torch(text="out of memory"):
    """Return the error that torch raises if a CUDA call outside its allocator fails."""
    return getattr(torch, "AcceleratorError", RuntimeError)(f"CUDA error: {text}\nCUDA kernel errors might be reported")


FULL = {
    "allocator": lambda: torch.OutOfMemoryError("CUDA out of memory (on purpose)"),
    "beneath torch": beneath_torch,
    "CuPy": lambda: cupy.cuda.runtime.CUDARuntimeError(2),
    "CuPy, driver": lambda: cupy.cuda.driver.CUDADriverError(2),
}
ILL = {
    "beneath torch": lambda: beneath_torch("an illegal memory access was encountered"),
    "CuPy": lambda: cupy.cuda.runtime.CUDARuntimeError(700),
    "CuPy, driver": lambda: cupy.cuda.driver.CUDADriverError(719),
    "another": lambda: RuntimeError("out of memory, says who"),
}


class Failing:
    """Makes allocations fail: the first few, or all above a size."""

    def __init__(self, first=0, above=None, error=FULL["allocator"]):
        self.first, self.above, self.error, self.failed = first, above, error, 0

    def __call__(self, nbytes):
        if self.first > 0 or (self.above is not None and nbytes > self.above):
            self.first -= 1
            self.failed += 1
            raise self.error()


FAILINGS = pytest.mark.parametrize(
    "kind",
    [{"first": 1}, {"first": 3}, {"first": 9}, {"above": 2 * MIB}, {"above": 300_000}, {"above": 8000}, {"above": 0}],
    ids=str,
)  # fmt: skip


@pytest.fixture
def fail_lanes(monkeypatch):
    def begin(**kind):
        failing, real = Failing(**kind), streams.WorkStream.empty

        def empty(self, nbytes):
            failing(nbytes)
            return real(self, nbytes)

        monkeypatch.setattr(streams.WorkStream, "empty", empty)
        return failing

    return begin


@pytest.fixture
def fail_nvcomp(monkeypatch):
    """Make allocations of nvCOMP's work memory fail."""

    def begin(**kind):
        failing, real = Failing(**kind), streams.WorkStream.room

        def room(self, name, nbytes):
            if name == "nvcomp":
                failing(nbytes)
            return real(self, name, nbytes)

        monkeypatch.setattr(streams.WorkStream, "room", room)
        return failing

    return begin


def small_state(device="cuda"):
    return {"a": floats(300_000, 1, device), "b": typed("bfloat16", (100_001,), 2, device, "floats"),
            "c": typed("int8", (50_003,), 3, device, "sparse")}  # fmt: skip


def check_saves(repo):
    state = small_state()
    for step in range(2):
        snapshot = repo.save(state, run="r", step=step)
        assert snapshot.depth == step
        assert differing(facts(repo.restore(f"r@{step}")), facts(state)) == []
        drift(state, step)
    assert repo.check("restore").ok


@FAILINGS
def test_an_engine_without_memory_saves(fail_lanes, caplog, kind):
    with repository(chunk_bytes=65_536, verify_writes="full") as repo:
        failing = fail_lanes(**kind)
        check_saves(repo)
        assert failing.failed or kind == {"above": 2 * MIB}
        assert warned(caplog, "out of memory") or not failing.failed


@FAILINGS
def test_an_engine_without_memory_restores(fail_lanes, kind):
    state = small_state()
    wanted = facts(state)
    with repository(chunk_bytes=65_536) as repo:
        repo.save(state, run="r", step=0)
        failing = fail_lanes(**kind)
        assert differing(facts(repo.restore("r@0", device="cuda")), wanted) == []
        for value in state.values():
            value.zero_()
        repo.restore_into("r@0", state)
        assert differing(facts(state), wanted) == []
        assert failing.failed or kind == {"above": 2 * MIB}


NVCOMP_FAILINGS = pytest.mark.parametrize(
    "kind", [{"first": 1}, {"first": 4}, {"above": 100_000}, {"above": 0}], ids=str
)


@NVCOMP_FAILINGS
def test_nvcomp_without_memory_saves(fail_nvcomp, kind):
    with repository(chunk_bytes=65_536, verify_writes="full") as repo:
        failing = fail_nvcomp(**kind)
        check_saves(repo)
        assert failing.failed


@NVCOMP_FAILINGS
def test_nvcomp_without_memory_restores(fail_nvcomp, kind):
    """A restore works if nvCOMP gets no work memory. Its zstd decoder needs it, for blobs of the CPU engine."""
    state = small_state("cpu")
    with repository(chunk_bytes=65_536) as repo:
        repo.save(state, run="r", step=0)
        failing = fail_nvcomp(**kind)
        assert differing(facts(repo.restore("r@0", device="cuda")), facts(state)) == []
        assert failing.failed


@pytest.mark.parametrize("says", FULL)
def test_memory_that_runs_out_at_any_level(fail_lanes, caplog, says):
    """A save survives an error of full memory from torch's allocator, from CUDA beneath torch, and from CuPy."""
    with repository(chunk_bytes=65_536) as repo:
        failing = fail_lanes(first=3, error=FULL[says])
        check_saves(repo)
        repo.restore("r@1", device="cuda")
        assert failing.failed == 3
        assert warned(caplog, "out of memory")


@pytest.mark.parametrize("says", ILL)
def test_another_error_is_not_taken_for_memory_that_ran_out(fail_lanes, says):
    with repository(chunk_bytes=65_536) as repo:
        fail_lanes(first=1, error=ILL[says])
        with pytest.raises(type(ILL[says]())):
            repo.save(small_state(), run="r", step=0)


@pytest.mark.parametrize("where", ["_gather", "_device_rooms", "copy_async"])
@pytest.mark.parametrize("says", FULL)
def test_copies_when_memory_runs_out(monkeypatch, caplog, says, where):
    state, failing = small_state(), Failing(first=1, error=FULL[says])
    wanted, owner = facts(state), staging if where == "copy_async" else staging.DeviceStaging
    real = getattr(owner, where)

    def fails(*args):
        failing(0)
        return real(*args)

    monkeypatch.setattr(owner, where, fails)
    with manager("host" if where == "copy_async" else "device", chunk_bytes=65_536) as made:
        made.save(0, state)
        drift(state, 0)
        assert differing(facts(made.restore(0)), wanted) == []
    assert failing.failed == 1
    assert warned(caplog, "out of memory")


def test_an_engine_has_its_kernels_from_the_beginning(monkeypatch):
    """A new engine compiles and loads all kernels in threads of its own before it launches any.

    At the first use of a kernel, in a save, there may be no memory for it.
    """
    ready, launched, real = set(), set(), cupy.RawKernel

    class Kernel:
        def __init__(self, code, name, **options):
            self.raw, self.name = real(code, name, **options), name

        def compile(self):
            self.raw.compile()

        @property
        def num_regs(self):
            ready.add((self.name, threading.get_ident()))
            return self.raw.num_regs

        @property
        def max_dynamic_shared_size_bytes(self):
            return self.raw.max_dynamic_shared_size_bytes

        @max_dynamic_shared_size_bytes.setter
        def max_dynamic_shared_size_bytes(self, nbytes):
            assert not launched
            self.raw.max_dynamic_shared_size_bytes = nbytes

        @property
        def kernel(self):
            def launch(*arguments):
                launched.add(self.name)
                function(*arguments)

            function = self.raw.kernel
            return launch

    monkeypatch.setattr(cupy, "RawKernel", Kernel)
    kernels._loads.clear()
    try:
        with repository(chunk_bytes=65_536) as repo:
            repo.context.engines.on(torch.device("cuda", 0))
            assert {name for name, _ in ready} == {path.stem for path in Path(kernels.__file__).parent.glob("*.cu")}
            assert threading.get_ident() not in {thread for _, thread in ready}
            assert not launched
            check_saves(repo)
            assert launched
            assert launched <= {name for name, _ in ready}
    finally:
        kernels._loads.clear()


def test_several_kernels_are_compiled_at_the_same_time(monkeypatch):
    """One thread took 20 s on a new machine, and the first restore there waited for it."""
    together, real = threading.Barrier(4), kernels._load_one

    def load_one(device, name):
        if name in kernels.APPLY:
            together.wait(60)
        real(device, name)

    monkeypatch.setattr(kernels, "_load_one", load_one)
    monkeypatch.setenv("SNAPSTORE_THREADS", "8")
    kernels._load(0)


def test_batches_are_whole_again_after_memory_ran_out(fail_lanes):
    """After a save that ran out of device memory, batches have their full size again."""
    state = small_state()
    with repository(chunk_bytes=65_536) as repo:
        failing = fail_lanes(first=3)
        repo.save(state, run="r", step=0)
        assert failing.failed == 3
        assert repo.context.engines.on(torch.device("cuda", 0)).batch_bytes == cuda_engine.BATCH_BYTES


def test_a_large_tensor_is_not_copied_to_the_host_for_every_chunk(fail_lanes, monkeypatch):
    """If the CPU engine encodes chunks of a device tensor, it copies only the chunks, not the whole tensor for each."""
    copied = []
    real = torch.Tensor.cpu

    def cpu(self, *args, **options):
        copied.append(self.numel() * self.element_size())
        return real(self, *args, **options)

    state = {"a": floats(MIB, 1, "cuda")}
    with repository(chunk_bytes=65_536) as repo:
        fail_lanes(above=8000)
        monkeypatch.setattr(torch.Tensor, "cpu", cpu)
        repo.save(state, run="r", step=0)
    assert sum(copied) < 5 * 4 * MIB, f"copied {sum(copied) / (4 * MIB):.0f} times the state"


@pytest.mark.parametrize("chunk_bytes", [256, 4096])
def test_small_chunks_take_little_memory(chunk_bytes):
    """A save of small chunks has a memory limit, though each compressed block gets memory for a full one."""
    state = {"a": floats(2 * MIB, 1, "cuda")}
    with repository(chunk_bytes=chunk_bytes) as repo:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        repo.save(state, run="r", step=0)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak < 2 * staging.WORK_BYTES, f"{peak / 1e9:.1f} GB for 8 MB of state"


def test_memory_from_an_engine_may_be_used_at_once():
    """Any stream may write at once to memory that an engine returns.

    With deterministic algorithms torch fills new memory, so the engine waits until that is done.
    """
    with repository() as repo:
        repo.save({"a": floats(9000, 1, "cuda")}, run="r", step=0)
        engine = repo.context.engines.on(torch.device("cuda", 0))
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            with engine._front.current():
                torch.cuda._sleep(200_000_000)
            memory = engine.empty(4 * MIB)
            memory.fill_(7)
            torch.cuda.synchronize()
            assert (memory == 7).all()
        finally:
            torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("place", ["device", "pinned", "host"])
@pytest.mark.parametrize("is_full", [False, True])
def test_copies_of_chunks_are_copies_on_a_full_device_too(monkeypatch, place, is_full):
    """The engine encodes the bytes that it hashed, whatever the caller writes meanwhile."""
    with repository() as repo:
        engine = repo.context.engines.on(torch.device("cuda", 0))
        plain = np.arange(256, dtype=np.uint8)
        if place == "device":
            given = writable = engine.upload(plain)
        else:
            writable = plain.copy()
            given = writable if place == "host" else pinned_memory.Pinned(writable, engine.device, writable)

        def full(*_):
            raise torch.OutOfMemoryError("CUDA out of memory (on purpose)")

        if is_full or place == "host":  # host memory comes to this engine only if the device is full
            monkeypatch.setattr(engine, "_upload_chunks", full)
        loaded = engine.load(Chunks.of([given]), copy=True)
        writable[:] = 0
        (found,) = loaded.views()
        assert np.array_equal(found.cpu().numpy() if isinstance(found, torch.Tensor) else found, plain)


def test_an_upload_to_a_full_device_stays_in_host_memory():
    """`recode` uploads what it has decoded; on a full device the CPU engine encodes it."""
    plain = typed("uint8", (64 * MIB,), 1).numpy()
    with repository() as repo:
        engine = repo.context.engines.on(torch.device("cuda", 0))
        with headroom(MIB):
            uploaded = engine.upload(plain)
        assert isinstance(uploaded, np.ndarray)
        assert not np.shares_memory(uploaded, plain)
        assert np.array_equal(uploaded, plain)


def test_a_stream_has_one_object_of_cupy(monkeypatch):
    """CuPy 14 destroys a stream of torch with any object for it, so threads that use it first at once share one."""
    made, found, start = [], [], threading.Barrier(4)

    def slow(pointer, device):
        made.append(pointer)
        time.sleep(0.1)
        return object()

    def use():
        start.wait()
        found.append(kernels._stream(4096, 0))

    monkeypatch.setattr(kernels, "_stream_of", slow)
    monkeypatch.setattr(kernels, "_streams", {})
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [4096]
    assert len(set(map(id, found))) == 1


def test_a_copy_under_way_keeps_no_blobs():
    """A running copy keeps no reference to its blobs, so the device may reuse their memory.

    A pack keeps the wait functions of its copies until it is full.
    """
    blobs, out = torch.arange(256, dtype=torch.uint8, device="cuda"), np.zeros(200, np.uint8)
    entries, stream = np.array([(16,)], [("offset", "<u8")]), streams.copy_stream(blobs.device)
    encoded = encoding.DeviceEncoded(entries, blobs, stream)
    torch.cuda.synchronize()
    wait, kept = encoded.copy(0, 1, out), weakref.ref(blobs)
    del encoded, blobs
    assert kept() is None
    wait()
    np.testing.assert_array_equal(out, np.arange(16, 216))


def test_buffers_belong_to_one_engine():
    """A pool of page-locked buffers takes back only its own buffers, so two engines never use the same memory."""
    first, second = pinned_memory.PinnedBuffers(MIB), pinned_memory.PinnedBuffers(MIB)
    buffer = first.take(4096)
    if hasattr(second, "_addresses"):
        second._addresses.add(buffer.ctypes.data)  # as if it had once had a buffer at this address
    for pool in (first, second):
        pool.give(buffer)
    assert not np.shares_memory(first.take(4096), second.take(4096))


# --- page-locked memory


def is_mapped(address):
    """Ask mincore(2), which fails with ENOMEM for addresses without a mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.create_string_buffer(1)
    return libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), page) == 0


@pytest.fixture
def unlocked(monkeypatch):
    """Record the page-locked memory that is unlocked: its address, and whether it is still mapped then."""
    gc.collect()  # else the garbage of an earlier test counts
    seen, real = [], cupy.cuda.runtime.hostUnregister

    def unregister(address):
        seen.append((address, is_mapped(address)))
        real(address)

    monkeypatch.setattr(cupy.cuda.runtime, "hostUnregister", unregister)
    return seen


def test_memory_is_unlocked_before_it_is_unmapped(unlocked):
    """Else other memory could get its addresses first, and the device would copy the old pages in place of it."""
    whole = pinned_memory.pinned(MIB)
    part, address = torch.from_numpy(whole[4096:]), whole.ctypes.data
    del whole
    gc.collect()
    assert unlocked == []
    del part
    gc.collect()
    assert unlocked == [(address, True)]


def test_memory_is_unlocked_if_an_interrupt_comes_when_it_is_locked(monkeypatch, unlocked):
    locked, real = [], cupy.cuda.runtime.hostRegister

    def register(address, nbytes, flags):
        real(address, nbytes, flags)
        locked.append((address, True))
        raise KeyboardInterrupt

    monkeypatch.setattr(cupy.cuda.runtime, "hostRegister", register)
    with pytest.raises(KeyboardInterrupt):
        pinned_memory.pinned(MIB)
    gc.collect()
    assert len(locked) == 1
    assert unlocked == locked


@pytest.fixture
def arenas(monkeypatch):
    """Record weak references to the page-locked allocations that copies make."""
    asked, real = [], pinned_memory.pinned

    def pinned(nbytes):
        arena = real(nbytes)
        asked.append(weakref.ref(arena))
        return arena

    monkeypatch.setattr(pinned_memory, "pinned", pinned)
    return asked


class Saves:
    """Copies states and keeps the copies as bases, as saves do, but writes no snapshots."""

    def __init__(self, mode="host"):
        self.engines = Engines(0, threads=1)
        self.staging = Staging(self.engines, mode=mode)

    def save(self, sizes, seed, rejected=()):
        """Copy tensors of these sizes [bytes], by name, and check the copies; the deltas of `rejected` are rejected."""
        whole = typed("uint8", (sum(sizes.values()),), seed, "cuda")
        state = dict(zip(sizes, whole.split(list(sizes.values())), strict=True))
        inputs = self.staging.copy(flatten(state))
        with self.staging.saving(inputs):
            tensors = {tensor.spec.path[-1]: tensor for part in inputs for tensor in part.tensors}
            got = np.concatenate([tensors[name].copy.array for name in sizes])
            assert (got == moved(whole, "cpu").numpy()).all()
            for name in rejected:
                tensors[name].bases_tried = 1
            self.staging.keep_as_base(inputs, str(seed))
        return len(whole)


def alive(arenas):
    return sum(len(arena()) for arena in arenas if arena() is not None)


def test_small_tensors_share_page_locked_memory(arenas):
    """Small tensors share one allocation per copy of the state.

    An allocation for each tensor of 4 KiB would take 2 MiB and a call of the driver.
    """
    saves = Saves()
    sizes = {f"{i:04}": 4096 + 8 * (i % 90) for i in range(2000)}
    for step in range(4):
        nbytes = saves.save(sizes, step)
        assert len(arenas) == min(step + 1, 2), "the third save reuses the memory of the first"
    assert alive(arenas) < 2.1 * nbytes


def test_page_locked_memory_of_tensors_without_a_base(arenas):
    """Tensors whose deltas are rejected have one page-locked copy, others have two.

    After 32 saves their deltas are tried again.
    """
    saves = Saves()
    sizes = {f"{i:03}": 8192 for i in range(45)}
    rejected = [name for name in sizes if int(name) % 3 == 0]
    for step in range(6):
        nbytes = saves.save(sizes, step, rejected if step == 1 else ())
    before = len(arenas)
    assert before <= 3
    assert alive(arenas) < 1.75 * nbytes, "two copies of 2/3 of the state, and one copy of 1/3"
    for step in range(6, 33):
        saves.save(sizes, step)
    assert len(arenas) == before
    for step in range(33, 40):  # deltas are tried again, and all tensors keep bases now
        saves.save(sizes, step)
    assert len(arenas) <= before + 2
    assert alive(arenas) < 2.1 * nbytes


def test_page_locked_memory_of_tensors_that_change_their_size(arenas, monkeypatch):
    monkeypatch.setattr(pinned_memory, "ARENA_BYTES", 100_000)
    saves, rng = Saves(), np.random.default_rng(3)
    sizes = {f"{i:03}": int(n) for i, n in enumerate(rng.integers(4096, 9000, 60))}
    nbytes = 0
    for step in range(16):
        for name in rng.choice(list(sizes), rng.integers(0, 14)).tolist():
            sizes[name] = int(rng.integers(4096, 9000))
        if step % 7 == 0:
            sizes.pop(next(iter(sizes)))
            sizes[f"new {step}"] = 400_000  # larger than an allocation that others share
        before, nbytes = nbytes, saves.save(sizes, step)
        assert alive(arenas) < 1.3 * (before + nbytes), step
    for step in range(16, 20):
        before = len(arenas)
        saves.save(sizes, step)
    assert len(arenas) == before


# --- no memory is kept


@pytest.fixture
def pinned_bytes(monkeypatch):
    """Record the size of each page-locked allocation."""
    asked, real = [], pinned_memory.pinned

    def pinned(nbytes):
        asked.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(pinned_memory, "pinned", pinned)
    return asked


@pytest.mark.parametrize("mode", ["device", "host"])
def test_many_saves_keep_nothing(mode, pinned_bytes):
    """Many saves leave only the base in device memory, no more threads, and few more page-locked allocations."""
    state = {
        "a": floats(MIB, 1, "cuda"),
        "b": typed("bfloat16", (MIB,), 2, "cuda", "floats"),
        "s": floats(9, 3, "cuda"),
    }
    nbytes = sum(t.numel() * t.element_size() for t in tensors(state))
    gc.collect()
    torch.cuda.synchronize()
    outside = torch.cuda.memory_allocated()
    with manager(mode, chunk_bytes=65_536) as made:
        for step in range(6):
            made.save(step, state).result(60)
            drift(state, step)
        made.wait_until_finished()
        base = nbytes if mode == "device" else 0

        def only_the_base():
            return torch.cuda.memory_allocated() - outside <= base + 64 * 1024

        assert settles(only_the_base), torch.cuda.memory_allocated() - outside
        threads, asked = threading.active_count(), len(pinned_bytes)
        for step in range(6, 36):
            made.save(step, state).result(60)
            drift(state, step)
        made.wait_until_finished()
        assert settles(only_the_base), torch.cuda.memory_allocated() - outside
        assert settles(lambda: threading.active_count() <= threads), threading.enumerate()
        assert len(pinned_bytes) <= asked + 8, pinned_bytes[asked:]
        wanted = facts(state)
        made.save(36, state)
        assert differing(facts(made.restore(36)), wanted) == []
    assert settles(lambda: torch.cuda.memory_allocated() - outside <= 64 * 1024)


def test_the_cache_is_emptied_once_the_old_base_is_let_go(monkeypatch):
    """After the first save, and after a change of layout, torch's cache is emptied once the old base is released.

    Otherwise the next copy, of another size, would leave a part of the cached memory unused.
    """
    noise = typed("uint8", (2 * MIB,), 1, "cuda")
    state = {"w": floats(MIB, 2, "cuda"), "noise": noise}
    nbytes = sum(t.nbytes for t in state.values())
    gc.collect()
    torch.cuda.synchronize()
    outside, held = torch.cuda.memory_allocated(), []
    real = staging.release_cached_memory

    def release(device):
        held.append(torch.cuda.memory_allocated() - outside)
        real(device)

    monkeypatch.setattr(staging, "release_cached_memory", release)
    with manager("device", chunk_bytes=65_536) as made:
        for step in range(5):
            noise.copy_(typed("uint8", (2 * MIB,), 10 + step, "cuda"))  # its deltas are rejected
            drift({"w": state["w"]}, step)
            made.save(step, state).result(60)
    assert len(held) == 3, "after the first save, and after two saves with a new layout"
    assert max(held) < 1.1 * nbytes, held


def test_memory_for_the_next_copies_is_allocated_in_the_background(monkeypatch):
    """A background thread allocates memory for the next save, since the driver takes milliseconds for it.

    torch's cache keeps the memory until the next save asks for the same sizes.
    """
    noise = typed("uint8", (2 * MIB,), 1, "cuda")
    state, asked, real = {"w": floats(MIB, 2, "cuda"), "noise": noise}, [], staging.DeviceStaging._device_rooms

    def rooms(self, sources, layout, spare):
        sizes = [nbytes for *_, nbytes in layout.groups]
        asked.append((threading.current_thread() is threading.main_thread(), sizes))
        return real(self, sources, layout, spare)

    monkeypatch.setattr(staging.DeviceStaging, "_device_rooms", rooms)
    with manager("device", chunk_bytes=65_536) as made:
        for step in range(4):
            noise.copy_(typed("uint8", (2 * MIB,), 10 + step, "cuda"))  # deltas are rejected: its copy will lie apart
            drift({"w": state["w"]}, step)
            made.save(step, state)
            made.wait_until_finished()
    assert [waits for waits, _ in asked] == [True] + [True, False] * 3  # the second save may copy less than the first
    ahead, copies = asked[2:-1:2], asked[3::2]
    assert [sizes for _, sizes in ahead] == [sizes for _, sizes in copies]
    assert asked[1][1] != copies[-1][1]


def test_copies_between_the_same_addresses_reuse_their_table(monkeypatch):
    """The table of a copy's pieces, for which the caller waits, is made again only if a tensor has another address."""
    state, made_tables, real = {"w": floats(MIB, 1, "cuda"), "s": floats(9, 2, "cuda")}, [], staging._table_of

    def table_of(columns, device):
        made_tables.append(columns)
        return real(columns, device)

    place = torch.empty(MIB, device="cuda")
    monkeypatch.setattr(staging, "_table_of", table_of)
    device_staging = staging.DeviceStaging(Engines(0, threads=1), "device", twice=False)
    lengths = np.array([state["w"].nbytes], np.int64)
    stream = torch.cuda.current_stream()
    for step in range(6):
        if step == 4:
            state["w"] = floats(MIB, 3, "cuda")
        drift({"w": state["w"]}, step)
        where = (np.array([memory.data_ptr()], np.int64) for memory in (state["w"], place))
        device_staging._gather(*where, lengths, state["w"].device, stream)
        torch.cuda.synchronize()
        assert torch.equal(moved(place, "cpu"), moved(state["w"], "cpu")), step
    assert len(made_tables) == 2


def test_the_device_is_polled_less_often_while_nothing_is_done(monkeypatch):
    """While no batch can go on, the pauses between polls grow: each poll takes the interpreter's lock."""
    pool, pauses, left = streams.StreamPool(torch.device("cuda", 0), 1), [], [0]

    def poll():
        left[0] += 1
        return left[0] == 8

    monkeypatch.setattr(pool, "poll", poll)
    monkeypatch.setattr(streams.time, "sleep", pauses.append)
    pool.poll_until(lambda: left[0] == 10)
    longest = streams.MAX_POLL_S
    growing = [min(streams.POLL_S * 2**i, longest) for i in range(7)]
    assert pauses == [*growing, *growing[:2]]
    assert growing[-1] == longest


def test_restores_keep_nothing():
    state = {"a": floats(MIB, 1, "cuda"), "s": floats(9, 3, "cuda")}
    wanted = facts(state)
    with repository(chunk_bytes=65_536) as repo:
        repo.save(state, run="r", step=0)
        repo.restore_into("r@0", state)
        gc.collect()
        torch.cuda.synchronize()
        before, threads = torch.cuda.memory_allocated(), threading.active_count()
        for _ in range(20):
            repo.restore_into("r@0", state)
        assert settles(lambda: torch.cuda.memory_allocated() <= before + 64 * 1024)
        assert settles(lambda: threading.active_count() <= threads), threading.enumerate()
        assert differing(facts(state), wanted) == []


def test_a_restore_gives_nvcomps_memory_back():
    state = {"a": floats(MIB, 1, "cuda")}
    with repository(chunk_bytes=65_536) as repo:
        repo.save(state, run="r", step=0)
        gc.collect()
        before = torch.cuda.memory_allocated()
        repo.restore_into("r@0", state)
        assert settles(lambda: torch.cuda.memory_allocated() <= before + 64 * 1024), (
            f"{torch.cuda.memory_allocated() - before} bytes are held after the restore"
        )


def test_failed_saves_keep_nothing(monkeypatch):
    from snapstore import StorageError
    from snapstore.storage.memory import MemoryStore

    state = {"a": floats(MIB, 1, "cuda")}

    def put(self, key, data):
        raise StorageError("on purpose")

    def failing_saves(made):
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStore, "put", put)
            for step in range(4):
                with pytest.raises(StorageError):
                    made.save(step, state).result(60)
                with pytest.raises(StorageError):
                    made.wait_until_finished()

    with manager("device", chunk_bytes=65_536, options=OPTIONS) as made:
        made.save(0, state).result(60)
        failing_saves(made)
        settles(lambda: False, 0.3)
        before, threads = torch.cuda.memory_allocated(), threading.active_count()
        failing_saves(made)
        assert settles(lambda: torch.cuda.memory_allocated() <= before + 64 * 1024)
        assert settles(lambda: threading.active_count() <= threads), threading.enumerate()
        made.save(9, state).result(60)
        assert differing(facts(made.restore(9)), facts(state)) == []


@pytest.mark.parametrize(
    ("streams_full", "at_once", "share"), [(0.01, 1, 0.01), (0.5, 1, 0.5), (1.9, 1, 1), (2, 2, 1), (9, 3, 1)]
)
def test_little_memory_goes_to_one_large_batch(streams_full, at_once, share):
    """If memory is short, one large batch runs instead of three small ones: each batch costs the host milliseconds."""
    with repository() as repo:
        engine = repo.context.engines.on(torch.device("cuda", 0))
        size, least = cuda_engine.BATCH_BYTES, cuda_engine.MIN_BATCH_BYTES
        engine.limit("a save", int(streams_full * cuda_engine.WORK_PER_BATCH_BYTE * size))
        assert (engine._pool.at_once, engine.batch_bytes) == (at_once, max(least, int(share * size) // least * least))
        engine.limit("a save", None)
        assert (engine._pool.at_once, engine.batch_bytes) == (cuda_engine.BATCHES_AT_ONCE, size)


def test_a_small_state_is_saved_in_few_batches(monkeypatch):
    """A share of a small state is too little memory to work in: the save would take a batch for each 8 MiB."""
    batches, real = [], cuda_engine.CudaEngine.limit

    def limit(self, saver, work_bytes):
        real(self, saver, work_bytes)
        if work_bytes is not None:
            batches.append(self.batch_bytes)

    monkeypatch.setattr(cuda_engine.CudaEngine, "limit", limit)
    state = {"w": floats(2 * MIB, 1, "cuda")}
    with repository() as repo, SnapshotManager(repo, run="r", staging="device") as made:
        for step in range(3):  # later ones keep a base
            state["w"] += 1e-6
            made.save(step, state).result(60)
        assert differing(facts(made.restore(2)), facts(state)) == []
    assert batches == [32 * 1024 * 1024] * 3, "the state has 8 MiB: one batch, and no more memory than it takes"


@pytest.mark.parametrize(("state_gb", "batch"), [(0.3, 128), (3, 128), (4.2, 128), (4.7, 32), (6.6, 48), (12, 96)])
def test_the_work_memory_of_a_state_of_any_size(monkeypatch, state_gb, batch):
    """A state under 4.3 GB may take twice its size and a gigabyte; from 4.6 GB on, 2.07 times its size counts."""
    device, limits, state = torch.device("cuda", 0), [], int(state_gb * 1e9)
    monkeypatch.setattr(staging, "_bytes_on", lambda *_: 2 * state)
    monkeypatch.setattr(staging, "_free_bytes", lambda _: 20_000_000_000)
    with repository() as repo:
        engine = repo.context.engines.on(device)
        monkeypatch.setattr(engine, "limit", lambda _, work: limits.append(work))
        made = staging.DeviceStaging(repo.context.engines, "device", twice=True)
        made._modes[device], made._state_bytes[device] = "device", state
        made.wait_copied({}, {})
        monkeypatch.undo()
        engine.limit("a save", limits[0])
        at_once, size = engine._pool.at_once, engine.batch_bytes
        engine.limit("a save", None)
    assert (at_once, size) == (1, batch * 1024 * 1024)
    total = 2 * state + limits[0] + staging.STREAMS_BYTES
    assert total <= max(2.075 * state, min(2 * state + 1_100_000_000, 9_600_000_000))


def test_batches_beyond_the_limit_wait_but_short_ones_do_not():
    pool, running, seen = streams.StreamPool(torch.device("cuda", 0), 3), set(), []

    def steps(work):
        running.add(work)
        seen.append(len(running))
        for _ in range(9):
            yield
        running.remove(work)

    for at_once in (1, 2, 3):
        seen.clear()
        pool.at_once = at_once
        tasks = [pool.start(steps) for _ in range(5)]
        pool.start(lambda work: iter(()), fast=True).result()
        for task in tasks:
            task.result()
        assert max(seen) == at_once


def test_a_restore_does_not_lift_the_bound_of_a_running_save(tmp_path):
    """A restore from the same repository, such as an evaluation's, does not lift the limit of a running save."""
    with Repository.create(tmp_path / "r") as repo, SnapshotManager(repo, run="r", staging="host") as snapshots:
        state = {"w": torch.randn(3_000_000, device="cuda")}
        snapshots.save(0, state).result()
        engine = repo.context.engines.on(state["w"].device)
        assert engine.batch_bytes == cuda_engine.BATCH_BYTES
        engine.limit(snapshots, staging.HOST_WORK_BYTES)  # as a save does when it begins
        bound = engine.batch_bytes
        assert bound < cuda_engine.BATCH_BYTES
        repo.restore_into("r@0", {"w": torch.empty_like(state["w"])})
        assert engine.batch_bytes == bound


def test_a_save_does_not_lift_the_bound_of_another_one(monkeypatch):
    """The memory limit of a save holds until it ends, also if other saves of the repository begin and end meanwhile."""
    reached, go, waits, real = threading.Event(), threading.Event(), [True], MemoryStore.lock

    def lock(self, key, data):
        if waits:  # only the first save waits, when it begins
            waits.clear()
            reached.set()
            assert go.wait(60)
        real(self, key, data)

    monkeypatch.setattr(MemoryStore, "lock", lock)
    state = {"w": floats(300_000, 1, "cuda")}
    with (
        repository(chunk_bytes=65_536) as repo,
        SnapshotManager(repo, run="x", staging="host") as bounded,
        SnapshotManager(repo, run="y", staging="device") as other,
    ):
        engine = repo.context.engines.on(state["w"].device)
        handle = bounded.save(0, state)
        try:
            assert reached.wait(60)
            bound = engine.batch_bytes
            assert bound < cuda_engine.BATCH_BYTES
            other.save(0, state).result(60)
            other.wait_until_finished()
            assert engine.batch_bytes <= bound
            repo.save(state, run="z", step=0)
            assert engine.batch_bytes == bound
        finally:
            go.set()
        handle.result(60)
        assert engine.batch_bytes == cuda_engine.BATCH_BYTES
