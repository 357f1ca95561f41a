"""Without a GPU or its packages everything else works, and errors name what is missing."""

from __future__ import annotations

import errno
import struct
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from kit.objects import change, keys_of
from kit.packs import scan
from snapstore import CapabilityError, FormatError, InvalidInputError, Repository, SaveOptions, SnapshotManager
from snapstore.engine import cuda
from snapstore.engine.cpu import CpuEngine
from snapstore.engine.registry import Engines
from snapstore.format.blobs import codecs
from snapstore.format.hashing import checksum
from snapstore.storage.memory import MemoryStore

CUDA = torch.device("cuda", 0)
ANS = 70


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def a_gpu(monkeypatch):
    """Make torch say that there is a GPU, and that it is built for CUDA 13."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.fixture
def engines():
    made = Engines(0, threads=1)
    yield made
    made.close()


def floats(seed, count=30_000):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32))


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "compressed on the CPU" in r.getMessage()]


# --- the engine


def test_tensors_go_through_the_host_after_one_warning(engines, caplog):
    assert [engines.on_device(CUDA) for _ in range(3)] == [False] * 3
    (said,) = warnings_of(caplog)
    assert "no CUDA device" in said


def test_the_cpu_needs_no_gpu_engine(engines, caplog):
    engines.required = True
    assert not engines.on_device(torch.device("cpu"))
    assert not warnings_of(caplog)


def test_a_required_gpu_that_is_missing_is_an_error(engines):
    engines.required = True
    for _ in range(2):
        with pytest.raises(CapabilityError, match="CUDA build of torch"):
            engines.on_device(CUDA)


def test_a_missing_gpu_that_is_required_later_is_an_error_too(engines):
    """A second manager of the repository may require the GPU, although the first one did not."""
    assert not engines.on_device(CUDA)
    engines.required = True
    with pytest.raises(CapabilityError):
        engines.on_device(CUDA)


@pytest.mark.parametrize(("lacks", "version", "extra"), [("cupy", "13.0", "cuda13"), ("nvidia", "12.8", "cuda12")])
def test_packages_that_are_missing(a_gpu, monkeypatch, lacks, version, extra):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, lacks, None)
    with pytest.raises(CapabilityError, match=rf"pip install 'snapstore\[{extra}\]'"):
        cuda.require()


@pytest.mark.parametrize(("version", "major"), [("11.8", "11"), ("14.0", "14"), (None, "unknown")])
def test_a_cuda_without_an_extra(a_gpu, monkeypatch, version, major):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CapabilityError, match=f"for CUDA {major}: install a torch for CUDA 12 or 13$"):
        cuda.require()


@pytest.mark.parametrize("version", ["5.2.0", "7.0.0.1"])
def test_another_major_of_nvcomp(a_gpu, monkeypatch, version):
    nvidia, libnvcomp = ModuleType("nvidia"), ModuleType("nvidia.libnvcomp")
    libnvcomp.__version__ = version
    libnvcomp.load_library = object
    nvidia.libnvcomp = libnvcomp
    for name, module in (("cupy", ModuleType("cupy")), ("nvidia", nvidia), ("nvidia.libnvcomp", libnvcomp)):
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(CapabilityError, match=rf"nvCOMP {version}: expected 6.*pip install 'snapstore\[cuda13\]'"):
        cuda.require()
    libnvcomp.__version__ = "6.0.0.12"
    cuda.require()
    libnvcomp.load_library = lambda: None
    with pytest.raises(CapabilityError, match=r"cannot be loaded.*pip install 'snapstore\[cuda13\]'"):
        cuda.require()


@pytest.fixture
def a_cupy(a_gpu, monkeypatch):
    """Replace the modules that need the packages of the GPU; a test can make their functions fail."""
    monkeypatch.setattr(cuda, "require", lambda: None)
    modules = {
        name: ModuleType(f"snapstore.engine.cuda.{name}") for name in ("nvcomp_host", "kernels", "nvcomp", "engine")
    }
    modules["nvcomp"].check_rooms = lambda: None
    modules["kernels"].start_loading = modules["kernels"].wait_loaded = lambda device: None
    modules["engine"].CudaEngine = lambda *args: CpuEngine(0, 1)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(cuda, name, module, raising=False)
    return modules


class CompileError(Exception):
    """Stands for the error of this name in CuPy."""


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        ("kernels", "wait_loaded", RuntimeError("CuPy failed to load libnvrtc.so.13: cannot open shared object file")),
        ("kernels", "wait_loaded", CompileError("gather.cu(3): error: identifier is undefined")),
        ("nvcomp", "check_rooms", AttributeError("undefined symbol: nvcompBatchedZstdCompressGetMaxOutputChunkSize")),
        ("engine", "CudaEngine", OSError("libcuda.so.1: cannot open")),
    ],
    ids=["NVRTC", "compiler", "nvCOMP", "engine"],
)  # fmt: skip
def test_an_engine_that_cannot_start(engines, a_cupy, monkeypatch, caplog, module, name, error):
    """If the engine cannot start, a caller that requires the GPU gets an error; others go on after one warning."""

    def fails(*args):
        raise error

    monkeypatch.setattr(a_cupy[module], name, fails)
    if name == "wait_loaded":  # found later, when the kernels have been loaded in the background
        assert engines.on_device(CUDA)
        with pytest.raises(CapabilityError, match="cuda:0: the GPU engine cannot start"):
            engines.on(CUDA)
    assert [engines.on_device(CUDA) for _ in range(3)] == [False] * 3
    (said,) = warnings_of(caplog)
    assert str(error) in said
    assert "pip install 'cupy-cuda13x[ctk]>=14'" in said
    engines.required = True
    with pytest.raises(CapabilityError, match="cuda:0: the GPU engine cannot start"):
        engines.on_device(CUDA)


def test_an_engine_that_can_start(engines, a_cupy):
    assert engines.on_device(CUDA)


def test_a_cache_of_kernels_that_cannot_be_written(engines, a_cupy, monkeypatch, caplog):
    def fails(*args):
        raise PermissionError(errno.EACCES, "Permission denied", "/home/u/.cupy")

    monkeypatch.setattr(a_cupy["nvcomp"], "check_rooms", fails)
    assert not engines.on_device(CUDA)
    (said,) = warnings_of(caplog)
    assert "set CUPY_CACHE_DIR to a folder that can be written" in said


def test_a_foreign_allocator_of_device_memory(engines, a_gpu, monkeypatch):
    """torch cannot say how much such an allocator uses; the CPU engine saves."""

    def unknown(*args):
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", unknown)
    engines.start_loading()
    with pytest.raises(CapabilityError, match="CUDAPluggableAllocator"):
        cuda.require()


# --- restores


def test_a_restore_onto_the_meta_device():
    with Repository.create(MemoryStore()) as repository:
        repository.save({"w": floats(1)}, run="r", step=0)
        with pytest.raises(InvalidInputError, match="device 'meta': has no memory; Repository"):
            repository.restore("r@0", device="meta")


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu:1"])
def test_a_restore_onto_a_device_that_this_torch_does_not_have(device):
    with Repository.create(MemoryStore()) as repository:
        repository.save({"w": floats(1)}, run="r", step=0)
        with pytest.raises(CapabilityError, match=rf"^{device}: this torch has no such device; give another one$"):
            repository.restore("r@0", device=device)
        with pytest.raises(CapabilityError, match=f"{device}: this torch has no such device"):
            next(repository.named_tensors("r@0", device=device))


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0), 0])
def test_a_restore_onto_a_gpu_that_is_not_there(device):
    with Repository.create(MemoryStore(), options=SaveOptions(threads=1)) as repository:
        repository.save({"w": floats(1), "a": np.arange(5)}, run="r", step=0)
        with pytest.raises(CapabilityError, match=r"^cuda.*: no CUDA device: .* CUDA build of torch"):
            repository.restore("r@0", device=device)
        assert torch.equal(repository.restore("r@0", device="cpu")["w"], floats(1))
        assert (repository.restore("r@0", keys="a", device=device)["a"] == np.arange(5)).all(), "no tensor"


def test_a_restore_onto_one_gpu_too_many(a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with Repository.create(MemoryStore(), options=SaveOptions(threads=1)) as repository:
        repository.save({"w": floats(1)}, run="r", step=0)
        with pytest.raises(CapabilityError, match="cuda:7: no such device: expected cuda:0 to cuda:1"):
            repository.restore("r@0", device="cuda:7")


# --- saves


@pytest.mark.parametrize("staging", ["auto", "device", "host"])
@pytest.mark.parametrize("async_save", [True, False])
def test_any_staging_takes_tensors_of_the_host(staging, async_save):
    state = {"w": torch.arange(30_000.0), "s": torch.ones(3)}
    with SnapshotManager(MemoryStore(), run="r", staging=staging, async_save=async_save) as snapshots:
        for step in range(3):
            snapshots.save(step, state)
            state["w"] += 1
        for step in range(3):
            assert torch.equal(snapshots.restore(step)["w"], torch.arange(30_000.0) + step)
    assert "cupy" not in sys.modules or torch.cuda.device_count()


def test_ans_leaves_tensors_of_the_host_portable():
    store = MemoryStore()
    with Repository.create(store, options=SaveOptions(codec="ans", threads=1)) as repository:
        repository.save({"w": floats(1)}, run="r", step=0)
    used = {c for key in keys_of(store, "packs/") for _, h in blobs(store.get(key)) for c in h.codecs[: h.element_size]}
    assert used <= {codecs.RAW, codecs.ZSTD, codecs.DEFLATE}
    assert used != {codecs.RAW}
    with Repository.open(store) as repository:
        assert torch.equal(repository.restore("r@0")["w"], floats(1))


# --- blobs in nvCOMP's ANS


def blobs(data):
    return list(scan(memoryview(bytes(data)), "pack"))


def with_codec(store, codec):
    """Write another codec into the headers of all blobs of a repository, for their coded planes."""

    def edit(data):
        for offset, header in blobs(data):
            for k in range(header.element_size):
                if header.codecs[k]:
                    data[offset + 32 + k] = codec
            length = header.payload_start + header.payload_bytes
            struct.pack_into("<Q", data, offset + 8, checksum(bytes(data[offset + 16 : offset + length])))

    for key in keys_of(store, "packs/"):
        change(store, key, edit)


@pytest.fixture
def store():
    made = MemoryStore()
    with Repository.create(made, chunk_bytes=4096, options=SaveOptions(threads=1)) as repository:
        repository.save({"w": floats(1), "plain": 5}, run="r", step=0)
    return made


def test_the_error_says_where_ans_can_be_decoded():
    with pytest.raises(CapabilityError, match=r"nvCOMP 6's ANS.*no CUDA device.*snapstore recode"):
        codecs.decoder(ANS, "here")([memoryview(b"abc")], np.empty(10, np.uint8), 64)


def test_a_restore_is_refused_with_advice(store):
    with_codec(store, ANS)
    with Repository.open(store, options=SaveOptions(threads=1)) as repository:
        with pytest.raises(CapabilityError, match="snapstore recode"):
            repository.restore("r@0")
        assert repository.restore("r@0", keys="plain") == {"plain": 5}
        assert [s.ref for s in repository.snapshots()] == ["r@0"]


@pytest.mark.parametrize(
    ("codec", "match"),
    [(71, "nvCOMP 7.*recode"), (65, "nvCOMP 1"), (99, "nvCOMP 35"), (9, "unknown"), (200, "unknown")],
)
def test_other_codecs_are_named(store, codec, match):
    with_codec(store, codec)
    with Repository.open(store, options=SaveOptions(threads=1)) as repository, pytest.raises(FormatError, match=match):
        repository.restore("r@0")


@pytest.mark.parametrize("codec", [ANS, 71])
def test_a_base_that_cannot_be_read_here_is_none(store, codec):
    """If a base cannot be decoded here, because the run was on a GPU before, a save stores full chunks."""
    with_codec(store, codec)
    changed = floats(1) * 1.0001
    with Repository.open(store, options=SaveOptions(threads=1)) as repository:
        saved = repository.save({"w": changed}, run="r", step=1)
        assert saved.depth == 0
        assert torch.equal(repository.restore("r@1")["w"], changed)


@pytest.mark.parametrize("codec", [ANS, 71, 9])
def test_an_object_that_cannot_be_read_here_is_not_damaged(store, codec):
    """A check goes on and says that it cannot judge the object; a repair drops nothing, and repairs other snapshots."""
    with_codec(store, codec)  # the packs' names no longer match: a repair tries to move their blobs, which are intact
    before = set(keys_of(store, "packs/"))
    with Repository.open(store, options=SaveOptions(threads=1)) as repository:
        for step in range(2):
            repository.save({"w": floats(2)}, run="s", step=step)
        (pack,) = set(keys_of(store, "packs/")) - before
        data, info = store._objects[pack]
        store._objects[pack] = data[:-1] + b"?", info  # damages the footer; all blobs are whole
        found = repository.check("restore")
        assert not found.ok
        assert found.damaged == []
        (said,) = [problem for problem in found.problems if problem.kind == "chunk"]
        assert said.message.startswith("r@0: the root part cannot be rebuilt on this machine: ")
        assert (said.snapshots, said.command) == ((), "")
        done = repository.repair(level="restore", apply=True, drop=True)
        assert (done.lost, done.dropped) == ([], [])
        assert done.open[0].startswith("r@0: cannot be healed here: ")
        assert done.open[1:] == [said.message]
        assert [s.ref for s in repository.snapshots()] == ["r@0", "s@0", "s@1"]
        assert all(pack_name(pack) not in needed(repository, ref) for ref in ("s@0", "s@1")), "they are repaired"
        assert pack_name(*before) in needed(repository, "r@0"), "it is unchanged"


def pack_name(key):
    return key.rpartition("/")[2]


def needed(repository, ref):
    return [name for m in repository.snapshot(ref).manifests for name in repository.context.index.header(m).pack_names]


def test_unknown_values_of_options_are_errors():
    from snapstore import InvalidInputError

    for options in ({"codec": "zip"}, {"verify_writes": "maybe"}, {"codec": None}):
        with pytest.raises(InvalidInputError, match="expected one of"):
            SaveOptions(**options)
    with pytest.raises(InvalidInputError, match="staging"):
        SnapshotManager(MemoryStore(), run="r", staging="gpu")
