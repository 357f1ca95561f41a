"""Shares: the boxes of a tensor that one of several ranks stores.

In: the form of a whole tensor, and how it is sharded. Out: boxes, each of whole rows of the box that this rank holds.
Ranks that hold the same box each store a share of its rows; no rank asks another, since all compute the same cuts.

A box of replicas is cut into cells where a row ends on the grid of its strip (docs/design/ranks.md, "Cuts"), so another
number of ranks cuts it into the same chunks. A box with fewer such cells than replicas is cut between any rows if each
share has several chunks. Else some of the replicas store one cell each. For a plain tensor that all ranks hold, rank 0
chooses these when the ranks exchange holders, so that all store about as much; for any other, a hash of the path does.

Replicas that may differ are not cut: the first one stores the whole box, so no tensor mixes the values of two ranks.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import msgspec
import numpy as np
import xxhash

from ..format.manifests.boxes import strip_start
from ..state.values.containers import display
from ..state.values.held_array import Held
from ..state.values.sharded import Sharding
from ..state.values.tensors import TensorSpec

#: Shares may be cut between any rows if each has so many chunks: at most two of its chunks are then not the usual ones.
MIN_CHUNKS_OFF_GRID = 4

#: Replicas of a tensor that differ: an error, or the first replica is stored.
Replicas = Literal["check", "rank0"]

#: Part, path, and the number among the tensors with that path.
Name = tuple[str, tuple[str | int, ...], int]


def names_of(part: str, specs: Iterable[TensorSpec]) -> Iterator[Name]:
    """Yield (part, path, number among the tensors with that path) of each tensor of a part."""
    seen: dict[tuple[str | int, ...], int] = {}
    for spec in specs:
        number = seen[spec.path] = seen.get(spec.path, -1) + 1
        yield part, spec.path, number


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A box of a tensor that this rank stores.

    Attributes:
        offsets, sizes: of the box in the whole tensor.
        first_row: the row of the local tensor at which the box begins.
        number: of the local tensor, if each box has a local tensor of its own; else 0.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first_row: int
    number: int = 0

    def held(self, local: Held) -> Held:
        """Return the box, which is some rows of a local tensor, an array or bytes; nothing is copied."""
        local = local.others[self.number - 1] if self.number else local
        spec = local.spec
        if self.sizes == spec.shape:
            return local
        value = local.value.detach() if spec.kind == "parameter" else local.value
        kind = "tensor" if spec.kind == "parameter" else spec.kind
        rows = value[self.first_row : self.first_row + self.sizes[0]]
        return Held.of(rows, TensorSpec(spec.path, kind, spec.dtype, self.sizes, False, None))


@dataclass(frozen=True)
class RankShares:
    """The shares of one rank.

    Args:
        rank, world_size: among the ranks that save together.
        chunk_bytes: the size of a chunk [bytes].
        holders: the ranks, sorted, that hold a plain tensor which not all ranks hold (pipeline stages). None: not
            known yet, so each whole plain tensor counts as this rank's share.
        replicas: "check": replicas are equal, so each stores a share. "rank0": they may differ.
        known: the plain tensors that `holders` covers; any other one is new to this rank. None: it covers all.
        turns: of plain tensors that all ranks hold: the rank that stores the first cell (`balanced_turns`).
        job_ranks: by rank, its number in the job, which meshes use; None: the same numbers.
    """

    rank: int
    world_size: int
    chunk_bytes: int
    holders: Mapping[Name, tuple[int, ...]] | None = field(default_factory=dict)
    replicas: Replicas = "check"
    known: Container[Name] | None = None
    job_ranks: Sequence[int] | None = None
    turns: Mapping[Name, int] = field(default_factory=dict)

    def knows(self, name: Name) -> bool:
        """Return whether this rank knows which ranks hold a plain tensor."""
        return self.holders is not None and (self.known is None or name in self.known)

    def group(self, name: Name, sharding: Sharding | None) -> tuple[int, ...]:
        """Return the ranks that hold the same bytes of a tensor as this one, sorted; () if they are unknown.

        A rank of the job that does not save has a number from `world_size` on.
        """
        if sharding is not None:
            return _saving(sharding.group, self.job_ranks) if self.job_ranks is not None else sharding.group
        return (self.holders or {}).get(name) or tuple(range(self.world_size))

    def pieces(
        self, name: Name, spec: TensorSpec, sharding: Sharding | None, *, may_differ: bool = False
    ) -> list[Piece]:
        """Return the boxes of a tensor that this rank stores; none is empty.

        Args:
            spec: of the whole tensor.
            sharding: None: a plain tensor, of which every rank holds the whole.
            may_differ: whether replicas of this tensor may differ.
        """
        if sharding is None:
            group = self.group(name, None) if self.knows(name) else (self.rank,)
            boxes: Sequence[tuple[Sequence[int], Sequence[int]]] = [((0,) * len(spec.shape), spec.shape)]
            replica, replicas = group.index(self.rank) if self.rank in group else len(group), len(group)
        else:
            boxes, replica, replicas = sharding.boxes, sharding.replica, sharding.replicas
        if may_differ or self.replicas == "rank0":
            if replica != (0 if sharding is None else sharding.first):
                return []
            replica, replicas = 0, 1
        found: list[Piece] = []
        row = 0  # of the local tensor
        turn = self.turns.get(name) if sharding is None and replicas == self.world_size else None
        turn = _turn(name, replicas) if turn is None else turn
        is_apart = sharding is not None and sharding.is_apart
        for number, (offsets, sizes) in enumerate(boxes):
            shares = _shares(tuple(offsets), tuple(sizes), spec.itemsize, self.chunk_bytes, replicas, turn)
            for first, count in shares[replica : replica + 1]:
                if count and sizes:
                    place = (offsets[0] + first, *offsets[1:])
                    found.append(Piece(place, (count, *sizes[1:]), row + first, number if is_apart else 0))
                elif count:
                    found.append(Piece((), (), 0))
            row += sizes[0] if sizes and not is_apart else 0
        return found


def _saving(group: tuple[int, ...], job_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return ranks of the job as numbers among the ranks that save together, sorted."""
    numbers = {rank: number for number, rank in enumerate(job_ranks)}
    return tuple(sorted(numbers.get(rank, len(numbers) + rank) for rank in group))


def _turn(name: Name, replicas: int) -> int:
    """Return the replica that stores the first cell of a tensor, by a hash, which spreads many tensors evenly."""
    part, path, number = name
    return xxhash.xxh3_64_intdigest(f"{part}\0{display(path)}\0{number}".encode()) % replicas


@lru_cache(maxsize=4096)  # a state has thousands of tensors of a few forms
def _shares(
    offsets: tuple[int, ...], sizes: tuple[int, ...], itemsize: int, chunk_bytes: int, replicas: int, turn: int
) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of the share of each replica of a box."""
    rows = sizes[0] if sizes else 1
    edges = _edges(offsets, sizes, itemsize, chunk_bytes, replicas)
    if not edges:
        ends = [rows * (i + 1) // replicas if math.prod(sizes) else 0 for i in range(replicas)]
    else:
        each, more = divmod(len(edges), replicas)
        counts = [each + ((i - turn) % replicas < more) for i in range(replicas)]
        ends = [edges[count - 1] if count else 0 for count in accumulate(counts)]
    return [(first, end - first) for first, end in pairwise([0, *ends])]


def _edges(
    offsets: tuple[int, ...], sizes: tuple[int, ...], itemsize: int, chunk_bytes: int, replicas: int
) -> Sequence[int]:
    """Return the rows of a box where its cells end; none if it is empty, or is cut between any rows."""
    rows = sizes[0] if sizes else 1
    row_bytes = math.prod(sizes[1:]) * itemsize
    if not rows * row_bytes:
        return ()
    step = math.lcm(row_bytes, chunk_bytes) // row_bytes  # rows of the strip from one end on the grid to the next
    start = strip_start(offsets, sizes, itemsize) // row_bytes
    inner = range(step - start % step, rows, step)
    if len(inner) + 1 < replicas and rows * row_bytes >= replicas * MIN_CHUNKS_OFF_GRID * chunk_bytes:
        return ()
    return [*inner, rows]


def common(own: Iterable[Name], holders: Container[Name]) -> list[Name]:
    """Return those plain tensors of a rank that all ranks hold, in an order that is the same on all ranks."""
    return sorted((name for name in own if name not in holders), key=msgspec.msgpack.encode)


def balanced_turns(
    specs: Mapping[Name, TensorSpec], known: Mapping[Name, int], replicas: int, chunk_bytes: int
) -> dict[Name, int]:
    """Return, for plain tensors that all ranks hold, the rank that stores the first cell: all store about as much.

    The largest cells come first; each goes to the ranks that have least so far.

    Args:
        specs: of the whole tensors.
        known: turns that stay: ranks have copied by them.
    """
    cells = {}
    for name, spec in specs.items():
        edges = _edges((0,) * len(spec.shape), spec.shape, spec.itemsize, chunk_bytes, replicas)
        cells[name] = len(edges), spec.nbytes // max(1, len(edges))
    loads, found = np.zeros(replicas, np.int64), dict[Name, int]()
    order = sorted(specs, key=lambda name: (name not in known, -cells[name][1], msgspec.msgpack.encode(name)))
    for name in order:
        count, cell_bytes = cells[name]
        if not (more := count % replicas):
            found[name] = known.get(name, 0)
            continue
        if (turn := known.get(name)) is None:
            sums = np.concatenate([[0], np.cumsum(np.concatenate([loads, loads[: more - 1]]))])
            turn = int((sums[more:] - sums[:-more]).argmin())
        found[name] = turn
        loads[np.arange(turn, turn + more) % replicas] += cell_bytes
    return found
