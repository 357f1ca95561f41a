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

from ..arrays import sums_before
from ..format.blobs import blob, planes
from ..format.blobs.pack import Encoded
from ..storage.base import ObjectStore
from ..threads import Threads
from .batches import Chunks, DecodeBatch, EncodeBatch
from .cpu import CpuEngine, default_threads

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
    chunks = Chunks.of(list(weights.view(np.uint8).reshape(-1, 1024 * 1024)))
    with Threads(threads or default_threads()) as pool:
        copy_rate = _rate(SAMPLE_BYTES, lambda: pool.start(np.copy, chunks.memories)())
    engine = CpuEngine(0, threads)
    try:
        encode_rate, decode_rate = _of_engine(engine, chunks)
    finally:
        engine.close()
    return Rates(write=write, read=read, encode=encode_rate, decode=decode_rate, copy=copy_rate)


def _of_engine(engine: CpuEngine, chunks: Chunks) -> tuple[float, float]:
    """Encode chunks of fp32 weights and decode them; return the rates of both."""
    n = len(chunks)
    none = Chunks([], np.full(n, -1), np.zeros(n, np.int64), np.zeros(n, np.int64))
    digests = engine.start_digests(chunks)()
    sizes, layouts = np.full(n, 4, np.uint8), np.full(n, planes.ROTATED, np.uint8)
    batch = EncodeBatch(chunks, digests, sizes, layouts, none, np.zeros((n, 16), np.uint8), np.zeros(n, np.int64))
    made: list[Encoded] = []
    encode_rate = _rate(SAMPLE_BYTES, lambda: made.extend(engine.start_encode(batch)()))
    lengths = np.concatenate([encoded.entries["length"] for encoded in made]).astype(np.int64)
    ends = sums_before(lengths + -lengths % blob.ALIGNMENT)
    stored, row = np.empty(int(ends[-1]), np.uint8), 0
    for encoded in made:
        count = len(encoded.entries)
        encoded.copy(0, count, stored[ends[row] : ends[row + count]])()
        row += count
    made.clear()
    decode = DecodeBatch(stored, ends[:-1], lengths, np.ones(n, np.int64), digests, chunks, str)  # to their own memory
    return encode_rate, _rate(SAMPLE_BYTES, lambda: engine.start_decode(decode)())


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
