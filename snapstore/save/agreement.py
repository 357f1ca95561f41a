"""Agreement: compare what the ranks of a job must have alike, by the digests in their reports.

In: the reports of all ranks. Out: nothing, or what differs on which ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..distributed.base import named
from ..distributed.messages import DIGEST_BYTES, REQUEST_FIELDS, Report
from ..errors import InvalidInputError
from ..text import some
from .inputs import SaveRequest


def compare(reports: Mapping[int, Report], request: SaveRequest) -> None:
    """Compare the requests of all ranks.

    Raises:
        InvalidInputError: a rank saves another step or has other metrics, metadata or tags.
    """
    for number, name in enumerate(REQUEST_FIELDS):
        span = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
        unlike = [rank for rank, report in reports.items() if report.request[span] != reports[0].request[span]]
        if unlike:
            raise InvalidInputError(
                f"save {request.run}@{request.step}: {named(unlike)}: {name} differ from rank 0's; pass the same on "
                "all ranks (for a metric: reduce it first); nothing was committed"
            )


def unlike_replicas(reports: Mapping[int, Report]) -> tuple[str, list[int], list[int]] | None:
    """Return a group of ranks whose replicas differ, the fewest ranks that have the same ones, and some others."""
    groups: dict[str, dict[bytes, list[int]]] = {}
    for rank, report in reports.items():
        for group, digest in report.replicas.items():
            groups.setdefault(group, {}).setdefault(digest, []).append(rank)
    for group, found in groups.items():
        if len(found) > 1:
            few = min(found.values(), key=lambda ranks: (len(ranks), 0 in ranks))
            return group, few, next(ranks for ranks in found.values() if ranks is not few)
    return None


def replicas_error(
    request: SaveRequest, few: Sequence[int], other: Sequence[int], names: Sequence[str]
) -> InvalidInputError:
    """Return the error of tensors that differ between ranks that should hold the same."""
    return InvalidInputError(
        f"save {request.run}@{request.step}: {named(few)}: {some(names, 5)}: differ from the replicas on {named(other)}"
        "; they must be equal on all ranks: broadcast them, or put what is each rank's own into snapstore.PerRank; "
        "nothing was committed"
    )
