"""Merged trees: the trees of all ranks of a job as one.

In: the inputs of a rank, of which rank 0 compares trees, stored bytes and digests of replicas; then the trees of each
part, and which ranks have them. Out: one tree per part, or an error that names the differences. A
dict may have keys that only some ranks have, such as the layers of a pipeline's stages: the merged dict has all of
them, in the order of the ranks. All other values must be equal on the ranks that have them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ...arrays import Column
from ...distributed.base import named
from ...errors import FormatError, InvalidInputError
from ...state.tree.decode import decode_plain, unpack_nodes, without_parameters
from ...state.tree.encode import Encoder, encode_plain, pack
from ...state.tree.form import MAPPINGS, OBJECTS, STARTS, has_own
from ...state.values.containers import shown
from ...state.values.tensors import ARRAY_TAGS, Node, TensorSpec
from ...threads import msgpack_decoder
from ..inputs import PartInput
from ..replicas import Replica, tensor_digests
from ..shares import Name, names_of


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
    return msgspec.msgpack.encode([(part.name, pack(part.tree), part.specs, part.plain) for part in parts])


def decode_trees(data: bytes) -> list[PartTree]:
    """Return the trees that another rank of the same job has encoded."""
    packed = msgpack_decoder(list[tuple[str, bytes, list[TensorSpec], list[int]]]).decode(data)
    return [PartTree(name, unpack_nodes(tree), specs, plain) for name, tree, specs, plain in packed]


#: Ranks with equal trees, and these trees.
Alike = tuple[Sequence[int], Sequence[PartTree]]

MAX_PROBLEMS = 20  # the most differences that one error names
_EQUAL = "make these values equal on all ranks, or put what is each rank's own into snapstore.PerRank"
_FLATTEN = (
    "an optimizer's param_groups name the parameters of their rank alone: pass its state flattened, by get_state_dict("
    "model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)), whose keys are those of the whole "
    f"model, and restore it with keys= of this rank; {_EQUAL.replace('these', 'other')}"
)
_OWN = "a value of the rank's own, which all ranks must have at this place (PerRank(None) where there is none), only"
MAX_SHOWN = 60  # characters of a value in an error
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class _RanksNode:
    """A node of a part as some ranks have it, and the tensors of these ranks."""

    ranks: Sequence[int]
    part: str
    node: Node
    specs: Mapping[str, Sequence[TensorSpec]]  # by part
    names: Mapping[str, Sequence[Name]]

    @property
    def tag(self) -> str:
        """Return the tag of the node; "" for a scalar."""
        return str(self.node[0]) if type(self.node) is list else ""

    @property
    def tensor(self) -> int | None:
        """Return the number, in its part, of the tensor that the node stands for; None: it stands for no tensor."""
        is_tensor = self.tag in ARRAY_TAGS and type(self.node[1]) is int
        return self.node[1] if is_tensor else None

    def child(self, node: Node) -> _RanksNode:
        """Return another node of the same part."""
        return _RanksNode(self.ranks, self.part, node, self.specs, self.names)

    def name(self, part: str, index: int) -> Name:
        """Return the name of a tensor."""
        return self.names[part][index]

    def form(self) -> tuple[Any, ...]:
        """Return the properties of a node that must be equal on all ranks that have it."""
        if self.tensor is None:
            return (pack(self.node),)
        spec = self.specs[self.part][self.tensor]
        tie = spec.tie and self.name(*spec.tie)
        form = (spec.kind, spec.dtype, tuple(spec.shape), spec.requires_grad, tie)
        return (self.node[0], *self.node[2:], self.name(self.part, self.tensor), *form)

    def text(self, path: Path | None = None) -> str:
        """Return the value for an error, shortened; `path` is its place."""
        if self.tensor is not None:
            spec = self.specs[self.part][self.tensor]
            grad = " that requires grad" if spec.requires_grad else ""
            other = self.specs[spec.tie[0]][spec.tie[1]].path if spec.tie else spec.path
            tie = f" tied to {shown(other)}" if path not in (None, other) else ""
            return f"{self.node[0]} {spec.dtype}{list(spec.shape)}{grad}{tie}"
        if self.tag == "rank":
            return "a value of the rank's own"
        if self.tag == "part":
            return "a container or an object"
        try:
            text = repr(decode_plain(unpack_nodes(pack(self.node))))
        except FormatError:
            text = f"{self.node[3]}" if self.tag in OBJECTS else f"{self.tag} of {len(self.node[-1])}"
        return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def merge_trees(states: Sequence[Alike]) -> list[PartTree]:
    """Return the trees of all ranks as one.

    A plain tensor that only some ranks hold can be stored if each of these ranks knew its holders: see `holders_of`.

    Args:
        states: the one with rank 0 comes first.

    Raises:
        InvalidInputError: plain values, or the forms of tensors, differ between ranks.
    """
    if len(states) == 1 or len({encode_trees(parts) for _, parts in states}) == 1:
        return list(states[0][1])
    return _Merger(states).parts


def orders_of(states: Sequence[Alike], parts: Sequence[PartTree]) -> dict[tuple[int, str], Column]:
    """Return the number of each tensor of a rank's part among those of the merged one, by rank and part.

    Args:
        states: the ones that `merge_trees` has merged into `parts`.
    """
    if len(states) == 1:  # these are the merged parts
        ranks, own = states[0]
        return {(rank, part.name): np.arange(len(part.specs)) for part in own for rank in ranks}
    found = dict[tuple[int, str], Column]()
    places = {part.name: {name: i for i, name in enumerate(names_of(part.name, part.specs))} for part in parts}
    for ranks, own in states:
        for part in own:
            numbers = np.array([places[part.name][name] for name in names_of(part.name, part.specs)], np.int64)
            found.update(((rank, part.name), numbers) for rank in ranks)
    return found


def holders_of(states: Sequence[Alike]) -> dict[Name, tuple[int, ...]]:
    """Return the ranks that hold each plain tensor which not all ranks hold; see `RankShares`."""
    found: dict[Name, list[int]] = {}
    for ranks, parts in states:
        for part in parts:
            names = list(names_of(part.name, part.specs))
            for number in part.plain:
                found.setdefault(names[number], []).extend(ranks)
    count = sum(len(ranks) for ranks, _ in states)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items() if len(ranks) < count}


class _Merger:
    """One merge of trees that differ."""

    def __init__(self, states: Sequence[Alike]) -> None:
        self._problems: list[str] = []
        self._has_groups = False  # whether one of the problems is in the param_groups of an optimizer
        self._places: dict[Name, int] = {}  # the number of each tensor in its merged part
        # The first of each set of tied tensors in the merged parts, whose order may differ from that of a rank's parts.
        self._origins: dict[Name, tuple[str, int]] = {}
        self._specs: list[TensorSpec] = []
        found: dict[str, list[_RanksNode]] = {}
        for ranks, parts in states:
            specs = {part.name: part.specs for part in parts}
            names = {part.name: list(names_of(part.name, part.specs)) for part in parts}
            for part in parts:
                found.setdefault(part.name, []).append(_RanksNode(ranks, part.name, part.tree, specs, names))
        self.parts = [self._part(name, views) for name, views in found.items()]
        if self._problems:
            told, more = self._problems[:MAX_PROBLEMS], len(self._problems) - MAX_PROBLEMS
            raise InvalidInputError(
                f"the states of the ranks differ; {_FLATTEN if self._has_groups else _EQUAL}; nothing was committed",
                *told,
                *([f"and {more} more"] if more > 0 else []),
            )

    def _part(self, name: str, views: Sequence[_RanksNode]) -> PartTree:
        self._specs = []
        if any(nth for view in views for _, _, nth in view.names[name]):
            self._problem((name,), views, lambda _: "keys that look alike, which ranks of unlike states cannot have")
        return PartTree(name, self._merged(views, (name,) if name else ()), self._specs)

    def _problem(self, path: Path, views: Sequence[_RanksNode], text: Callable[[_RanksNode], str]) -> None:
        self._has_groups = self._has_groups or "param_groups" in path
        told = [f"{text(view)} on {named(view.ranks, most=4)}" for view in views[:3]]
        self._problems.append(f"{shown(path)}: {', '.join(told)}{', ...' if len(views) > 3 else ''}")

    def _merged(self, views: Sequence[_RanksNode], path: Path) -> Node:
        """Return the nodes of one place, merged into one."""
        if any(view.tag == "optimizer" for view in views) and len({pack(view.node[:3]) for view in views}) > 1:
            views = [view.child(without_parameters(view.node)) for view in views]  # other parameters on other ranks
        node, tag = views[0].node, views[0].tag
        if any(view.tensor is not None for view in views):
            return self._tensor(views, path)
        if tag in STARTS and all(view.tag == tag for view in views):
            at = STARTS[tag]
            if len({pack(view.node[:at]) for view in views}) == 1 and (found := self._below(views, at, path)):
                return [*node[:at], *found]
        if len({pack(view.node) for view in views}) == 1:
            return node
        has_columns, nodes = any(view.tag == "columns" for view in views), [view.node for view in views]
        if (has_columns or tag in MAPPINGS) and (merged := _union_of_columns(nodes)) is not None:
            return merged
        if has_columns and any(_plain_value(one) is None for one in nodes):  # some ranks have tensors in it
            spread = [_without_columns(view) for view in views]
            if all(view.tag != "columns" for view in spread):
                return self._merged(spread, path)
        self._problem(path, views, _RanksNode.text)
        return node

    def _below(self, views: Sequence[_RanksNode], at: int, path: Path) -> list[Node]:
        """Return the merged fields of nodes of one kind, from position `at` on; []: sequences of different lengths."""
        if views[0].tag in OBJECTS:
            return [self._merged([view.child(view.node[at]) for view in views], path)]
        if views[0].tag in MAPPINGS:
            return self._mapping(views, at, path)
        if len({len(view.node[at]) for view in views}) > 1:
            return []
        items = zip(*([view.child(item) for item in view.node[at]] for view in views), strict=True)
        return [[self._merged(item, (*path, i)) for i, item in enumerate(items)]]

    def _mapping(self, views: Sequence[_RanksNode], at: int, path: Path) -> list[Node]:
        found: dict[bytes, tuple[Node, list[_RanksNode]]] = {}
        for view in views:
            for key, node in zip(view.node[at], view.node[at + 1], strict=True):
                found.setdefault(pack(key), (key, []))[1].append(view.child(node))
        self._refuse_equal_keys([*found.values()], path)
        nodes = []
        for key, below in found.values():
            child = (*path, key if type(key) in (str, int) else str(key))
            if len(below) < len(views) and any(has_own(view.node) for view in below):
                self._problem(child, below, lambda _: _OWN)
            nodes.append(self._merged(below, child))
        extra = [view.child(view.node[at + 2]) for view in views if len(view.node) > at + 2]
        metadata = [self._merged(extra, (*path, "_metadata"))] if extra else []
        return [[key for key, _ in found.values()], nodes, *metadata]

    def _refuse_equal_keys(self, found: Sequence[tuple[Node, list[_RanksNode]]], path: Path) -> None:
        """Note a problem for each two keys that are equal in Python, such as 7 and 7.0: a dict has only one of them."""
        kinds = {type(key) for key, _ in found}
        if len(kinds) == 1 and kinds <= {str, int}:
            return
        seen: dict[Any, tuple[Any, list[_RanksNode]]] = {}
        for node, views in found:
            key = _plain_key(node)
            other, others = seen.setdefault(key, (key, views))
            if others is not views:
                told = {id(view): other for view in others} | {id(view): key for view in views}
                both = [others[0], views[0], *others[1:], *views[1:]]
                self._problem((*path, str(other)), both, partial(_key_text, told))

    def _tensor(self, views: Sequence[_RanksNode], path: Path) -> Node:
        first = views[0]
        if first.tensor is None or any(view.form() != first.form() for view in views[1:]):
            self._problem(path, views, lambda view: view.text(path))
            return first.node
        name, spec = first.name(first.part, first.tensor), first.specs[first.part][first.tensor]
        if name not in self._places:
            self._places[name] = len(self._specs)
            root = first.name(*spec.tie) if spec.tie else name
            origin = self._origins.setdefault(root, (first.part, self._places[name]))
            tie = None if origin[0] == first.part else origin
            self._specs.append(msgspec.structs.replace(spec, tie=tie))
        return [first.tag, self._places[name], *first.node[2:]]


def _key_text(keys: Mapping[int, Any], view: _RanksNode) -> str:
    return f"the key {keys[id(view)]!r}, which equals another rank's in Python,"


def _plain_key(node: Node) -> Any:
    """Return the key that a node of a mapping stands for; if it is of a class of the program, its packed node."""
    try:
        return decode_plain(unpack_nodes(pack(node)))
    except (FormatError, InvalidInputError):
        return pack(node)


def _union_of_columns(nodes: Sequence[Node]) -> Node:
    """Return plain values, merged into one node, if some lie in columns; None: they differ, or are not plain."""
    found = [value[0] for node in nodes if (value := _plain_value(node)) is not None]
    try:
        return encode_plain(_union(found)) if len(found) == len(nodes) else None
    except ValueError:
        return None


def _without_columns(view: _RanksNode) -> _RanksNode:
    """Return a node with a node for each container; one of values of classes stays as it is."""
    value = _plain_value(view.node) if view.tag == "columns" else None
    return view if value is None else view.child(encode_plain(value[0]))


def _plain_value(node: Node) -> tuple[Any] | None:
    """Return the value of a node; None: there are tensors or own values in it, or values of classes."""
    try:
        value = decode_plain(unpack_nodes(pack(node)))
        return (value,) if pack(node) in _packed_forms(value) else None
    except (FormatError, ValueError):
        return None


def _packed_forms(value: Any) -> list[bytes]:
    """Return a plain value as packed nodes, without columns and with columns if it is large."""
    encoder = Encoder(lambda value, path: None, lambda value, path: None, columnar=True)
    return [pack(encode_plain(value)), pack(encoder.node(value, ()))]


def _union(values: Sequence[Any]) -> Any:
    """Return dicts, merged into one.

    Raises:
        ValueError: values differ.
    """
    first = values[0]
    if type(first) not in (dict, OrderedDict) or any(type(value) is not type(first) for value in values):
        if len({pack(encode_plain(value)) for value in values}) > 1:
            raise ValueError
        return first
    keys = dict.fromkeys(key for value in values for key in value)
    if len({pack(encode_plain(key)) for value in values for key in value}) > len(keys):
        raise ValueError  # 7 and 7.0, for example
    return type(first)((key, _union([value[key] for value in values if key in value])) for key in keys)
