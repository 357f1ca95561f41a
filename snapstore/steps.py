"""Steps: the saved steps of one run: which there are, and their states.

In: a run of a repository, and the ranks of a job if there are several. Out: steps and restored states; on several ranks
rank 0 says which snapshot is meant, so all of them restore that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from . import retention
from .errors import InvalidInputError, NotFoundError
from .format import records
from .format.argument_checks import check_step
from .format.records import MAX_OBJECT_BYTES, Snapshot
from .ranks import place
from .repository import Repository

if TYPE_CHECKING:
    from .restore.exchange import Exchange
    from .restore.sources import AsRank
    from .save.rank_job import RankJob


class Steps:
    """The steps of one run. `SnapshotManager` is one, and saves them as well.

    Attributes:
        run: the name of the run.
        repository: where it is saved.
        keep: its retention policies.
    """

    run: str
    repository: Repository
    keep: Sequence[retention.Policy]
    if TYPE_CHECKING:
        _job: RankJob | None
        _exchange: Exchange | None

    def _wait_idle(self) -> None:
        """Wait until no save runs; raise if steps cannot be looked at any more."""

    def all_steps(self) -> list[int]:
        """Return the steps that have a committed snapshot, ascending, each once."""
        return sorted({snapshot.step for snapshot in self.repository.snapshots(self.run)})

    def latest_step(self) -> int | None:
        """Return the step of the newest committed snapshot, by the order of the saves; None if there is none.

        After a return to an older step this may not be the highest step, which Orbax calls the latest.
        """

        def find() -> int | None:
            newest = self.repository.view().latest(self.run)
            return newest.step if newest else None

        return self._answered("latest_step", find)

    def highest_step(self) -> int | None:
        """Return the highest step that has a committed snapshot; None if there is none."""
        return self.repository.view().highest_step(self.run)

    def best_step(self) -> int | None:
        """Return the step of the best committed snapshot by the first KeepBest policy; None if none has its metric.

        Raises:
            InvalidInputError: no KeepBest among the policies.
        """
        for policy in self.keep:
            if isinstance(policy, retention.KeepBest):
                return self._answered("best_step", partial(self._best_by, policy))
        raise InvalidInputError("best_step: no KeepBest among the policies; pass keep=[KeepBest('metric'), ...]")

    def _best_by(self, policy: retention.KeepBest) -> int | None:
        ranked = policy.ranked(retention.current(self.repository.snapshots(self.run)))
        return ranked[0].step if ranked else None

    def _answered(self, question: str, find: Callable[[], int | None]) -> int | None:
        """Return what `find` returns; with several ranks, what it returns on rank 0."""
        if self._job is None:
            return find()
        found = self._job.questions.ask(question, lambda: None if (step := find()) is None else str(step))
        return None if found is None else int(found)

    def restore(
        self,
        step: int | str | None = None,
        *,
        keys: str | Sequence[str] | None = None,
        device: Any = None,
        types: Sequence[type] = (),
        per_rank: Literal["same", "drop"] | int = "same",
        read: Literal["own", "exchange"] = "own",
    ) -> Any:
        """Return the state of a step (or tag; None: the newest), once no save is running. See `Repository.restore`.

        The run's next save goes on from it. With several ranks all call it, and get the same snapshot.

        Args:
            per_rank: whose values that are each rank's own (`PerRank`, `RngState`): "same": this rank's, if as many
                ranks saved; a number: that rank's; "drop": none.
            read: "own": this rank reads what it needs, and the ranks do not communicate. "exchange": the ranks of a
                node read each chunk once, and exchange it by collectives of torch.distributed. All ranks of the job
                call it alike, with the same `step`; an error of one is raised on all. The result is the same.

        Raises:
            InvalidInputError: with "exchange": this manager's ranks are not those of the whole job.
            CapabilityError: with "exchange": the job's backend is neither NCCL nor one for host memory.
            RanksError: with "exchange": a rank is silent or does not call it, or a collective failed.
            SnapstoreError: see `Repository.restore`; with "exchange" also the error of another rank.
        """
        from .restore import pipeline

        context = self.repository.context
        with self._reading(step, read, per_rank) as (ref, as_rank):
            snapshot, state = pipeline.read(context, ref, keys=keys, device=device, types=types, as_rank=as_rank)
        self.repository.lineage.go_on_from(self.run, snapshot)
        return state

    def restore_into(
        self,
        target: Any,
        step: int | str | None = None,
        *,
        keys: str | Sequence[str] | None = None,
        types: Sequence[type] = (),
        per_rank: Literal["same", "drop"] | int = "same",
        read: Literal["own", "exchange"] = "own",
    ) -> Snapshot:
        """Fill `target` with the state of a step (or tag; None: the newest), and return the snapshot.

        Waits for the running save. See `Repository.restore_into`, and `restore` for `per_rank`, `read` and several
        ranks. The run's next save goes on from it.
        """
        from .restore.pipeline import read_into

        with self._reading(step, read, per_rank) as (ref, as_rank):
            snapshot = read_into(self.repository.context, ref, target, keys=keys, types=types, as_rank=as_rank)
        self.repository.lineage.go_on_from(self.run, snapshot)
        return snapshot

    @contextmanager
    def _reading(
        self, step: int | str | None, read: str, per_rank: Literal["same", "drop"] | int
    ) -> Iterator[tuple[str | Snapshot, AsRank]]:
        """Yield the reference of a step, once no save is running, and how this rank reads it."""
        from .check.newest_whole import newest_whole_named

        if read not in ("own", "exchange"):
            raise InvalidInputError(f"read {read!r}: expected 'own' or 'exchange'")
        self._wait_idle()
        exchange = self._exchange_of(read)
        with exchange.call(self._job.questions.prefix) if exchange and self._job else nullcontext():
            ref, as_rank = self._ref(step, read), self._as_rank(per_rank)
            context, is_others = self.repository.context, partial(getattr, exchange, "has_heard", False)
            named = ref if isinstance(ref, str) else f"id:{ref.id}"
            with newest_whole_named(context, named, is_others), exchange.told() if exchange else nullcontext():
                yield ref, replace(as_rank, exchange=exchange)

    def _exchange_of(self, read: str) -> Exchange | None:
        """Return what exchanges chunks with other ranks; None: this process reads by itself."""
        if read == "own" or place()[1] == 1:
            return None
        if self._job is None:
            raise InvalidInputError(
                "read='exchange': this manager has no ranks (ranks=False, or read_only=True); "
                "pass ranks=TorchRanks() to it on all ranks, or read='own'"
            )
        if self._exchange is None:
            from .restore.exchange import Exchange

            self._exchange = Exchange(self._job.ranks, self._job.prefix)
        return self._exchange

    def _ref(self, step: int | str | None, read: str) -> str | Snapshot:
        """Return the reference of a step; with several ranks, the snapshot that rank 0 means: it alone lists."""
        if self._job is None:
            return self._local_ref(step)
        question = f"restore {step!r}" + (f" by {read}" if read != "own" else "")
        key = self._job.questions.ask(question, lambda: self.repository.snapshot(self._local_ref(step)).key)
        assert key is not None
        return records.decode(self.repository.store.get(key, limit_bytes=MAX_OBJECT_BYTES), Snapshot, key)

    def _as_rank(self, per_rank: Literal["same", "drop"] | int) -> AsRank:
        from .restore.sources import AsRank

        rank, count = (self._job.ranks.rank, self._job.ranks.count) if self._job is not None else place()
        return AsRank(per_rank, rank, count)

    def _local_ref(self, step: int | str | None) -> str:
        if step is not None:
            return f"{self.run}@{step if isinstance(step, str) else check_step(step)}"
        if self.repository.view().latest(self.run) is None:
            raise NotFoundError(f"run {self.run!r}: has no committed snapshot in {self.repository.url} to restore")
        return f"{self.run}@latest"
