"""Configs of OmegaConf, such as Hydra makes: plain values, interpolations that are not resolved, and flags.

In: a DictConfig or ListConfig. Out: its plain form, a dict or list of its values, and its name, which has the flags:
`DictConfig(readonly=True)`. The name of a structured config has its class too: `DictConfig[app.conf:Model]`. A config
in another one is part of its plain form, or a config of its own if it has flags or a class. A config that is a part of
a larger one, and has interpolations, needs the others: its form has the whole config and the keys that lead to it.

A restore makes configs if the program has imported omegaconf, and knows the class of a structured one; else it returns
the plain form. Private names of omegaconf are used, as no public ones tell flags and types of nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ...errors import UnsupportedLeafError
from ...threads import imported

MODULE = "omegaconf"
PART = "part of a config"
_NAME = re.compile(r"(DictConfig|ListConfig)(?:\[([^:\]]+):([^\]]+)\])?(?:\((\w+=\w+(?:, \w+=\w+)*)\))?")
_INHERITED = ("readonly", "struct", "allow_objects", "no_deepcopy_set_nodes", "convert")
_ADVICE = "pass omegaconf.OmegaConf.create(omegaconf.OmegaConf.to_container(config))"


class Nested(NamedTuple):
    """A config in another one that has a form of its own."""

    config: Any


def is_config(value: Any) -> bool:
    """Return whether a value is a DictConfig or ListConfig."""
    kind = type(value)
    if not str(kind.__module__).startswith(MODULE):
        return False
    module = imported(MODULE)
    return module is not None and kind in (module.DictConfig, module.ListConfig)


def form_of(value: Any) -> tuple[str, str, Any] | None:
    """Return the kind of form, the name and the plain form of a config, or None for any other value.

    Raises:
        UnsupportedLeafError: It has nodes whose types its plain form does not hold.
    """
    is_nested = type(value) is Nested
    config = value.config if is_nested else value
    if not is_config(config):
        return None
    keys, root = _place_of(config)
    if keys and not is_nested and any(node._is_interpolation() for node in _nodes_in(config)):
        return "dataclass", PART, {"config": root, "keys": keys}
    flags = dict(config._metadata.flags)
    if keys and not is_nested:
        flags = {flag: config._get_flag(flag) for flag in (*_INHERITED, *flags)}
    kind = _class_of(config)
    plain = _plain(config, is_typed=kind is not None)
    name = type(config).__name__ + (f"[{kind.__module__}:{kind.__qualname__}]" if kind is not None else "")
    shown = ", ".join(f"{flag}={is_set}" for flag, is_set in sorted(flags.items()) if is_set is not None)
    name += f"({shown})" if shown else ""
    if kind is not None:
        match = _NAME.fullmatch(name)
        made = None if match is None else _make(match, kind, plain)
        if made is None or not _is_alike(made, config, is_part=bool(keys)):
            raise UnsupportedLeafError(f"a config of other types than those of its class has no stored form: {_ADVICE}")
    return "subclass", name, plain


def plain_of(config: Any) -> Any:
    """Return a config as dicts and lists, without a resolved interpolation."""
    module: Any = imported(MODULE)
    return module.OmegaConf.to_container(config, resolve=False)


def maker(name: str, find: Callable[[str, str], type | None]) -> Callable[[Any], Any] | None:
    """Return the function that makes a config of its plain form; None: the plain form is the value.

    Args:
        name: As stored.
        find: Returns the class of a module and name that is known here.
    """
    match = _NAME.fullmatch(name)
    if imported(MODULE) is None or (match is None and name != PART):
        return None
    if match is None:
        return _make_part
    kind = find(match[2], match[3]) if match[2] else None
    return None if match[2] and kind is None else partial(_make, match, kind)


def classes_in(value: Any) -> Iterator[type]:
    """Yield the classes of structured configs, and of the values, in a config."""
    for node in _nodes_in(value) if is_config(value) else ():
        kind = _class_of(node) if is_config(node) else type(node._value())
        if kind is not None:
            yield kind


def _make_part(plain: Any) -> Any:
    node = plain["config"]
    for key in plain["keys"]:
        node = node._get_node(key)
    if not is_config(node):
        raise TypeError(f"the keys {plain['keys']} lead to no config")
    return node


def _make(match: Any, kind: Any, plain: Any) -> Any:
    """Return a config of its plain form, by the match of its name, and its class if it is a structured one."""
    module: Any = imported(MODULE)
    values = {"True": True, "False": False}
    flags = dict(flag.split("=") for flag in match[4].split(", ")) if match[4] else {}
    flags = {flag: values[text] for flag, text in flags.items()}
    content = _unnested(plain)
    if kind is None:
        return getattr(module, match[1])(content=content, flags=flags)
    config = module.OmegaConf.structured(kind)
    with module.flag_override(config, ["struct", "readonly"], False):
        for key, child in content.items():
            config[key] = child
    config._metadata.flags = flags
    return config


def _unnested(plain: Any) -> Any:
    """Return a plain form of this process with the nested configs themselves."""
    if type(plain) is Nested:
        return plain.config
    if type(plain) is dict:
        return {key: _unnested(child) for key, child in plain.items()}
    return type(plain)(map(_unnested, plain)) if type(plain) in (list, tuple) else plain


def _place_of(config: Any) -> tuple[list[Any], Any]:
    """Return the keys that lead to a config, and the outermost config."""
    keys: list[Any] = []
    while (parent := config._get_parent()) is not None:
        keys.insert(0, config._key())
        config = parent
    return keys, config


def _children(config: Any) -> list[tuple[Any, Any]]:
    content = config.__dict__.get("_content")
    return list(content.items() if isinstance(content, dict) else enumerate(content if type(content) is list else ()))


def _nodes_in(config: Any) -> Iterator[Any]:
    yield config
    for _, child in _children(config):
        yield from _nodes_in(child)


def _class_of(config: Any) -> Any:
    """Return the class of a structured config, or None."""
    kind = config._metadata.object_type
    return kind if isinstance(kind, type) and kind not in (dict, list, tuple) else None


def _plain(config: Any, *, is_typed: bool) -> Any:
    """Return the values of a config as a dict or list.

    Args:
        is_typed: Whether the class of a structured config around it gives its nodes their types.
    """
    content, about = config.__dict__["_content"], config._metadata
    if type(content) not in (dict, list):
        raise UnsupportedLeafError(
            f"a config that is {content!r} has no values, so no stored form: give it some, or pass None in its place"
        )
    key_types = {about.key_type} if type(content) is dict else set()
    if not is_typed and {about.element_type, *key_types} - {Any, None}:
        raise UnsupportedLeafError(f"a config of typed values has no stored form: {_ADVICE}")
    items = {key: _plain_node(child, is_typed=is_typed) for key, child in _children(config)}
    if type(content) is dict:
        return items
    return list(items.values()) if is_config(config) else tuple(items.values())


def _plain_node(node: Any, *, is_typed: bool) -> Any:
    module: Any = imported(MODULE)
    if isinstance(node, module.Container) and type(node.__dict__["_content"]) in (dict, list):
        is_own = node._metadata.flags or _class_of(node) is not None
        return Nested(node) if is_own else _plain(node, is_typed=is_typed)
    is_any = isinstance(node, (module.Container, module.AnyNode))
    if node._metadata.flags or not (is_typed or is_any):
        raise UnsupportedLeafError(f"a config of typed values, or values with flags, has no stored form: {_ADVICE}")
    return node._value()


def _is_alike(one: Any, other: Any, *, is_part: bool = False) -> bool:
    """Return whether two nodes have the same types, flags and values.

    Args:
        is_part: Whether the config around the other one says which types it may have, and will do so again.
    """
    names = ("object_type", "key_type", "element_type") + (() if is_part else ("ref_type", "optional", "flags"))
    if type(one) is not type(other) or any(
        getattr(one._metadata, name, None) != getattr(other._metadata, name, None) for name in names
    ):
        return False
    if not _children(one):
        return bool(one._value() == other._value())
    here, there = _children(one), _children(other)
    return len(here) == len(there) and all(
        key == key_there and _is_alike(child, child_there)
        for (key, child), (key_there, child_there) in zip(here, there, strict=True)
    )
