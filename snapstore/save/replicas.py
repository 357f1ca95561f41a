"""Replicas: digests of the copies that several ranks hold. They show whether copies have diverged.

In: the tensors of a rank of which other ranks hold the same bytes. Out: one digest for each group of such ranks and
part, over all of these bytes, not over the share that this rank stores; buffers, which may differ, have digests of
their own. Digests are seeded, so equal ones mean equal bytes. A tensor is hashed in spans, on the device where it lies.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from ..arrays import Bytes, Column
from ..engine.batches import Chunks
from ..engine.registry import Engines
from ..format.hashing import digest
from ..state.values.arrays import Memory
from ..state.values.held_array import Held
from ..state.walk.flatten import Part
from .shares import Name, RankShares, names_of

#: Each span of so many bytes has a digest.
SPAN_BYTES = 1024 * 1024
#: The end of the ids of groups of buffers.
BUFFERS = "~"
#: Tensors are hashed together up to so many bytes: strided ones on a device are copied first.
BATCH_BYTES = 256 * 1024 * 1024


class Replica(msgspec.Struct, eq=False, gc=False):
    """A tensor of which other ranks hold the same bytes.

    Attributes:
        name: part, path, and the number among the tensors with that path.
        group: the ranks that hold the same bytes, sorted.
        is_buffer: whether it may differ; see `state.stateful.buffers_of`.
        array: the caller's array; None if staging provides the digests.
        digests: returns the digests of its spans, (n, 16) uint8; None: there are none, such as while kernels are not
            loaded.
    """

    name: Name
    group: tuple[int, ...]
    array: Held | None
    is_buffer: bool = False
    digests: Callable[[], Bytes] | None = None

    @property
    def group_id(self) -> str:
        """Return the id of the group; buffers have another id than other tensors."""
        return _group_id(self.group) + (BUFFERS if self.is_buffer else "")


def replicas_of(part: Part, shares: RankShares) -> Iterator[Replica]:
    """Yield the tensors of a part of which other ranks hold the same bytes, or should; none if all may differ."""
    if shares.replicas == "rank0":
        return
    names = names_of(part.name, part.specs)
    for number, (name, held, sharding) in enumerate(zip(names, part.arrays, part.shardings, strict=True)):
        group = shares.group(name, sharding)
        # else this save keeps older shares: see `HolderExchange`
        is_compared = sharding is not None or shares.rank in group
        if len(group) > 1 and is_compared and held.spec.nbytes:
            yield from (Replica(name, group, one, number in part.buffers) for one in (held, *held.others))


def spans(nbytes: Column) -> tuple[Column, Column, Column]:
    """Return for each span its tensor, where it begins there, and its length [bytes]; `nbytes` (n,) is by tensor."""
    counts = -(-nbytes // SPAN_BYTES)
    which = np.repeat(np.arange(len(nbytes)), counts)
    starts = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * SPAN_BYTES
    return which, starts, np.minimum(nbytes[which] - starts, SPAN_BYTES)


def digests_of(memory: Bytes, seed: int) -> Bytes:
    """Return the digests (n, 16) of the spans of bytes in host memory."""
    pieces = (memory[start : start + SPAN_BYTES] for start in range(0, len(memory), SPAN_BYTES))
    return np.frombuffer(b"".join(digest(piece, seed) for piece in pieces), np.uint8).reshape(-1, 16)


def digest_arrays(replicas: Iterable[Replica], engines: Engines) -> None:
    """Hash the caller's arrays now.

    Raises:
        InvalidInputError: an array is not as it was flattened.
    """
    batch: list[tuple[Replica, Memory]] = []
    size_bytes = 0
    for replica in replicas:
        if replica.array is None:
            continue
        batch.append((replica, replica.array.memory(engines.memory_of)))
        size_bytes += replica.array.spec.nbytes
        if size_bytes >= BATCH_BYTES:
            _digest_batch(batch, engines)
            batch, size_bytes = [], 0
    _digest_batch(batch, engines)


def _digest_batch(batch: Sequence[tuple[Replica, Memory]], engines: Engines) -> None:
    for engine in dict.fromkeys(engines.of(memory) for _, memory in batch):
        chosen = [(replica, memory) for replica, memory in batch if engines.of(memory) is engine]
        which, starts, lengths = spans(np.array([replica.array.spec.nbytes for replica, _ in chosen if replica.array]))
        found = engine.start_digests(Chunks([memory for _, memory in chosen], which, starts, lengths))()
        of_each = np.split(found, np.searchsorted(which, np.arange(1, len(chosen))))
        for (replica, _), own in zip(chosen, of_each, strict=True):
            assert replica.array is not None
            replica.array.confirm()
            replica.array, replica.digests = None, own.copy


@lru_cache(maxsize=1024)
def _group_id(group: tuple[int, ...]) -> str:
    return hashlib.sha256(",".join(map(str, group)).encode()).hexdigest()[:16]


def tensor_digests(replicas: Sequence[Replica]) -> list[tuple[Replica, bytes | None]]:
    """Return one digest (16 bytes) of each tensor, or None, sorted by name: ranks may have keys in another order."""
    ordered = sorted(replicas, key=lambda one: repr(one.name))
    return [(one, None if one.digests is None else _joined([one.digests().tobytes()])) for one in ordered]


def group_digests(replicas: Sequence[Replica]) -> dict[str, bytes]:
    """Return one digest (16 bytes) for each group whose tensors all have digests, by its id."""
    groups: dict[str, list[bytes | None]] = defaultdict(list)
    for one, found in tensor_digests(replicas):
        groups[one.group_id].append(found)
    return {
        group: _joined([found for found in digests if found is not None])
        for group, digests in groups.items()
        if None not in digests
    }


def _joined(digests: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(digests)).digest()[:16]
