"""nvCOMP: its codecs through the C batch API, RAW bitstreams, one call for a whole batch of blocks.

In: columns of addresses and lengths of blocks in device memory. Out: compressed blocks in the caller's memory, and
their sizes; and back. Calls return before the device is done. nvCOMP works in memory of the WorkStream: torch's memory.

nvCOMP's Python API takes one Python object per block. Each of its codecs makes a context on device 0, for any device:
that costs half a gigabyte of the first GPU for every process of a node (docs/design/gpu-engine.md).
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
from ...format.blobs import codecs
from .streams import WorkStream

#: Blocks of ANS: 256 KiB is the fastest size; its output is within 1.5 % of the smallest one (1 MiB).
ANS_BLOCK_BYTES = 256 * 1024
#: nvCOMP's Zstd decoder needs 200 KB of memory per block. The blocks of one call together need at most this [bytes].
DECODE_BYTES = 256 * 1024 * 1024
#: The size of a block on which nvCOMP failed; larger than any real size.
FAILED_SIZE = 1 << 40


@dataclass(frozen=True, slots=True)
class Coder:
    """One way to compress blocks.

    Attributes:
        codec: the id in a blob's header.
        algorithm: its name in nvCOMP's functions.
        options: the first bytes of its options, little-endian; the other bytes are zero.
        block_bytes: plain bytes of a block.
        room_bytes: memory for a compressed block, a multiple of 16: at least nvCOMP's own bound.
        max_blocks: the most blocks in one call; this bounds nvCOMP's memory.
    """

    codec: int
    algorithm: str
    options: bytes
    block_bytes: int
    room_bytes: int
    max_blocks: int


#: Finds matches: within 7 % of Zstd's size on planes of mostly one value, for 0.6 MiB of memory per block.
DEFLATE_MATCHES = Coder(codecs.DEFLATE, "Deflate", b"\2", codecs.BLOCK_BYTES, 148_256, 384)
#: The most memory that deflate may use, per byte of a batch.
DEFLATE_PER_BATCH_BYTE = 3
#: Needs 1.1 GiB of memory, even for few blocks.
ZSTD = Coder(codecs.ZSTD, "Zstd", b"", codecs.BLOCK_BYTES, 65_552, 2048)
ZSTD_BYTES = 1152 * 1024 * 1024
ANS = Coder(codecs.ANS, "ANS", b"", ANS_BLOCK_BYTES, 363_056, 1 << 16)

#: codec -> algorithm and options. The options of ANS let the stream name its data type (NVCOMP_TYPE_BITS).
_DECODERS = {codecs.DEFLATE: ("Deflate", b""), codecs.ZSTD: ("Zstd", b""), codecs.ANS: ("ANS", b"\0\0\0\0\xff")}


class _Options(ctypes.Structure):
    """One of nvCOMP's option structs: 64 bytes, passed by value; reserved bytes must be zero."""

    _fields_ = (("bytes", ctypes.c_uint8 * 64),)

    @classmethod
    def of(cls, first: bytes) -> _Options:
        return cls.from_buffer_copy(first.ljust(64, b"\0"))


_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
#: Argument types of the functions nvcompBatched<algorithm><verb>, the same for every algorithm (nvcomp/zstd.h).
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "CompressGetMaxOutputChunkSize": (_SIZE, _Options, ctypes.POINTER(_SIZE)),
    "CompressGetTempSize": (_SIZE, _SIZE, _Options, ctypes.POINTER(_SIZE), _SIZE, _POINTER),
    "DecompressGetTempSize": (_SIZE, _SIZE, _Options, ctypes.POINTER(_SIZE), _SIZE, _POINTER),
    "CompressAsync": (
        _POINTER,  # addresses of the blocks
        _POINTER,  # their sizes
        _SIZE,  # the largest size
        _SIZE,  # how many
        _POINTER,  # temporary memory
        _SIZE,  # its size
        _POINTER,  # addresses for the compressed blocks
        _POINTER,  # their sizes
        _Options,
        _POINTER,  # statuses
        _POINTER,  # stream
    ),
    "DecompressAsync": (
        _POINTER,  # addresses of the compressed blocks
        _POINTER,  # their sizes
        _POINTER,  # sizes of the memory for each plain block
        _POINTER,  # sizes of the plain blocks
        _SIZE,  # how many
        _POINTER,  # temporary memory
        _SIZE,  # its size
        _POINTER,  # addresses for the plain blocks
        _Options,
        _POINTER,  # statuses
        _POINTER,  # stream
    ),
}


@cache
def _function(algorithm: str, verb: str) -> Any:
    function = getattr(libnvcomp.load_library(), f"nvcompBatched{algorithm}{verb}")
    function.argtypes, function.restype = _ARGUMENTS[verb], ctypes.c_int
    return function


def _call(algorithm: str, verb: str, *arguments: Any) -> None:
    status = _function(algorithm, verb)(*arguments)
    if status:  # of the call; each block has a status of its own
        raise RuntimeError(f"nvCOMP: {algorithm}{verb} failed with status {status} (nvcomp/shared_types.h)")


def room_bytes(coder: Coder) -> int:
    """Return nvCOMP's bound of a compressed block [bytes]."""
    found = _SIZE()
    options = _Options.of(coder.options)
    _call(coder.algorithm, "CompressGetMaxOutputChunkSize", coder.block_bytes, options, ctypes.byref(found))
    return found.value


def check_rooms() -> None:
    """Check that blocks of this nvCOMP fit into `Coder.room_bytes`: else it writes beyond that memory.

    Raises:
        CapabilityError: they do not fit.
    """
    for coder in (DEFLATE_MATCHES, ZSTD, ANS):
        needed = room_bytes(coder)
        if needed > coder.room_bytes:
            raise CapabilityError(
                f"nvCOMP {libnvcomp.__version__}: a block of {coder.algorithm} may take {needed} bytes, expected "
                f"{coder.room_bytes} at most; install nvCOMP 6.0, or a newer snapstore"
            )


def _temp_bytes(work: WorkStream, algorithm: str, verb: str, count: int, block_bytes: int, options: _Options) -> int:
    found, total = _SIZE(), count * block_bytes
    arguments = (count, block_bytes, options, ctypes.byref(found), total, work.stream.cuda_stream)
    _call(algorithm, f"{verb}GetTempSize", *arguments)
    return found.value


def _temporary(
    work: WorkStream, algorithm: str, verb: str, count: int, block_bytes: int, options: _Options
) -> tuple[int | None, int]:
    """Return (address, bytes) of memory for nvCOMP to work in; all calls on a WorkStream share it."""
    nbytes = _temp_bytes(work, algorithm, verb, count, block_bytes, options)
    return (work.room("nvcomp", nbytes).data_ptr() if nbytes else None), nbytes


def encode(work: WorkStream, coder: Coder, sources: Column, lengths: Column, destinations: Column) -> torch.Tensor:
    """Begin to compress every block, from address to address.

    Args:
        sources, destinations: (n,) addresses, multiples of 16; a destination has `coder.room_bytes`.
        lengths: (n,) plain bytes of the blocks.

    Returns:
        The input of `sizes_of`, in pinned memory, valid once the stream is done.
    """
    options, count = _Options.of(coder.options), len(sources)
    found = work.empty(12 * count)
    sizes_at, statuses_at = found.data_ptr(), found.data_ptr() + 8 * count
    tables = work.upload(*(column.astype(np.uint64) for column in (sources, lengths, destinations)))
    most = coder.max_blocks
    if coder is DEFLATE_MATCHES and work.batch_bytes:
        per_block = _temp_bytes(work, coder.algorithm, "Compress", 1, coder.block_bytes, options)
        most = max(1, min(most, DEFLATE_PER_BATCH_BYTE * work.batch_bytes // max(per_block, 1)))
    for i in range(0, count, most):
        part = min(most, count - i)
        blocks, sizes, rooms = (table + 8 * i for table in tables)
        temp = _temporary(work, coder.algorithm, "Compress", part, coder.block_bytes, options)
        _call(
            coder.algorithm,
            "CompressAsync",
            blocks,
            sizes,
            coder.block_bytes,
            part,
            *temp,
            rooms,
            sizes_at + 8 * i,
            options,
            statuses_at + 4 * i,
            work.stream.cuda_stream,
        )
    return work.fetch(found[: 12 * count])


def decode(
    work: WorkStream, codec: int, sources: Column, sizes: Column, destinations: Column, lengths: Column
) -> torch.Tensor:
    """Begin to decompress every block, whose checksum must be verified, into memory of exactly its length.

    Args:
        sources, destinations: (n,) addresses, multiples of 16.
        sizes: (n,) bytes of the compressed blocks.
        lengths: (n,) bytes of the plain blocks.

    Returns:
        The input of `sizes_of`, still on the device. The size of a damaged block may be any number.
    """
    (algorithm, first), count = _DECODERS[codec], len(sources)
    options, block_bytes = _Options.of(first), int(lengths.max(initial=1))
    found = work.empty(12 * count)
    sizes_at, statuses_at = found.data_ptr(), found.data_ptr() + 8 * count
    tables = work.upload(*(column.astype(np.uint64) for column in (sources, sizes, lengths, destinations)))
    per_block = _temp_bytes(work, algorithm, "Decompress", 1, block_bytes, options)
    max_blocks = max(1, DECODE_BYTES // per_block) if per_block else max(1, count)
    for i in range(0, count, max_blocks):
        part = min(max_blocks, count - i)
        blocks, stored, plain, rooms = (table + 8 * i for table in tables)
        temp = _temporary(work, algorithm, "Decompress", part, block_bytes, options)
        _call(
            algorithm,
            "DecompressAsync",
            blocks,
            stored,
            plain,
            sizes_at + 8 * i,
            part,
            *temp,
            rooms,
            options,
            statuses_at + 4 * i,
            work.stream.cuda_stream,
        )
    return found[: 12 * count]


def decode_anywhere(
    work: WorkStream, codec: int, sources: Column, sizes: Column, destinations: Column, lengths: Column
) -> None:
    """Do `decode` for blocks at any address: copy them to aligned memory first, as nvCOMP needs it."""
    aligned = (sizes + 15) // 16 * 16
    moved = work.room("aligned", int(aligned.sum()) + 16).data_ptr() + np.cumsum(aligned) - aligned
    work.gather(sources, moved, sizes)
    decode(work, codec, moved, sizes, destinations, lengths)


def sizes_of(found: torch.Tensor) -> Column:
    """Return the size of each result, (n,) [bytes]; FAILED_SIZE where nvCOMP failed."""
    memory, count = found.numpy(), len(found) // 12
    sizes: Column = np.where(memory[8 * count :].view(np.int32) == 0, memory[: 8 * count].view(np.int64), FAILED_SIZE)
    return sizes
