"""Saves of several ranks, played one after the other in one process, without any channel; and what they have stored.

`as_rank` makes torch.distributed believe that this process is one rank of a job: meshes and DTensors work, and nothing
communicates. `save` lets each rank write its child manifests, and rank 0 the roots and the record. `read` gives every
tensor back as bytes, put together from the boxes of all children, and checks that they cover it once.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from snapstore.chunks.reader import ChunkReader, Wanted
from snapstore.distributed.messages import Begin
from snapstore.format.manifests import manifest
from snapstore.format.manifests.manifest import Manifest, TensorEntry
from snapstore.format.records import Snapshot
from snapstore.protocol.session import SaveSession
from snapstore.repository import Repository
from snapstore.save.inputs import PartInput, inputs_of
from snapstore.save.known_chunks import load_bases
from snapstore.save.manifest_writer import Written, write
from snapstore.save.near_children import NearChildren
from snapstore.save.ranks.merged_trees import holders_of, merge_trees, orders_of, trees_of
from snapstore.save.ranks.roots import ChildHeaders, write_roots
from snapstore.save.ranks.writer import report_of
from snapstore.save.replicas import Replica
from snapstore.save.shares import RankShares, Replicas
from snapstore.state.values.tensors import TensorSpec
from snapstore.state.walk.flatten import flatten


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a job whose collectives do nothing."""
    _clear_python_sharding_prop_cache()  # they hold meshes, which know the rank that made them
    _clear_fast_path_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(whole: torch.Tensor, shape: Sequence[int], placements: Sequence[Any]) -> DTensor:
    """Return a whole tensor as a DTensor on a mesh of all ranks; this rank cuts its part out by itself."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=[f"d{i}" for i in range(len(shape))])
    local = whole
    for placement, count, at in zip(placements, shape, mesh.get_coordinate(), strict=True):
        if isinstance(placement, Shard):
            pieces = local.chunk(count, placement.dim)
            local = pieces[at] if at < len(pieces) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@dataclass
class OneRank:
    """The objects that a rank has written, and what it tells rank 0."""

    inputs: list[PartInput]
    written: Written

    def replicas(self, part: str) -> list[Replica]:
        """Return the tensors of a part that other ranks hold as well."""
        return [one for each in self.inputs if each.name == part for one in each.replicas]


def write_rank(repository: Repository, session: SaveSession, state: Any, shares: RankShares) -> OneRank:
    """Write what one rank stores."""
    context, rank, world_size = repository.context, shares.rank, shares.world_size
    inputs = inputs_of(flatten(state, of_rank=True), shares)
    bases = load_bases(context, session, {}, NearChildren(inputs, rank, world_size))
    written = write(context, session, inputs, bases, full=False, place=(rank, world_size))
    return OneRank(inputs, written)


def save(
    repository: Repository,
    states: Sequence[Any],
    step: int,
    run: str = "r",
    *,
    unlike: bool = False,
    replicas: Replicas = "check",
) -> tuple[Snapshot, list[OneRank]]:
    """Save the states of all ranks, each a function that makes it, as one snapshot; return what each has written.

    Args:
        unlike: whether ranks may hold plain tensors that others do not, which they tell each other first.
        replicas: see `RankShares`.
    """
    context, size = repository.context, len(states)
    shares = [RankShares(rank, size, context.config.chunk_bytes, replicas=replicas) for rank in range(size)]
    if unlike:
        trees = []
        for share, make in zip(shares, states, strict=True):
            with as_rank(share.rank, size):
                trees.append(([share.rank], trees_of(inputs_of(flatten(make(), of_rank=True), share))))
        shares = [dataclasses.replace(share, holders=holders_of(trees)) for share in shares]
    with SaveSession(context, run, step, parent=None) as session:
        bases = load_bases(context, session, {})
        ranks = []
        for share, make in zip(shares, states, strict=True):
            with as_rank(share.rank, size):
                ranks.append(write_rank(repository, session, make(), share))
        begin = Begin(session.id, step, [], full=False, quarantine=False)
        reports = {rank: report_of(begin, one.written, request=b"", trees=b"") for rank, one in enumerate(ranks)}
        headers = ChildHeaders(context)
        headers.start([ref for one in ranks for ref in one.written.manifests])
        trees = [([rank], trees_of(one.inputs)) for rank, one in enumerate(ranks)]
        parts = merge_trees(trees)
        roots = write_roots(context, session, parts, reports, headers.result(), orders_of(trees, parts), {})
        snapshot = session.commit(
            bases=[base.id for base in bases.snapshots],
            manifests=roots.manifests,
            manifest_list=roots.manifest_list,
            created=time.time(),
            generation=bases.generation,
            depth=roots.depth,
            chunks=roots.chunks,
            new_chunks=roots.new_chunks,
            logical_bytes=roots.logical_bytes,
            stored_bytes=roots.stored_bytes,
            features=["ranks"],
        )
    context.index.add(snapshot, roots.headers)
    return snapshot, ranks


def children_of(repository: Repository, snapshot: Snapshot) -> list[tuple[Manifest, list[Manifest]]]:
    """Return each root manifest with its children."""
    store, seed = repository.context.store, repository.context.engines.digest_seed
    found = []
    for ref in snapshot.manifests:
        root = manifest.read(store, ref, None)
        found.append((root, [manifest.read(store, child, seed) for child in root.header.children]))
    return found


def read(repository: Repository, snapshot: Snapshot) -> dict[str, np.ndarray]:
    """Return the bytes of every shared tensor by "part: path", as opaque elements in its whole shape."""
    found: dict[str, np.ndarray] = {}
    for root, children in children_of(repository, snapshot):
        for number, entry in enumerate(root.tensors):
            if entry.kind == "page":
                continue
            assert not entry.boxes
            assert entry.inline is None
            same = [i for i, other in enumerate(root.tensors) if other.path == entry.path]
            found[
                f"{root.header.part}: {'.'.join(map(str, entry.path))}" + f"#{same.index(number)}" * (len(same) > 1)
            ] = _together(repository, entry, same.index(number), children)
    return found


def _together(repository: Repository, entry: TensorEntry, nth: int, children: Sequence[Manifest]) -> np.ndarray:
    itemsize = TensorSpec((), entry.kind, entry.dtype, tuple(entry.shape), False, None).itemsize
    whole = np.zeros(tuple(entry.shape), f"V{itemsize}")
    seen = np.zeros(tuple(entry.shape), int)
    for child in children:
        own = [other for other in child.tensors[: shared_entries(child)] if other.path == entry.path][nth : nth + 1]
        for other in own:
            assert (other.kind, other.dtype, other.shape) == (entry.kind, entry.dtype, entry.shape)
            at = other.inline[0] if other.inline else 0
            for box in other.boxes:
                nbytes = math.prod(box.sizes) * itemsize
                memory = np.zeros(nbytes, np.uint8)
                if box.chunks:
                    rows = np.arange(box.first_chunk, box.first_chunk + box.chunks)
                    lengths = child.table.lengths[rows].astype(np.int64)
                    assert lengths.sum() == nbytes
                    wanted = Wanted(child.table, child.header.pack_names, rows, memory, np.cumsum(lengths) - lengths)
                    for _ in ChunkReader(repository.context).rebuild([wanted]):
                        pass
                else:
                    memory[:] = np.frombuffer(child.inline[at : at + nbytes], np.uint8)
                    at += nbytes
                place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                whole[place] = memory.view(whole.dtype).reshape(box.sizes)
                seen[place] += 1
            assert not other.inline or at == sum(other.inline)
    assert (seen == 1).all(), f"{entry.path}: stored {seen.min()} to {seen.max()} times"
    return whole


def shared_entries(child: Manifest) -> int:
    """Return how many entries of a child are of shared tensors: they have boxes; own values follow them."""
    return len(child.tensors) if child.tree is None else _first_own(child.tree)


def _first_own(tree: Any) -> int:
    """Return the lowest index of an array in a tree of own values; a large number if there is none."""
    found = [10**9]

    def walk(node: Any) -> None:
        if isinstance(node, list):
            if len(node) > 1 and node[0] in ("tensor", "parameter", "array", "bytes") and type(node[1]) is int:
                found.append(node[1])
            for item in node:
                walk(item)

    walk(tree)
    return min(found)


def opaque(tensor: torch.Tensor) -> np.ndarray:
    """Return a whole tensor as `read` does."""
    data = tensor.detach().contiguous()
    return np.frombuffer(data.reshape(-1).view(torch.uint8).numpy().tobytes(), f"V{data.itemsize}").reshape(data.shape)
