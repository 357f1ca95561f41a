"""Jobs of several ranks in one process: each rank is a thread with a store, a repository and a place in `LocalRanks`.

`RankSide` is a data side for the protocol alone: each rank stores a part of its own, with the writer of one process. So
the snapshot is a plain one, which every reader knows, whatever the format of shared tensors is; the packs, manifests,
deltas and bases are real.

`save_shared` saves a version of `kit.repositories.values` by managers of several ranks: a snapshot with root and child
manifests that restores as if one process had saved it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kit.faults import Crash, FaultStore
from kit.local_ranks import LocalRank, LocalRanks
from kit.repositories import OPTIONS, values
from snapstore import Repository, SaveOptions, Snapshot, SnapshotManager
from snapstore.chunks.uploader import put_once
from snapstore.distributed.base import Heart, Ranks
from snapstore.distributed.messages import DIGEST_BYTES, REQUEST_FIELDS, Report
from snapstore.distributed.questions import Questions
from snapstore.format import records
from snapstore.format.hashing import checksum
from snapstore.format.records import ManifestList
from snapstore.save.inputs import SaveRequest, inputs_of
from snapstore.save.known_chunks import Bases, load_bases
from snapstore.save.manifest_writer import write
from snapstore.save.ranks.together import RankSaves
from snapstore.save.ranks.writer import report_of
from snapstore.state.walk.flatten import flatten
from snapstore.storage.base import ObjectStore

#: A rank that hangs is given up after this long [s].
HANG_S = 60.0


def of_rank(run: str, version: int, rank: int) -> dict[str, Any]:
    """Return the state of one rank in a version: small, and unlike other ranks'."""
    drift = values(run, version)["model"]["drift"].numpy() + np.float32(rank)
    return {"drift": drift, "noise": np.random.default_rng([rank, version]).integers(0, 255, 4200, np.uint8)}


def of_all(count: int) -> Callable[[str, int], Any]:
    """Return the `values` of a job: its whole state by run and version."""
    return lambda run, version: {f"rank{rank}": of_rank(run, version, rank) for rank in range(count)}


class RankSide:
    """The bytes of one rank; see `RankWriter`."""

    def __init__(self, repository: Repository, ranks: Ranks, request: SaveRequest, state: Any) -> None:
        self._context, self._ranks, self._request, self._state = repository.context, ranks, request, state
        self.unlike_trees = False
        self.reported: list[tuple[int, float]] = []

    def _parts(self, *names: str) -> list[Any]:
        own = self._ranks.rank
        whole = {f"rank{rank}": self._state if rank == own else {} for rank in range(self._ranks.count)}
        return inputs_of([part for part in flatten(whole) if part.name in names])

    def write(self, session: Any, begin: Any) -> Report:
        bases = load_bases(self._context, session, {})
        written = write(self._context, session, self._parts(f"rank{self._ranks.rank}"), bases, full=begin.full)
        fields = [getattr(self._request, name) for name in REQUEST_FIELDS if name != "metrics"]
        fields.insert(2, self._request.read_metrics())
        digests = [checksum(repr(value).encode()).to_bytes(DIGEST_BYTES, "little") for value in fields]
        trees = checksum(self.trees()).to_bytes(8, "little")
        return report_of(begin, written, request=b"".join(digests), trees=trees)

    def trees(self) -> bytes:
        return b"trees" + (bytes([self._ranks.rank]) if self.unlike_trees else b"")

    def replicas(self, group: str) -> Any:
        return [("same", b"0"), (f"model.{group}", bytes([self._ranks.rank]))]

    def take_report(self, rank: int, manifests: Sequence[Any]) -> None:
        self.reported.append((rank, time.monotonic()))

    def merge(self, trees: Any) -> None:
        assert sorted(rank for ranks, _ in trees for rank in ranks) == list(range(self._ranks.count))
        for ranks, data in trees:
            assert data == b"trees" + (bytes(ranks) if self.unlike_trees else b"")

    def write_roots(self, session: Any, reports: Any) -> Any:
        self._reports = list(reports.values())
        children = [ref.whole(rank) for rank, report in reports.items() for ref in report.manifests]
        assert [ref.rank for ref in children] == list(range(self._ranks.count))
        roots = write(self._context, session, self._parts(""), Bases(), full=True)  # its own, so it writes no list
        roots.manifests += [msgspec.structs.replace(ref, rank=0) for ref in children]
        names = ManifestList.of(session.id, session.made_for, roots.manifests)  # some may be those of a base
        put_once(session, names.key, records.encode(names))
        roots.manifest_list = names.sha256
        return roots

    def commit(self, session: Any, roots: Any, bases: Sequence[Snapshot]) -> Snapshot:
        reports = self._reports
        return session.commit(
            bases=[base.id for base in bases],
            manifests=roots.manifests,
            manifest_list=roots.manifest_list,
            tags=self._request.tags,
            metrics=self._request.read_metrics(),
            metadata_node=self._request.metadata_node,
            created=time.time(),
            logical_bytes=sum(ref.logical_bytes for ref in roots.manifests),
            depth=max(r.depth for r in reports),
            chunks=sum(r.chunks for r in reports),
            new_chunks=sum(r.new_chunks for r in reports),
            stored_bytes=sum(r.stored_bytes for r in reports),
        )


class RankStore(FaultStore):
    """The store of one rank's process: when that dies, its messages end with it.

    Attributes:
        pause_s: if set, the k-th operation waits so long first, and its process does not beat meanwhile; `mode` has no
            effect then.
    """

    ranks: Any = None
    pause_s: float | None = None

    def die(self) -> None:
        self.ranks.dead = True
        super().die()

    def _act(self, name: str, key: str, effect: Callable[[], Any]) -> Any:
        if self.pause_s is None:
            return super()._act(name, key, effect)
        with self._lock:
            number = len(self.log)
            self.log.append((name, key))
        if number == self.at:
            self.fired = True
            pause(self.ranks, self.pause_s)
        return effect()


def pause(ranks: LocalRank, seconds: float) -> None:
    """Let a rank's process stop for a while: it does not beat."""
    beat, ranks.beat = ranks.beat, lambda: None
    time.sleep(seconds)
    ranks.beat = beat
    beat()


def fail_message(ranks: LocalRank, at: int, mode: str, delay_s: float) -> None:
    """Let the `at`-th message that a rank posts from now on be dropped, delayed or doubled, or its process die there.

    Args:
        mode: "drop", "delay", "double", "crash-before" or "crash-after".
    """
    post, first = ranks.post, len(ranks.posted)

    def faulty(key: str, value: bytes) -> None:
        if len(ranks.posted) - first != at:
            post(key, value)
        elif mode == "drop":
            ranks.posted.append(key)
        elif mode == "delay":
            pause(ranks, delay_s)
            post(key, value)
        elif mode == "double":
            post(key, value)
            threading.Timer(delay_s, lambda: ranks.dead or post(key, value)).start()
        else:
            if mode == "crash-after":
                post(key, value)
            ranks.die()
            raise Crash(f"{mode} {key}")

    ranks.post = faulty


class Member:
    """One rank of a job: its store, its repository and its part in the job's saves."""

    def __init__(self, store: ObjectStore, ranks: Any) -> None:
        self.store, self.ranks = RankStore(store), ranks
        self.store.ranks, ranks.die = ranks, self.store.die
        self.repository = Repository.open(self.store, options=OPTIONS)
        self.job = RankSaves(self.repository.context, ranks, Questions(ranks, ""))
        self.heart = Heart(ranks)

    def save(self, number: int, run: str, step: int, version: int, **options: Any) -> Snapshot:
        """Save this rank's share of a version."""
        edit = options.pop("edit", lambda side: None)
        request = SaveRequest(run, step, metadata=[run, version], **options)
        request.resolve(self.repository.context, self.repository.lineage)
        side = RankSide(self.repository, self.ranks, request, of_rank(run, version, self.ranks.rank))
        edit(side)
        return self.job.save(number, request, side)

    def close(self) -> None:
        self.heart.close()
        self.repository.close()


class LocalJob:
    """A job of threads over one store."""

    def __init__(self, store: ObjectStore, count: int, **options: Any) -> None:
        self.inner, self.ranks = store, LocalRanks(count, **{"silent_s": 1.0, "total_s": 20.0} | options)
        self.members = [Member(store, ranks) for ranks in self.ranks]
        self.number = 0

    def save(self, run: str, step: int, version: int, **options: Any) -> list[Any]:
        """Save on all ranks at once; return each rank's snapshot, or its error."""
        number, self.number = self.number, self.number + 1
        return together([lambda m=m: m.save(number, run, step, version, **options) for m in self.members])

    def close(self) -> None:
        for member in self.members:
            member.close()

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run calls in a thread each; return what each returned or raised. One that hangs is an error."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except (Exception, Crash) as error:  # noqa: BLE001
            results[number] = error

    threads = [threading.Thread(target=run, args=[i], daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + HANG_S
    for number, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"rank {number} hangs"
    return results


class Managers(list[SnapshotManager]):
    """A manager on each rank of a job, made and used by a thread each."""

    def __init__(
        self,
        store: ObjectStore,
        count: int = 3,
        *,
        stores: Sequence[ObjectStore] | None = None,
        silent_s: float = 5.0,
        total_s: float = 30.0,
        **options: Any,
    ) -> None:
        ranks = LocalRanks(count, silent_s=silent_s, total_s=total_s)
        self.ranks = ranks
        options.setdefault("options", OPTIONS)
        of_rank: Callable[[int], dict[str, Any]] = options.pop("of_rank", lambda rank: {})
        places = stores or [store] * count
        made = together([
            lambda r=r, s=s: SnapshotManager(s, run="a", ranks=r, **options | of_rank(r.rank))
            for r, s in zip(ranks, places, strict=True)
        ])  # fmt: skip
        for manager in made:
            if isinstance(manager, Exception):
                raise manager
        super().__init__(made)

    def all(self, call: Callable[[SnapshotManager, int], Any]) -> list[Any]:
        """Return what `call(manager, rank)` returns or raises on each rank, called at once."""
        return together([lambda m=m, r=r: call(m, r) for r, m in enumerate(self)])

    def each(self, call: Callable[[SnapshotManager, int], Any]) -> list[Any]:
        """As `all`, but no rank may raise."""
        found = self.all(call)
        assert not any(isinstance(one, Exception) for one in found), found
        return found

    def end(self) -> list[Any]:
        """Close all."""
        return self.all(lambda m, _: m.close())


# -- a version of `kit.repositories.values`, saved by managers


@contextmanager
def small_boxes() -> Iterator[None]:
    """Store boxes from 256 bytes on in chunks: small states have packs, manifests and deltas of every rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("snapstore.save.manifest_writer.INLINE_BYTES", 256)
        yield


def part_of(whole: torch.Tensor, rank: int, count: int) -> SimpleNamespace:
    """Return a rank's rows of a tensor as Megatron's ShardedTensor, which needs no process group."""
    step = -(-whole.shape[0] // count)
    first = min(rank * step, whole.shape[0])
    data = whole[first : first + step].clone()
    offset = (first, *(0 for _ in whole.shape[1:]))
    return SimpleNamespace(key="", data=data, global_shape=tuple(whole.shape), global_offset=offset, replica_id=0)


def values_of_rank(run: str, version: int, rank: int, count: int) -> dict[str, Any]:
    """Return one rank's share of a version: "model.drift" is sharded, all else is replicated."""
    whole = values(run, version)
    return whole | {"model": whole["model"] | {"drift": part_of(whole["model"]["drift"], rank, count)}}


def save_shared(
    stores: Sequence[ObjectStore | Repository | str],
    run: str,
    step: int,
    version: int,
    *,
    silent_s: float = 20.0,
    tells_deaths: bool = False,
    make: Callable[[str, int, int, int], Any] = values_of_rank,
    save_options: SaveOptions | None = OPTIONS,
    **options: Any,
) -> list[Any]:
    """Save a version by one manager for each store, all at once; return each rank's snapshot, or its error.

    Args:
        silent_s, tells_deaths: see LocalRanks; with a long `silent_s` the ranks ask less often.
        make: returns the state of (run, version, rank, count).
        save_options: None with repositories, which have options of their own.
    """
    ranks = LocalRanks(len(stores), silent_s=silent_s, total_s=max(80.0, 4 * silent_s), tells_deaths=tells_deaths)
    options.setdefault("metrics", {"loss": 1 / (1 + version)})

    def of_rank(rank: LocalRank, store: Any) -> Snapshot | None:
        if isinstance(store, RankStore):
            store.ranks = rank
        manager = SnapshotManager(store, run=run, ranks=rank, async_save=False, options=save_options)
        try:
            state = make(run, version, rank.rank, len(stores))
            return manager.save(step, state, metadata=[run, version], **options).result()
        finally:
            with suppress(Exception, Crash):
                manager.close()

    with small_boxes():
        return together([lambda r=r, s=s: of_rank(r, s) for r, s in zip(ranks, stores, strict=True)])
