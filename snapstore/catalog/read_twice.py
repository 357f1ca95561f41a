"""Reads of what a store may not give, though it answers: a bad sector is no outage, no outage is damage, and one answer
that something is not there is no proof.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ..errors import DAMAGE, IntegrityError, StorageError
from ..storage.base import ObjectInfo, ObjectStore

T = TypeVar("T")


def listed(store: ObjectStore, prefix: str) -> dict[str, ObjectInfo]:
    """Everything that either of two listings shows, by key: one of them may lack what is there."""
    found = {info.key: info for info in store.list(prefix)}
    return found | {info.key: info for info in store.list(prefix)}


def answers(store: ObjectStore) -> None:
    """Raise StorageError unless a store answers: one that cannot be reached is no damage."""
    for _ in store.list("gc/"):
        break


def read_twice(store: ObjectStore, read: Callable[[], T]) -> T:
    """What a read gives: an object that a store will not give, though it answers, is of no more use than a damaged one.

    Raises:
        IntegrityError: it could not be read twice.
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


def tried(store: ObjectStore, read: Callable[[], T]) -> T | None:
    """What a read of one object gives; None: it is damaged or missing, or it could not be read twice.

    Raises:
        StorageError: the store does not answer at all.
    """
    with suppress(*DAMAGE):
        return read_twice(store, read)
    return None
