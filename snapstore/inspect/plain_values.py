"""Plain values of a snapshot: the leaves of its state that are no tensors, such as an epoch or a learning rate.

In: the manifests of a snapshot. Out: paths and values. Reads the pages of large trees, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..context import Context
from ..format.manifests.manifest import Manifest
from ..restore.manifests import decoding_of, stored_parts
from ..state.tree.decode import decode
from ..state.values.containers import CONTAINERS, children, is_mapping
from ..state.values.tensors import Slot

#: A path as (path of the parent, element), so that the paths of a tree share memory.
Chained = tuple[Any, str | int] | None


def decode_tree(context: Context, manifests: Sequence[Manifest], what: str) -> Any:
    """Return the state of a snapshot with a Slot for each tensor.

    Args:
        what: names the snapshot in errors.

    Raises:
        FormatError: a tree is not one that snapstore writes, or a newer snapstore wrote it.
        IntegrityError: a page of it is damaged.
        CapabilityError: it does not fit into memory.
    """
    return decode(stored_parts(context, manifests, what), decoded=decoding_of(what))


def plain_values(tree: Any, path: Chained = None, *, whole_lists: bool = False) -> Iterator[tuple[Chained, Any]]:
    """Yield (path, value) of every plain leaf; an empty container is a leaf.

    Args:
        whole_lists: a list, tuple or deque that holds only plain leaves counts as one value.
    """
    if type(tree) in CONTAINERS and tree and not (whole_lists and _is_flat_list(tree)):
        for element, _, child in children(tree):
            yield from plain_values(child, (path, element), whole_lists=whole_lists)
    elif not isinstance(tree, Slot):
        yield path, tree


def container_types(tree: Any, path: Chained = None) -> Iterator[tuple[Chained, str]]:
    """Yield (path, name of its type) of every container that is not empty."""
    if type(tree) in CONTAINERS and tree:
        yield path, type(tree).__name__
        for element, _, child in children(tree):
            yield from container_types(child, (path, element))


def _is_flat_list(tree: Any) -> bool:
    return not is_mapping(tree) and not any(isinstance(child, Slot) or type(child) in CONTAINERS for child in tree)


def show_value(value: Any, most: int = 200) -> str:
    """Return the repr of a value; a long one is cut."""
    if type(value) in CONTAINERS and len(value) > most:  # by `whole_lists`: its repr may take megabytes
        return f"{cut(', '.join(show_value(child, most) for child in list(value)[:most]), most)} ({len(value)} in all)"
    try:
        return cut(repr(value), most)
    except ValueError:  # an int of more than 4,300 digits
        return f"<{type(value).__name__}>"


def dotted(path: Chained) -> str:
    """Return the dotted path; long keys and long paths are cut."""
    elements: list[str] = []
    while path is not None:
        path, element = path
        elements.append(cut(str(element)))
    return cut(".".join(reversed(elements)), 1000)


def cut(text: str, most: int = 200) -> str:
    """Return a text, cut to at most `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
