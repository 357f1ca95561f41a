"""Agreement: compare the values that must be equal on all ranks of a job, by the digests in their reports.

In: the reports of all ranks. Out: nothing, or an error that says what differs on which ranks. Buffers may differ, with
a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...distributed.base import named
from ...distributed.messages import DIGEST_BYTES, REQUEST_FIELDS, Report
from ...errors import InvalidInputError
from ...text import log, some
from ..inputs import SaveRequest
from ..replicas import BUFFERS

#: The most buffers that a warning names.
MAX_NAMES = 20
_STAGES_ADVICE = (
    "If these are layers of pipeline stages, name that dimension of the mesh 'pp'. If they are experts that only some "
    "ranks have, put them on a DeviceMesh of the ranks that hold the same ones, not on one taken out of a larger mesh"
)
#: Returns the digests of a group's tensors by path, for each of some ranks.
AskDigests = Callable[[Sequence[int], str], Mapping[int, Mapping[str, bytes]]]


def compare(reports: Mapping[int, Report], request: SaveRequest) -> None:
    """Compare the requests of all ranks.

    Raises:
        InvalidInputError: a rank saves another run or step, or has other metrics, metadata or tags.
    """
    for number, name in enumerate(REQUEST_FIELDS):
        span = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
        unlike = [rank for rank, report in reports.items() if report.request[span] != reports[0].request[span]]
        if unlike:
            raise InvalidInputError(
                f"save {request.run}@{request.step}: {named(unlike)}: {name} differ from rank 0's; pass the same on "
                "all ranks (for a metric: reduce it first); nothing was committed"
            )


@dataclass(frozen=True, slots=True)
class Unlike:
    """Ranks of a group whose replicas differ.

    Attributes:
        group: its id; see `Replica.group_id`.
        few: the smallest set of ranks with equal replicas; of buffers, all ranks that differ from the first rank.
        other: another set of ranks with equal replicas; of buffers, the first rank and all ranks that equal it.
    """

    group: str
    few: Sequence[int]
    other: Sequence[int]

    @property
    def is_of_buffers(self) -> bool:
        """Return whether the tensors are buffers, which may differ."""
        return self.group.endswith(BUFFERS)


def unlike_replicas(reports: Mapping[int, Report]) -> list[Unlike]:
    """Return the groups of ranks whose replicas differ; those of buffers come last."""
    groups: dict[str, dict[bytes, list[int]]] = {}
    for rank, report in sorted(reports.items()):
        for group, digest in report.replicas.items():
            groups.setdefault(group, {}).setdefault(digest, []).append(rank)
    unlike = []
    for group, found in groups.items():
        if len(found) > 1 and group.endswith(BUFFERS):
            first, *others = found.values()
            unlike.append(Unlike(group, sorted(rank for ranks in others for rank in ranks), first))
        elif len(found) > 1:
            few = min(found.values(), key=lambda ranks: (len(ranks), 0 in ranks))
            unlike.append(Unlike(group, few, next(ranks for ranks in found.values() if ranks is not few)))
    return sorted(unlike, key=lambda one: one.is_of_buffers)


def compare_replicas(
    reports: Mapping[int, Report], request: SaveRequest, ask: AskDigests, warned: set[frozenset[str]]
) -> None:
    """Compare the tensors of which several ranks hold copies; log a warning that names buffers which differ.

    Args:
        ask: called for other ranks than rank 0 at most once.
        warned: the buffers that were warned of; there is no second warning for the same buffers.

    Raises:
        InvalidInputError: tensors that are no buffers differ, or not all ranks of a group hold them; the error names
            some of them.
    """
    unlike = unlike_replicas(reports)
    if not unlike:
        return
    if not unlike[0].is_of_buffers:
        first = unlike[0]
        digests = ask([first.few[0], first.other[0]], first.group)
        mine, theirs = digests[first.few[0]], digests[first.other[0]]
        if missing := mine.keys() ^ theirs.keys():
            text = not_held(first.few, first.other, sorted(missing))
            raise InvalidInputError(f"save {request.run}@{request.step}: {text}")
        names = [name for name, digest in mine.items() if theirs[name] != digest]
        raise InvalidInputError(
            f"save {request.run}@{request.step}: {named(first.few)}: {some(names, 5)}: differ from the replicas on "
            f"{named(first.other)}; they must be equal on all ranks: broadcast them, put what is each rank's own into "
            f"snapstore.PerRank, or store rank 0's with replicas='rank0'. {_STAGES_ADVICE}; nothing was committed"
        )
    about = frozenset(one.group for one in unlike).union(ask([0], BUFFERS)[0])
    if about in warned:
        return
    warned.add(about)
    digests = ask(sorted({rank for one in unlike for rank in (one.few[0], one.other[0])}), BUFFERS)
    pairs = [(digests[one.few[0]], digests[one.other[0]]) for one in unlike]
    names = [name for mine, theirs in pairs for name, digest in mine.items() if theirs.get(name, digest) != digest]
    warn_of_buffers(request, unlike, some(list(dict.fromkeys(names)), MAX_NAMES))


def warn_of_buffers(request: SaveRequest, unlike: Sequence[Unlike], names: str) -> None:
    """Log that buffers differ between ranks, and whose buffers are stored."""
    few = {rank for one in unlike for rank in one.few}
    first = {one.other[0] for one in unlike}
    log.warning(
        "run=%s step=%d buffers on %s differ from those on %s, which are stored, and which all ranks will restore: %s; "
        "BatchNorm computes them from each rank's own batches; average or broadcast them before you save, if you want "
        "others. This is logged once.",
        request.run,
        request.step,
        named(sorted(few)),
        named(sorted(first)),
        names,
    )


def not_held(few: Sequence[int], other: Sequence[int], names: Sequence[str]) -> str:
    """Return the text of the error for tensors that all ranks of a group should hold, and only some hold."""
    return (
        f"{some(names, 5)}: {named(few)} and {named(other)} should hold copies, by the meshes of their tensors, and "
        f"only some of these ranks do. {_STAGES_ADVICE}; nothing was committed"
    )
