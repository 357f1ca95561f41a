"""Columns: a large tree of plain values as a few long lists, which are made and read at the speed of C.

In: a container of plain values. Out: its node, `["columns", column]`; and back. A column holds many values, one level
of the tree at a time:

| column                                 | values                                                                  |
|----------------------------------------|-------------------------------------------------------------------------|
| ["values", bytes]                      | None, bool, int (64 bit), float and str: one packed msgpack array       |
| ["values", [node...]]                  | any leaves                                                              |
| ["lists", lengths, column]             | lists, whose members follow each other in the column                    |
| ["tuples", lengths, column]            | tuples, likewise                                                        |
| ["dicts", lengths, column, column]     | dicts, whose keys and values follow each other in two columns           |
| ["list rows", bytes, [column...]]      | lists of one length: member k is the next one of column number byte k   |
| ["tuple rows", bytes, [column...]]     | tuples, likewise                                                        |
| ["dict rows", column, bytes, [column...]] | dicts of the same str keys, which are in the first column            |
| ["mixed", bytes, [column...]]          | value i is the next one of column number byte i                         |

`lengths` and the keys of dicts are columns of values. All leaves of rows are in one column, row after row, so a row
that is added or changed moves few bytes.

Invariants: as for the tree (tree.py). The node holds no container of the user: its lists are packed later, when the
user may change the state again. A container that may contain itself is not stored in columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress, cycle, islice, repeat
from operator import not_
from typing import Any

import msgspec
import numpy as np

from ...errors import UnsupportedLeafError
from ...threads import msgpack_decoder
from ..values.classes import KNOWN_LEAVES
from ..values.containers import MAX_ALIKE, MAX_DEPTH, at_once, crowded
from ..values.tensors import Node
from .form import INLINE_BYTES

MIN_VALUES = 256  # smaller trees have a node for each container, which is easier to read
MAX_LEVELS = 32  # of containers in columns: their walk takes more of Python's stack than that of nodes
MAX_NESTING = 3 * MAX_LEVELS  # of columns in columns
MIN_ROWS, MAX_FIELDS = 16, 64  # containers of one form become rows: at least so many, with at most so many members
MAX_SHAPES = 16  # dicts of one column become rows if they have at most so many different sets of keys
#: Columns of more containers than this, most of them the same objects, are left to the walk that finds cycles.
MAX_SHARED = 1 << 20

_PACKED = frozenset({type(None), bool, int, float, str})  # the types that `Packed` holds
_NESTED = (list, tuple, dict)
_COLUMNABLE = _PACKED | KNOWN_LEAVES | {bytes, complex, set, frozenset, *_NESTED}

#: The most memory of one object of each kind, and of one entry in it [bytes].
_OBJECT_BYTES: dict[type, tuple[int, int]] = {list: (88, 8), tuple: (72, 8), dict: (240, 110)}
_VALUE_BYTES, _TEXT_BYTES = 72, 4  # of one packed value, and for each packed byte: a str may take four times its UTF-8

#: Returns the node of a leaf that lies in so many containers; raises UnsupportedLeafError.
LeafCoder = Callable[[Any, int], Node]
Spend = Callable[[int], None]  # counts bytes of memory before they are taken; raises if there are too many


class Packed:
    """Values that become one packed array when the tree is packed."""

    __slots__ = ("values",)

    def __init__(self, values: list[Any]) -> None:
        self.values = values


class NotPlainError(Exception):
    """The tree holds a value that columns cannot hold (never leaves state/)."""


def may_have_columns(container: Any) -> bool:
    """Return whether a container looks like a plain tree of many values: a fast check of its members."""
    kind = type(container)
    if kind not in _NESTED or not container:
        return False
    members = list(container.values()) if kind is dict else container  # another thread may change it
    if type(next(iter(members), None)) not in _COLUMNABLE:  # most containers hold tensors
        return False
    kinds = set(map(type, members))
    return kinds <= _COLUMNABLE and (len(container) >= MIN_VALUES or not kinds.isdisjoint(_NESTED))


def encode(container: Any, leaf: LeafCoder, key: LeafCoder, depth: int) -> tuple[Node, int]:
    """Return the node of a list, tuple or dict, and the number of values in it.

    Args:
        leaf, key: Return the nodes of leaves, and of keys, that have no packed form.
        depth: The number of containers around this one.

    Raises:
        NotPlainError: It holds arrays, objects, other containers or itself; or values without a stored form.
    """
    encoder = _ColumnEncoder(leaf, key, depth)
    try:
        column = encoder.column([container], _ContainerLevel(None, []))
    except UnsupportedLeafError as error:
        raise NotPlainError from error
    return ["columns", column], encoder.count


class _ContainerLevel:
    """Containers of one column, whose members are encoded; it finds cycles."""

    __slots__ = ("above", "depth", "group", "ids")

    def __init__(self, above: _ContainerLevel | None, group: list[Any]) -> None:
        self.above, self.group = above, group
        self.depth: int = above.depth + 1 if above else 0
        self.ids: set[int] = set()

    def check(self) -> None:
        """Check that none of these containers contains itself; only needed if there are containers in them.

        Raises:
            NotPlainError: one does; or too many of them are the same objects.
        """
        if self.ids or not self.group:
            return
        self.ids = set(map(id, self.group))
        if len(self.group) > MAX_SHARED and 8 * len(self.ids) < len(self.group):
            raise NotPlainError
        level = self.above
        while level is not None:
            if not level.ids.isdisjoint(self.ids):
                raise NotPlainError
            level = level.above


class _ColumnEncoder:
    """Turns levels of one tree into columns; `count` is the number of values so far."""

    def __init__(self, leaf: LeafCoder, key: LeafCoder, depth: int) -> None:
        self._leaf, self._key, self._depth = leaf, key, depth
        self.count = 0

    def column(self, values: list[Any], level: _ContainerLevel) -> Node:
        """Return the column of the values that are members of a level's containers.

        Raises:
            NotPlainError: see `encode`.
        """
        kinds = set(map(type, values))
        self.count += len(values)
        if not kinds <= _COLUMNABLE:
            raise NotPlainError
        nested = [kind for kind in _NESTED if kind in kinds]
        if not nested:
            return ["values", self._leaves(values, kinds, self._leaf, level)]
        if level.depth >= MAX_LEVELS or level.depth + self._depth >= MAX_DEPTH:
            raise NotPlainError
        level.check()
        if len(kinds) == 1:
            return self._containers(nested[0], values, level)
        numbers = dict.fromkeys(kinds, 0) | {kind: number for number, kind in enumerate(nested, 1)}
        which = bytes(map(numbers.__getitem__, map(type, values)))
        first, *groups = _split(values, which, len(nested) + 1)
        leaves = ["values", self._leaves(first, kinds.difference(nested), self._leaf, level)]
        return ["mixed", which, [leaves, *map(self._containers, nested, groups, repeat(level))]]

    def _leaves(
        self, values: list[Any], kinds: set[type], leaf: LeafCoder, level: _ContainerLevel
    ) -> Packed | list[Node]:
        if kinds <= _PACKED:
            return Packed(values)
        if bytes in kinds and any(type(value) is bytes and len(value) > INLINE_BYTES for value in values):
            raise NotPlainError
        return list(map(leaf, values, repeat(level.depth + self._depth)))

    def _containers(self, kind: type, group: list[Any], above: _ContainerLevel) -> Node:
        level = _ContainerLevel(above, group)
        if kind is dict:
            return self._dicts(group, level)
        name = "list" if kind is list else "tuple"
        lengths, members = at_once(map(len, group), chain.from_iterable(group))
        if count := _row_length(lengths):
            return [name + " rows", *self._rows(members, count, level)]
        return [name + "s", ["values", Packed(lengths)], self.column(members, level)]

    def _rows(self, members: list[Any], count: int, level: _ContainerLevel) -> tuple[bytes, list[Node]]:
        """Return the column of each member of rows, and the columns: one for all leaves, one for each other member."""
        nested = [not set(map(type, members[k::count])).isdisjoint(_NESTED) for k in range(count)]
        if not any(nested):
            return bytes(count), [self.column(members, level)]
        leaves = list(compress(members, cycle(map(not_, nested))))
        columns = [self.column(leaves, level)] if leaves else []
        fields = bytearray(count)
        for k in (k for k in range(count) if nested[k]):
            fields[k] = len(columns)
            columns.append(self.column(members[k::count], level))
        return bytes(fields), columns

    def _dicts(self, group: list[Any], level: _ContainerLevel) -> Node:
        values = chain.from_iterable(map(dict.values, group))
        lengths, keys, members = at_once(map(len, group), chain.from_iterable(group), values)
        kinds = set(map(type, keys))
        if kinds == {str} and len(group) >= MIN_ROWS:
            count = _row_length(lengths)
            if count and keys == keys[:count] * len(group):
                return self._dict_rows(keys[:count], members, level)
            which, shapes = _shapes(keys, lengths)
            if shapes:
                split = _split(list(_cut(members, lengths)), which, len(shapes))
                rows = [list(chain.from_iterable(some)) for some in split]
                columns = [self._dict_rows(list(shape), row, level) for shape, row in zip(shapes, rows, strict=True)]
                return ["mixed", which, columns]
        elif max(lengths) > MAX_ALIKE and any(map(crowded, _cut(keys, lengths))):
            raise NotPlainError
        read = ["values", self._leaves(keys, kinds, self._key, level)]
        return ["dicts", ["values", Packed(lengths)], read, self.column(members, level)]

    def _dict_rows(self, keys: list[str], members: list[Any], level: _ContainerLevel) -> Node:
        return ["dict rows", ["values", Packed(keys)], *self._rows(members, len(keys), level)]


def _cut(members: list[Any], lengths: list[int]) -> Iterator[tuple[Any, ...]]:
    """Return the members of each container, if those of all follow each other."""
    rest = iter(members)
    return (tuple(islice(rest, length)) for length in lengths)


def _row_length(lengths: list[int]) -> int:
    """Return the number of members of containers that become rows, 0 if they do not."""
    count = lengths[0]
    return count if count <= MAX_FIELDS and len(lengths) >= MIN_ROWS and set(lengths) == {count} else 0


def _shapes(keys: list[str], lengths: list[int]) -> tuple[bytes, list[tuple[str, ...]]]:
    """Return for each dict the number of its set of keys, and these sets.

    Both are empty if there are too many sets, or an empty dict.
    """
    numbers: dict[tuple[str, ...], int] = {}
    found = bytearray()
    rest = _cut(keys, lengths)
    while some := list(islice(rest, 4096)):
        found += bytes([min(numbers.setdefault(one, len(numbers)), MAX_SHAPES) for one in some])
        if len(numbers) > MAX_SHAPES or () in numbers or max(map(len, numbers)) > MAX_FIELDS:
            return b"", []
    return (bytes(found), list(numbers)) if len(lengths) >= MIN_ROWS * len(numbers) else (b"", [])


def _split(values: list[Any], which: bytes, count: int) -> list[list[Any]]:
    """Return the values of each number, in order."""
    numbers = np.frombuffer(which, np.uint8)
    return [list(compress(values, (numbers == number).tolist())) for number in range(count)]


# --- back ---

_VALUES = msgpack_decoder(list[bool | int | float | str | None])  # refuses maps and arrays


class ColumnDecoder:
    """Turns columns into values.

    Args:
        node: Returns the value of a node that lies in so many containers.
        spend: Counts the memory of values before they are made.
    """

    def __init__(self, node: LeafCoder, spend: Spend) -> None:
        self._node, self._spend = node, spend

    def only(self, column: Node, depth: int) -> Any:
        """Return the value of a column that has exactly one.

        Args:
            depth: The number of containers around it.

        Raises:
            ValueError, TypeError: `encode` cannot have made it.
        """
        values = self._column(column, depth, 0)
        if len(values) != 1:
            raise ValueError(f"{len(values)} values, expected one")
        return values[0]

    def _column(self, column: Node, depth: int, nesting: int) -> list[Any]:
        if type(column) is not list or not column or type(column[0]) is not str:
            raise TypeError(f"expected a column, got {type(column).__name__}")
        if column[0] == "values":
            return self._values(column, depth)
        if depth >= MAX_DEPTH or nesting > MAX_NESTING:
            raise ValueError("columns are too many levels deep")
        match column:
            case ["lists" | "tuples" as tag, lengths, below]:
                kind, members = (list if tag == "lists" else tuple), self._column(below, depth + 1, nesting + 1)
                rest = iter(members)
                return [kind(islice(rest, n)) for n in self._lengths(lengths, len(members), kind)]
            case ["dicts", lengths, keys, below]:
                return self._dicts(lengths, self._values(keys, depth), self._column(below, depth + 1, nesting + 1))
            case ["list rows" | "tuple rows" as tag, bytes(fields), list(columns)]:
                kind, read = (list if tag == "list rows" else tuple), self._columns(columns, depth + 1, nesting)
                rows = self._rows(fields, read, kind)
                return rows if kind is tuple else list(map(list, rows))
            case ["dict rows", keys, bytes(fields), list(columns)]:
                names = self._values(keys, depth)
                if not set(map(type, names)) <= {str} or not len(set(names)) == len(names) == len(fields):
                    raise ValueError("a key of rows is no str, or occurs twice, or has no column")
                rows = self._rows(fields, self._columns(columns, depth + 1, nesting), dict)
                return [dict(zip(names, row, strict=True)) for row in rows]
            case ["mixed", bytes(which), list(columns)]:
                return _mix(which, self._columns(columns, depth, nesting))
        raise ValueError(f"column {column[0][:40]!r} of {len(column) - 1} fields is unknown")

    def _values(self, column: Node, depth: int) -> list[Any]:
        match column:
            case ["values", list(nodes)]:
                return [self._node(node, depth) for node in nodes]
            case ["values", bytes(packed)]:
                count = _array_count(packed)
                self._spend(_VALUE_BYTES * count + _TEXT_BYTES * len(packed))
                try:
                    return _VALUES.decode(packed)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ValueError(f"packed values do not decode: {error}") from error
        raise ValueError("expected a column of values")

    def _lengths(self, column: Node, total: int, kind: type) -> list[int]:
        """Return the lengths of containers that have `total` members, and count their memory."""
        lengths = self._values(column, 0)
        if not set(map(type, lengths)) <= {int} or min(lengths, default=0) < 0 or sum(lengths) != total:
            raise ValueError(f"{total} members in containers of other lengths")
        self._spend_on(kind, len(lengths), total)
        return lengths

    def _columns(self, columns: list[Node], depth: int, nesting: int) -> list[list[Any]]:
        return [self._column(one, depth, nesting + 1) for one in columns]

    def _rows(self, fields: bytes, columns: list[list[Any]], kind: type) -> list[tuple[Any, ...]]:
        """Return rows whose member k is in column `fields[k]`, and count the memory of containers like them."""
        widths = [fields.count(number) for number in range(len(columns))]
        if not fields or 0 in widths or sum(widths) != len(fields):
            raise ValueError("rows name other columns than they have")
        count = len(columns[0]) // widths[0]
        if any(len(column) != count * width for column, width in zip(columns, widths, strict=True)):
            raise ValueError("the columns of rows have other numbers of values")
        self._spend_on(kind, count, count * len(fields))
        rests = [iter(column) for column in columns]
        return list(zip(*[rests[number] for number in fields], strict=True))

    def _spend_on(self, kind: type, count: int, members: int) -> None:
        own, entry = _OBJECT_BYTES[kind]
        self._spend(own * count + entry * members)

    def _dicts(self, lengths: Node, keys: list[Any], members: list[Any]) -> list[Any]:
        if len(keys) != len(members):
            raise ValueError(f"{len(keys)} keys, {len(members)} values")
        found = self._lengths(lengths, len(keys), dict)
        if max(found, default=0) > MAX_ALIKE and not set(map(type, keys)) <= {str}:
            rest = iter(keys)
            if any(crowded(list(islice(rest, length))) for length in found):
                raise ValueError(f"more than {MAX_ALIKE} keys have one hash")
        pairs = zip(keys, members, strict=True)
        dicts = [dict(islice(pairs, length)) for length in found]
        if sum(map(len, dicts)) != len(keys):
            raise ValueError("a key occurs twice")
        return dicts


def _mix(which: bytes, columns: Sequence[list[Any]]) -> list[Any]:
    counts = [which.count(number) for number in range(len(columns))]
    if counts != list(map(len, columns)) or sum(counts) != len(which):
        raise ValueError("a mixed column has other numbers of values than its columns")
    rests = [iter(column) for column in columns]
    return list(map(next, map(rests.__getitem__, which)))


def _array_count(packed: bytes) -> int:
    """Return how many values a packed array declares; it has at least so many bytes."""
    first = packed[0] if packed else 0
    width = {0xDC: 2, 0xDD: 4}.get(first, 0)
    if not (width and len(packed) > width) and not 0x90 <= first <= 0x9F:
        raise ValueError("packed values are no array")
    count = int.from_bytes(packed[1 : 1 + width]) if width else first & 15
    if count > len(packed):
        raise ValueError(f"{count} values in {len(packed)} bytes")
    return count
