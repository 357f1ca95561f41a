"""Selection by `keys`: patterns (fnmatch, case-sensitive) over dotted paths of leaves.

In: patterns, and decoded trees or names of parts. Out: which leaves match, the selected part of a tree, and the parts
that must be read for it. Without patterns everything is selected; a pattern that selects nothing is an error.

Invariants: `parts_needed` includes every part with a match. A `Selection` remembers containers by identity, so it is
for one decoded tree, which must outlive it, and for one thread.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from typing import Any

from ..errors import InvalidInputError, NotFoundError
from .containers import CONTAINERS, Path, children, display, leaves, like, shown


class Selection:
    """The leaves that `keys` selects.

    A pattern is matched against every dotted prefix of a leaf's path, so `model` selects `model.layers.0`.
    """

    def __init__(self, keys: str | Sequence[str] | None) -> None:
        listed = isinstance(keys, Sequence) and all(isinstance(key, str) for key in keys)
        if keys is not None and not listed:  # a str is a sequence of str too
            raise InvalidInputError(f"keys {keys!r}: expected a pattern or a list of patterns")
        self.patterns = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
        if self.patterns is not None and not self.patterns:
            raise InvalidInputError("keys: no pattern given; leave keys out to restore everything")
        self._extents: dict[int, str] = {}

    def matches(self, path: Path) -> bool:
        """Return whether the leaf at `path` is selected."""
        return self.patterns is None or any(_pattern_matches(pattern, path) for pattern in self.patterns)

    def extent(self, tree: Any, path: Path) -> str:
        """Return whether "all", "some" or "none" of the leaves of a decoded tree are selected."""
        if self.patterns is None:
            return "all"
        if type(tree) not in CONTAINERS or not tree:
            return "all" if self.matches(path) else "none"
        if id(tree) not in self._extents:  # decoded containers live as long as their RestorePlan, at one path
            found = {self.extent(child, (*path, element)) for element, _, child in children(tree)}
            self._extents[id(tree)] = found.pop() if len(found) == 1 else "some"
        return self._extents[id(tree)]

    def require_matches(self, tree: Any) -> None:
        """Check that every pattern selects a leaf.

        Raises:
            NotFoundError: A pattern selects nothing.
        """
        left = dict.fromkeys(self.patterns or ())
        for path, _ in leaves(tree, ()) if left else ():
            for pattern in [pattern for pattern in left if _pattern_matches(pattern, path)]:
                del left[pattern]
            if not left:
                return
        for pattern in left:
            some = ", ".join(shown(path) for path, _ in itertools.islice(leaves(tree, ()), 5))
            raise NotFoundError(f"keys {pattern!r}: matches nothing in this snapshot, which holds e.g. {some}")

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


def _pattern_matches(pattern: str, path: Path) -> bool:
    return _compiled(pattern).match(display(path)) is not None


@functools.lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern that matches a dotted path, or a prefix of it that ends before a dot."""
    return re.compile(translate(pattern).removesuffix(r"\Z").removesuffix(r"\z") + r"(?=\.|\Z)")


def parts_needed(part_names: Iterable[str], keys: str | Sequence[str] | None) -> list[str]:
    """Return the parts that may have leaves that `keys` selects; always "", which has the root."""
    patterns = Selection(keys).patterns
    return [name for name in part_names if not name or patterns is None or any(_may_match(p, name) for p in patterns)]


def _may_match(pattern: str, name: str) -> bool:
    literal = pattern[: next((i for i, letter in enumerate(pattern) if letter in "*?["), len(pattern))]
    if literal == pattern and (name + ".").startswith(pattern + "."):
        return True
    return literal.startswith(name + ".") or (literal != pattern and (name + ".").startswith(literal))
