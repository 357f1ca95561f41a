"""Inputs of a save: the checked request, each tensor as one object on its way to the store, and the lineage of runs.

In: the arguments of the caller, and the parts that `state.flatten` returns. Out: a `SaveRequest`, and the parts as
`PartInput`s. `Lineage` says which snapshot the next save of a run continues from. Staging, the chunk writer and the
manifest writer read the tensors of inputs, and set their fields.

Invariant: a save owns its inputs, and one thread at a time uses them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any, SupportsFloat

import msgspec

from ..arrays import Bytes
from ..checks import check_list, check_metrics, check_name, check_step, check_tags, encode_metadata
from ..context import Context
from ..errors import SnapstoreError
from ..format.records import ManifestRef, Snapshot
from ..protocol.session import SaveSession
from ..state.values.arrays import Memory, require_memory_of_tensors
from ..state.values.held_array import Held
from ..state.values.metrics import MetricRead
from ..state.values.tensors import Node, TensorSpec
from ..state.walk.flatten import Part
from ..state.walk.learner import own_key
from ..state.walk.stateful import is_stateful
from .replicas import Replica, replicas_of
from .shares import Name, Piece, RankShares, balanced_turns, names_of

if TYPE_CHECKING:
    from ..format.manifests.manifest import Manifest

#: Part, path, and a number among the tensors with that path: keys such as 1.0 and "1.0" give one path. A rank adds the
#: box, as offsets and sizes.
InputKey = tuple[Any, ...]


@dataclass(slots=True)
class SaveRequest:
    """The arguments of `Repository.save` and `SnapshotManager.save`, checked. See there for their meaning.

    Attributes:
        started: when the caller began [s, time.monotonic].
        stall_s: how long the caller waited; None: until the commit.
        unwanted: why this save must end without a commit; "": it need not. Any thread may set it while the save runs.
        is_awaited: whether somebody waits for this save: then its next attempt is the last one (retrying.py).
        is_followed: whether a newer save waits for this one to end, on another rank than rank 0.
        replaced_by: run@step of the newer save that replaces this one; "": there is none.
        warns: whether further attempts may follow one that fails, if it is the first one.
        is_suspect: whether an attempt has failed since the last commit of this manager.
        is_open: whether the store has answered the attempt that runs; in a job, the stores of all ranks.
        look_open: returns the same, in a job whose stores have not all answered yet; any thread may call it.
        is_pausing: whether no attempt runs: the next one is due after a pause.
        attempted: when the attempt that runs has begun [s, time.monotonic].
        is_last: whether no attempt follows the one that runs.
        decide: returns whether another attempt follows the one that has failed with an error. It is asked once.
        watch: `require_wanted`, always the same object.
        on_retry: called with the error of each failed attempt that another one follows.
        number: of this save among those of the job's ranks.
        last: id of this process's last save of the run, if it has not restored the run since.
        first_seq: the lowest sequence number to take.
        before_commit: called once all tensors are stored; what it raises ends the save without a commit.
        created: when the state was made [s since the epoch]; None: at the commit.

    Raises:
        InvalidInputError: an argument cannot be saved, or tensors have no memory here.
    """

    run: str
    step: int
    parent: str | None = None
    bases: Sequence[str] = ()
    metrics: InitVar[Mapping[str, SupportsFloat] | None] = None
    metadata: Any = None
    tags: Sequence[str] = ()
    full: bool = False
    started: float = field(default_factory=time.monotonic)
    stall_s: float | None = None
    unwanted: str = ""
    is_awaited: bool = False
    is_followed: bool = False
    replaced_by: str = ""
    warns: bool = False
    is_suspect: bool = False
    is_open: bool = False
    look_open: Callable[[], bool] = lambda: False
    is_pausing: bool = False
    attempted: float = field(default_factory=time.monotonic)
    is_last: bool = True
    decide: Callable[[BaseException], bool] = lambda error: False
    on_retry: Callable[[Exception], object] = lambda error: None
    number: int = 0
    last: str | None = None
    first_seq: int = 0
    before_commit: Callable[[], None] = lambda: None
    created: float | None = None
    metadata_node: msgspec.Raw = field(init=False)
    _metrics: dict[str, MetricRead] = field(init=False)
    watch: Callable[[], None] = field(init=False)

    def __post_init__(self, metrics: Mapping[str, SupportsFloat] | None) -> None:
        require_memory_of_tensors("save")
        self.run = check_name("run", self.run)
        for name, given in (("tags", self.tags), ("bases", self.bases)):
            check_list(name, given)
        self.step = check_step(self.step)
        self.tags = check_tags(self.tags)
        self._metrics = check_metrics(metrics or {})
        self.metadata_node = encode_metadata(self.metadata)
        self.watch = self.require_wanted

    @property
    def ref(self) -> str:
        """Return "run@step"."""
        return f"{self.run}@{self.step}"

    def require_wanted(self) -> None:
        """Raise SnapstoreError if this save must end without a commit."""
        if self.unwanted:
            raise SnapstoreError(f"save {self.ref}: {self.unwanted}; nothing was committed")

    def read_metrics(self) -> dict[str, float]:
        """Return the metrics; wait until devices have computed them."""
        return {name: read() for name, read in self._metrics.items()}

    def resolve(self, context: Context, lineage: Lineage) -> None:
        """Replace the references of parent and bases by ids; without a parent, take that of the lineage.

        Raises:
            NotFoundError, InvalidInputError: a reference names nothing, or several snapshots.
        """
        context.index.check_process()
        parent, self.last, self.first_seq = lineage.next_save(self.run)
        self.bases = [context.index.find(ref).id for ref in self.bases]
        self.parent = context.index.find(self.parent).id if self.parent is not None else parent

    def session(self, context: Context) -> SaveSession:
        """Return the session of this save, not begun yet; `resolve` was called before."""
        parent, also = self.parent, self.bases
        return SaveSession(
            context, self.run, self.step, parent=parent, also=also, last=self.last, first_seq=self.first_seq
        )


class BoxOf(msgspec.Struct, frozen=True, gc=False):
    """The whole tensor that a box belongs to.

    Attributes:
        name: part, path, and the number among the tensors with that path.
        spec: of the whole tensor, without ties: those are in the root manifest.
        number: of the tensor among those of its part.
        piece: where the box lies, in the whole tensor and in the local one.
        same_path: the specs of all tensors of this path, if there are several.
    """

    name: Name
    spec: TensorSpec
    number: int
    piece: Piece
    same_path: Sequence[TensorSpec] = ()


class TensorInput(msgspec.Struct, eq=False, gc=False):
    """A tensor on its way to the store, or a box of one.

    Attributes:
        key: its name, the same in the next save.
        spec: its path, kind, dtype and shape, and the dimension order in memory of the tensor that has it; the shape of
            a box is its sizes.
        box_of: the tensor that this box belongs to; None: it is a whole tensor.
        array: the caller's array; None once its bytes are copied.
        copy: its bytes, (nbytes,) uint8, as staging copied them; None: the caller's memory is read.
        digests: of its chunks (n, 16), if it was not copied because a base has all of them. `array` is for the case
            that the base does not; it may have changed.
        base: its bytes in the prior snapshot, (nbytes,) uint8, if they are cached.
        keep_in: where its bytes go once `base` is no longer needed, (nbytes,) uint8, or None. It may be `base`.
        lent: whether the caller may change or free the memory as soon as the chunk writer has added the tensor.
        may_delta: whether deltas are tried.
        stored: how many of its chunks no base had.
        bases_tried, deltas_stored: how many of its chunks had a full base, and how many became deltas.
    """

    key: InputKey
    spec: TensorSpec
    array: Held | None
    copy: Memory | None = None
    digests: Bytes | None = None
    base: Memory | None = None
    keep_in: Bytes | None = None
    lent: bool = False
    box_of: BoxOf | None = None
    may_delta: bool = True
    stored: int = 0
    bases_tried: int = 0
    deltas_stored: int = 0

    def number(self, position: int) -> int:
        """Return the number of the tensor among those of its part; `position` is that of this input."""
        return position if self.box_of is None else self.box_of.number

    def data(self, memory_of: Callable[[Any], Memory]) -> Memory:
        """Return the bytes, (nbytes,) uint8: the copy, or the caller's memory as `memory_of` gives it.

        Raises:
            InvalidInputError: the array is not the one that was flattened.
        """
        if self.array is None or self.copy is not None:
            return self.copy
        return self.array.memory(memory_of)

    def confirm(self) -> None:
        """Check that the caller's memory is still this tensor's; a copy needs no check.

        Raises:
            InvalidInputError: it is not.
        """
        if self.copy is None and self.array is not None:
            self.array.confirm()


@dataclass(slots=True, eq=False)
class PartInput:
    """One part of a state on its way to the store; see `state.flatten.Part`.

    Attributes:
        tensors: in order. Those of an iterator (streaming.py) are made one at a time; `tree` is complete after them.
        once: whether `tensors` can be gone through only once.
        specs: in a job of ranks: the whole tensors of the part, as its tree counts them; `tensors` are the boxes that
            this rank stores.
        plain: in a job of ranks: the numbers of the tensors among `specs` that are not sharded.
        own_nodes: see `state.flatten.Part`.
        replicas: in a job of ranks: the tensors of which other ranks hold the same bytes.
    """

    name: str
    tree: Node
    tensors: Iterable[TensorInput]
    once: bool = False
    specs: Sequence[TensorSpec] = ()
    own_nodes: Sequence[tuple[Node, int]] | None = None
    replicas: Sequence[Replica] = ()
    plain: Sequence[int] = ()

    @property
    def key(self) -> str:
        """Return a name that no other part of the state has; see `state.flatten.Part`."""
        return self.name if self.own_nodes is None else own_key(self.name)


def inputs_of(parts: Sequence[Part], shares: RankShares | None = None) -> list[PartInput]:
    """Return the parts of a flattened state as inputs; nothing is copied.

    Args:
        shares: which boxes this rank stores; None: there is one process, which stores all.
    """
    if shares is None:
        return [PartInput(part.name, part.tree, list(_tensors(part))) for part in parts]
    inputs = []
    for part in parts:
        if part.own_nodes is not None:
            inputs.append(PartInput(part.name, part.tree, list(_tensors(part)), own_nodes=part.own_nodes))
        else:
            boxes, replicas = list(_boxes(part, shares)), list(replicas_of(part, shares))
            inputs.append(PartInput(part.name, part.tree, boxes, specs=part.specs, replicas=replicas, plain=part.plain))
    return inputs


def _tensors(part: Part) -> Iterator[TensorInput]:
    for name, array in zip(names_of(part.key, part.specs), part.arrays, strict=True):
        yield TensorInput(name, array.spec, array)


def _boxes(part: Part, shares: RankShares) -> Iterator[TensorInput]:
    """Yield the boxes of a part that a rank stores."""
    names = names_of(part.name, part.specs)
    for number, (name, held, sharding) in enumerate(zip(names, part.arrays, part.shardings, strict=True)):
        pieces = shares.pieces(name, part.specs[number], sharding, may_differ=number in part.buffers)
        for of, piece in zip(_boxes_of(name, part.specs, number, pieces), pieces, strict=True):
            spec = msgspec.structs.replace(of.spec, shape=piece.sizes, dim_order=held.spec.dim_order)
            key = (*name, piece.offsets, piece.sizes)
            yield TensorInput(key, spec, piece.held(held), box_of=of)


def plain_names(parts: Iterable[Part | PartInput]) -> frozenset[Name]:
    """Return the names of the tensors of a rank that are not sharded."""
    found = set[Name]()
    for part in parts:
        plain = set(part.plain)
        found.update(name for i, name in enumerate(names_of(part.name, part.specs)) if i in plain)
    return frozenset(found)


def turns_of(inputs: Sequence[PartInput], shares: RankShares) -> dict[Name, int]:
    """Return the turns of the plain tensors that all ranks hold by `shares`, whose turns stay; see `balanced_turns`."""
    names, holders = plain_names(inputs), shares.holders or {}
    specs = {
        name: spec
        for part in inputs
        for name, spec in zip(names_of(part.name, part.specs), part.specs, strict=True)
        if name in names and name not in holders
    }
    return balanced_turns(specs, shares.turns, shares.world_size, shares.chunk_bytes)


def cut_plain(inputs: Sequence[PartInput], shares: RankShares, old: RankShares) -> list[PartInput]:
    """Return inputs cut to the shares of this rank.

    Only plain tensors whose holders `old` does not know are cut: the inputs have these whole.
    """
    found = []
    for part in inputs:
        if part.own_nodes is None:
            names = {name for name in plain_names([part]) if not old.knows(name)}
            buffers = {one.name for one in part.replicas if one.is_buffer}
            boxes = [box for tensor in part.tensors for box in _cut(tensor, names, buffers, shares)]
            for one in part.replicas:
                one.group = shares.group(one.name, None) if one.name in names else one.group
            own = [one for one in part.replicas if one.name not in names or shares.rank in one.group]
            part = replace(part, tensors=boxes, replicas=[one for one in own if len(one.group) > 1])
        found.append(part)
    return found


def _cut(
    tensor: TensorInput, plain: Container[Name], buffers: Container[Name], shares: RankShares
) -> Iterator[TensorInput]:
    """Yield the boxes of a tensor that this rank stores; only those of `plain` are cut."""
    of = tensor.box_of
    if of is None or of.name not in plain:
        yield tensor
        return
    for piece in shares.pieces(of.name, of.spec, None, may_differ=of.name in buffers):
        spec, copy = msgspec.structs.replace(tensor.spec, shape=piece.sizes), tensor.copy
        if copy is not None and piece.sizes != of.spec.shape:
            start = piece.first_row * (spec.nbytes // piece.sizes[0])
            span = slice(start, start + spec.nbytes)
            copy = (
                replace(copy, array=copy.array[span]) if hasattr(copy, "array") else copy[span]
            )  # the copy is page-locked memory, or an array
        array = None if tensor.array is None else piece.held(tensor.array)
        box_of = msgspec.structs.replace(of, piece=piece)
        yield TensorInput((*of.name, piece.offsets, piece.sizes), spec, array, copy, box_of=box_of)


def _boxes_of(name: Name, specs: Sequence[TensorSpec], number: int, pieces: Sequence[Piece]) -> Iterator[BoxOf]:
    """Yield the `BoxOf` of each box that a rank stores of tensor `number` of a part."""
    whole = msgspec.structs.replace(specs[number], tie=None) if pieces else specs[number]
    alike: list[TensorSpec] = []
    if name[2] and pieces:
        alike = [msgspec.structs.replace(spec, tie=None) for spec in specs if spec.path == whole.path]
    for piece in pieces:
        yield BoxOf(name, whole, number, piece, tuple(alike))


#: The manifests of the runs that were saved last are kept, of so many. A process may save thousands of runs.
CACHED_RUNS = 8


def is_stream(state: Any) -> bool:
    """Return whether a state is an iterator of (path, tensor), or the items of a dict."""
    return isinstance(state, Iterator | ItemsView) and not is_stateful(state)


class Lineage:
    """The parents of the next saves of one Repository, by run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}  # run -> id of the parent of its next save
        self._saved: dict[str, str] = {}  # run -> id of the last save, until a restore
        self._seqs: dict[str, Callable[[], int]] = {}  # run -> what gives the lowest sequence number of its next save
        self._manifests: dict[str, dict[str, Manifest]] = {}  # run -> manifests of its last save, by SHA-256
        self._named: dict[str, list[ManifestRef]] = {}  # run -> the manifests that the record of that save names

    def next_save(self, run: str) -> tuple[str | None, str | None, int]:
        """Return for the next save of a run: its parent, the id of the last save since a restore, its lowest number."""
        with self._lock:
            parent, last, lowest = self._last.get(run), self._saved.get(run), self._seqs.get(run)
        return parent, last, lowest() if lowest is not None else 0

    def number_from(self, run: str, lowest: Callable[[], int]) -> None:
        """Let a run's next saves take sequence numbers from that on which `lowest` returns; it must not block."""
        with self._lock:
            self._seqs[run] = lowest

    def cached_manifests(self) -> Mapping[str, Manifest]:
        """Return the manifests of the last saves of a few runs, by SHA-256."""
        with self._lock:
            return {name: m for of_run in self._manifests.values() for name, m in of_run.items()}

    def own_children(self, run: str) -> tuple[Sequence[ManifestRef], Sequence[Manifest]]:
        """Return the manifests that the record of a run's last save names, and the children that this rank wrote."""
        with self._lock:
            found = self._manifests.get(run, {}).values()
            return self._named.get(run, ()), [m for m in found if m.header.world_size and not m.header.children]

    def go_on_from(self, run: str, snapshot: Snapshot) -> None:
        """Make this snapshot the parent of the run's next save."""
        with self._lock:
            self._last[run] = snapshot.id
            self._saved.pop(run, None)

    def note_saved(self, snapshot: Snapshot, manifests: dict[str, Manifest]) -> None:
        """Make this snapshot, with these manifests by SHA-256, the parent of the run's next save."""
        self.go_on_from(snapshot.run, snapshot)
        with self._lock:
            self._manifests.pop(snapshot.run, None)  # else a run keeps its place in the dict
            self._manifests[snapshot.run], self._named[snapshot.run] = manifests, snapshot.manifests
            while len(self._manifests) > CACHED_RUNS:
                oldest = next(iter(self._manifests))
                del self._manifests[oldest], self._named[oldest]
            self._saved[snapshot.run] = snapshot.id
