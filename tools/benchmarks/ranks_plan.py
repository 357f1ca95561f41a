"""Jobs on paper: what ranks of a large job store and read, by the planner's own code, without a byte of data.

In: a Llama's shapes and a mesh. Out: the boxes and chunks of each rank, the manifests and bytes that a rank of another
mesh reads, and the objects and requests of a save. Sharding, shares, cuts, box maps and overlaps are snapstore's own.
Only the compression of chunks and the time of a request are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from snapstore import SaveOptions
from snapstore.chunks.uploader import puts_in_flight
from snapstore.format.blobs.pack import DEFAULT_PACK_BYTES
from snapstore.format.chunking import INLINE_BYTES
from snapstore.format.manifests import boxes
from snapstore.format.manifests.box_map import BoxMap
from snapstore.protocol import gc
from snapstore.restore.overlaps import StoredBox, overlap_of
from snapstore.save.ranks.roots import READS_AT_ONCE
from snapstore.save.shares import RankShares
from snapstore.state.values.sharded import _mesh_sharding
from snapstore.state.values.tensors import TensorSpec

CHUNK_BYTES = 1 << 20
#: fp32 weights and both moments of AdamW, as parts and prefixes of paths.
COPIES = (("model", ()), ("optimizer", ("exp_avg",)), ("optimizer", ("exp_avg_sq",)))
#: Stored bytes over bytes, chains included (docs/benchmarks.md, "cpu").
STORED = 0.7
#: hidden, inner, layers, words, rows of keys and values.
LLAMAS = {
    "8B": (4096, 14336, 32, 128256, 1024),
    "70B": (8192, 28672, 80, 128256, 1024),
    "405B": (16384, 53248, 126, 128256, 1024),
}

Box = tuple[tuple[int, ...], tuple[int, ...]]
Parameter = tuple[tuple[str, ...], tuple[int, ...], str]  # path, shape, how tensor parallelism cuts it


def parameters(hidden: int, inner: int, layers: int, words: int, keys: int) -> list[Parameter]:
    """Return a Llama's parameters."""
    layer = {
        "q": ((hidden, hidden), "rows"),
        "k": ((keys, hidden), "rows"),
        "v": ((keys, hidden), "rows"),
        "o": ((hidden, hidden), "columns"),
        "gate": ((inner, hidden), "rows"),
        "up": ((inner, hidden), "rows"),
        "down": ((hidden, inner), "columns"),
        "norm1": ((hidden,), ""),
        "norm2": ((hidden,), ""),
    }
    found: list[Parameter] = [(("embed",), (words, hidden), "rows")]
    for number in range(layers):
        found += [(("layers", str(number), name), *form) for name, form in layer.items()]
    return [*found, (("norm",), (hidden,), ""), (("head",), (words, hidden), "rows")]


class Mesh:
    """As much of a DeviceMesh as the planner asks for: all ranks, by dimension."""

    mesh_dim_names: tuple[str, ...] | None = None

    def __init__(self, *shape: int) -> None:
        self.mesh, self.shape, self.ndim = torch.arange(math.prod(shape)).reshape(shape), shape, len(shape)


@dataclass(eq=False)
class Job:
    """A Llama under FSDP on `shards` ranks, times tensor parallelism on `columns`.

    Attributes:
        specs: of the whole tensors of each part.
    """

    model: str
    shards: int
    columns: int = 1
    shapes: Sequence[Parameter] = ()  # replaces the Llama's parameters
    copies: Sequence[tuple[str, tuple[str, ...]]] = COPIES
    chunk_bytes: int = CHUNK_BYTES
    _cache: dict[tuple[int, tuple[int, ...], str], tuple[Box, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = self.shards * self.columns
        self.mesh = Mesh(self.shards, self.columns) if self.columns > 1 else Mesh(self.shards)
        self.specs: dict[str, list[TensorSpec]] = {"": []}
        self._cuts: dict[str, list[str]] = {"": []}
        for part, prefix in self.copies:
            for path, shape, cut in self.shapes or parameters(*LLAMAS[self.model]):
                spec = TensorSpec((part, *prefix, *path), "tensor", "float32", shape, False, None)
                self.specs.setdefault(part, []).append(spec)
                self._cuts.setdefault(part, []).append(cut)

    @property
    def name(self) -> str:
        """The mesh as text."""
        return f"FSDP{self.shards}" + (f"xTP{self.columns}" if self.columns > 1 else "")

    def _placements(self, cut: str) -> tuple[Any, ...]:
        if self.columns == 1:
            return (Shard(0),)
        if cut == "rows":
            return (_StridedShard(0, split_factor=self.columns), Shard(0))
        return (Shard(0), Shard(1) if cut == "columns" else Replicate())

    def wanted(self, rank: int, part: str) -> list[tuple[Box, ...]]:
        """Return the boxes that a rank holds of each tensor of a part."""
        found = []
        for spec, cut in zip(self.specs[part], self._cuts[part], strict=True):
            key = rank, spec.shape, cut
            if key not in self._cache:
                sharding = _mesh_sharding(spec.shape, self.mesh, self.mesh, rank, self._placements(cut))
                self._cache[key] = tuple(sharding.boxes)
            found.append(self._cache[key])
        return found

    def stored(self, rank: int, part: str) -> list[list[Box]]:
        """Return the boxes that a rank stores of each tensor of a part: its share where ranks hold the same one."""
        shares, found = RankShares(rank, self.world, self.chunk_bytes), []
        for spec, cut, own in zip(self.specs[part], self._cuts[part], self.wanted(rank, part), strict=True):
            if self.columns > 1 and not cut:  # ranks hold the same: which of them stores it, its name decides
                sharding = _mesh_sharding(spec.shape, self.mesh, self.mesh, rank, self._placements(cut))
                pieces = shares.pieces((part, spec.path, 0), spec, sharding)
                found.append([(piece.offsets, piece.sizes) for piece in pieces])
            else:
                found.append(list(own))
        return found

    @cached_property
    def maps(self) -> dict[str, list[bytes]]:
        """The packed box map of each rank, by part."""
        found = dict[str, list[bytes]]()
        for part, specs in self.specs.items():
            for rank in range(self.world) if specs else ():
                held = {i: own for i, own in enumerate(self.stored(rank, part)) if own}
                found.setdefault(part, []).append(BoxMap.of_rank(rank, held, len(specs)).encode())
        return found

    @cached_property
    def roots(self) -> dict[str, BoxMap]:
        """The box map of the root of each part."""
        found = {}
        for part, maps in self.maps.items():
            numbers = np.arange(len(self.specs[part]))
            read = [(rank, BoxMap.decode(data, part), numbers) for rank, data in enumerate(maps) if data]
            found[part] = BoxMap.decode(BoxMap.merged(read, len(numbers)).encode(), part)
        return found

    def lengths(self, box: Box, itemsize: int = 4) -> Any:
        """Return the lengths (n,) of the chunks of a stored box; none if it lies inline."""
        return _lengths(*box, itemsize, self.chunk_bytes)


@lru_cache(maxsize=100_000)
def _lengths(offsets: tuple[int, ...], sizes: tuple[int, ...], itemsize: int, chunk_bytes: int) -> Any:
    nbytes = math.prod(sizes) * itemsize
    if nbytes < INLINE_BYTES:
        return np.zeros(0, np.int64)
    return boxes.cut(boxes.strip_start(offsets, sizes, itemsize), nbytes, chunk_bytes)


@dataclass
class Reading:
    """The reads of one rank: manifests that it opens, bytes decoded and wanted, and ranges that lie apart."""

    manifests: int
    decoded_bytes: int
    wanted_bytes: int
    ranges: int


def reading(saved: Job, into: Job, rank: int) -> Reading:
    """Return what a rank of one job reads of a snapshot of another."""
    total, seen = Reading(0, 0, 0, 0), dict[tuple[Any, ...], tuple[int, int]]()
    for part, specs in saved.specs.items():
        opened: set[int] = set()
        for number, held in enumerate(into.wanted(rank, part) if specs else ()):
            spec, found = specs[number], saved.roots[part]
            for box in held:
                owners = found.ranks(number, box) or frozenset()
                opened |= owners
                key = (spec.shape, int(found.tensors[number]), box)
                if key not in seen:
                    flat = [own for owner in sorted(owners) for own in found.boxes(number, owner) or ()]
                    half = len(spec.shape)
                    stored = [(tuple(own[:half]), tuple(own[half:])) for own in flat]
                    seen[key] = _overlapping(saved, stored, box, spec.itemsize)
                total.decoded_bytes += seen[key][0]
                total.ranges += seen[key][1]
                total.wanted_bytes += math.prod(box[1]) * spec.itemsize
        total.manifests += len(opened)
    return total


def _overlapping(saved: Job, stored: Iterable[Box], wanted: Box, itemsize: int) -> tuple[int, int]:
    """Return the bytes of the chunks that hold a byte of a wanted box, and the number of runs of such chunks."""
    nbytes = ranges = 0
    for offsets, sizes in stored:
        lengths = saved.lengths((offsets, sizes), itemsize)
        m: Any = SimpleNamespace(table=SimpleNamespace(lengths=lengths))
        found = overlap_of(StoredBox(m, offsets, sizes, 0, len(lengths)), wanted, itemsize, 0)
        if found is not None and len(found.rows):  # what lies inline is in the manifest
            nbytes += found.nbytes
            ranges += 1 + int((np.diff(found.rows) > 1).sum())
    return nbytes, ranges


def amplification(saved: Job, into: Job, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Return bytes decoded over bytes wanted, and the manifests that a rank opens, over all ranks or some."""
    found = [reading(saved, into, rank) for rank in ranks or range(into.world)]
    decoded, wanted = sum(one.decoded_bytes for one in found), sum(one.wanted_bytes for one in found)
    return {
        "from": f"{saved.model} {saved.name}",
        "into": into.name,
        "decoded_over_wanted": decoded / wanted,
        "worst_rank": max(one.decoded_bytes / one.wanted_bytes for one in found if one.wanted_bytes),
        "manifests_a_rank": max(one.manifests for one in found),
        "ranges_a_rank": max(one.ranges for one in found),
        "box_map_bytes": sum(len(one.encode()) for one in saved.roots.values()),
    }


def new_chunks(saved: Job, into: Job) -> float:
    """Return the share of the chunks of a job that are at no place of another, for the same values."""
    known, every, new = set[tuple[Any, ...]](), 0, 0
    for job in (saved, into):
        for part in job.specs:
            for rank in range(job.world):
                for number, held in enumerate(job.stored(rank, part)):
                    for box in held:
                        places = _places(job, box, job.specs[part][number].itemsize)
                        if job is saved:
                            known.update((part, number, *place) for place in places)
                        else:
                            every += len(places)
                            new += sum((part, number, *place) not in known for place in places)
    return new / every


def _places(job: Job, box: Box, itemsize: int) -> list[tuple[Any, ...]]:
    """Return the strip of each chunk of a box, where it begins there, and its length."""
    offsets, sizes = box
    lengths = job.lengths(box, itemsize)
    starts = boxes.strip_start(offsets, sizes, itemsize) + np.cumsum(lengths) - lengths
    return [(offsets[1:], sizes[1:], *place) for place in zip(starts.tolist(), lengths.tolist(), strict=True)]


#: Seconds of a request: AWS states 100 to 200 ms for the first byte of small objects ("Best practices design patterns:
#: optimizing Amazon S3 performance"). A page of a listing is taken to be no faster.
REQUEST_S = 0.2
PAGE = 1000


def objects(job: Job, snapshots: int = 100) -> dict[str, Any]:
    """Return the objects and requests of full saves of a job, and of a gc's listing of some such snapshots."""
    parts = [part for part, specs in job.specs.items() if specs]
    chunks, shares = list[int](), list[int]()
    for rank in range(job.world):
        lengths = [job.lengths(box) for part in parts for own in job.stored(rank, part) for box in own]
        chunks.append(sum(map(len, lengths)))
        shares.append(sum(int(one.sum()) for one in lengths))
    pack_bytes = SaveOptions().pack_bytes_of(job.world * max(shares))
    in_part = [sum(spec.nbytes for spec in job.specs[part]) / sum(shares) for part in parts]
    packs = [sum(math.ceil(STORED * share * of / pack_bytes) for of in in_part) for share in shares]
    manifests = job.world * len(parts) + len(parts) + 1  # children, and roots: of the part "" too
    roots = sum(len(one.encode()) for one in job.roots.values())
    pages = {
        "packs": 256 * math.ceil(snapshots * sum(packs) / 256 / PAGE),
        "manifests": 256 * math.ceil(snapshots * manifests / 256 / PAGE),
        "snapshots": math.ceil(snapshots / PAGE),
    }
    requests = sum(pages.values())
    at_once = gc.LISTINGS_AT_ONCE
    return {
        "ranks": job.world,
        "bytes_a_rank": max(shares),
        "chunks": sum(chunks),
        "pack_bytes": pack_bytes,
        "packs": sum(packs),
        "packs_at_once_a_rank": puts_in_flight(pack_bytes, 8),
        "manifests": manifests,
        "box_map_bytes": roots,
        "root_headers_bytes": 40 * sum(packs) + 240 * job.world * len(parts) + roots,
        "puts_a_rank": max(packs) + len(parts),
        "puts_of_rank_0_more": len(parts) + 1 + 2,  # roots, session and record
        "header_reads_of_rank_0": (job.world - 1) * len(parts),
        "header_reads_s": math.ceil((job.world - 1) * len(parts) / READS_AT_ONCE) * REQUEST_S,
        "listing_pages": pages,
        "listing_s": math.ceil(requests / at_once) * REQUEST_S,
        "listing_one_after_the_other_s": requests * REQUEST_S,
        "listing_with_packs_of_32_MiB_s": REQUEST_S
        * math.ceil((pages["manifests"] + snapshots * STORED * sum(shares) / DEFAULT_PACK_BYTES / PAGE) / at_once),
    }
