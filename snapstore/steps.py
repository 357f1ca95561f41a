"""Steps: list the saved steps of one run, and restore them.

In: a run of a repository, and the ranks of a job if there are several. Out: steps and restored states. With several
ranks, rank 0 chooses the snapshot, so all ranks restore the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Unpack, overload

from . import retention
from .catalog import policy_store
from .catalog.history import View
from .check.fallback import (
    Agreement,
    Alone,
    Fill,
    RestoreCandidates,
    Skipped,
    Together,
    candidates,
    restore_newest_whole,
)
from .checks import TARGET_FIRST, check_step
from .context import Context
from .copy.bring_back import BringBack, LostThere
from .copy.mirror import Mirror
from .distributed.choose import place
from .distributed.questions import V
from .errors import DAMAGE, CapabilityError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from .format.records import Snapshot
from .options import SaveOptions
from .repository import Repository
from .restore import pipeline
from .restore.pipeline import BeforeFill
from .restore.sources import AsRank, PerRankOption
from .save.ranks.job import RankJob
from .snapshots import newest_whole_named
from .state.fill.fit import Fit, FitOptions, NameOptions, Rename
from .storage.base import ObjectStore
from .text import log, quoted

#: Where a repository lies.
Url = str | Path | ObjectStore


class Stores(NamedTuple):
    """Where a run is saved: its repository and its mirror; see `SnapshotManager`."""

    url: Url | Repository
    mirror: Url | None
    mirror_keep: Sequence[retention.Policy]
    mirror_verify: bool
    options: SaveOptions | None


def open_like(url: Url, stores: Stores, *, read_only: bool) -> Repository:
    """Open the repository under a URL. If there is none, make one like its mirror; or, read-only, open the mirror.

    Raises:
        NotFoundError: read-only, and there is neither.
        StorageError: a store failed; or there is no repository, and the mirror, whose seed a new one takes, cannot be
            read.
    """
    mirror, options = stores.mirror, stores.options
    for _ in range(2 if mirror is not None and read_only else 1):  # a store may answer wrongly once
        try:
            return Repository.open(url, options=options)
        except NotFoundError:
            if mirror is None and read_only:
                raise
    like = None
    try:
        like = None if mirror is None else Repository.open(mirror, options=options)
    except NotFoundError:
        if read_only:
            raise
    except StorageError as error:
        text = f"{url}: no repository here, and the mirror that a new one is made like cannot be read: {error}"
        raise StorageError(text) from error
    if like is not None and read_only:
        log.warning("%s: no repository here; reading its mirror at %s, which may be older", url, like.url)
        return like
    try:
        return Repository.open_or_create(url, like=like, options=options)
    finally:
        if like is not None:
            like.close()


class Steps:
    """The steps of one run. `SnapshotManager` is a subclass, which also saves them.

    Args:
        job: the ranks that save together; None: this process alone.
        stores: where the run is saved.
        alike: the arguments that all ranks must pass, as a text; see `RankJob.open`.
        The others: see `SnapshotManager`.

    Attributes:
        run: the name of the run.
        repository: where the run is saved.
        keep: the retention policies of the run.
        read_only: whether nothing is written.
    """

    def __init__(
        self,
        run: str,
        job: RankJob | None,
        keep: Sequence[retention.Policy],
        stores: Stores,
        *,
        parent: str | None,
        read_only: bool,
        alike: str,
    ) -> None:
        self.run, self.keep, self.read_only = run, keep, read_only
        self._leads = job is None or job.leads
        self._job, self._unapplied = job, ""  # `_unapplied`: a warning of stored policies, if this manager has none
        self._mirror: Mirror | None = None  # rank 0 may have one
        opened = partial(self._opened, stores, parent)
        self.repository: Repository = opened() if job is None else job.open(alike, opened)

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and copy."""
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied; make another one where you need it")

    def _opened(self, stores: Stores, parent: str | None) -> Repository:
        """Return the repository, with the policies and the parent of the run."""
        url = stores.url
        repository = url if isinstance(url, Repository) else open_like(url, stores, read_only=self.read_only)
        if self._leads:
            if self.keep and not self.read_only:
                try:
                    repository.set_policies(self.run, self.keep)
                except StorageError as error:  # a full or read-only disk must not prevent a restore
                    log.warning(
                        "run=%s its policies cannot be stored, so only this manager has them: %s", self.run, error
                    )
            elif not self.read_only:
                self._unapplied = policy_store.warning_if_stored(repository.store, self.run)
            if stores.mirror is not None:
                self._start_mirror(repository, stores.mirror, stores)
            if parent is not None:
                try:
                    self._begin_from(repository, parent)
                except BaseException:
                    if self._mirror is not None:
                        self._mirror.close(0)
                    raise
        return repository

    def _warn_of_unapplied(self) -> None:
        """Warn of stored policies once, at the first save: a program may give the manager policies before that."""
        text, self._unapplied = self._unapplied, ""
        if text and not self.keep:
            log.warning("%s", text)

    def _begin_from(self, repository: Repository, parent: str) -> None:
        """Make a snapshot the parent of the first save of the run, if it is new in the repository and in its mirror."""
        view = repository.context.index.refresh(self.run)
        there = self._mirror.view() if self._mirror is not None else None
        if view.newest(self.run) is None and (there is None or there.newest(self.run) is None):
            view.require_known(f"parent {parent} of a new run {self.run}", self.run)  # it may be no new run
            repository.lineage.go_on_from(self.run, repository.snapshot(parent))

    def _wait_idle(self) -> None:
        """Wait until no save runs; raise an error if this object is closed."""

    def _prepare_early(self, state: Any) -> None:
        """Prepare in the background for saves of a state that was restored."""

    def all_steps(self) -> list[int]:
        """Return the steps that have a committed snapshot, ascending, each once. All ranks call it; rank 0 answers.

        Raises:
            IntegrityError, StorageError: a record of another step is gone, or cannot be read.
        """

        def find() -> list[int]:
            views = self._views()
            found = self._committed(views)
            steps = {snapshot.step for snapshot in found}
            self._require_known(f"steps of {self.run}", views, found, lambda step: step not in steps)
            return sorted(steps)

        return self._answered("all_steps", find)

    def has_step(self, step: int) -> bool:
        """Return whether a step has a committed snapshot. All ranks call it; rank 0 answers.

        Raises:
            InvalidInputError: the step is no integer of 0 or more.
            IntegrityError, StorageError: it may have one, whose record is gone or cannot be read.
        """

        def find() -> bool:
            number, views = check_step(step), self._views()
            found = self._committed(views)
            if any(snapshot.step == number for snapshot in found):
                return True
            self._require_known(f"step {number} of {self.run}", views, found, lambda other: other == number)
            return False

        return self._answered(f"has_step {retention.named_step(step)}", find)

    def _views(self) -> list[View]:
        """Return what the repository has, and what a mirror has that can be reached."""
        there = self._mirror.view() if self._mirror is not None else None
        return [self.repository.context.index.refresh(self.run), *([there] if there is not None else [])]

    def _committed(self, views: Sequence[View]) -> list[Snapshot]:
        found: dict[str, Snapshot] = {}
        for view in reversed(views):
            found |= {snapshot.id: snapshot for snapshot in view.snapshots(self.run)}
        return list(found.values())

    def _require_known(
        self,
        asked: str,
        views: Sequence[View],
        found: Sequence[Snapshot],
        matters: Callable[[int], bool] = lambda step: True,
    ) -> None:
        """Raise if a store has a record of the run, of a step that matters, that is not known; none of `found`.

        Raises:
            IntegrityError, StorageError: a record is damaged or gone, or cannot be read.
        """
        besides = {snapshot.id for snapshot in found}
        for number, view in enumerate(views):
            place = f" in {self._mirror.url}" if number and self._mirror is not None else ""
            view.require_all_known(f"{asked}{place}", self.run, besides, matters)

    def latest_step(self) -> int | None:
        """Return the step of the newest committed snapshot, by the order of the saves; None if there is none.

        After a return to an older step this may not be the highest step, which Orbax calls the latest. All ranks call
        it; rank 0 answers.

        Raises:
            IntegrityError, StorageError: a record that may be newer is gone, or cannot be read.
        """

        def find() -> int | None:
            here = self.repository.context.index
            newest = here.refresh(self.run).latest(self.run) if self._mirror is None else self._mirror.newest()[0]
            return newest.step if newest else None

        return self._answered("latest_step", find)

    def highest_step(self) -> int | None:
        """Return the highest step with a committed snapshot; None if there is none. All ranks call it; rank 0 answers.

        Raises:
            IntegrityError, StorageError: a record of a higher step is gone, or cannot be read.
        """
        return self._answered("highest_step", self._highest)

    def _highest(self) -> int | None:
        views = self._views()
        found = self._committed(views)
        highest = max((snapshot.step for snapshot in found), default=-1)
        self._require_known(f"highest step of {self.run}", views, found, lambda step: step > highest)
        return highest if highest >= 0 else None

    def _start_mirror(self, repository: Repository, url: Url, stores: Stores) -> None:
        """Open the mirror of a repository, and begin to copy; raises as `Mirror.start` does."""
        read_only = self.read_only
        opened = Repository.open if read_only else partial(Repository.open_or_create, like=repository)
        opened = partial(opened, url, options=repository.options)
        name = url if isinstance(url, str) else getattr(url, "url", str(url))
        keep, verify = stores.mirror_keep, stores.mirror_verify
        found = Mirror(self.run, name, repository.context, opened, keep, read_only=read_only, verify=verify)
        found.start()
        repository.lineage.number_from(self.run, lambda: found.next_seq)
        self._mirror = found

    def _held(self) -> set[str]:
        """Return the ids of the snapshots that may not be mirrored yet."""
        return self._mirror.held() if self._mirror is not None else set()

    def not_mirrored(self) -> list[int]:
        """Return the steps that are committed and not yet in the mirror, in the order of their saves.

        They include the steps that could not be copied. Before them come steps whose records cannot be read, or are
        gone, and which the mirror does not have. Until the mirror has been reached, these are all steps. Without a
        mirror, and on other ranks than rank 0, the list is empty.
        """
        return self._mirror.behind() if self._mirror is not None else []

    def wait_until_mirrored(self, timeout: float | None = None) -> list[int]:
        """Wait until the mirror has every commit, for at most `timeout` seconds, or until an attempt fails.

        It does not wait for a step whose record cannot be read, or is gone. It tries once more to copy each step that
        could not be copied, but does not wait longer for it.

        Returns:
            The steps that are not mirrored, as `not_mirrored` returns them.

        Raises:
            StorageError: the thread of the mirror has ended with an error.
        """
        self._wait_idle()
        return self._mirror.wait(timeout) if self._mirror is not None else []

    def best_step(self) -> int | None:
        """Return the step of the best committed snapshot by the first KeepBest policy; None if none has its metric.

        All ranks call it; rank 0 answers.

        Raises:
            InvalidInputError: no KeepBest among the policies.
            IntegrityError, StorageError: a record of the run is gone, or cannot be read: it may be the best.
        """

        def find() -> int | None:
            for policy in self.keep:
                if isinstance(policy, retention.KeepBest):
                    return self._best_by(policy)
            raise InvalidInputError("best_step: no KeepBest among the policies; pass keep=[KeepBest('metric'), ...]")

        return self._answered("best_step", find)

    def _best_by(self, policy: retention.KeepBest) -> int | None:
        views = self._views()
        self._require_known(f"best step of {self.run}", views, self._committed(views))
        here, *others = (view.snapshots(self.run) for view in views)
        there = [snapshot for found in others for snapshot in found]

        def best(here: Sequence[Snapshot]) -> int | None:
            steps = {snapshot.step: snapshot for snapshot in retention.current(there)}
            steps |= {snapshot.step: snapshot for snapshot in retention.current(here)}  # `restore` looks there first
            ranked = policy.ranked(steps.values())
            return ranked[0].step if ranked else None

        unknown = views[0].unknown_steps(self.run)
        unread = [snapshot for snapshot in there if snapshot.id in unknown]  # the first store may have these too
        if unread and best(here) != best([*here, *unread]):
            views[0].require_known(f"best step of {self.run}", self.run)
        return best(here)

    def _answered(self, question: str, find: Callable[[], V]) -> V:
        """Return what `find` returns; with several ranks, what it returns on rank 0."""
        return find() if self._job is None else self._job.questions.ask(question, find)

    @overload
    def restore(
        self,
        step: int | str | None = ...,
        *,
        keys: str | Sequence[str] | None = ...,
        device: Any = ...,
        types: Sequence[type] = ...,
        per_rank: Literal["same", "drop"] | int | None = ...,
        part: None = ...,
        rename: Rename | None = ...,
    ) -> dict[Any, Any]: ...

    @overload
    def restore(
        self,
        step: int | str | None = ...,
        *,
        keys: str | Sequence[str] | None = ...,
        device: Any = ...,
        types: Sequence[type] = ...,
        per_rank: Literal["same", "drop"] | int | None = ...,
        part: str,
        rename: Rename | None = ...,
    ) -> Any: ...

    def restore(
        self,
        step: int | str | None = None,
        *,
        keys: str | Sequence[str] | None = None,
        device: Any = None,
        types: Sequence[type] = (),
        per_rank: Literal["same", "drop"] | int | None = None,
        **names: Unpack[NameOptions],
    ) -> Any:
        """Return the state of a step (or tag; None: the newest), once no save is running. See `Repository.restore`.

        The snapshot becomes the parent of the run's next save. With several ranks, all ranks call this, and get the
        same snapshot.

        Args:
            per_rank: which rank's own values (`PerRank`, `RngState`) to return. None: those of this rank if as many
                ranks saved, else `RankValues`, which have those of all ranks; a number: those of that rank; "drop":
                none; "same": those of this rank, or an error.
            names: `part` and `rename`.

        Raises:
            RanksError: a rank does not answer or does not call this.
            SnapstoreError: see `Repository.restore`.
        """
        with self._reading(step, per_rank) as (context, ref, as_rank):
            chosen = Fit(keys, **names)
            snapshot, state = pipeline.read(context, ref, keys=chosen, device=device, types=types, as_rank=as_rank)
        self.repository.lineage.go_on_from(self.run, snapshot)
        return state

    def restore_into(
        self,
        target: Any,
        step: int | str | None = None,
        *,
        keys: str | Sequence[str] | None = None,
        types: Sequence[type] = (),
        per_rank: Literal["same", "drop"] | int | None = None,
        fallback: bool | Skipped = False,
        **fit: Unpack[FitOptions],
    ) -> Snapshot:
        """Fill `target` with the state of a step (or tag; None: the newest), and return the snapshot.

        It waits for the running save. See `Repository.restore_into`, also for `part`, `rename` and `strict` in `fit`,
        and `restore` for several ranks. If another number of ranks saved, `RngState` keeps the random generators, and
        rank 0 logs a warning. The snapshot becomes the parent of the run's next save.

        Args:
            fallback: True: if the snapshot is damaged, restore the newest older one that every rank can read whole.
                Each rank verifies all that it would read before anything in `target` changes. The log names each
                snapshot that was skipped, and why; `Skipped()` notes them too.

        Raises:
            IntegrityError: with `fallback`: no snapshot is whole. The error names those that were tried. Or the mirror
                has a newer one whole, which cannot be copied back.
            StorageError: with `fallback`: the store, or a mirror that is needed, is away or withholds an object, which
                is no damage: an older snapshot would lose training.
        """
        chosen = Fit(keys, **fit)
        if fallback is not False:
            rank = self._as_rank(per_rank)

            def fill(context: Context, snapshot: Snapshot, check: BeforeFill) -> Snapshot:
                options: Any = {"keys": chosen, "types": types, "as_rank": rank, "before_fill": check}
                return pipeline.read_into(context, snapshot, target, **options)

            snapshot = self._restore_whole(step, fallback, fill, rank.rank)
        else:
            with self._reading(step, per_rank) as (context, ref, as_rank):
                snapshot = pipeline.read_into(context, ref, target, keys=chosen, types=types, as_rank=as_rank)
        self.repository.lineage.go_on_from(self.run, snapshot)
        if keys is None and fit.get("part") is None:  # else it may be a part of what is saved
            self._prepare_early(target)
        return snapshot

    def _restore_whole(self, step: int | str | None, fallback: bool | Skipped, fill: Fill, rank: int) -> Snapshot:
        """Fill a state from a step, or from the newest older one that is whole on all ranks; see `restore_into`."""
        if not isinstance(fallback, bool | Skipped):
            raise InvalidInputError(f"fallback {quoted(fallback)}: expected True, False or Skipped()")
        if isinstance(fallback, Skipped):
            fallback.snapshots.clear()
        self._wait_idle()

        context, asked = self.repository.context, f"restore {retention.named_step(step)}"
        agreement: Agreement
        if self._job is None:
            found = self._candidates(step)
            context, agreement = found.context, Alone(found)
        else:
            agreement = Together(self._job.questions, asked, lambda: self._candidates(step))
        snapshot, skipped = restore_newest_whole(context, agreement, fill, rank=rank, may_write=not self.read_only)
        if isinstance(fallback, Skipped):
            fallback.snapshots[:] = [(one.step, one.id, one.why) for one in skipped]
        return snapshot

    def _candidates(self, step: int | str | None) -> RestoreCandidates:
        """Return the snapshots to try for a step; first copy back what only the mirror has, or what is newest there.

        Raises:
            SnapstoreError: the step names nothing, or what it names is not certain; or a newer one may be whole
                elsewhere, and cannot be copied back.
        """
        step = None if step == "latest" else self._of_both_stores(step)
        context, lost, problem = self.repository.context, list[LostThere](), None
        mirror = BringBack(self._mirror, context) if self._mirror is not None else None
        try:
            context = self._nearest(step)
        except CapabilityError:
            raise
        except DAMAGE as error:  # of a record that may be newer, or of what only the mirror has: it is skipped
            if mirror is not None and step is None:
                lost = mirror.newest()
            elif not isinstance(error, IntegrityError):
                raise
            problem = error
        if self._job is not None and context is not self.repository.context:
            raise NotFoundError(
                f"restore {retention.named_step(step)}: only the mirror has it, and a read-only job reads "
                f"{self.repository.url} alone; copy it back with 'snapstore copy', or restore an older step"
            )
        number, ref = step if isinstance(step, int) else None, None if step is None else self._local_ref(context, step)
        try:
            found = candidates(context, self.run, ref, number)
        except NotFoundError:
            if problem is not None:
                raise problem from None
            raise
        if mirror is not None:
            found.bring_back, found.is_earlier = mirror.snapshot, mirror.is_earlier
        for one in lost:
            found.note(*one)
        return found

    @contextmanager
    def _reading(
        self, step: int | str | None, per_rank: PerRankOption
    ) -> Iterator[tuple[Context, str | Snapshot, AsRank]]:
        """Wait until no save runs; yield where a step lies, its reference, and how this rank reads it."""
        self._wait_idle()
        (context, ref), as_rank = self._place_of(step), self._as_rank(per_rank)
        named = ref if isinstance(ref, str) else f"id:{ref.id}"
        elsewhere = self._mirror.advice if self._mirror and context is self.repository.context else lambda ref: ""
        with newest_whole_named(context, named, elsewhere):
            yield context, ref, as_rank

    def _of_both_stores(self, step: int | str | None) -> int | str | None:
        """Return the step that "best" or "highest" means in both stores together; a tag of that name comes first.

        "best" is by the policies of this manager; the stored ones, which may be others, count if it has no KeepBest.

        Raises:
            IntegrityError, StorageError: that may be a step whose record is gone, or cannot be read.
            NotFoundError: no snapshot has the metric.
        """
        policy = next((policy for policy in self.keep if isinstance(policy, retention.KeepBest)), None)
        if not (step == "best" and policy is not None) and not (step == "highest" and self._mirror is not None):
            return step
        if not (found := self._committed(self._views())) or any(step in snapshot.tags for snapshot in found):
            return step
        if step == "highest" or policy is None:
            return self._highest()
        best = self._best_by(policy)
        if best is None:
            raise NotFoundError(f"{self.run}@best: no snapshot of run {self.run!r} has the metric {policy.metric!r}")
        return best

    def _nearest(self, step: int | str | None) -> Context:
        """Return where to read a step; rank 0 first copies back a step that only its mirror has."""
        if self._mirror is None:
            return self.repository.context
        return self._mirror.nearest("latest" if step is None else str(step))

    def _place_of(self, step: int | str | None) -> tuple[Context, str | Snapshot]:
        """Return where to read a step, and its reference.

        With several ranks, rank 0 chooses the snapshot: only rank 0 lists the store, and has a mirror.
        """
        if self._job is None:
            step = self._of_both_stores(step)
            context = self._nearest(step)
            return context, self._local_ref(context, step)

        def find() -> str:
            meant = self._of_both_stores(step)
            return self.repository.snapshot(self._local_ref(self._nearest(meant), meant)).key

        key = self._job.questions.ask(f"restore {retention.named_step(step)}", find)
        chosen = self.repository.context.index.pages.record(key)
        return self.repository.context, chosen

    def _found(self, step: int | str | None) -> tuple[Context, Snapshot]:
        """Return where a step lies, and its snapshot; it is copied back if only a mirror has it. All ranks call it."""
        context, ref = self._place_of(step)
        return context, ref if isinstance(ref, Snapshot) else context.index.find(ref)

    def _as_rank(self, per_rank: PerRankOption) -> AsRank:
        rank, count = (self._job.ranks.rank, self._job.ranks.count) if self._job is not None else place()
        return AsRank(per_rank, rank, count)

    def _local_ref(self, context: Context, step: int | str | None) -> str:
        if step is not None:
            return f"{self.run}@{step if isinstance(step, str) else check_step(step, TARGET_FIRST)}"
        if self._mirror is not None and (newest := self._mirror.newest()[0]):
            return f"id:{newest.id}"
        if context.index.refresh(self.run).latest(self.run) is None:
            raise NotFoundError(f"run {self.run!r}: has no committed snapshot in {self.repository.url} to restore")
        return f"{self.run}@latest"
