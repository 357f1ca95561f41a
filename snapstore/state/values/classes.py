"""Values of common classes: paths, times, enums, dataclasses, named tuples, namespaces, subclasses of plain types.

In: a value of a state. Out: its form as plain values and the name of its class; and back. Three kinds of classes:

- Classes of the standard library (pathlib, datetime, argparse.Namespace, types.SimpleNamespace). Their values come back
  exactly.
- Objects that objects.py allows, whose plain form is the dict of their attributes.
- Classes of users, which snapstore knows only by name. Their values come back in the plain form: a dict of the fields
  of a dataclass, a tuple for a named tuple, the value of an enum's member (its name if the value is no scalar), and a
  dict, list, str, int or float for a subclass of these. `Types` has the classes that a caller passes, and makes values
  of them.

Invariant: a stored name is only compared with the names of classes that the caller passed. Nothing is imported by it.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from typing import Any

from ...errors import InvalidInputError, UnsupportedLeafError
from ...text import quoted, said
from . import composite, configs, objects
from .containers import CONTAINERS, MAX_DEPTH, Path, children, shown
from .torch_layouts import LAYOUTS

PATHS: dict[str, type[pathlib.PurePath]] = {
    "posix": pathlib.PosixPath,
    "windows": pathlib.WindowsPath,
    "pure posix": pathlib.PurePosixPath,
    "pure windows": pathlib.PureWindowsPath,
}
PATH_NAMES = {kind: name for name, kind in PATHS.items()}
#: Leaves of the standard library, which come back exactly.
KNOWN_LEAVES = frozenset({date, datetime, time, timedelta, timezone}) | PATH_NAMES.keys()
_BASES = (dict, list, str, int, float)  # whose subclasses have a plain form
SCALARS = frozenset({type(None), bool, int, float, str, bytes})
NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")

#: The kinds of forms, and the types of the plain form of each.
KINDS = {"dataclass": (dict,), "namedtuple": (tuple,), "namespace": (dict,), "subclass": _BASES}

Make = Callable[[Any], Any]  # makes a value of its plain form


# --- leaves of the standard library ---


def make_path(kind: str, text: str) -> pathlib.PurePath:
    """Return a path; a pure path if its kind belongs to another system than this one.

    Raises:
        ValueError: The kind is unknown.
    """
    if kind not in PATHS:
        raise ValueError("this kind of path is unknown")
    if kind in ("posix", "windows") and not issubclass(PATHS[kind], type(pathlib.Path())):
        kind = f"pure {kind}"
    return PATHS[kind](text)


def zone_of(value: Any) -> timezone | None:
    """Return the time zone of a datetime or time.

    Raises:
        UnsupportedLeafError: It is no datetime.timezone. Other zones have rules, which lie in files of the machine and
            may change.
    """
    zone = value.tzinfo
    if zone is None or type(zone) is timezone:
        return zone
    raise UnsupportedLeafError(
        f"a time in the zone {zone!s} of {type(zone).__name__} has no stored form: "
        "use .astimezone(datetime.timezone.utc)"
    )


# --- classes of users ---


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """The plain form of a value of a class.

    Attributes:
        kind: `dataclass`, `namedtuple`, `namespace` or `subclass`.
        module, name: The module and the qualified name of the class.
        plain: A dict, list, tuple or scalar.
        fields: The names of a named tuple's fields.
    """

    kind: str
    module: str
    name: str
    plain: Any
    fields: tuple[str, ...] = ()

    def check(self) -> None:
        """Check that this is the form of a value; it may come from a store.

        Raises:
            ValueError: It is none.
        """
        if {type(self.module), type(self.name)} != {str}:
            raise ValueError("the name of its class or module is no str")
        if type(self.plain) not in KINDS.get(self.kind, ()):
            raise ValueError(f"a {self.kind[:40]!r} with a {type(self.plain).__name__} as its plain form")
        if self.kind in ("dataclass", "namespace") and not set(map(type, self.plain)) <= {str}:
            raise ValueError("the name of a field is no str")
        names = len(self.plain) if self.kind == "namedtuple" else 0
        if len(self.fields) != names or not set(map(type, self.fields)) <= {str}:
            raise ValueError("a named tuple has other numbers of names and values")
        if self.kind == "namespace" and f"{self.module}.{self.name}" not in NAMESPACES:
            raise ValueError("this namespace is unknown")


def form_of(value: Any) -> Form | None:
    """Return the plain form of a value, or None if its class has none; for an enum see `enum_form`.

    Raises:
        UnsupportedLeafError: It has attributes that its plain form does not hold; or a restore would refuse the form.
    """
    form = _unchecked_form_of(value)
    try:
        if form is not None:
            form.check()
    except ValueError as error:
        raise UnsupportedLeafError(
            f"{type(value).__name__} has no stored form: {error}; convert it to a plain value"
        ) from error
    return form


def _unchecked_form_of(value: Any) -> Form | None:
    kind = type(value)
    if (config := configs.form_of(value)) is not None:
        return Form(config[0], configs.MODULE, *config[1:])
    base = next((base for base in (str, int, float) if isinstance(value, base)), None)
    plain = view_of(value) if base is None else _as_base(base, value)
    if plain is None or kind is base:
        return None
    if is_namespace(value):
        return Form("namespace", kind.__module__, kind.__qualname__, plain)
    if composite.is_composite(value) or objects.is_allowed(kind):
        kind = composite.kind_of(value)
        return Form("dataclass", kind.__module__, kind.__qualname__, plain)
    attributes = {**getattr(value, "__dict__", {}), **_slots(value)}
    if dataclasses.is_dataclass(value):
        if isinstance(value, (*_BASES, tuple)):
            raise UnsupportedLeafError(
                f"{kind.__name__} is a dataclass and a subclass of {kind.__mro__[-2].__name__} at once, which has no "
                "stored form; give it state_dict/load_state_dict"
            )
        _refuse_others(value, attributes.keys() - {field.name for field in dataclasses.fields(value)})
        return Form("dataclass", kind.__module__, kind.__qualname__, plain)
    _refuse_others(value, _slots(value) if getattr(value, "__dict__", None) is value else attributes)
    if isinstance(value, tuple):
        return Form("namedtuple", kind.__module__, kind.__qualname__, plain, kind._fields)
    return Form("subclass", kind.__module__, kind.__qualname__, plain)


def enum_form(value: Enum) -> tuple[str, str, str | None, Any]:
    """Return (module, name of the class, name of the member or None, plain form) of a member of an enum.

    The plain form is the member's value if that is a scalar, else its name.
    """
    kind, name = type(value), value.name
    plain = value.value
    if type(plain) not in SCALARS:
        form = form_of(plain) if type(plain) not in CONTAINERS else None
        plain = form.plain if form and type(form.plain) in SCALARS else name
    return kind.__module__, kind.__qualname__, name, plain


def _as_base(base: type, value: Any) -> Any:
    """Return a value as its base class has it, whatever methods its own class overrides."""
    if base is dict:
        return dict(OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value))
    if base is list:
        return list(list.__iter__(value))
    if base is str:
        return "".join(str.__iter__(value))
    return int.__int__(value) if base is int else float.__float__(value)


def _slots(value: Any) -> dict[str, Any]:
    """Return the attributes of a value that lie in `__slots__` of its classes."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            attribute = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            if attribute not in ("__dict__", "__weakref__") and hasattr(value, attribute):
                found[attribute] = getattr(value, attribute)
    return found


def _refuse_others(value: Any, names: Iterable[str]) -> None:
    """Refuse attributes that would be lost; a cached property is no loss: it is computed again."""
    kind = type(value)
    lost = sorted(name for name in names if not isinstance(getattr(kind, name, None), functools.cached_property))
    if lost:
        raise UnsupportedLeafError(
            f"{kind.__name__} has attributes without a stored form: {lost[:5]}; give it state_dict/load_state_dict"
        )


def is_namespace(value: Any) -> bool:
    """Return whether a value is a namespace of argparse or types."""
    kind = type(value)
    return kind is types.SimpleNamespace or kind is getattr(sys.modules.get("argparse"), "Namespace", None)


# --- back ---


class Types:
    """The classes of which a restore makes values.

    Args:
        classes: Passed by the caller.
        into: A state that the caller passed; the classes of its values count as passed too.
        known: Classes that need not be passed.

    Raises:
        InvalidInputError: One is a class without a plain form, or no class.
    """

    def __init__(self, classes: Iterable[type] = (), into: Any = None, known: Iterable[type] = ()) -> None:
        if isinstance(classes, type | str):
            raise InvalidInputError(
                f"types {quoted(classes)}: expected a list of classes, got one {type(classes).__name__}"
            )
        self._given = list(classes or ())
        for given in self._given:
            _check_class(given)
        self._into, self._known = into, known
        self._names: dict[tuple[str, str], type] | None = None
        self._qualified: list[dict[str, list[type]]] = []  # of the classes that were passed, and of the others

    def find(self, module: str, name: str) -> type | None:
        """Return the class of this module and qualified name, or else the only one of this qualified name."""
        if self._names is None:
            passed = [*self._given, *dict.fromkeys(_classes_in(self._into, 0, {}))]
            known = [*self._known, *LAYOUTS.values()]
            self._names = {(kind.__module__, kind.__qualname__): kind for kind in reversed([*passed, *known])}
            for kinds in (passed, known):
                alike: dict[str, dict[str, type]] = {}
                for kind in kinds:
                    alike.setdefault(kind.__qualname__, {})[kind.__module__] = kind
                self._qualified.append({qualified: list(found.values()) for qualified, found in alike.items()})
        found = next((kinds[name] for kinds in self._qualified if name in kinds), [])
        return self._names.get((module, name)) or (found[0] if len(found) == 1 else None)

    def maker(self, form: Form, path: Path) -> Make | None:
        """Return the function that makes a value of a stored form's class; None: its plain form is the value.

        Raises:
            InvalidInputError: (from the maker) the class does not take the stored fields.
        """
        if form.kind == "namespace":
            return functools.partial(_make_namespace, f"{form.module}.{form.name}")
        if form.module == configs.MODULE:
            make = configs.maker(form.name, self.find)
            return None if make is None else functools.partial(_make_config, make, form.name, path)
        kind = self.find(form.module, form.name)
        if kind is None:
            return None
        return functools.partial(_make, kind, form, path)

    def member(self, module: str, name: str, member: str | None, plain: Any, path: Path) -> Any:
        """Return a member of an enum, by its name or else by its value; its plain form if the enum was not passed.

        Raises:
            InvalidInputError: The class is no enum, or has no such member.
        """
        kind = self.find(module, name)
        if kind is None:
            return plain
        try:
            if not issubclass(kind, Enum):
                raise TypeError("it is no Enum")
            return kind(plain) if member is None or member not in kind.__members__ else kind[member]
        except Exception as error:  # Enum._missing_ is the user's
            raise _does_not_fit(path, kind, error) from error


def _classes_in(state: Any, depth: int, seen: dict[int, Any]) -> Iterator[type]:
    """Yield the classes of the values in nested containers, except plain types; each container is looked into once."""
    if type(state) in SCALARS or depth > MAX_DEPTH or id(state) in seen:
        return
    if isinstance(state, (Enum, str, int, float)):
        yield type(state)
    yield from configs.classes_in(state)
    view = state if type(state) in CONTAINERS else view_of(state)
    if view is not None:
        if view is not state:
            yield type(state)
        seen[id(state)] = state
        for _, _, child in children(view):
            yield from _classes_in(child, depth + 1, seen)


def view_of(value: Any) -> Any:
    """Return the members of a value whose plain form is a container, as a dict, list or tuple; else None."""
    kind = type(value)
    if kind in SCALARS or kind in CONTAINERS or isinstance(value, type):
        return None
    if composite.core_of(value) is not None:
        return composite.plain_of(value)
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    if is_namespace(value) or objects.is_allowed(kind):
        return dict(vars(value))
    if isinstance(value, tuple):
        return tuple(value) if isinstance(getattr(kind, "_fields", None), tuple) else None
    base = next((base for base in (dict, list) if isinstance(value, base)), None)
    return None if base is None or isinstance(value, Counter | defaultdict) else _as_base(base, value)


def put_back(value: Any, view: Any) -> None:
    """Write the members of a view back into the value that it was made of; members that it has already stay."""
    if isinstance(value, list):
        value[:] = view
    elif isinstance(value, dict):
        for key, child in view.items():
            if key not in value or value[key] is not child:
                value[key] = child
    else:
        for name, child in view.items():
            if getattr(value, name, view) is not child:
                object.__setattr__(value, name, child)  # a frozen dataclass too: `into` is filled in place


def _check_class(kind: Any) -> None:
    has_form = isinstance(kind, type) and (issubclass(kind, _BASES) or _is_of_users(kind))
    if not (has_form or composite.is_composite_class(kind)):
        raise InvalidInputError(
            f"types: {quoted(kind)} is no dataclass, Enum, named tuple, subclass of dict, list, str, int or float, "
            "tensor of other tensors (__tensor_flatten__), or class of objects that have only attributes"
        )


def known_classes() -> list[type]:
    """Return the classes that need not be passed: the program allows `torch.load` to make them, as torchao's import
    does, or objects.py lists them; and Enums and dataclasses beside an allowed composite tensor. They are imported.
    """
    kinds = [kind for kind in objects.safe_globals() if isinstance(kind, type)]
    tensors = [kind for kind in kinds if composite.is_composite_class(kind)]
    beside = [value for kind in tensors for value in vars(sys.modules.get(kind.__module__, kind)).values()]
    names = {kind.__module__ for kind in tensors}
    found = [value for value in beside if isinstance(value, type) and value.__module__ in names and _is_plain(value)]
    return [*tensors, *filter(_is_of_users, kinds), *found, *objects.allowed_classes()]


def _is_plain(kind: Any) -> bool:
    """Return whether a class is an Enum or a dataclass."""
    return issubclass(kind, Enum) or dataclasses.is_dataclass(kind)


def _is_of_users(kind: Any) -> bool:
    """Return whether a class is an Enum, a dataclass, a named tuple, or one of objects that have only attributes."""
    is_named_tuple = isinstance(getattr(kind, "_fields", 0), tuple)
    return _is_plain(kind) or is_named_tuple or objects.has_attributes_only(kind)


def _make(kind: type, form: Form, path: Path, plain: Any) -> Any:
    try:
        if composite.is_composite_class(kind):
            return composite.make(kind, plain)
        if form.kind == "dataclass":
            return _make_dataclass(kind, plain) if dataclasses.is_dataclass(kind) else objects.make(kind, plain)
        if form.kind == "namedtuple":
            if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
                raise TypeError("it is not a named tuple")
            return kind(**dict(zip(form.fields, plain, strict=True)))
        if not issubclass(kind, type(plain)):
            raise TypeError(f"it is not a subclass of {type(plain).__name__}")
        return kind(plain)
    except Exception as error:  # of the user's constructor too
        raise _does_not_fit(path, kind, error) from error


def _make_dataclass(kind: Any, plain: dict[str, Any]) -> Any:
    """Return an instance with these fields, made without `__init__`, as pickle and copy make it."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := plain.keys() - fields.keys():
        raise TypeError(f"it has no fields {sorted(unknown)}")
    value: Any = object.__new__(kind)
    for name, field in fields.items():
        if name in plain:
            object.__setattr__(value, name, plain[name])
        elif field.default is not dataclasses.MISSING:
            object.__setattr__(value, name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            object.__setattr__(value, name, field.default_factory())
        else:
            raise TypeError(f"its field {name!r} has no default and is not stored")
    return value


def _make_config(make: Make, name: str, path: Path, plain: Any) -> Any:
    try:
        return make(plain)
    except Exception as error:  # of OmegaConf
        raise InvalidInputError(
            f"{shown(path)}: cannot make a {name} of OmegaConf of what is stored: {said(error)}"
        ) from error


def _make_namespace(name: str, plain: dict[str, Any]) -> Any:
    import argparse

    value = argparse.Namespace() if name == NAMESPACES[0] else types.SimpleNamespace()
    vars(value).update(plain)
    return value


def _does_not_fit(path: Path, kind: type, error: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"{shown(path)}: cannot make a {kind.__module__}.{kind.__qualname__} of what is stored: {said(error)}; leave "
        "it out of types to get the plain form"
    )
