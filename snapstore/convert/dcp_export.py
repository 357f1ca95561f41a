"""Write a folder that torch.distributed.checkpoint (DCP) loads.

In: a reader of a snapshot. Out: `.metadata` and one file of all tensors. DCP plans with a state whose tensors have no
values. It asks for the values when it writes them, in the order of reading, so memory holds one tensor. DCP pickles a
tuple as one value, so memory also holds all tensors that lie in tuples.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..errors import InvalidInputError
from ..restore.streaming import TensorReader
from ..state.values.arrays import as_bytes, assign
from ..state.values.containers import is_mapping, leaves
from .files import save_torch


def write(temp: Path, reader: TensorReader) -> None:
    """Write a snapshot into a folder.

    Raises:
        InvalidInputError: the state is not a dict, two values would get one name, or DCP cannot hold a dtype.
        IntegrityError: the snapshot is damaged.
        OSError: the folder cannot be written.
    """
    state, tensors = reader.unread()
    if not is_mapping(state):
        raise InvalidInputError(f"{reader.snapshot.ref}: its state is a {type(state).__name__}; DCP saves only dicts")
    planner = _Planner(reader, tensors)
    writer = _Writer(temp, sync_files=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            state_dict_saver.save(dict(state), storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # of torch; it has no other cause than this process
            cause = error.failures[0][0]
            if isinstance(cause, ValueError):
                raise InvalidInputError(
                    f"{reader.snapshot.ref}: DCP cannot hold this state: {cause}; write a .pt file"
                ) from cause
            raise cause from error


class _Writer(FileSystemWriter):
    """Writes all tensors into one file, one by one; torch's own holds all of them until the last is written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan in its order."""
        name, results = "__0_0.distcp", []
        with Path(self.path, name).open("wb") as file:
            for item in plan.items:
                offset, data = file.tell(), planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    save_torch(data.clone() if data.untyped_storage().size() != data.nbytes else data, file)
                else:
                    file.write(data.getbuffer())
                del data
                length = file.tell() - offset
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class _Planner(DefaultSavePlanner):
    """Plans with tensors that have no values, and gives DCP the values in the order of the reader."""

    def __init__(self, reader: TensorReader, tensors: list[Any]) -> None:
        super().__init__()
        self._positions: dict[int, int] = {}
        for position, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor):
                self._positions.setdefault(tensor.untyped_storage()._cdata, position)
        self._tensors = tensors
        self._pickled: set[int] = set()
        self._values = (value for _, value in reader)
        self._at = -1
        self._value: Any = None

    def create_local_plan(self) -> SavePlan:
        """Return the plan, with the tensors in the order of the reader.

        Raises:
            ValueError: a tensor has a dtype whose size DCP does not know.
        """
        planned = super().create_local_plan()
        for item in planned.items:
            dtype = item.tensor_data.properties.dtype if item.tensor_data is not None else None
            if str(dtype).startswith("torch.bits"):
                raise ValueError(f"{item.index.fqn}: a tensor of {dtype}")
        others = [item for item in planned.items if item.type == WriteItemType.BYTE_IO]
        self._pickled = {position for item in others for position in self._positions_in(item)}
        return dataclasses.replace(planned, items=sorted(planned.items, key=self._position))

    def _position(self, item: WriteItem) -> int:
        return max(self._positions_in(item), default=-1)

    def _positions_in(self, item: WriteItem) -> list[int]:
        """Return the positions of the tensors in a value; DCP pickles a tuple as one value, with its tensors."""
        tensors = [leaf for _, leaf in leaves(self.lookup_object(item.index), ()) if isinstance(leaf, torch.Tensor)]
        found = (self._positions.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return [position for position in found if position is not None]

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the value of a tensor, or the bytes of another value."""
        position = self._position(write_item)
        while self._at < position:
            self._at, self._value = self._at + 1, None  # let go of it before the next is read
            self._value = next(self._values)
            if self._at in self._pickled:
                assign(self._tensors[self._at], as_bytes(self._value))
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        if self._at != position:
            raise AssertionError(f"{write_item.index.fqn}: was asked for out of order")
        return self._value.detach()
