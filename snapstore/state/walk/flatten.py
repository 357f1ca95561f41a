"""State in, parts out: nested containers, tensors and objects with state_dict/load_state_dict.

In: the state that the user passes to `save`. Out: `Part`s, each with a tree without arrays, specs of its arrays, and
the arrays themselves. The arrays are still the user's memory: nothing is copied here, and a reader checks that they
match their specs (held_array.py). plan.py is the inverse.

Rules that users see:

- An object with `state_dict` and `load_state_dict` is stored as its state; names inside belong to the object.
- Arrays are values: shape, dtype, requires_grad, ties and the order of the dimensions in memory are stored; gaps
  between elements, device, gradients, grad_fn and Python attributes are not. Tied arrays have the same memory, shape,
  stride and dtype, and are sharded alike; arrays that only overlap are stored separately.
- Functions in the state of a torch lr_scheduler are code that its constructor sets (SWALR in older releases). They are
  left out, as torch leaves them out of the state of LambdaLR. `load_state_dict` only updates, so the constructor's
  functions remain.
- A rank of a job may hold sharded tensors (sharded.py), and values of its own (per_rank.py). The specs of sharded
  tensors describe the whole tensors, and the arrays are local tensors. The rank's own values lie in separate parts.

Invariants: the part "" comes first, and a tie refers to an earlier part. torch is imported only when there are tensors.
`flatten` runs in the thread that owns the state.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from ...errors import UnsupportedLeafError
from ..tree.encode import PLAIN, Encoder, encode_plain
from ..values.arrays import Array, address_of, describe, memory_key
from ..values.composite import SHARD, core_of, shard_of
from ..values.containers import CONTAINERS, Items, Path, items_of
from ..values.held_array import Held
from ..values.sharded import Sharding, locals_of, sharding_of
from ..values.tensors import Node, TensorSpec, array_node
from ..values.wrapped import unwrapped
from .learner import DifferentStructureError, own_key
from .per_rank import PerRank, is_per_rank
from .stateful import buffers_of, expand, is_of_torch, is_stateful, names_in_modules
from .structure import Structure, learn

MAX_PARTS = 64  # a state with more top-level containers and objects has only the part ""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a flattened state; `specs[i]` describes `arrays[i]`, which is still the user's memory.

    Attributes:
        shardings: of a rank: for each array its sharding, or None for a plain one. `specs[i]` then describes the whole
            tensor, and `arrays[i].spec` the local one.
        own_nodes: of a part of a rank's own values, whose tree is `["own", [node, ...]]`: each node of an array in it,
            and the index of that array in `arrays`. None: the values are the whole job's.
        buffers: of a rank: the numbers of the arrays that may differ between ranks by design; see `buffers_of`.
    """

    name: str
    tree: Node
    specs: list[TensorSpec]
    arrays: list[Held]
    shardings: list[Sharding | None] = field(default_factory=list)
    own_nodes: list[tuple[Node, int]] | None = None
    buffers: frozenset[int] = frozenset()

    @property
    def key(self) -> str:
        """Return a name that no other part of the state has."""
        return self.name if self.own_nodes is None else own_key(self.name)

    @property
    def plain(self) -> list[int]:
        """Return the numbers of a rank's arrays that are not sharded; none of its own values."""
        return [] if self.own_nodes is not None else [i for i, each in enumerate(self.shardings) if each is None]


def flatten(state: Any, *, of_rank: bool = False) -> list[Part]:
    """Split a state into parts; nothing is copied.

    Args:
        state: Any nesting of containers over tensors, arrays, plain values and objects with state_dict/load_state_dict.
        of_rank: Whether it is the state of one of several ranks: sharded tensors are allowed, and the rank's own values
            are kept apart.

    Returns:
        The part "" with the root of the tree, then one part per top-level container or object of a dict, in its order.
        A part of a rank's own values comes after the part of the same name.

    Raises:
        UnsupportedLeafError: Values have no stored form; all of them (up to 20) are named.
        InvalidInputError: The state contains itself, is nested too deeply, or a `state_dict()` failed.
    """
    return (_RankFlattener() if of_rank else _Flattener()).parts(state)


def flatten_and_learn(state: Any, *, of_rank: bool = False) -> tuple[list[Part], tuple[Structure, list[Array]] | None]:
    """Split a state into parts as `flatten` does, and learn its structure, to recognise a later state by it.

    Returns:
        The parts; and the structure, with the arrays of the state for `Structure.match_of`, or None if the state has
        one that cannot be recognised.
    """
    flattener = _RankFlattener() if of_rank else _Flattener()
    parts = flattener.parts(state)
    if flattener.is_repeated:  # two states of one object may differ
        return parts, None
    try:
        trees, held = {part.key: part.tree for part in parts}, {part.key: part.arrays for part in parts}
        return parts, learn(state, flattener.states, trees, held, of_rank=of_rank)
    except DifferentStructureError:
        return parts, None


def require_stored_forms(state: Any, *, of_rank: bool = False) -> list[Part]:
    """Check that a state can be saved, as far as can be told without objects other than modules and optimizers.

    Other objects are not asked for their state: a data loader would start its workers, or draw random numbers.

    Returns:
        The parts, as `flatten`, without the values of those other objects.

    Raises:
        UnsupportedLeafError, InvalidInputError: as `flatten`.
    """
    flattener = _RankFlattener() if of_rank else _Flattener()
    flattener.is_check = True
    return flattener.parts(state)


class _Memories:
    """The memories of arrays, and where each was put first."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[Any, tuple[str, int]]] = {}  # address -> (first array there, (part, index))
        self._first: dict[tuple[Any, ...] | None, tuple[Any, tuple[str, int]]] = {}  # memory_key -> the same

    def put_first(self, value: Any, here: tuple[str, int]) -> tuple[str, int]:
        """Return the (part, index) where this memory was put first, which may be `here`."""
        address = address_of(value)
        if not address:
            return here
        other, place = self._at.setdefault(address, (value, here))
        if other is value:
            return place
        # Few arrays share an address. Only they need the whole key, which takes a dozen calls of torch.
        self._first.setdefault(memory_key(other), (other, place))
        key = memory_key(value)
        first, place = self._first.setdefault(key, (value, here))
        if memory_key(first) == key:
            return place
        self._first[key] = (value, here)  # a `state_dict()` moved the first array; its old memory was reused
        return here


class _Flattener:
    """One walk over a state; `_part` is the part being filled."""

    def __init__(self) -> None:
        self._part = Part("", None, [], [])
        self._memories = _Memories()
        self._tied: dict[tuple[str, int], int] = {}  # (earlier part, index) -> index of the array tied to it
        self._held: dict[tuple[str, int], Held] = {}  # (part, index) -> array
        self.states: dict[int, Any] = {}  # id of an object -> what its `state_dict` returned
        self._objects: dict[Path, Any] = {}  # the objects that were asked for their state
        self.is_repeated = False  # whether an object was asked for its state twice
        self.is_check = False  # whether only modules and optimizers are asked
        self._encoder = Encoder(self._put, self._expand, columnar=True)

    def parts(self, state: Any) -> list[Part]:
        root, parameters = self._root_of(state)
        items = items_of(root) if type(root) in (dict, OrderedDict) else []
        parts = _parts_in(items)
        if not parts:
            done = [self._fill("", partial(self._encoder.node, root, ()))]
        else:
            # The part "" comes first, so a tie always refers to an earlier part.
            self._encoder.enter(root, ())
            done = [self._fill("", partial(self._encoder.each, root, (), items, parts.keys()))]
            done += [self._fill(name, partial(self._encoder.node, child, (name,))) for name, child in parts.items()]
        self._encoder.raise_problems()
        if parameters is not None:
            done[0] = replace(done[0], tree=[*parameters, done[0].tree])
        del self._encoder  # else the garbage collector alone would free the state's arrays
        return done

    def _root_of(self, state: Any) -> tuple[Any, list[Node] | None]:
        """Return the result of `expand` for an object that is the whole state; any other state itself."""
        return self._expand(state, ()) or (state, None)

    def _fill(self, name: str, tree: Callable[[], Node]) -> Part:
        self._part, self._tied = Part(name, None, [], []), {}
        return replace(self._part, tree=tree())

    def _expand(self, value: Any, path: Path) -> tuple[Any, list[Node] | None] | None:
        if self.is_check and is_stateful(value) and not (type(value) is PerRank or is_of_torch(value)):
            return {}, None
        expanded = expand(value, path)
        if expanded is not None:
            self.is_repeated = self.is_repeated or id(value) in self.states
            self.states[id(value)] = expanded[0]
            self._objects[path] = value
        return expanded

    def _put(self, value: Any, path: Path) -> Node:
        stored = bytes(value) if type(value) is bytearray else unwrapped(value)
        kind, dtype, shape = describe(stored)
        tag = "bytearray" if type(value) is bytearray else kind
        grad = tag in ("tensor", "parameter") and value.requires_grad
        return self._node(TensorSpec(path, kind, dtype, shape, grad, None), stored, tag)

    def _node(self, spec: TensorSpec, stored: Any, tag: str) -> Node:
        """Add an array to the part, unless it is there, and return its node."""
        part = self._part
        index = len(part.specs)
        first = self._put_first(stored, (part.key, index))
        tie = None if first[0] == part.key else first
        index = first[1] if tie is None else self._tied.setdefault(tie, index)
        if index == len(part.specs):
            spec = spec if tie is None else msgspec.structs.replace(spec, tie=tie)
            self._append(spec, stored)
            self._held[part.key, index] = part.arrays[-1]
            if tie is not None:
                part.arrays[-1].ties += ((self._held[tie].spec.path, self._held[tie].value),)
        if self._held[first].value is not stored:
            self._held[first].ties += ((spec.path, stored),)
        return array_node(tag, index, spec.requires_grad)

    def _append(self, spec: TensorSpec, stored: Any) -> None:
        self._part.specs.append(spec)
        self._part.arrays.append(Held.of(stored, spec))

    def _put_first(self, value: Any, here: tuple[str, int]) -> tuple[str, int]:
        """Return the (part, index) where this memory was put first, which may be `here`."""
        return self._memories.put_first(value, here)


class _RankFlattener(_Flattener):
    """One walk over the state of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self._encoder = Encoder(self._put, self._expand, self._special, columnar=True)
        self._own: dict[str, Part] = {}  # by the name of the part
        self._sharded = defaultdict[tuple[Any, ...], _Memories](_Memories)  # by the form of the sharding
        self._empty: dict[tuple[Any, ...], tuple[str, int]] = {}  # place of an empty local tensor -> (part, index)
        self._sharding: Sharding | None = None  # of the array that is being put
        self._locals: list[Any] = []  # its local tensors

    def parts(self, state: Any) -> list[Part]:
        done, parts = [], super().parts(state)
        modules = names_in_modules(self._objects)
        for part in parts:
            done.append(replace(part, buffers=buffers_of(part.specs, modules)))
            if own := self._own.get(part.name):
                done.append(own)
        return done

    def _root_of(self, state: Any) -> tuple[Any, list[Node] | None]:
        return (state, None) if is_per_rank(state) else super()._root_of(state)

    def _special(self, value: Any, path: Path) -> Node:
        """Return the node of a value that only ranks have, or None."""
        if is_per_rank(value):
            return self._put_own(value, path) if self._part.own_nodes is None else None
        return self._put(value, path) if sharding_of(value) is not None else None

    def _put(self, value: Any, path: Path) -> Node:
        self._sharding = sharding_of(value)
        if self._sharding is None:
            node = super()._put(value, path)
            if self._part.own_nodes is not None:
                self._part.own_nodes.append((node, node[1]))
            return node
        if self._part.own_nodes is not None:
            raise UnsupportedLeafError("is sharded over ranks, so it is no rank's own: take it out of PerRank")
        if (core := core_of(value)) is not None:
            node = self._put_own(core, path)
            own = self._own[self._part.name].tree[1][node[1]]
            if type(own) is list and own[0] == "object":  # else it is a problem that is noted already
                own[-1][1].append(SHARD)
                own[-1][2].append(encode_plain(shard_of(value)))
            return node
        self._locals = locals_of(value)
        local = self._locals[0]
        _, dtype, _ = describe(local)
        kind = "parameter" if isinstance(value, sys.modules["torch"].nn.Parameter) else "tensor"
        grad = bool(getattr(value, "requires_grad", False))
        return self._node(TensorSpec(path, kind, dtype, self._sharding.global_shape, grad, None), local, kind)

    def _append(self, spec: TensorSpec, stored: Any) -> None:
        self._part.shardings.append(self._sharding)
        self._part.specs.append(spec)
        if self._sharding is None:
            self._part.arrays.append(Held.of(stored, spec))
            return
        held = [
            Held.of(local, TensorSpec(spec.path, "tensor", spec.dtype, tuple(local.shape), False, spec.tie))
            for local in self._locals
        ]
        held[0].others = tuple(held[1:])
        self._part.arrays.append(held[0])

    def _put_first(self, value: Any, here: tuple[str, int]) -> tuple[str, int]:
        sharding = self._sharding
        if sharding is None:
            return super()._put_first(value, here)
        # The same rows may be a whole tensor, and a rank's share of a larger one.
        others = tuple(map(memory_key, self._locals[1:]))
        form = (sharding.global_shape, sharding.boxes, sharding.group, others)
        if address_of(value):
            return self._sharded[form].put_first(value, here)
        # A tied tensor of which this rank holds nothing has no address; but another rank may hold some of it.
        place = (value.untyped_storage()._cdata, value.storage_offset(), value.dtype, form)
        return self._empty.setdefault(place, here)

    def _put_own(self, value: Any, path: Path) -> Node:
        """Put a value that is this rank's own into the part of such values; return the node that stands for it."""
        shared, name = self._part, self._part.name
        own = self._own.setdefault(name, Part(name, ["own", []], [], [], own_nodes=[]))
        outer = self._memories, self._tied
        self._part, self._memories, self._tied = own, _Memories(), {}  # it is tied to nothing outside
        node = self._encoder.node(value, path)  # in this part it is an object like any other
        self._part, (self._memories, self._tied) = shared, outer
        own.tree[1].append(node)
        return ["rank", len(own.tree[1]) - 1]


def _parts_in(items: Items) -> dict[str, Any]:
    """Return the items of the root that become parts; none if there are too many."""
    parts = {
        key: value
        for key, value in items
        if type(value) not in PLAIN  # a fast check: there may be a million
        and (type(key) is str and key and key.isprintable() and (type(value) in CONTAINERS or is_stateful(value)))
    }
    return parts if len(parts) <= MAX_PARTS else {}
