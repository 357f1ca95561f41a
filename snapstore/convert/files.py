"""Read and write states in files: `.pt` and `.safetensors`.

A `.pt` file is always read with `weights_only=True`: a file from elsewhere must not run code here. It is also written
for such readers: values that torch then refuses get another type (`state.weights_only`), and the result names them. A
file is written under a temporary name and renamed when it is complete, so an interrupted export leaves no incomplete
file under its name.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import re
import secrets
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from ..arrays import Bytes
from ..errors import AlreadyExistsError, InvalidInputError, OutputError, UnsupportedLeafError
from ..format.records import Snapshot
from ..restore.streaming import TensorReader
from ..state.tree.weights_only import Changed, to_weights_only
from ..state.values.arrays import as_bytes, extent_of, in_memory_order
from ..state.values.containers import CONTAINERS, children, leaves, metadata_of
from ..state.values.tensors import is_array
from . import safetensors_file
from .checkpoint import damaged, first_line, noted
from .pickled_values import PlainValues, refused
from .safetensors_file import name_in_utf8
from .torch_checks import NOT_TORCH, ZIP, ZipEntry, entries, require_bounded, require_tree

SAFETENSORS = ".safetensors"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", SAFETENSORS)
#: Linux's MADV_PAGEOUT, which Python does not name: reclaim these pages now.
PAGE_OUT = 21

# torch's own message advises to load the file unsafely; only the name of the object is shown.
_OBJECT = re.compile(r"GLOBAL (\S+)|[Uu]nsupported (?:class|type|global):? (?!GLOBAL)(\S+)")


@dataclass(slots=True)
class Exported:
    """An export that was written.

    Attributes:
        snapshot: the snapshot that was exported.
        files: names of the files, in the folder of the export.
        tensors: number of tensors.
        bytes: size of the files [bytes].
        dropped: dotted paths of the values that were left out.
        by_rank: dotted paths of values of each rank's own that were written as a dict of those of all ranks, by rank.
        tied: names that were left out because `from_pretrained` ties them to one in the export.
        changed: values of another type than in the snapshot.
        part: the top-level key that was exported; None: the whole state.
    """

    snapshot: Snapshot
    files: list[str]
    tensors: int
    bytes: int
    dropped: list[str] = field(default_factory=list)
    by_rank: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)
    part: str | None = None


def format_of(path: Path) -> Literal["torch", "safetensors"]:
    """Return the format of a file that `is_known` by its name."""
    return "safetensors" if path.suffix.lower() == SAFETENSORS else "torch"


def is_known(path: Path) -> bool:
    """Return whether a file name has an ending that this module reads and writes."""
    return path.suffix.lower() in SUFFIXES


def read(path: Path) -> tuple[Any, dict[str, str]]:
    """Return (the state in a file, the file's own metadata); the state of a .safetensors file is an iterator.

    Raises:
        InvalidInputError: the file is missing, damaged, of another format, or holds Python objects.
        CapabilityError: a library is not installed.
    """
    if not is_known(path):
        raise InvalidInputError(f"{path}: expected a file named *.pt, *.pth, *.bin, *.ckpt or *.safetensors")
    if not path.is_file():
        raise InvalidInputError(f"{path}: expected a file, found {'something else' if path.exists() else 'none'}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from error
    if path.suffix.lower() == SAFETENSORS:
        return safetensors_file.read(path)
    return read_torch(path), {}


def read_torch(path: Path) -> Any:
    """Return the state in a file of torch; a file in its zip format stays mapped, so it may be larger than memory.

    Raises:
        InvalidInputError: it is damaged, or holds Python objects.
    """
    with name_in_utf8(path) as name:
        return load_torch(name, str(path))


def load_torch(file: Path | BinaryIO, where: str) -> Any:
    """Return the state in a path or an open file of torch, and run no code of it. A path is mapped where it can be.

    Objects of the classes in pickled_values.py are plain values in the state; objects of other classes are refused.

    Args:
        where: its name in errors.

    Raises:
        InvalidInputError: it is damaged, or holds Python objects.
        CapabilityError: it does not fit into memory.
    """
    import torch

    values = PlainValues(where)
    try:
        with file.open("rb") if isinstance(file, Path) else nullcontext(file) as opened:
            is_mapped, names = require_bounded(opened, where, may_map=isinstance(file, Path))
            is_zip = opened.read(len(ZIP)) == ZIP
            opened.seek(0)
            source = file if is_zip else opened
            with warnings.catch_warnings(), damaged(f"{where}: {NOT_TORCH}", pickle.UnpicklingError):
                warnings.simplefilter("ignore")  # about storages of old files: a user can do nothing about it
                with values.loading(names):
                    state = torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
                state = values.state(state)
            if not is_zip and opened.read(1):
                raise InvalidInputError(
                    f"{where}: holds more behind its first state, which would be lost; load all of it in Python, and "
                    "save each state in a file of its own"
                )
    except pickle.UnpicklingError as error:
        met = _OBJECT.search(str(error))
        if met is None:  # torch's message would advise to load it unsafely
            raise InvalidInputError(
                f"{where}: {NOT_TORCH}: no state of plain values that torch.save has written"
            ) from error
        name = next(filter(None, met.groups())).rstrip(".,")
        raise refused(where, name) from error
    require_tree(state, where)
    return state


def let_go(value: Any) -> None:
    """Give the memory pages of a mapped file back to the system, which reads them again when they are needed.

    It only advises the system, so other memory keeps its values.
    """
    if sys.platform != "linux" or isinstance(value, bytes):
        return
    _, start, end = extent_of(value)
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), PAGE_OUT)


def check_output(path: Path, *, force: bool) -> None:
    """Refuse an output file before the work begins.

    Raises:
        InvalidInputError: its name has no known ending, or its folder is missing.
        AlreadyExistsError: it exists, and `force` is not set.
        CapabilityError: a library is not installed.
    """
    if not is_known(path):
        raise InvalidInputError(f"{path}: expected a name that ends in .pt, .pth, .bin, .ckpt or .safetensors")
    if path.suffix.lower() == SAFETENSORS:
        safetensors_file.need_library()
    check_new(path, force=force)


def check_new(path: Path, *, force: bool, is_folder: bool = False) -> None:
    """Refuse an output before the work begins.

    Raises:
        InvalidInputError: its folder is missing, it is a folder but should be a file, or it is not the name of a file.
        AlreadyExistsError: it exists, and `force` is not set.
    """
    if path.name in ("", ".."):
        raise InvalidInputError(f"{path}: expected the name of a new {'folder' if is_folder else 'file'}")
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # such as a surrogate, a NUL, or a name that is too long
        raise InvalidInputError(f"{path}: cannot be the name of a file here: {first_line(error)}") from error
    if not path.parent.is_dir():
        raise InvalidInputError(f"{path}: {path.parent} is not a folder; create it first")
    if path.is_dir() and not is_folder:
        raise InvalidInputError(f"{path}: is a folder; name a file")
    if not force and os.path.lexists(path):
        raise exists(path)


def exists(path: Path) -> AlreadyExistsError:
    """Return the error for an output that exists."""
    return AlreadyExistsError(f"{path}: exists; choose another name, or replace it with --force")


def write_torch(path: Path, reader: TensorReader, *, force: bool) -> Exported:
    """Write the state of a snapshot to a file of torch, tensor by tensor.

    Raises:
        InvalidInputError: the format cannot hold the state.
        AlreadyExistsError: the file exists, and `force` is not set.
        OutputError: the file cannot be written.
    """
    state, tensors = reader.unread()
    try:
        plain, changed = to_weights_only(state)
    except UnsupportedLeafError as error:
        raise InvalidInputError(
            f"{path}: torch.load(weights_only=True) would refuse {error}; select other values with --keys, or use the "
            "Python interface"
        ) from error

    changed = [*(Changed(path, was, "its plain form") for path, was in reader.plain_forms), *changed]
    publish(path, lambda temp: _write_torch(temp, plain, reader, tensors), force=force)
    count = sum(is_array(leaf) for _, leaf in leaves(state, ()))
    size = path.stat().st_size
    return Exported(reader.snapshot, [path.name], count, size, reader.of_ranks, reader.by_rank, changed=changed)


def write_safetensors(path: Path, reader: TensorReader, *, force: bool, tensors_only: bool) -> Exported:
    """Write the tensors of a snapshot to a .safetensors file, one by one, with the metadata that its own file had.

    Raises:
        InvalidInputError: the format cannot hold the state.
        AlreadyExistsError: the file exists, and `force` is not set.
        OutputError: the file cannot be written.
    """
    left_out = safetensors_file.check(path, reader, reader.specs, tensors_only=tensors_only)
    about = safetensors_metadata(reader.snapshot)
    publish(path, lambda temp: safetensors_file.write(temp, reader.specs, iter(reader), about), force=force)
    return Exported(reader.snapshot, [path.name], len(reader.specs), path.stat().st_size, left_out)


def safetensors_metadata(snapshot: Snapshot) -> dict[str, str]:
    """Return the metadata of the .safetensors file from which a snapshot was saved; {} if there was none."""
    about = noted(snapshot, "safetensors").items()
    return {name: value for name, value in about if isinstance(name, str) and isinstance(value, str)}


def save_torch(value: Any, file: BinaryIO) -> None:
    """Write a value into an open file, as torch does.

    Raises:
        OSError: the file cannot be written.
    """
    import torch

    try:
        torch.save(value, file)
    except RuntimeError as error:  # torch's zip writer hides the error of a failed write
        raise OSError(error.__context__ or "".join(str(error).splitlines()[:1])) from error


def _write_torch(temp: Path, state: Any, reader: TensorReader, tensors: Sequence[Any]) -> None:
    """Write a file of torch with room for the bytes of its tensors, then the bytes.

    torch numbers the storages in the order in which it meets them.

    Args:
        tensors: the arrays of the state in the order of the reader; those without values are read.
    """
    import torch

    numbers: dict[int, int] = {}
    unread = {_memory_of(tensor) for tensor in tensors if not isinstance(tensor, np.ndarray)}
    with temp.open("r+b") as file:
        with torch.serialization.skip_data():
            save_torch(state, file)
        places = _records(file)
        for tensor in _arrays_of(state):
            number = numbers.setdefault(_memory_of(tensor), len(numbers))
            if _memory_of(tensor) not in unread:  # an array of NumPy, or long bytes
                _put(file, places[number], as_bytes(in_memory_order(tensor)))
        for (_, value), tensor in zip(reader, tensors, strict=True):
            place = None if isinstance(tensor, np.ndarray) else numbers.get(_memory_of(tensor))
            if place is not None:
                _put(file, places[place], as_bytes(in_memory_order(value)))
            del value


def _arrays_of(state: Any) -> Iterator[Any]:
    """Yield the arrays of a state in the order in which pickle meets them: attributes come last."""
    if is_array(state):
        yield state
    elif type(state) in CONTAINERS:
        for _, _, child in children(state):
            yield from _arrays_of(child)
        yield from _arrays_of(metadata_of(state))


def _memory_of(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _put(file: BinaryIO, record: ZipEntry, data: Bytes) -> None:
    """Write the bytes of a tensor into their room in a file of torch, and their CRC-32 into the archive's directory."""
    if len(data) != record.size:
        raise OSError(f"torch has allocated {record.size} bytes for a tensor, expected {len(data)}; update torch")
    file.seek(record.start)
    file.write(data.data)
    checksum = zlib.crc32(data.data).to_bytes(4, "little")
    if file.read(4) == b"PK\x07\x08":  # the data descriptor
        file.seek(-4, os.SEEK_CUR)
        file.write(b"PK\x07\x08" + checksum)
    file.seek(record.place + 16)
    file.write(checksum)


def _records(file: BinaryIO) -> dict[int, ZipEntry]:
    """Return the entries of a file of torch that have the bytes of a storage, by the storage's number."""
    found = {}
    for entry in entries(file):
        folder, _, name = entry.name.rpartition(b"/")
        if folder.endswith(b"/data") and name.isdigit():
            found[int(name)] = entry
    return found


def publish(path: Path, fill: Callable[[Path], object], *, force: bool) -> None:
    """Fill a temporary file beside `path`, make it durable, and rename it.

    Raises:
        AlreadyExistsError: the file exists, and `force` is not set.
        OutputError: it cannot be written.
    """
    temp = path.with_name(f".snapstore-{secrets.token_hex(8)}.tmp")
    try:
        temp.open("xb").close()
        fill(temp)
        fsync(temp)
        if force:
            temp.replace(path)
        else:
            _name_new(temp, path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}; nothing was left behind") from error
    finally:
        with suppress(FileNotFoundError):
            temp.unlink()


def fsync(path: Path) -> None:
    """Make the bytes of a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name_new(temp: Path, path: Path) -> None:
    """Rename a file, but never over a file that another process has made meanwhile.

    Raises:
        AlreadyExistsError: there is such a file.
    """
    try:
        path.hardlink_to(temp)
    except FileExistsError as error:
        raise exists(path) from error
    except OSError:  # no hard links here: look first, which leaves a gap of microseconds
        if os.path.lexists(path):
            raise exists(path) from None
        temp.rename(path)
