"""Chunk encoder: encode chunks of the store again: rebuild -> delta or full -> encode -> decode, compare.

In: chains of chunks and of their new bases. Out: new blobs, each of which was decoded and gave its chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Bytes, Column
from ..catalog.read_twice import read_twice
from ..chunks import limits
from ..chunks.reader import ChunkReader, Wanted
from ..context import Context
from ..engine.batches import Chunks, EncodeBatch
from ..errors import FormatError
from ..format.blobs import planes
from ..format.manifests.delta_chain import Chain, cost_of, table_of
from ..format.manifests.delta_choice import cost, delta_limit
from ..format.manifests.manifest import Manifest, manifest_name
from ..format.manifests.tensor_layout import spec_of
from .stored_blobs import StoredBlobs, batches, verified


@dataclass(frozen=True, slots=True)
class Job:
    """A chunk to encode again.

    Attributes:
        chain: how it is rebuilt now.
        base: the chain of the chunk that it may become a delta to; empty: none.
        above: what a restore pays for the links of other chunks' chains on top of this chunk (`delta_choice.cost`).
    """

    chain: Chain
    base: Chain
    element_size: int
    layout: int
    above: float = 0.0

    @property
    def digest(self) -> bytes:
        """Digest of the chunk."""
        return self.chain[0].digest

    @property
    def length(self) -> int:
        """Stored bytes of the blob that is replaced."""
        return self.chain[0].place.length if self.chain[0].place else 0

    @property
    def size(self) -> int:
        """Plain bytes of the chunk."""
        return self.chain[0].size

    def delta_limit(self, restore_cost: float) -> int:
        """Return the most stored bytes that a delta to the base may have; 0 if there is no base.

        A restore then costs at most `restore_cost`, or no more than it does now.
        """
        if not self.base:
            return 0
        base_cost = cost_of(self.base)
        limit = delta_limit(restore_cost, cost_of(self.base[-1:]), base_cost + self.above, self.size)
        return int(max(0, limit, cost_of(self.chain) - base_cost - cost(0, self.size)))


class Reencoder:
    """Encodes chunks of one repository again, on the CPU.

    Attributes:
        bytes_read: stored bytes of the chunks rebuilt so far.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store, self._engine = context.store, context.engines.cpu
        self.bytes_read = 0
        self._budget = limits.Budget(context.store)

    def encode(self, jobs: Sequence[Job]) -> Iterator[tuple[list[Job], StoredBlobs]]:
        """Rebuild chunks and their bases, encode the chunks, decode the new blobs and compare; yield (jobs, blobs).

        Raises:
            IntegrityError, FormatError: a chunk or its base is damaged, or a new blob does not decode to its chunk.
        """
        for batch in batches(np.array([2 * job.size for job in jobs]), self._engine):
            own = [jobs[i] for i in batch.tolist()]
            sizes = np.array([job.size for job in own])
            based = np.array([bool(job.base) for job in own])
            rooms = sizes + -sizes % 256
            ends = np.cumsum(np.concatenate([rooms, rooms]))
            starts, base_starts = np.split(ends - np.concatenate([rooms, rooms]), 2)
            plain = np.empty(int(ends[-1]), np.uint8)
            bases = [job.base for job in own if job.base]
            self.rebuild([*(job.chain for job in own), *bases], plain, np.concatenate([starts, base_starts[based]]))
            zero = np.zeros(len(own), np.int64)
            encode = EncodeBatch(
                Chunks([plain], zero, starts, sizes),
                _joined([job.digest for job in own]),
                np.array([job.element_size for job in own], np.uint8),
                np.array([job.layout for job in own], np.uint8),
                Chunks([plain], np.where(based, 0, -1), base_starts, sizes),
                _joined([job.base[0].digest if job.base else bytes(16) for job in own]),
                np.array([job.delta_limit(self._context.options.restore_cost) for job in own], np.int64),
                xor=self._context.options.delta == "xor",
            )
            yield own, verified(self._engine, encode, self._engine.start_encode(encode)())

    def rebuild(self, chains: Sequence[Chain], out: Bytes, starts: Column) -> None:
        """Rebuild chunks into memory, and compare each with its digest.

        Raises:
            IntegrityError, FormatError: a chunk is damaged.
            CapabilityError: they need more decoding than their stored bytes explain.
        """
        self._budget.spend(sum(link.size for chain in chains for link in chain), "compact")
        numbers: dict[str, int] = {}
        table = table_of(chains, numbers)
        wanted = Wanted(table, list(numbers), np.arange(len(chains)), out, starts)
        read_twice(self._store, lambda: list(ChunkReader(self._context).rebuild([wanted])))
        self.bytes_read += int(table.ref_lengths.sum())


def _joined(digests: Sequence[bytes]) -> Bytes:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def kinds_of(m: Manifest) -> tuple[Column, Column]:
    """Return the element size [bytes] and the layout of planes of every chunk of a manifest, (n,) each.

    Raises:
        FormatError: a chunk cuts an element, so no encoder can split it into planes; only a forged manifest has one.
    """
    specs = [spec_of(entry) for entry in m.tensors]
    sizes = np.array([spec.element_size for spec in specs], np.uint8)
    layouts = np.array([planes.ROTATED if spec.is_float else planes.BYTES for spec in specs], np.uint8)
    of_chunks = sizes[m.owners]
    if (cut := np.flatnonzero(m.table.lengths % of_chunks)).size:
        row = int(cut[0])
        raise FormatError(
            f"{manifest_name(m.header)}: chunk {row} has {m.table.lengths[row]} bytes, expected whole elements of "
            f"{of_chunks[row]}; no snapstore writes that"
        )
    return of_chunks, layouts[m.owners]
