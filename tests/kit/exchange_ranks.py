"""Ranks of a torch.distributed job, with gloo, that restore with read="exchange": cases for `kit.dcp_ranks.run`.

A case compares with read="own" to the bit, in memory that held other values before, and counts the chunks that all
ranks together have decoded. Chunks have 512 bytes and a round 16 KiB, so a small state goes through many rounds.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from kit.dcp_ranks import World, expect_whole, main, raises, sharded, whole

CHUNK, ROUND = 512, 16 * 1024


@contextmanager
def manager(world: World, run: str, **options: Any) -> Iterator[Any]:
    """Yield a manager of all ranks, of the repository that `other_worlds` has made."""
    from snapstore import SnapshotManager

    with SnapshotManager(world.url, run=run, **options) as snapshots:
        yield snapshots


@contextmanager
def decoded(world: World) -> Iterator[Counter[str]]:
    """Count how often each chunk is decoded, by its digest; at the end, sum the counts of all ranks.

    A job with NCCL exchanges in the memory of GPUs, so its chunks are decoded there, also those of plain tensors.
    """
    import torch
    import torch.distributed as dist

    from snapstore.engine.cpu import CpuEngine
    from snapstore.restore import exchange

    engines: list[Any] = [CpuEngine]
    if torch.cuda.is_available():
        from snapstore.engine.cuda.engine import CudaEngine

        engines.append(CudaEngine)
    counts: Counter[str] = Counter()

    def counting(start: Any) -> Any:
        def counted(engine: Any, batch: Any) -> Any:
            counts.update(bytes(digest).hex() for digest in batch.digests)
            return start(engine, batch)

        return counted

    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(mock.patch.object(engine, "start_decode", counting(engine.start_decode)))
        stack.enter_context(mock.patch.object(exchange, "ROUND_BYTES", ROUND))
        yield counts
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, counts)
    counts.clear()
    for one in everyone:
        counts.update(one)


def nodes(*hosts: str) -> Any:
    """Let each rank believe that it is on one of these hosts."""
    import torch.distributed as dist

    return mock.patch("snapstore.restore.exchange.boot_id", return_value=hosts[dist.get_rank()])


def plain_state(world: World) -> dict[str, Any]:
    from snapstore import PerRank, RngState

    values = {f"t{n}": whole((150 + n, 11), n) for n in range(6)}
    return values | {
        "tied": values["t0"], "small": whole((2, 2), 9), "scalar": whole((), 9), "step": 7,
        "own": PerRank({"seed": world.rank, "noise": whole((1500,), 50 + world.rank)}), "rng": RngState(),
    }  # fmt: skip


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of the same form with other values."""
    import torch

    from snapstore import PerRank, RngState

    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[key] = torch.full_like(value, 99.0)
        elif isinstance(value, PerRank):
            found[key] = PerRank({"seed": -1, "noise": torch.full((1500,), 99.0)})
        else:
            found[key] = RngState() if isinstance(value, RngState) else -1
    return found


def expect_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in (key for key in expected if key.startswith(("t", "s"))):
        if key == "step":
            assert found[key] == expected[key]
        else:
            expect_whole(found[key], expected[key], key)
    noise, seed = (found["own"].value[key] for key in ("noise", "seed"))
    expect_whole(noise, expected["own"].value["noise"])
    assert seed == expected["own"].value["seed"]


def case_replicated(world: World) -> None:
    """Plain tensors, equal on all ranks: a chunk is decoded once per node, and without the exchange once per rank."""
    state = plain_state(world)
    with manager(world, "replicated", async_save=False) as snapshots:
        snapshots.save(1, state)
        with decoded(world) as own:
            target = empty_like(state)
            snapshots.restore_into(target)
        expect_state(target, state)
        shared = {digest for digest, count in own.items() if count == world.size}
        assert len(shared) > 20, len(shared)
        halves = ["a", "b"] * (world.size // 2)
        for hosts, times in ((["a"] * world.size, 1), (["a"] + ["b"] * (world.size - 1), 2), (halves, 2)):
            snapshots._exchange = None
            with nodes(*hosts), decoded(world) as counts:
                target = empty_like(state)
                snapshots.restore_into(target, read="exchange")
            expect_state(target, state)
            assert counts.keys() == own.keys()
            assert {counts[digest] for digest in shared} == {min(times, world.size)}, (hosts, counts)
            assert all(counts[digest] == 1 for digest in own.keys() - shared), counts
        fresh = snapshots.restore(1, read="exchange", keys="t*")
        expect_whole(fresh["t5"], state["t5"])
        assert fresh["tied"] is not fresh["t0"]
        assert fresh["tied"].data_ptr() == fresh["t0"].data_ptr()
        part = snapshots.restore(1, read="exchange", keys=f"t{world.rank}")  # each rank may want something else
        expect_whole(part[f"t{world.rank}"], state[f"t{world.rank}"])


def case_placements(world: World) -> None:
    """Every placement to every other one, with sizes that the ranks do not divide; each chunk is decoded once."""
    from torch.distributed.tensor import Replicate, Shard

    kinds = (Shard(0), Shard(1), Replicate())
    meshes = [((world.size,), [(kind,) for kind in kinds])]
    if world.size == 4:
        rows, columns, copies = kinds
        meshes.append(((2, 2), [(rows, columns), (copies, rows), (columns, rows)]))
    with manager(world, "placements", async_save=False) as snapshots:
        for step, (shape, placements) in enumerate(meshes):
            mesh = world.mesh(*shape)
            values = {f"v{n}": whole((131, 61), n) for n in range(len(placements))}
            saved = {key: sharded(values[key], mesh, places) for key, places in zip(values, placements, strict=True)}
            snapshots.save(step, saved | {"one": whole((3,))})
            for target_shape, target_placements in meshes:
                target_mesh = world.mesh(*target_shape)
                for places in target_placements:
                    target = {key: sharded(whole((131, 61), 99), target_mesh, places) for key in values}
                    with decoded(world) as counts:
                        snapshots.restore_into(target | {"one": whole((3,)) * 0}, step, read="exchange")
                    for key, value in values.items():
                        expect_whole(target[key], value, (shape, key, target_shape, places))
                    assert set(counts.values()) == {1}, (shape, target_shape, places, counts)


def other_worlds(url: Path) -> None:
    """Save snapshots of two and of eight ranks, which `case_other_worlds` restores; in the process of the test."""
    from torch.distributed.tensor import Shard

    from kit import rank_saves
    from snapstore import Repository

    with Repository.create(url, chunk_bytes=CHUNK) as repository:
        for size in (2, 8):

            def make(size: int = size) -> dict[str, Any]:
                return {"a": rank_saves.sharded(whole((4001, 9), 7), (size,), [Shard(0)]), "b": whole((3000,), 3)}

            rank_saves.save(repository, [make] * size, size, "worlds")


def case_other_worlds(world: World) -> None:
    """Snapshots of fewer and of more ranks."""
    from torch.distributed.tensor import Replicate, Shard

    with manager(world, "worlds") as snapshots:
        for step in (2, 8):
            for place in (Shard(0), Shard(1), Replicate()):
                target = {"a": sharded(whole((4001, 9), 99), world.mesh(), [place]), "b": whole((3000,), 99)}
                with decoded(world) as counts:
                    snapshots.restore_into(target, step, read="exchange")
                expect_whole(target["a"], whole((4001, 9), 7))
                expect_whole(target["b"], whole((3000,), 3))
                assert len(counts) > 250, len(counts)
                assert set(counts.values()) == {1}, (step, place, counts)


def case_store_fails(world: World) -> None:
    """A rank whose store fails, at its first read or between rounds: all raise its error, which names it."""
    from snapstore import StorageError
    from snapstore.restore.exchange import _Rounds
    from snapstore.storage.kept_open import KeptOpen

    state = plain_state(world)
    with manager(world, "fails", async_save=False) as snapshots:
        snapshots.save(1, state)
        for bad, thing, name, at in (
            *((0, KeptOpen, "get_ranges", 0), (1, KeptOpen, "get_ranges", 0)),
            *((0, _Rounds, "_exchange", 2), (1, _Rounds, "_exchange", 2), (1, _Rounds, "_place", 5)),
        ):
            seen, real = 0, getattr(thing, name)

            def broken(*args: Any, original: Any = real, bad: int = bad, at: int = at, **more: Any) -> Any:
                nonlocal seen
                seen += 1
                if world.rank == bad and seen > at:
                    raise StorageError("the disk is gone")
                return original(*args, **more)

            began = time.monotonic()
            with decoded(world), mock.patch.object(thing, name, broken):
                prefix = "" if world.rank == bad else f"rank {bad}: "
                with raises(StorageError, f"{prefix}the disk is gone"):
                    snapshots.restore_into(empty_like(state), read="exchange")
            assert seen > at
            assert time.monotonic() - began < 20
            target = empty_like(state)
            snapshots.restore_into(target, read="exchange")
            expect_state(target, state)


def case_damage(world: World) -> None:
    """A damaged chunk is IntegrityError on all ranks, also where another rank has read it."""
    import torch.distributed as dist

    from kit.objects import flip_file
    from snapstore import FormatError, IntegrityError

    state = {"a": whole((30_000,), 77)}
    with manager(world, "damage", async_save=False) as snapshots:
        before = {*(world.url / "packs").rglob("*")}
        dist.barrier()
        snapshots.save(1, state)
        if world.rank == 0:
            packs = sorted(path for path in (world.url / "packs").rglob("*") if path.is_file() and path not in before)
            packs[0].chmod(0o644)
            flip_file(packs[0], 200)
        dist.barrier()
        for _ in range(2):
            with raises((IntegrityError, FormatError), "damage@1 (id:"):
                snapshots.restore(1, read="exchange")


def case_rewritten(world: World) -> None:
    """A rank finds that the snapshot was rewritten and its packs are gone: all raise, no rank goes on by itself."""
    from snapstore import IntegrityError
    from snapstore.restore.exchange import _Rounds

    state = {"a": whole((30_000,), 78)}
    exchange = _Rounds._exchange

    def gone(rounds: Any, number: int, read: Any) -> None:
        if world.rank == 1 and number == 1:
            raise IntegrityError("a pack is missing")
        exchange(rounds, number, read)

    with manager(world, "rewritten", async_save=False) as snapshots:
        snapshots.save(1, state)
        with (
            decoded(world),
            mock.patch.object(_Rounds, "_exchange", gone),
            mock.patch("snapstore.restore.pipeline.ruling_now", return_value=None),  # as if the record had changed
            raises(IntegrityError, f"{'' if world.rank == 1 else 'rank 1: '}rewritten@1: was rewritten or deleted"),
        ):
            snapshots.restore(1, read="exchange")
        expect_whole(snapshots.restore(1, read="exchange")["a"], state["a"])


def case_no_memory_for_the_lists(world: World) -> None:
    """A rank that has no memory for the lists of the others tells them before they wait for it in a collective."""
    import torch

    from snapstore.distributed.torch_ranks import TorchRanks

    state, ranks = {"a": whole((30_000,), 80)}, TorchRanks(silent_s=60.0)
    with manager(world, "lists", ranks=ranks, async_save=False) as snapshots:
        snapshots.save(1, state)
        for _ in range(2):
            began = time.monotonic()
            with ExitStack() as stack:
                if world.rank == 1:
                    stack.enter_context(mock.patch.object(torch, "zeros", side_effect=MemoryError("no memory")))
                with raises(Exception, "no memory"):
                    snapshots.restore(1, read="exchange")
            assert time.monotonic() - began < 40
            expect_whole(snapshots.restore(1, read="exchange")["a"], state["a"])
    ranks.close()


def case_failures_leave_no_group(world: World) -> None:
    """After exchanges that failed on one rank, no process group of them is left, with its descriptors and threads."""
    import gc

    from snapstore.restore.exchange import _Rounds

    def fail(rounds: Any) -> None:
        raise MemoryError("no memory")

    def used() -> dict[str, int]:
        """Return how many process groups, descriptors and threads this process has, after an exchange."""
        from torch.distributed.distributed_c10d import _world

        expect_whole(snapshots.restore(1, read="exchange")["a"], state["a"])
        gc.collect()
        counts = {name: len([*Path("/proc/self", name).iterdir()]) for name in ("fd", "task")}
        return counts | {"groups": len(_world.pg_map)}

    state = {"a": whole((30_000,), 79)}
    with manager(world, "groups", async_save=False) as snapshots:
        snapshots.save(1, state)
        before = used()
        hosts = ["a", "a", "b", "b"] if world.size == 4 else ["a"] * world.size
        for number in range(6):  # in the first ones all ranks lose their group, in the others those of one node do
            with ExitStack() as stack:
                if number >= 3:
                    stack.enter_context(nodes(*hosts))
                if world.rank == number % 2:
                    stack.enter_context(mock.patch.object(_Rounds, "run", fail))
                with raises(Exception, "no memory"):
                    snapshots.restore(1, read="exchange")
        after = used()
        assert after["groups"] == before["groups"], (before, after)
        assert after["fd"] < before["fd"] + 6, (before, after)
        assert after["task"] < before["task"] + 6, (before, after)


def case_unlike(world: World) -> None:
    """If ranks make different calls, or with another step, that is an error on all, and no hang."""
    from snapstore import InvalidInputError

    state = {"a": whole((3000,), 5)}
    with manager(world, "unlike", async_save=False) as snapshots:
        snapshots.save(1, state)
        snapshots.save(2, state)
        last = world.size - 1
        calls = (
            lambda: snapshots.restore(2, read="exchange"),
            lambda: snapshots.restore(1, read="own"),
            lambda: snapshots.latest_step(),
            lambda: snapshots.restore_into({"a": whole((3001,), 1)}, 1, read="exchange"),
            lambda: snapshots.restore(1, read="exchange", keys="no such"),
            lambda: snapshots.restore(1, read="exchange", per_rank=-1),
        )
        for number, call in enumerate(calls):
            if world.rank == last:
                with suppress(Exception):  # two of the calls do not exchange, and succeed
                    call()
            else:
                with raises(Exception, f"rank {last}: " if number > 2 else f"rank {last} asks"):
                    snapshots.restore(1, read="exchange")
            expect_whole(snapshots.restore(1, read="exchange")["a"], state["a"])
        with raises(InvalidInputError, "expected one of own, exchange"):
            snapshots.restore(1, read="once")
    with manager(world, "unlike", ranks=False, read_only=True) as alone, raises(InvalidInputError, "has no ranks"):
        alone.restore(1, read="exchange")
    import torch.distributed as dist

    from snapstore.distributed.torch_ranks import TorchRanks

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if world.size == 4 else []
    for pair in pairs[world.rank // 2 : world.rank // 2 + 1]:
        ranks = TorchRanks(pair)
        with manager(world, f"pair-{world.rank // 2}", ranks=ranks, async_save=False) as snapshots:
            snapshots.save(1, state)
            with raises(InvalidInputError, "only managers of the whole job exchange"):
                snapshots.restore(1, read="exchange")
        ranks.close()


def case_absent(world: World) -> None:
    """A rank that does not call it is named in bounded time."""
    import torch.distributed as dist

    from snapstore import RanksError
    from snapstore.distributed.torch_ranks import TorchRanks

    ranks = TorchRanks(silent_s=30.0, total_s=1.5)
    with manager(world, "absent", ranks=ranks, async_save=False) as snapshots:
        snapshots.save(1, {"a": whole((3000,), 5)})
        began = time.monotonic()
        if world.rank < world.size - 1:
            with raises(RanksError, f"rank {world.size - 1}"):
                snapshots.restore(1, read="exchange")
        assert time.monotonic() - began < 15
        dist.barrier()
    ranks.close()


def case_killed(world: World) -> None:
    """A rank that is killed before a collective: the others raise an error that names it. The last case."""
    from snapstore import RanksError
    from snapstore.distributed import node_group
    from snapstore.distributed.torch_ranks import TorchRanks

    state = {"a": whole((30_000,), 5)}
    ranks = TorchRanks(silent_s=2.0, total_s=20.0)
    with manager(world, "killed", ranks=ranks, async_save=False) as snapshots:
        snapshots.save(1, state)
        if world.rank == 1:
            node_group.distributed.all_to_all_single = lambda *args, **more: os._exit(0)
        began = time.monotonic()
        with raises(RanksError, "rank 1 of 4: has ended or stopped"):
            snapshots.restore(1, read="exchange")
        assert time.monotonic() - began < 30
        (world.folder / f"killed-{world.rank}").touch()
        time.sleep(2.0)  # rank 0's server ends with it
        os._exit(0)  # a barrier would fail


def case_cuda(world: World) -> None:
    """Each rank has tensors on its own GPU, and NCCL exchanges them; needs as many GPUs as ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    from snapstore.engine.cuda.engine import CudaEngine

    mesh, counts = init_device_mesh("cuda", (world.size,)), Counter[str]()
    start = CudaEngine.start_decode

    def counted(engine: Any, batch: Any) -> Any:
        counts.update(bytes(digest).hex() for digest in batch.digests)
        return start(engine, batch)

    values = {"plain": whole((4001, 99), 1).cuda(), "host": whole((999, 99), 2)}
    cut = whole((4001, 99), 3).cuda()
    with manager(world, "cuda", async_save=False) as snapshots, mock.patch.object(CudaEngine, "start_decode", counted):
        snapshots.save(1, values | {"cut": sharded(cut, mesh, [Shard(0)])})
        for place in (Shard(0), Shard(1), Replicate()):
            target = {key: torch.zeros_like(value) for key, value in values.items()}
            target["cut"] = sharded(torch.zeros_like(cut), mesh, [place])
            counts.clear()
            snapshots.restore_into(target, read="exchange")
            for key, value in (values | {"cut": cut}).items():
                expect_whole(target[key], value, (key, place))
            assert set(counts.values()) == {1}, (place, counts)
            everyone: list[Any] = [None] * world.size
            torch.distributed.all_gather_object(everyone, set(counts), group=world.gloo)
            assert sum(map(len, everyone)) == len(set[str]().union(*everyone)), place


#: `cuda` needs GPUs (tests/gpu); `killed` comes last.
CASES = [name.removeprefix("case_") for name in list(globals()) if name.startswith("case_") and name != "case_cuda"]

if __name__ == "__main__":
    main(*sys.argv[1:], cases=globals())
