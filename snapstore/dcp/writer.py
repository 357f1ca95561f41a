"""SnapstoreWriter: DCP's StorageWriter and AsyncStager over a run of a repository.

In: the state that DCP's planner holds. Out: one snapshot of all ranks. DCP makes these calls in this order: `stage` in
its caller's thread, the others in the thread that saves.

    stage                   async_save: copy the state; DCP continues with a state of one leaf that has the copies, or
                            the error of the copy, which `prepare_local_plan` raises
    reset                   take the checkpoint id
    set_up_storage_writer   check how DCP was called
    prepare_local_plan      keep the plan, and send its digest instead; and the hashes of its keys if they have changed
    prepare_global_plan     rank 0: open the session, and answer each rank with the data that it needs to write
    write_data              write this rank's packs and manifests, and report
    finish                  rank 0: compare the reports, write the root manifests, create the record

So the messages hardly grow with the state (see `exchange.py`), and DCP's error handling works: if a rank fails, the
save fails on all ranks. DCP does not tell the writer that another rank has failed, and until rank 0's session ends, gc
waits for it. So the functions of `functions.py` call `reset` after a failure; so should a caller of DCP's own. Else the
session ends at the next save or close.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..checks import check_choice
from ..distributed.base import Heart
from ..distributed.messages import Begin, decode, encode
from ..errors import InvalidInputError, SnapstoreError
from ..format.records import Snapshot
from ..options import SaveOptions
from ..protocol.session import SaveSession
from ..repository import Repository
from ..save.inputs import PartInput, SaveRequest, plain_names
from ..save.ranks.agreement import MAX_NAMES, Unlike, warn_of_buffers
from ..save.ranks.together import shared_session
from ..text import some
from .exchange import (
    Collected,
    DetailsWantedError,
    KeyHolders,
    PlanAnswer,
    Planned,
    Told,
    digest_of,
    key_of,
    marks_of_cache,
    plain_keys,
    remove_marks,
    wanted_trees,
)
from .names import step_of
from .planner import Staged, opened, staged_of, state_of
from .saving import Saver, Share
from .target import RankPlace, Target, Url, job_ranks_of, place_in

_LEFT_OPEN = "another rank failed, or an interrupt ended the save"
_OVERTAKEN = (
    "another save of this SnapstoreWriter began before this one had ended; nothing of this one was committed: wait for "
    "the future of async_save before the next save, as snapstore.dcp.save does"
)
_ALONE = (
    "use_collectives=False: each rank would commit a snapshot of its own part, which no restore could put together; "
    "leave it out: what the ranks exchange does not grow with the state"
)
_NO_DIST = (
    "no_dist=True, or a process_group of one rank: this is rank {} of {}, and each could commit its own part "
    "as a snapshot of one step; leave no_dist out and save on all ranks, or pass the process_group of async_save to "
    "SnapstoreWriter too; if this rank alone saves the full state, or each a run of its own, make the writer with "
    "process_group=False"
)
_NOT_ALONE = "process_group=False: {} ranks save together; pass no_dist=True to save, or leave process_group=False out"


class SnapstoreWriter(Target, StorageWriter, AsyncStager):
    """Saves snapshots of a run through DCP. Make one for the whole job: it holds the bases of the next save.

    Args:
        repository: a URL, path or store, where a repository is made if there is none; or an open Repository.
        run: the name of the run.
        process_group: the ranks that save together, the same group as for `async_save`; None: all ranks of the job.
            False: this process saves alone, with `no_dist=True`; no two ranks may save the same run so.
        staging, keep_base, replicas, options: see `SnapshotManager`.

    A checkpoint id is a step, or a path or text that ends with a step.

    Attributes:
        snapshot: the one that was committed last (only on rank 0).
        idle: is set while no save of `snapstore.dcp.async_save` runs.
    """

    def __init__(
        self,
        repository: Url | Repository,
        *,
        run: str,
        process_group: dist.ProcessGroup | Literal[False] | None = None,
        staging: Literal["auto", "device", "host"] = "auto",
        keep_base: bool = True,
        replicas: Literal["check", "rank0"] = "check",
        options: SaveOptions | None = None,
    ) -> None:
        check_choice("replicas", replicas, ("check", "rank0"))
        super().__init__(repository, run, partial(Repository.open_or_create, options=options))
        self.snapshot: Snapshot | None = None
        self.idle = threading.Event()
        self.idle.set()
        self._began_in = 0  # the thread of the save that began last; DCP makes all calls of a save in one thread
        self._group = process_group
        self._saver = Saver(
            self.repository,
            self._place(),
            staging=staging,
            keep_base=keep_base,
            replicas=replicas,
            job_ranks=job_ranks_of(process_group),
        )
        self._writing = threading.Lock()
        self._staged: weakref.ref[Staged] | None = None  # the last one: only its copies are valid; DCP's save keeps it
        self._plan = SavePlan([])
        self._plan_digest = b""
        self._key_holders = KeyHolders()  # on rank 0
        self._details = False  # whether the next save needs all details, as ranks with one plan have different trees
        self._first: set[int] = set()  # on rank 0: the first rank of each plan
        self._changing = threading.Lock()  # of `_began_in`, `_session` and the checkpoint id
        self._reset = threading.local()  # `done`: whether `reset` has begun the save of this thread
        self._session: SaveSession | None = None  # on rank 0, of the save that has begun
        self._heart: Heart  # of that session
        self._request: SaveRequest | None = None
        self._share: Share | None = None  # of rank 0
        self._warned: set[frozenset[str]] = set()  # the buffers that were warned of

    def _place(self) -> RankPlace:
        return (0, 0) if self._group is False else place_in(self._group)

    # -- AsyncStager, in the thread that calls async_save

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Return False: the copies are complete, or ordered after the caller's work, when `stage` returns."""
        return False

    def stage(self, state_dict: Any) -> dict[str, Any]:
        """Copy a state, by default where its tensors lie; return a state dict of one leaf, which holds the copies.

        If the copy fails, the leaf holds the error, and `prepare_local_plan` raises it: only there does DCP tell the
        other ranks. They wait for this rank in collectives.
        """
        started = time.monotonic()
        try:
            give = self._copied(state_dict)
        except Exception as error:  # noqa: BLE001  prepare_local_plan raises it
            give = _raising_later(error)
        staged = Staged(give, started, time.monotonic() - started)
        self._staged = weakref.ref(staged)
        return {staged.key: staged}

    def _copied(self, state: Any) -> Callable[[], Sequence[PartInput]]:
        """Copy a state; return a function that returns the copies. Raises as `Saver.stage` does."""
        with self._writing:  # do not change the copies of a save that is being written
            self._staged = None
            self._saver.take(self._place())
            return self._saver.stage(opened(state))

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has copied."""

    def close(self) -> None:
        """End a session that a failed save has left open, release memory, and close a repository that was opened here.

        Wait for the future of a save first: this ends its session.
        """
        self._end_session("the writer was closed")
        self._saver.clear()
        super().close()

    # -- StorageWriter, in the thread that saves

    def reset(self, checkpoint_id: Any = None) -> None:
        """Take the checkpoint id of the next save, or keep it (None); end a session that a failed save has left open.

        DCP calls it when a save begins. Call it without arguments after a save of DCP's own functions that has failed:
        until then gc takes that save for a running one.
        """
        self._end_session(_LEFT_OPEN, begins=True)
        self._reset.done = True
        with self._changing:
            if self._is_last():
                super().reset(checkpoint_id)

    def end_failed(self) -> None:
        """End the session of this thread's save, which has failed, unless another save has begun since."""
        self._end_session(_LEFT_OPEN, own=True)

    def storage_meta(self) -> StorageMeta:
        """Return the checkpoint id of the save, for planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check how DCP was called.

        Raises:
            InvalidInputError: with use_collectives=False; or the checkpoint id names no step; or another save of this
                writer has begun.
        """
        if getattr(self._reset, "done", False):  # with the checkpoint id of this save
            self._reset.done = False
            self._require_last()
        else:
            self._end_session(_LEFT_OPEN, begins=True)
        if kwargs.get("use_collectives") is False:
            raise InvalidInputError(_ALONE)
        step_of(self.checkpoint_id)

    def _is_last(self) -> bool:
        """Return whether this thread's save has begun last, so that the session and the checkpoint id are its own."""
        return threading.get_ident() == self._began_in

    def _require_last(self) -> None:
        """Check that no other save has begun since this one."""
        if not self._is_last():
            raise InvalidInputError(_OVERTAKEN)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep this rank's plan; return an empty one.

        Raises:
            InvalidInputError: another save of this writer has begun.
            Exception: the error of `stage`.
        """
        self._require_last()
        self._plan = plan
        staged = self._staged() if self._staged else None
        if staged is not None and [item.index.fqn for item in plan.items] == [staged.key]:
            inputs = staged.inputs()
            self._plan_digest = self._saver.digest_of_trees(inputs)
            keys: list[str] | None = [key_of(name[1]) for name in plain_names(inputs)]
        else:
            self._plan_digest = digest_of(plan) or self._plan_digest  # DCP's cache leaves an unchanged plan out
            keys = plain_keys(plan)
        planned = encode(self._saver.plan(self._plan_digest, keys))
        return SavePlan(marks_of_cache(), storage_data=planned, planner_data={})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open the session, and return the answer for each rank, with the data that it needs. Only rank 0 calls it.

        Raises:
            InvalidInputError: DCP calls only this rank, which is not the only one of the job or of `process_group`.
            InvalidInputError: another save of this writer has begun.
            StorageError, RanksError: the save cannot begin.
        """
        self._require_last()
        rank, count = self._place()
        if len(plans) == 1 and count > 1:
            raise InvalidInputError(_NO_DIST.format(rank, count))
        if len(plans) > 1 and self._group is False:
            raise InvalidInputError(_NOT_ALONE.format(len(plans)))
        planned = [decode(plan.storage_data, Planned) for plan in plans]
        holders = self._key_holders.answers(planned)
        repository, step = self.repository, step_of(self.checkpoint_id)
        request = SaveRequest(self.run, step)
        request.resolve(repository.context, repository.lineage)
        session = self._open_session(request, shared=len(plans) > 1)
        try:
            bases = [snapshot.key for snapshot in session.usable_bases]
            quarantine, others = bool(session.quarantined), len(session.others)
            begin = Begin(session.id, step, bases, full=False, quarantine=quarantine, others=others)
            self._first = wanted_trees(planned)
            wanted = set(range(len(plans))) if self._details else self._first
            common = (self._details, repository.config.digest_seed, self._saver.replicas)
            stale, count = self._key_holders.is_stale, len(plans)
            answers = [
                PlanAnswer(begin, rank, count, rank in wanted, *common, of, stale) for rank, of in enumerate(holders)
            ]
        except BaseException as error:
            self._end_session(error, own=True)
            raise
        return [SavePlan([], storage_data=encode(answer), planner_data={}) for answer in answers]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's packs and manifests.

        Returns:
            A future that is complete.

        Raises:
            InvalidInputError: the state cannot be saved, the ranks do not save alike, or another save has begun.
            RanksError: see `Saver.write`.
            StorageError: the store failed.
        """
        try:
            with self._writing:
                self._require_last()
                told = self._write(decode(plan.storage_data, PlanAnswer), planner)
        except BaseException as error:
            self._end_session(error, own=True)
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex("snapstore"), told.report.stored_bytes, encode(told))])
        return done

    def _write(self, answer: PlanAnswer, planner: SavePlanner) -> Told:
        """Write this rank's share, and return the message about it to rank 0."""
        step, begin, saver = step_of(self.checkpoint_id), answer.begin, self._saver
        if step != begin.step or answer.seed != self.repository.config.digest_seed:
            mine, theirs = f"step {step} to {self.repository.url}", f"step {begin.step}"
            raise InvalidInputError(
                f"rank {answer.rank} saves {mine}, rank 0 {theirs}"
                + (" to another repository" if step == begin.step else "")
                + "; pass the same checkpoint_id and repository on all ranks"
            )
        if answer.replicas != saver.replicas:
            raise InvalidInputError(
                f"rank {answer.rank} saves with replicas={saver.replicas!r}, rank 0 with {answer.replicas!r}; pass the "
                "same on all ranks"
            )
        is_alone = answer.world_size == 1 and self._place()[1] != 1  # process_group=False, or no torch.distributed
        inputs = self._inputs(planner, (0, 0) if is_alone else (answer.rank, answer.world_size), answer)
        if self._session is not None:  # of the coordinator
            share = self._share = saver.write(self._session, inputs)
        else:
            with shared_session(self.repository.context, self.run, begin, lambda: None) as session:
                share = saver.write(session, inputs)
        return saver.told(answer, share)

    def _inputs(self, planner: SavePlanner, place: RankPlace, answer: PlanAnswer) -> Sequence[PartInput]:
        """Return the tensors to write: the staged copies, or those of the waiting caller."""
        staged, request, saver = staged_of(planner), self._request, self._saver
        if staged is None:
            saver.take(place)
            saver.hear(answer.holders, stale=answer.stale)
            return saver.inputs(state_of(planner, self._plan))
        if saver.place != place:
            raise InvalidInputError(
                f"rank {saver.place[0]} of {saver.place[1]} has staged its share, and {max(place[1], 1)} ranks save: "
                "pass the process_group of async_save to SnapstoreWriter too; with no_dist=True, call save"
            )
        if self._staged is None or staged is not self._staged():
            raise InvalidInputError(
                "async_save was called again before this one was written, and has taken over its copies: wait for the "
                "future of one save before the next"
            )
        if request is not None:
            request.started, request.stall_s = staged.started, staged.stall_s
        saver.hear(answer.holders, stale=answer.stale)
        return staged.inputs()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the save. Only rank 0 calls it, with the reports of all ranks.

        Raises:
            InvalidInputError: the reports of the ranks contradict each other, or another save of this writer has begun;
                nothing was committed.
            ConflictError: a gc has expired this save; nothing was committed.
            StorageError: the store failed.
        """
        self._require_last()
        try:
            self.snapshot = self._commit({rank: decode(of[0].storage_data, Told) for rank, of in enumerate(results)})
        except BaseException as error:
            self._end_session(error, own=True)
            raise
        self._end_session(None, own=True)
        remove_marks(metadata)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.snapshot.id)
        with self._changing:
            if self._is_last():
                self.checkpoint_id = None  # a next save without a checkpoint id must not get this step again

    def _commit(self, told: dict[int, Told]) -> Snapshot:
        """Write the root manifests, if there are several ranks, and create the record."""
        session, request, share, saver = self._session, self._request, self._share, self._saver
        if session is None or request is None or share is None:
            raise InvalidInputError(_OVERTAKEN)
        used = {number for one in told.values() for number in one.report.bases}
        bases = [base for number, base in enumerate(session.usable_bases) if number in used]
        if not saver.place[1]:
            return saver.commit(session, request, share.written, bases)
        known = {told[rank].report.trees for rank in self._first}
        self._details &= any(one.report.trees not in known for one in told.values())  # the next save needs all again
        try:
            collected = Collected(told)
        except DetailsWantedError:
            self._details = True
            raise
        self._warn_of_buffers(request, collected.unlike_buffers, share)
        return saver.commit(session, request, saver.write_roots(session, collected), bases)

    def _warn_of_buffers(self, request: SaveRequest, unlike: Sequence[Unlike], share: Share) -> None:
        """Log that buffers differ between ranks, once for the same buffers."""
        parts = [f"buffers of part {one.group.partition(chr(0))[0]!r}" for one in unlike]
        names = [name for one in unlike for name in share.buffers.get(one.group, ())] or parts
        about = frozenset([*names, *(one.group for one in unlike)])
        if unlike and about not in self._warned:
            self._warned.add(about)
            warn_of_buffers(request, unlike, f"some of {some(names, MAX_NAMES)}")

    def _open_session(self, request: SaveRequest, *, shared: bool) -> SaveSession:
        """Open the session of this thread's save.

        Raises:
            InvalidInputError: another save has begun meanwhile; the session has ended.
            StorageError: it cannot be opened.
        """
        session, heart = SaveSession(self.repository.context, self.run, request.step, parent=request.parent), Heart()
        try:
            session.__enter__()
            session.shared = shared
            with self._changing:
                if self._is_last():
                    self._session, self._request, self._heart = session, request, heart
                    heart.add(session.heartbeat)
                    return session
            overtaken = InvalidInputError(_OVERTAKEN)
            session.__exit__(type(overtaken), overtaken, None)
            raise overtaken
        except BaseException:
            heart.close()
            raise

    def _end_session(self, error: BaseException | str | None, *, begins: bool = False, own: bool = False) -> None:
        """End the session, if one is open.

        Args:
            begins: a save begins in this thread.
            own: leave the session of a save that has begun since in another thread.
        """
        with self._changing:
            if begins:
                self._began_in = threading.get_ident()
            if self._session is None or (own and not self._is_last()):
                return
            session, self._session, self._share = self._session, None, None
            self._heart.close()
        reason = InvalidInputError(error) if isinstance(error, str) else error
        session.__exit__(type(reason) if reason else None, reason, None)


def _raising_later(error: Exception) -> Callable[[], NoReturn]:
    """Return a function that raises an error, without its frames and causes: these keep the tensors of all callers."""
    if error.__cause__ or not isinstance(error, SnapstoreError):
        error.add_note("".join(traceback.format_exception(error)))
    error.__traceback__ = error.__cause__ = error.__context__ = None

    def give() -> NoReturn:
        raise error

    return give
