"""Open a folder of Orbax (JAX): a step of its CheckpointManager, or one item of it.

In: a folder with `_METADATA`, or one whose items have it. Out: the nested state, arrays as torch tensors. Orbax reads
the arrays, in groups of some megabytes. The package orbax-checkpoint is imported when a folder is opened.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidInputError, needs
from ..state.values.tensors import TORCH_DTYPES
from .checkpoint import Checkpoint, file_inside, first_line, nest, read_json
from .lazy_state import Later

TREE, STEP = "_METADATA", "_CHECKPOINT_METADATA"
#: The name of an item that was saved without a name.
DEFAULT = "default"
GROUP_BYTES = 64 * 1024 * 1024
LeafPath = tuple[str | int, ...]


def is_orbax(folder: Path) -> bool:
    """Return whether a folder is one of Orbax."""
    return (folder / TREE).is_file() or (folder / STEP).is_file()


def open_orbax(folder: Path) -> Checkpoint:
    """Open a folder.

    Raises:
        CapabilityError: orbax-checkpoint is not installed.
        InvalidInputError: it is damaged, or holds an array without a stored form.
    """
    names = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
    left_out: list[str] = []
    state: Any
    if (folder / TREE).is_file():
        state = _tree(folder)
    else:
        state = {}
        for name in names:
            if (folder / name / TREE).is_file():
                state[name] = _tree(folder / name)
            elif (folder / name / "metadata").is_file():  # of JsonSave
                state[name] = read_json(file_inside(folder, f"{name}/metadata", folder))
            else:
                left_out.append(name)
        if not state:
            raise InvalidInputError(f"{folder}: no item of it can be read: {', '.join(names) or 'there is none'}")
        state = state[DEFAULT] if set(state) == {DEFAULT} else state
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Checkpoint(state, size, left_out=left_out)


def _tree(folder: Path) -> Any:
    """Return the state of an item."""
    reader = _OrbaxReader(folder)
    leaves, plain = reader.leaves(), []
    group: list[LeafPath] = []
    size = 0
    found: dict[LeafPath, Any] = {}
    for key, leaf in leaves.items():
        if not _is_array(leaf):
            found[key] = leaf
            if not _is_empty(leaf):
                plain.append(key)
            continue
        nbytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        if group and size + nbytes > GROUP_BYTES:
            group, size = [], 0
        group.append(key)
        size += nbytes
        found[key] = Later(partial(reader.read, key, group))
    values = reader.values(plain) if plain else {}
    return nest(((key, values.get(key, leaf)) for key, leaf in found.items()), folder)


class _OrbaxReader:
    """Reads the arrays of an item; those of one group together."""

    def __init__(self, folder: Path) -> None:
        with needs("orbax-checkpoint", 'pip install "snapstore[orbax]"'):
            import orbax.checkpoint as ocp
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._ocp, self._folder, self._checkpointer = ocp, folder, ocp.PyTreeCheckpointer()
        self._ready: dict[LeafPath, Any] = {}
        self._structure: Any = None

    def leaves(self) -> dict[LeafPath, Any]:
        """Return the metadata of each leaf by its path."""
        found: Any = self._guarded(lambda: self._checkpointer.metadata(self._folder.resolve()))
        found = getattr(found, "item_metadata", found)
        self._structure = getattr(found, "tree", found)
        leaves: dict[LeafPath, Any] = {}
        _walk(self._structure, (), leaves)
        return leaves

    def read(self, key: LeafPath, group: list[LeafPath]) -> Any:
        """Return an array of a group as a tensor."""
        if key not in self._ready:
            self._ready = self.values(group)
        return _as_tensor(self._ready.pop(key), f"{self._folder}: {'.'.join(map(str, key))}")

    def values(self, keys: list[LeafPath]) -> dict[LeafPath, Any]:
        """Return values as Orbax restores them, arrays in host memory."""
        ocp, wanted = self._ocp, set(keys)
        in_host, as_it_is = ocp.RestoreArgs(restore_type=np.ndarray), ocp.RestoreArgs()
        item = _filled(self._structure, (), lambda key, _: 0 if key in wanted else ocp.PLACEHOLDER)
        args = _filled(self._structure, (), lambda _, leaf: in_host if _is_array(leaf) else as_it_is)
        what = ocp.args.PyTreeRestore(item=item, restore_args=args)
        restored = self._guarded(lambda: self._checkpointer.restore(self._folder.resolve(), args=what))
        leaves: dict[LeafPath, Any] = {}
        _walk(restored, (), leaves)
        return {key: leaves.get(key) for key in keys}

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Call Orbax, and return the result. Orbax does not document its errors.

        Raises:
            InvalidInputError: Orbax has raised an error.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about shardings: everything goes to host memory
                return call()
        except MemoryError:
            raise
        except Exception as error:
            detail = first_line(error)
            raise InvalidInputError(f"{self._folder}: Orbax cannot read it: {detail}; copy it again") from error


def _is_array(leaf: Any) -> bool:
    """Return whether the metadata of a leaf describes an array; other leaves are plain Python values."""
    return type(leaf).__name__ == "ArrayMetadata"


def _is_empty(node: Any) -> bool:
    """Return whether a node of a tree is a container with nothing in it."""
    return isinstance(node, dict | list | tuple) and not node


def _walk(node: Any, path: LeafPath, leaves: dict[LeafPath, Any]) -> None:
    """Note the leaves of nested dicts, lists and tuples by their paths. An empty one in another is a leaf."""
    if path and _is_empty(node):
        leaves[path] = node
    elif isinstance(node, dict):
        for key, child in node.items():
            _walk(child, (*path, str(key)), leaves)
    elif isinstance(node, list | tuple):
        for position, child in enumerate(node):
            _walk(child, (*path, position), leaves)
    else:
        leaves[path] = node


def _filled(node: Any, path: LeafPath, value_of: Callable[[LeafPath, Any], Any]) -> Any:
    """Return a tree of the same form with other leaves."""
    if isinstance(node, dict):
        return {key: _filled(child, (*path, str(key)), value_of) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [_filled(child, (*path, position), value_of) for position, child in enumerate(node)]
    return value_of(path, node)


def _as_tensor(value: Any, where: str) -> Any:
    """Return an array of NumPy or of ml_dtypes as a tensor with the same bits."""
    import torch

    array = np.ascontiguousarray(value).reshape(np.shape(value))
    name = array.dtype.name
    if name not in TORCH_DTYPES or array.dtype.byteorder == ">":
        raise InvalidInputError(f"{where}: has dtype {name}, which has no stored form; convert it before it is saved")
    bits = array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array
    return torch.from_numpy(bits.copy() if not bits.flags.writeable else bits).view(getattr(torch, name))
