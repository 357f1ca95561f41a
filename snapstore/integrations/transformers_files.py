"""The folder from which a Trainer resumes: the files of a checkpoint, written from a snapshot of a SnapshotCallback.

In: a manager and a step. Out: a temporary folder with the files that the Trainer reads. With several ranks, one rank of
each machine writes the files that the ranks have in common.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..context import Context
from ..distributed.choose import place
from ..errors import InvalidInputError, RanksError, needs
from ..format.records import Snapshot
from ..manager import SnapshotManager
from ..restore.pipeline import read
from ..state.values.composite import require_classes
from ..state.values.objects import allowed_classes
from ..text import counted, log
from .stored_optimizers import StoredOptimizers

with needs("transformers, accelerate", 'pip install "snapstore[transformers]"'):
    import safetensors.torch
    from accelerate.state import DistributedType, PartialState

_FILES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
#: The step and the path of the folder that each manager has open.
_OPEN: WeakKeyDictionary[SnapshotManager, tuple[int, Path]] = WeakKeyDictionary()


def complete_optimizer(manager: SnapshotManager, step: int, optimizer: Any) -> None:
    """Check an optimizer that the Trainer has loaded from the open folder; put back what torch has cast.

    Args:
        step: the step at which the Trainer begins; if it is not the folder's, the Trainer has not resumed from it.

    Raises:
        InvalidInputError: the stored state does not fit the optimizer.
    """
    opened, path = _OPEN.get(manager, (None, Path()))
    file = path / _FILES["optimizer"]
    if opened == step and file.exists():
        stored = StoredOptimizers(manager, step, "optimizer")
        stored.require_fit([optimizer])
        stored.put_back([optimizer], [torch.load(file, map_location="cpu", weights_only=True, mmap=True)], copy=True)


@contextmanager
def checkpoint_dir(
    manager: SnapshotManager, step: int | None = None, *, folder: str | Path | None = None
) -> Iterator[str | None]:
    """Yield the path of a folder for `trainer.train(resume_from_checkpoint=path)`; it is deleted at the end.

    The folder has what the Trainer reads: model.safetensors (or pytorch_model.bin), optimizer.pt, scheduler.pt,
    scaler.pt, rng_state.pth, trainer_state.json and config.json. It takes as many bytes as the snapshot has, for as
    long as the block lasts. Under torch.distributed all ranks call it. The first rank of each machine writes the files
    that the ranks have in common; the folders of the others have links to them.

    Args:
        manager: the manager of the run.
        step: a step that a SnapshotCallback has saved; None: the newest. If there is no snapshot, the path is None, and
            the Trainer starts at step 0.
        folder: where the folder is made; None: where `tempfile` does.

    Raises:
        NotFoundError: the run has no such step.
        InvalidInputError: the step was not saved by a SnapshotCallback.
        RanksError: another rank failed.
        SnapstoreError: a save failed in the background.
    """
    manager.wait_until_finished()
    if step is None and (step := manager.latest_step()) is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="snapstore-", dir=folder) as parent:
        path = Path(parent) / f"checkpoint-{step}"
        path.mkdir()
        _write_files(manager, step, path)
        _OPEN[manager] = step, path
        try:
            with torch.serialization.safe_globals(allowed_classes()):  # the Trainer reads the files with torch.load
                yield str(path)
        finally:
            _OPEN.pop(manager, None)


def _write_files(manager: SnapshotManager, step: int, path: Path) -> None:
    """Write the files of a checkpoint: those of this rank, and once per machine the files that all ranks share."""
    (context, snapshot), (rank, count) = manager._found(step), place()
    parts = {ref.part for ref in snapshot.manifests}
    metadata: Any = snapshot.metadata or {"transformers": "", "ranks": count}  # a repaired record has none
    if not isinstance(metadata, dict) or "transformers" not in metadata or "trainer" not in parts:
        raise InvalidInputError(
            f"{snapshot.ref}: was not saved by a SnapshotCallback; restore it with manager.restore_into"
        )
    for name, text in manager.restore(step, keys="trainer", per_rank=0)["trainer"].items():
        (path / Path(name).name).write_text(text, encoding="utf-8")
    if "rng" in parts:
        if count == metadata["ranks"]:
            name = "rng_state.pth" if count == 1 else f"rng_state_{rank}.pth"
            torch.save(_rng_of(manager, step), path / name)
        else:
            saved = counted(metadata["ranks"], "rank")
            log.warning("%s: %s saved, %d resume: random numbers differ", snapshot.ref, saved, count)
    write = partial(_write_common, context, snapshot, path)
    if count == 1:
        write()
    else:
        _once_a_machine(write, path, rank, count)


def _write_common(context: Context, snapshot: Snapshot, path: Path) -> None:
    """Write the files that are equal on all ranks, part by part: no more than one part is in memory."""
    for part in {"model", *_FILES}.intersection(ref.part for ref in snapshot.manifests):
        value = read(context, snapshot, keys=part, device="cpu")[1][part]
        if part == "model":
            _write_model(value, path)
        else:
            torch.save(require_classes(value), path / _FILES[part])


def _once_a_machine(write: Callable[[], None], path: Path, rank: int, count: int) -> None:
    """Let the first rank of each machine write, and give the others links to its files.

    Raises:
        RanksError: another rank failed.
    """
    import torch.distributed as dist

    folders: list[Any] = [None] * count
    dist.all_gather_object(folders, (socket.gethostname(), str(path)))
    first = Path(next(folder for name, folder in folders if name == socket.gethostname()))
    writes, failure = first == path or not first.is_dir(), None  # containers may have one name and several disks
    try:
        if writes:
            write()
    except Exception as error:  # noqa: BLE001  raised below, when the other ranks know it
        failure = error
    failures: list[Any] = [None] * count
    dist.all_gather_object(failures, None if failure is None else f"rank {rank}: {failure}")
    if failure is not None:
        raise failure
    if any(failures):
        raise RanksError(f"checkpoint_dir: {next(filter(None, failures))}")
    for file in [] if writes else first.iterdir():
        if not file.name.startswith("rng_state") and not (path / file.name).exists():
            (path / file.name).symlink_to(file)


def _write_model(state: dict[str, Any], path: Path) -> None:
    """Write the weights; write tied weights under each name, since the Trainer warns about missing names."""
    if any(not isinstance(value, torch.Tensor) for value in state.values()):  # a module's extra state
        torch.save(state, path / "pytorch_model.bin")
        return
    seen: set[int] = set()
    for name, value in state.items():
        storage = value.untyped_storage().data_ptr()
        state[name] = value.clone() if storage in seen else value.contiguous()
        seen.add(storage)
    safetensors.torch.save_file(state, path / "model.safetensors", metadata={"format": "pt"})


def _rng_of(manager: SnapshotManager, step: int) -> dict[str, Any]:
    """Return the states of the random generators in the form in which the Trainer stores them."""
    rng = manager.restore(step, keys="rng", device="cpu")["rng"]
    python, numpy, words = rng["python"], rng["numpy"], rng["numpy"]["state"]
    states = {
        "python": (python["version"], tuple(python["words"].tolist()), python["gauss"]),
        "numpy": (numpy["bit_generator"], words["key"], words["pos"], numpy["has_gauss"], numpy["gauss"]),
        "cpu": rng["torch"],
    }
    if "cuda" in rng:  # one process without a launcher: those of its device
        is_alone = PartialState().distributed_type == DistributedType.NO
        states["cuda"] = rng["cuda"][torch.cuda.current_device()] if is_alone else rng["cuda"]
    return states
