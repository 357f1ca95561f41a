"""The typed tree: a state without its arrays, as nodes that msgpack can hold; no pickle, no code.

In: Python values. Out: nodes, and back, exact to the type. A node is None, bool, int (64 bit), float, str, bytes (up to
4 KiB), or a list whose first element is a tag:

| node                                  | value                                                                    |
|---------------------------------------|--------------------------------------------------------------------------|
| ["int", bytes]                        | int beyond 64 bits: little-endian two's complement                       |
| ["str", bytes]                        | str with lone surrogates: UTF-8 with them encoded (surrogatepass)        |
| ["bytes", index]                      | bytes longer than 4 KiB: entry `index` of the manifest's tensors         |
| ["bytearray", bytes or index]         | bytearray                                                                |
| ["complex", real, imag]               | complex                                                                  |
| ["list", [node...]]                   | list                                                                     |
| ["tuple", [node...]]                  | tuple                                                                    |
| ["set", [node...]]                    | set of hashable plain values, sorted by their packed nodes               |
| ["frozenset", [node...]]              | frozenset, likewise                                                      |
| ["deque", maxlen or None, [node...]]  | collections.deque                                                        |
| ["dict", [key...], [node...]]         | dict in its order; keys are hashable plain values                        |
| ["odict", [key...], [node...]]        | OrderedDict; a fourth element is the node of its `_metadata` attribute   |
| ["counter", [key...], [node...]]      | collections.Counter                                                      |
| ["defaultdict", name, [key...], [node...]] | defaultdict; `name` of its factory (`int`, `list`, ...) or None     |
| ["dtype", name]                       | torch.dtype: `float32`                                                   |
| ["size", [int...]]                    | torch.Size                                                               |
| ["device", str]                       | torch.device: `cuda:0`                                                   |
| ["np", dtype, bytes]                  | NumPy scalar: `dtype.str` and its bytes                                  |
| ["npstr", node], ["npbytes", bytes]   | numpy.str_, numpy.bytes_                                                 |
| ["npdtype", str]                      | numpy.dtype: `dtype.str`                                                 |
| ["tensor", index, requires_grad]      | entry `index` of the manifest's tensors                                  |
| ["parameter", index, requires_grad]   | the same, as a torch.nn.Parameter                                        |
| ["array", index]                      | the same, as a numpy.ndarray                                             |
| ["part", name]                        | the tree of another part; only in the root dict of part ""               |

Invariants: decoding a node gives the value that was encoded, to the bit and the type, or raises FormatError; it runs no
code that the node names and allocates no more than the node's own size. Stateless: any thread may use it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np

from ..errors import FormatError, InvalidInputError, UnknownFormatError, UnsupportedLeafError
from .containers import (
    CONTAINERS,
    INT_MAX,
    INT_MIN,
    MAX_ALIKE,
    MAX_DEPTH,
    Path,
    children,
    crowded,
    is_mapping,
    shown,
    step,
)
from .tensors import TORCH_DTYPES, Node, Slot, StoredPart, family, is_array, numpy_dtype, numpy_dtype_name

INLINE_BYTES = 4 * 1024  # longer bytes are entries of the manifest, where they are cut into chunks
MAX_PROBLEMS = 20  # unsupported leaves that one error names


_PLAIN = frozenset({type(None), bool, int, float, str})  # most leaves that are no arrays
_DEVICE = re.compile(r"[a-z]{1,32}(?::\d{1,3})?")
_TAGS = {**{kind: kind.__name__ for kind in CONTAINERS}, OrderedDict: "odict", Counter: "counter"}
_FACTORIES: dict[str, type] = {t.__name__: t for t in (int, float, str, list, dict, set, tuple, bool)}

_NO_NODE: Any = object()  # None is a node
_MAP = re.compile(rb"[\x80-\x8f\xde\xdf]")  # with what a map begins, and parts of numbers and texts may too
ABSENT: Any = object()  # stands for a part that was not read; its key is left out of the root


class Encoder:
    """Turns one state into nodes; collects what it cannot store instead of stopping at the first.

    Args:
        put: Stores an array leaf (tensor, ndarray, or bytes of more than 4 KiB) found at a path; returns its node, or
            raises UnsupportedLeafError.
        expand: Returns (state,) for an object that stands for its state, None for any other.
    """

    def __init__(self, put: Callable[[Any, Path], Node], expand: Callable[[Any, Path], tuple[Any] | None]) -> None:
        self._problems: list[str] = []
        self._put = put
        self._expand = expand
        self._open: dict[int, Path] = {}  # containers and objects being walked: finds cycles, bounds the depth

    def node(self, value: Any, path: Path) -> Node:
        """Return the node of a value; a value that has none is noted as a problem.

        Raises:
            InvalidInputError: The value contains itself, or is nested too deeply.
        """
        if type(value) in CONTAINERS:
            self.enter(value, path)
            node = self._container(value, path)
            self.leave(value)
            return node
        if type(value) in _PLAIN:
            return _scalar(value, 0)
        try:
            if is_array(value) or (type(value) in (bytes, bytearray) and len(value) > INLINE_BYTES):
                return self._put(value, path)
            node = _scalar(value, len(self._open))
            state = self._expand(value, path) if node is _NO_NODE else None
        except UnsupportedLeafError as error:
            return self.problem(path, str(error))
        if state is not None:
            self.enter(value, path)
            node = self.node(state[0], path)
            self.leave(value)
            return node
        return node if node is not _NO_NODE else self.problem(path, f"{_type_name(value)} {_NO_FORM}")

    def key(self, key: Any, path: Path) -> Node:
        """Return the node of a dict key."""
        try:
            node = _hashable(key, len(self._open))
        except UnsupportedLeafError as error:
            return self.problem(path, str(error))
        if node is _NO_NODE:
            return self.problem(path, f"a dict key of type {_type_name(key)} has no stored form: {_KEY_FORM}")
        return node

    def problem(self, path: Path, text: str) -> None:
        """Note what cannot be stored."""
        self._problems.append(f"{shown(path)}: {text}")

    def raise_problems(self) -> None:
        """Name every value that could not be stored, if there was one.

        Raises:
            UnsupportedLeafError: There was.
        """
        if self._problems:
            more = len(self._problems) - MAX_PROBLEMS
            lines = self._problems[:MAX_PROBLEMS] + ([f"... and {more} more"] if more > 0 else [])
            raise UnsupportedLeafError("\n".join(lines))

    def enter(self, value: Any, path: Path) -> None:
        """Hold a container or object open, until `leave`, while what it holds is encoded.

        Raises:
            InvalidInputError: It is open already, or too many are; the walk is over.
        """
        if id(value) in self._open:
            raise InvalidInputError(
                f"{shown(path)}: contains itself (it is also {shown(self._open[id(value)])}); break the cycle"
            )
        if len(self._open) >= MAX_DEPTH:
            raise InvalidInputError(f"{shown(path[:8])}...: more than {MAX_DEPTH} levels deep; flatten this state")
        self._open[id(value)] = path

    def leave(self, value: Any) -> None:
        """End what `enter` began."""
        del self._open[id(value)]

    def _container(self, value: Any, path: Path) -> Node:
        keys, nodes, mapping = [], [], is_mapping(value)
        if mapping and crowded(value):
            return self.problem(path, f"{type(value).__name__} {_CROWDED}")
        for element, key, child in children(value):
            below = (*path, element)
            if mapping:  # a key that is its own path element is its own node
                keys.append(key if key is element else self.key(key, below))
            nodes.append(self.node(child, below))
        return self.tagged(value, keys, nodes, path)

    def tagged(self, value: Any, keys: list[Node], nodes: list[Node], path: Path) -> Node:
        """Return the node of a container whose children are encoded already."""
        kind: Any = type(value)
        attributes = dict(getattr(value, "__dict__", ()))
        metadata = attributes.pop("_metadata", None) if kind is OrderedDict else None
        if attributes:
            return self.problem(path, f"{kind.__name__} has attributes without a stored form: {sorted(attributes)}")
        if kind is deque:
            return ["deque", value.maxlen, nodes]
        if kind is defaultdict:
            return ["defaultdict", self._factory(value, path), keys, nodes]
        tag = _TAGS[kind]
        if metadata is not None:
            return [tag, keys, nodes, self.node(metadata, (*path, "_metadata"))]
        return [tag, keys, nodes] if is_mapping(value) else [tag, nodes]

    def _factory(self, value: defaultdict[Any, Any], path: Path) -> str | None:
        factory = value.default_factory
        if factory is None:
            return None
        name = getattr(factory, "__name__", "")
        if _FACTORIES.get(name) is not factory:
            self.problem(path, f"defaultdict of {factory!r} has no stored form: use dict, or one of {list(_FACTORIES)}")
        return str(name)


_NO_FORM = "has no stored form: convert it to a plain value, or wrap it in an object with state_dict/load_state_dict"
_CROWDED = f"holds more than {MAX_ALIKE} keys of one hash, which takes time without end to read: use str as keys"
_KEY_FORM = "use str, int or another plain hashable value"


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _scalar(value: Any, depth: int) -> Node:
    """Return the node of a plain leaf, or _NO_NODE."""
    kind = type(value)
    if kind is str:
        return _text_node(value)
    if kind is int:
        fits = INT_MIN <= value <= INT_MAX
        return value if fits else ["int", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is bytearray:
        return ["bytearray", bytes(value)]
    if kind in (set, frozenset):
        return _set_node(value, depth)
    if isinstance(value, np.generic | np.dtype):
        return _numpy_node(value)
    return _torch_node(value)


def _text_node(text: str) -> Node:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return ["str", text.encode("utf-8", "surrogatepass")]
    return text


def _hashable(value: Any, depth: int) -> Node:
    """Return the node of a dict key or set member: a scalar, or a tuple or frozenset of such."""
    if type(value) is not tuple:
        return _scalar(value, depth)
    return _members("tuple", value, depth)


def _set_node(value: set[Any] | frozenset[Any], depth: int) -> Node:
    if crowded(value):
        raise UnsupportedLeafError(f"{type(value).__name__} {_CROWDED}")
    node = _members(type(value).__name__, value, depth)
    node[1].sort(key=msgspec.msgpack.encode)  # a set's own order changes from process to process
    return node


def _members(tag: str, values: Iterable[Any], depth: int) -> list[Any]:
    if depth >= MAX_DEPTH:
        raise UnsupportedLeafError(f"more than {MAX_DEPTH} levels deep; flatten this state")
    nodes = []
    for value in values:
        nodes.append(_hashable(value, depth + 1))
        if nodes[-1] is _NO_NODE:
            raise UnsupportedLeafError(f"{tag} holds a {_type_name(value)}, which {_NO_FORM}")
    return [tag, nodes]


def _numpy_node(value: Any) -> Node:
    if isinstance(value, np.dtype):
        name = numpy_dtype_name(value)
        return _NO_NODE if name is None else ["npdtype", name]
    if type(value) is np.str_:
        return ["npstr", _text_node("".join(value))]  # str() would strip zeros
    if type(value) is np.bytes_:
        return ["npbytes", bytes(value)]
    name = numpy_dtype_name(value.dtype)
    return ["np", name, value.tobytes()] if name is not None and type(value) is value.dtype.type else _NO_NODE


def _torch_node(value: Any) -> Node:
    torch = sys.modules.get("torch")
    if torch is None:
        return _NO_NODE
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) is torch.Size:
        return ["size", list(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    return _NO_NODE


def encode_plain(value: Any, path: Path = ()) -> Node:
    """Return the node of a value without arrays and objects, such as a snapshot's metadata.

    Raises:
        UnsupportedLeafError: It holds something that is not plain.
        InvalidInputError: It contains itself, or is nested too deeply.
    """
    encoder = Encoder(_refuse, lambda value, path: None)
    node = encoder.node(value, path)
    encoder.raise_problems()
    return node


def _refuse(value: Any, path: Path) -> NoReturn:
    raise UnsupportedLeafError(
        f"{_type_name(value)}: only plain values of at most {INLINE_BYTES} bytes are allowed here"
    )


def _advances() -> list[int]:
    """How far the token that begins with each byte of msgpack reaches, if that byte says it; 0: a length follows."""
    sizes = [1] * 256
    for first, last, size in ((0xC4, 0xC9, 0), (0xD9, 0xDB, 0), (0x80, 0x8F, -1), (0xDE, 0xDF, -1)):
        sizes[first : last + 1] = [size] * (last + 1 - first)
    sizes[0xA0:0xC0] = range(1, 33)  # short texts
    sizes[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]  # numbers
    sizes[0xD4:0xD9] = [3, 4, 6, 10, 18]  # extensions
    sizes[0xDC:0xDE] = [3, 5]  # heads of arrays
    return sizes


_ADVANCES = _advances()
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes of a length


def _holds_map(packed: bytes) -> bool:
    """Whether msgpack holds a map; where it is broken it need not be found."""
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


def unpack(packed: bytes) -> Node:
    """Return the nodes that msgpack holds.

    Raises:
        FormatError: It holds none. A map is no node, and one whose keys are arrays of one hash would take time without
            end to make.
    """
    if _holds_map(packed):
        raise UnknownFormatError("a tree does not decode: it holds a map, which this release of snapstore knows not")
    try:
        return msgspec.msgpack.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"a tree does not decode: {error}") from error


def decode_plain(node: Node, path: Path = ()) -> Any:
    """Return the value that `encode_plain` encoded.

    Raises:
        FormatError: The node is not one of those.
    """
    return _Decoder([], 0, {}).value(node, path, 0)


def decode(parts: Sequence[StoredPart], *, partial: bool = False) -> Any:
    """Return the state that the parts' trees describe, with a `Slot` in place of every array.

    Args:
        parts: With the one named "" among them. Their specs are checked too.
        partial: Whether parts may be missing; their keys are then left out.

    Raises:
        FormatError: A tree or a spec is none that `flatten` makes, or does not fit the others.
    """
    positions = {part.name: position for position, part in enumerate(parts)}
    if "" not in positions or len(positions) < len(parts):
        raise FormatError(f"parts {[part.name for part in parts]}: expected each once and one named ''")
    for part in parts:
        for spec in part.specs:
            spec.check()
    return _Decoder(parts, positions.pop(""), positions, partial).root()


class _Decoder:
    """Turns the nodes of one part into values; the root's decoder makes one for every part it meets."""

    def __init__(
        self, parts: Sequence[StoredPart], position: int, below: dict[str, int], partial: bool = False
    ) -> None:
        self._parts = parts
        self._position = position
        self._below = below  # the parts that the root may still name, each once
        self._partial = partial

    def root(self) -> Any:
        value = self.value(self._parts[self._position].tree, (), 0)
        if self._below:
            raise FormatError(f"parts {sorted(self._below)}: the root tree does not name them")
        return value

    def value(self, node: Node, path: Path, depth: int) -> Any:
        if node is None or type(node) in (bool, int, float, str, bytes):
            return node
        if type(node) is not list or not node or type(node[0]) is not str or node[0] not in _READERS:
            raise UnknownFormatError(f"{shown(path)}: {_brief(node)} is no node that this release of snapstore knows")
        if depth >= MAX_DEPTH and node[0] in _NESTING:
            raise FormatError(f"{shown(path[:8])}...: the tree is more than {MAX_DEPTH} levels deep")
        try:
            return _READERS[node[0]](self, path, depth, *node[1:])
        except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            raise FormatError(f"{shown(path)}: {_brief(node)} is broken: {error}") from error

    def _items(self, nodes: list[Node], path: Path, depth: int) -> list[Any]:
        values = []
        for i, node in enumerate(_expect(nodes, list)):
            values.append(self.value(node, (*path, i), depth + 1))
        return values

    def _mapping(self, new: Any, keys: list[Node], nodes: list[Node], path: Path, depth: int) -> Any:
        if len(_expect(keys, list)) != len(_expect(nodes, list)):
            raise ValueError(f"{len(keys)} keys, {len(nodes)} values")
        read = self._hashables(keys, path, depth)
        if len(set(read)) != len(keys):
            raise ValueError("a key stands twice")
        for key, node in zip(read, nodes, strict=True):
            child = self.value(node, (*path, step(key)), depth + 1)
            if child is not ABSENT:
                new[key] = child
        return new

    def _hashables(self, nodes: list[Node], path: Path, depth: int) -> list[Any]:
        """Keys or members; nothing is built of them if that would take the square of their number."""
        values = [self.value(node, path, depth + 1) for node in _expect(nodes, list)]
        if crowded(values):
            raise ValueError(f"more than {MAX_ALIKE} keys or members have one hash")
        return values

    def read_dict(self, path: Path, depth: int, keys: list[Node], nodes: list[Node]) -> Any:
        return self._mapping({}, keys, nodes, path, depth)

    def read_counter(self, path: Path, depth: int, keys: list[Node], nodes: list[Node]) -> Any:
        return self._mapping(Counter(), keys, nodes, path, depth)

    def read_defaultdict(self, path: Path, depth: int, name: str | None, keys: list[Node], nodes: list[Node]) -> Any:
        if name is not None and _expect(name, str) not in _FACTORIES:
            raise ValueError("the factory is unknown")
        return self._mapping(defaultdict(None if name is None else _FACTORIES[name]), keys, nodes, path, depth)

    def read_odict(self, path: Path, depth: int, keys: list[Node], nodes: list[Node], *metadata: Node) -> Any:
        new: Any = self._mapping(OrderedDict(), keys, nodes, path, depth)
        if metadata:
            (node,) = metadata
            new._metadata = self.value(node, (*path, "_metadata"), depth + 1)
        return new

    def read_list(self, path: Path, depth: int, nodes: list[Node]) -> Any:
        return self._items(nodes, path, depth)

    def read_tuple(self, path: Path, depth: int, nodes: list[Node]) -> Any:
        return tuple(self._items(nodes, path, depth))

    def read_deque(self, path: Path, depth: int, maxlen: int | None, nodes: list[Node]) -> Any:
        if maxlen is not None and _expect(maxlen, int) < len(nodes):
            raise ValueError("longer than its maxlen")
        return deque(self._items(nodes, path, depth), maxlen)

    def read_set(self, path: Path, depth: int, nodes: list[Node]) -> Any:
        return set(self._hashables(nodes, path, depth))

    def read_frozenset(self, path: Path, depth: int, nodes: list[Node]) -> Any:
        return frozenset(self._hashables(nodes, path, depth))

    def read_int(self, path: Path, depth: int, packed: bytes) -> Any:
        return int.from_bytes(_expect(packed, bytes), "little", signed=True)

    def read_str(self, path: Path, depth: int, packed: bytes) -> Any:
        return _expect(packed, bytes).decode("utf-8", "surrogatepass")

    def read_bytes(self, path: Path, depth: int, index: int) -> Any:
        return self._slot("bytes", index)

    def read_bytearray(self, path: Path, depth: int, packed: bytes | int) -> Any:
        return bytearray(packed) if isinstance(packed, bytes) else self._slot("bytearray", packed)

    def read_complex(self, path: Path, depth: int, real: float, imag: float) -> Any:
        return complex(_expect(real, float), _expect(imag, float))

    def read_np(self, path: Path, depth: int, name: str, packed: bytes) -> Any:
        dtype = numpy_dtype(name)
        if dtype.kind in "SU" or len(_expect(packed, bytes)) != dtype.itemsize:
            raise ValueError("not one value of that dtype")
        return np.frombuffer(packed, dtype)[0]

    def read_npstr(self, path: Path, depth: int, node: Node) -> Any:
        return np.str_(_expect(self.value(node, path, depth + 1), str))

    def read_npbytes(self, path: Path, depth: int, packed: bytes) -> Any:
        return np.bytes_(_expect(packed, bytes))

    def read_npdtype(self, path: Path, depth: int, name: str) -> Any:
        return numpy_dtype(name)

    def read_dtype(self, path: Path, depth: int, name: str) -> Any:
        import torch

        dtype = vars(torch).get(_expect(name, str))  # not getattr: it may import what the name says
        if not isinstance(dtype, torch.dtype) or str(dtype) != f"torch.{name}":
            raise ValueError("this torch has no such dtype")
        return dtype

    def read_size(self, path: Path, depth: int, sizes: list[int]) -> Any:
        import torch

        if any(not INT_MIN <= _expect(size, int) <= INT_MAX for size in _expect(sizes, list)):
            raise ValueError("a size has more than 64 bits")
        return torch.Size(sizes)

    def read_device(self, path: Path, depth: int, name: str) -> Any:
        import torch

        if not _DEVICE.fullmatch(_expect(name, str)):
            raise ValueError("no device")
        return torch.device(name)

    def read_tensor(self, path: Path, depth: int, index: int, requires_grad: bool) -> Any:
        return self._slot("tensor", index, requires_grad)

    def read_parameter(self, path: Path, depth: int, index: int, requires_grad: bool) -> Any:
        return self._slot("parameter", index, requires_grad)

    def read_array(self, path: Path, depth: int, index: int) -> Any:
        return self._slot("array", index)

    def read_part(self, path: Path, depth: int, name: str) -> Any:
        if depth != 1 or (position := self._below.pop(_expect(name, str), None)) is None:
            if depth == 1 and self._partial and name:
                return ABSENT
            raise ValueError("no such part here")
        part = _Decoder(self._parts, position, {})
        return part.value(self._parts[position].tree, path, depth)

    def _slot(self, tag: str, index: int, requires_grad: bool = False) -> Slot:
        specs = self._parts[self._position].specs if self._parts else ()
        if not 0 <= _expect(index, int) < len(specs):
            raise ValueError(f"there are {len(specs)} arrays")
        spec = specs[index]
        if family(spec.kind) != family(tag):
            raise ValueError(f"entry {index} is of kind {spec.kind}")
        if _expect(requires_grad, bool) and not TORCH_DTYPES[spec.dtype][2]:
            raise ValueError(f"{spec.dtype} cannot require grad")
        return Slot(self._position, index, tag, requires_grad)


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _brief(node: Node) -> str:
    """Name a node in an error without trusting its size."""
    if type(node) is list and node and type(node[0]) is str:
        return f"node {node[0][:40]!r} of {len(node) - 1} fields"
    return f"a {type(node).__name__}"


_READERS: dict[str, Callable[..., Any]] = {
    name.removeprefix("read_"): reader for name, reader in vars(_Decoder).items() if name.startswith("read_")
}
_NESTING = frozenset({"list", "tuple", "set", "frozenset", "deque", "dict", "odict", "counter", "defaultdict"})
