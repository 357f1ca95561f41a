"""Saving: this process's share of DCP's saves, from the copies of a state to durable packs and manifests.

In: a state, and the session of its save. Out: durable objects, and a report of them; on rank 0 also the record. The
bytes are kept as bases of the next save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import xxhash

from ..errors import RanksError
from ..format.manifests.manifest import Manifest
from ..format.records import RANKS, Snapshot
from ..protocol.session import SaveSession
from ..repository import Repository
from ..save.inputs import PartInput, SaveRequest, plain_names
from ..save.known_chunks import AnySession, load_bases
from ..save.manifest_writer import Written, write
from ..save.near_children import NearChildren
from ..save.pipeline import commit
from ..save.ranks.holders import Holders, require_kept
from ..save.ranks.merged_trees import digests_by_path, encode_trees, held_bytes, trees_of
from ..save.ranks.roots import ChildHeaders, children_of, write_roots
from ..save.ranks.writer import report_of
from ..save.replicas import group_digests
from ..save.shares import Name, RankShares, Replicas
from ..save.staging import Mode, Staging
from ..state.values.containers import shown
from ..state.walk.flatten import flatten
from .exchange import (
    Collected,
    HolderGroups,
    PlanAnswer,
    Planned,
    Told,
    cached_keys,
    digest_of_groups,
    hash_of,
    hashes_of,
    key_of,
)
from .target import RankPlace


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a save that this process has written.

    Attributes:
        written: the objects.
        buffers: the paths of its buffers, by the part and group under which it reports their digest.
        inputs: cut to the share.
    """

    written: Written
    buffers: Mapping[str, Sequence[str]]
    inputs: Sequence[PartInput]


class Saver:
    """The shares of one process. One save at a time uses it: `take`, then `stage` or `inputs`, `write` and `commit`.

    Attributes:
        place: (rank, number of ranks) of this process in the group that saves; (0, 0): it saves as one process.
        replicas, job_ranks: see `RankShares`.
    """

    def __init__(
        self,
        repository: Repository,
        place: RankPlace,
        *,
        staging: Mode,
        keep_base: bool,
        replicas: Replicas,
        job_ranks: Sequence[int] | None,
    ) -> None:
        self._repository, self._context = repository, repository.context
        self.replicas, self.job_ranks = replicas, job_ranks
        self._new_staging = partial(Staging, self._context.engines, keep_base=keep_base, mode=staging)
        self._manifests: dict[str, Manifest] = {}  # of the last write, by SHA-256
        self._keys: bytes | None = None  # hashes of the keys of the save that is planned: see `plan`
        self._known_keys: bytes | None = None  # the last keys that rank 0 has answered
        self._groups: HolderGroups = []  # of rank 0's last answer
        self._is_stale = False  # whether more ranks hold a key than it says
        self._set_place(place)
        if staging != "auto":
            self._context.engines.required = True
        self._context.engines.start_loading()

    def _set_place(self, place: RankPlace) -> None:
        self.place = place
        self._shares: RankShares | None = None
        self._staging = self._new_staging()
        self._forget_holders()

    def _forget_holders(self) -> None:
        """Count each whole plain tensor as this rank's share, until its holders are known."""
        if self.place[1]:
            chunk_bytes = self._context.config.chunk_bytes
            self._use_shares(RankShares(*self.place, chunk_bytes, None, self.replicas, job_ranks=self.job_ranks))

    def _use_shares(self, shares: RankShares) -> None:
        self._shares = shares
        self._staging.use_shares(shares)

    def take(self, place: RankPlace) -> None:
        """Take a place in the group; if it has changed, the bytes of the last save are dropped."""
        if place != self.place:
            self._staging.clear()
            self._set_place(place)

    def stage(self, state: Any) -> Callable[[], Sequence[PartInput]]:
        """Copy a state, by default where its tensors lie; return a function that returns the copies.

        Raises:
            InvalidInputError: the state cannot be saved.
        """
        return self._staging.copy_state(state)

    def plan(self, digest: bytes, keys: Iterable[str] | None) -> Planned:
        """Return the message about a plan to rank 0.

        Args:
            keys: of all that is not sharded; None: as in the last save, which another writer may have made.
        """
        if keys is not None or self._keys is None:
            self._keys = hashes_of(cached_keys() if keys is None else keys)
        known, self._known_keys = self._known_keys, None  # sent again if this save fails before the answer
        sent = None if known == self._keys else self._keys
        return Planned(digest, xxhash.xxh3_128_digest(self._keys), sent, digest_of_groups(self._groups))

    def hear(self, holders: HolderGroups | None, *, stale: bool) -> None:
        """Take rank 0's answer: the holders of the keys that not all ranks hold; None: as in its last answer.

        Args:
            stale: whether the next save must not copy by these.
        """
        self._known_keys, self._is_stale = self._keys, stale
        self._groups = self._groups if holders is None else holders

    def _holders_of(self, names: Iterable[Name]) -> Holders:
        """Return the holders of the plain tensors that not all ranks hold.

        A tensor in a leaf of DCP, such as a tuple or an object, is held by the ranks that hold the leaf.
        """
        known, found = set(np.frombuffer(self._keys or b"", "<u8").tolist()), dict[Name, tuple[int, ...]]()
        groups = {key: tuple(ranks) for ranks, keys in self._groups for key in np.frombuffer(keys, "<u8").tolist()}
        for name in names if groups else ():
            keys = (hash_of(key_of(name[1][:end])) for end in range(len(name[1]), 0, -1))
            key = next((key for key in keys if key in known), None)
            if key in groups:
                found[name] = groups[key]
        return found

    def _shared(self, inputs: Sequence[PartInput]) -> Sequence[PartInput]:
        """Return staged inputs, cut to the share of this rank: the holders of plain tensors are known now.

        Raises:
            RanksError: this rank has kept a tensor that other ranks have dropped, or hold now as well.
        """
        if (old := self._shares) is None:
            return inputs
        own = plain_names(inputs)
        shares = replace(old, holders=self._holders_of(own), known=own)
        try:
            require_kept((name for name in own if old.knows(name)), old.holders or {}, shares.holders or {})
        except RanksError:
            self._forget_holders()
            raise
        self._shares = shares
        return inputs if shares == old else self._staging.use_holders(inputs, shares)

    def inputs(self, state: Any) -> Sequence[PartInput]:
        """Return the tensors of a state whose caller waits; see `Staging.inputs`.

        Raises:
            InvalidInputError: the state cannot be saved.
        """
        parts = flatten(state, of_rank=self._shares is not None)
        if self._shares is not None:
            own = plain_names(parts)
            self._use_shares(replace(self._shares, holders=self._holders_of(own), known=own))
        return self._staging.inputs(parts)

    def write(self, session: AnySession, inputs: Sequence[PartInput]) -> Share:
        """Write packs and manifests; all of it is durable on return.

        Raises:
            InvalidInputError: an array was changed meanwhile.
            RanksError: see `_shared`.
            StorageError: the store failed.
        """
        context, staging, (rank, world_size) = self._context, self._staging, self.place
        cached = {**self._repository.lineage.cached_manifests(), **self._manifests}
        try:
            with staging.saving(inputs):
                inputs = self._shared(inputs)
                near = NearChildren(inputs, rank, world_size) if world_size else None
                bases = load_bases(context, session, cached, near)
                written = write(context, session, inputs, bases, full=False, staging=staging, place=self.place)
                # if nothing is committed, no record names it as a base
                staging.keep_as_base(inputs, session.id, written.in_memory)
        finally:  # also after an error: rank 0 counts all holders in the next save
            if self._is_stale:
                self._forget_holders()
        self._manifests = written.manifests_by_name
        buffers: dict[str, list[str]] = {}
        for part in inputs:
            for one in part.replicas:
                if one.is_buffer:
                    buffers.setdefault(f"{part.name}\0{one.group_id}", []).append(shown(one.name[1]))
        return Share(written, buffers, inputs)

    def digest_of_trees(self, inputs: Sequence[PartInput]) -> bytes:
        """Return a digest of the trees of a state (16 bytes)."""
        return xxhash.xxh3_128_digest(encode_trees(trees_of(inputs)))

    def told(self, answer: PlanAnswer, share: Share) -> Told:
        """Return the message about a share to rank 0."""
        trees, replicas, details = encode_trees(trees_of(share.inputs)), dict[str, bytes](), {}
        for part in share.inputs:
            for group, digest in group_digests(part.replicas).items():
                replicas[f"{part.name}\0{group}"] = digest
                if answer.details:
                    details[f"{part.name}\0{group}"] = digests_by_path(part.replicas, group)
        report = report_of(
            answer.begin, share.written, request=b"", trees=xxhash.xxh3_128_digest(trees), replicas=replicas
        )
        return Told(report, held_bytes(share.inputs), trees if answer.trees else b"", details)

    def write_roots(self, session: SaveSession, collected: Collected) -> Written:
        """Write the root manifests of all ranks; they are durable on return.

        Raises:
            IntegrityError, NotFoundError, StorageError: a child manifest cannot be read.
        """
        reports, headers = collected.reports, ChildHeaders(self._context)
        headers.start(children_of(reports))
        cached, parts = self._repository.lineage.cached_manifests(), collected.parts
        return write_roots(self._context, session, parts, reports, headers.result(), collected.orders, cached)

    def commit(
        self, session: SaveSession, request: SaveRequest, written: Written, bases: Sequence[Snapshot]
    ) -> Snapshot:
        """Create the record.

        Args:
            written: the manifests that the record names, and the counts of all ranks.
            bases: the snapshots on which at least one rank has built.

        Raises:
            ConflictError: a gc has expired this save; nothing was committed.
            StorageError: the store failed.
        """
        snapshot = commit(session, request, written, bases, [RANKS] if self.place[1] else [])
        self._context.index.add(snapshot, written.headers)
        self._repository.lineage.note_saved(snapshot, written.manifests_by_name)
        return snapshot

    def clear(self) -> None:
        """Release all memory."""
        self._staging.clear()
