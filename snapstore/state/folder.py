"""Folders: any folder of files as a state of bytes, and back.

In: a folder. Out: (name, bytes) of blocks, for a save, which stores equal ones once; and back. A file is one block, or
several of at most BLOCK_BYTES. Small files share a block with their neighbours by name. The last block, `folder`, is
the index: names, which files are executable, symbolic links, empty files and folders.

An index may be forged: a name that leads out of the folder, also through a link, is refused. An unpacked folder gets
its name when all of it is written.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote_from_bytes

import msgspec
import numpy as np

from ..arrays import Bytes
from ..errors import AlreadyExistsError, FormatError, InvalidInputError, OutputError, StorageError
from ..text import printable
from ..threads import msgpack_decoder

INDEX = "folder"
MAGIC = b"snapstore folder 1\n"
#: A file is read and written in blocks of this size [bytes].
BLOCK_BYTES = 64 * 1024 * 1024
#: Files below SMALL_BYTES share a block with their neighbours, until it has TOGETHER_BYTES, about one chunk.
SMALL_BYTES, TOGETHER_BYTES = 64 * 1024, 1024 * 1024
#: A hash of the name ends a block of small files after one in so many names. So a new file changes only blocks near it.
ENDS_EVERY = 64

File, Folder, Link = "file", "folder", "link"


class FolderEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file, folder or symbolic link.

    Attributes:
        name: path in the folder, in the bytes of the file system, with `/` between its elements.
        kind: "file", "folder" or "link".
        size: of a file [bytes].
        block, start: the first block of a file, and where it begins in it [bytes]. Its next blocks have this name and a
            number.
        executable: whether its owner may run a file.
        target: of a link.
    """

    name: bytes
    kind: str
    size: int = 0
    block: str = ""
    start: int = 0
    executable: bool = False
    target: bytes = b""


class FolderIndex(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The index of a folder: what lies in it, by name, and the size of a block [bytes]."""

    entries: list[FolderEntry]
    block_bytes: int


class Unpacked(NamedTuple):
    """The contents of a folder that was written.

    Attributes:
        files: how many, links included.
        nbytes: of all files.
    """

    files: int
    nbytes: int


def pack_folder(path: str | os.PathLike[str], *, follow_links: bool = False) -> Iterator[tuple[str, Any]]:
    """Return a folder as an iterator of (name, (n,) uint8), which `save` takes as a state. It is read once.

    Args:
        follow_links: store the file that a link out of the folder leads to. Without it such a link is an error; links
            inside the folder stay links.

    Raises:
        InvalidInputError: it is no folder; or, while it is saved: it holds a device, socket or pipe, or a link that
            leads out of it, or something in it changed. Nothing is committed then.
        StorageError: something in it cannot be read.
    """
    if not Path(path).is_dir():
        raise InvalidInputError(f"{_shown(path)}: expected a folder, found none")
    return _Packer(Path(path), follow_links).blocks()


class _Packer:
    """Reads a folder, and notices what changes meanwhile."""

    def __init__(self, root: Path, follow_links: bool) -> None:
        self._root, self._inside, self._follow = root, root.resolve(), follow_links
        self._entries: list[FolderEntry] = []

    def blocks(self) -> Iterator[tuple[str, Bytes]]:
        """Yield all blocks, the index last."""
        found = self._survey()
        small: list[tuple[bytes, os.stat_result]] = []
        for name, about in sorted(found.items()):
            if isinstance(about, bytes):
                self._entries.append(FolderEntry(name, Link, target=about))
            elif about is None:
                self._entries.append(FolderEntry(name, Folder))
            elif about.st_size < SMALL_BYTES:
                small.append((name, about))
                is_end = zlib.crc32(name) % ENDS_EVERY == 0
                if is_end or sum(of.st_size for _, of in small) >= TOGETHER_BYTES:
                    yield from self._together(small)
                    small = []
            else:
                yield from self._file(name, about)
        yield from self._together(small)
        now = self._survey()
        for name in sorted(found.keys() | now.keys()):
            if name not in now or name not in found or not _is_same(found[name], now[name]):
                raise self._changed(name)
        index = FolderIndex(sorted(self._entries, key=lambda entry: entry.name), BLOCK_BYTES)
        yield INDEX, np.frombuffer(MAGIC + msgspec.msgpack.encode(index), np.uint8)

    def _survey(self) -> dict[bytes, os.stat_result | bytes | None]:
        """Return the contents of the folder by name: the status of a file, the target of a link, None for a folder."""
        found: dict[bytes, os.stat_result | bytes | None] = {}

        def failed(error: OSError) -> None:
            raise StorageError(f"{_shown(error.filename)}: cannot be read: {error.strerror}") from error

        for above, folders, files in os.walk(self._root, onerror=failed):
            for path in (Path(above, each) for each in (*folders, *files)):
                name = os.fsencode(path.relative_to(self._root))
                try:
                    found[name] = self._about(path)
                except FileNotFoundError as error:
                    raise self._changed(name) from error
                except OSError as error:
                    failed(error)
        return found

    def _about(self, path: Path) -> os.stat_result | bytes | None:
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            target = path.readlink()
            if not target.is_absolute() and _leads_inside(path, self._inside):
                return os.fsencode(target)
            if not self._follow:
                why = "an absolute path" if target.is_absolute() else "outside of the folder"
                raise InvalidInputError(
                    f"{_shown(path)}: is a link to {_shown(target)}, {why}; pass follow_links=True (shell: "
                    "--follow-links) to store that file, or remove the link"
                )
            about = path.stat()
            if stat.S_ISDIR(about.st_mode):
                raise InvalidInputError(f"{_shown(path)}: is a link to a folder outside; only files are followed")
        if stat.S_ISDIR(about.st_mode):
            return None
        if not stat.S_ISREG(about.st_mode):
            raise InvalidInputError(
                f"{_shown(path)}: is a device, socket or pipe; only files, folders and links are stored"
            )
        return about

    def _file(self, name: bytes, about: os.stat_result) -> Iterator[tuple[str, Bytes]]:
        """Yield a file in blocks."""
        block = f"file:{quote_from_bytes(name)}"
        for number, first in enumerate(range(0, about.st_size, BLOCK_BYTES)):
            yield _numbered(block, number), self._read(name, about, first, min(BLOCK_BYTES, about.st_size - first))
        self._entries.append(FolderEntry(name, File, about.st_size, block, 0, _is_executable(about)))

    def _together(self, small: list[tuple[bytes, os.stat_result]]) -> Iterator[tuple[str, Bytes]]:
        """Yield small files as one block."""
        block, read, start = f"small:{quote_from_bytes(small[0][0])}" if small else "", [], 0
        for name, about in small:
            read.append(self._read(name, about, 0, about.st_size))
            place = (block, start) if about.st_size else ("", 0)
            self._entries.append(FolderEntry(name, File, about.st_size, *place, _is_executable(about)))
            start += about.st_size
        if start:
            yield block, np.concatenate(read)

    def _read(self, name: bytes, about: os.stat_result, first: int, count: int) -> Bytes:
        """Read a span of a file.

        Raises:
            InvalidInputError: the file is not as it was when it was found.
            StorageError: it cannot be read.
        """
        path, data, done = self._root / os.fsdecode(name), np.empty(count, np.uint8), 0
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if self._follow else os.O_NOFOLLOW))
            try:
                while done < count and (got := os.preadv(file, [data[done:].data], first + done)):
                    done += got
                now = os.fstat(file)
            finally:
                os.close(file)
        except FileNotFoundError as error:
            raise self._changed(name) from error
        except OSError as error:
            raise StorageError(f"{_shown(path)}: cannot be read: {error.strerror}") from error
        if done < count or not _is_same(about, now):
            raise self._changed(name)
        return data

    def _changed(self, name: bytes) -> InvalidInputError:
        return InvalidInputError(
            f"{_shown(self._root / os.fsdecode(name))}: changed while the folder was saved; nothing was committed; "
            "save it again when nothing writes into it"
        )


def is_folder(blocks: Mapping[str, Any]) -> bool:
    """Return whether `pack_folder` made the tensors of a snapshot, by their names and then by the index."""
    if INDEX not in blocks or not all(name == INDEX or name.startswith(("file:", "small:")) for name in blocks):
        return False
    index = blocks[INDEX]
    return index.nbytes > len(MAGIC) and _span(index, 0, len(MAGIC)).tobytes() == MAGIC


def unpack_folder(blocks: Mapping[str, Any], path: str | os.PathLike[str]) -> Unpacked:
    """Write the folder that `pack_folder` packed.

    Args:
        blocks: `Repository.tensors(ref)`, which is read block by block, or a restored state.
        path: the new folder; it does not exist yet, or is empty. It is not the current folder, which would be replaced.

    Raises:
        InvalidInputError: the snapshot does not hold a folder; the folder above `path` is missing; `path` ends with
            ".." or is the current folder.
        AlreadyExistsError: `path` is a file, a link, or a folder that is not empty.
        FormatError: an entry leads out of the folder, or contradicts another one or the blocks.
        StorageError: the folder cannot be written; nothing is left behind.
    """
    target = Path(path)
    index = index_of(blocks)
    if target.name in ("", "..") or (target.is_dir() and target.samefile(os.curdir)):
        raise InvalidInputError(f"{_shown(target)}: expected the name of a new or an empty folder, not the current one")
    if os.path.lexists(target) and not (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
        raise AlreadyExistsError(f"{_shown(target)}: exists; name a new or an empty folder")
    if not target.parent.is_dir():
        raise InvalidInputError(f"{_shown(target)}: the folder above is missing; create it first")
    hidden = target.parent / f".snapstore-{secrets.token_hex(8)}.tmp"
    try:
        hidden.mkdir(0o700)  # nobody else sees what is in it
        new = hidden / "new"
        new.mkdir()
        _Unpacker(blocks, new, index.block_bytes).write(index.entries)
        new.rename(target)
    except OSError as error:
        raise OutputError(
            f"{_shown(target)}: cannot be written: {error.strerror or error}; nothing was left behind"
        ) from error
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(hidden)
    return Unpacked(sum(entry.kind != Folder for entry in index.entries), sum(entry.size for entry in index.entries))


def index_of(blocks: Mapping[str, Any]) -> FolderIndex:
    """Return the index of a folder, in which the folder of each entry comes before the entry.

    Raises:
        InvalidInputError: the snapshot does not hold a folder.
        FormatError: an entry has a name that leads out of the folder, or contradicts another one.
    """
    data = _span(blocks[INDEX], 0, None).tobytes() if INDEX in blocks else b""
    if not data.startswith(MAGIC):
        raise InvalidInputError("unpack_folder: this snapshot does not hold a folder; restore it as a state")
    try:
        index = msgpack_decoder(FolderIndex).decode(data[len(MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"folder: its index does not decode: {error}") from error
    if index.block_bytes < 1:
        raise FormatError(f"folder: blocks of {index.block_bytes} bytes")
    kinds: dict[bytes, str] = {}
    for entry in index.entries:
        above, _, last = entry.name.rpartition(b"/")
        wrong = entry.name.startswith(b"/") or last in (b"", b".", b"..") or b"\0" in entry.name + entry.target
        if wrong or entry.kind not in (File, Folder, Link) or entry.name in kinds:
            raise FormatError(f"folder: {_shown(entry.name)}: a {printable(entry.kind)} of this name is refused")
        if above and kinds.get(above) != Folder:
            raise FormatError(f"folder: {_shown(entry.name)}: lies in no folder of the index; refused")
        if entry.size < 0 or entry.start < 0 or (entry.kind != File and entry.size):
            raise FormatError(f"folder: {_shown(entry.name)}: {entry.size} bytes at {entry.start}")
        kinds[entry.name] = entry.kind
    claimed = sum(entry.size for entry in index.entries)
    stored = sum(value.nbytes for name, value in blocks.items() if name != INDEX)
    if claimed > stored:
        raise FormatError(f"folder: its files have {claimed} bytes, its blocks {stored}")
    return index


def file_spans(entry: FolderEntry, first: int, end: int, block_bytes: int) -> Iterator[tuple[str, int, int]]:
    """Yield (block, start, count) of the spans that hold the bytes [first, end) of a file."""
    while first < end:
        number, start = divmod(entry.start + first, block_bytes)
        count = min(end - first, block_bytes - start)
        yield _numbered(entry.block, number), start, count
        first += count


def read_span(blocks: Mapping[str, Any], entry: FolderEntry, span: tuple[str, int, int]) -> Bytes:
    """Return a span of a block.

    Raises:
        FormatError: there is no such block, or it is shorter.
    """
    block, start, count = span
    value = blocks.get(block)
    nbytes = getattr(value, "nbytes", -1)
    if nbytes < start + count or value is None or str(value.dtype) not in ("uint8", "|u1"):
        raise FormatError(
            f"folder: {_shown(entry.name)}: {count} bytes at {start} of block {printable(block)!r}, "
            f"which has {'no' if nbytes < 0 else nbytes} bytes"
        )
    return _span(value, start, start + count)


class _Unpacker:
    """Writes the entries of an index into a new folder."""

    def __init__(self, blocks: Mapping[str, Any], root: Path, block_bytes: int) -> None:
        self._blocks, self._root, self._block_bytes = blocks, root, block_bytes
        self._last: dict[str, Bytes] = {}  # a block of small files

    def write(self, entries: list[FolderEntry]) -> None:
        """Write folders and files, then links, through which nothing was written."""
        for entry in entries:
            path = self._root / os.fsdecode(entry.name)
            if entry.kind == Folder:
                path.mkdir()
            elif entry.kind == File:
                self._write_file(entry, path)
        links = {entry: self._root / os.fsdecode(entry.name) for entry in entries if entry.kind == Link}
        for entry, path in links.items():
            path.symlink_to(os.fsdecode(entry.target))
        inside = self._root.resolve()
        for entry, path in links.items():
            if path.readlink().is_absolute() or not _leads_inside(path, inside):
                raise FormatError(
                    f"folder: {_shown(entry.name)}: is a link to {_shown(entry.target)}, out of the folder; refused"
                )

    def _write_file(self, entry: FolderEntry, path: Path) -> None:
        mode = 0o777 if entry.executable else 0o666
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
            for span in file_spans(entry, 0, entry.size, self._block_bytes):
                file.write(self._read(entry, span).data)
            file.flush()
            os.fsync(file.fileno())

    def _read(self, entry: FolderEntry, span: tuple[str, int, int]) -> Bytes:
        """Return a span of a block; a small block is read once for all its files."""
        block, start, count = span
        if block not in self._last:
            nbytes = getattr(self._blocks.get(block), "nbytes", 0)
            if not block.startswith("small:") or not start + count <= nbytes <= 2 * TOGETHER_BYTES:
                return read_span(self._blocks, entry, span)
            self._last = {block: read_span(self._blocks, entry, (block, 0, nbytes))}
        return read_span(self._last, entry, span)


def _span(value: Any, first: int, end: int | None) -> Bytes:
    """Return bytes of a handle, or of an array."""
    end = value.nbytes if end is None else end
    if hasattr(value, "read_bytes"):
        found: Bytes = value.read_bytes(first, end)
        return found
    return np.asarray(value).reshape(-1).view(np.uint8)[first:end]


def _numbered(block: str, number: int) -> str:
    return f"{block};{number}" if number else block


def _is_executable(about: os.stat_result) -> bool:
    return bool(about.st_mode & stat.S_IXUSR)


def _is_same(a: os.stat_result | bytes | None, b: os.stat_result | bytes | None) -> bool:
    """Return whether nothing has changed, as far as the file system tells."""
    if not isinstance(a, os.stat_result) or not isinstance(b, os.stat_result):
        return a == b
    names = ("st_dev", "st_ino", "st_mode", "st_size", "st_mtime_ns", "st_ctime_ns")
    return all(getattr(a, name) == getattr(b, name) for name in names)


def _leads_inside(link: Path, inside: Path) -> bool:
    """Return whether a link leads into a folder, also through other links; its target may be missing.

    No step of it may leave the folder: `../name/file`, where the folder is `name`, would lead elsewhere from a copy.
    """
    place = link.parent
    for step in link.readlink().parts:
        place = Path(os.path.realpath(place / step))
        if not place.is_relative_to(inside):
            return False
    return Path(os.path.realpath(link)).is_relative_to(inside)


def _shown(path: str | bytes | os.PathLike[str]) -> str:
    return printable(os.fsdecode(path))
