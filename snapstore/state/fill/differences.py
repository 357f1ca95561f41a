"""Differences between a snapshot and `into`: count them by part, and write the error with the line of code that helps.

In: the path and the text of every difference; names that only one side has. Out: the text of one error. A wrapper such
as torch.compile puts a prefix on all names of a module: names that differ only by it are one difference.
Stateless but for `Differences`, which one restore fills; torch is not imported.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from ...text import counted
from ..values.containers import CONTAINERS, Path, children, display, is_mapping, leaves, shown
from ..values.tensors import Slot

MAX_LINES = 50  # differences that one error lists
MIN_LINES = 4  # differences that it lists of each part, if the part has so many
MAX_KEYS = 30  # names that a line of code in it lists

#: The attribute in which a wrapper holds its module, and so the prefix of its names.
WRAPPERS = {"_orig_mod": "torch.compile", "module": "DDP"}

IN_INTO, IN_SNAPSHOT = "missing in the target", "missing in the snapshot"
#: The words that a count uses for differences whose text begins with the key.
_COUNTED = {IN_INTO: IN_INTO, IN_SNAPSHOT: IN_SNAPSHOT}
_COUNTED |= {kind: f"of another {kind}" for kind in ("shape", "dtype", "type")}


class Differences:
    """The differences of one restore."""

    def __init__(self) -> None:
        self._parts: dict[Path, list[tuple[Path, str]]] = {}  # in the order in which they were found
        self._renamed: dict[Path, list[tuple[int, str]]] = {}  # names under another prefix, and the advice

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, path: Path, text: str) -> None:
        """Add a difference; the text begins with its kind and a colon, or is one of `IN_INTO` and `IN_SNAPSHOT`."""
        self._parts.setdefault(path[:1], []).append((path, text))

    def add_renamed(self, path: Path, names: int, advice: str) -> None:
        """Add names below a path that differ only by a wrapper's prefix."""
        self._parts.setdefault(path[:1], [])
        self._renamed.setdefault(path[:1], []).append((names, advice))

    def message(self, stored: Any, into: Any, wholes: Sequence[Path], *, all_selected: bool) -> list[str]:
        """Return the lines of the error.

        Args:
            stored, into: The roots of both sides.
            wholes: The paths of values that are restored as a whole or not at all, such as an optimizer's state.
            all_selected: Whether the restore has no `keys`; the text then recommends some.
        """
        leaves_of_all = [path for found in self._parts.values() for path, _ in found]
        cut = [whole for whole in wholes if any(path[: len(whole)] == whole for path in leaves_of_all)]
        each = max(MIN_LINES, MAX_LINES // len(self._parts))
        lines: list[str] = []
        for part in list(self._parts)[:MAX_LINES]:
            lines += self._lines(part, _names(stored), _names(into), each)
        if len(self._parts) > MAX_LINES:
            lines.append(f"... and {len(self._parts) - MAX_LINES} more parts")
        advice = self._advice(stored, into, cut, all_selected=all_selected)
        return [
            "the snapshot does not fit the target; nothing was changed:",
            *(f"  {line}" for line in lines),
            f"restore without a target to get all of it, or {advice}",
        ]

    def _advice(self, stored: Any, into: Any, cut: Sequence[Path], *, all_selected: bool) -> str:
        """Return what to restore instead.

        `keys` can select the parts without a difference. But they would leave out a whole part, such as the optimizer,
        if only some of its names are missing in the snapshot.
        """
        kinds = {text for found in self._parts.values() for _, text in found}
        both = _names(stored).keys() & _names(into).keys()
        partly = any(IN_SNAPSHOT in dict(found).values() for part, found in self._parts.items() if {*part} & both)
        if partly and not cut and not self._renamed and kinds <= {IN_INTO, IN_SNAPSHOT}:
            return "only the names that both have: restore_into(..., strict=False); the others keep their values"
        fitting = self._fitting(stored, cut) if all_selected else []
        what = "what the target has" if not self._renamed and kinds == {IN_INTO} else "the parts that fit"
        return f"only {what}: restore_into(..., keys={fitting})" if fitting else "with `keys` what fits"

    def _lines(self, part: Path, stored: Collection[Any], into: Collection[Any], each: int) -> list[str]:
        """Return the lines of one part: its counts, some of its differences, and advice."""
        found, renamed = self._parts[part], self._renamed.get(part, [])
        kinds = Counter(_COUNTED.get(text.partition(":")[0], "that cannot be filled") for _, text in found)
        for kind, there in ((IN_INTO, into), (IN_SNAPSHOT, stored)):
            if part and kinds.keys() == {kind} and part[0] not in there and found[0][0] != part:
                return [f"{shown(part)}: {kind} ({counted(len(found), 'name')})"]
        if len(found) == 1 and not renamed:
            path, text = found[0]
            return [f"{shown(path)}: {text}"]
        counts = [f"{count} {kind}" for kind, count in kinds.items()]
        if renamed:
            counts.insert(0, f"{counted(sum(count for count, _ in renamed), 'name')} with another prefix")
        lines = [f"{shown(part)}: {', '.join(counts)}", *(f"  {advice}" for _, advice in renamed[:each])]
        here, there = ({path for path, text in found if text == kind} for kind in (IN_INTO, IN_SNAPSHOT))
        note = ", which has an unequal key of the same text"
        lines += [f"  {shown(path)}: {text}{note if path in here & there else ''}" for path, text in found[:each]]
        return [*lines, f"  ... and {len(found) - each} more"] if len(found) > each else lines

    def _fitting(self, stored: Any, cut: Sequence[Path]) -> list[str]:
        """Return `keys` that select what fits: parts without a difference; and, of parts whose only differences are
        names that `into` lacks, the other names.

        The list is empty if no short list of names selects just these.
        """
        if not is_mapping(stored) or () in self._parts:
            return []
        names = _names(stored)
        others = [shown(part) for part in self._parts if part[0] not in names]  # what the keys may not select
        keys: dict[str, None] = {}
        within: list[str] = []
        for element, _, child in children(stored):
            path: Path = (element,)
            found = self._parts.get(path)
            if found is None:
                keys[str(element)] = None
            elif path in self._renamed or any(text != IN_INTO for _, text in found):
                others.append(shown(path))
            else:
                missing = {*cut, *(leaf for leaf, _ in found)}
                for leaf, _ in leaves(child, path):
                    lacks = any(leaf[:length] in missing for length in range(1, len(leaf) + 1))
                    (others if lacks else within).append(display(leaf))
        avoid = {start for other in others for start in _starts(other)}
        for text in within:
            keys[next((start for start in _starts(text) if start not in avoid), text)] = None
        if len(keys) > MAX_KEYS or avoid & keys.keys():
            return []
        return [] if any(start in others for key in keys for start in _starts(key)) else list(keys)


def _starts(text: str) -> Iterator[str]:
    """Return every beginning of a dotted path that ends before a dot, and the path: each is a key that selects it."""
    return accumulate(text.split("."), "{}.{}".format)


def _names(tree: Any) -> dict[Any, None]:
    """Return the path elements of a tree's children; none for a leaf."""
    return {element: None for element, _, _ in children(tree)} if type(tree) in CONTAINERS else {}


def renamed(stored: Iterable[Any], into: Iterable[Any]) -> dict[str, str]:
    """Return the names of the snapshot, each with its name in `into`, that differ only by wrappers' prefixes.

    Args:
        stored, into: The names of one module that only this side has.
    """
    stored, into = list(stored), list(into)
    alike = {*stored} & {*into}  # text for keys that differ, such as None and "None", or two NaNs
    there = {bare(name): name for name in into if isinstance(name, str) and name not in alike}
    names = {name: bare(name) for name in stored if isinstance(name, str) and name not in alike} if there else {}
    return {name: there.pop(inner) for name, inner in names.items() if inner and inner in there}


def bare(name: str) -> str:
    """Return a name without the elements that wrappers have put into it."""
    return ".".join(element for element in name.split(".") if element not in WRAPPERS)


def advice(pairs: dict[str, str], path: Path, *, is_module: bool) -> str:
    """Return how the names of the snapshot and of `into` differ, and the line of code that helps.

    Args:
        pairs: As `renamed` returns them.
        path: The place of the module, or of its state_dict, in `into`.
        is_module: Whether `into` has the module there.
    """
    stored, into = list(pairs), list(pairs.values())
    here = "into" + "".join(f"[{element!r}]" for element in path)
    before, now = _leads(stored, into)
    if [name.removeprefix(before) for name in stored] != [name.removeprefix(now) for name in into]:
        return _advice_inside(stored, into, here, is_module)
    if is_module:
        instead = ".".join([here, *now.split(".")[:-1]])
        for name in reversed(before.split(".")[:-1]):
            instead = f"torch.nn.ModuleDict({{{name!r}: {instead}}})"
    else:
        name = f"name.removeprefix({now!r})" if now else "name"
        instead = f"{{{f'{before!r} + ' if before else ''}{name}: value for name, value in {here}.items()}}"
    sides = [f"{_prefix(lead)} in {side}" for lead, side in ((before, "the snapshot"), (now, "the target")) if lead]
    where = ", and ".join(sides) if len(sides) > 1 else f"{sides[0]} alone"
    rename = f", or rename={{{before!r}: {now!r}}}" if before else ""
    return f"the names have {where}; pass {instead} instead of {here}{rename}"


def _advice_inside(stored: list[str], into: list[str], here: str, is_module: bool) -> str:
    """Return the advice for a module that has a module inside which is wrapped on one side only."""
    for wrapper in WRAPPERS:
        prefix = f"{wrapper}."
        cut = f"{{name.replace({prefix!r}, ''): value for name, value in "
        if [name.replace(prefix, "") for name in into] == stored:
            state = f"{here}.state_dict()" if is_module else here
            extra = f"the names contain {_prefix(prefix)} in the target alone"
            return f"{extra}; pass {cut}{state}.items()}} instead of {here}"
        if [name.replace(prefix, "") for name in stored] == into:
            instead = f"restore without a target, and load {cut}state.items()}}"
            return f"the names contain {_prefix(prefix)} in the snapshot alone; {instead}"
    tools = " and ".join(WRAPPERS.values())
    return f"the names differ by the prefixes of {tools} inside; wrap the modules as they were at the save"


def _prefix(lead: str) -> str:
    return f"the prefix {lead!r} of {' and '.join(WRAPPERS[name] for name in lead.split('.')[:-1])}"


def _leads(stored: list[str], into: list[str]) -> tuple[str, str]:
    """Return the prefix of wrappers that all names of each side begin with, without an end that both prefixes share."""
    before, now = _lead(stored), _lead(into)
    for name in reversed(before.split(".")[:-1]):
        if not f".{now}".endswith(f".{name}."):
            break
        before, now = before.removesuffix(f"{name}."), now.removesuffix(f"{name}.")
    return before, now


def _lead(names: Iterable[str]) -> str:
    """Return the prefix of wrappers that all names begin with."""
    first, *others = names
    lead = "".join(f"{name}." for name in takewhile(WRAPPERS.__contains__, first.split(".")))
    return lead if all(name.startswith(lead) for name in others) else ""


def sequence_name(value: Any) -> str:
    """Return the type of a list, tuple or deque for a message."""
    name = type(value).__name__
    return f"{name}(maxlen={value.maxlen})" if isinstance(value, deque) else name


def stored_name(stored: Any, composites: Mapping[int, Any]) -> str:
    """Return the type of a decoded value for a message.

    Args:
        composites: See `Decoded`.
    """
    if id(stored) in composites:
        return ".".join(composites[id(stored)][1:])
    return stored.tag if type(stored) is Slot else type(stored).__name__
