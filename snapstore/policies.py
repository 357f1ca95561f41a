"""Policies: the retention policies of a run as objects of the repository; the newest revision rules.

In: policies. Out: `policies/<run>.<rev>`, create-only, and back. What policies mean is retention.py's business.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from . import records, retention
from .errors import AlreadyExistsError, ConflictError, FormatError, IntegrityError
from .records import Policy
from .storage import ObjectStore

log = logging.getLogger("snapstore")
ATTEMPTS = 20


def read(objects: ObjectStore, run: str) -> list[retention.Policy]:
    """The policies of a run; none stored: none.

    Raises:
        IntegrityError, FormatError: they are damaged, or of a kind that this release does not know.
    """
    newest = _newest(objects, run)
    return [retention.from_dict(policy) for policy in _decode(objects, newest[1]).policies] if newest else []


def store(objects: ObjectStore, run: str, keep: Sequence[retention.Policy]) -> None:
    """Make these the policies of a run, if they are not."""
    stored = [retention.to_dict(policy) for policy in keep]
    for _ in range(ATTEMPTS):
        newest = _newest(objects, run)
        try:
            if newest is not None and _decode(objects, newest[1]).policies == stored:
                return
        except (IntegrityError, FormatError) as error:
            log.warning("run=%s stored policies cannot be read and are replaced: %s", run, error)
        revision = newest[0] + 1 if newest else 0
        try:
            objects.put(f"policies/{run}.{revision}", records.encode(Policy(run=run, policies=stored)))
        except AlreadyExistsError:
            continue  # another process was first: read again
        return
    raise ConflictError(f"policies of run {run!r}: other processes keep storing some; try again")


def _decode(objects: ObjectStore, key: str) -> Policy:
    return records.decode(objects.get(key, limit_bytes=records.MAX_OBJECT_BYTES), Policy, key)


def _newest(objects: ObjectStore, run: str) -> tuple[int, str] | None:
    """(revision, key) of the policies that rule."""
    revisions = [
        (int(rev), info.key)
        for info in objects.list("policies/")
        if (name := info.key.removeprefix("policies/").rpartition("."))[0] == run and (rev := name[2]).isdecimal()
    ]
    return max(revisions, default=None)
