"""The structure of the last state: the next state is recognised by it, instead of being walked again.

In: the state of a save, and what `flatten` made of it. Out, for a later state: its arrays, and the trees of its parts;
or `DifferentStructureError`, and the caller flattens it. Training saves the same structure again and again, and waits
meanwhile. So C code compares the keys and types of a container, and each property of all tensors.

Invariants: no array of a state is kept. A match that `confirm` accepts gives what `flatten` would give. Plain values
are encoded again at every match.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from operator import mul, not_
from typing import Any, NoReturn

import numpy as np

from ...arrays import Column
from ...errors import InvalidInputError, UnsupportedLeafError
from ..tree.encode import Encoder
from ..values import composite
from ..values.arrays import Array, address_of, describe
from ..values.containers import Path, at_once
from ..values.held_array import Held
from ..values.tensors import Node, TensorSpec, dim_order_of, reach_of
from .known_tensors import BLOCK_ARRAYS, Block, addresses_of, storages_of
from .learner import MAPPINGS, Container, DifferentStructureError, Learner, bytes_of, is_own_key
from .per_rank import is_per_rank
from .stateful import expand, parameters_of, state_of


@dataclass(slots=True, eq=False)
class Match:
    """A state that was recognised. Its tensors may be copied, but the copies count only after `confirm`.

    Attributes:
        trees: by the name of the part.
        tensors: one for each of `Structure.rows`.
        addresses: (n,) of these tensors. At each lie as many bytes as the structure says. This object keeps host memory
            alive. The tensors keep device memory alive; if they release it, the allocator gives it only to work that
            the current stream gets later.
        others: the position of its spec, and the array, of every other array.
    """

    structure: Structure
    trees: dict[str, Node]
    tensors: list[Any]
    addresses: Column
    others: list[tuple[int, Held]]
    _all: list[Any]
    _storages: list[Any]

    def confirm(self) -> None:
        """Check that the tensors have not moved since the match; call this after their bytes were read, or will be.

        It also checks the sizes of storages on devices: the copies run meanwhile, so nobody waits for it.

        Raises:
            DifferentStructureError: one has moved, or its storage has another size.
        """
        if not self.structure.lie_where_noted(self._all):
            raise DifferentStructureError


class Structure:
    """The containers of a state, and the form of its arrays.

    Args:
        root, own_counts: the containers that the learner found; how many own values of a rank each part has.
        arrays, rows: of the state, and the positions of their specs.
        of_rank: whether it is the state of one of several ranks.

    Attributes:
        specs: of all parts, in order.
        rows_of: the positions of the specs of each part, by key.
        rows: positions of the specs of tensors that a match gives as columns: on a device, or whole in host memory.
        nbytes: (n,) sizes of these tensors.
        devices: of these tensors.
        in_pieces: positions in `rows` of tensors whose elements are not in order without gaps, or whose values are not
            those in memory (conjugated or negated views).
        forms: of these tensors: strides, and whether each is conjugated, and negated.

    Raises:
        DifferentStructureError: the state has ties that cannot be recognised, or is no longer as its specs say.
    """

    def __init__(
        self,
        root: Container,
        own_counts: Mapping[str, int],
        arrays: list[Array],
        rows: Sequence[int],
        rows_of: Mapping[str, range],
        specs: Sequence[TensorSpec],
        *,
        of_rank: bool = False,
    ) -> None:
        self._root, self._own_counts, self.rows_of, self.specs = root, own_counts, rows_of, specs
        self._of_rank = of_rank
        starts = range(0, len(arrays), BLOCK_ARRAYS)
        try:
            self._blocks = [Block(arrays, start) for start in starts]
        except ValueError as error:
            raise DifferentStructureError from error
        self._batched = [start + i for start, block in zip(starts, self._blocks, strict=True) for i in block.batched]
        self._note_arrays(arrays, rows)

    def _note_arrays(self, arrays: list[Array], rows: Sequence[int]) -> None:
        local = [array for block in self._blocks for array in block.localize(arrays)]
        batched = set(self._batched)
        self._others = [(i, rows[i]) for i in range(len(arrays)) if i not in batched]
        ties = [(row, self.specs[row].tie) for row in rows]
        memories = [row if tie is None else self.rows_of[tie[0]][tie[1]] for row, tie in ties]
        used = Counter(memories)
        if any(used[memories[i]] > 1 for i, _ in self._others):
            raise DifferentStructureError  # rare, and slow to check
        self._tied_to = _first_places([memories[i] for i in self._batched])
        first: dict[int, int] = {}  # spec -> the first of its tensors
        for k, i in enumerate(self._batched):
            first.setdefault(rows[i], k)
        self.rows = list(first)
        self._firsts = None if len(first) == len(self._batched) else list(first.values())
        tensors = [local[i] for i in self._batched]
        self._places: list[int] = []  # of the last match
        self._addresses = np.zeros(0, np.int64)
        columns = zip(*(block.properties for block in self._blocks), strict=True)
        dtypes, shapes, _, strides, *views = [list(chain.from_iterable(parts)) for parts in columns] or [[]] * 6
        specs = [self.specs[rows[i]] for i in self._batched]
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in set(dtypes)}
        if shapes != [spec.shape for spec in specs] or [names[dtype] for dtype in dtypes] != [s.dtype for s in specs]:
            raise DifferentStructureError  # it has changed since
        self._devices = [tensor.device for tensor in tensors]
        in_one_piece = list(map(_is_in_one_piece, shapes, strides))  # as noted: a tensor may have changed since
        extents = [reach_of(*form) * dtype.itemsize for *form, dtype in zip(shapes, strides, dtypes, strict=True)]
        self._extents = np.array(extents, np.int64)
        chosen = list(first.values())
        self.devices = [self._devices[k] for k in chosen]
        self.nbytes = np.array([prod(shapes[k]) * dtypes[k].itemsize for k in chosen], np.int64)
        is_odd = list(map(max, map(not_, in_one_piece), *views))  # a conjugated view has other values in its memory
        self.in_pieces = [i for i, k in enumerate(chosen) if is_odd[k]]
        forms = list(zip(strides, *views, strict=True))
        self.forms = [forms[k] for k in chosen]
        if any(self.devices[i].type == "cpu" for i in self.in_pieces):
            raise DifferentStructureError  # it has changed since

    # -- match

    def match(self, state: Any) -> Match:
        """Recognise a state; only values may differ from the known one.

        Raises:
            DifferentStructureError: it has another structure, or one that must be looked at more closely.
            InvalidInputError: a `state_dict()` failed.
        """
        arrays: list[Array] = []
        trees: dict[str, Node] = {key: ["own", [None] * count] for key, count in self._own_counts.items()}
        self._match(self._root, state, arrays, trees, [])
        trees[""] = self._root.node
        return self.match_of(arrays, trees)

    def match_of(self, arrays: list[Array], trees: dict[str, Node]) -> Match:
        """Return the match of a state by its arrays, in the order of its containers, and the trees of its parts.

        Raises:
            DifferentStructureError: the arrays have another structure, or one that must be looked at more closely.
        """
        local: list[Array] = []
        tensors: list[Any] = []
        storages: list[Any] | None = []
        try:
            for block in self._blocks:  # each fits into the processor's cache
                found = block.localize(arrays)
                local += found
                tensors += (batched := block.tensors_of(found))
                if storages is not None:
                    in_memory = block.storages(batched)
                    storages = None if in_memory is None else storages + in_memory
            if storages is None:
                storages = self._locate(tensors)
        except (RuntimeError, NotImplementedError) as error:  # not strided
            raise DifferentStructureError from error
        others = self._hold_others(local)
        addresses = self._addresses
        chosen = tensors
        if self._firsts is not None:
            chosen, addresses = [tensors[k] for k in self._firsts], addresses[self._firsts]
        return Match(self, trees, chosen, addresses, others, tensors, storages)

    def _locate(self, tensors: Sequence[Any]) -> list[Any]:
        """Note the addresses of tensors; return their storages. Each must lie in its storage, tied as is known.

        Raises:
            DifferentStructureError: one does not, or is tied otherwise, or has another form.
        """
        storages = storages_of(tensors)
        places = addresses_of(tensors)
        devices = [tensor.device for tensor in tensors]
        starts = np.array([storage.data_ptr() for storage in storages], np.int64)
        sizes = list(map(len, storages))
        ends = starts + np.array(sizes, np.int64)
        at = np.array(places, np.int64)
        lies_within = (at > 0) & (starts <= at) & (at + self._extents <= ends)
        if devices != self._devices or not lies_within.all() or _first_places(places) != self._tied_to:
            raise DifferentStructureError
        if not all(block.has_form(tensors[of]) for block, of in self._of_blocks()):
            raise DifferentStructureError
        for block, of in self._of_blocks():
            block.note(places[of], sizes[of])
        self._places, self._addresses = places, at
        return storages

    def lie_where_noted(self, tensors: Sequence[Any]) -> bool:
        """Return whether tensors have the addresses of the last `_locate`, and storages on devices their sizes."""
        return all(block.lie_where_noted(tensors[of]) for block, of in self._of_blocks())

    def _of_blocks(self) -> Iterator[tuple[Block, slice]]:
        """Yield each block, and which of all tensors are in it."""
        ends = accumulate(len(block.batched) for block in self._blocks)
        for block, end in zip(self._blocks, ends, strict=True):
            yield block, slice(end - len(block.batched), end)

    def _match(
        self, known: Container, value: Any, arrays: list[Array], trees: dict[str, Node], outer: list[Any]
    ) -> None:
        """Compare a container with the known one; note its arrays, and encode its plain values."""
        if known.owner is not None:
            if type(value) is not known.owner or parameters_of(value) != known.parameters:
                raise DifferentStructureError
            value = state_of(value, known.path) if known.about is None else _tensors_of(value, known)
        if type(value) is not known.kind:
            raise DifferentStructureError
        if known.kind in MAPPINGS:
            keys, values = _items_of(value)
            if keys != known.keys or list(map(type, keys)) != known.key_types:
                raise DifferentStructureError
        else:
            values = list(value)
        if list(map(type, values)) != known.types:
            raise DifferentStructureError
        if known.kind is OrderedDict:
            _check_versions(known, value)
        if len(known.arrays) == len(values):
            arrays += values
            return
        if known.table is not None:
            arrays += _arrays_of_table(known.table, values)
            return
        arrays += [values[i] for i in known.arrays]
        outer.append(value)
        nodes: dict[int, Node] = {}
        for child in known.others:
            if child.container is None:
                node, is_new = self._encode(values[child.at], outer, is_own=child.own is not None), True
            else:
                before = child.container.node
                self._match(child.container, values[child.at], arrays, trees, outer)
                node, is_new = child.container.node, child.container.node is not before
            if child.own is not None:
                key, number = child.own
                trees[key][1][number] = node
                if child.part is not None:  # the value is the whole part
                    trees[child.part] = ["rank", number]
            elif child.part is not None:
                trees[child.part] = node
            elif is_new:
                nodes[child.at] = node
        for i in known.plain:
            plain = values[i]
            if i not in known.scalars or plain is not known.scalars[i]:
                nodes[i] = self._encode(plain, outer)
                if i in known.scalars:
                    known.scalars[i] = plain
        outer.pop()
        if nodes:
            known.replace(nodes)

    def _encode(self, value: Any, outer: Sequence[Any], *, is_own: bool = False) -> Node:
        """Return the node of a plain value within some containers. `is_own`: whether it is a rank's own value.

        Raises:
            DifferentStructureError: it has no such node, or a new value of a rank's own in it.
        """
        special = _refuse_own if self._of_rank and not is_own else None
        encoder = Encoder(_refuse, expand, special, columnar=True)
        try:
            for container in outer:
                encoder.enter(container, ())
            node = encoder.node(value, ())
            encoder.raise_problems()
        except InvalidInputError as error:  # `flatten` says where
            raise DifferentStructureError from error
        return node

    def _hold_others(self, arrays: Sequence[Array]) -> list[tuple[int, Held]]:
        others: list[tuple[int, Held]] = []
        places = set(self._places) if self._others else set()
        for i, row in self._others:
            value, spec = arrays[i], self.specs[row]
            stored = bytes(value) if type(value) is bytearray else value
            grad = spec.kind in ("tensor", "parameter") and value.requires_grad
            try:
                form = (*describe(stored), grad, dim_order_of(stored))
            except UnsupportedLeafError as error:  # `flatten` says where
                raise DifferentStructureError from error
            place = address_of(stored)  # of a sparse tensor there is none
            if form != (spec.kind, spec.dtype, spec.shape, spec.requires_grad, spec.dim_order) or place in places:
                raise DifferentStructureError
            places.update([place] if place else [])
            others.append((row, Held(stored, spec)))
        return others


def learn(
    state: Any, states: Mapping[int, Any], trees: Mapping[str, Node], held: Mapping[str, list[Held]], *, of_rank: bool
) -> tuple[Structure, list[Array]]:
    """Learn the structure of a state.

    Args:
        state: as it was flattened.
        states: what `state_dict` returned, by the id of its object.
        trees, held: by part: its tree, and its arrays; of sharded tensors the local ones.
        of_rank: whether it is the state of one of several ranks.

    Returns:
        The structure, which keeps no array; and the arrays of this state, for `Structure.match_of`.

    Raises:
        DifferentStructureError: the state has containers or ties that cannot be recognised, or has changed.
    """
    specs = {key: [one.spec for one in arrays] for key, arrays in held.items()}
    ends = accumulate(map(len, specs.values()))
    rows_of = {key: range(end - len(of), end) for (key, of), end in zip(specs.items(), ends, strict=True)}
    learner = Learner(states, trees, rows_of, [one for arrays in held.values() for one in arrays])
    try:
        root = learner.learn(state, trees[""], (), "")
    except (TypeError, IndexError, KeyError, ValueError) as error:  # a child of another kind than in the tree
        raise DifferentStructureError from error
    of_all = list(chain.from_iterable(specs.values()))
    if root is None or len(set(learner.rows)) != len(of_all) or not of_all:
        raise DifferentStructureError  # there are no arrays, or some are gone since
    own_counts = {key: len(tree[1]) for key, tree in trees.items() if is_own_key(key)}
    structure = Structure(root, own_counts, learner.arrays, learner.rows, rows_of, of_all, of_rank=of_rank)
    return structure, learner.arrays


def _arrays_of_table(table: tuple[list[int], list[str], list[type]], values: Sequence[Any]) -> list[Array]:
    lengths, known_keys, types = table
    found = map(len, values), chain.from_iterable(values), chain.from_iterable(map(dict.values, values))
    present, keys, arrays = at_once(*found)
    if present != lengths or keys != known_keys or set(map(type, keys)) != {str} or list(map(type, arrays)) != types:
        raise DifferentStructureError
    return arrays


def _tensors_of(value: Any, known: Container) -> list[Any]:
    """Return the tensors in a composite tensor, which must have the known names, context and shape."""
    assert known.about is not None
    tensors = composite.tensors_of(value, known.keys, known.about)
    if tensors is None:
        raise DifferentStructureError
    return tensors


def _is_in_one_piece(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements lie in their order, without gaps."""
    contiguous = accumulate(shape[::-1], mul, initial=1)
    return all(size == 1 or old == new for size, old, new in zip(shape[::-1], strides[::-1], contiguous, strict=False))


def _first_places(keys: Sequence[int]) -> list[int]:
    """Return for each key the position where it comes first."""
    first: dict[int, int] = {}
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


def _items_of(mapping: dict[Any, Any]) -> list[list[Any]]:
    """Return the keys and the values of a dict or OrderedDict in its order."""
    if type(mapping) is OrderedDict:  # its own iterator looks each key up
        keys, as_dict, values = at_once(mapping, dict.keys(mapping), dict.values(mapping))
        if keys == as_dict:
            return [keys, values]
    return at_once(mapping, mapping.values())


def _check_versions(known: Container, value: Any) -> None:
    """Check the attributes of an OrderedDict: only `_metadata`, as it is known."""
    attributes = dict(value.__dict__)
    versions = attributes.pop("_metadata", None)
    if attributes or (None if versions is None else bytes_of(versions)) != known.versions:
        raise DifferentStructureError


def _refuse(value: Any, path: Path) -> NoReturn:
    raise DifferentStructureError


def _refuse_own(value: Any, path: Path) -> None:
    if is_per_rank(value):
        raise DifferentStructureError
