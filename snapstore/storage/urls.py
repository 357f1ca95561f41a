"""URLs of stores: open the local, memory or S3 store that a URL names.

In: a URL or a path. Out: an `ObjectStore`, or an error that says what was expected. Errors repeat no part of a URL that
may hold a password.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote_to_bytes

from ..errors import CapabilityError, InvalidInputError, NotFoundError, StorageError
from ..text import quoted
from .base import ObjectStore, is_component

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)

#: The beginning of a path that was meant to be a URL, such as s3:bucket, s3//bucket, str(Path("gs://bucket")), or a URL
#: after a blank or in quotes, as it comes from a file of settings.
_MISTYPED = re.compile(r"""[\s"']*(s3|file|memory)(:|//)|[^/]*:/""", re.IGNORECASE)


def open_store(url: str | Path | ObjectStore, *, create: bool = False) -> ObjectStore:
    """Return the store at `url`: a path, `file:///path`, `s3://bucket/prefix`, or `memory://NAME` (this process only).

    Args:
        url: Anything without `scheme://` is a path; `~` at its start is the home folder. A path that begins like a
            mistyped URL (`s3:`, `s3//`, a blank or a quote before it) is refused. A store is returned as it is.
        create: Make a missing local directory.

    Raises:
        InvalidInputError: It is not a valid URL, path or store, or the path is not a directory.
        NotFoundError: The local directory is missing.
        CapabilityError: boto3 is needed and not installed.
        StorageError: The path cannot be opened.
    """
    _fill_standard_descriptors()
    if not isinstance(url, str | Path):
        if callable(getattr(url, "get_range", None)):
            return url
        raise InvalidInputError(f"{quoted(url)}: expected a URL, a path or an object store, got {type(url).__name__}")
    url = str(url)
    if (path := local_path(url)) is not None:
        return _open_local(path, create=create)
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme == "memory":
        return _open_memory(rest)
    if scheme == "s3":
        return _open_s3(url)
    # Repeat only the scheme: the URL may carry a password.
    raise InvalidInputError(f"{scheme}://: unknown scheme, expected a path, file://, s3:// or memory://")


def _fill_standard_descriptors() -> None:
    """Open descriptors 0 to 2 if they are closed; else a file of ours may get one, and output be written into it."""
    with suppress(OSError):
        while (lowest_free := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(lowest_free)


def local_path(url: str) -> str | None:
    """Return the path that a path or a `file://` URL means; None: it is a URL of another kind.

    Raises:
        InvalidInputError: the home folder is unknown, or the URL names no path on this machine.
    """
    match = _SCHEME.fullmatch(url)
    if match is None:
        return expand_home(url)
    return _path_of_file_url(match[2]) if match[1].lower() == "file" else None


def expand_home(path: str | Path) -> str:
    """Return a local path with `~` or `~user` at its start replaced by the home folder.

    Raises:
        InvalidInputError: the home folder is unknown.
    """
    expanded = os.path.expanduser(path)  # noqa: PTH111  # Path.expanduser raises RuntimeError
    if expanded.startswith("~"):
        raise InvalidInputError(f"{expanded}: no such home folder; write ./{expanded} if the name begins with ~")
    return expanded


def _path_of_file_url(rest: str) -> str:
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise InvalidInputError(f"file://{rest}: expected an absolute path on this machine, as in file:///data/repo")
    return os.fsdecode(unquote_to_bytes(os.fsencode(path)))


def _open_local(path: str, *, create: bool) -> ObjectStore:
    from .local import LocalStore

    if not path or "\0" in path:
        raise InvalidInputError(f"{quoted(path)}: expected the path of a directory")
    if _MISTYPED.match(path):  # it is not repeated: it may carry a password
        raise InvalidInputError(
            "looks like a URL, expected s3://bucket/prefix, file:///path or memory://NAME, without blanks or quotes "
            "around it, as a str (pathlib removes a slash); pass a folder of such a name by its absolute path"
        )
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{path}: cannot be the name of a directory here, where names are in {sys.getfilesystemencoding()}; "
            "set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
        ) from error
    try:
        if Path(path).is_dir() or create:
            return LocalStore(path, create=create)
        exists = Path(path).exists()
        if exists and Path(path).is_dir():  # another process has made it meanwhile
            return LocalStore(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened, {error.strerror}; check the mount and its owner") from error
    if exists:
        raise InvalidInputError(f"{path}: expected a directory, found something else")
    raise NotFoundError(f"{path}: expected a directory, found none; mount it, or make it with 'snapstore init'")


def _open_s3(url: str) -> ObjectStore:
    try:
        from .s3.store import S3Store
    except ModuleNotFoundError as error:
        if error.name not in ("boto3", "botocore"):
            raise
        raise CapabilityError("s3://: needs boto3, which is not installed; pip install 'snapstore[s3]'") from error
    return S3Store(url)


def _open_memory(name: str) -> ObjectStore:
    from .memory import memory_store

    if not is_component(name):
        raise InvalidInputError(f"memory://{name}: expected a name of letters, digits, '.', '_' and '-'")
    return memory_store(name)
