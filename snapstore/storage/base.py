"""Object stores: key -> bytes, and nothing about snapshots.

A store holds immutable objects under keys such as `packs/7f/7f3a...`: `/`-joined components that match
`[A-Za-z0-9][A-Za-z0-9._-]*`, at most 255 bytes each and 16 of them, so that no key leaves the repository's folder.
`tmp/` and `index/` are no keys: locally the one holds files being written, the other is left alone. What every backend
must give (docs/format.md, "Backends"):

- `put` is create-only and atomic: an object appears whole or not at all, never replaces another, and once `put`
  has returned it survives a crash of the machine. Two racing puts of one key: exactly one returns.
- an object that `put` has returned is seen at once by `get`, `stat` and `list` of every process.
- `delete` of a missing key is no error.
- a `list` that fails raises; it never returns less than there is.

Stores are safe to use from several threads. Every failure is one of `errors.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import (
    AlreadyExistsError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
)

Buffer = bytes | bytearray | memoryview

#: Objects read whole (`get`) are refused above this size unless the caller allows more [bytes].
GET_LIMIT_BYTES = 1024 * 1024 * 1024

#: Components of a key at most: what lies deeper in a folder is no object, and nobody looks for it.
MAX_LEVELS = 16
#: First components that no key may have.
RESERVED = frozenset({"tmp", "index"})

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object, as `list` and `stat` both show it.

    Attributes:
        modified_s: when it was last written or touched, by the store's clock [s since the epoch].
        tag: another one where the bytes under the key are others than before, however soon that was (S3: the ETag);
            empty where a store cannot tell.
    """

    key: str
    size_bytes: int
    modified_s: float
    tag: str = ""


class ObjectStore(Protocol):
    """One flat name space of immutable objects.

    Call sequence: any method, any thread, any time. `put`, `delete`, `touch` and `release` may be repeated after an
    unclear failure; the caller then decides from what it finds under the key. After a `put` that failed otherwise than
    by AlreadyExistsError the object may be there and not be durable: `sync` its prefix before believing in it.

    Every method raises InvalidInputError for a key that is none, and StorageError when the store fails.
    """

    url: str
    place: str  # tells these objects from all others, also those of another store with the same url (a mirror)
    puts_at_once: int  # more than so many bring no more bytes a second

    def put(self, key: str, data: Buffer) -> None:
        """Create `key` with `data`, durable on return; AlreadyExistsError when the key is taken."""
        ...

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        """All bytes of `key`; NotFoundError when missing, FormatError when larger than `limit_bytes`."""
        ...

    def get_range(self, key: str, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        """Return `length` bytes of `key` from `offset` on: in `into` if it is given, else in new writable memory.

        Args:
            into: Writable, contiguous, (length,) bytes.

        Raises:
            NotFoundError: The object is missing.
            IntegrityError: The object ends before the range does.
            InvalidInputError: A number is negative, or `into` does not fit.
        """
        ...

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of `key`; NotFoundError when missing."""
        ...

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        """The size of each of these that is there, in few requests; missing ones are left out."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix` (empty, or ending in `/`), in no particular order.

        An object that is put or deleted meanwhile may be in it or not; all others are in it exactly once.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove every key; missing ones are fine."""
        ...

    def now_s(self) -> float:
        """The store's clock, the one that `modified_s` is read from [s since the epoch]."""
        ...

    def sync(self, prefix: str) -> None:
        """Make what `list(prefix)` shows durable (local: fsync of the directory), so that acting on it is safe."""
        ...

    def lock(self, key: str, data: Buffer) -> None:
        """`put`, and keep a sign of life on the object until `release` or the death of this process.

        The sign is there before the object can be seen. A forked child does not keep it.
        """
        ...

    def touch(self, key: str) -> None:
        """Renew `modified_s` (a heartbeat); NotFoundError when the object is gone."""
        ...

    def release(self, key: str) -> None:
        """Delete a held object and end its sign of life; a key that is not held here is only deleted."""
        ...

    def is_locked(self, key: str) -> bool | None:
        """Whether some live process of this machine holds `key`; None where the store cannot know."""
        ...

    def clean(self) -> int:
        """Remove what dead writers left behind outside the name space (temporary files); bytes freed."""
        ...

    def prepare(self) -> None:
        """Refuse a place where no new repository can be: the cheap part of `snapstore doctor`.

        Raises:
            InvalidInputError: the place holds other things.
            CapabilityError: it does not keep what this protocol promises, as far as a few requests show.
        """
        ...

    def pinned(self) -> AbstractContextManager[None]:
        """Keep to the place that lies under the name now: while it lasts, every operation on another one raises.

        A local root is another place when its volume was unmounted, another one was mounted over it, or its folder was
        renamed. A store whose name cannot come to mean another place has nothing to do.
        """
        ...

    def sandbox(self) -> AbstractContextManager[ObjectStore]:
        """An empty store in this place, which no listing shows and which is removed at the end: to try things out."""
        ...


def is_component(name: str) -> bool:
    """Whether `name` can stand between the slashes of a key."""
    return _COMPONENT.fullmatch(name) is not None


def is_key(key: str) -> bool:
    """Whether `key` is one."""
    components = key.split("/")
    return _are_components(components) and components[0] not in RESERVED


def _are_components(names: Sequence[str]) -> bool:
    return len(names) <= MAX_LEVELS and all(map(is_component, names))


def check_key(key: str) -> None:
    """Raise InvalidInputError unless `key` is one; every backend calls this before anything else."""
    components = key.split("/")
    if not _are_components(components):
        raise InvalidInputError(
            f"{key!r}: not a key, expected at most {MAX_LEVELS} '/'-joined names of at most 255 letters, digits, '.', "
            "'_' and '-' that start with a letter or digit"
        )
    if components[0] in RESERVED:
        raise InvalidInputError(f"{key!r}: not a key, {components[0]!r} is reserved")


def check_prefix(prefix: str) -> None:
    """Raise InvalidInputError unless `prefix` is empty, or a key and a slash."""
    if prefix and not prefix.endswith("/"):
        raise InvalidInputError(f"{prefix!r}: not a prefix, expected nothing or something that ends in '/'")
    if prefix:
        check_key(prefix[:-1])


def check_range(key: str, offset: int, length: int) -> None:
    """Raise InvalidInputError for a range that no object could have."""
    if offset < 0 or length < 0:
        raise InvalidInputError(f"{key} at {offset}+{length}: expected an offset and a length of 0 or more")


def memory_for(key: str, length: int, into: memoryview | None) -> memoryview:
    """Return where a range of `length` bytes goes: `into`, or new memory.

    Raises:
        InvalidInputError: `into` is not a writable, contiguous view of that many bytes.
    """
    if into is None:
        return np.empty(length, np.uint8).data  # not a bytearray, which is zeroed first
    if into.readonly or not into.c_contiguous or into.format != "B" or into.shape != (length,):
        raise InvalidInputError(
            f"{key}: expected a writable, contiguous view of {length} bytes, got one of shape {into.shape} and "
            f"format {into.format!r}{', read-only' if into.readonly else ''}"
        )
    return into


def check_limit(key: str, url: str, size_bytes: int, limit_bytes: int) -> None:
    """Raise FormatError for an object that is larger than the caller of `get` allows."""
    if size_bytes > limit_bytes:
        raise FormatError(
            f"{key} in {url}: expected at most {limit_bytes} bytes, got {size_bytes}; "
            "this is no object of that kind, run 'snapstore check'"
        )


def missing(key: str, url: str) -> NotFoundError:
    """The error of a key that has no object."""
    return NotFoundError(f"{key} in {url}: expected an object, found none; run 'snapstore check'")


def taken(key: str, url: str) -> AlreadyExistsError:
    """The error of a put whose key has one."""
    return AlreadyExistsError(f"{key} in {url}: expected a free name, found an object; read it to see whose it is")


def short(key: str, url: str, offset: int, length: int, size_bytes: int) -> IntegrityError:
    """The error of an object that ends before a range of it does."""
    return IntegrityError(
        f"{key} in {url} at {offset}+{length}: expected all {length} bytes, "
        f"got an object of {size_bytes} bytes; run 'snapstore check'"
    )


def sizes_one_by_one(store: ObjectStore, keys: Iterable[str]) -> dict[str, int]:
    """`ObjectStore.sizes` where a `stat` costs next to nothing."""
    found: dict[str, int] = {}
    for key in keys:
        with suppress(NotFoundError):
            found[key] = store.stat(key).size_bytes
    return found


def byte_view(data: Buffer) -> memoryview:
    """`data` as flat bytes; InvalidInputError when it is not contiguous."""
    view = memoryview(data)
    if not view.contiguous:
        raise InvalidInputError(f"buffer of shape {view.shape}: expected contiguous bytes; copy it first")
    return view.cast("B") if view.nbytes else memoryview(b"")
