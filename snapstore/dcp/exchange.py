"""Exchange: the messages between the ranks of a save, in the two gathers and the scatter that DCP makes anyway.

    plan     each rank to 0     a digest of its plan: ranks with equal digests mostly hold equal trees; and, if they
                                have changed, the hashes of its keys that are not sharded
    answer   rank 0 to each     the snapshot that is begun, whether this rank's trees are wanted, and the holders of
                                those of its keys that not all ranks hold
    told     each rank to 0     its child manifests, counts, digests, and its trees if they are wanted

In: typed structs. Out: msgpack, and back. They do not grow with the state, except for the hashes, which are sent only
when they change, and the trees: of all ranks with the same plan, one rank sends them. If another one of these ranks has
other trees, its plain values differ, which is an error.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ..distributed.base import named, ranks_by
from ..distributed.messages import Begin, Report
from ..errors import InvalidInputError, RanksError
from ..save.ranks.agreement import Unlike, not_held, unlike_replicas
from ..save.ranks.merged_trees import PartTree, decode_trees, merge_trees, orders_of
from ..text import some

_MARK = "snapstore.plan."
#: Ranks, and the hashes (n,) of the keys that exactly these ranks hold, little-endian uint64.
HolderGroups = list[tuple[list[int], bytes]]


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """A rank's plan.

    Attributes:
        digest: of its keys, kinds, shapes and dtypes (16 bytes); b"": not known.
        plain: a digest of `keys` (16 bytes).
        keys: the hashes of all keys that are not sharded, see `hashes_of`; None: the same as in the last save.
        heard: digest of the holders in rank 0's last answer; see `digest_of_groups`.
    """

    digest: bytes
    plain: bytes
    keys: bytes | None
    heard: bytes


class PlanAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's answer to a plan.

    Attributes:
        begin: the data that every rank needs to write.
        rank, world_size: of the rank that is answered.
        trees: whether its trees are wanted.
        details: whether every rank reports all details, because the last save failed and they would show where.
        seed: digest seed of the repository: all ranks must write to the same one.
        replicas: the argument of rank 0's writer: all ranks must have the same.
        holders: of the keys of this rank that not all ranks hold; None: as in the last answer.
        stale: whether more ranks hold a key than `holders` says; then no rank may copy by these in the next save.
    """

    begin: Begin
    rank: int
    world_size: int
    trees: bool
    details: bool
    seed: int
    replicas: str
    holders: HolderGroups | None
    stale: bool


class Told(msgspec.Struct, frozen=True, array_like=True):
    """A rank's packs and manifests are durable.

    Attributes:
        report: see `messages.Report`.
        held: by part, how many bytes of the job's tensors it has stored, without values of its own.
        trees: its trees, if they were wanted.
        replicas: by part and group of ranks, the path and digest of each tensor of which these ranks hold copies, if
            `PlanAnswer.details` was set.
    """

    report: Report
    held: dict[str, int]
    trees: bytes = b""
    replicas: dict[str, list[tuple[str, bytes]]] = {}


def digest_of(plan: SavePlan) -> bytes:
    """Return a digest of the names, kinds, shapes and dtypes of a plan (16 bytes); b"" if the plan has none."""
    if not plan.usable or not plan.items:
        return b""
    digest = xxhash.xxh3_128()
    for item in plan.items:
        data = item.tensor_data
        form = BytesStorageMetadata.__name__ if data is None else f"{list(data.size)} {data.properties.dtype}"
        digest.update(f"{item.index.fqn}\0{item.type.name}\0{form}\0".encode(errors="surrogatepass"))
    return digest.digest()


def marks_of_cache() -> list[WriteItem]:
    """Return items that make a plan differ from the last one for DCP's plan cache, if a planner uses the cache.

    The cache compares only items. It leaves out a plan with the same items, and its storage data too.
    """
    if not SavePlanner._cached_save_plan:
        return []
    return [WriteItem(MetadataIndex(_MARK + secrets.token_hex(8)), WriteItemType.BYTE_IO)]


def remove_marks(metadata: Metadata) -> None:
    """Remove the entries that DCP has made of the items of `marks_of_cache`."""
    for key in [key for key in metadata.state_dict_metadata or () if key.startswith(_MARK)]:
        del metadata.state_dict_metadata[key]


def plain_keys(plan: SavePlan) -> list[str] | None:
    """Return the keys of a plan that are not sharded; None: DCP's cache has left out the items: they are unchanged."""
    return None if not plan.usable else [item.index.fqn for item in plan.items if item.type is not WriteItemType.SHARD]


def cached_keys() -> list[str]:
    """Return the keys that are not sharded, of all plans in DCP's cache: a new writer cannot know which plan is its."""
    return [key for plan in SavePlanner._cached_save_plan.values() for key in plain_keys(plan) or ()]


def key_of(path: Sequence[str | int]) -> str:
    """Return DCP's key for a path in a state."""
    return ".".join(map(str, path))


def hash_of(key: str) -> int:
    """Return the hash of a key."""
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogatepass"))


def hashes_of(keys: Iterable[str]) -> bytes:
    """Return the hashes (n,) of keys, little-endian uint64; each once, and sorted."""
    return np.unique(np.array([hash_of(key) for key in keys], "<u8")).tobytes()


def digest_of_groups(groups: HolderGroups) -> bytes:
    """Return a digest of groups (16 bytes)."""
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(groups))


def wanted_trees(plans: Sequence[Planned]) -> set[int]:
    """Return the ranks whose trees are wanted: the first rank of each plan, and every rank without a digest."""
    seen: set[bytes] = set()
    wanted = set()
    for rank, plan in enumerate(plans):
        if not plan.digest or plan.digest not in seen:
            wanted.add(rank)
        seen.add(plan.digest)
    return wanted


class KeyHolders:
    """Finds, on rank 0, the ranks that hold the keys which not all ranks hold. It keeps the keys of the last save.

    If more ranks hold a key than in the last save, its former holders count, by whose shares the ranks may have copied
    (see save/ranks/holders.py). Then no rank may copy by shares in the next save.

    Attributes:
        is_stale: whether the last answers name former holders.
    """

    def __init__(self) -> None:
        self.is_stale = False
        self._keys: dict[bytes, npt.NDArray[np.uint64]] = {}  # hashes, by their digest
        self._plains: list[bytes] = []  # of each rank, the digest of its keys in the last save
        self._groups: HolderGroups = []  # the holders of all keys in that save

    def answers(self, plans: Sequence[Planned]) -> list[HolderGroups | None]:
        """Return the holders for the answer to each rank; None: the same as in its last answer.

        Raises:
            RanksError: a rank has sent no keys, and this one does not know them.
        """
        known = self._keys | {plan.plain: np.frombuffer(plan.keys, "<u8") for plan in plans if plan.keys is not None}
        self._keys = {plan.plain: known[plan.plain] for plan in plans if plan.plain in known}
        unknown = [rank for rank, plan in enumerate(plans) if plan.plain not in known]
        if unknown:
            raise RanksError(
                f"{named(unknown)}: only this rank or only rank 0 has a new SnapstoreWriter: make new writers on "
                "all ranks at the same step; nothing was committed; save again"
            )
        plains = [plan.plain for plan in plans]
        told = [(of, of, keys) for of, keys in self._groups]
        if plains != self._plains or self.is_stale:
            former = [] if self.is_stale else self._groups
            self._plains, self._groups = plains, self._groups_of(plains)
            told = _with_former(self._groups, former)
        self.is_stale = any(of != now for now, of, _ in told)
        told = [one for one in told if len(one[1]) < len(plans)]
        own = [[(of, keys) for now, of, keys in told if rank in now] for rank in range(len(plans))]
        return [None if plan.heard == digest_of_groups(of) else of for plan, of in zip(plans, own, strict=True)]

    def _groups_of(self, plains: Sequence[bytes]) -> HolderGroups:
        """Return the ranks that hold each key, from the digest of each rank's keys."""
        ranks = ranks_by(enumerate(plains))
        sets = [self._keys[plain] for plain in ranks]
        keys, owners = np.concatenate(sets), np.repeat(np.arange(len(sets)), list(map(len, sets)))
        order = np.lexsort((owners, keys))
        keys, owners = keys[order], owners[order]
        starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]]) if len(keys) else np.zeros(0, np.int64)
        found: dict[tuple[int, ...], list[int]] = {}
        for key, of in zip(keys[starts].tolist(), np.split(owners, starts[1:]), strict=False):
            found.setdefault(tuple(of.tolist()), []).append(key)
        held_by = list(ranks.values())
        return [
            (sorted(rank for number in of for rank in held_by[number]), np.array(hashes, "<u8").tobytes())
            for of, hashes in found.items()
        ]


def _with_former(groups: HolderGroups, former: HolderGroups) -> list[tuple[list[int], list[int], bytes]]:
    """Return (ranks that hold keys, ranks that count as their holders, keys): the former ones if all have kept them."""
    before = {key: of for of, keys in former for key in np.frombuffer(keys, "<u8").tolist()}
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for now, keys in groups:
        for key in np.frombuffer(keys, "<u8").tolist():
            of = before.get(key, now)
            found.setdefault((tuple(now), tuple(of if set(of) < set(now) else now)), []).append(key)
    return [(list(now), list(of), np.array(keys, "<u8").tobytes()) for (now, of), keys in found.items()]


class Collected:
    """The reports of all ranks, on rank 0.

    Attributes:
        reports: by rank.
        parts: the merged trees of all ranks.
        orders: see `orders_of`.
        unlike_buffers: the groups of ranks whose buffers differ.

    Raises:
        InvalidInputError: plain values or replicas differ between ranks, or the ranks have not stored each byte once.
        DetailsWantedError: plain values or replicas differ, and with more details an error would say where.
    """

    def __init__(self, told: Mapping[int, Told]) -> None:
        self.reports = {rank: one.report for rank, one in told.items()}
        alike = ranks_by((rank, report.trees) for rank, report in self.reports.items())
        trees = {told[rank].report.trees: told[rank].trees for rank in sorted(told, reverse=True) if told[rank].trees}
        unknown = [rank for digest, ranks in alike.items() if digest not in trees for rank in ranks]
        if unknown:
            raise DetailsWantedError(
                f"{named(sorted(unknown))}: plain values of the state, the order of keys in them, or empty containers "
                "differ from those of ranks with the same keys; nothing was committed; save again: the error of the "
                "next save names the differences; without any, it succeeds"
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
    """Ranks differ, and have not reported where."""


def _raise_of_replicas(told: Mapping[int, Told], unlike: Unlike) -> NoReturn:
    """Raise the error of replicas that differ.

    Raises:
        InvalidInputError: with the names of the tensors.
        DetailsWantedError: the ranks have not reported the names.
    """
    group, few, other = unlike.group, unlike.few, unlike.other
    mine, theirs = (dict(told[rank].replicas.get(group, ())) for rank in (few[0], other[0]))
    if mine and theirs and (missing := mine.keys() ^ theirs.keys()):
        raise InvalidInputError(not_held(few, other, sorted(missing)))
    names = [path for path, digest in mine.items() if digest != theirs.get(path)]
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
                "on a mesh of other ranks than save, or several pipeline stages hold one under the same name (tied "
                "weights), or shards leave some of a tensor out; nothing was committed"
            )
