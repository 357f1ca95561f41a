"""Same repository: keep a verb that writes or deletes to the repository that was opened.

A volume that is unmounted beneath an open repository leaves an empty folder of the same name. A save into that folder
is lost when the volume comes back. So each such verb pins the place (`ObjectStore.pinned`), reads the config there
again and compares its uuid. While the pin stands, the store refuses any other place under that name.

A config that was damaged, lost or repaired since must not stop a training run. Two more things prove the place: the
digest seed, 64 random bits that a repair takes from the manifests; and a record that this process knows, since its name
is random and no record is ever deleted.
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


class _Opened(Protocol):
    """An open repository."""

    context: Context


R = TypeVar("R", bound=_Opened)
P = ParamSpec("P")
T = TypeVar("T")


def pinned(verb: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """Run a verb that writes or deletes only while the store is still the repository that was opened."""

    @functools.wraps(verb)
    def call(self: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
        context = self.context
        with context.store.pinned() if context.config_problem else confirmed(context):
            return verb(self, *args, **kwargs)

    return call


@contextmanager
def confirmed(context: Context) -> Iterator[Config | None]:
    """Pin the place of an open repository. Give its config as it is now; None if that cannot be read.

    Raises:
        StorageError: the store holds no repository, or another one, or it cannot be read.
    """
    with context.store.pinned():
        config, problem = _compare(context.store, context.index.uuid)
        if problem:
            same_seed = config is not None and config.digest_seed == context.config.digest_seed
            if not same_seed and not any(exists(context.store, key) for key in context.index.some_keys()):
                raise StorageError(
                    f"{context.store.url}: this is not the repository that was opened: {problem}; its volume was "
                    "unmounted or replaced; nothing was written; mount it again, then try again"
                )
            log.warning("%s: %s, since it was opened; open it again", context.store.url, problem)
        yield config


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
