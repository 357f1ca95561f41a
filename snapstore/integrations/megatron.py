"""Megatron-core and NeMo: strategies of `dist_checkpointing` that store what the ranks hold as one snapshot.

    save = SnapstoreSaveStrategy("/data/snapshots", run="exp1")
    dist_checkpointing.save(state, "checkpoints/iter_0000100", save)
    dist_checkpointing.load(state, "checkpoints/iter_0000100", SnapstoreLoadStrategy())

In: a sharded state dict of Megatron, on each rank. Out: one snapshot, whose keys are Megatron's; a reference to it,
`snapstore.json`, in the checkpoint's folder beside Megatron's `common.pt`; then Megatron writes `metadata.json`, the
file that makes a folder a checkpoint. So neither file is written before the commit. The save runs in threads of this
process. `async_save` copies the state, and returns a request; the process that Megatron runs for it only waits.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ..dcp.functions import alone_is_meant
from ..dcp.names import step_of
from ..dcp.reader import SnapstoreReader
from ..errors import CapabilityError, InvalidInputError, NotFoundError, needs
from ..manager import SnapshotManager
from ..options import SaveOptions
from ..repository import Repository
from ..retention import Policy
from ..save.background import SaveHandle
from ..save.hooks import HookOptions
from . import references

with needs("megatron-core", 'pip install "snapstore[megatron]"'):
    from megatron.core import __version__ as _version
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
    from megatron.core.dist_checkpointing.strategies import base
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest


#: The name of the reference in the folder of a checkpoint.
REFERENCE = "snapstore.json"
_BYTES = "snapstore: io.BytesIO"
#: The interval at which a process of Megatron looks whether the save has ended [s].
_POLL_S = 0.05


class SnapstoreSaveStrategy(strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron has no types
    """Saves sharded state dicts as snapshots of a run. Make one on every rank, for the whole job.

    Tensors keep Megatron's keys, shapes and boxes, so any other parallel layout can load them. The main replica is
    stored. The values of ShardedObjects are stored without pickle. Megatron writes `common.pt` itself.

    Args:
        repository: a URL or path, where a repository is made if there is none; or an open Repository.
        run: the name of the run.
        keep: see `SnapshotManager`. The folders of forgotten snapshots stay, and loading one is an error that says so.
        options: how saves are stored, if the repository is opened here.
        hooks: `on_commit` and `on_failure`, as `SnapshotManager` has them.

    Attributes:
        manager: the manager of the saves; None before the first save.
    """

    def __init__(
        self,
        repository: str | Path | Repository,
        *,
        run: str,
        keep: Policy | Sequence[Policy] = (),
        options: SaveOptions | None = None,
        **hooks: Unpack[HookOptions],
    ) -> None:
        super().__init__("torch_dist", 1)
        self.manager: SnapshotManager | None = None
        self._make = partial(SnapshotManager, repository, run=run, keep=keep, options=options, **hooks)

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> Any:
        """Copy the state of this rank, and begin the save; every rank calls it.

        Args:
            sharded_state_dict: has only ShardedTensors and ShardedObjects, as `dist_checkpointing.save` passes it.
            checkpoint_dir: a folder whose name ends with the step.

        Returns:
            An AsyncRequest. Its last function waits for the commit, on all ranks, and writes the reference.

        Raises:
            InvalidInputError: the name does not end with a step; or an object, which the error names, cannot be saved.
            SnapstoreError: an earlier save failed in the background.
        """
        step = step_of(str(checkpoint_dir))
        if self.manager is None:
            self.manager = self._make()
        manager = self.manager
        state: dict[str, Any] = {}
        for key, value in _by_key(sharded_state_dict).items():
            head, _, rest = key.partition(".")
            (state.setdefault(head, {}) if rest else state)[rest or head] = value
        handle = manager.save(step, state, metadata={"checkpoint": Path(checkpoint_dir).name}, force=True)
        mark = tempfile.mkdtemp(prefix="snapstore-megatron-")  # it is gone once the save has ended here
        _when_ended(handle, mark)

        def finalize() -> None:
            snapshot = handle.result()
            manager.check_for_errors()
            if dist.get_rank() == 0 and snapshot is not None:
                references.write(str(Path(checkpoint_dir) / REFERENCE), manager.repository, snapshot)

        return AsyncRequest(_wait_for, (mark, os.getpid()), [finalize])

    def close(self) -> None:
        """Wait for the running save, and release everything; every rank calls it."""
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.close()


class SnapstoreLoadStrategy(strategies.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads checkpoints of `SnapstoreSaveStrategy` into any parallel layout; loads others as Megatron does.

    Each rank reads the chunks that it needs, without communication.

    Args:
        repository: where the snapshots are, if they have moved; None: where the reference says.
        types: classes of values in ShardedObjects that a load creates again.
    """

    def __init__(self, repository: str | Path | Repository | None = None, *, types: Sequence[type] = ()) -> None:
        super().__init__()
        self._where, self._types = repository, types

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> Any:
        """Return the state dict with tensors and values in the place of ShardedTensors and ShardedObjects.

        Raises:
            NotFoundError: the repository or the snapshot of the reference is gone.
            FormatError: the file `snapstore.json` is not a reference.
            CheckpointingException: a tensor has another shape in the snapshot (Megatron's).
            CheckpointException: a key is missing, or reading failed (torch's, a BaseException).
        """
        named = self._named(checkpoint_dir)
        if named is None:
            return super().load(sharded_state_dict, checkpoint_dir)
        wanted = list(nested_values(sharded_state_dict))
        tensors = [one for one in wanted if isinstance(one, ShardedTensor)]
        target = _by_key(sharded_state_dict, is_loading=True)
        planner = strategies.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
        )
        with references.repository_of(named, checkpoint_dir, self._where or named["repository"]) as repository:
            reader = self._reader(repository, named, checkpoint_dir)
            with alone_is_meant():
                state_dict_loader.load(
                    target,
                    checkpoint_id=str(named["step"]),
                    storage_reader=reader,
                    planner=planner,
                    no_dist=True,
                )

        def value_of(one: Any) -> Any:
            if isinstance(one, ShardedObject):
                return _with_streams(target[one.unique_key][0])
            return one.data[(0,) * (one.data.ndim - len(one.local_shape))]  # Megatron has put axes before it

        return dict_list_map_outplace(value_of, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Metadata | None = None) -> Any:
        """Return ShardedTensors without data for all tensors of a checkpoint, by key."""
        return super().load_tensors_metadata(checkpoint_dir, metadata or self._metadata(checkpoint_dir))

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Return ShardedTensors and ShardedObjects without data for all of a checkpoint, by key."""
        metadata = self._metadata(checkpoint_dir)
        if metadata is None:
            return super().load_sharded_metadata(checkpoint_dir)
        entries = metadata.state_dict_metadata.items()
        keys = [key for key, entry in entries if isinstance(entry, BytesStorageMetadata)]
        return {key: ShardedObject.empty_from_unique_key(key) for key in keys} | self.load_tensors_metadata(
            checkpoint_dir, metadata
        )

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Refuse to change a snapshot; remove tensors from any other checkpoint as Megatron does.

        Raises:
            InvalidInputError: the checkpoint is a snapshot.
        """
        if self._named(checkpoint_dir) is not None:
            raise InvalidInputError(f"{checkpoint_dir}: is a snapshot, which never changes; load without the keys")
        super().remove_sharded_tensors(checkpoint_dir, key_prefix)

    def _named(self, checkpoint_dir: str | Path) -> dict[str, Any] | None:
        path = Path(checkpoint_dir) / REFERENCE
        return references.read(str(path)) if path.exists() else None

    def _metadata(self, checkpoint_dir: str | Path) -> Metadata | None:
        named = self._named(checkpoint_dir)
        if named is None:
            return None
        with references.repository_of(named, checkpoint_dir, self._where or named["repository"]) as repository:
            return self._reader(repository, named, checkpoint_dir).read_metadata()

    def _reader(self, repository: Repository, named: dict[str, Any], path: str | Path) -> SnapstoreReader:
        """Return a reader of a reference's snapshot."""
        try:
            snapshot = repository.snapshot(f"{named['run']}@{named['step']}")
        except NotFoundError as error:
            raise references.gone(named, path, repository, error) from error
        if snapshot.id != named["snapshot"]:
            again = NotFoundError(f"the step was saved again as id:{snapshot.id[:12]}")
            raise references.gone(named, path, repository, again)
        reader = SnapstoreReader(repository, run=named["run"], types=self._types)
        reader.reset(str(named["step"]))
        return reader


def use_by_default(save: SnapstoreSaveStrategy, load: SnapstoreLoadStrategy) -> None:
    """Make these the strategies that Megatron uses if none is passed, as in Megatron-LM's training loop.

    Megatron registers its own strategies for "torch_dist" again at each look-up, and so silently replaces others. So
    this replaces the function that registers them, which is not part of Megatron's documented interface.

    Raises:
        CapabilityError: this release of Megatron looks strategies up in another way.
    """
    action = base.StrategyAction

    def register() -> None:
        base.register_default_strategy(action.LOAD_SHARDED, "torch_dist", 1, load)
        base.register_default_strategy(action.SAVE_SHARDED, "torch_dist", 1, save)

    before = strategies.register_default_torch_strategies
    strategies.register_default_torch_strategies = register
    if base.get_default_strategy(action.SAVE_SHARDED, "torch_dist", 1) is not save:
        strategies.register_default_torch_strategies = before
        raise CapabilityError(
            f"megatron-core {_version}: looks its default strategies up in another way than 0.16, which "
            "snapstore knows; pass the strategies to dist_checkpointing.save and load"
        )


# -- state dicts


def _by_key(sharded: dict[str, Any], *, is_loading: bool = False) -> dict[str, Any]:
    """Return what this rank stores, or loads, by Megatron's keys: tensors as DCP takes them, and tuples of one object.

    Args:
        is_loading: return targets for a load, in place of values.
    """
    found: dict[str, Any] = {}
    for one in nested_values(sharded):
        if not (is_loading or is_main_replica(one.replica_id)):
            continue
        if isinstance(one, ShardedObject):  # DCP stores a tuple as one value, whatever is in it
            found[one.unique_key] = io.BytesIO() if is_loading else (_without_streams(one.data),)
        else:
            found.setdefault(one.key, []).append(one)
    tensors = {key: of for key, of in found.items() if isinstance(of, list)}
    found.update(strategies.mcore_to_pyt_state_dict(tensors, is_loading))
    return found


def _without_streams(value: Any) -> Any:
    """Return a value with dicts in the place of io.BytesIO, in which Transformer Engine keeps its state."""
    if isinstance(value, io.BytesIO):
        return {_BYTES: value.getvalue()}
    return _mapped(value, _without_streams)


def _with_streams(value: Any) -> Any:
    """Undo `_without_streams`."""
    if isinstance(value, dict) and _BYTES in value:
        return io.BytesIO(value[_BYTES])
    return _mapped(value, _with_streams)


def _mapped(value: Any, change: Any) -> Any:
    if type(value) is dict:
        return {key: change(one) for key, one in value.items()}
    return type(value)(map(change, value)) if type(value) in (list, tuple) else value


# -- waiting


def _when_ended(handle: SaveHandle, mark: str) -> None:
    """Remove a folder once a save has ended."""

    def wait() -> None:
        with suppress(BaseException):  # `finalize` raises it
            handle.result()
        Path(mark).rmdir()

    threading.Thread(target=wait, name="snapstore-megatron", daemon=True).start()


def _wait_for(mark: str, process: int) -> None:
    """Wait until a folder is gone, or the process that removes it has ended; runs in a process of Megatron."""
    while Path(mark).exists() and Path(f"/proc/{process}").exists():
        time.sleep(_POLL_S)
