"""A checkpoint of another program that was opened for an import, and the rule for names of files in its folder.

In: a path. Out: a `Checkpoint`, whose large tensors are still in their files. A folder from elsewhere is not trusted:
it may name, or link to, no file outside itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError, SnapstoreError
from ..format.records import Snapshot
from ..text import some

#: `fingerprint` reads so many samples of so many bytes of a file, and a smaller file whole.
SAMPLES, SAMPLE_BYTES = 64, 4096


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint that was opened.

    Attributes:
        state: nested containers over plain values, arrays and `Later`s.
        bytes_read: size of the files that it is read from [bytes].
        step: the step that it states; None: it states none.
        about: metadata for the snapshot.
        imported: more metadata, for the key "imported".
        left_out: names of files or items that are not imported.
        let_go: called with each array once it is stored.
        metrics: by name, as the checkpoint states them.
    """

    state: Any
    bytes_read: int
    step: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    imported: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    let_go: Callable[[Any], None] = lambda value: None
    metrics: dict[str, float] = field(default_factory=dict)


def file_inside(folder: Path, name: Any, named_by: Path) -> Path:
    """Return the path of a file that a checkpoint names.

    A link may lead to a file of the same folder, or to the blobs of a Hugging Face cache of which the folder is a
    snapshot.

    Args:
        named_by: the file that names it, for errors.

    Raises:
        InvalidInputError: the name is no relative path, it leads out of the folder, or there is no such file.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidInputError(f"{named_by}: names a file {str(name)[:80]!r}: expected the name of a file in {folder}")
    path, root = folder / name, folder.resolve()
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise InvalidInputError(
            f"{named_by}: names the file {name!r}, which is not in {folder}; import only folders that you trust, with "
            "all of their files in them"
        )
    target = Path(os.path.realpath(path))  # Path.resolve raises if a link leads to itself
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not (target.is_relative_to(root) or target.is_relative_to(blobs)):
        raise InvalidInputError(
            f"{path}: is a link to {target}, which is not in {folder}; if you trust it, put a copy of the file there"
        )
    if not path.is_file() and os.path.lexists(path):
        raise InvalidInputError(f"{path}: is neither a file nor a link to one; remove it, then retry")
    if not path.is_file():
        raise InvalidInputError(f"{path}: is missing, but {named_by} names it; copy the whole checkpoint, then retry")
    return path


def names_below(folder: Path) -> tuple[set[str], set[str]]:
    """Return (the names of all files below a folder, the names of what is hidden and no file, such as `.git`).

    Nothing below a hidden folder is among the files. A link to a folder elsewhere is, unless it is hidden.
    """
    root, names, hidden = folder.resolve(), set[str](), set[str]()
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        dotted = next((at for at, part in enumerate(parts) if part.startswith(".")), None)
        if dotted is not None and (dotted < len(parts) - 1 or not path.is_file()):
            hidden.add("/".join(parts[: dotted + 1]))
        elif not path.is_dir() or not path.resolve().is_relative_to(root):
            names.add("/".join(parts))
    return names, hidden


def fingerprint(source: Path) -> str:
    """Return a hash of the names, the sizes and samples of the files of a checkpoint; a copy of it has the same.

    A file that cannot be read, or does not lie in the folder, counts with its name only.
    """
    digest = hashlib.sha256()
    for name in sorted(names_below(source)[0]) if source.is_dir() else [""]:
        digest.update(os.fsencode(name) + b"\0")
        with suppress(OSError, InvalidInputError):
            path = file_inside(source, name, source) if name else source
            if path.is_file():
                digest.update(_sample(path))
    return digest.hexdigest()


def _sample(path: Path) -> bytes:
    """Return the size of a file and samples of it, the first and the last bytes among them."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= SAMPLES * SAMPLE_BYTES:
            return size.to_bytes(8, "little") + file.readall()
        found = [size.to_bytes(8, "little")]
        for number in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            found.append(file.read(SAMPLE_BYTES))
        return b"".join(found)


def versions(source: Path, names: Iterable[str] | None = None) -> dict[str, tuple[int, int, int] | None]:
    """Return (inode, size, time of the last change) of each file of a checkpoint, by name; None: it cannot be read.

    Args:
        names: of the files; None: all of them.
    """
    found: dict[str, tuple[int, int, int] | None] = {}
    for name in (names_below(source)[0] if source.is_dir() else {""}) if names is None else names:
        found[name] = None
        with suppress(OSError):
            status = (source / name).stat()
            found[name] = status.st_ino, status.st_size, status.st_mtime_ns
    return found


def size_of(source: Path) -> int:
    """Return the size of all files of a checkpoint that can be read [bytes]; 0 if it is deleted meanwhile."""
    with suppress(OSError):
        return sum(version[1] for version in versions(source).values() if version)
    return 0


def modified(found: dict[str, tuple[int, int, int] | None]) -> float | None:
    """Return the time of the last change of the newest of some files [s since the epoch]; see `versions`."""
    times = [version[2] for version in found.values() if version is not None]
    return max(times) / 1e9 if times else None


def changed(source: Path, before: dict[str, tuple[int, int, int] | None]) -> str:
    """Return the names of the files that have changed since `versions` looked; "": none."""
    now = versions(source, before)
    return some(sorted(str(source / name) for name in before if before[name] != now[name]), 3)


def require_unchanged(source: Path, before: dict[str, tuple[int, int, int] | None]) -> None:
    """Raise InvalidInputError if a file has changed since `versions` looked: its tensors may be of two checkpoints."""
    if names := changed(source, before):
        raise InvalidInputError(
            f"{names}: changed while it was read; nothing was committed; try again once it is complete"
        )


def first_line(error: Exception) -> str:
    """Return the name of an error's type, and the first line of its message if it has one."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])[:200]


@contextmanager
def damaged(what: str, passed: type[Exception] = SnapstoreError) -> Iterator[None]:
    """Turn every error that a malformed file causes into an InvalidInputError.

    Args:
        what: begins its message.
        passed: an error that stays as it is, beside our own and a lack of memory.
    """
    try:
        yield
    except (MemoryError, SnapstoreError, passed):
        raise
    except Exception as error:  # a library does not document what it raises for a bad file
        raise InvalidInputError(f"{what}: {first_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        InvalidInputError: it holds none, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path}: cannot be read as JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def noted(snapshot: Snapshot, key: str) -> dict[str, Any]:
    """Return the dict that an import has put under a key of a snapshot's metadata; {} if there is none."""
    metadata: Any = snapshot.metadata
    found = metadata.get(key) if isinstance(metadata, dict) else None
    return found if isinstance(found, dict) else {}


def step_in(values: Any) -> int | None:
    """Return the `global_step` in a state or in a trainer's own state; None: it has none."""
    step = values.get("global_step") if isinstance(values, dict) else None
    return step if type(step) is int else None


def nest(leaves: Iterable[tuple[tuple[Any, ...], Any]], where: Path, *, gaps: int = 0) -> Any:
    """Return nested dicts and lists with a leaf at each path: text names a key, an int a position in a list.

    Args:
        gaps: how many positions a list may lack; None is put there.

    Raises:
        InvalidInputError: two paths do not fit into one tree, or a position of a list is missing.
    """
    root: dict[Any, Any] = {}
    for path, leaf in leaves:
        node = root
        for element in path[:-1]:
            node = node.setdefault(element, {})
            if type(node) is not dict:
                raise InvalidInputError(f"{where}: {'.'.join(map(str, path))}: lies below another value; it is damaged")
        if not path or path[-1] in node:
            raise InvalidInputError(f"{where}: {'.'.join(map(str, path))}: two values have this path; it is damaged")
        node[path[-1]] = _LeafValue(leaf)
    return _listed(root, where, (), gaps)


@dataclass(frozen=True, slots=True)
class _LeafValue:
    """A leaf of a tree that is being made: it may be a dict itself."""

    value: Any


def _listed(node: Any, where: Path, path: tuple[Any, ...], gaps: int) -> Any:
    """Return a tree with a list in place of each dict whose keys are positions.

    Raises:
        InvalidInputError: a list lacks some of its positions.
    """
    if isinstance(node, _LeafValue):
        return node.value
    positions = [key for key in node if type(key) is int]
    children = {key: _listed(child, where, (*path, key), gaps) for key, child in node.items()}
    if not positions:
        return children
    size = max(positions) + 1
    if len(positions) < len(node) or min(positions) < 0 or size - len(node) > gaps:
        raise InvalidInputError(
            f"{where}: {'.'.join(map(str, path))}: a list lacks some of its positions ({sorted(map(str, node))[:5]})"
        )
    return [children.get(position) for position in range(size)]
