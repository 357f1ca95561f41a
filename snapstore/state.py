"""State in, parts out, and back: nested containers, tensors and objects with state_dict/load_state_dict.

In: what the user hands to `save`. Out: `Part`s, each a tree without arrays, specs of its arrays, and the arrays
themselves, still the user's memory. `Target` is the inverse: it plans where every stored array goes, raises all
differences at once before a byte is written, hands out buffers to fill, and puts the state together at the end.

Rules that users see:

- An object with `state_dict` and `load_state_dict` stands for its state; names inside belong to it and are not checked,
  except those of modules with torch's own `load_state_dict`, which torch would refuse too.
- Arrays are values: shape, dtype, requires_grad and ties are kept; strides, device, gradients, grad_fn and Python
  attributes are not. Tied = same memory, shape, stride and dtype; arrays that merely overlap are stored one by one.
- Functions among the entries of a torch lr_scheduler's state are code that its constructor sets (SWALR's in older
  releases). They are left out, as torch leaves them out of LambdaLR's state, and `load_state_dict`, which only updates,
  keeps the constructor's.
- With `into`, dict keys must be the same on both sides. A list, tuple or deque without arrays and objects is one value,
  so its length may differ; with arrays inside, the length must be equal. Lists and dicts are changed in place.
- With `keys` and no `into`, lists and tuples keep only what is selected, so positions close up.

torch is imported only once there are tensors. `flatten`, `Target.__init__` and `finish` belong to the thread that owns
the state; `copy_into`, `as_bytes`, and `buffer` and `complete` of different arrays may run on any threads.
"""

from __future__ import annotations

import math
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from .errors import CapabilityError, FormatError, InvalidInputError, NotFoundError, SnapstoreError, UnsupportedLeafError
from .tree import (
    CONTAINERS,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    TORCH_DTYPES,
    Encoder,
    Node,
    Path,
    Slot,
    StoredPart,
    TensorSpec,
    children,
    decode,
    display,
    encode_plain,
    family,
    is_array,
    is_mapping,
    like,
    numpy_dtype,
    numpy_dtype_name,
    shown,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "Part",
    "Path",
    "RngState",
    "StoredPart",
    "Target",
    "TensorSpec",
    "as_bytes",
    "copy_into",
    "display",
    "flatten",
    "parts_needed",
]

MAX_PARTS = 64  # more top-level entries than this share the part ""
MAX_LINES = 50  # differences that one error lists

Array = Any  # torch.Tensor | np.ndarray | bytes


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a flattened state; `specs[i]` describes `values[i]`, which is still the user's memory."""

    name: str
    tree: Node
    specs: list[TensorSpec]
    values: list[torch.Tensor | np.ndarray[Any, Any] | bytes]


# --- flatten ---------------------------------------------------------------------------------------------------------


def is_stateful(value: Any) -> bool:
    """Whether `value` is an object that stands for its state."""
    if isinstance(value, type) or type(value) in CONTAINERS or is_array(value):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def flatten(state: Any) -> list[Part]:
    """Split a state into parts; nothing is copied.

    Args:
        state: Any nesting of containers over tensors, arrays, plain values and objects with state_dict/load_state_dict.

    Returns:
        The part "" with the root of the tree, then one part per top-level container or object of a dict, in its order.

    Raises:
        UnsupportedLeafError: Values without a stored form; all of them (up to 20) are named.
        InvalidInputError: The state contains itself, is nested too deeply, or a `state_dict()` failed.
    """
    return _Flattener().parts(state)


class _Flattener:
    """One walk over a state; `_part` is the part being filled."""

    def __init__(self) -> None:
        self._part = Part("", None, [], [])
        self._here: dict[tuple[Any, ...], int] = {}  # memory -> index in this part
        self._first: dict[tuple[Any, ...], tuple[str, int]] = {}  # memory -> where it was seen first
        self._encoder = Encoder(self._put, self._expand)

    def parts(self, state: Any) -> list[Part]:
        expanded = self._expand(state, ())
        root = state if expanded is None else expanded[0]
        names = _part_names(root)
        if not names:
            done = [self._fill("", partial(self._encoder.node, root, ()))]
        else:
            # Part "" comes first, so that a tie always points to an earlier part.
            with self._encoder.inside(root, ()):
                done = [self._fill("", partial(self._root, root, names))]
                done += [self._fill(name, partial(self._encoder.node, root[name], (name,))) for name in names]
        self._encoder.raise_problems()
        return done

    def _fill(self, name: str, tree: Callable[[], Node]) -> Part:
        self._part, self._here = Part(name, None, [], []), {}
        return replace(self._part, tree=tree())

    def _root(self, root: Any, names: list[str]) -> Node:
        keys, nodes = [], []
        for element, key, child in children(root):
            keys.append(self._encoder.key(key, (element,)))
            in_part = type(key) is str and key in names
            nodes.append(["part", key] if in_part else self._encoder.node(child, (element,)))
        return self._encoder.tagged(root, keys, nodes, ())

    def _expand(self, value: Any, path: Path) -> tuple[Any] | None:
        return (_state_of(value, path),) if is_stateful(value) else None

    def _put(self, value: Any, path: Path) -> Node:
        tag, dtype, shape = _described(value)
        stored = bytes(value) if tag == "bytearray" else value
        grad = tag in ("tensor", "parameter") and bool(value.requires_grad)
        memory = _memory_key(stored)
        index = self._here.get(memory) if memory else None
        if index is None:
            index = len(self._part.specs)
            kind = "bytes" if tag == "bytearray" else tag
            tie = self._first.get(memory) if memory else None
            self._part.specs.append(TensorSpec(path, kind, dtype, shape, grad, tie))
            self._part.values.append(stored)
            if memory:
                self._here[memory] = index
                self._first.setdefault(memory, (self._part.name, index))
        return [tag, index, grad] if tag in ("tensor", "parameter") else [tag, index]


def _part_names(root: Any) -> list[str]:
    if type(root) not in (dict, OrderedDict):
        return []
    names = [
        key
        for key, value in root.items()
        if type(key) is str and key and key.isprintable() and (type(value) in CONTAINERS or is_stateful(value))
    ]
    return names if len(names) <= MAX_PARTS else []


def _state_of(value: Any, path: Path) -> Any:
    """Call `state_dict()`; leave functions out of a torch scheduler's (module docstring)."""
    try:
        state = value.state_dict()
    except Exception as error:
        raise InvalidInputError(f"{shown(path)}: {type(value).__name__}.state_dict() failed: {error!r}") from error
    scheduler = getattr(sys.modules.get("torch.optim.lr_scheduler"), "LRScheduler", None)
    if scheduler is None or not isinstance(value, scheduler) or type(state) is not dict:
        return state
    if type(value).load_state_dict is not scheduler.load_state_dict:
        return state
    functions = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    return {key: child for key, child in state.items() if not isinstance(child, functions)}


def _described(value: Any) -> tuple[str, str, tuple[int, ...]]:
    """Return kind, dtype name and shape of an array leaf.

    Raises:
        UnsupportedLeafError: It is of a type, layout or dtype without a stored form.
    """
    if type(value) in (bytes, bytearray):
        return type(value).__name__, "bytes", (len(value),)
    kind, dtype = _described_ndarray(value) if isinstance(value, np.ndarray) else _described_tensor(value)
    shape = tuple(value.shape)
    if len(shape) > MAX_DIMENSIONS:
        raise UnsupportedLeafError(f"{len(shape)} dimensions, at most {MAX_DIMENSIONS} can be stored: reshape it")
    return kind, dtype, shape


def _described_ndarray(value: np.ndarray[Any, Any]) -> tuple[str, str]:
    name = numpy_dtype_name(value.dtype)
    if type(value) is not np.ndarray or name is None or not value.itemsize:
        raise UnsupportedLeafError(
            f"{type(value).__name__} of dtype {value.dtype} has no stored form: convert it to a plain ndarray of "
            "numbers, strings or times"
        )
    return "array", name


def _described_tensor(value: torch.Tensor) -> tuple[str, str]:
    import torch

    dtype = _dtype_name(value)
    problem = None
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        problem = f"tensor subclass {type(value).__module__}.{type(value).__qualname__}"
    elif value.is_nested or value.layout is not torch.strided or value.is_mkldnn:
        problem = f"{'nested' if value.is_nested else value.layout} tensor"
    elif value.is_quantized or dtype not in TORCH_DTYPES:
        problem = f"tensor of dtype {value.dtype}"
    elif value.is_meta:
        problem = "meta tensor, which has no values,"
    elif value.numel() and not value.untyped_storage().nbytes():
        problem = "tensor whose storage was freed"
    if problem:
        raise UnsupportedLeafError(
            f"{problem} has no stored form: convert it to a dense torch.Tensor, or wrap it in an object with "
            "state_dict/load_state_dict"
        )
    return "parameter" if type(value) is torch.nn.Parameter else "tensor", dtype


def _memory_key(value: Array) -> tuple[Any, ...] | None:
    """Return what two leaves share when they are tied; None for empty ones, which share nothing."""
    if type(value) is bytes:
        return ("bytes", id(value))
    if isinstance(value, np.ndarray):
        place = value.__array_interface__["data"][0]
        return ("array", place, value.shape, value.strides, value.dtype.str) if value.nbytes else None
    if not value.numel():
        return None
    bits = (value.is_conj(), value.is_neg())  # a conjugated view has other values in the same memory
    return ("tensor", str(value.device), value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, *bits)


# --- bytes of one array ----------------------------------------------------------------------------------------------


def copy_into(value: Array, destination: np.ndarray[Any, Any]) -> None:
    """Copy a value's bytes in C order; torch copies tensors with its own threads.

    Args:
        value: Tensor of any device and strides, ndarray, or bytes.
        destination: (nbytes,) uint8, writable, aligned to 64.
    """
    if not destination.size:
        return
    if isinstance(value, bytes):
        destination[:] = np.frombuffer(value, np.uint8)
    elif isinstance(value, np.ndarray):
        opaque = np.dtype(f"V{value.itemsize}")  # copies bits whatever they mean
        np.copyto(destination.view(opaque).reshape(value.shape), value.view(opaque))
    else:
        import torch

        _copy_tensor(torch.from_numpy(destination).view(value.dtype).view(value.shape), value)


def _copy_tensor(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bits between tensors of one dtype and shape, on any devices."""
    import torch

    with torch.no_grad():
        plain = not any(t.is_conj() or t.is_neg() for t in (destination, source))
        if plain:  # as integers: no float unit may touch a NaN's payload, and rare dtypes need no kernels of their own
            destination, source = _as_integers(destination), _as_integers(source)
        destination.detach().copy_(source.detach())


def _as_integers(value: torch.Tensor) -> torch.Tensor:
    import torch

    value = value.detach()
    if value.dtype is torch.complex128:
        value = torch.view_as_real(value)
    return value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.dtype.itemsize])


def as_bytes(value: Array) -> np.ndarray[Any, Any]:
    """Return a value's bytes in C order as (nbytes,) uint8: a view where memory holds them so, else a fresh copy."""
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    if not isinstance(value, np.ndarray):
        count = value.numel() * value.dtype.itemsize
    else:
        count = value.nbytes
    view = _memory_view(value) if count else np.empty(0, np.uint8)
    if view is None:
        view = np.empty(count + 64, np.uint8)
        view = view[-view.ctypes.data % 64 :][:count]
        copy_into(value, view)
    return view


def _memory_view(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the memory of a non-empty array as bytes, or None where it is not CPU memory in C order."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1).view(np.uint8) if value.flags.c_contiguous else None
    if value.device.type != "cpu" or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return None
    import torch

    memory: np.ndarray[Any, Any] = value.detach().reshape(-1).view(torch.uint8).numpy()
    return memory


# --- keys ------------------------------------------------------------------------------------------------------------


class _Selection:
    """Which leaves `keys` selects: a pattern names leaves, and with anything above it, all below.

    A pattern is matched against every dotted prefix of a leaf's path, so `model` selects `model.layers.0`.
    """

    def __init__(self, keys: str | Sequence[str] | None) -> None:
        self.patterns = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
        if self.patterns is not None and not self.patterns:
            raise InvalidInputError("keys: no pattern given; leave keys out to restore everything")
        self._extents: dict[int, str] = {}

    def matches(self, path: Path) -> bool:
        """Whether the leaf at `path` is selected."""
        return self.patterns is None or any(_pattern_matches(pattern, path) for pattern in self.patterns)

    def extent(self, tree: Any, path: Path) -> str:
        """Return whether "all", "some" or "none" of the leaves of a decoded tree are selected."""
        if self.patterns is None:
            return "all"
        if type(tree) not in CONTAINERS or not tree:
            return "all" if self.matches(path) else "none"
        if id(tree) not in self._extents:  # decoded containers live as long as their Target and stand at one path
            found = {self.extent(child, (*path, element)) for element, _, child in children(tree)}
            self._extents[id(tree)] = found.pop() if len(found) == 1 else "some"
        return self._extents[id(tree)]

    def require_matches(self, tree: Any) -> None:
        """Refuse a pattern that selects nothing."""
        paths = [path for path, _ in _leaves(tree, ())]
        for pattern in self.patterns or ():
            if not any(_pattern_matches(pattern, path) for path in paths):
                some = ", ".join(shown(path) for path in paths[:5])
                raise NotFoundError(f"keys {pattern!r}: matches nothing in this snapshot, which holds e.g. {some}")

    def prune(self, tree: Any, path: Path) -> Any:
        """Return the selected part of a decoded tree."""
        if self.extent(tree, path) == "all":
            return tree
        kept = (
            (key, self.prune(child, (*path, element)))
            for element, key, child in children(tree)
            if self.extent(child, (*path, element)) != "none"
        )
        return like(tree, kept)


def _pattern_matches(pattern: str, path: Path) -> bool:
    text = display(path)
    if fnmatchcase(text, pattern):
        return True
    return any(fnmatchcase(text[:at], pattern) for at, letter in enumerate(text) if letter == ".")


def _leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf); an empty container is a leaf too."""
    if type(tree) not in CONTAINERS or not tree:
        yield path, tree
        return
    if len(path) >= MAX_DEPTH:
        raise InvalidInputError(f"{shown(path[:8])}...: more than {MAX_DEPTH} levels deep, or contains itself")
    for element, _, child in children(tree):
        yield from _leaves(child, (*path, element))


def parts_needed(part_names: Iterable[str], keys: str | Sequence[str] | None) -> list[str]:
    """Return the parts that may hold something `keys` selects; "" always, for it holds the root."""
    patterns = _Selection(keys).patterns
    return [name for name in part_names if not name or patterns is None or any(_may_match(p, name) for p in patterns)]


def _may_match(pattern: str, name: str) -> bool:
    literal = pattern[: next((i for i, letter in enumerate(pattern) if letter in "*?["), len(pattern))]
    if literal == pattern and (name + ".").startswith(pattern + "."):
        return True
    return literal.startswith(name + ".") or (literal != pattern and (name + ".").startswith(literal))


# --- restore ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Source:
    """One stored array on its way to every place that wants it.

    Its bytes arrive in `home`: the memory of the first target that can take them as they come, else the fresh array
    that the state will hold, else a temporary.
    """

    part: int
    index: int
    spec: TensorSpec
    slots: list[Slot] = field(default_factory=list)
    fresh: Any = None  # made for the places without a target
    home: np.ndarray[Any, Any] | None = None
    home_slot: Slot | None = None
    parameters: dict[bool, Any] = field(default_factory=dict)
    complete: bool = False


@dataclass(slots=True)
class _Load:
    """A `load_state_dict` to come."""

    path: Path
    object: Any
    stored: Any  # decoded tree of what was stored below path
    assemble: Callable[[], Any]


Replace = Callable[[], Any]  # makes the value that a parent must hold instead of its present one


class Target:
    """Where a restore puts its bytes.

    Call sequence: construct, then for every entry of `selected`: `buffer`, fill, verify, `complete`; at last `finish`.
    Construction finds every difference between the snapshot and `into`; nothing is modified before the first `buffer`.
    An `into` whose restore stopped between `buffer` and `finish` holds a mixture and must be restored again.

    Args:
        parts: All parts, or with `keys` at least `parts_needed`.
        into: What to fill; None builds the state anew.
        keys: Patterns (fnmatch, case-sensitive) over dotted paths; None selects everything.
        device: Where new tensors go when `into` is None; CPU by default.

    Attributes:
        selected: (position of the part, index) of the arrays to read, in the order of the manifests, each once.

    Raises:
        InvalidInputError: `into` differs from the snapshot; every difference is listed (up to 50).
        NotFoundError: A pattern selects nothing.
        FormatError: The trees are none that `flatten` makes.
    """

    def __init__(
        self,
        parts: Sequence[StoredPart],
        *,
        into: Any = None,
        keys: str | Sequence[str] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if into is not None and device is not None:
            raise InvalidInputError("device: has no effect with `into`, whose tensors stay where they are; give one")
        self._parts = list(parts)
        self._device = device
        self._into = into
        self._selection = _Selection(keys)
        self._sources: dict[tuple[int, int], _Source] = {}
        self._targets: dict[Slot, Any] = {}  # memory to fill
        self._owned: set[Slot] = set()  # whose target is the state of an object
        self._overlapping: set[Slot] = set()  # whose target shares memory with that of another source
        self._differences: list[str] = []
        self._updates: list[Callable[[], None]] = []
        self._loads: list[_Load] = []
        stored = decode(self._parts, partial=keys is not None)
        self._selection.require_matches(stored)
        self._stored = self._selection.prune(stored, ()) if into is None else stored
        for path, leaf in _leaves(stored, ()):
            if type(leaf) is Slot and self._selection.matches(path):
                self._source(leaf).slots.append(leaf)
        if into is not None:
            self._plan_root()
        self.selected: list[tuple[int, int]] = sorted(self._sources)

    # planning: compares, changes nothing

    def _source(self, slot: Slot) -> _Source:
        place = self._origin(slot.part, slot.index)
        if place not in self._sources:
            self._sources[place] = _Source(*place, self._parts[place[0]].specs[place[1]])
        return self._sources[place]

    def _origin(self, part: int, index: int) -> tuple[int, int]:
        """Follow a tie to the array it names, if that was selected as well."""
        spec = self._parts[part].specs[index]
        if spec.tie is None:
            return part, index
        name, other = spec.tie
        found = next((i for i, stored in enumerate(self._parts) if stored.name == name), None)
        if found is None:
            return part, index
        specs = self._parts[found].specs
        same = found != part and 0 <= other < len(specs) and _ties_to(spec, specs[other])
        if not same:
            raise FormatError(f"{shown(spec.path)}: tied to entry {other} of part {name!r}, which is not its like")
        return (found, other) if self._selection.matches(specs[other].path) else (part, index)

    def _plan_root(self) -> None:
        replaced = self._plan(self._stored, self._into, ())
        if replaced is not None:
            self._differ((), "would have to be replaced: `into` must be a container or object that can change in place")
        if self._differences:
            more = len(self._differences) - MAX_LINES
            lines = self._differences[:MAX_LINES] + ([f"... and {more} more"] if more > 0 else [])
            raise InvalidInputError(
                "the snapshot does not fit `into`; nothing was changed:\n  "
                + "\n  ".join(lines)
                + "\nrestore without `into` to get all of it, or with `keys` to get what fits"
            )
        self._find_overlaps()

    def _differ(self, path: Path, text: str) -> None:
        self._differences.append(f"{shown(path)}: {text}")

    def _plan(self, stored: Any, target: Any, path: Path) -> Replace | None:
        """Plan one place; return how to make its new value where the parent must put one in."""
        extent = self._selection.extent(stored, path)
        if extent == "none":
            self._plan_missing(target, path)
            return None
        if len(path) >= MAX_DEPTH and type(target) in CONTAINERS:
            raise InvalidInputError(f"{shown(path[:8])}...: `into` is more than {MAX_DEPTH} levels deep")
        if is_stateful(target):
            self._plan_object(stored, target, path, extent)
            return None
        if type(stored) is Slot and family(stored.tag) != "bytes":
            self._plan_array(stored, target, path)
            return None
        if type(stored) not in CONTAINERS:
            return self._plan_plain(stored, target, path)
        if extent == "all" and type(stored) in (list, tuple, deque) and _is_plain(stored) and _is_plain(target, path):
            return self._plan_value(stored, target, path)
        return self._plan_container(stored, target, path)

    def _plan_missing(self, target: Any, path: Path) -> None:
        """Note what `keys` selects in `into` and the snapshot lacks."""
        for leaf, _ in _leaves(target, path):
            if self._selection.matches(leaf):
                self._differ(leaf, "missing in the snapshot")

    def _plan_array(self, slot: Slot, target: Any, path: Path) -> None:
        spec = self._parts[slot.part].specs[slot.index]
        problem = _cannot_take(spec, target)
        if problem:
            self._differ(path, problem)
        else:
            self._targets[slot] = target

    def _plan_plain(self, stored: Any, target: Any, path: Path) -> Replace | None:
        if type(target) in CONTAINERS or is_array(target):
            self._differ(path, f"type: expected {type(target).__name__} as in `into`, got {_stored_name(stored)}")
            return None
        return None if _same(stored, target) else lambda: self._build(stored)

    def _plan_value(self, stored: Any, target: Any, path: Path) -> Replace | None:
        """Plan a list, tuple or deque of plain values, whose length is part of its value."""
        if type(target) is not type(stored) or getattr(target, "maxlen", 0) != getattr(stored, "maxlen", 0):
            self._differ(path, f"type: expected {type(target).__name__} as in `into`, got {type(stored).__name__}")
        elif type(target) is tuple:
            return None if _same(stored, target) else lambda: self._build(stored)
        else:
            self._updates.append(lambda: _refill(target, self._build(stored)))
        return None

    def _plan_container(self, stored: Any, target: Any, path: Path) -> Replace | None:
        alike = is_mapping(target) if is_mapping(stored) else type(target) is type(stored)
        if not alike:
            self._differ(path, f"type: expected {type(target).__name__} as in `into`, got {_stored_name(stored)}")
            return None
        present = {key: (element, child) for element, key, child in children(target)}
        replacements: dict[Any, Replace] = {}
        for element, key, child in children(stored):
            if key in present:
                replacement = self._plan(child, present.pop(key)[1], (*path, element))
                if replacement is not None:
                    replacements[key] = replacement
            else:
                for leaf, _ in _leaves(child, (*path, element)):
                    if self._selection.matches(leaf):
                        self._differ(leaf, "missing in `into`")
        for element, child in present.values():
            self._plan_missing(child, (*path, element))
        if type(target) is tuple and replacements:
            return lambda: tuple(replacements[i]() if i in replacements else old for i, old in enumerate(target))
        self._updates.extend(_setter(target, key, make) for key, make in replacements.items())
        if type(stored) is type(target) is OrderedDict and hasattr(stored, "_metadata"):
            self._updates.append(lambda: setattr(target, "_metadata", stored._metadata))
        return None

    def _plan_object(self, stored: Any, target: Any, path: Path, extent: str) -> None:
        needed = extent == "some" or not _is_plain(stored) or _is_strict_module(target)
        present = _state_of(target, path) if needed else None  # may be costly: a loader starts its workers for it
        if _is_strict_module(target) and is_mapping(stored):
            self._compare_names(stored, present, path)
        if needed:
            self._match(stored, present, path)
        build = self._merge(stored, present, path) if extent == "some" else lambda: self._build(stored)
        self._loads.append(_Load(path, target, stored, build))

    def _compare_names(self, stored: Any, present: Any, path: Path) -> None:
        for have, lack, side in ((stored, present, "`into`"), (present, stored, "the snapshot")):
            for element, key, _ in children(have):
                if key not in lack and self._selection.matches((*path, element)):
                    self._differ((*path, element), f"missing in {side}")

    def _match(self, stored: Any, present: Any, path: Path) -> None:
        """Find memory of an object's own state that can take stored arrays as they come."""
        if type(stored) is Slot:
            if family(stored.tag) != "bytes" and is_array(present) and self._selection.matches(path):
                spec = self._parts[stored.part].specs[stored.index]
                problem = _cannot_take(spec, present)
                if problem is None:
                    self._targets[stored] = present
                    self._owned.add(stored)
                elif problem.startswith(("shape", "dtype")):
                    self._differ(path, problem)
            return
        if (
            type(stored) not in CONTAINERS
            or is_mapping(stored) != is_mapping(present)
            or type(present) not in CONTAINERS
        ):
            return
        there = {key: child for _, key, child in children(present)}
        for element, key, child in children(stored):
            if key in there:
                self._match(child, there[key], (*path, element))

    def _merge(self, stored: Any, present: Any, path: Path) -> Replace:
        """Plan an object's state of which only some is selected: the rest stays as the object has it."""
        extent = self._selection.extent(stored, path)
        if extent != "some":
            return (lambda: present) if extent == "none" else (lambda: self._build(stored))
        sequences = not is_mapping(stored) and type(present) is type(stored) and len(present) == len(stored)
        if not (is_mapping(stored) and is_mapping(present)) and not sequences:
            self._differ(path, "`keys` selects some of it, but `into` has another structure here; select all of it")
            return lambda: present
        items: dict[Any, Replace] = {key: _constant(child) for _, key, child in children(present)}
        for element, key, child in children(stored):
            below = (*path, element)
            if key in items and self._selection.extent(child, below) == "some":
                items[key] = self._merge(child, present[key], below)
            elif self._selection.extent(child, below) != "none":
                items[key] = self._builder(self._selection.prune(child, below))
        return lambda: like(present, [(key, make()) for key, make in items.items()])

    def _find_overlaps(self) -> None:
        """Find targets that share memory although the snapshot holds them as arrays of their own.

        They are filled at the end and compared: the snapshot may hold the same values (views saved as copies) or not.
        """
        claims = sorted(
            ((*_extent_of(target), _memory_key(target), slot) for slot, target in self._targets.items()),
            key=lambda claim: claim[:3],
        )
        group: list[Any] = []
        end = 0
        for claim in claims:
            if group and (claim[0] != group[0][0] or claim[1] >= end):
                self._settle(group)
                group = []
            end = max(end, claim[2]) if group else claim[2]
            group.append(claim)
        self._settle(group)

    def _settle(self, group: list[Any]) -> None:
        places = {(id(self._source(slot)), memory) for _, _, _, memory, slot in group}
        if len(places) > 1:
            self._overlapping.update(slot for *_, slot in group)
            for *_, slot in group:
                if slot in self._owned:  # its object decides what becomes of the memory
                    del self._targets[slot]

    # filling

    def buffer(self, part: int, index: int) -> np.ndarray[Any, Any]:
        """Return the memory for an entry of `selected`, allocated now if it is not that of `into`.

        Returns:
            (nbytes,) uint8, writable; the same on every call until `complete`.
        """
        source = self._sources[part, index]
        if source.home is None:
            source.home_slot = next((slot for slot in source.slots if self._takes_bytes(slot)), None)
            if source.home_slot is not None:
                source.home = as_bytes(self._targets[source.home_slot])
            elif self._on_cpu(source):
                source.fresh = _new_array(source.spec, None)
                source.home = as_bytes(source.fresh)
            else:
                source.home = np.empty(source.spec.nbytes, np.uint8)
        return source.home

    def _takes_bytes(self, slot: Slot) -> bool:
        target = self._targets.get(slot)
        return target is not None and slot not in self._overlapping and _memory_view(target) is not None

    def _on_cpu(self, source: _Source) -> bool:
        """Whether a place without a target wants CPU memory that bytes can be read into."""
        wanted = any(slot not in self._targets for slot in source.slots) and source.spec.kind != "bytes"
        return wanted and (self._device is None or source.spec.kind == "array")

    def complete(self, part: int, index: int) -> None:
        """Pass the bytes in `buffer` on to every place that wants them; they are all there and verified."""
        source = self._sources[part, index]
        home = self.buffer(part, index)
        if source.fresh is None and any(slot not in self._targets for slot in source.slots):
            source.fresh = _from_bytes(home, source.spec, self._device)
        for slot in source.slots:
            if slot in self._targets and slot is not source.home_slot and slot not in self._overlapping:
                _assign(self._targets[slot], home, source.spec)
        source.complete = True
        if self._overlapping.isdisjoint(source.slots):
            source.home = None

    # the end

    def finish(self) -> Any:
        """Put the state together; every entry of `selected` is complete.

        Returns:
            The state, or `into`.

        Raises:
            InvalidInputError: A `load_state_dict` failed or cast values, or arrays of `into` share memory for which
                the snapshot holds different values.
        """
        waiting = [source.spec for source in self._sources.values() if not source.complete]
        if waiting:
            raise RuntimeError(f"{shown(waiting[0].path)}: finish() before complete()")
        if self._into is None:
            return self._build(self._stored)
        self._fill_overlapping()
        for update in self._updates:
            update()
        # Generators come last: loading the others (a loader that starts its workers) may draw random numbers.
        for load in sorted(self._loads, key=lambda load: isinstance(load.object, RngState)):
            self._run_load(load)
        return self._into

    def _fill_overlapping(self) -> None:
        slots = [slot for slot in self._overlapping if slot in self._targets]
        for slot in slots:
            source = self._source(slot)
            _assign(self._targets[slot], self.buffer(source.part, source.index), source.spec)
        for slot in slots:
            self._require_equal(slot, self._targets[slot], self._source(slot).spec.path)

    def _require_equal(self, slot: Slot, value: Any, path: Path) -> None:
        source = self._source(slot)
        if not np.array_equal(as_bytes(value), self.buffer(source.part, source.index)):
            raise InvalidInputError(
                f"{shown(path)}: shares memory with another array in `into`, but the snapshot holds other values for "
                "the two; untie them in `into` and restore again"
            )

    def _run_load(self, load: _Load) -> None:
        name = f"{shown(load.path)}: {type(load.object).__name__}.load_state_dict"
        state = load.assemble()
        try:
            load.object.load_state_dict(state)
        except Exception as error:
            raise InvalidInputError(f"{name} failed: {error}") from error
        if _is_plain(load.stored):
            return
        casts = list(self._casts(load.stored, _state_of(load.object, load.path), load.path))
        if casts:
            raise InvalidInputError(
                f"{name} changed dtypes, so the state is not that of the snapshot; build the object with the dtypes it "
                "was saved with:\n  " + "\n  ".join(casts[:MAX_LINES])
            )

    def _casts(self, stored: Any, present: Any, path: Path) -> Iterator[str]:
        if type(stored) is Slot:
            if not is_array(present) or not self._selection.matches(path):
                return
            spec = self._parts[stored.part].specs[stored.index]
            dtype = _dtype_name(present)
            if dtype != spec.dtype:
                yield f"{shown(path)}: dtype: expected {spec.dtype}, got {dtype}"
            elif stored in self._overlapping:
                self._require_equal(stored, present, path)
        elif type(stored) in CONTAINERS and type(present) in CONTAINERS and is_mapping(stored) == is_mapping(present):
            there = {key: child for _, key, child in children(present)}
            for element, key, child in children(stored):
                if key in there:
                    yield from self._casts(child, there[key], (*path, element))

    def _builder(self, tree: Any) -> Replace:
        return lambda: self._build(tree)

    def _build(self, tree: Any) -> Any:
        """Return a decoded tree with its arrays in their slots."""
        if type(tree) is Slot:
            return self._value(tree)
        if type(tree) not in CONTAINERS:
            return tree
        items = []
        for _, key, child in children(tree):
            items.append((key, self._build(child)))
        return like(tree, items)

    def _value(self, slot: Slot) -> Any:
        if slot in self._targets:
            return self._targets[slot]
        source = self._source(slot)
        if slot.tag == "bytearray":
            return bytearray(source.fresh)
        if slot.tag not in ("tensor", "parameter"):
            return source.fresh
        import torch

        value = source.fresh.detach()  # one object per place; all of them share the memory, which is what tied means
        if slot.tag == "tensor":
            return value.requires_grad_(slot.requires_grad)
        if slot.requires_grad not in source.parameters:
            source.parameters[slot.requires_grad] = torch.nn.Parameter(value, slot.requires_grad)
        return source.parameters[slot.requires_grad]


def _constant(value: Any) -> Replace:
    return lambda: value


def _setter(target: Any, key: Any, make: Replace) -> Callable[[], None]:
    return lambda: target.__setitem__(key, make())


def _refill(target: Any, values: Any) -> None:
    target.clear()
    target.extend(values)


def _ties_to(spec: TensorSpec, origin: TensorSpec) -> bool:
    alike = (family(spec.kind), spec.dtype, spec.shape) == (family(origin.kind), origin.dtype, origin.shape)
    return alike and origin.tie is None


def _stored_name(stored: Any) -> str:
    return stored.tag if type(stored) is Slot else type(stored).__name__


def _is_plain(tree: Any, path: Path = ()) -> bool:
    """Whether neither arrays nor objects are below; long bytes are plain."""
    return not any(
        (type(leaf) is Slot and family(leaf.tag) != "bytes") or is_array(leaf) or is_stateful(leaf)
        for _, leaf in _leaves(tree, path)
    )


def _same(stored: Any, present: Any) -> bool:
    """Whether two plain values are equal to the bit and the type."""
    if not all(type(leaf) is not Slot for _, leaf in _leaves(stored, ())):
        return False  # long bytes, which are not read yet
    try:
        return msgspec.msgpack.encode(encode_plain(stored)) == msgspec.msgpack.encode(encode_plain(present))
    except SnapstoreError:
        return False


def _is_strict_module(value: Any) -> bool:
    """Whether `value` is a module whose load_state_dict takes exactly the names that its state_dict gives."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return False
    module = torch.nn.Module
    own = {"state_dict", "load_state_dict"} & vars(value).keys()
    if (
        own
        or type(value).load_state_dict is not module.load_state_dict
        or type(value).state_dict is not module.state_dict
    ):
        return False
    loaders = (module._load_from_state_dict, torch.nn.modules.batchnorm._NormBase._load_from_state_dict)
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
    return all(
        type(child)._load_from_state_dict in loaders and not any(getattr(child, hook, None) for hook in hooks)
        for child in value.modules()
    )


# --- arrays of a restore ---------------------------------------------------------------------------------------------


def _dtype_name(value: Any) -> str:
    return value.dtype.str if isinstance(value, np.ndarray) else str(value.dtype).removeprefix("torch.")


def _cannot_take(spec: TensorSpec, target: Any) -> str | None:
    """Say why an array of `into` cannot hold a stored one, or return None."""
    if not is_array(target):
        return f"type: expected {type(target).__name__} as in `into`, got {spec.kind} {spec.dtype}{list(spec.shape)}"
    try:
        kind, dtype, shape = _described(target)
    except UnsupportedLeafError as error:
        return f"type: {error}"
    if family(kind) != family(spec.kind):
        return f"type: expected {kind} as in `into`, got {spec.kind}"
    if shape != spec.shape:
        return f"shape: expected {shape} as in `into`, got {spec.shape}"
    if dtype != spec.dtype:
        return f"dtype: expected {dtype} as in `into`, got {spec.dtype}"
    strides = target.strides if kind == "array" else target.stride()
    if _overlaps_itself(shape, strides, target.itemsize if kind == "array" else 1):
        return "elements share memory in `into` (an expanded view); give it memory of its own"
    if kind == "array" and not target.flags.writeable:
        return "read-only in `into`; give it a writable copy"
    return None


def _overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether elements may share memory; a layout that interleaves without sharing counts as sharing."""
    reach = itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < reach:
            return math.prod(shape) > 0
        reach += stride * (size - 1)
    return False


def _extent_of(target: Any) -> tuple[str, int, int]:
    """Return (device, first byte, end) of an array's memory."""
    if isinstance(target, np.ndarray):
        start, end = np.lib.array_utils.byte_bounds(target) if target.size else (0, 0)
        return "cpu", int(start), int(end)
    if not target.numel():
        return str(target.device), 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True)) + 1
    return str(target.device), target.data_ptr(), target.data_ptr() + reach * target.dtype.itemsize


def _torch_dtype(spec: TensorSpec) -> torch.dtype:
    import torch

    dtype = getattr(torch, spec.dtype, None)  # spec.check() found the name in our own table
    if not isinstance(dtype, torch.dtype):
        raise CapabilityError(
            f"{shown(spec.path)}: dtype {spec.dtype} is unknown to torch {torch.__version__}; update it"
        )
    return dtype


def _new_array(spec: TensorSpec, device: str | torch.device | None) -> Any:
    if spec.kind == "array":
        return np.empty(spec.shape, numpy_dtype(spec.dtype))
    import torch

    # Bytes first: torch warns when it is asked for empty complex32. `.data` is a tensor of its own, no view of them.
    memory = torch.empty(spec.nbytes, dtype=torch.uint8, device=device or "cpu")
    return memory.view(_torch_dtype(spec)).view(spec.shape).data


def _from_bytes(home: np.ndarray[Any, Any], spec: TensorSpec, device: str | torch.device | None) -> Any:
    if spec.kind == "bytes":
        return home.tobytes()
    fresh = _new_array(spec, device)
    _assign(fresh, home, spec)
    return fresh


def _assign(target: Any, home: np.ndarray[Any, Any], spec: TensorSpec) -> None:
    """Copy bytes in C order into an array of any strides and device."""
    if not home.size:
        return
    if isinstance(target, np.ndarray):
        opaque = np.dtype(f"V{target.itemsize}")
        np.copyto(target.view(opaque), home.view(opaque).reshape(spec.shape))
    else:
        import torch

        _copy_tensor(target, torch.from_numpy(home).view(_torch_dtype(spec)).view(spec.shape))


# --- random numbers --------------------------------------------------------------------------------------------------


class RngState:
    """The global random generators as one object of a state: `state = {"rng": snapstore.RngState(), ...}`.

    Covers Python's `random`, NumPy's legacy generator (`np.random.seed`), and, where torch is imported, torch's CPU
    generator and those of all CUDA devices once CUDA is in use. Restoring sets what was saved and leaves the others
    alone. A snapshot with CUDA generators restores only where as many CUDA devices are visible: with fewer or more, the
    run would draw other numbers, which is an error rather than a surprise.

    Args:
        cuda: Whether to save and restore CUDA generators; False restores such a snapshot on any machine.
    """

    def __init__(self, *, cuda: bool = True) -> None:
        self._cuda = cuda

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states; never imports torch."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
        }
        torch = sys.modules.get("torch")
        if torch is not None:
            state["torch"] = torch.get_rng_state()
            if self._cuda and torch.cuda.is_available() and torch.cuda.is_initialized():
                state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to saved states.

        Raises:
            InvalidInputError: The snapshot holds another number of CUDA generators than there are devices.
        """
        cuda = state.get("cuda") if self._cuda else None
        if cuda is not None:
            self._require_devices(len(cuda))
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        np.random.set_state(state["numpy"])
        if "torch" in state:
            import torch

            torch.set_rng_state(state["torch"].cpu())
            if cuda is not None:
                torch.cuda.set_rng_state_all([one.cpu() for one in cuda])

    @staticmethod
    def _require_devices(saved: int) -> None:
        import torch

        present = torch.cuda.device_count()
        if present != saved:
            raise InvalidInputError(
                f"CUDA generators: expected {present}, one per device here, got {saved} in the snapshot; run with "
                f"{saved} visible devices, or use RngState(cuda=False) to leave CUDA's alone"
            )
