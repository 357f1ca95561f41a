"""Sharded tensors: which boxes of a whole tensor this rank holds, and which other ranks hold the same ones.

In: a DTensor of any mesh; FSDP1's ShardedTensor; Megatron's ShardedTensor (`megatron.core.dist_checkpointing`); or any
tensor with torch.distributed.checkpoint's `__create_chunk_list__`. Out: a `Sharding`, and the local tensor, or several
of them, one for each box. Nothing communicates. torch.distributed is used only if the program has imported it.

A box is (offsets, sizes), in elements, one pair per dimension. Along a dimension the placements of a DTensor cut as
torch cuts: `Shard` takes one of n pieces as torch.chunk does; `_StridedShard` (FSDP on top of tensor parallelism) takes
a piece of each of `split_factor` pieces. So a rank holds runs of indices, and a run is a box. If the sizes cannot be
divided, placements with `_StridedShard` have two meanings. `fully_shard` cuts a piece of tensor parallelism, and
`full_tensor` puts the tensor together so; distribute_tensor cuts from left to right. `_layouts_of` tells the two apart.

A tensor on a part of a larger mesh (a LayerNorm under FSDP on mesh["dp"] beside tensor parallelism) counts as
replicated along the dimensions that its mesh lacks, as in torch.distributed.checkpoint. Dimensions of pipeline stages
do not count so; they are recognised by their names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedLeafError
from ...threads import imported
from .containers import has
from .wrapped import unwrapped

if TYPE_CHECKING:
    import torch

Offsets = tuple[int, ...]
Sizes = tuple[int, ...]
Boxes = tuple[tuple[Offsets, Sizes], ...]
IndexRun = tuple[int, int]  # (first index, count)
#: One step in which a tensor is cut: its dimension, of how many pieces a shard takes a part, the dimension of the mesh.
MeshCut = tuple[int, int, int]

#: The modules of torch.Tensor, torch.nn.Parameter and numpy.ndarray.
_PLAIN_MODULES = frozenset({"torch", "torch.nn.parameter", "numpy"})

#: Words in the names of mesh dimensions whose ranks hold different layers, such as "pipeline_parallel".
_STAGES = frozenset({"pp", "pipe", "pipeline", "stage", "stages"})

_PARTIAL = "holds sums that are not reduced yet: call tensor.redistribute(placements=[Replicate(), ...]) first"
_COLUMNS = "holds several runs of dimension {dim}: redistribute it to Shard or Replicate, and pass that"
_UNEVEN = "its placements {placements} give this rank {expected}, but it holds {got}: cut it as fully_shard does"
_HYBRID = (
    "its group has {size} of the job's {world} ranks, so the others may hold copies that nothing here names: give FSDP "
    "a device_mesh, which makes its state dict of DTensors"
)


@dataclass(frozen=True, slots=True)
class Sharding:
    """The boxes of a whole tensor that this rank's local tensor holds.

    Attributes:
        global_shape: of the whole tensor.
        boxes: (offsets, sizes) of each box; () if the rank holds nothing. The rows (dimension 0) of the local tensor
            are those of the boxes, one after the other. A tensor without dimensions is the box ((), ()).
        replica, replicas: this rank is number `replica` of `replicas` that hold the same boxes. If `replica` is
            `replicas` or more, another rank is their only writer (Megatron).
        group: the ranks that hold the same boxes, sorted; () if this rank is outside the tensor's mesh, or if they are
            unknown (for all tensors but DTensors).
        first: the number of the replica that has coordinate 0 along all mesh dimensions that replicate.
        is_apart: whether each box has a local tensor of its own, of any sizes: see `locals_of`.
    """

    global_shape: tuple[int, ...]
    boxes: Boxes
    replica: int
    replicas: int
    group: tuple[int, ...]
    first: int = 0
    is_apart: bool = False


def sharding_of(value: Any) -> Sharding | None:
    """Return how a tensor is sharded; None: it is a plain tensor or array.

    Raises:
        UnsupportedLeafError: it has Partial placements, or the local tensor is not a list of boxes.
    """
    if type(value).__module__ in _PLAIN_MODULES:
        return None
    if is_dtensor(value):
        return _of_dtensor(value)
    if _is_megatron(value):
        return _of_megatron(value)
    if has(value, "local_shards", "metadata"):
        return _of_sharded_tensor(value)
    if has(value, "__create_chunk_list__"):
        return _alone(tuple(value.size()), _chunk_boxes(value))
    return None


def local_of(value: Any) -> torch.Tensor:
    """Return the first one of `locals_of`."""
    return locals_of(value)[0]


def locals_of(value: Any) -> list[torch.Tensor]:
    """Return the local tensors of a value that `sharding_of` knows, without autograd; they share the value's memory.

    There is one, or one for each box if the sharding `is_apart`.
    """
    local: Any = getattr(value, "_local_tensor", None)
    if local is None:
        found = _locals_of_other(value)
    elif hasattr(local, "__get_tensor_shard__"):  # a wrapper of shards, such as torchrec's
        found = _chunks(value, local)
    elif hasattr(local, "trigger_wait"):  # a collective is still writing it
        found = [local.trigger_wait()]
    else:
        found = [local]
    return [one.detach() if one.requires_grad else one for one in map(unwrapped, found)]


def dtensor_like(value: Any, local: torch.Tensor) -> Any:
    """Return a DTensor of the shape, mesh and placements of another one, with another local tensor."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    module = imported("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _is_megatron(value: Any) -> bool:
    return has(value, "key", "data", "global_shape", "global_offset", "replica_id")


# --- DTensor ---


def _of_dtensor(value: Any) -> Sharding:
    mesh, local = value.device_mesh, value._local_tensor
    form = tuple(value.shape), mesh, mesh._get_root_mesh(), mesh.get_rank(), tuple(value.placements)
    found = _mesh_sharding(*form)
    if hasattr(local, "__create_chunk_list__"):
        boxes = _chunk_boxes(local)
        return replace(found, boxes=boxes, is_apart=len(boxes) > 1)
    if not found.group or _fits(local, found):  # outside of the mesh torch gives tensors without dimensions a value
        return found
    layouts = _layouts_of(form[0], tuple(mesh.shape), form[-1])
    for other in (_mesh_sharding(*form, number) for number in range(1, len(layouts))):
        if _fits(local, other):
            return other
    text = _UNEVEN.format(placements=form[-1], expected=_local_shape(found) or "nothing", got=tuple(local.shape))
    raise UnsupportedLeafError(f"DTensor of shape {form[0]}: {text}")


def _fits(local: Any, sharding: Sharding) -> bool:
    """Return whether a local tensor has the shape that the boxes of a sharding give it."""
    expected = _local_shape(sharding)
    return tuple(local.shape) == expected or (expected is None and not local.numel())


@lru_cache(maxsize=4096)  # a state has thousands of tensors of a few forms
def _layouts_of(
    shape: tuple[int, ...], counts: tuple[int, ...], placements: tuple[Any, ...]
) -> tuple[tuple[MeshCut, ...], ...]:
    """Return the ways in which a DTensor may be cut, each as steps; the shape of a local tensor tells which one it is.

    The result depends only on what all ranks know. It has a second way only if each rank on which the boxes of the two
    differ has another shape in either.

    Args:
        counts: the sizes of the dimensions of the mesh.
    """
    what = f"DTensor of shape {shape}, placements {placements}:"
    for placement in placements:
        if placement.is_partial():
            raise UnsupportedLeafError(f"{what} {_PARTIAL}")
        if not placement.is_replicate() and not hasattr(placement, "dim"):
            raise UnsupportedLeafError(f"{what} placement {placement!r} is unknown: redistribute it to Shard")
    to_right = tuple(
        (placement.dim, int(getattr(placement, "split_factor", 1)), axis)
        for axis, placement in enumerate(placements)
        if not placement.is_replicate()
    )
    in_order = _chunks_in_order(to_right, counts)
    parts = {dim: prod(counts[axis] for of, _, axis in to_right if of == dim) for dim in range(len(shape))}
    if in_order is None or not any(shape[dim] % count for dim, count in parts.items()):
        return (to_right,)
    axes = {axis for *_, axis in to_right}
    places = product(*(range(count) if axis in axes else (0,) for axis, count in enumerate(counts)))
    runs = ([_runs(shape, cuts, counts, place) for cuts in (in_order, to_right)] for place in places)
    unlike = [(_counts_of(one), _counts_of(other)) for one, other in runs if one != other]
    if any(one == other for one, other in unlike):
        return (in_order,)
    return (in_order, to_right) if unlike else (to_right,)


def _chunks_in_order(cuts: Sequence[MeshCut], counts: Sequence[int]) -> tuple[MeshCut, ...] | None:
    """Return the order of plain chunks that the cuts of strided shards stand for; None: there are none, or no order.

    A strided shard is cut after the shards of which `split_factor` is the product, though these come later.
    """
    axes: dict[int, list[int]] = {}
    for dim, pieces, axis in reversed(cuts):
        before = axes.setdefault(dim, [])
        products = list(accumulate((counts[one] for one in before), mul, initial=1))
        if pieces not in products:
            return None
        before.insert(products.index(pieces), axis)
    is_strided = any(pieces > 1 for _, pieces, _ in cuts)
    return tuple((dim, 1, axis) for dim, of in axes.items() for axis in of) if is_strided else None


def _runs(
    shape: Sequence[int], cuts: Sequence[MeshCut], counts: Sequence[int], place: Sequence[int]
) -> list[list[IndexRun]]:
    """Return the runs of each dimension at a place in the mesh."""
    runs: list[list[IndexRun]] = [[(0, size)] for size in shape]
    for dim, pieces, axis in cuts:
        runs[dim] = _cut(runs[dim], pieces, counts[axis], place[axis])
    return runs


def _counts_of(runs: Sequence[Sequence[IndexRun]]) -> list[int]:
    """Return the size of each dimension of a local tensor."""
    return [sum(size for _, size in found) for found in runs]


@lru_cache(maxsize=4096)
def _mesh_sharding(
    shape: tuple[int, ...], mesh: Any, root: Any, rank: int, placements: tuple[Any, ...], layout: int = 0
) -> Sharding:
    """Return the sharding of a DTensor for a rank, in one of `_layouts_of`.

    The rank is an argument for the cache: in Python, parts of one mesh compare equal though they have other ranks.
    """
    cuts, coordinate = _layouts_of(shape, tuple(mesh.shape), placements)[layout], _coordinate(mesh, rank)
    if coordinate is None:
        return Sharding(shape, (), 0, 1, ())
    runs = _runs(shape, cuts, mesh.shape, coordinate)
    for dim, found in enumerate(runs[1:], 1):
        if len(found) > 1:
            raise UnsupportedLeafError(f"DTensor of shape {shape}, placements {placements}: {_COLUMNS.format(dim=dim)}")
    ranks = _group(mesh, root, rank, tuple(placement.is_replicate() for placement in placements))
    group = tuple(sorted(ranks))
    return Sharding(shape, _boxes_of_runs(runs), group.index(rank), len(group), group, group.index(ranks[0]))


def _coordinate(mesh: Any, rank: int) -> tuple[int, ...] | None:
    """Return the place of a rank in a mesh; None: it is outside. A mesh may have noted its place in an earlier job."""
    found = (mesh.mesh == rank).nonzero().tolist()
    return tuple(found[0]) if found else None


@lru_cache(maxsize=4096)
def _group(mesh: Any, root: Any, rank: int, is_replicated: tuple[bool, ...]) -> tuple[int, ...]:
    """Return the ranks that hold the same boxes as a rank of the mesh, in the mesh's order: along its own dimensions
    that replicate, and along those of its root that it lacks, except pipeline stages.
    """
    coordinate = _coordinate(mesh, rank) or ()
    own = tuple(slice(None) if copied else at for at, copied in zip(coordinate, is_replicated, strict=True))
    ranks = mesh.mesh[own].flatten().tolist()
    if root is mesh or root.ndim == 1:
        return tuple(ranks)
    places = {int(root.mesh[at]): at for at in product(*map(range, root.mesh.shape))}
    taken = [places[rank] for rank in mesh.mesh.flatten().tolist()]
    names = root.mesh_dim_names or [""] * root.ndim
    is_fixed = [len({at[dim] for at in taken}) > 1 or _is_stages(names[dim]) for dim in range(root.ndim)]
    found: dict[int, None] = {}
    for rank in ranks:
        there = tuple(at if fixed else slice(None) for at, fixed in zip(places[rank], is_fixed, strict=True))
        found.update(dict.fromkeys(root.mesh[there].flatten().tolist()))
    return tuple(found)


def _is_stages(name: str) -> bool:
    """Return whether a mesh dimension of this name is one of pipeline stages."""
    return not _STAGES.isdisjoint(name.lower().replace("-", "_").split("_"))


def _cut(runs: Sequence[IndexRun], pieces: int, count: int, position: int) -> list[IndexRun]:
    """Return the runs of one of `count` shards: chunk `position` of each of `pieces` chunks, as torch.chunk cuts."""
    total = sum(size for _, size in runs)
    piece = -(-total // pieces)
    taken: list[IndexRun] = []
    for start in range(0, total, piece or 1):
        length = min(piece, total - start)
        size = -(-length // count)
        first, end = min(position * size, length), min((position + 1) * size, length)
        taken += _between(runs, start + first, start + end)
    return _joined(taken)


def _between(runs: Sequence[IndexRun], first: int, end: int) -> list[IndexRun]:
    """Return, as runs, the indices number `first` to `end` (excluded) among those of some runs."""
    found, at = [], 0
    for start, size in runs:
        low, high = max(first, at), min(end, at + size)
        if low < high:
            found.append((start + low - at, high - low))
        at += size
    return found


def _joined(runs: Sequence[IndexRun]) -> list[IndexRun]:
    """Return runs; neighbours without a gap are joined into one."""
    joined: list[IndexRun] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


def _boxes_of_runs(runs: Sequence[Sequence[IndexRun]]) -> Boxes:
    """Return the boxes for the runs of each dimension; only the first dimension may have several runs."""
    if not all(sum(size for _, size in found) for found in runs):
        return ()
    if not runs:
        return (((), ()),)
    rest = [found[0] for found in runs[1:]]
    return tuple(
        ((start, *(offset for offset, _ in rest)), (count, *(size for _, size in rest))) for start, count in runs[0]
    )


def _local_shape(sharding: Sharding) -> tuple[int, ...] | None:
    """Return the shape of the local tensor that has the boxes of a sharding; None: any shape without elements."""
    if not sharding.boxes:
        return None
    sizes = sharding.boxes[0][1]
    return (sum(size[0] for _, size in sharding.boxes), *sizes[1:]) if sizes else ()


# --- the others ---


def _alone(shape: Sequence[int], boxes: Boxes) -> Sharding:
    """Return the sharding of boxes that no other rank holds."""
    return Sharding(tuple(shape), boxes, 0, 1, (), is_apart=len(boxes) > 1)


def _nonempty(offsets: Sequence[int], sizes: Sequence[int]) -> Boxes:
    return ((tuple(map(int, offsets)), tuple(map(int, sizes))),) if all(sizes) else ()


def _of_sharded_tensor(value: Any) -> Sharding:
    """Return the sharding of FSDP1's ShardedTensor."""
    shards, shape = value.local_shards(), tuple(value.metadata().size)
    distributed: Any = sys.modules["torch.distributed"]
    group, world = distributed.get_world_size(value._process_group), distributed.get_world_size()
    if group != world:
        raise UnsupportedLeafError(f"ShardedTensor of shape {shape}: {_HYBRID.format(size=group, world=world)}")
    places = [shard.metadata for shard in shards]
    return _alone(shape, tuple(b for place in places for b in _nonempty(place.shard_offsets, place.shard_sizes)))


def _of_megatron(value: Any) -> Sharding:
    """Return the sharding of Megatron's ShardedTensor, whose replica 0 writes it alone."""
    if getattr(value, "flattened_range", None) is not None:
        raise UnsupportedLeafError(
            f"Megatron's ShardedTensor {value.key}: a range of a flattened shard is no box: use an optimizer sharding "
            "type without flattened ranges (fully_reshardable)"
        )
    layout = getattr(value.data, "layout", type(value.data).__name__)
    if str(layout) != "torch.strided":
        raise UnsupportedLeafError(f"Megatron's ShardedTensor {value.key}: data: expected a dense tensor, got {layout}")
    local = (1,) * int(getattr(value, "prepend_axis_num", 0)) + tuple(value.data.shape)
    shape, offsets = tuple(map(int, value.global_shape)), tuple(map(int, value.global_offset))
    if not len(shape) == len(offsets) == len(local):
        raise UnsupportedLeafError(
            f"Megatron's ShardedTensor {value.key}: global shape {shape}, offset {offsets} and local shape {local}: "
            "expected as many numbers in each"
        )
    numbers = value.replica_id if isinstance(value.replica_id, tuple) else (value.replica_id,)
    return replace(_alone(shape, _nonempty(offsets, local)), replica=int(any(numbers)))


def _chunk_boxes(value: Any) -> Boxes:
    return tuple(b for chunk in value.__create_chunk_list__() for b in _nonempty(chunk.offsets, chunk.sizes))


def _locals_of_other(value: Any) -> list[Any]:
    if _is_megatron(value):
        return [value.data.view((1,) * int(getattr(value, "prepend_axis_num", 0)) + tuple(value.data.shape))]
    if hasattr(value, "local_shards"):
        return _filled(value, [shard.tensor for shard in value.local_shards()])
    return _chunks(value, value)


def _chunks(value: Any, shards: Any) -> list[Any]:
    """Return the tensors of the chunks of a value."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    chunks = shards.__create_chunk_list__()
    return _filled(
        value, [shards.__get_tensor_shard__(MetadataIndex("", chunk.offsets, i)) for i, chunk in enumerate(chunks)]
    )


def _filled(value: Any, shards: Sequence[Any]) -> list[Any]:
    """Return the shards that have elements; if none has, one empty shard."""
    import torch

    found = [shard for shard in shards if shard.numel()]
    return found or list(shards[:1]) or [torch.empty(0, dtype=value.dtype, device="cpu")]
