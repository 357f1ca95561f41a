"""Snapshots of a Hugging Face `Trainer`: a callback that saves, and a folder from which the Trainer resumes.

    with SnapshotManager("/data/snapshots", run="exp1") as snapshots:
        trainer = Trainer(..., callbacks=[SnapshotCallback(snapshots)])
        with checkpoint_dir(snapshots) as path:  # None before the first snapshot
            trainer.train(resume_from_checkpoint=path)

In: the events of the Trainer. Out: snapshots with the parts model, optimizer, scheduler, scaler, rng and trainer, and a
temporary folder with the files that the Trainer reads.

The Trainer tells a callback that a save is due before it logs and evaluates the step. So the callback saves at the next
event: then the metrics are known, and the random generators are in the state in which the next step finds them. The
Trainer resumes at that point: it fetches the batches of the step, then loads the generators. Then all callbacks get the
event again, so the save comes before any other callback gets it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from ..distributed.choose import place
from ..errors import CapabilityError, IntegrityError, InvalidInputError, NotFoundError, StorageError, needs
from ..manager import SnapshotManager
from ..retention import KeepLast
from ..state.walk.per_rank import PerRank
from ..state.walk.rng import RngState
from ..text import log
from .transformers_files import checkpoint_dir as checkpoint_dir
from .transformers_files import complete_optimizer

with needs("transformers, accelerate", 'pip install "snapstore[transformers]"'):
    import transformers
    from accelerate.state import AcceleratorState
    from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerCallback, TrainerState


#: The tag of the best model, which no policy forgets.
BEST = "best-model"
_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU")
#: The policies that a Trainer has set; the next Trainer may set others.
_LIMITS: WeakKeyDictionary[SnapshotManager, tuple[KeepLast]] = WeakKeyDictionary()


class SnapshotCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Saves a snapshot whenever the Trainer would write a checkpoint, instead of it.

    With `save_strategy="steps"` or `"epoch"` the Trainer decides when to save, with `"no"` the manager's
    `save_interval_steps`. The step of a snapshot is `TrainerState.global_step`. Its metrics are the numbers that the
    Trainer has logged at this step, such as `loss` and `eval_loss`, except speeds; with several ranks those of rank 0.

    Put it last in `callbacks`: it also saves in place of the checkpoints that earlier callbacks ask for.

    Args:
        manager: a SnapshotManager; under torch.distributed one on every rank. Close it after the training.

    Raises:
        InvalidInputError: when the training begins: the callback does not support an option of TrainingArguments; or
            the Trainer has two of these callbacks; or the state of the optimizer does not fit it.
        CapabilityError: when the training begins: FSDP, DeepSpeed, or a device other than CPU and CUDA.
        SnapstoreError: at a later event: a save failed.
    """

    def __init__(self, manager: SnapshotManager) -> None:
        self.manager = manager
        self._due = False
        self._prepared = False
        self._best: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse options that are not supported, and use `save_total_limit` as the policy of the manager.

        If the Trainer has resumed from `checkpoint_dir`, check its optimizer, and put back values that torch has cast.
        """
        _refuse(args, state)
        self._due = self._prepared = False
        if (handler := self._handler()) is not None:  # a new list: the handler iterates over the old one
            _require_single(handler.callbacks)
            others = [one for one in handler.callbacks if not isinstance(one, _SaveFirst)]
            handler.callbacks = [_SaveFirst(self), *others]
        complete_optimizer(self.manager, state.global_step, kwargs.get("optimizer"))
        self._best = self._returned_to(args, state)
        if (limit := args.save_total_limit) is not None and limit > 0:
            keep, found = (KeepLast(limit),), tuple(self.manager.keep)
            if found not in (keep, _LIMITS.get(self.manager, ())):
                raise InvalidInputError(
                    f"save_total_limit={limit}: the manager has policies of its own, {list(found)}; leave one of the "
                    "two out"
                )
            if found != keep:
                self.manager.keep = _LIMITS[self.manager] = keep
            if args.process_index == 0:
                self.manager.repository.set_policies(self.manager.run, keep)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Note whether a save is due; if the job is told to end, save at once, and end the training."""
        own = args.save_strategy == "no" and self.manager.should_save(state.global_step)
        self._due = own or control.should_save
        control.should_save = False
        if self.manager._is_told_to_end(state.global_step):  # there may be no time for an evaluation
            if control.should_evaluate:
                log.warning(
                    "run=%s step=%d is saved before its evaluation: the resumed training leaves it out, and then draws "
                    "other random numbers",
                    self.manager.run,
                    state.global_step,
                )
            self._due = control.should_training_stop = True
            self._save_if_due(args, state, control, kwargs)
        elif not self._prepared:
            self._prepared = True
            self.manager.prepare(_parts(args, kwargs))
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Note whether a save is due."""
        self._due = self._due or control.should_save
        control.should_save = False
        return control

    on_evaluate = on_epoch_end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the previous step, if a save is due and `_SaveFirst` did not save it."""
        self._save_if_due(args, state, control, kwargs)

    on_epoch_begin = on_step_begin

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Note whether a save is due; save the last step of the training, before the Trainer loads the best model."""
        self.on_epoch_end(args, state, control)
        if logs and _is_of_training(logs):
            self._save_if_due(args, state, control, kwargs)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log a warning about a checkpoint that the Trainer has written itself, and save a snapshot as well."""
        log.warning(
            "run=%s step=%d the Trainer has written a checkpoint of its own: a callback after SnapshotCallback asked "
            "for it; put SnapshotCallback last",
            self.manager.run,
            state.global_step,
        )
        self._due = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the last step, if `on_log` did not; wait, then load the best model if `load_best_model_at_end` says so.

        Raises:
            SnapstoreError: a save failed in the background.
        """
        self._save_if_due(args, state, control, kwargs)
        self.manager.wait_until_finished()
        if not args.load_best_model_at_end:
            return
        if self._best is None:
            log.warning("run=%s load_best_model_at_end: no snapshot has an evaluation", self.manager.run)
            return
        self.manager.restore_into({"model": kwargs["model"]}, self._best, keys="model")
        log.info("run=%s the best model is that of step %d", self.manager.run, self._best)

    def _best_saved(self, state: Any) -> int | None:
        """Return the step of the best snapshot so far, or None; the step of the best evaluation may not be saved.

        Raises:
            IntegrityError, StorageError: that may be a snapshot whose record is gone, or cannot be read.
        """
        best: int | None = state.best_global_step
        if best is not None and self.manager.has_step(best):
            return best
        try:
            tagged = self.manager.repository.snapshot(f"{self.manager.run}@{BEST}").step
        except NotFoundError:
            return None
        return tagged if tagged <= state.global_step else None

    def _returned_to(self, args: Any, state: Any) -> int | None:
        """Return the step of the best snapshot so far, and let it have the tag; None: no snapshot has it.

        After a return to an earlier step, the tag may be on a later one, and a policy would forget the best snapshot.

        Raises:
            IntegrityError, StorageError: as for `_best_saved`, if the best model is to be loaded.
        """
        if args.metric_for_best_model is None:
            return None
        try:
            best = self._best_saved(state)
        except (IntegrityError, StorageError):
            if args.load_best_model_at_end:
                raise
            return None
        if args.process_index == 0:
            repository, run = self.manager.repository, self.manager.run
            with suppress(NotFoundError):  # only a mirror has the best, or no snapshot has the tag
                if best is None:
                    repository.untag(f"{run}@{BEST}", BEST)
                elif BEST not in repository.snapshot(f"{run}@{best}").tags:
                    repository.tag(f"{run}@{best}", BEST)
        return best

    def _save_if_due(self, args: Any, state: Any, control: Any, kwargs: dict[str, Any]) -> None:
        if not self._due:
            return
        self._due = False
        step, rank = state.global_step, place()
        parts = _parts(args, kwargs)
        parts["trainer"] = PerRank(self._texts(state, control, kwargs["model"]))
        logged = partial(json.dumps, [_metrics(state), state.best_global_step == step])
        metrics, is_best = json.loads(self.manager._answered(f"what step {step} has logged", logged))
        if is_best:
            self._best = step
        self.manager.save(
            step,
            parts,
            metrics=metrics,
            metadata={"transformers": transformers.__version__, "ranks": rank[1], "parts": sorted(parts)},
            tags=[BEST] if is_best else [],
            force=is_best or control.should_training_stop or not self.manager.should_save(step),
        )

    def _texts(self, state: Any, control: Any, model: Any) -> dict[str, str]:
        """Return name -> text of the small files of a checkpoint: they are those of rank 0."""
        exported = [control]
        if set(state.stateful_callbacks) - {type(control).__name__}:
            handler = self._handler()
            if handler is None:
                raise CapabilityError(
                    "SnapshotCallback: cannot find the other callbacks of the Trainer, whose states belong to a "
                    f"snapshot, in transformers {transformers.__version__}; it was tested with 5.23"
                )
            exported = [one for one in handler.callbacks if isinstance(one, ExportableState)] + exported
        callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
        state = dataclasses.replace(
            state,
            stateful_callbacks=callbacks,
            is_local_process_zero=True,
            is_world_process_zero=True,
            log_history=[entry for entry in state.log_history if not _is_of_training(entry)],
        )
        texts = {"trainer_state.json": json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"}
        if hasattr(getattr(model, "config", None), "to_json_string"):
            texts["config.json"] = model.config.to_json_string()
        adapters = getattr(model, "peft_config", None)
        if isinstance(adapters, dict) and len(adapters) == 1:  # of several, an export would have to choose one
            (adapter,) = adapters.values()
            texts["adapter_config.json"] = json.dumps(adapter.to_dict(), default=_plain, indent=2) + "\n"
        return texts

    def _handler(self) -> Any:
        """Return the Trainer's handler of callbacks; no event passes it, so it is found among the callers; or None."""
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            handler = frame.f_locals.get("self")
            if isinstance(handler, CallbackHandler) and self in handler.callbacks:
                return handler
        return None


class _SaveFirst(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Lets a SnapshotCallback save before any other callback hears of a step or epoch that begins, or of the end.

    A resumed Trainer tells them again. If one draws a random number there, or changes its state or the model, it would
    do it twice.
    """

    def __init__(self, owner: SnapshotCallback) -> None:
        self.owner = owner

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget a save of a training that an error has ended; the owner may not be a callback any more."""
        self.owner._due = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the previous step, if a save is due."""
        self.owner.on_step_begin(args, state, control, **kwargs)

    on_epoch_begin = on_train_end = on_step_begin


def _refuse(args: Any, state: Any) -> None:
    """Check that the options of the training are supported.

    Raises:
        InvalidInputError: an option is not supported.
        CapabilityError: the kind of training, or the device, is not supported.
    """
    if args.save_strategy == "best":
        raise InvalidInputError(
            "save_strategy='best': the Trainer decides it after the last event that a callback sees; pass "
            "save_strategy='steps' with save_steps=eval_steps, and keep=[KeepBest('eval_loss')] to the manager"
        )
    if args.push_to_hub and args.hub_strategy != "end":
        raise InvalidInputError(
            f"push_to_hub with hub_strategy={args.hub_strategy.value!r}: there are no checkpoint folders to push; pass "
            "hub_strategy='end'"
        )
    if getattr(args, "enable_jit_checkpoint", False):
        raise InvalidInputError(
            "enable_jit_checkpoint: after a SIGTERM it writes a checkpoint folder, and no snapshot; leave it out, "
            "and call manager.handle_preemption()"
        )
    if args.save_on_each_node:
        raise InvalidInputError("save_on_each_node: all nodes save one snapshot to one repository; leave it out")
    if state.is_hyper_param_search:
        raise InvalidInputError("hyperparameter_search: trials would share one run; train each with a run of its own")
    kind = AcceleratorState().distributed_type.value
    if kind not in _DISTRIBUTED or args.device.type not in ("cpu", "cuda"):
        raise CapabilityError(
            f"SnapshotCallback: covers one process and DDP, on CPU and CUDA; got {kind} on {args.device.type}; for "
            "FSDP2 use snapstore.integrations.accelerate, or see docs/guides/distributed.md"
        )


def _require_single(callbacks: list[Any]) -> None:
    """Raise InvalidInputError if there are several SnapshotCallbacks: only the first would save."""
    count = sum(isinstance(one, SnapshotCallback) for one in callbacks)
    if count > 1:
        raise InvalidInputError(
            f"callbacks: expected one SnapshotCallback, got {count}: only the first would save; pass one, and for a "
            "second copy mirror= and mirror_keep= to its manager"
        )


def _parts(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the objects that a snapshot stores, by part."""
    parts: dict[str, Any] = {"model": kwargs["model"]}
    if not args.save_only_model:
        optimizer = kwargs["optimizer"]
        parts |= {"optimizer": optimizer, "scheduler": kwargs["lr_scheduler"], "rng": RngState()}
        if getattr(optimizer, "scaler", None) is not None:
            parts["scaler"] = optimizer.scaler
    return parts


def _plain(value: Any) -> Any:
    """Return a plain value for one that JSON cannot hold: PEFT writes sets as lists."""
    return sorted(value) if isinstance(value, set) else str(value)


def _is_of_training(logs: dict[str, Any]) -> bool:
    """Return whether numbers are the last that a training logs: those of the whole training."""
    return "train_loss" in logs and "total_flos" in logs and "train_runtime" in logs


def _metrics(state: Any) -> dict[str, float]:
    """Return the numbers that were logged at this step, except speeds; other ranks may have others."""
    found: dict[str, float] = {}
    for entry in reversed(state.log_history):
        if entry.get("step") != state.global_step:
            break
        if _is_of_training(entry):
            continue
        for name, value in entry.items():
            if name != "step" and "_runtime" not in name and "_per_sec" not in name and isinstance(value, int | float):
                with suppress(OverflowError):  # an int that no float can hold
                    found.setdefault(name, float(value))
    return found
