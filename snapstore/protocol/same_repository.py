"""Same repository: keep a verb that writes or deletes to the repository that was opened.

A volume that is unmounted beneath an open repository leaves an empty folder of the same name. A save into that folder
is lost when the volume comes back. So each such verb pins the place (`ObjectStore.pinned`), reads the config there
again and compares its uuid. While the pin stands, the store refuses any other place under that name.

A config that was repaired, damaged or lost since must not stop a training run. A config of another uuid is proven by
its digest seed, 64 random bits that a repair takes from the manifests. If there is none, a record that this process
knows proves the place: its name is random, no record is ever deleted, and none is written in an unproven place.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..catalog.read_twice import exists
from ..context import Context
from ..errors import FormatError, IntegrityError, NotFoundError, StorageError
from ..format import records
from ..format.records import Config
from ..storage.base import ObjectStore

log = logging.getLogger("snapstore")


class Opened(Protocol):
    """An open repository."""

    context: Context


R = TypeVar("R", bound=Opened)
P = ParamSpec("P")
T = TypeVar("T")


def pinned(verb: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """Run a verb that writes or deletes only while the store is still the repository that was opened."""

    @functools.wraps(verb)
    def call(self: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
        context = self.context
        with _pinned_to_objects(context.store) if context.config_problem else confirmed(context):
            return verb(self, *args, **kwargs)

    return call


@contextmanager
def _pinned_to_objects(store: ObjectStore) -> Iterator[None]:
    """Pin the place of a repository whose config was reconstructed: a repair must not write it into an empty folder.

    Raises:
        StorageError: the store holds no record and no manifest, or it cannot be read.
    """
    with store.pinned():
        if not any(True for prefix in ("manifests/", "snapshots/") for _ in store.list(prefix)):
            raise _not_opened(store, "it holds no record and no manifest")
        yield


@contextmanager
def confirmed(context: Context) -> Iterator[Config | None]:
    """Pin the place of an open repository. Give its config as it is now; None if that cannot be read.

    Raises:
        StorageError: the store holds no repository, or another one, or it cannot be read.
    """
    with context.store.pinned():
        config, problem = _compare(context.store, context.index.uuid)
        if problem:
            if config is not None:  # no record proves it: a look at another repository has cached that one's
                same = config.digest_seed == context.config.digest_seed
            else:
                same = any(exists(context.store, key) for key in context.index.some_keys())
            if not same:
                raise _not_opened(context.store, problem)
            log.warning("%s: %s, since it was opened; open it again", context.store.url, problem)
        yield config


def _not_opened(store: ObjectStore, problem: str) -> StorageError:
    return StorageError(
        f"{store.url}: this is not the repository that was opened: {problem}; its volume was unmounted or replaced; "
        "nothing was written; mount it again, then try again"
    )


def _compare(store: ObjectStore, uuid: str) -> tuple[Config | None, str]:
    """Return (the config, how it differs from a repository's of this uuid); the text is empty if it does not."""
    try:
        found = records.decode(store.get("config", limit_bytes=records.MAX_OBJECT_BYTES), Config, "config")
    except NotFoundError:
        return None, "it has no config"
    except (IntegrityError, FormatError):
        return None, "its config is damaged"
    problem = f"its config has another uuid, expected {uuid}, got {found.uuid[:80]!r}"
    return found, "" if found.uuid == uuid else problem
