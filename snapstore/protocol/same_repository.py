"""Same repository: let a verb write or delete only in the repository that was opened.

If a volume is unmounted while a repository on it is open, an empty folder of the same name remains. A save into that
folder is lost when the volume comes back. So each verb that writes or deletes pins the place (`ObjectStore.pinned`),
reads the config there again and compares its uuid. While the pin stands, the store refuses any other place under that
name.

A config that was repaired, damaged or lost since must not stop a training run. A config with another uuid is proven by
its digest seed, 64 random bits that a repair takes from the manifests. If the config is missing or damaged, a record
that this process knows proves the place: its name is random, no record is ever deleted, and no record is written in a
place that is not proven.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..catalog.read_twice import exists, read_small
from ..context import Context
from ..errors import FormatError, IntegrityError, NotFoundError, StorageError, lasting
from ..format.records import Config
from ..storage.base import ObjectStore
from ..text import log

_NO_CONFIG = "it has no config"


class Opened(Protocol):
    """An open repository."""

    context: Context


R = TypeVar("R", bound=Opened)
P = ParamSpec("P")
T = TypeVar("T")


def pinned(verb: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """Return a verb that writes or deletes, changed to run only while the store is the repository that was opened.

    All that it caches goes into the index in one write.

    The returned verb also raises StorageError: the store holds another repository, or none, or cannot be read.
    """

    @functools.wraps(verb)
    def call(self: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
        context = self.context
        place = _pinned_to_objects(context.store) if context.config_problem else confirmed(context)
        with place, context.index.one_write():
            return verb(self, *args, **kwargs)

    return call


@contextmanager
def _pinned_to_objects(store: ObjectStore) -> Iterator[None]:
    """Pin the place of a repository whose config was reconstructed: a repair must not write that into an empty folder.

    Raises:
        StorageError: the store holds no record and no manifest, or it cannot be read.
    """
    with store.pinned():
        if not any(True for prefix in ("manifests/", "snapshots/") for _ in store.list(prefix)):
            raise _not_opened(store, "it holds no record and no manifest")
        yield


@contextmanager
def confirmed(context: Context) -> Iterator[Config | None]:
    """Pin the place of an open repository, and yield its config as it is now; None if that is missing or damaged.

    Raises:
        StorageError: the store holds no repository, or another one, or it cannot be read.
    """
    with context.store.pinned():
        config, problem = _compare(context.store, context.index.uuid)
        if problem:
            # Without a config there is no repository: an empty folder under an unmounted volume, which may come back.
            is_replaced = config is not None or problem != _NO_CONFIG
            if config is not None:  # records prove nothing: reading this one may have cached its records
                same = config.digest_seed == context.config.digest_seed
            else:
                same = any(exists(context.store, key) for key in context.index.some_keys())
            if not same:
                error = _not_opened(context.store, problem)
                raise lasting(error) if is_replaced else error
            log.warning("%s: %s, since it was opened; open it again", context.store.url, problem)
        yield config


def _not_opened(store: ObjectStore, problem: str) -> StorageError:
    return StorageError(
        f"{store.url}: this is not the repository that was opened: {problem}; its volume was unmounted or replaced; "
        "nothing was written; mount it again, then try again"
    )


def _compare(store: ObjectStore, uuid: str) -> tuple[Config | None, str]:
    """Return (the config or None, how it differs from the config of the repository with this uuid, or "")."""
    try:
        found = read_small(store, Config, "config")
    except NotFoundError:
        return None, _NO_CONFIG
    except (IntegrityError, FormatError):
        return None, "its config is damaged"
    problem = f"its config has another uuid, expected {uuid}, got {found.uuid[:80]!r}"
    return found, "" if found.uuid == uuid else problem
