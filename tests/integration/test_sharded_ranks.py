"""The boxes of a sharded tensor say which part of `full_tensor()` each rank holds; on real ranks with gloo.

The tensors are of FSDP2, HSDP, and FSDP2 with tensor parallelism, with sizes that are divisible by the number of ranks
and sizes that are not; and ShardedTensors of FSDP1. The ranks compare their boxes: every element is on one rank and its
replicas.
"""

from __future__ import annotations

import textwrap

import pytest

from kit.forked import Forked, wait_all
from kit.processes import environment
from snapstore import Repository

pytest.importorskip("torch")

HEAD = textwrap.dedent("""
    import os
    import sys
    from datetime import timedelta

    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from snapstore.state.values.sharded import local_of, sharding_of

    folder, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=100)
    )

    def cut(whole, box):
        return whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]

    def compare(name, value, whole):
        sharding, local = sharding_of(value), local_of(value)
        pieces = [cut(whole, box) for box in sharding.boxes]
        held = torch.cat(pieces) if pieces and whole.dim() else pieces[0] if pieces else whole.flatten()[:0]
        assert torch.equal(held, local if pieces else local.flatten()), (name, sharding, local.shape)
        everyone = [None] * world
        torch.distributed.all_gather_object(everyone, sharding)
        counts = torch.zeros(whole.shape, dtype=torch.int64)
        for other, one in enumerate(everyone):
            if isinstance(value, DTensor):  # who else holds the same is known of these alone
                assert one.group[one.replica] == other and one.replicas == len(one.group), (name, one)
            assert all(everyone[member].boxes == one.boxes for member in one.group), (name, one)
            for box in one.boxes if one.replica == 0 else ():
                cut(counts, box).add_(1)
        assert (counts == 1).all(), (name, counts)

    def model(hidden):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, hidden), nn.Linear(hidden, 5), nn.LayerNorm(5))

    def compare_model(kind, one):
        seen = 0
        for name, value in one.state_dict().items():
            if isinstance(value, DTensor):
                compare(f"{kind} {name}", value, value.full_tensor())
                seen += 1
        assert seen == len(one.state_dict()) or "tp" in kind, kind
        return seen
""")

MESHES = textwrap.dedent("""
    for hidden in (8, 7, 3):
        one = model(hidden)
        fully_shard(one, mesh=init_device_mesh("cpu", (world,)))
        compare_model(f"fsdp2 {hidden}", one)
    if world == 4:
        for hidden in (8, 7):
            one = model(hidden)
            fully_shard(one, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
            compare_model(f"hsdp {hidden}", one)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for hidden in (8, 6, 7, 5):
            one = model(hidden)
            parallelize_module(one, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            fully_shard(one, mesh=mesh["dp"])
            assert compare_model(f"fsdp + tp {hidden}", one) >= 4
""")

UNEVEN = textwrap.dedent("""
    import torch.distributed.checkpoint as dcp

    from snapstore import Repository, SnapshotManager
    from snapstore.dcp import SnapstoreReader, SnapstoreWriter, async_save, load, save

    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    one = model(7)
    parallelize_module(one, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(one, mesh=mesh["dp"])
    compare_model("fsdp + tp", one)
    full = {name: value.full_tensor() for name, value in one.state_dict().items()}

    def expect(found):
        assert all(torch.equal(found[name], whole) for name, whole in full.items()), found

    def fill(load):
        with torch.no_grad():
            for parameter in one.parameters():
                local_of(parameter).fill_(99)
        load({"model": one.state_dict()})
        torch.distributed.barrier()  # a rank whose load has failed does not come here
        expect({name: value.full_tensor() for name, value in one.state_dict().items()})

    with SnapshotManager(f"{folder}/repository", run="r") as snapshots:
        snapshots.save(1, {"model": one.state_dict()})
        snapshots.wait_until_finished()
        expect(snapshots.restore()["model"])
        fill(snapshots.restore_into)

    writer, reader = SnapstoreWriter(f"{folder}/repository", run="d"), SnapstoreReader(f"{folder}/repository", run="d")
    save({"model": one.state_dict()}, writer, 1)
    async_save({"model": one.state_dict()}, writer, 2).result()
    with Repository.open(f"{folder}/repository") as repository:
        for step in (1, 2):
            expect(repository.restore(f"d@{step}")["model"])
            fill(lambda into: load(into, reader, step))
            fill(lambda into: dcp.load(into, storage_reader=reader, checkpoint_id=step))
    writer.close()
""")

OUTSIDE = textwrap.dedent("""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from snapstore import SnapshotManager

    mesh = DeviceMesh("cpu", [0, 1])
    rows = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    ones = torch.ones_like(distribute_tensor(torch.tensor(0.0), mesh, [Replicate()]))
    state = {"rows": rows, "scale": ones + 2, "sum": rows.sum().redistribute(placements=[Replicate()])}
    if rank == 2:
        assert [value._local_tensor.numel() for value in state.values()] == [0, 1, 1]
    with SnapshotManager(f"{folder}/repository", run="r") as snapshots:
        for step in range(2):
            snapshots.save(step, state)
        snapshots.wait_until_finished()
        found = snapshots.restore()
        assert torch.equal(found["rows"], torch.arange(6.0)) and (found["scale"], found["sum"]) == (3, 15)
        target = {name: torch.zeros_like(value) for name, value in state.items()}
        snapshots.restore_into(target)
        if rank < 2:
            assert all(torch.equal(target[name]._local_tensor, state[name]._local_tensor) for name in state)
""")

SHARDED_TENSOR = textwrap.dedent("""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(world)])
    for rows in (8, 7, 2):
        whole = torch.arange(rows * 3.0).reshape(rows, 3)
        value = sharded_tensor.zeros(spec, rows, 3)
        for shard in value.local_shards():
            shard.tensor.copy_(cut(whole, (shard.metadata.shard_offsets, shard.metadata.shard_sizes)))
        compare(f"ShardedTensor {rows}", value, whole)
""")


RESTORE = textwrap.dedent("""
    from snapstore import Repository

    def build():
        one = model(8)
        if world == 4:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(one, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            fully_shard(one, mesh=mesh["dp"])
        else:
            fully_shard(one, mesh=init_device_mesh("cpu", (world,)))
        with torch.no_grad():
            for parameter in one.parameters():
                local_of(parameter).fill_(99)
        return one, torch.optim.AdamW(one.parameters(), lr=0.1)

    def step(one, optimizer):
        one(torch.arange(30.0).reshape(3, 10) / 10).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    one, optimizer = build()
    wholes = torch.load(f"{folder}/expected.pt")
    torch.distributed.barrier()
    for turn in range(world):  # the others are not there: a rank that communicated would wait in vain
        if turn == rank:
            with Repository.open(f"{folder}/repository") as repository:
                repository.restore_into("r@1", {"model": one, "optimizer": optimizer})
        torch.distributed.barrier()
    full = {name: value.full_tensor() for name, value in one.state_dict().items()}
    assert all(torch.equal(full[name], whole) for name, whole in wholes[0].items()), full
    step(one, optimizer)
    full = {name: value.full_tensor() for name, value in one.state_dict().items()}
    for name, whole in wholes[1].items():
        torch.testing.assert_close(full[name], whole, rtol=1e-4, atol=1e-5)
""")


#: gloo's threads are not joined: torch's own destructors sometimes abort a process whose work is done.
FOOT = textwrap.dedent("""
    torch.distributed.barrier()
    print("done", rank, flush=True)
    os._exit(0)
""")


def run_ranks(folder, script: str, world: int) -> None:
    """Run a script on several ranks; each prints that it is done."""
    program, env = ("-c", HEAD + script + FOOT, str(folder)), environment(GLOO_SOCKET_IFNAME="lo")
    processes = [Forked(*program, str(rank), str(world), log=folder / f"log.{rank}", env=env) for rank in range(world)]
    wait_all(processes, 110)
    texts = [process.text() for process in processes]
    assert [text.strip().splitlines()[-1:] for text in texts] == [[f"done {r}"] for r in range(world)], "\n".join(texts)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 3])
def test_meshes(tmp_path, world):
    """The boxes of each parameter give the place of the local tensor in `full_tensor()`."""
    run_ranks(tmp_path, MESHES, world)


@pytest.mark.slow
def test_uneven_rows_of_tensor_parallelism(tmp_path):
    """FSDP2 cuts uneven rows of tensor parallelism in its own order; a snapshot has all of them, at their places.

    Managers and DCP save and load them.
    """
    run_ranks(tmp_path, UNEVEN, 6)


@pytest.mark.slow
def test_ranks_outside_of_a_mesh(tmp_path):
    """torch's operators give such a rank a local tensor with a value if the whole tensor has no dimensions."""
    run_ranks(tmp_path, OUTSIDE, 3)


@pytest.mark.slow
def test_sharded_tensor(tmp_path):
    """ShardedTensors as FSDP1 has them; the last rank may hold nothing."""
    run_ranks(tmp_path, SHARDED_TENSOR, 3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_training_goes_on_sharded(tmp_path, world):
    """FSDP2, also with tensor parallelism, restores a model and a fresh optimizer from a run that one process saved.

    One rank after the other restores while the others wait: no rank needs another. The next step gives the weights of
    one process, within rounding.
    """
    import torch
    from torch import nn

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 5), nn.LayerNorm(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = []
    with Repository.create(tmp_path / "repository", chunk_bytes=64) as repository:
        for number in range(3):
            model(torch.arange(30.0).reshape(3, 10) / 10).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number:
                expected.append({name: value.clone() for name, value in model.state_dict().items()})
            if number == 1:
                repository.save({"model": model, "optimizer": optimizer}, run="r", step=1)
    torch.save(expected, tmp_path / "expected.pt")
    run_ranks(tmp_path, RESTORE, world)
