"""Inputs of a save: the checked request, and each tensor as one object on its way to the store.

In: what the caller asks for, and the parts that `state.flatten` gives. Out: a `SaveRequest`, and the parts as
`PartInput`s: staging, the chunk writer and the manifest writer read and fill in their tensors.

Invariant: a save owns its inputs, and one thread at a time uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, SupportsFloat

import msgspec

from ..arrays import Bytes
from ..context import Context
from ..errors import InvalidInputError
from ..format.argument_checks import check_metrics, check_name, check_step, check_tags, encode_metadata
from ..state.arrays import Memory
from ..state.flatten import Part
from ..state.held_array import Held
from ..state.metrics import Read
from ..state.tensors import Node, TensorSpec
from .lineage import Lineage

#: Part, path, and which of the tensors with that path: keys such as 1.0 and "1.0" look alike in a path.
Key = tuple[str, tuple[str | int, ...], int]


@dataclass(slots=True)
class SaveRequest:
    """The arguments of `Repository.save` and `SnapshotManager.save`, checked. See there for their meaning.

    Attributes:
        started: when the caller began [s, time.monotonic].
        stall_s: how long the caller waited; None: until the commit.

    Raises:
        InvalidInputError: an argument cannot be saved.
    """

    run: str
    step: int
    parent: str | None = None
    bases: Sequence[str] = ()
    metrics: InitVar[Mapping[str, SupportsFloat] | None] = None
    metadata: Any = None
    tags: Sequence[str] = ()
    full: bool = False
    started: float = field(default_factory=time.monotonic)
    stall_s: float | None = None
    metadata_node: msgspec.Raw = field(init=False)
    _metrics: dict[str, Read] = field(init=False)

    def __post_init__(self, metrics: Mapping[str, SupportsFloat] | None) -> None:
        check_name("run", self.run)
        for name, given in (("tags", self.tags), ("bases", self.bases)):
            if isinstance(given, str):
                raise InvalidInputError(f"{name} {given!r}: expected a list of str, got one str")
        self.step = check_step(self.step)
        self.tags = check_tags(self.tags)
        self._metrics = check_metrics(metrics or {})
        self.metadata_node = encode_metadata(self.metadata)

    def read_metrics(self) -> dict[str, float]:
        """Return the metrics; wait until devices have computed them."""
        return {name: read() for name, read in self._metrics.items()}

    def resolve(self, context: Context, lineage: Lineage) -> None:
        """Replace the references of parent and bases by ids; without a parent, take the one that the lineage knows.

        Raises:
            NotFoundError, InvalidInputError: a reference names nothing, or several snapshots.
        """
        context.index.check_process()
        view = context.index.refresh() if self.parent or self.bases else None
        self.bases = [view.resolve(ref).id for ref in self.bases] if view else []
        self.parent = view.resolve(self.parent).id if self.parent and view else lineage.parent(self.run)


@dataclass(slots=True, eq=False)
class TensorInput:
    """A tensor on its way to the store.

    Attributes:
        key: its name, the same in the next save.
        spec: its path, kind, dtype and shape.
        array: the caller's array; None once its bytes are copied.
        copy: its bytes, (nbytes,) uint8, as staging copied them; None: the caller's memory is read.
        base: its bytes in the prior snapshot, (nbytes,) uint8, if they are cached.
        keep_in: where its bytes go once `base` is no longer needed, (nbytes,) uint8, or None. It may be `base`.
        lent: whether the caller may change or free the memory as soon as the chunk writer has added the tensor.
        may_delta: whether deltas are tried.
        bases_tried, deltas_stored: how many of its chunks had a base, and how many became deltas.
    """

    key: Key
    spec: TensorSpec
    array: Held | None
    copy: Memory | None = None
    base: Memory | None = None
    keep_in: Bytes | None = None
    lent: bool = False
    may_delta: bool = True
    bases_tried: int = 0
    deltas_stored: int = 0

    @property
    def delta_rejected(self) -> bool:
        """Whether bases were tried and no delta was worth storing."""
        return self.bases_tried > 0 and not self.deltas_stored

    def data(self, memory_of: Callable[[Any], Memory]) -> Memory:
        """Return the bytes, (nbytes,) uint8: the copy, or the caller's memory as `memory_of` gives it.

        Raises:
            InvalidInputError: the array is not the one that was flattened.
        """
        if self.array is None or self.copy is not None:
            return self.copy
        return self.array.memory(memory_of)

    def confirm(self) -> None:
        """Check that the caller's memory is still this tensor's; a copy needs no check.

        Raises:
            InvalidInputError: it is not.
        """
        if self.copy is None and self.array is not None:
            self.array.confirm()


@dataclass(slots=True, eq=False)
class PartInput:
    """One part of a state on its way to the store; see `state.flatten.Part`.

    Attributes:
        tensors: in order. Those of an iterator (streaming.py) are made one at a time; `tree` is complete after them.
        once: whether `tensors` can be gone through only once.
    """

    name: str
    tree: Node
    tensors: Iterable[TensorInput]
    once: bool = False


def inputs_of(parts: Sequence[Part]) -> list[PartInput]:
    """Return the parts of a flattened state as inputs; nothing is copied."""
    return [PartInput(part.name, part.tree, list(_tensors(part))) for part in parts]


def _tensors(part: Part) -> Iterator[TensorInput]:
    seen: dict[tuple[str | int, ...], int] = {}
    for spec, array in zip(part.specs, part.arrays, strict=True):
        number = seen[spec.path] = seen.get(spec.path, -1) + 1
        yield TensorInput((part.name, spec.path, number), spec, array)
