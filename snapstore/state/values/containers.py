"""Nested containers and the paths in them: how each walk over a state finds children, and rebuilds containers.

In: a supported container. Out: its children with their path elements, a container like it, or the leaves below it.
Types are compared exactly: a subclass is not a container, since it may have state that its type does not show. Path
elements are stored in manifests, so `step` is part of the format. Stateless: any thread may use it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ...errors import InvalidInputError

Path = tuple[str | int, ...]
Items = list[tuple[Any, Any]]  # (key or position, child) of a container

MAX_DEPTH = 200  # of nested containers
#: The most keys of one dict, or members of one set, that may share a hash: each is compared with all others, so the
#: time grows with the square of their number. Hashes of str and bytes are salted. At most 35 floats share a hash, and
#: at most 246 of the powers of two up to 2**15000.
MAX_ALIKE = 256
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1  # the ints that a node or a path element can be

_MAPPINGS = frozenset({dict, OrderedDict, Counter, defaultdict})
_SEQUENCES = frozenset({list, tuple, deque})
CONTAINERS = _MAPPINGS | _SEQUENCES


def has(value: Any, *names: str) -> bool:
    """Return whether a value has all these attributes; one whose look-up raises any error is missing."""
    try:
        return all(hasattr(value, name) for name in names)
    except Exception:  # noqa: BLE001  a __getattr__ of the caller's class, such as one that looks into a dict
        return False


def expect(value: Any, kind: type) -> Any:
    """Return a value from a store, whose type must be exactly this one; raise TypeError if it is another."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def display(path: Iterable[str | int]) -> str:
    """Return a path joined with dots. It is ambiguous: with dots in keys, two paths may give one text."""
    return ".".join(map(str, path))


def shown(path: Iterable[str | int]) -> str:
    """Return the dotted path for a message, or "(root)"."""
    return display(path) or "(root)"


def step(key: Any) -> str | int:
    """Return the path element of a dict key: str and 64-bit int unchanged, anything else as text."""
    if type(key) is int:
        return key if INT_MIN <= key <= INT_MAX else hex(key)  # repr() of a huge int raises
    text = key if type(key) is str else _text(key)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _text(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # a tuple with an int of more than 4,300 digits
        return f"<{type(key).__name__}>"


def at_once(*iterables: Iterable[Any]) -> list[list[Any]]:
    """Return the lists of some iterables over containers, all as they are at one moment.

    It is one call of C code, during which no other thread can change the containers.
    """
    return list(map(list, iterables))


def items_of(container: Any) -> Items:
    """Return (key or position, child) of a supported container, as it is at one moment; see `at_once`."""
    if type(container) in _MAPPINGS:
        return list(container.items())
    return list(enumerate(list(container)))


def children(container: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """Yield (path element, key or position, child) of a supported container, as it is before the first one."""
    mapping = type(container) in _MAPPINGS
    for key, child in items_of(container):
        yield step(key) if mapping else key, key, child


def is_mapping(value: Any) -> bool:
    """Return whether the type of `value` is one of the supported dict types."""
    return type(value) in _MAPPINGS


def metadata_of(container: Any) -> Any:
    """Return the `_metadata` of an OrderedDict, which torch's state dicts have; None: there is none."""
    return vars(container).get("_metadata") if type(container) is OrderedDict else None


def crowded(keys: Collection[Any]) -> bool:
    """Return whether more than MAX_ALIKE of these keys or members share a hash; equal ones are counted each.

    Raises:
        TypeError: One cannot be hashed.
    """
    if len(keys) <= MAX_ALIKE or set(map(type, keys)) == {str}:
        return False
    return max(Counter(map(hash, keys)).values()) > MAX_ALIKE  # its keys are 64-bit ints: at most nine share a hash


def like(container: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a new container of the same type, factory, maxlen and `_metadata` with `items` (key, child)."""
    kind: Any = type(container)
    if kind in _MAPPINGS:
        new: Any = defaultdict(container.default_factory) if kind is defaultdict else kind()
        for key, child in items:  # not update(), which adds counts in a Counter
            new[key] = child
        if (metadata := metadata_of(container)) is not None:
            new._metadata = metadata
        return new
    values = (child for _, child in items)
    return deque(values, container.maxlen) if kind is deque else kind(values)


def leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) of a tree; an empty container is a leaf too.

    Raises:
        InvalidInputError: it is more than MAX_DEPTH levels deep, or contains itself.
    """
    if type(tree) not in CONTAINERS or not tree:
        yield path, tree
        return
    if len(path) >= MAX_DEPTH:
        raise InvalidInputError(f"{shown(path[:8])}...: more than {MAX_DEPTH} levels deep, or contains itself")
    for element, _, child in children(tree):
        yield from leaves(child, (*path, element))
