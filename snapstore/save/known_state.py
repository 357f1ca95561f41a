"""A state whose structure is known, as staging copies it: its tensors by where their copies will lie.

In: a learnt structure and the inputs of the save that taught it. Out: columns of sources for each device, and for host
memory, that cost nothing to make while the training waits; and the inputs of the next save.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Bytes, Column
from ..format.chunking import INLINE_BYTES
from ..state.arrays import Memory
from ..state.structure import Match, Structure
from .inputs import Key, PartInput, TensorInput

if TYPE_CHECKING:
    from ..engine.cuda.staging import Sources


#: NumPy's types of words by their size [bytes].
_WORDS = {4: "<u4", 8: "<u8"}


class Group:
    """Tensors of a known state whose copies are made together.

    Attributes:
        rows: their positions among all tensors of the state.
        at: (n,) their positions among the tensors of a match.
        keys, nbytes: of these tensors; the same objects at every save.
    """

    def __init__(self, structure: Structure, keys: Sequence[Key], at: Sequence[int]) -> None:
        self.rows = [structure.rows[k] for k in at]
        self.at = np.array(at, np.int64)
        self.keys = [keys[row] for row in self.rows]
        self.nbytes: Column = structure.nbytes[self.at]
        in_pieces = set(structure.in_pieces)
        self._in_pieces = [row for row, k in enumerate(at) if k in in_pieces]

    def tensors(self, match: Match) -> list[Any]:
        """Return these tensors of a match."""
        return [match.tensors[k] for k in self.at.tolist()]

    def sources(self, device: Any, match: Match) -> Sources:
        """Return the tensors for `engine.cuda.staging`; the match keeps their memory."""
        from ..engine.cuda.staging import Sources

        addresses = match.addresses[self.at]
        return Sources(device, self.keys, match.tensors, self.nbytes, self.at, addresses, self._in_pieces, match)

    def copy_small(self, match: Match) -> Callable[[], list[Bytes]]:
        """Copy tensors of host memory; return a function that gives their bytes, (nbytes,) uint8 each.

        Args:
            match: confirmed; it keeps the memory.
        """
        together = copy_addresses(match.addresses[self.at], self.nbytes)

        def views() -> list[Bytes]:
            ends = np.cumsum(self.nbytes)
            return np.split(together, ends[:-1]) if len(ends) else []

        return views


def copy_addresses(addresses: Column, sizes: Column) -> Bytes:
    """Copy memory at addresses (n,), of sizes (n,), one piece behind the other; return it as (bytes,) uint8."""
    size = int(sizes[0]) if len(sizes) else 0
    if size not in _WORDS or (sizes != size).any() or (addresses % size).any():
        return np.frombuffer(bytearray().join(map(ctypes.string_at, addresses.tolist(), sizes.tolist())), np.uint8)
    first = int(addresses.min())  # one gather from a view of all memory between them, which reads these words only
    words = np.asarray(_Memory(first, (int(addresses.max()) - first) // size + 1, _WORDS[size]))
    together: Bytes = words[(addresses - first) // size].view(np.uint8)
    return together


class _Memory:
    """A span of memory as NumPy sees it; `__array_interface__` is NumPy's protocol for this."""

    def __init__(self, address: int, count: int, kind: str) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, True), "shape": (count,), "typestr": kind}


class KnownState:
    """A structure, and what staging has worked out about it.

    Args:
        inputs: of the save from which the structure was learnt.
        has_engine: whether a device has an engine.

    Attributes:
        on_devices: the tensors that a device copies, by device.
        small: tensors in host memory that are stored inline.
        others: all other tensors of a match.
    """

    def __init__(self, structure: Structure, inputs: Sequence[PartInput], has_engine: Callable[[Any], bool]) -> None:
        self.structure = structure
        self.keys = [tensor.key for part in inputs for tensor in part.tensors]
        groups: dict[Any, list[int]] = defaultdict(list)
        for k, (device, nbytes) in enumerate(zip(structure.devices, structure.nbytes.tolist(), strict=True)):
            is_small = device.type == "cpu" and nbytes < INLINE_BYTES
            groups[device if has_engine(device) else "small" if is_small else "others"].append(k)
        self.small = Group(structure, self.keys, groups.pop("small", []))
        self.others = Group(structure, self.keys, groups.pop("others", []))
        self.on_devices = {device: Group(structure, self.keys, at) for device, at in groups.items()}

    def inputs(
        self, match: Match, copies: Sequence[tuple[Sequence[int], Callable[[], Sequence[Memory]]]]
    ) -> list[PartInput]:
        """Return the inputs of a save.

        Args:
            copies: rows, and what gives the bytes of these tensors.
        """
        specs = self.structure.specs
        tensors = [TensorInput(key, spec, None) for key, spec in zip(self.keys, specs, strict=True)]
        for rows, memories in copies:
            for row, memory in zip(rows, memories(), strict=True):
                tensors[row].copy = memory
        rest = iter(tensors)
        return [
            PartInput(name, match.trees[name], list(islice(rest, count)))
            for name, count in self.structure.sizes.items()
        ]
