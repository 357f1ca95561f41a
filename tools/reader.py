"""Restores the snapshots of a local repository from docs/format.md alone: nothing of snapstore is imported.

    python tools/reader.py REPOSITORY [--id ID]

Prints one JSON line for each snapshot: its record, and every container and leaf of its state by path, with the SHA-256
of every array; of a snapshot of several ranks, the state of each rank. It is a second opinion about the format: it
refuses an object that breaks a rule of the page, and compares every checksum, digest and SHA-256 that it passes. It is
slow, and reads every object whole. It reads no S3 and no planes of nvCOMP, and takes no part in saves, gc or repair.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import pathlib
import re
import stat
import struct
import sys
import types
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import xxhash
import zstandard

KNOWN_FEATURES = {"ranks", "strides", "parameter_shapes", "xor"}
SMALL_OBJECT, METADATA, CHUNK, INLINE, BOX_MAP = 64 << 20, 1 << 20, 64 << 20, 16 << 20, 256 << 20
SPARSE = 1 << 24  # elements
DEPTH, CHAIN, SAME_HASH, NESTING = 200, 255, 256, 96
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
RECORD_KEY = re.compile(f"snapshots/({NAME})/" + r"(\d{12})-([0-9a-f]{32})\.(0|[1-9]\d{0,8})")
PAGE_KEY = re.compile(f"pages/({NAME})/" + r"(\d{7})/(\d{2})")
VOLUME_KEY = re.compile(f"volumes/({NAME})/" + r"(\d{9})-(\d{9})\.([0-9a-f]{32})")
#: Bytes of the records of a page, and of the pages of a volume; bytes of a grave, snapshots of a page.
PAGE_RECORDS, VOLUME, GRAVE, PAGE_SNAPSHOTS = 32 << 20, 1 << 30, struct.Struct("<16sQQIB"), 1024
STATES = ("committed", "aborted", "forgotten", "swept")
#: The run of the records that stand for damaged sessions.
NO_RUN = "0-damaged-session"
FACTORIES = {f.__name__: f for f in (bool, dict, float, int, list, set, str, tuple)}
NAMESPACES = {("argparse", "Namespace"): argparse.Namespace, ("types", "SimpleNamespace"): types.SimpleNamespace}
#: torch dtype -> (bytes, element size). NumPy has them too, but for those of RAW.
TORCH = dict.fromkeys(("float64", "uint64", "int64"), (8, 8))
TORCH |= dict.fromkeys(("float32", "uint32", "int32"), (4, 4))
TORCH |= dict.fromkeys(("float16", "bfloat16", "uint16", "int16", "bits16"), (2, 2))
TORCH |= {f"float8_{name}": (1, 1) for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}
TORCH |= dict.fromkeys(("float4_e2m1fn_x2", "bool", "uint8", "int8", "bits8"), (1, 1))
TORCH |= {"complex32": (4, 2), "complex64": (8, 4), "complex128": (16, 8)}
RAW = re.compile(r"bfloat16|bits.*|float8.*|float4.*|complex32")
#: Any dtype of torch, and the name of a device.
DTYPE = re.compile(r"bool|(?:b?float|complex|q?u?int|bits)\d+(?:x\d+|_\w+)?")
DEVICE = re.compile(r"([a-z]+)(?::([0-9]+))?")
#: The types of the plain form of a class of each kind, and of a member of an enum.
PLAIN = {"dataclass": (dict,), "namedtuple": (tuple,), "namespace": (dict,), "subclass": (dict, list, str, int, float)}
SCALARS = (type(None), bool, int, float, str, bytes)
ARRAY = re.compile(r"\|[biu]1|[<>](?:[iuf][248]|c8|c16|[mM]8(?:\[\w+\])?|U\d+)|\|S\d+")


class DamagedError(ValueError):
    """An object breaks a rule of docs/format.md."""


class UnknownError(DamagedError):
    """An object has a feature, version, codec or node that this reader does not know."""


#: The errors of an object that this reader refuses.
REFUSED = (ArithmeticError, LookupError, MemoryError, OSError, RecursionError, TypeError, ValueError, struct.error)
#: Keys of maps by their type.
Types = dict[type, str]
REFERENCE: Types = {str: "part sha256 header_sha256", int: "rank size_bytes logical_bytes"}
CONFIG: Types = {str: "uuid writer", int: "version chunk_bytes digest_seed", list: "features", float: "created"}
RECORD: Types = {
    str: "id run state write_id policy reason",
    list: "bases manifests tags features",
    dict: "metrics",
}
RECORD |= {int: "step seq revision generation depth chunks new_chunks logical_bytes stored_bytes"}
RECORD |= {float: "created stall_s total_s"}
PAGE: Types = {str: "run write_id", int: "number", bytes: "live graves past", list: "mends"}
PAGES: Types = {str: "run id", int: "first last", bytes: "pages"}
LIST: Types = {bytes: "save_id snapshot manifests", int: "revision"}
HEADER: Types = {str: "part", list: "sections features children", bytes: "save_id snapshot packs pack_sizes box_map"}
OPTIONAL: dict[str, type] = {"run": str, "step": int}  # of manifests and lists; early ones lack them
HEADER |= {int: "revision rank sequence chunk_bytes digest_seed tensors chunks refs logical_bytes depth world_size"}


def need(holds: object, message: str, error: type[DamagedError] = DamagedError) -> None:
    if not holds:
        raise error(message)


def typed(found: Any, types: Types) -> dict[str, Any]:
    """Return a map whose keys are there and have these types; numbers are not negative."""
    need(isinstance(found, dict), "a value is no map")
    for kind, names in types.items():
        for name in names.split():
            need(type(found.get(name)) in ((int, float) if kind is float else (kind,)), f"{name} is no {kind.__name__}")
            need(kind is not int or found[name] >= 0, f"{name} is negative")
    if types in (HEADER, LIST):
        for name, kind in OPTIONAL.items():
            need(type(found.get(name, kind())) is kind, f"{name} is no {kind.__name__}")
        need(re.fullmatch(NAME, found.get("run", "a")), "a run of no valid name")
        need(0 <= found.get("step", 0) < 10**12, "a step out of bounds")
    return found  # type: ignore[no-any-return]


def require_chunk_bytes(found: dict[str, Any]) -> None:
    """Check the chunk_bytes of a config or a header."""
    need(found["chunk_bytes"] % 16 == 0 and 64 <= found["chunk_bytes"] <= CHUNK, "chunk_bytes is out of bounds")


def number(found: Any) -> int:
    """Return an int that is no bool; a pattern `int()` matches both."""
    need(type(found) is int, "no number")
    return found  # type: ignore[no-any-return]


def integers(found: Any, count: int | None = None) -> list[int]:
    """Return a list of `count` numbers that are not negative."""
    need(isinstance(found, list) and all(type(n) is int and n >= 0 for n in found), "no list of sizes")
    need(count in (None, len(found)), "a list of another length")
    return found  # type: ignore[no-any-return]


# --- msgpack ---

NUMBERS = dict(zip(range(0xCA, 0xD4), (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True))
LENGTHS = {0xC4: ("bin", ">B"), 0xC5: ("bin", ">H"), 0xC6: ("bin", ">I"), 0xD9: ("str", ">B"), 0xDA: ("str", ">H")}
LENGTHS |= {0xDB: ("str", ">I"), 0xDC: ("array", ">H"), 0xDD: ("array", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I")}


class Msgpack:
    """A decoder of one value. Maps are refused, unless `maps` is set; their keys are str.

    Attributes:
        sizes: the packed sizes of the values, by key, if the value is a map.
    """

    def __init__(self, data: bytes, maps: bool) -> None:
        self.data, self.at, self.maps = data, 0, maps
        self.sizes: dict[str, int] = {}

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        need(self.at + count <= len(self.data), "msgpack ends early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        """Return the next number."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self, depth: int = 0) -> Any:
        """Return the next value; `depth` is the number of arrays and maps around it."""
        need(depth <= 4 * DEPTH, "msgpack is nested too deeply")
        tag = self.take(1)[0]
        if tag < 0x80 or tag >= 0xE0:
            return tag if tag < 0x80 else tag - 256
        if tag < 0xC0:
            kind, count = ("map", tag & 15) if tag < 0x90 else ("array", tag & 15) if tag < 0xA0 else ("str", tag & 31)
        elif tag in NUMBERS:
            return self.number(NUMBERS[tag])
        elif tag in LENGTHS:
            kind, form = LENGTHS[tag]
            count = self.number(form)
        else:
            need(tag in (0xC0, 0xC2, 0xC3), f"msgpack has the type {tag:#x}", UnknownError)
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        if kind == "bin":
            return self.take(count)
        if kind == "str":
            return text(self.take(count))
        if kind == "array":
            return [self.value(depth + 1) for _ in range(count)]
        need(self.maps, "a node is never a map")
        found = dict[str, Any]()
        for _ in range(count):
            key, start = self.value(depth + 1), self.at
            need(isinstance(key, str), "a key of a map is no str")
            need(key not in found, "a map has a key twice")
            found[key] = self.value(depth + 1)
            if not depth:
                self.sizes[key] = self.at - start
        return found

    def whole(self) -> Any:
        """Return the value, which all bytes make."""
        value = self.value()
        need(self.at == len(self.data), "bytes follow the msgpack value")
        return value


def text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DamagedError("a text is no UTF-8") from error


def unpack(data: bytes, maps: bool = False) -> Any:
    return Msgpack(data, maps).whole()


# --- blobs and packs ---


def zstd_size(data: bytes) -> int:
    try:
        return zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise DamagedError(f"zstd: {error}") from error


def unzstd(data: bytes, size: int) -> bytes:
    try:
        need(zstandard.frame_content_size(data) == size, "a zstd frame has another content size")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"zstd: {error}") from error


def inflate(data: bytes, size: int) -> bytes:
    stream = zlib.decompressobj(-15)
    try:
        out = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise DamagedError(f"deflate: {error}") from error
    need(stream.eof and not stream.unused_data and len(out) == size, "a deflate stream has another length")
    return out


CODECS: dict[int, Callable[[bytes, int], bytes]] = {1: unzstd, 2: inflate}


class Blob:
    """One chunk, or its difference to a base: header fields, plane lengths, and `decoded` bytes if it has planes."""

    def __init__(self, data: bytes) -> None:
        need(len(data) >= 80, "a blob is shorter than its header")
        magic, version, zero, checksum = struct.unpack_from("<4sHHQ", data)
        need(magic == b"SNBL", "a blob has another magic")
        need(version == 1, f"a blob has version {version}", UnknownError)
        need(zero == 0 and checksum == xxhash.xxh3_64_intdigest(data[16:]), "the checksum of a blob")
        (self.transform, self.element, self.layout, _, self.raw, payload, block, self.codecs, n, _, self.digest,
         self.base) = struct.unpack_from("<4BIII8sII16s16s", data, 16)  # fmt: skip
        need(self.transform in (0, 1, 2) and self.layout in (0, 1), "a blob's transform or layout", UnknownError)
        need(self.element in (1, 2, 4, 8), "a blob's element size")
        need(0 < self.raw <= CHUNK and self.raw % self.element == 0, "a blob's raw length")
        need(len(data) == 80 + 4 * n + payload, "a blob's lengths")
        need((self.transform > 0) == any(self.base), "a blob's transform and base")
        need(block > 0, "a blob's block size is zero")
        self.plane_bytes = self.raw // self.element
        self.lengths = iter(struct.unpack_from(f"<{n}I", data, 80))
        self.payload, self.at, self.block = data[80 + 4 * n :], 0, block
        self.is_sparse = self.codecs[0] == 3
        if self.is_sparse:
            need(self.transform == 1 and not any(self.codecs[1:]), "a sparse blob's transform or codecs")
            self.stored = [payload] + [0] * 7
            return
        planes = [self._plane(codec, block) for codec in self.codecs[: self.element]]
        self.stored = [size for size, _ in planes] + [0] * (8 - self.element)
        need(self.at == payload and next(self.lengths, None) is None, "a blob has more blocks than planes")
        elements = np.array([np.frombuffer(plane, np.uint8) for _, plane in planes]).T.copy().view(f"<u{self.element}")
        need(self.transform != 1 or self.layout == 0, "a difference in rotated planes")
        if self.layout == 1 and self.element > 1:  # rotated left by one bit
            elements = (elements >> 1) | (elements << (8 * self.element - 1))
        self.decoded = elements.reshape(-1).view(np.uint8)

    def on(self, base: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
        """Return the plain chunk, given the plain base of a delta."""
        if base is None:
            need(not self.is_sparse, "a sparse blob without a base")
            return self.decoded
        if self.is_sparse:
            return self._patched(base)
        if self.transform == 2:
            return base ^ self.decoded
        z = self.decoded.view(f"<u{self.element}")
        return (base.view(z.dtype) + np.where(z & 1, ~(z >> 1), z >> 1)).view(np.uint8)

    def _patched(self, base: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Apply the changed elements of a sparse delta to its base."""
        bits, elements = 8 * self.element, base.copy().view(f"<u{self.element}")
        need(elements.size <= SPARSE, "a sparse blob of too many elements")
        keys = np.zeros(elements.size, np.uint8)
        if self.layout == 1:
            keys = ((elements << 1 | elements >> (bits - 1)) >> (bits - 8)).astype(np.uint8)
        (count,) = struct.unpack("<I", self._take(4))
        need(1 <= count <= 256, "a sparse blob's number of groups")
        groups, first, members = [struct.unpack("<4B2I", self._take(12)) for _ in range(count)], 0, []
        for i, (last, shift, value_shift, ends, gaps, values) in enumerate(groups):
            members.append(np.flatnonzero((keys >= first) & (keys <= last)))
            need(first <= last and (last == 255) == (i == count - 1) and ends in (0, 1), "a sparse group's keys")
            need(
                (shift <= 26 or shift == 255) and value_shift % 8 == 0 and value_shift < bits, "a sparse group's shifts"
            )
            size = len(members[-1])
            need((gaps == 0 and values == size) if shift == 255 else values <= gaps <= size, "a sparse group's counts")
            first = last + 1
        need(groups[-1][3] == 1, "a sparse blob's last group goes on")
        symbols, values, begin = b"", b"", 0
        for i, group in enumerate(groups):
            if group[3]:
                symbols += self._stream(sum(g[4] for g in groups[begin : i + 1]))
                values += self._stream(sum(g[5] for g in groups[begin : i + 1]))
                begin = i + 1
        need(next(self.lengths, None) is None, "a sparse blob has more frames than symbols")
        for (_, shift, value_shift, _, gaps, some), where in zip(groups, members, strict=True):
            own, symbols, kinds, values = symbols[:gaps], symbols[gaps:], values[:some], values[some:]
            for position, z in self._changes(shift, value_shift, own, kinds, len(where)):
                need(z < 1 << bits, "a sparse value is too large")
                difference = z // 2 if z % 2 == 0 else -(z + 1) // 2
                at = where[position]
                elements[at] = (int(elements[at]) + difference) % (1 << bits)
        need(self.at == len(self.payload), "a sparse blob has bytes behind its groups")
        return elements.view(np.uint8)

    def _stream(self, size: int) -> bytes:
        """Return the next symbols of a sparse delta."""
        out = b""
        for at in range(0, size, self.block):
            length = next(self.lengths, None)
            need(length is not None, "a sparse blob has fewer frames than symbols")
            out += unzstd(self._take(length or 0), min(self.block, size - at))
        return out

    def _changes(
        self, shift: int, value_shift: int, symbols: bytes, values: bytes, size: int
    ) -> Iterator[tuple[int, int]]:
        """Yield (position, zigzag difference) of the changed elements of a group."""
        shift, dense = 0 if shift == 255 else shift, shift == 255
        packed = int.from_bytes(low := self._take((len(symbols) * shift + 7) // 8))
        gaps = []
        for i, symbol in enumerate(symbols):
            need(symbol < 255, "a sparse symbol of 255")
            high = struct.unpack("<I", self._take(4))[0] if symbol // 3 == 84 else symbol // 3
            gaps.append(high << shift | packed >> 8 * len(low) - (i + 1) * shift & (1 << shift) - 1)
        lows = [int.from_bytes(self._take(value_shift // 8), "little") for _ in values]
        highs = [int.from_bytes(self._take(self.element), "little") if v == 255 else v for v in values]
        found = iter([high << value_shift | low for high, low in zip(highs, lows, strict=True)])
        if dense:
            yield from enumerate(found)
            return
        need(sum(symbol % 3 == 2 for symbol in symbols) == len(values), "a sparse group's values")
        position = -1
        for gap, symbol in zip(gaps, symbols, strict=True):
            position += gap + 1
            need(position < size, "a sparse position beyond its group")
            yield position, next(found) + 3 if symbol % 3 == 2 else symbol % 3 + 1

    def _take(self, count: int) -> bytes:
        need(self.at + count <= len(self.payload), "a blob's payload is too short")
        self.at += count
        return self.payload[self.at - count : self.at]

    def _plane(self, codec: int, block: int) -> tuple[int, bytes]:
        """Return the (stored length, bytes) of the next plane."""
        if codec == 0:
            return self.plane_bytes, self._take(self.plane_bytes)
        need(codec in CODECS, f"a blob has codec {codec}", UnknownError)
        begin, out = self.at, []
        for at in range(0, self.plane_bytes, block):
            length = next(self.lengths, None)
            need(length is not None, "a blob has fewer block lengths than blocks")
            out.append(CODECS[codec](self._take(length or 0), min(block, self.plane_bytes - at)))
        return self.at - begin, b"".join(out)


class Pack:
    """A pack whose header and footer are checked, and its blobs by offset."""

    def __init__(self, data: bytes) -> None:
        need(len(data) >= 96 and data[:8] == b"SNAPPACK" and data[-8:] == b"SNAPFOOT", "a pack's magic")
        need(data[8:10] == b"\1\0", "a pack has another version", UnknownError)
        footer, count, part, checksum = struct.unpack("<QIIQ", data[-32:-8])
        need(footer >= 64 and footer + 96 * count + part == len(data) - 32, "a pack's footer has another length")
        need(checksum == xxhash.xxh3_64_intdigest(data[footer:-32]), "the checksum of a pack's footer")
        self.data, self.entries, at = data, {}, 64
        for i in range(count):
            entry = struct.unpack_from("<QIIBB6x8s16s16s8I", data, footer + 96 * i)
            need(entry[0] == at, "a pack has a gap between its blobs")
            self.entries[at] = entry
            at += -(-entry[1] // 8) * 8
        need(at == footer, "a pack has a gap before its footer")

    def blob(self, offset: int, length: int) -> Blob:
        """Return a blob of this offset and length, compared with the footer."""
        need(offset in self.entries and self.entries[offset][1] == length, "a reference names no blob of its pack")
        entry = self.entries[offset]
        b = Blob(self.data[offset : offset + length])
        fields = (offset, length, b.raw, b.transform, b.element, b.codecs, b.digest, b.base, *b.stored)
        sizes = 1 if b.is_sparse else b.element  # the codecs and sizes behind those of the planes are called zero
        for own in (slice(5), slice(6, 8 + sizes)):
            need(entry[own] == fields[own], "a blob's header contradicts the footer")
        need(entry[5][: b.element] == b.codecs[: b.element], "a blob's header contradicts the footer")
        return b


# --- tensors ---


@dataclass(frozen=True)
class Tensor:
    """A `tensor`, `parameter` or `array`; `data` has unsigned integers where NumPy lacks the dtype."""

    kind: str
    dtype: str
    data: np.ndarray[Any, Any]
    requires_grad: bool
    order: tuple[int, ...]


@dataclass(frozen=True)
class Torch:
    """A value of torch without elements: a `dtype`, `Size` or `device`, as torch shows it."""

    kind: str
    shown: str


def layout_of(kind: str, dtype: str) -> tuple[np.dtype[Any], int]:
    """Return the NumPy dtype in which an entry is shown, and its element size."""
    if kind in ("bytes", "page"):
        need(dtype == "bytes", f"an entry of kind {kind} has dtype {dtype}")
        return np.dtype(np.uint8), 1
    if kind in ("tensor", "parameter"):
        need(dtype in TORCH, f"dtype {dtype}", UnknownError)
        itemsize, element = TORCH[dtype]
        return np.dtype(f"<u{itemsize}" if RAW.fullmatch(dtype) else dtype), element
    need(kind == "array", f"an entry of kind {kind}", UnknownError)
    need(ARRAY.fullmatch(dtype), f"dtype {dtype}", UnknownError)
    found = np.dtype(dtype)
    return found, 1 if found.kind in "SU" else found.itemsize // (2 if found.kind == "c" else 1)


class Entry:
    """An entry of a manifest's tensors; `pieces` are its (offsets, sizes, bytes)."""

    def __init__(self, fields: Any) -> None:
        need(isinstance(fields, list) and len(fields) == 8, "a tensor entry has another length")
        path, self.kind, self.dtype, self.shape, self.requires_grad, self.tie, self.boxes, inline = fields
        need(isinstance(path, list) and all(type(key) in (str, int) for key in path), "a path of other keys")
        need(self.tie is None or [type(n) for n in self.tie] == [str, int], "a tie of other types")
        self.path = tuple(path)
        self.family = "tensor" if self.kind == "parameter" else self.kind
        self.numpy, self.element = layout_of(self.kind, self.dtype)
        need(self.numpy.itemsize, f"an array of dtype {self.dtype}", UnknownError)  # a leaf may be such a dtype
        need(type(self.requires_grad) is bool and len(integers(self.shape)) <= 64, "an entry's fields")
        self.inline = (0, 0) if inline is None else tuple(integers(inline, 2))
        self.pieces: list[tuple[list[int], list[int], bytes]] = []
        self.order: tuple[int, ...] = ()

    def same(self, other: Entry) -> bool:
        """Whether both have one family, dtype and shape."""
        return (self.family, self.dtype, self.shape) == (other.family, other.dtype, other.shape)

    def read(self, inline: bytes, chunks: Callable[[int, int, int], bytes]) -> None:
        """Fill `pieces` from the inline bytes of the manifest, and a function of (first, count, element size)."""
        left = inline[self.inline[0] : sum(self.inline)]
        need(len(left) == self.inline[1], "inline bytes beyond the section")
        if not self.boxes and left:
            self.pieces, left = [([0] * len(self.shape), self.shape, left)], b""
        for box in self.boxes:
            need(len(box) == 4, "a box has another length")
            offsets, sizes, first, count = box
            integers([first, count, *integers(offsets, len(self.shape)), *integers(sizes, len(self.shape))])
            need(all(o >= 0 < n and o + n <= m for o, n, m in zip(offsets, sizes, self.shape, strict=True)), "a box")
            size = math.prod(sizes) * self.numpy.itemsize
            data = chunks(first, count, self.element)
            data = data if count else left[:size]
            left = left if count else left[size:]
            self.pieces.append((offsets, sizes, data))
        need(not left, "more inline bytes than boxes")
        for _, sizes, data in self.pieces:
            need(len(data) == math.prod(sizes) * self.numpy.itemsize, "a box has another number of bytes")

    def lay_out(self, order: Any) -> None:
        """Take the order of the dimensions in memory."""
        every = list(range(len(self.shape)))
        need(self.family in ("tensor", "array") and sorted(integers(order)) == every != order, "an order of dimensions")
        self.order = tuple(order)

    def assembled(
        self, pieces: list[tuple[list[int], list[int], bytes]], order: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        """Put disjoint boxes that cover the whole together, in an order of dimensions in memory."""
        size = self.numpy.itemsize
        need(sum(len(data) for _, _, data in pieces) == math.prod(self.shape) * size, "boxes do not cover a tensor")
        out, seen = np.zeros(self.shape, f"V{size}"), np.zeros(self.shape, bool)
        for offsets, sizes, data in pieces:
            where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            need(not seen[where].any(), "boxes overlap")
            seen[where] = True
            out[where] = np.frombuffer(data, out.dtype).reshape(sizes)
        found = out.view(self.numpy)
        return np.ascontiguousarray(found.transpose(order)).transpose(np.argsort(order)) if order else found


# --- manifests ---

COLUMNS = {"ref_counts": "<u2", "ref_kinds": "u1", "ref_packs": "<u4", "ref_offsets": "<u8", "ref_lengths": "<u4"}
COLUMNS |= {"lengths": "<u4", "digests": "V16", "ref_digests": "V16"}
#: Sections that this reader knows; it ignores others, whatever their codec and size.
SECTIONS = {"tree", "tensors", "inline", "strides", *COLUMNS}


class Manifest:
    """A manifest whose entries, inline bytes and chunks are read and checked."""

    def __init__(self, repository: Repository, reference: dict[str, Any]) -> None:
        self.repository, self.reference = repository, typed(reference, REFERENCE)
        data = repository.named("manifests", reference["sha256"], reference["size_bytes"])
        magic, version, _, length, checksum = struct.unpack_from("<8sHHIQ", data)
        need(magic == b"SNAPMANI", "a manifest's magic")
        need(version == 1, f"a manifest has version {version}", UnknownError)
        begin = 24 + length
        need(hashlib.sha256(data[:begin]).hexdigest() == reference["header_sha256"], "a manifest's header_sha256")
        need(checksum == xxhash.xxh3_64_intdigest(data[24:begin]), "the checksum of a manifest's header")
        self.header = header = typed(unpack(data[24:begin], maps=True), HEADER)
        need(set(header["features"]) <= KNOWN_FEATURES, f"features {header['features']}", UnknownError)
        for field in ("part", "rank", "logical_bytes"):
            need(header[field] == reference[field], f"a manifest's {field} contradicts its reference")
        need(
            header["digest_seed"] == repository.config["digest_seed"], "a manifest's digest_seed contradicts the config"
        )
        require_chunk_bytes(header)
        need(all(len(integers(fields[1:], 4)) for fields in header["sections"]), "a section")
        names = [fields[0] for fields in header["sections"]]
        need(len(set(names)) == len(names), "a manifest has a section twice")
        known = [fields for fields in header["sections"] if fields[0] in SECTIONS]
        self.sections = {fields[0]: self._section(data[begin:], *fields) for fields in known}
        end = max(offset + stored for _, offset, stored, _, _ in header["sections"])
        need(begin + end == len(data), "bytes follow the last section of a manifest")
        self.table = {name: self._column(name, form) for name, form in COLUMNS.items()}
        self.inline = self.sections["inline"]
        entries = unpack(self.sections["tensors"])
        need(isinstance(entries, list), "the tensors of a manifest are no list")
        self.entries = [Entry(fields) for fields in entries]
        need(len(self.entries) == header["tensors"], "a manifest has another number of tensors")
        self.tree = unpack(self.sections["tree"])
        need(("strides" in header["features"]) == ("strides" in self.sections), "strides without their feature")
        orders = unpack(self.sections.get("strides", b"\x90"))
        need("strides" not in self.sections or orders, "no strides")
        numbers = [number(entry) for entry, _ in orders]
        need(numbers == sorted(set(numbers)) and max(numbers, default=-1) < len(self.entries), "entries of strides")
        for entry, order in orders:
            self.entries[entry].lay_out(order)
        self._read()

    def _section(self, data: bytes, name: str, offset: int, stored: int, raw: int, codec: int) -> bytes:
        need(offset + stored <= len(data), "a section ends beyond its manifest")
        need(codec in (0, 1), f"a section has codec {codec}", UnknownError)
        need(codec or stored == raw, "a section has another length")
        bound = {"inline": INLINE} | dict.fromkeys(("tree", "tensors", "strides"), max(64 << 10, 64 * stored))
        need(not codec or raw <= bound.get(name, 4 * self.reference["size_bytes"]), f"the section {name} is too long")
        need(not codec or name not in ("digests", "ref_digests"), f"the section {name} is compressed")
        section = data[offset : offset + stored]
        return unzstd(section, raw) if codec else section

    def _column(self, name: str, form: str) -> np.ndarray[Any, Any]:
        rows = self.header["refs" if name.startswith("ref_") and name != "ref_counts" else "chunks"]
        rows -= self.header["chunks"] if name == "ref_digests" else 0  # the newest reference is to the chunk itself
        section = self.sections[name]
        need(len(section) == rows * np.dtype(form).itemsize, f"the section {name} has another number of rows")
        return np.frombuffer(section, form)

    def _read(self) -> None:
        """Read all entries: each chunk and inline byte belongs to exactly one; then the node in pages."""
        header = self.header
        packs, sizes = header["packs"], struct.unpack(f"<{len(header['pack_sizes']) // 8}Q", header["pack_sizes"])
        self.packs = [packs[at : at + 32].hex() for at in range(0, len(packs), 32)]
        need(len(set(self.packs)) == len(self.packs) == len(sizes), "a manifest names a pack twice")
        self.pack_sizes = dict(zip(self.packs, sizes, strict=True))
        counts = self.table["ref_counts"]
        need(int(counts.sum()) == header["refs"], "a manifest has another number of references")
        self.first_ref = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.depth = max(0, int(counts.max(initial=1)) - 1)
        self.used: list[int] = []
        for entry in self.entries:
            entry.read(self.inline, self._chunks)
        need(sorted(self.used) == list(range(header["chunks"])), "a chunk is not in exactly one box")
        spans, at = sorted(e.inline for e in self.entries if e.inline[1]), 0
        for begin, length in spans:
            need(begin == at, "an inline byte is not in exactly one tensor")
            at += length
        need(at == len(self.inline), "inline bytes of no tensor")
        if isinstance(self.tree, list) and self.tree[:1] == ["pages"]:
            first, count = integers(self.tree[1:], 2)
            pages = self.entries[first : first + count]
            need(len(pages) == count and all(page.kind == "page" for page in pages), "pages of other entries")
            self.tree = unpack(b"".join(page.pieces[0][2] for page in pages))

    def _chunks(self, first: int, count: int, element: int) -> bytes:
        """Decode consecutive chunks of one box."""
        need(first + count <= self.header["chunks"], "a box has chunks beyond the table")
        out = []
        for chunk in range(first, first + count):
            self.used.append(chunk)
            out.append(self._chunk(chunk).tobytes())
            need(len(out[-1]) <= self.header["chunk_bytes"] and len(out[-1]) % element == 0, "a chunk's length")
        return b"".join(out)

    def _chunk(self, chunk: int) -> np.ndarray[Any, Any]:
        """Apply the blobs of a chunk, the oldest first, and compare the digest after each."""
        begin, end = (int(n) for n in self.first_ref[chunk : chunk + 2])
        need(begin < end <= begin + CHAIN, "a chain of another length")
        t, decoded, base = self.table, None, bytes(16)
        for ref in range(end - 1, begin - 1, -1):
            sha256 = self.packs[int(t["ref_packs"][ref])]
            blob = self.repository.pack(sha256, self.pack_sizes[sha256]).blob(
                int(t["ref_offsets"][ref]), int(t["ref_lengths"][ref])
            )
            digest = (t["ref_digests"][ref - chunk - 1] if ref > begin else t["digests"][chunk]).tobytes()
            need(blob.transform == t["ref_kinds"][ref], "a reference of another kind")
            need(
                (blob.transform > 0) == (decoded is not None), "a delta at the end of a chain, or a full blob before it"
            )
            need(blob.transform < 2 or "xor" in self.header["features"], "an XOR without the feature")
            need((blob.digest, blob.base) == (digest, base), "a blob of another chunk or base")
            need(t["lengths"][chunk] == blob.raw, "a blob of a chunk of another length")
            decoded = blob.on(decoded)
            need(self.repository.digest(decoded) == digest, "the digest of a chunk")
            base = digest
        need(decoded is not None, "a chunk without references")
        return decoded  # type: ignore[return-value]


class Part:
    """The manifests of one part: one of a single process, or a root and its children."""

    def __init__(self, repository: Repository, reference: dict[str, Any], record: dict[str, Any]) -> None:
        self.root = Manifest(repository, reference)
        header = self.root.header
        several = "ranks" in record["features"]
        need(several == ("ranks" in header["features"]), "record and manifest differ in the feature ranks")
        self.world_size: int = header["world_size"]
        children = header["children"]
        self.children = {c["rank"]: Manifest(repository, c) for c in children}
        self.tree, self.own = self.root.tree, dict[int | None, list[Any]]()
        self.pieces = [list(entry.pieces) for entry in self.root.entries]
        self.boxes = [Counter[tuple[int, ...]]() for _ in self.pieces]  # (rank, offsets, sizes)
        self.orders = [{entry.order} if entry.pieces else set() for entry in self.root.entries]
        if several:
            self._require_root(children)
        else:
            need(header["rank"] == header["world_size"] == 0 and not children, "ranks without their feature")
            need(all(len(entry.boxes) <= 1 for entry in self.root.entries), "a tensor in several boxes", UnknownError)
            self._require_sums(self.root)
        for rank, child in self.children.items():
            self._add(rank, child)
        for i in range(len(self.root.entries)):
            self.array(None, i)
        if header["box_map"]:
            self._require_map(header["box_map"])

    def _require_root(self, children: list[dict[str, Any]]) -> None:
        header, found = self.root.header, [c.header for c in self.children.values()]
        ranks = [c["rank"] for c in children]
        need(ranks == sorted(set(ranks)) and header["rank"] == 0, "the ranks of children")
        need(all(0 <= rank < self.world_size for rank in ranks), "a rank beyond the world size")
        kinds = [entry.kind == "page" for entry in self.root.entries]
        need(kinds == sorted(kinds), "a tensor behind the pages of a root")
        need(not self.root.inline, "a root has inline bytes")
        need(not any(e.boxes and e.kind != "page" for e in self.root.entries), "a root has boxes of tensors")
        own = sum(len(data) for entry in self.root.entries for _, _, data in entry.pieces)
        need(header["logical_bytes"] == own + sum(h["logical_bytes"] for h in found), "a root's logical_bytes")
        need(header["depth"] == max([self.root.depth, *(h["depth"] for h in found)]), "a root's depth")
        used = {self.root.packs[number] for number in self.root.table["ref_packs"].tolist()}
        packs = {name: size for name, size in self.root.pack_sizes.items() if name in used}
        packs |= {name: size for c in self.children.values() for name, size in c.pack_sizes.items()}
        need(self.root.pack_sizes == packs, "a root's packs are not its own and its children's")
        for h, child in zip(found, self.children.values(), strict=True):
            need(h["part"] == header["part"] and h["world_size"] == self.world_size, "a child of another root")
            need(h["chunk_bytes"] == header["chunk_bytes"], "a child whose chunk_bytes are not its root's")
            need("ranks" in h["features"] and not h["children"], "a child with children")
            self._require_sums(child)

    def _require_map(self, packed: bytes) -> None:
        """Compare the map of boxes with the boxes that the children have."""
        size = zstd_size(packed)
        need(0 < size <= BOX_MAP, "a map of boxes is too long")
        numbers, patterns, columns = (np.frombuffer(data, "u1") for data in unpack(unzstd(packed, size)))
        found: list[Counter[tuple[int, ...]] | None] = [None]
        at, table = 0, columns.view("<i8")
        for d, n in patterns.view("<u4").reshape(-1, 2).tolist():
            need(d <= 64 and at + (1 + 2 * d) * n <= len(table), "a pattern of the map of boxes")
            rows = table[at : at + (1 + 2 * d) * n].reshape(1 + 2 * d, n).cumsum(axis=1).T
            found.append(Counter(map(tuple, rows.tolist())))
            at += (1 + 2 * d) * n
        tensors = [boxes for e, boxes in zip(self.root.entries, self.boxes, strict=True) if e.kind != "page"]
        need(at == len(table) and len(numbers) == 4 * len(tensors), "the map of boxes has another length")
        for number, boxes in zip(numbers.view("<u4").tolist(), tensors, strict=True):
            need(number < len(found), "a pattern that the map of boxes lacks")
            need(found[number] in (None, boxes), "the map of boxes contradicts the children")

    def _require_sums(self, manifest: Manifest) -> None:
        total = sum(len(data) for entry in manifest.entries for _, _, data in entry.pieces)
        need(manifest.header["logical_bytes"] == total, "a manifest's logical_bytes")
        need(manifest.header["depth"] == manifest.depth, "a manifest's depth")

    def _add(self, rank: int, child: Manifest) -> None:
        """Give the boxes of a child to the root's entries of the same paths; further entries are of its own values."""
        places = defaultdict(list)
        for i, entry in enumerate(self.root.entries):
            if entry.kind != "page":
                places[entry.path].append(i)
        seen, own = Counter[tuple[Any, ...]](), False
        for i, entry in enumerate(child.entries):
            nth, places_here = seen[entry.path], places[entry.path]
            seen[entry.path] += 1
            if entry.kind == "page" or nth >= len(places_here):
                own = self.array(rank, i) is not None
                continue
            need(not own, "an entry behind a rank's own ones")
            need(entry.same(self.root.entries[places_here[nth]]), "root and child have other tensors of one path")
            need(entry.boxes or not entry.pieces, "inline bytes without a box")
            self.pieces[places_here[nth]] += entry.pieces
            self.orders[places_here[nth]] |= {entry.order} if entry.pieces else set()
            self.boxes[places_here[nth]].update((rank, *offsets, *sizes) for offsets, sizes, _ in entry.pieces)
        if child.tree is not None:
            is_own = isinstance(child.tree, list) and len(child.tree) == 2 and child.tree[0] == "own"
            need(is_own and isinstance(child.tree[1], list), "a child's tree is not of own values", UnknownError)
            self.own[rank] = child.tree[1]

    @cache  # noqa: B019  (a part lives as long as its snapshot's restore)
    def array(self, rank: int | None, index: int) -> np.ndarray[Any, Any]:
        """Return the bytes of an entry of the root, or of a rank's own."""
        if rank is None:
            return self.root.entries[index].assembled(self.pieces[index], self.order(None, index))
        entry = self.children[rank].entries[index]
        return entry.assembled(entry.pieces, entry.order)

    def order(self, rank: int | None, index: int) -> tuple[int, ...]:
        """Return the order in memory of an entry of the root, in which all its boxes were written, or of a rank's."""
        if rank is not None:
            return self.children[rank].entries[index].order
        return next(iter(self.orders[index])) if len(self.orders[index]) == 1 else ()

    def entries(self, rank: int | None) -> list[Entry]:
        """Return the entries of the root, or of a rank."""
        return self.root.entries if rank is None else self.children[rank].entries


# --- trees ---


NOWHERE = "\0"  # no part has this name: nodes of this part have no arrays, and no values of a rank


class Tree:
    """A decoder of the nodes of one part: of its root, or of a rank's own values."""

    def __init__(self, snapshot: Snapshot, part: str = "", rank: int | None = None, around: int = 0) -> None:
        self.snapshot, self.part, self.rank = snapshot, part, rank
        self.around = around  # how many `columns` nodes are around its nodes

    def root(self, node: Any) -> Any:
        """Decode the root dict of part "", whose values may be the trees of other parts."""
        others = {name for name in self.snapshot.parts if name != self.part}
        named: list[str] = []
        root = node[3] if isinstance(node, list) and node[0] == "optimizer" and len(node) == 4 else node
        need(not others or (isinstance(root, list) and root[0] in ("dict", "odict")), "the root is no dict")
        if others:
            named = [value[1] for value in root[2] if isinstance(value, list) and value[0] == "part"]
            need(sorted(named) == sorted(others), "each part is not named once")
        return self.value(node, 0)

    def value(self, node: Any, depth: int) -> Any:
        """Decode a node; `depth` is the number of containers around it."""
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, bytes):
            need(len(node) <= 4096, "bytes beyond 4 KiB in a node")
            return node
        need(isinstance(node, list) and node and isinstance(node[0], str), "a node without a tag")
        for decode in (self._plain, self._named, self._array):
            found = decode(node)
            if found is not None:
                return found
        need(depth < DEPTH or node[0] in ("enum", "object", "optimizer", "columns", "rank"), "a tree is too deep")
        return self._container(node, depth + 1)

    def _plain(self, node: list[Any]) -> Any:
        match node:
            case ["int", bytes(data)]:
                return int.from_bytes(data, "little", signed=True)
            case ["str", bytes(data)]:
                return data.decode("utf-8", "surrogatepass")
            case ["complex", float(real), float(imag)]:
                return complex(real, imag)
            case ["np", str(dtype), bytes(data)]:
                form = layout_of("array", dtype)[0]
                need(form.kind not in "SU" and len(data) == form.itemsize, "no scalar of its dtype")
                return np.frombuffer(data, dtype)[0]
            case ["npstr", inner]:
                return np.str_(self.value(inner, 0))
            case ["npbytes", bytes(data)]:
                return np.bytes_(data)
            case ["npdtype", str(dtype)]:
                return layout_of("array", dtype)[0]
            case ["dtype", str(name)]:
                need(DTYPE.fullmatch(name), f"dtype {name}", UnknownError)
                return Torch("dtype", f"torch.{name}")
            case ["size", list(sizes)]:
                return Torch("Size", f"torch.Size({[number(size) for size in sizes]})")
            case ["device", str(name)]:
                match = DEVICE.fullmatch(name)
                need(match, f"device {name}")
                kind, index = match.groups() if match else ("", None)
                return Torch("device", f"device(type={kind!r}" + (")" if index is None else f", index={index})"))
        return None

    def _named(self, node: list[Any]) -> Any:
        match node:
            case ["path", str(kind), inner]:
                need(kind.removeprefix("pure ") in ("posix", "windows"), f"path of kind {kind}", UnknownError)
                pure = pathlib.PurePosixPath if kind.endswith("posix") else pathlib.PureWindowsPath
                own = kind == os.name.replace("nt", "windows")
                return (pathlib.Path if own else pure)(self.value(inner, 0))
            case ["date", str(iso)]:
                return datetime.date.fromisoformat(iso)
            case ["time", str(iso), int(fold), zone]:
                return datetime.time.fromisoformat(iso).replace(fold=number(fold), tzinfo=self.value(zone, 0))
            case ["datetime", str(iso), int(fold), zone]:
                return datetime.datetime.fromisoformat(iso).replace(fold=number(fold), tzinfo=self.value(zone, 0))
            case ["timedelta", int(days), int(seconds), int(microseconds)]:
                return datetime.timedelta(*map(number, (days, seconds, microseconds)))
            case ["timezone", offset, *name] if len(name) <= 1:
                return datetime.timezone(self.value(offset, 0), *(self.value(text, 0) for text in name))
        return None

    def _array(self, node: list[Any]) -> Any:
        match node:
            case ["tensor" | "parameter" as tag, int(index), bool(requires_grad)]:
                entry, array = self.snapshot.array(self.part, self.rank, index, "tensor")
                return Tensor(tag, entry.dtype, array, requires_grad, self.snapshot.order(self.part, self.rank, index))
            case ["array", int(index)]:
                entry, array = self.snapshot.array(self.part, self.rank, index, "array")
                return Tensor("array", entry.dtype, array, False, self.snapshot.order(self.part, self.rank, index))
            case ["bytes", int(index)]:
                return self.snapshot.array(self.part, self.rank, index, "bytes")[1].tobytes()
            case ["bytearray", int(index)]:
                return bytearray(self.snapshot.array(self.part, self.rank, index, "bytes")[1])
            case ["bytearray", bytes(data)]:
                return bytearray(data)
        return None

    def _container(self, node: list[Any], depth: int) -> Any:
        match node:
            case ["list", list(items)]:
                return self._values(items, depth)
            case ["tuple", list(items)]:
                return tuple(self._values(items, depth))
            case ["set" | "frozenset" as tag, list(items)]:
                members = self._values(items, depth)
                hashable(members)
                return set(members) if tag == "set" else frozenset(members)
            case ["deque", None | int() as maxlen, list(items)]:
                need(maxlen is None or len(items) <= number(maxlen), "a deque beyond its maxlen")
                return deque(self._values(items, depth), maxlen)
            case ["dict", list(keys), list(values)]:
                return dict(self._pairs(keys, values, depth))
            case ["odict", list(keys), list(values), *metadata] if len(metadata) <= 1:
                ordered = OrderedDict(self._pairs(keys, values, depth))
                if metadata:
                    ordered._metadata = self.value(metadata[0], depth)  # type: ignore[attr-defined]
                return ordered
            case ["counter", list(keys), list(values)]:
                return Counter(dict(self._pairs(keys, values, depth)))
            case ["defaultdict", None | str() as name, list(keys), list(values)]:
                need(name is None or name in FACTORIES, f"a factory {name}", UnknownError)
                return defaultdict(FACTORIES[name] if name else None, self._pairs(keys, values, depth))
            case ["enum", str(), str(), None | str(), inner]:
                plain = self.value(inner, depth - 1)
                need(type(plain) in SCALARS, "the plain form of an enum's member")
                return plain
            case ["object", str(kind), str(module), str(name), inner, *fields]:
                need(not isinstance(inner, list) or inner[:1] != ["object"], "the plain form of an object is an object")
                return self._object(kind, (module, name), self.value(inner, depth - 1), fields)
            case ["optimizer", list(forms), list(numbers), list(inner)]:
                need(inner[:1] in (["dict"], ["odict"], ["columns"]), "the state of an optimizer is no dict")
                for form in forms:
                    need(isinstance(form, list) and len(form) == 2 and type(form[0]) is str, "the form of a parameter")
                    integers(form[1])
                need(all(n < len(forms) for n in integers(numbers)), "a form of a parameter that is not there")
                return self.value(inner, depth - 1)
            case ["part", str(name)] if depth == 2 and self.part == "" and self.rank is None:
                return self.snapshot.tree(name)
            case ["rank", int(i)] if self.rank is None:
                return self.snapshot.own(self.part, i)
            case ["columns", list(column)]:
                need(self.around < NESTING, "columns nodes around each other are too deep")
                found = list(Tree(self.snapshot, NOWHERE, around=self.around + 1)._column(column, depth - 1))
                need(len(found) == 1, "columns of more than one value")
                return found[0]
        raise UnknownError(f"a node {node[0]!r} of {len(node)} elements, at a depth of {depth}")

    def _values(self, nodes: list[Any], depth: int) -> list[Any]:
        return [self.value(node, depth) for node in nodes]

    def _pairs(self, keys: list[Any], values: list[Any], depth: int) -> list[tuple[Any, Any]]:
        need(len(keys) == len(values), "a dict has more keys than values, or fewer")
        found = self._values(keys, depth)
        hashable(found)
        return list(zip(found, self._values(values, depth), strict=True))

    def _object(self, kind: str, name: tuple[str, str], value: Any, fields: list[Any]) -> Any:
        """Return the plain form of a value of a class; a namespace is built."""
        need(kind in PLAIN, f"an object of kind {kind}", UnknownError)
        need(len(fields) == (kind == "namedtuple"), "an object has another number of elements", UnknownError)
        need(type(value) in PLAIN[kind], f"the plain form of a {kind}")
        names = fields[0] if fields else [] if kind == "subclass" else list(value)
        need(isinstance(names, list) and all(isinstance(name, str) for name in names), "a name of a field is no str")
        need(kind != "namedtuple" or len(names) == len(value), "a named tuple of other numbers of names and values")
        if kind != "namespace":
            return value
        need(name in NAMESPACES, f"a namespace {name}", UnknownError)
        return NAMESPACES[name](**value)

    # Columns

    def _column(self, column: Any, depth: int, nesting: int = 0) -> Iterator[Any]:
        """Yield the values of a column; `depth` and `nesting` are the numbers of containers and columns around them."""
        need((depth < DEPTH and nesting <= NESTING) or column[:1] == ["values"], "a tree is too deep")
        match column:
            case ["values", bytes(packed)]:
                values = unpack(packed)
                need(isinstance(values, list), "a column holds no array")
                need(all(v is None or isinstance(v, bool | int | float | str) for v in values), "no scalars")
                yield from values
            case ["values", list(nodes)]:
                yield from self._values(nodes, depth)
            case ["lists" | "tuples" as tag, lengths, inner]:
                members, sizes = self._column(inner, depth + 1, nesting + 1), self._scalars(lengths, depth)
                for row in cut(members, sizes):
                    yield row if tag == "lists" else tuple(row)
            case ["dicts", lengths, keys, inner]:
                counts = list(self._scalars(lengths, depth))
                rows = (
                    cut(self._scalars(keys, depth + 1), counts),
                    cut(self._column(inner, depth + 1, nesting + 1), counts),
                )
                for names, values in zip(*rows, strict=True):
                    hashable(names)
                    yield dict(zip(names, values, strict=True))
            case ["list rows" | "tuple rows" as tag, bytes(which), list(columns)]:
                for row in self._rows(which, columns, depth + 1, nesting + 1):
                    yield row if tag == "list rows" else tuple(row)
            case ["dict rows", names, bytes(which), list(columns)]:
                fields = list(self._scalars(names, depth))
                need(all(isinstance(key, str) for key in fields), "a key of dict rows is no str")
                need(len(fields) == len(which), "dict rows have more keys than values, or fewer")
                hashable(fields)
                for row in self._rows(which, columns, depth + 1, nesting + 1):
                    yield dict(zip(fields, row, strict=True))
            case ["mixed", bytes(which), list(columns)]:
                iterators = [self._column(inner, depth, nesting + 1) for inner in columns]
                yield from draw(which, iterators)
                need(not any(list(rest) for rest in iterators), "columns of more values than are used")
            case _:
                raise UnknownError(f"a column {column[:1]}")

    def _scalars(self, column: Any, depth: int) -> Iterator[Any]:
        """Yield lengths or keys, which lie in a column of values."""
        need(column[:1] == ["values"], "lengths or keys in another column than of values")
        return self._column(column, depth)

    def _rows(self, which: bytes, columns: list[Any], depth: int, nesting: int) -> Iterator[list[Any]]:
        """Yield rows of one length: member k is the next value of column which[k]."""
        found = [list(self._column(column, depth, nesting)) for column in columns]
        need(which and set(which) == set(range(len(found))), "rows that do not use each column")
        rows = len(found[which[0]]) // which.count(which[0])
        need(all(len(values) == rows * which.count(i) for i, values in enumerate(found)), "columns of other lengths")
        iterators = [iter(values) for values in found]
        for _ in range(rows):
            yield list(draw(which, iterators))


def draw(which: bytes, iterators: list[Iterator[Any]]) -> Iterator[Any]:
    missing = object()
    for i in which:
        need(i < len(iterators), "a column beyond the last one")
        value = next(iterators[i], missing)
        need(value is not missing, "a column of fewer values than are used")
        yield value


def cut(members: Iterator[Any], sizes: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield rows of these sizes that follow each other."""
    for size in sizes:
        need(type(size) is int and size >= 0, "a length is no number")
        yield list(draw(bytes(size), [members]))
    need(next(members, members) is members, "a column of more values than are used")


def hashable(keys: list[Any]) -> None:
    """Refuse keys that collide before a dict is built of them, then equal ones."""
    try:
        hashes = Counter(map(hash, keys))
    except TypeError as error:
        raise DamagedError("a key is not hashable") from error
    need(max(hashes.values(), default=0) <= SAME_HASH, "too many keys share a hash")
    need(len(set(keys)) == len(keys), "a key occurs twice")


# --- snapshots ---


class Snapshot:
    """A readable snapshot: its parts, their trees, and the arrays to which nodes refer."""

    def __init__(self, repository: Repository, record: dict[str, Any]) -> None:
        need(record["state"] in ("committed", "forgotten"), f"a snapshot that is {record['state']}")
        need(set(record["features"]) <= KNOWN_FEATURES, f"features {record['features']}", UnknownError)
        references = record["manifests"]
        need(len({(m["part"], m["rank"]) for m in references}) == len(references), "two manifests of one part")
        need(record["logical_bytes"] == sum(m["logical_bytes"] for m in references), "a record's logical_bytes")
        self.parts = {m["part"]: Part(repository, m, record) for m in references}
        need(len(self.parts) == len(references) and "" in self.parts, "the parts of a snapshot")
        if "manifest_list" in record or any(
            p.root.header["snapshot"].hex() != record["id"] for p in self.parts.values()
        ):
            name = record.get("manifest_list", "")
            need(name != "", "a record names a manifest of another snapshot, but no manifest list")
            name = name if isinstance(name, str) else ""
            need(re.fullmatch("[0-9a-f]{64}", name), "the name of a manifest list")
            names = repository.small(f"manifests/{name[:2]}/{name}", 10, LIST)
            repository.named("manifests", name)  # its bytes are those of its name
            need(names["snapshot"].hex() == record["id"], "a manifest list of another snapshot")
            need(names["revision"] <= record["revision"], "a manifest list of a later revision")
            need(names["manifests"].hex() == "".join(m["sha256"] for m in references), "a list of other manifests")
        self.world_size = self.parts[""].world_size
        need(all(p.world_size == self.world_size for p in self.parts.values()), "manifests of other world sizes")
        depth = max(part.root.header["depth"] for part in self.parts.values())
        need(record["depth"] == depth, "a record's depth")
        self.metadata = Tree(self, NOWHERE).value(record["metadata"], 0)

    def state(self, rank: int | None = None) -> Any:
        """Decode the state, with the own values of one rank."""
        need(rank is None or 0 <= rank < self.world_size, f"the snapshot has no rank {rank}")
        self.rank = rank
        return Tree(self).root(self.parts[""].tree)

    def tree(self, part: str) -> Any:
        """Decode the tree of another part than ""."""
        return Tree(self, part).value(self.parts[part].tree, 0)

    def own(self, part: str, i: int) -> Any:
        """Decode value i of the rank's own."""
        nodes = self.parts[part].own.get(self.rank, [])
        need(0 <= number(i) < len(nodes), f"rank {self.rank} has no own value {i} in part {part!r}")
        return Tree(self, part, self.rank).value(nodes[i], 0)

    def order(self, part: str, rank: int | None, index: int) -> tuple[int, ...]:
        """Return the order in memory of the dimensions of an array."""
        return self.parts[part].order(rank, index)

    def array(self, part: str, rank: int | None, index: int, family: str) -> tuple[Entry, np.ndarray[Any, Any]]:
        """Return an entry of this family, and its array: that of the entry to which it is tied."""
        entries = self.parts[part].entries(rank)
        need(
            0 <= number(index) < len(entries) and entries[index].family == family, "a node names no entry of its family"
        )
        entry, array = entries[index], self.parts[part].array(rank, index)
        if entry.tie is None or rank is not None:
            return entry, array
        other_part, other_index = entry.tie
        need(other_part in self.parts and other_part != part, "a tie to no other part")
        other = self.parts[other_part].entries(None)
        need(0 <= other_index < len(other) and other[other_index].same(entry), "a tie to another tensor")
        need(other[other_index].tie is None, "a tie to a tensor that is tied")
        tied = self.parts[other_part].array(None, other_index)
        need(tied.tobytes() == array.tobytes(), "tied tensors differ")
        return entry, tied


def content(frame: bytes, limit: int) -> bytes:
    """Return the content of a zstd frame, which tells its size."""
    size = zstd_size(frame)
    need(0 <= size <= limit, f"a zstd frame of {size} bytes")
    return unzstd(frame, size)


class Repository:
    """A local repository: its config, its records and its objects by name."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.config = self.small("config", 1, CONFIG)
        need(self.config["version"] == 1, f"format version {self.config['version']}", UnknownError)
        need(set(self.config["features"]) <= {"pages"}, f"features {self.config['features']}", UnknownError)
        require_chunk_bytes(self.config)

    def keys(self, under: str) -> Iterator[str]:
        """Yield the keys of regular files; a symbolic link is refused."""
        if not (self.folder / under).exists():
            return
        for item in sorted(os.scandir(self.folder / under), key=lambda item: item.name):
            need(not item.is_symlink(), f"{under}/{item.name} is a symbolic link")
            if item.is_dir():
                yield from self.keys(f"{under}/{item.name}")
            elif item.is_file():
                yield f"{under}/{item.name}"

    def read(self, key: str, size: int | None = None) -> bytes:
        """Read a regular file, of this size if one is given; no symbolic link below the root is followed."""
        path = self.folder
        for name in key.split("/"):
            path /= name
            need(not path.is_symlink(), f"{key} is a symbolic link")
        found = path.stat()
        need(stat.S_ISREG(found.st_mode), f"{key} is no regular file")
        need(size in (None, found.st_size), f"{key} has {found.st_size} bytes, a reference says {size}")
        return path.read_bytes()

    def named(self, folder: str, sha256: str, size: int | None = None) -> bytes:
        """Read a pack or manifest, and compare it with its name, and with the size that its reference says."""
        data = self.read(f"{folder}/{sha256[:2]}/{sha256}", size)
        need(hashlib.sha256(data).hexdigest() == sha256, f"{folder} {sha256} has another SHA-256")
        return data

    @cache  # noqa: B019  (packs of a small repository are kept)
    def pack(self, sha256: str, size: int) -> Pack:
        """Read a pack and check its header and footer."""
        return Pack(self.named("packs", sha256, size))

    def digest(self, data: np.ndarray[Any, Any]) -> bytes:
        """Return the seeded XXH3-128."""
        return xxhash.xxh3_128_digest(data.tobytes(), self.config["digest_seed"])

    def small(self, key: str, kind: int, types: Types) -> dict[str, Any]:
        """Read a small object from its envelope."""
        need((self.folder / key).stat().st_size <= SMALL_OBJECT, f"{key} is too long")
        return self.unpacked(self.read(key), key, kind, types)

    def unpacked(self, data: bytes, key: str, kind: int, types: Types) -> dict[str, Any]:
        """Return the map of an object from its envelope."""
        need(len(data) >= 24 and data[:4] == b"SNAP" and data[4] == kind, f"{key} is of another kind")
        need(data[5] == 1, f"{key} has version {data[5]}", UnknownError)
        length, checksum = struct.unpack_from("<QQ", data, 8)
        need(length == len(data) - 24, f"{key} has another length")
        need(checksum == xxhash.xxh3_64_intdigest(data[:16] + data[24:]), f"{key}: its checksum")
        decoder = Msgpack(data[24:], maps=True)
        found = typed(decoder.whole(), types)
        need(kind != 2 or decoder.sizes.get("metadata", 0) <= METADATA, f"{key}: its metadata is too long")
        return found

    def records(self, refused: dict[str, Exception] | None = None) -> list[dict[str, Any]]:
        """Return the ruling record of each snapshot, in the order of runs, seqs and ids.

        Lower revisions mean nothing, so they are not read.

        Args:
            refused: receives id -> error of each snapshot whose ruling record is refused; None: the error is raised.
        """
        keys: dict[str, dict[tuple[str, str], dict[int, str]]] = {}
        for key in self.keys("snapshots"):
            match = RECORD_KEY.fullmatch(key)
            if match is not None:
                run, step, snapshot, revision = match.groups()
                keys.setdefault(snapshot, {}).setdefault((run, step), {})[int(revision)] = key
        joined = self.joined() if "pages" in self.config["features"] else {}
        found: dict[str, dict[str, Any]] = {}
        errors: dict[str, Exception] = {}
        for snapshot in [*keys, *(name for name in joined if name not in keys)]:
            places, of_page = keys.get(snapshot, {}), joined.get(snapshot)
            try:
                runs = [place for place in places if place[0] != NO_RUN] or list(places)
                own = [(of_page["run"], f"{of_page['step']:012d}")] if of_page else []
                need(len({*runs, *own}) == 1, f"{snapshot} has several runs or steps")
                if of_page and (not runs or max(places[runs[0]]) <= of_page["revision"]):
                    if isinstance(of_page["found"], Exception):
                        raise of_page["found"]
                    found[snapshot] = of_page["found"]
                else:
                    found[snapshot] = self.record(places[runs[0]][max(places[runs[0]])])
            except REFUSED as error:
                errors[snapshot] = error
        ordered, last = list[dict[str, Any]](), dict[str, int]()
        for record in sorted(found.values(), key=lambda record: (record["run"], record["seq"], record["id"])):
            run, seq = record["run"], record["seq"]
            if seq <= min(last.get(run, -1) + 2**40, 2**53):
                ordered.append(record)
                last[run] = seq
            else:
                errors[record["id"]] = DamagedError(f"run {run}: the seq {seq} is out of reach")
        if refused is None and errors:
            raise next(iter(errors.values()))
        if refused is not None:
            refused.update(errors)
        return ordered

    def joined(self) -> dict[str, dict[str, Any]]:
        """Return what rules in the pages: run, step, revision and record of each snapshot, by its id.

        Of a damaged page, or one that is missing below others, a copy is read from a volume; else it counts as empty.
        """
        copies: dict[tuple[str, int], bytes] = {}
        counts: dict[str, int] = {}
        for key in self.keys("volumes"):
            match = VOLUME_KEY.fullmatch(key)
            if match is None:
                continue
            try:
                run, first, last, name = match[1], int(match[2]), int(match[3]), match[4]
                whole = self.small(key, 12, PAGES)
                of = (whole["run"], whole["first"], whole["last"], whole["id"])
                need(of == (run, first, last, name), f"{key} is another volume")
                data, at = content(whole["pages"], VOLUME), 0
                for number in range(first, last + 1):
                    (size,) = struct.unpack_from("<Q", data, at)
                    copies[run, number] = data[at + 8 : at + 8 + size]
                    at += 8 + size
                need(at == len(data), f"{key} has more than its pages")
                counts[run] = max(counts.get(run, 0), last + 1)
            except REFUSED as error:
                print(f"{key}: {error}", file=sys.stderr)
        for key in self.keys("pages"):
            if match := PAGE_KEY.fullmatch(key):
                counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) * 100 + int(match[3]) + 1)
        found: dict[str, dict[str, Any]] = {}
        for run, count in counts.items():
            pages = [self.page(run, number, copies.get((run, number))) for number in range(count)]
            mended = {number for mends, _ in pages for number in mends}
            for number, (_, facts) in enumerate(pages):
                for name, fact in facts.items() if number not in mended else ():
                    if name not in found or fact["revision"] > found[name]["revision"]:
                        found[name] = fact
        return found

    def page(self, run: str, number: int, copy: bytes | None) -> tuple[list[int], dict[str, dict[str, Any]]]:
        """Return what a page mends, and its facts by id."""
        key = f"pages/{run}/{number // 100:07d}/{number % 100:02d}"
        for of_volume in (False, True):
            try:
                return self.facts(key, run, number, copy or b"" if of_volume else self.read(key))
            except REFUSED as error:
                print(f"{key}: {error}", file=sys.stderr)
        return [], {}

    def facts(self, key: str, run: str, number: int, data: bytes) -> tuple[list[int], dict[str, dict[str, Any]]]:
        """Return what the bytes of a page say."""
        whole = self.unpacked(data, key, 11, PAGE)
        need((whole["run"], whole["number"]) == (run, number), f"{key} is the page of another key")
        mends, facts = integers(whole["mends"]), dict[str, dict[str, Any]]()
        for name, packed in Msgpack(content(whole["live"], PAGE_RECORDS), maps=True).whole():
            of = f"snapshots/{run}/{name}"
            match = RECORD_KEY.fullmatch(of)
            need(match is not None, f"{key}: {name} is no name of a record")
            assert match
            need(match[3] not in facts, f"{key}: {name} is there twice")
            fact: dict[str, Any] = {"run": run, "step": int(match[2]), "revision": int(match[4])}
            try:
                fact["found"] = self.record(of, packed)
            except REFUSED as error:
                fact["found"] = error
            facts[match[3]] = fact
        try:
            pasts = Msgpack(content(whole["past"], PAGE_RECORDS), maps=True).whole()
        except REFUSED:
            pasts = []
        need(len(whole["graves"]) % GRAVE.size == 0, f"{key}: graves of {len(whole['graves'])} bytes")
        rows = list(GRAVE.iter_unpack(whole["graves"]))
        ids = [row[0] for row in rows]
        need(sorted(set(ids)) == ids, f"{key}: graves out of order")
        of_seq = {row[2]: row[0].hex() for row in rows}
        of_seq |= {f["found"]["seq"]: n for n, f in facts.items() if isinstance(f["found"], dict)}
        for (name, step, seq, revision, state), past in zip(rows, pasts or [None] * len(rows), strict=True):
            need(name.hex() not in facts and step < 10**12 and state < 2, f"{key}: a grave out of bounds")
            parent, created, policy, reason, metrics = past or (None, 0.0, "", "", {})
            left = {"id": name.hex(), "run": run, "step": step, "seq": seq, "revision": revision}
            left |= {"state": ("swept", "aborted")[state], "created": created, "policy": policy, "reason": reason}
            left |= {"parent": of_seq.get(parent) if isinstance(parent, int) else parent, "metrics": metrics}
            left |= {"tags": [], "bases": [], "features": [], "manifests": [], "depth": 0, "logical_bytes": 0}
            facts[name.hex()] = {"run": run, "step": step, "revision": revision, "found": left}
        need(len(facts) <= PAGE_SNAPSHOTS, f"{key} has {len(facts)} snapshots")
        return mends, facts

    def record(self, key: str, data: bytes | None = None) -> dict[str, Any]:
        """Read a record, or take its bytes, and compare it with its key."""
        match = RECORD_KEY.fullmatch(key)
        need(match is not None, f"{key} is no key of a record")
        run, step, snapshot, revision = match.groups() if match else ("",) * 4
        found = self.small(key, 2, RECORD) if data is None else self.unpacked(data, key, 2, RECORD)
        fields = (found["run"], found["step"], found["id"], found["revision"])
        need(fields == (run, int(step), snapshot, int(revision)), f"{key} is the record of another key")
        need(0 <= found["generation"] <= 2**53, f"{key}: its generation")
        parent = found["parent"]
        texts = [*found["tags"], *found["bases"], *found["features"], "" if parent is None else parent]
        need(all(isinstance(name, str) for name in texts), f"{key}: a name that is no str")
        need(all(type(n) in (int, float) for n in found["metrics"].values()), f"{key}: a metric that is no number")
        need(found["state"] in STATES, f"{key} has state {found['state']}", UnknownError)
        return found


# --- what the command prints ---


def described(value: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield (path, type and contents) of a state's containers and leaves."""
    if isinstance(value, dict | list | tuple | deque):
        yield path, [type(value).__name__, len(value)]
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from described(child, f"{path}/{key!r}")
    elif isinstance(value, Tensor):
        kind = {"tensor": "Tensor", "parameter": "Parameter", "array": "ndarray"}[value.kind]
        digest = hashlib.sha256(value.data.tobytes()).hexdigest()
        order = [list(value.order)] if value.order else []
        yield path, [kind, value.dtype, list(value.data.shape), value.requires_grad, digest, *order]
    elif isinstance(value, bytes | bytearray):
        yield path, [type(value).__name__, len(value), hashlib.sha256(value).hexdigest()]
    elif isinstance(value, set | frozenset):
        yield path, [type(value).__name__, sorted(map(repr, value))]
    elif isinstance(value, Torch):
        yield path, [value.kind, value.shown]
    else:
        yield path, [type(value).__name__, repr(value)]


FIELDS = ("id", "run", "step", "seq", "state", "parent", "tags", "metrics", "depth", "logical_bytes")


def shown(repository: Repository, record: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a snapshot; a swept or aborted one has no leaves."""
    line = {name: record[name] for name in FIELDS} | {"leaves": None}
    if record["state"] in ("committed", "forgotten"):
        snapshot = Snapshot(repository, record)
        line["metadata"] = repr(snapshot.metadata)
        if snapshot.world_size:
            line["ranks"] = [dict(described(snapshot.state(rank))) for rank in range(snapshot.world_size)]
        else:
            line["leaves"] = dict(described(snapshot.state()))
    return line


def main() -> int:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=first, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("repository", type=pathlib.Path, help="folder of the repository")
    parser.add_argument("--id", help="only the snapshot of this id")
    args = parser.parse_args()
    sys.setrecursionlimit(20 * DEPTH)
    sys.set_int_max_str_digits(0)  # an int of a state may have any number of digits
    repository, refused = Repository(args.repository), dict[str, Exception]()
    for record in repository.records(refused):
        if args.id in (None, record["id"]):
            try:
                print(json.dumps(shown(repository, record)), flush=True)
            except REFUSED as error:
                refused[record["id"]] = error
    named = {snapshot: error for snapshot, error in refused.items() if args.id in (None, snapshot)}
    for snapshot, why in named.items():
        print(f"id:{snapshot}: {type(why).__name__}: {why}", file=sys.stderr)
    return 1 if named else 0


if __name__ == "__main__":
    raise SystemExit(main())
