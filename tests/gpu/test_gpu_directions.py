"""Each engine restores to the bit what the other one saved, in one process and in two."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kit.gpu_states import (
    MIB,
    codecs_of,
    differing,
    drift,
    every_dtype,
    facts,
    floats,
    manager,
    odd_ones,
    python,
    repository,
    scrambled,
    tensors,
    typed,
)
from snapstore import Repository, SaveOptions
from snapstore.storage.memory import MemoryStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CHUNKS = {
    "64": (64, (4095, 4096, 4097)),
    "4096": (4096, (4088, 4096, 4104, 8192, 12_288 - 8, 12_288 + 8)),
    "default": (MIB, (4096, 65_536, 100_003)),
}  # fmt: skip


def state_of(device, name):
    """Return the state for a chunk size: the same bytes on every device and in every process."""
    state = {"model": every_dtype(device, CHUNKS[name][1]), "odd": odd_ones(device), "step": 7, "nan": float("nan")}
    if name == "default":
        state["large"] = [
            typed("bfloat16", (MIB + 1,), 1, device, "floats"), typed("float32", (512, 1024), 2, device, "floats"),
            typed("uint8", (2 * MIB + 3,), 3, device, "sparse"), typed("float64", (MIB // 8 - 1,), 4, device),
        ]  # fmt: skip
    return state


def save_all(folder, device):
    for name, (chunk_bytes, _) in CHUNKS.items():
        with Repository.create(f"{folder}/{name}", chunk_bytes=chunk_bytes, options=SaveOptions(threads=4)) as made:
            state = state_of(device, name)
            made.save(state, run="r", step=0)
            drift(state, 0)
            made.save(state, run="r", step=1)


def expected(name):
    """Return the facts of both steps."""
    state = state_of("cpu", name)
    first = facts(state)
    drift(state, 0)
    return [first, facts(state)]


ELSEWHERE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from kit.gpu_states import facts
sys.path.insert(0, sys.argv[3])
from test_gpu_directions import CHUNKS, save_all
from snapstore import Repository
assert not torch.cuda.is_available()
found = {}
for name in CHUNKS:
    with Repository.open(f"{sys.argv[1]}/{name}") as repository:
        found[name] = [facts(repository.restore(f"r@{step}")) for step in (0, 1)]
save_all(sys.argv[2], "cpu")
assert "cupy" not in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """Save in this process from CUDA, and in a process without a GPU, which also restores the first folder.

    Return the first folder, the facts that the other process has restored, and the folder that it has saved.
    """
    here, there = tmp_path_factory.mktemp("cuda"), tmp_path_factory.mktemp("cpu")
    save_all(here, "cuda")
    return here, python(ELSEWHERE, here, there, Path(__file__).parent, gpu=False), there


@pytest.mark.parametrize("name", CHUNKS)
def test_saved_on_the_gpu_restored_where_there_is_none(exchanged, name):
    for step, (want, got) in enumerate(zip(expected(name), exchanged[1][name], strict=True)):
        assert differing(want, got) == [], step


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("saved_on", ["cpu", "cuda"])
def test_restored_onto_the_gpu(exchanged, name, saved_on):
    folder = exchanged[0] if saved_on == "cuda" else exchanged[2]
    wanted = expected(name)
    with Repository.open(folder / name) as opened:
        for step in (1, 0):
            state = opened.restore(f"r@{step}", device="cuda")
            assert all(t.is_cuda for t in tensors(state))
            assert differing(facts(state), wanted[step]) == []
            state = opened.restore(f"r@{step}")
            assert not any(t.is_cuda for t in tensors(state))
            assert differing(facts(state), wanted[step]) == []


@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda")], ids=repr)
def test_names_of_a_device(device):
    """A number is a device too: jobs pass their local rank, and that of the first process is 0."""
    state = {"a": torch.arange(5000.0), "b": torch.ones(())}
    with Repository.create(MemoryStore(), options=SaveOptions(threads=1)) as repo:
        repo.save(state, run="r", step=0)
        found = [repo.restore("r@0", device=device), dict(repo.named_tensors("r@0", device=device))]
    for values in found:
        assert differing(facts(values), facts(state)) == []
        assert {value.device for value in values.values()} == {torch.device("cuda", 0)}


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("saved_on", ["cpu", "cuda"])
def test_restored_into_tensors(exchanged, name, saved_on):
    """A restore fills tensors on the GPU and on the host in place."""
    folder = exchanged[0] if saved_on == "cuda" else exchanged[2]
    wanted = expected(name)
    with Repository.open(folder / name) as opened:
        for device in ("cuda", "cpu"):
            into = scrambled(state_of(device, name))
            places = [t.data_ptr() for t in tensors(into)]
            opened.restore_into("r@1", into)
            assert differing({k: v for k, v in facts(into).items() if k[:2] == "/m"},
                             {k: v for k, v in wanted[1].items() if k[:2] == "/m"}) == []  # fmt: skip
            assert differing(facts(into), wanted[1]) == []
            assert [t.data_ptr() for t in tensors(into)] == places


def test_a_repository_passes_check_on_both(exchanged):
    for folder in (exchanged[0], exchanged[2]):
        with Repository.open(folder / "4096") as opened:
            checked = opened.check("restore")
            assert checked.ok, checked.problems


def test_into_tensors_of_any_strides():
    grid = floats(600 * 40, 1, "cuda").view(600, 40)
    with repository() as repo:
        repo.save({"a": grid, "b": grid * 2, "c": torch.complex(grid, grid)}, run="r", step=0)
        room = torch.zeros(40, 1200, device="cuda")
        waves = torch.zeros(600, 40, device="cuda", dtype=torch.complex64)
        into = {"a": room.t()[::2], "b": torch.zeros(601, 41, device="cuda")[1:, 1:], "c": waves.conj()}
        repo.restore_into("r@0", into)
        assert torch.equal(into["a"], grid)
        assert not room[:, 1::2].any()
        assert torch.equal(into["b"], grid * 2)
        assert torch.equal(waves, torch.complex(grid, -grid))


def test_a_state_on_both():
    """A state may have tensors on the host and on the device, and a tensor may move between them from save to save."""
    state = {
        "cpu": floats(30_000, 1), "cuda": floats(30_000, 2, "cuda"), "array": np.arange(5000.0),
        "twin": floats(30_000, 2), "list": [floats(9000, i, ("cpu", "cuda")[i % 2]) for i in range(6)],
    }  # fmt: skip
    with repository() as repo:
        first = repo.save(state, run="r", step=0)
        wanted = facts(state)
        assert first.new_chunks < first.chunks, "the tensor on the device has a duplicate on the host"
        state["cpu"], state["cuda"] = state["cpu"].cuda(), state["cuda"].cpu()
        assert repo.save(state, run="r", step=1).new_chunks == 0
        drift(state, 3)
        moved = repo.save(state, run="r", step=2)
        assert moved.depth == 1
        assert differing(facts(repo.restore("r@0")), wanted) == []
        assert differing(facts(repo.restore("r@2")), facts(state)) == []
        into = scrambled(state)
        repo.restore_into("r@2", into)
        assert differing(facts(into), facts(state)) == []


def test_chunks_are_known_across_engines():
    """Both engines compute the same digests, so a save of the same bytes from another device adds no chunks."""
    with repository() as repo:
        state = {"a": floats(100_003, 1), "b": typed("int8", (70_001,), 2)}
        repo.save(state, run="r", step=0)
        on_gpu = {key: value.cuda() for key, value in state.items()}
        assert repo.save(on_gpu, run="r", step=1).new_chunks == 0
        assert repo.save({"c": state["b"], "d": on_gpu["a"]}, run="s", step=0, bases=["r@1"]).new_chunks == 0


@pytest.mark.parametrize("chunk_bytes", [4096, 65_536])
@pytest.mark.parametrize("staged", [True, False], ids=["manager", "repository"])
def test_long_chains(chunk_bytes, staged):
    """Each step of long chains, whose links both engines have written, restores to the bit with either engine."""

    def state_on(device):
        return {
            "a": floats(80_000, 1, device), "b": typed("bfloat16", (50_001,), 2, device, "floats"),
            "c": typed("uint8", (90_003,), 3, device), "d": typed("int64", (9000,), 4, device, "sparse"),
        }  # fmt: skip

    twin, store, options = state_on("cpu"), MemoryStore(), SaveOptions(restore_cost=20.0, threads=4)
    Repository.create(store, chunk_bytes=chunk_bytes, options=options).close()
    state, wanted, depths = state_on("cuda"), [], []
    with manager(store=store, options=options) as snapshots:
        repo = snapshots.repository
        for step in range(16):
            on = "cpu" if step in (5, 6, 11) else "cuda"
            source = {key: value.to(on) for key, value in state.items()}
            if staged:
                depths.append(snapshots.save(step, source).result(60).depth)
            else:
                depths.append(repo.save(source, run="r", step=step).depth)
            wanted.append(facts(twin))
            drift(state, step)
            drift(twin, step)
        assert max(depths) >= 8, depths
        for step in range(16):
            assert differing(facts(repo.restore(f"r@{step}", device="cuda")), wanted[step]) == [], step
            assert differing(facts(repo.restore(f"r@{step}")), wanted[step]) == [], step
        into = {"a": torch.zeros(80_000, device="cuda")}
        for step in (15, 3, 9):
            repo.restore_into(f"r@{step}", into, keys="a")
            assert facts(into)["/a"] == wanted[step]["/a"]
    assert codecs_of(store) <= {0, 1, 2, 3}
    with Repository.open(store) as opened:
        assert opened.check("restore").ok


def test_a_full_snapshot_and_no_depth_at_all():
    """`restore_cost=1.0` and `full=True` make a save store no deltas."""
    state = {"w": floats(200_000, 1, "cuda")}
    with repository(restore_cost=1.0) as repo:
        for step in range(3):
            assert repo.save(state, run="r", step=step).depth == 0
            wanted = facts(state)
            assert differing(facts(repo.restore(f"r@{step}", device="cuda")), wanted) == []
            drift(state, step)
    with repository() as repo:
        repo.save(state, run="r", step=0)
        drift(state, 1)
        assert repo.save(state, run="r", step=1, full=True).depth == 0
        assert differing(facts(repo.restore("r@1", device="cuda")), facts(state)) == []


@pytest.mark.parametrize("pack_bytes", [4096, 100_000])
def test_packs_of_any_size(pack_bytes):
    state = {"a": floats(60_000, 1, "cuda"), "b": typed("uint8", (50_001,), 2, "cuda")}
    with repository(chunk_bytes=1024, pack_bytes=pack_bytes) as repo:
        for step in range(3):
            repo.save(state, run="r", step=step)
            assert differing(facts(repo.restore(f"r@{step}", device="cuda")), facts(state)) == []
            drift(state, step)
        assert repo.check("restore").ok


@pytest.mark.parametrize("batch", [1, 3000, 70_000])
def test_states_larger_than_any_batch(monkeypatch, batch):
    from snapstore.engine.cuda import engine

    monkeypatch.setattr(engine, "BATCH_BYTES", batch)
    monkeypatch.setattr(engine, "MIN_BATCH_BYTES", batch)
    monkeypatch.setattr(engine.CudaEngine, "decode_bytes", batch)
    monkeypatch.setattr(engine.CudaEngine, "batch_chunks", 7)
    state = {"a": floats(30_000, 1, "cuda"), "b": [floats(2000, i, "cuda") for i in range(5)]}
    with repository(chunk_bytes=4096) as repo:
        for step in range(3):
            repo.save(state, run="r", step=step)
            assert differing(facts(repo.restore(f"r@{step}", device="cuda")), facts(state)) == []
            drift(state, step)


def test_keys_select_on_the_gpu():
    state = {"model": {"a": floats(30_000, 1, "cuda"), "b": floats(30_000, 2, "cuda")}, "o": floats(9000, 3, "cuda")}
    with repository() as repo:
        repo.save(state, run="r", step=0)
        got = repo.restore("r@0", keys="model.a", device="cuda")
        assert differing(facts(got), facts({"model": {"a": state["model"]["a"]}})) == []


def test_large_chunks():
    """Both engines restore the same values from a chunk of 36 MiB."""
    state = {"a": typed("float32", (9 * MIB,), 1, "cuda", "floats"), "b": typed("bfloat16", (MIB + 5,), 2, "cuda")}
    with repository(chunk_bytes=64 * MIB) as repo:
        for step in range(2):
            repo.save(state, run="r", step=step)
            saved = facts(state)
            drift(state, step)
        assert differing(saved, facts(repo.restore("r@1"))) == []
        assert differing(saved, facts(repo.restore("r@1", device="cuda"))) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_one_by_one(device):
    """A save takes an iterator of tensors that share one buffer on the device; `named_tensors` yields them again."""
    buffer = torch.empty(3 * MIB // 4, device="cuda")

    def pairs(version):
        for i, count in enumerate((100, 5000, MIB // 4, 3 * MIB // 4, 7)):
            part = buffer[:count]
            part.copy_(torch.arange(count, device="cuda") % 1000 + i + version)
            yield f"t{i}", part
            buffer.fill_(-1)

    with repository() as made:
        for version in (0, 1):
            made.save(pairs(version), run="r", step=version)
        found = 0
        for i, (path, value) in enumerate(made.named_tensors("r@1", device=device)):
            assert (path, value.device.type) == (f"t{i}", device)
            assert torch.equal(value.cpu(), torch.arange(len(value)) % 1000 + i + 1.0)
            found += 1
        assert found == 5
