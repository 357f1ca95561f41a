"""Checks of arguments that go into a record: names, steps, tags, metrics, metadata; and of choices.

In: arguments of a save or a tag. Out: the values as records.py stores them, or an InvalidInputError that says what to
do.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsFloat, TypeVar

import msgspec

from .errors import InvalidInputError
from .format.keys import NAME
from .format.records import MAX_FIELD_BYTES, MAX_STEP
from .retention import as_int
from .state.tree.encode import encode_plain
from .state.values.metrics import MetricRead, begin_read
from .state.walk.stateful import is_stateful
from .text import quoted

V = TypeVar("V")

#: Advice for swapped arguments.
TARGET_FIRST = "restore_into(target, step) of a SnapshotManager takes the target first"
_REF_FIRST = "restore_into('run@step', target) of a Repository takes the reference first"


def _text(name: object) -> str:
    """Return a name as a plain str; of a member of an enum that is a str too, its value."""
    return str.__str__(name) if isinstance(name, str) else str(name)


def check_name(what: str, name: object) -> str:
    """Return `name` as a plain str if it can name a run or a tag, else raise InvalidInputError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        shown = repr(name) if len(repr(name)) <= 80 else repr(name)[:77] + "..."
        raise InvalidInputError(
            f"{what} {shown}: expected 1 to 128 characters of A-Z a-z 0-9 . _ - that start with a letter or digit"
        )
    return _text(name)


def check_choice(what: str, choice: object, choices: Sequence[str]) -> None:
    """Raise InvalidInputError unless `choice` is one of the choices."""
    if choice not in choices:
        raise InvalidInputError(f"{what} {quoted(choice)}: expected one of {', '.join(choices)}")


def check_list(what: str, given: object) -> None:
    """Raise InvalidInputError unless `given` can be a list of str: it is not one str, and can be iterated over."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        kind = "one str" if isinstance(given, str) else type(given).__name__
        raise InvalidInputError(f"{what} {quoted(given)}: expected a list of str, got {kind}")


def check_flags(**flags: object) -> None:
    """Raise InvalidInputError unless each of these arguments is a bool: a text such as "no" would count as True."""
    for name, given in flags.items():
        if not isinstance(given, bool):
            raise InvalidInputError(f"{name} {quoted(given)}: expected True or False, got {type(given).__name__}")


def check_interval(steps: object) -> int:
    """Return `save_interval_steps` as an int of 1 or more, else raise InvalidInputError."""
    interval = as_int(steps)
    if interval is None or interval < 1:
        raise InvalidInputError(f"save_interval_steps {quoted(steps)}: expected an int of 1 or more")
    return interval


def check_step(step: object, order: str = "the step comes before the state") -> int:
    """Return `step` as an int if it is a step number, else raise InvalidInputError.

    Args:
        order: the advice if it is a state: the caller has probably swapped two arguments.
    """
    try:
        if isinstance(step, bool):
            raise TypeError("a bool is no number")
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError as error:
        given = "step" if _is_state(step) else f"step {quoted(step)}"
        text = f"{given}: expected an integer from 0 to {MAX_STEP}, got {type(step).__name__}"
        raise InvalidInputError(f"{text}; {order}" if given == "step" else text) from error
    if not 0 <= number <= MAX_STEP:
        raise InvalidInputError(f"step {quoted(number)}: expected 0 to {MAX_STEP}")
    return number


def check_ref(ref: object) -> None:
    """Raise InvalidInputError unless a reference is a str."""
    if not isinstance(ref, str):
        given, advice = ("reference", f"; {_REF_FIRST}") if _is_state(ref) else (f"reference {quoted(ref)}", "")
        raise InvalidInputError(f"{given}: expected a str, got {type(ref).__name__}{advice}")


def _is_state(argument: object) -> bool:
    is_container = isinstance(argument, Mapping | Sequence) and not isinstance(argument, str | bytes)
    return is_container or is_stateful(argument)


def check_tag(name: str) -> str:
    """Return `name` as a plain str if it can be a tag, else raise InvalidInputError."""
    name = check_name("tag", name)
    if name == "latest" or name.isdecimal():
        raise InvalidInputError(f"tag {quoted(name)}: it reads as a step number or as 'latest'; choose another name")
    return name


def check_tags(names: Iterable[str]) -> list[str]:
    """Return `names`, sorted, each once, if they can be tags of one record, else raise InvalidInputError."""
    return _bounded("tags", sorted({check_tag(name) for name in names}), "remove some, or put them into the metadata")


def check_metrics(metrics: Mapping[str, SupportsFloat]) -> dict[str, MetricRead]:
    """Begin to read the metrics; return functions by name that wait for the numbers and return them.

    Raises:
        InvalidInputError: a name or a value cannot be stored, or the metrics are too large.
    """
    if not isinstance(metrics, Mapping):
        raise InvalidInputError(f"metrics: expected a mapping of names to numbers, got {type(metrics).__name__}")
    names = dict.fromkeys(map(_text, metrics), 0.0)  # every number takes the same number of bytes
    if len(names) < len(metrics):
        raise InvalidInputError(f"metrics: two names are the same text, of {sorted(names)[:10]}; use str as names")
    _bounded("metrics", names, "keep the metrics by which policies or people choose; save the others with the state")
    checked = {}
    for name, value in metrics.items():
        try:
            checked[_text(name)] = begin_read(value)
        except InvalidInputError as error:
            raise InvalidInputError(f"metric {quoted(name)}: {error}") from error
    return checked


def encode_metadata(metadata: Any) -> msgspec.Raw:
    """Return metadata as the packed node of a record; raise InvalidInputError if not storable."""
    try:
        node = encode_plain(metadata)
    except InvalidInputError as error:  # its paths would read as paths of the state
        raise type(error)(*(f"metadata: {line}" for line in error.args)) from error
    return msgspec.Raw(msgspec.msgpack.encode(_bounded("metadata", node, "put large values into the state")))


def _bounded(what: str, value: V, instead: str) -> V:
    """Return a field of a new record if it is small enough, else raise InvalidInputError."""
    try:
        size_bytes = len(msgspec.msgpack.encode(value))
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{what}: {error.object!r}: expected names in Unicode, got a lone surrogate") from error
    if size_bytes > MAX_FIELD_BYTES:
        raise InvalidInputError(f"{what}: {size_bytes} bytes, expected at most {MAX_FIELD_BYTES}; {instead}")
    return value
