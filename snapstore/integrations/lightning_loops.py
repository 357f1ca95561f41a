"""Lightning: the names of a Trainer that are not public, and the state of its loops.

In: a Trainer, or the state of a snapshot. Out: the part that dumps and loads checkpoints, and a checkpoint from which
the loops go on as if the training had never stopped. Private names of Lightning are used only here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import CapabilityError, InvalidInputError
from ..text import log
from ..threads import imported

#: The key of a checkpoint under which `SnapshotCallback` stores what Lightning does not.
OWN = "snapstore"
#: The releases of Lightning whose private names `connector` knows.
_KNOWN = ((2, 5), (2, 6))
#: The parts that are a class: that of the hyperparameters, if they are a config of OmegaConf.
_CLASSES = ("hparams_type", "datamodule_hparams_type")
#: In the state of torchdata's StatefulDataLoader: whether its iterator has ended.
_ENDED = "_iterator_finished"


def require_ours(run: str, step: int | str, found: Any, key: str) -> None:
    """Check that what was found of a snapshot has a key that `SnapshotCallback` gives to each of its snapshots.

    Raises:
        InvalidInputError: it lacks the key.
    """
    if not isinstance(found, dict) or key not in found:
        raise InvalidInputError(
            f"{run}@{step}: was not saved by a SnapshotCallback, so it cannot be resumed by one; use another run, or "
            "pass the step of another snapshot, or None, as resume"
        )


def checkpoint_of(restored: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint of Lightning that a snapshot holds."""
    checkpoint = {key: value for key, value in restored.items() if key != OWN}
    if restored[OWN]["begins_epoch"]:
        _begin_epoch(checkpoint["loops"]["fit_loop"])
    return checkpoint


def _begin_epoch(loop: dict[str, Any]) -> None:
    """Change the state of a fit loop after the last batch of an epoch to the state at the start of the next epoch.

    From the state after the last batch, Lightning repeats hooks, leaves out an epoch, or adds one. The iterator of a
    StatefulDataLoader is at its end there: if its state says so, the loader makes a new one.
    """
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    if epochs["total"]["processed"] < epochs["total"]["started"]:  # saved before the end of the epoch
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    for which in ("total", "current"):
        batches[which]["completed"] = batches[which]["processed"]
        ended = epochs[which]["started"]
        epochs[which] |= {"ready": ended + 1, "processed": ended, "completed": ended}
    for position in loop["state_dict"].get("combined_loader", ()):
        if isinstance(position, dict) and _ENDED in position:
            position[_ENDED] = True


def connector(trainer: Any) -> Any:
    """Return the part of a Trainer that dumps and loads checkpoints.

    Raises:
        CapabilityError: it is not the same as in the known releases.
    """
    version = import_module(type(trainer).__module__.partition(".")[0]).__version__
    found = getattr(trainer, "_checkpoint_connector", None)
    if not hasattr(found, "dump_checkpoint") or not hasattr(found, "_loaded_checkpoint"):
        raise CapabilityError(
            f"Lightning {version}: SnapshotCallback knows the releases 2.5 and 2.6, and this one has another "
            "checkpoint connector; install one of these, or use SnapstoreCheckpointIO, which uses nothing private"
        )
    if tuple(map(int, version.split(".")[:2])) not in _KNOWN:
        log.warning("Lightning %s: SnapshotCallback knows the private names of 2.5 and 2.6", version)
    return found


def validates_next(trainer: Any) -> bool:
    """Return whether the Trainer validates after this batch, by the numbers of batches.

    False if it validates by time: the ranks could give different answers.
    """
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or every is None or every == float("inf"):
        return False
    if epochs is None:
        return bool((trainer.fit_loop.total_batch_idx + 1) % every == 0)
    return bool((trainer.current_epoch + 1) % epochs == 0 and (trainer.fit_loop.batch_idx + 1) % every == 0)


def with_names(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with the names of its classes in their places."""
    found = {key: checkpoint.get(key) for key in _CLASSES}
    names = {key: f"{one.__module__}.{one.__qualname__}" for key, one in found.items() if isinstance(one, type)}
    return {**checkpoint, **names} if names else checkpoint


def with_classes(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a restored checkpoint with the classes of OmegaConf that it names, if the program has imported them."""
    module = imported("omegaconf")
    kinds = () if module is None else (module.DictConfig, module.ListConfig)
    known = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
    return {key: known.get(one, one) if key in _CLASSES else one for key, one in checkpoint.items()}
