"""Stages of the CUDA engine on device tensors, without files: kernels by CUDA events, pipelines by the clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_train import State, nbytes, tensors
from snapstore.arrays import Column
from snapstore.engine.batches import Chunks, EncodeBatch
from snapstore.engine.registry import Engines
from snapstore.format.blobs import planes
from snapstore.format.blobs.pack import Encoded
from snapstore.format.hashing import new_seed

CHUNK_BYTES = 1024 * 1024
REPEATS = 5


def figures(state: State, base: State) -> dict[str, float]:
    """GB of plain bytes a second: digests, the fused delta and plane pass, encoding, encoding into pinned memory.

    encode_*: from the begin of the first batch until the last blob is complete on the device, with all waits of the
    host; encode_*_busy: over the time in which any kernel runs, by torch's profiler. *_full: without bases.
    """
    found: dict[str, float] = {}
    for codec in ("portable", "ans"):
        engines = Engines(new_seed(), codec=codec)
        try:
            engine = engines.on(tensors(state)[0].device)
            if codec == "portable":
                found |= _kernels(engine, state, base)
            for name, bases in (("", base), ("_full", None)):
                found |= _pipelines(engine, list(_batches(engine, state, bases)), f"{codec}{name}", nbytes(state) / 1e9)
        finally:
            engines.close()
    found["to_host_GBps"] = found.pop("to_host_portable_GBps")
    return found


def _pipelines(engine: Any, batches: list[EncodeBatch], name: str, size: float) -> dict[str, float]:
    found = {
        f"encode_{name}_GBps": size / _median(lambda: _encode(engine, batches)),
        f"to_host_{name}_GBps": size / _median(lambda: _to_host(engine, batches)),
    }
    with suppress(Exception):  # where the profiler does not work
        found[f"encode_{name}_busy_GBps"] = size / _busy(lambda: _encode(engine, batches))
    return found


def _median(work: Callable[[], object]) -> float:
    """The median of a few runs, after one that does not count [s]."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))


def _busy(work: Callable[[], object]) -> float:
    """Time in which the device runs any kernel or copy [s]: the union of what the profiler saw."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if str(event.device_type).endswith("CUDA")
    )
    busy = end = 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e6


def _batches(engine: Any, state: State, base: State | None) -> Iterator[EncodeBatch]:
    """Chunks of all tensors and those of their bases, in batches of the engine's size."""
    pending: list[tuple[int, int, int]] = []  # tensor, first byte, bytes
    size = 0
    memories = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors(state)]
    bases = None if base is None else [tensor.reshape(-1).view(torch.uint8) for tensor in tensors(base)]
    element_size = tensors(state)[0].itemsize
    for number, memory in enumerate(memories):
        for start in range(0, len(memory), CHUNK_BYTES):
            length = min(CHUNK_BYTES, len(memory) - start)
            pending.append((number, start, length))
            size += length
            if size >= engine.batch_bytes or (number + 1 == len(memories) and start + length == len(memory)):
                yield _batch(engine, np.array(pending), memories, bases, element_size)
                pending, size = [], 0


def _batch(
    engine: Any, rows: Column, memories: list[torch.Tensor], bases: list[torch.Tensor] | None, element_size: int
) -> EncodeBatch:  # fmt: skip
    own, which = np.unique(rows[:, 0], return_inverse=True)
    starts, lengths, n = rows[:, 1], rows[:, 2], len(rows)
    chunks = Chunks([memories[i] for i in own.tolist()], which, starts, lengths)
    nothing = Chunks([], np.full(n, -1), starts, lengths)
    return EncodeBatch(
        chunks, engine.start_digests(chunks)(), np.full(n, element_size, np.uint8),
        np.full(n, planes.ROTATED, np.uint8),
        nothing if bases is None else Chunks([bases[i] for i in own.tolist()], which, starts, lengths),
        np.ones((n, 16), np.uint8), np.full(n, CHUNK_BYTES, np.int64),
    )  # fmt: skip


def _encoded(engine: Any, batches: list[EncodeBatch]) -> Iterator[Sequence[Encoded]]:
    """Yield all batches as a save makes them: one is hashed, with its bases, while the ones before it are encoded."""
    hashing: deque[tuple[EncodeBatch, Callable[[], Any]]] = deque()
    encoding: deque[Callable[[], Any]] = deque()
    for batch in (*batches, None):
        if batch is not None:
            has_base = np.flatnonzero(batch.bases.which >= 0)
            hashing.append((batch, engine.start_digests(batch.chunks.joined(batch.bases.take(has_base)))))
        if len(hashing) > 1 or (batch is None and hashing):
            begun, wait = hashing.popleft()
            wait()
            encoding.append(engine.start_encode(begun))
        while len(encoding) > (engine.depth if batch is not None else 0):
            yield encoding.popleft()()


def _encode(engine: Any, batches: list[EncodeBatch]) -> None:
    for _ in _encoded(engine, batches):
        pass


def _to_host(engine: Any, batches: list[EncodeBatch]) -> None:
    """Encode, and copy every blob into a ring of pinned buffers, as packs do."""
    ring = [engine.buffer(32 * 1024 * 1024) for _ in range(24)]
    copied: list[Callable[[], object]] = [lambda: None] * len(ring)
    number = 0
    for made in _encoded(engine, batches):
        for encoded in made:
            ends = (encoded.entries["offset"] + encoded.entries["length"] + 7) // 8 * 8
            first = 0
            while first < len(ends):
                begin, slot = int(encoded.entries["offset"][first]), number % len(ring)
                last = max(first + 1, int(np.searchsorted(ends, begin + (32 << 20), "right")))
                copied[slot]()
                copied[slot] = encoded.copy(first, last, ring[slot][: int(ends[last - 1]) - begin])
                number, first = number + 1, last
    for wait in copied:
        wait()
    for buffer in ring:
        engine.give_back(buffer)


def _kernels(engine: Any, state: State, base: State) -> dict[str, float]:
    """Digests, and sample + fused pass, batch after batch on one lane, by CUDA events."""
    from snapstore.engine.cuda.encoding import Encoding
    from snapstore.engine.cuda.streams import WorkStream

    batches = list(_batches(engine, state, base))
    spent = {"digest": 0.0, "delta_planes": 0.0}
    lane = WorkStream(engine.device)
    with lane.current():
        for repeat in range(2):  # the first one compiles
            for batch in batches:
                work = Encoding(engine.coders, lane, batch, engine.batch_bytes)
                work.is_delta = np.ones(work.count, bool)
                stages: dict[str, Callable[[], object]] = {
                    "digest": lambda w=work: lane.digests(w.addresses, w.lengths, engine.digest_seed),  # type: ignore[misc]
                    "delta_planes": lambda w=work: (w.sample(), w._split(np.arange(w.count))),  # type: ignore[misc]
                }
                for name, stage in stages.items():
                    took = _device_time(lane, stage)
                    spent[name] += took if repeat else 0
                lane.sync()
    return {f"{name}_GBps": nbytes(state) / 1e9 / took for name, took in spent.items()}


def _device_time(lane: Any, stage: Callable[[], object]) -> float:
    """Return the time of a stage's kernels [s], with the upload of its tables."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    lane.stream.synchronize()
    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # on this lane's stream: the launches below queue up behind it
    begin.record(lane.stream)
    stage()
    end.record(lane.stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
