"""Reencode: chunks out of the store into new blobs. rebuild -> delta or full -> encode -> decode again, compare.

In: chains of chunks, and of what they may become deltas to. Out: blobs that are known to give these very chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Bytes, Column
from ..catalog.read_twice import read_twice
from ..chunks import limits
from ..chunks.reader import Fetcher, Wanted
from ..context import Context
from ..engine.base import Chunks, EncodeBatch
from ..format.delta_chain import Chain, table_of
from .stored_blobs import Stored, batches, gathered, new_verifier


@dataclass(frozen=True, slots=True)
class Job:
    """A chunk to encode anew."""

    chain: Chain  # as it is
    base: Chain  # of what it may become a delta to; empty: nothing
    element_size: int
    layout: int

    @property
    def digest(self) -> bytes:
        """Of the chunk."""
        return self.chain[0].digest

    @property
    def length(self) -> int:
        """Stored bytes of the blob that it replaces."""
        return self.chain[0].place.length if self.chain[0].place else 0

    @property
    def size(self) -> int:
        """Plain bytes."""
        return self.chain[0].size


class Reencoder:
    """Encodes chunks of one repository anew, on the CPU.

    Attributes:
        bytes_read: stored bytes of what was rebuilt.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store, self._engines, self._engine = context.store, context.engines, context.engines.cpu
        self.bytes_read = 0
        self._budget = limits.Budget(context.store)

    def encode(self, jobs: Sequence[Job]) -> Iterator[tuple[list[Job], Stored]]:
        """Rebuild chunks and their bases, encode the chunks, decode them again and compare; in batches.

        Raises:
            IntegrityError, FormatError: a chunk or its base is damaged, or the encoder lies.
        """
        verifier = new_verifier()
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
                Chunks([plain], zero, starts, sizes), _joined([job.digest for job in own]),
                np.array([job.element_size for job in own], np.uint8), np.array([job.layout for job in own], np.uint8),
                Chunks([plain], np.where(based, 0, -1), base_starts, sizes),
                _joined([job.base[0].digest if job.base else bytes(16) for job in own]),
                np.array([sum(link.place.length for link in job.base if link.place) for job in own], np.int64),
            )  # fmt: skip
            made = self._engine.start_encode(encode)()
            stored = gathered(made)
            self._engine.recycle(made)
            verifier.start(self._engine, encode, stored)
            verifier.finish()
            yield own, stored

    def rebuild(self, chains: Sequence[Chain], out: Bytes, starts: Column) -> None:
        """Chunks into memory, each compared with its digest.

        Raises:
            IntegrityError, FormatError: a chunk is damaged.
            CapabilityError: they take more decoding than what is stored explains.
        """
        self._budget.spend(sum(link.size for chain in chains for link in chain), "compact")
        numbers: dict[str, int] = {}
        table = table_of(chains, numbers)
        wanted = Wanted(table, list(numbers), np.arange(len(chains)), out, starts)
        read_twice(self._store, lambda: list(Fetcher(self._context).rebuild([wanted])))
        self.bytes_read += int(table.ref_lengths.sum())


def _joined(digests: Sequence[bytes]) -> Bytes:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
