"""Box map: which ranks store which boxes of the tensors of a part, so a reader opens only the manifests that it needs.

In: the boxes of each rank. Out: a few kilobytes in the header of a root manifest, and the ranks whose boxes overlap a
wanted one. Tensors with equal boxes share a pattern: the size grows with the number of patterns, not of tensors.

Invariant: a box map is advice. It decides which manifests are read first, never which bytes are used: those come from
the entries of the manifests. A wrong map costs reads, and `check` reports it (docs/format.md, "Several ranks").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ...arrays import Column, sums_before
from ...errors import FormatError
from ...text import log
from ...threads import msgpack_decoder

#: The most bytes that a packed map unpacks to. A writer leaves out patterns that do not fit. A pattern has 40 bytes for
#: each box of a matrix. So a Llama of 405 B parameters on 4,096 ranks, HSDP of 64 x 64, takes 12 MB, packed 18 KB.
MAX_BYTES = 256 * 1024 * 1024
MAX_DIMENSIONS = 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio

Box = tuple[Sequence[int], Sequence[int]]  # offsets, sizes
BoxRows = npt.NDArray[np.int64]  # (n, 1 + 2d): rank, offsets, sizes of each box, in the order of the ranks


class _PackedBoxMap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A packed box map; see docs/format.md."""

    tensors: bytes
    patterns: bytes
    columns: bytes


@dataclass(slots=True)
class BoxMap:
    """The boxes of the tensors of a part.

    Attributes:
        tensors: (t,) the number of each tensor's pattern, counted from 1; 0: the map does not cover the tensor.
        patterns: the boxes of each pattern, with the ranks that store them.
    """

    tensors: Column
    patterns: Sequence[BoxRows]
    _found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], frozenset[int]] = field(default_factory=dict)
    _of_ranks: dict[int, BoxRows] = field(default_factory=dict)  # by pattern: its boxes, by rank

    @classmethod
    def of_rank(cls, rank: int, boxes: Mapping[int, Sequence[Box]], count: int) -> BoxMap:
        """Return the map of one rank's boxes.

        Args:
            boxes: by the number of their tensor.
            count: how many tensors there are.
        """
        tensors, forms = [0] * count, dict[tuple[Box, ...], int]()
        for number, held in boxes.items():
            tensors[number] = forms.setdefault(tuple(held), len(forms) + 1)
        patterns = [np.array([(rank, *offsets, *sizes) for offsets, sizes in held], np.int64) for held in forms]
        return cls(np.array(tensors, np.int64), patterns)

    @classmethod
    def merged(cls, of_ranks: Iterable[tuple[int, BoxMap, Column]], count: int) -> BoxMap:
        """Return the map of the boxes of several ranks.

        Args:
            of_ranks: by rank, in order: the rank, its map, and the number (t,) of each of its tensors in the result.
            count: how many tensors the result has.
        """
        forms = dict[bytes, int]()  # boxes without their rank -> their number in `held`
        held, ranks, columns = [np.zeros((0, 0), np.int64)], list[int](), list[Column]()
        for rank, own, numbers in of_ranks:
            known = np.zeros(len(own.patterns) + 1, np.int64)
            for i, rows in enumerate(own.patterns, 1):
                known[i] = forms.setdefault(_key_of(rows[:, 1:]), len(held))
                if known[i] == len(held):
                    held.append(rows[:, 1:])
            columns.append(np.zeros(count, np.int64))
            columns[-1][numbers] = known[own.tensors]
            ranks.append(rank)
        table = np.ascontiguousarray(np.array(columns, np.int64).reshape(len(columns), count).T)
        keys, width = table.tobytes(), table.itemsize * len(ranks)
        tensors, found = np.zeros(count, np.int64), dict[bytes, tuple[int, BoxRows]]()
        left, left_out = MAX_BYTES - 4 * count - 1024, 0
        for number in range(count):
            key = keys[number * width : (number + 1) * width]
            if key not in found:
                rows = _rows_of(table[number], ranks, held)
                left -= rows.nbytes + 8
                if not len(rows) or left < 0:  # no rank has a box, or there is no room
                    left += rows.nbytes + 8
                    left_out += bool(len(rows))
                    continue
                found[key] = len(found) + 1, rows
            tensors[number] = found[key][0]
        if left_out:
            log.warning(
                "the map of the ranks' boxes has no room for %d of %d tensors: a restore of them opens the manifests "
                "of all ranks; fewer replicas, or larger chunk_bytes, cut them into fewer boxes",
                left_out,
                count,
            )
        return cls(tensors, [rows for _, rows in found.values()])

    def encode(self) -> bytes:
        """Return the packed map; b"" without patterns."""
        if not self.patterns:
            return b""
        forms = [((rows.shape[1] - 1) // 2, len(rows)) for rows in self.patterns]
        columns = [np.diff(rows, axis=0, prepend=0).T.astype("<i8").tobytes() for rows in self.patterns]
        packed = _PackedBoxMap(
            self.tensors.astype("<u4").tobytes(), np.array(forms, "<u4").tobytes(), b"".join(columns)
        )
        return zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(packed))

    @classmethod
    def decode(cls, data: bytes, where: str) -> BoxMap:
        """Return a map from its bytes.

        Raises:
            FormatError: it does not decode. Nothing here compares its boxes with the manifests.
        """
        try:
            size_bytes = zstandard.frame_content_size(data)
            if not 0 <= size_bytes <= MAX_BYTES:
                raise FormatError(
                    f"{where}: a box map of {size_bytes} bytes, at most {MAX_BYTES} are allowed; a newer snapstore may "
                    "read it, else it is damaged"
                )
            plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=size_bytes, allow_extra_data=False)
            packed = msgpack_decoder(_PackedBoxMap).decode(plain)
            tensors = np.frombuffer(packed.tensors, "<u4").astype(np.int64)
            forms = np.frombuffer(packed.patterns, "<u4").reshape(-1, 2).astype(np.int64)
            values = np.frombuffer(packed.columns, "<i8")
        except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise FormatError(f"{where}: its box map does not decode: {error}") from error
        widths = 1 + 2 * forms[:, 0]
        fits = (forms[:, 0] <= MAX_DIMENSIONS).all() and (forms[:, 1] <= len(values)).all()
        bounds = sums_before(widths * forms[:, 1] if fits else widths[:0])  # at most 2^25 * 129 * 2^25
        if not fits or len(values) != bounds[-1]:
            raise FormatError(f"{where}: its box map has {len(values)} numbers, its patterns have others")
        if tensors.max(initial=0) > len(forms):
            raise FormatError(f"{where}: its box map names pattern {tensors.max()} of {len(forms)}")
        return cls(tensors, _Patterns(values, widths, bounds))

    def ranks(self, tensor: int, box: Box) -> frozenset[int] | None:
        """Return the ranks that store a byte of a box of a tensor; None: not in the map."""
        pattern = int(self.tensors[tensor]) if tensor < len(self.tensors) else 0
        if not pattern:
            return None
        key = pattern, tuple(box[0]), tuple(box[1])
        if key not in self._found:
            rows, dims = self.patterns[pattern - 1], len(box[0])
            if rows.shape[1] != 1 + 2 * dims:
                return None
            offsets, sizes = rows[:, 1 : 1 + dims], rows[:, 1 + dims :]
            first, size = np.array(box[0], np.int64), np.array(box[1], np.int64)
            shared = ((offsets < first + size) & (first < offsets + sizes)).all(axis=1)
            self._found[key] = frozenset(rows[shared, 0].tolist())
        return self._found[key]

    def boxes(self, tensor: int, rank: int) -> list[list[int]] | None:
        """Return a tensor's boxes on a rank, each as [*offsets, *sizes]; None: the tensor is not in the map.

        The first call for a pattern groups its boxes by rank; later calls only look them up.
        """
        pattern = int(self.tensors[tensor]) if tensor < len(self.tensors) else 0
        if not pattern:
            return None
        if pattern not in self._of_ranks:
            rows = self.patterns[pattern - 1]
            self._of_ranks[pattern] = rows[np.argsort(rows[:, 0], kind="stable")]  # no objects: there may be millions
        rows = self._of_ranks[pattern]
        first, end = np.searchsorted(rows[:, 0], [rank, rank + 1])
        boxes: list[list[int]] = rows[first:end, 1:].tolist()
        return boxes

    def torn(self, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the numbers of the tensors whose boxes overlap or leave a part out, as far as they are in the map.

        Every index of a dimension gets a pseudorandom coordinate of 64 bits. With these coordinates, the volumes of the
        boxes modulo 2^64 add up to the tensor's volume if the boxes tile it, and otherwise almost never.

        Args:
            shapes: of all tensors.
        """
        forms = list(zip(self.tensors.tolist(), shapes, strict=True))
        torn = {form for form in set(forms) if form[0] and not self._is_whole(*form)}
        return [number for number, form in enumerate(forms) if form in torn] if torn else []

    def _is_whole(self, pattern: int, shape: tuple[int, ...]) -> bool:
        """Return whether the boxes of a pattern tile a tensor."""
        rows, dims = self.patterns[pattern - 1], len(shape)
        firsts, ends = rows[:, 1 : 1 + dims], rows[:, 1 : 1 + dims] + rows[:, 1 + dims :]
        whole = _volumes(np.zeros((1, dims), np.int64), np.array([shape], np.int64))
        return bool((_volumes(firsts, ends).sum(dtype=np.uint64) == whole).all())

    def count(self, tensor: int) -> int | None:
        """Return how many boxes a tensor has on all ranks; None: not in the map."""
        pattern = int(self.tensors[tensor]) if tensor < len(self.tensors) else 0
        if not pattern:
            return None
        patterns = self.patterns
        return patterns.count_of(pattern - 1) if isinstance(patterns, _Patterns) else len(patterns[pattern - 1])


class _Patterns(Sequence[BoxRows]):
    """Packed patterns; each is unpacked when it is read, since a few bytes may stand for millions."""

    def __init__(self, values: BoxRows, widths: Column, bounds: Column) -> None:
        self._values, self._widths, self._bounds = values, widths, bounds

    def __len__(self) -> int:
        return len(self._widths)

    def count_of(self, number: int) -> int:
        """Return how many boxes a pattern has, without unpacking it."""
        return int(self._bounds[number + 1] - self._bounds[number]) // int(self._widths[number])

    def __getitem__(self, number: int) -> BoxRows:  # type: ignore[override]
        values = self._values[self._bounds[number] : self._bounds[number + 1]]
        return np.cumsum(values.reshape(int(self._widths[number]), -1), axis=1, dtype=np.int64).T


def ranks_with(packed: bytes, wanted: Iterable[tuple[int, Box]], where: str) -> set[int]:
    """Return the ranks that store a byte of the wanted boxes, as far as a packed map knows them.

    A map that does not decode is logged and ignored; `check` reports it.

    Args:
        packed: from `BoxMap.encode`.
        wanted: the number of a tensor, and a box of it.
        where: names the map in the log.
    """
    if not packed:
        return set()
    try:
        found = BoxMap.decode(packed, where)
    except FormatError as error:
        log.warning("%s; reading without it; run 'snapstore check'", error)
        return set()
    return set().union(*(found.ranks(tensor, box) or () for tensor, box in wanted))


def _volumes(firsts: Column, ends: Column) -> npt.NDArray[np.uint64]:
    """Return the volume (n,) of each box, first indices and ends (n, d), in pseudorandom coordinates."""
    volumes: npt.NDArray[np.uint64] = np.prod(_places(ends) - _places(firsts), axis=1, dtype=np.uint64)
    return volumes


def _places(indices: Column) -> npt.NDArray[np.uint64]:
    """Return a pseudorandom coordinate of each index (n, d), another one per dimension (SplitMix64's mixer)."""
    mixed = indices.astype(np.uint64)
    mixed += np.arange(1, indices.shape[1] + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _key_of(rows: BoxRows) -> bytes:
    """Return a key of boxes (n, 2d): their bytes, and 2d, which keeps boxes without dimensions apart."""
    return bytes([rows.shape[1]]) + rows.tobytes()


def _rows_of(column: Column, ranks: Sequence[int], held: Sequence[BoxRows]) -> BoxRows:
    """Return a tensor's boxes; `column` has for each rank the number of its boxes in `held`, or 0."""
    places = np.flatnonzero(column).tolist()
    if not places:
        return np.zeros((0, 1), np.int64)
    boxes = [held[number] for number in column[places].tolist()]
    owners = np.repeat([ranks[place] for place in places], [len(one) for one in boxes])
    return np.concatenate([owners[:, None], np.concatenate(boxes)], axis=1)
