"""The encoder of the typed tree: values in, nodes out.

In: Python values. Out: the nodes of tree.py's table; or one error that names the values that cannot be stored.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import date, timedelta, timezone
from enum import Enum
from io import IOBase
from typing import Any, NoReturn

import msgspec
import numpy as np

from ...errors import InvalidInputError, UnsupportedLeafError
from ...threads import imported
from ..values import classes, composite, objects
from ..values.containers import (
    CONTAINERS,
    INT_MAX,
    INT_MIN,
    MAX_ALIKE,
    MAX_DEPTH,
    Items,
    Path,
    crowded,
    is_mapping,
    items_of,
    shown,
    step,
)
from ..values.tensors import Node, is_array, numpy_dtype_name
from ..values.torch_layouts import layout_of
from . import columns
from .decode import decode_plain
from .form import FACTORIES, INLINE_BYTES

MAX_PROBLEMS = 20  # the most unsupported leaves that one error names

PLAIN = frozenset({type(None), bool, int, float, str})  # the types of most leaves that are not arrays
_TAGS = {**{kind: kind.__name__ for kind in CONTAINERS}, OrderedDict: "odict", Counter: "counter"}
_NO_NODE: Any = object()  # None is a node


class Encoder:
    """Turns one state into nodes; collects all values that it cannot store before it raises.

    Args:
        put: Stores an array leaf (tensor, ndarray, or bytes of more than 4 KiB) at a path; returns its node, or raises
            UnsupportedLeafError.
        expand: Returns, for an object that is stored as its state, this state, and for an optimizer the first fields of
            its node; None for any other value.
        special: Returns the node of a value that the caller encodes itself, or None.
        columnar: Whether large trees of plain values become columns (columns.py).
    """

    def __init__(
        self,
        put: Callable[[Any, Path], Node],
        expand: Callable[[Any, Path], tuple[Any, list[Node] | None] | None],
        special: Callable[[Any, Path], Node] | None = None,
        *,
        columnar: bool = False,
    ) -> None:
        self._problems: list[str] = []
        self._columnar = columnar
        self._special = special
        self._put = put
        self._expand = expand
        self._open: dict[int, Path] = {}  # containers and objects being walked, to find cycles and bound the depth

    def node(self, value: Any, path: Path) -> Node:
        """Return the node of a value; note a problem if it has none.

        Raises:
            InvalidInputError: The value contains itself, or is nested too deeply.
        """
        if type(value) in CONTAINERS:
            self.enter(value, path)
            node = self._container(value, path)
            self.leave(value)
            return node
        if type(value) in PLAIN:
            return _scalar(value, 0)
        try:
            if is_array(value) or (type(value) in (bytes, bytearray) and len(value) > INLINE_BYTES):
                if not composite.is_composite(value):
                    return self._put(value, path)
                _check_composite(value)
            if self._special is not None and (found := self._special(value, path)) is not None:
                return found
            node = _scalar(value, len(self._open))
            state = self._expand(value, path) if node is _NO_NODE else None
            if node is _NO_NODE and state is None:
                node = _class_leaf(value, len(self._open))
            form = classes.form_of(value) if node is _NO_NODE and state is None else None
        except UnsupportedLeafError as error:
            return self.problem(path, str(error))
        if state is not None:
            self.enter(value, path)
            node = self.node(state[0], path)
            self.leave(value)
            return node if state[1] is None else [*state[1], node]
        if form is not None:
            self.enter(value, path)
            fields = [list(form.fields)] if form.fields else []
            node = ["object", form.kind, form.module, form.name, self.node(form.plain, path), *fields]
            self.leave(value)
        return node if node is not _NO_NODE else self.problem(path, f"{type_name(value)} {_advice(value)}")

    def _key_node(self, key: Any, path: Path) -> Node:
        """Return the node of a dict key."""
        try:
            node = _hashable(key, len(self._open))
        except UnsupportedLeafError as error:
            return self.problem(path, str(error))
        if node is _NO_NODE:
            return self.problem(path, f"a dict key of type {type_name(key)} has no stored form: {_KEY_FORM}")
        return node

    def problem(self, path: Path, text: str) -> None:
        """Note a value that cannot be stored."""
        self._problems.append(f"{shown(path)}: {text}")

    def raise_problems(self) -> None:
        """Raise one error that names the noted problems, at most MAX_PROBLEMS of them.

        Raises:
            UnsupportedLeafError: A value could not be stored.
        """
        if self._problems:
            more = len(self._problems) - MAX_PROBLEMS
            lines = self._problems[:MAX_PROBLEMS] + ([f"... and {more} more"] if more > 0 else [])
            raise UnsupportedLeafError(*lines)

    def enter(self, value: Any, path: Path) -> None:
        """Mark a container or object as open, until `leave`, while its children are encoded.

        Raises:
            InvalidInputError: It is open already (a cycle), or too many are; the walk ends.
        """
        if id(value) in self._open:
            raise InvalidInputError(
                f"{shown(path)}: contains itself (it is also {shown(self._open[id(value)])}); break the cycle"
            )
        if len(self._open) >= MAX_DEPTH:
            raise InvalidInputError(f"{shown(path[:8])}...: more than {MAX_DEPTH} levels deep; flatten this state")
        self._open[id(value)] = path

    def leave(self, value: Any) -> None:
        """Close a container or object that `enter` opened."""
        del self._open[id(value)]

    def _container(self, value: Any, path: Path) -> Node:
        if self._columnar and columns.may_have_columns(value):
            try:
                node, count = columns.encode(value, _leaf, _key, len(self._open) - 1)
            except columns.NotPlainError:
                return self.each(value, path)
            if count >= columns.MIN_VALUES:
                return node
            self._columnar = False  # nothing in it has so many values either
            node = self.each(value, path)
            self._columnar = True
            return node
        return self.each(value, path)

    def each(self, value: Any, path: Path, items: Items | None = None, parts: Collection[str] = ()) -> Node:
        """Return the node of a container that `enter` has opened, child by child.

        Args:
            items: Its children, if they were read before.
            parts: The keys of children that are parts of the state.
        """
        keys, nodes, mapping = [], [], is_mapping(value)
        items = items_of(value) if items is None else items
        if mapping and len(items) > MAX_ALIKE and crowded([key for key, _ in items]):
            return self.problem(path, f"{type(value).__name__} {_CROWDED}")
        for key, child in items:
            element = step(key) if mapping else key
            below = (*path, element)
            if mapping:  # a key that equals its path element is its own node
                keys.append(key if key is element else self._key_node(key, below))
            nodes.append(["part", key] if key in parts else self.node(child, below))
        if list in map(type, keys) and _ambiguous(keys):
            return self.problem(path, f"{type(value).__name__} {_AMBIGUOUS}")
        return self._tagged(value, keys, nodes, path)

    def _tagged(self, value: Any, keys: list[Node], nodes: list[Node], path: Path) -> Node:
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
        if FACTORIES.get(name) is not factory:
            self.problem(path, f"defaultdict of {factory!r} has no stored form: use dict, or one of {list(FACTORIES)}")
        return str(name)


def _check_composite(value: Any) -> None:
    """Check that a composite tensor comes back as it is."""
    if layout_of(value) is not None:
        return
    if value.requires_grad:
        raise UnsupportedLeafError(f"{type_name(value)} that requires grad has no stored form: pass tensor.detach()")
    try:
        encode_plain(composite.plain_of(value)[composite.CONTEXT])
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(
            f"{type_name(value)} has a value in its context without a stored form ({error}): pass tensor.dequantize()"
        ) from error


_NO_FORM = "has no stored form: convert it to a plain value, or wrap it in an object with state_dict/load_state_dict"


def _advice(value: Any) -> str:
    if isinstance(value, IOBase):
        return "is an open file, which has no stored form: store its bytes, as getvalue() or read() gives them"
    if isinstance(value, Iterator):
        return "is read only as a whole state: save an iterator alone"
    kind: Any = type(value)
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    if (instead := next((_INSTEAD[name] for name in names if name in _INSTEAD), None)) is not None:
        return instead
    if not objects.has_attributes_only(kind):
        return _NO_FORM
    call = f"torch.serialization.add_safe_globals([{kind.__qualname__}])"
    return f"{_NO_FORM}; or, if its attributes are plain values and tensors, allow its class: {call}"


_GENERATOR = (
    "has no stored form: save generator.{0} in its place, and after a restore {1}; RngState() saves the global "
    "generators of Python, NumPy and torch"
)
#: Class -> the advice for it. Its module may not be imported.
_INSTEAD = {
    "torch._C.Generator": _GENERATOR.format("get_state()", "call generator.set_state(value)"),
    "random.SystemRandom": "draws from the operating system, so it has no state: leave it out",
    "random.Random": _GENERATOR.format("getstate()", "call generator.setstate(value)"),
    "numpy.random._generator.Generator": _GENERATOR.format(
        "bit_generator.state", "assign generator.bit_generator.state = value"
    ),
    "numpy.random.bit_generator.BitGenerator": _GENERATOR.format("state", "assign generator.state = value"),
    "numpy.random.mtrand.RandomState": _GENERATOR.format("get_state(legacy=False)", "call generator.set_state(value)"),
    "torch.utils.data.dataloader.DataLoader": (
        "does not know its position, so it has no state: save snapstore.resumable(loader) in its place, which goes on "
        "within an epoch with the same shuffling; or leave it out"
    ),
}


_CROWDED = f"has more than {MAX_ALIKE} keys of one hash, which would take too long to read: use str as keys"


_AMBIGUOUS = "has keys or members that differ only in their class, such as an Enum's member and its value"


_KEY_FORM = "use str, int or another plain hashable value"


def type_name(value: Any) -> str:
    """Return the name of a value's type, with its module if that is not `builtins`."""
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
    return _library_node(value) if kind in classes.KNOWN_LEAVES else _torch_node(value)


def _library_node(value: Any) -> Node:
    """Return the node of a path or time."""
    if name := classes.PATH_NAMES.get(type(value)):
        return ["path", name, _text_node(str(value))]
    if type(value) is timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if type(value) is timezone:
        offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
        return ["timezone", _library_node(offset), *map(_text_node, name)]
    if type(value) is date:
        return ["date", value.isoformat()]
    zone = classes.zone_of(value)
    plain = value.replace(tzinfo=None)
    return [type(value).__name__, plain.isoformat(), value.fold, None if zone is None else _library_node(zone)]


def _class_leaf(value: Any, depth: int) -> Node:
    """Return the node of a leaf of a user's class, or _NO_NODE."""
    if isinstance(value, Enum):
        module, name, member, plain = classes.enum_form(value)
        return ["enum", module, name, member, _scalar(plain, depth)]
    if isinstance(value, str | int | float) and (form := classes.form_of(value)):
        return ["object", form.kind, form.module, form.name, _scalar(form.plain, depth)]
    return _NO_NODE


def _ambiguous(nodes: list[Node]) -> bool:
    """Return whether nodes of keys or members have plain forms that are equal, or of which too many share a hash."""
    if not any(map(_has_class, nodes)):
        return False
    plain = [decode_plain(node) for node in nodes]
    return len(set(plain)) < len(plain) or crowded(plain)


def _has_class(node: Node) -> bool:
    if type(node) is not list:
        return False
    return node[0] in ("enum", "object") or (node[0] in ("tuple", "frozenset") and any(map(_has_class, node[1])))


def _leaf(value: Any, depth: int) -> Node:
    """Return the node of a leaf in a column; see columns.py."""
    return _required(_scalar(value, depth))


def _key(value: Any, depth: int) -> Node:
    """Return the node of a dict key in a column."""
    node = _required(_hashable(value, depth))
    if _has_class(node):  # the walk looks for keys that are alike
        raise UnsupportedLeafError(_AMBIGUOUS)
    return node


def _required(node: Node) -> Node:
    if node is _NO_NODE:
        raise UnsupportedLeafError(_NO_FORM)
    return node


def pack(node: Node) -> bytes:
    """Return a node as msgpack, with its columns packed."""
    return msgspec.msgpack.encode(node, enc_hook=_packed)


def has_parameters(node: Node, packed: bytes) -> bool:
    """Return whether a tree has the forms of an optimizer's parameters in it; `packed` is the same tree."""
    return b"\xa9optimizer" in packed and _has_optimizer(node)


def _has_optimizer(node: Node) -> bool:
    """Return whether a node is, or has in it, the state of an optimizer with the forms of its parameters."""
    if type(node) is not list or not node:
        return False
    match node:
        case ["optimizer", _, _, _]:
            return True
        case ["object", _, _, _, inner, *_]:
            return _has_optimizer(inner)
        case ["list" | "tuple" | "own", list(nodes)]:
            return any(map(_has_optimizer, nodes))
        case ["deque", _, list(nodes)] | ["dict" | "odict" | "counter", _, list(nodes), *_]:
            return any(map(_has_optimizer, nodes))
        case ["defaultdict", _, _, list(nodes)]:
            return any(map(_has_optimizer, nodes))
    return False


def _packed(column: columns.Packed) -> bytes | list[Node]:
    """Return packed values; or their nodes if msgpack does not hold one of them, such as an int beyond 64 bits."""
    try:
        return msgspec.msgpack.encode(column.values)
    except (OverflowError, UnicodeEncodeError):
        return [_scalar(value, 0) for value in column.values]


def _text_node(text: str) -> Node:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return ["str", text.encode("utf-8", "surrogatepass")]
    return text


def _hashable(value: Any, depth: int) -> Node:
    """Return the node of a dict key or set member: a scalar, a value of a class, or a tuple or frozenset of these."""
    if type(value) is tuple:
        return _members("tuple", value, depth)
    node = _scalar(value, depth)
    return node if node is not _NO_NODE else _class_leaf(value, depth)


def _set_node(value: set[Any] | frozenset[Any], depth: int) -> Node:
    members = list(value)  # another thread may change it
    if crowded(members):
        raise UnsupportedLeafError(f"{type(value).__name__} {_CROWDED}")
    node = _members(type(value).__name__, members, depth)
    if _ambiguous(node[1]):
        raise UnsupportedLeafError(f"{type(value).__name__} {_AMBIGUOUS}")
    node[1].sort(key=msgspec.msgpack.encode)  # the order of a set changes from process to process
    return node


def _members(tag: str, values: Iterable[Any], depth: int) -> list[Any]:
    if depth >= MAX_DEPTH:
        raise UnsupportedLeafError(f"more than {MAX_DEPTH} levels deep; flatten this state")
    nodes = []
    for value in values:
        nodes.append(_hashable(value, depth + 1))
        if nodes[-1] is _NO_NODE:
            raise UnsupportedLeafError(f"{tag} holds a {type_name(value)}, which {_NO_FORM}")
    return [tag, nodes]


def _numpy_node(value: Any) -> Node:
    if isinstance(value, np.dtype):
        name = numpy_dtype_name(value)
        return _NO_NODE if name is None else ["npdtype", name]
    if type(value) is np.str_:
        return ["npstr", _text_node("".join(value))]  # str() strips zeros
    if type(value) is np.bytes_:
        return ["npbytes", bytes(value)]
    name = numpy_dtype_name(value.dtype)
    return ["np", name, value.tobytes()] if name is not None and type(value) is value.dtype.type else _NO_NODE


def _torch_node(value: Any) -> Node:
    torch = imported("torch")
    if torch is None:
        return _NO_NODE
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) is torch.Size:
        return ["size", list(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    return _NO_NODE


def encode_plain(value: Any) -> Node:
    """Return the node of a value without arrays and objects, such as a snapshot's metadata.

    Raises:
        UnsupportedLeafError: A value in it is not plain.
        InvalidInputError: It contains itself, or is nested too deeply.
    """
    encoder = Encoder(_refuse, lambda value, path: None)
    node = encoder.node(value, ())
    encoder.raise_problems()
    return node


def _refuse(value: Any, path: Path) -> NoReturn:
    raise UnsupportedLeafError(
        f"{type_name(value)}: only plain values of at most {INLINE_BYTES} bytes are allowed here"
    )
