"""SnapshotManager: the training loop's face. Snapshot every N steps, keep by policy, wait for nothing but the copy.

The caller's thread flattens the state and copies it (staging.py); one thread per save does the rest: digest, encode,
put, commit, then forget and gc by policy. One save at a time: the next one waits for it, or is skipped. A failure in
the background is raised at the next call. The names are Orbax's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from _thread import LockType
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from . import retention
from .errors import AlreadyExistsError, IntegrityError, InvalidInputError, NotFoundError, SnapstoreError
from .format.checks import check_name, check_step
from .format.records import SaveRequest, Snapshot
from .options import SaveOptions
from .ranks import check as check_ranks
from .repository import Repository
from .storage.base import ObjectStore

log = logging.getLogger("snapstore")


class SaveHandle:
    """One save on its way. `skipped` says that none was begun: the step is off the interval, or the store was busy."""

    def __init__(self, *, skipped: bool = False) -> None:
        self.skipped = skipped
        self._finished = threading.Event()
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None
        if skipped:
            self._finished.set()

    def wait_staged(self) -> None:
        """Return once the state may change. `save` has seen to that already; kept for engines that stage later."""

    def done(self) -> bool:
        """Whether the save has committed, failed, or was skipped."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> Snapshot | None:
        """The committed snapshot; None for a skipped save. Waits up to `timeout` seconds.

        Raises:
            TimeoutError: not finished by then.
            SnapstoreError: the save failed.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the save has not finished within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._snapshot

    def _finish(self, snapshot: Snapshot | None, error: BaseException | None) -> None:
        self._snapshot, self._error = snapshot, error
        self._finished.set()


class SnapshotManager:
    """Snapshots of one run, from its training loop.

    Args:
        repository: a URL or path (made if it is not there), a store, or an open Repository.
        run: the run's name.
        save_interval_steps: `should_save` says yes at multiples of this.
        keep: retention policies, ORed; after every commit the rest is forgotten and collected in the background.
            They are stored, so that `snapstore forget --run` knows them.
        async_save: save in the background; else `save` returns when the snapshot is committed.
        on_busy: what `save` does while the last one is running: "wait" for it, or "skip"; with `force` it waits.
        staging: where the copy of CUDA tensors lies that a save reads in the background: "device" (milliseconds, up
            to twice their size of device memory), "host" (pinned memory, at the speed of the bus) or "auto": on the
            device if there is room. Without the packages for the GPU, or a GPU, in host memory.
        keep_base: hold the last snapshot's bytes where they were staged, as bases for the next; else bases are read
            back from the store.
        read_only: never write; for evaluation jobs.
        ranks: False: no other rank of torch.distributed saves this run. Snapshots of several ranks together are not
            built yet: without it a manager in one of several ranks is refused, here and at every save.
        options: how saves are stored, when the repository is opened here.

    Not for use across a fork, nor from a signal handler: set a flag there, and save from the loop.
    """

    def __init__(
        self, repository: str | Path | ObjectStore | Repository, *, run: str, save_interval_steps: int = 1,
        keep: Sequence[retention.Policy] = (), async_save: bool = True, on_busy: Literal["wait", "skip"] = "wait",
        staging: Literal["auto", "device", "host"] = "auto", keep_base: bool = True, read_only: bool = False,
        ranks: bool | None = None, options: SaveOptions | None = None,
    ) -> None:  # fmt: skip
        self.run = check_name("run", run)
        if not read_only:
            check_ranks(self.run, ranks)
        self._ranks = ranks
        if isinstance(save_interval_steps, bool) or not isinstance(save_interval_steps, int) or save_interval_steps < 1:
            raise InvalidInputError(f"save_interval_steps {save_interval_steps!r}: expected an integer of 1 or more")
        if on_busy not in ("wait", "skip"):
            raise InvalidInputError(f"on_busy {on_busy!r}: expected 'wait' or 'skip'")
        self.save_interval_steps = save_interval_steps
        self.keep = list(keep)
        if self.keep:
            retention.check(self.keep)
        self.read_only = read_only
        self._async, self._skip_busy = async_save, on_busy == "skip"
        self._owned = not isinstance(repository, Repository)
        self.repository = repository if isinstance(repository, Repository) else self._open(repository, options)
        from .save import pipeline  # noqa: F401  # before there are threads (threads.py)
        from .save.staging import Staging

        self._staging = Staging(self.repository.context.engines, keep_base=keep_base, mode=staging)
        if staging != "auto":
            self.repository.context.engines.required = True
        # One save at a time holds the slot: first the caller's thread, then the one in the background. A lock and not
        # Thread.join: one that is interrupted takes its thread for ended (CPython 3.11).
        self._slot = threading.Lock()
        self._inside: set[int] = set()  # threads that are inside save
        self._pid = os.getpid()
        self._errors: list[BaseException] = []  # of saves
        self._retention_error: BaseException | None = None  # costs space, so no save is refused for it
        self._closed = False
        if self.keep and not read_only:
            self.repository.set_policies(self.run, self.keep)

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
        """Whether `step` is a multiple of the interval."""
        return not self.read_only and check_step(step) % self.save_interval_steps == 0

    def save(
        self, step: int, state: Any, *, metrics: Mapping[str, float] | None = None, metadata: Any = None,
        tags: Sequence[str] = (), force: bool = False,
    ) -> SaveHandle:  # fmt: skip
        """Snapshot the state; returns as soon as it may change again.

        Args:
            step: a step off the interval is skipped unless `force`.
            state: any nesting of dict, list and tuple over tensors, arrays, plain values and objects with state_dict.
            metrics, metadata, tags: see `Repository.save`.

        Raises:
            InvalidInputError: the state or an argument cannot be saved, or an array of the state was changed meanwhile.
            SnapstoreError: an earlier save failed in the background (this one was not begun).
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
        if self._skip_busy and not force and self._slot.locked():
            log.info("run=%s step=%d skipped: the last save is still running", self.run, step)
            return SaveHandle(skipped=True)
        self._check_inside()
        if not threading.current_thread().is_alive():  # in an exit handler: no more threads are waited for
            self._async = False
        thread, launched = threading.get_ident(), False
        # Who pops the slot out of it releases the slot: this thread, or the one that goes on in the background. Ctrl-C
        # may strike behind any call, so one call acquires and puts it in, and one takes it out and releases.
        token: dict[str, LockType] = {}
        give_back = map(LockType.release, filter(None, map(token.pop, ["slot"], [None])))
        try:
            self._inside.add(thread)
            token.update(zip(["slot"], filter(LockType.acquire, [self._slot]), strict=False))
            self._raise_of_saves()
            full = retention.keeps_for_long(self.keep, step)
            request = self.repository.request(self.run, step, None, (), metrics, metadata, tags, full)
            handle = self._begin(request, state, started, token)
            launched = self._async
        finally:
            try:
                if not launched:
                    any(give_back)
            finally:
                self._inside.discard(thread)
        if not self._async:
            handle.result()
        return handle

    def _begin(self, request: SaveRequest, state: Any, started: float, token: dict[str, LockType]) -> SaveHandle:
        """Run the save, or copy the state and leave the rest to a thread."""
        from .format import chunking
        from .state.flatten import flatten

        parts = flatten(state)
        handle = SaveHandle()
        work: list[tuple[Any, Any]] = []  # whoever begins takes it out: an error's frames should not hold it
        if not self._async and not any(self._staging.on_device(held.value) for p in parts for held in p.arrays):
            work.append((parts, None))
            del parts
            self._run(handle, request, work, started, None)
            return handle
        try:
            work.append((parts, self._staging.copy(parts, chunking.INLINE_BYTES)))
        except InvalidInputError:
            self._staging.failed()
            raise
        for part in parts:
            part.arrays.clear()  # the state itself is no business of the background
        del parts
        stall_s = time.monotonic() - started
        if not self._async:
            self._run(handle, request, work, started, None)
            return handle

        def run() -> None:
            slot = token.pop("slot", None)
            if slot is not None:  # else the caller was interrupted and has given up
                try:
                    with self.repository.context.engines.in_background():
                        self._run(handle, request, work, started, stall_s)
                finally:
                    slot.release()

        # Not a daemon: the interpreter's exit waits for it, and the snapshot is whole.
        threading.Thread(target=run, name=f"snapstore-{self.run}").start()
        return handle

    def _run(
        self, handle: SaveHandle, request: SaveRequest, work: list[tuple[Any, Any]], started: float,
        stall_s: float | None,
    ) -> None:  # fmt: skip
        """The save and, once it is durable, what the policies ask for. Takes (parts, copies) out of `work`."""
        parts, copies = work.pop()
        try:
            snapshot = self.repository.write(
                request, parts, staging=self._staging, copies=copies, started=started, stall_s=stall_s
            )
        except BaseException as error:  # noqa: BLE001  raised at the caller's next call, never lost
            self._staging.failed()
            parts = copies = None  # else the error's frames would hold them, gigabytes, until it is raised
            traceback.clear_frames(error.__traceback__)
            if self._async:
                self._errors.append(error)
                log.error("run=%s step=%d save failed: %s", self.run, request.step, str(error))
            handle._finish(None, error)
            return
        handle._finish(snapshot, None)
        if self.keep:
            try:
                self._retain()
            except Exception as error:  # noqa: BLE001  likewise, though not by `save`
                log.error("run=%s nothing is forgotten or collected until this is mended: %s", self.run, error)
                self._retention_error = error

    def _retain(self) -> None:
        """Forget and collect. What fails here costs space, not snapshots: only damage is raised, not by `save`."""
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
        """Wait for the save that is running, and raise what failed in the background."""
        self._join()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raise what failed in the background since the last call, retention included; does not wait."""
        self._raise_of_saves()
        if (error := self._retention_error) is not None:
            self._retention_error = None
            raise error

    def _raise_of_saves(self) -> None:
        if self._errors:
            error, self._errors = self._errors[0], []
            raise error

    def _join(self) -> None:
        """Wait until no save holds the slot."""
        if os.getpid() == self._pid:  # a forked child has no such thread
            self._check_inside()
            with self._slot:
                pass

    def _check_inside(self) -> None:
        """Refuse a call from within save in the same thread: it would wait for itself."""
        if threading.get_ident() in self._inside:
            raise InvalidInputError(
                "SnapshotManager was called while this thread is inside save (from a signal handler?); "
                "set a flag in the handler, and save or close from the training loop"
            )

    def close(self) -> None:
        """Wait for the running save, let go of memory and repository, and raise what failed in the background."""
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
        """Steps with a committed snapshot, ascending, each once."""
        return sorted({snapshot.step for snapshot in self.repository.snapshots(self.run)})

    def latest_step(self) -> int | None:
        """Step of the newest committed snapshot; None when there is none."""
        newest = self.repository.view().latest(self.run)
        return newest.step if newest else None

    def best_step(self) -> int | None:
        """Step of the best committed snapshot by the first KeepBest policy; None when no snapshot has its metric.

        Raises:
            InvalidInputError: no KeepBest among the policies.
        """
        for policy in self.keep:
            if isinstance(policy, retention.KeepBest):
                ranked = policy.ranked(retention.current(self.repository.snapshots(self.run)))
                return ranked[0].step if ranked else None
        raise InvalidInputError("best_step: no KeepBest among the policies; pass keep=[KeepBest('metric'), ...]")

    def restore(
        self, step: int | str | None = None, *, into: Any = None, keys: str | Sequence[str] | None = None,
        device: Any = None,
    ) -> Any:  # fmt: skip
        """The state of a step (or tag; None: the newest), or `into` filled with it (then the Snapshot is returned).

        Waits for the save that is running. See `Repository.restore`.
        """
        self._check_open()
        self._join()
        if step is None:
            newest = self.repository.view().latest(self.run)
            if newest is None:
                raise NotFoundError(f"run {self.run!r}: has no committed snapshot in {self.repository.url} to restore")
            ref = f"{self.run}@latest"
        else:
            ref = f"{self.run}@{step if isinstance(step, str) else check_step(step)}"
        snapshot, state = self.repository.read(ref, into, keys, device)
        self.repository.go_on_from(self.run, snapshot)
        return snapshot if into is not None else state
