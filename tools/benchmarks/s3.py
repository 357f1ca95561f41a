"""`tools/bench s3`: a repository on a real S3 server beside boto3's own transfers of the same stored bytes.

The state is 1 GiB with the entropy of AdamW's: fp32 weights, first and second moments. Client and server share this
machine's cores, so encoding competes with the server for them. Figures are medians of rounds; snapstore and boto3 take
turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import numpy as np
import torch

from benchmarks.page import Figure, machine
from snapstore import Repository, SnapshotManager
from snapstore.format.manifests import manifest
from snapstore.format.records import Snapshot, encode, new_id
from snapstore.storage.s3.store import S3Store

ROOT = Path(__file__).parents[2]
MiB = 1024 * 1024
TENSORS = 32  # of each kind


class Traffic:
    """Counts a store's requests, and the bytes of the bodies that come back."""

    def __init__(self, store: S3Store) -> None:
        self.requests = self.received_bytes = 0
        events = store._client.meta.events
        events.register("before-send.s3", self._sent)
        events.register("after-call.s3.GetObject", self._got)

    def _sent(self, **_: Any) -> None:
        self.requests += 1

    def _got(self, parsed: dict[str, Any], **_: Any) -> None:
        self.received_bytes += parsed.get("ContentLength", 0)

    def of(self, work: Callable[[], Any]) -> tuple[int, int]:
        """(requests, bytes received) of some work."""
        before = self.requests, self.received_bytes
        work()
        return self.requests - before[0], self.received_bytes - before[1]


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def memory_kib(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def peak_mib(work: Callable[[], Any]) -> float:
    """Return how far resident memory rises while `work` runs [MiB]."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory_kib("VmRSS")
    work()
    return (memory_kib("VmHWM") - before) / 1024


def state_of(total_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    count = total_bytes // (3 * TENSORS * 4)
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "model": lambda: torch.randn(count) * 0.02,
        "exp_avg": lambda: torch.randn(count) * 1e-4,
        "exp_avg_sq": lambda: (torch.randn(count) * 1e-4) ** 2,
    }
    return {kind: {f"w{i}": make() for i in range(TENSORS)} for kind, make in makers.items()}


def transfers(url: str, state: dict[str, Any], rounds: int) -> list[Figure]:
    """Saves and restores beside upload_file and download_file of a file that holds the same packs."""
    client, bucket = boto3.client("s3"), url.split("/")[2]
    times: dict[str, list[float]] = {name: [] for name in ("save", "upload", "restore", "download")}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder, "packs")
        for _ in range(rounds):
            with Repository.create(f"{url}-{uuid4().hex[:8]}") as repository:
                times["save"].append(seconds(lambda r=repository: r.save(state, run="a", step=0)))  # type: ignore[misc]
                with file.open("wb") as out:
                    for info in repository.store.list("packs/"):
                        out.write(repository.store.get(info.key))
                times["upload"].append(seconds(lambda: client.upload_file(str(file), bucket, "bench-file")))
                stored_bytes = file.stat().st_size
                times["restore"].append(seconds(lambda r=repository: r.restore("a@0")))  # type: ignore[misc]
                times["download"].append(seconds(lambda: client.download_file(bucket, "bench-file", str(file))))
                repository.store.delete([info.key for info in repository.store.list("")])
        client.delete_object(Bucket=bucket, Key="bench-file")
    middle = {name: statistics.median(values) for name, values in times.items()}
    save, restore = middle["upload"] / middle["save"], middle["download"] / middle["restore"]
    return [
        Figure("save throughput / upload_file of the same stored bytes", save, "x", ">= 1", save >= 1),
        Figure("restore throughput / download_file of the same stored bytes", restore, "x", ">= 1", restore >= 1),
        Figure("stored bytes", stored_bytes / MiB, "MiB"),
        *(Figure(f"{name}: median of {rounds}", value, "s") for name, value in middle.items()),
    ]


def one_repository(url: str, state: dict[str, Any]) -> list[Figure]:
    """Requests, memory, and what a single tensor costs."""
    store = S3Store(url)
    traffic = Traffic(store)
    with Repository.create(store) as repository:
        save_mib = peak_mib(lambda: repository.save(state, run="a", step=0))
        for tensors in state.values():
            for tensor in tensors.values():
                tensor.mul_(1.0001)
    with Repository.open(store) as repository, SnapshotManager(repository, run="a") as snapshots:
        snapshots.save(1, state).result()  # from now on the base is in memory
        for tensors in state.values():
            for tensor in tensors.values():
                tensor.mul_(1.0001)  # every chunk is new
        requests, _ = traffic.of(lambda: snapshots.save(2, state).result())
        snapshot = repository.snapshot("a@2")
        manifests = [manifest.read(store, ref, None) for ref in snapshot.manifests]
        own = {name for m in manifests for name in m.header.pack_names}
        before = repository.snapshot("a@1")
        own -= {name for ref in before.manifests for name in manifest.read(store, ref, None).header.pack_names}
        beside = requests - len(own) - len(manifests)
        result: list[Any] = []
        size_mib = sum(t.nbytes for tensors in state.values() for t in tensors.values()) / MiB
        restore_mib = peak_mib(lambda: result.append(repository.restore("a@2"))) - size_mib
        result.clear()
        stored_bytes = tensor_bytes(next(m for m in manifests if m.header.part == "model"), ("w7",))
        _, received_bytes = traffic.of(lambda: repository.restore("a@2", keys="model.w7"))
        store.delete([info.key for info in store.list("")])
    share = received_bytes / stored_bytes
    return [
        Figure("requests of a save beside packs and manifests", beside, "", "<= 10", beside <= 10),
        Figure("packs and manifests of that save", len(own) + len(manifests), ""),
        Figure("peak memory of a save, above the state", save_mib, "MiB", "<= 512", save_mib <= 512),
        Figure("peak memory of a restore, above the state", restore_mib, "MiB", "<= 512", restore_mib <= 512),
        Figure("bytes read to restore one tensor / its stored bytes", share, "x", "<= 1.1", share <= 1.1),
    ]


def tensor_bytes(part: manifest.Manifest, path: tuple[str, ...]) -> int:
    """Stored bytes of a tensor: of its chunks and of their bases."""
    entry = next(entry for entry in part.tensors if tuple(entry.path)[-len(path) :] == path)
    rows = np.concatenate([box.first_chunk + np.arange(box.chunks) for box in entry.boxes])
    return int(part.table.ref_lengths[part.table.refs_of(rows)].astype(np.int64).sum())


def cold_cache(url: str, count: int) -> list[Figure]:
    """Opening and listing many snapshots with nothing cached, and once more."""
    store = S3Store(url)
    Repository.create(store).close()

    def put(step: int) -> None:
        snapshot = Snapshot(id=new_id(), run="a", step=step, seq=step, state="committed", write_id=new_id())
        store.put(snapshot.key, encode(snapshot))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(put, range(count)))
    traffic, figures = Traffic(store), []
    for cache in ("cold", "warm"):
        times: list[float] = []

        def look(times: list[float] = times) -> None:
            def listed() -> None:
                with Repository.open(store) as repository:
                    assert len(repository.snapshots()) == count

            times.append(seconds(listed))

        requests, _ = traffic.of(look)
        figures.append(Figure(f"open and list {count} snapshots, {cache} cache", times[0], "s"))
        figures.append(Figure(f"requests of that, {cache} cache", requests, ""))
    store.delete([info.key for info in store.list("")])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB, one round; nothing is written to docs/")
    args = parser.parse_args()
    began, url = time.time(), f"{os.environ['SNAPSTORE_TEST_S3']}/bench-{uuid4().hex[:8]}"
    state = state_of(64 * MiB if args.quick else 1024 * MiB)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SNAPSTORE_CACHE_DIR"] = cache
        beside = one_repository(f"{url}-one", state)  # first: memory that the process has used before would not count
        figures = transfers(url, state, 1 if args.quick else 5) + beside
        figures += cold_cache(f"{url}-many", 100 if args.quick else 1000)
    report = {
        "machine": machine(),
        "server": "Ceph radosgw 16.2 on the same cores, memstore, plain HTTP on loopback (tools/s3-server)",
        "versions": {"python": platform.python_version()} | {n: version(n) for n in ("torch", "boto3", "urllib3")},
        "seconds": round(time.time() - began),
        "figures": [asdict(figure) for figure in figures],
    }
    for f in figures:
        met = {True: "met", False: "NOT MET", None: ""}[f.met]
        print(f"{f.name:62} {f.value:9.3f} {f.unit:4} {f.goal:7} {met}")
    if not args.quick:
        (ROOT / "docs" / "benchmarks" / "s3.json").write_text(json.dumps(report, indent=1) + "\n")
