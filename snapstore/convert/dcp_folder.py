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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from ..errors import InvalidInputError, out_of_memory
from ..format.manifests.rank_checks import Cover
from ..state.values.arrays import copy_bits
from ..state.values.containers import MAX_DEPTH
from ..state.values.tensors import MAX_DIMENSIONS, TORCH_DTYPES
from . import files
from .checkpoint import Checkpoint, damaged, file_inside, names_below, nest, step_in
from .lazy_state import MAX_CLAIMS, Later
from .logged_metrics import metrics_of_lightning

METADATA = ".metadata"
#: Lightning puts all values that are not tensors into this file.
META = "meta.pt"


class _DcpObject:
    """An object of a class of DCP: its fields, or its state by position."""

    def __init__(self, *_: Any) -> None:  # a record whose fields are read has no arguments
        self.fields: dict[str, Any] = {}
        self.by_position: tuple[Any, ...] = ()


_RECORDS = {
    name: type(name, (_DcpObject,), {})
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_StorageInfo",
        "_MEM_FORMAT_ENCODING",
    )
}


class _Dict(dict[Any, Any]):
    """A dict. It takes only items whose key is text or a record: the hash of other keys may never end."""

    def __init__(self) -> None:
        super().__init__()

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, str | _DcpObject):
            super().__setitem__(key, value)


def _numbers(numbers: Any = ()) -> tuple[int, ...]:
    if len(numbers) > MAX_DIMENSIONS or not all(type(number) is int for number in numbers):
        raise ValueError(f"expected at most {MAX_DIMENSIONS} numbers, got {len(numbers)} values")
    return tuple(numbers)


def _ignored(*args: Any) -> None:
    """Make None of a value that is not read: the path of the checkpoint, the layout of a tensor."""


#: Opcodes that DCP does not write: those of old protocols, sets, and dicts or objects that could take much time.
_UNUSED = (
    *(pickle.PUT, pickle.GET, pickle.DICT, pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.BYTEARRAY8),
    *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),
)
#: Arguments of an object: those of a path are the names of its folders.
_MAX_ARGUMENTS = 1000
#: How many positions a list may lack. DCP stores no empty dicts and lists, and puts None in their place.
_MAX_GAPS = 1000


class _MetadataUnpickler(pickle._Unpickler):  # the one in C allocates as many places as a number in the file says
    """Reads `.metadata`; any name but those of DCP's records is refused. It takes time and memory as the file is long.

    A pickle may name one value any number of times. So nothing here copies, hashes or prints a value of any size.
    """

    def __init__(self, file: BinaryIO, where: Path) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function that makes a plain value for a name in the pickle.

        Raises:
            InvalidInputError: the name is not of DCP.
        """
        if module.startswith("torch.distributed.") and name in _RECORDS:
            return _RECORDS[name]
        if module == "torch" and name in TORCH_DTYPES:
            return f"dtype {name}"
        if (module, name) == ("torch", "Size"):
            return _numbers
        if (module, name) == ("torch.serialization", "_get_layout") or module.partition(".")[0] == "pathlib":
            return _ignored
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        raise InvalidInputError(
            f"{self._where}: refused: it names {module}.{name}, which is not of torch.distributed.checkpoint and could "
            "run any code when loaded; if you trust the folder, load it with torch and save it with DCP again"
        )

    def _make(self: Any) -> None:
        """Call a class or a function."""
        args, make = self.stack.pop(), self.stack.pop()
        if len(args) > _MAX_ARGUMENTS:
            raise pickle.UnpicklingError(f"an object with {len(args)} arguments")
        self.append(make(*args))

    def _set_state(self: Any) -> None:
        """Give a record its fields. Nothing else has a state: it could change how this module works."""
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, _DcpObject):
            raise pickle.UnpicklingError(f"a state of a {type(record).__name__}")
        if isinstance(state, tuple):  # of TensorProperties; the dtype is the first
            record.by_position = state
        elif isinstance(state, dict):
            record.fields = state

    dispatch: ClassVar[Any] = {
        **{code: read for code, read in pickle._Unpickler.dispatch.items() if bytes([code]) not in _UNUSED},
        pickle.EMPTY_DICT[0]: lambda reader: reader.append(_Dict()),
        pickle.REDUCE[0]: _make,
        pickle.NEWOBJ[0]: _make,
        pickle.BUILD[0]: _set_state,
    }


@dataclass(frozen=True, slots=True)
class _FileRange:
    """Bytes of a file that hold one shard, or one value."""

    path: Path
    offset: int
    length: int


#: The offsets and sizes of each shard of a tensor, and its bytes.
Shards = list[tuple[tuple[int, ...], tuple[int, ...], _FileRange]]
#: By the name of a tensor or value, and by the text of the offsets of a shard: its bytes.
FileRanges = dict[str, dict[str, _FileRange]]


def is_dcp(folder: Path) -> bool:
    """Return whether a folder is one of DCP."""
    return (folder / METADATA).exists()


def open_dcp(folder: Path) -> Checkpoint:
    """Open a folder.

    Raises:
        InvalidInputError: it is damaged or incomplete, names files elsewhere, or holds Python objects.
    """
    where = file_inside(folder, METADATA, folder)
    with damaged(f"{where}: damaged, or of an unknown version of DCP", OSError):
        found = _read_metadata(where).fields
        places = _places(folder, where, found["storage_data"])
        paths = found.get("planner_data") or {}
        described = found["state_dict_metadata"]
        shards = sum(len(entry.fields.get("chunks", ())) for entry in described.values())
        if shards > where.stat().st_size:
            raise InvalidInputError(f"{where}: names {shards} shards, more than it has bytes; it is damaged")
        leaves = []
        for name, entry in described.items():
            if type(name) is not str:
                raise InvalidInputError(f"{where}: expected text as a name, got {type(name).__name__}; it is damaged")
            path = paths.get(name) or (name,)
            if len(path) > MAX_DEPTH or not all(type(element) in (str, int) for element in path):
                raise InvalidInputError(
                    f"{where}: {name}: expected a path of at most {MAX_DEPTH} keys and positions; it is damaged"
                )
            leaves.append((tuple(path), _leaf(where, name, entry, places)))
        state = nest(leaves, where, gaps=_MAX_GAPS)
    used = {stored.path for shards in places.values() for stored in shards.values()} | {where}
    if (folder / META).exists() and isinstance(state, dict):
        path = file_inside(folder, META, folder)
        used.add(path)
        meta = files.read_torch(path)
        state = {**(meta if isinstance(meta, dict) else {"meta": meta}), **state}
    names, hidden = names_below(folder)
    left_out = names.union(hidden) - {path.relative_to(folder).as_posix() for path in used}
    size = sum(path.stat().st_size for path in used)
    return Checkpoint(state, size, step_in(state), left_out=sorted(left_out), metrics=metrics_of_lightning(state))


def _read_metadata(where: Path) -> _DcpObject:
    with where.open("rb") as file:
        found = _MetadataUnpickler(file, where).load()
    if type(found).__name__ != "Metadata":
        raise InvalidInputError(f"{where}: expected metadata of DCP, got {type(found).__name__}")
    record: _DcpObject = found
    return record


def _places(folder: Path, where: Path, storage_data: Any) -> FileRanges:
    """Return where each shard lies, by the name of its tensor and its offsets."""
    found: FileRanges = {}
    checked: dict[str, Path] = {}
    claimed = 0
    for index, info in storage_data.items():
        name, offsets, fields = index.fields["fqn"], index.fields.get("offset"), info.fields
        file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
        if not (type(name) is type(file) is str and type(offset) is type(length) is int):
            raise InvalidInputError(f"{where}: a file name or a range of bytes has a wrong type; it is damaged")
        if fields.get("transform_descriptors"):
            raise InvalidInputError(
                f"{where}: {name}: is stored through {', '.join(fields['transform_descriptors'][:5])}; load it "
                "with torch.distributed.checkpoint, and save it without extensions"
            )
        if file not in checked:
            checked[file] = file_inside(folder, file, where)
        size = checked[file].stat().st_size
        if not 0 <= offset <= offset + length <= size:
            raise InvalidInputError(
                f"{checked[file]}: {name}: expected bytes {offset} to {offset + length}, but the file has {size}; it "
                "was cut off: copy it again"
            )
        claimed += length
        place = None if offsets is None else _numbers(offsets)
        found.setdefault(name, {})[str(place)] = _FileRange(checked[file], offset, length)
    if claimed > MAX_CLAIMS * (there := sum(path.stat().st_size for path in checked.values())):
        raise InvalidInputError(f"{where}: names {claimed} bytes, but its files have {there}; it is damaged")
    return found


def _leaf(where: Path, name: str, entry: Any, places: FileRanges) -> Any:
    """Return a value, or a `Later` for a tensor.

    Raises:
        InvalidInputError: its shards are missing, overlap or lie outside of it.
    """
    import torch

    if type(entry).__name__ == "BytesStorageMetadata":
        if (stored := places.get(name, {}).get("None")) is None:
            raise _missing(where, name)
        return _load(stored, name)
    properties = entry.fields["properties"]
    dtype = (properties.by_position or (properties.fields.get("dtype"),))[0].removeprefix("dtype ")
    shape = _numbers(entry.fields["size"])
    torch.empty(shape, dtype=getattr(torch, dtype), device="meta")  # raises if there is no such tensor
    shards: Shards = []
    cover = Cover([shape])
    for chunk in entry.fields["chunks"]:
        offsets, sizes = _numbers(chunk.fields["offsets"]), _numbers(chunk.fields["sizes"])
        if not (len(offsets) == len(sizes) == len(shape)) or any(
            not 0 <= offset <= offset + size <= full for offset, size, full in zip(offsets, sizes, shape, strict=True)
        ):
            raise InvalidInputError(f"{where}: {name}: a shard of {sizes} at {offsets} is not inside of {shape}")
        stored = places.get(name, {}).get(str(offsets))
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
    return Later(partial(_assemble, name, dtype, shape, shards), nbytes=wanted * getattr(torch, dtype).itemsize)


def _missing(where: Path, what: str) -> InvalidInputError:
    return InvalidInputError(f"{where}: has no bytes for {what}; the checkpoint is incomplete: save it again")


def _assemble(name: str, dtype: str, shape: tuple[int, ...], shards: Shards) -> Any:
    """Read the shards of a tensor, and return the whole tensor."""
    import torch

    whole: torch.Tensor | None = None
    for offsets, sizes, stored in shards:
        shard = _load(stored, name)
        form = _form(shard)
        if form != f"torch.{dtype}{list(sizes)}":
            raise InvalidInputError(
                f"{stored.path}: {name}: expected torch.{dtype}{list(sizes)} at byte {stored.offset}, got {form}; the "
                "file does not belong to this checkpoint, or is damaged"
            )
        if sizes == shape:
            return shard
        if whole is None:
            with out_of_memory(f"{name}: {dtype}{list(shape)}", "free memory; or its shape is damaged"):
                whole = torch.empty(shape, dtype=shard.dtype, device="cpu")
        box = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        copy_bits(box, shard)
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") if whole is None else whole


def _form(shard: Any) -> str:
    """Return the dtype and shape of a tensor, or the name of another type."""
    import torch

    if not isinstance(shard, torch.Tensor):
        return type(shard).__name__
    without = "" if shard.layout is torch.strided and not shard.is_meta else "a tensor without memory of its own: "
    return f"{without}{shard.dtype}{list(shard.shape)}"


def _load(stored: _FileRange, name: str) -> Any:
    with stored.path.open("rb") as file:
        return files.load_torch(io.BufferedReader(_Slice(file, stored)), f"{stored.path}: {name}")


class _Slice(io.RawIOBase):
    """Some bytes of a file as a file of its own."""

    def __init__(self, file: BinaryIO, stored: _FileRange) -> None:
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

    def readinto(self, buffer: Any) -> int:
        """Read bytes of the slice into `buffer`; return how many."""
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)
