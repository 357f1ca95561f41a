"""Names: checkpoint ids of torch.distributed.checkpoint (DCP) and steps; flat keys of DCP and places in a stored tree.

In: a checkpoint id; or the decoded tree of a snapshot. Out: the step or the references; or every leaf of the tree by
DCP's key for it, with DCP's path. DCP's own walk decides what a leaf is, so a state dict that is loaded has the keys of
the one that was saved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple, TypeGuard

from torch.distributed.checkpoint._traverse import traverse_state_dict

from ..checks import check_step
from ..errors import InvalidInputError
from ..state.tree.decode import Decoded
from ..state.values.classes import Form, Make, Types
from ..state.values.containers import Path, is_mapping
from ..state.values.tensors import Slot, family
from ..text import quoted

_STEP = re.compile(r"(\d+)/*$", re.ASCII)
_FORMS = "expected a step, or a path or text that ends with it, such as 'runs/a/step-100'"


def step_of(checkpoint_id: Any) -> int:
    """Return the step that a checkpoint id ends with: 100 of 100, "step-100", or "/runs/a/step-100".

    Raises:
        InvalidInputError: it does not end with a step.
    """
    step = _find_step(checkpoint_id)
    if step is None:
        raise InvalidInputError(f"checkpoint_id {quoted(checkpoint_id)}: {_FORMS}")
    return check_step(step)


def refs_of(run: str, checkpoint_id: Any) -> list[str]:
    """Return the references that a checkpoint id may mean, of which the first that exists counts.

    A text such as "v2" may be a tag, and otherwise ends with a step. None is the latest.

    Raises:
        InvalidInputError: it names none of them.
    """
    if checkpoint_id is None:
        return [f"{run}@latest"]
    step = _find_step(checkpoint_id)
    name = PurePath(_text(checkpoint_id)).name if isinstance(checkpoint_id, str | os.PathLike) else ""
    names = [name] if name and (step is None or not name.isdecimal()) else []
    if step is not None:
        names.append(str(check_step(step)))
    if not names:
        raise InvalidInputError(f"checkpoint_id {quoted(checkpoint_id)}: {_FORMS}; or with a tag, or 'latest'")
    return [f"{run}@{name}" for name in names]


def _find_step(checkpoint_id: Any) -> int | None:
    if type(checkpoint_id) is int:
        return checkpoint_id
    if not isinstance(checkpoint_id, str | os.PathLike):
        return None
    match = _STEP.search(_text(checkpoint_id))
    return int(match[1]) if match and len(match[1]) <= 20 else None


def _text(checkpoint_id: str | os.PathLike[Any]) -> str:
    return os.fsdecode(checkpoint_id).rstrip("/")


class Leaf(NamedTuple):
    """A leaf of a state dict as DCP sees it.

    Attributes:
        path: DCP's path: keys of dicts as text, positions in lists.
        value: the decoded value; see `is_tensor`. A tuple or an object of a class is one leaf, even with tensors in it.
    """

    path: Path
    value: Any


def is_tensor(value: Any) -> TypeGuard[Slot]:
    """Return whether a decoded value is the slot of a tensor; DCP loads it as a tensor, and other leaves as values."""
    return type(value) is Slot and family(value.tag) == "tensor"


class ObjectTypes(Types):
    """The classes of which a load makes values. The plain forms of all other classes are noted too, as DCP's leaves."""

    def maker(self, form: Form, path: Path) -> Make | None:
        """Return the function that makes a value of a stored form's class; for other classes, the identity."""
        return super().maker(form, path) or (lambda plain: plain)


@dataclass(frozen=True, slots=True)
class Closed:
    """A value that DCP must not walk into: each rank's own value, or an object."""

    value: Any


def flat_leaves(tree: Any, decoded: Decoded, where: str) -> dict[str, Leaf]:
    """Return the leaves of a decoded tree by DCP's keys.

    Args:
        decoded: the notes of the tree's decoding, with `ObjectTypes`.
        where: names the snapshot in errors.

    Raises:
        InvalidInputError: the state is no dict; or two leaves have one key, such as the key "a.b", and "b" in "a".
    """
    if not is_mapping(tree) or id(tree) in decoded.makers:
        raise InvalidInputError(
            f"{where}: its state is a {type(tree).__name__}, not a dict, so DCP cannot load it: use Repository.restore"
        )
    leaves: dict[str, Leaf] = {}

    def visit(path: Path, value: Any) -> None:
        key = ".".join(map(str, path))
        if key in leaves:
            raise InvalidInputError(
                f"{where}: two values have the key {key!r} in DCP: use Repository.restore or restore_into"
            )
        leaves[key] = Leaf(path, value.value if type(value) is Closed else value)

    walk: Callable[..., None] = traverse_state_dict
    walk(_opened(tree, decoded), visit, is_tensor)
    return leaves


def _opened(node: Any, decoded: Decoded) -> Any:
    """Return a tree in which each object is a `Closed`."""
    if id(node) in decoded.makers:
        return Closed(node)
    if id(node) in decoded.plain:
        return node
    if is_mapping(node):
        return {key: _opened(child, decoded) for key, child in node.items()}
    return [_opened(child, decoded) for child in node] if type(node) is list else node
