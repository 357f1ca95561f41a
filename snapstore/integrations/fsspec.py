"""fsspec: snapshots as read-only files, for every tool that opens files by fsspec.

    fsspec.open("snapstore://exp1@best/model.safetensors", repository="s3://bucket/snapshots")

A snapshot is a folder `run@step`; any reference names it. It has a file `PART.safetensors` for each part, with the
names inside the part, and `all.safetensors` with all tensors. The files are not stored: their headers are computed, and
a range of bytes is read from the chunks that hold it, each checked against its digest. Arrays that the format cannot
hold are left out, and `info()` names them. A snapshot of a folder (`snapstore.pack_folder`) shows the files of that
folder instead.

The repository is named by the option `repository`, by `?repository=URL` at the end of a path, or by SNAPSTORE_REPO.
"""

from __future__ import annotations

import errno
import os
import posixpath
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ..convert import files
from ..convert.safetensors_file import METADATA, dtype_of, layout
from ..errors import InvalidInputError, NotFoundError
from ..format.records import Snapshot
from ..inspect.lazy import LazyTensors, TensorHandle, open_tensors
from ..repository import Repository
from ..retention import utc
from ..state.fill.fit import Fit
from ..state.folder import File, Folder, FolderEntry, Link, file_spans, index_of, is_folder, read_span
from ..state.values.tensors import TensorSpec

ENDING = ".safetensors"
#: The name of the file of all tensors; a part of this name takes precedence.
ALL = "all"
QUERY = "?repository="
#: The most files whose headers, and snapshots whose folders, are kept in memory.
FILES_KEPT = 32


class SnapstoreFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The snapshots of one repository as read-only files.

    Args:
        repository: its path or URL; default: SNAPSTORE_REPO.

    Raises:
        InvalidInputError: no repository is named.
        FileNotFoundError: a path names nothing; from every call that takes one.
        SnapstoreError: see `Repository.tensors`; from every call that reads.
    """

    protocol = "snapstore"
    root_marker = ""

    def __init__(self, repository: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._named = repository
        self._opened: tuple[int, str, Repository] | None = None
        self._files: OrderedDict[tuple[str, str], _VirtualFile | _FileOfFolder] = OrderedDict()
        self._folders: OrderedDict[str, _Folder | None] = OrderedDict()
        _ = self.url  # raises if there is none

    @property
    def url(self) -> str:
        """The repository's path or URL; SNAPSTORE_REPO is read each time, since fsspec keeps its file systems."""
        url = self._named or os.environ.get("SNAPSTORE_REPO")
        if not url:
            raise InvalidInputError(
                "snapstore://: no repository named; pass repository=URL, end the path with ?repository=URL, or set "
                "SNAPSTORE_REPO"
            )
        return url

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = os.fspath(path).removeprefix("snapstore://")
        return text.partition(QUERY)[0].strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        _, found, url = path.partition(QUERY)
        return {"repository": url} if found else {}

    @property
    def repository(self) -> Repository:
        """The repository, opened by this process."""
        place = os.getpid(), self.url
        if self._opened is None or self._opened[:2] != place:
            self._opened = *place, Repository.open(self.url)
            self._files.clear()
            self._folders.clear()
        return self._opened[2]

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return the snapshots of the repository, or the files of one, or the file itself.

        A snapshot whose record cannot be read or is gone is left out, with a warning: see `Repository.snapshots`.
        """
        ref, name = self._split(path)
        folder = self._folder(self._snapshot(ref, path)) if ref else None
        if not ref:
            snapshots = self.repository.snapshots()
            last = {s.ref: s for s in snapshots}
            found = [_directory(s.ref, s) for s in snapshots if last[s.ref] is s]
        elif folder is not None and self.info(path)["type"] == "directory":
            found = [self.info(f"{ref}/{below}") for below in folder.names(name)]
        elif name:
            found = [self.info(path)]
        else:
            snapshot = self._snapshot(ref, path)
            parts = [part.part for part in snapshot.manifests if part.part and "/" not in part.part]
            names = [f"{part}{ENDING}" for part in dict.fromkeys([*parts, ALL])]
            found = [self._file(snapshot, name, path).info(f"{ref}/{name}") for name in names]
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return name, size [bytes] and type of a path; for a file also its snapshot's id, and the names left out."""
        ref, name = self._split(path)
        if not ref:
            return {"name": "", "size": 0, "type": "directory"}
        snapshot = self._snapshot(ref, path)
        folder = self._folder(snapshot)
        if not name or (folder is not None and folder.is_directory(name)):
            return _directory(f"{ref}/{name}".rstrip("/"), snapshot)
        return self._file(snapshot, name, path).info(f"{ref}/{name}")

    # fsspec's own methods take every error, or every error of a store, for a path that is not there

    def exists(self, path: str, **options: Any) -> bool:
        """Return whether a path names something."""
        return self._type(path) is not None

    def isdir(self, path: str) -> bool:
        """Return whether a path names a folder."""
        return bool(self._type(path) == "directory")

    def isfile(self, path: str) -> bool:
        """Return whether a path names a file."""
        return bool(self._type(path) == "file")

    def _type(self, path: str) -> Any:
        try:
            return self.info(path)["type"]
        except FileNotFoundError:
            return None

    def walk(self, path: str, *arguments: Any, **options: Any) -> Any:
        """Yield (folder, its folders, its files), as fsspec does; `find` and `glob` use this."""
        return super().walk(path, *arguments, **{"on_error": _raise_unless_missing, **options})

    def created(self, path: str) -> datetime:
        """Return when the snapshot was saved, by the clock of its writer, in the years 1 to 9999."""
        return utc(self._snapshot(self._split(path)[0], path).created)

    modified = created

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Return the bytes [start, end) of a file; they may be negative, as in a slice."""
        file = self._open(path)
        first, stop, _ = slice(start, end).indices(file.size)
        return bytes(file.virtual.read(first, max(first, stop)))

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> SnapshotFile:
        if mode != "rb":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        ref, name = self._split(path)
        snapshot = self._snapshot(ref, path)
        virtual = self._file(snapshot, name, path)
        for known in ("autocommit", "size"):  # fsspec gives them when it reads a pickle
            options.pop(known, None)
        return SnapshotFile(self, f"id:{snapshot.id}/{name}", virtual, block_size, **options)

    def _rm(self, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Raise OSError, as all methods that write: nothing can be written."""
        self._rm(path2)

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Raise OSError, as all methods that write: nothing can be written."""
        self._rm(path)

    def _split(self, path: str) -> tuple[str, str]:
        """Return (the reference, the name of a file) of a path."""
        ref, _, name = self._strip_protocol(path).partition("/")
        return ref, name

    def _snapshot(self, ref: str, path: str) -> Snapshot:
        with _not_found(path):
            return self.repository.snapshot(ref)

    def _folder(self, snapshot: Snapshot) -> _Folder | None:
        """Return the folder that a snapshot holds; None if it holds a state."""
        if [part.part for part in snapshot.manifests] != [""]:
            return None
        with suppress(KeyError):
            return self._folders[snapshot.id]
        tensors = open_tensors(self.repository.context, f"id:{snapshot.id}")
        found = _Folder(tensors) if is_folder(tensors) else None
        _keep(self._folders, snapshot.id, found)
        return found

    def _file(self, snapshot: Snapshot, name: str, path: str) -> _VirtualFile | _FileOfFolder:
        """Return a file of a snapshot."""
        if (folder := self._folder(snapshot)) is not None:
            return folder.file(name, path)
        repository, key = self.repository, (snapshot.id, name)
        part, is_one = name.removesuffix(ENDING), name.endswith(ENDING)
        named = {each.part for each in snapshot.manifests if "/" not in each.part}
        if not is_one or (part not in named and part != ALL) or not part:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        found = self._files.get(key)
        if found is None:
            fit = Fit(None, part) if part in named else None
            with _not_found(path):
                tensors = open_tensors(repository.context, f"id:{snapshot.id}", keys=fit)
            found = _VirtualFile(tensors)
            _keep(self._files, key, found)
        return found


class SnapshotFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file of a snapshot; the cache of fsspec decides which ranges are read.

    Its path names the snapshot by the id, so a pickled file reads the same snapshot.
    """

    DEFAULT_BLOCK_SIZE = 1024 * 1024

    def __init__(
        self, fs: SnapstoreFileSystem, path: str, virtual: _VirtualFile | _FileOfFolder, block_size: Any, **options: Any
    ) -> None:
        self.virtual = virtual
        super().__init__(fs, path, "rb", block_size or self.DEFAULT_BLOCK_SIZE, size=virtual.size, **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.virtual.read(start, min(end, self.virtual.size)))


class _VirtualFile:
    """A safetensors file that is computed: its header, and where each tensor would lie."""

    def __init__(self, tensors: LazyTensors) -> None:
        self.snapshot = tensors.snapshot
        specs, handles = [], dict[str, TensorHandle]()
        self._left_out = []
        for name, handle in tensors.items():
            spec = TensorSpec((name,), handle.kind, handle.dtype, handle.shape, False, None)
            if name in ("", METADATA) or dtype_of(spec) is None:
                self._left_out.append(name)
            else:
                specs.append((name, spec))
                handles[name] = handle
        self._header, starts, self.size = layout(specs, {"format": "pt", **files.safetensors_metadata(self.snapshot)})
        filled = [(start, handles[name]) for name, start in starts.items() if handles[name].nbytes]
        self._starts = [start for start, _ in filled]
        self._handles = [handle for _, handle in filled]

    def info(self, name: str) -> dict[str, Any]:
        """Return the info of the file; by the id, caches notice that a reference now names another snapshot."""
        about = {"name": name, "size": self.size, "type": "file", "id": self.snapshot.id}
        return {**about, "left_out": list(self._left_out)} if self._left_out else about

    def read(self, start: int, end: int) -> bytearray:
        """Return the bytes [start, end) of the file."""
        found = bytearray(self._header[start:end])
        number = max(0, bisect_right(self._starts, start) - 1)
        for first, handle in zip(self._starts[number:], self._handles[number:], strict=True):
            if first >= end:
                break
            begin, stop = max(start - first, 0), min(end - first, handle.nbytes)
            if begin < stop:
                found += handle.read_bytes(begin, stop).data
        return found


class _Folder:
    """The folder of a snapshot that `pack_folder` made."""

    def __init__(self, tensors: LazyTensors) -> None:
        self.tensors, index = tensors, index_of(tensors)
        self.block_bytes = index.block_bytes
        self._entries = {os.fsdecode(entry.name): entry for entry in index.entries}

    def names(self, above: str) -> list[str]:
        """Return the names in a folder, without links that lead to no file here, and names that contain QUERY."""
        inside = f"{above}/" if above else ""
        below = (name for name in self._entries if name.startswith(inside) and "/" not in name[len(inside) :])
        return [name for name in below if self._followed(name) is not None and QUERY not in name]

    def is_directory(self, name: str) -> bool:
        """Return whether a name is that of a folder. A link to a folder does not count: each file has one name."""
        return name in self._entries and self._entries[name].kind == Folder

    def file(self, name: str, path: str) -> _FileOfFolder:
        """Return a file; a link to one is followed."""
        entry = self._followed(name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return _FileOfFolder(self, entry)

    def _followed(self, name: str) -> FolderEntry | None:
        entry = self._entries.get(name)
        if entry is not None and entry.kind == Link:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), os.fsdecode(entry.target)))
            entry = self._entries.get(target)
            return entry if entry is not None and entry.kind == File else None
        return entry


class _FileOfFolder:
    """A file in the folder of a snapshot."""

    def __init__(self, folder: _Folder, entry: FolderEntry) -> None:
        self._folder, self._entry, self.size = folder, entry, entry.size

    def info(self, name: str) -> dict[str, Any]:
        """Return the info of the file."""
        return {"name": name, "size": self.size, "type": "file", "id": self._folder.tensors.snapshot.id}

    def read(self, start: int, end: int) -> bytearray:
        """Return the bytes [start, end) of the file."""
        found = bytearray()
        for span in file_spans(self._entry, start, min(end, self.size), self._folder.block_bytes):
            found += read_span(self._folder.tensors, self._entry, span).data
        return found


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value in memory; drop the oldest ones above FILES_KEPT."""
    kept[key] = value
    while len(kept) > FILES_KEPT:
        kept.popitem(last=False)


def _directory(ref: str, snapshot: Snapshot) -> dict[str, Any]:
    return {"name": ref, "size": 0, "type": "directory", "id": snapshot.id}


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _not_found(path: str) -> Iterator[None]:
    """Raise FileNotFoundError, as file systems do, if a reference or part names nothing."""
    try:
        yield
    except (NotFoundError, InvalidInputError) as error:  # a run alone is no reference
        raise FileNotFoundError(errno.ENOENT, str(error), path) from error
