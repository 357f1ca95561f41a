"""The learner of a state's structure: one walk over a state and the trees that `flatten` made of it.

In: a state, its trees, and the states of its objects. Out: its containers as `Container`s, and its arrays in the order
in which a match finds them (structure.py).

Invariants: a match asks objects for their states in the order of `flatten`. A container that is no longer as `flatten`
has found it is not learnt: a later `state_dict()`, or another thread, may change it in between.
"""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ...errors import FormatError
from ..tree.decode import decode_plain, without_parameters
from ..values import composite
from ..values.arrays import Array, address_of, memory_key
from ..values.containers import CONTAINERS, Path
from ..values.held_array import Held
from ..values.sharded import local_of, sharding_of
from ..values.tensors import ARRAY_TAGS, Node, is_array
from .stateful import Parameters, node_of, parameters_of

MAPPINGS, _SEQUENCES = (dict, OrderedDict), (list, tuple)
_SCALARS = frozenset({type(None), bool, int, float, str})


class DifferentStructureError(Exception):
    """The state does not have the structure that is known."""


@dataclass(slots=True, eq=False)
class Container:
    """A container of the known state with arrays in it.

    Attributes:
        owner: the type of the object whose state it is, or of the composite tensor whose tensors it has; or None.
        versions: `_metadata` of an OrderedDict, as `bytes_of` returns it: the versions of modules by name.
        node: as it was encoded last.
        arrays, plain: positions of its children that are arrays, and scalars.
        scalars: the scalars as they were encoded last.
        others: all other children, in the order in which `flatten` visits them.
        table: if its children are all dicts of arrays: how many keys each has, their keys, and the arrays' types.
        parameters: of an optimizer, what `parameters_of` has returned; its `node` then has that around it.
        about: of a composite tensor, its context, its shape, and the mesh and placements of the DTensor in which it is;
            `keys` are the names of its tensors.
    """

    kind: Any
    owner: type | None
    path: Path
    keys: list[Any]
    key_types: list[type]
    types: list[type]
    versions: bytes | None
    node: Node
    arrays: list[int] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)
    scalars: dict[int, Any] = field(default_factory=dict)
    others: list[Child] = field(default_factory=list)
    table: tuple[list[int], list[str], list[type]] | None = None
    about: composite.About | None = None
    parameters: Parameters | None = None

    def replace(self, nodes: Mapping[int, Node]) -> None:
        """Put other nodes of children into the node; the old one may still be in use."""
        at = 2 if self.kind in MAPPINGS else 1
        node = list(without_parameters(self.node))
        children = node[at] = list(node[at])
        for i, child in nodes.items():
            children[i] = child
        self.node = node if self.node[0] == node[0] else [*self.node[:3], node]


@dataclass(slots=True, eq=False)
class Child:
    """A child of a container that is neither an array nor a scalar.

    Attributes:
        at: its position.
        container: None if it has neither arrays nor values that are a rank's own.
        part: the name of the part whose tree it is.
        own: if it is a rank's own value: the key of the part of such values, and the position there.
    """

    at: int
    container: Container | None
    part: str | None
    own: tuple[str, int] | None


class Learner:
    """One walk over a state and its trees; `arrays` and `rows` are in the order in which a match finds the arrays.

    Args:
        states: what `state_dict` returned, by the id of its object.
        trees: of the parts, by key.
        rows_of: the positions of the arrays of each part among those of all.
        held: (n,) all of these, as they were flattened.
    """

    def __init__(
        self,
        states: Mapping[int, Any],
        trees: Mapping[str, Node],
        rows_of: Mapping[str, range],
        held: Sequence[Held],
    ) -> None:
        self._states, self._trees, self._rows_of, self._held = states, trees, rows_of, held
        self.arrays: list[Array] = []
        self.rows: list[int] = []  # the position of its spec

    def learn(self, value: Any, node: Node, path: Path, part: str) -> Container | None:
        """Return a container, or the container that is the state of an object; None if there are no arrays in it."""
        if _is_own(node):
            raise DifferentStructureError  # the whole state is each rank's own
        if composite.core_of(value) is not None:
            return self._learn_composite(value, node, path, part)
        owner, parameters, whole, node = None, None, node, without_parameters(node)
        if id(value) in self._states and type(value) not in CONTAINERS:
            parameters = parameters_of(value)
            if node is not whole and parameters is not None and node_of(parameters) != whole[:3]:
                raise DifferentStructureError  # it has changed since
            owner, value = type(value), self._states[id(value)]
        if type(value) not in (*MAPPINGS, *_SEQUENCES) or _is_columns(node):
            if _has_arrays(node):
                raise DifferentStructureError
            return None
        is_mapping = type(value) in MAPPINGS
        keys = list(value) if is_mapping else list(range(len(value)))
        values, nodes = list(value.values()) if is_mapping else list(value), node[2 if is_mapping else 1]
        if len(values) != len(nodes) or (is_mapping and keys != node[1]):
            raise DifferentStructureError  # it has changed since
        versions = getattr(value, "_metadata", None)
        if not _are_versions(versions):
            raise DifferentStructureError
        noted = None if versions is None else bytes_of(versions)
        found = Container(type(value), owner, path, keys, list(map(type, keys)), list(map(type, values)), noted, whole)
        found.parameters = parameters
        before = len(self.arrays)
        below: list[tuple[bool, int, Any, Node]] = []
        for i, (child, child_node) in enumerate(zip(values, nodes, strict=True)):
            is_leaf = is_array(child) and child_node[0] in ARRAY_TAGS
            if is_leaf or (type(child) in (bytes, bytearray) and _has_arrays(child_node)):
                found.arrays.append(i)
                self._add(child, self._rows_of[part][child_node[1]])
            elif type(child) in _SCALARS:
                found.plain.append(i)
                if child is child_node:  # else it has changed since, or has another form
                    found.scalars[i] = child
            else:
                is_part = part == "" and type(child_node) is list and child_node[0] == "part"
                below.append((is_part, i, child, child_node))
        for is_part, i, child, child_node in sorted(below, key=lambda one: one[0]):  # parts come after the others
            found.others.append(self._child(found, i, child, child_node, child_node[1] if is_part else None, part))
        if len(self.arrays) == before and not any(one.own or one.container for one in found.others):
            return None
        if set(found.key_types) - {str, int}:
            raise DifferentStructureError
        rows = [one.container for one in found.others if one.container is not None and _is_row(one)]
        if is_mapping and len(rows) == len(values):
            lengths = [len(row.keys) for row in rows]
            found.table = (lengths, [key for row in rows for key in row.keys], [t for row in rows for t in row.types])
        return found

    def _learn_composite(self, value: Any, node: Node, path: Path, part: str) -> Container:
        """Return the tensors in a composite tensor as a list. Its node stays as it is."""
        kind = composite.kind_of(composite.core_of(value))
        _, _, *name, (_, keys, children) = node
        count = keys.index(composite.CONTEXT)
        names, nodes, (context, shape) = keys[:count], children[:count], children[count : count + 2]
        if name != [kind.__module__, kind.__qualname__]:
            raise DifferentStructureError
        try:
            # The class may change its own context.
            about = decode_plain(context), decode_plain(shape), composite.dtensor_spec(value)
        except FormatError as error:  # columns that are not packed yet
            raise DifferentStructureError from error
        tensors = composite.tensors_of(value, names, about)
        found = None if tensors is None else self.learn(tensors, ["list", nodes], path, part)
        if found is None or found.plain or not all(child.container for child in found.others):
            raise DifferentStructureError  # it has changed since, or has values that are no tensors
        found.owner, found.keys, found.about, found.node = type(value), names, about, node
        return found

    def _add(self, array: Array, row: int) -> None:
        """Note an array, which must be the one that was flattened."""
        held = self._held[row]
        is_same = array is held.value or any(array is other for _, other in held.ties)
        if not is_same and sharding_of(array) is not None:  # its local tensor was flattened
            is_same = address_of(local_of(array)) == address_of(held.value)
        if not is_same and type(array) is not bytearray:  # a copy of it was flattened
            key = memory_key(array)  # a composite tensor may make objects over the tensors in it
            if key is None or key != memory_key(held.value):
                raise DifferentStructureError
        self.arrays.append(array)
        self.rows.append(row)

    def _child(self, parent: Container, i: int, child: Any, node: Node, part: str | None, outer: str) -> Child:
        """Return a child that is neither an array nor a scalar.

        Args:
            part: the name of the part whose tree it is, or None.
            outer: the name of the part of its container.
        """
        name = outer if part is None else part
        path = (*parent.path, str(parent.keys[i]))
        node = node if part is None else self._trees[part]
        own = (own_key(name), node[1]) if _is_own(node) else None
        if own is not None:
            nested = self.learn(child, self._trees[own[0]][1][own[1]], path, own[0])
        else:
            nested = self.learn(child, node, path, name)
            if nested is None and any(map(is_own_key, self._trees)) and _holds_own(node):
                raise DifferentStructureError  # in a container of a kind that is not learnt
        return Child(i, nested, part, own)


def own_key(name: str) -> str:
    """Return the key of the part that holds a rank's own values of a part; no part has such a name."""
    return f"{name}\0own"


def is_own_key(key: str) -> bool:
    """Return whether a key is one of `own_key`."""
    return key.endswith("\0own")


def _is_own(node: Node) -> bool:
    """Return whether a node stands for a value that is each rank's own."""
    return type(node) is list and node[:1] == ["rank"]


def _holds_own(node: Node) -> bool:
    """Return whether a node has a value in it that is each rank's own."""
    return type(node) is list and ((_is_own(node) and type(node[-1]) is int) or any(map(_holds_own, node)))


def _is_row(child: Child) -> bool:
    """Return whether a child is a plain dict of arrays with names."""
    row = child.container
    if row is None or row.kind is not dict or row.owner is not None or child.part is not None:
        return False
    return len(row.arrays) == len(row.keys) and set(row.key_types) == {str}


def _has_arrays(node: Node) -> bool:
    """Return whether there may be arrays in a node."""
    if type(node) is not list or _is_columns(node):
        return False
    if len(node) > 1 and node[0] in ARRAY_TAGS and type(node[1]) is int:
        return True
    return any(map(_has_arrays, node))


def _is_columns(node: Node) -> bool:
    """Return whether a node is that of a large plain value."""
    return type(node) is list and node[:1] == ["columns"]


def _are_versions(metadata: Any) -> bool:
    """Return whether `_metadata` has int values only."""
    if metadata is None:
        return True
    if type(metadata) is not OrderedDict or set(map(type, metadata.values())) - {dict}:
        return False
    versions = metadata.values()
    names, numbers = chain.from_iterable(versions), chain.from_iterable(map(dict.values, versions))
    return set(map(type, chain(metadata, names))) <= {str} and set(map(type, numbers)) <= {int}


def bytes_of(metadata: Any) -> bytes:
    """Return bytes of a module's `_metadata`: equal for the same versions in the same order, and of the same types.

    Raises:
        DifferentStructureError: it is no OrderedDict, or has values of other types than Python's own.
    """
    if type(metadata) is not OrderedDict:
        raise DifferentStructureError
    try:
        return marshal.dumps(list(metadata.items()), 2)  # 2: without references, which differ for equal values
    except ValueError as error:
        raise DifferentStructureError from error
