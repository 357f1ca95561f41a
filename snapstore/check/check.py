"""check: verify a repository, from the records down to the last bit, and say which snapshots stay restorable.

Three levels, each with all of the one before:

    metadata   every small object and every manifest reads and is what its name says; every pack needed is there, of its
               size; the index agrees
    data       every byte of the packs is what their SHA-256 says; else, blob by blob, what is lost
    restore    every chunk of every snapshot is rebuilt and its digest compared

Reads only. Reports everything it finds; a problem names the snapshots that suffer from it and the command that helps.
survey.py looks, findings.py has the words, salvage.py tells which records a repair can write again.
"""

from __future__ import annotations

from dataclasses import replace

from ..context import Context
from ..errors import InvalidInputError
from .recoverable import Salvage
from .report import COPY, DROP, CheckResult
from .scan import Survey


def check(
    context: Context, *, level: str = "metadata", share: float = 1.0,
    subset: tuple[int, int] = (1, 1), max_decoded_bytes: int | None = None,
) -> CheckResult:  # fmt: skip
    """Verify everything up to a level.

    Args:
        share: the part of the packs that level "data" reads, chosen at random, 0 to 1.
        subset: (n, t): level "data" reads the n-th of t fixed shares of the packs, so that t checks read them all.
        max_decoded_bytes: how much level "restore" decodes; what lies beyond cannot be told. None: much more than any
            repository of this size takes that snapstore has made (limits.py).

    Raises:
        StorageError: the store cannot be listed; a single object that cannot be read is a finding.
    """
    if not 0 < share <= 1:
        raise InvalidInputError(f"share {share!r}: expected more than 0 and at most 1")
    if not 1 <= subset[0] <= subset[1]:
        raise InvalidInputError(f"subset {subset[0]}/{subset[1]}: expected n/t with n from 1 to t")
    survey = Survey(context, level, share, subset, max_decoded_bytes)
    survey.read_records()
    result = survey.read_rest()
    if survey.unreadable:
        lost = Salvage(context, survey).unmendable()
        result.problems = [
            replace(p, command=DROP, help=f"gives it up; {COPY} keeps it") if p.key in lost else p
            for p in result.problems
        ]
    return result
