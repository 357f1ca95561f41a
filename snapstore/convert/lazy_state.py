"""A state whose tensors lie in files, as the input of a save: each is read when it is saved, and then freed.

In: nested containers over plain values, arrays, and `Later`s. Out: one part whose tensors are made one at a time. So a
state larger than memory can be saved, with its nesting. Arrays over the same memory are stored once, as ties.

Invariant: at most one value that a `Later` has read is alive here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..chunks import limits
from ..engine.registry import Engines
from ..errors import InvalidInputError, UnsupportedLeafError
from ..save.inputs import PartInput, TensorInput
from ..save.streaming import input_of
from ..state.tree.encode import Encoder
from ..state.values.arrays import describe, extent_of, memory_key
from ..state.values.containers import Path, shown
from ..state.values.tensors import Node, array_node, is_array
from ..state.values.torch_layouts import layout_of
from ..text import human_bytes

#: So many bytes of tensors may come from each byte of a file. torch.save writes each byte once; tensors can share some.
MAX_CLAIMS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """A leaf of a state that is read when it is saved.

    Attributes:
        read: returns the value; it may be called once.
        kind: whether the value is a torch.Tensor that requires no grad, or bytes.
        nbytes: its size, if its file only claims that it has so many bytes.
    """

    read: Callable[[], Any]
    kind: Literal["tensor", "bytes"] = "tensor"
    nbytes: int = 0


@dataclass(slots=True)
class _Leaves:
    """The arrays of a state, in order, and the sum of their sizes; `places`: the number of each memory that was met."""

    reads: list[tuple[Path, Callable[[], Any]]] = field(default_factory=list)
    places: dict[Any, int] = field(default_factory=dict)
    nbytes: int = 0

    def put(self, value: Any, path: Path) -> Node:
        """Add an array, or long bytes, unless its memory is there already; return its node.

        Raises:
            UnsupportedLeafError: it has no stored form.
        """
        kind, *_ = describe(value)
        stored = bytes(value) if isinstance(value, bytearray) else value
        place = memory_key(stored) if is_array(stored) else None
        number = len(self.reads) if place is None else self.places.setdefault(place, len(self.reads))
        if number == len(self.reads):
            self.reads.append((path, lambda: stored))
            self.nbytes += len(stored) if isinstance(stored, bytes) else stored.nbytes
        return array_node(kind, number, getattr(stored, "requires_grad", False))

    def put_later(self, value: Any, path: Path) -> Node | None:
        """Add a `Later`, and return its node; None: the value is not one.

        Raises:
            UnsupportedLeafError: it is a sparse, jagged or quantized tensor. Nothing checks the storages in it.
        """
        if (layout := layout_of(value)) is not None:
            raise UnsupportedLeafError(
                f"torch.{layout.__qualname__} tensor has no stored form in an import: save what torch.load returns"
            )
        if not isinstance(value, Later):
            return None
        self.reads.append((path, value.read))
        self.nbytes += value.nbytes
        return array_node(value.kind, len(self.reads) - 1, False)


def inputs_of_lazy(
    state: Any, engines: Engines, let_go: Callable[[Any], None], bytes_read: int, where: str
) -> PartInput:
    """Return a state as the only part of a save; iterating over its tensors reads them.

    Args:
        let_go: called with each array once it is stored, before the next is read.
        bytes_read: the size of its files [bytes].
        where: the name of the checkpoint in errors.

    Raises:
        UnsupportedLeafError: a value cannot be stored; all of them are named.
        InvalidInputError: its tensors are much larger than its files.
    """
    leaves = _Leaves()
    encoder = Encoder(leaves.put, lambda value, path: None, leaves.put_later, columnar=True)
    tree = encoder.node(state, ())
    encoder.raise_problems()
    _require_explained(leaves.nbytes, bytes_read, where)
    return PartInput("", tree, _tensors(leaves.reads, engines, let_go), once=True)


def require_bounded_inputs(inputs: Sequence[PartInput], bytes_read: int, where: str) -> None:
    """Check the inputs of a state that was read whole, as `inputs_of_lazy` and the reading of its tensors do.

    Raises:
        InvalidInputError: its tensors are much larger than its files.
        CapabilityError: one that was expanded does not fit into memory.
    """
    tensors = [tensor for part in inputs for tensor in part.tensors]
    _require_explained(sum(tensor.spec.nbytes for tensor in tensors), bytes_read, where)
    for tensor in tensors:
        if tensor.array is not None:
            _require_memory(tensor.spec.path, tensor.array.value)


def _require_explained(nbytes: int, bytes_read: int, where: str) -> None:
    """Check that tensors are not much larger than their files: torch can expand a few bytes to any number.

    Raises:
        InvalidInputError: they are.
    """
    most = max(limits.MIN_DECODED_BYTES, MAX_CLAIMS * bytes_read)
    if nbytes > most:
        raise InvalidInputError(
            f"{where}: its tensors have {human_bytes(nbytes)} ({nbytes} bytes), expected at most {human_bytes(most)} "
            f"for {bytes_read} bytes of files, so they repeat a few bytes: save them before `expand`, or do not trust "
            "the file: it is damaged or hostile"
        )


def _tensors(
    reads: list[tuple[Path, Callable[[], Any]]], engines: Engines, let_go: Callable[[Any], None]
) -> Iterator[TensorInput]:
    reads.reverse()
    while reads:
        path, read = reads.pop()
        value = read()
        del read
        tensor = input_of(path, value, engines)
        _require_memory(path, value)
        yield tensor
        if tensor.lent:
            tensor.array = None
        let_go(value)
        del value, tensor


def _require_memory(path: Path, value: Any) -> None:
    """Check that there is memory for the copy of an array that is larger than its own memory: torch can expand it.

    Raises:
        CapabilityError: there is none.
    """
    if is_array(value):
        _, start, end = extent_of(value)
        if value.nbytes > end - start:
            advice = "a few bytes of the file are repeated: save the tensor as it was before `expand`"
            limits.require_memory(value.nbytes, f"{shown(path)}: {value.dtype}{list(value.shape)}", advice)
