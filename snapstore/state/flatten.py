"""State in, parts out: nested containers, tensors and objects with state_dict/load_state_dict.

In: the state that the user passes to `save`. Out: `Part`s, each with a tree without arrays, specs of its arrays, and
the arrays themselves. The arrays are still the user's memory: nothing is copied here, and a reader checks that they
match their specs (held_array.py). restore_plan.py is the inverse.

Rules that users see:

- An object with `state_dict` and `load_state_dict` is stored as its state; names inside belong to the object.
- Arrays are values: shape, dtype, requires_grad and ties are stored; strides, device, gradients, grad_fn and Python
  attributes are not. Tied arrays have the same memory, shape, stride and dtype; arrays that only overlap are stored
  separately.
- Functions in the state of a torch lr_scheduler are code that its constructor sets (SWALR in older releases). They are
  left out, as torch leaves them out of the state of LambdaLR. `load_state_dict` only updates, so the constructor's
  functions remain.

Invariants: the part "" comes first, and a tie refers to an earlier part. torch is imported only when there are tensors.
`flatten` runs in the thread that owns the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .arrays import address_of, describe, memory_key
from .containers import CONTAINERS, Path, children
from .held_array import Held
from .stateful import is_stateful, state_of
from .structure import DifferentStructureError, Structure
from .tensors import Node, TensorSpec
from .tree_encode import PLAIN, Encoder

MAX_PARTS = 64  # a state with more top-level containers and objects has only the part ""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a flattened state; `specs[i]` describes `arrays[i]`, which is still the user's memory."""

    name: str
    tree: Node
    specs: list[TensorSpec]
    arrays: list[Held]


def flatten(state: Any) -> list[Part]:
    """Split a state into parts; nothing is copied.

    Args:
        state: Any nesting of containers over tensors, arrays, plain values and objects with state_dict/load_state_dict.

    Returns:
        The part "" with the root of the tree, then one part per top-level container or object of a dict, in its order.

    Raises:
        UnsupportedLeafError: Values have no stored form; all of them (up to 20) are named.
        InvalidInputError: The state contains itself, is nested too deeply, or a `state_dict()` failed.
    """
    return _Flattener().parts(state)


def flatten_and_learn(state: Any) -> tuple[list[Part], Structure | None]:
    """Split a state into parts, and learn its structure, by which a later state can be recognised.

    Returns:
        The parts, as `flatten` gives them, and the structure, or None if the state has one that cannot be recognised.
    """
    flattener = _Flattener()
    parts = flattener.parts(state)
    if flattener.is_repeated:  # two states of one object may differ
        return parts, None
    names, trees, specs = zip(*((part.name, part.tree, part.specs) for part in parts), strict=True)
    try:
        return parts, Structure(state, flattener.states, names, trees, specs)
    except DifferentStructureError:
        return parts, None


class _Flattener:
    """One walk over a state; `_part` is the part being filled."""

    def __init__(self) -> None:
        self._part = Part("", None, [], [])
        self._at: dict[int, tuple[Any, tuple[str, int]]] = {}  # address -> (first array there, (part, index))
        self._first: dict[tuple[Any, ...] | None, tuple[Any, tuple[str, int]]] = {}  # memory_key -> the same
        self._tied: dict[tuple[str, int], int] = {}  # (earlier part, index) -> index of the array tied to it
        self._held: dict[tuple[str, int], Held] = {}  # (part, index) -> array
        self.states: dict[int, Any] = {}  # id of an object -> what its `state_dict` returned
        self.is_repeated = False  # whether an object was asked for its state twice
        self._encoder = Encoder(self._put, self._expand, columnar=True)

    def parts(self, state: Any) -> list[Part]:
        expanded = self._expand(state, ())
        root = state if expanded is None else expanded[0]
        names = _part_names(root)
        if not names:
            done = [self._fill("", partial(self._encoder.node, root, ()))]
        else:
            # The part "" comes first, so a tie always refers to an earlier part.
            self._encoder.enter(root, ())
            done = [self._fill("", partial(self._root, root, names))]
            done += [self._fill(name, partial(self._encoder.node, root[name], (name,))) for name in names]
        self._encoder.raise_problems()
        del self._encoder  # else the garbage collector alone would free the state's arrays
        return done

    def _fill(self, name: str, tree: Callable[[], Node]) -> Part:
        self._part, self._tied = Part(name, None, [], []), {}
        return replace(self._part, tree=tree())

    def _root(self, root: Any, names: list[str]) -> Node:
        keys, nodes = [], []
        for element, key, child in children(root):
            keys.append(self._encoder.key(key, (element,)))
            in_part = type(key) is str and key in names
            nodes.append(["part", key] if in_part else self._encoder.node(child, (element,)))
        return self._encoder.tagged(root, keys, nodes, ())

    def _expand(self, value: Any, path: Path) -> tuple[Any] | None:
        if not is_stateful(value):
            return None
        self.is_repeated = self.is_repeated or id(value) in self.states
        state = self.states[id(value)] = state_of(value, path)
        return (state,)

    def _put(self, value: Any, path: Path) -> Node:
        stored = bytes(value) if type(value) is bytearray else value
        kind, dtype, shape = describe(stored)
        tag = "bytearray" if stored is not value else kind
        grad = tag in ("tensor", "parameter") and value.requires_grad
        part, index = self._part, len(self._part.specs)
        first = self._put_first(stored, (part.name, index))
        tie = None if first[0] == part.name else first
        index = first[1] if tie is None else self._tied.setdefault(tie, index)
        if index == len(part.specs):
            spec = TensorSpec(path, kind, dtype, shape, grad, tie)
            part.specs.append(spec)
            part.arrays.append(Held(stored, spec))
            self._held[part.name, index] = part.arrays[-1]
            if tie is not None:
                part.arrays[-1].ties += ((self._held[tie].spec.path, self._held[tie].value),)
        if self._held[first].value is not stored:
            self._held[first].ties += ((path, stored),)
        return [tag, index, grad] if tag in ("tensor", "parameter") else [tag, index]

    def _put_first(self, value: Any, here: tuple[str, int]) -> tuple[str, int]:
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


def _part_names(root: Any) -> list[str]:
    if type(root) not in (dict, OrderedDict):
        return []
    names = [
        key
        for key, value in root.items()
        if type(value) not in PLAIN  # a fast check: there may be a million
        and (type(key) is str and key and key.isprintable() and (type(value) in CONTAINERS or is_stateful(value)))
    ]
    return names if len(names) <= MAX_PARTS else []
