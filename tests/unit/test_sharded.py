"""Sharded tensors: the boxes of every rank are the elements that its local tensor holds.

A fake process group makes this process one rank after the other, so the tests can use meshes of any size. The value of
each element of the whole tensor is its number, so an element at a wrong place has a wrong value.
tests/integration/test_sharded_ranks.py has real ranks with gloo.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from kit.rank_saves import as_rank  # noqa: E402
from snapstore.errors import UnsupportedLeafError  # noqa: E402
from snapstore.state.values.sharded import Sharding, local_of, locals_of, sharding_of  # noqa: E402
from snapstore.state.walk.flatten import flatten_and_learn  # noqa: E402
from snapstore.state.walk.learner import DifferentStructureError  # noqa: E402


@contextmanager
def played(rank: int, world: int) -> Iterator[None]:
    """Make this process rank `rank` of `world`."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def shardings(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list) -> list[Sharding]:
    """Return every rank's sharding of a tensor; check that each local tensor holds the elements of its boxes."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    found = []
    for rank in range(math.prod(mesh)):
        with played(rank, math.prod(mesh)):
            value = distribute_tensor(whole, init_device_mesh("cpu", mesh), placements, src_data_rank=None)
            sharding, local = sharding_of(value), local_of(value)
            assert sharding is not None
            pieces = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in sharding.boxes]
            if pieces:
                assert torch.equal(torch.cat(pieces) if shape else pieces[0], local)
            else:
                assert local.numel() == 0
            found.append(sharding)
    return found


def check(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list) -> list[Sharding]:
    """Check that the boxes of one replica of each group are disjoint and cover the tensor; return the shardings."""
    found = shardings(shape, mesh, placements)
    counts = torch.zeros(shape, dtype=torch.int64)
    for rank, sharding in enumerate(found):
        assert sharding.global_shape == shape
        assert (sharding.group, sharding.group[sharding.replica]) == (tuple(sorted(sharding.group)), rank)
        assert sharding.replicas == len(sharding.group)
        assert all(found[other].boxes == sharding.boxes for other in sharding.group)
        if sharding.replica == 0:
            for box in sharding.boxes:
                counts[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] += 1
    assert (counts == 1).all()
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(12,), (10, 3), (2, 5), (1, 4), (0, 4), (5, 0)])
def test_one_dimension(shape, world):
    """Each element is on one rank, also if the rows cannot be divided evenly, or if there are more ranks than rows."""
    found = check(shape, (world,), [Shard(0)])
    empty = sum(not sharding.boxes for sharding in found)
    rows = shape[0] if math.prod(shape) else 0
    assert empty == world - (math.ceil(rows / math.ceil(rows / world)) if rows else 0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_columns(world):
    """A shard of columns is one box."""
    found = check((6, 10), (world,), [Shard(1)])
    assert all(len(sharding.boxes) == 1 and sharding.boxes[0][1][0] == 6 for sharding in found)


def test_replicated():
    """Every rank holds the whole tensor and knows the other ranks, also for a tensor without dimensions."""
    for shape in ((4, 2), ()):
        found = check(shape, (4,), [Replicate()])
        assert [(s.replica, s.replicas) for s in found] == [(i, 4) for i in range(4)]
        assert found[0].boxes == (((0,) * len(shape), shape),)


@pytest.mark.parametrize("rows", [8, 7, 1])
def test_hsdp(rows):
    """HSDP 2x2: two groups of replicas."""
    found = check((rows, 3), (2, 2), [Replicate(), Shard(0)])
    assert [s.group for s in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [s.replica for s in found] == [0, 0, 1, 1]


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("rows", [24, 23, 13, 7])
def test_two_dimensions(mesh, rows):
    """FSDP over rows and TP over columns, both over rows, FSDP on top of TP over rows: each element is on one rank."""
    check((rows, 6), mesh, [Shard(0), Shard(1)])
    check((rows, 6), mesh, [Shard(0), Shard(0)])
    check((rows, 6), mesh, [_StridedShard(0, split_factor=mesh[1]), Shard(0)])


@pytest.mark.parametrize(("mesh", "rows"), [((3, 2), 7), ((4, 2), 50257), ((3, 4), 27), ((2, 3, 2), 13)])
def test_fully_shard_over_rows_of_tensor_parallelism(mesh, rows):
    """FSDP2 cuts each piece of tensor parallelism: other rows than from left to right, if the rows are uneven."""
    names, whole, counts = ("replicate", "dp", "tp")[-len(mesh) :], torch.arange(rows), torch.zeros(rows)
    for rank in range(math.prod(mesh)):
        with as_rank(rank, math.prod(mesh)):
            device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
            layer = torch.nn.Sequential(torch.nn.Linear(1, rows, bias=False))
            with torch.no_grad():
                layer[0].weight.copy_(whole[:, None])
            parallelize_module(layer, device_mesh["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
            fully_shard(layer, mesh=device_mesh[names[:-1]])
            value = layer.state_dict()["0.weight"]
            sharding, held = sharding_of(value), local_of(value)[:, 0].long()
            assert sharding is not None
            assert [row for (at, _), (n, _) in sharding.boxes for row in range(at, at + n)] == held.tolist()
            if sharding.replica == 0:
                counts[held] += 1
    assert (counts == 1).all()


@pytest.mark.parametrize("rows", [16, 13, 5])
def test_fully_shard_over_two_dimensions_of_parallelism(rows):
    """A strided shard is cut after all shards of which its split factor is the product."""
    mesh, held = (3, 2, 2), []
    for rank in range(12):
        with as_rank(rank, 12):
            device_mesh, local = init_device_mesh("cpu", mesh), torch.arange(rows)
            for axis in (1, 2, 0):
                size = max(1, -(-len(local) // mesh[axis]))
                local = local[size * device_mesh.get_coordinate()[axis] :][:size]
            placements = [_StridedShard(0, split_factor=4), Shard(0), Shard(0)]
            form = {"run_check": False, "shape": (rows,), "stride": (1,)}
            sharding = sharding_of(DTensor.from_local(local, device_mesh, placements, **form))
            assert sharding is not None
            assert [row for (at,), (n,) in sharding.boxes for row in range(at, at + n)] == local.tolist()
            held += local.tolist()
    assert sorted(held) == list(range(rows))


def test_rows_whose_number_does_not_tell_how_they_were_cut():
    """fully_shard and distribute_tensor give rank 10 another row, but one row: then those of fully_shard are meant.

    A tensor that was cut in the other way is refused on the ranks that hold another number of rows.
    """
    for rank in range(12):
        with as_rank(rank, 12):
            mesh, placements = init_device_mesh("cpu", (3, 4)), [_StridedShard(0, split_factor=4), Shard(0)]
            value = distribute_tensor(torch.arange(27), mesh, placements, src_data_rank=None)
            if rank in (8, 9, 11):
                with pytest.raises(UnsupportedLeafError, match=r"but it holds .*: cut it as fully_shard does"):
                    sharding_of(value)
            else:
                sharding = sharding_of(value)
                assert sharding is not None
                assert (sharding.boxes == (((20,), (1,)),)) == (rank == 10)


def test_several_boxes():
    """A strided shard holds several runs of rows. Each run is a box, in the order of the local tensor's rows."""
    found = check((10, 3), (2,), [_StridedShard(0, split_factor=3)])
    assert found[0].boxes == (((0, 0), (2, 3)), ((4, 0), (2, 3)), ((8, 0), (1, 3)))
    assert found[1].boxes == (((2, 0), (2, 3)), ((6, 0), (2, 3)), ((9, 0), (1, 3)))


def test_several_runs_of_columns():
    """A shard with several runs of columns is refused: its local tensor is not a list of boxes, row after row."""
    with pytest.raises(UnsupportedLeafError, match="several runs of dimension 1: redistribute it"):
        shardings((4, 10), (2,), [_StridedShard(1, split_factor=2)])


def test_partial():
    """Sums that are not reduced are refused."""
    with played(0, 2):
        value = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
        with pytest.raises(UnsupportedLeafError, match=r"not reduced yet: call tensor\.redistribute"):
            sharding_of(value)


def test_other_local_shape():
    """A local tensor is refused if its shape is not the one that the placements give."""
    with played(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        value = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False, shape=(9,), stride=(1,))
        with pytest.raises(UnsupportedLeafError, match=r"give this rank \(5,\), but it holds \(3,\)"):
            sharding_of(value)


def test_outside_of_mesh():
    """A rank outside of a tensor's mesh holds nothing."""
    with played(3, 4):
        from torch.distributed.device_mesh import DeviceMesh

        value = DTensor.from_local(torch.empty(0), DeviceMesh("cpu", [0, 1]), [Shard(0)], shape=(4,), stride=(1,))
        sharding = sharding_of(value)
    assert sharding == Sharding((4,), (), 0, 1, ())


@pytest.mark.parametrize("names", [("dp", "tp"), ("pp", "tp"), ("pipeline_parallel", "tp"), ("Stage-mesh", "tp")])
def test_part_of_a_mesh(names):
    """A tensor on one dimension of a mesh counts as replicated along the others, except along pipeline stages."""
    for rank in range(4):
        with played(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            rows = distribute_tensor(torch.arange(8), mesh[names[0]], [Shard(0)], src_data_rank=None)
            columns = distribute_tensor(torch.arange(8), mesh["tp"], [Shard(0)], src_data_rank=None)
            copies = distribute_tensor(torch.arange(8), mesh["tp"], [Replicate()], src_data_rank=None)
            assert sharding_of(rows).group == ((0, 1), (0, 1), (2, 3), (2, 3))[rank]
            if names[0] == "dp":
                assert sharding_of(columns).group == ((0, 2), (1, 3), (0, 2), (1, 3))[rank]
                assert sharding_of(copies).group == (0, 1, 2, 3)
            else:
                assert sharding_of(columns).group == (rank,)
                assert sharding_of(copies).group == ((0, 1), (0, 1), (2, 3), (2, 3))[rank]


def test_no_stale_rank():
    """A process that becomes another rank gets the boxes of its new rank, although the meshes compare as equal."""
    whole = torch.arange(8)
    for rank in (0, 1, 0):
        with played(rank, 2):
            value = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
            assert sharding_of(value).boxes == (((4 * rank,), (4,)),)


def test_parameter():
    """The local tensor of a parameter requires no grad and shares the parameter's memory."""
    with played(1, 2):
        whole = torch.arange(6.0).requires_grad_()
        value = torch.nn.Parameter(
            distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        )
        local = local_of(value)
        assert (local.requires_grad, local.data_ptr()) == (False, value.to_local().data_ptr())


def test_plain():
    """Plain tensors, parameters and arrays are not sharded."""
    import numpy as np

    for value in (torch.ones(3), torch.nn.Parameter(torch.ones(3)), np.ones(3)):
        assert sharding_of(value) is None


def megatron(**changes: object) -> types.SimpleNamespace:
    """Return a ShardedTensor as megatron.core.dist_checkpointing makes one: rows 4 to 8 of (8, 3)."""
    fields = {"key": "w", "data": torch.ones(4, 3), "global_shape": (8, 3), "global_offset": (4, 0), "replica_id": 0}
    return types.SimpleNamespace(**(fields | changes))


def test_megatron():
    """Megatron's offset and shape are a box. The rank whose replica_id is 0, or only zeros, writes it."""
    assert sharding_of(megatron()) == Sharding((8, 3), (((4, 0), (4, 3)),), 0, 1, ())
    assert sharding_of(megatron(replica_id=(0, 0, 0))).replica == 0
    other = sharding_of(megatron(replica_id=(0, 1, 0)))
    assert other.replica >= other.replicas
    layered = megatron(global_shape=(6, 8, 3), global_offset=(5, 4, 0), prepend_axis_num=1)
    assert sharding_of(layered).boxes == (((5, 4, 0), (1, 4, 3)),)
    assert local_of(layered).shape == (1, 4, 3)
    with pytest.raises(UnsupportedLeafError, match="flattened"):
        sharding_of(megatron(flattened_range=slice(0, 3)))
    of_numpy = megatron(global_shape=np.array((8, 3)), global_offset=np.array((4, 0)))
    assert repr(sharding_of(of_numpy)) == repr(sharding_of(megatron()))


@pytest.mark.parametrize(
    "changes",
    [
        {"data": None},
        {"data": np.ones((4, 3))},
        {"data": torch.ones(4, 3).to_sparse()},
        {"global_shape": (8,)},
        {"global_offset": (4,)},
        {"prepend_axis_num": 1},
    ],
)
def test_a_shard_of_megatron_that_is_none(changes):
    with pytest.raises(UnsupportedLeafError, match=r"Megatron's ShardedTensor .*: expected "):
        sharding_of(megatron(**changes))


class Chunked:
    """A tensor with the methods that torch.distributed.checkpoint asks for."""

    def __init__(self, chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self.chunks, self.dtype = chunks, torch.float32

    def size(self) -> torch.Size:
        return torch.Size((8, 3))

    def __create_chunk_list__(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.chunks]

    def __get_tensor_shard__(self, index):
        return torch.full(self.chunks[index.index][1], float(index.offset[0]))


def test_chunk_list():
    """In DCP's own protocol each chunk is a box. Several chunks have a local tensor each; no chunk gives no box."""
    value = Chunked([((4, 0), (4, 3))])
    assert sharding_of(value) == Sharding((8, 3), (((4, 0), (4, 3)),), 0, 1, ())
    assert torch.equal(local_of(value), torch.full((4, 3), 4.0))
    assert (sharding_of(Chunked([])).boxes, local_of(Chunked([])).numel()) == ((), 0)
    several = Chunked([((0, 0), (4, 3)), ((4, 0), (0, 3)), ((5, 1), (2, 1))])
    boxes = (((0, 0), (4, 3)), ((5, 1), (2, 1)))
    assert sharding_of(several) == Sharding((8, 3), boxes, 0, 1, (), is_apart=True)
    assert [one.tolist() for one in locals_of(several)] == [[[0.0] * 3] * 4, [[5.0]] * 2]


def test_a_known_state_in_which_tensors_share_memory():
    """Its tensors must be tied as they were; if some share memory that are not tied, it is flattened each time."""
    with played(0, 2):
        mesh, x = init_device_mesh("cpu", (2,)), torch.arange(4.0)
        rows, copy = (DTensor.from_local(x, mesh, [p], run_check=False) for p in (Shard(0), Replicate()))
        for state in ({"a": x, "b": rows}, {"a": rows, "b": copy}):
            _, learnt = flatten_and_learn(state, of_rank=True)
            assert learnt is not None
            with pytest.raises(DifferentStructureError):
                learnt[0].match(state)
        _, learnt = flatten_and_learn({"a": rows, "b": rows}, of_rank=True)
        assert learnt is not None
        learnt[0].match({"a": rows, "b": rows}).confirm()
        with pytest.raises(DifferentStructureError):
            learnt[0].match({"a": rows, "b": copy})
