"""nvCOMP's codecs through its Python batch API: RAW bitstreams, one call for a whole batch of blocks.

In: one device buffer, and where its blocks lie. Out: compressed blocks in a buffer of the caller, and their sizes; and
back. nvCOMP's device memory comes from torch's allocator. Measured on an H200 (docs/design/gpu-engine.md).

Codecs belong to one stream; their calls return before the device is done.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nvidia import nvcomp

from .. import codecs

#: Blocks of ANS: 256 KiB is the fastest and within 1.5 % of the smallest (1 MiB).
ANS_BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Coder:
    """One way to compress blocks.

    Attributes:
        codec: the id in a blob's header.
        block_bytes: plain bytes of a block.
        room_bytes: what a compressed block may take.
        most_blocks: in one call; bounds nvCOMP's own memory.
    """

    codec: int
    algorithm: str
    options: tuple[tuple[str, Any], ...]
    block_bytes: int
    room_bytes: int
    most_blocks: int


#: Huffman codes alone: 30 - 64 GB/s, where Zstd gives 3 on such planes.
DEFLATE_ENTROPY = Coder(codecs.DEFLATE, "Deflate", (("algorithm_type", 0),), codecs.BLOCK_BYTES, 148_480, 1 << 16)
#: With matches: within 7 % of Zstd's size on planes of mostly one value, for 0.6 MiB of memory a block ...
DEFLATE_MATCHES = Coder(codecs.DEFLATE, "Deflate", (("algorithm_type", 2),), codecs.BLOCK_BYTES, 148_480, 512)
#: ... where Zstd wants 1.1 GiB, however few the blocks are.
ZSTD = Coder(codecs.ZSTD, "Zstd", (), codecs.BLOCK_BYTES, 65_792, 2048)
ZSTD_BYTES = 1152 * 1024 * 1024
ANS = Coder(codecs.ANS, "ANS", (), ANS_BLOCK_BYTES, 363_264, 1 << 16)

_DECODERS = {codecs.DEFLATE: DEFLATE_ENTROPY, codecs.ZSTD: ZSTD, codecs.ANS: ANS}
_allocation = threading.local()


class _Block:
    """Device memory for nvCOMP from torch's allocator, freed with this object."""

    def __init__(self, nbytes: int, stream: Any) -> None:
        device = torch.device("cuda", stream.device)
        try:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr, device)):
                self._memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            _allocation.failed = True  # nvCOMP turns the exception into one of its own
            raise
        self.ptr = self._memory.data_ptr()


nvcomp.set_device_allocator(_Block)


def ran_out_of_memory() -> bool:
    """Whether nvCOMP got no memory in this thread since this was last asked."""
    failed, _allocation.failed = getattr(_allocation, "failed", False), False
    return bool(failed)


def refused(error: BaseException) -> bool:
    """Whether nvCOMP did not like its input; else the device, or its memory, failed."""
    return type(error) in (RuntimeError, ValueError) and not getattr(_allocation, "failed", False)


class Codecs:
    """nvCOMP's codecs on one stream; made when first used, and with them nvCOMP's memory."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._made: dict[Coder, Any] = {}
        self._batches: list[Any] = []  # their tables lie in pinned memory that nvCOMP reuses once they are gone

    def _codec(self, coder: Coder) -> Any:
        if coder not in self._made:
            self._made[coder] = nvcomp.Codec(
                algorithm=coder.algorithm, bitstream_kind=nvcomp.BitstreamKind.RAW,
                uncomp_chunk_size=coder.block_bytes, device_id=self._stream.device.index,
                cuda_stream=self._stream.cuda_stream, **dict(coder.options),
            )  # fmt: skip
        return self._made[coder]

    def _batch(self, memory: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
        batch = nvcomp.as_arrays(memory, list(offsets), list(sizes), self._stream.cuda_stream)
        self._batches.append(batch)
        return batch

    def encode(
        self, coder: Coder, plain: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], out: torch.Tensor,
        out_offsets: Sequence[int],
    ) -> list[Any]:  # fmt: skip
        """Begin to compress blocks into rooms of `coder.room_bytes`; what `sizes_of` takes once the stream is done."""
        batches = []
        for i in range(0, len(offsets), coder.most_blocks):
            part = slice(i, i + coder.most_blocks)
            rooms = self._batch(out, out_offsets[part], [coder.room_bytes] * len(out_offsets[part]))
            self._codec(coder).encode(self._batch(plain, offsets[part], sizes[part]), out=rooms)
            batches.append(rooms)
        return batches

    @staticmethod
    def sizes_of(batches: Sequence[Any]) -> list[int]:
        """Sizes of compressed blocks [bytes]."""
        return [size for batch in batches for size in batch.buffer_sizes]

    def decode(
        self, codec: int, stored: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], out: torch.Tensor,
        out_offsets: Sequence[int], out_sizes: Sequence[int],
    ) -> None:  # fmt: skip
        """Begin to decompress blocks, whose checksums have been verified, into their places."""
        made = self._codec(_DECODERS[codec])
        config = made.decompression_config(made.compression_config(list(out_sizes)))  # else it would wait for sizes
        made.decode(
            self._batch(stored, offsets, sizes), out=self._batch(out, out_offsets, out_sizes),
            decompression_config=config,
        )  # fmt: skip

    def synced(self) -> None:
        """The stream is done with everything that was begun."""
        self._batches.clear()

    def clear(self) -> None:
        """Give nvCOMP's memory back."""
        self._made.clear()
