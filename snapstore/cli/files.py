"""Read and write states in files: `.pt` and `.safetensors`.

A `.pt` file is always read with `weights_only=True`: a file from elsewhere must not run code here. It is written for
such readers: values that torch refuses there get another type (`state.weights_only`), and are named. A file is written
under a temporary name and renamed when it is complete, so an interrupted restore leaves nothing behind.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import AlreadyExistsError, InvalidInputError, StorageError, UnsupportedLeafError
from ..restore.streaming import TensorReader
from ..state.containers import leaves
from ..state.tensors import is_array
from . import safetensors_file
from .safetensors_file import first_line, name_in_utf8

if TYPE_CHECKING:
    from ..state.weights_only import Changed

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"

# torch's own message advises to load the file unsafely; only the name of the object is shown.
_OBJECT = re.compile(r"GLOBAL (\S+)|[Uu]nsupported (?:class|type|global):? (?!GLOBAL)(\S+)")


class Written(NamedTuple):
    """The contents of a file that was written.

    Attributes:
        tensors: how many tensors it has.
        dropped: dotted paths of the values left out.
        changed: the values that are written as another type.
    """

    tensors: int
    dropped: list[str]
    changed: list[Changed]


def read(path: Path) -> tuple[Any, dict[str, str]]:
    """Return the state in a file, and the file's own metadata; the tensors of a .safetensors file as an iterator.

    Raises:
        InvalidInputError: the file is missing, damaged, of another format, or holds Python objects.
        CapabilityError: a library is not installed.
    """
    if path.suffix.lower() not in (*TORCH_SUFFIXES, SAFETENSORS):
        raise InvalidInputError(f"{path}: expected a file named *.pt, *.pth, *.bin or *.safetensors")
    if not path.is_file():
        raise InvalidInputError(f"{path}: expected a file, found {'something else' if path.exists() else 'none'}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from error
    if path.suffix.lower() == SAFETENSORS:
        return safetensors_file.read(path)
    return _read_torch(path), {}


def _read_torch(path: Path) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about storages of old files: a user can do nothing about it
            # With mmap a state may be larger than memory; torch maps only files of its zip format.
            mapped = zipfile.is_zipfile(path)
            with name_in_utf8(path) as name:
                return torch.load(name, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        met = _OBJECT.search(str(error))
        if met is None:
            raise InvalidInputError(f"{path}: not a PyTorch file, or damaged: {first_line(error)}") from error
        name = next(filter(None, met.groups())).rstrip(".,")
        raise InvalidInputError(
            f"{path}: refused: it holds a Python object ({name}), which could run any code when loaded; save plain "
            "state instead, such as torch.save(model.state_dict(), ...), or use the Python interface"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # torch does not document what it raises for a bad file
        raise InvalidInputError(f"{path}: not a PyTorch file, or damaged: {first_line(error)}") from error


def check_output(path: Path, *, force: bool) -> None:
    """Refuse an output file before the work begins.

    Raises:
        InvalidInputError: its name has no known ending, or its folder is missing.
        AlreadyExistsError: it exists.
        CapabilityError: a library is not installed.
    """
    if path.suffix.lower() not in (*TORCH_SUFFIXES, SAFETENSORS):
        raise InvalidInputError(f"{path}: expected a name that ends in .pt, .pth, .bin or .safetensors")
    if path.suffix.lower() == SAFETENSORS:
        safetensors_file.need_library()
    if not path.parent.is_dir():
        raise InvalidInputError(f"{path}: {path.parent} is not a folder; create it first")
    if path.is_dir():
        raise InvalidInputError(f"{path}: is a folder; name a file")
    if not force and os.path.lexists(path):
        raise _exists(path)


def _exists(path: Path) -> AlreadyExistsError:
    return AlreadyExistsError(f"{path}: exists; choose another name, or replace it with --force")


def write(path: Path, state: Any, *, force: bool = False) -> Written:
    """Write a state to a file of torch; return the contents of the file.

    Raises:
        InvalidInputError: the format cannot hold the state.
        AlreadyExistsError: the file exists, and `force` is not set.
        StorageError: the file cannot be written.
    """
    plain, changed = _for_torch(path, state)
    _publish(path, lambda temp: _write_torch(temp, plain), force=force)
    return Written(sum(is_array(leaf) for _, leaf in leaves(state, ())), [], changed)


def write_safetensors(
    path: Path, reader: TensorReader, *, metadata: dict[str, str], force: bool = False, tensors_only: bool = False
) -> Written:
    """Write the tensors of a snapshot as they are read; return the contents of the file.

    Raises:
        InvalidInputError: the format cannot hold the state.
        AlreadyExistsError: the file exists, and `force` is not set.
        StorageError: the file cannot be written.
    """
    left_out = safetensors_file.check(path, reader, tensors_only=tensors_only)
    _publish(path, lambda temp: safetensors_file.write(temp, reader, metadata), force=force)
    return Written(len(reader.specs), left_out, [])


def _for_torch(path: Path, state: Any) -> tuple[Any, list[Changed]]:
    """Return a state as `torch.load(weights_only=True)` reads it, and the values that changed their type."""
    from ..state.weights_only import to_weights_only

    try:
        return to_weights_only(state)
    except UnsupportedLeafError as error:
        raise InvalidInputError(
            f"{path}: torch.load(weights_only=True) would refuse {error}; select other values with --keys, or use the "
            "Python interface"
        ) from error


def _write_torch(temp: Path, state: Any) -> None:
    import torch

    with temp.open("r+b") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's zip writer hides the error of a failed write
            raise OSError(error.__context__ or first_line(error)) from error


def _publish(path: Path, fill: Callable[[Path], None], *, force: bool) -> None:
    """Fill a temporary file beside `path`, make it durable, and rename it."""
    temp = path.with_name(f".snapstore-{secrets.token_hex(8)}.tmp")
    try:
        temp.open("xb").close()
        fill(temp)
        with temp.open("rb") as file:
            os.fsync(file.fileno())
        if force:
            temp.replace(path)
        else:
            _name_new(temp, path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}; nothing was left behind") from error
    finally:
        with suppress(FileNotFoundError):
            temp.unlink()


def _name_new(temp: Path, path: Path) -> None:
    """Rename, but never over a file that another process has made meanwhile."""
    try:
        path.hardlink_to(temp)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError:  # no hard links here: look first, which leaves a gap of microseconds
        if os.path.lexists(path):
            raise _exists(path) from None
        temp.rename(path)
