"""SnapstorePlanner and SnapstoreLoadPlanner: they keep the state as it was given, beside DCP's flat view of it.

In: the state of a save. Out, for the writer: the state to store. DCP's flat keys keep only lists, and dicts with text
as keys. They lose an OrderedDict, a key that is an int, and an empty dict. `state_of` returns the state of any planner.
In a load, values go to the keys that the state has. `read_items` corrects the plans of `DefaultLoadPlanner`s:
for strided shards (FSDP2 over tensor parallelism), DCP may take rows that this rank does not hold.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from ..errors import InvalidInputError
from ..save.inputs import PartInput
from ..state.values.arrays import memory_key
from ..state.values.containers import Path
from ..state.values.sharded import Boxes, Sharding, dtensor_like, locals_of, sharding_of
from ..state.values.wrapped import unwrapped
from ..state.walk.per_rank import is_per_rank
from ..state.walk.stateful import OptimizerState, parameters_of
from ..text import counted
from .names import Closed
from .target import NO_PROCESS

_LeafPlace = tuple[Any, Any]  # a container and a key of it
_numbers = count()
_CHANGING = ("set_up_planner", "create_local_plan", "lookup_object", "resolve_data", "transform_object")


@dataclass(slots=True, weakref_slot=True, eq=False)
class Staged:
    """The copies of a state.

    Attributes:
        give: returns the copies, or raises the error of the copy; it takes time, and is called until it returns.
        started: when the caller began to wait [s, time.monotonic].
        stall_s: how long the caller waited [s].
        key: of the only leaf of the state that DCP saves. No other one has it, so it is in no plan of DCP's plan cache.
    """

    give: Callable[[], Sequence[PartInput]] | None
    started: float
    stall_s: float
    key: str = field(default_factory=lambda: f"snapstore.staged.{next(_numbers)}")
    _inputs: Sequence[PartInput] = ()

    def inputs(self) -> Sequence[PartInput]:
        """Return the copies. Raises as `give` does."""
        if self.give is not None:
            self._inputs, self.give = self.give(), None
        return self._inputs

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(f"a state that was staged {NO_PROCESS}")


def staged_of(planner: SavePlanner) -> Staged | None:
    """Return the copies of a state that was staged; None: the planner has the state itself.

    Raises:
        InvalidInputError: the planner changes the state: that is not possible with copies.
    """
    flat = getattr(planner, "state_dict", None) or {}
    staged = next((leaf for leaf in flat.values() if type(leaf) is Staged), None) if len(flat) == 1 else None
    if staged is not None and not is_plain(planner):
        raise InvalidInputError(
            f"planner {type(planner).__name__}: changes names or values, and the state was staged as a whole; pass "
            "async_stager=torch.distributed.checkpoint.staging.DefaultStager() beside it, or change the state first"
        )
    return staged


class _StateOf(dict[str, Any]):
    """The state of an optimizer, which belongs to it: the save stores the forms of its parameters."""

    optimizer: Any = None

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy has no optimizer


@dataclass(frozen=True, slots=True)
class _FailedState:
    """The error of an object's state_dict, in the place of its state."""

    error: Exception


def closed(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state for DCP's functions: objects are replaced by their states, and each rank's own values `Closed`.

    DCP would call state_dict of the objects where it does not tell the other ranks of an error: they would wait for
    this rank. So `opened` raises the error.
    """
    return {key: _closed(value) for key, value in state.items()}


def _closed(value: Any) -> Any:
    if is_per_rank(value):
        return Closed(value)
    if not isinstance(value, Stateful):
        return value
    try:
        state = value.state_dict()
    except Exception as error:  # noqa: BLE001  `opened` raises it
        return _FailedState(error)
    if type(state) is dict and parameters_of(value) is not None:
        state = _StateOf(state)
        state.optimizer = value
    return Closed(state) if isinstance(state, Stateful) else state


def opened(state: Any) -> Any:
    """Return a state with the values that `closed` has closed; DCP may have changed the others.

    Raises:
        Exception: the error of an object's state_dict.
    """
    for value in state.values():
        if type(value) is _FailedState:
            raise value.error
    if not any(type(value) in (Closed, _StateOf) for value in state.values()):
        return state
    return {key: _original(value) for key, value in state.items()}


def _original(value: Any) -> Any:
    if type(value) is _StateOf:
        return OptimizerState(value.optimizer, dict(value))
    return value.value if type(value) is Closed else value


class SnapstorePlanner(DefaultSavePlanner):
    """A DefaultSavePlanner that also keeps the state dict with its own containers and keys.

    Attributes:
        given: the state dict of the save that is being planned.
    """

    given: Any = None

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state dict of a save."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.given = opened(state_dict)


class SnapstoreLoadPlanner(DefaultLoadPlanner):
    """A DefaultLoadPlanner that puts each value under the key that the state has.

    DCP's paths have all keys as text. For a value below a numeric key, DCP's own planner adds a second key, and the
    value under the first one stays as it was.

    Args:
        allow_partial_load: whether keys of the state that the snapshot lacks keep their values; else they are an error.
        complete: is called with the state first, and may add to it.
    """

    def __init__(self, allow_partial_load: bool = False, complete: Callable[[Any], None] | None = None) -> None:
        super().__init__(flatten_sharded_tensors=False, allow_partial_load=allow_partial_load)
        self._complete = complete
        self._places: dict[Path, _LeafPlace] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the state dict of a load.

        FSDP's sharded tensors are rewritten in DCP's flat view, as in a save. DCP rewrites them in the nested state
        before. That puts None before a tensor in a list where the state has only empty dicts and lists, and then the
        snapshot lacks the key of None.
        """
        if self._complete is not None:
            self._complete(state_dict)
        self.flatten_state_dict = True
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.flatten_state_dict = False  # DCP puts the values into its flat view then, and `load_bytes` into the state
        self.state_dict = _flatten_sharded_tensors(self.state_dict)

    def create_local_plan(self) -> LoadPlan:
        """Return the plan. DCP's own would look for the keys of torch before 2.4, and load values of other keys."""
        assert self.metadata is not None
        plan: LoadPlan = create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)
        return plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Find the places of the values before any is replaced."""
        plan: LoadPlan = super().finish_plan(new_plan)
        leaves = {path: self.state_dict[key] for key, path in self.mappings.items() if key in self.state_dict}
        self._places = {}
        _add_places(self.original_state_dict, (), leaves, self._places)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into its place."""
        super().load_bytes(read_item, value)
        name = read_item.dest_index.fqn
        container, key = self._places[self.mappings[name]]
        container[key] = self.state_dict[name]


def _add_places(container: Any, path: Path, leaves: Mapping[Path, Any], places: dict[Path, _LeafPlace]) -> None:
    """Add the container and the key of each leaf below a path, by DCP's path. Only with its value is a path unique."""
    is_dict = isinstance(container, Mapping)
    for key, child in container.items() if is_dict else enumerate(container):
        below = (*path, str(key) if is_dict else key)
        if below in leaves and leaves[below] is child:
            places[below] = container, key
        elif isinstance(child, Mapping | list):
            _add_places(child, below, leaves, places)


def read_items(plan: LoadPlan, planner: LoadPlanner) -> list[ReadItem]:
    """Return the items of a load plan; those of strided shards have the boxes that this rank holds.

    DCP takes one box for each DTensor, cut from left to right. A strided shard may have several boxes, or others (see
    `state.sharded`); then DCP would read rows of other ranks, or none.

    Raises:
        UnsupportedLeafError: no box can be told from the shape of a strided shard.
        InvalidInputError: DCP finds no rows of a strided shard on this rank, which has some, and the planner makes a
            plan of its own: it may rename the items of this shard, or leave them out.
    """
    metadata: Metadata | None = getattr(planner, "metadata", None)
    if not isinstance(planner, DefaultLoadPlanner) or metadata is None:
        return list(plan.items)
    names = {item.dest_index.fqn: item.storage_index.fqn for item in plan.items}
    corrected, unnamed = dict[str, list[ReadItem]](), list[str]()
    for key, value in planner.state_dict.items():
        name = names.get(key, key)
        if not _is_strided(value) or not isinstance(metadata.state_dict_metadata.get(name), TensorStorageMetadata):
            continue
        of_dcp = _boxes_of_dcp(value)
        if key not in names and of_dcp:
            continue  # the planner leaves it out
        sharding = sharding_of(value)
        if sharding is not None and sharding.boxes != of_dcp:
            corrected[key] = _items_of_boxes(key, name, sharding.boxes)
            if key not in names:
                unnamed.append(key)
    if unnamed and not _is_plain_load(planner):
        raise InvalidInputError(
            f"{unnamed[0]}: this rank has rows of it, but {type(planner).__name__} returns no item for it, because DCP "
            "finds no rows here; so the tensor to load is unknown: return an item for it on this rank too, or take it "
            "out of the state"
        )
    kept = [item for item in plan.items if item.dest_index.fqn not in corrected]
    return kept + [item for items in corrected.values() for item in items]


def _is_plain_load(planner: DefaultLoadPlanner) -> bool:
    """Return whether a planner makes the plan of DCP, in which each key is read from the same name."""
    names = ("create_local_plan", "create_global_plan", "finish_plan")
    return _has_methods_of((DefaultLoadPlanner, SnapstoreLoadPlanner), names, planner)


def _is_strided(value: Any) -> bool:
    return isinstance(value, DTensor) and any(hasattr(placement, "split_factor") for placement in value.placements)


def _boxes_of_dcp(value: Any) -> Boxes:
    """Return the boxes of a DTensor as DCP finds them."""
    chunks = value.__create_chunk_list__() if value.device_mesh.get_coordinate() is not None else []
    return tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks if all(chunk.sizes))


def _items_of_boxes(key: str, name: str, boxes: Boxes) -> list[ReadItem]:
    """Return the items that read boxes of a stored tensor into the rows of a local tensor, one after the other."""
    items, row = list[ReadItem](), 0
    for number, (offsets, sizes) in enumerate(boxes):
        items.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(key, offsets, number),
                dest_offsets=torch.Size((row, *(0 for _ in sizes[1:]))),
                storage_index=MetadataIndex(name, [0] * len(sizes), 0),
                storage_offsets=torch.Size(offsets),
                lengths=torch.Size(sizes),
            )
        )
        row += sizes[0]
    return items


def is_plain(planner: SavePlanner) -> bool:
    """Return whether a planner leaves the state as it is: it overrides no method that sets names or values."""
    known = (DefaultSavePlanner, SnapstorePlanner)
    return isinstance(planner, DefaultSavePlanner) and _has_methods_of(known, _CHANGING, planner)


def _has_methods_of(known: Sequence[type], names: Sequence[str], planner: object) -> bool:
    """Return whether a planner has each of some methods from one of the classes that are known."""
    return all(any(getattr(type(planner), name) is getattr(one, name) for one in known) for name in names)


def state_of(planner: SavePlanner, plan: SavePlan) -> Any:
    """Return the state to be stored for a planner.

    Args:
        plan: the result of its `create_local_plan`.

    Raises:
        InvalidInputError: the planner is no DefaultSavePlanner; or it changes values that cannot be replaced.
    """
    if isinstance(planner, SnapstorePlanner) and is_plain(planner):
        return planner.given
    if not isinstance(planner, DefaultSavePlanner):
        raise InvalidInputError(
            f"planner {type(planner).__name__}: expected a subclass of DefaultSavePlanner, which keeps the state dict"
        )
    flat = dict(planner.state_dict)
    if not is_plain(planner):
        if not plan.usable:  # the plan of the last save is valid
            plan = SavePlanner._cached_save_plan.get(planner._cached_plans_key, plan)
        planned = {item.index.fqn for item in plan.items}
        flat = {key: value for key, value in flat.items() if key in planned}
        flat.update(_changed(planner, plan, flat))
    # FSDP's flattening of sharded tensors may change keys, which then have no path.
    return unflatten_state_dict(flat, {key: planner.mappings.get(key, (key,)) for key in flat})


def _changed(planner: DefaultSavePlanner, plan: SavePlan, flat: dict[str, Any]) -> dict[str, Any]:
    """Return, by key, the tensors for which a planner returns other tensors than the state dict has.

    A key may have several items, each for one box of the tensor on this rank.

    Raises:
        InvalidInputError: a value is no tensor, or has another shape; or only some boxes of a tensor are changed.
    """
    items: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        if item.type is not WriteItemType.BYTE_IO:
            items.setdefault(item.index.fqn, []).append(item)
    found = ((key, _resolved(planner, key, flat.get(key), of)) for key, of in items.items())
    return {key: value for key, value in found if value is not None}


def _resolved(planner: DefaultSavePlanner, key: str, held: Any, items: Sequence[WriteItem]) -> Any:
    """Return the tensor that a planner makes of a tensor; None: it is unchanged. Raises as `_changed` does."""
    values: list[Any] = [unwrapped(planner.resolve_data(item)) for item in items]
    name = f"{key}: {type(planner).__name__}"
    sharding = None if held is None else sharding_of(held)
    if not all(isinstance(one, torch.Tensor) for one in values) or not (sharding or isinstance(held, torch.Tensor)):
        raise InvalidInputError(f"{name} makes a {type(values[0]).__name__} of a tensor")
    old = [unwrapped(held)] if sharding is None else locals_of(held)
    boxes = [one.tensor_data.chunk for one in items if one.tensor_data is not None]
    parts = [(box, value) for box, value in zip(boxes, values, strict=True) if value.numel()]
    if _is_strided(held) and len(items) == len(old) == 1:  # DCP's box may be another one: see `read_items`
        there = [old[0] for _ in parts]
    else:
        there = [_box_in(sharding, old, box) for box, _ in parts]
    for place, (_, value) in zip(there, parts, strict=True):
        if place is None or value.shape != place.shape:
            raise InvalidInputError(
                f"{name} returns shape {tuple(value.shape)} for this rank's box of a {type(held).__name__}, which has "
                "another: change only values and dtypes, or change the state before it is saved"
            )
    is_same = all(memory_key(value) == memory_key(place) for place, (_, value) in zip(there, parts, strict=True))
    if is_same and all(value.dtype == old[0].dtype for value in values):
        return None
    if left := sum(local.numel() for local in old) - sum(value.numel() for _, value in parts):
        raise InvalidInputError(
            f"{name} changes it and omits {counted(left, 'element')} of this rank: return items for all"
        )
    if len(parts) == len(old) == 1:
        new = [parts[0][1].detach()]
    else:
        new = [torch.empty(local.shape, dtype=values[0].dtype, device=values[0].device) for local in old]
        for box, value in parts:
            place = _box_in(sharding, new, box)
            assert place is not None
            place.copy_(value.detach())
    if sharding is None:
        return new[0]
    if isinstance(held, DTensor) and not sharding.is_apart:
        return dtensor_like(held, new[0])
    return Shards(sharding.global_shape, sharding.boxes, new)


def _box_in(
    sharding: Sharding | None, tensors: Sequence[torch.Tensor], box: ChunkStorageMetadata
) -> torch.Tensor | None:
    """Return a view of a box of the whole tensor, in the local tensors of this rank; None: they do not have it."""
    first = tensors[0]
    boxes = (((0,) * first.dim(), tuple(first.shape)),) if sharding is None else sharding.boxes
    row = 0  # of the local tensor, which may have the rows of several boxes
    for number, (offsets, sizes) in enumerate(boxes):
        if sharding is not None and sharding.is_apart:
            local = tensors[number]
        else:
            local = first[row : row + sizes[0]] if sizes else first
            row += sizes[0] if sizes else 0
        starts = [at - start for at, start in zip(box.offsets, offsets, strict=True)]
        ends = [at + size for at, size in zip(starts, box.sizes, strict=True)]
        if min(starts, default=0) >= 0 and all(end <= size for end, size in zip(ends, sizes, strict=True)):
            return local[tuple(map(slice, starts, ends))]
    return None


@dataclass(slots=True, eq=False)
class Shards:
    """A tensor of which this rank holds some boxes, with DCP's methods for these; `state.sharded` reads it by them.

    Attributes:
        shape: of the whole tensor.
        boxes: (offsets, sizes) of each box.
        tensors: the memory of each box.
    """

    shape: Sequence[int]
    boxes: Boxes
    tensors: Sequence[torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype."""
        return self.tensors[0].dtype

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size(self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes."""
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of a box."""
        return self.tensors[index.index or 0]
