"""SnapshotManager: the object that a training loop calls. It saves every N steps, and keeps snapshots by policy.

The caller's thread flattens the state and copies it (save/staging.py): training waits only for that. One thread per
save does the rest: hash, encode, put, commit, then forget and gc by policy. One save runs at a time: the next one waits
for it, or is skipped. The next `save` or wait raises a failure in the background. The methods have Orbax's names.

In a job of several ranks each rank makes a manager, and all make the same calls: a save stores one snapshot of all
ranks (save/ranks/job.py). Only rank 0 lists the store, applies the policies and deletes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, SupportsFloat, get_args

from . import retention
from .checks import check_choice, check_flags, check_interval, check_name, check_step
from .distributed.base import Ranks
from .distributed.choose import check as check_ranks
from .distributed.choose import choose
from .distributed.notices import Notice
from .distributed.preemption import Preemption, SignalHandler
from .errors import CapabilityError, InvalidInputError, SnapstoreError
from .options import SaveOptions
from .repository import Repository
from .save.background import Background, SaveHandle, clear_frames
from .save.first_state import FirstState
from .save.hooks import CommitEvent, FailureEvent, Given, Hooks
from .save.inputs import PartInput, SaveRequest, is_stream
from .save.pipeline import save
from .save.ranks.job import RankJob
from .save.retrying import ReplacedError, Retrying
from .save.staging import Mode, Staging
from .save.streaming import inputs_of_stream
from .save.upkeep import Upkeep
from .state.walk.flatten import flatten
from .steps import Steps, Stores
from .storage.base import ObjectStore
from .text import log
from .threads import LockSlot

#: After `close(timeout=)` has given a save up, it ends within the first time, unless its store does not answer. A save
#: that waits for the one before looks in the second time whether the process is to end [s].
GIVE_UP_S, LOOK_S = 2.0, 0.2


class SnapshotManager(Steps):
    """Saves and restores the snapshots of one run, from its training loop.

    Args:
        repository: a URL or path, where a repository is made if there is none; a store; or an open Repository.
        run: the name of the run.
        parent: reference of a snapshot, usually of another run. It becomes the parent of the first save of a new run: a
            fork. It has no effect once the run has a snapshot.
        save_interval_steps: `should_save` is True at multiples of this.
        keep: a retention policy, or several, ORed. After each commit, the thread that saves forgets all other snapshots
            and runs gc: at most 256 of them, and `close` does what is left. The policies are stored, so that
            `snapstore forget --run` knows them.
        mirror: a second repository, usually on S3: each commit is copied there from the first one, in the background.
            It is made if there is none. A new first repository takes the digest seed and chunk size of the mirror. A
            step that only the mirror has is copied back when it is restored.
        mirror_keep: the policies of the mirror; (): it keeps everything; None: those of `keep`.
        mirror_verify: as `verify` of `Repository.copy`, for the copies to the mirror and back.
        async_save: save in the background; else `save` returns after the commit.
        on_busy: while a save runs, or forgets and runs gc after its commit, `save` waits for it ("wait"), or skips
            ("skip"); with `force` it waits. While memory is taken for a save (`prepare`), `save` always waits.
        on_error: "raise": the next `save` raises the error of a save that failed in the background. "warn": if the
            store is away, the save is tried again, after 1 to 60 s, until it is committed or a newer save replaces it,
            and the log says since when nothing is durable. The copy stays in memory until then, also that of a
            synchronous save, which then returns before its commit. `close`, `wait_until_finished`, `restore` and the
            handle's `result()` cause one more attempt, and raise its error. Errors that last are raised as by "raise":
            a full disk, a refused permission, a replaced repository, a state that cannot be saved (guides/recovery.md).
            An iterator cannot be read again: its save has one attempt.
        staging: where the copies of CUDA tensors lie. "device": in device memory, up to twice their size; takes
            milliseconds. "host": in pinned memory, at the speed of the bus. "auto": on the device if there is room.
            If CuPy or nvCOMP is missing, "auto" copies them to host memory, and the others raise CapabilityError.
        keep_base: keep the bytes of the last snapshot where they were staged, as bases for the next; else bases are
            read back from the store.
        read_only: never write; for evaluation jobs.
        ranks: the ranks of a job that save one snapshot together, such as `TorchRanks(group)`. None: all ranks, if
            torch.distributed is initialised with several; each must make a manager within 60 s. False: this process
            saves alone. A read-only manager uses ranks only if you pass them; else each rank finds the newest alone.
        replicas: tensors that several ranks hold whole, and replicas of DTensors. "check": they must be equal, and each
            rank stores a share; if some differ, an error names them. If buffers such as BatchNorm's differ, those of
            rank 0 are stored, with one warning. "rank0": they may differ; rank 0 (of DTensors: the first replica)
            stores all of them, and each rank restores its values. Pass the same on all ranks.
        options: how saves are stored; no effect if `repository` is an open Repository.
        state: the state that will be saved, if it is on its devices: it is checked, and if its copies will lie in host
            memory, this is pinned in the background now and again at the first step that is not saved, when optimizers
            have state. `restore_into` and `save` off the interval do the same without it.
        on_commit: a function, or several, called with a `CommitEvent` once a save is durable; of all ranks on rank 0.
        on_failure: the same, with a `FailureEvent` when a save has ended without a commit, or an attempt of it has
            failed (`on_error="warn"`). Each save that begins ends in exactly one commit or one failure whose
            `will_retry` is False. Hooks run in a thread of their own, one event after the other, and never delay a
            save; `close` and the interpreter's exit wait for them, at most 5 s. Their errors are logged. See
            guides/monitoring.md.

    Do not use it across a fork, or in a signal handler: set a flag in the handler, and save from the loop.
    """

    def __init__(
        self,
        repository: str | Path | ObjectStore | Repository,
        *,
        run: str,
        parent: str | None = None,
        save_interval_steps: int = 1,
        keep: retention.Policy | Sequence[retention.Policy] = (),
        mirror: str | Path | ObjectStore | None = None,
        mirror_keep: retention.Policy | Sequence[retention.Policy] | None = None,
        mirror_verify: bool = True,
        async_save: bool = True,
        on_busy: Literal["wait", "skip"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        staging: Literal["auto", "device", "host"] = "auto",
        keep_base: bool = True,
        read_only: bool = False,
        ranks: Ranks | Literal[False] | None = None,
        replicas: Literal["check", "rank0"] = "check",
        options: SaveOptions | None = None,
        state: Any = None,
        on_commit: Given[CommitEvent] = None,
        on_failure: Given[FailureEvent] = None,
    ) -> None:
        run, interval = check_name("run", run), check_interval(save_interval_steps)
        check_choice("on_busy", on_busy, ("wait", "skip"))
        check_choice("on_error", on_error, ("raise", "warn"))
        check_flags(async_save=async_save, keep_base=keep_base, read_only=read_only, mirror_verify=mirror_verify)
        policies = retention.check(keep)
        mirror_policies = policies if mirror_keep is None else retention.check(mirror_keep)
        self._hooks = Hooks(run, on_commit, on_failure)
        stores = Stores(repository, mirror, mirror_policies, mirror_verify, options)
        self.save_interval_steps, self._async, self._skip_busy = interval, async_save, on_busy == "skip"
        check_choice("replicas", replicas, ("check", "rank0"))
        check_choice("staging", staging, get_args(Mode))
        chosen, self._made_ranks = (None, False) if read_only and ranks is None else choose(run, ranks)
        job = RankJob(chosen, replicas) if chosen is not None else None
        self._alone, self._owned = ranks is False, not isinstance(repository, Repository)
        alike = f"open, replicas={replicas!r}, on_busy={on_busy!r}, on_error={on_error!r}, "
        alike += f"save_interval_steps={interval}, run={run!r}"
        try:
            self._first_state = FirstState(None if read_only else state, of_rank=job is not None)
            super().__init__(run, job, policies, stores, parent=parent, read_only=read_only, alike=alike)
        except BaseException as error:
            if job is not None:
                job.close(error, ends_channel=self._made_ranks)
            raise
        shares = self._job.shares() if self._job is not None else None
        self._staging = Staging(self.repository.context.engines, keep_base=keep_base, mode=staging, shares=shares)
        self.repository.context.engines.required |= staging != "auto"
        self._hooks.begin(self._leads, None if self._mirror is None else self._mirror.newest_created)
        self._background = Background(self.run, self.repository.context.engines)
        self._retrying = Retrying(self.run, warns=on_error == "warn", leads=self._leads)
        self._pid, self._closed = os.getpid(), False
        self._running: SaveRequest | None = None
        self._preemption: Preemption | None = None
        self._ending: SignalHandler | None = None
        self._upkeep = Upkeep(self.repository.context, self.run, self._stops_upkeep, self._held)
        if not read_only:
            self._first_state.use(self._background, self._staging, self.repository.context, self.repository.lineage)

    def __repr__(self) -> str:
        return f"SnapshotManager({self.repository.url!r}, run={self.run!r})"

    # -- save

    def should_save(self, step: int) -> bool:
        """Return whether to save at `step`: a multiple of the interval, or the last step of a job that is told to end.

        A read-only manager returns False.
        """
        is_due = self._is_due(step)
        if not is_due:
            self._first_state.pass_step()
        return is_due

    def _is_due(self, step: int) -> bool:
        on_interval = check_step(step) % self.save_interval_steps == 0
        return not self.read_only and (on_interval or self._ending_at(step) is not None)

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        metadata: Any = None,
        tags: Sequence[str] = (),
        force: bool = False,
    ) -> SaveHandle:
        """Save a snapshot of the state; return as soon as the state may change again.

        Args:
            step: a step off the interval is skipped unless `force`; at the first one the state is only checked.
            state: any nesting of dict, list and tuple over tensors, arrays, plain values and objects with state_dict.
                Or an iterator of (dotted path, tensor): it cannot be copied, so `save` returns when it is committed.
            metrics, metadata, tags: see `Repository.save`. With several ranks they must be equal on all.

        Raises:
            InvalidInputError: the state or an argument cannot be saved, or an array was changed meanwhile. With several
                ranks, an asynchronous save raises it at the next call, as on the other ranks.
            SnapstoreError: an earlier save failed, and no call has raised its error yet; this save did not begin.
        """
        self._check_open()
        if self.read_only:
            raise InvalidInputError("this SnapshotManager is read-only; make one with read_only=False to save")
        if self._job is None:
            check_ranks(self.run, False if self._alone else None, has_manager=True)
            self._background.raise_errors(f"{self.run}@{step}")
        try:
            step = check_step(step)
        except InvalidInputError as error:
            if self._job is not None:
                self._job.refuse(error)
            raise
        if not (force or self._is_due(step)):
            self._first_state.check(state)
            return SaveHandle(skipped=True)
        started = time.monotonic()
        self._first_state.note_save()
        self._background.check_inside()
        full = retention.stays_without_neighbours(self.keep, step, self.save_interval_steps)
        make = partial(
            SaveRequest, self.run, step, metrics=metrics, metadata=metadata, tags=tags, full=full, started=started
        )
        slot: LockSlot | None = None
        with nullcontext(0) if self._job is None else self._job.numbered() as number:
            handle = SaveHandle(skipped=self._leaves_out(step, force=force), tell=partial(self._hooks.tell, step))
            if not handle.skipped:
                request = make() if self._job is None else None
                with self._slot_after_pending(f"{self.run}@{step}") as slot, handle._beginning(slot):
                    if request is not None:
                        self._begin(handle, request, state, slot)
                    else:
                        self._begin_together(handle, make, state, slot, number)
        if not self._async or slot is None or not slot.handed_over:
            handle._await_return()
        if not handle.skipped and self._ending_at(step):
            self._end()
        return handle

    def _leaves_out(self, step: int, *, force: bool) -> bool:
        """Return whether this save is skipped; wait for the running one if this is the last save of a job."""
        if self._skip_busy and not force and not self._ending_at(step) and self._skips(step):
            log.info("run=%s step=%d skipped: the last save is still running", self.run, step)
            return True
        if not threading.current_thread().is_alive():  # an exit handler calls: the interpreter waits for no new thread
            self._async = False
        if self._ending is not None:
            self._await_running(step)
        return False

    def _skips(self, step: int) -> bool:
        """Return whether to skip a save because the last one still runs; rank 0 decides for all ranks."""
        is_busy = self._is_busy
        return is_busy() if self._job is None else self._job.decide_skip(f"{self.run}@{step}", is_busy)

    def _is_busy(self) -> bool:
        """Return whether a save runs; not one that a newer save would replace."""
        return self._background.is_busy() and not self._retrying.is_pending(self._running)

    def _slot_after_pending(self, ref: str) -> AbstractContextManager[LockSlot]:
        """Return `holding_slot` after the running save; one that is pending, because the store is away, is replaced."""
        while self._retrying.warns and not self._background.join(LOOK_S / 4):
            self._retrying.replace(self._running, ref)
        return self._background.holding_slot(ref)

    def prepare(self, state: Any) -> None:
        """Prepare for saves of a state, in the background: load kernels, and allocate and pin memory for its copies.

        The first save then takes no longer than later ones. Call it once the state is on its devices. A save waits
        until the preparation has ended.

        Args:
            state: as for `save`; its values do not matter.

        Raises:
            InvalidInputError: the state cannot be saved.
        """
        self._check_open()
        self._background.check_inside()
        if self.read_only or is_stream(state):  # the tensors of an iterator are not copied
            return
        while self._retrying.warns and not self._background.join(LOOK_S / 4):
            if self._retrying.is_pending(self._running):  # its copies lie where those of the next save will
                return
        with self._background.holding_slot("") as slot:
            self._first_state.forget()
            parts = flatten(state, of_rank=self._job is not None)
            self.repository.context.engines.start_loading()
            self._background.start(partial(self._background.take_memory, self._staging.prepare(parts)), slot)

    def _prepare_early(self, state: Any) -> None:
        if not self.read_only:
            self._first_state.prepare(state)

    def _begin(self, handle: SaveHandle, request: SaveRequest, state: Any, slot: LockSlot) -> None:
        """Run the save, or copy the state and leave the rest to a thread."""
        context, self._running = self.repository.context, request
        request.resolve(context, self.repository.lineage)
        learn = None if self._job is None else self._job.learner(request, self._staging)
        work: list[Callable[[], Sequence[PartInput]]] = []  # `_run` pops it, so that errors do not hold the state
        if is_stream(state):  # an iterator cannot be copied
            work.append(lambda: [inputs_of_stream(state, context.engines)])
        elif self._async or (self._retrying.warns and threading.current_thread().is_alive()):
            request.on_retry, handle._on_wait = handle._go_on, partial(self._retrying.hurry, request)
            work.append(self._staging.copy_state(state, learn))
            request.stall_s = time.monotonic() - request.started
            try:
                self._background.start(partial(self._run, handle, request, work, in_background=True), slot)
            except CapabilityError:
                self._staging.release_copies()
                raise
            return
        else:
            work.append(partial(self._staging.inputs, flatten(state, of_rank=self._job is not None), learn))
        self._run(handle, request, work, in_background=False)

    def _begin_together(
        self, handle: SaveHandle, make: Callable[[], SaveRequest], state: Any, slot: LockSlot, number: int
    ) -> None:
        """Begin a save with all ranks. An error ends the save on all ranks, and each raises it at the same call."""
        assert self._job is not None
        ref, handled = "", sys.exception()
        try:
            if is_stream(state) and self._job.ranks.count > 1:
                raise InvalidInputError("state: an iterator is saved by one process alone; pass a dict of the tensors")
            request = make()
            request.number, ref = number, request.ref
            self._begin(handle, request, state, slot)
        except BaseException as error:
            if not slot.handed_over:
                self._job.give_up(number, error)
            if not isinstance(error, Exception):
                raise
            clear_frames(error, handled)
            handle._finish(None, error)
            if self._async:
                self._background.note(handle, ref, error)

    def _run(
        self,
        handle: SaveHandle,
        request: SaveRequest,
        work: list[Callable[[], Sequence[PartInput]]],
        *,
        in_background: bool,
    ) -> None:
        """Save, then apply the policies. Takes the inputs out of `work`."""
        inputs: Sequence[PartInput] = ()
        handled, handle._thread = sys.exception(), threading.get_ident()
        context, lineage = self.repository.context, self.repository.lineage
        try:
            inputs = work.pop()()
            if self._job is not None and not inputs[0].once:
                snapshot = self._job.save(lineage, request, inputs, self._staging, self._retrying)
            else:
                staging = None if inputs[0].once else self._staging  # the tensors of an iterator are no bases
                retrying = self._retrying if in_background and staging else None
                snapshot = save(context, lineage, request, inputs, staging, retrying)
        except ReplacedError as error:
            if self._job is not None:
                self._job.give_up(request.number, error)
            log.info("run=%s step=%d: save %s has replaced this one", self.run, request.step, error)
            handle._finish(None, error, skipped=True)
            return
        except BaseException as error:  # noqa: BLE001  raised at the caller's next call, never lost
            del inputs  # else this frame of the error would hold them, gigabytes, until it is raised
            clear_frames(error, handled)
            try:
                if self._job is not None:
                    self._job.give_up(request.number, error)
            finally:
                is_noted = in_background and (self._async or handle._is_retried)
                self._background.fail(handle, request.ref, error, is_noted=is_noted)
            return
        handle._finish(snapshot, None)
        self._running = None
        del inputs
        if self._mirror is not None:
            self._mirror.note(snapshot)
        self._warn_of_unapplied()
        if self._leads and self._upkeep.follows(self.keep) and not self._stops_upkeep():
            self._retrying.upkeep(partial(self._upkeep.retain, self.keep))
        if in_background:
            self._background.take_memory(self._staging.prepare_next)

    def _stops_upkeep(self) -> bool:
        """Return whether to forget and delete no more: it would delay the last save, or `close(timeout=)`."""
        return self._background.is_given_up or (self._preemption is not None and self._preemption.is_told)

    # -- wait

    def wait_until_finished(self) -> None:
        """Wait for the running save, and raise the error of a save that failed in the background.

        A save that is tried again (`on_error="warn"`) has one more attempt, at once.
        """
        self._retrying.hurry(self._running)
        self._background.join()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raise the error of a save or retention that failed in the background since the last call; do not wait."""
        self._background.raise_errors()
        if (error := self._upkeep.error) is not None:
            self._upkeep.error = None
            raise error

    def close(self, timeout: float | None = None) -> None:
        """Wait for the running save, release memory and repository, and raise an error that happened in the background.

        With `TorchRanks`, rank 0 also waits until the other ranks have closed: at most a minute, or 5 s after an error.

        Args:
            timeout: give up the running save after this time, so that nothing of it is committed; None: wait for it.
                It is also the longest time that rank 0 waits for the others [s].

        Raises:
            SnapstoreError: a save failed, or was given up.
            TimeoutError: the store does not answer, so the save still runs, or its gc; at its end it releases both.
        """
        self._retrying.hurry(self._running)
        self._close(None if timeout is None else min(timeout, threading.TIMEOUT_MAX), None)

    def _close(self, timeout: float | None, error: BaseException | None) -> None:
        """Close; if an error has ended this rank, tell it to the other ranks."""
        if self._closed:
            return
        if timeout is None:
            self._retrying.hurry(self._running)
        end = None if timeout is None else time.monotonic() + timeout
        ended = self._background.join(timeout)
        if ended and error is None and self._upkeep.is_left:
            self._upkeep.begin_rest(self.keep, self._background, self._retrying)
            try:
                ended = self._background.join(None if end is None else max(0.0, end - time.monotonic()))
            except BaseException:  # Ctrl-C: the interpreter's exit waits for the thread
                self._background.is_given_up = True
                raise
        if not ended:
            self._background.is_given_up = True
            if self._running is not None:
                self._retrying.give_up(self._running, f"close(timeout={timeout:.6g}) has given it up")
            ended = self._background.join(GIVE_UP_S)
        if self._mirror is not None:
            self._mirror.close(None if end is None else max(0.0, end - time.monotonic()))
        self._closed = True  # a hook begins no save from here on
        self._hooks.drain(None if end is None else max(0.0, end - time.monotonic()))
        ended = ended and self._background.join(None if end is None else max(0.0, end - time.monotonic()))
        try:
            if self._job is not None:
                limit_s = None if end is None else max(GIVE_UP_S, end - time.monotonic())
                self._job.close(error, ends_channel=self._made_ranks, limit_s=limit_s)
        finally:  # until here, another signal does not end a process whose messages other ranks still read
            if self._ending is not None:
                self._ending.close()
        if not ended and not self._background.at_end(self._release):
            what = self._background.work_of(self._running)
            raise TimeoutError(f"run {self.run!r}: the {what} has not ended {timeout:.6g} s after close")
        self._release()
        if self._ending is not None and self._ending.stays:
            self._upkeep.error = None  # it is logged, and costs only space: the last save is committed
        self.check_for_errors()

    def _release(self) -> None:
        """Release memory and repository; no save runs any more."""
        self._staging.clear()
        self._first_state.forget()
        if self._owned and (self._mirror is None or self._mirror.has_ended):
            self.repository.close()

    # -- preemption

    def handle_preemption(
        self,
        *,
        end: bool = True,
        timeout: float = 25.0,
        signals: Collection[int] = (),
        notice: Notice | None = None,
    ) -> None:
        """Make SIGTERM, other signals or a notice cause one last save, at the same step on all ranks.

        Call it in the main thread. The handler only sets a flag; `close` restores the previous handlers. The last save
        does not: more signals neither end the process before Python has ended, nor change its status.

        Args:
            end: True: `should_save` is True at that step, and `save` there waits, closes this manager and ends the
                process. The status is 128 + the signal that came first (143 of SIGTERM), or 143 after a notice; of all
                ranks the same. False: the loop asks `reached_preemption`, saves and ends by itself.
            timeout: the longest wait for that save [s]; schedulers kill a process some time after the signal.
            signals: what tells the job beside SIGTERM: SIGUSR1, SIGUSR2, SIGHUP or SIGXCPU. Do not name a signal that
                the program uses: until `close`, its handler is not called.
            notice: what else tells it. A path: a file is there. An http(s) URL, or a `urllib.request.Request` with
                headers: the status is 200, and the body is neither empty nor FALSE nor NONE. A function: it returns
                True. A thread looks every 2 s until `close`. What cannot be read is no notice, and is logged once, as
                is an answer that takes longer than 2 s; such an answer still counts when it comes.

        Raises:
            InvalidInputError: this is not the main thread; or `signals` or `notice` is wrong.
        """
        self._check_open()
        if self._preemption is None:
            self._preemption = self._job.preemption() if self._job is not None else Preemption(None, "")
        before = self._ending
        self._ending = SignalHandler(self._preemption, end=end, timeout=timeout, signals=signals, notice=notice)
        if before is not None:
            before.close()

    def reached_preemption(self, step: int) -> bool:
        """Return whether the job is told to end, and this is the step to save at, or later; all ranks get the same.

        Call it at every step, on all ranks, after `handle_preemption`. It sends no message. After the signal it waits
        until a background thread has agreed on the step with the other ranks, for about 20 s at most.

        Raises:
            InvalidInputError: `handle_preemption` was not called.
        """
        if self._preemption is None:
            raise InvalidInputError("reached_preemption: call handle_preemption() once before the training loop")
        return self._preemption.reached(check_step(step))

    def _is_told_to_end(self, step: int) -> bool:
        """Return whether to save at this step and end; False without `handle_preemption`."""
        return self._preemption is not None and self.reached_preemption(step)

    def _ending_at(self, step: int) -> SignalHandler | None:
        ending = self._ending
        return ending if ending is not None and ending.ends and self.reached_preemption(step) else None

    def _await_running(self, step: int) -> None:
        """Wait for what runs; once the process is to end, for saves and gcs only as long as the timeout allows."""
        while not self._background.join(LOOK_S):
            self._retrying.replace(self._running, f"{self.run}@{step}")
            if (ending := self._ending_at(step)) and self._background.is_busy() and not ending.left_s():
                text = f"step={step} is not saved: the save before it still runs, or its gc"
                log.error("run=%s %s", self.run, text)
                self._hooks.tell(step, None, SnapstoreError(f"run {self.run!r}: {text}"), 1, False)
                self._end()

    def _end(self) -> None:
        """Wait for the last save, and end the process."""
        assert self._ending is not None
        told = self._ending.preemption
        log.warning("run=%s the last save: this process was told to end by %s", self.run, told.teller)
        self._retrying.end_soon()
        with self._ending.staying():
            self._close(self._ending.left_s(), None)
        raise SystemExit(told.status)

    def __enter__(self) -> SnapshotManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close(None, error)
        except Exception as failure:
            if error is None:
                raise
            log.error("run=%s a save failed as well: %s", self.run, failure)  # the caller gets the first error

    def _wait_idle(self) -> None:
        self._check_open()
        self._retrying.hurry(self._running)
        self._background.join()
        if self._retrying.warns:
            self._background.raise_errors()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError("this SnapshotManager is closed")
        if os.getpid() != self._pid:
            raise InvalidInputError("this SnapshotManager was made before a fork; make one in the child process")
