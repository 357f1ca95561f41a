"""Selection by `keys`: names, and patterns (fnmatch, case-sensitive), over dotted paths of leaves.

In: keys, and decoded trees or names of parts. Out: which leaves match, the selected part of a tree, and the parts that
must be read for it. Without keys everything is selected; a key that selects nothing is an error. A key that is a name
in the snapshot selects that name, even with `*`, `?` or `[` in it. Any other key with one of these is a pattern.

Invariants: `parts_needed` includes every part with a match. A `Selection` remembers containers by identity, so it is
for one decoded tree, which must outlive it, and for one thread. A name is looked up in a set, so more names take no
more time at a leaf. A pattern is tried once at each leaf whose path begins with the text before the pattern's first
wildcard, and contains its longest text without wildcards.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Any

from ...errors import InvalidInputError, NotFoundError
from ...text import quoted, some
from ..values.containers import CONTAINERS, Path, children, display, leaves, like, shown

_WILDCARD = re.compile(r"[*?[]")


class Selection:
    """The leaves that `keys` selects.

    A key is matched against every dotted prefix of a leaf's path, so `model` selects `model.layers.0`. Every key with a
    wildcard is a pattern until `resolve` has looked it up in a tree.
    """

    def __init__(self, keys: str | Sequence[str] | None) -> None:
        self._keys = _checked(keys)
        self._sort_keys(())
        self._selected: dict[Path, bool] = {}
        self._extents: dict[int, str] = {}

    def _sort_keys(self, exact: Collection[str]) -> None:
        """Sort the keys into names and patterns; the keys in `exact` are names, even with wildcards."""
        self._names: set[str] = set()
        self._by_start: dict[str, list[tuple[str, str]]] = {}  # the text before the first wildcard -> (literal, key)
        for key in dict.fromkeys(self._keys or ()):
            start = key if key in exact else _before_wildcard(key)
            if start == key:
                self._names.add(key)
            self._by_start.setdefault(start, []).append((_longest_literal(key), key))
        self._lengths = sorted(set(map(len, self._by_start)))

    def resolve(self, tree: Any, part_names: Iterable[str] = ()) -> None:
        """Look all keys up in a decoded tree, and check that every key selects a leaf.

        Args:
            part_names: All parts of the snapshot, for the error; the tree may lack some.

        Raises:
            NotFoundError: A key selects nothing.
        """
        if self._keys is None:
            return
        paths = [path for path, _ in leaves(tree, ())]
        wild = {key for key in self._keys if key not in self._names}
        if wild:
            lengths = sorted({len(key) for key in wild})
            starts = ((text, start) for text in map(display, paths) for start in _starts(text, lengths))
            self._sort_keys({start for text, start in starts if start in wild and _ends_at_dot(text, len(start))})
        left = dict.fromkeys(self._keys)
        for path in paths:
            found = list(self._keys_of(path))
            self._selected[path] = bool(found)
            for key in found:
                left.pop(key, None)
        if left:
            raise NotFoundError(_no_match(list(left), paths, part_names))

    def matches(self, path: Path) -> bool:
        """Return whether the leaf at `path` is selected."""
        if self._keys is None:
            return True
        if path not in self._selected:  # a path of `into`
            self._selected[path] = next(self._keys_of(path), None) is not None
        return self._selected[path]

    def _keys_of(self, path: Path) -> Iterator[str]:
        """Yield the keys that select the leaf at `path`."""
        text = display(path)
        for start in _starts(text, self._lengths):
            for key in [key for literal, key in self._by_start.get(start, ()) if literal in text]:
                if _ends_at_dot(text, len(key)) if key in self._names else _compiled(key).match(text):
                    yield key

    def extent(self, tree: Any, path: Path) -> str:
        """Return whether "all", "some" or "none" of the leaves of a decoded tree are selected."""
        if self._keys is None:
            return "all"
        if type(tree) not in CONTAINERS or not tree:
            return "all" if self.matches(path) else "none"
        if id(tree) not in self._extents:  # decoded containers live as long as their RestorePlan, at one path
            found = {self.extent(child, (*path, element)) for element, _, child in children(tree)}
            self._extents[id(tree)] = found.pop() if len(found) == 1 else "some"
        return self._extents[id(tree)]

    def prune(self, tree: Any, path: Path) -> Any:
        """Return the selected part of a decoded tree."""
        if self.extent(tree, path) == "all":
            return tree
        kept = (
            (key, self.prune(child, (*path, element)))
            for element, key, child in children(tree)
            if self.extent(child, (*path, element)) != "none"
        )
        return like(tree, kept)


def _checked(keys: str | Sequence[str] | None) -> list[str] | None:
    """Return keys as a list.

    Raises:
        InvalidInputError: They are not a list of str, or the list is empty.
    """
    if keys is None:
        return None
    if not isinstance(keys, Sequence) or not all(isinstance(key, str) for key in keys):  # a str is such a sequence too
        raise InvalidInputError(f"keys {quoted(keys)}: expected a pattern or a list of patterns")
    if not keys and not isinstance(keys, str):
        raise InvalidInputError("keys: no pattern given; leave keys out to restore everything")
    return [keys] if isinstance(keys, str) else list(keys)


def _no_match(keys: Sequence[str], paths: Sequence[Path], part_names: Iterable[str]) -> str:
    """Return the error for keys that select nothing: it names the parts, or leaves of the part that is meant."""
    parts = dict.fromkeys([*filter(None, part_names), *(shown(path[:1]) for path in paths)])
    names = some([quoted(key) for key in keys], 5)
    text = f"keys {names}: {'matches' if len(keys) == 1 else 'match'} nothing in this snapshot; "
    begun = keys[0].partition(".")[0]
    inside = [shown(path) for path in paths if shown(path[:1]) == begun]
    if inside:
        return text + f"{begun} holds {some(inside, 5)}"
    return text + (f"its parts are {some(list(parts))}" if parts else "it is empty")


def _starts(text: str, lengths: Iterable[int]) -> Iterator[str]:
    """Yield the beginnings of a text that have these lengths, which must ascend."""
    for length in lengths:
        if length > len(text):
            return
        yield text[:length]


def _ends_at_dot(text: str, length: int) -> bool:
    return text[length : length + 1] in ("", ".")


def _before_wildcard(key: str) -> str:
    wildcard = _WILDCARD.search(key)
    return key[: wildcard.start()] if wildcard else key


def _longest_literal(key: str) -> str:
    """Return a text that every match of a pattern contains: a search for it takes a tenth of the time of a match."""
    return max(re.split("[*?]", key.partition("[")[0]), key=len)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern that matches a dotted path, or a prefix of it that ends before a dot."""
    return re.compile(translate(pattern).removesuffix(r"\Z").removesuffix(r"\z") + r"(?=\.|\Z)")


def parts_needed(part_names: Iterable[str], keys: str | Sequence[str] | None) -> list[str]:
    """Return the parts that may have leaves that `keys` selects; the part "" is always included: it has the root."""
    listed = _checked(keys)
    return [name for name in part_names if not name or listed is None or any(_may_match(key, name) for key in listed)]


def _may_match(key: str, name: str) -> bool:
    literal = _before_wildcard(key)
    if literal == key and (name + ".").startswith(key + "."):
        return True
    return literal.startswith(name + ".") or (literal != key and (name + ".").startswith(literal))
