"""Staging: the private copy of the state that a save reads, and the bytes that are the next save's bases for deltas.

An asynchronous save copies the state into spare buffers while its caller waits, and reads them afterwards. Once it has
committed, they become the base, and the buffers of the old base become the spare ones: two copies of the state in all.
A synchronous save of host memory reads the state itself, and overwrites the base chunk by chunk: one copy. A save that
fails leaves no base of its own. A tensor whose deltas were all rejected keeps no base for a while.

Tensors on a CUDA device are copied on that device, or into pinned host memory (`staging=`, engine/cuda/staging.py).
Those that have not changed for some saves are not copied (unchanged.py).
Without an engine for the device they are copied through host memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np

from ..arrays import Bytes
from ..checks import check_choice
from ..engine.registry import Engines
from ..errors import CapabilityError, out_of_memory
from ..format.chunking import INLINE_BYTES
from ..format.manifests.manifest import Manifest
from ..state.values.arrays import Memory, as_bytes
from ..state.values.held_array import Held
from ..state.walk.flatten import Part, flatten_and_learn
from ..state.walk.learner import DifferentStructureError
from ..state.walk.structure import Match
from ..threads import without_gc
from .inputs import InputKey, PartInput, TensorInput, cut_plain, inputs_of, plain_names, turns_of
from .known_state import KnownState
from .replicas import Replica, digests_of, spans
from .shares import Name, RankShares
from .unchanged import Trial, UnchangedGoneError, UnchangedTensors

if TYPE_CHECKING:
    from ..engine.cuda.sources import Sources
    from ..engine.cuda.staging import DeviceStaging

T = TypeVar("T", TensorInput, Replica)
Mode = Literal["auto", "device", "host"]
#: A tensor whose deltas never paid keeps no base for this many saves; then deltas are tried again. If they paid before,
#: they are tried again in the next save, then after 1, 2, 4, ... saves.
RETRY_AFTER_SAVES = 32
#: If plain tensors have more bytes than this, they are not copied whole: a rank learns their holders before the copy.
MAX_WHOLE_BYTES = 1024 * 1024 * 1024

#: Takes inputs that were made while holders were unknown, and returns them cut to the shares of this rank.
Learn = Callable[[Sequence[PartInput]], Sequence[PartInput]]


class Buffers(dict[InputKey, Memory]):
    """Bytes of tensors, (nbytes,) uint8."""

    def room(self, key: InputKey, nbytes: int) -> Bytes:
        """Return the host buffer of a tensor; make a new one if there is none of that size."""
        buffer = self.get(key)
        if not isinstance(buffer, np.ndarray) or buffer.size != nbytes:
            buffer = self[key] = np.empty(nbytes, np.uint8)
        return buffer

    def keep_only(self, keys: set[InputKey]) -> None:
        """Drop the buffers of all other tensors."""
        for gone in self.keys() - keys:
            del self[gone]


class Staging:
    """The buffers of one SnapshotManager. One save at a time uses them, in this order:

        inputs = staging.copy_state(state)()    asynchronous: the first call in the caller's thread, the second later
        inputs = staging.inputs(flatten(state)) or synchronous: the caller waits, and its own memory is read;
        with staging.saving(inputs):            waits until the copies are complete
            staging.use_base(inputs, id)        lends the bytes of snapshot `id`, if they are the ones kept here
            ...                                 the inputs are written, and committed
            staging.keep_as_base(inputs, id)    their bytes become the bases of the next save

    A save that raises within `saving`, or before it, leaves no base of its own.

    Args:
        keep_base: keep the bytes of the last save as the next one's base; else they are read back from the store.
        mode: where copies of CUDA tensors lie: "device", "host", or "auto" (by the free memory).
        shares: in a job of ranks: the boxes that this rank copies. None: one process copies all.

    Attributes:
        look_ahead: returns manifests whose chunks the next save may refer to; `prepare` calls it in the background.
    """

    def __init__(
        self,
        engines: Engines,
        *,
        keep_base: bool = True,
        mode: Mode = "auto",
        shares: RankShares | None = None,
    ) -> None:
        check_choice("staging", mode, get_args(Mode))
        self._engines, self._keep_base, self._mode = engines, keep_base, mode
        self.shares = shares
        self.look_ahead: Callable[[], Sequence[Manifest]] | None = None
        self._base = Buffers()
        self._spare = Buffers()
        self._base_id: str | None = None
        self._delta_rejected: dict[InputKey, int] = {}  # tensor -> saves until its deltas are tried again
        self._next_wait: dict[InputKey, int] = {}  # tensor -> how many these will be after the next rejection
        self._devices: DeviceStaging | None = None
        self._known: KnownState | None = None  # the structure of the last state
        self._unchanged = UnchangedTensors()

    def _on_device(self, value: Any) -> bool:
        """Return whether a value is a tensor on a device that has an engine."""
        return self._has_engine(getattr(value, "device", None))

    def _has_engine(self, device: Any) -> bool:
        """Return whether a device has an engine. NumPy arrays have the device "cpu", a str; values may have none."""
        return getattr(device, "type", "cpu") != "cpu" and self._engines.on_device(device)

    def use_shares(self, shares: RankShares) -> None:
        """Copy other boxes from the next save on: the holders of plain tensors are now known, or unknown again."""
        if shares != self.shares:
            self.shares, self._known = shares, None

    def use_holders(self, inputs: Sequence[PartInput], shares: RankShares) -> list[PartInput]:
        """Cut inputs to shares, whose holders are now known; plain tensors were copied whole, or not at all."""
        assert self.shares is not None
        cut, self.shares = cut_plain(inputs, shares, self.shares), shares
        if self._known is not None:
            self._known = KnownState(self._known.structure, cut, self._has_engine)
        if _are_copies(inputs):
            for tensor in _tensors(cut):
                is_cut = tensor.spec.nbytes >= INLINE_BYTES and tensor.key not in self._spare
                if is_cut and isinstance(tensor.copy, np.ndarray):
                    self._spare[tensor.key] = tensor.copy = tensor.copy.copy()  # frees the whole copy with the inputs
            self._spare.keep_only({tensor.key for tensor in _tensors(cut)})
        return cut

    def _must_learn_first(self, inputs: Sequence[PartInput]) -> bool:
        """Return whether plain tensors of unknown holders are too large to copy whole, or lie on a device."""
        if (shares := self.shares) is None:
            return False
        new = {name for name in plain_names(inputs) if not shares.knows(name)}
        held = [tensor for tensor in _tensors(inputs) if tensor.box_of and tensor.box_of.name in new]
        large = [tensor for tensor in held if tensor.spec.nbytes >= INLINE_BYTES]
        on_device = any(tensor.array and self._on_device(tensor.array.value) for tensor in large)
        return on_device or sum(tensor.spec.nbytes for tensor in held) > MAX_WHOLE_BYTES

    def copy_state(self, state: Any, learn: Learn | None = None) -> Callable[[], list[PartInput]]:
        """Flatten a state and copy it; a state with the structure of the last one is recognised, which is faster.

        Args:
            learn: see `copy`.

        Returns:
            A function that returns the inputs: it takes time, and can be called in the background.

        Raises:
            UnsupportedLeafError, InvalidInputError: see `flatten` and `copy`.
        """
        known, self._known = self._known, None  # None stays if an interrupt ends this
        if known is not None:
            with suppress(DifferentStructureError), without_gc():
                return self._copy_known(known, known.structure.match(state))
        with without_gc():
            return self._copy_and_learn(state, learn)

    def _copy_and_learn(self, state: Any, learn: Learn | None) -> Callable[[], list[PartInput]]:
        """Flatten a state and copy it; its structure becomes the known one."""
        parts, learnt = flatten_and_learn(state, of_rank=self.shares is not None)
        inputs = self._inputs_of(parts, learn)
        if learnt is None:
            return partial(list, self._copy(inputs))
        structure, arrays = learnt
        with suppress(DifferentStructureError):
            known, trees = KnownState(structure, inputs, self._has_engine), {p.key: p.tree for p in parts}
            return self._copy_known(known, structure.match_of(arrays, trees))
        copied = self._copy(inputs)

        def inputs_of_copies() -> list[PartInput]:
            self._known = KnownState(structure, copied, self._has_engine)
            return copied

        return inputs_of_copies

    def inputs(self, parts: Sequence[Part], learn: Learn | None = None) -> list[PartInput]:
        """Return the inputs of a save whose caller waits.

        If a tensor lies on a device with an engine, all are copied, see `copy`; else none is.
        """
        self._known = None  # it may be another structure: `use_holders`
        on_devices = any(self._on_device(held.value) for part in parts for held in part.arrays)
        return self.copy(parts, learn) if on_devices else inputs_of(parts, self.shares)

    def copy(self, parts: Sequence[Part], learn: Learn | None = None) -> list[PartInput]:
        """Copy every tensor of INLINE_BYTES or more into spare buffers; the smaller ones into new memory.

        Args:
            learn: in a job of ranks: called now if plain tensors whose holders this rank does not know are too large to
                be copied whole. Else the caller calls it with the inputs.

        Returns:
            The inputs, which do not refer to the caller's memory. Copies on a device are complete within `saving`.

        Raises:
            InvalidInputError: an array is not the one that was flattened, or is changed while it is copied.
        """
        return self._copy(self._inputs_of(parts, learn))

    def _inputs_of(self, parts: Sequence[Part], learn: Learn | None) -> list[PartInput]:
        """Return the inputs to copy, and drop the spare buffers of all other tensors."""
        inputs = inputs_of(parts, self.shares)
        if learn is not None and self._must_learn_first(inputs):
            inputs = list(learn(inputs))
        if self._spare:
            self._spare.keep_only({tensor.key for tensor in _tensors(inputs)})
        return inputs

    def _copy(self, inputs: list[PartInput]) -> list[PartInput]:
        with self._copying():
            on_host, on_devices = self._by_place(_tensors(inputs))
            for tensor, held in on_host:
                tensor.copy, tensor.array = self._copy_to_host(tensor.key, held), None
            for device, tensors in on_devices.items():
                self._copy_on_device(device, tensors)
            self._digest_copies(inputs)
            self._digest_replicas([one for part in inputs for one in part.replicas])
        return inputs

    def _by_place(self, inputs: Iterable[T]) -> tuple[list[tuple[T, Held]], dict[Any, list[tuple[T, Held]]]]:
        """Return the inputs whose arrays are read in host memory, and the others by device; each with its array."""
        on_host: list[tuple[T, Held]] = []
        on_devices: dict[Any, list[tuple[T, Held]]] = defaultdict(list)
        for one in inputs:
            if (held := one.array) is not None:
                is_on_device = held.spec.nbytes and self._on_device(held.value)
                (on_devices[held.value.device] if is_on_device else on_host).append((one, held))
        return on_host, on_devices

    def _digest_copies(self, inputs: Sequence[PartInput]) -> None:
        """Postpone the hashing of replicas of which this rank has a whole copy in host memory."""
        copies: dict[Name, Bytes] = {}
        for tensor in _tensors(inputs):
            of = tensor.box_of
            if of is not None and tensor.spec.shape == of.spec.shape and isinstance(tensor.copy, np.ndarray):
                copies[of.name] = tensor.copy
        for one in (one for part in inputs for one in part.replicas):
            if one.name in copies:
                one.array, one.digests = None, partial(digests_of, copies[one.name], self._engines.digest_seed)

    def _digest_replicas(self, replicas: Sequence[Replica]) -> None:
        """Hash the replicas that still have arrays, of a state that was not recognised."""
        on_host, on_devices = self._by_place(replicas)
        for one, held in on_host:
            one.digests = held.memory(lambda alias: digests_of(as_bytes(alias), self._engines.digest_seed)).copy
        for one in replicas:
            one.array = None
        for device, chosen in on_devices.items():
            from ..engine.cuda.sources import Sources

            nbytes = np.array([held.spec.nbytes for _, held in chosen], np.int64)
            sources = Sources.of(device, [one.name for one, _ in chosen], nbytes, [held.take() for _, held in chosen])
            with _confirmed([held for _, held in chosen]):
                found_at = self._start_digests(sources)
            for i, (one, _) in enumerate(chosen):
                one.digests = partial(found_at, i) if found_at else None

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Release copies on devices if the caller's memory cannot be copied."""
        try:
            with out_of_memory("save", "nothing was committed; free memory, or save with async_save=False"):
                yield
        except BaseException:
            self.release_copies()
            raise

    def _copy_to_host(self, key: InputKey, held: Held) -> Bytes:
        nbytes = held.spec.nbytes
        room = np.empty(nbytes, np.uint8) if nbytes < INLINE_BYTES else self._spare.room(key, nbytes)
        held.copy_into(room)
        return room

    def _copy_on_device(self, device: Any, tensors: list[tuple[TensorInput, Held]]) -> None:
        from ..engine.cuda.sources import Sources

        keys, nbytes = [tensor.key for tensor, _ in tensors], [tensor.spec.nbytes for tensor, _ in tensors]
        sources = Sources.of(device, keys, np.array(nbytes, np.int64), [held.take() for _, held in tensors])
        with _confirmed([held for _, held in tensors]):
            memories = self._copy_of(sources)
        for (tensor, _), memory in zip(tensors, memories(), strict=True):
            tensor.copy, tensor.array = memory, None

    def _copy_of(self, sources: Sources) -> Callable[[], Sequence[Memory]]:
        """Begin to copy tensors of a device; return a function that returns the copies."""
        return self._on_devices().copy(sources, self._spare, self._base, self._delta_rejected, INLINE_BYTES)

    def _on_devices(self) -> DeviceStaging:
        if self._devices is None:
            from ..engine.cuda.staging import DeviceStaging

            self._devices = DeviceStaging(self._engines, self._mode, twice=self._keep_base)
        return self._devices

    def _copy_known(self, known: KnownState, match: Match) -> Callable[[], list[PartInput]]:
        """Copy a state that was recognised; keep its structure as the known one.

        Raises:
            DifferentStructureError: its tensors have moved meanwhile; copies may have begun.
            InvalidInputError: one has changed meanwhile.
        """
        copies: list[tuple[Sequence[int], Callable[[], Sequence[Memory]]]]
        digests: list[tuple[Sequence[int], Callable[[int], Bytes]]] = []  # of replicas: rows, and how to get the i-th
        seed = self._engines.digest_seed
        groups, unchanged = dict(known.copied.on_devices), dict[int, Bytes]()
        with self._copying():
            try:
                trials = self._start_trials(known, match)
                for device, (trial, _) in trials.items():
                    if self._unchanged.tries_all:
                        del groups[device]
                    else:  # most likely all of them are unchanged: the others are copied before the host waits
                        groups[device] = trial.rest
                begun = {device: self._copy_of(group.sources(device, match)) for device, group in groups.items()}
                for device, group in known.hashed.on_devices.items():
                    if (found := self._start_digests(group.sources(device, match))) is not None:
                        digests.append((group.rows, found))
                small, small_replica = known.small.copy(match)
                middle, middle_replica = self._copy_middle(known, match)
                for device, (trial, wait) in trials.items():
                    group, same = self._unchanged.split(trial, wait())
                    unchanged.update(same)
                    if group is not groups.get(device):
                        begun.pop(device, None)
                        groups[device], begun[device] = group, self._copy_of(group.sources(device, match))
            except RuntimeError:  # torch found a storage that is now too short
                match.confirm()
                raise
            match.confirm()
            copies = [(groups[device].rows, memories) for device, memories in begun.items()]
            copies.append((known.copied.small.rows, small))
            copies.append((known.copied.on_host.rows, partial(list, middle)))
            for row, held in known.copied.held(match):
                copies.append(([row], partial(list, [self._copy_to_host(known.keys[row], held)])))
            digests.append((known.hashed.small.rows, lambda i: digests_of(small_replica(i), seed)))
            digests.append((known.hashed.on_host.rows, middle_replica.__getitem__))
            for row, held in known.hashed.held(match):
                hashed = held.memory(lambda alias: digests_of(as_bytes(alias), seed))
                digests.append(([row], lambda _, hashed=hashed: hashed))  # type: ignore[misc]
        self._known = known
        return partial(known.inputs, match, copies, digests, unchanged)

    def _start_trials(self, known: KnownState, match: Match) -> dict[Any, tuple[Trial, Callable[[], Bytes]]]:
        """Begin to hash the tensors that may be unchanged; return, by device, which, and what waits for the digests."""
        trials = dict[Any, tuple[Trial, Callable[[], Bytes]]]()
        for device, group in known.copied.on_devices.items():
            if (trial := self._unchanged.trial(device, group)) is not None:
                sources, seed = trial.tried.sources(device, match), self._engines.digest_seed
                if (found := self._on_devices().start_digests(sources, trial.spans, seed)) is not None:
                    trials[device] = trial, found
        return trials

    def _copy_middle(self, known: KnownState, match: Match) -> tuple[list[Bytes], list[Bytes]]:
        """Return copies of the tensors in host memory that are larger than small ones, and the digests of replicas."""
        copied, hashed = known.copied.on_host, known.hashed.on_host
        if not copied.keys and not hashed.keys:
            return [], []
        match.confirm()  # else they may have been freed since the match
        copies = copied.copy_to_host(match, self._spare.room)
        return copies, [digests_of(memory, self._engines.digest_seed) for memory in hashed.views(match)]

    def _start_digests(self, sources: Sources) -> Callable[[int], Bytes] | None:
        """Begin to hash replicas on their device; they are complete when the copies are."""
        of_spans = spans(sources.nbytes)
        found = self._on_devices().start_digests(sources, of_spans, self._engines.digest_seed)
        return found and (lambda i: found()[slice(*np.searchsorted(of_spans[0], [i, i + 1]).tolist())])

    def prepare(self, parts: Sequence[Part], *, is_early: bool = False) -> Callable[[], None]:
        """Return a function that allocates the memory for the copies of a state ahead. It holds none of its tensors.

        Args:
            is_early: page-lock host memory if copies of CUDA tensors will lie there, and take no other memory: training
                has not taken its own yet.
        """
        inputs = inputs_of(parts, self.shares)
        if self.shares is not None and self._must_learn_first(inputs):
            as_if_all_hold = replace(self.shares, holders=self.shares.holders or {}, known=None)
            inputs = inputs_of(parts, replace(as_if_all_hold, turns=turns_of(inputs, as_if_all_hold)))
        on_host, on_devices = self._by_place(_tensors(inputs))
        hosted = {} if is_early else {tensor.key: tensor.spec.nbytes for tensor, _ in on_host}
        sources: list[Sources] = []
        for device, tensors in on_devices.items():
            from ..engine.cuda.sources import Sources

            nbytes = np.array([tensor.spec.nbytes for tensor, _ in tensors], np.int64)
            sources.append(Sources.of(device, [tensor.key for tensor, _ in tensors], nbytes, ()))
        devices = [self._on_devices()] if sources else []

        def allocate() -> None:
            if sources and self.look_ahead is not None:
                self._unchanged.expect(self.look_ahead())
            only_locks = is_early or self._unchanged.held is not None  # else it is not known yet what is copied
            for key, nbytes in hosted.items():
                if nbytes >= INLINE_BYTES:
                    self._spare.room(key, nbytes).fill(0)
            for staging, one in product(devices, sources):
                staging.prepare(one, self._spare, self._base, self._delta_rejected, INLINE_BYTES, is_early=only_locks)

        return allocate

    def prepare_next(self) -> None:
        """Allocate memory for the next save, after one of the first ones: locking it takes longer than the copies."""
        if self._devices is not None:  # on a device, not before it is known which tensors the next save copies
            is_early, base, spare = self._unchanged.tries_all, self._base, self._spare
            self._devices.prepare_next(spare, base, self._delta_rejected, INLINE_BYTES, is_early=is_early)

    @contextmanager
    def saving(self, inputs: Sequence[PartInput]) -> Iterator[None]:
        """Wait until the last copies are complete; release copies on devices if the save fails."""
        try:
            if self._devices is not None:
                try:
                    self._devices.wait_copied(self._spare, self._base)
                except CapabilityError:  # its kernels cannot be loaded
                    if self._engines.required:
                        raise
                    self._move_to_host(inputs)
            yield
        except BaseException as error:
            if isinstance(error, UnchangedGoneError):
                self._unchanged.forget()
            self.release_copies()
            raise

    def _move_to_host(self, inputs: Sequence[PartInput]) -> None:
        """Move copies to host memory, from devices whose engine cannot be loaded."""
        for tensor in _tensors(inputs):
            memory = tensor.copy
            if memory is not None and not isinstance(memory, np.ndarray):
                on_host = memory.array if hasattr(memory, "array") else memory.cpu().numpy()
                tensor.copy = on_host[: tensor.spec.nbytes]
        self.release_copies()
        self._devices, self._known = None, None
        self._spare, self._base, self._base_id = Buffers(), Buffers(), None

    def use_base(self, inputs: Sequence[PartInput], snapshot_id: str | None) -> None:
        """Lend each tensor its bytes in snapshot `snapshot_id`, if they are kept here; set where its new bytes go."""
        known = snapshot_id is not None and snapshot_id == self._base_id
        for tensor in _tensors(inputs):
            tensor.base = self._base.get(tensor.key) if known else None
            tensor.may_delta = tensor.key not in self._delta_rejected
            tensor.stored = tensor.bases_tried = tensor.deltas_stored = 0
        if _are_copies(inputs):
            return
        self._base_id = None  # from here on the base is half overwritten: it is no base until `keep_as_base`
        if self._keep_base:
            self._base.keep_only({tensor.key for tensor in _tensors(inputs)})
            for tensor in _tensors(inputs):
                if tensor.spec.nbytes >= INLINE_BYTES:
                    tensor.keep_in = self._base.room(tensor.key, tensor.spec.nbytes)

    def keep_as_base(self, inputs: Sequence[PartInput], snapshot_id: str, manifests: Sequence[Manifest] = ()) -> None:
        """Keep the bytes of a committed save as the next base, except for tensors whose deltas were rejected.

        Args:
            manifests: of what this process has saved: the next save may find their chunks unchanged.
        """
        self._unchanged.note(_tensors(inputs), manifests)
        self._delta_rejected = {key: left - 1 for key, left in self._delta_rejected.items() if left > 1}
        for tensor in _tensors(inputs):
            if tensor.deltas_stored:
                self._next_wait[tensor.key] = 0
            elif tensor.bases_tried:
                wait = self._next_wait.get(tensor.key, RETRY_AFTER_SAVES)
                self._next_wait[tensor.key] = min(max(1, 2 * wait), RETRY_AFTER_SAVES)
                if wait:
                    self._delta_rejected[tensor.key] = wait
        if self._devices is not None and self._delta_rejected:
            nbytes: dict[Any, dict[InputKey, int]] = defaultdict(dict)
            for tensor in _tensors(inputs):
                if tensor.key in self._delta_rejected and not isinstance(tensor.copy, np.ndarray | None):
                    nbytes[tensor.copy.device][tensor.key] = tensor.spec.nbytes
            self._devices.lay_apart(nbytes)
        for tensor in _tensors(inputs):
            tensor.base = None  # else its memory could not be released before the inputs are
        if self._keep_base and _are_copies(inputs):
            self._base, self._spare = self._spare, self._base
            self._keep_unchanged({tensor.key for tensor in _tensors(inputs) if tensor.digests is not None})
            for key in self._delta_rejected.keys() & self._base.keys():
                self._spare[key] = self._base.pop(key)
        self.release_copies()
        self._base_id = snapshot_id if self._keep_base else None

    def _keep_unchanged(self, keys: set[InputKey]) -> None:
        """Keep the old bases, now spare, of tensors that were not copied; but drop them on devices."""
        for key in keys:
            old, other = self._spare.pop(key, None), self._base.pop(key, None)
            if hasattr(old, "array"):  # page-locked: to lock memory again would take long
                self._base[key] = old
                if other is not None:
                    self._spare[key] = other

    def release_copies(self) -> None:
        """Release copies on devices that no save needs any more."""
        if self._devices is not None:
            self._devices.release_memory(self._spare)

    def clear(self) -> None:
        """Release all memory."""
        self._base, self._spare, self._base_id, self._known = Buffers(), Buffers(), None, None
        self._unchanged.forget()


@contextmanager
def _confirmed(arrays: Sequence[Held]) -> Iterator[None]:
    """Confirm arrays after a read of their aliases, also if torch found a storage that is now too short."""
    try:
        yield
    except RuntimeError:
        for held in arrays:
            held.confirm()
        raise
    for held in arrays:
        held.confirm()


def _tensors(inputs: Sequence[PartInput]) -> Iterator[TensorInput]:
    return (tensor for part in inputs for tensor in part.tensors)


def _are_copies(inputs: Sequence[PartInput]) -> bool:
    """Return whether staging copied the inputs: all of them, or none."""
    return any(tensor.copy is not None or tensor.digests is not None for tensor in _tensors(inputs))
