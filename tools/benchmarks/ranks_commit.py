"""The commit of a job of many ranks: real messages and objects, but of a state that does not exist.

In: a job on paper (ranks_plan.py). Out: the seconds from the last rank's report to the committed record, on rank 0. The
child manifests are encoded as a save encodes them, with the boxes that each rank would store; their chunks' digests are
noise, and no pack exists. Rank 0 runs its real code: it collects the reports, reads the children's headers, writes the
roots and creates the record. The store may be slow: each of its calls then takes as long as a request to S3.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from benchmarks.ranks_plan import STORED, Job
from snapstore import Repository
from snapstore.distributed.local import local_ranks
from snapstore.distributed.messages import Begin, Ref, Report, encode
from snapstore.distributed.questions import Questions
from snapstore.format.manifests import manifest
from snapstore.format.manifests.chunk_table import ChunkTable
from snapstore.format.manifests.manifest import Box, ManifestContents, TensorEntry
from snapstore.format.records import RANKS, ManifestRef, new_id
from snapstore.protocol.session import SharedSession
from snapstore.save.inputs import Lineage, SaveRequest
from snapstore.save.known_chunks import AnySession
from snapstore.save.manifest_writer import Written
from snapstore.save.ranks.merged_trees import PartTree, encode_trees
from snapstore.save.ranks.together import RankSaves
from snapstore.save.ranks.writer import RankWriter, report_of, request_digests


def table_of(lengths: np.ndarray[Any, Any], packs: int, noise: np.random.Generator) -> ChunkTable:
    """Return a table of full chunks in packs, in order."""
    n, stored = len(lengths), (lengths * STORED).astype(np.uint32)
    digests = noise.integers(0, 256, (n, 16), np.uint8)
    return ChunkTable(
        digests=digests,
        ref_counts=np.ones(n, np.uint16),
        ref_kinds=np.zeros(n, np.uint8),
        ref_packs=(np.arange(n) * packs // max(n, 1)).astype(np.uint32),
        ref_offsets=np.full(n, 64, np.uint64),
        ref_lengths=stored,
        ref_digests=digests,
        lengths=lengths.astype(np.uint32),
    )


def child_of(job: Job, rank: int, part: str, save_id: str, seed: int, pack_bytes: int) -> bytes:
    """Return the child manifest that a rank writes of a part."""
    noise = np.random.default_rng([rank, len(part)])
    entries, cuts, inline = list[TensorEntry](), list[Any](), 0
    row = 0
    for spec, held in zip(job.specs[part], job.stored(rank, part), strict=True):
        found, place = [], None
        for offsets, sizes in held:
            lengths = job.lengths((offsets, sizes), spec.itemsize)
            found.append(Box(tuple(offsets), tuple(sizes), row, len(lengths)))
            row, nbytes = row + len(lengths), int(np.prod(sizes)) * spec.itemsize
            cuts.append(lengths)
            if not len(lengths):
                place, inline = (inline, nbytes), inline + nbytes
        if held:
            entries.append(TensorEntry(spec.path, spec.kind, spec.dtype, spec.shape, False, None, tuple(found), place))
    lengths = np.concatenate(cuts) if cuts else np.zeros(0, np.int64)
    total = int(lengths.sum())
    packs = -(-int(total * STORED) // pack_bytes)
    return manifest.encode(
        ManifestContents(
            save_id=bytes.fromhex(save_id),
            rank=rank,
            sequence=0,
            part=part,
            chunk_bytes=job.chunk_bytes,
            digest_seed=seed,
            tree=None,
            tensors=entries,
            inline=bytes(inline),
            table=table_of(lengths, packs, noise),
            packs=[noise.bytes(32).hex() for _ in range(packs)],
            pack_sizes=[pack_bytes] * packs,
            logical_bytes=total + inline,
            features=[RANKS],
            world_size=job.world,
            box_map=job.maps[part][rank],
        )
    )


class _Side(RankWriter):
    """Rank 0's part of a save whose bytes are written already.

    Args:
        spread_s: between the first and the last report of another rank [s].
    """

    def __init__(
        self,
        *args: Any,
        trees: list[PartTree],
        own: Written,
        told: dict[str, Any],
        reports: dict[str, bytes],
        others: Any,
        spread_s: float,
    ) -> None:
        super().__init__(*args)
        self._own_trees, self._trees = trees, encode_trees(trees)
        self._own, self._told, self._reports, self._others = own, told, reports, others
        self._spread_s, self.began = spread_s, 0.0

    def write(self, session: AnySession, begin: Begin) -> Report:
        """Let the other ranks report."""
        self._note(self._own)
        if self._spread_s:
            threading.Thread(target=self._report, daemon=True).start()
        else:
            self._report()
        return report_of(begin, self._own, **self._told)

    def _report(self) -> None:
        began = time.perf_counter()
        for number, (key, data) in enumerate(self._reports.items(), start=1):
            due = began + self._spread_s * number / len(self._reports)
            time.sleep(max(0.0, due - time.perf_counter()))
            self._others[int(key.rpartition("/")[2])].post(key, data)
        self.began = time.perf_counter()


class _Slow:
    """A store whose calls take `latency_s` longer [s]; callers do not wait for each other."""

    def __init__(self, store: Any, latency_s: float) -> None:
        self._store, self._latency_s = store, latency_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("put", "get", "get_range", "stat", "sizes", "list", "delete", "lock", "touch", "release"):
            return found

        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(self._latency_s)
            return found(*args, **options)

        return slow


def measure(
    job: Job,
    repository: Repository,
    pack_bytes: int,
    times: int = 3,
    *,
    slow: Sequence[tuple[float, float]] = (),
) -> dict[str, Any]:
    """Return the seconds of commits by rank 0, and the sizes of what takes part.

    Args:
        slow: (the time of a request, the time from the first report to the last) of one more commit each [s].
    """
    context, save_id = repository.context, new_id()
    refs: dict[int, list[ManifestRef]] = {rank: [] for rank in range(job.world)}
    own, written_bytes = Written(), 0
    for part in (name for name, specs in job.specs.items() if specs):
        for rank in refs:
            data = child_of(job, rank, part, save_id, context.engines.digest_seed, pack_bytes)
            if rank == 0:
                own.add(SharedSession(context, "bench", 0, save_id, [], set(), lambda: None), data, ())
            refs[rank].append(manifest.ref_of(data))
            context.store.put(refs[rank][-1].key, data)
            written_bytes += len(data)
    names = [["part", name] for name in job.specs if name]
    trees = [PartTree("", ["dict", [name for _, name in names], names], ())] + [
        PartTree(name, ["dict", list(range(len(specs))), [["tensor", i, False] for i in range(len(specs))]], specs)
        for name, specs in job.specs.items()
        if name
    ]
    trees_digest, seconds = xxhash.xxh3_128_digest(encode_trees(trees)), []
    for number, (latency_s, spread_s) in enumerate([(0.0, 0.0)] * times + list(slow)):
        ranks = local_ranks(job.world)
        request = SaveRequest(f"bench{number}", number)  # in a run of its own: without a base it shares no children
        told = {"request": request_digests(request), "trees": trees_digest, "held_bytes": _held(refs[0])}
        reports = {f"0/report/{rank}": _report(number, told, refs[rank]) for rank in refs if rank}
        store: Any = _Slow(repository.store, latency_s) if latency_s else repository.store
        context = replace(repository.context, store=store)
        side = _Side(
            context,
            Lineage(),
            ranks[0],
            request,
            [],
            None,
            trees=trees,
            own=own,
            told=told,
            reports=reports,
            others=ranks,
            spread_s=spread_s,
        )
        snapshot = RankSaves(context, ranks[0], Questions(ranks[0], "")).save(0, request, side)
        seconds.append(time.perf_counter() - side.began)
    roots = [ref.size_bytes for ref in snapshot.manifests]
    return {
        "ranks": job.world,
        "tensors": sum(map(len, job.specs.values())),
        "seconds": seconds[:times],
        "slow": [
            {"request_s": latency_s, "reports_within_s": spread_s, "seconds": took}
            for (latency_s, spread_s), took in zip(slow, seconds[times:], strict=True)
        ],
        "report_bytes": max(map(len, reports.values())),
        "child_manifest_bytes": written_bytes,
        "root_bytes": roots,
        "record_bytes": context.store.stat(snapshot.key).size_bytes,
    }


def _held(refs: Sequence[ManifestRef]) -> int:
    return sum(ref.logical_bytes for ref in refs)


def _report(step: int, told: dict[str, Any], refs: Sequence[ManifestRef]) -> bytes:
    return encode(
        Report(
            step=step,
            manifests=[Ref.of(ref) for ref in refs],
            request=told["request"],
            trees=told["trees"],
            held_bytes=_held(refs),
            chunks=4000,
            new_chunks=4000,
            stored_bytes=int(STORED * _held(refs)),
        )
    )
