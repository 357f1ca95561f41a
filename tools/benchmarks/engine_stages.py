"""The CPU engine alone: nanoseconds of CPU time for each byte, by the reference in NumPy and by the extension in C."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.data import SERIES, plain, tensors_of
from benchmarks.page import Figure
from snapstore.arrays import Bytes, Column
from snapstore.engine import spans
from snapstore.engine.batches import Chunks, DecodeBatch, EncodeBatch
from snapstore.engine.cpu import CpuEngine
from snapstore.format.blobs import blob, planes

CHUNK_BYTES, ROUNDS = 1024 * 1024, 5
#: Nanoseconds for each byte that the extension should take at most.
GOALS = {"encode full": 0.9, "encode with bases": 1.2, "decode full": 0.8}


def engine_stages() -> list[Figure]:
    """Encode and decode the fp32 chunks of two snapshots of the GPT, on one thread; the least time of some rounds."""
    before, after = (_chunks(plain(state)) for _, state in SERIES["gpt"](2, 10))
    figures, stored = [], {}
    for name in ("numpy", "native"):
        if name == "native" and spans.extension() is None:
            continue
        with _engine(name) as engine:
            times, stored[name] = _measure(engine, before, after)
        for stage, nanoseconds in times.items():
            goal = GOALS.get(stage) if name == "native" else None
            figures.append(
                Figure(f"CPU engine, {name}: {stage}", nanoseconds, "ns of CPU a byte", f"<= {goal}" if goal else "",
                       nanoseconds <= goal if goal else None)
            )  # fmt: skip
    if "native" in stored:
        ratio = stored["native"] / stored["numpy"]
        figures.append(Figure("CPU engine: stored bytes, native / numpy", ratio, "x", "<= 1.003", ratio <= 1.003))
    return figures


def _chunks(tree: Any) -> list[Bytes]:
    """Return copies of the large float tensors, in chunks."""
    found = []
    for _, tensor in tensors_of(tree):
        if tensor.is_floating_point() and tensor.nbytes >= 65536:
            data = tensor.numpy().copy().reshape(-1).view(np.uint8)
            found += [data[at : at + CHUNK_BYTES] for at in range(0, data.size, CHUNK_BYTES)]
    return found


@contextmanager
def _engine(name: str) -> Iterator[CpuEngine]:
    given = os.environ.get("SNAPSTORE_ENGINE")
    os.environ["SNAPSTORE_ENGINE"] = name
    try:
        engine = CpuEngine(digest_seed=1, threads=1)
    finally:
        del os.environ["SNAPSTORE_ENGINE"]
        if given is not None:
            os.environ["SNAPSTORE_ENGINE"] = given
    yield engine
    engine.close()


def _measure(engine: CpuEngine, before: list[Bytes], after: list[Bytes]) -> tuple[dict[str, float], int]:
    """Return the time of each stage [ns a byte], and the bytes of all blobs."""
    size = sum(chunk.size for chunk in after)

    def timed(call: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(ROUNDS):
            began = time.process_time()
            call()
            best = min(best, time.process_time() - began)
        return best / size * 1e9

    def encode(batch: EncodeBatch) -> None:
        engine.recycle(engine.start_encode(batch)())

    full, delta = _batch(engine, after, None), _batch(engine, after, before)
    bases, blobs, deltas = (_blobs(engine, b) for b in (_batch(engine, before, None), full, delta))
    links = [[d, b] if d[16] == blob.DIFFERENCE else [d] for d, b in zip(deltas, bases, strict=True)]
    decode, decode_links = _decode(full, [[b] for b in blobs]), _decode(full, links)
    times = {
        "digests": timed(lambda: engine.start_digests(full.chunks)()),
        "encode full": timed(lambda: encode(full)),
        "encode with bases": timed(lambda: encode(delta)),
        "decode full": timed(lambda: engine.start_decode(decode)()),
        "decode chains of up to 1 link": timed(lambda: engine.start_decode(decode_links)()),
    }
    return times, sum(b.size for b in (*blobs, *deltas))


def _batch(engine: CpuEngine, chunks: Sequence[Bytes], bases: Sequence[Bytes] | None) -> EncodeBatch:
    n = len(chunks)
    given = Chunks.of(chunks if bases is None else bases)
    which: Column = np.full(n, -1) if bases is None else np.arange(n)
    return EncodeBatch(
        Chunks.of(chunks), engine.start_digests(Chunks.of(chunks))(), np.full(n, 4, np.uint8),
        np.full(n, planes.ROTATED, np.uint8), Chunks(given.memories, which, given.starts, given.lengths),
        engine.start_digests(given)(), np.full(n, 2**40),
    )  # fmt: skip


def _blobs(engine: CpuEngine, batch: EncodeBatch) -> list[Bytes]:
    found = []
    for encoded in engine.start_encode(batch)():
        for row, length in enumerate(encoded.entries["length"].tolist()):
            found.append(np.empty(length + -length % blob.ALIGNMENT, np.uint8))
            encoded.copy(row, row + 1, found[-1])()
            found[-1] = found[-1][:length]
    return found


def _decode(batch: EncodeBatch, chains: list[list[Bytes]]) -> DecodeBatch:
    flat = [b for chain in chains for b in chain]
    lengths, counts = (np.array([len(item) for item in items], np.int64) for items in (flat, chains))
    outs = Chunks.of([np.empty(length, np.uint8) for length in batch.chunks.lengths.tolist()])
    return DecodeBatch(
        np.concatenate(flat), np.cumsum(lengths) - lengths, lengths, counts, batch.digests, outs, str
    )  # fmt: skip
