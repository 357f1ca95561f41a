"""Nested containers and the paths in them: how every walk over a state steps, compares and rebuilds.

In: a supported container. Out: its children with their path elements, a container like it, or the leaves below it. The
types are compared exactly, a subclass is no container: it may hold what its type does not say. Path elements are what
manifests store, so `step` is part of the format. Stateless: any thread may use it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ..errors import InvalidInputError

Path = tuple[str | int, ...]

MAX_DEPTH = 200  # of containers in one another
#: Keys of one dict, or members of one set, that may share a hash: each is compared with all of them, so their number
#: squared is time. Of str and bytes the hash is salted; of all numbers that a float can be at most 35 share one, of the
#: powers of two up to 2**15000 at most 246.
MAX_ALIKE = 256
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1  # what a node or a path element holds as an int

_MAPPINGS = frozenset({dict, OrderedDict, Counter, defaultdict})
_SEQUENCES = frozenset({list, tuple, deque})
CONTAINERS = _MAPPINGS | _SEQUENCES


def display(path: Iterable[str | int]) -> str:
    """Join a path with dots, for people; dots in keys make this ambiguous, so nothing is looked up by it."""
    return ".".join(map(str, path))


def shown(path: Iterable[str | int]) -> str:
    """Return the dotted path for a message, where the root needs a name too."""
    return display(path) or "(root)"


def step(key: Any) -> str | int:
    """Return the path element of a dict key: str and 64-bit int as they are, anything else as text."""
    if type(key) is int:
        return key if INT_MIN <= key <= INT_MAX else hex(key)  # repr() of a huge int raises
    text = key if type(key) is str else _text(key)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _text(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # a tuple that holds an int of more than 4,300 digits
        return f"<{type(key).__name__}>"


def children(container: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """Yield (path element, key or position, child) of a supported container."""
    if type(container) in _MAPPINGS:
        for key, child in container.items():
            yield step(key), key, child
    else:
        for i, child in enumerate(container):
            yield i, i, child


def is_mapping(value: Any) -> bool:
    """Whether `value` is exactly one of the supported dict types."""
    return type(value) in _MAPPINGS


def crowded(keys: Collection[Any]) -> bool:
    """Whether more than MAX_ALIKE of these keys or members share a hash; those that are equal count too.

    Raises:
        TypeError: One cannot be hashed.
    """
    if len(keys) <= MAX_ALIKE or all(type(key) is str for key in keys):
        return False
    return max(Counter(map(hash, keys)).values()) > MAX_ALIKE  # hashes as keys: no more than nine of them collide


def like(container: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a new container of the same type, factory, maxlen and `_metadata` that holds `items` (key, child)."""
    kind: Any = type(container)
    if kind in _MAPPINGS:
        new: Any = defaultdict(container.default_factory) if kind is defaultdict else kind()
        for key, child in items:  # not update(): Counter's adds
            new[key] = child
        if kind is OrderedDict and "_metadata" in vars(container):
            new._metadata = container._metadata
        return new
    values = (child for _, child in items)
    return deque(values, container.maxlen) if kind is deque else kind(values)


def leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf); an empty container is a leaf too."""
    if type(tree) not in CONTAINERS or not tree:
        yield path, tree
        return
    if len(path) >= MAX_DEPTH:
        raise InvalidInputError(f"{shown(path[:8])}...: more than {MAX_DEPTH} levels deep, or contains itself")
    for element, _, child in children(tree):
        yield from leaves(child, (*path, element))
