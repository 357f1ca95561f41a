"""The ObjectStore protocol: key -> bytes, and nothing about snapshots.

A store holds immutable objects. A key is up to 16 components joined by `/`, such as `packs/7f/7f3a...`. A component
matches `[A-Za-z0-9][A-Za-z0-9._-]*` and has at most 255 bytes, so no key leaves the repository's folder. `tmp/` and
`index/` are reserved: a local store writes its temporary files to the first and ignores the second.

Every backend must guarantee (docs/format.md, "Backends"):

- `put` is create-only and atomic. An object appears whole or not at all, and never replaces another. Once `put` has
  returned, the object survives a crash of the machine. If two puts of one key race, exactly one returns.
- Once `put` has returned, `get`, `stat` and `list` of every process see the object.
- `delete` of a missing key is not an error.
- A `list` that fails raises. It never returns fewer objects than there are.

Several threads may use one store. Every failure is an error of `errors.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from ..errors import AlreadyExistsError, FormatError, IntegrityError, InvalidInputError, NotFoundError

Buffer = bytes | bytearray | memoryview

#: `get` refuses larger objects unless the caller allows more [bytes].
GET_LIMIT_BYTES = 1024 * 1024 * 1024

#: The most components of a key. A file that lies deeper in the folder is not an object.
MAX_LEVELS = 16
#: First components that are not allowed in keys.
RESERVED = frozenset({"tmp", "index"})

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class ObjectInfo(msgspec.Struct, frozen=True, gc=False):
    """One object, as `list` and `stat` describe it.

    Attributes:
        modified_s: The time of the last write or touch, by the store's clock [s since the epoch].
        tag: Changes whenever the bytes under the key change (S3: the ETag). Empty if the store cannot tell.
    """

    key: str
    size_bytes: int
    modified_s: float
    tag: str = ""

    @property
    def is_key_only(self) -> bool:
        """Return whether a listing gave the key alone, as it was asked to."""
        return math.isnan(self.modified_s)


#: Given keys of one folder, returns those of which a listing may give the key alone.
KeyOnly = Callable[[Sequence[str]], Container[str]]


@dataclass(frozen=True, slots=True)
class Skipping:
    """A `KeyOnly` that also says which objects the caller does not need at all; a store may list them all the same.

    Attributes:
        skips: given a key, returns the last key of those from this one on that are not needed; else the key itself.
    """

    chooses: KeyOnly
    skips: Callable[[str], str]

    def __call__(self, keys: Sequence[str]) -> Container[str]:
        """Return of which of these keys the caller needs no more than the key."""
        return self.chooses(keys)


GetRanges = Callable[[str, Sequence[int], Sequence[memoryview]], None]


def key_alone(key: str) -> ObjectInfo:
    """Return the info of an object of which a listing gives the key alone."""
    return ObjectInfo(key, 0, math.nan)


class ObjectStore(Protocol):
    """A flat name space of immutable objects.

    Call sequence: any method, from any thread, at any time. After an unclear failure, `put`, `delete`, `touch` and
    `release` may be repeated; the caller then reads the key to learn what happened. If a `put` raises an error other
    than AlreadyExistsError, the object may exist and not be durable: `sync` its prefix before relying on it.

    Every method raises InvalidInputError for an invalid key, and StorageError when the store fails.

    Attributes:
        url: The name of the store in messages.
        place: Identifies these objects. A store and its mirror may have the same url, never the same place.
        puts_at_once, gets_at_once: The number of concurrent puts, and gets of short ranges, above which throughput no
            longer grows.
    """

    url: str
    place: str
    puts_at_once: int
    gets_at_once: int = 1

    def put(self, key: str, data: Buffer) -> None:
        """Create `key` with `data`, durable on return.

        Raises:
            AlreadyExistsError: The key has an object.
        """

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        """Return all bytes of `key`.

        Raises:
            NotFoundError: The object is missing.
            FormatError: The object is larger than `limit_bytes`.
        """

    def get_range(self, key: str, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        """Return `length` bytes of `key` from `offset` on: in `into` if it is given, else in new writable memory.

        Args:
            into: Writable, contiguous, (length,) bytes.

        Raises:
            NotFoundError: The object is missing.
            IntegrityError: The object ends before the range does.
            InvalidInputError: A number is negative, or `into` does not fit.
        """

    def kept_open(self) -> AbstractContextManager[GetRanges]:
        """Return a context that gives a function for reads of many ranges, from any thread.

        The function fills each memory with the bytes of a key from its offset on, and raises what `get_range` raises. A
        local store keeps the files open that were used last; there, a call without offsets opens the file of a key. In
        other stores such a call does nothing, and does not notice that the key is missing.
        """

        def get_ranges(key: str, offsets: Sequence[int], into: Sequence[memoryview]) -> None:
            for offset, memory in zip(offsets, into, strict=True):
                self.get_range(key, offset, len(memory), memory)

        return nullcontext(get_ranges)

    def stat(self, key: str) -> ObjectInfo:
        """Return size, time and tag of `key`.

        Raises:
            NotFoundError: The object is missing.
        """

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        """Return the size [bytes] of each key that has an object, in few requests; by default one `stat` for each."""
        found: dict[str, int] = {}
        for key in keys:
            with suppress(NotFoundError):
                found[key] = self.stat(key).size_bytes
        return found

    def list(self, prefix: str, key_only: KeyOnly | None = None) -> Iterator[ObjectInfo]:
        """Yield every object whose key starts with `prefix` (empty, or ending in `/`), in no particular order.

        An object that is put or deleted meanwhile may be missing. Every other object comes exactly once.

        Args:
            key_only: Says of which objects the caller needs no more than the key, which costs a local store less. A
                store for which it does not describes them all the same.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete every key; a missing one is not an error."""

    def now_s(self) -> float:
        """Return the time of the clock that sets `modified_s` [s since the epoch]."""

    def sync(self, prefix: str) -> None:
        """Make durable what `list(prefix)` shows, so that it is safe to act on it (local: fsync the directories).

        It fails if it is not known whether an object that this store has put is durable.
        """
        check_prefix(prefix)

    def lock(self, key: str, data: Buffer) -> None:
        """Create `key` as `put` does, and keep a lock on it until `release` or the death of this process.

        The lock is taken before the object can be seen. A forked child does not keep it.
        """

    def touch(self, key: str) -> None:
        """Set `modified_s` to now (a heartbeat).

        Raises:
            NotFoundError: The object is missing.
        """

    def release(self, key: str) -> None:
        """Delete an object and drop its lock; an object that this process has not locked is only deleted."""

    def is_locked(self, key: str) -> bool | None:
        """Return whether a live process of this machine has the lock of `key`; None if the store cannot know."""

    def clean(self) -> int:
        """Remove temporary files of dead writers, which are not objects; return the bytes freed."""
        return 0

    def prepare(self) -> None:
        """Check that a new repository can be created here: the cheap part of `snapstore doctor`.

        Raises:
            InvalidInputError: The place is not empty.
            CapabilityError: A few requests show that the store breaks a guarantee of this protocol.
        """

    def pinned(self) -> AbstractContextManager[None]:
        """Return a context in which every operation raises StorageError once the store's name leads to another place.

        The path of a local root leads to another place when its volume is unmounted, when another volume is mounted
        over it, or when the folder is renamed. A store whose name always leads to the same place does nothing.
        """
        return nullcontext()

    def sandbox(self) -> AbstractContextManager[ObjectStore]:
        """Return a context with an empty store inside this place, to try things out.

        No listing shows its objects, and they are removed at the end.
        """


def is_component(name: str) -> bool:
    """Return whether `name` is a valid component of a key."""
    return _COMPONENT.fullmatch(name) is not None


def is_key(key: str) -> bool:
    """Return whether `key` is valid."""
    components = key.split("/")
    return len(components) <= MAX_LEVELS and all(map(is_component, components)) and components[0] not in RESERVED


def check_key(key: str) -> None:
    """Raise InvalidInputError unless `key` is valid; every backend calls this first."""
    if not is_key(key):
        raise InvalidInputError(
            f"{key!r}: not a key, expected at most {MAX_LEVELS} names joined by '/', each of at most 255 letters, "
            "digits, '.', '_' and '-', with a letter or digit first; as the first name, 'index' and 'tmp' are reserved"
        )


def check_prefix(prefix: str) -> None:
    """Raise InvalidInputError unless `prefix` is empty, or a key followed by `/`."""
    if prefix and not prefix.endswith("/"):
        raise InvalidInputError(f"{prefix!r}: not a prefix, expected '' or a key followed by '/'")
    if prefix:
        check_key(prefix[:-1])


def range_memory(key: str, url: str, offset: int, length: int, size_bytes: int, into: memoryview | None) -> memoryview:
    """Return where a range of an object of `size_bytes` goes: `into`, or new memory.

    Raises:
        InvalidInputError: A number is negative, or `into` is not a writable, contiguous view of `length` bytes.
        IntegrityError: The object ends before the range does.
    """
    if offset < 0 or length < 0:
        raise InvalidInputError(f"{key} at {offset}+{length}: expected an offset and a length of 0 or more")
    if offset + length > size_bytes:
        raise too_short(key, url, offset, length, size_bytes)
    if into is None:
        return np.empty(length, np.uint8).data  # not a bytearray, which is zeroed first
    if into.readonly or not into.c_contiguous or into.format != "B" or into.shape != (length,):
        raise InvalidInputError(
            f"{key}: expected a writable, contiguous view of {length} bytes, got one of shape {into.shape} and "
            f"format {into.format!r}{', read-only' if into.readonly else ''}"
        )
    return into


def check_limit(key: str, url: str, size_bytes: int, limit_bytes: int) -> None:
    """Raise FormatError if an object is larger than the caller of `get` allows."""
    if size_bytes > limit_bytes:
        raise FormatError(
            f"{key} in {url}: expected at most {limit_bytes} bytes, got {size_bytes}; "
            "this is not an object of that kind; run 'snapstore check'"
        )


def not_found(key: str, url: str) -> NotFoundError:
    """Return the error for a key without an object."""
    return NotFoundError(f"{key} in {url}: expected an object, found none; run 'snapstore check'")


def already_exists(key: str, url: str) -> AlreadyExistsError:
    """Return the error for a put of a key that has an object."""
    return AlreadyExistsError(f"{key} in {url}: expected a free name, found an object; read it to see whose it is")


def not_empty(url: str, keys: Iterable[str], advice: str) -> InvalidInputError:
    """Return the error for a new repository in a place that has these keys."""
    was_one = any(key.partition("/")[0] in ("packs", "manifests", "snapshots") for key in keys)
    hint = "; if a repository was here, its config is lost: run 'snapstore repair'" if was_one else ""
    return InvalidInputError(f"{url}: is not empty and not a repository; {advice}{hint}")


def too_short(key: str, url: str, offset: int, length: int, size_bytes: int) -> IntegrityError:
    """Return the error for an object of `size_bytes` that ends before a range of it does."""
    return IntegrityError(
        f"{key} in {url} at {offset}+{length}: expected all {length} bytes, "
        f"got an object of {size_bytes} bytes; run 'snapstore check'"
    )


def byte_view(data: Buffer) -> memoryview:
    """Return `data` as flat bytes.

    Raises:
        InvalidInputError: Its bytes are not contiguous in C order.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidInputError(f"buffer of shape {view.shape}: expected contiguous bytes in C order; copy it first")
    return view.cast("B") if view.nbytes else memoryview(b"")
