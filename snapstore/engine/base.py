"""Engine: the protocol that the CPU engine and the CUDA engines answer.

In: batches of chunks as columns (batches.py), their bytes in memory that the engine reaches. Out: digests, blobs,
rebuilt chunks. An engine holds no state of a save. Each of its methods may be called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..arrays import Bytes
from ..format.pack import Encoded
from ..state.arrays import Memory
from .batches import Chunks, DecodeBatch, EncodeBatch


class Engine(Protocol):
    """Batches of chunks to blobs and back. `start_*` returns at once; the call it returns waits for the result.

    Attributes:
        digest_seed: the seed of the one repository that it works for; every digest it takes is under this seed.
        batch_bytes: plain bytes that one batch to encode should hold at most.
        decode_bytes: stored and plain bytes that one batch to decode should hold at most.
        depth, decode_depth: how many batches may be under way while the next one is prepared.
        readers: how many threads should read packs for it.
    """

    digest_seed: int
    batch_bytes: int
    decode_bytes: int
    depth: int
    decode_depth: int
    readers: int

    @property
    def batch_chunks(self) -> int:
        """Return how many chunks one batch should hold at most."""
        ...

    def load(self, chunks: Chunks, *, copy: bool = False) -> Chunks:
        """Return the same chunks where the engine works, readable until the save ends. `copy`: in memory of its own."""
        ...

    def start_digests(self, chunks: Chunks) -> Callable[[], Bytes]:
        """Begin to hash every chunk: XXH3-128 under the seed, (n, 16)."""
        ...

    def start_encode(self, batch: EncodeBatch) -> Callable[[], Sequence[Encoded]]:
        """Begin to encode a batch: delta or full, planes, codecs. All results together are the rows in order."""
        ...

    def recycle(self, encoded: Sequence[Encoded]) -> None:
        """Take back the memory of blobs that have been copied away."""
        ...

    def start_decode(self, batch: DecodeBatch) -> Callable[[], object]:
        """Begin to rebuild a batch of chunks; the call raises the first FormatError or IntegrityError."""
        ...

    def poll(self) -> None:
        """Advance batches under way, without waiting; for a caller that waits for something else meanwhile."""
        ...

    def empty(self, nbytes: int) -> Memory:
        """Return (nbytes,) uint8 where the engine works."""
        ...

    def upload(self, plain: Bytes) -> Memory:
        """Return bytes of the host, (nbytes,) uint8, where the engine works."""
        ...

    def buffer(self, nbytes: int) -> Bytes:
        """Return at least (nbytes,) uint8 of the host memory that the engine copies into and out of fastest."""
        ...

    def give_back(self, buffer: Bytes) -> None:
        """Take back a buffer that nothing uses any more."""
        ...

    def close(self) -> None:
        """Release threads and memory; the engine may be used again."""
        ...
