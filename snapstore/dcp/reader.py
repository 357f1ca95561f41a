"""SnapstoreReader: DCP's StorageReader over a run of a repository.

In: DCP's requests: the metadata, then boxes of tensors, and values. Out: filled tensors, and values. In the metadata
each tensor is one chunk, however many ranks saved it: so the metadata, and each rank's plan, have one item per tensor.
The reader finds the stored bytes of each box. `no_dist=True` works, and then nothing is communicated.

    1 reset(checkpoint_id)       2 read_metadata: reads the manifests       3 set_up_storage_reader: nothing to do
    4 prepare_local_plan, prepare_global_plan: all ranks get the snapshot that the coordinator has found
    5 read_data: reads the boxes that the plan names (see `planner.read_items`), and checks each chunk against its
      digest
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..errors import InvalidInputError, NotFoundError, SnapstoreError
from ..repository import Repository
from ..restore.sources import AsRank
from ..text import counted, log, some
from .names import is_tensor, refs_of
from .planner import SnapstoreLoadPlanner, read_items
from .stored import StoredState, TargetBox
from .target import Target, Url, place_in


class SnapstoreReader(Target, StorageReader):
    """Loads snapshots of a run through DCP, of one process or of any number of ranks.

    Args:
        repository: a URL, path or store; or an open Repository.
        run: the name of the run.
        types: your classes of which values are made. Values of other classes of yours come back in a plain form;
            nothing is imported.
        per_rank: which rank's own values (`PerRank`, `RngState`) this rank gets. "same": those of the rank with its
            number, if as many ranks saved; a number: those of that rank; "drop": none. The keys of values that it does
            not get are missing.
        process_group: the ranks that load together; None: all ranks of the job.

    A checkpoint id is a step, or a path or text that ends with a step, a tag or "latest". If the run has a tag such as
    "v2" or "step-100", the tag counts, and not the step with which it ends. Several threads may load at once.

    Attributes:
        snapshot: the one that was read last.
    """

    def __init__(
        self,
        repository: Url | Repository,
        *,
        run: str,
        types: Sequence[type] = (),
        per_rank: Literal["same", "drop"] | int = "same",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(repository, run, Repository.open)
        rank, world_size = place_in(process_group)
        self._as_rank = AsRank(per_rank, rank, max(world_size, 1))
        self.snapshot: Any = None
        self._types = types
        self._stored: StoredState | None = None
        self._own = threading.local()  # checkpoint_id and stored, of this thread: DCP loads in one thread

    # -- what DCP calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the checkpoint id of the next load of this thread; None: keep the present one."""
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self._own.checkpoint_id = checkpoint_id

    def _asked(self) -> Any:
        """Return the checkpoint id of this thread's load."""
        return getattr(self._own, "checkpoint_id", self.checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Read the manifests of the snapshot, and return DCP's description of its contents.

        It accepts no `kwargs`. If it did, DCP would try again as if each rank had saved alone; this rank would then
        leave out collectives in which the others wait. An error is logged too: DCP before torch 2.13 drops it, and
        raises "metadata is None".

        Raises:
            NotFoundError: the checkpoint id names no committed snapshot of the run.
            InvalidInputError: the state is no dict, so DCP cannot load it.
            IntegrityError, FormatError: the snapshot is damaged.
            IntegrityError, StorageError: the checkpoint id may name a snapshot whose record is damaged, is gone or
                cannot be read.
        """
        try:
            stored = self._open(self._ref())
        except SnapstoreError as error:
            log.warning("checkpoint %s cannot be loaded: %s", self._asked(), error)
            raise
        described: dict[str, Any] = {}
        for key, leaf in stored.leaves.items():
            described[key] = BytesStorageMetadata()
            if is_tensor(leaf.value):
                form = stored.form(leaf.value)
                whole = ChunkStorageMetadata(torch.Size([0] * form.dim()), form.size())
                properties = TensorProperties(dtype=form.dtype, requires_grad=leaf.value.requires_grad)
                described[key] = TensorStorageMetadata(properties, form.size(), [whole])
        names = {key: leaf.path for key, leaf in stored.leaves.items()}
        meta = StorageMeta(self._asked(), save_id=stored.snapshot.id, load_id=stored.snapshot.id)
        return Metadata(described, planner_data=names, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has read all that is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Name the coordinator's snapshot in all plans: ranks find different ones if a save is committed meanwhile."""
        return [replace(plan, storage_data=self.present().snapshot.id) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors and set the values that a plan names.

        Returns:
            A future that is complete.

        Raises:
            NotFoundError: the snapshot lacks a key of the plan.
            InvalidInputError: the coordinator has found a snapshot of other keys or shapes; the planner gives a tensor
                of another shape than the item's; the plan wants a tensor, and the snapshot has a value; it leaves out
                some of an optimizer's state; this is called before `read_metadata`; or see `read_items`, and
                `StoredState.pieces_in`.
            UnsupportedLeafError: see `read_items`.
            IntegrityError, FormatError: a chunk is damaged; the tensors may be half written.
        """
        plan = replace(plan, items=read_items(plan, planner))
        stored = self._agreed(plan)
        held: Any = getattr(planner, "state_dict", {})
        if type(planner) in (DefaultLoadPlanner, SnapstoreLoadPlanner):  # others may select keys
            _require_whole_optimizers(stored, held)
        pieces, values, cast, inner = [], [], [], list[TargetBox]()
        for item in plan.items:
            leaf = stored.leaves.get(item.storage_index.fqn)
            if leaf is None:
                raise NotFoundError(f"{stored.snapshot.ref}: has no {item.storage_index.fqn!r}")
            if item.type is LoadItemType.BYTE_IO:
                if stored.is_composite(leaf.value):
                    inner += stored.pieces_in(leaf.value, held.get(item.dest_index.fqn), item.dest_index.fqn)
                else:
                    values.append(item)
                continue
            if not is_tensor(leaf.value):
                raise InvalidInputError(f"{item.storage_index.fqn}: is a value in {stored.snapshot.ref}, not a tensor")
            target = planner.resolve_tensor(item)
            _check_shape(item, target)
            if target.dtype != stored.form(leaf.value).dtype:
                cast.append(item.storage_index.fqn)
            pieces.append(TargetBox(leaf.value, tuple(item.storage_offsets), tuple(item.lengths), target.detach()))
        if cast:
            what = counted(len(cast), "tensor")
            log.warning("%s: casting %s to the dtypes given: %s", stored.snapshot.ref, what, some(cast, 5))
        stored.fill([*pieces, *inner])
        tensors = (item for item in plan.items if item.type is not LoadItemType.BYTE_IO)
        for item, piece in zip(tensors, pieces, strict=True):
            planner.commit_tensor(item, piece.target)
        for item, value in zip(values, stored.values([item.storage_index.fqn for item in values]), strict=True):
            data = io.BytesIO()  # planners expect the format of torch.save; no stored bytes are unpickled
            torch.save(value, data)
            data.seek(0)
            planner.load_bytes(item, data)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self, ref: str) -> StoredState:
        stored = StoredState(self.repository, ref, self._types, self._as_rank)
        self._stored = self._own.stored = stored
        self.snapshot = stored.snapshot
        return stored

    def present(self) -> StoredState:
        """Return the snapshot that this thread has read; or that was read last, if this thread has read none."""
        stored: StoredState | None = getattr(self._own, "stored", self._stored)
        if stored is None:
            raise InvalidInputError("read_data: before read_metadata")
        return stored

    def _agreed(self, plan: LoadPlan) -> StoredState:
        """Return the snapshot that a plan names: the coordinator's; raises InvalidInputError as `read_data` does."""
        own = self.present()
        if plan.storage_data in (None, own.snapshot.id):
            return own
        agreed = self._open(f"id:{plan.storage_data}")
        for key in (item.storage_index.fqn for item in plan.items):
            if _form(agreed, key) != _form(own, key):
                raise InvalidInputError(
                    f"{key}: this rank found {_form(own, key)} in {own.snapshot.ref}, the coordinator found "
                    f"{_form(agreed, key)} in {agreed.snapshot.ref}: a save was committed in between; load a step by "
                    "its number"
                )
        log.info("%s: found %s, and loads what the coordinator has found", agreed.snapshot.ref, own.snapshot.ref)
        return agreed

    def _ref(self) -> str:
        """Return the reference of the snapshot that the checkpoint id names."""
        *tags, last = refs_of(self.run, self._asked())
        for ref in tags:
            with suppress(NotFoundError):
                self.repository.snapshot(ref)
                return ref
        return last


def _form(stored: StoredState, key: str) -> str:
    """Return the form of a leaf: missing, a value, or a tensor of a shape."""
    leaf = stored.leaves.get(key)
    if leaf is None:
        return "missing"
    return f"a tensor of shape {tuple(stored.form(leaf.value).shape)}" if is_tensor(leaf.value) else "a value"


def _check_shape(item: ReadItem, target: torch.Tensor) -> None:
    if tuple(target.shape) != tuple(item.lengths):
        raise InvalidInputError(
            f"{item.dest_index.fqn}: the planner's tensor has shape {tuple(target.shape)}, expected "
            f"{tuple(item.lengths)} as in its plan"
        )


def _require_whole_optimizers(stored: StoredState, keys: Collection[str]) -> None:
    """Check that a load takes all that the snapshot has of an optimizer, or nothing; raises InvalidInputError."""
    if (key := stored.left_out(keys)) is not None:
        raise InvalidInputError(
            f"{key}: the snapshot has this value of an optimizer, but the state to fill has only others of it: a new "
            "optimizer has no state yet; call snapstore.dcp.load(state, reader, step) with the "
            "optimizer itself in `state`, or pass the state that get_optimizer_state_dict(model, optimizer) of "
            "torch.distributed.checkpoint.state_dict makes; nothing was loaded"
        )
