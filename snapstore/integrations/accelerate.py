"""Snapshots of everything that an `Accelerator` has prepared: models, optimizers, schedulers, loaders, custom objects.

    accelerator.register_for_checkpointing(counter)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if snapshots.latest_step() is not None:
        load_state(accelerator, snapshots)
    ...
    save_state(accelerator, snapshots, step)

In: an Accelerator and a manager. Out: snapshots with the parts model, optimizer, scheduler, dataloader and custom (a
second one is model_1, and so on), accelerator, rng, and scaler if there is one. With FSDP2 the tensors are sharded, and
restore into any number of ranks. Names of weights are those of the unwrapped model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, SupportsFloat

from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import RandomSampler

from ..distributed.choose import place
from ..errors import CapabilityError, InvalidInputError, needs
from ..format.records import Snapshot
from ..manager import SnapshotManager
from ..save.background import SaveHandle
from ..state.walk.per_rank import PerRank
from ..state.walk.rng import RngState
from ..text import log
from .stored_optimizers import put_back_by_name

with needs("accelerate", 'pip install "snapstore[accelerate]"'):
    import accelerate
    from accelerate.data_loader import SeedableRandomSampler

#: In place of advice to pass `keys`, which `load_state` does not take.
_NO_KEYS = (
    "prepare what was prepared at the save; or load some of it yourself, for example the model: "
    "manager.restore_into({'model': accelerator.unwrap_model(model)}, step, keys='model')"
)


def save_state(
    accelerator: Any,
    manager: SnapshotManager,
    step: int,
    *,
    metrics: Mapping[str, SupportsFloat] | None = None,
    tags: Sequence[str] = (),
    force: bool = False,
) -> SaveHandle:
    """Save everything that the accelerator has prepared, and the objects registered for checkpointing.

    It replaces `accelerator.save_state`, and returns as soon as the state may change again. Under torch.distributed all
    ranks call it. Each rank stores its own random generators and positions of loaders. Custom objects must be equal on
    all ranks, unless their class has `per_rank = True`.

    Args:
        accelerator: an `accelerate.Accelerator` after `prepare`.
        manager: made after the accelerator, which initialises torch.distributed.
        step: the step of the snapshot; a step off the manager's interval is skipped unless `force`.
        metrics, tags: see `SnapshotManager.save`.

    Raises:
        InvalidInputError: nothing is prepared, hooks are registered, or `ProjectConfiguration` deletes folders.
        CapabilityError: FSDP1, DeepSpeed, Megatron, or a device other than CPU and CUDA.
        SnapstoreError: see `SnapshotManager.save`.
    """
    _refuse(accelerator, "save")
    if not (force or manager.should_save(step)):
        return SaveHandle(skipped=True)
    if accelerator.num_processes < place()[1]:
        _warn_of_alone(place()[1])
    if not accelerator.sync_gradients:
        log.warning("run=%s step=%d saved between two optimizer steps: without gradients", manager.run, step)
    configuration = accelerator.project_configuration
    configuration.iteration += 1
    handle = SaveHandle(skipped=True)
    try:
        handle = manager.save(step, _Prepared(accelerator).state(), metrics=metrics, tags=tags, force=force)
    finally:  # a save that failed does not count
        configuration.iteration -= handle.skipped
    return handle


def load_state(
    accelerator: Any,
    manager: SnapshotManager,
    step: int | str | None = None,
    *,
    per_rank: Literal["same", "drop"] | int = "same",
) -> Snapshot:
    """Restore everything that the accelerator has prepared from a snapshot of `save_state`; return the snapshot.

    It replaces `accelerator.load_state`. It also sets `accelerator.step`, the number of saves and the epochs of the
    loaders, so that the loaders shuffle as they did.

    Args:
        accelerator: an `Accelerator` after `prepare`, with the same number of models, optimizers and so on as at the
            save.
        step: a step or tag; None: the newest.
        per_rank: see `SnapshotManager.restore`; on another number of ranks pass "drop" or a rank.

    Raises:
        NotFoundError: the run has no such step.
        InvalidInputError: the state does not fit what is prepared, hooks are registered, or `ProjectConfiguration`
            deletes folders.
        CapabilityError: as for `save_state`.
        SnapstoreError: see `SnapshotManager.restore_into`.
    """
    _refuse(accelerator, "load")
    prepared = _Prepared(accelerator)
    state = prepared.state()
    try:
        snapshot = manager.restore_into(state, step, per_rank=per_rank)
    except InvalidInputError as error:
        if "keys" not in error.args[-1]:
            raise
        raise InvalidInputError(*(error.args[:-1] or error.args), _NO_KEYS) from error
    prepared.load(state)
    return snapshot


class _Prepared:
    """Everything that an accelerator has prepared. Only this class reads its private lists: there are no public ones.

    Raises:
        CapabilityError: this release of accelerate keeps them elsewhere.
        InvalidInputError: there is nothing.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        try:
            self.models, self.optimizers = list(accelerator._models), list(accelerator._optimizers)
            self.schedulers, self.loaders = list(accelerator._schedulers), list(accelerator._dataloaders)
            self.custom = list(accelerator._custom_objects)
        except AttributeError as error:
            raise CapabilityError(
                f"accelerate {accelerate.__version__}: keeps its prepared objects elsewhere than 1.15, the release "
                f"that this was tested with: {error}"
            ) from error
        if not (self.models or self.optimizers or self.schedulers or self.loaders):
            raise InvalidInputError(
                "the accelerator has prepared nothing, or free_memory() has let it go: call prepare() first, and save "
                "before free_memory()"
            )

    def state(self) -> dict[str, Any]:
        """Return the objects of a snapshot, by part; with FSDP2 the sharded tensors of models and optimizers."""
        accelerator, state = self.accelerator, dict[str, Any]()
        for number, model in enumerate(self.models):
            whole = accelerator.unwrap_model(model, keep_torch_compile=False)
            state[_name("model", number)] = get_model_state_dict(model) if accelerator.is_fsdp2 else whole
        for number, optimizer in enumerate(self.optimizers):
            inner = optimizer.optimizer
            if accelerator.is_fsdp2:
                inner = get_optimizer_state_dict(self.models[number], inner)
            state[_name("optimizer", number)] = inner
        for number, scheduler in enumerate(self.schedulers):
            state[_name("scheduler", number)] = getattr(scheduler, "scheduler", scheduler)
        for number, loader in enumerate(self.loaders):
            state[_name("dataloader", number)] = PerRank(_Loader(loader))
        for number, one in enumerate(self.custom):
            state[_name("custom", number)] = one
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        saves = accelerator.project_configuration.iteration
        return state | {"accelerator": {"step": accelerator.step, "iteration": saves}, "rng": RngState()}

    def load(self, state: dict[str, Any]) -> None:
        """Load the values of a restored state that are not in objects of the accelerator yet."""
        if self.accelerator.is_fsdp2:
            for number, model in enumerate(self.models):
                set_model_state_dict(model, state[_name("model", number)])
            for number, optimizer in enumerate(self.optimizers):
                found = self.models[number], optimizer.optimizer, state[_name("optimizer", number)]
                set_optimizer_state_dict(*found)
                put_back_by_name(*found)
        self.accelerator.step = state["accelerator"]["step"]
        self.accelerator.project_configuration.iteration = state["accelerator"]["iteration"]


class _Loader:
    """The epoch of a prepared loader, the seed of its shuffling, and its position if it is a StatefulDataLoader.

    The position is empty if the loader is not inside an epoch: then the next epoch makes one iterator, which draws one
    random number. A loader that was never iterated has no position, since it holds its first iterator already.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def _epoch(self) -> int:
        """Return the epoch of the next batch; at the last batch of an epoch, the loader still names that epoch."""
        epoch: int = getattr(self.loader, "iteration", 0)
        return epoch + (self._is_iterated() and self.loader.end_of_dataloader)

    def _is_iterated(self) -> bool:
        state = getattr(self.loader, "gradient_state", None)
        return state is not None and any(one is self.loader for one in state.dataloader_references)

    def _sampler(self) -> Any:
        sampler = self.loader.get_sampler() if hasattr(self.loader, "get_sampler") else None
        if isinstance(sampler, SeedableRandomSampler):
            return sampler
        if isinstance(sampler, RandomSampler):
            _warn_of_order()
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain values, and the tensors of a StatefulDataLoader's own state."""
        state: dict[str, Any] = {"iteration": self._epoch()}
        if (sampler := self._sampler()) is not None:
            state["sampler"] = {"initial_seed": sampler.initial_seed, "epoch": sampler.epoch}
        is_stateful = getattr(self.loader, "use_stateful_dataloader", False)
        if is_stateful and not getattr(self.loader, "_initial_iter_for_state_dict", False):
            is_inside = self._is_iterated() and not self.loader.end_of_dataloader
            state["position"] = self.loader.state_dict() if is_inside else {}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the values that `state_dict` has returned."""
        if (sampler := self._sampler()) is not None and "sampler" in state:
            sampler.initial_seed, sampler.epoch = state["sampler"]["initial_seed"], state["sampler"]["epoch"]
        if hasattr(self.loader, "iteration"):
            self.loader.iteration = state["iteration"]
        if "position" in state:
            self.loader.load_state_dict(state["position"])


@cache
def _warn_of_order() -> None:
    """Log the warning once per process."""
    log.warning(
        "accelerate: the order of a loader with shuffle=True is not stored: a training that resumes in an epoch sees "
        "other batches; pass dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True) to Accelerator"
    )


@cache
def _warn_of_alone(count: int) -> None:
    """Log the warning once per process."""
    log.warning(
        "accelerate: each of the %d processes trains alone, without the gradients of the others; on CPUs pass "
        "Accelerator(cpu=True), or launch with 'accelerate launch --cpu'",
        count,
    )


def _name(part: str, number: int) -> str:
    return part if number == 0 else f"{part}_{number}"


def _refuse(accelerator: Any, what: str) -> None:
    """Raise InvalidInputError or CapabilityError for a configuration that is not supported; see `save_state`."""
    kind = accelerator.distributed_type.value
    covered = kind in ("NO", "MULTI_CPU", "MULTI_GPU") or accelerator.is_fsdp2
    if not covered or accelerator.device.type not in ("cpu", "cuda"):
        kind = "FSDP1" if kind == "FSDP" and not accelerator.is_fsdp2 else kind
        raise CapabilityError(
            f"accelerate: one process, DDP and FSDP2 are covered, on CPU and CUDA; got {kind} on "
            f"{accelerator.device.type}; for FSDP pass FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if getattr(accelerator, f"_{what}_model_state_pre_hook", None):
        raise InvalidInputError(
            f"register_{what}_state_pre_hook: a hook gets the path of a folder, and there is none; remove the hook, "
            "and pass an object with state_dict and load_state_dict to register_for_checkpointing"
        )
    configuration = accelerator.project_configuration
    if configuration.automatic_checkpoint_naming and configuration.total_limit is not None:
        raise InvalidInputError(
            f"ProjectConfiguration(total_limit={configuration.total_limit}): the manager deletes snapshots: pass "
            f"keep=[KeepLast({configuration.total_limit})] to it, and leave total_limit out"
        )
