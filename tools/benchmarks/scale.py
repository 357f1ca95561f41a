"""`tools/bench scale`: the time and memory of the shell's verbs on a million chunks in a thousand snapshots.

The records and manifests are real, and written as a save writes them: every snapshot has ten thousand chunks, a
thousand of them new, and every chunk is used by ten snapshots. The packs have real sizes, headers and footers, and a
hole in place of the blobs: no verb here needs a blob. Each verb runs in a process of its own, as an operator runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import history
from benchmarks.page import ROOT, Row, publish, row
from snapstore import KeepBytes, KeepLast, Repository, SaveOptions, SnapshotManager
from snapstore.format import records
from snapstore.format.blobs import pack
from snapstore.format.blobs.blob import ALIGNMENT
from snapstore.format.hashing import checksum
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.format.manifests.chunk_table import ChunkTable
from snapstore.format.manifests.manifest import Box, TensorEntry
from snapstore.format.records import COMMITTED, FORGOTTEN, SWEPT, Snapshot
from snapstore.storage.local import LocalStore

MiB = 1024 * 1024
PACK_BYTES = 800 * MiB  # of a thousand chunks, some 700 kB each
KEPT = 10
#: verb -> (goal [s], goal [MiB], its arguments); docs/reliability.md states the goals
VERBS: dict[str, tuple[float, int, list[str]]] = {
    "log, no index yet": (2, 128, ["log"]),
    "log": (1, 128, ["log"]),
    "show": (1, 128, ["show", "r@latest"]),
    "index (rebuild)": (2, 128, ["index", "rebuild"]),
    "stats": (30, 500, ["stats"]),
    "check": (5, 128, ["check"]),
    "repair (dry run)": (5, 128, ["repair", "--level", "metadata"]),
    "forget all but ten": (5, 128, ["forget", "--run", "r", "--keep-last", str(KEPT)]),
    "gc": (5, 128, ["gc"]),
}
PROGRAM = str(Path(sys.executable).with_name("snapstore"))


def seconds(function: Callable[[], Any], times: int = 3) -> float:
    """Return the seconds of the fastest of a few calls."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - began)
    return best


def chunk_table(chunks: int, packs: int, seed: int = 0) -> ChunkTable:
    """Return a table of random digests; all chunks are full, and follow each other in their packs."""
    rng = np.random.default_rng(seed)
    digests = rng.integers(0, 256, (chunks, 16), np.uint8)
    numbers = np.sort(rng.integers(0, packs, chunks)).astype(np.uint32)
    lengths = rng.integers(500_000, 900_000, chunks).astype(np.uint32)
    ends = np.cumsum(-(-lengths.astype(np.int64) // ALIGNMENT) * ALIGNMENT)
    before = np.concatenate([[0], ends])[np.searchsorted(numbers, numbers)]  # all that lies in earlier packs
    offsets = pack.HEADER.size + np.concatenate([[0], ends[:-1]]) - before
    return ChunkTable(
        digests=digests, ref_counts=np.ones(chunks, np.uint16), ref_kinds=np.zeros(chunks, np.uint8),
        ref_packs=numbers, ref_offsets=offsets.astype(np.uint64), ref_lengths=lengths, ref_digests=digests,
        lengths=np.full(chunks, MiB, np.uint32),
    )  # fmt: skip


def encode(table: ChunkTable, packs: list[str], digest_seed: int, save_id: bytes = bytes(16)) -> bytes:
    """A manifest of one tensor over the whole table."""
    shape = (len(table) * MiB,)
    entry = TensorEntry(("w",), "tensor", "uint8", shape, False, None, (Box((0,), shape, 0, len(table)),), None)
    contents = manifest.ManifestContents(
        save_id=save_id, rank=0, sequence=0, part="", chunk_bytes=MiB, digest_seed=digest_seed,
        tree=["dict", ["w"], [["tensor", 0, False]]], tensors=[entry], inline=b"", table=table, packs=packs,
        pack_sizes=[PACK_BYTES] * len(packs), logical_bytes=len(table) * MiB,
    )  # fmt: skip
    return manifest.encode(contents)


def million_chunks(count: int) -> list[Row]:
    """Encode and decode one manifest."""
    packs = [f"{i:064x}" for i in range(count // 40)]
    table = chunk_table(count, len(packs))
    data = encode(table, packs, 0)
    encode_s, decode_s = seconds(lambda: encode(table, packs, 0)), seconds(lambda: manifest.decode(data, "bench"))
    return [
        row(f"manifest of {count:,} chunks: encode", encode_s, "s", "< 1", encode_s < 1),
        row(f"manifest of {count:,} chunks: decode", decode_s, "s", "< 1", decode_s < 1),
    ]


def sparse_pack(file: Path, table: ChunkTable, save_id: str) -> None:
    """A pack with a header and a footer, and a hole for its blobs."""
    entries = np.zeros(len(table), pack.ENTRY)
    entries["offset"], entries["length"] = table.ref_offsets, table.ref_lengths
    entries["raw_bytes"], entries["element_size"] = table.lengths, 1
    entries["digest"] = table.digests.view("V16").reshape(-1)
    footer = entries.tobytes()
    start = PACK_BYTES - pack.TRAILER.size - len(footer)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        save = bytes.fromhex(save_id)
        out.write(pack.HEADER.pack(pack.MAGIC, pack.VERSION, 0, 0, save, 0, save, 0))
        out.seek(start)
        out.write(footer + pack.TRAILER.pack(start, len(table), 0, checksum(footer), pack.FOOTER_MAGIC))


def thousand_snapshots(folder: Path, snapshots: int, shared: int) -> None:
    """Write records, manifests and stand-in packs; `shared` new chunks each, every one used by ten snapshots."""
    with Repository.create(folder) as repository:
        store, tables, names = repository.store, [], []
        ids = [records.new_id() for _ in range(snapshots)]
        for number in range(snapshots):
            tables.append(chunk_table(shared, 1, seed=number))
            names.append(hashlib.sha256(f"pack {number}".encode()).hexdigest())
            sparse_pack(folder / pack_key(names[-1]), tables[-1], ids[number])
            window = range(max(0, number - 9), number + 1)
            table = ChunkTable.concatenate([tables[i] for i in window])
            table.ref_packs = np.repeat(np.arange(len(window), dtype=np.uint32), shared)
            data = encode(
                table, [names[i] for i in window], repository.config.digest_seed, save_id=bytes.fromhex(ids[number])
            )  # fmt: skip
            ref = manifest.ref_of(data)
            store.put(ref.key, data)
            if number >= 9:
                tables[number - 9] = ChunkTable.empty()  # no later snapshot has it
            snapshot = Snapshot(
                id=ids[number], run="r", step=number, seq=number, state=records.COMMITTED,
                write_id=records.new_id(), manifests=[ref], created=1e9 + number, logical_bytes=ref.logical_bytes,
                stored_bytes=PACK_BYTES, chunks=len(table), new_chunks=shared, stall_s=0.01, total_s=2.0,
                parent=ids[number - 1] if number else None, metrics={"loss": 1 / (1 + number)},
            )  # fmt: skip
            store.put(snapshot.key, records.encode(snapshot))


def shell(url: Path, *arguments: str) -> tuple[float, float, int, Any]:
    """Run a verb; return (seconds, seconds of CPU, peak memory of the process [bytes], its JSON)."""
    with tempfile.TemporaryFile() as out:
        began = time.perf_counter()
        child = os.posix_spawn(
            PROGRAM, [PROGRAM, *arguments, "--repo", str(url), "--json"], os.environ | {"PYTHONPATH": str(ROOT)},
            file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)],
        )  # fmt: skip
        _, status, usage = os.wait4(child, 0)
        took = time.perf_counter() - began
        out.seek(0)
        assert os.waitstatus_to_exitcode(status) == 0, (arguments, out.read(1000))
        return took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, json.loads(out.read())


def surveyed(folder: Path, snapshots: int) -> list[Row]:
    """Return the time and memory of compact's survey.

    Call it in a process that has imported little: a child's peak of memory is never below what its parent had.
    """
    os.environ["SNAPSTORE_CACHE_DIR"] = str(folder / "cache")
    thousand_snapshots(folder / "many", snapshots, 1000)
    took_s, cpu_s, peak_bytes, plan = shell(folder / "many", "compact", "--dry-run")
    assert not plan["failed"], plan["failed"][:3]
    name = f"survey of {snapshots * 1000:,} chunks"
    return [
        row(name, took_s, "s", "<= 20", took_s <= 20),
        row(f"{name}: CPU time", cpu_s, "s"),
        row(f"{name}: memory", peak_bytes / MiB, "MiB", "<= 300", peak_bytes <= 300 * MiB),
    ]


def reported(folder: Path, snapshots: int) -> list[Row]:
    """Return the CPU time and memory of a report, and the size of its page."""
    os.environ["SNAPSTORE_CACHE_DIR"] = str(folder / "cache")
    thousand_snapshots(folder / "reported", snapshots, 20)
    page = folder / "run.html"
    took_s, cpu_s, peak_bytes, found = shell(folder / "reported", "report", "-o", str(page))
    assert found["snapshots"] == snapshots, found["snapshots"]
    assert found["sampled"] > 50, found["sampled"]
    assert not found["unread"], found["unread"]
    name, page_mb = f"report of {snapshots:,} snapshots", page.stat().st_size / 1e6
    return [
        row(name, took_s, "s"),
        row(f"{name}: CPU time", cpu_s, "s", "<= 20", cpu_s <= 20),
        row(f"{name}: page", page_mb, "MB", "<= 15", page_mb <= 15),
        row(f"{name}: memory", peak_bytes / MiB, "MiB"),
    ]


def cpu_ms(function: Callable[[int], Any], times: int) -> float:
    """Return the CPU time of a call, the mean of a few [ms]; the calls get numbers."""
    began = time.process_time()
    for number in range(times):
        function(number)
    return 1000 * (time.process_time() - began) / times


def saves_beside(folder: Path, count: int) -> list[Row]:
    """Return the CPU time of small saves in a repository with `count` records of other runs, a hundred in each."""
    with Repository.create(folder) as repository:
        first = repository.save({"w": np.arange(64)}, run="other-0", step=0)
        for number in range(1, count):
            other = msgspec.structs.replace(
                first, id=records.new_id(), run=f"other-{number // 100}", step=number, seq=first.seq + number,
                write_id=records.new_id(),
            )  # fmt: skip
            repository.store.put(other.key, records.encode(other))

    def save(step: int) -> None:
        repository.save({"w": np.arange(64) + step}, run="mine", step=step)

    with Repository.open(folder) as repository:
        begin_ms, save_ms = cpu_ms(save, 1), cpu_ms(lambda number: save(number + 1), 10)
    with SnapshotManager(folder, run="kept", keep=KeepLast(3), async_save=False) as manager:
        keep_ms = cpu_ms(lambda number: manager.save(number, {"w": np.arange(64) + number}), 10)
    beside = f"beside {count:,} records"
    return [
        row(f"first save of a process {beside}", begin_ms, "ms of CPU"),
        row(f"save {beside}", save_ms, "ms of CPU"),
        row(f"save with KeepLast(3) {beside}", keep_ms, "ms of CPU"),
    ]


def save_next(manager: SnapshotManager, first: int, number: int) -> None:
    """Save step `first + number`."""
    manager.save(first + number, {"w": np.arange(64) + number})


def saves_after(folder: Path, count: int) -> list[Row]:
    """Return the CPU time of small saves in a run that has saved `count` times; all are kept, or all were swept."""
    rows, swept = [], (COMMITTED, FORGOTTEN, SWEPT)
    for policies, states in ((), (COMMITTED,)), ((KeepLast(3),), swept), ((KeepBytes("1P"),), (COMMITTED,)):
        name = "".join(f" with {policy}" for policy in policies)
        place = folder / f"after{name}"
        with Repository.create(place) as repository:
            first = repository.save({"w": np.arange(64)}, run="mine", step=0)
            for number in range(1, count):
                new, seq = records.new_id(), first.seq + number
                for revision, state in enumerate(states):
                    other = msgspec.structs.replace(
                        first, id=new, step=number, seq=seq, write_id=records.new_id(), revision=revision, state=state
                    )
                    repository.store.put(other.key, records.encode(other))
        with SnapshotManager(place, run="mine", keep=policies, async_save=False) as manager:
            for step in range(count, count + 3):  # reads the records, and forgets the first ones
                manager.save(step, {"w": np.arange(64) + step})
            after_ms = cpu_ms(partial(save_next, manager, count + 3), 10)
        rows.append(row(f"save{name} after {count:,} saves", after_ms, "ms of CPU"))
    return rows


def first_policy(folder: Path, count: int) -> list[Row]:
    """Return the CPU time of the first policy on a run of real small saves, until it holds; and of half as many."""
    took_s = []
    for kept in (count // 2, count):
        place = folder / f"policy-{kept}"
        with Repository.create(place, options=SaveOptions(threads=1)) as repository:
            for step in range(kept):
                repository.save({"w": np.arange(64) + step}, run="mine", step=step)

        def begin(_: int, place: Path = place, kept: int = kept) -> None:
            with SnapshotManager(place, run="mine", keep=KeepLast(3), async_save=False) as manager:
                save_next(manager, kept, 0)

        took_s.append(cpu_ms(begin, 1) / 1000)
        with Repository.open(place) as repository:
            assert len(repository.snapshots("mine")) == 3, "the policy holds"
    name, ratio = f"first KeepLast(3) on {count:,} kept snapshots", took_s[1] / took_s[0]
    goal_s = 10 * count / 5000
    return [
        row(name, took_s[1], "s of CPU", f"<= {goal_s:g}", took_s[1] <= goal_s),
        row(f"{name}, over that on half as many", ratio, "times", "<= 2.2", ratio <= 2.2),
    ]


def figures(folder: Path, snapshots: int, shared: int) -> list[Row]:
    """Return all rows."""
    help_s = seconds(lambda: subprocess.run([PROGRAM, "--help"], check=True, capture_output=True))
    rows = [row("snapstore --help", help_s, "s", "< 0.3", help_s < 0.3)]
    thousand_snapshots(folder / "many", snapshots, shared)
    answers: dict[str, Any] = {}
    for verb, (goal_s, goal_mib, arguments) in VERBS.items():
        took_s, _, peak_bytes, answers[verb] = shell(folder / "many", *arguments)
        print(f"  {verb}: {took_s:.2f} s, {peak_bytes / MiB:.0f} MiB", flush=True)
        rows.append(row(verb, took_s, "s", f"< {goal_s:g}", took_s < goal_s))
        rows.append(row(f"{verb}: memory", peak_bytes / MiB, "MiB", f"< {goal_mib}", peak_bytes < goal_mib * MiB))
    assert len(answers["log"]["snapshots"]) == snapshots, "log lists them all"
    assert len(answers["forget all but ten"]["forgotten"]) == snapshots - KEPT
    left = LocalStore(folder / "many").list("packs/")
    assert len(list(left)) == KEPT + 9, "gc keeps the packs of ten snapshots, and no other"
    return rows + million_chunks(snapshots * shared)  # last: a child's peak is never below what its parent had


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the snapshots; nothing is written to docs/")
    parser.add_argument("--report", action="store_true", help="only a report of many snapshots; docs/ stays as it is")
    parser.add_argument("--saves", action="store_true", help="only saves beside many records; docs/ stays as it is")
    parser.add_argument("--policy", type=int, metavar="N", help="only the first policy on N snapshots; no docs/")
    parser.add_argument(
        "--history", action="store_true", help="only long histories; writes docs/benchmarks/history.json"
    )
    parser.add_argument("--only", metavar="PARTS", help="with --history: saves,policy,real,kept,memory; no docs/")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))
    began = time.time()
    os.environ["SNAPSTORE_CACHE_DIR"] = str(folder / "cache")  # a cold one, and none of the user's
    try:
        if args.history:
            only = args.only.split(",") if args.only else ()
            rows = history.figures(folder, history.QUICK if args.quick else history.Sizes(), only)
        elif args.policy:
            rows = first_policy(folder, args.policy)
        elif args.saves:
            counts = (100, 1000, 5000)
            rows = [one for count in counts for one in saves_beside(folder / str(count), count)]
            rows += [one for count in counts for one in saves_after(folder / f"after-{count}", count)]
        elif args.report:
            rows = reported(folder, 1000 if args.quick else 10_000)
        else:
            rows = figures(folder, 100 if args.quick else 1000, 1000)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    is_part = args.quick or args.saves or args.report or bool(args.policy)
    if args.history:
        publish("history", rows, began, ("numpy", "lmdb", "msgspec", "boto3"), quick=args.quick or bool(args.only))
    else:
        publish("scale", rows, began, ("numpy", "lmdb", "msgspec"), quick=is_part)
