"""Ranks of a torch.distributed job, with gloo, that run many cases of snapstore.dcp: `python -m kit.dcp_ranks ...`.

`run` starts them and returns what each case said on each rank: "" or its error. Every case is one function `case_*` of
a world, called on all ranks; it asserts what it checks. A case that fails on one rank alone must not let the others
wait for long: the group's time-out is short, and the cases after a broken collective are reported as not run.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kit.forked import Forked, wait_all
from kit.processes import environment
from snapstore import PerRank, Repository, RngState, SnapshotManager
from snapstore import dcp as snap
from snapstore.dcp import SnapstoreReader, SnapstoreWriter, async_save, load, save, saving
from snapstore.errors import InvalidInputError

#: A world that hangs is given up after this long [s].
HANG_S = 240.0
#: The folder of the repository that worlds of several sizes share; the test makes it, with small chunks.
OTHER_WORLDS = "other-worlds"


def run(
    folder: Path, world: int, names: list[str], module: str = "kit.dcp_ranks", backend: str = "gloo"
) -> dict[str, list[str]]:
    """Run cases of a module on `world` ranks; return the texts of each case, by rank."""
    env = environment(GLOO_SOCKET_IFNAME="lo", SNAPSTORE_TEST_BACKEND=backend)
    (folder / f"rendezvous{world}").unlink(missing_ok=True)
    program = "-m", module, str(folder), str(world)
    processes = [
        Forked(*program, str(rank), *names, log=folder / f"log-{world}-{rank}", env=env) for rank in range(world)
    ]
    wait_all(processes, HANG_S)
    texts = [process.text() for process in processes]
    found: dict[str, list[str]] = {name: [] for name in names}
    for rank, text in enumerate(texts):
        path = folder / f"said-{world}-{rank}.json"
        said = json.loads(path.read_text()) if path.exists() else {}
        for name in names:
            found[name].append(said.get(name, f"not run; the output ends with {text[-1500:]}"))
    return found


def main(folder: str, world: str, rank: str, *names: str, cases: dict[str, Any]) -> None:
    """Be one rank, and run functions `case_*` among `cases`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backend = os.environ["SNAPSTORE_TEST_BACKEND"]
    if "nccl" in backend:
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous{world}", rank=int(rank), world_size=int(world),
        timeout=timedelta(seconds=HANG_S),
    )  # fmt: skip
    said: dict[str, str] = {}
    one = World(Path(folder))
    for name in names:
        try:
            cases[f"case_{name}"](one)
            one.close()
            dist.barrier()
            said[name] = ""
        except BaseException:  # noqa: BLE001  a CheckpointException is no Exception
            said[name] = traceback.format_exc()[-3000:]
        Path(folder, f"said-{world}-{rank}.json").write_text(json.dumps(said))
        if said[name]:
            break  # the collectives of the ranks may no longer match
    dist.destroy_process_group()


class World:
    """The job, as one rank sees it.

    Attributes:
        url: of a repository that all ranks share. Each case has a run of its own.
        writers: of the running case, which `close` closes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.url, self.writers = folder, folder / "repository", list[Any]()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=HANG_S))

    def writer(self, run: str, **options: Any) -> Any:
        self.writers.append(SnapstoreWriter(self.url, run=f"{run}-{self.size}", **options))
        return self.writers[-1]

    def close(self) -> None:
        """Close the writers of a case."""
        while self.writers:
            self.writers.pop().close()

    def reader(self, run: str, size: int | None = None, **options: Any) -> Any:
        return SnapstoreReader(self.url, run=f"{run}-{size or self.size}", **options)

    def mesh(self, *shape: int) -> Any:
        return init_device_mesh("cpu", shape or (self.size,), mesh_dim_names=[f"d{i}" for i in range(len(shape) or 1)])


def whole(shape: tuple[int, ...], seed: int = 0) -> Any:
    """Return the same values on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sharded(value: Any, mesh: Any, placements: Any) -> Any:
    return distribute_tensor(value, mesh, placements)


def expect_whole(value: Any, expected: Any, what: object = "") -> None:
    """Check that a DTensor or tensor has the values of a whole tensor, to the bit."""
    got = value.full_tensor() if hasattr(value, "full_tensor") else value
    assert torch.equal(got, expected), (what, got, expected)


@contextmanager
def raises(kind: type[BaseException], text: str, rank: int | None = None) -> Any:
    """Check that an error with a text is raised, by `rank` alone if it is given; these processes have no pytest."""
    raised, ranks = "", []
    try:
        yield
    except kind as error:
        raised, ranks = f"{type(error).__name__}: {error}", list(getattr(error, "failures", ()))
    assert raised, f"no {kind.__name__}"
    assert text in raised, (text, raised)
    assert rank is None or ranks == [rank], (rank, raised)


def fsdp(mesh: Any, hidden: int = 24, seed: int = 0) -> tuple[Any, Any]:
    """Return a model under FSDP2, or under DDP without a mesh, and its optimizer, one step after initialisation."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 7), nn.LayerNorm(7))
    if mesh is None:
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model:
            fully_shard(layer, mesh=mesh) if list(layer.parameters()) else None
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, seed)
    return model, optimizer


def train(model: Any, optimizer: Any, seed: int) -> None:
    """Train for one step, with the same batch on every rank."""
    optimizer.zero_grad()
    model(whole((4, 20), seed)).square().sum().backward()
    optimizer.step()


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def flat(state: Any) -> dict[str, Any]:
    return flatten_state_dict(state)[0]


def full(state: Any) -> dict[str, Any]:
    """Return the values of a state by DCP's keys, with whole tensors."""
    return {
        key: value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
        if isinstance(value, torch.Tensor) else value for key, value in flat(state).items()
    }  # fmt: skip


def expect_same(state: Any, expected: dict[str, Any]) -> None:
    got = full(state)
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    for key, value in expected.items():
        same = torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value
        assert same, (key, got[key], value)


# --- one model, every way to save and load it


def _save_and_load(world: World, run: str, mesh: Any, other: Any, save: Callable[[Any, Any, int], Any]) -> None:
    """Save a model of one mesh, and load it into a model of another."""
    model, optimizer = fsdp(mesh)
    state = states(model, optimizer) | {"step": 3, "names": ["a"], "plain": whole((50, 3))}
    expected = full(state)
    writer = world.writer(run)
    save(state, writer, 3)
    fresh, fresh_optimizer = fsdp(other, seed=5)
    target = states(fresh, fresh_optimizer) | {"step": 0, "names": [], "plain": whole((50, 3), 9)}
    load(target, world.reader(run), 3)
    expect_same(target, expected)
    set_state_dict(fresh, fresh_optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    expect_same(states(fresh, fresh_optimizer), full(states(model, optimizer)))
    for trained in ((model, optimizer), (fresh, fresh_optimizer)):  # training goes on as it would have
        train(*trained, seed=8)
    expect_same(states(fresh, fresh_optimizer), full(states(model, optimizer)))


def case_save(world: World) -> None:
    """dcp.save, and dcp.load with collectives and without."""

    def save(state: Any, writer: Any, step: int) -> None:
        dcp.save(state, storage_writer=writer, checkpoint_id=f"/out/step-{step}")

    _save_and_load(world, "save", world.mesh(), world.mesh(), save)
    for no_dist in (False, True):
        model, optimizer = fsdp(world.mesh(), seed=5)
        target = states(model, optimizer)
        expected = full(states(*fsdp(world.mesh())))
        dcp.load(target, storage_reader=world.reader("save"), checkpoint_id=3, no_dist=no_dist)
        expect_same(target, expected)


def case_async_save(world: World) -> None:
    def save(state: Any, writer: Any, step: int) -> None:
        future = dcp.async_save(state, storage_writer=writer, checkpoint_id=step, process_group=world.gloo)
        for value in flat(state).values():
            if hasattr(value, "_local_tensor"):
                value._local_tensor.fill_(-7)  # the values of the call are saved
        state["names"].append("later")
        future.result()

    model, optimizer = fsdp(world.mesh())
    state = states(model, optimizer) | {"names": ["a"]}
    expected = full(state) | {"names": ["a"]}
    writer = world.writer("async")
    save(state, writer, 3)
    target = states(*fsdp(world.mesh(), seed=5)) | {"names": []}
    dcp.load(target, storage_reader=world.reader("async"), checkpoint_id=3, no_dist=True)
    expect_same(target, expected)


def case_own_functions(world: World) -> None:
    _save_and_load(world, "own", world.mesh(), world.mesh(), snap.save)

    def save(state: Any, writer: Any, step: int) -> None:
        snap.async_save(state, writer, step, process_group=world.gloo).result()

    _save_and_load(world, "own-async", world.mesh(), world.mesh(), save)
    writer = world.writer("own-overlapping")
    futures = []
    for step in (1, 3):  # each save waits for the one that runs
        futures.append(snap.async_save({"a": whole((3000, 40), step)}, writer, step, process_group=world.gloo))
        snap.save({"a": whole((3000, 40), step + 1)}, writer, step + 1)
        assert futures[-1].done()
    for step, future in zip((1, 3), futures, strict=True):
        future.result()
        target = {"a": whole((3000, 40), 9)}
        snap.load(target, world.reader("own-overlapping"), step)
        expect_whole(target["a"], whole((3000, 40), step))


def case_hsdp(world: World) -> None:
    """HSDP to HSDP, and to FSDP and back."""
    if world.size == 4:
        for number, (mesh, other) in enumerate((((2, 2), (2, 2)), ((2, 2), (4,)), ((4,), (2, 2)))):
            _save_and_load(world, f"hsdp{number}", world.mesh(*mesh), world.mesh(*other), save)


def case_ddp(world: World) -> None:
    """DDP to DDP, and to FSDP."""
    for number, (mesh, other) in enumerate(((None, None), (None, world.mesh()))):
        _save_and_load(world, f"ddp{number}", mesh, other, save)


def _fsdp1(seed: int, *, is_trained: bool = False) -> tuple[Any, Any]:
    """Return a model under FSDP1, whose state dicts are sharded, and its optimizer."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 12))
    model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if is_trained:
        model(whole((2, 8))).sum().backward()
        optimizer.step()
    return model, optimizer


def _fsdp1_state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}


def _locals(state: Any) -> dict[str, Any]:
    """Return the shards of sharded tensors of a state, and its other values, by key."""
    return {
        f"{key}.{n}": one for key, value in flat(state).items() for n, one in enumerate(
            [shard.tensor.clone() for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]
        )
    }  # fmt: skip


def case_fsdp1(world: World) -> None:
    """FSDP1's sharded state, by DCP's older functions: the reader keeps the step that was set before them."""
    state = _fsdp1_state(*_fsdp1(0, is_trained=True))
    assert any(isinstance(value, ShardedTensor) for value in flat(state).values())
    writer, reader = world.writer("fsdp1"), world.reader("fsdp1")
    writer.reset(1)
    dcp.save_state_dict(state, writer)
    dcp.save({"model": state["model"]}, storage_writer=writer, checkpoint_id=2)  # the newest has no optimizer
    other, fresh = _fsdp1(1)
    target = {"model": other.state_dict()}
    reader.reset(1)
    dcp.load_state_dict(target, reader)
    other.load_state_dict(target["model"])
    loaded = load_sharded_optimizer_state_dict(target["model"], "optim", reader)
    fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, fresh, loaded["optim"]))
    expect_same(_locals(_fsdp1_state(other, fresh)), _locals(state))


def case_fsdp1_by_the_manager(world: World) -> None:
    """FSDP1's sharded state, saved and restored by managers, then loaded through DCP."""
    state = _fsdp1_state(*_fsdp1(0, is_trained=True))
    other, fresh = _fsdp1(1, is_trained=True)
    with SnapshotManager(world.url, run=f"fsdp1-manager-{world.size}") as manager:
        manager.save(1, state)
        target = _fsdp1_state(other, fresh)
        manager.restore_into(target, 1)
        assert manager.latest_step() == 1
    expect_same(_locals(target), _locals(state))
    other.load_state_dict(target["model"])
    fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, fresh, target["optim"]))
    expect_same(_locals(_fsdp1_state(other, fresh)), _locals(state))
    target = {"model": _fsdp1(2)[0].state_dict()}
    load(target, world.reader("fsdp1-manager"), 1)
    expect_same(_locals(target), _locals({"model": state["model"]}))


def case_tensor_parallel(world: World) -> None:
    """Tensor parallel, alone and under FSDP; loaded onto the meta device too."""

    def model(seed: int, device: str = "cpu", *, shard: bool) -> Any:
        torch.manual_seed(seed)
        with torch.device(device):
            one = nn.Sequential(nn.Linear(10, 15), nn.Linear(15, 9, bias=False))
        mesh = world.mesh(2, 2) if shard else world.mesh()
        parallelize_module(one, mesh["d1"] if shard else mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fully_shard(one, mesh=mesh["d0"]) if shard else one

    for shard in (False, True) if world.size == 4 else (False,):
        one = model(0, shard=shard)
        writer = world.writer(f"tp{shard}")
        save({"model": one}, writer, 1)
        other = model(1, shard=shard)
        load({"model": other}, world.reader(f"tp{shard}"), 1)
        expect_same(other.state_dict(), full(one.state_dict()))
        if not shard:
            target = {"model": model(2, "meta", shard=shard).state_dict()}
            dcp.load(target, storage_reader=world.reader("tpFalse"), checkpoint_id=1)
            expect_same(target["model"], full(one.state_dict()))
        writer.close()


# --- placements and meshes


def case_placements(world: World) -> None:
    """Every placement of a mesh to every other one, with rows and columns that the ranks do not divide."""
    kinds = (Shard(0), Shard(1), Replicate())
    meshes = [((world.size,), [(kind,) for kind in kinds])]
    if world.size == 4:
        meshes.append(((2, 2), list(product(kinds, kinds))))
    writer = world.writer("placements")
    for shape, placements in meshes:
        mesh = world.mesh(*shape)
        values = {f"t{n}": whole((13, 5), n) for n in range(len(placements))}
        state = {key: sharded(values[key], mesh, places) for key, places in zip(values, placements, strict=True)}
        save(state, writer, len(shape))
        reader = world.reader("placements")
        reader.reset(len(shape))
        for described in reader.read_metadata().state_dict_metadata.values():
            assert (tuple(described.size), described.properties.dtype) == ((13, 5), values["t0"].dtype)
            assert [tuple(chunk.sizes) for chunk in described.chunks] == [(13, 5)]
        for target_shape, target_placements in meshes:
            target_mesh = world.mesh(*target_shape)
            for places in target_placements:
                target = {key: sharded(whole((13, 5), 99), target_mesh, places) for key in values}
                load(target, world.reader("placements"), len(shape))
                for key, value in values.items():
                    expect_whole(target[key], value, (shape, key, target_shape, places))


def case_uneven_and_empty_shards(world: World) -> None:
    """Fewer rows than ranks, none at all, no dimensions, one row; dtypes of one to sixteen bytes."""
    mesh, values, state = world.mesh(), {}, {}
    for number, rows in enumerate((0, 1, world.size - 1, world.size, world.size + 1, 3000)):
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.complex128):
            values[f"{rows}-{dtype}"] = (whole((rows, 3), number) * 50).to(dtype)
    values["scalar"] = torch.tensor(4.5)
    for key, value in values.items():
        state[key] = sharded(value, mesh, [Shard(0) if value.dim() else Replicate()])
    writer = world.writer("uneven")
    save(state, writer, 1)
    target = {key: sharded(torch.zeros_like(v), mesh, state[key].placements) for key, v in values.items()}
    load(target, world.reader("uneven"), 1)
    square = world.mesh(2, world.size // 2)
    both = {key: [Shard(0) if value.dim() else Replicate()] * 2 for key, value in values.items()}
    on_square = {key: sharded(torch.zeros_like(value), square, both[key]) for key, value in values.items()}
    load(on_square, world.reader("uneven"), 1)
    plain = {key: torch.zeros_like(value) for key, value in values.items()}
    load(plain, world.reader("uneven"), 1)
    for key, value in values.items():
        expect_whole(target[key], value, key)
        expect_whole(on_square[key], value, key)
        expect_whole(plain[key], value, key)


def case_submesh(world: World) -> None:
    """A DTensor on the mesh of some ranks, as pipeline stages have: the others hold nothing of it."""
    half = world.size // 2
    meshes = [DeviceMesh("cpu", list(range(half))), DeviceMesh("cpu", list(range(half, world.size)))]
    mine, values = int(world.rank >= half), [whole((11, 4), 1), whole((6, 3), 2)]
    writer = world.writer("submesh")
    state = {f"stage{mine}": {"w": sharded(values[mine], meshes[mine], [Shard(0)])}, "step": 1}
    save(state, writer, 1)
    target = {f"stage{mine}": {"w": sharded(values[mine] * 0, meshes[mine], [Shard(0)])}, "step": 0}
    load(target, world.reader("submesh"), 1)
    expect_whole(target[f"stage{mine}"]["w"], values[mine])
    both = {f"stage{n}": {"w": values[n] * 0} for n in (0, 1)} | {"step": 0}
    load(both, world.reader("submesh"), 1)
    for n in (0, 1):
        expect_whole(both[f"stage{n}"]["w"], values[n])


def case_experts_of_each_rank(world: World) -> None:
    """Ranks have experts under names of their own, sharded over the ranks that have the same ones. On a mesh of just
    these ranks, DCP and managers store them. On a slice of a larger mesh, which says that all ranks have copies, the
    save fails, and the error says why.
    """
    if world.size != 4:
        return
    mesh, place = world.mesh(2, 2), world.rank % 2  # d1 is that of the experts
    meshes = [DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1, 3])]

    def state(factor: float, on: Any) -> dict[str, Any]:
        experts = {f"expert{2 * place + i}": whole((12, 300), 2 * place + i) * factor for i in range(2)}
        model: dict[str, Any] = {name: {"w": sharded(value, on, [Shard(0)])} for name, value in experts.items()}
        model["attention"] = sharded(whole((16, 400), 9) * factor, mesh["d0"], [Shard(0)])
        return {"model": model, "calls": dict.fromkeys(experts, place)}

    writer = world.writer("experts")
    save(state(1, meshes[place]), writer, 1)
    with SnapshotManager(world.url, run=writer.run) as manager:
        manager.save(2, state(1, meshes[place]))
        manager.wait_until_finished()
    for step in (1, 2):
        target = state(0, meshes[place])
        load(target, world.reader("experts"), step)
        expect_same(target, full(state(1, meshes[place])))
    with raises(CheckpointException, "If they are experts that only some ranks have"):
        save(state(1, mesh["d0"]), writer, 3)


def case_states_of_one_plan(world: World) -> None:
    """States with equal plans of DCP are saved if they differ by empty containers, by the order of keys in a leaf, or
    by a replicated DTensor in place of a tensor, as a manager saves them. Else the first error names what differs.
    """
    mesh, last = world.mesh(), world.rank == world.size - 1
    replicated = sharded(whole((4, 3), 1), mesh, [Replicate()])
    states = [
        {"x": {"a": 1, "b": {}}} if last else {"x": {"a": 1}},
        {"x": ({"a": 1, "b": 2} if last else {"b": 2, "a": 1},)},
    ]
    for number, state in enumerate(states):
        writer = world.writer(f"one-plan-{number}")
        for step in (1, 2, 3):
            snap.save(state, writer, step)
        writer.close()
    writer = world.writer("one-plan")
    with raises(CheckpointException, "save again: the error of the next"):
        dcp.save(states[1], storage_writer=writer, checkpoint_id=1)
    for step in (1, 2, 3):
        dcp.save(states[1], storage_writer=writer, checkpoint_id=step)
    writer.close()
    writer = world.writer("one-plan")
    dcp.save({"x": replicated if last else whole((4, 3), 1)}, storage_writer=writer, checkpoint_id=1)
    with raises(CheckpointException, f"0.5 on rank {world.size - 1}"):
        snap.save({"lr": 0.5 if last else 1.0}, writer, 2)
    with raises(CheckpointException, "tensors x.w differ"):
        snap.save({"x": {"w": torch.full((3,), float(last))}}, writer, 3)


def case_submesh_that_all_ranks_know(world: World) -> None:
    """A module on the even ranks: the others have its parameters too, without a row; and its extra state."""
    mesh, rows, copies = DeviceMesh("cpu", list(range(0, world.size, 2))), whole((6, 3)), whole((6,), 1)

    def module(factor: int) -> dict[str, Any]:
        return {
            "rows": torch.nn.Parameter(sharded(rows * factor, mesh, [Shard(0)])),
            "copies": torch.nn.Parameter(sharded(copies * factor, mesh, [Replicate()])),
            "_extra_state": {"count": factor, "tensor": torch.full((2,), float(factor))},
        }

    writer = world.writer("even")
    save({"module": module(1)}, writer, 1)
    target = {"module": module(10)}
    load(target, world.reader("even"), 1)
    for name, value in (("rows", rows), ("copies", copies)):
        local = target["module"][name]._local_tensor
        expect_whole(target["module"][name], value) if world.rank % 2 == 0 else expect_whole(local, local[:0])
    assert target["module"]["_extra_state"]["count"] == 1
    expect_whole(target["module"]["_extra_state"]["tensor"], torch.ones(2))


def case_shards_of_any_size(world: World) -> None:
    """Shards that the program places itself, by DCP's protocol and in a DTensor; shards that overlap are refused."""

    class Rows(torch.Tensor):
        """Some rows of a tensor of (16, 1), from `first` on."""

        @staticmethod
        def __new__(cls, local: Any, first: int) -> Any:
            one = torch.Tensor._make_wrapper_subclass(cls, (16, 1), dtype=local.dtype)
            one.local, one.chunk = local, ChunkStorageMetadata(torch.Size([first, 0]), local.size())
            return one

        def __init__(self, local: Any, first: int) -> None:
            pass

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError(f"{function} of a tensor in shards")

        def __create_chunk_list__(self) -> Any:
            return [self.chunk]

        def __create_write_items__(self, key: str, value: Any) -> Any:
            data = TensorWriteData(self.chunk, TensorProperties.create_from_tensor(self.local), self.size())
            return [WriteItem(MetadataIndex(key, self.chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

        def __get_tensor_shard__(self, index: Any) -> Any:
            return self.local

    def wrapped(local: Any, first: int) -> Any:
        shards = LocalShardsWrapper([local], [(first, 0)])
        return DTensor.from_local(
            shards, world.mesh(), [Shard(0)], run_check=False, shape=torch.Size([16, 1]), stride=(1, 1)
        )

    values = whole((16, 1))
    first, end = [(0, 4), (4, 7), (7, 11), (11, 16)][world.rank] if world.size == 4 else [(0, 5), (5, 16)][world.rank]
    other, stop = [(0, 6), (6, 8), (8, 9), (9, 16)][world.rank] if world.size == 4 else [(0, 12), (12, 16)][world.rank]
    writer = world.writer("any-size")
    for step, kind in enumerate((Rows, wrapped)):
        dcp.save({"t": {"w": kind(values[first:end].clone(), first)}}, storage_writer=writer, checkpoint_id=step)
        local = torch.zeros(stop - other, 1)
        load({"t": {"w": kind(local, other)}}, world.reader("any-size"), step)
        expect_whole(local, values[other:stop])
        moved = first - (world.rank == 1)  # as many rows, but another rank has one of them too, and one has no rank
        with raises(dcp.CheckpointException, "t.w: the shards of the ranks overlap"):
            save({"t": {"w": kind(values[moved : moved + end - first].clone(), moved)}}, writer, 9)
        fewer = end - (world.rank == 1)
        with raises(dcp.CheckpointException, "its tensors have 64 bytes, and the ranks have stored 60"):
            save({"t": {"w": kind(values[first:fewer].clone(), first)}}, writer, 9)
    with Repository.open(world.url) as repository:
        assert [snapshot.step for snapshot in repository.snapshots(writer.run)] == [0, 1]


def case_sharded_tensor(world: World) -> None:
    """FSDP1's ShardedTensor: saved, loaded into other shards, several on a rank too, and to plain tensors and back."""

    def made(rows: int, ranks: list[int]) -> Any:
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in ranks])
        return sharded_tensor.zeros(spec, rows, 3)

    def cut(value: Any, shard: Any) -> Any:
        offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        return value[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    ranks, values = list(range(world.size)), whole((11, 3))
    tensor = made(11, ranks)
    for shard in tensor.local_shards():
        shard.tensor.copy_(cut(values, shard))
    writer = world.writer("st")
    save({"a": tensor, "b": {"c": values}}, writer, 1)
    target = {"a": made(11, ranks[::-1]), "b": {"c": torch.zeros(11, 3)}}
    load(target, world.reader("st"), 1)
    for shard in target["a"].local_shards():
        assert torch.equal(shard.tensor, cut(values, shard))
    expect_whole(target["b"]["c"], values)
    on = [f"rank:{r}/cpu" for r in ranks]
    runs = [(0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 4, -1), (10, 1, 0)]  # first row, rows, rank
    several = ChunkShardingSpec(dim=0, placements=on + on[::-1])
    specs = (
        ChunkShardingSpec(dim=1, placements=on[:2]),
        several,
        EnumerableShardingSpec([ShardMetadata([first, 0], [rows, 3], on[rank]) for first, rows, rank in runs]),
    )
    for spec in specs:
        target = {"a": sharded_tensor.zeros(spec, 11, 3), "b": {"c": sharded_tensor.zeros(spec, 11, 3)}}
        load(target, world.reader("st"), 1)
        for shard in [*target["a"].local_shards(), *target["b"]["c"].local_shards()]:
            assert torch.equal(shard.tensor, cut(values, shard)), spec
    for step, spec in enumerate(specs, 2):  # and saved: several shards on a rank, and on some ranks alone
        tensor = sharded_tensor.zeros(spec, 11, 3)
        for shard in tensor.local_shards():
            shard.tensor.copy_(cut(values, shard) * step)
        if step % 2:
            save({"a": tensor}, writer, step)
        else:
            async_save({"a": tensor}, writer, step, process_group=world.gloo).result()
        for other in (*specs, None):
            target = {"a": torch.zeros(11, 3) if other is None else sharded_tensor.zeros(other, 11, 3)}
            load(target, world.reader("st"), step)
            for shard in target["a"].local_shards() if other else ():
                assert torch.equal(shard.tensor, cut(values * step, shard)), (spec, other)
            expect_whole(target["a"], values * step) if other is None else None
    plain = {"a": torch.zeros(11, 3)}
    load(plain, world.reader("st"), 1)
    expect_whole(plain["a"], values)


def case_tied_tensors(world: World) -> None:
    """One tensor under several keys, in one part and in two, is loaded under each; its shards are stored once."""
    value, plain = sharded(whole((900, 40)), world.mesh(), [Shard(0)]), whole((700, 30), 1)
    state = {"m": {"emb": value, "head": value, "p": plain}, "o": {"w": value, "p": plain}}
    writer = world.writer("tied")
    for step in (1, 2):
        if step == 1:
            save(state, writer, step)
        else:
            async_save(state, writer, step, process_group=world.gloo).result()
        if world.rank == 0:
            # two ranks may each store the plain one, which has one chunk
            assert writer.snapshot.stored_bytes < 1.1 * (900 * 40 + 2 * 700 * 30) * 4, writer.snapshot
        target = {part: {key: one * 0 for key, one in of.items()} for part, of in state.items()}
        load(target, world.reader("tied"), step)
        expect_same(target, full(state))


# --- replicas, and what is each rank's own


def case_replicas_are_stored_once(world: World) -> None:
    """A state that every rank holds whole is stored once."""
    state = {"ddp": {f"w{n}": whole((400, 100), n) for n in range(6)}}
    writer = world.writer("ddp")
    save(state, writer, 1)
    if world.rank == 0:
        snapshot = writer.snapshot
        assert snapshot.logical_bytes == 6 * 400 * 100 * 4, snapshot.logical_bytes
        assert snapshot.stored_bytes < 1.1 * snapshot.logical_bytes
    target = {"ddp": {key: value * 0 for key, value in state["ddp"].items()}}
    load(target, world.reader("ddp"), 1)
    expect_same(target, full(state))


def case_keys_of_each_rank(world: World) -> None:
    """Ranks may have keys of their own, as data loaders do: each rank loads its own."""
    mine = f"loader_{world.rank}"
    state = {mine: {"position": 10 + world.rank, "order": list(range(world.rank, 900))}, "step": 1}
    writer = world.writer("keys")
    save(state, writer, 1)
    target = {mine: {"position": 0, "order": []}, "step": 0}
    load(target, world.reader("keys"), 1)
    expect_same(target, full(state))


def case_keys_in_another_order(world: World) -> None:
    """Ranks may have the same keys in another order; objects that communicate load in the same order on all of them."""

    class Gathering:
        def state_dict(self) -> dict[str, Any]:
            return {"count": 4, "tensor": torch.ones(3)}

        def load_state_dict(self, state: Any) -> None:
            dist.all_gather([torch.zeros(2) for _ in range(world.size)], torch.ones(2))
            assert state["count"] == 4

    class Reducing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            dist.all_reduce(torch.ones(5))

    def turned(state: dict[str, Any]) -> dict[str, Any]:
        return dict(list(state.items())[:: -1 if world.rank else 1])

    plain = {"x": whole((5,)), "y": whole((900, 7), 1)}
    state = turned({"gathering": Gathering(), "reducing": Reducing(), "plain": turned(plain), "last": whole((4, 4), 2)})
    writer = world.writer("orders")
    dcp.save(state, storage_writer=writer, checkpoint_id=1)
    save(state, writer, 2)
    async_save(state, writer, 3, process_group=world.gloo).result()
    for step in (1, 2, 3):
        blank = {key: value * 0 for key, value in plain.items()}
        target = dict(state) | {"plain": turned(blank), "last": state["last"] * 0}
        if step == 1:
            dcp.load(target, storage_reader=world.reader("orders"), checkpoint_id=step)
        else:
            load(target, world.reader("orders"), step)
        expect_same({key: target[key] for key in ("plain", "last")}, full({"plain": plain, "last": state["last"]}))
    plain["y"] = plain["y"] + (world.rank == 0)
    with raises(dcp.CheckpointException, "tensors plain.y differ"):
        save(state | {"plain": turned(plain)}, writer, 4)


def case_values_of_each_rank(world: World) -> None:
    """`PerRank`, below a top-level key: each rank gets its own back, or another rank's if `per_rank` says so."""

    def own(rank: int) -> dict[str, Any]:
        return {"seed": 10 + rank, "order": torch.arange(900) + rank}

    def blank() -> dict[str, Any]:
        return {"rng": {"mine": {"seed": 0, "order": torch.zeros(900, dtype=torch.int64)}}, "step": 0}

    writer = world.writer("own-values")
    state = {"rng": {"mine": PerRank(own(world.rank))}, "step": 1}
    save(state, writer, 1)
    async_save(state, writer, 2, process_group=world.gloo).result()
    for step in (1, 2):
        target = blank()
        load(target, world.reader("own-values"), step)
        expect_same(target, full({"rng": {"mine": own(world.rank)}, "step": 1}))
        target = {"rng": {"mine": PerRank(blank()["rng"]["mine"])}, "step": 0}
        load(target, world.reader("own-values"), step)
        expect_same(target["rng"]["mine"].value, full(own(world.rank)))
        target = blank()
        load(target, world.reader("own-values", per_rank=1), step)
        expect_same(target, full({"rng": {"mine": own(1)}, "step": 1}))
        with raises(CheckpointException, "Missing key in checkpoint state_dict: rng.mine"):
            load(blank(), world.reader("own-values", per_rank="drop"), step)
    torch.manual_seed(world.rank)
    state = {"mine": PerRank(own(world.rank)), "rng": RngState(), "model": torch.nn.Linear(2, 2, bias=False), "n": 2}
    state["model"].weight.data.fill_(3)
    for step in (3, 4):  # at the top, where DCP itself would take their states for those of all ranks
        save(state, writer, step) if step == 3 else async_save(state, writer, step, process_group=world.gloo).result()
        drawn, target = torch.rand(3), {"mine": PerRank(own(7)), "rng": RngState(), "n": 0}
        load(target, world.reader("own-values"), step)
        assert torch.equal(torch.rand(3), drawn), step
        torch.manual_seed(world.rank)
        expect_same({"mine": target["mine"].value, "n": target["n"]}, full({"mine": own(world.rank), "n": 2}))


def case_plain_tensors_of_some_ranks(world: World) -> None:
    """Pipeline stages: layers of one rank and of several, in lists, tuples and arrays too, which change between saves.
    Each rank gets its own back, and one target can take all of them.
    """

    class OfStages(DefaultSavePlanner):  # a class of its own: the cache goes by the name
        pass

    def held(rank: int, step: int) -> dict[str, Any]:
        first = {f"layer{rank}": whole((3000, 3), rank + 10 * step), "all": whole((2000,), step)}
        stage = {f"blocks{rank}": [whole((40, 5), 20 + rank), {"n": rank}]}
        if rank:
            first["late"] = whole((9000, 2), 30 + step)
        if step >= 3 and rank % 2:
            first["odd"] = whole((5000,), 40)  # on other ranks than before
        if step == 4 and not rank:
            first["of 0"] = whole((5000,), 41)
        return {"model": first, "stages": stage, "pair": {f"p{rank}": (whole((50, 40), 50 + rank), np.ones(700))}}

    def blank(state: dict[str, Any]) -> dict[str, Any]:
        return {"model": {key: value * 0 for key, value in state["model"].items()}, "step": 0}

    for kind in ("sync", "async", "cached"):
        writer, run = world.writer(f"some-{kind}"), f"some-{kind}"
        for step in range(6):
            state = held(world.rank, step) | {"step": step}
            if kind == "cached":
                planner = OfStages(enable_plan_caching=True)
                dcp.save(state, storage_writer=writer, checkpoint_id=step, planner=planner)
            elif kind == "async" or step % 2:
                async_save(state, writer, step, process_group=world.gloo).result()
            else:
                save(state, writer, step)
            target = blank(state)
            load(target, world.reader(run), step)
            expect_same(target, full({"model": state["model"], "step": step}))
            if world.rank == 0:  # each byte was stored once
                found = [held(rank, step) for rank in range(world.size)]
                sizes = {key: value.nbytes for one in found for key, value in one["model"].items()}
                others = world.size * (40 * 5 * 4 + 50 * 40 * 4 + 700 * 8)
                assert writer.snapshot.logical_bytes == sum(sizes.values()) + others, (kind, step, writer.snapshot)
        writer.close()
        layers = [held(rank, 5)["model"][f"layer{rank}"] for rank in range(world.size)]
        target = {f"layer{n}": sharded(value * 0, world.mesh(), [Shard(0)]) for n, value in enumerate(layers)}
        load({"model": target}, world.reader(run), 5)
        for n, value in enumerate(layers):
            expect_whole(target[f"layer{n}"], value)
        with Repository.open(world.url) as repository:
            restored = repository.restore(f"{writer.run}@5")
            for rank in range(world.size):
                expect_same(restored["model"] | held(rank, 5)["model"], full(restored["model"]))
                expect_whole(restored["pair"][f"p{rank}"][0], whole((50, 40), 50 + rank))
                expect_whole(restored["stages"][f"blocks{rank}"][0], whole((40, 5), 20 + rank))


def case_a_tensor_that_more_ranks_hold(world: World) -> None:
    """The ranks that have held it have copied all of it; from the next save on they share it with the others."""
    last = world.size - 1
    for first in ([0], [last], [*range(last)]):
        run = f"more-{first[0]}-{len(first)}"
        writer = world.writer(run)
        for step, by in enumerate([first, range(world.size), range(world.size), [last], range(world.size)]):
            state: dict[str, Any] = {"model": {"all": whole((5000,), step)}, "step": step}
            if world.rank in by:
                state["model"]["w"] = whole((8000, 4), step)
            if step == 3:  # some drop it: see the next case
                writer.close()
                writer = world.writer(f"{run}-again")
            if step == 4 and world.size > 2:
                save(state, writer, step)
            else:
                async_save(state, writer, step, process_group=world.gloo).result()
            target = {"model": {key: value * 0 for key, value in state["model"].items()}, "step": 0}
            load(target, world.reader(writer.run.removesuffix(f"-{world.size}")), step)
            expect_same(target, full(state))
            if world.rank == 0:
                assert writer.snapshot.logical_bytes == 4 * (5000 + 8000 * 4), (first, step)
        writer.close()


def case_a_failed_save_in_which_more_ranks_hold_a_tensor(world: World) -> None:
    """A rank whose write fails forgets the former holders too, so the next save succeeds."""
    import pytest

    def state(step: int) -> dict[str, Any]:
        held = {"w": whole((8000, 4), step)} if world.rank == 0 or step else {}
        return {"model": {"all": whole((5000,), step), **held}}

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError("no space")

    writer = world.writer("more-fails")
    async_save(state(0), writer, 0, process_group=world.gloo).result()
    with pytest.MonkeyPatch.context() as patch, raises(CheckpointException, "no space"):
        if world.rank == 0:
            patch.setattr(saving, "write", fail)
        async_save(state(1), writer, 1, process_group=world.gloo).result()
    async_save(state(2), writer, 2, process_group=world.gloo).result()
    target = {"model": {key: value * 0 for key, value in state(2)["model"].items()}}
    load(target, world.reader("more-fails"), 2)
    expect_same(target, full(state(2)))


def case_a_tensor_that_other_ranks_drop(world: World) -> None:
    """The copies of the others' shares do not cover it: the save fails, the next works."""

    def state(step: int) -> dict[str, Any]:
        return {"model": {"w": whole((8000, 4), step)} if world.rank < 2 or step < 2 else {"x": whole((3,))}}

    writer = world.writer("moves")
    if world.size > 2:
        async_save(state(1), writer, 1, process_group=world.gloo).result()
        with raises(CheckpointException, "model.w: the ranks that hold it have changed since the last save"):
            async_save(state(2), writer, 2, process_group=world.gloo).result()
    async_save(state(3), writer, 3, process_group=world.gloo).result()
    target = {"model": {key: value * 0 for key, value in state(3)["model"].items()}}
    load(target, world.reader("moves"), 3)
    expect_same(target, full(state(3)))


def case_plain_values_that_differ(world: World) -> None:
    """They are an error on all ranks that names the key; nothing is committed."""
    writer = world.writer("differ")
    state = {"w": whole((3, 4)), "seeds": {"own": world.rank, "same": 5}}
    with raises(CheckpointException, "seeds.own: 0 on rank 0, 1 on rank 1"):
        save(state, writer, 1)
    with raises(CheckpointException, "seeds.own"):
        async_save(state, writer, 1, process_group=world.gloo).result()
    save(state | {"seeds": {"own": 1, "same": 5}}, writer, 2)
    with Repository.open(world.url) as repository:
        assert [snapshot.step for snapshot in repository.snapshots(writer.run)] == [2]


def case_replicas_that_differ(world: World) -> None:
    """Plain tensors that should be the same on all ranks, and are not, are an error that names them."""
    writer = world.writer("diverged")
    state = {"model": {"good": whole((500, 10)), "bad": whole((500, 10), seed=int(world.rank == world.size - 1))}}
    with raises(CheckpointException, f"rank {world.size - 1}: tensors model.bad differ from those of rank"):
        save(state, writer, 1)
    for text in ("tensors of part 'model' differ", "tensors model.bad differ"):
        with raises(CheckpointException, text):
            async_save(state, writer, 1, process_group=world.gloo).result()
    save({"model": {"good": state["model"]["good"]}}, writer, 2)


def case_buffers_that_differ(world: World) -> None:
    """BatchNorm's buffers are saved from rank 0 alone, which warns once; a parameter that differs is an error."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    norm = {"bn.running_mean": whole((300_000,)), "bn.running_var": whole((300_000,), 1), "bn.weight": whole((700,))}
    own = {key: value + world.rank * ("running" in key) for key, value in norm.items()}
    count = torch.tensor(5 + world.rank)
    writer = world.writer("buffers")
    logging.getLogger("snapstore").addHandler(handler)
    try:
        state = {"model": own | {"bn.num_batches_tracked": count}, "step": 1}
        save(state, writer, 1)
        async_save(state, writer, 2, process_group=world.gloo).result()
        state["model"]["bn.weight"] = norm["bn.weight"] + world.rank
        with raises(CheckpointException, "tensors model.bn.weight differ"):
            save(state, writer, 3)
    finally:
        logging.getLogger("snapstore").removeHandler(handler)
    assert len(said) == (world.rank == 0), said
    for text in said:
        assert "buffers on rank 1 differ" in text or "buffers on ranks 1, 2, 3 differ" in text, text
        assert "model.bn.running_mean, model.bn.running_var" in text, text
        assert "weight" not in text, text
    for step in (1, 2):
        target = {"model": {key: value * 0 for key, value in own.items()} | {"bn.num_batches_tracked": count * 0}}
        load(target, world.reader("buffers"), step)
        expect_same(target, full({"model": norm | {"bn.num_batches_tracked": torch.tensor(5)}}))


def case_replicas_of_rank_0(world: World) -> None:
    """With replicas="rank0" plain tensors and replicas of DTensors may differ: those of rank 0 are stored, whole."""
    mesh = world.mesh(2, world.size // 2)
    row = world.rank // (world.size // 2)  # the replica
    plain = {"small": whole((3,)), "large": whole((900, 400)), "none": whole(())}
    wide = whole((600, 400), 3)
    local = wide.chunk(world.size // 2)[world.rank % (world.size // 2)]
    pair = DTensor.from_local(local + row, mesh, [Replicate(), Shard(0)], run_check=False)
    state = {"model": {key: value + world.rank for key, value in plain.items()}, "mesh": {"pair": pair}}
    writer = world.writer("of-rank-0", replicas="rank0")
    save(state, writer, 1)
    async_save(state, writer, 2, process_group=world.gloo).result()
    for step in (1, 2):
        target = {part: {key: value * 0 for key, value in of.items()} for part, of in state.items()}
        load(target, world.reader("of-rank-0"), step)
        expect_same({"model": target["model"]}, full({"model": plain}))
        expect_whole(target["mesh"]["pair"].to_local(), local)
    writer.close()
    writer = world.writer("unlike-modes", replicas="check" if world.rank == 0 else "rank0")
    with raises(CheckpointException, "rank 1 saves with replicas='rank0', rank 0 with 'check'"):
        save(state, writer, 1)


# --- failures


def case_a_rank_that_fails(world: World) -> None:
    """A failure on any rank, at any hook, fails the save on all. It leaves no session, also if another rank failed:
    the next gc, of any process, works.
    """

    class Failing:
        def __init__(self, hook: str, rank: int) -> None:
            self.writer = world.writer("fails")
            if world.rank == rank:
                setattr(self.writer, hook, self.fail)

        def fail(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("injected")

    state = {"w": whole((300, 40)), "n": 1}
    step = 0
    for hook in ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"):
        coordinator_only = hook in ("prepare_global_plan", "finish")
        for rank in (0,) if coordinator_only else (0, world.size - 1):
            writer, step = Failing(hook, rank).writer, step + 1
            with raises(CheckpointException, "injected", rank):
                save(state, writer, step)
            assert world.rank or not list(writer.repository.store.list("sessions/")), hook
            with raises(CheckpointException, "injected", rank):
                async_save(state, writer, step, process_group=world.gloo).result()
            assert world.rank or not list(writer.repository.store.list("sessions/")), hook
            writer.__dict__.pop(hook, None)
            state["n"] = step
            save(state, writer, 100 + step)
            target = {"w": whole((300, 40), 3), "n": 0}
            load(target, world.reader("fails"), 100 + step)
            expect_same(target, full(state))
            writer.close()
    with Repository.open(world.url) as repository:
        steps = [snapshot.step for snapshot in repository.snapshots(f"fails-{world.size}")]
        assert steps == [100 + n for n in range(1, step + 1)], steps
        dist.barrier()
        if world.rank == 0:
            assert not [info.key for info in repository.store.list("sessions/")]
            repository.gc()
            assert not repository.check("restore").problems


def case_a_rank_that_cannot_copy(world: World) -> None:
    """If one rank cannot copy its state, the future raises that on all ranks, and the next saves are those of all."""
    last = world.size - 1
    writer = world.writer("cannot-copy")
    for step in range(1, 5):
        state = {"w": whole((300, 40), step), "n": step}
        bad = state | ({"bad": whole((4, 4)).to("meta")} if world.rank == last else {})
        if step % 2:  # by DCP's function, then by ours
            future = dcp.async_save(bad, storage_writer=writer, checkpoint_id=step, process_group=world.gloo)
        else:
            future = snap.async_save(bad, writer, step, process_group=world.gloo)
        with raises(CheckpointException, "UnsupportedLeafError", last):
            future.result()
        snap.async_save(state, writer, 10 + step, process_group=world.gloo).result()
        target = {"w": whole((300, 40), 9), "n": 0}
        load(target, world.reader("cannot-copy"), 10 + step)
        expect_same(target, full(state))


def case_an_object_that_fails_on_a_rank(world: World) -> None:
    """If state_dict of an object fails on one rank, the save fails on all, and they do not wait for this rank."""

    class Failing:
        def __init__(self, is_broken: bool) -> None:
            self.is_broken = is_broken

        def state_dict(self) -> dict[str, Any]:
            if self.is_broken:
                raise RuntimeError("injected")
            return {"w": whole((300, 40)), "n": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state["n"]

    writer = world.writer("object-fails")
    for rank in (0, world.size - 1):
        state = {"one": Failing(world.rank == rank), "n": 1}
        with raises(CheckpointException, "injected", rank):
            save(state, writer, 1)
        with raises(CheckpointException, "injected", rank):
            async_save(state, writer, 1, process_group=world.gloo).result()
        state["one"].is_broken = False
        save(state, writer, 2)
        load(state, world.reader("object-fails"), 2)
        assert state["one"].loaded == 3


def case_a_failed_save_and_the_plan_cache(world: World) -> None:
    """The cache leaves the items of a plan out: it is not taken for that of a staged state whose save has failed."""

    class OfFailedSaves(DefaultSavePlanner):  # a class of its own: the cache goes by the name
        pass

    writer, kept = world.writer("fails-cached"), []
    for step in range(1, 4):
        for other in ({}, {"w": whole((3, 3)).to("meta")}):
            state = {f"own{world.rank}": whole((300, 40), step), "all": whole((50, 3))}
            planner = OfFailedSaves(enable_plan_caching=True)
            dcp.save(state, storage_writer=writer, checkpoint_id=step, planner=planner)
            future = dcp.async_save(other, storage_writer=writer, checkpoint_id="none", process_group=world.gloo)
            kept.append(future.exception())  # its frames keep the state that was staged
            assert isinstance(kept[-1], CheckpointException)


def case_failures_of_a_load(world: World) -> None:
    """A failure on any rank, or a missing key, fails a load with collectives on all ranks; the next load works."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    writer = world.writer("load-fails")
    save({"a": whole((3, 3))}, writer, 1)
    target = {"a": whole((3, 3), 2)} | ({"b": whole((2, 2))} if world.rank == 1 else {})
    with raises(dcp.CheckpointException, "Missing key in checkpoint state_dict: b"):
        dcp.load(target, storage_reader=world.reader("load-fails"), checkpoint_id=1)
    last = world.size - 1
    hooks = {"read_metadata": 0, "set_up_storage_reader": 0, "prepare_global_plan": 0}
    for hook, rank in [*hooks.items(), ("prepare_local_plan", 1), ("read_data", 0), ("read_data", last)]:
        reader, target = world.reader("load-fails"), {"a": whole((3, 3), 2)}
        if world.rank == rank:
            setattr(reader, hook, fail)
        with raises(dcp.CheckpointException, "injected", rank):
            dcp.load(target, storage_reader=reader, checkpoint_id=1)
        reader.__dict__.pop(hook, None)
    dcp.load(target, storage_reader=reader, checkpoint_id=1)  # the reader that has just failed
    expect_whole(target["a"], whole((3, 3)))


def case_a_save_while_ranks_open_the_newest(world: World) -> None:
    """All ranks load the snapshot that the coordinator has found, unless another rank's has other keys or shapes."""
    steps = itertools.count()

    def save(state: dict[str, Any]) -> None:
        step = next(steps)
        if world.rank == 0:
            with Repository.open_or_create(world.url) as repository:
                repository.save(state, run=f"newest-{world.size}", step=step, ranks=False)
        dist.barrier()

    def load(first: dict[str, Any], then: dict[str, Any], target: dict[str, Any]) -> None:
        """Load the newest; the other ranks than 0 look for it after `then` was saved."""

        class Reader(SnapstoreReader):
            def read_metadata(self) -> Any:
                if world.rank:
                    save(then)
                metadata = super().read_metadata()
                if not world.rank:
                    save(then)
                return metadata

        save(first)
        reader = Reader(world.url, run=f"newest-{world.size}")
        dcp.load(target, storage_reader=reader, checkpoint_id="latest")
        assert reader.snapshot.step == next(steps) - 2

    def state(n: int, rows: int = 4) -> dict[str, Any]:
        return {"w": torch.full((rows,), float(n)), "n": n}

    target = state(0)
    load(state(1), state(2), target)
    assert (target["w"].tolist(), target["n"]) == ([1.0] * 4, 1)
    one, fewer = state(1), {"w": torch.ones(4)}
    load(one, fewer, state(0) if world.rank == 0 else {"w": torch.zeros(4)})
    others = state(2, rows=5), {"w": torch.ones(4), "n": torch.ones(())}
    for first, then in [(fewer, one), *((one, other) for other in others), *((other, one) for other in others)]:
        with raises(dcp.CheckpointException, "the coordinator found"):
            load(first, then, copy.deepcopy(then if world.rank else first))


def case_another_coordinator(world: World) -> None:
    """DCP's older functions let another rank than 0 coordinate: it commits, and its failures fail all ranks."""
    state = {"w": whole((300, 40)), "n": 1}
    writer = world.writer("coordinator")
    for hook in ("finish", ""):
        if hook and world.rank == 1:
            setattr(writer, hook, None)
        writer.reset(1)
        if hook:
            with raises(dcp.CheckpointException, "object is not callable"):
                dcp.save_state_dict(state, writer, coordinator_rank=1)
        else:
            dcp.save_state_dict(state, writer, coordinator_rank=1)
        writer.__dict__.pop(hook, None)
    assert (writer.snapshot is None) == (world.rank != 1)
    target, reader = {"w": whole((300, 40), 3), "n": 0}, world.reader("coordinator")
    reader.reset(1)
    dcp.load_state_dict(target, reader, coordinator_rank=world.size - 1)
    expect_same(target, full(state))


def case_ranks_that_do_not_agree(world: World) -> None:
    """Ranks with different steps or repositories get errors that say so."""
    writer = world.writer("agree")
    with raises(dcp.CheckpointException, "pass the same checkpoint_id and repository on all ranks"):
        save({"a": whole((3, 3))}, writer, 1 + world.rank)
    writer.close()
    other = SnapstoreWriter(world.folder / f"own-{world.size}-{world.rank}", run="r")
    with raises(dcp.CheckpointException, "another repository"):
        save({"a": whole((3, 3))}, other, 1)
    other.close()


def case_save_with_no_dist(world: World) -> None:
    """Each rank would commit its own part as the same step; a rank that is to save alone says so."""
    writer, run = world.writer("no-dist"), f"no-dist-{world.size}"
    with raises(BaseException, f"this is rank {world.rank} of {world.size}"):
        dcp.save({"a": whole((2, 2))}, storage_writer=writer, checkpoint_id=1, no_dist=True)
    dist.barrier()
    with Repository.open(world.url) as repository:
        assert repository.snapshots(run) == []
    dcp.save({"a": whole((2, 2))}, storage_writer=writer, checkpoint_id=2)
    writer.close()
    dist.barrier()
    if world.rank == 0:
        alone = world.writer("no-dist", process_group=False)
        dcp.save({"a": whole((2, 2))}, storage_writer=alone, checkpoint_id=3, no_dist=True)
        alone.close()
        with Repository.open(world.url) as repository:
            assert [snapshot.step for snapshot in repository.snapshots(run)] == [2, 3]
            assert (repository.restore(f"{run}@3")["a"] == whole((2, 2))).all()
    dist.barrier()
    alone = world.writer(f"no-dist-of-{world.rank}", process_group=False)
    with raises(BaseException, f"process_group=False: {world.size} ranks save together"):
        dcp.save({"a": whole((2, 2))}, storage_writer=alone, checkpoint_id=4)
    alone.close()


def case_process_mode(world: World) -> None:
    """PROCESS mode is refused before a byte is sent to the process."""
    writer = world.writer("process")
    future = dcp.async_save(
        {"a": whole((2, 2))}, storage_writer=writer, checkpoint_id=1, process_group=world.gloo,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )  # fmt: skip
    with raises(InvalidInputError, "AsyncCheckpointerType.THREAD"):
        future.result()


# --- groups, planners, the wire


def case_groups(world: World) -> None:
    """Some ranks save alone; a state that was staged for all of them is refused."""
    ranks = list(range(world.size // 2))
    group, mesh = dist.new_group(ranks, backend="gloo"), DeviceMesh("cpu", ranks)
    if world.rank in ranks:
        state = {"a": sharded(whole((9, 5)), mesh, [Shard(0)]), "b": whole((4, 4))}
        writer = world.writer("group", process_group=group)
        save(state, writer, 1, process_group=group)
        async_save(state, writer, 2, process_group=group).result()
        for step in (1, 2):
            target = {"a": whole((9, 5), 8), "b": whole((4, 4), 8)}
            load(target, world.reader("group"), step)
            expect_same(target, full(state))
        writer.close()
        other = world.writer("group-other")
        if len(ranks) < world.size:
            with raises(dcp.CheckpointException, "process_group of async_save"):
                async_save({"b": whole((4, 4))}, other, 1, process_group=group).result()
        other.close()
    dist.barrier()
    if world.size > 3:
        _save_by_all_but_one(world)


def _save_by_all_but_one(world: World) -> None:
    """A mesh names ranks of the job, a group numbers its own: two sets of ranks are not one for their names."""
    ranks = list(range(1, world.size))
    group, mesh = dist.new_group(ranks, backend="gloo"), DeviceMesh("cpu", ranks[:2])
    if world.rank in ranks:
        held = {}
        if world.rank in ranks[:2]:
            held["a"] = sharded(whole((9, 5)), mesh, [Replicate()])
        if world.rank in ranks[1:3]:
            held["b"] = whole((4, 4))
        writer = world.writer("all-but-one", process_group=group)
        save(held, writer, 1, process_group=group)
        writer.close()
        target = {"a": whole((9, 5), 8), "b": whole((4, 4), 8)}
        load(target, world.reader("all-but-one", process_group=group), 1)
        expect_same(target, {"a": whole((9, 5)), "b": whole((4, 4))})
    dist.barrier()


def case_planners(world: World) -> None:
    """A planner that changes values, and the plan cache over several saves."""

    class Halving(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            value = super().resolve_data(write_item)
            return value.half() if isinstance(value, torch.Tensor) else value

    values = whole((7, 5))
    state = {"a": sharded(values, world.mesh(), [Shard(0)]), "n": 2}
    writer = world.writer("planners")
    dcp.save(state, storage_writer=writer, checkpoint_id=1, planner=Halving())
    target = {"a": sharded(values.half() * 0, world.mesh(), [Shard(0)]), "n": 0}
    load(target, world.reader("planners"), 1)
    expect_whole(target["a"], values.half())
    for step in range(2, 6):
        state = {"a": sharded(whole((7, 5), step), world.mesh(), [Shard(0)]), "n": step, "b": whole((3, 3), step)}
        if step == 4:
            state["more"] = whole((2, 2))
        planner = DefaultSavePlanner(enable_plan_caching=True)
        if step % 2:
            dcp.save(state, storage_writer=writer, checkpoint_id=step, planner=planner)
        else:
            dcp.async_save(
                state, storage_writer=writer, checkpoint_id=step, planner=planner, process_group=world.gloo
            ).result()
        target = {key: value * 0 for key, value in state.items()}
        load(target, world.reader("planners"), step)
        expect_same(target, full(state))
    writer.close()

    class OfFewSaves(DefaultSavePlanner):  # a class of its own: the cache goes by the name
        pass

    for step in range(6, 9):  # a writer for each save; the second one fails
        writer = world.writer("planners")
        state = {f"own{world.rank}": {"at": step, "ranks": [world.rank]}, "w": whole((30, 4), step)}
        planner = OfFewSaves(enable_plan_caching=True)
        if step == 7:
            if world.rank == world.size - 1:
                writer.write_data = None
            with raises(dcp.CheckpointException, "object is not callable"):
                dcp.save(state, storage_writer=writer, checkpoint_id=step, planner=planner)
        else:
            dcp.save(state, storage_writer=writer, checkpoint_id=step, planner=planner)
            target = {f"own{world.rank}": {"at": 0, "ranks": []}, "w": state["w"] * 0}
            load(target, world.reader("planners"), step)
            expect_same(target, full(state))
        writer.close()


def case_bytes_on_the_wire(world: World) -> None:
    """Every rank but 0 sends less than 2 KiB in a save of 300 tensors, if rank 0 has the same keys."""
    sent: list[int] = []
    gather, scatter, broadcast = _DistWrapper.gather_object, _DistWrapper.scatter_object, _DistWrapper.broadcast_object

    def counting_gather(self: Any, value: Any) -> Any:
        sent.append(len(pickle.dumps(value)))
        return gather(self, value)

    def counting_scatter(self: Any, values: Any) -> Any:
        sent.append(sum(len(pickle.dumps(value)) for value in values or ()) // world.size)
        return scatter(self, values)

    def counting_broadcast(self: Any, value: Any) -> Any:
        sent.append(len(pickle.dumps(value)))
        return broadcast(self, value)

    _DistWrapper.gather_object, _DistWrapper.scatter_object = counting_gather, counting_scatter
    _DistWrapper.broadcast_object = counting_broadcast
    try:
        mesh = world.mesh()
        state = {"model": {f"layer.{n}.weight": sharded(whole((8, 4), n), mesh, [Shard(0)]) for n in range(300)}}
        writer = world.writer("wire")
        for step in (1, 2):
            sent.clear()
            save(state | {"step": step}, writer, step)
            assert sent
            assert world.rank == 0 or sum(sent) < 2048, sent
        writer.close()
    finally:
        _DistWrapper.gather_object, _DistWrapper.scatter_object = gather, scatter
        _DistWrapper.broadcast_object = broadcast
    dist.barrier()


def case_next_saves_are_deltas(world: World) -> None:
    """Unchanged tensors cost nothing on any rank, and a changed element costs little."""
    values = whole((40_000, 16))
    writer = world.writer("deltas")
    for step in range(1, 5):
        values[::500, 0] += 1
        state = {"a": sharded(values, world.mesh(), [Shard(0)]), "plain": whole((3000, 4))}
        if step % 2:
            save(state, writer, step)
        else:
            async_save(state, writer, step, process_group=world.gloo).result()
        if world.rank == 0 and step > 1:
            assert writer.snapshot.stored_bytes < 0.2 * writer.snapshot.logical_bytes, (step, writer.snapshot)


def case_large_trees(world: World) -> None:
    """A large tree of plain values costs nothing in the next save, and one chunk after an edit; DCP loads it."""
    writer = world.writer("trees")
    words = {f"word {i}": i * 7919 % 100_003 for i in range(8_000)}
    for step in range(1, 4):
        words["word 700"] = step // 3
        save({"w": whole((3, 4)), "data": [words]}, writer, step)
        if world.rank == 0:
            new = writer.snapshot.new_chunks
            assert new == 0 if step == 2 else 0 < new <= (9 if step == 1 else 1), (step, new)
    target = {"w": whole((3, 4), 5), "data": [dict.fromkeys(words, -1)]}
    dcp.load(target, storage_reader=world.reader("trees"), checkpoint_id=3, no_dist=True)
    assert target["data"] == [words]


# --- the manager, and other world sizes


def case_the_managers_snapshots(world: World) -> None:
    """Rank 0 saves alone with a manager; all ranks load it into DTensors. A manager restores the save that follows."""
    values, run = whole((37, 5)), f"manager-{world.size}"
    if world.rank == 0:
        with SnapshotManager(world.url, run=run, ranks=False) as manager:
            manager.save(1, {"model": {"w": values, "b": values[0]}, "step": 1}).result()
    dist.barrier()
    mesh = world.mesh()
    target = {"model": {"w": sharded(values * 0, mesh, [Shard(0)]), "b": values[0] * 0}, "step": 0}
    load(target, world.reader("manager"), 1)
    expect_whole(target["model"]["w"], values)
    expect_whole(target["model"]["b"], values[0])
    assert target["step"] == 1
    target["step"] = 2
    writer = world.writer("manager")
    save(target, writer, 2)
    if world.rank == 0:
        assert writer.snapshot.new_chunks == 0, writer.snapshot
        with Repository.open(world.url) as repository:
            restored = repository.restore(f"{run}@2")
            assert torch.equal(restored["model"]["w"], values)
            assert restored["step"] == 2
            assert repository.snapshot(f"{run}@2").parent == repository.snapshot(f"{run}@1").id


def of_other_worlds() -> dict[str, Any]:
    """Return tensors of any number of rows and columns, some of fewer than there are ranks, and one of many chunks."""
    rows = {f"rows{n}": whole((n, 160 if n > 4000 else 3), n) for n in (0, 1, 2, 3, 4, 5, 7, 1001, 4001)}
    return rows | {f"columns{n}": whole((5, n), 50 + n) for n in (1, 2, 3, 7, 901)}


def case_write_for_another_world(world: World) -> None:
    writer, mesh = SnapstoreWriter(world.folder / OTHER_WORLDS, run=f"of-{world.size}"), world.mesh()
    state = {name: sharded(value, mesh, [Shard(int("columns" in name))]) for name, value in of_other_worlds().items()}
    save(state | {"n": world.size}, writer, 1)
    writer.close()


def case_load_of_another_world(world: World) -> None:
    """Load what the worlds before this one have saved, on more ranks or fewer; then save rows in the same run."""
    url, expected, mesh = world.folder / OTHER_WORLDS, of_other_worlds(), world.mesh()
    for before in {2: (4,), 3: (4, 2)}[world.size]:
        reader = SnapstoreReader(url, run=f"of-{before}")
        target: dict[str, Any] = {}
        for along, is_ours in ((Shard(1), True), (Replicate(), False), (Shard(0), True)):
            target = {name: sharded(value * 0, mesh, [along]) for name, value in expected.items()} | {"n": 0}
            load(target, reader, 1) if is_ours else dcp.load(target, storage_reader=reader, checkpoint_id=1)
            assert target["n"] == before
            for name, value in expected.items():
                expect_whole(target[name], value, (before, along, name))
        writer = SnapstoreWriter(url, run=f"of-{before}")
        save({name: value for name, value in target.items() if "columns" not in name}, writer, world.size)
        if world.rank == 0:
            assert writer.snapshot.chunks > 40, writer.snapshot
            assert writer.snapshot.new_chunks <= 0.2 * writer.snapshot.chunks, (
                writer.snapshot.new_chunks,
                writer.snapshot.chunks,
            )
        writer.close()


CASES = [name.removeprefix("case_") for name in list(globals()) if name.startswith("case_")]

if __name__ == "__main__":
    main(*sys.argv[1:], cases=globals())
