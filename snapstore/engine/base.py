"""Engine: the protocol that the CPU engine and the CUDA engines answer.

In: batches of chunks as columns (batches.py), with their bytes in memory that the engine can access. Out: digests,
blobs, rebuilt chunks. An engine keeps no state of a save. Each method may be called by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..arrays import Bytes
from ..format.blobs.pack import Encoded
from ..state.values.arrays import Memory
from .batches import Chunks, DecodeBatch, EncodeBatch, Examination, Examined


class Engine(Protocol):
    """Batches of chunks to blobs and back. `start_*` returns at once; the call it returns waits for the result.

    Attributes:
        digest_seed: the seed of its repository; it takes every digest with this seed.
        depth, decode_depth: how many batches to encode, and to decode, may be in progress while the next is prepared.
    """

    digest_seed: int
    depth: int
    decode_depth: int

    @property
    def examine_depth(self) -> int:
        """Return how many batches may be examined while the one before them is looked up and packed."""
        ...

    @property
    def decode_bytes(self) -> int:
        """Return the most stored plus plain bytes that one batch to decode should have."""
        ...

    @property
    def readers(self) -> int:
        """Return how many threads should read packs for it."""
        ...

    @property
    def batch_bytes(self) -> int:
        """Return the most plain bytes that one batch to encode should have."""
        ...

    @property
    def puts(self) -> int:
        """Return how many packs should be hashed and put at once, so that the engine need not wait for them."""
        ...

    @property
    def batch_chunks(self) -> int:
        """Return the most chunks that one batch should have."""
        ...

    def load(self, chunks: Chunks, *, copy: bool = False) -> Chunks:
        """Return the chunks in the engine's memory, readable until the save ends. `copy`: always in new memory."""
        ...

    def start_digests(self, chunks: Chunks) -> Callable[[], Bytes]:
        """Begin to hash every chunk: XXH3-128 under the seed, (n, 16)."""
        ...

    def start_examine(self, given: Examination) -> Callable[[], Examined]:
        """Begin to hash chunks and their bases, and to copy the chunks that differ, if copies are wanted."""
        ...

    def start_encode(self, batch: EncodeBatch) -> Callable[[], Sequence[Encoded]]:
        """Begin to encode a batch. The results, one after the other, hold one blob per row, in order."""
        ...

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Take back the memory of blobs that have been copied."""
        ...

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild chunks; the returned call raises the first FormatError or IntegrityError."""
        ...

    def poll(self) -> None:
        """Advance batches in progress, without waiting; a caller that waits for other work calls it."""
        ...

    def empty(self, nbytes: int) -> Memory:
        """Return (nbytes,) uint8 where the engine works."""
        ...

    def upload(self, plain: Bytes) -> Memory:
        """Return host bytes, (nbytes,) uint8, in the engine's memory."""
        ...

    def buffer(self, nbytes: int) -> Bytes:
        """Return (n,) uint8, n >= nbytes, of the host memory that the engine copies to and from fastest."""
        ...

    def give_back(self, buffer: Bytes) -> None:
        """Take back a buffer that nothing uses any more."""
        ...

    def close(self) -> None:
        """Release threads and memory; the engine may be used again."""
        ...
