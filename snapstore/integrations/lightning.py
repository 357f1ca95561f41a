"""Lightning: a CheckpointIO that leaves references in place of checkpoint files, and a callback with our policies.

    Trainer(plugins=[SnapstoreCheckpointIO("/data/snapshots", run="exp1")])          # ModelCheckpoint stays as it is
    Trainer(callbacks=[SnapshotCallback(partial(SnapshotManager, "/data/snapshots", run="exp1", ...))])

In: the checkpoint that a Trainer dumps. Out: snapshots. Invariants: a reference file is written after the snapshot that
it names is durable, and a snapshot is forgotten after the last file that this process wrote for it is gone. After each
call the same files are there as with files of Lightning, which looks at the disk for a free name. Both namespaces work,
`lightning` and `pytorch_lightning`: the one that the program imported first, or both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Unpack

from ..errors import CapabilityError, InvalidInputError, NotFoundError, SnapstoreError
from ..manager import SnapshotManager
from ..options import SaveOptions
from ..repository import Repository
from ..retention import KeepBest
from ..save.background import SaveHandle
from ..save.hooks import HookOptions
from ..state.walk.per_rank import PerRank
from ..state.walk.rng import RngState
from ..state.walk.stateful import OptimizerState
from ..text import log, quoted
from ..threads import imported
from . import references
from .lightning_loops import OWN, checkpoint_of, connector, require_ours, validates_next, with_classes, with_names
from .stored_optimizers import StoredOptimizers, put_back_by_name

_NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
_SHARDED, _REFUSED = ("FSDPStrategy", "ModelParallelStrategy"), ("DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")
#: The parts of a checkpoint that all ranks hold together; each rank keeps its own of the others.
_TENSORS = ("state_dict", "optimizer_states")
_END_OF_EPOCH, _VALIDATION = "the end of its epoch", "its validation"


def _import() -> list[Any]:
    """Return the namespaces of Lightning that are imported; else the first that is installed."""
    found = [module for name in _NAMESPACES if (module := imported(name))]
    for name in () if found else _NAMESPACES:
        with suppress(ModuleNotFoundError):
            return [import_module(name)]
    if not found:
        raise CapabilityError("Lightning is not installed; run: pip install 'snapstore[lightning]'")
    return found


def _base(*path: str) -> Any:
    """Return a subclass of the class in each namespace, so that the Trainers of all of them accept it."""
    kinds = dict.fromkeys(getattr(import_module(f"{one.__name__}.{path[0]}"), path[1]) for one in _import())
    return type(path[1], tuple(kinds), {})


_CheckpointIO: Any = _base("plugins.io", "CheckpointIO")
_Checkpoint: Any = _base("callbacks", "Checkpoint")


class SnapstoreCheckpointIO(_CheckpointIO):  # type: ignore[misc]  # a class of Lightning
    """Stores checkpoints of a Trainer as snapshots of a run, and leaves a small reference file at each path.

    The file is JSON: the repository, the run, the step and the id of the snapshot. `ModelCheckpoint`,
    `fit(ckpt_path=)` and `Trainer.save_checkpoint` work as with files. One process writes: rank 0.

    Args:
        repository: a URL or path, where a repository is made if there is none; or an open Repository.
        run: the name of the run.
        async_save: a save in place of a file returns once the state is copied; the new reference appears after the
            commit. A save to a path without a file always waits for the commit: Lightning would use the name again.
        types: classes of values in a checkpoint, such as hyperparameters, that a load creates again.
        options: how saves are stored, if the repository is opened here.
        hooks: `on_commit` and `on_failure`, as `SnapshotManager` has them.

    FSDP and ModelParallel strategies with sharded checkpoints do not use a CheckpointIO: use `SnapshotCallback`.
    """

    def __init__(
        self,
        repository: str | Path | Repository,
        *,
        run: str,
        async_save: bool = True,
        types: Sequence[type] = (),
        options: SaveOptions | None = None,
        **hooks: Unpack[HookOptions],
    ) -> None:
        super().__init__()
        self.run = run
        self._where, self._options, self._types, self._async = repository, options, types, async_save
        self._hooks = hooks
        self._manager: SnapshotManager | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._pending: dict[Future[None], str | None] = {}  # work -> the path of the file that it replaces

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save a checkpoint, and write a reference to it at `path` once it is committed.

        With `async_save` it does not wait for the commit if there is a file at `path`.

        Args:
            checkpoint: containers of tensors and plain values; its `global_step` is the step.
            path: a local path, or a URL of fsspec.

        Raises:
            TypeError: with `storage_options`.
            InvalidInputError: the checkpoint holds a value that cannot be saved, which the error names; or `path` is a
                folder.
            SnapstoreError: this save failed, or an earlier one in the background.
        """
        if storage_options is not None:
            raise TypeError("storage_options: SnapstoreCheckpointIO takes none; pass options=SaveOptions(...) to it")
        path = os.fspath(path)
        replaces = references.has_file(path)
        self._wait(only_ended=replaces or path not in self._pending.values())
        step = checkpoint.get("global_step", checkpoint.get("step", 0))
        handle = self._opened().save(step, with_names(checkpoint), force=True, metadata={"path": path})
        if replaces:
            self._do(partial(self._publish, handle, path), path)
        else:
            self._publish(handle, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint that the reference at `path` names.

        Args:
            map_location: a device for all tensors; None or a function: host memory.
            weights_only: ignored, since nothing is pickled.

        Raises:
            NotFoundError: there is no file; or the snapshot that it names is gone.
            FormatError: the file is not a reference.
            InvalidInputError: `map_location` is a dict.
        """
        self._wait()
        if isinstance(map_location, dict):
            raise InvalidInputError("map_location: expected a device or None; tensors are not mapped one by one")
        where = self._where if self._manager is None else self._manager.repository
        return with_classes(references.restore(os.fspath(path), where, map_location, self._types))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the reference at `path`; forget its snapshot and run gc, with `async_save` in the background.

        A tagged snapshot is kept. If there is no file, do nothing. An error of forget or gc is only logged.

        Raises:
            SnapstoreError: an earlier save failed in the background.
        """
        path = os.fspath(path)
        self._wait(only_ended=path not in self._pending.values())
        named = references.find(path)
        references.remove(path)
        if named is not None:
            self._do(partial(self._forget, named))

    def teardown(self) -> None:
        """Wait for all saves and removals, close the repository, and raise their first error. Later calls reopen it."""
        try:
            self._wait()
        finally:
            manager, self._manager = self._manager, None
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.shutdown()
            if manager is not None:
                manager.close()

    # -- one after the other, in the background

    def _opened(self) -> SnapshotManager:
        if self._manager is None:
            self._manager = SnapshotManager(
                self._where, run=self.run, ranks=False, async_save=self._async, options=self._options, **self._hooks
            )
        return self._manager

    def _do(self, work: Callable[[], None], path: str | None = None) -> None:
        """Work in the background, with `async_save`; `path` is that of the file that the work replaces."""
        if not self._async:
            work()
            return
        self._opened()
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="snapstore-references")
        self._pending[self._worker.submit(work)] = path

    def _wait(self, *, only_ended: bool = False) -> None:
        """Wait for the work in the background, or with `only_ended` only for finished work; raise its first error."""
        ended = [one for one in self._pending if one.done() or not only_ended]
        for one in ended:
            del self._pending[one]
        for error in filter(None, [one.exception() for one in ended]):
            raise error

    def _publish(self, handle: SaveHandle, path: str) -> None:
        """Write a reference once its snapshot is committed; forget the snapshot that the old reference named."""
        try:
            snapshot = handle.result()
        except SnapstoreError:
            with suppress(SnapstoreError):
                self._opened().check_for_errors()  # the error is raised here, so not by the next save too
            raise
        assert snapshot is not None
        repository = self._opened().repository
        before = references.find(path)
        references.write(path, repository, snapshot)
        if before is not None and before["snapshot"] != snapshot.id:
            self._forget(before)

    def _forget(self, named: dict[str, Any]) -> None:
        """Forget the snapshot of a reference that is gone, and run gc."""
        repository = self._opened().repository
        if named["uuid"] != repository.config.uuid or named["run"] != self.run:
            return  # a file of another run, copied here
        try:
            repository.forget_snapshots([f"id:{named['snapshot']}"], force=True)
            repository.gc()
        except NotFoundError:
            return
        except InvalidInputError as error:
            log.info("run=%s step=%s stays: %s", named["run"], named["step"], error)
        except SnapstoreError as error:  # it costs only space, and must not end a training
            log.error("run=%s step=%s its file is gone, but its bytes stay: %s", named["run"], named["step"], error)


# -- the callback


class SnapshotCallback(_Checkpoint):  # type: ignore[misc]  # a class of Lightning
    """Saves the whole state of a Trainer by the policies of a SnapshotManager, and resumes it.

    A snapshot is Lightning's checkpoint (model, optimizers, schedulers, loops, callbacks, precision, datamodule,
    hyperparameters), with the random generators of Python, NumPy and torch of each rank. Several ranks save one
    snapshot together; with FSDP and ModelParallel strategies each rank saves its shards.

    With `fast_dev_run` it neither saves nor resumes.

    Args:
        manager: a SnapshotManager; or a function that makes one, which is called in `fit`, when the ranks of the job
            are known: on several ranks pass a function. The callback closes a manager that the function made.
        when: "step": save after a batch if the manager's `should_save` says so; if a batch makes several optimizer
            steps, and one of them is a multiple of the interval, save after it too; if a validation follows the batch,
            save after that. "validation": save after each validation, when its metrics are there. After the last batch
            of an epoch, both save at the end of the epoch.
        resume: "latest": `fit` resumes from the newest snapshot, if there is one and no `ckpt_path` is given; a step or
            tag: from that snapshot; None: it does not resume.
        metrics: names in `trainer.callback_metrics` that are stored with a snapshot; the metrics of `KeepBest` policies
            are always stored. On several ranks log them with `sync_dist=True`.
        per_rank: if another number of ranks resumes: the rank whose loops, callbacks and generators all ranks take.

    Raises:
        InvalidInputError: by `fit`: the strategy keeps its state in a way that this callback does not know; another
            callback of this kind is to resume, too; or something else has saved the snapshot to resume from.
        CapabilityError: by `fit`: this release of Lightning lacks what the callback calls.
        SnapstoreError: by `fit`: a save failed, also one of an earlier `fit` with the same manager.
    """

    best_model_path = ""  # so that ckpt_path="best" raises Lightning's own error, which says what to do

    def __init__(
        self,
        manager: SnapshotManager | Callable[[], SnapshotManager],
        *,
        when: Literal["step", "validation"] = "step",
        resume: int | str | None = "latest",
        metrics: Sequence[str] = (),
        per_rank: Literal["same"] | int = "same",
    ) -> None:
        super().__init__()
        if when not in ("step", "validation"):
            raise InvalidInputError(f"when {quoted(when)}: expected 'step' or 'validation'")
        self._given, self._when, self._resume = manager, when, resume
        self._metrics, self._per_rank = tuple(metrics), per_rank
        self._manager: SnapshotManager | None = None  # None outside a `fit`, and with `fast_dev_run`
        self._restored: dict[str, Any] | None = None  # the checkpoint that is being loaded
        self._stored: StoredOptimizers | None = None  # the states of optimizers in it
        self._last_step = self._seen_step = 0
        self._awaited = ""  # the event of Lightning for which a save that is due waits

    # -- hooks of a fit, in this order

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the manager, and pass the snapshot to resume from to the Trainer, which loads it like a file."""
        if stage != "fit":
            return
        _require_known(trainer.strategy)
        _require_one_resume([one for one in trainer.callbacks if isinstance(one, SnapshotCallback)])
        self._restored = self._stored = None
        if trainer.fast_dev_run:  # a test of some batches, which must leave no snapshot to resume from
            return
        if self._manager is None:
            self._manager = self._given if isinstance(self._given, SnapshotManager) else self._given()
        manager = self._manager
        manager.wait_until_finished()  # a fit that an error has ended may have begun a save
        step = manager.latest_step() if self._resume == "latest" else self._resume
        if step is None:
            return
        if _is_sharded(trainer.strategy):
            self._restored = {"step": step}
        else:
            restored = manager.restore(step, device="cpu", per_rank=self._per_rank)
            require_ours(manager.run, step, restored, OWN)
            self._restored, self._stored = with_classes(restored), StoredOptimizers(manager, step, "optimizer_states")
            connector(trainer)._loaded_checkpoint = checkpoint_of(self._restored)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the tensors of a sharded strategy, which exist only now; check the optimizers of any other one.

        Then set the random generators.
        """
        if trainer.ckpt_path is not None:
            self._restored = None  # the caller's checkpoint was loaded
        if self._restored is None:
            return
        if not _is_sharded(trainer.strategy):
            assert self._stored is not None
            self._stored.require_fit(trainer.strategy.optimizers)
        else:
            self._restored = self._load_sharded(trainer, self._restored["step"])
            connector(trainer)._loaded_checkpoint = checkpoint_of(self._restored)
        self._set_generators()
        log.info("run=%s resuming at step %d", self._opened().run, self._restored["global_step"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the random generators again, unless an epoch begins: making a loader's iterator has drawn a number."""
        if self._stored is not None and self._restored is not None:
            self._stored.put_back(trainer.strategy.optimizers, self._restored["optimizer_states"])
        if self._restored is not None and self._restored[OWN]["begins_epoch"]:
            trainer.fit_loop.restarting = False  # with max_steps, Lightning makes it true again
            trainer.fit_loop.epoch_loop.restarting = False  # else it would take the epoch for one that has ended
        else:
            self._set_generators()
        self._restored, self._stored, self._awaited = None, None, ""
        self._last_step = self._seen_step = trainer.global_step  # until it grows, gradients are accumulated

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Save if the manager wants this step, or one that a batch with several optimizer steps has passed over."""
        if self._manager is None:
            return
        manager, step = self._manager, trainer.global_step
        self._check_first(trainer, pl_module)
        before, self._seen_step = self._seen_step // manager.save_interval_steps, step
        due = manager.should_save(step) or (step // manager.save_interval_steps > before and not manager.read_only)
        if self._when == "step" and step != self._last_step and (due or self._awaited):
            self._save_or_wait(trainer, before_validation=validates_next(trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save after a validation within a fit, if a save is due or waits for it."""
        if self._manager is None or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if self._when == "validation":
            self._save_or_wait(trainer)
        elif self._awaited == _VALIDATION:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if a save waits; Lightning calls this hook of checkpoint callbacks last."""
        if self._awaited:
            self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the last save, and raise an error of a save in the background."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close a manager that was made here, and tell the other ranks why."""
        self._close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close a manager that was made here."""
        if stage == "fit":
            self._close(None)

    # -- helpers

    def _opened(self) -> SnapshotManager:
        assert self._manager is not None
        return self._manager

    def _close(self, error: BaseException | None) -> None:
        manager, self._manager = self._manager, None
        if manager is not None and manager is not self._given:
            manager.__exit__(type(error) if error else None, error, None)

    def _set_generators(self) -> None:
        if self._restored is not None:
            RngState().load_state_dict(self._restored[OWN]["rng"])

    def _save_or_wait(self, trainer: Any, *, before_validation: bool = False) -> None:
        """Save; before a validation, or after the last batch of an epoch, only note what is to end before the save.

        A resume begins the next batch or epoch, so the validation and the hooks of the end must be in the snapshot. In
        a job that is told to end there may be no time for them.
        """
        step = trainer.global_step
        self._awaited = _END_OF_EPOCH if trainer.is_last_batch else _VALIDATION if before_validation else ""
        if self._awaited and self._opened()._is_told_to_end(step):
            log.warning(
                "run=%s step=%d is saved before %s: the resumed training leaves out the validation and its hooks",
                self._opened().run,
                step,
                self._awaited,
            )
            self._awaited = ""
        if not self._awaited:
            self._save(trainer)

    def _check_first(self, trainer: Any, pl_module: Any) -> None:
        """Check the first state: what Lightning saves, without the hooks of callbacks and of the user."""
        if self._manager is None or self._manager.read_only:
            return
        objects = {} if _is_sharded(trainer.strategy) else {"model": pl_module, "optimizers": trainer.optimizers}
        hparams = [one.hparams for one in (pl_module, trainer.datamodule) if getattr(one, "hparams", None)]
        self._manager._first_state.check({**objects, "hyper_parameters": hparams})

    def _save(self, trainer: Any) -> None:
        manager, step = self._opened(), trainer.global_step
        names = [*self._metrics, *(policy.metric for policy in manager.keep if isinstance(policy, KeepBest))]
        logged = trainer.callback_metrics
        metrics = {name: logged[name] for name in dict.fromkeys(names) if name in logged}
        state = with_names(connector(trainer).dump_checkpoint(weights_only=False))
        if _is_sharded(trainer.strategy):
            _require_sharded(state)
        elif "optimizer_states" in state:
            pairs = zip(trainer.strategy.optimizers, state["optimizer_states"], strict=True)
            state["optimizer_states"] = [OptimizerState(*pair) for pair in pairs]
        own = {"rng": RngState(), "begins_epoch": bool(trainer.is_last_batch)}
        kept = {key: value if key in _TENSORS else PerRank(value) for key, value in state.items()}
        metadata = {"lightning": [key for key in state if key not in _TENSORS]}
        self._last_step, self._awaited = step, ""
        force = self._when == "validation" or not manager.should_save(step)
        manager.save(step, {**kept, OWN: PerRank(own)}, metrics=metrics, metadata=metadata, force=force)

    def _load_sharded(self, trainer: Any, step: int | str) -> dict[str, Any]:
        """Fill the model and the optimizers of this rank; return the other parts of the checkpoint."""
        from torch.distributed.checkpoint import state_dict as distributed

        manager, model, optimizers = self._opened(), trainer.strategy.model, trainer.strategy.optimizers
        metadata: Any = manager._found(step)[1].metadata
        require_ours(manager.run, step, metadata, "lightning")
        target: dict[str, Any] = {key: PerRank(None) for key in [*metadata["lightning"], OWN]}
        target["state_dict"] = distributed.get_model_state_dict(model)
        target["optimizer_states"] = [distributed.get_optimizer_state_dict(model, one) for one in optimizers]
        manager.restore_into(target, step, per_rank=self._per_rank)
        distributed.set_model_state_dict(model, target["state_dict"])
        for optimizer, state in zip(optimizers, target["optimizer_states"], strict=True):
            distributed.set_optimizer_state_dict(model, optimizer, state)
            put_back_by_name(model, optimizer, state)
        return with_classes({key: one.value if isinstance(one, PerRank) else one for key, one in target.items()})


def _is_sharded(strategy: Any) -> bool:
    return any(kind.__name__ in _SHARDED for kind in type(strategy).__mro__)


def _require_known(strategy: Any) -> None:
    refused = [kind.__name__ for kind in type(strategy).__mro__ if kind.__name__ in _REFUSED]
    if refused:
        raise InvalidInputError(
            f"{refused[0]}: SnapshotCallback saves with strategies of one device, DDP, FSDP and ModelParallel; for "
            "DeepSpeed see docs/guides/deepspeed.md"
        )


def _require_one_resume(callbacks: list[SnapshotCallback]) -> None:
    """Raise InvalidInputError if several callbacks are to resume: the snapshot of the last one would be loaded."""
    count = sum(one._resume is not None for one in callbacks)
    if count > 1:
        raise InvalidInputError(
            f"callbacks: {count} SnapshotCallbacks would resume, maybe from different steps; pass resume=None to all "
            "but one"
        )


def _require_sharded(state: dict[str, Any]) -> None:
    """Raise InvalidInputError if a sharded strategy has gathered its state on rank 0."""
    from ..state.values.sharded import sharding_of

    tensors = state["state_dict"].values()
    if not any(sharding_of(tensor) is not None for tensor in tensors):
        raise InvalidInputError(
            "the strategy gathers the whole state on rank 0; let the ranks keep their shards: "
            'FSDPStrategy(state_dict_type="sharded"), or ModelParallelStrategy(save_distributed_checkpoint=True)'
        )
