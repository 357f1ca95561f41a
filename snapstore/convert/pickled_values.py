"""Plain values in place of objects that files of torch often hold; none of their classes' code runs.

In: the names that a pickle calls. Out: makers of ours that `torch.load(weights_only=True)` calls under these names, and
then the state, in which plain values replace what they made.

| in the file                                    | in the state                                                   |
|------------------------------------------------|----------------------------------------------------------------|
| NumPy array, scalar or dtype                   | itself; refused: of objects, structured, subclasses            |
| argparse.Namespace, types.SimpleNamespace      | itself                                                         |
| path of pathlib; date, time, timedelta of datetime | itself; a path of another system is a pure one             |
| defaultdict of a builtin type, deque, frozenset | itself                                                        |
| DictConfig, ListConfig of OmegaConf            | dict, list; interpolations are not resolved; a class: its name |
| random.Random, numpy.random.Generator, RandomState | its state, as `getstate()`, `bit_generator.state` return it |
| AttributeDict of Lightning                     | dict                                                           |

Invariants: a maker takes no more memory than its arguments have, and imports nothing. NumPy's own `__setstate__` is
never called: it trusts its argument.
"""

from __future__ import annotations

import argparse
import math
import re
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta, timezone
from functools import partial
from typing import Any

import numpy as np

from ..errors import InvalidInputError
from ..state.tree.form import FACTORIES
from ..state.values.classes import make_path
from ..state.values.containers import MAX_DEPTH
from ..state.values.tensors import MAX_DIMENSIONS

#: A dtype of one number, text or time, as NumPy pickles it.
_DTYPE = re.compile(r"[?biufcSUVmM]\d{1,9}")
#: torch keeps the names that may be made for all threads.
_LOAD = threading.Lock()


class _Record:
    """The arguments with which a pickle makes an object of a class, and the state that it sets."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Record):
    """A NumPy array."""


class _Dtype(_Record):
    """A dtype of NumPy."""


class _Namespace(_Record):
    """An argparse.Namespace."""


class _SimpleNamespace(_Record):
    """A types.SimpleNamespace."""


class _ConfigNode(_Record):
    """A config of OmegaConf, or a value in it."""


class _ConfigAbout(_Record):
    """The types and flags of a node of OmegaConf."""


class _Random(_Record):
    """A random.Random."""


class _BitGenerator(_Record):
    """A generator of bits of NumPy, or the seeds of one."""


class _Generator(_Record):
    """A numpy.random.Generator or RandomState."""


class _DictOfLightning:
    """A subclass of dict without attributes of its own."""

    def __new__(cls) -> Any:
        return {}


_BUILTINS = ("dict", "list", "tuple", "set", "str", "int", "float", "bool", "bytes", "object", "type")
_TYPING = ("Any", "Union", "Optional", "Dict", "List", "Tuple")
_NODES = ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path", "InterpolationResult")
_CONFIGS = (
    *("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig", "omegaconf.base.UnionNode"),
    *(f"omegaconf.nodes.{name}Node" for name in _NODES),
)
_BIT_GENERATORS = {
    "MT19937": "_mt19937",
    "PCG64": "_pcg64",
    "PCG64DXSM": "_pcg64",
    "Philox": "_philox",
    "SFC64": "_sfc64",
}
_LIGHTNING = ("lightning.fabric", "lightning_fabric", "lightning.pytorch", "pytorch_lightning")
#: By name: what is made in place of it.
_RECORDS: dict[str, type] = {
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "argparse.Namespace": _Namespace,
    "types.SimpleNamespace": _SimpleNamespace,
    "random.Random": _Random,
    **{name: type(name, (_ConfigNode,), {}) for name in _CONFIGS},
    "omegaconf.base.Metadata": _ConfigAbout,
    "omegaconf.base.ContainerMetadata": _ConfigAbout,
    "numpy.random.bit_generator.SeedSequence": _BitGenerator,
    **{
        f"{module}.utilities.{name}.AttributeDict": _DictOfLightning
        for module in _LIGHTNING
        for name in ("data", "parsing")
    },
}
#: Classes of which objects are made as they are: no argument makes them run code, or take more memory than it has.
_AS_THEY_ARE: dict[str, Any] = {
    f"datetime.{kind.__name__}": kind for kind in (date, datetime, time, timedelta, timezone)
}
_AS_THEY_ARE["builtins.frozenset"] = frozenset
_PATHS = {
    **{"PosixPath": "posix", "WindowsPath": "windows"},
    **{"PurePosixPath": "pure posix", "PureWindowsPath": "pure windows"},
}
#: The names of types that a pickle may name, but not call.
_TYPES = (
    *(f"builtins.{name}" for name in _BUILTINS),
    *(f"typing.{name}" for name in _TYPING),
    *(f"numpy.random.{module}.{name}" for name, module in _BIT_GENERATORS.items()),
)


def refused(where: str, name: str) -> InvalidInputError:
    """Return the error for a file with an object of another class."""
    return InvalidInputError(
        f"{where}: refused: it holds a Python object ({name}), which could run any code when loaded; save plain "
        "state instead, such as torch.save(model.state_dict(), ...), or use the Python interface"
    )


class PlainValues:
    """The makers for one file.

    Args:
        where: the name of the file in errors.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._made: dict[int, tuple[Any, Callable[[Any], Any]]] = {}  # by id: a container, and what it stands for
        self._done: dict[int, tuple[Any, Any]] = {}  # by id: a value that was met, and its plain value
        self._makers = self._all_makers()
        self._is_used = False

    @contextmanager
    def loading(self, names: set[str]) -> Iterator[None]:
        """Let `torch.load` call the makers in the block, if they replace one of these names.

        A name that the program has passed to `torch.serialization.add_safe_globals` is not replaced.
        """
        import torch

        if names.isdisjoint(self._makers):
            yield
            return
        self._is_used = True
        with _LOAD:
            own = (one if type(one) is tuple else (one, None) for one in torch.serialization.get_safe_globals())
            allowed = {name or f"{made.__module__}.{getattr(made, '__qualname__', '')}" for made, name in own}
            makers = [(maker, name) for name, maker in self._makers.items() if name not in allowed]
            # torch sets the state of objects of allowed classes only; a function may have made them
            kinds = [(kind, f"{__name__}.{kind.__name__}") for kind in {*_RECORDS.values(), _Generator, _BitGenerator}]
            with torch.serialization.safe_globals([*makers, *kinds]):
                yield

    def _all_makers(self) -> dict[str, Any]:
        made: dict[str, Any] = {**_RECORDS, **_AS_THEY_ARE}
        made |= {name: self._type(name) for name in _TYPES}
        for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            made |= {f"{module}._reconstruct": self._reconstruct, f"{module}.scalar": self._scalar}
        for module in ("pathlib", "pathlib._local"):
            made |= {f"{module}.{name}": partial(_path, kind) for name, kind in _PATHS.items()}
        made |= {"collections.defaultdict": self._defaultdict, "collections.deque": self._deque}
        for name in ("bit_generator", "generator", "randomstate"):
            kind = _BitGenerator if name == "bit_generator" else _Generator
            made[f"numpy.random._pickle.__{name}_ctor"] = partial(_first, kind)
        made["numpy.random.bit_generator.__pyx_unpickle_SeedSequence"] = partial(_first, _BitGenerator)
        return made

    def _type(self, name: str) -> type:
        def no_object(_: type, *args: Any) -> Any:
            if name == "builtins.bytes" and not args:  # so pickle writes b""
                return b""
            raise refused(self._where, name)

        return type(name.rpartition(".")[2], (), {"__new__": no_object, "__module__": name.rpartition(".")[0]})

    def _reconstruct(self, kind: Any, *_: Any) -> _Array:
        if kind is not _Array:
            raise refused(self._where, f"numpy.{getattr(kind, '__name__', kind)}")
        return _Array()

    def _scalar(self, dtype: Any, data: Any = None) -> Any:
        return self._from_bytes((), self._dtype(dtype), data, "C")[()]

    def _defaultdict(self, factory: Any = None) -> dict[Any, Any]:
        name = getattr(factory, "__name__", "")
        if factory is not None and (name not in FACTORIES or factory.__module__ != "builtins"):
            raise refused(self._where, f"collections.defaultdict of {name or type(factory).__name__}")
        empty: dict[Any, Any] = {}
        self._made[id(empty)] = empty, lambda items: defaultdict(FACTORIES.get(name), items)
        return empty

    def _deque(self, items: Any = (), most: Any = None) -> list[Any]:
        found = list(items)
        self._made[id(found)] = found, lambda values: deque(values, most)
        return found

    # --- what replaces the records ---

    def state(self, state: Any) -> Any:
        """Return a state with plain values; containers are changed in place.

        Raises:
            InvalidInputError: an array or a dtype is of another kind than those above, or has a wrong size.
        """
        return self._plain(state, 0) if self._is_used else state

    def _plain(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is type and issubclass(value, _ConfigNode):  # Lightning stores the class of hyperparameters beside them
            return value.__name__
        if kind not in (dict, OrderedDict, Counter, list, tuple) and not isinstance(value, _Record):
            return value
        if id(value) in self._done or depth > 2 * MAX_DEPTH:  # a save refuses a state that is so deep
            return self._done.get(id(value), (value, value))[1]
        if isinstance(value, _Record):
            return self._of_record(value, depth)
        self._done[id(value)] = value, value
        if kind is tuple:
            found = tuple(self._plain(child, depth + 1) for child in value)
            if any(new is not old for new, old in zip(found, value, strict=True)):
                self._done[id(value)] = value, found
            return self._done[id(value)][1]
        for key in range(len(value)) if kind is list else list(value):
            if isinstance(key, _Record):
                raise refused(self._where, f"{type(key).__name__.strip('_').lower()} as the key of a dict")
            if (new := self._plain(value[key], depth + 1)) is not value[key]:
                value[key] = new
        if id(value) in self._made:
            self._done[id(value)] = value, self._made[id(value)][1](value)
        return self._done[id(value)][1]

    def _of_record(self, record: _Record, depth: int) -> Any:
        found: Any
        if isinstance(record, _Namespace | _SimpleNamespace):
            found = argparse.Namespace() if type(record) is _Namespace else types.SimpleNamespace()
            self._done[id(record)] = record, found
            attributes = self._plain(record.state if record.state is not None else {}, depth + 1)
            if type(attributes) is not dict or not set(map(type, attributes)) <= {str}:
                raise refused(self._where, f"a {type(record).__name__.strip('_')} with other attributes than names")
            vars(found).update(attributes)
            return found
        if isinstance(record, _ConfigNode) and type(record.state) is dict:
            state = record.state
            found = self._plain(state["_content"] if "_content" in state else state.get("_val"), depth + 1)
        elif isinstance(record, _Array):
            found = self._array(record)
        elif isinstance(record, _Dtype):
            found = self._dtype(record)
        elif isinstance(record, _Random | _BitGenerator | _Generator):
            found = self._generator(record, depth)
        else:
            raise refused(self._where, type(record).__name__.strip("_"))
        self._done[id(record)] = record, found
        return found

    def _generator(self, record: _Record, depth: int) -> Any:
        if isinstance(record, _Generator) and record.state is None:  # of a Generator, its bits are all its state
            (bits,) = record.args
            return self._plain(bits, depth + 1)
        state = record.state
        if isinstance(record, _BitGenerator) and type(state) is tuple:  # of NumPy 2, with the seeds
            state = state[0]
        return self._plain(state, depth + 1)

    def _array(self, record: _Array) -> Any:
        _, shape, dtype, is_fortran, data = record.state
        if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS or not set(map(type, shape)) <= {int}:
            raise InvalidInputError(f"{self._where}: an array of shape {str(shape)[:80]}; the file is damaged")
        return self._from_bytes(shape, self._dtype(dtype), data, "F" if is_fortran else "C")

    def _from_bytes(self, shape: tuple[int, ...], dtype: np.dtype[Any], data: Any, order: Any) -> Any:
        """Return an array of these bytes, which only reads them.

        Raises:
            InvalidInputError: it has another number of bytes.
        """
        size = max(1, dtype.itemsize)  # many texts of no length would take no bytes
        if type(data) is not bytes or min(shape, default=0) < 0 or math.prod(shape) * size != len(data):
            has = f"{len(data)} bytes" if type(data) is bytes else f"a {type(data).__name__}"
            what = f"an array of {dtype} with shape {list(shape)} has {has}"
            raise InvalidInputError(f"{self._where}: {what}; the file is damaged or hostile: save it again")
        return np.ndarray(shape, dtype, data, order=order)

    def _dtype(self, record: Any) -> np.dtype[Any]:
        """Return the dtype of a record.

        Raises:
            InvalidInputError: it is of objects, or structured.
        """
        if isinstance(record, np.dtype):  # the program allows it itself
            return record
        name = record.args[0] if isinstance(record, _Dtype) and record.args else None
        state: Any = record.state or (3, "|", None, None, None, -1, -1, 0)
        order: Any = state[1] if state[1] in ("<", ">") else "="
        if type(name) is not str or not _DTYPE.fullmatch(name) or state[2:5] != (None, None, None):
            raise InvalidInputError(
                f"{self._where}: refused: it holds a NumPy array of objects, of several fields, or of a dtype of "
                f"another package (dtype {str(name)[:40]!r}); save lists, or an array for each field, then import it"
            )
        if name[0] in "mM":
            unit, count, *_ = state[8][1]
            name += _unit(unit.decode() if type(unit) is bytes else unit, count)
        return np.dtype(name).newbyteorder(order)


def _unit(unit: str, count: int) -> str:
    """Return the unit of a dtype of times as NumPy writes it.

    Raises:
        ValueError: it is none.
    """
    if not re.fullmatch("[a-zA-Z]{1,2}|generic", unit):
        raise ValueError(f"a time in {unit[:40]!r}")
    return "" if unit == "generic" else f"[{int(count)}{unit}]"


def _path(kind: str, *parts: Any) -> Any:
    import pathlib

    pure = pathlib.PureWindowsPath if "windows" in kind else pathlib.PurePosixPath
    return make_path(kind, str(pure(*parts)))


def _first(kind: type, *args: Any) -> Any:
    """Make a record of the first argument of a constructor; others name classes."""
    return kind(*args[:1])
