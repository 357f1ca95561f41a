"""SnapshotManager: what a training loop calls. Snapshot every N steps, keep by policy, wait only for the copy.

The caller's thread flattens the state and copies it (save/staging.py). One thread per save does the rest: hash, encode,
put, commit, then forget and gc by policy. One save runs at a time: the next one waits for it, or is skipped. A failure
in the background is raised at the next call. The names are Orbax's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from . import retention
from .errors import AlreadyExistsError, IntegrityError, InvalidInputError, NotFoundError, SnapstoreError
from .format.argument_checks import check_name, check_step
from .format.records import Snapshot
from .options import SaveOptions
from .ranks import check as check_ranks
from .repository import Repository
from .save.handle import SaveHandle, Slot
from .storage.base import ObjectStore
from .threads import no_threads

if TYPE_CHECKING:
    from .save.inputs import PartInput, SaveRequest

log = logging.getLogger("snapstore")
#: The thread of a save gives the interpreter back to its caller first, who would wait for it 5 ms otherwise [s].
YIELD_S = 0.001


class SnapshotManager:
    """Snapshots of one run, from its training loop.

    Args:
        repository: a URL or path, where a repository is made if there is none; a store; or an open Repository.
        run: the name of the run.
        parent: reference of the snapshot, mostly of another run, that the first save of a new run goes on from: a fork.
            Once the run has a snapshot, it does nothing.
        save_interval_steps: `should_save` is True at multiples of this.
        keep: a retention policy, or several, ORed. After each commit, the other snapshots are forgotten and collected
            in the background. The policies are stored, so that `snapstore forget --run` knows them.
        async_save: save in the background; else `save` returns when the snapshot is committed.
        on_busy: while a save runs, `save` waits for it ("wait"), or skips ("skip"); with `force` it waits.
        staging: where the copies of CUDA tensors lie. "device": in device memory, up to twice their size; takes
            milliseconds. "host": in pinned memory, at the speed of the bus. "auto": on the device if there is room.
            Without a GPU, or the packages for it, they lie in host memory.
        keep_base: keep the bytes of the last snapshot where they were staged, as bases for the next; else bases are
            read back from the store.
        read_only: never write; for evaluation jobs.
        ranks: False says that no other rank of torch.distributed saves this run. Snapshots of several ranks together
            are not built yet: without it, a manager on one of several ranks is an error.
        options: how saves are stored, if the repository is opened here.

    Do not use it across a fork, or from a signal handler: set a flag there, and save from the loop.
    """

    def __init__(
        self,
        repository: str | Path | ObjectStore | Repository,
        *,
        run: str,
        parent: str | None = None,
        save_interval_steps: int = 1,
        keep: retention.Policy | Sequence[retention.Policy] = (),
        async_save: bool = True,
        on_busy: Literal["wait", "skip"] = "wait",
        staging: Literal["auto", "device", "host"] = "auto",
        keep_base: bool = True,
        read_only: bool = False,
        ranks: bool | None = None,
        options: SaveOptions | None = None,
    ) -> None:
        self.run = check_name("run", run)
        if not read_only:
            check_ranks(self.run, ranks)
        self._ranks = ranks
        if isinstance(save_interval_steps, bool) or not isinstance(save_interval_steps, int) or save_interval_steps < 1:
            raise InvalidInputError(f"save_interval_steps {save_interval_steps!r}: expected an integer of 1 or more")
        if on_busy not in ("wait", "skip"):
            raise InvalidInputError(f"on_busy {on_busy!r}: expected 'wait' or 'skip'")
        self.save_interval_steps = save_interval_steps
        self.keep = retention.check(keep)
        self.read_only = read_only
        self._async, self._skip_busy = async_save, on_busy == "skip"
        self._owned = not isinstance(repository, Repository)
        self.repository = repository if isinstance(repository, Repository) else self._open(repository, options)
        from .save import pipeline  # noqa: F401  # before there are threads (threads.py)
        from .save.staging import Staging

        self._staging = Staging(self.repository.context.engines, keep_base=keep_base, mode=staging)
        if staging != "auto":
            self.repository.context.engines.required = True
        if not read_only:
            self.repository.context.engines.start_loading()
        self._saving = threading.Lock()  # see Slot
        self._inside: set[int] = set()  # threads that are inside save
        self._pid = os.getpid()
        self._errors: list[BaseException] = []  # of saves
        self._retention_error: BaseException | None = None  # costs space, so no save is refused for it
        self._closed = False
        if self.keep and not read_only:
            self.repository.set_policies(self.run, self.keep)
        if parent is not None and (view := self.repository.view()).newest(self.run) is None:
            self.repository.lineage.go_on_from(self.run, view.resolve(parent))

    def __repr__(self) -> str:
        return f"SnapshotManager({self.repository.url!r}, run={self.run!r})"

    def _open(self, url: str | Path | ObjectStore, options: SaveOptions | None) -> Repository:
        try:
            return Repository.open(url, options=options)
        except NotFoundError:
            if self.read_only:
                raise
            try:
                return Repository.create(url, options=options)
            except AlreadyExistsError:  # another process was first
                return Repository.open(url, options=options)

    # -- save

    def should_save(self, step: int) -> bool:
        """Return whether `step` is a multiple of the interval."""
        return not self.read_only and check_step(step) % self.save_interval_steps == 0

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
        """Snapshot the state; return as soon as the state may change again.

        Args:
            step: a step off the interval is skipped unless `force`.
            state: any nesting of dict, list and tuple over tensors, arrays, plain values and objects with state_dict.
                Or an iterator of (dotted path, tensor): it cannot be copied, so `save` returns when it is committed.
            metrics, metadata, tags: see `Repository.save`.

        Raises:
            InvalidInputError: the state or an argument cannot be saved, or an array was changed meanwhile.
            SnapstoreError: an earlier save failed in the background; this one was not begun.
        """
        self._check_open()
        if self.read_only:
            raise InvalidInputError("this SnapshotManager is read-only; make one with read_only=False to save")
        check_ranks(self.run, self._ranks)
        step = check_step(step)
        self._raise_of_saves()
        if not (force or self.should_save(step)):
            return SaveHandle(skipped=True)
        started = time.monotonic()
        if self._skip_busy and not force and self._saving.locked():
            log.info("run=%s step=%d skipped: the last save is still running", self.run, step)
            return SaveHandle(skipped=True)
        self._check_inside()
        if not threading.current_thread().is_alive():  # in an exit handler: the interpreter waits for no more threads
            self._async = False
        full = retention.stays_without_neighbours(self.keep, step, self.save_interval_steps)
        from .save.inputs import SaveRequest

        request = SaveRequest(self.run, step, metrics=metrics, metadata=metadata, tags=tags, full=full, started=started)
        handle = SaveHandle()
        with self._holding_slot() as slot:
            self._begin(handle, request, state, slot)
        if not slot.handed_over:
            handle.result()
        return handle

    def prepare(self, state: Any) -> None:
        """Get ready in the background for saves of a state: load kernels, and take and lock memory for its copies.

        The first save then waits no longer than later ones. Call it once the state is on its devices; a save waits
        until this has ended.

        Args:
            state: as for `save`; its values do not matter.

        Raises:
            InvalidInputError: the state cannot be saved.
        """
        self._check_open()
        self._check_inside()
        if self.read_only:
            return
        from .save.inputs import inputs_of
        from .state.flatten import flatten

        with self._holding_slot() as slot:
            inputs = inputs_of(flatten(state))
            self.repository.context.engines.start_loading()
            self._in_background(partial(self._take_memory, partial(self._staging.prepare, inputs)), slot)

    def _take_memory(self, take: Callable[[], object]) -> None:
        """Take memory for the copies of a later save, in the background."""
        try:
            take()
        except Exception as error:  # noqa: BLE001  a save finds out, and says so
            log.warning("run=%s the memory for copies could not be taken ahead: %s", self.run, error)

    @contextmanager
    def _holding_slot(self) -> Iterator[Slot]:
        """Wait for the running save, and hold the slot, until a thread in the background takes it over."""
        thread, slot = threading.get_ident(), Slot(self._saving)
        try:
            self._inside.add(thread)
            slot.acquire()
            self._raise_of_saves()
            yield slot
        finally:
            try:
                if not slot.handed_over:
                    slot.release()
            finally:
                self._inside.discard(thread)

    def _begin(self, handle: SaveHandle, request: SaveRequest, state: Any, slot: Slot) -> None:
        """Run the save, or copy the state and leave the rest to a thread."""
        from .save.inputs import inputs_of
        from .save.streaming import inputs_of_stream, is_stream
        from .state.flatten import flatten

        context = self.repository.context
        request.resolve(context, self.repository.lineage)
        work: list[Callable[[], Sequence[PartInput]]] = []  # `_run` takes it out: errors should not hold the state
        if is_stream(state):  # nothing can copy it
            work.append(lambda: [inputs_of_stream(state, context.engines)])
        elif self._async:
            work.append(self._staging.copy_state(state))
            request.stall_s = time.monotonic() - request.started
            self._in_background(partial(self._run, handle, request, work, in_background=True), slot)
            return
        else:
            parts = flatten(state)
            copies = any(self._staging.on_device(held.value) for part in parts for held in part.arrays)
            work.append(partial(self._staging.copy if copies else inputs_of, parts))
            del parts
        self._run(handle, request, work, in_background=False)

    def _in_background(self, function: Callable[[], object], slot: Slot) -> None:
        """Run a function in a thread of its own, which holds the slot."""

        def run() -> None:
            time.sleep(YIELD_S)
            lock = slot.hand_over()
            if lock is not None:
                try:
                    with self.repository.context.engines.in_background():
                        function()
                finally:
                    lock.release()

        # Not a daemon: the interpreter's exit waits for it, and the snapshot is whole.
        try:
            threading.Thread(target=run, name=f"snapstore-{self.run}").start()
            slot.handed_over = True
        except RuntimeError as error:
            self._staging.release_copies()
            raise no_threads() from error

    def _run(
        self,
        handle: SaveHandle,
        request: SaveRequest,
        work: list[Callable[[], Sequence[PartInput]]],
        *,
        in_background: bool,
    ) -> None:
        """Save, then apply the policies. Takes the inputs out of `work`."""
        from .save.pipeline import save

        inputs: Sequence[PartInput] = ()
        try:
            inputs = work.pop()()
            staging = None if inputs[0].once else self._staging  # the tensors of an iterator are not kept as bases
            snapshot = save(self.repository.context, self.repository.lineage, request, inputs, staging)
        except BaseException as error:  # noqa: BLE001  raised at the caller's next call, never lost
            del inputs  # else the error's frames would hold them, gigabytes, until it is raised
            traceback.clear_frames(error.__traceback__)
            if in_background:
                self._errors.append(error)
                log.error("run=%s step=%d save failed: %s", self.run, request.step, str(error))
            handle._finish(None, error)
            return
        handle._finish(snapshot, None)
        del inputs
        if self.keep:
            try:
                self._retain()
            except Exception as error:  # noqa: BLE001  likewise, though not by `save`
                log.error("run=%s nothing is forgotten or deleted until this is repaired: %s", self.run, error)
                self._retention_error = error
        if in_background:
            self._take_memory(self._staging.prepare_next)

    def _retain(self) -> None:
        """Forget and collect. A failure costs space, not snapshots: only damage is raised, and not by `save`."""
        try:
            self._retention_error = None
            if self.repository.forget(self.keep, run=self.run, force=True).forgotten:
                self.repository.gc()
        except IntegrityError:
            raise
        except SnapstoreError as error:
            log.warning("run=%s retention failed, the next save tries again: %s", self.run, error)

    # -- wait

    def wait_until_finished(self) -> None:
        """Wait for the running save, and raise the error of a save that failed in the background."""
        self._join()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raise what failed in the background since the last call, retention included. It does not wait."""
        self._raise_of_saves()
        if (error := self._retention_error) is not None:
            self._retention_error = None
            raise error

    def _raise_of_saves(self) -> None:
        if self._errors:
            error, self._errors = self._errors[0], []
            raise error

    def _join(self) -> None:
        """Wait until no save runs."""
        if os.getpid() == self._pid:  # a forked child has no such thread
            self._check_inside()
            with self._saving:
                pass

    def _check_inside(self) -> None:
        """Raise for a call from within `save` in the same thread: it would wait for itself."""
        if threading.get_ident() in self._inside:
            raise InvalidInputError(
                "SnapshotManager was called while this thread is inside save (from a signal handler?); "
                "set a flag in the handler, and save or close from the training loop"
            )

    def close(self) -> None:
        """Wait for the running save, release memory and repository, and raise what failed in the background."""
        if self._closed:
            return
        self._join()
        self._closed = True
        self._staging.clear()
        if self._owned:
            self.repository.close()
        self.check_for_errors()

    def __enter__(self) -> SnapshotManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            log.error("run=%s a save failed as well: %s", self.run, failure)  # the first error is the one to see

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError("this SnapshotManager is closed")
        if os.getpid() != self._pid:
            raise InvalidInputError("this SnapshotManager was made before a fork; make one in the child process")

    # -- look and restore

    def all_steps(self) -> list[int]:
        """Return the steps that have a committed snapshot, ascending, each once."""
        return sorted({snapshot.step for snapshot in self.repository.snapshots(self.run)})

    def latest_step(self) -> int | None:
        """Return the step of the newest committed snapshot, by the order of the saves; None if there is none.

        After a return to an older step this may not be the highest step, which Orbax calls the latest.
        """
        newest = self.repository.view().latest(self.run)
        return newest.step if newest else None

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
                ranked = policy.ranked(retention.current(self.repository.snapshots(self.run)))
                return ranked[0].step if ranked else None
        raise InvalidInputError("best_step: no KeepBest among the policies; pass keep=[KeepBest('metric'), ...]")

    def restore(
        self,
        step: int | str | None = None,
        *,
        keys: str | Sequence[str] | None = None,
        device: Any = None,
        types: Sequence[type] = (),
    ) -> Any:
        """Return the state of a step (or tag; None: the newest), once no save is running. See `Repository.restore`.

        The run's next save goes on from it.
        """
        from .check.newest_whole import newest_whole_named
        from .restore.pipeline import read

        context, ref = self.repository.context, self._ref(step)
        with newest_whole_named(context, ref):
            snapshot, state = read(context, ref, keys=keys, device=device, types=types)
        self.repository.lineage.go_on_from(self.run, snapshot)
        return state

    def restore_into(
        self,
        target: Any,
        step: int | str | None = None,
        *,
        keys: str | Sequence[str] | None = None,
        types: Sequence[type] = (),
    ) -> Snapshot:
        """Fill `target` with the state of a step (or tag; None: the newest), and return the snapshot.

        Waits for the running save. See `Repository.restore_into`. The run's next save goes on from it.
        """
        from .check.newest_whole import newest_whole_named
        from .restore.pipeline import read_into

        context, ref = self.repository.context, self._ref(step)
        with newest_whole_named(context, ref):
            snapshot = read_into(context, ref, target, keys=keys, types=types)
        self.repository.lineage.go_on_from(self.run, snapshot)
        return snapshot

    def _ref(self, step: int | str | None) -> str:
        """Return the reference of a step, once no save is running."""
        self._check_open()
        self._join()
        if step is not None:
            return f"{self.run}@{step if isinstance(step, str) else check_step(step)}"
        if self.repository.view().latest(self.run) is None:
            raise NotFoundError(f"run {self.run!r}: has no committed snapshot in {self.repository.url} to restore")
        return f"{self.run}@latest"
