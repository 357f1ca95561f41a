"""Open maps: keep the map keys that this release does not know, so that rewriting an object does not drop them.

In: one msgpack map, or a struct. Out: a struct whose `unknown` holds these keys, packed; and back. A later release may
add keys to records, to headers of manifests and to references (docs/format.md, "What may grow").
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from ..threads import msgpack_decoder

#: The name of the attribute `unknown` in msgspec's maps. It is never stored: it is unset, or `encode` removes it.
_NAME = "(unknown)"
_ENCODER = msgspec.msgpack.Encoder()
_MAP = msgpack_decoder(dict[str, msgspec.Raw])
_MAPS = msgpack_decoder(list[dict[str, msgspec.Raw]])

#: (key, packed value) of the keys of a map that this release does not know; unset if there are none.
UnknownKeys = tuple[tuple[str, bytes], ...] | msgspec.UnsetType
#: The default of the attribute `unknown` of every struct whose map is open.
NONE_UNKNOWN: Any = msgspec.field(default=msgspec.UNSET, name=_NAME)

T = TypeVar("T", bound=msgspec.Struct)


def with_unknown(found: T, packed: bytes | memoryview, nested: str) -> T:
    """Return a struct with `unknown` set to its map's keys without a field.

    A field has a default for the code that makes the struct. In a packed map its key is always there, unless the
    default is unset.

    Args:
        packed: the map from which `found` was decoded.
        nested: the key of a list of maps in it; their unknown keys are kept too.

    Raises:
        msgspec.DecodeError: `packed` does not decode, or lacks a key.
    """
    raw = _MAP.decode(packed)
    if missing := _required(type(found)) - raw.keys():
        raise msgspec.DecodeError(f"Object missing required field `{min(missing)}`")
    members: list[Any] = getattr(found, nested)
    if members:
        kept = [_with_others(member, own) for member, own in zip(members, _MAPS.decode(raw[nested]), strict=True)]
        if any(member.unknown for member in kept):
            found = msgspec.structs.replace(found, **{nested: kept})
    whole: T = _with_others(found, raw)
    return whole


@cache
def _required(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the keys of a struct's map that are always there."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if field.default is not msgspec.UNSET)


def encode(value: Any, nested: str) -> bytes:
    """Return a struct as a packed map; the keys that this release does not know come last."""
    members: list[Any] = getattr(value, nested)
    if not value.unknown and not any(member.unknown for member in members):
        return _ENCODER.encode(value)
    fields = _fields_of(value)
    fields[nested] = msgspec.Raw(_ENCODER.encode([_fields_of(member) for member in members]))
    return _ENCODER.encode(fields)


def _with_others(value: Any, raw: dict[str, msgspec.Raw]) -> Any:
    """Return a struct with `unknown` set to `raw` keys without a field."""
    names = raw.keys() - value.__struct_encode_fields__
    if not names and value.unknown is msgspec.UNSET:
        return value
    unknown = tuple((name, bytes(packed)) for name, packed in raw.items() if name in names)
    return msgspec.structs.replace(value, unknown=unknown or msgspec.UNSET)


def _fields_of(value: Any) -> dict[str, msgspec.Raw]:
    """Return every key of a struct's map with its packed value."""
    fields = _MAP.decode(_ENCODER.encode(value))
    fields.pop(_NAME, None)
    return fields | {name: msgspec.Raw(packed) for name, packed in value.unknown or ()}
