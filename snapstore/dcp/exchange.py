"""Exchange: what the ranks of a save tell each other, in the two gathers and the scatter that DCP makes anyway.

    plan     each rank to 0     a digest of what it plans: ranks with equal ones mostly hold equal trees
    answer   rank 0 to each     the snapshot that is begun, and whether this rank's trees are wanted
    told     each rank to 0     its child manifests, counts, digests, and its trees where they are wanted

In: typed structs. Out: msgpack, and back. None of them grows with the state, but the trees: one rank sends them for all
with the same plan. If another one of these has other trees, its plain values differ, which is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
import xxhash
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from ..distributed.base import named
from ..distributed.messages import Begin, Report
from ..errors import InvalidInputError, RanksError
from ..format.records import ManifestRef
from ..save.agreement import Unlike, unlike_replicas
from ..save.merged_trees import merge_trees, orders_of
from ..save.rank_state import PartTree, decode_trees
from ..text import some

M = TypeVar("M", bound=msgspec.Struct)


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's answer to a plan.

    Attributes:
        begin: what every rank needs to write.
        rank, world_size: of the rank that is answered.
        trees: whether its trees are wanted.
        details: whether every rank tells what it can, because the last save failed for want of it.
        seed: digest seed of the repository: all ranks write to one.
        replicas: of rank 0's writer: all ranks have the same.
    """

    begin: Begin
    rank: int
    world_size: int
    trees: bool
    details: bool
    seed: int
    replicas: str


class Told(msgspec.Struct, frozen=True, array_like=True):
    """A rank's packs and manifests are durable.

    Attributes:
        report: see `messages.Report`.
        held: of each part, the bytes of shared tensors that it has stored.
        trees: its trees, if they were wanted.
        replicas: of each part and group of ranks, the path and digest of each tensor that these ranks hold alike, if
            the last save failed because they differed.
    """

    report: Report
    held: dict[str, int]
    trees: bytes = b""
    replicas: dict[str, list[tuple[str, bytes]]] = {}


def encode(message: Answer | Told) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: Any, kind: type[M]) -> M:
    """Return a message from its bytes.

    Raises:
        RanksError: it is none: another writer, or another release of snapstore, runs on a rank.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
        raise RanksError(
            f"a message is no {kind.__name__} ({error}); pass a SnapstoreWriter of one release on all ranks"
        ) from error


def digest_of(plan: SavePlan) -> bytes:
    """Return a digest of the names, shapes and dtypes of a plan (16 bytes); empty if the plan does not say them."""
    if not plan.usable or not plan.items:
        return b""
    digest = xxhash.xxh3_128()
    for item in plan.items:
        data = item.tensor_data
        form = BytesStorageMetadata.__name__ if data is None else f"{list(data.size)} {data.properties.dtype}"
        digest.update(f"{item.index.fqn}\0{form}\0".encode())
    return digest.digest()


def wanted_trees(plans: Sequence[object]) -> set[int]:
    """Return the ranks whose trees are wanted: the first of each plan, and every one without a digest."""
    seen: set[object] = set()
    wanted = set()
    for rank, digest in enumerate(plans):
        if not digest or digest not in seen:
            wanted.add(rank)
        seen.add(digest)
    return wanted


class Collected:
    """The reports of all ranks, on rank 0.

    Attributes:
        reports: by rank.
        children: the child manifests of all ranks.
        parts: their trees as one.
        orders: see `orders_of`.
        unlike_buffers: the ranks whose buffers differ.

    Raises:
        InvalidInputError: plain values differ between ranks, or replicas do, or they do not hold each tensor once.
        DetailsWantedError: likewise, and more details would tell where.
    """

    def __init__(self, told: Mapping[int, Told]) -> None:
        self.reports = {rank: one.report for rank, one in told.items()}
        self.children: list[ManifestRef] = [
            ref.whole(rank) for rank, report in self.reports.items() for ref in report.manifests or ()
        ]
        alike: dict[bytes, list[int]] = {}
        for rank, report in self.reports.items():
            alike.setdefault(report.trees, []).append(rank)
        trees = {told[rank].report.trees: told[rank].trees for rank in sorted(told, reverse=True) if told[rank].trees}
        unknown = [rank for digest, ranks in alike.items() if digest not in trees for rank in ranks]
        if unknown:
            raise DetailsWantedError(
                f"{named(sorted(unknown))}: plain values of the state differ from those of ranks with the same keys; "
                "make them equal, or give each rank keys of its own; nothing was committed; save again to hear which"
            )
        states = [(ranks, decode_trees(trees[digest])) for digest, ranks in alike.items()]
        self.parts = merge_trees(states)
        self.orders = orders_of(states, self.parts)
        unlike = unlike_replicas(self.reports)
        if unlike and not unlike[0].is_of_buffers:
            _raise_of_replicas(told, unlike[0])
        self.unlike_buffers = unlike
        _require_whole(self.parts, [one.held for one in told.values()])


class DetailsWantedError(InvalidInputError):
    """Ranks differ, and have not told where."""


def _raise_of_replicas(told: Mapping[int, Told], unlike: Unlike) -> NoReturn:
    """Raise the error of replicas that differ.

    Raises:
        InvalidInputError: with the names of the tensors.
        DetailsWantedError: the ranks have not told the names.
    """
    group, few, other = unlike.group, unlike.few, unlike.other
    pairs = zip(*(told[rank].replicas.get(group, ()) for rank in (few[0], other[0])), strict=False)
    names = [path for (path, mine), (_, theirs) in pairs if mine != theirs]
    which = f"tensors {some(names, 5)}" if names else f"tensors of part {group.partition(chr(0))[0]!r}"
    again = "" if names else "; save again to hear which"
    raise (InvalidInputError if names else DetailsWantedError)(
        f"{named(few)}: {which} differ from those of {named(other)}, which should hold the same (was a broadcast "
        "forgotten?): make them equal, wrap them in snapstore.PerRank, or store rank 0's, with "
        f"SnapstoreWriter(replicas='rank0'); nothing was committed{again}"
    )


def _require_whole(parts: Sequence[PartTree], held: Sequence[Mapping[str, int]]) -> None:
    """Check that the ranks have stored as many bytes as the tensors of each part have.

    Raises:
        InvalidInputError: they have stored fewer, or more.
    """
    for part in parts:
        expected = sum(spec.nbytes for spec in part.specs)
        got = sum(one.get(part.name, 0) for one in held)
        if got != expected:
            raise InvalidInputError(
                f"part {part.name!r}: its tensors have {expected} bytes, and the ranks have stored {got}: DTensors are "
                "on a mesh of other ranks than save, or only some ranks have a plain tensor: make it a DTensor, or "
                "wrap it in snapstore.PerRank below a top-level key; nothing was committed"
            )
