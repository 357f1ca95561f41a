"""The position of a DataLoader as an object of a state: the batches that a loop has got, and how they were drawn.

In: a DataLoader of torch. Out: an object that yields the same batches, and has `state_dict` and `load_state_dict`. The
state has the generators and the samplers as they were when the epoch began, and the number of its batches that the
loop has got. A resumed epoch begins with these generators, and skips the indices of these batches without reading
data. Then it puts the generators back, since the first run drew no number at this point.

Workers read ahead of the loop. So each batch comes with the generators of its worker, as they were after it. Worker
number w gets the batches w, w + workers, ...: a round is one batch of each. A resumed epoch begins a round, with the
generators from the end of the round before it, and drops the batches of this round that the loop has got.

`_Epoch` reads the loader through its public interface: a copy of the loader has another sampler, collate_fn and
worker_init_fn. A process that has a DataLoader has imported torch.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np
import xxhash

from ...errors import InvalidInputError
from ...text import log
from .rng import RngState
from .stateful import is_stateful

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

T_co = TypeVar("T_co", covariant=True)

#: Plain values: the state of a generator, or of the generators of a process.
Values = dict[str, Any]


def resumable(loader: DataLoader[T_co]) -> ResumableLoader[T_co]:
    """Return a loader that yields the batches of a DataLoader, and whose position in the epoch is state.

        loader = snapstore.resumable(DataLoader(data, batch_size=32, shuffle=True, num_workers=4))
        state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": snapstore.RngState()}

    After `restore_into(state)`, the first loop over it gets the rest of the epoch: the batches that the first run would
    have got, in their order. If the snapshot was taken at the last batch of an epoch, that rest is empty. The next
    epochs are those of the first run if `RngState` is in the state, too, or if the loader has a generator of its own.
    The random numbers that workers draw from Python's, NumPy's and torch's global generators are those of the first
    run; a generator that the dataset itself holds is not known. After a `break` the epoch is over, as with any
    DataLoader.

    Args:
        loader: a DataLoader with a sampler, such as one with `shuffle=True`, a DistributedSampler or a batch_sampler.
            It is copied: set its attributes before. One with a state of its own, such as torchdata's
            StatefulDataLoader, keeps that state.

    Raises:
        InvalidInputError: it is no DataLoader; it has an IterableDataset, whose position only the dataset knows; it
            yields batches in the order in which they get ready; or its class has an `__iter__` of its own, or with
            workers a `_get_iterator`.
    """
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(loader, ResumableLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise InvalidInputError(
            f"resumable: expected a DataLoader of torch, got {type(loader).__name__}; an object with state_dict and "
            "load_state_dict goes into the state as it is"
        )
    name = type(loader).__name__
    if is_stateful(loader) and not type(loader).__module__.startswith("accelerate."):
        return _StatefulLoader(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise InvalidInputError(
            f"resumable: the {name} has an IterableDataset ({type(loader.dataset).__name__}), and only the dataset "
            "knows its position: give the dataset state_dict and load_state_dict, and pass torchdata's "
            "StatefulDataLoader in place of DataLoader; or make it a dataset with __getitem__ and __len__"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise InvalidInputError(
            f"resumable: {name} has an __iter__ of its own, so its order is not known; pass the DataLoader that it is "
            "made from (for accelerate, see snapstore.integrations.accelerate)"
        )
    if loader.num_workers and type(loader)._get_iterator is not DataLoader._get_iterator:
        raise InvalidInputError(
            f"resumable: {name} changes the batches of its workers by a _get_iterator of its own, and they come with "
            "the workers' generators here; pass num_workers=0"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise InvalidInputError(
            f"resumable: the {name} has in_order=False, so its batches come in another order in each run; pass "
            "in_order=True"
        )
    return ResumableLoader(loader)


class ResumableLoader(Generic[T_co]):
    """The batches of a DataLoader; its position in the epoch is its state. `resumable` makes one.

    Its other attributes, such as `sampler` and `dataset`, are those of the DataLoader.

    Attributes:
        per_rank: makes a save of several ranks keep the position of each.
    """

    per_rank = True
    __slots__ = ("__weakref__", "_alive", "_copy", "_indices", "_loader", "_resume", "_seeded", "_warned", "_workers")

    def __init__(self, loader: DataLoader[T_co]) -> None:
        self._loader: Any = loader
        self._alive: list[weakref.ref[_Epoch[T_co]]] = []  # in the order in which they have advanced
        self._resume: Values | None = None  # the position at which the next epoch begins
        self._seeded = False  # whether persistent workers have got their seed
        self._warned = False  # of an earlier iterator
        self._workers: list[Values | None] | None = None  # persistent ones at the end of the last epoch
        self._copied()

    def _copied(self) -> None:
        """Make a new copy of the loader, whose workers have not begun."""
        new: Any = copy.copy(self._loader)
        name = "sampler" if new.batch_sampler is None else "batch_sampler"
        self._indices = _Indices(getattr(new, name))
        object.__setattr__(new, name, self._indices)  # a DataLoader refuses another sampler, since it may be in use
        new._iterator = None  # persistent workers of the loader itself have another collate_fn
        if new.num_workers:
            new.collate_fn, new.worker_init_fn = _Collate(new.collate_fn), _WorkerInit(new.worker_init_fn)
        self._copy = new

    def __iter__(self) -> Iterator[T_co]:
        return _Epoch(self)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        return f"resumable({self._loader!r})"

    def _epoch(self) -> _Epoch[T_co] | None:
        """Return the epoch that a loop is in: the last one that has advanced, unless its loop has left it."""
        epochs = [epoch for one in self._alive if (epoch := one()) is not None and not epoch.is_over]
        if epochs and epochs[-1] is not self._alive[-1]() and not self._warned:
            self._warned = True
            log.warning(
                "resumable: the last loop is over, so the position is that of an earlier iterator, after %d batches: "
                "if no loop uses that one, delete it (del iterator), or a resume begins there",
                epochs[-1].state["batches"],
            )
        return epochs[-1] if epochs else None

    def state_dict(self) -> Values:
        """Return the position: plain values, and the states of generators as arrays and tensors."""
        if (state := self._resume) is None:
            state = self._between() if (epoch := self._epoch()) is None else epoch.state
        return copy.deepcopy(state)

    def _between(self) -> Values:
        """Return the state between two epochs: what the next one depends on, without the global generators."""
        return {
            "batches": None,
            "indices": 0,
            "rng": None,
            "samplers": [_state_of(one) for one in self._samplers()],
            "size": self._size(),
            "num_workers": self._loader.num_workers,
            "seeded": self._seeded,
            "workers": self._workers,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position that `state_dict` has returned; a loop that runs continues there as well.

        Raises:
            InvalidInputError: the epoch has another number of batches or another batch size than that of the state; or
                the loader has other samplers; or this is the state of something else.
        """
        if (expected := self._between().keys()) != state_dict.keys():
            raise InvalidInputError(
                f"expected the position of a resumable loader, with {sorted(expected)}, got {sorted(state_dict)}: was "
                "it that of another loader? Restore all but the loader with keys=[...], and begin a new epoch"
            )
        state: Values = copy.deepcopy(dict(state_dict))
        there, here, workers = state["size"], self._size(), self._loader.num_workers
        if state["batches"] is not None and there != here:
            raise InvalidInputError(
                f"the snapshot was taken after {state['batches']} batches of an epoch of {_sized(there)}, but here it "
                f"has {_sized(here)}: make the loader as it was; or restore all but the loader with keys=[...], and "
                "begin a new epoch"
            )
        if state["num_workers"] != workers:
            log.warning(
                "num_workers: %d in the snapshot, %d here: the batches are the same, but the random numbers that are "
                "drawn in workers are others",
                state["num_workers"],
                workers,
            )
            state |= {"num_workers": workers, "workers": None}
        self.set_samplers(state["samplers"])
        for epoch in filter(None, (one() for one in self._alive)):
            epoch.is_stale = True
        self._alive.clear()
        self._copied()
        self._seeded = state["seeded"] and self._loader.persistent_workers
        is_between = state["batches"] is None
        self._workers, self._resume = (state["workers"], None) if is_between else (None, state)

    def _size(self) -> list[int | None]:
        """Return the number of batches in an epoch and the batch size; None: unknown."""
        try:
            count = len(self._loader)
        except (TypeError, NotImplementedError):
            count = None
        return [count, self._loader.batch_size]

    def _samplers(self) -> list[Any]:
        """Return the loader and the samplers in it, in a fixed order."""
        found = [self._loader]
        for one in found:
            inner = {"s": one.batch_sampler, "sampler": one.sampler} if one is self._loader else vars(one)
            named = [value for name, value in inner.items() if "sampler" in name or one is self._loader]
            found += [x for x in named if hasattr(x, "__dict__") and not any(x is known for known in found)]
        return found

    def set_samplers(self, states: list[Values]) -> None:
        """Set the generators and the epochs of the samplers.

        Raises:
            InvalidInputError: these are states of other samplers.
        """
        samplers = self._samplers()
        got, expected = [sorted(one) for one in states], [sorted(_state_of(one)) for one in samplers]
        if got != expected:
            raise InvalidInputError(
                f"the samplers of the snapshot have {got}, those of the loader {expected}: make the loader as it was"
            )
        for sampler, state in zip(samplers, states, strict=True):
            _load_into(sampler, state)


class _Epoch(Iterator[T_co]):
    """One iteration over a loader.

    Attributes:
        state: the position, as `state_dict` returns it; its workers are those at the begin of the round.
        is_over: whether the loop has got all batches.
        is_stale: whether the loader has got another position meanwhile.
    """

    def __init__(self, owner: ResumableLoader[T_co]) -> None:
        self._owner = owner
        self._workers: int = owner.num_workers
        self.is_over = False
        self._begin()

    def _begin(self) -> None:
        """Begin a new epoch, or the rest of one."""
        self.is_stale = False
        if (resumed := self._owner._resume) is None:
            self.state = self._owner._between() | {"batches": 0, "rng": _GLOBAL.state_dict()}
            self._make()
        else:
            self._resume(resumed)
        self._owner._resume = None
        self._note_alive()

    def _resume(self, resumed: Values) -> None:
        owner, seen = self._owner, resumed["batches"]
        self.state = resumed | {"batches": seen - seen % (self._workers or 1)}
        with _global_generators(resumed["rng"]) as outside:
            _warn_of_epoch(owner._samplers(), resumed["samplers"])
            owner.set_samplers(resumed["samplers"])
            self._make()
            for _ in range(seen - self.state["batches"]):
                self._next()
            drawn = zip(_arrays(self._batches.rng), _arrays(_GLOBAL.state_dict()), _arrays(outside), strict=True)
            if any(not np.array_equal(x, now) and not np.array_equal(now, then) for x, now, then in drawn):
                raise InvalidInputError(
                    "the sampler draws from the global generators after its first batch, and the training does too, so "
                    "its order cannot be repeated: let it draw from a generator that is its attribute, such as "
                    "random.Random(seed); or restore all but the loader with keys=[...], and begin a new epoch"
                )
        if (self.state["batches"], self.state["indices"]) != (seen, resumed["indices"]):
            raise InvalidInputError(
                f"the first {seen} batches of the epoch differ from those before the snapshot: the data, "
                "the seed or the rank of the sampler changed; or the sampler has a state that is in no generator: give "
                "it state_dict and load_state_dict; or restore all but the loader with keys=[...], and begin a new "
                "epoch"
            )

    def _make(self) -> None:
        """Make the iterator of torch, which begins after `batches`, at the generators as they are.

        Persistent workers get their seed only once. So where a new process draws it again, it sets the generators back.
        """
        owner, state = self._owner, self.state
        loader, indices, again = owner._copy, owner._indices, state["seeded"]

        def set_back() -> None:
            _set_global(state["rng"])
            owner.set_samplers(state["samplers"])

        self._latest: list[Values | None] = list(state["workers"] or [None] * self._workers)
        if self._workers:
            loader.worker_init_fn.states = state["workers"]
        indices.skip, indices.before = state["batches"], set_back if again else None
        self._inner = iter(loader)
        self._batches: _Batches = indices.last
        self._batches.start()
        indices.before = indices.last = None  # no reference in a circle: torch ends the workers with the last one
        state["indices"] = self._batches.skipped
        owner._seeded = bool(loader.persistent_workers)

    def _note_alive(self) -> None:
        alive = self._owner._alive
        if not alive or alive[-1]() is not self:
            alive[:] = [one for one in alive if one() not in (None, self)] + [weakref.ref(self)]

    def __next__(self) -> T_co:
        if self.is_over:
            raise StopIteration
        if self.is_stale:
            self._begin()
        try:
            data = self._next()
        except StopIteration:
            self.is_over = True
            if self._owner._copy.persistent_workers:
                self._owner._workers = self._latest
            raise
        self._note_alive()
        return data

    def _next(self) -> T_co:
        """Return the next batch, and count it, also if the dataset raises an error."""
        try:
            item = next(self._inner)
        except StopIteration:
            raise
        except Exception as error:
            if not (self._workers and str(error).startswith("DataLoader ")):  # torch timed out, and keeps the batch
                self._count(None)
            raise
        data, rng = item if self._workers else (item, None)
        self._count(rng)
        return data  # type: ignore[no-any-return]

    def _count(self, rng: Values | None) -> None:
        """Count a batch.

        Args:
            rng: the generators of its worker after it; None: they are as they were.
        """
        state = self.state
        if self._batches.digests:
            state["indices"] = _digest(self._batches.digests.popleft(), state["indices"])
        if rng is not None:
            self._latest[state["batches"] % self._workers] = rng
        state["batches"] += 1
        if self._workers and state["batches"] % self._workers == 0:
            state["workers"] = list(self._latest)


# --- the other sampler, collate_fn and worker_init_fn ----------------------------------------------------------------


class _Indices:
    """The sampler of a loader, from a position on.

    Attributes:
        skip: the number of batches that the next iterator leaves out.
        before: what it calls before it draws the first one.
        last: the last iterator; torch makes two, and uses the second.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.skip = 0
        self.before: Callable[[], None] | None = None
        self.last: Any = None

    def __iter__(self) -> _Batches:
        self.last = _Batches(self)
        return self.last  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class _Batches(Iterator[Any]):
    """An iterator over the indices of batches. It draws nothing before `start`, or the first batch.

    Attributes:
        skipped: the digest of the batches that were left out.
        rng: the global generators after the first batch.
        digests: those of the batches that were drawn, and not counted yet.
    """

    def __init__(self, indices: _Indices) -> None:
        self._sampler, self._skip, self._before = indices.sampler, indices.skip, indices.before
        self._drawn: Iterator[Any] | None = None
        self.skipped = 0
        self.rng: Values = {}
        self.digests: deque[int] = deque()

    def start(self) -> Iterator[Any]:
        """Draw the first batch, unless that is done; return an iterator over it and the next."""
        if self._drawn is None:
            before, self._before = self._before, None
            if before is not None:
                before()
            batches = iter(self._sampler)
            self._drawn = chain(list(islice(batches, 1)), batches)
            self.rng = _GLOBAL.state_dict()
            for batch in islice(self._drawn, self._skip):
                self.skipped = _digest(_digest_of(batch), self.skipped)
        return self._drawn

    def __next__(self) -> Any:
        batch = next(self.start())
        self.digests.append(_digest_of(batch))
        return batch


class _Collate:
    """A collate_fn whose batches come with the generators of the worker; None: they are as after the batch before."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._last: Values | None = None

    def __call__(self, samples: Any) -> tuple[Any, Values | None]:
        data, rng = self._collate(samples), _GLOBAL.state_dict()
        rng["torch"] = rng["torch"].numpy()  # a tensor would take a file descriptor
        if self._last is not None and all(map(np.array_equal, _arrays(rng), _arrays(self._last))):
            return data, None
        self._last = rng
        return data, rng


class _WorkerInit:
    """A worker_init_fn that also sets the generators of a worker.

    Attributes:
        states: the generators of each worker; None: as torch seeds them.
    """

    states: list[Values | None] | None = None

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        if self.states is not None and (state := self.states[worker]) is not None:
            _set_global(state)


def _digest_of(batch: Any) -> int:
    """Return a digest of indices."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(batch, enc_hook=_plain))


def _plain(index: Any) -> Any:
    """Return a plain value for an index of another type: that of a NumPy scalar or tensor, else the type's name."""
    return index.tolist() if hasattr(index, "tolist") else type(index).__name__


def _digest(new: int, before: int) -> int:
    """Return the digest of all batches, from that of the last one and that of the ones before."""
    return xxhash.xxh3_64_intdigest(new.to_bytes(8, "little"), before)


# --- generators and samplers -----------------------------------------------------------------------------------------

_GLOBAL = RngState(cuda=False)


def _set_global(state: Values) -> None:
    """Set the global generators to a state of `_GLOBAL`, whose arrays may be tensors, and the other way."""
    import torch

    _GLOBAL.load_state_dict(state | {"torch": torch.as_tensor(state["torch"], device="cpu")})


@contextmanager
def _global_generators(state: Values) -> Iterator[Values]:
    """Set the global generators, and put them back at the end; yield their states outside."""
    outside = _GLOBAL.state_dict()
    _set_global(state)
    try:
        yield outside
    finally:
        _set_global(outside)


def _arrays(rng: Values) -> list[Any]:
    python, numpy = rng["python"], rng["numpy"]
    legacy = [numpy["state"]["key"], numpy["state"]["pos"], numpy["has_gauss"]]
    return [rng["torch"], python["words"], python["gauss"], *legacy]


def _state_of(sampler: Any) -> Values:
    """Return what the order of a sampler depends on: its own state, or its epoch and its generators."""
    if is_stateful(sampler):
        return {"state": sampler.state_dict()}
    state = {name: _generator_state(value) for name, value in vars(sampler).items() if _is_generator(value)}
    return state | ({"epoch": sampler.epoch} if _has_epoch(sampler) else {})


def _load_into(sampler: Any, state: Values) -> None:
    for name, value in state.items():
        if name == "state":
            sampler.load_state_dict(value)
        elif name == "epoch":
            sampler.set_epoch(value)
        else:
            _set_generator(getattr(sampler, name), value)


def _has_epoch(sampler: Any) -> bool:
    return callable(getattr(sampler, "set_epoch", None)) and type(getattr(sampler, "epoch", None)) is int


def _warn_of_epoch(samplers: list[Any], states: list[Values]) -> None:
    """Warn if the loop has set another epoch than that of the position."""
    for sampler, state in zip(samplers, states, strict=True):
        if "epoch" in state and sampler.epoch != state["epoch"]:
            log.warning(
                "%s: set_epoch(%d) was called, but the snapshot was taken in epoch %d: the loader finishes that epoch; "
                "let the loop begin with it",
                type(sampler).__name__,
                sampler.epoch,
                state["epoch"],
            )


def _is_generator(value: Any) -> bool:
    import torch

    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def _generator_state(generator: Any) -> Any:
    """Return the state of a generator as plain values, arrays and tensors."""
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.get_state()


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _sized(size: list[int | None]) -> str:
    count, batch = size
    return f"{'unknown' if count is None else count} batches" + ("" if batch is None else f" of {batch}")


#: In the state of torchdata's StatefulDataLoader: whether its iterator has ended.
_ENDED = "_iterator_finished"

# --- a loader with a state of its own --------------------------------------------------------------------------------


class _StatefulLoader(ResumableLoader[T_co]):
    """A loader with a state of its own. A resumed epoch leaves the global generators as they are.

    torchdata makes two iterators after the state of an epoch that has ended, so this ends the first one by itself.
    """

    __slots__ = ("_has_ended", "_is_loaded")

    def __init__(self, loader: DataLoader[T_co]) -> None:
        self._loader: Any = loader
        self._is_loaded = self._has_ended = False

    def __iter__(self) -> Iterator[T_co]:
        if self._is_loaded:
            with _global_generators(_GLOBAL.state_dict()):
                rest: Iterator[T_co] = iter(self._loader)
                for _ in rest if self._has_ended else ():
                    raise InvalidInputError("the loader has more batches than before the snapshot: make it as it was")
            self._is_loaded = False
            if not self._has_ended:
                return rest
        return iter(self._loader)

    def state_dict(self) -> Values:
        """Return the state of the loader."""
        return self._loader.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the loader."""
        self._has_ended = state_dict.get(_ENDED) is True
        self._loader.load_state_dict(dict(state_dict) | ({_ENDED: False} if self._has_ended else {}))
        self._is_loaded = True
