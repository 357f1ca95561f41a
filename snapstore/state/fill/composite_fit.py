"""Whether composite tensors of a snapshot fit a state that a restore fills, and of which class they come back there.

In: decoded plain forms (composite.py), and the values at the same places of the target. Out: the differences. A
composite tensor that the target has shows its class, so the caller need not pass it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...errors import InvalidInputError
from ..tree.decode import Decoded, decode
from ..tree.encode import type_name
from ..values import composite, torch_layouts
from ..values.arrays import as_bytes
from ..values.classes import Make, Types
from ..values.containers import CONTAINERS, Path, children, is_mapping, shown
from ..values.tensors import Node, StoredPart
from ..values.torch_layouts import is_layout
from .buffers import RestoreBuffers
from .repeated_places import same_plain

_ABSENT: Any = object()


def differences(stored: Any, present: Any, path: Path, decoded: Decoded) -> Iterator[tuple[Path, Any, str]]:
    """Yield the path, the plain form and a text of each composite tensor that does not fit the state of an object.

    Each one that fits is then made with the class that the present one has.

    Args:
        stored: The decoded state, or a value in it.
        present: The value of the object's `state_dict` at this place.
    """
    if not decoded.composites or id(stored) in decoded.plain:
        return
    if id(stored) in decoded.composites:
        text = mismatch(stored, present, decoded)
        if text is not None:
            yield path, stored, text
        elif present is not _ABSENT:
            decoded.makers[id(stored)] = stored, _maker(stored, present)
    elif type(stored) in CONTAINERS:
        is_alike = type(present) in CONTAINERS and is_mapping(present) == is_mapping(stored)
        there = {key: child for _, key, child in children(present)} if is_alike else {}
        for element, key, child in children(stored):
            yield from differences(child, there.get(key, _ABSENT), (*path, element), decoded)


def mismatch(stored: Any, present: Any, decoded: Decoded, *, in_place: bool = False) -> str | None:
    """Return why a value of the target cannot become a stored composite tensor, or None if it can.

    Args:
        in_place: Whether it stays the object; else its object gets a new one.
    """
    _, module, name = decoded.composites.get(id(stored), (None, "", type(stored).__name__))
    if present is _ABSENT:
        if id(stored) in decoded.makers:
            return None
        module, name = decoded.unmade.get(id(stored), (module, name))
        return f"type: {module}.{name} is not known here: import {module}, or pass types=[{name}]"
    core = composite.core_of(present)
    kind: Any = None if core is None else composite.kind_of(core)
    if kind is None or kind.__qualname__ != name:
        return f"type: expected {type_name(present)} as in the target, got {module}.{name}"
    plain = composite.plain_of(present)
    tensors = [[*composite.inner_of(one)] for one in (plain, stored)]
    if not is_layout(kind) and {*tensors[0]} != {*tensors[1]}:
        return f"type: expected a {name} of tensors {tensors[0]} as in the target, got {tensors[1]}"
    shapes = [composite.shape_of(one)[0] for one in (plain, stored)]
    if not same_plain(*shapes):
        return f"shape: expected {tuple(shapes[0])} as in the target, got {shapes[1]}"
    shards = [one.get(composite.SHARD) for one in (plain, stored)]
    if None not in shards and not same_plain(*shards[::-1]):
        return (
            f"shard: expected {_boxes(shards[0])} as in the target, got {_boxes(shards[1])}: each rank gets what it "
            "has saved, so use the mesh and placements of the save"
        )
    context = stored[composite.CONTEXT], plain[composite.CONTEXT]
    if is_layout(kind):
        return torch_layouts.misfit(context[0], core, in_place=in_place)
    if not same_plain(*context) and not same_plain(context_like(decoded.contexts[id(stored)], context[1]), context[1]):
        return f"context of {name}: expected {context[1]} as in the target, got {context[0]}"
    return None


def require_assigned(places: Sequence[tuple[Path, Any, Callable[[], Any]]]) -> None:
    """Check that tensors of torch's own kinds that share memory have the stored values: each was assigned as a whole.

    Args:
        places: The path of each, the tensor of the target, and how to make the stored one.

    Raises:
        InvalidInputError: One has other values: that of a later place has the same indices, offsets or values.
    """
    inner = {id(target): composite.inner_of(composite.plain_of(target)) for _, target, _ in places}
    memories = {name: {_memory_of(tensor) for tensor in tensors.values()} for name, tensors in inner.items()}
    owners = Counter(memory for found in memories.values() for memory in found)
    for path, target, make in places:
        if max(owners[memory] for memory in memories[id(target)]) > 1:
            stored = composite.inner_of(composite.plain_of(make()))
            for name, tensor in inner[id(target)].items():
                if not np.array_equal(as_bytes(tensor), as_bytes(stored[name].to(tensor.dtype))):
                    raise InvalidInputError(
                        f"{shown(path)}: shares memory ({name}) with another tensor in the target, but the snapshot "
                        "has different values for the two; untie them in the target and restore again"
                    )


def _memory_of(tensor: Any) -> Any:
    return tensor.device, tensor.untyped_storage().data_ptr() or id(tensor)


def _maker(stored: Any, present: Any) -> Make:
    """Return the function that makes a stored composite tensor in the class of the present one, which it fits."""
    context = composite.plain_of(present)[composite.CONTEXT]
    if is_layout(composite.kind_of(composite.core_of(present))) or same_plain(stored[composite.CONTEXT], context):
        return partial(composite.like, present)
    return lambda plain: composite.like(present, {**plain, composite.CONTEXT: context})  # with values of its classes


def context_like(node: Node, present: Any) -> Any:
    """Return a stored context with the classes of the values in another one.

    Raises:
        InvalidInputError: A class does not take what is stored.
        FormatError: No save can have made the node.
    """
    decoded = Decoded(types=Types(into=present))
    tree = decode([StoredPart("", node, ())], decoded=decoded)
    return RestoreBuffers([], None, decoded=decoded).build(tree)


def _boxes(shard: Any) -> str:
    """Return the boxes of a shard for a message; the shard may come from a store."""
    shape, boxes = shard if type(shard) is tuple and len(shard) == 2 else (shard, None)
    return f"the boxes {boxes} (offsets, sizes) of {shape}"
