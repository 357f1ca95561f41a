"""Lazy tensors: the tensors of a snapshot by name, read in slices.

In: a reference. Out: a mapping of dotted paths to handles, which know shape and dtype and read nothing until they are
indexed. A slice reads only the chunks that hold elements of it, and checks each against its digest. It makes no
difference whether one process or several ranks saved the tensor: the boxes of the ranks are put together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import index as as_int
from types import EllipsisType
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from ..arrays import Bytes
from ..chunks import limits
from ..chunks.reader import ChunkReader
from ..context import Context
from ..errors import FormatError, IntegrityError, InvalidInputError, out_of_memory
from ..format.manifests import boxes
from ..format.records import Snapshot
from ..restore.overlaps import Overlap, Reads, StoredBox, dim_orders_of, overlap_of
from ..restore.pipeline import require_decoding_of
from ..restore.streaming import OpenSnapshot
from ..state.fill.buffers import Want
from ..state.fill.fit import Fit
from ..state.values.arrays import as_bytes, from_bytes, new_array, require_memory_of_tensors
from ..state.values.tensors import DimOrder
from ..text import counted, quoted

#: A selection with steps is read in boxes of at most this size [bytes]; one without steps is read in one box.
PIECE_BYTES = 64 * 1024 * 1024
T = TypeVar("T")
TensorIndex = Any  # an int, a slice, an ellipsis, or a tuple of these


def open_tensors(context: Context, ref: str, *, keys: str | Sequence[str] | Fit | None = None) -> LazyTensors:
    """Return the tensors of a snapshot as handles; only the manifests of parts that `keys` can match are read.

    Raises:
        NotFoundError: the reference or a key names nothing.
        InvalidInputError: two tensors have the same dotted path.
        IntegrityError, FormatError: the snapshot is damaged.
    """
    opened = OpenSnapshot.of(context, ref, keys)
    reader, handles = _ReopeningReader(context, opened), dict[str, TensorHandle]()
    for named in opened.places:
        for name, slot in named:
            if name in handles:
                raise InvalidInputError(
                    f"{opened.snapshot.ref}: two tensors have the path {name!r}; read them with named_tensors"
                )
            handles[name] = TensorHandle(name, reader, slot, opened.spec(slot))
    return LazyTensors(opened.snapshot, handles)


class LazyTensors(Mapping[str, "TensorHandle"]):
    """The tensors and arrays of one snapshot, by dotted path, in the order in which they were saved.

    They can still be read after the snapshot was rewritten. Any thread may use them.

    Attributes:
        snapshot: the revision that the reference named.
    """

    def __init__(self, snapshot: Snapshot, handles: dict[str, TensorHandle]) -> None:
        self.snapshot, self._handles = snapshot, handles

    def __getitem__(self, name: str) -> TensorHandle:
        return self._handles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def __repr__(self) -> str:
        return f"LazyTensors({self.snapshot.ref!r}, {counted(len(self), 'tensor')})"


class _ReopeningReader:
    """Reads chunks of a snapshot, and continues if it is rewritten meanwhile."""

    def __init__(self, context: Context, opened: OpenSnapshot) -> None:
        self._context, self._opened, self._lock = context, opened, threading.Lock()
        self.ref = opened.snapshot.ref

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and deep copies of handles, for which a worker of a DataLoader that is spawned asks."""
        raise TypeError(
            f"lazy tensors of {self.ref} cannot be pickled or copied; in the process that reads them, open the "
            f"repository and call tensors({self.ref!r})"
        )

    def run(self, action: Callable[[OpenSnapshot], T]) -> T:
        """Return the result of an action on the open snapshot; if that was rewritten meanwhile, open it and repeat."""
        while True:
            opened = self._opened
            try:
                return action(opened)
            except (IntegrityError, FormatError) as error:
                with self._lock:
                    if self._opened is opened:  # else another thread was first
                        self._opened = opened.reopened(error)
            finally:
                self._context.engines.release_memory()

    def fill(self, overlaps: Sequence[Overlap], home: Bytes) -> None:
        """Read the chunks of overlaps, and copy the wanted bytes into `home`."""
        context = self._context
        require_decoding_of(context, {Want(0, 0): overlaps}, f"{self.ref}: reading")
        reads = Reads(lambda memory, nbytes: context.engines.of(memory).empty(nbytes))
        wanted = chain.from_iterable(reads.of(overlap, home) for overlap in overlaps)
        for count in ChunkReader(context).rebuild(wanted):
            reads.arrived(count)
        reads.arrived(0)


class TensorHandle:
    """One stored tensor or array. Only an index (`handle[10:20, :]`), `read()` and `read_bytes()` read its values.

    An index is ints, slices with positive steps and `...`, as in NumPy. If it has no ints, the result has the layout in
    memory of the tensor that was saved (channels_last, say). Tensors come as torch.Tensor in host memory
    without a gradient, arrays as numpy.ndarray.

    Attributes:
        name: dotted path.
        kind: "tensor", "parameter" or "array".
        dtype: torch's name ("bfloat16") or NumPy's `dtype.str` ("<f4").
        shape: of the whole tensor.
    """

    def __init__(self, name: str, reader: Any, slot: Any, spec: Any) -> None:
        self._reader, self._slot, self._spec = reader, slot, spec
        self.name: str = name
        self.kind: str = self._spec.kind
        self.dtype: str = self._spec.dtype
        self.shape: tuple[int, ...] = self._spec.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return int(self._spec.nbytes)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name}: a tensor without dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"TensorHandle({self.name!r}, {self.dtype}, {list(self.shape)})"

    def read(self) -> Any:
        """Return the whole tensor or array; raise what `__getitem__` raises."""
        return self[...]

    def __getitem__(self, index: TensorIndex) -> Any:
        """Return the selected elements.

        Raises:
            IndexError: an int is out of range, or the index has more elements than there are dimensions.
            InvalidInputError: the index has None, a list, a mask or a step below 1; or tensors have no memory here, as
                under FakeTensorMode.
            NotFoundError: the snapshot was deleted meanwhile.
            IntegrityError, FormatError: a chunk is damaged.
            CapabilityError: there is no memory for the result, or it must decode more than the limits allow.
        """
        ranges, kept = _selected(index, self.shape, self.name)
        shape = tuple(len(of) for of, keep in zip(ranges, kept, strict=True) if keep)
        spec = msgspec.structs.replace(self._spec, shape=shape)
        what = f"{self._reader.ref}: reading {self.name}"
        require_memory_of_tensors(what)
        limits.require_memory(spec.nbytes, what)
        with out_of_memory(what, "read less of it at a time"):
            value = new_array(spec, None)
            if spec.nbytes:
                order = self._reader.run(lambda opened: self._read(opened, ranges, as_bytes(value)))
                if order and all(kept):
                    limits.require_memory(spec.nbytes, what)
                    value = from_bytes(as_bytes(value), msgspec.structs.replace(spec, dim_order=order), None)
        return value

    def read_bytes(self, first: int, end: int) -> Bytes:
        """Return the bytes [first, end) of the tensor in C order, (end - first,) uint8.

        Raises:
            InvalidInputError: the bounds are no integers, or not 0 <= first <= end <= nbytes.
            NotFoundError, IntegrityError, FormatError, CapabilityError: as `__getitem__` raises them.
        """
        try:
            first, end = as_int(first), as_int(end)
        except TypeError as error:
            raise InvalidInputError(f"{self.name}: bytes {first!r:.40} to {end!r:.40}: expected integers") from error
        if not 0 <= first <= end <= self.nbytes:
            raise InvalidInputError(f"{self.name}: bytes {first} to {end} of {self.nbytes}")
        itemsize = self._spec.itemsize
        begin, stop = first // itemsize, -(-end // itemsize)
        what = f"{self._reader.ref}: reading {self.name}"
        limits.require_memory((stop - begin) * itemsize, what)
        with out_of_memory(what, "read less of it at a time"):
            home = np.empty((stop - begin) * itemsize, np.uint8)
            if first < end:
                self._reader.run(lambda opened: self._read_span(opened, begin, stop, home))
        return home[first - begin * itemsize : end - begin * itemsize]

    def _read(self, opened: OpenSnapshot, ranges: Sequence[range], home: Bytes) -> DimOrder:
        """Read a selection, which is not empty, into `home` of its size; return the tensor's dimension order."""
        order: DimOrder = ()
        itemsize = self._spec.itemsize
        there = home.view(f"V{itemsize}").reshape(tuple(map(len, ranges)))
        for place, piece in _pieces(ranges, itemsize):
            offsets, sizes = tuple(of[0] for of in piece), tuple(of[-1] - of[0] + 1 for of in piece)
            steps = [of.step if len(of) > 1 else 1 for of in piece]
            want = Want(self._slot.part, self._slot.index, ((offsets, sizes),))
            overlaps = opened.sources.overlaps([want])[want]
            order = dim_orders_of({want: overlaps}).get(want, ())
            if max(steps, default=1) == 1 and there[place].size == there.size:
                self._reader.fill(overlaps, home)
                continue
            box = np.empty(math.prod(sizes) * itemsize, np.uint8)
            self._reader.fill(list(_only(overlaps, steps)), box)
            there[place] = box.view(there.dtype).reshape(sizes)[tuple(slice(None, None, step) for step in steps)]
        return order

    def _read_span(self, opened: OpenSnapshot, begin: int, stop: int, home: Bytes) -> None:
        """Read the elements [begin, stop) in C order into `home`; begin < stop."""
        wanted = tuple(boxes.span_boxes(begin, stop, self.shape)) if self.shape else None
        want = Want(self._slot.part, self._slot.index, wanted)
        overlaps = opened.sources.overlaps([want])[want]
        stored = overlaps[0].stored
        if tuple(stored.sizes) == self.shape:  # the tensor lies in one box: read it as flat, so no chunk is read twice
            flat = StoredBox(stored.m, [0], [self.size], stored.first_chunk, stored.chunks, stored.inline)
            overlap = overlap_of(flat, ([begin], [stop - begin]), self._spec.itemsize, 0)
            overlaps = [overlap] if overlap is not None else []
        self._reader.fill(overlaps, home)


def _selected(index: TensorIndex, shape: Sequence[int], name: str) -> tuple[list[range], list[bool]]:
    """Return the positions that an index selects in each dimension, and whether the result has that dimension."""
    given = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, one in enumerate(given) if isinstance(one, EllipsisType)]
    if len(dots) > 1:
        raise IndexError(f"{name}: an index has at most one ellipsis")
    missing = len(shape) - len(given) + len(dots)
    if missing < 0:
        raise IndexError(f"{name}: {len(given) - len(dots)} indices for {counted(len(shape), 'dimension')}")
    at = dots[0] if dots else len(given)
    given[at : at + 1] = [slice(None)] * missing
    ranges = [_range(one, size, name) for one, size in zip(given, shape, strict=True)]
    return ranges, [isinstance(one, slice) for one in given]


def _range(one: Any, size: int, name: str) -> range:
    """Return the positions that an int or a slice selects in one dimension."""
    if isinstance(one, slice):
        try:
            found = range(*one.indices(size))
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"{name}: index {one}: {error}") from error
        if found.step < 1:
            raise InvalidInputError(f"{name}: index {one}: expected a step of 1 or more; read it, then flip the result")
        return found
    # torch gives an int for any tensor of one element, also for a mask and for a list of positions
    is_list = getattr(one, "ndim", 0) or str(getattr(one, "dtype", "")) == "torch.bool"
    try:
        place = as_int(one) if not is_list and not isinstance(one, bool | np.bool_) else None
    except TypeError:
        place = None
    if place is None:
        raise InvalidInputError(
            f"{name}: index {quoted(one)}: expected ints, slices and an ellipsis; read a slice, then index the result"
        )
    if not -size <= place < size:
        raise IndexError(f"{name}: index {place} is out of range of a dimension of {size}")
    return range(place % size, place % size + 1)


def _pieces(ranges: Sequence[range], itemsize: int) -> Iterator[tuple[tuple[slice, ...], list[range]]]:
    """Yield (place in the result, positions in each dimension) of pieces that are read one after the other.

    A piece is read with everything that lies between its elements.
    """
    todo = [([slice(0, len(of)) for of in ranges], list(ranges))]
    while todo:
        place, piece = todo.pop()
        around = math.prod(of[-1] - of[0] + 1 for of in piece)
        if around * itemsize <= PIECE_BYTES or around == math.prod(map(len, piece)):
            yield tuple(place), piece
            continue
        at = next(at for at, of in enumerate(piece) if len(of) > 1)
        middle = len(piece[at]) // 2
        for part in (slice(middle, len(piece[at])), slice(0, middle)):
            own = slice(place[at].start + part.start, place[at].start + part.stop)
            todo.append(([*place[:at], own, *place[at + 1 :]], [*piece[:at], piece[at][part], *piece[at + 1 :]]))


def _only(overlaps: Sequence[Overlap], steps: Sequence[int]) -> Iterator[Overlap]:
    """Yield the overlaps, each with only the chunks that hold elements of every step-th row of the wanted box."""
    for overlap in overlaps:
        if not overlap.stored.chunks:
            yield overlap
            continue
        skipped = [-at % step for at, step in zip(overlap.target_at[:-1], steps, strict=True)]
        counts = [
            (size - skip - 1) // step + 1 for size, skip, step in zip(overlap.sizes, skipped, steps, strict=False)
        ]
        at = [start + skip for start, skip in zip(overlap.stored_at, skipped, strict=False)]
        if min(counts, default=1) < 1:
            continue
        around = [*at, 0], [*counts, overlap.sizes[-1]], overlap.stored_sizes, [*steps, 1]
        before, behind = (
            boxes.counts_before(places, *around) for places in (overlap.starts, overlap.starts + overlap.lengths)
        )
        yield replace(overlap, rows=overlap.rows[behind > before], starts=overlap.starts[behind > before])
