"""Open a folder of torch.distributed.checkpoint (DCP) without running its code.

In: a folder with `.metadata` and the files that it names. Out: the nested state that was saved there; each tensor is
assembled from its shards when it is saved. Files that `.metadata` does not name, such as Megatron's `common.pt`, are
left out. `.metadata` is a pickle. It is read by an unpickler that knows the names of DCP's classes and makes plain
records for them: no class is imported, and no other function is called.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InvalidInputError, out_of_memory
from ..format.rank_checks import Cover
from ..state.tensors import TORCH_DTYPES
from . import files
from .checkpoint import Checkpoint, file_inside, names_below, nest, step_in
from .lazy_state import Later
from .safetensors_file import first_line

METADATA = ".metadata"
#: Lightning puts all values that are not tensors into this file.
META = "meta.pt"
_RECORDS = frozenset(
    {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_StorageInfo",
        "_MEM_FORMAT_ENCODING",
    }
)


class _Record:
    """An object of a class of DCP: its fields, and nothing else."""

    def __init__(self, *args: Any) -> None:
        self.fields: dict[str, Any] = {}
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # TensorProperties stores its fields by position; the dtype is the first
            self.args = state
        elif isinstance(state, dict):
            self.fields = state


def _tuple(*args: Any) -> tuple[Any, ...]:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else args


def _text(*args: Any) -> str:
    return "/".join(map(str, args))


class _Reader(pickle._Unpickler):  # the one in C allocates as many places as a number in the file says
    """Reads `.metadata`; any name but those of DCP's records is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function that makes a plain value for a name in the pickle.

        Raises:
            _RefusedError: the name is not of DCP.
        """
        if module.startswith("torch.distributed.") and name in _RECORDS:
            return type(name, (_Record,), {})  # a new class: a pickle may set attributes of it
        if module == "torch" and name in TORCH_DTYPES:
            return f"dtype {name}"
        if (module, name) == ("torch", "Size"):
            return partial(_tuple)
        if (module, name) == ("torch.serialization", "_get_layout") or module.partition(".")[0] == "pathlib":
            return partial(_text)
        if (module, name) == ("collections", "OrderedDict"):
            return type(name, (dict,), {})
        raise _RefusedError(f"{module}.{name}")


class _RefusedError(Exception):
    """A pickle names something that is not of DCP (never leaves this module)."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Bytes of a file that hold one shard, or one value."""

    path: Path
    offset: int
    length: int


Places = dict[tuple[str, tuple[int, ...] | None], _Stored]


def is_dcp(folder: Path) -> bool:
    """Return whether a folder is one of DCP."""
    return (folder / METADATA).exists()


def open_dcp(folder: Path) -> Checkpoint:
    """Open a folder.

    Raises:
        InvalidInputError: it is damaged or incomplete, names files elsewhere, or holds Python objects.
    """
    where = file_inside(folder, METADATA, folder)
    with _damaged(where):
        found = _read_metadata(where).fields
        places = _places(folder, where, found["storage_data"])
        paths = found.get("planner_data") or {}
        leaves: dict[tuple[Any, ...], Any] = {}
        for name, entry in found["state_dict_metadata"].items():
            path = paths.get(name) or (name,)
            if type(name) is not str or not all(type(element) in (str, int) for element in path):
                raise InvalidInputError(f"{where}: {name!r}: expected text as its name; it is damaged")
            leaves[tuple(path)] = _leaf(where, name, entry, places)
        state = nest(leaves, where)
    used = {stored.path for stored in places.values()} | {where}
    if (folder / META).exists() and isinstance(state, dict):
        path = file_inside(folder, META, folder)
        used.add(path)
        meta = files.read_torch(path)
        state = {**(meta if isinstance(meta, dict) else {"meta": meta}), **state}
    names, hidden = names_below(folder)
    left_out = names.union(hidden) - {path.relative_to(folder).as_posix() for path in used}
    size = sum(path.stat().st_size for path in used)
    return Checkpoint(state, size, step_in(state), left_out=sorted(left_out))


def _read_metadata(where: Path) -> _Record:
    with where.open("rb") as file:
        try:
            found = _Reader(file).load()
        except _RefusedError as error:
            raise InvalidInputError(
                f"{where}: refused: it names {error}, which is not of torch.distributed.checkpoint and could run any "
                "code when loaded; if you trust the folder, load it with torch and save it with DCP again"
            ) from None
    if type(found).__name__ != "Metadata":
        raise InvalidInputError(f"{where}: expected metadata of DCP, got {type(found).__name__}")
    record: _Record = found
    return record


@contextmanager
def _damaged(where: Path) -> Iterator[None]:
    """Turn every error that malformed metadata causes into an InvalidInputError that names the file."""
    try:
        yield
    except (OSError, MemoryError, InvalidInputError):
        raise
    except Exception as error:  # a pickle may hold values of any types in any place
        detail = first_line(error)
        raise InvalidInputError(f"{where}: damaged, or of an unknown version of DCP: {detail}") from error


def _places(folder: Path, where: Path, storage_data: Any) -> Places:
    """Return where each shard lies, by the name of its tensor and its offsets."""
    found: Places = {}
    checked: dict[str, Path] = {}
    for index, info in storage_data.items():
        name, fields = index.fields["fqn"], info.fields
        if fields.get("transform_descriptors"):
            raise InvalidInputError(
                f"{where}: {name}: is stored through {', '.join(map(str, fields['transform_descriptors']))}; load it "
                "with torch.distributed.checkpoint, and save it without extensions"
            )
        file = fields["relative_path"]
        if file not in checked:
            checked[file] = file_inside(folder, file, where)
        offset, length, size = fields["offset"], fields["length"], checked[file].stat().st_size
        if not (type(offset) is type(length) is int and 0 <= offset <= offset + length <= size):
            raise InvalidInputError(
                f"{checked[file]}: {name}: expected bytes {offset} to {offset + length}, but the file has {size}; it "
                "was cut off: copy it again"
            )
        offsets = index.fields.get("offset")
        found[name, None if offsets is None else tuple(offsets)] = _Stored(checked[file], offset, length)
    return found


def _leaf(where: Path, name: str, entry: Any, places: Places) -> Any:
    """Return a value, or a `Later` for a tensor.

    Raises:
        InvalidInputError: its shards are missing, overlap or lie outside of it.
    """
    import torch

    if type(entry).__name__ == "BytesStorageMetadata":
        if (name, None) not in places:
            raise _missing(where, name)
        return _load(places[name, None], name)
    dtype = entry.fields["properties"].args[0]
    dtype = entry.fields["properties"].fields.get("dtype", dtype) if not isinstance(dtype, str) else dtype
    shape, dtype = tuple(entry.fields["size"]), dtype.removeprefix("dtype ")
    torch.empty(shape, dtype=getattr(torch, dtype), device="meta")  # raises if there is no such tensor
    shards: list[tuple[tuple[int, ...], tuple[int, ...], _Stored]] = []
    cover = Cover([shape])
    for chunk in entry.fields["chunks"]:
        offsets, sizes = tuple(chunk.fields["offsets"]), tuple(chunk.fields["sizes"])
        if not (len(offsets) == len(sizes) == len(shape)) or any(
            not 0 <= offset <= offset + size <= full for offset, size, full in zip(offsets, sizes, shape, strict=True)
        ):
            raise InvalidInputError(f"{where}: {name}: a shard of {sizes} at {offsets} is not inside of {shape}")
        stored = places.get((name, offsets))
        if stored is None:
            raise _missing(where, f"{name} at {offsets}")
        shards.append((offsets, sizes, stored))
        cover.add(0, offsets, sizes)
    covered, wanted = sum(math.prod(sizes) for _, sizes, _ in shards), math.prod(shape)
    if covered != wanted:
        raise InvalidInputError(
            f"{where}: {name}: its shards hold {covered} elements, expected {wanted} of {shape}; a rank's file is "
            "missing from the metadata: save it again"
        )
    if cover.wrong():
        raise InvalidInputError(
            f"{where}: {name}: two of its shards overlap, and elements are missing; it is damaged: save it again"
        )
    return Later(partial(_assemble, name, dtype, shape, shards))


def _missing(where: Path, what: str) -> InvalidInputError:
    return InvalidInputError(f"{where}: names no bytes of {what}; the checkpoint is not complete: save it again")


def _assemble(
    name: str, dtype: str, shape: tuple[int, ...], shards: list[tuple[tuple[int, ...], tuple[int, ...], _Stored]]
) -> Any:
    """Read the shards of a tensor, and return the whole tensor."""
    import torch

    whole: torch.Tensor | None = None
    for offsets, sizes, stored in shards:
        shard = _load(stored, name)
        if not isinstance(shard, torch.Tensor) or str(shard.dtype) != f"torch.{dtype}" or tuple(shard.shape) != sizes:
            got = f"{shard.dtype}{list(shard.shape)}" if isinstance(shard, torch.Tensor) else type(shard).__name__
            raise InvalidInputError(
                f"{stored.path}: {name}: expected torch.{dtype}{list(sizes)} at byte {stored.offset}, got {got}; the "
                "file does not belong to this checkpoint, or is damaged"
            )
        if sizes == shape:
            return shard
        if whole is None:
            with out_of_memory(f"{name}: {dtype}{list(shape)}", "free memory; or its shape is damaged"):
                whole = torch.empty(shape, dtype=shard.dtype, device="cpu")
        box = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        box.view(_integers(box.element_size())).copy_(shard.contiguous().view(_integers(box.element_size())))
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") if whole is None else whole


def _integers(size: int) -> Any:
    """Return a dtype of `size` bytes that torch copies bit by bit; no integer has 16 bytes, so that is complex128."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[size]


def _load(stored: _Stored, name: str) -> Any:
    with stored.path.open("rb") as file:
        return files.load_torch(io.BufferedReader(_Slice(file, stored)), f"{stored.path}: {name}")


class _Slice(io.RawIOBase):
    """Some bytes of a file as a file of its own."""

    def __init__(self, file: BinaryIO, stored: _Stored) -> None:
        self._file, self._start, self._size, self._at = file, stored.offset, stored.length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset in the slice [bytes]."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the offset in the slice [bytes]."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read bytes of the slice into `buffer`; return how many."""
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)
