"""Rank state: the data that rank 0 compares between the ranks of a job before it commits.

In: the inputs of a rank. Out: the trees of its parts with the forms of the whole tensors, which rank 0 merges
(merged_trees.py); and how many bytes it stores, and the digests of its replicas one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...state.tree.decode import unpack_nodes
from ...state.tree.encode import pack
from ...state.values.containers import shown
from ...state.values.tensors import Node, TensorSpec
from ...threads import msgpack_decoder
from ..inputs import PartInput
from ..replicas import Replica, tensor_digests


@dataclass(frozen=True, slots=True)
class PartTree:
    """The tree of a part, the specs of its whole tensors, and the numbers of the tensors that are not sharded."""

    name: str
    tree: Node
    specs: Sequence[TensorSpec]
    plain: Sequence[int] = ()


def held_bytes(inputs: Sequence[PartInput]) -> dict[str, int]:
    """Return the bytes that a rank stores of the tensors of each part; tied ones count in each of their parts."""
    return {part.name: sum(t.spec.nbytes for t in part.tensors) for part in inputs if part.own_nodes is None}


def digests_by_path(replicas: Sequence[Replica], group: str) -> list[tuple[str, bytes]]:
    """Return the path and the digest (16 bytes) of each tensor of which some ranks hold copies.

    Args:
        group: the id of these ranks, or the end of several ids, such as BUFFERS.
    """
    found = tensor_digests([one for one in replicas if one.group_id.endswith(group)])
    return [(shown(one.name[1]), digest) for one, digest in found if digest is not None]


def trees_of(inputs: Sequence[PartInput]) -> list[PartTree]:
    """Return the trees of a rank's parts."""
    return [PartTree(part.name, part.tree, part.specs, part.plain) for part in inputs if part.own_nodes is None]


def encode_trees(parts: Sequence[PartTree]) -> bytes:
    """Return trees as bytes; equal trees have equal bytes."""
    packed = [_Packed(part.name, pack(part.tree), list(part.specs), list(part.plain)) for part in parts]
    return msgspec.msgpack.encode(packed)


def decode_trees(data: bytes) -> list[PartTree]:
    """Return the trees that another rank of the same job has encoded."""
    packed = msgpack_decoder(list[_Packed]).decode(data)
    return [PartTree(part.name, unpack_nodes(part.tree), part.specs, part.plain) for part in packed]


class _Packed(msgspec.Struct, array_like=True):
    """A PartTree as a message."""

    name: str
    tree: bytes
    specs: list[TensorSpec]
    plain: list[int]
