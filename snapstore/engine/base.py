"""base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..arrays import Bytes, Column
from ..format import planes
from ..format.pack import Encoded
from ..state.arrays import Memory

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Chunks:
    """Spans of a few memories, as columns."""

    memories: Sequence[Memory]
    which: Column  # (n,) which memory; -1: no chunk
    starts: Column  # (n,) its first byte there
    lengths: Column  # (n,) [bytes]

    def __len__(self) -> int:
        return len(self.which)

    def take(self, rows: Column) -> Chunks:
        """Some of them."""
        return Chunks(self.memories, self.which[rows], self.starts[rows], self.lengths[rows])

    def views(self) -> list[Memory]:
        """One view a chunk, (r,) uint8; an empty one where there is none."""
        nothing = np.empty(0, np.uint8)
        return [
            self.memories[w][s : s + n] if w >= 0 else nothing
            for w, s, n in zip(self.which.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]

    def and_those(self, others: Chunks) -> Chunks:
        """Both, one after the other."""
        which = np.where(others.which >= 0, others.which + len(self.memories), -1)
        return Chunks(
            [*self.memories, *others.memories], np.concatenate([self.which, which]),
            np.concatenate([self.starts, others.starts]), np.concatenate([self.lengths, others.lengths]),
        )  # fmt: skip

    @staticmethod
    def of(memories: Sequence[Memory]) -> Chunks:
        """Each memory as one chunk."""
        lengths = np.array([len(memory) for memory in memories], np.int64)
        return Chunks(memories, np.arange(len(memories)), np.zeros(len(memories), np.int64), lengths)


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """New chunks to store, a row each."""

    chunks: Chunks
    digests: Bytes  # (n, 16)
    element_sizes: Column  # (n,) 1, 2, 4 or 8
    layouts: Column  # (n,) planes.ROTATED for floats, else planes.BYTES
    bases: Chunks  # (n,) plain bytes of the candidate bases
    base_digests: Bytes  # (n, 16)
    base_chain_bytes: Column  # (n,) stored bytes of every blob that the base needs


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Chunks to rebuild, a row each; their blobs lie newest first, chunk after chunk, in one buffer."""

    stored: Bytes
    offsets: Column  # (m,) of every blob
    lengths: Column  # (m,)
    counts: Column  # (n,) how many of the blobs are a chunk's
    digests: Bytes  # (n, 16)
    outs: Chunks  # filled
    where: Callable[[int], str]  # how to name a blob in an error
    bases: Chunks | None = None  # plain bytes of what each last blob is a delta to; None: the last ones are full


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One chunk's share of an EncodeBatch."""

    chunk: Bytes
    digest: bytes
    element_size: int
    layout: int = planes.BYTES
    base: Bytes | None = None
    base_digest: bytes = b""
    base_chain_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One chunk's share of a DecodeBatch."""

    blobs: Sequence[memoryview]  # newest first
    wheres: Sequence[str]
    digest: bytes
    out: Bytes  # (r,) uint8, filled
    base: Bytes | None = None


class Engine(Protocol):
    """Batches of chunks to blobs and back. `start_*` returns at once; the call it returns waits for the result.

    Attributes:
        digest_seed: of the one repository that it works for: whatever it hashes, it hashes under this.
        batch_bytes: how much one batch should hold at most.
        decode_bytes: stored and plain bytes of a batch to decode.
        depth, decode_depth: how many batches may be on their way beside the one that is made ready.
        readers: how many threads should read for it.
    """

    digest_seed: int
    batch_bytes: int
    decode_bytes: int
    depth: int
    decode_depth: int
    readers: int

    @property
    def batch_chunks(self) -> int:
        """How many chunks one batch should hold at most."""
        ...

    def load(self, chunks: Chunks, *, copy: bool = False) -> Chunks:
        """The same chunks where the engine works; they may be read until the save ends. `copy`: in memory of ours."""
        ...

    def start_digests(self, chunks: Chunks) -> Callable[[], Bytes]:
        """Begin to hash every chunk: XXH3-128 under the seed, (n, 16)."""
        ...

    def start_encode(self, batch: EncodeBatch) -> Callable[[], Sequence[Encoded]]:
        """Begin to encode a batch: delta or full, planes, codecs. The results' rows make up the batch's, in order."""
        ...

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Take back the memory of blobs that have been copied away."""
        ...

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch of chunks; the call raises the first FormatError or IntegrityError."""
        ...

    def drive(self) -> None:
        """Let what was begun go on; for whoever waits for something else meanwhile."""
        ...

    def empty(self, nbytes: int) -> Memory:
        """(nbytes,) uint8 where the engine works."""
        ...

    def moved(self, plain: Bytes) -> Memory:
        """Bytes of the host, (nbytes,) uint8, where the engine works."""
        ...

    def buffer(self, nbytes: int) -> Bytes:
        """At least (nbytes,) uint8 of host memory that the engine copies into and out of fastest."""
        ...

    def give_back(self, buffer: Bytes) -> None:
        """Take back a buffer that nothing uses any more."""
        ...

    def close(self) -> None:
        """Give threads and memory back; the engine may be used again."""
        ...
