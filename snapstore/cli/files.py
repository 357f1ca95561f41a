"""Read and write states in files: `.pt` and `.safetensors`.

A `.pt` file is always read with `weights_only=True`: a file from elsewhere must not run code here. A file is written
under a temporary name and renamed when it is complete, so an interrupted restore leaves nothing behind.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AlreadyExistsError, CapabilityError, InvalidInputError, StorageError
from ..state.containers import CONTAINERS, children, display
from ..text import some

if TYPE_CHECKING:
    import torch

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"
#: An error names at most so many leaves that a file cannot hold.
LEAVES_NAMED = 5

# torch's own message advises to load the file unsafely; only the name of the object is shown.
_OBJECT = re.compile(r"GLOBAL (\S+)|[Uu]nsupported (?:class|type|global):? (?!GLOBAL)(\S+)")


def read(path: Path) -> tuple[Any, dict[str, str]]:
    """Return the state in a file, and the file's own metadata.

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
        return _read_safetensors(path)
    return _read_torch(path), {}


def _read_torch(path: Path) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about storages of old files: a user can do nothing about it
            # With mmap a state may be larger than memory; torch maps only files of its zip format.
            mapped = zipfile.is_zipfile(path)
            with _name_in_utf8(path) as name:
                return torch.load(name, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        met = _OBJECT.search(str(error))
        if met is None:
            raise InvalidInputError(f"{path}: not a PyTorch file, or damaged: {_first_line(error)}") from error
        name = next(filter(None, met.groups())).rstrip(".,")
        raise InvalidInputError(
            f"{path}: refused: it holds a Python object ({name}), which could run any code when loaded; save plain "
            "state instead, such as torch.save(model.state_dict(), ...), or use the Python interface"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # torch does not document what it raises for a bad file
        raise InvalidInputError(f"{path}: not a PyTorch file, or damaged: {_first_line(error)}") from error


@contextmanager
def _name_in_utf8(path: Path) -> Iterator[Path]:
    """Yield a name of a file in UTF-8, as torch and safetensors require: the path, or a link to it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder, "link")
            link.symlink_to(path.absolute())
            yield link
        return
    yield path


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _need_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CapabilityError(
            "safetensors: not installed here; install it with 'pip install \"snapstore[safetensors]\"'"
        ) from error
    return safetensors


def _read_safetensors(path: Path) -> tuple[Any, dict[str, str]]:
    library = _need_safetensors()
    try:
        with _name_in_utf8(path) as name, library.safe_open(name, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (library.SafetensorError, OSError, ValueError) as error:
        raise InvalidInputError(f"{path}: not a safetensors file, or damaged: {_first_line(error)}") from error


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
        _need_safetensors()
    if not path.parent.is_dir():
        raise InvalidInputError(f"{path}: {path.parent} is not a folder; create it first")
    if path.is_dir():
        raise InvalidInputError(f"{path}: is a folder; name a file")
    if not force and os.path.lexists(path):
        raise _exists(path)


def _exists(path: Path) -> AlreadyExistsError:
    return AlreadyExistsError(f"{path}: exists; choose another name, or replace it with --force")


def write(
    path: Path, state: Any, *, metadata: dict[str, str], force: bool = False, tensors_only: bool = False
) -> tuple[int, list[str]]:
    """Write a state; return the number of tensors, and dotted paths of the values left out.

    Raises:
        InvalidInputError: the format cannot hold the state.
        AlreadyExistsError: the file exists, and `force` is not set.
        StorageError: the file cannot be written.
    """
    tensors, others = _leaves(state)
    if path.suffix.lower() != SAFETENSORS:
        _publish(path, lambda temp: _write_torch(temp, state), force=force)
        return len(tensors), []
    if others and not tensors_only:
        raise InvalidInputError(
            f"{path}: safetensors files hold tensors only; {some(others, LEAVES_NAMED)} would be lost; write a .pt "
            "file, select tensors with --keys, or leave the rest out with --tensors-only"
        )
    flat = _flat(path, tensors)
    _publish(path, lambda temp: _write_safetensors(temp, flat, metadata), force=force)
    return len(flat), others


def _leaves(state: Any) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return (dotted path, tensor or array) of every tensor, and the dotted paths of the other leaves."""
    import numpy as np
    import torch

    tensors: list[tuple[str, Any]] = []
    others: list[str] = []
    for path, value in _walk(state, ()):
        name = display(path)
        if isinstance(value, torch.Tensor | np.ndarray):
            tensors.append((name, value))
        else:
            others.append(name or "the value itself")
    return tensors, others


def _walk(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if type(value) not in CONTAINERS:
        yield path, value
        return
    for element, _, child in children(value):
        yield from _walk(child, (*path, element))


def _flat(path: Path, tensors: Sequence[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    """Return tensors by name, each in its own memory: safetensors has no tied tensors."""
    import torch

    flat: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors:
        if not name:
            raise InvalidInputError(f"{path}: the state is one tensor without a name; write a .pt file")
        if name in flat:
            raise InvalidInputError(
                f"{path}: two tensors would both be named {name!r}; write a .pt file, or select one with --keys"
            )
        try:
            tensor = (value if isinstance(value, torch.Tensor) else torch.from_numpy(value)).detach().contiguous()
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"{path}: {name}: an array of {value.dtype} has no tensor form") from error
        memory = tensor.untyped_storage().data_ptr()
        if tensor.numel() and memory in seen:
            tensor = tensor.clone()
        seen.add(memory)
        flat[name] = tensor
    return flat


def _write_torch(temp: Path, state: Any) -> None:
    import torch

    with temp.open("r+b") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's zip writer hides the error of a failed write
            raise OSError(error.__context__ or _first_line(error)) from error


def _write_safetensors(temp: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    library = _need_safetensors()
    try:
        library.torch.save_file(tensors, temp, metadata=metadata or None)
    except (library.SafetensorError, KeyError, ValueError) as error:
        if "I/O error" in str(error):
            raise OSError(_first_line(error)) from error
        raise InvalidInputError(
            f"safetensors cannot hold this state: {_first_line(error)}; write a .pt file"
        ) from error


def _publish(path: Path, fill: Callable[[Path], None], *, force: bool) -> None:
    """Fill a temporary file beside `path`, make it durable, and rename it."""
    temp = path.with_name(f".snapstore-{secrets.token_hex(8)}.tmp")
    try:
        temp.open("xb").close()
        mode = temp.stat().st_mode
        fill(temp)
        temp.chmod(mode)  # safetensors makes a file of its own, readable by its owner only
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
