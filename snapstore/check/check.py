"""Check a repository, from the records down to the last bit, and say which snapshots can be restored.

Three levels; each includes the one before:

    metadata   every small object and every manifest can be read and matches its name; every pack that is needed is
               there and has its size; the index agrees
    data       the bytes of every pack match its SHA-256: as they were written, whatever content that is; in a damaged
               pack every blob is checked
    restore    every chunk of every snapshot is rebuilt; its digest, and the digests and lengths of its references, are
               compared. Only this level proves that content is right

In: an open repository. Out: a CheckResult with every problem; each problem names the snapshots that it damages and the
command to run. Nothing is written. scan_records.py and scan_objects.py read the repository; recoverable.py says which
records a repair can write again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..context import Context
from ..errors import InvalidInputError, StorageError
from ..protocol.liveness import listed_sessions
from ..protocol.unexplained_objects import DELETE_UNEXPLAINED, find_damaged, find_unexplained
from ..text import counted, human_bytes, quoted, some
from .recoverable import recover_record
from .report import COPY, DROP, CheckResult, Problem, require_level
from .scan_objects import ScanResult, scan_objects
from .scan_records import scan_records


def check(
    context: Context,
    *,
    level: str = "metadata",
    share: float = 1.0,
    subset: tuple[int, int] = (1, 1),
    max_decoded_bytes: int | None = None,
) -> CheckResult:
    """Check everything up to a level.

    Args:
        level: "metadata", "data" or "restore".
        share: the share of the packs that level "data" reads, chosen at random, above 0 and at most 1.
        subset: (n, t): level "data" reads the n-th of t fixed parts of the packs; t checks read all packs.
        max_decoded_bytes: the most bytes that level "restore" decodes; snapshots beyond it are unknown. None: the
            default of chunks/limits.py, which no repository that snapstore has written exceeds.

    Raises:
        InvalidInputError: an argument is out of range.
        StorageError: the store cannot be listed; a single object that cannot be read is a problem.
    """
    _require_portion(share, subset)
    if max_decoded_bytes is not None and (type(max_decoded_bytes) is not int or max_decoded_bytes < 0):
        raise InvalidInputError(f"max_decoded_bytes {quoted(max_decoded_bytes)}: expected an int of 0 or more, or None")
    require_level(level)
    records = scan_records(context)
    scan = scan_objects(context, records, level, share=share, subset=subset, max_decoded_bytes=max_decoded_bytes)
    if level == "restore":  # every other snapshot was rebuilt, to the last chunk
        context.index.marks.keep_only((*scan.report.damaged, *scan.report.unknown))
    lost = {key for key in scan.records.unreadable if recover_record(context, scan.records, key) is None}
    instead = f"abandons the snapshot; to keep it, {COPY}"
    problems = [
        replace(problem, command=DROP, help=instead) if problem.key in lost else problem
        for problem in scan.report.problems
    ]
    return _with_unexplained(context, scan, replace(scan.report, problems=problems))


def _require_portion(share: object, subset: Any) -> None:
    """Raise InvalidInputError if either argument of `check` is out of range, or of another type."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InvalidInputError(f"share {quoted(share)}: expected a number of more than 0 and at most 1")
    of_ints = isinstance(subset, Sequence) and len(subset) == 2 and all(type(number) is int for number in subset)
    if not of_ints or not 1 <= subset[0] <= subset[1]:
        raise InvalidInputError(f"subset {quoted(subset)}: expected two ints (n, t) with n from 1 to t")


def _with_unexplained(context: Context, scan: ScanResult, report: CheckResult) -> CheckResult:
    """Return the report with a problem for the objects at which gc stops: their record may be lost."""
    sizes = {key: scan.records.sizes[key] for key in scan.unneeded}
    try:
        sessions = listed_sessions(context.store)  # after the objects, and before the records
        left = find_unexplained(context, context.index.refresh(list_twice=True), sizes, sessions)
        left -= find_damaged(context.store, {key: sizes[key] for key in left})
    except StorageError as error:  # hours of reading are not lost by it
        text = f"whether records explain the objects that no snapshot needs is not known: {error}"
        note = Problem("unexplained", "packs/", text)
        return replace(report, notes=[*report.notes, note], unneeded_bytes=0)
    if not left:
        return report
    nbytes, first = sum(sizes[key] for key in left), min(left)
    text = (
        f"{counted(len(left), 'object')} ({human_bytes(nbytes)}) that no record explains: {some(sorted(left), 1)}; a "
        "record may be lost: run 'snapstore repair' on a machine that has used this repository, since its index may "
        f"know the record; if the snapshot is gone for good, '{DELETE_UNEXPLAINED}' deletes them"
    )
    lost = Problem("unexplained", first, text, (), "", "")
    return replace(report, problems=[*report.problems, lost], unneeded_bytes=0)  # gc refuses
