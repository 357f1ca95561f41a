"""Policy store: keep the retention policies of a run as objects of the repository; the highest revision counts.

In: policies. Out: `policies/<run>.<rev>`, create-only, and back. retention.py says what policies mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .. import retention
from ..errors import (
    AlreadyExistsError,
    ConflictError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    SnapstoreError,
    StorageError,
)
from ..format import records
from ..format.keys import parse_policy_key
from ..format.records import RunPolicies
from ..storage.base import ObjectStore
from ..text import log
from .read_twice import listed, read_small, read_twice

#: Bounds the retries: a revision that no listing shows would cause an endless loop.
STORE_ATTEMPTS = 20
MAX_BYTES = 1024 * 1024


def read(objects: ObjectStore, run: str) -> list[retention.Policy]:
    """Return the policies of a run; an empty list if none are stored.

    Raises:
        IntegrityError, FormatError: they are damaged, or of a kind that this release does not know.
    """
    newest = _newest(objects, run)
    stored = read_small(objects, RunPolicies, newest[1]).policies if newest else []
    return [retention.from_dict(policy) for policy in stored]


def store(objects: ObjectStore, run: str, keep: Sequence[retention.Policy]) -> None:
    """Make these the policies of a run, unless they are already.

    Raises:
        ConflictError: other processes keep storing policies of the run.
        InvalidInputError: they take more than MAX_BYTES; or a (forged) object has the highest possible revision, so
            none can follow.
        StorageError: the store failed.
    """
    stored, own = [retention.to_dict(policy) for policy in keep], ""
    for _ in range(STORE_ATTEMPTS):
        newest = _newest(objects, run)
        if newest is not None and newest[1] == own:  # maybe no policies can be read here: the next ones neither
            return
        try:
            if newest is not None and read_small(objects, RunPolicies, newest[1]).policies == stored:
                return
        except (IntegrityError, FormatError, StorageError, NotFoundError) as error:
            log.warning("run=%s stored policies cannot be read and are replaced: %s", run, error)
        if newest is not None and newest[0] >= records.MAX_REVISION:
            raise InvalidInputError(f"{newest[1]}: is the last possible revision; remove this object, then try again")
        policy = RunPolicies(run=run, revision=newest[0] + 1 if newest else 0, policies=stored)
        if len(data := records.encode(policy)) > MAX_BYTES:
            raise InvalidInputError(
                f"policies of run {run!r}: take {len(data)} bytes, at most {MAX_BYTES} can be stored: give fewer steps"
            )
        with suppress(AlreadyExistsError):  # another process may have been first: read again
            objects.put(key := records.key_of(policy), data)
            own = key
    raise ConflictError(f"policies of run {run!r}: other processes keep storing policies; try again")


def warning_if_stored(objects: ObjectStore, run: str) -> str:
    """Return a warning if policies are stored for a run whose manager has none, else "": `forget` applies them."""
    with suppress(SnapstoreError):
        if stored := read(objects, run):
            return (
                f"run={run} this manager keeps all snapshots, but 'snapstore forget --run' applies the policies of an "
                f"earlier one: {', '.join(map(str, stored))}, stored in {objects.url}; give the manager policies, or "
                "remove those: set_policies(run, [])"
            )
    return ""


def are_damaged(objects: ObjectStore, run: str) -> bool:
    """Return whether the ruling policies of a run are damaged; those of a later release are not, and stay."""
    newest = _newest(objects, run)
    if newest is None:
        return False
    try:
        data = read_twice(objects, lambda: objects.get(newest[1], limit_bytes=records.MAX_OBJECT_BYTES))
    except IntegrityError:
        return True
    try:
        decode(data, newest[1])
    except IntegrityError:
        return True
    except FormatError:
        return records.is_damaged(data) or data[5] == records.FORMAT_VERSION
    return False


def decode(data: bytes, key: str) -> list[dict[str, Any]]:
    """Return the policies, as plain dicts, that an object holds.

    Raises:
        IntegrityError, FormatError: it is damaged, or another key's.
    """
    return records.decode(data, RunPolicies, key).policies


def _newest(objects: ObjectStore, run: str) -> tuple[int, str] | None:
    """Return (revision, key) of the policies that rule."""
    parsed = ((key, parse_policy_key(key)) for key in listed(objects, "policies/"))
    return max(((found[1], key) for key, found in parsed if found and found[0] == run), default=None)
