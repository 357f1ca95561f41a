"""Read and write `.safetensors` files tensor by tensor, so a file may be larger than memory.

The library reads files, and checks every header that is written here. It cannot write a file tensor by tensor. The
format: the length of the header, the header (JSON: dtype, shape and place of every tensor), then the bytes.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError, needs
from ..restore.streaming import TensorReader
from ..state.values.arrays import as_bytes
from ..state.values.tensors import TensorSpec
from ..text import some
from .checkpoint import first_line
from .lazy_state import Later

#: An error names at most so many leaves that a file cannot hold.
LEAVES_NAMED = 5
#: The key of the header that does not name a tensor.
METADATA = "__metadata__"
ADVICE = "write a .pt file"
_NUMBERS = {"float": "F", "bfloat": "BF", "int": "I", "uint": "U", "f": "F", "i": "I", "u": "U"}
_OTHERS = {
    **{"bool": "BOOL", "|b1": "BOOL", "<c8": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ"},
    **{"float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0"},
    **{"float4_e2m1fn_x2": "F4", "complex64": "C64"},
}
_TORCH, _NUMPY = re.compile(r"(b?float|u?int)(8|16|32|64)"), re.compile(r"[<|]([fiu])([1248])")


def need_library() -> Any:
    """Return the library `safetensors`.

    Raises:
        CapabilityError: it is not installed.
    """
    with needs("safetensors", 'pip install "snapstore[safetensors]"'):
        import safetensors.torch
    return safetensors


def read(path: Path) -> tuple[Any, dict[str, str]]:
    """Return (an iterator of (name, tensor), the file's metadata); {} in place of the iterator if there is no tensor.

    Raises:
        InvalidInputError: the file is damaged, now or when its tensors are read.
        CapabilityError: the library is not installed.
    """
    with _damaged(path), _opened(path) as file:
        tensors = ((name, later.read()) for name, later in laters(path))
        return tensors if file.keys() else {}, file.metadata() or {}


def laters(path: Path) -> Iterator[tuple[str, Later]]:
    """Yield the names of the tensors in a file, each with a `Later` that reads the tensor.

    Raises:
        InvalidInputError: the file is damaged, now or when a tensor is read.
        CapabilityError: the library is not installed.
    """
    with _damaged(path):
        file = _opened(path).__enter__()  # it is closed when the last `Later` of it is freed
        names = file.keys()
    for name in names:
        yield name, Later(partial(_tensor, path, file, name))


def _tensor(path: Path, file: Any, name: str) -> Any:
    with _damaged(path):
        try:
            return file.get_tensor(name)
        except RuntimeError:  # release 0.8 cannot read float4 in this way
            with _opened(path, mapped=True) as whole:
                return whole.get_tensor(name)


def _opened(path: Path, *, mapped: bool = False) -> Any:
    """Open a file; unless `mapped`, it is read tensor by tensor, since a system may not map more than its memory."""
    library = need_library()
    if not mapped:
        with suppress(TypeError), name_in_utf8(path) as name:  # before 0.8 the library always maps the whole file
            return library.safe_open(name, framework="pt", device="cpu", backend="pread")
    with name_in_utf8(path) as name:
        return library.safe_open(name, framework="pt", device="cpu")


@contextmanager
def name_in_utf8(path: Path) -> Iterator[Path]:
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


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (need_library().SafetensorError, OSError, ValueError) as error:  # looked up only after an error
        raise InvalidInputError(f"{path}: not a safetensors file, or damaged: {first_line(error)}") from error


def check(
    path: Path, reader: TensorReader, specs: Sequence[tuple[str, TensorSpec]], *, tensors_only: bool
) -> list[str]:
    """Check that files can hold the tensors of a snapshot; return the paths of the values left out.

    Args:
        specs: the tensors by the names that they get.

    Raises:
        InvalidInputError: it cannot, or values would be lost and `tensors_only` does not leave them out.
    """
    others = [name or "the value itself" for name in reader.others]
    if others and not tensors_only:
        raise InvalidInputError(
            f"{path}: safetensors files hold tensors only; {some(others, LEAVES_NAMED)} would be lost; write a .pt "
            "file or select tensors ('snapstore restore --keys'), or leave the rest out with --tensors-only"
        )
    seen: set[str] = set()
    for name, spec in specs:
        if not name:
            raise InvalidInputError(f"{path}: the state is one tensor without a name; {ADVICE}")
        if name in seen:
            raise InvalidInputError(
                f"{path}: two tensors would both be named {name!r}; {ADVICE}, or select one of them "
                "('snapstore restore --keys')"
            )
        if name == METADATA:
            raise InvalidInputError(f"{path}: safetensors cannot hold a tensor of the name {name!r}; {ADVICE}")
        if dtype_of(spec) is None:
            kind = "an array" if spec.kind == "array" else "a tensor"
            raise InvalidInputError(f"{path}: {name}: safetensors cannot hold {kind} of {spec.dtype}; {ADVICE}")
        seen.add(name)
    return others


def dtype_of(spec: TensorSpec) -> str | None:
    """Return the format's name of a dtype; None if it has none."""
    if spec.dtype in _OTHERS:
        return _OTHERS[spec.dtype]
    match = _NUMPY.fullmatch(spec.dtype) if spec.kind == "array" else _TORCH.fullmatch(spec.dtype)
    return match and f"{_NUMBERS[match[1]]}{int(match[2]) * (8 if spec.kind == 'array' else 1)}"


def write(
    temp: Path, specs: Sequence[tuple[str, TensorSpec]], tensors: Iterator[tuple[str, Any]], metadata: dict[str, str]
) -> None:
    """Write a file: first the header, then each tensor at its place as it is read.

    Args:
        specs: of the tensors, by name.
        tensors: each of them with its name, in any order; only the first `len(specs)` are taken.

    Raises:
        InvalidInputError: the library refuses the header.
    """
    library = need_library()
    header, starts, size = layout(specs, metadata)
    with temp.open("r+b") as file:
        file.write(header)
        file.truncate(size)
        file.flush()
        try:
            with _opened(temp):
                pass
        except (library.SafetensorError, ValueError) as error:
            raise InvalidInputError(f"safetensors cannot hold this state: {first_line(error)}; {ADVICE}") from error
        for name, value in islice(tensors, len(specs)):
            file.seek(starts[name])
            file.write(as_bytes(value).data)
            del value


def layout(specs: Sequence[tuple[str, TensorSpec]], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return (the header, the byte at which each tensor begins in the file, the size of the file [bytes]).

    Tensors with larger elements come first, as the library writes them, so each tensor is aligned to its elements.
    """
    header: dict[str, Any] = {METADATA: metadata} if metadata else {}
    places: dict[str, int] = {}
    at = 0
    for name, spec in sorted(specs, key=lambda item: (-item[1].itemsize, item[0])):
        places[name], end = at, at + spec.nbytes
        shape = list(spec.shape)
        if spec.dtype == "float4_e2m1fn_x2" and shape:
            shape[-1] *= 2  # the format counts numbers, torch counts pairs
        header[name] = {"dtype": dtype_of(spec), "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + start for name, start in places.items()}, first + at
