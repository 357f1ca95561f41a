"""Read-only: lists and dicts in records that callers get cannot be changed.

An index hands out the records that it has cached. If a program added a name to the metrics of one, policies would
compare that, and the next revision, such as a tag, would store it for good.

In: a struct. Out: the same, with lists and dicts that refuse every change. A copy of one is a plain list or dict.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import msgspec


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError("the record of a snapshot never changes: change a copy, such as list(tags) or dict(metrics)")


def _read_only(kind: Any, changes: str) -> Any:
    """Return a subclass of list or dict whose methods named in `changes` raise TypeError."""
    methods = dict.fromkeys(changes.split(), _refuse)
    return type(f"ReadOnly{kind.__name__.title()}", (kind,), {"__slots__": (), "__reduce__": _reduce, **methods})


def _reduce(self: Any) -> tuple[Any, tuple[Any]]:
    kind: Any = type(self).__base__
    return kind, (kind(self),)  # for copy and pickle


_KINDS = {
    list: _read_only(
        list, "append clear extend insert pop remove reverse sort __setitem__ __delitem__ __iadd__ __imul__"
    ),
    dict: _read_only(dict, "clear pop popitem setdefault update __setitem__ __delitem__ __ior__"),
}


#: Most fields are empty: an index of many snapshots has one object for all of them.
_EMPTY = {kind: read_only() for kind, read_only in _KINDS.items()}


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Return (name, list or dict) of the fields of a struct that are lists or dicts by default."""
    factories = [(field.name, field.default_factory) for field in msgspec.structs.fields(struct)]
    return [(name, factory) for name, factory in factories if factory in _KINDS]


class ReadOnly:
    """A base of structs: their lists and dicts that are empty by default are read-only."""

    __slots__ = ()

    def __post_init__(self: Any) -> None:
        for name, kind in _fields(self.__class__):
            value = getattr(self, name)
            msgspec.structs.force_setattr(self, name, _KINDS[kind](value) if value else _EMPTY[kind])
