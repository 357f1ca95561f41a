"""nvCOMP's codecs through its C batch API: RAW bitstreams, one call for a whole batch of blocks.

In: addresses and lengths of blocks in device memory, as columns. Out: compressed blocks in rooms of the caller, and
their sizes; and back. Calls return before the device is done. What nvCOMP works in is memory of the lane, so of torch.

Its Python API would do the same, but takes a Python object a block, and each of its codecs makes a context on device 0,
whatever device it is for: half a gigabyte of the first GPU for every process of a node (docs/design/gpu-engine.md).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from nvidia import libnvcomp

from ...arrays import Column
from ...errors import CapabilityError
from ...format import codecs
from .streams import Lane

#: Blocks of ANS: 256 KiB is the fastest and within 1.5 % of the smallest (1 MiB).
ANS_BLOCK_BYTES = 256 * 1024
#: nvCOMP's Zstd decoder wants 200 KB a block; it gets blocks for as much as this at a time.
DECODE_BYTES = 256 * 1024 * 1024
#: The size of a block that nvCOMP could not do: more than any.
NOT_DONE = 1 << 40


@dataclass(frozen=True, slots=True)
class Coder:
    """One way to compress blocks.

    Attributes:
        codec: the id in a blob's header.
        algorithm: as in the names of nvCOMP's functions.
        options: the first bytes of its options, little-endian; the others are zero.
        block_bytes: plain bytes of a block.
        room_bytes: what a compressed block may take, a multiple of 16: nvCOMP's own bound.
        most_blocks: in one call; bounds nvCOMP's own memory.
    """

    codec: int
    algorithm: str
    options: bytes
    block_bytes: int
    room_bytes: int
    most_blocks: int


#: Matches: within 7 % of Zstd's size on planes of mostly one value, for 0.6 MiB of memory a block ...
DEFLATE_MATCHES = Coder(codecs.DEFLATE, "Deflate", b"\2", codecs.BLOCK_BYTES, 148_256, 384)
#: ... where Zstd wants 1.1 GiB, however few the blocks are.
ZSTD = Coder(codecs.ZSTD, "Zstd", b"", codecs.BLOCK_BYTES, 65_552, 2048)
ZSTD_BYTES = 1152 * 1024 * 1024
ANS = Coder(codecs.ANS, "ANS", b"", ANS_BLOCK_BYTES, 363_056, 1 << 16)

#: By codec: its algorithm, and options; those of ANS say that the stream names its type (NVCOMP_TYPE_BITS).
_DECODERS = {codecs.DEFLATE: ("Deflate", b""), codecs.ZSTD: ("Zstd", b""), codecs.ANS: ("ANS", b"\0\0\0\0\xff")}


class _Options(ctypes.Structure):
    """64 bytes, passed by value: each of nvCOMP's structs of options, whose reserved bytes must be zero."""

    _fields_ = (("bytes", ctypes.c_uint8 * 64),)

    @classmethod
    def of(cls, first: bytes) -> _Options:
        return cls.from_buffer_copy(first.ljust(64, b"\0"))


_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
#: Of functions named nvcompBatched<algorithm><verb>, the same for every algorithm (nvcomp/zstd.h).
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "CompressGetMaxOutputChunkSize": (_SIZE, _Options, ctypes.POINTER(_SIZE)),
    "CompressGetTempSize": (_SIZE, _SIZE, _Options, ctypes.POINTER(_SIZE), _SIZE, _POINTER),
    "DecompressGetTempSize": (_SIZE, _SIZE, _Options, ctypes.POINTER(_SIZE), _SIZE, _POINTER),
    # blocks, their sizes, the largest size, count, temporary memory, its size, rooms, sizes, options, statuses, stream
    "CompressAsync": (
        _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER, _Options, _POINTER, _POINTER,
    ),
    # blocks, their sizes, rooms' sizes, sizes, count, temporary memory, its size, rooms, options, statuses, stream
    "DecompressAsync": (
        _POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _Options, _POINTER, _POINTER,
    ),
}  # fmt: skip


@cache
def _function(algorithm: str, verb: str) -> Any:
    function = getattr(libnvcomp.load_library(), f"nvcompBatched{algorithm}{verb}")
    function.argtypes, function.restype = _ARGUMENTS[verb], ctypes.c_int
    return function


def _call(algorithm: str, verb: str, *arguments: Any) -> None:
    status = _function(algorithm, verb)(*arguments)
    if status:  # nothing about blocks: those have statuses of their own
        raise RuntimeError(f"nvCOMP: {algorithm}{verb} failed with status {status} (nvcomp/shared_types.h)")


def room_bytes(coder: Coder) -> int:
    """What nvCOMP says that a compressed block may take."""
    found = _SIZE()
    options = _Options.of(coder.options)
    _call(coder.algorithm, "CompressGetMaxOutputChunkSize", coder.block_bytes, options, ctypes.byref(found))
    return found.value


def check_rooms() -> None:
    """Blocks of this nvCOMP fit into our rooms: another release may have other bounds, and would write beyond them.

    Raises:
        CapabilityError: they do not.
    """
    for coder in (DEFLATE_MATCHES, ZSTD, ANS):
        needed = room_bytes(coder)
        if needed > coder.room_bytes:
            raise CapabilityError(
                f"nvCOMP {libnvcomp.__version__}: a block of {coder.algorithm} may take {needed} bytes, expected "
                f"{coder.room_bytes} at most; install nvCOMP 6.0, or a newer snapstore"
            )


def _temp_bytes(lane: Lane, algorithm: str, verb: str, count: int, block_bytes: int, options: _Options) -> int:
    found = _SIZE()
    _call(
        algorithm, f"{verb}GetTempSize", count, block_bytes, options, ctypes.byref(found), count * block_bytes,
        lane.stream.cuda_stream,
    )  # fmt: skip
    return found.value


def _temporary(
    lane: Lane, algorithm: str, verb: str, count: int, block_bytes: int, options: _Options
) -> tuple[int | None, int]:
    """(address, bytes) of memory for nvCOMP to work in; every call of a lane uses the same."""
    nbytes = _temp_bytes(lane, algorithm, verb, count, block_bytes, options)
    return (lane.room("nvcomp", nbytes).data_ptr() if nbytes else None), nbytes


def encode(lane: Lane, coder: Coder, sources: Column, lengths: Column, destinations: Column) -> torch.Tensor:
    """Begin to compress every block, addresses (n,) to addresses (n,) of rooms of `coder.room_bytes`.

    Args:
        sources, destinations: aligned to 16 bytes.

    Returns:
        What `sizes_of` takes once the stream is done.
    """
    options, count = _Options.of(coder.options), len(sources)
    found = lane.empty(12 * count)
    sizes_at, statuses_at = found.data_ptr(), found.data_ptr() + 8 * count
    tables = lane.upload(*(column.astype(np.uint64) for column in (sources, lengths, destinations)))
    for i in range(0, count, coder.most_blocks):
        part = min(coder.most_blocks, count - i)
        blocks, sizes, rooms = (table + 8 * i for table in tables)
        temp = _temporary(lane, coder.algorithm, "Compress", part, coder.block_bytes, options)
        _call(
            coder.algorithm, "CompressAsync", blocks, sizes, coder.block_bytes, part, *temp, rooms, sizes_at + 8 * i,
            options, statuses_at + 4 * i, lane.stream.cuda_stream,
        )  # fmt: skip
    return lane.fetch(found[: 12 * count])


def decode(
    lane: Lane, codec: int, sources: Column, sizes: Column, destinations: Column, lengths: Column
) -> torch.Tensor:
    """Begin to decompress every block, whose checksum has been verified, into its room of just its length.

    Args:
        sources, destinations: aligned to 16 bytes.

    Returns:
        What `sizes_of` takes, on the device. Of a damaged block it may say anything.
    """
    (algorithm, first), count = _DECODERS[codec], len(sources)
    options, block_bytes = _Options.of(first), int(lengths.max(initial=1))
    found = lane.empty(12 * count)
    sizes_at, statuses_at = found.data_ptr(), found.data_ptr() + 8 * count
    tables = lane.upload(*(column.astype(np.uint64) for column in (sources, sizes, lengths, destinations)))
    per_block = _temp_bytes(lane, algorithm, "Decompress", 1, block_bytes, options)
    most_blocks = max(1, DECODE_BYTES // per_block) if per_block else max(1, count)
    for i in range(0, count, most_blocks):
        part = min(most_blocks, count - i)
        blocks, stored, plain, rooms = (table + 8 * i for table in tables)
        temp = _temporary(lane, algorithm, "Decompress", part, block_bytes, options)
        _call(
            algorithm, "DecompressAsync", blocks, stored, plain, sizes_at + 8 * i, part, *temp, rooms, options,
            statuses_at + 4 * i, lane.stream.cuda_stream,
        )  # fmt: skip
    return found[: 12 * count]


def sizes_of(found: torch.Tensor) -> Column:
    """Of every block the bytes that came out of it; NOT_DONE of those that nvCOMP could not do."""
    memory, count = found.numpy(), len(found) // 12
    sizes: Column = np.where(memory[8 * count :].view(np.int32) == 0, memory[: 8 * count].view(np.int64), NOT_DONE)
    return sizes
