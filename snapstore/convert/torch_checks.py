"""Checks of a file of torch before torch reads it: that it takes time and memory as the file is long.

In: an open file. Out: whether torch may map it, or an error. `torch.load(weights_only=True)` runs no code, but a small
file can still name one tuple so often that its hash never ends, or ask for any number of bytes. So each pickle is
followed here, with the sizes of values in place of the values. Where torch stops with an error, this stops too: torch
reports it.

Python's `zipfile` is not used: it reads some archives in another way than torch. It takes a name from an extra field,
cuts it off at a NUL, and finds the directory and large sizes elsewhere. So the directory is read here, an archive that
two readers could read in two ways is refused, and torch's own reader gives the pickle.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import struct
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timezone
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..chunks import limits
from ..errors import InvalidInputError
from ..state.values.classes import is_namespace
from ..state.values.containers import MAX_DEPTH, metadata_of
from .checkpoint import damaged

#: The error for a file that torch cannot read.
NOT_TORCH = "not a PyTorch file, or damaged"
#: The first bytes of an archive of torch.
ZIP = b"PK\x03\x04"
#: A state from elsewhere may have so many values, or more if its file has nearly as many.
MAX_PLACES = 1_000_000
#: So many characters count as a value.
_VALUE_CHARACTERS = 1024
#: A pickle may visit so many values for each of its bytes.
_VISITS_A_BYTE = 16
#: How many pickles precede the bytes of the tensors in torch's form before zip archives.
_LEGACY_PICKLES = 5
#: How many parts the name of a storage has there.
_LEGACY_NAME = 6
#: torch and pickle call these with text only. With a number they take as much memory as it says.
_SIZED = re.compile(r"\w+\.bytearray|torch\..*(Tensor|Storage)")
#: These go through their arguments. A tensor has as many rows as its shape says.
_ITERATED = re.compile(
    r"(?:builtins|__builtin__)\.(?:frozen)?set|collections\.(?:Counter|OrderedDict|deque)|torch\.Size"
)
#: pickle writes bytes as text in one of these encodings. Others take much time or memory.
_ENCODINGS = ("latin1", "latin-1")
#: The entry with the pickle in an archive of torch.
_PICKLE = b"data.pkl"
#: An entry in the directory of a zip archive: magic bytes, flags, method, CRC-32, size packed and unpacked, lengths of
#: the name, the extra fields and the comment, attributes, and the offset of the local header.
_ENTRY = struct.Struct("<4s4xHH4xLLLHHH4xLL")
#: The local header: magic bytes, and the lengths of the name and the extra fields between it and the content.
_HEADER = struct.Struct("<4s22xHH")
#: A size or an offset of an entry that is in its extra fields.
_WIDE = 0xFFFFFFFF
#: Flags of encrypted and patched entries; the attribute of a folder, of which torch reads nothing.
_ENCRYPTED, _IS_FOLDER = 0x2061, 0x10
#: torch cuts off longer names.
_MAX_NAME = 511
#: The bytes of an element, by the name of the type of a storage in a pickle.
_ITEM_SIZES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"), 1),
    **{"Half": 2, "BFloat16": 2, "Short": 2, "Int": 4, "Float": 4, "QInt32": 4},
    **{"Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16},
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}


class Bounded(NamedTuple):
    """A file that `require_bounded` has checked.

    Attributes:
        is_mapped: whether torch may map it instead of reading it.
        names: of the classes and functions that its pickles name, with their modules.
    """

    is_mapped: bool
    names: set[str]


def require_bounded(file: BinaryIO, where: str, *, may_map: bool) -> Bounded:
    """Check a file of torch. It is left at its beginning.

    A mapped file gives the same values, unless it is compressed, or gives one storage two types.

    Args:
        where: its name in errors.
        may_map: whether the caller can map it.

    Raises:
        InvalidInputError: it is damaged, or made to waste time or memory.
        CapabilityError: it does not fit into memory.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(len(ZIP)) == ZIP:
        found = _require_bounded_zip(file, size, where, may_map=may_map)
    else:
        file.seek(0)
        scan = _Scan(where, size, None)
        for _ in range(_LEGACY_PICKLES):
            if not scan.follow(file):
                break
        found = Bounded(False, scan.names)
    file.seek(0)
    return found


def _require_bounded_zip(file: BinaryIO, size: int, where: str, *, may_map: bool) -> Bounded:
    import torch

    advice = "import it on a machine with more memory, or unpack it and save it again"
    with damaged(f"{where}: {NOT_TORCH}"):
        found = entries(file)
        folder = len(found[0].name.partition(b"/")[0])
        records = {entry.name.lower()[folder + 1 :]: entry for entry in found}
        checksum = records[_PICKLE].crc32
    packed, unpacked = sum(entry.packed_size for entry in found), sum(entry.size for entry in found)
    if packed > size:
        raise _wasteful(where, f"its entries have {packed} bytes, but it has {size}")
    is_mapped = may_map and all(entry.is_stored for entry in found)
    if not is_mapped:
        limits.require_memory(unpacked, f"{where}, unpacked", advice)
    with damaged(f"{where}: {NOT_TORCH}"):
        file.seek(0)
        pickled = torch._C.PyTorchFileReader(file).get_record(_PICKLE.decode())
        if checksum and zlib.crc32(pickled) != checksum:  # torch can be told to write none
            raise ValueError(f"the CRC-32 of data.pkl is {zlib.crc32(pickled):08x}, expected {checksum:08x}")
    scan = _Scan(where, size, records)
    scan.follow(io.BytesIO(pickled))
    if is_mapped and scan.has_two_types:
        limits.require_memory(unpacked, where, advice)
    return Bounded(is_mapped and not scan.has_two_types, scan.names)


class ZipEntry(NamedTuple):
    """An entry of a zip archive. Sizes and offsets are in bytes.

    Attributes:
        size: of its content, unpacked.
        is_stored: whether the content is not compressed.
        start: the offset of the content in the file.
        place: the offset of its part of the directory in the file.
    """

    name: bytes
    size: int
    packed_size: int
    is_stored: bool
    crc32: int
    start: int
    place: int


def entries(file: BinaryIO) -> list[ZipEntry]:
    """Return the entries of a zip archive, as torch reads them.

    Raises:
        ValueError: it is damaged, or torch or another reader could read it in another way.
    """
    directory, start, count = _directory(file)
    found, names, at = list[ZipEntry](), set[bytes](), 0
    while at < len(directory):
        part = directory[at : at + _ENTRY.size].ljust(_ENTRY.size, b"\0")
        magic, flags, method, crc32, packed, size, *lengths, attributes, header = _ENTRY.unpack(part)
        name_end = at + _ENTRY.size + lengths[0]
        name = directory[at + _ENTRY.size : name_end]
        wide = _wide_numbers(directory[name_end : name_end + lengths[1]])
        size, packed, header = (next(wide, -1) if value == _WIDE else value for value in (size, packed, header))
        what, place, at = f"entry {len(found)} of the archive, {name[:80]!r},", start + at, name_end + sum(lengths[1:])
        if magic != b"PK\x01\x02" or at > len(directory) or flags & _ENCRYPTED or method not in (0, 8):
            raise ValueError(f"{what} cannot be read")
        is_empty = attributes & _IS_FOLDER or name.endswith(b"/") or not packed
        if min(size, packed, header) < 0 or (is_empty and size) or (method == 0 and packed != size):
            raise ValueError(f"{what} has a wrong size")
        folder = found[0].name if found else name
        if not name.startswith(folder.partition(b"/")[0] + b"/") or b"\0" in name or len(name) > _MAX_NAME:
            raise ValueError(f"{what} has no name in the folder of the archive")
        if name.lower() in names:  # torch takes a name in any case
            raise ValueError(f"{what} has a duplicate name")
        names.add(name.lower())
        content = header + _HEADER.size
        if content <= start:
            file.seek(header)
            magic, *lengths = _HEADER.unpack(file.read(_HEADER.size))
            content += sum(lengths)
        if content + packed > start or magic != b"PK\x03\x04":
            raise ValueError(f"{what} is not where the directory says")
        found.append(ZipEntry(name, size, packed, method == 0, crc32, content, place))
    if len(found) != count or not found:
        raise ValueError(f"the directory of the archive has {len(found)} entries, expected {count}")
    return found


def _directory(file: BinaryIO) -> tuple[bytes, int, int]:
    """Return the directory of a zip archive, its offset in the file [bytes], and how many entries it states.

    Raises:
        ValueError: it does not lie right before the end of the file.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 98))
    end = file.read(98).rjust(98, b"\0")
    at, (count, length, start) = size - 22, struct.unpack("<HLL", end[86:96])
    if end[56:60] == b"PK\x06\x07":  # the directory of a long archive
        at, (count, length, start) = size - 98, struct.unpack("<QQQ", end[32:56])
        if end[:4] != b"PK\x06\x06" or int.from_bytes(end[64:72], "little") != at:
            raise ValueError("the directory of the archive is not at its end")
    if end[76:80] != b"PK\x05\x06" or start + length != at:
        raise ValueError("the directory of the archive is not at its end")
    file.seek(start)
    return file.read(length), start, count


def _wide_numbers(extra: bytes) -> Iterator[int]:
    """Yield the numbers of 64 bits that the extra fields of an entry have in place of its sizes and its offset."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            data = extra[at + 4 : at + 4 + length]
            yield from struct.unpack_from(f"<{len(data) // 8}Q", data)
            return
        at += 4 + length


def _wasteful(where: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{where}: {why}; the file is damaged or hostile")


class _Value:
    """A value that a pickle would make.

    Attributes:
        value: of a number, a text or a name; else None.
        items: of a container; of a dict: its keys.
        size: how many values its hash visits.
        depth: how deeply tuples are nested in it.
        is_made: whether a function has returned it, such as a tensor.
    """

    __slots__ = ("depth", "is_made", "items", "size", "value")

    def __init__(self, value: Any = None, items: Sequence[_Value] = (), size: int = 1, depth: int = 0) -> None:
        self.value, self.items, self.size, self.depth, self.is_made = value, items, size, depth, False


_NOTHING = _Value()


def _tuple(items: Sequence[_Value]) -> _Value:
    size, depth = 1, 0
    for item in items:
        size += item.size
        if item.depth > depth:
            depth = item.depth
    return _Value(None, tuple(items), min(size, sys.maxsize), depth + 1)


class _Scan:
    """Follows the pickles of one file.

    Args:
        size: of the file [bytes].
        records: the entries of its archive by their names in lower case; None: it is of the form before archives.

    Attributes:
        has_two_types: whether one storage has two types of elements. torch.save writes this for empty ones only.
        names: of the classes and functions that were met, as Python 3 knows them.
    """

    def __init__(self, where: str, size: int, records: Mapping[bytes, ZipEntry] | None) -> None:
        self._where, self._size, self._records = where, size, records
        self._visits, self._at, self._elements = 0, 0, 0
        self._storages: dict[Any, tuple[Any, Any]] = {}
        self.has_two_types = False
        self.names: set[str] = set()
        self._stack: list[_Value] = []
        self._outer: list[list[_Value]] = []
        self._memo: dict[int, _Value] = {}

    def follow(self, file: BinaryIO) -> bool:
        """Follow one pickle; return whether it ends well, so that torch goes on behind it.

        Raises:
            InvalidInputError: it is made to waste time or memory.
        """
        self._stack, self._outer, self._memo = [], [], {}
        try:
            for opcode, arg, at in pickletools.genops(file):
                self._at = at or 0
                if opcode.name == "STOP":
                    return True
                if not self._do(opcode.name, arg):
                    return False
        except InvalidInputError:
            raise
        except (ValueError, LookupError, OverflowError):  # damaged: torch says so
            pass
        return False

    def _do(self, name: str, arg: Any) -> bool:
        stack = self._stack
        if name in ("BINPUT", "LONG_BINPUT"):
            self._memo[arg] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[arg])
        elif name in ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINSTRING"):
            stack.append(_Value(arg))
        elif name == "GLOBAL":
            stack.append(_Value(arg.replace(" ", ".")))
            self.names.add(str(stack[-1].value).replace("__builtin__.", "builtins."))
        elif name in ("NONE", "NEWFALSE", "NEWTRUE", "BINFLOAT"):
            stack.append(_NOTHING)
        elif name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"):
            stack.append(_Value(None, []))
        elif name == "MARK":
            self._outer.append(stack)
            self._stack = []
        elif name in _TUPLES:
            count = _TUPLES[name]
            items = self._marked() if count is None else stack[len(stack) - count :]
            del self._stack[len(self._stack) - (count or 0) :]
            self._stack.append(_tuple(items))
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS"):
            self._grow(name)
        elif name in ("REDUCE", "NEWOBJ"):
            args, function = stack.pop(), stack.pop()
            stack.append(self._call(function, args))
        elif name == "BUILD":
            state = stack.pop()
            if state.is_made:
                raise _wasteful(self._where, "sets the attributes of an object from another value than a dict or tuple")
            self._visit_args([state, *state.items])
        elif name == "BINPERSID":
            self._storage(stack.pop())
            stack.append(_NOTHING)
        else:
            return name == "PROTO"
        return True

    def _marked(self) -> list[_Value]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _grow(self, name: str) -> None:
        """Add to a list or a dict; a dict hashes its keys."""
        count = {"APPEND": 1, "SETITEM": 2}.get(name)
        items = self._marked() if count is None else [self._stack.pop() for _ in range(count)][::-1]
        if name.startswith("SETITEM"):
            items = items[::2]
            for key in items:
                self._visit(key)
        container = self._stack[-1].items
        if not isinstance(container, list):
            raise LookupError("no container")
        container += items

    def _visit(self, value: _Value) -> None:
        """Count a hash of a value.

        Raises:
            InvalidInputError: it is too deep, or there were too many.
        """
        if value.depth > MAX_DEPTH:
            raise _wasteful(self._where, f"has a key of more than {MAX_DEPTH} nested tuples")
        self._spend(value.size)

    def _spend(self, count: int) -> None:
        self._visits += count
        if self._visits > MAX_PLACES and self._visits > _VISITS_A_BYTE * self._at:
            raise _wasteful(self._where, f"names values so often that reading it visits more than {MAX_PLACES}")

    def _visit_args(self, args: Sequence[_Value]) -> None:
        """Count copies of arguments, and hashes of their items and of the keys among pairs of items."""
        for arg in args:
            self._visit(arg)
            self._spend(len(arg.value if isinstance(arg.value, str) else arg.items))
            for item in arg.items:
                self._visit(item)
                for part in item.items[:2]:
                    self._visit(part)

    def _call(self, function: _Value, args: _Value) -> _Value:
        """Return what a function that torch allows makes.

        Raises:
            InvalidInputError: it takes much time or memory.
        """
        self._visit_args(args.items)
        made = _Value(None, [item for arg in args.items for item in arg.items], args.size, args.depth)
        name = str(function.value)
        while name.endswith("._rebuild_from_type_v2") and len(args.items) > 2:  # it calls its first argument
            name, args = str(args.items[0].value), args.items[2]
        texts = [item.value for item in args.items]
        if _SIZED.fullmatch(name) and not all(type(text) is str for text in texts):
            raise _wasteful(self._where, f"calls {name} with other values than text")
        if _ITERATED.fullmatch(name) and any(item.is_made for item in args.items):
            raise _wasteful(self._where, f"calls {name} with other values than lists, dicts and tuples")
        made.is_made = True
        if name.endswith((".encode", ".bytearray")) and texts:
            if texts[1:] and texts[1] not in _ENCODINGS:
                raise _wasteful(self._where, f"encodes text as {str(texts[1])[:20]!r}, which pickle never does")
            made.value = texts[0]
        return made

    def _storage(self, name: _Value) -> None:
        """Count the elements of a storage; in an archive, compare them with their entry.

        Raises:
            InvalidInputError: all storages have more elements than the file has bytes, or one is not what its entry is.
        """
        self._visit(name)
        if self._records is not None:
            self._require_entry([item.value for item in name.items], self._records)
        elif len(name.items) == _LEGACY_NAME:
            key, elements = name.items[2].value or name.items[2], name.items[4].value
            if type(elements) is int and key not in self._storages:
                self._storages[key] = key, None
                self._elements += elements
                if self._elements > self._size:
                    raise _wasteful(self._where, f"has {self._size} bytes, but its tensors have more elements")

    def _require_entry(self, name: list[Any], records: Mapping[bytes, ZipEntry]) -> None:
        """Check that a storage has the size of its entry, and that the entry has one name: torch reads it by each.

        A part of an element may follow the last one: torch writes such a file, and only maps it.

        Raises:
            InvalidInputError: it is not so.
        """
        _, kind, key, _, elements = name  # a ValueError ends the scan: torch refuses other names
        item_size = _ITEM_SIZES.get(str(kind).rpartition(".")[2].removesuffix("Storage"))
        if type(key) is not str or type(elements) is not int or item_size is None:
            raise _wasteful(self._where, f"names a storage as {str(name)[:80]}, which torch.save never does")
        entry = records.get(f"data/{key}".encode(errors="surrogatepass").lower())
        first_key, first_kind = self._storages.setdefault(entry, (key, kind))
        if entry is None or elements != entry.size // item_size or key != first_key:
            has = "is missing" if entry is None else f"has {entry.size} bytes"
            what = f"{elements} elements of {item_size} bytes in data/{key[:80]}, which {has}"
            raise _wasteful(self._where, f"names {what}")
        self.has_two_types |= kind != first_kind


def require_tree(state: Any, where: str) -> None:
    """Check that few values that are named again and again do not make a very large state. A KiB of text is a value.

    Raises:
        InvalidInputError: it would be stored as more than MAX_PLACES values, and 16 times what the file has.
    """
    places: dict[int, int] = {}  # of values in each container and long text, by id
    in_file = 0
    pending = [(state, False)]
    while pending:
        value, is_counted = pending.pop()
        if (characters := _characters(value)) >= _VALUE_CHARACTERS and id(value) not in places:
            places[id(value)] = 1 + characters // _VALUE_CHARACTERS
            in_file += places[id(value)]
        inside = _inside(value)
        if inside is None or (id(value) in places and not is_counted):
            continue
        if is_counted:
            places[id(value)] = min(1 + sum(places.get(id(child), 1) for child in inside), sys.maxsize)
        else:
            places[id(value)] = 1  # while it is open, for a container that holds itself
            in_file += len(inside)
            pending.append((value, True))
            pending += [(child, False) for child in inside]
    if places.get(id(state), 1) > max(MAX_PLACES, 16 * in_file):
        raise InvalidInputError(
            f"{where}: its {in_file} values refer to each other and expand to more than {MAX_PLACES}; the file is "
            "damaged or hostile"
        )


def _characters(value: Any) -> int:
    """Return the length of a value that is stored as text or bytes each time that it is named; 0 for other values."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, np.generic):
        return value.nbytes
    return len(str(value)) if isinstance(value, PurePath | timezone) else 0


def _inside(value: Any) -> list[Any] | None:
    """Return the keys and values of a container or namespace; None for other values."""
    if isinstance(value, dict):
        return [*value, *value.values(), metadata_of(value)]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    return list(vars(value).values()) if is_namespace(value) else None
