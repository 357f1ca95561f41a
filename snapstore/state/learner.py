"""The learner of a state's structure: one walk over a state and the trees that `flatten` made of it.

In: a state, its trees, and the states of its objects. Out: its containers as `Container`s, and its arrays in the order
in which a match finds them (structure.py).
"""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from .arrays import Array
from .containers import CONTAINERS, Path
from .tensors import ARRAY_TAGS, Node, is_array

MAPPINGS, _SEQUENCES = (dict, OrderedDict), (list, tuple)
_SCALARS = frozenset({type(None), bool, int, float, str})


class DifferentStructureError(Exception):
    """The state does not have the structure that is known."""


@dataclass(slots=True, eq=False)
class Container:
    """A container of the known state with arrays in it.

    Attributes:
        owner: the type of the object whose state it is, or None.
        versions: `_metadata` of an OrderedDict, as `bytes_of` returns it: the versions of modules by name.
        node: as it was encoded last.
        arrays, plain, nested, plain_parts: positions of its children; the last are parts without arrays.
        scalars: the plain children that are scalars, as they were encoded last.
        part: the name of the part whose tree it is.
        table: if its children are all dicts of arrays: how many keys each has, their keys, and the arrays' types.
        own: if it is a rank's own value: the key of the part of such values, and the position there.
        plain_own: of each child that is such a value and has no arrays: its position, the name of its part or None, and
            then as in `own`.
    """

    kind: Any
    owner: type | None
    path: Path
    keys: list[Any]
    key_types: list[type]
    types: list[type]
    versions: bytes | None
    node: Node
    part: str | None = None
    arrays: list[int] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)
    nested: list[tuple[int, Container]] = field(default_factory=list)
    plain_parts: list[tuple[int, str]] = field(default_factory=list)
    scalars: dict[int, Any] = field(default_factory=dict)
    table: tuple[list[int], list[str], list[type]] | None = None
    own: tuple[str, int] | None = None
    plain_own: list[tuple[int, str | None, str, int]] = field(default_factory=list)

    def replace(self, nodes: Mapping[int, Node]) -> None:
        """Put other nodes of children into the node; the old one may still be in use."""
        at = 2 if self.kind in MAPPINGS else 1
        node, children = list(self.node), list(self.node[at])
        for i, child in nodes.items():
            children[i] = child
        node[at] = children
        self.node = node


class Learner:
    """One walk over a state and its trees; `arrays` and `rows` are in the order in which a match finds the arrays."""

    def __init__(self, states: Mapping[int, Any], trees: Mapping[str, Node], rows_of: Mapping[str, range]) -> None:
        self._states, self._trees, self._rows_of = states, trees, rows_of
        self.arrays: list[Array] = []
        self.rows: list[int] = []  # the position of its spec

    def learn(self, value: Any, node: Node, path: Path, part: str) -> Container | None:
        """Return a container, or the container that is the state of an object; None if there are no arrays in it."""
        if _is_own(node):
            raise DifferentStructureError  # the whole state is each rank's own
        owner = None
        if id(value) in self._states and type(value) not in CONTAINERS:
            owner, value = type(value), self._states[id(value)]
        if type(value) not in (*MAPPINGS, *_SEQUENCES) or _is_columns(node):
            if _has_arrays(node):
                raise DifferentStructureError
            return None
        is_mapping = type(value) in MAPPINGS
        keys = list(value) if is_mapping else list(range(len(value)))
        values = list(value.values()) if is_mapping else list(value)
        versions = getattr(value, "_metadata", None)
        if not _are_versions(versions):
            raise DifferentStructureError
        noted = None if versions is None else bytes_of(versions)
        found = Container(type(value), owner, path, keys, list(map(type, keys)), list(map(type, values)), noted, node)
        before = len(self.arrays)
        below: list[tuple[int, Any, Node]] = []
        for i, (child, child_node) in enumerate(zip(values, node[2 if is_mapping else 1], strict=True)):
            if is_array(child) or (type(child) in (bytes, bytearray) and _has_arrays(child_node)):
                found.arrays.append(i)
                self.arrays.append(child)
                self.rows.append(self._rows_of[part][child_node[1]])
            elif type(child) in _SCALARS:
                found.plain.append(i)
                found.scalars[i] = child
            else:
                below.append((i, child, child_node))
        for i, child, child_node in below:
            self._learn_child(found, i, child, child_node, part)
        if len(self.arrays) == before:
            return None
        if set(found.key_types) - {str, int}:
            raise DifferentStructureError
        if is_mapping and len(found.nested) == len(values) and all(_is_row(child) for _, child in found.nested):
            rows = [child for _, child in found.nested]
            lengths = [len(row.keys) for row in rows]
            found.table = (lengths, [key for row in rows for key in row.keys], [t for row in rows for t in row.types])
        return found

    def _learn_child(self, parent: Container, i: int, child: Any, node: Node, part: str) -> None:
        is_part = part == "" and type(node) is list and node[0] == "part"
        name = node[1] if is_part else part
        path = (*parent.path, str(parent.keys[i]))
        node = self._trees[name] if is_part else node
        own = (own_key(name), node[1]) if _is_own(node) else None
        if own is not None:
            nested = self.learn(child, self._trees[own[0]][1][own[1]], path, own[0])
        else:
            nested = self.learn(child, node, path, name)
        if nested is None and own is not None:
            parent.plain_own.append((i, name if is_part else None, *own))
        elif nested is not None:
            nested.part, nested.own = name if is_part else None, own
            parent.nested.append((i, nested))
        elif is_part:
            parent.plain_parts.append((i, name))
        else:
            parent.plain.append(i)


def own_key(name: str) -> str:
    """Return the key of the part that holds a rank's own values of a part; no part has such a name."""
    return f"{name}\0own"


def is_own_key(key: str) -> bool:
    """Return whether a key is one of `own_key`."""
    return key.endswith("\0own")


def _is_own(node: Node) -> bool:
    """Return whether a node stands for a value that is each rank's own."""
    return type(node) is list and node[:1] == ["rank"]


def _is_row(container: Container) -> bool:
    """Return whether a container is a plain dict of arrays with names."""
    is_plain = container.kind is dict and container.owner is None and container.part is None
    return is_plain and len(container.arrays) == len(container.keys) and set(container.key_types) == {str}


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
