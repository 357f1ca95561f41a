"""The decoder of the typed tree: nodes in, values out; the nodes may come from an attacker.

In: the nodes of tree.py's table, or msgpack with such nodes. Out: the values that were encoded, with a `Slot` in place
of every array; or a FormatError.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...arrays import Bytes
from ...errors import FormatError, InvalidInputError, UnknownFormatError
from ..values import configs
from ..values.classes import SCALARS, Form, Make, Types, make_path
from ..values.composite import CONTEXT, is_plain_form
from ..values.containers import INT_MAX, INT_MIN, MAX_ALIKE, MAX_DEPTH, Path, crowded, expect, shown, step
from ..values.tensors import TORCH_DTYPES, Node, Slot, StoredPart, family, numpy_dtype
from . import columns
from .form import FACTORIES


class _Elsewhere:
    def __repr__(self) -> str:
        return "<each rank's own>"


ELSEWHERE: Any = _Elsewhere()  # replaces a value that each rank keeps for itself, if no part has the reader's value
_DEVICE = re.compile(r"[a-z]{1,32}(?::\d{1,3})?")
_MAP = re.compile(rb"[\x80-\x8f\xde\xdf]")  # first bytes of maps, which numbers and texts may contain too
ABSENT: Any = object()  # replaces a part that was not read; its key is left out of the root


def _advances() -> list[int]:
    """Return the size of the msgpack token that begins with each byte; 0: a length follows; -1: a map."""
    sizes = [1] * 256
    for first, last, size in ((0xC4, 0xC9, 0), (0xD9, 0xDB, 0), (0x80, 0x8F, -1), (0xDE, 0xDF, -1)):
        sizes[first : last + 1] = [size] * (last + 1 - first)
    sizes[0xA0:0xC0] = range(1, 33)  # short texts
    sizes[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]  # numbers
    sizes[0xD4:0xD9] = [3, 4, 6, 10, 18]  # extensions
    sizes[0xDC:0xDE] = [3, 5]  # heads of arrays
    return sizes


_ADVANCES = _advances()


_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # size of the length field


def _weights() -> Bytes:
    """Return, for each first byte of a value, the most memory of the value and of its place in a list [bytes]."""
    weights = np.full(256, 8, np.uint8)  # a small int, or part of a text
    weights[0x90:0xA0] = weights[0xDC:0xDE] = 64 + 8  # arrays
    weights[0xA0:0xC0] = weights[0xC4:0xC7] = weights[0xD9:0xDC] = 56 + 8  # texts and bytes
    weights[0xCA:0xD4] = weights[0xE0:] = 32 + 8  # numbers
    return weights


_WEIGHTS = _weights()


def unpacked_bytes(packed: Bytes) -> int:
    """Return the most memory that the nodes in `packed`, (n,) uint8 of msgpack, take [bytes]."""
    pieces = range(0, packed.size, 1 << 16)
    return sum(int(_WEIGHTS[packed[at : at + (1 << 16)]].sum(dtype=np.int64)) for at in pieces)


def _holds_map(packed: bytes | memoryview) -> bool:
    """Return whether msgpack has a map; a map in broken msgpack may be missed."""
    if not _MAP.search(packed):
        return False
    at, end = 0, len(packed)
    while at < end:
        first = packed[at]
        if (size := _ADVANCES[first]) < 0:
            return True
        if not size:
            width = _LENGTHS[first]
            size = 1 + width + (0xC7 <= first <= 0xC9) + int.from_bytes(packed[at + 1 : at + 1 + width])
        at += size
    return False


def unpack_nodes(packed: bytes | memoryview) -> Node:
    """Decode msgpack into nodes.

    Raises:
        FormatError: It does not decode, or has a map. A map is not a node, and a map whose keys are arrays of one hash
            would take too long to decode.
    """
    if _holds_map(packed):
        raise UnknownFormatError(
            "a tree does not decode: it holds a map, which this release of snapstore does not know"
        )
    try:
        return msgspec.msgpack.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"a tree does not decode: {error}") from error


def decode_plain(node: Node) -> Any:
    """Return the value that `encode_plain` encoded.

    Raises:
        FormatError: `encode_plain` cannot have made this node.
    """
    return _TreeDecoder([], 0, {}).value(node, (), 0)


class ParameterForm(NamedTuple):
    """The dtype and the shape of a parameter of an optimizer, as they were at the save."""

    dtype: str
    shape: tuple[int, ...]


class Decoded:
    """The memory that decoding takes, the plain values that it finds, and the values of classes.

    Args:
        spend: Counts bytes of memory before columns take them; raises if there are too many.
        types: The classes of users whose values are made.

    Attributes:
        parameters: The states of optimizers, by id, each with the forms of its parameters in the order of its groups.
        plain: Containers that have neither arrays nor objects in them, by id.
        makers: Containers that are plain forms, by id, each with the function that makes a value of its class.
        composites: The plain forms of composite tensors, by id, each with the module and name of its class.
        contexts, unmade: By the same ids: the node of the context; the module and name of an unknown class in it.
        elsewhere: Paths of values of other ranks, which no part has.
        by_rank: Dicts of the values that ranks have of their own at one place, by id; their keys are the ranks.
    """

    def __init__(self, spend: columns.Spend = lambda nbytes: None, types: Types | None = None) -> None:
        self.spend, self.types = spend, types or Types()
        self.parameters: dict[int, tuple[Any, list[ParameterForm]]] = {}
        self.plain: dict[int, Any] = {}
        self.makers: dict[int, tuple[Any, Make]] = {}
        self.composites: dict[int, tuple[Any, str, str]] = {}
        self.contexts: dict[int, Node] = {}
        self.unmade: dict[int, tuple[str, str]] = {}
        self.unknown: list[tuple[Path, tuple[str, str]]] = []  # places of values of classes that are not known
        self.elsewhere: list[Path] = []
        self.by_rank: dict[int, dict[int, Any]] = {}


def decode(parts: Sequence[StoredPart], *, partial: bool = False, decoded: Decoded | None = None) -> Any:
    """Return the state that the parts' trees describe, with a `Slot` in place of every array.

    Args:
        parts: Must include the part "". Their specs are checked too. Parts of ranks come last.
        partial: Whether parts may be missing; their keys are then left out.
        decoded: Counts the memory, and notes which containers are plain.

    Raises:
        FormatError: `flatten` cannot have made a tree or a spec, or they contradict each other.
    """
    shared = [part.name for part in parts if not part.of_rank]
    positions = {name: position for position, name in enumerate(shared)}
    if "" not in positions or len(positions) < len(shared):
        raise FormatError(f"parts {[part.name for part in parts]}: expected each name once, and the name '' among them")
    for part in parts:
        for spec in part.specs:
            spec.check()
    return _TreeDecoder(parts, positions.pop(""), positions, partial, decoded).root()


def part_names(parts: Sequence[StoredPart]) -> list[str]:
    """Return the parts that the root of a state names, read or not; `decode` has accepted the root."""
    root = without_parameters(next(part.tree for part in parts if not part.name))
    if type(root) is not list or root[0] not in ("dict", "odict"):
        return []
    return [node[1] for node in root[2] if type(node) is list and node[0] == "part"]


def without_parameters(node: Node) -> Node:
    """Return the node of an optimizer's state without the forms of its parameters; any other node itself."""
    return node[3] if type(node) is list and len(node) == 4 and node[0] == "optimizer" else node


class _TreeDecoder:
    """Turns the nodes of one part into values; the decoder of the root makes one for every other part."""

    def __init__(
        self,
        parts: Sequence[StoredPart],
        position: int,
        below: dict[str, int],
        partial: bool = False,
        decoded: Decoded | None = None,
    ) -> None:
        self._parts = parts
        self._position = position
        self._below = below  # name -> position of the parts that the root has not named yet
        self._partial = partial
        self._decoded = decoded or Decoded()
        self._around = 0  # columns nodes around its nodes

    def root(self) -> Any:
        value = self.value(self._parts[self._position].tree, (), 0)
        if self._below:
            raise FormatError(f"parts {sorted(self._below)}: the root tree does not name them")
        return value

    def value(self, node: Node, path: Path, depth: int) -> Any:
        if node is None or type(node) in (bool, int, float, str, bytes):
            return node
        if type(node) is not list or not node or type(node[0]) is not str or node[0] not in READERS:
            raise UnknownFormatError(
                f"{shown(path)}: {_brief(node)} is not a node that this release of snapstore knows"
            )
        if depth >= MAX_DEPTH and node[0] in _NESTING:
            raise FormatError(f"{shown(path[:8])}...: the tree is more than {MAX_DEPTH} levels deep")
        try:
            return READERS[node[0]](self, path, depth, *node[1:])
        except InvalidInputError:  # a class does not take what is stored
            raise
        except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            raise FormatError(f"{shown(path)}: {_brief(node)} is broken: {error}") from error

    def _items(self, nodes: list[Node], path: Path, depth: int) -> list[Any]:
        values = []
        for i, node in enumerate(expect(nodes, list)):
            values.append(self.value(node, (*path, i), depth + 1))
        return values

    def _mapping(self, new: Any, keys: list[Node], nodes: list[Node], path: Path, depth: int) -> Any:
        if len(expect(keys, list)) != len(expect(nodes, list)):
            raise ValueError(f"{len(keys)} keys, {len(nodes)} values")
        read = self._hashables(keys, path, depth)
        for key, node in zip(read, nodes, strict=True):
            child = self.value(node, (*path, step(key)), depth + 1)
            if child is not ABSENT:
                new[key] = child
        return new

    def _hashables(self, nodes: list[Node], path: Path, depth: int) -> list[Any]:
        """Return keys or members, which have no arrays in them; refuse equal ones.

        Too many of one hash, which take quadratic time to put into a container, are refused first.
        """
        plain = self
        if not set(map(type, expect(nodes, list))) <= {str, int}:
            plain = _TreeDecoder([], 0, {}, decoded=self._decoded)
            plain._around = self._around
        values = [plain.value(node, path, depth + 1) for node in nodes]
        if crowded(values):
            raise ValueError(f"more than {MAX_ALIKE} keys or members have one hash")
        if len(set(values)) != len(values):
            raise ValueError("a key or member occurs twice")
        return values

    def read_dict(self, path: Path, depth: int, keys: list[Node], nodes: list[Node]) -> Any:
        return self._mapping({}, keys, nodes, path, depth)

    def read_counter(self, path: Path, depth: int, keys: list[Node], nodes: list[Node]) -> Any:
        return self._mapping(Counter(), keys, nodes, path, depth)

    def read_defaultdict(self, path: Path, depth: int, name: str | None, keys: list[Node], nodes: list[Node]) -> Any:
        if name is not None and expect(name, str) not in FACTORIES:
            raise ValueError("the factory is unknown")
        return self._mapping(defaultdict(None if name is None else FACTORIES[name]), keys, nodes, path, depth)

    def read_odict(self, path: Path, depth: int, keys: list[Node], nodes: list[Node], *metadata: Node) -> Any:
        new: Any = self._mapping(OrderedDict(), keys, nodes, path, depth)
        if metadata:
            (node,) = metadata
            new._metadata = self.value(node, (*path, "_metadata"), depth + 1)
        return new

    def read_rank(self, path: Path, depth: int, index: int) -> Any:
        part = self._parts[self._position] if self._parts else None
        if part is None or part.of_rank:
            raise ValueError("a value of each rank's own inside of another")
        values: dict[int, Any] = {}
        for position, own in enumerate(self._parts):
            if own.of_rank and own.name == part.name:
                nodes = _own_nodes(own.tree)
                if not 0 <= expect(index, int) < len(nodes):
                    raise ValueError(f"the rank has {len(nodes)} values of its own")
                below = path if own.rank is None else (*path, own.rank)
                decoder = _TreeDecoder(self._parts, position, {}, decoded=self._decoded)
                value = decoder.value(nodes[index], below, depth)
                if own.rank is None:
                    return value
                values[own.rank] = value
        if not values:
            self._decoded.elsewhere.append(path)
            return ELSEWHERE
        self._decoded.by_rank[id(values)] = values
        return values

    def read_columns(self, path: Path, depth: int, column: Node) -> Any:
        leaves = _TreeDecoder([], 0, {}, decoded=self._decoded)  # without arrays
        leaves._around = self._around + 1
        if leaves._around > columns.MAX_NESTING:  # else only the stack of this process would be a limit
            raise ValueError("columns are too many levels deep")
        reader = columns.ColumnDecoder(lambda node, depth: leaves.value(node, path, depth), self._decoded.spend)
        value = reader.only(column, depth)
        self._decoded.plain[id(value)] = value
        return value

    def read_list(self, path: Path, depth: int, nodes: list[Node]) -> Any:
        return self._items(nodes, path, depth)

    def read_tuple(self, path: Path, depth: int, nodes: list[Node]) -> Any:
        return tuple(self._items(nodes, path, depth))

    def read_deque(self, path: Path, depth: int, maxlen: int | None, nodes: list[Node]) -> Any:
        if maxlen is not None and expect(maxlen, int) < len(nodes):
            raise ValueError("longer than its maxlen")
        return deque(self._items(nodes, path, depth), maxlen)

    def read_set(self, path: Path, depth: int, nodes: list[Node]) -> Any:
        return set(self._hashables(nodes, path, depth))

    def read_frozenset(self, path: Path, depth: int, nodes: list[Node]) -> Any:
        return frozenset(self._hashables(nodes, path, depth))

    def read_int(self, path: Path, depth: int, packed: bytes) -> Any:
        return int.from_bytes(expect(packed, bytes), "little", signed=True)

    def read_str(self, path: Path, depth: int, packed: bytes) -> Any:
        return expect(packed, bytes).decode("utf-8", "surrogatepass")

    def read_bytes(self, path: Path, depth: int, index: int) -> Any:
        return self._slot("bytes", index)

    def read_bytearray(self, path: Path, depth: int, packed: bytes | int) -> Any:
        return bytearray(packed) if isinstance(packed, bytes) else self._slot("bytearray", packed)

    def read_complex(self, path: Path, depth: int, real: float, imag: float) -> Any:
        return complex(expect(real, float), expect(imag, float))

    def read_np(self, path: Path, depth: int, name: str, packed: bytes) -> Any:
        dtype = numpy_dtype(name)
        if dtype.kind in "SU" or len(expect(packed, bytes)) != dtype.itemsize:
            raise ValueError("not one value of that dtype")
        return np.frombuffer(packed, dtype)[0]

    def read_npstr(self, path: Path, depth: int, node: Node) -> Any:
        return np.str_(expect(self.value(node, path, depth + 1), str))

    def read_npbytes(self, path: Path, depth: int, packed: bytes) -> Any:
        return np.bytes_(expect(packed, bytes))

    def read_npdtype(self, path: Path, depth: int, name: str) -> Any:
        return numpy_dtype(name)

    def read_dtype(self, path: Path, depth: int, name: str) -> Any:
        import torch

        dtype = vars(torch).get(expect(name, str))  # not getattr, which may import a module of that name
        if not isinstance(dtype, torch.dtype) or str(dtype) != f"torch.{name}":
            raise ValueError("this torch has no such dtype")
        return dtype

    def read_size(self, path: Path, depth: int, sizes: list[int]) -> Any:
        import torch

        if any(not INT_MIN <= expect(size, int) <= INT_MAX for size in expect(sizes, list)):
            raise ValueError("a size has more than 64 bits")
        return torch.Size(sizes)

    def read_device(self, path: Path, depth: int, name: str) -> Any:
        import torch

        if not _DEVICE.fullmatch(expect(name, str)):
            raise ValueError("not a device")
        return torch.device(name)

    def read_path(self, path: Path, depth: int, kind: str, node: Node) -> Any:
        return make_path(expect(kind, str), expect(self.value(node, path, depth + 1), str))

    def read_date(self, path: Path, depth: int, text: str) -> Any:
        return date.fromisoformat(expect(text, str))

    def read_time(self, path: Path, depth: int, text: str, fold: int, zone: Node) -> Any:
        return self._zoned(time.fromisoformat(expect(text, str)), path, depth, fold, zone)

    def read_datetime(self, path: Path, depth: int, text: str, fold: int, zone: Node) -> Any:
        return self._zoned(datetime.fromisoformat(expect(text, str)), path, depth, fold, zone)

    def _zoned(self, value: Any, path: Path, depth: int, fold: int, node: Node) -> Any:
        zone = None if node is None else expect(self.value(node, path, depth + 1), timezone)
        return value.replace(tzinfo=zone, fold=expect(fold, int))

    def read_timedelta(self, path: Path, depth: int, days: int, seconds: int, microseconds: int) -> Any:
        return timedelta(expect(days, int), expect(seconds, int), expect(microseconds, int))

    def read_timezone(self, path: Path, depth: int, offset: Node, *name: Node) -> Any:
        names = [expect(self.value(node, path, depth + 1), str) for node in name]
        return timezone(expect(self.value(offset, path, depth + 1), timedelta), *names)

    def read_enum(self, path: Path, depth: int, module: str, name: str, member: str | None, node: Node) -> Any:
        plain = self.value(node, path, depth + 1)
        if type(plain) not in SCALARS or type(member) not in (str, type(None)):
            raise ValueError("a member has no scalar as its plain form")
        self._note_class(module, name, path)
        return self._decoded.types.member(expect(module, str), expect(name, str), member, plain, path)

    def read_object(
        self, path: Path, depth: int, kind: str, module: str, name: str, node: Node, fields: Sequence[str] = ()
    ) -> Any:
        if type(node) is list and node[:1] == ["object"]:
            raise ValueError("the plain form of an object is an object")
        before = len(self._decoded.unknown)
        plain = self.value(node, path, depth)
        form = Form(expect(kind, str), expect(module, str), expect(name, str), plain, tuple(fields))
        form.check()
        make = self._decoded.types.maker(form, path)
        if kind == "dataclass" and is_plain_form(plain):
            self._decoded.composites[id(plain)] = plain, module, name
            self._decoded.contexts[id(plain)] = node[2][node[1].index(CONTEXT)]
            unknown = [one for at, one in self._decoded.unknown[before:] if at[len(path) : len(path) + 1] == (CONTEXT,)]
            if unknown and make is not None:  # the class would get a plain value in its context
                self._decoded.unmade[id(plain)], make = unknown[0], None
        elif module == configs.MODULE:  # a config with plain values in the places of others would not be the stored one
            make = None if len(self._decoded.unknown) > before else make
            self._decoded.unknown += [(path, (module, name))] if make is None else []
        if kind != "namespace" and module != configs.MODULE:
            self._note_class(module, name, path)
        if make is None:
            return plain
        if type(plain) in SCALARS or plain == ():  # one object is every () of the state: its id names no place
            return make(plain)
        self._decoded.makers[id(plain)] = plain, make
        return plain

    def _note_class(self, module: str, name: str, path: Path) -> None:
        if self._decoded.types.find(module, name) is None:
            self._decoded.unknown.append((path, (module, name)))

    def read_optimizer(
        self, path: Path, depth: int, forms: list[tuple[str, list[int]]], numbers: list[int], node: Node
    ) -> Any:
        if type(node) is not list or node[:1] not in (["dict"], ["odict"], ["columns"]):
            raise ValueError("the state of an optimizer is no dict")
        read = [ParameterForm(expect(dtype, str), tuple(expect(shape, list))) for dtype, shape in forms]
        sizes = [expect(size, int) for form in read for size in form.shape]
        if min([*sizes, *(expect(number, int) for number in numbers)], default=0) < 0:
            raise ValueError("a size or the number of a form is negative")
        if max(numbers, default=-1) >= len(read):
            raise ValueError(f"there are {len(read)} forms of parameters")
        value = self.value(node, path, depth)
        self._decoded.parameters[id(value)] = value, [read[number] for number in numbers]
        return value

    def read_tensor(self, path: Path, depth: int, index: int, requires_grad: bool) -> Any:
        return self._slot("tensor", index, requires_grad)

    def read_parameter(self, path: Path, depth: int, index: int, requires_grad: bool) -> Any:
        return self._slot("parameter", index, requires_grad)

    def read_array(self, path: Path, depth: int, index: int) -> Any:
        return self._slot("array", index)

    def read_part(self, path: Path, depth: int, name: str) -> Any:
        if depth != 1 or (position := self._below.pop(expect(name, str), None)) is None:
            if depth == 1 and self._partial and name:
                return ABSENT
            raise ValueError("no such part here")
        part = _TreeDecoder(self._parts, position, {}, decoded=self._decoded)
        return part.value(self._parts[position].tree, path, depth)

    def _slot(self, tag: str, index: int, requires_grad: bool = False) -> Slot:
        specs = self._parts[self._position].specs if self._parts else ()
        if not 0 <= expect(index, int) < len(specs):
            raise ValueError(f"there are {len(specs)} arrays")
        spec = specs[index]
        if family(spec.kind) != family(tag):
            raise ValueError(f"entry {index} is of kind {spec.kind}")
        if expect(requires_grad, bool) and not TORCH_DTYPES[spec.dtype][2]:
            raise ValueError(f"{spec.dtype} cannot require grad")
        return Slot(self._position, index, tag, requires_grad)


def _own_nodes(tree: Node) -> list[Node]:
    """Return the nodes of a rank's own values."""
    if type(tree) is not list or len(tree) != 2 or tree[0] != "own":
        raise ValueError("the tree of the rank's own values is another")
    nodes: list[Node] = expect(tree[1], list)
    return nodes


def _brief(node: Node) -> str:
    """Return a short name of a node for errors, whatever its size."""
    if type(node) is list and node and type(node[0]) is str:
        return f"node {node[0][:40]!r} of {len(node) - 1} fields"
    return f"a {type(node).__name__}"


READERS: dict[str, Callable[..., Any]] = {
    name.removeprefix("read_"): reader for name, reader in vars(_TreeDecoder).items() if name.startswith("read_")
}


_NESTING = frozenset({"list", "tuple", "set", "frozenset", "deque", "dict", "odict", "counter", "defaultdict"})
