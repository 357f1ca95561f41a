"""Checks of a file of torch before torch reads it: that it takes time and memory as the file is long.

In: an open file. Out: nothing, or an error. `torch.load(weights_only=True)` runs no code, but a small file can still
name one tuple so often that its hash takes for ever, or ask for any number of bytes. So each pickle is followed here,
with the sizes of values in place of the values. Where torch stops with an error, this stops too: torch reports it.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO

from ..chunks import limits
from ..errors import InvalidInputError
from ..state.containers import MAX_DEPTH
from .safetensors_file import first_line

#: A state from elsewhere may have so many values, or more if its file has nearly as many.
MAX_PLACES = 1_000_000
#: A pickle may visit so many values for each of its bytes.
_VISITS_A_BYTE = 16
#: How many pickles precede the bytes of the tensors in torch's form before zip archives.
_LEGACY_PICKLES = 5
#: How many parts the name of a storage has there.
_LEGACY_NAME = 6
#: torch and pickle call these with text only. With a number they take as much memory as it says.
_SIZED = re.compile(r"\w+\.bytearray|torch\..*(Tensor|Storage)")
#: pickle writes bytes as text in one of these encodings. Others take much time or memory.
_ENCODINGS = ("latin1", "latin-1")
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}


def require_bounded(file: BinaryIO, where: str, *, mapped: bool) -> None:
    """Check a file of torch; it is left at its beginning.

    Args:
        where: its name in errors.
        mapped: whether torch will map it instead of reading it.

    Raises:
        InvalidInputError: it is damaged, or made to waste time or memory.
        CapabilityError: it does not fit into memory.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(4) == b"PK\x03\x04":
        _require_bounded_zip(file, size, where, mapped=mapped)
    else:
        file.seek(0)
        scan = _Scan(where, size)
        for _ in range(_LEGACY_PICKLES):
            if not scan.follow(file):
                break
    file.seek(0)


def _require_bounded_zip(file: BinaryIO, size: int, where: str, *, mapped: bool) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            _require_one_directory(file, size)
            stored = sum(entry.file_size for entry in entries if entry.compress_type == zipfile.ZIP_STORED)
            unpacked = sum(entry.file_size for entry in entries) - stored
            if stored > size:
                raise _wasteful(where, f"its entries have {stored} bytes, but it has {size}")
            advice = "import it on a machine with more memory, or unpack it and save it again"
            limits.require_memory(unpacked if mapped else stored + unpacked, f"{where}, unpacked", advice)
            for entry in entries:
                if entry.filename.lower().endswith("data.pkl"):  # torch takes a name in any case
                    _Scan(where, size).follow(io.BytesIO(archive.read(entry)))
    except InvalidInputError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"{where}: not a PyTorch file, or damaged: {first_line(error)}") from error


def _require_one_directory(file: BinaryIO, size: int) -> None:
    """Check that torch finds the directory of a zip archive where Python does: Python allows bytes before and after.

    Raises:
        ValueError: it does not.
    """
    file.seek(max(0, size - 98))
    end = file.read().rjust(98, b"\0")
    at, (length, start) = size - 22, struct.unpack("<LL", end[88:96])
    if end[56:60] == b"PK\x06\x07":  # the directory of a long archive
        at, (length, start) = size - 98, struct.unpack("<QQ", end[40:56])
        if int.from_bytes(end[64:72], "little") != at:
            raise ValueError("the directory of the archive is not at its end")
    if end[76:80] != b"PK\x05\x06" or start + length != at:
        raise ValueError("the directory of the archive is not at its end")


def _wasteful(where: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{where}: {why}; it is damaged, or made to waste time or memory")


class _Value:
    """A value that a pickle would make.

    Attributes:
        value: of a number, a text or a name; else None.
        items: of a container; of a dict: its keys.
        size: how many values its hash visits.
        depth: how deeply tuples are nested in it.
    """

    __slots__ = ("depth", "items", "size", "value")

    def __init__(self, value: Any = None, items: Sequence[_Value] = (), size: int = 1, depth: int = 0) -> None:
        self.value, self.items, self.size, self.depth = value, items, size, depth

    @property
    def length(self) -> int:
        """How many values, bytes or characters a copy of it takes."""
        return len(self.value) if isinstance(self.value, str) else len(self.items)


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
    """

    def __init__(self, where: str, size: int) -> None:
        self._where, self._size = where, size
        self._visits, self._at, self._elements = 0, 0, 0
        self._storages = set[Any]()
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
            self._spend(arg.length)
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
        if name.endswith((".encode", ".bytearray")) and texts:
            if texts[1:] and texts[1] not in _ENCODINGS:
                raise _wasteful(self._where, f"encodes text as {str(texts[1])[:20]!r}, which pickle never does")
            made.value = texts[0]
        return made

    def _storage(self, name: _Value) -> None:
        """Count the elements of a storage. In an archive torch compares them with their entry; before, with nothing.

        Raises:
            InvalidInputError: all storages have more elements than the file has bytes.
        """
        self._visit(name)
        if len(name.items) != _LEGACY_NAME:
            return
        key, elements = name.items[2].value or name.items[2], name.items[4].value
        if type(elements) is int and key not in self._storages:
            self._storages.add(key)
            self._elements += elements
            if self._elements > self._size:
                raise _wasteful(self._where, f"has {self._size} bytes, but its tensors have more elements")


def require_tree(state: Any, where: str) -> None:
    """Check that few lists that hold each other again and again do not make a state of very many values.

    Raises:
        InvalidInputError: it would be stored as more than MAX_PLACES values, and 16 times what the file has.
    """
    places: dict[int, int] = {}  # of values in each container, by id
    in_file = 0
    pending = [(state, False)]
    while pending:
        value, is_counted = pending.pop()
        if not isinstance(value, dict | list | tuple | set | frozenset) or (id(value) in places and not is_counted):
            continue
        inside = [*value, *value.values()] if isinstance(value, dict) else list(value)
        if is_counted:
            places[id(value)] = min(1 + sum(places.get(id(child), 1) for child in inside), sys.maxsize)
        else:
            places[id(value)] = 1  # while it is open, for a container that holds itself
            in_file += len(inside)
            pending.append((value, True))
            pending += [(child, False) for child in inside]
    if places.get(id(state), 1) > max(MAX_PLACES, 16 * in_file):
        raise InvalidInputError(
            f"{where}: holds {in_file} values, which name each other so often that they make more than {MAX_PLACES}; "
            "it is damaged, or made to waste time"
        )
