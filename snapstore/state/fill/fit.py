"""Fit: which values of a snapshot a restore takes, under which names, and whether all of them must fit.

In: the arguments `keys`, `part`, `rename` and `strict`, and the parts of a snapshot. Out: the tree to restore, and
which of its values are selected. With `part`, the value of one part stands for the whole state. `rename` changes the
names in the tree, so all later steps, `keys` included, see the new names.

A name is a key of a dict, with the dots that are in it, as state_dict() has it. Fields of values that are made of a
class are not renamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from ...errors import InvalidInputError, NotFoundError
from ...text import counted, quoted, some
from ..tree.decode import Decoded, decode, part_names
from ..values.containers import CONTAINERS, children, is_mapping, like, shown
from ..values.tensors import StoredPart
from .selection import Selection

Rename = Mapping[str, str] | Callable[[str], str]
#: A line of the log names at most so many names.
NAMES_SHOWN = 5


@dataclass
class Mismatches:
    """The names that a restore with `strict=Mismatches()` left out; each restore fills it again.

    Attributes:
        missing: dotted paths that the target has and the snapshot lacks; they kept their values.
        unexpected: dotted paths that the snapshot has and the target lacks; they were not read.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all names."""
        self.missing.clear()
        self.unexpected.clear()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected)

    def __str__(self) -> str:
        texts = [
            f"{counted(len(names), 'name')} {what} ({some(names, NAMES_SHOWN)})"
            for names, what in ((self.missing, "missing in the snapshot"), (self.unexpected, "missing in the target"))
            if names
        ]
        return ", ".join(texts) or "nothing is missing"


class NameOptions(TypedDict, total=False):
    """`part` and `rename` of a restore; see `Repository.restore`."""

    part: str | None
    rename: Rename | None


class FitOptions(NameOptions, total=False):
    """`part`, `rename` and `strict` of a restore into a target; see `Repository.restore_into`."""

    strict: bool | Mismatches


@dataclass(frozen=True)
class Fit:
    """The values that a restore takes.

    Attributes:
        keys: which of them, by their new names; None: all.
        part: the top-level key whose value stands for the whole state; None: there is none.
        rename: old names to new ones, or a function that returns the new name of each; None: names stay.
        strict: whether the target must have the same names; or where the differences are noted.

    Raises:
        InvalidInputError: an argument is of another type.
    """

    keys: str | Sequence[str] | None = None
    part: str | None = None
    rename: Rename | None = None
    strict: bool | Mismatches = True

    def __post_init__(self) -> None:
        if self.part is not None and not isinstance(self.part, str):
            raise InvalidInputError(
                f"part {quoted(self.part)}: expected the name of one, got {type(self.part).__name__}"
            )
        if not isinstance(self.strict, bool | Mismatches):
            raise InvalidInputError(f"strict {quoted(self.strict)}: expected True, False or Mismatches()")
        names = [*self.rename, *self.rename.values()] if isinstance(self.rename, Mapping) else []
        if not all(isinstance(name, str) for name in names):
            raise InvalidInputError("rename: expected a mapping of str to str, got other types in it")
        if self.rename is not None and not isinstance(self.rename, Mapping) and not callable(self.rename):
            raise InvalidInputError(
                f"rename {quoted(self.rename)}: expected a mapping of old to new names, or a function"
            )

    @classmethod
    def of(cls, keys: str | Sequence[str] | Fit | None) -> Fit:
        """Return keys as a Fit."""
        return keys if isinstance(keys, Fit) else cls(keys)

    @property
    def parts_keys(self) -> str | Sequence[str] | None:
        """Keys that select the parts to read; None: all."""
        if self.part is not None:
            return [self.part]
        return self.keys if self.rename is None else None

    def decode(self, parts: Sequence[StoredPart], decoded: Decoded) -> tuple[Any, Selection]:
        """Return the tree that a restore takes of a snapshot's parts, with the new names, and its selection by `keys`.

        Args:
            parts: all of them, or at least what `parts_keys` selects.

        Raises:
            NotFoundError: there is no such part, or a name of `rename` is nowhere; or a key selects nothing.
            InvalidInputError: two names become one.
            FormatError: `flatten` cannot have made these trees.
        """
        selection = Selection(self.keys)
        tree = decode(parts, partial=self.parts_keys is not None, decoded=decoded)
        names = part_names(parts)
        if self.part is not None:
            items = list(children(tree)) if is_mapping(tree) else []
            found = {str(element): child for element, _, child in items}
            found |= {key: child for _, key, child in items}  # a key 5 is "5", unless there is a "5"
            if self.part not in found:
                there = list(dict.fromkeys([*names, *(str(element) for element, _, _ in items)]))
                raise NotFoundError(
                    f"part {quoted(self.part)}: not in this snapshot; its parts are {some(there) or 'none'}"
                )
            tree, names = found[self.part], []
        if self.rename is not None:
            new_names = _Names(self.rename)
            _rename(tree, (), new_names, decoded.makers)
            new_names.require_used()
        selection.resolve(tree, names)
        return tree, selection


class _Names:
    """Old names to new ones. A name of a mapping that ends with a dot is a prefix."""

    def __init__(self, rename: Rename) -> None:
        self._rename = rename
        self._unused = dict.fromkeys(rename) if isinstance(rename, Mapping) else {}

    def of(self, name: str) -> str:
        """Return the new name. Each prefix is replaced at most once, then also one that the new name begins with.

        Raises:
            InvalidInputError: the function returns no str.
        """
        if not isinstance(self._rename, Mapping):
            new = self._rename(name)
            if not isinstance(new, str):
                raise InvalidInputError(f"rename: returned {type(new).__name__} for {name!r}, expected a str")
            return new
        if name in self._rename and not name.endswith("."):
            self._unused.pop(name, None)
            return self._rename[name]
        left = {old: new for old, new in self._rename.items() if old.endswith(".")}
        while old := max((old for old in left if name.startswith(old)), key=len, default=None):
            self._unused.pop(old, None)
            name = left.pop(old) + name.removeprefix(old)
        return name

    def of_module(self, path: str) -> str:
        """Return the new path of a module, as torch's `_metadata` has it."""
        if not isinstance(self._rename, Mapping):
            return path
        return self.of(f"{path}.").removesuffix(".") if path else path

    def require_used(self) -> None:
        """Check that each name of a mapping was there.

        Raises:
            NotFoundError: one was not.
        """
        if self._unused:
            names = some([repr(name) for name in self._unused], NAMES_SHOWN)
            raise NotFoundError(
                f"rename: {names} not among the names of this snapshot; a name is a key of a dict, as state_dict() has "
                "it, and one that ends with a dot is a prefix of such keys"
            )


def _rename(tree: Any, path: tuple[Any, ...], names: _Names, makers: Container[int]) -> None:
    """Rename the keys of all dicts of a tree, in place."""
    if type(tree) not in CONTAINERS:
        return
    for element, _, child in children(tree):
        _rename(child, (*path, element), names, makers)
    if not is_mapping(tree) or id(tree) in makers:
        return
    new = {key: names.of(key) if type(key) is str else key for key in tree}
    if all(key == name for key, name in new.items()):
        return
    if len(set(new.values())) < len(new):
        name = next(name for name, count in Counter(new.values()).items() if count > 1)
        raise InvalidInputError(f"rename: two names in {shown(path)} would become {name!r}")
    items = list(tree.items())
    tree.clear()
    for key, child in items:
        tree[new[key]] = child
    about: Any = getattr(tree, "_metadata", None)
    if is_mapping(about):
        modules = ((names.of_module(key) if type(key) is str else key, version) for key, version in about.items())
        tree._metadata = like(about, modules)
