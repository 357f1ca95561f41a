"""Arrays of a state that are changed while they are saved: every way to change one, at every moment of a save.

`CHANGES` holds what a later `state_dict()`, or another thread, may do to an array that has been flattened. `Moments`
stops a save before and after each of its steps that look at the caller's memory. `Runs.run` makes one change at one
moment and checks the outcome. Either an error names the array and nothing is committed, or the snapshot holds every
array whole, as it was before the change or after it.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kit.repositories import OPTIONS
from snapstore import InvalidInputError, Repository, SnapshotManager
from snapstore.chunks.uploader import PackUploader
from snapstore.engine.cpu import CpuEngine
from snapstore.engine.registry import Engines
from snapstore.save import known_state
from snapstore.save import staging as host_staging
from snapstore.state.values import arrays, held_array
from snapstore.state.walk import flatten as flattening
from snapstore.state.walk import known_tensors, structure
from snapstore.storage.memory import MemoryStore

State = dict[str, Any]
CHUNK_BYTES, BATCH_BYTES = 1024, 8192
#: Rows and columns: several batches; one chunk; inline in the manifest.
LARGE, MIDDLE, SMALL = 100, 33, 10


# --- arrays ----------------------------------------------------------------------------------------------------------


def numbers(n: int, *, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """(n, n) float32."""
    values = np.random.default_rng(seed).standard_normal((n, n)).astype(np.float32)
    return torch.from_numpy(values.copy()).clone().to(device)


def image(value: Any) -> tuple[Any, ...] | None:
    """Dtype, shape and bytes of an array, None if it cannot be read."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, bytes | bytearray):
        return type(value).__name__, (len(value),), bytes(value)
    end = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    storage = value.untyped_storage().nbytes()
    if value.numel() and (value.storage_offset() + end) * value.itemsize > storage:
        return None
    # a clone: torch refuses to resize a storage once NumPy has seen it
    plain = value.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(value.dtype), tuple(value.shape), raw


def images(state: State) -> dict[str, Any]:
    return {name: image(value) for name, value in state.items()}


# --- ways to change ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A way to change arrays of a state.

    Attributes:
        make: the state before; `w` is always there. Takes the rows of its arrays and their device.
        do: changes it.
        writes: it writes into memory that the state still has. No save can notice that once the state is flattened, so
            it is made only before the end of `flatten`.
    """

    make: Callable[[int, str], State]
    do: Callable[[State], object]
    writes: bool = False


def _one(n: int, device: str) -> State:
    return {"w": numbers(n, device=device)}


def _strided(n: int, device: str) -> State:
    return {"w": numbers(n, device=device).t()}


def _oblong(n: int, device: str) -> State:
    return {"w": numbers(n, device=device)[: n // 2].t()}


def _complex(n: int, device: str) -> State:
    return {"w": torch.view_as_complex(numbers(n, device=device).reshape(n, -1, 2))} if n % 2 == 0 else _one(n, device)


def _parameter(n: int, device: str) -> State:
    return {"w": torch.nn.Parameter(numbers(n, device=device))}


def _tied(n: int, device: str) -> State:
    w = numbers(n, device=device)
    return {"w": w, "v": w.detach()}


def _two(n: int, device: str) -> State:
    return {"w": numbers(n, device=device), "v": numbers(n, seed=1, device=device)}


def _array(n: int, device: str) -> State:
    return {"w": numbers(n).numpy().copy()}


def _two_arrays(n: int, device: str) -> State:
    return {"w": numbers(n).numpy().copy(), "v": numbers(n, seed=1).numpy().copy()}


def _raw(n: int, device: str) -> State:
    return {"w": bytearray(numbers(n).numpy().tobytes())}


def _other(w: torch.Tensor) -> torch.Tensor:
    """Return other values of the same form."""
    return (w.detach() * 2 + 1).clone()


def _data(other: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    def do(state: State) -> None:
        state["w"].data = other(state["w"].detach())

    return do


def _swap_and_overwrite(state: State) -> None:
    """Do as a trainer that keeps two copies of the weights and swaps them."""
    old = state["w"].detach()
    state["w"].data = _other(old)
    old.zero_()


def _untie(state: State) -> None:
    state["v"].data = _other(state["v"])


def _untie_and_change(state: State) -> None:
    _untie(state)
    state["w"].zero_()


def _tie(state: State) -> None:
    state["v"].data = state["w"].detach()


def _tie_and_change(state: State) -> None:
    _tie(state)
    state["w"].zero_()


def _let_go(state: State) -> None:
    """Free the memory of the arrays: another array may get it, see `Later`."""
    for value in state.values():
        value.data = _other(value)[:1]


def _restate(array: np.ndarray, other: np.ndarray) -> None:
    array.__setstate__((1, other.shape, other.dtype, False, other.tobytes()))


def _assign(name: str, value: Callable[[np.ndarray], Any]) -> Callable[[State], None]:
    def do(state: State) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            setattr(state["w"], name, value(state["w"]))

    return do


def _cut_twice(state: State) -> None:
    storage, nbytes = state["w"].untyped_storage(), state["w"].nbytes
    storage.resize_(nbytes - nbytes // 4)
    storage.resize_(nbytes // 2)


CHANGES: dict[str, Change] = {
    "nothing": Change(_one, lambda state: None),
    "data: fewer": Change(_one, _data(lambda w: _other(w)[: len(w) // 2])),
    "data: more": Change(_one, _data(lambda w: _other(torch.cat([w, w])))),
    "data: empty": Change(_one, _data(lambda w: w[:0].clone())),
    "data: 0-dim": Change(_one, _data(lambda w: w[0, 0].clone())),
    "data: other dtype, as large": Change(_one, _data(lambda w: _other(w).view(torch.int32))),
    "data: half": Change(_one, _data(lambda w: w.half())),
    "data: double": Change(_one, _data(lambda w: w.double())),
    "data: other shape, same bytes": Change(_one, _data(lambda w: w.reshape(-1).clone())),
    "data: other shape, as large": Change(_one, _data(lambda w: _other(w).reshape(1, *w.shape))),
    "data: same form": Change(_one, _data(_other)),
    "data: same form, of a parameter": Change(_parameter, _data(_other)),
    "data: half, of a parameter": Change(_parameter, _data(lambda w: w.half())),
    "data: strided": Change(_one, _data(lambda w: _other(w).t())),
    "data: expanded": Change(_one, _data(lambda w: w[:1].clone().expand(w.shape))),
    "data: contiguous": Change(_strided, _data(lambda w: _other(w).contiguous())),
    "data: fewer, of a strided one": Change(_strided, _data(lambda w: _other(w)[: len(w) // 2])),
    "data: other dtype, of a strided one": Change(_strided, _data(lambda w: _other(w).contiguous().view(torch.int32))),
    "data: complex for real": Change(_one, _data(lambda w: torch.complex(w, w))),
    "data: real for complex": Change(_complex, _data(lambda w: torch.view_as_real(w).clone() if w.is_complex() else w)),
    "data: as large, real for complex": Change(
        _complex, _data(lambda w: torch.view_as_real(w).clone().view(torch.float64)[..., 0] if w.is_complex() else w)
    ),
    "data: conjugated": Change(_complex, _data(lambda w: w.clone().conj())),
    "data: swapped, and the old one overwritten": Change(_one, _swap_and_overwrite),
    "data: let go": Change(_two, _let_go),
    "data: let go, of tied ones": Change(_tied, _let_go),
    "resize_: fewer": Change(_one, lambda s: s["w"].resize_(3, 4)),
    "resize_: more": Change(_one, lambda s: s["w"].resize_(3 * len(s["w"]), len(s["w"]))),
    "resize_: other shape": Change(_one, lambda s: s["w"].resize_(s["w"].numel())),
    "resize_: empty": Change(_one, lambda s: s["w"].resize_(0)),
    "resize_: empty and back": Change(_one, lambda s: s["w"].resize_(0).resize_(len(s["w"]), 5)),
    "storage: freed": Change(_one, lambda s: s["w"].untyped_storage().resize_(0)),
    "storage: cut": Change(_one, lambda s: s["w"].untyped_storage().resize_(s["w"].nbytes // 2)),
    "storage: cut twice": Change(_one, _cut_twice),  # on a device the second one has the address of the first
    "storage: larger": Change(_one, lambda s: s["w"].untyped_storage().resize_(1000 * s["w"].nbytes)),
    "storage: freed, of a strided one": Change(_strided, lambda s: s["w"].untyped_storage().resize_(0)),
    "storage: shared": Change(_one, lambda s: s["w"].share_memory_()),
    "set_: other": Change(_one, lambda s: s["w"].set_(_other(s["w"]))),
    "set_: fewer": Change(_one, lambda s: s["w"].set_(_other(s["w"])[:2])),
    "set_: nothing": Change(_one, lambda s: s["w"].set_()),
    "set_: further on": Change(
        _one, lambda s: s["w"].set_(s["w"].untyped_storage(), 4, (len(s["w"]) - 1, len(s["w"])), (len(s["w"]), 1))
    ),
    "transposed in place": Change(_one, lambda s: s["w"].t_()),
    "transposed in place, of a strided one": Change(_oblong, lambda s: s["w"].t_()),
    "swapped by torch": Change(_one, lambda s: torch.utils.swap_tensors(s["w"], numbers(7))),
    "untied": Change(_tied, _untie),
    "untied, and changed": Change(_tied, _untie_and_change, writes=True),
    "tied": Change(_two, _tie),
    "tied, and changed": Change(_two, _tie_and_change, writes=True),
    "array: other dtype": Change(_array, _assign("dtype", lambda a: np.int32)),
    "array: smaller dtype": Change(_array, _assign("dtype", lambda a: np.int16)),
    "array: other byte order": Change(_array, _assign("dtype", lambda a: ">f4")),
    "array: other shape": Change(_array, _assign("shape", lambda a: (a.size,))),
    "array: other strides": Change(_array, _assign("strides", lambda a: a.strides[::-1])),
    "array: read-only": Change(_array, lambda s: s["w"].setflags(write=False)),
    "array: fewer": Change(_array, lambda s: s["w"].resize((2, 2), refcheck=False)),
    "array: more": Change(_array, lambda s: s["w"].resize((1000, 1000), refcheck=False)),
    "array: empty": Change(_array, lambda s: s["w"].resize(0, refcheck=False)),
    "array: again, other values": Change(_array, lambda s: _restate(s["w"], s["w"] * 2 + 1)),
    "array: again, more": Change(_array, lambda s: _restate(s["w"], np.ones((500, 500)))),
    "array: again, beside another": Change(_two_arrays, lambda s: _restate(s["w"], np.zeros((1, 1)))),
    "bytearray: fewer": Change(_raw, lambda s: s["w"].__delitem__(slice(7, None))),
    "bytearray: more": Change(_raw, lambda s: s["w"].extend(bytes(5000))),
}  # fmt: skip

#: Changes of arrays that hold nothing, or a single number.
OF_FEW: dict[str, Change] = {
    "empty: more": Change(lambda n, d: {"w": torch.empty(0, 4, device=d)}, _data(lambda w: w.new_ones(3, 4))),
    "empty: other dtype": Change(lambda n, d: {"w": torch.empty(0, 4, device=d)}, _data(lambda w: w.double())),
    "empty: other shape": Change(lambda n, d: {"w": torch.empty(0, 4, device=d)}, _data(lambda w: w.reshape(4, 0))),
    "empty: large": Change(lambda n, d: {"w": torch.empty(0, device=d)}, lambda s: s["w"].resize_(9000).fill_(1)),
    "0-dim: other value": Change(lambda n, d: {"w": torch.ones((), device=d)}, _data(lambda w: w + 1)),
    "0-dim: other dtype": Change(lambda n, d: {"w": torch.ones((), device=d)}, _data(lambda w: w.to(torch.int32))),
    "0-dim: large": Change(lambda n, d: {"w": torch.ones((), device=d)}, _data(lambda w: w.expand(9000).clone())),
    "0-dim: freed": Change(lambda n, d: {"w": torch.ones((), device=d)}, lambda s: s["w"].untyped_storage().resize_(0)),
    "empty array: more": Change(lambda n, d: {"w": np.empty(0)}, lambda s: _restate(s["w"], np.ones(600))),
    "0-dim array: other dtype": Change(lambda n, d: {"w": np.ones(())}, _assign("dtype", lambda a: np.int64)),
}  # fmt: skip


# --- moments -------------------------------------------------------------------------------------------------------


#: No moment of a save.
NEVER = -1


class Moments:
    """Counts the moments of a save, before and after each watched call, and calls `do` at the moment number `at`."""

    def __init__(self) -> None:
        self.count, self.at, self.do = 0, NEVER, lambda: None
        self.of_flatten = 0  # how many moments come before the end of `flatten`
        self._inside = threading.local()

    def reach(self) -> None:
        if getattr(self._inside, "now", False):
            return  # the change itself makes watched calls
        self.count, number = self.count + 1, self.count
        if number == self.at:
            self._inside.now = True
            try:
                self.do()
            finally:
                self._inside.now = False

    @contextlib.contextmanager
    def watch(self, watched: list[tuple[Any, str]]) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in watched:
                patch.setattr(owner, name, self._around(getattr(owner, name)))
            yield

    def _around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **options: Any) -> Any:
            self.reach()
            try:
                return real(*args, **options)
            finally:
                self.reach()

        return around


def watched(*more: tuple[Any, str]) -> list[tuple[Any, str]]:
    """The functions that a save calls, from `flatten` to the manifest."""
    names = ["describe", "memory_key", "memory_view", "copy_into", "as_bytes", "as_memory"]
    found = [(arrays, name) for name in names]
    for module in (flattening, held_array, host_staging):
        found += [(module, name) for name in names if name in vars(module)]
    found += [(structure.Structure, name) for name in ("_locate", "_hold_others")]
    found += [(known_tensors.Block, name) for name in ("localize", "storages", "has_form", "lie_where_noted")]
    found += [
        (known_tensors, "lie_at"),
        (known_tensors, "storages_of"),
        (structure.Match, "confirm"),
        (known_state.SmallCopies, "copy"),
        (known_state.Group, "copy_to_host"),
        (known_state.Group, "views"),
        (known_state, "copy_addresses"),
    ]
    found += [(CpuEngine, name) for name in ("load", "start_examine", "start_digests", "start_encode")]
    return [*found, (Engines, "memory_of"), (PackUploader, "add"), (MemoryStore, "put"), *more]


class Later:
    """An object of the state that comes after the arrays. Its own arrays are new, and may lie where freed ones lay."""

    def __init__(self, moments: Moments, rows: int) -> None:
        self._moments, self._rows = moments, rows

    def state_dict(self) -> dict[str, Any]:
        self._moments.reach()
        self._moments.of_flatten = self._moments.count
        return self.state(self._rows)

    @staticmethod
    def state(rows: int) -> dict[str, Any]:
        return {f"{i}": numbers(rows, seed=10 + i) for i in range(3)}

    def load_state_dict(self, state: Any) -> None: ...


# --- runs ----------------------------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any] | None] = {
    "repository": None,
    "synchronous": {"async_save": False},
    "synchronous, no base": {"async_save": False, "keep_base": False},
    "asynchronous": {"async_save": True},
}


@dataclass
class Runs:
    """Saves of one mode into one repository, each of a state that is changed at one moment."""

    mode: dict[str, Any] | None
    device: str = "cpu"
    more_watched: list[tuple[Any, str]] = field(default_factory=list)
    recognise: bool = True  # whether the manager knows the structure of the state; else it is flattened
    refused: int = 0
    committed: int = 0

    def __enter__(self) -> Runs:
        self.store = MemoryStore()
        self.repository = Repository.create(self.store, chunk_bytes=CHUNK_BYTES, options=OPTIONS)
        self.manager = SnapshotManager(self.repository, run="a", **self.mode) if self.mode is not None else None
        self.step = 0
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            assert self.repository.check("restore").ok
        if self.manager is not None:
            self.manager.close()
        self.repository.close()

    def _save(self, state: State) -> None:
        if self.manager is None:
            self.repository.save(state, run="a", step=self.step)
        else:
            if not self.recognise:
                self.manager._staging._known = None
            self.returned = False
            handle = self.manager.save(self.step, state)
            self.returned = True
            handle.result(60)

    def moments(self, change: Change, rows: int) -> int:
        """Return how many moments there are at which this change may be made."""
        moments = self._counted(change, rows)
        return moments.of_flatten if change.writes else moments.count

    def flattened(self, change: Change, rows: int) -> int:
        """Return the moment at which the state_dict() of `Later` is called."""
        return self._counted(change, rows).of_flatten - 1

    def _counted(self, change: Change, rows: int) -> Moments:
        for moments in (Moments(), Moments()):  # the second state is recognised
            with moments.watch(watched(*self.more_watched)):
                self._save({"first": change.make(rows, self.device), "later": Later(moments, rows)})
            self.step += 1
        return moments

    def run(self, change: Change, rows: int, at: int) -> None:
        """Change a state at one moment of its save, and judge the outcome."""
        if self.recognise and self.manager is not None and self.manager._staging._known is None:
            self._save({"first": change.make(rows, self.device), "later": Later(Moments(), rows)})
            self.step += 1
        moments, first = Moments(), change.make(rows, self.device)
        before = images(first)
        seen = {"after": before, "late": False}

        def do() -> None:
            seen["late"] = self.manager is not None and self.returned
            with contextlib.suppress(RuntimeError, ValueError):  # the array is held, and refuses the change
                change.do(first)
            seen["after"] = images(first)

        moments.at, moments.do = at, do
        self.returned = False
        with moments.watch(watched(*self.more_watched)):
            error = self._error_of({"first": first, "later": Later(moments, rows)})
        if error is not None:
            assert not seen["late"], error
            assert re.match(r"first\.[vw]: ", str(error)), error
            assert all(snapshot.step != self.step for snapshot in self.repository.snapshots())
            assert not list(self.store.list("sessions/")), error
            self.refused += 1
        else:
            found = self.repository.restore(f"a@{self.step}")
            for name, value in found["first"].items():
                allowed = [before[name]] if seen["late"] else [before[name], seen["after"][name]]
                assert image(value) in allowed, name
            assert images(found["later"]) == images(Later.state(rows))
            self.committed += 1
        self.step += 1

    def _error_of(self, state: State) -> InvalidInputError | None:
        try:
            self._save(state)
        except InvalidInputError as error:
            return error
        return None
