"""Reference files: small files that an adapter writes where a trainer expects a checkpoint file.

In: a committed snapshot. Out: a small JSON file that names it: the repository by place and uuid, the run, the step and
the id. Invariant: a reference is replaced atomically, so a reader finds the old one or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ..convert.files import fsync, publish
from ..errors import FormatError, InvalidInputError, NotFoundError, OutputError
from ..format.records import Snapshot
from ..repository import Repository
from ..state.values.composite import require_classes

#: The first value of a reference; a later form of it gets another number.
FORMAT, VERSION = "snapstore reference", 1
_TEXTS = ("repository", "uuid", "run", "snapshot")
#: A larger file is not a reference [bytes].
_LIMIT = 65536


def write(path: str, repository: Repository, snapshot: Snapshot, *, part: str | None = None) -> None:
    """Write a reference to a committed snapshot at a path, in place of any file that is there.

    Args:
        path: a local path, or a URL of fsspec.
        part: the part of the snapshot that the file stands for; None: all of it.

    Raises:
        OutputError: it cannot be written; the file that was there stays.
    """
    named = {"format": FORMAT, "version": VERSION, "repository": repository.url, "uuid": repository.config.uuid}
    named |= {"run": snapshot.run, "step": snapshot.step, "snapshot": snapshot.id}
    named |= {} if part is None else {"part": part}
    text = json.dumps(named, indent=1) + "\n"
    fs, place = _file_system(path)
    try:
        fs.makedirs(place.rpartition("/")[0] or ".", exist_ok=True)
        if "file" not in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
            fs.pipe(place, text.encode())
            return
        publish(Path(place), lambda file: file.write_text(text), force=True)
        fsync(Path(place).parent)
    except OSError as error:
        raise OutputError(f"{path}: the reference cannot be written: {error.strerror or error}") from error


def read(path: str) -> dict[str, Any]:
    """Return the values of a reference.

    Raises:
        NotFoundError: there is no file.
        FormatError: it is not a reference, or one of a later release.
    """
    fs, place = _file_system(path)
    if not fs.exists(place):
        raise NotFoundError(f"{path}: no such checkpoint; a save that has not ended leaves no reference")
    data = b"" if fs.isdir(place) else fs.cat_file(place, 0, _LIMIT)
    named: Any = None
    with suppress(ValueError):
        named = json.loads(data)
    if not isinstance(named, dict) or named.get("format") != FORMAT:
        raise FormatError(f"{path}: is not a reference to a snapshot; load it with the plugin that saved it")
    if named.get("version") != VERSION:
        found = named.get("version")
        raise FormatError(f"{path}: is a reference of version {found!r}, expected {VERSION}; update snapstore")
    if not all(isinstance(named.get(key), str) for key in _TEXTS) or type(named.get("step")) is not int:
        raise FormatError(f"{path}: the reference lacks one of {', '.join(_TEXTS)}, or its step")
    return named


def has_file(path: str) -> bool:
    """Return whether there is a file at a path, of any kind; a symbolic link that leads nowhere is none.

    Raises:
        InvalidInputError: there is a folder.
    """
    fs, place = _file_system(path)
    if fs.isdir(place) and not Path(place).is_symlink():
        raise InvalidInputError(f"{path}: is a folder; a checkpoint is a file: choose another name, or move the folder")
    return bool(fs.exists(place))


def find(path: str) -> dict[str, Any] | None:
    """Return the values of the reference at a path; None: there is none, or the path is a symbolic link."""
    if Path(_file_system(path)[1]).is_symlink():
        return None
    try:
        return read(path)
    except (NotFoundError, FormatError):
        return None


def remove(path: str) -> None:
    """Remove the file or folder at a path, if there is one; of a symbolic link remove only the link."""
    fs, place = _file_system(path)
    if Path(place).is_symlink():
        Path(place).unlink()
    elif fs.exists(place):
        fs.rm(place, recursive=True)


@contextmanager
def repository_of(named: dict[str, Any], path: str | Path, here: str | Path | Repository) -> Iterator[Repository]:
    """Yield the repository to which a reference refers.

    Args:
        named: the values of the reference.
        path: the path of the reference, for errors.
        here: the repository to try first; the second is the place in the reference.

    Raises:
        NotFoundError: the repository is in neither place.
    """
    for where in (here, named["repository"]):
        try:
            opened = nullcontext(where) if isinstance(where, Repository) else Repository.open(where)
        except NotFoundError:
            continue
        with opened as repository:
            if repository.config.uuid == named["uuid"]:
                yield repository
                return
    raise NotFoundError(
        f"{path}: refers to the repository {named['uuid']}, and it is not at {named['repository']} any more; if it has "
        "moved, pass its new URL"
    )


def restore(path: str, here: str | Path | Repository, map_location: Any, types: Sequence[type]) -> Any:
    """Return the state, or the part of one, that the reference at a path names.

    Args:
        here: see `repository_of`.
        map_location: a device for all tensors; None or a function: host memory.
        types: classes of values that the restore creates again.

    Raises:
        NotFoundError: there is no file; or its repository or snapshot is gone.
        FormatError: the file is not a reference.
        InvalidInputError: a composite tensor is of a class that is not known.
    """
    named = read(path)
    device = "cpu" if map_location is None or callable(map_location) else map_location
    keys = [named["part"]] if "part" in named else None
    with repository_of(named, path, here) as repository:
        try:
            state = repository.restore(f"id:{named['snapshot']}", keys=keys, device=device, types=types)
        except NotFoundError as error:
            raise gone(named, path, repository, error) from error
    return require_classes(state[named["part"]] if keys else state)


def gone(named: dict[str, Any], path: str | Path, repository: Repository, error: NotFoundError) -> NotFoundError:
    """Return the error for a reference to a snapshot that is not there."""
    return NotFoundError(
        f"{path}: refers to {named['run']}@{named['step']} (id:{named['snapshot'][:12]}) in {repository.url}, which is "
        f"not there ({error}); see: snapstore log --run {named['run']}"
    )


def _file_system(path: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # every trainer installs it

    found: tuple[Any, str] = url_to_fs(path)
    return found
