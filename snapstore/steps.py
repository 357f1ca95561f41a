"""Steps: the saved steps of one run: which there are, and their states.

In: a run of a repository, and the ranks of a job if there are several. Out: steps and restored states; on several ranks
rank 0 says which snapshot is meant, so all of them restore that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from . import retention
from .errors import InvalidInputError, NotFoundError
from .format.argument_checks import check_step
from .format.records import Snapshot
from .ranks import place
from .repository import Repository

if TYPE_CHECKING:
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
        found = self._job.ask(question, lambda: None if (step := find()) is None else str(step))
        return None if found is None else int(found)

    def restore(
        self,
        step: int | str | None = None,
        *,
        keys: str | Sequence[str] | None = None,
        device: Any = None,
        types: Sequence[type] = (),
        per_rank: Literal["same", "drop"] | int = "same",
    ) -> Any:
        """Return the state of a step (or tag; None: the newest), once no save is running. See `Repository.restore`.

        The run's next save goes on from it. With several ranks all call it, and get the same snapshot.

        Args:
            per_rank: whose values that are each rank's own (`PerRank`, `RngState`): "same": this rank's, if as many
                ranks saved; a number: that rank's; "drop": none.
        """
        from .check.newest_whole import newest_whole_named
        from .restore.pipeline import read

        context, ref = self.repository.context, self._ref(step)
        with newest_whole_named(context, ref):
            as_rank = self._as_rank(per_rank)
            snapshot, state = read(context, ref, keys=keys, device=device, types=types, as_rank=as_rank)
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
    ) -> Snapshot:
        """Fill `target` with the state of a step (or tag; None: the newest), and return the snapshot.

        Waits for the running save. See `Repository.restore_into`, and `restore` for `per_rank` and several ranks. The
        run's next save goes on from it.
        """
        from .check.newest_whole import newest_whole_named
        from .restore.pipeline import read_into

        context, ref = self.repository.context, self._ref(step)
        with newest_whole_named(context, ref):
            snapshot = read_into(context, ref, target, keys=keys, types=types, as_rank=self._as_rank(per_rank))
        self.repository.lineage.go_on_from(self.run, snapshot)
        return snapshot

    def _ref(self, step: int | str | None) -> str:
        """Return the reference of a step, once no save is running."""
        self._wait_idle()
        if self._job is None:
            return self._local_ref(step)
        found = self._job.ask(f"restore {step!r}", lambda: f"id:{self.repository.snapshot(self._local_ref(step)).id}")
        assert found is not None
        return found

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
