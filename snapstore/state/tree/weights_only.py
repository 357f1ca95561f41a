"""The form of a state that `torch.load(weights_only=True)` reads: tensors, and the plain types that torch allows.

In: a restored state. Out: the same state in these types, and the values that changed their type; or an error that
names values without such a form. One rule for each value, the first that fits:

| value                                       | written as                                                         |
|---------------------------------------------|--------------------------------------------------------------------|
| a type that torch allows, a sparse tensor   | itself                                                             |
| numpy.ndarray of numbers                    | torch.Tensor in native byte order, in the same memory if possible  |
| numpy.ndarray of strings or times           | list of its elements, nested by its shape                          |
| NumPy number or bool                        | Python's number or bool                                            |
| a subclass of a plain type or container     | that type; a deque is a list, and a frozenset a set                |
| a dict key or set member that is a frozenset | tuple of its members, sorted by their text                        |
| int of more than 255 bytes                  | str of its hexadecimal digits: `int(text, 16)` reads it            |
| argparse.Namespace, types.SimpleNamespace   | dict of its attributes                                             |
| an object of objects.py, or composite tensor | dict of its attributes, or of the tensors in it and its context   |
| DictConfig, ListConfig                      | dict, list; interpolations are not resolved                        |
| any other value that has a text (`str`)     | str: a time, a path, a numpy.dtype                                 |

Invariants: a value that keeps its type is equal to the bit. The given state is not changed. Nothing is lost silently:
two keys that become one are an error.
"""

from __future__ import annotations

import codecs
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from ...errors import UnsupportedLeafError
from ...text import some
from ..values.arrays import memory_key
from ..values.classes import is_namespace, view_of
from ..values.composite import core_of
from ..values.configs import is_config, plain_of
from ..values.containers import Path, shown, step
from ..values.objects import is_allowed
from ..values.torch_layouts import layout_of
from .encode import type_name

#: torch's unpickler reads ints up to this size [bytes].
MAX_INT_BYTES = 255
#: Longer bytes become a tensor: pickle holds at most 4 GiB of text, and a byte takes up to two there.
MAX_BYTES = 2**31 - 1
#: One error names at most so many values.
PROBLEMS_NAMED = 20

_ALLOWED = frozenset({type(None), bool, float, complex, str})
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (complex, complex),
    (str, str.__str__),
    (bytes, bytes),
    (bytearray, bytearray),
)


class Changed(NamedTuple):
    """A value that is written as another type."""

    path: str
    was: str
    written_as: str


class _EmptyBytes:
    """Is read back as b"", which pickle writes as a call that torch refuses."""

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


def to_weights_only(state: Any) -> tuple[Any, list[Changed]]:
    """Return a state in types that `torch.load(weights_only=True)` reads, and which values changed their type.

    Raises:
        UnsupportedLeafError: values have no such form; up to 20 are named.
    """
    converter = _Converter()
    converted = converter.value(state, ())
    if converter.problems:
        raise UnsupportedLeafError(some(converter.problems, PROBLEMS_NAMED))
    return converted, converter.changed


class _Converter:
    """Converts one state."""

    def __init__(self) -> None:
        import torch

        self.changed: list[Changed] = []
        self.problems: list[str] = []
        self._allowed = _ALLOWED | {torch.Tensor, torch.nn.Parameter, torch.dtype, torch.Size, torch.device}
        self._tensors: dict[Any, Any] = {}  # memory -> tensor, so that tied arrays stay tied

    def value(self, value: Any, path: Path) -> Any:
        """Return a value in types that torch allows; note a problem if it has no such form."""
        kind = type(value)
        if kind in self._allowed or layout_of(value) is not None:
            return value
        if core_of(value) is not None or is_allowed(kind) or is_namespace(value):
            return self._change(path, value, self._mapping(view_of(value), path))
        if is_config(value):
            return self._change(path, value, self.value(plain_of(value), path))
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, Set):
            return self._set(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
            form = tuple if isinstance(value, tuple) else list
            new = form(self.value(child, (*path, i)) for i, child in enumerate(value))
            return new if kind is form else self._change(path, value, new)
        return self._leaf(value, path)

    def _leaf(self, value: Any, path: Path) -> Any:
        kind: Any = type(value)
        if isinstance(value, np.generic) and _is_number(value.dtype):
            return self._change(path, value, value.item())
        new = next((to_base(value) for base, to_base in _BASES if isinstance(value, base)), None)
        if type(new) is int and new.bit_length() // 8 >= MAX_INT_BYTES:
            new = hex(new)
        elif type(new) is bytes and not new:
            return _EmptyBytes()
        elif isinstance(new, (bytes, bytearray)) and len(new) > MAX_BYTES:
            return self._change(path, value, self._tensor(np.frombuffer(new, np.uint8)))
        elif new is None and kind.__str__ is not object.__str__:
            new = str(value)
        if new is None:
            self.problems.append(f"{shown(path)} ({type_name(value)})")
        return new if type(new) is kind else self._change(path, value, new)

    def _array(self, value: np.ndarray[Any, Any], path: Path) -> Any:
        if not _is_number(value.dtype):
            told = len(self.changed)
            new = self.value(_nested(value), path)
            del self.changed[told:]
            return self._change(path, value, new)
        return self._change(path, value, self._tensor(value))

    def _tensor(self, value: np.ndarray[Any, Any]) -> Any:
        import torch

        key = memory_key(value) or id(value)
        if key not in self._tensors:
            native = value.astype(value.dtype.newbyteorder("="), copy=not value.flags.writeable)
            self._tensors[key] = torch.from_numpy(native)
        return self._tensors[key]

    def _mapping(self, value: Mapping[Any, Any], path: Path) -> Any:
        kind = type(value)
        form: Any = kind if kind in (OrderedDict, Counter) else dict
        new = form()
        for key, child in value.items():
            below = (*path, step(key))
            converted = self._key(key, below)
            if converted in new:
                self.problems.append(f"{shown(below)} (a key that would equal another one)")
            new[converted] = self.value(child, below)
        if kind is OrderedDict and "_metadata" in vars(value):
            new._metadata = self.value(vars(value)["_metadata"], (*path, "_metadata"))
        return new if kind is form else self._change(path, value, new)

    def _set(self, value: Set[Any], path: Path) -> Any:
        new = {self._key(member, path) for member in value}
        if len(new) < len(value):
            self.problems.append(f"{shown(path)} (a member that would equal another one)")
        return new if type(value) is set else self._change(path, value, new)

    def _key(self, key: Hashable, path: Path) -> Any:
        """Return a dict key or set member, which must stay hashable."""
        if isinstance(key, frozenset):
            return self._change(path, key, tuple(sorted((self._key(member, path) for member in key), key=repr)))
        if type(key) is tuple:
            return tuple(self._key(member, path) for member in key)
        return self.value(key, path)

    def _change(self, path: Path, value: Any, new: Any) -> Any:
        self.changed.append(Changed(shown(path), type_name(value), type(new).__name__))
        return new


def _is_number(dtype: np.dtype[Any]) -> bool:
    """Return whether Python and torch have such numbers; longdouble is one of NumPy's own."""
    return dtype.kind in "biufc" and dtype.char not in "gG"


def _nested(array: Any) -> Any:
    """Return the elements of an array as lists of NumPy scalars, nested by its shape."""
    if not isinstance(array, np.ndarray):
        return array
    return [_nested(row) for row in array] if array.ndim else array[()]
