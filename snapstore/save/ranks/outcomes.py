"""Outcomes: how a rank learns whether a save was committed if rank 0 does not tell it, and the errors that say so.

In: the id of a save that rank 0 has begun. Out: its record, or an error that says whether anything was committed.

Invariant: an error says "nothing was committed" only if that stays true: the record of each attempt is there as
aborted, or this rank has not reported, so that rank 0 cannot commit.
"""

from __future__ import annotations

import time
from copy import copy

from ...context import Context
from ...distributed import messages
from ...distributed.base import RESTART, ChannelError
from ...distributed.messages import REPLACED, Outcome
from ...errors import DAMAGE, RanksError, SnapstoreError, StorageError
from ...format import records
from ...format.keys import record_key
from ...format.records import ABORTED, Snapshot
from ...protocol.liveness import aborted
from ...protocol.revisions import create
from ..inputs import SaveRequest
from ..retrying import ReplacedError

#: How often the record of a committed save is read, before it counts as unreadable.
READ_ATTEMPTS = 3
NO_OUTCOME = "heard no outcome"
UNKNOWN = "whether it was committed is unknown"


def in_save(ref: str, error: RanksError, outcome: str) -> RanksError:
    """Return an error that also names the save, as run@step, and has its outcome and the advice; each of them once."""
    why, advice = (error.why, f"; {RESTART}") if isinstance(error, ChannelError) else (str(error), "")
    named = why if f"save {ref}: " in why else f"save {ref}: {why}"
    ended = "" if outcome in why else f"; {outcome}"
    told = RanksError(f"{named}{ended}{advice}", ranks=error.ranks)
    told.not_begun = error.not_begun
    return told


def unknown(ref: str, error: Exception) -> Exception:
    """Return the error of a save that ends while nobody knows whether an earlier attempt has committed it."""
    if UNKNOWN in (text := str(error)):
        return error
    text = text.replace("; nothing was committed", "")
    told = f"{text if ref in text else f'save {ref}: {text}'}; {UNKNOWN}: run 'snapstore log' once the store answers"
    found: SnapstoreError = StorageError(told)
    if isinstance(error, RanksError):
        found = RanksError(told, ranks=error.ranks)
    elif isinstance(error, StorageError):
        found = copy(error)
        found.args = (told,)
    found.not_begun = getattr(error, "not_begun", False)
    return found


def ended(outcome: Outcome, rank: int) -> Exception:
    """Return the error to raise on a rank for rank 0's outcome, of an attempt that has committed nothing."""
    if outcome.failed is None:
        return RanksError("rank 0 has ended this save")
    if outcome.state == REPLACED:
        return ReplacedError(outcome.failed.text)
    return messages.raised(outcome.failed, rank)


def read_or_abort(context: Context, request: SaveRequest, save_id: str, rank: int, lost: RanksError) -> Snapshot:
    """Return the snapshot if its record is there; create the record as aborted if there is none.

    Args:
        rank: this rank, which has reported and heard no outcome.
        lost: why it heard none.

    Raises:
        RanksError: the record is aborted, so nothing was or will be committed; or the store does not answer, so it is
            not known.
    """
    why = lost.why if isinstance(lost, ChannelError) else str(lost)
    reason = f"rank {rank} {NO_OUTCOME}: {why}"[:500]
    key = record_key(request.run, request.step, save_id, 0)
    try:
        record = create(context, aborted(request.run, request.step, save_id, reason))
        context.store.sync(f"snapshots/{request.run}/")  # a record that is there but not durable must not count
        joined = context.index.pages.look(request.run)
        if joined is not None and joined.makes_void(record):
            record = joined.record_of(save_id) or record
    except (*DAMAGE, StorageError) as error:
        raise in_save(
            request.ref,
            lost,
            f"and {key} cannot be read or created ({error}): whether it was committed shows when the store answers "
            "again ('snapstore log')",
        ) from error
    if record.state == ABORTED:
        said = "" if NO_OUTCOME in record.reason else f": its record says {record.reason!r}"
        raise in_save(request.ref, lost, f"nothing was committed{said}")
    return record


def read_committed(context: Context, request: SaveRequest, save_id: str, data: bytes) -> Snapshot:
    """Return the committed record: from rank 0's message, or from the store.

    Args:
        data: the record, if rank 0's message has it; else b"".

    Raises:
        StorageError: this rank cannot read it, though it is committed.
    """
    key = record_key(request.run, request.step, save_id, 0)
    for attempt in range(READ_ATTEMPTS):
        try:
            return records.decode(data, Snapshot, key) if data else read_record(context, key)
        except (*DAMAGE, StorageError) as caught:
            error: SnapstoreError = caught
            time.sleep(0.05 * attempt)
    raise StorageError(f"{request.ref} is committed as {key}, which this rank cannot read: {error}") from error


def read_record(context: Context, key: str) -> Snapshot:
    """Return a record, loose or of a page; raise an error of DAMAGE or StorageError if it cannot be read."""
    return context.index.pages.record(key)
