"""Read twice: distinguish a bad sector from an outage, and do not rely on a single answer.

In: a store and a read. Out: its result, or IntegrityError if the store answers but does not return this object. One
answer that an object is missing proves nothing, so listings are made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from ..errors import DAMAGE, IntegrityError, NotFoundError, SnapstoreError, StorageError, UnreadObjectError
from ..format.records import MAX_OBJECT_BYTES, Small, decode
from ..storage.base import ObjectInfo, ObjectStore
from ..storage.os_errors import is_withheld

T = TypeVar("T")


def listed(store: ObjectStore, prefix: str) -> dict[str, ObjectInfo]:
    """Return every object that either of two listings shows, by key: one listing may lack some."""
    found = {info.key: info for info in store.list(prefix)}
    return found | {info.key: info for info in store.list(prefix)}


def exists(store: ObjectStore, key: str) -> bool:
    """Return whether a key has an object, by one request."""
    try:
        store.stat(key)
    except NotFoundError:
        return False
    return True


def read_small(store: ObjectStore, kind: type[Small], key: str) -> Small:
    """Return the small object under a key, such as a record; raises as `records.decode` and `ObjectStore.get` do."""
    return decode(store.get(key, limit_bytes=MAX_OBJECT_BYTES), kind, key)


def answers(store: ObjectStore) -> None:
    """Raise StorageError unless a store answers: a store that cannot be reached is not damaged."""
    for _ in store.list("gc/"):
        break


def read_twice(store: ObjectStore, read: Callable[[], T]) -> T:
    """Return the result of a read; if the store fails, try it a second time.

    Raises:
        IntegrityError: both attempts failed, although the store answers: the object counts as damaged.
        StorageError: the store does not answer at all.
    """
    try:
        return read()
    except StorageError:
        answers(store)
    try:
        return read()
    except StorageError as error:
        answers(store)
        raise IntegrityError(f"{error}; run 'snapstore check --read-data'") from error


def read_object_twice(store: ObjectStore, read: Callable[[], T]) -> T:
    """Return the result of reading one object of a snapshot. After any failure, try it a second time.

    Raises:
        IntegrityError, FormatError, NotFoundError: two reads found it damaged or missing, or the disk will not read it.
        UnreadObjectError: the store withholds it (`is_withheld`), though it answers: it may be whole.
        StorageError: the store does not answer, or can read nothing.
    """
    try:
        return read()
    except DAMAGE:  # one such answer proves nothing
        pass
    except StorageError:
        _reads(store)
    try:
        return read()
    except StorageError as error:
        _reads(store)
        if is_withheld(error):
            raise UnreadObjectError(str(error)) from error
        raise IntegrityError(f"{error}; run 'snapstore check --read-data'") from error


def require_damage(store: ObjectStore, error: SnapstoreError) -> None:
    """Return if the error of reading an object of a snapshot may be damage: one answer proves nothing.

    Raises:
        UnreadObjectError: the store withholds the object (`is_withheld`), though it answers: it may be whole.
        StorageError: the store does not answer, or can read nothing.
    """
    if isinstance(error, StorageError):
        _reads(store)
    else:
        answers(store)
    if is_withheld(error):
        raise UnreadObjectError(str(error)) from error


def _reads(store: ObjectStore) -> None:
    """Raise StorageError unless a store answers, and can read: listings may succeed although all reads fail."""
    answers(store)
    with suppress(*DAMAGE):
        store.get("config", limit_bytes=MAX_OBJECT_BYTES)


def tried(store: ObjectStore, read: Callable[[], T]) -> T | None:
    """Return the result of reading one object; None if two reads find it damaged or missing, or fail.

    Raises:
        StorageError: the store does not answer at all, or withholds the object (`is_withheld`): it may be whole.
    """
    failure: SnapstoreError | None = None
    for _ in range(2):  # one answer that it is damaged or missing proves nothing
        try:
            return read_twice(store, read)
        except DAMAGE as error:
            failure = error
    if is_withheld(failure):
        raise StorageError(str(failure)) from failure
    return None


@contextmanager
def expecting_damage() -> Iterator[None]:
    """Suppress the error of an object that is damaged or missing, or that the disk will not read.

    Raises:
        StorageError: the store withholds the object (`is_withheld`): it may be whole.
    """
    try:
        yield
    except DAMAGE:
        pass
    except StorageError as error:
        if is_withheld(error):
            raise
