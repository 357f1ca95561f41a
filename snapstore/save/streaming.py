"""Streaming: the pairs of an iterator as the inputs of a save, for a state larger than memory.

In: an iterator of (dotted path, tensor). Out: one part, a dict of the paths in their order, whose tensors are made one
at a time. The next pair is taken when nothing reads the memory of the tensor before it, or refers to that here.

Tensors smaller than a batch are copied, so that they share batches. A larger tensor is written before the next pair is
taken. The memory of earlier tensors is not remembered, so ties are not found; equal chunks are stored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..engine.registry import Engines
from ..errors import InvalidInputError, UnsupportedLeafError
from ..state.tree.encode import encode_plain
from ..state.values.arrays import describe, device_of
from ..state.values.containers import Path, display
from ..state.values.held_array import Held
from ..state.values.tensors import TensorSpec, array_node, is_array
from ..state.values.wrapped import unwrapped
from ..state.walk.flatten import flatten
from .inputs import PartInput, TensorInput, inputs_of, is_stream

_END = object()


def inputs_of_state(state: Any, engines: Engines) -> list[PartInput]:
    """Return a state as inputs that are read from the caller's memory; an iterator is read while it is written."""
    return [inputs_of_stream(state, engines)] if is_stream(state) else inputs_of(flatten(state))


def inputs_of_stream(pairs: Iterable[Any], engines: Engines) -> PartInput:
    """Return the pairs of an iterator as the only part of a state; iterating over its tensors takes the pairs.

    That iteration raises InvalidInputError if a pair cannot be saved, or there is none.
    """
    keys: list[Any] = []
    nodes: list[Any] = []
    return PartInput("", ["dict", keys, nodes], _tensors(iter(pairs), keys, nodes, engines), once=True)


def _tensors(pairs: Iterator[Any], keys: list[Any], nodes: list[Any], engines: Engines) -> Iterator[TensorInput]:
    positions: dict[str, int] = {}
    while (pair := next(pairs, _END)) is not _END:
        number = len(positions)
        path, value = _checked(pair, number)
        if positions.setdefault(path, number) != number:
            raise InvalidInputError(
                f"{path}: the iterator gave this path twice, as pairs {positions[path]} and {number}; "
                "each path may come once; nothing was committed"
            )
        tensor = input_of((path,), value, engines)
        del pair, value
        keys.append(encode_plain(path))
        nodes.append(array_node(tensor.spec.kind, number, tensor.spec.requires_grad))
        yield tensor
        if tensor.lent:
            tensor.array = None  # else the tensor would stay in memory while the next one is made
    if not positions:
        raise InvalidInputError(
            "state: the iterator gave no tensor; it may have been used before: pass a new one; nothing was committed"
        )


def _checked(pair: Any, number: int) -> tuple[str, Any]:
    """Return the path and the tensor of a pair.

    Raises:
        InvalidInputError: it is no pair of a path and a tensor.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InvalidInputError(
            f"state: pair {number} of the iterator: expected (path, tensor), got {type(pair).__name__}"
            f"{f' of {len(pair)}' if isinstance(pair, tuple | list) else ''}; nothing was committed"
        )
    path, value = pair
    if type(path) is not str or not path:
        raise InvalidInputError(
            f"state: pair {number} of the iterator: path {str(path)[:80]!r}: expected a str such as "
            f"'model.weight', got {type(path).__name__}; nothing was committed"
        )
    if not path.isascii() and path.encode(errors="replace").decode() != path:
        raise InvalidInputError(f"{path}: a path of the iterator is not Unicode text; rename it; nothing was committed")
    if not is_array(value):
        raise InvalidInputError(
            f"{path}: expected a tensor or NumPy array from the iterator, got {type(value).__name__}; pass plain "
            "values as metadata; nothing was committed"
        )
    return path, value


def input_of(path: Path, value: Any, engines: Engines) -> TensorInput:
    """Return a tensor, array or bytes as an input: a copy; but if it is large or on a device, its own memory, lent.

    Raises:
        UnsupportedLeafError: it has no stored form.
    """
    grad, value = getattr(value, "requires_grad", False), unwrapped(value)
    try:
        kind, dtype, shape = describe(value)
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"{display(path)}: {error}; nothing was committed") from error
    held = Held.of(value, TensorSpec(path, kind, dtype, shape, grad, None))
    spec = held.spec
    key = ("", spec.path, 0)
    if spec.nbytes >= engines.cpu.batch_bytes or device_of(value, engines.on_device) is not None:
        return TensorInput(key, spec, held, lent=True)
    copy = np.empty(spec.nbytes, np.uint8)
    held.copy_into(copy)
    return TensorInput(key, spec, None, copy)
