"""The bench's scale figures: a million chunks, a thousand snapshots, and how fast the shell starts."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from snapstore import KeepLast, Repository, manifest, records
from snapstore.manifest import Box, ChunkTable, TensorEntry
from snapstore.records import ManifestRef, Snapshot

Row = tuple[str, float, str, str, bool]
MiB = 1024 * 1024


def seconds(function: Callable[[], Any], times: int = 3) -> float:
    """The fastest of a few calls."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - began)
    return best


def chunk_table(chunks: int, packs: int, seed: int = 0) -> ChunkTable:
    """Random references, one a chunk."""
    rng = np.random.default_rng(seed)
    digests = rng.integers(0, 256, (chunks, 16), np.uint8)
    return ChunkTable(
        digests=digests, ref_counts=np.ones(chunks, np.uint16), ref_kinds=np.zeros(chunks, np.uint8),
        ref_packs=np.sort(rng.integers(0, packs, chunks)).astype(np.uint32),
        ref_offsets=rng.integers(64, 32 * MiB, chunks).astype(np.uint64),
        ref_lengths=rng.integers(500_000, 900_000, chunks).astype(np.uint32), ref_digests=digests,
        ref_starts=np.zeros(chunks, np.uint32), ref_sizes=np.full(chunks, MiB, np.uint32),
    )  # fmt: skip


def encode(table: ChunkTable, packs: list[str], save_id: bytes = bytes(16)) -> bytes:
    """A manifest of one tensor over the whole table."""
    shape = [len(table) * MiB]
    entry = TensorEntry(["w"], "tensor", "uint8", shape, False, None, [Box([0], shape, 0, len(table))], None)
    return manifest.encode(
        save_id=save_id, rank=0, sequence=0, part="", chunk_bytes=MiB, tree=["dict", ["w"], [["tensor", 0, False]]],
        tensors=[entry], inline=b"", table=table, packs=packs, pack_sizes=[40 * MiB] * len(packs),
        logical_bytes=len(table) * MiB,
    )  # fmt: skip


def million_chunks(count: int) -> list[Row]:
    """Encode and decode one manifest."""
    packs = [f"{i:064x}" for i in range(count // 40)]
    table = chunk_table(count, len(packs))
    data = encode(table, packs)
    encode_s, decode_s = seconds(lambda: encode(table, packs)), seconds(lambda: manifest.decode(data, "bench"))
    return [
        (f"manifest of {count:,} chunks: encode", encode_s, "s", "< 1", encode_s < 1),
        (f"manifest of {count:,} chunks: decode", decode_s, "s", "< 1", decode_s < 1),
    ]


def thousand_snapshots(folder: Path, snapshots: int, shared: int) -> None:
    """Write records, manifests and stand-in packs; `shared` new chunks each, every one used by ten snapshots."""
    with Repository.create(folder) as repository:
        store, tables, names = repository.store, [], []
        for number in range(snapshots):
            content = f"pack {number}".encode()
            names.append(hashlib.sha256(content).hexdigest())
            store.put(records.pack_key(names[-1]), content)
            tables.append(chunk_table(shared, 1, seed=number))
            window = range(max(0, number - 9), number + 1)
            table = ChunkTable.concatenate([tables[i] for i in window])
            table.ref_packs = np.repeat(np.arange(len(window), dtype=np.uint32), shared)
            data = encode(table, [names[i] for i in window], save_id=number.to_bytes(16, "big"))
            ref = ManifestRef(part="", rank=0, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data),
                              logical_bytes=len(table) * MiB)  # fmt: skip
            store.put(ref.key, data)
            tables[max(0, number - 9)] = tables[max(0, number - 9)] if number < 9 else ChunkTable.empty()
            snapshot = Snapshot(
                id=records.new_id(), run="r", step=number, seq=number, state=records.COMMITTED,
                write_id=records.new_id(), manifests=[ref], created=1e9 + number, logical_bytes=ref.logical_bytes,
                stored_bytes=40 * MiB, chunks=len(table), new_chunks=shared,
            )  # fmt: skip
            store.put(snapshot.key, records.encode(snapshot))


def shell_seconds(*arguments: str) -> float:
    """The fastest of five runs of the shell."""
    command = [str(Path(sys.executable).with_name("snapstore")), *arguments]
    return seconds(lambda: subprocess.run(command, check=True, capture_output=True), 5)


class PeakMemory:
    """The peak of this process's resident memory, sampled every 5 ms."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def figures(folder: Path, *, quick: bool) -> list[Row]:
    """All rows."""
    rows = million_chunks(1_000_000)
    snapshots, shared = (100, 1000) if quick else (1000, 1000)
    thousand_snapshots(folder / "many", snapshots, shared)
    url = str(folder / "many")
    shell_seconds("log", "--repo", url, "--json")  # fills the index
    log_s = shell_seconds("log", "--repo", url, "--json")
    rows.append((f"log on {snapshots:,} snapshots", log_s, "s", "< 0.5", log_s < 0.5))
    with Repository.open(folder / "many") as repository, PeakMemory() as memory:
        began = time.perf_counter()
        forgotten = repository.forget([KeepLast(10)], run="r").forgotten
        deleted = repository.gc().deleted_objects
        both_s = time.perf_counter() - began
    assert len(forgotten) == snapshots - 10, len(forgotten)
    assert deleted >= 2 * (snapshots - 20), deleted
    name = f"forget and gc over {snapshots:,} snapshots that share {snapshots * shared:,} chunks"
    rows.append((name, both_s, "s", "< 10", both_s < 10))
    peak = (memory.peak - memory.before) / MiB
    rows.append((f"{name}: memory", peak, "MiB", "< 500", peak < 500))
    help_s = shell_seconds("--help")
    rows.append(("snapstore --help", help_s, "s", "< 0.3", help_s < 0.3))
    return rows
