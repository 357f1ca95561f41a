"""Policies: the retention policies of a run as objects of the repository; the newest revision rules.

In: policies. Out: `policies/<run>.<rev>`, create-only, and back. What policies mean is retention.py's business.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .. import retention
from ..errors import AlreadyExistsError, ConflictError, FormatError, IntegrityError, NotFoundError, StorageError
from ..format import records
from ..format.records import Policy
from ..storage.base import ObjectStore
from .read_twice import listed

log = logging.getLogger("snapstore")
#: A revision that no listing shows must not keep a process in the loop for ever.
STORE_ATTEMPTS = 20


def read(objects: ObjectStore, run: str) -> list[retention.Policy]:
    """The policies of a run; none stored: none.

    Raises:
        IntegrityError, FormatError: they are damaged, or of a kind that this release does not know.
    """
    newest = _newest(objects, run)
    return [retention.from_dict(policy) for policy in _read(objects, newest[1])] if newest else []


def store(objects: ObjectStore, run: str, keep: Sequence[retention.Policy]) -> None:
    """Make these the policies of a run, if they are not."""
    stored = [retention.to_dict(policy) for policy in keep]
    for _ in range(STORE_ATTEMPTS):
        newest = _newest(objects, run)
        try:
            if newest is not None and _read(objects, newest[1]) == stored:
                return
        except (IntegrityError, FormatError, StorageError, NotFoundError) as error:
            log.warning("run=%s stored policies cannot be read and are replaced: %s", run, error)
        policy = Policy(run=run, revision=newest[0] + 1 if newest else 0, policies=stored)
        with suppress(AlreadyExistsError):  # another process was first, maybe: read again
            objects.put(records.key_of(policy), records.encode(policy))
    raise ConflictError(f"policies of run {run!r}: other processes keep storing some; try again")


def are_damaged(objects: ObjectStore, run: str) -> bool:
    """Whether those that rule cannot be read, though they are not of a later release, which are nobody's to replace."""
    newest = _newest(objects, run)
    if newest is None:
        return False
    for again in (True, False):
        try:
            data = objects.get(newest[1], limit_bytes=records.MAX_OBJECT_BYTES)
            break
        except StorageError:  # of one object, twice, in a store that has just been listed
            if not again:
                return True
    try:
        decode(data, newest[1])
    except IntegrityError:
        return True
    except FormatError:
        return records.is_damaged(data) or data[5] == records.FORMAT_VERSION
    return False


def decode(data: bytes, key: str) -> list[dict[str, Any]]:
    """The policies of a run, of which this is a revision.

    Raises:
        IntegrityError, FormatError: they are damaged, or those of another key.
    """
    return records.decode(data, Policy, key).policies


def _read(objects: ObjectStore, key: str) -> list[dict[str, Any]]:
    return decode(objects.get(key, limit_bytes=records.MAX_OBJECT_BYTES), key)


def _newest(objects: ObjectStore, run: str) -> tuple[int, str] | None:
    """(revision, key) of the policies that rule."""
    revisions = [
        (int(rev), key)
        for key in listed(objects, "policies/")
        if (name := key.removeprefix("policies/").rpartition("."))[0] == run and (rev := name[2]).isdecimal()
    ]
    return max(revisions, default=None)
