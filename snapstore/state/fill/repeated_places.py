"""Repeated places: a container or object that a target has at several places can take only one value.

In: such places, each with what is stored for it. Out: the difference if the snapshot has other values for a second
place: restored one after the other, the second would replace the first. Arrays and long bytes in them are compared once
they are read. Immutable values are replaced at each place, so they are none of these.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import InvalidInputError, SnapstoreError
from ..tree.decode import ELSEWHERE
from ..tree.encode import encode_plain
from ..values.classes import view_of
from ..values.containers import CONTAINERS, Path, children, is_mapping, leaves, shown
from ..values.tensors import Slot, family, is_array
from ..walk.stateful import is_stateful
from .buffers import RestoreBuffers
from .selection import Selection

_EXACT = frozenset({type(None), bool, int, str, bytes})  # values of these are the same if they are equal


class RepeatedPlaces:
    """The places of one restore that change in place.

    Args:
        buffers: have the arrays and long bytes, once they are read.
        selection: what is restored.
        exact: whether everything is restored; else keys that only one of two values has do not count.
    """

    def __init__(self, buffers: RestoreBuffers, selection: Selection, *, exact: bool) -> None:
        self._buffers, self._selection, self._exact = buffers, selection, exact
        self._first: dict[int, tuple[Path, Any, Any]] = {}  # by id: the first place, what is stored for it, the object
        self._unread: list[tuple[Slot, Slot, str]] = []  # what is still to be read, and the error

    def note(self, stored: Any, target: Any, path: Path) -> str | None:
        """Note a place; return the difference, if the target has this container or object elsewhere too."""
        first, before, _ = self._first.setdefault(id(target), (path, stored, target))
        if first == path:
            return None
        text = (
            f"is the same {type(target).__name__} as {shown(first)} in the target, but the snapshot has different "
            "values for the two; give the target one for each"
        )
        one, other = self._selection.prune(before, first), self._selection.prune(stored, path)
        return None if self._agree(one, other, f"{shown(path)}: {text}") else text

    def check(self) -> None:
        """Compare arrays and long bytes, which are read now.

        Raises:
            InvalidInputError: two differ.
        """
        for one, other, error in self._unread:
            if not self._buffers.is_alike(one, other):
                raise InvalidInputError(error)

    def _agree(self, one: Any, other: Any, error: str) -> bool:
        """Return whether two stored values are equal, as far as this is known before arrays and long bytes are read."""
        if type(one) is Slot and type(other) is Slot:
            self._unread.append((one, other, error))
            return family(one.tag) == family(other.tag)
        if type(one) is not type(other) or type(one) not in CONTAINERS:
            return one is other or same_plain(one, other)
        here, there = ({key: child for _, key, child in children(tree)} for tree in (one, other))
        if here.keys() != there.keys() and (self._exact or not is_mapping(one)):
            return False
        return all(self._agree(here[key], there[key], error) for key in here.keys() & there.keys())


def same_plain(stored: Any, present: Any) -> bool:
    """Return whether two plain values are equal in every bit and type."""
    if type(stored) is type(present) and type(stored) in _EXACT:
        return bool(stored == present)
    if not all(type(leaf) is not Slot for _, leaf in leaves(stored, ())):
        return False  # long bytes are not read yet
    try:
        return msgspec.msgpack.encode(encode_plain(stored)) == msgspec.msgpack.encode(encode_plain(present))
    except SnapstoreError:
        return False


def is_plain(tree: Any, path: Path = ()) -> bool:
    """Return whether a tree has neither arrays nor objects, also in values of classes; long bytes are plain."""
    for below, leaf in leaves(tree, path):
        if (type(leaf) is Slot and family(leaf.tag) != "bytes") or leaf is ELSEWHERE:
            return False
        if is_array(leaf) or is_stateful(leaf):
            return False
        if (view := view_of(leaf)) is not None and not is_plain(view, below):
            return False
    return True
