"""A state whose structure is known, as staging copies it: its tensors, grouped by where they are copied.

In: a learnt structure, and the inputs of the save from which it was learnt. Out: columns of sources for each device and
for host memory, prepared ahead because training waits for the copy; and the inputs of the next save.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Bytes, Column
from ..format.chunking import INLINE_BYTES
from ..format.manifests.boxes import strip_start
from ..state.values.arrays import Memory
from ..state.values.held_array import Held
from ..state.values.tensors import TensorSpec
from ..state.walk.learner import DifferentStructureError
from ..state.walk.structure import Match, Structure
from .inputs import BoxOf, InputKey, PartInput, TensorInput
from .replicas import Replica
from .shares import Name, names_of

if TYPE_CHECKING:
    from ..engine.cuda.sources import Sources


#: NumPy's types of words by their size [bytes].
_WORDS = {4: "<u4", 8: "<u8"}
#: Tensors in host memory of this size or more are copied by torch, with several threads [bytes]. For smaller ones, the
#: calls of torch take longer than the copy itself.
COPIED_BY_TORCH_BYTES = 128 * 1024


@dataclass(slots=True, eq=False)
class _StateTensor:
    """A tensor of the state, or a box of one, as every save of the state copies it.

    Attributes:
        key, spec, box_of: as in its `TensorInput`.
        row: the position of its tensor's spec in the structure.
    """

    key: InputKey
    spec: TensorSpec
    box_of: BoxOf | None
    row: int

    @property
    def span(self) -> tuple[int, int] | None:
        """Return the first row and the number of rows of a box; None: it is no box, or has no dimensions."""
        of = self.box_of
        return None if of is None or not of.piece.sizes else (of.piece.first_row, of.piece.sizes[0])

    def nbytes(self, whole: int) -> int:
        """Return its size [bytes]; `whole` is that of the tensor."""
        return whole if self.box_of is None else self.spec.nbytes

    def offset(self, nbytes: int) -> int:
        """Return where the bytes of a box of `nbytes` begin in its tensor, if the tensor is in one piece [bytes]."""
        return 0 if self.span is None else self.span[0] * (nbytes // self.span[1])

    def held(self, held: Held) -> Held:
        """Return the box of a tensor."""
        return held if self.box_of is None else self.box_of.piece.held(held)


class Group:
    """Tensors of a known state whose copies are made together.

    Attributes:
        rows: their positions among the slots of the state.
        at: (n,) the positions of their tensors among those of a match.
        is_in_pieces: (n,) bool, whether each must first be made contiguous.
        keys, nbytes: of these; the same objects at every save.
        offsets: (n,) where their boxes begin in their tensors [bytes].
    """

    def __init__(
        self, structure: Structure, slots: Sequence[_StateTensor], rows: Sequence[int], at: Sequence[int]
    ) -> None:
        chosen = [slots[row] for row in rows]
        self.rows, self._slots = list(rows), chosen
        self.at = np.array(at, np.int64)
        self.keys = [slot.key for slot in chosen]
        self.nbytes: Column = structure.nbytes[self.at]
        self.offsets: Column = np.zeros(len(chosen), np.int64)
        if any(slot.box_of is not None for slot in chosen):
            self.nbytes = _column(slot.nbytes(n) for slot, n in zip(chosen, self.nbytes.tolist(), strict=True))
            self.offsets = _column(slot.offset(n) for slot, n in zip(chosen, self.nbytes.tolist(), strict=True))
        self._specs = [structure.specs[slot.row] for slot in chosen]
        self.is_in_pieces: Column = np.isin(self.at, structure.in_pieces)

    def take(self, which: Column) -> Group:
        """Return those at some positions (k,)."""
        made = copy(self)
        made.rows, made._slots, made.keys, made._specs = (
            [column[i] for i in which.tolist()] for column in (self.rows, self._slots, self.keys, self._specs)
        )
        made.at, made.nbytes, made.offsets = self.at[which], self.nbytes[which], self.offsets[which]
        made.is_in_pieces = self.is_in_pieces[which]
        return made

    def strip_starts(self) -> Iterator[int]:
        """Yield where each of these begins in its strip [bytes]; see `boxes.strip_start`."""
        for slot in self._slots:
            of = slot.box_of
            yield 0 if of is None else strip_start(of.piece.offsets, slot.spec.shape, slot.spec.itemsize)

    def held(self, match: Match) -> Iterator[tuple[int, Held]]:
        """Yield the position and the array of each of these."""
        for i, row in enumerate(self.rows):
            yield row, self._slots[i].held(Held(match.tensors[self.at[i]], self._specs[i]))

    def sources(self, device: Any, match: Match) -> Sources:
        """Return the tensors for `engine.cuda.staging`; the match keeps their memory."""
        from ..engine.cuda.sources import Sources

        return Sources(
            device,
            self.keys,
            self.nbytes,
            partial(self._taken, match),
            self._addresses(match),
            np.flatnonzero(self.is_in_pieces).tolist(),
            keep=match,
        )

    def copy_to_host(self, match: Match, room: Callable[[InputKey, int], Bytes]) -> list[Bytes]:
        """Copy these, which lie in host memory, into buffers that `room` gives by key and size [bytes].

        The bytes count only after `match.confirm`.
        """
        copies = list(map(room, self.keys, self.nbytes.tolist()))
        places = [copy.__array_interface__["data"][0] for copy in copies]
        deque(map(_memmove, places, self._addresses(match).tolist(), self.nbytes.tolist()), maxlen=0)
        return copies

    def views(self, match: Match) -> list[Bytes]:
        """Return the memory of these, which lie in host memory. It is valid if a later `match.confirm` accepts it."""
        addresses = self._addresses(match).tolist()
        return [np.asarray(_MemorySpan(*of, "|u1")) for of in zip(addresses, self.nbytes.tolist(), strict=True)]

    def _addresses(self, match: Match) -> Column:
        """Return where these begin."""
        return match.addresses[self.at] + self.offsets

    def _taken(self, match: Match, i: int) -> Any:
        """Return an alias of one of these.

        Raises:
            InvalidInputError: it has another dtype or shape since the match.
            DifferentStructureError: it has other strides since then: a part of it may have been copied already.
        """
        k, span = int(self.at[i]), self._slots[i].span
        form = match.structure.forms[k]
        _require_form(match.tensors[k], form)  # first: for `take` it would be an error
        whole = Held(match.tensors[k], self._specs[i]).take()
        _require_form(whole, form)
        return whole if span is None else whole.narrow(0, *span)


def _require_form(tensor: Any, form: tuple[Any, ...]) -> None:
    """Raise DifferentStructureError if a tensor has other strides, or is another kind of view, than in a structure."""
    if (tensor.stride(), tensor.is_conj(), tensor.is_neg()) != form:
        raise DifferentStructureError


class SmallCopies:
    """Small tensors of host memory that are stored, hashed, or both: each is copied once.

    Args:
        stored: the tensors, or the boxes of tensors, to be stored.
        hashed: the replicas to be hashed, each whole.
    """

    def __init__(self, stored: Group, hashed: Group) -> None:
        place = {k: i for i, k in enumerate(hashed.at.tolist())}
        more = np.array([k not in place for k in stored.at.tolist()], bool)
        self._at = np.concatenate([hashed.at, stored.at[more]])
        self._offsets = np.concatenate([hashed.offsets, stored.offsets[more]])
        self._nbytes = np.concatenate([hashed.nbytes, stored.nbytes[more]])
        starts = np.cumsum(self._nbytes) - self._nbytes
        firsts = np.empty(len(stored.at), np.int64)
        firsts[more] = starts[len(hashed.at) :]
        both = [place[k] for k in stored.at[~more].tolist()]
        firsts[~more] = starts[both] + stored.offsets[~more]
        self._stored = list(zip(firsts.tolist(), (firsts + stored.nbytes).tolist(), strict=True))
        starts = starts[: len(hashed.at)]
        self._hashed = list(zip(starts.tolist(), (starts + hashed.nbytes).tolist(), strict=True))

    def copy(self, match: Match) -> tuple[Callable[[], list[Bytes]], Callable[[int], Bytes]]:
        """Copy them; return two functions: of all bytes to store, and of the i-th bytes to hash, (nbytes,) uint8 each.

        The bytes count only after `match.confirm`.
        """
        together = copy_addresses(match.addresses[self._at] + self._offsets, self._nbytes)
        stored, hashed = self._stored, self._hashed
        return lambda: [together[first:end] for first, end in stored], lambda i: together[slice(*hashed[i])]


def copy_addresses(addresses: Column, sizes: Column) -> Bytes:
    """Copy memory at addresses (n,), of sizes (n,), one piece after the other; return it as (bytes,) uint8."""
    size = int(sizes[0]) if len(sizes) else 0
    if size not in _WORDS or (sizes != size).any() or (addresses % size).any():
        return np.frombuffer(bytearray().join(map(ctypes.string_at, addresses.tolist(), sizes.tolist())), np.uint8)
    first = int(addresses.min())  # one gather from a view of all memory between them: it reads only these words
    words = np.asarray(_MemorySpan(first, (int(addresses.max()) - first) // size + 1, _WORDS[size]))
    together: Bytes = words[(addresses - first) // size].view(np.uint8)
    return together


#: C's memmove, which keeps Python's lock here. With `ctypes.memmove`, each copy would wait for a busy thread to release
#: the lock, up to 5 ms.
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.pythonapi)
)


class _MemorySpan:
    """A span of memory as NumPy sees it; `__array_interface__` is NumPy's protocol for this."""

    def __init__(self, address: int, count: int, kind: str) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, True), "shape": (count,), "typestr": kind}


class Groups:
    """Slots of a known state by how their bytes are read.

    Attributes:
        on_devices: the tensors on a device with an engine, by device.
        small: the tensors in host memory that are stored inline.
        on_host: the larger ones there that are copied by their addresses.
        others: all other tensors of a match.
    """

    def __init__(self, structure: Structure, slots: Sequence[_StateTensor], has_engine: Callable[[Any], bool]) -> None:
        self._slots = slots
        self._slots_of_row: dict[int, list[int]] = defaultdict(list)
        for i, slot in enumerate(slots):
            self._slots_of_row[slot.row].append(i)
        groups: dict[Any, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        has_engines = {device: has_engine(device) for device in set(structure.devices)}
        columns = (structure.rows, structure.devices, structure.nbytes.tolist())
        for k, (row, device, nbytes) in enumerate(zip(*columns, strict=True)):
            for i in self._slots_of_row.get(row, ()):
                rows, at = groups[device if has_engines[device] else _host_group(device, slots[i].nbytes(nbytes))]
                rows.append(i)
                at.append(k)
        made = {name: Group(structure, slots, *chosen) for name, chosen in groups.items()}
        nothing = Group(structure, (), (), ())
        self.small, self.on_host, self.others = (made.pop(name, nothing) for name in ("small", "on_host", "others"))
        self.on_devices = made

    def held(self, match: Match) -> Iterator[tuple[int, Held]]:
        """Yield the position and the array of each slot that is read by itself."""
        yield from self.others.held(match)
        for row, held in match.others:
            for i in self._slots_of_row.get(row, ()):
                yield i, self._slots[i].held(held)


class KnownState:
    """A structure, and the groups in which staging copies its tensors.

    Args:
        inputs: of the save from which the structure was learnt.
        has_engine: whether a device has an engine.

    Attributes:
        keys: of the slots: the tensors of the state, or the boxes that a rank stores.
        copied: these slots, in groups.
        hashed: the replicas among the tensors, in groups.
        small: the small tensors of both in host memory.
    """

    def __init__(self, structure: Structure, inputs: Sequence[PartInput], has_engine: Callable[[Any], bool]) -> None:
        self.structure = structure
        rows = _rows_by_name(structure)
        self._slots = [
            _StateTensor(tensor.key, tensor.spec, tensor.box_of, rows[tensor.key[:3]])
            for part in inputs
            for tensor in part.tensors
        ]
        self._parts = [replace(part, tree=None, tensors=(), replicas=()) for part in inputs]
        self._counts = [(len(list(part.tensors)), len(part.replicas)) for part in inputs]
        self.keys = [slot.key for slot in self._slots]
        self.copied = Groups(structure, self._slots, has_engine)
        replicas = [one for part in inputs for one in part.replicas]
        hashed = [_StateTensor(one.name, structure.specs[rows[one.name]], None, rows[one.name]) for one in replicas]
        self.hashed = Groups(structure, hashed, has_engine)
        self.small = SmallCopies(self.copied.small, self.hashed.small)
        self._replicas = [(one.name, one.group, None, one.is_buffer) for one in replicas]

    def inputs(
        self,
        match: Match,
        copies: Sequence[tuple[Sequence[int], Callable[[], Sequence[Memory]]]],
        digests: Sequence[tuple[Sequence[int], Callable[[int], Bytes]]],
        unchanged: Mapping[int, Bytes],
    ) -> list[PartInput]:
        """Return the inputs of a save.

        Args:
            copies: positions of slots, and a function that returns their bytes.
            digests: positions of replicas, and a function that returns the digests of the i-th of these.
            unchanged: positions of slots that were not copied, and the digests of their chunks (k, 16).
        """
        tensors = [TensorInput(slot.key, slot.spec, None, box_of=slot.box_of) for slot in self._slots]
        for rows, memories in copies:
            for row, memory in zip(rows, memories(), strict=True):
                tensors[row].copy = memory
        if unchanged:
            for group in self.copied.on_devices.values():
                for row, held in group.held(match):
                    if row in unchanged:
                        tensors[row].array, tensors[row].digests = held, unchanged[row]
        rest = iter(tensors)
        given = {row: partial(give, i) for of, give in digests for i, row in enumerate(of)}
        replicas = iter([Replica(*known, given.get(i)) for i, known in enumerate(self._replicas)])
        return [
            replace(
                part,
                tree=match.trees[part.key],
                tensors=list(islice(rest, count)),
                replicas=list(islice(replicas, hashed)),
            )
            for part, (count, hashed) in zip(self._parts, self._counts, strict=True)
        ]


def _rows_by_name(structure: Structure) -> dict[Name, int]:
    """Return the position of each tensor among the specs of a structure; the keys of inputs begin with these names."""
    found: dict[Name, int] = {}
    for key, rows in structure.rows_of.items():
        found.update(zip(names_of(key, structure.specs[rows.start : rows.stop]), rows, strict=True))
    return found


def _host_group(device: Any, nbytes: int) -> str:
    """Return the group of a tensor on a device without an engine: an attribute of `Groups`."""
    if device.type != "cpu" or nbytes >= COPIED_BY_TORCH_BYTES:
        return "others"
    return "small" if nbytes < INLINE_BYTES else "on_host"


def _column(numbers: Iterable[int]) -> Column:
    return np.fromiter(numbers, np.int64)
