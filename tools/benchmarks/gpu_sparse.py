"""Sparse deltas on a device: kernels are timed by CUDA events, and every result is compared with the CPU engine's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from snapstore.arrays import Bytes
from snapstore.engine.batches import Chunks, DecodeBatch, EncodeBatch
from snapstore.engine.registry import Engines
from snapstore.format.blobs import blob, codecs, planes
from snapstore.format.hashing import digest, new_seed

CHUNK_BYTES = 1024 * 1024
#: Chunks that differ; a batch repeats them.
DISTINCT = 16
REPEATS = 5
LINKS = 4


def figures(device: torch.device, chunks: int) -> dict[str, Any]:
    """Return GB of plain bytes a second, by the time of the kernels only; medians.

    Args:
        chunks: of 1 MiB in a batch: bf16 weights of which 3 in a hundred change by one step at 1e-6.

    Raises:
        AssertionError: a result is not the CPU engine's.
    """
    engines = Engines(new_seed(), threads=8)
    try:
        engine, cpu = engines.on(device), engines.cpu
        versions = _versions(LINKS + 1)
        changed = np.mean([np.count_nonzero(a.view("u2") != b.view("u2")) for a, b in zip(*versions[:2], strict=True)])
        blobs = [_encoded(cpu, after, before) for before, after in pairwise(versions)]
        assert all(entry["codecs"][0] == codecs.SPARSE for link in blobs for entry, _ in link), "they are sparse"
        found: dict[str, Any] = {
            "changed_share": float(changed) / (CHUNK_BYTES // 2),
            "stored_share": float(np.mean([len(data) for _, data in blobs[0]])) / CHUNK_BYTES,
        }
        own = np.arange(chunks) % DISTINCT
        found["encode"] = _encode(engine, [versions[1][k] for k in own], [versions[0][k] for k in own], blobs[0])
        for links in (1, LINKS):
            chains = [[blobs[i][k][1] for i in range(links - 1, -1, -1)] for k in own.tolist()]
            arrays, bases = [versions[links][k] for k in own], [versions[0][k] for k in own]
            found[f"decode_{links}"] = _decode(engine, chains, arrays, bases, chunks * CHUNK_BYTES * links)
        return found | _merge(engine, cpu, chunks)
    finally:
        engines.close()


def _versions(count: int) -> list[list[Bytes]]:
    """Return chunks of bf16 weights, and the same after each step at 1e-6."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(DISTINCT, CHUNK_BYTES // 2, generator=generator) * 0.02
    versions = []
    for _ in range(count):
        versions.append(list(weights.bfloat16().view(torch.uint8).numpy()))
        weights += torch.randn(weights.shape, generator=generator) * 1e-6
    return versions


def _encoded(
    engine: Any, chunks: Sequence[Bytes], bases: Sequence[Bytes] | None = None, size: int = 2
) -> list[tuple[Any, bytes]]:
    """Return entry and bytes of every blob as an engine makes them."""
    return [one for encoded in engine.start_encode(_batch(engine, chunks, bases, size))() for one in _read(encoded)]


def _batch(engine: Any, chunks: Sequence[Bytes], bases: Sequence[Bytes] | None, size: int) -> EncodeBatch:
    n, seed = len(chunks), engine.digest_seed
    digests = [[digest(c, seed) for c in some] if some else [bytes(16)] * n for some in (chunks, bases)]
    own, others = (np.frombuffer(b"".join(d), np.uint8).reshape(-1, 16) for d in digests)
    nothing = Chunks([], np.full(n, -1), np.zeros(n, np.int64), np.zeros(n, np.int64))
    return EncodeBatch(
        _chunks(engine, chunks), own, np.full(n, size, np.uint8), np.full(n, planes.ROTATED, np.uint8),
        _chunks(engine, bases) if bases else nothing, others, np.full(n, np.inf),
    )  # fmt: skip


def _read(encoded: Any) -> list[tuple[Any, bytes]]:
    """Return entry and bytes of every blob."""
    made = []
    for i, entry in enumerate(encoded.entries):
        out = np.empty(int(entry["length"]) + -int(entry["length"]) % blob.ALIGNMENT, np.uint8)
        encoded.copy(i, i + 1, out)()
        made.append((entry, out[: int(entry["length"])].tobytes()))
    return made


def _chunks(engine: Any, arrays: Sequence[Bytes]) -> Chunks:
    """Return arrays of one length as chunks of one memory of an engine."""
    size, n = arrays[0].size, len(arrays)
    memory = engine.upload(np.concatenate(arrays))
    return Chunks([memory], np.zeros(n, np.int64), np.arange(n) * size, np.full(n, size))


def _encode(
    engine: Any, arrays: Sequence[Bytes], bases: Sequence[Bytes], expected: Sequence[tuple[Any, bytes]]
) -> dict[str, float]:
    """Encode sparse deltas; their tables and low parts must be the `expected` ones, of the first chunks."""
    from snapstore.engine.cuda.encoding import Encoding

    batch = _batch(engine, arrays, bases, 2)
    made: list[Any] = []

    def run(lane: Any) -> None:
        made[:] = [_finished(Encoding(engine.coders, lane, batch, engine.batch_bytes).run(), lane)]

    found = _timed(engine, run, sum(a.size for a in arrays))
    for (_, ours), (_, theirs) in zip(_read(made[0]), expected, strict=False):
        assert _without_frames(ours) == _without_frames(theirs), "another delta than the CPU engine's"
    return found


def _without_frames(data: bytes) -> tuple[bytes, bytes]:
    """Return the table of groups and the low parts of a sparse delta."""
    count = int(np.frombuffer(data, "<u4", 1, 40)[0])
    frames = int(np.frombuffer(data, "<u4", count, blob.HEADER.size).sum())
    payload = data[blob.HEADER.size + 4 * count :]
    table = 4 + 12 * int(np.frombuffer(payload, "<u4", 1)[0])
    return payload[:table], payload[table + frames :]


def _decode(
    engine: Any, chains: Sequence[Sequence[bytes]], arrays: Sequence[Bytes], bases: Sequence[Bytes] | None, nbytes: int
) -> dict[str, float]:
    """Rebuild chains; return GB of `nbytes` a second by each kernel, and by all but digests and checksums."""
    from snapstore.engine.cuda.decoding import Decoding

    blobs = [b + bytes(-len(b) % blob.ALIGNMENT) for chain in chains for b in chain]
    ends = np.cumsum([len(b) for b in blobs])
    stored = engine.buffer(int(ends[-1]))[: int(ends[-1])]
    stored[:] = np.frombuffer(b"".join(blobs), np.uint8)
    digests = np.frombuffer(b"".join(digest(a, engine.digest_seed) for a in arrays), np.uint8).reshape(-1, 16)
    outs = _chunks(engine, [np.zeros(a.size, np.uint8) for a in arrays])
    batch = DecodeBatch(
        stored, ends - [len(b) for b in blobs], np.array([len(b) for chain in chains for b in chain]),
        np.array([len(c) for c in chains]), digests, outs, lambda i: f"blob {i}",
        _chunks(engine, bases) if bases else None,
    )  # fmt: skip
    expected = engine.upload(np.concatenate(arrays))

    def run(lane: Any) -> None:
        decoding = Decoding(lane, batch, engine.digest_seed).run()
        fallback = _finished(decoding, lane)
        assert not len(fallback), f"left to the CPU: chunks {fallback}"

    found = _timed(engine, run, nbytes)
    assert torch.equal(outs.memories[0], expected), "a chunk is wrong"
    engine.give_back(stored)
    return found


def _finished(steps: Any, lane: Any) -> Any:
    """Run the steps of a batch; return what they return."""
    while True:
        try:
            torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]  # launches queue up behind it
            next(steps)
        except StopIteration as stop:
            return stop.value
        lane.stream.synchronize()


def _timed(engine: Any, run: Callable[[Any], None], nbytes: int) -> dict[str, float]:
    """Return GB of `nbytes` a second by each kernel that a run launches; "all": by all but `digest`; medians."""
    from snapstore.engine.cuda.streams import WorkStream

    class Lane(WorkStream):
        """Puts an event before and after every kernel."""

        spans: defaultdict[str, list[tuple[Any, Any]]]

        def launch(self, name: str, grid: tuple[int, ...], *arguments: int | torch.Tensor) -> None:
            if not all(grid):
                return
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record(self.stream)
            super().launch(name, grid, *arguments)
            end.record(self.stream)
            self.spans[name].append((begin, end))

    lane, taken = Lane(engine.device), []
    with lane.current():
        for _ in range(REPEATS + 1):
            lane.spans = defaultdict(list)
            run(lane)
            lane.sync()
            spans = {name: sum(a.elapsed_time(b) for a, b in pairs) / 1e3 for name, pairs in lane.spans.items()}
            taken.append(spans | {"all": sum(span for name, span in spans.items() if name != "digest")})
        lane.release_memory()
    return {name: nbytes / 1e9 / float(np.median([one[name] for one in taken[1:]])) for name in taken[0]}


def _merge(engine: Any, cpu: Any, chunks: int) -> dict[str, Any]:
    """Merge chains of fp32 differences by planes: GB of plain bytes a second, all blobs counted."""
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(DISTINCT, CHUNK_BYTES // 4, generator=generator) * 0.02
    chains, before = [[data] for _, data in _encoded(cpu, list(values.view(torch.uint8).numpy()), size=4)], None
    for _ in range(LINKS - 1):
        before = list(values.clone().view(torch.uint8).numpy())
        values += torch.randn(values.shape, generator=generator) * 1e-5
        links = _encoded(cpu, list(values.view(torch.uint8).numpy()), before, 4)
        assert all(entry["transform"] == blob.DIFFERENCE for entry, _ in links), "they are differences"
        chains = [[data, *chain] for (_, data), chain in zip(links, chains, strict=True)]
    arrays = list(values.view(torch.uint8).numpy())
    own = [i % DISTINCT for i in range(chunks // 2)]
    nbytes = len(own) * CHUNK_BYTES * LINKS
    return {f"merge_{LINKS}": _decode(engine, [chains[i] for i in own], [arrays[i] for i in own], None, nbytes)}
