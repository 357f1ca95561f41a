"""Rank state: what the ranks of a job must agree on before rank 0 commits what they have written.

In: the inputs of a rank. Out: the trees of its parts with the forms of the whole tensors, and digests of them; and on
rank 0 the trees of all ranks as one (merged_trees.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from ..state.containers import shown
from ..state.tensors import Node, TensorSpec
from ..state.tree_decode import unpack_nodes
from ..state.tree_encode import pack
from .inputs import PartInput
from .replicas import Replica, group_digests, tensor_digests


@dataclass(frozen=True, slots=True)
class PartTree:
    """The tree of a part, the whole tensors that it counts, and the numbers of the ones that are not sharded."""

    name: str
    tree: Node
    specs: Sequence[TensorSpec]
    plain: Sequence[int] = ()


@dataclass(slots=True)
class RankState:
    """The state of one rank as it is told to rank 0.

    Attributes:
        parts: in order.
        tree_digests: of each part, by its name (16 bytes).
        replica_digests: of each part, by the id of the ranks that hold the same tensors: of all bytes of these (16
            bytes). Ranks that give unlike ones for a part and id have replicas that differ.
        replicas: of each part, the tensors that these digests are of, by which one that differs can be named.
        held_bytes: of each part, the bytes that this rank stores of tensors; tied ones count in each of their parts.
    """

    parts: list[PartTree]
    tree_digests: dict[str, bytes] = field(default_factory=dict)
    replica_digests: dict[str, dict[str, bytes]] = field(default_factory=dict)
    held_bytes: dict[str, int] = field(default_factory=dict)
    replicas: dict[str, Sequence[Replica]] = field(default_factory=dict)

    def tensor_digests(self, part: str, group: str) -> list[tuple[str, bytes]]:
        """Return the path and the digest (16 bytes) of each tensor that some ranks hold alike.

        Args:
            group: the id of these ranks, or the end of several ids, such as BUFFERS.
        """
        found = tensor_digests([one for one in self.replicas.get(part, ()) if one.group_id.endswith(group)])
        return [(shown(one.name[1]), digest) for one, digest in found if digest is not None]


def rank_state(inputs: Sequence[PartInput]) -> RankState:
    """Return what a rank tells of its state; call it when the inputs are written, which hashes their replicas."""
    state = RankState(trees_of(inputs))
    for part in inputs:
        if part.own_nodes is None:
            state.held_bytes[part.name] = sum(tensor.spec.nbytes for tensor in part.tensors)
            state.replicas[part.name] = part.replicas
            state.replica_digests[part.name] = group_digests(part.replicas)
    state.tree_digests = {part.name: xxhash.xxh3_128_digest(encode_trees([part])) for part in state.parts}
    return state


def trees_of(inputs: Sequence[PartInput]) -> list[PartTree]:
    """Return the trees of a rank's parts."""
    return [PartTree(part.name, part.tree, part.specs, part.plain) for part in inputs if part.own_nodes is None]


def encode_trees(parts: Sequence[PartTree]) -> bytes:
    """Return trees as bytes; equal trees have equal bytes."""
    packed = [_Packed(part.name, pack(part.tree), list(part.specs), list(part.plain)) for part in parts]
    return msgspec.msgpack.encode(packed)


def decode_trees(data: bytes) -> list[PartTree]:
    """Return the trees that another rank of the same job has encoded."""
    packed = msgspec.msgpack.decode(data, type=list[_Packed])
    return [PartTree(part.name, unpack_nodes(part.tree), part.specs, part.plain) for part in packed]


class _Packed(msgspec.Struct, array_like=True):
    """A PartTree on its way."""

    name: str
    tree: bytes
    specs: list[TensorSpec]
    plain: list[int]
