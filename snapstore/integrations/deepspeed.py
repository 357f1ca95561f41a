"""DeepSpeed: a CheckpointEngine that stores what all ranks save as one snapshot.

    engine, *_ = deepspeed.initialize(...)
    engine.checkpoint_engine = SnapstoreCheckpointEngine("/data/snapshots", run="exp1")
    engine.save_checkpoint("checkpoints")        # leaves references in checkpoints/global_step100/, and `latest`
    engine.load_checkpoint("checkpoints")

In: the state dicts that `save_checkpoint` passes to `save` on each rank, one for each file. Out: at `commit`, one
snapshot of all ranks with a part for each file, under the file's name; then a reference at the path of each file.
DeepSpeed calls, on every rank: create, save for each file that the rank writes, commit; then rank 0 writes `latest`.
Invariant: rank 0 writes the references, and `latest` after them, only once the snapshot is durable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import torch

from ..dcp.names import step_of
from ..distributed.choose import place
from ..errors import CapabilityError, InvalidInputError, SnapstoreError, needs
from ..manager import SnapshotManager
from ..options import SaveOptions
from ..repository import Repository
from ..retention import Policy
from ..save.background import SaveHandle
from ..save.hooks import HookOptions
from ..text import quoted
from . import references

with needs("deepspeed>=0.17", 'pip install "snapstore[deepspeed]"'):
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

#: The classes of values in a checkpoint of DeepSpeed that a load creates again.
_TYPES: Sequence[type] = (ZeroStageEnum, fragment_address)
_SCALERS = {kind.__name__: kind for kind in (loss_scaler.LossScaler, loss_scaler.DynamicLossScaler)}
_SCALER = "snapstore: loss scaler"


class SnapstoreCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # deepspeed has no types
    """Saves the checkpoints of a DeepSpeedEngine as snapshots of a run. Make one on every rank.

    ZeRO stages 0 to 3, pipelines and experts: each file that a rank would write is a part of the snapshot. Unchanged
    chunks and deltas are found by the names of the files, from one tag to the next. The ranks share a file system
    for the references.

    Args:
        repository: a URL or path, where a repository is made if there is none; or an open Repository.
        run: the name of the run.
        keep: see `SnapshotManager`. References to forgotten snapshots stay, and loading one is an error that says so.
        async_save: save in the background. Call `save_checkpoint(..., save_latest=False)` then: DeepSpeed would write
            `latest` before the commit, so this engine writes it after that.
        types: classes of values in `client_state` that a load creates again.
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
        async_save: bool = False,
        types: Sequence[type] = (),
        options: SaveOptions | None = None,
        **hooks: Unpack[HookOptions],
    ) -> None:
        super().__init__()
        self.name = "SnapstoreCheckpointEngine"
        self.manager: SnapshotManager | None = None
        self._where, self._async = repository, async_save
        made = partial(SnapshotManager, repository, run=run, keep=keep, async_save=async_save, options=options)
        self._make = partial(made, **hooks)
        self._types = (*_TYPES, *types)
        self._files: dict[str, Any] = {}
        self._info: Any = None
        self._is_checkpoint = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="snapstore-references")
        self._writing: Future[None] | None = None

    # -- what DeepSpeed calls, in this order; each on every rank, but for save and load

    def create(self, info: Any) -> None:
        """Begin a checkpoint.

        Args:
            info: a CheckpointCommitInfo, whose tag ends with the step.

        Raises:
            CapabilityError: this release of DeepSpeed passes no CheckpointCommitInfo.
            InvalidInputError: the tag does not end with a step; or DeepSpeed is to write `latest` with `async_save`.
            SnapstoreError: an earlier save failed in the background.
        """
        if not isinstance(info, CheckpointCommitInfo):
            raise CapabilityError(
                f"create({quoted(info)}): "
                "this DeepSpeed passes no CheckpointCommitInfo; snapstore was tested with 0.19.8"
            )
        step_of(info.tag)
        if self._async and info.save_latest:
            raise InvalidInputError(
                "async_save=True: DeepSpeed would write 'latest' before the checkpoint is durable; call "
                "save_checkpoint(..., save_latest=False), and it is written here, after the commit"
            )
        self.wait_until_finished()
        if self.manager is None:
            self.manager = self._make()
        self._info, self._files, self._is_checkpoint = info, {}, False

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder. DeepSpeed makes the folder of a tag on all ranks, and only for a checkpoint."""
        super().makedirs(path, exist_ok=exist_ok)
        if self._info is not None and Path(path) == self._folder():
            self._is_checkpoint = True

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a state dict, for the file at `path`, until `commit`. Do not change it until then.

        A file outside the folder of the tag, such as that of `save_16bit_model`, is for other programs: it is written
        with torch.save.

        Raises:
            InvalidInputError: `create` was not called before.
        """
        if self._info is None:
            raise InvalidInputError(f"save({path}): before create")
        if self._folder() in Path(path).parents:
            self._files[str(Path(path).relative_to(self._folder()))] = _without_scalers(state_dict)
        else:
            torch.save(state_dict, path)

    def commit(self, info: Any) -> bool:
        """Store the files of all ranks as one snapshot, and leave references; with `async_save`, in the background.

        Raises:
            SnapstoreError: the save failed, on this rank or another one; no reference was written.
        """
        files, self._files, self._info = self._files, {}, None
        if not self._is_checkpoint:
            return True
        assert self.manager is not None
        handle = self.manager.save(step_of(info.tag), files, metadata={"tag": info.tag}, force=True)
        self._writing = self._worker.submit(self._publish, handle, info)
        if not self._async:
            self.wait_until_finished()
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the state dict of the file that the reference at `path` names; tensors are in host memory.

        Args:
            map_location: a device for all tensors; None or a function: host memory.

        Raises:
            NotFoundError: there is no file, or its snapshot is gone.
            FormatError: the file is no reference.
        """
        self.wait_until_finished()
        where = self._where if self.manager is None else self.manager.repository
        return _with_scalers(references.restore(path, where, map_location, self._types))

    def preserves_storage_sharing(self) -> bool:
        """Return False: only the elements of a view are stored, not its whole memory, so DeepSpeed need not copy it."""
        return False

    # -- what the program calls

    def wait_until_finished(self) -> None:
        """Wait for the save in the background, and raise its error."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except SnapstoreError:
            with suppress(SnapstoreError):
                if self.manager is not None:
                    self.manager.check_for_errors()  # the error is raised here, so not by the next call too
            raise
        if self.manager is not None:
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and release everything; every rank calls it."""
        try:
            self.wait_until_finished()
        finally:
            self._worker.shutdown()
            manager, self.manager = self.manager, None
            if manager is not None:
                manager.close()

    def __enter__(self) -> SnapstoreCheckpointEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self.manager is not None:
            self.manager.__exit__(kind, error, trace)

    def _folder(self) -> Path:
        return Path(self._info.save_dir, self._info.tag)

    def _publish(self, handle: SaveHandle, info: Any) -> None:
        """Write the references of all ranks once the snapshot is committed; with `async_save` then write `latest`."""
        snapshot = handle.result()
        if place()[0] != 0 or snapshot is None or self.manager is None:
            return
        folder = Path(info.save_dir, info.tag)
        for part in sorted({ref.part for ref in snapshot.manifests} - {""}):
            references.write(str(folder / part), self.manager.repository, snapshot, part=part)
        if self._async:
            latest = Path(info.save_dir, f"latest.{os.getpid()}.tmp")
            latest.write_text(info.tag)
            latest.replace(Path(info.save_dir, "latest"))


# -- the one class of DeepSpeed that has no stored form


def _without_scalers(value: Any) -> Any:
    """Return a state with plain dicts in the place of loss scalers."""
    name = type(value).__name__
    if type(value) is _SCALERS.get(name):
        return {_SCALER: name, "attributes": dict(vars(value))}
    return _mapped(value, _without_scalers)


def _with_scalers(value: Any) -> Any:
    """Undo `_without_scalers`."""
    if isinstance(value, dict) and value.get(_SCALER) in _SCALERS:
        kind = _SCALERS[value[_SCALER]]
        made = kind.__new__(kind)
        vars(made).update(value["attributes"])
        return made
    return _mapped(value, _with_scalers)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with its values changed; return any other value unchanged."""
    if isinstance(value, dict):
        changed = {key: change(one) for key, one in value.items()}
        same = all(changed[key] is value[key] for key in value)
        return value if same else type(value)(changed)
    if type(value) in (list, tuple):
        items = [change(one) for one in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value
