"""torchtitan: a checkpoint manager that replaces torchtitan's own.

    from snapstore.integrations.torchtitan import use_by_default
    use_by_default("/data/snapshots", run="exp1")
    torchtitan.train.main()

In: the components of a Trainer, and its config of checkpoints. Out: snapshots with the parts model, optimizer,
lr_scheduler, dataloader and train_state. A Trainer calls `load` once, then `maybe_wait_for_staging` and `save` for each
step, and `close` at the end. Only `use_by_default` imports torchtitan. The manager has the interface that the releases
0.2 and 0.3 call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from ..dcp.functions import load as load_through_dcp
from ..dcp.reader import SnapstoreReader
from ..errors import CapabilityError, InvalidInputError, NotFoundError, needs
from ..manager import SnapshotManager
from ..options import SaveOptions
from ..repository import Repository
from ..retention import KeepLast, Policy
from ..save.background import SaveHandle
from ..save.hooks import HookOptions
from ..text import log, quoted
from ..threads import imported

MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER = "model", "optimizer", "lr_scheduler", "dataloader"
#: How release 0.3 writes a reference in `initial_load_path`, which must be a path or a URI there.
_URI = "snapstore://"


def use_by_default(
    repository: str | Path | Repository,
    *,
    run: str,
    keep: Policy | Sequence[Policy] | None = None,
    options: SaveOptions | None = None,
    **hooks: Unpack[HookOptions],
) -> None:
    """Let torchtitan's Trainer make a SnapstoreCheckpointManager where it would make its own `CheckpointManager`.

    Call it before the Trainer is made. A config of another class, such as `TorchCheckpointingManager.Config`, keeps the
    manager that it names.

    Args:
        repository, run, keep, options, hooks: see `checkpoint_manager`.

    Raises:
        CapabilityError: torchtitan is not installed, or this release makes its manager in another way.
    """
    make = checkpoint_manager(repository, run=run, keep=keep, options=options, **hooks)
    with needs("torchtitan", 'pip install "snapstore[torchtitan]"'):
        import torchtitan.train as train
    if hasattr(train, "CheckpointManager"):  # 0.2
        train.CheckpointManager = make
        return
    kind = getattr(imported("torchtitan.components.checkpointer"), "CheckpointManager", None)
    owner = getattr(getattr(kind, "Config", None), "_owner", None)
    if kind is None or (owner is not kind and getattr(owner, "func", None) is not SnapstoreCheckpointManager):
        raise CapabilityError(
            f"torchtitan {version('torchtitan')}: makes its checkpoint manager in another way than 0.2 and 0.3, which "
            "snapstore knows; make the manager yourself, with checkpoint_manager(...)"
        )
    kind.Config._owner = staticmethod(make)


def checkpoint_manager(
    repository: str | Path | Repository,
    *,
    run: str,
    keep: Policy | Sequence[Policy] | None = None,
    options: SaveOptions | None = None,
    **hooks: Unpack[HookOptions],
) -> Callable[..., SnapstoreCheckpointManager]:
    """Return a function that makes a manager from the arguments that a Trainer passes to its CheckpointManager.

    Args:
        repository: a URL or path, where a repository is made if there is none; or an open Repository.
        run: the name of the run.
        keep: see `SnapshotManager`; None: keep the newest `keep_latest_k` of the config; if that is 0, keep all.
        options: how saves are stored, if the repository is opened here.
        hooks: `on_commit` and `on_failure`, as `SnapshotManager` has them.
    """
    return partial(SnapstoreCheckpointManager, repository, run, keep, options, hooks)


class SnapstoreCheckpointManager:
    """Saves and loads the state of a Trainer as snapshots of a run. `checkpoint_manager` makes it.

    The config decides when to save (`enable`, `interval`, `enable_first_step_checkpoint`, `load_only`), and which parts
    are loaded (`exclude_from_loading`, `initial_load_model_only`). With `async_mode` "disabled" the manager waits for
    each save; with the other modes it saves in the background. `initial_load_path` is a reference such as "exp0@1000",
    in the same repository. `folder` is ignored.

    Attributes:
        manager: the manager of the saves and loads; None if the config disables checkpoints.
        save_future: the handle of the save in the background, or None.

    Raises:
        InvalidInputError: an option of the config is not supported.
    """

    staging_future = None

    def __init__(
        self,
        repository: str | Path | Repository,
        run: str,
        keep: Policy | Sequence[Policy] | None,
        options: SaveOptions | None,
        hooks: HookOptions,
        **components: Any,
    ) -> None:
        is_older = "checkpoint_config" in components  # 0.2
        config = components["checkpoint_config" if is_older else "config"]
        self.enable, self.load_only = bool(config.enable), bool(config.load_only)
        self.save_future: SaveHandle | None = None
        self.manager: SnapshotManager | None = None
        if not self.enable:
            return
        self._config = config
        _require_known(config, components.get("ft_manager"))
        parts = components["model_parts"]
        self._model_parts = [parts] if isinstance(parts, torch.nn.Module) else list(parts)
        self._model_state_of = get_model_state_dict if is_older else torch.nn.Module.state_dict
        self.states: dict[str, Any] = {
            **components["states"],
            OPTIMIZER: components["optimizers"],
            DATALOADER: components["dataloader"],
            LR_SCHEDULER: components["lr_schedulers"],
        }
        if components["dataloader"] is None:  # 0.3 allows it
            del self.states[DATALOADER]
        unknown = sorted(set(config.exclude_from_loading) - {*self.states, MODEL})
        if unknown:
            raise InvalidInputError(f"exclude_from_loading {unknown}: expected some of {sorted({*self.states, MODEL})}")
        if keep is None:
            keep = [KeepLast(config.keep_latest_k)] if config.keep_latest_k else ()
        is_async = str(getattr(config.async_mode, "value", config.async_mode)).lower() != "disabled"
        self.manager = SnapshotManager(
            repository, run=run, keep=keep, async_save=is_async, read_only=self.load_only, options=options, **hooks
        )

    # -- what a Trainer calls

    def load(self, step: int = -1) -> bool:
        """Load a snapshot into the components; return whether there was one. Every rank calls it.

        Args:
            step: -1: the newest; if the run has none, `initial_load_path`. Step 0 is a seed: only its model is loaded.
                With `load_only`, each rank finds the newest by itself.

        Raises:
            NotFoundError: there is no such step, or `initial_load_path` names no snapshot.
            IntegrityError, StorageError: the answer may be a snapshot whose record is gone, or cannot be read.
            InvalidInputError: `initial_load_path` is not a reference.
            CheckpointException: the snapshot lacks a part, or a shape differs; torch's, a BaseException.
        """
        if self.manager is None:
            return False
        newest = self.manager.latest_step() if step == -1 else step
        run, model_only = self.manager.run, newest == 0
        ref: int | str | None = newest
        if newest is None:
            initial = self._config.initial_load_path
            if not initial:
                return False
            initial = str(initial).removeprefix(_URI)
            named, at, name = initial.rpartition("@")
            if not at or not named or not name:
                raise InvalidInputError(
                    f"initial_load_path {quoted(initial)}: "
                    "expected a reference such as 'exp0@1000', or for torchtitan 0.3 "
                    "'snapstore://exp0@1000'; to load a folder of DCP or of safetensors, import it into the repository "
                    "first"
                )
            self.manager.repository.snapshot(initial)  # DCP would take a step for a tag that is missing
            run, ref, model_only = named, name, bool(self._config.initial_load_model_only)
        elif step != -1 and not self.manager.has_step(step):
            raise NotFoundError(f"load_step {step}: run {run!r} has no such step in {self.manager.repository.url}")
        self._load(run, ref, model_only)
        log.info("run=%s loaded %s@%s%s", self.manager.run, run, ref, " (model alone)" if model_only else "")
        return True

    @torch.no_grad()
    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if the config says so; return whether it did. Every rank calls it.

        The last step stores only the model, in `export_dtype`, if `last_save_model_only` is set, as torchtitan does;
        such a run cannot be resumed from that step.

        Raises:
            SnapstoreError: this save failed, or an earlier one in the background.
        """
        if self.manager is None or not self._should_save(curr_step, last_step):
            return False
        state: dict[str, Any] = {MODEL: self._model_state()}
        if last_step and self._config.last_save_model_only:
            dtype = getattr(torch, self._config.export_dtype)
            if dtype != torch.float32:
                of_floats = torch.is_floating_point
                state = {MODEL: {name: v.to(dtype) if of_floats(v) else v for name, v in state[MODEL].items()}}
        else:
            state |= self.states
        self.save_future = self.manager.save(curr_step, state, force=True)
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def maybe_wait_for_staging(self) -> None:
        """Do nothing: when `save` returns, the copies are complete, or ordered before the next work on the device."""

    def maybe_wait_for_saving(self) -> None:
        """Wait for the save in the background, and raise its error."""
        self.save_future = None
        if self.manager is not None:
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and release everything; every rank calls it."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.close()

    # -- helpers

    def _should_save(self, step: int, last_step: bool) -> bool:
        if self.load_only:
            return False
        is_first = step == 1 and self._config.enable_first_step_checkpoint
        return bool(last_step or is_first or step % self._config.interval == 0)

    def _model_state(self) -> dict[str, Any]:
        """Return the tensors of all parts of the model; from 0.3 on, hooks of its modules split fused weights."""
        states = map(self._model_state_of, self._model_parts)
        return {name: value for state in states for name, value in state.items()}

    def _load(self, run: str, ref: int | str | None, model_only: bool) -> None:
        """Load through DCP: each rank asks for its own names, without the loaders and stages of other ranks."""
        assert self.manager is not None
        excluded = self._config.exclude_from_loading
        others = {} if model_only else self.states
        wanted = {name: value for name, value in others.items() if name not in excluded}
        if MODEL not in excluded:
            wanted[MODEL] = self._model_state()
        reader = SnapstoreReader(self.manager.repository, run=run)
        load_through_dcp(wanted, reader, ref)
        if MODEL in wanted:
            for part in self._model_parts:
                if self._model_state_of is get_model_state_dict:
                    set_model_state_dict(part, wanted[MODEL], options=StateDictOptions(strict=False))
                else:
                    part.load_state_dict(wanted[MODEL], strict=False)


def _require_known(config: Any, ft_manager: Any) -> None:
    """Raise InvalidInputError if the config has an option that snapshots do not support."""
    if config.initial_load_in_hf or config.last_save_in_hf:
        raise InvalidInputError(
            "initial_load_in_hf, last_save_in_hf: the repository holds snapshots; switch these off, and use 'snapstore "
            "import' before the training or 'snapstore export' after it"
        )
    if ft_manager is not None and getattr(ft_manager, "enabled", False):
        raise InvalidInputError("fault_tolerance.enable: TorchFT's own checkpoints are not supported; switch it off")
