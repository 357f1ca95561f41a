"""Parts in, state out: plan the changes of a restore, and put the state together at the end.

In: parts as manifests store them, and optionally `into`, the state to fill. Out: which arrays to read, memory for each
of them (buffers.py), and the state. All differences between the snapshot and `into` are raised at once, before
a byte is written. flatten.py is the inverse.

Rules that users see:

- Names and shapes inside an object belong to it and are not checked, except in modules with torch's own loaders, which
  would also refuse wrong ones. The state of an optimizer must fit its groups and parameters (optimizer_fit.py).
- With `into`, dict keys must be the same on both sides. A list, tuple or deque without arrays and objects is one value,
  so its length may differ; with arrays inside, the length must be equal. Lists and dicts are changed in place.
- With `keys` and no `into`, lists and tuples contain only the selected items: the next ones move up.
- A container or object that `into` has at several places gets one value: the snapshot must have equal values there.
- Sharded tensors of `into` get the boxes that they hold; no rank communicates. An optimizer that has no state yet gets
  the state of its sharded parameters in their sharding.
- Values of other ranks are left out, and `into` keeps its values in their places. Without `into`, the values of all
  ranks become one `RankValues` if the parts have them.
- A `PerRank` of `into` takes the stored value, whatever value it has. If that has objects, it is filled as `into` is.
- An object whose class has `load_last = True` (`RngState`) is loaded last: loading the others may draw random numbers.

torch is imported only when there are tensors. `RestorePlan.__init__` and `finish` belong to the thread that owns the
state; `buffer` and `complete` of different arrays may run on any threads.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInputError, add_line
from ..tree.decode import ELSEWHERE, Decoded
from ..values import classes, composite, configs, torch_layouts
from ..values.arrays import SHARED_ELEMENTS, OnDevice, mismatch
from ..values.containers import CONTAINERS, MAX_DEPTH, Path, children, is_mapping, leaves, like, metadata_of, shown
from ..values.tensors import Slot, StoredPart, family, is_array
from ..values.torch_layouts import layout_of
from ..walk.per_rank import PerRank, RankValues, has_objects
from ..walk.rng import RngState
from ..walk.stateful import is_optimizer, is_stateful, is_strict_module, is_torch_module, loader_decides, state_of
from . import composite_fit, optimizer_fit
from .buffers import RestoreBuffers, Want, slots_of
from .differences import IN_INTO, IN_SNAPSHOT, Differences, advice, renamed, sequence_name, stored_name
from .fit import Fit, Mismatches
from .object_loads import Load, ObjectLoads, arrays_of_both
from .optimizer_fit import with_sharded_state
from .repeated_places import RepeatedPlaces, is_plain, same_plain

if TYPE_CHECKING:
    import torch

PARTLY_FILLED = "the target may be partly filled by now: restore into it again, or make a new one, before you use it"


Replace = Callable[[], Any]  # makes the new value that replaces the present one in its parent


class RestorePlan:
    """The plan of one restore: which arrays it reads, where they go, and how the state is built.

    Call sequence: construct, then for every entry of `wants`: `buffer`, fill, verify, `complete`; at the end
    `finish`. Construction finds every difference between the snapshot and `into`; nothing is modified before the first
    `buffer`. If a restore stops between `buffer` and `finish`, `into` has a mixture of values: restore it again.

    Args:
        parts: All parts, or with `keys` at least `parts_needed`.
        into: The state to fill; None builds a new state.
        keys: Names, or patterns (fnmatch, case-sensitive), over dotted paths; None selects everything. Or a `Fit`.
        device: The device of new tensors when `into` is None; CPU by default.
        on_device: Whether bytes for arrays on a device arrive in memory of that device; None: all arrive in host
            memory.
        decoded: Counts the memory of large plain values before they are made, and has the classes of users; None: the
            memory is not bounded, and values come back in their plain forms.
        generators_stay: Whether an `RngState` of `into` keeps its generators, because another number of ranks saved.

    Attributes:
        wants: Every array to read, in the order of the manifests.
        buffers: Their memory.
        left_out: The names that are left out with `strict=False`; None if it is True.
        generators: The paths of the `RngState` objects that keep their generators.
        elsewhere: The paths of selected values of other ranks, `generators` excepted; they are left out.

    Raises:
        InvalidInputError: `into` differs from the snapshot; the differences are counted by part, and up to 50 listed.
        NotFoundError: A key selects nothing.
        FormatError: `flatten` cannot have made these trees.
    """

    def __init__(
        self,
        parts: Sequence[StoredPart],
        *,
        into: Any = None,
        keys: str | Sequence[str] | Fit | None = None,
        device: str | torch.device | None = None,
        on_device: OnDevice = None,
        decoded: Decoded | None = None,
        generators_stay: bool = False,
    ) -> None:
        if into is not None and device is not None:
            raise InvalidInputError(
                "device: has no effect with a target, whose tensors stay where they are; pass only one"
            )
        self._into = into
        fit = Fit.of(keys)
        self._all_selected = fit.keys is None
        self.left_out = fit.strict if isinstance(fit.strict, Mismatches) else None if fit.strict else Mismatches()
        self._decoded = decoded = decoded or Decoded()
        self._generators_stay, self.generators = generators_stay, list[Path]()
        stored, self._selection = fit.decode(parts, decoded)
        decoded.makers |= {key: (values, RankValues) for key, values in decoded.by_rank.items()}
        self.buffers = RestoreBuffers(parts, device, on_device=on_device, decoded=decoded)
        self._differences = Differences()
        self._updates: list[Callable[[], None]] = []
        self._assigned: list[tuple[Path, Any, Replace]] = []  # tensors of torch's own kinds
        self._loads = ObjectLoads(self.buffers, self._selection.matches, decoded)
        self._repeated = RepeatedPlaces(self.buffers, self._selection, exact=self._all_selected)
        selected = self._selection.prune(stored, ())
        self._stored = selected if into is None else stored
        for slot in slots_of(selected, decoded.plain):
            self.buffers.add(slot)
        if into is not None:
            self._plan_root()
        others = (path for path, leaf in leaves(stored, ()) if leaf is ELSEWHERE) if decoded.elsewhere else ()
        self.elsewhere = [path for path in others if self._selection.matches(path) and path not in self.generators]
        self.wants: list[Want] = self.buffers.wants()

    # --- plan: compare, and change nothing ---

    def _differ(self, path: Path, text: str) -> None:
        """Note a difference: as an error, or as a name that is left out."""
        if self.left_out is not None and text in (IN_INTO, IN_SNAPSHOT):
            (self.left_out.unexpected if text == IN_INTO else self.left_out.missing).append(shown(path))
        else:
            self._differences.add(path, text)

    def _differ_in_type(self, path: Path, stored: Any, target: Any) -> None:
        got = stored_name(stored, self._decoded.composites)
        self._differ(path, f"type: expected {type(target).__name__} as in the target, got {got}")

    def _plan_root(self) -> None:
        if self.left_out is not None:
            self.left_out.clear()
        some_arrays = len(self.buffers) > 0
        replaced = self._plan(self._stored, self._into, ())
        if replaced is not None:
            self._differ(
                (), "would have to be replaced: the target must be a container or object that can change in place"
            )
        if self._differences:
            optimizers = list(optimizer_fit.states_in(self._stored, ()))
            lines = self._differences.message(self._stored, self._into, optimizers, all_selected=self._all_selected)
            raise InvalidInputError(*lines)
        if some_arrays and not len(self.buffers) and not self.generators:
            raise InvalidInputError(f"nothing of the snapshot fits the target, also with strict=False: {self.left_out}")
        self.buffers.find_overlaps()

    def _plan(self, stored: Any, target: Any, path: Path) -> Replace | None:
        """Plan one place; return how to make its new value if the parent must replace it."""
        extent = self._selection.extent(stored, path)
        if self._generators_stay and isinstance(target, RngState) and extent != "none":
            self.generators.append(path)
            self._leave_out(stored)
            return None
        if stored is ELSEWHERE:
            return None
        if extent == "none":
            self._plan_missing(target, path)
            return None
        if len(path) >= MAX_DEPTH and type(target) in CONTAINERS:
            raise InvalidInputError(f"{shown(path[:8])}...: the target is more than {MAX_DEPTH} levels deep")
        if type(target) is PerRank and has_objects(target.value):
            self._plan_per_rank(stored, target, path)
            return None
        if is_stateful(target):
            self._plan_object(stored, target, path, extent)
            return None
        if type(stored) is Slot and family(stored.tag) != "bytes":
            self._plan_array(stored, target, path)
            return None
        if configs.is_config(target) and id(stored) in self._decoded.makers:
            return self._builder(stored)
        if type(stored) in CONTAINERS and (view := classes.view_of(target)) is not None:
            return self._plan_view(stored, target, view, path)
        if type(stored) not in CONTAINERS:
            return self._plan_plain(stored, target, path)
        if extent == "all" and type(stored) in (list, tuple, deque) and is_plain(stored) and is_plain(target, path):
            return self._plan_value(stored, target, path)
        return self._plan_container(stored, target, path)

    def _note_place(self, stored: Any, target: Any, path: Path) -> None:
        """Note a container or object that changes in place: another place of the target may be the same one."""
        if (text := self._repeated.note(stored, target, path)) is not None:
            self._differ(path, text)

    def _plan_missing(self, target: Any, path: Path) -> None:
        """Note the leaves of `into` that `keys` selects and the snapshot lacks."""
        for leaf, _ in leaves(target, path):
            if self._selection.matches(leaf):
                self._differ(leaf, IN_SNAPSHOT)

    def _plan_array(self, slot: Slot, target: Any, path: Path) -> None:
        problem = mismatch(self.buffers.spec(slot), target)
        if problem:
            self._differ(path, problem)
        else:
            self.buffers.claim(slot, target, owned=False)

    def _plan_plain(self, stored: Any, target: Any, path: Path) -> Replace | None:
        if type(target) in CONTAINERS or is_array(target):
            self._differ_in_type(path, stored, target)
            return None
        return None if same_plain(stored, target) else self._builder(stored)

    def _plan_view(self, stored: Any, target: Any, view: Any, path: Path) -> Replace | None:
        """Plan a dataclass, namespace, named tuple, or subclass of dict or list by its members; it stays the object."""
        if composite.core_of(target) is not None:
            self._plan_composite(stored, target, view, path)
            return None
        replaced = self._plan(stored, view, path)
        if type(view) is not tuple:
            self._note_place(stored, target, path)
            self._updates.append(lambda: classes.put_back(target, view))
        return None if replaced is None else lambda: target._make(replaced())

    def _plan_composite(self, stored: Any, target: Any, view: dict[str, Any], path: Path) -> None:
        """Plan the tensors in a composite tensor."""
        if (text := composite_fit.mismatch(stored, target, self._decoded, in_place=True)) is not None:
            self._differ(path, text)
            return
        self._note_place(stored, target, path)
        if layout_of(target) is not None:
            self._assigned.append((path, target, make := self._builder(stored)))
            self._updates.append(lambda: torch_layouts.assign(target, make()))
            return
        for name in composite.inner_of(view):
            self._plan(stored[name], view[name], (*path, name))

    def _plan_per_rank(self, stored: Any, target: PerRank, path: Path) -> None:
        """Plan a rank's own value with objects in it: they stay, and each loads its own state."""
        self._note_place(stored, target, path)
        replaced = self._plan(stored, target.value, path)
        if replaced is not None:
            self._updates.append(lambda: setattr(target, "value", replaced()))

    def _plan_value(self, stored: Any, target: Any, path: Path) -> Replace | None:
        """Plan a list, tuple or deque of plain values, whose length is part of its value."""
        if type(target) is not type(stored) or getattr(target, "maxlen", 0) != getattr(stored, "maxlen", 0):
            self._differ(path, f"type: expected {sequence_name(target)} as in the target, got {sequence_name(stored)}")
        elif type(target) is tuple:
            return None if same_plain(stored, target) else self._builder(stored)
        else:
            self._note_place(stored, target, path)
            self._updates.append(lambda: _refill(target, self.buffers.build(stored)))
        return None

    def _plan_container(self, stored: Any, target: Any, path: Path) -> Replace | None:
        alike = is_mapping(target) if is_mapping(stored) else type(target) is type(stored)
        if not alike:
            self._differ_in_type(path, stored, target)
            return None
        if type(target) is not tuple:
            self._note_place(stored, target, path)
        present = {key: (element, child) for element, key, child in children(target)}
        replacements: dict[Any, Replace] = {}
        absent: dict[str | int, Any] = {}
        for element, key, child in children(stored):
            if key in present:
                replacement = self._plan(child, present.pop(key)[1], (*path, element))
                if replacement is not None:
                    replacements[key] = replacement
            elif child is not ELSEWHERE:
                absent[element] = child
        extra = dict(present.values())
        for element in self._plan_renamed(absent, extra, path, is_module=False):
            absent.pop(element, None)
            extra.pop(element, None)
        for element, child in absent.items():
            for leaf, value in leaves(child, (*path, element)):
                if self._selection.matches(leaf):
                    self._differ(leaf, IN_INTO)
                    self._leave_out(value)
        for element, child in extra.items():
            self._plan_missing(child, (*path, element))
        if type(target) is tuple and replacements:
            return lambda: tuple(replacements[i]() if i in replacements else old for i, old in enumerate(target))
        self._updates.extend(_setter(target, key, make) for key, make in replacements.items())
        if type(target) is OrderedDict and (metadata := metadata_of(stored)) is not None:
            self._updates.append(lambda: setattr(target, "_metadata", self.buffers.build(metadata)))
        return None

    def _leave_out(self, stored: Any) -> None:
        """Do not read the arrays of a stored value, unless another place wants them."""
        for slot in slots_of(stored):
            self.buffers.remove(slot)

    def _plan_object(self, stored: Any, target: Any, path: Path, extent: str) -> None:
        self._note_place(stored, target, path)
        needed = extent == "some" or not is_plain(stored) or is_strict_module(target) or is_optimizer(target)
        present = state_of(target, path) if needed else None  # may be slow: a loader starts its workers
        if is_strict_module(target) and is_mapping(stored):
            self._compare_names(stored, present, path)
        if needed:
            self._match(stored, target, present, path)
        if self.left_out is not None and is_strict_module(target) and is_mapping(stored):
            build = self._common(stored, present, path)
        elif extent == "some":
            build = self._merge(stored, present, path)
        else:
            build = self._builder(stored)
        self._loads.add(Load(path, target, stored, build))

    def _compare_names(self, stored: Any, present: Any, path: Path) -> None:
        absent = [element for element, key, _ in children(stored) if key not in present]
        extra = [element for element, key, _ in children(present) if key not in stored]
        known = self._plan_renamed(absent, extra, path, is_module=True)
        for names, text in ((absent, IN_INTO), (extra, IN_SNAPSHOT)):
            for element in names:
                if element not in known and self._selection.matches((*path, element)):
                    self._differ((*path, element), text)

    def _plan_renamed(
        self, absent: Iterable[str | int], extra: Iterable[str | int], path: Path, *, is_module: bool
    ) -> set[str]:
        """Note the names that only one side has because of a wrapper's prefix; return them."""
        pairs = renamed(absent, extra)
        names = {*pairs, *pairs.values()}
        if any(self._selection.matches((*path, name)) for name in names):
            self._differences.add_renamed(path, len(pairs), advice(pairs, path, is_module=is_module))
        return names

    def _match(self, stored: Any, target: Any, present: Any, path: Path) -> None:
        """Find arrays in an object's own state that can be filled directly; note what its loader would not refuse."""
        spec_of, decoded = self.buffers.spec, self._decoded
        if is_optimizer(target):
            for below, text in optimizer_fit.differences(target, stored, present, path, spec_of, decoded):
                if below[-1] == "param_groups" or self._selection.matches(below):
                    self._differ(below, text)
        present = with_sharded_state(target, stored, present, spec_of, decoded)
        for below, value, text in composite_fit.differences(stored, present, path, decoded):
            if self._selection.extent(value, below) != "none":
                self._differ(below, text)
        may_differ = loader_decides(target, path)
        if is_optimizer(target):
            may_differ = partial(optimizer_fit.loader_decides, stored, decoded)
        for below, slot, array in arrays_of_both(stored, present, path, self._selection.matches):
            problem = mismatch(spec_of(slot), array)
            if problem is None:
                replaceable = not is_torch_module(target) or bool(may_differ(below))
                self.buffers.claim(slot, array, owned=True, replaceable=replaceable)
            elif problem == SHARED_ELEMENTS:
                self.buffers.compare_loaded(slot)
            elif problem.startswith(("shape", "dtype")) and problem.partition(":")[0] not in may_differ(below):
                self._differ(below, problem)

    def _common(self, stored: Any, present: Any, path: Path) -> Replace:
        """Plan a module's state under the names that the module has; it keeps its values that the snapshot lacks."""
        items: dict[Any, Replace] = {key: _constant(child) for _, key, child in children(present)}
        for element, key, child in children(stored):
            if key not in items:
                self._leave_out(child)
            elif self._selection.matches((*path, element)):
                items[key] = self._builder(child)
        return lambda: self.buffers.like(stored, [(key, make()) for key, make in items.items()])

    def _merge(self, stored: Any, present: Any, path: Path) -> Replace:
        """Plan an object's state that is selected in part: the rest stays as the object has it."""
        extent = self._selection.extent(stored, path)
        if extent != "some":
            return _constant(present) if extent == "none" else self._builder(stored)
        sequences = not is_mapping(stored) and type(present) is type(stored) and len(present) == len(stored)
        if not (is_mapping(stored) and is_mapping(present)) and not sequences:
            self._differ(
                path, "`keys` selects some of it, but the target has a different structure here; select all of it"
            )
            return _constant(present)
        items: dict[Any, Replace] = {key: _constant(child) for _, key, child in children(present)}
        for element, key, child in children(stored):
            below = (*path, element)
            if key in items and self._selection.extent(child, below) == "some":
                items[key] = self._merge(child, present[key], below)
            elif self._selection.extent(child, below) != "none":
                items[key] = self._builder(self._selection.prune(child, below))
        return lambda: like(present, [(key, make()) for key, make in items.items()])

    # --- finish ---

    def finish(self) -> Any:
        """Put the state together, once every entry of `wants` is complete.

        Returns:
            The state, or `into`.

        Raises:
            InvalidInputError: A `load_state_dict` failed, cast or changed values, or left tensors on the meta device;
                or arrays of `into` share memory and the snapshot has different values for them.
        """
        waiting = self.buffers.waiting()
        if waiting:
            raise RuntimeError(f"{shown(waiting[0])}: finish() before complete()")
        if self._into is None:
            return self.buffers.build(self._stored)
        try:
            self._repeated.check()
            self.buffers.fill_overlapping()
            for update in self._updates:
                update()
            self._loads.run()
            composite_fit.require_assigned(self._assigned)
        except Exception as error:
            add_line(error, PARTLY_FILLED)
            raise
        return self._into

    def _builder(self, tree: Any) -> Replace:
        return lambda: self.buffers.build(tree)


def _constant(value: Any) -> Replace:
    return lambda: value


def _setter(target: Any, key: Any, make: Replace) -> Callable[[], None]:
    return lambda: target.__setitem__(key, make())


def _refill(target: Any, values: Any) -> None:
    target.clear()
    target.extend(values)
