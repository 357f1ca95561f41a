"""Ranks that train with FSDP2 or DDP while snapshots are written: cases for `kit.dcp_ranks.run`.

With the backend "gloo" they train on the CPU. With "cpu:gloo,cuda:nccl" each rank trains on its own GPU: then NCCL's
collectives run beside the copy, the kernels and the writes of a save.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kit.dcp_ranks import World, expect_same, full, main, raises, states, whole
from snapstore import InvalidInputError, SnapshotManager

CHUNK, WIDTH, STEPS = 16 * 1024, 192, 6
DEVICE = "cuda" if "nccl" in os.environ.get("SNAPSTORE_TEST_BACKEND", "") else "cpu"


def mesh(world: World) -> Any:
    return init_device_mesh(DEVICE, (world.size,))


def made(world: World, parallel: str, seed: int) -> tuple[Any, Any]:
    """Return a model and its optimizer, after one step."""
    torch.manual_seed(seed)
    layers = [nn.Linear(31, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)]
    model: Any = nn.Sequential(*layers).to(DEVICE)
    if parallel == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in (model[0], model[2], model[4], model):
            fully_shard(layer, mesh=mesh(world))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    train(world, model, optimizer, seed)
    return model, optimizer


def train(world: World, model: Any, optimizer: Any, step: int) -> None:
    """Train for a step, with another batch on each rank."""
    optimizer.zero_grad()
    model(whole((8, 31), 100 * step + world.rank).to(DEVICE)).square().mean().backward()
    optimizer.step()


@contextmanager
def manager(world: World, run: str, **options: Any) -> Iterator[Any]:
    with SnapshotManager(world.url, run=run, **options) as snapshots:
        yield snapshots


def _train_and_resume(world: World, parallel: str) -> None:
    """Save every step while training goes on; resume from each snapshot, and train to the same bits."""
    model, optimizer = made(world, parallel, 1)
    wanted, saves = [], []
    with manager(world, parallel) as snapshots:
        for step in range(STEPS):
            state = states(model, optimizer) | {"step": step}
            wanted.append(full(state))
            saves.append(snapshots.save(step, state))
            for number in range(3):  # the save goes on beside these
                train(world, model, optimizer, 10 * step + number)
        ended = full(states(model, optimizer))
        depths = [save.result().depth for save in saves]
        assert depths[0] == 0 < max(depths), "no save has stored deltas"
        for step in (0, 3, STEPS - 1):
            other, other_optimizer = made(world, parallel, 2)
            target = states(other, other_optimizer) | {"step": -1}
            snapshots.restore_into(target, step)
            expect_same(target, wanted[step])
            of_model, of_optimizer = target["model"], target["optimizer"]
            set_state_dict(other, other_optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
            for later in range(step, STEPS):
                for number in range(3):
                    train(world, other, other_optimizer, 10 * later + number)
            expect_same(states(other, other_optimizer), ended)


def case_fsdp2(world: World) -> None:
    """Sharded tensors."""
    _train_and_resume(world, "fsdp2")


def case_ddp(world: World) -> None:
    """Replicas, of which each rank stores a share."""
    _train_and_resume(world, "ddp")


def case_a_replica_diverges(world: World) -> None:
    """One flipped bit on one rank is an error on all that names the tensor; the save before it stays."""
    model, optimizer = made(world, "ddp", 3)
    with manager(world, "diverges", async_save=False) as snapshots:
        snapshots.save(0, states(model, optimizer))
        weight = model.module[2].weight
        bits = weight.detach().view(torch.int32)
        flip = 1 << 9 if world.rank == world.size - 1 else 0
        with torch.no_grad():
            bits[17, 5] ^= flip  # a bit of the value's lower half
        with raises(InvalidInputError, "2.weight: differ"):
            snapshots.save(1, states(model, optimizer))
        with torch.no_grad():
            bits[17, 5] ^= flip
        snapshots.save(2, states(model, optimizer))
        assert snapshots.all_steps() == [0, 2]


def case_dcp_async_save(world: World) -> None:
    """`dcp.async_save` beside a training, and `dcp.load`."""
    model, optimizer = made(world, "fsdp2", 4)
    writer, wanted = world.writer("async"), []
    for step in range(3):
        state = states(model, optimizer)
        wanted.append(full(state))
        future = dcp.async_save(state, storage_writer=writer, checkpoint_id=step, process_group=world.gloo)
        train(world, model, optimizer, step)
        future.result()
    for step in range(3):
        other, other_optimizer = made(world, "fsdp2", 5)
        target = states(other, other_optimizer)
        dcp.load(target, storage_reader=world.reader("async"), checkpoint_id=step)
        expect_same(target, wanted[step])


CASES = [name.removeprefix("case_") for name in list(globals()) if name.startswith("case_")]

if __name__ == "__main__":
    main(*sys.argv[1:], cases=globals())
