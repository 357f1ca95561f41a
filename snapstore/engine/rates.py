"""Rates: measure a store and the CPU engine on this machine, and choose a codec by the rates.

In: a store. Out: bytes per second. Every rate comes from one short run, and depends on the machine's other load.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..arrays import Bytes
from ..format.blobs import blob, chain_decode, planes
from ..format.hashing import digest
from ..storage.base import ObjectStore
from ..threads import Threads
from .batches import EncodeJob
from .cpu import default_threads, encode_chunk

#: Plain bytes to encode and decode; size of an object to put and get [bytes]; number of these objects.
SAMPLE_BYTES, OBJECT_BYTES, OBJECTS = 32 * 1024 * 1024, 16 * 1024 * 1024, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second of a rank.

    Attributes:
        write, read: of the store.
        encode, decode: of the CPU engine, in plain bytes.
        copy: of copies in host memory, for which training waits.
    """

    write: float
    read: float
    encode: float
    decode: float
    copy: float


def codec_for(write_rate: float, encode_rate: float) -> str:
    """Return "raw" if a store takes plain bytes faster than the engine encodes them, else "portable"."""
    return "raw" if write_rate > encode_rate else "portable"


def measure(store: ObjectStore | None, threads: int | None = None) -> Rates:
    """Measure this machine and a store: about two seconds, 64 MiB written and removed, under 100 MiB of memory.

    Args:
        store: None: the rates of the store are infinite.
        threads: number of threads of the engine; None: SNAPSTORE_THREADS, else one per core.

    Raises:
        StorageError: the store failed.
    """
    write, read = (math.inf, math.inf) if store is None else _of_store(store)
    weights = np.random.default_rng(0).standard_normal(SAMPLE_BYTES // 4, np.float32)
    weights *= 0.02
    chunks = list(weights.view(np.uint8).reshape(-1, 1024 * 1024))
    with Threads(threads or default_threads()) as pool:
        copy_rate = _rate(SAMPLE_BYTES, lambda: pool.start(np.copy, chunks)())
        encoded: list[memoryview] = []

        def encode(chunk: Bytes) -> memoryview:
            room = np.empty(blob.bound(chunk.size, 4), np.uint8)
            return encode_chunk(EncodeJob(chunk, digest(chunk, 0), 4, planes.ROTATED), room).data

        encode_rate = _rate(SAMPLE_BYTES, lambda: encoded.extend(pool.start(encode, chunks)()))

        def decode(number: int) -> None:
            out = np.empty(chunks[number].size, np.uint8)
            chain_decode.decode_chain([encoded[number]], [""], digest(chunks[number], 0), out, None, seed=0)

        decode_rate = _rate(SAMPLE_BYTES, lambda: pool.start(decode, range(len(chunks)))())
    return Rates(write=write, read=read, encode=encode_rate, decode=decode_rate, copy=copy_rate)


def _of_store(store: ObjectStore) -> tuple[float, float]:
    """Put objects and get them; return the rates of writing and reading. No object is held afterwards."""
    with store.sandbox() as sandbox, Threads(min(OBJECTS, max(1, store.puts_at_once))) as pool:
        objects = [(f"probe/{number}", os.urandom(OBJECT_BYTES)) for number in range(OBJECTS)]
        write = _rate(OBJECTS * OBJECT_BYTES, lambda: pool.start(lambda one: sandbox.put(*one), objects)())
        keys = [key for key, _ in objects]
        objects.clear()
        read = _rate(OBJECTS * OBJECT_BYTES, lambda: pool.start(lambda key: len(sandbox.get(key)), keys)())
    return write, read


def _rate(nbytes: int, act: Callable[[], object]) -> float:
    """Time a call that handles `nbytes`; return its bytes per second."""
    began = time.perf_counter()
    act()
    return nbytes / max(time.perf_counter() - began, 1e-9)
