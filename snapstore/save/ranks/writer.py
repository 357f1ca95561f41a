"""Rank writer: the bytes of one rank's save: packs and child manifests, and on rank 0 the roots and the record.

In: the inputs of one rank. Out: durable objects, in the order in which `together` asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from ...context import Context
from ...distributed.base import Ranks, named
from ...distributed.messages import DIGEST_BYTES, Begin, Ref, Report, encode
from ...errors import IntegrityError
from ...format.hashing import checksum
from ...format.manifests.manifest import Manifest
from ...format.records import RANKS, Snapshot
from ...protocol.session import SaveSession
from ...state.values.tensors import Node
from ...threads import msgpack_decoder
from ..inputs import Lineage, PartInput, SaveRequest
from ..known_chunks import AnySession, load_bases
from ..manifest_writer import Written, write
from ..near_children import NearChildren
from ..pipeline import commit
from ..replicas import group_digests
from ..staging import Staging
from .merged_trees import decode_trees, digests_by_path, encode_trees, held_bytes, merge_trees, orders_of, trees_of
from .roots import ChildHeaders, write_roots


class RankWriter:
    """Writes the bytes of one rank's save; `together` calls it in order.

    Args:
        inputs: from `staging.copy` for this rank's shares; or from `inputs_of`: then the caller waits.

    Attributes:
        headers, manifests: of all manifests that this rank has written: bytes up to the header's end, and decoded, by
            SHA-256.
    """

    def __init__(
        self,
        context: Context,
        lineage: Lineage,
        ranks: Ranks,
        request: SaveRequest,
        inputs: Sequence[PartInput],
        staging: Staging,
    ) -> None:
        self._context, self._lineage, self._ranks, self._request = context, lineage, ranks, request
        self._inputs, self._staging = inputs, staging
        self._child_headers = ChildHeaders(context)
        self.headers: dict[str, bytes] = {}
        self.manifests: dict[str, Manifest] = {}

    def write(self, session: AnySession, begin: Begin) -> Report:
        """Write this rank's packs and child manifests, and return its report; all of it is durable on return."""
        context, rank, count = self._context, self._ranks.rank, self._ranks.count
        near = NearChildren(self._inputs, rank, count, self._lineage.own_children(self._request.run))
        bases = load_bases(context, session, self._lineage.cached_manifests(), near)
        place, staging = (rank, count), self._staging
        written = write(context, session, self._inputs, bases, full=begin.full, staging=staging, place=place)
        self._note(written)
        if not rank:  # rank 0's manifests that a base has already; `take_report` reads those of the other ranks
            self._child_headers.start([ref for ref in written.manifests if ref.sha256 not in self.headers])
        self._own_trees = trees_of(self._inputs)
        self._trees = encode_trees(self._own_trees)
        return report_of(
            begin,
            written,
            request=request_digests(self._request),
            trees=xxhash.xxh3_128_digest(self._trees),
            replicas=group_digests([one for part in self._inputs for one in part.replicas]),
            held_bytes=sum(held_bytes(self._inputs).values()),
        )

    def trees(self) -> bytes:
        """Return the trees of this rank's parts, with the whole shapes of their tensors."""
        return self._trees

    def replicas(self, group: str) -> list[tuple[str, bytes]]:
        """Return the path and the digest of each tensor of which a group of ranks holds copies.

        Args:
            group: its id, or the end of several ids; see `Replica.group_id`.
        """
        return [found for part in self._inputs for found in digests_by_path(part.replicas, group)]

    def take_report(self, rank: int, manifests: Sequence[Ref]) -> None:
        """Take the child manifests of a rank that has reported, on rank 0, and begin to read their headers."""
        self._child_headers.start([ref.whole(rank) for ref in manifests])

    def merge(self, trees: Sequence[tuple[list[int], bytes]]) -> None:
        """Merge the trees of all ranks.

        Raises:
            InvalidInputError: plain values, or dtypes or shapes of tensors, differ between ranks.
        """
        if len(trees) == 1:  # all ranks have the same as this one
            self._states = [(trees[0][0], self._own_trees)]
        else:
            self._states = [(ranks, decode_trees(data)) for ranks, data in trees]
        self._parts = merge_trees(self._states)

    def write_roots(self, session: SaveSession, reports: Mapping[int, Report]) -> Written:
        """Write the root manifests.

        Raises:
            IntegrityError: the ranks have not stored each byte once.
        """
        states, parts = self._states, self._parts
        expected = sum(spec.nbytes for part in parts for spec in part.specs)
        held = {rank: report.held_bytes for rank, report in reports.items()}
        if sum(held.values()) != expected:
            raise IntegrityError(
                f"save {self._request.run}@{self._request.step}: {named(sorted(held))} stored {sum(held.values())} "
                f"bytes of tensors, expected {expected}: a box was stored twice or not at all; do all ranks pass the "
                "same state? Take the meshes of all DTensors out of one (init_device_mesh(...)['dp']), so that each "
                "names the ranks that hold copies. A DTensor that several pipeline stages hold (tied weights) needs "
                "another name on each. Save models of Megatron through snapstore.integrations.megatron; nothing was "
                "committed"
            )
        headers, orders = self.headers | self._child_headers.result(), orders_of(states, parts)
        cached = self._lineage.cached_manifests()
        written = write_roots(self._context, session, parts, reports, headers, orders, cached)
        self._note(written)
        return written

    def commit(self, session: SaveSession, roots: Written, bases: Sequence[Snapshot]) -> Snapshot:
        """Create the record."""
        return commit(session, self._request, roots, bases, [RANKS])

    def adopt(self, other: RankWriter) -> None:
        """Take the manifests of an earlier attempt, which turns out to be committed."""
        self.headers, self.manifests = other.headers, other.manifests

    def close(self) -> None:
        """Begin no more reads of headers."""
        self._child_headers.give_up()

    def _note(self, written: Written) -> None:
        self.headers |= written.headers
        self.manifests |= written.manifests_by_name


def request_digests(request: SaveRequest) -> bytes:
    """Return the digests of the fields that must be equal on all ranks; waits for metrics on devices."""
    metrics = [(name, _number(value)) for name, value in sorted(request.read_metrics().items())]
    metadata = _without_order(msgpack_decoder(object).decode(request.metadata_node))
    fields = (request.run, request.step, metrics, metadata, list(request.tags))  # in the order of REQUEST_FIELDS
    return b"".join(checksum(encode(value)).to_bytes(DIGEST_BYTES, "little") for value in fields)


def _number(value: float) -> float | None:
    """Return a metric to compare it: there are NaNs and zeros of both signs."""
    return None if math.isnan(value) else value + 0.0


def _without_order(node: Node) -> Node:
    """Return a node (see state/tree/form.py) whose dicts are sorted by their keys, to compare it."""
    tag = node[0] if isinstance(node, list) else None
    if tag in ("list", "tuple", "deque"):
        return [*node[:-1], [_without_order(child) for child in node[-1]]]
    if tag in ("dict", "counter", "defaultdict"):
        *head, keys, children = node
        pairs = zip(map(encode, keys), map(_without_order, children), strict=True)
        return [*head, sorted(pairs, key=lambda pair: pair[0])]
    return node


def report_of(begin: Begin, written: Written, **told: Any) -> Report:
    """Return the report of the objects that a rank has written; `told`: the other fields of the report."""
    ids = [key.rpartition("-")[2].partition(".")[0] for key in begin.bases]
    used = {base.id for base in written.built_on}
    return Report(
        step=begin.step,
        manifests=[Ref.of(ref) for ref in written.manifests],
        bases=[number for number, name in enumerate(ids) if name in used],
        chunks=written.chunks,
        new_chunks=written.new_chunks,
        stored_bytes=written.stored_bytes,
        depth=written.depth,
        **told,
    )
